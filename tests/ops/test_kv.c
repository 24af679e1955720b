/* test_kv.c: lengths from masks, and keys and values that go to their places in a cache: every element against the place that it belongs to, odd and empty sizes, refusals. */
#include "../te_test.h"

TE_TEST_DEVICES(kv_lengths_of_masks) {
    static const int64_t sizes[][2] = {{1, 1}, {3, 7}, {2, 1000}, {40, 33}, {1100, 3}, {2050, 2}, {0, 5}, {4, 0}};
    for (int k = 0; k < COUNT(sizes); k++) {
        const int64_t b = sizes[k][0], s = sizes[k][1];
        uint8_t *mask = (uint8_t *)test_alloc((size_t)(b * s) + 1);
        float *want = test_floats(b + 1);
        const int64_t *length = test_integers(b + 1, 3 + (uint64_t)k, 0, s + 1);
        test_case("%lld sequences of %lld", (long long)b, (long long)s);
        for (int64_t i = 0; i < b; i++) {
            for (int64_t j = 0; j < s; j++) mask[i * s + j] = j < length[i] ? 0 : (uint8_t)(1 + (i + j) % 255);
            want[i + 1] = want[i] + (float)(s ? length[i] : 0);
        }
        te_op_cu_seqlens_args a = {.mask = te_tensor_from_host(te, TE_U8, SHAPE(b, 1, 1, s), mask), .cu_seqlens = test_guarded(te, TE_I32, SHAPE(b + 1))};
        te_op_cu_seqlens(te, &a);
        REQUIRE_OK(te);
        CHECK_TENSOR(a.cu_seqlens, want, 0, 0);
    }
}

enum { B = 3, G = 2, D = 5, DV = 3, S = 6, ROOM = 12 };
static const int64_t lengths[B] = {4, 0, 6}, before[B] = {3, 5, 6};

/* The caches after a copy: what was there, and the new rows at their places. */
static void place(float *cache, const float *x, te_qkv_format format, int d, int64_t page_size, const int64_t *table) {
    int64_t start = 0;
    for (int b = 0; b < B; b++) {
        for (int64_t i = 0; i < lengths[b]; i++) {
            const int64_t at = before[b] + i, page = table ? table[b * (ROOM / page_size) + at / page_size] : b;
            const int64_t row = format == TE_THD ? start + i : format == TE_BSHD ? b * S + i : i * B + b;
            memcpy(cache + (page * page_size + at % page_size) * G * d, x + row * G * d, (size_t)(G * d) * sizeof(float));
        }
        start += lengths[b];
    }
}
TE_TEST_DEVICES(kv_copies_go_to_their_places) {
    static const int64_t page_sizes[] = {0, 1, 4, 12};
    for (int n = 0; n < 3 * COUNT(page_sizes) * 3; n++) {
        const te_qkv_format format = (te_qkv_format)(n % 3);
        const te_dtype dtype = n / 3 % 3 == 0 ? TE_F32 : n / 3 % 3 == 1 ? TE_BF16 : TE_F16;
        const int64_t page_size = page_sizes[n / 9], size = page_size ? page_size : ROOM, each = ROOM / size, pages = page_size ? B * each + 2 : B;
        const int64_t tokens = lengths[0] + lengths[1] + lengths[2] + 1, rows = format == TE_THD ? tokens : S * B;
        int64_t *table = (int64_t *)test_alloc((size_t)(B * each) * sizeof(int64_t));
        float *x[2], *cache[2];
        te_tensor *t[2], *c[2];
        test_case("format %d, %s, pages of %lld", (int)format, te_dtype_name(dtype), (long long)page_size);
        for (int64_t i = 0; i < B * each; i++) table[i] = (i * 7 + 2) % pages; /* of 38, 11 and 5 pages, none of which 7 divides: all differ */
        for (int k = 0; k < 2; k++) {
            const int d = k ? DV : D;
            x[k] = test_rounded(dtype, test_normal(rows * G * d, 5 + (uint64_t)k), rows * G * d);
            cache[k] = test_rounded(dtype, test_normal(pages * size * G * d, 9 + (uint64_t)k), pages * size * G * d);
            t[k] = format == TE_THD ? test_tensor(te, dtype, SHAPE(rows, G, d), x[k]) : test_tensor(te, dtype, SHAPE(format == TE_BSHD ? B : S, format == TE_BSHD ? S : B, G, d), x[k]);
            c[k] = test_guarded_with(te, dtype, SHAPE(pages, size, G, d), cache[k]);
            place(cache[k], x[k], format, d, size, page_size ? table : NULL);
        }
        te_op_copy_to_kv_cache_args a = {.k = t[0], .v = t[1], .k_cache = c[0], .v_cache = c[1], .format = format};
        a.cu_seqlens = test_i32(te, SHAPE(B + 1), (const int64_t[]){0, 4, 4, 10});
        a.start_positions = test_i32(te, SHAPE(B), before);
        if (page_size) a.page_table = test_i32(te, SHAPE(B, each), table);
        te_op_copy_to_kv_cache(te, &a);
        REQUIRE_OK(te);
        CHECK_TENSOR(c[0], cache[0], 0, 0);
        CHECK_TENSOR(c[1], cache[1], 0, 0);
    }
}

