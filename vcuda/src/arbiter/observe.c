/* What tenants say, bounded: charges, credit, predicted finishes. */
#include "arbiter/observe.h"

#include "arbiter/divide.h"
#include "gate/bucket.h"

/* No tenant can have been charged, nor have predicted, more than this between two looks. */
static const uint64_t CHARGE_BOUND_NS = UINT64_C(10000000000);
/* Refunds correct estimates: never more than was charged before, so that a counter that runs backwards gains nothing. */
static const uint64_t REFUND_BOUND_NS = UINT64_C(10000000000);
static const uint64_t FINISH_BOUND_NS = UINT64_C(2000000000);
static const uint64_t FINISH_SLACK_NS = 1000000;
/* So much beyond its bucket a tenant may be by the arbiter's account: what is on the card is settled late, and seen later still. */
static const int64_t OVERDRAFT_NS = 2 * VC_BUCKET_NS;
/* Waiting for so much longer than others' slices says that the card does not slice; it is remembered for a while. */
static const uint64_t UNCUT_SLACK_NS = 1500000;
static const uint64_t BEHIND_NS = 5000000;
static const uint64_t UNCUT_MEMORY_NS = UINT64_C(10000000000);
/* A helper that runs says sooner that the work of its process is done, or until when it lasts. */
static const uint64_t STILL_AFTER_NS = 3000000;
/* Who only says so is believed so far: what a stopped process had is charged to its container, but later, and none may be charged more of it than its limit pays in such a time. */
static const uint64_t STILL_BELIEVED_NS = 1000000000, STILL_PAID_WITHIN = 3;

static int64_t charge_since_last_look(struct vc_tenant *tenant)
{
    if (!tenant->known) {
        tenant->known = true;
        tenant->last_gpu_ns = tenant->seen.gpu_ns;
        tenant->last_told_ns = tenant->seen.told_ns;
        tenant->last_stood_ns = tenant->seen.stood_ns;
        return 0;
    }
    int64_t delta = (int64_t)(tenant->seen.gpu_ns - tenant->last_gpu_ns);
    tenant->last_gpu_ns = tenant->seen.gpu_ns;
    if (delta > (int64_t)CHARGE_BOUND_NS)
        delta = (int64_t)CHARGE_BOUND_NS;
    if (delta < -tenant->refundable_ns)
        delta = -tenant->refundable_ns;
    tenant->refundable_ns += delta;
    if (tenant->refundable_ns > (int64_t)REFUND_BOUND_NS)
        tenant->refundable_ns = (int64_t)REFUND_BOUND_NS;
    return delta;
}

/* Charged before it is filled: nobody knows when since the last look it was. Returns for how long it is closed. */
static uint64_t pay(int64_t *account_ns, uint32_t rate_ppm, uint64_t elapsed_ns, int64_t charged, int64_t saved_ns, int64_t overdraft_ns)
{
    *account_ns -= charged;
    if (*account_ns < -VC_CHARGE_LIMIT_NS)
        *account_ns = -VC_CHARGE_LIMIT_NS;
    *account_ns += (int64_t)(vc_earlier(elapsed_ns, 2 * VC_CHARGE_LIMIT_NS / rate_ppm * VC_PPM) * rate_ppm / VC_PPM);
    if (*account_ns > saved_ns)
        *account_ns = saved_ns;
    return vc_bucket_wait_ns(*account_ns, -overdraft_ns, rate_ppm);
}

/* An honest tenant stops itself first, at no credit. */
static void keep_accounts(struct vc_tenant *tenant, uint64_t now_ns, uint64_t elapsed_ns, int64_t charged)
{
    uint32_t rate = tenant->core_limit * VC_PPM_PER_CORE;
    int64_t saved = (int64_t)tenant->saved_ns;
    uint64_t told = tenant->seen.told_ns - tenant->last_told_ns; /* it only ever grows */
    tenant->last_told_ns = tenant->seen.told_ns;
    uint64_t closed_for = pay(&tenant->account_ns, rate, elapsed_ns, charged, VC_BUCKET_NS + saved, OVERDRAFT_NS);
    int64_t told_ns = (int64_t)vc_earlier(told, CHARGE_BOUND_NS) + tenant->look_stood_ns;
    closed_for = vc_later(closed_for, pay(&tenant->told_account_ns, rate, elapsed_ns, told_ns, VC_TOLD_SAVED_NS + saved, OVERDRAFT_NS));
    tenant->closed_until_ns = closed_for ? now_ns + closed_for : 0;
}

