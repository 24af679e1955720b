/* test_attn.c: attention: the formula in float64, finite differences, masks, windows, grouped heads, layouts, dropout; the GPU against the
 * CPU; which kernels a plan picks. */
#include "../te_test.h"
#include "attn_keep.h"

/* All sizes that are 0 below take these: one small causal problem. */
typedef struct attn_case {
    int64_t b, heads, groups, s_q, s_kv, d, d_v;
    te_dtype dtype;
    te_attn_mask mask;
    te_qkv_format format;
    bool has_window;
    int64_t left, right;
    float scale, p;
    float spread; /* of q: large values make one key win */
    int64_t pad;  /* channels between the heads of every tensor */
} attn_case;

static attn_case complete(attn_case c) {
    if (!c.b) c.b = 1;
    if (!c.heads) c.heads = 2;
    if (!c.groups) c.groups = c.heads;
    if (!c.s_q) c.s_q = 20;
    if (!c.s_kv) c.s_kv = c.s_q;
    if (!c.d) c.d = 16;
    if (!c.d_v) c.d_v = c.d;
    if (!c.dtype) c.dtype = TE_F32;
    if (c.spread == 0) c.spread = 1;
    return c;
}

static void name_case(const attn_case *c) {
    test_case("%s %s b=%lld heads=%lld/%lld s=%lld,%lld d=%lld,%lld mask=%d window=%d(%lld,%lld) p=%g pad=%lld", te_dtype_name(c->dtype),
              c->format == TE_BSHD ? "bshd" : "sbhd", (long long)c->b, (long long)c->heads, (long long)c->groups, (long long)c->s_q, (long long)c->s_kv,
              (long long)c->d, (long long)c->d_v, (int)c->mask, c->has_window, (long long)c->left, (long long)c->right, (double)c->p, (long long)c->pad);
}

/* ---- data: arrays [b, heads, s, channels], whatever the layout of the tensors ---- */

enum { Q, K, V, O, DO, DQ, DK, DV, PARTS };

static int64_t heads_of(const attn_case *c, int part) { return part == K || part == V || part == DK || part == DV ? c->groups : c->heads; }
static int64_t length_of(const attn_case *c, int part) { return part == K || part == V || part == DK || part == DV ? c->s_kv : c->s_q; }
static int64_t channels_of(const attn_case *c, int part) { return part == Q || part == K || part == DQ || part == DK ? c->d : c->d_v; }
static int64_t count_of(const attn_case *c, int part) { return c->b * heads_of(c, part) * length_of(c, part) * channels_of(c, part); }
static int64_t at(const attn_case *c, int part, int64_t b, int64_t h, int64_t i) {
    return ((b * heads_of(c, part) + h) * length_of(c, part) + i) * channels_of(c, part);
}

typedef struct attn_data {
    float *x[PARTS];
    float *lse; /* [b, heads, s_q] */
    float *keep; /* [b, heads, s_q, s_kv]: what the scores of a dropped element are multiplied by */
} attn_data;

static attn_data make_data(const attn_case *c) {
    attn_data d = {0};
    for (int part = 0; part < PARTS; part++) {
        int64_t n = count_of(c, part);
        d.x[part] = test_floats(n);
        if (part == O || part > DO) continue;
        float *values = test_normal(n, (uint64_t)part + 1);
        if (part == Q)
            for (int64_t i = 0; i < n; i++) values[i] *= c->spread;
        d.x[part] = test_rounded(c->dtype, values, n);
    }
    d.lse = test_floats(c->b * c->heads * c->s_q);
    if (c->p > 0) d.keep = attn_keep(c->p, 123, 9, c->b * c->heads * c->s_q, c->s_kv);
    return d;
}

/* ---- float64 ---- */

static bool sees(const attn_case *c, int64_t i, int64_t j) {
    int64_t delta = c->mask == TE_MASK_DEFAULT || c->mask == TE_MASK_CAUSAL ? 0 : c->s_kv - c->s_q; /* without a mask, too, windows count from the last row and the last key */
    if (c->mask != TE_MASK_NONE && j > i + delta) return false;
    if (c->has_window && c->left >= 0 && j < i + delta - c->left) return false;
    return !(c->has_window && c->right >= 0 && j > i + delta + c->right);
}
static double scale_of(const attn_case *c) { return c->scale != 0 ? (double)c->scale : 1 / sqrt((double)c->d); }

/* p[0 .. s_kv - 1]: row (b, h, i) of the softmax; returns its lse. */
static double softmax_row(const attn_case *c, const float *q, const float *k, int64_t i, double *p) {
    double top = -INFINITY, sum = 0;
    for (int64_t j = 0; j < c->s_kv; j++) {
        double s = 0;
        for (int64_t x = 0; x < c->d; x++) s += (double)q[x] * k[j * c->d + x];
        p[j] = sees(c, i, j) ? s * scale_of(c) : -INFINITY;
        if (p[j] > top) top = p[j];
    }
    if (top == -INFINITY) {
        for (int64_t j = 0; j < c->s_kv; j++) p[j] = 0;
        return -INFINITY;
    }
    for (int64_t j = 0; j < c->s_kv; j++) sum += p[j] = exp(p[j] - top);
    for (int64_t j = 0; j < c->s_kv; j++) p[j] /= sum;
    return top + log(sum);
}

