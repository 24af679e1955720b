/* ops/rope/cuda.c: the launch of the rotary kernel. This file must not call the driver. */

static bool te__rope_view_is_aligned(const te__rope_view *x) { return te__view_is_aligned(x->p, x->s | x->b | x->h); }

static te_result te__rope_plan(te__plan *p, const te__rope_kargs *a) {
    const int64_t tokens = (int64_t)a->batch * a->seq, heads = te__rope_heads(a);
    const bool alike = a->groups == 0 || a->whole || a->coded || (a->q.dt == a->k.dt && a->q.dt == a->v.dt);
    int64_t units; /* units of work of one token. A unit is what a thread rotates or copies at a time */
    te__launch *l;
    te__rope_kargs *k;
    if (tokens * heads * a->d == 0 || (a->whole == TE__ROPE_IN_PLACE && a->half == 0)) return TE_OK;
    l = te__plan_launch(p, "rope", "rope");
    k = TE__KARGS(p, l, te__rope_kargs);
    *k = *a;
    k->vector = a->d % 8 == 0 && a->half % 8 == 0 && te__rope_view_is_aligned(&a->packed) &&
                te__rope_view_is_aligned(&a->q) &&
                (a->coded || (te__rope_view_is_aligned(&a->k) && te__rope_view_is_aligned(&a->v)));
    units = heads * (a->d - a->half) / (k->vector ? 8 : 1);
    /* A block has enough tokens to give each thread 8 units of work. If the grid would then have fewer than 4 blocks
     * for each SM, a block has fewer tokens, but at least 2 units for each thread. The angles of a block take at most
     * 32 KB. */
    k->tokens = (int)te__max(2 * TE__ROPE_THREADS / units,
                             te__min(8 * TE__ROPE_THREADS / units, tokens / (4 * p->num_sms)));
    k->tokens = (int)te__max(1, te__min(k->tokens, (a->has_freqs ? 2048 : 4096) / te__max(a->half, 1)));
    if (te__div_up(tokens, k->tokens) > INT_MAX)
        return te__fail(p->te, TE_ERR_UNSUPPORTED, "rope: %lld tokens are more than a launch can have",
                        (long long)tokens);
    if (k->vector && !p->baseline && alike && a->packed.dt == a->q.dt) {
        te__launch_option(l, "X_DT", a->q.dt);
        te__launch_option(l, "X_VECTOR", 1);
        te__launch_option(l, "X_FREQS", a->has_freqs);
        te__launch_option(l, "X_CACHED", a->cached + a->coded);
    }
    te__launch_size(l, te__div_up(tokens, k->tokens), 1, 1, TE__ROPE_THREADS,
                    (a->has_freqs ? 16 : 8) * (int64_t)k->tokens * a->half);
    if (a->coded)
        return te__plan_why(p, "rotated on the way from the projection into the rows of the caches, as codes: a warp "
                               "for each row");
    if (a->cached) return te__plan_why(p, "rotated on the way from the projection into the rows of the caches");
    return te__plan_why(p, k->vector ? "eight channels a thread" : "general: one channel pair at a time");
}

static te_result te__cuda_plan_rope(te__plan *p, const te_op_rope_args *args) {
    te__rope_kargs a;
    te__rope_problem(&a, args);
    return te__rope_plan(p, &a);
}
/* Notes the rows of a cache that the operation writes, for kernels that read others early (ops/early.c). */
static void te__qkv_rope_note(te__plan *p, const te_op_qkv_rope_args *args) {
    te__cache_use use = TE_ZERO;
    if (!args->k_cache) return;
    use.k = args->k_cache;
    use.v = args->v_cache;
    use.k_factors = args->k_factors;
    use.v_factors = args->v_factors;
    use.start = args->cache_positions;
    use.table = args->page_table;
    use.sequences = te__numel(args->cache_positions);
    te__note_rows(p, &use);
}
static te_result te__cuda_plan_qkv_rope(te__plan *p, const te_op_qkv_rope_args *args) {
    te__rope_kargs a;
    te__qkv_rope_problem(&a, args, false);
    te__qkv_rope_note(p, args);
    return te__rope_plan(p, &a);
}
static te_result te__cuda_plan_qkv_rope_bwd(te__plan *p, const te_op_qkv_rope_bwd_args *args) {
    te_op_qkv_rope_args f = te__qkv_rope_forward_of(args);
    te__rope_kargs a;
    te__qkv_rope_problem(&a, &f, true);
    return te__rope_plan(p, &a);
}
