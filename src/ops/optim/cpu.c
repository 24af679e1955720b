/* ops/optim/cpu.c: the reference of Adam, SGD, the gradient norm and the scaling of tensors. A list of tensors is
 * cut into one sequence of pieces, which depend only on the shapes. */

enum { TE__OPTIM_PIECE = 8192, TE__OPTIM_ROW = 512 };

/* The pieces of a list of tensors. first[t] is the first piece of tensor t. first[num] is the number of pieces. */
typedef struct te__pieces {
    int64_t *first;
    int num;
} te__pieces;

/* Cuts the tensors of a list into pieces. tensor(list, t) returns a tensor of the size of entry t. Returns false if
 * memory is exhausted. */
static bool te__pieces_make(te_ctx *te, te__pieces *p, int num, const te_tensor *(*tensor)(const void *list, int t),
                            const void *list) {
    int t;
    p->num = num;
    p->first = (int64_t *)te__alloc(te, (size_t)(num + 1) * sizeof(int64_t));
    if (!p->first) return false;
    p->first[0] = 0;
    for (t = 0; t < num; t++) p->first[t + 1] = p->first[t] + te__div_up(te__numel(tensor(list, t)), TE__OPTIM_PIECE);
    return true;
}
static void te__pieces_free(te_ctx *te, te__pieces *p) {
    te__free(te, p->first);
}
/* Returns the index of the tensor to which a piece belongs. Sets *begin to the first element of the piece in that
 * tensor. */
static int te__piece_tensor(const te__pieces *p, int64_t piece, int64_t *begin) {
    int low = 0, high = p->num - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (piece < p->first[middle + 1])
            high = middle;
        else
            low = middle + 1;
    }
    *begin = (piece - p->first[low]) * TE__OPTIM_PIECE;
    return low;
}

/* ---- adam ---- */

/* Factors for the states of one te_adam_tensor: the scales before the step, and the multipliers of the new values. */
typedef struct te__adam_factors {
    float scale[TE__STATES], multiplier[TE__STATES];
} te__adam_factors;

typedef struct te__adam_job {
    const te_op_adam_args *a;
    te__pieces pieces;
    te__adam_factors *factors;        /* for each entry; NULL if no entry has a scale */
    float (*amax)[TE__STATES];   /* amaxes of each piece; if not NULL, the states after the step are measured and not
                                  * stored */
    float grad_scale;
} te__adam_job;

static const te_tensor *te__adam_entry(const void *list, int t) { return ((const te_adam_tensor *)list)[t].param; }

/* The numbers of an entry in a step. */
typedef struct te__adam_step {
    te_adam_numbers is;
    float unbias1, unbias2;
} te__adam_step;
static te__adam_step te__adam_step_of(const te_op_adam_args *a, int entry) {
    int place = a->tensors[entry].place;
    te__adam_step s;
    s.is = te__adam_numbers_of(a, entry);
    if (a->lr_device) s.is.lr = te__f32_data(a->lr_device)[place];
    if (entry >= a->num_tensors - a->num_undecayed) s.is.weight_decay = 0.0f;
    s.unbias1 = a->bias_correction ? te__f32_data(a->bias_correction)[2 * place]
                                   : te__adam_unbias(a->no_bias_correction, s.is.beta1, a->step);
    s.unbias2 = a->bias_correction ? te__f32_data(a->bias_correction)[2 * place + 1]
                                   : te__adam_unbias(a->no_bias_correction, s.is.beta2, a->step);
    return s;
}

