/* api/dist.h: groups of ranks that compute together.
 *
 * A group is a small interface of collectives. te.h implements it for processes, over NCCL (te_nccl_group_create), and
 * for threads of one process (te_thread_group_create); a user may bring a custom group (te_group_create). Every rank
 * must call the same collectives in the same order. Tensors must be contiguous and belong to the rank's own context.
 *
 * Order. A collective runs in the order of the context's stream like any operation. A group of processes, and a custom
 * group, may queue it on the stream (te_ctx_cu_stream) and return before it has run. The group of threads returns when
 * the collective has run.
 *
 * Bits. The group of threads adds the ranks' numbers in rank order (rank 0 + rank 1 + ...) in f32 and rounds once: all
 * ranks get the same bits, on CPU and GPU. A group of processes sums in f32 and rounds once as well, in the order of
 * NCCL's choice, which is the same for the same sizes on the same machines; over two ranks there is one order. A custom
 * group need only give the same bits again for the same sizes on the same machine. A maximum, and a collective that
 * only moves bytes, is exact in every group.
 *
 * Captures. A collective over more than one rank gives TE_ERR_STATE in a capture. With te_group_desc.captures it
 * becomes part of the graph instead, and the graph holds the memory of its tensors. On the CPU, which queues nothing,
 * each launch makes the collective. All ranks must launch their graphs in the same order. If a launch fails on one rank
 * of a group of processes, the others get its error.
 *
 * Comparing. Before some calls, ranks exchange a text that describes the call (module, sizes, formats, mask, window,
 * recipe and its options). If the texts differ, the call gives TE_ERR_STATE on all ranks, with the texts of two ranks.
 * The exchange is an all_gather of 512 bytes, and the host waits for it. It takes place:
 *   - before the first GEMM of a module under tensor parallelism
 *   - before the first attention of a module under context parallelism
 *   - before the first call of experts that ranks share, and the first one after te_set_max_dispatch_tokens
 *   - before the first call of a CausalLM with tp_group
 *   - before the first exchange of gradients of a model's units (api/sharding.h), twice: which parameters have a
 *     main_grad, and the recipe of the model's calls with a backward pass
 *   - with TE_DEBUG_SYNC=1 on all ranks, before every such GEMM, attention and call
 *   - never in a capture
 *
 * Errors. If a rank's own arguments are wrong, its call fails before it reaches a custom group. The other ranks may
 * then wait for it. In the group of threads, a collective that fails on one rank fails on all ranks. If a rank does
 * not call it at all, because its forward, backward pass or step has failed, the others fail with that rank's error,
 * each once (api/sharding.h has the rule); messages that were sent before are dropped. A rank that fails elsewhere,
 * and makes none of these calls any more, must call te_group_abort or destroy its group. A group of processes ends for
 * good when a call fails on one rank: the others get its error. A NULL tensor gives TE_ERR_STATE. Between
 * te_warmup_begin and te_warmup_end collectives check their arguments but do not run.
 *
 * Costs of a layout. A rank sends so many bytes for one layer, forward and backward, in bf16 or f16, as
 * te_group_get_stats counts them: n ranks share the layer, T is the number of tokens of their batch, h the hidden size.
 * q and g are the sizes of a token's queries and of its keys (heads times head_dim), and each token uses K of E
 * experts.
 *
 *     tensor                                  16 (n - 1)/n T h
 *     tensor, sequence_parallel               20 (n - 1)/n T h; 14 with an FP8 recipe whose codes are gathered; 38 in a
 *                                             CausalLM, each of whose projections exchanges by itself
 *     context, TE_CP_P2P                      (8 (n - 1)/n + 8) T g: gradients of keys and values travel in f32
 *     context, TE_CP_ALL_GATHER               12 (n - 1)/n T g
 *     context, TE_CP_A2A                      8 (n - 1)/n T/n (q + g)
 *     experts, deepep, uccl_ep, hybridep      (n - 1)/n (K T (8 h + 8) + 8 E), if all experts have as many tokens; T of
 *                                             each rank
 *     experts, torch                          (n - 1) T (10 h + 12 K) + 16 (n - 1)/n: it grows with n
 *     experts of a CausalLM                   (n - 1) T (10 h + 9 E) + 16 (n - 1)/n
 *     experts, te_set_max_dispatch_tokens     as torch, or as in a CausalLM, in all dispatchers: T is that number, and
 *                                             the last term is 0
 *
 * A layer that runs again in the backward pass (te_module_set_checkpoint) adds its forward: 8 of the 16 and of the 20,
 * 6 of the 14, 14 of the 38, 4 (n - 1)/n of the ring's, 4 of the 12, and half of TE_CP_A2A's; of experts, half of the
 * (8 h + 8), 6 of the 10, 8 of the 12, 5 of the 9, and all of 8 E and of 16 (n - 1)/n. Gradients and parameters, which
 * travel once a step, are api/sharding.h's formulas, for the elements that this rank has: a tp-th of the layers'
 * matrices and an ep-th of the experts, but all of the norms, of the embedding and of the output's weight.
 * Where tp ranks share the vocabulary (te_lm_parallel_options, te_embedding_desc), they have a tp-th of the last two as
 * well, which the examples below do not count, and a step sends for both 8 (n - 1)/n T h, or 10 with sequence_parallel,
 * and 12 (n - 1) T for the loss.
 *
 * Examples, for layers with te_parallel_options, TE_SHARD_PARAMETERS over all ranks that have the same parameters, one
 * microbatch of 8192 tokens, with tp in sequence parallel, with cp as a ring, with ep by all-to-all. GB that a rank
 * sends in a step for gradients and parameters, and for its layers; GB of its parameters, gradients, f32 masters and
 * two moments, beside what is gathered (api/sharding.h) and activations:
 *
 *     model         GPUs  layout              exchanges    layers    memory
 *     Llama 70 G    8     dp 8                    370.4       0.0     141.1
 *     Llama 70 G    8     tp 8                      0.0      94.0     170.5
 *     Llama 70 G    64    dp 64                   416.7       0.0      17.6
 *     Llama 70 G    64    tp 8, dp 8               56.0      94.0      21.3
 *     Llama 70 G    1024  dp 1024                 422.9       0.0       1.1
 *     Llama 70 G    1024  tp 8, dp 128             63.5      94.0       1.3
 *     Llama 70 G    1024  tp 8, cp 4, dp 32        63.5      24.7       1.3
 *     Mixtral 47 G  8     ep 8                      8.4      15.0      93.4
 *     Mixtral 47 G  64    ep 8, dp 8               39.1      15.0      11.7
 *     Mixtral 47 G  1024  ep 8, dp 128             43.2      15.0       0.7
 *
 * Ranks of tp share a host, as a rule: their exchanges are part of each layer, and only the others run beside work. */

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
    /* true => the functions above only queue work on the stream, and may be called in its capture. On the CPU a capture
     * does not call them: each launch of the graph does. */
    bool captures;
} te_group_desc;

