// ops/gemm/epilogue_store.cuh: the epilogue of gemm_hopper.cu with stores by TMA. It uses the options and names of that
// file.
//
//   accumulators -> v = scale acc + bias -> [aux] -> GELU, dGELU, + D -> a chunk of shared memory, 64 rows of 128 bytes
//   -> TMA -> D
//
// Each warpgroup has buffers for BUFFERS chunks.
#pragma once

// Clamps both values of a word to -8 .. 8; NaN stays NaN.
TE_DEV te_u32 te_gemm_clamp_8(te_u32 w, int dt) {
    if (dt == TE_BF16) asm("min.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(w) : "r"(0x41004100u));
    else asm("min.NaN.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(w) : "r"(0x48004800u));
    return w;
}

// The epilogue of one warpgroup, stored by TMA.
struct te_tma_store_path {
    const te__gemm_hopper_kargs &a;
    const void *d_map, *aux_map, *bias_from;
    te_u32 buffers, loads; // shared memory: the chunk buffers, and a barrier for the load into each
    te_u32 biases; // shared memory: WN floats
    int group, lane;
    te_u32 turn; // chunks so far, of all tiles: gives the next chunk's buffer and parity
    bool leader; // the thread that issues TMA operations
    float scale;
    te_u32 bias[(WN + 127) / 128]; // of columns threadIdx.x % 128 + 128 i, in the bias's own format

    TE_DEV te_tma_store_path(const te__gemm_hopper_kargs &args, te_u32 buffers_, te_u32 loads_, te_u32 biases_,
                             int group_)
        : a(args), d_map(args.d_map), aux_map(args.aux_map), bias_from(args.g.bias), buffers(buffers_), loads(loads_),
          biases(biases_), group(group_), lane(threadIdx.x & 31), turn(0), leader(threadIdx.x % 128 == 0),
          scale(te_gemm_scale(args.g)) {}

#if GROUPED
    bool tall, fresh; // tall: the second accumulator has rows; fresh: the group's maps have not been acquired
    float scale_b;    // multiplied in by finish(), so that the start of a group does not wait for device memory before
                      // its first products
    TE_DEV void enter(int of) {
        scale = a.g.scale_a ? a.g.scale_a[a.g.groups.each_a ? of : 0] : 1.0f;
        scale_b = a.g.scale_b ? a.g.scale_b[a.g.groups.each_b ? of : 0] : 1.0f;
        if (GROUPED == 2) return;
        d_map = a.maps + of * 32, aux_map = a.maps + of * 32 + 16;
        if (STORE & 2) bias_from = te_gemm_at(a.g.bias, of * a.g.n, a.g.bias_dt);
        fresh = true;
    }
#else
    static const bool tall = true;
#endif

    // row_of and col_of return where a chunk lies in the warpgroup's rows and columns. Chunk numbers run down the rows
    // first.
    static TE_DEV constexpr int row_of(int chunk) { return chunk % SUMS * STEP; }
    static TE_DEV constexpr int col_of(int chunk) { return chunk / SUMS * CHUNK; }
    TE_DEV te_u32 buffer_of(te_u32 at) const { return buffers + at % BUFFERS * BUFFER; }
    // Issues the TMA load of a chunk of aux or of the old D.
    TE_DEV void ask(te_u32 at, int row, int col, int split) const {
        te_u32 bar = loads + 8 * (at % BUFFERS);
        te_mbar_expect(bar, BUFFER);
        te_tma_load3(buffer_of(at), STORE & 16 ? aux_map : d_map, col, row, split, bar);
    }

    // Issues the loads of the epilogue that do not depend on the accumulators.
    TE_DEV void begin(int row, int col, int split) {
#if GROUPED == 1
        if (fresh && leader) {
            te_tma_map_acquire(d_map);
            if (STORE & 24) te_tma_map_acquire(aux_map);
        }
        fresh = false;
#endif
        if (LOADS) {
            if (leader) {
                te_bulk_wait_read<0>(); // the last tile's stores have left the buffers
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS && chunk < BUFFERS; chunk++)
                    ask(turn + chunk, row + row_of(chunk), col + col_of(chunk), split);
            }
            __syncwarp();
        }
        if (STORE & 2) {
            // The loaded values are first used in spread_bias(), so no thread waits for them here.
#pragma unroll
            for (int i = 0; i < (WN + 127) / 128; i++) {
                te_i64 at = col + threadIdx.x % 128 + 128 * i;
                bias[i] = 0;
                if (at < a.g.n)
                    bias[i] = a.g.bias_dt == TE_F32 ? ((const te_u32 *)bias_from)[at] : ((const te_u16 *)bias_from)[at];
            }
        }
    }
    // Writes the tile's bias as floats to shared memory. The warpgroup needs a barrier before its threads read it.
    TE_DEV void spread_bias() const {
#pragma unroll
        for (int i = 0; i < (WN + 127) / 128; i++) {
            float b = __uint_as_float(a.g.bias_dt == TE_F32 ? bias[i] : bias[i] << 16);
            if (a.g.bias_dt == TE_F16) b = te_f16_to_f32((te_u16)bias[i]);
            if (threadIdx.x % 128 + 128 * i < WN)
                te_sts4(biases + (threadIdx.x % 128 + 128 * i) * 4, __float_as_uint(b));
        }
    }

    // Returns this lane's address for ldmatrix and stmatrix of columns 8 j .. 8 j + 15 of the warp's 16 rows.
    TE_DEV te_u32 word(te_u32 buffer, int j) const {
        int row = threadIdx.x % 128 / 32 * 16 + (lane & 15);
        return buffer + row * 128 + (((j + (lane >> 4)) ^ (row & 7)) << 4);
    }
    // Returns the address of this thread's two f32 in columns 8 j .. 8 j + 7 of a chunk of D. The next two are eight
    // rows below, 8 * 128 bytes on.
    TE_DEV te_u32 pair(te_u32 buffer, int j) const {
        int row = threadIdx.x % 128 / 32 * 16 + (lane >> 2), t = lane & 3;
        return buffer + row * 128 + (((2 * j + (t >> 1)) ^ (row & 7)) << 4) + (t & 1) * 8;
    }
    // Reads this thread's eight values in columns 8 j .. 8 j + 15 of a chunk. Values of aux are clamped to -8 .. 8. The
    // slope of GELU is 0 below -8, and 1 above 8.
    TE_DEV void get(te_u32 buffer, int j, float v[8]) const {
        te_u32 r[4];
        te_ldmatrix4(r, word(buffer, j));
#pragma unroll
        for (int i = 0; i < 4; i++)
            te_gemm_unpack(STORE & 16 ? te_gemm_clamp_8(r[i], D_DT) : r[i], D_DT, v[2 * i], v[2 * i + 1]);
    }
    TE_DEV void put(te_u32 buffer, const float (&v)[CHUNK / 2]) const {
        if (D_DT == 1) {
#pragma unroll
            for (int j = 0; j < CHUNK / 8; j++) {
                te_u32 at = pair(buffer, j);
                te_sts8(at, v[4 * j], v[4 * j + 1]);
                te_sts8(at + 8 * 128, v[4 * j + 2], v[4 * j + 3]);
            }
            return;
        }
#pragma unroll
        for (int j = 0; j < CHUNK / 8; j += 2) {
            te_u32 r[4];
#pragma unroll
            for (int i = 0; i < 4; i++) r[i] = te_f32x2_to_half(v[4 * j + 2 * i], v[4 * j + 2 * i + 1], D_DT);
            te_stmatrix4(word(buffer, j), r);
        }
    }
    TE_DEV void send(const void *map, bool add, te_u32 buffer, int row, int col, int split) const {
        te_async_fence();
        te_meet<128>(1 + group);
        if (leader) {
            if (add) te_tma_add3(map, buffer, col, row, split);
            else te_tma_store3(map, buffer, col, row, split);
            te_bulk_commit();
        }
        __syncwarp();
    }

    // Adds up each column of a chunk over this warp's 16 rows, and writes the sums to a.g.row_sums. A lane adds up one
    // column of f32, or two columns of 16 bits.
    TE_DEV void sum_columns(te_u32 buffer, int row, int col) const {
        const int first = threadIdx.x % 128 / 32 * 16, mine = D_DT == 1 ? lane : 2 * lane;
        float sum[2] = {0.0f, 0.0f};
        __syncwarp(); // the whole warp has written its rows
#pragma unroll
        for (int r = 0; r < 16; r++) {
            te_u32 w = te_lds4(buffer + (first + r) * 128 + (((lane >> 2) ^ (r & 7)) << 4) + (lane & 3) * 4);
            float x[2] = {__uint_as_float(w), 0.0f};
            if (D_DT != 1) te_gemm_unpack(w, D_DT, x[0], x[1]);
            if (row + first + r < a.g.m) sum[0] += x[0], sum[1] += x[1];
        }
        float *to = a.g.row_sums + (te_i64)((row + first) / 16) * a.g.n + col + mine;
        if (row + first >= a.g.m || col + mine >= a.g.n) return;
        to[0] = sum[0];
        if (D_DT != 1) to[1] = sum[1];
    }

    // Applies the epilogue to acc and stores the result to D, from row `row` and column `col` on.
    TE_DEV void finish(float (&acc)[SUMS][WN / 2], int row, int col, int split) {
#if GROUPED
        float scale = this->scale * scale_b;
#else
        float scale = this->scale;
#endif
        if (STORE & 2) {
            spread_bias();
            if (LOADS) te_meet<128>(1 + group);
        }
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            if (HALVES && !LOADS && chunk % SUMS && !tall) continue; // a load that was issued must be waited for
            const int sum = chunk % SUMS, first = col_of(chunk);
            int at_row = row + row_of(chunk), at_col = col + first;
            float v[CHUNK / 2];
            if (LOADS) {
                te_mbar_wait(loads + 8 * (turn % BUFFERS), turn / BUFFERS & 1);
            } else {
                if (leader) te_bulk_wait_read<BUFFERS - 1>();
                te_meet<128>(1 + group);
            }
#pragma unroll
            for (int j = 0; j < CHUNK / 8; j++) {
                float2 b = make_float2(0.0f, 0.0f);
                if (STORE & 2) te_lds8(biases + (first + 8 * j + 2 * (lane & 3)) * 4, b.x, b.y);
#pragma unroll
                for (int e = 0; e < 4; e++)
                    v[4 * j + e] = fmaf(acc[sum][first / 2 + 4 * j + e], scale, e & 1 ? b.y : b.x);
            }
            if (STORE & 8) {
                put(buffer_of(turn), v);
                send(aux_map, false, buffer_of(turn), at_row, at_col, split);
                turn++;
            }
            if (STORE & 4) {
#pragma unroll
                for (int i = 0; i < CHUNK / 2; i += 2) {
                    float2 s = te_gemm_sigmoid2u(v[i], v[i + 1]);
                    v[i] *= s.x, v[i + 1] *= s.y;
                }
            }
            if (LOADS) {
#pragma unroll
                // old: rows g and g + 8 of columns 8 j .., then of columns 8 j + 8 ..
                for (int j = 0; j < CHUNK / 8; j += 2) {
                    float old[8];
                    get(buffer_of(turn), j, old);
#pragma unroll
                    for (int i = 0; i < 8; i += 2) {
                        float *x = &v[4 * j + i];
                        if (STORE & 16) {
                            float2 s = te_gemm_dgelu_within_8(old[i], old[i + 1]);
                            x[0] *= s.x, x[1] *= s.y;
                        }
                        if (STORE & 32) x[0] += old[i], x[1] += old[i + 1];
                    }
                }
            }
            if (STORE & 8) { // aux has taken a buffer: D's chunk goes to the next one
                if (leader) te_bulk_wait_read<BUFFERS - 1>();
                te_meet<128>(1 + group);
            }
            if (LOADS) __syncwarp(); // all lanes have read the elements that they now overwrite
            put(buffer_of(turn), v);
            if (STORE & 64) sum_columns(buffer_of(turn), at_row, at_col);
            send(d_map, STORE & 32 && D_DT == 1, buffer_of(turn), at_row, at_col, split);
            if (LOADS && leader && chunk > 0 && chunk - 1 + BUFFERS < CHUNKS) {
                te_bulk_wait_read<1>(); // the chunk before this one has left its buffer
                ask(turn - 1 + BUFFERS, row + row_of(chunk - 1 + BUFFERS), col + col_of(chunk - 1 + BUFFERS), split);
            }
            __syncwarp();
            turn++;
        }
    }
};
