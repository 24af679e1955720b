/* quant/copies.c: allocates and fills the two copies of a quantized tensor. Makes a column-wise copy from a row-wise
 * one. This file must not depend on recipes or modules. */

/* ---- memory ---- */

/* Returns the number of amaxes of one copy of an [m, n] matrix. */
static int64_t te__num_amaxes(const te__quant_spec *spec, int which, int64_t m, int64_t n) {
    return spec->sizes ? te__numel(spec->sizes) : !spec->row_scaled ? 1 : which == TE_ROWWISE ? m : n;
}

/* Allocates the tensors of one copy of an [m, n] matrix. The copy owns the tensors. `clear`: they are zeros. */
static te_result te__copy_open(te_ctx *te, te__quant_copy *c, const te__quant_spec *spec, int which, te_dtype nominal,
                               int64_t m, int64_t n, bool clear) {
    te_tensor *(*make)(te_ctx *, te_dtype, int, const int64_t *) = clear ? te_tensor_zeros : te_tensor_empty;
    const te__quant_class *cls = spec->cls;
    bool columnwise = which == TE_COLUMNWISE, turned = columnwise && cls->facts & TE__TRANSPOSED,
         codes = cls->form == TE__FORM_CODES;
    int64_t amaxes = te__num_amaxes(spec, which, m, n);
    c->cls = cls;
    c->two_dimensional = spec->two_dimensional;
    c->rht = spec->rht && columnwise;
    c->no_random_sign_mask = spec->no_random_sign_mask;
    c->e4m3_max_256 = spec->e4m3_max_256;
    c->swizzled = spec->swizzled;
    c->custom = spec->custom;
    if (te__is_opaque(cls)) return TE_OK; /* the user's quantize function allocates the tensors */
    if (spec->sizes && te__copy_is_padded(c, which)) m = te__padded_rows(m, te__numel(spec->sizes), cls->group_rows);
    int64_t shape[2] = {turned ? n : m, turned ? m : n};
    if (codes) shape[1] = te__quant_ld(spec->dtype, shape[1]);
    c->data = te_tensor_retain(make(te, codes ? spec->dtype : nominal, 2, shape));
    if (!codes || !c->data) return c->data ? TE_OK : te_error_code(te);
    shape[0] = spec->sizes ? te__numel(spec->sizes) : 1;
    if (cls->scale_shape) cls->scale_shape(c, columnwise, columnwise ? n : m, columnwise ? m : n, shape);
    c->scale = te_tensor_retain(make(te, cls->scale_dtype, cls->scale_shape ? 2 : 1, shape));
    if (cls->facts & TE__TENSOR_AMAX) c->amax = te_tensor_retain(make(te, TE_F32, 1, &amaxes));
    return c->scale && (c->amax || !(cls->facts & TE__TENSOR_AMAX)) ? TE_OK : te_error_code(te);
}

/* Makes the two copies share one tensor for a scale or an amax that has the same value in both. After a Hadamard
 * transform the column-wise copy has another amax, and keeps its own tensor. */
static void te__copies_share(te__quantized *q) {
    te__quant_copy *row = &q->row, *col = &q->col;
    if (!row->data || !col->data || row->cls != q->cls || col->cls != q->cls) return;
    if (q->cls->facts & TE__TENSOR_SCALED) {
        te_tensor_release(col->scale);
        col->scale = te_tensor_retain(row->scale);
    }
    if (!col->rht && row->amax && col->amax && te__numel(row->amax) == 1 && te__numel(col->amax) == 1) {
        te_tensor_release(col->amax);
        col->amax = te_tensor_retain(row->amax);
    }
}

