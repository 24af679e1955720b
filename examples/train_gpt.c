/* train_gpt.c: trains a byte-level GPT twice from the same seed, in BF16 and in FP8, and shows that FP8 costs nothing.
 *
 *     ./train_gpt             on this repository's own sources, on the first GPU if there is one, else on the CPU
 *     ./train_gpt book.txt    on any text; --help lists the options
 *
 * OUT gets loss.csv, loss.svg and the checkpoints model.safetensors (FP8) and bf16.safetensors, each with optimizer and
 * scaling state. After Ctrl-C or a crash, --resume with the same options goes on to the same losses, bit for bit. */
#define _POSIX_C_SOURCE 200809L
#define TE_IMPLEMENTATION
#include "te.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MAX_TEXT = 16 << 20, READ_EVERY = 10, NUM_EVALS = 10, EVAL_BATCHES = 4 };

static te_ctx *te;
static volatile sig_atomic_t interrupted;
static void on_interrupt(int number) { interrupted = number; }

static void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("\ntrain_gpt: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    exit(1);
}
static void check(void) { /* te.h keeps the first error: a look at the end of a step is enough */
    if (!te_ok(te)) die("%s", te_error(te));
}

/* ---- options: type, name, default on the CPU and on a GPU, help ---- */

typedef const char *word;
#define OPTIONS(X)                                                                                   \
    X(word, recipe, "current", "current", "of the FP8 run: current, delayed, or none for BF16 alone") \
    X(word, out, "out", "out", "folder of the results")                                              \
    X(int, steps, "200", "300", "training steps")                                                    \
    X(int, layers, "4", "12", "transformer layers")                                                  \
    X(int, hidden, "128", "1024", "width of the model")                                              \
    X(int, heads, "4", "16", "attention heads")                                                      \
    X(int, kv_heads, "2", "4", "heads of keys and values")                                           \
    X(int, seq, "128", "1024", "bytes of context")                                                   \
    X(int, batch, "8", "8", "sequences a step")                                                      \
    X(double, lr, "3e-3", "1e-3", "highest learning rate")                                           \
    X(int, seed, "1234", "1234", "of the weights and the batches")                                   \
    X(int, sample, "300", "300", "bytes to write at the end")
#define FIELD(type, name, cpu, gpu, help) type name;
#define READ(type, name, cpu, gpu, help) opt.name = to_##type(given(argv, #name, te_ctx_is_cuda(te) ? gpu : cpu, help));
static struct { OPTIONS(FIELD) bool help, resume; } opt;

/* What follows --name in argv, which loses both; else the default. */
static word given(char **argv, const char *name, word value, const char *help) {
    char flag[32] = "--";
    for (char *p = strcat(flag, name); *p; p++) *p = *p == '_' ? '-' : *p;
    if (opt.help) printf("  %-11s %s%s%s\n", flag, help, value ? "; default " : "", value ? value : "");
    for (; *argv && strcmp(*argv, flag); argv++) {}
    if (!*argv) return value;
    value = argv[1];
    if (!value) die("%s needs a value", flag);
    do *argv = argv[2];
    while (*argv++);
    return value;
}
static word to_word(word text) { return text; }
static double to_double(word text) {
    char *end;
    double x = strtod(text, &end);
    if (*end || !(x >= 0 && x < 1e9)) die("%s: a number is needed", text);
    return x;
}
static int to_int(word text) { return (int)to_double(text); }

/* ---- text ---- */

typedef struct text {
    uint8_t bytes[MAX_TEXT];
    size_t size;
} text;
static text train, valid;

static void read_text(const char *path) { /* a file, or the sources in a folder, in alphabetical order */
    static int blocks; /* of 4 KiB; every tenth is held out */
    struct dirent **names;
    int n = scandir(path, &names, NULL, alphasort);
    FILE *f = n < 0 ? fopen(path, "rb") : NULL;
    if (n < 0 && !f) die("cannot read %s: %s", path, strerror(errno));
    for (size_t got = 1; f && got > 0;) {
        text *t = ++blocks % 10 ? &train : &valid;
        t->size += got = fread(t->bytes + t->size, 1, t->size + 4096 < MAX_TEXT ? 4096 : 0, f);
    }
    if (f) fclose(f);
    for (int i = 0; i < n; free(names[i++])) {
        const char *name = names[i]->d_name, *dot = strrchr(name, '.');
        char inside[4096];
        snprintf(inside, sizeof inside, "%s/%s", path, name);
        if (!dot || (dot != name && strstr(".c.h.cu.cuh.md", dot))) read_text(inside);
    }
    if (n >= 0) free(names);
}
/* Where row `row` of batch `index` begins. It depends on nothing else, so a resumed run sees the same batches. */
static size_t window_start(const text *t, int index, int row) {
    uint64_t room = t->size - (size_t)opt.seq, x = (uint64_t)index * (uint64_t)opt.batch + (uint64_t)row;
    if (t == &valid) return (size_t)(x * room / (uint64_t)(EVAL_BATCHES * opt.batch));
    x = (x + 1) * 0x9E3779B97F4A7C15u + (uint64_t)opt.seed * 0xD1B54A32D192ED03u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return (size_t)((x ^ x >> 31) % room);
}

