/* nn/layers.c: Linear, LayerNorm, RMSNorm, LayerNormLinear, Embedding, and functions that LayerNormMLP also calls. This
 * file must not depend on attention. */

/* Largest number of rows or columns of a weight. A gated activation doubles the rows, and the result must fit into
 * int64_t. */
#define TE__MAX_LAYER_SIZE (INT64_MAX / 2)
static bool te__layer_desc_ok(te_ctx *te, const char *cls, int64_t in, int64_t out, te_dtype dtype) {
    if (in < 1 || out < 1 || in > TE__MAX_LAYER_SIZE || out > TE__MAX_LAYER_SIZE)
        return te__not_ok(te, TE_ERR_INVALID, "%s: sizes %lld and %lld; both must be at least 1 and less than 2^62",
                          cls, (long long)in, (long long)out);
    if (dtype != TE_DTYPE_NONE && !te__is_float(dtype))
        return te__not_ok(te, TE_ERR_DTYPE, "%s: params_dtype %s; f32, f16 and bf16 are possible", cls,
                          te_dtype_name(dtype));
    return true;
}

/* ---- scaling state of a module ---- */

TE_API te_result te_module_set_recipe(te_module *m, const te_recipe *recipe, bool off) {
    te_recipe *copy = NULL;
    if (!m) return TE_ERR_STATE;
    if (recipe && off)
        return te__fail(m->te, TE_ERR_INVALID, "te_module_set_recipe: a recipe (%s) and off; give one of them",
                        te_recipe_name(recipe->kind));
    if (recipe && te__recipe_check(m->te, recipe) != TE_OK) return te_error_code(m->te);
    if (recipe) {
        copy = (te_recipe *)te__alloc(m->te, sizeof(te_recipe));
        if (!copy) return TE_ERR_OUT_OF_MEMORY;
        *copy = *recipe;
    }
    te__free(m->te, m->recipe);
    m->recipe = copy;
    m->recipe_off = off;
    return TE_OK;
}
/* Sets *cast to the settings of the current autocast region for m. A recipe of m, or else of the nearest module above m
 * that has one, replaces the recipe of the region. Returns false without an active region, or if quantization is off
 * for m. */
static bool te__autocast_of(const te_module *m, te__autocast *cast) {
    const te__autocast *now = te__autocast_now(m->te);
    if (!now || !(now->enabled || now->calibrating)) return false;
    *cast = *now;
    while (m && !m->recipe && !m->recipe_off) m = m->parent;
    if (m && m->recipe) cast->recipe = *m->recipe;
    return !(m && m->recipe_off);
}

/* Names of the buffers with scales and amax histories: first those of the forward pass, then those of the backward
 * pass. */
static const char *const te__scaling_names[2][2] = {{"fp8_scale_fwd", "fp8_amax_history_fwd"},
                                                    {"fp8_scale_bwd", "fp8_amax_history_bwd"}};
/* Finds or creates the module buffers with scales and amax histories, for a delayed or custom recipe. A loaded
 * checkpoint may have created them already. */
static te_result te__scaling_slots(te_module *m, te__scaling *s, const te_recipe *recipe, te__quant_call *call) {
    const int length = te__history_length(recipe);
    te_result result = TE_OK;
    bool warming;
    int i;
    if (m->parallel.size > 1) {
        if (!call->group) call->group = m->parallel.group; /* one product uses codes of all ranks */
        if (m->parallel.sequence && recipe->delayed.no_reduce_amax)
            return te__fail(m->te, TE_ERR_INVALID,
                            "%s: sequence_parallel over %d ranks, and the recipe has no_reduce_amax: the codes that "
                            "they exchange need one scale; "
                            "leave no_reduce_amax off",
                            m->cls->name, m->parallel.size);
    }
    if (te__quant_of(m->te)->replaying) return te__snapshot_call(m->te, s, call);
    te__frame_begin(m->te);
    warming = m->te->warming; /* after te_warmup_begin no kernels run, but the scales must be filled even then */
    m->te->warming = false;
    for (i = 0; i < 2 && result == TE_OK; i++) {
        te__slots *slots = i ? &s->backward : &s->forward;
        te_tensor *scale = te_module_parameter(m, te__scaling_names[i][0]),
                  *history = te_module_parameter(m, te__scaling_names[i][1]);
        int64_t n = slots->n;
        if (scale && history && slots->scale == scale && slots->history == history && history->shape[0] == length)
            continue;
        if (m->te->capture) { /* each launch would fill them again */
            result = te__refuse_capture(m->te, "making the scales of a delayed recipe", TE__RUN_FIRST);
            break;
        }
        if (!scale || scale->dtype != TE_F32 || scale->ndim != 1 || scale->shape[0] != n)
            scale = te_module_add_buffer(m, te__scaling_names[i][0], te_tensor_full(m->te, TE_F32, 1, &n, 1.0));
        if (!history || history->dtype != TE_F32 || history->ndim != 2 || history->shape[1] != n ||
            history->shape[0] != length) {
            bool usable = history && history->dtype == TE_F32 && history->ndim == 2 && history->shape[1] == n;
            history = te_module_add_buffer(m, te__scaling_names[i][1],
                                           te__history_resized(m->te, usable ? history : NULL, length, (int)n));
        }
        result = te__slots_set(slots, scale, history);
        if (result == TE_OK) result = te__slots_keep(slots);
    }
    m->te->warming = warming;
    te__frame_end(m->te, NULL, 0);
    return result == TE_OK ? te__snapshot_call(m->te, s, call) : result;
}

