/* test_moe.c: mixtures of experts: maps against the rows counted by hand, permutation there and back, the router against float64 by sorting, the auxiliary loss,
 * gradients against differences; no tokens, one expert, experts without tokens, dropped copies, maps that are wrong, and complaints. */
#include "../te_test.h"

static const te_dtype floats[] = {TE_F32, TE_F16, TE_BF16};

/* Which experts tokens go to: each of `topk` of E, now and then fewer, never those from `empty` on. */
static uint8_t *random_mask(int64_t tokens, int64_t experts, int64_t topk, int64_t empty, uint64_t seed) {
    uint8_t *mask = (uint8_t *)test_alloc((size_t)(tokens * experts + 1));
    int64_t *pick = test_integers(tokens * topk + 1, seed, 0, empty);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t k = 0; k < topk; k++) mask[t * experts + pick[t * topk + k]] = 1;
    return mask;
}
/* As a tensor of any format that a mask may have. */
static te_tensor *mask_tensor(te_ctx *te, te_dtype dtype, int64_t tokens, int64_t experts, const uint8_t *mask) {
    int64_t n = tokens * experts, *wide = (int64_t *)test_alloc((size_t)(n + 1) * sizeof(int64_t));
    int32_t *narrow = (int32_t *)test_alloc((size_t)(n + 1) * sizeof(int32_t));
    for (int64_t i = 0; i < n; i++) {
        wide[i] = mask[i] ? (int64_t)1 << 40 : 0; /* "not 0" of all bits */
        narrow[i] = mask[i] ? -7 : 0;
    }
    return te_tensor_from_host(te, dtype, SHAPE(tokens, experts), dtype == TE_I64 ? (const void *)wide : dtype == TE_I32 ? (const void *)narrow : (const void *)mask);
}
/* The row of each copy [T, E], or -1; counts [E]. */
static int64_t *expected_rows(int64_t tokens, int64_t experts, const uint8_t *mask, int64_t *counts) {
    int64_t *row = (int64_t *)test_alloc((size_t)(tokens * experts + 1) * sizeof(int64_t)), next = 0;
    for (int64_t e = 0; e < experts; e++) {
        counts[e] = 0;
        for (int64_t t = 0; t < tokens; t++) {
            row[t * experts + e] = mask[t * experts + e] ? next++ : -1;
            counts[e] += mask[t * experts + e];
        }
    }
    return row;
}
static te_tensor *make_mask_map(te_ctx *te, te_tensor *mask) {
    const int64_t *shape = te_tensor_shape(mask);
    te_tensor *map = test_guarded(te, TE_I32, SHAPE(shape[0], 2 * shape[1] + 1));
    te_op_moe_mask_map_args a = {.routing_map = mask, .row_id_map = map};
    te_op_moe_mask_map(te, &a);
    return map;
}

TE_TEST_DEVICES(moe_mask_map) {
    const int64_t sizes[][4] = {{1, 1, 1, 1}, {0, 5, 1, 5}, {7, 3, 2, 2}, {130, 8, 2, 8}, {300, 40, 6, 33}, {1025, 257, 4, 257}, {5, 300, 300, 300}};
    const te_dtype formats[] = {TE_U8, TE_I32, TE_I64};
    for (int i = 0; i < COUNT(sizes) * 3; i += test_every(2)) {
        int64_t tokens = sizes[i / 3][0], experts = sizes[i / 3][1], width = 2 * experts + 1;
        test_case("T=%lld E=%lld %s", (long long)tokens, (long long)experts, te_dtype_name(formats[i % 3]));
        uint8_t *mask = random_mask(tokens, experts, sizes[i / 3][2], sizes[i / 3][3], 7);
        int64_t *counts = (int64_t *)test_alloc((size_t)(experts + 1) * sizeof(int64_t)), *row = expected_rows(tokens, experts, mask, counts);
        te_tensor *map = test_guarded(te, TE_I32, SHAPE(tokens, width)), *got_counts = test_guarded(te, i % 2 ? TE_I64 : TE_I32, SHAPE(experts));
        te_op_moe_mask_map_args a = {.routing_map = mask_tensor(te, formats[i % 3], tokens, experts, mask), .row_id_map = map, .tokens_per_expert = got_counts};
        te_op_moe_mask_map(te, &a);
        REQUIRE_OK(te);
        int32_t *got = (int32_t *)test_alloc((size_t)(tokens * width + 1) * sizeof(int32_t));
        te_tensor_to_host(map, got);
        float *c = test_read(got_counts);
        int64_t bad = 0;
        for (int64_t e = 0; e < experts; e++) bad += (int64_t)c[e] != counts[e];
        for (int64_t t = 0; t < tokens; t++) {
            int64_t n = 0;
            for (int64_t e = experts - 1; e >= 0; e--) { /* rows descend with the experts */
                if (row[t * experts + e] < 0) continue;
                bad += got[t * width + n] != row[t * experts + e] || got[t * width + experts + n] != e;
                n++;
            }
            bad += got[t * width + 2 * experts] != n;
            for (; n < experts; n++) bad += got[t * width + n] != -1 || got[t * width + experts + n] != -1;
        }
        CHECK_EQ_INT(bad, 0);
    }
}

TE_TEST_DEVICES(moe_index_map) {
    const int64_t sizes[][3] = {{1, 1, 0}, {0, 2, 0}, {5, 2, 7}, {1000, 3, 0}, {2100, 2, 4000}};
    for (int i = 0; i < COUNT(sizes) * 2; i++) {
        int64_t tokens = sizes[i / 2][0], topk = sizes[i / 2][1], kept = sizes[i / 2][2], n = tokens * topk;
        te_dtype dtype = i % 2 ? TE_I64 : TE_I32;
        test_case("T=%lld topk=%lld kept=%lld %s", (long long)tokens, (long long)topk, (long long)kept, te_dtype_name(dtype));
        int64_t *id = test_integers(n + 1, 3, -1, 70000); /* -1 is the largest */
        int32_t *narrow = (int32_t *)test_alloc((size_t)(n + 1) * sizeof(int32_t)), *got = (int32_t *)test_alloc((size_t)(n + 1) * sizeof(int32_t));
        for (int64_t k = 0; k < n; k++) narrow[k] = (int32_t)(id[k] %= i < 6 ? 3 : 70000);
        te_tensor *map = test_guarded(te, TE_I32, SHAPE(n));
        te_op_moe_index_map_args a = {.experts = te_tensor_from_host(te, dtype, SHAPE(tokens, topk), i % 2 ? (const void *)id : (const void *)narrow), .row_id_map = map, .num_out_tokens = kept};
        te_op_moe_index_map(te, &a);
        REQUIRE_OK(te);
        te_tensor_to_host(map, got);
        int64_t bad = 0;
        for (int64_t k = 0; k < n; k++) { /* the rank of item k */
            int64_t rank = 0;
            for (int64_t j = 0; j < n; j++) rank += (uint32_t)narrow[j] < (uint32_t)narrow[k] || (narrow[j] == narrow[k] && j < k);
            bad += got[k % topk * tokens + k / topk] != (kept && rank >= kept ? -1 : (int32_t)rank);
        }
        CHECK_EQ_INT(bad, 0);
    }
}

