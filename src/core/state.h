/* core/state.h: the structs behind the handles: context, tensor, plan, tape. They must not depend on operations or on a
 * driver. */

/* ---- objects that a context has given out ---- */

typedef struct te__block te__block; /* core/error.c: the header in front of each piece of host memory */

/* A list entry inside each object that te_ctx_destroy must close, such as a module or a group. Freeing the memory of
 * such an object is not enough. */
typedef struct te__closable {
    struct te__closable *next, **at; /* `at`: the address of the pointer to this struct; NULL: not in a list */
    const char *kind;             /* "module" */
    void (*close)(void *owner);
    void *owner;
} te__closable;

/* A function that is called when the host has waited for the device, or has read from it. It reports that the results
 * cannot be relied on, as a group of processes does that has lost a rank. */
typedef struct te__waiter {
    struct te__waiter *next; /* te->waiters */
    te_result (*waited)(void *user); /* returns TE_OK, or an error that it has set */
    void *user;
} te__waiter;

/* ---- streams ---- */

/* A stream that is not the context's own (core/stream.c). */
typedef struct te__stream {
    te_ctx *te;
    struct te__stream *next; /* te->streams */
    void *handle;            /* the device's stream */
} te__stream;

/* A point in the work of a stream. */
typedef struct te__event {
    te_ctx *te;
    struct te__event *next; /* te->spare_events */
    int refs;
    void *handle;
    const te__stream *stream; /* the stream of the last record; NULL: the context's own. The pointer is only compared:
                               * the stream may be gone */
    bool pending;             /* the event was recorded, and perhaps has not passed yet */
    bool awaited;             /* the context's own stream waits for the event: work that is queued there from now on
                               * runs after it */
} te__event;

/* A block of pinned host memory, for copies on a second stream. */
typedef struct te__pinned {
    struct te__pinned *next; /* te->pinned */
    void *data;
    size_t capacity;
    bool taken;
    te__event *used; /* a reference to the event after the last copy to or from the block, or NULL */
} te__pinned;

/* ---- memory ---- */

/* A write to a part of a buffer. */
typedef struct te__write {
    uint64_t at;        /* the value of te->writes at the write */
    int64_t begin, end; /* bytes */
} te__write;

/* A block of device memory with a reference count. `version` counts the writes, to find stale quantized copies.
 * saved_at, written_at and whole_at are values of te->writes. */
typedef struct te__buffer {
    te_ctx *te;
    struct te__buffer *next, **at; /* `at`: the address of the pointer to this buffer */
    int refs;
    void *data;
    size_t bytes;    /* the size that was requested */
    size_t capacity; /* the size of the block from the pool; 0: te.h did not allocate the memory */
    uint64_t version;
    void (*release)(void *user); /* frees memory that te.h did not allocate; or NULL */
    void *user;
    struct te__arena *arena; /* the arena that owns the memory; NULL: the context's pool */
    te__event *used; /* a reference to the event after the last copy of the buffer on another stream, or NULL */
    struct te__offloaded *offloaded; /* the copy of the buffer in host memory (tape/offload.c), or NULL */
    uint64_t kept_version; /* tape/offload.c has decided not to copy this version of the buffer to host memory */
    uint64_t held, written;  /* held: the id of the last capture that took a reference to the buffer. written: the id of
                              * the last capture that writes the buffer */
    int times;               /* how many outputs of operations of that capture were in the buffer so far */
    bool apart;              /* page tables in the buffer: no page that has rows of one sequence is another's */
    uint64_t saved_at;         /* the time at which a tape node last saved a tensor in the buffer; 0: never */
    uint64_t written_at, whole_at; /* written_at: the time of the last write; whole_at: the time of the last write that
                                    * the list `writes` below does not have */
    te__write *writes;         /* writes to parts of the buffer since a node has saved it, the oldest first */
    int num_writes, cap_writes;
} te__buffer;

/* A released block of the pool. The block is in the list of its capacity (te__pool.lists), or in te__pool.pending while
 * another stream uses the block. */
