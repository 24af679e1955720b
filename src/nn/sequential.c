/* nn/sequential.c: Sequential, which runs its children one after another and fuses some of them. Also the modules that
 * apply one function. This file must not depend on attention. */

/* ---- modules that apply one function ---- */

static te_result te__activation_forward(te_module *m, te_forward_args *args) {
    const te_activation_desc *d = (const te_activation_desc *)m->state;
    return te__output(m, args, te_activate(args->input, d->activation, &d->activation_params));
}
static const te_module_class te__activation_class = {"Activation", sizeof(te_activation_desc), te__activation_forward,
                                                     NULL, NULL};
TE_API te_module *te_activation_create(te_ctx *te, const te_activation_desc *desc) {
    te_module *m;
    if (!te || !te__has_desc(te, desc, "te_activation_create")) return NULL;
    if (desc->activation && !te__activation_known(desc->activation))
        return te__no_module(te, TE_ERR_INVALID, "te_activation_create: activation %d is not in te_activation",
                             (int)desc->activation);
    m = te__module_with_desc(te, &te__activation_class, desc, desc->name, "activation");
    if (m && desc->activation == TE_ACTIVATION_DEFAULT) ((te_activation_desc *)m->state)->activation = TE_GELU;
    return te__module_built(m);
}

static te_result te__bias_forward(te_module *m, te_forward_args *args) {
    return te__output(m, args, te_bias_dropout_add(args->input, te_module_parameter(m, "bias"), NULL, 0.0f));
}
static te_result te__bias_reset(te_module *m) { return te_tensor_fill(te_module_parameter(m, "bias"), 0.0); }
static const te_module_class te__bias_class = {"Bias", sizeof(te_bias_desc), te__bias_forward, NULL, te__bias_reset};
TE_API te_module *te_bias_create(te_ctx *te, const te_bias_desc *desc) {
    te_module *m;
    if (!te || !te__has_desc(te, desc, "te_bias_create") ||
        !te__layer_desc_ok(te, "te_bias_create", desc->size, desc->size, desc->params_dtype))
        return NULL;
    m = te__module_named(te, &te__bias_class, desc->name, "bias");
    if (!m) return NULL;
    te__params_on(m, desc->device);
    te__add_weight(m, "bias", desc->params_dtype, desc->size, 0);
    return te__module_built(m);
}

static te_result te__scale_forward(te_module *m, te_forward_args *args) {
    return te__output(m, args, te_scale(args->input, ((const te_constant_scale_desc *)m->state)->scale));
}
static const te_module_class te__scale_class = {"ConstantScale", sizeof(te_constant_scale_desc), te__scale_forward,
                                                NULL, NULL};
TE_API te_module *te_constant_scale_create(te_ctx *te, const te_constant_scale_desc *desc) {
    if (!te || !te__has_desc(te, desc, "te_constant_scale_create")) return NULL;
    return te__module_built(te__module_with_desc(te, &te__scale_class, desc, desc->name, "constant_scale"));
}

static te_result te__dropout_forward(te_module *m, te_forward_args *args) {
    float p = te_module_is_training(m) ? ((const te_dropout_desc *)m->state)->p : 0.0f;
    return te__output(m, args, p != 0.0f ? te_dropout(args->input, p) : args->input);
}
static const te_module_class te__dropout_class = {"Dropout", sizeof(te_dropout_desc), te__dropout_forward, NULL, NULL};
TE_API te_module *te_dropout_create(te_ctx *te, const te_dropout_desc *desc) {
    if (!te || !te__has_desc(te, desc, "te_dropout_create")) return NULL;
    if (!(desc->p >= 0.0f && desc->p < 1.0f))
        return te__no_module(te, TE_ERR_INVALID,
                             "te_dropout_create: p is %g; a probability from 0 up to, and without, 1 is needed",
                             (double)desc->p);
    return te__module_built(te__module_with_desc(te, &te__dropout_class, desc, desc->name, "dropout"));
}

