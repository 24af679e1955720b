/* onnx/memory.c: finds the item of the graph that has the value of a tensor. This file must not depend on what
 * operations compute.
 *
 * The export keeps a list of all writes to memory (te__onnx_write). Parameters and inputs come first. A tensor has the
 * value of the last write to its memory. Views are not recorded: the graph reshapes, slices, transposes or expands the
 * written value to the tensor's shape. If several calls wrote ranges of a tensor, its value is a Concat. Memory without
 * a write is a constant.
 *
 * The graph computes in f32 and 64-bit integers. A value is cast to its tensor's dtype where the tensor is written, so
 * values are rounded where te.h rounds them. The graph needs no 16-bit arithmetic, which onnxruntime's CPU kernels lack
 * for bfloat16. */

/* One tensor of a call: `first` from the run with the caller's sizes, `second` from the run with larger sizes. */
typedef struct te__onnx_pair {
    te_tensor first, second; /* shape and memory; not owned */
} te__onnx_pair;

/* The content of a row_id_map, which sorts the copies of tokens by expert. In the graph it is four vectors of 64-bit
 * integers (see onnx/moe.c), each with one element for each copy. */
typedef struct te__onnx_map {
    bool is_map;
    int64_t topk; /* index map: the number of experts of each token; mask map: 0 */
    int source, place, expert, destination; /* indices of the graph items; TE__ONNX_FAILED: not known */
} te__onnx_map;

typedef struct te__onnx_write {
    te__onnx_pair x;
    int value;          /* index of the graph item with the value of x; TE__ONNX_FAILED if ONNX cannot express it */
    bool wide;          /* true: the item is f32 or int64 and, if x has codes, has the decoded numbers; false: the item
                         * has the dtype of x */
    te__onnx_map map;   /* if x is a row_id_map: its content */
    te__onnx_size filled; /* if x holds integers that are all equal: their value; 0: unknown */
    int lengths;        /* if x is cu_seqlens: index of the graph item with the lengths of the sequences; otherwise
                         * 0 */
    const char *by;     /* the operation that wrote x, for messages (static); NULL: x is a parameter, an input or a
                         * constant */
    te_tensor *tensor;  /* the parameter or constant itself, not owned; NULL if x is neither */
    char *path;         /* the name of the parameter; NULL if x is none */
} te__onnx_write;

static te__onnx_pair te__onnx_pair_of(const te_tensor *first, const te_tensor *second) {
    te__onnx_pair p;
    p.first = *first;
    p.second = *second;
    return p;
}
static te__onnx_size te__onnx_dim(const te__onnx_pair *x, int i) {
    te__onnx_size s;
    if (i < 0) i += x->first.ndim;
    s.first = x->first.shape[i];
    s.second = x->second.shape[i];
    return s;
}
static te__onnx_size te__onnx_stride(const te__onnx_pair *x, int i) {
    te__onnx_size s;
    s.first = x->first.stride[i];
    s.second = x->second.stride[i];
    return s;
}
static void te__onnx_dims(const te__onnx_pair *x, te__onnx_size shape[TE_MAX_DIMS]) {
    int i;
    for (i = 0; i < x->first.ndim; i++) shape[i] = te__onnx_dim(x, i);
}
/* Returns x as n dimensions in the same memory. The result is contiguous, but the stride of its second last dimension
 * is `row`. */
static te__onnx_pair te__onnx_as(const te__onnx_pair *x, int n, const te__onnx_size *shape, te__onnx_size row) {
    te__onnx_pair y = *x;
    te__onnx_size stride = te__onnx_fixed(1);
    int i;
    y.first.ndim = y.second.ndim = n;
    for (i = n - 1; i >= 0; i--) {
        if (i == n - 2) stride = row;
        y.first.shape[i] = shape[i].first;
        y.second.shape[i] = shape[i].second;
        y.first.stride[i] = stride.first;
        y.second.stride[i] = stride.second;
        stride = te__onnx_times(stride, shape[i]);
    }
    return y;
}

/* ---- the list of writes ---- */

