/* ops/act/cpu.c: the activations, the reference. Knows rows of numbers; must not know CUDA. */

enum { TE__ACT_RUN = 512 };

static float te__act_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/* f and f' of the nonlinearity that `act` puts on x, or on the first half of a gated input. GELU is the tanh form of Hendrycks and
 * Gimpel, with 0.5 + 0.5 tanh(u) = sigmoid(2 u), which does not cancel on the left. */
static float te__act_one(te_activation act, float x, float *slope) {
    float s;
    switch (act) {
    case TE_GELU:
    case TE_GEGLU:
        s = te__act_sigmoid(2.0f * x * (0.79788456f + 0.03567741f * x * x));
        *slope = s + 2.0f * x * s * (1.0f - s) * (0.79788456f + 0.1070322243f * x * x);
        return x * s;
    case TE_RELU:
    case TE_REGLU: *slope = x > 0.0f ? 1.0f : 0.0f; return x > 0.0f ? x : 0.0f; /* NaN gives 0 */
    case TE_SRELU:
    case TE_SREGLU: *slope = x > 0.0f ? 2.0f * x : 0.0f; return x > 0.0f ? x * x : 0.0f;
    case TE_SILU:
    case TE_SWIGLU:
        s = te__act_sigmoid(x);
        *slope = s + x * s * (1.0f - s);
        return x * s;
    case TE_QGELU:
    case TE_QGEGLU:
        s = te__act_sigmoid(1.702f * x);
        *slope = s + 1.702f * x * s * (1.0f - s);
        return x * s;
    default: /* TE_GLU */
        s = te__act_sigmoid(x);
        *slope = s * (1.0f - s);
        return s;
    }
}

/* fminf and fmaxf drop a NaN, as the GPU's do. */
static float te__act_clamp(float x, float limit) { return fminf(fmaxf(x, -limit), limit); }

/* ---- forward ---- */

/* Units of at most TE__ACT_RUN columns of one row of y, pad columns included. */
typedef struct te__act_fwd_job {
    const te_act_fwd_args *a;
    bool gated;
    int64_t n, ld, runs; /* runs: units of a row */
    float scale, *amax;  /* of each unit, or NULL */
} te__act_fwd_job;

static void te__act_fwd_unit(const te__act_fwd_job *job, int64_t unit) {
    const te_act_fwd_args *a = job->a;
    const void *x = te__data(a->x);
    float u[TE__ACT_RUN], gate[TE__ACT_RUN], slope, amax = 0.0f;
    int64_t row = unit / job->runs, first = unit % job->runs * TE__ACT_RUN, k;
    int64_t width = te__min(TE__ACT_RUN, job->ld - first), count = te__max(0, te__min(width, job->n - first));
    int64_t at = row * (job->gated ? 2 * job->n : job->n) + first;
    if (count > 0) te__load_row(x, a->x->dtype, at, count, u);
    if (job->gated && count > 0) te__load_row(x, a->x->dtype, at + job->n, count, gate);
    if (a->activation == TE_CLAMPED_SWIGLU)
        for (k = 0; k < count; k++) {
            float c = fminf(u[k], a->limit);
            u[k] = c * te__act_sigmoid(a->alpha * c) * (te__act_clamp(gate[k], a->limit) + 1.0f);
        }
    else if (job->gated)
        for (k = 0; k < count; k++) u[k] = te__act_one(a->activation, u[k], &slope) * gate[k];
    else
        for (k = 0; k < count; k++) u[k] = te__act_one(a->activation, u[k], &slope);
    if (a->scale) {
        for (k = 0; k < count; k++) amax = fabsf(u[k]) > amax ? fabsf(u[k]) : amax;
        for (k = 0; k < count; k++) u[k] *= job->scale;
    }
    for (k = count; k < width; k++) u[k] = 0.0f;
    te__store_row(te__data(a->y), a->y->dtype, row * job->ld + first, width, u);
    if (job->amax) job->amax[unit] = amax;
}
static void te__act_fwd_units(void *user, int64_t begin, int64_t end) {
    int64_t unit;
    for (unit = begin; unit < end; unit++) te__act_fwd_unit((const te__act_fwd_job *)user, unit);
}

