/* The math operations against loops in double, every shape with poisoned outputs between guard bands. Copies, fills and random numbers are
 * compared byte for byte. */
#include "../te_test.h"

static const te_dtype floats[] = {TE_F32, TE_BF16, TE_F16}, plain[] = {TE_F32, TE_F16, TE_BF16, TE_I32, TE_I64, TE_U8};
static const int64_t shapes[][2] = {{1, 1}, {3, 5}, {127, 129}, {128, 128}, {16, 4096}, {1000, 24}, {0, 7}, {7, 0}};
/* One rounding to the format, and half of one more for the difference of two f32 sums. */
static double rtol(te_dtype dtype) { return dtype == TE_F32 ? 2e-6 : dtype == TE_F16 ? 1e-3 : 8e-3; }

/* ---- copy ---- */

/* One element from one format to another, as api/ops.h has it. */
static void convert(const void *src, te_dtype from, void *dst, te_dtype to, int64_t i) {
    bool whole_from = from == TE_I32 || from == TE_I64 || from == TE_U8, whole_to = to == TE_I32 || to == TE_I64 || to == TE_U8;
    int64_t whole = from == TE_I32 ? ((const int32_t *)src)[i] : from == TE_I64 ? ((const int64_t *)src)[i] : ((const uint8_t *)src)[i];
    float f = 0;
    if (whole_from) f = (float)whole;
    else if (from == TE_F32) f = ((const float *)src)[i];
    else {
        te_ctx *te = te_ctx_create(&(te_ctx_desc){.device = "cpu", .cpu_threads = 1});
        te_tensor_to_f32(te_tensor_from_host(te, from, SHAPE(1), (const uint16_t *)src + i), &f);
        te_ctx_destroy(te);
    }
    if (!whole_to) {
        uint8_t *out = (uint8_t *)dst + i * te_dtype_bits(to) / 8;
        te_ctx *te = te_ctx_create(&(te_ctx_desc){.device = "cpu", .cpu_threads = 1});
        te_tensor_to_host(te_tensor_from_f32(te, to, SHAPE(1), &f), out);
        te_ctx_destroy(te);
        return;
    }
    if (!whole_from) {
        double low = to == TE_U8 ? 0 : to == TE_I32 ? INT32_MIN : (double)INT64_MIN, high = to == TE_U8 ? 255 : to == TE_I32 ? INT32_MAX : (double)INT64_MAX;
        whole = isnan(f) ? 0 : f <= low ? (to == TE_I64 ? INT64_MIN : (int64_t)low) : f >= high ? (to == TE_I64 ? INT64_MAX : (int64_t)high) : (int64_t)f;
    }
    if (to == TE_I32) ((int32_t *)dst)[i] = (int32_t)(uint32_t)whole;
    else if (to == TE_I64) ((int64_t *)dst)[i] = whole;
    else ((uint8_t *)dst)[i] = (uint8_t)whole;
}

TE_TEST_DEVICES(copy_every_pair) {
    enum { N = 203 };
    float *odd = test_specials(N, 1);
    const float more[] = {255, 256, -1, 0.5f, 254.99f, 2147483648.0f, -2147483904.0f, 9.3e18f, -9.3e18f, (float)16777217};
    memcpy(odd, more, sizeof more);
    for (int s = 0; s < COUNT(plain); s++) {
        te_dtype from = plain[s];
        bool whole = s >= 3;
        int64_t host[N + 1];
        memset(host, 0, sizeof host);
        if (!whole) memcpy(host, test_read_bytes(te_tensor_from_f32(te, from, SHAPE(N), odd)), (size_t)(N * te_dtype_bits(from) / 8));
        for (int i = 0; i < N && whole; i++) {
            int64_t v = (int64_t)((uint64_t)(i - 100) * 0x9E3779B97F4A7C15u) >> (i % 64);
            if (from == TE_I64) host[i] = v;
            if (from == TE_I32) ((int32_t *)host)[i] = (int32_t)(v >> 32);
            if (from == TE_U8) ((uint8_t *)host)[i] = (uint8_t)v;
        }
        te_tensor *src = te_tensor_from_host(te, from, SHAPE(7, 29), host);
        for (int d = 0; d < COUNT(plain); d++) {
            te_dtype to = plain[d];
            int64_t want[N + 1];
            size_t bytes = (size_t)(N * te_dtype_bits(to) / 8);
            test_case("%s to %s", te_dtype_name(from), te_dtype_name(to));
            memset(want, 0, sizeof want);
            if (from == to) memcpy(want, host, bytes);
            for (int i = 0; i < N && from != to; i++) convert(host, from, want, to, i);
            te_tensor *dst = test_guarded(te, to, SHAPE(7, 29));
            te_tensor_copy(dst, src);
            REQUIRE_OK(te);
            if (from != TE_F32 || to == TE_F32 || d > 2) CHECK_BYTES("dst", test_read_bytes(dst), want, bytes);
            else CHECK_TENSOR(dst, test_rounded(to, odd, N), 0, 0);
            /* Through strides on both sides, the same bytes. */
            te_tensor *turned = te_tensor_transpose(src, 0, 1), *strided = test_guarded(te, to, SHAPE(29, 7));
            te_tensor_copy(strided, turned);
            te_tensor *back = test_guarded(te, to, SHAPE(7, 29));
            te_tensor_copy(te_tensor_transpose(back, 0, 1), strided);
            REQUIRE_OK(te);
            CHECK_BYTES("back", test_read_bytes(back), test_read_bytes(dst), bytes);
        }
    }
}

