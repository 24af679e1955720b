/* llama.c: models that exist: opens a folder of Hugging Face transformers, and computes with it, continues sequences, or trains it further.
 *
 *     ./llama FOLDER --ids FILE                          the loss of sequences; FILE has one of decimal ids in each line
 *     ./llama FOLDER --ids FILE --generate 20            continues each greedily, by so many ids; --batch 8: so many sequences of one length together
 *     ./llama FOLDER --train FILE --steps 100 --out NEW  trains, and writes a folder that transformers opens; --help lists the options
 *
 * Started by torchrun, mpirun or srun, ranks train it together (ranks.h).
 *
 * Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, Gemma 1 to 3 (text), Phi-3. Ids come from the tokenizer of the model, which is the caller's. */
#define _POSIX_C_SOURCE 200809L
#define TE_IMPLEMENTATION
#include "te.h"

#include "ranks.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static te_ctx *te;
#define die(...) (fprintf(stderr, "llama: " __VA_ARGS__), fputc('\n', stderr), exit(1))
#define check() (te_ok(te) ? (void)0 : die("%s", te_error(te))) /* the first error stays */

/* ---- options ---- */

static struct {
    const char *folder, *ids, *logits, *grads, *dtype, *recipe, *device, *train, *out, *cache_dtype;
    int generate, batch, steps, sequences;
    double lr;
    bool exact, no_cache, checkpoint, quantized_weights, quantized_head, resume, times;
} opt = {.batch = 1, .steps = 100, .lr = 1e-5};

typedef enum kind { FLAG, COUNT, NUMBER, TEXT } kind;
static const struct option {
    const char *name;
    kind kind;
    void *to;
    const char *help;
} options[] = {
    {"--ids", TEXT, &opt.ids, "file of sequences: decimal ids, one sequence in each line"},
    {"--logits", TEXT, &opt.logits, "safetensors file for the logits of each: logits.0, logits.1 ... f32 [s, V]"},
    {"--grads", TEXT, &opt.grads, "safetensors file for the gradient of the loss by each parameter, f32"},
    {"--generate", COUNT, &opt.generate, "continue each sequence by so many ids, the most likely ones, and print them"},
    {"--batch", COUNT, &opt.batch, "continue so many sequences together, neighbours in the file and of one length (1)"},
    {"--no-cache", FLAG, &opt.no_cache, "compute all positions anew for each of them"},
    {"--cache-dtype", TEXT, &opt.cache_dtype, "format of the cache of --generate: fp8 (E4M3), or that of the parameters"},
    {"--train", TEXT, &opt.train, "file of sequences to train on, in turn"},
    {"--sequences", COUNT, &opt.sequences, "sequences of a training step (one for each rank that has its own, see --dp and --ep)"},
    {"--tp", COUNT, &layout.tp, "ranks that share each layer (1)"},
    {"--sequence-parallel", FLAG, &layout.sequence, "these ranks also share the tokens between products: less memory"},
    {"--ub", FLAG, &layout.ub, "exchanges of these ranks run beside products (ub_overlap_ag, ub_overlap_rs, ub_bulk_dgrad, ub_bulk_wgrad)"},
    {"--cp", COUNT, &layout.cp, "ranks that share each sequence (1)"},
    {"--ep", COUNT, &layout.ep, "ranks that share the experts, and have sequences of their own (1)"},
    {"--dp", COUNT, &layout.dp, "ranks that have sequences of their own (those that are left)"},
    {"--shard", FLAG, &layout.shard, "these ranks keep slices of parameters and optimizer states: less memory"},
    {"--steps", COUNT, &opt.steps, "training steps (100)"},
    {"--lr", NUMBER, &opt.lr, "learning rate (1e-5)"},
    {"--out", TEXT, &opt.out, "folder for the trained model"},
    {"--checkpoint", FLAG, &opt.checkpoint, "layers run again in the backward pass: less memory"},
    {"--quantized-weights", FLAG, &opt.quantized_weights, "projections are stored as the recipe quantizes them"},
    {"--quantized-head", FLAG, &opt.quantized_head, "lm_head is quantized and stored as the projections are (no tied embeddings)"},
    {"--resume", FLAG, &opt.resume, "go on from what --out has"},
    {"--dtype", TEXT, &opt.dtype, "f32, f16 or bf16, of parameters and activations (that of the file)"},
    {"--recipe", TEXT, &opt.recipe, "none, delayed, current, block, mxfp8 or nvfp4 (none)"},
    {"--exact", FLAG, &opt.exact, "on a GPU, products of f32 without rounding to TF32: slow"},
    {"--times", FLAG, &opt.times, "print the milliseconds of each training step, or of each id that continues the sequences of a batch, to stderr"},
    {"--device", TEXT, &opt.device, "cpu, cuda:0 ... (the first GPU, or else the CPU)"},
};
enum { NUM_OPTIONS = sizeof options / sizeof *options };

