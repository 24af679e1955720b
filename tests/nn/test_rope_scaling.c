/* test_rope_scaling.c: frequencies of rotary embeddings for longer contexts, and what te_apply_rotary_pos_emb and modules make of them, forward and backward. */
#include "../te_test.h"

enum { DIM = 32, HALF = DIM / 2 };

static float short_factor[HALF], long_factor[HALF];

static void fill_factors(void) {
    for (int i = 0; i < HALF; i++) short_factor[i] = 1 + 0.1f * (float)i, long_factor[i] = 1 + 0.5f * (float)i;
}

typedef struct schedule {
    const char *name;
    te_rope_scaling s;
    int64_t length;
    double attention_factor;
    float inv_freq[HALF];
} schedule;

/* From transformers 5, ROPE_INIT_FUNCTIONS, head_dim 32, rope_theta 10000, as its f32 arithmetic gives them. */
static const schedule schedules[] = {
    {"linear", {.type = TE_ROPE_LINEAR, .factor = 4}, 0, 1,
     {0.25f, 0.140585333f, 0.079056941f, 0.0444569848f, 0.0250000004f, 0.0140585322f, 0.00790569466f, 0.00444569858f, 0.00249999994f, 0.00140585331f, 0.000790569466f,
      0.000444569858f, 0.000250000012f, 0.000140585325f, 7.90569466e-05f, 4.44569851e-05f}},
    {"dynamic", {.type = TE_ROPE_DYNAMIC, .factor = 2, .original_max_position_embeddings = 256}, 1000, 1,
     {1, 0.494818866f, 0.244845688f, 0.121154264f, 0.0599494129f, 0.0296641011f, 0.0146783553f, 0.00726312678f, 0.00359393214f, 0.00177834532f, 0.000879958796f,
      0.000435420196f, 0.000215454114f, 0.000106610765f, 5.27530101e-05f, 2.61031855e-05f}},
    {"dynamic, short", {.type = TE_ROPE_DYNAMIC, .factor = 2, .original_max_position_embeddings = 256}, 100, 1,
     {1, 0.562341332f, 0.316227764f, 0.177827939f, 0.100000001f, 0.0562341288f, 0.0316227786f, 0.0177827943f, 0.00999999978f, 0.00562341325f, 0.00316227786f,
      0.00177827943f, 0.00100000005f, 0.000562341302f, 0.000316227786f, 0.00017782794f}},
    {"llama3", {.type = TE_ROPE_LLAMA3, .factor = 8, .low_freq_factor = 1, .high_freq_factor = 4, .original_max_position_embeddings = 256}, 0, 1,
     {1, 0.562341332f, 0.316227764f, 0.177827939f, 0.100000001f, 0.0282067824f, 0.00661310693f, 0.00222284929f, 0.00124999997f, 0.000702926656f, 0.000395284733f,
      0.000222284929f, 0.000125000006f, 7.02926627e-05f, 3.95284733e-05f, 2.22284925e-05f}},
    {"yarn", {.type = TE_ROPE_YARN, .factor = 4, .original_max_position_embeddings = 256}, 0, 1.138629436111989,
     {1, 0.502090454f, 0.248464689f, 0.120668955f, 0.0571428537f, 0.0261087008f, 0.011293849f, 0.00444569858f, 0.00249999994f, 0.00140585331f, 0.000790569466f,
      0.000444569858f, 0.000250000012f, 0.000140585325f, 7.90569466e-05f, 4.44569851e-05f}},
    {"yarn, all fields",
     {.type = TE_ROPE_YARN, .factor = 8, .original_max_position_embeddings = 512, .beta_fast = 16, .beta_slow = 2, .mscale = 0.707f, .mscale_all_dim = 0.5f, .no_truncate = true},
     0, 1.0389905150739585,
     {1, 0.562341332f, 0.316227764f, 0.170414031f, 0.0716084614f, 0.0266471431f, 0.00732499827f, 0.00222284929f, 0.00124999997f, 0.000702926656f, 0.000395284733f,
      0.000222284929f, 0.000125000006f, 7.02926627e-05f, 3.95284733e-05f, 2.22284925e-05f}},
    {"longrope, long", {.type = TE_ROPE_LONGROPE, .factor = 4, .original_max_position_embeddings = 256, .short_factor = short_factor, .long_factor = long_factor}, 1000,
     1.118033988749895,
     {1, 0.374894202f, 0.158113882f, 0.0711311772f, 0.0333333351f, 0.0160668939f, 0.00790569466f, 0.00395173207f, 0.00200000009f, 0.00102243875f, 0.00052704633f,
      0.000273581449f, 0.000142857141f, 7.49788451e-05f, 3.95284733e-05f, 2.09209338e-05f}},
    {"longrope, short", {.type = TE_ROPE_LONGROPE, .factor = 4, .original_max_position_embeddings = 256, .short_factor = short_factor, .long_factor = long_factor}, 200,
     1.118033988749895,
     {1, 0.511219382f, 0.263523132f, 0.136790738f, 0.0714285746f, 0.0374894217f, 0.0197642352f, 0.0104604671f, 0.00555555569f, 0.00295969122f, 0.00158113893f,
      0.000846799754f, 0.000454545458f, 0.000244496245f, 0.000131761568f, 7.11311732e-05f}}};

TE_TEST(rope_scaling_frequencies) {
    te_ctx *te = test_context("cpu");
    fill_factors();
    for (int i = 0; i < COUNT(schedules); i++) {
        const schedule *s = &schedules[i];
        float inv_freq[HALF], attention = 0;
        test_case("%s", s->name);
        CHECK(te_rope_frequencies(te, &s->s, 0, DIM, s->length, inv_freq, &attention) == TE_OK);
        CHECK_CLOSE("inv_freq", inv_freq, s->inv_freq, HALF, 1e-6, 0); /* transformers computes in f32: a few roundings */
        CHECK(fabs(attention - s->attention_factor) < 1e-6);
    }
}

