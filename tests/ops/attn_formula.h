/* attn_formula.h: attention with all of te_attn_rule for test_attn_extras.c and test_attn_variants.c: cases, their tensors, the formula in float64 with its gradients, and how both are
 * compared. Knows the public API; shares no code with te.h. */

#include "attn_keep.h"

/* ---- a case: one choice of each option ---- */

enum { MASK, LAYOUT, BIAS, SOFTMAX, WINDOW, DIAGONAL, DTYPE, GROUPED, SIZES, DROPOUT, SOFTCAP, OPTIONS };
enum { BIAS_NONE, BIAS_FULL, BIAS_HEADS, BIAS_KEYS, BIAS_PRE, BIAS_ALIBI, BIAS_SLOPES, BIAS_SLOPES_OF_EACH, BIAS_ROWS, BIAS_SEQUENCES }; /* the last two: one of all heads, of all sequences or of each */
enum { WINDOW_NONE, WINDOW_BOTH, WINDOW_LEFT };
enum { LAYOUT_SBHD, LAYOUT_BSHD, LAYOUT_THD, LAYOUT_THD_PADDED };
static const int choices[OPTIONS] = {7, 4, 8, 3, 3, 3, 3, 3, 5, 3, 2};
static const te_dtype dtypes[3] = {TE_F32, TE_F16, TE_BF16};
static const int head_counts[3][2] = {{2, 2}, {4, 2}, {3, 1}};

enum { MAX_B = 3 };
typedef struct xcase {
    int option[OPTIONS];
    te_dtype dtype;
    te_attn_mask mask;
    te_qkv_format format, kv_format;
    int64_t b, heads, groups, s_q, s_kv, d, d_v; /* s_q, s_kv: the longest sequences */
    int64_t length_q[MAX_B], length_kv[MAX_B], at_q[MAX_B + 1], at_kv[MAX_B + 1];
    bool pads, padded, window;
    int64_t left, right, delta[MAX_B];
    float p, scale, softcap;
    int64_t page_size; /* 0: no pages */
    te_dtype s_dtype, dp_dtype; /* FP8 attention; 0: none */
    float s_scale, dp_scale;
    bool by_row; /* the forward pass rounds each row of S by a scale of its own, the backward pass by s_scale */
    te_dtype bias_dtype, dbias_dtype; /* dbias_dtype 0: as the bias */
    int repeats; /* which sizes of the bias are 1: REPEATS.. | ..; 0: as option BIAS says */
    int rule; /* the user's, for scores: RULE_.. */
    int blocks; /* a block mask: 1, of each head of each sequence, or 2, of all */
} xcase;
enum { REPEATS = 8, REPEATS_B = 1, REPEATS_H = 2, REPEATS_I = 4 };
enum { RULE_NONE, RULE_SLOPES, RULE_CAP, RULE_DOCUMENTS, RULE_BOTH, RULE_ROWS, RULES }; /* BOTH: a cap within documents; ROWS: every fifth row of an odd head sees nothing */

/* sizes: s_q, s_kv, d, d_v. */
static xcase make_sized_case(const int *option, const int64_t sizes[4]) {
    static const int64_t share_q[MAX_B] = {100, 0, 55}, share_kv[MAX_B] = {60, 40, 100};
    xcase c;
    memset(&c, 0, sizeof c);
    memcpy(c.option, option, sizeof c.option);
    c.mask = (te_attn_mask)(TE_MASK_NONE + option[MASK]);
    c.pads = c.mask >= TE_MASK_PADDING && c.mask <= TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT;
    if (option[LAYOUT] >= LAYOUT_THD && !c.pads) c.option[LAYOUT] = option[LAYOUT] - LAYOUT_THD;
    c.padded = c.option[LAYOUT] == LAYOUT_THD_PADDED;
    c.format = c.kv_format = c.option[LAYOUT] >= LAYOUT_THD ? TE_THD : c.option[LAYOUT] == LAYOUT_BSHD ? TE_BSHD : TE_SBHD;
    c.dtype = dtypes[option[DTYPE]];
    c.b = c.pads ? 3 : 2;
    c.heads = head_counts[option[GROUPED]][0];
    c.groups = head_counts[option[GROUPED]][1];
    c.bias_dtype = c.dtype;
    c.s_q = sizes[0];
    c.s_kv = sizes[1];
    c.d = sizes[2];
    c.d_v = sizes[3];
    c.p = option[DROPOUT] == 1 ? 0.3f : 0;
    c.scale = option[DROPOUT] == 2 ? 0.3f : (float)(1 / sqrt((double)c.d));
    if (option[BIAS] == BIAS_PRE) c.option[SOFTCAP] = 0; /* refused */
    c.softcap = c.option[SOFTCAP] == 2 ? 8.0f : c.option[SOFTCAP] ? 0.9f : 0; /* 8: most blocks are near 0, which have a kernel's shorter way, and some are not */
    c.window = option[WINDOW] != WINDOW_NONE;
    c.left = option[WINDOW] == WINDOW_BOTH ? 7 : 12;
    c.right = option[WINDOW] == WINDOW_BOTH ? 4 : -1;
    for (int64_t b = 0; b < c.b; b++) {
        c.length_q[b] = c.pads ? (c.s_q * share_q[b] + 99) / 100 : c.s_q;
        c.length_kv[b] = c.pads ? (c.s_kv * share_kv[b] + 99) / 100 : c.s_kv;
        bool corner = c.mask == TE_MASK_CAUSAL || c.mask == TE_MASK_PADDING_CAUSAL ? false
                      : c.mask == TE_MASK_CAUSAL_BOTTOM_RIGHT || c.mask == TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT ? true
                                                                                                                : option[DIAGONAL] != TE_OFF;
        c.delta[b] = corner ? c.length_kv[b] - c.length_q[b] : 0;
        c.at_q[b + 1] = c.at_q[b] + c.length_q[b] + (c.padded ? 3 + b : 0);
        c.at_kv[b + 1] = c.at_kv[b] + c.length_kv[b] + (c.padded ? 5 - b : 0);
    }
    return c;
}

