// ops/gemm/gemv_shared.cuh: the short operand Y of gemv_k and gemv_joint in shared memory, decoded into f16 once for
// all warps of a block. Its codes come from memory or, with HIGH, from quantizing its numbers as the families cast,
// block, mxfp8 and nvfp4 do. Each block quantizes all of Y, and reads it from the L2 cache. Numbers of 16 bits that are
// not quantized are copied.
//
// THREADS is the number of threads of a block. WHOLE: Y's rows have whole turns, and start at multiples of 16 bytes.
// NORM: A's rows are normalized first (gemv_norm.cuh). A part stays in registers if each thread has one part at most.
// Else the lines have the normalized rows, in order, and are quantized in place. With INTEGERS, a row of 16 bits is
// always quantized in place, a turn by each warp at a time.
//
// A line has a slot of 16 bytes for each chunk of eight values. In a turn the four lanes of a quad read neighbouring
// slots, so the slots are in the order [unit][chunk][lane], where each lane has the chunks that it has of X. With
// INTEGERS, a turn has integers and scales in the order of gemv_integers.cuh.
#pragma once
#include "device/vector.cuh"
#include "base/scaling.h"
#if SCALES == 2
#include "ops/gemm/gemv_integers.cuh"
#include "ops/nvfp4/nvfp4.cuh"
#endif

#ifndef NORM
#define NORM 0
#endif
#define PART 8                        // values that a thread normalizes or quantizes at a time
#define PARTS (TURN / PART)           // of a turn: those of half a warp or, with NVFP4, of a warp
#define GROUP (SCALES == 2 ? 16 : 32) // values with one scale, with MXFP8 and NVFP4
#define AT_ONCE (HIGH == 1 ? 2 : 4)   // parts of a thread whose loads it waits for at once

struct te_gemv_shared {
    te_u32 base, of_scales, zeros; // in shared memory; zeros: lanes read them in place of Y, with FOURS and INTEGERS
#if ONE
    enum { few = 1 };
#else
    int few;
#endif
    int turns, line_bytes, all; // all: parts of all lines
    te_u32 inverse;                  // ceil(2^32 / parts of a line): so a division is one multiplication
    te_i64 k;
    float *scratch; // of 32 numbers, of which those behind the first THREADS / 32 are the caller's
    // `memory` has 128 bytes and TE__GEMV_SHARED, and starts at a multiple of 16.
    TE_DEV te_gemv_shared(te_i64 lines, te_i64 k, void *memory) : k(k), scratch((float *)memory) {
#if !ONE
        few = (int)lines;
#endif
        turns = WHOLE ? (int)((te_u32)k / TURN) : (int)te_div_up(k, TURN), line_bytes = TE__GEMV_LINE(turns, TURN);
        base = te_smem(scratch + 32), of_scales = base + few * line_bytes;
        zeros = of_scales + few * turns * 16;
        all = few * turns * PARTS, inverse = 0xffffffffu / (te_u32)(turns * PARTS) + 1;
#if INTEGERS
        te_integers_zeros(zeros);
#else
        if (HALVES && threadIdx.x < 16) te_sts16(zeros + threadIdx.x * 16, make_uint4(0, 0, 0, 0));
#endif
    }
    TE_DEV te_u32 end() const { return zeros + 256; } // what follows the 128 bytes and TE__GEMV_SHARED
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

