/* tests/model/test_rope_config.c: rotary embeddings as a config.json has them. Expectations: the formulas of transformers and of Automodel's models, written down in double. */
#include <fenv.h>
#include "../te_test.h"

#define YARN "{\"rope_theta\": 1e6, \"rope_type\": \"yarn\", \"factor\": 4.0, \"beta_slow\": 1.0, \"beta_fast\": 32.0, \"original_max_position_embeddings\": 8192, \"partial_rotary_factor\": 0.5}"

TE_TEST(rope_config_is_that_of_rope_parameters) {
    te_ctx *te = test_context("cpu");
    static te_rope_config r;
    static const char text[] = "{\"hidden_size\": 64, \"rope_theta\": 5, \"rope_parameters\": " YARN ", \"layer_types\": [\"anything\"], \"max_position_embeddings\": 32768}";
    CHECK(te_rope_config_read(te, text, &r) == TE_OK);
    CHECK(r.rope_theta == 1e6 && r.partial_rotary_factor == 0.5 && r.rope_parameters == strstr(text, YARN) && r.rope_parameters_size == strlen(YARN));
    CHECK(r.factor == 4 && r.beta_slow == 1 && r.beta_fast == 32 && r.original_max_position_embeddings == 8192 && r.max_position_embeddings == 32768);
    CHECK(strcmp(r.rope_type, "yarn") == 0 && !r.no_truncate && r.mscale == 0 && r.num_long_factors == 0);
    CHECK(te_rope_config_read(te, "{\"rope_parameters\": {\"rope_theta\": 10000}}", &r) == TE_OK);
    CHECK(r.rope_theta == 10000 && r.partial_rotary_factor == 1 && r.factor == 0 && r.rope_type[0] == 0);
    /* no older key takes its place */
    te_rope_config before = r;
    static const struct {
        const char *text, *needle;
    } bad[] = {{"{}", "the config has no rope_parameters"},
               {"{\"rope_theta\": 10000, \"rope_scaling\": {\"rope_theta\": 1}}", "has no rope_parameters"},
               {"{\"rope_parameters\": null}", "has rope_parameters that are null"},
               {"{\"rope_theta\": 5, \"rope_parameters\": {\"factor\": 2}}", "rope_parameters has no rope_theta"},
               {"{\"rope_parameters\": {\"rope_theta\": \"1e6\"}}", "byte"},
               {"{\"rope_parameters\": {\"rope_theta\": -1}}", "rope_theta is -1; a positive number is needed"},
               {"{\"rope_parameters\": {\"rope_theta\": 1, \"partial_rotary_factor\": 0}}", "partial_rotary_factor is 0"},
               {"{\"rope_parameters\": [1]}", "'{' is missing"},
               {"{\"rope_parameters\": {\"rope_theta\": 1}, \"rope_parameters\": {}}", "given twice"},
               {"{\"rope_parameters\": {\"rope_theta\": 1}} x", "something follows the end"}};
    for (int i = 0; i < COUNT(bad); i++) {
        test_case("%s", bad[i].text);
        CHECK(te_rope_config_read(te, bad[i].text, &r) == TE_ERR_FORMAT);
        CHECK_ERROR(te, TE_ERR_FORMAT, bad[i].needle);
    }
    CHECK(memcmp(&before, &r, sizeof(r)) == 0);
    test_case("Llama");
    CHECK(te_rope_config_read_llama(te, "{}", &r) == TE_OK && r.rope_theta == 10000 && r.partial_rotary_factor == 1 && !r.rope_parameters);
    CHECK(te_rope_config_read_llama(te, "{\"rope_theta\": 500000, \"partial_rotary_factor\": 0.25, \"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}}", &r) == TE_OK);
    CHECK(r.rope_theta == 500000 && r.partial_rotary_factor == 0.25 && r.factor == 2 && strcmp(r.rope_type, "linear") == 0);
    CHECK(te_rope_config_read_llama(te, "{\"rope_theta\": 5, \"rope_scaling\": null, \"rope_parameters\": {\"rope_theta\": 7}}", &r) == TE_OK && r.rope_theta == 7);
    CHECK(te_rope_config_read(te, NULL, &r) == TE_ERR_INVALID && te_rope_config_read(NULL, "{}", &r) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_INVALID, "config is NULL");
}

