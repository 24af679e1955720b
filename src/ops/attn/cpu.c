/* ops/attn/cpu.c: attention by its formulas, with sums in double. Number formats are used only through cpu/rows.c.
 *
 *   S_ij = scale q_i k_j    P = softmax over the keys that row i sees    O_i = sum_j drop(P_ij) v_j
 *   dV_j = sum_i drop(P_ij) dO_i    dP_ij = drop(dO_i v_j)    dS_ij = P_ij (dP_ij - D_i),  D_i = dO_i O_i
 *   dQ_i = scale sum_j dS_ij k_j    dK_j = scale sum_i dS_ij q_i           drop(x) = kept ? x / (1 - p) : 0
 *   Soft cap: S_ij = cap tanh(scale q_i k_j / cap); dQ and dK have (1 - (S_ij / cap)^2) dS_ij in place of dS_ij.
 *   Bias B: S_ij = scale q_i k_j + c B_ij; dB = c dS, summed over the dimensions along which B repeats.
 *   Offset a of the softmax: its denominator has the additional term e^a; da = - sum_i e^(a - lse_i) D_i.
 *   FP8: drop(P) is rounded to codes in the products with v (te__attn_round_rows: by a scale of each row) and with dO.
 *   dS is rounded to codes in the products with k and q and, without a soft cap, in dB. D_i is sum_j P_ij dP_ij, unless
 *   the keys are a part of the row's (te_attn_fp8.part_of_keys).
 *
 * Query rows are processed in blocks of 32. Their scores are [keys, 32], so that the scores of one key are a vector.
 * A task has all query heads of one head of K and V. Every sum has a fixed order, whichever thread computes it. */

enum { TE__ATTN_WIDE = 16, TE__ATTN_QUAD = 4, TE__ATTN_BLOCK = 32 };

/* Uses fmaf only if -march has an instruction for it. Without an instruction fmaf is a slow function. */
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define TE__ATTN_FMA(a, b, c) fmaf(a, b, c)
#else
#define TE__ATTN_FMA(a, b, c) ((a) * (b) + (c))
#endif

/* Computes out[r][0 .. 15] += sum over i < n of a[r * row + i * step] * b[i * ld + 0 .. 15], for r = 0 .. 3. Rows of
 * `out` are out_ld elements apart. Up to 64 terms are summed in f32, so that compilers vectorize the loop. These sums
 * are added in double. */
static void te__attn_madd(double *out, int64_t out_ld, const float *a, int64_t row, int64_t step, const float *b,
                          int64_t ld, int64_t n) {
    enum { W = TE__ATTN_WIDE };
    int64_t i = 0;
    int c;
    while (i < n) {
        const int64_t end = te__min(i + 64, n);
        float c0[W], c1[W], c2[W], c3[W];
        for (c = 0; c < W; c++) c0[c] = c1[c] = c2[c] = c3[c] = 0.0f;
        for (; i < end; i++) {
            const float *x = a + i * step, *y = b + i * ld;
            const float a0 = x[0], a1 = x[row], a2 = x[2 * row], a3 = x[3 * row];
            for (c = 0; c < W; c++) {
                c0[c] = TE__ATTN_FMA(a0, y[c], c0[c]);
                c1[c] = TE__ATTN_FMA(a1, y[c], c1[c]);
                c2[c] = TE__ATTN_FMA(a2, y[c], c2[c]);
                c3[c] = TE__ATTN_FMA(a3, y[c], c3[c]);
            }
        }
        for (c = 0; c < W; c++) {
            out[c] += (double)c0[c];
            out[out_ld + c] += (double)c1[c];
            out[2 * out_ld + c] += (double)c2[c];
            out[3 * out_ld + c] += (double)c3[c];
        }
    }
}

/* Returns e^x with an error of about 2 ulp; 0 for x <= -87; infinity above FLT_MAX; NaN for NaN. It has no branches, so
 * that compilers vectorize it. e^x = 2^n e^r with r in [-ln 2 / 2, ln 2 / 2]; adding 1.5 * 2^23 rounds to an integer.
 * The polynomial is that of expf in Cephes (Moshier). */
static inline float te__attn_exp(float x) {
    const int32_t m = (int32_t)(te__f32_bits(x * 1.44269504f + 12582912.0f) - 0x4b400000u), n = m < 127 ? m : 127;
    const float r = (x - (float)n * 0.693359375f) + (float)n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r * r + r + 1.0f) * te__bits_f32((uint32_t)(n + 127) << 23);
    return te__bits_f32(te__f32_bits(p) & (x <= -87.0f ? 0u : 0xffffffffu));
}

/* The memory of one worker. `keys` is a multiple of 4, channels are multiples of 16. The padding is 0. */
typedef struct te__attn_scratch {
    float *k, *v;           /* [keys, d], [keys, d_v]: a head */
    float *q, *g;           /* [BLOCK, d], [BLOCK, d_v]: a block of rows of Q and dO */
    float *q_tile, *g_tile; /* [d, BLOCK], [d_v, BLOCK]: q and g, transposed */
    float *s, *dp;          /* [keys, BLOCK]; s has scores, later P; dp has dP, later dS */
    double *out;            /* forward [BLOCK, d_v]: rows of O; backward [BLOCK, d]: rows of dQ */
    float *factor;          /* [keys, BLOCK]: the derivative of the soft cap and of the user's rule for scores; NULL: it
                             * is always 1 */
    double *dk, *dv;        /* [keys, d], [keys, d_v] */
    double *db;             /* [BLOCK, keys]: the sums of dB for a block of rows */
    float *top;             /* [heads]: the largest scores so far */
    float *amax;            /* [1]: the greatest absolute value that was rounded so far */
} te__attn_scratch;

