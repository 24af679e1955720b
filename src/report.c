/* report.c: te_warmup, te_explain, te_query_supported, te_jit_get_stats, and te_report. Other files add lines of their
 * own to the report. */

/* The data that this file keeps in a context: the random state that te_warmup_end restores. */
static const te__slot te__report_slot = {sizeof(te__rng_state)};
static te__rng_state *te__warm_rng(const te_ctx *te) { return (te__rng_state *)te__slot_of(te, &te__report_slot); }
static const te__room te__report_room = TE__ROOM(&te__report_slot, NULL, NULL);

/* ---- warm-up ---- */

TE_API te_result te_warmup_begin(te_ctx *te) {
    if (!te) return TE_ERR_STATE;
    if (te->warming) return te__fail(te, TE_ERR_STATE, "te_warmup_begin: a warm-up is under way already");
    if (te__refuse_hook(te, "te_warmup_begin") != TE_OK) return TE_ERR_STATE;
    if (te->capture) return te__refuse_capture(te, "te_warmup_begin", "warm up before te_graph_begin");
    te->warming = true;
    *te__warm_rng(te) = te__rng_now(te);
    return TE_OK;
}

TE_API te_result te_warmup_end(te_ctx *te) {
    int i;
    if (!te) return TE_ERR_STATE;
    if (!te->warming) return te__fail(te, TE_ERR_STATE, "te_warmup_end without te_warmup_begin");
    if (te__refuse_hook(te, "te_warmup_end") != TE_OK) return TE_ERR_STATE;
    te->warming = false;
    te__rng_back(te, *te__warm_rng(te));
    for (i = 0; i < te->tape.num_warm_vars; i++) {
        te_tensor_release(te->tape.warm_vars[i]->grad);
        te->tape.warm_vars[i]->grad = NULL;
        te__var_release(te, te->tape.warm_vars[i]);
    }
    te->tape.num_warm_vars = 0;
    return te->error_code == TE_OK && te->device->warm ? te->device->warm(te) : te->error_code;
}

TE_API te_result te_warmup(te_module *m, te_dtype dtype, int ndim, const int64_t *shape) {
    te_ctx *te;
    te_tensor *x, *y;
    te_result result;
    if (!m) return TE_ERR_STATE;
    te = m->te;
    result = te_warmup_begin(te);
    if (result != TE_OK) return result;
    te_scope_begin(te);
    x = te_tensor_empty(te, dtype, ndim, shape);
    if (x && te__is_float(dtype)) te_tensor_set_requires_grad(x, true);
    y = te_forward(m, x);
    if (y && y->requires_grad && te_grad_enabled(te)) te_backward_from(y, te__empty_like(y, y->dtype));
    te_scope_end(te);
    return te_warmup_end(te);
}

/* ---- explanations ---- */

/* Returns the number in the name of a GPU architecture, such as 90 for "sm_90", "sm_90a" or "sm_90f". Returns 0 below
 * 80 and for other text. */
static int te__arch_number(const char *name) {
    char *end;
    long n;
    if (strncmp(name, "sm_", 3) != 0) return 0;
    n = strtol(name + 3, &end, 10);
    if (end == name + 3 || (*end && strcmp(end, "a") != 0 && strcmp(end, "f") != 0)) return 0;
    return n >= 80 && n < 1000 ? (int)n : 0;
}
TE_API te_result te_explain(te_ctx *te, te_op op, const void *args, const char *device, te_explanation *out) {
    te__any_args copy;
    te__args l;
    te_result result;
    int sm = 0;
    if (!te) return TE_ERR_STATE;
    if ((int)op <= 0 || op >= TE_OP_COUNT || !args || !out)
        return te__fail(te, TE_ERR_INVALID, "te_explain: an operation, its args and a place for the answer are needed");
    memset(out, 0, sizeof(*out));
    if (device && strcmp(device, "cpu") != 0 && (sm = te__arch_number(device)) == 0)
        return te__fail(te, TE_ERR_INVALID, "te_explain: device \"%s\" is neither \"cpu\" nor \"sm_80\" or higher",
                        device);
    memcpy(&copy, args, te__ops[op].args_size);
    result = te__check_args(te, &l, op, &copy, false);
    if (result == TE_OK && !sm && (device || !te_ctx_is_cuda(te))) {
        out->supported = out->native = out->deterministic = true;
        snprintf(out->kernels, sizeof(out->kernels), "%s/: the reference in C", te_query_family(op));
        snprintf(out->why, sizeof(out->why),
                 "The CPU backend is the reference: every operation, every format, any shape.");
        return TE_OK;
    }
    if (result == TE_OK) result = te__cuda_explain(te, &te__ops[op], &copy, sm, out);
    out->supported = result == TE_OK;
    if (result != TE_OK) snprintf(out->why, sizeof(out->why), "%s", te_error(te));
    return result;
}

