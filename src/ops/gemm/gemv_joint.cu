// ops/gemm/gemv_joint.cu: computes up to three products D_i = scale_i A B_i^T + bias_i of at most sixteen rows A, and
// the step after them (te_op_joint_gemm). Reading the weights B is the limit.
//
// A tile is sixteen lines (rows) of one B. WARPS warps multiply a tile. Warp w takes the turns w, w + WARPS and so on,
// as in gemv_k. A block has sixteen warps: groups of WARPS, which have tiles of their own. A decoding step consists of
// many such launches, each of a few microseconds. So each instruction before the first product and in each tile counts,
// and so does the size of the code, which the instruction caches must fetch.
//
// Each lane copies the pieces of B that it will read itself into shared memory (cp.async), DEPTH turns ahead, from one
// tile into the next. So bytes of B are always on their way, also while A is read and quantized and while sums are
// added up. If `early`, they are on their way before the previous kernel of the stream has ended, and the factors of B
// are read then too.
//
// A multiprocessor has room for two blocks: one of this kernel and one of the next. The next kernel starts as soon as
// it finds room (te_lead before te_follow), and copies its own B. Such early copies go one by one, each a half of a
// turn of a lane. All at once, they would fill the queues of memory, and A would wait behind them, in this kernel and
// in those before it.
//
// A is in shared memory: as it is, or quantized by each block and decoded into f16 (gemv_shared.cuh). NORM: each block
// normalizes A's rows before (gemv_norm.cuh). One row of NVFP4 is multiplied by integer products (gemv_integers.cuh).
//
// With a gated activation, a group multiplies a tile of the first product and the same lines of the second one. Their
// sums over warps are added up together.
//
// Benchmark: tests/bench/notes.md, "Launches".
//
// Options: A_DT, B_DT, EIGHTS, FOURS, SCALES, SWIZZLED, BLOCK and HIGH of gemv_k. k has whole turns, rows of A start at
// multiples of 16 bytes, and a D has one factor. BLOCK is 0 or 2. SWIZZLED may be undefined: 0.
//          ONE     1: A has one row; 0 or undefined: it may have more
//          D_DT    te_dtype of D
//          WARPS   warps of a tile: 1, 2, 4, 8 or 16
//          DEPTH   turns of B on their way for each warp: 1 to 3
//          JOINT   1: products, no step after them; 2: two products and ACT, a gated te_activation; 3: one product,
//                  which is added to `residual`
//          NORM    1: RMSNorm of A's rows, which have 16 bits; 2: LayerNorm; 0 or undefined: none
//          W_DT    with NORM: te_dtype of gamma and beta
//          ROPE    1, with JOINT=1: queries, keys and values, which are rotated and written to a cache besides D
//                  (gemv_rotate.cuh). te__rope_kargs stand behind the other arguments
//
// Launch: any grid, block 512, shared memory by te__gemv_joint_shared and te__gemv_joint_kept, or more. A grid of one
// block for each multiprocessor lets the next kernel's blocks find equal room on all of them (te__gemv_joint_depth); so
// blocks without a tile stay until these have started.
//
// te:arch 80
// te:row A_DT=3 B_DT=3 BLOCK=0 SCALES=0 SWIZZLED=0 EIGHTS=1 WARPS=8|16 HIGH=0 D_DT=3 DEPTH=2|3 JOINT=1|3
// te:row A_DT=3 B_DT=3 BLOCK=0 SCALES=0 SWIZZLED=0 EIGHTS=1 WARPS=2|4 HIGH=0 D_DT=3 DEPTH=3 JOINT=2 ACT=8
// te:row A_DT=2 B_DT=2 BLOCK=0 SCALES=0 SWIZZLED=0 EIGHTS=2 WARPS=1 HIGH=0 D_DT=2 DEPTH=1 JOINT=1
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=0 SWIZZLED=0 EIGHTS=1 WARPS=8|16 HIGH=3 D_DT=3 DEPTH=2|3 JOINT=1|3
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=0 SWIZZLED=0 EIGHTS=1 WARPS=4 HIGH=3 D_DT=3 DEPTH=3 JOINT=2 ACT=8
// te:row A_DT=4 B_DT=4 BLOCK=2 SCALES=0 SWIZZLED=0 EIGHTS=1 WARPS=8|16 HIGH=3 D_DT=3 DEPTH=3 JOINT=1|3
// te:row A_DT=4 B_DT=4 BLOCK=2 SCALES=0 SWIZZLED=0 EIGHTS=1 WARPS=4 HIGH=3 D_DT=3 DEPTH=3 JOINT=2 ACT=8
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=1 SWIZZLED=0 FOURS=1 WARPS=8|16 HIGH=3 D_DT=3 DEPTH=2|3 JOINT=1|3
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=1 SWIZZLED=0 FOURS=1 WARPS=4 HIGH=3 D_DT=3 DEPTH=3 JOINT=2 ACT=8
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=1 SWIZZLED=0|1 EIGHTS=1|2 WARPS=8 HIGH=3 D_DT=3 DEPTH=2 JOINT=1|3
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=1 SWIZZLED=0 EIGHTS=2 WARPS=4 HIGH=3 D_DT=3 DEPTH=2 JOINT=2 ACT=8
// te:row A_DT=7 B_DT=7 BLOCK=0 SCALES=2 SWIZZLED=0|1 EIGHTS=1 WARPS=8|16 HIGH=3 D_DT=3 DEPTH=2|3 JOINT=1|3
// te:row A_DT=7 B_DT=7 BLOCK=0 SCALES=2 SWIZZLED=0 EIGHTS=1 WARPS=4 HIGH=3 D_DT=3 DEPTH=2|3 JOINT=2 ACT=8
// te:row A_DT=7 B_DT=7 BLOCK=0 SCALES=2 SWIZZLED=0|1 EIGHTS=1 ONE=1 WARPS=8|16 HIGH=3 D_DT=3 DEPTH=2|3 JOINT=1|3
// te:row A_DT=7 B_DT=7 BLOCK=0 SCALES=2 SWIZZLED=0 EIGHTS=1 ONE=1 WARPS=4 HIGH=3 D_DT=3 DEPTH=2|3 JOINT=2 ACT=8
// te:row A_DT=3 B_DT=3 BLOCK=0 SCALES=0 SWIZZLED=0 EIGHTS=1 WARPS=8 HIGH=0 D_DT=3 DEPTH=3 JOINT=1 NORM=1|2 W_DT=3
// te:row A_DT=3 B_DT=3 BLOCK=0 SCALES=0 EIGHTS=1 ONE=1 WARPS=4 HIGH=0 D_DT=3 DEPTH=3 JOINT=2 ACT=8 NORM=1 W_DT=3
// te:row A_DT=2 B_DT=2 BLOCK=0 SCALES=0 SWIZZLED=0 EIGHTS=2 WARPS=1 HIGH=0 D_DT=2 DEPTH=1 JOINT=1 NORM=2 W_DT=1
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=0 SWIZZLED=0 EIGHTS=1 WARPS=8 HIGH=3 D_DT=3 DEPTH=3 JOINT=1 NORM=1|2 W_DT=3
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=0 EIGHTS=1 ONE=1 WARPS=4 HIGH=3 D_DT=3 DEPTH=3 JOINT=2 ACT=8 NORM=1 W_DT=3
// te:row A_DT=4 B_DT=4 BLOCK=2 SCALES=0 EIGHTS=1 ONE=1 WARPS=2|4 HIGH=3 D_DT=3 DEPTH=3 JOINT=1
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=1 FOURS=1 ONE=1 WARPS=2|4 HIGH=3 D_DT=3 DEPTH=2 JOINT=1
// te:row A_DT=7 B_DT=7 BLOCK=0 SCALES=2 EIGHTS=1 ONE=1 WARPS=2 HIGH=3 D_DT=3 DEPTH=2 JOINT=1
// te:row A_DT=4 B_DT=4 BLOCK=2 SCALES=0 SWIZZLED=0 EIGHTS=1 WARPS=8 HIGH=3 D_DT=3 DEPTH=3 JOINT=1 NORM=1 W_DT=3
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=1 SWIZZLED=0 FOURS=1 WARPS=8 HIGH=3 D_DT=3 DEPTH=3 JOINT=1 NORM=1 W_DT=3
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=1 SWIZZLED=0 EIGHTS=2 WARPS=4 HIGH=3 D_DT=3 DEPTH=2 JOINT=2 ACT=8 NORM=2 W_DT=3
// te:row A_DT=7 B_DT=7 BLOCK=0 SCALES=2 SWIZZLED=0 EIGHTS=1 WARPS=8 HIGH=3 D_DT=3 DEPTH=3 JOINT=1 NORM=1|2 W_DT=3
// te:row A_DT=7 B_DT=7 BLOCK=0 SCALES=2 SWIZZLED=0 EIGHTS=1 ONE=1 WARPS=8 HIGH=3 D_DT=3 DEPTH=2 JOINT=1 NORM=1|2 W_DT=3
// te:row A_DT=7 B_DT=7 BLOCK=0 SCALES=2 EIGHTS=1 ONE=1 WARPS=4 HIGH=3 D_DT=3 DEPTH=2 JOINT=2 ACT=8 NORM=1 W_DT=3
// te:row A_DT=3 B_DT=3 BLOCK=0 SCALES=0 SWIZZLED=0 EIGHTS=1 WARPS=8|16 HIGH=0 D_DT=3 DEPTH=3 JOINT=1 ROPE=1
// te:row A_DT=3 B_DT=3 BLOCK=0 SCALES=0 EIGHTS=1 ONE=1 WARPS=8 HIGH=0 D_DT=3 DEPTH=3 JOINT=1 NORM=1 W_DT=3 ROPE=1
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=0 EIGHTS=1 ONE=1 WARPS=8 HIGH=3 D_DT=3 DEPTH=3 JOINT=1 NORM=1 W_DT=3 ROPE=1
// te:row A_DT=4 B_DT=4 BLOCK=2 SCALES=0 EIGHTS=1 ONE=1 WARPS=8 HIGH=3 D_DT=3 DEPTH=3 JOINT=1 NORM=1 W_DT=3 ROPE=1
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=1 FOURS=1 ONE=1 WARPS=8 HIGH=3 D_DT=3 DEPTH=3 JOINT=1 NORM=1 W_DT=3 ROPE=1
// te:row A_DT=7 B_DT=7 BLOCK=0 SCALES=2 EIGHTS=1 ONE=1 WARPS=2|4|8 HIGH=3 D_DT=3 DEPTH=2 JOINT=1 NORM=1 W_DT=3 ROPE=1
// te:row A_DT=7 B_DT=7 BLOCK=0 SCALES=2 SWIZZLED=1 EIGHTS=1 ONE=1 WARPS=16 HIGH=3 D_DT=3 DEPTH=2 JOINT=1 ROPE=1
#define SHORT_A 1
#ifndef SWIZZLED
#define SWIZZLED 0
#endif
#include "ops/gemm/epilogue.cuh"
#include "ops/gemm/gemv_codes.cuh"