static void help(void) {
    printf("llama FOLDER --ids FILE | --train FILE --out FOLDER\n");
    for (int i = 0; i < NUM_OPTIONS; i++) printf("  %-21s %s\n", options[i].name, options[i].help);
    exit(0);
}
static void read_options(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *value = argv[i + 1];
        char *end = NULL;
        int k = 0;
        if (!strcmp(argv[i], "--help")) help();
        while (k < NUM_OPTIONS && strcmp(options[k].name, argv[i])) k++;
        if (k == NUM_OPTIONS && (argv[i][0] == '-' || opt.folder)) die("%s: what is that? --help lists the options", argv[i]);
        if (k == NUM_OPTIONS) opt.folder = argv[i];
        else if (options[k].kind == FLAG) *(bool *)options[k].to = true;
        else if (!value) die("%s needs a value", argv[i]);
        else if (options[k].kind == TEXT) *(const char **)options[k].to = argv[++i];
        else {
            double x = strtod(argv[++i], &end);
            if (end == value || *end || !(x >= 0 && x < 1e9)) die("%s %s: a number from 0 to 1e9 is needed", argv[i - 1], value);
            if (options[k].kind == COUNT && x != (int)x) die("%s %s: a whole number is needed", argv[i - 1], value);
            if (options[k].kind == COUNT) *(int *)options[k].to = (int)x;
            else *(double *)options[k].to = x;
        }
    }
    if (!opt.folder || !opt.ids == !opt.train) die("a FOLDER and either --ids or --train are needed; --help lists the options");
    if (opt.train && !opt.out) die("--train needs --out, the folder for the trained model");
    if (opt.train && (opt.logits || opt.grads || opt.generate)) die("%s is of --ids, not of --train", opt.logits ? "--logits" : opt.grads ? "--grads" : "--generate");
    if (!opt.train && (opt.out || opt.resume)) die("%s is of --train, not of --ids", opt.out ? "--out" : "--resume");
    if (!opt.train && (opt.sequences || layout.cp > 1 || layout.shard)) die("%s is of --train, not of --ids", opt.sequences ? "--sequences" : layout.shard ? "--shard" : "--cp");
    if (!opt.train && (layout.sequence || layout.ub)) die("%s is of --train, not of --ids", layout.sequence ? "--sequence-parallel" : "--ub");
    if (opt.grads && (layout.tp > 1 || layout.ep > 1)) die("--grads with %s: each rank has parts of its own; run it on one rank", layout.tp > 1 ? "--tp" : "--ep");
    if (opt.generate && (opt.logits || opt.grads)) die("%s is of a loss, and --generate computes none", opt.logits ? "--logits" : "--grads");
    if ((opt.no_cache || opt.batch != 1) && !opt.generate) die("%s is of --generate", opt.no_cache ? "--no-cache" : "--batch");
    if (opt.batch < 1) die("--batch %d: at least one sequence is continued at a time", opt.batch);
    if (opt.cache_dtype && (!opt.generate || opt.no_cache)) die("--cache-dtype is of --generate with a cache");
    if (opt.cache_dtype && strcmp(opt.cache_dtype, "fp8")) die("--cache-dtype %s: there is fp8; without the option it is the format of the parameters", opt.cache_dtype);
}

