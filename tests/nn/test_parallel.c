/* Modules whose work ranks share: 2 and 4 ranks against one, step by step: outputs, gradients, parameters after the optimizer. Each rank computes the whole as well,
 * and compares its own part. */
#include "../dist/ranks.h"

enum { SEQ = 16, STEPS_OF = 3, GROUPS = 3 };
typedef enum shared_kind { COLUMN, ROW, NORM_COLUMN, MLP, ATTENTION, LAYER, GROUPED_COLUMN, GROUPED_ROW } shared_kind;

typedef struct shared {
    const char *name;
    shared_kind kind;
    te_dtype dtype;
    int64_t batch, hidden; /* for blocks of 128 x 128 on each of 2 ranks, or as few as MXFP8 and NVFP4 need on each of 4 */
    bool sequence;
    te_recipe recipe; /* kind NONE: high precision */
    te_activation activation;
    bool not_interleaved, rms, output_layernorm, late; /* late: the group comes after the module was made */
    bool decoder, gathered, split, checkpoint, delay;
    int64_t interleave; /* blocks of fc1's halves */
    bool on_device;     /* sizes of groups */
    bool codes;         /* fp8_output and fp8_grad */
    bool exact;       /* nothing is added up in another order before the results that `exact_of` names */
    double tolerance; /* of all others: relative, in the root of the mean square */
} shared;

/* Normal, but nothing beyond +-limit: then every slice has the same amax, as far as per-tensor scales are concerned. */
static te_result clamped(te_tensor *x, float std, float limit) {
    int64_t n = te_tensor_numel(x);
    float *v = (float *)malloc((size_t)n * sizeof(float));
    te_tensor *values = te_tensor_normal(te_tensor_ctx(x), TE_F32, 1, &n, 0, std);
    te_result r = te_tensor_to_f32(values, v);
    for (int64_t i = 0; i < n; i++) v[i] = v[i] > limit ? limit : v[i] < -limit ? -limit : v[i];
    te_tensor *clipped = te_tensor_from_f32(te_tensor_ctx(x), TE_F32, te_tensor_ndim(x), te_tensor_shape(x), v);
    free(v);
    return r == TE_OK ? te_tensor_copy(x, clipped) : r;
}
static te_result first_values(void *user, te_tensor *weight) {
    (void)user;
    return clamped(weight, 0.05f, 0.05f);
}
static te_tensor *data(te_ctx *te, const shared *c) {
    te_tensor *x = te_tensor_empty(te, c->dtype, SHAPE(SEQ, c->batch, c->hidden));
    clamped(x, 1.0f, 1.0f);
    return x;
}

static te_module *make(te_ctx *te, const shared *c, const te_parallel_options *parallel) {
    static const char *const names[] = {"first_", "second"};
    const int64_t sizes[] = {c->hidden / 4, c->hidden / 4 * 3};
    te_gemm_options gemm = {0};
    te_norm_options norm = {0};
    gemm.params_dtype = c->dtype;
    gemm.init.init_method = first_values;
    gemm.delay_wgrad_compute = c->delay;
    norm.normalization = c->rms ? TE_RMSNORM : TE_LAYERNORM;
    te_seed(te, 5);
    if (c->kind == COLUMN || c->kind == ROW) {
        te_linear_desc d = {.in_features = c->hidden, .out_features = c->hidden, .gemm = gemm, .parallel = *parallel};
        d.parallel.parallel_mode = c->kind == ROW ? TE_PARALLEL_ROW : TE_PARALLEL_COLUMN;
        if (c->split) d.parameters_split.names = names, d.parameters_split.sizes = sizes, d.parameters_split.count = 2;
        return te_linear_create(te, &d);
    }
    if (c->kind == GROUPED_COLUMN || c->kind == GROUPED_ROW) {
        te_grouped_linear_desc d = {.num_gemms = GROUPS, .in_features = c->hidden, .out_features = c->hidden, .gemm = gemm, .parallel = *parallel};
        d.parallel.parallel_mode = c->kind == GROUPED_ROW ? TE_PARALLEL_ROW : TE_PARALLEL_COLUMN;
        d.gemm.no_bias = c->kind == GROUPED_ROW;
        return te_grouped_linear_create(te, &d);
    }
    if (c->kind == NORM_COLUMN) {
        te_layernorm_linear_desc d = {.in_features = c->hidden, .out_features = c->hidden, .gemm = gemm, .norm = norm, .parallel = *parallel};
        d.parallel.parallel_mode = TE_PARALLEL_COLUMN;
        d.return_layernorm_output = d.return_layernorm_output_gathered = c->gathered;
        return te_layernorm_linear_create(te, &d);
    }
    if (c->kind == MLP) {
        te_layernorm_mlp_desc d = {.hidden_size = c->hidden, .ffn_hidden_size = c->hidden, .gemm = gemm, .norm = norm, .parallel = *parallel, .activation = c->activation, .checkpoint = c->checkpoint};
        d.activation_params.glu_interleave_size = c->interleave;
        d.output_layer_init = gemm.init;
        return te_layernorm_mlp_create(te, &d);
    }
    if (c->kind == ATTENTION) {
        te_multihead_attention_desc d = {.hidden_size = c->hidden, .gemm = gemm, .norm = norm, .parallel = *parallel, .attention.num_attention_heads = 4,
                                         .attention.no_qkv_weight_interleaved = c->not_interleaved, .input_layernorm = true};
        d.output_layer_init = gemm.init;
        return te_multihead_attention_create(te, &d);
    }
    te_transformer_layer_desc d = {.hidden_size = c->hidden, .ffn_hidden_size = c->hidden, .gemm = gemm, .norm = norm, .parallel = *parallel, .attention.num_attention_heads = 8,
                                   .attention.num_gqa_groups = 4, .activation = c->activation, .output_layernorm = c->output_layernorm};
    d.output_layer_init = gemm.init;
    if (c->decoder) {
        d.layer_type = TE_LAYER_DECODER;
        d.attention.no_fuse_qkv_params = true;
        d.attention.qk_norm_type = TE_QK_NORM_RMSNORM;
        d.apply_residual_connection_post_layernorm = true;
    }
    return te_transformer_layer_create(te, &d);
}

/* ---- comparing ---- */

