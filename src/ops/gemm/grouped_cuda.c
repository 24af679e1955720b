/* ops/gemm/grouped_cuda.c: products by groups: which kernel and how it is launched. Knows plans; must not know the driver.
 *
 * How many tiles there are only the device knows: along rows a launch has as many blocks as there can be, and those without a tile leave. */

/* Tiles of bm x bn that there can be: each group ends with one that is not full. */
static int64_t te__grouped_tiles(const te_grouped_gemm_args *a, int64_t bm, int64_t bn) {
    int64_t down = a->along_k ? a->groups * te__div_up(a->m, bm) : te__min(a->m / bm + a->groups, a->m);
    return down * te__div_up(a->n, bn);
}

static void te__grouped_fill(te__gemm_grouped_kargs *k, const te_grouped_gemm_args *a, const te__gemm_problem *q) {
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

static te_result te__grouped_plan_naive(te__plan *p, const te_grouped_gemm_args *a, const te__gemm_problem *q) {
    te__launch *l = te__plan_launch(p, "gemm", "gemm_grouped_naive");
    te__grouped_fill(TE__KARGS(p, l, te__gemm_grouped_kargs), a, q);
    te__launch_size(l, te__grouped_tiles(a, 64, 64), 1, 1, 256, 0);
    p->native = false;
    te__plan_why(p, a->k == 0 ? "k is 0: D is the epilogue of zeros" : "no NVRTC: plain f32 arithmetic from the embedded PTX, no tensor cores");
    return TE_OK;
}

static te_result te__cuda_plan_grouped_gemm(te__plan *p, const te_grouped_gemm_args *a) {
    te__gemm_problem q = TE_ZERO;
    te_gemm_args one = te__grouped_one(a);
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
    return te__grouped_plan_naive(p, a, &q);
}