/* ---- sequences ---- */

typedef struct sequence {
    int32_t *ids; /* room for those that are generated */
    int n;
} sequence;
typedef struct sequences {
    sequence *all;
    int count;
    double targets; /* ids that have one before them */
} sequences;

/* The next line, of any length, in memory that the next call uses again; NULL at the end. */
static char *read_line(FILE *f, char **line, size_t *room) {
    size_t n = 0;
    int c = getc(f);
    if (c == EOF) return NULL;
    for (; c != EOF && c != '\n'; c = getc(f)) {
        if (n + 1 >= *room) *line = realloc(*line, *room = 2 * *room + 256);
        (*line)[n++] = (char)c;
    }
    if (n + 1 >= *room) *line = realloc(*line, *room = 2 * *room + 256);
    (*line)[n] = 0;
    return *line;
}
static sequences read_sequences(const char *path, int64_t vocabulary) {
    sequences s = {0};
    char *line = NULL, *end;
    size_t room = 0;
    FILE *f = fopen(path, "r");
    if (!f) die("cannot read %s: %s", path, strerror(errno));
    for (int number = 1; read_line(f, &line, &room); number++) {
        sequence q = {.ids = malloc((strlen(line) / 2 + 2 + (size_t)opt.generate) * sizeof *q.ids)};
        for (char *p = line; *(p += strspn(p, " \t\r\n,")); p = end) {
            long id = strtol(p, &end, 10);
            if (end == p || id < 0 || id >= vocabulary)
                die("%s, line %d: \"%.*s\" is not an id of the model: 0 to %lld", path, number, (int)strcspn(p, " \t\r\n,"), p, (long long)vocabulary - 1);
            q.ids[q.n++] = (int32_t)id;
        }
        if (q.n == 0) {
            free(q.ids);
            continue;
        }
        if (s.count % 64 == 0) s.all = realloc(s.all, (size_t)(s.count + 64) * sizeof *s.all);
        s.all[s.count++] = q;
        s.targets += q.n - 1;
    }
    free(line);
    fclose(f);
    if (s.count == 0) die("%s has no sequence", path);
    return s;
}
static void free_sequences(sequences *s) {
    for (int i = 0; i < s->count; i++) free(s->all[i].ids);
    free(s->all);
}

/* ---- the model ---- */

static te_module *model;
static te_recipe recipe; /* its kind is TE_RECIPE_NONE in high precision */