static void name_case(const xcase *c) {
    test_case("%s format %d,%d mask %d b %lld heads %lld/%lld s %lld,%lld d %lld,%lld bias %d (%s) softmax %d window %d diagonal %d p %g cap %g page %lld rule %d blocks %d repeats %d dbias %d", te_dtype_name(c->dtype),
              (int)c->format, (int)c->kv_format, (int)c->mask, (long long)c->b, (long long)c->heads, (long long)c->groups, (long long)c->s_q, (long long)c->s_kv,
              (long long)c->d, (long long)c->d_v, c->option[BIAS], te_dtype_name(c->bias_dtype), c->option[SOFTMAX], c->option[WINDOW], c->option[DIAGONAL], (double)c->p, (double)c->softcap, (long long)c->page_size, c->rule, c->blocks, c->repeats, (int)c->dbias_dtype);
}

/* ---- memory: arrays as the tensors have them ---- */

enum { Q, K, V, O, DO, DQ, DK, DV, PARTS };
static bool of_keys(int part) { return part == K || part == V || part == DK || part == DV; }
static bool is_output(int part) { return part == O || part > DO; }
static int64_t channels(const xcase *c, int part) { return part == Q || part == K || part == DQ || part == DK ? c->d : c->d_v; }
static int64_t pages_of_each(const xcase *c) { return (c->s_kv + c->page_size - 1) / c->page_size; }
/* Pages are dealt out backwards, so that neighbours in a sequence are none in memory. */
static int64_t page_at(const xcase *c, int64_t b, int64_t n) { return (c->b - 1 - b) + (pages_of_each(c) - 1 - n) * c->b; }

static int shape_of(const xcase *c, int part, int64_t shape[4]) {
    bool keys = of_keys(part);
    te_qkv_format format = keys ? c->kv_format : c->format;
    int64_t s = keys ? c->s_kv : c->s_q, heads = keys ? c->groups : c->heads;
    int n = 0;
    if (keys && c->page_size) {
        shape[n++] = c->b * pages_of_each(c);
        shape[n++] = c->page_size;
    } else if (format == TE_THD) {
        shape[n++] = (keys ? c->at_kv : c->at_q)[c->b];
    } else {
        shape[n++] = format == TE_BSHD ? c->b : s;
        shape[n++] = format == TE_BSHD ? s : c->b;
    }
    shape[n++] = heads;
    shape[n++] = channels(c, part);
    return n;
}
static int64_t count(const xcase *c, int part) {
    int64_t shape[4], n = 1;
    for (int i = shape_of(c, part, shape); i > 0; i--) n *= shape[i - 1];
    return n;
}
/* The place of channel 0 of a row. */
static int64_t place(const xcase *c, int part, int64_t b, int64_t h, int64_t i) {
    bool keys = of_keys(part);
    te_qkv_format format = keys ? c->kv_format : c->format;
    int64_t s = keys ? c->s_kv : c->s_q, row;
    if (keys && c->page_size)
        row = page_at(c, b, i / c->page_size) * c->page_size + i % c->page_size;
    else
        row = format == TE_THD ? (keys ? c->at_kv : c->at_q)[b] + i : format == TE_BSHD ? b * s + i : i * c->b + b;
    return (row * (keys ? c->groups : c->heads) + h) * channels(c, part);
}
static int64_t lse_count(const xcase *c) { return c->heads * (c->format == TE_THD ? c->at_q[c->b] : c->b * c->s_q); }
static int64_t lse_place(const xcase *c, int64_t b, int64_t h, int64_t i) {
    return c->format == TE_THD ? h * c->at_q[c->b] + c->at_q[b] + i : (b * c->heads + h) * c->s_q + i;
}

typedef struct xdata {
    float *x[PARTS], *lse;
    float *bias, *dbias; /* of bias_shape */
    float *offset, *doffset, *slopes, *max_logit;
    uint8_t *mask; /* [b, 1, s_q, s_kv] */
    float *keep;
    float s_amax, dp_amax; /* FP8 attention */
} xdata;

