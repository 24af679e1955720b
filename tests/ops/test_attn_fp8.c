/* Attention of FP8 codes: against the softmax in doubles, masked, packed and padded; no worse than the emulation, which rounds by one scale; the same bits again, alone and packed; what is refused. */
#include "../te_test.h"

typedef enum kind { NORMAL, MEAN, OUTLIERS, PEAKED, SHARP, FALLING, EQUAL, KINDS } kind;
static const char *const kind_names[KINDS] = {"normal", "a mean of V", "outliers", "peaked", "sharp", "falling", "equal"};

typedef struct problem {
    int64_t b, heads, groups, s_q, s_kv, d, d_v;
    te_attn_mask mask;
    int64_t window; /* keys to the left; 0: all */
    te_qkv_format format;
    kind data;
    te_dtype o;
    int64_t length_q[4], length_kv[4]; /* with a padding mask; 0: whole */
    bool emulated;                     /* S by one scale */
} problem;

enum { Q, K, V, INPUTS };
static const float factors[INPUTS] = {0.03125f, 0.02f, 0.015625f};

static bool pads(const problem *p) { return p->mask >= TE_MASK_PADDING && p->mask <= TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT; }
static int64_t length_of(const problem *p, int part, int64_t b) {
    const int64_t n = part == Q ? p->length_q[b] : p->length_kv[b], all = part == Q ? p->s_q : p->s_kv;
    return pads(p) && n ? n : all;
}
static int64_t start_of(const problem *p, int part, int64_t b) {
    int64_t at = 0;
    for (int64_t i = 0; i < b; i++) at += length_of(p, part, i);
    return at;
}
static int64_t heads_of(const problem *p, int part) { return part == Q ? p->heads : p->groups; }
static int64_t wide_of(const problem *p, int part) { return part == V ? p->d_v : p->d; }
/* Rows of packed tensors: some belong to no sequence. */
static int64_t rows_of(const problem *p, int part) { return p->format == TE_THD ? start_of(p, part, p->b) + 3 : part == Q ? p->s_q : p->s_kv; }
static int64_t place(const problem *p, int part, int64_t wide, int64_t b, int64_t h, int64_t i) {
    const int64_t row = p->format == TE_THD ? start_of(p, part, b) + i : p->format == TE_BSHD ? b * rows_of(p, part) + i : i * p->b + b;
    return (row * heads_of(p, part) + h) * wide;
}
static int shape_of(const problem *p, int part, int64_t wide, int64_t shape[4]) {
    const int n = p->format == TE_THD ? 3 : 4;
    shape[p->format == TE_BSHD] = rows_of(p, part);
    if (n == 4) shape[p->format != TE_BSHD] = p->b;
    shape[n - 2] = heads_of(p, part);
    shape[n - 1] = wide;
    return n;
}

typedef struct data {
    float *x[INPUTS]; /* numbers of codes, without the factors; in rows of no sequence NaN */
} data;
/* Row i of a head of sequence b has the same numbers in every format. */
static data make_data(const problem *p) {
    data d;
    int64_t shape[4];
    for (int part = 0; part < INPUTS; part++) {
        const int64_t wide = wide_of(p, part), n = test_numel(shape_of(p, part, wide, shape), shape), heads = heads_of(p, part), rows = part == Q ? p->s_q : p->s_kv;
        float *normal = test_normal(p->b * heads * rows * wide, (uint64_t)part + 31);
        d.x[part] = test_floats(n);
        for (int64_t i = 0; i < n; i++) d.x[part][i] = NAN;
        for (int64_t b = 0; b < p->b; b++)
            for (int64_t h = 0; h < heads; h++)
                for (int64_t i = 0; i < length_of(p, part, b); i++)
                    for (int64_t c = 0; c < wide; c++) {
                        float x = normal[((b * heads + h) * rows + i) * wide + c];
                        if (p->data == MEAN && part == V) x += 2;
                        if (p->data == OUTLIERS && c % 61 == 7) x *= part == V ? 20.0f : 6.0f;
                        if (p->data == PEAKED && part == Q) x *= 6;
                        if (p->data == SHARP && part != V) x *= part == Q ? 3.4f : 2.2f;
                        if (p->data == FALLING && part == K) x = 0.2f * x + (c == 3 ? 12.0f - 12.0f * (float)i / (float)p->s_kv : 0);
                        if (p->data == FALLING && part == Q) x = 0.2f * x + (c == 3 ? 11.0f : 0);
                        if (p->data == EQUAL && part == Q) x = 0;
                        d.x[part][place(p, part, wide, b, h, i) + c] = x / factors[part];
                    }
        d.x[part] = test_rounded(TE_F8E4M3, d.x[part], n);
    }
    return d;
}

typedef struct result {
    float *o, *lse, amax;
    test_bytes bytes; /* of o and lse */
} result;
static te_tensor *one_number(te_ctx *te, float x) { return test_tensor(te, TE_F32, SHAPE(1), &x); }
static te_tensor *starts(te_ctx *te, const problem *p, int part) {
    int64_t at[5];
    for (int64_t b = 0; b <= p->b; b++) at[b] = start_of(p, part, b);
    return test_i32(te, SHAPE(p->b + 1), at);
}
static te_op_attn_fwd_args call_of(te_ctx *te, const problem *p, const data *d) {
    te_op_attn_fwd_args f = {0};
    te_tensor *x[INPUTS];
    int64_t shape[4];
    for (int i = 0; i < INPUTS; i++) {
        const int n = shape_of(p, i, wide_of(p, i), shape);
        x[i] = test_tensor(te, TE_F8E4M3, n, shape, d->x[i]);
    }
    f.q = x[Q], f.k = x[K], f.v = x[V];
    const int n = shape_of(p, Q, p->d_v, shape);
    f.o = test_guarded(te, p->o, n, shape);
    f.lse = p->format == TE_THD ? test_guarded(te, TE_F32, SHAPE(p->heads, rows_of(p, Q))) : test_guarded(te, TE_F32, SHAPE(p->b, p->heads, p->s_q));
    f.format = p->format;
    f.rule.mask = p->mask;
    if (pads(p)) f.rule.cu_seqlens_q = starts(te, p, Q), f.rule.cu_seqlens_kv = starts(te, p, K);
    if (p->format == TE_THD) f.rule.max_seqlen_q = p->s_q, f.rule.max_seqlen_kv = p->s_kv;
    if (p->window) f.rule.window.on = true, f.rule.window.left = p->window, f.rule.window.right = p->mask == TE_MASK_NONE || p->mask == TE_MASK_PADDING ? 5 : 0;
    f.fp8.s_dtype = TE_F8E4M3;
    f.fp8.s_scale = p->emulated ? one_number(te, 448) : NULL;
    f.fp8.s_amax = one_number(te, 0);
    f.fp8.q_scale_inv = one_number(te, factors[Q]);
    f.fp8.k_scale_inv = one_number(te, factors[K]);
    f.fp8.v_scale_inv = one_number(te, factors[V]);
    return f;
}
static result run(te_ctx *te, const problem *p, const data *d) {
    result r = {0};
    te_scope_begin(te);
    te_op_attn_fwd_args f = call_of(te, p, d);
    te_op_attn_fwd(te, &f);
    CHECK_OK(te);
    r.o = test_read(f.o);
    r.lse = test_read(f.lse);
    r.amax = test_read(f.fp8.s_amax)[0];
    test_put(&r.bytes, f.o);
    test_put(&r.bytes, f.lse);
    te_scope_end(te);
    return r;
}

