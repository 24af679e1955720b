/* nn/core_attention.c: the attention core. A forward call combines the options of the core and of the call into a
 * te_attn_rule. DotProductAttention and SDPA implement this rule. This file must not depend on MultiheadAttention. */

/* The options of an attention core. The state of each core module begins with this struct. */
typedef struct te__attn_core {
    te_sdpa_desc desc;            /* defaults of the options that a call leaves out; desc.name is NULL */
    const struct te__attn_impl *impl;
    int heads, groups;            /* of all ranks; 0: taken from the tensors of a call */
    int64_t channels, v_channels; /* head size of queries and keys, and head size of values; 0: taken from the tensors
                                   * of a call */
} te__attn_core;

/* The inputs of one forward call, in the form that an implementation needs. */
typedef struct te__attn_run {
    te_tensor *part[3];     /* queries, keys and values [.., heads, d] */
    te_attn_desc told; /* format of the tensors, and the rule */
    te_tensor *packed;      /* the packed tensor that contains `part`, or NULL; only in DotProductAttention */
    te__packing packing;    /* layout of `packed` */
    bool fp8_output;
} te__attn_run;

/* An implementation of the attention core: a class of modules. The state of such a module begins with te__attn_core.
 * Its forward function is te__attn_core_forward. */
typedef struct te__attn_impl {
    te_module_class cls;
    const char *who;      /* name of the function that creates modules of this class, for messages */
    const char *names[5]; /* names of option fields, for messages: mask, format, softmax type, diagonal, dropout */
    /* fills *run; run->told.format is set before the call */
    te_result (*prepare)(te_module *m, const te_forward_args *args, te__attn_run *run);
    te_tensor *(*attend)(te_module *m, te__attn_run *run);
} te__attn_impl;

static const te__attn_core *te__attn_core_of(const te_module *m) { return (const te__attn_core *)m->state; }

static te_result te__attn_core_forward(te_module *m, te_forward_args *args) {
    const te__attn_impl *const impl = te__attn_core_of(m)->impl;
    te__attn_run run = TE_ZERO;
    te_result result;
    if (!impl) /* the class was copied by the program */
        return te__fail(m->te, TE_ERR_STATE, "%s: \"%s\" has no options; its class's create function gives them",
                        m->cls->name, m->name);
    if (args->attention.checkpoint_core_attention && !m->checkpoint && te_grad_enabled(m->te)) {
        te_forward_args call = *args;
        call.attention.checkpoint_core_attention = false;
        result = te__module_run_checkpointed(m, &call, true);
        args->outputs = call.outputs;
        return result;
    }
    run.told.format = te__attn_core_of(m)->desc.format;
    run.fp8_output = args->fp8_output;
    result = impl->prepare(m, args, &run);
    if (result != TE_OK) return result;
    args->outputs.max_logit = run.told.max_logit;
    return te__output(m, args, impl->attend(m, &run));
}

/* Checks that queries, keys and values are given, and that their heads have the number and size that the core expects.
 * Error messages begin with `who`. */
static te_result te__attn_core_shapes(te_module *m, const char *who, te_tensor *const part[3]) {
    const te__attn_core *s = te__attn_core_of(m);
    const te_tensor *q = part[0], *k = part[1], *v = part[2];
    const int64_t heads = te__per_rank(m, s->heads), groups = te__per_rank(m, s->groups), channels = s->channels,
                  of_v = s->v_channels;
    const int n = s->desc.format == TE_THD ? 3 : 4;
    char t[3][TE__SHAPE_TEXT], size[24] = "..";
    if (!q || !k || !v)
        return te__fail(m->te, TE_ERR_INVALID, "%s: key and value are needed beside the input (the query)", who);
    if (!heads || (q->ndim == n && q->shape[n - 2] == heads && q->shape[n - 1] == channels && k->ndim == n &&
                   k->shape[n - 2] == groups &&
                   (!of_v || (k->shape[0] == q->shape[0] && k->shape[3] == channels && v->ndim == n &&
                              v->shape[0] == q->shape[0] && v->shape[1] == k->shape[1] && v->shape[2] == groups &&
                              v->shape[3] == of_v))))
        return TE_OK;
    if (of_v) snprintf(size, sizeof(size), "%lld", (long long)of_v);
    return te__fail(m->te, TE_ERR_SHAPE,
                    "%s: q is %s, k %s and v %s; [.., %lld, %lld], [.., %lld, %lld] and [.., %lld, %s], of %d "
                    "dimensions, are needed",
                    who, te__shape_text(q, t[0]), te__shape_text(k, t[1]), te__shape_text(v, t[2]), (long long)heads,
                    (long long)channels, (long long)groups, (long long)channels, (long long)groups, size, n);
}

/* Fills *x with the attention rule of a call, from the options of the core and of the call. */
static void te__attn_core_rule(te_module *m, const te_attn_call *c, te_attn_rule *x) {
    te_tensor *const parameter = te_module_parameter(m, "softmax_offset");
    *x = te__attn_core_of(m)->desc.rule;
    if (c->attn_mask_type) x->mask = c->attn_mask_type;
    if (c->window.on) x->window = c->window;
    if (c->bottom_right_diagonal) x->bottom_right_diagonal = c->bottom_right_diagonal;
    if (!te_module_is_training(m)) x->dropout_p = 0.0f;
    x->core_attention_bias_type = c->core_attention_bias_type;
    x->core_attention_bias = c->core_attention_bias;
    x->alibi_slopes = c->alibi_slopes;
    x->k_factors = c->k_factors;
    x->v_factors = c->v_factors;
    x->softmax_offset = te_tensor_cast(parameter ? parameter : x->softmax_offset, TE_F32);
    if (c->score_mod) x->score_mod = *c->score_mod;
}

/* Returns true if the enum values and the dropout probability of a description are in range. Otherwise records an error
 * and returns false. */
