/* test_context.c: what ranks that share sequences do beside attention itself: which rank has which row, lengths of chunks, outputs that join: each against the rule written down again; odd and
 * empty sizes, refusals. */
#include "../te_test.h"

/* ---- rows ---- */

/* map[rank * rows / ranks + i]: local row i of that rank among the rows of sequences of these lengths, each 2 * ranks chunks. */
static void order(float *map, int ranks, int n, const int64_t *lengths, int64_t rows) {
    for (int rank = 0; rank < ranks; rank++) {
        int64_t start = 0;
        float *at = map + rank * (rows / ranks);
        for (int b = 0; b < n; b++) {
            const int64_t chunk = lengths[b] / (2 * ranks);
            for (int64_t i = 0; i < chunk; i++) *at++ = (float)(start + rank * chunk + i);
            for (int64_t i = 0; i < chunk; i++) *at++ = (float)(start + (2 * ranks - 1 - rank) * chunk + i);
            start += lengths[b];
        }
        for (int64_t i = 0, tail = (rows - start) / ranks; i < tail; i++) *at++ = (float)(start + rank * tail + i);
    }
}

TE_TEST_DEVICES(context_rows_of_ranks) {
    static const int64_t lengths[][3] = {{4, 12, 8}, {24, 0, 48}, {0, 0, 0}, {240, 24, 2400}};
    for (int k = 0; k < COUNT(lengths); k++)
        for (int ranks = 1; ranks <= 6; ranks++)
            for (int share = 1; share <= 2; share++) {
                int64_t cu[4] = {0}, length[3], rows = 12 * ranks;
                for (int b = 0; b < 3; b++) {
                    length[b] = lengths[k][b] * ranks;
                    cu[b + 1] = cu[b] + length[b] * share;
                    rows += length[b];
                }
                test_case("lengths %d, %d ranks, beside %d", k, ranks, share);
                float *want = test_floats(rows), *back = test_floats(rows);
                order(want, ranks, 3, length, rows);
                for (int64_t i = 0; i < rows; i++) back[(int64_t)want[i]] = (float)i;
                te_op_context_rows_args a = {.cu_seqlens = test_i32(te, SHAPE(4), cu), .map = test_guarded(te, TE_I32, SHAPE(rows)), .ranks = ranks, .share = share};
                te_op_context_rows(te, &a);
                REQUIRE_OK(te);
                CHECK_TENSOR(a.map, want, 0, 0);
                a.inverse = true;
                te_op_context_rows(te, &a);
                CHECK_TENSOR(a.map, back, 0, 0);
            }
    for (int sequences = 1; sequences <= 3; sequences++) { /* of one length */
        const int64_t length[3] = {20, 20, 20}, rows = 20 * sequences;
        float *want = test_floats(rows);
        order(want, 5, sequences, length, rows);
        te_op_context_rows_args a = {.map = test_guarded(te, TE_I32, SHAPE(rows)), .ranks = 5, .sequences = sequences};
        te_op_context_rows(te, &a);
        REQUIRE_OK(te);
        CHECK_TENSOR(a.map, want, 0, 0);
    }
    te_op_context_rows_args none = {.map = te_tensor_zeros(te, TE_I32, SHAPE(0)), .ranks = 2};
    CHECK(te_op_context_rows(te, &none) == TE_OK);
}

/* Rows that cannot be shared, on a GPU, where no one checks: each has some place, and nothing outside is written. */
TE_TEST_DEVICES(context_rows_that_cannot_be_shared) {
    static const int64_t wrong[][4] = {{0, 6, 12, 24}, {0, -8, 8, 24}, {4, 8, 16, 24}, {0, 24, 8, 24}, {0, 8, 16, 2000}, {0, 8, 16, 17}};
    for (int k = 0; k < COUNT(wrong); k++) {
        te_op_context_rows_args a = {.cu_seqlens = test_i32(te, SHAPE(4), wrong[k]), .map = test_guarded(te, TE_I32, SHAPE(24)), .ranks = 2};
        test_case("starts %d", k);
        if (te_ctx_is_cuda(te)) {
            CHECK(te_op_context_rows(te, &a) == TE_OK);
            continue;
        }
        CHECK(te_op_context_rows(te, &a) == TE_ERR_INVALID);
        CHECK_ERROR(te, TE_ERR_INVALID, "context_rows: cu_seqlens[");
    }
}

/* ---- lengths ---- */

