/* core/tensor.c: the basic functions on tensors: shapes, memory, references and scopes. This file must not call
 * operations. */

TE_API TE__NOINLINE const char *te_dtype_name(te_dtype dtype) {
    static const char *const names[TE_DTYPE_COUNT] = {"none", "f32",  "f16", "bf16", "e4m3", "e5m2",
                                                      "e8m0", "e2m1", "u8",  "i32",  "i64",  "i16"};
    return (int)dtype >= 0 && dtype < TE_DTYPE_COUNT ? names[dtype] : "?";
}
TE_API int te_dtype_bits(te_dtype dtype) {
    static const int bits[TE_DTYPE_COUNT] = {0, 32, 16, 16, 8, 8, 8, 4, 8, 32, 64, 16};
    return (int)dtype >= 0 && dtype < TE_DTYPE_COUNT ? bits[dtype] : 0;
}
TE_API float te_dtype_max(te_dtype dtype) {
    switch (dtype) {
    case TE_F32: return FLT_MAX;
    case TE_F16: return 65504.0f;
    case TE_BF16: return 3.3895313892515355e38f;
    case TE_F8E4M3: return 448.0f;
    case TE_F8E5M2: return 57344.0f;
    case TE_F8E8M0: return 1.7014118346046923e38f;
    case TE_F4E2M1: return 6.0f;
    default: return 0.0f;
    }
}

static bool te__is_float(te_dtype dtype) { return dtype == TE_F32 || dtype == TE_F16 || dtype == TE_BF16; }
static bool te__is_fp8(te_dtype dtype) { return dtype == TE_F8E4M3 || dtype == TE_F8E5M2; }
static bool te__is_index(te_dtype dtype) { return dtype == TE_I32 || dtype == TE_I64; }
static TE__NOINLINE int64_t te__dtype_size(te_dtype dtype) { return te_dtype_bits(dtype) / 8; }

static TE__NOINLINE int64_t te__numel(const te_tensor *x) {
    int64_t n = 1;
    int i;
    for (i = 0; i < x->ndim; i++) n *= x->shape[i];
    return n;
}
/* Returns the number of bytes of a row with `cols` elements. Rows of 4-bit elements are padded to whole bytes. */
static size_t te__row_bytes(te_dtype dtype, int64_t cols) {
    return (size_t)(((uint64_t)cols * (uint64_t)te_dtype_bits(dtype) + 7) / 8);
}
/* Returns the size in bytes of a contiguous tensor. A tensor without dimensions has one element. */
static size_t te__shape_bytes(te_dtype dtype, int ndim, const int64_t *shape) {
    size_t n = 1;
    int i;
    for (i = 0; i < ndim - 1; i++) n *= (size_t)shape[i];
    return n * te__row_bytes(dtype, ndim ? shape[ndim - 1] : 1);
}
static int64_t te__cols(const te_tensor *x) { return x->ndim ? x->shape[x->ndim - 1] : 1; }
/* Returns te__cols(x), or 0 if x is NULL. */
static int64_t te__cols_of(const te_tensor *x) { return x ? te__cols(x) : 0; }
/* Returns the number of rows of x, which is the product of all sizes except the last. */
static TE__NOINLINE int64_t te__rows(const te_tensor *x) {
    int64_t n = 1;
    int i;
    for (i = 0; i + 1 < x->ndim; i++) n *= x->shape[i];
    return n;
}
static bool te__is_contiguous(const te_tensor *x) {
    int64_t expect = 1;
    int i;
    if (te__numel(x) == 0) return true;
    for (i = x->ndim - 1; i >= 0; i--) {
        if (x->shape[i] != 1 && x->stride[i] != expect) return false;
        expect *= x->shape[i];
    }
    return true;
}
static bool te__same_shape(const te_tensor *x, const te_tensor *y) {
    return x->ndim == y->ndim && memcmp(x->shape, y->shape, (size_t)x->ndim * sizeof(int64_t)) == 0;
}
static TE__NOINLINE void *te__data(const te_tensor *x) {
    return x && x->buffer && x->buffer->data ? (void *)((char *)x->buffer->data + x->offset) : NULL;
}
/* These functions return te__data(x) as a pointer to float, int or unsigned char. */
static float *te__f32_data(const te_tensor *x) { return (float *)te__data(x); }
static int *te__int_data(const te_tensor *x) { return (int *)te__data(x); }
static unsigned char *te__u8_data(const te_tensor *x) { return (unsigned char *)te__data(x); }
/* Returns the dtype of x, or TE_DTYPE_NONE if x is NULL. */
static te_dtype te__dtype_of(const te_tensor *x) { return x ? x->dtype : TE_DTYPE_NONE; }
/* Returns the end of x, in bytes from the start of its buffer. A strided tensor never has 4-bit elements. */
static int64_t te__end(const te_tensor *x) {
    int64_t last = 0;
    int i;
    if (te__is_contiguous(x)) return x->offset + (int64_t)te__shape_bytes(x->dtype, x->ndim, x->shape);
    for (i = 0; i < x->ndim; i++) last += (x->shape[i] - 1) * x->stride[i];
    return x->offset + (last + 1) * te__dtype_size(x->dtype);
}
/* Records that the memory of x was written, or will be written next. */
static void te__touch(te_tensor *x) {
    te__buffer *b = x ? x->buffer : NULL;
    if (!b) return;
    if (b->used) te__stream_wait(x->te, NULL, b->used); /* a copy on another stream may still read the old bytes */
    if (x->te->capture) {
        b->times = b->written == x->te->capture->id ? b->times + 1 : 1;
        b->written = x->te->capture->id;
    }
    /* a tape node may have saved a tensor in another part of the buffer, so only the written byte range is marked */
    if (b->saved_at && (x->te->tape.root.num_nodes || x->te->tape.segment->num_nodes)) {
        int64_t end = te__end(x);
        if (x->offset > 0 || end < (int64_t)b->bytes) {
            te__buffer_touch_part(b, x->offset, end);
            return;
        }
    }
    te__buffer_touch(b);
}

