/* train/shards.c: parameters of which each rank of a group owns one slice. It knows where the slices lie, and moves
 * them between ranks. This file must not depend on optimizers, or on when a module needs its parameters.
 *
 * A parameter is a matrix of rows that are never divided: the rows of a weight that is stored quantized, and the single
 * elements of a plain one. Each rank owns `chunk` successive rows, and the last ranks own fewer or none. The slices of
 * the parameters of one set lie behind each other in one block of bytes, of the same size on all ranks. So one
 * collective moves a whole set. Each slice begins at a multiple of 16 bytes. */

enum { TE__SHARD_ALIGN = 16, TE__SHARD_PLAIN_ROWS = 8, TE__MAX_SHARD_PARTS = 2 };

/* The place of one tensor of a parameter in the block of slices: the value of a plain parameter, or the codes of a copy
 * of a quantized one. */
typedef struct te__shard_part {
    int64_t at;        /* bytes from the start of the block */
    int64_t row_bytes; /* bytes of a row in the block; a row of codes in memory may be longer */
} te__shard_part;

typedef struct te__shard {
    int refs;
    struct te__shard_set *set; /* NULL: the set was closed */
    int index;                 /* in set->list */
    te_tensor *param;          /* retained while `set` is not NULL */
    te_dtype dtype;            /* of the parameter when the set was made */
    int64_t rows, width, chunk; /* rows of the parameter and elements of a row; rows of a slice */
    int64_t start, length;     /* this rank's slice, in elements */
    te__shard_part part[TE__MAX_SHARD_PARTS];
    int num_parts;
    bool turns;                /* a quantized parameter whose column-wise copy is made from the row-wise one */
    bool fresh;                /* the current te_backward has made the gradient of the slice */
    uint64_t version, written_at; /* TE_SHARD_PARAMETERS: version of the value, and te->writes when it was written */
} te__shard;

/* The parameters whose slices move together. */
typedef struct te__shard_set {
    te_ctx *te;
    te_group *group; /* borrowed */
    int rank, size;
    int depth;          /* how many forwards of the unit's modules run now */
    bool of_parameters; /* the parameters themselves are sharded: they have memory only while the set is `whole` */
    bool whole;         /* false: each rank has its slices alone */
    bool hollow;        /* the set was gathered between te_warmup_begin and te_warmup_end, where nothing is computed */
    bool visited;       /* used by te__opt_next_set and te__ckpt_start_values */
    bool told;          /* the last gathering has failed on all ranks. false after a failure: it is this rank's own,
                         * and the others may wait for it in their next collective */
    te__shard **list;
    int n, cap;
    int64_t bytes;      /* of the block of one rank */
    te_tensor *block;   /* of_parameters: u8 [bytes], this rank's slices */
    bool coming;        /* te__shards_ask has begun to gather the set, and te__shards_gather has not taken it yet */
    te__flight flight;  /* coming: the gathering */
    const char *name;   /* of the unit; borrowed */
} te__shard_set;

static void te__shard_release(te_ctx *te, te__shard *s) {
    if (s && --s->refs == 0) te__free(te, s);
}

/* ---- views ---- */

/* Returns a view [n, rows, width] of x's memory, from byte `at` on. `lead` and `ld` are the strides of the first two
 * dimensions, in elements. */
static te_tensor *te__shard_view(const te_tensor *x, int64_t at, te_dtype dtype, int64_t n, int64_t rows,
                                 int64_t width, int64_t lead, int64_t ld) {
    int64_t shape[3];
    te_tensor *y;
    shape[0] = n;
    shape[1] = rows;
    shape[2] = width;
    y = te__alias_as(x, at, dtype, 3, shape);
    if (!y) return NULL;
    y->stride[0] = lead;
    y->stride[1] = ld;
    return y;
}
/* Returns the elements of a plain contiguous tensor that has the shape of the parameter, of this rank's slice. */
static te_tensor *te__shard_of_whole(const te__shard *s, const te_tensor *x) {
    return te__alias_1d(x, s->start * te__dtype_size(x->dtype), x->dtype, s->length);
}
/* Returns this rank's slice of a plain parameter in `block`. */
static te_tensor *te__shard_in_block(const te__shard *s, const te_tensor *block) {
    return te__alias_1d(block, s->part[0].at, s->dtype, s->length);
}
/* Returns the bytes of this rank's codes in `block`. */
static te_tensor *te__shard_bytes(const te__shard *s, int part, const te_tensor *block) {
    return te__alias_1d(block, s->part[part].at, TE_U8, s->length / te__max(s->width, 1) * s->part[part].row_bytes);
}
/* Returns the tensor that has the memory of a part. */
static te_tensor *te__shard_memory(const te__shard *s, int part) {
    if (!s->param->quantized) return s->param;
    return part ? s->param->quantized->col.data : s->param->quantized->row.data;
}
/* Returns whether the parameters of a set have their values, and not slices alone. */
static bool te__shards_are_whole(const te__shard_set *set) {
    return !set->of_parameters || set->n == 0 || (set->whole && !set->hollow);
}
/* Drops what te__shards_ask has begun. */
static void te__shards_forget(te__shard_set *set) {
    if (set->coming) te__flight_drop(&set->flight);
    set->coming = false;
}
/* Returns this rank's slice of a plain parameter, wherever it lies now. */
static te_tensor *te__shard_value(const te__shard *s) {
    return te__shards_are_whole(s->set) ? te__shard_of_whole(s, s->param) : te__shard_in_block(s, s->set->block);
}