static bool te__onnx_spans_meet(const te_tensor *x, const te_tensor *y) {
    te__span s, t;
    if (x->buffer != y->buffer) return false;
    /* Strides cannot describe FP4 codes, because a code takes half a byte. But a buffer with FP4 codes holds nothing
     * else, so two tensors in such a buffer count as overlapping. */
    if (x->dtype == TE_F4E2M1 || y->dtype == TE_F4E2M1) return true;
    te__span_of(x, &s);
    te__span_of(y, &t);
    return te__spans_meet(s, t) && te__tensors_meet(x, y);
}
static te__onnx_write *te__onnx_write_new(te__onnx *g, const te__onnx_pair *x, int value) {
    te__onnx_write *w;
    if (!te__grow(g->te, (void **)&g->writes, &g->cap_writes, g->num_writes, sizeof(te__onnx_write))) return NULL;
    w = &g->writes[g->num_writes++];
    memset(w, 0, sizeof(*w));
    w->x = *x;
    w->value = value;
    return w;
}
static void te__onnx_memory_free(te__onnx *g) {
    int i;
    for (i = 0; i < g->num_writes; i++) te__free(g->te, g->writes[i].path);
    te__free(g->te, g->writes);
}
/* Searches only the first `before` writes. Returns the index of the last one that overlaps x, or -1 if none does. */
static int te__onnx_last(const te__onnx *g, const te__onnx_pair *x, int before) {
    while (--before >= 0 && !te__onnx_spans_meet(&g->writes[before].x.first, &x->first)) {}
    return before;
}

/* ---- layout of tensors in memory ---- */

/* Writes to `order` the dimensions of x, the largest stride first. Leaves out dimensions of size 1 or stride 0. Returns
 * the number of dimensions in `order`. */
static int te__onnx_order(const te__onnx_pair *x, int order[TE_MAX_DIMS]) {
    int i, k, n = 0;
    for (i = 0; i < x->first.ndim; i++) {
        if (te__onnx_is(te__onnx_dim(x, i), 1) || te__onnx_is(te__onnx_stride(x, i), 0)) continue;
        for (k = n++; k > 0 && x->second.stride[order[k - 1]] < x->second.stride[i]; k--) order[k] = order[k - 1];
        order[k] = i;
    }
    return n;
}
/* Returns true if x fills its memory without gaps. Otherwise sets *gap to i + 1, where order[i] is the innermost
 * dimension with a gap.
 * Example: a 4 x 3 matrix whose rows are 8 elements apart has *gap = 1. */
static bool te__onnx_is_dense(const te__onnx_pair *x, const int *order, int n, int *gap) {
    te__onnx_size expect = te__onnx_fixed(1);
    int i;
    for (i = n - 1; i >= 0; i--) {
        if (!te__onnx_same(te__onnx_stride(x, order[i]), expect)) {
            *gap = i + 1;
            return false;
        }
        expect = te__onnx_times(expect, te__onnx_dim(x, order[i]));
    }
    return true;
}
static bool te__onnx_same_place(const te__onnx_pair *x, const te__onnx_pair *y) {
    int i;
    if (x->first.ndim != y->first.ndim || x->first.offset != y->first.offset || x->second.offset != y->second.offset)
        return false;
    for (i = 0; i < x->first.ndim; i++) {
        if (!te__onnx_same(te__onnx_dim(x, i), te__onnx_dim(y, i))) return false;
        if (!te__onnx_is(te__onnx_dim(x, i), 1) && !te__onnx_same(te__onnx_stride(x, i), te__onnx_stride(y, i)))
            return false;
    }
    return true;
}
static bool te__onnx_divide(te__onnx_size *x, te__onnx_size by, te__onnx_size *rest) {
    if (by.first <= 0 || by.second <= 0) return false;
    rest->first = x->first % by.first;
    rest->second = x->second % by.second;
    x->first /= by.first;
    x->second /= by.second;
    return true;
}

/* Returns the value of a write in f32 or 64 bits. */
static int te__onnx_wide(te__onnx *g, const te__onnx_write *w) {
    if (w->wide) return w->value;
    switch (w->x.first.dtype) {
    case TE_F16:
    case TE_BF16: return te__onnx_cast(g, w->value, TE__ONNX_FLOAT);
    case TE_U8:
    case TE_I16:
    case TE_I32: return te__onnx_cast(g, w->value, TE__ONNX_INT64);
    case TE_F8E4M3:
    case TE_F8E5M2:
        return te__onnx_refuse(
            g,
            "it moves codes%s%s apart from their scale; export the module outside of autocast, where "
            "stored weights are decoded",
            w->path ? " of " : "", w->path ? w->path : "");
    default: return w->value;
    }
}

