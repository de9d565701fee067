/* The two files of a region on disk: making them, changing the limits, checking them before anything is mapped. */
#ifndef VC_FILE_H
#define VC_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "region/abi.h"

#define VC_ERROR_BYTES 512

/* Why something failed, for people: names the file, the reason and the way out. */
struct vc_error {
    char text[VC_ERROR_BYTES];
};

/* Fill *error (may be NULL); always returns -1. */
int vc_fail(struct vc_error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Make both files, or none. Pre: no limits exist (an existing region is an error: running processes may have it mapped); a
 * usage without limits is what a killed creation left, and is replaced.
 * limits gets mode 0444, usage 0666 with all its blocks allocated. Returns 0, or -1 with *error. */
int vc_files_create(const char *limits_path, const char *usage_path, const struct vc_card_limit *cards, uint32_t count,
                    struct vc_error *error);

/* Replace the limit fields of all cards in place, under the file's seqlock; serialised among writers by flock, for which it waits
 * at most 50 ms. The cards' identity and order must be those of the file. The arbiter's fields and the overhead
 * (vc_overhead.h) stay. Returns 0, or -1 with *error. */
int vc_limits_update(const char *limits_path, const struct vc_card_limit *cards, uint32_t count, struct vc_error *error);

/* Refuse all GPU memory to a container, or no longer, whatever its limits say; its processes see it at their next allocation.
 * Returns 0, or -1 with *error. */
int vc_limits_refuse(const char *limits_path, bool refused, struct vc_error *error);

/* Keep other writers of the limits away: this process's until vc_limits_unlock, others until the descriptor is closed. Of others it
 * gives up after 50 ms, because a tenant can hold the lock too. */
void vc_limits_lock(int descriptor);
void vc_limits_unlock(void);

/* Open and check a file of the given kind (VC_KIND_*), with `flags` for open(2). On success returns a descriptor and
 * the header; on failure -1 with *error and errno = the reason (ENOENT: there is no such file, EILSEQ: damaged). */
int vc_file_open(const char *path, uint32_t kind, int flags, struct vc_header *header, struct vc_error *error);

/* Read a consistent copy of the limits without mapping them. Returns 0, or -1 with *error. */
int vc_limits_copy(const char *limits_path, struct vc_limits *copy, struct vc_error *error);

/* Whether the cards are counted and identified. Impossible compute limits do not make a file unusable for a tenant: the
 * gate then holds the guaranteed share; they are refused where a region is written. */
bool vc_limits_valid(const struct vc_limits *limits, struct vc_error *error);

/* Map a limits file for writing the grant fields (the arbiter). Returns the mapping of VC_LIMITS_FILE_BYTES, or NULL
 * with *error. Unmap with munmap. */
struct vc_limits *vc_limits_map_writable(const char *limits_path, struct vc_error *error);

#endif
