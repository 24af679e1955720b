/* modules/graphed.c: modules whose forward and backward passes are two captured graphs. This file must not depend on
 * what any class computes. */

/* A graphed module: its two graphs, and the static tensors that the graphs read and write. Each tape node of a launch
 * holds a reference to this struct. */
struct te__graphed {
    te_ctx *te;
    int refs;
    te_graph *forward, *backward;
    te__module_call call;  /* options of the sample and the static inputs */
    te_outputs made;       /* outputs of the forward graph (retained) */
    te_tensor *dy[TE__OUTPUTS];               /* static gradients of the outputs; NULL: the output has no gradient, or
                                               * is not made */
    te_tensor *leaf[TE__MAX_NODE_TENSORS];    /* inputs (NULL if the call has none), then parameters; retained */
    te_tensor *dx[TE__MAX_NODE_TENSORS];      /* gradients of `leaf` from the backward graph, or NULL; retained */
    int num_leaves;
    te_tensor **frozen;                       /* retained; parameters that required no gradient when the module was
                                               * graphed */
    int num_frozen, cap_frozen;
    uint64_t launches; /* launches of the forward graph */
    te_microbatch microbatch; /* the step's microbatch when the graphs were captured */
};

static void te__graphed_release(te__graphed *g) {
    te_tensor *made[TE__OUTPUTS];
    int i;
    if (!g || --g->refs > 0) return;
    te_graph_destroy(g->forward);
    te_graph_destroy(g->backward);
    te__outputs_list(&g->made, made);
    for (i = 0; i < TE__OUTPUTS; i++) {
        te_tensor_release(made[i]);
        te_tensor_release(g->dy[i]);
    }
    for (i = 0; i < g->num_leaves; i++) {
        te_tensor_release(g->leaf[i]);
        te_tensor_release(g->dx[i]);
    }
    for (i = 0; i < g->num_frozen; i++) te_tensor_release(g->frozen[i]);
    te__free(g->te, g->frozen);
    te__free(g->te, g);
}

/* ---- running ---- */

typedef struct te__graphed_state {
    te__graphed *graphed;
    uint64_t launch;
} te__graphed_state;
static void te__graphed_state_release(te_ctx *te, void *state) {
    (void)te;
    te__graphed_release(((te__graphed_state *)state)->graphed);
}

static te_result te__graphed_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                      te_tensor **dx, const bool *needs) {
    const te__graphed_state *s = (const te__graphed_state *)state;
    te__graphed *g = s->graphed;
    te_result result = TE_OK;
    int i, at = 0;
    (void)saved;
    if (g->launches != s->launch)
        return te__fail(te, TE_ERR_STATE,
                        "te_make_graphed_callables: the module has run forward %llu times since, and its graphs keep "
                        "the activations of one call; call te_backward "
                        "before its next forward pass",
                        (unsigned long long)(g->launches - s->launch));
    for (i = 0; i < TE__OUTPUTS && result == TE_OK; i++) {
        if (!g->dy[i]) continue;
        result = dy[at] ? te_tensor_copy(g->dy[i], dy[at]) : te_tensor_fill(g->dy[i], 0.0);
        at++;
    }
    if (result == TE_OK) result = te_graph_launch(g->backward);
    for (i = 0; i < g->num_leaves; i++)
        if (needs[i]) dx[i] = g->dx[i];
    return result;
}