/* Channel pair j of `dim` at base^(2j / dim), as Automodel's models with experts have it. */
static void moe_oracle(double base, int dim, double factor, double original, double fast, double slow, float *inv, double *concentration) {
    const double turn = 2 * 3.14159265358979323846;
    double low = dim / 2.0 * log(original / (fast * turn)) / log(base), high = dim / 2.0 * log(original / (slow * turn)) / log(base);
    *concentration = factor > 1 ? 0.1 * log(factor) + 1 : 1;
    for (int j = 0; j < dim / 2; j++) {
        double freq = pow(base, 2.0 * j / dim), ramp = fmin(fmax((j - low) / (high - low), 0), 1);
        inv[j] = (float)(factor > 1 ? ramp / (factor * freq) + (1 - ramp) / freq : 1 / freq);
    }
}
TE_TEST(rope_of_models_with_experts) {
    te_ctx *te = test_context("cpu");
    static te_rope_config r;
    float inv[64], want[64], attention;
    double concentration;
    te_rotary_desc d;
    static const struct {
        const char *text;
        int head_dim, dim;
        double base, factor, original, fast, slow;
    } cases[] = {{"{\"rope_parameters\": {\"rope_theta\": 150000, \"factor\": 32, \"rope_type\": \"anything\"}}", 64, 64, 150000, 32, 4096, 32, 1},
                 {"{\"rope_parameters\": " YARN "}", 128, 64, 1e6, 4, 8192, 32, 1},
                 {"{\"rope_parameters\": {\"rope_theta\": 10000, \"factor\": 1, \"partial_rotary_factor\": 0.3}}", 64, 0, 0, 0, 0, 0, 0}, /* 19 channels */
                 {"{\"rope_parameters\": {\"rope_theta\": 10000, \"partial_rotary_factor\": 0.7}}", 20, 14, 10000, 0, 0, 0, 0}};
    for (int i = 0; i < COUNT(cases); i++) {
        test_case("%s", cases[i].text);
        REQUIRE(te_rope_config_read(te, cases[i].text, &r) == TE_OK);
        te_result result = te_rope_config_moe_rotary(te, &r, cases[i].head_dim, &d);
        if (cases[i].dim == 0) {
            CHECK_ERROR(te, TE_ERR_INVALID, "head_dim 64 times partial_rotary_factor 0.3 rotates 19 channels");
            continue;
        }
        CHECK(result == TE_OK && (int)((float)cases[i].head_dim * d.rotary_percent) == cases[i].dim);
        CHECK(te_rope_frequencies(te, &d.scaling, d.base, cases[i].dim, 100, inv, &attention) == TE_OK);
        moe_oracle(cases[i].base, cases[i].dim, cases[i].factor, cases[i].original, cases[i].fast, cases[i].slow, want, &concentration);
        CHECK_CLOSE("inv_freq", inv, want, cases[i].dim / 2, 1e-6, 0); /* f32 */
        CHECK(fabs(attention - concentration) < 1e-6);
    }
    CHECK(te_rope_config_read(te, "{\"rope_parameters\": {\"rope_theta\": 10000, \"factor\": 4, \"original_max_position_embeddings\": 64}}", &r) == TE_OK);
    CHECK(te_rope_config_moe_rotary(te, &r, 64, &d) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "0 < low < high < 31 is needed");
    CHECK(te_rope_config_moe_rotary(te, NULL, 64, &d) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "rope is NULL");
}

