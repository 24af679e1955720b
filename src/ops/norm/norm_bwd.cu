// ops/norm/norm_bwd.cu: the backward pass of LayerNorm and RMSNorm.
//
//   xhat = (x - mean) * rstd,  g = dy * gamma'
//   dx = rstd * (g - mean(g xhat) * xhat - mean(g)) + add          RMSNorm: without mean(g)
//   dgamma = sum over rows of dy xhat,  dbeta = sum over rows of dy
//
// With `rounded`, dx is rounded to its format before `add` is added. dx and `add` may be the same memory.
//
// Each of B blocks works on G rows at a time (G = GROUPS; 1 without CHUNKS). The sums of block b become row b of
// `partial`. For G = 2:
//
//       row      0 1 2 .. BG-1 | BG BG+1 ..           partial  [0] <- rows 0 .. G-1, BG .. BG+G-1, ..
//       block    0 0 1 .. B-1  | 0  0    ..                    [1] <- rows G .. 2G-1, ..
//
// B and G do not depend on the GPU. So each variant (with or without CHUNKS) gives the same bits on all GPUs.
//
// With CHUNKS, the columns of a row are split among the 32 * WARPS threads of a group, as in norm_fwd. Rows are copied
// to shared memory, up to STAGES rows ahead. The sums stay in registers, or in shared memory with SUMS_SHARED.
//
// In a cooperative launch (with `counter`) the blocks add up the rows of `partial` themselves. Otherwise norm_bwd_sum
// does.
//
// Benchmark: "rmsnorm backward", "layernorm backward" in tests/bench/h200.csv.
//
// Launch with CHUNKS: grid of B <= m blocks, block of 32 * WARPS * GROUPS threads, at most 512. n is a multiple of 8
// and at most 256 * CHUNKS * WARPS (with FULL equal to that). dy, x, add and dx have the format X_DT. All pointers are
// aligned to 16 bytes. te__norm_bwd_tile computes the size of the dynamic shared memory.
//
// Launch without CHUNKS: grid of B <= m blocks, block of up to 512 threads, a multiple of 32. Any size is allowed.
//
// te:baseline
// te:row CHUNKS=2 WARPS=8 FULL=1 GROUPS=2 STAGES=3 SUMS_SHARED=0 ADD=0 LAYERNORM=1 X_DT=3 W_DT=3
// te:row CHUNKS=2 WARPS=8 FULL=1 GROUPS=2 STAGES=3 SUMS_SHARED=0 ADD=1 LAYERNORM=1 X_DT=3 W_DT=3
// te:row CHUNKS=2 WARPS=16 FULL=1 GROUPS=1 STAGES=3 SUMS_SHARED=0 ADD=1 LAYERNORM=1 X_DT=3 W_DT=3
// te:row CHUNKS=2 WARPS=4 FULL=1 GROUPS=4 STAGES=3 SUMS_SHARED=0 ADD=0 LAYERNORM=1 X_DT=3 W_DT=3
// te:row CHUNKS=2 WARPS=10 FULL=1 GROUPS=1 STAGES=3 SUMS_SHARED=0 ADD=0 LAYERNORM=1 X_DT=3 W_DT=3
// te:row CHUNKS=3 WARPS=16 FULL=1 GROUPS=1 STAGES=2 SUMS_SHARED=1 ADD=0 LAYERNORM=1 X_DT=3 W_DT=3
// te:row CHUNKS=4 WARPS=16 FULL=1 GROUPS=1 STAGES=1 SUMS_SHARED=1 ADD=0 LAYERNORM=1 X_DT=3 W_DT=3
// te:row CHUNKS=4 WARPS=16 FULL=1 GROUPS=1 STAGES=2 SUMS_SHARED=1 ADD=0 LAYERNORM=0 X_DT=3 W_DT=3
// te:row CHUNKS=2 WARPS=4 FULL=0 GROUPS=4 STAGES=3 SUMS_SHARED=0 ADD=1 LAYERNORM=1 X_DT=1 W_DT=1
// te:row CHUNKS=2 WARPS=1 FULL=0 GROUPS=16 STAGES=3 SUMS_SHARED=0 ADD=0 LAYERNORM=1 X_DT=3 W_DT=3
#include "device/mma.cuh"
#include "device/vector.cuh"
#include "ops/norm/norm_parts.cuh"

// Returns v, rounded to the format of dx if `rounded` is set.
TE_DEV float te_norm_stored(float v, int rounded, int dt) {
    if (rounded && dt == TE_BF16) return te_bf16_to_f32(te_f32_to_bf16(v));
    if (rounded && dt == TE_F16) return te_f16_to_f32(te_f32_to_f16(v));
    return v;
}

#ifdef CHUNKS