/* Heads of a packed tensor, and a cache whose rows lie further apart. */
TE_TEST_DEVICES(kv_copies_of_strided_heads) {
    te_tensor *qkv = test_tensor(te, TE_F32, SHAPE(2, 1, 3 * G, D), test_normal(2 * 3 * G * D, 1)), *wide = te_tensor_zeros(te, TE_F32, SHAPE(1, 4, 2 * G, D));
    te_op_copy_to_kv_cache_args a = {.k = te_tensor_narrow(qkv, 2, G, G), .v = te_tensor_narrow(qkv, 2, 2 * G, G)};
    a.k_cache = te_tensor_narrow(wide, 2, 0, G);
    a.v_cache = te_tensor_narrow(wide, 2, G, G);
    a.cu_seqlens = test_i32(te, SHAPE(2), (const int64_t[]){0, 2});
    a.start_positions = test_i32(te, SHAPE(1), (const int64_t[]){1});
    te_op_copy_to_kv_cache(te, &a);
    REQUIRE_OK(te);
    float *got = test_read(wide), *x = test_read(qkv);
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 2 * G * D; k++) CHECK(got[i * 2 * G * D + k] == (i == 1 || i == 2 ? x[(i - 1) * 3 * G * D + G * D + k] : 0));
}

/* Rows of E4M3 codes: the least power of two that is not below max |x| / 448, and the nearest code of x over it. */
TE_TEST_DEVICES(kv_copies_become_codes) {
    for (int n = 0; n < 3 * 3; n++) {
        enum { T = 7, HEADS = 3 };
        const te_dtype dtype = n % 3 == 0 ? TE_F32 : n % 3 == 1 ? TE_BF16 : TE_F16;
        const int d = n / 3 == 0 ? 128 : n / 3 == 1 ? 5 : 1024;
        float *x = test_normal(T * HEADS * d, 3), *scaled = test_floats(T * HEADS * d), *factors = test_floats(T * HEADS);
        test_case("%s, %d channels", te_dtype_name(dtype), d);
        for (int r = 0; r < T * HEADS; r++)
            for (int c = 0; c < d; c++) x[r * d + c] *= r == 3 ? 0 : ldexpf(1, (r % 9 - 4) * 2); /* rows of all sizes, and one of zeros */
        x[5 * d + 1] = 448 * 4, x[5 * d] = NAN; /* the largest of its row, a power of two times 448, beside a NaN */
        x = test_rounded(dtype, x, T * HEADS * d);
        for (int r = 0; r < T * HEADS; r++) {
            float top = 0, power = ldexpf(1, -127);
            for (int c = 0; c < d; c++) top = fmaxf(top, fabsf(x[r * d + c]));
            while (448 * power < top) power *= 2;
            factors[r] = power;
            for (int c = 0; c < d; c++) scaled[r * d + c] = x[r * d + c] / power;
        }
        scaled = test_rounded(TE_F8E4M3, scaled, T * HEADS * d);
        te_tensor *k = test_tensor(te, dtype, SHAPE(1, T, HEADS, d), x), *codes[2], *of_rows[2];
        for (int i = 0; i < 2; i++) codes[i] = test_guarded(te, TE_F8E4M3, SHAPE(1, T, HEADS, d)), of_rows[i] = test_guarded(te, TE_F8E8M0, SHAPE(1, T, HEADS));
        te_op_copy_to_kv_cache_args a = {.k = k, .v = k, .k_cache = codes[0], .v_cache = codes[1], .k_factors = of_rows[0], .v_factors = of_rows[1], .format = TE_BSHD};
        a.cu_seqlens = test_i32(te, SHAPE(2), (const int64_t[]){0, T});
        a.start_positions = test_i32(te, SHAPE(1), (const int64_t[]){0});
        te_op_copy_to_kv_cache(te, &a);
        REQUIRE_OK(te);
        for (int i = 0; i < 2; i++) {
            CHECK_TENSOR(of_rows[i], factors, 0, 0);
            CHECK_TENSOR(codes[i], scaled, 0, 0);
        }
    }
}

