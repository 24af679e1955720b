/* tests/nn/test_act_rounding.c: which numbers of an activation, forward and backward, are rounded before their amax is taken, before they are quantized and before
 * they are summed up: for each recipe and module as TransformerEngine has it. */
#include "../te_test.h"

enum { TOKENS = 200, HIDDEN = 48, FFN = 64 };

/* ---- what the calls inside of a module read and wrote ---- */

typedef struct noted_act {
    te_activation act;
    bool backward;
    const float *x, *dy; /* copies */
    int64_t block;
    const void *made;    /* the address of what it wrote; NULL: codes alone */
    int casts;           /* of what it made, and what they were made by: */
    float scale_inv, amax_row, amax_col;
    bool measured;
} noted_act;
typedef struct notes {
    noted_act act[8];
    int n;
} notes;

static bool is_codes(const te_tensor *x) { return !x || te_tensor_dtype(x) == TE_F8E4M3 || te_tensor_dtype(x) == TE_F8E5M2; }
static float only(const te_tensor *x) { return x ? test_read(x)[0] : -1; }

static void note(te_ctx *te, const te_trace *e, void *user) {
    notes *all = (notes *)user;
    (void)te;
    if (e->op == TE_OP_ACT_FWD && e->phase == TE_TRACE_BEFORE && all->n < COUNT(all->act)) {
        const te_op_act_fwd_args *a = (const te_op_act_fwd_args *)e->args;
        noted_act *to = &all->act[all->n++];
        to->act = a->activation;
        to->x = test_read(a->x);
        to->block = a->activation_params.glu_interleave_size;
        to->made = is_codes(a->y) ? NULL : te_tensor_data(a->y);
    }
    if (e->op == TE_OP_ACT_BWD && e->phase == TE_TRACE_BEFORE && all->n < COUNT(all->act)) {
        const te_op_act_bwd_args *a = (const te_op_act_bwd_args *)e->args;
        noted_act *to = &all->act[all->n++];
        to->act = a->activation;
        to->backward = true;
        to->x = test_read(a->x);
        to->dy = test_read(a->dy);
        to->block = a->activation_params.glu_interleave_size;
        to->made = is_codes(a->dx) ? NULL : te_tensor_data(a->dx);
    }
    if ((e->op != TE_OP_FP8_QUANTIZE && e->op != TE_OP_NVFP4_QUANTIZE) || e->phase != TE_TRACE_AFTER || !all->n) return;
    noted_act *last = &all->act[all->n - 1];
    const te_op_fp8_quantize_args *fp8 = (const te_op_fp8_quantize_args *)e->args;
    const te_op_nvfp4_quantize_args *fp4 = (const te_op_nvfp4_quantize_args *)e->args;
    if (te_tensor_data(e->op == TE_OP_FP8_QUANTIZE ? fp8->x : fp4->x) != last->made) return;
    last->casts++;
    last->measured = e->op == TE_OP_FP8_QUANTIZE ? fp8->current && !fp8->x_amax : fp4->measure;
    if (e->op == TE_OP_FP8_QUANTIZE) last->scale_inv = only(fp8->scale_inv);
    else last->amax_row = only(fp4->amax_row), last->amax_col = only(fp4->amax_col);
}

/* ---- modules ---- */

typedef enum way { MLP, CHAIN, WAYS } way; /* LayerNormMLP; a Sequential of two Linears and the activation between them */
typedef struct made {
    te_module *all, *fc1;
    const char *bias;
} made;

static made make(te_ctx *te, way w, te_activation act, bool bias, te_dtype dtype, int64_t block) {
    const int64_t wide = te_activation_is_gated(act) ? 2 * FFN : FFN;
    te_tensor *b;
    made m = {0};
    if (w == MLP) {
        te_layernorm_mlp_desc d = {.hidden_size = HIDDEN, .ffn_hidden_size = FFN, .activation = act, .activation_params.glu_interleave_size = block};
        d.gemm.no_bias = !bias;
        d.gemm.params_dtype = dtype;
        d.gemm.init.std = d.output_layer_init.std = 0.2f;
        m.all = m.fc1 = te_layernorm_mlp_create(te, &d);
        m.bias = "fc1_bias";
    } else {
        te_linear_desc one = {.in_features = HIDDEN, .out_features = wide}, two = {.in_features = FFN, .out_features = HIDDEN};
        te_activation_desc a = {.activation = act, .activation_params.glu_interleave_size = block};
        one.gemm.no_bias = two.gemm.no_bias = !bias;
        one.gemm.params_dtype = two.gemm.params_dtype = dtype;
        one.gemm.init.std = two.gemm.init.std = 0.2f;
        te_module *part[3] = {te_linear_create(te, &one), te_activation_create(te, &a), te_linear_create(te, &two)};
        m.fc1 = part[0];
        m.all = te_sequential_create(te, part, 3);
        m.bias = "bias";
    }
    b = te_module_parameter(m.fc1, m.bias);
    if (b) te_tensor_copy(b, te_tensor_normal(te, dtype, SHAPE(wide), 0, 1));
    return m;
}

