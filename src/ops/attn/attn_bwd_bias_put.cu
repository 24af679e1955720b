// ops/attn/attn_bwd_bias_put.cu: runs after attn_bwd_bias_hopper.cu, or after attn_bwd_hopper.cu with X_SUMS. Each
// thread adds the partial sums of one element of dB in order, and multiplies by bias_scale.
//
// Launch: grid ceil(elements / 256), block 256.
// te:arch 90a
#include "ops/attn/attn.cuh"

extern "C" __global__ void __launch_bounds__(256)
    te_attn_bwd_bias_put(const __grid_constant__ te__attn_bias_hopper_kargs args) {
    te_follow();
    const te__attn_kargs &a = args.a;
    const te__attn_table &to = a.x.dbias;
    te_i64 rest = (te_i64)blockIdx.x * 256 + threadIdx.x;
    const int j = (int)(rest % a.s_kv);
    rest /= a.s_kv;
    const int i = (int)(rest % a.x.dbias_i);
    rest /= a.x.dbias_i;
    const int h = (int)(rest % a.x.dbias_h), b = (int)(rest / a.x.dbias_h);
    if (b >= a.x.dbias_b) return;
    const float *from = (const float *)args.to.p + b * args.to.b + h * args.to.h + i * args.to.i + j;
    float sum = 0.0f;
    for (int part = 0; part < args.parts; part++, from += args.part) sum += *from;
    te_store(to.p, b * to.b + h * to.h + i * to.i + j, to.dt, sum * a.x.bias_scale);
}
