/* tests/data_parallel/lost.h: groups whose ranks lose each other after a barrier that all of them have reached. */
#ifndef TE_TEST_LOST_H_INCLUDED
#define TE_TEST_LOST_H_INCLUDED

#include "../dist/ranks.h"
#include "../lm/folder.h"
#include <utime.h>

/* Leaves the temporary file of a writer of another host, which ended two hours ago. Windows keeps such a file, since
 * there the writer's process decides (sys/file.c): so none is left. */
static TE_MAYBE_UNUSED void leave_temporary(const char *path) {
#ifndef _WIN32
    struct utimbuf before = {.actime = time(NULL) - 7200, .modtime = time(NULL) - 7200};
    spit_text(path, "cut short");
    CHECK_EQ_INT(utime(path, &before), 0);
#else
    (void)path;
#endif
}

/* Rank 1 takes the barrier number `last` for failed, and the others pass it; nothing after it succeeds on any rank. */
typedef struct lost_group {
    te_group *inner;
    bool counts;
    int barriers, last;
} lost_group;
static te_result lost_now(const lost_group *g) { return g->counts && g->barriers >= g->last ? TE_ERR_IO : TE_OK; }
static te_result lost_reduce(void *user, te_ctx *te, te_tensor *x, te_reduce_op op) {
    const lost_group *g = (const lost_group *)user;
    (void)te;
    return lost_now(g) == TE_OK ? te_all_reduce(g->inner, x, op) : TE_ERR_IO;
}
static te_result lost_gather(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) {
    const lost_group *g = (const lost_group *)user;
    (void)te;
    return lost_now(g) == TE_OK ? te_all_gather(g->inner, x, out) : TE_ERR_IO;
}
static te_result lost_scatter(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) {
    const lost_group *g = (const lost_group *)user;
    (void)te;
    return lost_now(g) == TE_OK ? te_reduce_scatter(g->inner, x, out) : TE_ERR_IO;
}
static te_result lost_broadcast(void *user, te_ctx *te, te_tensor *x, int root) {
    const lost_group *g = (const lost_group *)user;
    (void)te;
    return lost_now(g) == TE_OK ? te_broadcast(g->inner, x, root) : TE_ERR_IO;
}
static te_result lost_barrier(void *user) {
    lost_group *g = (lost_group *)user;
    if (lost_now(g) != TE_OK) return TE_ERR_IO;
    g->barriers += g->counts;
    const te_result r = te_barrier(g->inner);
    return te_group_rank(g->inner) == 1 ? lost_now(g) : r;
}
static TE_MAYBE_UNUSED te_group *lost(rank_state *s, lost_group *g) {
    g->inner = s->group;
    return te_group_create(s->te, &(te_group_desc){.name = "lost",
                                                   .rank = s->rank,
                                                   .size = s->size,
                                                   .user = g,
                                                   .all_reduce = lost_reduce,
                                                   .all_gather = lost_gather,
                                                   .reduce_scatter = lost_scatter,
                                                   .broadcast = lost_broadcast,
                                                   .barrier = lost_barrier});
}

#endif /* TE_TEST_LOST_H_INCLUDED */