static double distance(const float *got, const float *want, int64_t n) {
    double difference = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        difference += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        size += (double)want[i] * want[i];
        if (!(got[i] == got[i])) return INFINITY;
    }
    return size > 0 ? sqrt(difference / size) : difference > 0 ? INFINITY : 0;
}
static float *values_of(te_tensor *x) {
    float *v = (float *)malloc((size_t)(te_tensor_numel(x) + 1) * sizeof(float));
    te_tensor_to_f32(x, v);
    return v;
}
static void same(rank_state *s, const shared *c, const char *what, te_tensor *got, te_tensor *want, bool exact) {
    char text[256];
    if (!got || !want || te_tensor_numel(got) != te_tensor_numel(want)) {
        snprintf(text, sizeof text, "%s: %s is missing or of another size", c->name, what);
        wrong(s, text);
        return;
    }
    float *a = values_of(got), *b = values_of(want);
    double d = distance(a, b, te_tensor_numel(got));
    snprintf(text, sizeof text, "%s: %s is %g off, %s", c->name, what, d, exact ? "and must be the same" : "too far");
    if (d > (exact ? 0.0 : c->tolerance)) wrong(s, text);
    free(a), free(b);
}
/* This rank's part of x: dimension `dim`; blocks of it are divided one by one. */
static te_tensor *part_of(rank_state *s, te_tensor *x, int dim, int blocks) {
    int64_t size = te_tensor_shape(x)[dim], own = size / blocks / s->size;
    te_tensor *whole[3];
    int64_t shape[8];
    if (blocks == 1) return te_tensor_contiguous(te_tensor_narrow(x, dim, s->rank * own, own));
    for (int i = 0; i < te_tensor_ndim(x); i++) shape[i] = te_tensor_shape(x)[i];
    shape[0] = own * blocks; /* blocks are of rows */
    whole[0] = te_tensor_empty(s->te, te_tensor_dtype(x), te_tensor_ndim(x), shape);
    for (int i = 0; i < blocks; i++) te_tensor_copy(te_tensor_narrow(whole[0], 0, i * own, own), te_tensor_narrow(x, 0, i * (size / blocks) + s->rank * own, own));
    return whole[0];
}

/* This rank's columns of an output: of each parameter, where there are two. */
static te_tensor *columns_of(rank_state *s, const shared *c, te_tensor *x) {
    if (!c->split) return part_of(s, x, 2, 1);
    int64_t quarter = c->hidden / 4;
    te_tensor *part[2] = {part_of(s, te_tensor_narrow(x, 2, 0, quarter), 2, 1), part_of(s, te_tensor_narrow(x, 2, quarter, 3 * quarter), 2, 1)};
    te_tensor *y = te_tensor_empty(s->te, te_tensor_dtype(x), SHAPE(SEQ, c->batch, c->hidden / s->size));
    te_tensor_copy(te_tensor_narrow(y, 2, 0, quarter / s->size), part[0]);
    te_tensor_copy(te_tensor_narrow(y, 2, quarter / s->size, 3 * quarter / s->size), part[1]);
    return y;
}

typedef struct visit {
    rank_state *s;
    const shared *c;
    te_module *whole;
    bool gradients, exact; /* exact: of weights, whose products add up the same rows in one order */
} visit;
static te_tensor *at_path(te_module *m, const char *path) {
    char copy[256], *dot;
    snprintf(copy, sizeof copy, "%s", path);
    dot = strrchr(copy, '.');
    if (!dot) return te_module_parameter(m, copy);
    *dot = 0;
    return te_module_parameter(te_module_find(m, copy), dot + 1);
}
static bool compare_one(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    visit *v = (visit *)user;
    te_tensor *want = at_path(v->whole, path), *got = x;
    int blocks = strstr(path, "fc1") && v->c->activation == TE_SWIGLU && !v->c->interleave ? 2 : strstr(path, "qkv") && v->c->not_interleaved ? 3 : 1;
    char what[256];
    (void)m;
    if (kind != TE_ENTRY_PARAMETER) return true;
    snprintf(what, sizeof what, "%s of %s", v->gradients ? "the gradient" : "the value", path);
    if (v->gradients) want = te_tensor_grad(want), got = te_tensor_grad(got);
    te_no_grad_begin(v->s->te);
    if (want && got) {
        if (v->gradients && te_tensor_sequence_parallel(x)) te_all_reduce(v->s->group, got, TE_REDUCE_SUM);
        for (int dim = 0; dim < te_tensor_ndim(want); dim++)
            if (te_tensor_shape(want)[dim] != te_tensor_shape(got)[dim]) {
                want = part_of(v->s, want, dim, dim == 0 ? blocks : 1);
                break;
            }
    }
    same(v->s, v->c, what, got, want, v->gradients ? v->exact && te_tensor_ndim(want) == 2 : v->c->exact && v->c->tolerance == 0);
    te_no_grad_end(v->s->te);
    return true;
}
static void compare_all(rank_state *s, const shared *c, te_module *whole, te_module *own, bool gradients, bool exact) {
    visit v = {s, c, whole, gradients, exact};
    te_module_visit_tensors(own, compare_one, &v);
}

/* ---- steps ---- */

static te_tensor *leaf(te_tensor *x) { return te_tensor_set_requires_grad(te_tensor_detach(x), true); }

/* Two tensors of one forward, each with a gradient. */
static te_result give_grads(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    (void)te, (void)state, (void)dy, (void)needs;
    dx[0] = saved[0], dx[1] = saved[1];
    return TE_OK;
}
static void backward_from_both(te_ctx *te, te_tensor *const *y, te_tensor *const *grads) {
    te_tensor *end = te_tensor_zeros(te, TE_F32, SHAPE(1));
    te_node_desc node = {.name = "both", .inputs = y, .num_inputs = 2, .outputs = &end, .num_outputs = 1, .saved = grads, .num_saved = 2, .backward = give_grads};
    te_record(te, &node);
    te_backward(end);
}

