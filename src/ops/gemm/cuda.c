/* ops/gemm/cuda.c: matrix products: the choice of the kernel, and its launch. Knows plans; must not know the driver beyond tensor maps.
 *
 * Five kernels: gemm_hopper (wgmma, sm_90a), gemm_mma (mma.sync, sm_80 on), gemv_k (GEMV: up to sixteen lines by a K-major operand), gemv_mn (up to
 * eight by an MN-major operand), gemm_naive (anything, anywhere). MXFP8 and NVFP4 operands are decoded into the workspace first (gemm_decode), and
 * are bf16 to all but gemv_k. A tile size and a number of splits of k are chosen by a small model of the time that each would take, never by trying:
 * the same shapes get the same kernel, and the same bits, in every run. */

/* A tile that a kernel can have, and its share of the best utilisation of the tensor cores. */
typedef struct te__gemm_tile_kind {
    int bm, bn;
    double speed;
    int option; /* gemm_mma: TILE; gemm_hopper: WAVES, or TE__GEMM_PINGPONG */
    int threads;
    int cluster; /* blocks that share the larger of their operands: tiles above each other, or, if bm > bn, beside */
} te__gemm_tile_kind;

/* Blocks that have a tile's part of A in common, and of B. */
static int te__gemm_share_a(const te__gemm_tile_kind *t) { return t->bm > t->bn ? t->cluster : 1; }
static int te__gemm_share_b(const te__gemm_tile_kind *t) { return t->bm > t->bn ? 1 : t->cluster; }
/* Clusters at a time: those of four and more blocks do not go into every group of multiprocessors. */
static int64_t te__gemm_clusters(const te__plan *p, int64_t size) { return te__max((size > 2 ? p->num_sms * 7 / 8 : p->num_sms) / size, 1); }

enum { TE__GEMM_PINGPONG = 3 };

typedef struct te__gemm_choice {
    const te__gemm_tile_kind *tile;
    int64_t tiles, splits;
    int64_t k_split; /* k of one split */
    bool together;   /* the splits of a tile are a cluster, and add up themselves */
} te__gemm_choice;

/* How many tiles, clusters counting as one. */
static int64_t te__gemm_cluster_tiles(const te__gemm_tile_kind *t, int64_t m, int64_t n) {
    return te__div_up(m, t->bm * te__gemm_share_b(t)) * te__div_up(n, t->bn * te__gemm_share_a(t));
}

/* The operands that the kernels multiply: those of the call, or their decoded copies. */
typedef struct te__gemm_side {
    const void *data;
    te_dtype dtype;
    int64_t ld;
    bool k_major; /* neighbours along k are neighbours in memory */
} te__gemm_side;
typedef struct te__gemm_problem {
    const te_op_gemm_args *args;
    te__gemm_side a, b;
    int block;  /* te__gemm_block_kind, or 0 */
    int copies; /* gemm_hopper's option: whose rows start anywhere, and are copied by the kernel itself */
    bool aligned; /* by gemm_align */
} te__gemm_problem;

static bool te__gemm_side_is_aligned(const te__gemm_side *x) { return (uintptr_t)x->data % 16 == 0 && x->ld * te_dtype_bits(x->dtype) % 128 == 0; }
/* A and B, and their rows, start at multiples of 16 bytes. */
static bool te__gemm_is_aligned(const te__gemm_problem *q) { return te__gemm_side_is_aligned(&q->a) && te__gemm_side_is_aligned(&q->b); }
/* Aligned rows of which some start in the middle of a sector of the L2 cache. */
static bool te__gemm_side_is_off(const te__gemm_side *x) {
    return te__gemm_side_is_aligned(x) && ((uintptr_t)x->data % 32 != 0 || x->ld * te_dtype_bits(x->dtype) % 256 != 0);
}

/* The least time of a slab for a block if rows are off sectors: some three cycles for each row that the block loads by TMA, and one for each that the
 * other block of its cluster loads. Fitted with the rest. */
static double te__gemm_tma_cost(const te__gemm_tile_kind *t, const te__gemm_problem *q) {
    int share_a = te__gemm_share_a(t), share_b = te__gemm_share_b(t);
    double rows_a = te__gemm_side_is_off(&q->a) ? t->bm : 0, rows_b = te__gemm_side_is_off(&q->b) ? t->bn : 0;
    return 0.9e-3 * (rows_a + rows_b) + 2.2e-3 * (rows_a / share_a + rows_b / share_b);
}

/* Times are in slabs of a 128 x 256 tile (0.55 us on an H200), fitted to measurements of 41 shapes by `te_bench --tune`; of these and others, 64, the
 * picks are 1 % slower than the best alternatives on average, 11 % at most. 128 x 192 tiles in clusters were fitted later, by hand, to eight more.
 * A tile costs its slabs and the part of writing D that is not hidden, and device memory bounds all of them: 2.2 MB a slab, 80 KB for one
 * block. A cluster costs its start. Split-K costs a second launch and a pass of its partial sums through the L2 cache; within a cluster, an exchange of the
 * tiles' sums, and idle multiprocessors: clusters of 4 and 8 do not fit into every group of them. work: of the epilogue, on 128 x 256 values. */
static double te__gemm_cost(const te__plan *p, const te__gemm_tile_kind *t, const te__gemm_problem *q, int64_t slabs, int64_t splits, bool together,
                            bool tma, double work) {
    const te_op_gemm_args *a = q->args;
    double size = (double)t->bm * t->bn / (128.0 * 256.0), bytes = (double)(a->m + a->n) * (double)a->k * (double)te__dtype_size(q->a.dtype);
    int64_t at_once = te__gemm_clusters(p, together ? splits : t->cluster);
    int64_t items = te__gemm_cluster_tiles(t, a->m, a->n) * (together ? 1 : splits), rounds = te__div_up(items, at_once);
    int64_t blocks = te__min(items, at_once) * (together ? splits : t->cluster);
    double slab = fmax(size / t->speed, tma ? te__gemm_tma_cost(t, q) : 0.0), tail = (1.6 + work) * size;
    double floor = bytes / fmin(2.2e6, 80e3 * (double)te__max(blocks, 1));
    double cost = (double)rounds * ((double)te__div_up(slabs, splits) * slab + 0.8) + (t->option == TE__GEMM_PINGPONG ? 1.0 : (double)rounds) * tail;
    cost = fmax(cost, floor) + 0.1 * fmin(cost, floor);
    if (t->cluster > 1) cost += 1.4;
    if (together) { /* these blocks are not persistent */
        double sums = (double)(te__min(a->m, t->bm) * te__min(a->n, t->bn)) / (128.0 * 128.0);
        cost += (splits == 8 ? 4.5 : 2.0) + 8.0 * sums + 9.5 * (double)(rounds - 1);
    } else if (splits > 1) {
        cost += 3.2 + (double)a->m * (double)a->n * 4.0 * (double)(splits + 1) / 1.9e6;
    }
    return cost;
}