static bool sees(const problem *p, int64_t b, int64_t i, int64_t j) {
    const int64_t n_q = length_of(p, Q, b), n_kv = length_of(p, K, b);
    const bool causal = p->mask == TE_MASK_CAUSAL || p->mask == TE_MASK_PADDING_CAUSAL || p->mask == TE_MASK_CAUSAL_BOTTOM_RIGHT || p->mask == TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT;
    const bool bottom = p->mask != TE_MASK_CAUSAL && p->mask != TE_MASK_PADDING_CAUSAL;
    const int64_t diagonal = i + (bottom ? n_kv - n_q : 0);
    if (causal && j > diagonal) return false;
    return !p->window || (j >= diagonal - p->window && j <= diagonal + (causal ? 0 : 5));
}
typedef struct row {
    double *o, *size; /* size: the sums of P |V| */
    double lse, largest, most; /* the largest P, the largest |score| */
} row;
static row row_of(const problem *p, const data *d, int64_t b, int64_t h, int64_t i) {
    const int64_t n = length_of(p, K, b), g = h / (p->heads / p->groups);
    const double scale = (double)factors[Q] * (double)factors[K] / sqrt((double)p->d);
    const float *q = d->x[Q] + place(p, Q, p->d, b, h, i);
    double *s = (double *)test_alloc((size_t)n * 8 + 8), sum = 0, top = -INFINITY;
    row r = {(double *)test_alloc((size_t)p->d_v * 8), (double *)test_alloc((size_t)p->d_v * 8), -INFINITY, 0, 0};
    for (int64_t j = 0; j < n; j++) {
        const float *k = d->x[K] + place(p, K, p->d, b, g, j);
        s[j] = -INFINITY;
        if (!sees(p, b, i, j)) continue;
        s[j] = 0;
        for (int64_t c = 0; c < p->d; c++) s[j] += (double)q[c] * (double)k[c];
        s[j] *= scale;
        top = fmax(top, s[j]);
        r.most = fmax(r.most, fabs(s[j]));
    }
    if (top == -INFINITY) return r;
    for (int64_t j = 0; j < n; j++) sum += exp(s[j] - top);
    r.lse = top + log(sum);
    r.largest = 1 / sum;
    for (int64_t j = 0; j < n; j++) {
        const float *v = d->x[V] + place(p, V, p->d_v, b, g, j);
        const double weight = exp(s[j] - r.lse) * (double)factors[V], floor = ldexp(r.largest, -13) * (double)factors[V];
        if (s[j] == -INFINITY) continue;
        for (int64_t c = 0; c < p->d_v; c++) r.o[c] += weight * (double)v[c], r.size[c] += (weight + 16 * floor) * fabs((double)v[c]);
    }
    return r;
}

/* A code of P is off by a sixteenth at most, and by 2^-10 of a number 2^4 that stands for the largest; O is rounded to 16 bits. FP8 products keep 13 bits below the
 * largest of their terms, so that scores are off by some thousandths of the largest score. */
static void check(te_ctx *te, const problem *p) {
    const data d = make_data(p);
    const result got = run(te, p, &d);
    const bool codes = te_ctx_is_cuda(te);
    double error = 0, size = 0, largest = 0, most = 0;
    for (int64_t b = 0; b < p->b; b++)
        for (int64_t h = 0; h < p->heads; h++)
            for (int64_t i = 0; i < (p->format == TE_THD ? length_of(p, Q, b) : p->s_q); i++) {
                const float *o = got.o + place(p, Q, p->d_v, b, h, i),
                            lse = p->format == TE_THD ? got.lse[h * rows_of(p, Q) + start_of(p, Q, b) + i] : got.lse[(b * p->heads + h) * p->s_q + i];
                row want = {0};
                if (i < length_of(p, Q, b)) want = row_of(p, &d, b, h, i);
                if (!want.o || want.lse == -INFINITY) { /* padding, or no keys */
                    for (int64_t c = 0; c < p->d_v; c++)
                        if (o[c] != 0) CHECK_MSG(false, "row %d of head %d of sequence %d sees no key, and is %g", (int)i, (int)h, (int)b, (double)o[c]);
                    if (lse != -INFINITY) CHECK_MSG(false, "row %d of head %d of sequence %d sees no key, and lse is %g", (int)i, (int)h, (int)b, (double)lse);
                    continue;
                }
                const double score = codes ? 2e-3 * (0.3 + want.most) : 1e-5 * (1 + want.most);
                if (!(fabs((double)lse - want.lse) <= score))
                    CHECK_MSG(false, "row %d of head %d of sequence %d: lse is %.9g, not %.9g", (int)i, (int)h, (int)b, (double)lse, want.lse);
                for (int64_t c = 0; c < p->d_v; c++) {
                    const double e = fabs((double)o[c] - want.o[c]);
                    if (!(e <= (1.0 / 16 + 2 * score + 4e-3) * want.size[c] + 1e-30)) {
                        CHECK_MSG(false, "row %d of head %d of sequence %d, channel %d is %.9g, not %.9g", (int)i, (int)h, (int)b, (int)c, (double)o[c], want.o[c]);
                        return;
                    }
                    error += e * e, size += want.o[c] * want.o[c];
                }
                largest = fmax(largest, want.largest), most = fmax(most, want.most);
            }
    /* rounding to codes has a relative error of 2.65e-2 in the mean, and sums have less */
    CHECK_MSG(sqrt(error) <= 3.5e-2 * sqrt(size) + 1e-30, "the error is %.3g of %.3g", sqrt(error), sqrt(size));
    CHECK_MSG(fabs((double)got.amax - largest) <= (codes ? 4e-3 * (0.3 + most) : 1e-4) * largest, "the largest S is %.9g, not %.9g", (double)got.amax, largest);
}

