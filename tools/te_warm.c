/* te_warm: compiles beforehand what a transformer needs, for GPUs that need not be here, into a folder: a user's own cache, or one that
 * ships with a product ($TE_CACHE_READONLY names it there) so that its users need no NVRTC.
 *
 *     te_warm --arch sm_90 --arch sm_89 --out kernels --hidden 4096 --ffn 14336 --heads 32 --kv-heads 8
 *
 * A training step of one layer between an embedding and a loss is planned, not run, under each recipe; what it would launch is compiled.
 * Kernels do not depend on sizes, only on formats, alignment and tiles, so one set of sizes serves its neighbours. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "te.h"

typedef struct sizes {
    int64_t hidden, ffn, heads, kv_heads, seq, batch, vocabulary;
    te_dtype dtype;
    bool layernorm, inference;
} sizes;

/* ---- a device that only plans ---- */

static int planned_sm;
static te__launch *noted;
static int num_noted, cap_noted;

static te_result plan_only(te_ctx *te, const te__op_info *op, const void *args) {
    te__plan plan;
    te_result result;
    int i, k;
    te__plan_begin(&plan, te);
    plan.explain = true;
    plan.sm = planned_sm;
    plan.num_sms = te__arch_sms(planned_sm);
    plan.hopper = planned_sm == 90;
    result = op->plan(&plan, args);
    if (result == TE_OK) result = plan.result;
    for (i = 0; i < plan.num_launches && result == TE_OK; i++) {
        const te__launch *l = &plan.launch[i];
        for (k = 0; k < num_noted; k++)
            if (te__same_launch(&noted[k], l->family, l->kernel, l->option, l->num_options)) break;
        if (k < num_noted) continue;
        if (!te__grow(te, (void **)&noted, &cap_noted, num_noted, sizeof(te__launch))) break;
        noted[num_noted++] = *l;
    }
    te__plan_end(&plan);
    return result;
}

/* ---- what is planned ---- */

static void plan_step(te_ctx *te, const sizes *s, const te_recipe *recipe) {
    te_transformer_layer_desc d = TE_ZERO;
    te_embedding_desc e = TE_ZERO;
    te_norm_desc n = TE_ZERO;
    te_fused_adam_desc a = TE_ZERO;
    te_rotary_desc rope = TE_ZERO;
    te_forward_args f = TE_ZERO;
    te_autocast_desc cast = TE_ZERO;
    te_module *embedding, *layer, *norm;
    te_optimizer *adam;
    te_tensor *y, *ids;
    int64_t shape[2];
    e.num_embeddings = s->vocabulary;
    e.embedding_dim = d.hidden_size = n.hidden_size = s->hidden;
    d.ffn_hidden_size = s->ffn;
    d.attention.num_attention_heads = (int)s->heads;
    d.attention.num_gqa_groups = (int)s->kv_heads;
    d.norm.normalization = s->layernorm ? TE_LAYERNORM : TE_RMSNORM;
    d.activation = s->layernorm ? TE_GELU : TE_SWIGLU;
    d.gemm.no_bias = !s->layernorm;
    d.gemm.params_dtype = e.params_dtype = n.params_dtype = s->dtype;
    a.max_grad_norm = 1;
    embedding = te_embedding_create(te, &e);
    layer = te_transformer_layer_create(te, &d);
    norm = s->layernorm ? te_layernorm_create(te, &n) : te_rmsnorm_create(te, &n);
    adam = te_fused_adam_create(te, layer, &a);
    te_scope_begin(te);
    shape[0] = s->seq;
    shape[1] = s->batch;
    ids = te_tensor_empty(te, TE_I32, 2, shape);
    cast.recipe = recipe;
    if (s->inference) te_no_grad_begin(te);
    f.input = te_forward(embedding, ids);
    f.rotary = &rope;
    if (recipe) te_autocast_begin(te, &cast);
    y = te_forward_with(layer, &f);
    if (recipe) te_autocast_end(te);
    y = te_linear(te_forward(norm, y), te_module_parameter(embedding, "weight"), NULL);
    if (!s->inference) {
        te_backward(te_cross_entropy(y, ids, NULL));
        te_optimizer_step(adam);
    } else
        te_no_grad_end(te);
    te_scope_end(te);
    te_optimizer_destroy(adam);
    te_module_destroy(norm);
    te_module_destroy(layer);
    te_module_destroy(embedding);
}

/* ---- compiling ---- */

/* Returns how many failed. */
static int compile_noted(const te__cache *cache, const te__nvrtc *nvrtc) {
    te__jit_job *jobs = (te__jit_job *)calloc((size_t)num_noted + 1, sizeof *jobs);
    int i, failed = 0, compiled = 0;
    double start = te__time_now();
    if (!jobs) return 1;
    for (i = 0; i < num_noted; i++) {
        jobs[i].launch = &noted[i];
        jobs[i].cache = cache;
        jobs[i].nvrtc = nvrtc;
        jobs[i].sm = planned_sm;
    }
    te__jit_run(jobs, num_noted);
    for (i = 0; i < num_noted; i++) {
        compiled += jobs[i].compiled;
        if (jobs[i].result != TE_OK || jobs[i].cache_why.n) {
            fprintf(stderr, "te_warm: %s%s\n", te__text_str(&jobs[i].why), te__text_str(&jobs[i].cache_why));
            failed++;
        }
        te__jit_job_free(&jobs[i]);
    }
    free(jobs);
    printf("sm_%d: %d kernels, %d compiled now, %d were there, %d failed, %.1f s\n", planned_sm, num_noted, compiled, num_noted - compiled - failed, failed,
           te__time_now() - start);
    return failed;
}

