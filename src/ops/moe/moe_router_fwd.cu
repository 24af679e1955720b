// ops/moe/moe_router_fwd.cu: computes scores from logits [tokens, experts], chooses the topk experts of each token,
// and computes the probabilities of these experts. The formulas are at te_op_moe_router_fwd.
//
// Each warp has one token. Shared memory holds the token's scores, the keys by which experts are chosen, and marks for
// chosen experts. Of experts with equal keys, the one with the lowest index wins.
//
// Launch: block 32 * warps, one warp a token. Shared memory for each warp: 9 bytes for each expert and 5 bytes for each
// group of experts.
//
// te:baseline
#include "ops/moe/router.cuh"

// Returns whether expert `index` is taken before expert `other`. An index of -1 stands for no expert.
TE_DEV bool te_expert_before(float key, int index, float other_key, int other) {
    if (index < 0 || other < 0) return index >= 0;
    return key > other_key || (!(other_key > key) && index < other);
}
// Returns the index of the largest of key[0 .. n-1] that `taken` does not mark, or -1 if there is none.
TE_DEV_CALL int te_expert_best(const float *key, const te_u8 *taken, int n) {
    int lane = threadIdx.x & 31, best = -1;
    float top = 0.0f;
    TE_LOOP
    for (int e = lane; e < n; e += 32)
        if (!taken[e] && te_expert_before(key[e], e, top, best)) top = key[e], best = e;
#pragma unroll
    for (int d = 16; d; d >>= 1) {
        float other_key = __shfl_xor_sync(0xffffffffu, top, d);
        int other = __shfl_xor_sync(0xffffffffu, best, d);
        if (te_expert_before(other_key, other, top, best)) top = other_key, best = other;
    }
    return best;
}
// Marks the `count` best experts and returns the sum of their keys. Writes the indices of these experts to `indices`
// from element `at` on, unless `indices` is NULL.
TE_DEV_CALL float te_expert_choose(const float *key, te_u8 *taken, int n, int count, void *indices, int dt, te_i64 at) {
    int lane = threadIdx.x & 31;
    float sum = 0.0f;
    TE_LOOP
    for (int e = lane; e < n; e += 32) taken[e] = 0;
    __syncwarp();
    TE_LOOP
    for (int i = 0; i < count; i++) {
        int best = te_expert_best(key, taken, n);
        sum += key[best];
        if (lane == 0) taken[best] = 1;
        if (lane == 0 && indices) {
            if (dt == TE_I64) ((te_i64 *)indices)[at + i] = best;
            else if (dt == TE_I16) ((short *)indices)[at + i] = (short)best;
            else ((int *)indices)[at + i] = best;
        }
        __syncwarp();
    }
    return sum;
}

// Turns scores into probabilities. Experts that `taken` does not mark get 0. If `taken` is NULL, all experts get their
// probability.
TE_DEV_CALL void te_expert_finish(const te__moe_router_kargs &a, float *score, const te_u8 *taken, int n) {
    int lane = threadIdx.x & 31;
    float sum = 0.0f;
    TE_LOOP
    for (int e = lane; e < n; e += 32) {
        float v = taken && !taken[e] ? 0.0f : score[e] + (a.biased ? te_get(a.bias, e, a.bias_dt) : 0.0f);
        score[e] = v;
        sum += v;
    }
    sum = te_warp_sum(sum) + 1e-20f;
    if (!a.normalise) sum = 1.0f;
    TE_LOOP
    for (int e = lane; e < n; e += 32) score[e] = score[e] / sum * a.scaling;
}

extern "C" __global__ void te_moe_router_fwd(const __grid_constant__ te__moe_router_kargs a) {
    te_follow();
    extern __shared__ __align__(16) float shared[];
    int lane = threadIdx.x & 31, warps = blockDim.x >> 5, warp = threadIdx.x >> 5, n = a.experts;
    float *score = shared + warp * (2 * n + a.groups), *key = score + n, *worth = key + n;
    te_u8 *taken = (te_u8 *)(shared + warps * (2 * n + a.groups)) + warp * (n + a.groups), *open = taken + n;
    te_i64 t = (te_i64)blockIdx.x * warps + warp;
    bool softmax = a.score == TE_SCORE_SOFTMAX, over_all = a.pre_softmax || a.all_scores;
    if (t >= a.tokens) return;

    TE_LOOP
    for (int e = lane; e < n; e += 32) {
        float x = te_get(a.logits, t * n + e, a.logits_dt);
        score[e] = softmax ? x : te_expert_score(a.score, x);
    }
    if (softmax && over_all) te_expert_softmax(score, nullptr, n, score);
    if (a.all_scores) te_expert_finish(a, score, nullptr, n);
    TE_LOOP
    for (int e = lane; e < n; e += 32) {
        float k = score[e] + (a.bias && !a.all_scores ? te_get(a.bias, e, a.bias_dt) : 0.0f);
        key[e] = k == k ? k : -TE_INF;
    }
    __syncwarp();
    if (a.group_topk) {
        int size = n / a.groups, best = a.group_best < size ? a.group_best : size;
        TE_LOOP
        for (int g = 0; g < a.groups; g++) {
            float w = te_expert_choose(key + g * size, taken, size, best, nullptr, 0, 0);
            if (lane == 0) worth[g] = w;
        }
        __syncwarp();
        te_expert_choose(worth, open, a.groups, a.group_topk, nullptr, 0, 0);
        TE_LOOP
        for (int e = lane; e < n; e += 32)
            if (!open[e / size]) key[e] = a.zero_groups && key[e] > -TE_INF ? 0.0f : -TE_INF;
        __syncwarp();
    }
    te_expert_choose(key, taken, n, a.topk, a.indices, a.indices_dt, t * a.topk);
    if (softmax && !over_all) te_expert_softmax(score, taken, n, score);
    if (!a.all_scores) te_expert_finish(a, score, taken, n);
    TE_LOOP
    for (int e = lane; e < n; e += 32) {
        if (a.probs) te_put(a.probs, t * n + e, a.probs_dt, score[e]);
        if (a.map) a.map[t * n + e] = taken[e];
    }
    __syncwarp(); // other lanes have written the indices and scores
    TE_LOOP
    for (int i = lane; a.topk_probs && i < a.topk; i += 32)
        te_put(a.topk_probs, t * a.topk + i, a.topk_probs_dt,
               score[te_expert_index(a.indices, t * a.topk + i, a.indices_dt)]);
    TE_LOOP
    for (int byte = lane; a.bits && byte < (n + 7) / 8; byte += 32) {
        int bits = 0;
        TE_LOOP
        for (int e = byte * 8; e < byte * 8 + 8 && e < n; e++) bits |= taken[e] << e % 8;
        a.bits[t * ((n + 7) / 8) + byte] = (te_u8)bits;
    }
}