static attn_data reference(const attn_case *c, const attn_data *in) {
    attn_data out = *in;
    double *sum[PARTS], *p = test_doubles(c->s_kv), *dp = test_doubles(c->s_kv);
    for (int part = 0; part < PARTS; part++) {
        sum[part] = test_doubles(count_of(c, part));
        if (part == O || part > DO) out.x[part] = test_floats(count_of(c, part));
    }
    out.lse = test_floats(c->b * c->heads * c->s_q);
    for (int64_t b = 0; b < c->b; b++)
        for (int64_t h = 0; h < c->heads; h++) {
            int64_t g = h / (c->heads / c->groups), kv = at(c, K, b, g, 0), vv = at(c, V, b, g, 0);
            for (int64_t i = 0; i < c->s_q; i++) {
                int64_t qi = at(c, Q, b, h, i), oi = at(c, O, b, h, i), row = (b * c->heads + h) * c->s_q + i;
                double delta = 0;
                out.lse[row] = (float)softmax_row(c, in->x[Q] + qi, in->x[K] + kv, i, p);
                for (int64_t j = 0; j < c->s_kv; j++) {
                    double keep = in->keep ? (double)in->keep[row * c->s_kv + j] : 1;
                    dp[j] = 0;
                    for (int64_t x = 0; x < c->d_v; x++) {
                        double g_o = in->x[DO][oi + x], v = in->x[V][vv + j * c->d_v + x];
                        sum[O][oi + x] += p[j] * keep * v;
                        sum[DV][vv + j * c->d_v + x] += p[j] * keep * g_o;
                        dp[j] += keep * g_o * v;
                    }
                    delta += p[j] * dp[j];
                }
                for (int64_t j = 0; j < c->s_kv; j++) {
                    double ds = p[j] * (dp[j] - delta) * scale_of(c);
                    for (int64_t x = 0; x < c->d; x++) {
                        sum[DQ][qi + x] += ds * in->x[K][kv + j * c->d + x];
                        sum[DK][kv + j * c->d + x] += ds * in->x[Q][qi + x];
                    }
                }
            }
        }
    for (int part = 0; part < PARTS; part++)
        if (part == O || part > DO)
            for (int64_t i = 0; i < count_of(c, part); i++) out.x[part][i] = (float)sum[part][i];
    return out;
}

/* ---- the operation ---- */

/* Element [b, h, i, x] of `values`, or of NULL nothing, to or from the place that the case's layout has for it. */
static void transfer(const attn_case *c, int part, float *values, float *memory, bool into_memory) {
    int64_t heads = heads_of(c, part), s = length_of(c, part), n = channels_of(c, part), ld = n + c->pad;
    for (int64_t b = 0; b < c->b; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < s; i++)
                for (int64_t x = 0; x < n; x++) {
                    float *m = memory + ((c->format == TE_BSHD ? b * s + i : i * c->b + b) * heads + h) * ld + x, *v = values + at(c, part, b, h, i) + x;
                    if (into_memory)
                        *m = *v;
                    else
                        *v = *m;
                }
}

typedef struct attn_tensors {
    te_tensor *whole[PARTS], *x[PARTS], *lse; /* x: the whole without the padding */
} attn_tensors;

static te_tensor *part_tensor(te_ctx *te, const attn_case *c, int part, float *values, te_tensor **whole) {
    int64_t s = length_of(c, part), shape[4], n;
    shape[0] = c->format == TE_BSHD ? c->b : s;
    shape[1] = c->format == TE_BSHD ? s : c->b;
    shape[2] = heads_of(c, part);
    shape[3] = channels_of(c, part) + c->pad;
    n = test_numel(4, shape);
    if (values) {
        float *memory = test_floats(n);
        for (int64_t i = 0; i < n; i++) memory[i] = NAN; /* what lies between the heads must not be read */
        transfer(c, part, values, memory, true);
        *whole = test_tensor(te, c->dtype, 4, shape, memory);
    } else {
        *whole = test_guarded(te, c->dtype, 4, shape);
    }
    return c->pad ? te_tensor_narrow(*whole, 3, 0, channels_of(c, part)) : *whole;
}

static float *read_part(const attn_case *c, int part, te_tensor *whole) {
    float *values = test_floats(count_of(c, part)), *memory = test_read(whole);
    int64_t n = channels_of(c, part), ld = n + c->pad;
    transfer(c, part, values, memory, false);
    for (int64_t i = 0; i < te_tensor_numel(whole); i++)
        if (i % ld >= n && !isnan(memory[i])) {
            test_fail(__FILE__, __LINE__, "part %d was written between its heads", part);
            break;
        }
    return values;
}

static te_op_attn_fwd_args forward_args(const attn_case *c, const attn_tensors *t) {
    te_op_attn_fwd_args f = {0};
    f.q = t->x[Q];
    f.k = t->x[K];
    f.v = t->x[V];
    f.o = t->x[O];
    f.lse = t->lse;
    f.format = c->format;
    f.rule.mask = c->mask;
    f.rule.window.on = c->has_window;
    f.rule.window.left = c->left;
    f.rule.window.right = c->right;
    f.rule.softmax_scale = c->scale;
    f.rule.dropout_p = c->p;
    f.seed = 123;
    f.offset = 9;
    return f;
}
static te_op_attn_bwd_args backward_args(const attn_case *c, const attn_tensors *t) {
    te_op_attn_bwd_args a = {0};
    a.q = t->x[Q];
    a.k = t->x[K];
    a.v = t->x[V];
    a.o = t->x[O];
    a.lse = t->lse;
    a.d_o = t->x[DO];
    a.dq = t->x[DQ];
    a.dk = t->x[DK];
    a.dv = t->x[DV];
    a.format = c->format;
    a.rule.mask = c->mask;
    a.rule.window.on = c->has_window;
    a.rule.window.left = c->left;
    a.rule.window.right = c->right;
    a.rule.softmax_scale = c->scale;
    a.rule.dropout_p = c->p;
    a.seed = 123;
    a.offset = 9;
    return a;
}

