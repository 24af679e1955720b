// ops/optim/store_state.cu: stores x as an optimizer state in f16 or e4m3. The scale comes from the amax of x.
//
// Launch: block 256; each block has 4096 elements. Any alignment is allowed.
//
// te:baseline
#include "device/base.cuh"
#include "ops/optim/arithmetic.h"
#include "ops/optim/kargs.h"

extern "C" __global__ void __launch_bounds__(256) te_store_state(const __grid_constant__ te__store_state_kargs a) {
    te_follow();
    int e4m3 = a.state_dt == TE_F8E4M3;
    float multiplier = te__state_multiplier(*a.amax, e4m3);
    te_i64 begin = (te_i64)blockIdx.x * 4096;
    for (te_i64 i = begin + threadIdx.x; i < begin + 4096 && i < a.n; i += 256)
        te_store(a.state, i, a.state_dt, __fmul_rn(te_load(a.x, i, a.x_dt), multiplier));
    if (blockIdx.x == 0 && threadIdx.x == 0) *a.scale = te__state_scale(*a.amax, e4m3);
}