/* ---- layout ---- */

/* Appends a parameter to a set. Returns false with an error if it cannot be sharded. */
static bool te__shards_add(te__shard_set *set, te_tensor *x, const char *who, const char *name) {
    te_ctx *te = set->te;
    const te__quantized *q = x->quantized;
    te__shard *s;
    int64_t first, last;
    int i;
    if (x->shard && x->shard->set == set) return true; /* two modules of the unit share the parameter */
    if (x->shard)
        return te__not_ok(te, TE_ERR_INVALID,
                          "%s: parameter \"%s\" of unit \"%s\" is sharded by unit \"%s\" too; make units below others "
                          "first, or one unit of a module that is above both",
                          who, name, set->name, x->shard->set->name);
    if (q ? !q->quantizer || q->cls->form != TE__FORM_CODES || !q->row.data || x->ndim != 2
          : !x->buffer || !te__is_contiguous(x))
        return te__not_ok(te, TE_ERR_UNSUPPORTED,
                          "%s: parameter \"%s\" of unit \"%s\" is %s; a plain contiguous tensor is needed, or a matrix "
                          "that te_quantized_model_init_begin has quantized by delayed, current, block, MXFP8 or NVFP4 "
                          "scaling",
                          who, name, set->name,
                          q           ? q->cls->name
                          : x->buffer ? "strided"
                                      : "without memory");
    if (q && te__master_check_spec(te, set->n, &q->quantizer->spec, false) != TE_OK) return false;
    if (q && te__cols(x) * te_dtype_bits(q->row.data->dtype) % 8 != 0)
        return te__not_ok(te, TE_ERR_UNSUPPORTED,
                          "%s: parameter \"%s\" of unit \"%s\" has rows of %lld codes of 4 bits; an even number is "
                          "needed",
                          who, name, set->name, (long long)te__cols(x));
    if (!te__grow(te, (void **)&set->list, &set->cap, set->n, sizeof(te__shard *))) return false;
    s = (te__shard *)te__alloc_zero(te, sizeof(te__shard));
    if (!s) return false;
    s->refs = 1;
    s->set = set;
    s->index = set->n;
    s->dtype = x->dtype;
    s->rows = q ? te__rows(x) : te__numel(x);
    s->width = q ? te__cols(x) : 1;
    s->chunk = te__div_up(s->rows, set->size);
    if (!q) s->chunk = te__round_up(s->chunk, TE__SHARD_PLAIN_ROWS);
    first = te__min(s->rows, set->rank * s->chunk);
    last = te__min(s->rows, first + s->chunk);
    s->start = first * s->width;
    s->length = (last - first) * s->width;
    s->num_parts = q && q->cls->facts & TE__BOTH_FROM_SLICES ? 2 : 1;
    s->turns = q && s->num_parts == 1 && q->col.data;
    s->written_at = te->writes;
    for (i = 0; i < s->num_parts; i++) {
        s->part[i].at = set->bytes;
        s->part[i].row_bytes = te__row_bytes(q ? q->row.data->dtype : x->dtype, s->width);
        set->bytes += te__round_up(s->chunk * s->part[i].row_bytes, TE__SHARD_ALIGN);
    }
    s->param = te_tensor_retain(x);
    x->shard = s;
    set->list[set->n++] = s;
    return true;
}