typedef struct te__attn_work {
    te__attn_kargs a;
    const te_score_mod *mod; /* the user's rule for scores */
    int64_t keys, d, d_v; /* s_kv, d and d_v, rounded up as in te__attn_scratch */
    int64_t splits;       /* forward: number of shares into which the query rows of a sequence are split; backward: 1.
                           * A task computes one share, for one head of keys. */
    int64_t tasks, workers;
    bool backward, table; /* table: this is the pass that makes only dB */
    double *dsink;        /* [batch, heads] */
    char *memory;
    int64_t bytes; /* bytes of one worker's memory */
} te__attn_work;

static void *te__attn_take(char *memory, int64_t *used, int64_t bytes) {
    void *p = memory ? (void *)(memory + *used) : NULL;
    *used += te__round_up(bytes, 64);
    return p;
}

/* Divides `memory` among the fields of *s, and returns the bytes that they need. If `memory` is NULL, only counts. */
static int64_t te__attn_lay_out(const te__attn_work *w, char *memory, te__attn_scratch *s) {
    const int64_t size = (int64_t)sizeof(float);
    int64_t used = 0;
    s->k = (float *)te__attn_take(memory, &used, w->keys * w->d * size);
    s->v = (float *)te__attn_take(memory, &used, w->keys * w->d_v * size);
    s->q = (float *)te__attn_take(memory, &used, TE__ATTN_BLOCK * w->d * size);
    s->q_tile = (float *)te__attn_take(memory, &used, TE__ATTN_BLOCK * w->d * size);
    s->s = (float *)te__attn_take(memory, &used, w->keys * TE__ATTN_BLOCK * size);
    s->amax = (float *)te__attn_take(memory, &used, size);
    s->out = (double *)te__attn_take(memory, &used, TE__ATTN_BLOCK * (w->backward ? w->d : w->d_v) * 2 * size);
    if (!w->backward) {
        s->top = (float *)te__attn_take(memory, &used, w->a.heads * size);
        return used;
    }
    s->g = (float *)te__attn_take(memory, &used, TE__ATTN_BLOCK * w->d_v * size);
    s->g_tile = (float *)te__attn_take(memory, &used, TE__ATTN_BLOCK * w->d_v * size);
    s->dp = (float *)te__attn_take(memory, &used, w->keys * TE__ATTN_BLOCK * size);
    if ((w->mod->score_fn && !w->mod->additive) || w->a.x.softcap > 0.0f)
        s->factor = (float *)te__attn_take(memory, &used, w->keys * TE__ATTN_BLOCK * size);
    if (w->table) {
        s->db = (double *)te__attn_take(memory, &used, TE__ATTN_BLOCK * w->keys * 2 * size);
        return used;
    }
    s->dk = (double *)te__attn_take(memory, &used, w->keys * w->d * 2 * size);
    s->dv = (double *)te__attn_take(memory, &used, w->keys * w->d_v * 2 * size);
    return used;
}

/* ---- rows ---- */

static int64_t te__attn_row_at(const te__attn_view *x, int64_t b, int64_t h, int64_t i) {
    return b * x->b + h * x->h + i * x->s;
}

/* Loads rows `first` .. `first` + n - 1 of a head as f32 to `out`, which has `rows` rows of `padded` channels. All
 * other elements of `out` become 0. Elements are multiplied by *factor, unless it is NULL. */
static void te__attn_load(const te__attn_view *x, const float *factor, int64_t b, int64_t h, int64_t first, int64_t n,
                          int64_t rows, int64_t d, int64_t padded, float *out) {
    int64_t i, c;
    for (i = 0; i < n; i++) {
        te__load_row(x->p, (te_dtype)x->dt, te__attn_row_at(x, b, h, first + i), d, out + i * padded);
        for (c = 0; factor && c < d; c++) out[i * padded + c] *= *factor;
        memset(out + i * padded + d, 0, (size_t)(padded - d) * sizeof(float));
    }
    memset(out + n * padded, 0, (size_t)((rows - n) * padded) * sizeof(float));
}

/* Multiplies n rows of codes by their factors, if there are any. */
static void te__attn_factor_rows(const te__attn_view *factors, int64_t b, int64_t h, int64_t first, int64_t n,
                                 int64_t padded, float *rows) {
    int64_t i, c;
    if (!factors->dt) return;
    for (i = 0; i < n; i++) {
        const float factor =
            te__load_element(factors->p, (te_dtype)factors->dt, te__attn_row_at(factors, b, h, first + i));
        for (c = 0; c < padded; c++) rows[i * padded + c] *= factor;
    }
}

/* Loads all keys of a sequence from x, which is k or v. */
static void te__attn_load_keys(const te__attn_kargs *a, const te__attn_seq *seq, const te__attn_view *x, int64_t b,
                               int64_t g, int64_t rows, int64_t d, int64_t padded, float *out) {
    const float *factor = x == &a->k ? a->x.k_inv : a->x.v_inv;
    const te__attn_view *factors = x == &a->k ? &a->x.k_factors : &a->x.v_factors;
    int64_t j, n;
    int row;
    if (!a->x.pages) {
        te__attn_load(x, factor, b, g, seq->kv_at, seq->s_kv, rows, d, padded, out);
        te__attn_factor_rows(factors, b, g, seq->kv_at, seq->s_kv, padded, out);
        return;
    }
    for (j = 0; j < seq->s_kv; j += n) { /* a page at a time */
        const int64_t page = te__attn_page(&a->x, (int)b, (int)j, &row);
        n = te__min(a->x.page_size, seq->s_kv - j);
        te__attn_load(x, factor, page, g, row, n, n, d, padded, out + j * padded);
        te__attn_factor_rows(factors, page, g, row, n, padded, out + j * padded);
    }
    memset(out + seq->s_kv * padded, 0, (size_t)((rows - seq->s_kv) * padded) * sizeof(float));
}