typedef struct te__free_block {
    void *data;
    struct te__free_block *next;
    size_t capacity; /* `capacity` and `used` are set for pending blocks only; `used` is a reference */
    te__event *used;
} te__free_block;
typedef struct te__free_list {
    size_t capacity;
    te__free_block *first;
} te__free_list;
typedef struct te__pool {
    te__free_list *lists; /* sorted by capacity */
    int num_lists, cap_lists;
    te__free_block *pending;
    te__free_block *spare; /* list nodes for reuse */
    te_memory_stats stats;
} te__pool;

/* The device memory of a graph. Free blocks stay in the arena, because each launch may write them. If buffers of
 * the arena are still alive when the graph is destroyed, the arena outlives the graph. */
typedef struct te__arena {
    int refs; /* one for the graph, and one for every living buffer of the arena */
    bool open; /* the graph still exists */
    uint64_t launches; /* the launches of the graph so far; each counts as a write to every buffer of the arena */
    uint64_t launched_at; /* te->writes at the last launch */
    te__pool pool;     /* only `lists` and `spare` are used */
} te__arena;

/* The copy of a buffer in host memory, for tape nodes that have saved tensors in the buffer (tape/offload.c). */
typedef struct te__offloaded {
    struct te__offloaded *older, *newer; /* neighbours in a list, in the order in which tape nodes last saved the copied
                                          * buffers */
    int refs;          /* the number of saved tensors that need the copy */
    te__buffer *buffer; /* the copied buffer: a reference while `inside` is true. Otherwise the pointer becomes NULL
                         * when the buffer is freed or written */
    uint64_t version;  /* the version of `buffer` that was copied */
    bool inside;       /* tape/offload.c still keeps the buffer in device memory */
    size_t bytes;
    te__pinned *host;
} te__offloaded;

/* ---- tensors ---- */

enum { TE__MAX_PARTS = 6 };

/* The tape's record of a tensor, called the tensor's variable. A tensor and its views have separate variables. */
typedef struct te__var {
    int refs;
    bool leaf;       /* a parameter, or an input marked by the program: the gradient is kept after the backward pass */
    bool played;     /* the backward function of the node that made the tensor has run, and the node is gone */
    bool fresh;      /* in te->tape.fresh */
    bool flying;     /* the gradient, in memory of its own, is being summed over ranks where it is */
    bool passing;    /* the variable was made while te_backward ran. If an inner te_backward gives it a gradient, the
                      * variable keeps this gradient even if the outer te_backward fails */
    uint64_t pass;   /* the number (te->tape.passes) of the last backward pass that could reach the variable */
    te_tensor *grad; /* if `leaf` is true, the sum of all gradients so far; otherwise the sum so far in the current
                      * te_backward */
    te_tensor *main_grad, *decoupled_grad;
    te_tensor *shard_grad; /* the gradient of this rank's slice of a sharded parameter (train/shards.c), f32 or 16 bits,
                            * [elements of the slice]; or NULL */
    void *unit, *bucket; /* while te_backward runs: the unit of data_parallel/units.c that exchanges the gradient, and
                          * its bucket; or NULL */
} te__var;

/* The functions for a tensor that is not plain, such as a quantized one. The part of the library that makes such
 * tensors supplies the functions. */
typedef struct te__form {
    /* x consists of plain tensors, such as codes and scales, and has a pointer to each. Sets slot[i] to the address of
     * pointer i. Returns the number of pointers, some of which may be NULL. */
    int (*parts)(te_tensor *x, te_tensor **slot[TE__MAX_PARTS]);
    te_tensor *(*decode)(te_tensor *x, te_dtype dtype); /* returns the value as a plain tensor, recorded on the tape */
    bool (*share)(const te_tensor *x, te_tensor *y);    /* makes y, a tensor without memory, share the value of x;
                                                         * returns false if memory runs out */
    void (*release)(te_tensor *x);                      /* x is being freed */
} te__form;

