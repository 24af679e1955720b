/* ops/gemm/cuda.c: matrix products, which kernel and how it is launched. Knows plans; must not know the driver beyond tensor maps.
 *
 * Three kernels: gemm_hopper (wgmma, sm_90a), gemm_mma (mma.sync, sm_80 on), gemm_naive (anything, anywhere). MXFP8 and NVFP4 operands are
 * decoded into the workspace first (gemm_decode), and are bf16 to all three. A tile size and a number of splits of k are chosen by a small
 * model of the time that each would take, never by trying: the same shapes get the same kernel, and the same bits, in every run. */

/* A tile that a kernel can have, and how well it keeps the tensor cores busy, relative to the best. */
typedef struct te__gemm_tile_kind {
    int bm, bn;
    double speed;
    int option; /* gemm_mma: TILE; gemm_hopper: WAVES */
    int threads;
    int cluster; /* blocks that share the larger of their operands: tiles above each other, or, if bm > bn, beside */
} te__gemm_tile_kind;

typedef struct te__gemm_choice {
    const te__gemm_tile_kind *tile;
    int64_t tiles, splits;
    int64_t k_split; /* k of one split */
} te__gemm_choice;

/* How many tiles, clusters counting as one. */
static int64_t te__gemm_cluster_tiles(const te__gemm_tile_kind *t, int64_t m, int64_t n) {
    return te__div_up(m, t->bm * (t->bm <= t->bn ? t->cluster : 1)) * te__div_up(n, t->bn * (t->bm > t->bn ? t->cluster : 1));
}

/* Times are in slabs of a 128 x 256 tile (0.5 us on an H200). A tile costs its slabs, and filling the pipeline and writing D about five
 * more; splitting k costs a second launch (six) and its partial sums' way through device memory (about 1.6 MB a slab). */
static double te__gemm_cost(const te__plan *p, const te__gemm_tile_kind *t, int64_t m, int64_t n, int64_t slabs, int64_t splits) {
    double size = (double)t->bm * t->bn / (128.0 * 256.0);
    int64_t rounds = te__div_up(te__gemm_cluster_tiles(t, m, n) * splits, te__max(p->num_sms / t->cluster, 1));
    double cost = (double)rounds * ((double)te__div_up(slabs, splits) * size / t->speed + 5.0 * size);
    if (splits > 1) cost += 6.0 + (double)m * (double)n * 4.0 * (double)(splits + 1) / 1.6e6;
    return cost;
}

/* What the kernels are given to multiply: the operands of the call, or what they were decoded into. */
typedef struct te__gemm_side {
    const void *data;
    te_dtype dtype;
    int64_t ld;
    bool k_major; /* neighbours along k are neighbours in memory */
} te__gemm_side;
typedef struct te__gemm_problem {
    const te_gemm_args *args;
    te__gemm_side a, b;
    int block; /* te__gemm_block_kind, or 0 */
} te__gemm_problem;

/* bk: elements of k in a slab. */
static te__gemm_choice te__gemm_choose(const te__plan *p, const te__gemm_tile_kind *kinds, int count, const te__gemm_problem *q, int64_t bk) {
    const te_gemm_args *a = q->args;
    static const int64_t splits[] = {1, 2, 3, 4, 6, 8, 12, 16};
    enum { SHORTEST = 4 }; /* slabs of a split: fewer do not fill the pipeline */
    const int64_t most_workspace = (int64_t)256 << 20;
    int64_t slabs = te__div_up(a->k, bk);
    te__gemm_choice best = TE_ZERO;
    double best_cost = 0.0;
    int i, s;
    for (i = 0; i < count; i++) {
        for (s = 0; s < TE__COUNT(splits); s++) {
            double cost = te__gemm_cost(p, &kinds[i], a->m, a->n, slabs, splits[s]);
            if (s > 0 && (slabs < SHORTEST * splits[s] || (double)a->m * (double)a->n * 4.0 * (double)splits[s] > (double)most_workspace)) break;
            if (best.tile && cost >= best_cost) continue;
            best.tile = &kinds[i];
            best.splits = splits[s];
            best_cost = cost;
        }
    }
    best.tiles = te__gemm_cluster_tiles(best.tile, a->m, a->n);
    best.k_split = te__round_up(te__div_up(slabs, best.splits) * bk, q->block ? 128 : bk); /* whole blocks */
    best.splits = te__div_up(a->k, best.k_split); /* the last ones may have become empty */
    return best;
}

/* ---- arguments ------------------------------------------------------------------------------------------------------- */

static void te__gemm_fill_scales(te__gemm_kargs *k, const te__gemm_problem *q) {
    const te_gemm_args *a = q->args;
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
    const te_gemm_args *a = q->args;
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
    k->d = te__plan_workspace(p, c->splits * k->m * k->n * 4);
    k->d_dt = TE_F32;
    k->ldd = k->n;
    k->d_split = k->m * k->n;
    k->k_split = c->k_split;
    k->splits = (int)c->splits;
    k->scale_a = k->scale_b = NULL;
    k->rows_a = k->columns_b = 0;
    k->bias = NULL;
    k->aux = NULL;
    k->epilogue = TE_EPILOGUE_NONE;
    k->accumulate = 0;
    k->vector = k->n % 8 == 0;
    return k->d != NULL;
}