static bool te__attn_core_ok(te_ctx *te, const te__attn_impl *impl, const te_sdpa_desc *d) {
    const te_attn_rule *x = &d->rule;
    const char *const *names = impl->names;
    if ((int)x->mask < 0 || x->mask > TE_MASK_ARBITRARY || (int)d->format < 0 || d->format > TE_THD)
        te__fail(te, TE_ERR_INVALID,
                 "%s: %s %d, %s %d; masks up to TE_MASK_ARBITRARY (7), TE_SBHD (0) to TE_THD (2) are possible",
                 impl->who, names[0], (int)x->mask, names[1], (int)d->format);
    else if ((int)x->softmax_type < 0 || x->softmax_type > TE_SOFTMAX_LEARNABLE || (int)x->bottom_right_diagonal < 0 ||
             x->bottom_right_diagonal > TE_OFF)
        te__fail(te, TE_ERR_INVALID,
                 "%s: %s %d, %s %d; softmax types up to TE_SOFTMAX_LEARNABLE (2), and TE_DEFAULT (0) to TE_OFF (2), "
                 "are possible",
                 impl->who, names[2], (int)x->softmax_type, names[3], (int)x->bottom_right_diagonal);
    else if (!(x->dropout_p >= 0.0f && x->dropout_p <= 1.0f))
        te__fail(te, TE_ERR_INVALID, "%s: %s %g; it is a probability, 0 to 1", impl->who, names[4],
                 (double)x->dropout_p);
    else return true;
    return false;
}
/* Creates a module of the implementation `impl`. Its name is core.desc.name or, if that is NULL, `name`. Options that
 * are 0 get their defaults. */
static te_module *te__attn_core_create(te_ctx *te, const te__attn_impl *impl, const char *name, te__attn_core core) {
    te_module *m =
        te__attn_core_ok(te, impl, &core.desc) ? te__module_named(te, &impl->cls, core.desc.name, name) : NULL;
    if (!m) return NULL;
    core.desc.name = NULL; /* the module has a copy */
    core.impl = impl;
    if (!core.desc.rule.mask) core.desc.rule.mask = TE_MASK_CAUSAL;
    if (core.channels) core.desc.rule.softmax_scale = te__attn_scale(core.desc.rule.softmax_scale, core.channels);
    *(te__attn_core *)m->state = core;
    return m;
}

/* ---- SDPA ---- */

typedef struct te__sdpa_module {
    te__attn_core core;
    te__context context; /* the ranks that share sequences (context parallelism) */
    const char *rng;     /* the random state of its dropout, a literal; NULL: the context's */
} te__sdpa_module;

static te_result te__sdpa_prepare(te_module *m, const te_forward_args *args, te__attn_run *run) {
    if (!te__options_ok(m->te, "SDPA", &te__sdpa_call_group, &args->attention)) return TE_ERR_UNSUPPORTED;
    run->part[0] = args->input;
    run->part[1] = args->key;
    run->part[2] = args->value;
    te__attn_core_rule(m, &args->attention, &run->told.rule);
    run->told.rule.cu_seqlens_q = args->attention.cu_seqlens_q;
    run->told.rule.cu_seqlens_kv = args->attention.cu_seqlens_kv;
    return te__attn_core_shapes(m, "SDPA", run->part);
}
static te_tensor *te__sdpa_attend(te_module *m, te__attn_run *run) {
    (void)m;
    return te__attention_run(run->part, NULL, &run->told);
}
/* The same for an SDPA, whose model ranks may share. */
static te_tensor *te__sdpa_attend_shared(te_module *m, te__attn_run *run) {
    te__sdpa_module *s = (te__sdpa_module *)m->state;
    const bool forks = s->rng && run->told.rule.dropout_p > 0.0f;
    te_tensor *y;
    if (forks && te_rng_fork_begin(m->te, s->rng) != TE_OK) {
        if (te__context_size(&s->context) > 1)
            te__context_attention_run(run->part, &run->told, &s->context, te_error_code(m->te));
        return NULL;
    }
    y = te__context_size(&s->context) > 1 ? te__context_attention_run(run->part, &run->told, &s->context, TE_OK)
                                          : te__sdpa_attend(m, run);
    if (forks) te_rng_fork_end(m->te);
    return y;
}
static const te__attn_impl te__sdpa = {
    {"SDPA", sizeof(te__sdpa_module), te__attn_core_forward, NULL, NULL},
    "te_sdpa_create",
    {"rule.mask", "format", "rule.softmax_type", "rule.bottom_right_diagonal", "rule.dropout_p"},
    te__sdpa_prepare,
    te__sdpa_attend_shared};

TE_API te_module *te_sdpa_create(te_ctx *te, const te_sdpa_desc *desc) {
    static const char who[] = "te_sdpa_create";
    te__attn_core core = TE_ZERO;
    const te_attn_rule *x = &core.desc.rule;
    if (!te || !te__has_desc(te, desc, who)) return NULL;
    core.desc = *desc;
    if (!(x->softcap >= 0.0f && x->softcap <= FLT_MAX))
        te__fail(te, TE_ERR_INVALID, "%s: rule.softcap is %g; a positive number, or 0 for none, is needed", who,
                 (double)x->softcap);
    else if (!x->softmax_offset != (x->softmax_type != TE_SOFTMAX_LEARNABLE))
        te__fail(te, TE_ERR_INVALID,
                 "%s: rule.softmax_offset is %s and rule.softmax_type %d; TE_SOFTMAX_LEARNABLE (%d) needs it, and "
                 "others do not read it",
                 who, x->softmax_offset ? "given" : "NULL", (int)x->softmax_type, (int)TE_SOFTMAX_LEARNABLE);
    else if (te__options_ok(te, who, &te__sdpa_rule_group, x))
        return te__module_built(te__attn_core_create(te, &te__sdpa, "sdpa", core));
    return NULL;
}

/* Makes an SDPA the core of a model that ranks share: those of `cp` have chunks of each sequence, those of `tp` other
 * heads. */
