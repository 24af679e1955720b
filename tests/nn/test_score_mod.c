/* te_score_mod: the user's rules for scores and masks, as functions on the CPU and as expressions on CUDA: against a reference in float64, its gradients against
 * differences; with all else that attention has; recompute and graphs; which expressions are refused. */
#include "../te_test.h"

enum { B = 2, H = 4, G = 2, S = 19, T = 23, D = 8, DOCUMENTS = 3 };

/* ---- rules ---- */

typedef struct tables {
    float slopes[H];
    int64_t document[B][T];
} tables;
static const tables table = {{0.5f, 0.25f, 0.125f, 0.0625f}, {{0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2}, {0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2}}};

static float alibi(void *user, float score, int64_t b, int64_t h, int64_t q, int64_t k) { return (void)b, score - ((const tables *)user)->slopes[h] * fabsf((float)(q - k)); }
static float cap(void *user, float score, int64_t b, int64_t h, int64_t q, int64_t k) { return (void)user, (void)b, (void)h, (void)q, (void)k, 2.0f * tanhf(score / 2.0f); }
static float cap_bprop(void *user, float score, int64_t b, int64_t h, int64_t q, int64_t k) {
    float t = tanhf(score / 2.0f);
    return (void)user, (void)b, (void)h, (void)q, (void)k, 1.0f - t * t;
}
static bool same_document(void *user, int64_t b, int64_t h, int64_t q, int64_t k) { return (void)h, ((const tables *)user)->document[b][q] == ((const tables *)user)->document[b][k]; }

enum { ALIBI, CAP, DOCUMENT, BOTH, RULES };
static te_score_mod rule_of(te_ctx *te, int rule) {
    te_score_mod m;
    memset(&m, 0, sizeof m);
    m.user = (void *)(uintptr_t)&table;
    if (rule == ALIBI) {
        m.score_mod = "score - aux0[h] * fabsf(q_idx - kv_idx)";
        m.score_fn = alibi;
        m.additive = true;
        m.aux[0] = test_tensor(te, TE_F32, SHAPE(H), table.slopes);
    }
    if (rule == CAP || rule == BOTH) {
        m.score_mod = "2.0f * tanhf(score / 2.0f)";
        m.score_mod_bprop = "1.0f - tanhf(score / 2.0f) * tanhf(score / 2.0f)";
        m.score_fn = cap;
        m.score_bprop_fn = cap_bprop;
    }
    if (rule == DOCUMENT || rule == BOTH) {
        m.mask_mod = "aux1[b * 23 + q_idx] == aux1[b * 23 + kv_idx]";
        m.mask_fn = same_document;
        m.aux[1] = rule == BOTH ? te_tensor_from_host(te, TE_I64, SHAPE(B, T), table.document) : test_i32(te, SHAPE(B, T), table.document[0]);
    }
    return m;
}

/* ---- the reference ---- */

typedef struct arrays {
    double *q, *k, *v, *g, *bias; /* [S, B, H, D], [T, B, G, D] twice, [S, B, H, D], [1, H, S, T] */
} arrays;
static double *doubles(int64_t n, uint64_t seed) {
    const float *x = test_normal(n, seed);
    double *y = (double *)test_alloc((size_t)n * sizeof(double));
    for (int64_t i = 0; i < n; i++) y[i] = (double)x[i];
    return y;
}
static arrays arrays_of(void) {
    arrays a = {doubles(S * B * H * D, 1), doubles(T * B * G * D, 2), doubles(T * B * G * D, 3), doubles(S * B * H * D, 4), doubles(H * S * T, 5)};
    return a;
}
static double changed(int rule, double score, int64_t h, int64_t i, int64_t j) {
    return rule == ALIBI ? score - (double)table.slopes[h] * fabs((double)(i - j)) : rule == CAP || rule == BOTH ? 2 * tanh(score / 2) : score;
}
/* o into `o`, if it is not NULL; returns sum(o * g). Causal, with a bias that is added to the scores. */
static double reference(const arrays *a, int rule, float *o) {
    double loss = 0, p[T];
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < H; h++)
            for (int64_t i = 0; i < S; i++) {
                const double *q = a->q + ((i * B + b) * H + h) * D, *g = a->g + ((i * B + b) * H + h) * D;
                double sum = 0;
                for (int64_t j = 0; j <= i; j++) {
                    const double *k = a->k + ((j * B + b) * G + h / (H / G)) * D;
                    double s = 0;
                    for (int c = 0; c < D; c++) s += q[c] * k[c];
                    s = changed(rule, s / sqrt((double)D) + a->bias[(h * S + i) * T + j], h, i, j);
                    p[j] = rule >= DOCUMENT && table.document[b][i] != table.document[b][j] ? 0 : exp(s);
                    sum += p[j];
                }
                for (int c = 0; c < D; c++) {
                    double x = 0;
                    for (int64_t j = 0; j <= i; j++) x += p[j] / sum * a->v[((j * B + b) * G + h / (H / G)) * D + c];
                    if (o) o[((i * B + b) * H + h) * D + c] = (float)x;
                    loss += x * g[c];
                }
            }
    return loss;
}