/* Finds the plain tensors that hold the value of *x, and returns their number. slot[i] becomes the address of the
 * pointer to tensor i, so that the caller can replace the tensor. If *x is plain, slot[0] is x. If *x is quantized,
 * *slot[i] may be NULL. */
static int te__part_slots(te_tensor **x, te_tensor **slot[TE__MAX_PARTS]) {
    slot[0] = x;
    return (*x)->form ? (*x)->form->parts(*x, slot) : 1;
}
static int te__parts(te_tensor *x, te_tensor *part[TE__MAX_PARTS]) {
    te_tensor **slot[TE__MAX_PARTS];
    int i, n = te__part_slots(&x, slot);
    for (i = 0; i < n; i++) part[i] = *slot[i];
    return n;
}
/* Records that a tape node saves x now. */
static void te__note_saved(te_tensor *x) {
    te_tensor *part[TE__MAX_PARTS];
    int i, n = te__parts(x, part);
    for (i = 0; i < n; i++)
        if (part[i] && part[i]->buffer) part[i]->buffer->saved_at = x->te->writes;
}
/* Returns whether any part of x's memory was written after the time `at` (a value of te->writes). */
static bool te__written_since(te_tensor *x, uint64_t at) {
    te_tensor *part[TE__MAX_PARTS];
    int i, n = te__parts(x, part);
    for (i = 0; i < n; i++) {
        const te__buffer *b = part[i] ? part[i]->buffer : NULL;
        if (!b || (b->written_at <= at && !b->arena)) continue; /* the usual case */
        if (te__numel(part[i]) > 0 && te__buffer_written(b, part[i]->offset, te__end(part[i]), at)) return true;
    }
    return false;
}

/* Writes a shape such as "[4, 128, 64]" into `out`, which has TE__SHAPE_TEXT bytes. */
enum { TE__SHAPE_TEXT = 24 * TE_MAX_DIMS };
static const char *te__dims_text(int ndim, const int64_t *shape, char *out) {
    int i, n = snprintf(out, TE__SHAPE_TEXT, "[");
    for (i = 0; i < ndim; i++)
        n += snprintf(out + n, (size_t)(TE__SHAPE_TEXT - n), i ? ", %lld" : "%lld", (long long)shape[i]);
    snprintf(out + n, (size_t)(TE__SHAPE_TEXT - n), "]");
    return out;
}
static const char *te__shape_text(const te_tensor *x, char *out) { return te__dims_text(x->ndim, x->shape, out); }

