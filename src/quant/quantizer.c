/* quant/quantizer.c: the public functions of quantizers and quantized tensors. This file must not depend on recipes or
 * modules. */

static bool te__is_one_f32(const te_tensor *x) { return x->dtype == TE_F32 && te__numel(x) == 1 && x->buffer; }

/* Checks the tensor x, which is the scale or the amax of a te_quantizer_desc. x may be NULL. */
static te_result te__delayed_ok(te_ctx *te, const te_tensor *x, const char *who) {
    if (!x) return TE_OK;
    if (te__need_memory(x, who) != TE_OK) return TE_ERR_STATE;
    if (!te__is_one_f32(x))
        return te__fail(te, TE_ERR_SHAPE, "%s: scale and amax must be f32 tensors of one element", who);
    return x->te == te ? TE_OK : te__fail(te, TE_ERR_INVALID, "%s: scale or amax belongs to another context", who);
}

/* Checks `desc`, and fills *spec from it and from defaults. Retains spec->scale and spec->amax; te__spec_close releases
 * them. */
static te_result te__spec_open(te_ctx *te, const te_quantizer_desc *desc, te__quant_spec *spec, const char *who) {
    const te__quant_class *cls = te__quant_class_of(desc->kind);
    te_result result;
    int64_t one = 1;
    memset(spec, 0, sizeof(*spec));
    if (!cls) return te__quant_unknown(te, desc->kind, who);
    if (te__quant_check_kinds(te, desc, cls, who) != TE_OK) return TE_ERR_INVALID;
    if (cls->code_dtype && desc->dtype && desc->dtype != cls->code_dtype)
        return te__fail(te, TE_ERR_DTYPE, "%s: dtype %s; the codes of %s are %s", who, te_dtype_name(desc->dtype),
                        cls->name, te_dtype_name(cls->code_dtype));
    if (!cls->code_dtype && desc->dtype && !te__is_fp8(desc->dtype))
        return te__fail(te, TE_ERR_DTYPE, "%s: dtype %s; e4m3 and e5m2 are possible", who, te_dtype_name(desc->dtype));
    if (desc->usage & ~(TE_ROWWISE | TE_COLUMNWISE))
        return te__fail(te, TE_ERR_INVALID, "%s: usage %d; TE_ROWWISE (1), TE_COLUMNWISE (2) or both are possible", who,
                        desc->usage);
    if (!(desc->amax_epsilon >= 0.0f))
        return te__fail(te, TE_ERR_INVALID, "%s: amax_epsilon %g; it cannot be negative", who,
                        (double)desc->amax_epsilon);
    if (!te__is_switch(desc->quantization_2d) || !te__is_switch(desc->nvfp4.rht) ||
        !te__is_switch(desc->nvfp4.stochastic_rounding))
        return te__fail(te, TE_ERR_INVALID,
                        "%s: quantization_2d %d, nvfp4.rht %d, nvfp4.stochastic_rounding %d; TE_DEFAULT (0), TE_ON (1) "
                        "and TE_OFF (2) are possible",
                        who, (int)desc->quantization_2d, (int)desc->nvfp4.rht, (int)desc->nvfp4.stochastic_rounding);
    if ((int)desc->nvfp4.four_over_six < 0 || desc->nvfp4.four_over_six > TE_4OVER6_MSE)
        return te__fail(te, TE_ERR_INVALID, "%s: four_over_six %d is not in te_4over6_error", who,
                        (int)desc->nvfp4.four_over_six);
    result = te__delayed_ok(te, desc->delayed.scale, who);
    if (result == TE_OK) result = te__delayed_ok(te, desc->delayed.amax, who);
    if (result == TE_OK) result = te__group_allowed(te, desc->amax_group, who, "amax_group");
    if (result != TE_OK) return result;
    spec->cls = cls;
    spec->dtype = cls->code_dtype ? cls->code_dtype : desc->dtype ? desc->dtype : TE_F8E4M3;
    spec->usage = desc->usage ? desc->usage : TE_ROWWISE | TE_COLUMNWISE;
    spec->power_of_two = desc->current.power_of_two_scales;
    spec->epsilon = desc->amax_epsilon;
    spec->group = desc->amax_group;
    result = cls->resolve ? cls->resolve(te, desc, spec, who) : TE_OK;
    if (result == TE_OK && cls->facts & TE__SCALE_GIVEN) {
        te__frame_begin(te);
        spec->scale =
            te_tensor_retain(desc->delayed.scale ? desc->delayed.scale : te_tensor_full(te, TE_F32, 1, &one, 1.0));
        spec->amax = te_tensor_retain(desc->delayed.amax ? desc->delayed.amax : te_tensor_zeros(te, TE_F32, 1, &one));
        te__frame_end(te, NULL, 0);
        if (!spec->scale || !spec->amax) return te_error_code(te);
    }
    return result;
}
/* Does what te__spec_open does. If desc is hybrid, also fills `child`: the specs of the row-wise and the column-wise
 * copy. On failure releases everything. */