/* Makes a group that runs the user's collectives. The caller owns it, and calls te_group_destroy before te_ctx_destroy.
 * all_reduce, all_gather, reduce_scatter, broadcast and barrier are required. On failure `destroy` is not called. */
TE_API te_group *te_group_create(te_ctx *te, const te_group_desc *desc);
/* Destroys the group; call it before the context is destroyed. `group` may be NULL. */
TE_API void te_group_destroy(te_group *group);
TE_API int te_group_rank(const te_group *group); /* this rank, from 0; 0 for NULL */
TE_API int te_group_size(const te_group *group); /* the number of ranks; 1 for NULL */

/* The counters of one of a group's collectives. */
typedef struct te_group_count {
    uint64_t calls; /* how often it was called */
    uint64_t bytes; /* that this rank has sent in these calls */
} te_group_count;
/* Calls of collectives, and bytes that this rank has sent, since the group was made or since te_group_reset_stats: for
 * n ranks, by a ring, in the tensors' own formats. Only calls that succeed count. A call in a capture counts once, and
 * launches of its graph do not. */
typedef struct te_group_stats {
    te_group_count all_reduce;     /* 2 (n - 1) / n of the bytes of x, rounded up */
    te_group_count all_gather;     /* n - 1 times the bytes of x */
    te_group_count reduce_scatter; /* n - 1 times the bytes of out */
    te_group_count broadcast;      /* the bytes of x, on the root */
    te_group_count barrier;        /* 0 */
    te_group_count all_to_all;     /* the bytes of the lines that go to other ranks */
    te_group_count send;           /* the bytes of x */
    te_group_count recv;           /* 0: the sender counts them */
} te_group_stats;
/* Returns the counters of a group; zeros for NULL, and for a group of one rank, which sends nothing. */
TE_API te_group_stats te_group_get_stats(const te_group *group);
/* Sets the counters of a group to zero. `group` may be NULL. */
TE_API void te_group_reset_stats(te_group *group);