static te_result te__graphed_run(te_module *m, te_forward_args *args) {
    te__graphed *g = m->graphed;
    te__module_call call = TE_ZERO;
    te__graphed_state state;
    te_node_desc node = TE_ZERO;
    te_tensor *in[TE__MAX_NODE_TENSORS], *made[TE__OUTPUTS], *out[TE__OUTPUTS], **of_call[TE__FORWARD_TENSORS],
        **of_sample[TE__FORWARD_TENSORS];
    te_ctx *te = m->te;
    te_result result = TE_OK;
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    int i;
    te__call_take(&call, args);
    if (!args->attention.score_mod != !g->call.args.attention.score_mod)
        return te__fail(te, TE_ERR_INVALID,
                        "te_make_graphed_callables: score_mod is %s and was %s in the sample; a graph repeats what it "
                        "was captured with, with other tensors aux",
                        args->attention.score_mod ? "given" : "NULL", args->attention.score_mod ? "NULL" : "given");
    if (te__quant_of(te)->is_first_microbatch != g->microbatch && !args->is_first_microbatch)
        return te__fail(
            te, TE_ERR_STATE,
            "te_make_graphed_callables: te_step_get_is_first_microbatch is %d and was %d when the module was "
            "graphed; a graph repeats what it was captured with",
            (int)te__quant_of(te)->is_first_microbatch, (int)g->microbatch);
    if (args->is_first_microbatch != g->call.args.is_first_microbatch)
        return te__fail(te, TE_ERR_INVALID,
                        "te_make_graphed_callables: is_first_microbatch is %d and was %d in the sample; a graph "
                        "repeats what it was captured with",
                        (int)args->is_first_microbatch, (int)g->call.args.is_first_microbatch);
    if (args->logits_to_keep != g->call.args.logits_to_keep)
        return te__fail(te, TE_ERR_INVALID,
                        "te_make_graphed_callables: logits_to_keep is %lld and was %lld in the sample; a graph "
                        "repeats what it was captured with",
                        (long long)args->logits_to_keep, (long long)g->call.args.logits_to_keep);
    for (i = 0; i < g->num_frozen; i++)
        if (g->frozen[i]->requires_grad)
            return te__fail(te, TE_ERR_STATE,
                            "te_make_graphed_callables: parameter \"%s\" of \"%s\" requires a gradient and did not "
                            "when the module was graphed; the graphs make none: "
                            "te_graphed_reset, and graph it again",
                            g->frozen[i]->name ? g->frozen[i]->name : "", m->name);
    te__call_tensors(&call, of_call);
    te__call_tensors(&g->call, of_sample);
    te__frame_begin(te);
    for (i = 0; i < g->num_leaves; i++) in[i] = g->leaf[i];
    for (i = 0; i < TE__FORWARD_TENSORS && result == TE_OK; i++) {
        te_tensor *x = *of_call[i], *to = *of_sample[i];
        in[i] = x;
        if ((x != NULL) != (to != NULL) || (x && (!te__same_shape(x, to) || x->dtype != to->dtype || x->quantized)))
            result = te__fail(te, TE_ERR_SHAPE,
                              "te_make_graphed_callables: %s of the call is %s %s and was %s %s in the sample; "
                              "a graph has one shape",
                              te__call_names[i], x ? te_dtype_name(x->dtype) : "not there,",
                              x ? te__shape_text(x, a) : "NULL", to ? te_dtype_name(to->dtype) : "not there,",
                              to ? te__shape_text(to, b) : "NULL");
        else if (x && x->requires_grad && !to->requires_grad)
            result = te__fail(te, TE_ERR_INVALID,
                              "te_make_graphed_callables: %s of the call requires a gradient and the sample's "
                              "did not; the graphs make none: let the "
                              "sample's require one",
                              te__call_names[i]);
        else if (x) {
            te->tape.no_grad++;
            result = te_tensor_copy(to, x);
            te->tape.no_grad--;
        }
    }
    if (result == TE_OK) result = te_graph_launch(g->forward);
    te__outputs_list(&g->made, made);
    for (i = 0; i < TE__OUTPUTS && result == TE_OK; i++) {
        bool own = made[i] && made[i]->var && made[i]->var->leaf; /* true: this output is a parameter */
        int k = 0;
        while (made[i] && k < TE__FORWARD_TENSORS && g->leaf[k] != made[i]) k++;
        if (made[i] && k < TE__FORWARD_TENSORS) { /* this output is an input of the module */
            out[i] = in[k];
            continue;
        }
        if (!made[i] || own) {
            out[i] = made[i];
            continue;
        }
        out[i] = te__empty_like(made[i], made[i]->dtype); /* a copy, because the next call overwrites made[i] */
        if (!out[i] || te_tensor_copy(out[i], te_tensor_detach(made[i])) != TE_OK) result = te_error_code(te);
        if (result == TE_OK && g->dy[i]) made[node.num_outputs++] = out[i];
    }
    if (result == TE_OK && node.num_outputs > 0) {
        state.graphed = g;
        state.launch = ++g->launches;
        g->refs++;
        node.name = "graphed";
        node.inputs = in;
        node.num_inputs = g->num_leaves;
        node.saved = g->leaf + TE__FORWARD_TENSORS; /* parameters: must not be written before the backward pass */
        node.num_saved = g->num_leaves - TE__FORWARD_TENSORS;
        node.outputs = made;
        node.state = &state;
        node.state_size = sizeof(state);
        node.backward = te__graphed_backward;
        node.release = te__graphed_state_release;
        result = te__record_always(te, &node, true);
    }
    memset(&args->outputs, 0, sizeof(args->outputs));
    if (result == TE_OK) args->outputs = te__outputs_of(out);
    te__frame_end(te, out, result == TE_OK ? TE__OUTPUTS : 0);
    return result;
}