static void steps(rank_state *s) {
    const shared *c = (const shared *)s->arg;
    te_ctx *te = s->te;
    static const te_symmetric_ar sums[] = {TE_SYMMETRIC_AR_NONE, TE_SYMMETRIC_AR_MULTIMEM, TE_SYMMETRIC_AR_TWO_SHOT, TE_SYMMETRIC_AR_ONE_SHOT};
    te_parallel_options parallel = {0}, alone = {0};
    te_fused_adam_desc adam = {.lr = 0.2f, .eps = 100.0f}; /* the step is nearly proportional to the gradient, so that noise is not blown up */
    te_recipe recipe = c->recipe;
    te_autocast_desc cast = {.recipe = recipe.kind ? &recipe : NULL, .disabled = recipe.kind == TE_RECIPE_NONE};
    bool grouped = c->kind == GROUPED_COLUMN || c->kind == GROUPED_ROW, by_columns = c->kind == COLUMN || c->kind == NORM_COLUMN || c->kind == GROUPED_COLUMN;
    bool shares_input = c->kind == ROW || c->kind == GROUPED_ROW;
    if (c->late) parallel.tp_size = s->size;
    else parallel.tp_group = s->group;
    parallel.set_parallel_mode = alone.set_parallel_mode = true;
    parallel.sequence_parallel = c->sequence;
    parallel.symmetric_ar_type = sums[(c->kind + c->sequence) % COUNT(sums)];
    te_scope_begin(te);
    te_module *whole = make(te, c, &alone), *own = make(te, c, &parallel);
    EXPECT(s, te_ok(te));
    if (c->late) {
        te_seed(te, 5);
        EXPECT(s, te_set_tensor_parallel_group(own, s->group) == TE_OK);
    }
    {
        shared at_first = *c;
        at_first.exact = true, at_first.tolerance = 0;
        compare_all(s, &at_first, whole, own, false, false); /* the shards are slices, to the bit */
    }
    te_optimizer *opt[2] = {te_fused_adam_create(te, whole, &adam), te_fused_adam_create(te, own, &adam)};
    const int last = test_samples() ? 2 : STEPS_OF; /* the second step has the first one's scales, and its parameters */
    for (int step = 0; step < last && te_ok(te) && !s->wrong; step++) {
        te_scope_begin(te);
        te_seed(te, 100 + (uint64_t)step);
        te_tensor *x = data(te, c), *dy = data(te, c), *mine_x = x, *mine_dy = dy, *g = data(te, c), *want_dx, *want_y;
        if (shares_input) mine_x = part_of(s, x, 2, 1);
        else if (c->sequence) mine_x = part_of(s, x, 0, 1);
        if (by_columns) mine_dy = columns_of(s, c, dy);
        else if (c->sequence) mine_dy = part_of(s, dy, 0, 1);
        te_tensor *encoder = data(te, c), *mine_encoder = c->sequence ? part_of(s, encoder, 0, 1) : encoder;
        x = leaf(x), mine_x = leaf(mine_x);
        te_forward_args args[2] = {{.input = x, .encoder_output = encoder}, {.input = mine_x, .encoder_output = mine_encoder}};
        const int64_t rows = SEQ * c->batch, splits[GROUPS] = {rows / 4, 0, rows / 4 * 3};
        te_tensor *sizes = te_tensor_from_host(te, TE_I64, SHAPE(GROUPS), splits);
        for (int i = 0; i < 2; i++) {
            if (grouped && c->on_device) args[i].m_splits_tensor = sizes;
            else if (grouped) args[i].m_splits = splits;
            args[i].fp8_output = args[i].fp8_grad = c->codes;
            te_autocast_begin(te, &cast);
            te_forward_with(i ? own : whole, &args[i]);
            args[i].outputs.out = te_dequantize(args[i].outputs.out, TE_DTYPE_NONE);
            te_autocast_end(te);
            if (c->gathered) { /* whoever uses what the norm made gives it a gradient, too */
                te_tensor *both[2] = {args[i].outputs.out, args[i].outputs.ln_out}, *grads[2] = {i ? mine_dy : dy, g};
                if (i) te_op_axpby(te, &(te_op_axpby_args){.x = g, .out = g, .alpha = 1.0f / (float)s->size}); /* of each rank's use */
                backward_from_both(te, both, grads);
            } else
                te_backward_from(args[i].outputs.out, i ? mine_dy : dy);
            if (c->delay) te_backward_dw(i ? own : whole);
            te_seed(te, 100 + (uint64_t)step);
        }
        EXPECT(s, te_ok(te));
        want_y = args[0].outputs.out, want_dx = te_tensor_grad(x);
        te_no_grad_begin(te);
        if (c->kind == GROUPED_ROW) te_all_reduce(s->group, args[1].outputs.out, TE_REDUCE_SUM); /* which is the caller's part */
        if (c->kind == GROUPED_COLUMN) te_all_reduce(s->group, te_tensor_grad(mine_x), TE_REDUCE_SUM);
        if (by_columns) want_y = columns_of(s, c, want_y);
        else if (c->sequence) want_y = part_of(s, want_y, 0, 1);
        if (shares_input) want_dx = part_of(s, want_dx, 2, 1);
        else if (c->sequence) want_dx = part_of(s, want_dx, 0, 1);
        bool first = step == 0 && c->exact; /* later parameters come from sums in another order */
        same(s, c, "the output", args[1].outputs.out, want_y, first && by_columns);
        same(s, c, "the input's gradient", te_tensor_grad(mine_x), want_dx, first && c->kind == ROW);
        if (c->gathered) same(s, c, "the norm's output", args[1].outputs.ln_out, args[0].outputs.ln_out, first);
        te_no_grad_end(te);
        /* the Hadamard transform of some columns has another amax than that of all */
        compare_all(s, c, whole, own, true, first && (c->kind == COLUMN || c->kind == ROW) && c->recipe.kind != TE_RECIPE_NVFP4);
        te_optimizer_step(opt[0]);
        te_optimizer_step(opt[1]);
        compare_all(s, c, whole, own, false, false);
        te_scope_end(te);
    }
    te_optimizer_destroy(opt[0]);
    te_optimizer_destroy(opt[1]);
    te_module_destroy(whole);
    te_module_destroy(own);
    te_scope_end(te);
}

static te_recipe delayed(void) {
    te_recipe r = te_recipe_delayed_scaling();
    r.delayed.amax_history_len = 2;
    return r;
}
/* Without random numbers, whose places in the stream are each rank's own. */
static te_recipe nvfp4(void) {
    te_recipe r = te_recipe_nvfp4();
    r.nvfp4.stochastic_rounding = TE_OFF;
    return r;
}
static te_recipe delayed_attention(void) {
    te_recipe r = delayed();
    r.fp8_mha = true;
    return r;
}
static te_recipe current_attention(void) {
    te_recipe r = te_recipe_current_scaling();
    r.fp8_dpa = true;
    return r;
}
static te_recipe (*const recipes[])(void) = {delayed, te_recipe_current_scaling, te_recipe_block_scaling, te_recipe_mxfp8, nvfp4, delayed_attention, current_attention};

/* Sums in f32 in another order: a few times 2^-24 of the terms. In bf16 each rank's part of a sum is rounded, 2^-9 each, and what follows sees that. Under a recipe such a
 * difference moves a number to the next code here and there, and a shard's weight may have another amax than the whole (TransformerEngine does not reduce those): steps of 2^-3
 * (E4M3), 2^-2 (E5M2 gradients), 2^-1 (FP4), a quarter of that in the root mean square, twice since both sides round, through up to four products. */
static double tolerance(const shared *c) {
    if (c->recipe.kind == TE_RECIPE_NVFP4) return 0.4;
    if (c->recipe.fp8_dpa || c->recipe.fp8_mha) return 0.25; /* the heads of a rank have a scale of their own: all their codes are others */
    if (c->recipe.kind) return 0.15;
    return c->dtype == TE_F32 ? 2e-5 : 2e-2;
}
static void run(shared c, int size) {
    test_case("%s, %d ranks, %s%s", c.name, size, c.recipe.kind ? te_recipe_name(c.recipe.kind) : te_dtype_name(c.dtype), c.sequence ? ", sequence" : "");
    if (!c.tolerance) c.tolerance = tolerance(&c);
    c.batch = c.recipe.kind == TE_RECIPE_BLOCK && size == 2 && c.sequence ? 16 : 4;
    c.hidden = c.recipe.kind == TE_RECIPE_BLOCK ? 256 : 128;
    run_ranks(size, steps, &c);
}