#define KINDS (LAYERNORM ? 2 : 1)
#define STREAMS (ADD ? 3 : 2) // x, dy, add
#define THREADS (WARPS * 32)  // of a row

// A ring of slots in shared memory. A slot holds one row for each group of WARPS warps. A thread reads only bytes that
// it has copied itself, so no barrier is needed.
struct te_norm_ring {
    static constexpr int pieces = STREAMS * CHUNKS * te_size<X_DT> / 2, pitch = THREADS * GROUPS * 16; // of 16 bytes
    static constexpr int slot_bytes = pieces * pitch;
    te_u32 mine; // address of the thread's first 16 bytes
    TE_DEV te_u32 at(int slot, int vector, int part) const {
        return mine + slot * slot_bytes + (vector * (te_size<X_DT> / 2) + part) * pitch;
    }
    TE_DEV void clear(int slots) const {
        for (int i = 0; i < slots * pieces; i++) te_sts16(mine + i * pitch, make_uint4(0, 0, 0, 0));
    }
    TE_DEV void fetch(int slot, int vector, const char *p) const {
#pragma unroll
        for (int k = 0; k < te_size<X_DT> / 2; k++) te_cp_async16(at(slot, vector, k), p + 16 * k, 16);
    }
    TE_DEV te_raw<X_DT> get(int slot, int vector) const {
        te_raw<X_DT> r;
#pragma unroll
        for (int k = 0; k < te_size<X_DT> / 2; k++)
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(r.w[4 * k]), "=r"(r.w[4 * k + 1]), "=r"(r.w[4 * k + 2]), "=r"(r.w[4 * k + 3])
                         : "r"(at(slot, vector, k)));
        return r;
    }
};

// The sums over rows in one thread's columns. Kind 0 is dgamma, kind 1 is dbeta.
struct te_norm_sums {
#if SUMS_SHARED
    float4 *sums; // [KINDS][CHUNKS][2][THREADS], behind the ring: neighbouring threads use neighbouring banks
    TE_DEV float4 &at(int kind, int c, int half) const { return sums[((kind * CHUNKS + c) * 2 + half) * THREADS]; }
    TE_DEV void clear() {
        for (int i = 0; i < KINDS * CHUNKS * 2; i++) sums[i * THREADS] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    TE_DEV void get(int kind, int c, float v[8]) const {
        float4 p = at(kind, c, 0), q = at(kind, c, 1);
        v[0] = p.x, v[1] = p.y, v[2] = p.z, v[3] = p.w, v[4] = q.x, v[5] = q.y, v[6] = q.z, v[7] = q.w;
    }
    TE_DEV void put(int kind, int c, const float v[8]) const {
        at(kind, c, 0) = make_float4(v[0], v[1], v[2], v[3]);
        at(kind, c, 1) = make_float4(v[4], v[5], v[6], v[7]);
    }
#else
    float sums[KINDS][CHUNKS][8];
    TE_DEV void clear() {
#pragma unroll
        for (int i = 0; i < KINDS * CHUNKS * 8; i++) sums[i / (CHUNKS * 8)][i / 8 % CHUNKS][i % 8] = 0.0f;
    }
    TE_DEV void get(int kind, int c, float v[8]) const {
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = sums[kind][c][j];
    }
    TE_DEV void put(int kind, int c, const float v[8]) {
#pragma unroll
        for (int j = 0; j < 8; j++) sums[kind][c][j] = v[j];
    }
#endif
};

// Returns the sums of both components of v over the row. The barrier in this function is the only one between the
// threads of a row. So the next row must use another `scratch`.
TE_DEV float2 te_norm_sum2(float2 v, float (*scratch)[WARPS], int group) {
    int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) % WARPS;
    if (LAYERNORM) v = te_warp_sum2(v);
    else v.x = te_warp_sum(v.x);
    if (WARPS == 1) return v;
    if (lane == 0) scratch[0][warp] = v.x, scratch[1][warp] = v.y;
    if (GROUPS == 1) __syncthreads();
    else asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(THREADS) : "memory");
    v = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        v.x += scratch[0][w];
        if (LAYERNORM) v.y += scratch[1][w];
    }
    return v;
}