/* Writes the name of x, if it has one, and its shape into `out`, which has TE__NAMED_TEXT bytes. */
enum { TE__NAMED_TEXT = TE__SHAPE_TEXT + 64 };
static const char *te__named_text(const te_tensor *x, char *out) {
    char shape[TE__SHAPE_TEXT];
    snprintf(out, TE__NAMED_TEXT, x->name ? "\"%.60s\" %s" : "%s%s", x->name ? x->name : "", te__shape_text(x, shape));
    return out;
}
/* Says why a tensor that is not quantized has no memory. */
static const char *te__no_memory_why(const te_tensor *x) {
    return x->moves ? "is a sharded parameter, which has memory only while its unit's forward or backward pass runs, "
                      "and between te_fsdp_unshard and te_fsdp_reshard"
                    : "was made by te_tensor_describe and has no memory: such tensors are for te_explain, and for "
                      "modules that answer with a shape";
}
static te_result te__no_plain_memory(const te_tensor *x, const char *who) {
    char text[TE__NAMED_TEXT];
    return te__fail(x->te, TE_ERR_STATE, "%s: the tensor %s %s", who, te__named_text(x, text),
                    x->form ? "is quantized: te_dequantize it first" : te__no_memory_why(x));
}
/* Returns whether x is NULL or has a shape but no memory. For such an input a module returns a tensor without
 * memory. */
static bool te__is_unallocated(const te_tensor *x) {
    return !x || (!x->buffer && !x->form) || (x->te->empty_is_unallocated && te__numel(x) == 0);
}
/* Fails if x has no memory, as after te_tensor_describe. A quantized tensor passes. */
static te_result te__need_memory(const te_tensor *x, const char *who) {
    return x->buffer || x->form ? TE_OK : te__no_plain_memory(x, who);
}

/* ---- references ---- */

static void te__var_release(te_ctx *te, te__var *v) {
    if (!v || --v->refs > 0) return;
    te_tensor_release(v->grad);
    te_tensor_release(v->main_grad);
    te_tensor_release(v->decoupled_grad);
    te_tensor_release(v->shard_grad);
    te__free(te, v);
}

static void te__tensor_free(te_tensor *x) {
    te_ctx *te = x->te;
    if (x->form) x->form->release(x);
    te__buffer_release(x->buffer);
    te__var_release(te, x->var);
    te__free(te, x->name);
    te__free(te, x->split);
    te__free(te, x);
}

TE_API TE__NOINLINE te_tensor *te_tensor_retain(te_tensor *x) {
    if (x) x->refs++;
    return x;
}
TE_API void te_tensor_release(te_tensor *x) {
    if (x && --x->refs == 0) te__tensor_free(x);
}

/* Releases the scope's reference to x before the scope ends. */
static void te__drop(te_tensor *x) {
    te_ctx *te;
    int i;
    if (!x) return;
    te = x->te;
    for (i = te->num_live - 1; i >= 0; i--)
        if (te->live[i] == x) {
            memmove(te->live + i, te->live + i + 1, (size_t)(te->num_live - i - 1) * sizeof(te_tensor *));
            te->num_live--;
            te_tensor_release(x);
            return;
        }
}

/* The largest number of elements of a tensor. The number of bits then fits into an int64_t, even with 64-bit
 * elements. */
#define TE__MAX_ELEMENTS (INT64_MAX >> 7)

/* Returns a tensor without memory, which belongs to the innermost scope. */
static te_tensor *te__tensor_shell(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape) {
    te_tensor *x;
    char text[TE__SHAPE_TEXT];
    int i;
    int64_t n = 1;
    bool empty = false;
    if (!te) return NULL;
    if (te_dtype_bits(dtype) == 0)
        return te__no_tensor(te, TE_ERR_DTYPE, "tensor: %d is not a number format (see te_dtype)", (int)dtype);
    if (ndim < 0 || ndim > TE_MAX_DIMS || (ndim > 0 && !shape))
        return te__no_tensor(te, TE_ERR_SHAPE, "tensor: %d dimensions; 0 to %d are possible%s", ndim, TE_MAX_DIMS,
                             shape ? "" : ", with a shape");
    for (i = 0; i < ndim; i++) {
        /* division is slow: only products that could overflow are divided */
        if (shape[i] < 0 || ((shape[i] | n) >> 28 != 0 && shape[i] > 0 && n > TE__MAX_ELEMENTS / shape[i]))
            return te__no_tensor(te, TE_ERR_SHAPE,
                                 "tensor: shape %s has a negative size or more elements than 64 bits can count",
                                 te__dims_text(ndim, shape, text));
        if (shape[i] > 0) n *= shape[i];
        else empty = true;
    }
    /* can only happen with 32-bit addresses */
    if (!empty && (uint64_t)(n * te__max(te__dtype_size(dtype), 1)) > (uint64_t)PTRDIFF_MAX)
        return te__no_tensor(
            te, TE_ERR_SHAPE,
            "tensor: %s of shape %s has more bytes than the %lld that a tensor can have where addresses have %d bits",
            te_dtype_name(dtype), te__dims_text(ndim, shape, text), (long long)PTRDIFF_MAX, (int)(8 * sizeof(void *)));
    if (!te__grow(te, (void **)&te->live, &te->cap_live, te->num_live, sizeof(te_tensor *))) return NULL;
    x = (te_tensor *)te__alloc_zero(te, sizeof(te_tensor));
    if (!x) return NULL;
    x->te = te;
    x->refs = 1;
    x->dtype = dtype;
    x->ndim = ndim;
    n = 1;
    for (i = ndim - 1; i >= 0; i--) {
        x->shape[i] = shape[i];
        x->stride[i] = n;
        n *= shape[i];
    }
    te->live[te->num_live++] = x;
    return x;
}