/* Returns true if the current operations will have a backward pass. In the first run of a checkpointed function this is
 * true if the second run will record them. */
static bool te__grad_will_be(const te_ctx *te) { return te->tape.no_grad == te->tape.hidden_no_grad; }

/* Notes in m under which recipe its products first run with a backward pass: ranks that exchange their gradients
 * compare it. A rank may evaluate the model under another recipe, by itself. */
static void te__note_recipe(te_module *m) {
    const te__autocast *now = te__autocast_now(m->te);
    const bool quantizes = now && now->enabled;
    if (m->ran_sum || !m->te->tape.watched || !te__grad_will_be(m->te)) return;
    m->ran = quantizes ? now->recipe.kind : TE_RECIPE_NONE;
    m->ran_sum = te__recipe_sum(quantizes ? &now->recipe : NULL);
}
/* Fills *call with the quantization settings of the current autocast region for m, and with the scales that the recipe
 * keeps between calls. */
static te_result te__scaling_prepare(te_module *m, te__scaling *s, te__quant_call *call) {
    te__autocast cast;
    te_result result = te__parallel_ready(m);
    memset(call, 0, sizeof(*call));
    if (result != TE_OK) return result;
    te__note_recipe(m);
    if (!te__autocast_of(m, &cast)) return TE_OK;
    s->module_type = m->cls->name;
    call->scaling = s;
    call->recipe = cast.recipe;
    call->group = cast.amax_group;
    call->enabled = cast.enabled;
    call->calibrating = cast.calibrating;
    call->forward = &s->forward;
    if (te__asks_factory(&call->recipe)) result = te__custom_prepare(m->te, s, &call->recipe, m->cls->name);
    return result == TE_OK && te__keeps_scales(s, &call->recipe) ? te__scaling_slots(m, s, &call->recipe, call)
                                                                 : result;
}

/* Returns true if an operation can quantize its own result with the scale of `slot` (TE__SLOT_INPUT, ...), or compute
 * the amax of this result.
 * As in TransformerEngine, returns false for a high-precision backward pass and for a custom recipe's factory. */
static bool te__fuses(const te__quant_call *q, bool backward, int slot) {
    te__quant_spec spec;
    if (!q->enabled || q->recipe.backward_override || te__asks_factory(&q->recipe)) return false;
    spec = te__recipe_spec(&q->recipe, backward, slot, q->group);
    return spec.cls->facts & TE__SCALE_GIVEN || te__takes_amax(&spec);
}
/* Returns how the operation before GEMM `c` quantizes its result, or NULL if the GEMM quantizes this result. Gathered
 * codes get no column-wise copy: the receiving rank transposes them. Where it cannot, since blocks have scales, the
 * GEMM quantizes: it knows whether its rows can be gathered as codes. */
static const te__quant_spec *te__fused_spec(const te__linear_call *c, te__quant_spec *spec) {
    bool gathered = te__gathers(&c->parallel, TE_PARALLEL_COLUMN);
    if (!te__fuses(c->quant, false, TE__SLOT_INPUT)) return NULL;
    *spec = te__product_spec(c->quant, &c->parallel, false, c->gemm, TE__SLOT_INPUT,
                             TE_ROWWISE | (te__wants_grad(c->weight) && !gathered ? TE_COLUMNWISE : 0));
    return gathered && !(spec->cls->facts & TE__TENSOR_SCALED) ? NULL : spec;
}

/* Returns te__fused_spec for the output of a norm, or NULL if the GEMM itself quantizes these few rows. The bits are
 * the same, since a norm's amax is that of its rounded result. */
