/* ops/math/cuda.c: plans of the math operations. This file knows how each kernel must be launched. It must not depend
 * on what the kernels compute. */

/* ---- copy ---- */

/* Returns the largest unit in bytes that a copy without conversion can move at a time. `size` is the size of an
 * element in bytes. */
static int te__copy_unit(const te__copy_walk *w, int size, const te_tensor *src, const te_tensor *dst) {
    uintptr_t all = (uintptr_t)te__data(src) | (uintptr_t)te__data(dst) | 16u;
    int last = w->ndim - 1, d, unit = size;
    if (w->src[last] != 1 || w->dst[last] != 1) return size;
    all |= (uintptr_t)(w->shape[last] * size);
    for (d = 0; d < last; d++) all |= (uintptr_t)((w->src[d] | w->dst[d]) * size);
    while (unit < 16 && all % (uintptr_t)(2 * unit) == 0) unit *= 2;
    return unit;
}
/* Returns how many neighbouring elements a thread converts at a time: 16 bytes of the wider format. */
static int te__copy_width(const te_tensor *src, const te_tensor *dst) {
    if (!te__is_float(src->dtype) || !te__is_float(dst->dtype)) return 1;
    return src->dtype == TE_F32 || dst->dtype == TE_F32 ? 4 : 8;
}
/* Returns te__copy_width if the copy w can be divided into aligned groups of that many neighbouring elements. Otherwise
 * returns 1. */
static int te__copy_run_width(const te__copy_walk *w, const te_tensor *src, const te_tensor *dst) {
    int last = w->ndim - 1, width = te__copy_width(src, dst), d;
    if (!te__is_aligned(src, 16) || !te__is_aligned(dst, 16)) return 1;
    if (w->src[last] != 1 || w->dst[last] != 1 || w->shape[last] % width != 0) return 1;
    for (d = 0; d < last; d++)
        if (w->src[d] % width != 0 || w->dst[d] % width != 0) return 1;
    return width;
}

/* Plans one launch. Skips the first `offset` elements of src and dst. If `offset` is not 0, both must be
 * contiguous. */
static void te__copy_launch(te__plan *p, const te__copy_walk *w, const te_tensor *src, const te_tensor *dst,
                            int64_t offset, int unit, int width) {
    te__launch *l = te__plan_launch(p, "math", "copy");
    te__copy_kargs *k = TE__KARGS(p, l, te__copy_kargs);
    int64_t per_item = unit ? unit / te__dtype_size(src->dtype) : width;
    int64_t stride_unit = unit ? per_item : 1;
    int d;
    if (!unit) {
        te__launch_option(l, "SRC_DT", src->dtype);
        te__launch_option(l, "DST_DT", dst->dtype);
    }
    /* Integers, since te_explain plans without addresses. */
    k->src = (const void *)((uintptr_t)te__data(src) + (uintptr_t)(offset * te__dtype_size(src->dtype)));
    k->dst = (void *)((uintptr_t)te__data(dst) + (uintptr_t)(offset * te__dtype_size(dst->dtype)));
    k->ndim = w->ndim;
    k->unit = unit;
    k->width = width;
    k->src_dt = src->dtype;
    k->dst_dt = dst->dtype;
    k->items = 1;
    for (d = 0; d < w->ndim; d++) {
        bool last = d == w->ndim - 1;
        k->shape[d] = last ? w->shape[d] / per_item : w->shape[d];
        /* In the last dimension, an item is per_item elements, so strides are multiplied by per_item. */
        k->src_stride[d] = (last ? w->src[d] * per_item : w->src[d]) / stride_unit;
        k->dst_stride[d] = (last ? w->dst[d] * per_item : w->dst[d]) / stride_unit;
        k->items *= k->shape[d];
    }
    te__launch_blocks(l, te__div_up(k->items, 1024), 256);
}

