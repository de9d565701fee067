/* Descriptors of the usage file, for locks that must outlive them: applications close descriptors that are not theirs. */
#ifndef VC_DESCRIPTOR_H
#define VC_DESCRIPTOR_H

#include <stdbool.h>
#include <stdint.h>

#define VC_PATH_BYTES 512

struct vc_usage_file {
    int descriptor; /* holds the slot's lock, together with a mapping; -1: none */
    uint64_t device; /* identity of the file: an application may close and reuse our descriptor */
    uint64_t inode;
    char path[VC_PATH_BYTES];
};

/* Keep a descriptor out of the low numbers that applications close, count or expect; returns its number now. */
int vc_descriptor_move_high(int descriptor);

/* Whether this number still leads to the usage file: an application may have closed it, and the number may be another's. */
bool vc_descriptor_is_usage(const struct vc_usage_file *file, int descriptor);

/* Open the usage file once more: a file description of its own, whose locks are its own. -1: it can't be reached. */
int vc_descriptor_open(const struct vc_usage_file *file);

/* Let the locks of this description live in a mapping too, which applications do not close and forked children do not get.
 * Returns the page, for munmap, or NULL. On overlayfs, which maps another file than it locks, it keeps nothing. */
void *vc_descriptor_pin(int descriptor);
void vc_descriptor_unpin(void *page);

/* Whether a mapping keeps the locks of this file. */
bool vc_descriptor_pins(int descriptor);

#endif
