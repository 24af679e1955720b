/* test_grouped.c: products by groups: both kinds, every format, uneven and empty groups and rows that belong to none, against float64; which
 * kernel is chosen, and complaints. Rows of no group are NaN in operands, and must stay as they were in results. */
#include "../te_test.h"

typedef struct grouped_case {
    const int64_t *sizes;
    int64_t groups, spare; /* rows, or values of k, behind the last group */
    int64_t m, n, k;       /* the ones that are alike in all groups; the other is 0 */
    te_dtype a, b, d, bias, index;
    bool along_k, a_transposed, b_transposed, accumulate, split_accumulator, offsets, each, scaled, blocks;
    te_epilogue epilogue;
    int64_t pad;
} grouped_case;

static void name_case(const grouped_case *c) {
    test_case("%s%lld groups of %lld %lld %lld.. + %lld, m=%lld n=%lld k=%lld %s%s x %s%s -> %s bias=%s%s%s%s%s%s epilogue=%d pad=%lld", c->along_k ? "k: " : "",
              (long long)c->groups, (long long)(c->groups > 0 ? c->sizes[0] : 0), (long long)(c->groups > 1 ? c->sizes[1] : 0),
              (long long)(c->groups > 2 ? c->sizes[2] : 0), (long long)c->spare, (long long)c->m, (long long)c->n, (long long)c->k, te_dtype_name(c->a),
              c->a_transposed ? "^T" : "", te_dtype_name(c->b), c->b_transposed ? "^T" : "", te_dtype_name(c->d), te_dtype_name(c->bias),
              c->accumulate ? " accumulate" : "", c->split_accumulator ? " split" : "", c->offsets ? " offsets" : "", c->each ? " each" : "",
              c->blocks ? " blocks" : "", (int)c->epilogue, (long long)c->pad);
}

/* A matrix in rows of cols + pad: tensor, and values [rows, cols]. Rows from `used_rows` and columns from `used_cols` on are NaN, and so is padding. */
typedef struct matrix {
    te_tensor *tensor;
    float *values;
} matrix;
static matrix operand(te_ctx *te, te_dtype dtype, int64_t rows, int64_t cols, int64_t used_rows, int64_t used_cols, int64_t pad, uint64_t seed) {
    matrix x = {NULL, test_rounded(dtype, test_normal(rows * cols + 1, seed), rows * cols)};
    float *padded = test_floats(rows * (cols + pad) + 1);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols + pad; j++)
            padded[i * (cols + pad) + j] = i < used_rows && j < used_cols ? x.values[i * cols + j] : NAN;
    x.tensor = test_tensor(te, dtype, SHAPE(rows, cols + pad), padded);
    return x;
}
static float *output_values(te_dtype dtype, int64_t rows, int64_t cols, uint64_t seed) {
    return test_rounded(dtype, test_normal(rows * cols + 1, seed), rows * cols);
}

static te_tensor *index_tensor(te_ctx *te, const grouped_case *c) {
    int64_t n = c->groups + c->offsets, at = 0;
    int64_t *wide = (int64_t *)test_alloc((size_t)(n + 1) * sizeof(int64_t));
    int32_t *narrow = (int32_t *)test_alloc((size_t)(n + 1) * sizeof(int32_t));
    for (int64_t g = 0; g < n; g++) {
        wide[g] = c->offsets ? at : c->sizes[g];
        narrow[g] = (int32_t)wide[g];
        if (g < c->groups) at += c->sizes[g];
    }
    return te_tensor_from_host(te, c->index, SHAPE(n), c->index == TE_I64 ? (const void *)wide : (const void *)narrow);
}

static double gelu(double x) { return 0.5 * x * (1.0 + tanh(0.7978845608 * x * (1.0 + 0.044715 * x * x))); }
static double dgelu(double x) {
    double t = tanh(0.7978845608 * x * (1.0 + 0.044715 * x * x));
    return 0.5 * x * (1.0 - t * t) * 0.7978845608 * (1.0 + 3 * 0.044715 * x * x) + 0.5 * (1.0 + t);
}
static double output_error(te_dtype d) { return d == TE_F32 ? 1e-6 : d == TE_BF16 ? 4.1e-3 : 5.2e-4; }
/* As in test_gemm.c: relative to sum |a b|. */
static double sum_error(const grouped_case *c, bool cuda) {
    if (cuda && c->blocks) return 3e-4;
    if (cuda && c->a == TE_F32) return 1e-3;
    if (cuda && (c->a == TE_F8E4M3 || c->a == TE_F8E5M2)) return c->split_accumulator ? 3e-4 : 1e-3;
    return 3e-6;
}