/* Loads a block of query rows into `rows`, and a transposed copy of it into `tile`. */
static void te__attn_load_block(const te__attn_view *x, const float *factor, int64_t b, int64_t h, int64_t first,
                                int64_t n, int64_t d, int64_t padded, float *rows, float *tile) {
    int64_t r, c;
    te__attn_load(x, factor, b, h, first, n, TE__ATTN_BLOCK, d, padded, rows);
    for (c = 0; c < padded; c++)
        for (r = 0; r < TE__ATTN_BLOCK; r++) tile[c * TE__ATTN_BLOCK + r] = rows[r * padded + c];
}

static void te__attn_store(const te__attn_view *x, int64_t b, int64_t h, int64_t i, int64_t n, const double *in,
                           double scale) {
    float row[TE__ATTN_MAX_D];
    int64_t c;
    for (c = 0; c < n; c++) row[c] = (float)(in[c] * scale);
    te__store_row(x->p, (te_dtype)x->dt, te__attn_row_at(x, b, h, i), n, row);
}

/* ---- blocks of scores ---- */

/* At most 32 query rows of one head, from row `first` on. `rows` rows are written. The first n rows attend to keys
 * `begin` .. `end` - 1. */
typedef struct te__attn_block {
    const te__attn_extra *extra;
    const te__attn_seq *seq;
    int64_t b, h, first, n, rows, begin, end;
} te__attn_block;

static te__attn_block te__attn_block_of(const te__attn_kargs *a, const te__attn_seq *seq, int64_t b, int64_t h,
                                        int64_t first) {
    te__attn_block block;
    block.extra = &a->x;
    block.seq = seq;
    block.b = b;
    block.h = h;
    block.first = first;
    block.n = te__max(0, te__min(TE__ATTN_BLOCK, seq->s_q - first));
    block.rows = te__min(TE__ATTN_BLOCK, seq->q_end - first);
    block.begin = te__max(0, first + seq->lo) / TE__ATTN_QUAD * TE__ATTN_QUAD;
    block.end = block.n ? te__min(seq->s_kv, first + block.n + seq->hi) : 0;
    return block;
}

/* Finds the next range *from .. *to - 1 of keys in blocks that are not empty. On entry *to is the end of the previous
 * range. Returns false if there is none. */
static bool te__attn_next_run(const te__attn_block *block, int64_t *from, int64_t *to) {
    const te__attn_extra *x = block->extra;
    int64_t j = *to;
    if (!x->blocks.p) {
        *from = block->begin;
        *to = block->end;
        return j < block->end;
    }
    while (j < block->end &&
           te__attn_block_at(x, (int)block->b, (int)block->h, (int)block->first, (int)j) == (int)TE_ATTN_BLOCK_EMPTY)
        j = (j / TE_ATTN_BLOCK_SIZE + 1) * TE_ATTN_BLOCK_SIZE;
    *from = j;
    while (j < block->end &&
           te__attn_block_at(x, (int)block->b, (int)block->h, (int)block->first, (int)j) != (int)TE_ATTN_BLOCK_EMPTY)
        j = (j / TE_ATTN_BLOCK_SIZE + 1) * TE_ATTN_BLOCK_SIZE;
    *to = te__min(j, block->end);
    return *from < *to;
}

/* Computes out[j][r] = scale * (row j of x) . (column r of tile). For keys in empty blocks of the block mask, out[j][r]
 * is `none`. */
static void te__attn_scores(const te__attn_block *block, float *out, const float *x, int64_t padded, const float *tile,
                            int64_t d, double scale, float none) {
    int64_t from, to = block->begin, j, r, c, half;
    for (j = block->begin; block->extra->blocks.p && j < te__round_up(block->end, TE__ATTN_QUAD); j++)
        for (r = 0; r < TE__ATTN_BLOCK; r++) out[j * TE__ATTN_BLOCK + r] = none;
    while (te__attn_next_run(block, &from, &to))
        for (j = from; j < to; j += TE__ATTN_QUAD)
            for (half = 0; half < TE__ATTN_BLOCK; half += TE__ATTN_WIDE) {
                double sum[TE__ATTN_QUAD * TE__ATTN_WIDE] = TE_ZERO;
                te__attn_madd(sum, TE__ATTN_WIDE, x + j * padded, padded, 1, tile + half, TE__ATTN_BLOCK, d);
                for (r = 0; r < TE__ATTN_QUAD; r++)
                    for (c = 0; c < TE__ATTN_WIDE; c++)
                        out[(j + r) * TE__ATTN_BLOCK + half + c] = (float)(sum[r * TE__ATTN_WIDE + c] * scale);
            }
}

/* Computes out[r][c] += sum over the block's keys j of weight[j][r] * x[j][c]. `out` is [BLOCK, padded]. */
static void te__attn_weighted(const te__attn_block *block, double *out, const float *weight, const float *x,
                              int64_t padded) {
    int64_t from, to = block->begin, r, c;
    while (te__attn_next_run(block, &from, &to))
        for (r = 0; r < block->n; r += TE__ATTN_QUAD)
            for (c = 0; c < padded; c += TE__ATTN_WIDE)
                te__attn_madd(out + r * padded + c, padded, weight + from * TE__ATTN_BLOCK + r, 1, TE__ATTN_BLOCK,
                              x + from * padded + c, padded, to - from);
}

