/* tests/sys/test_writers.c: temporary files of writers that were killed, links, what is no regular file. The writers that get killed are this file's own copy of sys/, which stops
 * where a test wants it. */
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

TE_TEST(what_a_killed_writer_left_goes_with_the_next_save_or_load) {
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

TE_TEST(only_what_a_writer_left_is_removed) {
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
TE_TEST(names_of_temporary_files_that_are_taken) {
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

TE_TEST(links_are_followed) {
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

TE_TEST(only_regular_files_are_read_and_written) {
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