#define THREADS 512
#define WHOLE 1
#include "ops/gemm/gemv_shared.cuh"
#if NORM
#include "ops/gemm/gemv_norm.cuh"
#endif
#ifdef ACT
#include "ops/act/act.cuh"
#endif
#ifndef ROPE
#define ROPE 0
#endif
#if ROPE
#include "ops/gemm/gemv_rotate.cuh"
struct te_joint_kargs {
    te__gemv_joint_kargs k;
    te__rope_kargs rope;
};
// Returns what stands behind k.
TE_DEV const te__rope_kargs &te_joint_rope(const te__gemv_joint_kargs &k) {
    return ((const te_joint_kargs *)&k)->rope;
}
#else
struct te_joint_kargs {
    te__gemv_joint_kargs k;
};
#endif

#define GROUPS (16 / WARPS)
#define PRODUCTS 3 // the most
#define SLOT TE__GEMV_SLOT(SCALES)
#define HALF (JOINT == 2 ? 2 : 1) // products of a unit
#define OF_SCALES 2048 // where scales begin in a slot: 16 bytes of each line, of which MXFP8 has 4
// Whether all pieces of a turn go to registers first, so that its place is free for copies while it is multiplied. With
// scales, registers would spill.
#define EARLY_COPY (!SCALES && !BLOCK)
#define EARLY_STARTS (__CUDA_ARCH__ >= 900) // whether a launch starts before the one ahead of it has ended
#define ONCE (BITS < 16) // whether the L2 cache need not keep B; numbers of 16 bits are not always faster so
// Whether the products leave few registers. So what depends on the thread or the unit is computed again behind them.
// Spills in and around the loop of turns cost 1 to 2 % of the time of a token.
#define TIGHT (ONE && SCALES == 2)
#define KEPT (TIGHT && WARPS >= TE__GEMV_KEPT_WARPS) // whether the rotation is kept in shared memory
#define STEP ((SCALES == 2 ? 4 : 1) * (SWIZZLED ? 512 : 4)) // bytes of scales from one turn to the next