/* A hub connects threads of one process, each with a context of its own (CPU, CUDA or mixed), as the ranks of one
 * group. The hub must outlive its groups. Collectives go through host memory and sync: they are meant for tests, and
 * for small groups.
 *
 * These errors leave tensors unchanged and the group usable:
 *   - a rank's arguments do not fit those of the others (size, format, counts, operation): every rank's call fails,
 *     and the message has both values
 *   - a rank's own call fails before the exchange, or its forward, backward pass or step does: the calls of all other
 *     ranks fail with that rank's error
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

/* ---- processes ---- */

/* Describes how processes meet. Zero everywhere takes all from the launcher. */
typedef struct te_nccl_group_desc {
    int size, rank; /* the number of ranks, and this one, from 0. size 0 => both are the launcher's */
    const char *address; /* rank 0's host: a name or an address. NULL => see below; with `size`, this machine */
    int port;            /* on which rank 0 listens. 0 => see below */
    const char *file;    /* the rendezvous file. NULL => TE_DIST_FILE, if that is set */
    const char *secret;  /* NULL => TE_DIST_SECRET or TE_DIST_SECRET_FILE, if one is set */
    double timeout_seconds; /* how long ranks wait for each other: here, and in each collective. 0 => 600 */
    const char *name; /* name in messages; copied; NULL => "nccl" */
} te_nccl_group_desc;