static bool has_alibi(const xcase *c) { return c->option[BIAS] >= BIAS_ALIBI && c->option[BIAS] <= BIAS_SLOPES_OF_EACH; }
static bool has_bias(const xcase *c) { return c->option[BIAS] != BIAS_NONE && !has_alibi(c); }
static void bias_shape(const xcase *c, int64_t shape[4]) {
    int kind = c->option[BIAS];
    shape[0] = kind == BIAS_FULL || kind == BIAS_SEQUENCES ? c->b : 1;
    shape[1] = kind == BIAS_KEYS || kind >= BIAS_ROWS ? 1 : c->heads;
    shape[2] = kind == BIAS_KEYS ? 1 : c->s_q;
    shape[3] = c->s_kv;
    if (!c->repeats) return;
    shape[0] = c->repeats & REPEATS_B ? 1 : c->b;
    shape[1] = c->repeats & REPEATS_H ? 1 : c->heads;
    shape[2] = c->repeats & REPEATS_I ? 1 : c->s_q;
}
static int64_t bias_count(const xcase *c) {
    int64_t s[4];
    bias_shape(c, s);
    return s[0] * s[1] * s[2] * s[3];
}
static int64_t bias_place(const xcase *c, int64_t b, int64_t h, int64_t i, int64_t j) {
    int64_t s[4];
    bias_shape(c, s);
    return (((s[0] == 1 ? 0 : b) * s[1] + (s[1] == 1 ? 0 : h)) * s[2] + (s[2] == 1 ? 0 : i)) * s[3] + j;
}

/* Sets the bias of rows and keys that belong to no sequence to NaN. */
static void spoil_bias(const xcase *c, float *bias) {
    int64_t s[4];
    bias_shape(c, s);
    for (int64_t n = 0; n < s[0] * s[1] * s[2] * s[3]; n++) {
        int64_t j = n % s[3], i = n / s[3] % s[2], of = n / (s[3] * s[2] * s[1]);
        bool used = false;
        for (int64_t b = 0; b < c->b; b++) used = used || ((s[0] == 1 || b == of) && i < c->length_q[b] && j < c->length_kv[b]);
        if (!used) bias[n] = NAN;
    }
}

/* Rows of padding are NaN: nothing may read them. */
static xdata make_data(const xcase *c) {
    xdata d;
    memset(&d, 0, sizeof d);
    for (int part = 0; part < PARTS; part++) {
        int64_t n = count(c, part), w = channels(c, part);
        d.x[part] = (float *)test_alloc((size_t)n * 4 + 4);
        if (is_output(part)) continue;
        float *values = test_rounded(c->dtype, test_normal(n + 1, (uint64_t)part + 11), n + 1);
        for (int64_t i = 0; i < n; i++) d.x[part][i] = NAN;
        for (int64_t b = 0; b < c->b; b++)
            for (int64_t h = 0; h < (of_keys(part) ? c->groups : c->heads); h++)
                for (int64_t i = 0; i < (of_keys(part) ? c->length_kv : c->length_q)[b]; i++)
                    memcpy(d.x[part] + place(c, part, b, h, i), values + place(c, part, b, h, i), (size_t)w * 4);
    }
    if (has_bias(c)) {
        d.bias = test_rounded(c->bias_dtype, test_normal(bias_count(c), 5), bias_count(c));
        spoil_bias(c, d.bias);
    }
    if (c->option[SOFTMAX] == TE_SOFTMAX_LEARNABLE) d.offset = test_normal(c->heads, 6);
    if (c->option[BIAS] == BIAS_SLOPES || c->option[BIAS] == BIAS_SLOPES_OF_EACH) d.slopes = test_uniform(c->heads * c->b, 7, 0.01f, 0.5f);
    if (c->mask == TE_MASK_ARBITRARY) {
        int64_t n = c->b * c->s_q * c->s_kv, *dice = test_integers(n + 1, 8, 0, 3);
        d.mask = (uint8_t *)test_alloc((size_t)n);
        for (int64_t i = 0; i < n; i++) d.mask[i] = dice[i] == 0 || i / c->s_kv % c->s_q == 3; /* row 3 sees no key */
    }
    if (c->p > 0) d.keep = attn_keep(c->p, 21, 4, c->b * c->heads * c->s_q, c->s_kv);
    return d;
}

/* ---- the user's rules ---- */