/* Marks the tensors of a parameter whose memory is gathered and released. */
static void te__shard_mark(te__shard *s, bool moves) {
    int i;
    s->param->moves = moves;
    for (i = 0; i < s->num_parts; i++) te__shard_memory(s, i)->moves = moves;
}
/* Closes a set. The parameters of a set that is not whole have no memory any more, and errors keep saying why. */
static void te__shards_close(te__shard_set *set) {
    te_ctx *te;
    int i;
    if (!set) return;
    te = set->te;
    te__graphs_forget(te, set, "a sharded unit that it uses was taken back", "taking back a sharded unit");
    for (i = 0; i < set->n; i++) {
        te__shard *s = set->list[i];
        if (!set->of_parameters || set->whole) te__shard_mark(s, false);
        s->param->shard = NULL;
        te_tensor_release(s->param);
        s->param = NULL;
        s->set = NULL;
        te__shard_release(te, s);
    }
    te__shards_forget(set);
    te_tensor_release(set->block);
    te__free(te, set->list);
    te__free(te, set);
}

/* Returns the version of the value of a parameter, sharded or not. */
static uint64_t te__value_version(const te_tensor *x) {
    return x->quantized || x->buffer || !x->shard ? te__param_version(x) : x->shard->version;
}
/* Returns the shape of this rank's part of a parameter: the elements of its slice, or all. */
static int te__own_shape(const te_tensor *x, int64_t shape[TE_MAX_DIMS]) {
    if (!x->shard) {
        memcpy(shape, x->shape, sizeof(x->shape));
        return x->ndim;
    }
    shape[0] = x->shard->length;
    return 1;
}
/* Returns a new tensor for this rank's part of a parameter. */
static te_tensor *te__own_empty(const te_tensor *x, te_dtype dtype) {
    int64_t shape[TE_MAX_DIMS];
    const int ndim = te__own_shape(x, shape);
    return te_tensor_empty(x->te, dtype, ndim, shape);
}
/* Returns this rank's part of a plain parameter. */
static te_tensor *te__own_value(te_tensor *x) { return x->shard ? te__shard_value(x->shard) : x; }

/* ---- moving slices ---- */

/* Checks that no parameter has another format than when the set was made. */
static te_result te__shards_same(const te__shard_set *set) {
    int i;
    for (i = 0; i < set->n; i++)
        if (set->list[i]->param->dtype != set->list[i]->dtype)
            return te__fail(set->te, TE_ERR_STATE,
                            "unit \"%s\": parameter %d of %d was %s when the unit was sharded and is %s now; cast the "
                            "model first, then make units",
                            set->name, i + 1, set->n, te_dtype_name(set->list[i]->dtype),
                            te_dtype_name(set->list[i]->param->dtype));
    return TE_OK;
}

/* Copies the slices of all ranks between `all`, the blocks of all ranks, and x, the tensor of a part of s or a gradient
 * of its parameter. In each block of `stride` bytes, the slice begins at byte `at` and has elements of `dtype`, `width`
 * a row. x has elements of `own`, `ld` a row. */
