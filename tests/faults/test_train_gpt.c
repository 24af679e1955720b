/* tests/faults/test_train_gpt.c: Ctrl-C and kill -9 while train_gpt trains: the checkpoint of the last step, or of one before, is whole, and
 * --resume goes on from it. That the losses are then the same, bit for bit, is for tests/run_short.sh. Options that cannot be; a few steps
 * with each recipe, and what --inspect writes. */
#define _GNU_SOURCE
#include "../te_test.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static void nap(double s) {
    struct timespec t = {(time_t)s, (long)((s - (double)(time_t)s) * 1e9)};
    nanosleep(&t, NULL);
}

/* Beside this program, or one folder up (builds with sanitizers have a folder of their own). NULL if it was not built. */
static const char *train_gpt(void) {
    static char path[600];
    char self[500];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    self[n > 0 ? n : 0] = 0;
    char *slash = strrchr(self, '/');
    if (slash) *slash = 0;
    snprintf(path, sizeof path, "%s/train_gpt", self);
    if (access(path, X_OK) == 0) return path;
    snprintf(path, sizeof path, "%s/../train_gpt", self);
    if (access(path, X_OK) == 0) return path;
    return access("build/train_gpt", X_OK) == 0 ? "build/train_gpt" : NULL;
}
static const char not_built[] = "train_gpt is not built: make build/train_gpt";

/* Words that a small model can learn something of. */
static const char *write_text(void) {
    static const char *const words[] = {"tensor ", "scope ", "the ", "of ", "a ", "module ", "context", ".\n", ", ", "amax ", "row"};
    const int64_t *pick = test_integers(20000, 1, 0, COUNT(words));
    FILE *f = fopen(test_path("text"), "w");
    for (int i = 0; f && i < 20000; i++) fputs(words[pick[i]], f);
    if (f) fclose(f);
    return test_path("text");
}

static void end_process(void *arg) {
    pid_t *child = (pid_t *)arg;
    if (*child <= 0) return;
    kill(*child, SIGKILL);
    waitpid(*child, NULL, 0);
}

/* Starts it on a small model, with `more` (NULL ends it) behind the options, and what it says in a file. */
static pid_t *spawn(const char *const *more) {
    static const char *const small[] = {"--device", "cpu", "--layers", "1", "--hidden", "32", "--heads", "2", "--kv-heads", "1", "--seq", "32", "--batch", "2",
                                        "--sample", "0"};
    const char *program = train_gpt(), *log = test_path("log");
    char **argv = (char **)test_alloc(64 * sizeof *argv);
    int n = 0;
    argv[n++] = (char *)program;
    for (int i = 0; i < COUNT(small); i++) argv[n++] = (char *)small[i];
    for (; *more && n < 63; more++) argv[n++] = (char *)*more;
    pid_t *child = (pid_t *)test_alloc(sizeof *child);
    fflush(stdout);
    *child = fork();
    if (*child == 0) {
        int fd = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        dup2(fd, 1);
        dup2(fd, 2);
        signal(SIGINT, SIG_DFL);
        setenv("TE_THREADS", "1", 1);
        execv(program, argv);
        _exit(127);
    }
    test_on_end(end_process, child);
    return child;
}

/* A whole file, with a 0 behind it; "" if there is none. */
static const char *contents(const char *path, size_t *size) {
    const uint8_t *bytes = test_read_file(path, size);
    return bytes ? (const char *)bytes : "";
}

/* Tells one model.safetensors from the next: each is a new file. 0: there is none. */
static uint64_t saved_file(void) {
    char path[600];
    struct stat st;
    snprintf(path, sizeof path, "%s/model.safetensors", test_path("out"));
    return stat(path, &st) != 0 ? 0 : (uint64_t)st.st_ino * 1000003 + (uint64_t)st.st_mtim.tv_sec * 1000000000 + (uint64_t)st.st_mtim.tv_nsec;
}

/* Starts it and waits until it has trained a step and saved it. A child of 0: it could not be started. */
static pid_t *start_with(const char *const *more) {
    uint64_t before = saved_file();
    pid_t *child = spawn(more);
    for (double limit = seconds() + 30; seconds() < limit; nap(0.002)) {
        int status;
        if (saved_file() != before) return child;
        if (waitpid(*child, &status, WNOHANG) != *child) continue;
        test_fail(__FILE__, __LINE__, "train_gpt ended before it was told to, with status %d: %s", status, contents(test_path("log"), NULL));
        *child = 0;
        return child;
    }
    test_fail(__FILE__, __LINE__, "train_gpt saves nothing");
    return child;
}
static pid_t *start(const char *text, bool resume) {
    const char *out = test_path("out"), *more[] = {"--steps", "20000", "--out", out, text, resume ? "--resume" : NULL, NULL};
    return start_with(more);
}