/* ---- the model: a module class of our own ---- */

static te_result gpt_forward(te_module *self, te_forward_args *args) { /* ids [s, b] -> logits [s, b, 256] */
    te_module *embedding = te_module_child(self, 0), *norm = te_module_child(self, opt.layers + 1);
    te_rotary_desc rotary = {.base = 10000};
    te_tensor *x = te_forward(embedding, args->input);
    for (int i = 1; i <= opt.layers; i++)
        x = te_forward_with(te_module_child(self, i), &(te_forward_args){.input = x, .rotary = &rotary});
    x = te_forward(norm, x);
    /* The output head is the embedding's table again, in high precision whatever the autocast. */
    args->outputs[args->num_outputs++] = te_matmul(x, te_module_parameter(embedding, "weight"), NULL);
    return te_error_code(te);
}
static const te_module_class gpt_class = {.name = "GPT", .forward = gpt_forward};

static te_module *gpt_create(void) {
    te_module *m = te_module_create(te, &gpt_class, "gpt");
    te_embedding_desc table = {.num_embeddings = 256, .embedding_dim = opt.hidden};
    te_norm_desc norm = {.hidden_size = opt.hidden};
    te_transformer_layer_desc layer = {
        .hidden_size = opt.hidden, .ffn_hidden_size = (opt.hidden * 8 / 3 + 127) / 128 * 128, .no_bias = true,
        .num_attention_heads = opt.heads, .num_gqa_groups = opt.kv_heads, .self_attn_mask_type = TE_MASK_CAUSAL,
        .normalization = TE_RMSNORM, .activation = TE_SWIGLU,
        .output_layer_init = {.std = 0.023f / sqrtf(2 * (float)opt.layers)}};
    te_module_add_child(m, "embedding", te_embedding_create(te, &table));
    for (int i = 0; i < opt.layers; i++) {
        char name[32];
        snprintf(name, sizeof name, "layer%d", i);
        te_module_add_child(m, name, te_transformer_layer_create(te, &layer));
    }
    te_module_add_child(m, "norm", te_rmsnorm_create(te, &norm));
    return m;
}

/* ---- a run: one model on its way through the steps ---- */

typedef struct run {
    const char *name, *color;
    char path[1024]; /* of its checkpoint */
    bool fp8;
    te_recipe recipe;
    te_module *model;
    te_optimizer *adam;
    te_tensor *curves;             /* f32 [2, steps + 1], a buffer of the model: saved with it. On the host: */
    float *train, *valid;          /* losses by steps done, NaN where there is none */
    te_tensor *unread[READ_EVERY]; /* losses of the last steps, still on the device */
    int step, num_unread;
} run;