static float *random_scales(int64_t n, uint64_t seed) { return test_uniform(n + 1, seed, 0.3f, 1.7f); }
static int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

static void run_case(te_ctx *te, const grouped_case *c) {
    bool cuda = te_ctx_is_cuda(te);
    int64_t total = 0, groups = c->groups, n = c->n, pad = c->pad;
    for (int64_t g = 0; g < groups; g++) total += c->sizes[g];
    int64_t m = c->along_k ? c->m : total + c->spare, k = c->along_k ? total + c->spare : c->k;
    int64_t used_m = c->along_k ? m : total, used_k = c->along_k ? total : k;
    int64_t b_groups = c->along_k ? 1 : groups, d_groups = c->along_k ? groups : 1, d_rows = d_groups * m;
    double summing = sum_error(c, cuda), rounding = output_error(c->d);
    te_op_grouped_gemm_args g = {0};
    name_case(c);

    matrix a = c->a_transposed ? operand(te, c->a, k, m, used_k, used_m, pad, 1) : operand(te, c->a, m, k, used_m, used_k, pad, 1);
    int64_t b_rows = c->b_transposed ? n : k, b_cols = c->b_transposed ? k : n;
    matrix b = operand(te, c->b, b_groups * b_rows, b_cols, c->along_k && !c->b_transposed ? used_k : b_groups * b_rows, c->b_transposed ? used_k : n, pad, 2);
    float *old = output_values(c->d, d_rows, n + pad, 3), *aux = output_values(c->d, m, n + pad, 4);
    float *bias = output_values(c->bias ? c->bias : TE_F32, groups, n, 5), *scale_a = random_scales(groups, 6), *scale_b = random_scales(groups, 7);
    int64_t kb = (k + 127) / 128, nb = (n + 127) / 128, ld_a = up(m, 4), ld_b = up(kb, 4);
    float *blocks_a = random_scales(kb * ld_a, 8), *blocks_b = random_scales(groups * nb * ld_b, 9);

    g.a = a.tensor, g.b = b.tensor;
    g.d = test_guarded_with(te, c->d, SHAPE(d_rows, n + pad), old);
    if (c->offsets) g.offsets = index_tensor(te, c);
    else g.sizes = index_tensor(te, c);
    g.groups = groups, g.m = m, g.n = n, g.k = k;
    g.along_k = c->along_k, g.a_transposed = c->a_transposed, g.b_transposed = c->b_transposed;
    g.accumulate = c->accumulate, g.split_accumulator = c->split_accumulator, g.epilogue = c->epilogue;
    if (c->bias) g.bias = test_tensor(te, c->bias, SHAPE(groups, n), bias);
    if (c->epilogue) g.aux = test_guarded_with(te, c->d, SHAPE(m, n + pad), aux);
    if (c->scaled) {
        g.scale_a = test_tensor(te, TE_F32, SHAPE(c->each ? groups : 1), scale_a);
        g.scale_b = test_tensor(te, TE_F32, SHAPE(c->each ? groups : 1), scale_b);
    }
    if (c->blocks) {
        g.scaling_a = TE_SCALING_BLOCK_1D, g.scaling_b = TE_SCALING_BLOCK_2D;
        g.scale_a = test_tensor(te, TE_F32, SHAPE(kb, ld_a), blocks_a);
        g.scale_b = test_tensor(te, TE_F32, SHAPE(groups, nb, ld_b), blocks_b);
    }
    REQUIRE_OK(te);
    te_op_grouped_gemm(te, &g);
    REQUIRE_OK(te);

    float *got = test_read(g.d), *got_aux = c->epilogue ? test_read(g.aux) : NULL;
    char *owned = (char *)test_alloc((size_t)(d_rows + 1));
    int64_t begin = 0, bad = 0;
    for (int64_t group = 0; group < groups; begin += c->sizes[group++]) {
        int64_t first = c->along_k ? 0 : begin, last = c->along_k ? m : begin + c->sizes[group];
        int64_t p0 = c->along_k ? begin : 0, p1 = c->along_k ? begin + c->sizes[group] : k;
        double scale = c->scaled ? (double)scale_a[c->each ? group : 0] * (double)scale_b[c->each ? group : 0] : 1.0;
        const float *bm = b.values + (c->along_k ? 0 : group * b_rows * b_cols);
        for (int64_t i = first; i < last; i++) {
            int64_t row = c->along_k ? group * m + i : i;
            owned[row] = 1;
            for (int64_t j = 0; j < n; j++) {
                double sum = 0, size = 0, v, was = (double)old[row * (n + pad) + j], bound;
                for (int64_t p = p0; p < p1; p++) {
                    double term = (double)a.values[c->a_transposed ? p * m + i : i * k + p] * (double)bm[c->b_transposed ? j * k + p : p * n + j];
                    if (c->blocks) term *= (double)blocks_a[p / 128 * ld_a + i] * (double)blocks_b[(group * nb + j / 128) * ld_b + p / 128];
                    sum += term;
                    size += fabs(term);
                }
                v = scale * sum + (c->bias ? (double)bias[group * n + j] : 0.0);
                size *= scale * summing;
                if (c->epilogue == TE_EPILOGUE_GELU) {
                    bad += !(fabs((double)got_aux[row * (n + pad) + j] - v) <= fabs(v) * rounding + size + 1e-6);
                    v = gelu(v);
                    size *= 1.2;
                } else if (c->epilogue == TE_EPILOGUE_DGELU) {
                    v *= dgelu((double)aux[row * (n + pad) + j]);
                    size *= 1.2;
                }
                if (c->accumulate) v += was;
                bound = (fabs(v) + (c->accumulate ? fabs(was) : 0)) * rounding + size + 2e-6;
                if (c->along_k && p0 == p1) bound = 0; /* 0, or what was there */
                if (!(fabs((double)got[row * (n + pad) + j] - v) <= bound) && !bad++)
                    test_fail(__FILE__, __LINE__, "D at group %lld, row %lld, column %lld is %g, not %g within %g", (long long)group, (long long)row, (long long)j,
                              (double)got[row * (n + pad) + j], v, bound);
            }
        }
    }
    CHECK_MSG(bad == 0, "%lld elements of D or aux are off", (long long)bad);
    for (int64_t i = bad = 0; i < d_rows * (n + pad); i++) {
        if (owned[i / (n + pad)] && i % (n + pad) < n) continue;
        bad += got[i] != old[i];
        if (got_aux) bad += got_aux[i] != aux[i];
    }
    CHECK_MSG(bad == 0, "%lld elements that no group owns were written", (long long)bad);
}