// A unit of the group is a tile or, with ACT, a tile of the first product and the same lines of the second one.
struct te_joint_unit {
    int number, product, line; // line: of B, the first of the tile
    int eight;                 // how many lines of B line number 8 of the tile is behind it
    // Returns the number of the group's first unit, and the steps between its units.
    TE_DEV static int first() { return (int)blockIdx.x + (int)(threadIdx.x / (32 * WARPS) * gridDim.x); }
    TE_DEV static int step() { return (int)gridDim.x * GROUPS; }
    // Returns the number of units. Parts that are missing repeat the last one.
    TE_DEV static int count(const te__gemv_joint_kargs &k) { return k.part[JOINT == 1 ? 2 : 0].tiles; }
    // Goes to unit `n`. Returns whether there is such a unit.
    TE_DEV bool open(const te__gemv_joint_kargs &k, int n) {
        number = n, product = 0, eight = 8;
        if (JOINT == 1) product = (n >= k.part[0].tiles) + (n >= k.part[1].tiles);
        line = (n - (product ? k.part[product - 1].tiles : 0)) * 16;
#if ROPE
        if (product < 2) te_rotate_tile(te_joint_rope(k), &line, &eight);
#endif
        return n < count(k);
    }
    // Returns the line of B that is line i of the tile.
    TE_DEV int line_of(int i) const { return line + (i & 7) + (i & 8 ? eight : 0); }
};

