/* tests/dist/processes.h: processes that each are one rank. A test starts this program again, as a rank: a constructor
 * sees that, and runs the rank's function in the place of the tests. Knows nothing about what ranks compute. */
#ifndef TE_TEST_PROCESSES_H_INCLUDED
#define TE_TEST_PROCESSES_H_INCLUDED

#include "../te_test.h"
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
enum { MAX_PROCESSES = 4, PROCESS_SECONDS = 60 };

/* The arguments of a rank's function. Its results, a text or bytes, go to the file "rank.N". */
typedef struct process_rank {
    int rank, size;
    const char *arg; /* TE_TEST_ARG */
    te_ctx *te;
    te_group *group;
    FILE *out;
    int64_t requests, fail_at; /* of host memory; the one that is refused */
} process_rank;
typedef struct process_part {
    const char *name;
    void (*fn)(process_rank *p);
} process_part;

typedef struct process {
    pid_t pid;
    int status; /* of waitpid */
    uint8_t *said;
    size_t bytes;
} process;
static process processes[MAX_PROCESSES];

/* This program's folder, in which the libraries lie. */
static TE_MAYBE_UNUSED const char *beside_this_program(const char *name) {
    static char path[1024];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    path[n > 0 ? n : 0] = 0;
    char *slash = strrchr(path, '/');
    snprintf(slash ? slash + 1 : path, sizeof path - (size_t)(slash ? slash + 1 - path : 0), "%s", name);
    return path;
}

static TE_MAYBE_UNUSED int free_port_of_this_machine(void) {
    struct sockaddr_in a = {0};
    socklen_t n = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof a) || getsockname(fd, (struct sockaddr *)&a, &n))
        test_fail(__FILE__, __LINE__, "no port is free");
    if (fd >= 0) close(fd);
    return ntohs(a.sin_port);
}