static te_result llama(te_ctx *te, const char *text, int head_dim, te_rope_config *r, te_rotary_desc *d) {
    return te_rope_config_read_llama(te, text, r) == TE_OK ? te_rope_config_llama_rotary(te, r, head_dim, d) : te_error_code(te);
}
TE_TEST(rope_types_of_the_llama_family) {
    te_ctx *te = test_context("cpu");
    static te_rope_config r;
    te_rotary_desc d;
    float inv[8], plain[8], want[8], attention;
    CHECK(llama(te, "{}", 16, &r, &d) == TE_OK && d.scaling.type == TE_ROPE_DEFAULT && d.base == 10000);
    CHECK(te_rope_frequencies(te, &d.scaling, d.base, 16, 10, plain, &attention) == TE_OK && attention == 1);
    for (int j = 0; j < 8; j++) want[j] = (float)pow(10000, -2.0 * j / 16);
    CHECK_CLOSE("default", plain, want, 8, 1e-6, 0);
    /* wavelengths above 64 / 1 are divided, those below 64 / 4 are not, between these a blend */
    CHECK(llama(te, "{\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 1, \"high_freq_factor\": 4, \"original_max_position_embeddings\": 64}}", 16, &r, &d) ==
          TE_OK);
    te_rope_frequencies(te, &d.scaling, d.base, 16, 10, inv, &attention);
    int kinds[3] = {0, 0, 0};
    for (int j = 0; j < 8; j++) {
        double wave = 2 * 3.14159265358979323846 / plain[j], s = (64 / wave - 1) / 3;
        want[j] = wave > 64 ? plain[j] / 8 : wave < 16 ? plain[j] : (float)((1 - s) * plain[j] / 8 + s * plain[j]);
        kinds[wave > 64 ? 0 : wave < 16 ? 1 : 2]++;
    }
    CHECK(kinds[0] && kinds[1] && kinds[2]);
    CHECK_CLOSE("llama3", inv, want, 8, 1e-6, 0);
    CHECK(llama(te, "{\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}}", 16, &r, &d) == TE_OK && d.scaling.type == TE_ROPE_LINEAR && d.scaling.factor == 2);
    CHECK(llama(te, "{\"max_position_embeddings\": 128, \"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 2}}", 16, &r, &d) == TE_OK && d.scaling.original_max_position_embeddings == 128);
    CHECK(llama(te, "{\"max_position_embeddings\": 256, \"rope_parameters\": {\"rope_theta\": 10000, \"rope_type\": \"yarn\", \"original_max_position_embeddings\": 64}}", 16, &r, &d) == TE_OK);
    CHECK(d.scaling.type == TE_ROPE_YARN && d.scaling.factor == 4); /* 256 / 64 */
    te_rope_frequencies(te, &d.scaling, d.base, 16, 10, inv, &attention);
    CHECK(attention != 1 && fabs(attention - (0.1 * log(4) + 1)) < 1e-6);
    /* longrope: short sequences have the first list, long ones the second; the factor is 128 / 32 */
    CHECK(llama(te, "{\"max_position_embeddings\": 128, \"original_max_position_embeddings\": 32, \"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1, 1, 1, 1, 1, 1, 1, 1.5], "
                    "\"long_factor\": [2, 2, 2, 2, 4, 4, 4, 4]}}", 16, &r, &d) == TE_OK);
    te_rope_frequencies(te, &d.scaling, d.base, 16, 32, inv, &attention);
    CHECK(fabs(inv[7] - plain[7] / 1.5f) < 1e-9 && inv[0] == plain[0] && fabs(attention - sqrt(1 + log(4) / log(32))) < 1e-6);
    te_rope_frequencies(te, &d.scaling, d.base, 16, 33, inv, &attention);
    CHECK(fabs(inv[7] - plain[7] / 4) < 1e-9 && fabs(inv[0] - 0.5) < 1e-7);
    /* its factor counts before the quotient, and the config's own original context before that of the object */
    CHECK(llama(te, "{\"max_position_embeddings\": 128, \"original_max_position_embeddings\": 32, \"rope_scaling\": {\"type\": \"longrope\", \"factor\": 8, \"original_max_position_embeddings\": 64, "
                    "\"short_factor\": [1, 1, 1, 1, 1, 1, 1, 1.5], \"long_factor\": [2, 2, 2, 2, 4, 4, 4, 4]}}", 16, &r, &d) == TE_OK);
    te_rope_frequencies(te, &d.scaling, d.base, 16, 33, inv, &attention);
    CHECK(fabs(inv[7] - plain[7] / 4) < 1e-9 && fabs(attention - sqrt(1 + log(8) / log(32))) < 1e-6);
    CHECK_OK(te);

    static const struct {
        const char *text;
        te_result code;
        const char *needle;
    } bad[] = {{"{\"rope_scaling\": {\"type\": \"bogus\"}}", TE_ERR_INVALID, "rope_type is \"bogus\"; default, linear, dynamic, llama3, yarn, longrope are possible"},
               {"{\"rope_scaling\": {\"type\": \"lama3\"}}", TE_ERR_INVALID, "is \"llama3\" meant?"},
               {"{\"rope_scaling\": {\"type\": \"linear\"}}", TE_ERR_FORMAT, "factor is missing"},
               {"{\"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 2}}", TE_ERR_FORMAT, "max_position_embeddings is missing"},
               {"{\"rope_scaling\": {\"type\": \"llama3\", \"factor\": 2, \"original_max_position_embeddings\": 64}}", TE_ERR_FORMAT, "high_freq_factor"},
               {"{\"original_max_position_embeddings\": 8, \"rope_scaling\": {\"type\": \"longrope\", \"factor\": 2, \"short_factor\": [1], \"long_factor\": [1, 2]}}", TE_ERR_FORMAT, "short_factor has 1 numbers and long_factor 2; 8 are"}};
    for (int i = 0; i < COUNT(bad); i++) {
        test_case("%s", bad[i].text);
        CHECK(llama(te, bad[i].text, 16, &r, &d) == bad[i].code);
        CHECK_ERROR(te, bad[i].code, bad[i].needle);
    }
}

