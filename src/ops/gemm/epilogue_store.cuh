// ops/gemm/epilogue_store.cuh: the store paths of gemm_hopper's epilogue: by TMA, or row by row. A part of gemm_hopper.cu, whose options and names it uses.
//
//   accumulators -> v = scale acc + bias -> [aux] -> GELU, dGELU, + D -> a chunk of shared memory, 64 rows of 128 bytes -> TMA -> D
//
// A warpgroup has BUFFERS chunks, and waits for the one that it writes next alone.
#pragma once

// Between -8 and 8, or NaN: one f32, or two values of a word.
TE_DEV float te_gemm_clamp_8(float x) {
    asm("min.NaN.xorsign.abs.f32 %0, %0, 0f41000000;" : "+f"(x));
    return x;
}
TE_DEV te_u32 te_gemm_clamp_8(te_u32 w, int dt) {
    if (dt == TE_BF16) asm("min.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(w) : "r"(0x41004100u));
    else asm("min.NaN.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(w) : "r"(0x48004800u));
    return w;
}

// The epilogue of one warpgroup, stored by TMA.
struct te_tma_store_path {
    const te__gemm_hopper_kargs &a;
    const void *d_map, *aux_map, *bias_from;
    te_u32 buffers, loads; // chunks of shared memory; for each a barrier of the load into it
    te_u32 biases, sums;    // WN floats; of a chunk's columns, a row for each warp
    int group, lane;
    te_u32 turn; // counts chunks, of all tiles: the next one's buffer and parity
    bool leader; // the thread that issues TMA operations
    float scale;
    te_u32 bias[(WN + 127) / 128]; // of column threadIdx.x % 128 .., in its own format

    TE_DEV te_tma_store_path(const te__gemm_hopper_kargs &args, te_u32 buffers_, te_u32 loads_, te_u32 biases_, te_u32 sums_, int group_)
        : a(args), d_map(args.d_map), aux_map(args.aux_map), bias_from(args.g.bias), buffers(buffers_), loads(loads_), biases(biases_), sums(sums_),
          group(group_), lane(threadIdx.x & 31), turn(0), leader(threadIdx.x % 128 == 0), scale(te_gemm_scale(args.g)) {}

#if GROUPED
    bool tall, fresh; // the second accumulator has rows; the group's maps have not been acquired
    float scale_b;    // multiplied late: no wait for device memory before the first products are under way
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

    // Chunks of one column of chunks come before the next columns.
    static TE_DEV constexpr int row_of(int chunk) { return chunk % SUMS * STEP; }
    static TE_DEV constexpr int col_of(int chunk) { return chunk / SUMS * CHUNK; }
    TE_DEV te_u32 buffer_of(te_u32 at) const { return buffers + at % BUFFERS * BUFFER; }
    // The load of aux or D for a chunk.
    TE_DEV void ask(te_u32 at, int row, int col, int split) const {
        te_u32 bar = loads + 8 * (at % BUFFERS);
        te_mbar_expect(bar, BUFFER);
        te_tma_load3(buffer_of(at), STORE & 16 ? aux_map : d_map, col, row, split, bar);
    }

    // While the first products are under way: the loads that need no accumulator.
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
                te_bulk_wait_read<0>(); // the last tile needs the buffers no more
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS && chunk < BUFFERS; chunk++) ask(turn + chunk, row + row_of(chunk), col + col_of(chunk), split);
            }
            __syncwarp();
        }
        if (STORE & 2) {
#pragma unroll
            for (int i = 0; i < (WN + 127) / 128; i++) { // nothing waits for them here
                te_i64 at = col + threadIdx.x % 128 + 128 * i;
                bias[i] = 0;
                if (at < a.g.n) bias[i] = a.g.bias_dt == TE_F32 ? ((const te_u32 *)bias_from)[at] : ((const te_u16 *)bias_from)[at];
            }
        }
    }
    // The tile's bias as floats in shared memory: before a meeting.
    TE_DEV void spread_bias() const {
#pragma unroll
        for (int i = 0; i < (WN + 127) / 128; i++) {
            float b = __uint_as_float(a.g.bias_dt == TE_F32 ? bias[i] : bias[i] << 16);
            if (a.g.bias_dt == TE_F16) b = te_f16_to_f32((te_u16)bias[i]);
            if (threadIdx.x % 128 + 128 * i < WN) te_sts4(biases + (threadIdx.x % 128 + 128 * i) * 4, __float_as_uint(b));
        }
    }

    // Where this thread's word of matrix rows (0, 8) and columns 8 j .. of the chunk lies: for ldmatrix and stmatrix by lanes.
    TE_DEV te_u32 word(te_u32 buffer, int j) const {
        int row = threadIdx.x % 128 / 32 * 16 + (lane & 15);
        return buffer + row * 128 + (((j + (lane >> 4)) ^ (row & 7)) << 4);
    }
    // ... and its two f32 of columns 8 j ..; eight rows on: + 8 * 128.
    TE_DEV te_u32 pair(te_u32 buffer, int j) const {
        int row = threadIdx.x % 128 / 32 * 16 + (lane >> 2), t = lane & 3;
        return buffer + row * 128 + (((2 * j + (t >> 1)) ^ (row & 7)) << 4) + (t & 1) * 8;
    }
    TE_DEV void get(te_u32 buffer, int j, float v[8]) const { // aux not as it is, but within 8: beyond, its slope is 0 or 1
        if (D_DT == 1) {
#pragma unroll
            for (int i = 0; i < 4; i++) te_lds8(pair(buffer, j + i / 2) + i % 2 * 8 * 128, v[2 * i], v[2 * i + 1]);
#pragma unroll
            for (int i = 0; i < 8 && STORE & 16; i++) v[i] = te_gemm_clamp_8(v[i]);
            return;
        }
        te_u32 r[4];
        te_ldmatrix4(r, word(buffer, j));
#pragma unroll
        for (int i = 0; i < 4; i++) te_gemm_unpack(STORE & 16 ? te_gemm_clamp_8(r[i], D_DT) : r[i], D_DT, v[2 * i], v[2 * i + 1]);
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
            for (int i = 0; i < 4; i++) r[i] = te_gemm_pack(v[4 * j + 2 * i], v[4 * j + 2 * i + 1], D_DT);
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

    // Adds up the chunk's columns over this warp's rows of it, as they are stored, into a row of `sums`. Lane 4 g + t holds rows g and g + 8 of columns
    // 8 j + 2 t and the next: each exchange keeps half of the columns and sends the other half (f32, which has half as many: none in the first), and in the end lane
    // 4 j + t has all rows of its own.
    TE_DEV void sum_columns(const float (&v)[CHUNK / 2], int row) const {
        const int warp = threadIdx.x % 128 / 32;
        te_i64 first = (te_i64)row + warp * 16 + (lane >> 2);
        bool lo = first < a.g.m, hi = first + 8 < a.g.m;
        float s[CHUNK / 8][2];
#pragma unroll
        for (int j = 0; j < CHUNK / 8; j++) {
            float x[4] = {v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]};
#pragma unroll
            for (int e = 0; e < 4 && D_DT != 1; e += 2) te_gemm_unpack(te_gemm_pack(x[e], x[e + 1], D_DT), D_DT, x[e], x[e + 1]);
            s[j][0] = (lo ? x[0] : 0.0f) + (hi ? x[2] : 0.0f), s[j][1] = (lo ? x[1] : 0.0f) + (hi ? x[3] : 0.0f);
        }
        exchange<16, CHUNK / 8>(s);
        exchange<8, CHUNK / 8 == 8 ? 4 : CHUNK / 8>(s);
        exchange<4, 2>(s);
        if (lane >> 2 < CHUNK / 8) te_sts8(sums + (warp * CHUNK + 2 * lane) * 4, s[0][0], s[0][1]);
    }
    // LEFT pairs of columns, with the lane DISTANCE away: half of them if all lanes still have the same ones to give.
    template <int DISTANCE, int LEFT> TE_DEV void exchange(float (&s)[CHUNK / 8][2]) const {
        const bool halves = LEFT == DISTANCE / 2;
        bool up = (lane & DISTANCE) != 0;
#pragma unroll
        for (int i = 0; i < (halves ? LEFT / 2 : LEFT); i++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int other = halves ? i + LEFT / 2 : i;
                float keep = up ? s[other][c] : s[i][c], give = up ? s[i][c] : s[other][c];
                s[i][c] = keep + __shfl_xor_sync(0xffffffffu, give, DISTANCE);
            }
    }
    // ... and one warp, after a meeting, those of the four.
    TE_DEV void store_sums(int row, int col) const {
        float *to = a.g.row_sums + (te_i64)(row / 64) * a.g.n;
#pragma unroll
        for (int c = lane; c < CHUNK; c += 32) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < 4; w++) sum += __uint_as_float(te_lds4(sums + (w * CHUNK + c) * 4));
            if (row < a.g.m && col + c < a.g.n) to[col + c] = sum;
        }
    }

    // acc to rows `row` .. and columns `col` .. of D.
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
            if (HALVES && !LOADS && chunk % SUMS && !tall) continue; // issued loads must be waited for
            const int sum = chunk % SUMS, first = col_of(chunk);
            int at_row = row + row_of(chunk), at_col = col + first;
            float v[CHUNK / 2];
            if (LOADS) {
                if (STORE & 64) te_meet<128>(1 + group); // the sums of the chunk before have been read
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
                for (int e = 0; e < 4; e++) v[4 * j + e] = fmaf(acc[sum][first / 2 + 4 * j + e], scale, e & 1 ? b.y : b.x);
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
                for (int j = 0; j < CHUNK / 8; j += 2) { // rows g and g + 8 of columns 8 j .., then of columns 8 j + 8 ..
                    float old[8];
                    get(buffer_of(turn), j, old);
#pragma unroll
                    for (int i = 0; i < 8; i += 2) {
                        float *x = &v[4 * j + i];
                        if (STORE & 16) {
                            float2 s = te_gemm_dgelu_within_8(old[i], old[i + 1]);
                            x[0] *= s.x, x[1] *= s.y;
                        }
                        if (STORE & 32 && D_DT != 1) x[0] += old[i], x[1] += old[i + 1];
                    }
                }
            }
            if (STORE & 8) { // the other buffer, by now
                if (leader) te_bulk_wait_read<BUFFERS - 1>();
                te_meet<128>(1 + group);
            }
            if (STORE & 64) sum_columns(v, at_row);
            if (LOADS) __syncwarp(); // all lanes have read the elements that they now overwrite
            put(buffer_of(turn), v);
            send(d_map, STORE & 32 && D_DT == 1, buffer_of(turn), at_row, at_col, split);
            if (STORE & 64 && threadIdx.x % 128 / 32 == chunk % 4) store_sums(at_row, at_col);
            if (LOADS && leader && chunk > 0 && chunk - 1 + BUFFERS < CHUNKS) {
                te_bulk_wait_read<1>(); // the chunk before has left its buffer
                ask(turn - 1 + BUFFERS, row + row_of(chunk - 1 + BUFFERS), col + col_of(chunk - 1 + BUFFERS), split);
            }
            __syncwarp();
            turn++;
        }
    }
};

