// ops/norm/norm_fwd_queue.cu: the forward pass of LayerNorm and RMSNorm for many long rows. The formulas are in
// norm_fwd.cu.
//
// A block keeps gamma' and beta in registers. Its first thread fills a queue of STAGES rows in shared memory by bulk
// copies. Each row of the queue has its own mbarrier:
//
//       queue of block 5 of 132 blocks, two rows a unit:    [ row 10 ][ row 11 ][ row 274 ][ row 275 ]
//
// A unit is `unit` neighbouring rows. A block takes its first `own` units by its number: with 132 blocks, block 5 takes
// units 5, 137 and so on. It gets all further units from a counter that all blocks share. So rows are scheduled
// dynamically, because multiprocessors get unequal bandwidth. The throughput of a single counter is limited. Therefore
// a unit has about 16 KB (tests/bench/notes.md).
//
// Benchmark: "rmsnorm forward ...", "layernorm forward ..." in tests/bench/h200.csv.
//
// Launch: block of 32 * WARPS threads, at least two warps; any grid up to the number of units. The dynamic shared
// memory holds STAGES rows of x.
//
// n = 256 * CHUNKS * WARPS, ld = n, and m is at most 2^30. x has 16 bits. x, gamma and beta are aligned to 16 bytes, y
// to 16 bytes (8 for FP8).
//
// te:arch 90
// te:row CHUNKS=4 WARPS=4 RESIDENT=4 STAGES=4 AMAX=0 ZERO_CENTERED=0 LAYERNORM=0 X_DT=3 W_DT=3 Y_DT=3
// te:row CHUNKS=4 WARPS=4 RESIDENT=4 STAGES=4 AMAX=0 ZERO_CENTERED=0 LAYERNORM=1 X_DT=3 W_DT=3 Y_DT=3
// te:row CHUNKS=4 WARPS=4 RESIDENT=4 STAGES=4 AMAX=1 ZERO_CENTERED=0 LAYERNORM=0 X_DT=3 W_DT=3 Y_DT=4
// te:row CHUNKS=4 WARPS=4 RESIDENT=4 STAGES=4 AMAX=1 ZERO_CENTERED=0 LAYERNORM=1 X_DT=3 W_DT=3 Y_DT=4
// te:row CHUNKS=4 WARPS=4 RESIDENT=4 STAGES=4 AMAX=1 ZERO_CENTERED=0 LAYERNORM=1 X_DT=3 W_DT=3 Y_DT=3
// te:row CHUNKS=4 WARPS=8 RESIDENT=2 STAGES=4 AMAX=0 ZERO_CENTERED=0 LAYERNORM=0 X_DT=3 W_DT=3 Y_DT=3
// te:row CHUNKS=4 WARPS=8 RESIDENT=2 STAGES=4 AMAX=0 ZERO_CENTERED=0 LAYERNORM=1 X_DT=3 W_DT=3 Y_DT=3
// te:row CHUNKS=4 WARPS=8 RESIDENT=2 STAGES=4 AMAX=1 ZERO_CENTERED=0 LAYERNORM=0 X_DT=3 W_DT=3 Y_DT=4
// te:row CHUNKS=4 WARPS=8 RESIDENT=2 STAGES=4 AMAX=1 ZERO_CENTERED=0 LAYERNORM=1 X_DT=3 W_DT=3 Y_DT=4
// te:row CHUNKS=4 WARPS=2 RESIDENT=8 STAGES=4 AMAX=0 ZERO_CENTERED=1 LAYERNORM=1 X_DT=3 W_DT=1 Y_DT=3
// te:row CHUNKS=2 WARPS=5 RESIDENT=3 STAGES=4 AMAX=1 ZERO_CENTERED=0 LAYERNORM=1 X_DT=2 W_DT=2 Y_DT=5
// te:row CHUNKS=4 WARPS=4 RESIDENT=4 STAGES=4 AMAX=0 ZERO_CENTERED=0 LAYERNORM=0 X_DT=3 W_DT=3 Y_DT=3 ROUNDED=1
#include "device/hopper.cuh"
#define FULL 1
#include "ops/norm/norm_row.cuh"

constexpr int te_row_bytes = THREADS * CHUNKS * 16;

struct te_norm_queue {
    __align__(8) te_u64 bars[STAGES];
    int rows[STAGES]; // a row, or m if there is no row and none will follow
};

// The state of the producer of the queue. The producer is the first thread of the block.
struct te_norm_feed {
    int row, left;  // row: the next row; left: how many rows of its unit are left, including the next row
    int taken;      // units taken so far
    te_u32 granted; // what the last increment of the counter returned; it is requested one unit ahead