static te_result te__identity_forward(te_module *m, te_forward_args *args) { return te__output(m, args, args->input); }
static const te_module_class te__identity_class = {"Identity", 0, te__identity_forward, NULL, NULL};
TE_API te_module *te_identity_create(te_ctx *te, const char *name) {
    return te ? te__module_built(te__module_named(te, &te__identity_class, name, "identity")) : NULL;
}

static te_result te__l2_module_forward(te_module *m, te_forward_args *args) {
    return te__output(m, args, te_l2_normalization(args->input, ((const te_l2normalization_desc *)m->state)->eps));
}
static const te_module_class te__l2_class = {"L2Normalization", sizeof(te_l2normalization_desc), te__l2_module_forward,
                                             NULL, NULL};
TE_API te_module *te_l2normalization_create(te_ctx *te, const te_l2normalization_desc *desc) {
    if (!te || !te__has_desc(te, desc, "te_l2normalization_create")) return NULL;
    return te__module_built(te__module_with_desc(te, &te__l2_class, desc, desc->name, "l2normalization"));
}

/* ---- chains ---- */

/* Returns true if m may run fused with other children of a Sequential. A replaced forward function, checkpointing or
 * captured graphs prevent this. */
static bool te__chains(const te_module *m) { return !m->own_forward && !m->checkpoint && !te__runs_graphs(m); }
static bool te__is_norm(const te_module *m) { return m->cls == &te__layernorm_class || m->cls == &te__rmsnorm_class; }
static bool te__is_activation(const te_module *m) { return m->cls == &te__activation_class; }
static bool te__is_linear(const te_module *m) { return m->cls == &te__linear_class; }

/* State that a Sequential passes from one child to the next, to fuse them. */
typedef struct te__chain {
    te_module *front;      /* the norm or activation before the current Linear, if it is fused with this Linear;
                            * otherwise NULL */
    bool leaves_bias;      /* true: the gradient of the current Linear's bias is computed by the activation after it */
    te_activation activation; /* the kind of the activation, if leaves_bias */
    bool made;             /* true: the previous child was a Linear with leaves_bias true. The fields quant, grad and z
                            * are then set. */
    te__quant_call quant;
    te__act_grad grad;
    te_tensor *z;          /* output of the previous child, if `made` */
} te__chain;

/* Returns activation(x). If `spec` is not NULL, the result is quantized as `spec` says. */
static te_tensor *te__chain_activate(te__chain *chain, const te_module *m, te_tensor *x, const te__quant_spec *spec,
                                     const te__quant_call *q) {
    const te_activation_desc *d = (const te_activation_desc *)m->state;
    return te__activate_for(x, d->activation, &d->activation_params, spec, chain->made ? &chain->grad : NULL, q, 0);
}

/* Runs a Linear together with the norm or activation in front of it. */
static te_result te__chain_linear(te_module *m, te_forward_args *args, void *user) {
    te__chain *chain = (te__chain *)user, before = *chain;
    te_tensor *bias = te__product_bias(m, &((te__linear_module *)m->state)->params), *x = args->input;
    const te_module *front = before.front;
    te__quant_call quant;
    te__quant_spec spec;
    te__linear_call call;
    te_result result = te__linear_begin(m, args, &quant, &call);
    const te__quant_spec *fused = NULL;
    const te_activation_desc *act = front && te__is_activation(front) ? (const te_activation_desc *)front->state : NULL;
    chain->made = false;
    if (result != TE_OK) return result;
    if (!call.save_original_input)
        fused = act ? te__fused_act_spec(&call, &act->activation_params, &spec) : te__fused_norm_spec(&call, x, &spec);
    if (act) call.act_epilogue = te__activation_row_of(act->activation)->epilogue;
    if (front && te__is_norm(front)) {
        call.x = te__norm_run_for((te_module *)front, (const te__norm_params *)front->state, x, fused, &quant, 0);
    } else if (call.act_epilogue && before.made && before.z == x && !quant.enabled && !before.quant.enabled) {
        call.act_of = x; /* the backward function of this GEMM computes the gradient of the activation, too */
        call.act_bias = before.grad.bias;
        m->te->tape.no_grad++;
        call.x = te__activate(x, act->activation, NULL, NULL, NULL);
        m->te->tape.no_grad--;
    } else call.x = front ? te__chain_activate(&before, front, x, fused, &quant) : x;
    call.bias_grad_elsewhere = chain->leaves_bias;
    result = te__linear_end(m, args, &call, bias);
    if (result != TE_OK || !chain->leaves_bias) return result;
    chain->grad = te__act_grad_of(&call, chain->activation, true);
    chain->quant = quant;
    if (chain->grad.quant) chain->grad.quant = &chain->quant;
    chain->z = args->outputs.out;
    chain->made = true;
    return result;
}
/* Runs an activation that no Linear follows. */
static te_result te__chain_activation(te_module *m, te_forward_args *args, void *user) {
    te__chain *chain = (te__chain *)user;
    te_tensor *y = te__chain_activate(chain, m, args->input, NULL, NULL);
    chain->made = false;
    return te__output(m, args, y);
}