/* ---- capturing ---- */

/* The buffers that the warm-up passes change, and copies of the values that they had before. */
typedef struct te__graphed_kept {
    te__graphed *g;
    te_tensor *buffer[TE__MAX_NODE_TENSORS * 2], *value[TE__MAX_NODE_TENSORS * 2];
    int num_buffers;
    bool after, too_many;
} te__graphed_kept;
static bool te__graphed_tensor(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te__graphed_kept *k = (te__graphed_kept *)user;
    int i;
    if (x->moves)
        return te__not_ok(m->te, TE_ERR_UNSUPPORTED,
                          "te_make_graphed_callables: parameter %s of \"%s\" is sharded, and has no memory between the "
                          "two passes; capture whole steps (te_graph_begin), or use TE_SHARD_OPTIMIZER",
                          path, m->name);
    if (kind == TE_ENTRY_BUFFER && k->after) { /* The warm-up is over. A buffer that existed before the warm-up gets its
                                                * old value back. A buffer that the warm-up created gets its initial
                                                * value. */
        for (i = 0; i < k->num_buffers && k->buffer[i] != x; i++) {}
        if (i < k->num_buffers)
            te_tensor_copy(x, k->value[i]);
        else
            te_tensor_fill(x, strncmp(x->name ? x->name : "", "fp8_scale", 9) == 0 ? 1.0 : 0.0);
    } else if (kind == TE_ENTRY_BUFFER) {
        k->too_many = k->num_buffers == (int)TE__COUNT(k->buffer);
        if (!k->too_many) {
            k->buffer[k->num_buffers] = x;
            k->value[k->num_buffers] = te__empty_like(x, x->dtype);
            if (k->value[k->num_buffers]) te_tensor_copy(k->value[k->num_buffers], x);
            k->num_buffers++;
        }
    } else if (!k->after && x->requires_grad) {
        for (i = TE__FORWARD_TENSORS; i < k->g->num_leaves && k->g->leaf[i] != x; i++) {}
        k->too_many = i == TE__MAX_NODE_TENSORS;
        if (i == k->g->num_leaves && !k->too_many) k->g->leaf[k->g->num_leaves++] = te_tensor_retain(x);
    } else if (!k->after &&
               te__grow(m->te, (void **)&k->g->frozen, &k->g->cap_frozen, k->g->num_frozen, sizeof(te_tensor *)))
        k->g->frozen[k->g->num_frozen++] = te_tensor_retain(x);
    return !k->too_many && te_ok(m->te);
}