/* A block of the kernel `transpose` has two adjacent tiles. Together they have te__transpose_tall(size) rows and
 * te__transpose_wide(size) columns. An element has `size` bytes. */
static int64_t te__transpose_tall(int size) { return size == 1 ? 128 : 256 / size; }
static int64_t te__transpose_wide(int size) { return size == 1 ? 128 : 64; }

/* Plans transposes of matrices with elements of t->size bytes. Sets the fields of *t that follow from its other
 * fields. */
static void te__plan_transpose(te__plan *p, te__transpose_kargs *t) {
    uintptr_t src_at = (uintptr_t)t->src | (uintptr_t)(t->lds * t->size),
              dst_at = (uintptr_t)t->dst | (uintptr_t)(t->ldd * t->size);
    int64_t blocks;
    int d;
    t->tiles_n = (unsigned)te__div_up(t->n, te__transpose_wide(t->size));
    blocks = te__div_up(t->filled, te__transpose_tall(t->size)) * t->tiles_n;
    t->tiles = (unsigned)blocks;
    for (d = 0; d < t->dims; d++) {
        src_at |= (uintptr_t)(t->src_stride[d] * t->size);
        dst_at |= (uintptr_t)(t->dst_stride[d] * t->size);
        blocks *= t->shape[d];
    }
    t->vector_src = src_at % (t->size == 1 ? 8 : 16) == 0;
    t->vector_dst = dst_at % 16 == 0;
    te__launch_option(te__plan_with(p, "math", "transpose", blocks, 256, t, sizeof(*t)), "SIZE", t->size);
    te__plan_why(p, "tiles through shared memory, 16 bytes a store");
}

/* Plans a copy without conversion as transposes, if adjacent elements of src and dst lie along different dimensions.
 * Returns false otherwise. Also returns false if elements have more than 4 bytes, or if the copy would fill less than
 * an eighth of the tiles. */
static bool te__plan_copy_transposed(te__plan *p, const te__copy_walk *w, int size, const te_op_copy_args *a) {
    te__transpose_kargs t = TE_ZERO;
    int last = w->ndim - 1, across = -1, d;
    for (d = 0; d < last; d++)
        if (w->src[d] == 1) across = d;
    if (across < 0 || size > 4 || w->dst[last] != 1 || w->src[last] == 1) return false;
    t.src = te__data(a->src);
    t.dst = te__data(a->dst);
    t.size = size;
    t.m = t.filled = w->shape[last];
    t.n = w->shape[across];
    t.lds = w->src[last];
    t.ldd = w->dst[across];
    if (te__round_up(t.m, te__transpose_tall(size)) * te__round_up(t.n, te__transpose_wide(size)) > 8 * t.m * t.n)
        return false;
    for (d = 0; d < last; d++) {
        if (d == across) continue;
        t.shape[t.dims] = (unsigned)w->shape[d];
        t.src_stride[t.dims] = w->src[d];
        t.dst_stride[t.dims++] = w->dst[d];
    }
    te__plan_transpose(p, &t);
    return true;
}

