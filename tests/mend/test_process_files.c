/* tests/mend/test_process_files.c: temporary files of writers that were killed, links, what is no regular file, and the messages about files, the environment and
 * TE_STATIC. The writers that get killed are this file's own copy of sys/, which stops where a test wants it. */
#define _GNU_SOURCE
#include "../te_test.h"
#include "base/common.h"
#include "base/hash.c"
#include "base/text.c"
#include "sys/sys.c"
#include "sys/file.c"

#include <signal.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <utime.h>

/* ---- 19: temporary files ---- */

static bool count_temps(void *user, const char *name) {
    size_t n = strlen(name);
    *(int *)user += n > 4 && strcmp(name + n - 4, ".tmp") == 0;
    return true;
}
static int temps(void) {
    int n = 0;
    te__dir_list(test_dir(), count_temps, &n, NULL);
    return n;
}

/* A child that writes a megabyte of `path` and waits there; its number. */
static pid_t begin_to_write(const char *path) {
    int ready[2];
    char byte = 0;
    if (pipe(ready) != 0) return -1;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        static char data[1 << 20];
        te__file_out out;
        alarm(60);
        if (!te__file_out_begin(&out, path, NULL) || !te__file_out_write(&out, data, sizeof data)) _exit(1);
        if (write(ready[1], "", 1) != 1) _exit(1);
        for (;;) pause();
    }
    close(ready[1]);
    if (read(ready[0], &byte, 1) != 1) test_fail(__FILE__, __LINE__, "the writer did not begin");
    close(ready[0]);
    return child;
}
static void kill_writer(pid_t child) {
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}
static te_result save(te_ctx *te, const char *path) {
    te_safetensors_item item = {"x", te_tensor_full(te, TE_F32, SHAPE(4), 3)};
    return te_safetensors_write(te, path, &item, 1, NULL, 0);
}
static bool load(te_ctx *te, const char *path) {
    te_safetensors *f = te_safetensors_open(te, path);
    te_safetensors_close(f);
    return f != NULL;
}

TE_TEST(p19_what_a_killed_writer_left_goes_with_the_next_save_or_load) {
    te_ctx *te = test_context("cpu");
    const char *path = test_path("model.safetensors"), *other = test_path("model.safetensors.1");
    for (int saves = 0; saves < 2; saves++) {
        pid_t dead[2] = {begin_to_write(path), begin_to_write(path)}, living = begin_to_write(path), elsewhere = begin_to_write(other);
        for (int i = 0; i < 2; i++) kill_writer(dead[i]);
        CHECK_EQ_INT(temps(), 4);
        if (saves) CHECK(save(te, path) == TE_OK);
        else CHECK(!load(te, path)); /* there is none yet */
        te_clear_error(te);
        CHECK_EQ_INT(temps(), 2); /* those of the living, and that of another path */
        CHECK(save(te, path) == TE_OK && load(te, path));
        CHECK_EQ_INT(temps(), 2);
        kill_writer(living);
        kill_writer(elsewhere);
        CHECK(load(te, path));
        CHECK_EQ_INT(temps(), 1);
        CHECK(save(te, other) == TE_OK);
        CHECK_EQ_INT(temps(), 0);
        CHECK(te_model_metadata(te, path, "x", (char[8]){0}, 8) == TE_ERR_INVALID);
        te_clear_error(te);
        remove(path);
        remove(other);
    }
    /* through a checkpoint, and beside the file that a link leads to */
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 4, .out_features = 4});
    const char *link = test_path("latest");
    CHECK(symlink("model.safetensors", link) == 0);
    kill_writer(begin_to_write(path));
    CHECK(te_model_save(te, link, m, NULL, NULL, 0) == TE_OK);
    CHECK_EQ_INT(temps(), 0);
    kill_writer(begin_to_write(link));
    CHECK(te_model_load(te, link, m, NULL) == TE_OK);
    CHECK_EQ_INT(temps(), 0);
    CHECK_OK(te);
    te_module_destroy(m);
}

