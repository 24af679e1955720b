/* api/dist.h: groups: ranks that compute together.
 *
 * A group is a small interface of collectives. Threads of one process implement it (te_thread_group_create); a user may bring
 * an implementation of their own (te_group_create). Every rank calls the same collectives in the same order. Tensors are contiguous
 * and of the rank's own context. Results are the same bits on all ranks and in every run: sums are taken in rank order. */

typedef enum te_reduce_op { TE_REDUCE_SUM = 0, TE_REDUCE_MAX = 1 /* NaN is ignored */ } te_reduce_op;

/* What an implementation provides. Each returns TE_OK, or an error code that the library reports with the group's name and rank. */
typedef struct te_group_desc {
    const char *name; /* for messages; copied; NULL => "custom" */
    int rank, size;
    void *user;
    /* x = op over the ranks of x. f32, f16, bf16 (sums in f32, rounded once), i32, i64; MAX also u8 and e8m0 (as bytes). */
    te_result (*all_reduce)(void *user, te_ctx *te, te_tensor *x, te_reduce_op op);
    /* out [size * n] = the ranks' x [n] in rank order; any format. */
    te_result (*all_gather)(void *user, te_ctx *te, const te_tensor *x, te_tensor *out);
    /* out [n] = piece `rank` of the sum over the ranks of x [size * n]. */
    te_result (*reduce_scatter)(void *user, te_ctx *te, const te_tensor *x, te_tensor *out);
    te_result (*broadcast)(void *user, te_ctx *te, te_tensor *x, int root);
    te_result (*barrier)(void *user);
    void (*destroy)(void *user); /* may be NULL */
} te_group_desc;

/* Owned by the caller: te_group_destroy. All functions must be there. */
TE_API te_group *te_group_create(te_ctx *te, const te_group_desc *desc);
TE_API void te_group_destroy(te_group *group);
TE_API int te_group_rank(const te_group *group); /* 0 for NULL */
TE_API int te_group_size(const te_group *group); /* 1 for NULL */

/* The in-process group: `size` threads, each with a context of its own (CPU or CUDA, mixed as well), join one hub. The hub is
 * owned by the caller and outlives its groups. Collectives go through host memory: for tests, and for small groups in one process.
 * A rank whose arguments do not fit the others' (size, format, operation) makes the call fail on every rank with both values named. */
typedef struct te_thread_hub te_thread_hub;
TE_API te_thread_hub *te_thread_hub_create(int size);
TE_API void te_thread_hub_destroy(te_thread_hub *hub);
TE_API te_group *te_thread_group_create(te_ctx *te, te_thread_hub *hub, int rank);

/* The collectives themselves. A NULL group or one of size 1: the identity. */
TE_API te_result te_all_reduce(te_group *group, te_tensor *x, te_reduce_op op);
TE_API te_result te_all_gather(te_group *group, const te_tensor *x, te_tensor *out);
TE_API te_result te_reduce_scatter(te_group *group, const te_tensor *x, te_tensor *out);
TE_API te_result te_broadcast(te_group *group, te_tensor *x, int root);
TE_API te_result te_barrier(te_group *group);