static te_result te__shard_copy(const te_tensor *all, int64_t stride, int64_t at, te_dtype dtype, te_tensor *x,
                                te_dtype own, const te__shard *s, int64_t width, int64_t ld, bool into_all) {
    const int64_t size = te__dtype_size(dtype), full = s->chunk ? s->rows / s->chunk : 0,
                  rest = s->rows - full * s->chunk;
    te_result result = TE_OK;
    int turn;
    for (turn = 0; turn < 2 && result == TE_OK; turn++) { /* the whole slices, then a shorter one */
        const int64_t n = turn ? 1 : full, rows = turn ? rest : s->chunk, skip = turn ? full : 0;
        te_tensor *a, *b;
        if (n * rows * width == 0) continue;
        a = te__shard_view(all, skip * stride + at, dtype, n, rows, width, stride / size, width);
        b = te__shard_view(x, skip * s->chunk * ld * te__dtype_size(own), own, n, rows, width, s->chunk * ld, ld);
        if (!a || !b) return te_error_code(s->set->te);
        result = into_all ? te_tensor_copy(a, b) : te_tensor_copy(b, a);
    }
    return result;
}
/* Writes a part of a parameter from the slices of all ranks: those of rank r are at byte r * stride + at of `all`. */
static te_result te__shard_unpack(const te__shard *s, int part, const te_tensor *all, int64_t stride, int64_t at) {
    const bool codes = s->param->quantized != NULL;
    te_tensor *x = te__shard_memory(s, part);
    const int64_t ld = codes ? (int64_t)te__row_bytes(x->dtype, x->shape[x->ndim - 1]) : 1;
    const te_dtype dtype = codes ? TE_U8 : s->dtype;
    return te__shard_copy(all, stride, at, dtype, x, dtype, s, codes ? s->part[part].row_bytes : 1, ld, false);
}
/* Writes the parameters of a set from `all`, u8 [size * bytes], the blocks of all ranks. */
static te_result te__shards_unpack(te__shard_set *set, const te_tensor *all) {
    te_result result = TE_OK;
    int i, k;
    for (i = 0; i < set->n && result == TE_OK; i++) {
        const te__shard *s = set->list[i];
        for (k = 0; k < s->num_parts && result == TE_OK; k++)
            result = te__shard_unpack(s, k, all, set->bytes, s->part[k].at);
        if (result == TE_OK && s->turns) result = te__quant_add_columnwise(s->param);
    }
    return result;
}
/* Copies this rank's slices of the parameters, which are whole, to `block`. */
static te_result te__shards_pack(te__shard_set *set, te_tensor *block, const bool *skip) {
    te_result result = TE_OK;
    int i, k;
    for (i = 0; i < set->n && result == TE_OK; i++) {
        const te__shard *s = set->list[i];
        const int64_t rows = s->length / te__max(s->width, 1), first = s->start / te__max(s->width, 1);
        if (rows == 0 || (skip && skip[i])) continue;
        if (!s->param->quantized) {
            te_tensor *from = te__shard_of_whole(s, s->param), *to = te__shard_in_block(s, block);
            result = from && to ? te_tensor_copy(to, from) : te_error_code(set->te);
            continue;
        }
        for (k = 0; k < s->num_parts && result == TE_OK; k++) {
            const te_tensor *x = te__shard_memory(s, k);
            const int64_t ld = (int64_t)te__row_bytes(x->dtype, x->shape[x->ndim - 1]), n = s->part[k].row_bytes;
            te_tensor *from = te__shard_view(x, first * ld, TE_U8, 1, rows, n, rows * ld, ld),
                      *to = te__shard_view(block, s->part[k].at, TE_U8, 1, rows, n, rows * n, n);
            result = from && to ? te_tensor_copy(to, from) : te_error_code(set->te);
        }
    }
    return result;
}

/* Gathers the blocks of all ranks, and writes the parameters from them. All ranks must call it. `result`: an error of
 * this rank from before, which it tells the others. */
typedef te_result te__shards_spreader(te__shard_set *set, const te_tensor *block, te_result result);
static te_result te__shards_spread(te__shard_set *set, const te_tensor *block, te_result result) {
    te_ctx *te = set->te;
    te_tensor *all;
    te__frame_begin(te);
    te->tape.no_grad++;
    all = result == TE_OK ? te__empty_1d(te, TE_U8, set->bytes * set->size) : NULL;
    if (result == TE_OK && !all) result = te_error_code(te);
    result = result == TE_OK ? te__all_gather(set->group, block, all) : te__refuse(set->group, TE__ALL_GATHER, result);
    if (result == TE_OK) result = te__shards_unpack(set, all);
    else set->told = true; /* while a failed te__shards_unpack is known to this rank alone */
    te->tape.no_grad--;
    te__frame_end(te, NULL, 0);
    return result;
}

/* Does the same in a collective for each part, so that the slices of one part alone need memory at a time. */
static te_result te__shards_spread_parts(te__shard_set *set, const te_tensor *block, te_result result) {
    te_ctx *te = set->te;
    int i, k;
    te->tape.no_grad++;
    for (i = 0; i < set->n && !set->told; i++)
        for (k = 0; k < set->list[i]->num_parts && !set->told; k++) {
            const te__shard *s = set->list[i];
            const int64_t bytes = te__round_up(s->chunk * s->part[k].row_bytes, TE__SHARD_ALIGN);
            te_tensor *own, *all;
            te__frame_begin(te);
            own = result == TE_OK ? te__alias_1d(block, s->part[k].at, TE_U8, bytes) : NULL;
            all = own ? te__empty_1d(te, TE_U8, bytes * set->size) : NULL;
            if (result == TE_OK && !all) result = te_error_code(te);
            result = result == TE_OK ? te__all_gather(set->group, own, all)
                                     : te__refuse(set->group, TE__ALL_GATHER, result);
            set->told = set->told || result != TE_OK; /* while what follows may fail on this rank alone */
            if (result == TE_OK) result = te__shard_unpack(s, k, all, bytes, 0);
            if (result == TE_OK && s->turns) result = te__quant_add_columnwise(s->param);
            te__frame_end(te, NULL, 0);
        }
    te->tape.no_grad--;
    return result;
}