// ---- D whose rows start or end anywhere, with scale and bias alone ------------------------------------------
//
//   accumulators -> v = scale acc + bias -> 16 lines of shared memory for each warp -> D
//
//   D's row       . . . . x x x x | x x x x x x x x | x x x . . . . .     pieces of 16 bytes: a lane stores whole ones, eight lanes the ends
//   its line              x x x x   x x x x x x x x   x x x               at the same offset within 16 bytes as in D, or 2 bytes less: lines are written by words
//
// Bulk copies of rows are slower. The cost beyond a TMA store is in the shifts and the rows' ends: tests/bench/notes.md.

struct te_row_store_path {
    static const int SIZE = D_DT == 1 ? 4 : 2; // bytes of an element
    static const int COLS = WN * SIZE < LINE ? WN : WN * SIZE % LINE ? LINE / SIZE / 2 : LINE / SIZE, TIMES = WN / COLS; // columns of a line: WN in equal parts
    static const int PIECES = COLS * SIZE / 16, AT_ONCE = 32 / PIECES; // whole ones of a row; rows that a warp stores at once
    const te__gemm_kargs &a;
    float scale;
    te_u32 lines;
    int lane;
    TE_DEV te_row_store_path(const te__gemm_kargs &args, float scale_, te_u32 lines_) : a(args), scale(scale_), lines(lines_), lane(threadIdx.x & 31) {
        asm volatile("" : "+r"(lane)); // values derived from it are computed here, and hold no registers in the mainloop
    }

