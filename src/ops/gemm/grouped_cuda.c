/* ops/gemm/grouped_cuda.c: products by groups: which kernel and how it is launched. Knows plans; must not know the driver.
 *
 * How many tiles there are only the device knows: along rows a launch has as many blocks as there can be, and those without a tile leave. */

/* Tiles of bm x bn that there can be: each group ends with one that is not full. */
static int64_t te__grouped_tiles(const te_op_grouped_gemm_args *a, int64_t bm, int64_t bn) {
    int64_t down = a->along_k ? a->groups * te__div_up(a->m, bm) : te__min(a->m / bm + a->groups, a->m);
    return down * te__div_up(a->n, bn);
}

static void te__grouped_fill(te__gemm_grouped_kargs *k, const te_op_grouped_gemm_args *a, const te__gemm_problem *q) {
    te__gemm_grouping *s = &k->groups;
    te__gemm_fill(&k->g, q);
    s->sizes = te__data(a->sizes ? a->sizes : a->offsets);
    s->dt = a->sizes ? a->sizes->dtype : a->offsets->dtype;
    s->offsets = a->offsets != NULL;
    s->count = (int)a->groups;
    s->along_k = a->along_k;
    s->b_elements = a->along_k ? a->m * k->g.ldd : (a->b_transposed ? a->n : a->k) * k->g.ldb;
    if (q->block) s->block_b = te__gemm_scale_rows(a->scaling_b, false, a->n, a->k) * k->g.ld_block_b;
    s->each_a = !q->block && a->scale_a && te__numel(a->scale_a) > 1;
    s->each_b = !q->block && a->scale_b && te__numel(a->scale_b) > 1;
}

/* ---- gemm_grouped_naive ---------------------------------------------------------------------------------------------- */

static te_result te__grouped_plan_naive(te__plan *p, const te_op_grouped_gemm_args *a, const te__gemm_problem *q) {
    te__launch *l = te__plan_launch(p, "gemm", "gemm_grouped_naive");
    te__grouped_fill(TE__KARGS(p, l, te__gemm_grouped_kargs), a, q);
    te__launch_size(l, te__grouped_tiles(a, 64, 64), 1, 1, 256, 0);
    p->native = false;
    te__plan_why(p, a->k == 0 ? "k is 0: D is the epilogue of zeros" : "no NVRTC: plain f32 arithmetic from the embedded PTX, no tensor cores");
    return TE_OK;
}

/* ---- the choice of a tile: by the sizes on the host, as if the groups were alike ------------------------------------------- */

/* Times in slabs of a 128 x 256 tile, with te__gemm_cost's earlier constants, which grouped products were measured with. granule: rows that cost
 * something when one of them is there. */
static double te__grouped_cost(const te__plan *p, const te__gemm_tile_kind *t, const te_op_grouped_gemm_args *a, int64_t bk, int64_t granule) {
    int64_t m = a->along_k ? a->m : te__div_up(a->m, a->groups), k = a->along_k ? te__div_up(a->k, a->groups) : a->k;
    int64_t down = te__div_up(m, t->bm), across = te__div_up(a->n, t->bn);
    double size = (double)te__round_up(m, te__min(granule, t->bm)) / (double)down * (double)t->bn / (128.0 * 256.0); /* of a tile, on average */
    int64_t rounds = te__div_up(a->groups * down * te__round_up(across, a->along_k ? 1 : t->cluster), te__max(p->num_sms, 1));
    return (double)rounds * ((double)te__div_up(k, bk) * size / t->speed + 0.3 + size);
}

static const te__gemm_tile_kind *te__grouped_choose(const te__plan *p, const te__gemm_tile_kind *kinds, int count, const te_op_grouped_gemm_args *a, int64_t bk, int64_t granule) {
    const te__gemm_tile_kind *best = NULL;
    double best_cost = 0.0;
    int i;
    for (i = 0; i < count; i++) {
        double cost = te__grouped_cost(p, &kinds[i], a, bk, granule);
        if (best && cost >= best_cost) continue;
        best = &kinds[i];
        best_cost = cost;
    }
    return best;
}

/* ---- gemm_mma -------------------------------------------------------------------------------------------------------- */