/* The division of a weight among ranks. Each rank has an equal part of the columns, or of the rows of each block
 * (queries, keys, values). */
typedef struct te__sharding {
    int num_blocks;   /* 0: one block */
    int64_t block[3]; /* rows of each block in the whole weight */
} te__sharding;
/* How one rank with all experts would have a parameter of this rank's experts. */
typedef enum te__own_form {
    TE__OWN_NAMED,   /* by the same name */
    TE__OWN_STACKED, /* in one parameter with those of the other ranks, whose first dimension counts experts */
    TE__OWN_NUMBERED /* by a name whose number counts the experts of all ranks, and not this rank's ("weight3") */
} te__own_form;
/* A parameter of which each rank of a group has a part of its own, as long as it exists: under tensor parallelism equal
 * parts of a matrix, under expert parallelism experts of its own. te_data_parallel_desc.shard is something else: there
 * ranks own slices of one value. */
typedef struct te__split {
    te_group *group;       /* not owned; NULL: not known yet */
    int size;              /* ranks */
    int dim;               /* the dimension that is divided, or -1: there is no whole parameter */
    te__own_form own;      /* with dim -1 */
    int first;             /* TE__OWN_NUMBERED: the number of this rank's first expert among those of all ranks */
    te__sharding sharding; /* of dimension 0 */
    uint64_t skip[2];      /* with dim -1: random numbers that other ranks draw for their parameters, before this one
                            * and behind it */
} te__split;

struct te_tensor {
    te_ctx *te;
    int refs;
    te_dtype dtype;
    int ndim;
    int64_t shape[TE_MAX_DIMS], stride[TE_MAX_DIMS]; /* in elements */
    te__buffer *buffer; /* NULL if the tensor is quantized, or was made without memory (te_tensor_describe) */
    int64_t offset;     /* bytes */
    bool requires_grad;
    bool in_cache;    /* the keys or values are already in a cache, and this tensor has only their shape
                       * (nn/inference.c) */
    bool is_weight;   /* a copy of a parameter; hooks on saved tensors do not get it */
    bool is_gradient; /* a te__var holds this tensor as its gradient, main gradient or decoupled gradient */
    bool sequence_parallel; /* the tensor's gradient covers only one rank's part of the sequence
                             * (te_tensor_sequence_parallel) */
    bool sharded;           /* set by te_tensor_set_sharded */
    bool moves;             /* a parameter whose memory is gathered and released (train/shards.c): copies of it that are
                             * kept between calls would be whole on each rank */
    struct te__shard *shard;  /* how ranks share the parameter (train/shards.c), or NULL */
    struct te__split *split;  /* which part of a whole parameter this rank has; owned. NULL: it has the whole */
    te__var *var;             /* NULL until the tape needs one */
    const te__form *form; /* NULL: a plain tensor */
    struct te__quantized *quantized; /* the data of a quantized tensor (quant/kinds.h), or NULL */
    char *name;
};

/* Where the rows of a cache of keys or values, or of their factors, are: the strides from one page, row and head to the
 * next, in elements. `buffer` is only compared, and may be gone, but that of te__row_write.start is held. */
typedef struct te__rows_at {
    const te__buffer *buffer; /* NULL: none */
    const void *data;
    int64_t page, row, head;
} te__rows_at;
/* An operation that has written new rows to a cache: of sequence b none before row start[b] (ops/early.c). */
typedef struct te__row_write {
    te__rows_at k, v, k_factors, v_factors;
    te__rows_at start, table; /* without strides; table: of pages, or none */
    int64_t page_size, pages_of_each, sequences;
} te__row_write;

/* ---- plans ---- */

/* A plan holds its first launches and arguments inside itself, and further ones in host memory. te_op_joint_gemm has
 * the most workspaces: three products with up to seven each, which are codes, scales, amax and partial amaxes of A,
 * both operands decoded, and partial sums. */
enum { TE__MAX_OPTIONS = 16, TE__OWN_LAUNCHES = 128, TE__MAX_WORKSPACES = 24, TE__PLAN_ARG_BYTES = 12288 };