TE_TEST(p19_only_what_a_writer_left_is_removed) {
    te_ctx *te = test_context("cpu");
    const char *path = test_path("a");
    char name[300];
    struct utimbuf before = {0, 0};
    /* not names of a writer of "a" */
    static const char *const kept[] = {"a.tmp", "a.12345678.1.tmp", "a.1234567g.1.1.tmp", "a.12345678.1.1.tmp.bak",
                                       "b.12345678.1.1.tmp", "a.12345678.x.1.tmp", "aa.12345678.1.1.tmp"};
    for (int i = 0; i < COUNT(kept); i++) CHECK(te__file_write_atomic(test_path(kept[i]), "x", 1, NULL) && utime(test_path(kept[i]), &before) == 0);
    /* of another host: an hour after the last write, since not every file system shares locks between hosts; of this one at once */
    snprintf(name, sizeof name, "a.%08x.7.1.tmp", (unsigned)te__host_token() ^ 1u);
    const char *foreign = test_path(name);
    snprintf(name, sizeof name, "a.%08x.7.1.tmp", (unsigned)te__host_token());
    const char *own = test_path(name);
    int fd = open(foreign, O_CREAT | O_WRONLY, 0600);
    CHECK(fd >= 0 && close(fd) == 0);
    fd = open(own, O_CREAT | O_WRONLY, 0600);
    CHECK(fd >= 0 && close(fd) == 0);
    CHECK(save(te, path) == TE_OK);
    for (int i = 0; i < COUNT(kept); i++) CHECK_MSG(te__file_exists(test_path(kept[i])), "%s was removed", kept[i]);
    CHECK(te__file_exists(foreign) && !te__file_exists(own));
    CHECK(utime(foreign, &before) == 0 && load(te, path));
    CHECK(!te__file_exists(foreign));
    /* a pipe that has such a name stays, and nobody waits for it */
    CHECK(mkfifo(own, 0600) == 0 && save(te, path) == TE_OK && access(own, F_OK) == 0);
    CHECK_OK(te);
}

/* A name that somebody has taken is no reason to fail: numbers of processes come again, in containers they are always the same. */
TE_TEST(p19_names_that_are_taken) {
    char name[300];
    const char *path = test_path("a");
    te__file_out out;
    te__text why = TE_ZERO;
    REQUIRE(te__file_out_begin(&out, path, &why));
    const char *temp = strrchr(te__text_str(&out.temp), '/') + 1;
    long long serial = atoll(strrchr(temp, '.') - 1 > temp ? strchr(strchr(strchr(temp, '.') + 1, '.') + 1, '.') + 1 : "0");
    int fd[3];
    for (int i = 0; i < 3; i++) { /* held, as by a writer of another container */
        snprintf(name, sizeof name, "a.%08x.%lld.%lld.tmp", (unsigned)te__host_token(), (long long)te__process_id(), serial + 1 + i);
        fd[i] = open(test_path(name), O_CREAT | O_EXCL | O_WRONLY, 0600);
        CHECK(fd[i] >= 0 && flock(fd[i], LOCK_EX | LOCK_NB) == 0);
    }
    CHECK(te__file_out_commit(&out));
    CHECK(te__file_write_atomic(path, "x", 1, &why));
    CHECK_EQ_INT(why.n, 0);
    CHECK_EQ_INT(temps(), 3);
    for (int i = 0; i < 3; i++) close(fd[i]);
    te__text_free(&why);
}

TE_TEST(p19_links_are_followed) {
    te_ctx *te = test_context("cpu");
    char target[300];
    mkdir(test_path("deep"), 0700);
    CHECK(symlink("deep/b", test_path("a")) == 0 && symlink("c", test_path("deep/b")) == 0);
    CHECK(symlink(test_path("d"), test_path("deep/c")) == 0); /* a -> deep/b -> deep/c -> d, which is not there yet */
    CHECK(save(te, test_path("a")) == TE_OK && load(te, test_path("a")) && load(te, test_path("d")));
    CHECK_EQ_INT(readlink(test_path("a"), target, sizeof target), 6);
    CHECK_EQ_INT(readlink(test_path("deep/b"), target, sizeof target), 1);
    CHECK(readlink(test_path("deep/c"), target, sizeof target) > 1);
    CHECK_EQ_INT(readlink(test_path("d"), target, sizeof target), -1);
    struct stat before, after;
    CHECK(stat(test_path("d"), &before) == 0);
    CHECK(save(te, test_path("a")) == TE_OK && stat(test_path("d"), &after) == 0);
    CHECK(before.st_ino != after.st_ino); /* replaced whole */
    CHECK_OK(te);
    CHECK(symlink("round", test_path("round")) == 0);
    CHECK(save(te, test_path("round")) == TE_ERR_IO);
    CHECK_ERROR(te, TE_ERR_IO, "cannot follow the link");
    CHECK(!load(te, test_path("round")));
    CHECK_ERROR(te, TE_ERR_IO, "symbolic links");
}

