/* tests/quant/test_master.c: sharded f32 masters to quantized weights: the slices of 1 to 5 ranks give, gathered, the bytes of the whole weight
 * quantized by one; every refusal leaves every byte as it was, on all ranks. */
#include "../dist/ranks.h"

/* ---- weights ------------------------------------------------------------------------------------------------------ */

enum { KINDS = 15, SHAPES = 3, WEIGHTS = KINDS * SHAPES, RANKS = 5 };
static const char *const kind_name[KINDS] = {"delayed", "delayed e5m2", "current", "current e5m2, powers of two, epsilon", "current, column-wise alone", "block", "block any scale, epsilon",
                                             "mxfp8", "mxfp8 e5m2", "nvfp4", "nvfp4 to 256", "identity", "hybrid current and identity", "hybrid identity and delayed", "hybrid of two formats"};
/* One element; less than a tile and odd; over the edges of every tile. */
static const int64_t shapes[KINDS][SHAPES][2] = {
    {{1, 1}, {3, 5}, {37, 45}},   {{5, 3}, {2, 7}, {16, 33}},   {{1, 9}, {13, 1}, {64, 50}},     {{1, 1}, {3, 5}, {33, 31}},   {{1, 1}, {7, 5}, {40, 19}},
    {{1, 1}, {3, 5}, {131, 130}}, {{1, 3}, {9, 5}, {129, 150}}, {{1, 1}, {3, 5}, {67, 70}},      {{2, 3}, {33, 5}, {64, 96}},  {{1, 1}, {3, 5}, {49, 67}},
    {{5, 1}, {17, 16}, {32, 64}}, {{1, 1}, {3, 5}, {19, 20}},   {{1, 1}, {3, 5}, {37, 45}},      {{1, 1}, {3, 5}, {20, 30}},   {{2, 2}, {3, 5}, {30, 41}},
};
static te_dtype dtype_of(int w) { return w % 5 == 3 ? TE_F16 : w % 4 == 1 ? TE_F32 : TE_BF16; }
static bool is_hybrid(int kind) { return kind >= 12; }

/* The tensors that a rank hands in, and those of others that it reads. */
typedef struct run_desc {
    int size; /* ranks */
    bool shards, manual;
    const float *value[WEIGHTS];
    int64_t cut[WEIGHTS][RANKS + 1]; /* rank r has [cut[r], cut[r + 1]) */
    bool null[WEIGHTS][RANKS];       /* an empty slice is NULL */
    float seen[WEIGHTS][RANKS];      /* delayed: the amax that the rank has recorded before */
    /* of the whole, quantized by one */
    uint8_t *data[WEIGHTS][2], *scale[WEIGHTS][2], *amax[WEIGHTS][2];
    size_t data_bytes[WEIGHTS][2], scale_bytes[WEIGHTS][2], amax_bytes[WEIGHTS][2];
    float want_amax[WEIGHTS];
    uint8_t *posted[RANKS][WEIGHTS][2]; /* the rank's codes: of the weight, or of its shard */
} run_desc;

/* The quantizer of one weight; scale and amax are made here. */
static te_quantizer *quantizer_of(te_ctx *te, const run_desc *run, int w, float seen, te_tensor **amax) {
    int kind = w / SHAPES;
    te_quantizer_desc d, row, col;
    float scale = 3.0f + (float)(w % 3);
    memset(&d, 0, sizeof d);
    row = col = d;
    te_tensor *s = te_tensor_from_f32(te, TE_F32, SHAPE(1), &scale);
    *amax = te_tensor_from_f32(te, TE_F32, SHAPE(1), &seen);
    switch (kind) {
    case 0:
    case 1: d.kind = TE_QUANT_DELAYED; break;
    case 2:
    case 3:
    case 4: d.kind = TE_QUANT_CURRENT; break;
    case 5:
    case 6: d.kind = TE_QUANT_BLOCK; break;
    case 7:
    case 8: d.kind = TE_QUANT_MXFP8; break;
    case 9:
    case 10: d.kind = TE_QUANT_NVFP4; break;
    case 11: d.kind = TE_QUANT_IDENTITY; break;
    default: d.kind = TE_QUANT_HYBRID; break;
    }
    if (kind == 1 || kind == 3 || kind == 8) d.dtype = TE_F8E5M2;
    if (kind <= 1) d.delayed.scale = s, d.delayed.amax = *amax;
    if (kind == 3) d.current.power_of_two_scales = true;
    if (kind == 3 || kind == 6) d.amax_epsilon = 0.125f;
    if (kind == 4 && !run->shards) d.usage = TE_COLUMNWISE;
    if (kind == 6) d.block.fp32_scales = true;
    d.quantization_2d = d.kind == TE_QUANT_NVFP4 ? TE_ON : TE_DEFAULT;
    d.nvfp4.e4m3_max_256 = kind == 10;
    row.kind = kind == 13 ? TE_QUANT_IDENTITY : TE_QUANT_CURRENT;
    col.kind = kind == 12 ? TE_QUANT_IDENTITY : kind == 13 ? TE_QUANT_DELAYED : TE_QUANT_CURRENT;
    if (kind == 13) col.delayed.scale = s, col.delayed.amax = *amax;
    if (kind == 14) col.dtype = TE_F8E5M2;
    if (d.kind == TE_QUANT_HYBRID) d.hybrid.rowwise_quantizer = &row, d.hybrid.columnwise_quantizer = &col;
    if (is_hybrid(kind) && run->shards) d.usage = TE_ROWWISE;
    return te_quantizer_create(te, &d);
}
static bool records_amax(const run_desc *run, int w) { return w / SHAPES <= 1 || (w / SHAPES == 13 && !run->shards); }