typedef struct te__option {
    const char *name; /* static */
    int value;
} te__option;

/* A source file of kernels: its path below src/, and its text, which ends with a NUL. */
typedef struct te__kernel_file {
    const char *path, *text;
} te__kernel_file;

typedef struct te__launch {
    const char *family, *kernel; /* src/ops/FAMILY/KERNEL.cu, entry te_KERNEL */
    te__option option[TE__MAX_OPTIONS];
    int num_options;
    unsigned grid[3], threads, shared_bytes;
    unsigned cluster; /* blocks of a cluster; 0: no clusters */
    bool cluster_y;   /* they are neighbours along y, not x */
    bool cooperative; /* all blocks must run at once, because they wait for each other (te_grid_wait); else the launch
                       * fails */
    bool follows;     /* the kernel itself waits for the previous kernel (te_follow), so it may start before that
                       * kernel ends */
    bool overlaps;    /* blocks of the next kernel are to run beside its own: shared memory gets its largest share of
                       * the L1 cache, which stays as it is while a block runs */
    void *function;   /* cuda/launch.c: the kernel, once it is loaded */
    void *args; /* the kernel's argument struct */
    uint32_t args_bytes;
    bool args_on_heap;
} te__launch;

typedef struct te__plan {
    te_ctx *te;
    int sm, num_sms;
    int beside;    /* multiprocessors that a collective on another stream may occupy while this operation runs; 0: no
                    * collective is under way (te_ctx.flights) */
    bool at_once;  /* te__plan_at_once was asked: beside collectives there may be other kernels */
    bool hopper;   /* sm_90a kernels are available */
    bool edits_maps; /* kernels that change tensor maps are available. They need PTX 8.3, so NVRTC 12.3 or later */
    bool baseline; /* only kernels marked te:baseline are available, without options */
    bool explain;  /* the plan will not run, so the addresses in it need not be valid */
    bool native, deterministic;
    void *counter; /* the memory of te__plan_counter */
    void *outside; /* the memory of te__plan_outside */
    te_result result; /* TE_OK, or why planning stopped */
    const char *why;
    size_t workspace_bytes;
    int num_workspaces, num_launches, cap_launches;
    te__launch *launch; /* points to own_launch, or to host memory if there are more launches */
    uint32_t args_used;
    /* te__plan_begin does not clear the fields from here on. */
    te__buffer *workspace[TE__MAX_WORKSPACES];
    te__launch own_launch[TE__OWN_LAUNCHES];
    union {
        unsigned char bytes[TE__PLAN_ARG_BYTES];
        uint64_t align[2];
    } args;
} te__plan;

/* ---- backends ---- */

typedef te_result (*te__op_check_fn)(te_ctx *te, void *args);
typedef te_result (*te__op_cpu_fn)(te_ctx *te, const void *args);
typedef te_result (*te__op_plan_fn)(te__plan *p, const void *args);

/* The properties of an operation that a device needs: one row of the table in ops/table.c. */
typedef struct te__op_info {
    te_op op;
    size_t args_size;
    te__op_check_fn check;
    te__op_cpu_fn cpu;
    te__op_plan_fn plan;
    /* on the CPU: records a call in te->capture; the args have already been checked */
    te_result (*record)(te_ctx *te, const struct te__op_info *op, const void *args);
} te__op_info;

