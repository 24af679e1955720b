/* tests/quant/test_nvfp4.c: NVFP4 in quantizers and layers: row-scaled copies, their products and training, a NaN on its way to the weight gradient. */
#include "../te_test.h"

/* Of x [64, 48] with a NaN in row 5 of column 3: the gradient of W[:, 3] is NaN, all else finite. */
TE_TEST_DEVICES(nvfp4_nan_reaches_the_weight_gradient) {
    enum { M = 64, K = 48, N = 32 };
    te_recipe recipe = te_recipe_nvfp4();
    te_linear_desc desc = {0};
    float *x = test_normal(M * K, 1);
    x[5 * K + 3] = NAN;
    desc.in_features = K, desc.out_features = N, desc.gemm.params_dtype = TE_BF16, desc.gemm.no_bias = true;
    te_module *linear = te_linear_create(te, &desc);
    REQUIRE_OK(te);
    te_tensor *in = test_tensor(te, TE_BF16, SHAPE(M, K), x);
    te_tensor_set_requires_grad(in, true);
    te_tensor *y = test_forward(linear, &recipe, in);
    te_backward_from(y, test_tensor(te, TE_BF16, SHAPE(M, N), test_normal(M * N, 2)));
    CHECK_OK(te);
    const float *dw = test_read(te_tensor_grad(te_module_parameter(linear, "weight"))), *out = test_read(y);
    int wrong = 0, lost = 0;
    for (int i = 0; i < N * K; i++) wrong += isnan(dw[i]) != (i % K == 3);
    for (int i = 0; i < M * N; i++) lost += isnan(out[i]) != (i / N == 5);
    CHECK_EQ_INT(wrong, 0);
    CHECK_EQ_INT(lost, 0);
    te_module_destroy(linear);
}

/* The column-wise copy of x is the row-wise copy of its transpose: an amax for each column, codes and scales. */
TE_TEST_DEVICES(row_scaled_column_has_an_amax_of_its_own) {
    static const int64_t shapes[][2] = {{48, 80}, {1, 33}, {33, 1}, {127, 129}, {256, 384}};
    for (int s = 0; s < COUNT(shapes); s++) {
        int64_t m = shapes[s][0], n = shapes[s][1];
        float *x = test_normal(m * n, 7), *t = test_copy(x, m * n);
        test_case("[%d, %d]", (int)m, (int)n);
        for (int64_t i = 0; i < m * n; i++) x[i] *= 1 + (float)(i % n % 7) * (float)(i / n % 5);
        for (int64_t i = 0; i < m * n; i++) t[i % n * m + i / n] = x[i];
        te_quantizer_desc desc = {.kind = TE_QUANT_NVFP4, .nvfp4.row_scaled = true};
        te_quantizer *q = te_quantizer_create(te, &desc);
        te_tensor *a = te_quantize(q, test_tensor(te, TE_BF16, SHAPE(m, n), x)), *b = te_quantize(q, test_tensor(te, TE_BF16, SHAPE(n, m), t));
        te_tensor *data[2], *scale[2], *amax[2] = {te_quantized_amax(a, TE_COLUMNWISE), te_quantized_amax(b, TE_ROWWISE)};
        te_quantized_view(a, TE_COLUMNWISE, &data[0], &scale[0]);
        te_quantized_view(b, TE_ROWWISE, &data[1], &scale[1]);
        REQUIRE_OK(te);
        CHECK_EQ_INT(te_tensor_numel(amax[0]), n);
        if (te_tensor_numel(amax[0]) == n) CHECK_BYTES("amax", test_read_bytes(amax[0]), test_read_bytes(amax[1]), (size_t)n * 4);
        CHECK_EQ_INT(te_tensor_bytes(data[0]), te_tensor_bytes(data[1]));
        CHECK_BYTES("codes", test_read_bytes(data[0]), test_read_bytes(data[1]), te_tensor_bytes(data[1]));
        CHECK_BYTES("scales", test_read_bytes(scale[0]), test_read_bytes(scale[1]), te_tensor_bytes(scale[1]));

        /* in place again, and read back from the columns alone */
        CHECK_EQ_INT(te_quantize_into(q, test_tensor(te, TE_BF16, SHAPE(m, n), x), a, NULL), TE_OK);
        CHECK_BYTES("codes in place", test_read_bytes(data[0]), test_read_bytes(data[1]), te_tensor_bytes(data[1]));
        te_tensor_update_usage(a, TE_COLUMNWISE);
        CHECK_ERROR_BELOW("y", test_read(te_dequantize(a, TE_F32)), x, m * n, 0.15); /* what 4 bits lose: about 0.1 */
        CHECK_OK(te);
        te_quantizer_destroy(q);
    }
}

