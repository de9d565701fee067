/* Whether the card still has what a stopped process left there: asked of the card, at moments that no program can foresee.
 *
 * Nobody sees the work of a stopped process end, but while it lasts nothing else stays on the card. So a sibling's helper, while its process has nothing there, records an event: once that
 * is reached the card has come to this process, and goes back to whatever else there is. A second one then waits for a slice if that is long. What passes between two such
 * moments is charged where the card was found busy, and not where it was free: on average that is what it did, whatever a program does in between. Arithmetic only.
 */
#ifndef VC_PROBE_H
#define VC_PROBE_H

#include <stdbool.h>
#include <stdint.h>

enum {
    VC_PROBE_LEAST_NS = 10000000,  /* between two of them, and up to … */
    VC_PROBE_SPREAD_NS = 20000000, /* … so much more, at random */
    VC_PROBE_AGAIN_NS = 3000000,   /* … where one told nothing: no sooner, or launches would wait for them most of the time */
    VC_PROBE_LATE_NS = 1000000,    /* a card that goes to something long keeps it for longer: a slice; to short work of a few siblings not */
    VC_PROBE_COMES_NS = 20000000,  /* the card comes to this process within that, or it can't be asked now */
    VC_PROBE_HOLDS_NS = 3000000,   /* so long launches wait for one, so that the process has nothing on the card */
    VC_PROBE_STANDS_NS = 50000000, /* somebody stood still so lately that it may do so still */
};

/* Written by the helper, but for `stands_ns`; others read it without a lock. */
struct vc_probe {
    uint64_t stands_ns; /* when somebody was last seen to stand still, with work on the card */
    uint64_t due_ns;    /* when to ask; 0: not planned */
    uint64_t asked_ns;  /* … it was asked then, and has not answered; 0: it has */
    bool come;          /* … and had come to this process before */
    uint64_t known_ns;  /* what passed until then is known to be charged or free */
    uint64_t dice;
};

/* What follows from one that was asked. */
enum vc_probe_answer { VC_PROBE_WAITS, VC_PROBE_ASKS_AGAIN, VC_PROBE_FREE, VC_PROBE_BUSY, VC_PROBE_SAYS_NOTHING };

/* Whether launches wait for a moment: while the card is asked, and before that those that would not find it idle. */
bool vc_probe_holds(const struct vc_probe *probe, uint64_t now_ns, bool idle);

/* The helper's: when to ask next, planned at the first call; UINT64_MAX: nobody stands still. */
uint64_t vc_probe_plan(struct vc_probe *probe, uint64_t now_ns);
/* … an event was recorded, first or again. */
void vc_probe_ask(struct vc_probe *probe, uint64_t now_ns, bool again);
/* … it was reached by now, or not. `explained`: something else than what was left may keep the card busy, or may have it. */
enum vc_probe_answer vc_probe_answer(struct vc_probe *probe, uint64_t now_ns, bool reached, bool explained);

#endif