/* The functions by which a context uses its device. */
typedef struct te__device {
    const char *kind; /* "cpu", "cuda" */
    void *(*alloc)(te_ctx *te, size_t bytes); /* NULL when there is none */
    void (*release)(te_ctx *te, void *data, size_t bytes);
    /* copies from host memory; the caller may reuse `host` after the call */
    te_result (*upload)(te_ctx *te, void *dst, const void *host, size_t bytes);
    te_result (*download)(te_ctx *te, void *host, const void *src, size_t bytes); /* waits */
    te_result (*clear)(te_ctx *te, void *dst, size_t bytes);
    te_result (*synchronize)(te_ctx *te);
    void (*memory_info)(te_ctx *te, size_t *free_bytes, size_t *total_bytes); /* NULL: host memory */
    void *(*word)(te_ctx *te, int i); /* returns the address of one of four 8-byte words in device memory; i is 0 to 3.
                                       * The words start as 0 and exist until the context closes. NULL: the device uses
                                       * host memory */
    te_result (*run)(te_ctx *te, const te__op_info *op, const void *args); /* args are checked */
    te_result (*enter)(te_ctx *te, bool *entered); /* makes device calls cheaper until `leave` is called; NULL: not
                                                    * needed */
    void (*leave)(bool entered);
    te_result (*settle)(te_ctx *te); /* queues the launches that wait for the compilation of their kernels; NULL:
                                      * launches never wait */
    te_result (*warm)(te_ctx *te); /* compiles the kernels needed since te_warmup_begin; NULL: the device has no
                                    * kernels */
    void (*close)(te_ctx *te);
    te_result (*capture_begin)(te_ctx *te); /* from now on, te->capture records operations, which do not run */
    te_result (*capture_end)(te_ctx *te, te_graph *g); /* makes g ready to be launched; if g is NULL, drops the recorded
                                                        * operations */
    te_result (*graph_launch)(te_ctx *te, te_graph *g);
    void (*graph_close)(te_ctx *te, te_graph *g);
    /* Streams and events, for core/stream.c and core/transfer.c alone. If `s` is NULL, the stream is the context's
     * own. */
    te_result (*stream_create)(te_ctx *te, void **stream);
    void (*stream_destroy)(te_ctx *te, void *stream);
    te_result (*stream_synchronize)(te_ctx *te, const te__stream *s); /* s is not NULL */
    /* makes later work on the stream wait for the event */
    te_result (*stream_wait)(te_ctx *te, const te__stream *s, void *event);
    te_result (*event_create)(te_ctx *te, void **event);
    void (*event_destroy)(te_ctx *te, void *event);
    te_result (*event_record)(te_ctx *te, void *event, const te__stream *s);
    te_result (*event_wait)(te_ctx *te, void *event, bool *passed); /* sets *passed and does not wait; if `passed` is
                                                                     * NULL, the host waits for the event */
    /* whether the event has passed, or cannot be asked. Any thread may call it; sets no error */
    bool (*event_passed)(te_ctx *te, void *event);
    /* queues a copy between device memory and pinned host memory */
    te_result (*copy)(te_ctx *te, const te__stream *s, void *dst, const void *src, size_t bytes, bool to_host);
    void *(*pinned_alloc)(te_ctx *te, size_t bytes); /* NULL when there is none */
    void (*pinned_release)(te_ctx *te, void *host, size_t bytes);
} te__device;

typedef struct te__cuda te__cuda;           /* cuda/driver.c */
typedef struct te__threads te__threads;     /* cpu/parallel.c */

/* ---- tape ---- */

/* The path of a module. All tape nodes that the module itself records in one forward call share one te__path. */
typedef struct te__path {
    int refs;
    const void *root; /* the root of the module, which may be gone: only compared */
    char text[256];
} te__path;

/* The shape and dtype of a saved tensor that a hook has packed. */
typedef struct te__packed_as {
    te_dtype dtype;
    int ndim;
    int64_t shape[TE_MAX_DIMS];
} te__packed_as;

typedef struct te__node {
    const char *name;
    te__path *path;      /* or NULL */
    uint64_t saved_at;   /* the value of te->writes when the node was recorded */
    te__arena *arena;    /* the arena of the capture in which the node was recorded (a reference), or NULL */
    te__var **inputs, **outputs;
    int num_inputs, num_outputs;
    te_tensor **saved;
    int num_saved;
    te_backward_fn backward;
    void *state;
    size_t state_size;
    void (*release)(te_ctx *te, void *state); /* or NULL */
    bool takes_quantized; /* the backward function accepts quantized gradients; if false, they are decoded first */
    bool foreign; /* made by te_record: the backward function may play parts of its own, and so write gradients of
                   * tensors that `inputs` lacks */
    te_saved_tensors_hooks hooks; /* the hooks that made `packed` */
    void **packed;                /* for each saved tensor a handle from the hooks, or NULL if the tensor is not packed.
                                   * Without hooks, `packed` itself is NULL */
    te__packed_as *packed_as;
} te__node;