extern "C" __global__ void __launch_bounds__(THREADS *GROUPS, 1)
    te_norm_bwd(const __grid_constant__ te__norm_bwd_kargs a) {
    te_follow();
    __shared__ __align__(16) float scratch[GROUPS][2][2][WARPS];
    extern __shared__ __align__(16) te_u32 te_norm_shared[];
    te_norm_ring ring = {te_smem(te_norm_shared) + threadIdx.x * 16};
    int group = threadIdx.x / THREADS, t = threadIdx.x % THREADS, vectors = FULL ? CHUNKS * THREADS : (int)(a.n >> 3),
        turn = 0, slot = 0;
    float one_nth = FULL ? 1.0f / (CHUNKS * THREADS * 8) : 1.0f / (float)a.n;
    te_i64 first = (te_i64)blockIdx.x * GROUPS + group, step = (te_i64)gridDim.x * GROUPS;

    const char *x_at = (const char *)a.x + (first * a.n + 8 * t) * te_size<X_DT>; // where the next row to be fetched
                                                                                  // lies
    te_i64 dy_off = (const char *)a.dy - (const char *)a.x, add_off = (const char *)a.add - (const char *)a.x,
           ahead = first;
    auto fetch = [&](int s) {
        if (ahead < a.m) {
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                if (!FULL && t + c * THREADS >= vectors) continue;
                const char *from = x_at + c * THREADS * 8 * te_size<X_DT>;
                ring.fetch(s, c, from);
                ring.fetch(s, CHUNKS + c, from + dy_off);
                if (ADD) ring.fetch(s, 2 * CHUNKS + c, from + add_off);
            }
        }
        te_cp_async_commit();
        ahead += step, x_at += step * a.n * te_size<X_DT>;
    };
    if (!FULL) ring.clear(STAGES);
#pragma unroll
    for (int s = 0; s < STAGES; s++) fetch(s);

    te_norm_sums sums;
#if SUMS_SHARED
    sums.sums = (float4 *)((char *)te_norm_shared + STAGES * ring.slot_bytes) + threadIdx.x;
#endif
    sums.clear();
    float gamma[CHUNKS][8];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        bool there = FULL || t + c * THREADS < vectors;
        te_raw<W_DT> g =
            there ? te_raw_load_hinted<W_DT, TE_LOAD_CONSTANT>(a.gamma, 8 * (t + c * THREADS)) : te_raw_zero<W_DT>();
#pragma unroll
        for (int j = 0; j < 8; j++) gamma[c][j] = te_raw_get(g, j) + (a.zero_centered ? 1.0f : 0.0f);
    }

    float next_mean = 0.0f, next_rstd = 0.0f;
    if (first < a.m) {
        next_rstd = a.rstd[first];
        if (LAYERNORM) next_mean = a.mean[first];
    }
    for (te_i64 row = first; row < a.m; row += step, turn ^= 1) {
        float mean = next_mean, rstd = next_rstd;
        if (row + step < a.m) {
            next_rstd = a.rstd[row + step];
            if (LAYERNORM) next_mean = a.mean[row + step];
        }
        // d = x - mean, g = dy gamma', xhat = d rstd. Beyond the end of the row, x, dy and gamma are 0.
        float2 s = make_float2(0.0f, 0.0f);
        te_raw<X_DT> x[CHUNKS], dy[CHUNKS];
        te_cp_async_wait<STAGES - 1>();
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) x[c] = ring.get(slot, c), dy[c] = ring.get(slot, CHUNKS + c);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            float2 part = make_float2(0.0f, 0.0f);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float d = te_raw_get(x[c], j), g = te_raw_get(dy[c], j) * gamma[c][j];
                if (LAYERNORM) d -= mean, part.y += g;
                part.x = fmaf(g, d, part.x);
            }
            s.x += part.x, s.y += part.y;
        }
        if (!ADD) fetch(slot); // the thread has read all that was in the slot
        s = te_norm_sum2(s, scratch[group][turn], group);
        // dx = rstd (g - mean(g xhat) xhat - mean(g))
        float c1 = s.x * one_nth * rstd * rstd * rstd, c2 = s.y * one_nth * rstd;
        char *to = (char *)a.dx + (row * a.n + 8 * t) * te_size<X_DT>;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            if (!FULL && t + c * THREADS >= vectors) continue;
            te_raw<X_DT> add;
            if (ADD) add = ring.get(slot, 2 * CHUNKS + c);
            float dx[8], dgamma[8], dbeta[8];
            sums.get(0, c, dgamma);
            if (LAYERNORM) sums.get(1, c, dbeta);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float d = te_raw_get(x[c], j), v = te_raw_get(dy[c], j);
                if (LAYERNORM) d -= mean, dbeta[j] += v;
                dgamma[j] = fmaf(v * rstd, d, dgamma[j]);
                dx[j] = fmaf(-c1, d, LAYERNORM ? fmaf(v * gamma[c][j], rstd, -c2) : v * gamma[c][j] * rstd);
                if (ADD) dx[j] = te_norm_stored(dx[j], a.rounded, X_DT) + te_raw_get(add, j);
            }
            te_store8(to + c * THREADS * 8 * te_size<X_DT>, 0, X_DT, dx);
            sums.put(0, c, dgamma);
            if (LAYERNORM) sums.put(1, c, dbeta);
        }
        if (ADD) fetch(slot);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    if (!a.partial) return;
    te_cp_async_wait<0>();