static te_tensor *rotated(te_ctx *te, te_tensor *const *inputs, void *user) {
    (void)te;
    return te_apply_rotary_pos_emb(inputs[0], (const te_rotary_desc *)user, TE_BSHD);
}

/* Pairs turn by the angles of the frequencies, stretched by the factor; and back again in the backward pass. */
TE_TEST_DEVICES(rope_scaling_rotates) {
    enum { B = 2, S = 5, H = 3, N = B * S * H * DIM };
    static const int64_t places[S] = {3, 900, 0, 41, 7};
    fill_factors();
    for (int i = 0; i < COUNT(schedules); i++) {
        te_rotary_desc d = {0};
        float inv_freq[HALF], attention, *x = test_normal(N, 3), *want = test_floats(N);
        test_case("%s", schedules[i].name);
        d.scaling = schedules[i].s;
        d.max_seqlen = schedules[i].length;
        d.positions = i % 2 ? test_i32(te, SHAPE(S), places) : NULL;
        CHECK(te_rope_frequencies(te, &d.scaling, 0, DIM, d.max_seqlen ? d.max_seqlen : S, inv_freq, &attention) == TE_OK);
        for (int at = 0; at < N / DIM; at++)
            for (int k = 0; k < HALF; k++) {
                int64_t t = at / H % S;
                float angle = (float)(d.positions ? places[t] : t) * inv_freq[k];
                double cosine = cos((double)angle) * attention, sine = sin((double)angle) * attention, u = x[at * DIM + k], v = x[at * DIM + HALF + k];
                want[at * DIM + k] = (float)(u * cosine - v * sine);
                want[at * DIM + HALF + k] = (float)(v * cosine + u * sine);
            }
        te_tensor *in = test_tensor(te, TE_F32, SHAPE(B, S, H, DIM), x);
        CHECK_TENSOR(rotated(te, &in, &d), want, 1e-6, 2e-6); /* roundings of sine, cosine and two products */
        test_check_gradients(te, rotated, 1, &in, &d, 1e-2, 1e-3);
    }
}

/* A packed projection is rotated as queries and keys are that lie apart. */
TE_TEST_DEVICES(rope_scaling_in_modules) {
    enum { B = 2, S = 6, HIDDEN = 64 };
    te_multihead_attention_desc d = {0};
    te_rotary_desc turn = {.scaling = schedules[4].s, .positions = test_i32(te, SHAPE(S), (const int64_t[]){5, 1, 60, 3, 2, 9})};
    float *grad[2], *out[2];
    d.hidden_size = HIDDEN;
    d.attention.num_attention_heads = 2;
    d.gemm.params_dtype = TE_F32;
    te_module *m = te_multihead_attention_create(te, &d);
    REQUIRE_OK(te);
    for (int apart = 0; apart < 2; apart++) {
        te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(S, B, HIDDEN), test_normal(S * B * HIDDEN, 1)), true);
        te_rotary_desc key = turn;
        te_forward_args args = {.input = x, .rotary = &turn, .rotary_key = apart ? &key : NULL};
        CHECK(te_forward_with(m, &args));
        te_backward_from(args.outputs.out, x);
        REQUIRE_OK(te);
        out[apart] = test_read(args.outputs.out);
        grad[apart] = test_read(te_tensor_grad(x));
    }
    CHECK_BYTES("out", out[0], out[1], S * B * HIDDEN * sizeof(float));
    CHECK_CLOSE("gradient", grad[0], grad[1], S * B * HIDDEN, 1e-5, 1e-6); /* gradients of the parts are added up in another order */
    te_module_destroy(m);
}

TE_TEST(rope_scaling_refuses) {
    te_ctx *te = test_context("cpu");
    float inv_freq[HALF], attention;
    te_rope_scaling s = {.type = TE_ROPE_YARN};
    te_rope_frequencies(te, &s, 0, DIM, 0, inv_freq, &attention);
    CHECK_ERROR(te, TE_ERR_INVALID, "scaling.factor is 0, with type 4");
    s.factor = 4, te_rope_frequencies(te, &s, 0, DIM, 0, inv_freq, &attention);
    CHECK_ERROR(te, TE_ERR_INVALID, "original_max_position_embeddings is 0");
    s.original_max_position_embeddings = 8, s.beta_fast = 2, s.beta_slow = 3, te_rope_frequencies(te, &s, 0, DIM, 0, inv_freq, &attention);
    CHECK_ERROR(te, TE_ERR_INVALID, "beta_fast is 2 and beta_slow 3");
    s.type = TE_ROPE_LLAMA3, te_rope_frequencies(te, &s, 0, DIM, 0, inv_freq, &attention);
    CHECK_ERROR(te, TE_ERR_INVALID, "low_freq_factor is 0 and high_freq_factor 0");
    s.type = TE_ROPE_DYNAMIC, te_rope_frequencies(te, &s, 0, 2, 0, inv_freq, &attention);
    CHECK_ERROR(te, TE_ERR_INVALID, "2 channels");
    s.type = TE_ROPE_LONGROPE, s.long_factor = long_factor, te_rope_frequencies(te, &s, 0, DIM, 0, inv_freq, &attention);
    CHECK_ERROR(te, TE_ERR_INVALID, "short_factor is NULL");
    s.type = (te_rope_type)9, te_rope_frequencies(te, &s, 0, DIM, 0, inv_freq, &attention);
    CHECK_ERROR(te, TE_ERR_INVALID, "type is 9");
}
