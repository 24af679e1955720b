// ops/optim/adam_amax.cu: finds the largest magnitude of each state after the step, in each chunk of each tensor. NaN
// is ignored.
//
// Launch: block 256; the grid has one block for each chunk of 4096 elements. If found_inf is not 0, nothing is written.
//
// te:baseline
#include "ops/optim/adam.cuh"
#include "ops/optim/multi.cuh"

extern "C" __global__ void __launch_bounds__(256) te_adam_amax(const __grid_constant__ te__adam_states_kargs a) {
    te_follow();
    __shared__ float scratch[32];
    if (te_adam_skips(a.numbers)) return;
    te_adam_step step = te_adam_begin(a.numbers);
    int t = te_tensor_of(a.first, a.tensors, blockIdx.x);
    te_i64 begin = (te_i64)(blockIdx.x - a.first[t]) * TE__ADAM_STATES_CHUNK;
    te_i64 end = begin + TE__ADAM_STATES_CHUNK < a.n[t] ? begin + TE__ADAM_STATES_CHUNK : a.n[t];
    float scale[TE__STATES], amax[TE__STATES];
    for (int k = 0; k < TE__STATES; k++) scale[k] = a.scale[k][t] ? *a.scale[k][t] : 1.0f, amax[k] = 0.0f;
    for (te_i64 i = begin + threadIdx.x; i < end; i += 256) {
        float x[TE__STATES];
        te_adam_element(a, step, t, scale, i, x);
        for (int k = 0; k < TE__STATES; k++) amax[k] = fmaxf(amax[k], fabsf(x[k]));
    }
    for (int k = 0; k < TE__STATES; k++) {
        float most = te_block_max(amax[k], scratch);
        if (threadIdx.x == 0) a.amax[(te_i64)blockIdx.x * TE__STATES + k] = most;
    }
}
