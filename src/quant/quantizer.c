/* quant/quantizer.c: making quantized tensors and reading them back. Knows the cast operations; must not know recipes or modules. */

/* How to quantize: what the built-in kinds need. */
typedef struct te__quant_spec {
    te_quant_kind kind;
    te_dtype dtype;           /* of the codes */
    int usage;                /* TE_ROWWISE | TE_COLUMNWISE */
    te_tensor *scale, *amax;  /* delayed: f32 [1] each */
    bool power_of_two_scales; /* current */
    float amax_epsilon;       /* current */
} te__quant_spec;

/* Rows of codes start at multiples of 16 bytes, so that every kernel may load them 16 bytes at a time whatever the shape. */
static int64_t te__quant_ld(int64_t columns) { return te__round_up(columns, 16); }

/* A quantized tensor of x's shape with memory for the copies of `usage`, uninitialised. Belongs to the innermost scope. */
static te_tensor *te__quant_empty(te_ctx *te, te_dtype nominal, int ndim, const int64_t *shape, te_quant_kind kind, te_dtype dtype, int usage) {
    te_tensor *y = te__tensor_shell(te, nominal, ndim, shape);
    te__quantized *q;
    int64_t m, n;
    if (!y) return NULL;
    q = y->quantized = (te__quantized *)te__alloc_zero(te, sizeof(te__quantized));
    if (!q) {
        te__drop(y);
        return NULL;
    }
    m = te__rows(y);
    n = te__cols(y);
    q->kind = kind;
    q->dtype = dtype;
    q->row.scale_inv = te_tensor_retain(te__empty_1d(te, TE_F32, 1));
    q->col.scale_inv = te_tensor_retain(q->row.scale_inv);
    if (usage & TE_ROWWISE) q->row.data = te_tensor_retain(te__empty_2d(te, dtype, m, te__quant_ld(n)));
    if (usage & TE_COLUMNWISE) q->col.data = te_tensor_retain(te__empty_2d(te, dtype, n, te__quant_ld(m)));
    if (!q->row.scale_inv || ((usage & TE_ROWWISE) && !q->row.data) || ((usage & TE_COLUMNWISE) && !q->col.data)) {
        te__drop(y);
        return NULL;
    }
    return y;
}

/* Quantizes x, without history. */
static te_tensor *te__quantize(te_tensor *x, const te__quant_spec *spec) {
    te_ctx *te = x->te;
    te_fp8_quantize_args cast = TE_ZERO;
    te_tensor *y, *flat;
    te_result result = TE_OK;
    te__frame_begin(te);
    y = te__quant_empty(te, x->dtype, x->ndim, x->shape, spec->kind, spec->dtype, spec->usage);
    flat = y ? te_tensor_contiguous(x) : NULL;
    if (!y || !flat) {
        te__frame_end(te, NULL, 0);
        return NULL;
    }
    cast.x = flat;
    cast.row = y->quantized->row.data;
    cast.col = y->quantized->col.data;
    cast.scale_inv = y->quantized->row.scale_inv;
    if (spec->kind == TE_QUANT_DELAYED) {
        cast.scale = spec->scale;
        cast.amax = spec->amax;
    } else {
        te_amax_args amax = TE_ZERO;
        te_scale_from_amax_args scale = TE_ZERO;
        amax.x = flat;
        amax.amax = te__empty_1d(te, TE_F32, 1);
        scale.amax = amax.amax;
        scale.scale = te__empty_1d(te, TE_F32, 1);
        scale.fp8_max = te_dtype_max(spec->dtype);
        scale.epsilon = spec->amax_epsilon;
        scale.power_of_two = spec->power_of_two_scales;
        result = scale.scale ? te_amax(te, &amax) : te_error_code(te);
        if (result == TE_OK) result = te_scale_from_amax(te, &scale);
        cast.scale = scale.scale;
    }
    if (result == TE_OK) result = te_fp8_quantize(te, &cast);
    return te__frame_return(te, result == TE_OK ? y : NULL);
}

/* Adds a column-wise copy to a tensor that has a row-wise one: the same codes, transposed. */
static te_result te__quant_add_columnwise(te_tensor *x) {
    te__quantized *q = x->quantized;
    te_transpose_args args = TE_ZERO;
    te_result result;
    if (q->col.data) return TE_OK;
    args.src = q->row.data;
    args.rows = te__rows(x);
    args.columns = te__cols(x);
    args.dst = te__empty_2d(x->te, q->dtype, args.columns, te__quant_ld(args.rows));
    if (!args.dst) return te_error_code(x->te);
    result = te_transpose(x->te, &args);
    if (result == TE_OK) q->col.data = te_tensor_retain(args.dst);
    te__drop(args.dst);
    return result;
}

