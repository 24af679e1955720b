/* api/trace.h: a hook that is called before and after every operation of a context, for profilers, exporters and
 * inspectors. te_query_args lists the tensors in an operation's args. */

/* How an operation uses a tensor. */
typedef enum te_arg_use {
    TE_ARG_IN = 1,   /* read */
    TE_ARG_OUT = 2,  /* written; its old values do not matter */
    TE_ARG_INOUT = 3 /* written, and its old values matter */
} te_arg_use;

/* A tensor among the args of an operation. */
typedef struct te_arg {
    const char *name; /* the name of a field of the args struct: a tensor ("x") or a list of tensors ("in"). For
                       * te_op_adam_args.tensors, the name of a member ("param"). Static string */
    int64_t index;    /* the tensor's index in its list; -1: not in a list */
    te_arg_use use;   /* the use in this call; `d` of te_op_gemm, for example, is TE_ARG_INOUT with `accumulate` */
    bool optional;    /* this call may leave it NULL */
    te_tensor *tensor; /* borrowed; NULL: not given */
} te_arg;

/* Lists the tensors in the args (te_op_NAME_args), NULL ones too, in the documented order. Fills in out[0 ..
 * capacity-1] and returns the number of tensors; `out` may be NULL. 0 for an op outside of TE_OP_LIST and for args ==
 * NULL. */
TE_API int64_t te_query_args(te_op op, const void *args, te_arg *out, int64_t capacity);

/* Says when the hook is called: before or after the operation. */
typedef enum te_trace_phase {
    TE_TRACE_BEFORE = 0, /* the args are checked and the call is about to begin */
    TE_TRACE_AFTER = 1   /* the call has returned */
} te_trace_phase;

/* Says whether the call really runs. */
typedef enum te_trace_mode {
    TE_TRACE_RUN = 0,    /* the call runs: on CUDA it is queued, and may still be running in TE_TRACE_AFTER */
    TE_TRACE_WARMUP = 1, /* between te_warmup_begin and te_warmup_end: the call is only planned */
    TE_TRACE_CAPTURE = 2 /* between te_graph_begin and te_graph_end: the call is recorded. te_graph_launch runs it
                          * without the hook */
} te_trace_mode;

/* One call of an operation. */
typedef struct te_trace {
    te_op op;         /* the operation */
    const void *args; /* a const te_op_NAME_args *, checked, with defaults filled in; borrowed, valid inside the hook */
    te_trace_phase phase; /* before or after the call */
    te_trace_mode mode;   /* whether the call really runs */
    bool backward;      /* whether a backward function makes the call, in te_backward */
    const char *module; /* te_module_path of the module that makes the call; "" if there is none. Borrowed, valid inside
                         * the hook */
    te_result result;   /* with TE_TRACE_AFTER the result of the call; else TE_OK */
} te_trace;
/* A hook function. `event` is borrowed for the duration of the call; `user` is the pointer given to te_set_trace. */
typedef void (*te_trace_fn)(te_ctx *te, const te_trace *event, void *user);

/* Sets the hook: `fn` is called before and after every operation of this context, also those that functions, modules,
 * te_backward and optimizers call. NULL removes the hook. A context has one hook. A call whose args are refused is not
 * traced.
 *
 * A hook observes. It may do the following:
 *   - call te_query_args, te_explain and te_query_supported, also with the args of the event;
 *   - call te_set_trace, and read shapes and statistics;
 *   - keep tensors by te_tensor_retain;
 *   - read a contiguous tensor back by te_tensor_to_host or te_tensor_to_f32. This waits for the device, and gives
 *     TE_ERR_STATE in a capture.
 * Calls that would change the context during the operation give TE_ERR_STATE and do nothing else. These are:
 *   - operations, and so all functions and modules that use operations;
 *   - te_graph_begin, _end, _launch, _destroy; te_warmup_begin, _end; te_scope_begin, _end;
 *   - all calls that would release tensors of the operation: te_module_destroy, _add_parameter, _add_buffer,
 *     _remove_child, te_optimizer_destroy, te_kv_cache_destroy, te_inference_params_destroy, te_grad_scaler_destroy,
 *     te_tensor_zero_grad, _set_main_grad, _set_decoupled_grad, te_graphed_reset, te_ctx_destroy.
 * A hook must not release a tensor that it has not retained.
 *
 * te_set_trace gives TE_ERR_STATE if te is NULL. */
TE_API te_result te_set_trace(te_ctx *te, te_trace_fn fn, void *user);
