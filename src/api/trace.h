/* api/trace.h: every operation that a context runs, seen from outside: what a call names, and a hook before and after
 * each call. Profilers, exporters and inspectors need nothing else. */

/* How an operation uses a tensor. */
typedef enum te_arg_use {
    TE_ARG_IN = 1,   /* read */
    TE_ARG_OUT = 2,  /* written; its values before do not matter */
    TE_ARG_INOUT = 3 /* written, and its values before count: accumulated into, or kept in part */
} te_arg_use;

/* A tensor among the args of an operation. */
typedef struct te_arg {
    const char *name; /* of the field in the args struct: "x"; of a list the list's: "in"; of te_op_adam_args.tensors
                       * the member's: "param" (static) */
    int64_t index;    /* its place in the list; -1: not in a list */
    te_arg_use use;   /* of this call: te_op_gemm's `d` is TE_ARG_INOUT with `accumulate` */
    bool optional;    /* this call may leave it NULL */
    te_tensor *tensor; /* borrowed; NULL: not given */
} te_arg;

/* Lists the tensors of te_op_NAME_args, in the order of the operation's documentation, those that are NULL included:
 * fills out[0 .. capacity-1] and returns how many there are; out may be NULL. Runs, checks and allocates nothing. 0 for
 * an op outside of TE_OP_LIST and for args == NULL. */
TE_API int64_t te_query_args(te_op op, const void *args, te_arg *out, int64_t capacity);

/* The two events of a call. */
typedef enum te_trace_phase {
    TE_TRACE_BEFORE = 0, /* checked, about to begin */
    TE_TRACE_AFTER = 1   /* it has returned */
} te_trace_phase;

/* How far the call goes. */
typedef enum te_trace_mode {
    TE_TRACE_RUN = 0,    /* it runs: on CUDA it is queued, and may still be running in TE_TRACE_AFTER */
    TE_TRACE_WARMUP = 1, /* between te_warmup_begin and te_warmup_end: it is planned alone */
    TE_TRACE_CAPTURE = 2 /* between te_graph_begin and te_graph_end: it is recorded. te_graph_launch runs the record,
                          * and traces none of it */
} te_trace_mode;

/* One call of an operation. */
typedef struct te_trace {
    te_op op;         /* the operation */
    const void *args; /* const te_op_NAME_args *: checked, defaults filled in; borrowed, valid inside the hook */
    te_trace_phase phase; /* before or after it */
    te_trace_mode mode;   /* how far it goes */
    bool backward;      /* a backward function of the tape makes the call */
    const char *module; /* te_module_path of the module whose forward or backward makes it, "" outside of all; borrowed,
                         * valid inside the hook */
    te_result result;   /* TE_TRACE_AFTER: of the call; else TE_OK */
} te_trace;
/* The hook; event is borrowed for the call. */
typedef void (*te_trace_fn)(te_ctx *te, const te_trace *event, void *user);

/* Calls `fn` before and after every operation of this context: the raw ones that a program calls, and those that
 * functions, modules, te_backward and optimizers are made of. NULL ends it. One function at a time; without one an
 * operation pays for a comparison. A call with refused args is not traced; one that began is traced twice, whatever
 * becomes of it.
 *
 * A hook observes. It may query (te_query_args, te_explain, te_query_supported, shapes, statistics; the args of an
 * event, with their defaults, are as good as the program's), te_tensor_retain what it wants to keep, call te_set_trace,
 * and read a contiguous tensor back by te_tensor_to_host or te_tensor_to_f32 (which waits for the device, and gives
 * TE_ERR_STATE in a capture).
 * Whatever would change the context under the call does nothing but give TE_ERR_STATE: operations, hence all functions
 * and modules made of them; te_graph_begin, _end, _launch, _destroy; te_warmup_begin, _end; te_scope_begin, _end; what
 * would release tensors of the call: te_module_destroy, _add_parameter, _add_buffer, _remove_child,
 * te_optimizer_destroy, te_kv_cache_destroy, te_inference_params_destroy, te_grad_scaler_destroy, te_tensor_zero_grad,
 * _set_main_grad, _set_decoupled_grad, te_graphed_reset, te_ctx_destroy. A hook releases no tensor that it has not
 * retained. A computation of the program's has to run after the traced call.
 *
 * te_set_trace gives TE_ERR_STATE if te is NULL. */
TE_API te_result te_set_trace(te_ctx *te, te_trace_fn fn, void *user);
