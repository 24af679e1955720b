/* quant/copies.c: the two copies of a quantized tensor: their memory, filling them, reading them back, making one from the other.
 * Knows the quantizing operations and groups; must not know recipes or modules. */

static bool te__is_tensor_scaled(te_quant_kind kind) { return kind == TE_QUANT_DELAYED || kind == TE_QUANT_CURRENT; }

/* The spec of one copy: hybrid quantizers have two. */
static const te__quant_spec *te__spec_of(const te__quant_spec *spec, int which) {
    if (spec->kind != TE_QUANT_HYBRID) return spec;
    return which == TE_ROWWISE ? spec->row : spec->col;
}
static te__quant_copy *te__copy_of(const te_tensor *x, int which) { return which == TE_ROWWISE ? &x->quantized->row : &x->quantized->col; }

/* ---- memory ---- */

/* Rows of codes start at multiples of 16 bytes, so that every kernel may load them 16 bytes at a time whatever the shape. */
static int64_t te__quant_ld(te_dtype dtype, int64_t columns) { return te__round_up(columns, dtype == TE_F4E2M1 ? 32 : 16); }

/* Does a column-wise copy of this kind lie transposed? */
static bool te__lies_transposed(te_quant_kind kind) { return te__is_tensor_scaled(kind) || kind == TE_QUANT_BLOCK || kind == TE_QUANT_NVFP4; }

/* Sizes of the scales of one copy of an [m, n] matrix, as the operations lay them out. */
static void te__scale_shape(const te__quant_copy *c, int which, int64_t m, int64_t n, int64_t shape[2]) {
    int64_t outer = which == TE_ROWWISE ? m : n, inner = which == TE_ROWWISE ? n : m; /* inner: along the contraction */
    if (c->kind == TE_QUANT_BLOCK && c->two_dimensional) {
        shape[0] = te__div_up(outer, 128);
        shape[1] = te__round_up(te__div_up(inner, 128), 4);
    } else if (c->kind == TE_QUANT_BLOCK) {
        shape[0] = te__div_up(inner, 128);
        shape[1] = te__round_up(outer, 4);
    } else if (c->kind == TE_QUANT_MXFP8 && which == TE_COLUMNWISE) {
        shape[0] = te__round_up(te__div_up(inner, 32), 4);
        shape[1] = te__round_up(outer, 128);
    } else {
        shape[0] = te__round_up(outer, 128);
        shape[1] = te__round_up(te__div_up(inner, c->kind == TE_QUANT_MXFP8 ? 32 : 16), 4);
    }
}

/* How many amaxes an NVFP4 copy has: row-scaled, one for each row of x, or for each column. */
static int64_t te__nvfp4_amaxes(const te__quant_spec *spec, int which, int64_t m, int64_t n) { return !spec->row_scaled ? 1 : which == TE_ROWWISE ? m : n; }

/* One copy of an [m, n] matrix by `spec`, uninitialised or cleared. The tensors belong to the copy. */
static te_result te__copy_open(te_ctx *te, te__quant_copy *c, const te__quant_spec *spec, int which, te_dtype nominal, int64_t m, int64_t n, bool clear) {
    static const te_dtype scale_dtype[] = {TE_F32, TE_F32, TE_F32, TE_F32, TE_F8E8M0, TE_F8E4M3};
    te_tensor *(*make)(te_ctx *, te_dtype, int, const int64_t *) = clear ? te_tensor_zeros : te_tensor_empty;
    int64_t shape[2], one = 1;
    bool turned = which == TE_COLUMNWISE && te__lies_transposed(spec->kind);
    c->kind = spec->kind;
    c->two_dimensional = spec->two_dimensional;
    c->rht = spec->rht && which == TE_COLUMNWISE;
    c->no_sign_mask = spec->no_sign_mask;
    c->e4m3_max_256 = spec->e4m3_max_256;
    c->swizzled = spec->swizzled;
    if (spec->kind == TE_QUANT_CUSTOM) { /* its own function brings the memory */
        c->custom = spec->custom;
        return TE_OK;
    }
    shape[0] = turned ? n : m;
    shape[1] = turned ? m : n;
    if (spec->kind == TE_QUANT_IDENTITY) {
        c->data = te_tensor_retain(make(te, nominal, 2, shape));
        return c->data ? TE_OK : te_error_code(te);
    }
    shape[1] = te__quant_ld(spec->dtype, shape[1]);
    c->data = te_tensor_retain(make(te, spec->dtype, 2, shape));
    te__scale_shape(c, which, m, n, shape);
    c->scale = te_tensor_retain(te__is_tensor_scaled(spec->kind) ? make(te, TE_F32, 1, &one) : make(te, scale_dtype[spec->kind], 2, shape));
    if (spec->kind == TE_QUANT_NVFP4) {
        int64_t amaxes = te__nvfp4_amaxes(spec, which, m, n);
        c->amax = te_tensor_retain(make(te, TE_F32, 1, &amaxes));
    }
    return c->data && c->scale && (c->amax || spec->kind != TE_QUANT_NVFP4) ? TE_OK : te_error_code(te);
}

