/* te_automodel: opens a folder of Hugging Face transformers, applies the layer of NeMo Automodel to it, and says what came of it.
 *
 *     te_automodel FOLDER --describe                                       its modules: classes, formats, backends
 *     te_automodel FOLDER --inject --backend linear=te,te_fp8=current      one forward pass, and what each attention did in it
 *     te_automodel FOLDER --cast bf16 --save CAST                          the model in another format
 *     te_automodel FOLDER --lora-load ADAPTER --lora-merge --save MERGED   peft's adapters, added into the weights
 *     te_automodel FOLDER --lora '*_proj' --lora-dim 16 --lora-save NEW    adapters to train, in peft's layout
 *
 * --help lists all options. They are done in one order, whatever the order of the words: --lora or --lora-load, --cast, --lora-save, --lora-merge, --save, backends, --describe or the pass.
 * Where adapters are merged --cast comes behind that, so that weights are rounded once. Nothing is written but the folders that --save and --lora-save name.
 *
 * tests/model/test_te_automodel.c includes this file and calls `automodel`. */
#include "te_parts.h"
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_TOKENS = 1 << 20, MOST_RANK = 1 << 16, MOST_PATTERNS = 64 };

typedef struct automodel_options {
    const char *folder, *backend, *device, *cast, *lora, *lora_load, *lora_save, *save;
    bool inject, describe, dry_run, lora_merge, help;
    int tokens, lora_dim;
    double lora_alpha;
    te_dtype dtype; /* of `cast`; 0: none */
} automodel_options;

typedef struct automodel_run {
    const automodel_options *options;
    te_backend_config config;
    FILE *out;
    bool injects;
    int64_t changes, modules, parameters, bytes;
} automodel_run;

/* ---- options ---- */

static const te_dtype formats[] = {TE_F32, TE_F16, TE_BF16};
/* The backend choices that are possible for modules of te_hf_open. A field without a value may have any value. */
static const struct {
    const char *field, *value;
} possible[] = {{"attn", "te"},       {"attn", "sdpa"},           {"linear", "te"},        {"linear", "torch"}, {"rms_norm", "te"},
                {"rms_norm", "torch_fp32"}, {"experts", "torch_mm"}, {"dispatcher", "torch"}, {"te_fp8", NULL}};

typedef enum option_kind { OPTION_FLAG, OPTION_TEXT, OPTION_COUNT, OPTION_NUMBER } option_kind;
typedef struct option {
    const char *name, *value; /* value: what stands for it in the help */
    option_kind kind;
    size_t offset;
    int most, otherwise; /* of a count, which is 1 to `most`, and `otherwise` where it is left out */
    const char *help;
} option;
#define OPTION(field) offsetof(automodel_options, field)
static const option all_options[] = {
    {"--backend", "FIELD=VALUE,...", OPTION_TEXT, OPTION(backend), 0, 0, "backends of its modules, and FP8 (te_backend_config_parse):"},
    {"--inject", NULL, OPTION_FLAG, OPTION(inject), 0, 0, "te_inject_te_attention, as attn=te"},
    {"--cast", "FORMAT", OPTION_TEXT, OPTION(cast), 0, 0, "te_cast_model_to_dtype:"},
    {"--lora", "PATTERN,...", OPTION_TEXT, OPTION(lora), 0, 0, "new adapters for the Linears of these names, '*_proj' or q_proj,v_proj (te_lora_apply)"},
    {"--lora-dim", "N", OPTION_COUNT, OPTION(lora_dim), MOST_RANK, 0, "their rank, 8 if it is left out:"},
    {"--lora-alpha", "X", OPTION_NUMBER, OPTION(lora_alpha), 0, 0, "their factor is X / rank: a number that is not 0; left out: 32"},
    {"--lora-load", "FOLDER", OPTION_TEXT, OPTION(lora_load), 0, 0, "adapters that peft or --lora-save has written (te_lora_load)"},
    {"--lora-save", "FOLDER", OPTION_TEXT, OPTION(lora_save), 0, 0, "writes the adapters alone, in peft's layout (te_lora_save)"},
    {"--lora-merge", NULL, OPTION_FLAG, OPTION(lora_merge), 0, 0, "adds the adapters into the weights (te_lora_merge)"},
    {"--save", "FOLDER", OPTION_TEXT, OPTION(save), 0, 0, "writes the model as such a folder (te_hf_save)"},
    {"--describe", NULL, OPTION_FLAG, OPTION(describe), 0, 0, "lists the modules, in place of the forward pass"},
    {"--dry-run", NULL, OPTION_FLAG, OPTION(dry_run), 0, 0, "a line for each change that the others would make, in place of the pass; nothing is written"},
    {"--device", "DEVICE", OPTION_TEXT, OPTION(device), 0, 0, "cpu, cuda, cuda:0, ...; left out: a GPU if there is one"},
    {"--tokens", "N", OPTION_COUNT, OPTION(tokens), MOST_TOKENS, 16, "ids in the forward pass:"},
    {"--help", NULL, OPTION_FLAG, OPTION(help), 0, 0, "this text"}};