static void te__sdpa_share(te_module *m, te_group *cp, bool windows, te_group *tp) {
    te__sdpa_module *s = m ? (te__sdpa_module *)m->state : NULL;
    if (!s) return;
    s->context = te__context_of(cp, NULL, windows ? TE_CP_ALL_GATHER : TE_CP_P2P);
    te__module_shares(m, cp);
    if (te__group_size(tp) > 1) s->rng = TE_DIST_RNG;
}
/* Returns true if m is an SDPA that computes its class's forward. */
static bool te__is_plain_sdpa(const te_module *m) { return m && m->cls == &te__sdpa.cls && !m->own_forward; }

/* ---- DotProductAttention ---- */

typedef struct te__dpa_module {
    te__attn_core core;
    bool cross, return_max_logit; /* `cross`: cross attention, not self attention */
    te_tensor *slopes;            /* ALiBi slopes of this rank's heads, if the heads are divided among ranks. NULL
                                   * until a call needs them. An owned reference. */
    te__scaling *scaling;         /* scaling state of attention in FP8 */
    te__context context;          /* the ranks that share sequences (context parallelism) */
    te_cp_comm cp_comm_type;
} te__dpa_module;

/* Copies the parallel options `o` to m. Fails if the ranks do not divide `heads` and `groups` evenly. */
static bool te__heads_shared(te_module *m, const te_parallel_options *o, te_parallel_mode mode, int heads,
                             int groups) {
    return te__parallel_open(m, o, mode) && te__divides(m, "num_attention_heads", heads) &&
           te__divides(m, "num_gqa_groups", groups);
}

/* ---- queries, keys and values ---- */

/* Returns tensor `i` of the `n` tensors packed in x: [.., n, heads, d] (dim is -3) or [.., heads, n, d] (dim is -2). */
static te_tensor *te__packed_part(te_tensor *x, int n, int dim, int i) {
    const int last = x->ndim - 1;
    int64_t shape[TE_MAX_DIMS];
    memcpy(shape, x->shape, sizeof(shape));
    shape[last - 2] = dim == -3 ? x->shape[last - 2] * x->shape[last - 1] : x->shape[last - 2];
    shape[last - 1] = dim == -3 ? x->shape[last] : x->shape[last - 1] * x->shape[last];
    x = te_tensor_view(te_tensor_contiguous(x), last, shape);
    dim = dim == -3 ? last - 2 : last - 1;
    return x ? te_tensor_narrow(x, dim, i * (x->shape[dim] / n), x->shape[dim] / n) : NULL;
}
static bool te__packed_fits(te_ctx *te, const char *name, const te_tensor *x, int ndim, int n, int dim) {
    char text[TE__SHAPE_TEXT];
    if (x->ndim == ndim + 1 && x->shape[x->ndim + dim] == n) return true;
    return te__not_ok(te, TE_ERR_SHAPE,
                      "DotProductAttention: %s is %s and qkv_interleave_dim %d; %s of %d dimensions is needed", name,
                      te__shape_text(x, text), dim,
                      dim == -3 ? n == 3 ? "[.., 3, H, d]" : "[.., 2, G, d]"
                      : n == 3  ? "[.., H, 3, d]"
                                : "[.., G, 2, d]",
                      ndim + 1);
}
/* Returns true if the packed tensor x has the same number and size of heads as m. Sets *p to the layout of x. Records
 * no error. */
static bool te__dpa_packing(const te_module *m, const te_attn_call *c, const te_tensor *x, int dim,
                            te__packing *p) {
    const te__attn_core *s = te__attn_core_of(m);
    const int leading = s->desc.format == TE_THD ? 1 : 2;
    const int64_t *of_token = x->shape + leading;
    memset(p, 0, sizeof(*p));
    p->heads = (int)te__per_rank(m, s->heads);
    p->groups = (int)te__per_rank(m, s->groups);
    p->head_dim = s->channels;
    p->interleaved = dim == -2;
    p->keys = !c->qkv_layer;
    if (x->shape[x->ndim - 1] != p->head_dim) return false;
    if (x->ndim == leading + 2) return dim == -3 && of_token[0] * p->head_dim == te__packing_width(p);
    if (x->ndim != leading + 3) return false;
    if (dim == -2) return of_token[0] == p->groups && of_token[0] * of_token[1] * p->head_dim == te__packing_width(p);
    return of_token[0] == (p->keys ? 2 : 3) && of_token[1] == p->groups && (p->keys || p->heads == p->groups);
}
/* Returns true if the core can read q, k and v of a call in place. A cache, context parallelism and FP8 need copies.
 * If the query heads have no common stride (te__packing_spreads), the core processes each group of query heads as a
 * separate sequence (te__packed_views). That is possible only with the layout sbhd, and only if all options treat all
 * sequences and heads alike. */
static bool te__core_reads_packed(const te_module *m, const te_attn_call *c, const te__packing *p) {
    const te__dpa_module *s = (const te__dpa_module *)m->state;
    const te_sdpa_desc *d = &s->core.desc;
    const te_attn_mask mask = c->attn_mask_type ? c->attn_mask_type : d->rule.mask;
    te__autocast cast;
    if (c->inference_params || te__context_size(&s->context) > 1 || te__runs_fp8_attention(m, &cast)) return false;
    if (!te__packing_spreads(p)) return true;
    return d->format == TE_SBHD && !te__attn_pads(mask) && mask != TE_MASK_ARBITRARY && !c->core_attention_bias_type &&
           !c->core_attention_bias && !c->alibi_slopes && !c->score_mod && d->rule.softmax_type == TE_SOFTMAX_VANILLA &&
           !s->return_max_logit;
}

