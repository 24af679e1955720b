// ops/moe/moe_router_bwd.cu: the gradient of logits, from that of the probabilities and the choice; scores are computed again. te_op_moe_router_bwd.
//
//   softmax         dx = y (g - sum g y), over all experts or over the chosen ones; g is 0 where an expert was not chosen
//   other scores    y = s / sum s:  ds = g / sum s - (sum g s) / (sum s)^2;  dx = ds * slope
//
// Launch: block 32 * warps, a warp a token; grid: tokens / warps up. Shared: 4 bytes an expert and warp.
//
// te:baseline
#include "ops/moe/router.cuh"

extern "C" __global__ void te_moe_router_bwd(const __grid_constant__ te__moe_router_kargs a) {
    te_follow();
    extern __shared__ __align__(16) float shared[];
    int lane = threadIdx.x & 31, warps = blockDim.x >> 5, n = a.experts;
    float *score = shared + (threadIdx.x >> 5) * n, sum = 0.0f, dot = 0.0f;
    te_i64 t = (te_i64)blockIdx.x * warps + (threadIdx.x >> 5);
    if (t >= a.tokens) return;
    const te_u8 *map = a.all_scores ? nullptr : a.map + t * n;
    bool softmax = a.score == TE_SCORE_SOFTMAX, over_all = a.pre_softmax || a.all_scores, normalised = !softmax && (a.all_scores || a.topk > 1);

    TE_LOOP
    for (int e = lane; e < n; e += 32) {
        float x = te_get(a.logits, t * n + e, a.logits_dt);
        score[e] = softmax ? x : te_expert_score(a.score, x);
    }
    if (softmax) te_expert_softmax(score, over_all ? nullptr : map, n, score);
    TE_LOOP
    for (int e = lane; e < n; e += 32) {
        if (map && !map[e]) continue;
        sum += score[e];
        dot = fmaf(te_get(a.dprobs, t * n + e, a.dprobs_dt) * a.scaling, score[e], dot);
    }
    sum = te_warp_sum(sum) + 1e-20f;
    dot = te_warp_sum(dot);
    TE_LOOP
    for (int e = lane; e < n; e += 32) {
        bool chosen = !map || map[e];
        float g = chosen ? te_get(a.dprobs, t * n + e, a.dprobs_dt) * a.scaling : 0.0f;
        if (softmax) g = score[e] * (g - dot);
        else if (chosen) g = (normalised ? g / sum - dot / (sum * sum) : g) * te_expert_slope(a.score, te_get(a.logits, t * n + e, a.logits_dt), score[e]);
        te_put(a.probs, t * n + e, a.probs_dt, g);
    }
}