/* The position of a tensor in a gapless block of memory. Along dimension i the tensor takes size[i] of the block's
 * full[i] elements, from begin[i] on.
 * Example, the last 3 columns of a [4, 8] matrix: full is 4, 8; begin is 0, 5; size is 4, 3. */
typedef struct te__onnx_place {
    int n, order[TE_MAX_DIMS]; /* Dimension i of the block is dimension order[i] of the tensor. The last dimension of
                                * the block may belong to no dimension of the tensor. */
    te__onnx_size full[TE_MAX_DIMS + 1], begin[TE_MAX_DIMS + 1], size[TE_MAX_DIMS + 1];
} te__onnx_place;
/* Finds the position of x in a block of `total` elements at byte `base` of the buffer. Returns false if x is not
 * inside. */
static bool te__onnx_place_of(te__onnx_place *p, const te__onnx_pair *x, te__onnx_size total, te__onnx_size base) {
    te__onnx_size at, rest, outer = total, bytes = te__onnx_fixed(te__max(1, te__dtype_size(x->first.dtype)));
    int i, n = te__onnx_order(x, p->order);
    at.first = x->first.offset - base.first;
    at.second = x->second.offset - base.second;
    if (at.first < 0 || at.second < 0 || !te__onnx_divide(&at, bytes, &rest) || !te__onnx_is(rest, 0)) return false;
    for (i = 0; i <= n; i++) {
        te__onnx_size stride = i < n ? te__onnx_stride(x, p->order[i]) : te__onnx_fixed(1);
        p->full[i] = outer;
        p->begin[i] = at;
        p->size[i] = i < n ? te__onnx_dim(x, p->order[i]) : te__onnx_fixed(1);
        if (!te__onnx_divide(&p->full[i], stride, &rest) || !te__onnx_is(rest, 0)) return false;
        if (!te__onnx_divide(&p->begin[i], stride, &at)) return false;
        if (p->begin[i].first + p->size[i].first > p->full[i].first ||
            p->begin[i].second + p->size[i].second > p->full[i].second)
            return false;
        outer = stride;
    }
    p->n = te__onnx_is(p->full[n], 1) ? n : n + 1;
    return true;
}