static void open_run(run *r, bool fp8) {
    r->name = fp8 ? "FP8" : "BF16";
    r->color = fp8 ? "#e4572e" : "#2e6fe4";
    r->fp8 = fp8;
    r->recipe = strcmp(opt.recipe, "delayed") ? te_recipe_current_scaling() : te_recipe_delayed_scaling();
    snprintf(r->path, sizeof r->path, "%s/%s.safetensors", opt.out, fp8 ? "model" : "bf16");
    te_seed(te, (uint64_t)opt.seed);
    r->model = gpt_create();
    r->curves = te_tensor_full(te, TE_F32, 2, (int64_t[]){2, opt.steps + 1}, NAN);
    te_module_add_buffer(r->model, "curves", r->curves);
    r->adam = te_fused_adam_create(te, r->model, &(te_fused_adam_desc){
        .beta2 = 0.95f, .weight_decay = 0.1f, .decay_matrices_only = true, .max_grad_norm = 1});
    if (opt.resume && !access(r->path, F_OK)) te_checkpoint_load(te, r->path, r->model, r->adam);
    check();
    r->step = (int)te_optimizer_steps(r->adam);
    r->train = malloc(te_tensor_bytes(r->curves));
    r->valid = r->train + opt.steps + 1;
    te_tensor_to_host(r->curves, r->train);
}
static te_tensor *logits_of(run *r, te_tensor *ids) {
    te_autocast_begin(te, &(te_autocast_desc){.recipe = &r->recipe, .disabled = !r->fp8});
    te_tensor *logits = te_forward(r->model, ids);
    te_autocast_end(te);
    return logits;
}
static te_tensor *loss_of(run *r, const text *t, int index) {
    int64_t shape[] = {opt.seq, opt.batch};
    int32_t *host = malloc(sizeof *host * (size_t)((opt.seq + 1) * opt.batch));
    for (int b = 0; b < opt.batch; b++)
        for (int s = 0; s <= opt.seq; s++) host[s * opt.batch + b] = t->bytes[window_start(t, index, b) + (size_t)s];
    te_tensor *ids = te_tensor_from_host(te, TE_I32, 2, shape, host);
    te_tensor *targets = te_tensor_from_host(te, TE_I32, 2, shape, host + opt.batch); /* one byte later */
    free(host);
    return te_cross_entropy(logits_of(r, ids), targets, NULL);
}
static te_tensor *train_step(run *r) { /* learning rate: up over a twentieth of the steps, down a cosine to a tenth */
    double warm = opt.steps / 20 + 1, x = (r->step + 1 - warm) / (opt.steps + 1 - warm);
    te_tensor *loss = loss_of(r, &train, r->step);
    te_backward(loss);
    te_optimizer_set_lr(r->adam, (float)(opt.lr * (x < 0 ? (r->step + 1) / warm : 0.55 + 0.45 * cos(3.14159265 * x))));
    te_optimizer_step(r->adam);
    return loss;
}
static float evaluate(run *r) {
    double sum = 0;
    te_no_grad_begin(te);
    for (int i = 0; i < EVAL_BATCHES; i++) sum += te_tensor_item(loss_of(r, &valid, i)) / EVAL_BATCHES;
    te_no_grad_end(te);
    return (float)sum;
}
static void read_losses(run *r) { /* waits for the device, so it is not done at every step */
    for (int i = r->num_unread; i > 0; i--) {
        r->train[r->step + 1 - i] = (float)te_tensor_item(r->unread[r->num_unread - i]);
        te_tensor_release(r->unread[r->num_unread - i]);
    }
    r->num_unread = 0;
}

/* ---- results ---- */

static FILE *create(const char *name) {
    char path[1100];
    snprintf(path, sizeof path, "%s/%s", opt.out, name);
    FILE *f = fopen(path, "w");
    if (!f) die("cannot write %s: %s", path, strerror(errno));
    return f;
}
static void write_csv(const run *runs, int num) {
    FILE *f = create("loss.csv");
    fprintf(f, "step");
    for (int r = 0; r < num; r++) fprintf(f, ",%s train,%s validation", runs[r].name, runs[r].name);
    for (int k = 0; k <= runs[0].step; k++) {
        fprintf(f, "\n%d", k);
        for (int i = 0; i < 2 * num; i++) {
            float loss = (i % 2 ? runs[i / 2].valid : runs[i / 2].train)[k];
            fprintf(f, isnan(loss) ? "," : ",%.9g", (double)loss);
        }
    }
    fprintf(f, "\n");
    fclose(f);
}
static void write_svg(const run *runs, int num) {
    enum { W = 860, H = 500, L = 70, R = 30, T = 60, B = 60 };
    double low = INFINITY, high = 0;
    for (int i = 0; i < num * 2 * (opt.steps + 1); i++) { /* fmin and fmax pass over NaN */
        float loss = runs[i % num].train[i / num];
        low = fmin(low, floor(2 * (double)loss) / 2);
        high = fmax(high, ceil(2 * (double)loss) / 2);
    }
#define X(k) (L + (W - L - R) * (double)(k) / opt.steps)
#define Y(loss) (T + (H - T - B) * (high - (double)(loss)) / (high - low))
    FILE *f = create("loss.svg");
    fprintf(f, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 %d %d' font-family='sans-serif' font-size='13'>\n"
               "<rect width='100%%' height='100%%' fill='#fff'/><text x='%d' y='34' font-size='17'>"
               "GPT, %.1f million parameters, on %s</text>\n", W, H, L,
            (double)te_module_num_parameters(runs[0].model) / 1e6, te_ctx_device(te));
    for (double y = low; y < high + 0.1; y += 0.5)
        fprintf(f, "<path d='M%d %.1fH%d' stroke='#ddd'/><text x='%d' y='%.1f' text-anchor='end'>%.1f</text>\n", L, Y(y),
                W - R, L - 8, Y(y) + 4, y);
    for (int k = 0; k <= opt.steps; k += (opt.steps + 4) / 5)
        fprintf(f, "<path d='M%.1f %dv5' stroke='#000'/><text x='%.1f' y='%d' text-anchor='middle'>%d</text>\n", X(k),
                H - B, X(k), H - B + 20, k);
    fprintf(f, "<path d='M%d %dV%dH%d' stroke='#000' fill='none'/><text x='%d' y='%d' text-anchor='middle'>step</text>\n"
               "<text transform='translate(24 %d)rotate(-90)' text-anchor='middle'>loss, nats per byte</text>\n",
            L, T, H - B, W - R, (L + W - R) / 2, H - 16, (T + H - B) / 2);
    for (int r = 0; r < num; r++) {
        double smooth = NAN, x = W - R - 270, y = T + 18 + 24 * r, radius = r ? 3 : 6; /* the legend, and the size of a mark */
        fprintf(f, "<text x='%.0f' y='%.0f'>%s: training, smoothed, and validation</text><g stroke='%s' fill='none'>\n"
                   "<path d='M%.0f %.0fh28' opacity='0.5'/><circle cx='%.0f' cy='%.0f' r='%.0f'/>\n",
                x + 38, y + 4, runs[r].name, runs[r].color, x, y, x + 14, y, radius);
        for (int k = 0; k <= opt.steps; k++)
            if (!isnan(runs[r].valid[k])) fprintf(f, "<circle cx='%.1f' cy='%.1f' r='%.0f'/>\n", X(k), Y(runs[r].valid[k]), radius);
        fprintf(f, "<polyline opacity='0.5' points='");
        for (int k = 1; k <= runs[r].step; k++) {
            smooth = isnan(smooth) ? (double)runs[r].train[k] : 0.9 * smooth + 0.1 * (double)runs[r].train[k];
            fprintf(f, "%.1f,%.1f ", X(k), Y(smooth));
        }
        fprintf(f, "'/></g>\n");
    }
    fprintf(f, "</svg>\n");
    fclose(f);
}
static void save(run *runs, int num) {
    for (int r = 0; r < num; r++) {
        te_tensor_copy_from_host(runs[r].curves, runs[r].train);
        te_checkpoint_save(te, runs[r].path, runs[r].model, runs[r].adam, NULL, 0);
    }
    check();
    write_csv(runs, num);
    write_svg(runs, num);
}

