/* ops/act/cpu.c: the reference implementation of the activations. It computes rows of f32 numbers on the CPU. It must
 * not depend on CUDA. */

enum { TE__ACT_RUN = 512 };

static float te__act_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

#define TE__ACT_SIGMOID(k, x) te__act_sigmoid((k) * (x))
#define TE__ACT_SIGMOID3(k1, k3, x) te__act_sigmoid((x) * ((k1) + (k3) * (x) * (x)))
#define TE__ACT_MAX0(x) ((x) > 0.0f ? (x) : 0.0f)
/* Returns f(x) and sets *slope to f'(x). An activation applies f to its whole input, or to the first half of a gated
 * input. */
static float te__act_one(te__act_f f, float x, float *slope) {
    float s;
    switch (f) {
        TE__NONLINEARITIES(TE__ACT_CASE)
    case TE__F_COUNT: break;
    }
    return *slope = 0.0f;
}

/* Limits x to -limit .. limit. If x is NaN, the result is -limit, as on the GPU. */
static float te__act_clamp(float x, float limit) { return fminf(fmaxf(x, -limit), limit); }

/* A job is one call, forward or backward. Its work is split into units:
 * - with an output `dbias`: a range of columns of all rows
 * - with `col`, but no `dbias`: a tile of TE__ACT_BAND rows, whose codes are transposed
 * - otherwise: a range of columns of one row */
enum { TE__ACT_BAND = 64 };

typedef struct te__act_job {
    const te_op_act_fwd_args *fwd; /* the forward pass's arguments; NULL in the backward pass */
    const te_op_act_bwd_args *bwd;
    const te__activation_row *act;
    float limit, alpha, offset, scale;
    bool gated, quantized;
    const te_tensor *x;
    te_tensor *out, *col, *dbias;
    te_dtype format;        /* of out and col */
    int64_t m, n;           /* rows and columns of y or dy */
    int64_t ld, ldc;        /* leading dimensions of out and col */
    int64_t block;          /* Gated: the two halves alternate in blocks of this many columns. If it is n, each half is
                             * one block. */
    int64_t tall, wide, runs, units; /* rows (`tall`) and columns (`wide`) of a unit of work; number of units
                                      * along a row (`runs`) and in total (`units`) */
    float *amax;            /* [units]: the amax of each unit, or NULL */
} te__act_job;

static void te__act_values(const te__act_job *j, const float *gate, int64_t count, float *u) {
    float slope;
    int64_t k;
    switch (j->act->form) {
    case TE__ACT_PLAIN:
        for (k = 0; k < count; k++) u[k] = te__act_one(j->act->f, u[k], &slope);
        break;
    case TE__ACT_GATED:
        for (k = 0; k < count; k++) u[k] = te__act_one(j->act->f, u[k], &slope) * gate[k];
        break;
    case TE__ACT_CLAMPED:
        for (k = 0; k < count; k++) {
            float c = fminf(u[k], j->limit);
            u[k] = c * te__act_sigmoid(j->alpha * c) * (te__act_clamp(gate[k], j->limit) + j->offset);
        }
        break;
    }
}
/* Computes dx. Stores its first half in `u` and its second half in `gate`. If the activation is not gated, stores all
 * of dx in `u`. */
static void te__act_slopes(const te__act_job *j, const float *dy, int64_t count, float *u, float *gate) {
    float slope, f;
    int64_t k;
    switch (j->act->form) {
    case TE__ACT_PLAIN:
        for (k = 0; k < count; k++) {
            te__act_one(j->act->f, u[k], &slope);
            u[k] = dy[k] * slope;
        }
        break;
    case TE__ACT_GATED:
        for (k = 0; k < count; k++) {
            f = te__act_one(j->act->f, u[k], &slope);
            u[k] = dy[k] * slope * gate[k];
            gate[k] = dy[k] * f;
        }
        break;
    case TE__ACT_CLAMPED:
        for (k = 0; k < count; k++) {
            float c = fminf(u[k], j->limit), d = te__act_clamp(gate[k], j->limit) + j->offset,
                  s = te__act_sigmoid(j->alpha * c);
            bool inside = gate[k] >= -j->limit && gate[k] <= j->limit;
            u[k] = u[k] <= j->limit ? dy[k] * (s + j->alpha * c * s * (1.0f - s)) * d : 0.0f;
            gate[k] = inside ? dy[k] * c * s : 0.0f;
        }
        break;
    }
}

/* The two halves of a gated x alternate in blocks of columns. Sets *at to the place of column `first` of half h in a
 * row of x. Returns how many columns of half h are contiguous from there on, at most `count`. A plain x has half 0
 * alone. */