static te_tensor *index_tensor_of(te_ctx *te, te_dtype dtype, int64_t n, const int64_t *values) {
    int32_t *narrow = (int32_t *)test_alloc((size_t)(n + 1) * sizeof(int32_t));
    for (int64_t i = 0; i < n; i++) narrow[i] = (int32_t)values[i];
    return te_tensor_from_host(te, dtype, SHAPE(n), dtype == TE_I64 ? (const void *)values : (const void *)narrow);
}

/* Places of experts on a rank, and their counts; Automodel's vectors among them: from 4 of 8 on each gets one; padding counts for nobody; nobody at all. */
TE_TEST_DEVICES(moe_local_ids) {
    const int64_t sizes[][4] = {{4, 2, 4, 4}, {0, 2, 0, 3}, {5, 1, 7, 1}, {1000, 3, 2, 5}, {700, 8, 0, 256}}; /* tokens, topk, first, count */
    for (int i = 0; i < COUNT(sizes) * 2; i++) {
        int64_t tokens = sizes[i / 2][0], topk = sizes[i / 2][1], first = sizes[i / 2][2], count = sizes[i / 2][3], n = tokens * topk, bad = 0;
        test_case("T=%lld topk=%lld first=%lld count=%lld", (long long)tokens, (long long)topk, (long long)first, (long long)count);
        int64_t *id = test_integers(n + 1, 3, -2, first + count + 3), want[256] = {0};
        uint8_t *dropped = (uint8_t *)test_alloc((size_t)tokens + 1);
        for (int64_t t = 0; t < tokens; t++) dropped[t] = t % 3 == 1;
        if (i < 2) memcpy(id, (const int64_t[]){0, 4, 1, 5, 2, 6, 3, 7}, 64);
        te_tensor *local = test_guarded(te, TE_I32, SHAPE(tokens, topk)), *counts = test_guarded(te, i % 2 ? TE_I32 : TE_I64, SHAPE(count));
        te_op_moe_local_ids_args a = {.experts = te_tensor_view(index_tensor_of(te, i % 2 ? TE_I64 : TE_I32, n, id), SHAPE(tokens, topk)), .local = local, .tokens_per_expert = counts, .first = first, .count = count};
        if (i % 2) a.dropped = te_tensor_from_host(te, TE_U8, SHAPE(tokens), dropped);
        te_op_moe_local_ids(te, &a);
        REQUIRE_OK(te);
        float *got = test_read(local), *sum = test_read(counts);
        for (int64_t k = 0; k < n; k++) {
            int64_t e = id[k] - first;
            if (e < 0 || e >= count || (i % 2 && dropped[k / topk])) e = -1;
            else want[e]++;
            bad += got[k] != e;
        }
        for (int64_t e = 0; e < count; e++) bad += sum[e] != want[e];
        CHECK_EQ_INT(bad, 0);
        if (i == 0) CHECK(want[0] == 1 && want[1] == 1 && want[2] == 1 && want[3] == 1);
    }
    te_op_moe_local_ids_args a = {.experts = te_tensor_zeros(te, TE_I32, SHAPE(2, 2)), .local = te_tensor_zeros(te, TE_I32, SHAPE(2, 2)), .tokens_per_expert = te_tensor_zeros(te, TE_I32, SHAPE(3)), .count = 4};
    te_op_moe_local_ids(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "tokens_per_expert is [3]; 4 elements");
    a.count = 0;
    te_op_moe_local_ids(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "0 experts from number 0 on");
}

TE_TEST_DEVICES(moe_splits_and_chunks) {
    const int64_t sizes[] = {3, 0, 5, -2, 1, 16, 0}, order[] = {4, 2, 0, 6, 5, 1, 3};
    enum { N = COUNT(sizes), T = 30 /* five rows are in no chunk */ };
    for (int wide = 0; wide < 2; wide++) {
        te_dtype dtype = wide ? TE_I64 : TE_I32;
        te_tensor *device = index_tensor_of(te, dtype, N, sizes), *padded = test_guarded(te, dtype, SHAPE(N)), *offsets = test_guarded(te, wide ? TE_I32 : TE_I64, SHAPE(N));
        te_op_moe_splits_args s = {.sizes = device, .padded = padded, .offsets = offsets, .align = 4};
        te_op_moe_splits(te, &s);
        REQUIRE_OK(te);
        float *p = test_read(padded), *o = test_read(offsets);
        int64_t padding = 0;
        for (int i = 0; i < N; i++) {
            int64_t size = sizes[i] > 0 ? sizes[i] : 0, up = (size + 3) / 4 * 4;
            CHECK_EQ_INT(p[i], up);
            CHECK_EQ_INT(o[i], padding);
            padding += up - size;
        }
        te_op_moe_splits_args h = {.padded = padded};
        memcpy(h.values, sizes, sizeof(sizes));
        te_op_moe_splits(te, &h);
        REQUIRE_OK(te);
        p = test_read(padded);
        for (int i = 0; i < N; i++) CHECK_EQ_INT(p[i], sizes[i] > 0 ? sizes[i] : 0);

        for (int padding_too = 0; padding_too < 2; padding_too++) {
            te_tensor *map = test_guarded(te, TE_I32, SHAPE(T));
            te_op_moe_chunk_map_args c = {.sizes = device, .sorted_index = padding_too ? NULL : index_tensor_of(te, dtype, N, order), .offsets = padding_too ? offsets : NULL, .row_id_map = map};
            te_op_moe_chunk_map(te, &c);
            REQUIRE_OK(te);
            float *got = test_read(map);
            int64_t row = 0, t = 0, bad = 0;
            if (padding_too)
                for (int i = 0; i < N; i++) {
                    int64_t size = sizes[i] > 0 ? sizes[i] : 0;
                    for (int64_t k = 0; k < size; k++) bad += got[t++] != (float)(row + k);
                    row += (size + 3) / 4 * 4;
                }
            else
                for (int i = 0; i < N; i++, t = 25) {
                    int64_t begin = 0, size = sizes[order[i]] > 0 ? sizes[order[i]] : 0;
                    for (int64_t k = 0; k < order[i]; k++) begin += sizes[k] > 0 ? sizes[k] : 0;
                    for (int64_t k = 0; k < size; k++) bad += got[begin + k] != (float)row++;
                }
            for (; t < T; t++) bad += got[t] != (padding_too ? -1.0f : (float)t);
            CHECK_EQ_INT(bad, 0);
        }
    }
}