TE_TEST(parallel_products) {
    static const shared list[] = {{.name = "column", .kind = COLUMN}, {.name = "row", .kind = ROW}, {.name = "norm, column", .kind = NORM_COLUMN}};
    for (int k = 0; k < 3; k++)
        for (int sequence = 0; sequence < 2; sequence++)
            for (int size = 2; size <= 4; size += 2) {
                shared c = list[k];
                if ((k + 2 * sequence + size / 2) % test_every_sanitized(2)) continue;
                c.sequence = sequence;
                c.dtype = TE_F32;
                run(c, size);
                c.dtype = TE_BF16;
                c.exact = true; /* the parts of a bf16 sum are rounded, but what is not a sum of parts is the same */
                run(c, size);
                for (int i = k % test_every_odd(1); i < COUNT(recipes); i += test_every_odd(1)) {
                    c.recipe = recipes[i]();
                    /* 64 columns are no square of 128, and the norm's output has one amax a rank */
                    c.exact = !(c.recipe.kind == TE_RECIPE_BLOCK && size == 4);
                    run(c, size);
                }
            }
}
TE_TEST(parallel_mlp_attention_layer) {
    static const shared list[] = {{.name = "MLP", .kind = MLP}, {.name = "gated MLP", .kind = MLP, .activation = TE_SWIGLU, .rms = true},
                                  {.name = "attention", .kind = ATTENTION}, {.name = "attention, not interleaved", .kind = ATTENTION, .not_interleaved = true},
                                  {.name = "layer", .kind = LAYER, .activation = TE_SWIGLU}, {.name = "layer, late", .kind = LAYER, .output_layernorm = true, .late = true},
                                  {.name = "decoder", .kind = LAYER, .decoder = true}};
    for (size_t k = 0; k < sizeof list / sizeof *list; k++)
        for (int sequence = 0; sequence < 2; sequence++)
            for (int size = 2; size <= 4; size += 2) {
                shared c = list[k];
                if (((int)k + 2 * sequence + size / 2) % test_every_sanitized(2)) continue;
                c.sequence = sequence;
                c.dtype = TE_F32;
                run(c, size);
                if ((c.kind == ATTENTION && !c.not_interleaved) || c.decoder) continue; /* the products are those of the others */
                c.dtype = TE_BF16;
                for (int i = (int)k % test_every_sanitized(6); i < COUNT(recipes) && size == 2 + 2 * (int)(k % 2) && (sequence || c.kind == MLP); i += test_every_sanitized(6)) {
                    c.recipe = recipes[i]();
                    run(c, size);
                }
            }
}
TE_TEST(parallel_of_eight_ranks) {
    static const shared list[] = {{.name = "column", .kind = COLUMN}, {.name = "row", .kind = ROW}, {.name = "gated MLP", .kind = MLP, .activation = TE_SWIGLU, .rms = true}};
    for (int k = 0; k < COUNT(list); k += test_every_sanitized(1))
        for (int quantized = 0; quantized < 2; quantized++) {
            shared c = list[k];
            c.sequence = (k + quantized) % 2;
            c.dtype = quantized ? TE_BF16 : TE_F32;
            if (quantized) c.recipe = recipes[k]();
            run(c, 8);
        }
}
TE_TEST(parallel_with_other_options) {
    static const shared list[] = {{.name = "a norm's output gathered", .kind = NORM_COLUMN, .gathered = true, .sequence = true}, {.name = "two parameters", .kind = COLUMN, .split = true},
                                  {.name = "two parameters by row", .kind = ROW, .split = true, .sequence = true},
                                  {.name = "weight gradients later", .kind = COLUMN, .delay = true, .sequence = true},
                                  {.name = "quantized results", .kind = COLUMN, .codes = true}, {.name = "quantized results by row", .kind = ROW, .codes = true, .sequence = true},
                                  {.name = "MLP run again", .kind = MLP, .checkpoint = true, .sequence = true}, {.name = "gated MLP run again", .kind = MLP, .activation = TE_SWIGLU, .checkpoint = true},
                                  {.name = "halves that alternate", .kind = MLP, .activation = TE_SWIGLU, .interleave = 16, .sequence = true}};
    for (size_t k = 0; k < sizeof list / sizeof *list; k++)
        for (int quantized = 0; quantized < 2; quantized++) {
            shared c = list[k];
            c.dtype = quantized ? TE_BF16 : TE_F32;
            if (quantized) c.recipe = recipes[k % (sizeof recipes / sizeof *recipes)]();
            if (((int)k + quantized + 1) % test_every_sanitized(1) == 0) run(c, 4);
        }
    /* without the Hadamard transform a norm measures the amax of its result; ranks still need both copies of each block */
    for (int mlp = 0; mlp < 2; mlp++) {
        shared c = {.name = "a norm before blocks", .kind = mlp ? MLP : NORM_COLUMN, .sequence = true, .dtype = TE_BF16, .recipe = nvfp4()};
        c.recipe.nvfp4.rht = TE_OFF;
        run(c, 2);
    }
}

TE_TEST(parallel_grouped_products) {
    for (int k = 0; k < 4; k++)
        for (int size = 2; size <= 4; size += 2) {
            shared c = {.name = k % 2 ? "groups by row" : "groups by column", .kind = k % 2 ? GROUPED_ROW : GROUPED_COLUMN, .on_device = k / 2, .late = k == 3, .dtype = TE_F32};
            if ((k + size / 2) % test_every_sanitized(1)) continue;
            run(c, size);
            c.dtype = TE_BF16;
            for (int i = k % test_every_sanitized(2); i < COUNT(recipes); i += test_every_sanitized(2)) {
                c.recipe = recipes[i]();
                run(c, size);
            }
        }
}

/* Ranks on the device itself: its products add up in an order of their own for each size, in TF32. */
TE_TEST_DEVICES(parallel_on_devices) {
    static const shared_kind kinds[] = {COLUMN, ROW, MLP, LAYER};
    for (int k = 0; k < COUNT(kinds); k++)
        for (int i = -1; i < (int)(sizeof recipes / sizeof *recipes); i++) {
            if ((k + i + 1) % test_every_sanitized(3)) continue;
            shared c = {.name = "on the device", .kind = kinds[k], .sequence = true, .dtype = i < 0 ? TE_F32 : TE_BF16, .batch = 16, .hidden = 256};
            if (i >= 0) c.recipe = recipes[i]();
            if (c.recipe.kind != TE_RECIPE_BLOCK) c.batch = 4, c.hidden = 128;
            if (c.kind == LAYER && i >= 0 && !te_ctx_is_cuda(te)) continue; /* above */
            c.tolerance = i < 0 && te_ctx_is_cuda(te) ? 4e-3 : tolerance(&c);
            test_case("%d, %s", k, i < 0 ? "f32" : te_recipe_name(c.recipe.kind));
            run_ranks_on(te_ctx_is_cuda(te) ? "cuda:0" : "cpu", false, 2, steps, &c);
        }
}

/* ---- exchanges beside products ---- */