static int64_t te__act_piece(const te__act_job *j, int h, int64_t first, int64_t count, int64_t *at) {
    *at = first + (j->gated ? (first / j->block + h) * j->block : 0);
    return j->gated ? te__min(count, j->block - first % j->block) : count;
}
static void te__act_load(const te__act_job *j, int64_t row, int h, int64_t first, int64_t count, float *v) {
    int64_t i, n, at;
    for (i = 0; i < count; i += n) {
        n = te__act_piece(j, h, first + i, count - i, &at);
        te__load_row(te__data(j->x), j->x->dtype, row * (j->gated ? 2 * j->n : j->n) + at, n, v + i);
    }
}
/* Stores `width` columns of results of half h, from column `first` on. The columns may include padding. */
static void te__act_store(const te__act_job *j, int64_t row, int h, int64_t first, int64_t width, const float *v) {
    int64_t i, n, at;
    if (!j->bwd || !j->gated || j->block == j->n) {
        te__store_row(te__data(j->out), j->format, row * j->ld + h * j->n + first, width, v);
        return;
    }
    for (i = 0; i < width; i += n) {
        n = te__act_piece(j, h, first + i, width - i, &at);
        te__store_row(te__data(j->out), j->format, row * j->ld + at, n, v + i);
    }
}

/* Computes `count` columns from `first` on, and stores them in v[0]. The second half of a gated dx goes to v[1]. */
static void te__act_run(const te__act_job *j, int64_t row, int64_t first, int64_t count, float v[2][TE__ACT_RUN]) {
    float dy[TE__ACT_RUN];
    int h;
    if (count <= 0) return;
    for (h = 0; h <= (j->gated ? 1 : 0); h++) te__act_load(j, row, h, first, count, v[h]);
    if (j->fwd) {
        te__act_values(j, v[1], count, v[0]);
    } else {
        te__load_row(te__data(j->bwd->dy), j->bwd->dy->dtype, row * j->n + first, count, dy);
        te__act_slopes(j, dy, count, v[0], v[1]);
    }
}
/* Rounds v to a format by storing and loading it. */
static void te__act_round(te_dtype format, int64_t count, float *v) {
    float room[TE__ACT_RUN]; /* has enough bytes for every float format */
    te__store_row(room, format, 0, count, v);
    te__load_row(room, format, 0, count, v);
}

/* Transposes the codes of TE__ACT_BAND rows, from `row` on, into the output `col`. The codes are `count` columns of one
 * half, from `first` on. */
static void te__act_turn(const te__act_job *j, const uint8_t *code, int64_t half, int64_t first, int64_t count,
                         int64_t row) {
    uint8_t *to = te__u8_data(j->col) + (half * j->n + first) * j->ldc + row;
    int64_t rows = te__min(TE__ACT_BAND, j->ldc - row), k, r;
    for (k = 0; k < count; k++)
        for (r = 0; r < rows; r++) to[k * j->ldc + r] = code[r * TE__ACT_BAND + k];
}

static void te__act_unit(const te__act_job *j, int64_t unit) {
    uint8_t code[2][TE__ACT_BAND * TE__ACT_BAND];
    float v[2][TE__ACT_RUN], amax = 0.0f;
    double sum[2][TE__ACT_BAND];
    int halves = j->bwd && j->gated ? 2 : 1, h;
    int64_t first = unit % j->runs * j->wide, count = te__max(0, te__min(j->wide, j->n - first)),
            row = unit / j->runs * j->tall, end, r, k;
    end = j->dbias ? te__max(j->m, j->ldc) : te__min(row + j->tall, te__max(j->m, j->ldc));
    if (j->dbias) memset(sum, 0, sizeof(sum));
    for (; row < end; row += j->tall) {
        for (r = 0; r < te__min(j->tall, end - row); r++) {
            bool there = row + r < j->m;
            if (there) te__act_run(j, row + r, first, count, v);
            for (h = 0; h < halves; h++) {
                /* Only the last half is followed by padding. */
                int64_t last = j->ld - h * j->n - first,
                        width = h == halves - 1 ? te__max(0, te__min(j->wide, last)) : count;
                for (k = there ? count : 0; k < j->wide; k++) v[h][k] = 0.0f;
                if (j->amax)
                    for (k = 0; k < count; k++) amax = fabsf(v[h][k]) > amax ? fabsf(v[h][k]) : amax;
                if (j->bwd && j->bwd->rounded) te__act_round(j->x->dtype, count, v[h]);
                if (j->dbias)
                    for (k = 0; k < count; k++) sum[h][k] += v[h][k];
                if (j->quantized && there)
                    for (k = 0; k < count; k++) v[h][k] *= j->scale;
                if (j->out && there) te__act_store(j, row + r, h, first, width, v[h]);
                if (j->col) te__store_row(code[h], j->format, r * TE__ACT_BAND, j->wide, v[h]);
            }
        }
        for (h = 0; h < halves && j->col; h++) te__act_turn(j, code[h], h, first, count, row);
    }
    for (h = 0; h < halves && j->dbias; h++) {
        if (j->bwd->accumulate) te__load_row(te__data(j->dbias), j->dbias->dtype, h * j->n + first, count, v[h]);
        for (k = 0; k < count; k++) v[h][k] = (float)(sum[h][k] + (j->bwd->accumulate ? v[h][k] : 0.0f));
        te__store_row(te__data(j->dbias), j->dbias->dtype, h * j->n + first, count, v[h]);
    }
    if (j->amax) j->amax[unit] = amax;
}
static void te__act_units(void *user, int64_t begin, int64_t end) {
    int64_t unit;
    for (unit = begin; unit < end; unit++) te__act_unit((const te__act_job *)user, unit);
}