static void show(const run *runs, int num, double seconds, int steps, bool evaluated) { /* a bar on a terminal, else lines */
    int done = runs[num - 1].step, left = (int)(seconds / steps * (opt.steps - done));
    if (!evaluated && !isatty(1)) return;
    if (isatty(1)) printf("\r\033[K[%.*s%*s] ", 24 * done / opt.steps, "########################", 24 - 24 * done / opt.steps, "");
    printf("step %d/%d", done, opt.steps);
    for (int r = 0; r < num; r++) {
        printf("  %s %.3f", runs[r].name, (double)runs[r].train[done]);
        if (evaluated) printf(" (validation %.4f)", (double)runs[r].valid[done]);
    }
    printf("  %.0f tokens/s  %d:%02d left", (double)num * steps * opt.seq * opt.batch / seconds, left / 60, left % 60);
    if (evaluated) printf("\n");
    fflush(stdout);
}
static void write_sample(run *r) {
    int n = opt.seq / 4, stop = n + opt.sample;
    int32_t *bytes = malloc(sizeof *bytes * (size_t)stop);
    for (int i = 0; i < n; i++) bytes[i] = valid.bytes[i]; /* begins with held-out text */
    te_no_grad_begin(te);
    for (; n < stop && te_ok(te); n++) {
        int64_t length = n < opt.seq ? n : opt.seq;
        float p[256], sum = 0;
        int c = 0;
        te_scope_begin(te);
        te_tensor *ids = te_tensor_from_host(te, TE_I32, 2, (int64_t[]){length, 1}, bytes + n - length);
        te_tensor_to_f32(te_tensor_narrow(logits_of(r, ids), 0, length - 1, 1), p);
        float draw = (float)te_tensor_item(te_tensor_uniform(te, TE_F32, 1, (int64_t[]){1}, 0, 1));
        te_scope_end(te);
        for (int i = 0; i < 256; i++) sum += p[i] = expf(p[i] / 0.7f);
        for (draw *= sum; c < 255 && (draw -= p[c]) > 0; c++) {}
        bytes[n] = c;
        putchar(c == '\n' || (c >= 32 && c < 127) ? c : '.');
    }
    te_no_grad_end(te);
    free(bytes);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char **argv) {
    static run runs[2];
    static const char *const sources[] = {"src", "tests", "tools", "examples", "README.md"};
    opt.help = argc == 2 && !strcmp(*++argv, "--help");
    te = te_ctx_create(&(te_ctx_desc){.device = given(argv, "device", NULL, "cpu or cuda:N; default the first GPU, else the CPU")});
    check();
    OPTIONS(READ)
    if (opt.help) return 0;
    ...
}