/* Finds q, k and v of a call, which may be packed in one tensor. Sets run->packed if the core reads them in place. */
static te_result te__dpa_parts(te_module *m, const te_forward_args *args, te__attn_run *run) {
    const te_qkv_format format = run->told.format;
    const te_attn_call *c = &args->attention;
    const int ndim = format == TE_THD ? 3 : 4, dim = c->qkv_interleave_dim ? c->qkv_interleave_dim : -3;
    te_tensor *x = c->qkv_layer ? c->qkv_layer : c->kv_layer, **part = run->part;
    te__packing *p = &run->packing;
    int i;
    part[0] = args->input;
    part[1] = args->key;
    part[2] = args->value;
    if ((dim != -3 && dim != -2) || (c->qkv_interleave_dim && !x))
        return te__fail(
            m->te, TE_ERR_INVALID,
            "DotProductAttention: qkv_interleave_dim %d%s; -3 and -2 are possible, with qkv_layer or kv_layer", dim,
            x ? "" : " without a packed tensor");
    if ((c->qkv_layer && (args->input || args->key || args->value || c->kv_layer)) ||
        (c->kv_layer && (args->key || args->value)))
        return te__fail(m->te, TE_ERR_INVALID,
                        "DotProductAttention: %s is given, and %s too; it stands in the place of both",
                        c->qkv_layer ? "qkv_layer" : "kv_layer",
                        c->qkv_layer ? args->input   ? "input"
                                       : c->kv_layer ? "kv_layer"
                                                     : "key or value"
                                     : "key or value");
    if (x && te__need_memory(x, "DotProductAttention") == TE_OK && x->buffer && te__dpa_packing(m, c, x, dim, p)) {
        if (te__core_reads_packed(m, c, p)) {
            run->packed = te_tensor_contiguous(x);
            return run->packed && te__packed_views(p, run->packed, format, part) ? TE_OK : te_error_code(m->te);
        }
        if (!p->keys) return te__split_qkv(x, p, format, NULL, NULL, part) ? TE_OK : te_error_code(m->te);
    }
    if (c->qkv_layer && !te__packed_fits(m->te, "qkv_layer", c->qkv_layer, ndim, 3, dim)) return TE_ERR_SHAPE;
    if (c->kv_layer && !te__packed_fits(m->te, "kv_layer", c->kv_layer, ndim, 2, dim)) return TE_ERR_SHAPE;
    for (i = 0; i < 3; i++) {
        if (c->qkv_layer) part[i] = te__packed_part(c->qkv_layer, 3, dim, i);
        if (c->kv_layer && i > 0) part[i] = te__packed_part(c->kv_layer, 2, dim, i - 1);
    }
    return part[0] && part[1] && part[2] ? TE_OK : te_error_code(m->te);
}

/* ---- masks and lengths ---- */

/* Returns the cu_seqlens of a padding mask [b, 1, 1, s]. x has the tokens, [s, b, ..] or [b, s, ..]. */
static te_tensor *te__lengths_of_mask(const char *name, te_tensor *mask, const te_tensor *x, te_qkv_format format) {
    const int64_t b = x->shape[format == TE_BSHD ? 0 : 1], s = x->shape[format == TE_BSHD ? 1 : 0];
    te_op_cu_seqlens_args a = TE_ZERO;
    te_tensor *cu;
    char text[TE__SHAPE_TEXT];
    if (mask->dtype != TE_U8 || mask->ndim < 2 || mask->shape[0] != b || mask->shape[mask->ndim - 1] != s ||
        te__numel(mask) != b * s)
        return te__no_tensor(
            x->te, mask->dtype != TE_U8 ? TE_ERR_DTYPE : TE_ERR_SHAPE,
            "DotProductAttention: %s is %s %s; of %lld sequences of %lld tokens u8 [%lld, 1, 1, %lld] is needed", name,
            te_dtype_name(mask->dtype), te__shape_text(mask, text), (long long)b, (long long)s, (long long)b,
            (long long)s);
    a.mask = te_tensor_contiguous(mask);
    a.cu_seqlens = cu = te__empty_1d(x->te, TE_I32, b + 1);
    return a.mask && cu ? te__checked(cu, te_op_cu_seqlens(x->te, &a)) : NULL;
}

/* Sets cu_seqlens_q and cu_seqlens_kv of the rule if the rule has a padding mask. */
static te_result te__dpa_lengths(te_module *m, const te_attn_call *c, te_tensor *const part[3], te_attn_rule *x) {
    const te_qkv_format format = te__attn_core_of(m)->desc.format;
    const bool cross = ((const te__dpa_module *)m->state)->cross;
    const int seq = format == TE_BSHD ? 1 : 0;
    x->cu_seqlens_q = c->cu_seqlens_q;
    x->cu_seqlens_kv = c->cu_seqlens_kv ? c->cu_seqlens_kv : cross ? NULL : c->cu_seqlens_q;
    if (!x->cu_seqlens_q || !x->cu_seqlens_kv) {
        const char *const missing = !x->cu_seqlens_q && !x->cu_seqlens_kv ? "cu_seqlens_q and cu_seqlens_kv are"
                                    : x->cu_seqlens_q                     ? "cu_seqlens_kv is"
                                                                          : "cu_seqlens_q is";
        if (format == TE_THD || c->cu_seqlens_q || c->cu_seqlens_kv || !c->attention_mask ||
            (cross && !c->attention_mask_q))
            return te__fail(m->te, TE_ERR_INVALID, "DotProductAttention: %s NULL under a padding mask; give both%s",
                            missing,
                            format == TE_THD ? ""
                            : cross          ? ", or attention_mask_q and attention_mask, in place of them"
                                             : ", or attention_mask in place of them");
        x->cu_seqlens_kv = te__lengths_of_mask("attention_mask", c->attention_mask, part[1], format);
        if (c->attention_mask_q)
            x->cu_seqlens_q = te__lengths_of_mask("attention_mask_q", c->attention_mask_q, part[0], format);
        else if (part[0]->shape[seq] != part[1]->shape[seq])
            x->cu_seqlens_q = te__lengths_of_mask("attention_mask", c->attention_mask, part[0], format);
        else x->cu_seqlens_q = x->cu_seqlens_kv;
        if (!x->cu_seqlens_q || !x->cu_seqlens_kv) return te_error_code(m->te);
    }
    if (c->pad_between_seqs == TE_ON && !c->cu_seqlens_q_padded)
        return te__fail(m->te, TE_ERR_INVALID,
                        "DotProductAttention: pad_between_seqs is TE_ON (%d) and cu_seqlens_q_padded NULL; the padding "
                        "stands between those starts",
                        (int)TE_ON);
    if (c->pad_between_seqs != TE_OFF) {
        x->cu_seqlens_q_padded = c->cu_seqlens_q_padded;
        x->cu_seqlens_kv_padded = c->cu_seqlens_kv_padded ? c->cu_seqlens_kv_padded
                                  : cross                 ? NULL
                                                          : c->cu_seqlens_q_padded;
    }
    x->max_seqlen_q = c->max_seqlen_q;
    x->max_seqlen_kv = c->max_seqlen_kv ? c->max_seqlen_kv : cross || c->cu_seqlens_kv ? 0 : c->max_seqlen_q;
    return TE_OK;
}