/* A look may find it between two operations. */
static const uint64_t ACTIVE_LATELY_NS = 10000000;

static bool was_active(const struct vc_tenant *tenant, uint64_t now_ns)
{
    return tenant->active_ns != 0 && now_ns <= tenant->active_ns + ACTIVE_LATELY_NS;
}

/* What a tenant owes the others, for each hundredth of the card that they have. */
static double owed_of_one_part(const struct vc_tenant *tenant, double parts, uint64_t now_ns)
{
    double others = parts - (was_active(tenant, now_ns) ? tenant->cores : 0);
    int64_t account = tenant->told_account_ns < tenant->account_ns ? tenant->told_account_ns : tenant->account_ns;
    return account < 0 && others > 0 ? (double)-account / others : 0;
}

/* Who has taken more than its limit pays by standing still. That time belongs to those who had less meanwhile: a bucket of 10 ms would have lost
 * what flowed in. Nobody gets more than its limit over the time; who is idle saves up nothing more. */
static void let_save(struct vc_card_plan *plan, uint64_t now_ns)
{
    double parts = 0, owed = 0;
    for (unsigned i = 0; i < plan->count; i++)
        parts += was_active(&plan->tenants[i], now_ns) ? plan->tenants[i].cores : 0;
    for (unsigned i = 0; i < plan->count; i++)
        owed += owed_of_one_part(&plan->tenants[i], parts, now_ns);
    for (unsigned i = 0; i < plan->count; i++) {
        struct vc_tenant *tenant = &plan->tenants[i];
        double ns = tenant->cores * (owed - owed_of_one_part(tenant, parts, now_ns));
        uint64_t saved = ns < VC_SAVED_NS ? (uint64_t)(ns < 0 ? 0 : ns) : VC_SAVED_NS;
        tenant->saved_ns = was_active(tenant, now_ns) ? saved : vc_earlier(saved, tenant->saved_ns);
    }
}

/* The bucket as the tenant will see it at its next look; in debt, also when it will have refilled. */
static void judge_credit(struct vc_tenant *tenant, uint64_t now_ns)
{
    const struct vc_observation *seen = &tenant->seen;
    uint32_t rate = tenant->core_limit * VC_PPM_PER_CORE;
    int64_t credit = seen->credit_ns;
    if (credit < -VC_CHARGE_LIMIT_NS)
        credit = -VC_CHARGE_LIMIT_NS;
    int64_t most = VC_BUCKET_NS + (int64_t)tenant->saved_ns;
    if (credit > most) /* no bucket holds more, whatever a tenant writes */
        credit = most;
    uint64_t elapsed = now_ns > seen->credit_updated_ns ? now_ns - seen->credit_updated_ns : 0;
    elapsed = vc_earlier(elapsed, CHARGE_BOUND_NS);
    credit += (int64_t)(elapsed * rate / VC_PPM);
    int64_t needed = seen->refill_ns < 1 ? 1 : seen->refill_ns > VC_CHUNK_NS ? VC_CHUNK_NS : seen->refill_ns;
    if (!tenant->waiting)
        needed = 1;
    uint64_t wait = vc_bucket_wait_ns(credit, needed, rate);
    if (tenant->closed_until_ns > now_ns + wait)
        wait = tenant->closed_until_ns - now_ns;
    tenant->in_credit = wait == 0;
    tenant->credit_at_ns = now_ns + wait;
}

/* What a tenant predicts is believed as far as it was charged for it: who claims more work than that pays for it. */
static uint64_t believed_finish(const struct vc_tenant *tenant, uint64_t now_ns, int64_t charged)
{
    uint64_t paid = vc_later(now_ns, tenant->finish_ns) + (charged > 0 ? (uint64_t)charged : 0) + FINISH_SLACK_NS;
    return vc_earlier(tenant->seen.predicted_finish_ns, vc_earlier(paid, now_ns + FINISH_BOUND_NS));
}