TE_TEST(p19_only_regular_files) {
    te_ctx *te = test_context("cpu");
    const char *pipe_path = test_path("pipe"), *device = test_path("device"), *folder = test_dir(), *link = test_path("link");
    struct stat st;
    alarm(20); /* a pipe that is opened waits for its other end */
    /* A device of the test's own: root could replace those of the system, should this fail. A user who cannot make one cannot replace one either. */
    if (mknod(device, S_IFCHR | 0600, makedev(1, 3)) != 0) device = getuid() ? "/dev/null" : pipe_path;
    CHECK(mkfifo(pipe_path, 0600) == 0 && symlink(device, link) == 0);
    struct {
        const char *path, *what;
    } all[] = {{pipe_path, "it is a pipe, not a regular file"},
               {folder, "it is a folder, not a regular file"}, {device, "not a regular file"}, {link, "not a regular file"}};
    for (int i = 0; i < COUNT(all); i++) {
        CHECK(save(te, all[i].path) == TE_ERR_IO);
        CHECK_STR(te_error(te), "cannot write ");
        CHECK_ERROR(te, TE_ERR_IO, all[i].what);
        CHECK(te_model_save(te, all[i].path, NULL, NULL, NULL, 0) == TE_ERR_IO);
        CHECK_ERROR(te, TE_ERR_IO, all[i].what);
        CHECK(!load(te, all[i].path));
        CHECK_STR(te_error(te), "cannot open ");
        CHECK_ERROR(te, TE_ERR_IO, all[i].what);
        CHECK(te_model_load(te, all[i].path, NULL, NULL) == TE_ERR_IO);
        CHECK_ERROR(te, TE_ERR_IO, all[i].what);
    }
    CHECK(stat(pipe_path, &st) == 0 && S_ISFIFO(st.st_mode));
    CHECK(stat(device, &st) == 0 && !S_ISREG(st.st_mode));
    alarm(0);
}

/* ---- 21: messages ---- */

TE_TEST(p21_an_empty_path_is_called_so) {
    te_ctx *te = test_context("cpu");
    CHECK(save(te, "") == TE_ERR_IO);
    CHECK_ERROR(te, TE_ERR_IO, "cannot write the file: its path is empty");
    CHECK(!load(te, ""));
    CHECK_ERROR(te, TE_ERR_IO, "cannot open the file: its path is empty");
    CHECK(te_model_save(te, "", NULL, NULL, NULL, 0) == TE_ERR_IO);
    CHECK_ERROR(te, TE_ERR_IO, "its path is empty");
    CHECK(te_model_load(te, "", NULL, NULL) == TE_ERR_IO);
    CHECK_ERROR(te, TE_ERR_IO, "its path is empty");
}

TE_TEST(p21_a_described_tensor_is_called_so) {
    te_ctx *te = test_context("cpu");
    te_tensor *x = te_tensor_describe(te, TE_BF16, SHAPE(2, 4));
    CHECK(!te_activate(x, TE_GELU, NULL));
    CHECK_ERROR(te, TE_ERR_STATE, "te_activate: the tensor [2, 4] was made by te_tensor_describe and has no memory: such tensors are for te_explain, and for modules that answer with a shape");
    CHECK(!te_tensor_view(x, SHAPE(8)));
    CHECK_ERROR(te, TE_ERR_STATE, "te_tensor_view: the tensor [2, 4] was made by te_tensor_describe");
}

