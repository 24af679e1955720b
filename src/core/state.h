/* core/state.h: the structs behind the handles: context, tensor, plan, tape. Knows no operation and no driver call. */

/* ---- what a context has given out ---- */

typedef struct te__block te__block; /* core/error.c: in front of each piece of host memory */

/* A field of every object that te_ctx_destroy closes if its owner has not (modules, groups, open files): closing one
 * takes more than freeing its memory. */
typedef struct te__closable {
    struct te__closable *next, **at; /* at: the pointer to this; NULL: in no list */
    const char *kind;             /* "module" */
    void (*close)(void *owner);
    void *owner;
} te__closable;

/* ---- streams ---- */

/* A stream beside the context's own one (core/stream.c). */
typedef struct te__stream {
    te_ctx *te;
    struct te__stream *next; /* te->streams */
    void *handle;            /* the device's */
} te__stream;

/* A point in the work of a stream. */
typedef struct te__event {
    te_ctx *te;
    struct te__event *next; /* te->spare_events */
    int refs;
    void *handle;
    const te__stream *stream; /* where it was recorded: compared, never followed; NULL: the context's own */
    bool pending;             /* recorded, and not known to have passed */
    bool awaited;             /* the context's own stream has been told to wait for it: whatever comes there from then
                               * on runs behind it */
} te__event;

/* A block of pinned host memory, for copies on a second stream. */
typedef struct te__pinned {
    struct te__pinned *next; /* te->pinned */
    void *data;
    size_t capacity;
    bool taken;
    te__event *used; /* behind the last copy to or from it (a reference), or NULL */
} te__pinned;

/* ---- memory ---- */

/* A write to a part of a buffer. */
typedef struct te__write {
    uint64_t at;        /* te->writes */
    int64_t begin, end; /* bytes */
} te__write;

/* A block of device memory with a reference count. `version` counts the writes, so that a cached quantized copy can
 * tell whether it is stale; the three times, in te->writes, tell the tape. */
typedef struct te__buffer {
    te_ctx *te;
    struct te__buffer *next, **at; /* te->buffers; at: the pointer to this */
    int refs;
    void *data;
    size_t bytes;    /* asked for */
    size_t capacity; /* taken from the pool; 0: the memory is not te.h's */
    uint64_t version;
    void (*release)(void *user); /* foreign memory */
    void *user;
    struct te__arena *arena; /* whose memory it is; NULL: the context's pool's */
    te__event *used; /* behind the last copy of it on another stream (a reference), or NULL */
    struct te__offloaded *offloaded; /* tape/offload.c: its copy in host memory, or NULL */
    uint64_t kept_version; /* tape/offload.c has decided to leave this version on the device */
    uint64_t held, written;  /* the last captures that hold it, and that wrote it */
    uint64_t saved_at;         /* when a tape node last saved a tensor of it; 0: never */
    uint64_t written_at, whole_at; /* the last write, and the last one that is not among `writes` */
    te__write *writes;         /* those to parts since nodes look at it, the oldest first */
    int num_writes, cap_writes;
} te__buffer;

/* A free block lies in a list of blocks of the same capacity; a block that another stream still uses lies in the pool's
 * `pending`. */
