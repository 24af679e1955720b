/* train_gpt.c: trains a byte-level GPT twice from the same seed, in BF16 and in low precision, and shows what that costs.
 *
 *     ./train_gpt             on this repository's own sources, on the first GPU if there is one, else on the CPU
 *     ./train_gpt book.txt    on any text; --help lists the options
 *
 * OUT gets loss.csv, loss.svg and the checkpoints model.safetensors (low precision) and bf16.safetensors, each with optimizer and
 * scaling state; with --inspect also inspect.csv and inspect.svg, what quantization did to every operand of every product.
 * After Ctrl-C or a crash, --resume with the same options goes on to the same losses, bit for bit; with more --steps it goes on after the end.
 * Under torchrun, mpirun or srun several ranks train it together (ranks.h); --resume goes on in another layout as well. Losses
 * then differ in their last digits, and with --recipe delayed in the same layout, too: its amaxes are the first rank's. */
#define _POSIX_C_SOURCE 200809L
#define TE_IMPLEMENTATION
#include "te.h"

#include "curves.h"
#include "inspect.h"
#include "ranks.h"
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#ifdef _WIN32
#include <direct.h>
#define mkdir(path, mode) _mkdir(path)
#endif

enum { MAX_TEXT = 16 << 20, READ_EVERY = 10, NUM_EVALS = 10, EVAL_BATCHES = 8 };
static te_ctx *te;
static inspection inspected;
static volatile sig_atomic_t interrupted;
static void on_interrupt(int number) { interrupted = number; }

