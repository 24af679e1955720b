/* api/dist.h: groups: ranks that compute together.
 *
 * A group is a small interface of collectives. Threads of one process implement it (te_thread_group_create); a user may
 * bring an implementation of their own (te_group_create). Every rank calls the same collectives in the same order.
 * Tensors are contiguous and of the rank's own context.
 *
 * Order. A collective belongs to the context's stream like any operation: it reads what earlier calls have written, and
 * later calls see its results. It may return before it has run, if the implementation queues it on the stream
 * (te_ctx_cu_stream); the group of threads waits.
 *
 * Bits. The group of threads adds up in rank order: rank 0 + rank 1 + ..., in f32, rounded once; the same bits on all
 * ranks and in every run, on CPU and GPU.
 * Any other group promises less: the same bits again for the same group on the same machine and the same sizes. A
 * maximum, and what only moves bytes, is exact in all.
 *
 * Captures. Between te_graph_begin and te_graph_end a collective over more than one rank gives TE_ERR_STATE, unless its
 * group says that it only queues work (te_group_desc.captures): then it becomes part of the graph, which holds the
 * memory of its tensors, and all ranks have to launch their graphs alike.
 *
 * Comparing. Before the first product that ranks of tensor parallelism share in a module, and before the first
 * attention of a module whose ranks share sequences, the ranks exchange a text of what they are about to do: module,
 * sizes, formats, mask, window, recipe. Where these differ the call gives TE_ERR_STATE on all ranks, with the texts of
 * two of them. With TE_DEBUG_SYNC=1, on all ranks, they do so before every call. It takes an all_gather of 512 bytes
 * that the host waits for; none in a capture.
 *
 * Errors. A call that fails on this rank's own arguments does not reach a custom implementation, so its other ranks may
 * be left waiting; ranks of threads are told if the rank failed on its way into that very call, and else wait until
 * te_group_abort. A NULL tensor gives TE_ERR_STATE. Between te_warmup_begin and te_warmup_end collectives are checked
 * and not made. */

/* The operation of te_all_reduce. */
typedef enum te_reduce_op {
    TE_REDUCE_SUM = 0, /* in f32 for float formats, rounded once */
    TE_REDUCE_MAX = 1  /* NaN is ignored */
} te_reduce_op;

/* An implementation. Each function returns TE_OK, or an error code that the library reports with the group's name and
 * rank; the arguments that it gets have been checked. Work on a GPU belongs on the stream te_ctx_cu_stream(te). */
typedef struct te_group_desc {
    const char *name; /* for messages; copied; NULL => "custom" */
    int rank, size;   /* this rank, 0 to size - 1, and how many there are */
    void *user;       /* handed to every function; borrowed for the group's lifetime */
    /* x = op over the ranks of x. f32, f16, bf16 (sums in f32, rounded once), i32, i64; MAX also u8 and e8m0 (as
     * bytes). */
    te_result (*all_reduce)(void *user, te_ctx *te, te_tensor *x, te_reduce_op op);
    /* out [size * n] = the ranks' x [n] in rank order; any format. */
    te_result (*all_gather)(void *user, te_ctx *te, const te_tensor *x, te_tensor *out);
    /* out [n] = piece `rank` of the sum over the ranks of x [size * n]. */
    te_result (*reduce_scatter)(void *user, te_ctx *te, const te_tensor *x, te_tensor *out);
    /* x = x of rank `root`; any format. */
    te_result (*broadcast)(void *user, te_ctx *te, te_tensor *x, int root);
    te_result (*barrier)(void *user); /* returns when every rank has called it */
    void (*destroy)(void *user); /* called once by te_group_destroy; may be NULL */

    /* Optional: a call of one that is NULL gives TE_ERR_UNSUPPORTED. */

    /* Line blocks of x [sum of send_counts, ...] go to the ranks in order; out [sum of recv_counts, ...] gets theirs.
     * Both lists have `size` entries (never NULL here), which count lines; x and out do not overlap; any format. */
    te_result (*all_to_all)(void *user, te_ctx *te, const te_tensor *x, const int64_t *send_counts, te_tensor *out,
                            const int64_t *recv_counts);
    /* x goes to rank `to`, which receives it in the order of sending. */
    te_result (*send)(void *user, te_ctx *te, const te_tensor *x, int to);
    /* x = the next tensor from rank `from`. */
    te_result (*recv)(void *user, te_ctx *te, te_tensor *x, int from);
    /* Makes every rank's pending and later calls fail; called from any thread. `reason` is borrowed. */
    te_result (*abort)(void *user, const char *reason);
    /* The functions above do nothing but queue work on the stream, and may be called while it captures. Without effect
     * on the CPU. */
    bool captures;
} te_group_desc;

/* Makes a group of the user's collectives. Owned by the caller: te_group_destroy, before the context goes. The first
 * five functions must be there. On failure `destroy` is not called. */