/* Returns true if the activation `act`, which follows the Linear m, can compute the gradient of the Linear's bias. */
static bool te__leaves_bias(const te_module *m, const te_module *act, const te_forward_args *args) {
    const te_linear_desc *d = &((const te__linear_module *)m->state)->desc;
    return te__is_activation(act) && te__chains(act) &&
           ((const te_activation_desc *)act->state)->activation_params.glu_interleave_size == 0 &&
           !d->gemm.return_bias && d->parallel.parallel_mode != TE_PARALLEL_ROW &&
           ((const te__linear_module *)m->state)->params.count == 1 && !args->fp8_output && !args->fp8_grad;
}

/* Runs the child at index *at, and the children after it that can be fused. Sets *at to the last child that ran. */
static te_result te__sequential_child(te_module *m, int *at, te_forward_args *call, te__chain *chain) {
    te_module *c = m->children[*at], *next = *at + 1 < m->num_children ? m->children[*at + 1] : NULL;
    const bool chains = te__chains(c) && !te__is_unallocated(call->input);
    te_result result;
    chain->front = NULL;
    if (chains && next && (te__is_norm(c) || te__is_activation(c)) && te__is_linear(next) && te__chains(next) &&
        !call->fp8_output && !call->fp8_grad) {
        chain->front = c;
        c = next;
        next = ++*at + 1 < m->num_children ? m->children[*at + 1] : NULL;
    }
    chain->leaves_bias = te__is_linear(c) && chains && next && te__leaves_bias(c, next, call);
    if (chain->leaves_bias) chain->activation = ((const te_activation_desc *)next->state)->activation;
    if (chain->front || chain->leaves_bias) return te__module_run_as(c, call, te__chain_linear, chain);
    if (chains && te__is_activation(c) && chain->made) return te__module_run_as(c, call, te__chain_activation, chain);
    result = te_forward_with(c, call) ? TE_OK : te_error_code(m->te) != TE_OK ? te_error_code(m->te) : TE_ERR_STATE;
    chain->made = false;
    return result;
}

/* ---- Sequential ---- */

/* Returns the name of an output in y that is set besides the main one, or NULL if there is none. */
static const char *te__output_beside(const te_outputs *y) {
#define TE__BESIDE(field, onnx, passes) \
    if (!(passes) && y->field) return #field;
    TE__OUTPUT_LIST(TE__BESIDE)
#undef TE__BESIDE
    return NULL;
}
/* Runs the children in order. te__frame_sweep releases a child's input after the child has run, unless the tape retains
 * it. */
static te_result te__sequential_forward(te_module *m, te_forward_args *args) {
    te_forward_args call = *args;
    te_tensor *made[TE__OUTPUTS];
    te__chain chain = TE_ZERO;
    te_result result = TE_OK;
    int i;
    memset(&call.outputs, 0, sizeof(call.outputs));
    call.outputs.out = args->input; /* the result if there are no children */
    te__frame_begin(m->te);
    for (i = 0; i < m->num_children && result == TE_OK; i++) {
        const char *beside = te__output_beside(&call.outputs);
        if (beside) {
            const te_module *before = m->children[i - 1];
            result = te__fail(
                m->te, TE_ERR_STATE,
                "Sequential: child \"%s\", a %s, gives its %s beside its output, and \"%s\" after it takes one input; "
                "leave out what makes "
                "it return more (return_bias, return_layernorm_output), or write a class of your own around them",
                before->name, before->cls->name, beside, m->children[i]->name);
            break;
        }
        call.input = call.outputs.out;
        result = te__sequential_child(m, &i, &call, &chain);
        te__outputs_list(&call.outputs, made);
        te__frame_sweep(m->te, made, TE__OUTPUTS);
    }
    te__outputs_list(&call.outputs, made);
    te__frame_end(m->te, made, result == TE_OK ? TE__OUTPUTS : 0);
    args->outputs = call.outputs;
    return result;
}
static const te_module_class te__sequential_class = {"Sequential", 0, te__sequential_forward, NULL, NULL};