/* dW = dy^T x by the codes of both columns is the product of what they decode to. */
TE_TEST_DEVICES(row_scaled_products_read_the_amaxes_of_columns) {
    enum { M = 96, K = 80, N = 48 };
    te_quantizer_desc plain = {.kind = TE_QUANT_NVFP4}, scaled = {.kind = TE_QUANT_NVFP4, .nvfp4.row_scaled = true};
    te_quantizer *of_dy = te_quantizer_create(te, &plain), *of_x = te_quantizer_create(te, &scaled);
    float *values = test_normal(M * K, 3);
    for (int i = 0; i < M * K; i++) values[i] *= (float)(1 << (i % K % 9)); /* columns of many sizes */
    te_tensor *dy = te_quantize(of_dy, test_tensor(te, TE_BF16, SHAPE(M, N), test_normal(M * N, 4)));
    te_tensor *x = te_quantize(of_x, test_tensor(te, TE_BF16, SHAPE(M, K), values)), *data[2], *scale[2];
    te_quantized_view(dy, TE_COLUMNWISE, &data[0], &scale[0]);
    te_quantized_view(x, TE_COLUMNWISE, &data[1], &scale[1]);
    REQUIRE_OK(te);
    te_op_gemm_args g = {0};
    CHECK_EQ_INT(te_tensor_numel(te_quantized_amax(x, TE_COLUMNWISE)), K);
    g.m = N, g.n = K, g.k = M;
    g.a = data[0], g.scale_a = scale[0], g.amax_a = te_quantized_amax(dy, TE_COLUMNWISE);
    g.b = data[1], g.scale_b = scale[1], g.amax_b = te_quantized_amax(x, TE_COLUMNWISE);
    g.b_transposed = true;
    g.scaling_a = g.scaling_b = TE_SCALING_NVFP4;
    g.d = test_guarded(te, TE_F32, SHAPE(N, K));
    te_op_gemm(te, &g);
    te_tensor_update_usage(dy, TE_COLUMNWISE);
    te_tensor_update_usage(x, TE_COLUMNWISE);
    const float *a = test_read(te_dequantize(dy, TE_F32)), *b = test_read(te_dequantize(x, TE_F32));
    float want[N * K];
    for (int i = 0; i < N; i++)
        for (int j = 0; j < K; j++) {
            double sum = 0;
            for (int k = 0; k < M; k++) sum += (double)a[k * N + i] * b[k * K + j];
            want[i * K + j] = (float)sum;
        }
    CHECK_ERROR_BELOW("dW", test_read(g.d), want, N * K, 1e-6); /* the same numbers, summed in f32 */
    CHECK_OK(te);
    te_quantizer_destroy(of_dy);
    te_quantizer_destroy(of_x);
}

/* A layer with row-scaled activations, with and without the transform: its gradients are those of high precision but for four bits. */
TE_TEST_DEVICES(a_layer_trains_with_row_scaled_activations) {
    enum { M = 128, K = 96, N = 64 };
    for (int rht = 0; rht < 2; rht++) {
        te_recipe recipe = te_recipe_nvfp4();
        te_linear_desc desc = {0};
        float *dw[2] = {NULL, NULL};
        recipe.nvfp4.row_scaled_activation = true;
        recipe.nvfp4.stochastic_rounding = TE_OFF;
        recipe.nvfp4.rht = !rht ? TE_OFF : TE_DEFAULT;
        desc.in_features = K, desc.out_features = N, desc.gemm.params_dtype = TE_BF16, desc.gemm.no_bias = true;
        te_module *linear = te_linear_create(te, &desc);
        for (int on = 0; on < 2; on++) {
            te_autocast_desc cast = {0};
            cast.recipe = &recipe;
            cast.disabled = !on;
            te_tensor *weight = te_module_parameter(linear, "weight");
            te_tensor_zero_grad(weight);
            te_autocast_begin(te, &cast);
            te_tensor *y = te_forward(linear, test_tensor(te, TE_BF16, SHAPE(M, K), test_normal(M * K, 5)));
            te_autocast_end(te);
            te_backward_from(y, test_tensor(te, TE_BF16, SHAPE(M, N), test_normal(M * N, 6)));
            REQUIRE_OK(te);
            dw[on] = test_copy(test_read(te_tensor_grad(weight)), N * K);
        }
        CHECK_ERROR_BELOW("dW", dw[1], dw[0], N * K, 0.2); /* both operands lose about 0.1: sqrt 2 of that, and some room */
        te_module_destroy(linear);
    }
}
