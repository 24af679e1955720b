// ops/gemm/gemv_shared.cuh: the short operand Y of gemv_k in shared memory, decoded into f16 once for all warps of a
// block. Its codes come from memory or, with HIGH, from quantizing its numbers as the families cast, block, mxfp8 and
// nvfp4 do. Each block quantizes all of Y, and reads it from the L2 cache.
//
// A line has a slot of 16 bytes for each chunk of eight values. In a turn the four lanes of a quad read neighbouring
// slots, so the slots are in the order [unit][chunk][lane], where each lane has the chunks that it has of X.
#pragma once
#include "device/vector.cuh"
#include "base/scaling.h"
#if SCALES == 2
#include "ops/nvfp4/nvfp4.cuh"
#endif

#define PART (SCALES == 2 ? 16 : 8) // values that a thread quantizes at a time
#define AT_ONCE (JOINT ? 4 : PART / 8) // loads of eight values that a thread waits for at once

struct te_gemv_shared {
    te_u32 base, of_scales, zeros; // addresses in shared memory; zeros: with FOURS, lanes read them in place of Y
    int turns, few, line_bytes;
    te_i64 k;
    float (*sums)[WARPS][SET * SETS][16]; // of two tiles
    float *scratch;                       // for te_block_max
    TE_DEV te_gemv_shared(const te__gemv_kargs &a) : few((int)(SHORT_A ? a.g.m : a.g.n)), k(a.g.k) {
        extern __shared__ __align__(16) te_u8 memory[];
        turns = (int)te_div_up(k, TURN), line_bytes = TE__GEMV_LINE(turns, TURN);
        sums = (float(*)[WARPS][SET * SETS][16])memory;
        scratch = (float *)(sums + 2);
        base = te_smem(scratch + 32), of_scales = base + few * line_bytes, zeros = of_scales + few * turns * 16;
        if (threadIdx.x < 16) te_sts16(zeros + threadIdx.x * 16, make_uint4(0, 0, 0, 0));
    }
    // Returns the address of a line for lane t of a quad. Lines beyond the last one have its address.
    TE_DEV te_u32 line(int number, int t) const { return base + min(number, few - 1) * line_bytes + t * 16; }
    // Reads chunk c of unit i of the turn at `from`.
    TE_DEV void chunk(te_u32 from, int i, int c, te_u32 out[4]) const {
        uint4 u = te_lds16(from + (i * CHUNKS + c) * 64);
        out[0] = u.x, out[1] = u.y, out[2] = u.z, out[3] = u.w;
    }
    // Returns the address of the scale of a group of a line's first turn (MXFP8), or of the turn (group 0).
    TE_DEV te_u32 scale_of(int number, int group) const {
        return of_scales + min(number, few - 1) * turns * 16 + group * 4;
    }
    TE_DEV void put_scale(int line, int number, float f) const { // number: of a group (MXFP8), or of a turn
        te_sts4(of_scales + line * turns * 16 + number * (SCALES == 1 ? 4 : 16), __float_as_uint(f));
    }
    // Writes chunk number `chunk` of a line.
    TE_DEV void put(int line, int chunk, const te_u32 w[4]) const {
        int turn = chunk / (TURN / 8), at = chunk % (TURN / 8), unit = at / CHUNKS, c = chunk % CHUNKS, t = unit % 4;
        if (EXCHANGED) c = at / 4 % 2, t = at % 2 * 2 + at / 2 % 2; // te_gemv_exchange
        te_sts16(base + line * line_bytes + turn * TURN * 2 + ((unit / 4 * CHUNKS + c) * 4 + t) * 16,
                 make_uint4(w[0], w[1], w[2], w[3]));
    }

#if HIGH
    // Returns eight values of a line of A, of which those beyond k are 0.
    TE_DEV te_raw<TE_ANY> ask(const te__gemv_kargs &a, int line, int at) const {
        te_i64 from = line * a.g.lda + at;
        if (JOINT || (a.vector_x && at + 8 <= k)) return te_raw_ask<8>(a.g.a, from, HIGH);
        return te_raw_ask_part<8>(a.g.a, from, HIGH, k - at);
    }
    // Returns the largest |x| of A, NaN ignored.
    TE_DEV float amax(const te__gemv_kargs &a) const {
        float most = 0.0f;
        const int each = (int)te_div_up(k, 8);
#pragma unroll 1
        for (int from = threadIdx.x; from < few * each; from += AT_ONCE * 32 * WARPS) {
            te_raw<TE_ANY> raw[AT_ONCE] = {};
#pragma unroll
            for (int l = 0; l < AT_ONCE; l++) {
                const int i = from + l * 32 * WARPS;
                if (i < few * each) raw[l] = ask(a, i / each, i % each * 8);
            }
#pragma unroll
            for (int l = 0; l < AT_ONCE; l++)
#pragma unroll
                for (int j = 0; j < 8; j++) most = fmaxf(most, fabsf(te_raw_value(raw[l], j, HIGH)));
        }
        return te_block_max(most, scratch);
    }
    // Quantizes A. Returns the factor of all its values.
    TE_DEV float fill(const te__gemv_kargs &a) const {
        const float fp8_max = Y_DT == TE_F8E4M3 ? 448.0f : 57344.0f;
        const int each = turns * TURN / PART;
        float scale = 1.0f, factor = 1.0f;
#if SCALES == 2
        float most = amax(a);
        const te_nvfp4_tensor tensor = te_nvfp4_tensor_of(most, a.code_max);
        factor = most * a.g.factor_a;
#elif !SCALES && !BLOCK
        if (!a.scale || (a.amax && blockIdx.x == 0)) {
            float most = amax(a);
            if (!a.scale) scale = te__block_scale(most, fp8_max, a.epsilon, TE_FLT_MAX, a.power_of_two);
            else if (threadIdx.x == 0 && most > *(volatile float *)a.amax) te_atomic_amax(a.amax, most);
        }
        if (a.scale) scale = *a.scale;
        factor = __frcp_rn(scale) * a.g.factor_a;
#endif
        te_raw<TE_ANY> raw[AT_ONCE]; // the next values of the thread
#pragma unroll 1
        for (int n = 0, from = 0; from < few * each; n++, from += 32 * WARPS) { // all lanes run, for the shuffles
            const int i = from + threadIdx.x, line = i / each, part = i - line * each;
            const bool there = i < few * each;
            if (n % (AT_ONCE * 8 / PART) == 0) {
#pragma unroll
                for (int l = 0; l < AT_ONCE; l++) {
                    const int later = i + l / (PART / 8) * 32 * WARPS;
                    raw[l] = {};
                    if (later < few * each) raw[l] = ask(a, later / each, later % each * PART + l % (PART / 8) * 8);
                }
            }
            te_u32 out[4];
#if SCALES == 2
            float v[16];
            te_u8 code;
#pragma unroll
            for (int h = 0; h < 2; h++) {
#pragma unroll
                for (int j = 0; j < 8; j++) v[8 * h + j] = te_raw_value(raw[h], j, HIGH);
            }
            const te_nvfp4_rounding how = {false, false, 0, 0, 0, nullptr};
#pragma unroll
            for (int l = 0; l + 2 < AT_ONCE; l++) raw[l] = raw[l + 2];
            uint2 u = te_nvfp4_block(how, v, te_nvfp4_amax(v), tensor, nullptr, false, 0, 0, &code);
            te_u32 of = te_fp8x2_to_f16(code, 0, TE_F8E4M3);
            if (!there) continue;
            te_decode_fp4x8(u.x, __byte_perm(of, 0, 0x1010), out);
            put(line, 2 * part, out);
            te_decode_fp4x8(u.y, __byte_perm(of, 0, 0x1010), out);
            put(line, 2 * part + 1, out);
#else
            float v[8], most = 0.0f;
            te_u32 code[2] = {0, 0};
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = te_raw_value(raw[0], j, HIGH), most = fmaxf(most, fabsf(v[j]));
#pragma unroll
            for (int l = 0; l + 1 < AT_ONCE; l++) raw[l] = raw[l + 1];
#if SCALES == 1 || BLOCK
#pragma unroll
            for (int d = 1; d < (BLOCK ? 16 : 4); d *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
#if BLOCK
            scale = te__block_scale(most, fp8_max, a.epsilon, a.code_max, a.power_of_two);
            if (there && part % 16 == 0) put_scale(line, part / 16, te__rcp_f32(scale));
#else
            te_u8 e = te__mxfp8_exponent(most, Y_DT == TE_F8E4M3 ? TE__E4M3_MAX_INVERSE : TE__E5M2_MAX_INVERSE);
            scale = te__mxfp8_multiplier(e);
            if (there && part % 4 == 0) put_scale(line, part / 4, te__e8m0_to_f32(e));
#endif
#endif
#pragma unroll
            for (int j = 0; j < 8; j++) // a scale may be infinite or NaN
                v[j] = part * 8 + j < k ? __fmul_rn(v[j], scale) : 0.0f;
#pragma unroll
            for (int h = 0; h < 2; h++)
                code[h] = te_f32x2_to_fp8(v[4 * h], v[4 * h + 1], Y_DT) |
                          (te_u32)te_f32x2_to_fp8(v[4 * h + 2], v[4 * h + 3], Y_DT) << 16;
#pragma unroll
            for (int j = 0; j < 4; j++) out[j] = te_fp8x2_to_f16(code[j >> 1], j & 1, Y_DT);
            if (there) put(line, part, out);
#endif
        }
        return factor;
    }
#else
    TE_DEV float fill(const te__gemv_kargs &a) const {
        const void *codes = SHORT_A ? a.g.a : a.g.b, *scales = SHORT_A ? a.g.block_a : a.g.block_b;
        const te_i64 ld = SHORT_A ? a.g.lda : a.g.ldb, ld_scales = SHORT_A ? a.g.ld_block_a : a.g.ld_block_b;
        const int each = 4 * UNITS * turns;
#pragma unroll 1
        for (int i = threadIdx.x; i < few * each; i += 32 * WARPS) {
            const int line = i / each, unit = i - line * each;
            te_gemv_line y;
            te_u32 out[4], of = 0;
            y.open(codes, ld, few, k, scales, ld_scales, line);
            uint4 u = y.load_end((te_i64)unit * UNIT, k);
            if (SCALES == 1 && unit % 2 == 0)
                put_scale(line, unit / 2, te__e8m0_to_f32((te_u8)y.scales<1>((te_i64)unit * UNIT, k, true)));
            if (SCALES == 2) of = y.scales<2>((te_i64)unit * UNIT, k, true);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                te_gemv_decode<Y_DT>(u, c, of, out);
                put(line, unit * CHUNKS + c, out);
            }
        }
        return 1.0f;
    }
#endif
};