// Returns v, as a value that the compiler does not know. So it computes what depends on v here, and does not keep it in
// registers.
TE_DEV te_u32 te_joint_anew(te_u32 v) {
    asm volatile("" : "+r"(v));
    return v;
}
// The same with TIGHT; else v.
TE_DEV te_u32 te_joint_tight(te_u32 v) { return TIGHT ? te_joint_anew(v) : v; }
// Returns the address of the sums of the thread's group, [HALF][WARPS][few][16]. odd: 1 for every second unit, which
// has sums of its own.
TE_DEV te_u32 te_joint_sums(const float *sums, te_u32 thread, int odd, int few) {
    return te_smem(sums) + (odd * 16 + thread / (32 * WARPS) * WARPS) * (HALF * few * 64);
}

// The turns of B that are on their way to a warp. A lane copies its own pieces of lines g and g + 8. Scales are for all
// lanes.
struct te_joint_ring {
    const te__gemv_joint_kargs &k;
    int number;                  // of the unit of the next turn to be copied
    const te_u8 *codes;          // line g, at the lane's first piece of that turn
    int eight;                   // bytes from there to line g + 8
    const te_u8 *scales;         // of line `lane`, lanes 16 and up as the lanes below
    int each, left, half;        // each, left: turns of the warp in a tile, and those to be copied
    te_u32 slot, end;            // in shared memory; slot: the oldest turn, and the place of the next one
    bool there;                  // whether there is a turn to be copied

