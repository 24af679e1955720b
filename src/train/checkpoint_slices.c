/* train/checkpoint_slices.c: what a rank has of a tensor of a checkpoint, and where that lies in the whole one. This
 * file must not depend on modules and optimizers.
 *
 * A rank has a slice, successive elements, of its part. A part is the whole tensor, or what the rank has of a tensor
 * that ranks divide:
 *
 *     rows, in blocks (a column-parallel weight)   successive elements in the whole, one run for each block
 *     columns (a row-parallel weight)              a piece of each row
 *     experts, stacked                             successive elements in the whole
 *
 * The files hold runs of the whole tensor. Columns would make a run of each row, so ranks exchange the rows that they
 * have together, one tensor at a time: each then has some rows of all columns, as many bytes as it had before. A rank
 * that reads columns reads whole rows, and keeps its own. */

typedef struct te__ckpt_slice {
    char *name;        /* of the whole tensor; owned */
    te_tensor *tensor; /* this rank's elements; empty if it has none */
    te_dtype dtype;
    int ndim;          /* of the whole tensor in the files */
    int64_t shape[TE_MAX_DIMS];
    int64_t unit;      /* bytes of an element */
    int64_t start, length; /* the slice, in elements of the part */
    const te__split *split; /* how ranks divide the whole; NULL: the part is the whole */
    int64_t outer, own, inner; /* elements of the part: products of its sizes before the dimension that ranks divide,
                                * the size of that dimension, and the product of those behind it */
    te_group *shard_group; /* the ranks that have slices; NULL: this one alone */
    te__shard *value;  /* the parameter whose value this is, or NULL: a state */
    te_tensor *stored; /* saving: the parameter, stored quantized, whose decoded value this is; or NULL */
    bool codes;        /* `tensor` is a copy of rows of codes of `value`, number `part` */
    int part;
} te__ckpt_slice;

/* Describes the part that a rank has of a tensor: `shape`, and how ranks divide the whole. */
static void te__ckpt_set_part(te__ckpt_slice *x, int ndim, const int64_t *shape, const te__split *split) {
    const int dim = split && split->dim > 0 ? split->dim : 0;
    int i;
    x->ndim = ndim;
    memcpy(x->shape, shape, (size_t)ndim * sizeof(int64_t));
    x->split = split;
    x->outer = x->own = x->inner = 1;
    for (i = 0; i < ndim; i++) *(i < dim ? &x->outer : i == dim ? &x->own : &x->inner) *= shape[i];
    x->start = 0;
    x->length = x->outer * x->own * x->inner;
    if (split && (split->dim >= 0 || split->own == TE__OWN_STACKED)) x->shape[dim] *= split->size;
}
static te_group *te__ckpt_split_group(const te__ckpt_slice *x) { return x->split ? x->split->group : NULL; }
/* Returns whether ranks have columns of the tensor. */
static bool te__ckpt_has_columns(const te__ckpt_slice *x) { return x->split && x->split->dim > 0; }
static te_tensor *te__ckpt_bytes_of(const te_tensor *x, const te__ckpt_slice *s, int64_t at, int64_t n) {
    return te__alias_1d(x, at * s->unit, TE_U8, n * s->unit);
}

/* Finds run i of a slice whose ranks have no columns: n elements, from `at` of the slice on, which begin at `whole` in
 * the whole tensor. Returns false behind the last run. */
static bool te__ckpt_run(const te__ckpt_slice *x, int i, int64_t *at, int64_t *whole, int64_t *n) {
    const te__split *s = x->split;
    const int rank = s ? te__group_rank(s->group) : 0;
    int64_t from = 0, to = 0, first, last;
    int k;
    *at = 0;
    *n = x->length;
    *whole = x->start;
    if (s && s->dim < 0 && s->own == TE__OWN_STACKED) *whole += rank * x->own * x->inner;
    if (!s || s->dim < 0) return i == 0;
    if (i >= te__max(s->sharding.num_blocks, 1)) return false;
    for (k = 0; k < i; k++) {
        from += s->sharding.block[k];
        to += s->sharding.block[k] / s->size;
    }
    first = te__max(to * x->inner, x->start);
    to += s->sharding.num_blocks ? s->sharding.block[i] / s->size : x->own;
    last = te__min(to * x->inner, x->start + x->length);
    *n = te__max(last - first, 0);
    *at = first - x->start;
    to -= s->sharding.num_blocks ? s->sharding.block[i] / s->size : x->own;
    from += rank * (s->sharding.num_blocks ? s->sharding.block[i] / s->size : x->own);
    *whole = first + (from - to) * x->inner;
    return true;
}