enum { OPTIONS = sizeof all_options / sizeof all_options[0], FORMATS = sizeof formats / sizeof formats[0], POSSIBLE = sizeof possible / sizeof possible[0] };

static bool begins_field(int i) { return i == 0 || strcmp(possible[i].field, possible[i - 1].field) != 0; }
/* The values of the field that begins at possible[i]: "te, sdpa". */
static void field_values(int i, char *text, size_t size) {
    const char *const field = possible[i].field, *name;
    size_t used = 0;
    int k;
    text[0] = 0;
    for (k = 0; !possible[i].value && (name = te_backend_config_field(k, text, size)) != NULL && strcmp(name, field) != 0; k++) {}
    for (; i < POSSIBLE && possible[i].value && strcmp(possible[i].field, field) == 0 && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "", possible[i].value);
}
static void format_names(char *text, size_t size) {
    size_t used = 0;
    int i;
    for (i = 0; i < FORMATS && used < size; i++) used += (size_t)snprintf(text + used, size - used, "%s%s", i ? ", " : "", te_dtype_name(formats[i]));
}
static void count_range(const option *o, char *text, size_t size) {
    const int n = snprintf(text, size, "1 to %d", o->most);
    if (o->otherwise) snprintf(text + n, size - (size_t)n, "; left out: %d", o->otherwise);
}
static const char usage[] = "usage: te_automodel FOLDER [options]; --help lists them\n";
static void print_help(FILE *out) {
    char text[256], left[64];
    int i, k;
    fputs("usage: te_automodel FOLDER [options]\n"
          "Opens a model of Hugging Face transformers, applies the layer of NeMo Automodel to it and runs it once.\n\n", out);
    for (i = 0; i < OPTIONS; i++) {
        const option *o = &all_options[i];
        snprintf(left, sizeof left, "%s %s", o->name, o->value ? o->value : "");
        text[0] = 0;
        if (o->kind == OPTION_COUNT) count_range(o, text, sizeof text);
        if (o->offset == OPTION(cast)) format_names(text, sizeof text);
        fprintf(out, "  %-27s%s%s%s\n", left, o->help, text[0] ? " " : "", text);
        for (k = 0; k < POSSIBLE && o->offset == OPTION(backend); k++) {
            if (!begins_field(k)) continue;
            field_values(k, text, sizeof text);
            fprintf(out, "  %-27s  %s: %s\n", "", possible[k].field, text);
        }
    }
}

