/* tests/mend/test_process.c: what a process may do to a context: shapes without memory, gradients that hold themselves, NULL descs, sizes at the end of
 * 64 bits, deep trees, contexts that go before what they made, forks, and the messages about all of that. */
#define _GNU_SOURCE
#include "../faults/purse.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- 13: shapes without memory ---- */

TE_TEST_DEVICES(p13_described_tensors_reach_no_kernel) {
    te_tensor *real = te_tensor_full(te, TE_F32, SHAPE(4, 8), 1), *shape = te_tensor_set_name(te_tensor_describe(te, TE_F32, SHAPE(4, 8)), "ghost");
    te_tensor *one = te_tensor_full(te, TE_F32, SHAPE(1), 1);
    const char *need = "\"ghost\" [4, 8] was made by te_tensor_describe and has no memory";
    /* in a list */
    const te_tensor *list[2] = {real, shape};
    te_op_l2norm_args norm = {.tensors = list, .num_tensors = 2, .norm = one};
    CHECK(te_op_l2norm(te, &norm) == TE_ERR_STATE);
    CHECK_STR(te_error(te), "l2norm: tensors[1]");
    CHECK_ERROR(te, TE_ERR_STATE, need);
    te_adam_tensor step = {.grad = real, .param = real, .m = te_tensor_zeros(te, TE_F32, SHAPE(4, 8)), .v = shape};
    te_op_adam_args adam = {.tensors = &step, .num_tensors = 1, .lr = 1, .beta1 = 0.9f, .beta2 = 0.9f, .eps = 1e-8f, .step = 1};
    te_op_adam(te, &adam);
    CHECK_ERROR(te, TE_ERR_STATE, need);
    /* by itself, and by its detached twin */
    te_op_fill_args fill = {.dst = te_tensor_detach(shape)};
    te_op_fill(te, &fill);
    CHECK_ERROR(te, TE_ERR_STATE, "fill: dst [4, 8] was made by te_tensor_describe");
    /* retained past its scope */
    te_scope_begin(te);
    te_tensor *kept = te_tensor_retain(te_tensor_set_name(te_tensor_describe(te, TE_F32, SHAPE(4, 8)), "ghost"));
    te_scope_end(te);
    te_op_axpby_args sum = {.x = real, .y = kept, .out = real, .alpha = 1, .beta = 1};
    te_op_axpby(te, &sum);
    CHECK_ERROR(te, TE_ERR_STATE, need);
    /* through functions and modules */
    CHECK(!te_add(real, kept));
    CHECK_ERROR(te, TE_ERR_STATE, need);
    CHECK(!te_scale(kept, 2));
    CHECK_ERROR(te, TE_ERR_STATE, "te_scale: the tensor \"ghost\"");
    CHECK(!te_linear(real, kept, NULL));
    CHECK_ERROR(te, TE_ERR_STATE, need);
    te_module *linear = te_linear_create(te, &(te_linear_desc){.in_features = 8, .out_features = 4, .gemm.params_dtype = TE_F32, .gemm.no_bias = true});
    te_module_add_parameter(linear, "weight", kept);
    CHECK(!te_forward(linear, real));
    CHECK_ERROR(te, TE_ERR_STATE, need);
    CHECK(!te_fused_adam_create(te, linear, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "without memory");
    te_module_destroy(linear);
    CHECK(!te_quantizer_create(te, &(te_quantizer_desc){.kind = TE_QUANT_DELAYED, .delayed.scale = te_tensor_describe(te, TE_F32, SHAPE(1))}));
    CHECK_ERROR(te, TE_ERR_STATE, "te_quantizer_create: the tensor [1] was made by te_tensor_describe");
    te_tensor_release(kept);
}

static te_result ghost_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    (void)state, (void)saved, (void)needs;
    dx[0] = te_tensor_set_name(te_tensor_describe(te, TE_F32, te_tensor_ndim(dy[0]), te_tensor_shape(dy[0])), "ghost");
    return TE_OK;
}
TE_TEST_DEVICES(p13_described_tensors_are_no_gradients) {
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(4), 1), true);
    te_tensor *shape = te_tensor_set_name(te_tensor_describe(te, TE_F32, SHAPE(4)), "ghost");
    CHECK(te_backward_from(x, shape) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "a gradient: the tensor \"ghost\" [4] was made by te_tensor_describe");
    CHECK(!te_tensor_grad(x));
    CHECK(te_tensor_set_main_grad(x, shape) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "te_tensor_set_main_grad: the tensor \"ghost\" [4] was made by te_tensor_describe");
    CHECK(!te_tensor_main_grad(x));
    te_tensor *y = te_tensor_full(te, TE_F32, SHAPE(4), 1);
    te_node_desc node = {.name = "mine", .inputs = &x, .num_inputs = 1, .outputs = &y, .num_outputs = 1, .saved = &shape, .num_saved = 1, .backward = ghost_backward};
    CHECK(te_record(te, &node) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "mine: the tensor \"ghost\" [4] was made by te_tensor_describe");
    node.num_saved = 0;
    CHECK(te_record(te, &node) == TE_OK);
    CHECK(te_backward(te_sum_all(y)) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "a gradient: the tensor \"ghost\" [4]");
    CHECK(!te_tensor_grad(x));
}

