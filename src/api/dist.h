/* api/dist.h: groups of ranks that compute together.
 *
 * A group is a small interface of collectives. Threads of one process implement it (te_thread_group_create); a user may
 * bring another implementation (te_group_create). Every rank calls the same collectives in the same order. Tensors are
 * contiguous and of the rank's own context.
 *
 * Order. A collective belongs to the context's stream like any operation: it reads what earlier calls have written, and
 * later calls see its results. It may return before it has run, if the implementation queues it on the stream
 * (te_ctx_cu_stream); the group of threads waits.
 *
 * Bits. The group of threads adds up in rank order: rank 0 + rank 1 + ..., in f32, rounded once. So all ranks get the
 * same bits, in every run, on CPU and GPU. A custom group promises less: the same group on the same machine gives the
 * same bits again for the same sizes. A maximum, and a collective that only moves bytes, is exact in every group.
 *
 * Captures. Between te_graph_begin and te_graph_end a collective over more than one rank gives TE_ERR_STATE, unless its
 * group says that it only queues work (te_group_desc.captures). Such a collective becomes part of the graph, which
 * holds the memory of its tensors, and all ranks have to launch their graphs alike.
 *
 * Comparing. Two kinds of calls exchange a text of what the rank is about to do (module, sizes, formats, mask, window,
 * recipe): the first product that ranks of tensor parallelism share in a module, and the first attention of a module
 * whose ranks share sequences. With TE_DEBUG_SYNC=1 on all ranks every such call does so. Where the texts differ the
 * call gives TE_ERR_STATE on all ranks, with the texts of two of them. The exchange is an all_gather of 512 bytes that
 * the host waits for. In a capture there is none.
 *
 * Errors. A call that fails on this rank's own arguments does not reach a custom implementation, so the other ranks may
 * be left waiting. In the group of threads the other ranks get an error if the rank failed inside that very call;
 * otherwise they wait until te_group_abort. A NULL tensor gives TE_ERR_STATE. Between te_warmup_begin and te_warmup_end
 * collectives are checked but not made. */

/* How te_all_reduce combines the elements of the ranks. */
typedef enum te_reduce_op {
    TE_REDUCE_SUM = 0, /* in f32 for float formats, rounded once */
    TE_REDUCE_MAX = 1  /* NaN is ignored */
} te_reduce_op;

/* An implementation of a group. Each function returns TE_OK, or an error code that the library reports with the group's
 * name and rank. The arguments that a function gets have been checked. Work on a GPU belongs on the stream
 * te_ctx_cu_stream(te). */
typedef struct te_group_desc {
    const char *name; /* for messages; copied; NULL => "custom" */
    int rank, size;   /* this rank, 0 to size - 1, and the number of ranks */
    void *user;       /* handed to every function; borrowed for the group's lifetime */
    /* Replaces x on every rank by the sum or maximum of all ranks' x. f32, f16, bf16 (sums in f32, rounded once), i32,
     * i64; TE_REDUCE_MAX also u8 and e8m0 (as bytes). */
    te_result (*all_reduce)(void *user, te_ctx *te, te_tensor *x, te_reduce_op op);
    /* Writes the x [n] of all ranks, in rank order, to out [size * n]; any format. */
    te_result (*all_gather)(void *user, te_ctx *te, const te_tensor *x, te_tensor *out);
    /* Writes piece `rank` of the sum over the ranks of x [size * n] to out [n]. */
    te_result (*reduce_scatter)(void *user, te_ctx *te, const te_tensor *x, te_tensor *out);
    /* Replaces x by the x of rank `root`; any format. */
    te_result (*broadcast)(void *user, te_ctx *te, te_tensor *x, int root);
    te_result (*barrier)(void *user); /* returns when every rank has called it */
    void (*destroy)(void *user); /* called once by te_group_destroy; may be NULL */

    /* The functions below are optional: a call of a function that is NULL gives TE_ERR_UNSUPPORTED. */

    /* Sends a block of lines of x [sum of send_counts, ...] to each rank, in rank order, and receives a block of each
     * rank into out [sum of recv_counts, ...]. Both lists have `size` entries, which count lines, and are never NULL
     * here; x and out do not overlap; any format. */
    te_result (*all_to_all)(void *user, te_ctx *te, const te_tensor *x, const int64_t *send_counts, te_tensor *out,
                            const int64_t *recv_counts);
    /* Sends x to rank `to`, which receives tensors in the order in which they were sent. */
    te_result (*send)(void *user, te_ctx *te, const te_tensor *x, int to);
    /* Receives the next tensor of rank `from` into x. */
    te_result (*recv)(void *user, te_ctx *te, te_tensor *x, int from);
    /* Makes every rank's pending and later calls fail. Called from any thread. `reason` is borrowed. */
    te_result (*abort)(void *user, const char *reason);
    /* True: the functions above only queue work on the stream, and may be called while the stream captures. Without
     * effect on the CPU. */
    bool captures;
} te_group_desc;

/* Makes a group that runs the user's collectives. Owned by the caller: te_group_destroy, before the context goes. The
 * first five functions are required. On failure `destroy` is not called. */
TE_API te_group *te_group_create(te_ctx *te, const te_group_desc *desc);
/* Destroys the group, before or with its context. NULL is fine. */
TE_API void te_group_destroy(te_group *group);
TE_API int te_group_rank(const te_group *group); /* this rank, from 0; 0 for NULL */
TE_API int te_group_size(const te_group *group); /* the number of ranks; 1 for NULL */

