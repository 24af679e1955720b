/* tests/mend/test_bytes.c: recipes whose padding differs, 4-bit formats on every path from shape to bytes, copies whose sides share memory, what a
 * custom recipe's factory is told. Through the public half alone; test_bytes_inside.c looks behind it. */
#include "../dist/ranks.h"

/* ---- 5: recipes are compared by their fields -------------------------------------------------------------------- */

/* A delayed recipe in memory that was full of `fill`: as one on the stack is, padding is whatever stood there. */
static void recipe_over(te_recipe *r, int fill) {
    memset(r, fill, sizeof *r);
    r->kind = TE_RECIPE_DELAYED;
    r->format = TE_FORMAT_DEFAULT;
    r->backward_override = TE_BACKWARD_QUANTIZED;
    r->split_fprop = r->split_dgrad = r->split_wgrad = TE_DEFAULT;
    r->delayed.margin = 0;
    r->delayed.amax_history_len = 4;
    r->delayed.amax_algo = TE_AMAX_MAX;
    r->delayed.amax_fn = NULL;
    r->delayed.scale_fn = NULL;
    r->delayed.user = NULL;
    memset(&r->delayed.no_reduce_amax, 0, 1);
    memset(&r->fp8_dpa, 0, 1);
    memset(&r->fp8_mha, 0, 1);
    memset(&r->current.power_of_two_scales, 0, 1);
    r->amax_epsilon = 0;
    r->block.x_block_scaling_dim = r->block.w_block_scaling_dim = r->block.grad_block_scaling_dim = 0;
    memset(&r->block.fp32_scales, 0, 1);
    memset(&r->mxfp8.quantization_2d, 0, sizeof r->mxfp8.quantization_2d);
    memset(&r->nvfp4.rht, 0, sizeof r->nvfp4.rht);
    memset(&r->nvfp4.stochastic_rounding, 0, sizeof r->nvfp4.stochastic_rounding);
    memset(&r->nvfp4.quantization_2d, 0, sizeof r->nvfp4.quantization_2d);
    memset(&r->nvfp4.row_scaled_activation, 0, 1);
    r->nvfp4.four_over_six = TE_NVFP4_4OVER6_NONE;
    memset(&r->nvfp4.four_over_six_mse, 0, 1);
    r->nvfp4.four_over_six_e4m3_256 = TE_NVFP4_E4M3_256_DEFAULT;
    r->custom.factory = NULL;
    r->custom.user = NULL;
}

static te_module *plain_linear(te_ctx *te) {
    te_linear_desc d = {0};
    d.in_features = d.out_features = 32;
    d.gemm.no_bias = true;
    return te_linear_create(te, &d);
}
static uint64_t launches(te_ctx *te) { return te_jit_get_stats(te).launches; }

static uint64_t forward_under(te_ctx *te, te_module *m, te_tensor *x, const te_recipe *r, te_microbatch micro) {
    te_autocast_desc cast = {0};
    te_forward_args f = {0};
    uint64_t before = launches(te);
    cast.recipe = r;
    f.input = x;
    f.is_first_microbatch = micro;
    te_autocast_begin(te, &cast);
    te_forward_with(m, &f);
    te_autocast_end(te);
    return launches(te) - before;
}

TE_TEST_DEVICES(p05_kept_weights_know_a_recipe_by_its_fields) {
    te_recipe first, later;
    te_module *m = plain_linear(te);
    te_tensor *x = test_tensor(te, TE_BF16, SHAPE(4, 32), test_normal(128, 3));
    recipe_over(&first, 0xA5);
    recipe_over(&later, 0x5A);
    forward_under(te, m, x, &first, TE_MICROBATCH_NONE); /* makes the scales */
    uint64_t made = forward_under(te, m, x, &first, TE_MICROBATCH_FIRST);
    uint64_t kept = forward_under(te, m, x, &first, TE_MICROBATCH_LATER);
    CHECK(kept < made); /* the weight is not cast again */
    CHECK_EQ_INT(forward_under(te, m, x, &later, TE_MICROBATCH_LATER), kept);
    later.delayed.margin = 1; /* another recipe: the kept weight is not its own */
    CHECK_EQ_INT(forward_under(te, m, x, &later, TE_MICROBATCH_LATER), made);
    CHECK_OK(te);
    te_module_destroy(m);
}

