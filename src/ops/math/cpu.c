/* ops/math/cpu.c: the reference of copy, fill, random, axpby, sums and embedding. Sums are in double, unless the
 * order of f32 additions is part of the operation. The number of threads changes no bit. */

/* The number of elements in a piece of work. Three pieces in f32 fit into the first-level cache. */
enum { TE__MATH_PIECE = 2048 };

/* ---- copy ---- */

typedef struct te__copy_job {
    te__copy_walk walk;
    const char *src;
    char *dst;
    te_dtype src_dtype, dst_dtype;
    bool raw;
    int64_t pieces; /* pieces of one run along the last dimension */
} te__copy_job;

static int64_t te__load_integer(const void *p, te_dtype dtype, int64_t i) {
    return dtype == TE_U8 ? ((const uint8_t *)p)[i] : te__load_index(p, dtype, i);
}
static void te__store_integer(void *p, te_dtype dtype, int64_t i, int64_t v) {
    if (dtype == TE_U8)
        ((uint8_t *)p)[i] = (uint8_t)v;
    else if (dtype == TE_I32)
        ((int32_t *)p)[i] = (int32_t)(uint32_t)v;
    else
        ((int64_t *)p)[i] = v;
}
static void te__copy_raw(const char *src, int64_t src_stride, char *dst, int64_t dst_stride, int64_t n, int64_t size) {
    int64_t i;
    if (src_stride == 1 && dst_stride == 1) {
        memcpy(dst, src, (size_t)(n * size));
        return;
    }
    for (i = 0; i < n; i++) memcpy(dst + i * dst_stride * size, src + i * src_stride * size, (size_t)size);
}
static void te__copy_convert(const te__copy_job *j, const char *src, int64_t src_stride, char *dst, int64_t dst_stride,
                             int64_t n) {
    float row[TE__MATH_PIECE];
    int64_t i;
    if (te__is_integer(j->src_dtype) && te__is_integer(j->dst_dtype)) {
        for (i = 0; i < n; i++)
            te__store_integer(dst, j->dst_dtype, i * dst_stride, te__load_integer(src, j->src_dtype, i * src_stride));
        return;
    }
    if (src_stride == 1) {
        te__load_row(src, j->src_dtype, 0, n, row);
    } else {
        for (i = 0; i < n; i++) row[i] = te__load_element(src, j->src_dtype, i * src_stride);
    }
    if (dst_stride == 1) {
        te__store_row(dst, j->dst_dtype, 0, n, row);
    } else {
        for (i = 0; i < n; i++) te__store_row(dst, j->dst_dtype, i * dst_stride, 1, row + i);
    }
}
/* Copies pieces `begin` to `end` - 1. A piece has TE__MATH_PIECE elements along the last dimension. */
static void te__copy_pieces(void *user, int64_t begin, int64_t end) {
    const te__copy_job *j = (const te__copy_job *)user;
    const te__copy_walk *w = &j->walk;
    int64_t src_size = te__dtype_size(j->src_dtype), dst_size = te__dtype_size(j->dst_dtype), piece;
    int last = w->ndim - 1, d;
    for (piece = begin; piece < end; piece++) {
        int64_t run = piece / j->pieces, first = (piece - run * j->pieces) * TE__MATH_PIECE;
        int64_t n = te__min(TE__MATH_PIECE, w->shape[last] - first);
        int64_t from = first * w->src[last], to = first * w->dst[last];
        for (d = last - 1; d >= 0; d--) {
            from += run % w->shape[d] * w->src[d];
            to += run % w->shape[d] * w->dst[d];
            run /= w->shape[d];
        }
        if (j->raw)
            te__copy_raw(j->src + from * src_size, w->src[last], j->dst + to * dst_size, w->dst[last], n, src_size);
        else
            te__copy_convert(j, j->src + from * src_size, w->src[last], j->dst + to * dst_size, w->dst[last], n);
    }
}
static void te__copy_apart(te_ctx *te, const te_op_copy_args *a) {
    te__copy_job j;
    int64_t n = te__numel(a->src), run;
    if (n == 0) return;
    te__copy_walk_make(&j.walk, a->src, a->dst);
    j.src = (const char *)te__data(a->src);
    j.dst = (char *)te__data(a->dst);
    j.src_dtype = a->src->dtype;
    j.dst_dtype = a->dst->dtype;
    j.raw = te__copy_is_raw(j.src_dtype, j.dst_dtype);
    run = j.walk.shape[j.walk.ndim - 1];
    j.pieces = te__div_up(run, TE__MATH_PIECE);
    te__parallel_for(te, n / run * j.pieces, te__max(1, 16384 / te__min(run, TE__MATH_PIECE)), te__copy_pieces, &j);
}
static te_result te__cpu_copy(te_ctx *te, const te_op_copy_args *a) {
    te__copy_sides sides = te__copy_sides_of(a);
    te__copy_detour d;
    size_t bytes;
    void *memory;
    if (sides == TE__COPY_APART) te__copy_apart(te, a);
    if (sides != TE__COPY_OVERLAPS) return TE_OK;
    bytes = (size_t)te__copy_detour_bytes(a);
    memory = te__alloc(te, bytes);
    if (!memory) return TE_ERR_OUT_OF_MEMORY;
    te__copy_detour_make(&d, a, memory);
    te__copy_apart(te, &d.there);
    te__copy_apart(te, &d.back);
    te__free(te, memory);
    return TE_OK;
}

