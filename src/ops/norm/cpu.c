/* ops/norm/cpu.c: the reference of LayerNorm and RMSNorm. This file must not depend on CUDA.
 *
 * Sums are in double, in eight interleaved parts. So the loop vectorizes, and the order of the sums is the same for
 * any number of threads. */

enum { TE__NORM_RUN = 512, TE__NORM_COLUMNS = 64 };

static double te__norm_add_lanes(const double s[8]) {
    return ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7]));
}

static double te__norm_sum(const float *x, int64_t n) {
    double s[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int64_t i;
    int j;
    for (i = 0; i + 8 <= n; i += 8)
        for (j = 0; j < 8; j++) s[j] += (double)x[i + j];
    for (; i < n; i++) s[i & 7] += (double)x[i];
    return te__norm_add_lanes(s);
}
static double te__norm_sum_squares(const float *x, float mean, int64_t n) {
    double s[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int64_t i;
    int j;
    for (i = 0; i + 8 <= n; i += 8)
        for (j = 0; j < 8; j++) s[j] += (double)(x[i + j] - mean) * (double)(x[i + j] - mean);
    for (; i < n; i++) s[i & 7] += (double)(x[i] - mean) * (double)(x[i] - mean);
    return te__norm_add_lanes(s);
}
static double te__norm_dot(const float *x, const float *y, int64_t n) {
    double s[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int64_t i;
    int j;
    for (i = 0; i + 8 <= n; i += 8)
        for (j = 0; j < 8; j++) s[j] += (double)x[i + j] * (double)y[i + j];
    for (; i < n; i++) s[i & 7] += (double)x[i] * (double)y[i];
    return te__norm_add_lanes(s);
}

/* Returns an array of 2 * n floats, which the caller frees: gamma' (gamma, or 1 + gamma if zero_centered), then
 * beta (zeros if beta is NULL). */
static float *te__norm_weights(te_ctx *te, const te_tensor *gamma, const te_tensor *beta, bool zero_centered,
                               int64_t n) {
    float *w = (float *)te__alloc_zero(te, (size_t)(2 * n) * sizeof(float));
    int64_t i;
    if (!w) return NULL;
    te__load_row(te__data(gamma), gamma->dtype, 0, n, w);
    for (i = 0; zero_centered && i < n; i++) w[i] += 1.0f;
    if (beta) te__load_row(te__data(beta), beta->dtype, 0, n, w + n);
    return w;
}

/* ---- forward ---- */

typedef struct te__norm_fwd_job {
    const te_norm_fwd_args *a;
    bool layernorm;
    int64_t n, ld;
    const float *gamma, *beta;
    float scale, *amax; /* the amax of each row, or NULL. With a scale (FP8) the amax is that of the f32 results
                         * before scaling, otherwise that of the stored y */
} te__norm_fwd_job;

/* Rounds n elements, at most TE__NORM_RUN, to `dtype`. */
static void te__norm_round(te_dtype dtype, int64_t n, float *run) {
    float stored[TE__NORM_RUN];
    te__store_row(stored, dtype, 0, n, run);
    te__load_row(stored, dtype, 0, n, run);
}

static void te__norm_fwd_row(const te__norm_fwd_job *job, int64_t row) {
    const te_norm_fwd_args *a = job->a;
    const void *x = te__data(a->x);
    void *y = te__data(a->y);
    float run[TE__NORM_RUN], mean = 0.0f, rstd, amax = 0.0f;
    double sum = 0.0;
    int64_t n = job->n, i, k, count;
    if (job->layernorm) {
        for (i = 0; i < n; i += TE__NORM_RUN) {
            count = te__min(TE__NORM_RUN, n - i);
            te__load_row(x, a->x->dtype, row * n + i, count, run);
            sum += te__norm_sum(run, count);
        }
        mean = (float)(sum / (double)n);
        sum = 0.0;
    }
    for (i = 0; i < n; i += TE__NORM_RUN) {
        count = te__min(TE__NORM_RUN, n - i);
        te__load_row(x, a->x->dtype, row * n + i, count, run);
        sum += te__norm_sum_squares(run, mean, count);
    }
    rstd = (float)(1.0 / sqrt((double)((float)(sum / (double)n) + a->norm.eps)));
    if (a->mean) te__f32_data(a->mean)[row] = mean;
    if (a->rstd) te__f32_data(a->rstd)[row] = rstd;
    for (i = 0; i < n; i += TE__NORM_RUN) {
        const float *gamma = job->gamma + i, *beta = job->beta + i;
        count = te__min(TE__NORM_RUN, n - i);
        te__load_row(x, a->x->dtype, row * n + i, count, run);
        if (a->rounded) {
            for (k = 0; k < count; k++) run[k] *= rstd;
            te__norm_round(a->x->dtype, count, run);
            for (k = 0; k < count; k++) run[k] *= gamma[k];
        } else
            for (k = 0; k < count; k++) run[k] = (run[k] - mean) * rstd * gamma[k] + beta[k];
        if (a->scale) {
            for (k = 0; k < count; k++) amax = fabsf(run[k]) > amax ? fabsf(run[k]) : amax;
            for (k = 0; k < count; k++) run[k] *= job->scale;
        }
        te__store_row(y, a->y->dtype, row * job->ld + i, count, run);
        if (a->y_amax || (a->amax && !a->scale)) {
            te__load_row(y, a->y->dtype, row * job->ld + i, count, run);
            for (k = 0; k < count; k++) amax = fabsf(run[k]) > amax ? fabsf(run[k]) : amax;
        }
    }
    if (job->ld > n) memset((uint8_t *)y + row * job->ld + n, 0, (size_t)(job->ld - n));
    if (job->amax) job->amax[row] = amax;
}
static void te__norm_fwd_rows(void *user, int64_t begin, int64_t end) {
    int64_t row;
    for (row = begin; row < end; row++) te__norm_fwd_row((const te__norm_fwd_job *)user, row);
}

/* Writes y_col, the transpose of y's codes. */
static te_result te__norm_transpose(te_ctx *te, const te_norm_fwd_args *a) {
    te_op_transpose_args t = te__norm_transpose_args(a);
    return te__cpu_transpose(te, &t);
}

static te_result te__cpu_norm_fwd(te_ctx *te, const te_norm_fwd_args *a, bool layernorm) {
    te__norm_fwd_job job = TE_ZERO;
    int64_t m = te__rows(a->x), n = te__cols(a->x), row;
    float *weights, *amax = NULL;
    if (a->y_amax) *te__f32_data(a->y_amax) = 0.0f;
    if (m == 0 || n == 0) return a->y_col ? te__norm_transpose(te, a) : TE_OK;
    weights = te__norm_weights(te, a->gamma, a->beta, a->norm.zero_centered_gamma, n);
    if (weights && (a->amax || a->y_amax)) amax = (float *)te__alloc(te, (size_t)m * sizeof(float));
    if (!weights || ((a->amax || a->y_amax) && !amax)) {
        te__free(te, weights);
        return TE_ERR_OUT_OF_MEMORY;
    }
    job.a = a;
    job.layernorm = layernorm;
    job.n = n;
    job.ld = te__cols(a->y);
    job.gamma = weights;
    job.beta = weights + n;
    job.scale = a->scale ? *te__f32_data(a->scale) : 1.0f;
    job.amax = amax;
    te__parallel_for(te, m, te__max(1, 16384 / n), te__norm_fwd_rows, &job);
    if (amax) {
        float *out = te__f32_data(a->amax ? a->amax : a->y_amax);
        for (row = 0; row < m; row++)
            if (amax[row] > *out) *out = amax[row];
    }
    if (a->scale_inv) *te__f32_data(a->scale_inv) = 1.0f / job.scale;
    te__free(te, amax);
    te__free(te, weights);
    return a->y_col ? te__norm_transpose(te, a) : TE_OK;
}

/* ---- backward ---- */

typedef struct te__norm_bwd_job {
    const te_norm_bwd_args *a;
    bool layernorm;
    int64_t m, n;
    const float *gamma;
} te__norm_bwd_job;

/* Loads xhat and dy for columns i .. i + count - 1 of one row. */
static void te__norm_bwd_load(const te__norm_bwd_job *job, int64_t row, int64_t i, int64_t count, float *xhat,
                              float *dy) {
    const te_norm_bwd_args *a = job->a;
    float mean = job->layernorm ? te__f32_data(a->mean)[row] : 0.0f,
          rstd = te__f32_data(a->rstd)[row];
    int64_t k;
    te__load_row(te__data(a->x), a->x->dtype, row * job->n + i, count, xhat);
    te__load_row(te__data(a->dy), a->dy->dtype, row * job->n + i, count, dy);
    for (k = 0; k < count; k++) xhat[k] = (xhat[k] - mean) * rstd;
}

static void te__norm_bwd_row(const te__norm_bwd_job *job, int64_t row) {
    const te_norm_bwd_args *a = job->a;
    float xhat[TE__NORM_RUN], g[TE__NORM_RUN], add[TE__NORM_RUN], c1, c2,
        rstd = te__f32_data(a->rstd)[row];
    double sum_gx = 0.0, sum_g = 0.0;
    int64_t n = job->n, i, k, count;
    for (i = 0; i < n; i += TE__NORM_RUN) {
        count = te__min(TE__NORM_RUN, n - i);
        te__norm_bwd_load(job, row, i, count, xhat, g);
        for (k = 0; k < count; k++) g[k] *= job->gamma[i + k];
        sum_gx += te__norm_dot(g, xhat, count);
        if (job->layernorm) sum_g += te__norm_sum(g, count);
    }
    c1 = (float)(sum_gx / (double)n);
    c2 = (float)(sum_g / (double)n);
    for (i = 0; i < n; i += TE__NORM_RUN) {
        count = te__min(TE__NORM_RUN, n - i);
        te__norm_bwd_load(job, row, i, count, xhat, g);
        for (k = 0; k < count; k++) g[k] = rstd * (g[k] * job->gamma[i + k] - c2 - c1 * xhat[k]);
        if (a->add) {
            if (a->rounded) { /* rounds to dx's format, but not in the memory of dx, since dx may be the same tensor as
                               * a->add */
                te__store_row(add, a->dx->dtype, 0, count, g);
                te__load_row(add, a->dx->dtype, 0, count, g);
            }
            te__load_row(te__data(a->add), a->add->dtype, row * n + i, count, add);
            for (k = 0; k < count; k++) g[k] += add[k];
        }
        te__store_row(te__data(a->dx), a->dx->dtype, row * n + i, count, g);
    }
}
static void te__norm_bwd_rows(void *user, int64_t begin, int64_t end) {
    int64_t row;
    for (row = begin; row < end; row++) te__norm_bwd_row((const te__norm_bwd_job *)user, row);
}

static void te__norm_bwd_store_sums(const te_tensor *out, int64_t first, int64_t count, const double *sums,
                                    bool accumulate) {
    float run[TE__NORM_COLUMNS] = TE_ZERO;
    int64_t k;
    if (!out) return;
    if (accumulate) te__load_row(te__data(out), out->dtype, first, count, run);
    for (k = 0; k < count; k++) run[k] = (float)((double)run[k] + sums[k]);
    te__store_row(te__data(out), out->dtype, first, count, run);
}
/* Computes dgamma and dbeta for bands `begin` to `end` - 1, each of TE__NORM_COLUMNS columns. One thread sums a
 * band, in the order of the rows. */
static void te__norm_bwd_columns(void *user, int64_t begin, int64_t end) {
    const te__norm_bwd_job *job = (const te__norm_bwd_job *)user;
    float xhat[TE__NORM_COLUMNS], dy[TE__NORM_COLUMNS];
    double dgamma[TE__NORM_COLUMNS], dbeta[TE__NORM_COLUMNS];
    int64_t band, row, k;
    for (band = begin; band < end; band++) {
        int64_t first = band * TE__NORM_COLUMNS, count = te__min(TE__NORM_COLUMNS, job->n - first);
        for (k = 0; k < count; k++) dgamma[k] = dbeta[k] = 0.0;
        for (row = 0; row < job->m; row++) {
            te__norm_bwd_load(job, row, first, count, xhat, dy);
            for (k = 0; k < count; k++) dgamma[k] += (double)dy[k] * (double)xhat[k];
            for (k = 0; k < count; k++) dbeta[k] += (double)dy[k];
        }
        te__norm_bwd_store_sums(job->a->dgamma, first, count, dgamma, job->a->accumulate);
        te__norm_bwd_store_sums(job->a->dbeta, first, count, dbeta, job->a->accumulate);
    }
}

static te_result te__cpu_norm_bwd(te_ctx *te, const te_norm_bwd_args *a, bool layernorm) {
    te__norm_bwd_job job = TE_ZERO;
    float *weights;
    job.a = a;
    job.layernorm = layernorm;
    job.m = te__rows(a->x);
    job.n = te__cols(a->x);
    if (job.n == 0) return TE_OK;
    weights = te__norm_weights(te, a->gamma, NULL, a->norm.zero_centered_gamma, job.n);
    if (!weights) return TE_ERR_OUT_OF_MEMORY;
    job.gamma = weights;
    /* dgamma and dbeta must be computed before dx is written, since dx may be the same tensor as dy or x. */
    if (a->dgamma || a->dbeta)
        te__parallel_for(te, te__div_up(job.n, TE__NORM_COLUMNS), te__max(1, 256 / te__max(1, job.m)),
                         te__norm_bwd_columns, &job);
    te__parallel_for(te, job.m, te__max(1, 16384 / job.n), te__norm_bwd_rows, &job);
    te__free(te, weights);
    return TE_OK;
}

static te_result te__cpu_layernorm_fwd(te_ctx *te, const te_op_layernorm_fwd_args *a) {
    return te__cpu_norm_fwd(te, a, true);
}
static te_result te__cpu_rmsnorm_fwd(te_ctx *te, const te_op_rmsnorm_fwd_args *a) {
    return te__cpu_norm_fwd(te, a, false);
}
static te_result te__cpu_layernorm_bwd(te_ctx *te, const te_op_layernorm_bwd_args *a) {
    return te__cpu_norm_bwd(te, a, true);
}
static te_result te__cpu_rmsnorm_bwd(te_ctx *te, const te_op_rmsnorm_bwd_args *a) {
    return te__cpu_norm_bwd(te, a, false);
}
