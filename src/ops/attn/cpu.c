/* ops/attn/cpu.c: attention, plainly: whole rows of scores, the softmax as its formula says, long sums in double. Knows number formats
 * only through cpu/rows.c.
 *
 *   S_ij = scale q_i k_j    P = softmax over the keys that row i sees    O_i = sum_j drop(P_ij) v_j
 *   dV_j = sum_i drop(P_ij) dO_i    dP_ij = drop(dO_i v_j)    dS_ij = P_ij (dP_ij - D_i),  D_i = dO_i O_i
 *   dQ_i = scale sum_j dS_ij k_j    dK_j = scale sum_i dS_ij q_i           drop(x) = kept ? x / (1 - p) : 0
 *
 * Every product is taken 16 columns at a time, so that compilers can vectorize it: a row of Q with 16 keys, or a row of weights with 16
 * channels. A task has all query heads of one head of K and V, whose rows are decoded once. Each sum has one order, whoever takes the task. */

enum { TE__ATTN_WIDE = 16, TE__ATTN_BLOCK = 32 };

/* out[0 .. 15] += sum over i < n of a[i] * b[i * ld + 0 .. 15]; f32 for short runs, double beyond. */
static void te__attn_madd(double *out, const float *a, const float *b, int64_t ld, int64_t n) {
    int64_t i = 0;
    int c;
    while (i < n) {
        int64_t end = te__min(i + 64, n);
        float part[TE__ATTN_WIDE] = TE_ZERO;
        for (; i < end; i++) {
            const float x = a[i], *y = b + i * ld;
            for (c = 0; c < TE__ATTN_WIDE; c++) part[c] += x * y[c];
        }
        for (c = 0; c < TE__ATTN_WIDE; c++) out[c] += (double)part[c];
    }
}

/* What one worker needs. Keys and channels are rounded up to 16; the rest is zeros. */
typedef struct te__attn_scratch {
    float *k, *v;              /* [keys, d], [keys, d_v] */
    float *k_tile, *v_tile;    /* [keys / 16, channels, 16]: 16 keys side by side */
    float *s, *dp;             /* [keys]: a row of each */
    float *q, *g;              /* [BLOCK, d], [BLOCK, d_v]: rows of Q and dO */
    float *p_block, *ds_block; /* [keys, BLOCK]: columns of P and dS */
    double *dk, *dv;           /* [keys, d], [keys, d_v] */
} te__attn_scratch;

typedef struct te__attn_work {
    te__attn_kargs a;
    int64_t keys, d, d_v; /* rounded up */
    int64_t splits;       /* ranges of rows of a head: the forward's tasks are (batch, group, range) */
    int64_t tasks, workers;
    bool backward;
    char *memory;
    int64_t bytes; /* of one worker */
} te__attn_work;

static void *te__attn_take(char *memory, int64_t *used, int64_t bytes) {
    void *p = memory ? (void *)(memory + *used) : NULL;
    *used += te__round_up(bytes, 64);
    return p;
}

/* The scratch that starts at `memory`, which may be NULL; returns its bytes. */
static int64_t te__attn_lay_out(const te__attn_work *w, char *memory, te__attn_scratch *s) {
    const int64_t size = (int64_t)sizeof(float);
    int64_t used = 0;
    s->k = (float *)te__attn_take(memory, &used, w->keys * w->d * size);
    s->v = (float *)te__attn_take(memory, &used, w->keys * w->d_v * size);
    s->k_tile = (float *)te__attn_take(memory, &used, w->keys * w->d * size);
    s->s = (float *)te__attn_take(memory, &used, w->keys * size);
    s->q = (float *)te__attn_take(memory, &used, TE__ATTN_BLOCK * w->d * size);
    if (!w->backward) return used;
    s->v_tile = (float *)te__attn_take(memory, &used, w->keys * w->d_v * size);
    s->dp = (float *)te__attn_take(memory, &used, w->keys * size);
    s->g = (float *)te__attn_take(memory, &used, TE__ATTN_BLOCK * w->d_v * size);
    s->p_block = (float *)te__attn_take(memory, &used, w->keys * TE__ATTN_BLOCK * size);
    s->ds_block = (float *)te__attn_take(memory, &used, w->keys * TE__ATTN_BLOCK * size);
    s->dk = (double *)te__attn_take(memory, &used, w->keys * w->d * 2 * size);
    s->dv = (double *)te__attn_take(memory, &used, w->keys * w->d_v * 2 * size);
    return used;
}