static const float rule_slopes[4] = {0.5f, 0.03f, 0.2f, 0.01f};
static const double rule_cap = 1.5;
static int64_t document_of(int64_t b, int64_t position) { return (position + 20 * b) / 48; }
static te_attn_block block_of(const xcase *c, int64_t b, int64_t h, int64_t i, int64_t j) { /* of rows 128 i and keys 128 j: a third of each kind, and the first rows see something */
    return !c->blocks ? TE_ATTN_BLOCK_PARTIAL : (te_attn_block)((c->blocks == 1 ? 5 * b + 7 * h : 0) + i + 2 * j + i * j + 1) % 3;
}
static bool rule_sees(const xcase *c, int64_t b, int64_t h, int64_t i, int64_t j) {
    const te_attn_block block = block_of(c, b, h, i / TE_ATTN_BLOCK_SIZE, j / TE_ATTN_BLOCK_SIZE);
    if (block != TE_ATTN_BLOCK_PARTIAL) return block == TE_ATTN_BLOCK_FULL;
    if (c->rule == RULE_ROWS) return !(h % 2 == 1 && i % 5 == 3);
    return (c->rule != RULE_DOCUMENTS && c->rule != RULE_BOTH) || document_of(b, i) == document_of(b, j);
}
static double rule_score(const xcase *c, double score, int64_t h, int64_t i, int64_t j) {
    if (c->rule == RULE_SLOPES) return score - (double)rule_slopes[h] * fabs((double)(i - j));
    return c->rule == RULE_CAP || c->rule == RULE_BOTH ? rule_cap * tanh(score / rule_cap) : score;
}
static double rule_bprop(const xcase *c, double score) {
    const double t = tanh(score / rule_cap);
    return c->rule == RULE_CAP || c->rule == RULE_BOTH ? 1 - t * t : 1;
}
/* The same for the CPU. */
static bool mask_fn(void *user, int64_t b, int64_t h, int64_t i, int64_t j) { return rule_sees((const xcase *)user, b, h, i, j); }
static float score_fn(void *user, float score, int64_t b, int64_t h, int64_t i, int64_t j) { return (void)b, (float)rule_score((const xcase *)user, (double)score, h, i, j); }
static float bprop_fn(void *user, float score, int64_t b, int64_t h, int64_t i, int64_t j) { return (void)b, (void)h, (void)i, (void)j, (float)rule_bprop((const xcase *)user, (double)score); }
static te_tensor *make_blocks(te_ctx *te, const xcase *c) {
    const int64_t b = c->blocks == 1 ? c->b : 1, heads = c->blocks == 1 ? c->heads : 1, rows = (c->s_q + 127) / 128, columns = (c->s_kv + 127) / 128;
    uint8_t *x = (uint8_t *)test_alloc((size_t)(b * heads * rows * columns));
    for (int64_t i = 0; i < b * heads * rows * columns; i++) x[i] = (uint8_t)block_of(c, i / columns / rows / heads, i / columns / rows % heads, i / columns % rows, i % columns);
    return te_tensor_from_host(te, TE_U8, SHAPE(b, heads, rows, columns), x);
}
static te_score_mod make_score_mod(te_ctx *te, const xcase *c) {
    te_score_mod m;
    memset(&m, 0, sizeof m);
    m.user = (void *)(uintptr_t)c;
    if (c->rule == RULE_SLOPES) {
        m.score_mod = "score - aux0[h] * fabsf(q_idx - kv_idx)";
        m.score_fn = score_fn;
        m.additive = true;
        m.aux[0] = test_tensor(te, TE_F32, SHAPE(4), rule_slopes);
    }
    if (c->rule == RULE_CAP || c->rule == RULE_BOTH) {
        m.score_mod = "1.5f * tanhf(score / 1.5f)";
        m.score_mod_bprop = "1.0f - tanhf(score / 1.5f) * tanhf(score / 1.5f)";
        m.score_fn = score_fn;
        m.score_bprop_fn = bprop_fn;
    }
    if (c->rule == RULE_DOCUMENTS || c->rule == RULE_BOTH) {
        const int64_t n = c->s_q > c->s_kv ? c->s_q : c->s_kv;
        int64_t *document = (int64_t *)test_alloc((size_t)(c->b * n) * 8);
        char *text = (char *)test_alloc(100);
        for (int64_t i = 0; i < c->b * n; i++) document[i] = document_of(i / n, i % n);
        snprintf(text, 100, "aux1[b * %d + q_idx] == aux1[b * %d + kv_idx]", (int)n, (int)n);
        m.mask_mod = text;
        m.mask_fn = mask_fn;
        m.aux[1] = test_i32(te, SHAPE(c->b, n), document);
    }
    if (c->rule == RULE_ROWS) {
        m.mask_mod = "!(h % 2 == 1 && q_idx % 5 == 3)";
        m.mask_fn = mask_fn;
    }
    return m;
}

/* ---- the formula ---- */