static bool was_lately(uint64_t said, uint64_t kind, uint64_t now_ns)
{
    uint64_t then = said & ~kind;
    return said & kind && then <= now_ns && now_ns - then < BEHIND_NS;
}

/* A helper says so at each look, which it takes every 0.2 ms; what it has not said for long is over. */
static bool is_behind(const struct vc_tenant *tenant, uint64_t now_ns)
{
    return was_lately(tenant->seen.began_ns, VC_BEHIND, now_ns);
}

bool vc_plan_others_behind(const struct vc_card_plan *plan, unsigned index, uint64_t now_ns)
{
    bool behind = false;
    for (unsigned i = 0; i < plan->count; i++)
        behind = behind || (i != index && plan->tenants[i].behind_ns != 0 && now_ns - plan->tenants[i].behind_ns < BEHIND_NS);
    return behind;
}

/* What was charged since the last look was there in between, though it may be done. */
static bool had_work(const struct vc_tenant *tenant, uint64_t now_ns)
{
    return tenant->still || tenant->look_charged_ns > 0 || on_card(tenant, now_ns);
}

/* What the file says nothing of siblings don't charge, but the arbiter does, and charges it back: believed as what they charge is. */
static int64_t unsaid_charge(struct vc_tenant *tenant)
{
    int64_t ns = tenant->look_stood_ns;
    if (ns > 0)
        ns = tenant->seen.hides ? ns : 0;
    else
        ns = -ns < tenant->unsaid_charged_ns ? ns : -tenant->unsaid_charged_ns;
    tenant->unsaid_charged_ns += ns;
    return ns;
}

static void look_for_stopped(struct vc_tenant *tenant, uint64_t now_ns, int64_t charged)
{
    bool untold = tenant->seen.predicted_finish_ns < now_ns && was_lately(tenant->seen.began_ns, VC_UNTOLD, now_ns);
    bool silent = untold || (!is_behind(tenant, now_ns) && tenant->seen.predicted_finish_ns + STILL_AFTER_NS < now_ns);
    uint64_t believed = vc_earlier(STILL_BELIEVED_NS, STILL_PAID_WITHIN * STILL_BELIEVED_NS * tenant->core_limit / 100);
    if (tenant->seen.hides)
        tenant->unsaid_ns = now_ns;
    tenant->still = ((tenant->seen.open != 0 && silent) || tenant->seen.hides) && tenant->still_ns < believed;
    if (tenant->still)
        tenant->stopped_ns = now_ns;
    else
        tenant->beside_still_ns = 0;
    /* What is charged back it did not have, though others were not charged for it. */
    tenant->still_ns = charged < 0 ? vc_earlier(tenant->still_ns + (uint64_t)-charged, 2 * STILL_BELIEVED_NS) : tenant->still_ns - vc_earlier(tenant->still_ns, (uint64_t)charged);
}

/* A card that slices lets everybody begin after one slice of each of the others, whatever they run. Judged by when the work began, not
 * by when its helper looked: that may be late on a busy machine. */
static void look_for_uncut_kernels(struct vc_card_plan *plan, uint64_t now_ns)
{
    unsigned present = 0;
    for (unsigned i = 0; i < plan->count; i++) { /* who waits may have a slice, too, while another has none any more */
        const struct vc_tenant *tenant = &plan->tenants[i];
        present += tenant->seen.open > 1 ? tenant->seen.open : tenant->active;
    }
    for (unsigned i = 0; i < plan->count; i++) {
        struct vc_tenant *tenant = &plan->tenants[i];
        bool waits = tenant->seen.began_ns & VC_NOT_BEGUN, behind = tenant->seen.began_ns & (VC_BEHIND | VC_UNTOLD);
        if (!waits || tenant->finish_ns <= now_ns) {
            /* What began since the last look may have waited behind another that was not seen to begin. */
            uint64_t began = vc_earlier(tenant->seen.began_ns, tenant->queued_until_ns);
            uint64_t slices = tenant->queued_behind * (uint64_t)VC_CARD_SLICE_NS;
            if (tenant->queued_since_ns != 0 && !waits && !behind && slices != 0 && began > tenant->queued_since_ns + slices + UNCUT_SLACK_NS)
                tenant->uncut_until_ns = now_ns + UNCUT_MEMORY_NS;
            tenant->queued_since_ns = 0;
            tenant->queued_behind = 0;
            continue;
        }
        uint64_t since = tenant->seen.began_ns & ~VC_NOT_BEGUN;
        bool another = since > tenant->queued_since_ns && since <= now_ns; /* what was seen to wait before has begun meanwhile */
        if (tenant->queued_since_ns == 0 || another) {
            tenant->queued_since_ns = now_ns;
            tenant->queued_behind = 0;
        }
        tenant->queued_until_ns = now_ns;
        tenant->queued_behind = present - 1 > tenant->queued_behind ? present - 1 : tenant->queued_behind;
    }
}

