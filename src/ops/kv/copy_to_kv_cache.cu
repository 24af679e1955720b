// ops/kv/copy_to_kv_cache.cu: copies keys and values of new tokens to their places in a cache, which may have pages
// (te__kv_place). In a cache of E4M3 codes a warp writes a head of a token.
//
// Launch: grid (tokens or fewer, 2); block 128. Blocks with y = 0 copy keys, those with y = 1 values.
//
// te:baseline
#include "device/base.cuh"
#include "device/coded_row.cuh"
#include "base/sequences.h"
#include "ops/kv/kargs.h"

extern "C" __global__ void __launch_bounds__(128) te_copy_to_kv_cache(const __grid_constant__ te__kv_copy_kargs a) {
    te_follow();
    const te__kv_side &s = a.side[blockIdx.y];
    for (te_i64 at = blockIdx.x; at < a.tokens; at += gridDim.x) {
        te_i64 t, page, row;
        int b;
        if (!te__kv_place(&a, at, &b, &t, &page, &row)) continue;
        if (s.cache_dt == TE_F8E4M3) {
#pragma unroll 1
            for (int h = threadIdx.x / TE_WARP; h < a.heads; h += 128 / TE_WARP) {
                const te_i64 from = t * s.x_s + b * s.x_b + h * s.x_h;
                te_put_coded_row((te_u8 *)s.cache + page * s.page + row * s.row + h * s.head,
                                 (te_u8 *)s.factors + page * s.factor_page + row * s.factor_row + h * s.factor_head,
                                 s.d, [&](int c) { return te_load(s.x, from + c, s.x_dt); });
            }
            continue;
        }
        for (int i = threadIdx.x; i < a.heads * s.d; i += 128) {
            const int h = i / s.d, c = i - h * s.d;
            te_store(s.cache, page * s.page + row * s.row + h * s.head + c, s.cache_dt,
                     te_load(s.x, t * s.x_s + b * s.x_b + h * s.x_h + c, s.x_dt));
        }
    }
}