static void te__adam_row(const te__adam_job *j, const te__adam_step *s, const float *g, float *p, float *m, float *v,
                         int64_t n) {
    float beta1 = s->is.beta1, beta2 = s->is.beta2, rest1 = 1.0f - beta1, rest2 = 1.0f - beta2, eps = s->is.eps,
          decay = s->is.weight_decay;
    float grad_scale = j->grad_scale, lr = s->is.lr, unbias1 = s->unbias1, unbias2 = s->unbias2;
    float decay_gradient = j->a->no_adam_w_mode ? decay : 0.0f, decay_step = j->a->no_adam_w_mode ? 0.0f : decay;
    int64_t i;
    for (i = 0; i < n; i++) {
        float grad = g[i] * grad_scale + decay_gradient * p[i], update;
        m[i] = beta1 * m[i] + rest1 * grad;
        v[i] = beta2 * v[i] + rest2 * grad * grad;
        update = unbias1 * m[i] * (1.0f / (sqrtf(unbias2 * v[i]) + eps)) + decay_step * p[i];
        p[i] -= lr * update;
    }
}
/* te__adam_state returns state k of an entry. te__adam_scale returns the scale of that state. */
static te_tensor *te__adam_state(const te_adam_tensor *t, int k) {
    return k == TE__STATE_M ? t->m : k == TE__STATE_V ? t->v : t->master;
}
static te_tensor *te__adam_scale(const te_adam_tensor *t, int k) {
    return k == TE__STATE_M ? t->m_scale : k == TE__STATE_V ? t->v_scale : t->master_scale;
}

/* Returns n elements of state k as f32: in place if the step may write there, otherwise in `row`. If there is no
 * master, the parameter stands for it. */
