/* ops/optim/cpu.c: reference of Adam, gradient norm and scaling. A list of tensors is one row of pieces, so that many small tensors keep all
 * threads busy; a piece is a matter of shapes alone. */

enum { TE__OPTIM_PIECE = 8192, TE__OPTIM_ROW = 512 };

/* first[t]: the first piece of tensor t; first[num]: all pieces. */
typedef struct te__pieces {
    int64_t *first;
    int num;
} te__pieces;

/* `tensor(list, t)` is any tensor of entry t that has its size. False when there is no memory. */
static bool te__pieces_make(te_ctx *te, te__pieces *p, int num, const te_tensor *(*tensor)(const void *list, int t), const void *list) {
    int t;
    p->num = num;
    p->first = (int64_t *)te__alloc(te, (size_t)(num + 1) * sizeof(int64_t));
    if (!p->first) return false;
    p->first[0] = 0;
    for (t = 0; t < num; t++) p->first[t + 1] = p->first[t] + te__div_up(te__numel(tensor(list, t)), TE__OPTIM_PIECE);
    return true;
}
static void te__pieces_free(te_ctx *te, te__pieces *p) { te__free(te, p->first, (size_t)(p->num + 1) * sizeof(int64_t)); }
/* The tensor of a piece, and where in it the piece begins. */
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

typedef struct te__adam_job {
    const te_op_adam_args *a;
    te__pieces pieces;
    float grad_scale, lr, unbias1, unbias2;
} te__adam_job;

static const te_tensor *te__adam_entry(const void *list, int t) { return ((const te_adam_tensor *)list)[t].param; }

static void te__adam_row(const te__adam_job *j, float decay, const float *g, float *p, float *m, float *v, int64_t n) {
    float beta1 = j->a->beta1, beta2 = j->a->beta2, rest1 = 1.0f - beta1, rest2 = 1.0f - beta2, eps = j->a->eps;
    float grad_scale = j->grad_scale, lr = j->lr, unbias1 = j->unbias1, unbias2 = j->unbias2;
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
static void te__adam_pieces(void *user, int64_t begin, int64_t end) {
    const te__adam_job *j = (const te__adam_job *)user;
    float g[TE__OPTIM_ROW], row[TE__OPTIM_ROW];
    int64_t piece;
    for (piece = begin; piece < end; piece++) {
        int64_t at, stop;
        int place = te__piece_tensor(&j->pieces, piece, &at);
        const te_adam_tensor *t = &j->a->tensors[place];
        float decay = place < j->a->num_tensors - j->a->num_undecayed ? j->a->weight_decay : 0.0f;
        stop = te__min(at + TE__OPTIM_PIECE, te__numel(t->param));
        for (; at < stop; at += TE__OPTIM_ROW) {
            int64_t n = te__min(TE__OPTIM_ROW, stop - at);
            float *m = (float *)te__data(t->m) + at, *v = (float *)te__data(t->v) + at;
            float *p = t->master ? (float *)te__data(t->master) + at : t->param->dtype == TE_F32 ? (float *)te__data(t->param) + at : row;
            te__load_row(te__data(t->grad), t->grad->dtype, at, n, g);
            if (p == row) te__load_row(te__data(t->param), t->param->dtype, at, n, row);
            te__adam_row(j, decay, g, p, m, v, n);
            if (t->master || p == row) te__store_row(te__data(t->param), t->param->dtype, at, n, p);
        }
    }
}
static te_result te__cpu_adam(te_ctx *te, const te_op_adam_args *a) {
    te__adam_job j;
    if (a->found_inf && *(const float *)te__data(a->found_inf) != 0.0f) return TE_OK;
    j.a = a;
    j.grad_scale = a->grad_scale ? *(const float *)te__data(a->grad_scale) : 1.0f;
    j.lr = a->lr_device ? *(const float *)te__data(a->lr_device) : a->lr;
    j.unbias1 = a->bias_correction ? ((const float *)te__data(a->bias_correction))[0] : te__adam_unbias(a->no_bias_correction, a->beta1, a->step);
    j.unbias2 = a->bias_correction ? ((const float *)te__data(a->bias_correction))[1] : te__adam_unbias(a->no_bias_correction, a->beta2, a->step);
    if (!te__pieces_make(te, &j.pieces, a->num_tensors, te__adam_entry, a->tensors)) return TE_ERR_OUT_OF_MEMORY;
    te__parallel_for(te, j.pieces.first[a->num_tensors], 1, te__adam_pieces, &j);
    te__pieces_free(te, &j.pieces);
    return TE_OK;
}

/* ---- norm ---- */

typedef struct te__norm_job {
    const te_op_l2norm_args *a;
    te__pieces pieces;
    double *square; /* of each piece */
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
        if (a->per_tensor) ((float *)te__data(a->per_tensor))[t] = (float)sqrt(sum);
        total += sum;
    }
    te__free(te, j.square, (size_t)all * sizeof(double));
    te__pieces_free(te, &j.pieces);
    norm = (float)sqrt(total);
    clip = a->max_norm / (norm + 1e-6f);
    *(float *)te__data(a->norm) = norm;
    if (a->clip) *(float *)te__data(a->clip) = clip > 1.0f ? 1.0f : clip; /* a comparison, for fminf would lose a NaN */
    return TE_OK;
}

/* ---- scale ---- */

typedef struct te__multi_scale_job {
    const te_op_multi_scale_args *a;
    te__pieces pieces;
    float scale;
    unsigned char *infinite; /* of each piece: something was not finite */
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
    j.scale = a->scale_device ? a->scale * *(const float *)te__data(a->scale_device) : a->scale;
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
            if (j.infinite[piece]) *(float *)te__data(a->found_inf) = 1.0f;
    te__free(te, j.infinite, (size_t)all);
    te__pieces_free(te, &j.pieces);
    return TE_OK;
}