/* Rows there and back, with and without probabilities and padding, to the bit: rows are moved, or sums of few numbers rounded once. */
/* a b + c, rounded once; MinGW's fmaf rounds twice. The product is exact in double. Their sum is rounded to odd, so that rounding it to float sees on which
 * side of a tie it lies. */
static float fused(float a, float b, float c) {
    const double p = (double)a * (double)b, s = p + (double)c, t = s - p, error = (p - (s - t)) + ((double)c - t);
    double odd = s;
    uint64_t bits;
    memcpy(&bits, &s, sizeof bits);
    if (error != 0 && isfinite(s) && !(bits & 1)) {
        bits += (error > 0) == (s > 0) ? 1 : UINT64_MAX;
        memcpy(&odd, &bits, sizeof bits);
    }
    return (float)odd;
}

typedef struct permute_case {
    int64_t tokens, experts, topk, empty, h, align, dropped;
    te_dtype x, probs;
} permute_case;

static void run_permute(te_ctx *te, const permute_case *c) {
    int64_t tokens = c->tokens, experts = c->experts, h = c->h, total = 0;
    test_case("T=%lld E=%lld topk=%lld H=%lld align=%lld dropped=%lld %s probs %s", (long long)tokens, (long long)experts, (long long)c->topk, (long long)h, (long long)c->align,
              (long long)c->dropped, te_dtype_name(c->x), te_dtype_name(c->probs));
    uint8_t *mask = random_mask(tokens, experts, c->topk, c->empty, 11);
    int64_t *counts = (int64_t *)test_alloc((size_t)(experts + 1) * sizeof(int64_t)), *row = expected_rows(tokens, experts, mask, counts);
    for (int64_t e = 0; e < experts; e++) { /* padding moves an expert's rows on */
        int64_t padding = (counts[e] + c->align - 1) / c->align * c->align - counts[e];
        total += counts[e] + padding;
        for (int64_t later = e + 1; later < experts; later++)
            for (int64_t t = 0; t < tokens; t++)
                if (row[t * experts + later] >= 0) row[t * experts + later] += padding;
    }
    int64_t rows = total + 3 - c->dropped;
    if (rows < 0) rows = 0;
    float *x = test_rounded(c->x, test_normal(tokens * h + 1, 1), tokens * h), *p = test_rounded(c->probs, test_uniform(tokens * experts + 1, 2, 0.1f, 1.0f), tokens * experts);
    for (int64_t i = 0; i < tokens * experts; i += 5) p[i] = 0.0f;
    te_tensor *map = make_mask_map(te, mask_tensor(te, TE_U8, tokens, experts, mask)), *xt = test_tensor(te, c->x, SHAPE(tokens, h), x);
    te_tensor *probs = test_tensor(te, c->probs, SHAPE(tokens, experts), p), *offsets = NULL;
    if (c->align > 1) {
        te_tensor *padded = te_tensor_empty(te, TE_I32, SHAPE(experts));
        offsets = te_tensor_empty(te, TE_I64, SHAPE(experts));
        te_op_moe_splits_args s = {.sizes = index_tensor_of(te, TE_I64, experts, counts), .padded = padded, .offsets = offsets, .align = c->align};
        te_op_moe_splits(te, &s);
    }
    te_tensor *y = test_guarded(te, c->x, SHAPE(rows, h)), *moved = test_guarded(te, c->probs, SHAPE(rows));
    te_op_moe_permute_args a = {.x = xt, .row_id_map = map, .pad_offsets = offsets, .probs = probs, .y = y, .permuted_probs = moved};
    te_op_moe_permute(te, &a);
    REQUIRE_OK(te);
    float *want = test_floats(rows * h), *want_p = test_floats(rows);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t e = 0; e < experts; e++) {
            int64_t r = row[t * experts + e];
            if (r < 0 || r >= rows) continue;
            want_p[r] = p[t * experts + e];
            for (int64_t i = 0; i < h && want_p[r] != 0.0f; i++) want[r * h + i] = x[t * h + i];
        }
    CHECK_TENSOR(y, want, 0, 0);
    CHECK_TENSOR(moved, want_p, 0, 0);

    /* Back, times probabilities: a sum of at most topk numbers, rounded once. */
    float *g = test_rounded(c->x, test_normal(rows * h + 1, 3), rows * h), *gp = test_rounded(c->probs, test_normal(rows + 1, 4), rows), *sum = test_floats(tokens * h),
          *back = test_floats(tokens * experts), *dot = test_floats(tokens * experts), *dy = test_rounded(c->x, test_normal(tokens * h + 1, 5), tokens * h),
          *dx = test_floats(rows * h);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t e = experts - 1; e >= 0; e--) {
            int64_t r = row[t * experts + e];
            double d = 0;
            if (r < 0 || r >= rows) continue;
            back[t * experts + e] = gp[r];
            for (int64_t i = 0; i < h; i++) {
                sum[t * h + i] = fused(g[r * h + i], p[t * experts + e], sum[t * h + i]);
                d += (double)dy[t * h + i] * (double)g[r * h + i];
                dx[r * h + i] = dy[t * h + i] * p[t * experts + e];
            }
            dot[t * experts + e] = (float)d;
        }
    te_tensor *gt = test_tensor(te, c->x, SHAPE(rows, h), g), *out = test_guarded(te, c->x, SHAPE(tokens, h)), *out_p = test_guarded(te, c->probs, SHAPE(tokens, experts));
    te_op_moe_unpermute_args u = {.x = gt, .row_id_map = map, .pad_offsets = offsets, .merging_probs = probs, .permuted_probs = test_tensor(te, c->probs, SHAPE(rows), gp), .y = out, .probs = out_p};
    te_op_moe_unpermute(te, &u);
    REQUIRE_OK(te);
    CHECK_TENSOR(out, test_rounded(c->x, sum, tokens * h), 0, 0);
    CHECK_TENSOR(out_p, back, 0, 0);
    te_tensor *got_dx = test_guarded(te, c->x, SHAPE(rows, h)), *dprobs = test_guarded(te, TE_F32, SHAPE(tokens, experts));
    te_op_moe_unpermute_bwd_args b = {.dy = test_tensor(te, c->x, SHAPE(tokens, h), dy), .x = gt, .row_id_map = map, .pad_offsets = offsets, .merging_probs = probs, .dx = got_dx, .dprobs = dprobs};
    te_op_moe_unpermute_bwd(te, &b);
    REQUIRE_OK(te);
    CHECK_TENSOR(got_dx, test_rounded(c->x, dx, rows * h), 0, 0);
    CHECK_TENSOR(dprobs, dot, 1e-5, 1e-5 * sqrt((double)(h + 1))); /* sums of h products in f32, in another order */
}