static te_result te__act_all(te_ctx *te, te__act_job *j, const te_tensor *scale, te_tensor *scale_inv,
                             te_tensor *amax) {
    int halves = j->bwd && j->gated ? 2 : 1;
    int64_t wide, i;
    bool bands = j->col || j->dbias;
    j->format = j->out ? j->out->dtype : j->col->dtype;
    j->quantized = te__is_fp8(j->format);
    j->ld = j->out ? te__cols(j->out) : halves * j->n;
    j->ldc = te__cols_of(j->col);
    j->scale = scale ? *te__f32_data(scale) : 1.0f;
    if (j->n == 0 || (te__max(j->m, j->ldc) == 0 && !j->dbias)) return TE_OK;
    if (!j->gated && !bands && j->ld == j->n) { /* one long row */
        j->n = j->ld = j->m * j->n;
        j->m = 1;
    }
    wide = te__max(j->n, j->ld - (halves - 1) * j->n); /* columns of a half, padding included */
    j->tall = bands ? TE__ACT_BAND : 1;
    j->wide = bands ? (int64_t)TE__ACT_BAND : (int64_t)TE__ACT_RUN;
    j->runs = te__div_up(wide, j->wide);
    j->units = j->dbias ? j->runs : te__div_up(te__max(j->m, j->ldc), j->tall) * j->runs;
    if (amax) {
        j->amax = (float *)te__alloc(te, (size_t)j->units * sizeof(float));
        if (!j->amax) return TE_ERR_OUT_OF_MEMORY;
    }
    te__parallel_for(te, j->units, bands ? 1 : 4, te__act_units, j);
    if (amax) {
        float largest = 0.0f, *to = te__f32_data(amax);
        for (i = 0; i < j->units; i++)
            if (j->amax[i] > largest) largest = j->amax[i];
        te__free(te, j->amax);
        /* rounding keeps the order of numbers, so it is enough to round the maximum */
        if (j->bwd) te__act_round(te__act_amax_dtype(j->bwd), 1, &largest);
        if (largest > *to) *to = largest;
    }
    if (scale_inv) *te__f32_data(scale_inv) = 1.0f / j->scale;
    return TE_OK;
}

/* Returns a job with all fields that both passes have in common, except outputs. Field n is the number of columns of y
 * or dy. */
static te__act_job te__act_job_of(const te_tensor *x, te_activation act, const te_activation_params *p) {
    te__act_job j = TE_ZERO;
    j.act = te__activation_row_of(act);
    j.limit = p->limit;
    j.alpha = p->alpha;
    j.offset = p->no_glu_linear_offset ? 0.0f : 1.0f;
    j.gated = te_activation_is_gated(act);
    j.x = x;
    j.block = p->glu_interleave_size;
    j.m = te__rows(x);
    j.n = j.gated ? te__cols(x) / 2 : te__cols(x);
    return j;
}
static te_result te__cpu_act_fwd(te_ctx *te, const te_op_act_fwd_args *a) {
    te__act_job job = te__act_job_of(a->x, a->activation, &a->activation_params);
    job.fwd = a;
    job.out = a->y;
    job.col = a->col;
    return te__act_all(te, &job, a->scale, a->scale_inv, a->amax);
}