TE_TEST_DEVICES(context_lengths_of_chunks) {
    enum { N = 1100 }; /* more than are added up at a time */
    for (int ranks = 1; ranks <= 3; ranks++)
        for (int chunks = 0; chunks < 4; chunks++)
            for (int rank = 0; rank < (chunks == TE_CHUNKS_UP_TO ? 2 * ranks + 1 : ranks); rank++)
                for (int apart = 0; apart < 2; apart++) {
                    int64_t *cu = (int64_t *)test_alloc((N + 1) * sizeof(int64_t)), *padded = (int64_t *)test_alloc((N + 1) * sizeof(int64_t));
                    float *lengths = test_floats(N + 1), *starts = test_floats(N + 1);
                    cu[0] = padded[0] = 0;
                    test_case("rank %d of %d, chunks %d, %s", rank, ranks, chunks, apart ? "padding" : "no padding");
                    for (int b = 0; b < N; b++) {
                        const int64_t chunk = b % 5, whole = chunk * 2 * ranks, tokens = apart ? whole * (b % 4) / 3 : whole;
                        int64_t count = 0;
                        for (int c = 0; c < 2 * ranks; c++) {
                            const bool taken = chunks == TE_CHUNKS_UP_TO ? c < rank : (c == rank && chunks != TE_CHUNKS_SECOND) || (c == 2 * ranks - 1 - rank && chunks != TE_CHUNKS_FIRST);
                            for (int64_t i = c * chunk; i < (c + 1) * chunk; i++) count += taken && i < tokens;
                        }
                        cu[b + 1] = cu[b] + tokens;
                        padded[b + 1] = padded[b] + whole;
                        lengths[b + 1] = lengths[b] + (float)count;
                        starts[b] = (float)(chunks == TE_CHUNKS_UP_TO ? padded[b] : padded[b] / ranks + (chunks == TE_CHUNKS_SECOND ? chunk : 0));
                    }
                    starts[N] = (float)(padded[N] / (chunks == TE_CHUNKS_UP_TO ? 1 : ranks));
                    te_op_context_lengths_args a = {.cu_seqlens = test_i32(te, SHAPE(N + 1), cu), .lengths = test_guarded(te, TE_I32, SHAPE(N + 1)), .starts = test_guarded(te, TE_I32, SHAPE(N + 1)),
                                                    .ranks = ranks, .rank = rank, .chunks = (te_context_chunks)chunks};
                    if (apart) a.cu_seqlens_padded = test_i32(te, SHAPE(N + 1), padded);
                    te_op_context_lengths(te, &a);
                    REQUIRE_OK(te);
                    CHECK_TENSOR(a.lengths, lengths, 0, 0);
                    CHECK_TENSOR(a.starts, starts, 0, 0);
                }
}

/* ---- outputs that join ---- */

enum { T = 5, N_B = 2, H = 3 };

/* A row sees no key (-inf) on one side, on the other, on both. */
static float *sums(uint64_t seed, int skip) {
    float *x = test_normal(N_B * H * T, seed);
    for (int i = skip; i < N_B * H * T; i += 4) x[i] = -INFINITY;
    x[7] = -INFINITY;
    return x;
}

