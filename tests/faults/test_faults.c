/* tests/faults/test_faults.c: what wrong arguments get: a first error that names what was wrong, where, and both values; nothing lost;
 * and every later call is safe.
 *
 * Which test breaks what (those of the raw operations, "complaints" and the like, are in tests/ops):
 *
 *     wrong shapes, with the module path          here; core/tensor.tensor_bad_shapes_are_named
 *     formats that do not fit                     here
 *     a tensor of another context                 here; io/safetensors.safetensors_write_refuses
 *     NULL, and calls after an error              here; faults/null (every creator), modules/tree (names, visitors); core/tensor.tensor_first_error_is_kept
 *     sizes at the end of 64 bits                 faults/null
 *     shapes without memory                       core/described
 *     the same mistake in every operation         ops/every_call
 *     parts of a module that are replaced         here
 *     calls out of order                          here; core/tape.tape_misuse_is_refused, quant/recipe.quantizer_and_autocast_misuse
 *     what recipes and quantizers refuse          faults/quant
 *     NaN and infinity in a quantizer             here; faults/quant; quant/recipe (values, scales of delayed scaling), ops/cast (every code)
 *     no driver, an old one, a broken one         faults/machine; cuda/driver (devices, errors)
 *     no NVRTC, an old one, a new one             faults/machine; sys/sys.library_search, cuda/jit.jit_without_nvrtc
 *     kernels that do not compile                 faults/machine; cuda/jit.jit_refusals
 *     out of device memory                        faults/memory (a full device), faults/machine (the driver's numbers)
 *     out of host memory                          faults/memory (every single request), train/retry (a step that is done again)
 *     a context that goes before what it made     core/context
 *     a fork                                      core/fork
 *     rounding modes, numbers flushed to zero     sys/floats
 *     a stream that ends before its memory        cuda/stream (stream_ends_first, stream_memory_is_deferred, stream_refusals)
 *     damaged cache entries                       faults/machine; cuda/cache.cache_damaged_entries (every bit), cuda/jit
 *     a cache that cannot be written              faults/machine; cuda/cache.cache_folders_that_are_not_used
 *     several processes that compile at once      faults/machine; cuda/jit.jit_in_many_processes
 *     ranks whose calls do not fit                dist/group.misfits, dist/exchange (exchanges_that_do_not_fit, messages_that_do_not_fit)
 *     ranks that abort, leave or lock             dist/exchange (groups_that_end, ranks_that_wait_for_one_another), dist/group.a_rank_leaves
 *     truncated and hostile safetensors           io/safetensors (every kind by its name); faults/files (what they may allocate, checkpoints)
 *     a checkpoint of another model               train/checkpoint.checkpoint_that_does_not_fit_changes_nothing
 *     writers that were killed, links, pipes      sys/writers
 *     a full disk                                 faults/machine; io/safetensors, sys/file.disk_full, cuda/cache.cache_full_disk
 *     Ctrl-C and kill -9 while training           faults/train_gpt */
#include "refused.h"

#include <limits.h>

static te_tensor *zeros_of(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape) { return te_tensor_zeros(te, dtype, ndim, shape); }
#define F32(...) zeros_of(te, TE_F32, SHAPE(__VA_ARGS__))
#define BF16(...) zeros_of(te, TE_BF16, SHAPE(__VA_ARGS__))
#define I32(...) zeros_of(te, TE_I32, SHAPE(__VA_ARGS__))

/* ---- modules --------------------------------------------------------------------------------------------------- */

static te_result first_child_forward(te_module *self, te_forward_args *args) {
    args->outputs.out = te_forward(te_module_child(self, 0), args->input);
    return te_error_code(te_module_ctx(self));
}
static const te_module_class first_child = {"FirstChild", 0, first_child_forward, NULL, NULL};

static te_tensor *attend(te_module *m, te_tensor *q, te_tensor *k, te_tensor *v) {
    te_forward_args args = {0};
    args.input = q;
    args.key = k;
    args.value = v;
    return te_forward_with(m, &args);
}

TE_TEST_DEVICES(modules_name_shapes_and_path) {
    model bystander = new_bystander(te);
    te_transformer_layer_desc layer_desc = {0};
    layer_desc.hidden_size = layer_desc.ffn_hidden_size = 16;
    layer_desc.attention.num_attention_heads = 4;
    te_module *gpt = te_module_create(te, &first_child, "gpt");
    te_module *layers = te_module_add_child(gpt, "layers", te_module_create(te, &first_child, NULL));
    te_module *layer = te_module_add_child(layers, "0", te_transformer_layer_create(te, &layer_desc));
    REFUSED(te_forward(gpt, BF16(5, 2, 15)), TE_ERR_SHAPE, "layers.0.self_attention.layernorm_qkv: ", "the input is [5, 2, 15] and the weight [16]", NULL);
    REFUSED(te_forward(gpt, BF16(5, 16)), TE_ERR_SHAPE, "layers.0.self_attention: ", "the input is [5, 16]; [s, b, h] or [b, s, h] is needed", NULL);
    REFUSED(te_forward(gpt, F32(5, 2, 16)), TE_ERR_DTYPE, "layers.0.self_attention.layernorm_qkv: ", "the input is f32 and the weight bf16",
            "params_dtype f32");
    REFUSED(te_forward(layer, BF16(2, 2, 17)), TE_ERR_SHAPE, "layers.0.self_attention.layernorm_qkv: ", "[2, 2, 17]", "[16]");
    /* the same in FP8, and under both recipes */
    for (int i = 0; i < 2; i++) {
        te_recipe recipe = i ? te_recipe_current_scaling() : te_recipe_delayed_scaling();
        te_autocast_desc cast = {0};
        cast.recipe = &recipe;
        te_autocast_begin(te, &cast);
        test_case("recipe %d", i);
        CHECK(!te_forward(gpt, BF16(5, 2, 15)));
        te_autocast_end(te);
        refused_at(__LINE__, te, &bystander, TE_ERR_SHAPE, "layers.0.self_attention.layernorm_qkv: ", "the input is [5, 2, 15] and the weight [16]", NULL);
        te_autocast_begin(te, &cast);
        CHECK(te_forward(gpt, BF16(5, 2, 16)) != NULL);
        te_autocast_end(te);
        CHECK_OK(te);
    }
    te_module_destroy(gpt);

    te_linear_desc linear_desc = {0};
    linear_desc.in_features = 4;
    linear_desc.out_features = 3;
    linear_desc.name = "head";
    te_module *linear = te_linear_create(te, &linear_desc);
    REFUSED(te_forward(linear, BF16(2, 5)), TE_ERR_SHAPE, "head: ", "the input is [2, 5] and the weight [3, 4] [out, in]", NULL);
    REFUSED(te_forward(linear, zeros_of(te, TE_BF16, 0, NULL)), TE_ERR_SHAPE, "head: ", "the input is [] and the weight [3, 4]", NULL);
    REFUSED(te_forward(linear, I32(2, 4)), TE_ERR_DTYPE, "head: ", "the input is i32; f32, f16 or bf16 is needed", NULL);
    CHECK(te_forward(linear, BF16(0, 4)) != NULL); /* nothing wrong with that */
    te_module_destroy(linear);

    te_norm_desc norm_desc = {0};
    norm_desc.hidden_size = 8;
    te_module *layernorm = te_layernorm_create(te, &norm_desc), *rmsnorm = te_rmsnorm_create(te, &norm_desc);
    REFUSED(te_forward(layernorm, BF16(2, 5)), TE_ERR_SHAPE, "layernorm: ", "the input is [2, 5] and the weight [8]", NULL);
    REFUSED(te_forward(rmsnorm, BF16(2, 5)), TE_ERR_SHAPE, "rmsnorm: ", "the input is [2, 5] and the weight [8]", NULL);
    REFUSED(te_forward(rmsnorm, I32(2, 8)), TE_ERR_DTYPE, "rmsnorm: ", "the input is i32", NULL);
    te_module_destroy(layernorm);
    te_module_destroy(rmsnorm);

    te_layernorm_mlp_desc mlp_desc = {0};
    mlp_desc.hidden_size = 8;
    mlp_desc.ffn_hidden_size = 3;
    te_module *mlp = te_layernorm_mlp_create(te, &mlp_desc);
    REFUSED(te_forward(mlp, BF16(2, 5)), TE_ERR_SHAPE, "layernorm_mlp: ", "the input is [2, 5] and the weight [8]", NULL);
    te_module_destroy(mlp);

    te_dot_product_attention_desc core_desc = {0};
    core_desc.attention.num_attention_heads = 4;
    core_desc.attention.num_gqa_groups = 2;
    core_desc.attention.kv_channels = 8;
    te_module *core = te_dot_product_attention_create(te, &core_desc);
    REFUSED(te_forward(core, BF16(2, 1, 4, 8)), TE_ERR_INVALID, "core_attention: ", "key and value are needed", NULL);
    REFUSED(attend(core, BF16(2, 1, 4, 8), BF16(2, 1, 3, 8), BF16(2, 1, 2, 8)), TE_ERR_SHAPE, "core_attention: ", "q is [2, 1, 4, 8], k [2, 1, 3, 8] and v [2, 1, 2, 8]", NULL);
    REFUSED(attend(core, BF16(2, 1, 4, 8), BF16(2, 1, 2, 8), BF16(3, 1, 2, 8)), TE_ERR_SHAPE, "core_attention: ", "v is [3, 1, 2, 8]", "[2, 1, 2, 8]");
    REFUSED(attend(core, BF16(2, 1, 4, 8), BF16(2, 3, 2, 8), BF16(2, 3, 2, 8)), TE_ERR_SHAPE, "core_attention: ", "q is [2, 1, 4, 8] and k is [2, 3, 2, 8]", NULL);
    REFUSED(attend(core, BF16(2, 1, 4, 8), BF16(2, 1, 2, 8), BF16(2, 1, 8)), TE_ERR_SHAPE, "core_attention: ", "q is [2, 1, 4, 8], k [2, 1, 2, 8], v [2, 1, 8]",
            NULL);
    te_module_destroy(core);

    te_embedding_desc embedding_desc = {0};
    embedding_desc.num_embeddings = 11;
    embedding_desc.embedding_dim = 4;
    te_module *embedding = te_embedding_create(te, &embedding_desc);
    REFUSED(te_forward(embedding, BF16(2, 5)), TE_ERR_DTYPE, "embedding: ", "ids is bf16; i32 or i64 is needed", NULL);
    REFUSED(te_forward(embedding, I32(1, 1, 1, 1, 1, 1, 1, 1)), TE_ERR_SHAPE, "embedding: ", "[11, 4]", "the ids [1, 1, 1, 1, 1, 1, 1, 1]");
    te_module_destroy(embedding);
    release_bystander(te, &bystander);
}