/* One step; its activations' calls go to *all. */
static void step(te_ctx *te, const made *m, const te_recipe *r, te_dtype dtype, notes *all) {
    te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, dtype, SHAPE(TOKENS, HIDDEN), test_normal(TOKENS * HIDDEN, 1)), true);
    te_tensor *dy = test_tensor(te, dtype, SHAPE(TOKENS, HIDDEN), test_normal(TOKENS * HIDDEN, 2));
    memset(all, 0, sizeof(*all));
    te_set_trace(te, note, all);
    te_tensor *y = test_forward(m->all, r, x);
    if (y) te_backward_from(y, dy);
    te_set_trace(te, NULL, NULL);
}

/* Returns the result that the call would write in f32. */
static const float *in_f32(te_ctx *te, const noted_act *a, te_dtype dtype, int64_t *n) {
    const int64_t wide = te_activation_is_gated(a->act) ? 2 * FFN : FFN;
    te_op_act_fwd_args f = {0};
    te_op_act_bwd_args b = {0};
    f.x = b.x = test_tensor(te, dtype, SHAPE(TOKENS, wide), a->x);
    f.activation = b.activation = a->act;
    f.activation_params.glu_interleave_size = b.activation_params.glu_interleave_size = te_activation_is_gated(a->act) ? a->block : 0;
    f.y = b.dx = te_tensor_empty(te, TE_F32, SHAPE(TOKENS, a->backward ? wide : FFN));
    *n = te_tensor_numel(f.y);
    if (a->backward) {
        b.dy = test_tensor(te, dtype, SHAPE(TOKENS, FFN), a->dy);
        te_op_act_bwd(te, &b);
    } else
        te_op_act_fwd(te, &f);
    return test_read(f.y);
}
static float amax_of(const float *v, int64_t n) {
    float largest = 0;
    for (int64_t i = 0; i < n; i++) largest = fmaxf(largest, fabsf(v[i]));
    return largest;
}

/* ---- amaxes ---- */

static const te_activation acts[] = {TE_GELU, TE_SWIGLU, TE_RELU, TE_SILU, TE_SREGLU, TE_CLAMPED_SWIGLU};

/* Forward the amax is that of f32; backward in LayerNormMLP that of rounded numbers; of te.ops that of f32 without a bias, and behind GELU and ReLU with one. Whoever takes it
 * from f32 leaves it to the cast. Casts that transform measure for themselves. */