/* d: with lanes that have no row, with all, with one row for a warp. */
static void check_merge(te_ctx *te, int64_t D) {
    for (int format = TE_SBHD; format <= TE_THD; format++)
        for (int dt = TE_F32; dt <= TE_BF16; dt++)
            for (int strided = 0; strided < 2; strided++) {
                const int b_n = format == TE_THD ? 1 : N_B, ndim = format == TE_THD ? 3 : 4;
                const int64_t t_n = format == TE_THD ? T * N_B : T, wide = D + (strided ? 8 : 0);
                int64_t shape[4] = {format == TE_BSHD ? N_B : t_n, format == TE_BSHD ? T : N_B, H, wide};
                if (format == TE_THD) shape[1] = H, shape[2] = wide;
                const float *x_lse = sums(3, 0), *lse = sums(4, 2), *x_max = test_normal(H, 5), *max = test_normal(H, 6);
                test_case("d %d, format %d, %s, strided %d", (int)D, format, te_dtype_name((te_dtype)dt), strided);
                te_tensor *xs = test_tensor(te, (te_dtype)dt, ndim, shape, test_normal(N_B * T * H * wide, 1)), *os = test_tensor(te, TE_F32, ndim, shape, test_normal(N_B * T * H * wide, 2));
                te_tensor *x = te_tensor_narrow(xs, ndim - 1, 0, D), *o = te_tensor_narrow(os, ndim - 1, 0, D);
                const float *xv = test_read(x), *ov = test_read(o);
                te_tensor *sum = test_tensor(te, TE_F32, SHAPE(b_n, H, t_n), lse);
                te_op_context_merge_args a = {.x = x, .o = o, .x_lse = test_tensor(te, TE_F32, SHAPE(b_n, H, t_n), x_lse), .lse = sum, .x_max_logit = test_tensor(te, TE_F32, SHAPE(H), x_max),
                                              .max_logit = test_tensor(te, TE_F32, SHAPE(H), max), .format = (te_qkv_format)format};
                float *want = test_floats(N_B * T * H * D), *want_lse = test_floats(N_B * T * H), *want_max = test_floats(H), *want_sum = test_floats(N_B * T * H * D);
                for (int h = 0; h < H; h++) want_max[h] = max[h] > x_max[h] ? max[h] : x_max[h];
                for (int b = 0; b < b_n; b++)
                    for (int64_t t = 0; t < t_n; t++)
                        for (int h = 0; h < H; h++) {
                            const int64_t row = ((format == TE_BSHD ? b * t_n + t : t * b_n + b) * H + h) * D, at = (b * H + h) * t_n + t;
                            const double p = exp((double)lse[at]), q = exp((double)x_lse[at]);
                            want_lse[at] = (float)log(p + q);
                            for (int64_t d = 0; d < D; d++) {
                                want[row + d] = p + q > 0 ? (float)((ov[row + d] * p + xv[row + d] * q) / (p + q)) : 0;
                                want_sum[row + d] = ov[row + d] + xv[row + d];
                            }
                        }
                te_op_context_merge(te, &a);
                REQUIRE_OK(te);
                CHECK_TENSOR(o, want, 3e-6, 1e-6); /* two exponentials and a logarithm in f32, of numbers around 1 */
                CHECK_TENSOR(sum, want_lse, 1e-6, 1e-6);
                CHECK_TENSOR(a.max_logit, want_max, 0, 0);
                os = test_tensor(te, TE_F32, SHAPE(N_B * T * H, D), ov);
                o = te_tensor_view(os, ndim, te_tensor_shape(o));
                te_op_context_merge_args plain = {.x = x, .o = o, .format = (te_qkv_format)format};
                te_op_context_merge(te, &plain);
                REQUIRE_OK(te);
                CHECK_TENSOR(o, want_sum, 0, 0);
            }
}
TE_TEST_DEVICES(context_merge_of_outputs) {
    static const int d[] = {37, 8, 96, 128, 192, 256, 264};
    for (int i = 0; i < COUNT(d); i++) check_merge(te, d[i]);
}

/* lse with strides: the second half of a longer one. */
TE_TEST_DEVICES(context_merge_into_a_part) {
    te_tensor *o = te_tensor_zeros(te, TE_F32, SHAPE(2 * T, 1, H, 4)), *lse = te_tensor_full(te, TE_F32, SHAPE(1, H, 2 * T), -INFINITY);
    te_op_context_merge_args a = {.x = te_tensor_full(te, TE_F32, SHAPE(T, 1, H, 4), 3), .x_lse = te_tensor_full(te, TE_F32, SHAPE(1, H, T), 0.5), .o = te_tensor_narrow(o, 0, T, T),
                                  .lse = te_tensor_narrow(lse, 2, T, T)};
    te_op_context_merge(te, &a);
    REQUIRE_OK(te);
    float *want = test_floats(2 * T * H * 4), *want_lse = test_floats(H * 2 * T);
    for (int i = 0; i < 2 * T * H * 4; i++) want[i] = i < T * H * 4 ? 0.0f : 3.0f;
    for (int i = 0; i < H * 2 * T; i++) want_lse[i] = i % (2 * T) < T ? -INFINITY : 0.5f;
    CHECK_TENSOR(o, want, 0, 0);
    CHECK_TENSOR(lse, want_lse, 0, 0);
}