/* For `te_bench --tune` and tests, which run each alternative: number `take`, -1 for the best. */
#ifdef TE__TUNE
static struct te__gemm_tune {
    int take, count;
    int copies; /* of operands that start anywhere, by gemm_hopper itself: -1 if that is best, 0 never, 1 always */
    double cost[512];
} te__gemm_tune = {-1, 0, -1, {0}};
static bool te__gemm_skips(double cost) {
    int index = te__gemm_tune.count < TE__COUNT(te__gemm_tune.cost) - 1 ? te__gemm_tune.count++ : te__gemm_tune.count;
    te__gemm_tune.cost[index] = cost;
    return te__gemm_tune.take >= 0 && index != te__gemm_tune.take;
}
#define TE__GEMM_SKIPS(cost) te__gemm_skips(cost)
#define TE__GEMM_COPIES te__gemm_tune.copies
#define TE__GEMM_TUNES (te__gemm_tune.take >= 0 || te__gemm_tune.copies >= 0)
#define TE__GEMM_REMEMBERS (te__gemm_tune.take < 0 && te__gemm_tune.count > 0) /* count 0: the alternatives are about to be counted */
#else
#define TE__GEMM_SKIPS(cost) false
#define TE__GEMM_COPIES -1
#define TE__GEMM_TUNES false
#define TE__GEMM_REMEMBERS true
#endif

/* Rows of n elements that TMA may store: they start and end at multiples of 16 bytes. It writes whole pieces of 16: where a row ends within one, over what
 * lies beside it. */
static bool te__gemm_tma_may_store(const void *data, int64_t ld, int64_t n, int64_t size) {
    return (uintptr_t)data % 16 == 0 && ld * size % 16 == 0 && n * size % 16 == 0;
}

/* The work of the epilogue, or of its shifted stores: see te__gemm_cost. */
static double te__gemm_work(const te__plan *p, const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    if (a->epilogue != TE_EPILOGUE_NONE || a->bias_gradient) return 6.0;
    return !p->hopper || te__gemm_tma_may_store(te__data(a->d), te__gemm_ld(a->d), a->n, te__dtype_size(a->d->dtype)) ? 0.0 : 0.5;
}

/* bk: elements of k in a slab. hopper: for gemm_hopper, which reads by TMA and may add up splits within a cluster. */
static te__gemm_choice te__gemm_search(const te__plan *p, const te__gemm_tile_kind *kinds, int count, const te__gemm_problem *q, int64_t bk, bool hopper) {
    const te_op_gemm_args *a = q->args;
    static const int64_t splits[] = {1, 2, 3, 4, 6, 8, 12, 16};
    enum { SHORTEST = 4 }; /* slabs of a split: fewer do not fill the pipeline */
    const int64_t most_workspace = (int64_t)256 << 20;
    int64_t slabs = te__div_up(a->k, bk);
    double work = te__gemm_work(p, q);
    te__gemm_choice best = TE_ZERO;
    double best_cost = 0.0;
    int i, s, together;
    for (i = 0; i < count; i++)
        for (s = 0; s < TE__COUNT(splits); s++)
            for (together = 0; together <= (hopper && kinds[i].cluster == 1); together++) {
                int64_t each = te__div_up(slabs, splits[s]);
                double cost = te__gemm_cost(p, &kinds[i], q, slabs, splits[s], together, hopper, work);
                if (s > 0 && slabs < SHORTEST * splits[s]) continue;
                if (together ? (splits[s] != 2 && splits[s] != 4 && splits[s] != 8) || te__div_up(slabs, each) != splits[s]
                             : s > 0 && (double)a->m * (double)a->n * 4.0 * (double)splits[s] > (double)most_workspace)
                    continue;
                if (TE__GEMM_SKIPS(cost) || (best.tile && cost >= best_cost)) continue;
                best.tile = &kinds[i];
                best.splits = splits[s];
                best.together = together != 0;
                best_cost = cost;
            }
    best.tiles = te__gemm_cluster_tiles(best.tile, a->m, a->n);
    best.k_split = te__round_up(te__div_up(slabs, best.splits) * bk, q->block ? 128 : bk); /* whole blocks */
    best.splits = te__div_up(a->k, best.k_split); /* the last ones may have become empty */
    return best;
}

/* All that a search depends on. */
typedef struct te__gemm_key {
    int64_t m, n, k, bk;
    uint64_t kinds; /* the address of the list */
    int dtype, block, work, flags; /* hopper, whose rows are off sectors */
} te__gemm_key;
typedef char te__gemm_memo_fits[sizeof(te__gemm_key) == TE__MEMO_KEY && sizeof(te__gemm_choice) <= TE__MEMO_VALUE ? 1 : -1];

/* The same, searched once: a search costs a quarter of a launch. */
static te__gemm_choice te__gemm_choose(te__plan *p, const te__gemm_tile_kind *kinds, int count, const te__gemm_problem *q, int64_t bk, bool hopper) {
    const te_op_gemm_args *a = q->args;
    te__gemm_choice c;
    te__gemm_key key;
    bool known = false;
    void *memo = NULL;
    key.m = a->m;
    key.n = a->n;
    key.k = a->k;
    key.bk = bk;
    key.kinds = (uint64_t)(uintptr_t)kinds;
    key.dtype = (int)q->a.dtype;
    key.block = q->block;
    key.work = (int)(2.0 * te__gemm_work(p, q));
    key.flags = (hopper ? 1 : 0) | (te__gemm_side_is_off(&q->a) ? 2 : 0) | (te__gemm_side_is_off(&q->b) ? 4 : 0);
    if (TE__GEMM_REMEMBERS) memo = te__cuda_memo(p, &key, &known);
    if (known) {
        memcpy(&c, memo, sizeof(c));
        return c;
    }
    c = te__gemm_search(p, kinds, count, q, bk, hopper);
    if (memo) memcpy(memo, &c, sizeof(c));
    return c;
}