/* Two modules run under equal recipes: their scales are updated in one launch, and in one collective on every rank. */
static uint64_t two_regions(te_ctx *te, te_module *const *m, te_tensor *x, const te_recipe *outer, const te_recipe *inner, te_group *group) {
    te_autocast_desc cast = {0};
    uint64_t before = launches(te);
    cast.amax_group = group;
    cast.recipe = outer;
    te_autocast_begin(te, &cast);
    te_forward(m[0], x);
    cast.recipe = inner;
    te_autocast_begin(te, &cast);
    te_forward(m[1], x);
    te_autocast_end(te);
    te_autocast_end(te);
    return launches(te) - before;
}

TE_TEST_DEVICES(p05_equal_recipes_are_updated_together) {
    te_recipe a, b;
    te_module *m[2] = {plain_linear(te), plain_linear(te)};
    te_tensor *x = test_tensor(te, TE_BF16, SHAPE(4, 32), test_normal(128, 3));
    recipe_over(&a, 0xA5);
    recipe_over(&b, 0x5A);
    two_regions(te, m, x, &a, &a, NULL);
    uint64_t together = two_regions(te, m, x, &a, &a, NULL);
    CHECK_EQ_INT(two_regions(te, m, x, &a, &b, NULL), together);
    b.delayed.amax_algo = TE_AMAX_MOST_RECENT;
    CHECK_EQ_INT(two_regions(te, m, x, &a, &b, NULL), together + 1);
    CHECK_OK(te);
    for (int i = 0; i < 2; i++) te_module_destroy(m[i]);
}

/* Rank 1 alone has other padding. */
static void rank_regions(rank_state *s) {
    te_recipe a, b;
    te_module *m[2] = {plain_linear(s->te), plain_linear(s->te)};
    te_tensor *x = te_tensor_full(s->te, TE_BF16, SHAPE(4, 32), 1 + s->rank);
    recipe_over(&a, 0xA5);
    recipe_over(&b, s->rank == 1 ? 0x5A : 0xA5);
    for (int i = 0; i < 2; i++) two_regions(s->te, m, x, &a, &b, s->group);
    EXPECT(s, te_ok(s->te));
    te_clear_error(s->te);
    for (int i = 0; i < 2; i++) te_module_destroy(m[i]);
}
TE_TEST(p05_ranks_agree_whatever_their_padding) { run_ranks(2, rank_regions, NULL); }

/* ---- 6: rows of 4-bit formats fill whole bytes ------------------------------------------------------------------ */

TE_TEST_DEVICES(p06_a_view_of_e2m1_keeps_its_bytes) {
    te_tensor *x = te_tensor_zeros(te, TE_F4E2M1, SHAPE(62, 128));
    CHECK_EQ_INT(te_tensor_bytes(x), 62 * 64);
    CHECK(!te_tensor_view(x, SHAPE(-1, 1))); /* would be a byte for each of 7,936 elements */
    CHECK_ERROR(te, TE_ERR_SHAPE, "[62, 128] of e2m1 has 3968 bytes and [7936, 1] 7936");
    CHECK(!te_tensor_view(te_tensor_zeros(te, TE_F4E2M1, SHAPE(4, 3)), SHAPE(12))); /* fewer are no better: the rows' padding would be elements */
    CHECK_ERROR(te, TE_ERR_SHAPE, "[4, 3] of e2m1 has 8 bytes and [12] 6");
    CHECK(te_tensor_view(x, SHAPE(31, 2, 128)) && te_tensor_view(x, SHAPE(-1)) && te_tensor_view(x, SHAPE(-1, 2)));
    te_tensor *odd = te_tensor_zeros(te, TE_F4E2M1, SHAPE(4, 3));
    CHECK(te_tensor_view(odd, SHAPE(2, 2, 3)) && te_tensor_view(odd, SHAPE(-1, 3)));
    te_tensor *none = te_tensor_zeros(te, TE_F4E2M1, SHAPE(0, 3));
    CHECK(te_tensor_view(none, SHAPE(3, 0)) && te_tensor_bytes(none) == 0);
    CHECK_OK(te);
}