/* ---- parameters that are sharded themselves ---- */

/* Releases the memory of the parameters of a set. */
static void te__shards_drop(te__shard_set *set) {
    int i, k;
    for (i = 0; i < set->n; i++) {
        te__shard *s = set->list[i];
        for (k = 0; k < s->num_parts; k++) {
            te_tensor *x = te__shard_memory(s, k);
            te__buffer_release(x->buffer);
            x->buffer = NULL;
            x->offset = 0;
        }
        if (s->turns) te__copy_release(&s->param->quantized->col);
    }
    set->whole = false;
}
/* Gives the parameters of a set memory. */
static te_result te__shards_allocate(te__shard_set *set) {
    te_ctx *te = set->te;
    int i, k;
    for (i = 0; i < set->n; i++)
        for (k = 0; k < set->list[i]->num_parts; k++) {
            te_tensor *x = te__shard_memory(set->list[i], k);
            x->buffer = te__buffer_create(te, te_tensor_bytes(x));
            if (!x->buffer) return te_error_code(te);
            /* rows of codes may be longer than those of the slices */
            if (set->list[i]->param->quantized &&
                (int64_t)te__row_bytes(x->dtype, x->shape[1]) != set->list[i]->part[k].row_bytes &&
                te->device->clear(te, te__data(x), te_tensor_bytes(x)) != TE_OK)
                return te_error_code(te);
        }
    return TE_OK;
}
/* Marks the gathered memory of a parameter as written when its value was, so that tape nodes that have saved the
 * parameter may still use it. */
static void te__shard_restamp(te__shard *s) {
    te_tensor *part[TE__MAX_PARTS];
    const te__quantized *q = s->param->quantized;
    int i, n = te__parts(s->param, part);
    for (i = 0; i < n; i++) {
        te__buffer *b = part[i] ? part[i]->buffer : NULL;
        if (!b || (q && (part[i] == q->row.scale || part[i] == q->row.amax))) continue; /* not gathered */
        if (!q) b->version = s->version;
        b->written_at = b->whole_at = s->written_at;
        b->num_writes = 0;
    }
}
/* Notes the present value of a parameter that has memory. */
static void te__shard_stamp(te__shard *s) {
    const te__buffer *b = te__param_buffer(s->param);
    s->version = te__param_version(s->param);
    s->written_at = b ? b->written_at : s->param->te->writes;
}

/* ---- graphs ----
 * Each launch of a graph gathers the parameters that its operations read into the memory of the graph, from the slices
 * as they are then. Between captures and launches the slices alone hold the values.
 *
 * A set is a part of the graph, with a flag for each parameter that is sharded itself: the graph writes its slice. */

static bool *te__shards_written(const te__shard_set *set) {
    te__graph_part *part = set->te->capture ? te__graph_find_part(set->te->capture, set) : NULL;
    return part ? (bool *)part->data : NULL;
}
/* Notes that the present capture, if there is one, writes the slice. */
static void te__shard_writes(const te__shard *s) {
    bool *written = te__shards_written(s->set);
    if (written) written[s->index] = true;
}
/* Returns whether the present capture writes the slice of a parameter that is sharded itself. */
static bool te__shard_is_written(const te__shard *s) {
    const bool *written = te__shards_written(s->set);
    return written && written[s->index];
}