TE_API size_t te_tensor_bytes(const te_tensor *x) { return x ? te__shape_bytes(x->dtype, x->ndim, x->shape) : 0; }

TE_API te_tensor *te_tensor_empty(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape) {
    te_tensor *x = te__tensor_shell(te, dtype, ndim, shape);
    if (!x) return NULL;
    x->buffer = te__buffer_create(te, te__shape_bytes(dtype, ndim, shape));
    if (!x->buffer) {
        te__drop(x);
        return NULL;
    }
    return x;
}
static TE__NOINLINE te_tensor *te__empty_like(const te_tensor *x, te_dtype dtype) {
    return te_tensor_empty(x->te, dtype, x->ndim, x->shape);
}
static te_tensor *te__empty_1d(te_ctx *te, te_dtype dtype, int64_t n) { return te_tensor_empty(te, dtype, 1, &n); }
static te_tensor *te__empty_2d(te_ctx *te, te_dtype dtype, int64_t rows, int64_t cols) {
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = cols;
    return te_tensor_empty(te, dtype, 2, shape);
}

TE_API te_tensor *te_tensor_describe(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape) {
    return te__tensor_shell(te, dtype, ndim, shape);
}

TE_API te_tensor *te_tensor_wrap(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, void *data,
                                 void (*release)(void *user), void *user) {
    te_tensor *x = te__tensor_shell(te, dtype, ndim, shape);
    if (!x) return NULL;
    if (!data && te__numel(x) > 0) {
        te__fail(te, TE_ERR_INVALID, "te_tensor_wrap: data is NULL for a tensor of %lld elements",
                 (long long)te__numel(x));
        te__drop(x);
        return NULL;
    }
    if (te__dtype_size(dtype) > 1 && (uintptr_t)data % (uintptr_t)te__dtype_size(dtype) != 0) {
        te__fail(te, TE_ERR_INVALID, "te_tensor_wrap: address %p is not aligned to the %d bytes of %s", data,
                 (int)te__dtype_size(dtype), te_dtype_name(dtype));
        te__drop(x);
        return NULL;
    }
    x->buffer = te__buffer_wrap(te, data, te__shape_bytes(dtype, ndim, shape), release, user);
    if (!x->buffer) {
        te__drop(x);
        return NULL;
    }
    return x;
}

/* Returns a contiguous tensor in the memory of x, `offset` bytes after the start of x, without history on the tape. */
static te_tensor *te__alias_as(const te_tensor *x, int64_t offset, te_dtype dtype, int ndim, const int64_t *shape) {
    te_tensor *y = te__tensor_shell(x->te, dtype, ndim, shape);
    if (!y) return NULL;
    y->buffer = x->buffer;
    y->offset = x->offset + offset;
    if (y->buffer) y->buffer->refs++;
    return y;
}
static te_tensor *te__alias_1d(const te_tensor *x, int64_t offset, te_dtype dtype, int64_t n) {
    return te__alias_as(x, offset, dtype, 1, &n);
}
static te_tensor *te__alias_2d(const te_tensor *x, int64_t offset, te_dtype dtype, int64_t rows, int64_t cols) {
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = cols;
    return te__alias_as(x, offset, dtype, 2, shape);
}

/* Returns another tensor that shares the memory of x and has no history on the tape. */
static te_tensor *te__alias(const te_tensor *x) {
    te_tensor *y = te__alias_as(x, 0, x->dtype, x->ndim, x->shape);
    if (y) memcpy(y->stride, x->stride, sizeof(x->stride));
    return y;
}

/* Returns another tensor that shares the value of x and has no history on the tape. x may be quantized. */
static te_tensor *te__alias_any(const te_tensor *x) {
    te_tensor *y;
    if (!x->form) return te__alias(x);
    y = te__tensor_shell(x->te, x->dtype, x->ndim, x->shape);
    if (!y || x->form->share(x, y)) return y;
    te__drop(y);
    return NULL;
}