static const te__quant_spec *te__fused_norm_spec(const te__linear_call *c, const te_tensor *x, te__quant_spec *spec) {
    const te__quant_spec *fused = te__fused_spec(c, spec);
    te__quant_spec waits;
    if (!fused || fused->cls->facts & TE__SCALE_GIVEN || !x || !c->weight) return fused;
    return te__linear_input_waits(c, x, &waits) ? NULL : fused;
}

/* Returns te__fused_spec for the output of an activation. Returns NULL under delayed scaling if the halves of the gated
 * input are interleaved: delayed scaling needs transposed codes, and no kernel makes transposed codes from such
 * halves. */
static const te__quant_spec *te__fused_act_spec(const te__linear_call *c, const te_activation_params *params,
                                                te__quant_spec *spec) {
    const te__quant_spec *fused = te__fused_spec(c, spec);
    return fused && params->glu_interleave_size && fused->cls->facts & TE__SCALE_GIVEN ? NULL : fused;
}

/* Returns the te__linear_call of GEMM number `gemm` of m. */
static te__linear_call te__linear_call_of(te_module *m, const te__quant_call *q, int gemm, te_parallel_mode mode,
                                          te__weight_cache *cache, const te_forward_args *args,
                                          const te_gemm_options *o, te__scaling *scaling) {
    te__linear_call c = TE_ZERO;
    c.quant = q;
    c.gemm = gemm;
    c.parallel = te__parallel_as(m, mode);
    c.met = &m->met;
    c.cache = cache;
    c.microbatch = args->is_first_microbatch;
    c.fuse_wgrad = o->fuse_wgrad_accumulation;
    c.delays = o->delay_wgrad_compute ? scaling : NULL;
    c.fp8_output = args->fp8_output;
    c.fp8_grad = args->fp8_grad;
    return c;
}

/* Quantizes the output y for the GEMMs that read it. The gradient passes through unchanged. */
static te_tensor *te__linear_quantized(const te__linear_call *c, te_tensor *y, const te__quant_spec *spec) {
    te_tensor *q;
    te__frame_begin(y->te);
    q = te__quantize_as(y, c->weight->dtype, spec);
    return te__frame_return(y->te, q ? te__record_codes(y, q) : NULL);
}

/* Runs a GEMM. Adds the bias, unless `returned` is true. In row-parallel mode the bias is added after the sum over the
 * ranks. */
static te_tensor *te__linear_biased(te__linear_call *c, te_tensor *bias, bool returned) {
    bool behind = c->parallel.mode == TE_PARALLEL_ROW, quantizes = c->fp8_output && c->quant->enabled && c->weight;
    te__quant_spec spec = TE_ZERO;
    te_tensor *y;
    if (quantizes)
        spec = te__slot_spec(c->quant, false, c->gemm, TE__SLOT_OUTPUT,
                             TE_ROWWISE | (te__grad_will_be(c->weight->te) ? TE_COLUMNWISE : 0));
    quantizes = quantizes && spec.cls->form != TE__FORM_PLAIN;
    if (quantizes && !behind) c->y_dtype = te__result_dtype(&spec, c->weight->dtype);
    c->bias = returned || behind ? NULL : bias;
    y = te__linear(c);
    if (y && behind && !returned && bias) y = te_bias_dropout_add(y, bias, NULL, 0.0f);
    return y && quantizes ? te__linear_quantized(c, y, &spec) : y;
}

static te_tensor *te__bias_of(te_module *m, const char *name, bool no_bias) {
    return no_bias ? NULL : te_module_parameter(m, name);
}
/* Returns true if m runs for the second time because of its own activation checkpointing. Then nobody reads the outputs
 * of m. */
static bool te__runs_again(const te_module *m) {
    return te__quant_of(m->te)->replaying && te__quant_of(m->te)->replaying->module == m &&
           !te__quant_of(m->te)->recording && !m->own_forward;
}

/* ---- shapes without memory ---- */

/* Returns an output like x, but with `cols` columns. If x has several dimensions, the first dimension of the output has
 * size `rows`. The output has no memory if x has none. */
static te_tensor *te__shape_only(const te_tensor *x, int64_t rows, int64_t cols) {
    int64_t shape[TE_MAX_DIMS];
    memcpy(shape, x->shape, sizeof(shape));
    shape[x->ndim - 1] = cols;
    if (x->ndim > 1) shape[0] = rows;
    return x->buffer ? te_tensor_empty(x->te, x->dtype, x->ndim, shape)
                     : te_tensor_describe(x->te, x->dtype, x->ndim, shape);
}
/* Sets the output of m for an input without elements or memory. `in` and `out` are the numbers of columns. */
static te_result te__shape_forward(te_module *m, te_forward_args *args, int64_t in, int64_t rows, int64_t out) {
    const te_tensor *x = args->input;
    char text[TE__SHAPE_TEXT];
    if (x->ndim < 1 || te__cols(x) != in)
        return te__fail(m->te, TE_ERR_SHAPE, "%s: the input is %s, a shape without memory; [.., %lld] is needed",
                        m->cls->name, te__shape_text(x, text), (long long)in);
    return te__output(m, args, te__shape_only(x, rows, out));
}