/* ---- arguments ------------------------------------------------------------------------------------------------------- */

static void te__gemm_fill_scales(te__gemm_kargs *k, const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    k->factor_a = k->factor_b = 1.0f;
    k->block = q->block;
    if (q->block) {
        k->block_a = (const float *)te__data(a->scale_a);
        k->block_b = (const float *)te__data(a->scale_b);
        k->ld_block_a = te__gemm_scale_ld(a->scaling_a, false, a->m, a->k);
        k->ld_block_b = te__gemm_scale_ld(a->scaling_b, false, a->n, a->k);
    } else if (a->scaling_a == TE_SCALING_TENSOR) {
        k->scale_a = (const float *)te__data(a->scale_a);
        k->scale_b = (const float *)te__data(a->scale_b);
    } else if (a->scaling_a == TE_SCALING_NVFP4) {
        k->scale_a = (const float *)te__data(a->amax_a);
        k->scale_b = (const float *)te__data(a->amax_b);
        k->factor_a = te__gemm_nvfp4_factor(a->e4m3_max_256_a);
        k->factor_b = te__gemm_nvfp4_factor(a->e4m3_max_256_b);
        k->rows_a = te__numel(a->amax_a) > 1;
        k->columns_b = te__numel(a->amax_b) > 1;
    }
}

static void te__gemm_fill(te__gemm_kargs *k, const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    k->a = q->a.data;
    k->b = q->b.data;
    k->d = te__data(a->d);
    k->aux = te__data(a->aux);
    k->bias = te__data(a->bias);
    k->m = a->m;
    k->n = a->n;
    k->k = a->k;
    k->lda = q->a.ld;
    k->ldb = q->b.ld;
    k->ldd = te__gemm_ld(a->d);
    k->ldaux = a->aux ? te__gemm_ld(a->aux) : 0;
    k->k_split = te__max(a->k, 1);
    k->a_dt = q->a.dtype;
    k->b_dt = q->b.dtype;
    k->d_dt = a->d->dtype;
    k->bias_dt = a->bias ? (int)a->bias->dtype : 0;
    k->a_t = !q->a.k_major;
    k->b_t = q->b.k_major;
    k->epilogue = a->epilogue;
    k->accumulate = a->accumulate;
    k->splits = 1;
    k->vector = k->ldd % 8 == 0 && te__is_aligned(a->d, 16) && k->ldaux % 8 == 0 && te__is_aligned(a->aux, 16);
    te__gemm_fill_scales(k, q);
}

/* With splits, D becomes the partial sums: plain f32, one [m, n] a split. True, or the workspace could not be had. */
static bool te__gemm_split(te__plan *p, te__gemm_kargs *k, const te__gemm_choice *c) {
    if (c->splits == 1) return true;
    k->k_split = c->k_split;
    k->splits = (int)c->splits;
    if (c->together) return true;
    k->ldd = te__round_up(k->n, 4); /* rows at multiples of 16 bytes */
    k->d_split = k->m * k->ldd;
    k->d = te__plan_workspace(p, c->splits * k->d_split * 4);
    k->d_dt = TE_F32;
    k->scale_a = k->scale_b = NULL;
    k->rows_a = k->columns_b = 0;
    k->bias = NULL;
    k->aux = NULL;
    k->ldaux = 0;
    k->epilogue = TE_EPILOGUE_NONE;
    k->accumulate = 0;
    k->vector = k->n % 8 == 0; /* gemm_mma: pieces of eight */
    return k->d != NULL;
}

/* ... and a second kernel adds them up and does the rest. */
static void te__gemm_plan_reduce(te__plan *p, const te__gemm_problem *q, const te__gemm_choice *c, const void *partial) {
    const te_op_gemm_args *a = q->args;
    te__launch *l = te__plan_launch(p, "gemm", "gemm_reduce");
    te__gemm_kargs *k = TE__KARGS(p, l, te__gemm_kargs);
    te__gemm_fill(k, q);
    k->partial = (const float *)partial;
    k->splits = (int)c->splits;
    te__launch_size(l, te__min(te__div_up(a->m * te__div_up(a->n, 8), 256), 8 * (int64_t)te__max(p->num_sms, 1)), 1, 1, 256, 0);
}

static void te__gemm_options(te__launch *l, const te__gemm_problem *q) {
    te__launch_option(l, "A_DT", q->a.dtype);
    te__launch_option(l, "B_DT", q->b.dtype);
    te__launch_option(l, "A_T", !q->a.k_major);
    te__launch_option(l, "B_T", q->b.k_major);
    if (q->block) te__launch_option(l, "BLOCK", q->block);
}

/* One sentence for plain operands and block scales, and its forms for decoded ones. */
static void te__gemm_why(te__plan *p, const te__gemm_problem *q, const char *plain, const char *mxfp8, const char *nvfp4) {
    te__plan_why(p, q->args->scaling_a == TE_SCALING_MXFP8 ? mxfp8 : q->args->scaling_a == TE_SCALING_NVFP4 ? nvfp4 : plain);
}

/* ---- gemm_decode ----------------------------------------------------------------------------------------------------- */

static void te__gemm_decode_one(te__plan *p, te__gemm_decode_side *s, te__gemm_side *x, const te_tensor *codes, const te_tensor *scale, te_scaling scaling,
                                int64_t size, int64_t k) {
    s->codes = (const unsigned char *)x->data;
    s->scale = (const unsigned char *)te__data(scale);
    s->rows = x->k_major ? size : k;
    s->columns = x->k_major ? k : size;
    s->ld = x->ld;
    s->ld_out = te__round_up(s->columns, 16);
    s->ld_scale = te__gemm_scale_ld(scaling, !x->k_major, size, k);
    s->dt = x->dtype;
    s->down = !x->k_major;
    s->aligned = scaling == TE_SCALING_NVFP4 ? te__is_aligned(codes, 8) && x->ld % 16 == 0 : te__is_aligned(codes, 16) && x->ld % 16 == 0;
    s->out = (unsigned short *)te__plan_workspace(p, s->rows * s->ld_out * 2);
    x->data = s->out;
    x->dtype = TE_BF16;
    x->ld = s->ld_out;
}