/* Each size of the last dimension, and no dimension at all: bytes there, back, in memory of the user's, in a file. */
TE_TEST_DEVICES(p06_e2m1_round_trips) {
    uint8_t host[64], back[64], all[64];
    const int64_t shapes[][3] = {{0, 0, 0}, {1, 1, 0}, {1, 7, 0}, {2, 3, 5}, {2, 3, 4}, {2, 0, 5}, {2, 5, 0}, {2, 1, 1}};
    for (int i = 0; i < COUNT(shapes); i++) {
        int ndim = (int)shapes[i][0];
        const int64_t *shape = shapes[i] + 1;
        size_t rows = ndim == 2 ? (size_t)shape[0] : 1, bytes = rows * (size_t)(((ndim ? shape[ndim - 1] : 1) + 1) / 2);
        test_case("%d dimensions, %lld, %lld", ndim, (long long)shape[0], (long long)shape[1]);
        for (int k = 0; k < 64; k++) host[k] = (uint8_t)(k * 37 + 11);
        memset(back, 0xEE, sizeof back);
        te_tensor *x = te_tensor_from_host(te, TE_F4E2M1, ndim, shape, host);
        REQUIRE_OK(te);
        CHECK_EQ_INT(te_tensor_bytes(x), bytes);
        CHECK_EQ_INT(te_tensor_to_host(x, back), TE_OK);
        CHECK(memcmp(back, host, bytes) == 0 && back[bytes] == 0xEE);
        te_tensor *memory = te_tensor_full(te, TE_U8, SHAPE(64), 0xEE); /* in the middle of other bytes */
        te_tensor *in = te_tensor_wrap(te, TE_F4E2M1, ndim, shape, (char *)te_tensor_data(memory) + 16, NULL, NULL);
        CHECK_EQ_INT(te_tensor_copy_from_host(in, host), TE_OK);
        te_tensor_to_host(memory, all);
        for (size_t k = 0; k < 64; k++) CHECK(all[k] == (k >= 16 && k < 16 + bytes ? host[k - 16] : 0xEE));
        CHECK_OK(te);
        /* as numbers: the even element in the low half, each row from a byte of its own on */
        static const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
        int64_t n = te_tensor_numel(x), cols = ndim ? shape[ndim - 1] : 1;
        const float *got = test_read(x);
        CHECK_OK(te);
        for (int64_t k = 0; k < n; k++) {
            int code = host[k / cols * ((cols + 1) / 2) + k % cols / 2] >> k % cols % 2 * 4 & 15;
            CHECK_MSG(got[k] == (code & 8 ? -values[code & 7] : values[code & 7]), "element %lld is %g", (long long)k, (double)got[k]);
        }
        if (n == 1) CHECK(te_tensor_item(x) == (double)got[0]);
    }
    CHECK_OK(te);
}