/* ---- Linear ---- */

typedef struct te__linear_module {
    te_linear_desc desc;
    te__sharding sharding;
    te__product_params params;
    te__scaling *scaling;
    te__weight_cache cache;
} te__linear_module;

/* The forward pass of a Linear has two functions. te__linear_begin fills *call, except for the input call->x.
 * te__linear_end runs the GEMM and sets the outputs. */
static te_result te__linear_begin(te_module *m, te_forward_args *args, te__quant_call *quant, te__linear_call *call) {
    te__linear_module *s = (te__linear_module *)m->state;
    te_result result = te__scaling_prepare(m, s->scaling, quant);
    *call = te__linear_call_of(m, quant, 0, s->desc.parallel.parallel_mode, &s->cache, args, &s->desc.gemm, s->scaling);
    if (call->microbatch == TE_MICROBATCH_NONE) call->microbatch = te__quant_of(m->te)->is_first_microbatch;
    if (result == TE_OK) call->weight = te__product_weight(m, &s->params);
    call->save_original_input = s->desc.save_original_input;
    return result;
}
static te_result te__linear_end(te_module *m, te_forward_args *args, te__linear_call *call, te_tensor *bias) {
    const te__linear_module *s = (const te__linear_module *)m->state;
    te_result result = te__output(m, args, te__linear_biased(call, bias, s->desc.gemm.return_bias));
    if (s->desc.gemm.return_bias) args->outputs.bias = bias;
    return result;
}
/* Runs a Linear on an input without memory. With sequence parallelism, the output has the number of rows that there are
 * after the all-gather or the reduce-scatter. */
static te_result te__linear_shape(te_module *m, te_forward_args *args) {
    const te_linear_desc *d = &((const te__linear_module *)m->state)->desc;
    const te_parallel_mode mode = m->parallel.size > 1 ? d->parallel.parallel_mode : TE_PARALLEL_NONE;
    int64_t in = mode == TE_PARALLEL_ROW ? te__per_rank(m, d->in_features) : d->in_features,
            rows = args->input->ndim > 1 ? args->input->shape[0] : 1;
    int64_t out = mode == TE_PARALLEL_COLUMN ? te__per_rank(m, d->out_features) : d->out_features;
    te_dtype dtype = d->gemm.params_dtype ? d->gemm.params_dtype : TE_BF16;
    if (m->parallel.sequence && mode == TE_PARALLEL_COLUMN) rows *= m->parallel.size;
    if (m->parallel.sequence && mode == TE_PARALLEL_ROW) rows /= m->parallel.size;
    if (d->gemm.return_bias && !d->gemm.no_bias) args->outputs.bias = te_tensor_describe(m->te, dtype, 1, &out);
    return te__shape_forward(m, args, in, rows, out);
}
static te_result te__linear_forward(te_module *m, te_forward_args *args) {
    te_tensor *bias;
    te__quant_call quant;
    te__linear_call call;
    te_result result;
    if (te__is_unallocated(args->input)) return te__linear_shape(m, args);
    bias = te__product_bias(m, &((te__linear_module *)m->state)->params);
    result = te__linear_begin(m, args, &quant, &call);
    call.x = args->input;
    return result == TE_OK ? te__linear_end(m, args, &call, bias) : result;
}
static void te__linear_destroy(te_module *m) {
    te__linear_module *s = (te__linear_module *)m->state;
    te__weight_cache_close(&s->cache);
    te__scaling_leave(s->scaling);
}
static te_result te__linear_reset(te_module *m) {
    te__linear_module *s = (te__linear_module *)m->state;
    return te__product_reset(m, &s->params, &s->desc.gemm.init, s->desc.parallel.parallel_mode, &s->sharding);
}
static const te_module_class te__linear_class = {"Linear", sizeof(te__linear_module), te__linear_forward,
                                                 te__linear_destroy, te__linear_reset};

/* Creates a Linear or a LayerNormLinear without its parameters. `sharding` lists blocks of weight rows. In a
 * column-parallel module each rank gets an equal part of each block. If `sharding` is NULL, all rows are one block. */
