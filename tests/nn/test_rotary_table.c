/* test_rotary_table.c: rotations by a table of the caller's, as models with several positions a token have (mRoPE), and rotations of no channel: the formula written down again, modules against
 * their steps, forward and backward. */
#include "attention.h"

/* ---- mRoPE ----
 *
 * A token has a time, a row and a column. Of 64 pairs of channels the first 16 turn by the time, the next 24 by the row, the last 24 by the column, each at its frequency among all 64
 * (Wang et al. 2024, Qwen2-VL). */

enum { CHANNELS = 128, PAIRS = CHANNELS / 2, TOKENS = 7, HEADS = 2, GROUPS = 1, HIDDEN = 48 };
static const int sections[3] = {16, 24, 24};

static int place_of(int token, int b, int axis) { /* three of text, then an image of two columns; sequences begin elsewhere */
    const int text = token < 3 ? token : 3, image = token < 3 ? 0 : token - 3;
    return text + 5 * b + (axis == 0 ? 0 : axis == 1 ? image / 2 : image % 2);
}
static float angle_of(int token, int b, int pair) {
    const int axis = pair < sections[0] ? 0 : pair < sections[0] + sections[1] ? 1 : 2;
    return (float)place_of(token, b, axis) * (float)pow(10000.0, -2.0 * pair / CHANNELS);
}
/* [TOKENS, B, 1, CHANNELS] */
static te_tensor *mrope_table(te_ctx *te, te_dtype dtype, bool interleaved) {
    float *v = test_floats(TOKENS * B * CHANNELS);
    for (int i = 0; i < TOKENS * B * CHANNELS; i++) {
        const int channel = i % CHANNELS;
        v[i] = angle_of(i / CHANNELS / B, i / CHANNELS % B, interleaved ? channel / 2 : channel % PAIRS);
    }
    return test_tensor(te, dtype, SHAPE(TOKENS, B, 1, CHANNELS), v);
}
/* x [TOKENS, B, HEADS, CHANNELS], or b first, turned by the angles, or back. */
static float *mrope(const float *x, te_qkv_format format, bool interleaved, bool back) {
    float *y = test_floats(TOKENS * B * HEADS * CHANNELS);
    for (int row = 0; row < TOKENS * B; row++)
        for (int h = 0; h < HEADS; h++)
            for (int i = 0; i < PAIRS; i++) {
                const int token = format == TE_BSHD ? row % TOKENS : row / B, b = format == TE_BSHD ? row / TOKENS : row % B, at = (row * HEADS + h) * CHANNELS;
                const int u = at + (interleaved ? 2 * i : i), v = at + (interleaved ? 2 * i + 1 : i + PAIRS);
                const double angle = (double)angle_of(token, b, i), c = cos(angle), s = back ? -sin(angle) : sin(angle);
                y[u] = (float)(x[u] * c - x[v] * s);
                y[v] = (float)(x[v] * c + x[u] * s);
            }
    return y;
}

TE_TEST_DEVICES(mrope_by_a_table) {
    enum { N = TOKENS * B * HEADS * CHANNELS };
    for (int k = 0; k < 8; k++) {
        const bool interleaved = k & 1;
        const te_qkv_format format = k & 2 ? TE_BSHD : TE_SBHD;
        const te_dtype dtype = k & 4 ? TE_BF16 : TE_F32;
        const double rtol = dtype == TE_F32 ? 1e-6 : 8e-3; /* one rounding, and the neighbour where f32 and f64 round differently */
        te_rotary_desc rotary = {.freqs = mrope_table(te, TE_F32, interleaved), .interleaved = interleaved};
        float *values = test_rounded(dtype, test_normal(N, 3), N), *dy = test_rounded(dtype, test_normal(N, 4), N);
        te_tensor *x = format == TE_BSHD ? test_tensor(te, dtype, SHAPE(B, TOKENS, HEADS, CHANNELS), values) : test_tensor(te, dtype, SHAPE(TOKENS, B, HEADS, CHANNELS), values);
        test_case("interleaved=%d format=%d %s", interleaved, (int)format, te_dtype_name(dtype));
        te_tensor_set_requires_grad(x, true);
        te_tensor *y = te_apply_rotary_pos_emb(x, &rotary, format);
        REQUIRE_OK(te);
        te_backward_from(y, test_tensor(te, dtype, 4, te_tensor_shape(x), dy));
        CHECK_CLOSE("y", test_read(y), mrope(values, format, interleaved, false), N, rtol, 1e-6);
        CHECK_CLOSE("dx", test_read(te_tensor_grad(x)), mrope(dy, format, interleaved, true), N, rtol, 1e-6);
        rotary.attention_factor = 2; /* of cosine and sine: twice the rotation, exactly */
        float *twice = test_read(te_apply_rotary_pos_emb(te_tensor_detach(x), &rotary, format)), *once = test_read(y);
        for (int i = 0; i < N; i++) CHECK(twice[i] == 2 * once[i]);
    }
}