static te_result te__cpu_act_bwd(te_ctx *te, const te_op_act_bwd_args *a) {
    te__act_job job = te__act_job_of(a->x, a->activation, &a->activation_params);
    job.bwd = a;
    job.out = a->dx;
    job.col = a->col;
    job.dbias = a->dbias;
    return te__act_all(te, &job, a->scale, a->scale_inv, a->amax);
}

/* ---- activations times one number for each row ---- */

typedef struct te__scaled_act_job {
    te__act_job act;
    te_op_act_bwd_args as_bwd; /* Has only zeros. In the backward pass act.bwd points to it, because te__act_store tests
                                * whether act.bwd is NULL. */
    const te_tensor *dy, *scales;
    te_tensor *dscales;
} te__scaled_act_job;

/* Replaces v[0] by act(x) * scale. On entry v[0] has x, or the first half of a gated x, and v[1] the second half. */
static void te__scaled_act_forward(const te__act_job *j, float scale, int64_t count, float v[2][TE__ACT_RUN]) {
    int64_t k;
    te__act_values(j, v[1], count, v[0]);
    for (k = 0; k < count; k++) v[0][k] *= scale;
}
/* Replaces x in v by dx, and returns the sum of dy * act(x). */
static double te__scaled_act_backward_run(const te__act_job *j, float scale, const float *dy, int64_t count,
                                          float v[2][TE__ACT_RUN]) {
    float y[TE__ACT_RUN], ones[TE__ACT_RUN];
    double sum = 0;
    int64_t k;
    int h;
    memcpy(y, v[0], (size_t)count * sizeof(float));
    te__act_values(j, v[1], count, y);
    for (k = 0; k < count; k++) {
        sum += (double)dy[k] * y[k];
        ones[k] = 1.0f;
    }
    te__act_slopes(j, ones, count, v[0], v[1]);
    for (h = 0; h <= (j->gated ? 1 : 0); h++)
        for (k = 0; k < count; k++) v[h][k] *= dy[k] * scale;
    return sum;
}
static void te__scaled_act_rows(void *user, int64_t begin, int64_t end) {
    const te__scaled_act_job *s = (const te__scaled_act_job *)user;
    const te__act_job *j = &s->act;
    const int halves = j->gated ? 2 : 1;
    float v[2][TE__ACT_RUN], dy[TE__ACT_RUN], scale, total;
    int64_t row, first;
    int h;
    for (row = begin; row < end; row++) {
        double sum = 0;
        te__load_row(te__data(s->scales), s->scales->dtype, row, 1, &scale);
        for (first = 0; first < j->n; first += TE__ACT_RUN) {
            const int64_t count = te__min(TE__ACT_RUN, j->n - first);
            for (h = 0; h < halves; h++) te__act_load(j, row, h, first, count, v[h]);
            if (s->dy) {
                te__load_row(te__data(s->dy), s->dy->dtype, row * j->n + first, count, dy);
                sum += te__scaled_act_backward_run(j, scale, dy, count, v);
            } else
                te__scaled_act_forward(j, scale, count, v);
            for (h = 0; h < (s->dy ? halves : 1); h++) te__act_store(j, row, h, first, count, v[h]);
        }
        total = (float)sum;
        if (s->dscales) te__store_row(te__data(s->dscales), s->dscales->dtype, row, 1, &total);
    }
}
static te__scaled_act_job te__scaled_act_job_of(const te_tensor *x, te_tensor *out, const te_tensor *scales,
                                                te_activation act, const te_activation_params *p) {
    te__scaled_act_job s = TE_ZERO;
    s.act = te__act_job_of(x, act, p);
    s.act.out = out;
    s.act.format = out->dtype;
    s.act.ld = te__cols(out);
    s.scales = scales;
    return s;
}
static te_result te__cpu_scaled_act_fwd(te_ctx *te, const te_op_scaled_act_fwd_args *a) {
    te__scaled_act_job s =
        te__scaled_act_job_of(a->x, a->y, a->act_scales, a->activation, &a->activation_params);
    te__parallel_for(te, s.act.m, 4, te__scaled_act_rows, &s);
    return TE_OK;
}
static te_result te__cpu_scaled_act_bwd(te_ctx *te, const te_op_scaled_act_bwd_args *a) {
    te__scaled_act_job s =
        te__scaled_act_job_of(a->x, a->dx, a->act_scales, a->activation, &a->activation_params);
    s.act.bwd = &s.as_bwd;
    s.dy = a->dy;
    s.dscales = a->dact_scales;
    te__parallel_for(te, s.act.m, 4, te__scaled_act_rows, &s);
    return TE_OK;
}