/* The exit status, or 128 + the signal that ended it; -1 if it does not end within `limit` seconds. */
static int wait_for(pid_t *child, double limit) {
    int status;
    for (limit += seconds(); seconds() < limit; nap(0.001))
        if (waitpid(*child, &status, WNOHANG) == *child) {
            *child = 0;
            return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        }
    return -1;
}

/* Steps that the checkpoint `name` knows of; -1, with a complaint, if it is not whole. */
static long whole(te_ctx *te, const char *name) {
    char path[600], steps[32] = "";
    snprintf(path, sizeof path, "%s/%s", test_path("out"), name);
    te_scope_begin(te);
    te_safetensors *f = te_safetensors_open(te, path);
    int count = te_safetensors_count(f), read = 0;
    for (int i = 0; i < count; i++) read += te_safetensors_read(f, te_safetensors_at(f, i)->name) != NULL;
    bool has = te_safetensors_find(f, "embedding.weight") && te_safetensors_find(f, "optimizer/embedding.weight.exp_avg");
    te_safetensors_close(f);
    te_model_metadata(te, path, "te.steps", steps, sizeof steps);
    te_scope_end(te);
    if (te_ok(te) && has && read == count) return atol(steps);
    test_fail(__FILE__, __LINE__, "%s: %d of %d tensors: %s", path, read, count, te_error(te));
    te_clear_error(te);
    return -1;
}
static int temporary_files(void) {
    int n = 0;
    DIR *dir = opendir(test_path("out"));
    for (struct dirent *e = dir ? readdir(dir) : NULL; e; e = readdir(dir)) n += strstr(e->d_name, ".tmp") != NULL;
    if (dir) closedir(dir);
    return n;
}
/* The last step in loss.csv. */
static long last_step(void) {
    char path[600], line[256];
    long step = -1;
    snprintf(path, sizeof path, "%s/loss.csv", test_path("out"));
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f)) step = atol(line);
    if (f) fclose(f);
    return step;
}

TE_TEST(ctrl_c_leaves_a_whole_checkpoint) {
    if (!train_gpt()) SKIP(not_built);
    te_ctx *te = test_context("cpu");
    const char *text = write_text();
    long steps = 0;
    for (int again = 0; again < 2; again++) {
        pid_t *child = start(text, again);
        REQUIRE(*child > 0);
        nap(0.05);
        REQUIRE(kill(*child, SIGINT) == 0);
        CHECK_EQ_INT(wait_for(child, 20), 130); /* by itself */
        long fp8 = whole(te, "model.safetensors"), bf16 = whole(te, "bf16.safetensors");
        CHECK_MSG(fp8 > steps && fp8 < 20000 && fp8 == bf16 && fp8 == last_step(), "steps: %ld, %ld in the other, %ld in loss.csv, %ld before", fp8, bf16,
                  last_step(), steps);
        CHECK_EQ_INT(temporary_files(), 0);
        steps = fp8;
    }
}

/* Killed at any moment, most of them within the saving that Ctrl-C begins. */
TE_TEST(kill_leaves_a_whole_checkpoint) {
    if (!train_gpt()) SKIP(not_built);
    te_ctx *te = test_context("cpu");
    const char *text = write_text();
    long steps = 0;
    int interrupted = 0;
    for (int i = 0; i < 10; i++) {
        test_case("kill %d", i);
        pid_t *child = start(text, i > 0);
        REQUIRE(*child > 0);
        nap(0.01);
        if (i > 1) kill(*child, SIGINT), nap(0.001 * (i - 2));
        kill(*child, SIGKILL);
        interrupted += wait_for(child, 20) == 128 + SIGKILL;
        long fp8 = whole(te, "model.safetensors"), bf16 = whole(te, "bf16.safetensors");
        CHECK_MSG(fp8 >= steps && bf16 >= steps, "steps: %ld, %ld in the other, %ld before", fp8, bf16, steps);
        steps = fp8 < bf16 ? fp8 : bf16;
    }
    CHECK_MSG(interrupted >= 2, "only %d were killed before they had ended", interrupted);
    pid_t *child = start(text, true);
    REQUIRE(*child > 0);
    kill(*child, SIGINT);
    CHECK_EQ_INT(wait_for(child, 20), 130);
    CHECK(whole(te, "model.safetensors") > steps);
}

/* ---- options, recipes, inspection ---- */