static float *te__adam_load(const te__adam_job *j, int entry, int k, int64_t at, int64_t n, float *row) {
    const te_adam_tensor *t = &j->a->tensors[entry];
    const te_tensor *x = te__adam_state(t, k);
    int64_t i;
    if (!x) x = t->param;
    if (x->dtype == TE_U8) {
        const uint16_t *param = (const uint16_t *)te__data(t->param) + at,
                       *remainder = (const uint16_t *)te__data(x) + at;
        for (i = 0; i < n; i++) row[i] = te__join_master(param[i], remainder[i]);
        return row;
    }
    if (x->dtype == TE_F32 && !j->amax) return te__f32_data(x) + at;
    te__load_row(te__data(x), x->dtype, at, n, row);
    if (te__adam_scale(t, k))
        for (i = 0; i < n; i++) row[i] *= j->factors[entry].scale[k];
    return row;
}
static void te__adam_store(const te__adam_job *j, int entry, int k, int64_t at, int64_t n, float *row) {
    const te_adam_tensor *t = &j->a->tensors[entry];
    const te_tensor *x = te__adam_state(t, k);
    int64_t i;
    if (k == TE__STATE_MASTER && x && x->dtype == TE_U8) {
        uint16_t *param = (uint16_t *)te__data(t->param) + at, *remainder = (uint16_t *)te__data(x) + at;
        for (i = 0; i < n; i++) te__split_master(row[i], &param[i], &remainder[i]);
        return;
    }
    if (k == TE__STATE_MASTER && (x || t->param->dtype != TE_F32))
        te__store_row(te__data(t->param), t->param->dtype, at, n, row);
    if (!x || x->dtype == TE_F32) return;
    if (te__adam_scale(t, k))
        for (i = 0; i < n; i++) row[i] *= j->factors[entry].multiplier[k];
    te__store_row(te__data(x), x->dtype, at, n, row);
}
static void te__adam_pieces(void *user, int64_t begin, int64_t end) {
    const te__adam_job *j = (const te__adam_job *)user;
    float g[TE__OPTIM_ROW], row[TE__STATES][TE__OPTIM_ROW];
    int64_t piece, i;
    int k;
    for (piece = begin; piece < end; piece++) {
        int64_t at, stop;
        int entry = te__piece_tensor(&j->pieces, piece, &at);
        const te_adam_tensor *t = &j->a->tensors[entry];
        te__adam_step step = te__adam_step_of(j->a, entry);
        stop = te__min(at + TE__OPTIM_PIECE, te__numel(t->param));
        for (; at < stop; at += TE__OPTIM_ROW) {
            int64_t n = te__min(TE__OPTIM_ROW, stop - at);
            float *x[TE__STATES];
            te__load_row(te__data(t->grad), t->grad->dtype, at, n, g);
            for (k = 0; k < TE__STATES; k++) x[k] = te__adam_load(j, entry, k, at, n, row[k]);
            te__adam_row(j, &step, g, x[TE__STATE_MASTER], x[TE__STATE_M], x[TE__STATE_V], n);
            for (k = 0; k < TE__STATES; k++) {
                if (!j->amax)
                    te__adam_store(j, entry, k, at, n, x[k]);
                else
                    for (i = 0; i < n; i++)
                        j->amax[piece][k] = fabsf(x[k][i]) > j->amax[piece][k] ? fabsf(x[k][i]) : j->amax[piece][k];
            }
        }
    }
}
/* Computes the scales that the states have after the step, from the largest magnitudes of the pieces. */
static void te__adam_rescale(te__adam_job *j) {
    int entry, k;
    int64_t piece;
    for (entry = 0; entry < j->a->num_tensors; entry++)
        for (k = 0; k < TE__STATES; k++) {
            const te_tensor *scale = te__adam_scale(&j->a->tensors[entry], k);
            bool e4m3 = scale && te__adam_state(&j->a->tensors[entry], k)->dtype == TE_F8E4M3;
            float amax = 0.0f;
            if (!scale || j->pieces.first[entry] == j->pieces.first[entry + 1]) continue;
            for (piece = j->pieces.first[entry]; piece < j->pieces.first[entry + 1]; piece++)
                amax = j->amax[piece][k] > amax ? j->amax[piece][k] : amax;
            j->factors[entry].multiplier[k] = te__state_multiplier(amax, e4m3);
            *te__f32_data(scale) = te__state_scale(amax, e4m3);
        }
}
static te_result te__adam_measure(te_ctx *te, te__adam_job *j) {
    size_t bytes = (size_t)j->pieces.first[j->a->num_tensors] * sizeof(*j->amax);
    int entry, k;
    j->factors = (te__adam_factors *)te__alloc_zero(te, (size_t)j->a->num_tensors * sizeof(te__adam_factors));
    j->amax = (float (*)[TE__STATES])te__alloc_zero(te, bytes);
    if (j->factors && j->amax) {
        for (entry = 0; entry < j->a->num_tensors; entry++)
            for (k = 0; k < TE__STATES; k++) {
                const te_tensor *scale = te__adam_scale(&j->a->tensors[entry], k);
                if (scale) j->factors[entry].scale[k] = *te__f32_data(scale);
            }
        te__parallel_for(te, j->pieces.first[j->a->num_tensors], 1, te__adam_pieces, j);
        te__adam_rescale(j);
    }
    if (j->amax) te__free(te, j->amax);
    else if (j->factors) {
        te__free(te, j->factors);
        j->factors = NULL;
    }
    j->amax = NULL;
    return j->factors ? TE_OK : TE_ERR_OUT_OF_MEMORY;
}
static te_result te__cpu_adam(te_ctx *te, const te_op_adam_args *a) {
    te__adam_job j = TE_ZERO;
    te_result result = TE_OK;
    bool scales = false;
    int i;
    if (a->found_inf && *te__f32_data(a->found_inf) != 0.0f) return TE_OK;
    j.a = a;
    j.grad_scale = a->grad_scale ? *te__f32_data(a->grad_scale) : 1.0f;
    if (!te__pieces_make(te, &j.pieces, a->num_tensors, te__adam_entry, a->tensors)) return TE_ERR_OUT_OF_MEMORY;
    for (i = 0; i < a->num_tensors; i++) scales = scales || te__adam_has_scales(&a->tensors[i]);
    if (scales) result = te__adam_measure(te, &j);
    if (result == TE_OK) te__parallel_for(te, j.pieces.first[a->num_tensors], 1, te__adam_pieces, &j);
    te__free(te, j.factors);
    te__pieces_free(te, &j.pieces);
    return result;
}