/* ---- 13: a context goes, and all with it ---- */

static int mine_destroyed, children_then;
static te_result mine_forward(te_module *self, te_forward_args *args) {
    args->outputs.out = te_forward(te_module_child(self, 0), args->input);
    return te_error_code(te_module_ctx(self));
}
static void mine_destroy(te_module *self) {
    mine_destroyed++;
    children_then = te_module_num_children(self);
    if (children_then) te_tensor_release(*(te_tensor **)te_module_state(self));
}
static const te_module_class mine = {"Mine", sizeof(te_tensor *), mine_forward, mine_destroy, NULL};

static void count_one(void *user) { ++*(int *)user; }
static te_result none_all_reduce(void *user, te_ctx *te, te_tensor *x, te_reduce_op op) { return (void)user, (void)te, (void)x, (void)op, TE_OK; }
static te_result none_all_gather(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) { return (void)user, (void)te, (void)x, (void)out, TE_OK; }
static te_result none_broadcast(void *user, te_ctx *te, te_tensor *x, int root) { return (void)user, (void)te, (void)x, (void)root, TE_OK; }
static te_result none_barrier(void *user) { return (void)user, TE_OK; }

/* Bit by bit: what is released before the context goes. */
enum { FREE_MODULE = 1, FREE_ADAM = 2, FREE_TENSORS = 4, FREE_QUANTIZER = 8, FREE_GROUP = 16, FREE_FILE = 32, FREE_GRAPH = 64, ALL_WAYS = 128 };

