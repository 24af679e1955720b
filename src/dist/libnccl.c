/* dist/libnccl.c: the interface to libnccl, opened at run time. It declares NCCL's types as te__nccl_..., so te.h needs
 * no header of NCCL and does not clash with one. This file must not depend on groups. */

#ifndef _WIN32

typedef int te__nccl_result; /* ncclResult_t */
typedef struct te__nccl_comm te__nccl_comm;

typedef struct te__nccl_id { /* ncclUniqueId */
    char bytes[128];
} te__nccl_id;

/* ncclConfig_t as of NCCL 2.18. Later versions take it, because it says its size and version. */
typedef struct te__nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
} te__nccl_config;

/* The values of NCCL's constants that te.h uses. */
enum {
    TE__NCCL_SUCCESS = 0,
    TE__NCCL_IN_PROGRESS = 7,
    TE__NCCL_MIN = 21800,    /* 2.18: the first version with ncclCommSplit */
    TE__NCCL_BLOCKS = 22200, /* 2.22: the first whose ncclCommAbort, in a group, frees the communicator at its end */
    TE__NCCL_U8 = 1,
    TE__NCCL_I32 = 2,
    TE__NCCL_I64 = 4,
    TE__NCCL_F16 = 6,
    TE__NCCL_F32 = 7,
    TE__NCCL_BF16 = 9,
    TE__NCCL_SUM = 0,
    TE__NCCL_MAX = 2,
    TE__NCCL_AVG = 4, /* divides before it adds */
    TE__NCCL_NO_COLOR = -1
};

/* Every function of libnccl that te.h calls: name in te.h; symbol; type of the result; arguments. */
#define TE__NCCL_LIST(X)                                                                                               \
    X(GetVersion, "ncclGetVersion", te__nccl_result, (int *version))                                                   \
    X(GetUniqueId, "ncclGetUniqueId", te__nccl_result, (te__nccl_id * id))                                             \
    X(CommInitRankConfig, "ncclCommInitRankConfig", te__nccl_result,                                                   \
      (te__nccl_comm * *comm, int size, te__nccl_id id, int rank, te__nccl_config *config))                            \
    X(CommSplit, "ncclCommSplit", te__nccl_result,                                                                     \
      (te__nccl_comm * comm, int color, int key, te__nccl_comm **part, te__nccl_config *config))                       \
    X(CommDestroy, "ncclCommDestroy", te__nccl_result, (te__nccl_comm * comm))                                         \
    X(CommAbort, "ncclCommAbort", te__nccl_result, (te__nccl_comm * comm))                                             \
    X(CommGetAsyncError, "ncclCommGetAsyncError", te__nccl_result, (te__nccl_comm * comm, te__nccl_result * error))    \
    X(GetErrorString, "ncclGetErrorString", const char *, (te__nccl_result code))                                      \
    X(GetLastError, "ncclGetLastError", const char *, (te__nccl_comm * comm))                                          \
    X(AllReduce, "ncclAllReduce", te__nccl_result,                                                                     \
      (const void *x, void *out, size_t count, int dtype, int op, te__nccl_comm *comm, void *stream))                  \
    X(AllGather, "ncclAllGather", te__nccl_result,                                                                     \
      (const void *x, void *out, size_t count, int dtype, te__nccl_comm *comm, void *stream))                          \
    X(ReduceScatter, "ncclReduceScatter", te__nccl_result,                                                             \
      (const void *x, void *out, size_t count, int dtype, int op, te__nccl_comm *comm, void *stream))                  \
    X(Broadcast, "ncclBroadcast", te__nccl_result,                                                                     \
      (const void *x, void *out, size_t count, int dtype, int root, te__nccl_comm *comm, void *stream))                \
    X(Send, "ncclSend", te__nccl_result,                                                                               \
      (const void *x, size_t count, int dtype, int to, te__nccl_comm *comm, void *stream))                             \
    X(Recv, "ncclRecv", te__nccl_result,                                                                               \
      (void *x, size_t count, int dtype, int from, te__nccl_comm *comm, void *stream))                                 \
    X(GroupStart, "ncclGroupStart", te__nccl_result, (void))                                                           \
    X(GroupEnd, "ncclGroupEnd", te__nccl_result, (void))

typedef struct te__libnccl {
#define TE__NCCL_MEMBER(name, symbol, type, args) type(*name) args;
    TE__NCCL_LIST(TE__NCCL_MEMBER)
#undef TE__NCCL_MEMBER
    te__lib lib;
    int version;     /* 21805: 2.18.5 */
    bool takes_host; /* the library works in host memory: it is the tests' own */
    bool ready;
} te__libnccl;

