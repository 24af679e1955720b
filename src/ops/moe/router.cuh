// ops/moe/router.cuh: scores of experts, computed by a warp.
#pragma once
#include "ops/moe/loop.cuh"

// Returns element i of topk_indices, which may also be i16.
TE_DEV te_i64 te_expert_index(const void *p, te_i64 i, int dt) {
    return dt == TE_I16 ? (te_i64)((const short *)p)[i] : te_load_index(p, i, dt);
}

TE_DEV_CALL float te_expert_score(int f, float x) {
    if (f == TE_SCORE_SIGMOID) return te_sigmoid(x);
    return sqrtf(x > 20.0f ? x : log1pf(expf(x)));
}
// Returns d score / dx, given the score.
TE_DEV_CALL float te_expert_slope(int f, float x, float score) {
    if (f == TE_SCORE_SIGMOID) return score * (1.0f - score);
    return (x > 20.0f ? 1.0f : te_sigmoid(x)) / (2.0f * score + 1e-20f);
}
// Computes the softmax over the elements that `map` marks, or over all if it is NULL. The other elements of y become 0.
TE_DEV_CALL void te_expert_softmax(const float *x, const te_u8 *map, int n, float *y) {
    int lane = threadIdx.x & 31;
    float top = -TE_INF, sum = 0.0f;
    TE_LOOP
    for (int e = lane; e < n; e += 32)
        if (!map || map[e]) top = fmaxf(top, x[e]);
    top = te_warp_max(top);
    TE_LOOP
    for (int e = lane; e < n; e += 32) {
        float v = map && !map[e] ? 0.0f : expf(x[e] - top);
        y[e] = v;
        sum += v;
    }
    sum = te_warp_sum(sum);
    TE_LOOP
    for (int e = lane; e < n; e += 32) y[e] = y[e] / sum;
}