TE_TEST_DEVICES(moe_permute_and_back) {
    const permute_case cases[] = {
        {1, 1, 1, 1, 1, 1, 0, TE_F32, TE_F32},     {40, 8, 2, 8, 64, 1, 0, TE_BF16, TE_F32},   {33, 5, 3, 4, 17, 1, 0, TE_F16, TE_BF16},  {257, 16, 4, 9, 264, 1, 0, TE_BF16, TE_BF16},
        {130, 8, 2, 6, 128, 16, 0, TE_BF16, TE_F32}, {130, 8, 2, 6, 30, 32, 0, TE_F32, TE_F16}, {50, 4, 2, 4, 40, 1, 20, TE_BF16, TE_F32}, {0, 4, 2, 4, 8, 1, 0, TE_F32, TE_F32},
        {9, 3, 2, 3, 0, 4, 0, TE_F32, TE_F32},     {20, 70, 3, 70, 2100, 8, 0, TE_F32, TE_F32}, {9, 3, 2, 3, 8, 1, 100, TE_F32, TE_F32}};
    for (int i = 0; i < COUNT(cases); i++) run_permute(te, &cases[i]);
}

/* Codes and other bytes are moved as they are, by an index map. */
TE_TEST_DEVICES(moe_permute_bytes_by_index) {
    enum { T = 37, K = 3, KEPT = 90 };
    int64_t *id = test_integers(T * K, 5, 0, 6);
    te_tensor *map = te_tensor_empty(te, TE_I32, SHAPE(K, T));
    te_op_moe_index_map_args m = {.experts = te_tensor_from_host(te, TE_I64, SHAPE(T, K), id), .row_id_map = map, .num_out_tokens = KEPT};
    te_op_moe_index_map(te, &m);
    for (int64_t h = 1; h < 50; h += 15) {
        uint8_t *x = (uint8_t *)test_alloc((size_t)(T * h)), *got = (uint8_t *)test_alloc((size_t)(KEPT * h)), *want = (uint8_t *)test_alloc((size_t)(KEPT * h));
        for (int64_t i = 0; i < T * h; i++) x[i] = (uint8_t)(i * 37 + 11);
        te_tensor *y = test_guarded(te, TE_F8E4M3, SHAPE(KEPT, h));
        te_op_moe_permute_args a = {.x = te_tensor_from_host(te, TE_F8E4M3, SHAPE(T, h), x), .row_id_map = map, .topk = K, .y = y};
        te_op_moe_permute(te, &a);
        REQUIRE_OK(te);
        te_tensor_to_host(y, got);
        for (int64_t k = 0, row = 0; k < 6; k++)
            for (int64_t i = 0; i < T * K; i++)
                if (id[i] == k && row < KEPT) memcpy(want + row++ * h, x + i / K * h, (size_t)h);
        CHECK_BYTES("rows", got, want, (size_t)(KEPT * h));
    }
}

/* A map that points outside, or sends two copies to one row, touches nothing else, and gives the same each time. */
TE_TEST_DEVICES(moe_wrong_maps_touch_nothing) {
    enum { T = 6, E = 3, H = 8, R = 5 };
    int32_t map[T][2 * E + 1];
    for (int t = 0; t < T; t++)
        for (int i = 0; i < 2 * E + 1; i++) map[t][i] = (t * 7 + i * 5) % 11 - 3 + (t == 4 ? 1 << 30 : 0);
    te_tensor *m = te_tensor_from_host(te, TE_I32, SHAPE(T, 2 * E + 1), map), *x = te_tensor_normal(te, TE_F32, SHAPE(T, H), 0, 1);
    te_tensor *y = test_guarded(te, TE_F32, SHAPE(R, H)), *z = test_guarded(te, TE_F32, SHAPE(R, H)), *u = test_guarded(te, TE_F32, SHAPE(T, H));
    te_op_moe_permute_args a = {.x = x, .row_id_map = m, .y = y}, again = {.x = x, .row_id_map = m, .y = z};
    te_op_moe_unpermute_args b = {.x = y, .row_id_map = m, .y = u};
    te_op_moe_permute(te, &a);
    te_op_moe_permute(te, &again);
    te_op_moe_unpermute(te, &b);
    REQUIRE_OK(te);
    CHECK_TENSOR(z, test_read(y), 0, 0);
    for (int i = 0; i < R * H; i++) CHECK(isfinite(test_read(y)[i]));
}

/* ---- router ---- */

typedef struct router_case {
    int64_t tokens, experts;
    int topk, groups, group_topk;
    te_score_function f;
    bool pre, bias, all;
    float scaling;
    bool zero; /* other groups' keys are 0 */
} router_case;