static void te__store_state_rows(void *user, int64_t begin, int64_t end) {
    const te_op_store_state_args *a = (const te_op_store_state_args *)user;
    float row[TE__OPTIM_ROW],
        factor = te__state_multiplier(*te__f32_data(a->amax), a->state->dtype == TE_F8E4M3);
    int64_t at, i, n;
    for (at = begin; at < end; at += n) {
        n = te__min(TE__OPTIM_ROW, end - at);
        te__load_row(te__data(a->x), a->x->dtype, at, n, row);
        for (i = 0; i < n; i++) row[i] *= factor;
        te__store_row(te__data(a->state), a->state->dtype, at, n, row);
    }
}
static te_result te__cpu_store_state(te_ctx *te, const te_op_store_state_args *a) {
    te_op_store_state_args args = *a;
    te__parallel_for(te, te__numel(a->x), TE__OPTIM_PIECE, te__store_state_rows, &args);
    *te__f32_data(a->scale) = te__state_scale(*te__f32_data(a->amax), a->state->dtype == TE_F8E4M3);
    return TE_OK;
}

/* ---- sgd ---- */

typedef struct te__sgd_job {
    const te_op_sgd_args *a;
    te__pieces pieces;
    float grad_scale;
} te__sgd_job;

static const te_tensor *te__sgd_entry(const void *list, int t) { return ((const te_sgd_tensor *)list)[t].param; }

static void te__sgd_row(const te__sgd_job *j, float lr, float decay, bool first, const float *g, float *p, float *b,
                        int64_t n) {
    const te_op_sgd_args *a = j->a;
    float before = a->wd_after_momentum ? 0.0f : decay, after = a->wd_after_momentum ? decay : 0.0f,
          rest = 1.0f - a->dampening;
    int64_t i;
    for (i = 0; i < n; i++) {
        float d = g[i] * j->grad_scale;
        if (before != 0.0f) d += before * p[i];
        if (a->momentum != 0.0f) {
            b[i] = first ? d : a->momentum * b[i] + rest * d;
            d = a->nesterov ? d + a->momentum * b[i] : b[i];
        }
        if (after != 0.0f) d += after * p[i];
        p[i] -= lr * d;
    }
}
static void te__sgd_pieces(void *user, int64_t begin, int64_t end) {
    const te__sgd_job *j = (const te__sgd_job *)user;
    float g[TE__OPTIM_ROW], p[TE__OPTIM_ROW], b[TE__OPTIM_ROW];
    int64_t piece;
    for (piece = begin; piece < end; piece++) {
        int64_t at, stop;
        int place = te__piece_tensor(&j->pieces, piece, &at);
        const te_sgd_tensor *t = &j->a->tensors[place];
        const te_tensor *from = t->master ? t->master : t->param,
                        *momentum = j->a->momentum != 0.0f ? t->momentum : NULL;
        te_sgd_numbers numbers = te__sgd_numbers_of(j->a, place);
        if (place >= j->a->num_tensors - j->a->num_undecayed) numbers.weight_decay = 0.0f;
        if (j->a->lr_device) numbers.lr = te__f32_data(j->a->lr_device)[t->place];
        stop = te__min(at + TE__OPTIM_PIECE, te__numel(t->param));
        for (; at < stop; at += TE__OPTIM_ROW) {
            int64_t n = te__min(TE__OPTIM_ROW, stop - at);
            te__load_row(te__data(t->grad), t->grad->dtype, at, n, g);
            te__load_row(te__data(from), from->dtype, at, n, p);
            if (momentum) te__load_row(te__data(momentum), momentum->dtype, at, n, b);
            te__sgd_row(j, numbers.lr, numbers.weight_decay, t->first, g, p, b, n);
            if (momentum) te__store_row(te__data(momentum), momentum->dtype, at, n, b);
            if (t->master) te__store_row(te__data(t->master), TE_F32, at, n, p);
            te__store_row(te__data(t->param), t->param->dtype, at, n, p);
        }
    }
}
static te_result te__cpu_sgd(te_ctx *te, const te_op_sgd_args *a) {
    te__sgd_job j;
    if (a->found_inf && *te__f32_data(a->found_inf) != 0.0f) return TE_OK;
    j.a = a;
    j.grad_scale = a->grad_scale ? *te__f32_data(a->grad_scale) : 1.0f;
    if (!te__pieces_make(te, &j.pieces, a->num_tensors, te__sgd_entry, a->tensors)) return TE_ERR_OUT_OF_MEMORY;
    te__parallel_for(te, j.pieces.first[a->num_tensors], 1, te__sgd_pieces, &j);
    te__pieces_free(te, &j.pieces);
    return TE_OK;
}

