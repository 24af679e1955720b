/* ops/norm/cuda.c: chooses the kernels of LayerNorm and RMSNorm, and plans their launches. This file must not call the
 * CUDA driver. */

/* Returns the number of threads in a block of the general kernels, which do not hold a row in registers. Short rows
 * get small blocks. */
static int te__norm_threads(int64_t n) { return (int)te__min(512, te__max(32, te__round_up(te__div_up(n, 4), 32))); }

/* How norm_fwd and norm_bwd hold a row in registers: in `warps` warps, with `chunks` vectors of 8 elements in each
 * thread. */
typedef struct te__norm_tiling {
    int warps, chunks;
    bool full; /* the row fills the vectors of all threads */
} te__norm_tiling;

/* Returns the tiling with the fewest warps and at most `most` vectors a thread. Prefers up to twice as many warps if
 * all threads then have equally many vectors. Sets `warps` to 0 if no tiling holds the row. */
static te__norm_tiling te__norm_tile(int64_t vectors, int most) {
    te__norm_tiling t = TE_ZERO;
    int w, fewest = (int)te__max(1, te__div_up(vectors, 32 * most));
    if (fewest > 16) return t;
    t.warps = fewest;
    t.chunks = (int)te__div_up(vectors, fewest * 32);
    for (w = fewest; w <= te__min(16, 2 * fewest); w++)
        if (vectors % (w * 32) == 0) {
            t.warps = w;
            t.chunks = (int)(vectors / (w * 32));
            t.full = true;
            break;
        }
    return t;
}

/* Returns whether norm_fwd_queue should run instead of norm_fwd. Both give the same bits. norm_fwd_queue is for an x of
 * 32 MB or more, in rows of 4 to 16 KB. With longer rows, a multiprocessor would run only one block, and nothing while
 * this block waits. */
static bool te__norm_wants_queue(const te__plan *p, int64_t m, int64_t n, te__norm_tiling t, te_dtype dtype) {
    return te__sm_shared(p->sm) - 1024 >= 227 * 1024 && te__dtype_size(dtype) == 2 && n >= 2048 && t.warps <= 8 &&
           m <= 1 << 30 && m * n >= 16 << 20;
}
static void te__norm_plan_queue(te__plan *p, te__launch *l, te__norm_fwd_kargs *k, te__norm_tiling t) {
    enum { STAGES = 4 };
    int64_t row = t.warps * 32 * t.chunks * 16, units, blocks, resident = 16 / t.warps;
    k->unit = (int)te__max(1, 16 * 1024 / row);
    units = te__div_up(k->m, k->unit);
    blocks = te__min(units, resident * p->num_sms);
    k->own = (int)te__div_up(STAGES, k->unit);
    k->questions = (int)te__max(0, units - (k->own - 1) * blocks);
    k->counter = te__plan_counter(p);
    te__launch_option(l, "CHUNKS", t.chunks);
    te__launch_option(l, "WARPS", t.warps);
    te__launch_option(l, "RESIDENT", (int)resident);
    te__launch_option(l, "STAGES", STAGES);
    te__launch_size(l, blocks, 1, 1, t.warps * 32, STAGES * row);
}