TE_TEST(kv_refusals) {
    te_ctx *te = test_context("cpu");
    te_tensor *k = te_tensor_zeros(te, TE_F32, SHAPE(S, B, G, D)), *v = te_tensor_zeros(te, TE_F32, SHAPE(S, B, G, DV)), *k_cache = te_tensor_zeros(te, TE_F32, SHAPE(B, ROOM, G, D));
    te_tensor *v_cache = te_tensor_zeros(te, TE_F32, SHAPE(B, ROOM, G, DV)), *cu = test_i32(te, SHAPE(B + 1), (const int64_t[]){0, 4, 4, 10}), *start = test_i32(te, SHAPE(B), before);
    const te_op_copy_to_kv_cache_args good = {.k = k, .v = v, .k_cache = k_cache, .v_cache = v_cache, .cu_seqlens = cu, .start_positions = start};
    te_op_copy_to_kv_cache_args a = good;
    CHECK(te_op_copy_to_kv_cache(te, &a) == TE_OK);
#define REFUSED(code, says)              \
    te_op_copy_to_kv_cache(te, &a);      \
    CHECK_ERROR(te, code, says);         \
    a = good
    a.format = (te_qkv_format)5;
    REFUSED(TE_ERR_INVALID, "format is 5");
    a.format = TE_THD;
    REFUSED(TE_ERR_SHAPE, "k is [6, 3, 2, 5]; [tokens, heads, d] is needed");
    a.k = v;
    REFUSED(TE_ERR_SHAPE, "k is [6, 3, 2, 3] and k_cache is [3, 12, 2, 5]; their last two sizes");
    a.v = te_tensor_zeros(te, TE_F32, SHAPE(5, B, G, DV));
    REFUSED(TE_ERR_SHAPE, "k is [6, 3, 2, 5] and v is [5, 3, 2, 3]");
    a.v_cache = te_tensor_zeros(te, TE_F32, SHAPE(B, 11, G, DV));
    REFUSED(TE_ERR_SHAPE, "k_cache is [3, 12, 2, 5] and v_cache is [3, 11, 2, 3]");
    a.cu_seqlens = te_tensor_zeros(te, TE_I32, SHAPE(3));
    REFUSED(TE_ERR_SHAPE, "k is [6, 3, 2, 5] and cu_seqlens has 2 sequences");
    a.start_positions = te_tensor_zeros(te, TE_I32, SHAPE(2));
    REFUSED(TE_ERR_SHAPE, "start_positions is [2]; 3 elements are needed");
    a.page_table = te_tensor_zeros(te, TE_I32, SHAPE(2, 3));
    REFUSED(TE_ERR_SHAPE, "page_table is [2, 3]; [3, pages of each sequence] is needed");
    a.k_factors = te_tensor_zeros(te, TE_F8E8M0, SHAPE(B, ROOM, G));
    REFUSED(TE_ERR_INVALID, "k_cache is f32 and k_factors is given");
    a.v_cache = te_tensor_zeros(te, TE_F8E4M3, SHAPE(B, ROOM, G, DV));
    REFUSED(TE_ERR_STATE, "v_cache is e4m3 and v_factors is NULL");
    a.v_cache = te_tensor_zeros(te, TE_F8E4M3, SHAPE(B, ROOM, G, DV)), a.v_factors = te_tensor_zeros(te, TE_F8E8M0, SHAPE(B, ROOM, G, 1));
    REFUSED(TE_ERR_SHAPE, "v_cache is [3, 12, 2, 3] and v_factors is [3, 12, 2, 1]");
    a.k_cache = te_tensor_zeros(te, TE_F8E5M2, SHAPE(B, ROOM, G, D));
    REFUSED(TE_ERR_DTYPE, "k_cache");
    a.k_cache = te_tensor_zeros(te, TE_F32, SHAPE(2, ROOM, G, D)), a.v_cache = te_tensor_zeros(te, TE_F32, SHAPE(2, ROOM, G, DV));
    REFUSED(TE_ERR_SHAPE, "k_cache is [2, 12, 2, 5]; without page_table the first size is at least that of the sequences, 3");
    a.cu_seqlens = test_i32(te, SHAPE(B + 1), (const int64_t[]){0, 4, 3, 9});
    REFUSED(TE_ERR_INVALID, "cu_seqlens[1] is 4 and [2] is 3");
    a.cu_seqlens = test_i32(te, SHAPE(B + 1), (const int64_t[]){0, 4, 4, 11});
    REFUSED(TE_ERR_INVALID, "by cu_seqlens sequence 2 has 7 tokens, and k has 6 for each");
    a.start_positions = test_i32(te, SHAPE(B), (const int64_t[]){3, 5, 7});
    REFUSED(TE_ERR_INVALID, "sequence 2 adds 6 tokens to 7, and the cache has room for 12");
    a.page_table = test_i32(te, SHAPE(B, 1), (const int64_t[]){0, 9, 3});
    REFUSED(TE_ERR_INVALID, "page_table[2, 0] is 3; there are 3 pages");
#undef REFUSED
    te_op_cu_seqlens_args c = {.mask = te_tensor_zeros(te, TE_U8, SHAPE(4, 3)), .cu_seqlens = te_tensor_zeros(te, TE_I32, SHAPE(4))};
    te_op_cu_seqlens(te, &c);
    CHECK_ERROR(te, TE_ERR_SHAPE, "cu_seqlens is [4]; 5 elements are needed");
    c.mask = te_tensor_zeros(te, TE_F32, SHAPE(4, 3));
    te_op_cu_seqlens(te, &c);
    CHECK_ERROR(te, TE_ERR_DTYPE, "mask");
}