/* A meeting place for `size` threads of one process, each with a context of its own (CPU, CUDA or mixed), which join it
 * as the ranks of one group. Owned by the caller; must outlive its groups. Collectives go through host memory: for
 * tests, and for small groups in one process. Syncs.
 *
 * If a rank's arguments do not fit those of the other ranks (size, format, counts, operation), the call fails on every
 * rank, with both values. If a rank fails before the call, the call fails on every rank with that rank's error. In both
 * cases no tensor has changed and the group stays usable. If all ranks wait for one another in calls that do not fit
 * (one in te_recv, one in te_all_reduce), all get an error that lists what each waits for. After a rank has destroyed
 * its group or its context, calls of the other ranks fail. When all ranks have destroyed theirs, the hub can be joined
 * again. */
typedef struct te_thread_hub te_thread_hub;
/* Makes a hub for `size` ranks. Owned by the caller: te_thread_hub_destroy. NULL if size < 1 or there is no memory. Any
 * thread may call it. */
TE_API te_thread_hub *te_thread_hub_create(int size);
/* Destroys the hub. Ranks that still have a group of the hub, or wait in a call of it, get TE_ERR_STATE. NULL is
 * fine. */
TE_API void te_thread_hub_destroy(te_thread_hub *hub);
/* Joins the hub as rank `rank` and returns the group. Owned by the caller: te_group_destroy. TE_ERR_INVALID for a rank
 * outside 0 .. size - 1 or a context that is in the hub already; TE_ERR_STATE if the rank is taken or has left, or the
 * hub was destroyed. */
TE_API te_group *te_thread_group_create(te_ctx *te, te_thread_hub *hub, int rank);

/* ---- collectives: all ranks call them. A NULL group or one of size 1: the identity ---- */

/* Replaces x on every rank by the sum or maximum of all ranks' x. f32, f16, bf16, i32, i64; TE_REDUCE_MAX takes u8 and
 * e8m0 too. */
TE_API te_result te_all_reduce(te_group *group, te_tensor *x, te_reduce_op op);
/* Writes the x [n] of all ranks, in rank order, to out [size * n]. Any format and shapes; for e2m1 x and out have rows
 * of the same length. */
TE_API te_result te_all_gather(te_group *group, const te_tensor *x, te_tensor *out);
/* Writes piece number te_group_rank of the sum over the ranks of x [size * n] to out [n]. */
TE_API te_result te_reduce_scatter(te_group *group, const te_tensor *x, te_tensor *out);
/* Replaces x on every rank by the x of rank `root`. Any format. */
TE_API te_result te_broadcast(te_group *group, te_tensor *x, int root);
/* Sends a block of lines to each rank and receives a block from each. A line is all that stands under one index of the
 * first dimension, in any format, and fills whole bytes.
 *   x             [L, ...]: the first send_counts[0] lines go to rank 0, the next send_counts[1] lines to rank 1 ...
 *   out           [M, ...]: receives recv_counts[0] lines of rank 0, then recv_counts[1] lines of rank 1 ... Must not
 *                 share memory with x
 *   send_counts, recv_counts   lists of `size` numbers in host memory, 0 or more; send_counts[k] of rank i must be
 *                              recv_counts[i] of rank k. NULL: equal blocks */
TE_API te_result te_all_to_all(te_group *group, const te_tensor *x, const int64_t *send_counts, te_tensor *out,
                               const int64_t *recv_counts);
/* Returns when all ranks have called it. Queued work of a GPU may still run: te_synchronize waits for it. */
TE_API te_result te_barrier(te_group *group);

/* ---- from one rank to another ---- */

/* Sends x to rank `to`, which receives it by te_recv(x, from = this rank) into a tensor of the same format (any) and
 * number of elements (0 included). Messages between two ranks arrive in the order in which they were sent, whatever
 * collectives come in between. `to` must be another rank: TE_ERR_INVALID otherwise, and always in a group of 1.
 *
 * Ranks of threads: te_send copies x to host memory and returns without waiting for the te_recv. So rings and exchanges
 * in which every rank first sends and then receives do not deadlock, in any order. A message that does not fit the
 * te_recv makes the te_recv fail, and is dropped. If a te_send fails, the te_recv that waits for it gets an error.
 * Groups that queue on a GPU (NCCL) may let te_send wait for its te_recv: where two ranks send to each other, let the
 * rank with the lower number send first. */
TE_API te_result te_send(te_group *group, const te_tensor *x, int to);
/* Receives the next tensor that rank `from` has sent to this rank into x; waits for it. */
TE_API te_result te_recv(te_group *group, te_tensor *x, int from);

/* Gives the group up: every rank that waits, and every later call of any rank, gets TE_ERR_STATE with this rank and
 * `reason` (copied; may be NULL). A collective that all ranks have begun ends first. This is the only call of the group
 * that another thread may make meanwhile (a watchdog): it records no error, unless the group has no function for it
 * (TE_ERR_UNSUPPORTED). Aborts after the first are ignored. Afterwards destroy the group on all ranks; the hub can then
 * be joined anew. For NULL, or a group of 1, the call does nothing. */
TE_API te_result te_group_abort(te_group *group, const char *reason);