static te_result te__cuda_plan_norm_fwd(te__plan *p, const te_norm_fwd_args *a, bool layernorm) {
    int64_t m = te__rows(a->x), n = te__cols(a->x), ld = te__cols(a->y);
    te__norm_tiling t = te__norm_tile(n / 8, 4);
    te__launch *l;
    te__norm_fwd_kargs *k;
    const te__eight_row rows[] = {{a->x, TE_DTYPE_NONE, 16},
                                  {a->gamma, TE_DTYPE_NONE, 16},
                                  {a->beta, a->gamma->dtype, 16},
                                  {a->y, TE_DTYPE_NONE, te__eight_bytes(a->y->dtype)}};
    const char *lacks = te__eight_lacks(p, rows, TE__COUNT(rows), n | ld);
    bool in_registers, queued;
    if (t.warps == 0) t = te__norm_tile(n / 8, 8);
    if (!lacks && (t.warps == 0 || m >= INT_MAX)) lacks = "general: rows of more elements than registers hold";
    in_registers = !lacks;
    queued = in_registers && t.full && ld == n && te__norm_wants_queue(p, m, n, t, a->x->dtype);
    if (m > 0 && n > 0) {
        l = te__plan_launch(p, "norm", queued ? "norm_fwd_queue" : "norm_fwd");
        k = TE__KARGS(p, l, te__norm_fwd_kargs);
        k->x = te__data(a->x);
        k->gamma = te__data(a->gamma);
        k->beta = te__data(a->beta);
        k->y = te__data(a->y);
        k->mean = te__f32_data(a->mean);
        k->rstd = te__f32_data(a->rstd);
        k->scale = te__f32_data(a->scale);
        k->scale_inv = te__f32_data(a->scale_inv);
        k->amax = a->y_amax ? te__plan_largest(p) : te__f32_data(a->amax);
        k->m = m;
        k->n = n;
        k->ld = ld;
        k->eps = a->norm.eps;
        k->x_dt = a->x->dtype;
        k->gamma_dt = a->gamma->dtype;
        k->beta_dt = te__dtype_of(a->beta);
        k->y_dt = a->y->dtype;
        k->layernorm = layernorm;
        k->zero_centered = a->norm.zero_centered_gamma;
        k->rounded = a->rounded;
        if (queued) {
            te__norm_plan_queue(p, l, k, t);
        } else if (in_registers) {
            /* PACKED: the kernel uses fewer registers, so that a multiprocessor runs up to 36 warps at once, not 24.
             * Without PACKED, at most two blocks of more than 8 warps would fit. */
            bool quantized = te__is_fp8(a->y->dtype), full = t.full && ld == n;
            bool packed = quantized || k->amax || t.warps > 8, tuned = full && t.chunks <= 4 && a->x->dtype != TE_F32;
            int rows = t.warps == 1 ? 4 : 1, warps = t.warps * rows;
            te__launch_option(l, "CHUNKS", t.chunks);
            te__launch_option(l, "WARPS", t.warps);
            te__launch_option(l, "FULL", full);
            te__launch_option(l, "RESIDENT", tuned ? (packed ? 36 : 24) / warps : 1);
            te__launch_option(l, "PACKED", tuned && packed);
            te__launch_size(l, te__div_up(m, rows), 1, 1, warps * 32, 0);
        } else {
            te__launch_size(l, te__min(m, INT_MAX), 1, 1, te__norm_threads(n), 0);
        }
        if (in_registers) {
            te__launch_option(l, "AMAX", k->amax != NULL);
            te__launch_option(l, "ZERO_CENTERED", a->norm.zero_centered_gamma);
            te__launch_option(l, "LAYERNORM", layernorm);
            te__launch_option(l, "X_DT", a->x->dtype);
            te__launch_option(l, "W_DT", a->gamma->dtype);
            te__launch_option(l, "Y_DT", a->y->dtype);
            if (a->rounded && a->x->dtype != TE_F32) te__launch_option(l, "ROUNDED", 1);
        }
    }
    if (a->y_amax) {
        te__norm_amax_kargs *last;
        l = te__plan_launch(p, "norm", "norm_amax");
        last = TE__KARGS(p, l, te__norm_amax_kargs);
        last->amax = te__plan_largest(p);
        last->y_amax = te__f32_data(a->y_amax);
        last->y_dt = a->y->dtype;
    }
    if (a->y_col) {
        te_op_transpose_args turn = te__norm_transpose_args(a);
        te__cuda_plan_transpose(p, &turn);
    }
    te__plan_why(p, queued         ? "rows in registers; each goes to the block that is ready first"
                    : in_registers ? "rows in registers"
                                   : lacks);
    return p->result;
}

/* How norm_bwd runs. Each of a block's `groups` groups of warps works on one row at a time. Up to `stages` rows are
 * in flight. sums_shared: the sums over rows are in shared memory. */
typedef struct te__norm_bwd_tiling {
    te__norm_tiling row;
    int groups, stages;
    bool sums_shared;
    int64_t shared; /* bytes */
} te__norm_bwd_tiling;

static bool te__norm_bwd_tile(int64_t n, int64_t element, int streams, int kinds, int64_t limit,
                              te__norm_bwd_tiling *t) {
    int64_t stage, sums;
    t->row = te__norm_tile(n / 8, 2);
    t->sums_shared = t->row.warps == 0;
    if (t->sums_shared) t->row = te__norm_tile(n / 8, 4);
    if (t->row.warps == 0) return false;
    t->groups = t->row.warps > 8 ? 1 : 16 / t->row.warps;
    stage = (int64_t)t->row.warps * 32 * t->row.chunks * t->groups * 8 * element * streams;
    sums = t->sums_shared ? (int64_t)t->row.warps * 32 * t->row.chunks * 8 * 4 * kinds : 0;
    for (t->stages = 3; t->stages > 1 && t->stages * stage + sums > limit;) t->stages--;
    t->shared = t->stages * stage + sums;
    /* After the last row, the kernel reuses this shared memory for the sums of the groups of warps, and then for the
     * sums of te_norm_add_parts (8192 bytes). */
    if (!t->sums_shared) t->shared = te__max(t->shared, (int64_t)t->row.warps * 32 * t->row.chunks * 8 * 4 * kinds);
    t->shared = te__max(t->shared, 8192);
    return t->shared <= limit;
}