/* A slice of columns, as rows of the part: it may begin and end within a row. */
typedef struct te__ckpt_rows {
    int64_t width, all;  /* elements of a row of the part, and of the whole */
    int64_t head;        /* elements before the first row that the slice has entirely */
    int64_t first, rows; /* these rows */
    int64_t tail;        /* elements behind them */
} te__ckpt_rows;
static te__ckpt_rows te__ckpt_rows_of(const te__ckpt_slice *x) {
    te__ckpt_rows r;
    r.width = x->own * x->inner;
    r.all = r.width * x->split->size;
    r.first = te__div_up(x->start, r.width);
    r.rows = te__max((x->start + x->length) / r.width - r.first, 0);
    r.head = te__min(r.first * r.width - x->start, x->length);
    r.tail = x->length - r.head - r.rows * r.width;
    return r;
}
/* Returns where the element `at` of a slice of columns lies in the whole tensor. */
static int64_t te__ckpt_column_at(const te__ckpt_slice *x, const te__ckpt_rows *r, int64_t at) {
    const int64_t row = (x->start + at) / r->width, column = (x->start + at) % r->width;
    return row * r->all + te__group_rank(x->split->group) * r->width + column;
}
/* The rows that this rank has of all columns after the exchange: *n of them, from number *first of the slice's rows. */
static void te__ckpt_share_of_rows(const te__ckpt_slice *x, const te__ckpt_rows *r, int rank, int64_t *first,
                                   int64_t *n) {
    const int64_t chunk = te__div_up(r->rows, x->split->size);
    *first = te__min(rank * chunk, r->rows);
    *n = te__min(chunk, r->rows - *first);
}
/* Exchanges the rows of a slice of columns among the ranks that divide them, which must all call it. Returns the bytes
 * [rows, bytes of a row] of all columns of this rank's share. `own_rows`: the slice's elements; NULL after an error. */
static te_tensor *te__ckpt_exchange_rows(const te__ckpt_slice *x, te_ctx *te, te_tensor *own_rows) {
    const te__ckpt_rows r = te__ckpt_rows_of(x);
    const int size = x->split->size;
    const int64_t width = r.width * x->unit;
    int64_t *counts = (int64_t *)te__alloc(te, 2 * (size_t)size * sizeof(int64_t)), first, own, shape[2];
    te_tensor *from, *got = NULL, *rows = NULL, *a, *b;
    te_result result = TE_OK;
    int k;
    te__ckpt_share_of_rows(x, &r, te__group_rank(x->split->group), &first, &own);
    for (k = 0; k < size && counts; k++) {
        te__ckpt_share_of_rows(x, &r, k, &first, &counts[k]);
        counts[size + k] = own;
    }
    from = te_tensor_contiguous(own_rows);
    if (from) from = te__alias_2d(from, r.head * x->unit, TE_U8, r.rows, width);
    shape[0] = own * size;
    shape[1] = width;
    got = te_tensor_empty(te, TE_U8, 2, shape);
    shape[0] = own;
    shape[1] = width * size;
    rows = te_tensor_empty(te, TE_U8, 2, shape);
    if (!counts || !from || !got || !rows) result = te_error_code(te);
    result = result == TE_OK ? te__lines_exchanged(x->split->group, from, counts, got, counts + size)
                             : te__refuse(x->split->group, TE__ALL_TO_ALL, result);
    te__free(te, counts);
    if (result != TE_OK || own == 0) return result == TE_OK ? rows : NULL;
    a = te__shard_view(got, 0, TE_U8, size, own, width, own * width, width);
    b = te__shard_view(rows, 0, TE_U8, size, own, width, width, size * width);
    return a && b && te_tensor_copy(b, a) == TE_OK ? rows : NULL;
}

