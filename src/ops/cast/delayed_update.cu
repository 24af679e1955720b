// ops/cast/delayed_update.cu: one step of delayed scaling for every slot of many states. A slot is one column of a
// history [length, n], with its scale. te__delayed_slot in cpu.c is the reference.
//
//   last = the slot's amax in `amaxes`, if `amaxes` is given and that amax is not 0; otherwise row 0
//   last == 0: nothing is written
//   row          0    1 .. length-2    length-1
//   new value    0    the next row     last
//   (with length 1, the only row becomes 0)
//   scale = scaled_max / amax, where amax is the maximum of `last` and the old rows 1 .. length-1
//   (with most_recent, amax is `last`)
//
// Launch: block 256; grid: one block for each slot.
//
// te:baseline
#include "ops/cast/list.cuh"

extern "C" __global__ void __launch_bounds__(256) te_delayed_update(const __grid_constant__ te__delayed_kargs a) {
    te_follow();
    __shared__ float scratch[32];
    int state = te_state_of(a, blockIdx.x);
    te_u32 slot = blockIdx.x - a.first[state];
    te_i64 n = a.first[state + 1] - a.first[state], length = a.length[a.length_index[state]];
    float *history = a.history[state] + slot; // row r at r * n
    float last = history[0], reduced = a.amaxes ? a.amaxes[blockIdx.x] : 0.0f;
    if (reduced != 0.0f) last = reduced;
    if (last == 0.0f) return;
    float largest = 0.0f; // amaxes are not negative
    for (te_i64 base = 1; base < length; base += 256) {
        te_i64 row = base + threadIdx.x;
        float old = row < length ? history[row * n] : 0.0f, below = row + 1 < length ? history[(row + 1) * n] : last;
        largest = fmaxf(largest, old);
        __syncthreads(); // all reads of a round come before its writes; the next round reads nothing that this one
                         // writes
        if (row < length) history[row * n] = below;
    }
    largest = fmaxf(te_block_max(largest, scratch), last);
    if (threadIdx.x != 0) return;
    history[0] = 0.0f;
    float amax = a.most_recent ? last : largest;
    if (amax > 0.0f && amax <= TE_FLT_MAX) {
        float scale = __fdiv_rn(a.scaled_max, amax);
        a.scale[state][slot] = scale == TE_INF ? TE_FLT_MAX : scale;
    }
}
