// ops/optim/adam.cuh: the arithmetic of Adam for one element, and its states in any format. Every operation is rounded
// by itself, as on the CPU.
#pragma once
#include "device/base.cuh"
#include "ops/optim/arithmetic.h"
#include "ops/optim/kargs.h"

struct te_adam_step {
    float grad_scale, lr, unbias1, unbias2;
    const te__adam_numbers &a;
    TE_DEV void operator()(float g, float &p, float &m, float &v) const {
        g = __fmul_rn(g, grad_scale);
        if (a.l2_mode) g = __fadd_rn(g, __fmul_rn(a.weight_decay, p));
        m = __fadd_rn(__fmul_rn(a.beta1, m), __fmul_rn(1.0f - a.beta1, g));
        v = __fadd_rn(__fmul_rn(a.beta2, v), __fmul_rn(__fmul_rn(1.0f - a.beta2, g), g));
        // This multiplies by a reciprocal. A division with the dividend 0 would branch to a slow path, and gradients
        // of embeddings have many zeros.
        float update = __fmul_rn(__fmul_rn(unbias1, m), __frcp_rn(__fadd_rn(__fsqrt_rn(__fmul_rn(unbias2, v)), a.eps)));
        if (!a.l2_mode) update = __fadd_rn(update, __fmul_rn(a.weight_decay, p));
        p = __fsub_rn(p, __fmul_rn(lr, update));
    }
};
TE_DEV bool te_adam_skips(const te__adam_numbers &a) { return a.found_inf && *a.found_inf != 0.0f; }
TE_DEV te_adam_step te_adam_begin(const te__adam_numbers &a) {
    te_adam_step step = {a.grad_scale ? *a.grad_scale : 1.0f, a.lr_device ? *a.lr_device : a.lr,
                         a.unbias ? a.unbias[0] : a.unbias1, a.unbias ? a.unbias[1] : a.unbias2, a};
    return step;
}

// Computes the states of element i of tensor t after the step. If there is no master, x[TE__STATE_MASTER] is the
// parameter.
TE_DEV void te_adam_element(const te__adam_states_kargs &a, const te_adam_step &step, int t,
                            const float scale[TE__STATES], te_i64 i, float x[TE__STATES]) {
    const void *master = a.state[TE__STATE_MASTER][t];
    int dt = a.state_dt[TE__STATE_MASTER][t];
    if (!master) x[TE__STATE_MASTER] = te_load(a.param[t], i, a.param_dt[t]);
    else if (dt == TE_U8)
        x[TE__STATE_MASTER] = te__join_master(((const te_u16 *)a.param[t])[i], ((const te_u16 *)master)[i]);
    else x[TE__STATE_MASTER] = __fmul_rn(te_load(master, i, dt), scale[TE__STATE_MASTER]);
    x[TE__STATE_M] = __fmul_rn(te_load(a.state[TE__STATE_M][t], i, a.state_dt[TE__STATE_M][t]), scale[TE__STATE_M]);
    x[TE__STATE_V] = __fmul_rn(te_load(a.state[TE__STATE_V][t], i, a.state_dt[TE__STATE_V][t]), scale[TE__STATE_V]);
    step(te_load(a.grad[t], i, a.grad_dt[t]), x[TE__STATE_MASTER], x[TE__STATE_M], x[TE__STATE_V]);
}