/* Element (i0, i1, ...) of a permuted, narrowed view against the arithmetic of its strides. */
TE_TEST_DEVICES(copy_strided) {
    static const struct {
        int64_t shape[4];
        int swap[2], narrow, start, length;
    } row[] = {
        {{4, 6, 8, 16}, {1, 2}, 0, 1, 2},  /* sbhd to shbd: the last dimension stays whole */
        {{4, 6, 8, 16}, {0, 3}, 1, 2, 3},  /* no dimension stays */
        {{4, 6, 8, 16}, {2, 3}, 3, 0, 7},
        {{4, 6, 8, 16}, {0, 1}, 3, 3, 10}, /* rows that begin anywhere */
        {{4, 6, 8, 16}, {0, 1}, 3, 8, 8},  /* rows of 8 at multiples of 8 */
        {{4, 6, 8, 16}, {0, 1}, 3, 4, 12}, /* rows of 12 at multiples of 4 */
        {{1, 1, 33, 65}, {2, 3}, 0, 0, 1},
        {{70, 1, 1, 40}, {0, 3}, 0, 6, 64},
        {{2, 3, 130, 200}, {2, 3}, 1, 1, 2}, /* from here on by tiles, several matrices of several */
        {{1, 2, 257, 300}, {2, 3}, 3, 3, 290},
        {{70, 2, 3, 136}, {0, 3}, 2, 1, 2},
        {{3, 0, 5, 2}, {0, 1}, 2, 1, 2},
    };
    static const te_dtype pairs[][2] = {{TE_BF16, TE_BF16}, {TE_F32, TE_BF16}, {TE_BF16, TE_F32}, {TE_U8, TE_U8}, {TE_I64, TE_I64}, {TE_F8E4M3, TE_U8}};
    for (int r = 0; r < COUNT(row); r++)
        for (int p = 0; p < COUNT(pairs); p++) {
            const int64_t *shape = row[r].shape;
            int64_t n = shape[0] * shape[1] * shape[2] * shape[3];
            te_dtype from = pairs[p][0], to = pairs[p][1];
            test_case("view %d, %s to %s", r, te_dtype_name(from), te_dtype_name(to));
            float *values = test_floats(n);
            for (int64_t i = 0; i < n; i++) values[i] = (float)((i * 7 + i / 13) % 120); /* exact in every format here but e4m3 */
            te_tensor *x = from == TE_F8E4M3 ? te_tensor_from_f32(te, from, 4, shape, values) : test_tensor(te, from, 4, shape, values);
            te_tensor *view = te_tensor_transpose(te_tensor_narrow(x, row[r].narrow, row[r].start, row[r].length), row[r].swap[0], row[r].swap[1]);
            REQUIRE_OK(te);
            const int64_t *size = te_tensor_shape(view);
            te_tensor *dst = test_guarded(te, to, 4, size);
            te_tensor_copy(dst, view);
            REQUIRE_OK(te);
            const uint8_t *code = (const uint8_t *)test_read_bytes(x);
            float *want = test_floats(te_tensor_numel(view));
            int64_t at = 0, step[4] = {shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1};
            int64_t first = row[r].start * step[row[r].narrow], swapped = step[row[r].swap[0]];
            step[row[r].swap[0]] = step[row[r].swap[1]];
            step[row[r].swap[1]] = swapped;
            for (int64_t a = 0; a < size[0]; a++)
                for (int64_t b = 0; b < size[1]; b++)
                    for (int64_t c = 0; c < size[2]; c++)
                        for (int64_t d = 0; d < size[3]; d++) {
                            int64_t from_at = first + a * step[0] + b * step[1] + c * step[2] + d * step[3];
                            want[at++] = from == TE_F8E4M3 ? (float)code[from_at] : values[from_at];
                        }
            if (at) CHECK_TENSOR(dst, want, 0, 0);
            /* And scattered into a view: what lies outside it stays. */
            te_tensor *whole = te_tensor_full(te, to, 4, shape, 3);
            te_tensor *hole = te_tensor_transpose(te_tensor_narrow(whole, row[r].narrow, row[r].start, row[r].length), row[r].swap[0], row[r].swap[1]);
            te_tensor_copy(hole, dst);
            REQUIRE_OK(te);
            if (at) CHECK_TENSOR(hole, want, 0, 0);
            double sum = 0, inside = 0;
            const float *all = test_read(whole);
            for (int64_t i = 0; i < n; i++) sum += all[i];
            for (int64_t i = 0; i < at; i++) inside += want[i];
            CHECK(sum == inside + 3.0 * (double)(n - at));
        }
}

