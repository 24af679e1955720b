/* core/tape.c: recording nodes and playing them backwards. Knows tensors and the one operation that adds two of them; must not
 * know what a node computes. */

/* The variable of x, made when it is first needed. NULL only when out of memory. */
static te__var *te__var_of(te_tensor *x) {
    if (!x->var) {
        x->var = (te__var *)te__alloc_zero(x->te, sizeof(te__var));
        if (x->var) {
            x->var->refs = 1;
            x->var->leaf = x->requires_grad;
        }
    }
    return x->var;
}

TE_API te_tensor *te_tensor_set_requires_grad(te_tensor *x, bool on) {
    if (!x) return NULL;
    if (on && !te__is_float(x->dtype)) {
        te__fail(x->te, TE_ERR_DTYPE, "te_tensor_set_requires_grad: a tensor of %s has no gradient; f32, f16 and bf16 have", te_dtype_name(x->dtype));
        return x;
    }
    x->requires_grad = on;
    if (on && te__var_of(x)) x->var->leaf = true;
    return x;
}
TE_API bool te_tensor_requires_grad(const te_tensor *x) { return x && x->requires_grad; }
TE_API te_tensor *te_tensor_grad(const te_tensor *x) { return x && x->var ? x->var->grad : NULL; }
TE_API void te_tensor_zero_grad(te_tensor *x) {
    if (!x || !x->var) return;
    te_tensor_release(x->var->grad);
    x->var->grad = NULL;
}
/* Do the bytes from the first to the last element of x meet those of y? Strided tensors may lie between each other's rows: they count as meeting. */
static bool te__memory_meets(const te_tensor *x, const te_tensor *y) {
    const te_tensor *each[2];
    uintptr_t first[2], last[2];
    int i, k;
    each[0] = x;
    each[1] = y;
    for (i = 0; i < 2; i++) {
        if (!te__data(each[i]) || te__numel(each[i]) == 0) return false;
        first[i] = last[i] = (uintptr_t)te__data(each[i]);
        for (k = 0; k < each[i]->ndim; k++) last[i] += (uintptr_t)((each[i]->shape[k] - 1) * each[i]->stride[k] * te_dtype_bits(each[i]->dtype) / 8);
    }
    return first[0] <= last[1] && first[1] <= last[0];
}

/* What a variable keeps of a gradient, retained: never a tensor with a variable of its own, which could hold, by some way round, the variable that
 * is to hold it. te_tensor_set_main_grad sees to the other half of that: a gradient gets no main gradient. */
static te_tensor *te__kept_gradient(te_tensor *grad) {
    te_tensor *kept = grad;
    if (grad->var) {
        te__frame_begin(grad->te);
        kept = te_tensor_retain(grad->quantized ? te__alias_quantized(grad) : te__alias(grad));
        te__frame_end(grad->te, NULL, 0);
    } else
        te_tensor_retain(kept);
    if (kept) kept->is_gradient = true;
    return kept;
}

TE_API te_result te_tensor_set_main_grad(te_tensor *x, te_tensor *main_grad) {
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (!x) return TE_ERR_STATE;
    if (main_grad && !te__same_shape(x, main_grad))
        return te__fail(x->te, TE_ERR_SHAPE, "te_tensor_set_main_grad: main_grad is %s, the tensor is %s", te__shape_text(main_grad, a),
                        te__shape_text(x, b));
    if (main_grad && main_grad->te != x->te)
        return te__fail(x->te, TE_ERR_INVALID, "te_tensor_set_main_grad: main_grad belongs to another context (%s)", main_grad->te->device_name);
    if (main_grad && main_grad->dtype != TE_F32 && main_grad->dtype != x->dtype)
        return te__fail(x->te, TE_ERR_DTYPE, "te_tensor_set_main_grad: main_grad is %s; f32 or the tensor's own %s are possible",
                        te_dtype_name(main_grad->dtype), te_dtype_name(x->dtype));
    if (main_grad && !main_grad->buffer) return te__no_plain_memory(main_grad, "te_tensor_set_main_grad");
    if (main_grad && (main_grad == x || te__memory_meets(x, main_grad)))
        return te__fail(x->te, TE_ERR_INVALID, "te_tensor_set_main_grad: main_grad lies in the tensor's own memory %s: gradients would be added into the weight",
                        te__shape_text(x, a));
    if (main_grad && (x->is_gradient || (main_grad->var && main_grad->var->main_grad)))
        return te__fail(x->te, TE_ERR_INVALID, "te_tensor_set_main_grad: %s; a gradient has no main gradient of its own",
                        x->is_gradient ? "the tensor is itself a gradient of another" : "main_grad has a main gradient itself");
    if (!te__var_of(x)) return TE_ERR_OUT_OF_MEMORY;
    te_tensor_retain(main_grad);
    te_tensor_release(x->var->main_grad);
    x->var->main_grad = main_grad;
    if (main_grad) main_grad->is_gradient = true;
    return TE_OK;
}
TE_API te_tensor *te_tensor_main_grad(const te_tensor *x) { return x && x->var ? x->var->main_grad : NULL; }

