/* model/moe.c: the MLP of shared experts, and MoE: a gate, experts, shared experts and projections as one module. Knows
 * gates and experts as modules; must not know how tokens travel. */

/* m's new child, or NULL with an error. */
static te_module *te__moe_child(te_module *m, const char *name, te_module *child) {
    if (child) te__adopt(m, name, child);
    return m->te->error_code == TE_OK ? child : NULL;
}
static te_module *te__moe_linear(te_module *m, const char *name, te_linear_backend backend, const te_moe_config *c,
                                 int64_t in, int64_t out, bool bias) {
    te_linear_module_desc d = TE_ZERO;
    d.linear_impl = backend;
    d.in_features = in;
    d.out_features = out;
    d.bias = bias;
    d.device = c->device;
    d.dtype = c->dtype;
    d.init.std = c->init_std;
    return te__moe_child(m, name, te_initialize_linear_module(m->te, &d));
}

/* ---- the MLP of shared experts ---- */

typedef struct te__moe_mlp {
    te_moe_config config;
} te__moe_mlp;

static te_result te__moe_mlp_forward(te_module *m, te_forward_args *args) {
    te__moe_mlp *s = (te__moe_mlp *)m->state;
    te_forward_args call = TE_ZERO;
    const bool gated = te__expert_is_gated(s->config.shared_expert_activation);
    te_tensor *half[2];
    call.input = args->input;
    call.is_first_microbatch = args->is_first_microbatch;
    half[0] = gated ? te__run_child(m, "gate_proj", &call) : NULL;
    half[1] = te__run_child(m, "up_proj", &call);
    if (!half[1] || (gated && !half[0])) return te_error_code(m->te);
    call.input =
        te__expert_activate(gated ? te_concat(half, 2, -1) : half[1], s->config.shared_expert_activation, &s->config);
    return te__output(m, args, te__run_child(m, "down_proj", &call));
}
static const te_module_class te__moe_mlp_class = {"MLP", sizeof(te__moe_mlp), te__moe_mlp_forward, NULL, NULL};

static te_module *te__moe_mlp_create(te_ctx *te, const te_moe_config *c, te_linear_backend linear) {
    const int64_t each = c->shared_expert_inter_dim ? c->shared_expert_inter_dim : c->moe_inter_dim;
    te_module *m, *outer = te->making;
    int64_t inter;
    if ((int)c->shared_expert_activation < 0 || c->shared_expert_activation >= TE_EXPERT_ACTIVATION_COUNT ||
        !te__expert_activations[c->shared_expert_activation].shared) {
        te__fail(te, TE_ERR_INVALID,
                 "te_moe_create: shared_expert_activation %d; swiglu (%d) and relu2 (%d) are possible",
                 (int)c->shared_expert_activation, (int)TE_EXPERT_SWIGLU, (int)TE_EXPERT_RELU2);
        return NULL;
    }
    if (each > TE__MAX_LAYER_SIZE / c->n_shared_experts) {
        te__fail(te, TE_ERR_INVALID,
                 "te_moe_create: n_shared_experts is %d, each of size %lld; their product must be less than 2^62",
                 c->n_shared_experts, (long long)each);
        return NULL;
    }
    inter = c->n_shared_experts * each;
    m = te_module_create(te, &te__moe_mlp_class, "shared_experts");
    if (!m) return NULL;
    ((te__moe_mlp *)m->state)->config = *c;
    te->making = m;
    if (te__expert_is_gated(c->shared_expert_activation))
        te__moe_linear(m, "gate_proj", linear, c, c->dim, inter, c->expert_bias);
    te__moe_linear(m, "up_proj", linear, c, c->dim, inter, c->expert_bias);
    te__moe_linear(m, "down_proj", linear, c, inter, c->dim, c->expert_bias);
    te->making = outer;
    return te__module_built(m);
}

/* ---- MoE ---- */

typedef struct te__moe_module {
    te_moe_config config;
    bool fake_gate;
} te__moe_module;

