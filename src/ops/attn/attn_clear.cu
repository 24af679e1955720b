// ops/attn/attn_clear.cu: runs before the other kernels of a call. Some rows of packed tensors belong to no sequence.
// In these rows the kernel sets o to 0 and lse to -inf, or in the backward pass dq, dk and dv to 0. Before a forward
// pass it also sets max_logit to -inf, because the forward kernels only raise it. A warp has one row. The rows of o or
// dq come first, then those of dk and dv.
//
// Launch: grid ceil((rows of q + rows of k) / 8), block 256.
// te:baseline
#include "ops/attn/attn.cuh"

TE_DEV bool te_taken(const te__attn_kargs &a, int row, bool keys) {
    bool taken = false;
    for (int b = threadIdx.x & 31; b < a.batch; b += 32) {
        const te__attn_seq seq = te__attn_seq_of(&a, b);
        const te_i64 first = keys ? seq.kv_at : seq.q_at;
        taken = taken || (row >= first && row < first + (keys ? seq.s_kv : seq.s_q));
    }
    return __any_sync(0xffffffffu, taken);
}
TE_DEV void te_clear_row(const te__attn_view &x, int row, int heads, int d) {
    for (int h = 0; h < heads; h++)
        for (int c = threadIdx.x & 31; c < d; c += 32) te_store(x.p, te_attn_at(x, 0, h, row) + c, x.dt, 0.0f);
}

extern "C" __global__ void __launch_bounds__(256, 4) te_attn_clear(const __grid_constant__ te__attn_kargs a) {
    te_follow();
    const bool backward = a.d_o.p != 0;
    const te_i64 row = (te_i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    const int rows_q = a.x.packed_q ? a.x.t_q : 0, rows_kv = backward && a.x.packed_kv ? a.x.t_kv : 0;
    if (!backward && a.x.max_logit && blockIdx.x == 0)
        for (int h = threadIdx.x; h < a.heads; h += 256) a.x.max_logit[h] = -TE_INF;
    if (row < rows_q) {
        if (te_taken(a, (int)row, false)) return;
        te_clear_row(backward ? a.dq : a.o, (int)row, a.heads, backward ? a.d : a.d_v);
        if (!backward && a.lse)
            for (int h = threadIdx.x & 31; h < a.heads; h += 32) a.lse[(te_i64)h * rows_q + row] = -TE_INF;
    } else if (row - rows_q < rows_kv) {
        if (te_taken(a, (int)(row - rows_q), true)) return;
        te_clear_row(a.dk, (int)(row - rows_q), a.groups, a.d);
        te_clear_row(a.dv, (int)(row - rows_q), a.groups, a.d_v);
    }
}