TE_TEST(p06_e2m1_in_files) {
    te_ctx *te = test_context("cpu");
    const char *path = test_path("codes.safetensors");
    uint8_t host[64], back[64];
    for (int k = 0; k < 64; k++) host[k] = (uint8_t)(k * 37 + 11);
    te_safetensors_item items[2] = {{"even", NULL}, {"none", NULL}};
    items[0].tensor = te_tensor_from_host(te, TE_F4E2M1, SHAPE(3, 4), host);
    items[1].tensor = te_tensor_zeros(te, TE_F4E2M1, SHAPE(0, 3));
    CHECK_EQ_INT(te_safetensors_write(te, path, items, 2, NULL, 0), TE_OK);
    te_safetensors *f = te_safetensors_open(te, path);
    CHECK_EQ_INT(te_tensor_to_host(te_safetensors_read(f, "even"), back), TE_OK);
    CHECK(memcmp(back, host, 6) == 0);
    CHECK_EQ_INT(te_tensor_bytes(te_safetensors_read(f, "none")), 0);
    te_safetensors_close(f);
    CHECK_OK(te);
    items[0].tensor = te_tensor_from_host(te, TE_F4E2M1, SHAPE(3, 3), host);
    CHECK(te_safetensors_write(te, path, items, 1, NULL, 0) != TE_OK);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "rows of odd length");
    items[0].tensor = te_tensor_from_host(te, TE_F4E2M1, 0, NULL, host);
    CHECK(te_safetensors_write(te, path, items, 1, NULL, 0) != TE_OK);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "rows of odd length");
}

/* Views that a nibble cannot give say why, and not that the elements do not exist. */
TE_TEST_DEVICES(p06_narrow_and_transpose_of_e2m1) {
    te_tensor *x = te_tensor_zeros(te, TE_F4E2M1, SHAPE(4, 6));
    CHECK(!te_tensor_narrow(x, 1, 1, 2));
    CHECK_ERROR(te, TE_ERR_DTYPE, "e2m1 has two elements a byte");
    CHECK(!te_tensor_transpose(x, 0, 1));
    CHECK_ERROR(te, TE_ERR_DTYPE, "e2m1 has two elements a byte");
    CHECK(te_tensor_copy(x, te_tensor_zeros(te, TE_F4E2M1, SHAPE(4, 6))) != TE_OK);
    CHECK_ERROR(te, TE_ERR_DTYPE, "is e2m1; f32, f16, bf16");
}

/* ---- 9: copies whose sides share memory ------------------------------------------------------------------------- */

enum { SIDE = 70 }; /* more than a tile, and none of whole ones */

/* x is f32 or bf16 [SIDE * SIDE], 0, 1, 2 .. 4899 modulo 251: every one a number of both. */
static te_tensor *counted(te_ctx *te, te_dtype dtype) {
    float *v = (float *)test_alloc(SIDE * SIDE * sizeof(float));
    for (int i = 0; i < SIDE * SIDE; i++) v[i] = (float)(i % 251);
    return test_tensor(te, dtype, SHAPE(SIDE * SIDE), v);
}
/* dst and src over x's memory, in the ways that users overlap them. */
typedef struct pair {
    te_tensor *dst, *src;
} pair;
enum { FORWARDS, BACKWARDS, TRANSPOSED, COLUMNS, ROWS_APART, SAME, TURNED_TWICE, PAIRS };
static pair overlapping(te_tensor *x, int way) {
    const int64_t square[2] = {SIDE, SIDE};
    te_tensor *m = te_tensor_view(x, 2, square), *t = te_tensor_transpose(m, 0, 1);
    int64_t n = SIDE * SIDE;
    switch (way) {
    case FORWARDS: return (pair){te_tensor_narrow(x, 0, 1, n - 1), te_tensor_narrow(x, 0, 0, n - 1)};
    case BACKWARDS: return (pair){te_tensor_narrow(x, 0, 0, n - 3), te_tensor_narrow(x, 0, 3, n - 3)};
    case TRANSPOSED: return (pair){m, t};
    case COLUMNS: return (pair){te_tensor_narrow(m, 1, 1, SIDE - 1), te_tensor_narrow(m, 1, 0, SIDE - 1)};
    case ROWS_APART: return (pair){te_tensor_narrow(m, 1, 0, 30), te_tensor_narrow(m, 1, 40, 30)}; /* interleaved: no element is of both */
    case SAME: return (pair){m, te_tensor_view(x, 2, square)};
    default: return (pair){t, te_tensor_transpose(te_tensor_view(x, 2, square), 0, 1)};
    }
}
/* The expected bytes of x: those of the same copy through memory of its own. */
static const float *wanted(te_ctx *te, te_dtype dtype, int way) {
    te_tensor *x = counted(te, dtype);
    pair p = overlapping(x, way);
    te_tensor *between = te_tensor_zeros(te, te_tensor_dtype(p.src), te_tensor_ndim(p.src), te_tensor_shape(p.src));
    te_tensor_copy(between, p.src);
    te_tensor_copy(p.dst, between);
    return test_read(x);
}