static te_result te__cpu_act_fwd(te_ctx *te, const te_act_fwd_args *a) {
    te__act_fwd_job job = TE_ZERO;
    int64_t m = te__rows(a->x), units, i;
    job.a = a;
    job.gated = te_activation_is_gated(a->activation);
    job.n = job.gated ? te__cols(a->x) / 2 : te__cols(a->x);
    job.ld = te__cols(a->y);
    if (m == 0 || job.n == 0) return TE_OK;
    if (!job.gated && job.ld == job.n) { /* one long row */
        job.n = job.ld = m * job.n;
        m = 1;
    }
    job.runs = te__div_up(job.ld, TE__ACT_RUN);
    job.scale = a->scale ? *(const float *)te__data(a->scale) : 1.0f;
    units = m * job.runs;
    if (a->amax) {
        job.amax = (float *)te__alloc(te, (size_t)units * sizeof(float));
        if (!job.amax) return TE_ERR_OUT_OF_MEMORY;
    }
    te__parallel_for(te, units, 4, te__act_fwd_units, &job);
    if (a->amax) {
        float *amax = (float *)te__data(a->amax);
        for (i = 0; i < units; i++)
            if (job.amax[i] > *amax) *amax = job.amax[i];
        te__free(te, job.amax, (size_t)units * sizeof(float));
    }
    if (a->scale_inv) *(float *)te__data(a->scale_inv) = 1.0f / job.scale;
    return TE_OK;
}

/* ---- backward ---- */

typedef struct te__act_bwd_job {
    const te_act_bwd_args *a;
    bool gated;
    int64_t n, runs;
} te__act_bwd_job;

static void te__act_bwd_unit(const te__act_bwd_job *job, int64_t unit) {
    const te_act_bwd_args *a = job->a;
    float dy[TE__ACT_RUN], u[TE__ACT_RUN], gate[TE__ACT_RUN], slope, f;
    int64_t row = unit / job->runs, first = unit % job->runs * TE__ACT_RUN, count = te__min(TE__ACT_RUN, job->n - first), k;
    int64_t at = row * (job->gated ? 2 * job->n : job->n) + first;
    te__load_row(te__data(a->dy), a->dy->dtype, row * job->n + first, count, dy);
    te__load_row(te__data(a->x), a->x->dtype, at, count, u);
    if (!job->gated) {
        for (k = 0; k < count; k++) {
            te__act_one(a->activation, u[k], &slope);
            u[k] = dy[k] * slope;
        }
        te__store_row(te__data(a->dx), a->dx->dtype, at, count, u);
        return;
    }
    te__load_row(te__data(a->x), a->x->dtype, at + job->n, count, gate);
    if (a->activation == TE_CLAMPED_SWIGLU)
        for (k = 0; k < count; k++) {
            float c = fminf(u[k], a->limit), d = te__act_clamp(gate[k], a->limit) + 1.0f, s = te__act_sigmoid(a->alpha * c);
            bool inside = gate[k] >= -a->limit && gate[k] <= a->limit;
            u[k] = u[k] <= a->limit ? dy[k] * (s + a->alpha * c * s * (1.0f - s)) * d : 0.0f;
            gate[k] = inside ? dy[k] * c * s : 0.0f;
        }
    else
        for (k = 0; k < count; k++) {
            f = te__act_one(a->activation, u[k], &slope);
            u[k] = dy[k] * slope * gate[k];
            gate[k] = dy[k] * f;
        }
    te__store_row(te__data(a->dx), a->dx->dtype, at, count, u);
    te__store_row(te__data(a->dx), a->dx->dtype, at + job->n, count, gate);
}
static void te__act_bwd_units(void *user, int64_t begin, int64_t end) {
    int64_t unit;
    for (unit = begin; unit < end; unit++) te__act_bwd_unit((const te__act_bwd_job *)user, unit);
}

static te_result te__cpu_act_bwd(te_ctx *te, const te_act_bwd_args *a) {
    te__act_bwd_job job = TE_ZERO;
    int64_t m = te__rows(a->dy);
    job.a = a;
    job.gated = te_activation_is_gated(a->activation);
    job.n = te__cols(a->dy);
    if (m == 0 || job.n == 0) return TE_OK;
    if (!job.gated) {
        job.n *= m;
        m = 1;
    }
    job.runs = te__div_up(job.n, TE__ACT_RUN);
    te__parallel_for(te, m * job.runs, 4, te__act_bwd_units, &job);
    return TE_OK;
}