TE_TEST(context_refusals) {
    te_ctx *te = test_context("cpu");
    te_tensor *cu = test_i32(te, SHAPE(3), (const int64_t[]){0, 8, 16}), *map = te_tensor_zeros(te, TE_I32, SHAPE(16));
    te_op_context_rows_args r = {.cu_seqlens = cu, .map = map, .ranks = 0};
    te_op_context_rows(te, &r);
    CHECK_ERROR(te, TE_ERR_INVALID, "context_rows: ranks is 0; 1 to 2^20 are possible");
    r.ranks = 3, te_op_context_rows(te, &r);
    CHECK_ERROR(te, TE_ERR_SHAPE, "16 rows and 3 ranks");
    r.ranks = 2, r.share = -1, te_op_context_rows(te, &r);
    CHECK_ERROR(te, TE_ERR_INVALID, "sequences is 1 and share -1");
    r.share = 0, r.cu_seqlens = NULL, r.sequences = 3, te_op_context_rows(te, &r);
    CHECK_ERROR(te, TE_ERR_SHAPE, "16 rows of 3 sequences, and 2 ranks");
    r.sequences = (int64_t)1 << 62, te_op_context_rows(te, &r);
    CHECK_ERROR(te, TE_ERR_SHAPE, "16 rows of 4611686018427387904 sequences, and 2 ranks");
    r.map = te_tensor_zeros(te, TE_I32, SHAPE(0)), r.sequences = 3;
    CHECK_EQ_INT(te_op_context_rows(te, &r), TE_OK); /* empty ones */
    r.map = map;
    r.sequences = 0, r.cu_seqlens = te_tensor_zeros(te, TE_I32, SHAPE(1)), te_op_context_rows(te, &r);
    CHECK_ERROR(te, TE_ERR_SHAPE, "cu_seqlens has 1 elements");
    te_op_context_lengths_args l = {.cu_seqlens = cu, .lengths = te_tensor_zeros(te, TE_I32, SHAPE(3)), .starts = te_tensor_zeros(te, TE_I32, SHAPE(2)), .ranks = 2};
    te_op_context_lengths(te, &l);
    CHECK_ERROR(te, TE_ERR_SHAPE, "starts is [2]; 3 elements are needed");
    l.starts = te_tensor_zeros(te, TE_I32, SHAPE(3)), l.rank = 2, te_op_context_lengths(te, &l);
    CHECK_ERROR(te, TE_ERR_INVALID, "rank is 2 of 2 ranks; 0 to 1 are possible");
    l.chunks = TE_CHUNKS_UP_TO, l.rank = 5, te_op_context_lengths(te, &l);
    CHECK_ERROR(te, TE_ERR_INVALID, "rank is 5 of 2 ranks; 0 to 4 are possible");
    l.rank = 0, l.chunks = (te_context_chunks)4, te_op_context_lengths(te, &l);
    CHECK_ERROR(te, TE_ERR_INVALID, "chunks is 4");
    l.chunks = TE_CHUNKS_BOTH, l.cu_seqlens = test_i32(te, SHAPE(3), (const int64_t[]){0, 6, 16}), te_op_context_lengths(te, &l);
    CHECK_ERROR(te, TE_ERR_INVALID, "cu_seqlens_padded[1] is 6");
    l.cu_seqlens_padded = cu, l.cu_seqlens = test_i32(te, SHAPE(3), (const int64_t[]){0, 9, 16}), te_op_context_lengths(te, &l);
    CHECK_ERROR(te, TE_ERR_INVALID, "cu_seqlens[0] is 0 and [1] is 9: 9 tokens, and by cu_seqlens_padded the sequence has room for 8");
    l.cu_seqlens = test_i32(te, SHAPE(3), (const int64_t[]){0, 5, 3}), te_op_context_lengths(te, &l);
    CHECK_ERROR(te, TE_ERR_INVALID, "cu_seqlens[1] is 5 and [2] is 3: -2 tokens");
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(4, 2, 3, 8)), *sum = te_tensor_zeros(te, TE_F32, SHAPE(2, 3, 4));
    te_op_context_merge_args m = {.x = x, .o = te_tensor_zeros(te, TE_F32, SHAPE(4, 2, 3, 8)), .x_lse = sum};
    te_op_context_merge(te, &m);
    CHECK_ERROR(te, TE_ERR_STATE, "lse is NULL");
    m.lse = te_tensor_zeros(te, TE_F32, SHAPE(2, 4, 3)), te_op_context_merge(te, &m);
    CHECK_ERROR(te, TE_ERR_SHAPE, "lse is [2, 4, 3]; [2, 3, 4] is needed");
    m.lse = te_tensor_zeros(te, TE_F32, SHAPE(2, 3, 4)), m.format = TE_THD, te_op_context_merge(te, &m);
    CHECK_ERROR(te, TE_ERR_SHAPE, "[tokens, heads, d]");
    m.format = (te_qkv_format)3, te_op_context_merge(te, &m);
    CHECK_ERROR(te, TE_ERR_INVALID, "format is 3");
}