/* What both copies have in common is one tensor: the scale of a whole tensor, the amax of an untransformed one. */
static void te__copies_share(te__quantized *q) {
    te__quant_copy *row = &q->row, *col = &q->col;
    if (!row->data || !col->data || row->kind != col->kind) return;
    if (te__is_tensor_scaled(row->kind) && te__is_tensor_scaled(q->kind)) {
        te_tensor_release(col->scale);
        col->scale = te_tensor_retain(row->scale);
    }
    if (q->kind == TE_QUANT_NVFP4 && !col->rht && row->amax && col->amax && te__numel(row->amax) == 1 && te__numel(col->amax) == 1) {
        te_tensor_release(col->amax);
        col->amax = te_tensor_retain(row->amax);
    }
}

/* A quantized tensor with memory for the copies of `usage`. Belongs to the innermost scope. */
static te_tensor *te__quant_empty(te_ctx *te, te_dtype nominal, int ndim, const int64_t *shape, const te__quant_spec *spec, int usage, bool clear) {
    te_tensor *y = te__tensor_shell(te, nominal, ndim, shape);
    te_result result = TE_OK;
    int which;
    if (!y) return NULL;
    y->quantized = (te__quantized *)te__alloc_zero(te, sizeof(te__quantized));
    if (!y->quantized) {
        te__drop(y);
        return NULL;
    }
    y->quantized->kind = spec->kind;
    te__frame_begin(te);
    for (which = TE_ROWWISE; which <= TE_COLUMNWISE && result == TE_OK; which++)
        if (usage & which) result = te__copy_open(te, te__copy_of(y, which), te__spec_of(spec, which), which, nominal, te__rows(y), te__cols(y), clear);
    te__copies_share(y->quantized);
    te__frame_end(te, NULL, 0);
    if (result == TE_OK) return y;
    te__drop(y);
    return NULL;
}

static bool te__is_custom(const te_tensor *x) { return x->quantized->row.kind == TE_QUANT_CUSTOM || x->quantized->col.kind == TE_QUANT_CUSTOM; }

/* A contiguous tensor as [M, N], without history. */
static te_tensor *te__as_matrix(const te_tensor *x) {
    te_tensor *y = te__alias(x);
    if (!y) return NULL;
    y->ndim = 2;
    y->shape[0] = te__rows(x);
    y->shape[1] = y->stride[0] = te__cols(x);
    y->stride[1] = 1;
    return y;
}

static const te_tensor *te__quant_counted(const te_tensor *x) {
    const te__quant_copy *c = x->quantized->row.data ? &x->quantized->row : &x->quantized->col;
    return c->scale ? c->scale : c->data;
}
/* Counts the values that a quantized tensor has had: by the writes of its scale, for the codes of many tensors may lie in one buffer. */
static uint64_t te__quant_version(const te_tensor *x) {
    const te_tensor *counted = te__quant_counted(x);
    return x->quantized->version_shift + (counted && counted->buffer ? te__buffer_version(counted->buffer) : 0);
}
/* The value lies in other memory now; its count goes on from `version`. */
static void te__quant_set_version(te_tensor *x, uint64_t version) { x->quantized->version_shift += version - te__quant_version(x); }