static void check_alike(te_ctx *te, const char *name, te_tensor *got, const float *want) {
    REQUIRE_OK(te);
    if (te_ctx_is_cuda(te)) CHECK_CLOSE(name, test_read(got), want, te_tensor_numel(got), 1e-6, 1e-6);
    else CHECK_BYTES(name, test_read(got), want, (size_t)te_tensor_numel(got) * sizeof(float));
}
/* A table by the positions 0, 1, 2 ... is RotaryPositionEmbedding itself; rows in another order are positions; packed tokens have a row each. On CUDA these are two kernels, and a compiler may
 * fuse the other one of two products: 1e-6. */
TE_TEST_DEVICES(a_table_of_places_is_the_usual_rotation) {
    enum { LONG = 12, N = TOKENS * B * HEADS * CHANNELS };
    static const int64_t places[TOKENS] = {4, 0, 11, 3, 3, 7, 1}, cu[3] = {0, TOKENS, 2 * TOKENS}, rows[2 * TOKENS] = {4, 0, 11, 3, 3, 7, 1, 4, 0, 11, 3, 3, 7, 1}, begin[B] = {2, 5};
    for (int interleaved = 0; interleaved < 2; interleaved++) {
        te_rotary_desc usual = {.base = 500, .interleaved = interleaved != 0}, table = {.interleaved = interleaved != 0};
        te_tensor *x = test_tensor(te, TE_F32, SHAPE(TOKENS, B, HEADS, CHANNELS), test_normal(N, 5));
        table.freqs = te_rope_freqs(te, &usual, CHANNELS, LONG, NULL);
        REQUIRE_OK(te);
        for (int k = 0; k < 4; k++) {
            usual.positions = table.positions = k == 1 ? test_i32(te, SHAPE(TOKENS), places) : NULL;
            usual.start_positions = table.start_positions = k == 2 ? test_i32(te, SHAPE(B), begin) : NULL;
            usual.position_offset = table.position_offset = k == 3 ? 5 : 0;
            test_case("interleaved=%d k=%d", interleaved, k);
            float *want = test_read(te_apply_rotary_pos_emb(x, &usual, TE_SBHD));
            check_alike(te, "y", te_apply_rotary_pos_emb(x, &table, TE_SBHD), want);
            REQUIRE_OK(te);
        }
        table.position_offset = 0;
        te_tensor *packed = te_tensor_view(x, SHAPE(2 * TOKENS, HEADS, CHANNELS));
        usual = (te_rotary_desc){.base = 500, .interleaved = interleaved != 0, .cu_seqlens = test_i32(te, SHAPE(3), cu)};
        table.cu_seqlens = usual.cu_seqlens;
        check_alike(te, "packed", te_apply_rotary_pos_emb(packed, &table, TE_THD), test_read(te_apply_rotary_pos_emb(packed, &usual, TE_THD)));
        usual.positions = table.positions = test_i32(te, SHAPE(2 * TOKENS), rows);
        check_alike(te, "packed rows", te_apply_rotary_pos_emb(packed, &table, TE_THD), test_read(te_apply_rotary_pos_emb(packed, &usual, TE_THD)));
        REQUIRE_OK(te);
    }
}