/* Returns a graph item with the value of x, made from write w. Sets *fits to false if w does not contain all of x. */
static int te__onnx_view(te__onnx *g, const te__onnx_write *w, const te__onnx_pair *x, bool *fits) {
    int order[TE_MAX_DIMS], back[TE_MAX_DIMS + 1], n, gap, i, k, v;
    te__onnx_size base, total = te__onnx_fixed(1), now[TE_MAX_DIMS], shape[TE_MAX_DIMS];
    te__onnx_place p;
    bool alike, turned = false, broadcast = false;
    *fits = true;
    if (te__onnx_same_place(&w->x, x)) return te__onnx_wide(g, w);
    n = te__onnx_order(&w->x, order);
    *fits = te__onnx_is_dense(&w->x, order, n, &gap);
    if (!*fits) return TE__ONNX_FAILED;
    for (i = 0; i < n; i++) {
        now[i] = te__onnx_dim(&w->x, order[i]);
        total = te__onnx_times(total, now[i]);
    }
    base.first = w->x.first.offset;
    base.second = w->x.second.offset;
    *fits = te__onnx_place_of(&p, x, total, base);
    if (!*fits) return TE__ONNX_FAILED;
    v = te__onnx_wide(g, w);
    /* transpose the value so that the dimension with the largest stride comes first */
    for (i = 0, k = 0; i < w->x.first.ndim; i++)
        if (te__onnx_is(te__onnx_dim(&w->x, i), 1)) back[k++] = i;
    for (i = 0; i < n; i++) {
        turned = turned || (i && order[i] < order[i - 1]);
        back[k++] = order[i];
    }
    if (turned) v = te__onnx_transpose(g, v, k, back);
    /* cut out the place of x along each dimension */
    alike = w->x.first.ndim == n && p.n == n;
    for (i = 0; i < n && alike; i++) alike = te__onnx_same(now[i], p.full[i]);
    te__onnx_dims(x, shape);
    for (i = 0, k = 0; i < p.n; i++) k += !te__onnx_same(p.size[i], p.full[i]);
    if (k > 0 && !alike) v = te__onnx_reshape(g, v, p.n, p.full);
    for (i = 0; i < p.n && k > 0; i++) {
        int begin, end;
        te__onnx_size to;
        if (te__onnx_same(p.size[i], p.full[i])) continue;
        to.first = p.begin[i].first + p.size[i].first;
        to.second = p.begin[i].second + p.size[i].second;
        begin = te__onnx_size_of(g, p.begin[i]);
        end = te__onnx_is_fixed(to) || te__onnx_is_fixed(p.begin[i]) == te__onnx_is_fixed(p.size[i])
                  ? te__onnx_size_of(g, to)
                  : te__onnx_2(g, "Add", begin, te__onnx_size_of(g, p.size[i]));
        v = te__onnx_slice(g, v, i, begin, end, 1);
    }
    /* transpose and reshape to x */
    n = te__onnx_order(x, order);
    for (i = 0, turned = false; i < n; i++) turned = turned || (i && order[i] < order[i - 1]);
    if (turned) {
        if (k == 0 && !alike) v = te__onnx_reshape(g, v, p.n, p.full);
        for (i = 0; i < p.n; i++) back[i] = i;
        for (i = 0; i < n; i++) { /* Dimension i of the value becomes dimension `rank`. This is the position of order[i]
                                   * among the dimensions of x that have more than one element. */
            int rank = 0, j;
            for (j = 0; j < n; j++) rank += order[j] < order[i];
            back[rank] = i;
        }
        v = te__onnx_transpose(g, v, p.n, back);
    }
    for (i = 0; i < x->first.ndim; i++) {
        if (te__onnx_is(shape[i], 1) || !te__onnx_is(te__onnx_stride(x, i), 0)) continue;
        broadcast = true;
        shape[i] = te__onnx_fixed(1);
    }
    if (!(alike && !turned && k == 0 && x->first.ndim == n)) v = te__onnx_reshape(g, v, x->first.ndim, shape);
    if (broadcast) {
        te__onnx_dims(x, shape);
        v = te__onnx_2(g, "Expand", v, te__onnx_shape(g, x->first.ndim, shape, false));
    }
    return v;
}

/* ---- tensors whose parts several calls wrote ---- */

/* Returns true if x and y are ranges of one tensor along `axis`. Sets *at to y's first index minus x's. */
static bool te__onnx_is_beside(const te__onnx_pair *x, const te__onnx_pair *y, int axis, te__onnx_size *at) {
    te__onnx_size rest,
        step = te__onnx_times(te__onnx_stride(x, axis), te__onnx_fixed(te__max(1, te__dtype_size(x->first.dtype))));
    int i;
    if (x->first.buffer != y->first.buffer || x->first.ndim != y->first.ndim || x->first.dtype != y->first.dtype)
        return false;
    for (i = 0; i < x->first.ndim; i++) {
        if (i != axis && !te__onnx_same(te__onnx_dim(x, i), te__onnx_dim(y, i))) return false;
        if (!te__onnx_is(te__onnx_dim(x, i), 1) && !te__onnx_is(te__onnx_dim(y, i), 1) &&
            !te__onnx_same(te__onnx_stride(x, i), te__onnx_stride(y, i)))
            return false;
    }
    at->first = y->first.offset - x->first.offset;
    at->second = y->second.offset - x->second.offset;
    return te__onnx_divide(at, step, &rest) && te__onnx_is(rest, 0);
}

/* Joins the write at index `last` with writes that touch it along one dimension of the tensor. Adds the result as a
 * write. Returns false if that fails. */