/* Which kernel: a transposed view goes through tiles unless it would leave them nearly empty, or its elements are longer than a word. */
TE_TEST(copy_plans) {
    static const struct {
        te_dtype from, to;
        int64_t shape[3]; /* of what is transposed: its last two dimensions are swapped */
        const char *kernel;
    } row[] = {
        {TE_BF16, TE_BF16, {1, 512, 256}, "math/transpose.SIZE=2"},
        {TE_U8, TE_U8, {1, 300, 200}, "math/transpose.SIZE=1"},
        {TE_F32, TE_F32, {5, 64, 100}, "math/transpose.SIZE=4"},
        {TE_BF16, TE_BF16, {1, 512, 3}, "math/copy"},
        {TE_I64, TE_I64, {1, 300, 200}, "math/copy"},
        {TE_F32, TE_BF16, {1, 300, 200}, "math/copy.SRC_DT=1,DST_DT=3"},
    };
    te_ctx *te = test_context("cpu");
    if (!te) return;
    for (int i = 0; i < COUNT(row); i++) {
        const int64_t *s = row[i].shape;
        te_explanation e;
        te_op_copy_args a = {0};
        test_case("[%d, %d, %d] %s to %s", (int)s[0], (int)s[1], (int)s[2], te_dtype_name(row[i].from), te_dtype_name(row[i].to));
        a.src = te_tensor_transpose(te_tensor_empty(te, row[i].from, 3, s), 1, 2);
        a.dst = te_tensor_empty(te, row[i].to, SHAPE(s[0], s[2], s[1]));
        CHECK(te_explain(te, TE_OP_COPY, &a, "sm_90", &e) == TE_OK && e.supported);
        CHECK_STR(e.kernels, row[i].kernel);
    }
}

TE_TEST_DEVICES(copy_flat_sizes) {
    static const int64_t sizes[] = {1, 7, 8, 9, 1023, 1024, 8192, 8193, 100003};
    for (int s = 0; s < COUNT(sizes); s++)
        for (int f = 0; f < 2; f++)
            for (int t = 0; t < 2; t++)
                for (int odd = 0; odd < 2; odd++) {
                    const float *values = test_normal(sizes[s], 2);
                    test_case("%s to %s [%d] misaligned %d", te_dtype_name(floats[f]), te_dtype_name(floats[t]), (int)sizes[s], odd);
                    te_tensor *x = test_input(te, floats[f], 1, sizes[s], values, odd);
                    te_tensor *y = test_guarded(te, floats[t], SHAPE(1, sizes[s]));
                    te_tensor_copy(y, x);
                    REQUIRE_OK(te);
                    CHECK_TENSOR(y, test_rounded(floats[t], test_rounded(floats[f], values, sizes[s]), sizes[s]), 0, 0);
                }
}

/* ---- fill, random ---- */

TE_TEST_DEVICES(fill_values) {
    static const te_dtype dtypes[] = {TE_F32, TE_F16, TE_BF16, TE_F8E4M3, TE_F8E5M2};
    static const double values[] = {0, -0.0, 1.5, -3, 0.1, 1e-3, 1.00390625, 1e9};
    for (int d = 0; d < COUNT(dtypes); d++)
        for (int v = 0; v < COUNT(values); v++) {
            float f = (float)values[v];
            te_tensor *x = test_guarded(te, dtypes[d], SHAPE(3, 1371));
            te_tensor_fill(x, values[v]);
            REQUIRE_OK(te);
            const float *got = test_read(x), *want = test_read(te_tensor_from_f32(te, dtypes[d], SHAPE(1), &f));
            for (int i = 0; i < 3 * 1371; i++)
                if (memcmp(got + i, want, 4)) {
                    test_fail(__FILE__, __LINE__, "%s %g: [%d] is %g", te_dtype_name(dtypes[d]), values[v], i, (double)got[i]);
                    break;
                }
        }
    /* 1 + 2^-8 + a little lies above a tie of bf16, which a float rounds away. */
    te_tensor *x = test_guarded(te, TE_BF16, SHAPE(1));
    te_tensor_fill(x, 1 + 0x1p-8 + 0x1p-40);
    CHECK(test_read(x)[0] == 1 + 0x1p-7f);
    te_tensor_fill(x, -(1 + 0x1p-7 + 0x1p-8 - 0x1p-40));
    CHECK(test_read(x)[0] == -(1 + 0x1p-7f));
    te_tensor_fill(x, NAN);
    CHECK(isnan(test_read(x)[0]));
    static const struct {
        te_dtype dtype;
        double value;
        int64_t want;
    } whole[] = {{TE_I32, -7.9, -7}, {TE_I32, 3e9, INT32_MAX}, {TE_I32, -3e9, INT32_MIN}, {TE_I64, 1e15, 1000000000000000}, {TE_I64, 1e19, INT64_MAX},
                 {TE_I64, -1e19, INT64_MIN}, {TE_U8, 300, 255}, {TE_U8, -1, 0}, {TE_U8, 200.5, 200}, {TE_I32, NAN, 0}};
    for (int i = 0; i < COUNT(whole); i++) {
        x = test_guarded(te, whole[i].dtype, SHAPE(1001));
        te_tensor_fill(x, whole[i].value);
        REQUIRE_OK(te);
        const void *got = test_read_bytes(x);
        for (int k = 0; k < 1001; k += 100) {
            int64_t v = whole[i].dtype == TE_I32 ? ((const int32_t *)got)[k] : whole[i].dtype == TE_I64 ? ((const int64_t *)got)[k] : ((const uint8_t *)got)[k];
            CHECK_MSG(v == whole[i].want, "%s %g", te_dtype_name(whole[i].dtype), whole[i].value);
        }
    }
    te_tensor_fill(test_guarded(te, TE_F32, SHAPE(0, 3)), 1);
    CHECK_OK(te);
}

