/* te_automodel: opens a folder of Hugging Face transformers, applies the layer of NeMo Automodel to it, and says what came of it.
 *
 *     te_automodel FOLDER [--backend attn=te,linear=te,te_fp8=current] [--inject] [--cast bf16] [--describe | --dry-run] [--device cuda:0] [--tokens 16]
 *
 * --backend: te_backend_config_parse's text. attn=te, like --inject, is te_inject_te_attention; linear=torch keeps the model's Linears out of te_fp8's recipe. --cast: te_cast_model_to_dtype.
 * Then each module with its class, format and backend, and the counters of attention after one forward pass of --tokens ids. --describe: without that pass. --dry-run: a line for each change that
 * these options would make; nothing is changed. Nothing is written to the folder.
 *
 * tests/model/test_te_automodel.c includes this file and calls `automodel`. */
#include "te_parts.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct automodel_options {
    const char *folder, *backend, *device;
    te_dtype cast; /* 0: none */
    bool inject, describe, dry_run;
    int tokens;
} automodel_options;

typedef struct automodel_run {
    const automodel_options *options;
    te_backend_config config;
    FILE *out;
    bool injects;
    int64_t changes, bytes_before, bytes_after;
} automodel_run;

static const char usage[] = "usage: te_automodel FOLDER [--backend NAME=VALUE,...] [--inject] [--cast f32 | f16 | bf16] [--describe | --dry-run] [--device DEVICE] [--tokens N]\n";

/* ---- options ---- */

