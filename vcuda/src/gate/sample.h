/* Whether what was charged is what the card did, by samples: at moments that no program can foresee somebody looks whether it works for this process.
 *
 * What is charged between two marks follows from estimates; a program that shows short operations where it is measured and launches long ones where it is not is
 * found out by this alone. Arithmetic only.
 */
#ifndef VC_SAMPLE_H
#define VC_SAMPLE_H

#include <stdbool.h>
#include <stdint.h>

#include "region/abi.h"

/* What is known at one moment. */
struct vc_sample {
    uint64_t now_ns;
    int64_t charged_ns;  /* for what should have been done by now */
    uint64_t tenants_ns;  /* what other tenants had of the card while this process had work on it, ever */
    uint64_t siblings_ns; /* what the container's other processes had of it, whenever */
    uint64_t rate_ppm;    /* the limit, of a card's time */
    uint64_t launches, begins; /* that there were, and those of them that found the card idle */
    uint32_t siblings;   /* those of them that say they have work on the card now */
    bool busy;           /* the card has work of this process */
    bool held;           /* … or may have had, when it should have been looked at: nobody was let look */
    bool clear;          /* nobody else's work may be what it is busy with */
    bool leased;         /* … or others wait, and have none there while estimates are right: this container's lease has begun … */
    bool beside;         /* … or they launch side by side with it */
    bool predicted;      /* the card is thought to have work of this process */
    int64_t doubt;       /* vc_samples_hear: what the container's processes told together … */
    uint64_t all_until_ns, all_for_ns; /* … and what followed, where no tenant can write */
};

struct vc_samples {
    struct vc_sample before;
    bool paused;          /* nobody looked since, because nothing was launched for a while */
    int64_t unpaid_ns;    /* by how much what was seen exceeds what was charged … */
    int64_t doubt;        /* … and how little chance explains that (VC_SURE) */
    uint64_t spared_ns;   /* what of it was taken to be launches on their way, or chance, since there was the least doubt */
    int64_t late;         /* … and, while others waited, by how much it exceeds what was predicted */
    uint64_t believed_ns; /* what siblings may have had of what is seen next */
    uint64_t all_until_ns; /* until then everything is marked, because it did by too much */
    uint64_t all_for_ns;   /* … and for how long; by how much what was seen exceeded what was charged then: */
    int64_t excess_ns;
    uint64_t all_launches, all_scatter_us2;
    uint64_t launch_ns, known_ns; /* a launch is so long on its way to the card at most, and so long by what that told */
    bool launches_learnt;         /* … if it did */
    uint64_t doubtful_ns;         /* what launches may have hidden in what lies between */
    uint64_t more_ns, less_ns;    /* what was seen beyond what was charged in all, and what was charged beyond that, as often as it is doubted: told where no other process can change it */
};

enum {
    VC_SAMPLE_NS = 1000000, /* between two of them, on average */
    VC_SAMPLE_OFTEN_NS = 250000, /* … where something seems to be amiss: so the same is known after a quarter of the time */
    VC_SURE = 1000000, /* chance explains such a doubt about once in ten minutes */
    VC_SAMPLE_BEGIN_NS = 6000, /* a stream is not idle from the call on, while its kernel is on its way to an idle card */
};

/* One more of them. Returns what has to be charged. Everything is to be marked until `all_until_ns`, after too much of that. `container`: the same sums over
 * all processes of it, so that they do not begin anew with each, and until when and for how long one of them had all marked; NULL: there is no other. */
uint64_t vc_samples_add(struct vc_samples *samples, struct vc_card_usage *container, const struct vc_sample *sample);

/* How long it should be on average until the next one. */
uint64_t vc_samples_wait_ns(const struct vc_samples *samples, const struct vc_card_usage *container);

/* Whether processes of the container were found lately to do what nobody charged: a new one has all of its first seconds marked. */
bool vc_samples_suspect(uint64_t all_until_ns, uint64_t all_for_ns, uint64_t now_ns);

/* What the process in a slot told in all. */
struct vc_samples_told {
    uint64_t charged_ns, more_ns, less_ns;
    uint64_t before_ns; /* of what was charged: before it told anything of the others */
};
/* What it found since `last`, which becomes what it told; the next one in its slot begins anew. A sibling may tell in the place of one that is not there: to take off what others found it has to
 * tell as much that it was charged. */
int64_t vc_samples_found(struct vc_samples_told *last, struct vc_samples_told told);

/* The arbiter's: all processes of a container found so much more. Everything is to be marked until `all_until_ns`. */
void vc_samples_hear(struct vc_samples *all, uint64_t now_ns, int64_t found_ns, uint64_t rate_ppm);

/* Everything is to be marked until then, for whatever other reason. */
void vc_samples_mark_until(struct vc_samples *samples, uint64_t now_ns, uint64_t until_ns);

/* … for twice as long as the time before, if that is over; the container's other processes do so, too. */
void vc_samples_mark_for_longer(struct vc_samples *samples, struct vc_card_usage *container, uint64_t now_ns);

/* Nobody looks until something is launched again. */
void vc_samples_pause(struct vc_samples *samples);

#endif