/* ---- filling ---- */

/* A word for the amax of what is about to be written: 0; NULL where all are taken, and the cast measures. */
static te_tensor *te__amax_take(te_ctx *te) {
    int i;
    for (i = 0; i < TE__AMAX_WORDS; i++) {
        te__amax_word *w = &te->amax_words[i];
        if (w->taken) continue;
        w->taken = true;
        return &w->pair;
    }
    return NULL;
}
static te__amax_word *te__amax_word_of(te_tensor *pair) { return (te__amax_word *)(void *)pair; }
/* `read`: a cast has read it, and left 0. */
static void te__amax_give(te_tensor *pair, bool read) {
    if (!pair) return;
    if (!read) pair->te->device->clear(pair->te, te__data(pair), te_tensor_bytes(pair));
    te__amax_word_of(pair)->taken = false;
}

/* Per tensor: the scale is given, or comes from x; a group must agree on the amax before. */
static te_result te__fill_tensor_scaled(te_tensor *x, const te__quant_spec *spec, const te__quant_copy *row, const te__quant_copy *col, const te_tensor *noop) {
    te_ctx *te = x->te;
    te_op_fp8_quantize_args cast = TE_ZERO;
    te_result result = TE_OK;
    cast.x = x;
    cast.noop = noop;
    cast.dbias = spec->bias_grad;
    cast.row = row ? row->data : NULL;
    cast.col = col ? col->data : NULL;
    cast.scale_inv = row ? row->scale : col->scale;
    if (spec->kind == TE_QUANT_DELAYED) {
        cast.scale = spec->scale;
        cast.amax = spec->amax;
    } else if (te_group_size(spec->group) > 1) {
        te_op_amax_args amax = TE_ZERO;
        te_op_scale_from_amax_args scale = TE_ZERO;
        amax.x = x;
        amax.amax = te__empty_1d(te, TE_F32, 1);
        scale.amax = amax.amax;
        scale.scale = te__empty_1d(te, TE_F32, 1);
        scale.fp8_max = te_dtype_max(spec->dtype);
        scale.epsilon = spec->epsilon;
        scale.power_of_two = spec->power_of_two;
        result = scale.scale ? te_op_amax(te, &amax) : te_error_code(te);
        result = result == TE_OK ? te_all_reduce(spec->group, amax.amax, TE_REDUCE_MAX) : te__refuse(spec->group, TE__ALL_REDUCE, result);
        if (result == TE_OK) result = te_op_scale_from_amax(te, &scale);
        if (result != TE_OK) return result;
        cast.scale = scale.scale;
    } else {
        cast.current = true;
        cast.epsilon = spec->epsilon;
        cast.power_of_two = spec->power_of_two;
        cast.x_amax = spec->x_amax;
    }
    return te_op_fp8_quantize(te, &cast);
}

