// ops/softcap/capped_softmax.cu: softmax of capped scores over the keys that each row sees, and its gradient.
//
//   s = cap tanh(scale x / cap), or scale x;   y_j = exp(s_j - max s) / sum, 0 for keys that the row does not see
//   with dy: y_j = p_j (dy_j - sum_k p_k dy_k) ds_j / dx_j, p as above, computed anew
//
//   one row:  | 0 .. 0 | first ... end | 0 .. 0 |      three passes over the middle: maximum, sums, results
//
// Launch: block of 32 .. 256 threads, any grid: blocks step through the rows. Any formats.
//
// te:baseline
#include "device/base.cuh"
#include "ops/softcap/kargs.h"

// The capped score of element i; *slope: its derivative.
TE_DEV_CALL float te_capped_score(const te__capped_softmax_kargs &a, te_i64 i, float *slope) {
    float x = a.scale * te_load(a.x, i, a.x_dt), t = a.cap > 0.0f ? tanhf(__fdiv_rn(x, a.cap)) : 0.0f;
    *slope = a.scale * (1.0f - t * t);
    return a.cap > 0.0f ? a.cap * t : x;
}

extern "C" __global__ void __launch_bounds__(256) te_capped_softmax(const __grid_constant__ te__capped_softmax_kargs a) {
    te_follow();
    __shared__ float scratch[32];
    for (te_i64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const te_i64 start = row * a.s_kv;
        float most = -TE_INF, sum = 0.0f, mean = 0.0f, slope;
        te_i64 first, end;
        te__capped_keys(&a, row, &first, &end);
        for (te_i64 j = first + threadIdx.x; j < end; j += blockDim.x) most = fmaxf(most, te_capped_score(a, start + j, &slope));
        most = te_block_max(most, scratch);
        for (te_i64 j = first + threadIdx.x; j < end; j += blockDim.x) {
            float e = expf(te_capped_score(a, start + j, &slope) - most);
            sum += e;
            if (a.dy) mean += e * te_load(a.dy, start + j, a.dy_dt);
        }
        sum = te_block_sum(sum, scratch);
        mean = __fdiv_rn(te_block_sum(mean, scratch), sum);
        for (te_i64 j = threadIdx.x; j < a.s_kv; j += blockDim.x) {
            float y = 0.0f;
            if (j >= first && j < end) {
                y = __fdiv_rn(expf(te_capped_score(a, start + j, &slope) - most), sum);
                if (a.dy) y *= (te_load(a.dy, start + j, a.dy_dt) - mean) * slope;
            }
            te_store(a.y, start + j, a.y_dt, y);
        }
    }
}
