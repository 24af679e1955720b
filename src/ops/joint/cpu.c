/* ops/joint/cpu.c: the reference of te_op_joint_gemm, its parts one after another. This file must not depend on
 * CUDA. */

static te_result te__cpu_joint_products(te_ctx *te, const te_op_joint_gemm_args *a) {
    te__joint_step step;
    te_result r = TE_OK;
    int i;
    for (i = 0; i < a->count && r == TE_OK; i++) {
        te_tensor d;
        te_op_gemm_args g = te__joint_product(a, i, &d);
        r = te__cpu_gemm(te, &g);
    }
    if (r == TE_OK && a->rope.q) {
        te__joint_rope rope;
        te__joint_rope_of(&rope, a);
        return te__cpu_qkv_rope(te, &rope.args);
    }
    if (r != TE_OK || !a->y || te__numel(a->y) == 0) return r;
    r = te__joint_step_of(te, &step, a);
    if (r != TE_OK) return r;
    return a->activation ? te__cpu_act_fwd(te, &step.act) : te__cpu_axpby(te, &step.add);
}
static te_result te__cpu_joint_gemm(te_ctx *te, const te_op_joint_gemm_args *a) {
    te__joint_norm n;
    te_result r;
    if (!a->norm.normalization) return te__cpu_joint_products(te, a);
    te__joint_norm_of(te, &n, a);
    n.memory.data = te__alloc(te, (size_t)te__max(n.bytes, 1));
    if (!n.memory.data) return TE_ERR_OUT_OF_MEMORY;
    r = te__cpu_norm_fwd(te, &n.norm, a->norm.normalization == TE_LAYERNORM);
    if (r == TE_OK) r = te__cpu_joint_products(te, &n.products);
    te__free(te, n.memory.data);
    return r;
}