/* The value of one option; false with a line in `out` for what cannot be. */
static bool read_value(automodel_options *all, const option *o, const char *value, FILE *out) {
    void *const field = (char *)all + o->offset;
    char text[80], *end;
    long n;
    double x;
    switch (o->kind) {
    case OPTION_FLAG: *(bool *)field = true; break;
    case OPTION_TEXT: *(const char **)field = value; break;
    case OPTION_COUNT:
        n = strtol(value, &end, 10);
        if (end == value || *end || n < 1 || n > o->most) {
            count_range(o, text, sizeof text);
            fprintf(out, "te_automodel: %s %s; a number is needed, %s\n", o->name, value, text);
            return false;
        }
        *(int *)field = (int)n;
        break;
    case OPTION_NUMBER:
        x = strtod(value, &end);
        if (end == value || *end || x == 0 || x - x != 0) {
            fprintf(out, "te_automodel: %s %s; a number that is not 0 is needed\n", o->name, value);
            return false;
        }
        *(double *)field = x;
        break;
    }
    return true;
}
/* Options that exclude or need each other. */
static bool options_agree(const automodel_options *o, FILE *out) {
    const bool adapters = o->lora || o->lora_load;
    const char *why = NULL;
    if (o->describe && o->dry_run) why = "--describe and --dry-run exclude each other";
    else if (o->lora && o->lora_load) why = "--lora and --lora-load exclude each other: adapters are new, or they are read";
    else if (!o->lora && (o->lora_dim || o->lora_alpha != 0)) why = "--lora-dim and --lora-alpha belong to --lora";
    else if (!adapters && (o->lora_merge || o->lora_save)) why = "--lora-merge and --lora-save need adapters: --lora or --lora-load";
    else if (adapters && o->save && !o->lora_merge) why = "--save writes a model without adapters: add --lora-merge, or write them alone by --lora-save";
    if (why) fprintf(out, "te_automodel: %s\n", why);
    return !why;
}
/* False with a line in `out` for what cannot be. */
static bool read_options(automodel_options *o, int argc, char **argv, FILE *out) {
    char text[80];
    int i, k;
    memset(o, 0, sizeof *o);
    for (k = 0; k < OPTIONS; k++)
        if (all_options[k].kind == OPTION_COUNT) *(int *)(void *)((char *)o + all_options[k].offset) = all_options[k].otherwise;
    for (i = 1; i < argc; i++) {
        for (k = 0; k < OPTIONS && strcmp(argv[i], all_options[k].name) != 0; k++) {}
        if (k < OPTIONS) {
            const bool takes_value = all_options[k].kind != OPTION_FLAG;
            if (takes_value && i + 1 == argc) {
                fprintf(out, "te_automodel: %s needs a value\n%s", argv[i], usage);
                return false;
            }
            i += takes_value;
            if (!read_value(o, &all_options[k], argv[i], out)) return false;
        } else if (argv[i][0] == '-' || o->folder) {
            fprintf(out, "te_automodel: %s%s\n%s", argv[i], argv[i][0] == '-' ? " is no option" : ": one folder is needed", usage);
            return false;
        } else
            o->folder = argv[i];
    }
    if (o->help) return true;
    for (k = 0; k < FORMATS && o->cast; k++)
        if (strcmp(o->cast, te_dtype_name(formats[k])) == 0) o->dtype = formats[k];
    if (o->cast && !o->dtype) {
        format_names(text, sizeof text);
        fprintf(out, "te_automodel: --cast %s; %s are possible\n", o->cast, text);
        return false;
    }
    if (!o->folder) fputs(usage, out);
    return o->folder && options_agree(o, out);
}

/* Is "name=value", n characters of it, something that an open model can be told? */
static bool pair_is_possible(const char *pair, size_t n) {
    const size_t name = strcspn(pair, "=");
    int i;
    for (i = 0; i < POSSIBLE; i++) {
        const char *const value = possible[i].value;
        if (strlen(possible[i].field) != name || memcmp(possible[i].field, pair, name) != 0) continue;
        if (!value || (strlen(value) == n - name - 1 && memcmp(value, pair + name + 1, n - name - 1) == 0)) return true;
    }
    return false;
}
/* Reads --backend. A choice that would make other modules than te_hf_open has made is refused by its name. */
static bool read_backend(automodel_run *r, te_ctx *te) {
    char text[512], others[512] = "", values[256];
    size_t used = 0, n;
    const char *at;
    int i;
    if (te_backend_config_parse(te, r->options->backend, &r->config) != TE_OK) return false;
    te_backend_config_print(&r->config, text, sizeof text);
    for (at = text; *at; at += n + (at[n] == ',')) {
        n = strcspn(at, ",");
        if (!pair_is_possible(at, n) && used < sizeof others) used += (size_t)snprintf(others + used, sizeof others - used, "%s%.*s", used ? "," : "", (int)n, at);
    }
    if (!used) return te_backend_config_validate(te, &r->config, NULL) == TE_OK;
    fprintf(r->out, "te_automodel: --backend %s: an open model has its modules; ", others);
    for (i = 0; i < POSSIBLE; i++) {
        if (!begins_field(i)) continue;
        field_values(i, values, sizeof values);
        fprintf(r->out, "%s%s (%s)", i ? ", " : "", possible[i].field, values);
    }
    fputs(" can be said about them\n", r->out);
    return false;
}

