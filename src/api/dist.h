/* api/dist.h: groups of ranks that compute together.
 *
 * A group is a small interface of collectives. te.h implements it for threads of one process (te_thread_group_create);
 * a user may bring a custom group (te_group_create). Every rank must call the same collectives in the same order.
 * Tensors must be contiguous and belong to the rank's own context.
 *
 * Order. A collective runs in the order of the context's stream like any operation. A custom group may queue it on the
 * stream (te_ctx_cu_stream) and return before it has run. The group of threads returns when the collective has run.
 *
 * Bits. The group of threads adds the ranks' numbers in rank order (rank 0 + rank 1 + ...) in f32 and rounds once: all
 * ranks get the same bits, on CPU and GPU. A custom group need only give the same bits again for the same sizes on the
 * same machine. A maximum, and a collective that only moves bytes, is exact in every group.
 *
 * Captures. A collective over more than one rank gives TE_ERR_STATE in a capture. With te_group_desc.captures it
 * becomes part of the graph instead, and the graph holds the memory of its tensors. All ranks must launch their graphs
 * in the same order.
 *
 * Comparing. Before some calls, ranks exchange a text that describes the call (module, sizes, formats, mask, window,
 * recipe). If the texts differ, the call gives TE_ERR_STATE on all ranks, with the texts of two ranks. The exchange is
 * an all_gather of 512 bytes, and the host waits for it. The exchange takes place:
 *   - before the first GEMM of a module under tensor parallelism
 *   - before the first attention of a module under context parallelism
 *   - with TE_DEBUG_SYNC=1 on all ranks, before every such GEMM and attention
 *   - never in a capture
 *
 * Errors. If a rank's own arguments are wrong, its call fails before it reaches a custom group. The other ranks may
 * then wait for it. In the group of threads, a collective that fails on one rank fails on all ranks. If a rank does not
 * call the collective at all, because it failed earlier, the other ranks wait until te_group_abort. A NULL tensor gives
 * TE_ERR_STATE. Between te_warmup_begin and te_warmup_end collectives check their arguments but do not run. */

/* The operation by which te_all_reduce combines the elements of the ranks. */
typedef enum te_reduce_op {
    TE_REDUCE_SUM = 0, /* in f32 for float formats, rounded once */
    TE_REDUCE_MAX = 1  /* NaN is ignored */
} te_reduce_op;

/* A user's implementation of a group. Each function returns TE_OK or an error code, which te.h reports with the group's
 * name and rank. Arguments are already checked. GPU work must be queued on te_ctx_cu_stream(te). */
typedef struct te_group_desc {
    const char *name; /* name in messages; copied; NULL => "custom" */
    int rank, size;   /* this rank, 0 to size - 1, and the number of ranks */
    void *user;       /* handed to every function; borrowed for the group's lifetime */
    /* Replaces x on every rank by the sum or maximum of all ranks' x. x is f32, f16, bf16 (sums in f32, rounded once),
     * i32 or i64; for TE_REDUCE_MAX also u8 or e8m0 (as bytes). */
    te_result (*all_reduce)(void *user, te_ctx *te, te_tensor *x, te_reduce_op op);
    /* Writes x [n] of every rank, in rank order, to out [size * n]; any format. */
    te_result (*all_gather)(void *user, te_ctx *te, const te_tensor *x, te_tensor *out);
    /* Adds up x [size * n] of all ranks, cuts the sum into `size` equal pieces, and writes piece number `rank` to out
     * [n]. */
    te_result (*reduce_scatter)(void *user, te_ctx *te, const te_tensor *x, te_tensor *out);
    /* Replaces x on every rank by the x of rank `root`; any format. */
    te_result (*broadcast)(void *user, te_ctx *te, te_tensor *x, int root);
    te_result (*barrier)(void *user); /* returns when every rank has called it */
    void (*destroy)(void *user); /* called once by te_group_destroy; may be NULL */

    /* The functions below are optional: a call of a function that is NULL gives TE_ERR_UNSUPPORTED. */

    /* Sends a block of lines of x [sum of send_counts, ...] to each rank, in rank order. Receives a block from each
     * rank into out [sum of recv_counts, ...]. A line is the part of a tensor at one index of its first dimension.
     * send_counts and recv_counts have one number for each rank, and are never NULL. `x` and `out` do not overlap; any
     * format. */
    te_result (*all_to_all)(void *user, te_ctx *te, const te_tensor *x, const int64_t *send_counts, te_tensor *out,
                            const int64_t *recv_counts);
    /* Sends x to the rank with number `to`. That rank receives tensors in the order in which they were sent. */
    te_result (*send)(void *user, te_ctx *te, const te_tensor *x, int to);
    /* Receives into x the next tensor that the rank with number `from` sent. */
    te_result (*recv)(void *user, te_ctx *te, te_tensor *x, int from);
    /* Makes the pending and later calls of every rank fail. May be called from any thread. `reason` is borrowed. */
    te_result (*abort)(void *user, const char *reason);
    /* true => the functions above only queue work on the stream, and may be called in its capture. No effect on the
     * CPU. */
    bool captures;
} te_group_desc;

/* Makes a group that runs the user's collectives. The caller owns it, and calls te_group_destroy before te_ctx_destroy.
 * all_reduce, all_gather, reduce_scatter, broadcast and barrier are required. On failure `destroy` is not called. */