TE_API void te_no_grad_begin(te_ctx *te) {
    if (te) te->tape.no_grad++;
}
TE_API void te_no_grad_end(te_ctx *te) {
    if (!te) return;
    if (te->tape.no_grad == 0) {
        te__fail(te, TE_ERR_STATE, "te_no_grad_end without te_no_grad_begin");
        return;
    }
    te->tape.no_grad--;
}
TE_API bool te_grad_enabled(const te_ctx *te) { return te && te->tape.no_grad == 0; }

/* Will a function of x have to be recorded? */
static bool te__wants_grad(const te_tensor *x) { return x && x->requires_grad && x->te->tape.no_grad == 0; }

static bool te__node_tensors_ok(te_ctx *te, const te_node_desc *desc, te_tensor *const *tensors, int count) {
    int i;
    for (i = 0; i < count; i++) {
        if (tensors[i] && te__need_memory(tensors[i], desc->name ? desc->name : "te_record") != TE_OK) return false;
        if (tensors[i] && tensors[i]->te != te) {
            te__fail(te, TE_ERR_INVALID, "te_record: %s: a tensor of another context (%s)", desc->name ? desc->name : "?", tensors[i]->te->device_name);
            return false;
        }
    }
    return true;
}

TE_API te_result te_record(te_ctx *te, const te_node_desc *desc) {
    te__node *node;
    bool wanted = false;
    int i;
    if (!te || !desc) return TE_ERR_STATE;
    for (i = 0; i < desc->num_outputs; i++)
        if (!desc->outputs[i]) return TE_ERR_STATE;
    if (!te__node_tensors_ok(te, desc, desc->inputs, desc->num_inputs) || !te__node_tensors_ok(te, desc, desc->outputs, desc->num_outputs) ||
        !te__node_tensors_ok(te, desc, desc->saved, desc->num_saved))
        return te->error_code;
    if (!desc->backward) return te__fail(te, TE_ERR_INVALID, "te_record: %s has no backward function", desc->name ? desc->name : "?");
    for (i = 0; i < desc->num_inputs; i++) wanted = wanted || te__wants_grad(desc->inputs[i]);
    if (!wanted) return TE_OK;
    if (!te__grow(te, (void **)&te->tape.nodes, &te->tape.cap_nodes, te->tape.num_nodes, sizeof(te__node *))) return TE_ERR_OUT_OF_MEMORY;
    node = (te__node *)te__alloc_zero(te, sizeof(te__node));
    if (!node) return TE_ERR_OUT_OF_MEMORY;
    node->name = desc->name ? desc->name : "?";
    node->backward = desc->backward;
    node->inputs = (te__var **)te__alloc_zero(te, (size_t)desc->num_inputs * sizeof(te__var *));
    node->outputs = (te__var **)te__alloc_zero(te, (size_t)desc->num_outputs * sizeof(te__var *));
    node->saved = (te_tensor **)te__alloc_zero(te, (size_t)desc->num_saved * sizeof(te_tensor *));
    node->state = te__alloc_zero(te, desc->state_size);
    node->state_size = desc->state_size;
    if (node->inputs) node->num_inputs = desc->num_inputs;
    if (node->outputs) node->num_outputs = desc->num_outputs;
    if (node->saved) node->num_saved = desc->num_saved;
    if (!node->inputs || !node->outputs || !node->saved || !node->state) {
        te__node_free(te, node);
        return TE_ERR_OUT_OF_MEMORY;
    }
    if (desc->state_size) memcpy(node->state, desc->state, desc->state_size);
    for (i = 0; i < desc->num_inputs; i++)
        if (te__wants_grad(desc->inputs[i]) && te__var_of(desc->inputs[i])) {
            node->inputs[i] = desc->inputs[i]->var;
            node->inputs[i]->refs++;
        }
    for (i = 0; i < desc->num_outputs; i++) {
        desc->outputs[i]->requires_grad = true;
        if (!te__var_of(desc->outputs[i])) continue;
        desc->outputs[i]->var->leaf = false;
        node->outputs[i] = desc->outputs[i]->var;
        node->outputs[i]->refs++;
    }
    for (i = 0; i < desc->num_saved; i++) node->saved[i] = te_tensor_retain(desc->saved[i]);
    te->tape.nodes[te->tape.num_nodes++] = node;
    return te->error_code == TE_OK ? TE_OK : te->error_code;
}

