// ops/optim/adam_states.cu: one Adam or AdamW step (see adam.cu) over many tensors whose states are not all in f32. A
// master may be stored as its remainders (see arithmetic.h).
//
// For a state with a scale, adam_amax has already computed the step to find the largest magnitude of the state. This
// kernel computes the step again and stores the state. So no f32 copy of the state is needed.
//
// Launch: block 256; the grid has one block for each chunk of 4096 elements. If found_inf is not 0, nothing is written.
//
// te:baseline
#include "ops/optim/adam.cuh"
#include "ops/optim/multi.cuh"

extern "C" __global__ void __launch_bounds__(256) te_adam_states(const __grid_constant__ te__adam_states_kargs a) {
    te_follow();
    if (te_adam_skips(a.numbers)) return;
    te_adam_step step = te_adam_begin(a.numbers);
    int t = te_tensor_of(a.first, a.tensors, blockIdx.x);
    te_i64 begin = (te_i64)(blockIdx.x - a.first[t]) * TE__ADAM_STATES_CHUNK;
    te_i64 end = begin + TE__ADAM_STATES_CHUNK < a.n[t] ? begin + TE__ADAM_STATES_CHUNK : a.n[t];
    float scale[TE__STATES], multiplier[TE__STATES];
    for (int k = 0; k < TE__STATES; k++) {
        scale[k] = a.scale[k][t] ? a.factor[t * 2 * TE__STATES + k] : 1.0f;
        multiplier[k] = a.scale[k][t] ? a.factor[(t * 2 + 1) * TE__STATES + k] : 1.0f;
    }
    for (te_i64 i = begin + threadIdx.x; i < end; i += 256) {
        float x[TE__STATES];
        te_adam_element(a, step, t, scale, i, x);
        float p = x[TE__STATE_MASTER];
        if (a.state[TE__STATE_MASTER][t] && a.state_dt[TE__STATE_MASTER][t] == TE_U8)
            te__split_master(p, (te_u16 *)a.param[t] + i, (te_u16 *)a.state[TE__STATE_MASTER][t] + i);
        else te_store(a.param[t], i, a.param_dt[t], p);
        for (int k = 0; k < TE__STATES; k++)
            if (a.state[k][t] && a.state_dt[k][t] != TE_U8)
                te_store(a.state[k][t], i, a.state_dt[k][t], __fmul_rn(x[k], multiplier[k]));
    }
}
