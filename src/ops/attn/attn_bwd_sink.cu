// ops/attn/attn_bwd_sink.cu: the gradient of the softmax's offset in f32: d_offset[h] = - sum over sequences and rows
// of e^(offset - lse) * delta. The offset is like a key with the probability p = e^(offset - lse) but without a value.
// So its dP is 0, and its dS is -p delta. attn_delta.cu writes lse2 and delta.
//
// Launch: grid heads, block 256. Each sum is computed in a fixed order.
// te:baseline
#include "ops/attn/attn.cuh"

extern "C" __global__ void __launch_bounds__(256, 4) te_attn_bwd_sink(const __grid_constant__ te__attn_kargs a) {
    te_follow();
    __shared__ float scratch[32];
    const int h = blockIdx.x;
    const float sink2 = te_attn_sink2(a, h);
    float sum = 0.0f;
    for (int b = 0; b < a.batch; b++) {
        const te__attn_seq seq = te__attn_seq_of(&a, b);
        const te_i64 rows = te_attn_of<1>::work_at(seq, b, h);
        for (int i = threadIdx.x; i < seq.s_q; i += 256) sum += exp2f(sink2 - a.lse2[rows + i]) * a.delta[rows + i];
    }
    sum = te_block_sum(sum, scratch);
    if (threadIdx.x == 0) a.x.dsink[h] = -sum;
}