static void fill_and_destroy(int freed) {
    purse *host = new_purse(), *device = new_purse();
    int group_gone = 0, wrap_gone = 0;
    static float foreign[8];
    const char *path = test_path("file");
    te_ctx_desc desc = {.device = "cpu", .cpu_threads = 2, .host_allocator = allocator_of(host), .device_allocator = allocator_of(device), .log = test__log};
    te_ctx *te = te_ctx_create(&desc);
    REQUIRE_OK(te);
    mine_destroyed = 0;
    te_module *m = te_module_create(te, &mine, "mine");
    te_module *linear = te_module_add_child(m, "linear", te_linear_create(te, &(te_linear_desc){.in_features = 32, .out_features = 32}));
    *(te_tensor **)te_module_state(m) = te_tensor_retain(te_tensor_zeros(te, TE_F32, SHAPE(3)));
    te_tensor *main_grad = te_tensor_zeros(te, TE_F32, SHAPE(32, 32));
    te_tensor_set_main_grad(te_module_parameter(linear, "weight"), main_grad);
    te_optimizer *adam = te_fused_adam_create(te, m, &(te_fused_adam_desc){.max_grad_norm = 1});
    te_recipe recipe = te_recipe_delayed_scaling();
    te_graph *graph = NULL;
    te_tensor *x = te_tensor_full(te, TE_BF16, SHAPE(32, 32), 1), *kept[6] = {NULL};
    for (int i = 0; i < 3; i++) { /* the last time into a graph */
        te_scope_begin(te);
        if (i == 2) te_graph_begin(te);
        te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
        te_tensor *y = te_forward(m, x);
        te_autocast_end(te);
        te_backward(te_mean_all(y));
        te_optimizer_step(adam);
        if (i == 1) kept[0] = te_tensor_retain(y);
        if (i == 2) kept[1] = te_tensor_retain(y), graph = te_graph_end(te);
        te_scope_end(te);
    }
    CHECK(graph && te_graph_launch(graph) == TE_OK);
    te_quantizer *q = te_quantizer_create(te, &(te_quantizer_desc){.kind = TE_QUANT_DELAYED});
    te_scope_begin(te);
    kept[2] = te_tensor_retain(te_quantize(q, x));
    kept[3] = te_tensor_set_name(te_tensor_retain(te_tensor_wrap(te, TE_F32, SHAPE(8), foreign, count_one, &wrap_gone)), "foreign");
    kept[4] = te_tensor_retain(te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(4), 1), true));
    kept[5] = te_tensor_retain(te_scale(kept[4], 2)); /* its node is on the tape */
    te_backward_from(kept[4], te_tensor_full(te, TE_F32, SHAPE(4), 1));
    te_scope_end(te);
    te_scale(kept[4], 3); /* an open end */
    te_group *group = te_group_create(te, &(te_group_desc){.size = 2, .user = &group_gone, .all_reduce = none_all_reduce, .all_gather = none_all_gather,
                                          .reduce_scatter = none_all_gather, .broadcast = none_broadcast, .barrier = none_barrier, .destroy = count_one});
    CHECK(te_model_save(te, path, m, adam, NULL, 0) == TE_OK);
    te_safetensors *file = te_safetensors_open(te, path);
    CHECK_OK(te);
    CHECK(file && group && q && adam && kept[1] && kept[5]);
    te_scope_begin(te); /* left open */
    if (freed & FREE_GRAPH) te_graph_destroy(graph);
    if (freed & FREE_ADAM) te_optimizer_destroy(adam);
    if (freed & FREE_MODULE) te_module_destroy(m);
    for (int i = 0; i < 6 && freed & FREE_TENSORS; i++) te_tensor_release(kept[i]);
    if (freed & FREE_QUANTIZER) te_quantizer_destroy(q);
    if (freed & FREE_GROUP) te_group_destroy(group);
    if (freed & FREE_FILE) te_safetensors_close(file);
    te_ctx_destroy(te);
    CHECK_EQ_INT(device->blocks, 0);
    CHECK_EQ_INT(host->blocks, freed & FREE_GRAPH ? 0 : 1); /* a graph's handle alone stays, to be destroyed */
    if (!(freed & FREE_GRAPH)) te_graph_destroy(graph);
    CHECK_EQ_INT(host->blocks, 0);
    CHECK_EQ_INT(host->held, 0);
    CHECK_EQ_INT(group_gone, 1);
    CHECK_EQ_INT(wrap_gone, 1);
    CHECK_EQ_INT(mine_destroyed, 1);
    CHECK_EQ_INT(children_then, 1);
}
TE_TEST(p13_a_destroyed_context_takes_all_with_it) {
    for (int freed = 0; freed < ALL_WAYS; freed += test_every(9)) {
        test_case("released before: %d", freed);
        fill_and_destroy(freed);
    }
}
TE_TEST(p13_a_destroyed_context_says_what_was_left) {
    fill_and_destroy(ALL_WAYS - 1);
    CHECK(!test_log_text()[0]);
    fill_and_destroy(ALL_WAYS - 1 - FREE_FILE);
    CHECK_STR(test_log_text(), "te_ctx_destroy: 1 open file is still there; the context destroys all of them, and they must be neither used nor destroyed any more");
    fill_and_destroy(ALL_WAYS - 1 - FREE_TENSORS);
    CHECK_STR(test_log_text(), " tensors are still retained; the context releases them, and they must be neither used nor released any more");
    fill_and_destroy(ALL_WAYS - 1 - FREE_MODULE - FREE_ADAM);
    CHECK_STR(test_log_text(), "te_ctx_destroy: 2 modules are still there;");
}

/* ---- 13: gradients that hold themselves ---- */