/* Pages that were given back, before the place of the first new token, are nobody's. */
TE_TEST_DEVICES(kv_pages_before_the_new_ones_are_not_looked_at) {
    te_tensor *x = te_tensor_full(te, TE_F32, SHAPE(2, 1, 1, 4), 3), *k_cache = te_tensor_zeros(te, TE_F32, SHAPE(2, 2, 1, 4)), *v_cache = te_tensor_zeros(te, TE_F32, SHAPE(2, 2, 1, 4));
    te_op_copy_to_kv_cache_args a = {.k = x, .v = x, .k_cache = k_cache, .v_cache = v_cache};
    a.cu_seqlens = test_i32(te, SHAPE(2), (const int64_t[]){0, 2});
    a.start_positions = test_i32(te, SHAPE(1), (const int64_t[]){3});
    a.page_table = test_i32(te, SHAPE(1, 3), (const int64_t[]){-1, 1, 0});
    CHECK_EQ_INT(te_op_copy_to_kv_cache(te, &a), TE_OK);
    REQUIRE_OK(te);
    float *got = test_read(k_cache);
    CHECK(got[12] == 3 && got[0] == 3 && got[8] == 0 && got[4] == 0);
}

TE_TEST_DEVICES(kv_numbers_advance) {
    static const int64_t batches[] = {1, 3, 1500};
    for (int n = 0; n < COUNT(batches); n++) {
        const int64_t b = batches[n];
        int64_t *start = (int64_t *)test_alloc((size_t)b * sizeof(int64_t));
        float *want[3] = {test_floats(b), test_floats(b + 1), test_floats(b + 1)};
        test_case("%d sequences", (int)b);
        want[1][0] = want[2][0] = 0;
        for (int64_t i = 0; i < b; i++) {
            start[i] = i * 7 % 100;
            want[0][i] = (float)(start[i] + 5);
            want[1][i + 1] = (float)(3 * (i + 1));
            want[2][i + 1] = want[2][i] + want[0][i] + 3;
        }
        te_op_advance_kv_cache_args a = {.start_positions = test_i32(te, SHAPE(b), start), .cu_seqlens_q = te_tensor_zeros(te, TE_I32, SHAPE(b + 1)), .cu_seqlens_kv = te_tensor_zeros(te, TE_I32, SHAPE(b + 1)), .added = 5, .step = 3};
        CHECK_EQ_INT(te_op_advance_kv_cache(te, &a), TE_OK);
        CHECK_BYTES("start_positions", test_read(a.start_positions), want[0], (size_t)b * 4);
        CHECK_BYTES("cu_seqlens_q", test_read(a.cu_seqlens_q), want[1], (size_t)(b + 1) * 4);
        CHECK_BYTES("cu_seqlens_kv", test_read(a.cu_seqlens_kv), want[2], (size_t)(b + 1) * 4);
    }
    te_op_advance_kv_cache_args a = {.start_positions = te_tensor_zeros(te, TE_I32, SHAPE(2)), .cu_seqlens_q = te_tensor_zeros(te, TE_I32, SHAPE(3)), .cu_seqlens_kv = te_tensor_zeros(te, TE_I32, SHAPE(2)), .step = 1};
    te_op_advance_kv_cache(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "advance_kv_cache: cu_seqlens_kv is [2]; 3 elements are needed");
    a.cu_seqlens_kv = te_tensor_zeros(te, TE_I32, SHAPE(3));
    a.added = -1;
    te_op_advance_kv_cache(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "added is -1 and step 1, of 2 sequences");
}
