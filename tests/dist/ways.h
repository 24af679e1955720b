/* tests/dist/ways.h: the same function of a rank by threads, by processes, and in graphs: all must leave the same
 * numbers, bit for bit unless sums have another order. Knows nothing about what it computes. */
#ifndef TE_TEST_WAYS_H_INCLUDED
#define TE_TEST_WAYS_H_INCLUDED

#include "processes.h"
#include "ranks.h"

/* Makes room for more bytes behind what the rank leaves, and returns it. */
static TE_MAYBE_UNUSED void *more_left(rank_state *s, size_t n) {
    char *all = (char *)realloc(s->left[0], s->bytes[0] + n + 1);
    void *more = all + s->bytes[0];
    s->left[0] = all;
    s->bytes[0] += n;
    if (!s->num_left) s->num_left = 1;
    return more;
}
/* Appends the values of x, as f32; left[1] lists how many each tensor has. */
static TE_MAYBE_UNUSED void leave(rank_state *s, const te_tensor *x) {
    const size_t n = x ? (size_t)te_tensor_numel(x) : 0;
    size_t *counts = (size_t *)realloc(s->left[1], s->bytes[1] + sizeof n);
    EXPECT(s, x && te_tensor_to_f32(x, (float *)more_left(s, n * sizeof(float))) == TE_OK);
    counts[s->bytes[1] / sizeof n] = n;
    s->left[1] = counts;
    s->bytes[1] += sizeof n;
    s->num_left = 2;
}

/* A process runs the function of a rank, whose s->arg is TE_TEST_ARG and whose s->hub is NULL. */
static TE_MAYBE_UNUSED void run_in_process(process_rank *p, void (*fn)(rank_state *s)) {
    rank_state s = {.te = p->te, .group = p->group, .rank = p->rank, .size = p->size, .arg = p->arg};
    fn(&s);
    if (s.wrong) fprintf(p->out, "%s", s.what);
    else fwrite(s.left[0], 1, s.bytes[0], p->out);
    free_left(&s);
}
/* Compares, tensor by tensor, what a process has left with what its thread has. */
static TE_MAYBE_UNUSED void check_near(const float *got, const rank_state *thread, double limit) {
    const float *want = (const float *)thread->left[0];
    const size_t *counts = (const size_t *)thread->left[1];
    for (size_t k = 0; k < thread->bytes[1] / sizeof *counts; got += counts[k], want += counts[k], k++)
        if (!CHECK_ERROR_BELOW("a tensor that the ranks leave", got, want, (int64_t)counts[k], limit)) return;
}
/* Runs fn on threads, and `part` in processes, which calls run_in_process for it. The values of a tensor are no further
 * apart than `limit`, as CHECK_ERROR_BELOW has it; 0: the bits are equal. */
static TE_MAYBE_UNUSED void near_ways(const char *device, int size, const char *part, void (*fn)(rank_state *s),
                                      const char *arg, double limit) {
    test_case("%d ranks, %s", size, arg ? arg : part);
    rank_state *threads = run_ranks_on(device, false, size, fn, arg);
    test_setenv("TE_TEST_ARG", arg);
    run_processes(part, size);
    for (int i = 0; i < size; i++) {
        const size_t n = processes[i].bytes;
        CHECK_MSG(n == threads[i].bytes[0] && n > 0, "rank %d of %d: %.300s", i, size,
                  n < 4096 ? (const char *)processes[i].said : "another length");
        if (n != threads[i].bytes[0] || !n) continue;
        if (limit > 0) check_near((const float *)(void *)processes[i].said, &threads[i], limit);
        else CHECK_BYTES("what the ranks leave", processes[i].said, threads[i].left[0], n);
    }
}
static TE_MAYBE_UNUSED void equal_ways(const char *device, int size, const char *part, void (*fn)(rank_state *s),
                                       const char *arg) {
    near_ways(device, size, part, fn, arg, 0);
}

/* A step that is made several times, with other numbers in the same tensors. */
typedef struct repeated {
    void (*fill)(rank_state *s, void *step, int turn);
    void (*run)(rank_state *s, void *step);
    void (*keep)(rank_state *s, void *step); /* leaves results */
    void (*rewind)(rank_state *s, void *step); /* puts back what turns change; or NULL */
} repeated;
enum { TURNS = 3 };
/* Makes the step by calls. In a process, if `graph`, makes it once more as one graph, whose launches must leave the bits
 * of the calls. */
static TE_MAYBE_UNUSED void repeat(rank_state *s, const repeated *f, void *step, bool graph) {
    const size_t at = s->bytes[0];
    te_graph *g = NULL;
    for (int turn = 0; turn < TURNS && !s->wrong; turn++) {
        te_scope_begin(s->te);
        f->fill(s, step, turn);
        f->run(s, step);
        f->keep(s, step);
        te_scope_end(s->te);
    }
    if (!graph || s->hub || s->wrong) return;
    const size_t each = (s->bytes[0] - at) / TURNS;
    if (f->rewind) f->rewind(s, step);
    EXPECT(s, te_graph_begin(s->te) == TE_OK);
    f->run(s, step);
    g = te_graph_end(s->te);
    EXPECT(s, g != NULL);
    for (int turn = 0; turn < TURNS && g && !s->wrong; turn++) {
        rank_state now = {.te = s->te, .rank = s->rank, .size = s->size};
        f->fill(s, step, turn);
        EXPECT(s, te_graph_launch(g) == TE_OK);
        f->keep(&now, step);
        EXPECT(s, !now.wrong && now.bytes[0] == each &&
                      !memcmp(now.left[0], (char *)s->left[0] + at + (size_t)turn * each, each));
        free_left(&now);
    }
    te_graph_destroy(g);
}

#endif /* TE_TEST_WAYS_H_INCLUDED */
