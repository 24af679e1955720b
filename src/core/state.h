/* core/state.h: the structs behind the handles: context, tensor, plan, tape. Knows no operation and no driver call. */

/* ---- objects that a context has given out ---- */

typedef struct te__block te__block; /* core/error.c: the header in front of each piece of host memory */

/* A field of every object that te_ctx_destroy must close if the program has not (modules, groups, open files): freeing
 * the memory of such an object is not enough. */
typedef struct te__closable {
    struct te__closable *next, **at; /* at: points to the pointer to this; NULL: in no list */
    const char *kind;             /* "module" */
    void (*close)(void *owner);
    void *owner;
} te__closable;

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
    const te__stream *stream; /* the stream of the last record; only compared, never followed; NULL: the context's
                               * own */
    bool pending;             /* recorded, and perhaps not passed yet */
    bool awaited;             /* the context's own stream waits for it, so whatever is queued there from then on runs
                               * behind the event */
} te__event;

/* A block of pinned host memory, for copies on a second stream. */
typedef struct te__pinned {
    struct te__pinned *next; /* te->pinned */
    void *data;
    size_t capacity;
    bool taken;
    te__event *used; /* the event behind the last copy to or from the block (a reference), or NULL */
} te__pinned;

/* ---- memory ---- */

/* A write to a part of a buffer. */
typedef struct te__write {
    uint64_t at;        /* the value of te->writes at the write */
    int64_t begin, end; /* bytes */
} te__write;

/* A block of device memory with a reference count. `version` counts the writes, so that a cached quantized copy can
 * tell whether it is stale. saved_at, written_at and whole_at are values of te->writes, by which the tape finds a saved
 * tensor that was written too early. */
typedef struct te__buffer {
    te_ctx *te;
    struct te__buffer *next, **at; /* te->buffers; at: points to the pointer to this */
    int refs;
    void *data;
    size_t bytes;    /* as asked for */
    size_t capacity; /* as taken from the pool; 0: foreign memory, not te.h's */
    uint64_t version;
    void (*release)(void *user); /* of foreign memory, or NULL */
    void *user;
    struct te__arena *arena; /* the arena that owns the memory; NULL: the context's pool */
    te__event *used; /* the event behind the last copy of it on another stream (a reference), or NULL */
    struct te__offloaded *offloaded; /* tape/offload.c: its copy in host memory, or NULL */
    uint64_t kept_version; /* tape/offload.c leaves this version on the device */
    uint64_t held, written;  /* the ids of the last capture that holds it, and of the last that wrote it */
    uint64_t saved_at;         /* when a tape node last saved a tensor of it; 0: never */
    uint64_t written_at, whole_at; /* the last write; the last write that has no entry in `writes` */
    te__write *writes;         /* writes to parts of it since a node has saved it, the oldest first */
    int num_writes, cap_writes;
} te__buffer;

/* A block of the pool that is free, in a list of blocks of the same capacity; or a released block that another stream
 * still uses, in the pool's list `pending`. */