static bool te__onnx_join(te__onnx *g, int last, te_result *result) {
    enum { MOST = 1024 };
    const te__onnx_pair x = g->writes[last].x; /* a copy, because the list may be reallocated */
    int piece[MOST], in[MOST], order[TE_MAX_DIMS], n = te__onnx_order(&x, order), gap = 0, axis, count = 0, i, k;
    te__onnx_size at, end = te__onnx_fixed(0), begin = te__onnx_fixed(0);
    te__onnx_pair whole = x;
    if (n == 0) return false;
    if (te__onnx_is_dense(&x, order, n, &gap)) gap = 0;
    if (gap >= n) return false;
    axis = order[gap];
    for (i = last; i >= 0 && count < MOST; i--) {
        te__onnx_size from;
        if (!te__onnx_is_beside(&x, &g->writes[i].x, axis, &at)) continue;
        for (k = 0; k < count && !te__onnx_spans_meet(&g->writes[piece[k]].x.first, &g->writes[i].x.first); k++) {}
        if (k < count) continue; /* a later write has overwritten this piece */
        for (k = count++; k > 0; k--) { /* sorted by begin */
            te__onnx_is_beside(&x, &g->writes[piece[k - 1]].x, axis, &from);
            if (from.first <= at.first) break;
            piece[k] = piece[k - 1];
        }
        piece[k] = i;
    }
    if (count < 2) return false;
    for (i = 0; i < count; i++) {
        const te__onnx_write *w = &g->writes[piece[i]];
        te__onnx_is_beside(&x, &w->x, axis, &at);
        if (i == 0) begin = end = at;
        if (!te__onnx_same(at, end)) return false;
        end.first += te__onnx_dim(&w->x, axis).first;
        end.second += te__onnx_dim(&w->x, axis).second;
    }
    for (i = 0; i < count; i++) {
        /* another write has overwritten this piece */
        if (te__onnx_last(g, &g->writes[piece[i]].x, g->num_writes) != piece[i]) return false;
        in[i] = g->writes[piece[i]].value < 0 ? TE__ONNX_FAILED : te__onnx_wide(g, &g->writes[piece[i]]);
        if (in[i] < 0) return false;
    }
    whole.first.offset = g->writes[piece[0]].x.first.offset;
    whole.second.offset = g->writes[piece[0]].x.second.offset;
    whole.first.shape[axis] = end.first - begin.first;
    whole.second.shape[axis] = end.second - begin.second;
    i = te__onnx_concat(g, axis, count, in);
    if (i < 0 || !te__onnx_write_new(g, &whole, i)) *result = te_error_code(g->te);
    else g->writes[g->num_writes - 1].wide = true;
    return *result == TE_OK;
}

/* ---- reading and writing ---- */

/* Makes a constant of a tensor that no call has written. Fails if the tensor differs between the two runs of the
 * module. */
static int te__onnx_constant(te__onnx *g, te_tensor *first, te_tensor *second) {
    char name[64], a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    size_t bytes = te_tensor_bytes(first);
    te__onnx_pair x = te__onnx_pair_of(first, second);
    te__onnx_write *w;
    bool same = te__same_shape(first, second) && te__is_contiguous(first) && te__is_contiguous(second);
    int v;
    if (same && first->buffer != second->buffer) {
        char *host = (char *)te__alloc(g->te, 2 * bytes);
        if (host && te_tensor_to_host(first, host) == TE_OK && te_tensor_to_host(second, host + bytes) == TE_OK)
            same = memcmp(host, host + bytes, bytes) == 0;
        te__free(g->te, host);
        if (te_error_code(g->te) != TE_OK) return TE__ONNX_FAILED;
    }
    if (!same)
        return te__onnx_refuse(g,
                               "it reads %s, and %s at larger inputs, which no operation has made of the inputs: the "
                               "host computes it, or another rank, and a graph "
                               "cannot",
                               te__shape_text(first, a), te__shape_text(second, b));
    snprintf(name, sizeof(name), "constant_%d", ++g->num_constants);
    v = te__onnx_weight(g, name, first);
    w = v < 0 ? NULL : te__onnx_write_new(g, &x, v);
    if (!w) return TE__ONNX_FAILED;
    w->tensor = first;
    return v;
}