static double score(te_score_function f, double x) { return f == TE_SCORE_SIGMOID ? 1 / (1 + exp(-x)) : sqrt(log1p(exp(x))); }
/* One token: probabilities, and who is chosen. */
static void route(const router_case *c, const double *x, const float *bias, double *y, uint8_t *chosen) {
    int64_t n = c->experts;
    double *s = test_doubles(n), *key = test_doubles(n), sum = 0;
    bool softmax = c->f == TE_SCORE_SOFTMAX;
    for (int64_t e = 0; e < n; e++) sum += softmax ? exp(x[e]) : score(c->f, x[e]);
    for (int64_t e = 0; e < n; e++) {
        s[e] = softmax ? (c->pre || c->all ? exp(x[e]) / sum : x[e]) : score(c->f, x[e]) / (c->all ? sum + 1e-20 : 1);
        key[e] = s[e] + (c->bias ? (double)bias[e] : 0);
    }
    if (c->groups) {
        int64_t size = n / c->groups;
        double *worth = test_doubles(c->groups);
        for (int g = 0; g < c->groups; g++) {
            double *sorted = test_doubles(size);
            memcpy(sorted, key + g * size, (size_t)size * sizeof(double));
            for (int64_t i = 0; i < size; i++)
                for (int64_t k = i + 1; k < size; k++)
                    if (sorted[k] > sorted[i]) {
                        double swap = sorted[i];
                        sorted[i] = sorted[k];
                        sorted[k] = swap;
                    }
            for (int i = 0; i < c->topk / c->group_topk && i < size; i++) worth[g] += sorted[i];
        }
        for (int g = 0; g < c->groups; g++) {
            int better = 0;
            for (int o = 0; o < c->groups; o++) better += worth[o] > worth[g] || (worth[o] == worth[g] && o < g);
            for (int64_t e = g * size; better >= c->group_topk && e < (g + 1) * size; e++) key[e] = c->zero ? 0 : -INFINITY;
        }
    }
    sum = 0;
    for (int64_t e = 0; e < n; e++) {
        int better = 0;
        for (int64_t o = 0; o < n; o++) better += key[o] > key[e] || (key[o] == key[e] && o < e);
        chosen[e] = better < c->topk;
        if (chosen[e]) sum += softmax && !c->pre ? exp(x[e]) : s[e];
    }
    for (int64_t e = 0; e < n; e++) {
        if (c->all) y[e] = s[e];
        else if (!chosen[e]) y[e] = 0;
        else if (softmax) y[e] = (c->pre ? s[e] : exp(x[e]) / sum) * (double)c->scaling;
        else y[e] = (c->topk > 1 ? s[e] / (sum + 1e-20) : s[e]) * (double)c->scaling;
    }
}
/* Logits of which no two of a token are so close that rounding exchanges them. */
static float *distinct_logits(int64_t tokens, int64_t experts, uint64_t seed) {
    float *x = test_floats(tokens * experts);
    float *noise = test_uniform(tokens * experts + 1, seed, 0, 1);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t e = 0; e < experts; e++) {
            int64_t rank = 0;
            for (int64_t o = 0; o < experts; o++) rank += noise[t * experts + o] < noise[t * experts + e];
            x[t * experts + e] = ((float)rank - (float)experts / 2 + 0.3f * noise[t * experts + e]) * (6.0f / (float)experts); /* sums of groups differ, too */
        }
    return x;
}

static const router_case router_cases[] = {
    {5, 8, 2, 0, 0, TE_SCORE_SOFTMAX, false, false, false, 1, false},      {40, 8, 2, 0, 0, TE_SCORE_SOFTMAX, true, false, false, 2.5f, false},  {33, 64, 6, 8, 3, TE_SCORE_SIGMOID, false, true, false, 2.5f, false},
    {17, 60, 4, 0, 0, TE_SCORE_SQRTSOFTPLUS, false, true, false, 1, false}, {9, 16, 1, 0, 0, TE_SCORE_SIGMOID, false, false, false, 1, false},    {7, 16, 1, 0, 0, TE_SCORE_SQRTSOFTPLUS, false, false, false, 0.5f, false},
    {12, 32, 4, 4, 2, TE_SCORE_SOFTMAX, true, false, false, 1, false},     {12, 32, 4, 4, 2, TE_SCORE_SOFTMAX, false, false, false, 1, false},   {6, 100, 3, 0, 0, TE_SCORE_SOFTMAX, false, false, true, 1, false},
    {6, 40, 3, 0, 0, TE_SCORE_SIGMOID, false, false, true, 1, false},      {6, 40, 1, 0, 0, TE_SCORE_SQRTSOFTPLUS, false, false, true, 1, false}, {3, 1, 1, 0, 0, TE_SCORE_SOFTMAX, false, false, false, 1, false},
    {4, 300, 300, 0, 0, TE_SCORE_SIGMOID, false, false, false, 1, false},  {0, 8, 2, 0, 0, TE_SCORE_SOFTMAX, false, false, false, 1, false},     {40, 64, 6, 8, 2, TE_SCORE_SOFTMAX, true, true, false, 1, true},
    {12, 32, 16, 4, 1, TE_SCORE_SOFTMAX, true, true, false, 1, true}, {12, 32, 4, 4, 2, TE_SCORE_SOFTMAX, false, false, false, 1, true}};