/* Returns the sizes of the groups of rows, from the spec of either copy. NULL means that all rows are one group. */
static te_tensor *te__sizes_of(const te__quant_spec *spec) {
    te_tensor *of_row = te__spec_of(spec, TE_ROWWISE)->sizes;
    return of_row ? of_row : te__spec_of(spec, TE_COLUMNWISE)->sizes;
}
/* Returns a quantized tensor with memory for the copies named by `usage`. The tensor belongs to the innermost scope. */
static te_tensor *te__quant_empty(te_ctx *te, te_dtype nominal, int ndim, const int64_t *shape,
                                  const te__quant_spec *spec, int usage, bool clear) {
    te_tensor *y = te__tensor_shell(te, nominal, ndim, shape);
    te_result result = TE_OK;
    int which;
    if (!y) return NULL;
    y->quantized = (te__quantized *)te__alloc_zero(te, sizeof(te__quantized));
    if (y->quantized) y->form = &te__quantized_form;
    if (!y->quantized) {
        te__drop(y);
        return NULL;
    }
    y->quantized->cls = spec->cls;
    y->quantized->sizes = te_tensor_retain(te__sizes_of(spec));
    te__frame_begin(te);
    for (which = TE_ROWWISE; which <= TE_COLUMNWISE && result == TE_OK; which++)
        if (usage & which)
            result = te__copy_open(te, te__copy_of(y, which), te__spec_of(spec, which), which, nominal, te__rows(y),
                                   te__cols(y), clear);
    te__copies_share(y->quantized);
    te__frame_end(te, NULL, 0);
    if (result == TE_OK) return y;
    te__drop(y);
    return NULL;
}

static bool te__is_custom(const te_tensor *x) {
    return te__is_opaque(x->quantized->row.cls) || te__is_opaque(x->quantized->col.cls);
}

/* Returns the row-wise copy of x if x has one, else the column-wise copy. */
static te__quant_copy *te__first_copy(const te_tensor *x) {
    return x->quantized->row.data ? &x->quantized->row : &x->quantized->col;
}
static const te_tensor *te__quant_counted(const te_tensor *x) {
    const te__quant_copy *c = te__first_copy(x);
    return c->scale ? c->scale : c->data;
}
/* Returns the version of a quantized tensor, which each write increases. The version is counted in the scale's buffer
 * if there is a scale, because the buffer of the codes may hold other tensors too. */
static uint64_t te__quant_version(const te_tensor *x) {
    const te_tensor *counted = te__quant_counted(x);
    return x->quantized->version_shift + (counted && counted->buffer ? te__buffer_version(counted->buffer) : 0);
}
/* Sets the version of x to `version`. Called after the value has moved to another buffer. */
static void te__quant_set_version(te_tensor *x, uint64_t version) {
    x->quantized->version_shift += version - te__quant_version(x);
}

/* ---- filling ---- */

/* Sets `amax` to the largest |x| if that is larger than `amax`. */
static te_result te__amax_into(const te_tensor *x, te_tensor *amax) {
    te_op_amax_args args = TE_ZERO;
    args.x = x;
    args.amax = amax;
    args.keep = true;
    return te_op_amax(x->te, &args);
}

/* Takes a free te__amax_word of the context, and returns its `pair`. The pair has two f32 numbers, and both are 0. A
 * kernel will write an amax to the first number. Returns NULL if no te__amax_word is free. */
static te_tensor *te__amax_take(te_ctx *te) {
    int i;
    for (i = 0; i < TE__AMAX_WORDS; i++) {
        te__amax_word *w = &te__quant_of(te)->amax_words[i];
        if (w->taken) continue;
        w->taken = true;
        return &w->pair;
    }
    return NULL;
}
static te__amax_word *te__amax_word_of(te_tensor *pair) { return (te__amax_word *)(void *)pair; }
/* Frees a pair from te__amax_take. If `read` is true, a cast has already reset the pair to 0. Otherwise this function
 * does so. */
static void te__amax_give(te_tensor *pair, bool read) {
    if (!pair) return;
    if (!read) pair->te->device->clear(pair->te, te__data(pair), te_tensor_bytes(pair));
    te__amax_word_of(pair)->taken = false;
}

/* Quantizes x as `spec` says, and writes the copies of y that are named by `usage`. */
static te_result te__quant_fill(te_tensor *y, te_tensor *x, const te__quant_spec *spec, int usage,
                                const te_tensor *noop) {
    te__quant_copy *row = usage & TE_ROWWISE ? &y->quantized->row : NULL,
                   *col = usage & TE_COLUMNWISE ? &y->quantized->col : NULL;
    uint64_t before = te__quant_version(y);
    te_tensor *flat;
    te_result result;
    te__frame_begin(x->te);
    flat = te_tensor_contiguous(x);
    result = !flat ? te_error_code(x->te) : row || col ? te__fill_copies(flat, spec, row, col, noop) : TE_OK;
    /* custom kinds make new tensors, whose versions start anew */
    if (result == TE_OK && !x->te->warming && te__is_custom(y)) te__quant_set_version(y, before + 1);
    te__frame_end(x->te, NULL, 0);
    return result;
}