TE_TEST_DEVICES(p09_overlapping_copies_are_as_if_read_first) {
    for (int i = 0; i < 2 * PAIRS; i++) {
        te_dtype dtype = i < PAIRS ? TE_F32 : TE_BF16;
        te_tensor *x = counted(te, dtype);
        pair p = overlapping(x, i % PAIRS);
        test_case("way %d of %s", i % PAIRS, te_dtype_name(dtype));
        CHECK_EQ_INT(te_tensor_copy(p.dst, p.src), TE_OK);
        CHECK_TENSOR(x, wanted(te, dtype, i % PAIRS), 0, 0); /* numbers are moved, and none is computed */
        CHECK_OK(te);
    }
}

/* A view of x's memory in another format, as a program that lays its own memory out makes it. */
static te_tensor *over(te_tensor *x, te_dtype dtype, int64_t byte, int64_t n) {
    return te_tensor_wrap(te_tensor_ctx(x), dtype, SHAPE(n), (char *)te_tensor_data(x) + byte, NULL, NULL);
}
TE_TEST_DEVICES(p09_conversions_over_one_memory) {
    enum { N = 5003 };
    static const struct {
        te_dtype from, to;
        int64_t from_byte, to_byte;
    } ways[] = {{TE_BF16, TE_F32, 0, 0}, {TE_BF16, TE_F32, 2 * N / 4 * 4, 0}, {TE_F32, TE_BF16, 0, 0}, {TE_F32, TE_BF16, 0, 2 * N}, {TE_U8, TE_I64, 8, 0},
                {TE_I32, TE_F32, 0, 0}, {TE_F16, TE_BF16, 0, 0}, {TE_U8, TE_F16, 3, 0}};
    float *v = (float *)test_alloc(N * sizeof(float));
    for (int i = 0; i < N; i++) v[i] = (float)(i % 127);
    for (int i = 0; i < COUNT(ways); i++) {
        test_case("%s to %s", te_dtype_name(ways[i].from), te_dtype_name(ways[i].to));
        te_tensor *memory = te_tensor_zeros(te, TE_U8, SHAPE(8 * N + 64));
        te_tensor *src = over(memory, ways[i].from, ways[i].from_byte, N), *dst = over(memory, ways[i].to, ways[i].to_byte, N);
        te_tensor_copy(src, test_tensor(te, ways[i].from, SHAPE(N), v));
        CHECK_EQ_INT(te_tensor_copy(dst, src), TE_OK);
        CHECK_TENSOR(dst, v, 0, 0); /* integers below 127 are numbers of every format here */
        CHECK_OK(te);
    }
}

/* The raw operation, and launches of a graph that holds it. */
TE_TEST_DEVICES(p09_raw_copies_and_graphs) {
    for (int way = 0; way < PAIRS; way++) {
        te_tensor *x = counted(te, TE_BF16), *again = te_tensor_zeros(te, TE_BF16, SHAPE(SIDE * SIDE)), *start = counted(te, TE_BF16);
        pair p = overlapping(x, way), q = overlapping(again, way);
        te_op_copy_args args = {0};
        const float *want = wanted(te, TE_BF16, way);
        test_case("way %d", way);
        args.dst = p.dst;
        args.src = p.src;
        CHECK_EQ_INT(te_op_copy(te, &args), TE_OK);
        CHECK_TENSOR(x, want, 0, 0);
        te_graph_begin(te);
        te_tensor_copy(again, start);
        te_tensor_copy(q.dst, q.src);
        te_graph *g = te_graph_end(te);
        for (int i = 0; i < 2; i++) {
            te_graph_launch(g);
            CHECK_TENSOR(again, want, 0, 0);
        }
        te_graph_destroy(g);
        CHECK_OK(te);
    }
}