/* Computes out[j][c] += sum over the block's rows r of weight[j][r] * x[r][c], for each key j of the block. */
static void te__attn_scatter(const te__attn_block *block, double *out, const float *weight, const float *x,
                             int64_t padded) {
    int64_t from, to = block->begin, j, c;
    while (te__attn_next_run(block, &from, &to))
        for (j = from; j < to; j += TE__ATTN_QUAD)
            for (c = 0; c < padded; c += TE__ATTN_WIDE)
                te__attn_madd(out + j * padded + c, padded, weight + j * TE__ATTN_BLOCK, TE__ATTN_BLOCK, 1, x + c,
                              padded, block->n);
}

/* Finds the rows of the block that see key j. They are *from .. *to - 1. */
static void te__attn_seen_by(const te__attn_block *block, int64_t j, int64_t *from, int64_t *to) {
    *from = te__min(te__max(0, j - block->seq->hi - block->first), TE__ATTN_BLOCK);
    *to = j < block->end ? te__max(*from, te__min(block->n, j - block->seq->lo - block->first + 1)) : *from;
}

/* Applies the soft cap to the scores s [keys, BLOCK]. `factor` gets the cap's derivative. In the pass for dB (`table`)
 * `factor` gets 1, because the bias is added after the cap. */
static void te__attn_cap(const te__attn_kargs *a, const te__attn_block *block, float *s, float *factor, bool table) {
    const float cap = a->x.softcap;
    int64_t j, r;
    if (!(cap > 0.0f)) return;
    for (j = block->begin; j < block->end; j++) {
        const bool empty = block->extra->blocks.p &&
                           te__attn_block_at(block->extra, (int)block->b, (int)block->h, (int)block->first, (int)j) ==
                               (int)TE_ATTN_BLOCK_EMPTY;
        for (r = 0; r < block->n; r++) {
            const int64_t at = j * TE__ATTN_BLOCK + r;
            const float t = tanhf(s[at] / cap);
            if (factor) factor[at] = empty ? 0.0f : table ? 1.0f : 1.0f - t * t;
            if (!empty) s[at] = cap * t;
        }
    }
}

/* Adds ALiBi and the bias to the scores s [keys, BLOCK]. A masked score becomes -inf, so that its exponential is 0. */
static void te__attn_adjust(const te__attn_kargs *a, const te__attn_block *block, float *s) {
    const te__attn_extra *x = &a->x;
    const float slope = !x->alibi   ? 0.0f
                        : x->slopes ? x->slopes[block->b * x->slopes_b + block->h]
                                    : te__attn_slope(a->heads, (int)block->h);
    int64_t r, j;
    if (!x->alibi && !x->bias.p && !x->mask.p) return;
    for (r = 0; r < block->n; r++) {
        const int64_t i = block->first + r, bias = block->b * x->bias.b + block->h * x->bias.h + i * x->bias.i;
        const uint8_t *mask =
            (const uint8_t *)x->mask.p + (block->b * x->mask.b + block->h * x->mask.h + i * x->mask.i);
        for (j = block->begin; j < block->end; j++) {
            float *y = s + j * TE__ATTN_BLOCK + r, b;
            if (x->alibi) *y -= slope * fabsf((float)(i + block->seq->delta - j));
            if (x->bias.p) {
                te__load_row(x->bias.p, (te_dtype)x->bias.dt, bias + j * x->bias.j, 1, &b);
                *y += x->bias_scale * b;
            }
            if (x->mask.p && mask[j * x->mask.j]) *y = -HUGE_VALF;
        }
    }
}

/* Returns true if the block mask says that all rows of the block see key j. Then the user's mask_fn is not called. */
static bool te__attn_is_full(const te__attn_block *block, int64_t j) {
    return block->extra->blocks.p && te__attn_block_at(block->extra, (int)block->b, (int)block->h, (int)block->first,
                                                       (int)j) == (int)TE_ATTN_BLOCK_FULL;
}

/* Applies the user's rule *m to the scores s [keys, BLOCK]. `factor` gets the rule's derivative or, if `capped` is
 * true, is multiplied by the rule's derivative. */
static void te__attn_modify(const te_score_mod *m, const te__attn_block *block, float *s, float *factor, bool capped) {
    int64_t j, r, from, to;
    if (!m->score_fn && !m->mask_fn) return;
    for (j = block->begin; j < block->end; j++) {
        /* the factor is 0 for rows that do not see the key */
        if (factor && !capped) memset(factor + j * TE__ATTN_BLOCK, 0, TE__ATTN_BLOCK * sizeof(float));
        te__attn_seen_by(block, j, &from, &to);
        for (r = from; r < to; r++) {
            const int64_t i = block->first + r, at = j * TE__ATTN_BLOCK + r;
            if (s[at] == -HUGE_VALF) continue; /* masked */
            if (m->mask_fn && !te__attn_is_full(block, j) && !m->mask_fn(m->user, block->b, block->h, i, j)) {
                s[at] = -HUGE_VALF;
                continue;
            }
            if (factor && m->score_fn && !m->additive)
                factor[at] = (capped ? factor[at] : 1.0f) * m->score_bprop_fn(m->user, s[at], block->b, block->h, i, j);
            if (m->score_fn) s[at] = m->score_fn(m->user, s[at], block->b, block->h, i, j);
        }
    }
}

/* Returns true if the softmax has an offset, an additional exponent in its denominator. *sink gets the offset. */
static bool te__attn_sink(const te__attn_kargs *a, int64_t h, float *sink) {
    *sink = a->x.softmax == (int)TE_SOFTMAX_LEARNABLE ? a->x.sink[h] : 0.0f;
    return a->x.softmax != (int)TE_SOFTMAX_VANILLA;
}