/* ---- fill, random, axpby: pieces of a flat array ---- */

static int64_t te__math_pieces(int64_t n) { return te__div_up(n, TE__MATH_PIECE); }
static int64_t te__math_piece_size(int64_t piece, int64_t n) {
    return te__min(TE__MATH_PIECE, n - piece * TE__MATH_PIECE);
}

static te_result te__cpu_fill(te_ctx *te, const te_op_fill_args *a) {
    uint64_t bits = te__fill_bits(a->dst->dtype, a->value);
    int64_t n = te__numel(a->dst), i;
    void *dst = te__data(a->dst);
    (void)te;
    if (n == 0) return TE_OK;
    switch (te__dtype_size(a->dst->dtype)) {
    case 1: memset(dst, (int)bits, (size_t)n); break;
    case 2:
        for (i = 0; i < n; i++) ((uint16_t *)dst)[i] = (uint16_t)bits;
        break;
    case 4:
        for (i = 0; i < n; i++) ((uint32_t *)dst)[i] = (uint32_t)bits;
        break;
    case 8:
        for (i = 0; i < n; i++) ((uint64_t *)dst)[i] = bits;
        break;
    }
    return TE_OK;
}

static void te__random_pieces(void *user, int64_t begin, int64_t end) {
    const te_op_random_args *a = (const te_op_random_args *)user;
    float v[TE__MATH_PIECE], below = te__random_below(a), width = a->b - a->a;
    int64_t n = te__numel(a->dst), piece, i, k;
    for (piece = begin; piece < end; piece++) {
        for (i = 0; i < TE__MATH_PIECE; i += 4) {
            uint32_t word[4];
            te__philox(a->seed, a->offset, (uint64_t)(piece * TE__MATH_PIECE + i) / 4, word);
            if (a->kind == TE_RANDOM_NORMAL) {
                te__normal2(word[0], word[1], v + i);
                te__normal2(word[2], word[3], v + i + 2);
                for (k = 0; k < 4; k++) v[i + k] = te__fma(v[i + k], a->b, a->a);
            } else {
                for (k = 0; k < 4; k++) {
                    float u = te__fma(te__uniform01(word[k]), width, a->a);
                    v[i + k] = u < below ? u : below;
                }
            }
        }
        te__store_row(te__data(a->dst), a->dst->dtype, piece * TE__MATH_PIECE, te__math_piece_size(piece, n), v);
    }
}
static te_result te__cpu_random(te_ctx *te, const te_op_random_args *a) {
    te_op_random_args args = *a;
    te__rng_read(te__data(a->rng), &args.seed, &args.offset);
    te__parallel_for(te, te__math_pieces(te__numel(a->dst)), 1, te__random_pieces, &args);
    return TE_OK;
}

/* Returns alpha, multiplied and divided by the device scalars. */
static float te__axpby_alpha(const te_op_axpby_args *a) {
    float alpha = a->alpha_device ? a->alpha * *te__f32_data(a->alpha_device) : a->alpha;
    float divisor = a->divide_device ? *te__f32_data(a->divide_device) : 1.0f;
    return divisor > 1.0f ? alpha / divisor : alpha;
}
static void te__axpby_pieces(void *user, int64_t begin, int64_t end) {
    const te_op_axpby_args *a = (const te_op_axpby_args *)user;
    float x[TE__MATH_PIECE], y[TE__MATH_PIECE], alpha = te__axpby_alpha(a), beta = a->beta;
    int64_t n = te__numel(a->x), piece, i;
    for (piece = begin; piece < end; piece++) {
        int64_t at = piece * TE__MATH_PIECE, size = te__math_piece_size(piece, n);
        te__load_row(te__data(a->x), a->x->dtype, at, size, x);
        if (a->y) {
            te__load_row(te__data(a->y), a->y->dtype, at, size, y);
            for (i = 0; i < size; i++) x[i] = alpha * x[i] + beta * y[i];
        } else {
            for (i = 0; i < size; i++) x[i] *= alpha;
        }
        te__store_row(te__data(a->out), a->out->dtype, at, size, x);
    }
}
static te_result te__cpu_axpby(te_ctx *te, const te_op_axpby_args *a) {
    te_op_axpby_args args = *a;
    te__parallel_for(te, te__math_pieces(te__numel(a->x)), 8, te__axpby_pieces, &args);
    return TE_OK;
}

