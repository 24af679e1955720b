/* dist/none.c: replaces the folder dist/ if TE_NO_DIST is defined. The only group is then NULL, which stands for one
 * rank. Options for more ranks fail with an error that names TE_NO_DIST. */

struct te_group {
    te_ctx *te;
};
enum { TE__HAS_RANKS = 0 };
typedef enum te__collective {
    TE__ALL_REDUCE,
    TE__ALL_GATHER,
    TE__REDUCE_SCATTER,
    TE__ALL_TO_ALL,
    TE__BETWEEN
} te__collective;
typedef enum te_reduce_op { TE_REDUCE_SUM, TE_REDUCE_MAX } te_reduce_op;

static int te__group_rank(const te_group *group) {
    (void)group;
    return 0;
}
static int te__group_size(const te_group *group) {
    (void)group;
    return 1;
}
static te_result te__refuse(te_group *group, te__collective kind, te_result code) {
    (void)group, (void)kind;
    return code;
}
static void te__dist_report(te__report_text *t) { (void)t; }
static void te__group_tells_again(te_group *group) { (void)group; }
static te_result te__all_reduce(te_group *group, te_tensor *x, te_reduce_op op) {
    (void)group, (void)op;
    return x ? TE_OK : TE_ERR_STATE;
}
static te_result te__all_gather(te_group *group, const te_tensor *x, te_tensor *out) {
    (void)group, (void)x;
    return out ? TE_OK : TE_ERR_STATE;
}
static te_result te__reduce_scatter(te_group *group, const te_tensor *x, te_tensor *out) {
    return te__all_gather(group, x, out);
}
/* With one rank nothing is under way: dist/flight.c */
typedef struct te__flight {
    te_tensor *x, *out;
} te__flight;
static te_result te__flight_land(te__flight *f) {
    (void)f;
    return TE_OK;
}
static void te__flight_drop(te__flight *f) {
    te_tensor_release(f->x);
    te_tensor_release(f->out);
    f->x = f->out = NULL;
}
static te_result te__flight_begin(te__flight *f, te_group *group, te__collective kind, te_tensor *x, te_tensor *out,
                                  te_result result) {
    (void)group, (void)kind;
    f->x = te_tensor_retain(x);
    f->out = te_tensor_retain(out);
    return result;
}
static te_result te__flight_exchange(te__flight *f, te_group *group, te_tensor *x, int to, te_tensor *out, int from,
                                     te_result result) {
    (void)to, (void)from;
    return te__flight_begin(f, group, TE__ALL_TO_ALL, x, out, result);
}
static te_result te__barrier(te_group *group) {
    (void)group;
    return TE_OK;
}
static te_result te__lines_exchanged(te_group *group, const te_tensor *x, const int64_t *send_counts, te_tensor *out,
                                     const int64_t *recv_counts) {
    (void)send_counts, (void)recv_counts;
    return te__all_gather(group, x, out);
}
static bool te__group_compares(const te_group *group, bool met) {
    (void)group, (void)met;
    return false;
}
static te_result te__group_compare(te_group *group, const char *what, te_result result) {
    (void)group, (void)what;
    return result;
}
/* Fails if `ranks` is above 1. */
static te_result te__ranks_allowed(te_ctx *te, int ranks, const char *who, const char *what) {
    if (ranks < 2) return TE_OK;
    return te__fail(te, TE_ERR_UNSUPPORTED, "%s: %s is %d, and te.h was compiled with TE_NO_DIST; compile it without",
                    who, what, ranks);
}
static te_result te__group_allowed(te_ctx *te, const te_group *group, const char *who, const char *what) {
    if (!group) return TE_OK;
    return te__fail(te, TE_ERR_UNSUPPORTED,
                    "%s: %s is given, and te.h was compiled with TE_NO_DIST; compile it without", who, what);
}