static attn_data run(te_ctx *te, const attn_case *c, const attn_data *in) {
    attn_data out = *in;
    attn_tensors t;
    for (int part = 0; part < PARTS; part++) t.x[part] = part_tensor(te, c, part, part == O || part > DO ? NULL : in->x[part], &t.whole[part]);
    t.lse = test_guarded(te, TE_F32, SHAPE(c->b, c->heads, c->s_q));
    te_op_attn_fwd_args f = forward_args(c, &t);
    te_op_attn_bwd_args a = backward_args(c, &t);
    te_op_attn_fwd(te, &f);
    te_op_attn_bwd(te, &a);
    CHECK_OK(te);
    for (int part = 0; part < PARTS; part++)
        if (part == O || part > DO) out.x[part] = read_part(c, part, t.whole[part]);
    out.lse = test_read(t.lse);
    return out;
}

/* ---- comparing ---- */

/* Root mean square of the difference below `limit` of that of the values, no element off by twenty times as much. An error is relative to
 * what was summed; so where terms cancel (one key: dS = 0) the size of a typical term, 0.3, is added. */
static void near(const char *name, const float *got, const float *want, int64_t n, double limit) {
    double error = 0, size = 0, worst = 0;
    bool alike = true;
    for (int64_t i = 0; i < n; i++) {
        double e = fabs((double)got[i] - (double)want[i]);
        alike = alike && isnan(got[i]) == isnan(want[i]);
        if (isnan(want[i])) continue;
        error += e * e;
        size += (double)want[i] * want[i];
        if (e > worst) worst = e;
    }
    error = n ? sqrt(error / (double)n) : 0;
    size = n ? sqrt(size / (double)n) : 0;
    CHECK_MSG(alike, "%s: NaN where there should be none, or none where there should be", name);
    CHECK_MSG(error <= limit * (size + 0.3), "%s: the error is %.3g of %.3g (limit %.3g of it)", name, error, size, limit);
    CHECK_MSG(worst <= 20 * limit * (size + 0.3), "%s: an element is off by %.3g, at a size of %.3g (limit %.3g of it, times 20)", name, worst, size, limit);
}

/* f32: sums of hundreds of products, and exp makes the absolute error of a score a relative one. 16 bits: one rounding of the result on the CPU; on the GPU's tensor cores P and dS are rounded too
 * before they are multiplied, and the backward reads the rounded o. */
static double limit_of(const attn_case *c, bool backward) {
    double once = c->dtype == TE_F32 ? 3e-6 * c->spread : c->dtype == TE_F16 ? 4e-4 : 3e-3;
    return backward ? 5 * once : 2 * once;
}

static void compare(const attn_case *c, const attn_data *got, const attn_data *want) {
    static const char *const names[PARTS] = {"q", "k", "v", "o", "d_o", "dq", "dk", "dv"};
    int64_t rows = c->b * c->heads * c->s_q;
    for (int64_t i = 0; i < rows; i++)
        if (isinf(want->lse[i]) ? got->lse[i] != want->lse[i] : !(fabs(got->lse[i] - want->lse[i]) <= 1e-5 * (1 + fabs(want->lse[i])))) {
            test_fail(__FILE__, __LINE__, "lse of row %lld is %.9g, not %.9g", (long long)i, (double)got->lse[i], (double)want->lse[i]);
            break;
        }
    for (int part = O; part < PARTS; part++)
        if (part != DO) near(names[part], got->x[part], want->x[part], count_of(c, part), limit_of(c, part != O));
}

static void check_case(te_ctx *te, attn_case c) {
    c = complete(c);
    name_case(&c);
    attn_data in = make_data(&c), want = reference(&c, &in), got = run(te, &c, &in);
    compare(&c, &got, &want);
    te_ctx *cpu = test_cpu_beside(te);
    if (!cpu) return;
    attn_data other = run(cpu, &c, &in);
    compare(&c, &got, &other);
}

/* ---- tests ---- */

static const te_dtype formats[] = {TE_F32, TE_F16, TE_BF16};

/* Sizes around those of tiles, both layouts, every mask, grouped and single heads. */
static void check_shapes(te_ctx *te, te_dtype dtype) {
    static const int64_t lengths[][2] = {{1, 1}, {3, 3}, {1, 130}, {130, 1}, {127, 129}, {129, 127}, {64, 64}, {65, 200}};
    static const int64_t heads[][2] = {{2, 2}, {4, 2}, {3, 1}};
    int k = 0;
    for (int i = 0; i < COUNT(lengths); i++)
        for (int mask = TE_MASK_NONE; mask <= TE_MASK_CAUSAL_BOTTOM_RIGHT; mask++, k++) {
            attn_case c = {0};
            if (k % test_every_odd(3)) continue;
            c.b = 1 + k % 2;
            c.heads = heads[k % 3][0];
            c.groups = heads[k % 3][1];
            c.s_q = lengths[i][0];
            c.s_kv = lengths[i][1];
            c.d = k % 4 == 0 ? 64 : 32;
            c.mask = (te_attn_mask)mask;
            c.format = k / 2 % 2 ? TE_BSHD : TE_SBHD;
            c.dtype = dtype;
            check_case(te, c);
        }
}
TE_TEST_DEVICES(attn_f32) { check_shapes(te, TE_F32); }
TE_TEST_DEVICES(attn_f16) { check_shapes(te, TE_F16); }
TE_TEST_DEVICES(attn_bf16) { check_shapes(te, TE_BF16); }

TE_TEST_DEVICES(attn_head_sizes) {
    static const int64_t sizes[][2] = {{1, 1}, {8, 8}, {24, 40}, {72, 72}, {96, 96}, {128, 128}, {128, 64}, {33, 7}, {192, 128}, {256, 256}, {136, 136}, {200, 200}, {40, 256},
                                       {257, 257}, {512, 512}, {576, 512}, {1024, 1024}, {8, 700}, {1000, 3}}; /* in chunks */
    for (int f = 0; f < COUNT(formats); f++)
        for (int i = 0; i < COUNT(sizes); i++) {
            if ((f * COUNT(sizes) + i) % test_every_odd(5)) continue;
            attn_case c = {0};
            c.d = sizes[i][0];
            c.d_v = sizes[i][1];
            c.heads = 2;
            c.groups = 1;
            c.s_q = 70;
            c.s_kv = 75;
            c.dtype = formats[f];
            c.format = i % 2 ? TE_BSHD : TE_SBHD;
            check_case(te, c);
        }
}

