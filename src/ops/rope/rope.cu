// ops/rope/rope.cu: rotary embedding of one tensor, or of a packed projection while it is split into q, k and v, and both ways back.
//
//   pair i of a head at position t:  (x, y) -> (x cos - y sin, y cos + x sin),  angle = (float(t) * position_scale) * inv_freq[i]
//
// The angle is two f32 products, as on the CPU, and inv_freq comes from the host: both sides take the cosine of the same number, whatever
// the position. A block computes the angles of its `tokens` tokens once, into shared memory, and then walks over all their heads. A unit of
// work is W pairs (x at channel i, y at channel half + i; or, interleaved, 2 W neighbours) or W channels that are not rotated; W is 8, in
// vectors, or 1.
//
// Options: X_DT (te_dtype of everything; else each has its own), X_VECTOR (else a.vector).
// One H200, 2026-11-21, te_bench rotary: 16384x4096 bf16, heads of 128, 0.74 of copy.
//
// Launch: grid ceil(batch * seq / tokens), block 256, shared memory 8 * tokens * half bytes. vector: addresses are multiples of 16 bytes, and all
//         strides, d and half of 8 elements.
// te:baseline
// te:row X_DT=1 X_VECTOR=1
// te:row X_DT=2 X_VECTOR=1
// te:row X_DT=3 X_VECTOR=1
#include "device/base.cuh"
#include "ops/rope/kargs.h"

#ifdef X_DT
#define DT_OF(view) X_DT
#define VECTOR X_VECTOR
#else
#define DT_OF(view) ((view).dt)
#define VECTOR a.vector
#endif

struct te_rope_token {
    int t, b;
    TE_DEV te_rope_token(const te__rope_kargs &a, te_i64 token) {
        te_i64 outer = token / (a.batch_first ? a.seq : a.batch);
        int inner = (int)(token - outer * (a.batch_first ? a.seq : a.batch));
        t = a.batch_first ? inner : (int)outer;
        b = a.batch_first ? (int)outer : inner;
    }
};

template <int W> TE_DEV void te_rope_load(float x[W], const void *p, te_i64 at, int dt) {
    if (W == 8)
        te_load8(p, at, dt, x);
    else
        x[0] = te_load(p, at, dt);
}
template <int W> TE_DEV void te_rope_store(void *p, te_i64 at, int dt, const float x[W]) {
    if (W == 8)
        te_store8(p, at, dt, x);
    else
        te_store(p, at, dt, x[0]);
}

template <int W> TE_DEV void te_rope_units(const te__rope_kargs &a, const float2 *table) {
    const int all_heads = a.heads + 2 * a.groups, per_group = a.groups ? a.heads / a.groups + 2 : 1;
    const int pairs = a.half / W, units = a.d / W - pairs;
    const te_i64 first = (te_i64)blockIdx.x * a.tokens, left = (te_i64)a.batch * a.seq - first;
    const int tokens = left < a.tokens ? (int)left : a.tokens;
    for (int at = threadIdx.x; at < tokens * all_heads * units; at += TE__ROPE_THREADS) {
        const int head = at / units, unit = at - head * units, token = head / all_heads, packed_head = head - token * all_heads;
        const te_rope_token where(a, first + token);
        // Which of q, k, v, and which of its heads?
        int part, h = packed_head;
        if (a.grouped && a.groups) {
            int group = packed_head / per_group, in_group = packed_head - group * per_group;
            part = max(0, in_group - (per_group - 3));
            h = part ? group : group * (per_group - 2) + in_group;
        } else {
            part = h < a.heads ? 0 : h < a.heads + a.groups ? 1 : 2;
            h -= part == 0 ? 0 : part == 1 ? a.heads : a.heads + a.groups;
        }
        const te__rope_view &one = part == 0 ? a.q : part == 1 ? a.k : a.v;
        const te_i64 in_one = where.t * one.s + where.b * one.b + h * one.h;
        const te_i64 in_packed = where.t * a.packed.s + where.b * a.packed.b + packed_head * a.packed.h;
        const te_i64 from = a.gather ? in_one : in_packed, to = a.gather ? in_packed : in_one;
        const void *src = a.gather ? one.p : a.packed.p;
        void *dst = a.gather ? a.packed.p : one.p;
        const int src_dt = a.gather ? DT_OF(one) : DT_OF(a.packed), dst_dt = a.gather ? DT_OF(a.packed) : DT_OF(one);

        float x[W], y[W];
        if (unit >= pairs) { // behind the rotated channels
            const int c = (unit + pairs) * W;
            te_rope_load<W>(x, src, from + c, src_dt);
            te_rope_store<W>(dst, to + c, dst_dt, x);
            continue;
        }
        const int cx = a.interleaved ? 2 * W * unit : W * unit, cy = a.interleaved ? cx + W : cx + a.half;
        te_rope_load<W>(x, src, from + cx, src_dt);
        te_rope_load<W>(y, src, from + cy, src_dt);
        if (part < 2) {
            const float2 *turn = table + token * a.half + unit * W;
            if (a.interleaved && W > 1) {
#pragma unroll
                for (int i = 0; i < W; i++) {
                    float *lo = i < W / 2 ? x + 2 * i : y + 2 * i - W, u = lo[0], v = lo[1];
                    lo[0] = u * turn[i].x - v * turn[i].y;
                    lo[1] = v * turn[i].x + u * turn[i].y;
                }
            } else {
#pragma unroll
                for (int i = 0; i < W; i++) {
                    float u = x[i], v = y[i];
                    x[i] = u * turn[i].x - v * turn[i].y;
                    y[i] = v * turn[i].x + u * turn[i].y;
                }
            }
        }
        te_rope_store<W>(dst, to + cx, dst_dt, x);
        te_rope_store<W>(dst, to + cy, dst_dt, y);
    }
}

extern "C" __global__ void __launch_bounds__(TE__ROPE_THREADS, 4) te_rope(const __grid_constant__ te__rope_kargs a) {
    te_follow();
    extern __shared__ float2 table[]; // (cos, sin) of each token's angles
    const te_i64 first = (te_i64)blockIdx.x * a.tokens, left = (te_i64)a.batch * a.seq - first;
    for (int at = threadIdx.x; at < a.tokens * a.half; at += TE__ROPE_THREADS) {
        const int token = at / a.half;
        if (token >= left) break;
        const te_rope_token where(a, first + token);
        const float position = (float)(where.t + a.offset + (a.start ? a.start[where.b] : 0)) * a.position_scale;
        float s, c;
        sincosf(__fmul_rn(position, a.inv_freq[at - token * a.half]), &s, &c);
        table[at] = make_float2(c, s * a.direction);
    }
    __syncthreads();
    if (VECTOR)
        te_rope_units<8>(a, table);
    else
        te_rope_units<1>(a, table);
}