    TE_DEV te_joint_ring(const te__gemv_joint_kargs &k, te_u8 *memory) : k(k) {
        each = (k.k / TURN - (int)(threadIdx.x >> 5) % WARPS + WARPS - 1) / WARPS;
        slot = te_smem(memory) + (threadIdx.x >> 5) * (DEPTH * SLOT), end = slot + DEPTH * SLOT;
        half = 0, number = te_joint_unit::first();
        open();
    }
    // Sets `there`: whether the warp has turns of the unit. Then goes to its tile.
    TE_DEV void open() {
        te_joint_unit unit;
        there = unit.open(k, number) && each > 0;
        if (!there) return;
        const te__gemv_part &p = k.part[JOINT == 2 ? half : unit.product];
        const te_u32 thread = te_joint_anew(threadIdx.x), lane = thread & 31, warp = (thread >> 5) % WARPS;
        const int line = min(unit.line_of((int)(lane >> 2)), p.n - 1);
        const int other = min(unit.line_of((int)(8 + (lane >> 2))), p.n - 1);
        codes = (const te_u8 *)p.b + line * p.ldb + 16 * (lane & 3) + warp * 128;
        eight = (other - line) * (int)p.ldb;
        if (SCALES)
            scales = (const te_u8 *)p.block_b + warp * STEP +
                     te__group_scale_at(SWIZZLED, 0, p.ld_block_b, min(unit.line_of((int)(lane & 15)), p.n - 1), 0);
        left = each;
    }
    // Starts the copies of the next turn, over the oldest one, which all lanes have read. `one_by_one`: those of line g
    // when the turn before has arrived, and those of line g + 8 when they have.
    TE_DEV void copy(bool one_by_one = false) {
        if (there) {
            const int lane = threadIdx.x & 31;
#pragma unroll
            for (int l = 0; l < 2; l++) {
                if (one_by_one) te_cp_async_wait_all();
#pragma unroll
                for (int i = 0; i < UNITS; i++)
                    te_cp_async16_ahead<ONCE>(slot + (2 * i + l) * 512 + lane * 16, codes + l * eight + 64 * i);
            }
            if (SCALES && lane < 16) {
                const te_u32 to = slot + OF_SCALES + lane * 16;
                if (SCALES == 2 && !SWIZZLED) te_cp_async16(to, scales, 16);
                else
#pragma unroll
                    for (int i = 0; i < (SCALES == 2 ? 4 : 1); i++) te_cp_async4(to + 4 * i, scales + 512 * i);
            }
            codes += WARPS * 128;
            if (SCALES) scales += WARPS * STEP;
            if (--left == 0) {
                if (JOINT == 2) half ^= 1;
                if (JOINT != 2 || half == 0) number += te_joint_unit::step();
                open();
            }
        }
        te_cp_async_commit();
        slot += SLOT;
        if (slot == end) slot -= DEPTH * SLOT;
    }
    // Waits for the oldest turn.
    TE_DEV void wait() const {
        te_cp_async_wait<DEPTH - 1>();
        if (SCALES) __syncwarp();
    }
};

// Returns v as D has it.
TE_DEV float te_joint_rounded(float v) {
    return D_DT == TE_BF16  ? te_bf16_to_f32(te_f32_to_bf16(v))
           : D_DT == TE_F16 ? te_f16_to_f32(te_f32_to_f16(v))
                            : v;
}

// Returns element i of an array as it is in memory. te_joint_value converts it, and waits for the load.
TE_DEV te_u32 te_joint_ask(const void *p, te_i64 i, int dt) {
    return dt == TE_F32 ? ((const te_u32 *)p)[i] : ((const te_u16 *)p)[i];
}
TE_DEV float te_joint_value(te_u32 v, int dt) {
    return dt == TE_F32 ? __uint_as_float(v) : dt == TE_BF16 ? te_bf16_to_f32((te_u16)v) : te_f16_to_f32((te_u16)v);
}
// Asks element i into the L1 cache.
TE_DEV void te_joint_prefetch(const void *p, te_i64 i, int dt) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"((const te_u8 *)p + i * (dt == TE_F32 ? 4 : 2)));
}