/* The shared experts' output, times sigmoid of the gate's. */
static te_tensor *te__moe_shared(te_module *m, te_tensor *x, const te_forward_args *outer) {
    te_forward_args call = TE_ZERO;
    te_tensor *z, *g, *half[2];
    int64_t shape[2];
    call.input = x;
    call.is_first_microbatch = outer->is_first_microbatch;
    z = te__run_child(m, "shared_experts", &call);
    if (!z || !((te__moe_module *)m->state)->config.shared_expert_gate) return z;
    shape[0] = te__rows(x);
    shape[1] = 1;
    half[0] = te__run_child(m, "shared_expert_gate", &call);
    half[1] = te_tensor_full(x->te, x->dtype, 2, shape, 1.0);
    g = half[0] && half[1] ? te_concat(half, 2, -1) : NULL;
    g = g ? te_activate(g, TE_GLU, NULL) : NULL; /* sigmoid(g) times 1 */
    return g ? te__scale_rows(z, te_tensor_cast(g, TE_F32)) : NULL;
}
static te_result te__moe_forward(te_module *m, te_forward_args *args) {
    te__moe_module *s = (te__moe_module *)m->state;
    const bool projects = s->config.moe_latent_size != 0;
    te_forward_args gate = TE_ZERO, call = TE_ZERO, back = TE_ZERO;
    te_tensor *x = te__moe_matrix(m, args->input, s->config.dim), *latent = x, *y, *z = NULL;
    gate.input = x;
    gate.attention.attention_mask = args->attention.attention_mask;
    gate.user = call.user = args->user;
    call.is_first_microbatch = back.is_first_microbatch = args->is_first_microbatch;
    call.topk_weights = x ? te__run_child(m, "gate", &gate) : NULL;
    call.topk_indices = gate.outputs.topk_indices;
    call.attention.attention_mask = args->attention.attention_mask;
    if (call.topk_weights && projects) {
        back.input = x;
        latent = te__run_child(m, "fc1_latent_proj", &back);
    }
    if (!x && !s->fake_gate) te__gate_misses(te_module_find(m, "gate"), te_error_code(m->te));
    if (!call.topk_weights || !latent) return te__experts_refuse(te__experts_of(m), te_error_code(m->te));
    call.input = latent;
    y = te__run_child(m, "experts", &call);
    if (y && projects) {
        back.input = y;
        y = te__run_child(m, "fc2_latent_proj", &back);
    }
    if (y && s->config.n_shared_experts > 0) {
        z = te__moe_shared(m, x, args);
        y = z ? te_add(y, z) : NULL;
    }
    args->outputs.aux_loss = y ? gate.outputs.aux_loss : NULL;
    args->outputs.topk_indices = y ? gate.outputs.topk_indices : NULL;
    return te__output(m, args,
                      y && args->input->ndim != 2 ? te_tensor_view(y, args->input->ndim, args->input->shape) : y);
}
static const te_module_class te__moe_class = {"MoE", sizeof(te__moe_module), te__moe_forward, NULL, NULL};