/* Replaces s by e^(s - base[r]) where row r sees the key. Replaces s by 0 elsewhere. */
static void te__attn_exp_block(const te__attn_block *block, float *s, const float *base) {
    int64_t j, r, from, to;
    for (j = block->begin; j < te__round_up(block->end, TE__ATTN_QUAD); j++) {
        float *x = s + j * TE__ATTN_BLOCK;
        te__attn_seen_by(block, j, &from, &to);
        for (r = 0; r < TE__ATTN_BLOCK; r++) x[r] = te__attn_exp(x[r] - base[r]);
        for (r = 0; r < from; r++) x[r] = 0.0f;
        for (r = to; r < TE__ATTN_BLOCK; r++) x[r] = 0.0f;
    }
}

/* Applies dropout to x [keys, BLOCK]. This is drop() in the formulas at the head of this file. */
static void te__attn_drop(const te__attn_kargs *a, const te__attn_block *block, float *x) {
    const uint32_t threshold = te__attn_threshold(a);
    int64_t r, j;
    if (threshold == 0) return;
    for (r = 0; r < block->n; r++) {
        const uint64_t row = te__attn_keep_row(a, (int)block->b, (int)block->h, (int)(block->first + r));
        uint32_t keep = 0;
        for (j = block->begin; j < block->end; j++) {
            float *y = x + j * TE__ATTN_BLOCK + r;
            if (j == block->begin || j % 32 == 0)
                keep = te__attn_keep_word(threshold, a->seed, a->offset, row + (uint64_t)j / 32);
            *y = keep >> (j % 32) & 1u ? *y * a->keep_scale : 0.0f;
        }
    }
}

/* Rounds x [keys, BLOCK] to FP8 codes of format dt. Raises *amax to the greatest absolute value, unless amax is
 * NULL. */
static void te__attn_round(const te__attn_block *block, float *x, int dt, const float *scale, float *amax) {
    const float inverse = dt ? 1.0f / *scale : 0.0f;
    int64_t j, r;
    if (!dt) return;
    for (j = block->begin; j < block->end; j++)
        for (r = 0; r < block->n; r++) {
            float *y = x + j * TE__ATTN_BLOCK + r;
            if (amax && fabsf(*y) > *amax) *amax = fabsf(*y);
            *y = te__attn_rounded(dt, *y, *scale, inverse);
        }
}
/* Computes x[j][r] *= factor[r]. */
static void te__attn_scale_rows(const te__attn_block *block, float *x, const double *factor) {
    int64_t j, r;
    for (j = block->begin; j < block->end; j++)
        for (r = 0; r < block->n; r++)
            x[j * TE__ATTN_BLOCK + r] = (float)((double)x[j * TE__ATTN_BLOCK + r] * factor[r]);
}
/* Rounds x [keys, BLOCK], the exponentials e^(score - top[r]) after dropout, to codes, each row by a scale of its own:
 * the row's largest score, keys[r], becomes 2^TE__ATTN_FP8_ROW without dropout. inverse[r], the factor of row r in o,
 * is divided by that scale. */
static void te__attn_round_rows(const te__attn_kargs *a, const te__attn_block *block, float *x, const float *keys,
                                const float *top, double *inverse, float *amax) {
    int64_t j, r;
    for (r = 0; r < block->n; r++) {
        const double by = exp2((double)TE__ATTN_FP8_ROW) * exp(fmin((double)top[r] - (double)keys[r], 80.0)),
                     factor = a->keep_scale > 0.0f ? by / (double)a->keep_scale : by;
        for (j = block->begin; j < block->end; j++) {
            float *y = x + j * TE__ATTN_BLOCK + r;
            const float p = (float)((double)*y * inverse[r]);
            if (p > *amax) *amax = p;
            *y = te__attn_rounded(a->x.s_dt, (float)((double)*y * factor), 1.0f, 1.0f);
        }
        inverse[r] /= factor;
    }
}

/* ---- forward ---- */

static void te__attn_fwd_block(const te__attn_work *w, const te__attn_scratch *s, const te__attn_block *block) {
    const te__attn_kargs *a = &w->a;
    const te__attn_seq *seq = block->seq;
    double sum[TE__ATTN_BLOCK] = TE_ZERO, inverse[TE__ATTN_BLOCK];
    float top[TE__ATTN_BLOCK], keys[TE__ATTN_BLOCK], sink;
    int64_t j, r, from, to;
    const bool by_row = a->x.by_row != 0, rounds = a->x.s_dt != 0 && !by_row;
    te__attn_load_block(&a->q, a->x.q_inv, block->b, block->h, seq->q_at + block->first, block->n, a->d, w->d, s->q,
                        s->q_tile);
    te__attn_scores(block, s->s, s->k, w->d, s->q_tile, a->d, a->scale, -HUGE_VALF);
    te__attn_cap(a, block, s->s, NULL, false);
    te__attn_adjust(a, block, s->s);
    te__attn_modify(w->mod, block, s->s, NULL, false);
    for (r = 0; r < TE__ATTN_BLOCK; r++) top[r] = -FLT_MAX;
    for (j = block->begin; j < block->end; j++) {
        const float *x = s->s + j * TE__ATTN_BLOCK;
        te__attn_seen_by(block, j, &from, &to);
        for (r = from; r < to; r++) top[r] = x[r] > top[r] ? x[r] : top[r];
    }
    memcpy(keys, top, sizeof(keys));
    for (r = 0; r < block->n; r++)
        if (top[r] != -FLT_MAX) {
            s->top[block->h] = top[r] > s->top[block->h] ? top[r] : s->top[block->h];
            if (te__attn_sink(a, block->h, &sink)) {
                top[r] = sink > top[r] ? sink : top[r];
                sum[r] = exp((double)sink - (double)top[r]);
            }
        }
    te__attn_exp_block(block, s->s, top);
    for (j = block->begin; j < block->end; j++)
        for (r = 0; r < TE__ATTN_BLOCK; r++) sum[r] += (double)s->s[j * TE__ATTN_BLOCK + r];
    for (r = 0; r < TE__ATTN_BLOCK; r++) inverse[r] = sum[r] == 0.0 ? 0.0 : 1.0 / sum[r];
    if (rounds) te__attn_scale_rows(block, s->s, inverse);
    te__attn_drop(a, block, s->s);
    if (by_row)
        te__attn_round_rows(a, block, s->s, keys, top, inverse, s->amax);
    else
        te__attn_round(block, s->s, a->x.s_dt, a->x.s_scale, s->amax);
    memset(s->out, 0, (size_t)(TE__ATTN_BLOCK * w->d_v) * sizeof(double));
    te__attn_weighted(block, s->out, s->s, s->v, w->d_v);
    for (r = 0; r < block->rows; r++) {
        const int64_t i = block->first + r;
        te__attn_store(&a->o, block->b, block->h, seq->q_at + i, a->d_v, s->out + r * w->d_v,
                       rounds ? 1.0 : inverse[r]);
        if (a->lse)
            a->lse[seq->lse_at + block->h * seq->lse_head + i] =
                sum[r] == 0.0 ? -HUGE_VALF : (float)((double)top[r] + log(sum[r]));
    }
}