static te_recipe recipe_named(const char *name) {
    static te_recipe (*const recipes[])(void) = {NULL, te_recipe_delayed_scaling, te_recipe_current_scaling, te_recipe_block_scaling, te_recipe_mxfp8, te_recipe_nvfp4};
    te_recipe none = {0};
    int kind = 0, count = sizeof recipes / sizeof *recipes;
    while (name && kind < count && strcmp(te_recipe_name((te_recipe_kind)kind), name)) kind++;
    if (kind == count) die("--recipe %s: there are none, delayed, current, block, mxfp8 and nvfp4", name);
    return recipes[kind] ? recipes[kind]() : none;
}
static bool checkpoint_layers(void *user, te_module *m) {
    (void)user;
    if (!strcmp(te_module_get_class(m)->name, "DecoderLayer")) te_module_set_checkpoint(m, true);
    return true;
}
static bool share_experts(void *user, te_module *m) {
    (void)user;
    return strcmp(te_module_get_class(m)->name, "LinearExperts") || share_unit(m, dist.expert_data) == TE_OK;
}
static bool share_layer(void *user, te_module *m) {
    (void)user;
    return strcmp(te_module_get_class(m)->name, "DecoderLayer") || share_unit(m, dist.data) == TE_OK;
}
static void share_model(void) { /* units are made from below: experts, which fewer ranks have, then layers */
    if (dist.expert) te_module_visit(model, share_experts, NULL);
    te_module_visit(model, share_layer, NULL);
    share_unit(model, dist.data);
}
static void open_model(void) {
    te_hf_desc desc = {.dist = &dist, .parallel = {.parallel_output = opt.train != NULL, .sequence_parallel = layout.sequence,
                                                   .ub_overlap_ag = layout.ub, .ub_overlap_rs = layout.ub, .ub_bulk_dgrad = layout.ub, .ub_bulk_wgrad = layout.ub}, .quantized_lm_head = opt.quantized_head};
    const te_data_parallel_desc units = unit_of(dist.data);
    const bool by_units = layout.shard && dist.size > 1; /* no rank ever has more than its slices and one layer */
    for (int dtype = TE_F32; opt.dtype && dtype <= TE_BF16; dtype++)
        if (!strcmp(te_dtype_name((te_dtype)dtype), opt.dtype)) desc.params_dtype = (te_dtype)dtype;
    if (opt.dtype && !desc.params_dtype) die("--dtype %s: there are f32, f16 and bf16", opt.dtype);
    recipe = recipe_named(opt.recipe);
    if ((opt.quantized_weights || opt.quantized_head) && !recipe.kind) die("%s needs --recipe", opt.quantized_weights ? "--quantized-weights" : "--quantized-head");
    if (by_units) desc.units = &units;
    const bool backward = opt.train || opt.grads;
    if (!backward) te_no_grad_begin(te); /* quantized weights then have one copy each, the one that forward reads */
    if (opt.quantized_weights) te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &recipe, .preserve_high_precision_init_val = opt.train != NULL});
    model = te_hf_open(te, opt.folder, &desc);
    if (opt.quantized_weights) te_quantized_model_init_end(te);
    if (!backward) te_no_grad_end(te);
    check();
    te_module_train(model, opt.train != NULL);
    if (opt.checkpoint) te_module_visit(model, checkpoint_layers, NULL);
    if (opt.train && dist.size > 1 && !by_units) share_model();
    if (opt.train && dist.size > 1) te_dist_seed(te, &dist, 1);
    check();
}
static int64_t vocabulary_of_model(void) { return ((const te_causal_lm_desc *)te_module_state(model))->vocab_size; }

/* The ids [count, n] of sequences of one length. */
static te_tensor *tensor_of(const sequence *s, int count) {
    const size_t n = (size_t)s->n;
    int32_t *ids = malloc((size_t)count * n * sizeof *ids);
    for (int i = 0; i < count; i++) memcpy(ids + (size_t)i * n, s[i].ids, n * sizeof *ids);
    te_tensor *x = te_tensor_from_host(te, TE_I32, 2, (int64_t[]){count, s->n}, ids);
    free(ids);
    return x;
}
/* Logits of ids [b, n] that follow on those of the cache, if there is one: of the last `kept` ids, [b, kept, V]; 0: of all. */
static te_tensor *logits_of(te_tensor *ids, te_kv_cache *cache, int kept) {
    te_forward_args args = {.input = ids, .kv_cache = cache, .logits_to_keep = kept};
    te_autocast_begin(te, &(te_autocast_desc){.recipe = recipe.kind ? &recipe : NULL, .disabled = !recipe.kind});
    te_tensor *logits = te_forward_with(model, &args);
    te_autocast_end(te);
    return logits;
}
/* The mean over the ids of a sequence but the first one. */
static te_tensor *loss_of(te_tensor *logits, const sequence *s) {
    te_tensor *targets = te_tensor_from_host(te, TE_I32, 2, (int64_t[]){1, s->n - 1}, s->ids + 1);
    return te_cross_entropy(te_tensor_narrow(logits, 1, 0, s->n - 1), targets, NULL);
}

/* ---- loss, logits, gradients ---- */