/* Checks that all n modules of `children` can become children, and that none is listed twice. */
static te_result te__sequential_children_ok(te_ctx *te, te_module *const *children, int n) {
    int i, k;
    if (n < 0 || (n > 0 && !children))
        return te__fail(te, TE_ERR_INVALID, "te_sequential_create: %d children%s", n,
                        n > 0 ? ", and the list is NULL" : "; 0 or more are possible");
    for (i = 0; i < n; i++) {
        const te_module *c = children[i];
        if (!c) return te__fail(te, TE_ERR_INVALID, "te_sequential_create: child %d of %d is NULL", i, n);
        if (c->te != te)
            return te__fail(
                te, TE_ERR_INVALID,
                "te_sequential_create: child %d, \"%s\", is of another context (%s); create it in this one (%s)", i,
                c->name, c->te->device_name, te->device_name);
        for (k = 0; k < i && children[k] != c; k++) {}
        if (c->parent || k < i)
            return te__fail(
                te, TE_ERR_INVALID,
                "te_sequential_create: child %d, \"%s\", is %s%s already; a module has one place in one tree (to "
                "tie weights, give "
                "two modules one parameter: te_module_add_parameter)",
                i, c->name, c->parent ? "a child of " : "in this list", c->parent ? c->parent->name : "");
    }
    return TE_OK;
}

/* Destroys the modules of `children` that have no parent. `children` may list a module twice, or list a module and one
 * of its descendants. So the orphans are first linked through `parent`: a single pass could read a destroyed module. */
static void te__destroy_orphans(te_module *const *children, int n) {
    te_module end, *first = &end;
    int i;
    for (i = 0; children && i < n; i++)
        if (children[i] && !children[i]->parent) {
            children[i]->parent = first;
            first = children[i];
        }
    while (first != &end) {
        te_module *m = first;
        first = m->parent;
        m->parent = NULL;
        te_module_destroy(m);
    }
}

/* Returns true if child i keeps its own name and does not get a number as its name. */
static bool te__sequential_keeps_name(te_module *const *children, int n, int i) {
    int k;
    for (k = 0; k < n; k++)
        if (k != i && children[k]->named && strcmp(children[k]->name, children[i]->name) == 0) return false;
    return children[i]->named && children[i]->name[0] && !strchr(children[i]->name, '.');
}

TE_API te_module *te_sequential_create(te_ctx *te, te_module *const *children, int n) {
    te_module *m = NULL;
    char name[16];
    int i;
    if (te && te__sequential_children_ok(te, children, n) == TE_OK)
        m = te__module_named(te, &te__sequential_class, NULL, "sequential");
    /* The children check fp8_output and fp8_grad themselves. A Sequential works with any children, so the program may
     * also remove any of them. */
    if (m) m->has_fp8_output = m->has_fp8_grad = m->takes_any = true;
    for (i = 0; m && i < n; i++) children[i]->numbered = !te__sequential_keeps_name(children, n, i);
    for (i = 0; m && i < n; i++) {
        snprintf(name, sizeof(name), "%d", i);
        if (!te_module_add_child(m, children[i]->numbered ? name : NULL, children[i])) break;
    }
    if (m && i == n) {
        m = te__module_built(m);
        if (m) m->built_in = false; /* its children check the options of a call */
        return m;
    }
    te__destroy_orphans(children, n);
    te_module_destroy(m);
    return NULL;
}
