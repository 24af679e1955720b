/* nn/mlp.c: the module LayerNormMLP: a norm, the GEMM fc1, an activation, and the GEMM fc2. This file must not depend
 * on attention. */

typedef struct te__layernorm_mlp_module {
    te_layernorm_mlp_desc desc;
    te__norm_params norm;
    te__sharding fc1_sharding; /* How fc1's weight is divided among ranks: as two blocks of rows for a gated activation
                                * whose halves are not interleaved, otherwise as one block. */
    te__scaling *scaling;
    te__weight_cache fc1, fc2;
} te__layernorm_mlp_module;
enum { TE__FC1 = 0, TE__FC2 = 1 }; /* indices of the GEMMs in the scaling state */

static te_parallel_mode te__mlp_mode(const te__layernorm_mlp_module *s, int gemm) {
    return !s->desc.parallel.set_parallel_mode ? TE_PARALLEL_NONE
           : gemm == TE__FC1                   ? TE_PARALLEL_COLUMN
                                               : TE_PARALLEL_ROW;
}

/* A function that returns y plus a correction, for example of LoRA's adapters, or y itself if there is none. y is the
 * output of GEMM `gemm`, and x the input of this GEMM in high precision. */
typedef te_tensor *(*te__mlp_add)(te_module *m, const te_forward_args *args, int gemm, te_tensor *x, te_tensor *y);

/* Runs a LayerNormMLP. The function `add` is called after each GEMM, unless it is NULL. */
static te_result te__layernorm_mlp_run(te_module *m, te_forward_args *args, te__mlp_add add) {
    te__layernorm_mlp_module *s = (te__layernorm_mlp_module *)m->state;
    te_tensor *fc2_bias = te__bias_of(m, "fc2_bias", s->desc.gemm.no_bias), *z, *ln_out;
    te__quant_call quant;
    te__quant_spec spec;
    te_result result = te__scaling_prepare(m, s->scaling, &quant);
    /* if true, the activation's backward pass neither computes the gradient of fc1's bias nor quantizes its result */
    bool alternate = add || s->desc.activation_params.glu_interleave_size != 0;
    te_tensor *normed, *y;
    te__linear_call fc1 =
        te__linear_call_of(m, &quant, TE__FC1, te__mlp_mode(s, TE__FC1), &s->fc1, args, &s->desc.gemm, s->scaling);
    te__linear_call fc2 =
        te__linear_call_of(m, &quant, TE__FC2, te__mlp_mode(s, TE__FC2), &s->fc2, args, &s->desc.gemm, s->scaling);
    if (result != TE_OK) return result;
    fc1.weight = te_module_parameter(m, "fc1_weight");
    fc2.weight = te_module_parameter(m, "fc2_weight");
    fc1.bias = te__bias_of(m, "fc1_bias", s->desc.gemm.no_bias);
    fc1.bias_grad_elsewhere = !alternate;
    fc2.record_alone = te__runs_again(m);
    fc1.x =
        te__norm_run_for(m, &s->norm, args->input,
                         s->desc.return_layernorm_output || add ? NULL : te__fused_norm_spec(&fc1, args->input, &spec),
                         &quant, TE__FC1);
    normed = fc1.x;
    ln_out = te__norm_returned(&fc1, s->desc.return_layernorm_output && s->desc.return_layernorm_output_gathered);
    z = te__linear(&fc1);
    if (z && add) z = add(m, args, TE__FC1, normed, z);
    fc2.act_epilogue = te__activation_row_of(s->desc.activation)->epilogue;
    if (fc2.act_epilogue && !quant.enabled && !add) { /* the backward function of fc2 computes the gradient of the
                                                       * activation, too */
        fc2.act_of = z;
        fc2.act_bias = fc1.bias;
        m->te->tape.no_grad++;
        fc2.x = te__activate(z, s->desc.activation, NULL, NULL, NULL);
        m->te->tape.no_grad--;
    } else { /* Unless `alternate` is true, the activation's backward pass computes the gradient of fc1's bias, and
              * quantizes its result if it can. */
        te__act_grad grad = te__act_grad_of(&fc1, s->desc.activation, false);
        fc2.x = te__activate_for(z, s->desc.activation, &s->desc.activation_params,
                                 add ? NULL : te__fused_act_spec(&fc2, &s->desc.activation_params, &spec),
                                 alternate ? NULL : &grad, &quant, TE__FC2);
    }
    y = te__linear_biased(&fc2, fc2_bias, s->desc.gemm.return_bias);
    result = te__output(m, args, y && add ? add(m, args, TE__FC2, fc2.x, y) : y);
    if (s->desc.gemm.return_bias) args->outputs.bias = fc2_bias;
    if (s->desc.return_layernorm_output) args->outputs.ln_out = ln_out;
    return result;
}
static te_result te__layernorm_mlp_forward(te_module *m, te_forward_args *args) {
    return te__layernorm_mlp_run(m, args, NULL);
}
static void te__layernorm_mlp_destroy(te_module *m) {
    te__layernorm_mlp_module *s = (te__layernorm_mlp_module *)m->state;
    te__weight_cache_close(&s->fc1);
    te__weight_cache_close(&s->fc2);
    te__scaling_leave(s->scaling);
}
static te_result te__layernorm_mlp_reset(te_module *m) {
    te__layernorm_mlp_module *s = (te__layernorm_mlp_module *)m->state;
    te_tensor *fc1_bias = te__bias_of(m, "fc1_bias", s->desc.gemm.no_bias),
              *fc2_bias = te__bias_of(m, "fc2_bias", s->desc.gemm.no_bias);
    te_result result = te__norm_reset(m, &s->norm);
    if (result == TE_OK)
        result = te__init_weight(m, te_module_parameter(m, "fc1_weight"), &s->desc.gemm.init, te__mlp_mode(s, TE__FC1),
                                 &s->fc1_sharding);
    if (result == TE_OK)
        result = te__init_weight(m, te_module_parameter(m, "fc2_weight"), &s->desc.output_layer_init,
                                 te__mlp_mode(s, TE__FC2), NULL);
    if (result == TE_OK && fc1_bias) result = te_tensor_fill(fc1_bias, 0.0);
    if (result == TE_OK && fc2_bias) result = te_tensor_fill(fc2_bias, 0.0);
    return result;
}
static const te_module_class te__layernorm_mlp_class = {"LayerNormMLP", sizeof(te__layernorm_mlp_module),
                                                        te__layernorm_mlp_forward, te__layernorm_mlp_destroy,
                                                        te__layernorm_mlp_reset};