static const te_dtype formats[][2] = {{TE_BF16, TE_BF16}, {TE_F32, TE_F32}, {TE_F16, TE_F16}, {TE_F8E4M3, TE_F8E4M3}, {TE_F8E5M2, TE_F8E4M3}, {TE_F8E4M3, TE_F8E5M2}};
static const te_dtype outputs[] = {TE_BF16, TE_F32, TE_F16};

static const int64_t eight[] = {37, 0, 130, 1, 64, 0, 16, 75}, one[] = {77}, none[] = {0, 0, 0, 0, 0}, ends[] = {0, 40, 0, 0, 129, 0};
static int64_t many[64], most[97];
static const struct {
    const int64_t *sizes;
    int64_t groups, spare;
} splits[] = {{eight, 8, 0}, {one, 1, 3}, {none, 5, 0}, {none, 5, 7}, {ends, 6, 21}, {many, 64, 5}, {most, 97, 0}};

/* Formats, flags and sizes of the other dimensions go round with `turn`. */
static grouped_case any_case(int split, int format, int turn) {
    static const int64_t sizes[] = {40, 72, 136, 33, 264};
    grouped_case c = {0};
    for (int g = 0; g < 64; g++) many[g] = g * 7 % 10 == 3 ? 0 : g * 37 % 23;
    for (int g = 0; g < 97; g++) most[g] = g * 13 % 4 - 1 < 0 ? 0 : g * 13 % 4 - 1;
    c.sizes = splits[split].sizes, c.groups = splits[split].groups, c.spare = splits[split].spare;
    c.a = formats[format][0], c.b = formats[format][1], c.d = outputs[turn % 3];
    c.n = sizes[turn % 5], c.m = c.k = sizes[(turn / 2 + 1) % 5];
    c.index = turn % 2 ? TE_I64 : TE_I32;
    c.offsets = turn / 2 % 2;
    c.scaled = turn % 3 == 0;
    c.each = turn % 6 == 3;
    c.pad = turn % 4 == 1 ? 8 : turn % 4 == 3 ? 3 : 0;
    c.accumulate = turn % 5 == 2;
    c.split_accumulator = turn % 2;
    return c;
}