TE_TEST_DEVICES(amaxes_of_activations_in_modules) {
    static const te_dtype formats[] = {TE_BF16, TE_F16};
    int turn = 0;
    for (int recipe = 0; recipe < 3; recipe++) /* current; NVFP4 without the transform, and with it */
        for (int i = 0; i < COUNT(acts); i++)
            for (int k = 0; k < 8; k++) {
                const way w = (way)(k & 1);
                const bool bias = k & 2, gated = te_activation_is_gated(acts[i]);
                const te_dtype dtype = recipe == 0 ? formats[k >> 2] : TE_BF16;
                const int64_t block = recipe < 2 && gated && k >= 4 ? 16 : 0;
                te_recipe r = recipe ? te_recipe_nvfp4() : te_recipe_current_scaling();
                notes all;
                if (recipe) r.nvfp4.rht = recipe == 1 ? TE_OFF : TE_DEFAULT, r.nvfp4.stochastic_rounding = TE_OFF;
                if ((recipe == 2 && k >= 4) || turn++ % test_every_odd(3)) continue;
                test_case("%s%s, activation %d, %s%s, %s, blocks of %d", te_recipe_name(r.kind), recipe == 2 ? " transformed" : "", (int)acts[i], w == MLP ? "LayerNormMLP" : "Sequential",
                          bias ? " with a bias" : "", te_dtype_name(dtype), (int)block);
                te_scope_begin(te);
                made m = make(te, w, acts[i], bias, dtype, block);
                step(te, &m, &r, dtype, &all);
                REQUIRE_OK(te);
                CHECK_EQ_INT(all.n, 2);
                for (int j = 0; j < all.n; j++) {
                    const noted_act *a = &all.act[j];
                    const bool fused = !a->backward || (w == CHAIN && !block && (!bias || acts[i] == TE_GELU || acts[i] == TE_RELU)), exact = recipe < 2 && fused;
                    int64_t n;
                    const float *v = in_f32(te, a, dtype, &n);
                    const float amax = amax_of(exact ? v : test_rounded(dtype, v, n), n), top = !recipe && a->backward ? 57344.0f : 448.0f;
                    CHECK_EQ_INT(a->backward, j);
                    CHECK_MSG(a->casts == 1, "%s: %d casts", j ? "backward" : "forward", a->casts);
                    if (recipe == 0) CHECK_MSG(a->scale_inv == 1.0f / (top / amax), "%s: scale_inv is %a; of an amax of %a it is %a", j ? "backward" : "forward", (double)a->scale_inv, (double)amax,
                                               (double)(1.0f / (top / amax)));
                    else CHECK_MSG(a->amax_row == amax, "%s: the amax is %a, not %a", j ? "backward" : "forward", (double)a->amax_row, (double)amax);
                    if (recipe == 1) CHECK(a->amax_col == amax);
                    if (exact) CHECK_MSG(!a->measured, "%s: the cast measures again", j ? "backward" : "forward");
                }
                te_module_destroy(m.all);
                te_scope_end(te);
            }
}

/* ---- sums ---- */

/* Under MXFP8, and delayed scaling, the gradient of fc1's bias is the sum of the unrounded derivative of a plain activation (quantize_mxfp8.cuh; te.ops: of GELU and ReLU); under
 * current scaling, and of gated ones, of the rounded one. Against f64 sums. */
TE_TEST_DEVICES(bias_gradients_of_activations) {
    static const te_activation plain[] = {TE_GELU, TE_QGELU, TE_RELU, TE_SRELU, TE_SILU, TE_SWIGLU};
    static te_recipe (*const recipes[])(void) = {te_recipe_mxfp8, te_recipe_delayed_scaling, te_recipe_current_scaling};
    int turn = 0;
    for (int recipe = 0; recipe < COUNT(recipes); recipe++)
        for (int i = 0; i < COUNT(plain); i++)
            for (int w = 0; w < WAYS; w++) {
                if (turn++ % test_every_odd(2)) continue;
                te_recipe r = recipes[recipe]();
                const bool exact = r.kind != TE_RECIPE_CURRENT && !te_activation_is_gated(plain[i]) && (w == MLP || plain[i] == TE_GELU || plain[i] == TE_RELU);
                int64_t n, wide = te_activation_is_gated(plain[i]) ? 2 * FFN : FFN;
                int off = 0, apart = 0;
                notes all;
                test_case("%s, activation %d, %s", te_recipe_name(r.kind), (int)plain[i], w == MLP ? "LayerNormMLP" : "Sequential");
                te_scope_begin(te);
                made m = make(te, (way)w, plain[i], true, TE_BF16, 0);
                step(te, &m, &r, TE_BF16, &all);
                REQUIRE_OK(te);
                REQUIRE(all.n == 2);
                const float *v = in_f32(te, &all.act[1], TE_BF16, &n), *rounded = test_rounded(TE_BF16, v, n), *got = test_read(te_tensor_grad(te_module_parameter(m.fc1, m.bias)));
                for (int64_t c = 0; c < wide; c++) {
                    double sum[2] = {0, 0};
                    float want[2];
                    for (int64_t t = 0; t < TOKENS; t++) sum[0] += v[t * wide + c], sum[1] += rounded[t * wide + c];
                    for (int k = 0; k < 2; k++) want[k] = (float)sum[k];
                    float *stored = test_rounded(TE_BF16, want, 2);
                    apart += stored[0] != stored[1];
                    off += got[c] != stored[exact ? 0 : 1];
                }
                CHECK_MSG(apart >= wide / 10 || plain[i] == TE_RELU, "the two ways differ in %d of %d columns alone", apart, (int)wide);
                CHECK_MSG(off <= 1 + wide / 50, "%d of %d columns are not bf16 of the f64 sum", off, (int)wide); /* an f32 sum may fall to the other side of a tie */
                te_module_destroy(m.all);
                te_scope_end(te);
            }
}
