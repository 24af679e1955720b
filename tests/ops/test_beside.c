/* tests/ops/test_beside.c: kernels beside collectives (te_ctx.flights): launches that leave room, and the same bits. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"

static void beside_begin(te__plan *p, te_ctx *te, int beside) {
    te__plan_begin(p, te);
    p->explain = true;
    p->sm = 90;
    p->num_sms = 132;
    p->hopper = p->edits_maps = true;
    p->beside = beside;
}
static unsigned beside_blocks(te_ctx *te, int64_t m, int64_t n, int64_t k, int beside) {
    static uint64_t storage[32]; /* nobody reads it. The choice of a tile asks whether rows start at multiples of 32 bytes */
    char *data = (char *)storage + (64 - (uintptr_t)storage % 64) % 64;
    te_op_gemm_args a = {0};
    te__plan p;
    unsigned blocks = 0;
    a.a = te_tensor_wrap(te, TE_BF16, SHAPE(m, k), data, NULL, NULL);
    a.b = te_tensor_wrap(te, TE_BF16, SHAPE(n, k), data, NULL, NULL);
    a.d = te_tensor_wrap(te, TE_BF16, SHAPE(m, n), data, NULL, NULL);
    a.m = m, a.n = n, a.k = k;
    a.b_transposed = true;
    beside_begin(&p, te, beside);
    CHECK_EQ_INT(te__cuda_plan_gemm(&p, &a), TE_OK);
    CHECK(p.num_launches > 0 && !strcmp(p.launch[0].kernel, "gemm_hopper"));
    if (p.num_launches) blocks = p.launch[0].grid[0];
    te__plan_end(&p);
    return blocks;
}
/* 256 tiles of 128 x 256, and 1024. */
TE_TEST(beside_products) {
    te_ctx *te = test_context("cpu");
    if (!te) return;
    CHECK_EQ_INT(beside_blocks(te, 4096, 2048, 2048, 0), 132);
    CHECK_EQ_INT(beside_blocks(te, 4096, 8192, 2048, 0), 132);
    CHECK_EQ_INT(beside_blocks(te, 4096, 2048, 2048, 32), 256);
    CHECK_EQ_INT(beside_blocks(te, 4096, 8192, 2048, 32), 512);
    CHECK_EQ_INT(beside_blocks(te, 256, 2048, 2048, 32), beside_blocks(te, 256, 2048, 2048, 0)); /* fewer than clusters */
    CHECK_OK(te);
}
/* A launch whose blocks wait for each other begins when all have room: beside collectives it has fewer blocks, or is two
 * launches. */
TE_TEST(beside_at_once) {
    te_ctx *te = test_context("cpu");
    if (!te) return;
    te_op_fp8_quantize_args q = {0};
    te_norm_bwd_args r = {0};
    te_tensor *x = te_tensor_empty(te, TE_BF16, SHAPE(4096, 4096)), *w = te_tensor_empty(te, TE_BF16, SHAPE(4096));
    unsigned blocks[2];
    q.x = x, q.row = te_tensor_empty(te, TE_F8E4M3, SHAPE(4096, 4096));
    q.scale = te_tensor_empty(te, TE_F32, SHAPE(1)), q.scale_inv = te_tensor_empty(te, TE_F32, SHAPE(1));
    q.amax = te_tensor_empty(te, TE_F32, SHAPE(1));
    q.current = true;
    r.dy = r.x = x, r.gamma = w, r.rstd = te_tensor_empty(te, TE_F32, SHAPE(4096));
    r.dx = te_tensor_empty(te, TE_BF16, SHAPE(4096, 4096)), r.dgamma = te_tensor_empty(te, TE_BF16, SHAPE(4096));
    for (int i = 0; i < 2; i++) {
        te__plan p;
        beside_begin(&p, te, 32 * i);
        CHECK_EQ_INT(te__cuda_plan_fp8_quantize(&p, &q), TE_OK);
        CHECK(p.num_launches == 1 && p.launch[0].cooperative);
        blocks[i] = p.launch[0].grid[0];
        te__plan_end(&p);
        beside_begin(&p, te, 32 * i);
        CHECK_EQ_INT(te__cuda_plan_rmsnorm_bwd(&p, &r), TE_OK);
        CHECK_EQ_INT(p.num_launches, 1 + i);
        CHECK_EQ_INT(p.launch[0].cooperative, !i);
        te__plan_end(&p);
    }
    CHECK(blocks[0] % 132 == 0 && blocks[1] == blocks[0] / 132 * 100);
    CHECK_OK(te);
}

/* A checksum of the gradients of m and what is in it. */
static uint64_t beside_gradients(te_module *m, uint64_t hash) {
    for (int i = 0; i < m->num_entries; i++) {
        te_tensor *grad = m->entries[i].kind == TE_ENTRY_PARAMETER ? te_tensor_grad(m->entries[i].tensor) : NULL;
        if (grad) hash = te__hash64(test_read(grad), (size_t)te_tensor_numel(grad) * sizeof(float), hash + 1);
    }
    for (int i = 0; i < te_module_num_children(m); i++) hash = beside_gradients(te_module_child(m, i), hash);
    return hash;
}
/* A layer's output and gradients, bit for bit. */
TE_TEST(gpu_beside_bits) {
    if (test_no_gpu()) SKIP(test_no_gpu());
    te_ctx *te = test_context("cuda:0");
    const int64_t tokens = 2048, hidden = 1024;
    te_recipe recipes[3] = {te_recipe_current_scaling(), te_recipe_nvfp4(), te_recipe_mxfp8()};
    for (int i = -1; i < COUNT(recipes); i++) {
        te_transformer_layer_desc desc = {0};
        float *out[2], *dx[2];
        uint64_t sum[2];
        test_case("recipe %d", i);
        desc.hidden_size = hidden, desc.ffn_hidden_size = 4 * hidden, desc.attention.num_attention_heads = 8;
        desc.attention.attn_mask_type = TE_MASK_CAUSAL, desc.norm.normalization = TE_RMSNORM;
        te_seed(te, 3);
        te_module *m = te_transformer_layer_create(te, &desc);
        te_tensor *x = te_tensor_set_requires_grad(te_tensor_normal(te, TE_BF16, SHAPE(tokens, 1, hidden), 0, 1), true);
        te_tensor *dy = te_tensor_normal(te, TE_BF16, SHAPE(tokens, 1, hidden), 0, 1);
        REQUIRE_OK(te);
        for (int k = 0; k < 2; k++) {
            te->flights = k;
            te_seed(te, 4);
            te_autocast_desc cast = {0};
            if (i >= 0) cast.recipe = &recipes[i], te_autocast_begin(te, &cast);
            te_tensor *y = te_forward(m, x);
            if (i >= 0) te_autocast_end(te);
            te_backward_from(y, dy);
            te->flights = 0;
            REQUIRE_OK(te);
            out[k] = test_read(y), dx[k] = test_read(te_tensor_grad(x)), sum[k] = beside_gradients(m, 0);
            te_module_zero_grad(m);
            te_tensor_zero_grad(x);
        }
        CHECK_BYTES("the output", out[1], out[0], (size_t)(tokens * hidden) * sizeof(float));
        CHECK_BYTES("the input's gradient", dx[1], dx[0], (size_t)(tokens * hidden) * sizeof(float));
        CHECK(sum[0] == sum[1] && sum[0]);
        te_module_destroy(m);
    }
    CHECK_OK(te);
}
