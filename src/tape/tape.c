/* tape/tape.c: records nodes, and plays them: runs their backward functions from the last node to the first. This file
 * must not depend on what a node computes. */

/* Returns the variable of x. If x has none yet, makes one. Returns NULL only if memory is exhausted. */
static te__var *te__var_of(te_tensor *x) {
    if (!x->var) {
        x->var = (te__var *)te__alloc_zero(x->te, sizeof(te__var));
        if (x->var) {
            x->var->refs = 1;
            x->var->leaf = x->requires_grad;
            x->var->passing = x->te->tape.plays > 0;
        }
    }
    return x->var;
}

TE_API te_tensor *te_tensor_set_requires_grad(te_tensor *x, bool on) {
    if (!x) return NULL;
    if (on && !te__is_float(x->dtype)) {
        te__fail(x->te, TE_ERR_DTYPE,
                 "te_tensor_set_requires_grad: a tensor of %s has no gradient; f32, f16 and bf16 have",
                 te_dtype_name(x->dtype));
        return x;
    }
    x->requires_grad = on;
    if (on && te__var_of(x)) x->var->leaf = true;
    return x;
}
TE_API bool te_tensor_requires_grad(const te_tensor *x) { return x && x->requires_grad; }
TE_API te_tensor *te_tensor_grad(const te_tensor *x) { return x && x->var ? x->var->grad : NULL; }
TE_API void te_tensor_zero_grad(te_tensor *x) {
    if (!x || !x->var || te__refuse_hook(x->te, "te_tensor_zero_grad") != TE_OK) return;
    te_tensor_release(x->var->grad);
    te_tensor_release(x->var->shard_grad);
    x->var->grad = x->var->shard_grad = NULL;
}
/* Returns true if the byte ranges of x and y overlap, each from its first to its last element. Interleaved rows count
 * as overlapping. */
static bool te__memory_meets(const te_tensor *x, const te_tensor *y) {
    const te_tensor *each[2];
    uintptr_t first[2], last[2];
    int i, k;
    each[0] = x;
    each[1] = y;
    for (i = 0; i < 2; i++) {
        if (!te__data(each[i]) || te__numel(each[i]) == 0) return false;
        first[i] = last[i] = (uintptr_t)te__data(each[i]);
        for (k = 0; k < each[i]->ndim; k++)
            last[i] += (uintptr_t)((each[i]->shape[k] - 1) * each[i]->stride[k] * te_dtype_bits(each[i]->dtype) / 8);
    }
    return first[0] <= last[1] && first[1] <= last[0];
}

/* Returns a new reference to `grad`. If `grad` has a variable, the reference is to an alias of `grad` without a
 * variable. This prevents a cycle of references. */
static te_tensor *te__kept_gradient(te_tensor *grad) {
    te_tensor *kept = grad;
    if (grad->var) {
        te__frame_begin(grad->te);
        kept = te_tensor_retain(te__alias_any(grad));
        te__frame_end(grad->te, NULL, 0);
    } else
        te_tensor_retain(kept);
    if (kept) kept->is_gradient = true;
    return kept;
}

TE_API te_result te_tensor_set_main_grad(te_tensor *x, te_tensor *main_grad) {
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (!x) return TE_ERR_STATE;
    if (te__refuse_hook(x->te, "te_tensor_set_main_grad") != TE_OK) return TE_ERR_STATE;
    if (main_grad && !te__same_shape(x, main_grad))
        return te__fail(x->te, TE_ERR_SHAPE, "te_tensor_set_main_grad: main_grad is %s, the tensor is %s",
                        te__shape_text(main_grad, a), te__shape_text(x, b));
    if (main_grad && main_grad->te != x->te)
        return te__fail(x->te, TE_ERR_INVALID, "te_tensor_set_main_grad: main_grad belongs to another context (%s)",
                        main_grad->te->device_name);
    if (main_grad && main_grad->dtype != TE_F32 && main_grad->dtype != x->dtype)
        return te__fail(x->te, TE_ERR_DTYPE,
                        "te_tensor_set_main_grad: main_grad is %s; f32 or the tensor's own %s are possible",
                        te_dtype_name(main_grad->dtype), te_dtype_name(x->dtype));
    if (main_grad && !main_grad->buffer) return te__no_plain_memory(main_grad, "te_tensor_set_main_grad");
    if (main_grad && (main_grad == x || te__memory_meets(x, main_grad)))
        return te__fail(x->te, TE_ERR_INVALID,
                        "te_tensor_set_main_grad: main_grad lies in the tensor's own memory %s: gradients would be "
                        "added into the weight",
                        te__shape_text(x, a));
    if (main_grad && (x->is_gradient || (main_grad->var && main_grad->var->main_grad)))
        return te__fail(
            x->te, TE_ERR_INVALID, "te_tensor_set_main_grad: %s; a gradient has no main gradient of its own",
            x->is_gradient ? "the tensor is itself a gradient of another" : "main_grad has a main gradient itself");
    if (!te__var_of(x)) return TE_ERR_OUT_OF_MEMORY;
    te_tensor_retain(main_grad);
    te_tensor_release(x->var->main_grad);
    x->var->main_grad = main_grad;
    if (main_grad) main_grad->is_gradient = true;
    return TE_OK;
}
TE_API te_tensor *te_tensor_main_grad(const te_tensor *x) { return x && x->var ? x->var->main_grad : NULL; }