/* x onto x is nothing to do: no launch. */
TE_TEST_DEVICES(p09_the_same_view_is_nothing_to_do) {
    te_tensor *x = counted(te, TE_F32);
    for (int way = SAME; way <= TURNED_TWICE; way++) {
        pair p = overlapping(x, way);
        size_t before = te_memory_get_stats(te).allocs;
        CHECK_EQ_INT(te_tensor_copy(p.dst, p.src), TE_OK);
        CHECK_EQ_INT(te_memory_get_stats(te).allocs, before); /* and no memory on the way */
    }
    CHECK_TENSOR(x, test_read(counted(te, TE_F32)), 0, 0);
    te_tensor *bytes = over(x, TE_U8, 0, 100), *codes = over(x, TE_F8E4M3, 0, 100);
    CHECK_EQ_INT(te_tensor_copy(bytes, codes), TE_OK);
    CHECK_TENSOR(x, test_read(counted(te, TE_F32)), 0, 0);
    CHECK_OK(te);
}

/* ---- 11: every write is counted (test_bytes_inside.c has all operations) ------------------------------------------ */

TE_TEST_DEVICES(p11_losses_and_statistics_are_counted) {
    te_tensor *x = te_tensor_normal(te, TE_F32, SHAPE(6, 32), 0, 1), *t = te_tensor_normal(te, TE_F32, SHAPE(6, 32), 0, 1);
    te_tensor *gamma = te_tensor_full(te, TE_F32, SHAPE(32), 1), *out[4];
    uint64_t before[4];
    te_op_mse_fwd_args loss = {0};
    te_op_mse_bwd_args dx = {0};
    te_op_rmsnorm_fwd_args norm = {0};
    out[0] = loss.loss = te_tensor_zeros(te, TE_F32, SHAPE(1));
    out[1] = dx.dx = te_tensor_zeros(te, TE_F32, SHAPE(6, 32));
    out[2] = norm.y = te_tensor_zeros(te, TE_F32, SHAPE(6, 32));
    out[3] = norm.rstd = te_tensor_zeros(te, TE_F32, SHAPE(6));
    loss.x = dx.x = norm.x = x;
    loss.target = dx.target = t;
    dx.dloss = loss.loss;
    norm.gamma = gamma;
    for (int i = 0; i < 4; i++) before[i] = te_tensor_version(out[i]);
    te_op_mse_fwd(te, &loss);
    te_op_mse_bwd(te, &dx);
    te_op_rmsnorm_fwd(te, &norm);
    for (int i = 0; i < 4; i++) CHECK_MSG(te_tensor_version(out[i]) > before[i], "write %d is not counted", i);
    CHECK_OK(te);
}

/* ---- 12: a role carries the module's path ----------------------------------------------------------------------- */

typedef struct roles {
    char weights[16][128], others[32][128]; /* "path gemm" as the factory was told */
    int num_weights, num_others;
    bool preparing; /* weights are being stored */
} roles;
static te_result note_role(void *user, const te_quantizer_role *role, te_quantizer_desc *desc) {
    roles *r = (roles *)user;
    desc->kind = TE_QUANT_CURRENT;
    if (r->preparing && r->num_weights < 16) snprintf(r->weights[r->num_weights++], 128, "%s %s %d", role->module_type, role->name, role->gemm);
    if (!r->preparing && role->tensor_type == TE_TENSOR_WEIGHT && r->num_others < 32)
        snprintf(r->others[r->num_others++], 128, "%s %s %d", role->module_type, role->name, role->gemm);
    return TE_OK;
}
static te_result run_child(te_module *self, te_forward_args *args) {
    args->outputs.out = te_forward(te_module_child(self, 0), args->input);
    return te_error_code(te_module_ctx(self));
}
static bool see_stats(void *user, const te_quantizer_role *role, const te_quant_stats *stats) {
    roles *r = (roles *)user;
    (void)stats;
    if (role->tensor_type == TE_TENSOR_INPUT && r->num_others < 32)
        snprintf(r->others[r->num_others++], 128, "%s %s %d", role->module_type, role->name, role->gemm);
    return true;
}