/* Releases gathered parameters. First copies this rank's slices of those that were written since. */
static te_result te__shards_scatter(te__shard_set *set) {
    te_ctx *te = set->te;
    bool *same;
    te_result result;
    int i, written = 0;
    te__shards_forget(set);
    if (!set->of_parameters || !set->whole) return TE_OK;
    if (set->hollow) {
        te__shards_drop(set);
        return TE_OK;
    }
    for (i = 0; i < set->n; i++) written += te__param_version(set->list[i]->param) != set->list[i]->version;
    if (!written) { /* needs no memory, so that ranks which have only read stay alike */
        te__shards_drop(set);
        return TE_OK;
    }
    same = (bool *)te__alloc_zero(te, (size_t)set->n + 1);
    if (!same) return TE_ERR_OUT_OF_MEMORY;
    for (i = 0; i < set->n; i++) same[i] = te__param_version(set->list[i]->param) == set->list[i]->version;
    te__frame_begin(te);
    result = te__shards_pack(set, set->block, same);
    te__frame_end(te, NULL, 0);
    for (i = 0; i < set->n && result == TE_OK; i++) {
        if (same[i]) continue;
        te__shard_stamp(set->list[i]);
        te__shard_writes(set->list[i]);
    }
    te__free(te, same);
    if (result == TE_OK) te__shards_drop(set);
    return result;
}
static te_result te__shards_before_launch(te_graph *g, void *owner, void *data) {
    te__shard_set *set = (te__shard_set *)owner;
    (void)data;
    if (set->depth > 0 && set->of_parameters)
        return te__fail(g->te, TE_ERR_STATE,
                        "te_graph_launch: inside of a forward of unit \"%s\", whose sharded parameters the graph "
                        "gathers; launch it before or after that forward",
                        set->name);
    return te__shards_scatter(set);
}
static void te__shards_after_launch(te_graph *g, void *owner, void *data) {
    te__shard_set *set = (te__shard_set *)owner;
    const bool *written = (const bool *)data;
    int i;
    for (i = 0; i < set->n; i++) {
        te__shard *s = set->list[i];
        if (!written[i]) continue;
        s->version = s->param->quantized ? te__param_version(s->param) : s->version + 1;
        s->written_at = ++g->te->writes;
    }
}
/* Drops what would belong to launches alone: te_graph_end has copied the slices of parameters that the capture wrote.
 */
static void te__shards_captured(te_graph *g, void *owner, void *data) {
    te__shard_set *set = (te__shard_set *)owner;
    (void)g, (void)data;
    te__shards_forget(set);
    if (set->of_parameters && set->whole) te__shards_drop(set);
}
/* Makes the present capture, if there is one, keep the set. */
static te_result te__shards_capture(te__shard_set *set) {
    te_graph *g = set->te->capture;
    te__graph_part *part;
    if (!g || te__graph_find_part(g, set)) return TE_OK;
    part = te__graph_add_part(g, set, (size_t)set->n + 1);
    if (!part) return TE_ERR_OUT_OF_MEMORY;
    part->before = te__shards_before_launch;
    part->after = te__shards_after_launch;
    part->captured = te__shards_captured;
    return TE_OK;
}

/* ---- gathering ---- */

/* Begins to gather the parameters of a set that te__shards_gather will soon be called for. All ranks must call it. */
static te_result te__shards_ask(te__shard_set *set) {
    te_ctx *te = set->te;
    te_tensor *all;
    te_result result;
    if (!set->of_parameters || set->whole || set->coming || set->size == 1 || set->n == 0 || te->warming)
        return TE_OK;
    result = te__shards_same(set);
    if (result == TE_OK) result = te__shards_capture(set);
    te__frame_begin(te);
    all = result == TE_OK ? te__empty_1d(te, TE_U8, set->bytes * set->size) : NULL;
    if (result == TE_OK && !all) result = te_error_code(te);
    result = te__flight_begin(&set->flight, set->group, TE__ALL_GATHER, set->block, all, result);
    te__frame_end(te, NULL, 0);
    set->coming = result == TE_OK;
    set->told = result != TE_OK;
    return result;
}
/* Takes what te__shards_ask has begun. `result`: an error of this rank from before. */
static te_result te__shards_take(te__shard_set *set, te_result result) {
    te_ctx *te = set->te;
    te__frame_begin(te);
    te->tape.no_grad++;
    if (result == TE_OK) result = te__flight_land(&set->flight);
    if (result == TE_OK) result = te__shards_unpack(set, set->flight.out);
    te__shards_forget(set);
    te->tape.no_grad--;
    te__frame_end(te, NULL, 0);
    return result;
}
/* Makes the parameters of a set whole, if they are sharded: takes those that were gathered ahead, or gathers them by
 * `spread`. All ranks must call it. */
