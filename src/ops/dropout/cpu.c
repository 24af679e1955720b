/* ops/dropout/cpu.c: the reference of dropout with bias and residual. This file must not depend on CUDA. */

/* The largest number of columns that are processed at a time. They lie in one row, so their elements of x and of the
 * bias are contiguous. */
enum { TE__DROPOUT_RUN = 512 };

typedef struct te__dropout_job {
    const te_op_dropout_add_fwd_args *a;
    uint64_t seed, offset;
    int64_t n, runs;
    float keep_scale;
} te__dropout_job;

/* Applies dropout to v, which holds elements `first` to `first` + `count` - 1 of the whole tensor. */
static void te__dropout_keep(const te__dropout_job *job, int64_t first, int64_t count, float *v) {
    const te_op_dropout_add_fwd_args *a = job->a;
    uint32_t words[4];
    int64_t k, drawn = -1;
    for (k = 0; k < count; k++) {
        int64_t i = (first + k) / a->run;
        if (i / 4 != drawn) te__philox(job->seed, job->offset, (uint64_t)i / 4, words);
        drawn = i / 4;
        v[k] = te__uniform01(words[i % 4]) >= a->p ? v[k] * job->keep_scale : 0.0f;
    }
}

static void te__dropout_units(void *user, int64_t begin, int64_t end) {
    const te__dropout_job *job = (const te__dropout_job *)user;
    const te_op_dropout_add_fwd_args *a = job->a;
    float v[TE__DROPOUT_RUN], t[TE__DROPOUT_RUN];
    int64_t unit, k;
    for (unit = begin; unit < end; unit++) {
        int64_t column = unit % job->runs * TE__DROPOUT_RUN, at = unit / job->runs * job->n + column;
        int64_t count = te__min(TE__DROPOUT_RUN, job->n - column);
        te__load_row(te__data(a->x), a->x->dtype, at, count, v);
        if (a->bias) {
            te__load_row(te__data(a->bias), a->bias->dtype, column, count, t);
            for (k = 0; k < count; k++) v[k] += t[k];
        }
        if (a->p > 0.0f) te__dropout_keep(job, at, count, v);
        if (a->residual) {
            te__load_row(te__data(a->residual), a->residual->dtype, at, count, t);
            for (k = 0; k < count; k++) v[k] = t[k] + v[k];
        }
        te__store_row(te__data(a->y), a->y->dtype, at, count, v);
    }
}

static te_result te__cpu_dropout_add_fwd(te_ctx *te, const te_op_dropout_add_fwd_args *a) {
    te__dropout_job job = TE_ZERO;
    int64_t m = te__rows(a->x);
    job.a = a;
    job.seed = a->seed;
    job.offset = a->offset;
    te__rng_read(te__data(a->rng), &job.seed, &job.offset);
    job.n = te__cols(a->x);
    if (m == 0 || job.n == 0) return TE_OK;
    if (!a->bias) { /* one long row */
        job.n *= m;
        m = 1;
    }
    job.runs = te__div_up(job.n, TE__DROPOUT_RUN);
    job.keep_scale = 1.0f / (1.0f - a->p);
    te__parallel_for(te, m * job.runs, 8, te__dropout_units, &job);
    return TE_OK;
}

static te_result te__cpu_dropout_add_bwd(te_ctx *te, const te_op_dropout_add_bwd_args *a) {
    te_op_dropout_add_fwd_args forward = te__dropout_backward_args(a);
    return te__cpu_dropout_add_fwd(te, &forward);
}
