// ops/optim/sgd.cu: one step of stochastic gradient descent over many tensors of mixed formats.
//
//   d  = grad * grad_scale
//   d += weight_decay * p                       unless wd_after_momentum
//   b  = momentum * b + (1 - dampening) * d     if momentum is not 0; in the first step of a tensor b = d
//   d  = nesterov ? d + momentum * b : b        if momentum is not 0
//   d += weight_decay * p                       if wd_after_momentum
//   p -= lr * d
//
// p is the f32 master if there is one, else the parameter. With a master, the parameter becomes the rounded master.
// Every operation is rounded by itself, as on the CPU.
//
// Launch: block 256; the grid has one block for each chunk of 4096 elements. If found_inf is not 0, nothing is written.
//
// te:baseline
#include "device/base.cuh"
#include "ops/optim/kargs.h"
#include "ops/optim/multi.cuh"

extern "C" __global__ void __launch_bounds__(256) te_sgd(const __grid_constant__ te__sgd_kargs a) {
    te_follow();
    if (a.found_inf && *a.found_inf != 0.0f) return;
    float grad_scale = a.grad_scale ? *a.grad_scale : 1.0f, lr = a.lr_device ? *a.lr_device : a.lr,
          rest = 1.0f - a.dampening;
    int t = te_tensor_of(a.begin, a.tensors, blockIdx.x), g_dt = a.grad_dt[t], p_dt = a.param_dt[t],
        b_dt = a.momentum_dt[t];
    te_i64 begin = (te_i64)(blockIdx.x - a.begin[t]) * TE__SGD_CHUNK,
           end = begin + TE__SGD_CHUNK < a.n[t] ? begin + TE__SGD_CHUNK : a.n[t];
    const void *grad = a.grad[t];
    void *param = a.param[t], *momentum = a.momentum[t];
    float *master = a.master[t];
    for (te_i64 i = begin + threadIdx.x; i < end; i += 256) {
        float d = __fmul_rn(te_load(grad, i, g_dt), grad_scale), p = master ? master[i] : te_load(param, i, p_dt);
        if (a.weight_decay != 0.0f && !a.wd_after_momentum) d = __fadd_rn(d, __fmul_rn(a.weight_decay, p));
        if (a.momentum_factor != 0.0f) {
            float b = a.first[t]
                          ? d
                          : __fadd_rn(__fmul_rn(a.momentum_factor, te_load(momentum, i, b_dt)), __fmul_rn(rest, d));
            d = a.nesterov ? __fadd_rn(d, __fmul_rn(a.momentum_factor, b)) : b;
            te_store(momentum, i, b_dt, b);
        }
        if (a.weight_decay != 0.0f && a.wd_after_momentum) d = __fadd_rn(d, __fmul_rn(a.weight_decay, p));
        p = __fsub_rn(p, __fmul_rn(lr, d));
        if (master) master[i] = p;
        te_store(param, i, p_dt, p);
    }
}