static te_result te__grouped_plan_mma(te__plan *p, const te_op_grouped_gemm_args *a, const te__gemm_problem *q) {
    /* As te__gemm_plan_mma has them. */
    static const te__gemm_tile_kind plain[] = {{128, 256, 1.0, 2, 256, 1}, {128, 128, 0.9, 1, 128, 1}, {64, 64, 0.6, 0, 128, 1}};
    static const te__gemm_tile_kind heavy[] = {{128, 128, 0.8, 3, 256, 1}, {64, 64, 0.6, 0, 128, 1}};
    bool fp8 = te__is_fp8(q->a.dtype), fp8_cores = p->sm == 89 || p->sm >= 120;
    bool starts_within_rows = a->along_k && (q->a.k_major || q->b.k_major); /* of memory, at any element */
    bool aligned = te__gemm_is_aligned(q) && !starts_within_rows, promote = fp8 && fp8_cores && a->split_accumulator && !q->block;
    bool is_heavy = q->a.dtype == TE_F32 || !aligned || promote || q->block;
    const te__gemm_tile_kind *t = te__grouped_choose(p, is_heavy ? heavy : plain, is_heavy ? TE__COUNT(heavy) : TE__COUNT(plain), a, 64 / te__dtype_size(q->a.dtype), 128);
    te__launch *l = te__plan_launch(p, "gemm", "gemm_mma");
    te__grouped_fill(TE__KARGS(p, l, te__gemm_grouped_kargs), a, q);
    te__gemm_options(l, q);
    te__launch_option(l, "TILE", t->option);
    te__launch_option(l, "ALIGNED", aligned);
    te__launch_option(l, "PROMOTE", promote);
    te__launch_option(l, "GROUPED", 1);
    te__launch_size(l, te__grouped_tiles(a, t->bm, t->bn), 1, 1, t->threads, (int64_t)(t->bm + t->bn) * 64 * 4);
    p->native = !fp8 || fp8_cores;
    te__plan_why(p, "tensor cores (mma.sync)");
    if (q->a.dtype == TE_F32) te__plan_why(p, "tensor cores (mma.sync), f32 as TF32");
    if (fp8 && !fp8_cores) te__plan_why(p, "fp8 decoded exactly into f16 on the way to the tensor cores (mma.sync)");
    if (promote) te__plan_why(p, "fp8 tensor cores (mma.sync), partial sums of 128 k promoted to f32");
    if (q->block) te__plan_why(p, "tensor cores (mma.sync), sums of 128 k scaled in f32");
    if (!aligned) te__plan_why(p, "tensor cores (mma.sync), read element by element: A, B, their rows or the groups do not start at multiples of 16 bytes");
    return TE_OK;
}

/* ---- gemm_hopper ----------------------------------------------------------------------------------------------------- */

/* B of all groups, as te__gemm_map has one: the third dimension are the groups, so that each ends in zeros of its own. */
static te_result te__grouped_stack_map(te__plan *p, void *map, const te_op_grouped_gemm_args *a, const te__gemm_side *x, int box) {
    int64_t bytes = te__dtype_size(x->dtype);
    uint64_t dims[3], strides[2];
    uint32_t boxes[3];
    dims[0] = (uint64_t)(x->k_major ? a->k : a->n);
    dims[1] = (uint64_t)(x->k_major ? a->n : a->k);
    dims[2] = (uint64_t)a->groups;
    strides[0] = (uint64_t)(x->ld * bytes);
    strides[1] = strides[0] * dims[1];
    boxes[0] = (uint32_t)(128 / bytes);
    boxes[1] = x->k_major ? (uint32_t)box : 64;
    boxes[2] = 1;
    return te__cuda_tensor_map(p, map, x->data, x->dtype, 3, dims, strides, boxes, 128);
}

/* gemm_groups, which comes first, gets the maps that gemm_hopper must not use as they are. */
static void te__grouped_plan_groups(te__plan *p, const te_op_grouped_gemm_args *a, const te__gemm_problem *q, const te__gemm_hopper_grouped_kargs *h, int64_t bm,
                                    int64_t per_row, bool store, te__gemm_groups_kargs *k) {
    memcpy(k->map[0], a->along_k ? h->h.a_map : h->h.d_map, sizeof(k->map[0]));
    memcpy(k->map[1], a->along_k ? h->h.b_map : h->h.aux_map, sizeof(k->map[1]));
    k->dim[0] = a->along_k ? !q->a.k_major : store ? 1 : -1;
    k->dim[1] = a->along_k ? !q->b.k_major : store && a->aux ? 1 : -1;
    k->groups = h->groups;
    k->total = a->along_k ? a->k : a->m;
    k->per_row = (unsigned)per_row;
    k->bm = (int)bm;
    k->skip_empty = a->accumulate;
    k->rows = (te__gemm_group_row *)te__plan_workspace(p, (a->groups + 1) * (int64_t)sizeof(te__gemm_group_row));
    k->maps = (unsigned long long *)te__plan_workspace(p, a->groups * 2 * 128);
}