static void setenv_number(const char *name, int value) {
    char text[32];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

/* Starts rank number `rank` of `size` with the function `part`. Its group is the test's own: see prepare_processes. */
static TE_MAYBE_UNUSED void start_process(const char *part, int rank, int size) {
    static const char *const set[] = {"TE_TEST_RANK", "TE_TEST_OUT", "RANK", "WORLD_SIZE"};
    char out[512], *argv[2] = {(char *)"te_test rank", NULL};
    snprintf(out, sizeof out, "%s/rank.%d", test_dir(), rank);
    remove(out);
    setenv("TE_TEST_RANK", part, 1);
    setenv("TE_TEST_OUT", out, 1);
    setenv_number("RANK", rank);
    setenv_number("WORLD_SIZE", size);
    memset(&processes[rank], 0, sizeof processes[rank]);
    if (posix_spawn(&processes[rank].pid, "/proc/self/exe", NULL, NULL, argv, environ))
        test_fail(__FILE__, __LINE__, "a process could not be started");
    for (int i = 0; i < COUNT(set); i++) unsetenv(set[i]);
}

/* The launcher's variables, a port and a library for all processes of the test. */
static TE_MAYBE_UNUSED void prepare_processes(void) {
    char port[16];
    snprintf(port, sizeof port, "%d", free_port_of_this_machine());
    test_setenv("MASTER_ADDR", "127.0.0.1");
    test_setenv("MASTER_PORT", NULL);
    test_setenv("TE_DIST_PORT", port);
    test_setenv("TE_DIST_SECRET", NULL);
    test_setenv("TE_DIST_SECRET_FILE", NULL);
    test_setenv("TE_DIST_FILE", NULL);
    test_setenv("LOCAL_RANK", NULL);
    test_setenv("LOCAL_WORLD_SIZE", NULL);
    test_setenv("TE_NCCL_PATH", beside_this_program("nccl_stand_in.so"));
    test_setenv("TE_NCCL_STAND_IN_DIR", test_dir());
    test_setenv("TE_NCCL_STAND_IN_VERSION", NULL);
    test_setenv("TE_NCCL_STAND_IN_ORDER", NULL);
    test_setenv("TE_NCCL_STAND_IN_KILLS", NULL);
    test_setenv("TE_DEBUG_SYNC", NULL);
    test_setenv("TE_THREADS", "1");
    test_setenv("TE_TEST_ARG", NULL);
    test_setenv("TE_TEST_DEVICE", NULL);
    test_setenv("TE_TEST_SECONDS", NULL);
}
static TE_MAYBE_UNUSED void start_processes(const char *part, int size) {
    for (int i = 0; i < size; i++) start_process(part, i, size);
}

/* Waits until a rank has begun to say something. */
static TE_MAYBE_UNUSED void wait_until_ready(int rank) {
    char name[32];
    size_t bytes = 0;
    snprintf(name, sizeof name, "rank.%d", rank);
    for (int i = 0; i < 30000 && bytes == 0; i++) {
        struct stat st;
        usleep(2000);
        if (stat(test_path(name), &st) == 0) bytes = (size_t)st.st_size;
    }
    CHECK_MSG(bytes > 0, "rank %d does not get to work", rank);
}

/* Waits until all have ended, and reads what they have left. One that takes too long is killed, and has failed. */
static TE_MAYBE_UNUSED void end_processes(int size) {
    double left = PROCESS_SECONDS;
    for (int i = 0; i < size; i++) {
        process *p = &processes[i];
        char name[32];
        while (waitpid(p->pid, &p->status, WNOHANG) == 0) {
            usleep(2000);
            left -= 0.002;
            if (left > 0) continue;
            test_fail(__FILE__, __LINE__, "rank %d of %d does not end", i, size);
            kill(p->pid, SIGKILL);
            waitpid(p->pid, &p->status, 0);
            break;
        }
        snprintf(name, sizeof name, "rank.%d", i);
        p->said = test_read_file(test_path(name), &p->bytes);
        if (!p->said) p->said = (uint8_t *)test_alloc(1);
    }
}
/* All ranks ended as programs end that have no complaint. */
static TE_MAYBE_UNUSED void check_ended(int size) {
    for (int i = 0; i < size; i++)
        CHECK_MSG(WIFEXITED(processes[i].status) && WEXITSTATUS(processes[i].status) == 0,
                  "rank %d of %d: status %x: %s", i, size, (unsigned)processes[i].status,
                  (const char *)processes[i].said);
}
static TE_MAYBE_UNUSED void run_processes(const char *part, int size) {
    start_processes(part, size);
    end_processes(size);
    check_ended(size);
}

static void *process_alloc(void *user, size_t bytes, size_t alignment) {
    process_rank *p = (process_rank *)user;
    return ++p->requests == p->fail_at ? NULL : test_aligned_alloc(alignment < 64 ? 64 : alignment, bytes);
}
static void process_free(void *user, void *pointer, size_t bytes) {
    (void)user, (void)bytes;
    test_aligned_free(pointer);
}
/* A rank's program: a context (on the CPU, or on TE_TEST_DEVICE), the group, the part's function; then all is taken
 * apart. */
static void rank_program(const process_part *part) {
    process_rank p = {0};
    te_ctx_desc desc = {0};
    const char *seconds = getenv("TE_TEST_SECONDS");
    te_nccl_group_desc group = {0};
    char gpu[24];
    desc.log = test__log;
    desc.host_allocator.alloc = process_alloc;
    desc.host_allocator.release = process_free;
    desc.host_allocator.user = &p;
    p.out = fopen(getenv("TE_TEST_OUT"), "w");
    p.rank = atoi(getenv("RANK"));
    p.size = atoi(getenv("WORLD_SIZE"));
    desc.device = test_device_of_rank(getenv("TE_TEST_DEVICE") ? getenv("TE_TEST_DEVICE") : "cpu", p.rank, gpu);
    p.arg = getenv("TE_TEST_ARG");
    p.te = te_ctx_create(&desc);
    group.timeout_seconds = seconds ? atof(seconds) : 20;
    te_scope_begin(p.te);
    p.group = te_nccl_group_create(p.te, &group);
    if (p.group) part->fn(&p);
    else fprintf(p.out, "no group: %s: %s", te_result_name(te_error_code(p.te)), te_error(p.te));
    te_group_destroy(p.group);
    te_scope_end(p.te);
    if (te_memory_get_stats(p.te).allocated) fprintf(p.out, "tensors are left");
    te_ctx_destroy(p.te);
    fclose(p.out);
    exit(0);
}
/* Every part may be started as "hello", too: the sum of the ranks' numbers from 1. */
static void say_hello(process_rank *p) {
    te_tensor *x = te_tensor_full(p->te, TE_F32, 0, NULL, p->rank + 1);
    te_all_reduce(p->group, x, TE_REDUCE_SUM);
    fprintf(p->out, "%g %s", te_tensor_item(x), te_error(p->te));
}
static TE_MAYBE_UNUSED void become_a_rank(const process_part *parts, int count) {
    const char *name = getenv("TE_TEST_RANK");
    const process_part hello = {"hello", say_hello};
    if (!name) return;
    if (!strcmp(name, hello.name)) rank_program(&hello);
    for (int i = 0; i < count; i++)
        if (!strcmp(parts[i].name, name)) rank_program(&parts[i]);
}

/* ---- NCCL itself, on one GPU ---- */

/* One test at a time has ranks on the GPUs: processes of many tests would get their turns on a GPU so seldom that
 * groups run out of time. A program that has no place for the file does without. */
static void end_turn(void *turn) { close((int)(intptr_t)turn); }
static TE_MAYBE_UNUSED int take_turn(void) {
    const int turn = open(beside_this_program("gpu_ranks.lock"), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (turn < 0) return turn;
    test_on_end(end_turn, (void *)(intptr_t)turn);
    while (flock(turn, LOCK_EX) && errno == EINTR) {}
    return turn;
}
/* The file of the turns keeps the run and the library in which two ranks have met: the next tests need not try. */
static TE_MAYBE_UNUSED bool ranks_have_met(int turn, const char *where) {
    char text[1024];
    const ssize_t n = turn < 0 ? -1 : pread(turn, text, sizeof text - 1, 0);
    if (n < 0) return false;
    text[n] = 0;
    return !strcmp(text, where);
}
static TE_MAYBE_UNUSED void ranks_meet(int turn, const char *where) {
    const size_t n = strlen(where);
    const bool kept = turn >= 0 && ftruncate(turn, 0) == 0 && pwrite(turn, where, n, 0) == (ssize_t)n;
    (void)kept; /* if not, the next test tries again */
}

/* NCCL lets ranks share a GPU from 2.30 on, two of them unless each takes less of it (NCCL_MAX_CTAS). Without a GPU or
 * such a library these tests are skipped. */
static TE_MAYBE_UNUSED const char *no_nccl(void) {
    const char *path = getenv("TE_NCCL_PATH");
    char *own = NULL, where[1024];
    int turn;
    if (test_no_gpu()) return test_no_gpu();
    if (path) {
        own = (char *)test_alloc(strlen(path) + 1);
        memcpy(own, path, strlen(path));
    }
    prepare_processes();
    test_setenv("TE_NCCL_PATH", own);
    test_setenv("TE_TEST_DEVICE", "cuda:0");
    test_setenv("TE_TEST_SECONDS", "60");
    test_setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1");
    test_setenv("NCCL_NVLS_ENABLE", "0");
    test_setenv("NCCL_MAX_CTAS", "4");
    snprintf(where, sizeof where, "%d %s", (int)getppid(), own ? own : "");
    turn = take_turn();
    if (ranks_have_met(turn, where)) return NULL;
    start_processes("hello", 2);
    end_processes(2);
    if (strstr((const char *)processes[0].said, "TE_ERR_LIBRARY")) return "no NCCL of 2.18 or newer";
    if (strstr((const char *)processes[0].said, "Duplicate GPU")) return "an NCCL that lets no two ranks share a GPU";
    for (int i = 0; i < 2; i++) {
        const bool met = !strcmp((const char *)processes[i].said, "3 ");
        CHECK_MSG(met, "rank %d: %s", i, (const char *)processes[i].said);
        if (!met) return NULL;
    }
    ranks_meet(turn, where);
    return NULL;
}

#endif /* TE_TEST_PROCESSES_H_INCLUDED */