static void te__mul_pieces(void *user, int64_t begin, int64_t end) {
    const te_op_mul_args *a = (const te_op_mul_args *)user;
    float x[TE__MATH_PIECE], y[TE__MATH_PIECE];
    const bool by_rows = te__mul_by_rows(a);
    int64_t n = te__numel(a->x), columns = te__cols(a->x), piece, i;
    for (piece = begin; piece < end; piece++) {
        int64_t at = piece * TE__MATH_PIECE, size = te__math_piece_size(piece, n);
        te__load_row(te__data(a->x), a->x->dtype, at, size, x);
        if (!by_rows) te__load_row(te__data(a->y), a->y->dtype, at, size, y);
        for (i = 0; i < size; i++) {
            if (by_rows && (i == 0 || (at + i) % columns == 0))
                te__load_row(te__data(a->y), a->y->dtype, (at + i) / columns, 1, y);
            x[i] *= y[by_rows ? 0 : i];
        }
        te__store_row(te__data(a->out), a->out->dtype, at, size, x);
    }
}
static te_result te__cpu_mul(te_ctx *te, const te_op_mul_args *a) {
    te_op_mul_args args = *a;
    te__parallel_for(te, te__math_pieces(te__numel(a->x)), 8, te__mul_pieces, &args);
    return TE_OK;
}

/* ---- sums ---- */

static void te__row_dot_rows(void *user, int64_t begin, int64_t end) {
    const te_op_row_dot_args *a = (const te_op_row_dot_args *)user;
    float x[TE__MATH_PIECE], y[TE__MATH_PIECE];
    int64_t n = te__cols(a->x), row, piece, i;
    for (row = begin; row < end; row++) {
        double sum = 0;
        for (piece = 0; piece < te__math_pieces(n); piece++) {
            int64_t at = row * n + piece * TE__MATH_PIECE, size = te__math_piece_size(piece, n);
            te__load_row(te__data(a->x), a->x->dtype, at, size, x);
            te__load_row(te__data(a->y), a->y->dtype, at, size, y);
            for (i = 0; i < size; i++) sum += (double)x[i] * y[i];
        }
        x[0] = (float)sum;
        te__store_row(te__data(a->out), a->out->dtype, row, 1, x);
    }
}
static te_result te__cpu_row_dot(te_ctx *te, const te_op_row_dot_args *a) {
    te_op_row_dot_args args = *a;
    te__parallel_for(te, te__rows(a->x), 8, te__row_dot_rows, &args);
    return TE_OK;
}

static void te__argmax_rows(void *user, int64_t begin, int64_t end) {
    const te_op_argmax_args *a = (const te_op_argmax_args *)user;
    float x[TE__MATH_PIECE];
    int64_t n = te__cols(a->x), row, piece, i;
    for (row = begin; row < end; row++) {
        unsigned long long best = 0;
        for (piece = 0; piece < te__math_pieces(n); piece++) {
            const int64_t first = piece * TE__MATH_PIECE, size = te__math_piece_size(piece, n);
            te__load_row(te__data(a->x), a->x->dtype, row * n + first, size, x);
            for (i = 0; i < size; i++) {
                unsigned bits;
                unsigned long long key;
                memcpy(&bits, &x[i], sizeof(bits));
                key = te__argmax_key(bits, first + i);
                best = key > best ? key : best;
            }
        }
        te__int_data(a->out)[row] = te__argmax_index(best);
    }
}
static te_result te__cpu_argmax(te_ctx *te, const te_op_argmax_args *a) {
    te_op_argmax_args args = *a;
    te__parallel_for(te, te__rows(a->x), 1, te__argmax_rows, &args);
    return TE_OK;
}

/* A sum cuts its array into this number of parts, whatever the number of threads. */
enum { TE__SUM_PARTS = 64 };
typedef struct te__sum_job {
    const te_op_sum_args *a;
    double part[TE__SUM_PARTS];
} te__sum_job;