TE_TEST_DEVICES(moe_router) {
    static const te_dtype ids_formats[] = {TE_I16, TE_I32, TE_I64};
    for (int i = 0; i < COUNT(router_cases) * 3; i++) {
        const router_case *c = &router_cases[i / 3];
        te_dtype dtype = floats[i % 3];
        int64_t tokens = c->tokens, n = c->experts, bytes = (n + 7) / 8;
        if (dtype != TE_F32 && n > 64) continue; /* steps between logits would be lost */
        test_case("T=%lld E=%lld topk=%d groups=%d zero=%d f=%d pre=%d all=%d %s", (long long)tokens, (long long)n, c->topk, c->groups, c->zero, (int)c->f, c->pre, c->all, te_dtype_name(dtype));
        float *x = test_rounded(dtype, distinct_logits(tokens, n, 5), tokens * n), *bias = test_rounded(TE_BF16, test_uniform(n + 1, 6, -0.5f, 0.5f), n);
        te_tensor *probs = test_guarded(te, c->all ? TE_F32 : dtype, SHAPE(tokens, n)), *map = test_guarded(te, TE_U8, SHAPE(tokens, n)), *bits = test_guarded(te, TE_U8, SHAPE(tokens, bytes));
        te_tensor *indices = test_guarded(te, ids_formats[(i + i / 3) % 3], SHAPE(tokens, c->topk));
        te_op_moe_router_fwd_args a = {.logits = test_tensor(te, dtype, SHAPE(tokens, n), x), .expert_bias = c->bias ? test_tensor(te, TE_BF16, SHAPE(n), bias) : NULL, .probs = probs,
                                       .routing_map = map, .routing_bits = bits, .topk_indices = indices, .topk = c->topk, .score_function = c->f, .use_pre_softmax = c->pre,
                                       .num_groups = c->groups, .group_topk = c->group_topk, .scaling_factor = c->scaling, .all_scores = c->all,
                                       .zero_other_groups = c->zero};
        te_op_moe_router_fwd(te, &a);
        REQUIRE_OK(te);
        float *want = test_floats(tokens * n), *ids = test_read(indices), *got_bits = test_read(bits);
        uint8_t *chosen = (uint8_t *)test_alloc((size_t)(tokens * n + 1)), *got = (uint8_t *)test_alloc((size_t)(tokens * n + 1));
        te_tensor_to_host(map, got);
        for (int64_t t = 0; t < tokens; t++) {
            double *row = test_doubles(n), *y = test_doubles(n);
            for (int64_t e = 0; e < n; e++) row[e] = (double)x[t * n + e];
            route(c, row, bias, y, chosen + t * n);
            for (int64_t e = 0; e < n; e++) want[t * n + e] = (float)y[e];
            for (int k = 0; k < c->topk; k++) {
                int64_t e = (int64_t)ids[t * c->topk + k];
                CHECK(e >= 0 && e < n && chosen[t * n + e] == 1);
                chosen[t * n + e] = 3; /* each once */
            }
            for (int64_t e = 0; e < n; e++) {
                CHECK(chosen[t * n + e] != 1);
                chosen[t * n + e] = chosen[t * n + e] == 3;
                CHECK_EQ_INT((int)got_bits[t * bytes + e / 8] >> e % 8 & 1, chosen[t * n + e]);
            }
        }
        CHECK_BYTES("routing map", got, chosen, (size_t)(tokens * n));
        /* f32 functions of a few units in the last place, and one rounding. */
        CHECK_TENSOR(probs, want, c->all || dtype == TE_F32 ? 1e-5 : dtype == TE_F16 ? 1e-3 : 8e-3, 1e-6);
    }
}

/* Experts in 16 bits: the same ones, and the same gradient; nothing else takes them as ids. */
TE_TEST_DEVICES(moe_router_indices_of_16_bits) {
    enum { T = 37, E = 300, K = 5 };
    te_tensor *logits = test_tensor(te, TE_F32, SHAPE(T, E), distinct_logits(T, E, 5)), *dprobs = test_tensor(te, TE_F32, SHAPE(T, K), test_normal(T * K, 6));
    float *ids[2], *probs[2], *gradient[2];
    for (int narrow = 0; narrow < 2; narrow++) {
        te_tensor *indices = test_guarded(te, narrow ? TE_I16 : TE_I32, SHAPE(T, K)), *p = test_guarded(te, TE_F32, SHAPE(T, K)), *d = test_guarded(te, TE_F32, SHAPE(T, E));
        te_op_moe_router_fwd_args f = {.logits = logits, .topk_indices = indices, .topk_probs = p, .topk = K};
        te_op_moe_router_fwd(te, &f);
        te_op_moe_router_bwd_args b = {.logits = logits, .topk_indices = indices, .dtopk_probs = dprobs, .dlogits = d, .topk = K};
        te_op_moe_router_bwd(te, &b);
        REQUIRE_OK(te);
        ids[narrow] = test_read(indices), probs[narrow] = test_read(p), gradient[narrow] = test_read(d);
    }
    CHECK_CLOSE("ids", ids[1], ids[0], T * K, 0, 0);
    CHECK_CLOSE("probs", probs[1], probs[0], T * K, 0, 0);
    CHECK_CLOSE("gradient", gradient[1], gradient[0], T * E, 0, 0);
    te_tensor *x = te_tensor_full(te, TE_I16, SHAPE(3), -40000), *copy = te_tensor_empty(te, TE_I16, SHAPE(3));
    te_tensor_copy(copy, x);
    CHECK(te_tensor_item(te_tensor_narrow(copy, 0, 2, 1)) == -32768 && te_tensor_bytes(x) == 6);
    CHECK_OK(te);
    te_op_moe_index_map_args m = {.experts = te_tensor_zeros(te, TE_I16, SHAPE(3, 1)), .row_id_map = te_tensor_empty(te, TE_I32, SHAPE(3))};
    te_op_moe_index_map(te, &m);
    CHECK_ERROR(te, TE_ERR_DTYPE, "experts is i16; i32 or i64 is needed");
    te_tensor_copy(te_tensor_empty(te, TE_F32, SHAPE(3)), x);
    CHECK_ERROR(te, TE_ERR_DTYPE, "i16 to f32");
}

/* Equal scores: the lower numbers; NaN last; the same whatever the order of lanes. */
TE_TEST_DEVICES(moe_router_ties) {
    enum { E = 70 };
    float x[2 * E];
    for (int e = 0; e < E; e++) {
        x[e] = e % 3 == 1 ? 2.0f : 1.0f;
        x[E + e] = e == 5 || e == 40 ? 0.0f : NAN;
    }
    float below[E]; /* after the score's 0.5: negative but for the NaN */
    for (int e = 0; e < E; e++) below[e] = -1.0f - 0.01f * (float)e;
    te_tensor *indices = test_guarded(te, TE_I32, SHAPE(2, 3)), *probs = te_tensor_empty(te, TE_F32, SHAPE(2, E));
    te_op_moe_router_fwd_args a = {.logits = test_tensor(te, TE_F32, SHAPE(2, E), x), .probs = probs, .topk_indices = indices, .topk = 3, .score_function = TE_SCORE_SIGMOID};
    te_op_moe_router_fwd(te, &a);
    REQUIRE_OK(te);
    const float want[] = {1, 4, 7, 5, 40, 0};
    CHECK_TENSOR(indices, want, 0, 0);
    /* zeros of groups that are not chosen tie, too, above the negative scores of the one that is; NaN stays last */
    for (int e = 0; e < E; e++) x[e] = x[E + e] = e == 36 ? NAN : 0.0f;
    a.logits = test_tensor(te, TE_F32, SHAPE(2, E), x);
    a.expert_bias = test_tensor(te, TE_F32, SHAPE(E), below);
    a.num_groups = 2, a.group_topk = 1, a.group_best = 2, a.zero_other_groups = true;
    te_op_moe_router_fwd(te, &a);
    REQUIRE_OK(te);
    const float zeros[] = {35, 37, 38, 35, 37, 38};
    CHECK_TENSOR(indices, zeros, 0, 0);
}