TE_TEST(modules_that_cannot_be_made) {
    te_ctx *te = test_context("cpu");
    model bystander = new_bystander(te);
    te_linear_desc linear = {0};
    REFUSED(te_linear_create(te, &linear), TE_ERR_INVALID, "te_linear_create: sizes 0 and 0", NULL, NULL);
    linear.in_features = 4;
    linear.out_features = -3;
    REFUSED(te_linear_create(te, &linear), TE_ERR_INVALID, "te_linear_create: sizes 4 and -3", NULL, NULL);
    linear.out_features = (int64_t)1 << 60;
    REFUSED(te_linear_create(te, &linear), TE_ERR_SHAPE, "[1152921504606846976, 4]", NULL, NULL);
    linear.out_features = 3;
    linear.gemm.params_dtype = TE_F8E4M3;
    REFUSED(te_linear_create(te, &linear), TE_ERR_DTYPE, "params_dtype e4m3; f32, f16 and bf16 are possible", NULL, NULL);
    te_norm_desc norm = {0};
    REFUSED(te_rmsnorm_create(te, &norm), TE_ERR_INVALID, "te_rmsnorm_create", NULL, NULL);
    te_layernorm_mlp_desc mlp = {0};
    mlp.hidden_size = mlp.ffn_hidden_size = 8;
    mlp.activation = (te_activation)99;
    REFUSED(te_layernorm_mlp_create(te, &mlp), TE_ERR_INVALID, "activation 99", NULL, NULL);
    te_transformer_layer_desc layer = {0};
    layer.hidden_size = layer.ffn_hidden_size = 16;
    REFUSED(te_transformer_layer_create(te, &layer), TE_ERR_INVALID, "hidden_size 16, num_attention_heads 0", NULL, NULL);
    layer.attention.num_attention_heads = 3;
    REFUSED(te_transformer_layer_create(te, &layer), TE_ERR_INVALID, "hidden_size 16, num_attention_heads 3, num_gqa_groups 3, kv_channels 0",
            "the heads must divide the hidden size", NULL);
    layer.attention.num_attention_heads = 4;
    layer.attention.num_gqa_groups = 3;
    REFUSED(te_transformer_layer_create(te, &layer), TE_ERR_INVALID, "num_attention_heads 4, num_gqa_groups 3", "the groups must divide the heads", NULL);
    layer.attention.num_gqa_groups = -4;
    REFUSED(te_transformer_layer_create(te, &layer), TE_ERR_INVALID, "num_gqa_groups -4", NULL, NULL);
    layer.attention.num_gqa_groups = 0;
    layer.ffn_hidden_size = 0; /* found when the self_attention is there already */
    REFUSED(te_transformer_layer_create(te, &layer), TE_ERR_INVALID, "te_layernorm_mlp_create: sizes 16 and 0", NULL, NULL);
    layer.ffn_hidden_size = 16;
    layer.gemm.params_dtype = TE_I32;
    REFUSED(te_transformer_layer_create(te, &layer), TE_ERR_DTYPE, "params_dtype i32", NULL, NULL);
    te_dot_product_attention_desc core = {0};
    core.attention.num_attention_heads = 4;
    REFUSED(te_dot_product_attention_create(te, &core), TE_ERR_INVALID, "4 heads of 0 channels in 4 groups", NULL, NULL);
    te_embedding_desc embedding = {0};
    embedding.num_embeddings = 5;
    REFUSED(te_embedding_create(te, &embedding), TE_ERR_INVALID, "te_embedding_create: sizes 5 and 0", NULL, NULL);
    te_module_class nothing = {0};
    REFUSED(te_module_create(te, &nothing, "x"), TE_ERR_INVALID, "a class needs a name and a forward function", NULL, NULL);
    REFUSED(te_module_create(te, NULL, "x"), TE_ERR_INVALID, "a class needs a name and a forward function", NULL, NULL);
    release_bystander(te, &bystander);
}

/* A parameter or a child in the place of another, or none: the forward takes what is there now. */
TE_TEST(modules_whose_parts_are_replaced) {
    te_ctx *te = test_context("cpu");
    model bystander = new_bystander(te);
    te_linear_desc desc = {0};
    desc.in_features = 4;
    desc.out_features = 3;
    desc.gemm.no_bias = true;
    te_module *linear = te_linear_create(te, &desc);
    te_tensor *x = te_tensor_full(te, TE_BF16, SHAPE(1, 4), 1);
    te_scope_begin(te);
    te_module_add_parameter(linear, "weight", te_tensor_full(te, TE_BF16, SHAPE(3, 4), 2));
    te_scope_end(te);
    CHECK(test_read(te_forward(linear, x))[2] == 8);
    te_scope_begin(te);
    te_module_add_parameter(linear, "weight", te_tensor_full(te, TE_BF16, SHAPE(3, 5), 2));
    te_scope_end(te);
    REFUSED(te_forward(linear, x), TE_ERR_SHAPE, "linear: ", "the input is [1, 4] and the weight [3, 5]", NULL);
    te_module_destroy(linear);

    te_transformer_layer_desc layer_desc = {0};
    layer_desc.hidden_size = layer_desc.ffn_hidden_size = 16;
    layer_desc.attention.num_attention_heads = 4;
    te_module *layer = te_transformer_layer_create(te, &layer_desc), *attention = te_module_find(layer, "self_attention");
    te_tensor *h = te_tensor_full(te, TE_BF16, SHAPE(2, 1, 16), 1);
    te_module_destroy(te_module_find(attention, "proj"));
    REFUSED(te_forward(layer, h), TE_ERR_STATE, "self_attention: MultiheadAttention: its child \"proj\" is gone", NULL, NULL);
    desc.in_features = desc.out_features = 16;
    te_module_add_child(attention, "proj", te_linear_create(te, &desc));
    CHECK(te_forward(layer, h) != NULL);
    CHECK_OK(te);
    te_module_destroy(te_module_find(layer, "layernorm_mlp"));
    REFUSED(te_forward(layer, h), TE_ERR_STATE, "TransformerLayer: its child \"layernorm_mlp\" is gone", NULL, NULL);
    te_module_destroy(layer);
    release_bystander(te, &bystander);
}

/* ---- functions ------------------------------------------------------------------------------------------------- */

