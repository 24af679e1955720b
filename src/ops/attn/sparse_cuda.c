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
    if (blocks)
        te__launch_option(
            te__sparse_launch(p, a, "sparse_attn_query", blocks, 128, te__sparse_shared(a, backward), true),
            "X_BACKWARD", backward);
    return TE_OK;
}

static bool te__sparse_no_wgmma; /* tests set it, to run on Hopper what other chips run */

/* The kernels that can run a problem: 2: wgmma, 1: mma.sync, only the forward pass; 0: the general ones. */
enum { TE__SPARSE_MMA = 1, TE__SPARSE_WGMMA = 2 };

/* Returns the fastest kernels that can run the problem. Writes the reason to the plan. */
#define TE__SPARSE_GENERAL \
    "general, in f32, and not tensor cores; eight heads of a query share what is read of its keys: "
static int te__sparse_choose(te__plan *p, const te__sparse_attn_kargs *a, bool backward) {
    const te__attn_view *x[6] = {&a->q, &a->kv, &a->o, &a->d_o, &a->dq, &a->dkv};
    const bool hopper = p->hopper && !te__sparse_no_wgmma;
    bool same = a->q.dt == TE_BF16 || a->q.dt == TE_F16, aligned = true;
    const char *general;
    int i;
    for (i = 0; i < (backward ? 6 : 3); i++) {
        same = same && x[i]->dt == a->q.dt;
        aligned = aligned && te__view_is_aligned(x[i]->p, x[i]->b | x[i]->s | x[i]->h);
    }
    general = p->baseline ? TE__SPARSE_GENERAL "no NVRTC to compile other kernels"
              : !same     ? TE__SPARSE_GENERAL "f32, or tensors of different formats"
              : a->d != TE__SPARSE_D || a->d_v != TE__SPARSE_D
                  ? TE__SPARSE_GENERAL "keys or values of other than 512 channels"
              : !aligned ? TE__SPARSE_GENERAL "rows that do not start at multiples of 16 bytes"
              : a->batch == 0 || a->s_q == 0 || a->heads == 0 || a->n == 0 || a->s_kv == 0
                  ? TE__SPARSE_GENERAL "no queries, or no keys"
              : !(a->scale >= 1e-30f) ? TE__SPARSE_GENERAL "a scale below 1e-30"
              : !hopper && backward   ? TE__SPARSE_GENERAL "gradients on a chip that is no Hopper"
                                      : NULL;
    te__plan_why(p, general   ? general
                    : !hopper ? "tensor cores by mma.sync and not wgmma: the chip is no Hopper"
                              : "tensor cores: wgmma on gathered keys");
    return general ? 0 : hopper ? TE__SPARSE_WGMMA : TE__SPARSE_MMA;
}

/* Plans a Hopper kernel for queries i_begin .. i_end - 1 of sequences b_begin .. b_end - 1. */
static void te__sparse_plan_hopper(te__plan *p, const te__sparse_attn_kargs *a, bool backward) {
    const int64_t works = (int64_t)a->head_tiles * (a->b_end - a->b_begin) * (a->i_end - a->i_begin);
    te__sparse_launch(p, a, backward ? "sparse_attn_bwd_hopper" : "sparse_attn_fwd_hopper",
                      te__min(works, te__max(p->num_sms, 1)), 384, TE__SPARSE_HOPPER_SHARED(backward), true);
}