static const problem problems[] = {
    {2, 4, 2, 130, 260, 128, 128, TE_MASK_NONE, 0, TE_BSHD, NORMAL, TE_BF16, {0}, {0}, false},
    {1, 4, 1, 384, 384, 128, 128, TE_MASK_CAUSAL, 0, TE_SBHD, NORMAL, TE_BF16, {0}, {0}, false},
    {1, 2, 2, 300, 300, 64, 64, TE_MASK_CAUSAL, 0, TE_BSHD, NORMAL, TE_F16, {0}, {0}, false},
    {2, 2, 1, 257, 511, 128, 128, TE_MASK_CAUSAL_BOTTOM_RIGHT, 0, TE_BSHD, FALLING, TE_BF16, {0}, {0}, false},
    {1, 2, 1, 300, 200, 128, 128, TE_MASK_CAUSAL_BOTTOM_RIGHT, 0, TE_BSHD, NORMAL, TE_F16, {0}, {0}, false}, /* rows without keys */
    {1, 2, 1, 500, 500, 128, 64, TE_MASK_CAUSAL, 150, TE_BSHD, FALLING, TE_BF16, {0}, {0}, false},
    {1, 2, 1, 300, 420, 64, 128, TE_MASK_NONE, 40, TE_BSHD, NORMAL, TE_BF16, {0}, {0}, false},
    {3, 2, 1, 200, 260, 128, 128, TE_MASK_PADDING, 0, TE_BSHD, NORMAL, TE_BF16, {200, 64, 1}, {129, 260, 7}, false},
    {3, 2, 1, 200, 260, 96, 96, TE_MASK_PADDING_CAUSAL, 0, TE_THD, FALLING, TE_BF16, {150, 200, 30}, {150, 260, 30}, false},
    {4, 2, 2, 140, 300, 128, 128, TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT, 0, TE_THD, NORMAL, TE_BF16, {1, 140, 130, 5}, {128, 300, 129, 5}, false},
    {2, 2, 1, 260, 260, 128, 128, TE_MASK_PADDING_CAUSAL, 70, TE_THD, NORMAL, TE_BF16, {260, 190}, {260, 190}, false},
    {1, 2, 1, 200, 260, 48, 32, TE_MASK_NONE, 0, TE_BSHD, EQUAL, TE_BF16, {0}, {0}, false},
    {1, 2, 1, 200, 700, 128, 128, TE_MASK_NONE, 0, TE_BSHD, PEAKED, TE_BF16, {0}, {0}, false},
    {1, 2, 1, 70, 90, 40, 24, TE_MASK_CAUSAL, 0, TE_BSHD, NORMAL, TE_BF16, {0}, {0}, false}, /* heads of no multiple of 16 */
    {1, 2, 1, 70, 90, 160, 160, TE_MASK_CAUSAL, 0, TE_BSHD, NORMAL, TE_BF16, {0}, {0}, false},
    {1, 2, 1, 70, 90, 64, 64, TE_MASK_CAUSAL, 0, TE_BSHD, NORMAL, TE_F32, {0}, {0}, false},
};
static void name_problem(const problem *p) {
    test_case("b %d, s %d x %d, heads %d of %d, d %d and %d, mask %d, window %d, format %d, %s, o %s", (int)p->b, (int)p->s_q, (int)p->s_kv, (int)p->heads, (int)p->groups, (int)p->d,
              (int)p->d_v, (int)p->mask, (int)p->window, (int)p->format, kind_names[p->data], te_dtype_name(p->o));
}
TE_TEST_DEVICES(attn_fp8_codes) {
    for (int i = 0; i < COUNT(problems); i += test_every_odd(3)) {
        name_problem(&problems[i]);
        check(te, &problems[i]);
    }
}

/* TransformerEngine's points, that is, S by the scale 448 of an amax of 1, have the error that codes of P have; a scale of each row is no worse, though it is known before the row is. */
TE_TEST_DEVICES(attn_fp8_error) {
    const bool gpu = te_ctx_is_cuda(te);
    for (int n = 0; n < 2 * KINDS; n += test_every_odd(5)) {
        const bool longer = n >= KINDS;
        problem p = {1, 2, 1, 128, longer ? gpu ? 16384 : 2048 : 512, 128, 128, longer ? TE_MASK_NONE : TE_MASK_CAUSAL_BOTTOM_RIGHT, 0, TE_BSHD, (kind)(n % KINDS), TE_BF16, {0}, {0}, false};
        if (p.data == EQUAL) continue; /* of equal numbers all codes may be exact */
        const data d = make_data(&p);
        const result by_row = run(te, &p, &d);
        p.emulated = true;
        const result by_one = run(te, &p, &d);
        double error[2] = {0}, size = 0;
        for (int64_t h = 0; h < p.heads; h++)
            for (int64_t i = 0; i < p.s_q; i += longer ? 2 : 1) {
                const row want = row_of(&p, &d, 0, h, i);
                const int64_t at = place(&p, Q, p.d_v, 0, h, i);
                for (int64_t c = 0; c < p.d_v; c++) {
                    const double x = (double)by_row.o[at + c] - want.o[c], y = (double)by_one.o[at + c] - want.o[c];
                    error[0] += x * x, error[1] += y * y, size += want.o[c] * want.o[c];
                }
            }
        test_case("%s, %d keys", kind_names[p.data], (int)p.s_kv);
        if (getenv("TE_TEST_SHOW")) fprintf(stderr, "%s, %d keys: %.3e, by one scale %.3e\n", kind_names[p.data], (int)p.s_kv, sqrt(error[0] / size), sqrt(error[1] / size));
        CHECK_MSG(sqrt(error[0]) <= 1.15 * sqrt(error[1]), "the error is %.3g, by one scale %.3g", sqrt(error[0] / size), sqrt(error[1] / size));
    }
}