/* Joins the processes that a launcher has started and returns the group of them all, over NCCL. The call returns when
 * all ranks have made it. The caller owns the group, and calls te_group_destroy before te_ctx_destroy. Each rank needs
 * a context on a GPU, with the GPU's primary CUcontext (the default): te_ctx_desc.device is usually "cuda:N" with the
 * rank among those of the host, in LOCAL_RANK, SLURM_LOCALID, OMPI_COMM_WORLD_LOCAL_RANK or MPI_LOCALRANKID. Without a
 * launcher there is one rank, which needs no NCCL and works on the CPU as well. A process may be several ranks: each
 * has a thread of its own and a context on a GPU of its own, and names its place among all ranks of the job in
 * desc->size and desc->rank, since a launcher's variables name one place for the whole process.
 *
 * Rank and number of ranks come from RANK and WORLD_SIZE (torchrun), OMPI_COMM_WORLD_RANK and _SIZE (Open MPI),
 * PMI_RANK and PMI_SIZE (MPICH) or SLURM_PROCID and SLURM_NTASKS (Slurm), the first of them that are set. Values that
 * contradict each other are an error, except that Slurm may have started the agents of one of the others.
 *
 * Rank 0 listens on a port and the others connect to it, once to join, and as long as the group exists to hear of each
 * other:
 *   host    MASTER_ADDR; else this machine if all ranks are on it; else the first host of SLURM_STEP_NODELIST,
 *           SLURM_JOB_NODELIST, or SLURM_LAUNCH_NODE_IPADDR
 *   port    TE_DIST_PORT; else MASTER_PORT + 1, because torchrun listens on MASTER_PORT itself; else one of 20000 to
 *           29999 by the name of the job
 *   file    TE_DIST_FILE names a file that does not exist yet, on a disk that all ranks see: rank 0 writes host, port
 *           and a secret of its own into it, of mode 0600, and removes it when all ranks have come. A secret that
 *           all ranks know counts as well, and is not written
 *   secret  16 bytes or more that all ranks know: TE_DIST_SECRET, or the content of TE_DIST_SECRET_FILE, which must be
 *           the user's own and of mode 0600. Both ends of a connection prove that they know it (HMAC-SHA256 of numbers
 *           that the other end has chosen); it never travels. Later messages are neither signed nor encrypted. Without
 *           a secret or a file, rank 0 listens on 127.0.0.1 alone
 *
 * NCCL 2.18 or newer is opened when the call needs it: from TE_NCCL_PATH, else the system's folders, CUDA toolkits, and
 * Python packages (nvidia-nccl-cu13). Several ranks on one GPU need NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1.
 *
 * Collectives are queued on the context's stream, in te_graph captures too. te_send may wait for its te_recv. Sums of
 * f16 and bf16 over more than two ranks are exchanged in f32, which takes twice the traffic. TE_DEBUG_SYNC=1 on all
 * ranks compares each collective's name, format and shape before it is queued.
 *
 * When a rank dies, or its context is destroyed, all groups of the job end on the other ranks: kernels of NCCL are
 * stopped, and the next call or wait (te_synchronize, reading a tensor) gives TE_ERR_STATE with the rank, its process
 * and host. A machine that loses its power is missed after two minutes. When a collective takes longer than
 * `timeout_seconds`, with what is queued before it, it ends likewise, and the error names the ranks that have not
 * called it and their last calls. Numbers that were computed in between are not valid. Graphs that have collectives
 * of the group cannot be launched after te_group_destroy. It waits, for `timeout_seconds` at the most, until the other
 * ranks have destroyed the group as well, or are gone: NCCL does, and ranks hear of each other through rank 0. Ranks in
 * a collective that lacks this one get an error instead. Destroy several groups in one order on all ranks.
 *
 * TE_ERR_INVALID: variables or ranks that contradict each other; no host; a host that is not this machine, without a
 * secret. TE_ERR_LIBRARY: no NCCL, or an old one; the message lists what was tried. TE_ERR_UNSUPPORTED: a context on
 * the CPU; Windows. TE_ERR_STATE: ranks that did not come in time, of another secret, number of ranks or version of
 * te.h; a port in use. */
TE_API te_group *te_nccl_group_create(te_ctx *te, const te_nccl_group_desc *desc);

/* Splits a group of threads or processes: ranks that give the same `color`, 0 or more, become a group of their own,
 * numbered in the order of `key`, and of their ranks where keys are equal. All ranks of `group` must call it, and wait
 * for one another. The caller owns the new group, which may outlive `group`. Returns NULL without an error for a
 * negative color, and for NULL. TE_ERR_UNSUPPORTED for a custom group. */
TE_API te_group *te_group_split(te_group *group, int color, int key);

/* ---- a job's layout ---- */

/* How the ranks of a job share the work: their number is tp x cp x ep x dp. Zero-initialised. */
typedef struct te_dist_desc {
    int tp; /* ranks that share each layer (te_parallel_options.tp_group). 0 => 1 */
    int cp; /* ranks that share each sequence (te_parallel_options.cp_group). 0 => 1 */
    int ep; /* ranks that share the experts (ep_group of a mixture), and have batches of their own. 0 => 1 */
    int dp; /* ranks that have a whole copy of it all, and batches of their own. 0 => the ranks that are left */
    te_nccl_group_desc processes; /* how the processes meet */
    te_group *world; /* a group of all ranks that there is already, of processes or threads (borrowed until
                      * te_dist_finish). NULL => te_nccl_group_create makes it, of `processes` */
} te_dist_desc;

