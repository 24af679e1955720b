/* wings.c: a program of te.h with some wings left out, by TE_NO_... of the compiler's command line. Trains a Linear with Adam, uses what is there
 * of each wing, and asks for what is not: each such call has one error, which names the macro. Compiled as C and as C++ (matrix.sh). */
#define TE_IMPLEMENTATION
#include "te.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check(bool fine, const char *what, te_ctx *te) {
    if (fine) return;
    printf("%s: %s\n", what, te_error(te));
    exit(1);
}
/* The call before gave an error that has this word, such as the name of a macro. */
static void refused(te_ctx *te, bool made, const char *macro) {
    if (made || !strstr(te_error(te), macro)) {
        printf("%s: %s, \"%s\"\n", macro, made ? "made" : "refused", te_error(te));
        exit(1);
    }
    te_clear_error(te);
}

static te_module *linear_of(te_ctx *te, int tp_size) {
    te_linear_desc d;
    memset(&d, 0, sizeof d);
    d.in_features = 32;
    d.out_features = 32;
    d.gemm.params_dtype = TE_F32;
    d.parallel.tp_size = tp_size;
    d.parallel.parallel_mode = tp_size ? TE_PARALLEL_COLUMN : TE_PARALLEL_NONE;
    return te_linear_create(te, &d);
}

/* Ten steps under FP8: the loss falls. */
static void train(te_ctx *te, te_module *m) {
    const int64_t shape[2] = {16, 32};
    te_fused_adam_desc a;
    te_recipe recipe = te_recipe_current_scaling();
    te_autocast_desc cast;
    te_optimizer *adam;
    double first = 0, last = 0;
    int i;
    memset(&a, 0, sizeof a);
    memset(&cast, 0, sizeof cast);
    a.lr = 0.05f;
    cast.recipe = &recipe;
    adam = te_fused_adam_create(te, m, &a);
    for (i = 0; i < 10; i++) {
        te_tensor *x, *loss;
        te_scope_begin(te);
        x = te_tensor_full(te, TE_F32, 2, shape, 0.5);
        te_autocast_begin(te, &cast);
        loss = te_mse_loss(te_forward(m, x), x);
        te_autocast_end(te);
        te_backward(loss);
        te_optimizer_step(adam);
        last = te_tensor_item(loss);
        if (i == 0) first = last;
        te_scope_end(te);
    }
    te_optimizer_destroy(adam);
    check(te_ok(te) && last < 0.5 * first, "train", te);
}

static te_module *model_of(te_ctx *te, int experts) {
#ifdef TE_NO_LM
    (void)te, (void)experts;
    return NULL;
#else
    te_causal_lm_desc d;
    memset(&d, 0, sizeof d);
    d.vocab_size = 32;
    d.hidden_size = d.intermediate_size = 32;
    d.num_hidden_layers = 1;
    d.num_attention_heads = 2;
    d.params_dtype = TE_F32;
    d.num_local_experts = experts;
    d.num_experts_per_tok = experts / 2;
    return te_causal_lm_create(te, &d);
#endif
}

int main(void) {
    te_ctx_desc d;
    te_ctx *te;
    te_module *m, *model, *moe;
    memset(&d, 0, sizeof d);
    d.device = "cpu";
    d.log_level = TE_LOG_ERROR;
    te = te_ctx_create(&d);
    check(te_ok(te), "te_ctx_create", te);
    m = linear_of(te, 0);
    train(te, m);

#ifdef TE_NO_CUDA
    d.device = "cuda:0";
    {
        te_ctx *gpu = te_ctx_create(&d);
        te_op_fill_args fill;
        te_explanation e;
        refused(gpu, te_ok(gpu), "TE_NO_CUDA");
        memset(&fill, 0, sizeof fill);
        fill.dst = te_tensor_full(te, TE_F32, 0, NULL, 0);
        refused(te, te_explain(te, TE_OP_FILL, &fill, "sm_90", &e) == TE_OK, "TE_NO_CUDA");
        te_ctx_destroy(gpu);
    }
#endif

    /* ranks */
    refused(te, linear_of(te, -1) != NULL, "tp_size");
#ifdef TE_NO_DIST
    refused(te, linear_of(te, 2) != NULL, "TE_NO_DIST");
#else
    check(te_group_size(NULL) == 1, "te_group_size", te);
#endif

    /* models and mixtures of experts */
    model = model_of(te, 0);
    moe = model_of(te, 4);
#ifndef TE_NO_LM
    check(model != NULL, "te_causal_lm_create", te);
#ifdef TE_NO_MOE
    refused(te, moe != NULL, "TE_NO_MOE");
#else
    check(moe != NULL, "te_causal_lm_create with experts", te);
#endif
#endif

    /* adapters */
#ifndef TE_NO_LORA
    {
        te_lora_desc lora;
        int sites;
        memset(&lora, 0, sizeof lora);
        lora.dim = 4;
        lora.match_all_linear = true;
        sites = 0;
        check(te_lora_apply(model ? model : m, &lora, &sites) == TE_OK && sites > 0, "te_lora_apply", te);
    }
#endif

    /* the layer of NeMo Automodel */
#ifndef TE_NO_AUTOMODEL
    {
        te_backend_config config = te_backend_config_defaults(NULL);
        check(te_backend_config_validate(te, &config, NULL) == TE_OK, "te_backend_config_validate", te);
    }
#endif

    /* a file, in a folder that is not there */
#ifndef TE_NO_ONNX
    check(te_onnx_export(m, NULL, "te_wings/x.onnx") == TE_ERR_INVALID, "te_onnx_export", te);
    te_clear_error(te);
#endif

    te_module_destroy(moe);
    te_module_destroy(model);
    te_module_destroy(m);
    check(te_ok(te), "the end", te);
    te_ctx_destroy(te);
    return 0;
}