/* test_context fails the test when a tensor is alive at its end: a cycle would be. */
static te_result self_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    (void)te, (void)state, (void)dy, (void)needs;
    dx[0] = saved[0];
    return TE_OK;
}
TE_TEST_DEVICES(p13_no_gradient_holds_itself) {
    te_tensor *x[3];
    for (int i = 0; i < 3; i++) x[i] = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(4, 8), i), true);
    /* main gradients: the tensor, its own memory, rounds of two and three */
    CHECK(te_tensor_set_main_grad(x[0], x[0]) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "main_grad lies in the tensor's own memory");
    CHECK(te_tensor_set_main_grad(x[0], te_tensor_detach(x[0])) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "main_grad lies in the tensor's own memory");
    te_tensor *flat = te_tensor_zeros(te, TE_F32, SHAPE(9, 8));
    te_tensor *low = te_tensor_narrow(flat, 0, 0, 4), *high = te_tensor_narrow(flat, 0, 5, 4), *between = te_tensor_narrow(flat, 0, 3, 4);
    CHECK(te_tensor_set_main_grad(low, between) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "own memory");
    CHECK(te_tensor_set_main_grad(low, high) == TE_OK); /* beside each other in one buffer */
    te_tensor *empty = te_tensor_zeros(te, TE_F32, SHAPE(0));
    CHECK(te_tensor_set_main_grad(empty, empty) == TE_ERR_INVALID);
    te_clear_error(te);
    CHECK(te_tensor_set_main_grad(x[0], x[1]) == TE_OK);
    CHECK(te_tensor_set_main_grad(x[1], x[0]) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "the tensor is itself a gradient of another");
    CHECK(te_tensor_set_main_grad(x[1], x[2]) == TE_ERR_INVALID);
    te_clear_error(te);
    CHECK(te_tensor_set_main_grad(x[2], x[0]) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "main_grad has a main gradient itself");
    /* gradients */
    CHECK(te_backward_from(x[2], x[2]) == TE_OK);
    CHECK(te_tensor_grad(x[2]) != x[2] && test_read(te_tensor_grad(x[2]))[0] == 2);
    CHECK(te_tensor_set_main_grad(te_tensor_grad(x[2]), x[2]) == TE_ERR_INVALID);
    te_clear_error(te);
    te_tensor *a = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(2), 5), true);
    te_tensor *b = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(2), 7), true);
    CHECK(te_backward_from(a, b) == TE_OK && te_backward_from(b, a) == TE_OK);
    CHECK(test_read(te_tensor_grad(a))[0] == 7 && test_read(te_tensor_grad(b))[0] == 5);
    CHECK(te_tensor_set_main_grad(te_tensor_grad(a), a) == TE_ERR_INVALID);
    te_clear_error(te);
    /* a node whose backward gives back what it saved */
    te_tensor *c = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(2), 3), true), *y = te_tensor_full(te, TE_F32, SHAPE(2), 3);
    te_node_desc node = {.name = "self", .inputs = &c, .num_inputs = 1, .outputs = &y, .num_outputs = 1, .saved = &c, .num_saved = 1, .backward = self_backward};
    CHECK(te_record(te, &node) == TE_OK && te_backward(te_sum_all(y)) == TE_OK);
    CHECK(test_read(te_tensor_grad(c))[0] == 3);
    CHECK_OK(te);
}

/* ---- 13: NULL ---- */