static te_module *te__linear_open(te_ctx *te, const char *who, const te_module_class *cls, const te_linear_desc *desc,
                                  const char *otherwise, const te__sharding *sharding) {
    te_module *m;
    te__linear_module *s;
    if (!te__layer_desc_ok(te, who, desc->in_features, desc->out_features, desc->gemm.params_dtype)) return NULL;
    m = te__module_named(te, cls, desc->name, otherwise);
    if (!m) return NULL;
    s = (te__linear_module *)m->state;
    m->has_fp8_output = m->has_fp8_grad = true;
    s->desc = *desc;
    if (sharding) s->sharding = *sharding;
    s->scaling = te__scaling_create(te, m, 1);
    if (te__parallel_open(m, &desc->parallel, desc->parallel.parallel_mode)) {
        te__params_on(m, desc->gemm.device);
        te__rng_open(m, desc->gemm.rng_tracker_name);
    }
    return m;
}
/* Adds the weights and biases to m, which te__linear_open has created. Returns m or, after an error, NULL. */
static te_module *te__linear_built(te_module *m) {
    te__linear_module *s = m ? (te__linear_module *)m->state : NULL;
    if (s && m->te->error_code == TE_OK) {
        const te_linear_desc *d = &s->desc;
        te__product_open(m, &s->params, d->parallel.parallel_mode, &d->parameters_split, &d->gemm, d->out_features,
                         d->in_features, &s->sharding);
        if (d->parallel.parallel_mode == TE_PARALLEL_ROW) te__product_tag_bias(m, &s->params);
    }
    return te__module_built(m);
}
static te_module *te__linear_create(te_ctx *te, const te_linear_desc *desc, const te__sharding *sharding) {
    static const char who[] = "te_linear_create";
    return te && te__has_desc(te, desc, who)
               ? te__linear_built(te__linear_open(te, who, &te__linear_class, desc, "linear", sharding))
               : NULL;
}
TE_API te_module *te_linear_create(te_ctx *te, const te_linear_desc *desc) { return te__linear_create(te, desc, NULL); }

/* ---- LayerNorm, RMSNorm ---- */

/* Norm parameters and options, shared by the classes that contain a norm. */
typedef struct te__norm_params {
    const char *weight, *bias; /* names of the parameters */
    te_norm_options options;   /* normalization is not 0 */
    bool rounded; /* only for RMSNorm: the normalised row is rounded before it is multiplied by the weight */
} te__norm_params;

static bool te__norm_is_rms(const te__norm_params *n) { return n->options.normalization == TE_RMSNORM; }

static void te__norm_open(te_module *m, te__norm_params *n, const char *weight, const char *bias, bool rms,
                          const te_norm_options *o, te_dtype dtype, int64_t hidden) {
    if ((int)o->normalization < 0 || o->normalization > TE_RMSNORM || !(o->eps >= 0.0f && o->eps <= FLT_MAX))
        te__fail(m->te, TE_ERR_INVALID,
                 "%s: norm.normalization is %d and norm.eps %g; TE_NORM_DEFAULT to TE_RMSNORM (0 to %d), and a finite "
                 "number of at least 0 (0: 1e-5), are possible",
                 m->cls->name, (int)o->normalization, (double)o->eps, (int)TE_RMSNORM);
    n->weight = weight;
    n->bias = bias;
    n->options = *o;
    n->options.normalization = rms ? TE_RMSNORM : TE_LAYERNORM;
    te__add_weight(m, weight, dtype, hidden, 0);
    if (!rms) te__add_weight(m, bias, dtype, hidden, 0);
    if (m->parallel.sequence) { /* each rank normalises its own rows, so gradients must be summed over the ranks */
        te_tensor_set_sequence_parallel(te_module_parameter(m, weight), true);
        if (!rms) te_tensor_set_sequence_parallel(te_module_parameter(m, bias), true);
    }
}
static te_result te__norm_reset(te_module *m, const te__norm_params *n) {
    te_result result = te_tensor_fill(te_module_parameter(m, n->weight), n->options.zero_centered_gamma ? 0.0 : 1.0);
    if (result == TE_OK && !te__norm_is_rms(n)) result = te_tensor_fill(te_module_parameter(m, n->bias), 0.0);
    return result;
}
static te_tensor *te__norm_run(te_module *m, const te__norm_params *n, te_tensor *x, const te__quant_spec *spec) {
    return te__norm(x, te_module_parameter(m, n->weight),
                    te__norm_is_rms(n) ? NULL : te_module_parameter(m, n->bias), &n->options, n->rounded, spec);
}

/* Runs the norm. If te_quant_inspect is on and the result is quantized, also inspects the result and its unquantized
 * form. */
