/* cuda/device.c: a GPU as a device: plans each operation, then queues the plan. This file must not depend on which
 * operations exist. */

/* Plans one operation on te's GPU. If kernels of the plan are unavailable, plans again with the embedded kernels
 * only. */
static te_result te__cuda_plan(te_ctx *te, te__plan *p, const te__op_info *op, const void *args) {
    te_result result;
    te__plan_begin(p, te);
    te__cuda_plan_facts(te, p);
    result = op->plan(p, args);
    if (result == TE_OK && p->result == TE_OK && te__cuda_plan_lacks_kernels(te, p)) {
        te__plan_end(p);
        te__plan_begin(p, te);
        te__cuda_plan_facts(te, p);
        p->baseline = true;
        p->hopper = false;
        result = op->plan(p, args);
    }
    return result == TE_OK ? p->result : result;
}

static te_result te__cuda_run(te_ctx *te, const te__op_info *op, const void *args) {
    te__plan plan;
    bool pushed, again;
    te_result result = te__cuda_enter(te, &pushed); /* planning may encode tensor maps, which needs a CUcontext */
    if (result != TE_OK) return result;
    result = te__cuda_plan(te, &plan, op, args);
    if (result == TE_OK) result = te->warming ? te__cuda_note(te, &plan) : te__cuda_execute(te, &plan);
    again = te->warming && plan.at_once;
    te__plan_end(&plan);
    if (result == TE_OK && again) { /* collectives do not run in a warm-up, but later they may run beside `op` */
        te->flights++;
        result = te__cuda_plan(te, &plan, op, args);
        if (result == TE_OK) result = te__cuda_note(te, &plan);
        te__plan_end(&plan);
        te->flights--;
    }
    te__cuda_leave(pushed);
    return result;
}

static const te__device te__cuda_device = {"cuda",
                                           te__cuda_mem_alloc,
                                           te__cuda_mem_release,
                                           te__cuda_upload,
                                           te__cuda_download,
                                           te__cuda_clear,
                                           te__cuda_synchronize,
                                           te__cuda_memory_info,
                                           te__cuda_word,
                                           te__cuda_run,
                                           te__cuda_enter,
                                           te__cuda_leave,
                                           te__cuda_settle,
                                           te__cuda_warm,
                                           te__cuda_close,
                                           te__cuda_capture_begin,
                                           te__cuda_capture_end,
                                           te__cuda_graph_launch,
                                           te__cuda_graph_close,
                                           te__cuda_stream_create,
                                           te__cuda_stream_destroy,
                                           te__cuda_stream_synchronize,
                                           te__cuda_stream_wait,
                                           te__cuda_event_create,
                                           te__cuda_event_destroy,
                                           te__cuda_event_record,
                                           te__cuda_event_wait,
                                           te__cuda_event_passed,
                                           te__cuda_transfer,
                                           te__cuda_pinned_alloc,
                                           te__cuda_pinned_release};

/* Opens GPU number `ordinal` as the context's device, or fails. */
static te_result te__cuda_open_device(te_ctx *te, int ordinal, const te_ctx_desc *desc) {
    snprintf(te->device_name, sizeof(te->device_name), "cuda:%d", ordinal);
    te->device = &te__cuda_device;
    return te__cuda_open(te, ordinal, desc->cu_context, desc->cu_stream);
}
