/* api/dist.h: groups: ranks that compute together.
 *
 * A group is a small interface of collectives. Threads of one process implement it (te_thread_group_create); a user may bring
 * an implementation of their own (te_group_create). Every rank calls the same collectives in the same order. Tensors are contiguous
 * and of the rank's own context. Results are the same bits on all ranks and in every run: sums are taken in rank order.
 *
 * A call that fails on this rank's own arguments does not reach a custom implementation, so its other ranks may be left waiting; ranks of
 * threads are told. A NULL tensor gives TE_ERR_STATE. Between te_warmup_begin and te_warmup_end collectives are checked and not made. */

typedef enum te_reduce_op { TE_REDUCE_SUM = 0, TE_REDUCE_MAX = 1 /* NaN is ignored */ } te_reduce_op;

/* An implementation of a group. Each function returns TE_OK, or an error code that the library reports with the group's name and rank. */
typedef struct te_group_desc {
    const char *name; /* for messages; copied; NULL => "custom" */
    int rank, size;   /* this rank, 0 to size - 1, and how many there are */
    void *user;       /* handed to every function; borrowed for the group's lifetime */
    /* x = op over the ranks of x. f32, f16, bf16 (sums in f32, rounded once), i32, i64; MAX also u8 and e8m0 (as bytes). */
    te_result (*all_reduce)(void *user, te_ctx *te, te_tensor *x, te_reduce_op op);
    /* out [size * n] = the ranks' x [n] in rank order; any format. */
    te_result (*all_gather)(void *user, te_ctx *te, const te_tensor *x, te_tensor *out);
    /* out [n] = piece `rank` of the sum over the ranks of x [size * n]. */
    te_result (*reduce_scatter)(void *user, te_ctx *te, const te_tensor *x, te_tensor *out);
    /* x = x of rank `root`; any format. */
    te_result (*broadcast)(void *user, te_ctx *te, te_tensor *x, int root);
    te_result (*barrier)(void *user); /* returns when every rank has called it */
    void (*destroy)(void *user); /* called once by te_group_destroy; may be NULL */
} te_group_desc;

/* Makes a group of the user's collectives. Owned by the caller: te_group_destroy. Only name and destroy may be NULL. On failure `destroy` is not
 * called. */
TE_API te_group *te_group_create(te_ctx *te, const te_group_desc *desc);
/* Destroys the group, before or with its context. NULL is fine. */
TE_API void te_group_destroy(te_group *group);
TE_API int te_group_rank(const te_group *group); /* this rank, from 0; 0 for NULL */
TE_API int te_group_size(const te_group *group); /* the number of ranks; 1 for NULL */

/* The in-process group: `size` threads, each with a context of its own (CPU or CUDA, mixed as well), join one hub. The hub is
 * owned by the caller and outlives its groups. Collectives go through host memory: for tests, and for small groups in one process.
 * A rank whose arguments do not fit the others' (size, format, operation), or that could not make the call at all, makes it fail on every
 * rank with both values, or its own error, named; no tensor has changed then, and the group can go on. A rank that destroys its group makes
 * the calls of the others fail from there on; when all ranks have, the hub can be joined anew. Syncs. */
typedef struct te_thread_hub te_thread_hub;
TE_API te_thread_hub *te_thread_hub_create(int size); /* NULL: size < 1, or no memory */
/* Ranks that are still in a group, or wait in one, get errors. NULL is fine. */
TE_API void te_thread_hub_destroy(te_thread_hub *hub);
/* Joins the hub as rank `rank`. Owned by the caller: te_group_destroy. TE_ERR_INVALID for a rank outside 0 .. size - 1
 * or a context that is in the hub already; TE_ERR_STATE if the rank is taken or has left, or the hub was destroyed. */
TE_API te_group *te_thread_group_create(te_ctx *te, te_thread_hub *hub, int rank);

/* The collectives. For a NULL group or one of size 1 they are the identity. TE_ERR_SHAPE or TE_ERR_DTYPE where tensors do not fit, TE_ERR_STATE for a
 * NULL tensor. */
/* x = op over the ranks' x: f32, f16, bf16 (sums in f32, rounded once), i32, i64; MAX also u8 and e8m0. */
TE_API te_result te_all_reduce(te_group *group, te_tensor *x, te_reduce_op op);
/* out [size * n] = the ranks' x [n] in rank order; of one format, any. */
TE_API te_result te_all_gather(te_group *group, const te_tensor *x, te_tensor *out);
/* out [n] = piece `rank` of the sum of the ranks' x [size * n]; formats as te_all_reduce. */
TE_API te_result te_reduce_scatter(te_group *group, const te_tensor *x, te_tensor *out);
/* x = x of rank `root`; any format. */
TE_API te_result te_broadcast(te_group *group, te_tensor *x, int root);
/* Returns when every rank has called it. */
TE_API te_result te_barrier(te_group *group);