/* A and B of MXFP8 or NVFP4 become bf16 in the workspace. False: there was none. */
static bool te__gemm_plan_decode(te__plan *p, te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    te__launch *l = te__plan_launch(p, "gemm", "gemm_decode");
    te__gemm_decode_kargs *k = TE__KARGS(p, l, te__gemm_decode_kargs);
    int64_t pieces;
    te__gemm_decode_one(p, &k->side[0], &q->a, a->a, a->scale_a, a->scaling_a, a->m, a->k);
    te__gemm_decode_one(p, &k->side[1], &q->b, a->b, a->scale_b, a->scaling_b, a->n, a->k);
    if (a->swizzled_scales) { /* tiles are counted by groups, whichever way these run */
        k->swizzled = 1;
        k->side[0].ld_scale = k->side[1].ld_scale = te__round_up(te__gemm_groups(a->scaling_a, a->k), 4);
    }
    pieces = te__max(k->side[0].rows * k->side[0].ld_out, k->side[1].rows * k->side[1].ld_out) / 16;
    te__launch_size(l, te__min(te__div_up(pieces, 256), 8 * (int64_t)te__max(p->num_sms, 1)), 2, 1, 256, 0);
    return q->a.data != NULL && q->b.data != NULL;
}

/* ---- gemm_align ------------------------------------------------------------------------------------------------------ */

/* Bytes of a copied row: a row of a slab is one line of the L2 cache then, not two, or at least whole sectors, unless that would be many times the row. */
static int64_t te__gemm_align_ld(int64_t bytes) { return te__round_up(bytes, bytes >= 512 ? 128 : bytes > 16 ? 32 : 16); }
/* gemm_align counts pieces of 16 bytes in 32 bits. */
static bool te__gemm_fits_align(const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    int64_t size = te__dtype_size(q->a.dtype), rows_a = q->a.k_major ? a->m : a->k, rows_b = q->b.k_major ? a->n : a->k;
    return rows_a * (te__gemm_align_ld((q->a.k_major ? a->k : a->m) * size) / 16) +
               rows_b * (te__gemm_align_ld((q->b.k_major ? a->k : a->n) * size) / 16) <= 0xf0000000; /* a step beyond the last is still counted */
}

/* Operands of 16 bits that are not aligned are copied by gemm_hopper itself, slab by slab, if that is quicker: there is no second launch, and the bytes
 * move once; but a slab is slower than by TMA, and each block copies for itself. The model has microseconds beyond those of a product loaded by TMA, fitted by
 * hand to te_bench --tune on an H200: 0.8 a slab with both operands, 0.4 with one, and 4 if k is split for that alone; by gemm_align 2.2
 * and a round trip of the copies through memory. Measurements: tests/bench/notes.md. */
static bool te__gemm_copies_itself(const te__plan *p, te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    bool odd_a = !te__gemm_side_is_aligned(&q->a), odd_b = !te__gemm_side_is_aligned(&q->b);
    double slabs = (double)te__div_up(a->k, 64), blocks = (double)te__div_up(a->m, 64) * (double)te__div_up(a->n, 128) / (double)te__max(p->num_sms, 1);
    double each = fmax(slabs < 8.0 ? slabs : 4.0, slabs * blocks), bytes = 2.0 * (double)a->k * ((odd_a ? (double)a->m : 0.0) + (odd_b ? (double)a->n : 0.0));
    double copies = each * (odd_a && odd_b ? 0.8 : 0.4) + (slabs >= 8.0 && slabs < 24.0 ? 4.0 : 0.0), align = 2.2 + 2.0 * bytes / 3.5e6;
    if (te__dtype_size(q->a.dtype) != 2) return false;
    if (TE__GEMM_COPIES < 0 ? copies >= align : !TE__GEMM_COPIES) return false;
    q->copies = (odd_a ? 1 : 0) | (odd_b ? 2 : 0);
    return true;
}

/* Operands that are not aligned are copied into the workspace. False: there was none. */
static bool te__gemm_plan_align(te__plan *p, te__gemm_problem *q) {
    te__gemm_side *sides[2];
    te__launch *l = te__plan_launch(p, "gemm", "gemm_align");
    te__gemm_align_kargs *k = TE__KARGS(p, l, te__gemm_align_kargs);
    int64_t pieces[2] = {0, 0};
    int i;
    sides[0] = &q->a;
    sides[1] = &q->b;
    for (i = 0; i < 2; i++) {
        te__gemm_side *x = sides[i];
        te__gemm_align_side *s = &k->side[i];
        int64_t size = te__dtype_size(x->dtype), lines = i ? q->args->n : q->args->m;
        if (te__gemm_side_is_aligned(x)) continue;
        s->from = (const unsigned char *)x->data;
        s->rows = x->k_major ? lines : q->args->k;
        s->bytes = (x->k_major ? q->args->k : lines) * size;
        s->ld = x->ld * size;
        s->ld_out = te__gemm_align_ld(s->bytes);
        s->out = (unsigned char *)te__plan_workspace(p, s->rows * s->ld_out);
        if (!s->out) return false;
        x->data = s->out;
        x->ld = s->ld_out / size;
        pieces[i] = s->rows * (s->ld_out / 16);
    }
    /* All at once on the multiprocessors: one operand after the other would fill them twice. */
    for (i = 0; i < 2; i++) {
        double most = 8.0 * (double)te__max(p->num_sms, 1) - 2.0, share = most * (double)pieces[i] / (double)(pieces[0] + pieces[1]);
        k->side[i].blocks = (unsigned)te__min(te__div_up(pieces[i], 256), (int64_t)share + 1);
    }
    te__launch_size(l, (int64_t)k->side[0].blocks + k->side[1].blocks, 1, 1, 256, 0);
    q->aligned = true;
    return true;
}

/* ---- bias gradient ---------------------------------------------------------------------------------------------------- */

