/* ops/joint/cuda.c: plans te_op_joint_gemm: one launch of gemv_k for all its parts, or a launch for each. This file
 * must not call the CUDA driver. */

static te_result te__cuda_plan_joint_gemm(te__plan *p, const te_op_joint_gemm_args *a) {
    te_op_gemm_args product[TE__COUNT(((te_op_joint_gemm_args *)0)->product)];
    te_tensor d[TE__COUNT(((te_op_joint_gemm_args *)0)->product)];
    te__joint_step step;
    te_result r = TE_OK;
    int i;
    for (i = 0; i < a->count; i++) product[i] = te__joint_product(a, i, &d[i]);
    if (te__gemm_plan_joint(p, product, a->count, a->activation, a->residual, a->y)) return p->result;
    for (i = 0; i < a->count && r == TE_OK; i++) r = te__cuda_plan_gemm(p, &product[i]);
    if (r != TE_OK || !a->y || te__numel(a->y) == 0) return r;
    r = te__joint_step_of(p->te, &step, a);
    if (r != TE_OK) return r;
    return a->activation ? te__cuda_plan_act_fwd(p, &step.act) : te__cuda_plan_axpby(p, &step.add);
}
