/* tests/dist/ranks.h: threads that each are one rank of a group. Knows nothing about what they compute. */
#ifndef TE_TEST_RANKS_H_INCLUDED
#define TE_TEST_RANKS_H_INCLUDED

#include "../te_test.h"
#include <pthread.h>
#include <time.h>

enum { MAX_RANKS = 8 };

/* The input and the results of one thread of a test: checks are made when all have ended, since the runner knows one thread. */
typedef struct rank_state {
    void (*fn)(struct rank_state *s);
    const void *arg;
    const char *device;
    te_thread_hub *hub;
    int rank, size;
    te_ctx *te;
    te_group *group;
    te_result result;
    char error[2048];
    int wrong; /* comparisons that failed */
    char what[512];
    void *left[16]; /* malloc'ed: what fn found out */
    size_t bytes[16];
    int num_left;
    int64_t requests, fail_at; /* of host memory; the one that is refused */
    int64_t abort_at;          /* the one at which the rank aborts its group, and dawdles */
    bool failed;
    pthread_t thread;
} rank_state;

static TE_MAYBE_UNUSED void *rank_alloc(void *user, size_t bytes, size_t alignment) {
    rank_state *s = (rank_state *)user;
    if (s->requests + 1 == s->abort_at) {
        const clock_t end = clock() + CLOCKS_PER_SEC / 100;
        te_group_abort(s->group, "while it splits");
        while (clock() < end) {}
    }
    return ++s->requests == s->fail_at ? NULL : test_aligned_alloc(alignment < 64 ? 64 : alignment, bytes);
}
static TE_MAYBE_UNUSED void rank_free(void *user, void *pointer, size_t bytes) {
    (void)user, (void)bytes;
    test_aligned_free(pointer);
}

static TE_MAYBE_UNUSED void no_log(void *user, te_log_level level, const char *message) { (void)user, (void)level, (void)message; }

static TE_MAYBE_UNUSED void wrong(rank_state *s, const char *what) {
    if (s->wrong++ == 0) snprintf(s->what, sizeof s->what, "rank %d of %d: %s: %s", s->rank, s->size, what, te_error(s->te));
}
#define EXPECT(s, cond) \
    do {                \
        if (!(cond)) wrong(s, #cond); \
    } while (0)

/* Ends as a failed call does: the error is noted and the context goes on. */
static TE_MAYBE_UNUSED void note(rank_state *s, te_result r) {
    s->result = r;
    snprintf(s->error, sizeof s->error, "%s", te_error(s->te));
    if (r != te_error_code(s->te)) wrong(s, "the result is not the context's error");
    te_clear_error(s->te);
}

static TE_MAYBE_UNUSED void *rank_main(void *arg) {
    rank_state *s = (rank_state *)arg;
    te_ctx_desc desc = {0};
    char gpu[24];
    desc.device = test_device_of_rank(s->device, s->rank, gpu);
    desc.log = no_log;
    desc.cpu_threads = 1;
    desc.host_allocator.alloc = rank_alloc;
    desc.host_allocator.release = rank_free;
    desc.host_allocator.user = s;
    s->te = te_ctx_create(&desc);
    te_scope_begin(s->te);
    s->group = s->hub ? te_thread_group_create(s->te, s->hub, s->rank) : NULL;
    EXPECT(s, !s->hub || (s->group && te_group_rank(s->group) == s->rank && te_group_size(s->group) == s->size));
    if (s->group || !s->hub) s->fn(s);
    EXPECT(s, te_ok(s->te));
    te_group_destroy(s->group);
    te_scope_end(s->te);
    if (te_memory_get_stats(s->te).allocated) wrong(s, "tensors are left");
    te_ctx_destroy(s->te);
    return NULL;
}

static TE_MAYBE_UNUSED void free_left(void *arg) {
    rank_state *s = (rank_state *)arg;
    for (int i = 0; i < s->num_left; i++) free(s->left[i]);
}
/* fn on `size` threads, each a rank on the device, or (0) on one without a group; `mixed`: odd ranks on the CPU. */
static TE_MAYBE_UNUSED rank_state *run_ranks_on(const char *device, bool mixed, int size, void (*fn)(rank_state *s), const void *arg) {
    int n = size ? size : 1;
    rank_state *all = (rank_state *)test_alloc((size_t)n * sizeof(rank_state));
    te_thread_hub *hub = size ? te_thread_hub_create(size) : NULL;
    for (int i = 0; i < n; i++) {
        rank_state *s = &all[i];
        s->fn = fn;
        s->arg = arg;
        s->device = mixed && i % 2 ? "cpu" : device;
        s->hub = hub;
        s->rank = i;
        s->size = n;
        test_on_end(free_left, s);
        if (pthread_create(&s->thread, NULL, rank_main, s)) abort();
    }
    for (int i = 0; i < n; i++) pthread_join(all[i].thread, NULL);
    te_thread_hub_destroy(hub);
    for (int i = 0; i < n; i++) CHECK_MSG(all[i].wrong == 0, "%d wrong: %s", all[i].wrong, all[i].what);
    return all;
}
static TE_MAYBE_UNUSED rank_state *run_ranks(int size, void (*fn)(rank_state *s), const void *arg) { return run_ranks_on("cpu", false, size, fn, arg); }

#endif /* TE_TEST_RANKS_H_INCLUDED */