static uint8_t *host_of(const te_tensor *x, size_t *bytes) {
    uint8_t *host = (uint8_t *)calloc(te_tensor_bytes(x) + 1, 1);
    *bytes = te_tensor_bytes(x);
    te_tensor_to_host(x, host);
    return host;
}
static int64_t rows_of(int w) { return shapes[w / SHAPES][w % SHAPES][0]; }
static int64_t cols_of(int w) { return shapes[w / SHAPES][w % SHAPES][1]; }

/* Cuts of a weight's n elements over the ranks: even ones, ragged ones, all of it to one rank. */
static void make_cuts(run_desc *run, int w, uint64_t seed) {
    int64_t n = rows_of(w) * cols_of(w), *cut = run->cut[w];
    int mode = (int)((seed + (uint64_t)w) % 4), owner = (int)((seed * 7 + (uint64_t)w) % (uint64_t)run->size);
    cut[0] = 0;
    for (int r = 1; r < run->size; r++) {
        if (mode == 0) cut[r] = n * r / run->size;
        else if (mode == 1) cut[r] = r <= owner ? 0 : n;
        else cut[r] = *test_integers(1, seed * 1000 + (uint64_t)(w * 8 + r), 0, n + 1);
        for (int k = r; k > 1 && cut[k] < cut[k - 1]; k--) {
            int64_t t = cut[k];
            cut[k] = cut[k - 1];
            cut[k - 1] = t;
        }
    }
    cut[run->size] = n;
    for (int r = 0; r < run->size; r++) run->null[w][r] = (seed + (uint64_t)(w + r)) % 2 == 0;
}

/* Quantizes every weight as a whole. */
static run_desc *make_run(int size, bool shards, bool manual, uint64_t seed) {
    run_desc *run = (run_desc *)test_alloc(sizeof *run);
    te_ctx *te = test_context("cpu");
    run->size = size;
    run->shards = shards;
    run->manual = manual;
    for (int w = 0; w < WEIGHTS; w++) {
        int64_t n = rows_of(w) * cols_of(w);
        float *v = w % 4 == 2 ? test_specials(n, seed + (uint64_t)w) : test_normal(n, seed + (uint64_t)w), most = 0, seen = 0;
        for (int64_t i = 0; i < n; i++) {
            if (i % 300 > 200) v[i] *= 1e-3f;
            if (w % 7 == 5 && i > n / 2) v[i] = 0; /* whole tiles */
        }
        run->value[w] = v;
        make_cuts(run, w, seed);
        te_tensor *amax, *x = te_tensor_cast(te_tensor_from_f32(te, TE_F32, SHAPE(rows_of(w), cols_of(w)), v), dtype_of(w));
        for (int r = 0; r < size; r++) {
            run->seen[w][r] = (w + r) % 3 == 0 ? 100.0f + (float)r : 0.0f;
            seen = fmaxf(seen, run->seen[w][r]);
        }
        const float *rounded = test_read(x);
        for (int64_t i = 0; i < n; i++) most = fmaxf(most, fabsf(rounded[i]));
        run->want_amax[w] = fmaxf(most, seen);
        te_quantizer *q = quantizer_of(te, run, w, seen, &amax);
        te_tensor *y = te_quantize(q, x), *data, *scale;
        CHECK_OK(te);
        if (records_amax(run, w)) CHECK(test_read(amax)[0] == run->want_amax[w]);
        for (int k = 0; k < 2; k++) {
            int which = k ? TE_COLUMNWISE : TE_ROWWISE;
            if (!(te_quantized_usage(y) & which)) continue;
            te_quantized_view(y, which, &data, &scale);
            run->data[w][k] = (uint8_t *)test_read_bytes(data);
            run->data_bytes[w][k] = te_tensor_bytes(data);
            if (scale) run->scale[w][k] = (uint8_t *)test_read_bytes(scale), run->scale_bytes[w][k] = te_tensor_bytes(scale);
            if (te_quantized_amax(y, which)) run->amax[w][k] = (uint8_t *)test_read_bytes(te_quantized_amax(y, which)), run->amax_bytes[w][k] = 4;
        }
        te_quantizer_destroy(q);
    }
    return run;
}