TE_API bool te_query_supported(te_ctx *te, te_op op, const void *args) {
    te_explanation e;
    bool pending = !te_ok(te), failed = te && te->capture && te->capture->failed, step_failed = te && te->step_failed,
         supported = te_explain(te, op, args, NULL, &e) == TE_OK;
    if (!te) return false;
    if (!supported && !pending) te__forget_error(te); /* the answer "no" must leave no error in the context, and must
                                                       * not make the current training step fail */
    te->step_failed = step_failed;
    if (te->capture) te->capture->failed = failed;
    return supported;
}

TE_API te_jit_stats te_jit_get_stats(te_ctx *te) {
    te_jit_stats none = TE_ZERO;
    te__settle(te);
    return te ? te->jit_stats : none;
}

/* ---- the report ---- */

TE_API size_t te_report(te_ctx *te, char *buffer, size_t size) {
    te__report_text t;
    int i;
    t.buffer = buffer;
    t.size = buffer ? size : 0;
    t.used = 0;
    if (t.size) buffer[0] = 0;
    te__say(&t, "te.h %d.%d.%d, %d processors\n", TE_VERSION_MAJOR, TE_VERSION_MINOR, TE_VERSION_PATCH,
            te__cpu_count());
    te__say(&t, "arithmetic: FLT_EVAL_METHOD %d%s\n", (int)FLT_EVAL_METHOD,
            TE__FLOATS_ARE_WIDE ? ": numbers are kept wider than their type, so the CPU backend's codes are not those "
                                  "of other machines (x86: -msse2 -mfpmath=sse)"
                                : "");
    te__cuda_report(&t);
    te__dist_report(&t);
    if (te) {
        te_memory_stats m = te_memory_get_stats(te);
        const te_jit_stats *j = &te->jit_stats;
        te__say(&t, "context: %s, %d CPU threads\n", te->device_name, te->cpu_threads);
        te__say(&t,
                "memory: %.1f MiB in tensors (at most %.1f), %.1f MiB taken (at most %.1f), %llu requests, %llu to the "
                "device\n",
                (double)m.allocated / 1048576.0, (double)m.peak_allocated / 1048576.0, (double)m.reserved / 1048576.0,
                (double)m.peak_reserved / 1048576.0, (unsigned long long)m.allocs, (unsigned long long)m.device_allocs);
        te__say(&t, "kernels: %d loaded: %d compiled in %.2f s, %d from the cache, %d from PTX; %llu launches\n",
                j->loaded, j->compiled, j->compile_seconds, j->from_cache, j->from_ptx,
                (unsigned long long)j->launches);
        for (i = 0; i < te->num_rooms; i++)
            if (te->rooms[i]->report) te->rooms[i]->report(te, &t);
        if (j->cache_damaged) te__say(&t, "cache: %d damaged entries were replaced\n", j->cache_damaged);
        if (te->error_code != TE_OK) te__say(&t, "error: %s\n", te_error(te));
    }
    return t.used;
}
