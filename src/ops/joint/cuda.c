/* ops/joint/cuda.c: plans te_op_joint_gemm: one launch of gemv_joint for all its parts, or a launch for each. This file
 * must not call the CUDA driver. */

/* Returns whether gemv_joint can normalize the rows of A with the bits of norm_fwd, which has a row in registers then.
 * Sets *n. */
static bool te__joint_norm_fits(const te__plan *p, const te_op_joint_gemm_args *a, te__gemv_norm *n) {
    const te__eight_row rows[] = {
        {a->a, TE_DTYPE_NONE, 16}, {a->norm_weight, TE_DTYPE_NONE, 16}, {a->norm_bias, a->norm_weight->dtype, 16}};
    const te__norm_tiling t = te__norm_tile(a->k / 8, TE__GEMV_NORM_CHUNKS);
    if (te__dtype_size(a->a->dtype) != 2 || t.warps == 0 || te__eight_lacks(p, rows, TE__COUNT(rows), a->k))
        return false;
    memset(n, 0, sizeof(*n));
    n->gamma = te__data(a->norm_weight);
    n->beta = te__data(a->norm_bias);
    n->eps = a->norm.eps;
    n->one_nth = 1.0f / (float)a->k;
    n->zero_centered = a->norm.zero_centered_gamma;
    n->rounded = a->norm_rounded;
    n->warps = t.warps;
    n->layernorm = a->norm.normalization == TE_LAYERNORM;
    n->dt = (int)a->norm_weight->dtype;
    return true;
}

static te_result te__joint_plan_rope(te__plan *p, const te_op_joint_gemm_args *a) {
    te__joint_rope r;
    te__joint_rope_of(&r, a);
    return te__cuda_plan_qkv_rope(p, &r.args);
}

static void te__joint_note_rope(te__plan *p, const te_op_joint_gemm_args *a) {
    te__joint_rope r;
    te__joint_rope_of(&r, a);
    te__qkv_rope_note(p, &r.args);
}

/* Returns whether gemv_joint can rotate the results: into caches of D's format, in tiles of whole pairs
 * (gemv_rotate.cuh). Sets *k. */
static bool te__joint_rope_fits(const te_op_joint_gemm_args *a, te__rope_kargs *k) {
    const int dt = (int)a->product[0].d->dtype;
    te__joint_rope r;
    te__joint_rope_of(&r, a);
    te__qkv_rope_problem(k, &r.args, false);
    return !k->coded && !k->interleaved && k->d % 16 == 0 && k->half % 8 == 0 && k->q.dt == dt && k->k.dt == dt &&
           k->v.dt == dt &&
           /* a tile has the scales of one block */
           (a->scaling_b != TE_SCALING_BLOCK_2D || k->half == 0 || 128 % k->d == 0);
}

/* Returns whether a rotation's places and angles can be read before te_follow. */
static bool te__joint_rope_is_settled(const te__plan *p, const te_op_qkv_rope_args *rope) {
    return te__is_settled(p, rope->cu_seqlens) && te__is_settled(p, rope->cache_positions) &&
           te__is_settled(p, rope->page_table) && te__is_settled(p, rope->angles.start_positions) &&
           te__is_settled(p, rope->angles.positions) && te__is_settled(p, rope->angles.freqs);
}

/* Plans the products and the step after them, of rows that `norm` makes of A if it is not NULL. Returns false, and has
 * planned nothing, if gemv_joint cannot take them. A rotation that the kernel cannot take has a launch of its own. */
static bool te__joint_plan_one(te__plan *p, const te_op_joint_gemm_args *a, const te__gemv_norm *norm) {
    te_op_gemm_args product[TE__COUNT(((te_op_joint_gemm_args *)0)->product)];
    te_tensor d[TE__COUNT(((te_op_joint_gemm_args *)0)->product)];
    te__gemm_joint joint = TE_ZERO;
    te__rope_kargs rope;
    int i;
    for (i = 0; i < a->count; i++) product[i] = te__joint_product(a, i, &d[i]);
    joint.count = a->count;
    joint.activation = a->activation;
    joint.residual = a->residual;
    joint.y = a->y;
    joint.norm = norm;
    joint.norm_early = te__is_settled(p, a->norm_weight) && te__is_settled(p, a->norm_bias);
    if (a->rope.q && te__joint_rope_fits(a, &rope)) {
        joint.rope = &rope;
        joint.rope_bytes = sizeof(rope);
        joint.rope_early = te__joint_rope_is_settled(p, &a->rope);
    }
    if (!te__gemm_plan_joint(p, product, joint)) return false;
    if (a->rope.q && !joint.rope) te__joint_plan_rope(p, a);
    if (joint.rope) te__joint_note_rope(p, a);
    return true;
}
static te_result te__joint_plan_products(te__plan *p, const te_op_joint_gemm_args *a) {
    te__joint_step step;
    te_result r = TE_OK;
    int i;
    if (te__joint_plan_one(p, a, NULL)) return p->result;
    for (i = 0; i < a->count && r == TE_OK; i++) {
        te_tensor d;
        te_op_gemm_args product = te__joint_product(a, i, &d);
        r = te__cuda_plan_gemm(p, &product);
    }
    if (r == TE_OK && a->rope.q) return te__joint_plan_rope(p, a);
    if (r != TE_OK || !a->y || te__numel(a->y) == 0) return r;
    r = te__joint_step_of(p->te, &step, a);
    if (r != TE_OK) return r;
    return a->activation ? te__cuda_plan_act_fwd(p, &step.act) : te__cuda_plan_axpby(p, &step.add);
}
static te_result te__cuda_plan_joint_gemm(te__plan *p, const te_op_joint_gemm_args *a) {
    te__gemv_norm norm;
    te__joint_norm n;
    te_result r;
    if (!a->norm.normalization) return te__joint_plan_products(p, a);
    if (te__joint_norm_fits(p, a, &norm) && te__joint_plan_one(p, a, &norm)) return p->result;
    te__joint_norm_of(p->te, &n, a);
    n.memory.data = te__plan_workspace(p, te__max(n.bytes, 1));
    if (!n.memory.data) return p->result;
    r = te__cuda_plan_norm_fwd(p, &n.norm, a->norm.normalization == TE_LAYERNORM);
    return r == TE_OK ? te__joint_plan_products(p, &n.products) : r;
}