static te_tensor *drawn(te_ctx *te, te_dtype dtype, int64_t n, te_random_kind kind, float a, float b, uint64_t seed, uint64_t offset) {
    te_op_random_args args = {.dst = test_guarded(te, dtype, SHAPE(n)), .kind = kind, .a = a, .b = b, .seed = seed, .offset = offset};
    te_op_random(te, &args);
    return args.dst;
}

TE_TEST_DEVICES(random_bits) {
    te_ctx *cpu = test_context("cpu");
    static const int64_t sizes[] = {1, 3, 4, 1027, 50000};
    for (int s = 0; s < COUNT(sizes); s++)
        for (int d = 0; d < 3; d++)
            for (int kind = 0; kind < 2; kind++) {
                size_t bytes = (size_t)(sizes[s] * te_dtype_bits(floats[d]) / 8);
                uint64_t seed = 0x123456789abcdef0u, offset = (uint64_t)s << 33;
                te_tensor *here = drawn(te, floats[d], sizes[s], (te_random_kind)kind, -2, 5, seed, offset);
                te_tensor *there = drawn(cpu, floats[d], sizes[s], (te_random_kind)kind, -2, 5, seed, offset);
                REQUIRE_OK(te);
                CHECK_BYTES("bits", test_read_bytes(here), test_read_bytes(there), bytes);
                /* A shorter array is the beginning of a longer one; another offset is another array. */
                te_tensor *longer = drawn(te, floats[d], sizes[s] + 5, (te_random_kind)kind, -2, 5, seed, offset);
                CHECK_BYTES("prefix", test_read_bytes(longer), test_read_bytes(here), bytes);
                te_tensor *next = drawn(te, floats[d], sizes[s], (te_random_kind)kind, -2, 5, seed, offset + 1);
                if (sizes[s] > 3) CHECK(memcmp(test_read_bytes(next), test_read_bytes(here), bytes) != 0);
            }
}

TE_TEST_DEVICES(random_moments) {
    enum { N = 400000 };
    for (int kind = 0; kind < 2; kind++) {
        const float *x = test_read(drawn(te, TE_F32, N, (te_random_kind)kind, 3, kind ? 2 : 5, 42, 0));
        double mean = 0, variance = 0;
        REQUIRE_OK(te);
        for (int i = 0; i < N; i++) mean += x[i] / (double)N;
        for (int i = 0; i < N; i++) variance += (x[i] - mean) * (x[i] - mean) / N;
        /* Five standard errors. */
        CHECK_MSG(fabs(mean - (kind ? 3 : 4)) < 5 * 2 / sqrt(N), "mean %g", mean);
        CHECK_MSG(fabs(variance - (kind ? 4 : 1.0 / 3)) < 5 * 6 / sqrt(N), "variance %g", variance);
        for (int i = 0; i < N && !kind; i++) CHECK(x[i] >= 3 && x[i] < 5);
    }
    /* A range so narrow that rounding would reach its end. */
    const float *x = test_read(drawn(te, TE_F32, 1000, TE_RANDOM_UNIFORM, 1, 1 + 0x1p-23f, 1, 1));
    for (int i = 0; i < 1000; i++) CHECK(x[i] == 1);
}

/* ---- products ---- */

/* Of equal shapes, and of rows with one factor each; and the sums of the rows of a product. */
TE_TEST_DEVICES(products_of_shapes_and_of_rows) {
    int turn = 0;
    for (int s = 0; s < COUNT(shapes); s++)
        for (int d = 0; d < 9; d++)
            for (int way = 0; way < 4; way++) {
                if (turn++ % test_every_odd(5)) continue;
                const bool by_rows = way & 1, odd = way & 2;
                const int64_t m = shapes[s][0], n = shapes[s][1], all = m * n, count = by_rows ? m : all;
                te_dtype x_dtype = floats[d % 3], y_dtype = floats[d / 3], out = floats[(d + 1) % 3];
                const float *xv = test_rounded(x_dtype, test_normal(all, 3), all), *yv = test_rounded(y_dtype, test_normal(count, 4), count);
                float *want = test_floats(all), *sums = test_floats(m);
                double largest = 0;
                test_case("%s, %s to %s [%d, %d]%s, misaligned %d", te_dtype_name(x_dtype), te_dtype_name(y_dtype), te_dtype_name(out), (int)m, (int)n, by_rows ? " by rows" : "", odd);
                te_op_mul_args a = {0};
                a.x = test_input(te, x_dtype, m, n, xv, odd);
                a.y = by_rows ? test_tensor(te, y_dtype, SHAPE(m), yv) : test_tensor(te, y_dtype, SHAPE(m, n), yv);
                a.out = test_guarded(te, out, SHAPE(m, n));
                te_op_mul(te, &a);
                REQUIRE_OK(te);
                for (int64_t i = 0; i < all; i++) want[i] = xv[i] * yv[by_rows ? i / n : i];
                CHECK_BYTES("out", test_read(a.out), test_rounded(out, want, all), (size_t)all * 4); /* one product, rounded once */
                if (!by_rows) {
                    te_op_row_dot_args r = {0};
                    r.x = a.x;
                    r.y = a.y;
                    r.out = test_guarded(te, out, SHAPE(m));
                    te_op_row_dot(te, &r);
                    for (int64_t i = 0; i < m; i++) {
                        double sum = 0, size = 0;
                        for (int64_t c = 0; c < n; c++) sum += (double)xv[i * n + c] * yv[i * n + c], size += fabs((double)xv[i * n + c] * yv[i * n + c]);
                        sums[i] = (float)sum;
                        largest = fmax(largest, size);
                    }
                    CHECK_TENSOR(r.out, sums, rtol(out), 1e-6 * (1 + largest)); /* an f32 sum is off by units of its largest part */
                }
                a.x = a.out = test_guarded_with(te, x_dtype, SHAPE(m, n), xv); /* in place */
                te_op_mul(te, &a);
                REQUIRE_OK(te);
                CHECK_BYTES("in place", test_read(a.out), test_rounded(x_dtype, want, all), (size_t)all * 4);
            }
}