static te_tensor *tensor_of(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, const double *x) {
    const int64_t n = test_numel(ndim, shape);
    float *y = test_floats(n);
    for (int64_t i = 0; i < n; i++) y[i] = (float)x[i];
    return test_tensor(te, dtype, ndim, shape, y);
}

enum { TQ, TK, TV, TBIAS, LEAVES };
typedef struct tried {
    te_tensor *leaf[LEAVES], *o;
} tried;
static tried try_rule(te_ctx *te, te_dtype dtype, const arrays *a, const te_score_mod *m) {
    te_attn_desc d;
    tried t;
    memset(&d, 0, sizeof d);
    t.leaf[TQ] = tensor_of(te, dtype, SHAPE(S, B, H, D), a->q);
    t.leaf[TK] = tensor_of(te, dtype, SHAPE(T, B, G, D), a->k);
    t.leaf[TV] = tensor_of(te, dtype, SHAPE(T, B, G, D), a->v);
    t.leaf[TBIAS] = tensor_of(te, dtype, SHAPE(1, H, S, T), a->bias);
    for (int i = 0; i < LEAVES; i++) te_tensor_set_requires_grad(t.leaf[i], true);
    d.rule.core_attention_bias_type = TE_ATTN_BIAS_POST_SCALE;
    d.rule.core_attention_bias = t.leaf[TBIAS];
    d.rule.score_mod = *m;
    t.o = te_attention(t.leaf[TQ], t.leaf[TK], t.leaf[TV], &d);
    return t;
}

/* Without NVRTC, CUDA has no expressions, and says so. */
static bool compiles(te_ctx *te) {
    te_attn_desc d = {.rule.score_mod = rule_of(te, ALIBI)};
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(S, B, H, D));
    if (te_attention(x, x, x, &d)) return true;
    CHECK_ERROR(te, TE_ERR_LIBRARY, "there is no NVRTC to compile them");
    return false;
}

/* In f32 the error is that of sums of some hundred products, and of tanhf and exp2f on CUDA: a few units of the last place each. */
TE_TEST_DEVICES(score_mod_against_a_reference) {
    if (!compiles(te)) SKIP("no NVRTC");
    for (int rule = 0; rule < RULES; rule++) {
        arrays a = arrays_of();
        double *const moved[LEAVES] = {a.q, a.k, a.v, a.bias};
        float *o = test_floats(S * B * H * D);
        test_case("rule %d", rule);
        te_score_mod m = rule_of(te, rule);
        tried t = try_rule(te, TE_F32, &a, &m);
        REQUIRE_OK(te);
        reference(&a, rule, o);
        CHECK_TENSOR(t.o, o, 1e-5, 2e-6);
        te_backward_from(t.o, tensor_of(te, TE_F32, SHAPE(S, B, H, D), a.g));
        CHECK_OK(te);
        for (int i = 0; i < LEAVES; i++) {
            const float *got = test_read(te_tensor_grad(t.leaf[i]));
            int64_t n = te_tensor_numel(t.leaf[i]);
            for (int64_t k = 0; k < n; k += 1 + n / 40) {
                const double start = moved[i][k], step = 1e-4;
                moved[i][k] = start + step;
                double rise = reference(&a, rule, NULL);
                moved[i][k] = start - step;
                rise = (rise - reference(&a, rule, NULL)) / (2 * step);
                moved[i][k] = start;
                /* the difference is exact to the square of its step */
                CHECK_MSG(fabs(rise - (double)got[k]) <= 2e-5 * (1 + fabs(rise)), "leaf %d: the gradient [%lld] is %.7g, not %.7g", i, (long long)k, (double)got[k], rise);
            }
        }
    }
}