static te_result te__fill_nvfp4(te_tensor *x, const te__quant_spec *spec, const te__quant_copy *row, const te__quant_copy *col, const te_tensor *noop) {
    te_ctx *te = x->te;
    te_op_nvfp4_amax_args amax = TE_ZERO;
    te_op_nvfp4_quantize_args cast = TE_ZERO;
    te_tensor *whole[2] = {NULL, NULL}; /* what a group reduces: a collective may fail, and then the copies stay as they are */
    te_result result = TE_OK;
    int i;
    amax.x = x;
    amax.amax_row = row ? row->amax : NULL;
    amax.amax_col = col && !(row && col->amax == row->amax) ? col->amax : NULL;
    amax.rht = spec->rht;
    amax.no_sign_mask = spec->no_sign_mask;
    amax.noop = noop;
    for (i = 0; i < 2 && te_group_size(spec->group) > 1; i++) {
        te_tensor **slot = i ? &amax.amax_col : &amax.amax_row, *own = *slot;
        if (!own) continue;
        *slot = te__empty_1d(te, TE_F32, 1);
        if (!*slot) return te__refuse(spec->group, TE__ALL_REDUCE, te_error_code(te));
        if (noop) result = te_tensor_copy(*slot, own);
        if (result != TE_OK) return te__refuse(spec->group, TE__ALL_REDUCE, result);
        whole[i] = own;
    }
    cast.measure = !whole[0] && !whole[1]; /* nobody else has a say: the cast does it all */
    if (!cast.measure) result = te_op_nvfp4_amax(te, &amax);
    if (result != TE_OK && (whole[0] || whole[1])) return te__refuse(spec->group, TE__ALL_REDUCE, result);
    for (i = 0; i < 2 && result == TE_OK; i++)
        if (whole[i]) result = te_all_reduce(spec->group, i ? amax.amax_col : amax.amax_row, TE_REDUCE_MAX);
    for (i = 0; i < 2 && result == TE_OK; i++)
        if (whole[i]) result = te_tensor_copy(whole[i], i ? amax.amax_col : amax.amax_row);
    if (result != TE_OK) return result;
    cast.x = x;
    if (row) {
        cast.row = row->data;
        cast.row_scale = row->scale;
        cast.amax_row = row->amax;
    }
    if (col) {
        cast.col = col->data;
        cast.col_scale = col->scale;
        cast.amax_col = col->amax;
    }
    cast.two_dimensional = spec->two_dimensional;
    cast.rht = spec->rht;
    cast.no_sign_mask = spec->no_sign_mask;
    cast.stochastic_rounding = spec->stochastic;
    if (spec->stochastic) { /* one number of the stream for each copy */
        te__draw draw = te__rng_draw(te, 2);
        cast.seed = draw.seed;
        cast.offset = draw.offset;
        cast.rng = draw.rng;
    }
    cast.four_over_six = spec->four_over_six;
    cast.e4m3_max_256 = spec->e4m3_max_256;
    cast.swizzled = spec->swizzled;
    cast.noop = noop;
    return te_op_nvfp4_quantize(te, &cast);
}