typedef struct list {
    te_safetensors_item *items;
    int n;
} list;
static void add_to_list(list *l, const char *name, te_tensor *x) {
    if (l->n % 256 == 0) l->items = realloc(l->items, (size_t)(l->n + 256) * sizeof *l->items);
    l->items[l->n++] = (te_safetensors_item){strdup(name), te_tensor_retain(x)};
}
static void write_list(list *l, const char *path) {
    te_safetensors_write(te, path, l->items, l->n, NULL, 0);
    check();
    for (int i = 0; i < l->n; i++) {
        free((char *)l->items[i].name);
        te_tensor_release((te_tensor *)l->items[i].tensor);
    }
    free(l->items);
}
static bool add_grad(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te_tensor *grad = te_tensor_grad(x);
    (void)m;
    if (kind != TE_ENTRY_PARAMETER) return true;
    /* An expert that no token went to has none. */
    add_to_list(user, path, grad ? te_tensor_cast(grad, TE_F32) : te_tensor_zeros(te, TE_F32, te_tensor_ndim(x), te_tensor_shape(x)));
    return true;
}
static void evaluate(sequences *s) {
    list logits = {0}, grads = {0};
    double sum = 0;
    if (!opt.grads) te_no_grad_begin(te);
    for (int i = 0; i < s->count; i++) {
        char name[32];
        sequence *q = &s->all[i];
        te_scope_begin(te);
        te_tensor *y = logits_of(tensor_of(q, 1), NULL, 0);
        if (q->n > 1) {
            te_tensor *loss = te_scale(loss_of(y, q), (float)((q->n - 1) / s->targets));
            sum += te_tensor_item(loss);
            if (opt.grads) te_backward(loss);
        }
        snprintf(name, sizeof name, "logits.%d", i);
        if (opt.logits) add_to_list(&logits, name, te_tensor_cast(te_tensor_view(te_tensor_detach(y), 2, (int64_t[]){q->n, -1}), TE_F32));
        te_scope_end(te);
        check();
    }
    if (!opt.grads) te_no_grad_end(te);
    printf("loss %.9g\n", sum);
    te_scope_begin(te);
    if (opt.grads) te_module_visit_tensors(model, add_grad, &grads), write_list(&grads, opt.grads);
    if (opt.logits && dist.rank == 0) write_list(&logits, opt.logits);
    te_scope_end(te);
}

/* ---- times ---- */

static double now(void) { /* milliseconds */
    struct timespec t;
    return clock_gettime(CLOCK_MONOTONIC, &t) ? 0 : 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}
static void tell_time(double since) { /* of work that has been waited for */
    if (opt.times) fprintf(stderr, "ms %.3f\n", now() - since);
}

/* ---- continuing sequences ---- */