/* The bytes of whole rows that reading a slice needs beside it. */
static int64_t te__ckpt_scratch_bytes(const te__ckpt_slice *x) {
    te__ckpt_rows r;
    if (!te__ckpt_has_columns(x) || x->length == 0) return 0;
    r = te__ckpt_rows_of(x);
    return (r.rows + (r.head > 0) + (r.tail > 0)) * r.all * x->unit;
}
/* Copies this rank's columns from `rows`, the bytes of all rows that the slice touches, to `to`. */
static te_result te__ckpt_take_columns(const te__ckpt_slice *x, const te_tensor *rows, const te_tensor *to) {
    const te__ckpt_rows r = te__ckpt_rows_of(x);
    const int64_t before = x->start / r.width * r.all, width = r.width * x->unit, all = r.all * x->unit;
    te_result result = TE_OK;
    int i;
    for (i = 0; i < 3 && result == TE_OK; i++) { /* the head, whole rows, the tail */
        const int64_t at = i == 0 ? 0 : i == 1 ? r.head : x->length - r.tail,
                      n = i == 0 ? r.head * x->unit : i == 1 ? width : r.tail * x->unit, count = i == 1 ? r.rows : 1;
        te_tensor *a, *b;
        if (n * count == 0) continue;
        a = te__shard_view(rows, (te__ckpt_column_at(x, &r, at) - before) * x->unit, TE_U8, 1, count, n, count * all,
                           all);
        b = te__shard_view(to, at * x->unit, TE_U8, 1, count, n, count * n, n);
        result = a && b ? te_tensor_copy(b, a) : te_error_code(to->te);
    }
    return result;
}
/* Reads a slice. `scratch`: te__ckpt_scratch_bytes. */
static te_result te__ckpt_read_slice(const te__ckpt_files *files, const te__ckpt_slice *x, const te_tensor *scratch) {
    te_tensor *to = x->tensor, *part;
    const int64_t bytes = te__ckpt_scratch_bytes(x);
    int64_t at, whole, n;
    te_result result = TE_OK;
    int i;
    if (x->length == 0) return TE_OK;
    te__frame_begin(files->te);
    if (!te__is_contiguous(to)) to = te__empty_like(to, to->dtype);
    if (!to) result = te_error_code(files->te);
    if (bytes > 0 && result == TE_OK) {
        part = te__alias_1d(scratch, 0, TE_U8, bytes);
        whole = x->start / (x->own * x->inner) * x->own * x->inner * x->split->size;
        result = part ? te__ckpt_read_range(files, x->name, (uint64_t)(whole * x->unit), part)
                      : te_error_code(files->te);
        if (result == TE_OK) result = te__ckpt_take_columns(x, part, to);
    }
    for (i = 0; bytes == 0 && result == TE_OK && te__ckpt_run(x, i, &at, &whole, &n); i++) {
        if (n == 0) continue;
        part = te__ckpt_bytes_of(to, x, at, n);
        result = part ? te__ckpt_read_range(files, x->name, (uint64_t)(whole * x->unit), part)
                      : te_error_code(files->te);
    }
    if (result == TE_OK && to != x->tensor) result = te_tensor_copy(x->tensor, to);
    te__frame_end(files->te, NULL, 0);
    return result;
}
/* Returns a new tensor with this rank's part, of the shape of `like`, of a tensor of the checkpoint. */
static te_tensor *te__ckpt_read_part(const te__ckpt_files *files, const char *name, const te_tensor *like,
                                     const te__split *split) {
    te__ckpt_slice x = TE_ZERO;
    te_tensor *scratch;
    int64_t bytes;
    x.name = (char *)(uintptr_t)name;
    x.dtype = te__ckpt_find(files, name)->dtype;
    x.unit = te__dtype_size(x.dtype);
    te__ckpt_set_part(&x, like->ndim, like->shape, split);
    x.tensor = te_tensor_empty(files->te, x.dtype, like->ndim, like->shape);
    bytes = te__ckpt_scratch_bytes(&x);
    scratch = bytes > 0 ? te__empty_1d(files->te, TE_U8, bytes) : NULL;
    if (!x.tensor || (bytes > 0 && !scratch)) return NULL;
    return te__checked(x.tensor, te__ckpt_read_slice(files, &x, scratch));
}