static te_result te__interleave_ok(te_ctx *te, const te_layernorm_mlp_desc *desc) {
    int64_t size = desc->activation_params.glu_interleave_size;
    if (size == 0 || (size > 0 && te_activation_is_gated(desc->activation))) return TE_OK;
    return te__fail(
        te, TE_ERR_INVALID,
        "te_layernorm_mlp_create: glu_interleave_size is %lld with activation %d; a gated activation and a size "
        "above 0 are needed, or 0",
        (long long)size, (int)desc->activation);
}

TE_API te_module *te_layernorm_mlp_create(te_ctx *te, const te_layernorm_mlp_desc *desc) {
    te_module *m;
    te__layernorm_mlp_module *s;
    if (!te || !te__has_desc(te, desc, "te_layernorm_mlp_create") ||
        !te__layer_desc_ok(te, "te_layernorm_mlp_create", desc->hidden_size, desc->ffn_hidden_size,
                           desc->gemm.params_dtype))
        return NULL;
    if (desc->activation && !te__activation_known(desc->activation))
        return te__no_module(te, TE_ERR_INVALID, "te_layernorm_mlp_create: activation %d is not in te_activation",
                             (int)desc->activation);
    if (te__activation_row_of(desc->activation)->form != TE__ACT_CLAMPED &&
        (desc->activation_params.limit != 0.0f || desc->activation_params.alpha != 0.0f))
        return te__no_module(te, TE_ERR_INVALID,
                             "te_layernorm_mlp_create: activation_params limit %g and alpha %g with activation %d; "
                             "TE_CLAMPED_SWIGLU (%d) alone has them: leave both 0",
                             (double)desc->activation_params.limit, (double)desc->activation_params.alpha,
                             (int)desc->activation, (int)TE_CLAMPED_SWIGLU);
    if (te__interleave_ok(te, desc) != TE_OK) return NULL;
    m = te__module_named(te, &te__layernorm_mlp_class, desc->name, "layernorm_mlp");
    if (!m) return NULL;
    s = (te__layernorm_mlp_module *)m->state;
    s->desc = *desc;
    if (s->desc.activation == TE_ACTIVATION_DEFAULT) s->desc.activation = TE_GELU;
    m->checkpoint = desc->checkpoint;
    s->scaling = te__scaling_create(te, m, 2);
    if (te__parallel_open(m, &desc->parallel, te__mlp_mode(s, TE__FC1)) &&
        te__divides(m, "ffn_hidden_size", desc->ffn_hidden_size)) {
        int64_t ffn = te__per_rank(m, desc->ffn_hidden_size),
                fc1_rows = ffn * (te_activation_is_gated(s->desc.activation) ? 2 : 1);
        int64_t interleave = desc->activation_params.glu_interleave_size;
        if (interleave && ffn % interleave)
            te__fail(te, TE_ERR_INVALID,
                     "te_layernorm_mlp_create: glu_interleave_size is %lld and ffn_hidden_size %lld, of which each of "
                     "%d ranks has %lld; it must divide that",
                     (long long)interleave, (long long)desc->ffn_hidden_size,
                     m->parallel.size > 1 ? m->parallel.size : 1, (long long)ffn);
        if (fc1_rows != ffn && !interleave) {
            s->fc1_sharding.num_blocks = 2;
            s->fc1_sharding.block[0] = s->fc1_sharding.block[1] = desc->ffn_hidden_size;
        }
        te__params_on(m, desc->gemm.device);
        te__rng_open(m, desc->gemm.rng_tracker_name);
        te__norm_open(m, &s->norm, "layer_norm_weight", "layer_norm_bias", desc->norm.normalization == TE_RMSNORM,
                      &desc->norm, desc->gemm.params_dtype, desc->hidden_size);
        te__add_product_weight(m, "fc1_weight", desc->gemm.params_dtype, fc1_rows, desc->hidden_size);
        if (!desc->gemm.no_bias) te__add_weight(m, "fc1_bias", desc->gemm.params_dtype, fc1_rows, 0);
        te__add_product_weight(m, "fc2_weight", desc->gemm.params_dtype, desc->hidden_size, ffn);
        if (!desc->gemm.no_bias) te__add_weight(m, "fc2_bias", desc->gemm.params_dtype, desc->hidden_size, 0);
        if (m->parallel.sequence) te_tensor_set_sequence_parallel(te_module_parameter(m, "fc2_bias"), true);
        te__split_mark(m, te_module_parameter(m, "fc1_weight"), te__mlp_mode(s, TE__FC1), &s->fc1_sharding);
        te__split_mark(m, te_module_parameter(m, "fc1_bias"), te__mlp_mode(s, TE__FC1), &s->fc1_sharding);
        te__split_mark(m, te_module_parameter(m, "fc2_weight"), te__mlp_mode(s, TE__FC2), NULL);
    }
    return te__module_built(m);
}
