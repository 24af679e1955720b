// ops/optim/adam.cu: one Adam or AdamW step over many tensors of mixed formats.
//
//   g  = grad * grad_scale            (+ weight_decay * p in l2_mode)
//   m  = beta1 m + (1 - beta1) g      v = beta2 v + (1 - beta2) g^2
//   p -= lr (unbias1 m * (1 / (sqrt(unbias2 v) + eps))  + weight_decay p unless l2_mode)
//   unbias = 1 / (1 - beta^step)
//
// p is the f32 master if there is one. The parameter then becomes the rounded master. Every operation is rounded by
// itself, as on the CPU.
//
// Memory bandwidth is the limit: 28 bytes for each element (bf16 parameter and gradient, f32 master and moments). Many
// short blocks come near that limit. Loops, bulk copies and cache hints were slower.
//
// Benchmark: "adam bf16 with f32 states" in tests/bench/h200.csv.
//
// Launch: block 256; grid: one block for each chunk of 1024 elements. If found_inf is not 0, nothing is written.
//
// te:baseline
#include "device/vector.cuh"
#include "ops/optim/adam.cuh"
#include "ops/optim/multi.cuh"

// Does the step for this thread's four elements, if all four exist. The chunk has the elements `begin` .. `end` - 1.
// Returns the end of the chunk's last whole group of four.
template <int G, int P, bool MASTER>
TE_DEV te_i64 te_adam_group(const te__adam_kargs &a, const te_adam_step &step, int t, te_i64 begin, te_i64 end) {
    te_i64 whole = begin + (end - begin) / 4 * 4, i = begin + threadIdx.x * 4;
    if (i >= whole) return whole;
    void *param = a.param[t];
    float *m_at = a.m[t], *v_at = a.v[t], *master_at = a.master[t];
    te_raw<TE_ANY, 4> g = te_raw_ask<4>(a.grad[t], i, G), m = te_raw_ask<4>(m_at, i, TE_F32),
                      v = te_raw_ask<4>(v_at, i, TE_F32);
    te_raw<TE_ANY, 4> before = MASTER ? te_raw_ask<4>(master_at, i, TE_F32) : te_raw_ask<4>(param, i, P);
    float g4[4], p4[4], m4[4], v4[4];
    te_raw_values<4>(g, G, g4);
    te_raw_values<4>(before, MASTER ? TE_F32 : P, p4);
    te_raw_values<4>(m, TE_F32, m4);
    te_raw_values<4>(v, TE_F32, v4);
#pragma unroll
    for (int k = 0; k < 4; k++) step(g4[k], p4[k], m4[k], v4[k]);
    te_store_n<4>(m_at, i, TE_F32, m4);
    te_store_n<4>(v_at, i, TE_F32, v4);
    if constexpr (MASTER) te_store_n<4>(master_at, i, TE_F32, p4);
    te_store_n<4>(param, i, P, p4);
    return whole;
}

extern "C" __global__ void __launch_bounds__(256) te_adam(const __grid_constant__ te__adam_kargs a) {
    te_follow();
    if (te_adam_skips(a.numbers)) return;
    te_adam_step step = te_adam_begin(a.numbers);
    int t = te_tensor_of(a.first, a.tensors, blockIdx.x);
    te_i64 begin = (te_i64)(blockIdx.x - a.first[t]) * TE__ADAM_CHUNK,
           end = begin + TE__ADAM_CHUNK < a.n[t] ? begin + TE__ADAM_CHUNK : a.n[t];
    int g_dt = a.grad_dt[t], p_dt = a.param_dt[t];
    bool master = a.master[t] != 0;
    if (a.vector[t]) {
        if (g_dt == TE_F32 && p_dt == TE_F32 && !master)
            begin = te_adam_group<TE_F32, TE_F32, false>(a, step, t, begin, end);
        else if (g_dt == TE_F32 && p_dt == TE_BF16 && master)
            begin = te_adam_group<TE_F32, TE_BF16, true>(a, step, t, begin, end);
        else if (g_dt == TE_BF16 && p_dt == TE_BF16 && master)
            begin = te_adam_group<TE_BF16, TE_BF16, true>(a, step, t, begin, end);
        else if (g_dt == TE_BF16 && p_dt == TE_BF16)
            begin = te_adam_group<TE_BF16, TE_BF16, false>(a, step, t, begin, end);
        else if (g_dt == TE_F16 && p_dt == TE_F16 && master)
            begin = te_adam_group<TE_F16, TE_F16, true>(a, step, t, begin, end);
    }
    for (te_i64 i = begin + threadIdx.x; i < end; i += 256) { // the remaining elements: a tail, or all of the chunk
        float p = master ? a.master[t][i] : te_load(a.param[t], i, p_dt), m = a.m[t][i], v = a.v[t][i];
        step(te_load(a.grad[t], i, g_dt), p, m, v);
        a.m[t][i] = m, a.v[t][i] = v;
        if (master) a.master[t][i] = p;
        te_store(a.param[t], i, p_dt, p);
    }
}