/* What others launched before the lease began may last for longer than was predicted then: until now the holder had the card with them. */
static void look_for_work_that_runs_on(struct vc_card_plan *plan, uint64_t now_ns)
{
    for (unsigned i = 0; plan->holder >= 0 && !plan->together && i < plan->count; i++) {
        const struct vc_tenant *tenant = &plan->tenants[i];
        if ((int)i != plan->holder && tenant->finish_ns > now_ns && now_ns < tenant->charged_at_ns + BEHIND_NS)
            plan->held_from_ns = vc_later(plan->held_from_ns, now_ns);
    }
}

void vc_plan_observe(struct vc_card_plan *plan, uint64_t now_ns)
{
    unsigned busy = 0, still = 0;
    uint64_t elapsed = plan->looked_ns != 0 && now_ns > plan->looked_ns ? now_ns - plan->looked_ns : 0;
    for (unsigned i = 0; i < plan->count; i++) {
        struct vc_tenant *tenant = &plan->tenants[i];
        int64_t charged = charge_since_last_look(tenant);
        if (!plan->together) /* what nobody else could have used is not held against anybody */
            tenant->virtual_ns += (double)charged / share(tenant);
        tenant->look_stood_ns = tenant->seen.stood_ns - tenant->last_stood_ns;
        tenant->last_stood_ns = tenant->seen.stood_ns;
        tenant->lease_charged_ns += charged;
        tenant->look_charged_ns = charged;
        tenant->charged_at_ns = charged > 0 ? now_ns : tenant->charged_at_ns;
        tenant->paid_until_ns = (uint64_t)((int64_t)vc_later(tenant->paid_until_ns, now_ns) + charged);
        vc_plan_note_charged(tenant, charged, vc_earlier(tenant->seen.told_ns - tenant->last_told_ns, CHARGE_BOUND_NS));
        tenant->waiting = tenant->seen.waiting_until_ns > now_ns;
        tenant->finish_ns = believed_finish(tenant, now_ns, charged);
        look_for_stopped(tenant, now_ns, charged + unsaid_charge(tenant));
        if (is_behind(tenant, now_ns))
            tenant->behind_ns = now_ns;
        tenant->left = !tenant->waiting && tenant->seen.refill_ns == VC_HAS_LEFT && tenant->finish_ns <= now_ns;
        tenant->active = tenant->waiting || (on_card(tenant, now_ns) && !tenant->left);
        tenant->active_ns = tenant->active ? now_ns : tenant->active_ns;
        busy += had_work(tenant, now_ns);
        still += tenant->still;
        keep_accounts(tenant, now_ns, elapsed, charged);
    }
    let_save(plan, now_ns);
    for (unsigned i = 0; i < plan->count; i++) {
        struct vc_tenant *tenant = &plan->tenants[i];
        judge_credit(tenant, now_ns);
        if (busy > had_work(tenant, now_ns) || vc_plan_others_behind(plan, i, now_ns))
            tenant->others_active_ns = now_ns;
        if (still > tenant->still)
            tenant->others_still_ns = now_ns;
    }
    look_for_uncut_kernels(plan, now_ns);
    look_for_work_that_runs_on(plan, now_ns);
    if (plan->looked_ns != 0)
        vc_plan_divide(plan, now_ns);
    plan->looked_ns = now_ns;
}
