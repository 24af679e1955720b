// ops/softcap/softcap.cu: softcap, and its gradient.
//
//   y = cap * tanh(x / cap)                    if dy is NULL
//   y = dy * (1 - tanh(x / cap)^2)             otherwise
//
// Launch: block 256; any grid. Any dtypes are allowed.
//
// te:baseline
#include "device/base.cuh"
#include "ops/softcap/kargs.h"

extern "C" __global__ void __launch_bounds__(256) te_softcap(const __grid_constant__ te__softcap_kargs a) {
    te_follow();
    for (te_i64 i = (te_i64)blockIdx.x * 256 + threadIdx.x; i < a.count; i += (te_i64)gridDim.x * 256) {
        float t = tanhf(__fdiv_rn(te_load(a.x, i, a.x_dt), a.cap));
        te_store(a.y, i, a.y_dt, a.dy ? te_load(a.dy, i, a.dy_dt) * (1.0f - t * t) : a.cap * t);
    }
}