/* Writes the most likely ids after `ids` [b, n] to `id` [b, 1]. */
static void step(te_tensor *ids, te_kv_cache *cache, te_tensor *id) {
    te_scope_begin(te);
    te_tensor_copy(id, te_argmax(logits_of(ids, cache, 1)));
    te_scope_end(te);
    check();
}
/* The length up to which a cache may grow: sequences beyond it rotate their first keys in another way, too (LongRoPE). */
static int64_t longest_cached(void) {
    const te_rope_scaling *r = &((const te_causal_lm_desc *)te_module_state(model))->rotary.scaling;
    return r->type == TE_ROPE_LONGROPE ? r->original_max_position_embeddings : INT64_MAX;
}
/* The length up to which one captured step stands for all: beyond it each step rotates by frequencies of its own (dynamic). */
static int64_t longest_captured(void) {
    const te_rope_scaling *r = &((const te_causal_lm_desc *)te_module_state(model))->rotary.scaling;
    return r->type == TE_ROPE_DYNAMIC ? r->original_max_position_embeddings : INT64_MAX;
}
/* Continues `count` sequences of one length together. */
static void generate(sequence *s, int count) {
    const te_kv_cache_desc kept = {.batch = count, .max_length = s->n + opt.generate, .dtype = opt.cache_dtype ? TE_F8E4M3 : TE_DTYPE_NONE};
    te_kv_cache *cache = opt.no_cache ? NULL : te_kv_cache_create_with(model, &kept);
    te_tensor *id = te_tensor_zeros(te, TE_I32, 2, (int64_t[]){count, 1}); /* the newest ones: a step with a cache reads them, and writes the next ones */
    int32_t *newest = malloc((size_t)count * sizeof *newest);
    const int begin = s->n;
    te_graph *graph = NULL;
    for (int i = 0, seen = 0, ran = 0; i < opt.generate; i++) {
        double start = now();
        if (cache && seen <= longest_cached() && s->n > longest_cached()) te_kv_cache_truncate(cache, seen = 0);
        if (!cache || seen == 0) {
            te_scope_begin(te);
            step(tensor_of(s, count), cache, id);
            te_scope_end(te);
            te_graph_destroy(graph);
            graph = NULL;
            ran = 0;
        } else if (!ran || s->n > longest_captured() || dist.expert || (dist.tensor && !te_ctx_is_cuda(te))) {
            step(id, cache, id); /* experts of ranks wait for the host; ranks on the CPU do not capture */
            ran = 1; /* kernels are compiled, which a capture cannot do */
        } else {
            if (!graph) {
                te_graph_begin(te);
                step(id, cache, id);
                graph = te_graph_end(te);
            }
            te_graph_launch(graph);
        }
        te_tensor_to_host(id, newest);
        check();
        tell_time(start);
        if (cache) seen = s->n;
        for (int j = 0; j < count; j++) s[j].ids[s[j].n++] = newest[j];
    }
    for (int j = 0; j < count; j++)
        for (int i = begin; i < s[j].n; i++) printf("%d%s", (int)s[j].ids[i], i + 1 < s[j].n ? " " : "\n");
    free(newest);
    te_graph_destroy(graph);
    te_kv_cache_destroy(cache);
}

static void generate_all(sequences *s) {
    for (int i = 0; i < s->count; i++)
        if (s->all[i].n != s->all[i - i % opt.batch].n)
            die("%s: --batch %d continues sequence %d, which has %d ids, with sequence %d, which has %d; sequences of a batch have one length", opt.ids, opt.batch, i, s->all[i].n,
                i - i % opt.batch, s->all[i - i % opt.batch].n);
    te_no_grad_begin(te);
    for (int i = 0; i < s->count; i += opt.batch) {
        te_scope_begin(te);
        generate(&s->all[i], opt.batch < s->count - i ? opt.batch : s->count - i);
        te_scope_end(te);
    }
    te_no_grad_end(te);
}

/* ---- training ---- */