/* ... and a second kernel adds them up and does the rest. */
static void te__gemm_plan_reduce(te__plan *p, const te__gemm_problem *q, const te__gemm_choice *c, const void *partial) {
    const te_gemm_args *a = q->args;
    te__launch *l = te__plan_launch(p, "gemm", "gemm_reduce");
    te__gemm_kargs *k = TE__KARGS(p, l, te__gemm_kargs);
    te__gemm_fill(k, q);
    k->partial = (const float *)partial;
    k->splits = (int)c->splits;
    te__launch_size(l, te__min(te__div_up(a->m * te__div_up(a->n, 8), 256), 8 * (int64_t)te__max(p->num_sms, 1)), 1, 1, 256, 0);
}

/* A and B, and their rows, start at multiples of 16 bytes. */
static bool te__gemm_is_aligned(const te__gemm_problem *q) {
    int64_t bytes = te__dtype_size(q->a.dtype);
    return (uintptr_t)q->a.data % 16 == 0 && (uintptr_t)q->b.data % 16 == 0 && q->a.ld * bytes % 16 == 0 && q->b.ld * bytes % 16 == 0;
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
    const te_gemm_args *a = q->args;
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

/* ---- gemm_naive ------------------------------------------------------------------------------------------------------ */

static te_result te__gemm_plan_naive(te__plan *p, const te__gemm_problem *q) {
    const te_gemm_args *a = q->args;
    te__launch *l = te__plan_launch(p, "gemm", "gemm_naive");
    te__gemm_fill(TE__KARGS(p, l, te__gemm_kargs), q);
    te__launch_size(l, te__div_up(a->m, 64) * te__div_up(a->n, 64), 1, 1, 256, 0);
    p->native = false;
    te__gemm_why(p, q, "no NVRTC: plain f32 arithmetic from the embedded PTX, no tensor cores",
                 "no NVRTC: MXFP8 decoded exactly into bf16, then plain f32 arithmetic from the embedded PTX, no tensor cores",
                 "no NVRTC: NVFP4 decoded exactly into bf16, then plain f32 arithmetic from the embedded PTX, no tensor cores");
    if (a->k == 0) te__plan_why(p, "k is 0: D is the epilogue of zeros");
    return TE_OK;
}

/* ---- gemm_mma -------------------------------------------------------------------------------------------------------- */

static te_result te__gemm_plan_mma(te__plan *p, const te__gemm_problem *q) {
    /* Plain first; the second list is for what needs more registers. Shared memory: four slots of 64 bytes of k. */
    static const te__gemm_tile_kind plain[] = {{128, 256, 1.0, 2, 256, 1}, {128, 128, 0.9, 1, 128, 1}, {64, 64, 0.6, 0, 128, 1}};
    static const te__gemm_tile_kind heavy[] = {{128, 128, 0.8, 3, 256, 1}, {64, 64, 0.6, 0, 128, 1}};
    bool fp8 = te__is_fp8(q->a.dtype), fp8_cores = p->sm == 89 || p->sm >= 120, aligned = te__gemm_is_aligned(q);
    bool promote = fp8 && fp8_cores && q->args->split_accumulator && !q->block;
    bool is_heavy = q->a.dtype == TE_F32 || !aligned || promote || q->block;
    te__gemm_choice c = te__gemm_choose(p, is_heavy ? heavy : plain, is_heavy ? TE__COUNT(heavy) : TE__COUNT(plain), q, 64 / te__dtype_size(q->a.dtype));
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
    const te_gemm_args *a = q->args;
    return p->hopper && q->a.dtype != TE_F32 && te__gemm_is_aligned(q) && te__max(te__max(a->m, a->n), a->k) <= INT_MAX - 1024 &&
           (!q->block || te__is_aligned(a->scale_b, 16));
}

/* The map of an operand of `size` rows or columns and length k, read in boxes of `box` of them by one slab of k; operands that are not
 * k-major in boxes of 64 by one slab. */
static te_result te__gemm_map(te__plan *p, void *map, const te__gemm_side *x, int64_t size, int64_t k, int box) {
    int64_t bytes = te__dtype_size(x->dtype);
    uint64_t dims[2], stride = (uint64_t)(x->ld * bytes);
    uint32_t boxes[2];
    dims[0] = (uint64_t)(x->k_major ? k : size);
    dims[1] = (uint64_t)(x->k_major ? size : k);
    boxes[0] = (uint32_t)(128 / bytes);
    boxes[1] = x->k_major ? (uint32_t)box : 64;
    return te__cuda_tensor_map(p, map, x->data, x->dtype, 2, dims, &stride, boxes, 128);
}

/* How D is written, te__gemm_store: by TMA if its rows and those of aux are at multiples of 16 bytes, and at most one thing has to be read. */
static int te__gemm_store_of(const te__gemm_kargs *k) {
    int64_t size = te__dtype_size((te_dtype)k->d_dt);
    bool aligned = (uintptr_t)k->d % 16 == 0 && k->ldd * size % 16 == 0 && (uintptr_t)k->aux % 16 == 0 && k->ldaux * size % 16 == 0;
    bool reads_d = k->accumulate && k->d_dt != TE_F32, aux_out = k->epilogue == TE_EPILOGUE_GELU && k->aux;
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
    static const te__gemm_tile_kind plain[] = {{128, 256, 1.0, 1, 384, 2},  {128, 256, 0.97, 1, 384, 1}, {256, 128, 0.98, 2, 384, 2}, {128, 128, 0.82, 1, 384, 2},
                                               {128, 128, 0.78, 1, 384, 1}, {64, 256, 0.55, 0, 384, 1},  {64, 128, 0.45, 0, 384, 1}};
    static const te__gemm_tile_kind promoting[] = {{256, 128, 0.87, 2, 384, 2}, {256, 128, 0.85, 2, 384, 1}, {128, 128, 0.7, 1, 384, 1}};
    const te_gemm_args *a = q->args;
    bool promote = te__is_fp8(q->a.dtype) && (a->split_accumulator || q->block);
    te__gemm_choice c = te__gemm_choose(p, promote ? promoting : plain, promote ? TE__COUNT(promoting) : TE__COUNT(plain), q, 128 / te__dtype_size(q->a.dtype));
    te__launch *l = te__plan_launch(p, "gemm", "gemm_hopper");
    te__gemm_hopper_kargs *k = TE__KARGS(p, l, te__gemm_hopper_kargs);
    int store;
    te__gemm_fill(&k->g, q);
    if (!te__gemm_split(p, &k->g, &c)) return p->result;
    store = te__gemm_store_of(&k->g);
    te__gemm_options(l, q);
    te__launch_option(l, "BN", c.tile->bn);
    te__launch_option(l, "WAVES", c.tile->option);
    te__launch_option(l, "CLUSTER", c.tile->cluster);
    te__launch_option(l, "PROMOTE", promote);
    te__launch_option(l, "STORE", store);
    if (store) te__launch_option(l, "D_DT", k->g.d_dt);
    l->cluster = (unsigned)c.tile->cluster;
    te__launch_size(l, c.tile->cluster * te__min(c.tiles * c.splits, te__max(p->num_sms / c.tile->cluster, 1)), 1, 1, c.tile->threads, TE__GEMM_HOPPER_SHARED);
    if (te__gemm_map(p, k->a_map, &q->a, a->m, a->k, c.tile->bm / (c.tile->bm > c.tile->bn ? c.tile->cluster : 1)) != TE_OK ||
        te__gemm_map(p, k->b_map, &q->b, a->n, a->k, c.tile->bn / (c.tile->bm <= c.tile->bn ? c.tile->cluster : 1)) != TE_OK ||
        (store && te__gemm_out_map(p, k->d_map, &k->g, k->g.d, k->g.ldd) != TE_OK) ||
        (k->g.aux && store && te__gemm_out_map(p, k->aux_map, &k->g, k->g.aux, k->g.ldaux) != TE_OK))
        return p->result;
    if (c.splits > 1) te__gemm_plan_reduce(p, q, &c, k->g.d);
    p->native = a->scaling_a < TE_SCALING_MXFP8;
    te__gemm_why(p, q, promote ? "TMA and wgmma, partial sums of 128 k promoted to f32" : "TMA and wgmma",
                 "MXFP8 decoded exactly into bf16, then TMA and wgmma", "NVFP4 decoded exactly into bf16, then TMA and wgmma");
    if (q->block) te__plan_why(p, "TMA and wgmma, sums of 128 k scaled in f32");
    return TE_OK;
}

/* ---- the choice ------------------------------------------------------------------------------------------------------ */

static te_result te__cuda_plan_gemm(te__plan *p, const te_gemm_args *a) {
    te__gemm_problem q = TE_ZERO;
    if (a->m == 0 || a->n == 0) return TE_OK;
    q.args = a;
    q.a.data = te__data(a->a);
    q.a.dtype = a->a->dtype;
    q.a.ld = te__gemm_ld(a->a);
    q.a.k_major = !a->a_transposed;
    q.b.data = te__data(a->b);
    q.b.dtype = a->b->dtype;
    q.b.ld = te__gemm_ld(a->b);
    q.b.k_major = a->b_transposed;
    if (te__gemm_is_block(a->scaling_a))
        q.block = a->scaling_a == TE_SCALING_BLOCK_2D ? TE__GEMM_2D_1D : a->scaling_b == TE_SCALING_BLOCK_2D ? TE__GEMM_1D_2D : TE__GEMM_1D_1D;
    if (a->k == 0) return te__gemm_plan_naive(p, &q);
    if ((a->scaling_a == TE_SCALING_MXFP8 || a->scaling_a == TE_SCALING_NVFP4) && !te__gemm_plan_decode(p, &q)) return p->result;
    if (p->baseline) return te__gemm_plan_naive(p, &q);
    return te__gemm_fits_hopper(p, &q) ? te__gemm_plan_hopper(p, &q) : te__gemm_plan_mma(p, &q);
}