static te_result te__shards_gather_by(te__shard_set *set, te__shards_spreader *spread) {
    te_ctx *te = set->te;
    te_result result;
    int i;
    set->told = false;
    if (set->whole && set->hollow && !te->warming) te__shards_drop(set);
    if (!set->of_parameters || set->whole || set->n == 0) return TE_OK;
    result = te__shards_same(set);
    if (result == TE_OK) result = te__shards_capture(set);
    if (result == TE_OK) result = te__shards_allocate(set);
    result = set->coming ? te__shards_take(set, result) : spread(set, set->block, result);
    if (result != TE_OK) {
        te__shards_drop(set);
        return result;
    }
    for (i = 0; i < set->n; i++) te__shard_restamp(set->list[i]);
    set->whole = true;
    set->hollow = te->warming;
    return TE_OK;
}
static te_result te__shards_gather(te__shard_set *set) { return te__shards_gather_by(set, te__shards_spread); }
/* The same, in less memory: one parameter's slices of all ranks at a time. */
static te_result te__shards_gather_in_parts(te__shard_set *set) {
    return te__shards_gather_by(set, te__shards_spread_parts);
}
/* Makes this rank keep its slices of the parameters alone. */
static te_result te__shards_begin(te__shard_set *set) {
    te_ctx *te = set->te;
    te_result result;
    int i;
    te__frame_begin(te);
    set->block = te_tensor_retain(te_tensor_zeros(te, TE_U8, 1, &set->bytes));
    result = set->block ? te__shards_pack(set, set->block, NULL) : te_error_code(te);
    te__frame_end(te, NULL, 0);
    if (result != TE_OK) return result;
    for (i = 0; i < set->n; i++) {
        te__shard_stamp(set->list[i]);
        te__shard_mark(set->list[i], true);
    }
    set->of_parameters = true;
    te__shards_drop(set);
    return TE_OK;
}

/* ---- new values ---- */

/* Quantizes the masters of the parameters of a set that are stored quantized, slice by slice, into `block`. master[i]
 * is this rank's f32 slice of parameter i, or NULL if the parameter keeps its codes. All ranks must call it if one
 * does. */
static te_result te__shards_quantize(te__shard_set *set, te_tensor *const *master, te_tensor *block) {
    te_ctx *te = set->te;
    const size_t n = (size_t)set->n + 1;
    te_tensor **list = (te_tensor **)te__alloc_zero(te, 4 * n * sizeof(te_tensor *)), **masters, **codes, **columns;
    int64_t *start = (int64_t *)te__alloc_zero(te, n * sizeof(int64_t));
    te_master_weights w = TE_ZERO;
    te_result result = list && start ? TE_OK : TE_ERR_OUT_OF_MEMORY;
    int i;
    masters = list ? list + n : NULL;
    codes = list ? list + 2 * n : NULL;
    columns = list ? list + 3 * n : NULL;
    for (i = 0; i < set->n && result == TE_OK; i++) {
        const te__shard *s = set->list[i];
        if (!master[i]) continue;
        list[w.count] = s->param;
        if (s->length) {
            masters[w.count] = master[i];
            start[w.count] = s->start;
            codes[w.count] = te__shard_bytes(s, 0, block);
            if (s->num_parts > 1) columns[w.count] = te__shard_bytes(s, 1, block);
            if (!codes[w.count] || (s->num_parts > 1 && !columns[w.count])) result = te_error_code(te);
        }
        w.count++;
    }
    w.model_weights = list;
    w.master_weights = masters;
    w.start_offsets = start;
    w.shard_weights = codes;
    w.shard_columnwise = columns;
    w.group = set->group;
    w.manual_post_processing = true;
    if (result != TE_OK) te__refuse(set->group, TE__ALL_REDUCE, result);
    else if (w.count) result = te_quantize_master_weights(te, &w);
    te__free(te, list);
    te__free(te, start);
    return result;
}

/* ---- sums over ranks ---- */

/* The slices and the parts of a parameter that ranks have. */
typedef struct te__spread {
    te__shard *shard; /* NULL: it is not sharded */
    te_group *split;  /* whose ranks have parts of their own (te__split); NULL: none */
} te__spread;
static te__spread te__spread_of(const te_tensor *x, te__shard *shard) {
    te__spread s;
    s.shard = shard;
    s.split = x->split ? x->split->group : NULL;
    return s;
}

/* Returns the group of a slice; NULL for a parameter that is not sharded. */
static te_group *te__shard_group(const te__shard *s) { return s && s->set ? s->set->group : NULL; }
/* Returns whether parameters a and b are spread over the same ranks. */
static bool te__spread_alike(const te__spread *a, const te__spread *b) {
    return te__shard_group(a->shard) == te__shard_group(b->shard) && a->split == b->split;
}
/* Returns whether spread[0 .. i - 1] has one that is like spread[i]. */
static bool te__spread_seen(const te__spread *spread, int i) {
    int k;
    for (k = 0; k < i && !te__spread_alike(&spread[k], &spread[i]); k++) {}
    return k < i;
}