/* A second handle that holds the copies of `usage` alone: what is saved for the backward pass. */
static te_tensor *te__quant_keep(const te_tensor *x, int usage) {
    te_tensor *y = te__alias_quantized(x);
    if (!y) return NULL;
    if (!(usage & TE_ROWWISE)) {
        te_tensor_release(y->quantized->row.data);
        y->quantized->row.data = NULL;
    }
    if (!(usage & TE_COLUMNWISE)) {
        te_tensor_release(y->quantized->col.data);
        y->quantized->col.data = NULL;
    }
    return y;
}

/* ---- public ---- */

struct te_quantizer {
    te_ctx *te;
    te__quant_spec spec;
};

static bool te__is_one_f32(const te_tensor *x) { return x->dtype == TE_F32 && te__numel(x) == 1 && x->buffer; }

TE_API te_quantizer *te_quantizer_create(te_ctx *te, const te_quantizer_desc *desc) {
    te_quantizer *q;
    int64_t one = 1;
    if (!te || !desc) return NULL;
    if (desc->kind != TE_QUANT_DELAYED && desc->kind != TE_QUANT_CURRENT) {
        te__fail(te, TE_ERR_INVALID, "te_quantizer_create: kind %d; TE_QUANT_DELAYED (%d) and TE_QUANT_CURRENT (%d) are possible", (int)desc->kind,
                 (int)TE_QUANT_DELAYED, (int)TE_QUANT_CURRENT);
        return NULL;
    }
    if (desc->dtype != TE_DTYPE_NONE && !te__is_fp8(desc->dtype)) {
        te__fail(te, TE_ERR_DTYPE, "te_quantizer_create: dtype %s; e4m3 and e5m2 are possible", te_dtype_name(desc->dtype));
        return NULL;
    }
    if ((desc->scale && !te__is_one_f32(desc->scale)) || (desc->amax && !te__is_one_f32(desc->amax))) {
        te__fail(te, TE_ERR_SHAPE, "te_quantizer_create: scale and amax must be f32 tensors of one element");
        return NULL;
    }
    if ((desc->scale && desc->scale->te != te) || (desc->amax && desc->amax->te != te)) {
        te__fail(te, TE_ERR_INVALID, "te_quantizer_create: scale or amax belongs to another context");
        return NULL;
    }
    if (desc->usage & ~(TE_ROWWISE | TE_COLUMNWISE)) {
        te__fail(te, TE_ERR_INVALID, "te_quantizer_create: usage %d; TE_ROWWISE (1), TE_COLUMNWISE (2) or both are possible", desc->usage);
        return NULL;
    }
    q = (te_quantizer *)te__alloc_zero(te, sizeof(te_quantizer));
    if (!q) return NULL;
    q->te = te;
    q->spec.kind = desc->kind;
    q->spec.dtype = desc->dtype ? desc->dtype : TE_F8E4M3;
    q->spec.usage = desc->usage ? desc->usage : TE_ROWWISE | TE_COLUMNWISE;
    q->spec.power_of_two_scales = desc->power_of_two_scales;
    q->spec.amax_epsilon = desc->amax_epsilon;
    if (desc->kind == TE_QUANT_DELAYED) {
        te__frame_begin(te);
        q->spec.scale = te_tensor_retain(desc->scale ? desc->scale : te_tensor_full(te, TE_F32, 1, &one, 1.0));
        q->spec.amax = te_tensor_retain(desc->amax ? desc->amax : te_tensor_zeros(te, TE_F32, 1, &one));
        te__frame_end(te, NULL, 0);
        if (!q->spec.scale || !q->spec.amax) {
            te_quantizer_destroy(q);
            return NULL;
        }
    }
    return q;
}
TE_API void te_quantizer_destroy(te_quantizer *q) {
    if (!q) return;
    te_tensor_release(q->spec.scale);
    te_tensor_release(q->spec.amax);
    te__free(q->te, q, sizeof(*q));
}
TE_API te_result te_quantizer_set_usage(te_quantizer *q, int usage) {
    if (!q) return TE_ERR_STATE;
    if (usage < 1 || usage > (TE_ROWWISE | TE_COLUMNWISE))
        return te__fail(q->te, TE_ERR_INVALID, "te_quantizer_set_usage: %d; TE_ROWWISE (1), TE_COLUMNWISE (2) or both (3) are possible", usage);
    q->spec.usage = usage;
    return TE_OK;
}