    // Returns the line and the number in the line of part i.
    TE_DEV int2 part_of(int i) const {
        if (ONE) return make_int2(0, i);
        const int line = (int)__umulhi((te_u32)i, inverse); // right for all i below 2^32 / parts of a line
        return make_int2(line, i - line * turns * PARTS);
    }
#if NORM
    // Normalizes A. Returns the largest |y| that the thread has, in the form of raise(). norm.x has the thread's part
    // after that, if it has one at most.
    template <class N> TE_DEV te_u32 normalize(N &norm, float *sums) const {
        te_u32 largest = 0;
        const int2 first = part_of(threadIdx.x);
        if (threadIdx.x < all) norm.ask(first.x, first.y);
        norm.add_up(sums);
#pragma unroll 1
        for (int i = threadIdx.x; i < all; i += THREADS) {
            const int2 p = part_of(i);
            if (i >= THREADS) norm.ask_weights(p.y), norm.ask(p.x, p.y);
            norm.finish(p.x, sums, largest);
            if (BITS == 16 || INTEGERS || all > THREADS)
                te_sts16(base + p.x * line_bytes + p.y * 16,
                         make_uint4(norm.x.w[0], norm.x.w[1], norm.x.w[2], norm.x.w[3]));
        }
        return largest;
    }
#endif
#if BITS == 16
    // Copies Y, which has whole turns.
    TE_DEV float fill(const void *a, te_i64 lda, float, const te__gemv_quantizing &) const {
#pragma unroll 1
        for (int i = threadIdx.x; i < all; i += THREADS) {
            const int2 p = part_of(i);
            te_sts16(base + p.x * line_bytes + p.y * 16, *(const uint4 *)((const te_u16 *)a + p.x * lda + p.y * 8));
        }
        return 1.0f;
    }
#elif HIGH
    // Returns eight values of a line of A, of which those beyond k are 0.
    TE_DEV te_raw<TE_ANY> ask(const void *a, te_i64 lda, bool vector, int line, int at) const {
        te_i64 from = line * lda + at;
        if (NORM) {
            const uint4 u = te_lds16(base + line * line_bytes + at * 2);
            return {{u.x, u.y, u.z, u.w}};
        }
        if (WHOLE || (vector && at + 8 <= k)) return te_raw_ask<8>(a, from, HIGH);
        return te_raw_ask_part<8>(a, from, HIGH, k - at);
    }
    // Returns the lanes that have the parts of a turn, which are there or not together.
    TE_DEV static te_u32 lanes_of_turn() { return PARTS == 32 ? 0xffffffffu : 0xffffu << (threadIdx.x & 16); }
    // Loads the thread's parts of a round, of which the first is number i. Parts that are missing are 0.
    TE_DEV void ask_round(const void *a, te_i64 lda, bool vector, int i, te_raw<TE_ANY> raw[AT_ONCE]) const {
#pragma unroll
        for (int l = 0; l < AT_ONCE; l++) {
            const int later = i + l * THREADS;
            raw[l] = {};
            if (later >= all) continue;
            const int2 p = part_of(later);
            raw[l] = ask(a, lda, vector, p.x, p.y * PART);
        }
        // put() moves values within their turn. Its lanes have read them all before one writes.
        if (NORM) __syncwarp(lanes_of_turn());
    }
    // Raises `most`, the bits of |x|, two numbers of 16 bits in a word, to those of eight values. NaN is ignored.
    TE_DEV void raise(te_u32 &most, const te_raw<TE_ANY> &raw) const {
#pragma unroll
        for (int j = 0; j < (HIGH == TE_F32 ? 8 : 4); j++) {
            if (HIGH == TE_F32)
                most = __float_as_uint(fmaxf(__uint_as_float(most), fabsf(__uint_as_float(raw.w[j]))));
            else if (HIGH == TE_BF16)
                asm("{ .reg .b32 x; abs.bf16x2 x, %1; max.bf16x2 %0, %0, x; }" : "+r"(most) : "r"(raw.w[j]));
            else asm("{ .reg .b32 x; abs.f16x2 x, %1; max.f16x2 %0, %0, x; }" : "+r"(most) : "r"(raw.w[j]));
        }
    }
    // Returns the largest |x| of A, NaN ignored. `raw` has the thread's last round. With INTEGERS, values of 16 bits
    // are in shared memory then, where fill() finds them.
    TE_DEV float amax(const void *a, te_i64 lda, bool vector, te_raw<TE_ANY> raw[AT_ONCE]) const {
        te_u32 most = 0;
#pragma unroll 1
        for (int i = 0; i < all; i += AT_ONCE * THREADS) {
            ask_round(a, lda, vector, i + threadIdx.x, raw);
#pragma unroll
            for (int l = 0; l < AT_ONCE; l++) {
                if (i + l * THREADS >= all) continue;
                raise(most, raw[l]);
                const int later = i + (int)threadIdx.x + l * THREADS;
                if (INTEGERS && HIGH != TE_F32 && later < all)
                    te_sts16(base + later * 16, make_uint4(raw[l].w[0], raw[l].w[1], raw[l].w[2], raw[l].w[3]));
            }
        }
        return over_block(most);
    }
    // Returns the largest |x| of all threads, of which each has raised its `most`. Waits for the block.
    TE_DEV float over_block(te_u32 most) const {
        if (HIGH != TE_F32) {
            const te_raw<TE_ANY> two = {{most}};
            most = __float_as_uint(fmaxf(te_raw_value(two, 0, HIGH), te_raw_value(two, 1, HIGH)));
        }
        most = __reduce_max_sync(0xffffffffu, most); // of floats that are not negative, also as integers
        if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = __uint_as_float(most);
        __syncthreads();
        most = __float_as_uint(scratch[threadIdx.x & (THREADS / 32 - 1)]);
        return __uint_as_float(__reduce_max_sync(0xffffffffu, most));
    }
#if INTEGERS
    // Quantizes A. Values of 16 bits, which normalize() or amax() has put into shared memory, are quantized in place;
    // those of f32 are loaded again. Returns the factor of all values.
    TE_DEV float fill(const void *a, te_i64 lda, float factor_a, const te__gemv_quantizing &q,
                      te_u32 largest = 0) const {
        te_raw<TE_ANY> raw[AT_ONCE];
        const float most = NORM ? over_block(largest) : amax(a, lda, q.vector, raw);
        const te_nvfp4_tensor tensor = te_nvfp4_tensor_of(most, q.code_max);
#pragma unroll 1
        for (int turn = threadIdx.x >> 5; turn < turns; turn += THREADS / 32) {
            const te_u32 at = base + turn * (TURN * 2);
            if (HIGH == TE_F32) {
                raw[0] = te_raw_ask<8>(a, turn * TURN + (threadIdx.x & 31) * 8, HIGH);
            } else {
                const uint4 u = te_lds16(at + (threadIdx.x & 31) * 16);
                raw[0] = {{u.x, u.y, u.z, u.w}};
                __syncwarp();
            }
            te_integers_quantize<HIGH>(at, raw[0], tensor);
        }
        return most * factor_a;
    }
#else
    // Quantizes A. Returns the factor of all its values. With NORM, `largest` is the largest |x| that the thread has,
    // in the form of raise(), and `part` its part, if it has one at most.
    TE_DEV float fill(const void *a, te_i64 lda, float factor_a, const te__gemv_quantizing &q, te_u32 largest = 0,
                      const te_raw<HIGH> *part = nullptr) const {
        const float fp8_max = Y_DT == TE_F8E4M3 ? 448.0f : 57344.0f;
        float scale = 1.0f, factor = 1.0f;
        te_raw<TE_ANY> raw[AT_ONCE] = {}; // the next parts of the thread
        bool there = NORM && all <= THREADS; // whether the only round has been loaded
#if NORM
#pragma unroll
        for (int j = 0; j < te_raw<HIGH>::words; j++) raw[0].w[j] = part->w[j];
#endif
#if SCALES == 2
        float most = NORM ? over_block(largest) : amax(a, lda, q.vector, raw);
        if (!NORM) there = all <= AT_ONCE * THREADS;
        const te_nvfp4_tensor tensor = te_nvfp4_tensor_of(most, q.code_max);
        factor = most * factor_a;
#elif !SCALES && !BLOCK
        if (!q.scale || (q.amax && blockIdx.x == 0)) {
            float most = NORM ? over_block(largest) : amax(a, lda, q.vector, raw);
            if (!NORM) there = all <= AT_ONCE * THREADS;
            if (!q.scale) scale = te__block_scale(most, fp8_max, q.epsilon, TE_FLT_MAX, q.power_of_two);
            else if (threadIdx.x == 0 && most > *(volatile float *)q.amax) te_atomic_amax(q.amax, most);
        }
        if (q.scale) scale = *q.scale;
        factor = __frcp_rn(scale) * factor_a;
#endif
#pragma unroll 1
        for (int n = 0, i = threadIdx.x; i < all; n++, i += THREADS) {
            if (n % AT_ONCE == 0 && !there) ask_round(a, lda, q.vector, i, raw);
            const int line = part_of(i).x, number = part_of(i).y;
            te_u32 out[4];
            float v[8], most = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = te_raw_value(raw[0], j, HIGH), most = fmaxf(most, fabsf(v[j]));
#pragma unroll
            for (int d = 1; d < (SCALES ? GROUP / PART : BLOCK ? PARTS : 1); d *= 2)
                most = fmaxf(most, __shfl_xor_sync(lanes_of_turn(), most, d));
#if SCALES == 2
            const te_u8 code = te_nvfp4_block_code(most, tensor);
            const te_u32 of = te_fp8x2_to_f16(code, 0, TE_F8E4M3);
            // A NaN has the code of 6, as infinity has. te_nvfp4_pack8 does not take NaN.
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = v[j] == v[j] ? v[j] : __uint_as_float(0x7f800000u);
            te_decode_fp4x8(te_nvfp4_pack8(v, te_nvfp4_multiplier(code, tensor)), __byte_perm(of, 0, 0x1010), out);
#else
            te_u32 code[2] = {0, 0};
#if BLOCK
            scale = te__block_scale(most, fp8_max, q.epsilon, q.code_max, q.power_of_two);
            if (number % 16 == 0) put_scale(line, number / 16, te__rcp_f32(scale));
#elif SCALES == 1
            te_u8 e = te__mxfp8_exponent(most, Y_DT == TE_F8E4M3 ? TE__E4M3_MAX_INVERSE : TE__E5M2_MAX_INVERSE);
            scale = te__mxfp8_multiplier(e);
            if (number % 4 == 0) put_scale(line, number / 4, te__e8m0_to_f32(e));
#endif
#pragma unroll
            for (int j = 0; j < 8; j++) // a scale may be infinite or NaN
                v[j] = WHOLE || number * 8 + j < k ? __fmul_rn(v[j], scale) : 0.0f;
#pragma unroll
            for (int h = 0; h < 2; h++)
                code[h] = te_f32x2_to_fp8(v[4 * h], v[4 * h + 1], Y_DT) |
                          (te_u32)te_f32x2_to_fp8(v[4 * h + 2], v[4 * h + 3], Y_DT) << 16;
#pragma unroll
            for (int j = 0; j < 4; j++) out[j] = te_fp8x2_to_f16(code[j >> 1], j & 1, Y_DT);
#endif
            put(line, number, out);
#pragma unroll
            for (int l = 0; l + 1 < AT_ONCE; l++) raw[l] = raw[l + 1];
        }
        return factor;
    }
#endif
#else
    // Decodes the codes of Y.
    TE_DEV float fill_codes(const te__gemv_kargs &a) const {
        const void *codes = SHORT_A ? a.g.a : a.g.b, *scales = SHORT_A ? a.g.block_a : a.g.block_b;
        const te_i64 ld = SHORT_A ? a.g.lda : a.g.ldb, ld_scales = SHORT_A ? a.g.ld_block_a : a.g.ld_block_b;
        const int each = 4 * UNITS * turns;
#pragma unroll 1
        for (int i = threadIdx.x; i < few * each; i += THREADS) {
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