    // Pairs of neighbours to the lines of rows g and g + 8, which are aligned alike: eight rows are a multiple of 16 bytes.
    TE_DEV void put(const float *acc, const char *d, te_i64 step, te_i64 col) const {
        te_u32 by = (te_u32)((te_u64)d + (lane >> 2) * step) & 12, line = lines + (lane >> 2) * LINE_PITCH + by + 2 * (lane & 3) * SIZE;
        float bias[COLS / 32];
        asm volatile("" : "+r"(line)); // one register and offsets, not a sum for each store
        if (STORE & 2) {
#pragma unroll
            for (int i = 0; i < COLS / 32; i++) bias[i] = col + lane + 32 * i < a.n ? te_gemm_load(a.bias, col + lane + 32 * i, a.bias_dt) : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < COLS / 8; j++) {
            float b[2] = {0.0f, 0.0f};
#pragma unroll
            for (int e = 0; e < 2 && STORE & 2; e++) b[e] = __shfl_sync(0xffffffffu, bias[j / 4], 8 * (j % 4) + 2 * (lane & 3) + e);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float x = fmaf(acc[4 * j + 2 * half], scale, b[0]), y = fmaf(acc[4 * j + 2 * half + 1], scale, b[1]);
                te_u32 to = line + (half * 8 * LINE_PITCH + 8 * j * SIZE);
                te_sts4(to, D_DT == 1 ? __float_as_uint(x) : te_gemm_pack(x, y, D_DT));
                if (D_DT == 1) te_sts4(to + 4, __float_as_uint(y));
            }
        }
    }
    // acc to 16 rows of D.
    TE_DEV void finish(const float *acc, te_i64 row, te_i64 first) const {
        int rows = a.m - row < 16 ? (int)(a.m - row) : 16;
        te_i64 step = a.ldd * SIZE;
#pragma unroll
        for (int i = 0; i < TIMES; i++) {
            te_i64 col = first + i * COLS;
            int bytes = (int)(a.n - col < COLS ? a.n - col : COLS) * SIZE;
            if (bytes <= 0 || rows <= 0) break;
            const int BATCH = B_1D ? 2 : 4; // several rows are read before the first is written; as many as there are registers for
            char *d = (char *)a.d + row * step + col * SIZE;
            __syncwarp(); // the lines are free again
            put(acc + i * COLS / 2, d, step, col);
            __syncwarp();
            if (bytes < 16) { // less than a piece
#pragma unroll 1
                for (int k = 0; k < rows; k++, d += step)
                    if (2 * lane < bytes) ((te_u16 *)d)[lane] = te_lds2(lines + k * LINE_PITCH + ((te_u32)(te_u64)d & (SIZE == 2 ? 12 : 15)) + 2 * lane);
                break;
            }
            int r = lane / PIECES, at = lane % PIECES * 16; // a lane's row, and its piece
            char *to = d + r * step;
            te_u32 from = lines + r * LINE_PITCH + at, pick = (te_u64)to & 2 ? 0x5432 : 0x7654; // the halves of two words that are one of D: alike in all of its rows
#pragma unroll 1
            for (int k = 0; k < 16 / AT_ONCE; k += BATCH) {
                uint4 v[BATCH];
#pragma unroll
                for (int j = 0; j < BATCH; j++) {
                    uint4 w = te_lds16(from + j * AT_ONCE * LINE_PITCH);
                    v[j] = w;
                    if (SIZE == 4) continue;
                    te_u32 before = __shfl_up_sync(0xffffffffu, w.w, 1);
                    v[j] = make_uint4(__byte_perm(before, w.x, pick), __byte_perm(w.x, w.y, pick), __byte_perm(w.y, w.z, pick), __byte_perm(w.z, w.w, pick));
                }
#pragma unroll
                for (int j = 0; j < BATCH; j++) {
                    int by = (int)(te_u64)to & 15;
                    if (r + (k + j) * AT_ONCE < rows && at >= by && at + 16 <= by + bytes) *(uint4 *)(to + (at - by)) = v[j];
                    to += AT_ONCE * step;
                }
                from += BATCH * AT_ONCE * LINE_PITCH;
            }
            bool last = lane & 8; // two rows at a time, eight lanes for the first piece of each, eight for the last
            r = lane >> 4, at = 2 * (lane & 7), to = d + r * step, from = lines + r * LINE_PITCH + at - (SIZE == 2 ? (te_u32)(te_u64)to & 2 : 0);
#pragma unroll 1
            for (int k = 0; k < 8; k += BATCH) {
                int here[BATCH]; // bytes from the row's beginning, or -1
                te_u16 v[BATCH];
                char *next = to;
#pragma unroll
                for (int j = 0; j < BATCH; j++, next += 2 * step) {
                    int by = (int)(te_u64)next & 15, piece = last ? by + bytes & ~15 : 0;
                    bool mine = last ? piece + at < by + bytes : by && at >= by;
                    here[j] = mine && r + 2 * (k + j) < rows ? piece + at - by : -1;
                    v[j] = te_lds2(from + 2 * j * LINE_PITCH + piece);
                }
#pragma unroll
                for (int j = 0; j < BATCH; j++, to += 2 * step)
                    if (here[j] >= 0) *(te_u16 *)(to + here[j]) = v[j];
                from += 2 * BATCH * LINE_PITCH;
            }
        }
    }
};
