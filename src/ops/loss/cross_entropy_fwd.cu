// ops/loss/cross_entropy_fwd.cu: computes, for each target, the cross entropy of one row of logits and the log-sum-exp
// of that row.
//
//   m = max x,  s = sum exp(x - m),  lse = m + ln s
//   loss = (1 - e) (lse - x_target) + e lse - (e / V) sum x       0 for a target that does not count
//
// If the columns are only a part of the vocabulary, lse, x_target and sum x are stored for cross_entropy_merge.
//
// There is one pass. Each thread keeps a running pair (m, s), and rescales s when m grows. Then the block merges the
// pairs in the order of the threads. -inf is a legal logit. If all elements of a thread are -inf, the thread subtracts
// 0 instead of m.
//
// Benchmark: "cross-entropy forward" in tests/bench/h200.csv.
//
// Launch: block of 32 .. 512 threads, a multiple of 32; a block handles one row at a time and steps through the rows.
// Any v and any alignment are allowed. With X_DT the aligned middle of a row is read in vectors of eight.
//
// te:baseline
// te:row X_DT=3
// te:row X_DT=1
// te:row X_DT=2
#include "device/vector.cuh"
#include "ops/loss/kargs.h"
#include "ops/loss/loss.cuh"

struct te_running {
    float m, s, sum;
};
TE_DEV void te_running_add(te_running *r, float x) {
    float m = fmaxf(r->m, x), ref = te_loss_reference(m);
    r->s = r->s * te_loss_exp(r->m - ref) + te_loss_exp(x - ref);
    r->m = m;
    r->sum += x;
}
#ifdef X_DT
TE_DEV void te_running_add8(te_running *r, const float x[8]) {
    float m = r->m, s, sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) m = fmaxf(m, x[j]);
    float ref = te_loss_reference(m);
    s = r->s * te_loss_exp(r->m - ref);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        s += te_loss_exp(x[j] - ref);
        sum += x[j];
    }
    r->m = m, r->s = s;
    r->sum += sum;
}
#endif

extern "C" __global__ void __launch_bounds__(512)
    te_cross_entropy_fwd(const __grid_constant__ te__cross_entropy_fwd_kargs a) {
    te_follow();
    __shared__ float scratch[32];
    for (te_i64 row = blockIdx.x; row < a.m; row += gridDim.x) {
        te_i64 first = row * a.v;
        te_running r = {-TE_INF, 0.0f, 0.0f};
#ifdef X_DT
        te_loss_span span = te_loss_split(a.logits, first, a.v, X_DT == TE_F32 ? 4 : 2);
        if (threadIdx.x < span.head) te_running_add(&r, te_load(a.logits, first + threadIdx.x, X_DT));
#pragma unroll 4
        for (te_i64 i = threadIdx.x; i < span.vectors; i += blockDim.x) {
            float x[8];
            te_load8(a.logits, first + span.head + 8 * i, X_DT, x);
            te_running_add8(&r, x);
        }
        if (threadIdx.x < a.v - span.tail) te_running_add(&r, te_load(a.logits, first + span.tail + threadIdx.x, X_DT));
#else
        for (te_i64 i = threadIdx.x; i < a.v; i += blockDim.x)
            te_running_add(&r, te_load(a.logits, first + i, a.logits_dt));
#endif
        float m = te_block_max(r.m, scratch);
        float s = te_block_sum(r.s * te_loss_exp(r.m - te_loss_reference(m)), scratch);
        float sum = a.smoothing > 0.0f ? te_block_sum(r.sum, scratch) : 0.0f;
        if (threadIdx.x == 0) {
            te_i64 t = te_loss_target(a.target, row, a.target_dt, a.ignore_index, a.vocab), column = t - a.start;
            if (t < 0) te_loss_tell(a.outside, a.target, row, a.target_dt, a.ignore_index, a.vocab);
            float lse = m + logf(s), x_target = t >= 0 && column >= 0 && column < a.v
                                                    ? te_load(a.logits, first + column, a.logits_dt)
                                                    : -TE_INF;
            if (a.parts) {
                a.parts[3 * row] = lse, a.parts[3 * row + 1] = x_target, a.parts[3 * row + 2] = sum;
            } else {
                a.loss[row] = t >= 0 ? te_loss_of(lse, x_target, sum, a.smoothing, a.vocab) : 0.0f;
                a.lse[row] = lse;
            }
        }
    }
}