/* The same bits again; a sequence's bits do not depend on the others, nor on the format. */
TE_TEST_DEVICES(attn_fp8_bits) {
    for (int n = 0; n < 4; n += test_every_odd(1)) {
        problem p = {3, 4, 2, 300, 400, 128, 128, n % 2 ? TE_MASK_PADDING_CAUSAL : TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT, 0, TE_BSHD, n < 2 ? FALLING : NORMAL, TE_BF16, {300, 77, 129}, {400, 390, 130}, false};
        const data d = make_data(&p);
        const result all = run(te, &p, &d);
        test_case("%s, mask %d", kind_names[p.data], (int)p.mask);
        CHECK_SAME("again", run(te, &p, &d).bytes, all.bytes);
        problem thd = p;
        thd.format = TE_THD;
        const data packed = make_data(&thd);
        const result of_packed = run(te, &thd, &packed);
        for (int64_t b = 0; b < p.b; b++) {
            problem one = p;
            data alone = d;
            one.b = 1;
            one.length_q[0] = p.length_q[b], one.length_kv[0] = p.length_kv[b];
            for (int i = 0; i < INPUTS; i++) alone.x[i] = d.x[i] + place(&p, i, wide_of(&p, i), b, 0, 0);
            const result single = run(te, &one, &alone);
            for (int64_t i = 0; i < p.length_q[b]; i++) {
                const size_t bytes = (size_t)(p.heads * p.d_v) * sizeof(float);
                const float *want = all.o + place(&p, Q, p.d_v, b, 0, i);
                if (memcmp(want, single.o + place(&one, Q, p.d_v, 0, 0, i), bytes) != 0) CHECK_MSG(false, "sequence %d, row %d: other bits alone", (int)b, (int)i);
                if (memcmp(want, of_packed.o + place(&thd, Q, p.d_v, b, 0, i), bytes) != 0) CHECK_MSG(false, "sequence %d, row %d: other bits packed", (int)b, (int)i);
                for (int64_t h = 0; h < p.heads; h++) {
                    const float lse = all.lse[(b * p.heads + h) * p.s_q + i];
                    if (lse != single.lse[h * p.s_q + i] || lse != of_packed.lse[h * rows_of(&thd, Q) + start_of(&thd, Q, b) + i]) CHECK_MSG(false, "sequence %d, row %d: another lse", (int)b, (int)i);
                }
            }
        }
    }
}

/* ---- backward ---- */

enum { DQ, DK, DV, GRADIENTS };
static const char *const gradient_names[GRADIENTS] = {"dq", "dk", "dv"};
static const float factor_do = 0.0009765625f;
typedef struct back_problem {
    problem p;
    te_dtype d_o, out; /* formats of the codes of d_o, and of the gradients */
    bool emulated;     /* without o: the kernels that round S and dP for all products */
} back_problem;
static int part_of(int i) { return i == DQ ? Q : i == DK ? K : V; }

/* Codes of d_o as numbers, without the factor; in rows of no sequence NaN. */
static float *gradient_of(const back_problem *g) {
    const problem *p = &g->p;
    int64_t shape[4];
    const int64_t n = test_numel(shape_of(p, Q, p->d_v, shape), shape);
    float *normal = test_normal(p->b * p->heads * p->s_q * p->d_v, 77), *x = test_floats(n);
    for (int64_t i = 0; i < n; i++) x[i] = NAN;
    for (int64_t b = 0; b < p->b; b++)
        for (int64_t h = 0; h < p->heads; h++)
            for (int64_t i = 0; i < length_of(p, Q, b); i++)
                for (int64_t c = 0; c < p->d_v; c++)
                    x[place(p, Q, p->d_v, b, h, i) + c] =
                        normal[((b * p->heads + h) * p->s_q + i) * p->d_v + c] / factor_do;
    return test_rounded(g->d_o, x, n);
}

typedef struct gradients {
    double *x[GRADIENTS];
    double amax; /* the largest |dP| */
} gradients;
/* The gradients in doubles. */
static gradients gradients_of(const back_problem *g, const data *d, const float *d_o) {
    const problem *p = &g->p;
    const double scale = 1 / sqrt((double)p->d), score = (double)factors[Q] * (double)factors[K] * scale,
                 of_dp = (double)factor_do * (double)factors[V];
    gradients r = {{0}, 0};
    int64_t shape[4];
    for (int i = 0; i < GRADIENTS; i++)
        r.x[i] =
            (double *)test_alloc((size_t)test_numel(shape_of(p, part_of(i), wide_of(p, part_of(i)), shape), shape) * 8);
    for (int64_t b = 0; b < p->b; b++)
        for (int64_t h = 0; h < p->heads; h++) {
            const int64_t n = length_of(p, K, b), group = h / (p->heads / p->groups);
            double *s = (double *)test_alloc((size_t)n * 8 + 8), *dp = (double *)test_alloc((size_t)n * 8 + 8);
            for (int64_t i = 0; i < length_of(p, Q, b); i++) {
                const int64_t at_q = place(p, Q, p->d, b, h, i), at_o = place(p, Q, p->d_v, b, h, i);
                const float *q = d->x[Q] + at_q, *go = d_o + at_o;
                double top = -INFINITY, sum = 0, delta = 0;
                for (int64_t j = 0; j < n; j++) {
                    const float *k = d->x[K] + place(p, K, p->d, b, group, j),
                                *v = d->x[V] + place(p, V, p->d_v, b, group, j);
                    double x = 0, y = 0;
                    s[j] = -INFINITY;
                    if (!sees(p, b, i, j)) continue;
                    for (int64_t c = 0; c < p->d; c++) x += (double)q[c] * (double)k[c];
                    for (int64_t c = 0; c < p->d_v; c++) y += (double)go[c] * (double)v[c];
                    s[j] = x * score, dp[j] = y * of_dp, top = fmax(top, s[j]);
                }
                if (top == -INFINITY) continue;
                for (int64_t j = 0; j < n; j++) sum += s[j] = exp(s[j] - top);
                for (int64_t j = 0; j < n; j++) delta += s[j] > 0 ? (s[j] /= sum) * dp[j] : 0;
                for (int64_t j = 0; j < n; j++) {
                    const int64_t at_k = place(p, K, p->d, b, group, j), at_v = place(p, V, p->d_v, b, group, j);
                    const double ds = s[j] > 0 ? s[j] * (dp[j] - delta) : 0;
                    if (s[j] == 0) continue;
                    r.amax = fmax(r.amax, fabs(ds));
                    for (int64_t c = 0; c < p->d; c++)
                        r.x[DQ][at_q + c] += scale * ds * (double)factors[K] * (double)d->x[K][at_k + c],
                            r.x[DK][at_k + c] += scale * ds * (double)factors[Q] * (double)q[c];
                    for (int64_t c = 0; c < p->d_v; c++) r.x[DV][at_v + c] += s[j] * (double)factor_do * (double)go[c];
                }
            }
        }
    return r;
}