static bool sees(const xcase *c, const xdata *in, int64_t b, int64_t i, int64_t j) {
    bool causal = c->mask != TE_MASK_NONE && c->mask != TE_MASK_PADDING && c->mask != TE_MASK_ARBITRARY;
    if (i >= c->length_q[b] || j >= c->length_kv[b]) return false;
    if (causal && j > i + c->delta[b]) return false;
    if (c->window && (j < i + c->delta[b] - c->left || (c->right >= 0 && j > i + c->delta[b] + c->right))) return false;
    return !in->mask || !in->mask[(b * c->s_q + i) * c->s_kv + j];
}
static double slope_of(const xcase *c, const xdata *in, int64_t b, int64_t h) {
    int64_t n = 1;
    if (c->option[BIAS] == BIAS_SLOPES) return (double)in->slopes[h];
    if (c->option[BIAS] == BIAS_SLOPES_OF_EACH) return (double)in->slopes[b * c->heads + h];
    while (2 * n <= c->heads) n *= 2;
    return h < n ? pow(pow(2, -8.0 / (double)n), (double)(h + 1)) : pow(pow(2, -4.0 / (double)n), (double)(2 * (h - n) + 1));
}
/* `slope`: the derivative of the score by the scaled product. */
static double score(const xcase *c, const xdata *in, int64_t b, int64_t h, int64_t i, int64_t j, double *slope) {
    const float *q = in->x[Q] + place(c, Q, b, h, i), *k = in->x[K] + place(c, K, b, h / (c->heads / c->groups), j);
    double s = 0;
    for (int64_t x = 0; x < c->d; x++) s += (double)q[x] * k[x];
    if (c->option[BIAS] == BIAS_PRE) s += (double)in->bias[bias_place(c, b, h, i, j)];
    s *= (double)c->scale;
    *slope = 1;
    if (c->softcap > 0) {
        const double t = tanh(s / (double)c->softcap);
        s = (double)c->softcap * t;
        *slope = 1 - t * t;
    }
    if (has_bias(c) && c->option[BIAS] != BIAS_PRE) s += (double)in->bias[bias_place(c, b, h, i, j)];
    if (has_alibi(c)) s -= slope_of(c, in, b, h) * fabs((double)(i + c->delta[b] - j));
    return s;
}

/* x as an FP8 code, nearest even, with a largest and a smallest step; and back. */
static double as_code(te_dtype dtype, double x, float scale) {
    const bool e5m2 = dtype == TE_F8E5M2;
    const double y = (double)((float)x * scale), most = e5m2 ? 57344 : 448;
    int exponent = 0;
    if (dtype == TE_DTYPE_NONE) return x;
    frexp(y, &exponent);
    exponent = exponent - 1 < (e5m2 ? -14 : -6) ? (e5m2 ? -14 : -6) : exponent - 1;
    double step = ldexp(1, exponent - (e5m2 ? 2 : 3)), code = nearbyint(y / step) * step;
    return (code > most ? most : code < -most ? -most : code) * (double)(1 / scale);
}

typedef struct xsums {
    double *x[PARTS], *dbias, *doffset;
    double s_amax, dp_amax;
} xsums;

/* One row: its o, and what it adds to every gradient. Returns its lse. */
static double row_of(const xcase *c, const xdata *in, xdata *out, xsums *sum, double *p, double *dp, double *factor, double *slope, int64_t b, int64_t h, int64_t i) {
    int64_t g = h / (c->heads / c->groups), qi = place(c, Q, b, h, i), oi = place(c, O, b, h, i);
    double top = -INFINITY, total = 0, delta = 0, sink = 0;
    for (int64_t j = 0; j < c->length_kv[b]; j++) {
        const double x = sees(c, in, b, i, j) && rule_sees(c, b, h, i, j) ? score(c, in, b, h, i, j, &slope[j]) : -INFINITY;
        p[j] = x == -INFINITY ? x : rule_score(c, x, h, i, j);
        factor[j] = x == -INFINITY ? 0 : rule_bprop(c, x);
        if (p[j] > top) top = p[j];
    }
    if (top == -INFINITY) return -INFINITY;
    if (top > out->max_logit[h]) out->max_logit[h] = (float)top;
    for (int64_t j = 0; j < c->length_kv[b]; j++) total += p[j] = exp(p[j] - top);
    if (c->option[SOFTMAX] != TE_SOFTMAX_VANILLA) total += sink = exp((in->offset ? (double)in->offset[h] : 0) - top);
    const double unit = total * exp2(8); /* the largest becomes 2^8 */
    for (int64_t j = 0; j < c->length_kv[b]; j++) {
        double keep = in->keep ? (double)in->keep[((b * c->heads + h) * c->s_q + i) * c->s_kv + j] : 1;
        p[j] /= total;
        dp[j] = 0;
        if (p[j] == 0) continue;
        const double s = as_code(c->s_dtype, p[j] * keep, c->s_scale),
                     of_row = c->by_row && keep > 0 ? as_code(c->s_dtype, p[j] * unit, 1) / unit * keep : s;
        sum->s_amax = fmax(sum->s_amax, p[j] * keep);
        for (int64_t x = 0, vj = place(c, V, b, g, j); x < c->d_v; x++) {
            sum->x[O][oi + x] += of_row * in->x[V][vj + x];
            sum->x[DV][vj + x] += s * in->x[DO][oi + x];
            dp[j] += keep * in->x[DO][oi + x] * in->x[V][vj + x];
        }
        delta += p[j] * dp[j];
    }
    sum->doffset[h] -= sink / total * delta;
    for (int64_t j = 0; j < c->length_kv[b]; j++) {
        double ds = p[j] * (dp[j] - delta) * factor[j];
        if (p[j] == 0) continue;
        if (has_bias(c)) /* which is added to capped scores: its gradient lacks the cap's derivative, and is not rounded by a scale that knows it */
            sum->dbias[bias_place(c, b, h, i, j)] += as_code(c->softcap > 0 ? TE_DTYPE_NONE : c->dp_dtype, ds, c->dp_scale) * (c->option[BIAS] == BIAS_PRE ? (double)c->scale : 1);
        ds *= slope[j];
        sum->dp_amax = fmax(sum->dp_amax, fabs(ds));
        ds = as_code(c->dp_dtype, ds, c->dp_scale);
        for (int64_t x = 0, kj = place(c, K, b, g, j); x < c->d; x++) {
            sum->x[DQ][qi + x] += ds * (double)c->scale * in->x[K][kj + x];
            sum->x[DK][kj + x] += ds * (double)c->scale * in->x[Q][qi + x];
        }
    }
    return top + log(total);
}