/* Nodes in the order of recording. te__tape.root is the segment of the nodes that no backward function records. While a
 * backward function runs, the nodes that it records go into a segment of their own. */
typedef struct te__segment {
    struct te__segment *outer;
    te__node **nodes; /* an entry is NULL if the node's backward function is running or has run */
    int num_nodes, cap_nodes;
    int plays; /* the number of calls of te_backward that are running on this segment */
} te__segment;

enum { TE__MAX_GRAD_REGIONS = 64, TE__MAX_HOOKS = 16 };
typedef struct te__tape {
    te__segment root, *segment; /* segment: the innermost one, which gets new nodes */
    int no_grad, hidden_no_grad; /* If no_grad > 0, nothing is recorded. te_checkpoint adds 1 to both numbers during the
                                  * first call of its function */
    int outer_no_grad[TE__MAX_GRAD_REGIONS], num_grad_regions; /* for each open region of te_enable_grad_begin, the
                                                                * value of no_grad outside of it */
    int plays; /* the number of calls of te_backward that have not returned yet */
    uint64_t passes; /* the number of backward passes for which data_parallel/sharding.c has marked variables
                      * (te__var.pass) */
    te_saved_tensors_hooks hooks[TE__MAX_HOOKS]; /* the hooks of the open regions of te_saved_tensors_begin */
    int num_hooks;
    te__var **fresh; /* leaves that got their first gradient in the current te_backward (references) */
    int num_fresh, cap_fresh;
    int unscoped, unscoped_live; /* used by te__watch_scopes */
    int replays; /* the number of checkpointed functions whose second run is going on */
    int quiet;   /* > 0: the library itself calls te_backward; te__tell_backward_begins and te__tell_backward_ends do
                  * nothing */
    int watched; /* how many rooms hear of each node that te_backward plays */
    te__var **warm_vars; /* leaves that got their first gradient since te_warmup_begin */
    int num_warm_vars, cap_warm_vars;
} te__tape;

enum { TE__MAX_SCOPES = 256 };
typedef struct te__scope {
    int first_tensor; /* index in te->live */
    te__segment *segment;
    int first_node;   /* index in segment->nodes */
} te__scope;

/* ---- graphs ---- */

/* Host state that changes with each launch of a graph, such as an optimizer's count of steps, or the length of a KV
 * cache. */
typedef struct te__graph_part {
    void *owner;
    void *data; /* `bytes` of host memory that the graph owns */
    size_t bytes;
    bool steps; /* true: the part is an optimizer's step. Its launch ends a training step */
    te_result (*before)(te_graph *g, void *owner, void *data); /* called before each launch: refuses it, or writes
                                                                * values such as the learning rate to g->word. May
                                                                * call operations */
    void (*after)(te_graph *g, void *owner, void *data);
    void (*captured)(te_graph *g, void *owner, void *data); /* called when the capture has ended: undoes the changes to
                                                             * `owner`, because the recorded operations have not run */
    void (*failed)(te_graph *g, void *owner, te_result result); /* a launch has failed, maybe before it reached the
                                                                 * device; NULL: nobody needs to know */
} te__graph_part;

/* The size of a graph's state, in 8-byte words of device memory. The host writes them before each launch. Words 0 and 1
 * are the random state. */
enum { TE__GRAPH_WORDS = 512, TE__GRAPH_RNG_WORDS = 2 };