TE_TEST(impossible_options_are_named) {
    if (!train_gpt()) SKIP(not_built);
    static const struct {
        const char *option, *value, *says;
    } cases[] = {{"--recipe", "fp8", "--recipe fp8"},  {"--recipe", "", "--recipe : "},          {"--recipe", NULL, "--recipe needs a value"},
                 {"--steps", "many", "--steps many"},  {"--steps", "0", "at least 1"},         {"--lr", "-1", "--lr -1"},
                 {"--inspects", NULL, "no option --inspects"}, {"--recipe=nvfp4", NULL, "no option --recipe=nvfp4"}};
    const char *text = write_text(), *out = test_path("out");
    for (int i = 0; i < COUNT(cases); i++) {
        const char *more[] = {text, "--out", out, cases[i].option, cases[i].value, NULL}, *said;
        test_case("%s %s", cases[i].option, cases[i].value ? cases[i].value : "");
        CHECK_EQ_INT(wait_for(spawn(more), 20), 1);
        said = contents(test_path("log"), NULL);
        CHECK_MSG(strstr(said, cases[i].says), "it says: %s", said);
        for (int kind = TE_RECIPE_NONE; kind <= TE_RECIPE_NVFP4 && i < 2; kind++)
            CHECK_MSG(strstr(said, te_recipe_name((te_recipe_kind)kind)), "%s is missing: %s", te_recipe_name((te_recipe_kind)kind), said);
    }
    test_case("nothing to inspect");
    const char *more[] = {text, "--out", out, "--recipe", "none", "--inspect", NULL};
    CHECK_EQ_INT(wait_for(spawn(more), 20), 1);
    CHECK(strstr(contents(test_path("log"), NULL), "quantizes nothing"));
    CHECK(access(out, F_OK) != 0); /* all of it before the first file */
}

/* 25 KB are six blocks of 4 KiB and a piece: none of them is the tenth, which is held out. */
TE_TEST(train_gpt_says_why_a_text_is_too_short) {
    const char *text = test_path("text"), *log = test_path("log");
    char command[1024], line[1024] = "";
    if (access("build/train_gpt", X_OK)) SKIP("build/train_gpt is not there: make build/train_gpt");
    FILE *f = fopen(text, "w");
    REQUIRE(f != NULL);
    for (int i = 0; i < 25600; i++) fputc('a' + i % 26, f);
    fclose(f);
    snprintf(command, sizeof command, "build/train_gpt --device cpu --steps 1 --seq 32 --out %s %s 2>%s >/dev/null", test_path("out"), text, log);
    CHECK(system(command) != 0);
    f = fopen(log, "r");
    REQUIRE(f != NULL);
    while (fgets(line, sizeof line, f) && !strstr(line, "train_gpt:")) {}
    fclose(f);
    CHECK_STR(line, "of 25600 bytes of text 0 bytes are held out");
    CHECK_STR(line, "--seq 32 needs 33");
}

/* Of a table: lines, the first of them and the last. */
static int lines(const char *table, char *first, char *last, size_t room) {
    int n = 0;
    for (const char *end; (end = strchr(table, '\n')) != NULL; table = end + 1, n++) {
        snprintf(last, room, "%.*s", (int)(end - table), table);
        if (n == 0) snprintf(first, room, "%s", last);
    }
    return n;
}
static const char *in(const char *folder, const char *name) {
    char path[600];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return test_path(path);
}

/* Every row of inspect.csv: steps 1 .. `steps`, and for each the operands of the four products of the one layer, whose figures make sense. */
static void check_inspection(const char *table, int steps, double least_snr) {
    static const char *const operands[] = {"input", "weight", "dy"};
    static const char *const modules[] = {"layer0.self_attention.layernorm_qkv", "layer0.self_attention.proj", "layer0.layernorm_mlp", "layer0.layernorm_mlp"};
    const char *line = strchr(table, '\n');
    int row = 0;
    for (; line && line[1]; line = strchr(line + 1, '\n'), row++) {
        char module[100] = "", operand[10] = "";
        int step, gemm;
        double amax, scale, underflow, saturated, cosine, snr;
        long long nans, infs;
        int got = sscanf(line + 1, "%d,%99[^,],%d,%9[^,],%lf,%lf,%lf,%lf,%lld,%lld,%lf,%lf", &step, module, &gemm, operand, &amax, &scale, &underflow, &saturated,
                         &nans, &infs, &cosine, &snr);
        bool is_row = got == 12 && step == row / 12 + 1 && !strcmp(module, modules[row / 3 % 4]) && gemm == (row / 3 % 4 == 3) && !strcmp(operand, operands[row % 3]);
        CHECK_MSG(is_row, "row %d: %.120s", row, line + 1);
        CHECK_MSG(amax > 0 && isfinite(amax) && isfinite(scale) && scale >= 0 && nans == 0 && infs == 0, "row %d: %.200s", row, line + 1);
        CHECK_MSG(underflow >= 0 && underflow <= 1 && saturated >= 0 && saturated <= 1 && cosine <= 1.0001, "row %d: %.200s", row, line + 1);
        if (step > 1) CHECK_MSG(snr > least_snr && cosine > 0.9, "row %d: %.200s", row, line + 1); /* the first scales of delayed scaling fit nothing */
    }
    CHECK_EQ_INT(row, 12 * steps);
}