TE_TEST_DEVICES(functions_name_both_shapes) {
    model bystander = new_bystander(te);
    te_tensor *x = F32(2, 3);
    REFUSED(te_linear(x, F32(4, 2), NULL), TE_ERR_SHAPE, "[2, 3]", "[4, 2]", NULL);
    REFUSED(te_linear(x, F32(4, 3), F32(3)), TE_ERR_SHAPE, "[3]", "[4, 3]", NULL);
    REFUSED(te_layernorm(x, F32(2), NULL, 0, false), TE_ERR_SHAPE, "te_layernorm: the input is [2, 3] and the weight [2]", NULL, NULL);
    REFUSED(te_layernorm(x, F32(3), F32(4), 0, false), TE_ERR_SHAPE, "te_layernorm: the input is [2, 3] and the bias [4]", NULL, NULL);
    REFUSED(te_rmsnorm(x, F32(4), 0, false), TE_ERR_SHAPE, "te_rmsnorm: the input is [2, 3] and the weight [4]", NULL, NULL);
    REFUSED(te_activate(x, TE_SWIGLU, NULL), TE_ERR_SHAPE, "te_activate: the input is [2, 3]; a gated activation needs an even last size", NULL, NULL);
    REFUSED(te_bias_dropout_add(x, F32(2), NULL, 0), TE_ERR_SHAPE, "te_bias_dropout_add: the input is [2, 3] and the bias [2]", NULL, NULL);
    REFUSED(te_bias_dropout_add(x, NULL, F32(3, 2), 0), TE_ERR_SHAPE, "[3, 2]", "[2, 3]", NULL);
    REFUSED(te_embedding_lookup(F32(2, 3, 4), I32(2)), TE_ERR_SHAPE, "the table is [2, 3, 4] and the ids [2]", NULL, NULL);
    REFUSED(te_apply_rotary_pos_emb(x, NULL, TE_SBHD), TE_ERR_SHAPE, "the input is [2, 3]; [s, b, h, d] or [b, s, h, d] is needed", NULL, NULL);
    REFUSED(te_attention(F32(2, 1, 4, 8), F32(2, 1, 4, 7), F32(2, 1, 4, 7), NULL), TE_ERR_SHAPE, "[2, 1, 4, 8]", "[2, 1, 4, 7]", NULL);
    REFUSED(te_cross_entropy(x, I32(3), NULL), TE_ERR_SHAPE, "te_cross_entropy: the logits are [2, 3] and the target is [3]", NULL, NULL);
    REFUSED(te_mse_loss(x, F32(3, 2)), TE_ERR_SHAPE, "[3, 2]", "[2, 3]", NULL);
    REFUSED(te_mean_all(F32(0)), TE_ERR_SHAPE, "te_mean_all: the tensor is empty", NULL, NULL);
    REFUSES(te_tensor_copy(x, F32(3, 2)), TE_ERR_SHAPE, "[3, 2]", "[2, 3]", NULL);
    te_tensor *w = te_tensor_set_requires_grad(F32(2, 3), true);
    REFUSES(te_backward(te_scale(w, 2)), TE_ERR_SHAPE, "te_backward: the loss is [2, 3]", NULL, NULL);
    REFUSES(te_backward_from(te_scale(w, 2), F32(3, 2)), TE_ERR_SHAPE, "the tensor is [2, 3], its gradient [3, 2]", NULL, NULL);
    REFUSES(te_tensor_set_main_grad(w, F32(3, 2)), TE_ERR_SHAPE, "main_grad is [3, 2], the tensor is [2, 3]", NULL, NULL);
    REFUSES(te_backward(x), TE_ERR_SHAPE, "te_backward: the loss is [2, 3]", NULL, NULL);
    REFUSES(te_backward(F32(1)), TE_ERR_STATE, "does not depend on anything that requires a gradient", NULL, NULL);
    release_bystander(te, &bystander);
}

TE_TEST(impossible_sizes) {
    te_ctx *te = test_context("cpu");
    model bystander = new_bystander(te);
    te_tensor *x = F32(2, 3), *one = F32(1), *none = F32(0);
    const int64_t large = (int64_t)1 << 32;
    REFUSED(te_tensor_empty(te, TE_I64, SHAPE((int64_t)1 << 58)), TE_ERR_SHAPE, "[288230376151711744]", NULL, NULL); /* 2^64 bits */
    REFUSED(te_tensor_zeros(te, TE_F32, SHAPE(large, large)), TE_ERR_SHAPE, "[4294967296, 4294967296]", NULL, NULL);
    REFUSED(te_tensor_zeros(te, TE_F32, SHAPE(0, large, large)), TE_ERR_SHAPE, "[0, 4294967296, 4294967296]", NULL, NULL);
    REFUSED(te_tensor_zeros(te, TE_F32, SHAPE(3, -1)), TE_ERR_SHAPE, "[3, -1] has a negative size", NULL, NULL);
    REFUSED(te_tensor_zeros(te, TE_F32, 9, te_tensor_shape(x)), TE_ERR_SHAPE, "9 dimensions; 0 to 8 are possible", NULL, NULL);
    REFUSED(te_tensor_zeros(te, TE_F32, -1, NULL), TE_ERR_SHAPE, "-1 dimensions", NULL, NULL);
    REFUSED(te_tensor_zeros(te, TE_F32, 2, NULL), TE_ERR_SHAPE, "with a shape", NULL, NULL);
    REFUSED(te_tensor_zeros(te, TE_DTYPE_NONE, SHAPE(2)), TE_ERR_DTYPE, "0 is not a number format", NULL, NULL);
    REFUSED(te_tensor_zeros(te, (te_dtype)-1, SHAPE(2)), TE_ERR_DTYPE, "-1 is not a number format", NULL, NULL);
    REFUSED(te_tensor_view(one, SHAPE(-1, -1)), TE_ERR_SHAPE, "[1] cannot be seen as [-1, -1]", NULL, NULL);
    REFUSED(te_tensor_view(x, SHAPE(-2, -3)), TE_ERR_SHAPE, "[2, 3] cannot be seen as [-2, -3]", NULL, NULL);
    REFUSED(te_tensor_view(none, SHAPE(large, large)), TE_ERR_SHAPE, "[0] cannot be seen as [4294967296, 4294967296]", NULL, NULL);
    REFUSED(te_tensor_view(none, SHAPE(0, -1)), TE_ERR_SHAPE, "[0] cannot be seen as [0, -1]", NULL, NULL);
    REFUSED(te_tensor_view(x, 9, te_tensor_shape(x)), TE_ERR_SHAPE, "0 to 8 dimensions", NULL, NULL);
    REFUSED(te_tensor_view(te_tensor_transpose(x, 0, 1), SHAPE(6)), TE_ERR_SHAPE, "strided: te_tensor_contiguous it first", NULL, NULL);
    REFUSED(te_tensor_narrow(x, 0, INT64_MAX, INT64_MAX), TE_ERR_SHAPE, "do not exist in [2, 3]", NULL, NULL);
    REFUSED(te_tensor_narrow(x, 0, INT64_MIN, 1), TE_ERR_SHAPE, "do not exist in [2, 3]", NULL, NULL);
    REFUSED(te_tensor_narrow(x, 0, 0, -1), TE_ERR_SHAPE, "do not exist in [2, 3]", NULL, NULL);
    REFUSED(te_tensor_narrow(x, -3, 0, 1), TE_ERR_SHAPE, "do not exist in [2, 3]", NULL, NULL);
    REFUSED(te_tensor_transpose(x, 0, 2), TE_ERR_SHAPE, "dimensions 0 and 2 do not both exist in [2, 3]", NULL, NULL);
    REFUSED(te_tensor_transpose(x, INT_MIN, 0), TE_ERR_SHAPE, "in [2, 3]", NULL, NULL);
    REFUSED(te_tensor_from_host(te, TE_F32, SHAPE(2), NULL), TE_ERR_INVALID, "host is NULL", NULL, NULL);
    REFUSED(te_tensor_from_f32(te, TE_F32, SHAPE(2), NULL), TE_ERR_INVALID, "host is NULL", NULL, NULL);
    REFUSES(te_tensor_to_host(x, NULL), TE_ERR_INVALID, "host is NULL", NULL, NULL);
    REFUSES(te_tensor_to_f32(x, NULL), TE_ERR_INVALID, "host is NULL", NULL, NULL);
    CHECK(te_tensor_from_f32(te, TE_F32, SHAPE(0), NULL) && te_tensor_to_f32(none, NULL) == TE_OK); /* there is nothing to read */
    release_bystander(te, &bystander);
}