static double *zeros64(int64_t n) { return (double *)test_alloc((size_t)n * 8 + 8); }
static float *rounded_sums(const double *x, int64_t n) {
    float *y = (float *)test_alloc((size_t)n * 4 + 4);
    for (int64_t i = 0; i < n; i++) y[i] = (float)x[i];
    return y;
}
static xdata reference(const xcase *c, const xdata *in, xsums *sum) {
    xdata out = *in;
    double *p = zeros64(c->s_kv), *dp = zeros64(c->s_kv), *factor = zeros64(c->s_kv), *slope = zeros64(c->s_kv);
    for (int part = 0; part < PARTS; part++) sum->x[part] = zeros64(count(c, part));
    sum->s_amax = sum->dp_amax = 0;
    sum->dbias = zeros64(has_bias(c) ? bias_count(c) : 0);
    sum->doffset = zeros64(c->heads);
    out.lse = (float *)test_alloc((size_t)lse_count(c) * 4 + 4);
    out.max_logit = (float *)test_alloc((size_t)c->heads * 4);
    for (int64_t i = 0; i < lse_count(c); i++) out.lse[i] = -INFINITY;
    for (int64_t h = 0; h < c->heads; h++) out.max_logit[h] = -INFINITY;
    for (int64_t b = 0; b < c->b; b++)
        for (int64_t h = 0; h < c->heads; h++)
            for (int64_t i = 0; i < c->length_q[b]; i++) out.lse[lse_place(c, b, h, i)] = (float)row_of(c, in, &out, sum, p, dp, factor, slope, b, h, i);
    for (int part = 0; part < PARTS; part++)
        if (is_output(part)) out.x[part] = rounded_sums(sum->x[part], count(c, part));
    out.s_amax = (float)sum->s_amax;
    out.dp_amax = (float)sum->dp_amax;
    out.dbias = rounded_sums(sum->dbias, has_bias(c) ? bias_count(c) : 0);
    out.doffset = rounded_sums(sum->doffset, c->heads);
    return out;
}

/* ---- the operation ---- */

static te_tensor *starts(te_ctx *te, const xcase *c, const int64_t *lengths) {
    int64_t at[MAX_B + 1] = {0};
    for (int64_t b = 0; b < c->b; b++) at[b + 1] = at[b] + lengths[b];
    return test_i32(te, SHAPE(c->b + 1), at);
}

typedef struct xtensors {
    te_tensor *x[PARTS], *lse, *max_logit, *dbias, *doffset;
    te_op_attn_fwd_args f;
    te_op_attn_bwd_args g;
} xtensors;

static te_attn_rule make_rule(te_ctx *te, const xcase *c, const xdata *in) {
    te_attn_rule x;
    int64_t s[4];
    memset(&x, 0, sizeof x);
    x.mask = c->mask;
    x.window.on = c->window;
    x.window.left = c->left;
    x.window.right = c->right;
    x.softmax_scale = c->scale;
    x.dropout_p = c->p;
    x.softcap = c->softcap;
    x.bottom_right_diagonal = (te_switch)c->option[DIAGONAL];
    if (c->pads) {
        x.cu_seqlens_q = starts(te, c, c->length_q);
        x.cu_seqlens_kv = starts(te, c, c->length_kv);
    }
    if (c->padded) {
        x.cu_seqlens_q_padded = test_i32(te, SHAPE(c->b + 1), c->at_q);
        x.cu_seqlens_kv_padded = test_i32(te, SHAPE(c->b + 1), c->at_kv);
    }
    if (c->format == TE_THD) {
        x.max_seqlen_q = c->s_q;
        x.max_seqlen_kv = c->s_kv;
    }
    x.kv_bshd = c->kv_format != c->format;
    if (c->page_size) {
        int64_t n = pages_of_each(c), *table = (int64_t *)test_alloc((size_t)(c->b * n) * 8);
        for (int64_t i = 0; i < c->b * n; i++) table[i] = page_at(c, i / n, i % n);
        x.page_table = test_i32(te, SHAPE(c->b, n), table);
    }
    if (in->mask) x.attention_mask = te_tensor_from_host(te, TE_U8, SHAPE(c->b, 1, c->s_q, c->s_kv), in->mask);
    bias_shape(c, s);
    if (in->bias) x.core_attention_bias = test_tensor(te, c->bias_dtype, 4, s, in->bias);
    x.core_attention_bias_type = has_bias(c) ? (c->option[BIAS] == BIAS_PRE ? TE_ATTN_BIAS_PRE_SCALE : TE_ATTN_BIAS_POST_SCALE)
                                             : has_alibi(c) ? TE_ATTN_BIAS_ALIBI : TE_ATTN_BIAS_NONE;
    if (c->option[BIAS] == BIAS_SLOPES) x.alibi_slopes = test_tensor(te, TE_F32, SHAPE(c->heads), in->slopes);
    if (c->option[BIAS] == BIAS_SLOPES_OF_EACH) x.alibi_slopes = test_tensor(te, TE_F32, SHAPE(c->b, c->heads), in->slopes);
    x.softmax_type = (te_softmax_type)c->option[SOFTMAX];
    if (in->offset) x.softmax_offset = test_tensor(te, TE_F32, SHAPE(c->heads), in->offset);
    if (c->rule) x.score_mod = make_score_mod(te, c);
    if (c->blocks) x.block_mask = make_blocks(te, c);
    return x;
}