TE_API te_result te_tensor_set_decoupled_grad(te_tensor *x, te_tensor *grad) {
    static const char function[] = "te_tensor_set_decoupled_grad";
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (!x) return TE_ERR_STATE;
    if (te__refuse_hook(x->te, function) != TE_OK) return TE_ERR_STATE;
    if (grad) {
        if (grad->te != x->te)
            return te__fail(x->te, TE_ERR_INVALID, "%s: the gradient belongs to another context (%s)", function,
                            grad->te->device_name);
        if (!te__same_shape(x, grad))
            return te__fail(x->te, TE_ERR_SHAPE, "%s: the gradient is %s, the tensor is %s", function,
                            te__shape_text(grad, a), te__shape_text(x, b));
        if (!te__is_float(grad->dtype) || !te__is_contiguous(grad))
            return te__fail(x->te, TE_ERR_INVALID,
                            "%s: the gradient is %s%s; a contiguous one in f32, f16 or bf16 is needed", function,
                            te_dtype_name(grad->dtype), te__is_contiguous(grad) ? "" : ", strided");
        if (!grad->buffer) return te__no_plain_memory(grad, function);
        grad = te__kept_gradient(grad);
        if (!grad) return te_error_code(x->te);
    }
    if (!grad && !x->var) return TE_OK;
    if (!te__var_of(x)) {
        te_tensor_release(grad);
        return TE_ERR_OUT_OF_MEMORY;
    }
    te_tensor_release(x->var->decoupled_grad);
    x->var->decoupled_grad = grad;
    return TE_OK;
}
TE_API te_tensor *te_tensor_decoupled_grad(const te_tensor *x) { return x && x->var ? x->var->decoupled_grad : NULL; }

TE_API te_result te_no_grad_begin(te_ctx *te) {
    if (!te) return TE_ERR_STATE;
    te->tape.no_grad++;
    return TE_OK;
}
TE_API void te_no_grad_end(te_ctx *te) {
    if (!te) return;
    if (te->tape.no_grad == 0) {
        te__fail(te, TE_ERR_STATE, "te_no_grad_end without te_no_grad_begin");
        return;
    }
    te->tape.no_grad--;
}
TE_API te_result te_enable_grad_begin(te_ctx *te) {
    if (!te) return TE_ERR_STATE;
    if (te->tape.num_grad_regions == TE__MAX_GRAD_REGIONS)
        return te__fail(
            te, TE_ERR_STATE,
            "te_enable_grad_begin: %d regions are open, which is the most; is a te_enable_grad_end missing?",
            TE__MAX_GRAD_REGIONS);
    te->tape.outer_no_grad[te->tape.num_grad_regions++] = te->tape.no_grad;
    te->tape.no_grad = 0;
    return TE_OK;
}
TE_API void te_enable_grad_end(te_ctx *te) {
    if (!te) return;
    if (te->tape.num_grad_regions == 0) {
        te__fail(te, TE_ERR_STATE, "te_enable_grad_end without te_enable_grad_begin");
        return;
    }
    te->tape.no_grad = te->tape.outer_no_grad[--te->tape.num_grad_regions];
}
TE_API bool te_grad_enabled(const te_ctx *te) { return te && te->tape.no_grad == 0; }

/* Returns whether a function of x must be recorded. */
static bool te__wants_grad(const te_tensor *x) { return x && x->requires_grad && x->te->tape.no_grad == 0; }

enum { TE__MAX_NODE_TENSORS = 1040 }; /* enough for the weights and biases of a GroupedLinear of TE_MAX_GEMMS groups */
static bool te__node_tensors_ok(te_ctx *te, const te_node_desc *desc, te_tensor *const *tensors, int count) {
    int i;
    for (i = 0; i < count; i++) {
        if (tensors[i] && te__need_memory(tensors[i], desc->name ? desc->name : "te_record") != TE_OK) return false;
        if (tensors[i] && tensors[i]->te != te) {
            te__fail(te, TE_ERR_INVALID, "te_record: %s: a tensor of another context (%s)",
                     desc->name ? desc->name : "?", tensors[i]->te->device_name);
            return false;
        }
    }
    return true;
}