static te_result te__spec_open_whole(te_ctx *te, const te_quantizer_desc *desc, te__quant_spec *spec,
                                     te__quant_spec child[2], const char *who) {
    te_result result = te__spec_open(te, desc, spec, who);
    int i;
    memset(child, 0, 2 * sizeof(*child));
    for (i = 0; i < 2 && result == TE_OK && spec->cls->form == TE__FORM_PARTS; i++) {
        const te_quantizer_desc *d = i ? desc->hybrid.columnwise_quantizer : desc->hybrid.rowwise_quantizer;
        if (!d || d->kind == desc->kind)
            result =
                te__fail(te, TE_ERR_INVALID, "%s: a hybrid quantizer needs a %s quantizer that is not hybrid itself",
                         who, i ? "column-wise" : "row-wise");
        else
            result = te__spec_open(te, d, &child[i], who);
        child[i].usage = i ? TE_COLUMNWISE : TE_ROWWISE;
    }
    spec->row = &child[0];
    spec->col = &child[1];
    if (result != TE_OK) te__spec_close_whole(spec, child);
    return result;
}

/* ---- quantizers ---- */

TE_API te_quantizer *te_quantizer_create(te_ctx *te, const te_quantizer_desc *desc) {
    te_quantizer *q;
    if (!te || !te__has_desc(te, desc, "te_quantizer_create")) return NULL;
    if (te->capture) {
        te__refuse_capture(te, "te_quantizer_create", "make it before te_graph_begin");
        return NULL;
    }
    q = (te_quantizer *)te__alloc_zero(te, sizeof(te_quantizer));
    if (!q) return NULL;
    q->te = te;
    q->refs = 1;
    if (te__spec_open_whole(te, desc, &q->spec, q->child, "te_quantizer_create") == TE_OK) return q;
    te__free(te, q);
    return NULL;
}
static te_result te__usage_ok(te_ctx *te, int usage, const char *who) {
    if (usage >= 1 && usage <= (TE_ROWWISE | TE_COLUMNWISE)) return TE_OK;
    return te__fail(te, TE_ERR_INVALID, "%s: %d; TE_ROWWISE (1), TE_COLUMNWISE (2) or both (3) are possible", who,
                    usage);
}
TE_API te_result te_quantizer_set_usage(te_quantizer *q, int usage) {
    if (!q) return TE_ERR_STATE;
    if (te__usage_ok(q->te, usage, "te_quantizer_set_usage") != TE_OK) return TE_ERR_INVALID;
    q->spec.usage = usage;
    return TE_OK;
}
TE_API int te_quantizer_get_usage(const te_quantizer *q) { return q ? q->spec.usage : 0; }

/* Records on the tape that y holds the codes of x. Gradients, even quantized ones, pass to x unchanged. */
static te_tensor *te__record_codes(te_tensor *x, te_tensor *y) {
    te_node_desc node = TE_ZERO;
    node.name = "quantize";
    node.inputs = &x;
    node.num_inputs = 1;
    node.outputs = &y;
    node.num_outputs = 1;
    node.backward = te__same_backward;
    return te__record_quantized(x->te, &node) == TE_OK ? y : NULL;
}

