/* ops/loss/cpu.c: the reference of cross entropy and mean squared error. This file must not depend on CUDA. */

/* One thread sums the squared errors of TE__LOSS_BLOCK elements. Then the sums of these blocks are added in order. */
enum { TE__LOSS_RUN = 512, TE__LOSS_BLOCK = 16384 };

/* Returns the target of a row. Returns -1 if the target is ignore_index or not in 0 .. v - 1. */
static int64_t te__loss_target(const te_tensor *target, int64_t row, int64_t ignore_index, int64_t v) {
    int64_t t = te__load_index(te__data(target), target->dtype, row);
    return t == ignore_index || t < 0 || t >= v ? -1 : t;
}

/* ---- cross entropy ---- */

static float te__loss_of(float lse, float x_target, float sum, float smoothing, int64_t vocab) {
    float loss = lse - x_target;
    return smoothing > 0.0f ? (1.0f - smoothing) * loss + smoothing * lse - smoothing / (float)vocab * sum : loss;
}

static void te__cross_entropy_fwd_rows(void *user, int64_t begin, int64_t end) {
    const te_op_cross_entropy_fwd_args *a = (const te_op_cross_entropy_fwd_args *)user;
    const void *logits = te__data(a->logits);
    te_dtype dt = a->logits->dtype;
    float run[TE__LOSS_RUN];
    int64_t v = te__cols(a->logits), row, i, k, count;
    for (row = begin; row < end; row++) {
        int64_t t = te__loss_target(a->target, row, a->ignore_index, a->vocab_size), column = t - a->vocab_start;
        bool here = t >= 0 && column >= 0 && column < v;
        float m = -INFINITY, reference, lse, x_target;
        double s = 0.0, sum = 0.0;
        for (i = 0; i < v; i += TE__LOSS_RUN) {
            count = te__min(TE__LOSS_RUN, v - i);
            te__load_row(logits, dt, row * v + i, count, run);
            for (k = 0; k < count; k++) m = run[k] > m ? run[k] : m;
        }
        reference = m == -INFINITY ? 0.0f : m; /* a row may have no finite logit */
        for (i = 0; i < v; i += TE__LOSS_RUN) {
            count = te__min(TE__LOSS_RUN, v - i);
            te__load_row(logits, dt, row * v + i, count, run);
            for (k = 0; k < count; k++) {
                sum += (double)run[k];
                s += (double)expf(run[k] - reference);
            }
        }
        lse = (float)((double)m + log(s));
        x_target = here ? te__load_element(logits, dt, row * v + column) : -INFINITY;
        if (a->parts) {
            float *parts = te__f32_data(a->parts) + 3 * row;
            parts[0] = lse;
            parts[1] = x_target;
            parts[2] = a->label_smoothing > 0.0f ? (float)sum : 0.0f;
            continue;
        }
        te__f32_data(a->loss)[row] =
            t >= 0 ? te__loss_of(lse, x_target, (float)sum, a->label_smoothing, a->vocab_size) : 0.0f;
        te__f32_data(a->lse)[row] = lse;
    }
}

static te_result te__cpu_cross_entropy_fwd(te_ctx *te, const te_op_cross_entropy_fwd_args *a) {
    te_op_cross_entropy_fwd_args args = *a;
    int64_t m = te__rows(a->logits), v = te__cols(a->logits), row, counted = 0;
    if (te__want_inside(te, TE__OUTSIDE_cross_entropy_fwd, a->target, 0, a->vocab_size, &a->ignore_index) != TE_OK)
        return TE_ERR_INVALID;
    te__parallel_for(te, m, te__max(1, 4096 / te__max(1, v)), te__cross_entropy_fwd_rows, &args);
    if (!a->count) return TE_OK;
    for (row = 0; row < m; row++) counted += te__loss_target(a->target, row, a->ignore_index, a->vocab_size) >= 0;
    *te__f32_data(a->count) = (float)counted;
    return TE_OK;
}

static te_result te__cpu_cross_entropy_merge(te_ctx *te, const te_op_cross_entropy_merge_args *a) {
    int64_t m = te__numel(a->target), ranks = m ? te__numel(a->parts) / (3 * m) : 0, row, r;
    if (te__want_inside(te, TE__OUTSIDE_cross_entropy_merge, a->target, 0, a->vocab_size, &a->ignore_index) != TE_OK)
        return TE_ERR_INVALID;
    for (row = 0; row < m; row++) {
        const float *parts = te__f32_data(a->parts) + 3 * row;
        float most = -INFINITY, x_target = -INFINITY, lse;
        double s = 0.0, sum = 0.0;
        for (r = 0; r < ranks; r++) most = parts[3 * m * r] > most ? parts[3 * m * r] : most;
        for (r = 0; r < ranks; r++) {
            const float *part = parts + 3 * m * r;
            s += (double)expf(part[0] - (most == -INFINITY ? 0.0f : most));
            x_target = part[1] > x_target || part[1] != part[1] ? part[1] : x_target;
            sum += (double)part[2];
        }
        lse = (float)((double)most + log(s));
        te__f32_data(a->lse)[row] = lse;
        te__f32_data(a->loss)[row] =
            te__loss_target(a->target, row, a->ignore_index, a->vocab_size) >= 0
                ? te__loss_of(lse, x_target, (float)sum, a->label_smoothing, a->vocab_size)
                : 0.0f;
    }
    return TE_OK;
}