/* The formats, and the CPU's functions against the expressions. */
TE_TEST_DEVICES(score_mod_on_both_backends) {
    if (!compiles(te)) SKIP("no NVRTC");
    te_ctx *cpu = test_cpu_beside(te);
    static const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F16};
    static const double limits[] = {1e-5, 1.5e-2, 2e-3}; /* f32 sums, or the rounding of the format, which tensor cores give P and dS, too; the backward pass reads the rounded o */
    arrays a = arrays_of();
    if (!cpu) SKIP("compares CUDA with the CPU");
    for (int n = 0; n < COUNT(dtypes) * RULES; n++) {
        te_ctx *const both[2] = {te, cpu};
        float *values[2][1 + LEAVES];
        test_case("%s, rule %d", te_dtype_name(dtypes[n / RULES]), n % RULES);
        for (int k = 0; k < 2; k++) {
            te_score_mod m = rule_of(both[k], n % RULES);
            tried t = try_rule(both[k], dtypes[n / RULES], &a, &m);
            te_backward_from(t.o, tensor_of(both[k], dtypes[n / RULES], SHAPE(S, B, H, D), a.g));
            CHECK_OK(both[k]);
            values[k][LEAVES] = test_read(t.o);
            for (int i = 0; i < LEAVES; i++) values[k][i] = test_read(te_tensor_grad(t.leaf[i]));
        }
        static const int64_t counts[1 + LEAVES] = {S * B * H * D, T * B * G * D, T * B * G * D, H * S * T, S * B * H * D};
        for (int i = 0; i <= LEAVES; i++) CHECK_ERROR_BELOW("CUDA against the CPU", values[0][i], values[1][i], counts[i], limits[n / RULES]);
    }
}

/* Where a rule is the one that te.h has itself, the numbers are those: within one rounding of a score. */
TE_TEST_DEVICES(score_mod_as_alibi) {
    if (!compiles(te)) SKIP("no NVRTC");
    arrays a = arrays_of();
    te_score_mod m = rule_of(te, ALIBI), none;
    te_attn_desc d;
    memset(&d, 0, sizeof d);
    memset(&none, 0, sizeof none);
    memset(a.bias, 0, H * S * T * sizeof(double));
    tried t = try_rule(te, TE_F32, &a, &m);
    d.rule.bottom_right_diagonal = TE_OFF;
    d.rule.core_attention_bias_type = TE_ATTN_BIAS_ALIBI;
    d.rule.alibi_slopes = m.aux[0];
    te_tensor *want = te_attention(t.leaf[TQ], t.leaf[TK], t.leaf[TV], &d);
    REQUIRE_OK(te);
    CHECK_TENSOR(t.o, test_read(want), 1e-5, 1e-6);
}