/* Attention, and a layer's, against the steps of attention: split where the projection is, or apart; bf16 tables; a checkpointed call, whose inputs the table is among. */
static te_tensor *steps(te_module *m, te_tensor *x, const te_rotary_desc *rotary, const te_rotary_desc *key) {
    te_tensor *qkv = te_forward(te_module_find(m, "qkv"), x), *part[3];
    for (int i = 0, at = 0; i < 3; i++) {
        const int heads = i ? GROUPS : HEADS;
        part[i] = te_tensor_view(te_tensor_contiguous(te_tensor_narrow(qkv, 2, at, heads * CHANNELS)), SHAPE(TOKENS, B, heads, CHANNELS));
        if (i < 2) part[i] = te_apply_rotary_pos_emb(part[i], i ? key : rotary, TE_SBHD);
        at += heads * CHANNELS;
    }
    te_tensor *o = te_attention(part[0], part[1], part[2], NULL);
    return te_forward(te_module_find(m, "proj"), te_tensor_view(o, SHAPE(TOKENS, B, HEADS * CHANNELS)));
}
TE_TEST_DEVICES(mrope_of_attention) {
    enum { N = TOKENS * B * HIDDEN };
    te_module *m = te_multihead_attention_create(te, &(te_multihead_attention_desc){.hidden_size = HIDDEN, .gemm.params_dtype = TE_F32,
                                                                                    .attention = {.num_attention_heads = HEADS, .num_gqa_groups = GROUPS, .kv_channels = CHANNELS,
                                                                                                  .no_qkv_weight_interleaved = true}});
    REQUIRE_OK(te);
    for (int k = 0; k < 4; k++) { /* 1: keys have a table of their own; 2: checkpointed; 3: a table of bf16 */
        te_rotary_desc rotary = {.freqs = mrope_table(te, k == 3 ? TE_BF16 : TE_F32, false)}, key = {.freqs = te_rope_freqs(te, NULL, CHANNELS, TOKENS, NULL)};
        float *got[2], *grad[2];
        test_case("k=%d", k);
        for (int run = 0; run < 2; run++) {
            te_tensor *x = leaf(te, TE_F32, SHAPE(TOKENS, B, HIDDEN), 6);
            te_forward_args args = {.input = x, .rotary = &rotary, .rotary_key = k == 1 ? &key : NULL};
            te_module_set_checkpoint(m, k == 2);
            te_tensor *y = run ? steps(m, x, &rotary, k == 1 ? &key : &rotary) : te_forward_with(m, &args);
            REQUIRE_OK(te);
            te_backward_from(y, test_tensor(te, TE_F32, SHAPE(TOKENS, B, HIDDEN), test_normal(N, 7)));
            REQUIRE_OK(te);
            got[run] = test_read(y), grad[run] = test_read(te_tensor_grad(x));
        }
        /* The same operations but for the split: gradients meet in another order, which on CUDA may move an operand of a TF32 product by a unit of its last place, 2^-11. */
        const double near = te_ctx_is_cuda(te) ? 5e-3 : 1e-5, least = te_ctx_is_cuda(te) ? 5e-3 : 1e-6;
        CHECK_BYTES("y", got[0], got[1], N * sizeof(float));
        CHECK_CLOSE("dx", grad[0], grad[1], N, near, least);
        te_forward_args plain = {.input = leaf(te, TE_F32, SHAPE(TOKENS, B, HIDDEN), 6), .rotary = &(te_rotary_desc){.base = 10000}};
        te_module_set_checkpoint(m, false);
        CHECK(memcmp(got[0], test_read(te_forward_with(m, &plain)), N * sizeof(float)) != 0);
    }
    te_module_destroy(m);
}

static te_tensor *of_layer(te_ctx *te, te_tensor *const *in, void *user) {
    const te_rotary_desc rotary = {.freqs = mrope_table(te, TE_F32, false)};
    te_forward_args args = {.input = in[0], .rotary = &rotary};
    return te_forward_with((te_module *)user, &args);
}
TE_TEST_DEVICES(mrope_of_a_layer_finite_differences) {
    te = test_exact(te);
    te_module *m = te_transformer_layer_create(te, &(te_transformer_layer_desc){.hidden_size = 16, .ffn_hidden_size = 24, .gemm.params_dtype = TE_F32,
                                                                                .attention = {.num_attention_heads = 1, .kv_channels = CHANNELS}});
    REQUIRE_OK(te);
    te_tensor *in[] = {leaf(te, TE_F32, SHAPE(TOKENS, B, 16), 8), te_module_parameter(te_module_find(m, "self_attention.layernorm_qkv"), "weight")};
    test_check_gradients(te, of_layer, 2, in, m, 2e-2, 2e-3);
    te_module_destroy(m);
}