TE_API te_group *te_group_create(te_ctx *te, const te_group_desc *desc);
/* Destroys the group, before or with its context. NULL is fine. */
TE_API void te_group_destroy(te_group *group);
TE_API int te_group_rank(const te_group *group); /* this rank, from 0; 0 for NULL */
TE_API int te_group_size(const te_group *group); /* the number of ranks; 1 for NULL */

/* The in-process group: `size` threads, each with a context of its own (CPU or CUDA, mixed as well), join one hub. The
 * hub is owned by the caller and outlives its groups. Collectives go through host memory: for tests, and for small
 * groups in one process. Syncs.
 *
 * If a rank's arguments do not fit the others' (size, format, counts, operation), or a rank fails before the call, the
 * call fails on every rank with both values, or with that rank's error; no tensor has changed then, and the group stays
 * usable. Once all ranks wait for one another in calls that do not fit (one in te_recv, one in te_all_reduce), all get
 * an error that lists their waits. After a rank has destroyed its group or its context, calls of the others fail; when
 * all ranks have, the hub can be joined again. */
typedef struct te_thread_hub te_thread_hub;
/* A hub for `size` ranks. Owned by the caller: te_thread_hub_destroy. NULL if size < 1 or there is no memory. Any
 * thread may call it. */
TE_API te_thread_hub *te_thread_hub_create(int size);
/* Destroys the hub. Ranks that are still in a group, or wait in one, get TE_ERR_STATE. NULL is fine. */
TE_API void te_thread_hub_destroy(te_thread_hub *hub);
/* Joins the hub as rank `rank`. Owned by the caller: te_group_destroy. TE_ERR_INVALID for a rank outside 0 .. size - 1
 * or a context that is in the hub already; TE_ERR_STATE if the rank is taken or has left, or the hub was destroyed. */
TE_API te_group *te_thread_group_create(te_ctx *te, te_thread_hub *hub, int rank);

/* ---- collectives: all ranks call them. A NULL group or one of size 1: the identity ---- */

/* x = op over the ranks of x. f32, f16, bf16, i32, i64; TE_REDUCE_MAX takes u8 and e8m0 too. */
TE_API te_result te_all_reduce(te_group *group, te_tensor *x, te_reduce_op op);
/* out [size * n] = the ranks' x [n] in rank order. Any format and shapes; rows of e2m1 have one length in both. */
TE_API te_result te_all_gather(te_group *group, const te_tensor *x, te_tensor *out);
/* out [n] = piece number te_group_rank of the sum over the ranks of x [size * n]. */
TE_API te_result te_reduce_scatter(te_group *group, const te_tensor *x, te_tensor *out);
/* x of every rank = x of rank `root`. Any format. */
TE_API te_result te_broadcast(te_group *group, te_tensor *x, int root);
/* Each rank sends a block of lines to each: x [L, ...] goes out in rank order, the first send_counts[0] lines to rank 0
 * and so on; out [M, ...] receives recv_counts[0] lines of rank 0, then those of rank 1 ... Counts may be 0 and differ
 * everywhere; send_counts[k] of rank i must be recv_counts[i] of rank k. They stand in host memory, `size` of them.
 * NULL: equal blocks. Lines are all that stands under one index of the first dimension, in any format, and fill whole
 * bytes. x and out must not share memory. */
TE_API te_result te_all_to_all(te_group *group, const te_tensor *x, const int64_t *send_counts, te_tensor *out,
                               const int64_t *recv_counts);
/* Returns when all ranks have called it. Queued work of a GPU may still run: te_synchronize waits for it. */
TE_API te_result te_barrier(te_group *group);

/* ---- from one rank to another ---- */

/* Sends x to rank `to`, which receives it by te_recv(x, from = this rank) into a tensor of the same format (any) and
 * number of elements (0 included). Between each two ranks messages arrive in the order in which they were sent;
 * collectives in between do not matter.
 *
 * Ranks of threads: te_send copies x to host memory and returns without waiting for the te_recv. So rings and exchanges
 * in which every rank first sends and then receives do not deadlock, in any order. A message that does not fit the
 * te_recv makes that fail, and is dropped. If a te_send fails, its te_recv gets an error in place of the message.
 * Groups that queue on a GPU (NCCL) may let te_send wait for its te_recv: where two ranks send to each other, let the
 * lower one send first. Another rank than this one must be named: TE_ERR_INVALID, in a group of 1 always. */
TE_API te_result te_send(te_group *group, const te_tensor *x, int to);
/* x = the next tensor that rank `from` has sent to this one; waits for it. */
TE_API te_result te_recv(te_group *group, te_tensor *x, int from);

/* Gives the group up: every rank that waits, and every later call of any rank, gets TE_ERR_STATE with this rank and
 * `reason` (copied; may be NULL). A collective that all ranks have begun ends first. The only call that another thread
 * may make meanwhile (a watchdog): it records no error, unless the group has no function for it (TE_ERR_UNSUPPORTED).
 * The first abort counts. Afterwards destroy the group on all ranks; the hub can then be joined anew. NULL, or a group
 * of 1: nothing. */
TE_API te_result te_group_abort(te_group *group, const char *reason);