static te_result te__grouped_plan_hopper(te__plan *p, const te_op_grouped_gemm_args *a, const te__gemm_problem *q) {
    /* Clusters share A along rows: tiles of one row belong to one group. Tiles of 256 rows there compute only the rows of their group. */
    static const te__gemm_tile_kind rows[] = {{256, 128, 1.0, 2, 384, 2}, {256, 128, 0.97, 2, 384, 1}, {64, 256, 0.8, 0, 384, 1}, {64, 128, 0.74, 0, 384, 1}};
    static const te__gemm_tile_kind sums[] = {{128, 256, 1.0, 1, 384, 2}, {128, 256, 0.985, 1, 384, 1}, {128, 128, 0.94, 1, 384, 1}, {64, 256, 0.8, 0, 384, 1}, {64, 128, 0.74, 0, 384, 1}};
    static const te__gemm_tile_kind sums_promoting[] = {{256, 128, 0.96, 2, 384, 2}, {256, 128, 0.95, 2, 384, 1}, {128, 128, 0.88, 1, 384, 1}};
    bool promote = te__is_fp8(q->a.dtype) && (a->split_accumulator || q->block), shares_a;
    const te__gemm_tile_kind *kinds = !a->along_k ? rows : promote ? sums_promoting : sums;
    int count = !a->along_k ? promote ? 2 : TE__COUNT(rows) : promote ? TE__COUNT(sums_promoting) : TE__COUNT(sums);
    int64_t bk = 128 / te__dtype_size(q->a.dtype), down, across;
    const te__gemm_tile_kind *t = te__grouped_choose(p, kinds, count, a, bk, a->along_k ? 256 : 64);
    te__launch *prepare = te__plan_launch(p, "gemm", "gemm_groups"), *l = te__plan_launch(p, "gemm", "gemm_hopper");
    te__gemm_groups_kargs *g = TE__KARGS(p, prepare, te__gemm_groups_kargs);
    te__gemm_hopper_grouped_kargs *k = TE__KARGS(p, l, te__gemm_hopper_grouped_kargs);
    te__gemm_grouped_kargs common = TE_ZERO;
    te__gemm_kargs out;
    bool by_tma;
    int store;
    te__grouped_fill(&common, a, q);
    k->h.g = common.g;
    k->groups = common.groups;
    out = k->h.g;
    store = te__gemm_store_of(&out);
    if (a->along_k) { /* the third dimension of D's map: its groups */
        out.splits = (int)a->groups;
        out.d_split = k->groups.b_elements;
    }
    by_tma = (store & TE__GEMM_STORE) != 0;
    shares_a = t->cluster > 1 && (t->bm > t->bn || !a->along_k);
    down = t->bm * (shares_a ? 1 : t->cluster);
    across = te__div_up(a->n, t->bn * (shares_a ? t->cluster : 1));
    te__launch_size(prepare, 1, 1, 1, 32, 0);
    te__gemm_options(l, q);
    te__launch_option(l, "BN", t->bn);
    te__launch_option(l, "WAVES", t->option);
    te__launch_option(l, "CLUSTER", t->cluster);
    te__launch_option(l, "PROMOTE", promote);
    te__launch_option(l, "STORE", store);
    if (store) te__launch_option(l, "D_DT", k->h.g.d_dt);
    te__launch_option(l, "GROUPED", a->along_k ? 2 : 1);
    l->cluster = (unsigned)t->cluster;
    te__launch_size(l, t->cluster * te__min(te__grouped_tiles(a, down, t->bn * (shares_a ? t->cluster : 1)), te__gemm_clusters(p, t->cluster)), 1, 1,
                    t->threads, TE__GEMM_HOPPER_SHARED);
    if (te__gemm_map(p, k->h.a_map, &q->a, a->m, a->k, t->bm / (shares_a || (!a->along_k && t->bm == 256) ? 2 : 1)) != TE_OK ||
        (a->along_k ? te__gemm_map(p, k->h.b_map, &q->b, a->n, a->k, t->bn / (t->cluster > 1 && !shares_a ? 2 : 1))
                    : te__grouped_stack_map(p, k->h.b_map, a, &q->b, t->bn)) != TE_OK ||
        (by_tma && te__gemm_out_map(p, k->h.d_map, &out, out.d, out.ldd) != TE_OK) ||
        (by_tma && out.aux && te__gemm_out_map(p, k->h.aux_map, &out, out.aux, out.ldaux) != TE_OK))
        return p->result;
    te__grouped_plan_groups(p, a, q, k, t->bm, a->along_k ? te__div_up(a->m, down) * across : across, by_tma, g);
    k->rows = g->rows;
    k->maps = g->maps;
    te__plan_why(p, q->block ? "TMA and wgmma, sums of 128 k scaled in f32" : promote ? "TMA and wgmma, partial sums of 128 k promoted to f32" : "TMA and wgmma");
    return p->result;
}

/* ---- the choice ------------------------------------------------------------------------------------------------------ */

static te_result te__cuda_plan_grouped_gemm(te__plan *p, const te_op_grouped_gemm_args *a) {
    te__gemm_problem q = TE_ZERO;
    te_op_gemm_args one = te__grouped_one(a);
    if (a->groups == 0 || a->m == 0 || a->n == 0) return TE_OK;
    q.args = &one;
    q.a.data = te__data(a->a);
    q.a.dtype = a->a->dtype;
    q.a.ld = te__gemm_ld(a->a);
    q.a.k_major = !a->a_transposed;
    q.b.data = te__data(a->b);
    q.b.dtype = a->b->dtype;
    q.b.ld = te__gemm_ld(a->b);
    q.b.k_major = a->b_transposed;
    if (te__gemm_is_block(a->scaling_a)) q.block = TE__GEMM_1D_2D;
    if (a->k == 0 || p->baseline) return te__grouped_plan_naive(p, a, &q);
    return p->edits_maps && te__gemm_fits_hopper(p, &q) && te__gemm_is_aligned(&q) ? te__grouped_plan_hopper(p, a, &q) : te__grouped_plan_mma(p, a, &q);
}