/* Makes static copies of the sample's tensors. */
static te_result te__graphed_inputs(te__graphed *g, const te_forward_args *sample) {
    te_tensor **of_call[TE__FORWARD_TENSORS];
    int i;
    if (sample->fp8_output)
        return te__fail(
            g->te, TE_ERR_UNSUPPORTED,
            "te_make_graphed_callables: the sample has fp8_output; graphs copy plain outputs: leave it false");
    te__call_take(&g->call, sample);
    te__call_tensors(&g->call, of_call);
    g->num_leaves = TE__FORWARD_TENSORS;
    for (i = 0; i < TE__FORWARD_TENSORS; i++) {
        te_tensor **x = of_call[i], *from = *x;
        *x = NULL;
        if (!from) continue;
        if (te__need_memory(from, "te_make_graphed_callables") != TE_OK ||
            !te__same_ctx(from, g->te, "te_make_graphed_callables"))
            return te_error_code(g->te);
        if (from->quantized)
            return te__fail(
                g->te, TE_ERR_DTYPE,
                "te_make_graphed_callables: %s of the sample is quantized; graphs copy plain tensors",
                te__call_names[i]);
        *x = te__empty_like(from, from->dtype);
        if (!*x || te_tensor_copy(*x, from) != TE_OK) return te_error_code(g->te);
        g->leaf[i] = te_tensor_retain(*x);
        if (from->requires_grad) te_tensor_set_requires_grad(*x, true);
    }
    te__call_point(&g->call);
    return TE_OK;
}

static te_result te__graphed_forward_pass(te_module *m, te__graphed *g, const te_autocast_desc *cast,
                                          te_outputs *outputs) {
    te_forward_args args = g->call.args;
    te_result result = cast ? te_autocast_begin(g->te, cast) : TE_OK;
    te_tensor *y = result == TE_OK ? te_forward_with(m, &args) : NULL;
    if (cast && result == TE_OK) result = te_autocast_end(g->te);
    *outputs = args.outputs;
    return y && result == TE_OK ? TE_OK : te_error_code(g->te) != TE_OK ? te_error_code(g->te) : TE_ERR_STATE;
}
/* Runs the backward pass of the outputs that have gradients. The first call creates the static gradients of the
 * outputs. */
static te_result te__graphed_backward_pass(te__graphed *g, const te_outputs *outputs) {
    te_tensor *made[TE__OUTPUTS], *y[TE__OUTPUTS], *dy[TE__OUTPUTS];
    int i, n = 0;
    te__outputs_list(outputs, made);
    for (i = 0; i < TE__OUTPUTS; i++) {
        if (!made[i] || !made[i]->requires_grad || !made[i]->var || made[i]->var->leaf) continue;
        if (!g->dy[i])
            g->dy[i] = te_tensor_retain(te_tensor_zeros(g->te, made[i]->dtype, made[i]->ndim, made[i]->shape));
        if (!g->dy[i]) return te_error_code(g->te);
        y[n] = made[i];
        dy[n++] = g->dy[i];
    }
    return te__backward_all(g->te, g->te->tape.segment, y, dy, n);
}

/* Swaps the gradients of the leaves with the tensors in `to`. */
static void te__graphed_swap_grads(te__graphed *g, te_tensor **to) {
    int i;
    for (i = 0; i < g->num_leaves; i++) {
        te_tensor *grad;
        if (!g->leaf[i] || !g->leaf[i]->var) continue;
        grad = g->leaf[i]->var->grad;
        g->leaf[i]->var->grad = to[i];
        to[i] = grad;
    }
}

/* Replaces the main gradients by new tensors, because the warm-up passes would change them. Keeps the originals in
 * `to`. */