TE_TEST_DEVICES(a_table_that_does_not_fit) {
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(4, 2, 3, 8)), *table = te_tensor_zeros(te, TE_F32, SHAPE(4, 1, 1, 8));
    te_rotary_desc d = {.freqs = te_tensor_zeros(te, TE_F32, SHAPE(3, 1, 1, 8))};
    CHECK(!te_apply_rotary_pos_emb(x, &d, TE_SBHD));
    CHECK_ERROR(te, TE_ERR_SHAPE, "freqs has 3 rows, and the positions are 0 to 3");
    d = (te_rotary_desc){.freqs = te_tensor_zeros(te, TE_F32, SHAPE(4, 3, 1, 8))}, te_apply_rotary_pos_emb(x, &d, TE_SBHD);
    CHECK_ERROR(te, TE_ERR_SHAPE, "freqs is [4, 3, 1, 8]; [positions, 1 or 2, 1, rotary_dim] is needed");
    d = (te_rotary_desc){.freqs = te_tensor_zeros(te, TE_F32, SHAPE(4, 8))}, te_apply_rotary_pos_emb(x, &d, TE_SBHD);
    CHECK_ERROR(te, TE_ERR_SHAPE, "freqs is [4, 8]");
    d = (te_rotary_desc){.freqs = te_tensor_zeros(te, TE_F32, SHAPE(4, 1, 1, 10))}, te_apply_rotary_pos_emb(x, &d, TE_SBHD);
    CHECK_ERROR(te, TE_ERR_SHAPE, "10 of 8 channels");
    d = (te_rotary_desc){.freqs = te_tensor_zeros(te, TE_F32, SHAPE(4, 1, 1, 3))}, te_apply_rotary_pos_emb(x, &d, TE_SBHD);
    CHECK_ERROR(te, TE_ERR_SHAPE, "3 of 8 channels");
    d = (te_rotary_desc){.freqs = te_tensor_zeros(te, TE_I32, SHAPE(4, 1, 1, 8))}, te_apply_rotary_pos_emb(x, &d, TE_SBHD);
    CHECK(te_error_code(te) != TE_OK);
    te_clear_error(te);
    d = (te_rotary_desc){.freqs = table, .base = 500}, te_apply_rotary_pos_emb(x, &d, TE_SBHD);
    CHECK_ERROR(te, TE_ERR_INVALID, "freqs are given, with base 500");
    d = (te_rotary_desc){.attention_factor = 2}, te_apply_rotary_pos_emb(x, &d, TE_SBHD);
    CHECK_ERROR(te, TE_ERR_INVALID, "attention_factor is 2, and freqs is NULL");
    d = (te_rotary_desc){.freqs = table, .position_offset = -1}, te_apply_rotary_pos_emb(x, &d, TE_SBHD);
    CHECK_ERROR(te, TE_ERR_SHAPE, "freqs has 4 rows, and the positions are -1 to 2");
    CHECK(!te_rope_freqs(te, &(te_rotary_desc){.freqs = table}, 8, 4, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_rope_freqs: rotary->freqs is given");
    /* positions that the host does not know: an error on the CPU, NaN on a GPU; those beside are right */
    static const int64_t places[4] = {0, 3, 4, -1};
    d = (te_rotary_desc){.freqs = table, .positions = test_i32(te, SHAPE(4), places)};
    /* a row behind all packed sequences needs none of the table */
    static const int64_t cu[2] = {0, 4};
    te_apply_rotary_pos_emb(te_tensor_zeros(te, TE_F32, SHAPE(9, 3, 8)), &(te_rotary_desc){.freqs = table, .cu_seqlens = test_i32(te, SHAPE(2), cu)}, TE_THD);
    CHECK_OK(te);
    te_tensor *ones = te_tensor_zeros(te, TE_F32, SHAPE(4, 2, 3, 8)), *y;
    te_tensor_fill(ones, 1);
    y = te_apply_rotary_pos_emb(ones, &d, TE_SBHD);
    if (!te_ctx_is_cuda(te)) {
        CHECK(!y);
        CHECK_ERROR(te, TE_ERR_INVALID, "token 2 of sequence 0 has position 4, and freqs has 4 rows; 0 to 3 are possible");
        return;
    }
    const float *values = test_read(y);
    for (int i = 0; i < 4 * 48; i++) CHECK(i / 48 < 2 ? values[i] == 1 : isnan(values[i]));
}

/* ---- a share of channels below one ---- */

TE_TEST_DEVICES(rotation_of_no_channel) {
    enum { N = 6 * 3 * 8 };
    static const int64_t cu[3] = {0, 2, 6};
    const te_rope_scaling scaled[] = {{.type = TE_ROPE_DEFAULT},
                                      {.type = TE_ROPE_LLAMA3, .factor = 8, .low_freq_factor = 1, .high_freq_factor = 4, .original_max_position_embeddings = 32},
                                      {.type = TE_ROPE_YARN, .factor = 4, .original_max_position_embeddings = 32},
                                      {.type = TE_ROPE_DYNAMIC, .factor = 2, .original_max_position_embeddings = 2}};
    float *values = test_normal(N, 9), *dy = test_normal(N, 10);
    for (int i = 0; i < COUNT(scaled); i++)
        for (int format = TE_SBHD; format <= TE_THD; format++) {
            te_rotary_desc d = {.rotary_percent = 0.01f, .scaling = scaled[i], .cu_seqlens = format == TE_THD ? test_i32(te, SHAPE(3), cu) : NULL};
            te_tensor *x = te_tensor_set_requires_grad(format == TE_THD ? test_tensor(te, TE_F32, SHAPE(6, 3, 8), values) : test_tensor(te, TE_F32, SHAPE(2, 3, 3, 8), values), true);
            test_case("scaling %d, format %d", i, format);
            te_tensor *y = te_apply_rotary_pos_emb(x, &d, (te_qkv_format)format);
            REQUIRE_OK(te);
            te_backward_from(y, test_tensor(te, TE_F32, te_tensor_ndim(x), te_tensor_shape(x), dy));
            REQUIRE_OK(te);
            CHECK_BYTES("y", test_read(y), values, N * sizeof(float));
            CHECK_BYTES("dx", test_read(te_tensor_grad(x)), dy, N * sizeof(float));
        }
    te_rotary_desc none = {.rotary_percent = 0.01f}, table = {.freqs = te_rope_freqs(te, &none, 8, 6, NULL)};
    REQUIRE_OK(te);
    CHECK(te_tensor_shape(table.freqs)[0] == 6 && te_tensor_shape(table.freqs)[3] == 0);
    te_tensor *sines = te_rope_cos_sin(te, &none, 8, NULL, 6);
    CHECK(te_tensor_shape(sines)[0] == 6 && te_tensor_shape(sines)[1] == 0);
    CHECK_BYTES("by a table", test_read(te_apply_rotary_pos_emb(test_tensor(te, TE_F32, SHAPE(6, 1, 3, 8), values), &table, TE_SBHD)), values, N * sizeof(float));
    CHECK_OK(te);
}
TE_TEST_DEVICES(rotation_of_no_channel_in_modules) {
    te_rotary_desc none = {.rotary_percent = 0.001f, .scaling = {.type = TE_ROPE_LLAMA3, .factor = 8, .low_freq_factor = 1, .high_freq_factor = 4, .original_max_position_embeddings = 32}};
    for (int k = 0; k < 2; k++) { /* 1: keys have a rotation of their own, which is apart from the split */
        te_module *m = te_transformer_layer_create(te, &(te_transformer_layer_desc){.hidden_size = WIDE, .ffn_hidden_size = 40, .attention.num_attention_heads = H, .gemm.params_dtype = TE_F32});
        te_rotary_desc key = none;
        float *y[2], *dx[2];
        REQUIRE_OK(te);
        for (int run = 0; run < 2; run++) {
            te_tensor *x = leaf(te, TE_F32, SHAPE(S, B, WIDE), 11);
            te_forward_args args = {.input = x, .rotary = run ? NULL : &none, .rotary_key = run || !k ? NULL : &key};
            te_tensor *out = te_forward_with(m, &args);
            REQUIRE_OK(te);
            te_backward_from(out, test_tensor(te, TE_F32, SHAPE(S, B, WIDE), test_normal(S * B * WIDE, 12)));
            REQUIRE_OK(te);
            y[run] = test_read(out), dx[run] = test_read(te_tensor_grad(x));
        }
        CHECK_BYTES("y", y[0], y[1], S * B * WIDE * sizeof(float));
        CHECK_BYTES("dx", dx[0], dx[1], S * B * WIDE * sizeof(float));
        te_module_destroy(m);
    }
}