TE_TEST_DEVICES(formats_that_do_not_fit) {
    model bystander = new_bystander(te);
    te_tensor *x = F32(2, 4), *ids = I32(2, 4), *w = te_tensor_set_requires_grad(BF16(2, 4), true);
    REFUSED(te_add(x, BF16(2, 4)), TE_ERR_DTYPE, "te_add: f32 [2, 4] and bf16 [2, 4]", NULL, NULL);
    REFUSED(te_add(ids, ids), TE_ERR_DTYPE, "te_add: the input is i32; f32, f16 or bf16 is needed", NULL, NULL);
    REFUSED(te_scale(ids, 2), TE_ERR_DTYPE, "te_scale: the input is i32", NULL, NULL);
    REFUSED(te_sum_all(ids), TE_ERR_DTYPE, "te_sum_all: the input is i32", NULL, NULL);
    REFUSED(te_linear(x, BF16(3, 4), NULL), TE_ERR_DTYPE, "the input is f32 and the weight bf16; te_tensor_cast the input", NULL, NULL);
    REFUSED(te_linear(x, F32(3, 4), I32(3)), TE_ERR_DTYPE, "bias is i32", NULL, NULL);
    REFUSED(te_rmsnorm(x, I32(4), 0, false), TE_ERR_DTYPE, "gamma is i32", NULL, NULL);
    REFUSED(te_activate(ids, TE_GELU, NULL), TE_ERR_DTYPE, "te_activate: the input is i32", NULL, NULL);
    REFUSED(te_dropout(ids, 0.5f), TE_ERR_DTYPE, "the input is i32", NULL, NULL);
    REFUSED(te_embedding_lookup(x, F32(2)), TE_ERR_DTYPE, "ids is f32; i32 or i64 is needed", NULL, NULL);
    REFUSED(te_apply_rotary_pos_emb(I32(2, 1, 2, 4), NULL, TE_SBHD), TE_ERR_DTYPE, "te_apply_rotary_pos_emb: the input is i32", NULL, NULL);
    REFUSED(te_attention(I32(2, 1, 2, 4), I32(2, 1, 2, 4), I32(2, 1, 2, 4), NULL), TE_ERR_DTYPE, "te_attention: the input is i32", NULL, NULL);
    REFUSED(te_cross_entropy(x, F32(2), NULL), TE_ERR_DTYPE, "target is f32; i32 or i64 is needed", NULL, NULL);
    REFUSED(te_cross_entropy(ids, I32(2), NULL), TE_ERR_DTYPE, "te_cross_entropy: the input is i32", NULL, NULL);
    REFUSED(te_mse_loss(x, I32(2, 4)), TE_ERR_DTYPE, "target is i32", NULL, NULL);
    REFUSED(te_tensor_cast(x, TE_I32), TE_ERR_DTYPE, "te_tensor_cast: f32 to i32", NULL, NULL);
    REFUSED(te_tensor_cast(x, TE_F8E4M3), TE_ERR_DTYPE, "te_quantize makes FP8", NULL, NULL);
    REFUSES(te_tensor_copy(x, zeros_of(te, TE_F8E4M3, SHAPE(2, 4))), TE_ERR_DTYPE, "e4m3 to f32", NULL, NULL);
    REFUSES(te_backward_from(te_scale(w, 2), F32(2, 4)), TE_ERR_DTYPE, "the tensor is bf16, its gradient f32; they must be alike", NULL, NULL);
    REFUSES(te_tensor_set_main_grad(w, I32(2, 4)), TE_ERR_DTYPE, "main_grad is i32; f32 or the tensor's own bf16 are possible", NULL, NULL);
    te_tensor_set_requires_grad(ids, true);
    refused_at(__LINE__, te, &bystander, TE_ERR_DTYPE, "a tensor of i32 has no gradient", NULL, NULL);
    CHECK(!te_tensor_requires_grad(ids));

    te_quantizer_desc desc = {0};
    desc.kind = TE_QUANT_CURRENT;
    desc.usage = TE_ROWWISE;
    te_quantizer *quantizer = te_quantizer_create(te, &desc);
    te_tensor *q = te_quantize(quantizer, x), *qw = te_quantize(quantizer, te_tensor_cast(x, TE_BF16));
    REFUSED(te_quantize(quantizer, ids), TE_ERR_DTYPE, "te_quantize: the input is i32", NULL, NULL);
    REFUSED(te_quantize(quantizer, q), TE_ERR_DTYPE, "te_quantize: the input is quantized, nominally f32", NULL, NULL);
    REFUSED(te_add(q, q), TE_ERR_DTYPE, "te_add: the input is quantized, nominally f32", NULL, NULL);
    REFUSED(te_add(x, q), TE_ERR_STATE, "is quantized: te_dequantize it first", NULL, NULL);
    REFUSED(te_tensor_view(q, SHAPE(8)), TE_ERR_SHAPE, "quantized", NULL, NULL);
    REFUSED(te_tensor_narrow(q, 0, 0, 1), TE_ERR_STATE, "[2, 4] is quantized: te_dequantize it first", NULL, NULL);
    REFUSED(te_tensor_transpose(q, 0, 1), TE_ERR_STATE, "[2, 4] is quantized: te_dequantize it first", NULL, NULL);
    REFUSES(te_tensor_to_host(q, test_alloc(100)), TE_ERR_STATE, "is quantized: te_dequantize it first", NULL, NULL);
    REFUSES(te_tensor_copy_from_host(q, test_alloc(100)), TE_ERR_STATE, "is quantized: te_dequantize it first", NULL, NULL);
    REFUSES(te_tensor_copy(q, x), TE_ERR_DTYPE, "dst is a quantized tensor; te_dequantize it", NULL, NULL);
    REFUSES(te_tensor_fill(q, 1), TE_ERR_DTYPE, "dst is a quantized tensor; te_dequantize it", NULL, NULL);
    te_tensor_set_requires_grad(q, true); /* gradients may pass through it */
    te_tensor *data, *scale;
    REFUSES(te_quantized_view(x, TE_ROWWISE, &data, &scale), TE_ERR_STATE, "the tensor is plain f32", NULL, NULL);
    REFUSES(te_quantized_view(q, TE_COLUMNWISE, &data, &scale), TE_ERR_STATE, "the column-wise copy was not made", NULL, NULL);
    /* a quantized input that lacks a copy */
    te_linear_desc linear_desc = {0};
    linear_desc.in_features = 4;
    linear_desc.out_features = 3;
    te_module *linear = te_linear_create(te, &linear_desc);
    te_recipe recipe = te_recipe_current_scaling();
    te_autocast_desc cast = {0};
    cast.recipe = &recipe;
    te_autocast_begin(te, &cast);
    REFUSED(te_forward(linear, qw), TE_ERR_STATE, "linear: ", "no column-wise copy, which the weight's gradient needs", NULL);
    te_quantizer_set_usage(quantizer, TE_COLUMNWISE);
    REFUSED(te_forward(linear, te_quantize(quantizer, BF16(2, 4))), TE_ERR_STATE, "linear: ", "no row-wise copy, which the product needs", NULL);
    te_no_grad_begin(te);
    CHECK(te_forward(linear, qw) != NULL);
    te_no_grad_end(te);
    te_autocast_end(te);
    CHECK(te_forward(linear, qw) != NULL); /* outside it is decoded */
    CHECK_OK(te);
    te_module_destroy(linear);
    te_quantizer_destroy(quantizer);
    release_bystander(te, &bystander);
}