/* Rows of another document see no key: 0 and no gradient. Dropout, a sink and FP8 go on as they are. */
static bool none_seen(void *user, int64_t b, int64_t h, int64_t q, int64_t k) { return (void)user, (void)b, (void)k, !(h == 1 && q == 3); }
TE_TEST_DEVICES(score_mod_of_rows_that_see_nothing) {
    if (!compiles(te)) SKIP("no NVRTC");
    arrays a = arrays_of();
    te_score_mod m;
    memset(&m, 0, sizeof m);
    m.mask_mod = "!(h == 1 && q_idx == 3)";
    m.mask_fn = none_seen;
    tried t = try_rule(te, TE_F32, &a, &m);
    te_backward_from(t.o, tensor_of(te, TE_F32, SHAPE(S, B, H, D), a.g));
    REQUIRE_OK(te);
    const float *o = test_read(t.o), *dq = test_read(te_tensor_grad(t.leaf[TQ]));
    for (int64_t b = 0; b < B; b++)
        for (int c = 0; c < D; c++) {
            const int64_t at = ((3 * B + b) * H + 1) * D + c;
            CHECK(o[at] == 0 && dq[at] == 0 && o[at + D] != 0 && dq[at + D] != 0);
        }
}

/* Padding, packed rows, dropout, a sink and FP8: what the rule changes stands before all of them, so the identity changes no bit of the general kernels' numbers. */
static float same(void *user, float score, int64_t b, int64_t h, int64_t q, int64_t k) { return (void)user, (void)b, (void)h, (void)q, (void)k, score; }
static float one(void *user, float score, int64_t b, int64_t h, int64_t q, int64_t k) { return (void)user, (void)score, (void)b, (void)h, (void)q, (void)k, 1.0f; }
TE_TEST(score_mod_beside_the_rest) {
    te_ctx *te = test_context("cpu");
    const int64_t lengths[3] = {0, 7, S};
    arrays a = arrays_of();
    float *got[2][5];
    for (int with = 0; with < 2; with++) {
        te_attn_desc d;
        te_tensor *x[4];
        memset(&d, 0, sizeof d);
        x[0] = tensor_of(te, TE_F32, SHAPE(S, H, D), a.q);
        x[1] = tensor_of(te, TE_F32, SHAPE(S, G, D), a.k);
        x[2] = tensor_of(te, TE_F32, SHAPE(S, G, D), a.v);
        x[3] = tensor_of(te, TE_F32, SHAPE(H), a.bias);
        for (int i = 0; i < 4; i++) te_tensor_set_requires_grad(x[i], true);
        d.format = TE_THD;
        d.rule.mask = TE_MASK_PADDING_CAUSAL;
        d.rule.dropout_p = 0.3f;
        d.rule.cu_seqlens_q = d.rule.cu_seqlens_kv = test_i32(te, SHAPE(3), lengths);
        d.rule.softmax_type = TE_SOFTMAX_LEARNABLE;
        d.rule.softmax_offset = x[3];
        if (with) {
            d.rule.score_mod.score_fn = same;
            d.rule.score_mod.score_bprop_fn = one;
        }
        te_seed(te, 9);
        te_tensor *o = te_attention(x[0], x[1], x[2], &d);
        te_backward_from(o, tensor_of(te, TE_F32, SHAPE(S, H, D), a.g));
        REQUIRE_OK(te);
        got[with][4] = test_read(o);
        for (int i = 0; i < 4; i++) got[with][i] = test_read(te_tensor_grad(x[i]));
    }
    static const int64_t counts[5] = {S * H * D, S * G * D, S * G * D, H, S * H * D};
    for (int i = 0; i < 5; i++) CHECK_BYTES("the identity", got[1][i], got[0][i], (size_t)counts[i] * 4);
}