/* Completes the window of a rule as TransformerEngine does (see te_attn_options). */
static te_result te__dpa_window(te_module *m, te_attn_rule *x) {
    const te_window w = x->window;
    const bool causal = te__attn_is_causal(x->mask);
    if (!w.on) return TE_OK;
    if (w.left < -1 || w.right < -1 ||
        (causal ? w.left == -1 && w.right > 0 : (w.left == -1) != (w.right == -1) && !(w.left == -1 && w.right == 0)))
        return te__fail(m->te, TE_ERR_INVALID,
                        "DotProductAttention: window (%lld, %lld) with attn_mask_type %d; under causal masks (left, 0) "
                        "is possible, under others both are numbers of "
                        "keys or both -1, for no bound",
                        (long long)w.left, (long long)w.right, (int)x->mask);
    if (causal) x->window.right = 0;
    else if (w.left == -1) x->window.right = -1;
    return TE_OK;
}

/* Returns the mask that replaces `mask` in a call with a cache. */
static te_attn_mask te__cached_mask(te_attn_mask mask) {
    if (mask == TE_MASK_NONE) return TE_MASK_PADDING;
    return te__attn_is_causal(mask) ? TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT : mask;
}

/* ---- the call ---- */

/* Returns this rank's part of the ALiBi slopes of all heads. te_attention itself would compute slopes for a model that
 * has only this rank's heads. */
static te_tensor *te__dpa_slopes(te_module *m) {
    te__dpa_module *s = (te__dpa_module *)m->state;
    const int heads = s->core.heads, first = te__group_rank(m->parallel.group) * (int)te__per_rank(m, heads);
    const int64_t n = te__per_rank(m, heads);
    const size_t bytes = (size_t)n * sizeof(float);
    float *slopes;
    int64_t h;
    if (s->slopes) return s->slopes;
    slopes = (float *)te__alloc(m->te, bytes);
    if (!slopes) return NULL;
    for (h = 0; h < n; h++) slopes[h] = te__attn_slope(heads, first + (int)h);
    te__frame_begin(m->te);
    s->slopes = te_tensor_retain(te_tensor_from_host(m->te, TE_F32, 1, &n, slopes));
    te__frame_end(m->te, NULL, 0);
    te__free(m->te, slopes);
    return s->slopes;
}

/* Checks the mask of a call as TransformerEngine does. Completes the rule *x. If there is a cache, writes part[1] and
 * part[2] to the cache, and replaces them by the cache's tensors. */
static te_result te__dpa_masks(te_module *m, const te_attn_call *c, te_tensor *part[3], te_attn_rule *x) {
    const te_qkv_format format = te__attn_core_of(m)->desc.format;
    te_inference_step step;
    te_result result;
    if ((int)x->mask < 0 || x->mask > TE_MASK_ARBITRARY)
        return te__fail(
            m->te, TE_ERR_INVALID,
            "DotProductAttention: attn_mask_type %d; TE_MASK_NONE (1) to TE_MASK_ARBITRARY (7) are possible",
            (int)x->mask);
    if (!te__attn_pads(x->mask) && format == TE_THD && !c->inference_params)
        return te__fail(m->te, TE_ERR_INVALID,
                        "DotProductAttention: attn_mask_type %d with qkv_format TE_THD; packed sequences need a mask "
                        "with padding (%d to %d)",
                        (int)x->mask, (int)TE_MASK_PADDING, (int)TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT);
    if (c->inference_params) x->mask = te__cached_mask(x->mask);
    if (c->inference_params && !te__attn_pads(x->mask))
        return te__fail(m->te, TE_ERR_INVALID,
                        "DotProductAttention: inference_params with attn_mask_type %d (TE_MASK_ARBITRARY); a cache "
                        "takes the masks before it (1 to 6)",
                        (int)x->mask);
    if (!te__attn_pads(x->mask) &&
        (c->cu_seqlens_q || c->cu_seqlens_kv || c->cu_seqlens_q_padded || c->cu_seqlens_kv_padded))
        return te__fail(
            m->te, TE_ERR_INVALID,
            "DotProductAttention: cu_seqlens with attn_mask_type %d; lengths belong to masks with padding (%d to %d)",
            (int)x->mask, (int)TE_MASK_PADDING, (int)TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT);
    if (x->mask == TE_MASK_ARBITRARY && !c->attention_mask)
        return te__fail(m->te, TE_ERR_INVALID,
                        "DotProductAttention: attention_mask is NULL with attn_mask_type %d (TE_MASK_ARBITRARY), which "
                        "is that tensor",
                        (int)TE_MASK_ARBITRARY);
    result = te__dpa_window(m, x);
    if (result != TE_OK) return result;
    if (c->inference_params) {
        result = te_inference_params_step(c->inference_params, m, part[1], part[2], format, &step);
        if (result != TE_OK) return result;
        x->cu_seqlens_q = step.rule.cu_seqlens_q;
        x->cu_seqlens_kv = step.rule.cu_seqlens_kv;
        x->max_seqlen_q = step.rule.max_seqlen_q;
        x->page_table = step.rule.page_table;
        x->k_factors = step.rule.k_factors;
        x->v_factors = step.rule.v_factors;
        part[1] = step.k;
        part[2] = step.v;
    } else if (te__attn_pads(x->mask))
        result = te__dpa_lengths(m, c, part, x);
    else if (x->mask == TE_MASK_ARBITRARY)
        x->attention_mask = c->attention_mask;
    if (result != TE_OK || x->core_attention_bias_type != TE_ATTN_BIAS_ALIBI || x->alibi_slopes || m->parallel.size < 2)
        return result;
    if (te__parallel_ready(m) != TE_OK) return te_error_code(m->te);
    x->alibi_slopes = te__dpa_slopes(m);
    return x->alibi_slopes ? TE_OK : te_error_code(m->te);
}