static xtensors make_tensors(te_ctx *te, const xcase *c, const xdata *in) {
    xtensors t;
    int64_t s[4];
    memset(&t, 0, sizeof t);
    for (int part = 0; part < PARTS; part++) {
        int n = shape_of(c, part, s);
        t.x[part] = is_output(part) ? test_guarded(te, c->dtype, n, s) : test_tensor(te, c->dtype, n, s, in->x[part]);
    }
    t.lse = test_guarded(te, TE_F32, SHAPE(lse_count(c)));
    t.max_logit = test_guarded(te, TE_F32, SHAPE(c->heads));
    bias_shape(c, s);
    if (in->bias) t.dbias = test_guarded(te, c->dbias_dtype ? c->dbias_dtype : c->bias_dtype, 4, s);
    if (in->offset) t.doffset = test_guarded(te, TE_F32, SHAPE(c->heads));
    t.f.q = t.g.q = t.x[Q];
    t.f.k = t.g.k = t.x[K];
    t.f.v = t.g.v = t.x[V];
    t.f.o = t.x[O];
    t.f.lse = t.lse;
    t.f.max_logit = t.max_logit;
    t.f.format = t.g.format = c->format;
    t.f.seed = t.g.seed = 21;
    t.f.offset = t.g.offset = 4;
    t.f.rule = t.g.rule = make_rule(te, c, in);
    t.g.o = t.x[O];
    t.g.lse = t.lse;
    t.g.d_o = t.x[DO];
    t.g.dq = t.x[DQ];
    t.g.dk = t.x[DK];
    t.g.dv = t.x[DV];
    t.g.dbias = t.dbias;
    t.g.dsoftmax_offset = t.doffset;
    return t;
}

static te_tensor *one_number(te_ctx *te, float value) { return te_tensor_full(te, TE_F32, SHAPE(1), (double)value); }
/* The amaxes begin at a small number, which the largest magnitudes must replace. */
static void round_to_fp8(te_ctx *te, const xcase *c, xtensors *t) {
    t->f.fp8.s_dtype = t->g.fp8.s_dtype = c->s_dtype;
    t->g.fp8.dp_dtype = c->dp_dtype;
    t->f.fp8.s_scale = t->g.fp8.s_scale = one_number(te, c->s_scale);
    if (c->by_row) t->f.fp8.s_scale = NULL;
    t->g.fp8.dp_scale = one_number(te, c->dp_scale);
    t->f.fp8.s_amax = one_number(te, 1e-20f);
    t->g.fp8.dp_amax = one_number(te, 1e-20f);
    t->g.o = NULL;
}

static xdata run(te_ctx *te, const xcase *c, const xdata *in) {
    xdata out = *in;
    te_scope_begin(te);
    xtensors t = make_tensors(te, c, in);
    if (c->s_dtype) round_to_fp8(te, c, &t);
    te_op_attn_fwd(te, &t.f);
    if (!c->page_size) te_op_attn_bwd(te, &t.g);
    CHECK_OK(te);
    for (int part = 0; part < PARTS; part++)
        if (part == O || (is_output(part) && !c->page_size)) out.x[part] = test_read(t.x[part]);
    out.lse = test_read(t.lse);
    out.max_logit = test_read(t.max_logit);
    if (c->s_dtype) out.s_amax = test_read(t.f.fp8.s_amax)[0], out.dp_amax = test_read(t.g.fp8.dp_amax)[0];
    if (t.dbias && !c->page_size) out.dbias = test_read(t.dbias);
    if (t.doffset && !c->page_size) out.doffset = test_read(t.doffset);
    te_scope_end(te);
    return out;
}

/* ---- comparing ---- */