    TE_DEV void fill(const te__norm_fwd_kargs &a, te_norm_queue &queue, te_u32 places, int place) {
        te_u32 bar = te_smem(&queue.bars[place]);
        if (left == 0 && row < (int)a.m) {
            int unit = taken < a.own ? (int)(blockIdx.x + taken * gridDim.x) : (int)(a.own * gridDim.x + granted);
            row = min(unit * a.unit, (int)a.m), left = a.unit, taken++;
            // The block increments the counter when it takes the last of its first `own` units, and again for each
            // later unit. After `questions` increments in total, over all blocks, the counter is 0 again.
            if (taken >= a.own && row < (int)a.m) granted = atomicInc(a.counter, (te_u32)a.questions - 1);
        }
        queue.rows[place] = row;
        if (row < (int)a.m) {
            te_mbar_expect(bar, te_row_bytes);
            te_bulk_load(places + place * te_row_bytes, (const char *)a.x + row * (te_i64)te_row_bytes, te_row_bytes,
                         bar);
            row++, left--;
        } else {
            te_mbar_arrive(bar);
        }
    }
};

// Loads eight elements of 16 bits from shared memory, at a multiple of 16 bytes.
template <int DT> TE_DEV te_raw<DT> te_raw_shared(te_u32 at) {
    te_raw<DT> r;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3])
                 : "r"(at)
                 : "memory");
    return r;
}

// Loads eight weights as f32. They stay in registers through all rows.
TE_DEV te_raw<TE_F32> te_norm_weights(const void *p, int i, bool centred) {
    te_raw<W_DT> w = p ? te_raw_load_hinted<W_DT, TE_LOAD_CONSTANT>(p, i) : te_raw_zero<W_DT>();
    te_raw<TE_F32> r;
#pragma unroll
    for (int j = 0; j < 8; j++) r.w[j] = __float_as_uint(centred ? te_raw_get(w, j) + 1.0f : te_raw_get(w, j));
    return r;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    te_norm_fwd_queue(const __grid_constant__ te__norm_fwd_kargs a) {
    te_follow();
    __shared__ te_norm_scratch scratch;
    __shared__ te_norm_queue queue;
    extern __shared__ __align__(128) te_u32 te_norm_places[];
    te_u32 places = te_smem(te_norm_places);
    te_norm_feed feed = {};
    int t = threadIdx.x;
    if (t == 0) {
        for (int s = 0; s < STAGES; s++) te_mbar_init(te_smem(&queue.bars[s]), 1);
        te_mbar_init_done();
    }
    __syncthreads();
    if (t == 0) {
#pragma unroll 1
        for (int s = 0; s < STAGES; s++) feed.fill(a, queue, places, s);
    }
    float scale = te_quantized ? *a.scale : 1.0f, largest = 0.0f;
    te_raw<TE_F32> gamma[CHUNKS], beta[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        gamma[c] = te_norm_weights(a.gamma, 8 * (t + c * THREADS), ZERO_CENTERED);
        if (LAYERNORM) beta[c] = te_norm_weights(a.beta, 8 * (t + c * THREADS), false);
    }
    te_raw_seal(gamma);
    if (LAYERNORM) te_raw_seal(beta);
    te_norm_scale_inv(a);

    for (int place = 0, turn = 0, parity = 0;; turn ^= 1) {
        te_mbar_wait(te_smem(&queue.bars[place]), parity);
        int row = queue.rows[place];
        if (row >= (int)a.m) break;
        te_norm_row r;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            r.x[c] = te_raw_shared<X_DT>(places + place * te_row_bytes + (c * THREADS + t) * 16);
        float2 sum = r.add(r.share(t, CHUNKS * THREADS, 0.0f), scratch.sums[turn]);
        // after the barrier in r.add, all threads have read their part of the row, so its memory can be filled again
        if (t == 0) feed.fill(a, queue, places, place);
        r.finish(sum, t, CHUNKS * THREADS, 1.0f / (CHUNKS * THREADS * 8), a.eps, scratch);
        te_norm_stats(a, row, t, r);
        char *to = (char *)a.y + (row * a.n + 8 * t) * te_y_size;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            float y[8];
            r.result(c, gamma[c], beta[c], false, y);
            if (AMAX) largest = fmaxf(largest, te_largest8(y));
            if (te_quantized) {
#pragma unroll
                for (int j = 0; j < 8; j++) y[j] *= scale;
            }
            te_store8(to + c * (THREADS * 8 * te_y_size), 0, Y_DT, y);
        }
        if (++place == STAGES) place = 0, parity ^= 1;
    }
    if (AMAX) te_norm_finish(a, largest, Y_DT);
}