TE_TEST_DEVICES(tensors_of_another_context) {
    model bystander = new_bystander(te);
    te_ctx *other = test_context("cpu");
    te_tensor *x = F32(2, 4), *there = te_tensor_full(other, TE_F32, SHAPE(2, 4), 1), *vector = te_tensor_full(other, TE_F32, SHAPE(4), 1);
    te_tensor *ids = te_tensor_zeros(other, TE_I32, SHAPE(2)), *q = F32(2, 1, 2, 4), *k = te_tensor_zeros(other, TE_F32, SHAPE(2, 1, 2, 4));
    te_tensor *w = te_tensor_set_requires_grad(F32(2, 4), true);
    const char *words = "a tensor of another context (cpu)";
    REFUSED(te_add(x, there), TE_ERR_INVALID, "te_add: ", words, "copy it through the host");
    REFUSED(te_linear(x, there, NULL), TE_ERR_INVALID, words, NULL, NULL);
    REFUSED(te_linear(x, F32(3, 4), vector), TE_ERR_INVALID, words, NULL, NULL);
    REFUSED(te_layernorm(x, vector, NULL, 0, false), TE_ERR_INVALID, words, NULL, NULL);
    REFUSED(te_layernorm(x, F32(4), vector, 0, false), TE_ERR_INVALID, words, NULL, NULL);
    REFUSED(te_rmsnorm(x, vector, 0, false), TE_ERR_INVALID, words, NULL, NULL);
    REFUSED(te_bias_dropout_add(x, vector, NULL, 0), TE_ERR_INVALID, words, NULL, NULL);
    REFUSED(te_bias_dropout_add(x, NULL, there, 0), TE_ERR_INVALID, words, NULL, NULL);
    REFUSED(te_embedding_lookup(x, ids), TE_ERR_INVALID, words, NULL, NULL);
    REFUSED(te_attention(q, k, q, NULL), TE_ERR_INVALID, words, NULL, NULL);
    REFUSED(te_attention(q, q, k, NULL), TE_ERR_INVALID, words, NULL, NULL);
    REFUSED(te_cross_entropy(x, ids, NULL), TE_ERR_INVALID, words, NULL, NULL);
    REFUSED(te_mse_loss(x, there), TE_ERR_INVALID, words, NULL, NULL);
    te_rotary_desc rotary = {0};
    rotary.start_positions = te_tensor_zeros(other, TE_I32, SHAPE(1));
    REFUSED(te_apply_rotary_pos_emb(q, &rotary, TE_SBHD), TE_ERR_INVALID, "another context", NULL, NULL);
    REFUSES(te_tensor_copy(x, there), TE_ERR_INVALID, "another context", NULL, NULL);
    REFUSES(te_backward_from(te_scale(w, 2), there), TE_ERR_INVALID, "another context", NULL, NULL);
    REFUSES(te_tensor_set_main_grad(w, there), TE_ERR_INVALID, "another context", NULL, NULL);
    te_node_desc node = {0};
    te_tensor *out = te_scale(x, 1);
    node.name = "mine";
    node.inputs = &there;
    node.outputs = &out;
    node.num_inputs = node.num_outputs = 1;
    REFUSES(te_record(te, &node), TE_ERR_INVALID, "te_record: mine: ", words, NULL);

    te_linear_desc desc = {0};
    desc.in_features = desc.out_features = 4;
    desc.gemm.params_dtype = TE_F32;
    te_module *linear = te_linear_create(te, &desc), *stranger = te_linear_create(other, &desc);
    REFUSED(te_forward(linear, there), TE_ERR_INVALID, words, NULL, NULL);
    REFUSED(te_module_add_buffer(linear, "mine", there), TE_ERR_INVALID, words, NULL, NULL);
    REFUSED(te_module_add_parameter(linear, "weight", there), TE_ERR_INVALID, words, NULL, NULL);
    REFUSED(te_module_add_child(linear, "child", stranger), TE_ERR_INVALID, "of another context", NULL, NULL);
    REFUSED(te_fused_adam_create(te, stranger, NULL), TE_ERR_INVALID, "module linear belongs to another context", NULL, NULL);
    REFUSES(te_model_save(te, test_path("x"), stranger, NULL, NULL, 0), TE_ERR_INVALID, "the module belongs to another context", NULL, NULL);
    REFUSES(te_model_load(te, test_path("x"), stranger, NULL), TE_ERR_INVALID, "the module belongs to another context", NULL, NULL);
    te_quantizer_desc quantizer = {0};
    quantizer.kind = TE_QUANT_DELAYED;
    quantizer.delayed.scale = te_tensor_full(other, TE_F32, SHAPE(1), 1);
    REFUSED(te_quantizer_create(te, &quantizer), TE_ERR_INVALID, "scale or amax belongs to another context", NULL, NULL);
    /* the other one has heard nothing of all this */
    CHECK_OK(other);
    CHECK(test_read(te_forward(stranger, there)) != NULL);
    CHECK_OK(other);
    te_module_destroy(linear);
    te_module_destroy(stranger);
    release_bystander(te, &bystander);
}

/* ---- out of order ---------------------------------------------------------------------------------------------- */

static te_result fails_silently(te_module *self, te_forward_args *args) {
    (void)self, (void)args;
    return TE_ERR_UNSUPPORTED;
}
static te_result makes_nothing(te_module *self, te_forward_args *args) {
    (void)self, (void)args;
    return TE_OK;
}
static te_result no_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    (void)te, (void)state, (void)saved, (void)dy, (void)dx, (void)needs;
    return TE_ERR_UNSUPPORTED;
}

TE_TEST(calls_out_of_order) {
    te_ctx *te = test_context("cpu");
    model bystander = new_bystander(te);
    /* scopes without end */
    for (int i = 0; i < 300; i++) te_scope_begin(te), F32(3);
    CHECK(te_error_code(te) == TE_ERR_STATE);
    for (int i = 0; i < 300; i++) te_scope_end(te);
    refused_at(__LINE__, te, &bystander, TE_ERR_STATE, "is a te_scope_end missing?", NULL, NULL);
    /* autocast without end */
    for (int i = 0; i < 17; i++) te_autocast_begin(te, NULL);
    CHECK(te_error_code(te) == TE_ERR_STATE);
    for (int i = 0; i < 16; i++) te_autocast_end(te);
    CHECK(!te_autocast_enabled(te));
    refused_at(__LINE__, te, &bystander, TE_ERR_STATE, "is a te_autocast_end missing?", NULL, NULL);
    REFUSES(te_warmup_end(te), TE_ERR_STATE, "te_warmup_end without te_warmup_begin", NULL, NULL);
    /* user code that fails without words, or says that it has not failed */
    static const te_module_class silent = {"Silent", 0, fails_silently, NULL, NULL}, idle = {"Idle", 0, makes_nothing, NULL, NULL};
    te_module *m = te_module_create(te, &silent, "silent"), *n = te_module_create(te, &idle, "idle");
    REFUSED(te_forward(m, F32(1)), TE_ERR_UNSUPPORTED, "silent: Silent: forward returned TE_ERR_UNSUPPORTED", NULL, NULL);
    REFUSED(te_forward(n, F32(1)), TE_ERR_STATE, "idle: Idle: forward returned TE_OK without an output", NULL, NULL);
    te_module_destroy(m);
    te_module_destroy(n);
    te_tensor *x = te_tensor_set_requires_grad(F32(1), true), *y = te_scale(te_tensor_detach(x), 2);
    te_node_desc node = {0};
    node.name = "mine";
    node.inputs = &x;
    node.outputs = &y;
    node.num_inputs = node.num_outputs = 1;
    REFUSES(te_record(te, &node), TE_ERR_INVALID, "te_record: mine has no backward function", NULL, NULL);
    node.backward = no_backward;
    CHECK(te_record(te, &node) == TE_OK);
    REFUSES(te_backward(y), TE_ERR_UNSUPPORTED, "the backward function of mine returned TE_ERR_UNSUPPORTED", NULL, NULL);
    release_bystander(te, &bystander);
}

/* ---- NULL ------------------------------------------------------------------------------------------------------ */