static void te__cross_entropy_bwd_rows(void *user, int64_t begin, int64_t end) {
    const te_op_cross_entropy_bwd_args *a = (const te_op_cross_entropy_bwd_args *)user;
    const float *dloss = te__f32_data(a->dloss), *lse = te__f32_data(a->lse);
    float run[TE__LOSS_RUN], e = a->label_smoothing, count_of_targets = 1.0f, everywhere;
    int64_t v = te__cols(a->logits), row, i, k, count, step = te__numel(a->dloss) == 1 ? 0 : 1;
    if (a->count) count_of_targets = fmaxf(*te__f32_data(a->count), 1.0f);
    everywhere = e / (float)a->vocab_size;
    for (row = begin; row < end; row++) {
        int64_t t = te__loss_target(a->target, row, a->ignore_index, a->vocab_size),
                column = t < 0 ? -1 : t - a->vocab_start;
        float factor = dloss[row * step] * a->scale / count_of_targets;
        for (i = 0; i < v; i += TE__LOSS_RUN) {
            count = te__min(TE__LOSS_RUN, v - i);
            te__load_row(te__data(a->logits), a->logits->dtype, row * v + i, count, run);
            for (k = 0; k < count; k++) run[k] = expf(run[k] - lse[row]) - everywhere;
            if (column >= i && column < i + count) run[column - i] -= 1.0f - e;
            for (k = 0; k < count; k++) run[k] = t < 0 ? 0.0f : run[k] * factor;
            te__store_row(te__data(a->dlogits), a->dlogits->dtype, row * v + i, count, run);
        }
    }
}

static te_result te__cpu_cross_entropy_bwd(te_ctx *te, const te_op_cross_entropy_bwd_args *a) {
    te_op_cross_entropy_bwd_args args = *a;
    int64_t v = te__cols(a->logits);
    if (v == 0) return TE_OK;
    if (te__want_inside(te, TE__OUTSIDE_cross_entropy_bwd, a->target, 0, a->vocab_size, &a->ignore_index) != TE_OK)
        return TE_ERR_INVALID;
    te__parallel_for(te, te__rows(a->logits), te__max(1, 4096 / v), te__cross_entropy_bwd_rows, &args);
    return TE_OK;
}

/* ---- mean squared error ---- */

typedef struct te__mse_job {
    const te_tensor *x, *target;
    te_tensor *dx; /* backward */
    float factor;
    double *sums; /* forward: the sum of each block */
    int64_t n;
} te__mse_job;

static void te__mse_blocks(void *user, int64_t begin, int64_t end) {
    const te__mse_job *job = (const te__mse_job *)user;
    float x[TE__LOSS_RUN], t[TE__LOSS_RUN];
    int64_t block, i, k, count;
    for (block = begin; block < end; block++) {
        int64_t last = te__min(job->n, (block + 1) * TE__LOSS_BLOCK);
        double sum = 0.0;
        for (i = block * TE__LOSS_BLOCK; i < last; i += TE__LOSS_RUN) {
            count = te__min(TE__LOSS_RUN, last - i);
            te__load_row(te__data(job->x), job->x->dtype, i, count, x);
            te__load_row(te__data(job->target), job->target->dtype, i, count, t);
            for (k = 0; k < count; k++) x[k] -= t[k];
            if (job->dx) {
                for (k = 0; k < count; k++) x[k] *= job->factor;
                te__store_row(te__data(job->dx), job->dx->dtype, i, count, x);
            } else {
                for (k = 0; k < count; k++) sum += (double)x[k] * (double)x[k];
            }
        }
        if (job->sums) job->sums[block] = sum;
    }
}

static te_result te__cpu_mse_fwd(te_ctx *te, const te_op_mse_fwd_args *a) {
    te__mse_job job = TE_ZERO;
    int64_t n = te__numel(a->x), blocks = te__div_up(n, TE__LOSS_BLOCK), i;
    double sum = 0.0;
    job.x = a->x;
    job.target = a->target;
    job.n = n;
    job.sums = (double *)te__alloc(te, (size_t)blocks * sizeof(double));
    if (!job.sums) return TE_ERR_OUT_OF_MEMORY;
    te__parallel_for(te, blocks, 1, te__mse_blocks, &job);
    for (i = 0; i < blocks; i++) sum += job.sums[i];
    *te__f32_data(a->loss) = n ? (float)(sum / (double)n) : 0.0f;
    te__free(te, job.sums);
    return TE_OK;
}

static te_result te__cpu_mse_bwd(te_ctx *te, const te_op_mse_bwd_args *a) {
    te__mse_job job = TE_ZERO;
    job.x = a->x;
    job.target = a->target;
    job.dx = a->dx;
    job.n = te__numel(a->x);
    if (job.n == 0) return TE_OK;
    job.factor = 2.0f * *te__f32_data(a->dloss) / (float)job.n;
    te__parallel_for(te, te__div_up(job.n, TE__LOSS_BLOCK), 1, te__mse_blocks, &job);
    return TE_OK;
}
