// ops/act/act.cuh: the activations and their derivatives, for one element. The functions of this file must
// not read or write global memory.
//
//   plain   y = f(x)                    dx = dy f'(x)
//   gated   y = f(a) b, x = [a | b]     da = dy f'(a) b,  db = dy f(a)
//
// The sigmoid has neither a branch nor a slow path. With more instructions for each element, the kernels would be
// slower than memory.
#pragma once
#include "device/base.cuh"
#include "ops/act/kargs.h"
#include "ops/act/list.h"

#ifdef ACT
#define TE_ACT_CALL TE_DEV
#else
#define TE_ACT_CALL static __device__ __noinline__ // a real call, so that the kernel has the code of all activations
                                                   // only once
#endif

// te_act_form and te_act_f look up an activation in a table. Each table is a 64-bit integer with four bits for each
// activation.
#define TE__ACT_FORM_BITS(name, form, f, epilogue, one_kernel) | (te_u64)TE__ACT_##form << 4 * TE_##name
#define TE__ACT_F_BITS(name, form, f, epilogue, one_kernel) | (te_u64)TE__F_##f << 4 * TE_##name
static_assert(TE_ACTIVATION_COUNT <= 16 && TE__F_COUNT <= 16, "four bits each of 64");
TE_DEV constexpr te__act_form te_act_form(int act) {
    return (te__act_form)((0 TE__ACTIVATIONS(TE__ACT_FORM_BITS)) >> 4 * act & 15);
}
TE_DEV constexpr te__act_f te_act_f(int act) {
    return (te__act_f)((0 TE__ACTIVATIONS(TE__ACT_F_BITS)) >> 4 * act & 15);
}
TE_DEV constexpr bool te_act_gated(int act) { return te_act_form(act) != TE__ACT_PLAIN; }

// Returns sigmoid(x) = 1 / (1 + 2^t), where t = -x log2(e), exact to a few units in the last place. If 2^t underflows,
// the result is 1. If 2^t overflows, the result is 0.
#define TE_LOG2E 1.44269504f
TE_DEV float te_act_sigmoid2(float t) {
    float e, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(t));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
    return s;
}
#define TE__ACT_SIGMOID(k, x) te_act_sigmoid2(-TE_LOG2E * (k) * (x))
#define TE__ACT_SIGMOID3(k1, k3, x) te_act_sigmoid2((x) * (-TE_LOG2E * (k1) + -TE_LOG2E * (k3) * ((x) * (x))))
#define TE__ACT_MAX0(x) fmaxf(x, 0.0f)

// Returns f(x) and sets *slope to f'(x). f is the nonlinearity of the activation `act`. A gated activation applies f to
// the first half of its input.
TE_ACT_CALL float te_act(int act, float x, float *slope) {
    float s;
    switch (te_act_f(act)) {
        TE__NONLINEARITIES(TE__ACT_CASE)
    case TE__F_COUNT: break;
    }
    return *slope = 0.0f;
}

// te_act_gate returns the gated activation y = f(a) b. te_act_gate_grad computes its gradients *da and *db from dy.
TE_ACT_CALL float te_act_gate(int act, float a, float b, const te__act_rule &r) {
    float slope;
    switch (te_act_form(act)) {
    case TE__ACT_PLAIN: break;
    case TE__ACT_GATED: return te_act(act, a, &slope) * b;
    case TE__ACT_CLAMPED:
        a = fminf(a, r.limit);
        return a * te_act_sigmoid2(-TE_LOG2E * r.alpha * a) * (fminf(fmaxf(b, -r.limit), r.limit) + r.offset);
    }
    return 0.0f;
}
TE_ACT_CALL void te_act_gate_grad(int act, float a, float b, float dy, const te__act_rule &r, float *da, float *db) {
    const float limit = r.limit, alpha = r.alpha, offset = r.offset;
    if (te_act_form(act) == TE__ACT_GATED) {
        float slope, f = te_act(act, a, &slope);
        *da = dy * slope * b;
        *db = dy * f;
    }
    if (te_act_form(act) == TE__ACT_CLAMPED) {
        float c = fminf(a, limit), d = fminf(fmaxf(b, -limit), limit) + offset,
              s = te_act_sigmoid2(-TE_LOG2E * alpha * c);
        *da = a <= limit ? dy * (s + alpha * c * s * (1.0f - s)) * d : 0.0f;
        *db = b >= -limit && b <= limit ? dy * c * s : 0.0f;
    }
}

// The two halves of a gated x have n columns each. They alternate in blocks of columns. A block may be a whole half.
// te_act_at returns the index in x of the element of the first half at `row` and `column`. The element of the second
// half at the same row and column is te_act_block elements further. With ACT, the eight columns of a thread lie in one
// block.
#if defined(ACT) && !defined(INTERLEAVED)
TE_DEV te_i64 te_act_at(te_i64 row, te_i64 column, te_i64 n, te_i64) { return row * 2 * n + column; }
TE_DEV te_i64 te_act_block(te_i64 n, te_i64) { return n; }
#else
TE_DEV te_i64 te_act_at(te_i64 row, te_i64 column, te_i64 n, te_i64 block) {
    return row * 2 * n + column + (block == n ? 0 : column / block * block);
}
TE_DEV te_i64 te_act_block(te_i64, te_i64 block) { return block; }
#endif

// Splits i = row * width + column.
TE_DEV void te_act_split(te_i64 i, te_i64 width, te_i64 *row, te_i64 *column) {
    *row = i / width;
    *column = i - *row * width;
}
// Splits i = row * width + column without a division. `width` and i must be multiples of 8. `magic` and `shift` come
// from te__act_divisor_of in cuda.c.
TE_DEV void te_act_split8(te_i64 i, te_i64 width, te_u32 magic, int shift, te_i64 *row, te_i64 *column) {
    if (shift < 0) {
        te_act_split(i, width, row, column);
    } else {
        *row = __umulhi((te_u32)(i >> 3), magic) >> shift;
        *column = i - *row * width;
    }
}