/* By a module: run again for the backward pass, and under a recipe with FP8 attention. Texts are the caller's until then. */
TE_TEST_DEVICES(score_mod_of_a_module) {
    if (!compiles(te)) SKIP("no NVRTC");
    te_recipe recipe = te_recipe_current_scaling();
    recipe.fp8_dpa = true;
    for (int fp8 = 0; fp8 < 2; fp8++) {
        float *got[2][4];
        for (int again = 0; again < 2; again++) {
            arrays a = arrays_of();
            te_dot_product_attention_desc d;
            te_autocast_desc cast;
            te_forward_args args;
            te_tensor *x[3];
            memset(&d, 0, sizeof d);
            memset(&cast, 0, sizeof cast);
            memset(&args, 0, sizeof args);
            d.attention.num_attention_heads = H;
            d.attention.num_gqa_groups = G;
            d.attention.kv_channels = D;
            d.attention.checkpoint_core_attention = again;
            cast.recipe = &recipe;
            cast.disabled = !fp8;
            te_module *m = te_dot_product_attention_create(te, &d);
            te_score_mod rule = rule_of(te, BOTH);
            x[0] = tensor_of(te, TE_F32, SHAPE(S, B, H, D), a.q);
            x[1] = tensor_of(te, TE_F32, SHAPE(T, B, G, D), a.k);
            x[2] = tensor_of(te, TE_F32, SHAPE(T, B, G, D), a.v);
            for (int i = 0; i < 3; i++) te_tensor_set_requires_grad(x[i], true);
            args.input = x[0];
            args.key = x[1];
            args.value = x[2];
            args.attention.score_mod = &rule;
            te_autocast_begin(te, &cast);
            te_tensor *y = te_forward_with(m, &args);
            te_autocast_end(te);
            te_backward_from(y, tensor_of(te, TE_F32, SHAPE(S, B, H * D), a.g));
            REQUIRE_OK(te);
            got[again][3] = test_read(y);
            for (int i = 0; i < 3; i++) got[again][i] = test_read(te_tensor_grad(x[i]));
            if (!fp8) {
                memset(a.bias, 0, H * S * T * sizeof(double));
                float *o = test_floats(S * B * H * D);
                reference(&a, BOTH, o);
                CHECK_CLOSE("o", got[again][3], o, S * B * H * D, 1e-5, 2e-6);
            }
            te_module_destroy(m);
        }
        static const int64_t counts[4] = {S * B * H * D, T * B * G * D, T * B * G * D, S * B * H * D};
        for (int i = 0; i < 4; i++) CHECK_BYTES("run again", got[1][i], got[0][i], (size_t)counts[i] * 4);
    }
}

/* ---- what is refused ---- */

TE_TEST_DEVICES(score_mod_refuses_expressions) {
    static const struct {
        const char *text, *says;
    } wrong[] = {{"", "has 0 characters; an expression of 1 to 1000"},
                 {"score; 1", "has ; at character 6; names, numbers, blanks"},
                 {"score + {1}", "has { at character 9"},
                 {"score #", "has # at character 7"},
                 {"score + \"a\"", "has \" at character 9"},
                 {"score +\n1", "has \\x0a at character 8"},
                 {"score \\", "has \\ at character 7"},
                 {"score + '1'", "has ' at character 9"},
                 {"score // more", "has // at character 7"},
                 {"score /* more", "has /* at character 7"},
                 {"score + $1", "has $ at character 9"},
                 {"score + \xc3\xa9", "has \\xc3 at character 9"},
                 {"(score", "has 1 brackets that are not closed"},
                 {"score)", "has a ) at character 6 that closes nothing"},
                 {"aux0[(h])", "has a ] at character 8 that closes nothing"},
                 {"asm(score)", "has the name \"asm\" at character 1"},
                 {"score + threadIdx.x", "has the name \"threadIdx\" at character 9"},
                 {"score + te_load(0)", "has the name \"te_load\""},
                 {"score + aux1[h]", "has the name \"aux1\" at character 9, and no such tensor is given"},
                 {"score + aux4[h]", "has the name \"aux4\""},
                 {"score + sizeof score", "has the name \"sizeof\""},
                 {"score = 1", "has =  at character 7; an expression has no assignments"},
                 {"score += 1", "has =  at character 8"},
                 {"score <<= 1", "has =  at character 9"},
                 {"score++", "has ++ at character 6"},
                 {"*(float *)(q_idx * 4096)", "has *( at character 1"},
                 {"(float *)(h)", "has *) at character 8"},
                 {"score + *&score", "has *& at character 9"},
                 {"min(&score, 1)", "has &s at character 5"},
                 {"[&](int x)", "has [& at character 1"},
                 {"score <% h", "has <% at character 7"},
                 {"aux0<:h]", "has <: at character 5"},
                 {"::abs(score)", "has :: at character 1"}};
    char longest[TE_SCORE_MOD_CHARS + 2];
    arrays a = arrays_of();
    te_score_mod m = rule_of(te, ALIBI);
    for (int i = 0; i < COUNT(wrong); i++) {
        m.score_mod = wrong[i].text;
        test_case("%s", wrong[i].text);
        CHECK(!try_rule(te, TE_F32, &a, &m).o);
        CHECK_STR(te_error(te), "rule.score_mod.score_mod");
        CHECK_ERROR(te, TE_ERR_INVALID, wrong[i].says);
    }
    memset(longest, '1', sizeof longest);
    longest[sizeof longest - 1] = 0;
    m.score_mod = longest;
    CHECK(!try_rule(te, TE_F32, &a, &m).o);
    CHECK_ERROR(te, TE_ERR_INVALID, "has more than 1000 characters");
    m = rule_of(te, DOCUMENT);
    m.mask_mod = "score > 0";
    CHECK(!try_rule(te, TE_F32, &a, &m).o);
    CHECK_ERROR(te, TE_ERR_INVALID, "rule.score_mod.mask_mod has the name \"score\" at character 1, which a mask does not have");
}