TE_TEST_DEVICES(grouped_rows) {
    int turn = 0;
    for (int s = 0; s < COUNT(splits); s++)
        for (int f = 0; f < COUNT(formats); f++)
            for (int layout = 0; layout < 2; layout++, turn++) {
                grouped_case c = any_case(s, f, turn);
                if (turn % test_every_odd(6)) continue;
                c.b_transposed = f >= 3 || layout;
                c.bias = turn % 2 ? outputs[turn / 2 % 3] : TE_DTYPE_NONE;
                c.m = 0;
                run_case(te, &c);
            }
}

TE_TEST_DEVICES(grouped_along_k) {
    int turn = 0;
    for (int s = 0; s < COUNT(splits); s++)
        for (int f = 0; f < COUNT(formats); f++)
            for (int layout = 0; layout < 4; layout++) {
                grouped_case c = any_case(s, f, turn);
                if (f >= 3 && layout) continue; /* fp8 operands run along k */
                c.along_k = true;
                c.a_transposed = f < 3 && !(layout & 1), c.b_transposed = f >= 3 || layout & 2;
                c.k = 0;
                if (turn++ % test_every_odd(8)) continue;
                run_case(te, &c);
            }
}

TE_TEST_DEVICES(grouped_epilogues) {
    int turn = 0;
    for (int e = TE_EPILOGUE_NONE; e <= TE_EPILOGUE_DGELU; e++)
        for (int f = 0; f < 4; f += 3)
            for (int s = 0; s < 5; s += 4)
                for (int more = 0; more < 3; more++, turn++) {
                    grouped_case c = any_case(s, f, turn);
                    c.epilogue = (te_epilogue)e;
                    c.b_transposed = true;
                    c.bias = more ? outputs[turn % 3] : TE_DTYPE_NONE;
                    c.m = 0;
                    if (turn % test_every_odd(3) == 0) run_case(te, &c);
                }
}

TE_TEST_DEVICES(grouped_blocks) {
    int turn = 0;
    for (int s = 0; s < COUNT(splits); s++)
        for (int f = 3; f < COUNT(formats); f++, turn++) {
            grouped_case c = any_case(s, f, turn);
            if (turn % test_every_odd(3)) continue;
            c.blocks = c.b_transposed = true;
            c.scaled = c.each = false;
            c.bias = turn % 2 ? TE_F32 : TE_DTYPE_NONE;
            c.k = turn % 2 ? 400 : 272;
            c.n = turn % 3 ? 144 : 200;
            c.m = 0;
            run_case(te, &c);
        }
}

/* Rows of D and aux at multiples of 64 bytes that end anywhere: TMA would write on to the next multiple of 16. */
TE_TEST_DEVICES(grouped_d_beside) {
    static const int64_t widths[] = {10, 150, 297};
    int turn = 0;
    for (int w = 0; w < COUNT(widths); w++)
        for (int kind = 0; kind < 4; kind++) /* the epilogues of rows, sums along k */
            for (int d = 0; d < COUNT(outputs); d++, turn++) {
                grouped_case c = any_case(0, kind < 3 && turn & 1 ? 3 : 0, turn);
                c.along_k = c.a_transposed = kind == 3;
                c.epilogue = kind < 3 ? (te_epilogue)kind : TE_EPILOGUE_NONE;
                c.b_transposed = kind < 3;
                c.n = widths[w], c.m = kind == 3 ? c.n + 32 : 0, c.k = kind < 3 ? c.n + 96 : 0, c.pad = (32 - c.n % 32) % 32;
                c.d = outputs[d];
                c.bias = kind < 3 && turn % 4 >= 2 ? TE_F32 : TE_DTYPE_NONE;
                c.accumulate = d == (kind + w) % 3;
                if (turn % test_every_odd(3) == 0) run_case(te, &c);
            }
}

