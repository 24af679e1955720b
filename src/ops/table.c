/* ops/table.c: the table of the operations in TE_OP_LIST. te__run checks, traces and runs every call. This file must
 * not depend on what operations compute. */

/* The functions of each operation take their own type of arguments. This macro wraps them into functions with a void
 * pointer, for one table. */
#define TE__OP_WRAP(lower, UPPER, family)                                    \
    static te_result te__any_check_##lower(te_ctx *te, void *args) {         \
        return te__check_##lower(te, (te_op_##lower##_args *)args);          \
    }                                                                        \
    static te_result te__any_cpu_##lower(te_ctx *te, const void *args) {     \
        return te__cpu_##lower(te, (const te_op_##lower##_args *)args);      \
    }                                                                        \
    TE__OP_WRAP_PLAN(lower)
#ifdef TE_NO_CUDA
#define TE__OP_WRAP_PLAN(lower)
#define TE__OP_PLAN(lower) NULL
#else
#define TE__OP_WRAP_PLAN(lower)                                              \
    static te_result te__any_plan_##lower(te__plan *p, const void *args) {   \
        return te__cuda_plan_##lower(p, (const te_op_##lower##_args *)args); \
    }
#define TE__OP_PLAN(lower) te__any_plan_##lower
#endif
TE_OP_LIST(TE__OP_WRAP)
#undef TE__OP_WRAP

#define TE__OP_ROW(lower, UPPER, family)                                                                  \
    {TE_OP_##UPPER,         sizeof(te_op_##lower##_args), te__any_check_##lower, te__any_cpu_##lower,     \
     TE__OP_PLAN(lower), te__record_call},
#define TE__OP_NONE(lower, UPPER, family) {TE_OP_##UPPER, 0, NULL, NULL, NULL, NULL},
static const te__op_info te__ops[TE_OP_COUNT] = {{TE_OP_NONE, 0, NULL, NULL, NULL, NULL},
                                                 TE_OP_LIST_EACH(TE__OP_ROW, TE__OP_NONE)};
#undef TE__OP_ROW
#undef TE__OP_NONE

/* Checks the arguments of a call, and fills in defaults. */
static te_result te__check_args(te_ctx *te, te__args *l, te_op op, void *args, bool run) {
    te_result result;
    te__args_of(l, op, args, false);
    result = te__args_check(te, l, run);
    if (result == TE_OK) result = te__ops[op].check(te, args);
    return result == TE_OK ? te__args_apart(te, l) : result;
}

/* Runs a call with checked args on the device. */
static te_result te__run_checked(te_ctx *te, const te__args *l, const void *args) {
    if (!te->warming) te__args_touch(l); /* a warm-up writes nothing */
    return te->device->run(te, &te__ops[l->op], args);
}

/* ---- the trace hook ---- */

TE_API te_result te_set_trace(te_ctx *te, te_trace_fn fn, void *user) {
    if (!te) return TE_ERR_STATE;
    te->trace = fn;
    te->trace_user = user;
    return TE_OK;
}
static void te__trace_call(te_ctx *te, te_trace_fn fn, void *user, const te_trace *event, te__floats *floats) {
    te__floats_end(floats); /* the hook runs with the program's floating-point mode */
    te->tracing = true;
    fn(te, event, user);
    te->tracing = false;
    *floats = te__floats_begin();
}
/* Runs a call with checked arguments. Calls the same trace hook before and after the call, even if the hook itself
 * calls te_set_trace. */
static te_result te__run_traced(te_ctx *te, const te__args *l, const void *args, te__floats *floats) {
    te_trace event = TE_ZERO;
    te_trace_fn fn = te->trace;
    void *user = te->trace_user;
    event.op = l->op;
    event.args = args;
    event.mode = te->warming ? TE_TRACE_WARMUP : te->capture ? TE_TRACE_CAPTURE : TE_TRACE_RUN;
    event.backward = te->playing != NULL;
    event.module = te->module_path;
    te__trace_call(te, fn, user, &event, floats);
    event.result = te__run_checked(te, l, args);
    event.phase = TE_TRACE_AFTER;
    te__trace_call(te, fn, user, &event, floats);
    return event.result;
}

static te_result te__refuse_operation(te_ctx *te, te_op op) {
    char what[64];
    snprintf(what, sizeof(what), "te_op_%s", te_query_name(op));
    return te__refuse_hook(te, what);
}

/* Runs one operation on the context's device. Defaults are filled into a copy; `args` is not changed. */
static te_result te__run(te_ctx *te, te_op op, const void *args) {
    te__any_args copy;
    te__args l;
    te__floats floats;
    te_result result;
    if (!te) return TE_ERR_STATE;
    if (!args) return te__fail(te, TE_ERR_INVALID, "te_op_%s: args is NULL", te_query_name(op));
    if (te->tracing) return te__refuse_operation(te, op);
    memcpy(&copy, args, te__ops[op].args_size);
    floats = te__floats_begin(); /* checks and plans compute with floats, too */
    result = te__check_args(te, &l, op, &copy, true);
    if (result == TE_OK && te->capture) result = te__capture_args(te->capture, &l);
    if (result == TE_OK) result = te->trace ? te__run_traced(te, &l, &copy, &floats) : te__run_checked(te, &l, &copy);
    te__floats_end(&floats);
    return result;
}

#define TE__OP_FUNCTION(lower, UPPER, family)                                      \
    TE_API te_result te_op_##lower(te_ctx *te, const te_op_##lower##_args *args) { \
        return te__run(te, TE_OP_##UPPER, args);                                   \
    }
TE_OP_LIST(TE__OP_FUNCTION)
#undef TE__OP_FUNCTION