static te_result te__same_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    (void)te, (void)state, (void)saved, (void)needs;
    dx[0] = dy[0];
    return TE_OK;
}
/* Records y as a value of x: gradients pass unchanged. */
static te_tensor *te__record_same(const char *name, te_tensor *x, te_tensor *y) {
    te__view_state none = TE_ZERO;
    return te__record_unary(name, x, y, &none, te__same_backward);
}

/* Plain float tensors only; says what else was found. */
static bool te__need_float(const te_tensor *x, const char *function) {
    if (te__is_float(x->dtype) && x->buffer) return true;
    te__fail(x->te, TE_ERR_DTYPE, "%s: the input is %s%s; f32, f16 or bf16 is needed", function, x->quantized ? "quantized, nominally " : "",
             te_dtype_name(x->dtype));
    return false;
}
static bool te__same_ctx(const te_tensor *x, te_ctx *te, const char *function) {
    if (!x || x->te == te) return true;
    te__fail(te, TE_ERR_INVALID, "%s: a tensor of another context (%s) was given to a context on %s; copy it through the host", function,
             x->te->device_name, te->device_name);
    return false;
}

TE_API te_tensor *te_quantize(te_quantizer *q, te_tensor *x) {
    te_tensor *y;
    if (!q || !x || !te__same_ctx(x, q->te, "te_quantize") || !te__need_float(x, "te_quantize")) return NULL;
    y = te__quantize(x, &q->spec);
    return y ? te__record_same("quantize", x, y) : NULL;
}

TE_API te_tensor *te_dequantize(te_tensor *x, te_dtype dtype) {
    te_fp8_dequantize_args args = TE_ZERO;
    te_transpose_args turn = TE_ZERO;
    te_tensor *y;
    te_ctx *te;
    te_result result = TE_OK;
    if (!x) return NULL;
    te = x->te;
    if (!x->quantized) return te_tensor_cast(x, dtype ? dtype : x->dtype);
    if (dtype == TE_DTYPE_NONE) dtype = x->dtype;
    te__frame_begin(te);
    y = te__empty_like(x, dtype);
    args.q = x->quantized->row.data;
    args.scale_inv = x->quantized->row.scale_inv;
    args.y = y;
    if (!args.q && x->quantized->col.data) { /* the codes are the same in both copies */
        turn.src = x->quantized->col.data;
        turn.rows = te__cols(x);
        turn.columns = te__rows(x);
        turn.dst = te__empty_2d(te, x->quantized->dtype, turn.columns, te__quant_ld(turn.rows));
        result = turn.dst ? te_transpose(te, &turn) : te_error_code(te);
        args.q = turn.dst;
    }
    if (!y || result != TE_OK || te_fp8_dequantize(te, &args) != TE_OK) y = NULL;
    y = te__frame_return(te, y);
    return y ? te__record_same("dequantize", x, y) : NULL;
}

TE_API te_result te_quantized_view(const te_tensor *x, int which, te_quantized_bytes *out) {
    const te__quant_copy *copy;
    if (!x || !out) return TE_ERR_STATE;
    if (!x->quantized) return te__fail(x->te, TE_ERR_STATE, "te_quantized_view: the tensor is plain %s", te_dtype_name(x->dtype));
    if (which != TE_ROWWISE && which != TE_COLUMNWISE)
        return te__fail(x->te, TE_ERR_INVALID, "te_quantized_view: %d; TE_ROWWISE (1) or TE_COLUMNWISE (2)", which);
    copy = which == TE_ROWWISE ? &x->quantized->row : &x->quantized->col;
    if (!copy->data)
        return te__fail(x->te, TE_ERR_STATE, "te_quantized_view: the %s copy was not made (see te_quantizer_set_usage)",
                        which == TE_ROWWISE ? "row-wise" : "column-wise");
    out->data = te__data(copy->data);
    out->rows = which == TE_ROWWISE ? te__rows(x) : te__cols(x);
    out->cols = which == TE_ROWWISE ? te__cols(x) : te__rows(x);
    out->ld = copy->data->shape[1];
    out->scale_inv = (float *)te__data(copy->scale_inv);
    out->dtype = x->quantized->dtype;
    return TE_OK;
}
