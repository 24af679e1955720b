// ops/optim/update_scale.cu: updates the loss scale after a step. The scale falls after an overflow. It grows after
// growth_interval steps without an overflow.
//
// Launch: one thread.
//
// te:baseline
#include "device/base.cuh"
#include "ops/optim/arithmetic.h"
#include "ops/optim/kargs.h"

extern "C" __global__ void te_update_scale(const __grid_constant__ te__update_scale_kargs a) {
    te_follow();
    te__scale_after(a.scale, a.inv_scale, a.growth_tracker, a.found_inf, a.growth_factor, a.backoff_factor,
                    a.growth_interval);
}