static te_result te__cuda_plan_norm_bwd(te__plan *p, const te_norm_bwd_args *a, bool layernorm) {
    int64_t m = te__rows(a->x), n = te__cols(a->x), kinds = layernorm ? 2 : 1, blocks;
    bool wanted = a->dgamma || a->dbeta, fast, at_once = false;
    te__norm_bwd_sum_kargs sum = TE_ZERO;
    te__norm_bwd_tiling t = TE_ZERO;
    const te_dtype dt = a->x->dtype;
    const te__eight_row rows[] = {{a->x, dt, 16},
                                  {a->dy, dt, 16},
                                  {a->dx, dt, 16},
                                  {a->add, dt, 16},
                                  {a->gamma, TE_DTYPE_NONE, 16}};
    if (n == 0) return TE_OK;
    fast = !te__eight_lacks(p, rows, TE__COUNT(rows), n) &&
           te__norm_bwd_tile(n, te__dtype_size(dt), a->add ? 3 : 2, (int)kinds, te__sm_shared(p->sm) - 1024, &t);
    /* The number of blocks does not depend on the GPU, so each variant (`fast` or not) gives the same bits on all GPUs.
     * The limit of 132 is the number of multiprocessors of an H100. 528 is four times as many. */
    blocks = te__min(132, fast ? te__div_up(m, t.groups) : m);
    if (!fast) blocks = te__min(m, 528);
    if (wanted) {
        sum.partial = te__plan_floats(p, blocks * kinds * n);
        if (p->result != TE_OK) return p->result;
        sum.dgamma = te__data(a->dgamma);
        sum.dbeta = te__data(a->dbeta);
        sum.parts = blocks;
        sum.n = n;
        sum.kinds = (int)kinds;
        sum.dgamma_dt = te__dtype_of(a->dgamma);
        sum.dbeta_dt = te__dtype_of(a->dbeta);
        sum.accumulate = a->accumulate;
    }
    if (m > 0) {
        te__launch *l = te__plan_launch(p, "norm", "norm_bwd");
        te__norm_bwd_kargs *k = TE__KARGS(p, l, te__norm_bwd_kargs);
        int threads = fast ? t.row.warps * 32 * t.groups : te__norm_threads(n);
        k->dy = te__data(a->dy);
        k->x = te__data(a->x);
        k->gamma = te__data(a->gamma);
        k->add = te__data(a->add);
        k->mean = te__f32_data(a->mean);
        k->rstd = te__f32_data(a->rstd);
        k->dx = te__data(a->dx);
        k->partial = (float *)sum.partial;
        k->m = m;
        k->n = n;
        k->dy_dt = a->dy->dtype;
        k->x_dt = dt;
        k->gamma_dt = a->gamma->dtype;
        k->add_dt = te__dtype_of(a->add);
        k->dx_dt = a->dx->dtype;
        k->layernorm = layernorm;
        k->zero_centered = a->norm.zero_centered_gamma;
        k->rounded = a->rounded;
        if (fast) {
            te__launch_option(l, "CHUNKS", t.row.chunks);
            te__launch_option(l, "WARPS", t.row.warps);
            te__launch_option(l, "FULL", t.row.full);
            te__launch_option(l, "GROUPS", t.groups);
            te__launch_option(l, "STAGES", t.stages);
            te__launch_option(l, "SUMS_SHARED", t.sums_shared);
            te__launch_option(l, "ADD", a->add != NULL);
            te__launch_option(l, "LAYERNORM", layernorm);
            te__launch_option(l, "X_DT", dt);
            te__launch_option(l, "W_DT", a->gamma->dtype);
            at_once = wanted && te__plan_at_once(p, threads, t.shared, 1) >= blocks;
        }
        if (at_once) {
            k->sum = sum;
            k->counter = te__plan_counter(p);
            l->cooperative = true;
        }
        te__launch_size(l, blocks, 1, 1, threads, fast ? t.shared : 0);
    }
    if (wanted && !at_once) {
        te__launch *l = te__plan_launch(p, "norm", "norm_bwd_sum");
        *TE__KARGS(p, l, te__norm_bwd_sum_kargs) = sum;
        te__launch_size(l, te__div_up(n, 32), kinds, 1, 512, 0);
    }
    te__plan_why(p, fast ? "rows in registers; sums over rows go through partial sums in fixed order"
                         : "general; sums over rows go through partial sums in fixed order");
    return TE_OK;
}

static te_result te__cuda_plan_layernorm_fwd(te__plan *p, const te_op_layernorm_fwd_args *a) {
    return te__cuda_plan_norm_fwd(p, a, true);
}
static te_result te__cuda_plan_rmsnorm_fwd(te__plan *p, const te_op_rmsnorm_fwd_args *a) {
    return te__cuda_plan_norm_fwd(p, a, false);
}
static te_result te__cuda_plan_layernorm_bwd(te__plan *p, const te_op_layernorm_bwd_args *a) {
    return te__cuda_plan_norm_bwd(p, a, true);
}
static te_result te__cuda_plan_rmsnorm_bwd(te__plan *p, const te_op_rmsnorm_bwd_args *a) {
    return te__cuda_plan_norm_bwd(p, a, false);
}