/* The limits of test_attn.c, for its reasons: in f32 sums of hundreds of products and an exponential; else one rounding of the result, and on tensor cores
 * those of P and dS. Sums over rows and heads (`terms` of them) grow with the root of their number. In FP8 a number that lies at the border of two codes, within the
 * rounding of the exponential, may become the other one, an eighth or, in E5M2, a quarter away: few do, so that the mean hardly grows, but one element may be off that much. */
static void near(const xcase *c, const char *name, const float *got, const float *want, int64_t n, bool backward, double terms) {
    double once = c->dtype == TE_F32 ? (c->s_dtype ? 3e-4 : 3e-6) : c->dtype == TE_F16 ? 4e-4 : 3e-3, limit = backward ? 5 * once : 2 * once;
    double error = 0, most = c->s_dtype ? 0.25 / limit : 20, size = 0, worst = 0, floor = 0.3 * sqrt(terms);
    for (int64_t i = 0; i < n; i++) {
        double e = fabs((double)got[i] - (double)want[i]);
        if (!(e <= 1e30)) e = 1e30; /* NaN */
        error += e * e;
        size += (double)want[i] * want[i];
        if (e > worst) worst = e;
    }
    error = n ? sqrt(error / (double)n) : 0;
    size = n ? sqrt(size / (double)n) : 0;
    CHECK_MSG(error <= limit * (size + floor), "%s: the error is %.3g of %.3g (limit %.3g of it)", name, error, size, limit);
    CHECK_MSG(worst <= most * limit * (size + floor), "%s: an element is off by %.3g, at a size of %.3g (limit %.3g of it, times %.3g)", name, worst, size, limit, most);
}

static void compare(const xcase *c, const xdata *got, const xdata *want) {
    static const char *const names[PARTS] = {"q", "k", "v", "o", "d_o", "dq", "dk", "dv"};
    for (int64_t i = 0; i < lse_count(c); i++)
        if (isinf(want->lse[i]) ? got->lse[i] != want->lse[i] : !(fabs(got->lse[i] - want->lse[i]) <= 1e-5 * (1 + fabs(want->lse[i])))) {
            test_fail(__FILE__, __LINE__, "lse %lld is %.9g, not %.9g", (long long)i, (double)got->lse[i], (double)want->lse[i]);
            break;
        }
    for (int64_t h = 0; h < c->heads; h++)
        CHECK_MSG(fabs(got->max_logit[h] - want->max_logit[h]) <= 1e-5 * (1 + fabs(want->max_logit[h])), "max_logit of head %d is %.9g, not %.9g", (int)h,
                  (double)got->max_logit[h], (double)want->max_logit[h]);
    for (int part = O; part < PARTS; part++)
        if (part == O || (part > DO && !c->page_size)) near(c, names[part], got->x[part], want->x[part], count(c, part), part != O, 1);
    if (c->page_size) return;
    if (c->s_dtype) { /* no rounding but that of an exponential */
        CHECK_MSG(fabsf(got->s_amax - want->s_amax) <= 1e-5f * want->s_amax, "the largest S is %.9g, not %.9g", (double)got->s_amax, (double)want->s_amax);
        /* dP - D cancels */
        CHECK_MSG(fabsf(got->dp_amax - want->dp_amax) <= 1e-4f * want->dp_amax, "the largest dP is %.9g, not %.9g", (double)got->dp_amax, (double)want->dp_amax);
    }
    if (has_bias(c)) near(c, "dbias", got->dbias, want->dbias, bias_count(c), true, (double)(c->b * c->heads * c->s_q * c->s_kv / bias_count(c)));
    if (got->offset) near(c, "dsoftmax_offset", got->doffset, want->doffset, c->heads, true, (double)(c->b * c->s_q));
}
/* Rows of padding are 0, exactly: the formula has no term for them. */
static void check_padding(const xcase *c, const xdata *got) {
    if (!c->pads) return;
    for (int part = O; part < PARTS; part++) {
        int64_t n = count(c, part), w = channels(c, part), heads = of_keys(part) ? c->groups : c->heads;
        bool *used = (bool *)test_alloc((size_t)n + 1);
        if (!is_output(part) || (part != O && c->page_size)) continue;
        for (int64_t b = 0; b < c->b; b++)
            for (int64_t h = 0; h < heads; h++)
                for (int64_t i = 0; i < (of_keys(part) ? c->length_kv : c->length_q)[b]; i++) memset(used + place(c, part, b, h, i), 1, (size_t)w);
        for (int64_t i = 0; i < n; i++)
            if (!used[i] && got->x[part][i] != 0) {
                test_fail(__FILE__, __LINE__, "part %d: element %lld is padding, and %g", part, (long long)i, (double)got->x[part][i]);
                break;
            }
    }
}
static void check_case(te_ctx *te, const xcase *c) {
    xsums sum;
    name_case(c);
    xdata in = make_data(c), want = reference(c, &in, &sum), got = run(te, c, &in);
    compare(c, &got, &want);
    check_padding(c, &got);
}