/* ---- norm ---- */

typedef struct te__norm_job {
    const te_op_l2norm_args *a;
    te__pieces pieces;
    float inv_scale;
    double *square; /* the sum of squares of each piece */
} te__norm_job;

static const te_tensor *te__list_entry(const void *list, int t) { return ((const te_tensor *const *)list)[t]; }

static void te__norm_pieces(void *user, int64_t begin, int64_t end) {
    const te__norm_job *j = (const te__norm_job *)user;
    float x[TE__OPTIM_ROW];
    int64_t piece, i;
    for (piece = begin; piece < end; piece++) {
        int64_t at, stop;
        const te_tensor *t = j->a->tensors[te__piece_tensor(&j->pieces, piece, &at)];
        double sum[4] = TE_ZERO;
        stop = te__min(at + TE__OPTIM_PIECE, te__numel(t));
        for (; at < stop; at += TE__OPTIM_ROW) {
            int64_t n = te__min(TE__OPTIM_ROW, stop - at);
            te__load_row(te__data(t), t->dtype, at, n, x);
            if (j->a->inv_scale)
                for (i = 0; i < n; i++) x[i] *= j->inv_scale;
            for (i = 0; i + 4 <= n; i += 4) {
                sum[0] += (double)x[i] * x[i];
                sum[1] += (double)x[i + 1] * x[i + 1];
                sum[2] += (double)x[i + 2] * x[i + 2];
                sum[3] += (double)x[i + 3] * x[i + 3];
            }
            for (; i < n; i++) sum[0] += (double)x[i] * x[i];
        }
        j->square[piece] = sum[0] + sum[1] + sum[2] + sum[3];
    }
}
static te_result te__cpu_l2norm(te_ctx *te, const te_op_l2norm_args *a) {
    te__norm_job j;
    int64_t all, piece;
    double total = 0;
    float norm, clip;
    int t;
    j.a = a;
    j.inv_scale = a->inv_scale ? *te__f32_data(a->inv_scale) : 1.0f;
    if (!te__pieces_make(te, &j.pieces, a->num_tensors, te__list_entry, a->tensors)) return TE_ERR_OUT_OF_MEMORY;
    all = j.pieces.first[a->num_tensors];
    j.square = (double *)te__alloc(te, (size_t)all * sizeof(double));
    if (!j.square) {
        te__pieces_free(te, &j.pieces);
        return TE_ERR_OUT_OF_MEMORY;
    }
    te__parallel_for(te, all, 4, te__norm_pieces, &j);
    for (t = 0; t < a->num_tensors; t++) {
        double sum = 0;
        for (piece = j.pieces.first[t]; piece < j.pieces.first[t + 1]; piece++) sum += j.square[piece];
        if (a->per_tensor) te__f32_data(a->per_tensor)[t] = (float)sqrt(sum);
        total += sum;
    }
    te__free(te, j.square);
    te__pieces_free(te, &j.pieces);
    norm = (float)sqrt(total);
    clip = a->max_norm / (norm + 1e-6f);
    *te__f32_data(a->norm) = norm;
    if (a->found_inf && !(norm <= FLT_MAX)) *te__f32_data(a->found_inf) = 1.0f;
    if (a->clip) *te__f32_data(a->clip) = clip > 1.0f ? 1.0f : clip; /* a comparison, since fminf would lose a
                                                                           * NaN */
    return TE_OK;
}