/* More tiles than a GPU has multiprocessors, long k, groups that end within slabs and tiles. */
TE_TEST_DEVICES(grouped_many_tiles) {
    static const int64_t sizes[] = {700, 0, 130, 1, 64, 259, 0, 300};
    if (!te_ctx_is_cuda(te)) SKIP("for the GPU's schedule; the CPU has none");
    for (int f = 0; f < 4; f++)
        for (int along_k = 0; along_k < 2; along_k++) {
            grouped_case c = any_case(0, f, f);
            c.sizes = sizes;
            c.along_k = along_k;
            c.n = 1032, c.m = along_k ? 520 : 0, c.k = along_k ? 0 : 328, c.pad = 8;
            c.a_transposed = along_k && f < 3;
            c.b_transposed = f >= 3 || (!along_k && f != 1);
            run_case(te, &c);
        }
}

/* Clusters: wide D, groups of more rows than a tile has, and fewer. */
TE_TEST_DEVICES(grouped_wide) {
    static const int64_t sizes[] = {520, 0, 70, 300, 128, 1, 256, 400};
    if (!te_ctx_is_cuda(te)) SKIP("for the GPU's schedule; the CPU has none");
    for (int turn = 0; turn < 8; turn++) {
        grouped_case c = any_case(0, turn & 2 ? 3 : 0, turn);
        c.sizes = sizes, c.spare = 9;
        c.n = turn & 1 ? 2056 : 1920, c.m = 0, c.k = 144, c.pad = 8;
        c.b_transposed = turn & 2 || turn & 4;
        c.epilogue = turn == 4 ? TE_EPILOGUE_DGELU : turn == 5 ? TE_EPILOGUE_GELU : TE_EPILOGUE_NONE;
        c.bias = turn & 1 ? TE_BF16 : TE_DTYPE_NONE;
        c.accumulate = turn == 0 || turn == 7;
        c.d = turn == 3 ? TE_F32 : TE_BF16;
        run_case(te, &c);
    }
    for (int turn = 0; turn < 2; turn++) {
        grouped_case c = any_case(0, 3, turn);
        c.sizes = sizes, c.spare = 3;
        c.n = 1920, c.m = 0, c.k = 272, c.pad = 0;
        c.blocks = c.b_transposed = true;
        c.scaled = c.each = c.accumulate = false;
        run_case(te, &c);
    }
}

/* Groups of both operands along rows of memory that TMA can read: they start and end at any element of a row. */
static void along_rows_of_memory(te_ctx *te, const int64_t *sizes, int64_t groups) {
    for (int f = 0; f < 4; f += 3)
        for (int turn = 0; turn < 3; turn++) {
            grouped_case c = any_case(0, f, turn);
            int64_t total = 0;
            for (int64_t g = 0; g < groups; g++) total += sizes[g];
            c.sizes = sizes, c.groups = groups, c.spare = up(total, 16) - total;
            c.along_k = true, c.b_transposed = true;
            c.m = 136, c.n = 72, c.k = 0, c.pad = 16;
            run_case(te, &c);
        }
}
TE_TEST_DEVICES(grouped_along_memory_16) {
    static const int64_t sizes[] = {80, 0, 16, 160};
    along_rows_of_memory(te, sizes, 4);
}
TE_TEST_DEVICES(grouped_along_memory_8) {
    static const int64_t sizes[] = {200, 8, 0, 24, 24};
    along_rows_of_memory(te, sizes, 5);
}
TE_TEST_DEVICES(grouped_along_memory_short) {
    static const int64_t sizes[] = {16, 16, 0, 16};
    along_rows_of_memory(te, sizes, 4);
}
TE_TEST_DEVICES(grouped_along_memory_first_one) {
    static const int64_t sizes[] = {1, 0, 0, 159};
    along_rows_of_memory(te, sizes, 4);
}
TE_TEST_DEVICES(grouped_along_memory_odd) {
    static const int64_t sizes[] = {83, 130, 0, 43};
    along_rows_of_memory(te, sizes, 4);
}
TE_TEST_DEVICES(grouped_along_memory_alone) {
    static const int64_t sizes[] = {3};
    along_rows_of_memory(te, sizes, 1);
}

/* No columns, no k, no groups, no room. */
TE_TEST_DEVICES(grouped_empty) {
    for (int turn = 0; turn < 10; turn++) {
        grouped_case c = any_case(turn % 5 == 3 ? 2 : 0, 0, turn);
        if (turn % 5 == 0) c.n = 0;
        if (turn % 5 == 1) c.k = 0;
        if (turn % 5 == 2) c.groups = 0, c.spare = 4;
        c.bias = TE_F32;
        c.along_k = turn % 5 == 4;
        if (c.along_k) c.bias = TE_DTYPE_NONE, c.m = 0, c.a_transposed = true;
        if (!c.along_k) c.m = 0;
        if (c.along_k) c.k = 0;
        run_case(te, &c);
    }
}