/* The gradient against differences of the float64 formulas, with the choice held. */
TE_TEST_DEVICES(moe_router_gradient) {
    for (int i = 0; i < COUNT(router_cases); i += test_every_odd(1)) {
        const router_case *c = &router_cases[i];
        int64_t tokens = c->tokens, n = c->experts;
        test_case("T=%lld E=%lld topk=%d f=%d pre=%d all=%d", (long long)tokens, (long long)n, c->topk, (int)c->f, c->pre, c->all);
        float *x = distinct_logits(tokens, n, 5), *g = test_normal(tokens * n + 1, 9), *bias = test_rounded(TE_BF16, test_uniform(n + 1, 6, -0.5f, 0.5f), n), *want = test_floats(tokens * n);
        uint8_t *chosen = (uint8_t *)test_alloc((size_t)(tokens * n + 1)), *again = (uint8_t *)test_alloc((size_t)n);
        for (int64_t t = 0; t < tokens; t++) {
            double *row = test_doubles(n), *y = test_doubles(n);
            for (int64_t e = 0; e < n; e++) row[e] = (double)x[t * n + e];
            route(c, row, bias, y, chosen + t * n);
            for (int64_t e = 0; e < n; e++) {
                double sum = 0, was = row[e];
                for (int side = -1; side <= 1; side += 2) {
                    row[e] = was + side * 1e-5;
                    route(c, row, bias, y, again);
                    for (int64_t o = 0; o < n; o++) sum += side * y[o] * (double)g[t * n + o];
                }
                row[e] = was;
                want[t * n + e] = (float)(sum / 2e-5);
            }
        }
        te_tensor *dlogits = test_guarded(te, TE_F32, SHAPE(tokens, n));
        te_op_moe_router_bwd_args b = {.logits = test_tensor(te, TE_F32, SHAPE(tokens, n), x), .routing_map = c->all ? NULL : te_tensor_from_host(te, TE_U8, SHAPE(tokens, n), chosen),
                                       .dprobs = test_tensor(te, TE_F32, SHAPE(tokens, n), g), .dlogits = dlogits, .topk = c->topk, .score_function = c->f, .use_pre_softmax = c->pre,
                                       .scaling_factor = c->scaling, .all_scores = c->all};
        te_op_moe_router_bwd(te, &b);
        REQUIRE_OK(te);
        CHECK_TENSOR(dlogits, want, 1e-4, 2e-6); /* f32 sums beside differences of 1e-5, whose own error is 1e-9 */
    }
}

TE_TEST_DEVICES(moe_aux_loss) {
    const int64_t sizes[][3] = {{50, 8, 8}, {1000, 64, 64}, {33, 12, 4}, {1, 1, 1}, {0, 8, 8}};
    const te_dtype counts[] = {TE_I32, TE_I64, TE_F32, TE_BF16};
    for (int i = 0; i < COUNT(sizes) * 6; i++) {
        int64_t rows = sizes[i / 6][0], cols = sizes[i / 6][1];
        te_dtype dtype = floats[i % 3];
        bool device = i % 2;
        float *p = test_rounded(dtype, test_uniform(rows * cols + 1, 3, 0, 1), rows * cols), *n = test_floats(cols), total = 96;
        for (int64_t e = 0; e < cols; e++) n[e] = (float)(e * 7 % 31);
        double sum = 0, factor = 0.01 * (double)sizes[i / 6][2] / 2 / 96 / 96;
        for (int64_t k = 0; k < rows * cols; k++) sum += (double)p[k] * (double)n[k % cols];
        int64_t *whole = (int64_t *)test_alloc((size_t)(cols + 1) * sizeof(int64_t)), tokens = 96;
        for (int64_t e = 0; e < cols; e++) whole[e] = (int64_t)n[e];
        te_dtype count = counts[i % 4];
        te_tensor *nt = count == TE_I32 || count == TE_I64 ? index_tensor_of(te, count, cols, whole) : test_tensor(te, count, SHAPE(cols), n), *loss = test_guarded(te, dtype, SHAPE(1));
        te_op_moe_aux_loss_fwd_args a = {.probs = test_tensor(te, dtype, SHAPE(rows, cols), p), .tokens_per_expert = nt, .loss = loss, .num_experts = (int)sizes[i / 6][2], .topk = 2, .coeff = 0.01f};
        if (device) a.total_device = te_tensor_from_host(te, TE_I64, SHAPE(1), &tokens);
        else a.total_num_tokens = (int64_t)total;
        te_op_moe_aux_loss_fwd(te, &a);
        REQUIRE_OK(te);
        float want = (float)(sum * factor), g = 3, *dp = test_floats(rows * cols);
        double rounding = dtype == TE_F32 ? 1e-5 : dtype == TE_F16 ? 1e-3 : 8e-3;
        CHECK_CLOSE("loss", test_read(loss), &want, 1, rounding, dtype == TE_F16 ? 6e-8 : 0); /* f16: half a unit of its subnormals */
        te_tensor *dprobs = test_guarded(te, dtype, SHAPE(rows, cols));
        te_op_moe_aux_loss_bwd_args b = {.dloss = test_tensor(te, dtype, SHAPE(1), &g), .tokens_per_expert = nt, .total_device = a.total_device, .dprobs = dprobs,
                                         .total_num_tokens = a.total_num_tokens, .num_experts = a.num_experts, .topk = 2, .coeff = 0.01f};
        te_op_moe_aux_loss_bwd(te, &b);
        REQUIRE_OK(te);
        for (int64_t k = 0; k < rows * cols; k++) dp[k] = (float)(factor * (double)n[k % cols] * 3);
        CHECK_TENSOR(dprobs, dp, rounding, dtype == TE_F16 ? 6e-8 : 0);
    }
}