/* ---- axpby ---- */

TE_TEST_DEVICES(axpby_shapes) {
    int turn = 0;
    for (int s = 0; s < COUNT(shapes); s++)
        for (int d = 0; d < 9; d++)
            for (int odd = 0; odd < 2; odd++) {
                if (turn++ % test_every_odd(3)) continue;
                int64_t n = shapes[s][0] * shapes[s][1];
                te_dtype x_dtype = floats[d % 3], y_dtype = floats[d / 3], out = floats[(d + 1) % 3];
                const float *xv = test_rounded(x_dtype, test_normal(n, 3), n), *yv = test_rounded(y_dtype, test_normal(n, 4), n);
                float *want = test_floats(n);
                test_case("%s, %s to %s [%d, %d] misaligned %d", te_dtype_name(x_dtype), te_dtype_name(y_dtype), te_dtype_name(out),
                          (int)shapes[s][0], (int)shapes[s][1], odd);
                te_op_axpby_args a = {0};
                a.x = test_input(te, x_dtype, shapes[s][0], shapes[s][1], xv, odd);
                a.y = test_tensor(te, y_dtype, 2, shapes[s], yv);
                a.out = test_guarded(te, out, 2, shapes[s]);
                a.alpha = 1.25f;
                a.beta = -0.7f;
                te_op_axpby(te, &a);
                for (int64_t i = 0; i < n; i++) want[i] = (float)(1.25 * xv[i] + (double)-0.7f * yv[i]);
                CHECK_TENSOR(a.out, want, rtol(out), 1e-6);
                /* Without y, with a factor on the device, in place. */
                const float factor = 3, count = s % 2 ? 4 : 0.5f; /* a count below 1 divides by 1 */
                te_tensor *same = test_guarded_with(te, x_dtype, 2, shapes[s], xv);
                te_op_axpby_args b = {.x = same, .out = same, .alpha = 0.5f, .beta = NAN};
                b.alpha_device = test_tensor(te, TE_F32, SHAPE(1), &factor);
                b.divide_device = test_tensor(te, TE_F32, SHAPE(1), &count);
                te_op_axpby(te, &b);
                for (int64_t i = 0; i < n; i++) want[i] = (s % 2 ? 0.375f : 1.5f) * xv[i];
                CHECK_TENSOR(same, test_rounded(x_dtype, want, n), 0, 0);
                REQUIRE_OK(te);
            }
}

/* ---- sums ---- */

TE_TEST_DEVICES(sum_sizes) {
    static const int64_t sizes[] = {0, 1, 5, 2047, 16384, 16385, 300001};
    for (int s = 0; s < COUNT(sizes); s++)
        for (int d = 0; d < 3; d++) {
            const float *v = test_rounded(floats[d], test_uniform(sizes[s], 5, -1, 3), sizes[s]);
            double want = 0;
            test_case("%s [%d]", te_dtype_name(floats[d]), (int)sizes[s]);
            for (int64_t i = 0; i < sizes[s]; i++) want += v[i];
            te_op_sum_args a = {.x = test_tensor(te, floats[d], SHAPE(sizes[s]), v), .out = test_guarded(te, TE_F32, SHAPE(1))};
            te_op_sum(te, &a);
            REQUIRE_OK(te);
            CHECK(fabs(test_read(a.out)[0] - want) <= 2e-6 * (1 + fabs(want)));
            /* The address of x changes the loads, not the bits. */
            te_op_sum_args b = {.x = test_input(te, floats[d], 1, sizes[s], v, true), .out = test_guarded(te, TE_F32, SHAPE(1)), .scale = 1};
            te_op_sum(te, &b);
            CHECK_BYTES("bits", test_read_bytes(b.out), test_read_bytes(a.out), 4);
            b.scale = -0.5f;
            te_op_sum(te, &b);
            CHECK(fabs(test_read(b.out)[0] + 0.5 * want) <= 2e-6 * (1 + fabs(want)));
        }
    const float odd[] = {1, NAN, 2};
    te_op_sum_args a = {.x = test_tensor(te, TE_F32, SHAPE(3), odd), .out = test_guarded(te, TE_F32, SHAPE(1))};
    te_op_sum(te, &a);
    CHECK(isnan(test_read(a.out)[0]));
}