/* Sizes that are wrong are cut: groups end at m, and none has fewer than 0. */
TE_TEST_DEVICES(grouped_wrong_sizes) {
    static const int64_t wrong[][4] = {{3, -5, 4, 100}, {100, 2, 3, 1}, {-1, 9, -9, INT64_MAX}, {INT64_MAX, INT64_MAX, INT64_MIN, 1}};
    static const int64_t right[][4] = {{3, 0, 4, 4}, {11, 0, 0, 0}, {0, 9, 0, 2}, {11, 0, 0, 0}};
    for (int i = 0; i < 4; i++) {
        te_tensor *d[2];
        for (int turn = 0; turn < 2; turn++) {
            te_op_grouped_gemm_args g = {0};
            test_case("wrong sizes %d", i);
            g.a = test_tensor(te, TE_F32, SHAPE(11, 20), test_normal(11 * 20, 1));
            g.b = test_tensor(te, TE_F32, SHAPE(4, 20, 12), test_normal(4 * 20 * 12, 2));
            g.d = d[turn] = test_guarded(te, TE_F32, SHAPE(11, 12));
            g.sizes = te_tensor_from_host(te, TE_I64, SHAPE(4), turn ? right[i] : wrong[i]);
            g.groups = 4, g.m = 11, g.n = 12, g.k = 20;
            te_op_grouped_gemm(te, &g);
            REQUIRE_OK(te);
        }
        CHECK_BYTES("D", test_read_bytes(d[0]), test_read_bytes(d[1]), 11 * 12 * sizeof(float));
    }
}

/* Which kernels each kind gets on which GPU, without one. */
TE_TEST(grouped_plans) {
    static const char *const devices[] = {"sm_80", "sm_89", "sm_90", "sm_100", "sm_120"};
    te_ctx *te = test_context("cpu");
    if (!te) return;
    for (int d = 0; d < COUNT(devices); d++)
        for (int along_k = 0; along_k < 2; along_k++)
            for (int f = 0; f < 2; f++) {
                te_dtype dtype = f ? TE_F8E4M3 : TE_BF16;
                bool hopper = !strcmp(devices[d], "sm_90"), cores = hopper || !strcmp(devices[d], "sm_89") || !strcmp(devices[d], "sm_120");
                te_explanation e;
                te_op_grouped_gemm_args g = {0};
                test_case("%s %s along_k=%d", devices[d], te_dtype_name(dtype), along_k);
                g.groups = 4, g.m = 512, g.n = 1024, g.k = 2048;
                g.along_k = along_k, g.a_transposed = along_k && !f, g.b_transposed = f;
                g.a = te_tensor_describe(te, dtype, SHAPE(g.a_transposed ? 2048 : 512, g.a_transposed ? 512 : 2048));
                g.b = te_tensor_describe(te, dtype, SHAPE((along_k ? 1 : 4) * (f ? 1024 : 2048), f ? 2048 : 1024));
                g.d = te_tensor_describe(te, TE_F32, SHAPE(along_k ? 4 * 512 : 512, 1024));
                g.sizes = te_tensor_describe(te, TE_I32, SHAPE(4));
                CHECK(te_explain(te, TE_OP_GROUPED_GEMM, &g, devices[d], &e) == TE_OK && e.supported && e.deterministic);
                CHECK_STR(e.kernels, hopper ? "gemm/gemm_groups" : "gemm/gemm_mma");
                if (hopper) CHECK_STR(e.kernels, along_k ? "GROUPED=2" : "GROUPED=1");
                CHECK(e.native == (!f || cores));
            }
}