/* Quantizes x (contiguous) into these copies, NULL for none; both are of spec's kind. Custom copies get new tensors. */
static te_result te__copies_fill(te_tensor *x, const te__quant_spec *spec, te__quant_copy *row, te__quant_copy *col, const te_tensor *noop) {
    te_ctx *te = x->te;
    te_result result = TE_OK;
    int which;
    if (!row && !col) return TE_OK;
    switch (spec->kind) {
    case TE_QUANT_DELAYED:
    case TE_QUANT_CURRENT: return te__fill_tensor_scaled(x, spec, row, col, noop);
    case TE_QUANT_BLOCK: {
        te_op_block_quantize_args cast = TE_ZERO;
        cast.x = x;
        if (row) {
            cast.row = row->data;
            cast.row_scale_inv = row->scale;
        }
        if (col) {
            cast.col = col->data;
            cast.col_scale_inv = col->scale;
        }
        cast.two_dimensional = spec->two_dimensional;
        cast.fp32_scales = spec->fp32_scales;
        cast.epsilon = spec->epsilon;
        cast.noop = noop;
        return te_op_block_quantize(te, &cast);
    }
    case TE_QUANT_MXFP8: {
        te_op_mxfp8_quantize_args cast = TE_ZERO;
        cast.x = x;
        if (row) {
            cast.row = row->data;
            cast.row_scale = row->scale;
        }
        if (col) {
            cast.col = col->data;
            cast.col_scale = col->scale;
        }
        cast.two_dimensional = spec->two_dimensional;
        cast.swizzled = spec->swizzled;
        cast.noop = noop;
        return te_op_mxfp8_quantize(te, &cast);
    }
    case TE_QUANT_NVFP4: return te__fill_nvfp4(x, spec, row, col, noop);
    case TE_QUANT_IDENTITY:
        for (which = TE_ROWWISE; which <= TE_COLUMNWISE && result == TE_OK; which++) {
            te__quant_copy *c = which == TE_ROWWISE ? row : col;
            if (c) result = te_tensor_copy(c->data, te__as_matrix(x));
        }
        return result;
    case TE_QUANT_CUSTOM: {
        const char *why;
        te__quant_copy made[2];
        memset(made, 0, sizeof(made));
        for (which = TE_ROWWISE; which <= TE_COLUMNWISE && result == TE_OK; which++) {
            te__quant_copy *c = which == TE_ROWWISE ? row : col, *fresh = &made[which - 1];
            if (!c) continue;
            if (te->capture && c->data) { /* the next launch would read the old memory */
                result = te__refuse_capture(te, "a custom quantizer, whose function makes new memory, for a tensor that has some", "keep such weights out of it");
                break;
            }
            *fresh = *c;
            fresh->data = fresh->scale = NULL;
            result = spec->custom.quantize(spec->custom.user, x, which, &fresh->data, &fresh->scale);
            if (result == TE_OK && !fresh->data) {
                result = TE_ERR_STATE;
                why = "no data";
            } else if (result == TE_OK && (fresh->data->te != te || (fresh->scale && fresh->scale->te != te))) {
                result = TE_ERR_INVALID;
                why = "a tensor of another context";
            } else
                why = te_result_name(result);
            te_tensor_retain(fresh->data);
            te_tensor_retain(fresh->scale);
            if (result != TE_OK)
                te__fail(te, result, "custom quantizer \"%s\": its quantize function returned %s for the %s copy; nothing was changed", spec->custom.name,
                         why, which == TE_ROWWISE ? "row-wise" : "column-wise");
        }
        for (which = TE_ROWWISE; which <= TE_COLUMNWISE; which++) { /* all or none */
            te__quant_copy *c = which == TE_ROWWISE ? row : col, *fresh = &made[which - 1];
            if (c && result == TE_OK && !(te->warming && c->data)) { /* a warm-up computes nothing, and changes nothing that is there */
                te__copy_release(c);
                *c = *fresh;
            } else
                te__copy_release(fresh);
        }
        return result;
    }
    default: return te__fail(te, TE_ERR_INVALID, "quantizer kind %d cannot quantize", (int)spec->kind);
    }
}

/* Fills the copies that y has with x, by `spec`. Temporaries go to a frame of their own. */
static te_result te__quant_fill(te_tensor *y, te_tensor *x, const te__quant_spec *spec, int usage, const te_tensor *noop) {
    te__quant_copy *row = usage & TE_ROWWISE ? &y->quantized->row : NULL, *col = usage & TE_COLUMNWISE ? &y->quantized->col : NULL;
    uint64_t before = te__quant_version(y);
    te_tensor *flat;
    te_result result;
    te__frame_begin(x->te);
    flat = te_tensor_contiguous(x);
    if (!flat)
        result = te_error_code(x->te);
    else if (spec->kind == TE_QUANT_HYBRID) {
        /* custom functions may fail: they go first, and their copies take effect when all is done */
        te__quant_copy fresh[2];
        int which, turn;
        memset(fresh, 0, sizeof(fresh));
        result = TE_OK;
        for (turn = 0; turn < 2; turn++)
            for (which = TE_ROWWISE; which <= TE_COLUMNWISE && result == TE_OK; which++) {
                const te__quant_spec *part = te__spec_of(spec, which);
                te__quant_copy *c = which == TE_ROWWISE ? row : col, *f = &fresh[which - 1];
                if (!c || (part->kind == TE_QUANT_CUSTOM) != (turn == 0)) continue;
                *f = *c;
                te__copy_retain(f);
                result = te__copies_fill(flat, part, which == TE_ROWWISE ? f : NULL, which == TE_ROWWISE ? NULL : f, noop);
            }
        for (which = TE_ROWWISE; which <= TE_COLUMNWISE; which++) {
            te__quant_copy *c = which == TE_ROWWISE ? row : col, *f = &fresh[which - 1];
            if (c && result == TE_OK) {
                te__copy_release(c);
                *c = *f;
            } else
                te__copy_release(f);
        }
    } else
        result = te__copies_fill(flat, spec, row, col, noop);
    if (result == TE_OK && !x->te->warming && te__is_custom(y)) te__quant_set_version(y, before + 1); /* in tensors that its function has just made */
    te__frame_end(x->te, NULL, 0);
    return result;
}