/* Returns the path of the module whose forward function runs, with a new reference. Returns NULL outside of modules, or
 * if memory is exhausted. */
static te__path *te__path_now(te_ctx *te) {
    if (!te->path && te->module_path[0]) {
        te->path = (te__path *)te__try_alloc(te, sizeof(te__path));
        if (te->path) {
            te->path->refs = 1;
            te->path->root = te->root;
            memcpy(te->path->text, te->module_path, sizeof(te->module_path));
        }
    }
    if (te->path) te->path->refs++;
    return te->path;
}

/* Puts a node onto the tape if an input requires a gradient, or if `always` is true. A node on the tape owns
 * desc->state. */
static te_result te__record_node(te_ctx *te, const te_node_desc *desc, bool always) {
    te__segment *segment = te->tape.segment;
    te__node *node;
    bool wanted = always;
    int i;
    for (i = 0; i < desc->num_outputs; i++)
        if (!desc->outputs[i]) return TE_ERR_STATE;
    if (!te__node_tensors_ok(te, desc, desc->inputs, desc->num_inputs) ||
        !te__node_tensors_ok(te, desc, desc->outputs, desc->num_outputs) ||
        !te__node_tensors_ok(te, desc, desc->saved, desc->num_saved))
        return te->error_code;
    if (!desc->backward)
        return te__fail(te, TE_ERR_INVALID, "te_record: %s has no backward function", desc->name ? desc->name : "?");
    for (i = 0; i < desc->num_inputs; i++) te__tell_read(te, desc->inputs[i]);
    for (i = 0; i < desc->num_inputs; i++) wanted = wanted || te__wants_grad(desc->inputs[i]);
    if (!wanted) return TE_OK;
    if (desc->num_inputs > TE__MAX_NODE_TENSORS || desc->num_outputs > TE__MAX_NODE_TENSORS)
        return te__fail(te, TE_ERR_UNSUPPORTED, "te_record: %s has %d inputs and %d outputs; %d of each are possible",
                        desc->name ? desc->name : "?", desc->num_inputs, desc->num_outputs, TE__MAX_NODE_TENSORS);
    if (!te__grow(te, (void **)&segment->nodes, &segment->cap_nodes, segment->num_nodes, sizeof(te__node *)))
        return TE_ERR_OUT_OF_MEMORY;
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
    for (i = 0; i < desc->num_saved; i++) {
        node->saved[i] = te_tensor_retain(desc->saved[i]);
        if (node->saved[i]) te__note_saved(node->saved[i]);
    }
    if (te__saved_pack(te, node) != TE_OK) {
        te__node_free(te, node);
        return te->error_code != TE_OK ? te->error_code : TE_ERR_OUT_OF_MEMORY;
    }
    node->release = desc->release; /* set last: after a failure te__record_always releases the state, so
                                    * te__node_free must not release it */
    node->saved_at = te->writes;
    node->path = te__path_now(te);
    if (te->capture) {
        node->arena = te->capture->arena;
        node->arena->refs++;
    }
    segment->nodes[segment->num_nodes++] = node;
    return TE_OK;
}
/* Calls te__record_node. Releases desc->state if no node was recorded. */
static te_result te__record_always(te_ctx *te, const te_node_desc *desc, bool always) {
    int before = te->tape.segment->num_nodes;
    te_result result = te__record_node(te, desc, always);
    if (te->tape.segment->num_nodes == before && desc->release) desc->release(te, (void *)desc->state);
    return result == TE_OK ? te->error_code : result;
}
TE_API te_result te_record(te_ctx *te, const te_node_desc *desc) {
    te_result result;
    int i, before;
    if (!te) return TE_ERR_STATE;
    if (!te__has_desc(te, desc, "te_record")) return te->error_code;
    if (desc->num_inputs < 0 || desc->num_outputs < 0 || desc->num_saved < 0 || (desc->num_inputs && !desc->inputs) ||
        (desc->num_outputs && !desc->outputs) || (desc->num_saved && !desc->saved))
        return te__fail(te, TE_ERR_INVALID,
                        "te_record: %s has %d inputs, %d outputs and %d saved tensors; 0 or more of each, with their "
                        "lists, are needed",
                        desc->name ? desc->name : "?", desc->num_inputs, desc->num_outputs, desc->num_saved);
    for (i = 0; i < desc->num_outputs; i++)
        /* If the output is NULL because an earlier call has failed, te__fail keeps the error of that call. */
        if (!desc->outputs[i])
            te__fail(te, TE_ERR_STATE, "te_record: output %d of %d of %s is NULL", i + 1, desc->num_outputs,
                     desc->name ? desc->name : "?");
    before = te->tape.segment->num_nodes;
    result = te__record_always(te, desc, false);
    if (te->tape.segment->num_nodes > before) te->tape.segment->nodes[before]->foreign = true;
    return result;
}
/* Does what te_record does, but quantized gradients are not decoded for the node's backward function. */
static te_result te__record_quantized(te_ctx *te, const te_node_desc *desc) {
    te__segment *segment = te->tape.segment;
    int before = segment->num_nodes;
    te_result result = te__record_always(te, desc, false);
    if (segment->num_nodes > before) segment->nodes[before]->takes_quantized = true;
    return result;
}