/* ---- one rank ----------------------------------------------------------------------------------------------------- */

/* Code `from` of one array of codes becomes code `to` of another. */
static void move_code(uint8_t *dst, int64_t to, const uint8_t *src, int64_t from, int bits) {
    if (bits >= 8) {
        memcpy(dst + to * (bits / 8), src + from * (bits / 8), (size_t)bits / 8);
        return;
    }
    int code = src[from / 2] >> (from % 2 * 4) & 15, shift = (int)(to % 2) * 4;
    dst[to / 2] = (uint8_t)((dst[to / 2] & ~(15 << shift)) | code << shift);
}

typedef struct rank_weights {
    te_quantizer *q[WEIGHTS];
    te_tensor *weight[WEIGHTS], *master[WEIGHTS], *shard[WEIGHTS], *shard_col[WEIGHTS], *amax[WEIGHTS];
    int64_t start[WEIGHTS];
    uint8_t *before[WEIGHTS][2];
} rank_weights;

static bool is_mxfp8(int w) { return w / SHAPES == 7 || w / SHAPES == 8; }
/* Are the codes of copy k written by the call (and not made from those of the other)? */
static bool is_written(const te_tensor *x, int k) {
    te_quant_kind kind = te_quantized_kind(x);
    return k == 0 || kind == TE_QUANT_MXFP8 || kind == TE_QUANT_HYBRID || !(te_quantized_usage(x) & TE_ROWWISE);
}
static void expect_bytes(rank_state *s, const char *what, int w, int k, const uint8_t *got, const uint8_t *want, size_t n) {
    size_t i = 0;
    char text[200];
    while (i < n && got[i] == want[i]) i++;
    if (i == n) return;
    snprintf(text, sizeof text, "%s of the %s copy, %s %dx%d: byte %d of %d is %02x, not %02x", what, k ? "column-wise" : "row-wise", kind_name[w / SHAPES], (int)rows_of(w),
             (int)cols_of(w), (int)i, (int)n, got[i], want[i]);
    wrong(s, text);
}
static void expect_scales(rank_state *s, const run_desc *run, const te_tensor *x, int w, int k) {
    te_tensor *scale, *amax = te_quantized_amax(x, k + 1);
    size_t n;
    te_quantized_view(x, k + 1, NULL, &scale);
    EXPECT(s, !scale == !run->scale[w][k] && !amax == !run->amax[w][k]);
    if (scale && run->scale[w][k]) {
        uint8_t *host = host_of(scale, &n);
        EXPECT(s, n == run->scale_bytes[w][k]);
        expect_bytes(s, "scale", w, k, host, run->scale[w][k], n);
        free(host);
    }
    if (amax && run->amax[w][k]) {
        uint8_t *host = host_of(amax, &n);
        expect_bytes(s, "amax", w, k, host, run->amax[w][k], 4);
        free(host);
    }
}

static te_tensor *data_of(te_tensor *x, int k) {
    te_tensor *data;
    te_quantized_view(x, k + 1, &data, NULL);
    return data;
}
static te_tensor *shard_of(te_ctx *te, const te_tensor *data, int64_t start, int64_t n, bool bytes) {
    int bits = te_dtype_bits(te_tensor_dtype(data));
    int64_t need = bits == 4 ? (start % 2 + n + 1) / 2 : n * bits / 8;
    te_tensor *x = bytes || bits == 4 ? te_tensor_empty(te, TE_U8, 1, &need) : te_tensor_empty(te, te_tensor_dtype(data), 1, &n);
    uint8_t *host = (uint8_t *)malloc((size_t)need + 1);
    memset(host, 0xee, (size_t)need + 1);
    te_tensor_copy_from_host(x, host);
    free(host);
    return x;
}

static void open_weights(rank_state *s, const run_desc *run, rank_weights *mine) {
    for (int w = 0; w < WEIGHTS; w++) {
        int64_t start = run->cut[w][s->rank], n = run->cut[w][s->rank + 1] - start;
        mine->q[w] = quantizer_of(s->te, run, w, 0.0f, &mine->amax[w]);
        mine->weight[w] = te_quantize(mine->q[w], te_tensor_full(s->te, dtype_of(w), SHAPE(rows_of(w), cols_of(w)), 1.0 + s->rank));
        te_tensor_copy_from_host(mine->amax[w], &run->seen[w][s->rank]);
        mine->start[w] = n || w % 2 ? start : 12345678; /* of nothing: any */
        if (n == 0 && run->null[w][s->rank]) continue;
        if (n == 0) mine->start[w] = start;
        mine->master[w] = te_tensor_from_f32(s->te, TE_F32, 1, &n, run->value[w] + start);
        if (!run->shards || (n == 0 && w % 2)) continue;
        mine->shard[w] = shard_of(s->te, data_of(mine->weight[w], 0), start, n, w % 2);
        if (is_mxfp8(w)) mine->shard_col[w] = shard_of(s->te, data_of(mine->weight[w], 1), start, n, w % 2 == 0);
    }
    for (int w = 0; w < WEIGHTS; w++)
        for (int k = 0; k < 2; k++) {
            size_t n;
            if (te_quantized_usage(mine->weight[w]) & (k + 1)) mine->before[w][k] = host_of(data_of(mine->weight[w], k), &n);
        }
}