/* Returns a graph item with the value of x. Sets *found to the index of the write whose tensor contains all of x. */
static int te__onnx_find(te__onnx *g, const te__onnx_pair *x, te_tensor *first, te_tensor *second, int *found) {
    char text[TE__SHAPE_TEXT];
    int i = te__onnx_last(g, x, g->num_writes), v;
    te_result result = TE_OK;
    bool fits;
    if (i < 0) {
        if (te__onnx_constant(g, first, second) < 0) return TE__ONNX_FAILED;
        i = g->num_writes - 1;
    }
    if (g->writes[i].value >= 0) {
        v = te__onnx_view(g, &g->writes[i], x, &fits);
        if (!fits && te__onnx_join(g, i, &result)) {
            i = g->num_writes - 1;
            v = te__onnx_view(g, &g->writes[i], x, &fits);
        }
        *found = i;
        if (fits || result != TE_OK || te_error_code(g->te) != TE_OK) return v;
        return te__onnx_refuse(
            g, "it reads %s, of which %s has written a part; a graph has no memory to be written in parts",
            te__shape_text(&x->first, text), g->writes[i].by ? g->writes[i].by : "no operation");
    }
    return te__onnx_refuse(g, "it reads %s, a result of %s that has no form in ONNX", te__shape_text(&x->first, text),
                           g->writes[i].by ? g->writes[i].by : "no operation");
}
/* Returns a graph item with the value of a tensor in the shape of x, in f32 or 64-bit integers. `first` and `second`:
 * the tensor in both runs. */
static int te__onnx_read_as(te__onnx *g, const te__onnx_pair *x, const te_tensor *first, const te_tensor *second) {
    int found;
    return te__onnx_find(g, x, (te_tensor *)first, (te_tensor *)second, &found);
}
static int te__onnx_read(te__onnx *g, const te_tensor *first, const te_tensor *second) {
    te__onnx_pair x = te__onnx_pair_of(first, second);
    return te__onnx_read_as(g, &x, first, second);
}

/* Records that a call writes x. `value` is a graph item in the shape of x, in f32 or 64-bit integers. If `value` is
 * TE__ONNX_FAILED, operations that read x are refused. */
static te__onnx_write *te__onnx_store_as(te__onnx *g, const te__onnx_pair *x, int value) {
    te_dtype dtype = x->first.dtype;
    te__onnx_write *w;
    bool wide = dtype == TE_F32 || dtype == TE_I64 || !te__onnx_type(dtype) || te__is_fp8(dtype);
    if (te_error_code(g->te) != TE_OK) return NULL;
    if (value >= 0 && !wide) value = te__onnx_cast(g, value, te__onnx_type(dtype));
    w = te__onnx_write_new(g, x, value);
    if (!w) return NULL;
    w->wide = wide;
    w->by = g->op;
    return w;
}
/* Calls te__onnx_store_as for the tensor that is `first` and `second` in the two runs of the module. Does nothing if
 * `first` is NULL. */
static te__onnx_write *te__onnx_store(te__onnx *g, const te_tensor *first, const te_tensor *second, int value) {
    te__onnx_pair x;
    if (!first) return NULL;
    x = te__onnx_pair_of(first, second);
    return te__onnx_store_as(g, &x, value);
}

/* These macros take the name of a tensor field. a and b are the args of one call in the two runs of the module. */
#define TE__ONNX_PAIR(field) te__onnx_pair_of(a->field, b->field)
#define TE__ONNX_READ(field) te__onnx_read(g, a->field, b->field)
#define TE__ONNX_STORE(field, value) te__onnx_store(g, a->field, b->field, value)
/* Records a result whose value the graph does not have. Operations that read this value are refused. */
#define TE__ONNX_UNKNOWN(field) te__onnx_store(g, a->field, b->field, TE__ONNX_FAILED)

/* Returns the te__onnx_write of the parameter or constant that contains the tensor, or NULL if there is none. */
static const te__onnx_write *te__onnx_constant_of(te__onnx *g, const te_tensor *first, const te_tensor *second) {
    te__onnx_pair x = te__onnx_pair_of(first, second);
    int i = te__onnx_last(g, &x, g->num_writes);
    return i >= 0 && !g->writes[i].by && g->writes[i].tensor ? &g->writes[i] : NULL;
}
/* Copies the current values of the first n numbers of x, an f32 tensor, to `out`. */
static te_result te__onnx_host(te__onnx *g, const te_tensor *x, float *out, int n) {
    if (te__numel(x) < n) return te__fail(g->te, TE_ERR_SHAPE, "te_onnx_export: a scale has no value");
    return te_tensor_to_f32((te_tensor *)x, out);
}