typedef struct back_result {
    float *x[GRADIENTS], amax;
    test_bytes bytes;
} back_result;
static te_op_attn_bwd_args back_call_of(te_ctx *te, const back_problem *g, const te_op_attn_fwd_args *f,
                                        const float *d_o, double amax) {
    const problem *p = &g->p;
    te_op_attn_bwd_args a = {0};
    te_tensor *x[GRADIENTS];
    int64_t shape[4];
    int n;
    for (int i = 0; i < GRADIENTS; i++)
        n = shape_of(p, part_of(i), wide_of(p, part_of(i)), shape), x[i] = test_guarded(te, g->out, n, shape);
    n = shape_of(p, Q, p->d_v, shape);
    a.q = f->q, a.k = f->k, a.v = f->v, a.lse = f->lse, a.o = g->emulated ? NULL : f->o;
    a.d_o = test_tensor(te, g->d_o, n, shape, d_o);
    a.dq = x[DQ], a.dk = x[DK], a.dv = x[DV];
    a.format = f->format, a.rule = f->rule, a.fp8 = f->fp8;
    a.fp8.s_scale = one_number(te, 448);
    a.fp8.dp_dtype = TE_F8E5M2;
    a.fp8.dp_scale = one_number(te, (float)(57344 / amax));
    a.fp8.dp_amax = one_number(te, 0);
    a.fp8.do_scale_inv = one_number(te, factor_do);
    return a;
}
static back_result run_back(te_ctx *te, const back_problem *g, const data *d, const float *d_o, double amax) {
    back_result r = {0};
    te_scope_begin(te);
    te_op_attn_fwd_args f = call_of(te, &g->p, d);
    CHECK(te_op_attn_fwd(te, &f) == TE_OK);
    te_op_attn_bwd_args a = back_call_of(te, g, &f, d_o, amax);
    CHECK(te_op_attn_bwd(te, &a) == TE_OK);
    te_tensor *const x[GRADIENTS] = {a.dq, a.dk, a.dv};
    for (int i = 0; i < GRADIENTS; i++) r.x[i] = test_read(x[i]), test_put(&r.bytes, x[i]);
    r.amax = test_read(a.fp8.dp_amax)[0];
    te_scope_end(te);
    return r;
}
/* Returns the root of the sum of squares of got - want; *size becomes that of want. */
static double distance(const float *got, const double *want, int64_t n, double *size) {
    double error = 0, all = 0;
    for (int64_t i = 0; i < n; i++)
        error += ((double)got[i] - want[i]) * ((double)got[i] - want[i]), all += want[i] * want[i];
    *size = sqrt(all);
    return sqrt(error);
}

static const back_problem back_problems[] = {
    {{2, 4, 2, 130, 260, 128, 128, TE_MASK_NONE, 0, TE_BSHD, NORMAL, TE_BF16, {0}, {0}, false},
     TE_F8E5M2,
     TE_BF16,
     false},
    {{1, 4, 1, 384, 384, 128, 128, TE_MASK_CAUSAL, 0, TE_SBHD, NORMAL, TE_BF16, {0}, {0}, false},
     TE_F8E5M2,
     TE_BF16,
     false},
    {{1, 2, 2, 300, 300, 64, 64, TE_MASK_CAUSAL, 0, TE_BSHD, MEAN, TE_F16, {0}, {0}, false}, TE_F8E5M2, TE_F16, false},
    {{1, 2, 1, 300, 200, 128, 128, TE_MASK_CAUSAL_BOTTOM_RIGHT, 0, TE_BSHD, NORMAL, TE_F16, {0}, {0}, false},
     TE_F8E5M2,
     TE_BF16,
     false}, /* rows without keys */
    {{1, 2, 1, 500, 500, 128, 64, TE_MASK_CAUSAL, 150, TE_BSHD, NORMAL, TE_BF16, {0}, {0}, false},
     TE_F8E5M2,
     TE_BF16,
     false},
    {{1, 2, 1, 300, 420, 64, 128, TE_MASK_NONE, 40, TE_BSHD, OUTLIERS, TE_BF16, {0}, {0}, false},
     TE_F8E5M2,
     TE_BF16,
     false},
    {{3, 2, 1, 200, 260, 128, 128, TE_MASK_PADDING, 0, TE_BSHD, NORMAL, TE_BF16, {200, 64, 1}, {129, 260, 7}, false},
     TE_F8E5M2,
     TE_BF16,
     false},
    {{3,
      2,
      1,
      200,
      260,
      96,
      96,
      TE_MASK_PADDING_CAUSAL,
      0,
      TE_THD,
      NORMAL,
      TE_BF16,
      {150, 200, 30},
      {150, 260, 30},
      false},
     TE_F8E5M2,
     TE_BF16,
     false},
    {{4,
      2,
      2,
      140,
      300,
      128,
      128,
      TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT,
      0,
      TE_THD,
      NORMAL,
      TE_BF16,
      {1, 140, 130, 5},
      {128, 300, 129, 5},
      false},
     TE_F8E5M2,
     TE_BF16,
     false},
    {{2, 4, 1, 260, 260, 128, 128, TE_MASK_PADDING_CAUSAL, 70, TE_THD, NORMAL, TE_BF16, {260, 190}, {260, 190}, false},
     TE_F8E5M2,
     TE_F16,
     false},
    {{1, 2, 1, 70, 90, 40, 24, TE_MASK_CAUSAL, 0, TE_BSHD, NORMAL, TE_BF16, {0}, {0}, false},
     TE_F8E5M2,
     TE_BF16,
     false}, /* heads of no multiple of 16 */
    {{1, 2, 1, 70, 90, 272, 272, TE_MASK_CAUSAL, 0, TE_BSHD, NORMAL, TE_BF16, {0}, {0}, false},
     TE_F8E5M2,
     TE_BF16,
     false},
    {{1, 2, 1, 70, 90, 64, 64, TE_MASK_CAUSAL, 0, TE_BSHD, NORMAL, TE_F32, {0}, {0}, false}, TE_F8E4M3, TE_F32, false},
};
/* Relative errors in the mean: rounding dP to E5M2 has 5.2e-2, and S to E4M3 2.7e-2, and codes that underflow have
 * more. A code of E5M2 is off by an eighth at most, and where outliers meet by no more of the largest gradient than a
 * quarter. */