static void te__plan_copy_apart(te__plan *p, const te_op_copy_args *a) {
    te__copy_walk w;
    int64_t n = te__numel(a->src), whole;
    bool raw = te__copy_is_raw(a->src->dtype, a->dst->dtype), flat;
    int size = (int)te__dtype_size(a->src->dtype), width;
    if (n == 0) return;
    te__copy_walk_make(&w, a->src, a->dst);
    flat = w.ndim == 1 && w.src[0] == 1 && w.dst[0] == 1;
    if (flat) {
        /* Most elements are copied in items of the largest width, and the rest one by one. */
        bool aligned = te__is_aligned(a->src, 16) && te__is_aligned(a->dst, 16);
        width = !aligned ? 1 : raw ? 16 / size : te__copy_width(a->src, a->dst);
        if (width > 1) {
            whole = n / width * width;
            w.shape[0] = whole;
            if (whole) te__copy_launch(p, &w, a->src, a->dst, 0, raw ? 16 : 0, width);
            w.shape[0] = n - whole;
            if (n > whole) te__copy_launch(p, &w, a->src, a->dst, whole, raw ? size : 0, 1);
            te__plan_why(p, "contiguous, 16 bytes at a time");
            return;
        }
    }
    if (raw && te__plan_copy_transposed(p, &w, size, a)) return;
    te__copy_launch(p, &w, a->src, a->dst, 0, raw ? te__copy_unit(&w, size, a->src, a->dst) : 0,
                    raw ? 1 : te__copy_run_width(&w, a->src, a->dst));
    te__plan_why(p, flat ? "contiguous, but not aligned to 16 bytes" : "strided");
}
static te_result te__cuda_plan_copy(te__plan *p, const te_op_copy_args *a) {
    te__copy_sides sides = te__copy_sides_of(a);
    te__copy_detour d;
    void *memory;
    if (sides == TE__COPY_APART) te__plan_copy_apart(p, a);
    if (sides != TE__COPY_OVERLAPS) return TE_OK;
    memory = te__plan_workspace(p, te__copy_detour_bytes(a));
    if (!memory) return p->result;
    te__copy_detour_make(&d, a, memory);
    te__plan_copy_apart(p, &d.there);
    te__plan_copy_apart(p, &d.back);
    return te__plan_why(p, "src and dst share memory: through memory between");
}

/* ---- fill, random, axpby ---- */

/* Plans a launch that fills `bytes` bytes at dst. `pattern` has the bits of one element of `unit` bytes, repeated to
 * eight bytes. */
static void te__plan_fill(te__plan *p, void *dst, int64_t bytes, int unit, bool vector, uint64_t pattern) {
    te__fill_kargs k = TE_ZERO;
    k.dst = dst;
    k.bytes = bytes;
    k.unit = unit;
    k.vector = vector;
    k.pattern = pattern;
    te__plan_with(p, "math", "fill", te__div_up(bytes, 16384), 256, &k, sizeof(k));
}
static te_result te__cuda_plan_fill(te__plan *p, const te_op_fill_args *a) {
    uint64_t pattern = te__fill_bits(a->dst->dtype, a->value);
    int unit = (int)te__dtype_size(a->dst->dtype), bits;
    if (te__numel(a->dst) == 0) return TE_OK;
    if (unit < 8) pattern &= ((uint64_t)1 << (8 * unit)) - 1;
    for (bits = 8 * unit; bits < 64; bits *= 2) pattern |= pattern << bits;
    te__plan_fill(p, te__data(a->dst), te__numel(a->dst) * unit, unit, te__is_aligned(a->dst, 16), pattern);
    return te__plan_why(p, "one pattern, written");
}

static te_result te__cuda_plan_random(te__plan *p, const te_op_random_args *a) {
    te__random_kargs k = TE_ZERO;
    if (te__numel(a->dst) == 0) return TE_OK;
    k.dst = te__data(a->dst);
    k.n = te__numel(a->dst);
    k.seed = a->seed;
    k.offset = a->offset;
    k.rng = te__data(a->rng);
    k.a = a->a;
    k.b = a->b;
    k.below_b = te__random_below(a);
    k.kind = a->kind;
    k.dt = a->dst->dtype;
    te__launch_option(te__plan_with(p, "math", "random", te__div_up(k.n, 1024), 256, &k, sizeof(k)), "DT", k.dt);
    return te__plan_why(p, "Philox, one block for four elements");
}