TE_TEST_DEVICES(score_mod_refuses_what_is_missing) {
    if (!compiles(te)) SKIP("no NVRTC");
    arrays a = arrays_of();
    te_score_mod m = rule_of(te, CAP);
    m.score_mod_bprop = NULL;
    m.score_bprop_fn = NULL;
    CHECK(!try_rule(te, TE_F32, &a, &m).o);
    CHECK_ERROR(te, TE_ERR_INVALID, "a gradient is asked for, rule.score_mod.score_mod is given and score_mod_bprop is NULL; give the derivative by score, or set additive if it is 1");
    te_no_grad_begin(te);
    CHECK(try_rule(te, TE_F32, &a, &m).o != NULL);
    CHECK_OK(te);
    te_no_grad_end(te);
    m = rule_of(te, CAP);
    m.score_mod = NULL;
    CHECK(!try_rule(te, TE_F32, &a, &m).o);
    CHECK_ERROR(te, TE_ERR_INVALID, "score_mod_bprop is given and score_mod is NULL");
    m = rule_of(te, BOTH);
    if (te_ctx_is_cuda(te)) m.score_mod = m.score_mod_bprop = NULL;
    else m.score_fn = NULL, m.score_bprop_fn = NULL;
    CHECK(!try_rule(te, TE_F32, &a, &m).o);
    CHECK_ERROR(te, TE_ERR_INVALID, te_ctx_is_cuda(te) ? "score_fn is given and score_mod is NULL; CUDA compiles expressions" : "score_mod is given and score_fn is NULL; the CPU calls functions");
    m = rule_of(te, DOCUMENT);
    if (te_ctx_is_cuda(te)) m.mask_mod = NULL;
    else m.mask_fn = NULL;
    CHECK(!try_rule(te, TE_F32, &a, &m).o);
    CHECK_ERROR(te, TE_ERR_INVALID, te_ctx_is_cuda(te) ? "mask_fn is given and mask_mod is NULL" : "mask_mod is given and mask_fn is NULL");
    m = rule_of(te, ALIBI);
    m.aux[0] = te_tensor_zeros(te, TE_F8E4M3, SHAPE(H));
    CHECK(!try_rule(te, TE_F32, &a, &m).o);
    CHECK_ERROR(te, TE_ERR_DTYPE, "aux[0] is e4m3");
}

/* The expression passes the check and not the compiler, whose words come back. */
TE_TEST_DEVICES(score_mod_that_does_not_compile) {
    if (!compiles(te)) SKIP("no NVRTC");
    arrays a = arrays_of();
    te_score_mod m = rule_of(te, ALIBI);
    if (!te_ctx_is_cuda(te)) SKIP("the CPU compiles nothing");
    m.score_mod = "score + fabsf(1, 2)";
    CHECK(!try_rule(te, TE_F32, &a, &m).o);
    CHECK(te_error_code(te) == TE_ERR_COMPILE && strstr(te_error(te), "fabsf(1, 2)"));
    te_clear_error(te);
}