static te_tensor *te__norm_run_for(te_module *m, const te__norm_params *n, te_tensor *x, const te__quant_spec *spec,
                                   const te__quant_call *q, int gemm) {
    te_tensor *y = te__norm_run(m, n, x, spec), *plain;
    if (!y || !spec || !te__quant_of(y->te)->inspecting) return y;
    y->te->tape.no_grad++;
    plain = te__norm_run(m, n, x, NULL);
    if (plain) te__inspect(q->scaling, gemm, TE_TENSOR_INPUT, plain, y);
    y->te->tape.no_grad--;
    return y;
}
static te_tensor *te__activate_for(te_tensor *x, te_activation activation, const te_activation_params *params,
                                   const te__quant_spec *spec, const te__act_grad *grad, const te__quant_call *q,
                                   int gemm) {
    te_tensor *y = te__activate(x, activation, params, spec, grad), *plain;
    if (!y || !spec || !te__quant_of(y->te)->inspecting) return y;
    y->te->tape.no_grad++;
    plain = te__activate(x, activation, params, NULL, NULL);
    if (plain) te__inspect(q->scaling, gemm, TE_TENSOR_INPUT, plain, y);
    y->te->tape.no_grad--;
    return y;
}

/* Returns how the activation after GEMM `c` writes its gradient dx, which is the gradient of the GEMM's output.
 * LayerNormMLP (`ops` false) and te.ops (`ops` true) round dx at different points, as in TransformerEngine
 * (module/layernorm_mlp.py, ops/basic/activation.py and ops/fused/backward_activation_bias.py).
 * - LayerNormMLP, delayed scaling, no gated activation: dbias and the codes come from dx in f32.
 * - LayerNormMLP, MXFP8, no gated activation: dbias comes from dx in f32, the codes from the rounded dx.
 * - LayerNormMLP, all other cases: dx is rounded first.
 * - te.ops (activation.cpp, bias.cpp), if the activation is GELU or ReLU, or if the GEMM has no bias: the amax comes
 *   from dx in f32. Under delayed scaling, the codes come from dx in f32, too. Under MXFP8, the codes come from the
 *   rounded dx. If the GEMM has a bias, then under both recipes dbias comes from dx in f32.
 * - te.ops, all other cases: dx is rounded first. */
static te__act_grad te__act_grad_of(const te__linear_call *c, te_activation activation, bool ops) {
    const te_recipe *r = &c->quant->recipe;
    bool whole = te__recipe_class_of(r)->facts & TE__ACT_IN_ONE_KERNEL;
    bool fused =
        ops ? !c->bias || te__activation_row_of(activation)->one_kernel : whole && !te_activation_is_gated(activation);
    te__act_grad grad = TE_ZERO;
    grad.bias = c->bias;
    grad.gemm = c->gemm;
    grad.usage = (te__wants_grad(c->x) ? TE_ROWWISE : 0) | (te__wants_grad(c->weight) ? TE_COLUMNWISE : 0);
    if (grad.usage && te__fuses(c->quant, true, TE__SLOT_GRAD_OUTPUT)) grad.quant = c->quant;
    if (fused && c->quant->enabled && !r->backward_override)
        grad.rounding = whole ? TE__ACT_UNROUNDED : TE__ACT_UNROUNDED_AMAX;
    return grad;
}

/* Returns c->x, the output of the norm. If `gathered` is true, first gathers the rows of c->x from all ranks. */
static te_tensor *te__norm_returned(te__linear_call *c, bool gathered) {
    if (gathered && te__gathers(&c->parallel, TE_PARALLEL_COLUMN)) {
        c->x = te__gather_rows(&c->parallel, c->x);
        c->parallel.mode = TE_PARALLEL_NONE; /* the GEMM must not gather the rows again */
    }
    return c->x;
}

/* Notes the norm of x in *late and returns its output, which has no numbers yet. Returns NULL, and notes nothing, if
 * the norm is to run at once: if it is recorded, has more rows than products take on their way, or is refused. */