/* Returns true if no other tensor uses the memory of x. Memory that te.h has not allocated counts as used. */
static bool te__tensor_is_alone(const te_tensor *x) {
    return x->refs == 1 && x->buffer && te__buffer_users(x->buffer) == 1 &&
           (x->buffer->capacity > 0 || x->buffer->bytes == 0);
}

/* Notes that a leaf has got its first gradient, or that of its slice. If a capture is under way and fails, it is
 * dropped. */
static void te__capture_has_grad(te_ctx *te, te__var *v) {
    te_graph *g = te->capture;
    if (!g || !v->leaf || !te__grow(te, (void **)&g->vars, &g->cap_vars, g->num_vars, sizeof(te__var *))) return;
    g->vars[g->num_vars++] = v;
    v->refs++;
}
/* Adds a gradient to a variable. The first gradient is not copied: the variable shares its memory (see
 * te__leaf_own). */
static te_result te__var_add_grad(te_ctx *te, te__var *v, te_tensor *grad) {
    te_op_axpby_args add = TE_ZERO;
    te_tensor *sum;
    te_result result;
    if (v->played)
        return te__fail(
            te, TE_ERR_STATE,
            "te_backward: a part of this graph was played backwards before and is gone; add the losses up and call "
            "te_backward once");
    if (te__need_memory(grad, "te_backward: a gradient") != TE_OK) return TE_ERR_STATE;
    if (!v->grad) {
        if (v->leaf && !v->fresh) {
            if (!te__grow(te, (void **)&te->tape.fresh, &te->tape.cap_fresh, te->tape.num_fresh, sizeof(te__var *)))
                return TE_ERR_OUT_OF_MEMORY;
            te->tape.fresh[te->tape.num_fresh++] = v;
            v->fresh = true;
            v->refs++;
        }
        v->grad = te__kept_gradient(grad);
        if (!v->grad) return te_error_code(te);
        te__capture_has_grad(te, v);
        if (te->warming && v->leaf &&
            te__grow(te, (void **)&te->tape.warm_vars, &te->tape.cap_warm_vars, te->tape.num_warm_vars,
                     sizeof(te__var *))) {
            te->tape.warm_vars[te->tape.num_warm_vars++] = v; /* has no meaningful value: te_warmup_end drops it */
            v->refs++;
        }
        return TE_OK;
    }
    if (v->grad->form) { /* a sum is never quantized */
        sum = v->grad->form->decode(v->grad, v->grad->dtype);
        if (!sum) return te_error_code(te);
        te_tensor_release(v->grad);
        v->grad = te__kept_gradient(sum);
        if (!v->grad) return te_error_code(te);
    }
    if (grad->form && !(grad = grad->form->decode(grad, grad->dtype))) return te_error_code(te);
    add.x = v->grad;
    add.y = grad;
    add.alpha = add.beta = 1.0f;
    if (te__tensor_is_alone(v->grad)) {
        add.out = v->grad;
        return te_op_axpby(te, &add);
    }
    if (v->leaf && v->grad->buffer && te__is_outside(v->grad->buffer))
        return te__refuse_capture(
            te, "te_backward adds to a gradient that was there before and that shares its memory",
            "forget gradients (te_optimizer_zero_grad, te_module_zero_grad) before te_graph_begin");
    sum = add.out = te__empty_like(v->grad, v->grad->dtype);
    if (!sum) return te_error_code(te);
    result = te_op_axpby(te, &add);
    if (result != TE_OK) return result;
    te_tensor_release(v->grad);
    v->grad = te__kept_gradient(sum);
    return TE_OK;
}

/* Returns the gradient so far of input i of the playing node: a plain contiguous tensor with the shape and dtype of
 * `like`, or NULL. */
