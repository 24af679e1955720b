// ops/act/act.cuh: the activations and their derivatives, for one element. Knows formulas; must not know memory.
//
//   plain   y = f(x)                    dx = dy f'(x)
//   gated   y = f(a) b, x = [a | b]     da = dy f'(a) b,  db = dy f(a)
//
// Only few instructions fit into the time in which memory delivers an element, so the sigmoid has no branch and no slow
// path.
#pragma once
#include "device/base.cuh"

#ifdef ACT
#define TE_ACT_CALL TE_DEV
#else
#define TE_ACT_CALL static __device__ __noinline__ // a call: the kernel has the code of all activations only once
#endif

TE_DEV constexpr bool te_act_gated(int act) { return act >= TE_GEGLU; }

// Returns sigmoid(x) = 1 / (1 + 2^t), where t = -x log2(e), to a few units in the last place: one exponential and one
// reciprocal in hardware. If the exponential under- or overflows, it is 0 or infinity, and the sigmoid 1 or 0. NaN
// stays NaN.
#define TE_LOG2E 1.44269504f
TE_DEV float te_act_sigmoid2(float t) {
    float e, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(t));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
    return s;
}

// Returns f(x), and f'(x) in *slope, where `act` applies f to x, or to the first half of a gated input. The code of an
// unused slope folds away.
//
// GELU is the tanh form. 0.5 + 0.5 tanh(u) = sigmoid(2 u) is cheaper, and has no cancellation for x below 0.
TE_ACT_CALL float te_act(int act, float x, float *slope) {
    float s;
    switch (act) {
    case TE_GELU:
    case TE_GEGLU:
        s = te_act_sigmoid2(x * (-2.0f * TE_LOG2E * 0.79788456f + -2.0f * TE_LOG2E * 0.03567741f * (x * x)));
        *slope = s + 2.0f * x * s * (1.0f - s) * (0.79788456f + 0.1070322243f * x * x);
        return x * s;
    case TE_RELU:
    case TE_REGLU: *slope = x > 0.0f ? 1.0f : 0.0f; return fmaxf(x, 0.0f);
    case TE_SRELU:
    case TE_SREGLU: *slope = fmaxf(2.0f * x, 0.0f); return x > 0.0f ? x * x : 0.0f;
    case TE_SILU:
    case TE_SWIGLU:
        s = te_act_sigmoid2(-TE_LOG2E * x);
        *slope = s + x * s * (1.0f - s);
        return x * s;
    case TE_QGELU:
    case TE_QGEGLU:
        s = te_act_sigmoid2(-1.702f * TE_LOG2E * x);
        *slope = s + 1.702f * x * s * (1.0f - s);
        return x * s;
    default: // TE_GLU
        s = te_act_sigmoid2(-TE_LOG2E * x);
        *slope = s * (1.0f - s);
        return s;
    }
}

// te_act_gate returns f(a) b; te_act_gate_grad computes its gradients *da and *db, given dy.
TE_ACT_CALL float te_act_gate(int act, float a, float b, float limit, float alpha, float offset) {
    float slope;
    if (act != TE_CLAMPED_SWIGLU) return te_act(act, a, &slope) * b;
    a = fminf(a, limit);
    return a * te_act_sigmoid2(-TE_LOG2E * alpha * a) * (fminf(fmaxf(b, -limit), limit) + offset);
}
TE_ACT_CALL void te_act_gate_grad(int act, float a, float b, float dy, float limit, float alpha, float offset,
                                  float *da, float *db) {
    if (act != TE_CLAMPED_SWIGLU) {
        float slope, f = te_act(act, a, &slope);
        *da = dy * slope * b;
        *db = dy * f;
        return;
    }
    float c = fminf(a, limit), d = fminf(fmaxf(b, -limit), limit) + offset, s = te_act_sigmoid2(-TE_LOG2E * alpha * c);
    *da = a <= limit ? dy * (s + alpha * c * s * (1.0f - s)) * d : 0.0f;
    *db = b >= -limit && b <= limit ? dy * c * s : 0.0f;
}

// te_act_at returns where the first operand of gated element (row, column) lies, with n columns a half. The second
// operand lies te_act_block elements behind it. With options, eight neighbours are in one block.
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
// Splits i likewise, where width and i are multiples of 8, by te__act_divisor of cuda.c: a division costs as much as an
// activation.
TE_DEV void te_act_split8(te_i64 i, te_i64 width, te_u32 magic, int shift, te_i64 *row, te_i64 *column) {
    if (shift < 0) {
        te_act_split(i, width, row, column);
    } else {
        *row = __umulhi((te_u32)(i >> 3), magic) >> shift;
        *column = i - *row * width;
    }
}