typedef struct te__free_block {
    void *data;
    struct te__free_block *next;
    size_t capacity; /* capacity and event (a reference): of pending blocks alone */
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

/* The memory of a graph. Blocks that were free when the capture ended stay free, since the graph's kernels alone write
 * there. The arena outlives the graph as long as buffers of it live; when they are released, their blocks go to the
 * context's pool. */
typedef struct te__arena {
    int refs; /* the graph and every living buffer */
    bool open; /* the graph exists */
    uint64_t launches; /* each writes the buffers that outlived the capture */
    uint64_t launched_at; /* the last one, in te->writes */
    te__pool pool;     /* its lists */
} te__arena;

/* The copy of a buffer in host memory, for tape nodes that have saved tensors of it (tape/offload.c). */
typedef struct te__offloaded {
    struct te__offloaded *older, *newer; /* in the order in which nodes last saved it */
    int refs;          /* saved tensors that wait for it */
    te__buffer *buffer; /* its device memory: a reference while `inside`; otherwise watched alone, and NULL once it is
                         * freed or written */
    uint64_t version;  /* of buffer, when it held these bytes */
    bool inside;       /* the window */
    size_t bytes;
    te__pinned *host;
} te__offloaded;

/* ---- tensors ---- */

enum { TE__MAX_PARTS = 6 };

/* The tape's record of a tensor: a slot for its gradient. Views of one value have variables of their own. */
typedef struct te__var {
    int refs;
    bool leaf;       /* gradients stay here: a parameter or an input marked by the user */
    bool played;     /* the node that made it has been played backwards and is gone */
    bool fresh;      /* in te->tape.fresh */
    bool passing;    /* made while a backward pass ran: what that one began in it is of no use to anybody else */
    uint64_t pass;   /* the last backward pass, by te->tape.passes, that could reach it */
    te_tensor *grad; /* of a leaf: gathered so far; else: on its way, during te_backward */
    te_tensor *main_grad, *decoupled_grad;
} te__var;

/* The form of a tensor that is not plain, such as a quantized one: functions of the room that made it. */
typedef struct te__form {
    /* The addresses of the plain tensors that hold the value of x, of which some may be NULL. Returns their number. */
    int (*parts)(te_tensor *x, te_tensor **slot[TE__MAX_PARTS]);
    te_tensor *(*decode)(te_tensor *x, te_dtype dtype); /* the value as a plain tensor, on the tape */
    bool (*share)(const te_tensor *x, te_tensor *y);    /* gives y, a shell, the value of x; false: no memory */
    void (*release)(te_tensor *x);                      /* x goes */
} te__form;

struct te_tensor {
    te_ctx *te;
    int refs;
    te_dtype dtype;
    int ndim;
    int64_t shape[TE_MAX_DIMS], stride[TE_MAX_DIMS]; /* in elements */
    te__buffer *buffer; /* NULL: quantized; or of te_tensor_describe, a shape without memory */
    int64_t offset;     /* bytes */
    bool requires_grad;
    bool is_weight;   /* a copy of a parameter: hooks on saved tensors are not offered it */
    bool is_gradient; /* a variable keeps it, as its gradient or main gradient */
    bool sequence_parallel; /* its gradient is one rank's part (te_tensor_sequence_parallel) */
    bool sharded;           /* te_tensor_set_sharded */
    te__var *var;             /* NULL until the tape needs one */
    const te__form *form; /* NULL: a plain tensor */
    struct te__quantized *quantized; /* quant/kinds.h: of its form, or NULL */
    char *name;
};

/* ---- plans ---- */

/* A plan holds its first launches and arguments itself; those of lists of thousands of tensors go to memory of the
 * host. */
enum { TE__MAX_OPTIONS = 12, TE__OWN_LAUNCHES = 128, TE__MAX_WORKSPACES = 16, TE__PLAN_ARG_BYTES = 12288 };

typedef struct te__option {
    const char *name; /* static */
    int value;
} te__option;

/* A text that kernels are made of, by its path below src/; the text ends with a 0. */
typedef struct te__kernel_file {
    const char *path, *text;
} te__kernel_file;

typedef struct te__launch {
    const char *family, *kernel; /* src/ops/FAMILY/KERNEL.cu, entry te_KERNEL */
    te__option option[TE__MAX_OPTIONS];
    int num_options;
    unsigned grid[3], threads, shared_bytes;
    unsigned cluster; /* blocks of a cluster along x; 0: none */
    bool cooperative; /* all blocks run at once, or the launch fails: for te_grid_wait */
    bool follows;     /* cuda/kernels.c: the kernel calls te_follow, so it may start while the one before ends */
    void *function;   /* cuda/launch.c: the kernel, once it is loaded */
    void *args; /* the kernel's argument struct */
    uint32_t args_bytes;
    bool args_on_heap;
} te__launch;

typedef struct te__plan {
    te_ctx *te;
    int sm, num_sms;
    bool hopper;   /* sm_90a kernels are available */
    bool edits_maps; /* so are kernels that change tensor maps: PTX 8.3, which NVRTC has from 12.3 on */
    bool baseline; /* only kernels marked te:baseline are available, without options */
    bool explain;  /* nothing will run: addresses mean nothing */
    bool native, deterministic;
    void *counter; /* te__plan_counter */
    void *outside; /* te__plan_outside */
    te_result result; /* TE_OK, or why planning stopped */
    const char *why;
    size_t workspace_bytes;
    int num_workspaces, num_launches, cap_launches;
    te__launch *launch; /* own_launch, or memory of the host when there are more */
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

/* An operation, for devices: a row of ops/table.c. */
typedef struct te__op_info {
    te_op op;
    size_t args_size;
    te__op_check_fn check;
    te__op_cpu_fn cpu;
    te__op_plan_fn plan;
    /* keeps a call with checked args in te->capture, for the CPU */
    te_result (*record)(te_ctx *te, const struct te__op_info *op, const void *args);
} te__op_info;

/* The functions that a device gives a context. */
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
    void *(*word)(te_ctx *te, int i); /* 8 bytes of its memory, 0, that stay, i < 4; NULL: host memory does */
    te_result (*run)(te_ctx *te, const te__op_info *op, const void *args); /* checked args */
    te_result (*enter)(te_ctx *te, bool *entered); /* calls cost less between enter and leave; NULL: they do not */
    void (*leave)(bool entered);
    te_result (*settle)(te_ctx *te); /* queues the launches that wait for their kernels; NULL: none ever wait */
    te_result (*warm)(te_ctx *te); /* compiles the kernels noted since te_warmup_begin; NULL: it has none */
    void (*close)(te_ctx *te);
    te_result (*capture_begin)(te_ctx *te); /* from here on operations are noted in te->capture in place of being run */
    te_result (*capture_end)(te_ctx *te, te_graph *g); /* makes g ready to be launched; g NULL: drops the noted
                                                        * operations */
    te_result (*graph_launch)(te_ctx *te, te_graph *g);
    void (*graph_close)(te_ctx *te, te_graph *g);
    /* Streams and events: core/stream.c, the only one to call these. A stream NULL is the context's own. */
    te_result (*stream_create)(te_ctx *te, void **stream);
    void (*stream_destroy)(te_ctx *te, void *stream);
    te_result (*stream_synchronize)(te_ctx *te, const te__stream *s); /* never NULL */
    /* later work on the stream runs after the event */
    te_result (*stream_wait)(te_ctx *te, const te__stream *s, void *event);
    te_result (*event_create)(te_ctx *te, void **event);
    void (*event_destroy)(te_ctx *te, void *event);
    te_result (*event_record)(te_ctx *te, void *event, const te__stream *s);
    te_result (*event_wait)(te_ctx *te, void *event, bool *passed); /* does not wait; passed NULL: the host waits */
    /* the host's side is pinned */
    te_result (*copy)(te_ctx *te, const te__stream *s, void *dst, const void *src, size_t bytes, bool to_host);
    void *(*pinned_alloc)(te_ctx *te, size_t bytes); /* NULL when there is none */
    void (*pinned_release)(te_ctx *te, void *host, size_t bytes);
} te__device;

typedef struct te__cuda te__cuda;           /* cuda/driver.c */
typedef struct te__threads te__threads;     /* cpu/parallel.c */

/* ---- tape ---- */

/* The module in whose forward nodes were recorded: one text for all of them. */
typedef struct te__path {
    int refs;
    char text[256];
} te__path;

/* The shape and format of a saved tensor that a hook has packed. */
typedef struct te__packed_as {
    te_dtype dtype;
    int ndim;
    int64_t shape[TE_MAX_DIMS];
} te__packed_as;

typedef struct te__node {
    const char *name;
    te__path *path;      /* or NULL */
    uint64_t saved_at;   /* te->writes when it was recorded */
    te__arena *arena;    /* of the capture in which it was recorded (a reference), or NULL */
    te__var **inputs, **outputs;
    int num_inputs, num_outputs;
    te_tensor **saved;
    int num_saved;
    te_backward_fn backward;
    void *state;
    size_t state_size;
    void (*release)(te_ctx *te, void *state); /* or NULL */
    bool takes_quantized; /* gradients that come quantized stay so; for other nodes they are decoded */
    te_saved_tensors_hooks hooks; /* with packed: */
    void **packed;                /* [num_saved] handles in place of tensors, NULL where a tensor stayed; or NULL: no
                                   * hooks */
    te__packed_as *packed_as;
} te__node;

/* A recorded region: a list of nodes in the order of recording. The context has one; a backward function records into
 * one of its own, which is played or forgotten before the function's node is done. */
typedef struct te__segment {
    struct te__segment *outer;
    te__node **nodes; /* NULL where one is being played, or was */
    int num_nodes, cap_nodes;
    int plays; /* calls of te_backward that are under way on it */
} te__segment;

enum { TE__MAX_GRAD_REGIONS = 64, TE__MAX_HOOKS = 16 };
typedef struct te__tape {
    te__segment root, *segment; /* segment: the innermost */
    int no_grad, hidden_no_grad; /* hidden: those of te_checkpoint's first runs, in which a training step goes on */
    int outer_no_grad[TE__MAX_GRAD_REGIONS], num_grad_regions; /* te_enable_grad_begin: no_grad outside */
    int plays; /* calls of te_backward that are under way */
    uint64_t passes; /* those that mark_reached has looked at */
    te_saved_tensors_hooks hooks[TE__MAX_HOOKS]; /* of regions that are open */
    int num_hooks;
    te__var **fresh; /* leaves whose gradient was begun by the te_backward under way (references) */
    int num_fresh, cap_fresh;
    int unscoped, unscoped_live; /* te__watch_scopes */
    int replays; /* second runs of checkpointed functions that are under way */
    int quiet;   /* no room hears of backward passes: these are no part of the program's */
    te__var **warm_vars; /* leaves that got a gradient between te_warmup_begin and te_warmup_end */
    int num_warm_vars, cap_warm_vars;
} te__tape;

enum { TE__MAX_SCOPES = 256 };
typedef struct te__scope {
    int first_tensor; /* in te->live */
    te__segment *segment;
    int first_node;   /* in it */
} te__scope;

/* ---- graphs ---- */

/* State of the host that changes with each launch, such as an optimizer's count of steps. The functions get the owner
 * and `data`. */
typedef struct te__graph_part {
    void *owner;
    void *data; /* `bytes` of host memory, the graph's */
    size_t bytes;
    bool random; /* a random state; else a step of an optimizer */
    te_result (*before)(te_graph *g, void *owner, void *data); /* a launch: may run operations, and fills its words of
                                                                * the state */
    void (*after)(te_graph *g, void *owner, void *data);
    void (*captured)(te_graph *g, void *owner, void *data); /* the capture has ended: undoes the counting that it did */
} te__graph_part;

/* The state of a graph: numbers in device memory that the host writes before each launch. Words 0 and 1: the random
 * state. */
enum { TE__GRAPH_WORDS = 512, TE__GRAPH_RNG_WORDS = 2 };

struct te_graph {
    te_ctx *te; /* NULL: the context is gone */
    te_graph *next; /* te->graphs */
    te_allocator host_allocator;
    uint64_t id;
    bool failed; /* a call inside the capture has failed */
    const char *broken; /* why it cannot be launched any more, or NULL */
    te__arena *arena;
    te__buffer **held; /* the buffers from outside that its operations use; those that they write come first */
    int num_held, cap_held, num_written;
    te_tensor *state, *rng; /* u8 [8 * TE__GRAPH_WORDS], and its first two words as i64 [2] */
    uint64_t word[TE__GRAPH_WORDS];
    int num_words;
    bool draws; /* its operations use random numbers */
    uint64_t rng_begin, rng_used;
    uint64_t tracker_begin[TE_MAX_RNG_TRACKERS]; /* the same of named states */
    te__graph_part *parts;
    int num_parts, cap_parts;
    te__var **vars; /* leaves that got a gradient in the capture */
    int num_vars, cap_vars;
    struct te__call *records; /* CPU: cpu/device.c */
    int num_records, cap_records;
    void *exec; /* CUDA: CUgraphExec */
    uint64_t launches; /* that one launch of it makes */
};

/* ---- the context ---- */

/* A named random state. */
typedef struct te__rng_tracker {
    char name[64];
    uint64_t seed, offset, first_seed;
} te__rng_tracker;
enum { TE__MAX_FORKS = 32 }; /* open regions of te_rng_fork_begin */
/* All random states: for a call that puts them back if it fails, and for a function that runs again. Regions of
 * te_rng_fork_begin name trackers by number. */
typedef struct te__rng_state {
    uint64_t seed, offset;         /* te->seed and te->rng_offset, in a copy */
    uint64_t own_seed, own_offset; /* the context's, while another is in force */
    te__rng_tracker tracker[TE_MAX_RNG_TRACKERS];
    int num_trackers;
    int fork; /* the one in force, from 1; 0: the context's */
    int outer_fork[TE__MAX_FORKS], num_forks; /* what was in force before each open region */
} te__rng_state;

enum { TE__MAX_THREADS = 64 };

/* ---- rooms above ---- */

/* The state that a room above core/ keeps in each context: `bytes`, cleared when the context opens. te__slot_of finds
 * it. */
typedef struct te__slot {
    size_t bytes;
} te__slot;

/* A room with such a state, and with functions that are called when something happens; NULL: it does not listen. The
 * table of rooms stands in open.c. */
typedef struct te__room {
    const te__slot *slot;
    void (*open)(te_ctx *te);    /* the device is open */
    void (*close)(te_ctx *te);   /* the context closes; the device and all tensors are still there */
    te_result (*capture)(te_ctx *te, bool begins); /* a capture is to begin or to end: refuses it with an error */
    te_result (*step_begins)(te_ctx *te);          /* a step of training may begin, or is under way already */
    te_result (*step_undone)(te_ctx *te);          /* te_clear_error after a step that has failed */
    void (*reads)(te_ctx *te, te_tensor *x);       /* a checkpoint's first run: a function takes x (or NULL) */
    /* an outermost te_backward begins, on `count` tensors y of segment s */
    void (*backward_begins)(te_ctx *te, const te__segment *s, te_tensor *const *y, int count);
    void (*backward_done)(te_ctx *te); /* it has succeeded */
    /* The end of a backward pass; result: how that went. m: of a te_backward_dw; NULL: of a te_backward. Returns the
     * result of both. */
    te_result (*backward_ends)(te_ctx *te, const te_module *m, te_result result);
    void (*report)(te_ctx *te, te__report_text *t); /* adds lines to te_report */
} te__room;
#define TE__ROOM(slot, open, close) {slot, open, close, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL} /* it hears of no more */
enum { TE__MAX_ROOMS = 16 };

struct te_ctx {
    te_result error_code;
    char *error;
    char module_path[256]; /* of the module whose forward runs: for messages */
    te_log_fn log;
    void *log_user;
    te_log_level log_level;
    te_allocator host_allocator, device_allocator;
    char device_name[16];
    const te__device *device;
    int regions; /* calls of te__device_enter without their te__device_leave: a forward, a backward, an optimizer
                  * step */
    te__cuda *cuda;       /* NULL on the CPU */
    te__threads *threads; /* NULL: one thread */
    int cpu_threads;
    bool debug_sync; /* $TE_DEBUG_SYNC */
    bool no_cubin_cache;
    bool exact_f32;
    te__pool pool;
    te_tensor **live; /* tensors that scopes will release */
    int num_live, cap_live;
    te__scope scopes[TE__MAX_SCOPES];
    int num_scopes;
    te__tape tape;
    te__node *playing; /* its backward function runs */
    struct te__deferred *deferred; /* tape/deferred.c: the first of a list */
    te__path *path;    /* module_path, for nodes; NULL until one is recorded */
    uint64_t writes;   /* counts every write to any buffer: a clock */
    uint64_t seed, rng_offset; /* the random state in force */
    te__rng_state rng; /* the named ones, and which is in force */
    bool exporting;  /* calls are noted for a file: a call stands for calls of other sizes */
    bool empty_is_unallocated; /* te_set_empty_is_unallocated: a tensor without elements is a shape alone */
    bool in_step, step_failed; /* a step of training, from an outermost te_autocast_begin to a te_optimizer_step */
    bool warming;           /* between te_warmup_begin and te_warmup_end */
    te_jit_stats jit_stats;
    int64_t live_buffers;
    te__buffer *buffers; /* all of them */
    te__stream *streams;
    te__event *spare_events;
    te__pinned *pinned;
    struct te__offload *offload; /* tape/offload.c; NULL before the first region */
    te__block *blocks;   /* all host memory of the context */
    te__closable *closables;
    int64_t process_id; /* of the process that made the context */
    int forks;          /* te__forks in it */
    te_trace_fn trace; /* te_set_trace */
    void *trace_user;
    bool tracing; /* the hook runs */
    te_graph *capture; /* between te_graph_begin and te_graph_end */
    te_graph *graphs;  /* all that exist */
    uint64_t captures; /* so far */
    const te__room *const *rooms; /* open.c */
    int num_rooms;
    void *state[TE__MAX_ROOMS]; /* of each room's slot */
};
