// ops/softmax/softmax_fwd.cu: computes y = softmax(scale * x) for each row, with an optional mask or causal mask.
//
//   m = max of the scores,  y = exp(score - m) / sum exp(score - m)
//
// There are two passes. In the first, each thread keeps a running maximum m and a running sum s of exp(score - m), and
// rescales s when m grows. The block then merges the maxima and sums of its threads, in the order of the threads. The
// second pass reads the row again, usually from a cache, and writes y. Columns beyond the diagonal of a causal row are
// not read; y is 0 there.
//
// Launch: block of 32 .. 512 threads, a multiple of 32. A block handles one row at a time and steps through the rows.
// Any n and any alignment are allowed. If X_DT is defined, x and y have this te_dtype and are aligned to 16 bytes, mask
// is aligned to 8 bytes, and n is a multiple of 8.
//
// te:baseline
// te:row X_DT=3
// te:row X_DT=2
// te:row X_DT=1
#include "device/vector.cuh"
#include "ops/softmax/kargs.h"

TE_DEV float te_softmax_reference(float m) { return m == -TE_INF ? 0.0f : m; }
struct te_softmax_running {
    float m, s;
};
// Adds N scores to a running maximum and a running sum. A score of -inf does not count.
template <int N> TE_DEV void te_softmax_add(te_softmax_running *r, const float x[N]) {
    float m = r->m, s;
#pragma unroll
    for (int j = 0; j < N; j++) m = fmaxf(m, x[j]);
    float ref = te_softmax_reference(m);
    s = r->s * expf(r->m - ref);
#pragma unroll
    for (int j = 0; j < N; j++) s += expf(x[j] - ref);
    r->m = m, r->s = s;
}

extern "C" __global__ void __launch_bounds__(512) te_softmax_fwd(const __grid_constant__ te__softmax_fwd_kargs a) {
    te_follow();
    __shared__ float scratch[32];
#ifdef X_DT
    const int width = 8;
#else
    const int width = 1;
#endif
    for (te_i64 row = blockIdx.x; row < a.m; row += gridDim.x) {
        te_i64 i = row % a.s_q, first = row * a.n, visible = a.causal ? i + 1 + a.n - a.s_q : a.n;
        visible = visible < 0 ? 0 : visible > a.n ? a.n : visible;
        const te_u8 *mask = a.mask ? a.mask + ((a.one_mask ? 0 : row / (a.s_q * a.heads)) * a.s_q + i) * a.n : 0;
        auto scores = [&](te_i64 at, float x[width]) {
#ifdef X_DT
            te_load8(a.x, first + at, X_DT, x);
#else
            x[0] = te_load(a.x, first + at, a.x_dt);
#endif
#pragma unroll
            for (int j = 0; j < width; j++) {
                x[j] = __fmul_rn(x[j], a.scale);
                if (mask && mask[at + j]) x[j] = -10000.0f;
                if (at + j >= visible) x[j] = -TE_INF;
            }
        };
        te_softmax_running r = {-TE_INF, 0.0f};
        for (te_i64 at = (te_i64)threadIdx.x * width; at < visible; at += (te_i64)blockDim.x * width) {
            float x[width];
            scores(at, x);
            te_softmax_add<width>(&r, x);
        }
        float m = te_block_max(r.m, scratch), ref = te_softmax_reference(m);
        float s = te_block_sum(r.s * expf(r.m - ref), scratch), inverse = mask && m == -10000.0f ? 0.0f : __frcp_rn(s);
        if (visible == 0) inverse = 0.0f;
        for (te_i64 at = (te_i64)threadIdx.x * width; at < a.n; at += (te_i64)blockDim.x * width) {
            float y[width];
            if (at < visible) scores(at, y);
#pragma unroll
            for (int j = 0; j < width; j++) y[j] = at + j < visible ? expf(y[j] - m) * inverse : 0.0f;
#ifdef X_DT
            te_store8(a.y, first + at, X_DT, y);
#else
            te_store(a.y, first + at, a.y_dt, y[0]);
#endif
        }
    }
}