/* The call has written the codes of this rank's slice, the scales on every rank, and nothing else. */
static void check_own(rank_state *s, run_desc *run, rank_weights *mine) {
    for (int w = 0; w < WEIGHTS; w++)
        for (int k = 0; k < 2; k++) {
            te_tensor *x = mine->weight[w];
            size_t n;
            bool stale = mine->before[w][k] && !is_written(x, k);
            if (stale && !run->manual) EXPECT(s, !(te_quantized_usage(x) & (k + 1)));
            if (!(te_quantized_usage(x) & (k + 1))) continue;
            uint8_t *codes = host_of(data_of(x, k), &n);
            if (stale || run->shards) expect_bytes(s, "untouched codes", w, k, codes, mine->before[w][k], n);
            if (!stale) expect_scales(s, run, x, w, k);
            if (!stale && run->shards) {
                te_tensor *shard = k ? mine->shard_col[w] : mine->shard[w];
                free(codes);
                codes = shard ? host_of(shard, &n) : NULL;
            }
            if (stale) free(codes);
            else run->posted[s->rank][w][k] = codes;
        }
}

/* Every rank's codes in their places. */
static void gather_codes(rank_state *s, const run_desc *run, rank_weights *mine) {
    for (int w = 0; w < WEIGHTS; w++)
        for (int k = 0; k < 2; k++) {
            te_tensor *x = mine->weight[w], *data;
            if (!(te_quantized_usage(x) & (k + 1)) || !is_written(x, k)) continue;
            data = data_of(x, k);
            int bits = te_dtype_bits(te_tensor_dtype(data));
            int64_t ld = te_tensor_shape(data)[1], rows = rows_of(w), cols = cols_of(w);
            bool turned = k == 1 && te_tensor_dtype(data) != dtype_of(w) && !is_mxfp8(w);
            uint8_t *whole = mine->before[w][k];
            for (int r = 0; r < run->size; r++)
                for (int64_t e = run->cut[w][r]; e < run->cut[w][r + 1]; e++) {
                    int64_t at = turned ? e % cols * ld + e / cols : e / cols * ld + e % cols;
                    int64_t from = run->shards ? e - run->cut[w][r] + (bits == 4 ? run->cut[w][r] % 2 : 0) : at;
                    move_code(whole, at, run->posted[r][w][k], from, bits);
                }
            EXPECT(s, te_tensor_shape(data)[0] == (turned ? cols : rows));
            te_tensor_copy_from_host(data, whole);
            if (run->shards && bits == 4 && run->posted[s->rank][w][k]) { /* the neighbours' halves of the bytes at the ends */
                int64_t start = run->cut[w][s->rank], n = run->cut[w][s->rank + 1] - start;
                if (n && start % 2) EXPECT(s, (run->posted[s->rank][w][k][0] & 15) == 0xe);
                if (n && (start + n) % 2) EXPECT(s, run->posted[s->rank][w][k][(start % 2 + n) / 2] >> 4 == 0xe);
            }
        }
}

static void quantize_slices(rank_state *s) {
    run_desc *run = (run_desc *)(uintptr_t)s->arg;
    rank_weights *mine = (rank_weights *)calloc(1, sizeof *mine);
    te_master_weights call = {0};
    open_weights(s, run, mine);
    call.model_weights = mine->weight;
    call.master_weights = mine->master;
    call.start_offsets = mine->start;
    call.count = WEIGHTS;
    call.group = s->group;
    call.shard_weights = run->shards ? mine->shard : NULL;
    call.shard_columnwise = run->shards ? mine->shard_col : NULL;
    call.manual_post_processing = run->manual;
    EXPECT(s, te_ok(s->te));
    EXPECT(s, (run->size == 2 ? te_cast_master_weights_to_fp8(s->te, &call) : te_quantize_master_weights(s->te, &call)) == TE_OK);
    if (te_ok(s->te)) {
        check_own(s, run, mine);
        EXPECT(s, te_barrier(s->group) == TE_OK);
        gather_codes(s, run, mine);
        EXPECT(s, te_post_all_gather_processing(s->te, mine->weight, WEIGHTS) == TE_OK);
        for (int w = 0; w < WEIGHTS; w++) {
            float amax = 0;
            for (int k = 0; k < 2; k++) {
                size_t n;
                EXPECT(s, !(te_quantized_usage(mine->weight[w]) & (k + 1)) == !run->data[w][k]);
                if (!run->data[w][k]) continue;
                uint8_t *codes = host_of(data_of(mine->weight[w], k), &n);
                EXPECT(s, n == run->data_bytes[w][k]);
                expect_bytes(s, "codes", w, k, codes, run->data[w][k], n);
                expect_scales(s, run, mine->weight[w], w, k);
                free(codes);
            }
            te_tensor_to_f32(mine->amax[w], &amax);
            if (records_amax(run, w)) EXPECT(s, amax == run->want_amax[w]);
        }
        EXPECT(s, te_barrier(s->group) == TE_OK); /* others read what this rank has posted */
    }
    for (int w = 0; w < WEIGHTS; w++) {
        te_quantizer_destroy(mine->q[w]);
        for (int k = 0; k < 2; k++) {
            free(mine->before[w][k]);
            free(run->posted[s->rank][w][k]);
        }
    }
    free(mine);
}