/* The experts, by the table of te_moe_create. */
static te_module *te__moe_experts_create(te_ctx *te, const te_moe_config *c, const te_moe_backend *given) {
    te_moe_backend b = *given;
    const int world = b.world_size ? b.world_size : te_group_size(b.ep_group);
    const te_backend_capabilities has = te_backend_get_capabilities(te);
    const te_backend_config defaults = te_backend_config_defaults(&has);
    if (world < 1) {
        te__fail(te, TE_ERR_INVALID,
                 "te_moe_create: world_size is %d; the number of all ranks is needed, or 0: those of ep_group", world);
        return NULL;
    }
    if (!b.dispatcher) b.dispatcher = defaults.dispatcher;
    if (!b.experts) b.experts = defaults.experts;
    if (b.dispatcher == TE_DISPATCHER_MOK) {
        if (world % 4)
            te__fail(te, TE_ERR_INVALID,
                     "te_moe_create: dispatcher mok, and world_size is %d; a multiple of 4 is needed", world);
        else
            te__fail(
                te, TE_ERR_UNSUPPORTED,
                "te_moe_create: dispatcher mok is an external one; torch, deepep, uccl_ep and hybridep are possible");
        return NULL;
    }
    if ((int)b.dispatcher < TE_DISPATCHER_TORCH || b.dispatcher > TE_DISPATCHER_HYBRIDEP ||
        (int)b.experts < TE_EXPERTS_TORCH || b.experts > TE_EXPERTS_TE) {
        te__fail(
            te, TE_ERR_INVALID,
            "te_moe_create: dispatcher %d and experts %d; te_dispatcher_backend and te_experts_backend have the names",
            (int)b.dispatcher, (int)b.experts);
        return NULL;
    }
    if (b.dispatcher == TE_DISPATCHER_TORCH) return te_grouped_experts_create(te, c, &b);
    if (world == 1) {
        te__warn(te,
                 "te_moe_create: dispatcher %s, and world size is 1: experts in parallel need several ranks. Falling "
                 "back to GroupedExperts",
                 te_backend_name("dispatcher", (int)b.dispatcher));
        return te_grouped_experts_create(te, c, &b);
    }
    if (b.experts == TE_EXPERTS_TE || (b.experts == TE_EXPERTS_TORCH && b.te_experts_for_torch))
        return te_grouped_experts_te_create(te, c, &b);
    return te_grouped_experts_deepep_create(te, c, &b);
}
TE_API te_moe_backend te_moe_backend_of(const te_backend_config *config) {
    te_moe_backend b = TE_ZERO;
    if (!config) return b;
    b.experts = config->experts;
    b.dispatcher = config->dispatcher;
    b.linear = config->linear;
    b.fake_balanced_gate = config->fake_balanced_gate;
    b.fake_gate_noise = (float)config->fake_gate_noise;
    b.gate_precision = config->gate_precision;
    b.dispatcher_num_sms = config->dispatcher_num_sms;
    b.dispatcher_share_token_dispatcher = config->no_dispatcher_share_token_dispatcher ? TE_OFF : TE_ON;
    b.dispatcher_async_dispatch = config->dispatcher_async_dispatch;
    return b;
}
TE_API te_module *te_moe_create(te_ctx *te, const te_moe_config *config, const te_moe_backend *backend) {
    te_moe_config c;
    te_module *m, *outer;
    if (!te__moe_config_ok(te, "te_moe_create", config, &c) || !te__has_moe_backend(te, backend, "te_moe_create"))
        return NULL;
    m = te__module_named(te, &te__moe_class, c.name, "moe");
    if (!m) return NULL;
    c.name = NULL;
    ((te__moe_module *)m->state)->config = c;
    ((te__moe_module *)m->state)->fake_gate = backend->fake_balanced_gate;
    outer = te->making;
    te->making = m;
    if (te__moe_child(m, "gate",
                      backend->fake_balanced_gate
                          ? te_fake_balanced_gate_create(te, &c, 0, backend->fake_gate_noise)
                          : te_gate_create(te, &c, backend->gate_precision, backend->cp_group)) &&
        te__moe_child(m, "experts", te__moe_experts_create(te, &c, backend))) {
        if (c.n_shared_experts > 0) te__moe_child(m, "shared_experts", te__moe_mlp_create(te, &c, backend->linear));
        if (c.n_shared_experts > 0 && c.shared_expert_gate)
            te__moe_linear(m, "shared_expert_gate", backend->linear, &c, c.dim, 1, false);
        if (c.moe_latent_size)
            te__moe_linear(m, "fc1_latent_proj", backend->linear, &c, c.dim, c.moe_latent_size, c.expert_bias);
        if (c.moe_latent_size)
            te__moe_linear(m, "fc2_latent_proj", backend->linear, &c, c.moe_latent_size, c.dim, c.expert_bias);
    }
    te->making = outer;
    return te__module_built(m);
}