#if GROUPS > 1
    // Adds up the sums of the groups of warps in order. They pass through the memory of the ring, which is free now.
    float4 *shared = (float4 *)te_norm_shared + t;
    for (int g = 1; g < GROUPS; g++) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < KINDS * CHUNKS * 2; i++) {
            float *v = &sums.sums[i / (CHUNKS * 2)][i / 2 % CHUNKS][i % 2 * 4];
            if (group == g) shared[i * THREADS] = make_float4(v[0], v[1], v[2], v[3]);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < KINDS * CHUNKS * 2; i++) {
            float *v = &sums.sums[i / (CHUNKS * 2)][i / 2 % CHUNKS][i % 2 * 4];
            float4 u = group == 0 ? shared[i * THREADS] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            v[0] += u.x, v[1] += u.y, v[2] += u.z, v[3] += u.w;
        }
    }
#endif
#pragma unroll
    for (int k = 0; k < KINDS; k++)
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            if (group != 0 || (!FULL && t + c * THREADS >= vectors)) continue;
            float out[8];
            sums.get(k, c, out);
            te_store8(a.partial, ((te_i64)blockIdx.x * KINDS + k) * a.n + 8 * (t + c * THREADS), TE_F32, out);
        }
    if (!a.counter) return;
    __syncthreads();
    te_grid_wait(a.counter);
    te_u32 units = (te_u32)((a.n + 127) / 128);
    for (te_u32 u = blockIdx.x; u < KINDS * units; u += gridDim.x)
        te_norm_add_parts<4>(a.sum, u / units, u % units, (float *)te_norm_shared);
}

#else

TE_DEV float2 te_norm_sum2(float2 v, float2 *scratch) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    v = make_float2(te_warp_sum(v.x), te_warp_sum(v.y));
    if (warps == 1) return v;
    if (lane == 0) scratch[warp] = v;
    __syncthreads();
    v = lane < warps ? scratch[lane] : make_float2(0.0f, 0.0f);
    return make_float2(te_warp_sum(v.x), te_warp_sum(v.y));
}

extern "C" __global__ void __launch_bounds__(512) te_norm_bwd(const __grid_constant__ te__norm_bwd_kargs a) {
    te_follow();
    __shared__ float2 scratch[2][32];
    int turn = 0;
    float centre = a.zero_centered ? 1.0f : 0.0f;
    // Only thread i % blockDim.x touches column i of the block's row of partial sums.
    float *dgamma = a.partial ? a.partial + (te_i64)blockIdx.x * (a.layernorm ? 2 : 1) * a.n : 0;
    if (a.partial)
        for (te_i64 i = threadIdx.x; i < a.n; i += blockDim.x) {
            dgamma[i] = 0.0f;
            if (a.layernorm) dgamma[a.n + i] = 0.0f;
        }
    for (te_i64 row = blockIdx.x; row < a.m; row += gridDim.x, turn ^= 1) {
        float mean = a.layernorm ? a.mean[row] : 0.0f, rstd = a.rstd[row];
        float2 s = make_float2(0.0f, 0.0f);
        for (te_i64 i = threadIdx.x; i < a.n; i += blockDim.x) {
            float xhat = (te_load(a.x, row * a.n + i, a.x_dt) - mean) * rstd;
            float g = te_load(a.dy, row * a.n + i, a.dy_dt) * (te_load(a.gamma, i, a.gamma_dt) + centre);
            s.x = fmaf(g, xhat, s.x);
            s.y += g;
        }
        s = te_norm_sum2(s, scratch[turn]);
        float c1 = s.x / (float)a.n, c2 = a.layernorm ? s.y / (float)a.n : 0.0f;
        for (te_i64 i = threadIdx.x; i < a.n; i += blockDim.x) {
            float xhat = (te_load(a.x, row * a.n + i, a.x_dt) - mean) * rstd;
            float dy = te_load(a.dy, row * a.n + i, a.dy_dt);
            float g = dy * (te_load(a.gamma, i, a.gamma_dt) + centre);
            float add = a.add ? te_load(a.add, row * a.n + i, a.add_dt) : 0.0f;
            float dx = fmaf(-c1, xhat, g - c2);
            te_store(a.dx, row * a.n + i, a.dx_dt,
                     a.rounded ? te_norm_stored(fmaf(rstd, dx, 0.0f), 1, a.dx_dt) + add : fmaf(rstd, dx, add));
            if (a.partial) {
                dgamma[i] += dy * xhat;
                if (a.layernorm) dgamma[a.n + i] += dy;
            }
        }
    }
}

#endif