TE_TEST_DEVICES(grouped_column_sums) {
    const int64_t sizes[] = {5, 0, 70, -3, 1, 1000};
    for (int i = 0; i < 6; i++) {
        int64_t m = i % 2 ? 76 : 100, n = 1 + i * 37, row = 0; /* 76: the last group has no row left */
        float *x = test_rounded(floats[i % 3], test_normal(m * n, 2), m * n), *want = test_floats(6 * n);
        for (int g = 0; g < 6; g++)
            for (int64_t k = sizes[g]; k > 0 && row < m; k--, row++)
                for (int64_t c = 0; c < n; c++) want[g * n + c] += x[row * n + c];
        te_tensor *out = test_guarded(te, TE_F32, SHAPE(6, n));
        te_op_grouped_column_sum_args a = {.x = test_tensor(te, floats[i % 3], SHAPE(m, n), x), .sizes = index_tensor_of(te, i % 2 ? TE_I64 : TE_I32, 6, sizes), .out = out};
        te_op_grouped_column_sum(te, &a);
        REQUIRE_OK(te);
        CHECK_TENSOR(out, want, 1e-5, 1e-5); /* the order of at most 70 additions */
    }
}

TE_TEST_DEVICES(moe_complaints) {
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(4, 8)), *y = te_tensor_zeros(te, TE_F32, SHAPE(6, 8)), *map = te_tensor_zeros(te, TE_I32, SHAPE(4, 7)), *even = te_tensor_zeros(te, TE_I32, SHAPE(4, 6));
    te_tensor *mask = te_tensor_zeros(te, TE_U8, SHAPE(4, 3)), *five = te_tensor_zeros(te, TE_I64, SHAPE(5));
    te_op_moe_mask_map_args m = {.routing_map = mask, .row_id_map = even};
    te_op_moe_mask_map(te, &m);
    CHECK_ERROR(te, TE_ERR_SHAPE, "row_id_map must be [4, 7]");
    te_op_moe_splits_args splits = {.padded = five, .align = INT64_MAX, .values = {2}};
    te_op_moe_splits(te, &splits);
    CHECK_ERROR(te, TE_ERR_INVALID, "moe_splits: align is 9223372036854775807; it cannot be negative, nor more than 2147483647");
    te_op_moe_permute_args p = {.x = x, .row_id_map = even, .y = y};
    te_op_moe_permute(te, &p);
    CHECK_ERROR(te, TE_ERR_SHAPE, "a mask map is [T, 2E + 1]");
    p.row_id_map = map, p.topk = 5;
    te_op_moe_permute(te, &p);
    CHECK_ERROR(te, TE_ERR_SHAPE, "topk 5");
    p.topk = 0, p.pad_offsets = five;
    te_op_moe_permute(te, &p);
    CHECK_ERROR(te, TE_ERR_SHAPE, "pad_offsets is [5]; 3 elements");
    p.pad_offsets = NULL, p.y = te_tensor_zeros(te, TE_BF16, SHAPE(6, 8));
    te_op_moe_permute(te, &p);
    CHECK_ERROR(te, TE_ERR_DTYPE, "x is f32 and y is bf16");
    p.y = y, p.probs = x;
    te_op_moe_permute(te, &p);
    CHECK_ERROR(te, TE_ERR_STATE, "permuted_probs is NULL");
    te_op_moe_router_fwd_args r = {.logits = x, .probs = x, .topk = 9};
    te_op_moe_router_fwd(te, &r);
    CHECK_ERROR(te, TE_ERR_INVALID, "topk is 9 of 8 experts");
    r.topk = 4, r.num_groups = 3, r.group_topk = 2;
    te_op_moe_router_fwd(te, &r);
    CHECK_ERROR(te, TE_ERR_INVALID, "num_groups 3 and group_topk 2");
    r.num_groups = 4, r.group_topk = 1;
    te_op_moe_router_fwd(te, &r);
    CHECK_ERROR(te, TE_ERR_INVALID, "1 groups of 2 experts have 2");
    r.num_groups = r.group_topk = 0, r.zero_other_groups = true;
    te_op_moe_router_fwd(te, &r);
    CHECK_ERROR(te, TE_ERR_INVALID, "zero_other_groups without groups");
    r.zero_other_groups = false, r.expert_bias = te_tensor_zeros(te, TE_F32, SHAPE(8));
    te_op_moe_router_fwd(te, &r);
    CHECK_ERROR(te, TE_ERR_INVALID, "expert_bias with softmax");
    te_op_moe_splits_args s = {.padded = te_tensor_zeros(te, TE_I32, SHAPE(65))};
    te_op_moe_splits(te, &s);
    CHECK_ERROR(te, TE_ERR_INVALID, "65 numbers from the host; one call takes 64");
    te_op_moe_chunk_map_args c = {.sizes = five, .sorted_index = five, .offsets = five, .row_id_map = map};
    te_op_moe_chunk_map(te, &c);
    CHECK_ERROR(te, TE_ERR_INVALID, "sorted_index and offsets are both given");
    te_op_moe_aux_loss_fwd_args l = {.probs = x, .tokens_per_expert = te_tensor_zeros(te, TE_I32, SHAPE(8)), .loss = te_tensor_zeros(te, TE_F32, SHAPE(1)), .num_experts = 3, .topk = 1};
    te_op_moe_aux_loss_fwd(te, &l);
    CHECK_ERROR(te, TE_ERR_SHAPE, "num_experts 3");
    l.num_experts = 8;
    te_op_moe_aux_loss_fwd(te, &l);
    CHECK_ERROR(te, TE_ERR_INVALID, "total_num_tokens is 0");
    te_op_moe_unpermute_bwd_args u = {.dy = x, .row_id_map = map, .merging_probs = mask};
    te_op_moe_unpermute_bwd(te, &u);
    CHECK_ERROR(te, TE_ERR_DTYPE, "merging_probs is u8");
}