/* ---- backward ---- */

/* Computes s->s = P and s->dp = dS for a block. */
static void te__attn_bwd_scores(const te__attn_work *w, const te__attn_scratch *s, const te__attn_block *block) {
    const te__attn_kargs *a = &w->a;
    const te__attn_seq *seq = block->seq;
    float o[TE__ATTN_MAX_D], lse[TE__ATTN_BLOCK] = TE_ZERO, delta[TE__ATTN_BLOCK] = TE_ZERO, sink;
    double sums[TE__ATTN_BLOCK] = TE_ZERO;
    int64_t j, r, c;
    const bool sums_delta = a->x.sums_delta != 0;
    te__attn_load_block(&a->q, a->x.q_inv, block->b, block->h, seq->q_at + block->first, block->n, a->d, w->d, s->q,
                        s->q_tile);
    te__attn_load_block(&a->d_o, a->x.do_inv, block->b, block->h, seq->q_at + block->first, block->n, a->d_v, w->d_v,
                        s->g, s->g_tile);
    for (r = 0; r < block->n; r++) {
        const float x = a->lse[seq->lse_at + block->h * seq->lse_head + block->first + r];
        if (x == -HUGE_VALF) continue; /* the row sees no key, or only scores of -inf */
        lse[r] = x;
        if (sums_delta) continue;
        te__load_row(a->o.p, (te_dtype)a->o.dt,
                     te__attn_row_at(&a->o, block->b, block->h, seq->q_at + block->first + r), a->d_v, o);
        for (c = 0; c < a->d_v; c++) sums[r] += (double)o[c] * (double)s->g[r * w->d_v + c];
    }
    te__attn_scores(block, s->s, s->k, w->d, s->q_tile, a->d, a->scale, -HUGE_VALF);
    te__attn_cap(a, block, s->s, s->factor, w->table);
    te__attn_adjust(a, block, s->s);
    te__attn_modify(w->mod, block, s->s, s->factor, a->x.softcap > 0.0f);
    te__attn_exp_block(block, s->s, lse);
    te__attn_scores(block, s->dp, s->v, w->d_v, s->g_tile, a->d_v, 1.0, 0.0f);
    te__attn_drop(a, block, s->dp);
    for (j = block->begin; sums_delta && j < block->end; j++)
        for (r = 0; r < block->n; r++)
            sums[r] += (double)s->s[j * TE__ATTN_BLOCK + r] * (double)s->dp[j * TE__ATTN_BLOCK + r];
    for (r = 0; r < block->n; r++) {
        delta[r] = (float)sums[r];
        if (w->dsink && te__attn_sink(a, block->h, &sink) &&
            a->lse[seq->lse_at + block->h * seq->lse_head + block->first + r] != -HUGE_VALF)
            w->dsink[block->b * a->heads + block->h] -= exp((double)sink - (double)lse[r]) * sums[r];
    }
    for (j = block->begin; j < te__round_up(block->end, TE__ATTN_QUAD); j++)
        for (r = 0; r < TE__ATTN_BLOCK; r++) {
            float *x = s->dp + j * TE__ATTN_BLOCK + r;
            *x = r < block->n ? s->s[j * TE__ATTN_BLOCK + r] * (*x - delta[r]) : 0.0f;
            if (s->factor && j < block->end && r < block->n) *x *= s->factor[j * TE__ATTN_BLOCK + r];
        }
    /* With a soft cap, the pass for dB needs dS without the cap's derivative. dp_scale does not fit these values, so
     * they are not rounded. */
    if (w->table && a->x.softcap > 0.0f) return;
    /* the main pass records the amax of the same dS */
    te__attn_round(block, s->dp, a->x.dp_dt, a->x.dp_scale, w->table ? NULL : s->amax);
}

/* Computes dQ of a block, and adds the block's part of dK and dV to their sums. */
static void te__attn_bwd_block(const te__attn_work *w, const te__attn_scratch *s, const te__attn_block *block) {
    const te__attn_kargs *a = &w->a;
    int64_t r;
    te__attn_bwd_scores(w, s, block);
    te__attn_drop(a, block, s->s);
    te__attn_round(block, s->s, a->x.s_dt, a->x.s_scale, NULL);
    te__attn_scatter(block, s->dv, s->s, s->g, w->d_v);
    te__attn_scatter(block, s->dk, s->dp, s->q, w->d);
    memset(s->out, 0, (size_t)(TE__ATTN_BLOCK * w->d) * sizeof(double));
    te__attn_weighted(block, s->out, s->dp, s->k, w->d);
    for (r = 0; r < block->rows; r++)
        te__attn_store(&a->dq, block->b, block->h, block->seq->q_at + block->first + r, a->d, s->out + r * w->d,
                       a->scale);
}