TE_TEST_DEVICES(column_sum_shapes) {
    static const int64_t more[][2] = {{5000, 3}, {5000, 264}, {33, 2050}};
    for (int s = 0; s < COUNT(shapes) + COUNT(more); s++)
        for (int d = 0; d < 9; d++) {
            const int64_t *shape = s < COUNT(shapes) ? shapes[s] : more[s - COUNT(shapes)];
            int64_t m = shape[0], n = shape[1];
            te_dtype dtype = floats[d % 3], out = floats[d / 3];
            bool accumulate = (s + d) % 2;
            if ((s + d) % test_every_odd(2)) continue;
            const float *v = test_rounded(dtype, test_normal(m * n, 6), m * n), *old = test_rounded(out, test_normal(n, 7), n);
            double *sum = test_doubles(n);
            float *want = test_floats(n);
            test_case("%s to %s [%d, %d] accumulate %d", te_dtype_name(dtype), te_dtype_name(out), (int)m, (int)n, accumulate);
            for (int64_t i = 0; i < m * n; i++) sum[i % n] += v[i];
            for (int64_t j = 0; j < n; j++) want[j] = (float)(sum[j] + (accumulate ? old[j] : 0));
            te_op_column_sum_args a = {0};
            a.x = test_input(te, dtype, m, n, v, d % 2);
            a.out = accumulate ? test_guarded_with(te, out, SHAPE(n), old) : test_guarded(te, out, SHAPE(n));
            a.accumulate = accumulate;
            te_op_column_sum(te, &a);
            REQUIRE_OK(te);
            CHECK_TENSOR(a.out, want, rtol(out), 2e-7 * sqrt((double)m + 1) * 4);
        }
}

/* ---- embedding ---- */

/* Ids of a text, as rows of a rank's part of the vocabulary: a few very frequent, many rare, some of the row before the part and of the one behind it. */
static int64_t *text_ids(int64_t n, int64_t vocab) {
    int64_t *id = test_integers(n, 8, 0, vocab), *pick = test_integers(n, 9, 0, 10);
    for (int64_t i = 0; i < n; i++) {
        if (pick[i] < 3) id[i] = vocab / 3;
        if (i % 97 == 50) id[i] = i % 2 ? -1 : vocab;
    }
    return id;
}

TE_TEST_DEVICES(embedding_shapes) {
    static const int64_t cases[][3] = {/* tokens, vocab, h */
                                       {1, 1, 1}, {7, 5, 3}, {300, 256, 129}, {1000, 256, 128}, {1000, 1000, 40}, {513, 70000, 8}, {0, 10, 8}, {10, 4, 0}, {2000, 3, 136},
                                       {700, 50, 776}, {70000, 40, 8}, /* more columns than a warp takes at once; more than 64 groups of tokens a warp */
                                       {90, 20, 12}, {90, 20, 268}};   /* f32 rows at multiples of 16 bytes whose ends are not eights */
    for (int c = 0; c < COUNT(cases); c++)
        for (int d = 0; d < 9; d++) {
            int64_t tokens = cases[c][0], vocab = cases[c][1], h = cases[c][2];
            te_dtype table_dtype = floats[d % 3], y_dtype = floats[d / 3];
            bool accumulate = d % 2, wide = (c + d) % 2;
            if ((9 * c + d) % test_every_odd(5)) continue;
            const int64_t *id = text_ids(tokens, vocab);
            if (c == 5 && d > 1) continue;
            test_case("tokens %d vocab %d h %d %s, %s", (int)tokens, (int)vocab, (int)h, te_dtype_name(table_dtype), te_dtype_name(y_dtype));
            int64_t *given = (int64_t *)test_alloc(sizeof *given * (size_t)(tokens + 1)); /* the part begins behind one row, and one is behind it */
            for (int64_t i = 0; i < tokens; i++) given[i] = id[i] + 1;
            te_tensor *ids = wide ? te_tensor_from_host(te, TE_I64, SHAPE(tokens), given) : test_i32(te, SHAPE(tokens), given);
            const float *table = test_rounded(table_dtype, test_normal(vocab * h, 10), vocab * h);
            float *y = test_floats(tokens * h);
            for (int64_t i = 0; i < tokens * h; i++) y[i] = id[i / h] >= 0 && id[i / h] < vocab ? table[id[i / h] * h + i % h] : 0;
            te_op_embedding_fwd_args f = {.ids = ids, .vocab_size = vocab + 2, .vocab_start = 1};
            f.table = test_tensor(te, table_dtype, SHAPE(vocab, h), table);
            f.y = test_guarded(te, y_dtype, SHAPE(tokens, h));
            te_op_embedding_fwd(te, &f);
            REQUIRE_OK(te);
            if (tokens && h) CHECK_TENSOR(f.y, test_rounded(y_dtype, y, tokens * h), 0, 0);

            /* Added in f32 in the order of the tokens, and rounded once: no tolerance. */
            const float *dy = test_rounded(y_dtype, test_normal(tokens * h, 11), tokens * h);
            float *sum = test_floats(vocab * h);
            for (int64_t i = 0; i < tokens * h; i++)
                if (id[i / h] >= 0 && id[i / h] < vocab) sum[id[i / h] * h + i % h] += dy[i];
            for (int64_t i = 0; i < vocab * h && accumulate; i++) sum[i] += table[i];
            te_op_embedding_bwd_args b = {0};
            b.ids = ids;
            b.dy = test_input(te, y_dtype, tokens, h, dy, d % 4 == 3);
            b.dtable = accumulate ? test_guarded_with(te, table_dtype, SHAPE(vocab, h), table) : test_guarded(te, table_dtype, SHAPE(vocab, h));
            b.accumulate = accumulate;
            b.vocab_size = vocab + 2;
            b.vocab_start = 1;
            te_op_embedding_bwd(te, &b);
            REQUIRE_OK(te);
            if (vocab && h) CHECK_TENSOR(b.dtable, test_rounded(table_dtype, sum, vocab * h), 0, 0);
        }
}