/* ---- what the modules are ---- */

static bool is_class(te_module *m, const char *name) { return strcmp(te_module_get_class(m)->name, name) == 0; }
static bool is_self_attn(te_module *m) {
    const char *name = te_module_name(m);
    const size_t n = strlen(name);
    return n >= 9 && strcmp(name + n - 9, "self_attn") == 0;
}
/* The rank of a module's adapters, the columns of lora_B (lora_A of an Embedding has them as well, and its rows are the table's); 0 if it has none. */
static int64_t rank_of(te_module *m) {
    const te_tensor *b = te_module_parameter(te_module_find(m, "lora_B"), "weight");
    return b ? te_tensor_shape(b)[1] : 0;
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
    char path[512], shape[96] = "", backend[200] = "";
    const te_tensor *weight = te_module_parameter(m, "weight");
    if (weight) describe_shape(weight, shape, sizeof shape);
    if (is_self_attn(m)) describe_attention(m, backend, sizeof backend);
    else if (is_class(m, "Linear")) snprintf(backend, sizeof backend, "%s", r->config.linear == TE_LINEAR_TORCH ? "torch" : "te");
    else if (is_class(m, "RMSNorm")) snprintf(backend, sizeof backend, "%s", r->config.rms_norm == TE_RMS_NORM_TORCH_FP32 ? "torch_fp32" : "te");
    else if (is_class(m, "GroupedLinear")) snprintf(backend, sizeof backend, "torch_mm");
    if (rank_of(m)) snprintf(backend + strlen(backend), sizeof backend - strlen(backend), ", adapters of rank %lld", (long long)rank_of(m));
    fprintf(r->out, "%-46s %-18s %-22s %s\n", te_module_path(m, path, sizeof path), te_module_get_class(m)->name, shape, backend);
    r->modules++;
    return true;
}
static bool count_tensor(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    automodel_run *r = (automodel_run *)user;
    (void)m, (void)path;
    r->bytes += (int64_t)te_tensor_bytes(x);
    r->parameters += kind == TE_ENTRY_PARAMETER ? te_tensor_numel(x) : 0;
    return true;
}
static void describe(automodel_run *r, te_module *model) {
    fprintf(r->out, "%s, described: nothing has run\n\n%-46s %-18s %-22s %s\n", r->options->folder, "MODULE", "CLASS", "WEIGHT", "BACKEND");
    te_module_visit(model, print_module, r);
    te_module_visit_tensors(model, count_tensor, r);
    fprintf(r->out, "\n%lld modules, %lld parameters, %lld bytes\n", (long long)r->modules, (long long)r->parameters, (long long)r->bytes);
}

/* ---- the work ---- */