/* Runs a task of the pass for dB: computes up to 32 rows of dB, summed over all sequences, heads and query rows that
 * share these rows. */
static void te__attn_table_task(const te__attn_work *w, const te__attn_scratch *s, int64_t task) {
    const te__attn_kargs *a = &w->a;
    const te__attn_extra *x = &a->x;
    const int64_t per_group = a->heads / te__max(a->groups, 1), tiles = te__div_up(x->dbias_i, TE__ATTN_BLOCK);
    const int64_t tile = task % tiles, tb = task / tiles / x->dbias_h, th = task / tiles % x->dbias_h;
    const int64_t rows = te__min(TE__ATTN_BLOCK, x->dbias_i - tile * TE__ATTN_BLOCK);
    int64_t b, h, first, j, r;
    float *out = s->s; /* s->s no longer has scores when `out` is used */
    memset(s->db, 0, (size_t)(TE__ATTN_BLOCK * w->keys) * sizeof(double));
    for (b = tb; b < (x->dbias_b == 1 ? a->batch : tb + 1); b++) {
        const te__attn_seq seq = te__attn_seq_of(a, (int)b);
        int64_t loaded = -1;
        for (h = th; h < (x->dbias_h == 1 ? a->heads : th + 1); h++) {
            const int64_t g = h / per_group;
            if (g != loaded) {
                te__attn_load_keys(a, &seq, &a->k, b, g, w->keys, a->d, w->d, s->k);
                te__attn_load_keys(a, &seq, &a->v, b, g, w->keys, a->d_v, w->d_v, s->v);
                loaded = g;
            }
            for (first = tile * TE__ATTN_BLOCK;
                 first < (x->dbias_i == 1 ? seq.s_q : te__min(seq.s_q, tile * TE__ATTN_BLOCK + 1));
                 first += TE__ATTN_BLOCK) {
                const te__attn_block block = te__attn_block_of(a, &seq, b, h, first);
                te__attn_bwd_scores(w, s, &block);
                for (j = block.begin; j < block.end; j++)
                    for (r = 0; r < block.n; r++)
                        s->db[(x->dbias_i == 1 ? 0 : r) * w->keys + j] += (double)s->dp[j * TE__ATTN_BLOCK + r];
            }
        }
    }
    for (r = 0; r < rows; r++) {
        for (j = 0; j < a->s_kv; j++) out[j] = (float)(s->db[r * w->keys + j] * x->bias_scale);
        te__store_row(x->dbias.p, (te_dtype)x->dbias.dt,
                      ((tb * x->dbias_h + th) * x->dbias_i + tile * TE__ATTN_BLOCK + r) * a->s_kv, a->s_kv, out);
    }
}

/* ---- both ---- */

static void te__attn_task(const te__attn_work *w, const te__attn_scratch *s, int64_t task) {
    const te__attn_kargs *a = &w->a;
    const int64_t per_group = a->heads / a->groups, split = task % w->splits, g = task / w->splits % a->groups,
                  b = task / w->splits / a->groups;
    const int64_t step = TE__ATTN_BLOCK * w->splits;
    const te__attn_seq seq = te__attn_seq_of(a, (int)b);
    int64_t h, first, j;
    te__attn_load_keys(a, &seq, &a->k, b, g, w->keys, a->d, w->d, s->k);
    te__attn_load_keys(a, &seq, &a->v, b, g, w->keys, a->d_v, w->d_v, s->v);
    if (w->backward) {
        memset(s->dk, 0, (size_t)(w->keys * w->d) * sizeof(double));
        memset(s->dv, 0, (size_t)(w->keys * w->d_v) * sizeof(double));
    }
    /* Share i of the query rows has the blocks i, i + splits, ... So a causal mask gives all shares about the same
     * work. */
    for (h = g * per_group; h < (g + 1) * per_group; h++)
        for (first = split * TE__ATTN_BLOCK; first < seq.q_end; first += step) {
            const te__attn_block block = te__attn_block_of(a, &seq, b, h, first);
            if (w->backward)
                te__attn_bwd_block(w, s, &block);
            else
                te__attn_fwd_block(w, s, &block);
        }
    if (!w->backward) return;
    for (j = 0; j < seq.kv_end; j++) {
        const double there = j < seq.s_kv ? 1.0 : 0.0;
        te__attn_store(&a->dk, b, g, seq.kv_at + j, a->d, s->dk + j * w->d, a->scale * there);
        te__attn_store(&a->dv, b, g, seq.kv_at + j, a->d_v, s->dv + j * w->d_v, there);
    }
}

/* Runs the workers begin .. end - 1. Worker i runs the tasks i, i + workers, i + 2 workers, ... */
static void te__attn_worker(void *user, int64_t begin, int64_t end) {
    const te__attn_work *w = (const te__attn_work *)user;
    te__attn_scratch s = TE_ZERO;
    int64_t worker, task, h;
    for (worker = begin; worker < end; worker++) {
        te__attn_lay_out(w, w->memory + worker * w->bytes, &s);
        *s.amax = 0.0f;
        for (h = 0; s.top && h < w->a.heads; h++) s.top[h] = -HUGE_VALF;
        for (task = worker; task < w->tasks; task += w->workers) {
            if (w->table)
                te__attn_table_task(w, &s, task);
            else
                te__attn_task(w, &s, task);
        }
    }
}

