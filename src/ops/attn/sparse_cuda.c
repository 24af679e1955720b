/* ops/attn/sparse_cuda.c: chooses the kernels of sparse attention and their tiles. This file must not call the CUDA
 * driver. */

/* Returns a block's bytes of shared memory: eight heads of q and o (backward: q, dO and dQ), a tile of keys, and
 * scores. */
static int64_t te__sparse_shared(const te__sparse_attn_kargs *a, bool backward) {
    return 4 * (TE__SPARSE_ROWS * ((backward ? 2 : 1) * TE__ATTN_ROW(a->d) + TE__ATTN_ROW(a->d_v)) +
                (int64_t)a->tile * TE__ATTN_LANE_ROW(a->d) + (int64_t)TE__SPARSE_ROWS * a->tile);
}

static te__launch *te__sparse_launch(te__plan *p, const te__sparse_attn_kargs *a, const char *kernel, int64_t blocks,
                                     int threads, int64_t shared, bool formats) {
    te__launch *l = te__plan_launch(p, "attn", kernel);
    const bool alike = a->kv.dt == a->q.dt && a->o.dt == a->q.dt &&
                       (!a->d_o.dt || (a->d_o.dt == a->q.dt && a->dq.dt == a->q.dt && a->dkv.dt == a->q.dt));
    *TE__KARGS(p, l, te__sparse_attn_kargs) = *a;
    te__launch_size(l, blocks, 1, 1, threads, shared);
    if (formats && alike) te__launch_option(l, "X_DT", a->q.dt);
    return l;
}

/* Plans the forward pass, or the part of the backward pass that goes over queries (sparse_attn_query.cu). */
static te_result te__sparse_plan_queries(te__plan *p, te__sparse_attn_kargs *a, bool backward) {
    const int64_t blocks = (int64_t)a->batch * a->s_q * te__div_up(a->heads, TE__SPARSE_ROWS);
    if (blocks > INT_MAX)
        return te__fail(
            p->te, TE_ERR_UNSUPPORTED,
            "sparse attention: %d sequences of %d queries of %d heads are more blocks than a launch can have", a->batch,
            a->s_q, a->heads);
    a->tile = 32;
    if (te__sparse_shared(a, backward) > te__attn_shared_limit(p)) a->tile = 16;
    te__plan_why(p, "general: any format and stride, in f32; eight heads of a query share what is read of its keys");
    if (blocks)
        te__launch_option(
            te__sparse_launch(p, a, "sparse_attn_query", blocks, 128, te__sparse_shared(a, backward), true),
            "X_BACKWARD", backward);
    return TE_OK;
}

static te_result te__cuda_plan_sparse_attn_fwd(te__plan *p, const te_op_sparse_attn_fwd_args *args) {
    te__sparse_attn_kargs a = te__sparse_attn_problem(args);
    return te__sparse_plan_queries(p, &a, false);
}

/* Plans the gradient of the sinks by the kernel of dense attention: lse2 and delta have the same layout
 * in both. */
static void te__sparse_plan_sinks(te__plan *p, const te__sparse_attn_kargs *a, const te_tensor *dsinks) {
    te__launch *l = te__plan_launch(p, "attn", "attn_bwd_sink");
    te__attn_kargs *k = TE__KARGS(p, l, te__attn_kargs);
    k->batch = a->batch;
    k->heads = a->heads;
    k->s_q = k->s_pad = a->s_q;
    k->s_kv = 1;
    k->lse2 = a->lse2;
    k->delta = a->delta;
    k->x.on = 1;
    k->x.left = k->x.right = -1;
    k->x.softmax = (int)TE_SOFTMAX_LEARNABLE;
    k->x.sink = a->sinks;
    k->x.dsink = te__f32_data(dsinks);
    te__launch_blocks(l, a->heads, 256);
}

static te_result te__cuda_plan_sparse_attn_bwd(te__plan *p, const te_op_sparse_attn_bwd_args *args) {
    te__sparse_attn_kargs a = te__sparse_attn_problem_bwd(args);
    const int64_t rows = (int64_t)a.batch * a.heads * a.s_q, slots = (int64_t)a.batch * a.s_q * a.n,
                  keys = (int64_t)a.batch * a.s_kv;
    int64_t cursors;
    te_result r;
    a.chunks = (int)te__max(1, te__min(64, te__div_up(a.s_q, 32)));
    cursors = keys * a.chunks;
    a.lse2 = te__plan_floats(p, 2 * rows + cursors + keys + a.batch + slots + 1);
    if (!a.lse2) return p->result;
    a.delta = a.lse2 + rows;
    a.cursor = (int *)(void *)(a.delta + rows);
    a.start = a.cursor + cursors;
    a.list = a.start + keys + a.batch;
    r = te__sparse_plan_queries(p, &a, true);
    if (r == TE_OK && args->dsinks && a.heads) te__sparse_plan_sinks(p, &a, args->dsinks);
    if (r != TE_OK || keys == 0) return r;
    for (a.step = 0; a.step < 3; a.step++)
        te__sparse_launch(p, &a, "sparse_attn_list", a.step == 1 ? a.batch : (int64_t)a.batch * a.chunks, 256, 0,
                          false);
    te__sparse_launch(p, &a, "sparse_attn_bwd_dkv", keys, 256, 0, true);
    return TE_OK;
}