/* The same words when weights are stored, when a module first runs, and when it is inspected. */
TE_TEST(p12_roles_carry_the_path_everywhere) {
    static const te_module_class cls = {"Root", 0, run_child, NULL, NULL};
    for (int norm = 0; norm < 2; norm++) {
        te_ctx *te = test_context("cpu");
        roles seen = {0}, inspected = {0};
        te_recipe recipe = te_recipe_custom(note_role, &seen);
        te_quantized_model_init_desc init = {0};
        te_transformer_layer_desc d = {0};
        te_autocast_desc cast = {0};
        cast.recipe = init.recipe = &recipe;
        d.hidden_size = d.ffn_hidden_size = 32;
        d.attention.num_attention_heads = 2;
        d.output_layernorm = norm == 1; /* the attention then begins with a plain Linear */
        d.name = "block";
        test_case("%s", norm ? "output_layernorm" : "input layernorm");
        te_quantized_model_init_begin(te, &init);
        seen.preparing = true;
        te_module *root = te_module_create(te, &cls, "root");
        te_module_add_child(root, NULL, te_transformer_layer_create(te, &d));
        seen.preparing = false;
        te_quantized_model_init_end(te);
        REQUIRE_OK(te);
        te_tensor *x = test_tensor(te, TE_BF16, SHAPE(4, 1, 32), test_normal(128, 3));
        te_autocast_begin(te, &cast);
        te_quant_inspect(te, true);
        te_forward(root, x);
        te_autocast_end(te);
        te_quant_stats_visit(te, see_stats, &inspected);
        REQUIRE_OK(te);
        CHECK_STR(seen.weights[0], norm ? "Linear block.self_attention.qkv 0" : "LayerNormLinear block.self_attention.layernorm_qkv 0");
        CHECK_EQ_INT(seen.num_weights, 4);
        CHECK_EQ_INT(seen.num_others, 4);
        for (int i = 0; i < 4; i++) {
            bool found = false, looked = false;
            for (int k = 0; k < 4; k++) found = found || strcmp(seen.weights[i], seen.others[k]) == 0;
            for (int k = 0; k < inspected.num_others; k++) looked = looked || strcmp(seen.weights[i], inspected.others[k]) == 0;
            CHECK_MSG(found, "\"%s\" when its weight was stored, and never so when it ran (\"%s\" ..)", seen.weights[i], seen.others[0]);
            CHECK_MSG(looked, "\"%s\" when its weight was stored, and never so when it was inspected", seen.weights[i]);
        }
        te_module_destroy(root);
    }
}

/* A module that stands alone is called by its name. */
TE_TEST(p12_a_module_alone_has_its_name_as_path) {
    te_ctx *te = test_context("cpu");
    roles seen = {0};
    te_recipe recipe = te_recipe_custom(note_role, &seen);
    te_quantized_model_init_desc init = {0};
    te_linear_desc d = {0};
    d.in_features = d.out_features = 16;
    d.name = "head";
    init.recipe = &recipe;
    te_quantized_model_init_begin(te, &init);
    seen.preparing = true;
    te_module *m = te_linear_create(te, &d);
    te_quantized_model_init_end(te);
    CHECK_STR(seen.weights[0], "Linear head 0");
    CHECK_OK(te);
    te_module_destroy(m);
}