/* The sums of D's columns: of sums [rows, n] that a kernel left, or of D. False: no workspace. */
static bool te__gemm_plan_bias_gradient(te__plan *p, const te_op_gemm_args *a, const float *sums, int64_t rows) {
    te_op_column_sum_args of_d = te__gemm_column_sum(a);
    enum { SHORT = 1024 }; /* rows that one block adds up before several would have begun */
    if (!sums) return te__cuda_plan_column_sum(p, &of_d) == TE_OK;
    if (rows <= SHORT) {
        te__plan_column_sum_short(p, sums, rows, a->n, a->bias_gradient, false);
        return true;
    }
    return te__plan_column_sum(p, sums, TE_F32, rows, a->n, a->bias_gradient, false) == TE_OK;
}

/* ---- gemm_naive ------------------------------------------------------------------------------------------------------ */

static te_result te__gemm_plan_naive(te__plan *p, const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    te__launch *l = te__plan_launch(p, "gemm", "gemm_naive");
    te__gemm_fill(TE__KARGS(p, l, te__gemm_kargs), q);
    te__launch_size(l, te__div_up(a->m, 64) * te__div_up(a->n, 64), 1, 1, 256, 0);
    if (q->args->bias_gradient && !te__gemm_plan_bias_gradient(p, q->args, NULL, 0)) return p->result;
    p->native = false;
    te__gemm_why(p, q, "no NVRTC: plain f32 arithmetic from the embedded PTX, no tensor cores",
                 "no NVRTC: MXFP8 decoded exactly into bf16, then plain f32 arithmetic from the embedded PTX, no tensor cores",
                 "no NVRTC: NVFP4 decoded exactly into bf16, then plain f32 arithmetic from the embedded PTX, no tensor cores");
    if (a->k == 0) te__plan_why(p, "k is 0: D is the epilogue of zeros");
    return TE_OK;
}

/* ---- gemm_mma -------------------------------------------------------------------------------------------------------- */

static te_result te__gemm_plan_mma(te__plan *p, const te__gemm_problem *q) {
    /* `heavy` is for products that need more registers a thread. Each slot of shared memory holds 64 bytes of k; there are four slots. */
    static const te__gemm_tile_kind plain[] = {{128, 256, 1.0, 2, 256, 1}, {128, 128, 0.9, 1, 128, 1}, {64, 64, 0.6, 0, 128, 1}};
    static const te__gemm_tile_kind heavy[] = {{128, 128, 0.8, 3, 256, 1}, {64, 64, 0.6, 0, 128, 1}};
    bool fp8 = te__is_fp8(q->a.dtype), fp8_cores = p->sm == 89 || p->sm >= 120, aligned = te__gemm_is_aligned(q);
    bool promote = fp8 && fp8_cores && q->args->split_accumulator && !q->block;
    bool is_heavy = q->a.dtype == TE_F32 || !aligned || promote || q->block;
    te__gemm_choice c = te__gemm_choose(p, is_heavy ? heavy : plain, is_heavy ? TE__COUNT(heavy) : TE__COUNT(plain), q, 64 / te__dtype_size(q->a.dtype), false);
    te__launch *l = te__plan_launch(p, "gemm", "gemm_mma");
    te__gemm_kargs *k = TE__KARGS(p, l, te__gemm_kargs);
    te__gemm_fill(k, q);
    te__gemm_options(l, q);
    te__launch_option(l, "TILE", c.tile->option);
    te__launch_option(l, "ALIGNED", aligned);
    te__launch_option(l, "PROMOTE", promote);
    te__launch_size(l, c.tiles, c.splits, 1, c.tile->threads, (int64_t)(c.tile->bm + c.tile->bn) * 64 * 4);
    if (!te__gemm_split(p, k, &c)) return p->result;
    if (c.splits > 1) te__gemm_plan_reduce(p, q, &c, k->d);
    if (q->args->bias_gradient && !te__gemm_plan_bias_gradient(p, q->args, NULL, 0)) return p->result;
    p->native = q->args->scaling_a < TE_SCALING_MXFP8 && (!fp8 || fp8_cores);
    te__gemm_why(p, q, "tensor cores (mma.sync)", "MXFP8 decoded exactly into bf16, then tensor cores (mma.sync)",
                 "NVFP4 decoded exactly into bf16, then tensor cores (mma.sync)");
    if (promote) te__plan_why(p, "fp8 tensor cores (mma.sync), partial sums of 128 k promoted to f32");
    if (q->a.dtype == TE_F32) te__plan_why(p, "tensor cores (mma.sync), f32 as TF32");
    if (fp8 && !fp8_cores) te__plan_why(p, "fp8 decoded exactly into f16 on the way to the tensor cores (mma.sync)");
    if (!aligned) te__plan_why(p, "tensor cores (mma.sync), read element by element: A, B or their rows are not 16-byte aligned");
    if (q->block) {
        te__plan_why(p, fp8_cores ? "fp8 tensor cores (mma.sync), sums of 128 k scaled in f32"
                                  : "fp8 decoded exactly into f16 on the way to the tensor cores (mma.sync), sums of 128 k scaled in f32");
        if (!aligned) te__plan_why(p, "tensor cores (mma.sync), sums of 128 k scaled in f32; read element by element: A, B or their rows are not 16-byte aligned");
    }
    return TE_OK;
}

/* ---- gemm_hopper ----------------------------------------------------------------------------------------------------- */

/* TMA counts in 32 bits, and brings the scales of B's blocks of 1 x 128 along, 16 bytes at a time. */
static bool te__gemm_fits_hopper(const te__plan *p, const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    return p->hopper && q->a.dtype != TE_F32 && te__max(te__max(a->m, a->n), a->k) <= INT_MAX - 1024 &&
           (!q->block || te__is_aligned(a->scale_b, 16));
}

/* The map of an operand of `size` rows or columns and length k, read in boxes of `box` of them by one slab of k; operands that are not
 * k-major in boxes of 64 by one slab, or, if `box` is no multiple of 64, by half of one. */
static te_result te__gemm_map(te__plan *p, void *map, const te__gemm_side *x, int64_t size, int64_t k, int box) {
    int64_t bytes = te__dtype_size(x->dtype);
    uint64_t dims[2], stride = (uint64_t)(x->ld * bytes);
    uint32_t boxes[2];
    dims[0] = (uint64_t)(x->k_major ? k : size);
    dims[1] = (uint64_t)(x->k_major ? size : k);
    boxes[0] = (uint32_t)(128 / bytes);
    boxes[1] = x->k_major ? (uint32_t)box : box % 64 ? 32 : 64;
    return te__cuda_tensor_map(p, map, x->data, x->dtype, 2, dims, &stride, boxes, 128);
}