/* Quantizes x. The tape does not record this. */
static te_tensor *te__quantize(te_tensor *x, const te__quant_spec *spec) {
    te_tensor *y;
    te__frame_begin(x->te);
    y = te__quant_empty(x->te, x->dtype, x->ndim, x->shape, spec, spec->usage, false);
    if (y && te__quant_fill(y, x, spec, spec->usage, NULL) != TE_OK) y = NULL;
    return te__frame_return(x->te, y);
}

/* An output of an operation. It is quantized if there is a spec. If the scale is given, the operation writes codes.
 * Otherwise te__quant_out_close quantizes `plain`. For an empty output te__quant_out_close always quantizes `plain`,
 * because the operation does not always write the scale-inverse of an empty output. */
typedef struct te__quant_out {
    te_tensor *y, *plain;  /* plain: a tensor that is quantized later; NULL if the operation writes the codes itself, or
                            * if y is not quantized */
    te_tensor *data, *col; /* data: y, `plain` or the row-wise codes. col: the column-wise codes or NULL. The operation
                            * writes both */
    const te_tensor *scale;
    te_tensor *scale_inv, *amax;
    te_tensor *x_amax; /* the pair from te__amax_take, whose first number is `amax`; or NULL */
} te__quant_out;

/* Sets out->amax to the tensor in which the operation stores the amax of its output. If a group of ranks reduces the
 * amax, this tensor is a new one. */
static te_result te__quant_out_amax(te__quant_out *out, const te__quant_spec *spec) {
    te_ctx *te = out->y->te;
    const te__quant_copy *c = te__first_copy(out->y);
    bool grouped = te__group_size(spec->group) > 1;
    if (spec->cls->facts & TE__TENSOR_SCALED && !grouped) out->x_amax = te__amax_take(te);
    out->amax = out->x_amax           ? &te__amax_word_of(out->x_amax)->amax
                : c->amax && !grouped ? c->amax
                                      : te__empty_1d(te, TE_F32, 1);
    return !out->amax ? te_error_code(te) : out->x_amax ? TE_OK : te_tensor_fill(out->amax, 0.0);
}

/* Begins an output of the given shape. If `spec` is NULL, the output is not quantized. On failure, y in the returned
 * struct is NULL. */
static te__quant_out te__quant_out_open(te_ctx *te, te_dtype nominal, int ndim, const int64_t *shape,
                                        const te__quant_spec *spec) {
    te__quant_out out = TE_ZERO;
    bool grouped, empty = false;
    int i;
    if (!spec) {
        out.y = out.data = te_tensor_empty(te, nominal, ndim, shape);
        return out;
    }
    grouped = !(spec->cls->facts & TE__SCALE_GIVEN) && te__group_size(spec->group) > 1;
    for (i = 0; i < ndim; i++) empty = empty || shape[i] == 0;
    out.y = te__quant_empty(te, nominal, ndim, shape, spec, spec->usage, false);
    if (out.y && spec->cls->facts & TE__SCALE_GIVEN && !empty) {
        out.data = out.y->quantized->row.data;
        out.col = out.y->quantized->col.data;
        out.scale = spec->scale;
        out.scale_inv = te__first_copy(out.y)->scale;
        out.amax = spec->amax;
    } else if (out.y) {
        out.data = out.plain = te_tensor_empty(te, nominal, ndim, shape);
        if (!out.plain || (!empty && te__takes_amax(spec) && te__quant_out_amax(&out, spec) != TE_OK)) out.y = NULL;
    }
    if (!out.y && grouped) te__refuse(spec->group, TE__ALL_REDUCE, te_error_code(te));
    return out;
}
/* Ends an output: quantizes the plain tensor if there is one. `result` is the result of the operation that wrote the
 * output. */
