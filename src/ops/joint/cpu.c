/* ops/joint/cpu.c: the reference of te_op_joint_gemm, its parts one after another. This file must not depend on
 * CUDA. */

static te_result te__cpu_joint_gemm(te_ctx *te, const te_op_joint_gemm_args *a) {
    te__joint_step step;
    te_result r = TE_OK;
    int i;
    for (i = 0; i < a->count && r == TE_OK; i++) {
        te_tensor d;
        te_op_gemm_args g = te__joint_product(a, i, &d);
        r = te__cpu_gemm(te, &g);
    }
    if (r != TE_OK || !a->y || te__numel(a->y) == 0) return r;
    r = te__joint_step_of(te, &step, a);
    if (r != TE_OK) return r;
    return a->activation ? te__cpu_act_fwd(te, &step.act) : te__cpu_axpby(te, &step.add);
}