static void te__sum_parts(void *user, int64_t begin, int64_t end) {
    te__sum_job *j = (te__sum_job *)user;
    const te_tensor *x = j->a->x;
    float v[TE__MATH_PIECE];
    int64_t n = te__numel(x), pieces = te__math_pieces(n), part, piece, i;
    for (part = begin; part < end; part++) {
        double sum[4] = TE_ZERO;
        for (piece = pieces * part / TE__SUM_PARTS; piece < pieces * (part + 1) / TE__SUM_PARTS; piece++) {
            int64_t size = te__math_piece_size(piece, n);
            te__load_row(te__data(x), x->dtype, piece * TE__MATH_PIECE, size, v);
            for (i = 0; i + 4 <= size; i += 4) {
                sum[0] += v[i];
                sum[1] += v[i + 1];
                sum[2] += v[i + 2];
                sum[3] += v[i + 3];
            }
            for (; i < size; i++) sum[0] += v[i];
        }
        j->part[part] = sum[0] + sum[1] + sum[2] + sum[3];
    }
}
static te_result te__cpu_sum(te_ctx *te, const te_op_sum_args *a) {
    te__sum_job j;
    double sum = 0;
    int i;
    j.a = a;
    te__parallel_for(te, TE__SUM_PARTS, te__max(1, TE__SUM_PARTS * 32768 / te__max(1, te__numel(a->x))), te__sum_parts,
                     &j);
    for (i = 0; i < TE__SUM_PARTS; i++) sum += j.part[i];
    *te__f32_data(a->out) = (float)(sum * a->scale);
    return TE_OK;
}

enum { TE__COLUMN_BLOCK = 64 };
static void te__column_sum_blocks(void *user, int64_t begin, int64_t end) {
    const te_op_column_sum_args *a = (const te_op_column_sum_args *)user;
    double sum[TE__COLUMN_BLOCK];
    float v[TE__COLUMN_BLOCK];
    int64_t m = te__rows(a->x), n = te__cols(a->x), block, row, i;
    for (block = begin; block < end; block++) {
        int64_t col = block * TE__COLUMN_BLOCK, size = te__min(TE__COLUMN_BLOCK, n - col);
        memset(sum, 0, sizeof(sum));
        for (row = 0; row < m; row++) {
            te__load_row(te__data(a->x), a->x->dtype, row * n + col, size, v);
            for (i = 0; i < size; i++) sum[i] += v[i];
        }
        if (a->accumulate) {
            te__load_row(te__data(a->out), a->out->dtype, col, size, v);
            for (i = 0; i < size; i++) sum[i] += v[i];
        }
        for (i = 0; i < size; i++) v[i] = (float)sum[i];
        te__store_row(te__data(a->out), a->out->dtype, col, size, v);
    }
}
static te_result te__cpu_column_sum(te_ctx *te, const te_op_column_sum_args *a) {
    te_op_column_sum_args args = *a;
    te__parallel_for(te, te__div_up(te__cols(a->x), TE__COLUMN_BLOCK), 1, te__column_sum_blocks, &args);
    return TE_OK;
}

/* ---- embedding ---- */

/* Copies n elements. They begin at index `from` in src, and at index `to` in dst. If the formats differ, converts
 * through f32. */
static void te__copy_row(const te_tensor *src, int64_t from, const te_tensor *dst, int64_t to, int64_t n) {
    float v[TE__MATH_PIECE];
    int64_t at;
    if (src->dtype == dst->dtype) {
        int64_t size = te__dtype_size(src->dtype);
        memcpy((char *)te__data(dst) + to * size, (const char *)te__data(src) + from * size, (size_t)(n * size));
        return;
    }
    for (at = 0; at < n; at += TE__MATH_PIECE) {
        int64_t size = te__min(TE__MATH_PIECE, n - at);
        te__load_row(te__data(src), src->dtype, from + at, size, v);
        te__store_row(te__data(dst), dst->dtype, to + at, size, v);
    }
}
/* Returns the row of the embedding table for ids[i]. This row may lie outside the table. */
static int64_t te__embedding_row(const te_tensor *ids, int64_t i, bool from_end, int64_t size, int64_t start) {
    const int64_t id = te__load_index(te__data(ids), ids->dtype, i);
    return (from_end && id < 0 ? id + size : id) - start;
}
static te_result te__embedding_ids(te_ctx *te, int which, const te_tensor *ids, bool from_end, int64_t size) {
    return te__want_inside(te, from_end ? (int)TE__OUTSIDE_embedding_from_end : which, ids, from_end ? -size : 0, size,
                           NULL);
}
static void te__embedding_fwd_rows(void *user, int64_t begin, int64_t end) {
    const te_op_embedding_fwd_args *a = (const te_op_embedding_fwd_args *)user;
    int64_t vocab = a->table->shape[0], h = a->table->shape[1], size = te__dtype_size(a->y->dtype), token;
    for (token = begin; token < end; token++) {
        int64_t id = te__embedding_row(a->ids, token, a->from_end, a->vocab_size, a->vocab_start);
        if (id >= 0 && id < vocab)
            te__copy_row(a->table, id * h, a->y, token * h, h);
        else
            memset((char *)te__data(a->y) + token * h * size, 0,
                   (size_t)(h * size)); /* all bits 0 are 0 in every float format */
    }
}
static te_result te__cpu_embedding_fwd(te_ctx *te, const te_op_embedding_fwd_args *a) {
    te_op_embedding_fwd_args args = *a;
    if (te__numel(a->y) == 0) return TE_OK;
    if (te__embedding_ids(te, TE__OUTSIDE_embedding_fwd, a->ids, a->from_end, a->vocab_size) != TE_OK)
        return TE_ERR_INVALID;
    te__parallel_for(te, te__numel(a->ids), 64, te__embedding_fwd_rows, &args);
    return TE_OK;
}