static te_result te__cuda_plan_axpby(te__plan *p, const te_op_axpby_args *a) {
    te__axpby_kargs k = TE_ZERO;
    te__launch *l;
    if (te__numel(a->x) == 0) return TE_OK;
    k.x = te__data(a->x);
    k.y = te__data(a->y);
    k.out = te__data(a->out);
    k.alpha_device = te__f32_data(a->alpha_device);
    k.divide_device = te__f32_data(a->divide_device);
    k.n = te__numel(a->x);
    k.alpha = a->alpha;
    k.beta = a->beta;
    k.x_dt = a->x->dtype;
    k.y_dt = te__dtype_of(a->y);
    k.out_dt = a->out->dtype;
    k.vector = te__is_aligned(a->x, 16) && te__is_aligned(a->out, 16) && te__is_aligned(a->y, 16);
    l = te__plan_with(p, "math", "axpby", te__div_up(k.n, 2048), 256, &k, sizeof(k));
    te__launch_option(l, "X_DT", k.x_dt);
    te__launch_option(l, "Y_DT", k.y_dt);
    te__launch_option(l, "OUT_DT", k.out_dt);
    return te__plan_why(
        p, k.vector ? "16 bytes at a time" : "element by element: an array is not aligned to 16 bytes");
}

static void te__mul_kargs_of(te__mul_kargs *k, const te_tensor *x, const te_tensor *y, const te_tensor *out) {
    k->x = te__data(x);
    k->y = te__data(y);
    k->out = te__data(out);
    k->m = te__rows(x);
    k->n = te__cols(x);
    k->x_dt = x->dtype;
    k->y_dt = y->dtype;
    k->out_dt = out->dtype;
}
static te_result te__cuda_plan_mul(te__plan *p, const te_op_mul_args *a) {
    te__mul_kargs k = TE_ZERO;
    te__launch *l;
    if (te__numel(a->x) == 0) return TE_OK;
    te__mul_kargs_of(&k, a->x, a->y, a->out);
    k.by_rows = te__mul_by_rows(a);
    k.vector = te__is_aligned(a->x, 16) && te__is_aligned(a->out, 16) &&
                (k.by_rows ? k.n % 8 == 0 : te__is_aligned(a->y, 16));
    l = te__plan_with(p, "math", "mul", te__div_up(te__numel(a->x), 2048), 256, &k, sizeof(k));
    te__launch_option(l, "X_DT", k.x_dt);
    te__launch_option(l, "Y_DT", k.y_dt);
    te__launch_option(l, "OUT_DT", k.out_dt);
    te__launch_option(l, "BY_ROWS", k.by_rows);
    return te__plan_why(p, k.vector ? "16 bytes at a time" : "element by element: rows are not aligned to 16 bytes");
}

/* ---- sums ---- */

static te_result te__cuda_plan_row_dot(te__plan *p, const te_op_row_dot_args *a) {
    te__mul_kargs k = TE_ZERO;
    te__launch *l;
    if (te__rows(a->x) == 0) return TE_OK;
    te__mul_kargs_of(&k, a->x, a->y, a->out);
    k.vector = te__is_aligned(a->x, 16) && te__is_aligned(a->y, 16) && k.n % 8 == 0;
    l = te__plan_with(p, "math", "row_dot", te__div_up(k.m, 8), 256, &k, sizeof(k));
    te__launch_option(l, "X_DT", k.x_dt);
    te__launch_option(l, "Y_DT", k.y_dt);
    return te__plan_why(p, "a warp a row");
}

static te_result te__cuda_plan_argmax(te__plan *p, const te_op_argmax_args *a) {
    te__argmax_kargs k = TE_ZERO;
    te__launch *l;
    int64_t most;
    k.x = te__data(a->x);
    k.out = te__int_data(a->out);
    k.m = te__rows(a->x);
    k.n = te__cols(a->x);
    k.x_dt = (int)a->x->dtype;
    k.vector = te__is_aligned(a->x, 16) && k.n % 8 == 0;
    if (k.m == 0) return TE_OK;
    most = te__max(1, te__min(te__div_up(k.n, TE__ARGMAX_STEP), p->num_sms / k.m));
    k.chunk = te__div_up(te__div_up(k.n, most), TE__ARGMAX_STEP) * TE__ARGMAX_STEP;
    k.chunks = (int)te__div_up(k.n, k.chunk);
    if (k.chunks > 1) {
        k.best = (unsigned long long *)te__plan_workspace(p, 8 * k.m * k.chunks);
        k.counter = te__plan_counter(p);
    }
    l = te__plan_with(p, "math", "argmax", k.m * k.chunks, 256, &k, sizeof(k));
    te__launch_option(l, "X_DT", k.x_dt);
    return te__plan_why(p, k.chunks > 1 ? "blocks share a row, and the last one compares theirs" : "a block a row");
}