TE_TEST_DEVICES(attn_fp8_gradients) {
    for (int n = 0; n < COUNT(back_problems); n += test_every_odd(3)) {
        const back_problem *g = &back_problems[n];
        const data d = make_data(&g->p);
        const float *d_o = gradient_of(g);
        const gradients want = gradients_of(g, &d, d_o);
        const back_result got = run_back(te, g, &d, d_o, want.amax);
        name_problem(&g->p);
        for (int i = 0; i < GRADIENTS; i++) {
            int64_t shape[4];
            const int64_t count = test_numel(shape_of(&g->p, part_of(i), wide_of(&g->p, part_of(i)), shape), shape);
            double size, error = distance(got.x[i], want.x[i], count, &size), most = 0, largest = 0;
            for (int64_t k = 0; k < count; k++)
                most = fmax(most, fabs((double)got.x[i][k] - want.x[i][k])),
                largest = fmax(largest, fabs(want.x[i][k]));
            if (getenv("TE_TEST_SHOW"))
                fprintf(stderr, "%d: %s %.3e, most %.3e\n", n, gradient_names[i], error / size, most / largest);
            CHECK_MSG(error <= 9e-2 * size, "%s: the error is %.3g of %.3g", gradient_names[i], error, size);
            CHECK_MSG(most <= 0.25 * largest, "%s: an element is off by %.3g, the largest is %.3g", gradient_names[i],
                      most, largest);
        }
        CHECK_MSG(fabs((double)got.amax - want.amax) <= 3e-2 * want.amax, "the largest dP is %.9g, not %.9g",
                  (double)got.amax, want.amax);
    }
}

/* No error is above 1.15 of the emulation's, which rounds S and dP for every product and sums P dP. */
TE_TEST_DEVICES(attn_fp8_gradient_error) {
    const bool gpu = te_ctx_is_cuda(te);
    for (int n = 0; n < (gpu ? 2 * KINDS : 2); n++) {
        const bool longer = n >= KINDS;
        back_problem g = {{1,
                           2,
                           1,
                           64,
                           longer ? 16384 : 512,
                           128,
                           128,
                           longer ? TE_MASK_NONE : TE_MASK_CAUSAL_BOTTOM_RIGHT,
                           0,
                           TE_BSHD,
                           (kind)(n % KINDS),
                           TE_BF16,
                           {0},
                           {0},
                           false},
                          TE_F8E5M2,
                          TE_BF16,
                          false};
        if (g.p.data == EQUAL) continue; /* dk is a sum of zeros */
        const data d = make_data(&g.p);
        const float *d_o = gradient_of(&g);
        const gradients want = gradients_of(&g, &d, d_o);
        const back_result fast = run_back(te, &g, &d, d_o, want.amax);
        g.emulated = true;
        const back_result slow = run_back(te, &g, &d, d_o, want.amax);
        test_case("%s, %d keys", kind_names[g.p.data], (int)g.p.s_kv);
        for (int i = 0; i < GRADIENTS; i++) {
            int64_t shape[4];
            const int64_t count = test_numel(shape_of(&g.p, part_of(i), 128, shape), shape);
            double size, error = distance(fast.x[i], want.x[i], count, &size),
                         emulated = distance(slow.x[i], want.x[i], count, &size);
            if (getenv("TE_TEST_SHOW"))
                fprintf(stderr, "%s, %d keys: %s %.3e, emulated %.3e (%.2f)\n", kind_names[g.p.data], (int)g.p.s_kv,
                        gradient_names[i], error / size, emulated / size, error / emulated);
            CHECK_MSG(error <= 1.15 * emulated, "%s: the error is %.3g, emulated %.3g", gradient_names[i], error / size,
                      emulated / size);
        }
    }
}

/* The same bits again; a sequence's bits do not depend on the others, nor on the format. */
TE_TEST_DEVICES(attn_fp8_gradient_bits) {
    for (int n = 0; n < 2; n += test_every_sanitized(1)) {
        back_problem g = {{3,
                           4,
                           2,
                           300,
                           400,
                           128,
                           128,
                           n ? TE_MASK_PADDING_CAUSAL : TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT,
                           0,
                           TE_BSHD,
                           n ? MEAN : NORMAL,
                           TE_BF16,
                           {300, 77, 129},
                           {400, 390, 130},
                           false},
                          TE_F8E5M2,
                          TE_BF16,
                          false},
                     thd = g;
        const data d = make_data(&g.p);
        const float *d_o = gradient_of(&g);
        const double amax = 0.5; /* any: it gives the scale of all runs */
        const back_result all = run_back(te, &g, &d, d_o, amax);
        test_case("%s, mask %d", kind_names[g.p.data], (int)g.p.mask);
        for (int again = te_ctx_is_cuda(te) ? 0 : 2; again < 3; again++) CHECK_SAME("again", run_back(te, &g, &d, d_o, amax).bytes, all.bytes);
        thd.p.format = TE_THD;
        const data packed = make_data(&thd.p);
        const back_result of_packed = run_back(te, &thd, &packed, gradient_of(&thd), amax);
        for (int64_t b = 0; b < g.p.b; b++) {
            back_problem one = g;
            data alone = d;
            one.p.b = 1;
            one.p.length_q[0] = g.p.length_q[b], one.p.length_kv[0] = g.p.length_kv[b];
            for (int i = 0; i < INPUTS; i++) alone.x[i] = d.x[i] + place(&g.p, i, wide_of(&g.p, i), b, 0, 0);
            const back_result single = run_back(te, &one, &alone, d_o + place(&g.p, Q, g.p.d_v, b, 0, 0), amax);
            for (int part = 0; part < GRADIENTS; part++) {
                const int of = part_of(part);
                for (int64_t i = 0; i < length_of(&g.p, of, b); i++) {
                    const size_t bytes = (size_t)(heads_of(&g.p, of) * 128) * sizeof(float);
                    const float *want = all.x[part] + place(&g.p, of, 128, b, 0, i);
                    if (memcmp(want, single.x[part] + place(&one.p, of, 128, 0, 0, i), bytes) != 0)
                        CHECK_MSG(false, "%s of sequence %d, row %d: other bits alone", gradient_names[part], (int)b,
                                  (int)i);
                    if (memcmp(want, of_packed.x[part] + place(&thd.p, of, 128, b, 0, i), bytes) != 0)
                        CHECK_MSG(false, "%s of sequence %d, row %d: other bits packed", gradient_names[part], (int)b,
                                  (int)i);
                }
            }
        }
    }
}