/* A module whose exchanges run beside its products, and the same one without that: one rank has both. */
typedef struct beside {
    shared of;
    te_parallel_options options; /* ub_... */
} beside;
static void same_bits(rank_state *s, const shared *c, const char *what, te_tensor *got, te_tensor *want) {
    if (got || want) same(s, c, what, got, want, true);
}
static bool same_gradient(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    visit *v = (visit *)user;
    (void)m;
    if (kind == TE_ENTRY_PARAMETER) same_bits(v->s, v->c, path, te_tensor_grad(x), te_tensor_grad(at_path(v->whole, path)));
    return true;
}
/* The bytes that this rank has sent for gathers and for sums of tensors, the amaxes of recipes apart. */
typedef struct sent {
    uint64_t gathered, summed, passed;
} sent;
static sent sent_since(te_group *g) {
    const te_group_stats n = te_group_get_stats(g);
    te_group_reset_stats(g);
    return (sent){n.all_gather.bytes, n.reduce_scatter.bytes + n.all_reduce.bytes, n.all_to_all.bytes};
}
static void steps_beside(rank_state *s) {
    const beside *b = (const beside *)s->arg;
    const shared *c = &b->of;
    te_ctx *te = s->te;
    te_recipe recipe = c->recipe;
    te_autocast_desc cast = {.recipe = recipe.kind ? &recipe : NULL, .disabled = recipe.kind == TE_RECIPE_NONE};
    te_parallel_options plain = {.tp_group = s->group, .set_parallel_mode = true, .sequence_parallel = c->sequence}, options = b->options;
    options.tp_group = s->group, options.set_parallel_mode = true, options.sequence_parallel = c->sequence;
    te_module *m[2] = {make(te, c, &plain), make(te, c, &options)};
    EXPECT(s, te_ok(te));
    for (int step = 0; step < 2 && te_ok(te) && !s->wrong; step++) { /* delayed scaling: the second step has the first one's scales */
        te_scope_begin(te);
        te_seed(te, 100 + (uint64_t)step);
        const bool by_columns = c->kind == COLUMN || c->kind == NORM_COLUMN;
        te_tensor *x = data(te, c), *dy = data(te, c), *in[2], *y[2];
        sent forward[2], backward[2];
        x = c->kind == ROW ? part_of(s, x, 2, 1) : c->sequence ? part_of(s, x, 0, 1) : x;
        dy = by_columns ? part_of(s, dy, 2, 1) : c->sequence ? part_of(s, dy, 0, 1) : dy;
        for (int i = 0; i < 2; i++) {
            te_forward_args args = {.input = in[i] = leaf(x), .fp8_grad = c->codes};
            te_autocast_begin(te, &cast);
            if (step == 0) te_barrier(s->group);
            te_group_reset_stats(s->group);
            te_forward_with(m[i], &args);
            te_autocast_end(te);
            forward[i] = sent_since(s->group);
            y[i] = args.outputs.out;
            te_backward_from(y[i], dy);
            if (c->delay) te_backward_dw(m[i]);
            backward[i] = sent_since(s->group);
        }
        EXPECT(s, te_ok(te));
        te_no_grad_begin(te);
        same_bits(s, c, "the output", y[1], y[0]);
        same_bits(s, c, "the input's gradient", te_tensor_grad(in[1]), te_tensor_grad(in[0]));
        visit v = {.s = s, .c = c, .whole = m[0]};
        te_module_visit_tensors(m[1], same_gradient, &v);
        te_no_grad_end(te);
        /* As much goes, but as pieces; the first call of each module compares texts as well. */
        if (step) {
            const uint64_t gathers = forward[0].gathered, sums = forward[0].summed;
            EXPECT(s, forward[0].passed == 0 && backward[0].passed == 0);
            EXPECT(s, forward[1].gathered + forward[1].passed + forward[1].summed == gathers + sums);
            EXPECT(s, backward[1].gathered + backward[1].passed + backward[1].summed == backward[0].gathered + backward[0].summed);
            if (c->sequence && b->options.ub_overlap_ag && (c->kind == COLUMN || c->kind == NORM_COLUMN)) EXPECT(s, forward[1].gathered == 0 && forward[1].passed == gathers);
            if (c->sequence && b->options.ub_overlap_rs && c->kind == ROW) EXPECT(s, forward[1].passed > 0 && forward[1].summed < 256);
            if (c->sequence && b->options.ub_overlap_ag && c->kind == ROW) EXPECT(s, backward[1].passed > 0);
            if (c->sequence && b->options.ub_overlap_rs_dgrad && c->kind == COLUMN) EXPECT(s, backward[1].passed > 0 && backward[1].summed < 256);
        }
        te_module_zero_grad(m[0]);
        te_module_zero_grad(m[1]);
        te_scope_end(te);
    }
    te_module_destroy(m[0]);
    te_module_destroy(m[1]);
}
static void run_beside(beside b, int size) {
    const te_parallel_options *o = &b.options;
    shared *c = &b.of;
    test_case("%s, %d ranks, %s%s, ub_%s%s%s%s%s", c->name, size, c->recipe.kind ? te_recipe_name(c->recipe.kind) : te_dtype_name(c->dtype), c->sequence ? ", sequence" : "",
              o->ub_overlap_ag ? " ag" : "", o->ub_overlap_rs ? " rs" : "", o->ub_overlap_rs_dgrad ? " rs_dgrad" : "", o->ub_bulk_dgrad ? " bulk_dgrad" : "", o->ub_bulk_wgrad ? " bulk_wgrad" : "");
    c->batch = c->recipe.kind == TE_RECIPE_BLOCK ? 8 * size : 4; /* 128 rows of a rank, or padded scales */
    c->hidden = c->recipe.kind == TE_RECIPE_BLOCK ? 256 : 128;
    run_ranks(size, steps_beside, &b);
}
TE_TEST(parallel_beside_products) {
    static const shared list[] = {{.name = "column", .kind = COLUMN}, {.name = "row", .kind = ROW}, {.name = "norm, column", .kind = NORM_COLUMN}, {.name = "MLP", .kind = MLP},
                                  {.name = "gated MLP", .kind = MLP, .activation = TE_SWIGLU, .rms = true}, {.name = "column, codes", .kind = COLUMN, .codes = true},
                                  {.name = "column, weight gradients later", .kind = COLUMN, .delay = true}, {.name = "layer", .kind = LAYER}};
    static const te_parallel_options some[] = {{.ub_overlap_ag = true, .ub_overlap_rs = true, .ub_bulk_dgrad = true, .ub_bulk_wgrad = true}, {.ub_overlap_rs_dgrad = true, .ub_overlap_ag = true}};
    for (int k = 0; k < COUNT(list); k++)
        for (int i = -2; i < 5; i++)
            for (int size = 2; size <= 4; size += 2) {
                beside b = {list[k], some[(k + i + size / 2) & 1]};
                b.of.sequence = i != -2; /* ub_bulk_wgrad alone has an effect without */
                b.of.dtype = i == -1 ? TE_F32 : TE_BF16;
                if (i >= 0) b.of.recipe = recipes[i]();
                if ((k == 7 || size == 4) && k % 5 != (i + 5) % 5 && k % 5 != (i + 6) % 5) continue; /* the products are those of the others */
                if (k > 2 && i >= 0 && (k + i) % 2) continue;
                if ((k + i + 2 + size / 2) % test_every_sanitized(2)) continue;
                run_beside(b, size);
                if (k < 2) { /* the other options */
                    b.options = some[(k + i + size / 2 + 1) & 1];
                    run_beside(b, size);
                }
            }
}

/* ---- the traffic of gathers ---- */

/* Quantized rows travel as codes: with one scale a tensor 1 byte, where bf16 has 2; with blocks the scales as well. Behind a product by row each copy of a gradient's
 * blocks travels, since neither can be made of the other; so does its one copy of the input, again, behind a product by column. */