static te_result te__graphed_lend_main_grads(te__graphed *g, te_tensor **to) {
    te_result result = TE_OK;
    int i;
    for (i = TE__FORWARD_TENSORS; i < g->num_leaves && result == TE_OK; i++) {
        te_tensor *x = g->leaf[i] && g->leaf[i]->var ? g->leaf[i]->var->main_grad : NULL,
                  *y = x ? te_tensor_retain(te_tensor_zeros(g->te, x->dtype, x->ndim, x->shape)) : NULL;
        if (!x) continue;
        if (!y) {
            result = te_error_code(g->te);
            break;
        }
        to[i] = x;
        g->leaf[i]->var->main_grad = y;
    }
    return result;
}
static void te__graphed_return_main_grads(te__graphed *g, te_tensor **from) {
    int i;
    for (i = 0; i < g->num_leaves; i++) {
        if (!from[i]) continue;
        te_tensor_release(g->leaf[i]->var->main_grad);
        g->leaf[i]->var->main_grad = from[i];
    }
}

/* Captures the forward pass, then the backward pass. */
static te_result te__graphed_capture(te_module *m, te__graphed *g, const te_autocast_desc *cast) {
    te_ctx *te = g->te;
    te_tensor *made[TE__OUTPUTS];
    te_result result = te_graph_begin(te);
    int i;
    if (result != TE_OK) return result;
    result = te__graphed_forward_pass(m, g, cast, &g->made);
    te__outputs_list(&g->made, made);
    for (i = 0; i < TE__OUTPUTS; i++) te_tensor_retain(made[i]);
    g->forward = te_graph_end(te);
    if (!g->forward) return te_error_code(te);
    te->rng_offset += g->forward->rng_used; /* the backward pass draws after the forward pass */
    for (i = 0; i < g->forward->num_parts; i++)
        g->forward->parts[i].after(g->forward, g->forward->parts[i].owner, g->forward->parts[i].data);
    result = te_graph_begin(te);
    if (result != TE_OK) return result;
    te__graphed_backward_pass(g, &g->made);
    g->backward = te_graph_end(te);
    if (!g->backward) return te_error_code(te);
    te__graphed_swap_grads(g, g->dx);
    return TE_OK;
}

static te_result te__graphed_make(te_module *m, const te_forward_args *sample, const te_graphed_desc *d) {
    te_ctx *te = m->te;
    te__graphed *g = (te__graphed *)te__alloc_zero(te, sizeof(te__graphed));
    te__graphed_kept kept = TE_ZERO;
    te_tensor *before[TE__MAX_NODE_TENSORS] = {NULL}, *main_grads[TE__MAX_NODE_TENSORS] = {NULL};
    te__rng_state random = te__rng_now(te);
    const int first_node = te->tape.segment->num_nodes;
    te_outputs outputs;
    te_result result;
    int i, n = d->num_warmup_iters ? d->num_warmup_iters : 3, deferred = te__deferred_length(te);
    if (!g) return TE_ERR_OUT_OF_MEMORY;
    g->te = te;
    g->refs = 1;
    g->microbatch = te__quant_of(te)->is_first_microbatch;
    te__frame_begin(te);
    result = te__graphed_inputs(g, sample);
    kept.g = g;
    if (result == TE_OK) te_module_visit_tensors(m, te__graphed_tensor, &kept);
    if (kept.too_many)
        result = te__fail(te, TE_ERR_UNSUPPORTED,
                          "te_make_graphed_callables: \"%s\" has more than %d parameters with gradients or %d buffers; "
                          "graph its children one by one",
                          m->name, (int)TE__MAX_NODE_TENSORS - (int)TE__FORWARD_TENSORS, (int)TE__COUNT(kept.buffer));
    if (result == TE_OK) result = te_error_code(te);
    te__graphed_swap_grads(g, before);
    te->tape.quiet++; /* ranks must not exchange the gradients of the warm-up and the capture */
    if (result == TE_OK) result = te__graphed_lend_main_grads(g, main_grads);
    for (i = 0; i < n && result == TE_OK; i++) {
        result = te__graphed_forward_pass(m, g, d->autocast, &outputs);
        if (result == TE_OK) result = te__graphed_backward_pass(g, &outputs);
    }
    for (i = 0; i < g->num_leaves; i++) te_tensor_zero_grad(g->leaf[i]);
    te__graphed_return_main_grads(g, main_grads);
    if (result == TE_OK && te__deferred_length(te) > deferred)
        result = te__fail(te, TE_ERR_UNSUPPORTED,
                          "te_make_graphed_callables: \"%s\" has delay_wgrad_compute, and its graphs have no place for "
                          "te_backward_dw; graph it without, or graph the "
                          "modules in it that do not delay",
                          m->name);
    te__deferred_cut(te, deferred);
    te__rng_back(te, random);
    kept.after = true;
    if (result == TE_OK) te_module_visit_tensors(m, te__graphed_tensor, &kept);
    if (result == TE_OK) result = te__graphed_capture(m, g, d->autocast);
    for (i = 0; i < g->num_leaves; i++)
        if (g->leaf[i] && result != TE_OK) te_tensor_zero_grad(g->leaf[i]);
    te__graphed_swap_grads(g, before);
    te->tape.quiet--;
    te__segment_cut(te, te->tape.segment, first_node); /* removes nodes that a failed pass has left on the tape */
    te__rng_back(te, random);
    te__frame_end(te, NULL, 0);
    if (result == TE_OK) {
        m->graphed = g;
        m->ungraph = te_graphed_reset;
        m->run_graphs = te__graphed_run;
    } else
        te__graphed_release(g);
    return result == TE_OK ? te_error_code(te) : result;
}