static int warnings(const char *variable) {
    int n = 0;
    for (const char *at = test_log_text(); (at = strstr(at, variable)) != NULL; at++) n++;
    return n;
}
TE_TEST(p21_numbers_of_the_environment) {
    static const struct {
        const char *name, *value, *warning; /* NULL: none */
    } all[] = {{"TE_THREADS", "abc", "TE_THREADS is \"abc\"; a whole number from 1 to 64 is possible"},
               {"TE_THREADS", "2x", "TE_THREADS is \"2x\""},
               {"TE_THREADS", "-3", "TE_THREADS is \"-3\""},
               {"TE_THREADS", "0", "TE_THREADS is \"0\""},
               {"TE_THREADS", "65", "TE_THREADS is \"65\""},
               {"TE_THREADS", "99999999999999999999", "TE_THREADS is \"9999"},
               {"TE_THREADS", "2", NULL},
               {"TE_THREADS", "", NULL},
               {"TE_LOG", "info", "TE_LOG is \"info\"; a whole number from 1 to 4 is possible"},
               {"TE_LOG", "33", "TE_LOG is \"33\""},
               {"TE_LOG", "0", "TE_LOG is \"0\""},
               {"TE_LOG", "2", NULL},
               {"TE_DEBUG_SYNC", "yes", "TE_DEBUG_SYNC is \"yes\"; a whole number from 0 to 1 is possible"},
               {"TE_DEBUG_SYNC", "0", NULL},
               {"TE_DEBUG_SYNC", "1", NULL}};
    for (int i = 0; i < COUNT(all); i++) {
        test_case("%s=%s", all[i].name, all[i].value);
        int before = warnings(all[i].name);
        test_setenv(all[i].name, all[i].value);
        te_ctx *te = te_ctx_create(&(te_ctx_desc){.device = "cpu", .log = test__log});
        CHECK_OK(te);
        CHECK_EQ_INT(warnings(all[i].name) - before, all[i].warning ? 1 : 0);
        if (all[i].warning) CHECK_STR(test_log_text(), all[i].warning);
        te_ctx_destroy(te);
        test_setenv(all[i].name, NULL);
    }
    /* what the desc says counts, and nobody asks the environment */
    test_setenv("TE_THREADS", "abc");
    int before = warnings("TE_THREADS");
    te_ctx *te = te_ctx_create(&(te_ctx_desc){.device = "cpu", .cpu_threads = 1, .log = test__log});
    CHECK_EQ_INT(warnings("TE_THREADS"), before);
    te_ctx_destroy(te);
    /* a device that is not there stays an error, which says whose word it was */
    test_setenv("TE_DEVICE", "gpu");
    te = te_ctx_create(&(te_ctx_desc){.cpu_threads = 1, .log = test__log});
    CHECK_ERROR(te, TE_ERR_INVALID, "TE_DEVICE is \"gpu\", which is neither \"cpu\" nor \"cuda:N\"");
    te_ctx_destroy(te);
}

TE_TEST(p21_static_without_implementation_is_one_sentence) {
    const char *source = test_path("one.c"), *log = test_path("log");
#ifdef TE_TEST_PACKED
    const char *header = "te.h";
#else
    const char *header = "te_parts.h";
#endif
    char command[1024], line[1024];
    int lines = 0, errors = 0, said = 0;
    if (system("cc --version >/dev/null 2>&1")) SKIP("no compiler named cc");
    FILE *f = fopen(source, "w");
    REQUIRE(f != NULL);
    fprintf(f, "#define TE_STATIC\n#include \"%s\"\nint main(void) { return 0; }\n", header);
    fclose(f);
    snprintf(command, sizeof command, "cc -Wall -Wextra -I. -Isrc -fsyntax-only %s 2>%s", source, log);
    CHECK(system(command) != 0);
    f = fopen(log, "r");
    REQUIRE(f != NULL);
    while (fgets(line, sizeof line, f)) {
        lines++;
        if (strstr(line, "error:")) errors++;
        if (strstr(line, "warning:")) test_fail(__FILE__, __LINE__, "%s", line);
        if (strstr(line, "TE_STATIC makes te.h's functions private to this file: define TE_IMPLEMENTATION, too")) said++;
    }
    fclose(f);
    CHECK_EQ_INT(errors, 1);
    CHECK(said >= 1 && lines < 12);
}

/* 25 KB are six blocks of 4 KiB and a piece: none of them is the tenth, which is held out. */
TE_TEST(p21_train_gpt_says_why_a_text_is_too_short) {
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