/* Adds a gradient to a variable. The first one is shared, not copied: gradients are read-only until they are added up. */
static te_result te__var_add_grad(te_ctx *te, te__var *v, te_tensor *grad) {
    te_axpby_args add = TE_ZERO;
    te_tensor *sum;
    te_result result;
    if (v->played)
        return te__fail(te, TE_ERR_STATE, "te_backward: a part of this graph was played backwards before and is gone; add the losses up and call "
                                          "te_backward once");
    if (te__need_memory(grad, "te_backward: a gradient") != TE_OK) return TE_ERR_STATE;
    if (!v->grad) {
        v->grad = te__kept_gradient(grad);
        if (!v->grad) return te_error_code(te);
        if (te->capture && v->leaf && te__grow(te, (void **)&te->capture->vars, &te->capture->cap_vars, te->capture->num_vars, sizeof(te__var *))) {
            te->capture->vars[te->capture->num_vars++] = v; /* forgotten if the capture comes to nothing */
            v->refs++;
        }
        if (te->warming && v->leaf && te__grow(te, (void **)&te->warm_vars, &te->cap_warm_vars, te->num_warm_vars, sizeof(te__var *))) {
            te->warm_vars[te->num_warm_vars++] = v; /* holds no meaningful value: te_warmup_end forgets it */
            v->refs++;
        }
        return TE_OK;
    }
    add.x = v->grad;
    add.y = grad;
    add.alpha = add.beta = 1.0f;
    if (v->grad->refs == 1 && v->grad->buffer && te__buffer_users(v->grad->buffer) == 1) { /* nobody else looks at it */
        add.out = v->grad;
        return te_axpby(te, &add);
    }
    if (v->leaf && v->grad->buffer && te__is_outside(v->grad->buffer))
        return te__refuse_capture(te, "te_backward adds to a gradient that was there before and that shares its memory",
                                  "forget gradients (te_optimizer_zero_grad, te_module_zero_grad) before te_graph_begin");
    sum = add.out = te__empty_like(v->grad, v->grad->dtype);
    if (!sum) return te_error_code(te);
    result = te_axpby(te, &add);
    if (result != TE_OK) return result;
    te_tensor_release(v->grad);
    v->grad = te__kept_gradient(sum);
    return TE_OK;
}

/* For a backward function that can add up gradients on its way: what input i of its node has gathered so far, as a plain tensor like `like`; NULL
 * if there is nothing of that kind. */
static te_tensor *te__grad_so_far(te_ctx *te, int i, const te_tensor *like) {
    const te__var *v = te->playing ? te->playing->inputs[i] : NULL;
    te_tensor *grad = v && !v->played ? v->grad : NULL;
    if (!grad || !grad->buffer || grad->dtype != like->dtype || !te__same_shape(grad, like) || !te__is_contiguous(grad)) return NULL;
    return v->leaf && te__is_outside(grad->buffer) ? NULL : grad; /* a launch of the graph would not find it there again */
}
/* Where the sum goes: into its own place if nobody else looks at it. */
static te_tensor *te__grad_sum_place(te_tensor *so_far) {
    return so_far->refs == 1 && te__buffer_users(so_far->buffer) == 1 ? so_far : te__empty_like(so_far, so_far->dtype);
}
/* The sum is there: the backward function gives no gradient of input i. */
static void te__grad_sum_done(te_ctx *te, int i, te_tensor *sum) {
    te__var *v = te->playing->inputs[i];
    sum = te__kept_gradient(sum); /* made for this: it has no variable */
    te_tensor_release(v->grad);
    v->grad = sum;
}

enum { TE__MAX_NODE_TENSORS = 64 };