/* Returns x decoded if it is quantized. */
static te_tensor *te__plain(te_tensor *x) { return x->quantized ? te__quant_value(x, x->dtype) : x; }

/* Checks that x is a plain f32, f16 or bf16 tensor with memory. Returns false with an error if it is not. */
static bool te__need_float(const te_tensor *x, const char *function) {
    if (te__is_float(x->dtype) && x->buffer) return true;
    if (te__need_memory(x, function) != TE_OK) return false;
    return te__not_ok(x->te, TE_ERR_DTYPE, "%s: the input is %s%s; f32, f16 or bf16 is needed", function,
                      x->quantized ? "quantized, nominally " : "", te_dtype_name(x->dtype));
}
static bool te__same_ctx(const te_tensor *x, te_ctx *te, const char *function) {
    if (!x || x->te == te) return true;
    return te__not_ok(te, TE_ERR_INVALID,
                      "%s: a tensor of another context (%s) was given to a context on %s; copy it through the host",
                      function, x->te->device_name, te->device_name);
}
/* Returns true if `spec` accepts x. A custom quantizer may have a function that decides this. Built-in kinds accept any
 * x. */
static bool te__custom_takes(const te__quant_spec *spec, const te_tensor *x) {
    return !spec->custom.is_quantizable || spec->custom.is_quantizable(spec->custom.user, x);
}

/* Checks that `spec` can quantize x. Returns false with an error if it cannot. */
static bool te__can_quantize(te_ctx *te, const te__quant_spec *spec, te_tensor *x, const char *function) {
    int i;
    if (!te__same_ctx(x, te, function) || !te__need_float(x, function)) return false;
    const te__quant_spec *part[2] = {te__spec_of(spec, TE_ROWWISE), te__spec_of(spec, TE_COLUMNWISE)};
    for (i = 0; i < 2; i++)
        if (!te__custom_takes(part[i], x)) {
            char text[TE__SHAPE_TEXT];
            return te__not_ok(te, TE_ERR_SHAPE, "%s: the custom quantizer \"%s\" does not take %s %s", function,
                              part[i]->custom.name, te_dtype_name(x->dtype), te__shape_text(x, text));
        }
    return true;
}

/* Makes y refer to the quantizer q, which will quantize later values of y. */
static te_tensor *te__quantized_by(te_tensor *y, te_quantizer *q) {
    if (!y) return NULL;
    y->quantized->quantizer = q;
    q->refs++;
    return y;
}

TE_API te_tensor *te_quantize(te_quantizer *q, te_tensor *x) {
    te__rng_state before;
    te_tensor *y;
    if (!q || !x || !te__can_quantize(q->te, &q->spec, x, "te_quantize")) return NULL;
    before = te__rng_now(q->te);
    y = te__quantized_by(te__quantize(x, &q->spec), q);
    if (y) y = te__record_same("quantize", x, y);
    if (!y) te__rng_back(q->te, before);
    return y;
}

/* Returns true if x has no copy `which`, or if that copy has the layout that `spec` describes. */
static bool te__copy_fits(const te_tensor *x, const te__quant_spec *spec, int which) {
    const te__quant_copy *c = te__copy_of(x, which);
    if (!c->data) return true;
    if (!te__same_layout(c->cls, spec->cls)) return false;
    if (c->cls->form != TE__FORM_CODES) return true;
    return c->data->dtype == spec->dtype && c->two_dimensional == spec->two_dimensional &&
           c->swizzled == spec->swizzled && c->rht == (spec->rht && which == TE_COLUMNWISE) &&
           c->no_random_sign_mask == spec->no_random_sign_mask && c->e4m3_max_256 == spec->e4m3_max_256 &&
           (!c->amax || te__numel(c->amax) == te__num_amaxes(spec, which, te__rows(x), te__cols(x)));
}