/* Heads above 128 channels, whose gradients have kernels of their own on Hopper: sizes that these are made for and others, lengths around those of their tiles (64 keys; 64 and 128 queries), and every
 * option that they have. */
TE_TEST_DEVICES(attn_above_128) {
    static const attn_case cases[] = {
        {.d = 256, .s_q = 200, .heads = 4, .groups = 2, .mask = TE_MASK_CAUSAL, .b = 2},
        {.d = 192, .s_q = 129, .s_kv = 65, .mask = TE_MASK_NONE, .b = 2},
        {.d = 192, .d_v = 128, .s_q = 130, .s_kv = 300, .heads = 3, .groups = 1, .mask = TE_MASK_CAUSAL_BOTTOM_RIGHT},
        {.d = 256, .s_q = 200, .s_kv = 70, .mask = TE_MASK_CAUSAL_BOTTOM_RIGHT}, /* rows without keys */
        {.d = 192, .s_q = 70, .s_kv = 200, .mask = TE_MASK_CAUSAL, .b = 2},      /* keys without rows */
        {.d = 136, .s_q = 190, .mask = TE_MASK_CAUSAL, .has_window = true, .left = 40, .right = 0},
        {.d = 200, .s_q = 257, .s_kv = 256, .mask = TE_MASK_NONE, .has_window = true, .left = 17, .right = 5, .pad = 8, .format = TE_BSHD},
        {.d = 256, .s_q = 100, .s_kv = 132, .heads = 4, .groups = 1, .p = 0.25f, .mask = TE_MASK_NONE},
        {.d = 192, .d_v = 128, .s_q = 195, .s_kv = 196, .p = 0.5f, .mask = TE_MASK_CAUSAL, .b = 2},
        {.d = 192, .s_q = 65, .s_kv = 64, .p = 1, .mask = TE_MASK_NONE},
        {.d = 256, .s_q = 200, .s_kv = 131, .p = 0.1f, .mask = TE_MASK_NONE, .format = TE_BSHD},
        {.d = 192, .s_q = 130, .s_kv = 391, .heads = 4, .groups = 2, .p = 0.1f, .mask = TE_MASK_CAUSAL_BOTTOM_RIGHT},
        {.d = 256, .d_v = 64, .s_q = 1, .s_kv = 300, .heads = 8, .groups = 2, .mask = TE_MASK_NONE},
        {.d = 64, .d_v = 192, .s_q = 300, .s_kv = 1, .mask = TE_MASK_NONE, .format = TE_BSHD},
        {.d = 160, .d_v = 104, .s_q = 128, .mask = TE_MASK_CAUSAL, .pad = 16, .b = 2},
        {.d = 256, .s_q = 90, .s_kv = 100, .spread = 30, .mask = TE_MASK_NONE},
        {.d = 256, .s_q = 64, .heads = 6, .groups = 2, .mask = TE_MASK_CAUSAL, .b = 3, .format = TE_BSHD}};
    const int every = test_every_odd(6);
    for (int i = 0; i < COUNT(cases); i++)
        for (int f = 0; f < 2; f++) {
            attn_case c = cases[i];
            if ((f * COUNT(cases) + i) % every != 9 % every) continue; /* with a sanitizer two small ones, of both formats */
            c.dtype = f ? TE_BF16 : TE_F16;
            check_case(te, c);
        }
}

/* Windows on both sides, alone and under a mask; rows that see no key. */
TE_TEST_DEVICES(attn_windows) {
    static const int64_t windows[][2] = {{0, 0}, {5, 3}, {40, -1}, {-1, 40}, {17, 0}, {-1, -1}, {1000, 1000}};
    int n = 0;
    for (int f = 0; f < COUNT(formats); f++)
        for (int i = 0; i < COUNT(windows); i++)
            for (int mask = TE_MASK_NONE; mask <= TE_MASK_CAUSAL_BOTTOM_RIGHT; mask++) {
                attn_case c = {0};
                if (n++ % test_every_of(8, 4)) continue;
                c.s_q = i % 2 ? 150 : 90;
                c.s_kv = i % 2 ? 100 : 140;
                c.d = 32;
                c.mask = (te_attn_mask)mask;
                c.has_window = true;
                c.left = windows[i][0];
                c.right = windows[i][1];
                c.dtype = formats[f];
                check_case(te, c);
            }
}

/* A row that sees no key: o = 0, lse = -inf, no gradient, and nothing is NaN. */
TE_TEST_DEVICES(attn_rows_without_keys) {
    for (int f = 0; f < COUNT(formats); f++) {
        attn_case c = {0};
        c.s_q = 100;
        c.s_kv = 30;
        c.mask = TE_MASK_CAUSAL_BOTTOM_RIGHT;
        c.dtype = formats[f];
        c = complete(c);
        name_case(&c);
        attn_data in = make_data(&c), got = run(te, &c, &in), want = reference(&c, &in);
        compare(&c, &got, &want);
        for (int64_t h = 0; h < c.heads; h++)
            for (int64_t i = 0; i < 70; i++) {
                CHECK(got.lse[h * 100 + i] == -INFINITY);
                for (int64_t x = 0; x < c.d; x++) {
                    CHECK(got.x[O][at(&c, O, 0, h, i) + x] == 0);
                    CHECK(got.x[DQ][at(&c, DQ, 0, h, i) + x] == 0);
                }
            }
    }
}