static const int group_sizes[] = {1, 2, 3, 5};
static void run_all(bool shards, bool manual) {
    for (int i = 0; i < COUNT(group_sizes); i++) {
        uint64_t seed = (uint64_t)(1 + i * 4 + shards * 2 + manual);
        run_ranks(group_sizes[i], quantize_slices, make_run(group_sizes[i], shards, manual, seed));
        if (!test_no_gpu()) run_ranks_on("cuda:0", i % 2, group_sizes[i], quantize_slices, make_run(group_sizes[i], shards, manual, seed + 100));
    }
}
TE_TEST(slices_give_the_bytes_of_the_whole) { run_all(false, false); }
TE_TEST(slices_with_manual_post_processing) { run_all(false, true); }
TE_TEST(slices_into_shards) { run_all(true, false); }
TE_TEST(slices_into_shards_with_manual_post_processing) { run_all(true, true); }

/* ---- refusals ----------------------------------------------------------------------------------------------------- */

static te_tensor *weight_of(te_ctx *te, te_quantizer_desc d, int64_t rows, int64_t cols) {
    te_quantizer *q = te_quantizer_create(te, &d);
    te_tensor *y = te_quantize(q, te_tensor_full(te, TE_BF16, SHAPE(rows, cols), 1.5));
    te_quantizer_destroy(q); /* the tensor keeps it */
    return y;
}
static te_quantizer_desc kind_desc(te_quant_kind kind) {
    te_quantizer_desc d = {0};
    d.kind = kind;
    d.quantization_2d = kind == TE_QUANT_NVFP4 ? TE_ON : TE_DEFAULT;
    return d;
}
static te_result copy_whole(void *user, te_tensor *x, int which, te_tensor **data, te_tensor **scale) {
    (void)user, (void)which, (void)scale;
    *data = te_tensor_cast(x, TE_F32);
    return te_error_code(te_tensor_ctx(x));
}
static te_tensor *value_of(void *user, te_tensor *data, te_tensor *scale, int which, int ndim, const int64_t *shape, te_dtype dtype) {
    (void)user, (void)scale, (void)which, (void)ndim, (void)shape;
    return te_tensor_cast(data, dtype);
}

enum { GOOD = 5, BATCH = GOOD + 1, N = 40 };
typedef struct batch {
    te_ctx *te;
    te_tensor *weight[BATCH], *master[BATCH], *shard[BATCH], *shard_col[BATCH];
    int64_t start[BATCH];
    te_master_weights call;
} batch;

static batch *open_batch(te_ctx *te) {
    static const te_quant_kind kinds[GOOD] = {TE_QUANT_DELAYED, TE_QUANT_CURRENT, TE_QUANT_BLOCK, TE_QUANT_MXFP8, TE_QUANT_NVFP4};
    batch *b = (batch *)test_alloc(sizeof *b);
    b->te = te;
    for (int i = 0; i < BATCH; i++) {
        b->weight[i] = weight_of(te, kind_desc(i < GOOD ? kinds[i] : TE_QUANT_CURRENT), 5, N);
        b->master[i] = test_tensor(te, TE_F32, SHAPE(N), test_normal(N, 3));
        b->start[i] = N;
        b->shard[i] = te_tensor_zeros(te, TE_U8, SHAPE(N));
        b->shard_col[i] = te_tensor_zeros(te, TE_U8, SHAPE(N));
    }
    b->call.model_weights = b->weight;
    b->call.master_weights = b->master;
    b->call.start_offsets = b->start;
    b->call.count = BATCH;
    return b;
}
/* Every byte that a call could change. */
static uint8_t *batch_bytes(batch *b, size_t *size) {
    uint8_t *all = (uint8_t *)test_alloc(1 << 18);
    te_tensor *data, *scale;
    *size = 0;
    for (int i = 0; i < BATCH; i++) {
        te_tensor *part[10];
        int n = 0;
        for (int which = TE_ROWWISE; which <= TE_COLUMNWISE; which++) {
            if (!(te_quantized_usage(b->weight[i]) & which)) continue;
            te_quantized_view(b->weight[i], which, &data, &scale);
            part[n++] = data;
            if (scale) part[n++] = scale;
            if (te_quantized_amax(b->weight[i], which)) part[n++] = te_quantized_amax(b->weight[i], which);
        }
        if (b->shard[i]) part[n++] = b->shard[i];
        if (b->shard_col[i]) part[n++] = b->shard_col[i];
        all[(*size)++] = (uint8_t)te_quantized_usage(b->weight[i]);
        for (int k = 0; k < n; k++) {
            te_tensor_to_host(part[k], all + *size);
            *size += te_tensor_bytes(part[k]);
        }
    }
    return all;
}