TE_TEST(every_recipe_trains_and_shows_itself) {
    if (!train_gpt()) SKIP(not_built);
    const char *text = write_text();
    for (int kind = TE_RECIPE_NONE; kind <= TE_RECIPE_NVFP4; kind++) {
        const char *name = te_recipe_name((te_recipe_kind)kind);
        char plain[40], inspected[40], first[300] = "", last[300] = "";
        int columns = kind == TE_RECIPE_NONE ? 3 : 5, got = 0;
        double x[5];
        size_t size, size_inspected;
        snprintf(plain, sizeof plain, "%s", name);
        snprintf(inspected, sizeof inspected, "%s inspected", name);
        test_case("%s", name);
        const char *one[] = {text, "--steps", "3", "--recipe", name, "--out", test_path(plain), NULL};
        CHECK_EQ_INT(wait_for(spawn(one), 30), 0);
        const char *losses = contents(in(plain, "loss.csv"), &size);
        CHECK_EQ_INT(lines(losses, first, last, sizeof last), 5);
        for (const char *at = last; at && got < 5; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) x[got++] = *at == ',' ? NAN : atof(at);
        CHECK_EQ_INT(got, columns);
        for (int i = 1; i < got; i++) CHECK_MSG(x[i] > 1 && x[i] < 6, "column %d: %g in %s", i, x[i], last);
        CHECK(access(in(plain, "inspect.csv"), F_OK) != 0);
        if (kind == TE_RECIPE_NONE) continue;
        CHECK_MSG((strstr(first, "BF16 train,BF16 validation,") && (strstr(first, "FP8 ") || strstr(first, "MXFP8 ") || strstr(first, "NVFP4 "))), "%s", first);

        test_case("%s --inspect", name);
        const char *two[] = {text, "--steps", "3", "--recipe", name, "--out", test_path(inspected), "--inspect", NULL};
        CHECK_EQ_INT(wait_for(spawn(two), 30), 0);
        CHECK_MSG(size > 0 && !strcmp(losses, contents(in(inspected, "loss.csv"), &size_inspected)) && size == size_inspected, "other losses");
        check_inspection(contents(in(inspected, "inspect.csv"), NULL), 3, kind == TE_RECIPE_NVFP4 ? 10 : 20);

        test_case("%s --graph", name);
        two[6] = test_path("captured");
        two[7] = "--graph";
        CHECK_EQ_INT(wait_for(spawn(two), 30), 0);
        CHECK_MSG(!strcmp(losses, contents(in("captured", "loss.csv"), NULL)), "other losses");
        const char *svg = contents(in(inspected, "inspect.svg"), &size);
        CHECK(!strncmp(svg, "<svg xmlns='http://www.w3.org/2000/svg'", 39) && size > 8 && !strcmp(svg + size - 7, "</svg>\n"));
        CHECK(strstr(svg, "layer0") && strstr(svg, "layernorm_mlp fc2") && strstr(svg, "Signal-to-noise") && !strstr(svg, "nan") && !strstr(svg, "inf"));
    }
}