/* The same elements are dropped in both directions, on both devices, and they are those of the description. */
TE_TEST_DEVICES(attn_dropout) {
    static const float ps[] = {0.1f, 0.5f, 1.0f};
    static const int64_t lengths[][2] = {{64, 64}, {70, 132}, {33, 45}, {131, 20}, {200, 259}};
    for (int f = 0; f < COUNT(formats); f++)
        for (int i = 0; i < COUNT(lengths); i++)
            for (int k = 0; k < COUNT(ps); k++) {
                attn_case c = {0};
                if ((f * COUNT(lengths) * COUNT(ps) + i * COUNT(ps) + k) % test_every_sanitized(11)) continue;
                c.b = 2;
                c.heads = 4;
                c.groups = 2;
                c.s_q = lengths[i][0];
                c.s_kv = lengths[i][1];
                c.d = k == 1 ? 128 : k == 2 ? 16 : 64;
                c.mask = i % 2 ? TE_MASK_NONE : TE_MASK_CAUSAL;
                c.dtype = formats[f];
                c.p = ps[k];
                check_case(te, c);
            }
}

/* Heads with something else between them: aligned for the fast kernels, and not. */
TE_TEST_DEVICES(attn_strided) {
    for (int f = 0; f < COUNT(formats); f++)
        for (int k = 0; k < 4; k++) {
            attn_case c = {0};
            if ((4 * f + k) % test_every_of(5, 2)) continue;
            c.b = 2;
            c.heads = 4;
            c.groups = 2;
            c.s_q = c.s_kv = 75;
            c.d = 64;
            c.pad = k & 1 ? 8 : 3;
            c.format = k & 2 ? TE_BSHD : TE_SBHD;
            c.dtype = formats[f];
            check_case(te, c);
        }
}

/* Scores of hundreds: exp must not overflow, and one key takes all. A scale of one's own, and a negative one. */
TE_TEST_DEVICES(attn_large_scores) {
    for (int f = 0; f < COUNT(formats); f++)
        for (int k = 0; k < 3; k++) {
            attn_case c = {0};
            if ((f + k) % test_every_odd(1)) continue;
            c.s_q = 90;
            c.s_kv = 100;
            c.d = 64;
            c.spread = k == 0 ? 30 : 1;
            c.scale = k == 1 ? 0.5f : k == 2 ? -0.2f : 0;
            c.dtype = formats[f];
            check_case(te, c);
        }
}

/* The loss sum(o * d_o) moves as dq, dk and dv say. */
TE_TEST_DEVICES(attn_finite_differences) {
    for (int k = 0; k < 3; k++) {
        attn_case c = {0};
        c.heads = 2;
        c.groups = 1;
        c.s_q = 5;
        c.s_kv = 7;
        c.d = 6;
        c.d_v = 4;
        c.mask = k == 1 ? TE_MASK_NONE : TE_MASK_CAUSAL_BOTTOM_RIGHT;
        c.p = k == 2 ? 0.3f : 0;
        c = complete(c);
        name_case(&c);
        attn_data in = make_data(&c), got = run(te, &c, &in);
        for (int part = Q; part <= V; part++) {
            int64_t n = count_of(&c, part);
            float *want = test_floats(n);
            for (int64_t i = 0; i < n; i++) {
                float at_start = in.x[part][i], step = 1.0f / 1024;
                double loss[2] = {0, 0};
                for (int side = 0; side < 2; side++) {
                    in.x[part][i] = at_start + (side ? step : -step);
                    attn_data moved = reference(&c, &in);
                    for (int64_t j = 0; j < count_of(&c, O); j++) loss[side] += (double)moved.x[O][j] * in.x[DO][j];
                }
                want[i] = (float)((loss[1] - loss[0]) / ((double)(at_start + step) - (double)(at_start - step)));
                in.x[part][i] = at_start;
            }
            CHECK_CLOSE(part == Q ? "dq" : part == K ? "dk" : "dv", got.x[part == Q ? DQ : part == K ? DK : DV], want, n, 1e-3, 5e-4);
        }
    }
}

/* The same bits again; on the CPU whatever the number of threads. */
TE_TEST_DEVICES(attn_same_bits) {
    for (int f = 0; f < COUNT(formats); f++) {
        attn_case c = {0};
        c.b = 2;
        c.heads = 6;
        c.groups = 2;
        c.s_q = c.s_kv = test_samples() ? 70 : 200;
        c.d = 64;
        c.dtype = formats[f];
        c.p = f == 2 ? 0.1f : 0;
        c = complete(c);
        name_case(&c);
        te_ctx *other = test_context_threads(te_ctx_device(te), 5);
        if (!other) return;
        attn_data in = make_data(&c), a = run(te, &c, &in), b = run(other, &c, &in);
        CHECK_BYTES("lse", a.lse, b.lse, (size_t)(c.b * c.heads * c.s_q) * 4);
        for (int part = O; part < PARTS; part++) CHECK_BYTES(part == O ? "o" : "gradient", a.x[part], b.x[part], (size_t)count_of(&c, part) * 4);
    }
}

/* NaN in a query stays in its row of o; NaN in a key reaches the rows that see it. */
TE_TEST_DEVICES(attn_nan) {
    for (int f = 0; f < COUNT(formats); f++)
        for (int part = Q; part <= K; part++) {
            attn_case c = {0};
            attn_tensors t;
            c.s_q = 80;
            c.d = 32;
            c.heads = 1;
            c.dtype = formats[f];
            c = complete(c);
            name_case(&c);
            attn_data in = make_data(&c);
            in.x[part][at(&c, part, 0, 0, 40) + 3] = NAN;
            for (int i = Q; i <= O; i++) t.x[i] = part_tensor(te, &c, i, i == O ? NULL : in.x[i], &t.whole[i]);
            t.lse = test_guarded(te, TE_F32, SHAPE(1, 1, 80));
            te_op_attn_fwd_args a = forward_args(&c, &t);
            te_op_attn_fwd(te, &a);
            CHECK_OK(te);
            float *o = read_part(&c, O, t.whole[O]);
            for (int64_t i = 0; i < 80; i++) CHECK_EQ_INT(isnan(o[at(&c, O, 0, 0, i)]) != 0, part == Q ? i == 40 : i >= 40);
        }
}