/* 448 / amax is infinite below amax 1.3166e-36: the scale is then the largest number of the weight's own format, sliced or whole (api/quant.h, the exceptions). */
TE_TEST_DEVICES(masters_with_tiny_amaxes_have_the_scales_of_the_whole) {
    static const te_dtype formats[] = {TE_BF16, TE_F32};
    static const float amaxes[] = {0x1.c2p-120f, 0x1.cp-120f}; /* bf16's two numbers around 1.3166e-36 */
    for (int i = 0; i < 4; i++) {
        te_dtype dtype = formats[i / 2];
        float amax = amaxes[i % 2], got[4], whole[4]; /* scales [1, 4] */
        te_quantizer_desc d = kind_desc(TE_QUANT_BLOCK);
        test_case("%s, amax %a", te_dtype_name(dtype), (double)amax);
        d.block.fp32_scales = true;
        te_quantizer *q = te_quantizer_create(te, &d);
        te_tensor *plain = te_tensor_full(te, dtype, SHAPE(2, 40), (double)amax), *weight = te_quantize(q, te_tensor_full(te, dtype, SHAPE(2, 40), 1.0)), *data, *scale;
        te_tensor *want = te_quantize(q, plain), *master = te_tensor_full(te, TE_F32, SHAPE(80), (double)amax);
        int64_t start = 0;
        te_master_weights call = {.model_weights = &weight, .master_weights = &master, .start_offsets = &start, .count = 1};
        te_quantize_master_weights(te, &call);
        te_quantized_view(weight, TE_ROWWISE, &data, &scale);
        REQUIRE(te_tensor_numel(scale) == 4);
        te_tensor_to_host(scale, got);
        te_quantized_view(want, TE_ROWWISE, &data, &scale);
        te_tensor_to_host(scale, whole);
        REQUIRE_OK(te);
        CHECK(got[0] == whole[0]);
        CHECK(got[0] == 1.0f / (i % 2 == 0 ? 448.0f / amax : dtype == TE_BF16 ? 0x1.fep127f : 0x1.fffffep127f));
        te_quantizer_destroy(q);
    }
}