/* Negative ids from the end are the ids that they mean, of a part of a vocabulary as well; accumulated in the order of the ids. */
TE_TEST_DEVICES(embedding_from_end) {
    enum { TOKENS = 400, H = 24 };
    for (int c = 0; c < 12; c++) {
        const int64_t vocab = c < 6 ? 3 : 70, start = c % 3 == 2 ? vocab / 2 : 0, part = c % 3 == 2 ? vocab - start - 1 : vocab, *from = test_integers(TOKENS, 20 + c, -vocab, vocab);
        const te_dtype dtype = floats[c % 3];
        test_case("vocab %d, part %d from %d, %s", (int)vocab, (int)part, (int)start, te_dtype_name(dtype));
        int64_t *begin = (int64_t *)test_alloc(TOKENS * sizeof *begin);
        for (int i = 0; i < TOKENS; i++) begin[i] = from[i] < 0 ? from[i] + vocab : from[i];
        te_tensor *ids[2] = {c % 2 ? te_tensor_from_host(te, TE_I64, SHAPE(TOKENS), from) : test_i32(te, SHAPE(TOKENS), from), test_i32(te, SHAPE(TOKENS), begin)};
        te_tensor *table = test_tensor(te, dtype, SHAPE(part, H), test_normal(part * H, 1)), *dy = test_tensor(te, dtype, SHAPE(TOKENS, H), test_normal(TOKENS * H, 2)), *y[2], *dtable[2];
        for (int i = 0; i < 2; i++) {
            y[i] = test_guarded(te, dtype, SHAPE(TOKENS, H)), dtable[i] = test_guarded(te, TE_F32, SHAPE(part, H));
            te_op_embedding_fwd(te, &(te_op_embedding_fwd_args){.ids = ids[i], .table = table, .y = y[i], .vocab_size = vocab, .vocab_start = start, .from_end = !i});
            te_op_embedding_bwd(te, &(te_op_embedding_bwd_args){.ids = ids[i], .dy = dy, .dtable = dtable[i], .vocab_size = vocab, .vocab_start = start, .from_end = !i});
        }
        REQUIRE_OK(te);
        CHECK_TENSOR(y[0], test_read(y[1]), 0, 0);
        CHECK_TENSOR(dtable[0], test_read(dtable[1]), 0, 0);
        CHECK_EQ_INT(te_synchronize(te), TE_OK);
    }
}

/* ---- misuse ---- */