/* ---- ranks that share sequences ---- */

static const char *te__cp_name(te_cp_comm comm) {
    static const char *const names[] = {"TE_CP_P2P", "TE_CP_ALL_GATHER", "TE_CP_A2A", "TE_CP_A2A_P2P"};
    return names[comm];
}

/* Sets the context-parallel groups of m. Error messages begin with `who`. */
static te_result te__dpa_share(te_module *m, const char *who, te_group *cp, te_group *p2p, te_cp_comm comm) {
    te__dpa_module *s = (te__dpa_module *)m->state;
    te_result result;
    if ((int)comm < 0 || comm > TE_CP_A2A_P2P)
        return te__fail(m->te, TE_ERR_INVALID, "%s: cp_comm_type %d; TE_CP_P2P (0) to TE_CP_A2A_P2P (3) are possible",
                        who, (int)comm);
    result = te__group_allowed(m->te, cp, who, "cp_group");
    if (result == TE_OK) result = te__group_allowed(m->te, p2p, who, "cp_p2p_group");
    if (result != TE_OK) return result;
    if (comm == TE_CP_A2A_P2P ? !cp != !p2p : p2p != NULL)
        return te__fail(m->te, TE_ERR_INVALID,
                        "%s: cp_comm_type %s, cp_group %s and cp_p2p_group %s; TE_CP_A2A_P2P takes both groups, all "
                        "others cp_group alone",
                        who, te__cp_name(comm), cp ? "given" : "NULL", p2p ? "given" : "NULL");
    s->context = te__context_of(cp, p2p, comm);
    s->cp_comm_type = comm;
    te__module_shares(m, cp);
    te__module_shares(m, p2p);
    return TE_OK;
}

/* Refuses the options that TransformerEngine refuses under context parallelism, even if te.h's kernels could compute
 * them. */