TE_TEST_DEVICES(masters_are_refused_before_the_first_byte) {
    static const te_custom_quantizer own = {"own", NULL, copy_whole, value_of, NULL};
    te_ctx *other = test_context("cpu");
    te_quantizer_desc block = kind_desc(TE_QUANT_BLOCK), current = kind_desc(TE_QUANT_CURRENT), d;
    struct {
        const char *needle;
        te_result code;
    } const expected[] = {
        {"belongs to another context", TE_ERR_INVALID}, {"it is NULL", TE_ERR_INVALID},           {"it is plain", TE_ERR_INVALID},
        {"a matrix is needed", TE_ERR_SHAPE},           {"custom quantizer", TE_ERR_INVALID},     {"1 x 128 blocks", TE_ERR_INVALID},
        {"NVFP4 with 1 x 16", TE_ERR_INVALID},          {"NVFP4 with 1 x 16", TE_ERR_INVALID},    {"NVFP4 with 1 x 16", TE_ERR_INVALID},
        {"MXFP8 with 32 x 32", TE_ERR_INVALID},         {"MXFP8 with 32 x 32", TE_ERR_INVALID},   {"hybrid quantizer with block", TE_ERR_INVALID},
        {"hybrid weight with both", TE_ERR_INVALID},    {"needs both copies", TE_ERR_INVALID},    {"no row-wise copy", TE_ERR_INVALID},
        {"column-wise copy alone", TE_ERR_INVALID},     {"column-wise copy alone", TE_ERR_INVALID}, {"master 5 is bf16", TE_ERR_DTYPE},
        {"contiguous f32", TE_ERR_DTYPE},               {"of this context", TE_ERR_DTYPE},        {"begins at -1", TE_ERR_SHAPE},
        {"begins at 161", TE_ERR_SHAPE},                {"the weight has 200", TE_ERR_SHAPE},     {"the shard is NULL", TE_ERR_INVALID},
        {"of 39 bytes", TE_ERR_INVALID},                {"the shard is f32", TE_ERR_INVALID},     {"the shard is u8 of 20 bytes", TE_ERR_INVALID},
        {"the shard is NULL", TE_ERR_INVALID},          {"three lists", TE_ERR_INVALID},          {"-1 weights", TE_ERR_INVALID},
    };
    for (int i = 0; i < COUNT(expected); i++) {
        test_case("refusal %d: %s", i, expected[i].needle);
        te_scope_begin(te);
        batch *b = open_batch(te);
        te_tensor **weight = &b->weight[GOOD], *good = *weight, **master = &b->master[GOOD], *shown;
        bool shards = i == 12 || i == 15 || i == 16 || (i >= 23 && i <= 27);
        d = kind_desc(TE_QUANT_NVFP4);
        if (shards) b->call.shard_weights = b->shard, b->call.shard_columnwise = b->shard_col;
        switch (i) {
        case 0: *weight = weight_of(other, current, 5, N); break;
        case 1: *weight = NULL; break;
        case 2: *weight = te_tensor_zeros(te, TE_BF16, SHAPE(5, N)); break;
        case 3: {
            te_quantizer *q = te_quantizer_create(te, &current);
            *weight = te_quantize(q, te_tensor_zeros(te, TE_BF16, SHAPE(1, 5, N)));
            te_quantizer_destroy(q);
            break;
        }
        case 4: d = kind_desc(TE_QUANT_CUSTOM), d.custom = &own, *weight = weight_of(te, d, 5, N); break;
        case 5: d = block, d.block.block_scaling_dim = 1, *weight = weight_of(te, d, 5, N); break;
        case 6: d.quantization_2d = TE_DEFAULT, *weight = weight_of(te, d, 5, N); break;
        case 7: d.quantization_2d = TE_DEFAULT, d.nvfp4.rht = TE_ON, *weight = weight_of(te, d, 5, N); break;
        case 8: d.nvfp4.stochastic_rounding = TE_ON, *weight = weight_of(te, d, 5, N); break;
        case 9: d = kind_desc(TE_QUANT_MXFP8), d.quantization_2d = TE_ON, *weight = weight_of(te, d, 5, N); break;
        case 10: d = kind_desc(TE_QUANT_MXFP8), d.optimize_for_gemm = true, *weight = weight_of(te, d, 5, N); break;
        case 11: d = kind_desc(TE_QUANT_HYBRID), d.hybrid.rowwise_quantizer = &current, d.hybrid.columnwise_quantizer = &block, *weight = weight_of(te, d, 5, N); break;
        case 12: d = kind_desc(TE_QUANT_HYBRID), d.hybrid.rowwise_quantizer = d.hybrid.columnwise_quantizer = &current, *weight = weight_of(te, d, 5, N); break;
        case 13: d = kind_desc(TE_QUANT_MXFP8), d.usage = TE_ROWWISE, *weight = weight_of(te, d, 5, N); break;
        case 14: d = block, d.usage = TE_COLUMNWISE, *weight = weight_of(te, d, 5, N); break;
        case 15: d = current, d.usage = TE_COLUMNWISE, *weight = weight_of(te, d, 5, N); break;
        case 16: d = kind_desc(TE_QUANT_HYBRID), d.hybrid.rowwise_quantizer = d.hybrid.columnwise_quantizer = &current, d.usage = TE_COLUMNWISE, *weight = weight_of(te, d, 5, N); break;
        case 17: *master = te_tensor_zeros(te, TE_BF16, SHAPE(N)); break;
        case 18: *master = te_tensor_narrow(te_tensor_zeros(te, TE_F32, SHAPE(N, 2)), 1, 0, 1); break;
        case 19: *master = te_tensor_zeros(other, TE_F32, SHAPE(N)); break;
        case 20: b->start[GOOD] = -1; break;
        case 21: b->start[GOOD] = 161; break;
        case 22: *master = te_tensor_zeros(te, TE_F32, SHAPE(201)); break;
        case 23: b->shard[GOOD] = NULL; break;
        case 24: b->shard[GOOD] = te_tensor_zeros(te, TE_U8, SHAPE(N - 1)); break;
        case 25: b->shard[GOOD] = te_tensor_zeros(te, TE_F32, SHAPE(N)); break;
        case 26: d = kind_desc(TE_QUANT_NVFP4), *weight = weight_of(te, d, 5, N), b->start[GOOD] = 1, b->shard[GOOD] = te_tensor_zeros(te, TE_U8, SHAPE(N / 2)); break;
        case 27: *weight = weight_of(te, kind_desc(TE_QUANT_MXFP8), 5, N), b->shard_col[GOOD] = NULL; break;
        case 28: b->call.master_weights = NULL; break;
        default: b->call.count = -1; break;
        }
        CHECK_OK(other);
        REQUIRE_OK(te);
        shown = *weight; /* bytes are read of weights of this context */
        if (i <= 2) *weight = good;
        size_t n, m;
        uint8_t *before = batch_bytes(b, &n);
        if (i <= 2) *weight = shown;
        CHECK_EQ_INT(te_quantize_master_weights(te, &b->call), expected[i].code);
        CHECK_ERROR(te, expected[i].code, expected[i].needle);
        if (i <= 2) *weight = good;
        uint8_t *after = batch_bytes(b, &m);
        CHECK_EQ_INT(n, m);
        CHECK_BYTES("all", after, before, n);
        te_scope_end(te);
    }
    CHECK_EQ_INT(te_quantize_master_weights(te, NULL), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_quantize_master_weights: desc is NULL");
    CHECK_EQ_INT(te_quantize_master_weights(NULL, NULL), TE_ERR_STATE);
    test_case("the batch that the refusals spoil");
    batch *b = open_batch(te);
    size_t n;
    uint8_t *before = batch_bytes(b, &n);
    CHECK_EQ_INT(te_quantize_master_weights(te, &b->call), TE_OK);
    CHECK(memcmp(batch_bytes(b, &n), before, n) != 0);
    CHECK_OK(te);
}

TE_TEST_DEVICES(post_processing_is_refused_before_the_first_byte) {
    te_tensor *list[2] = {weight_of(te, kind_desc(TE_QUANT_CURRENT), 5, N), NULL};
    te_tensor_update_usage(list[0], TE_ROWWISE);
    CHECK_EQ_INT(te_post_all_gather_processing(te, list, 2), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "weight 1 is NULL");
    CHECK_EQ_INT(te_post_all_gather_processing(te, NULL, 1), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "without a list");
    CHECK_EQ_INT(te_quantized_usage(list[0]), TE_ROWWISE);
    list[1] = te_tensor_zeros(te, TE_BF16, SHAPE(3)); /* plain: nothing to do */
    CHECK_EQ_INT(te_post_all_gather_processing(te, list, 2), TE_OK);
    CHECK_EQ_INT(te_quantized_usage(list[0]), TE_ROWWISE | TE_COLUMNWISE);
    CHECK_OK(te);
}

/* Weights that share a quantizer, and with it the scale and the amax of delayed scaling: the largest of them all is recorded. */
TE_TEST_DEVICES(masters_of_weights_that_share_a_quantizer) {
    te_quantizer_desc d = kind_desc(TE_QUANT_DELAYED);
    d.delayed.amax = te_tensor_zeros(te, TE_F32, SHAPE(1));
    te_quantizer *q = te_quantizer_create(te, &d);
    te_tensor *weight[3], *master[3];
    const int64_t start[3] = {0, 0, 0};
    const double most[3] = {2, 7, 5};
    for (int i = 0; i < 3; i++) {
        weight[i] = te_quantize(q, te_tensor_zeros(te, TE_BF16, SHAPE(4, 4)));
        master[i] = te_tensor_full(te, TE_F32, SHAPE(16), most[i]);
    }
    te_master_weights call = {0};
    call.model_weights = weight;
    call.master_weights = master;
    call.start_offsets = start;
    call.count = 3;
    CHECK_EQ_INT(te_quantize_master_weights(te, &call), TE_OK);
    CHECK(test_read(d.delayed.amax)[0] == 7);
    for (int i = 0; i < 3; i++) CHECK(test_read(te_dequantize(weight[i], TE_F32))[9] == most[i]);
    CHECK_OK(te);
    te_quantizer_destroy(q);
}

/* One rank that cannot go on stops all, before a byte has changed on any; the group goes on. */
static void refuse_on_one(rank_state *s) {
    te_tensor *weight[2], *master[2];
    const int64_t start[2] = {0, 0};
    te_master_weights call = {0};
    call.model_weights = weight;
    call.master_weights = master;
    call.start_offsets = start;
    call.count = 2;
    call.group = s->group;
    for (int turn = 0; turn < 3; turn++) { /* the last: nobody refuses */
        size_t n;
        weight[0] = weight_of(s->te, kind_desc(TE_QUANT_DELAYED), 3, 5);
        weight[1] = weight_of(s->te, kind_desc(turn == 1 ? TE_QUANT_IDENTITY : TE_QUANT_CURRENT), 3, 5);
        master[0] = te_tensor_full(s->te, TE_F32, SHAPE(15), 3);
        master[1] = te_tensor_full(s->te, turn < 2 && s->rank == 1 ? TE_F16 : TE_F32, SHAPE(15), 3);
        if (turn == 1) weight[0] = weight[1]; /* without a single amax ranks meet too */
        uint8_t *before = host_of(data_of(weight[0], 0), &n), *after;
        te_result result = te_quantize_master_weights(s->te, &call);
        if (turn < 2) {
            EXPECT(s, result == TE_ERR_DTYPE && strstr(te_error(s->te), s->rank == 1 ? "master 1 is f16" : "rank 1 failed"));
            te_clear_error(s->te);
        } else
            EXPECT(s, result == TE_OK);
        after = host_of(data_of(weight[0], 0), &n);
        EXPECT(s, (memcmp(before, after, n) == 0) == (turn < 2));
        free(before);
        free(after);
    }
}
TE_TEST(one_rank_that_refuses_stops_all) { run_ranks(3, refuse_on_one, NULL); }