static te_tensor *te__norm_notes(te_module *m, const te__norm_params *n, te_tensor *x, te__late_norm *late) {
    te_tensor *gamma = te_module_parameter(m, n->weight),
              *beta = te__norm_is_rms(n) ? NULL : te_module_parameter(m, n->bias), *y;
    if (!late || te__grad_will_be(m->te) || te__functions_of(m->te)->any_rows || !x || !gamma || !x->buffer ||
        !gamma->buffer || (beta && !beta->buffer) || gamma->moves || (beta && beta->moves) || x->quantized ||
        !te__is_float(x->dtype) || x->te != m->te || x->ndim < 1 || !te__is_contiguous(x) || te__numel(x) == 0 ||
        te__rows(x) > TE__GEMM_QUANTIZE_ROWS || te__numel(gamma) != te__cols(x))
        return NULL;
    y = te__empty_like(x, x->dtype);
    if (!y) return NULL;
    late->y = te_tensor_retain(y);
    late->x = te_tensor_retain(x);
    late->gamma = te_tensor_retain(gamma);
    late->beta = te_tensor_retain(beta);
    late->options = n->options;
    late->rounded = n->rounded;
    return y;
}
static te_result te__norm_forward(te_module *m, te_forward_args *args) {
    te__late_norm *late = te__functions_of(m->te)->late;
    te_tensor *y;
    int64_t columns = te__numel(te_module_parameter(m, "weight"));
    if (te__is_unallocated(args->input))
        return te__shape_forward(m, args, columns, args->input->ndim > 1 ? args->input->shape[0] : 1, columns);
    te__functions_of(m->te)->late = NULL;
    y = te__norm_notes(m, (const te__norm_params *)m->state, args->input, late);
    return te__output(m, args, y ? y : te__norm_run(m, (const te__norm_params *)m->state, args->input, NULL));
}
static te_result te__norm_module_reset(te_module *m) { return te__norm_reset(m, (const te__norm_params *)m->state); }
static const te_module_class te__layernorm_class = {"LayerNorm", sizeof(te__norm_params), te__norm_forward, NULL,
                                                    te__norm_module_reset};
static const te_module_class te__rmsnorm_class = {"RMSNorm", sizeof(te__norm_params), te__norm_forward, NULL,
                                                  te__norm_module_reset};

static te_module *te__norm_create(te_ctx *te, const te_norm_desc *desc, bool rms) {
    const char *who = rms ? "te_rmsnorm_create" : "te_layernorm_create";
    te_module *m;
    if (!te || !te__has_desc(te, desc, who) ||
        !te__layer_desc_ok(te, who, desc->hidden_size, desc->hidden_size, desc->params_dtype))
        return NULL;
    m = te__module_named(te, rms ? &te__rmsnorm_class : &te__layernorm_class, desc->name,
                         rms ? "rmsnorm" : "layernorm");
    if (!m) return NULL;
    te__params_on(m, desc->device);
    m->parallel.sequence = desc->parallel.sequence_parallel; /* only marks the parameters (te_tensor_sequence_parallel):
                                                              * the norm itself needs no group of ranks */
    te__norm_open(m, (te__norm_params *)m->state, "weight", "bias", rms, &desc->norm, desc->params_dtype,
                  desc->hidden_size);
    return te__module_built(m);
}
TE_API te_module *te_layernorm_create(te_ctx *te, const te_norm_desc *desc) { return te__norm_create(te, desc, false); }
TE_API te_module *te_rmsnorm_create(te_ctx *te, const te_norm_desc *desc) { return te__norm_create(te, desc, true); }

/* ---- LayerNormLinear ---- */

typedef struct te__layernorm_linear_module {
    te__linear_module linear; /* first: a LayerNormLinear is a Linear with a norm in front */
    te__norm_params norm;
    bool returns_norm, gathers_norm; /* return_layernorm_output and ..._gathered of the desc */
} te__layernorm_linear_module;

/* Runs a LayerNormLinear. If `normed` is not NULL, sets *normed to the norm's output of this rank in high precision. */
static te_result te__layernorm_linear_run(te_module *m, te_forward_args *args, te_tensor **normed) {
    te__layernorm_linear_module *s = (te__layernorm_linear_module *)m->state;
    te_tensor *bias = te__product_bias(m, &s->linear.params), *ln_out;
    te__quant_call quant;
    te__quant_spec spec;
    te__linear_call call;
    te_result result = te__linear_begin(m, args, &quant, &call);
    if (result != TE_OK) return result;
    call.microbatch = args->is_first_microbatch; /* te_step_set_is_first_microbatch is for Linear only */
    call.x = te__norm_run_for(
        m, &s->norm, args->input,
        s->returns_norm || normed ? NULL : te__fused_norm_spec(&call, args->input, &spec), &quant, 0);
    if (normed) *normed = call.x;
    ln_out = te__norm_returned(&call, s->returns_norm && s->gathers_norm);
    result = te__linear_end(m, args, &call, bias);
    if (s->returns_norm) args->outputs.ln_out = ln_out;
    return result;
}
static te_result te__layernorm_linear_forward(te_module *m, te_forward_args *args) {
    return te__layernorm_linear_run(m, args, NULL);
}
static te_result te__layernorm_linear_reset(te_module *m) {
    te_result result = te__norm_reset(m, &((te__layernorm_linear_module *)m->state)->norm);
    return result == TE_OK ? te__linear_reset(m) : result;
}
static const te_module_class te__layernorm_linear_class = {"LayerNormLinear", sizeof(te__layernorm_linear_module),
                                                           te__layernorm_linear_forward, te__linear_destroy,
                                                           te__layernorm_linear_reset};