static void count_bytes(rank_state *s) {
    te_ctx *te = s->te;
    const int64_t m = 128, k = 128, own = 32, others = s->size - 1;
    const struct {
        te_recipe recipe;
        int64_t row, col; /* bytes of a rank's rows, of each copy */
    } list[] = {{{0}, m * k * 2, 0}, {delayed(), m * k, 0}, {te_recipe_current_scaling(), m * k, 0},
                {te_recipe_block_scaling(), m * k + k / 128 * m * 4, m * k + m / 128 * k * 4}, {te_recipe_mxfp8(), m * k + m * k / 32, m * k + 4 * k},
                {nvfp4(), m * k / 2 + m * k / 16, m * k / 2 + k * m / 16}}; /* MXFP8, column-wise: lines of scales come by fours, of 32 rows each */
    for (int i = 0; i < COUNT(list); i++)
        for (int row = 0; row < 2; row++) {
            te_recipe recipe = list[i].recipe;
            te_linear_desc d = {.in_features = row ? own * s->size : k, .out_features = row ? k : own * s->size, .parallel.tp_group = s->group, .parallel.sequence_parallel = true};
            d.parallel.parallel_mode = row ? TE_PARALLEL_ROW : TE_PARALLEL_COLUMN;
            te_scope_begin(te);
            te_module *linear = te_linear_create(te, &d);
            te_tensor *x = leaf(te_tensor_normal(te, TE_BF16, SHAPE(row ? m * s->size : m, row ? own : k), 0, 1));
            te_tensor *dy = te_tensor_normal(te, TE_BF16, SHAPE(row ? m : m * s->size, row ? k : own), 0, 1);
            for (int step = 0; step < 2; step++) {
                te_autocast_begin(te, &(te_autocast_desc){.recipe = i ? &recipe : NULL, .disabled = !i});
                te_group_reset_stats(s->group);
                te_tensor *y = te_forward(linear, x);
                te_autocast_end(te);
                const te_group_stats forward = te_group_get_stats(s->group);
                te_group_reset_stats(s->group);
                te_backward_from(y, dy);
                const te_group_stats backward = te_group_get_stats(s->group);
                EXPECT(s, te_ok(te));
                if (!step) continue; /* the module's first call compares texts */
                const int64_t again = list[i].col ? list[i].col : list[i].row, both = list[i].row + list[i].col;
                const uint64_t want_forward = (uint64_t)(row ? 0 : others * list[i].row), want_backward = (uint64_t)(others * (row ? both : again));
                char text[160];
                snprintf(text, sizeof text, "recipe %s, by %s: gathered %llu and %llu bytes, not %llu and %llu", te_recipe_name(recipe.kind), row ? "row" : "column",
                         (unsigned long long)forward.all_gather.bytes, (unsigned long long)backward.all_gather.bytes, (unsigned long long)want_forward, (unsigned long long)want_backward);
                if (forward.all_gather.bytes != want_forward || backward.all_gather.bytes != want_backward) wrong(s, text);
                EXPECT(s, (row ? forward : backward).reduce_scatter.bytes == (uint64_t)(others * m * k * 2));
            }
            te_module_destroy(linear);
            te_scope_end(te);
        }
}
TE_TEST(parallel_bytes_of_gathers) {
    for (int size = 2; size <= (test_samples() ? 2 : 4); size += 2) {
        test_case("%d ranks", size);
        run_ranks(size, count_bytes, NULL);
    }
}

/* ---- a vocabulary that ranks share ---- */

/* Embedding, head and loss: each rank has some rows of the table and of the head's weight. */
static void share_vocabulary(rank_state *s) {
    enum { VOCAB = 64, HIDDEN = 32, TOKENS = 24 };
    const te_dtype dtype = *(const te_dtype *)s->arg;
    te_ctx *te = s->te;
    const double f32 = te_ctx_is_cuda(te) ? 4e-3 : 2e-5; /* as tolerance() and parallel_on_devices say */
    const shared c = {.name = "vocabulary", .tolerance = dtype == TE_F32 ? f32 : 2e-2};
    const int64_t own = VOCAB / s->size;
    int32_t ids[TOKENS], targets[TOKENS];
    for (int i = 0; i < TOKENS; i++) ids[i] = i * 29 % VOCAB, targets[i] = i % 5 == 1 ? -100 : i * 13 % VOCAB;
    te_seed(te, 5);
    te_tensor *table = te_tensor_normal(te, dtype, SHAPE(VOCAB, HIDDEN), 0, 1), *head = te_tensor_normal(te, dtype, SHAPE(VOCAB, HIDDEN), 0, 0.3f);
    te_tensor *id = te_tensor_from_host(te, TE_I32, SHAPE(TOKENS), ids), *target = te_tensor_from_host(te, TE_I32, SHAPE(TOKENS), targets);
    te_tensor *own_table = leaf(part_of(s, table, 0, 1)), *own_head = part_of(s, head, 0, 1), *hidden[2], *loss[2];
    table = leaf(table), head = leaf(head);
    hidden[0] = te_embedding_lookup(table, id);
    loss[0] = te_cross_entropy(te_linear(hidden[0], head, NULL), target, NULL);
    te_backward(loss[0]);
    te_linear_desc d = {.in_features = HIDDEN, .out_features = VOCAB, .gemm = {.no_bias = true, .params_dtype = dtype}, .parallel = {.tp_group = s->group, .parallel_mode = TE_PARALLEL_COLUMN}};
    te_module *m = te_linear_create(te, &d);
    te_no_grad_begin(te);
    EXPECT(s, te_tensor_copy(te_module_parameter(m, "weight"), own_head) == TE_OK);
    te_no_grad_end(te);
    hidden[1] = te_vocab_parallel_embedding_lookup(own_table, id, VOCAB, s->rank * own);
    EXPECT(s, te_all_reduce(s->group, hidden[1], TE_REDUCE_SUM) == TE_OK);
    loss[1] = te_cross_entropy(te_forward(m, hidden[1]), target, &(te_cross_entropy_desc){.dist_process_group = s->group});
    te_backward(loss[1]);
    EXPECT(s, te_ok(te));
    te_no_grad_begin(te);
    same(s, &c, "what the ids look up", hidden[1], hidden[0], true);
    same(s, &c, "the loss", loss[1], loss[0], false);
    same(s, &c, "the head's gradient", te_tensor_grad(te_module_parameter(m, "weight")), part_of(s, te_tensor_grad(head), 0, 1), false);
    same(s, &c, "the table's gradient", te_tensor_grad(own_table), part_of(s, te_tensor_grad(table), 0, 1), false);
    te_no_grad_end(te);
    te_module_destroy(m);
}
TE_TEST_DEVICES(parallel_vocabulary) {
    static const te_dtype dtypes[] = {TE_F32, TE_BF16};
    for (int i = 0; i < 4; i++) {
        test_case("%d ranks, %s", 2 + i / 2 * 2, te_dtype_name(dtypes[i % 2]));
        run_ranks_on(te_ctx_device(te), false, 2 + i / 2 * 2, share_vocabulary, &dtypes[i % 2]);
    }
}

/* ---- refusals ---- */