static te_result te__dpa_context_choices(te_module *m, const te_attn_call *c, const te_attn_rule *x) {
    const te__dpa_module *s = (const te__dpa_module *)m->state;
    const te_cp_comm comm = s->cp_comm_type;
    const te_attn_bias bias = x->core_attention_bias_type;
    const te_qkv_format format = s->core.desc.format;
    const bool packed = format == TE_THD, ring = te__group_size(s->context.ring) > 1 && !s->context.gathers;
    const int ranks = te__context_size(&s->context);
    te__autocast cast;
    if (c->inference_params)
        return te__fail(m->te, TE_ERR_UNSUPPORTED,
                        "DotProductAttention: inference_params, and cp_group with %d ranks; a cache has whole "
                        "sequences: leave one of them NULL",
                        ranks);
    if (c->score_mod)
        return te__fail(m->te, TE_ERR_UNSUPPORTED,
                        "DotProductAttention: score_mod, and cp_group with %d ranks, whose rows have other positions; "
                        "leave one of them NULL",
                        ranks);
    if (te__runs_fp8_attention(m, &cast) && te__asks_factory(&cast.recipe))
        return te__fail(m->te, TE_ERR_UNSUPPORTED,
                        "DotProductAttention: fp8_dpa or fp8_mha of recipe custom, and cp_group with %d ranks, whose "
                        "codes need one scale; take another recipe, or te_module_set_recipe(core, NULL, true), which "
                        "keeps this core in high precision",
                        ranks);
    if (packed ? x->mask != TE_MASK_PADDING && x->mask != TE_MASK_PADDING_CAUSAL
               : x->mask != TE_MASK_NONE && x->mask != TE_MASK_CAUSAL)
        return te__fail(
            m->te, TE_ERR_UNSUPPORTED,
            "DotProductAttention: attn_mask_type %d with qkv_format %d, and cp_group with %d ranks; %s are possible",
            (int)x->mask, (int)format, ranks,
            packed ? "TE_MASK_PADDING (4) and TE_MASK_PADDING_CAUSAL (5)" : "TE_MASK_NONE (1) and TE_MASK_CAUSAL (2)");
    if (bias == TE_ATTN_BIAS_ALIBI || bias == TE_ATTN_BIAS_PRE_SCALE ||
        (bias != TE_ATTN_BIAS_NONE && (packed || comm != TE_CP_P2P)))
        return te__fail(m->te, TE_ERR_UNSUPPORTED,
                        "DotProductAttention: core_attention_bias_type %d with qkv_format %d and cp_comm_type %s over "
                        "%d ranks; TE_ATTN_BIAS_POST_SCALE (%d) is possible with "
                        "TE_CP_P2P, not with TE_THD",
                        (int)bias, (int)format, te__cp_name(comm), ranks, (int)TE_ATTN_BIAS_POST_SCALE);
    if (x->softmax_type != TE_SOFTMAX_VANILLA && comm != TE_CP_A2A)
        return te__fail(m->te, TE_ERR_UNSUPPORTED,
                        "DotProductAttention: softmax_type %d with cp_comm_type %s over %d ranks; types beside "
                        "TE_SOFTMAX_VANILLA (0) are possible with TE_CP_A2A",
                        (int)x->softmax_type, te__cp_name(comm), ranks);
    if (x->window.on &&
        (x->window.left >= 0 || (!te__attn_is_causal(x->mask) && x->window.right >= 0))) {
        if (ring)
            return te__fail(m->te, TE_ERR_UNSUPPORTED,
                            "DotProductAttention: window (%lld, %lld) with cp_comm_type %s over %d ranks; windows are "
                            "possible with TE_CP_ALL_GATHER and TE_CP_A2A",
                            (long long)x->window.left, (long long)x->window.right, te__cp_name(comm), ranks);
        if (s->context.gathers && packed && x->mask == TE_MASK_PADDING)
            return te__fail(m->te, TE_ERR_UNSUPPORTED,
                            "DotProductAttention: window (%lld, %lld) with attn_mask_type %d, qkv_format TE_THD and "
                            "TE_CP_ALL_GATHER; a window of both sides of packed "
                            "sequences is possible with TE_CP_A2A",
                            (long long)x->window.left, (long long)x->window.right, (int)x->mask);
    }
    return TE_OK;
}
static te_result te__dpa_context_sizes(te_module *m, te_tensor *const part[3], const te_attn_rule *x) {
    const te__dpa_module *s = (const te__dpa_module *)m->state;
    const int exchange = te__group_size(s->context.heads), ring = te__group_size(s->context.ring),
              seq = te__attn_seq_dim(s->core.desc.format);
    const int64_t s_q = part[0]->shape[seq], s_kv = part[1]->shape[seq], heads = part[0]->shape[part[0]->ndim - 2],
                  groups = part[1]->shape[part[1]->ndim - 2];
    const te_tensor *bias = x->core_attention_bias;
    char text[TE__SHAPE_TEXT];
    if (part[2]->ndim != part[1]->ndim || part[2]->shape[seq] != s_kv || part[2]->shape[part[2]->ndim - 2] != groups)
        return te__fail(m->te, TE_ERR_SHAPE,
                        "DotProductAttention: value is %s, and key has %lld tokens of %lld heads; they must be equal",
                        te__shape_text(part[2], text), (long long)s_kv, (long long)groups);
    if (s_q % 2 || s_kv % 2)
        return te__fail(m->te, TE_ERR_SHAPE,
                        "DotProductAttention: this rank has %lld queries and %lld keys of each sequence, and cp_group "
                        "%d ranks; a rank has two chunks of one length of each: pad sequences to a "
                        "multiple of %d",
                        (long long)s_q, (long long)s_kv, exchange * ring, 2 * exchange * ring);
    if (s_q != s_kv &&
        (te__attn_is_causal(x->mask) || (s->context.gathers && x->window.on && x->window.left >= 0)))
        return te__fail(m->te, TE_ERR_UNSUPPORTED,
                        "DotProductAttention: this rank has %lld queries and %lld keys, with attn_mask_type %d, a "
                        "window %s and cp_comm_type %s; causal masks, and windows with "
                        "TE_CP_ALL_GATHER, need as many of both",
                        (long long)s_q, (long long)s_kv, (int)x->mask, x->window.on ? "on" : "off",
                        te__cp_name(s->cp_comm_type));
    if (heads % exchange || groups % exchange)
        return te__fail(m->te, TE_ERR_SHAPE,
                        "DotProductAttention: %lld heads in %lld groups with cp_comm_type %s over %d ranks, which "
                        "exchange heads; the ranks must divide both",
                        (long long)heads, (long long)groups, te__cp_name(s->cp_comm_type), exchange);
    if (bias && (bias->ndim != 4 || bias->shape[3] != s_kv * ring || (bias->shape[2] != 1 && bias->shape[2] != s_q)))
        return te__fail(m->te, TE_ERR_SHAPE,
                        "DotProductAttention: core_attention_bias is %s; of %lld queries of this rank and %lld keys of "
                        "all %d, [.., .., %lld or 1, %lld] is needed",
                        te__shape_text(bias, text), (long long)s_q, (long long)(s_kv * ring), ring, (long long)s_q,
                        (long long)(s_kv * ring));
    return TE_OK;
}

static te_result te__dpa_prepare(te_module *m, const te_forward_args *args, te__attn_run *run) {
    te__dpa_module *s = (te__dpa_module *)m->state;
    const bool shares = te__context_size(&s->context) > 1;
    te_attn_desc *a = &run->told;
    te_result result = te__dpa_parts(m, args, run);
    if (result == TE_OK && !(run->packed && te__packing_spreads(&run->packing)))
        result = te__attn_core_shapes(m, "DotProductAttention", run->part);
    if (result == TE_OK) te__attn_core_rule(m, &args->attention, &a->rule);
    if (result == TE_OK) result = te__dpa_masks(m, &args->attention, run->part, &a->rule);
    if (result == TE_OK && shares) result = te__dpa_context_choices(m, &args->attention, &a->rule);
    if (result == TE_OK && shares) result = te__dpa_context_sizes(m, run->part, &a->rule);
    if (result == TE_OK && s->return_max_logit) {
        a->max_logit = te__empty_1d(m->te, TE_F32, te__per_rank(m, s->core.heads));
        if (!a->max_logit) result = te_error_code(m->te);
    }
    if (result == TE_OK) result = te__fork_begin(m);
    /* tells the other ranks that this rank failed */
    if (result != TE_OK && shares) te__context_attention_run(run->part, a, &s->context, result);
    return result;
}
static te_tensor *te__dpa_attend(te_module *m, te__attn_run *run) {
    te__dpa_module *s = (te__dpa_module *)m->state;
    te_tensor **part = run->part, *y;
    if (run->packed) part[run->packing.keys] = run->packed;
    y = te__context_size(&s->context) > 1
            ? te__core_context(m, s->scaling, part, &run->told, &s->context, run->fp8_output)
        : run->packed ? te__heads_joined(te__attention_run(part, &run->packing, &run->told))
                      : te__core_attention(m, s->scaling, part, &run->told, run->fp8_output);
    te__fork_end(m);
    return y;
}
static void te__dpa_destroy(te_module *m) {
    te_tensor_release(((te__dpa_module *)m->state)->slopes);
    te__scaling_leave(((te__dpa_module *)m->state)->scaling);
}
static te_result te__dpa_reset(te_module *m) {
    te_tensor *offset = te_module_parameter(m, "softmax_offset");
    return offset ? te_tensor_fill(offset, 0.0) : TE_OK;
}
static const te__attn_impl te__dpa = {
    {"DotProductAttention", sizeof(te__dpa_module), te__attn_core_forward, te__dpa_destroy, te__dpa_reset},
    "te_dot_product_attention_create",
    {"attention.attn_mask_type", "attention.qkv_format", "attention.softmax_type", "attention.bottom_right_diagonal",
     "attention.attention_dropout"},
    te__dpa_prepare,
    te__dpa_attend};