static int64_t te__attn_row_at(const te__attn_view *x, int64_t b, int64_t h, int64_t i) { return b * x->b + h * x->h + i * x->s; }

/* Row i of a head as f32, zeros behind it. */
static void te__attn_load(const te__attn_view *x, int64_t b, int64_t h, int64_t i, int64_t n, int64_t padded, float *out) {
    te__load_row(x->p, (te_dtype)x->dt, te__attn_row_at(x, b, h, i), n, out);
    memset(out + n, 0, (size_t)(padded - n) * sizeof(float));
}
static void te__attn_store(const te__attn_view *x, int64_t b, int64_t h, int64_t i, int64_t n, const double *in, double scale) {
    float row[TE__ATTN_MAX_D];
    int64_t c;
    for (c = 0; c < n; c++) row[c] = (float)(in[c] * scale);
    te__store_row(x->p, (te_dtype)x->dt, te__attn_row_at(x, b, h, i), n, row);
}

/* All rows of a head of K or V, and (tile not NULL) 16 of them side by side. */
static void te__attn_load_head(const te__attn_work *w, const te__attn_view *x, int64_t b, int64_t g, int64_t n, int64_t padded, float *rows, float *tile) {
    int64_t j, c;
    for (j = 0; j < w->keys; j++) {
        float *row = rows + j * padded;
        if (j < w->a.s_kv)
            te__attn_load(x, b, g, j, n, padded, row);
        else
            memset(row, 0, (size_t)padded * sizeof(float));
        if (tile)
            for (c = 0; c < padded; c++) tile[(j / TE__ATTN_WIDE * padded + c) * TE__ATTN_WIDE + j % TE__ATTN_WIDE] = row[c];
    }
}

/* out[j] = row . (key j) for the keys begin .. end - 1 and those that share their tiles. */
static void te__attn_scores(float *out, const float *row, const float *tile, int64_t padded, int64_t n, int64_t begin, int64_t end, double scale) {
    int64_t j;
    int c;
    for (j = begin / TE__ATTN_WIDE * TE__ATTN_WIDE; j < end; j += TE__ATTN_WIDE) {
        double sum[TE__ATTN_WIDE] = TE_ZERO;
        te__attn_madd(sum, row, tile + j * padded, TE__ATTN_WIDE, n);
        for (c = 0; c < TE__ATTN_WIDE; c++) out[j + c] = (float)(sum[c] * scale);
    }
}

/* The keys that row i sees are begin .. end - 1. */
static int64_t te__attn_begin(const te__attn_kargs *a, int64_t i) { return te__max(0, i + a->lo); }
static int64_t te__attn_end(const te__attn_kargs *a, int64_t i) { return te__min(a->s_kv, i + a->hi + 1); }

/* drop(): x[j] of row (b, h, i) is scaled if it is kept and else becomes 0. */
static void te__attn_drop(const te__attn_kargs *a, int64_t b, int64_t h, int64_t i, int64_t begin, int64_t end, float *x) {
    const uint64_t row = (((uint64_t)b * (uint64_t)a->heads + (uint64_t)h) * (uint64_t)a->s_q + (uint64_t)i) * (uint64_t)a->s_kv;
    uint32_t bits[4];
    int64_t j;
    if (a->dropout_p == 0.0f) return;
    for (j = begin; j < end; j++) {
        const uint64_t element = row + (uint64_t)j;
        if (j == begin || element % 4 == 0) te__philox(a->seed, a->offset, element / 4, bits);
        x[j] = te__uniform01(bits[element % 4]) >= a->dropout_p ? x[j] * a->keep_scale : 0.0f;
    }
}

/* ---- forward ---- */

