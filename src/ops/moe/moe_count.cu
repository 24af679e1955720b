// ops/moe/moe_count.cu: sets counts[e][c] to the number of tokens of chunk c that are routed to expert e.
//
// Launch: block 256, one thread for each expert; grid: chunks of tokens.
//
// te:baseline
#include "ops/moe/loop.cuh"

extern "C" __global__ void __launch_bounds__(256) te_moe_count(const __grid_constant__ te__moe_map_kargs a) {
    te_follow();
    te_i64 begin = (te_i64)blockIdx.x * a.chunk, end = begin + a.chunk < a.tokens ? begin + a.chunk : a.tokens;
    TE_LOOP
    for (te_i64 e = threadIdx.x; e < a.experts; e += 256) {
        int n = 0;
        TE_LOOP
        for (te_i64 t = begin; t < end; t++) {
            te_i64 at = t * a.experts + e;
            n += (a.routing_dt == TE_U8 ? (te_i64)((const te_u8 *)a.routing)[at]
                                        : te_load_index(a.routing, at, a.routing_dt)) != 0;
        }
        a.counts[e * a.chunks + blockIdx.x] = n;
    }
}