/* ---- scale ---- */

typedef struct te__multi_scale_job {
    const te_op_multi_scale_args *a;
    te__pieces pieces;
    float scale;
    unsigned char *infinite; /* of each piece: whether some element was not finite */
} te__multi_scale_job;

static void te__multi_scale_pieces(void *user, int64_t begin, int64_t end) {
    const te__multi_scale_job *j = (const te__multi_scale_job *)user;
    float x[TE__OPTIM_ROW];
    int64_t piece, i;
    for (piece = begin; piece < end; piece++) {
        int64_t at, stop, finite = 1;
        int t = te__piece_tensor(&j->pieces, piece, &at);
        const te_tensor *in = j->a->in[t], *out = j->a->out[t];
        stop = te__min(at + TE__OPTIM_PIECE, te__numel(in));
        for (; at < stop; at += TE__OPTIM_ROW) {
            int64_t n = te__min(TE__OPTIM_ROW, stop - at);
            te__load_row(te__data(in), in->dtype, at, n, x);
            for (i = 0; i < n; i++) {
                finite &= fabsf(x[i]) <= FLT_MAX;
                x[i] *= j->scale;
            }
            te__store_row(te__data(out), out->dtype, at, n, x);
        }
        j->infinite[piece] = !finite;
    }
}
static te_result te__cpu_multi_scale(te_ctx *te, const te_op_multi_scale_args *a) {
    te__multi_scale_job j;
    int64_t all, piece;
    j.a = a;
    j.scale = a->scale_device ? a->scale * *te__f32_data(a->scale_device) : a->scale;
    if (!te__pieces_make(te, &j.pieces, a->num_tensors, te__list_entry, a->in)) return TE_ERR_OUT_OF_MEMORY;
    all = j.pieces.first[a->num_tensors];
    j.infinite = (unsigned char *)te__alloc(te, (size_t)all);
    if (!j.infinite) {
        te__pieces_free(te, &j.pieces);
        return TE_ERR_OUT_OF_MEMORY;
    }
    te__parallel_for(te, all, 2, te__multi_scale_pieces, &j);
    if (a->found_inf)
        for (piece = 0; piece < all; piece++)
            if (j.infinite[piece]) *te__f32_data(a->found_inf) = 1.0f;
    te__free(te, j.infinite);
    te__pieces_free(te, &j.pieces);
    return TE_OK;
}

/* ---- loss scaling ---- */

static te_result te__cpu_step_numbers(te_ctx *te, const te_op_step_numbers_args *a) {
    float *skipped = te__f32_data(a->skipped), *found = te__f32_data(a->found_inf),
          *out = te__f32_data(a->bias_correction);
    const float *betas = te__f32_data(a->betas);
    int64_t i, n;
    (void)te;
    if (found && a->count && *found != 0.0f) *skipped += 1.0f;
    if (found) *found = 0.0f;
    n = te__max(1, (a->step_device ? (int64_t)*te__f32_data(a->step_device) : a->step) - (int64_t)*skipped);
    for (i = 0; betas && i < te__numel(a->betas); i++) out[i] = te__adam_unbias(a->no_bias_correction, betas[i], n);
    return TE_OK;
}
static te_result te__cpu_update_scale(te_ctx *te, const te_op_update_scale_args *a) {
    (void)te;
    te__scale_after(te__f32_data(a->scale), te__f32_data(a->inv_scale), te__f32_data(a->growth_tracker),
                    te__f32_data(a->found_inf), a->growth_factor, a->backoff_factor, (float)a->growth_interval);
    return TE_OK;
}