/* Plays one node whose outputs have gradients. */
static te_result te__node_play(te_ctx *te, te__node *node) {
    te_tensor *grad_outputs[TE__MAX_NODE_TENSORS], *grad_inputs[TE__MAX_NODE_TENSORS];
    bool needs[TE__MAX_NODE_TENSORS];
    te__node *outer;
    te_result result;
    int i;
    if (node->num_inputs > TE__MAX_NODE_TENSORS || node->num_outputs > TE__MAX_NODE_TENSORS)
        return te__fail(te, TE_ERR_UNSUPPORTED, "%s: a node of %d inputs and %d outputs; %d of each are possible", node->name, node->num_inputs,
                        node->num_outputs, TE__MAX_NODE_TENSORS);
    for (i = 0; i < node->num_outputs; i++) grad_outputs[i] = node->outputs[i] ? node->outputs[i]->grad : NULL;
    for (i = 0; i < node->num_inputs; i++) {
        grad_inputs[i] = NULL;
        needs[i] = node->inputs[i] != NULL;
    }
    te__frame_begin(te);
    outer = te->playing;
    te->playing = node;
    result = node->backward(te, node->state, node->saved, grad_outputs, grad_inputs, needs);
    te->playing = outer;
    for (i = 0; i < node->num_inputs && result == TE_OK; i++)
        if (needs[i] && grad_inputs[i]) result = te__var_add_grad(te, node->inputs[i], grad_inputs[i]);
    te__frame_end(te, NULL, 0);
    if (result != TE_OK) te__fail(te, result, "te_backward: the backward function of %s returned %s", node->name, te_result_name(result));
    if (result == TE_OK && te->error_code != TE_OK) result = te->error_code;
    for (i = 0; i < node->num_outputs; i++)
        if (node->outputs[i]) {
            te_tensor_release(node->outputs[i]->grad);
            node->outputs[i]->grad = NULL;
            node->outputs[i]->played = true;
        }
    return result;
}

TE_API te_result te_backward_from(te_tensor *y, te_tensor *grad) {
    te_ctx *te;
    te_result result;
    bool entered;
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    int i, kept;
    if (!y || !grad) return TE_ERR_STATE;
    te = y->te;
    if (te->error_code != TE_OK) return te->error_code;
    if (!te__same_shape(y, grad))
        return te__fail(te, TE_ERR_SHAPE, "te_backward_from: the tensor is %s, its gradient %s", te__shape_text(y, a), te__shape_text(grad, b));
    if (grad->te != te)
        return te__fail(te, TE_ERR_INVALID, "te_backward_from: the gradient belongs to another context (%s); copy it through the host", grad->te->device_name);
    if (y->dtype != grad->dtype || grad->quantized)
        return te__fail(te, TE_ERR_DTYPE, "te_backward_from: the tensor is %s, its gradient %s%s; they must be alike", te_dtype_name(y->dtype),
                        grad->quantized ? "quantized, nominally " : "", te_dtype_name(grad->dtype));
    if (!y->requires_grad || !y->var)
        return te__fail(te, TE_ERR_STATE, "te_backward: the tensor does not depend on anything that requires a gradient (was it made inside "
                                          "te_no_grad_begin, or in a scope that has ended?)");
    result = te__device_enter(te, &entered);
    if (result != TE_OK) return result;
    te->tape.no_grad++;
    result = te__var_add_grad(te, y->var, grad);
    for (i = te->tape.num_nodes - 1; i >= 0 && result == TE_OK; i--) {
        te__node *node = te->tape.nodes[i];
        bool reached = false;
        int k;
        for (k = 0; k < node->num_outputs; k++) reached = reached || (node->outputs[k] && node->outputs[k]->grad);
        if (!reached) continue;
        result = te__node_play(te, node);
        te__node_free(te, node);
        te->tape.nodes[i] = NULL;
    }
    kept = 0;
    for (i = 0; i < te->tape.num_nodes; i++)
        if (te->tape.nodes[i]) te->tape.nodes[kept++] = te->tape.nodes[i];
    te->tape.num_nodes = kept;
    te->tape.no_grad--;
    if (result == TE_OK && te->after_backward) te->after_backward(te);
    te__device_leave(te, entered);
    return result == TE_OK && te->error_code != TE_OK ? te->error_code : result;
}

TE_API te_result te_backward(te_tensor *loss) {
    te_tensor *one;
    te_result result;
    char text[TE__SHAPE_TEXT];
    if (!loss) return TE_ERR_STATE;
    if (loss->te->error_code != TE_OK) return loss->te->error_code;
    if (te__numel(loss) != 1)
        return te__fail(loss->te, TE_ERR_SHAPE, "te_backward: the loss is %s; a tensor of one element is needed (te_mean_all, te_sum_all), or "
                                                "te_backward_from with a gradient", te__shape_text(loss, text));
    te__frame_begin(loss->te);
    one = te_tensor_full(loss->te, loss->dtype, loss->ndim, loss->shape, 1.0);
    result = one ? te_backward_from(loss, one) : te_error_code(loss->te);
    te__frame_end(loss->te, NULL, 0);
    return result;
}