typedef struct te__free_block {
    void *data;
    struct te__free_block *next;
    size_t capacity; /* capacity and used (a reference to the event): set for pending blocks only */
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

/* The memory of a graph. Blocks that were free when the capture ended stay in the arena, since only the graph's kernels
 * may write there. The arena outlives the graph as long as buffers of the arena live; blocks released after the graph's
 * end go to the context's pool. */
typedef struct te__arena {
    int refs; /* one for the graph, and one for every living buffer of the arena */
    bool open; /* the graph exists */
    uint64_t launches; /* launches of the graph; each writes the buffers that outlived the capture */
    uint64_t launched_at; /* te->writes at the last launch */
    te__pool pool;     /* only `lists` and `spare` are used */
} te__arena;

/* The copy of a buffer in host memory, for tape nodes that have saved tensors of it (tape/offload.c). */
typedef struct te__offloaded {
    struct te__offloaded *older, *newer; /* neighbours in the order in which nodes last saved the buffers */
    int refs;          /* saved tensors that need the copy */
    te__buffer *buffer; /* the buffer in device memory: a reference while `inside`; otherwise only watched, and NULL
                         * once the buffer is freed or written */
    uint64_t version;  /* the version of `buffer` that has these bytes */
    bool inside;       /* inside the window of tape/offload.c */
    size_t bytes;
    te__pinned *host;
} te__offloaded;

/* ---- tensors ---- */

enum { TE__MAX_PARTS = 6 };

/* The tape's record of a tensor: a slot for its gradient. Views of one value have variables of their own. */
typedef struct te__var {
    int refs;
    bool leaf;       /* a parameter, or an input marked by the user: keeps its gradient */
    bool played;     /* the node that made the tensor has been played backwards and is gone */
    bool fresh;      /* in te->tape.fresh */
    bool passing;    /* made inside a backward function: an outer te_backward that fails need not drop a gradient that
                      * an inner one has begun here */
    uint64_t pass;   /* the number (te->tape.passes) of the last backward pass that could reach it */
    te_tensor *grad; /* of a leaf: the sum so far; else: the gradient on its way, during te_backward */
    te_tensor *main_grad, *decoupled_grad;
} te__var;

/* Functions that handle a tensor that is not plain, such as a quantized one. The room (a part of the library above
 * core/) that made the tensor supplies them. */
typedef struct te__form {
    /* Stores into `slot` the addresses of the plain tensors that hold the value of x (some of the tensors may be NULL).
     * Returns their number. */
    int (*parts)(te_tensor *x, te_tensor **slot[TE__MAX_PARTS]);
    te_tensor *(*decode)(te_tensor *x, te_dtype dtype); /* returns the value as a plain tensor, recorded on the tape */
    bool (*share)(const te_tensor *x, te_tensor *y);    /* gives y, a tensor without memory, the value of x; false: out
                                                         * of memory */
    void (*release)(te_tensor *x);                      /* x is being freed */
} te__form;

struct te_tensor {
    te_ctx *te;
    int refs;
    te_dtype dtype;
    int ndim;
    int64_t shape[TE_MAX_DIMS], stride[TE_MAX_DIMS]; /* in elements */
    te__buffer *buffer; /* NULL: x is quantized, or a shape without memory (te_tensor_describe) */
    int64_t offset;     /* bytes */
    bool requires_grad;
    bool is_weight;   /* a copy of a parameter: not offered to hooks on saved tensors */
    bool is_gradient; /* a variable keeps this tensor as gradient, main gradient or decoupled gradient */
    bool sequence_parallel; /* its gradient covers one rank's part of the sequence (te_tensor_sequence_parallel) */
    bool sharded;           /* set by te_tensor_set_sharded */
    te__var *var;             /* NULL until the tape needs one */
    const te__form *form; /* NULL: a plain tensor */
    struct te__quantized *quantized; /* quant/kinds.h: the data of a quantized tensor's form, or NULL */
    char *name;
};

/* ---- plans ---- */

/* The limits of a plan. A plan holds its first launches and arguments inside itself; the further ones (of lists of
 * thousands of tensors) lie in host memory. */
enum { TE__MAX_OPTIONS = 12, TE__OWN_LAUNCHES = 128, TE__MAX_WORKSPACES = 16, TE__PLAN_ARG_BYTES = 12288 };

typedef struct te__option {
    const char *name; /* static */
    int value;
} te__option;

/* A source text of kernels: its path below src/, and the text, which ends with a 0. */
typedef struct te__kernel_file {
    const char *path, *text;
} te__kernel_file;

typedef struct te__launch {
    const char *family, *kernel; /* src/ops/FAMILY/KERNEL.cu, entry te_KERNEL */
    te__option option[TE__MAX_OPTIONS];
    int num_options;
    unsigned grid[3], threads, shared_bytes;
    unsigned cluster; /* blocks of a cluster along x; 0: no clusters */
    bool cooperative; /* all blocks must run at once, else the launch fails (for te_grid_wait) */
    bool follows;     /* the kernel calls te_follow (cuda/kernels.c), so it may start before the previous kernel ends */
    void *function;   /* cuda/launch.c: the kernel, once it is loaded */
    void *args; /* the kernel's argument struct */
    uint32_t args_bytes;
    bool args_on_heap;
} te__launch;

typedef struct te__plan {
    te_ctx *te;
    int sm, num_sms;
    bool hopper;   /* sm_90a kernels are available */
    bool edits_maps; /* kernels that change tensor maps are available: they need PTX 8.3, which NVRTC has from 12.3
                      * on */
    bool baseline; /* only kernels marked te:baseline are available, and these without options */
    bool explain;  /* the plan will not run, so its addresses mean nothing */
    bool native, deterministic;
    void *counter; /* the memory of te__plan_counter */
    void *outside; /* the memory of te__plan_outside */
    te_result result; /* TE_OK, or why planning stopped */
    const char *why;
    size_t workspace_bytes;
    int num_workspaces, num_launches, cap_launches;
    te__launch *launch; /* points to own_launch, or to host memory when there are more */
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

/* An operation as devices see it: a row of ops/table.c. */
typedef struct te__op_info {
    te_op op;
    size_t args_size;
    te__op_check_fn check;
    te__op_cpu_fn cpu;
    te__op_plan_fn plan;
    /* for the CPU: stores a call with checked args in te->capture */
    te_result (*record)(te_ctx *te, const struct te__op_info *op, const void *args);
} te__op_info;

/* The functions by which a context uses its device. */
typedef struct te__device {
    const char *kind; /* "cpu", "cuda" */
    void *(*alloc)(te_ctx *te, size_t bytes); /* NULL when there is none */
    void (*release)(te_ctx *te, void *data, size_t bytes);
    /* the caller may reuse `host` on return */
    te_result (*upload)(te_ctx *te, void *dst, const void *host, size_t bytes);
    te_result (*download)(te_ctx *te, void *host, const void *src, size_t bytes); /* waits */
    te_result (*clear)(te_ctx *te, void *dst, size_t bytes);
    te_result (*synchronize)(te_ctx *te);
    void (*memory_info)(te_ctx *te, size_t *free_bytes, size_t *total_bytes); /* NULL: host memory */
    void *(*word)(te_ctx *te, int i); /* returns the i-th of 4 words of device memory: 8 bytes, 0 at first, kept until
                                       * the end; NULL: the device uses host memory */
    te_result (*run)(te_ctx *te, const te__op_info *op, const void *args); /* args are checked */
    te_result (*enter)(te_ctx *te, bool *entered); /* makes the calls until `leave` cheaper; NULL: not needed */
    void (*leave)(bool entered);
    te_result (*settle)(te_ctx *te); /* queues the launches that wait for their kernels; NULL: launches never wait */
    te_result (*warm)(te_ctx *te); /* compiles the kernels noted since te_warmup_begin; NULL: the device has no
                                    * kernels */
    void (*close)(te_ctx *te);
    te_result (*capture_begin)(te_ctx *te); /* operations are noted in te->capture from here on, and not run */
    te_result (*capture_end)(te_ctx *te, te_graph *g); /* makes g ready to be launched; g NULL: drops the noted
                                                        * operations */
    te_result (*graph_launch)(te_ctx *te, te_graph *g);
    void (*graph_close)(te_ctx *te, te_graph *g);
    /* Streams and events: only core/stream.c and core/transfer.c call these. `s` NULL: the context's own stream. */
    te_result (*stream_create)(te_ctx *te, void **stream);
    void (*stream_destroy)(te_ctx *te, void *stream);
    te_result (*stream_synchronize)(te_ctx *te, const te__stream *s); /* s is not NULL */
    /* has later work on the stream run after the event */
    te_result (*stream_wait)(te_ctx *te, const te__stream *s, void *event);
    te_result (*event_create)(te_ctx *te, void **event);
    void (*event_destroy)(te_ctx *te, void *event);
    te_result (*event_record)(te_ctx *te, void *event, const te__stream *s);
    te_result (*event_wait)(te_ctx *te, void *event, bool *passed); /* sets *passed without waiting; passed NULL: the
                                                                     * host waits for the event */
    /* queues a copy between device memory and pinned host memory */
    te_result (*copy)(te_ctx *te, const te__stream *s, void *dst, const void *src, size_t bytes, bool to_host);
    void *(*pinned_alloc)(te_ctx *te, size_t bytes); /* NULL when there is none */
    void (*pinned_release)(te_ctx *te, void *host, size_t bytes);
} te__device;

typedef struct te__cuda te__cuda;           /* cuda/driver.c */
typedef struct te__threads te__threads;     /* cpu/parallel.c */

/* ---- tape ---- */

/* The path of the module whose forward recorded nodes: these nodes share one text. */
typedef struct te__path {
    int refs;
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
    uint64_t saved_at;   /* te->writes when it was recorded */
    te__arena *arena;    /* the arena of the capture in which it was recorded (a reference), or NULL */
    te__var **inputs, **outputs;
    int num_inputs, num_outputs;
    te_tensor **saved;
    int num_saved;
    te_backward_fn backward;
    void *state;
    size_t state_size;
    void (*release)(te_ctx *te, void *state); /* or NULL */
    bool takes_quantized; /* the backward function takes quantized gradients; for other nodes they are decoded */
    te_saved_tensors_hooks hooks; /* the hooks that made `packed` */
    void **packed;                /* [num_saved] handles of packed tensors, NULL where a tensor was not packed; or NULL:
                                   * no hooks */
    te__packed_as *packed_as;
} te__node;

/* A list of nodes in the order of recording. The context has one segment. A backward function records into a segment of
 * its own, which is played or dropped before the function's node is done. */
typedef struct te__segment {
    struct te__segment *outer;
    te__node **nodes; /* NULL: the node is being played, or has been */
    int num_nodes, cap_nodes;
    int plays; /* calls of te_backward that are playing this segment */
} te__segment;

enum { TE__MAX_GRAD_REGIONS = 64, TE__MAX_HOOKS = 16 };
typedef struct te__tape {
    te__segment root, *segment; /* segment: the innermost one, into which nodes are recorded */
    int no_grad, hidden_no_grad; /* hidden_no_grad: the part of no_grad that comes from first runs of te_checkpoint, in
                                  * which a training step goes on */
    int outer_no_grad[TE__MAX_GRAD_REGIONS], num_grad_regions; /* the value of no_grad outside of each open
                                                                * te_enable_grad_begin */
    int plays; /* calls of te_backward that are under way */
    uint64_t passes; /* backward passes whose reach data_parallel/sharding.c has marked */
    te_saved_tensors_hooks hooks[TE__MAX_HOOKS]; /* of the open regions of te_saved_tensors_begin */
    int num_hooks;
    te__var **fresh; /* leaves that got their first gradient in the te_backward under way (references) */
    int num_fresh, cap_fresh;
    int unscoped, unscoped_live; /* used by te__watch_scopes */
    int replays; /* second runs of checkpointed functions that are under way */
    int quiet;   /* > 0: rooms are not told of backward passes, since these are not the program's own */
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

/* A part of a graph: host state that changes with each launch, such as an optimizer's count of steps. The functions get
 * `owner` and `data`. */
typedef struct te__graph_part {
    void *owner;
    void *data; /* `bytes` of host memory that the graph owns */
    size_t bytes;
    bool random; /* true: a random state; false: a step of an optimizer */
    te_result (*before)(te_graph *g, void *owner, void *data); /* before a launch: fills the part's words in g->word,
                                                                * and may run operations */
    void (*after)(te_graph *g, void *owner, void *data);
    void (*captured)(te_graph *g, void *owner, void *data); /* the capture has ended: takes back the counting done
                                                             * during it */
} te__graph_part;

/* The size of a graph's state in 8-byte words. The state is an array of numbers in device memory that the host writes
 * before each launch. Words 0 and 1 are the random state. */
enum { TE__GRAPH_WORDS = 512, TE__GRAPH_RNG_WORDS = 2 };

struct te_graph {
    te_ctx *te; /* NULL: the context is gone */
    te_graph *next; /* te->graphs */
    te_allocator host_allocator;
    uint64_t id;
    bool failed; /* a call inside the capture has failed */
    const char *broken; /* the reason why it cannot be launched any more, or NULL */
    te__arena *arena;
    te__buffer **held; /* buffers that existed before the capture and that the captured operations use; the
                        * operations write the first num_written of them */
    int num_held, cap_held, num_written;
    te_tensor *state, *rng; /* state: u8 [8 * TE__GRAPH_WORDS]; rng: its first two words as i64 [2] */
    uint64_t word[TE__GRAPH_WORDS];
    int num_words;
    bool draws; /* its operations use random numbers */
    uint64_t rng_begin, rng_used;
    uint64_t tracker_begin[TE_MAX_RNG_TRACKERS]; /* rng_begin of each named state */
    te__graph_part *parts;
    int num_parts, cap_parts;
    te__var **vars; /* leaves that got their first gradient in the capture */
    int num_vars, cap_vars;
    struct te__call *records; /* on the CPU: the calls (cpu/device.c) */
    int num_records, cap_records;
    void *exec; /* on CUDA: the CUgraphExec */
    uint64_t launches; /* the number of kernel launches in one launch of the graph */
};

/* ---- the context ---- */

/* A named random state. */
typedef struct te__rng_tracker {
    char name[64];
    uint64_t seed, offset, first_seed;
} te__rng_tracker;
enum { TE__MAX_FORKS = 32 }; /* the most regions of te_rng_fork_begin that may be open */
/* All random states of a context. A copy lets a call that fails put them back, and lets a function run again with the
 * same numbers. Regions of te_rng_fork_begin name trackers by their index. */
typedef struct te__rng_state {
    uint64_t seed, offset;         /* in a copy: te->seed and te->rng_offset */
    uint64_t own_seed, own_offset; /* the context's own state, while a named state is in force */
    te__rng_tracker tracker[TE_MAX_RNG_TRACKERS];
    int num_trackers;
    int fork; /* the named state in force, counted from 1; 0: the context's own */
    int outer_fork[TE__MAX_FORKS], num_forks; /* the value of `fork` outside of each open region */
} te__rng_state;

enum { TE__MAX_THREADS = 64 };

/* ---- rooms above ---- */

/* The text of te_report, which is cut where the caller's buffer ends; `used` counts on. */
typedef struct te__report_text {
    char *buffer;
    size_t size, used;
} te__report_text;

/* The size of the state that a room keeps in each context. The state is cleared when the context opens, and te__slot_of
 * returns it. */
typedef struct te__slot {
    size_t bytes;
} te__slot;

/* A room: a part of the library above core/ that keeps state in a context and is told of events. Each function is
 * called when its event happens; NULL: the room does not need it. The table of rooms is in open.c. */
typedef struct te__room {
    const te__slot *slot;
    void (*open)(te_ctx *te);    /* the device is open */
    void (*close)(te_ctx *te);   /* the context closes; the device and all tensors still exist */
    te_result (*capture)(te_ctx *te, bool begins); /* a capture is about to begin or end: may refuse with an error */
    te_result (*step_begins)(te_ctx *te);          /* a training step may begin here, or is already under way */
    te_result (*step_undone)(te_ctx *te);          /* te_clear_error: undoes a training step that has failed */
    void (*reads)(te_ctx *te, te_tensor *x);       /* in the first run of a checkpoint: a function takes x (or NULL) */
    /* an outermost te_backward begins, on `count` tensors y of segment s */
    void (*backward_begins)(te_ctx *te, const te__segment *s, te_tensor *const *y, int count);
    void (*backward_done)(te_ctx *te); /* the outermost te_backward has succeeded */
    /* A backward pass ends. result: of the pass. m: the module of a te_backward_dw; NULL: a te_backward. Returns
     * `result`, or the room's own error. */
    te_result (*backward_ends)(te_ctx *te, const te_module *m, te_result result);
    void (*report)(te_ctx *te, te__report_text *t); /* adds lines to te_report */
} te__room;
/* Initializes a room that is told only of the opening and closing of contexts. */
#define TE__ROOM(slot, open, close) {slot, open, close, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL}
enum { TE__MAX_ROOMS = 16 };

struct te_ctx {
    te_result error_code;
    char *error;
    char module_path[256]; /* the path of the module whose forward runs, for messages */
    te_log_fn log;
    void *log_user;
    te_log_level log_level;
    te_allocator host_allocator, device_allocator;
    char device_name[16];
    const te__device *device;
    int regions; /* calls of te__device_enter that te__device_leave has not ended yet: a forward, a backward, an
                  * optimizer step */
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
    te__path *path;    /* a copy of module_path that nodes share; NULL until a node needs it */
    uint64_t writes;   /* the number of writes to any buffer so far; serves as a clock */
    uint64_t seed, rng_offset; /* the random state in force */
    te__rng_state rng; /* the named states, and the number of the one in force */
    bool exporting;  /* onnx/export.c is noting the calls for a file, which must also work for inputs of other sizes */
    bool empty_is_unallocated; /* te_set_empty_is_unallocated: a tensor without elements counts as one without memory */
    bool in_step, step_failed; /* a step of training, from an outermost te_autocast_begin to a te_optimizer_step */
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
    int64_t process_id; /* of the process that made the context */
    int forks;          /* te__forks of that process when it made the context */
    te_trace_fn trace; /* set by te_set_trace */
    void *trace_user;
    bool tracing; /* the trace hook is running */
    te_graph *capture; /* the graph between te_graph_begin and te_graph_end; else NULL */
    te_graph *graphs;  /* every graph of the context that exists */
    uint64_t captures; /* the number of captures so far, and the id of the latest */
    const te__room *const *rooms; /* open.c */
    int num_rooms;
    void *state[TE__MAX_ROOMS]; /* the state of each room */
};