static te_tensor *te__grad_so_far(te_ctx *te, int i, const te_tensor *like) {
    const te__var *v = te->playing ? te->playing->inputs[i] : NULL;
    te_tensor *grad = v && !v->played ? v->grad : NULL;
    if (!grad || !grad->buffer || grad->dtype != like->dtype || !te__same_shape(grad, like) || !te__is_contiguous(grad))
        return NULL;
    return v->leaf && te__is_outside(grad->buffer) ? NULL : grad; /* a launch of a graph cannot add to a gradient from
                                                                   * before the capture */
}
/* Returns the tensor to which the caller writes the sum of `so_far` and another gradient. Returns `so_far` itself if no
 * other tensor uses its memory. */
static te_tensor *te__grad_sum_place(te_tensor *so_far) {
    return te__tensor_is_alone(so_far) ? so_far : te__empty_like(so_far, so_far->dtype);
}
/* Makes `sum` the gradient of input i of the playing node. The backward function must then return no gradient for input
 * i. */
static void te__grad_sum_done(te_ctx *te, int i, te_tensor *sum) {
    te__var *v = te->playing->inputs[i];
    sum = te__kept_gradient(sum); /* `sum` has no variable, so this call only retains it */
    te_tensor_release(v->grad);
    v->grad = sum;
}

/* Makes sure that the gradient of a leaf is plain and contiguous, and has memory of its own. A gradient in memory from
 * before a capture is copied too, so that each launch of the graph writes the gradient. */
static te_result te__leaf_own(te_ctx *te, te__var *v) {
    te_tensor *grad = v->grad, *own;
    te_result result;
    if (!grad || v->flying) return TE_OK;
    if (te__tensor_is_alone(grad) && te__is_contiguous(grad) && !te__is_outside(grad->buffer)) return TE_OK;
    te__frame_begin(te);
    own = grad->form ? grad->form->decode(grad, grad->dtype) : te__empty_like(grad, grad->dtype);
    result = own ? TE_OK : te_error_code(te);
    if (own && !grad->form) result = te_tensor_copy(own, grad);
    if (result == TE_OK) {
        v->grad = te__kept_gradient(own);
        te_tensor_release(grad);
    }
    te__frame_end(te, NULL, 0);
    return result;
}
/* Ends a te_backward whose leaves begin at te->tape.fresh[first]. Completes their gradients, or drops them after a
 * failure.
 *
 * Leaves made outside of backward functions stay in the list after an inner te_backward. If the outer te_backward fails
 * later, it drops the gradients of these leaves too. */
static te_result te__leaves_own(te_ctx *te, int first, te_result result) {
    int i, kept = first;
    for (i = first; i < te->tape.num_fresh && result == TE_OK; i++) result = te__leaf_own(te, te->tape.fresh[i]);
    for (i = first; i < te->tape.num_fresh; i++) {
        te__var *v = te->tape.fresh[i];
        if (result == TE_OK && te->tape.plays > 1 && !v->passing) {
            te->tape.fresh[kept++] = v;
            continue;
        }
        if (result != TE_OK) {
            te_tensor_release(v->grad);
            v->grad = NULL;
        }
        v->fresh = false;
        te__var_release(te, v);
    }
    te->tape.num_fresh = kept;
    return result;
}

/* ---- playing ---- */

/* Checks that no saved tensor of a node was written after the forward pass. For a node of a capture, the
 * forward pass is the last launch of the graph. */
static te_result te__check_saved(te_ctx *te, const te__node *node) {
    uint64_t at = node->arena && node->arena->launched_at > node->saved_at ? node->arena->launched_at : node->saved_at;
    char before[sizeof(te->module_path)], what[160], shape[TE__SHAPE_TEXT];
    te_result result;
    int i;
    for (i = 0; i < node->num_saved; i++)
        if (node->saved[i] && te__written_since(node->saved[i], at)) break;
    if (i == node->num_saved) return TE_OK;
    if (node->saved[i]->name)
        snprintf(what, sizeof(what), "\"%.140s\"", node->saved[i]->name);
    else
        snprintf(what, sizeof(what), "its saved tensor %d of %d", i + 1, node->num_saved);
    memcpy(before, te->module_path, sizeof(before));
    if (node->path) memcpy(te->module_path, node->path->text, sizeof(before));
    result = te__fail(te, TE_ERR_STATE,
                      "te_backward: %s: %s, %s %s, was written after the forward pass whose value of it is needed now; "
                      "gradients would be wrong. Call "
                      "te_backward before what writes it (te_optimizer_step, te_tensor_copy, te_tensor_fill ...), run "
                      "the forward pass again after it, or "
                      "write to another tensor",
                      node->name, what, te_dtype_name(node->saved[i]->dtype), te__shape_text(node->saved[i], shape));
    memcpy(te->module_path, before, sizeof(before));
    return result;
}