static int usage(const char *wrong) {
    fprintf(stderr,
            "te_warm: %s\nusage: te_warm [--arch sm_NN ...] [--out DIR] [--hidden N --ffn N --heads N --kv-heads N --seq N --batch N --vocab N]\n"
            "               [--dtype bf16|f16|f32] [--layernorm] [--inference]\n",
            wrong);
    return 2;
}

int main(int argc, char **argv) {
    enum { MAX_ARCHS = 16 };
    sizes s = TE_ZERO;
    const char *out = NULL;
    int archs[MAX_ARCHS], num_archs = 0, i, failed = 0;
    te__device planner;
    te__cache cache;
    te__text why = TE_ZERO;
    te_ctx_desc desc = TE_ZERO;
    te_ctx *te;
    const te__nvrtc *nvrtc;
    s.hidden = 1024, s.heads = 16, s.seq = 1024, s.batch = 8, s.vocabulary = 256, s.dtype = TE_BF16;
    for (i = 1; i < argc; i++) {
        struct {
            const char *name;
            int64_t *value;
        } numbers[7];
        size_t k;
        numbers[0].name = "--hidden", numbers[0].value = &s.hidden;
        numbers[1].name = "--ffn", numbers[1].value = &s.ffn;
        numbers[2].name = "--heads", numbers[2].value = &s.heads;
        numbers[3].name = "--kv-heads", numbers[3].value = &s.kv_heads;
        numbers[4].name = "--seq", numbers[4].value = &s.seq;
        numbers[5].name = "--batch", numbers[5].value = &s.batch;
        numbers[6].name = "--vocab", numbers[6].value = &s.vocabulary;
        for (k = 0; k < 7 && strcmp(argv[i], numbers[k].name) != 0; k++) {}
        if (strcmp(argv[i], "--layernorm") == 0)
            s.layernorm = true;
        else if (strcmp(argv[i], "--inference") == 0)
            s.inference = true;
        else if (i + 1 == argc)
            return usage(argv[i]);
        else if (k < 7) {
            *numbers[k].value = atoll(argv[++i]);
            if (*numbers[k].value < 1) return usage("sizes are at least 1");
        } else if (strcmp(argv[i], "--out") == 0)
            out = argv[++i];
        else if (strcmp(argv[i], "--arch") == 0) {
            if (num_archs == MAX_ARCHS || !(archs[num_archs] = te__arch_number(argv[++i]))) return usage("--arch takes sm_80 and higher");
            num_archs++;
        } else if (strcmp(argv[i], "--dtype") == 0) {
            i++;
            s.dtype = strcmp(argv[i], "f32") == 0 ? TE_F32 : strcmp(argv[i], "f16") == 0 ? TE_F16 : strcmp(argv[i], "bf16") == 0 ? TE_BF16 : TE_DTYPE_NONE;
            if (!s.dtype) return usage("--dtype takes bf16, f16 or f32");
        } else
            return usage(argv[i]);
    }
    if (!s.ffn) s.ffn = 4 * s.hidden;
    if (!s.kv_heads) s.kv_heads = s.heads;
    if (!num_archs) archs[num_archs++] = 90;
    nvrtc = te__nvrtc_open(0, &why);
    memset(&cache, 0, sizeof cache);
    if (out && strlen(out) >= sizeof cache.root) return usage("--out: the path is too long");
    if (out) memcpy(cache.root, out, strlen(out) + 1);
    if (!nvrtc || (!out && !te__cache_open(&cache, &why)) || !cache.root[0]) {
        fprintf(stderr, "te_warm: %s\n", te__text_str(&why)[0] ? te__text_str(&why) : "there is no folder to write to: give --out DIR");
        return 1;
    }
    desc.device = "cpu";
    for (i = 0; i < num_archs; i++) {
        te_recipe recipe[] = {te_recipe_delayed_scaling(), te_recipe_current_scaling(), te_recipe_block_scaling(), te_recipe_mxfp8(), te_recipe_nvfp4()};
        size_t r;
        te = te_ctx_create(&desc);
        planner = *te->device;
        planner.run = plan_only;
        te->device = &planner;
        planned_sm = archs[i];
        num_noted = 0;
        plan_step(te, &s, NULL);
        for (r = 0; r < sizeof recipe / sizeof *recipe && te_ok(te); r++) plan_step(te, &s, &recipe[r]);
        if (!te_ok(te)) {
            fprintf(stderr, "te_warm: %s\n", te_error(te));
            failed++;
        } else
            failed += compile_noted(&cache, nvrtc);
        te__free(te, noted);
        noted = NULL;
        cap_noted = 0;
        te->device = &te__cpu_device;
        te_ctx_destroy(te);
    }
    printf("in %s\n", cache.root);
    te__text_free(&why);
    return failed ? 1 : 0;
}