/* This rank's part of the mean loss of a sequence: of all of its targets, or of those in its chunks. */
static te_tensor *part_of_loss(const sequence *q) {
    const int n = (q->n - 1 + chunks_of_sequence() - 1) / chunks_of_sequence() * chunks_of_sequence();
    int32_t *ids = calloc(2 * (size_t)n, sizeof *ids), *targets = ids + n;
    for (int i = 0; i < n; i++) targets[i] = -100; /* of padding: no loss */
    memcpy(ids, q->ids, (size_t)(q->n - 1) * sizeof *ids);
    memcpy(targets, q->ids + 1, (size_t)(q->n - 1) * sizeof *ids);
    te_tensor *x = own_tokens(te_tensor_from_host(te, TE_I32, 2, (int64_t[]){1, n}, ids), TE_BSHD);
    te_tensor *y = own_tokens(te_tensor_from_host(te, TE_I32, 2, (int64_t[]){1, n}, targets), TE_BSHD);
    free(ids);
    te_tensor *each = te_cross_entropy(logits_of(x, NULL, 0), y, &(te_cross_entropy_desc){.no_reduce_loss = true, .dist_process_group = te_causal_lm_logits_group(model)});
    return te_scale(te_mean_all(each), (float)te_tensor_numel(y) / (float)(q->n - 1));
}
/* Trains on this rank's sequences of a step, which follow on the first `seen` of all. Returns the mean loss of all ranks' sequences. */
static double train_step(te_optimizer *adam, const sequences *s, int64_t seen) {
    const int own = opt.sequences / dist.data_size;
    te_tensor *sum = te_tensor_zeros(te, TE_F32, 1, (int64_t[]){1});
    for (int i = 0; i < own; i++) {
        const bool last = i == own - 1; /* gradients are exchanged once */
        if (dist.size > 1) te_fsdp_set_state(model, (te_fsdp_state){last, last, last});
        te_tensor *loss = te_scale(part_of_loss(&s->all[(seen + dist.data_rank * own + i) % s->count]), 1.0f / (float)own);
        te_backward(loss);
        sum = te_add(sum, te_tensor_detach(loss));
    }
    if (dist.tensor) te_module_visit_tensors(model, sum_grad_of_parts, NULL);
    te_optimizer_step(adam);
    return te_tensor_item(sum_of_ranks(sum)) / dist.data_size;
}
/* Writes the folder: with --shard all ranks a file each, or else the first one all tensors, of which it gathers the others' parts. */
static void save_model(void) {
    te_hf_save(model, opt.out);
    check();
}
static void train(sequences *s) {
    for (int i = 0; i < s->count; i++)
        if (s->all[i].n < 2) die("%s: sequence %d has one id; there is nothing to predict", opt.train, i);
    char state[4096], seen_text[24]; /* state: optimizer, scales and exact weights beside the model, for --resume */
    te_optimizer *adam = te_fused_adam_create(te, model, &(te_fused_adam_desc){.lr = (float)opt.lr});
    snprintf(state, sizeof state, "%s/training.safetensors", opt.out);
    int64_t seen = 0; /* sequences, by all ranks: those of a file are read in turn, whatever the layout */
    if (opt.resume) {
        te_model_load(te, state, model, adam);
        te_model_metadata(te, state, "sequences", seen_text, sizeof seen_text);
        check();
        seen = strtoll(seen_text, NULL, 10);
        if (dist.size > 1) te_dist_seed(te, &dist, 1);
    }
    te_optimizer_set_lr(adam, (float)opt.lr);
    save_model(); /* a folder that cannot be written shows before the work is done */
    for (int step = (int)te_optimizer_steps(adam); step < opt.steps; step++, seen += opt.sequences) {
        double start = now();
        te_scope_begin(te);
        printf("step %d loss %.9g\n", step + 1, train_step(adam, s, seen));
        te_synchronize(te);
        tell_time(start);
        te_scope_end(te);
        check();
    }
    save_model();
    snprintf(seen_text, sizeof seen_text, "%lld", (long long)seen);
    save_together(te, state, model, adam, &(te_metadata){"sequences", seen_text}, 1);
    check();
    te_optimizer_destroy(adam);
}

int main(int argc, char **argv) {
    read_options(argc, argv);
    te = open_own_device((te_ctx_desc){.device = opt.device, .exact_f32 = opt.exact});
    join_ranks(te), check();
    if (dist.rank > 0 && !freopen("/dev/null", "w", stdout)) die("cannot write to /dev/null"); /* one rank tells of all */
    if (!opt.sequences) opt.sequences = dist.data_size;
    if (opt.sequences % dist.data_size) die("--sequences %d: %d ranks have sequences of their own (--dp times --ep), and must divide them", opt.sequences, dist.data_size);
    open_model();
    sequences s = read_sequences(opt.train ? opt.train : opt.ids, vocabulary_of_model());
    if (opt.train) {
        train(&s);
    } else if (opt.generate) {
        generate_all(&s);
    } else {
        evaluate(&s);
    }
    free_sequences(&s);
    te_module_destroy(model);
    te_dist_finish(&dist);
    te_ctx_destroy(te);
    return 0;
}
