/* tests/core/test_described.c: shapes without memory, of te_tensor_describe: they reach no kernel, and are no gradients. */
#include "../te_test.h"

TE_TEST_DEVICES(described_tensors_reach_no_kernel) {
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
TE_TEST_DEVICES(described_tensors_are_no_gradients) {
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

TE_TEST(a_described_tensor_is_called_so) {
    te_ctx *te = test_context("cpu");
    te_tensor *x = te_tensor_describe(te, TE_BF16, SHAPE(2, 4));
    CHECK(!te_activate(x, TE_GELU, NULL));
    CHECK_ERROR(te, TE_ERR_STATE, "te_activate: the tensor [2, 4] was made by te_tensor_describe and has no memory: such tensors are for te_explain, and for modules that answer with a shape");
    CHECK(!te_tensor_view(x, SHAPE(8)));
    CHECK_ERROR(te, TE_ERR_STATE, "te_tensor_view: the tensor [2, 4] was made by te_tensor_describe");
}