TE_TEST(math_errors) {
    te_ctx *te = test_context("cpu");
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(4, 6)), *y = te_tensor_zeros(te, TE_F32, SHAPE(6, 4));
    te_tensor_copy(y, x);
    CHECK_ERROR(te, TE_ERR_SHAPE, "src is [4, 6] and dst is [6, 4]");
    te_tensor_copy(te_tensor_zeros(te, TE_F8E4M3, SHAPE(4, 6)), x);
    CHECK_ERROR(te, TE_ERR_DTYPE, "f32 to e4m3");
    te_op_axpby_args a = {0};
    a.x = x;
    a.y = x;
    a.out = y;
    te_op_axpby(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "x is [4, 6] and out is [6, 4]");
    a.out = te_tensor_transpose(y, 0, 1);
    te_op_axpby(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "out [4, 6] is strided");
    a.out = NULL;
    CHECK_EQ_INT(te_op_axpby(te, &a), TE_ERR_STATE);
    te_clear_error(te);
    te_op_mul_args p = {.x = x, .y = y, .out = x};
    te_op_mul(te, &p);
    CHECK_ERROR(te, TE_ERR_SHAPE, "mul: x is [4, 6] and y is [6, 4]; they must be equal, or y one number for each of x's 4 rows");
    te_op_row_dot_args dot = {.x = x, .y = x, .out = te_tensor_zeros(te, TE_F32, SHAPE(5))};
    te_op_row_dot(te, &dot);
    CHECK_ERROR(te, TE_ERR_SHAPE, "row_dot: out is [5]; 4 elements are needed");
    te_op_column_sum_args c = {.x = x, .out = y};
    te_op_column_sum(te, &c);
    CHECK_ERROR(te, TE_ERR_SHAPE, "out must be [6], not [6, 4]");
    te_op_embedding_fwd_args e = {.ids = x, .table = x, .y = y};
    te_op_embedding_fwd(te, &e);
    CHECK_ERROR(te, TE_ERR_DTYPE, "ids is f32");
    e.ids = te_tensor_zeros(te, TE_I32, SHAPE(5));
    te_op_embedding_fwd(te, &e);
    CHECK_ERROR(te, TE_ERR_SHAPE, "ids [5], table [4, 6], y [6, 4]");
    e.ids = te_tensor_zeros(te, TE_I32, SHAPE(4)), e.y = te_tensor_zeros(te, TE_F32, SHAPE(4, 6)), e.vocab_size = 9, e.vocab_start = 6;
    te_op_embedding_fwd(te, &e);
    CHECK_ERROR(te, TE_ERR_INVALID, "embedding_fwd: vocab_start is 6, the table has 4 rows and vocab_size is 9");
    te_op_random_args r = {.dst = x, .a = 2, .b = 1};
    te_op_random(te, &r);
    CHECK_ERROR(te, TE_ERR_INVALID, "uniform from 2 to 1");
    r.a = -3e38f, r.b = 3e38f, te_op_random(te, &r);
    CHECK_ERROR(te, TE_ERR_INVALID, "uniform from -3e+38 to 3e+38: the difference must be a finite f32");
    /* Writing through te.h is seen by whoever caches a copy. */
    uint64_t version = te_tensor_version(x);
    te_tensor_fill(x, 1);
    CHECK(te_tensor_version(x) > version);
}

/* ---- argmax ---- */

/* The first of the largest; NaN is above all. */
static int32_t largest_of(const float *x, int64_t n) {
    int64_t best = 0;
    for (int64_t i = 1; i < n && !isnan(x[best]); i++)
        if (isnan(x[i]) || x[i] > x[best]) best = i;
    return (int32_t)best;
}
TE_TEST_DEVICES(argmax_of_rows) {
    static const te_dtype formats[] = {TE_F32, TE_BF16, TE_F16};
    static const int64_t sizes[][2] = {{1, 1}, {1, 7}, {3, 33}, {5, 2048}, {2, 6144}, {1, 32000}, {3, 20001}, {300, 4104}};
    for (int k = 0; k < COUNT(sizes) * 3 * 3; k += test_every_odd(3)) { /* 7: all formats, kinds and sizes, in turns */
        const te_dtype dtype = formats[k % 3];
        const int what = k / 3 % 3; /* normal numbers; many equal ones, of both signs of 0; NaN and infinities among them */
        const int64_t m = sizes[k / 9][0], n = sizes[k / 9][1];
        float *x = test_normal(m * n, (uint64_t)k + 1);
        int32_t *got = (int32_t *)test_alloc((size_t)m * sizeof(int32_t));
        test_case("%s [%d, %d], kind %d", te_dtype_name(dtype), (int)m, (int)n, what);
        for (int64_t i = 0; i < m * n && what; i++) x[i] = what == 2 && i % 613 == 500 ? NAN : x[i] > 2 ? (what == 2 ? INFINITY : 0.0f) : x[i] < -2 ? -INFINITY : x[i] < 0 ? -0.0f : what == 1 ? 0.0f : x[i];
        x = test_rounded(dtype, x, m * n);
        te_tensor *y = te_argmax(test_tensor(te, dtype, SHAPE(m, n), x));
        REQUIRE(y && te_tensor_ndim(y) == 1 && te_tensor_dtype(y) == TE_I32);
        te_tensor_to_host(y, got);
        for (int64_t i = 0; i < m; i++) CHECK_EQ_INT(got[i], largest_of(x + i * n, n));
    }
    te_tensor *x = test_tensor(te, TE_F32, SHAPE(2, 3, 4), test_normal(24, 1)), *y = te_argmax(te_tensor_narrow(x, 1, 1, 1));
    CHECK(te_tensor_ndim(y) == 2 && te_tensor_shape(y)[0] == 2 && te_tensor_shape(y)[1] == 1);
    y = te_argmax(te_tensor_full(te, TE_F32, SHAPE(5), -INFINITY));
    CHECK(te_tensor_ndim(y) == 1 && test_read(y)[0] == 0);
    CHECK(te_tensor_numel(te_argmax(te_tensor_zeros(te, TE_F32, SHAPE(0, 5)))) == 0);
    CHECK(te_argmax(NULL) == NULL);
    CHECK_OK(te);
    CHECK(te_argmax(te_tensor_zeros(te, TE_F32, SHAPE(3, 0))) == NULL);
    CHECK_ERROR(te, TE_ERR_SHAPE, "argmax: x is [3, 0]");
    CHECK(te_argmax(te_tensor_zeros(te, TE_I32, SHAPE(3, 2))) == NULL);
    CHECK_ERROR(te, TE_ERR_DTYPE, "te_argmax");
}