/* The comma behind the pattern at `at`; NULL: it is the last one. A comma within [..] is one of the pattern's own characters. */
static char *end_of_pattern(char *at) {
    bool within = false;
    for (; *at && (within || *at != ','); at++) {
        if (*at == '[') within = true;
        if (*at == ']') within = false;
    }
    return *at ? at : NULL;
}
/* --lora and --lora-load. */
static bool put_adapters(automodel_run *r, te_module *model) {
    const automodel_options *o = r->options;
    const char *pattern[MOST_PATTERNS];
    const size_t size = o->lora ? strlen(o->lora) + 1 : 0;
    te_lora_desc desc;
    char *copy, *at, *comma;
    bool good;
    if (o->lora_load) return te_lora_load(model, o->lora_load) == TE_OK;
    if (!o->lora) return true;
    copy = (char *)malloc(size);
    if (!copy) return false;
    memcpy(copy, o->lora, size);
    memset(&desc, 0, sizeof desc);
    desc.target_modules = pattern;
    desc.dim = o->lora_dim;
    desc.alpha = (float)o->lora_alpha;
    for (at = copy; at && desc.num_target_modules < MOST_PATTERNS; at = comma) {
        comma = end_of_pattern(at);
        if (comma) *comma++ = 0;
        pattern[desc.num_target_modules++] = at;
    }
    if (at) fprintf(r->out, "te_automodel: --lora has more than %d patterns\n", MOST_PATTERNS);
    good = !at && te_lora_apply(model, &desc, NULL) == TE_OK;
    free(copy);
    return good;
}
static bool cast_model(const automodel_run *r, te_module *model) {
    te_cast_model_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dtype = r->options->dtype;
    return !desc.dtype || te_cast_model_to_dtype(model, &desc) == TE_OK;
}
static bool keep_out_of_recipes(void *user, te_module *m) {
    (void)user;
    return !is_class(m, "Linear") || te_module_set_recipe(m, NULL, true) == TE_OK;
}
static bool count_adapters(void *user, te_module *m) {
    *(int *)user += rank_of(m) != 0;
    return true;
}
/* All that the options ask for, and a line for each thing that is done or written. */
static bool apply(automodel_run *r, te_module *model) {
    const automodel_options *o = r->options;
    int left = 0, adapters = 0, injected;
    if (!put_adapters(r, model)) return false;
    te_module_visit(model, count_adapters, &adapters);
    if (o->lora || o->lora_load) fprintf(r->out, "adapters: %d modules have some%s\n", adapters, o->lora ? ", which are new" : "");
    if (!o->lora_merge && !cast_model(r, model)) return false;
    if (o->lora_save && te_lora_save(model, o->lora_save) != TE_OK) return false;
    if (o->lora_save) fprintf(r->out, "adapters written to %s\n", o->lora_save);
    if (o->lora_merge && (te_lora_merge(model) != TE_OK || !cast_model(r, model))) return false;
    if (o->lora_merge) fprintf(r->out, "adapters of %d modules merged\n", adapters);
    if (o->save && te_hf_save(model, o->save) != TE_OK) return false;
    if (o->save) fprintf(r->out, "model written to %s\n", o->save);
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

/* ---- what would change ---- */

static void change(automodel_run *r, const char *what, const char *path, const char *how) {
    fprintf(r->out, "%-7s %s%s\n", what, path, how);
    r->changes++;
}
static bool plan_adapter(void *user, te_module *m) {
    automodel_run *r = (automodel_run *)user;
    char path[512], how[64];
    snprintf(how, sizeof how, ": rank %lld%s", (long long)rank_of(m), r->options->lora_merge ? ", merged" : "");
    if (rank_of(m)) change(r, "lora", te_module_path(m, path, sizeof path), how);
    return true;
}
static bool plan_module(void *user, te_module *m) {
    automodel_run *r = (automodel_run *)user;
    char path[512];
    te_module_path(m, path, sizeof path);
    if (r->injects && is_self_attn(m) && te_module_parent(m)) {
        const te_inject_reason reason = te_inject_check(m, NULL);
        if (reason == TE_INJECT_OK) change(r, "inject", path, "");
        else fprintf(r->out, "%-7s %s: %s\n", "leave", path, te_inject_reason_text(reason));
    }
    if (r->config.linear == TE_LINEAR_TORCH && is_class(m, "Linear")) change(r, "linear", path, ": te -> torch");
    return true;
}
static bool plan_tensor(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    automodel_run *r = (automodel_run *)user;
    const te_dtype from = te_tensor_dtype(x), to = r->options->dtype;
    const bool casts = to && from != to && (from == TE_F32 || from == TE_F16 || from == TE_BF16);
    char how[40];
    (void)m, (void)kind;
    r->bytes += casts ? te_tensor_numel(x) * te_dtype_bits(to) / 8 : (int64_t)te_tensor_bytes(x);
    snprintf(how, sizeof how, ": %s -> %s", te_dtype_name(from), te_dtype_name(to));
    if (casts) change(r, "cast", path, how);
    return true;
}
/* Adapters are put into the model, and merged, in memory: the rest of the plan is of what comes of that. */
static bool plan(automodel_run *r, te_module *model) {
    const automodel_options *o = r->options;
    int64_t before;
    fprintf(r->out, "%s, a dry run: nothing has run, nothing is written\n\n", o->folder);
    te_module_visit_tensors(model, count_tensor, r);
    before = r->bytes;
    r->bytes = 0;
    if (!put_adapters(r, model)) return false;
    te_module_visit(model, plan_adapter, r);
    if (o->lora_merge && te_lora_merge(model) != TE_OK) return false;
    te_module_visit(model, plan_module, r);
    te_module_visit_tensors(model, plan_tensor, r);
    if (o->lora_save) change(r, "write", o->lora_save, ": the adapters");
    if (o->save) change(r, "write", o->save, ": the model");
    fprintf(r->out, "\n%lld changes would be made; parameters: %lld bytes now, %lld then\n", (long long)r->changes, (long long)before, (long long)r->bytes);
    return true;
}

/* ---- one forward pass ---- */

static bool print_counters(void *user, te_module *m) {
    automodel_run *r = (automodel_run *)user;
    const te_sdpa_patch *f = te_injected_sdpa(m);
    const te_attn_stats s = te_sdpa_patch_stats(f);
    char path[512], backend[160];
    if (!is_self_attn(m)) return true;
    describe_attention(m, backend, sizeof backend);
    fprintf(r->out, "  %-44s %s\n", te_module_path(m, path, sizeof path), backend);
    if (f)
        fprintf(r->out, "  %-44s te_hits %llu, fallback_mask %llu, fallback_scale_mismatch %llu, fallback_other %llu\n", "", (unsigned long long)s.te_hits, (unsigned long long)s.fallback_mask,
                (unsigned long long)s.fallback_scale_mismatch, (unsigned long long)s.fallback_other);
    return true;
}
/* The logits y [1, tokens, V] of the last token. */
static bool print_logits(automodel_run *r, te_tensor *y) {
    const int64_t tokens = te_tensor_shape(y)[1], vocabulary = te_tensor_shape(y)[2];
    float *x = (float *)malloc((size_t)vocabulary * sizeof *x);
    int64_t i, best = 0, finite = 0;
    if (!x) return false;
    if (te_tensor_to_f32(te_tensor_contiguous(te_tensor_narrow(y, 1, tokens - 1, 1)), x) == TE_OK) {
        for (i = 0; i < vocabulary; i++) {
            finite += x[i] - x[i] == 0;
            if (x[i] > x[best]) best = i;
        }
        fprintf(r->out, "logits of the last token: %lld of %lld are finite; the largest is %g, of id %lld\n", (long long)finite, (long long)vocabulary, (double)x[best], (long long)best);
    }
    free(x);
    return te_ok(te_tensor_ctx(y));
}
/* Ids that are spread over the vocabulary, without a tape. */
static bool run_once(automodel_run *r, te_ctx *te, te_module *model) {
    const te_tensor *table = te_module_parameter(te_module_find(model, "model.embed_tokens"), "weight");
    const int64_t shape[2] = {1, r->options->tokens}, vocabulary = te_tensor_shape(table)[0];
    int32_t *ids = (int32_t *)malloc((size_t)r->options->tokens * sizeof *ids);
    const te_fp8_config *fp8 = r->config.has_te_fp8 ? &r->config.te_fp8 : NULL;
    te_tensor *x, *y;
    char text[96];
    bool good;
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
    te_synchronize(te);
    good = y && te_ok(te);
    if (good) {
        describe_shape(y, text, sizeof text);
        fprintf(r->out, "%s, run\n\none forward pass of %d tokens: %s\n", r->options->folder, r->options->tokens, text);
        good = print_logits(r, y);
        fputs("attention:\n", r->out);
        te_module_visit(model, print_counters, r);
    }
    te_no_grad_end(te);
    te_scope_end(te);
    return good;
}

static bool work(automodel_run *r, te_ctx *te) {
    const automodel_options *o = r->options;
    te_module *model;
    char text[512];
    bool good;
    if (o->backend) {
        if (!read_backend(r, te)) return false;
        te_backend_config_print(&r->config, text, sizeof text);
        fprintf(r->out, "backend: %s\n", text);
    }
    r->injects = o->inject || r->config.attn == TE_ATTN_TE;
    model = te_hf_open(te, o->folder, NULL);
    if (!model) return false;
    good = o->dry_run ? plan(r, model) : apply(r, model);
    if (good && o->describe) describe(r, model);
    if (good && !o->describe && !o->dry_run) good = run_once(r, te, model);
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
    if (options.help) {
        print_help(out);
        return 0;
    }
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