static void te__attn_fwd_row(const te__attn_work *w, const te__attn_scratch *s, int64_t b, int64_t h, int64_t i) {
    const te__attn_kargs *a = &w->a;
    const int64_t begin = te__attn_begin(a, i), end = te__attn_end(a, i);
    double sum = 0.0, o[TE__ATTN_MAX_D] = TE_ZERO;
    float top = -FLT_MAX;
    int64_t j, c;
    if (begin < end) {
        te__attn_load(&a->q, b, h, i, a->d, w->d, s->q);
        te__attn_scores(s->s, s->q, s->k_tile, w->d, a->d, begin, end, a->scale);
        for (j = begin; j < end; j++) top = s->s[j] > top ? s->s[j] : top;
        for (j = begin; j < end; j++) {
            s->s[j] = expf(s->s[j] - top);
            sum += s->s[j];
        }
        te__attn_drop(a, b, h, i, begin, end, s->s);
        for (c = 0; c < a->d_v; c += TE__ATTN_WIDE) te__attn_madd(o + c, s->s + begin, s->v + begin * w->d_v + c, w->d_v, end - begin);
    }
    te__attn_store(&a->o, b, h, i, a->d_v, o, sum == 0.0 ? 0.0 : 1.0 / sum);
    if (a->lse) a->lse[(b * a->heads + h) * a->s_q + i] = sum == 0.0 ? -HUGE_VALF : (float)(top + log(sum));
}

static void te__attn_fwd_task(const te__attn_work *w, const te__attn_scratch *s, int64_t task) {
    const te__attn_kargs *a = &w->a;
    const int64_t per_group = a->heads / a->groups, split = task % w->splits, g = task / w->splits % a->groups, b = task / w->splits / a->groups;
    int64_t h, i;
    te__attn_load_head(w, &a->k, b, g, a->d, w->d, s->k, s->k_tile);
    te__attn_load_head(w, &a->v, b, g, a->d_v, w->d_v, s->v, NULL);
    /* Every splits-th row: under a causal mask all ranges have as much to do. */
    for (h = g * per_group; h < (g + 1) * per_group; h++)
        for (i = split; i < a->s_q; i += w->splits) te__attn_fwd_row(w, s, b, h, i);
}

/* ---- backward ---- */

/* Rows first .. first + n - 1 of one query head, n <= TE__ATTN_BLOCK: their dQ, and what they add to dK and dV. */
static void te__attn_bwd_block(const te__attn_work *w, const te__attn_scratch *s, int64_t b, int64_t h, int64_t first, int64_t n) {
    const te__attn_kargs *a = &w->a;
    const int64_t block_begin = te__attn_begin(a, first), block_end = te__attn_end(a, first + n - 1);
    int64_t r, j, c;
    for (j = block_begin; j < block_end; j++) {
        memset(s->p_block + j * TE__ATTN_BLOCK, 0, TE__ATTN_BLOCK * sizeof(float));
        memset(s->ds_block + j * TE__ATTN_BLOCK, 0, TE__ATTN_BLOCK * sizeof(float));
    }
    for (r = 0; r < n; r++) {
        const int64_t i = first + r, begin = te__attn_begin(a, i), end = te__attn_end(a, i);
        double dq[TE__ATTN_MAX_D] = TE_ZERO, delta = 0.0;
        float o[TE__ATTN_MAX_D], *q = s->q + r * w->d, *g = s->g + r * w->d_v;
        te__attn_load(&a->q, b, h, i, a->d, w->d, q);
        te__attn_load(&a->d_o, b, h, i, a->d_v, w->d_v, g);
        if (begin < end) {
            const float lse = a->lse[(b * a->heads + h) * a->s_q + i];
            te__attn_load(&a->o, b, h, i, a->d_v, a->d_v, o);
            for (c = 0; c < a->d_v; c++) delta += (double)o[c] * (double)g[c];
            te__attn_scores(s->s, q, s->k_tile, w->d, a->d, begin, end, a->scale);
            te__attn_scores(s->dp, g, s->v_tile, w->d_v, a->d_v, begin, end, 1.0);
            te__attn_drop(a, b, h, i, begin, end, s->dp);
            for (j = begin; j < end; j++) s->s[j] = expf(s->s[j] - lse);
            for (j = begin; j < end; j++) {
                s->p_block[j * TE__ATTN_BLOCK + r] = s->s[j];
                s->dp[j] = s->s[j] * (s->dp[j] - (float)delta);
                s->ds_block[j * TE__ATTN_BLOCK + r] = s->dp[j];
            }
            if (a->dropout_p > 0.0f) {
                te__attn_drop(a, b, h, i, begin, end, s->s);
                for (j = begin; j < end; j++) s->p_block[j * TE__ATTN_BLOCK + r] = s->s[j];
            }
            for (c = 0; c < a->d; c += TE__ATTN_WIDE) te__attn_madd(dq + c, s->dp + begin, s->k + begin * w->d + c, w->d, end - begin);
        }
        te__attn_store(&a->dq, b, h, i, a->d, dq, a->scale);
    }
    for (j = block_begin; j < block_end; j++) {
        const float *p = s->p_block + j * TE__ATTN_BLOCK, *ds = s->ds_block + j * TE__ATTN_BLOCK;
        for (c = 0; c < a->d_v; c += TE__ATTN_WIDE) te__attn_madd(s->dv + j * w->d_v + c, p, s->g + c, w->d_v, n);
        for (c = 0; c < a->d; c += TE__ATTN_WIDE) te__attn_madd(s->dk + j * w->d + c, ds, s->q + c, w->d, n);
    }
}