/* How D is written, te__gemm_store: by TMA if it may store D and aux, and at most one thing has to be read; row by row if there is nothing to do but
 * scale and bias. The workspace of splits has nothing beside its rows. */
static int te__gemm_store_of(const te__gemm_kargs *k) {
    int64_t size = te__dtype_size((te_dtype)k->d_dt);
    bool aligned = k->splits > 1 || (te__gemm_tma_may_store(k->d, k->ldd, k->n, size) && te__gemm_tma_may_store(k->aux, k->ldaux, k->n, size));
    bool reads_d = k->accumulate && k->d_dt != TE_F32, aux_out = k->epilogue == TE_EPILOGUE_GELU && k->aux;
    if (!aligned && !k->rows_a && !k->columns_b && !k->accumulate && k->epilogue == TE_EPILOGUE_NONE) return TE__GEMM_STORE_ROWS | (k->bias ? TE__GEMM_STORE_BIAS : 0);
    if (!aligned || k->rows_a || k->columns_b || (reads_d && (k->epilogue == TE_EPILOGUE_DGELU || aux_out))) return 0;
    return TE__GEMM_STORE | (k->bias ? TE__GEMM_STORE_BIAS : 0) | (k->epilogue == TE_EPILOGUE_GELU ? TE__GEMM_STORE_GELU : 0) |
           (aux_out ? TE__GEMM_STORE_AUX : 0) | (k->epilogue == TE_EPILOGUE_DGELU ? TE__GEMM_STORE_DGELU : 0) | (k->accumulate ? TE__GEMM_STORE_ADD : 0);
}
/* The map of D or aux, in boxes of 128 bytes by 64 rows. */
static te_result te__gemm_out_map(te__plan *p, void *map, const te__gemm_kargs *k, const void *data, int64_t ld) {
    int64_t size = te__dtype_size((te_dtype)k->d_dt);
    uint64_t dims[3], strides[2];
    uint32_t box[3];
    dims[0] = (uint64_t)k->n;
    dims[1] = (uint64_t)k->m;
    dims[2] = (uint64_t)k->splits;
    strides[0] = (uint64_t)(ld * size);
    strides[1] = (uint64_t)(k->splits > 1 ? k->d_split * size : ld * size);
    box[0] = (uint32_t)(128 / size);
    box[1] = 64;
    box[2] = 1;
    return te__cuda_tensor_map(p, map, data, (te_dtype)k->d_dt, 3, dims, strides, box, 128);
}

static te_result te__gemm_plan_hopper(te__plan *p, const te__gemm_problem *q) {
    static const te__gemm_tile_kind plain[] = {{128, 256, 1.0, 1, 384, 2},
                                               {128, 256, 0.985, 1, 384, 1},
                                               {256, 128, 0.995, 2, 384, 2},
                                               {128, 128, 0.95, 1, 384, 2},
                                               {128, 128, 0.95, 1, 384, 1},
                                               {128, 128, 0.935, TE__GEMM_PINGPONG, 384, 2},
                                               {64, 256, 0.81, 0, 384, 1},
                                               {64, 128, 0.82, 0, 384, 1},
                                               {64, 128, 0.78, 0, 384, 2},
                                               {128, 192, 0.95, 1, 384, 1},
                                               {128, 192, 0.95, 1, 384, 2}};
    static const te__gemm_tile_kind promoting[] = {{256, 128, 0.96, 2, 384, 2},
                                                   {256, 128, 0.95, 2, 384, 1},
                                                   {128, 128, 0.92, 1, 384, 1},
                                                   {64, 128, 0.755, 0, 384, 1},
                                                   {128, 192, 0.95, 1, 384, 1},
                                                   {128, 192, 0.975, 1, 384, 2}}; /* the last two not for blocks of 128 columns */
    static const te__gemm_tile_kind copying[] = {{128, 128, 0.5, 1, 512, 1}, {64, 128, 0.35, 0, 512, 1}};
    const te_op_gemm_args *a = q->args;
    bool promote = te__is_fp8(q->a.dtype) && (a->split_accumulator || q->block);
    const te__gemm_tile_kind *kinds = q->copies ? copying : promote ? promoting : plain;
    int count = q->copies ? TE__COUNT(copying) : promote ? TE__COUNT(promoting) - (q->block ? 2 : 0) : TE__COUNT(plain);
    te__gemm_choice c = te__gemm_choose(p, kinds, count, q, 128 / te__dtype_size(q->a.dtype), true);
    te__launch *l = te__plan_launch(p, "gemm", "gemm_hopper");
    te__gemm_hopper_kargs *k = TE__KARGS(p, l, te__gemm_hopper_kargs);
    int64_t blocks, sum_rows = 0;
    float *sums = NULL;
    bool by_tma;
    int store;
    te__gemm_fill(&k->g, q);
    if (!te__gemm_split(p, &k->g, &c)) return p->result;
    store = c.together ? 0 : te__gemm_store_of(&k->g);
    if (q->copies && (store & TE__GEMM_STORE_DGELU || (store & TE__GEMM_STORE_ADD && k->g.d_dt != TE_F32))) store = 0; /* no warp is free to load aux or the old D */
    by_tma = (store & TE__GEMM_STORE) != 0;
    if (a->bias_gradient && by_tma && !q->copies && c.splits == 1) { /* of 64 rows each */
        sum_rows = te__div_up(a->m, 64);
        k->g.row_sums = sums = (float *)te__plan_workspace(p, sum_rows * a->n * 4);
        if (!sums) return p->result;
        store |= TE__GEMM_STORE_SUMS;
    }
    l->cluster = (unsigned)(c.together ? c.splits : c.tile->cluster);
    te__gemm_options(l, q);
    te__launch_option(l, "BN", c.tile->bn);
    te__launch_option(l, "WAVES", c.tile->option == TE__GEMM_PINGPONG ? 1 : c.tile->option);
    if (c.tile->option == TE__GEMM_PINGPONG) te__launch_option(l, "PINGPONG", 1);
    te__launch_option(l, "CLUSTER", (int)l->cluster);
    if (c.together) te__launch_option(l, "SPLIT", 1);
    te__launch_option(l, "PROMOTE", promote);
    te__launch_option(l, "STORE", store);
    if (store) te__launch_option(l, "D_DT", k->g.d_dt);
    if (q->copies) te__launch_option(l, "COPIES", q->copies);
    blocks = c.together ? c.tiles * c.splits : c.tile->cluster * te__min(c.tiles * c.splits, te__gemm_clusters(p, c.tile->cluster));
    te__launch_size(l, blocks, 1, 1, c.tile->threads, TE__GEMM_HOPPER_SHARED);
    if ((!(q->copies & 1) && te__gemm_map(p, k->a_map, &q->a, a->m, a->k, c.tile->bm / te__gemm_share_a(c.tile)) != TE_OK) ||
        (!(q->copies & 2) && te__gemm_map(p, k->b_map, &q->b, a->n, a->k, c.tile->bn / te__gemm_share_b(c.tile)) != TE_OK) ||
        (by_tma && te__gemm_out_map(p, k->d_map, &k->g, k->g.d, k->g.ldd) != TE_OK) ||
        (k->g.aux && by_tma && te__gemm_out_map(p, k->aux_map, &k->g, k->g.aux, k->g.ldaux) != TE_OK))
        return p->result;
    if (c.splits > 1 && !c.together) te__gemm_plan_reduce(p, q, &c, k->g.d);
    if (a->bias_gradient && !te__gemm_plan_bias_gradient(p, a, sums, sum_rows)) return p->result;
    p->native = a->scaling_a < TE_SCALING_MXFP8;
    te__gemm_why(p, q, promote ? "TMA and wgmma, partial sums of 128 k promoted to f32" : "TMA and wgmma",
                 "MXFP8 decoded exactly into bf16, then TMA and wgmma", "NVFP4 decoded exactly into bf16, then TMA and wgmma");
    if (q->block) te__plan_why(p, "TMA and wgmma, sums of 128 k scaled in f32");
    if (q->aligned)
        te__plan_why(p, q->block ? "A or B, whose rows are not 16-byte aligned, copied; then TMA and wgmma, sums of 128 k scaled in f32"
                                 : "A or B, whose rows are not 16-byte aligned, copied; then TMA and wgmma");
    if (q->copies) te__plan_why(p, "wgmma; A or B, whose rows are not 16-byte aligned, copied by the kernel itself");
    return TE_OK;
}

