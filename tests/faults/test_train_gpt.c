/* tests/faults/test_train_gpt.c: Ctrl-C and kill -9 while train_gpt trains: the checkpoint of the last step, or of one before, is whole, and
 * --resume goes on from it. That the losses are then the same, bit for bit, is for tests/run_short.sh. */
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

/* Tells one model.safetensors from the next: each is a new file. 0: there is none. */
static uint64_t saved_file(void) {
    char path[600];
    struct stat st;
    snprintf(path, sizeof path, "%s/model.safetensors", test_path("out"));
    return stat(path, &st) != 0 ? 0 : (uint64_t)st.st_ino * 1000003 + (uint64_t)st.st_mtim.tv_sec * 1000000000 + (uint64_t)st.st_mtim.tv_nsec;
}

/* Starts it with its output in a file, and waits until it has trained a step and saved it. A child of 0: it could not be started. */
static pid_t *start(const char *text, bool resume) {
    const char *program = train_gpt(), *out = test_path("out"), *log = test_path("log");
    pid_t *child = (pid_t *)test_alloc(sizeof *child);
    uint64_t before = saved_file();
    fflush(stdout);
    *child = fork();
    if (*child == 0) {
        int fd = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        dup2(fd, 1);
        dup2(fd, 2);
        signal(SIGINT, SIG_DFL);
        setenv("TE_THREADS", "1", 1);
        execl(program, program, "--device", "cpu", "--layers", "1", "--hidden", "32", "--heads", "2", "--kv-heads", "1", "--seq", "32", "--batch", "2", "--steps",
              "20000", "--sample", "0", "--out", out, text, resume ? "--resume" : (char *)NULL, (char *)NULL);
        _exit(127);
    }
    test_on_end(end_process, child);
    for (double limit = seconds() + 30; seconds() < limit; nap(0.002)) {
        char said[4096];
        int status;
        if (saved_file() != before) return child;
        if (waitpid(*child, &status, WNOHANG) != *child) continue;
        FILE *f = fopen(log, "r");
        size_t n = f ? fread(said, 1, sizeof said - 1, f) : 0;
        if (f) fclose(f);
        said[n] = 0;
        test_fail(__FILE__, __LINE__, "train_gpt ended before it was told to, with status %d: %s", status, said);
        *child = 0;
        return child;
    }
    test_fail(__FILE__, __LINE__, "train_gpt saves nothing");
    return child;
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
    te_checkpoint_metadata(te, path, "te.steps", steps, sizeof steps);
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