/* Drops the gradients of the node's outputs. They are not needed once the node has been played. */
static void te__forget_outputs(te_ctx *te, te__node *node) {
    int i;
    (void)te;
    for (i = 0; i < node->num_outputs; i++)
        if (node->outputs[i]) {
            te_tensor_release(node->outputs[i]->grad);
            node->outputs[i]->grad = NULL;
        }
}

/* Begins to record into s, until te__segment_end. */
static void te__segment_begin(te_ctx *te, te__segment *s) {
    memset(s, 0, sizeof(*s));
    s->outer = te->tape.segment;
    te->tape.segment = s;
}
static void te__segment_end(te_ctx *te, te__segment *s) {
    int i;
    for (i = 0; i < s->num_nodes; i++)
        if (s->nodes[i]) te__forget_outputs(te, s->nodes[i]);
    te__segment_cut(te, s, 0);
    te__free(te, s->nodes);
    te->tape.segment = s->outer;
    for (i = 0; i < te__min(te->num_scopes, TE__MAX_SCOPES); i++) /* a scope may still point to s if scopes were not
                                                                   * ended properly inside s */
        if (te->scopes[i].segment == s) {
            te->scopes[i].segment = s->outer;
            te->scopes[i].first_node = s->outer->num_nodes;
        }
}

/* Decodes quantized gradients for a node, unless the node takes them as they are. The decoded tensors belong to the
 * current frame. */
static te_result te__decode_gradients(te_ctx *te, const te__node *node, te_tensor **grads) {
    int i;
    for (i = 0; i < node->num_outputs && !node->takes_quantized; i++) {
        if (!grads[i] || !grads[i]->form) continue;
        grads[i] = grads[i]->form->decode(grads[i], grads[i]->dtype);
        if (!grads[i]) return te_error_code(te);
    }
    return TE_OK;
}

/* Plays one node whose outputs have gradients. */
static te_result te__node_play(te_ctx *te, te__node *node) {
    te_tensor *grad_outputs[TE__MAX_NODE_TENSORS], *grad_inputs[TE__MAX_NODE_TENSORS];
    bool needs[TE__MAX_NODE_TENSORS];
    te_result result;
    int i;
    for (i = 0; i < node->num_outputs; i++) grad_outputs[i] = node->outputs[i] ? node->outputs[i]->grad : NULL;
    for (i = 0; i < node->num_inputs; i++) {
        grad_inputs[i] = NULL;
        needs[i] = node->inputs[i] != NULL;
    }
    result = te__tell_node(te, node, true);
    if (result == TE_OK) result = te__check_saved(te, node);
    if (result == TE_OK) {
        te__node *outer = te->playing;
        te__segment own; /* for the nodes that the backward function records */
        int grad_regions = te->tape.num_grad_regions, no_grad = te->tape.no_grad;
        te__frame_begin(te);
        te__segment_begin(te, &own);
        te->playing = node;
        result = te__saved_unpack(te, node);
        if (result == TE_OK) result = te__decode_gradients(te, node, grad_outputs);
        if (result == TE_OK)
            result = te__returned(te, node->backward(te, node->state, node->saved, grad_outputs, grad_inputs, needs),
                                  "te_backward: the backward function", node->name);
        te->playing = outer;
        if (te->tape.num_grad_regions != grad_regions || te->tape.no_grad != no_grad) {
            te->tape.num_grad_regions = grad_regions;
            te->tape.no_grad = no_grad;
            if (result == TE_OK)
                result = te__fail(te, TE_ERR_STATE,
                                  "te_backward: the backward function of %s begins and ends regions of te_no_grad or "
                                  "te_enable_grad unequally often",
                                  node->name);
        }
        te__segment_end(te, &own);
        for (i = 0; i < node->num_inputs && result == TE_OK; i++)
            if (needs[i] && grad_inputs[i]) result = te__var_add_grad(te, node->inputs[i], grad_inputs[i]);
        te__frame_end(te, NULL, 0);
    }
    if (result == TE_OK) result = te__tell_node(te, node, false);
    if (result != TE_OK)
        te__fail(te, result, "te_backward: the backward function of %s returned %s", node->name,
                 te_result_name(result));
    if (result == TE_OK && te->error_code != TE_OK) result = te->error_code;
    te__forget_outputs(te, node);
    for (i = 0; i < node->num_outputs; i++)
        if (node->outputs[i]) node->outputs[i]->played = true;
    return result;
}

/* A gradient that an outer te_backward has not used yet. It is put aside while an inner te_backward plays the same
 * segment. */