TE_TEST_DEVICES(attn_empty) {
    static const int64_t sizes[][4] = {{0, 2, 5, 5}, {1, 2, 0, 5}, {1, 2, 5, 0}, {1, 0, 5, 5}}; /* b, heads, s_q, s_kv */
    for (int f = 0; f < COUNT(formats); f++)
        for (int i = 0; i < COUNT(sizes); i++) {
            attn_case c = {0};
            c = complete(c);
            c.b = sizes[i][0];
            c.heads = c.groups = sizes[i][1];
            c.s_q = sizes[i][2];
            c.s_kv = sizes[i][3];
            c.mask = TE_MASK_NONE;
            c.dtype = formats[f];
            name_case(&c);
            attn_data in = make_data(&c), want = reference(&c, &in), got = run(te, &c, &in);
            compare(&c, &got, &want);
        }
}

/* No lse: inference. */
TE_TEST_DEVICES(attn_without_lse) {
    for (int f = 0; f < COUNT(formats); f++) {
        attn_case c = {0};
        attn_tensors t;
        c.dtype = formats[f];
        c = complete(c);
        name_case(&c);
        attn_data in = make_data(&c), want = reference(&c, &in);
        for (int i = Q; i <= O; i++) t.x[i] = part_tensor(te, &c, i, i == O ? NULL : in.x[i], &t.whole[i]);
        t.lse = NULL;
        te_op_attn_fwd_args a = forward_args(&c, &t);
        te_op_attn_fwd(te, &a);
        CHECK_OK(te);
        near("o", read_part(&c, O, t.whole[O]), want.x[O], count_of(&c, O), limit_of(&c, false));
    }
}

TE_TEST_DEVICES(attn_refuses) {
    attn_case c = {0};
    attn_tensors t;
    c = complete(c);
    attn_data in = make_data(&c);
    for (int part = 0; part < PARTS; part++) t.x[part] = part_tensor(te, &c, part, part == O || part > DO ? NULL : in.x[part], &t.whole[part]);
    t.lse = test_guarded(te, TE_F32, SHAPE(1, 2, 20));
    te_op_attn_fwd_args good = forward_args(&c, &t), f;
    te_op_attn_bwd_args good_bwd = backward_args(&c, &t), b;

    f = good, f.k = te_tensor_empty(te, TE_F32, SHAPE(20, 1, 2, 17)), te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "k is [20, 1, 2, 17]");
    f = good, f.k = f.v = te_tensor_empty(te, TE_F32, SHAPE(20, 1, 3, 16)), te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "q has 2 heads and k has 3");
    f = good, f.v = te_tensor_empty(te, TE_F32, SHAPE(21, 1, 2, 16)), te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "v is [21, 1, 2, 16]; with k it must be [20, 1, 2, 16]");
    f = good, f.o = te_tensor_empty(te, TE_F32, SHAPE(20, 1, 2, 15)), te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "o is [20, 1, 2, 15]");
    f = good, f.q = te_tensor_empty(te, TE_F32, SHAPE(20, 32)), te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "[s, b, heads, d]");
    f = good, f.q = te_tensor_empty(te, TE_I32, SHAPE(20, 1, 2, 16)), te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_DTYPE, "q is i32");
    f = good, f.q = te_tensor_transpose(te_tensor_empty(te, TE_F32, SHAPE(20, 1, 16, 2)), 2, 3), te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "te_tensor_contiguous");
    f = good, f.lse = te_tensor_empty(te, TE_F32, SHAPE(1, 2, 19)), te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "lse");
    f = good, f.q = NULL, te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_STATE, "q is NULL");
    f = good, f.rule.dropout_p = 1.5f, te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "1.5");
    f = good, f.rule.mask = (te_attn_mask)9, te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "mask is 9");
    f = good, f.rule.window.on = true, f.rule.window.left = -2, te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "window is -2");
    f = good, f.q = f.k = te_tensor_empty(te, TE_F32, SHAPE(20, 1, 2, 1025)), te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "the head sizes are 1025 (q and k) and 16 (v); 1 to 1024 are possible");
    b = good_bwd, b.lse = NULL, te_op_attn_bwd(te, &b);
    CHECK_ERROR(te, TE_ERR_STATE, "lse is NULL");
    b = good_bwd, b.dk = te_tensor_empty(te, TE_F32, SHAPE(20, 1, 1, 16)), te_op_attn_bwd(te, &b);
    CHECK_ERROR(te, TE_ERR_SHAPE, "dk is [20, 1, 1, 16]; with k it must be [20, 1, 2, 16]");
    te_ctx *elsewhere = test_context("cpu");
    f = good, f.q = te_tensor_empty(elsewhere, TE_F32, SHAPE(20, 1, 2, 16)), te_op_attn_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "another context");
}

