/* The model's arbiter: the real plan, of what the tenants show and tell; see gate_model.h. */
#include "gate_model_parts.h"

/* What a tenant's processes tell of their charges by what they lock. */
static uint64_t told(struct model *model, unsigned tenant)
{
    uint64_t ns = 0;
    for (unsigned p = 0; p < model->process_count; p++) {
        struct process *process = &model->processes[p];
        if (process->tenant == tenant && process->gate == &process->own_gate)
            ns += vc_gate_tell(process->gate, model->now) / 1000000 * 1000000;
    }
    return ns;
}

void model_arbiter_step(struct model *model)
{
    if (!model->arbiter || model->now < model->decide_at)
        return;
    model->limits.arbiter_heartbeat_ns = model->now;
    for (unsigned i = 0; i < model->tenant_count; i++) {
        const struct vc_card_usage *usage = model->tenants[i].usage;
        const struct vc_card_limit *limit = &model->limits.cards[i];
        vc_tenant_resize(&model->plan_tenants[i], limit->cores, limit->core_limit);
        vc_tenant_prioritise(&model->plan_tenants[i], limit->priority);
        model->plan_tenants[i].seen = (struct vc_observation){
            .gpu_ns = usage->gpu_ns,
            .told_ns = told(model, i),
            .credit_ns = usage->credit_ns,
            .credit_updated_ns = usage->credit_updated_ns,
            .refill_ns = usage->refill_ns,
            .waiting_until_ns = usage->waiting_until_ns,
            .predicted_finish_ns = usage->predicted_finish_ns,
            .began_ns = usage->began_ns,
        };
    }
    model->decide_at = vc_plan_decide(&model->plan, model->now) + model->timing.late_ns;
    for (unsigned i = 0; i < model->tenant_count; i++) {
        struct vc_card_limit *limit = &model->limits.cards[i];
        const struct vc_tenant *plan = &model->plan_tenants[i];
        limit->granted_ppm = plan->granted_ppm;
        limit->closed_until_ns = plan->closed_until_ns;
        limit->told_ns = plan->seen.told_ns;
        limit->saved_ns = plan->saved_ns;
        limit->others_gpu_ns = plan->others_gpu_ns;
        limit->others_active_ns = plan->others_active_ns;
        limit->lease_start_ns = plan->lease_start_ns;
        limit->lease_clock_ns = plan->lease_clock_ns;
        limit->lease_end_ns = plan->lease_end_ns;
        limit->lease_sequence = plan->lease_sequence;
        for (unsigned p = 0; plan->wake && p < model->process_count; p++) {
            struct process *process = &model->processes[p];
            if (process->tenant == i && process->blocked && process->why != VC_GATE_OUTSTANDING &&
                process->ready_ns > model->now + model->timing.wake_ns)
                process->ready_ns = model->now + model->timing.wake_ns;
        }
    }
}