struct te_graph {
    te_ctx *te; /* NULL: the context is gone */
    te_graph *next; /* te->graphs */
    te_allocator host_allocator;
    uint64_t id;
    bool failed; /* a call inside the capture has failed */
    const char *broken; /* why the graph cannot be launched any more, or NULL */
    te__arena *arena;
    te__buffer **held; /* buffers that are older than the capture, and that its operations use. At the end of the
                        * capture, the num_written buffers that the operations write are moved to the front */
    int num_held, cap_held, num_written;
    te_tensor *state, *rng; /* state: u8 [8 * TE__GRAPH_WORDS]; rng: its first two words as i64 [2] */
    uint64_t word[TE__GRAPH_WORDS];
    int num_words;
    bool draws; /* the operations of the graph use random numbers */
    uint64_t rng_begin, rng_used;
    uint64_t tracker_begin[TE_MAX_RNG_TRACKERS]; /* rng_begin of each named state */
    te__graph_part *parts;
    int num_parts, cap_parts;
    te__var **vars; /* leaves that got their first gradient, or that of their slice, in the capture */
    int num_vars, cap_vars;
    struct te__call *records; /* on the CPU: the calls (cpu/device.c) */
    int num_records, cap_records;
    void *exec; /* on CUDA: the CUgraphExec */
    uint64_t launches; /* the number of kernel launches in one launch of the graph */
    te__row_write rows; /* the latest operation of the capture that wrote rows to a cache */
};

/* ---- the context ---- */

/* A named random state. */
typedef struct te__rng_tracker {
    char name[64];
    uint64_t seed, offset, first_seed;
} te__rng_tracker;
enum { TE__MAX_FORKS = 32 }; /* the largest number of open regions of te_rng_fork_begin */
/* All random states of a context. `fork` and the entries of `outer_fork` name one of them: 0 is the context's own
 * state, and i + 1 is the named state tracker[i]. */
typedef struct te__rng_state {
    uint64_t seed, offset;         /* set only in copies of te->rng: the values of te->seed and te->rng_offset */
    uint64_t own_seed, own_offset; /* the context's own random state, while a named state is used in its place */
    te__rng_tracker tracker[TE_MAX_RNG_TRACKERS];
    int num_trackers;
    int fork; /* the random state in use */
    int outer_fork[TE__MAX_FORKS], num_forks; /* for each open te_rng_fork_begin, the value of `fork` before it */
} te__rng_state;

enum { TE__MAX_THREADS = 64 };

/* ---- rooms above ---- */

/* The text of te_report. It is cut off where the caller's buffer ends, but `used` counts the whole text. */
typedef struct te__report_text {
    char *buffer;
    size_t size, used;
} te__report_text;

/* The size of the state that a room (te__room, below) keeps in each context. The bytes are zero when the context opens.
 * te__slot_of returns a pointer to the state. */
typedef struct te__slot {
    size_t bytes;
} te__slot;

/* A room: code above core/ that keeps state in a context. Functions that the room does not need are NULL. The table of
 * rooms is in open.c. */
typedef struct te__room {
    const te__slot *slot;
    void (*open)(te_ctx *te);    /* called when the device is open */
    void (*close)(te_ctx *te);   /* called when the context closes; the device and all tensors still exist */
    te_result (*capture)(te_ctx *te, bool begins); /* called before a capture begins or ends; may refuse with an
                                                    * error */
    te_result (*step_begins)(te_ctx *te);          /* called where a training step may begin, or already runs */
    te_result (*step_undone)(te_ctx *te);          /* called by te_clear_error; undoes a training step that has
                                                    * failed */
    void (*reads)(te_ctx *te, te_tensor *x);       /* called during the first call of a checkpointed function, each time
                                                    * an operation in it takes an input x; x may be NULL */
    /* Called before an outermost te_backward runs the backward functions of the nodes of s. The pass begins at the
     * `count` tensors y. */
    void (*backward_begins)(te_ctx *te, const te__segment *s, te_tensor *const *y, int count);
    void (*backward_done)(te_ctx *te); /* called when the outermost te_backward has succeeded */
    /* Called when a backward pass ends. `result` is the pass's result. m is the module of a te_backward_dw, or NULL.
     * Returns `result`, or the room's own error. */
    te_result (*backward_ends)(te_ctx *te, const te_module *m, te_result result);
    /* Called before and after the backward function of each node runs, if te->tape.watched is not 0. */
    te_result (*node_begins)(te_ctx *te, te__node *node);
    te_result (*node_ends)(te_ctx *te, te__node *node);
    void (*report)(te_ctx *te, te__report_text *t); /* adds lines to te_report */
} te__room;
/* Initializes a te__room that has no functions except `open` and `close`. */
#define TE__ROOM(slot, open, close) {slot, open, close, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL}
enum { TE__MAX_ROOMS = 16 };