/* Most of the steps that are looked at come after the resumption; the table is that of a run that nobody interrupts. */
TE_TEST(inspection_goes_on_after_a_resumption) {
    if (!train_gpt()) SKIP(not_built);
    const char *text = write_text();
    char first[300] = "", last[300] = "";
    const char *more[] = {text, "--steps", "100", "--recipe", "nvfp4", "--inspect", "--out", test_path("whole"), NULL};
    CHECK_EQ_INT(wait_for(spawn(more), 60), 0);
    more[7] = test_path("out");
    pid_t *child = start_with(more);
    REQUIRE(*child > 0);
    nap(0.05);
    REQUIRE(kill(*child, SIGINT) == 0);
    CHECK_EQ_INT(wait_for(child, 20), 130);
    int before = lines(contents(in("out", "inspect.csv"), NULL), first, last, sizeof last);
    CHECK_MSG(before > 12 && before < 1 + 26 * 12, "%d lines before: %s", before, last);
    const char *again[] = {text, "--steps", "100", "--recipe", "nvfp4", "--inspect", "--out", test_path("out"), "--resume", NULL};
    CHECK_EQ_INT(wait_for(spawn(again), 60), 0);
    CHECK_EQ_INT(lines(contents(in("out", "inspect.csv"), NULL), first, last, sizeof last), 1 + 26 * 12);
    CHECK_STR(contents(in("out", "inspect.csv"), NULL), contents(in("whole", "inspect.csv"), NULL));
    CHECK_STR(contents(in("out", "loss.csv"), NULL), contents(in("whole", "loss.csv"), NULL));
    CHECK_EQ_INT(temporary_files(), 0);
}

/* A row of loss.csv, "" where there is none; and whether it has all of its five numbers. */
static const char *loss_row(const char *table, int step, bool *full) {
    static char row[300];
    int at = -1;
    for (row[0] = 0, *full = false; table && *table; table = strchr(table, '\n') ? strchr(table, '\n') + 1 : NULL, at++) {
        if (at != step) continue;
        snprintf(row, sizeof row, "%.*s", (int)strcspn(table, "\n"), table);
        *full = !strstr(row, ",,") && row[strlen(row) - 1] != ',';
    }
    return row;
}

/* A run that has come to its end goes on with more steps; one that was stopped ends at once where its step is the last one now; fewer steps than it has are refused. */
TE_TEST(more_steps_go_on_after_the_end) {
    if (!train_gpt()) SKIP(not_built);
    te_ctx *te = test_context("cpu");
    const char *text = write_text(), *out = test_path("out");
    char first[300] = "", last[300] = "";
    bool full;
    const char *more[] = {text, "--out", out, "--steps", "6", NULL, NULL, NULL};
    CHECK_EQ_INT(wait_for(spawn(more), 30), 0);
    char *six = (char *)test_alloc(strlen(contents(in("out", "loss.csv"), NULL)) + 1);
    strcpy(six, contents(in("out", "loss.csv"), NULL));
    more[4] = "14", more[5] = "--resume";
    CHECK_EQ_INT(wait_for(spawn(more), 30), 0);
    CHECK_MSG(!strstr(contents(test_path("log"), NULL), "ignored"), "it says: %s", contents(test_path("log"), NULL));
    char *fourteen = (char *)test_alloc(strlen(contents(in("out", "loss.csv"), NULL)) + 1);
    strcpy(fourteen, contents(in("out", "loss.csv"), NULL));
    CHECK_EQ_INT(lines(fourteen, first, last, sizeof last), 16);
    CHECK_MSG(!strncmp(six, fourteen, strlen(six)), "the first six steps are others: %s\n%s", six, fourteen);
    CHECK_MSG(loss_row(fourteen, 14, &full)[0] == '1' && full, "the last row is %s", last);
    CHECK(whole(te, "model.safetensors") == 14 && whole(te, "bf16.safetensors") == 14);

    test_case("once more, as a graph");
    more[4] = "20", more[6] = "--graph";
    CHECK_EQ_INT(wait_for(spawn(more), 30), 0);
    CHECK_EQ_INT(lines(contents(in("out", "loss.csv"), NULL), first, last, sizeof last), 22);
    test_case("no step is left, as a graph");
    CHECK_EQ_INT(wait_for(spawn(more), 30), 0);
    test_case("fewer steps than there are");
    more[4] = "7";
    CHECK_EQ_INT(wait_for(spawn(more), 30), 1);
    const char *said = contents(test_path("log"), NULL);
    CHECK_MSG(strstr(said, "--steps 7") && strstr(said, "step 20"), "it says: %s", said);
    CHECK(whole(te, "model.safetensors") == 20);

    test_case("stopped at what is the last step now");
    pid_t *child = start(text, false);
    REQUIRE(*child > 0);
    nap(0.05);
    REQUIRE(kill(*child, SIGINT) == 0);
    CHECK_EQ_INT(wait_for(child, 20), 130);
    snprintf(first, sizeof first, "%ld", last_step());
    more[4] = first, more[6] = NULL;
    CHECK_EQ_INT(wait_for(spawn(more), 30), 0);
    CHECK_MSG(loss_row(contents(in("out", "loss.csv"), NULL), atoi(first), &full)[0] && full, "its last row is %s", loss_row(contents(in("out", "loss.csv"), NULL), atoi(first), &full));
}