/* ---- gemv_k ----------------------------------------------------------------------------------------------------- */

/* GEMVs of two K-major operands, bound by the bytes of the long one. More than eight lines of the short operand need registers that shifts, and scales of
 * blocks, need as well. k is not split, so a small grid with long lines (k > 16384, fewer blocks than four a multiprocessor) is refused. And the ring of
 * gemm_hopper has more bytes in flight than warps do, which is quicker for very many lines (tests/bench/notes.md). The bound
 * lies between: 192 bytes of a column of the long operand for each multiprocessor, on an H200 12672 lines of bf16. With a short B most of the ring is
 * B's, and empty. */
static bool te__gemm_is_gemv_k(const te__plan *p, const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    bool aligned = te__gemm_is_aligned(q), plain = !q->block && a->scaling_a < TE_SCALING_MXFP8;
    int64_t lines = te__max(a->m, a->n), size = te__dtype_size(q->a.dtype);
    if (TE__GEMM_TUNES || !q->a.k_major || !q->b.k_major || size > 2) return false;
    if (te__min(a->m, a->n) > (aligned && !q->block ? 16 : 8) || (a->k > 16384 && lines < 4 * (int64_t)p->num_sms)) return false;
    return !(aligned && plain && a->m < a->n && te__gemm_fits_hopper(p, q) && lines * size > 192 * (int64_t)p->num_sms);
}

static te_result te__gemm_plan_gemv_k(te__plan *p, const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    int64_t few = te__min(a->m, a->n), blocks = te__div_up(te__max(a->m, a->n), 16);
    int scales = a->scaling_a == TE_SCALING_MXFP8 ? 1 : a->scaling_a == TE_SCALING_NVFP4 ? 2 : 0;
    int warps = blocks <= 4 * (int64_t)te__max(p->num_sms, 1) && te__gemm_is_aligned(q) && !q->block && !scales && few <= 8 ? 16 : 8;
    te__launch *l = te__plan_launch(p, "gemm", "gemv_k");
    te__gemm_kargs *k = TE__KARGS(p, l, te__gemm_kargs);
    te__gemm_fill(k, q);
    if (scales) {
        k->block_a = (const float *)te__data(a->scale_a);
        k->block_b = (const float *)te__data(a->scale_b);
        k->ld_block_a = te__gemm_scale_ld(a->scaling_a, false, a->m, a->k);
        k->ld_block_b = te__gemm_scale_ld(a->scaling_b, false, a->n, a->k);
        te__launch_option(l, "SCALES", scales);
        if (a->swizzled_scales) te__launch_option(l, "SWIZZLED", 1);
    }
    te__launch_option(l, "A_DT", q->a.dtype);
    te__launch_option(l, "B_DT", q->b.dtype);
    te__launch_option(l, "SHORT_A", a->m <= a->n);
    te__launch_option(l, "EIGHTS", (int)te__div_up(few, 8));
    te__launch_option(l, "ALIGNED", te__gemm_is_aligned(q));
    te__launch_option(l, "WARPS", warps);
    if (q->block) te__launch_option(l, "BLOCK", q->block);
    te__launch_size(l, blocks, 1, 1, warps * 32, 0);
    if (a->bias_gradient && !te__gemm_plan_bias_gradient(p, a, NULL, 0)) return p->result;
    p->native = !scales && !te__is_fp8(q->a.dtype);
    te__gemm_why(p, q, "GEMV: straight from memory to the tensor cores (mma.sync)", "GEMV: straight from memory, MXFP8 decoded exactly into bf16, to the tensor cores (mma.sync)",
                 "GEMV: straight from memory, NVFP4 decoded exactly into bf16, to the tensor cores (mma.sync)");
    if (te__is_fp8(q->a.dtype) && !scales) te__plan_why(p, "GEMV: straight from memory, fp8 decoded exactly into f16, to the tensor cores (mma.sync)");
    if (q->block) te__plan_why(p, "GEMV: straight from memory, fp8 decoded exactly into f16, to the tensor cores (mma.sync), sums of 128 k scaled in f32");
    return TE_OK;
}