static te_result te__quant_out_close(te__quant_out *out, const te__quant_spec *spec, te_result result) {
    te__quant_spec known;
    if (!out->plain) return result;
    known = *spec;
    known.x_amax = out->x_amax;
    if (out->amax) known.amax = out->amax;
    if (result == TE_OK)
        result = te__quant_fill(out->y, out->plain, &known, spec->usage, NULL);
    else if (!(spec->cls->facts & TE__SCALE_GIVEN))
        te__refuse(spec->group, TE__ALL_REDUCE, result);
    te__amax_give(out->x_amax, result == TE_OK);
    return result;
}


/* ---- the column-wise copy from the row-wise one ---- */

/* Returns true if the column-wise copy of x can be made from the row-wise one. The copies of a hybrid tensor are
 * independent. */
static bool te__column_follows(const te_tensor *x) {
    const te__quant_copy *row = &x->quantized->row;
    return row->data && row->cls == x->quantized->cls && row->cls->facts & TE__COLUMNS_FOLLOW &&
           (row->two_dimensional || row->cls->slice_tile[0] == 0) && !row->rht && !row->swizzled &&
           (!row->amax || te__numel(row->amax) == 1);
}

/* Returns a spec with which te__copy_open makes a copy in the layout of c. */
static te__quant_spec te__copy_spec(const te__quant_copy *c) {
    te__quant_spec spec;
    memset(&spec, 0, sizeof(spec));
    spec.cls = c->cls;
    spec.dtype = c->data->dtype;
    spec.two_dimensional = c->two_dimensional;
    spec.rht = c->rht;
    spec.no_random_sign_mask = c->no_random_sign_mask;
    spec.e4m3_max_256 = c->e4m3_max_256;
    spec.swizzled = c->swizzled;
    return spec;
}

/* Makes the column-wise copy of a tensor from the row-wise one. If a column-wise copy exists already, overwrites it. */
static te_result te__quant_add_columnwise(te_tensor *x) {
    te__quantized *q = x->quantized;
    te__quant_copy *row = &q->row, *col = &q->col;
    te_ctx *te = x->te;
    te_result result = TE_OK;
    bool warming = te->warming, is_new = !col->data;
    int64_t m = te__rows(x), n = te__cols(x);
    if (!te__column_follows(x))
        return te__fail(te, TE_ERR_STATE,
                        "a column-wise copy cannot be made from %s; quantize with TE_ROWWISE | TE_COLUMNWISE",
                        row->data ? "a row-wise one of this kind: each holds numbers of its own"
                                  : "a tensor without a row-wise one");
    if (is_new && te->capture && row->data->buffer && te__is_outside(row->data->buffer))
        return te__refuse_capture(te, "adding a column-wise copy to a tensor that was there before", TE__RUN_FIRST);
    te__frame_begin(te);
    te->warming = false; /* operations compute nothing between te_warmup_begin and te_warmup_end. This copy must be
                          * computed even then, because later calls read it */
    if (row->cls->form == TE__FORM_PLAIN) {
        if (!is_new) result = te_tensor_copy(col->data, row->data);
        else {
            *col = *row;
            te__copy_retain(col);
        }
    } else {
        te_op_transpose_args turn = TE_ZERO;
        if (is_new) {
            te__quant_spec spec = te__copy_spec(row);
            result = te__copy_open(te, col, &spec, TE_COLUMNWISE, x->dtype, m, n, false);
            if (result == TE_OK) te__copies_share(q);
        }
        turn.src = row->data;
        turn.dst = col->data;
        turn.rows = m;
        turn.columns = n;
        if (result == TE_OK) result = te_op_transpose(te, &turn);
        if (result == TE_OK && row->cls->turn_scales) result = row->cls->turn_scales(te, row, col, m, n);
        if (result != TE_OK && is_new) te__copy_release(col);
    }
    te->warming = warming;
    te__frame_end(te, NULL, 0);
    return result;
}

/* Returns a second handle to x, for the backward pass. It has only the copies named by `usage`. */
static te_tensor *te__quant_keep(const te_tensor *x, int usage) {
    te_tensor *y = te__alias_any(x);
    if (!y) return NULL;
    if (x->name) te_tensor_set_name(y, x->name);
    if (!(usage & TE_ROWWISE)) te__copy_release(&y->quantized->row);
    if (!(usage & TE_COLUMNWISE)) te__copy_release(&y->quantized->col);
    return y;
}