static te_result te__cuda_plan_sum(te__plan *p, const te_op_sum_args *a) {
    te__sum_kargs args = TE_ZERO;
    te__launch *l;
    args.x = te__data(a->x);
    args.out = te__f32_data(a->out);
    args.n = te__numel(a->x);
    args.partials = te__max(1, te__div_up(args.n, TE__SUM_CHUNK)); /* at least one: if x is empty, the sum is still
                                                                    * written, as 0 */
    args.scale = a->scale;
    args.x_dt = a->x->dtype;
    args.vector = te__is_aligned(a->x, 16);
    if (args.partials > 1) args.partial = te__plan_floats(p, args.partials);
    l = te__plan_with(p, "math", "sum", args.partials, 256, &args, sizeof(args));
    te__launch_option(l, "X_DT", a->x->dtype);
    if (args.partials > 1) te__plan_with(p, "math", "sum_final", 1, 1024, &args, sizeof(args));
    return te__plan_why(p, "partial sums of 16,384 elements, added in their order");
}

/* Plans out [n] = (accumulate ? out : 0) + the column sums of x [m, n]. */
static te_result te__plan_column_sum(te__plan *p, const void *x, te_dtype x_dt, int64_t m, int64_t n, te_tensor *out,
                                     bool accumulate) {
    te__column_sum_kargs args = TE_ZERO;
    te__launch *l;
    int64_t chunks;
    args.m = m;
    args.n = n;
    if (args.n == 0) return TE_OK;
    args.x = x;
    args.out = te__data(out);
    args.column_blocks = (unsigned)te__div_up(args.n, 256);
    /* The limit of 528 blocks is four for each of an H200's 132 multiprocessors. The limit is the same on every GPU, so
     * that all GPUs compute the same bits. */
    chunks = te__max(1, te__min(te__div_up(args.m, 32), 528 / args.column_blocks));
    args.chunk = te__max(1, te__div_up(args.m, chunks));
    args.chunks = te__max(1, te__div_up(args.m, args.chunk));
    args.groups = (unsigned)te__min(args.column_blocks, TE__PLAN_COUNTERS);
    args.x_dt = x_dt;
    args.out_dt = out->dtype;
    args.accumulate = accumulate;
    args.partial = te__plan_floats(p, args.chunks * args.n);
    args.counters = te__plan_counters(p);
    l = te__plan_with(p, "math", "column_sum", args.chunks * args.column_blocks, 256, &args, sizeof(args));
    if (te__view_is_aligned(x, n) && !p->baseline) te__launch_option(l, "X_DT", x_dt);
    return te__plan_why(p, "partial sums of chunks of rows, added up by the block that ends last");
}
/* Plans column sums of f32 in a single pass without a workspace, for at most some thousand rows. */
static void te__plan_column_sum_short(te__plan *p, const float *x, int64_t m, int64_t n, te_tensor *out,
                                      bool accumulate) {
    te__launch *l = te__plan_launch(p, "math", "column_sum_short");
    te__column_sum_short_kargs *k = TE__KARGS(p, l, te__column_sum_short_kargs);
    k->x = x;
    k->out = te__data(out);
    k->m = m;
    k->n = n;
    k->out_dt = out->dtype;
    k->accumulate = accumulate;
    te__launch_blocks(l, te__div_up(n, 32), 256);
}
static te_result te__cuda_plan_column_sum(te__plan *p, const te_op_column_sum_args *a) {
    return te__plan_column_sum(p, te__data(a->x), a->x->dtype, te__rows(a->x), te__cols(a->x), a->out, a->accumulate);
}