/* ---- gemv_mn ------------------------------------------------------------------------------------------------ */

/* GEMVs with an MN-major long operand; of 64 lines or more, so that no piece beyond them is read in vain. Very many lines are left to gemm_hopper, as in
 * te__gemm_is_gemv_k: tests/bench/notes.md. */
static bool te__gemm_is_gemv_mn(const te__plan *p, const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    const te__gemm_side *x = a->m <= a->n ? &q->b : &q->a;
    int64_t lines = te__max(a->m, a->n);
    if (TE__GEMM_TUNES || x->k_major || te__dtype_size(x->dtype) != 2 || te__min(a->m, a->n) > 8 || lines < 64) return false;
    return !(te__gemm_is_aligned(q) && a->m < a->n && te__gemm_fits_hopper(p, q) && lines > 256 * (int64_t)p->num_sms);
}

/* Lanes have eight lines each if blocks with four a lane, sixteen warps, would not all be resident at once, two a multiprocessor: tests/bench/notes.md.
 * k is split if blocks are at most half as many as multiprocessors. */
static te_result te__gemm_plan_gemv_mn(te__plan *p, const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    enum { SHORTEST = 1024 }; /* k of a split: four turns of each warp */
    const bool few_a = a->m <= a->n;
    const te__gemm_side *x = few_a ? &q->b : &q->a;
    int64_t lines = te__max(a->m, a->n), sms = te__max(p->num_sms, 1), blocks;
    int piece = lines > 64 * sms ? 8 : 4, warps = piece == 8 ? 8 : 16;
    bool aligned = (uintptr_t)x->data % (uintptr_t)(2 * piece) == 0 && x->ld % piece == 0;
    te__launch *l = te__plan_launch(p, "gemm", "gemv_mn");
    te__gemm_kargs *k = TE__KARGS(p, l, te__gemm_kargs);
    te__gemm_choice c = TE_ZERO;
    blocks = te__div_up(lines, (aligned ? 8 : 7) * piece);
    c.splits = te__max(te__min(sms / blocks, a->k / SHORTEST), 1);
    c.k_split = te__round_up(te__div_up(a->k, c.splits), 128);
    c.splits = te__div_up(a->k, c.k_split);
    te__gemm_fill(k, q);
    if (!te__gemm_split(p, k, &c)) return p->result;
    te__launch_option(l, "DT", x->dtype);
    te__launch_option(l, "SHORT_A", few_a);
    te__launch_option(l, "PIECE", piece);
    te__launch_option(l, "ALIGNED", aligned);
    te__launch_option(l, "WARPS", warps);
    te__launch_size(l, blocks, c.splits, 1, warps * 32, 0);
    if (c.splits > 1) te__gemm_plan_reduce(p, q, &c, k->d);
    if (a->bias_gradient && !te__gemm_plan_bias_gradient(p, a, NULL, 0)) return p->result;
    p->native = a->scaling_a < TE_SCALING_MXFP8;
    te__plan_why(p, a->scaling_a == TE_SCALING_MXFP8 ? "GEMV: MXFP8 decoded exactly into bf16, then straight from memory to the tensor cores (mma.sync)"
                                                     : "GEMV: straight from memory to the tensor cores (mma.sync)"); /* NVFP4 lies along k */
    return TE_OK;
}

/* ---- the choice ------------------------------------------------------------------------------------------------------ */

/* Over before a second kernel would have begun: gemm_mma reads unaligned operands as they are, and adds fp8's products up with all their bits. */
static bool te__gemm_is_small_fp8(const te__gemm_problem *q) {
    return te__is_fp8(q->a.dtype) && (double)q->args->m * (double)q->args->n * (double)q->args->k <= 8e6;
}

/* A single line whose elements are neighbours lies along k, whichever way it was said to lie. */
static void te__gemm_one_line(te__gemm_side *x, int64_t lines, int64_t k) {
    if (lines != 1 || (!x->k_major && x->ld != 1)) return;
    x->k_major = true;
    x->ld = te__round_up(k, 16);
}

static te_result te__cuda_plan_gemm(te__plan *p, const te_op_gemm_args *a) {
    te__gemm_problem q = TE_ZERO;
    if (a->m == 0 || a->n == 0) return a->bias_gradient && a->n && !te__gemm_plan_bias_gradient(p, a, NULL, 0) ? p->result : TE_OK;
    q.args = a;
    q.a.data = te__data(a->a);
    q.a.dtype = a->a->dtype;
    q.a.ld = te__gemm_ld(a->a);
    q.a.k_major = !a->a_transposed;
    q.b.data = te__data(a->b);
    q.b.dtype = a->b->dtype;
    q.b.ld = te__gemm_ld(a->b);
    q.b.k_major = a->b_transposed;
    if (a->scaling_a < TE_SCALING_MXFP8) {
        te__gemm_one_line(&q.a, a->m, a->k);
        te__gemm_one_line(&q.b, a->n, a->k);
    }
    if (te__gemm_is_block(a->scaling_a))
        q.block = a->scaling_a == TE_SCALING_BLOCK_2D ? TE__GEMM_2D_1D : a->scaling_b == TE_SCALING_BLOCK_2D ? TE__GEMM_1D_2D : TE__GEMM_1D_1D;
    if (a->k == 0) return te__gemm_plan_naive(p, &q);
    if (!p->baseline && te__gemm_is_gemv_k(p, &q)) return te__gemm_plan_gemv_k(p, &q);
    if ((a->scaling_a == TE_SCALING_MXFP8 || a->scaling_a == TE_SCALING_NVFP4) && !te__gemm_plan_decode(p, &q)) return p->result;
    if (p->baseline) return te__gemm_plan_naive(p, &q);
    if (te__gemm_is_gemv_mn(p, &q)) return te__gemm_plan_gemv_mn(p, &q);
    if (!te__gemm_fits_hopper(p, &q)) return te__gemm_plan_mma(p, &q);
    if (te__gemm_is_aligned(&q) || te__gemm_copies_itself(p, &q)) return te__gemm_plan_hopper(p, &q);
    if (te__gemm_is_small_fp8(&q) || !te__gemm_fits_align(&q)) return te__gemm_plan_mma(p, &q);
    return te__gemm_plan_align(p, &q) ? te__gemm_plan_hopper(p, &q) : p->result;
}