TE_API te_result te_quantize_into(te_quantizer *q, te_tensor *x, te_tensor *dst, const te_tensor *noop_flag) {
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    te__rng_state before;
    te_result result;
    if (!q || !x || !dst) return TE_ERR_STATE;
    if (!te__can_quantize(q->te, &q->spec, x, "te_quantize_into") || !te__same_ctx(dst, q->te, "te_quantize_into"))
        return te_error_code(q->te);
    if (!dst->quantized)
        return te__fail(q->te, TE_ERR_INVALID,
                        "te_quantize_into: the destination is plain %s; te_quantizer_make_empty makes one",
                        te_dtype_name(dst->dtype));
    if (!te__same_shape(x, dst))
        return te__fail(q->te, TE_ERR_SHAPE,
                        "te_quantize_into: the input is %s and the destination %s; they must be equal",
                        te__shape_text(x, a), te__shape_text(dst, b));
    if (!te__copy_fits(dst, te__spec_of(&q->spec, TE_ROWWISE), TE_ROWWISE) ||
        !te__copy_fits(dst, te__spec_of(&q->spec, TE_COLUMNWISE), TE_COLUMNWISE))
        return te__fail(q->te, TE_ERR_INVALID,
                        "te_quantize_into: the destination (%s) was made by a quantizer that differs from this one "
                        "(%s) in kind, code format or layout; "
                        "te_quantizer_make_empty makes one that fits",
                        dst->quantized->cls->name, q->spec.cls->name);
    if (noop_flag && (q->spec.cls->form != TE__FORM_CODES || !te__is_one_f32(noop_flag)))
        return te__fail(
            q->te, TE_ERR_INVALID,
            "te_quantize_into: noop_flag is an f32 [1] on the device, for quantizers of the FP8 and FP4 kinds");
    before = te__rng_now(q->te);
    result = te__quant_fill(dst, x, &q->spec, te_quantized_usage(dst), noop_flag);
    if (result != TE_OK) te__rng_back(q->te, before);
    return result;
}

TE_API te_tensor *te_quantizer_make_empty(te_quantizer *q, te_dtype dtype, int ndim, const int64_t *shape) {
    if (!q) return NULL;
    if (!te__is_float(dtype))
        return te__no_tensor(q->te, TE_ERR_DTYPE,
                             "te_quantizer_make_empty: nominal dtype %s; f32, f16 and bf16 are possible",
                             te_dtype_name(dtype));
    if (te__is_opaque(te__spec_of(&q->spec, TE_ROWWISE)->cls) ||
        te__is_opaque(te__spec_of(&q->spec, TE_COLUMNWISE)->cls))
        return te__no_tensor(
            q->te, TE_ERR_UNSUPPORTED,
            "te_quantizer_make_empty: only its own function knows the layout of a custom quantizer; te_quantize a "
            "tensor");
    return te__quantized_by(te__quant_empty(q->te, dtype, ndim, shape, &q->spec, q->spec.usage, true), q);
}

TE_API te_result te_quantizer_calibrate(te_quantizer *q, te_tensor *x) {
    te_result result;
    if (!q || !x) return TE_ERR_STATE;
    if (!te__can_quantize(q->te, &q->spec, x, "te_quantizer_calibrate")) return te_error_code(q->te);
    if (!(q->spec.cls->facts & TE__SCALE_GIVEN)) return TE_OK;
    te__frame_begin(q->te);
    x = te_tensor_contiguous(x);
    result = x ? te__amax_into(x, q->spec.amax) : te_error_code(q->te);
    te__frame_end(q->te, NULL, 0);
    return result;
}