TE_TEST(p13_every_creator_refuses_a_null_desc) {
    te_ctx *te = test_context("cpu");
    static const char *const names[] = {"te_linear_create", "te_layernorm_create", "te_rmsnorm_create", "te_layernorm_linear_create", "te_layernorm_mlp_create",
                                        "te_dot_product_attention_create", "te_multihead_attention_create", "te_transformer_layer_create", "te_embedding_create",
                                        "te_quantizer_create", "te_group_create", "te_activation_create", "te_bias_create", "te_constant_scale_create", "te_dropout_create",
                                        "te_l2normalization_create", "te_inference_params_create", "te_module_create", "te_thread_group_create",
                                        "te_float32_rms_norm_create", "te_gate_create", "te_fake_balanced_gate_create", "te_grouped_experts_create",
                                        "te_grouped_experts_deepep_create", "te_grouped_experts_te_create", "te_moe_create", "te_sdpa_create"};
    /* Those to which NULL is a default, or that have no desc. */
    static const char *const others[] = {"te_ctx_create", "te_fused_adam_create", "te_fused_sgd_create", "te_thread_hub_create", "te_sequential_create", "te_identity_create",
                                         "te_grad_scaler_create"};
    static const char *const chapters[] = {"context", "tensor", "autograd", "ops", "dist", "quant", "functions", "module", "nn", "inference", "train", "graph", "io", "backend", "experts", "report"};
#define NULL_TWICE(i, name)                                                  \
    CHECK(!name(NULL, NULL));                                                \
    CHECK(!name(te, NULL));                                                  \
    CHECK(strcmp(names[i], #name) == 0);                                     \
    CHECK_ERROR(te, TE_ERR_INVALID, #name ": desc is NULL")
    NULL_TWICE(0, te_linear_create);
    NULL_TWICE(1, te_layernorm_create);
    NULL_TWICE(2, te_rmsnorm_create);
    NULL_TWICE(3, te_layernorm_linear_create);
    NULL_TWICE(4, te_layernorm_mlp_create);
    NULL_TWICE(5, te_dot_product_attention_create);
    NULL_TWICE(6, te_multihead_attention_create);
    NULL_TWICE(7, te_transformer_layer_create);
    NULL_TWICE(8, te_embedding_create);
    NULL_TWICE(9, te_quantizer_create);
    NULL_TWICE(10, te_group_create);
    NULL_TWICE(11, te_activation_create);
    NULL_TWICE(12, te_bias_create);
    NULL_TWICE(13, te_constant_scale_create);
    NULL_TWICE(14, te_dropout_create);
    NULL_TWICE(15, te_l2normalization_create);
    NULL_TWICE(16, te_inference_params_create);
    NULL_TWICE(19, te_float32_rms_norm_create);
    NULL_TWICE(26, te_sdpa_create);
    CHECK(!te_initialize_linear_module(NULL, NULL) && !te_initialize_linear_module(te, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_initialize_linear_module: desc is NULL");
    CHECK(!te_initialize_rms_norm_module(NULL, NULL) && !te_initialize_rms_norm_module(te, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_initialize_rms_norm_module: desc is NULL");
    const te_moe_config one = {.n_routed_experts = 1, .n_activated_experts = 1, .dim = 1, .moe_inter_dim = 1};
#define NULL_CONFIG(name)                                                    \
    CHECK(!name(NULL, NULL, NULL) && !name(te, NULL, &(te_moe_backend){0})); \
    CHECK_ERROR(te, TE_ERR_INVALID, #name ": desc is NULL");                 \
    CHECK(!name(te, &one, NULL));                                            \
    CHECK_ERROR(te, TE_ERR_INVALID, #name ": backend is NULL")
    NULL_CONFIG(te_grouped_experts_create);
    NULL_CONFIG(te_grouped_experts_deepep_create);
    NULL_CONFIG(te_grouped_experts_te_create);
    NULL_CONFIG(te_moe_create);
    CHECK(!te_gate_create(NULL, NULL, TE_F32, NULL) && !te_gate_create(te, NULL, TE_F32, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_gate_create: desc is NULL");
    CHECK(!te_fake_balanced_gate_create(NULL, NULL, 0, 0) && !te_fake_balanced_gate_create(te, NULL, 0, 0));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_fake_balanced_gate_create: desc is NULL");
    CHECK(!te_module_create(NULL, NULL, NULL) && !te_module_create(te, NULL, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_module_create: cls is NULL");
    CHECK(!te_initialize_attn_module(NULL, TE_ATTN_TE, NULL) && !te_initialize_attn_module(te, TE_ATTN_TE, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_initialize_attn_module: desc is NULL");
    CHECK(!te_create_block_mask(NULL, NULL) && !te_create_block_mask(te, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_create_block_mask: desc is NULL");
    CHECK(!te_sparse_window_indices(NULL, NULL) && !te_sparse_window_indices(te, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_sparse_window_indices: desc is NULL");
    CHECK(!te_thread_group_create(NULL, NULL, 0) && !te_thread_group_create(te, NULL, 0));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_thread_group_create: hub is NULL");
    CHECK(!te_fused_adam_create(NULL, NULL, NULL) && !te_fused_adam_create(te, NULL, NULL));
    CHECK(!te_fused_sgd_create(NULL, NULL, NULL) && !te_fused_sgd_create(te, NULL, NULL) && !te_grad_scaler_create(NULL, NULL));
    CHECK_OK(te); /* the module is a NULL that was reported when it came about */
    /* every creator of the public chapters stands in one of the lists */
    int found = 0;
    for (int i = 0; i < COUNT(chapters); i++) {
        char path[64], line[512], name[64];
        snprintf(path, sizeof path, "src/api/%s.h", chapters[i]);
        FILE *f = fopen(path, "r");
        CHECK_MSG(f != NULL, "%s is not there: tests run in the repository's root", path);
        while (f && fgets(line, sizeof line, f)) {
            const char *at = strncmp(line, "TE_API", 6) == 0 ? strstr(line, "_create(") : NULL;
            const char *begin = at;
            bool known = false;
            if (!at) continue;
            while (begin[-1] != ' ' && begin[-1] != '*') begin--;
            snprintf(name, sizeof name, "%.*s_create", (int)(at - begin), begin);
            for (int k = 0; k < COUNT(names); k++) known = known || strcmp(names[k], name) == 0;
            found += known;
            for (int k = 0; k < COUNT(others); k++) known = known || strcmp(others[k], name) == 0;
            CHECK_MSG(known, "%s has no line in this test", name);
        }
        if (f) fclose(f);
    }
    CHECK_EQ_INT(found, COUNT(names));
}

TE_TEST(p13_null_names_and_visitors) {
    te_ctx *te = test_context("cpu");
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 2, .out_features = 2});
    CHECK(!te_module_parameter(m, NULL) && !te_module_parameter(NULL, NULL));
    CHECK_OK(te);
    CHECK(!te_module_visit(m, NULL, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_module_visit: the function to call is NULL");
    CHECK(!te_module_visit_tensors(m, NULL, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_module_visit_tensors: the function to call is NULL");
    CHECK(te_module_visit(NULL, NULL, NULL) && te_module_visit_tensors(NULL, NULL, NULL));
    te_module_destroy(m);
}

/* ---- 13: the end of 64 bits, and nothing at NULL; the undefined-behaviour sanitizer looks on ---- */

TE_TEST(p13_sizes_at_the_end_of_64_bits) {
    te_ctx *te = test_context("cpu");
    const int64_t huge = (int64_t)1 << 55, half = INT64_MAX / 2 + 1;
    te_tensor *none = te_tensor_zeros(te, TE_F32, SHAPE(0, 4));
    CHECK(!te_tensor_view(none, SHAPE(0, huge, huge)));
    CHECK_ERROR(te, TE_ERR_SHAPE, "te_tensor_view");
    CHECK(!te_tensor_view(none, SHAPE(huge, 0, huge)));
    te_clear_error(te);
    te_tensor *far = te_tensor_view(none, SHAPE(0, huge));
    CHECK(far && te_tensor_numel(far) == 0);
    /* positions */
    te_tensor *x = te_tensor_full(te, TE_F32, SHAPE(3, 1, 2, 4), 1);
    CHECK(!te_apply_rotary_pos_emb(x, &(te_rotary_desc){.position_offset = INT64_MAX}, TE_SBHD));
    CHECK_ERROR(te, TE_ERR_INVALID, "position_offset is 9223372036854775807");
    CHECK(!te_apply_rotary_pos_emb(x, &(te_rotary_desc){.position_offset = INT64_MIN}, TE_SBHD));
    te_clear_error(te);
    CHECK(te_apply_rotary_pos_emb(x, &(te_rotary_desc){.position_offset = -((int64_t)1 << 53)}, TE_SBHD) != NULL);
    te_tensor *wide = te_tensor_zeros(te, TE_F32, SHAPE(0, 1, 2, (int64_t)1 << 40));
    te_apply_rotary_pos_emb(wide, NULL, TE_SBHD);
    te_clear_error(te);
    /* modules */
    te_layernorm_mlp_desc mlp = {.hidden_size = 1, .ffn_hidden_size = half, .activation = TE_SWIGLU};
    CHECK(!te_layernorm_mlp_create(te, &mlp));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_layernorm_mlp_create: sizes 1 and 4611686018427387904; both must be at least 1 and less than 2^62");
    CHECK(!te_transformer_layer_create(te, &(te_transformer_layer_desc){.hidden_size = 2, .ffn_hidden_size = half, .attention.num_attention_heads = 1, .activation = TE_SWIGLU}));
    te_clear_error(te);
    CHECK(!te_multihead_attention_create(te, &(te_multihead_attention_desc){.hidden_size = 8, .attention.num_attention_heads = 2, .attention.kv_channels = half}));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_multihead_attention_create");
    CHECK(!te_multihead_attention_create(te, &(te_multihead_attention_desc){.hidden_size = INT64_MAX, .attention.num_attention_heads = 1}));
    te_clear_error(te);
    CHECK(!te_multihead_attention_create(te, &(te_multihead_attention_desc){.hidden_size = 8, .attention.num_attention_heads = INT32_MAX, .attention.kv_channels = (int64_t)1 << 40}));
    te_clear_error(te);
    CHECK(!te_linear_create(te, &(te_linear_desc){.in_features = INT64_MAX, .out_features = INT64_MAX}));
    te_clear_error(te);
    /* nothing at NULL */
    te_tensor *ids = te_tensor_zeros(te, TE_I32, SHAPE(0));
    CHECK(te_embedding_lookup(te_tensor_zeros(te, TE_F32, SHAPE(5, 0)), te_tensor_full(te, TE_I32, SHAPE(3), 9)) != NULL);
    CHECK(te_embedding_lookup(te_tensor_zeros(te, TE_F32, SHAPE(5, 4)), ids) != NULL);
    te_op_transpose_args turn = {.src = te_tensor_zeros(te, TE_F4E2M1, SHAPE(0, 4)), .dst = te_tensor_zeros(te, TE_F4E2M1, SHAPE(4, 0)), .columns = 4};
    CHECK(te_op_transpose(te, &turn) == TE_OK);
    CHECK_OK(te);
}

/* ---- 13: deep trees ---- */

static const te_module_class link_class = {"Link", 0, mine_forward, NULL, NULL};
static bool count_module(void *user, te_module *m) { return (void)m, ++*(int *)user, true; }
static bool longest_path(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)m, (void)x, (void)kind;
    if (strlen(path) > *(size_t *)user) *(size_t *)user = strlen(path);
    return true;
}
TE_TEST(p13_deep_trees_are_refused) {
    te_ctx *te = test_context("cpu");
    te_module *root = te_module_create(te, &link_class, "root"), *deepest = root;
    int made = 1, visited = 0;
    for (; made < 20000; made++) {
        te_module *next = te_module_create(te, &link_class, "a");
        if (!te_module_add_child(deepest, "a", next)) {
            te_module_destroy(next);
            break;
        }
        deepest = next;
    }
    CHECK_EQ_INT(made, TE_MAX_MODULE_DEPTH);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_module_add_child: a has 1 level, and a is at level 256; a tree has at most 256 (TE_MAX_MODULE_DEPTH)");
    /* all walks of the deepest tree that there may be */
    te_module_add_parameter(deepest, "w", te_tensor_zeros(te, TE_F32, SHAPE(2)));
    char path[1024], *text = (char *)test_alloc(1 << 20);
    size_t longest = 0;
    CHECK_EQ_INT(strlen(te_module_path(deepest, path, sizeof path)), 2 * (TE_MAX_MODULE_DEPTH - 1) - 1);
    CHECK(te_module_find(root, path) == deepest);
    CHECK(te_module_visit(root, count_module, &visited));
    CHECK_EQ_INT(visited, TE_MAX_MODULE_DEPTH);
    CHECK(te_module_visit_tensors(root, longest_path, &longest));
    CHECK_EQ_INT(longest, 2 * (TE_MAX_MODULE_DEPTH - 1) + 1);
    CHECK_EQ_INT(te_module_num_parameters(root), 2);
    te_module_set_requires_grad(root, false);
    te_module_train(root, false);
    CHECK(!te_module_is_training(deepest));
    CHECK(te_module_print(root, text, 1 << 20) > 256 * 256);
    /* from below: the sum counts, and a place that is free again can be taken again */
    te_module *upper = te_module_create(te, &link_class, "upper");
    CHECK(!te_module_add_child(upper, "root", root));
    CHECK_ERROR(te, TE_ERR_INVALID, "root has 256 levels, and upper is at level 1;");
    te_module_destroy(deepest);
    CHECK(te_module_add_child(upper, "root", root) == root);
    CHECK_OK(te);
    te_module_destroy(upper);
}

/* ---- 18: fork ---- */

/* Runs fn in a child, which has 20 seconds; what it prints comes out here. 0 if the child said that all was well. */
static int in_a_child(int (*fn)(te_ctx *te), te_ctx *te) {
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        signal(SIGABRT, SIG_DFL);
        alarm(20);
        int line = fn(te);
        fflush(stdout);
        _exit(line ? 1 : 0);
    }
    if (child < 0 || waitpid(child, &status, 0) != child) return -1;
    if (WIFSIGNALED(status)) test_fail(__FILE__, __LINE__, "the child was ended by signal %d%s", WTERMSIG(status), WTERMSIG(status) == SIGALRM ? ": it hung" : "");
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}
/* In a child, where test_fail of the parent's would be lost. */
#define EXPECT(cond)                                                                                                  \
    do {                                                                                                              \
        if (!(cond)) return printf("  %s:%d, in the child: %s  (%s)\n", __FILE__, __LINE__, #cond, te_error(te)), 1;    \
    } while (0)
#define EXPECT_FORKED(call)                                                                                            \
    do {                                                                                                              \
        call;                                                                                                         \
        EXPECT(te_error_code(te) == TE_ERR_STATE && strstr(te_error(te), "create contexts after fork"));               \
        te_clear_error(te);                                                                                           \
    } while (0)

static struct {
    te_module *m;
    te_optimizer *adam;
    te_graph *graph;
    te_tensor *x, *y, *loss;
    te_group *group;
    te_thread_hub *hub;
    const char *path, *saved;
} family;

static int use_all(te_ctx *te) {
    float host[4];
    char made[64], used[64];
    snprintf(made, sizeof made, "created in process %lld", (long long)getppid());
    snprintf(used, sizeof used, "used in process %lld", (long long)getpid());
    EXPECT(!te_add(family.x, family.x));
    EXPECT(strstr(te_error(te), made) && strstr(te_error(te), used));
    te_clear_error(te);
    EXPECT_FORKED(te_scale(family.x, 2));
    EXPECT_FORKED(te_forward(family.m, family.x));
    EXPECT_FORKED(te_backward(family.loss));
    EXPECT_FORKED(te_optimizer_step(family.adam));
    EXPECT_FORKED(te_graph_launch(family.graph));
    EXPECT_FORKED(te_synchronize(te));
    EXPECT_FORKED(te_tensor_item(family.loss));
    EXPECT_FORKED(te_tensor_to_host(family.loss, host));
    EXPECT_FORKED(te_tensor_copy_from_host(family.loss, host));
    EXPECT_FORKED(te_tensor_zeros(te, TE_F32, SHAPE(4)));
    EXPECT_FORKED(te_tensor_full(te, TE_F32, SHAPE(1 << 20), 1));
    EXPECT_FORKED(te_linear_create(te, &(te_linear_desc){.in_features = 4, .out_features = 4}));
    EXPECT_FORKED(te_graph_begin(te));
    EXPECT_FORKED(te_all_reduce(family.group, family.loss, TE_REDUCE_SUM));
    EXPECT_FORKED(te_barrier(family.group));
    EXPECT_FORKED(te_model_save(te, family.path, family.m, family.adam, NULL, 0));
    EXPECT_FORKED(te_model_load(te, family.saved, family.m, family.adam));
    char report[4096];
    te_report(te, report, sizeof report);
    return 0;
}
static int destroy_all(te_ctx *te) {
    te_graph_destroy(family.graph);
    te_optimizer_destroy(family.adam);
    te_module_destroy(family.m);
    te_tensor_release(family.x);
    te_tensor_release(family.y);
    te_tensor_release(family.loss);
    te_group_destroy(family.group);
    te_ctx_destroy(te);
    te_thread_hub_destroy(family.hub);
    return 0;
}
static int destroy_the_context(te_ctx *te) { return te_ctx_destroy(te), 0; }
static int own_context(te_ctx *te) {
    te = te_ctx_create(&(te_ctx_desc){.device = "cpu", .cpu_threads = 4, .log = test__log});
    EXPECT(te_ok(te));
    te_scope_begin(te);
    te_tensor *x = te_tensor_full(te, TE_F32, SHAPE(1 << 20), 1);
    EXPECT(te_tensor_item(te_sum_all(te_add(x, x))) == 2 << 20);
    te_scope_end(te);
    te_ctx_destroy(te);
    return 0;
}
static int own_gpu(te_ctx *te) {
    te = te_ctx_create(&(te_ctx_desc){.device = "cuda:0", .log = test__log});
    EXPECT(te_error_code(te) == TE_ERR_STATE && strstr(te_error(te), "the driver was opened before this process was forked off"));
    te_ctx_destroy(te);
    return 0;
}
static te_tensor *family_step(void) {
    te_tensor *loss = te_mean_all(te_forward(family.m, family.x));
    te_backward(loss);
    te_optimizer_step(family.adam);
    return loss;
}
static void found_a_family(te_ctx *te) {
    memset(&family, 0, sizeof family);
    family.hub = te_thread_hub_create(2); /* nobody else joins: a collective that is let through waits for ever */
    family.group = te_thread_group_create(te, family.hub, 0);
    family.path = test_path("never");
    family.saved = test_path("saved");
    family.m = te_linear_create(te, &(te_linear_desc){.in_features = 64, .out_features = 64, .gemm.params_dtype = TE_F32});
    family.adam = te_fused_adam_create(te, family.m, NULL);
    family.x = te_tensor_retain(te_tensor_full(te, TE_F32, SHAPE(2048, 64), 1));
    family_step();
    te_graph_begin(te);
    family_step();
    family.graph = te_graph_end(te);
    te_graph_launch(family.graph);
    family.y = te_tensor_retain(te_forward(family.m, family.x));
    family.loss = te_tensor_retain(te_mean_all(family.y));
    te_model_save(te, family.saved, family.m, family.adam, NULL, 0);
}
static void in_children(const char *device) {
    te_ctx *te = te_ctx_create(&(te_ctx_desc){.device = device, .cpu_threads = 4, .log = test__log});
    te_scope_begin(te);
    found_a_family(te);
    CHECK_OK(te);
    CHECK_EQ_INT(in_a_child(use_all, te), 0);
    CHECK(access(family.path, F_OK) != 0);
    CHECK_EQ_INT(in_a_child(destroy_all, te), 0);
    CHECK_EQ_INT(in_a_child(destroy_the_context, te), 0);
    /* ThreadSanitizer ends a process that starts threads after it was forked from one that had them. */
    if (test_every(2) == 1) CHECK_EQ_INT(in_a_child(own_context, te), 0);
    if (te_ctx_is_cuda(te)) CHECK_EQ_INT(in_a_child(own_gpu, te), 0);
    /* the parent has not noticed */
    CHECK(isfinite(te_tensor_item(family_step())) && te_graph_launch(family.graph) == TE_OK);
    CHECK_OK(te);
    destroy_all(te);
}
TE_TEST(p18_a_context_of_before_a_fork_gives_an_error) { in_children("cpu"); }
TE_TEST(p18_a_context_of_before_a_fork_gives_an_error_on_a_gpu) {
    if (test_no_gpu()) SKIP(test_no_gpu());
    in_children("cuda:0");
}