extern "C" __global__ void __launch_bounds__(THREADS, SETS > 1 || EXCHANGED ? 1 : 2)
    te_gemv_joint(const __grid_constant__ te_joint_kargs kargs) {
    const te__gemv_joint_kargs &k = kargs.k;
    extern __shared__ __align__(16) te_u8 memory[];
    const int warp = (threadIdx.x >> 5) % WARPS, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    const int few = ONE ? 1 : k.m, group = threadIdx.x / (32 * WARPS);
    te_joint_ring ring(k, memory);
    float *sums = (float *)(memory + 16 * DEPTH * SLOT); // [2][16 / WARPS][HALF][WARPS][few][16], of two units
    te_gemv_shared in(few, k.k, sums + 2 * HALF * 16 * few * 16);
    if (!k.early) te_follow();
#pragma unroll 1
    for (int i = 0; i < DEPTH; i++) ring.copy(EARLY_STARTS && k.early);
#if NORM
    te_gemv_norm<NORM == 2, HIGH ? HIGH : A_DT, W_DT, THREADS / 32, ONE> norm(k.norm, k.a, k.lda, few, k.k);
    if (threadIdx.x < in.all) norm.ask_weights(in.part_of(threadIdx.x).y);
#endif
    // The thread's result of a tile: that of this line of the tile, and of this row of A.
    const int line = threadIdx.x % 16, row = threadIdx.x % (32 * WARPS) / 16;
    te_joint_unit unit;
    bool there = unit.open(k, te_joint_unit::first());
    // Of thread i, the factor of B of product i. It is multiplied later: that would wait for the load here.
    const bool has_factor = threadIdx.x < PRODUCTS && k.part[threadIdx.x].scale_b;
    const float of_b = has_factor ? *k.part[threadIdx.x].scale_b : 1.0f;
#if ROPE // where the thread's first result goes, and its angle: loads that depend on one another, and sincosf
    te_rotated rotated;
    const te_u32 kept = in.end() + (group * 16 + line) * TE__GEMV_ROTATED;
    bool asked = k.rope_early && there && row < few && unit.line_of(line) < k.part[unit.product].n;
    if (asked) {
        rotated = te_rotate_ask(kargs.rope, unit.product, unit.line_of(line), row);
        if (KEPT) te_rotate_keep(kept, rotated);
    }
#endif
    te_lead();
    te_follow();
    if ((int)blockIdx.x >= te_joint_unit::count(k)) {
        te_linger();
        return;
    }
#if NORM
    const te_u32 largest = in.normalize(norm, sums); // four floats for each of at most sixteen parts of a row
#if HIGH
#if INTEGERS
    const float of_all_y = in.fill(k.a, k.lda, k.factor_a, k.q, largest);
#else
    const float of_all_y = in.fill(k.a, k.lda, k.factor_a, k.q, largest, &norm.x);
#endif
#else
    const float of_all_y = 1.0f;
#endif
#else
    const float of_all_y = in.fill(k.a, k.lda, k.factor_a, k.q);
#endif
    const te_u32 factors = te_smem(in.scratch + THREADS / 32); // the address of the factors of the products
    if (threadIdx.x < PRODUCTS)
        te_sts4(factors + 4 * threadIdx.x, __float_as_uint(of_all_y * (has_factor ? of_b * k.factor_b : 1.0f)));
    __syncthreads();
    const int of_y = HALVES ? g & 3 : g;              // the lane's line of each set of Y
    const bool own = !HALVES || (g >> 2) == (t >> 1); // else the lane has zeros there
    const int first_y = HALVES ? 2 * (t & 1) : 2 * t; // the first of the set's two lines that `sum` has
    const te_u32 step_y = own ? WARPS * TURN * 2 : 0, step_scale = WARPS * 16;
    te_u32 base_y[SETS], base_scale[SETS][2];
#pragma unroll
    for (int l = 0; l < SETS; l++) {
        base_y[l] = own ? in.line(SET * l + of_y, t) + warp * (TURN * 2) : in.zeros;
#pragma unroll
        for (int h = 0; h < 2; h++)
            base_scale[l][h] = in.scale_of(SET * l + first_y + h, HALVES ? t >> 1 : 0) + warp * 16;
    }
#if INTEGERS
    const te_integers_y<WARPS> integers(in.base, in.zeros, warp);
#endif

    float sum[SETS][4]; // as in gemv_k; with INTEGERS, two sums, of lines g and g + 8
    // Multiplies the oldest turn, of the k that the n-th turn of the warp has, and starts the next one's copies.
    auto take = [&](int n, float of_block) {
        const te_u32 pieces = ring.slot + (threadIdx.x & 31) * 16, scales = ring.slot + OF_SCALES + g * 16;
        float part[SETS][4] = {};
#if SCALES == 1 // the scales of the turn's four groups: of two lines of B, and of two rows of A
        te_u32 of_x[2], of_groups[SETS][2][4];
#pragma unroll
        for (int h = 0; h < 2; h++) of_x[h] = te_lds4(scales + 128 * h) >> (HALVES ? 8 * (t >> 1) : 0);
#pragma unroll
        for (int l = 0; l < SETS; l++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const te_u32 at = base_scale[l][h] + n * step_scale;
                if (HALVES) {
                    of_groups[l][h][0] = te_lds4(at), of_groups[l][h][2] = te_lds4(at + 8);
                } else {
                    uint4 four = te_lds16(at);
                    of_groups[l][h][0] = four.x, of_groups[l][h][1] = four.y;
                    of_groups[l][h][2] = four.z, of_groups[l][h][3] = four.w;
                }
            }
#endif
        // Adds the products of one scaling group or block, `part`, to `sum`. `number`: with MXFP8, that of the group in
        // the turn, for lanes t = 0 and 1 if HALVES.
        auto add_scaled = [&](int number) {
#pragma unroll
            for (int l = 0; l < SETS; l++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
#if BLOCK
                    const float s_y = __uint_as_float(te_lds4(base_scale[l][e % 2] + n * step_scale));
                    sum[l][e] = fmaf(part[l][e], te_gemm_block_product(of_block, s_y), sum[l][e]);
#elif SCALES == 1
                    const float s_x = te__e8m0_to_f32((te_u8)(of_x[e / 2] >> (8 * number))),
                                s_y = __uint_as_float(of_groups[l][e % 2][number]);
                    sum[l][e] = fmaf(part[l][e] * s_x, s_y, sum[l][e]); // no infinity times 0
#endif
                    part[l][e] = 0.0f;
                }
        };
        uint4 u[UNITS][2];
        auto read = [&](int i) {
#pragma unroll
            for (int l = 0; l < 2; l++) u[i][l] = te_lds16(pieces + (2 * i + l) * 512);
        };
        if (EARLY_COPY) {
#pragma unroll
            for (int i = 0; i < UNITS; i++) read(i);
            __syncwarp();
            ring.copy();
        }
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            te_u32 of_u[2] = {0, 0}; // NVFP4: the scales of both units
            if (!EARLY_COPY) read(i);
#pragma unroll
            for (int l = 0; l < 2; l++) {
                if (SCALES == 2) of_u[l] = te_lds2(scales + 128 * l + (4 * i + t) * 2);
                if (EXCHANGED) u[i][l] = te_gemv_exchange(u[i][l], t);
            }
#if INTEGERS
            integers.multiply(sum[0], u[i], of_u, n, i);
#else
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                te_u32 x[2][4], y[4];
#pragma unroll
                for (int l = 0; l < 2; l++) te_gemv_decode<X_DT>(u[i][l], c, of_u[l], x[l]);
#pragma unroll
                for (int l = 0; l < SETS; l++) {
                    in.chunk(base_y[l] + n * step_y, i, c, y);
                    te_gemv_multiply(BLOCK || SCALES == 1 ? part[l] : sum[l], x[0], x[1], y);
                }
                const bool last = c == CHUNKS - 1;
                if ((SCALES == 1 && (EXCHANGED || last)) || (BLOCK && last && i == UNITS - 1))
                    add_scaled(2 * i + (EXCHANGED ? c : 0));
            }
#endif
        }
        if (EARLY_COPY) return;
        if (SCALES) __syncwarp();
        ring.copy();
    };

    int odd = 0;