/* Stores the maxima over all workers: the greatest score of each head, and the amax of FP8 rounding. */
static void te__attn_gather_top(const te__attn_work *w) {
    te__attn_scratch s = TE_ZERO;
    float *amax = w->backward ? w->a.x.dp_amax : w->a.x.s_amax;
    int64_t worker, h;
    for (worker = 0; worker < w->workers; worker++) {
        te__attn_lay_out(w, w->memory + worker * w->bytes, &s);
        if (amax && *s.amax > *amax) *amax = *s.amax;
        for (h = 0; s.top && w->a.x.max_logit && h < w->a.heads; h++)
            w->a.x.max_logit[h] = s.top[h] > w->a.x.max_logit[h] ? s.top[h] : w->a.x.max_logit[h];
    }
}

static te_result te__attn_pass(te_ctx *te, te__attn_work *w) {
    te__attn_scratch s = TE_ZERO;
    w->workers = te__min(w->tasks, te__max(1, te->cpu_threads));
    w->bytes = te__attn_lay_out(w, NULL, &s);
    w->memory = (char *)te__alloc(te, (size_t)(w->workers * w->bytes));
    if (!w->memory) return TE_ERR_OUT_OF_MEMORY;
    te__parallel_for(te, w->workers, 1, te__attn_worker, w);
    te__attn_gather_top(w);
    te__free(te, w->memory);
    return TE_OK;
}

/* Sets all rows of a packed tensor to 0, so that rows that belong to no sequence are 0. */
static void te__attn_clear_rows(const te__attn_view *x, int64_t rows, int64_t heads, int64_t n) {
    const double zeros[TE__ATTN_MAX_D] = TE_ZERO;
    int64_t i, h;
    for (i = 0; x->p && i < rows; i++)
        for (h = 0; h < heads; h++) te__attn_store(x, 0, h, i, n, zeros, 0.0);
}
static void te__attn_clear_outputs(const te__attn_kargs *a, bool backward) {
    const te__attn_extra *x = &a->x;
    int64_t i;
    for (i = 0; !backward && x->max_logit && i < a->heads; i++) x->max_logit[i] = -HUGE_VALF;
    for (i = 0; backward && x->dsink && i < a->heads; i++) x->dsink[i] = 0.0f;
    if (x->packed_q) te__attn_clear_rows(backward ? &a->dq : &a->o, x->t_q, a->heads, backward ? a->d : a->d_v);
    for (i = 0; !backward && x->packed_q && a->lse && i < (int64_t)a->heads * x->t_q; i++) a->lse[i] = -HUGE_VALF;
    if (!backward || !x->packed_kv) return;
    te__attn_clear_rows(&a->dk, x->t_kv, a->groups, a->d);
    te__attn_clear_rows(&a->dv, x->t_kv, a->groups, a->d_v);
}

static te_result te__attn_cpu(te_ctx *te, const te__attn_kargs *a, const te_score_mod *mod, bool backward) {
    te__attn_work w = TE_ZERO;
    const int64_t heads = (int64_t)a->batch * a->groups, threads = te__max(1, te->cpu_threads),
                  sinks = (int64_t)a->batch * a->heads;
    te_result r;
    int64_t i;
    te__attn_clear_outputs(a, backward);
    w.a = *a;
    w.mod = mod;
    w.keys = te__round_up(a->s_kv, TE__ATTN_QUAD);
    w.d = te__round_up(a->d, TE__ATTN_WIDE);
    w.d_v = te__round_up(a->d_v, TE__ATTN_WIDE);
    w.backward = backward;
    if (backward && a->x.dbias.p) {
        w.table = true;
        w.tasks = (int64_t)a->x.dbias_b * a->x.dbias_h * te__div_up(a->x.dbias_i, TE__ATTN_BLOCK);
        if (w.tasks > 0 && (r = te__attn_pass(te, &w)) != TE_OK) return r;
        w.table = false;
    }
    if (heads == 0) return TE_OK;
    if (backward && a->x.dsink) {
        w.dsink = (double *)te__alloc_zero(te, (size_t)sinks * sizeof(double));
        if (!w.dsink) return TE_ERR_OUT_OF_MEMORY;
    }
    w.splits = backward ? 1 : te__max(1, te__min(te__div_up(2 * threads, heads), te__div_up(a->s_q, TE__ATTN_BLOCK)));
    w.tasks = heads * w.splits;
    r = te__attn_pass(te, &w);
    if (!w.dsink) return r;
    for (i = 0; r == TE_OK && i < a->heads; i++) {
        double sum = 0.0;
        int64_t b;
        for (b = 0; b < a->batch; b++) sum += w.dsink[b * a->heads + i];
        a->x.dsink[i] = (float)sum;
    }
    te__free(te, w.dsink);
    return r;
}

static void te__attn_draw(te__attn_kargs *a) {
    uint64_t seed = a->seed, offset = a->offset;
    te__rng_read(a->rng, &seed, &offset);
    a->seed = seed;
    a->offset = offset;
}

static te_result te__cpu_attn_fwd(te_ctx *te, const te_op_attn_fwd_args *args) {
    te__attn_kargs a = te__attn_problem(args);
    te_result r = te__attn_check_lengths(te, "attn_fwd", args);
    if (r == TE_OK) r = te__score_mod_check_form(te, "attn_fwd", &args->rule.score_mod, false);
    if (r != TE_OK) return r;
    te__attn_draw(&a);
    return te__attn_cpu(te, &a, &args->rule.score_mod, false);
}

static te_result te__cpu_attn_bwd(te_ctx *te, const te_op_attn_bwd_args *args) {
    te__attn_kargs a = te__attn_problem_bwd(args);
    const te_op_attn_fwd_args f = te__attn_forward_of(args);
    te_result r = te__attn_check_lengths(te, "attn_bwd", &f);
    if (r == TE_OK) r = te__score_mod_check_form(te, "attn_bwd", &args->rule.score_mod, false);
    if (r != TE_OK) return r;
    te__attn_draw(&a);
    return te__attn_cpu(te, &a, &args->rule.score_mod, true);
}