/* Every function that takes a handle gets none. */
static void call_with_nothing(te_ctx *te, bool pending) {
    float f;
    char text[64];
    uint64_t seed, offset;
    te_tensor *data;
    te_explanation explanation;
    CHECK(!te_add(NULL, NULL) && !te_scale(NULL, 1) && !te_sum_all(NULL) && !te_mean_all(NULL) && !te_linear(NULL, NULL, NULL));
    CHECK(!te_layernorm(NULL, NULL, NULL, 0, false) && !te_rmsnorm(NULL, NULL, 0, false) && !te_activate(NULL, TE_GELU, NULL) && !te_dropout(NULL, 0.5f));
    CHECK(!te_bias_dropout_add(NULL, NULL, NULL, 0) && !te_embedding_lookup(NULL, NULL) && !te_apply_rotary_pos_emb(NULL, NULL, TE_SBHD));
    CHECK(!te_attention(NULL, NULL, NULL, NULL) && !te_cross_entropy(NULL, NULL, NULL) && !te_mse_loss(NULL, NULL) && te_record(te, NULL) != TE_OK);
    if (te && !pending) CHECK_ERROR(te, TE_ERR_INVALID, "te_record: desc is NULL");
    CHECK(!te_tensor_set_requires_grad(NULL, true) && !te_tensor_requires_grad(NULL) && !te_tensor_grad(NULL) && !te_tensor_main_grad(NULL));
    te_tensor_zero_grad(NULL);
    CHECK(te_tensor_set_main_grad(NULL, NULL) != TE_OK && te_backward(NULL) != TE_OK && te_backward_from(NULL, NULL) != TE_OK);
    CHECK(!te_tensor_retain(NULL) && !te_tensor_view(NULL, 0, NULL) && !te_tensor_narrow(NULL, 0, 0, 0) && !te_tensor_transpose(NULL, 0, 1));
    te_tensor_release(NULL);
    CHECK(!te_tensor_contiguous(NULL) && !te_tensor_cast(NULL, TE_F32) && !te_tensor_detach(NULL) && !te_tensor_ctx(NULL));
    CHECK(te_tensor_dtype(NULL) == TE_DTYPE_NONE && te_tensor_ndim(NULL) == 0 && !te_tensor_shape(NULL) && !te_tensor_strides(NULL));
    CHECK(te_tensor_numel(NULL) == 0 && te_tensor_bytes(NULL) == 0 && !te_tensor_is_contiguous(NULL) && !te_tensor_is_quantized(NULL));
    CHECK(!te_tensor_data(NULL) && te_tensor_to_host(NULL, &f) != TE_OK && te_tensor_to_f32(NULL, &f) != TE_OK && isnan(te_tensor_item(NULL)));
    CHECK(te_tensor_copy_from_host(NULL, &f) != TE_OK && te_tensor_copy(NULL, NULL) != TE_OK && te_tensor_fill(NULL, 1) != TE_OK);
    te_tensor_touch(NULL);
    CHECK(te_tensor_version(NULL) == 0 && !te_tensor_set_name(NULL, "x") && strcmp(te_tensor_name(NULL), "") == 0);
    te_module_destroy(NULL);
    CHECK(!te_module_state(NULL) && !te_module_ctx(NULL) && !te_module_get_class(NULL) && strcmp(te_module_name(NULL), "") == 0 && !te_module_parent(NULL));
    CHECK(strcmp(te_module_path(NULL, text, sizeof text), "") == 0 && strcmp(te_module_path(NULL, NULL, 0), "") == 0);
    CHECK(!te_module_add_child(NULL, "x", NULL) && te_module_num_children(NULL) == 0 && !te_module_child(NULL, 0) && !te_module_find(NULL, "x"));
    CHECK(!te_module_add_parameter(NULL, "x", NULL) && !te_module_add_buffer(NULL, "x", NULL) && !te_module_parameter(NULL, "x"));
    CHECK(te_module_visit(NULL, NULL, NULL) && te_module_visit_tensors(NULL, NULL, NULL) && te_module_num_parameters(NULL) == 0);
    te_module_set_requires_grad(NULL, true);
    te_module_zero_grad(NULL);
    te_module_train(NULL, true);
    CHECK(!te_module_is_training(NULL) && te_module_print(NULL, text, sizeof text) == 0 && te_module_print(NULL, NULL, 0) == 0);
    CHECK(!te_module_set_forward(NULL, NULL) && !te_forward(NULL, NULL) && !te_forward_with(NULL, NULL));
    CHECK(!te_linear_create(te, NULL) && !te_layernorm_create(te, NULL) && !te_rmsnorm_create(te, NULL) && !te_layernorm_linear_create(te, NULL));
    CHECK(!te_layernorm_mlp_create(te, NULL) && !te_dot_product_attention_create(te, NULL) && !te_multihead_attention_create(te, NULL));
    CHECK(!te_transformer_layer_create(te, NULL) && !te_embedding_create(te, NULL));
    CHECK(!te_quantizer_create(te, NULL));
    if (te && !pending) CHECK_ERROR(te, TE_ERR_INVALID, "te_linear_create: desc is NULL"); /* a desc is nobody's result: nobody has complained yet */
    CHECK(te_quantizer_set_usage(NULL, 1) != TE_OK && !te_quantize(NULL, NULL) && !te_dequantize(NULL, TE_F32));
    te_quantizer_destroy(NULL);
    CHECK(te_quantized_view(NULL, TE_ROWWISE, &data, NULL) != TE_OK && te_warmup(NULL, TE_F32, 0, NULL) != TE_OK);
    CHECK(!te_fused_adam_create(te, NULL, NULL) && te_optimizer_step(NULL) != TE_OK && te_optimizer_lr(NULL) == 0 && te_optimizer_steps(NULL) == 0);
    te_optimizer_destroy(NULL);
    te_optimizer_keep_grad(NULL, true);
    te_optimizer_zero_grad(NULL);
    te_optimizer_set_lr(NULL, 1);
    CHECK(!te_optimizer_grad_norm(NULL));
    te_safetensors_close(NULL);
    CHECK(te_safetensors_count(NULL) == 0 && !te_safetensors_at(NULL, 0) && !te_safetensors_find(NULL, "x") && !te_safetensors_metadata(NULL, "x"));
    CHECK(!te_safetensors_read(NULL, "x") && te_safetensors_read_into(NULL, "x", NULL) != TE_OK);
    te_ctx_destroy(NULL);
    if (te && !pending) CHECK_OK(te); /* whoever made the NULLs has complained */

    /* a context alone, or not even that */
    te_scope_begin(te);
    te_no_grad_begin(te);
    te_no_grad_end(te);
    CHECK(te_grad_enabled(te) == (te != NULL));
    te_scope_end(te);
    te_seed(te, 1);
    te_rng_get(te, &seed, &offset);
    te_rng_get(te, NULL, NULL);
    te_rng_set(te, seed, offset);
    te_memory_get_stats(te);
    te_memory_reset_peak(te);
    te_memory_trim(te);
    te_jit_get_stats(te);
    CHECK((te_synchronize(te) == TE_OK) == (te != NULL) && te_report(te, NULL, 0) > 0 && te_report(te, text, sizeof text) > sizeof text);
    CHECK(te_ctx_device(te) && !te_ctx_is_cuda(te) && te_ctx_sm(te) == 0 && !te_ctx_cu_context(te) && !te_ctx_cu_stream(te));
    CHECK(!te_module_create(te, NULL, NULL) && !te_tensor_empty(te, TE_F32, 1, NULL) && !te_tensor_zeros(te, TE_F32, 1, NULL));
    CHECK(!te_tensor_full(te, TE_F32, 1, NULL, 1) && !te_tensor_uniform(te, TE_F32, 1, NULL, 0, 1) && !te_tensor_normal(te, TE_F32, 1, NULL, 0, 1));
    CHECK(!te_tensor_from_host(te, TE_F32, 1, NULL, NULL) && !te_tensor_from_f32(te, TE_F32, 1, NULL, NULL) && !te_tensor_describe(te, TE_F32, 1, NULL));
    CHECK(!te_tensor_wrap(te, TE_F32, SHAPE(1), NULL, NULL, NULL) && te_explain(te, TE_OP_FILL, NULL, NULL, NULL) != TE_OK);
    CHECK(te_explain(te, TE_OP_NONE, NULL, NULL, &explanation) != TE_OK && !te_query_supported(te, (te_op)999, NULL));
    CHECK(!te_safetensors_open(te, NULL) && te_safetensors_write(te, NULL, NULL, 0, NULL, 0) != TE_OK && te_model_save(te, NULL, NULL, NULL, NULL, 0) != TE_OK);
    CHECK(te_model_load(te, NULL, NULL, NULL) != TE_OK && te_model_metadata(te, NULL, NULL, NULL, 0) != TE_OK);
    /* every raw operation: without arguments, and with none of the tensors that it wants */
#define CALL(lower, UPPER, family)                                          \
    do {                                                                    \
        te_op_##lower##_args none;                                             \
        memset(&none, 0, sizeof none);                                      \
        test_case("te_" #lower);                                            \
        CHECK(te_op_##lower(te, NULL) != TE_OK);                               \
        te_result result = te_op_##lower(te, &none);                           \
        /* lists of no tensors are legal */                                 \
        if (TE_OP_##UPPER != TE_OP_L2NORM && TE_OP_##UPPER < TE_OP_ADAM) CHECK(result != TE_OK); \
        te_query_supported(te, TE_OP_##UPPER, &none);                          \
    } while (0);
    TE_OP_LIST(CALL)
#undef CALL
    test_case("%s", "");
}

TE_TEST(nothing_at_all) {
    te_ctx *te = test_context("cpu");
    model bystander = new_bystander(te);
    call_with_nothing(NULL, false);
    CHECK(!te_ok(NULL) && te_error_code(NULL) == TE_ERR_STATE);
    CHECK_STR(te_error(NULL), "te_ctx_create returned NULL");
    te_clear_error(NULL);
    call_with_nothing(te, false);
    te_clear_error(te);
    te_tensor_zeros(te, TE_F32, SHAPE(-5));
    call_with_nothing(te, true);
    refused_at(__LINE__, te, &bystander, TE_ERR_SHAPE, "[-5]", NULL, NULL);
    release_bystander(te, &bystander);
}

/* NULL where something is needed, with nothing wrong before: an error that says what is missing. */
TE_TEST(nothing_where_something_is_needed) {
    te_ctx *te = test_context("cpu");
    model bystander = new_bystander(te);
    te_tensor *x = F32(2, 3), *list[2] = {x, NULL}, *none = NULL;
    te_node_desc node = {0};
    REFUSED(te_concat(list, 2, 0), TE_ERR_STATE, "te_concat: tensor 2 of 2 is NULL", NULL, NULL);
    list[0] = NULL, list[1] = x;
    REFUSED(te_concat(list, 2, 0), TE_ERR_STATE, "te_concat: tensor 1 of 2 is NULL", NULL, NULL);
    CHECK(!te_concat(list, 0, 0) && !te_concat(NULL, 2, 0));
    CHECK_OK(te);
    REFUSES(te_record(te, NULL), TE_ERR_INVALID, "te_record: desc is NULL", NULL, NULL);
    node.name = "mine";
    node.num_inputs = 1;
    REFUSES(te_record(te, &node), TE_ERR_INVALID, "te_record: mine has 1 inputs, 0 outputs and 0 saved tensors", NULL, NULL);
    node.inputs = &x;
    node.outputs = &none;
    node.num_outputs = 1;
    REFUSES(te_record(te, &node), TE_ERR_STATE, "te_record: output 1 of 1 of mine is NULL", NULL, NULL);
    REFUSES(te_quantize_master_weights(te, NULL), TE_ERR_INVALID, "te_quantize_master_weights: desc is NULL", NULL, NULL);
    REFUSES(te_cast_master_weights_to_fp8(te, NULL), TE_ERR_INVALID, "te_quantize_master_weights: desc is NULL", NULL, NULL);
    REFUSED(te_forward_with(bystander.gpt, NULL), TE_ERR_STATE, "te_forward_with: args is NULL", NULL, NULL);
    REFUSED(te_forward(bystander.gpt, NULL), TE_ERR_STATE, "te_forward_with: the input is NULL", NULL, NULL);
    REFUSED(te_forward(NULL, x), TE_ERR_STATE, "te_forward_with: the module is NULL", NULL, NULL);
    te_forward_args args = {0};
    args.input = x;
    REFUSES(te_onnx_export(NULL, &args, "x.onnx"), TE_ERR_STATE, "te_onnx_export: the module is NULL", NULL, NULL);
    release_bystander(te, &bystander);
}

/* Functions of the program's that return a number that is not a te_result. */
enum { NO_RESULT = 4711 };
static te_result odd_forward(te_module *self, te_forward_args *args) { return args->outputs.out = te_scale(args->input, 2), (void)self, (te_result)NO_RESULT; }
static te_result odd_reset(te_module *self) { return (void)self, (te_result)-1; }
static te_result odd_init(void *user, te_tensor *weight) { return (void)user, (void)weight, (te_result)NO_RESULT; }
static te_result odd_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    return (void)te, (void)state, (void)saved, (void)needs, dx[0] = dy[0], (te_result)NO_RESULT;
}
static te_result odd_function(te_ctx *te, void *user, te_tensor *const *inputs, int n, te_tensor **outputs, int m) {
    return (void)te, (void)user, (void)n, (void)m, outputs[0] = te_scale(inputs[0], 2), (te_result)NO_RESULT;
}
static te_result odd_factory(void *user, const te_quantizer_role *role, te_quantizer_desc *desc) { return (void)user, (void)role, (void)desc, (te_result)NO_RESULT; }
static te_result odd_patch(te_ctx *te, void *user) { return (void)te, (void)user, (te_result)NO_RESULT; }
static te_result odd_hook(te_module *part, void *user) { return (void)part, (void)user, (te_result)NO_RESULT; }
static te_result odd_state(te_optimizer *opt, te_tensor *param, const char *name, bool zero, bool remainders) {
    return (void)opt, (void)param, (void)name, (void)zero, (void)remainders, (te_result)NO_RESULT;
}
static te_result odd_quantize(void *user, te_tensor *x, int which, te_tensor **data, te_tensor **scale) {
    return (void)user, (void)x, (void)which, (void)data, (void)scale, (te_result)NO_RESULT;
}
static te_tensor *odd_dequantize(void *user, te_tensor *data, te_tensor *scale, int which, int ndim, const int64_t *shape, te_dtype dtype) {
    return (void)user, (void)data, (void)scale, (void)which, (void)ndim, (void)shape, (void)dtype, (te_tensor *)NULL;
}
TE_TEST(functions_that_return_no_result) {
    static const te_module_class forward = {"Odd", 0, odd_forward, NULL, NULL}, reset = {"Reset", 0, odd_forward, NULL, odd_reset};
    te_ctx *te = test_context("cpu");
    model bystander = new_bystander(te);
    te_tensor *x = te_tensor_set_requires_grad(F32(2, 4), true), *y = NULL;
    te_module *m = te_module_create(te, &forward, "odd"), *n = te_module_create(te, &reset, "reset");
    REFUSED(te_forward(m, x), TE_ERR_INVALID, "odd: Odd returned 4711, which is not a te_result", NULL, NULL);
    REFUSES(te_module_reset_parameters(n), TE_ERR_INVALID, "reset_parameters of \"reset\" returned -1, which is not a te_result", NULL, NULL);
    te_module_destroy(m);
    te_module_destroy(n);
    te_linear_desc linear = {0};
    linear.in_features = linear.out_features = 4;
    linear.gemm.params_dtype = TE_F32;
    linear.gemm.init.init_method = odd_init;
    REFUSED(te_linear_create(te, &linear), TE_ERR_INVALID, "the init_method of \"weight\" returned 4711", NULL, NULL);
    y = te_scale(te_tensor_detach(x), 2);
    te_node_desc node = {0};
    node.name = "mine";
    node.inputs = &x;
    node.outputs = &y;
    node.num_inputs = node.num_outputs = 1;
    node.backward = odd_backward;
    CHECK_EQ_INT(te_record(te, &node), TE_OK);
    REFUSES(te_backward(te_sum_all(y)), TE_ERR_INVALID, "te_backward: the backward function of \"mine\" returned 4711", NULL, NULL);
    te_checkpoint_desc again = {0};
    again.fn = odd_function;
    again.inputs = &x;
    again.outputs = &y;
    again.num_inputs = again.num_outputs = 1;
    REFUSES(te_checkpoint(te, &again), TE_ERR_INVALID, "te_checkpoint: the function returned 4711", NULL, NULL);
    te_recipe recipe = te_recipe_custom(odd_factory, NULL);
    te_autocast_desc region = {0};
    region.recipe = &recipe;
    linear.gemm.init.init_method = NULL;
    m = te_linear_create(te, &linear);
    te_autocast_begin(te, &region);
    CHECK(!te_forward(m, x));
    CHECK_ERROR(te, TE_ERR_INVALID, "recipe custom: the factory returned 4711");
    te_autocast_end(te);
    te_custom_quantizer custom = {"mine", NULL, odd_quantize, odd_dequantize, NULL};
    te_quantizer_desc own = {0};
    own.kind = TE_QUANT_CUSTOM;
    own.custom = &custom;
    te_quantizer *q = te_quantizer_create(te, &own);
    REFUSED(te_quantize(q, x), TE_ERR_INVALID, "the quantize function of \"mine\" returned 4711", NULL, NULL);
    te_quantizer_destroy(q);
    te_step_hooks hooks = {0};
    hooks.prepare_for_final_backward = odd_hook;
    te_module_set_step_hooks(m, &hooks);
    REFUSES(te_prepare_for_final_backward(te, &m, 1), TE_ERR_INVALID, "the hook of \"linear\" returned 4711", NULL, NULL);
    te_fused_adam_methods methods = {0};
    methods.initialize_state = odd_state;
    te_optimizer *opt = te_fused_adam_create(te, m, NULL);
    te_fused_adam_set_methods(te, &methods);
    REFUSES(te_optimizer_initialize_state(opt, te_module_parameter(m, "weight"), "exp_avg", false, false), TE_ERR_INVALID, "initialize_state of \"exp_avg\" returned 4711", NULL, NULL);
    te_fused_adam_set_methods(te, NULL);
    te_optimizer_destroy(opt);
    te_module_destroy(m);
    te_patch patch = {0};
    patch.name = "odd";
    patch.apply = patch.undo = odd_patch;
    CHECK_EQ_INT(te_register_patch(te, &patch), TE_OK);
    REFUSES(te_apply_patches(te), TE_ERR_INVALID, "te_apply_patches: apply of \"odd\" returned 4711", NULL, NULL);
    release_bystander(te, &bystander);
}

static void *never(void *user, size_t bytes, size_t alignment) {
    (void)user, (void)bytes, (void)alignment;
    test_fail(__FILE__, __LINE__, "half an allocator was used");
    return NULL;
}
static void *nowhere(void *user, size_t bytes, size_t alignment) {
    (void)user, (void)bytes, (void)alignment;
    return NULL;
}
static void ignore(void *user, void *pointer, size_t bytes) { (void)user, (void)pointer, (void)bytes; }

TE_TEST(allocators_that_cannot_be) {
    te_allocator half = {never, NULL, NULL}, empty = {nowhere, ignore, NULL};
    for (int i = 0; i < 2; i++) {
        te_ctx_desc desc = {0};
        desc.device = "cpu";
        if (i) desc.device_allocator = half;
        else desc.host_allocator = half;
        te_ctx *te = te_ctx_create(&desc);
        CHECK_ERROR(te, TE_ERR_INVALID, "te_ctx_create: host_allocator or device_allocator has one of alloc and release");
        CHECK(te_tensor_item(te_tensor_full(te, TE_F32, SHAPE(1), 3)) == 3);
        te_ctx_destroy(te);
    }
    te_ctx_desc desc = {0};
    desc.host_allocator = empty;
    CHECK(!te_ctx_create(&desc)); /* the only NULL that it returns */
}

TE_TEST(devices_that_do_not_exist) {
    static const char *const names[] = {"gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:99999", "CPU", "cpu ", "cuda:0x"};
    for (int i = 0; i < COUNT(names); i++) {
        te_ctx_desc desc = {0};
        test_case("\"%s\"", names[i]);
        desc.device = names[i];
        desc.log = test__log;
        te_ctx *te = te_ctx_create(&desc);
        CHECK_ERROR(te, TE_ERR_INVALID, "is neither \"cpu\" nor \"cuda:N\"");
        te_scope_begin(te);
        CHECK(te_tensor_item(te_tensor_full(te, TE_F32, SHAPE(1), 3)) == 3); /* on the CPU, for who insists */
        te_scope_end(te);
        CHECK_OK(te);
        te_ctx_destroy(te);
    }
}

/* ---- NaN and infinity ------------------------------------------------------------------------------------------ */

/* The bytes of q's two copies, [m, n] both: the column-wise one is turned back. */
static void read_codes(te_tensor *q, int m, int n, uint8_t *row, uint8_t *col, float *scale_inv) {
    te_tensor *r, *c, *scale;
    REQUIRE(te_quantized_view(q, TE_ROWWISE, &r, &scale) == TE_OK && te_quantized_view(q, TE_COLUMNWISE, &c, NULL) == TE_OK);
    const uint8_t *rows = (const uint8_t *)test_read_bytes(r), *cols = (const uint8_t *)test_read_bytes(c);
    int64_t r_ld = te_tensor_shape(r)[1], c_ld = te_tensor_shape(c)[1];
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            row[i * n + j] = rows[i * r_ld + j];
            col[i * n + j] = cols[j * c_ld + i];
        }
    *scale_inv = test_read(scale)[0];
}

/* NaN becomes the format's NaN, infinity its largest number, whatever the scale; NaN does not enter the amax, infinity does, and a scale
 * from it is 1. */
TE_TEST_DEVICES(quantizers_bytes_of_nan_and_infinity) {
    static const struct {
        te_quant_kind kind;
        te_dtype dtype;
        float x[6], scale, amax; /* of delayed scaling: before and after */
        uint8_t code[6];
        float scale_inv;
    } row[] = {
        {TE_QUANT_CURRENT, TE_F8E4M3, {NAN, 224, -1, 0, -0.0f, -NAN}, 0, 0, {0x7F, 0x7E, 0xC0, 0x00, 0x80, 0x7F}, 0.5f},
        {TE_QUANT_CURRENT, TE_F8E4M3, {INFINITY, -INFINITY, 2, 600, -1e30f, 1e-30f}, 0, 0, {0x7E, 0xFE, 0x40, 0x7E, 0xFE, 0x00}, 1},
        {TE_QUANT_CURRENT, TE_F8E4M3, {NAN, NAN, NAN, NAN, -NAN, NAN}, 0, 0, {0x7F, 0x7F, 0x7F, 0x7F, 0x7F, 0x7F}, 1},
        {TE_QUANT_CURRENT, TE_F8E4M3, {NAN, INFINITY, -INFINITY, 1, 0, 0}, 0, 0, {0x7F, 0x7E, 0xFE, 0x38, 0x00, 0x00}, 1},
        {TE_QUANT_CURRENT, TE_F8E4M3, {0, 0, -0.0f, 0, 0, 0}, 0, 0, {0x00, 0x00, 0x80, 0x00, 0x00, 0x00}, 1},
        {TE_QUANT_CURRENT, TE_F8E5M2, {NAN, 1, -INFINITY, 100000, INFINITY, -NAN}, 0, 0, {0x7F, 0x3C, 0xFB, 0x7B, 0x7B, 0x7F}, 1},
        {TE_QUANT_CURRENT, TE_F8E5M2, {NAN, 28672, -1, 0, 0, 0}, 0, 0, {0x7F, 0x7B, 0xC0, 0x00, 0x00, 0x00}, 0.5f},
        {TE_QUANT_DELAYED, TE_F8E4M3, {NAN, -3, 1, 0, 200, -NAN}, 4, 200, {0x7F, 0xD4, 0x48, 0x00, 0x7E, 0x7F}, 0.25f},
        {TE_QUANT_DELAYED, TE_F8E4M3, {INFINITY, -3, NAN, 0, -INFINITY, 1}, 4, INFINITY, {0x7E, 0xD4, 0x7F, 0x00, 0xFE, 0x48}, 0.25f},
        {TE_QUANT_DELAYED, TE_F8E5M2, {INFINITY, NAN, -INFINITY, 1, 1, 1}, 2, INFINITY, {0x7B, 0x7F, 0xFB, 0x40, 0x40, 0x40}, 0.5f},
        {TE_QUANT_DELAYED, TE_F8E4M3, {NAN, NAN, NAN, -NAN, NAN, NAN}, 2, 0, {0x7F, 0x7F, 0x7F, 0x7F, 0x7F, 0x7F}, 0.5f},
    };
    static const te_dtype formats[] = {TE_F32, TE_BF16};
    for (int i = 0; i < COUNT(row); i++)
        for (int f = 0; f < 2; f++) {
            uint8_t by_rows[6], by_columns[6];
            float scale_inv = 0;
            te_quantizer_desc desc = {0};
            test_case("row %d from %s", i, te_dtype_name(formats[f]));
            desc.kind = row[i].kind;
            desc.dtype = row[i].dtype;
            if (desc.kind == TE_QUANT_DELAYED) {
                desc.delayed.scale = te_tensor_full(te, TE_F32, SHAPE(1), (double)row[i].scale);
                desc.delayed.amax = te_tensor_zeros(te, TE_F32, SHAPE(1));
            }
            te_quantizer *quantizer = te_quantizer_create(te, &desc);
            te_tensor *q = te_quantize(quantizer, test_tensor(te, formats[f], SHAPE(2, 3), row[i].x));
            REQUIRE_OK(te);
            read_codes(q, 2, 3, by_rows, by_columns, &scale_inv);
            CHECK_BYTES("row-wise", by_rows, row[i].code, 6);
            CHECK_BYTES("column-wise", by_columns, row[i].code, 6);
            CHECK(scale_inv == row[i].scale_inv);
            if (desc.delayed.amax) CHECK(test_read(desc.delayed.amax)[0] == row[i].amax);
            te_quantizer_destroy(quantizer);
        }
}

/* In a module: what is not a number stays in its own row, and does not change the others. */
TE_TEST_DEVICES(a_nan_stays_in_its_row) {
    enum { ROWS = 4, IN = 32, OUT = 16 };
    te_linear_desc desc = {0};
    desc.in_features = IN;
    desc.out_features = OUT;
    te_module *linear = te_linear_create(te, &desc);
    float *x = test_normal(ROWS * IN, 3), *with = test_copy(x, ROWS * IN);
    te_recipe recipe = te_recipe_current_scaling();
    te_autocast_desc cast = {0};
    x[2 * IN + 5] = 0;
    with[2 * IN + 5] = NAN;
    cast.recipe = &recipe;
    te_autocast_begin(te, &cast);
    const float *want = test_read(te_forward(linear, test_tensor(te, TE_BF16, SHAPE(ROWS, IN), x)));
    const float *got = test_read(te_forward(linear, test_tensor(te, TE_BF16, SHAPE(ROWS, IN), with)));
    te_autocast_end(te);
    CHECK_OK(te);
    for (int j = 0; j < OUT; j++) CHECK(isnan(got[2 * OUT + j]));
    CHECK_BYTES("rows above", got, want, 2 * OUT * sizeof(float));
    CHECK_BYTES("rows below", got + 3 * OUT, want + 3 * OUT, OUT * sizeof(float));
    te_module_destroy(linear);
}