/* ---- embedding ---- */

static te_result te__cuda_plan_embedding_fwd(te__plan *p, const te_op_embedding_fwd_args *a) {
    te__embedding_fwd_kargs k = TE_ZERO;
    te__launch *l;
    if (te__numel(a->y) == 0) return TE_OK;
    k.ids = te__data(a->ids);
    k.table = te__data(a->table);
    k.y = te__data(a->y);
    k.tokens = te__numel(a->ids);
    k.vocab = a->table->shape[0];
    k.h = a->table->shape[1];
    k.outside = te__plan_outside(p, a->from_end ? TE__OUTSIDE_embedding_from_end : TE__OUTSIDE_embedding_fwd);
    k.from_end = a->from_end;
    k.all = a->vocab_size;
    k.first = a->vocab_start;
    k.ids_dt = a->ids->dtype;
    k.table_dt = a->table->dtype;
    k.y_dt = a->y->dtype;
    k.vector = te__rows_aligned(a->table, k.h, 16) && te__rows_aligned(a->y, k.h, 16);
    l = te__plan_with(p, "math", "embedding_fwd", te__div_up(k.tokens, 8), 256, &k, sizeof(k));
    te__launch_option(l, "TABLE_DT", k.table_dt);
    te__launch_option(l, "Y_DT", k.y_dt);
    return te__plan_why(p, "one warp a row");
}

static te_result te__cuda_plan_embedding_bwd(te__plan *p, const te_op_embedding_bwd_args *a) {
    te__embedding_bwd_kargs args = TE_ZERO;
    te__launch *l;
    args.tokens = te__numel(a->ids);
    args.vocab = a->dtable->shape[0];
    args.h = a->dtable->shape[1];
    if (args.vocab == 0 || args.h == 0) return TE_OK;
    args.outside = te__plan_outside(p, a->from_end ? TE__OUTSIDE_embedding_from_end : TE__OUTSIDE_embedding_bwd);
    args.from_end = a->from_end;
    args.all = a->vocab_size;
    args.first = a->vocab_start;
    args.ids = te__data(a->ids);
    args.dy = te__data(a->dy);
    args.dtable = te__data(a->dtable);
    args.start = (unsigned *)te__plan_workspace(p, (args.vocab + 1) * 4);
    args.order = (unsigned *)te__plan_workspace(p, te__max(1, args.tokens) * 4);
    /* at least 512 blocks, or one id a block */
    args.bucket = (int)te__min(TE__EMBEDDING_BUCKET, te__div_up(args.vocab, 512));
    args.splits = (int)te__max(1, te__min(te__div_up(args.h, 256), te__div_up(4096, args.vocab)));
    args.ids_dt = a->ids->dtype;
    args.dy_dt = a->dy->dtype;
    args.dtable_dt = a->dtable->dtype;
    args.accumulate = a->accumulate;
    args.vector = args.h % 8 == 0 && te__rows_aligned(a->dy, args.h, 16) && te__rows_aligned(a->dtable, args.h, 16);
    te__plan_with(p, "math", "embedding_sort", te__div_up(args.vocab, args.bucket), 1024, &args, sizeof(args));
    l = te__plan_with(p, "math", "embedding_bwd", te__div_up(args.vocab * args.splits, 8), 256, &args, sizeof(args));
    te__launch_option(l, "DY_DT", args.dy_dt);
    te__launch_option(l, "DTABLE_DT", args.dtable_dt);
    return te__plan_why(p, "tokens sorted by id, then warps add up each id's rows");
}
