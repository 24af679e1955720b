// ops/optim/adam_scales.cu: computes the new scales of a tensor's states from the amaxes of its chunks. It writes the
// old scale (for decoding) and the new multiplier (for encoding) of each state to `factor`.
//
// Launch: block 256; the grid has one block for each tensor. If found_inf is not 0, nothing is written.
//
// te:baseline
#include "ops/optim/adam.cuh"

extern "C" __global__ void __launch_bounds__(256) te_adam_scales(const __grid_constant__ te__adam_states_kargs a) {
    te_follow();
    __shared__ float scratch[32];
    if (te_adam_skips(a.numbers)) return;
    int t = blockIdx.x;
    te_i64 first = a.first[t], end = first + te_div_up(a.n[t], TE__ADAM_STATES_CHUNK);
    for (int k = 0; k < TE__STATES; k++) {
        if (!a.scale[k][t]) continue;
        int e4m3 = a.state_dt[k][t] == TE_F8E4M3;
        float amax = 0.0f;
        for (te_i64 c = first + threadIdx.x; c < end; c += 256) amax = fmaxf(amax, a.amax[c * TE__STATES + k]);
        amax = te_block_max(amax, scratch);
        if (threadIdx.x != 0) continue;
        a.factor[t * 2 * TE__STATES + k] = *a.scale[k][t];
        a.factor[(t * 2 + 1) * TE__STATES + k] = te__state_multiplier(amax, e4m3);
        *a.scale[k][t] = te__state_scale(amax, e4m3);
    }
}