static void refused(rank_state *s, te_result code, const char *words) {
    char text[512];
    if (te_error_code(s->te) != code || !strstr(te_error(s->te), words)) {
        snprintf(text, sizeof text, "%s: not \"%s\"", te_result_name(te_error_code(s->te)), words);
        wrong(s, text);
    }
    te_clear_error(s->te);
}
static void refusals(rank_state *s) {
    te_ctx *te = s->te;
    te_linear_desc d = {.in_features = 32, .out_features = 33, .parallel.tp_group = s->group, .parallel.parallel_mode = TE_PARALLEL_COLUMN};
    EXPECT(s, !te_linear_create(te, &d));
    refused(s, TE_ERR_INVALID, "out_features is 33 and tp_size 2");
    d.out_features = 32;
    d.parallel.tp_size = 4;
    EXPECT(s, !te_linear_create(te, &d));
    refused(s, TE_ERR_INVALID, "tp_size 4 and a tp_group of 2 ranks");
    d.parallel.tp_size = 0, d.parallel.parallel_mode = (te_parallel_mode)3;
    EXPECT(s, !te_linear_create(te, &d));
    refused(s, TE_ERR_INVALID, "parallel_mode 3");
    te_layernorm_linear_desc l = {.in_features = 32, .out_features = 32, .parallel.tp_group = s->group, .parallel.parallel_mode = TE_PARALLEL_ROW};
    EXPECT(s, !te_layernorm_linear_create(te, &l));
    refused(s, TE_ERR_INVALID, "parallel_mode 2");
    te_multihead_attention_desc a = {.hidden_size = 48, .attention.num_attention_heads = 3, .parallel.tp_group = s->group, .parallel.set_parallel_mode = true};
    EXPECT(s, !te_multihead_attention_create(te, &a));
    refused(s, TE_ERR_INVALID, "num_attention_heads is 3 and tp_size 2");
    te_grouped_linear_desc g = {.num_gemms = 2, .in_features = 32, .out_features = 32, .parallel.tp_group = s->group, .parallel.parallel_mode = TE_PARALLEL_ROW};
    EXPECT(s, !te_grouped_linear_create(te, &g));
    refused(s, TE_ERR_INVALID, "by row) over 2 ranks, and a bias");
    g.gemm.no_bias = true, g.in_features = 33;
    EXPECT(s, !te_grouped_linear_create(te, &g));
    refused(s, TE_ERR_INVALID, "in_features is 33 and tp_size 2");
    g.in_features = 32, g.gemm.no_bias = false, g.gemm.return_bias = true, g.parallel.sequence_parallel = true;
    te_module *returned = te_grouped_linear_create(te, &g);
    EXPECT(s, returned && te_tensor_sequence_parallel(te_module_parameter(returned, "bias1")) && te_tensor_shape(te_module_parameter(returned, "weight1"))[1] == 16);
    te_module_destroy(returned);
    /* a group that comes later */
    te_linear_desc late = {.in_features = 32, .out_features = 32, .parallel.tp_size = 4, .parallel.parallel_mode = TE_PARALLEL_COLUMN, .parallel.sequence_parallel = true};
    te_module *m = te_linear_create(te, &late);
    te_tensor *x = te_tensor_zeros(te, TE_BF16, SHAPE(3, 32));
    EXPECT(s, m && !te_forward(m, x));
    refused(s, TE_ERR_STATE, "call te_set_tensor_parallel_group");
    EXPECT(s, te_set_tensor_parallel_group(m, s->group) == TE_ERR_INVALID);
    refused(s, TE_ERR_INVALID, "tp_size 4 and the group has 2 ranks");
    te_module_destroy(m);
    /* scales that ranks do not share */
    late.parallel.tp_size = 2;
    m = te_linear_create(te, &late);
    EXPECT(s, te_set_tensor_parallel_group(m, s->group) == TE_OK);
    te_recipe r = te_recipe_delayed_scaling();
    r.delayed.no_reduce_amax = true;
    te_autocast_begin(te, &(te_autocast_desc){.recipe = &r});
    EXPECT(s, !te_forward(m, x));
    refused(s, TE_ERR_INVALID, "no_reduce_amax");
    te_autocast_end(te);
    te_module_destroy(m);
    /* rows that ranks cannot share */
    te_linear_desc row = {.in_features = 32, .out_features = 32, .parallel.tp_group = s->group, .parallel.parallel_mode = TE_PARALLEL_ROW, .parallel.sequence_parallel = true};
    m = te_linear_create(te, &row);
    EXPECT(s, !te_forward(m, te_tensor_zeros(te, TE_BF16, SHAPE(3, 16))));
    refused(s, TE_ERR_SHAPE, "[3, 32], and 2 ranks share its first dimension");
    EXPECT(s, te_tensor_sequence_parallel(te_module_parameter(m, "bias")) && !te_tensor_sequence_parallel(te_module_parameter(m, "weight")));
    te_module_destroy(m);
}
TE_TEST(parallel_refusals) { run_ranks(2, refusals, NULL); }

/* ---- want of memory ---- */
/* One rank runs out of memory on its way through a step: nobody waits for it, and all have failed, or none. */
typedef struct starving {
    shared_kind kind;
    bool sequence, quantized;
    int request;
} starving;
static void starve_step(rank_state *s) {
    const starving *arg = (const starving *)s->arg;
    te_ctx *te = s->te;
    te_recipe recipe = te_recipe_current_scaling();
    te_linear_desc d = {.in_features = 32, .out_features = 32, .parallel.tp_group = s->group, .parallel.sequence_parallel = arg->sequence};
    d.parallel.parallel_mode = arg->kind == ROW ? TE_PARALLEL_ROW : TE_PARALLEL_COLUMN;
    if (arg->request % 2) { /* exchanges beside products */
        d.parallel.ub_overlap_ag = d.parallel.ub_overlap_rs = d.parallel.ub_bulk_wgrad = true;
        *(arg->request % 4 == 1 ? &d.parallel.ub_overlap_rs_dgrad : &d.parallel.ub_bulk_dgrad) = true;
    }
    te_seed(te, 5);
    te_module *m = te_linear_create(te, &d);
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_normal(te, TE_BF16, SHAPE(16, arg->kind == ROW ? 16 : 32), 0, 1), true);
    EXPECT(s, te_ok(te) && te_barrier(s->group) == TE_OK);
    te_memory_trim(te);
    if (s->rank == 1) s->fail_at = s->requests + arg->request;
    te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe, .disabled = !arg->quantized});
    te_tensor *y = te_forward(m, x);
    te_autocast_end(te);
    if (y) te_backward(te_sum_all(y));
    s->fail_at = 0;
    s->failed = !te_ok(te);
    if (strstr(te_error(te), "rank 1 failed")) s->left[s->num_left++] = NULL; /* told by the rank itself, and not by its end */
    te_clear_error(te);
    te_module_destroy(m);
}
TE_TEST(parallel_with_a_rank_that_starves) {
    const int every = test_every_of(11, 4);
    for (int k = 0; k < 8; k++) {
        int refusals = 0, told = 0;
        for (int n = 1 + k % every; n < 400; n += every) {
            starving arg = {k & 1 ? ROW : COLUMN, k & 2, k & 4, n};
            rank_state *all = run_ranks(2, starve_step, &arg);
            test_case("%s%s%s, request %d", k & 1 ? "row" : "column", k & 2 ? ", sequence" : "", k & 4 ? ", quantized" : "", n);
            refusals += all[1].failed;
            told += all[0].num_left;
            if (!all[1].failed && n > 200) break;
        }
        CHECK_MSG(refusals > 10 / every && told > 0, "%d refusals, of which the rank itself told %d", refusals, told);
    }
}

/* ---- parameters of one matrix, without ranks ---- */