/* ---- tape nodes ---- */

static void te__path_release(te_ctx *te, te__path *path) {
    if (path && --path->refs == 0) te__free(te, path);
}

/* Drops the handles that the pack hooks returned for the saved tensors of a node (tape/saved.c). */
static void te__saved_free(te_ctx *te, te__node *node) {
    int i;
    if (!node->packed) return;
    for (i = 0; i < node->num_saved; i++)
        if (node->packed[i] && node->hooks.drop) node->hooks.drop(node->hooks.user, node->packed[i]);
    te__free(te, node->packed);
    te__free(te, node->packed_as);
    node->packed = NULL;
}

static void te__node_free(te_ctx *te, te__node *node) {
    int i;
    if (!node) return; /* the node is being played */
    te__saved_free(te, node);
    te__path_release(te, node->path);
    te__arena_drop(te, node->arena);
    for (i = 0; i < node->num_inputs; i++) te__var_release(te, node->inputs[i]);
    for (i = 0; i < node->num_outputs; i++) te__var_release(te, node->outputs[i]);
    for (i = 0; i < node->num_saved; i++) te_tensor_release(node->saved[i]);
    te__free(te, node->inputs);
    te__free(te, node->outputs);
    te__free(te, node->saved);
    if (node->release) node->release(te, node->state);
    te__free(te, node->state);
    te__free(te, node);
}
/* Frees the nodes of s from index `first_node` on. */
static void te__segment_cut(te_ctx *te, te__segment *s, int first_node) {
    while (s->num_nodes > first_node) te__node_free(te, s->nodes[--s->num_nodes]);
}

/* ---- scopes ---- */

/* Begins a frame: a scope of the library itself. The end of a frame releases its temporary tensors and keeps its tape
 * nodes. */
static void te__frame_begin(te_ctx *te) {
    int depth = te->num_scopes++;
    if (depth >= TE__MAX_SCOPES) {
        te__fail(te, TE_ERR_STATE, "%d scopes are open; %d is the most: is a te_scope_end missing?", te->num_scopes,
                 TE__MAX_SCOPES);
        return;
    }
    te->scopes[depth].first_tensor = te->num_live;
    te->scopes[depth].segment = te->tape.segment;
    te->scopes[depth].first_node = te->tape.segment->num_nodes;
}

/* Ends a frame. Tensors in `keep` (which may contain NULL) move to the enclosing scope; all others are released. */
static TE__NOINLINE void te__frame_end(te_ctx *te, te_tensor *const *keep, int num_keep) {
    int first, i, k, kept;
    /* Too many scopes are open: te__frame_begin did not begin this frame, and the live tensors belong to another
     * one. */
    if (--te->num_scopes >= TE__MAX_SCOPES) return;
    first = kept = te->scopes[te->num_scopes].first_tensor;
    for (i = first; i < te->num_live; i++) {
        te_tensor *x = te->live[i];
        for (k = 0; k < num_keep && keep[k] != x; k++) {}
        if (k < num_keep)
            te->live[kept++] = x;
        else
            te_tensor_release(x);
    }
    te->num_live = kept;
}
/* Releases the tensors of the innermost frame except those in `keep`; the frame stays open. */
static void te__frame_sweep(te_ctx *te, te_tensor *const *keep, int num_keep) {
    te__frame_end(te, keep, num_keep);
    te->num_scopes++;
}
/* Ends a frame and returns x, which moves to the enclosing scope. */
static te_tensor *te__frame_return(te_ctx *te, te_tensor *x) {
    te__frame_end(te, &x, 1);
    return x;
}

TE_API te_result te_scope_begin(te_ctx *te) {
    te_result result = te ? te__refuse_hook(te, "te_scope_begin") : TE_ERR_STATE;
    if (result != TE_OK) return result;
    te__frame_begin(te);
    return te->num_scopes > TE__MAX_SCOPES ? TE_ERR_STATE : TE_OK;
}
TE_API void te_scope_end(te_ctx *te) {
    if (!te || te__refuse_hook(te, "te_scope_end") != TE_OK) return;
    if (te->num_scopes == 0) {
        te__fail(te, TE_ERR_STATE, "te_scope_end without te_scope_begin");
        return;
    }
    if (te->num_scopes <= TE__MAX_SCOPES)
        te__segment_cut(te, te->scopes[te->num_scopes - 1].segment, te->scopes[te->num_scopes - 1].first_node);
    te__frame_end(te, NULL, 0);
}