/* Quantizes x, without history. */
static te_tensor *te__quantize(te_tensor *x, const te__quant_spec *spec) {
    te_tensor *y;
    te__frame_begin(x->te);
    y = te__quant_empty(x->te, x->dtype, x->ndim, x->shape, spec, spec->usage, false);
    if (y && te__quant_fill(y, x, spec, spec->usage, NULL) != TE_OK) y = NULL;
    return te__frame_return(x->te, y);
}

/* For what quantizes its own result: the memory of that, and a plain tensor of its value where the scale is not known beforehand. What has no
 * elements is not written by who makes it, nor its scale; and what a group measures together goes through memory of the caller's allocator. */
typedef struct te__quant_out {
    te_tensor *y, *plain; /* plain NULL: the codes are written at once */
    const te_tensor *scale;
    te_tensor *scale_inv, *amax;
    te_tensor *x_amax; /* current: a taken word, whose first number is `amax`; or NULL */
} te__quant_out;

/* Of this spec, delayed or current; y is NULL when that fails. */
static te__quant_out te__quant_out_open(te_ctx *te, te_dtype nominal, int ndim, const int64_t *shape, const te__quant_spec *spec) {
    te__quant_out out = TE_ZERO;
    te__quant_copy *c;
    bool measured = spec->kind != TE_QUANT_DELAYED && te_group_size(spec->group) > 1, empty = false;
    int i;
    for (i = 0; i < ndim; i++) empty = empty || shape[i] == 0;
    out.y = te__quant_empty(te, nominal, ndim, shape, spec, spec->usage, false);
    if (out.y && spec->kind == TE_QUANT_DELAYED && !empty) {
        c = out.y->quantized->row.data ? &out.y->quantized->row : &out.y->quantized->col;
        out.scale = spec->scale;
        out.scale_inv = c->scale;
        out.amax = spec->amax;
    } else if (out.y) {
        out.plain = te_tensor_empty(te, nominal, ndim, shape);
        if (!out.plain) out.y = NULL;
        if (out.plain && !empty && !measured) out.x_amax = te__amax_take(te);
        if (out.x_amax) out.amax = &te__amax_word_of(out.x_amax)->amax;
    }
    if (!out.y && measured) te__refuse(spec->group, TE__ALL_REDUCE, te_error_code(te));
    return out;
}
/* After its value, or its codes, have been written with `result`. */
static te_result te__quant_out_close(te__quant_out *out, const te__quant_spec *spec, te_result result) {
    te__quant_spec known = *spec;
    if (!out->plain) return result;
    known.x_amax = out->x_amax;
    if (result == TE_OK)
        result = te__quant_fill(out->y, out->plain, &known, spec->usage, NULL);
    else if (spec->kind != TE_QUANT_DELAYED)
        te__refuse(spec->group, TE__ALL_REDUCE, result);
    te__amax_give(out->x_amax, result == TE_OK);
    return result;
}

/* ---- reading back ---- */