/* Which kernels a plan names, without a GPU. */
static void check_plan(te_ctx *te, te_dtype dtype, int64_t d, float p, int64_t s, const char *device, bool fast_forward, bool fast_backward) {
    te_explanation e;
    attn_tensors t;
    attn_case c = {0};
    c.s_q = s;
    c.d = d;
    c.dtype = dtype;
    c.p = p;
    c = complete(c);
    name_case(&c);
    for (int part = 0; part < PARTS; part++)
        t.x[part] = te_tensor_describe(te, dtype, SHAPE(length_of(&c, part), c.b, heads_of(&c, part), channels_of(&c, part)));
    t.lse = te_tensor_describe(te, TE_F32, SHAPE(c.b, c.heads, c.s_q));
    te_op_attn_fwd_args f = forward_args(&c, &t);
    te_op_attn_bwd_args b = backward_args(&c, &t);
    CHECK(te_explain(te, TE_OP_ATTN_FWD, &f, device, &e) == TE_OK && e.supported && e.deterministic);
    const char *forward = !fast_forward ? "attn/attn_fwd" : strcmp(device, "sm_90") == 0 ? "attn/attn_fwd_hopper" : "attn/attn_fwd_mma";
    const bool bits_forward = p > 0 && fast_forward && strcmp(device, "sm_90") == 0; /* one launch more, in front */
    const char *kernel = strstr(e.kernels, forward);
    CHECK_MSG(kernel == e.kernels + (bits_forward ? strlen("attn/attn_dropout_bits ") : 0) && kernel[strlen(forward)] != '_', "%s: %s, not %s", device, e.kernels, forward);
    CHECK_MSG(!strstr(e.kernels, "attn/attn_dropout_bits") == !bits_forward, "%s: %s", device, e.kernels);
    CHECK_EQ_INT(e.launches, 1 + bits_forward);
    CHECK_STR(e.why, !fast_forward ? "and not tensor cores: " : strcmp(device, "sm_90") == 0 ? "TMA and wgmma" : "by mma.sync and not wgmma: the chip is no Hopper");
    CHECK(te_explain(te, TE_OP_ATTN_BWD, &b, device, &e) == TE_OK && e.supported && e.deterministic);
    const bool hopper = fast_backward && strcmp(device, "sm_90") == 0;
    CHECK_STR(e.kernels, hopper ? d > 128 ? "attn/attn_bwd_dkv_hopper" : "attn/attn_bwd_hopper" : fast_backward ? "attn/attn_bwd_dkv_mma" : "attn/attn_bwd_dkv");
    CHECK_MSG(!strstr(e.kernels, "_mma") == !(fast_backward && !hopper), "%s: %s", device, e.kernels);
    CHECK_STR(e.why, hopper ? "TMA and wgmma" : fast_backward ? "by mma.sync and not wgmma: the chip is no Hopper" : "and not tensor cores: ");
    CHECK_MSG(!strstr(e.kernels, "attn/attn_dropout_bits") == !(hopper && p > 0), "%s: %s", device, e.kernels);
    CHECK_EQ_INT(e.launches, 3 + (hopper && p > 0));
    CHECK(e.workspace >= 8 * (size_t)(c.heads * s));
    CHECK_OK(te);
}
TE_TEST(attn_plans) {
    static const char *const devices[] = {"sm_80", "sm_86", "sm_90", "sm_100", "sm_120"};
    te_ctx *te = test_context("cpu");
    if (!te) return;
    for (int i = 0; i < COUNT(devices); i++) {
        check_plan(te, TE_BF16, 128, 0, 100, devices[i], true, true);
        check_plan(te, TE_F16, 40, 0, 100, devices[i], true, true);
        check_plan(te, TE_BF16, 64, 0.1f, 100, devices[i], true, true);
        check_plan(te, TE_BF16, 64, 0.1f, 101, devices[i], true, true);
        check_plan(te, TE_BF16, 256, 0, 100, devices[i], true, strcmp(devices[i], "sm_90") == 0);
        check_plan(te, TE_BF16, 128, 0.1f, 100, devices[i], true, true);
        check_plan(te, TE_BF16, 33, 0, 100, devices[i], false, false);
        check_plan(te, TE_F32, 64, 0, 100, devices[i], false, false);
    }
}

/* Dropout's bits that would fill more than 2 GB are drawn by the kernels themselves. */
TE_TEST(attn_plans_dropout) {
    te_ctx *te = test_context("cpu");
    if (!te) return;
    for (int k = 0; k < 3; k++) {
        te_explanation e;
        attn_tensors t;
        attn_case c = {.b = 4, .heads = 64, .s_q = k == 1 ? 8192 : 8191, .d = k == 2 ? 192 : 128, .p = 0.1f, .dtype = TE_BF16};
        c = complete(c);
        name_case(&c);
        for (int part = 0; part < PARTS; part++)
            t.x[part] = te_tensor_describe(te, TE_BF16, SHAPE(length_of(&c, part), c.b, heads_of(&c, part), channels_of(&c, part)));
        t.lse = te_tensor_describe(te, TE_F32, SHAPE(c.b, c.heads, c.s_q));
        te_op_attn_fwd_args f = forward_args(&c, &t);
        te_op_attn_bwd_args b = backward_args(&c, &t);
        CHECK(te_explain(te, TE_OP_ATTN_FWD, &f, "sm_90", &e) == TE_OK && e.supported);
        CHECK_STR(e.kernels, "X_DROPOUT=2");
        CHECK_STR(e.why, "TMA and wgmma, which draw dropout's bits themselves: these would fill more than 2 GB");
        CHECK_EQ_INT(e.launches, 1);
        CHECK(te_explain(te, TE_OP_ATTN_BWD, &b, "sm_90", &e) == TE_OK && e.supported);
        CHECK_STR(e.kernels, "X_DROPOUT=2");
        CHECK_STR(e.why, "these would fill more than 2 GB");
        c.b = 3, f.rule.dropout_p = 1e-7f; /* which rounds to none */
        CHECK(te_explain(te, TE_OP_ATTN_FWD, &f, "sm_90", &e) == TE_OK && e.supported);
        CHECK_STR(e.kernels, "X_DROPOUT=0");
        CHECK_OK(te);
    }
}

/* Kernels that draw such bits themselves keep the same elements: all scores are 0, and channel c of v and of the gradient of o is 1 in every 64th row, so that o and dv count what is kept,
 * 64 elements at most, times one factor. On Hopper alone: it takes 7 GB. */
