/* ranks.h: processes that measure together, for te_info --ranks and te_bench dist. torchrun, mpirun or srun starts the
 * tool once for each of them; started by hand it is the only one. Rank 0 alone prints. */
#ifndef TE_TOOLS_RANKS_H_INCLUDED
#define TE_TOOLS_RANKS_H_INCLUDED

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A context on `device`. NULL: the GPU that is this process's among those of its host; where there is no such GPU, the
 * first one, which ranks then share, or else the CPU. */
static te_ctx *open_own_device(const char *device) {
    te_ctx_desc desc = {0};
    char name[32];
    te_ctx *te;
    desc.device = device;
    if (device || te_dist_local_rank() == 0) return te_ctx_create(&desc);
    snprintf(name, sizeof name, "cuda:%d", te_dist_local_rank());
    desc.device = name;
    te = te_ctx_create(&desc);
    if (te_ok(te)) return te;
    te_ctx_destroy(te);
    desc.device = NULL;
    return te_ctx_create(&desc);
}

static double seconds_now(void) {
    struct timespec t;
    return clock_gettime(CLOCK_MONOTONIC, &t) ? 0 : (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
/* The largest of the ranks' numbers. */
static double most_of_ranks(te_ctx *te, te_group *world, double own) {
    float most = (float)own;
    te_tensor *x;
    te_scope_begin(te);
    x = te_tensor_full(te, TE_F32, 0, NULL, own);
    if (te_all_reduce(world, x, TE_REDUCE_MAX) == TE_OK) most = (float)te_tensor_item(x);
    te_scope_end(te);
    return (double)most;
}
/* Seconds of one call of `run`, of `runs` that are queued behind each other, on the rank that takes longest. All ranks begin together. */
static double time_of_ranks(te_ctx *te, te_group *world, void (*run)(void *arg), void *arg, int runs) {
    double began;
    te_barrier(world);
    te_synchronize(te);
    began = seconds_now();
    for (int i = 0; i < runs; i++) run(arg);
    te_synchronize(te);
    return most_of_ranks(te, world, (seconds_now() - began) / runs);
}
/* Only rank 0 has a standard output from here on. */
static void rank_0_prints(int rank) {
    if (rank > 0 && !freopen("/dev/null", "w", stdout)) exit(1);
}

#endif