/* The value of one copy as a plain tensor of x's shape, without history. */
static te_tensor *te__copy_dequantize(const te_tensor *x, int which, te_dtype dtype) {
    const te__quant_copy *c = te__copy_of(x, which);
    bool columnwise = which == TE_COLUMNWISE;
    te_ctx *te = x->te;
    te_tensor *y;
    te_result result = TE_OK;
    te__frame_begin(te);
    if (c->kind == TE_QUANT_CUSTOM) {
        y = c->custom.dequantize(c->custom.user, c->data, c->scale, which, x->ndim, x->shape, dtype);
        if (!y || !te__same_shape(y, x) || y->dtype != dtype || y->te != te) {
            te__fail(te, TE_ERR_STATE, "custom quantizer \"%s\": its dequantize function returned %s", c->custom.name,
                     y ? "a tensor of another shape, format or context" : "NULL");
            y = NULL;
        }
        return te__frame_return(te, y);
    }
    y = te__empty_like(x, dtype);
    if (!y) return te__frame_return(te, NULL);
    if (te__is_tensor_scaled(c->kind)) {
        te_op_fp8_dequantize_args args = TE_ZERO;
        args.q = c->data;
        args.scale_inv = c->scale;
        args.y = y;
        if (columnwise) { /* the codes are the same in both copies */
            te_op_transpose_args turn = TE_ZERO;
            turn.src = c->data;
            turn.rows = te__cols(x);
            turn.columns = te__rows(x);
            turn.dst = te__empty_2d(te, c->data->dtype, turn.columns, te__quant_ld(c->data->dtype, turn.rows));
            result = turn.dst ? te_op_transpose(te, &turn) : te_error_code(te);
            args.q = turn.dst;
        }
        if (result == TE_OK) result = te_op_fp8_dequantize(te, &args);
    } else if (c->kind == TE_QUANT_BLOCK) {
        te_op_block_dequantize_args args = TE_ZERO;
        args.q = c->data;
        args.scale_inv = c->scale;
        args.y = y;
        args.two_dimensional = c->two_dimensional;
        args.columnwise = columnwise;
        result = te_op_block_dequantize(te, &args);
    } else if (c->kind == TE_QUANT_MXFP8) {
        te_op_mxfp8_dequantize_args args = TE_ZERO;
        args.q = c->data;
        args.scale = c->scale;
        args.y = y;
        args.columnwise = columnwise;
        args.swizzled = c->swizzled;
        result = te_op_mxfp8_dequantize(te, &args);
    } else if (c->kind == TE_QUANT_NVFP4) {
        te_op_nvfp4_dequantize_args args = TE_ZERO;
        args.q = c->data;
        args.scale = c->scale;
        args.amax = c->amax;
        args.y = y;
        args.columnwise = columnwise;
        args.rht = c->rht;
        args.no_sign_mask = c->no_sign_mask;
        args.e4m3_max_256 = c->e4m3_max_256;
        args.swizzled = c->swizzled;
        result = te_op_nvfp4_dequantize(te, &args);
    } else
        result = te_tensor_copy(te__as_matrix(y), c->data);
    return te__frame_return(te, result == TE_OK ? y : NULL);
}

/* Of the row-wise copy, or of the column-wise one if that is all there is. */
static te_tensor *te__quant_value(const te_tensor *x, te_dtype dtype) {
    return te__copy_dequantize(x, x->quantized->row.data ? TE_ROWWISE : TE_COLUMNWISE, dtype);
}

/* ---- one copy from the other ---- */

/* The scales of 16 x 16 tiles of a transposed copy: scale (n, j) is that of row 16 j and group n / 16. */
static te_result te__nvfp4_turn_scales(te_ctx *te, const te__quant_copy *row, te__quant_copy *col, int64_t m, int64_t n) {
    int64_t tiles = te__div_up(m, 16), from_ld = row->scale->shape[1], to_ld = col->scale->shape[1], part;
    te_result result = te->device->clear(te, te__data(col->scale), te_tensor_bytes(col->scale));
    for (part = 0; part < 2 && result == TE_OK; part++) { /* whole groups of 16 columns; what is left over */
        int64_t first = part ? n / 16 : 0, groups = part ? n % 16 != 0 : n / 16;
        te_tensor *src = te__alias(row->scale), *dst = te__alias(col->scale);
        te_tensor *view[2];
        int i;
        if (!src || !dst) return te_error_code(te);
        if (groups == 0) continue;
        view[0] = src;
        view[1] = dst;
        for (i = 0; i < 2; i++) {
            view[i]->ndim = 3;
            view[i]->shape[0] = groups;
            view[i]->shape[1] = part ? n % 16 : 16;
            view[i]->shape[2] = tiles;
        }
        src->offset += first;
        src->stride[0] = 1;
        src->stride[1] = 0;
        src->stride[2] = 16 * from_ld;
        dst->offset += first * 16 * to_ld;
        dst->stride[0] = 16 * to_ld;
        dst->stride[1] = to_ld;
        dst->stride[2] = 1;
        result = te_tensor_copy(dst, src);
    }
    return result;
}