typedef struct te__stash {
    te__var *var; /* a reference */
    te_tensor *grad;
} te__stash;
static te__stash *te__stash_grads(te_ctx *te, te__segment *s, int *count) {
    te__stash *stash;
    int i, k, n = 0;
    for (i = 0; i < s->num_nodes; i++)
        for (k = 0; s->nodes[i] && k < s->nodes[i]->num_outputs; k++)
            n += s->nodes[i]->outputs[k] && s->nodes[i]->outputs[k]->grad;
    stash = (te__stash *)te__alloc(te, (size_t)n * sizeof(te__stash));
    *count = 0;
    for (i = 0; stash && i < s->num_nodes; i++)
        for (k = 0; s->nodes[i] && k < s->nodes[i]->num_outputs; k++) {
            te__var *v = s->nodes[i]->outputs[k];
            if (!v || !v->grad) continue;
            v->refs++;
            stash[*count].var = v;
            stash[(*count)++].grad = v->grad;
            v->grad = NULL;
        }
    return stash;
}
static te_result te__stash_return(te_ctx *te, te__stash *stash, int count) {
    te_result result = TE_OK;
    int i;
    for (i = 0; i < count; i++) {
        te__var *v = stash[i].var;
        if (v->played)
            result = te__fail(te, TE_ERR_STATE,
                              "te_backward: a te_backward inside a backward function has played a part of the tape "
                              "that the outer one needs as well; "
                              "record again, inside te_enable_grad_begin, what the inner one is to play");
        if (v->played || v->grad)
            te_tensor_release(stash[i].grad);
        else
            v->grad = stash[i].grad;
        te__var_release(te, v);
    }
    te__free(te, stash);
    return result;
}

/* Plays those nodes of s that gradients have reached, from the last node to the first. */
static te_result te__segment_play(te_ctx *te, te__segment *s) {
    te_result result = TE_OK;
    int i, k, kept = 0;
    s->plays++;
    for (i = s->num_nodes - 1; i >= 0 && result == TE_OK; i--) {
        te__node *node = i < s->num_nodes ? s->nodes[i] : NULL; /* a backward function may have ended scopes, which
                                                                 * frees nodes */
        bool reached = false;
        for (k = 0; node && k < node->num_outputs; k++)
            reached = reached || (node->outputs[k] && node->outputs[k]->grad);
        if (!reached) continue;
        s->nodes[i] = NULL;
        result = te__node_play(te, node);
        te__node_free(te, node);
    }
    for (i = 0; i < s->num_nodes && result != TE_OK; i++)
        if (s->nodes[i]) te__forget_outputs(te, s->nodes[i]); /* else the next te_backward would use these gradients */
    if (--s->plays > 0) return result; /* an outer te_backward relies on the indices */
    for (i = 0; i < s->num_nodes; i++)
        if (s->nodes[i]) s->nodes[kept++] = s->nodes[i];
    s->num_nodes = kept;
    return result;
}

/* Returns the segment whose node made v. Returns the root segment for a leaf or a played tensor. Returns NULL if a
 * scope freed the node. */
static te__segment *te__segment_of(te_ctx *te, const te__var *v) {
    te__segment *s;
    int i, k;
    for (s = te->tape.segment; s; s = s->outer)
        for (i = s->num_nodes - 1; i >= 0; i--)
            for (k = 0; s->nodes[i] && k < s->nodes[i]->num_outputs; k++)
                if (s->nodes[i]->outputs[k] == v) return s;
    return v->leaf || v->played ? &te->tape.root : NULL;
}

/* Plays segment s backwards from the tensors y[i], with the gradients grad[i]. All y[i] were made in s. A y[i]
 * whose grad[i] is NULL gets no gradient. */
static te_result te__backward_all(te_ctx *te, te__segment *s, te_tensor *const *y, te_tensor *const *grad, int count) {
    te__stash *stash = NULL;
    te__rng_state before = te__rng_now(te);
    te_result result = TE_OK;
    bool entered;
    int i, stashed = 0, fresh = te->tape.num_fresh, deferred = te__deferred_length(te);
    if (s->plays > 0) {
        stash = te__stash_grads(te, s, &stashed);
        if (!stash) return TE_ERR_OUT_OF_MEMORY;
    }
    if (te->tape.plays == 0) te__tell_backward_begins(te, s, y, count);
    te->tape.no_grad++;
    te->tape.plays++;
    result = te__device_enter(te, &entered);
    if (result == TE_OK) {
        for (i = 0; i < count && result == TE_OK; i++)
            if (grad[i]) result = te__var_add_grad(te, y[i]->var, grad[i]);
        if (result == TE_OK) result = te__segment_play(te, s);
        result = te__leaves_own(te, fresh, result);
        te__device_leave(te, entered);
    }
    if (stash) {
        te_result returned = te__stash_return(te, stash, stashed);
        if (result == TE_OK) result = returned;
    }
    te->tape.plays--;
    te->tape.no_grad--;
    if (result == TE_OK && te->tape.plays == 0) te__tell_backward_done(te);
    if (result == TE_OK) result = te->error_code;
    if (te->tape.plays == 0) result = te__tell_backward_ends(te, NULL, result);
    if (result != TE_OK) {
        te__deferred_cut(te, deferred);
        te__step_fails(te);
        te__rng_back(te, before);
    }
    return result;
}