/* Positions shift, gather and reach beyond any length; nothing is kept from call to call, so a model's format changes no table. */
TE_TEST_DEVICES(rope_positions_count_by_their_values) {
    enum { S = 4, D = 8 };
    static te_rope_config r;
    static const int32_t lists[3][S] = {{3, 4, 5, 6}, {0, 5, 2, 9}, {39, 40, 41, 42}};
    te_rotary_desc d;
    REQUIRE(llama(te, "{}", D, &r, &d) == TE_OK);
    const float *values = test_normal(S * D, 2);
    for (int i = 0; i < 4; i++) {
        float *want = test_floats(S * D);
        te_tensor *x = te_tensor_from_f32(te, TE_F32, SHAPE(S, 1, 1, D), values), *y;
        d.positions = i < 3 ? te_tensor_from_host(te, TE_I32, SHAPE(S), lists[i]) : NULL;
        d.position_offset = i < 3 ? 0 : 3;
        y = te_apply_rotary_pos_emb(x, &d, TE_SBHD);
        for (int s = 0; s < S; s++)
            for (int j = 0; j < D / 2; j++) {
                double angle = lists[i % 3][s] * pow(10000, -2.0 * j / D);
                double a = values[s * D + j], b = values[s * D + j + D / 2];
                want[s * D + j] = (float)(a * cos(angle) - b * sin(angle));
                want[s * D + j + D / 2] = (float)(b * cos(angle) + a * sin(angle));
            }
        test_case("positions from %d", lists[i % 3][0]);
        CHECK_TENSOR(y, want, 0, 2e-5); /* angles up to 42 in f32 */
    }
    CHECK_OK(te);
}

/* Tables: rows by the values of positions, beyond any length that was seen before; the same whatever a model's format is; YaRN's factor is in the first kind and beside the second. */
TE_TEST_DEVICES(rope_tables) {
    enum { D = 8, N = 5 };
    static te_rope_config r;
    static const int64_t list[N] = {0, 5, 2, 9, 40};
    static const char yarn[] = "{\"rope_parameters\": {\"rope_theta\": 10000, \"rope_type\": \"yarn\", \"factor\": 4, \"original_max_position_embeddings\": 64, \"partial_rotary_factor\": 0.5}}";
    te_rotary_desc d;
    float inv[D / 2], factor, got = 0, want[N * D];
    REQUIRE(llama(te, yarn, 2 * D, &r, &d) == TE_OK);
    te_rope_frequencies(te, &d.scaling, d.base, D, 41, inv, &factor);
    for (int i = 0; i < N * D / 2; i++) {
        float angle = (float)list[i / (D / 2)] * inv[i % (D / 2)];
        want[i / (D / 2) * D + i % (D / 2)] = (float)cos((double)angle) * factor;
        want[i / (D / 2) * D + D / 2 + i % (D / 2)] = (float)sin((double)angle) * factor;
    }
    te_tensor *gathered = te_rope_cos_sin(te, &d, 2 * D, list, N), *all = te_rope_cos_sin(te, &d, 2 * D, NULL, 41), *fused = te_rope_freqs(te, &d, 2 * D, N, &got);
    CHECK(te_tensor_ndim(gathered) == 2 && te_tensor_shape(gathered)[0] == N && te_tensor_shape(gathered)[1] == D && te_tensor_dtype(gathered) == TE_F32);
    CHECK_TENSOR(gathered, want, 1e-6, 1e-7); /* cos and sin of the C library */
    for (int i = 0; i < N; i++) CHECK_BYTES("row", test_read(gathered) + i * D, test_read(all) + list[i] * D, D * sizeof(float));
    CHECK(te_tensor_ndim(fused) == 4 && te_tensor_shape(fused)[0] == N && te_tensor_shape(fused)[1] == 1 && te_tensor_shape(fused)[2] == 1 && te_tensor_shape(fused)[3] == D);
    CHECK(got == factor && fabs(factor - (0.1 * log(4) + 1)) < 1e-6);
    for (int i = 0; i < N * D; i++) CHECK(test_read(fused)[i] == (float)(i / D) * inv[i % D % (D / 2)]);
    fesetround(FE_UPWARD); /* as a library of the process may have set it */
    te_tensor *upward = te_rope_freqs(te, &d, 2 * D, N, NULL);
    fesetround(FE_TONEAREST);
    CHECK_BYTES("rounding", test_read(upward), test_read(fused), N * D * sizeof(float));
    d.position_offset = 3; /* no table looks at it */
    CHECK_BYTES("offset", test_read(te_rope_freqs(te, &d, 2 * D, N, NULL)), test_read(fused), N * D * sizeof(float));
    CHECK(te_tensor_numel(te_rope_cos_sin(te, NULL, D, NULL, 0)) == 0);
    CHECK_OK(te);
    CHECK(!te_rope_cos_sin(te, &d, 2, NULL, 4));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_rope_cos_sin: 1 channels of 2 are rotated");
    CHECK(!te_rope_freqs(te, NULL, D, -1, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "at -1 positions");
    CHECK(!te_rope_freqs(te, NULL, D, INT64_MAX, NULL));
    CHECK_ERROR(te, TE_ERR_SHAPE, "more elements than 64 bits can count");
    CHECK(!te_rope_cos_sin(te, NULL, D, (const int64_t[]){1, -2}, 2));
    CHECK_ERROR(te, TE_ERR_INVALID, "positions[1] is -2");
}