/* The groups of a layout. A group of one rank is NULL, which all options take. Groups of all ranks are `world`.
 * Rank number ((d * ep + e) * cp + c) * tp + t has the places t, c, e, d: ranks that share a layer are neighbours. */
typedef struct te_dist {
    te_group *world;   /* all ranks */
    te_group *tensor;  /* the tp ranks that share layers with this one */
    te_group *context; /* the cp ranks that share sequences with it */
    te_group *expert;  /* the ep ranks that share experts with it */
    te_group *data;    /* the cp x ep x dp ranks that have the same parameters outside of experts, whose gradients are
                        * summed over them */
    te_group *expert_data; /* the cp x dp ranks that have the same experts */
    int rank, size;        /* in the world */
    int data_rank, data_size; /* this rank reads share number data_rank of data_size = ep x dp of the data: ranks that
                               * share layers or sequences read the same share */
    bool owns_world;          /* te_dist_finish destroys `world` */
} te_dist;

/* Fills in `dist`: joins the processes of the job, unless desc->world has them, and splits them into the groups of the
 * layout. All ranks must call it, with the same layout. The caller calls te_dist_finish before te_ctx_destroy. On
 * failure nothing is left to finish.
 * TE_ERR_INVALID if the layout makes another number of ranks than there are. TE_ERR_STATE if the ranks have different
 * layouts; and all that te_nccl_group_create and te_group_split give. */
TE_API te_result te_dist_init(te_ctx *te, const te_dist_desc *desc, te_dist *dist);
/* Returns this process's number among those of its host, from what the launcher has set (te_nccl_group_create): with
 * one GPU for each process, the GPU's number. 0 without a launcher, and if its variables contradict each other, which
 * te_dist_init reports. Needs no context. May be called from any thread. */
TE_API int te_dist_local_rank(void);
/* Sets the seeds of the random states for training in a layout; offsets stay. Call it after the model is made, since
 * all ranks draw all weights alike, whatever the layout, and again after te_model_load, which gives all one state.
 *   - The context's state gets `seed` + (rank / tp) * 2^32: ranks that share a layer drop the same elements of what
 *     they all have, and others drop their own. Without other ranks it is `seed` itself.
 *   - The named state TE_DIST_RNG gets `seed` + (rank + 1) * 2^32 + 2^31, another one on each rank. Give this name to
 *     attention with dropout (rng_tracker_name), since the ranks of a layer have different heads. Models of
 *     te_causal_lm_create with a tp_group use it by themselves.
 * Checkpoints do not have the offset of TE_DIST_RNG: after a resume, dropout of attention begins its numbers anew.
 * dist may be NULL: one rank. TE_ERR_STATE inside a graph's capture. */
TE_API te_result te_dist_seed(te_ctx *te, const te_dist *dist, uint64_t seed);
/* Destroys the groups that te_dist_init has made, and clears `dist`. `dist` may be NULL or cleared. */
TE_API void te_dist_finish(te_dist *dist);

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
 * `reason` (copied; may be NULL). A collective that all ranks of a group of threads have begun still completes; a group
 * of processes stops what is queued. Later aborts are ignored. For NULL, or a group of one rank, the call does nothing.
 * Another thread (a watchdog) may call te_group_abort at any time, but no other function of the group. No error is
 * recorded, except TE_ERR_UNSUPPORTED if the group has no `abort`.
 * Afterwards destroy the group on all ranks; then ranks can join their te_thread_hub again. */
TE_API te_result te_group_abort(te_group *group, const char *reason);
