// ops/loss/loss.cuh: functions for one row of logits.
#pragma once
#include "device/outside.cuh"

// Returns e^d with an error of about 2 units in the last place. e^-inf is 0, and NaN stays NaN.
TE_DEV float te_loss_exp(float d) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(d * 1.44269504f));
    return e;
}

// Returns the target of a row. Returns -1 if the target is ignore_index or not in 0 .. v - 1.
TE_DEV te_i64 te_loss_target(const void *target, te_i64 row, int dt, te_i64 ignore_index, te_i64 v) {
    te_i64 t = te_load_index(target, row, dt);
    return t == ignore_index || t < 0 || t >= v ? -1 : t;
}

// Reports the target of a row as outside of the vocabulary, unless it is ignore_index. te_loss_target must have
// returned -1.
TE_DEV void te_loss_tell(te__outside *to, const void *target, te_i64 row, int dt, te_i64 ignore_index, te_i64 v) {
    te_i64 t = te_load_index(target, row, dt);
    if (t != ignore_index) te_tell_outside(to, t, row, v);
}

TE_DEV float te_loss_of(float lse, float x_target, float sum, float smoothing, te_i64 vocab) {
    float loss = lse - x_target;
    return smoothing > 0.0f ? (1.0f - smoothing) * loss + smoothing * lse - smoothing / (float)vocab * sum : loss;
}
TE_DEV float te_loss_reference(float m) { return m == -TE_INF ? 0.0f : m; }

// How a row is divided. Elements head .. head + 8 * vectors - 1 are in vectors of eight. `tail` is the first element
// behind the vectors.
struct te_loss_span {
    te_i64 head, vectors, tail;
};
TE_DEV te_loss_span te_loss_split(const void *p, te_i64 first, te_i64 n, int element_bytes) {
    te_u32 misaligned = (te_u32)((te_u64)p + (te_u64)first * element_bytes) & 15u;
    te_i64 head = ((16u - misaligned) & 15u) / element_bytes;
    te_loss_span s;
    s.head = head < n ? head : n;
    s.vectors = (n - s.head) >> 3;
    s.tail = s.head + 8 * s.vectors;
    return s;
}