TE_TEST_DEVICES(attn_dropout_beyond_memory) {
    enum { B = 1024, S = 4096, D = 64 };
    te_tensor *all[PARTS];
    if (!te_ctx_is_cuda(te) || te_ctx_sm(te) != 90) {
        test_skip("a GPU of sm_90");
        return;
    }
    for (int part = 0; part < PARTS; part++) all[part] = te_tensor_zeros(te, TE_BF16, SHAPE(B, S, 1, D));
    te_tensor *lse = te_tensor_empty(te, TE_F32, SHAPE(B, 1, S));
    float *one = test_floats((int64_t)S * D);
    for (int i = 0; i < S; i++) one[i * D + i % D] = 1;
    te_tensor *rows = test_tensor(te, TE_BF16, SHAPE(1, S, 1, D), one);
    for (int b = 0; b < B; b++) te_tensor_copy(te_tensor_narrow(all[V], 0, b, 1), rows);
    te_op_attn_fwd_args f = {.q = all[Q], .k = all[K], .v = all[V], .o = all[O], .lse = lse, .format = TE_BSHD, .rule = {.mask = TE_MASK_NONE, .dropout_p = 0.3f}, .seed = 5, .offset = 6};
    te_op_attn_bwd_args g = {.q = all[Q], .k = all[K], .v = all[V], .o = all[O], .lse = lse, .d_o = all[V], .dq = all[DQ], .dk = all[DK], .dv = all[DV], .format = TE_BSHD, .rule = f.rule, .seed = 5, .offset = 6};
    te_op_attn_fwd(te, &f);
    te_op_attn_bwd(te, &g);
    CHECK_OK(te);
    const double factor = 1 / (1 - attn_used_p(0.3f)) / S;
    for (int n = 0; n < 3; n++) {
        const int b = n * (B - 1) / 2;
        float *got_o = test_read(te_tensor_narrow(all[O], 0, b, 1)), *got_dv = test_read(te_tensor_narrow(all[DV], 0, b, 1)), *keep = attn_keep_from(0.3f, 5, 6, (int64_t)b * S, S, S);
        float *want_o = test_floats((int64_t)S * D), *want_dv = test_floats((int64_t)S * D);
        for (int i = 0; i < S; i++)
            for (int j = 0; j < S; j++)
                if (keep[(int64_t)i * S + j] != 0) want_o[i * D + j % D] += (float)factor, want_dv[j * D + i % D] += (float)factor;
        CHECK_CLOSE("o", got_o, want_o, (int64_t)S * D, 6e-3, 0); /* one rounding to bf16, and that of P */
        CHECK_CLOSE("dv", got_dv, want_dv, (int64_t)S * D, 6e-3, 0);
    }
}

/* Heads above 128 channels have Hopper's kernels or the general ones; what those lack is what the plan says. */
TE_TEST(attn_plans_above_128) {
    static const struct {
        const char *device, *kernels, *why;
        int64_t d, d_v, groups;
        float p;
        te_attn_bias bias;
    } cases[] = {{"sm_90", "attn/attn_bwd_rows.X_DT=3,X_D=256 attn/attn_bwd_dkv_hopper.X_DT=3,X_D=192,X_D_V=192,X_DROPOUT=0 attn/attn_bwd_dq_hopper.X_DT=3,X_D=192,X_D_V=192,X_DROPOUT=0", "TMA and wgmma", 136, 192, 2, 0, TE_ATTN_BIAS_NONE},
                 {"sm_90", "attn/attn_bwd_rows.X_DT=3,X_D=128 attn/attn_bwd_dkv_hopper.X_DT=3,X_D=192,X_D_V=128,X_DROPOUT=0", "TMA and wgmma", 192, 128, 1, 0, TE_ATTN_BIAS_NONE},
                 {"sm_90", "attn/attn_bwd_dq_hopper.X_DT=3,X_D=256,X_D_V=256,X_DROPOUT=1", "TMA and wgmma", 256, 64, 2, 0.1f, TE_ATTN_BIAS_NONE},
                 {"sm_90", "attn/attn_bwd_dkv_hopper.X_DT=3,X_D=256,X_D_V=256,X_DROPOUT=0,X_ALIBI=1 attn/attn_bwd_dq_hopper.X_DT=3,X_D=256,X_D_V=256,X_DROPOUT=0,X_ALIBI=1", "TMA and wgmma", 256, 256, 2, 0, TE_ATTN_BIAS_ALIBI},
                 {"sm_80", "attn/attn_bwd_dkv.X_WIDE=0", "and not tensor cores: gradients of heads above 128 channels, which Hopper's kernels alone have", 256, 256, 2, 0, TE_ATTN_BIAS_NONE}};
    te_ctx *te = test_context("cpu");
    if (!te) return;
    for (int i = 0; i < COUNT(cases); i++) {
        te_explanation e;
        attn_tensors t;
        attn_case c = {.s_q = 200, .d = cases[i].d, .d_v = cases[i].d_v, .groups = cases[i].groups, .p = cases[i].p, .dtype = TE_BF16};
        c = complete(c);
        name_case(&c);
        for (int part = 0; part < PARTS; part++)
            t.x[part] = te_tensor_describe(te, TE_BF16, SHAPE(length_of(&c, part), c.b, heads_of(&c, part), channels_of(&c, part)));
        t.lse = te_tensor_describe(te, TE_F32, SHAPE(c.b, c.heads, c.s_q));
        te_op_attn_bwd_args b = backward_args(&c, &t);
        b.rule.core_attention_bias_type = cases[i].bias;
        CHECK(te_explain(te, TE_OP_ATTN_BWD, &b, cases[i].device, &e) == TE_OK && e.supported && e.deterministic);
        CHECK_STR(e.kernels, cases[i].kernels);
        CHECK_STR(e.why, cases[i].why);
        CHECK_OK(te);
    }
}