TE_TEST_DEVICES(grouped_complaints) {
    te_tensor *a = te_tensor_zeros(te, TE_BF16, SHAPE(10, 6)), *b = te_tensor_zeros(te, TE_BF16, SHAPE(2, 5, 6)), *d = te_tensor_zeros(te, TE_BF16, SHAPE(10, 5));
    te_tensor *sizes = te_tensor_zeros(te, TE_I32, SHAPE(2)), *e4m3 = te_tensor_zeros(te, TE_F8E4M3, SHAPE(10, 6));
    te_op_grouped_gemm_args good, g;
    memset(&good, 0, sizeof good);
    good.a = a, good.b = b, good.d = d, good.sizes = sizes;
    good.groups = 2, good.m = 10, good.n = 5, good.k = 6;
    good.b_transposed = true;
    te_op_grouped_gemm(te, &good);
    CHECK_OK(te);
#define COMPLAINS(code, text, ...)    \
    g = good;                         \
    __VA_ARGS__;                      \
    te_op_grouped_gemm(te, &g);          \
    CHECK_ERROR(te, code, text);
    COMPLAINS(TE_ERR_INVALID, "sizes and offsets are NULL", g.sizes = NULL)
    COMPLAINS(TE_ERR_INVALID, "both given", g.offsets = sizes)
    COMPLAINS(TE_ERR_SHAPE, "sizes is [2]; 3 elements", g.groups = 3, g.b = te_tensor_zeros(te, TE_BF16, SHAPE(3, 5, 6)))
    COMPLAINS(TE_ERR_SHAPE, "offsets is [2]; 3 elements", g.sizes = NULL, g.offsets = sizes)
    COMPLAINS(TE_ERR_DTYPE, "sizes is f32; i32 or i64", g.sizes = te_tensor_zeros(te, TE_F32, SHAPE(2)))
    COMPLAINS(TE_ERR_SHAPE, "B is [3, 5, 6]; 2 groups of 5 rows", g.b = te_tensor_zeros(te, TE_BF16, SHAPE(3, 5, 6)))
    COMPLAINS(TE_ERR_SHAPE, "grouped_gemm: A is [10, 6]; [m, k] makes it [11, 6]", g.m = 11)
    COMPLAINS(TE_ERR_SHAPE, "grouped_gemm: D is [0, 5]; one matrix for each group makes it [9223372036854775807, 5] or more", g.along_k = true, g.a_transposed = true, g.groups = 512,
              g.m = (int64_t)1 << 55, g.k = 0, g.a = te_tensor_zeros(te, TE_BF16, SHAPE(0, (int64_t)1 << 55)), g.b = te_tensor_zeros(te, TE_BF16, SHAPE(5, 0)),
              g.d = te_tensor_zeros(te, TE_BF16, SHAPE(0, 5)))
    COMPLAINS(TE_ERR_SHAPE, "grouped_gemm: bias is [0]; 9223372036854775807 elements are needed", g.b_transposed = false, g.groups = 512, g.m = g.k = 0, g.n = (int64_t)1 << 55,
              g.a = te_tensor_zeros(te, TE_BF16, SHAPE(0, 0)), g.b = te_tensor_zeros(te, TE_BF16, SHAPE(0, (int64_t)1 << 55)),
              g.d = te_tensor_zeros(te, TE_BF16, SHAPE(0, (int64_t)1 << 55)), g.bias = te_tensor_zeros(te, TE_BF16, SHAPE(0)), g.sizes = te_tensor_zeros(te, TE_I32, SHAPE(512)))
    COMPLAINS(TE_ERR_INVALID, "A is transposed", g.a_transposed = true)
    COMPLAINS(TE_ERR_INVALID, "cannot be negative", g.groups = -1)
    COMPLAINS(TE_ERR_DTYPE, "A is e4m3 and B bf16", g.a = e4m3)
    COMPLAINS(TE_ERR_SHAPE, "bias is [5]", g.bias = te_tensor_zeros(te, TE_BF16, SHAPE(5)))
    COMPLAINS(TE_ERR_SHAPE, "scale_a", g.scale_a = te_tensor_zeros(te, TE_F32, SHAPE(3)))
    COMPLAINS(TE_ERR_STATE, "aux is NULL", g.epilogue = TE_EPILOGUE_DGELU)
    COMPLAINS(TE_ERR_UNSUPPORTED, "groups take TENSOR", g.a = e4m3, g.b = te_tensor_zeros(te, TE_F8E4M3, SHAPE(2, 5, 6)),
              g.scaling_a = g.scaling_b = TE_SCALING_MXFP8, g.scale_a = g.scale_b = te_tensor_zeros(te, TE_F8E8M0, SHAPE(128, 4)))
    COMPLAINS(TE_ERR_INVALID, "belong to groups along rows", g.along_k = true, g.b = te_tensor_zeros(te, TE_BF16, SHAPE(5, 6)),
              g.d = te_tensor_zeros(te, TE_BF16, SHAPE(2, 10, 5)), g.bias = te_tensor_zeros(te, TE_BF16, SHAPE(2, 5)))
#undef COMPLAINS
}