/* order: the tokens sorted by id. Tokens with the same id are in ascending order. start[v]: where the tokens of id v
 * begin in `order`. */
typedef struct te__embedding_job {
    const te_op_embedding_bwd_args *a;
    int64_t *start, *order;
} te__embedding_job;

static void te__embedding_bwd_rows(void *user, int64_t begin, int64_t end) {
    const te__embedding_job *j = (const te__embedding_job *)user;
    const te_op_embedding_bwd_args *a = j->a;
    int64_t h = a->dtable->shape[1], id, at, token, i;
    float sum[TE__MATH_PIECE], v[TE__MATH_PIECE];
    for (id = begin; id < end; id++) {
        if (a->accumulate && j->start[id] == j->start[id + 1]) continue;
        for (at = 0; at < h; at += TE__MATH_PIECE) {
            int64_t size = te__min(TE__MATH_PIECE, h - at);
            for (i = 0; i < size; i++) sum[i] = 0.0f;
            for (token = j->start[id]; token < j->start[id + 1]; token++) {
                te__load_row(te__data(a->dy), a->dy->dtype, j->order[token] * h + at, size, v);
                for (i = 0; i < size; i++) sum[i] += v[i];
            }
            if (a->accumulate) {
                te__load_row(te__data(a->dtable), a->dtable->dtype, id * h + at, size, v);
                for (i = 0; i < size; i++) sum[i] += v[i];
            }
            te__store_row(te__data(a->dtable), a->dtable->dtype, id * h + at, size, sum);
        }
    }
}
static te_result te__cpu_embedding_bwd(te_ctx *te, const te_op_embedding_bwd_args *a) {
    te__embedding_job j;
    int64_t tokens = te__numel(a->ids), vocab = a->dtable->shape[0], i, id;
    size_t start_bytes = (size_t)(vocab + 2) * sizeof(int64_t), order_bytes = (size_t)tokens * sizeof(int64_t);
    if (te__numel(a->dtable) == 0) return TE_OK;
    if (te__embedding_ids(te, TE__OUTSIDE_embedding_bwd, a->ids, a->from_end, a->vocab_size) != TE_OK)
        return TE_ERR_INVALID;
    j.a = a;
    j.start = (int64_t *)te__alloc_zero(te, start_bytes);
    if (!j.start) return TE_ERR_OUT_OF_MEMORY;
    j.order = (int64_t *)te__alloc(te, order_bytes);
    if (!j.order) {
        te__free(te, j.start);
        return TE_ERR_OUT_OF_MEMORY;
    }
    /* A counting sort. The first pass counts the tokens of each id v in start[v + 2]. Sums of these counts turn
     * start[v + 1] into the place of v's first token in `order`. The last pass writes the tokens, and increments
     * start[v + 1] for each token of v. In the end, start[v] is where the tokens of v begin. */
    for (i = 0; i < tokens; i++) {
        id = te__embedding_row(a->ids, i, a->from_end, a->vocab_size, a->vocab_start);
        if (id >= 0 && id < vocab) j.start[id + 2]++;
    }
    for (i = 2; i < vocab + 2; i++) j.start[i] += j.start[i - 1];
    for (i = 0; i < tokens; i++) {
        id = te__embedding_row(a->ids, i, a->from_end, a->vocab_size, a->vocab_start);
        if (id >= 0 && id < vocab) j.order[j.start[id + 1]++] = i;
    }
    te__parallel_for(te, vocab, 64, te__embedding_bwd_rows, &j);
    te__free(te, j.order);
    te__free(te, j.start);
    return TE_OK;
}