/* Which kernel runs, and why not the fast one. */
/* Keys in two halves, with o and lse of both (part_of_keys): the gradients of the queries add up to those of all keys, and
 * those of a half's keys are the same. */
TE_TEST_DEVICES(attn_fp8_gradient_of_a_part) {
    for (int n = 0; n < 3; n++) {
        const int64_t d = n == 1 ? 128 : 24; /* by Hopper's kernel; by the general ones */
        back_problem g = {{2, 2, 1, 70, 256, d, d, n == 2 ? TE_MASK_PADDING : TE_MASK_NONE, 0, TE_BSHD, MEAN, TE_BF16, {0}, {0}, false},
                          TE_F8E5M2,
                          n == 1 ? TE_BF16 : TE_F32,
                          false};
        const data x = make_data(&g.p);
        test_case("%d channels, mask %d", (int)d, (int)g.p.mask);
        te_op_attn_fwd_args f = call_of(te, &g.p, &x);
        CHECK(te_op_attn_fwd(te, &f) == TE_OK);
        te_op_attn_bwd_args all = back_call_of(te, &g, &f, gradient_of(&g), 0.5), half;
        all.fp8.part_of_keys = true;
        CHECK(te_op_attn_bwd(te, &all) == TE_OK);
        float *want = test_read(all.dq), *sum = test_floats(te_tensor_numel(all.dq));
        for (int i = 0; i < 2; i++) {
            half = all;
            half.k = te_tensor_narrow((te_tensor *)all.k, 1, 128 * i, 128);
            half.v = te_tensor_narrow((te_tensor *)all.v, 1, 128 * i, 128);
            half.dq = te_tensor_zeros(te, g.out, SHAPE(2, 70, 2, d));
            half.dk = te_tensor_zeros(te, g.out, SHAPE(2, 128, 1, d));
            half.dv = te_tensor_zeros(te, g.out, SHAPE(2, 128, 1, d));
            if (half.rule.cu_seqlens_kv) half.rule.cu_seqlens_kv = test_i32(te, SHAPE(3), (const int64_t[]){0, 128, 256});
            CHECK(te_op_attn_bwd(te, &half) == TE_OK);
            const float *part = test_read(half.dq);
            for (int64_t k = 0; k < te_tensor_numel(all.dq); k++) sum[k] += part[k];
            /* a kernel's order of sums over queries does not depend on the keys */
            CHECK_TENSOR(half.dk, test_read(te_tensor_narrow(all.dk, 1, 128 * i, 128)), 1e-6, 1e-7);
            CHECK_TENSOR(half.dv, test_read(te_tensor_narrow(all.dv, 1, 128 * i, 128)), 1e-6, 1e-7);
        }
        double error = 0, size = 0;
        for (int64_t k = 0; k < te_tensor_numel(all.dq); k++)
            error += ((double)sum[k] - want[k]) * ((double)sum[k] - want[k]), size += (double)want[k] * want[k];
        /* each half and the whole are rounded to 2^-9 in bf16, and in f32 terms are added in another order */
        CHECK_MSG(sqrt(error / size) < (g.out == TE_BF16 ? 6e-3 : 1e-5), "%g of %g", sqrt(error), sqrt(size));
        half = all, half.o = NULL;
        CHECK_EQ_INT(te_op_attn_bwd(te, &half), TE_ERR_INVALID);
        CHECK_ERROR(te, TE_ERR_INVALID, "fp8.part_of_keys is true and o is NULL");
    }
}

TE_TEST(attn_fp8_gradient_choice) {
    te_ctx *te = test_context("cpu");
    back_problem p = {{1, 4, 2, 256, 256, 128, 128, TE_MASK_CAUSAL, 0, TE_BSHD, NORMAL, TE_BF16, {0}, {0}, false},
                      TE_F8E5M2,
                      TE_BF16,
                      false};
    const data d = make_data(&p.p);
    const float *d_o = gradient_of(&p);
    te_explanation e;
    te_op_attn_fwd_args f = call_of(te, &p.p, &d);
    te_op_attn_bwd_args a = back_call_of(te, &p, &f, d_o, 1), g;
    CHECK(te_explain(te, TE_OP_ATTN_BWD, &a, "sm_90", &e) == TE_OK && e.supported && e.deterministic);
    CHECK_STR(e.why, "FP8 tensor cores: TMA and wgmma");
    CHECK_STR(e.kernels,
              "attn/attn_bwd_fp8_rows.X_DT=3 attn/attn_bwd_fp8_hopper.X_OUT=3 attn/attn_bwd_put.X_DT=3,X_D=128");
    CHECK(te_explain(te, TE_OP_ATTN_BWD, &a, "sm_80", &e) == TE_OK && e.supported);
    CHECK_STR(e.why, "and not FP8 tensor cores: the chip is no Hopper");
    g = a, g.o = NULL;
    CHECK(te_explain(te, TE_OP_ATTN_BWD, &g, "sm_90", &e) == TE_OK);
    CHECK_STR(e.why, "no o, so that D is the sum of P dP");
    g = a, g.fp8.dp_dtype = TE_F8E4M3;
    CHECK(te_explain(te, TE_OP_ATTN_BWD, &g, "sm_90", &e) == TE_OK);
    CHECK_STR(e.why, "d_o or dP in another format than e5m2");
    g = a, g.dq = te_tensor_zeros(te, TE_F32, SHAPE(1, 256, 4, 128));
    CHECK(te_explain(te, TE_OP_ATTN_BWD, &g, "sm_90", &e) == TE_OK);
    CHECK_STR(e.why, "gradients of different formats");
    g = a, g.rule.dropout_p = 0.1f;
    CHECK(te_explain(te, TE_OP_ATTN_BWD, &g, "sm_90", &e) == TE_OK);
    CHECK_STR(e.why, "dropout");
    p.p.format = TE_THD, p.p.mask = TE_MASK_PADDING_CAUSAL, p.p.b = 4, p.p.heads = p.p.groups = 1,
    p.p.s_q = p.p.s_kv = 3000;
    for (int i = 0; i < 4; i++) p.p.length_q[i] = p.p.length_kv[i] = 3000;
    const data packed = make_data(&p.p);
    f = call_of(te, &p.p, &packed), a = back_call_of(te, &p, &f, gradient_of(&p), 1);
    CHECK(te_explain(te, TE_OP_ATTN_BWD, &a, "sm_90", &e) == TE_OK);
    CHECK_STR(e.why, "FP8 tensor cores: TMA and wgmma");
}