#define die(...) (fprintf(stderr, "\ntrain_gpt: " __VA_ARGS__), fputc('\n', stderr), exit(1))
#define check() (te_ok(te) ? (void)0 : die("%s", te_error(te))) /* the first error stays: one look a step is enough */
static double now(void) {
    struct timespec t;
    return clock_gettime(CLOCK_MONOTONIC, &t) ? 0 : (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- options: name, default on the CPU and on a GPU, help ---- */

#define NUMBERS(X)                                            \
    X(int, steps, "240", "900", "training steps")             \
    X(int, layers, "4", "12", "transformer layers")           \
    X(int, hidden, "128", "1024", "width of the model")       \
    X(int, heads, "4", "16", "attention heads")               \
    X(int, kv_heads, "2", "4", "heads of keys and values")    \
    X(int, seq, "128", "1024", "bytes of context")            \
    X(int, batch, "16", "8", "sequences a step")              \
    X(double, lr, "1e-3", "2e-4", "highest learning rate")    \
    X(int, seed, "1234", "1234", "of weights and batches")    \
    X(int, sample, "300", "300", "bytes to write at the end") \
    X(int, tp, "1", "1", "ranks that share each layer")       \
    X(int, cp, "1", "1", "ranks that share each sequence")    \
    X(int, ep, "1", "1", "ranks that would share experts: a GPT has none, so they have batches of their own") \
    X(int, dp, "0", "0", "ranks with batches of their own; 0: those that are left")
#define FIELD(type, name, cpu, gpu, help) type name;
#define READ(type, name, cpu, gpu, help) opt.name = (type)number(argv, #name, te_ctx_is_cuda(te) ? gpu : cpu, help);
static struct {
    NUMBERS(FIELD)
    const char *recipe, *out;
    bool help, resume, inspect, graph, recompute;
} opt;

/* The word behind --name in argv, which loses both; else the default. */
static const char *word(char **argv, const char *name, const char *value, const char *help) {
    char flag[32] = "--";
    for (char *p = strcat(flag, name); *p; p++) *p = *p == '_' ? '-' : *p;
    if (opt.help) printf("  %-11s %s (%s)\n", flag, help, value ? value : "the first GPU, or else the CPU");
    while (*argv && strcmp(*argv, flag)) argv++;
    if (!*argv) return value;
    if (!(value = argv[1])) die("%s needs a value", flag);
    do *argv = argv[2]; while (*argv++);
    return value;
}
static double number(char **argv, const char *name, const char *value, const char *help) {
    char *end;
    double x = strtod(value = word(argv, name, value, help), &end);
    if (*end || !(x >= 0 && x < 1e9)) die("--%s %s: a number is needed", name, value);
    return x;
}

/* ---- text ---- */

static struct text {
    size_t size;
    uint8_t bytes[MAX_TEXT];
} train, valid;

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }
static void read_text(const char *path) { /* a file, or the sources in a folder, in the order of their names' bytes */
    static int blocks; /* of 4 KiB; every tenth is held out */
    char **names = NULL;
    int n = 0;
    DIR *folder = opendir(path);
    FILE *f = folder ? NULL : fopen(path, "rb");
    if (!folder && !f) die("cannot read %s: %s", path, strerror(errno));
    for (struct dirent *e = NULL; folder && (e = readdir(folder)) != NULL; names[n++] = strdup(e->d_name))
        if (n % 64 == 0) names = realloc(names, (size_t)(n + 64) * sizeof *names);
    if (folder) closedir(folder), qsort(names, (size_t)n, sizeof *names, by_name);
    for (size_t got = 1; f && got > 0;) {
        struct text *t = ++blocks % 10 ? &train : &valid;
        t->size += got = fread(t->bytes + t->size, 1, t->size + 4096 < MAX_TEXT ? 4096 : 0, f);
    }
    if (f) fclose(f);
    for (int i = 0; i < n; free(names[i++])) {
        const char *name = names[i], *dot = strrchr(name, '.');
        char inside[4096];
        snprintf(inside, sizeof inside, "%s/%s", path, name);
        if (name[0] != '.' && (!dot || strstr(".c.h.cu.cuh.md", dot))) read_text(inside);
    }
    free(names);
}
/* Where row `row` of batch `index` begins. It depends on nothing else, so a resumed run sees the same batches. */
static size_t window_start(const struct text *t, int index, int row) {
    uint64_t room = t->size - (size_t)opt.seq, x = (uint64_t)index * (uint64_t)opt.batch + (uint64_t)row;
    if (t == &valid) return (size_t)(x * room / (uint64_t)(EVAL_BATCHES * opt.batch));
    x = (x + 1 + ((uint64_t)opt.seed << 40)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 29) * 0x94D049BB133111EBu;
    return (size_t)((x ^ x >> 32) % room);
}

/* ---- the model: a module class of our own ---- */

static te_result gpt_forward(te_module *self, te_forward_args *args) { /* ids [s, b] -> logits [s, b, 256], of ranks that share layers their part of the 256 */
    te_module *embedding = te_module_child(self, 0), *norm = te_module_child(self, opt.layers + 1);
    te_rotary_desc rotary = {.base = 10000};
    te_tensor *x = te_forward(embedding, args->input);
    for (int i = 1; i <= opt.layers; i++)
        x = te_forward_with(te_module_child(self, i), &(te_forward_args){.input = x, .rotary = &rotary});
    x = te_forward(norm, x);
    /* in high precision whatever the autocast */
    args->outputs.out = te_parallel_lm_logits(x, te_module_parameter(embedding, "weight"), &(te_parallel_lm_logits_desc){
        .tp_group = dist.tensor, .sequence_parallel = layout.sequence, .parallel_output = true});
    return te_error_code(te);
}
static const te_module_class gpt_class = {.name = "GPT", .forward = gpt_forward};
static te_module *gpt_create(void) {
    te_module *m = te_module_create(te, &gpt_class, "gpt");
    te_parallel_options shared = {.tp_group = dist.tensor, .set_parallel_mode = dist.tensor != NULL, .sequence_parallel = dist.tensor && layout.sequence,
                                  .ub_overlap_ag = layout.ub, .ub_overlap_rs = layout.ub, .ub_bulk_dgrad = layout.ub, .ub_bulk_wgrad = layout.ub, .cp_group = dist.context};
    te_embedding_desc table = {.num_embeddings = 256, .embedding_dim = opt.hidden, .parallel = shared};
    te_norm_desc norm = {.hidden_size = opt.hidden, .parallel = shared};
    te_transformer_layer_desc layer = {
        .hidden_size = opt.hidden, .ffn_hidden_size = (opt.hidden * 8 / 3 + 127) / 128 * 128, .gemm.no_bias = true,
        .attention.num_attention_heads = opt.heads, .attention.num_gqa_groups = opt.kv_heads, .attention.attn_mask_type = TE_MASK_CAUSAL,
        .norm.normalization = TE_RMSNORM, .activation = TE_SWIGLU,
        .parallel = shared,
        .output_layer_init = {.std = 0.023f / sqrtf(2 * (float)opt.layers)}};
    te_module_add_child(m, "embedding", te_embedding_create(te, &table));
    for (int i = 0; i < opt.layers; i++) {
        char name[32];
        snprintf(name, sizeof name, "layer%d", i);
        te_module_set_checkpoint(te_module_add_child(m, name, te_transformer_layer_create(te, &layer)), opt.recompute);
    }
    te_module_add_child(m, "norm", te_rmsnorm_create(te, &norm));
    return m;
}

/* ---- a run: one model on its way through the steps ---- */

typedef struct run {
    const char *name, *file, *color;
    te_recipe recipe; /* its kind is TE_RECIPE_NONE in high precision */
    te_module *model;
    te_optimizer *adam;
    te_tensor *ids, *targets; /* where the batch of a training step is put */
    te_graph *graph;      /* --graph: the step, captured */
    te_tensor *loss;      /* where it leaves its loss */
    te_tensor *curves;    /* f32 [2, steps + 1], a buffer of the model: it stays on the device and is saved with it */
    float *train, *valid; /* its two rows on the host: losses by steps done, NaN where there is none */
    int step;             /* steps done */
} run;
static run runs[2] = {{.name = "BF16", .file = "bf16.safetensors", .color = "#2e6fe4"},
                      {.file = "model.safetensors", .color = "#e4572e"}};
static run *end = runs + 2; /* of the runs that there are */
static char title[256];

/* By te_recipe_kind. */
static const char *const labels[] = {"BF16", "FP8 delayed", "FP8 current", "FP8 block", "MXFP8", "NVFP4"};
static te_recipe (*const recipes[])(void) = {NULL, te_recipe_delayed_scaling, te_recipe_current_scaling, te_recipe_block_scaling,
                                             te_recipe_mxfp8, te_recipe_nvfp4};
enum { NUM_RECIPES = sizeof recipes / sizeof *recipes };
static void choose_recipe(run *r, const char *name, const char *all) {
    int kind = 0;
    while (kind < NUM_RECIPES && strcmp(te_recipe_name((te_recipe_kind)kind), name)) kind++;
    if (kind == NUM_RECIPES) die("--recipe %s: there are %s", name, all);
    if (kind == TE_RECIPE_NONE) end--, runs->file = r->file;
    else r->name = labels[kind], r->recipe = recipes[kind]();
    /* Delayed: the default, the largest of 1024 steps, would let one outlier of the first steps set a scale until the end of this run. */
    if (kind == TE_RECIPE_DELAYED) r->recipe.delayed.amax_history_len = 16;
}
static const char *in_out(const char *name) {
    static char path[4096];
    snprintf(path, sizeof path, "%s/%s", opt.out, name);
    return path;
}
static te_tensor *curve_of(te_tensor *curves, int row, int begin, int count) { /* [2, any] -> [1, count] */
    return te_tensor_narrow(te_tensor_narrow(curves, 0, row, 1), 1, begin, count);
}
static int own_batch(void) { return opt.batch / dist.data_size; }
static void share_model(te_module *m) {
    for (int i = 1; i <= opt.layers; i++) share_unit(te_module_child(m, i), dist.data); /* layers are gathered one by one */
    share_unit(m, dist.data);
}
static void resume(run *r, const char *path) {
    te_module_set_buffer_persistent(r->model, "curves", false); /* the file's are as long as its own --steps */
    te_model_load(te, path, r->model, r->adam);
    te_module_set_buffer_persistent(r->model, "curves", true);
    te_safetensors *file = te_safetensors_open(te, path);
    te_tensor *curves = te_tensor_view(te_safetensors_read(file, "curves"), 2, (int64_t[]){2, -1});
    r->step = (int)te_optimizer_steps(r->adam);
    check();
    if (r->step > opt.steps) die("--steps %d: %s has come to step %d already", opt.steps, path, r->step);
    for (int row = 0; row < 2; row++) te_tensor_copy(curve_of(r->curves, row, 0, r->step + 1), curve_of(curves, row, 0, r->step + 1));
    te_safetensors_close(file);
}
static void open_run(run *r) {
    te_seed(te, (uint64_t)opt.seed);
    r->model = gpt_create();
    r->curves = te_tensor_full(te, TE_F32, 2, (int64_t[]){2, opt.steps + 1}, NAN);
    te_module_add_buffer(r->model, "curves", r->curves);
    share_model(r->model);
    r->ids = te_tensor_zeros(te, TE_I32, 2, (int64_t[]){opt.seq / te_group_size(dist.context), own_batch()});
    r->targets = te_tensor_zeros(te, TE_I32, 2, te_tensor_shape(r->ids));
    r->adam = te_fused_adam_create(te, r->model, &(te_fused_adam_desc){
        .beta2 = 0.95f, .weight_decay = 0.1f, .decay_matrices_only = true, .max_grad_norm = 1});
    if (opt.resume && !access(in_out(r->file), F_OK)) resume(r, in_out(r->file));
    if (dist.size > 1) te_dist_seed(te, &dist, (uint64_t)opt.seed);
    check();
    r->train = malloc(te_tensor_bytes(r->curves));
    r->valid = r->train + opt.steps + 1;
    te_tensor_to_host(r->curves, r->train);
    if (opt.inspect && r->recipe.kind && r->step) inspect_load(&inspected, opt.out, r->step);
}
static te_tensor *logits_of(run *r, te_tensor *ids) {
    te_autocast_begin(te, &(te_autocast_desc){.recipe = r->recipe.kind ? &r->recipe : NULL, .disabled = !r->recipe.kind});
    te_tensor *logits = te_forward(r->model, ids);
    te_autocast_end(te);
    return logits;
}
static void read_batch(const struct text *t, int index, te_tensor *ids, te_tensor *targets) {
    const int batch = own_batch(); /* rows of the batch that are this rank's share */
    int32_t *host = malloc(sizeof *host * (size_t)((opt.seq + 1) * batch));
    for (int b = 0; b < batch; b++)
        for (int s = 0; s <= opt.seq; s++) host[s * batch + b] = t->bytes[window_start(t, index, dist.data_rank * batch + b) + (size_t)s];
    for (int later = 0; later < 2; later++) { /* targets are the ids one byte later */
        te_tensor *whole = te_tensor_from_host(te, TE_I32, 2, (int64_t[]){opt.seq, batch}, host + later * batch);
        te_tensor_copy(later ? targets : ids, own_tokens(whole, TE_SBHD));
    }
    free(host);
}
static te_tensor *loss_of(run *r, const struct text *t, int index) {
    const int64_t *shape = te_tensor_shape(r->ids);
    te_tensor *ids = te_tensor_empty(te, TE_I32, 2, shape), *targets = te_tensor_empty(te, TE_I32, 2, shape);
    read_batch(t, index, ids, targets);
    return te_cross_entropy(logits_of(r, ids), targets, &(te_cross_entropy_desc){.dist_process_group = dist.tensor});
}
static te_tensor *learn(run *r) { /* from the batch that lies there */
    te_tensor *loss = te_cross_entropy(logits_of(r, r->ids), r->targets, &(te_cross_entropy_desc){.dist_process_group = dist.tensor});
    te_backward(te_scale(loss, 1.0f / (float)te_group_size(dist.context))); /* its part of the sequences' loss */
    if (dist.tensor) te_module_visit_tensors(r->model, sum_grad_of_parts, NULL);
    te_optimizer_step(r->adam);
    return dist.data ? te_scale(sum_of_ranks(loss), 1.0f / (float)te_group_size(dist.data)) : loss;
}
static void capture(run *r) { /* the same kernels on the same memory; the optimizer counts on, the learning rate may change */
    te_scope_begin(te);
    te_graph_begin(te);
    r->loss = te_tensor_retain(learn(r));
    r->graph = te_graph_end(te);
    te_scope_end(te);
}
static void train_step(run *r) { /* learning rate: up over a twentieth of the steps, then a cosine down to a tenth */
    double warm = opt.steps / 20 + 1, x = (r->step + 1 - warm) / (opt.steps + 1 - warm);
    bool inspect = opt.inspect && r->recipe.kind && inspect_is_due(r->step + 1, opt.steps);
    read_batch(&train, r->step, r->ids, r->targets);
    te_optimizer_set_lr(r->adam, (float)(opt.lr * (x < 0 ? (r->step + 1) / warm : 0.55 + 0.45 * cos(3.14159265 * x))));
    if (inspect) inspect_begin(te);
    te_tensor *loss = r->loss;
    if (r->graph && !inspect) te_graph_launch(r->graph);
    else loss = learn(r);
    if (inspect) inspect_end(te, &inspected, r->step + 1);
    te_tensor_copy(te_tensor_view(curve_of(r->curves, 0, r->step + 1, 1), 1, (int64_t[]){1}), loss);
}
static void evaluate(run *r, int step) {
    te_no_grad_begin(te);
    te_tensor *sum = loss_of(r, &valid, 0);
    for (int i = 1; i < EVAL_BATCHES; i++) sum = te_add(sum, loss_of(r, &valid, i));
    te_tensor_copy(te_tensor_view(curve_of(r->curves, 1, step, 1), 1, (int64_t[]){1}), te_scale(sum_of_ranks(sum), 1.0f / (float)(EVAL_BATCHES * te_group_size(dist.data))));
    te_no_grad_end(te);
}

/* ---- results ---- */

static double save(void) { /* returns when to save again: a tenth of the time at most goes into it */
    double started = now();
    if (opt.inspect && dist.rank == 0) inspect_save(&inspected, opt.out, end[-1].name, title); /* first: what is later than a checkpoint is dropped at --resume */
    for (run *r = runs; r < end; r++) save_together(te, in_out(r->file), r->model, r->adam, NULL, 0);
    check();
    if (dist.rank > 0) return now() + 10 * (now() - started);
    curve curves[2];
    for (run *r = runs; r < end; r++) curves[r - runs] = (curve){r->name, r->color, r->train, r->valid, r->step};
    FILE *csv = fopen(in_out("loss.csv"), "w"), *svg = fopen(in_out("loss.svg"), "w");
    if (!csv || !svg) die("cannot write the curves to %s: %s", opt.out, strerror(errno));
    curves_write_csv(csv, curves, (int)(end - runs)), curves_write_svg(svg, curves, (int)(end - runs), opt.steps, title);
    fclose(csv), fclose(svg);
    return now() + 10 * (now() - started);
}
static void show(double seconds, int steps, bool evaluated) { /* waits for the device */
    int done = runs->step, left = (int)(seconds / steps * (opt.steps - done)), bar = 24 * done / opt.steps;
    for (run *r = runs; r < end; r++) te_tensor_to_host(r->curves, r->train);
    if (!evaluated && !isatty(1)) return;
    if (isatty(1)) printf("\r\033[K[%.*s%*s] ", bar, "########################", 24 - bar, "");
    printf("step %d/%d", done, opt.steps);
    for (run *r = runs; r < end; r++) printf("  %s %.3f", r->name, (double)r->train[done]);
    for (run *r = runs; r < end && evaluated; r++) printf("%s %.4f", r == runs ? "  validation" : " /", (double)r->valid[done]);
    printf("  %.0f tokens/s", (double)((end - runs) * steps * opt.seq * opt.batch) / seconds);
    printf("  %d:%02d left%s", left / 60, left % 60, evaluated ? "\n" : "");
    fflush(stdout);
}
static void write_sample(run *r) {
    static int32_t bytes[(1 << 16) + 64] = {'\n'}; /* it starts from the beginning of a line */
    if (dist.context) te_set_context_parallel_group(r->model, NULL, NULL, TE_CP_P2P); /* each of these ranks writes it alone */
    te_no_grad_begin(te);
    for (int n = 1, c = 0; n <= opt.sample && n < 1 << 16; n++, c = 0) {
        int length = n < opt.seq ? n : opt.seq, parts = layout.sequence ? te_group_size(dist.tensor) : 1;
        float p[256] = {0}, sum = 0;
        te_scope_begin(te);
        /* ranks that share the tokens divide their number: some follow that do not matter */
        te_tensor *ids = te_tensor_from_host(te, TE_I32, 2, (int64_t[]){(length + parts - 1) / parts * parts, 1}, bytes + n - length);
        te_tensor *own = te_tensor_contiguous(te_tensor_narrow(logits_of(r, ids), 0, length - 1, 1)), *all = te_tensor_zeros(te, TE_BF16, 1, (int64_t[]){256});
        te_all_gather(dist.tensor, own, all);
        te_tensor_to_f32(all, p);
        float draw = (float)te_tensor_item(te_tensor_uniform(te, TE_F32, 1, (int64_t[]){1}, 0, 1));
        te_scope_end(te);
        for (int i = 0; i < 256; i++) sum += p[i] = expf(p[i] / 0.8f);
        for (draw *= sum; c < 255 && (draw -= p[c]) > 0; c++) {}
        bytes[n] = c;
        putchar(c == '\n' || (c >= 32 && c < 127) ? c : '.');
    }
    te_no_grad_end(te), putchar('\n');
}

/* The largest of what the ranks say: all ranks stop, or save, at the same step. */
static int most_of_ranks(int own) {
    int32_t most = own;
    te_tensor *x = dist.size > 1 ? te_tensor_from_host(te, TE_I32, 1, (int64_t[]){1}, &most) : NULL;
    if (x && te_all_reduce(dist.world, x, TE_REDUCE_MAX) == TE_OK) te_tensor_to_host(x, &most);
    return most;
}

int main(int argc, char **argv) {
    const char *sources[] = {"src", "tests", "tools", "examples", "README.md"};
    char names[128] = "";
    int files = 0;
    opt.help = argc == 2 && !strcmp(argv[1], "--help");
    te = open_own_device((te_ctx_desc){.device = word(++argv, "device", NULL, "cpu or cuda:N")});
    for (int i = 0; i < NUM_RECIPES; i++)
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", i ? ", " : "", te_recipe_name((te_recipe_kind)i));
    opt.recipe = word(argv, "recipe", "current", names);
    opt.out = word(argv, "out", "out", "folder of the results");
    NUMBERS(READ)
    if (opt.help) return printf("  --resume    go on from what is in the folder; more --steps stretch the learning rate's curve\n  --inspect   measure what quantization does\n"
                                 "  --graph     capture a training step once and launch it: the same losses, less work for the host\n"
                                 "  --recompute make each layer's activations again in the backward pass: the same losses, less memory\n"
                                 "  --shard     ranks keep slices of parameters and optimizer states: less memory\n"
                                 "  --sequence-parallel  ranks that share layers also share the tokens between products: less memory\n"
                                 "  --ub        their exchanges run beside products\n"), 0;
    check();
    if (opt.steps < 1 || opt.seq < 1 || opt.batch < 1 || (double)opt.seq * opt.batch > 1e8)
        die("--steps, --seq and --batch must be at least 1, and a batch at most 100 million bytes");
    for (; *argv; argv++) {
        if (!strcmp(*argv, "--resume")) opt.resume = true;
        else if (!strcmp(*argv, "--inspect")) opt.inspect = true;
        else if (!strcmp(*argv, "--graph")) opt.graph = true;
        else if (!strcmp(*argv, "--recompute")) opt.recompute = true;
        else if (!strcmp(*argv, "--shard")) layout.shard = true;
        else if (!strcmp(*argv, "--sequence-parallel")) layout.sequence = true;
        else if (!strcmp(*argv, "--ub")) layout.ub = true;
        else if (!strncmp(*argv, "--", 2)) die("there is no option %s; --help shows what there is", *argv);
        else read_text(*argv), files++;
    }
    for (int i = 0; i < 5 && !files; i++) if (!access(sources[i], R_OK)) read_text(sources[i]);
    if (valid.size <= (size_t)opt.seq || train.size <= (size_t)opt.seq)
        die("of %zu bytes of text %zu bytes are held out (every tenth block of 4 KiB) and the model learns from %zu; --seq %d needs %d of each. "
            "The tenth block begins at 36 KiB: give it a longer text",
            train.size + valid.size, valid.size, train.size, opt.seq, opt.seq + 1);
    layout = (struct layout){opt.tp, opt.cp, opt.ep, opt.dp, layout.shard, layout.sequence, layout.ub};
    join_ranks(te), check();
    if (dist.rank > 0 && !freopen("/dev/null", "w", stdout)) die("cannot write to /dev/null"); /* one rank tells of all */
    if (opt.batch % dist.data_size || opt.seq % chunks_of_sequence())
        die("--batch %d and --seq %d: %d ranks with sequences of their own must divide the batch, and %d chunks, two of each rank that shares them and as many more as ranks share tokens, a sequence",
            opt.batch, opt.seq, dist.data_size, chunks_of_sequence());
    choose_recipe(&runs[1], opt.recipe, names);
    if (opt.inspect && end == runs + 1) die("--inspect: --recipe none quantizes nothing; choose another");
    if (mkdir(opt.out, 0777) && errno != EEXIST) die("cannot make the folder %s: %s", opt.out, strerror(errno));
    for (run *r = runs; r < end; r++) open_run(r);
    double millions = (double)te_module_num_parameters(runs->model) / 1e6;
    snprintf(title, sizeof title, "GPT of %.1f million parameters on %s", millions, te_ctx_device(te));
    printf("%s, %.1f MB of text, %.1f MB held out\n", title, (double)(train.size + valid.size) / 1e6, (double)valid.size / 1e6);

    te_warmup_begin(te); /* a step that only notes which kernels it needs: they are then compiled in parallel */
    te_scope_begin(te);
    for (run *r = runs; r < end; r++)
        if (r->step < opt.steps) train_step(r), evaluate(r, 0);
    te_scope_end(te);
    te_warmup_end(te);
    for (run *r = runs; r < end && opt.graph; r++)
        if (r->step < opt.steps) capture(r);
    for (run *r = runs; r < end; r++) { /* stopped at the very step that is the last one now */
        if (r->step < opt.steps || !isnan(r->valid[opt.steps])) continue;
        te_scope_begin(te), evaluate(r, opt.steps), te_scope_end(te);
        te_tensor_to_host(r->curves, r->train), save();
    }
    int first = runs->step < end[-1].step ? runs->step : end[-1].step, read_every = te_ctx_is_cuda(te) ? READ_EVERY : 1;
    double begin = now(), next_save = begin;
    signal(SIGINT, on_interrupt);
    for (int step = first, stop = 0; step < opt.steps && !stop; step++) {
        bool last = step + 1 == opt.steps, evaluated = last || (step + 1) % ((opt.steps + NUM_EVALS - 1) / NUM_EVALS) == 0;
        te_scope_begin(te);
        for (run *r = runs; r < end; r++) {
            if (r->step != step) continue; /* its checkpoint was later than the other run's */
            if (step == 0) evaluate(r, 0);
            train_step(r);
            r->step++;
            if (evaluated) evaluate(r, step + 1);
        }
        te_scope_end(te);
        check();
        int due = dist.size > 1 && step % read_every ? 0 : most_of_ranks(interrupted ? 2 : dist.rank == 0 && now() > next_save); /* 1: a checkpoint, of which rank 0 knows how long it takes; 2: the end */
        stop = last || due == 2;
        if (stop || evaluated || step % read_every == 0 || due) show(now() - begin, step + 1 - first, evaluated);
        if (stop || due) next_save = save();
    }
    if (runs->step < opt.steps) return printf("\nstopped; --resume goes on from here\n"), te_dist_finish(&dist), 130;
    te_memory_stats memory = te_memory_get_stats(te);
    printf("memory of the device: %.1f MiB now, %.1f MiB at the peak\n", (double)memory.allocated / 1048576, (double)memory.peak_allocated / 1048576);
    double ratio = (double)(end[-1].valid[opt.steps] / runs->valid[opt.steps]);
    if (end == runs + 2) printf("validation loss, %s against BF16: %+.2f %%\n", runs[1].name, 100 * (ratio - 1));
    printf("loss.svg and the models are in %s. This is how the %s model writes:\n", opt.out, end[-1].name);
    write_sample(end - 1), check();
    for (run *r = runs; r < end; r++)
        te_graph_destroy(r->graph), te_tensor_release(r->loss), te_optimizer_destroy(r->adam), te_module_destroy(r->model), free(r->train);
    te_dist_finish(&dist);
    te_ctx_destroy(te);
    return 0;
}