static te_dtype dtype_of(const char *name) {
    static const te_dtype dtypes[] = {TE_F32, TE_F16, TE_BF16};
    size_t i;
    for (i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
        if (strcmp(name, te_dtype_name(dtypes[i])) == 0) return dtypes[i];
    return TE_DTYPE_NONE;
}

/* False with a line in `out` for what cannot be. */
static bool read_options(automodel_options *o, int argc, char **argv, FILE *out) {
    int i;
    memset(o, 0, sizeof *o);
    o->tokens = 16;
    for (i = 1; i < argc; i++) {
        const char *word = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        const bool takes_value = strcmp(word, "--backend") == 0 || strcmp(word, "--cast") == 0 || strcmp(word, "--device") == 0 || strcmp(word, "--tokens") == 0;
        if (takes_value && !value) {
            fprintf(out, "te_automodel: %s needs a value\n%s", word, usage);
            return false;
        }
        i += takes_value;
        if (strcmp(word, "--backend") == 0) o->backend = value;
        else if (strcmp(word, "--device") == 0) o->device = value;
        else if (strcmp(word, "--inject") == 0) o->inject = true;
        else if (strcmp(word, "--describe") == 0) o->describe = true;
        else if (strcmp(word, "--dry-run") == 0) o->dry_run = true;
        else if (strcmp(word, "--cast") == 0) {
            o->cast = dtype_of(value);
            if (!o->cast) {
                fprintf(out, "te_automodel: --cast %s; f32, f16 and bf16 are possible\n", value);
                return false;
            }
        } else if (strcmp(word, "--tokens") == 0) {
            char *end;
            const long n = strtol(value, &end, 10);
            if (*end || n < 1 || n > 1 << 20) {
                fprintf(out, "te_automodel: --tokens %s; a number from 1 to %d is needed\n", value, 1 << 20);
                return false;
            }
            o->tokens = (int)n;
        } else if (word[0] == '-' || o->folder) {
            fprintf(out, "te_automodel: %s%s\n%s", word, word[0] == '-' ? " is no option" : ": one folder is needed", usage);
            return false;
        } else
            o->folder = word;
    }
    if (!o->folder) fputs(usage, out);
    return o->folder != NULL;
}

/* Reads --backend. A choice that would make other modules than te_hf_open has made is refused by its name. */
static bool read_backend(automodel_run *r, te_ctx *te) {
    te_backend_config others;
    char text[512];
    if (te_backend_config_parse(te, r->options->backend, &r->config) != TE_OK) return false;
    others = r->config;
    if (others.attn == TE_ATTN_TE || others.attn == TE_ATTN_SDPA) others.attn = TE_ATTN_DEFAULT;
    if (others.linear == TE_LINEAR_TE || others.linear == TE_LINEAR_TORCH) others.linear = TE_LINEAR_DEFAULT;
    if (others.rms_norm == TE_RMS_NORM_TE || others.rms_norm == TE_RMS_NORM_TORCH_FP32) others.rms_norm = TE_RMS_NORM_DEFAULT;
    if (others.experts == TE_EXPERTS_TORCH_MM) others.experts = TE_EXPERTS_DEFAULT;
    if (others.dispatcher == TE_DISPATCHER_TORCH) others.dispatcher = TE_DISPATCHER_DEFAULT;
    others.has_te_fp8 = false;
    memset(&others.te_fp8, 0, sizeof others.te_fp8);
    if (te_backend_config_print(&others, text, sizeof text) > 0) {
        fprintf(r->out, "te_automodel: --backend %s: an open model has its modules; attn (te, sdpa), linear (te, torch), rms_norm (te, torch_fp32), experts (torch_mm), dispatcher (torch) and te_fp8 "
                "can be said about them\n", text);
        return false;
    }
    return te_backend_config_validate(te, &r->config, NULL) == TE_OK;
}

/* ---- what the modules are ---- */

static bool is_class(te_module *m, const char *name) { return strcmp(te_module_get_class(m)->name, name) == 0; }
static bool is_self_attn(te_module *m) {
    const char *name = te_module_name(m);
    const size_t n = strlen(name);
    return n >= 9 && strcmp(name + n - 9, "self_attn") == 0;
}

static void describe_shape(const te_tensor *x, char *text, size_t size) {
    size_t used = (size_t)snprintf(text, size, "%s [", te_dtype_name(te_tensor_dtype(x)));
    int i;
    for (i = 0; i < te_tensor_ndim(x) && used < size; i++) used += (size_t)snprintf(text + used, size - used, "%s%lld", i ? ", " : "", (long long)te_tensor_shape(x)[i]);
    if (used < size) snprintf(text + used, size - used, "]");
}
static void describe_attention(te_module *m, char *text, size_t size) {
    te_attn_params p;
    if (!te_injected_sdpa(m) || !te_infer_attn_params(m, &p)) {
        snprintf(text, size, "sdpa");
        return;
    }
    snprintf(text, size, "te: %d heads, %d of keys and values, %lld channels, scale %g", p.num_heads, p.num_kv_heads, (long long)p.head_dim, (double)p.softmax_scale);
    if (p.window_size.on) snprintf(text + strlen(text), size - strlen(text), ", window %lld", (long long)p.window_size.left + 1);
}

static bool print_module(void *user, te_module *m) {
    automodel_run *r = (automodel_run *)user;
    char path[512], shape[96] = "", backend[160] = "";
    const te_tensor *weight = te_module_parameter(m, "weight");
    if (weight) describe_shape(weight, shape, sizeof shape);
    if (is_self_attn(m)) describe_attention(m, backend, sizeof backend);
    else if (is_class(m, "Linear")) snprintf(backend, sizeof backend, "%s", r->config.linear == TE_LINEAR_TORCH ? "torch" : "te");
    else if (is_class(m, "RMSNorm")) snprintf(backend, sizeof backend, "%s", r->config.rms_norm == TE_RMS_NORM_TORCH_FP32 ? "torch_fp32" : "te");
    else if (is_class(m, "GroupedLinear")) snprintf(backend, sizeof backend, "torch_mm");
    fprintf(r->out, "%-46s %-18s %-22s %s\n", te_module_path(m, path, sizeof path), te_module_get_class(m)->name, shape, backend);
    return true;
}

/* ---- what would change ---- */

static bool plan_module(void *user, te_module *m) {
    automodel_run *r = (automodel_run *)user;
    char path[512];
    te_module_path(m, path, sizeof path);
    if (r->injects && is_self_attn(m) && te_module_parent(m)) {
        const te_inject_reason reason = te_inject_check(m, NULL);
        fprintf(r->out, "%-7s %s%s%s\n", reason == TE_INJECT_OK ? "inject" : "leave", path, reason == TE_INJECT_OK ? "" : ": ", reason == TE_INJECT_OK ? "" : te_inject_reason_text(reason));
        r->changes += reason == TE_INJECT_OK;
    }
    if (r->config.linear == TE_LINEAR_TORCH && is_class(m, "Linear")) {
        fprintf(r->out, "%-7s %s: te -> torch\n", "linear", path);
        r->changes++;
    }
    return true;
}
static bool plan_tensor(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    automodel_run *r = (automodel_run *)user;
    const te_dtype from = te_tensor_dtype(x);
    const bool casts = r->options->cast && from != r->options->cast && (from == TE_F32 || from == TE_F16 || from == TE_BF16);
    const int64_t bytes = (int64_t)te_tensor_bytes(x);
    (void)m, (void)kind;
    r->bytes_before += bytes;
    r->bytes_after += casts ? te_tensor_numel(x) * te_dtype_bits(r->options->cast) / 8 : bytes;
    if (casts) fprintf(r->out, "%-7s %s: %s -> %s\n", "cast", path, te_dtype_name(from), te_dtype_name(r->options->cast));
    r->changes += casts;
    return true;
}
static void plan(automodel_run *r, te_module *model) {
    te_module_visit(model, plan_module, r);
    te_module_visit_tensors(model, plan_tensor, r);
    fprintf(r->out, "%lld changes would be made; parameters: %lld bytes now, %lld then\n", (long long)r->changes, (long long)r->bytes_before, (long long)r->bytes_after);
}

/* ---- the work ---- */

static bool keep_out_of_recipes(void *user, te_module *m) {
    (void)user;
    return !is_class(m, "Linear") || te_module_set_recipe(m, NULL, true) == TE_OK;
}
static bool apply(automodel_run *r, te_module *model) {
    te_cast_model_desc cast;
    int left = 0, injected;
    memset(&cast, 0, sizeof cast);
    cast.dtype = r->options->cast;
    if (cast.dtype && te_cast_model_to_dtype(model, &cast) != TE_OK) return false;
    if (r->config.linear == TE_LINEAR_TORCH && !te_module_visit(model, keep_out_of_recipes, NULL)) return false;
    if (r->injects) {
        te_inject_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.left_alone = &left;
        injected = te_inject_te_attention(model, &desc);
        if (injected < 0) return false;
        fprintf(r->out, "attention: %d modules injected, %d left alone\n", injected, left);
    }
    return true;
}

static bool print_counters(void *user, te_module *m) {
    automodel_run *r = (automodel_run *)user;
    const te_te_sdpa *f = te_injected_sdpa(m);
    const te_attention_stats s = te_te_sdpa_stats(f);
    char path[512];
    if (f)
        fprintf(r->out, "%-46s te_hits %llu, fallback_mask %llu, fallback_scale_mismatch %llu, fallback_other %llu\n", te_module_path(m, path, sizeof path), (unsigned long long)s.te_hits,
                (unsigned long long)s.fallback_mask, (unsigned long long)s.fallback_scale_mismatch, (unsigned long long)s.fallback_other);
    return true;
}
/* One forward pass of ids that are spread over the vocabulary, without a tape. */
static bool run_once_and_count(automodel_run *r, te_ctx *te, te_module *model) {
    const te_tensor *table = te_module_parameter(te_module_find(model, "model.embed_tokens"), "weight");
    const int64_t shape[2] = {1, r->options->tokens}, vocabulary = te_tensor_shape(table)[0];
    int32_t *ids = (int32_t *)malloc((size_t)r->options->tokens * sizeof *ids);
    const te_fp8_config *fp8 = r->config.has_te_fp8 ? &r->config.te_fp8 : NULL;
    te_tensor *x, *y;
    char text[96];
    int i;
    if (!ids) return false;
    for (i = 0; i < r->options->tokens; i++) ids[i] = (int32_t)((int64_t)i * 7919 % vocabulary);
    te_scope_begin(te);
    te_no_grad_begin(te);
    x = te_tensor_from_host(te, TE_I32, 2, shape, ids);
    free(ids);
    te_fp8_maybe_autocast_begin(te, fp8);
    y = te_forward(model, x);
    te_fp8_maybe_autocast_end(te);
    te_no_grad_end(te);
    te_synchronize(te);
    if (y) {
        describe_shape(y, text, sizeof text);
        fprintf(r->out, "one forward pass of %d tokens: %s\n", r->options->tokens, text);
        te_module_visit(model, print_counters, r);
    }
    te_scope_end(te);
    return y != NULL;
}

static bool work(automodel_run *r, te_ctx *te) {
    te_module *model;
    char text[512];
    bool good = true;
    if (r->options->backend) {
        if (!read_backend(r, te)) return false;
        te_backend_config_print(&r->config, text, sizeof text);
        fprintf(r->out, "backend: %s\n", text);
    }
    r->injects = r->options->inject || r->config.attn == TE_ATTN_TE;
    model = te_hf_open(te, r->options->folder, NULL);
    if (!model) return false;
    if (r->options->dry_run) {
        plan(r, model);
    } else {
        good = apply(r, model);
        if (good) te_module_visit(model, print_module, r);
        if (good && !r->options->describe) good = run_once_and_count(r, te, model);
    }
    te_module_destroy(model);
    return good && te_ok(te);
}

/* The program: 0, or 1 with an error, or 2 for options that cannot be; all lines go to `out`. */
static int automodel(int argc, char **argv, FILE *out) {
    automodel_options options;
    automodel_run run;
    te_ctx_desc desc;
    te_ctx *te;
    bool good;
    if (!read_options(&options, argc, argv, out)) return 2;
    memset(&run, 0, sizeof run);
    memset(&desc, 0, sizeof desc);
    run.options = &options;
    run.out = out;
    desc.device = options.device;
    te = te_ctx_create(&desc);
    good = te_ok(te) && work(&run, te);
    if (te && !te_ok(te)) fprintf(out, "te_automodel: %s\n", te_error(te));
    te_ctx_destroy(te);
    return good ? 0 : 1;
}

#ifndef TE_AUTOMODEL_IN_A_TEST
int main(int argc, char **argv) { return automodel(argc, argv, stdout); }
#endif