/* Ends a te_backward from y that fails before it plays a node. Other ranks may wait for its collectives. */
static te_result te__backward_refused(te_tensor *y, te_result result) {
    te_ctx *te = y->te;
    te__segment *segment = y->var ? te__segment_of(te, y->var) : NULL;
    if (te->tape.plays > 0) return result;
    te__tell_backward_begins(te, segment ? segment : &te->tape.root, &y, 1);
    return te__tell_backward_ends(te, NULL, result);
}
/* Checks a call of te_backward_from. Sets *segment to where y was made. */
static te_result te__backward_check(te_tensor *y, te_tensor *grad, te__segment **segment) {
    te_ctx *te = y->te;
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (te->error_code != TE_OK) {
        te__step_fails(te);
        return te->error_code;
    }
    if (!te__same_shape(y, grad))
        return te__fail(te, TE_ERR_SHAPE, "te_backward_from: the tensor is %s, its gradient %s", te__shape_text(y, a),
                        te__shape_text(grad, b));
    if (grad->te != te)
        return te__fail(te, TE_ERR_INVALID,
                        "te_backward_from: the gradient belongs to another context (%s); copy it through the host",
                        grad->te->device_name);
    if (y->dtype != grad->dtype || grad->form)
        return te__fail(te, TE_ERR_DTYPE, "te_backward_from: the tensor is %s, its gradient %s%s; they must be alike",
                        te_dtype_name(y->dtype), grad->form ? "quantized, nominally " : "",
                        te_dtype_name(grad->dtype));
    *segment = y->requires_grad && y->var ? te__segment_of(te, y->var) : NULL;
    if (*segment) return TE_OK;
    return te__fail(te, TE_ERR_STATE,
                    "te_backward: the tensor does not depend on anything that requires a gradient (was it made inside "
                    "te_no_grad_begin, or in a scope that has ended?)");
}
static te_result te__backward(te_tensor *y, te_tensor *grad) {
    te__segment *segment = NULL;
    const te_result result = te__backward_check(y, grad, &segment);
    return result == TE_OK ? te__backward_all(y->te, segment, &y, &grad, 1) : te__backward_refused(y, result);
}

/* te__watch_scopes warns after this many te_backward calls outside of scopes. A call counts only if the number of live
 * tensors has grown. */
enum { TE__UNSCOPED_STEPS = 100 };
static void te__watch_scopes(te_ctx *te) {
    if (te->num_scopes > 0 || te->tape.unscoped == TE__UNSCOPED_STEPS) return;
    if (te->num_live > te->tape.unscoped_live && ++te->tape.unscoped == TE__UNSCOPED_STEPS)
        te__warn(te,
                 "te_backward was called %d times outside of any scope, and %d tensors are alive that nothing releases "
                 "before te_ctx_destroy: memory grows "
                 "with each step. Put te_scope_begin(te) before a step and te_scope_end(te) after it; te_tensor_retain "
                 "keeps a tensor beyond",
                 TE__UNSCOPED_STEPS, te->num_live);
    te->tape.unscoped_live = te->num_live;
}

TE_API te_result te_backward_from(te_tensor *y, te_tensor *grad) {
    te_result result;
    if (!y || !grad) return TE_ERR_STATE;
    result = te__backward(y, grad);
    te__watch_scopes(y->te);
    return result;
}

TE_API te_result te_backward(te_tensor *loss) {
    te_tensor *one;
    te_result result;
    char text[TE__SHAPE_TEXT];
    if (!loss) return TE_ERR_STATE;
    if (loss->te->error_code != TE_OK) {
        te__step_fails(loss->te);
        return te__backward_refused(loss, loss->te->error_code);
    }
    if (te__numel(loss) != 1) {
        result = te__fail(loss->te, TE_ERR_SHAPE,
                          "te_backward: the loss is %s; a tensor of one element is needed (te_mean_all, te_sum_all), "
                          "or te_backward_from with a gradient",
                          te__shape_text(loss, text));
        return te__backward_refused(loss, result);
    }
    te__frame_begin(loss->te);
    one = te_tensor_full(loss->te, loss->dtype, loss->ndim, loss->shape, 1.0);
    result = one ? te__backward(loss, one) : te__backward_refused(loss, te_error_code(loss->te));
    te__frame_end(loss->te, NULL, 0);
    te__watch_scopes(loss->te);
    return result;
}
