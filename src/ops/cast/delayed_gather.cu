// ops/cast/delayed_gather.cu: copies row 0 of the history of each state into `amaxes`, one state after another.
//
// Launch: block 256, one thread for each column (slot) of a history.
//
// te:baseline
#include "ops/cast/list.cuh"

extern "C" __global__ void __launch_bounds__(256) te_delayed_gather(const __grid_constant__ te__delayed_kargs a) {
    te_follow();
    te_u32 slot = blockIdx.x * 256 + threadIdx.x;
    if (slot >= a.first[a.states]) return;
    int state = te_state_of(a, slot);
    a.amaxes[slot] = a.history[state][slot - a.first[state]];
}