TE_API te_group *te_group_create(te_ctx *te, const te_group_desc *desc);
/* Destroys the group; call it before the context is destroyed. `group` may be NULL. */
TE_API void te_group_destroy(te_group *group);
TE_API int te_group_rank(const te_group *group); /* this rank, from 0; 0 for NULL */
TE_API int te_group_size(const te_group *group); /* the number of ranks; 1 for NULL */

/* A hub connects threads of one process, each with a context of its own (CPU, CUDA or mixed), as the ranks of one
 * group. The hub must outlive its groups. Collectives go through host memory and sync: they are meant for tests, and
 * for small groups.
 *
 * These errors leave tensors unchanged and the group usable:
 *   - a rank's arguments do not fit those of the others (size, format, counts, operation): every rank's call fails,
 *     and the message has both values
 *   - a rank's own call fails before the exchange: every rank's call fails with that rank's error
 *
 * If all ranks wait for one another in different calls (one in te_recv, one in te_all_reduce), every rank gets an error
 * that lists these calls. After a rank has destroyed its group or its context, calls of the other ranks fail. After all
 * ranks have destroyed their groups, new groups can be made of the hub. */
typedef struct te_thread_hub te_thread_hub;
/* Makes a hub for `size` ranks. The caller owns it and must call te_thread_hub_destroy. NULL if size < 1 or there is no
 * memory. May be called from any thread. */
TE_API te_thread_hub *te_thread_hub_create(int size);
/* Destroys the hub. Present and later collectives of its groups give TE_ERR_STATE. `hub` may be NULL. */
TE_API void te_thread_hub_destroy(te_thread_hub *hub);
/* Joins the hub as rank number `rank` and returns the group. The caller owns it and must call te_group_destroy.
 * TE_ERR_INVALID for a rank outside 0 .. size - 1, and for a context that is already in the hub.
 * TE_ERR_STATE if the hub was destroyed, or if this rank has already joined it. A rank that left can join again only
 * after all ranks have left. */
TE_API te_group *te_thread_group_create(te_ctx *te, te_thread_hub *hub, int rank);

/* ---- collectives: all ranks must call them; with group NULL or of size 1, the result is the rank's own input ---- */

/* Replaces x on every rank by the sum or maximum of all ranks' x. f32, f16, bf16, i32 or i64; for TE_REDUCE_MAX also u8
 * or e8m0. */
TE_API te_result te_all_reduce(te_group *group, te_tensor *x, te_reduce_op op);
/* Writes x [n] of every rank, in rank order, to out [size * n]. Any format and shapes; in e2m1, rows of x and out must
 * have the same length. */
TE_API te_result te_all_gather(te_group *group, const te_tensor *x, te_tensor *out);
/* Adds up x [size * n] of all ranks, cuts the sum into `size` equal pieces, and writes this rank's piece to out [n]. */
TE_API te_result te_reduce_scatter(te_group *group, const te_tensor *x, te_tensor *out);
/* Replaces x on every rank by the x of rank `root`. Any format. */
TE_API te_result te_broadcast(te_group *group, te_tensor *x, int root);
/* Sends a block of lines to each rank and receives a block from each. A line is the part of a tensor at one index of
 * its first dimension, in any format; it must fill whole bytes.
 *   x             [L, ...]: the first send_counts[0] lines go to rank 0, the next send_counts[1] lines to rank 1, and
 *                 so on
 *   out           [M, ...]: receives recv_counts[0] lines from rank 0, then recv_counts[1] lines from rank 1, and so
 *                 on. It must not share memory with x
 *   send_counts, recv_counts   lists in host memory with one number, 0 or more, for each rank; send_counts[k] on rank i
 *                              must be equal to recv_counts[i] on rank k. NULL => equal blocks */
TE_API te_result te_all_to_all(te_group *group, const te_tensor *x, const int64_t *send_counts, te_tensor *out,
                               const int64_t *recv_counts);
/* Returns when all ranks have called it. Work queued on a GPU may still run: te_synchronize waits for it. */
TE_API te_result te_barrier(te_group *group);

/* ---- from one rank to another ---- */

/* Sends x to the rank with number `to`. That rank must call te_recv for a tensor of x's format and number of elements.
 * Any format; 0 elements are possible. Messages between two ranks keep their order, also with collectives in between.
 * TE_ERR_INVALID if `to` is this rank or no rank of the group.
 *
 * In a group of threads (te_thread_hub), te_send copies x to host memory and does not wait for the te_recv: all ranks
 * may first send and then receive. A te_recv of another format or size fails, and the message is dropped. If a te_send
 * fails, the te_recv that waits for it gets an error.
 * In groups that queue on a GPU (NCCL), te_send may wait for its te_recv: if two ranks send to each other, the rank
 * with the lower number must send first. */
TE_API te_result te_send(te_group *group, const te_tensor *x, int to);
/* Waits for the next tensor that the rank with number `from` sends to this rank, and receives it into x. */
TE_API te_result te_recv(te_group *group, te_tensor *x, int from);

/* Makes the group fail for good: present and later calls of all ranks give TE_ERR_STATE with this rank's number and
 * `reason` (copied; may be NULL). A collective that all ranks have begun still completes. Later aborts are ignored. For
 * NULL, or a group of one rank, the call does nothing.
 * Another thread (a watchdog) may call te_group_abort at any time, but no other function of the group. No error is
 * recorded, except TE_ERR_UNSUPPORTED if the group has no `abort`.
 * Afterwards destroy the group on all ranks; then ranks can join their te_thread_hub again. */
TE_API te_result te_group_abort(te_group *group, const char *reason);