static te_result te__cuda_plan_sparse_attn_fwd(te__plan *p, const te_op_sparse_attn_fwd_args *args) {
    te__sparse_attn_kargs a = te__sparse_attn_problem(args);
    const int kernels = te__sparse_choose(p, &a, false);
    if (!kernels) return te__sparse_plan_queries(p, &a, false);
    a.head_tiles = (int)te__div_up(a.heads, TE__SPARSE_TILE_ROWS);
    a.b_end = a.batch, a.i_end = a.s_q;
    if (kernels == TE__SPARSE_WGMMA) te__sparse_plan_hopper(p, &a, false);
    else
        te__sparse_launch(p, &a, "sparse_attn_fwd_mma", (int64_t)a.head_tiles * a.batch * a.s_q, 256,
                          TE__SPARSE_MMA_SHARED, true);
    return TE_OK;
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

static int64_t te__sparse_partial_bytes = (int64_t)512 << 20; /* the most that partial gradients of a launch take; tests
                                                               * set a smaller number */

/* Chooses the parts and chunks into which the queries of a sequence are cut (kargs.h). A launch of the Hopper kernel
 * computes one part, or whole sequences, with at most te__sparse_partial_bytes of partial gradients. A part fills whole
 * waves of thread blocks if it can. Its size does not depend on the number of sequences. */
static void te__sparse_cut(const te__plan *p, te__sparse_attn_kargs *a, bool hopper) {
    const int64_t sms = te__max(p->num_sms, 1), bytes = (int64_t)a->n * a->head_tiles * TE__SPARSE_D * 2,
                  most = hopper ? te__max(1, te__sparse_partial_bytes / bytes) : te__max(1, a->s_q);
    int64_t part = te__min(most, a->s_q), rounds = part * a->head_tiles / sms, chunks;
    if (part < a->s_q && rounds > 0) part = te__max(1, rounds * sms / a->head_tiles);
    a->part = (int)te__max(part, 1);
    chunks = te__max(1, te__min(256, 4 * sms / te__max(a->batch, 1)));
    a->cuts = (int)te__max(1, te__min(chunks * a->part / te__max(a->s_q, 1), te__div_up(a->part, 16)));
    a->rows = (int)te__div_up(a->part, a->cuts);
    a->chunks = (int)te__max(1, te__div_up(a->s_q, a->part) * a->cuts);
    a->b_end = (int)te__max(1, most / a->part); /* sequences of a launch */
}

/* Plans the lists of the slots that name each key. */
static void te__sparse_plan_lists(te__plan *p, te__sparse_attn_kargs *a, bool sorted) {
    for (a->step = 0; a->step < (sorted ? 5 : 4); a->step++)
        te__sparse_launch(p, a, "sparse_attn_list",
                          a->step == 1   ? a->batch * te__div_up(a->s_kv, 256)
                          : a->step == 2 ? a->batch
                          : a->step == 4 ? te__div_up((int64_t)a->batch * a->s_kv, 8)
                                         : (int64_t)a->batch * a->chunks,
                          256, 0, false);
}

static te_result te__cuda_plan_sparse_attn_bwd(te__plan *p, const te_op_sparse_attn_bwd_args *args) {
    te__sparse_attn_kargs a = te__sparse_attn_problem_bwd(args);
    const int64_t rows = (int64_t)a.batch * a.heads * a.s_q, slots = (int64_t)a.batch * a.s_q * a.n,
                  keys = (int64_t)a.batch * a.s_kv;
    const bool general = te__sparse_choose(p, &a, true) == 0;
    int64_t cursors, sequences;
    te_result r = TE_OK;
    a.head_tiles = (int)te__max(1, te__div_up(a.heads, TE__SPARSE_TILE_ROWS));
    te__sparse_cut(p, &a, !general);
    sequences = te__min(a.b_end, a.batch);
    cursors = keys * a.chunks;
    a.lse2 = te__plan_floats(p, 2 * rows + cursors + keys + a.batch + slots + 1);
    if (!a.lse2) return p->result;
    a.delta = a.lse2 + rows;
    a.cursor = (int *)(void *)(a.delta + rows);
    a.start = a.cursor + cursors;
    a.list = a.start + keys + a.batch;
    if (general) {
        r = te__sparse_plan_queries(p, &a, true);
        if (r == TE_OK && args->dsinks && a.heads) te__sparse_plan_sinks(p, &a, args->dsinks);
        if (r != TE_OK || keys == 0) return r;
        te__sparse_plan_lists(p, &a, false);
        te__sparse_launch(p, &a, "sparse_attn_bwd_dkv", keys, 256, 0, true);
        return TE_OK;
    }
    a.partial = te__plan_workspace(p, sequences * a.part * a.n * a.head_tiles * TE__SPARSE_D * 2);
    if (a.part < a.s_q) a.sums = te__plan_floats(p, keys * TE__SPARSE_D);
    if (!a.partial || (a.part < a.s_q && !a.sums)) return p->result;
    te__sparse_plan_lists(p, &a, true);
    for (a.b_begin = 0; a.b_begin < a.batch; a.b_begin += (int)sequences) {
        a.b_end = (int)te__min(a.b_begin + sequences, a.batch);
        for (a.i_begin = 0; a.i_begin < a.s_q; a.i_begin += a.part) {
            a.i_end = (int)te__min((int64_t)a.i_begin + a.part, a.s_q);
            te__sparse_plan_hopper(p, &a, true);
            te__sparse_launch(p, &a, "sparse_attn_bwd_sum", (int64_t)(a.b_end - a.b_begin) * a.s_kv, 256, 0, true);
        }
    }
    if (args->dsinks) te__sparse_plan_sinks(p, &a, args->dsinks);
    return TE_OK;
}