static te__libnccl te__nccl; /* its functions may be called only after te__nccl_open has returned TE_OK */
static te__mutex te__nccl_mutex = TE__MUTEX_INIT;

#define TE__NCCL_INSTALL                                                                                               \
    "Install NCCL 2.18 or newer (pip install nvidia-nccl-cu13), or name its file in TE_NCCL_PATH; threads of one "     \
    "process need none (te_thread_group_create)"

static te_result te__nccl_load(te__libnccl *n, te__text *why) {
    static const struct {
        const char *symbol;
        size_t offset;
    } list[] = {
#define TE__NCCL_ROW(name, symbol, type, args) {symbol, offsetof(te__libnccl, name)},
        TE__NCCL_LIST(TE__NCCL_ROW)
#undef TE__NCCL_ROW
    };
    te__text tried = TE_ZERO;
    const char *missing = NULL;
    int v, i;
    bool found = te__lib_open(TE__LIB_NCCL, &n->lib, &tried);
    if (!found) te__text_printf(why, "libnccl could not be opened:\n%s" TE__NCCL_INSTALL, te__text_str(&tried));
    te__text_free(&tried);
    if (!found) return TE_ERR_LIBRARY;
    for (i = 0; i < TE__COUNT(list); i++)
        if (!te__dl_function(n->lib.handle, list[i].symbol, (char *)n + list[i].offset) && !missing)
            missing = list[i].symbol;
    if (n->GetVersion(&n->version) != TE__NCCL_SUCCESS) n->version = 0;
    v = n->version;
    if (v >= TE__NCCL_MIN && !missing) {
        n->takes_host = te__dl_sym(n->lib.handle, "te_nccl_takes_host_memory") != NULL;
        n->ready = true;
        return TE_OK;
    }
    /* versions before 2.9 are written 2804 */
    te__text_printf(why, "%s is NCCL %d.%d.%d%s%s; 2.18 is the oldest that will do. " TE__NCCL_INSTALL, n->lib.path,
                    v >= 10000 ? v / 10000 : v / 1000, v >= 10000 ? v / 100 % 100 : v / 100 % 10, v % 100,
                    missing ? ", and has no " : "", missing ? missing : "");
    te__dl_close(n->lib.handle);
    n->lib.handle = NULL;
    return TE_ERR_LIBRARY;
}

/* Opens libnccl, once in a process. If that fails, the next call tries again. */
static te_result te__nccl_open(te_ctx *te, const char *who) {
    te__text why = TE_ZERO;
    te_result r = TE_OK;
    te__mutex_lock(&te__nccl_mutex);
    if (!te__nccl.ready) r = te__nccl_load(&te__nccl, &why);
    te__mutex_unlock(&te__nccl_mutex);
    if (r != TE_OK) te__fail(te, r, "%s: %s", who, te__text_str(&why));
    te__text_free(&why);
    return r;
}

/* Returns whether communicators block (dist/nccl.c). */
static bool te__nccl_blocks(void) { return te__nccl.version >= TE__NCCL_BLOCKS; }

static te__nccl_config te__nccl_config_of(void) {
    const int undefined = INT32_MIN;
    te__nccl_config c = TE_ZERO;
    c.size = sizeof c;
    c.magic = 0xcafebeef;
    c.version = TE__NCCL_MIN;
    c.blocking = te__nccl_blocks();
    c.cga_cluster_size = c.min_ctas = c.max_ctas = c.split_share = undefined;
    return c;
}

/* Returns NCCL's number of the format in which elements of a tensor are reduced. */
static int te__nccl_dtype(te_dtype dtype) {
    switch (dtype) {
    case TE_F32: return TE__NCCL_F32;
    case TE_F16: return TE__NCCL_F16;
    case TE_BF16: return TE__NCCL_BF16;
    case TE_I32: return TE__NCCL_I32;
    case TE_I64: return TE__NCCL_I64;
    default: return TE__NCCL_U8;
    }
}

/* Adds the line about the library, once a group has opened it. */
static void te__dist_report(te__report_text *t) {
    te__mutex_lock(&te__nccl_mutex);
    if (te__nccl.ready)
        te__say(t, "NCCL: %s, %d.%d.%d\n", te__nccl.lib.path, te__nccl.version / 10000, te__nccl.version / 100 % 100,
                te__nccl.version % 100);
    te__mutex_unlock(&te__nccl_mutex);
}

#else

static void te__dist_report(te__report_text *t) { (void)t; }

#endif