/* Returns the state of m if m is a DotProductAttention. Otherwise returns NULL. */
static te__dpa_module *te__dpa_of(const te_module *m) {
    return m->cls == &te__dpa.cls ? (te__dpa_module *)m->state : NULL;
}

/* Returns the context-parallel state of a core, or NULL if the core has none. */
static te__context *te__context_of_core(const te_module *core) {
    te__dpa_module *s = core && !core->own_forward ? te__dpa_of(core) : NULL;
    if (te__is_plain_sdpa(core)) return &((te__sdpa_module *)core->state)->context;
    return s ? &s->context : NULL;
}
static te_result te__context_set(te_module *m, te_group *cp, te_group *p2p, te_cp_comm comm) {
    te_result result = te__dpa_of(m) ? te__dpa_share(m, "te_set_context_parallel_group", cp, p2p, comm) : TE_OK;
    int i;
    for (i = 0; i < m->num_children && result == TE_OK; i++) result = te__context_set(m->children[i], cp, p2p, comm);
    return result;
}
TE_API te_result te_set_context_parallel_group(te_module *m, te_group *cp_group, te_group *cp_p2p_group,
                                               te_cp_comm cp_comm_type) {
    return m ? te__context_set(m, cp_group, cp_p2p_group, cp_comm_type) : TE_ERR_STATE;
}

/* Creates a DotProductAttention. Options of `core` that are 0 get their defaults. `o` has the options that are not in
 * te__attn_core, or is NULL. */
static te_module *te__dpa_create(te_ctx *te, te__attn_core core, const te_parallel_options *p,
                                 const te_attn_options *o) {
    te__dpa_module *s;
    te_module *m;
    if (!core.groups) core.groups = core.heads;
    if (core.heads < 1 || core.groups < 1 || core.heads % core.groups || core.channels < 1)
        return te__no_module(te, TE_ERR_INVALID,
                             "%s: %d heads of %lld channels in %d groups; the groups must divide the heads",
                             te__dpa.who, core.heads, (long long)core.channels, core.groups);
    m = te__attn_core_create(te, &te__dpa, "core_attention", core);
    if (!m) return NULL;
    s = (te__dpa_module *)m->state;
    s->scaling = te__scaling_create(te, m, TE__ATTENTION_GEMMS);
    m->takes_packed = m->has_fp8_output = true;
    if (te__dpa_share(m, te__dpa.who, p->cp_group, p->cp_p2p_group, p->cp_comm_type) == TE_OK &&
        te__heads_shared(m, p, TE_PARALLEL_COLUMN, core.heads, core.groups) &&
        core.desc.rule.softmax_type == TE_SOFTMAX_LEARNABLE) {
        te__add_weight(m, "softmax_offset", TE_F32, te__per_rank(m, core.heads), 0);
        te__split_mark(m, te_module_parameter(m, "softmax_offset"), TE_PARALLEL_COLUMN, NULL);
    }
    if (o) {
        s->cross = o->attention_type == TE_ATTENTION_CROSS;
        s->return_max_logit = o->return_max_logit;
        m->checkpoint = o->checkpoint_core_attention;
        te__rng_open(m, o->rng_tracker_name);
    }
    return te__module_built(m);
}
TE_API te_module *te_dot_product_attention_create(te_ctx *te, const te_dot_product_attention_desc *desc) {
    te__attn_core core = TE_ZERO;
    const te_attn_options *o;
    if (!te || !te__has_desc(te, desc, te__dpa.who)) return NULL;
    o = &desc->attention;
    core.desc.name = desc->name;
    core.desc.format = o->qkv_format;
    core.desc.rule.mask = o->attn_mask_type;
    core.desc.rule.window = o->window;
    core.desc.rule.softmax_scale = o->softmax_scale;
    core.desc.rule.dropout_p = o->attention_dropout;
    core.desc.rule.bottom_right_diagonal = o->bottom_right_diagonal;
    core.desc.rule.softmax_type = o->softmax_type;
    core.heads = o->num_attention_heads;
    core.groups = o->num_gqa_groups;
    core.channels = o->kv_channels;
    return te__dpa_create(te, core, &desc->parallel, o);
}

/* ---- caches ---- */

static bool te__cache_module(void *user, te_module *m) {
    return !te__dpa_of(m) || te__cached_layer_of((te_inference_params *)user, m) != NULL;
}
TE_API te_result te_inference_params_allocate_memory(te_inference_params *c, te_module *m) {
    if (!c || !m) return TE_ERR_STATE;
    if (c->te != m->te)
        return te__fail(
            c->te, TE_ERR_INVALID,
            "te_inference_params_allocate_memory: the module is of another context than the cache; make both in one");
    te_module_visit(m, te__cache_module, c);
    return te_error_code(c->te);
}