/* Which kernel runs, and why not the fast one. */
TE_TEST(attn_fp8_choice) {
    te_ctx *te = test_context("cpu");
    problem p = {1, 4, 2, 256, 256, 128, 128, TE_MASK_CAUSAL, 0, TE_BSHD, NORMAL, TE_BF16, {0}, {0}, false};
    const data d = make_data(&p);
    te_explanation e;
    te_op_attn_fwd_args f = call_of(te, &p, &d), g;
    CHECK(te_explain(te, TE_OP_ATTN_FWD, &f, "sm_90", &e) == TE_OK && e.supported && e.deterministic);
    CHECK_STR(e.why, "FP8 tensor cores: TMA and wgmma");
    CHECK_STR(e.kernels, "attn/attn_fwd_fp8_values.X_D=128 attn/attn_fwd_fp8_hopper.X_DT=3,X_D=128");
    CHECK(te_explain(te, TE_OP_ATTN_FWD, &f, "sm_80", &e) == TE_OK && e.supported);
    CHECK_STR(e.why, "and not FP8 tensor cores: the chip is no Hopper");
    g = f, g.fp8.s_scale = one_number(te, 448);
    CHECK(te_explain(te, TE_OP_ATTN_FWD, &g, "sm_90", &e) == TE_OK);
    CHECK_STR(e.why, "by the sums of whole rows");
    g = f, g.rule.softcap = 30;
    CHECK(te_explain(te, TE_OP_ATTN_FWD, &g, "sm_90", &e) == TE_OK);
    CHECK_STR(e.why, "a soft cap");
    g = f, g.rule.dropout_p = 0.1f;
    CHECK(te_explain(te, TE_OP_ATTN_FWD, &g, "sm_90", &e) == TE_OK);
    CHECK_STR(e.why, "dropout");
    g = f, g.max_logit = te_tensor_empty(te, TE_F32, SHAPE(4));
    CHECK(te_explain(te, TE_OP_ATTN_FWD, &g, "sm_90", &e) == TE_OK);
    CHECK_STR(e.why, "max_logit");
    g = f, g.rule.softmax_type = TE_SOFTMAX_OFF_BY_ONE;
    CHECK(te_explain(te, TE_OP_ATTN_FWD, &g, "sm_90", &e) == TE_OK);
    CHECK_STR(e.why, "a softmax with an offset");
    g = f, g.rule.core_attention_bias_type = TE_ATTN_BIAS_ALIBI;
    CHECK(te_explain(te, TE_OP_ATTN_FWD, &g, "sm_90", &e) == TE_OK);
    CHECK_STR(e.why, "a bias or ALiBi");
}

TE_TEST_DEVICES(attn_fp8_refuses) {
    problem p = {1, 2, 1, 16, 16, 32, 32, TE_MASK_CAUSAL, 0, TE_BSHD, NORMAL, TE_BF16, {0}, {0}, false};
    const data d = make_data(&p);
    te_op_attn_fwd_args f = call_of(te, &p, &d), g;
    te_tensor *k = te_tensor_zeros(te, TE_BF16, SHAPE(1, 16, 1, 32));
    g = f, g.k = k, te_op_attn_fwd(te, &g);
    CHECK_ERROR(te, TE_ERR_DTYPE, "q is e4m3 and k is bf16");
    g = f, g.fp8.v_scale_inv = NULL, te_op_attn_fwd(te, &g);
    CHECK_ERROR(te, TE_ERR_STATE, "v is e4m3 and fp8.v_scale_inv is NULL");
    g = f, g.fp8.k_scale_inv = te_tensor_zeros(te, TE_F32, SHAPE(2)), te_op_attn_fwd(te, &g);
    CHECK_ERROR(te, TE_ERR_SHAPE, "fp8.k_scale_inv is [2]");
    g = f, g.q = te_tensor_zeros(te, TE_BF16, SHAPE(1, 16, 2, 32)), g.k = g.v = k, te_op_attn_fwd(te, &g);
    CHECK_ERROR(te, TE_ERR_INVALID, "q is bf16 and fp8.q_scale_inv is given");
    back_problem p2 = {p, TE_F8E5M2, TE_BF16, false};
    te_op_attn_bwd_args b = back_call_of(te, &p2, &f, gradient_of(&p2), 1), c;
    c = b, c.d_o = te_tensor_zeros(te, TE_BF16, SHAPE(1, 16, 2, 32)), te_op_attn_bwd(te, &c);
    CHECK_ERROR(te, TE_ERR_DTYPE, "q is e4m3 and d_o is bf16");
    c = b, c.fp8.do_scale_inv = NULL, te_op_attn_bwd(te, &c);
    CHECK_ERROR(te, TE_ERR_STATE, "d_o is e5m2 and fp8.do_scale_inv is NULL");
    c = b, c.fp8.do_scale_inv = te_tensor_zeros(te, TE_F32, SHAPE(2)), te_op_attn_bwd(te, &c);
    CHECK_ERROR(te, TE_ERR_SHAPE, "fp8.do_scale_inv is [2]");
    c = b, c.fp8.k_scale_inv = NULL, te_op_attn_bwd(te, &c);
    CHECK_ERROR(te, TE_ERR_STATE, "k is e4m3 and fp8.k_scale_inv is NULL");
    c = b, c.fp8.s_scale = NULL, te_op_attn_bwd(te, &c);
    CHECK_ERROR(te, TE_ERR_STATE, "fp8.s_scale is NULL");
}
