// ops/moe/moe_router_bwd.cu: computes dx (the gradient of the logits) from g (the gradient of the probabilities) and
// the chosen experts. The scores s are computed again.
//
//   normalised      y = s / sum s (s includes the bias if `biased`):  ds = g / sum s - (sum g s) / (sum s)^2
//   not normalised  ds = g. In both cases, ds is 0 for experts that were not chosen.
//   softmax         dx = s (ds - sum ds s), over all experts or over the chosen ones
//   other scores    dx = ds * slope of the score function
//
// Launch: block 32 * warps, one warp a token. Shared memory: 9 bytes for each expert and warp.
//
// te:baseline
#include "ops/moe/router.cuh"

extern "C" __global__ void te_moe_router_bwd(const __grid_constant__ te__moe_router_kargs a) {
    te_follow();
    extern __shared__ __align__(16) float shared[];
    int lane = threadIdx.x & 31, warps = blockDim.x >> 5, warp = threadIdx.x >> 5, n = a.experts;
    float *score = shared + warp * 2 * n, *grad = score + n, sum = 0.0f, dot = 0.0f;
    te_u8 *chosen = (te_u8 *)(shared + warps * 2 * n) + warp * n;
    te_i64 t = (te_i64)blockIdx.x * warps + warp;
    if (t >= a.tokens) return;
    bool softmax = a.score == TE_SCORE_SOFTMAX, over_all = a.pre_softmax || a.all_scores;

    TE_LOOP
    for (int e = lane; e < n; e += 32) {
        float x = te_get(a.logits, t * n + e, a.logits_dt);
        score[e] = softmax ? x : te_expert_score(a.score, x);
        chosen[e] = a.all_scores ? 1 : a.indices ? 0 : a.map[t * n + e];
        grad[e] = a.indices ? 0.0f : te_get(a.dprobs, t * n + e, a.dprobs_dt);
    }
    __syncwarp();
    TE_LOOP
    for (int i = lane; a.indices && i < a.topk; i += 32) {
        te_i64 e = te_expert_index(a.indices, t * a.topk + i, a.indices_dt);
        if ((te_u64)e >= (te_u64)n) {
            te_tell_outside(a.outside, e, t * a.topk + i, n);
            continue;
        }
        chosen[e] = 1;
        grad[e] = te_get(a.dprobs, t * a.topk + i, a.dprobs_dt);
    }
    __syncwarp();
    if (softmax) te_expert_softmax(score, over_all ? nullptr : chosen, n, score);
    TE_LOOP
    for (int e = lane; e < n; e += 32) {
        float s = score[e] + (a.biased ? te_get(a.bias, e, a.bias_dt) : 0.0f);
        if (!chosen[e]) continue;
        grad[e] *= a.scaling;
        sum += s;
        dot = fmaf(grad[e], s, dot);
    }
    sum = te_warp_sum(sum) + 1e-20f;
    dot = te_warp_sum(dot) / (sum * sum);
    if (!a.normalise) sum = 1.0f, dot = 0.0f;
    float along = 0.0f;
    TE_LOOP
    for (int e = lane; e < n; e += 32) {
        grad[e] = chosen[e] ? grad[e] / sum - dot : 0.0f;
        along = fmaf(grad[e], score[e], along);
    }
    along = te_warp_sum(along);
    TE_LOOP
    for (int e = lane; e < n; e += 32) {
        float g = softmax ? score[e] * (grad[e] - along)
                          : grad[e] * te_expert_slope(a.score, te_get(a.logits, t * n + e, a.logits_dt), score[e]);
        te_put(a.probs, t * n + e, a.probs_dt, g);
    }
}