/* Replaces *norm [any] by the norms of all ranks of the group. NULL: one rank. */
static te_result te__norm_of_ranks(te_ctx *te, te_group *group, te_tensor **norm, te_result result) {
    te_op_l2norm_args one = TE_ZERO;
    const te_tensor *list = *norm;
    te_tensor *own = *norm, *each = NULL;
    if (!group) return result;
    if (result == TE_OK && te__numel(own) > 1) {
        own = one.norm = te__empty_1d(te, TE_F32, 1);
        one.tensors = &list;
        one.num_tensors = 1;
        result = own ? te_op_l2norm(te, &one) : te_error_code(te);
    }
    if (result == TE_OK && !(each = te__empty_1d(te, TE_F32, te__group_size(group)))) result = te_error_code(te);
    result = result == TE_OK ? te__all_gather(group, own, each) : te__refuse(group, TE__ALL_GATHER, result);
    *norm = each;
    return result;
}

/* Does what te_op_l2norm does, where spread[i] says what other ranks have of the parameter of tensors[i], and kinds
 * [num_kinds] of all parameters, those without a gradient on this rank included: ranks meet once for each kind. Each
 * rank computes the norm of what it has. The norm of these norms has the same bits on all ranks. */
static te_result te__spread_l2norm(te_ctx *te, const te_op_l2norm_args *args, const te__spread *spread,
                                   const te__spread *kinds, int num_kinds, te_result result) {
    te_op_l2norm_args part = TE_ZERO, all = *args;
    const size_t n = (size_t)args->num_tensors + (size_t)num_kinds + 1;
    const int64_t one = 1;
    const te_tensor **list = (const te_tensor **)te__alloc(te, 2 * n * sizeof(te_tensor *)),
                    **parts = list ? list + n : NULL;
    bool told = false;
    int i, k, num_parts = 0;
    if (!list && result == TE_OK) result = TE_ERR_OUT_OF_MEMORY;
    te__frame_begin(te);
    for (i = 0; i < num_kinds && !told; i++) {
        te_group *groups[2];
        te_tensor *norm = NULL;
        if (te__spread_seen(kinds, i)) continue;
        groups[0] = te__shard_group(kinds[i].shard);
        groups[1] = kinds[i].split;
        part.tensors = list;
        part.num_tensors = 0;
        part.inv_scale = args->inv_scale;
        for (k = 0; k < args->num_tensors && result == TE_OK; k++)
            if (te__spread_alike(&spread[k], &kinds[i])) list[part.num_tensors++] = args->tensors[k];
        if (result == TE_OK) norm = part.norm = te_tensor_zeros(te, TE_F32, 1, &one);
        if (result == TE_OK && !norm) result = te_error_code(te);
        if (result == TE_OK && part.num_tensors > 0) result = te_op_l2norm(te, &part);
        for (k = 0; k < 2 && !told; k++) {
            if (groups[k]) result = te__norm_of_ranks(te, groups[k], &norm, result);
            told = groups[k] && result != TE_OK;
        }
        if (result == TE_OK) parts[num_parts++] = norm;
    }
    all.tensors = parts;
    all.num_tensors = num_parts;
    all.inv_scale = NULL;
    if (result == TE_OK) result = te_op_l2norm(te, &all);
    te__frame_end(te, NULL, 0);
    te__free(te, (void *)list);
    return result;
}
/* Replaces x, f32 [1], on all ranks by its maximum, over all ranks that have something of the parameters, kinds[n].
 * `result`: an error of this rank from before, which it tells the others. */
static te_result te__spread_max(te_tensor *x, const te__spread *kinds, int n, te_result result) {
    int i, k;
    for (i = 0; i < n; i++) {
        te_group *groups[2];
        if (te__spread_seen(kinds, i)) continue;
        groups[0] = te__shard_group(kinds[i].shard);
        groups[1] = kinds[i].split;
        for (k = 0; k < 2; k++) {
            if (!groups[k]) continue;
            if (result != TE_OK) return te__refuse(groups[k], TE__ALL_REDUCE, result);
            result = te__all_reduce(groups[k], x, TE_REDUCE_MAX);
            if (result != TE_OK) return result;
        }
    }
    return result;
}