/* Creates a LayerNormLinear; `sharding` as for te__linear_open. */
static te_module *te__layernorm_linear_create(te_ctx *te, const te_linear_desc *desc, const te_norm_options *norm,
                                              bool returns_norm, bool gathers_norm, const te__sharding *sharding) {
    te_module *m = te__linear_open(te, "te_layernorm_linear_create", &te__layernorm_linear_class, desc,
                                   "layernorm_linear", sharding);
    if (m && te->error_code == TE_OK) {
        te__layernorm_linear_module *s = (te__layernorm_linear_module *)m->state;
        s->returns_norm = returns_norm;
        s->gathers_norm = gathers_norm;
        te__norm_open(m, &s->norm, "layer_norm_weight", "layer_norm_bias", norm->normalization == TE_RMSNORM, norm,
                      desc->gemm.params_dtype, desc->in_features);
    }
    return te__linear_built(m);
}
TE_API te_module *te_layernorm_linear_create(te_ctx *te, const te_layernorm_linear_desc *desc) {
    te_linear_desc linear = TE_ZERO;
    if (!te || !te__has_desc(te, desc, "te_layernorm_linear_create")) return NULL;
    if (desc->parallel.parallel_mode == TE_PARALLEL_ROW)
        return te__no_module(
            te, TE_ERR_INVALID,
            "te_layernorm_linear_create: parallel_mode %d (TE_PARALLEL_ROW); a norm needs whole rows: use "
            "TE_PARALLEL_COLUMN (%d)",
            (int)TE_PARALLEL_ROW, (int)TE_PARALLEL_COLUMN);
    linear.in_features = desc->in_features;
    linear.out_features = desc->out_features;
    linear.gemm = desc->gemm;
    linear.parallel = desc->parallel;
    linear.parameters_split = desc->parameters_split;
    linear.name = desc->name;
    return te__layernorm_linear_create(te, &linear, &desc->norm, desc->return_layernorm_output,
                                       desc->return_layernorm_output_gathered, NULL);
}

/* ---- Embedding ---- */

static te_result te__embedding_forward(te_module *m, te_forward_args *args) {
    const te__parallel p = te__parallel_as(m, TE_PARALLEL_COLUMN);
    te_tensor *table = te_module_parameter(m, "weight");
    if (p.size < 2) return te__output(m, args, te_embedding_lookup(table, args->input));
    if (te__parallel_ready(m) != TE_OK) return TE_ERR_STATE;
    return te__output(m, args,
                      te__sum_rows(&p, te__embedding(table, args->input,
                                                     ((const te_embedding_desc *)m->state)->num_embeddings,
                                                     table ? te__group_rank(p.group) * table->shape[0] : 0, false,
                                                     "te_embedding_lookup")));
}
static te_result te__embedding_reset(te_module *m) {
    return te__init_weight(m, te_module_parameter(m, "weight"), &((te_embedding_desc *)m->state)->init,
                           TE_PARALLEL_COLUMN, NULL);
}
static const te_module_class te__embedding_class = {"Embedding", sizeof(te_embedding_desc), te__embedding_forward, NULL,
                                                    te__embedding_reset};

TE_API te_module *te_embedding_create(te_ctx *te, const te_embedding_desc *desc) {
    te_module *m;
    if (!te || !te__has_desc(te, desc, "te_embedding_create") ||
        !te__layer_desc_ok(te, "te_embedding_create", desc->num_embeddings, desc->embedding_dim, desc->params_dtype))
        return NULL;
    m = te__module_with_desc(te, &te__embedding_class, desc, desc->name, "embedding");
    if (!m) return NULL;
    if (te__parallel_open(m, &desc->parallel, TE_PARALLEL_COLUMN) &&
        te__divides(m, "num_embeddings", desc->num_embeddings)) {
        te__params_on(m, desc->device);
        te__add_weight(m, "weight", desc->params_dtype, te__per_rank(m, desc->num_embeddings), desc->embedding_dim);
        te__split_mark(m, te_module_parameter(m, "weight"), TE_PARALLEL_COLUMN, NULL);
    }
    return te__module_built(m);
}