#pragma unroll 1
    for (; there; odd ^= 1) {
        // These loads begin before the products, which hide their latency. The residual is converted after the
        // products. A bias, which most layers lack, is only brought into the L1 cache here, and takes no register.
        te_u32 residual = 0;
        {
#pragma unroll
            for (int h = 0; h < HALF; h++) {
                const te__gemv_part &q = k.part[JOINT == 2 ? h : unit.product];
                if (!q.bias) continue;
                const int column = unit.line_of((int)(te_joint_anew(threadIdx.x) % 16));
                te_joint_prefetch(q.bias, min(column, q.n - 1), q.bias_dt);
            }
            const te_u32 thread = te_joint_tight(threadIdx.x);
            const int row = (int)(thread % (32 * WARPS) / 16), column = unit.line_of((int)(thread % 16));
            const bool mine = row < few && column < k.part[unit.product].n;
#if ROPE
            if (mine && !asked) {
                rotated = te_rotate_ask(kargs.rope, unit.product, column, row);
                if (KEPT) te_rotate_keep(kept, rotated);
            }
            asked = false;
#endif
            if (JOINT == 3 && mine)
                residual = te_joint_ask(k.residual, (ONE ? 0 : (te_i64)row * k.part[0].n) + column, D_DT);
        }
#pragma unroll 1
        for (int h = 0; h < HALF; h++) {
#pragma unroll
            for (int l = 0; l < SETS; l++) sum[l][0] = sum[l][1] = sum[l][2] = sum[l][3] = 0.0f;
#if BLOCK // the scales of turns, a turn ahead
            const float *of_blocks = (const float *)k.part[JOINT == 2 ? h : unit.product].block_b +
                                     (te_i64)(unit.line >> 7) * k.part[JOINT == 2 ? h : unit.product].ld_block_b + warp;
            float next = ring.each ? *of_blocks : 0.0f;
#else
            const float next = 0.0f;
#endif
#pragma unroll 1
            for (int n = 0; n < ring.each; n++) {
                const float of_block = next;
#if BLOCK
                if (n + 1 < ring.each) next = of_blocks[(n + 1) * WARPS];
#endif
                ring.wait();
                take(n, of_block);
            }
            const te_u32 thread = te_joint_tight(threadIdx.x), g = (thread & 31) >> 2, t = thread & 3;
            const te_u32 of_warp = te_joint_sums(sums, thread, odd, few) +
                                   (h * WARPS + (thread >> 5) % WARPS) * (few * 64);
#if INTEGERS
#pragma unroll
            for (int l = 0; l < 2; l++) { // each lane of a quad has two of a unit's eight blocks
                float all = sum[0][l] * TE_INTEGERS_POWER;
                all += __shfl_xor_sync(0xffffffffu, all, 1);
                all += __shfl_xor_sync(0xffffffffu, all, 2);
                if (t == 0) te_sts4(of_warp + (g + l * 8) * 4, __float_as_uint(all));
            }
#else
            const float power = SCALES == 2 ? 1.0f / (TE_DECODE_FP4 * TE_DECODE_FP4) : 1.0f;
#pragma unroll
            for (int l = 0; l < SETS; l++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float all = sum[l][e] * power;
                    if (HALVES) all += __shfl_xor_sync(0xffffffffu, all, 2);
                    const int y = SET * l + first_y + e % 2;
                    if ((!HALVES || t < 2) && y < few)
                        te_sts4(of_warp + y * 64 + (g + e / 2 * 8) * 4, __float_as_uint(all));
                }
#endif
        }
        const te_u32 thread = te_joint_tight(threadIdx.x);
        unit.open(k, (int)te_joint_tight(unit.number));
        const te__gemv_part &p = k.part[unit.product];
        const int column = unit.line_of(line);
        const te_u32 of_unit = te_joint_sums(sums, thread, odd, few) + line * 4;
        // waits for the warps of the group; so the sums of two units suffice
        if (WARPS == 16) __syncthreads();
        else if (WARPS == 1) __syncwarp();
        else asm volatile("bar.sync %0, %1;" ::"r"(1 + thread / (32 * WARPS)), "n"(32 * WARPS) : "memory");
#pragma unroll 1
        for (int r = row; r < few; r += 2 * WARPS) {
            if (column >= p.n) break;
            float v[HALF];
#pragma unroll
            for (int h = 0; h < HALF; h++) {
                const te__gemv_part &q = k.part[JOINT == 2 ? h : unit.product];
                v[h] = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; w++)
                    v[h] += __uint_as_float(te_lds4(of_unit + ((h * WARPS + w) * few + r) * 64));
                v[h] = fmaf(v[h], __uint_as_float(te_lds4(factors + 4 * (JOINT == 2 ? h : unit.product))),
                            q.bias ? te_joint_value(te_joint_ask(q.bias, column, q.bias_dt), q.bias_dt) : 0.0f);
                te_store(q.d, r * q.ldd + column, D_DT, v[h]);
                v[h] = te_joint_rounded(v[h]);
            }
            const te_i64 at = (te_i64)r * p.n + column;
#if JOINT == 2
            te_store(k.y, at, D_DT, te_act_gate(ACT, v[0], v[1], te__act_rule{}));
#elif ROPE
            if (KEPT) rotated = te_rotate_kept(kept);
            else if (r != row) rotated = te_rotate_ask(kargs.rope, unit.product, column, r);
            // half a warp has the lines of a row
            te_rotate_put(rotated, v[0], __shfl_xor_sync(0xffffu << (threadIdx.x & 16), v[0], 8), D_DT);
#elif JOINT == 3
            if (r != row) residual = te_joint_ask(k.residual, at, D_DT);
            te_store(k.y, at, D_DT, te_joint_value(residual, D_DT) + v[0]);
#endif
        }
        there = unit.open(k, unit.number + te_joint_unit::step());
    }
}