TE_API bool te_quantizer_is_quantizable(const te_quantizer *q, const te_tensor *x) {
    int which;
    if (!q || !x || !te__is_float(x->dtype) || x->quantized || x->ndim < 1) return false;
    for (which = TE_ROWWISE; which <= TE_COLUMNWISE; which++)
        if (!te__custom_takes(te__spec_of(&q->spec, which), x)) return false;
    return true;
}
TE_API bool te_quantizer_is_requantization_safe(const te_quantizer *q) {
    int which;
    for (which = TE_ROWWISE; q && which <= TE_COLUMNWISE; which++) {
        const te__quant_spec *s = te__spec_of(&q->spec, which);
        if (s->cls->facts & TE__SCALE_GIVEN || te__is_opaque(s->cls) || s->stochastic) return false;
    }
    return q != NULL;
}

/* ---- quantized tensors ---- */

TE_API te_quant_kind te_quantized_kind(const te_tensor *x) {
    return x && x->quantized ? x->quantized->cls->kind : TE_QUANT_NONE;
}
TE_API int te_quantized_usage(const te_tensor *x) {
    return x && x->quantized ? (x->quantized->row.data ? TE_ROWWISE : 0) | (x->quantized->col.data ? TE_COLUMNWISE : 0)
                             : 0;
}
TE_API bool te_is_custom(const te_tensor *x) {
    return x && x->quantized && te__is_custom(x);
}

TE_API te_result te_tensor_update_usage(te_tensor *x, int usage) {
    int have = te_quantized_usage(x);
    te_result result = TE_OK;
    if (!x) return TE_ERR_STATE;
    if (!x->quantized)
        return te__fail(x->te, TE_ERR_STATE, "te_tensor_update_usage: the tensor is plain %s", te_dtype_name(x->dtype));
    if (te__usage_ok(x->te, usage, "te_tensor_update_usage") != TE_OK) return TE_ERR_INVALID;
    if (usage & ~have & TE_ROWWISE)
        return te__fail(
            x->te, TE_ERR_STATE,
            "te_tensor_update_usage: a row-wise copy cannot be made from a column-wise one; quantize with TE_ROWWISE");
    if (usage & ~have & TE_COLUMNWISE) result = te__quant_add_columnwise(x);
    if (result != TE_OK) return result;
    if (!(usage & TE_ROWWISE)) te__copy_release(&x->quantized->row);
    if (!(usage & TE_COLUMNWISE)) te__copy_release(&x->quantized->col);
    return TE_OK;
}

/* Returns copy `which` of x, or NULL with an error. */
static const te__quant_copy *te__asked_copy(const te_tensor *x, int which, const char *function) {
    const te__quant_copy *copy;
    if (!x->quantized) {
        te__fail(x->te, TE_ERR_STATE, "%s: the tensor is plain %s", function, te_dtype_name(x->dtype));
        return NULL;
    }
    if (which != TE_ROWWISE && which != TE_COLUMNWISE) {
        te__fail(x->te, TE_ERR_INVALID, "%s: %d; TE_ROWWISE (1) or TE_COLUMNWISE (2)", function, which);
        return NULL;
    }
    copy = te__copy_of(x, which);
    if (copy->data) return copy;
    te__fail(x->te, TE_ERR_STATE, "%s: the %s copy was not made (see te_quantizer_set_usage)", function,
             which == TE_ROWWISE ? "row-wise" : "column-wise");
    return NULL;
}
TE_API te_result te_quantized_view(const te_tensor *x, int which, te_tensor **data, te_tensor **scale) {
    const te__quant_copy *copy;
    if (data) *data = NULL;
    if (scale) *scale = NULL;
    if (!x) return TE_ERR_STATE;
    copy = te__asked_copy(x, which, "te_quantized_view");
    if (!copy) return te_error_code(x->te);
    if (data) *data = te__alias(copy->data);
    if (scale && copy->scale) *scale = te__alias(copy->scale);
    return (data && !*data) || (scale && copy->scale && !*scale) ? te_error_code(x->te) : TE_OK;
}
TE_API te_tensor *te_quantized_amax(const te_tensor *x, int which) {
    const te__quant_copy *copy = x ? te__asked_copy(x, which, "te_quantized_amax") : NULL;
    return copy && copy->amax ? te__alias(copy->amax) : NULL;
}