TE_API void te_graphed_reset(te_module *m) {
    if (!m || te__refuse_hook(m->te, "te_graphed_reset") != TE_OK) return;
    te__graphed_release(m->graphed);
    m->graphed = NULL;
}
TE_API te_result te_make_graphed_callables(te_ctx *te, te_module *const *modules, const te_forward_args *sample_args,
                                           int n, const te_graphed_desc *desc) {
    te_graphed_desc zero = TE_ZERO;
    te_result result = TE_OK;
    int i;
    if (te_error_code(te) != TE_OK) return te_error_code(te);
    if (!desc) desc = &zero;
    if (n < 0 || (n && (!modules || !sample_args)) || desc->num_warmup_iters < 0)
        return te__fail(te, TE_ERR_INVALID,
                        "te_make_graphed_callables: %d modules, num_warmup_iters %d; each module needs its sample, and "
                        "both counts 0 or more",
                        n, desc->num_warmup_iters);
    if (te->tape.root.num_nodes || te__quant_of(te)->num_autocast)
        return te__fail(
            te, TE_ERR_STATE, "te_make_graphed_callables: %s; call it before the first forward pass of a step",
            te__quant_of(te)->num_autocast ? "inside an autocast region" : "a forward pass waits for its te_backward");
    for (i = 0; i < n; i++)
        if (!modules[i] || modules[i]->te != te || modules[i]->graphed || modules[i]->evaluating ||
            !sample_args[i].input)
            return te__fail(te, TE_ERR_INVALID, "te_make_graphed_callables: module %d %s", i,
                            !modules[i]              ? "is NULL"
                            : modules[i]->te != te   ? "is of another context"
                            : modules[i]->graphed    ? "is graphed already; te_graphed_reset it first"
                            : modules[i]->evaluating ? "is in evaluation; te_module_train it"
                                                     : "has a sample without input");
    for (i = 1; i < n; i++) {
        int k = 0;
        while (modules[k] != modules[i]) k++;
        if (k < i)
            return te__fail(te, TE_ERR_INVALID,
                            "te_make_graphed_callables: modules %d and %d are one; its graphs keep the activations of "
                            "one call: give it once",
                            k, i);
    }
    for (i = 0; i < n && result == TE_OK; i++) {
        result = te__graphed_make(modules[i], &sample_args[i], desc);
        while (result != TE_OK && i-- > 0) te_graphed_reset(modules[i]);
    }
    return result;
}
