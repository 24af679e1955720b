/* ranks.h: processes that train one model together. torchrun, mpirun or srun starts the program once for each of them;
 * started by hand it is the only one.
 *
 *     torchrun --nproc-per-node 4 --no-python build/llama FOLDER --train FILE --out NEW --tp 2
 *     mpirun -n 4 build/train_gpt --dp 2 --tp 2 --shard
 *
 * Ranks find each other by the variables that launchers set, and compute over NCCL (te_dist_init). */
#ifndef RANKS_H_INCLUDED
#define RANKS_H_INCLUDED

#include "te.h"
#include <stdio.h>

static te_dist dist;                                           /* the groups of the layout; all NULL for one rank */
static struct layout { int tp, cp, ep, dp; bool shard, sequence, ub; } layout; /* numbers of ranks; 0: one, and for dp those that are left */

/* A context on the GPU that is this process's among those of its host; without one, on the first GPU, or else on the CPU. */
static te_ctx *open_own_device(te_ctx_desc desc) {
    char name[32];
    const int local = te_dist_local_rank();
    if (desc.device || local == 0) return te_ctx_create(&desc);
    snprintf(name, sizeof name, "cuda:%d", local);
    te_ctx_desc own = desc;
    own.device = name;
    te_ctx *te = te_ctx_create(&own);
    if (te_ok(te)) return te;
    te_ctx_destroy(te);
    return te_ctx_create(&desc);
}
static te_result join_ranks(te_ctx *te) {
    return te_dist_init(te, &(te_dist_desc){.tp = layout.tp, .cp = layout.cp, .ep = layout.ep, .dp = layout.dp}, &dist);
}
/* Ranks that have the same parameters exchange their gradients; with --shard each keeps a slice of parameters and optimizer states. */
static te_data_parallel_desc unit_of(te_group *group) {
    return (te_data_parallel_desc){
        .group = group, .shard = layout.shard ? TE_SHARD_PARAMETERS : TE_SHARD_NONE,
        .gradient_divide_factor = (float)dist.data_size}; /* ranks that share a sequence have parts of one loss */
}
static te_result share_unit(te_module *m, te_group *group) {
    const te_data_parallel_desc desc = unit_of(group);
    return dist.size == 1 ? TE_OK : te_fsdp_unit(m, &desc);
}
/* The sum over the ranks that share sequences, or have sequences of their own. */
static te_tensor *sum_of_ranks(te_tensor *x) {
    if (!dist.data) return x;
    te_tensor *sum = te_scale(te_tensor_detach(x), 1);
    te_all_reduce(dist.data, sum, TE_REDUCE_SUM);
    return sum;
}
/* Ranks that share a layer have different heads and, with --sequence-parallel, different tokens between products: the gradients of norms are sums over
 * them. Before te_optimizer_step. */
static bool sum_grad_of_parts(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)user, (void)m, (void)path;
    te_fsdp_slice slice;
    te_tensor *grad = te_fsdp_get_slice(x, &slice) ? slice.grad : te_tensor_grad(x);
    if (kind == TE_ENTRY_PARAMETER && te_tensor_sequence_parallel(x) && grad) te_all_reduce(dist.tensor, grad, TE_REDUCE_SUM);
    return true;
}
/* Writes a checkpoint: every rank its slices, or else the first of those that have the same parameters; one set of files. */
static void save_together(te_ctx *te, const char *path, te_module *m, te_optimizer *o, const te_metadata *facts, int n) {
    te_group *same = dist.expert ? dist.expert_data : dist.data; /* each rank of dist.expert has experts of its own */
    if (layout.shard || te_group_rank(same) == 0) te_model_save(te, path, m, o, facts, n);
}
/* The number of chunks into which ranks cut a sequence that they share, two each, and the tokens between products; it divides the length. */
static int chunks_of_sequence(void) { return (dist.context ? 2 * te_group_size(dist.context) : 1) * (layout.sequence ? te_group_size(dist.tensor) : 1); }
/* This rank's tokens of x, [s, b] (TE_SBHD) or [b, s] (TE_BSHD). */
static te_tensor *own_tokens(te_tensor *x, te_qkv_format format) {
    return dist.context ? te_get_batch_on_this_cp_rank(x, &(te_cp_batch){.cp_group = dist.context, .format = format}) : x;
}

#endif