/* Do both copies of this kind hold the same numbers, so that one gives the other? */
static bool te__copies_agree(const te__quant_copy *c) {
    return te__is_tensor_scaled(c->kind) || c->kind == TE_QUANT_IDENTITY || (c->kind == TE_QUANT_BLOCK && c->two_dimensional) ||
           (c->kind == TE_QUANT_NVFP4 && c->two_dimensional && !c->rht && !c->swizzled && te__numel(c->amax) == 1);
}

/* Does the column-wise copy of x follow from its row-wise one? The parts of a hybrid tensor are each other's strangers. */
static bool te__column_follows(const te_tensor *x) {
    return x->quantized->row.data && x->quantized->kind != TE_QUANT_HYBRID && te__copies_agree(&x->quantized->row);
}

/* Adds a column-wise copy to a tensor that has a row-wise one, or brings the one that is there up to date, in its memory. */
static te_result te__quant_add_columnwise(te_tensor *x) {
    te__quantized *q = x->quantized;
    te__quant_copy *row = &q->row, *col = &q->col;
    te_ctx *te = x->te;
    te_result result = TE_OK;
    bool warming = te->warming, is_new = !col->data;
    int64_t m = te__rows(x), n = te__cols(x);
    if (!te__column_follows(x))
        return te__fail(te, TE_ERR_STATE, "a column-wise copy cannot be made from %s; quantize with TE_ROWWISE | TE_COLUMNWISE",
                        row->data ? "a row-wise one of this kind: each holds numbers of its own" : "a tensor without a row-wise one");
    if (is_new && te->capture && te__is_outside(row->data->buffer))
        return te__refuse_capture(te, "adding a column-wise copy to a tensor that was there before", TE__RUN_FIRST);
    te__frame_begin(te);
    te->warming = false; /* it outlives a warm-up, so it is really made */
    if (row->kind == TE_QUANT_IDENTITY) {
        if (!is_new) result = te_tensor_copy(col->data, row->data);
        else {
            *col = *row;
            te__copy_retain(col);
        }
    } else {
        te_op_transpose_args turn = TE_ZERO, scales = TE_ZERO;
        if (is_new) {
            te__quant_spec spec;
            memset(&spec, 0, sizeof(spec));
            spec.kind = row->kind;
            spec.dtype = row->data->dtype;
            spec.two_dimensional = row->two_dimensional;
            spec.no_sign_mask = row->no_sign_mask;
            spec.e4m3_max_256 = row->e4m3_max_256;
            result = te__copy_open(te, col, &spec, TE_COLUMNWISE, x->dtype, m, n, false);
            if (result == TE_OK) te__copies_share(q);
        }
        turn.src = row->data;
        turn.dst = col->data;
        turn.rows = m;
        turn.columns = n;
        scales.src = row->scale;
        scales.dst = col->scale;
        scales.rows = te__div_up(m, 128);
        scales.columns = te__div_up(n, 128);
        if (result == TE_OK) result = te_op_transpose(te, &turn);
        if (result == TE_OK && row->kind == TE_QUANT_BLOCK) result = te_op_transpose(te, &scales);
        if (result == TE_OK && row->kind == TE_QUANT_NVFP4) result = te__nvfp4_turn_scales(te, row, col, m, n);
        if (result != TE_OK && is_new) te__copy_release(col);
    }
    te->warming = warming;
    te__frame_end(te, NULL, 0);
    return result;
}

/* A second handle that holds the copies of `usage` alone: what is saved for the backward pass. */
static te_tensor *te__quant_keep(const te_tensor *x, int usage) {
    te_tensor *y = te__alias_quantized(x);
    if (!y) return NULL;
    if (x->name) te_tensor_set_name(y, x->name);
    if (!(usage & TE_ROWWISE)) te__copy_release(&y->quantized->row);
    if (!(usage & TE_COLUMNWISE)) te__copy_release(&y->quantized->col);
    return y;
}