enum { TE__MAX_USED = 8 };

struct te_ctx {
    te_result error_code;
    uint64_t errors; /* the number of the present error, or of the next one; they count from 1 */
    char *error;
    char module_path[256]; /* the path of the module whose forward is running; used in messages */
    te_log_fn log;
    void *log_user;
    te_log_level log_level;
    te_allocator host_allocator, device_allocator;
    char device_name[16];
    const te__device *device;
    int regions; /* the number of te__device_enter calls that te__device_leave has not ended yet. Each such pair of
                  * calls surrounds a forward, a backward or an optimizer step */
    te__cuda *cuda;       /* NULL on the CPU */
    te__threads *threads; /* NULL: one thread */
    int cpu_threads;
    bool debug_sync; /* environment variable TE_DEBUG_SYNC */
    bool no_cubin_cache;
    bool exact_f32;
    te__pool pool;
    te_tensor **live; /* the tensors that scopes will release */
    int num_live, cap_live;
    te__scope scopes[TE__MAX_SCOPES];
    int num_scopes;
    te__tape tape;
    te__node *playing; /* the node whose backward function runs, or NULL */
    struct te__deferred *deferred; /* tape/deferred.c: the first of a list */
    te__path *path;    /* a copy of module_path, which nodes share; NULL until a node needs it */
    uint64_t writes;   /* the number of writes to all buffers so far, used as a clock */
    uint64_t seed, rng_offset; /* the random state in use */
    te__rng_state rng; /* the named states, and which of them is in use */
    bool empty_is_unallocated; /* a tensor without elements counts as one without memory
                                * (te_set_empty_is_unallocated) */
    bool in_step, step_failed; /* a training step is going on (from an outermost te_autocast_begin to a
                                * te_optimizer_step). step_failed: the training step has failed */
    bool warming;           /* between te_warmup_begin and te_warmup_end */
    te_jit_stats jit_stats;
    int64_t live_buffers;
    te__buffer *buffers; /* every buffer of the context */
    te__stream *streams;
    te__event *spare_events;
    te__pinned *pinned;
    struct te__offload *offload; /* tape/offload.c; NULL before the first region */
    te__block *blocks;   /* every piece of host memory of the context */
    te__closable *closables;
    te__waiter *waiters;
    int shared; /* groups of several ranks that exist */
    int flights; /* collectives that run beside the context's own work (dist/flight.c) */
    /* The groups whose collectives were called: used: by the outermost forward that runs; loose: outside of modules,
     * since the last backward pass. The oldest are forgotten when there are too many. */
    struct te_group *used[TE__MAX_USED], *loose[TE__MAX_USED];
    const void *root; /* the root of the module whose outermost forward runs, or NULL; only compared */
    int64_t process_id; /* the process that made the context */
    int forks;          /* the value of te__forks when the context was made */
    te_trace_fn trace; /* set by te_set_trace */
    void *trace_user;
    bool tracing; /* the trace hook is running */
    te_graph *capture; /* the graph between te_graph_begin and te_graph_end; else NULL */
    te_graph *graphs;  /* every graph of the context that exists */
    uint64_t captures; /* the number of captures so far, which is also the id of the latest one */
    const te__room *const *rooms; /* open.c */
    int num_rooms;
    void *state[TE__MAX_ROOMS]; /* the state of each room */
};