TE_TEST(parallel_split_parameters_alone) {
    te_ctx *te = test_context("cpu");
    const char *names[] = {"query", "key__", "value"};
    const int64_t sizes[] = {32, 16, 16};
    te_linear_desc d = {.in_features = 24, .out_features = 64, .gemm.params_dtype = TE_F32}, split = d;
    split.parameters_split.names = names, split.parameters_split.sizes = sizes, split.parameters_split.count = 3;
    te_module *one = te_linear_create(te, &d), *three = te_linear_create(te, &split);
    REQUIRE_OK(te);
    CHECK(!te_module_parameter(three, "weight") && te_module_parameter(three, "key_weight") && te_module_parameter(three, "value_bias"));
    for (int round = 0; round < 2; round++) { /* as they were made, and with one that lies elsewhere */
        te_tensor *w = te_module_parameter(one, "weight"), *b = te_module_parameter(one, "bias");
        te_tensor *x = leaf(te_tensor_normal(te, TE_F32, SHAPE(5, 24), 0, 1)), *x2 = leaf(te_tensor_detach(x)), *dy = te_tensor_normal(te, TE_F32, SHAPE(5, 64), 0, 1);
        if (round) te_module_add_parameter(three, "key_weight", te_tensor_normal(te, TE_F32, SHAPE(16, 24), 0, 1));
        te_no_grad_begin(te);
        for (int i = 0, at = 0; i < 3; at += (int)sizes[i++]) {
            const char *weights[] = {"query_weight", "key_weight", "value_weight"}, *biases[] = {"query_bias", "key_bias", "value_bias"};
            te_tensor_copy(te_tensor_narrow(w, 0, at, sizes[i]), te_module_parameter(three, weights[i]));
            te_tensor_copy(te_module_parameter(three, biases[i]), te_tensor_normal(te, TE_F32, SHAPE(sizes[i]), 0, 1));
            te_tensor_copy(te_tensor_narrow(b, 0, at, sizes[i]), te_module_parameter(three, biases[i]));
        }
        te_no_grad_end(te);
        te_tensor *y = te_forward(one, x), *y2 = te_forward(three, x2);
        te_backward_from(y, dy);
        te_backward_from(y2, dy);
        CHECK_OK(te);
        te_no_grad_begin(te);
        CHECK_BYTES("output", test_read_bytes(y2), test_read_bytes(y), 5 * 64 * 4);
        CHECK_BYTES("input's gradient", test_read_bytes(te_tensor_grad(x2)), test_read_bytes(te_tensor_grad(x)), 5 * 24 * 4);
        CHECK_BYTES("key's gradient", test_read_bytes(te_tensor_grad(te_module_parameter(three, "key_weight"))),
                    test_read_bytes(te_tensor_contiguous(te_tensor_narrow(te_tensor_grad(w), 0, 32, 16))), 16 * 24 * 4);
        CHECK_BYTES("value's bias gradient", test_read_bytes(te_tensor_grad(te_module_parameter(three, "value_bias"))),
                    test_read_bytes(te_tensor_contiguous(te_tensor_narrow(te_tensor_grad(b), 0, 48, 16))), 16 * 4);
        te_no_grad_end(te);
        te_module_zero_grad(one);
        te_module_zero_grad(three);
    }
    split.out_features = 65;
    CHECK(!te_linear_create(te, &split));
    CHECK_ERROR(te, TE_ERR_INVALID, "add up to 64 and out_features is 65");
    split.out_features = 64, names[2] = "key__";
    CHECK(!te_linear_create(te, &split));
    CHECK_ERROR(te, TE_ERR_INVALID, "part 2 is \"key__\"");
    names[2] = "value", split.gemm.fuse_wgrad_accumulation = true;
    CHECK(!te_linear_create(te, &split));
    CHECK_ERROR(te, TE_ERR_INVALID, "fuse_wgrad_accumulation");
    te_module_destroy(one);
    te_module_destroy(three);
}

/* Rank 1's input does not fit: rank 0, which waits in the module's exchange, is told. */
static void misfit(rank_state *s) {
    const int k = *(const int *)s->arg;
    te_ctx *te = s->te;
    te_parallel_options shared = {.tp_group = s->group, .set_parallel_mode = true, .sequence_parallel = k != 1, .parallel_mode = k == 1 ? TE_PARALLEL_ROW : TE_PARALLEL_COLUMN};
    te_linear_desc plain = {.in_features = k == 1 ? 16 : 8, .out_features = 8, .gemm.params_dtype = TE_F32, .parallel = shared};
    te_layernorm_linear_desc normed = {.in_features = 8, .out_features = 8, .gemm.params_dtype = TE_F32, .parallel = shared};
    te_layernorm_mlp_desc mlp = {.hidden_size = 8, .ffn_hidden_size = 8, .gemm.params_dtype = TE_F32, .parallel = shared};
    normed.return_layernorm_output = normed.return_layernorm_output_gathered = k == 4;
    te_module *m = k < 2 ? te_linear_create(te, &plain) : k == 3 ? te_layernorm_mlp_create(te, &mlp) : te_layernorm_linear_create(te, &normed);
    for (int fits = 0; fits < 2; fits++) { /* and the group goes on */
        te_tensor *y = te_forward(m, te_tensor_full(te, TE_F32, SHAPE(4, !fits && s->rank == 1 ? 9 : 8), 1));
        EXPECT(s, fits ? y && te_ok(te) : !y && strstr(te_error(te), s->rank == 1 ? "9" : "rank 1 failed"));
        te_clear_error(te);
    }
    te_module_destroy(m);
}
TE_TEST(parallel_rank_whose_input_does_not_fit_tells_the_others) {
    for (int k = 0; k < 5; k++) {
        test_case("module %d", k);
        run_ranks(2, misfit, &k);
    }
}

/* Rank 1 fails before an attention that projects queries, and then keys and values. Rank 0 hears so in the first exchange,
 * and does not come to the second one. */
static te_result fails_before(te_module *m, te_forward_args *args) {
    args->outputs.out = te_add(args->input, args->encoder_output); /* whose sizes differ */
    return te_error_code(te_module_ctx(m));
}
static void fails_before_cross(rank_state *s) {
    te_multihead_attention_desc d = {.hidden_size = 8, .attention = {.num_attention_heads = 2, .attention_type = TE_ATTENTION_CROSS}, .gemm.params_dtype = TE_F32,
                                     .parallel = {.tp_group = s->group, .set_parallel_mode = true, .sequence_parallel = true}};
    te_module *m = te_multihead_attention_create(s->te, &d);
    for (int i = 0; i < 4; i++) {
        te_forward_args args = {.input = te_tensor_full(s->te, TE_F32, SHAPE(2, 1, 8), 1), .encoder_output = te_tensor_full(s->te, TE_F32, SHAPE(3, 1, 8), 1)};
        const bool fails = i % 2 == 0;
        te_module_set_forward(m, fails && s->rank == 1 ? fails_before : NULL);
        EXPECT(s, !te_forward_with(m, &args) == fails);
        te_clear_error(s->te);
        EXPECT(s, te_barrier(s->group) == TE_OK);
    }
    te_module_destroy(m);
}
TE_TEST(parallel_rank_that_fails_before_an_attention) { run_ranks(2, fails_before_cross, NULL); }