static void te__attn_bwd_task(const te__attn_work *w, const te__attn_scratch *s, int64_t task) {
    const te__attn_kargs *a = &w->a;
    const int64_t per_group = a->heads / a->groups, g = task % a->groups, b = task / a->groups;
    int64_t h, i, j;
    te__attn_load_head(w, &a->k, b, g, a->d, w->d, s->k, s->k_tile);
    te__attn_load_head(w, &a->v, b, g, a->d_v, w->d_v, s->v, s->v_tile);
    memset(s->dk, 0, (size_t)(w->keys * w->d) * sizeof(double));
    memset(s->dv, 0, (size_t)(w->keys * w->d_v) * sizeof(double));
    for (h = g * per_group; h < (g + 1) * per_group; h++)
        for (i = 0; i < a->s_q; i += TE__ATTN_BLOCK) te__attn_bwd_block(w, s, b, h, i, te__min(TE__ATTN_BLOCK, a->s_q - i));
    for (j = 0; j < a->s_kv; j++) {
        te__attn_store(&a->dk, b, g, j, a->d, s->dk + j * w->d, a->scale);
        te__attn_store(&a->dv, b, g, j, a->d_v, s->dv + j * w->d_v, 1.0);
    }
}

/* ---- both ---- */

/* Worker `begin`, and the tasks that are its own. */
static void te__attn_worker(void *user, int64_t begin, int64_t end) {
    const te__attn_work *w = (const te__attn_work *)user;
    te__attn_scratch s = TE_ZERO;
    int64_t worker, task;
    for (worker = begin; worker < end; worker++) {
        te__attn_lay_out(w, w->memory + worker * w->bytes, &s);
        for (task = worker; task < w->tasks; task += w->workers) {
            if (w->backward)
                te__attn_bwd_task(w, &s, task);
            else
                te__attn_fwd_task(w, &s, task);
        }
    }
}

static te_result te__attn_cpu(te_ctx *te, const te__attn_kargs *a, bool backward) {
    te__attn_work w = TE_ZERO;
    te__attn_scratch s = TE_ZERO;
    const int64_t heads = (int64_t)a->batch * a->groups, threads = te__max(1, te->cpu_threads);
    if (heads == 0) return TE_OK;
    w.a = *a;
    w.keys = te__round_up(a->s_kv, TE__ATTN_WIDE);
    w.d = te__round_up(a->d, TE__ATTN_WIDE);
    w.d_v = te__round_up(a->d_v, TE__ATTN_WIDE);
    w.backward = backward;
    w.splits = backward ? 1 : te__max(1, te__min(te__div_up(2 * threads, heads), te__div_up(a->s_q, 64)));
    w.tasks = heads * w.splits;
    w.workers = te__min(w.tasks, threads);
    w.bytes = te__attn_lay_out(&w, NULL, &s);
    w.memory = (char *)te__alloc(te, (size_t)(w.workers * w.bytes));
    if (!w.memory) return TE_ERR_OUT_OF_MEMORY;
    te__parallel_for(te, w.workers, 1, te__attn_worker, &w);
    te__free(te, w.memory, (size_t)(w.workers * w.bytes));
    return TE_OK;
}

static te_result te__cpu_attn_fwd(te_ctx *te, const te_attn_fwd_args *args) {
    te__attn_kargs a = te__attn_problem(args);
    return te__attn_cpu(te, &a, false);
}

static te_result te__cpu_attn_bwd(te_ctx *te, const te_attn_bwd_args *args) {
    te__attn_kargs a = te__attn_problem_bwd(args);
    return te__attn_cpu(te, &a, true);
}
