// ops/attn/attn_cache_numbers.cu: writes the numbers of a cache of E4M3 codes, for kernels that read keys and values in
// q's format. A row's numbers are its codes times its factor 2^e: exact in bf16. In f16, numbers below 2^-14 lose bits,
// and those above 65504 become 65504.
//
// A sequence's keys come first, then up to TE__ATTN_CACHE_ZEROS rows of zeros, since kernels multiply values of keys
// that no query sees by 0. Later rows are not written.
//
// A thread converts eight neighbouring codes.
//
// Launch: grid (ceil(s_kv / 16), sequences, 2), block 256. Blocks with z = 0 write keys, those with z = 1 values. Rows
// start at multiples of 8 bytes; d and d_v are multiples of 8.
// te:arch 80
// te:row X_DT=2|3
#include "device/mma.cuh"
#include "ops/attn/attn.cuh"

#ifndef X_DT
#define X_DT 3
#endif
enum { DT = X_DT, KEYS = 16 };

extern "C" __global__ void __launch_bounds__(256)
    te_attn_cache_numbers(const __grid_constant__ te__attn_cache_kargs k) {
    te_follow();
    const te__attn_kargs &a = k.a;
    const bool values = blockIdx.z;
    const te__attn_view &from = values ? a.v : a.k, &factors = values ? a.x.v_factors : a.x.k_factors;
    te_u16 *const to = (te_u16 *)(values ? k.v : k.k);
    const te_u32 pieces = (values ? a.d_v : a.d) / 8, of_key = a.groups * pieces;
    const int b = blockIdx.y, first = blockIdx.x * KEYS;
    const te__attn_seq seq = te__attn_seq_of(&a, b);
    const int end = min(a.s_kv, seq.s_kv + TE__ATTN_CACHE_ZEROS);
    for (te_u32 at = threadIdx.x; at < KEYS * of_key; at += 256) {
        const te_u32 in_keys = at / of_key, in_key = at - in_keys * of_key, g = in_key / pieces,
                     c = 8 * (in_key - g * pieces);
        const int j = first + (int)in_keys;
        if (j >= end) break;
        uint4 out = make_uint4(0, 0, 0, 0);
        if (j < seq.s_kv) {
            int row = j;
            te_i64 page = b;
            if (a.x.pages) page = te__attn_page(&a.x, b, j, &row);
            const uint2 codes = *(const uint2 *)((const te_u8 *)from.p + page * from.b + g * from.h + row * from.s + c);
            const float by = te__e8m0_to_f32(
                ((const te_u8 *)factors.p)[page * factors.b + g * factors.h + row * factors.s]);
            te_u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float x[2];
                te_fp8x2_to_f32((i < 2 ? codes.x : codes.y) >> (16 * (i & 1)), TE_F8E4M3, x, x + 1);
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    x[n] *= by;
                    if (DT == TE_F16 && fabsf(x[n]) > 65504.0f) x[n] = copysignf(65504.0f, x[n]);
                }
                words[i] = te_f32x2_to_half(x[0], x[1], DT);
            }
            out = make_uint4(words[0], words[1], words[2], words[3]);
        }
        *(uint4 *)(to + (((te_i64)b * a.s_kv + j) * a.groups + g) * (8 * pieces) + c) = out;
    }
}
