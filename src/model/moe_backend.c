/* model/moe_backend.c: creates an MoE from the parts that a te_moe_backend chooses. This file must not depend on what
 * these compute. */

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

static te_module *te__moe_mlp_create(te_ctx *te, const te_moe_config *c, te_linear_backend linear) {
    const int64_t each = c->shared_expert_inter_dim ? c->shared_expert_inter_dim : c->moe_inter_dim;
    const bool gated = te__expert_is_gated(c->shared_expert_activation);
    te__gated_mlp state = TE_ZERO;
    te_module *m, *outer;
    int64_t inter;
    if ((int)c->shared_expert_activation < 0 || c->shared_expert_activation >= TE_EXPERT_ACTIVATION_COUNT ||
        !te__expert_activations[c->shared_expert_activation].shared)
        return te__no_module(te, TE_ERR_INVALID,
                             "te_moe_create: shared_expert_activation %d; swiglu (%d) and relu2 (%d) are possible",
                             (int)c->shared_expert_activation, (int)TE_EXPERT_SWIGLU, (int)TE_EXPERT_RELU2);
    if (each > TE__MAX_LAYER_SIZE / c->n_shared_experts)
        return te__no_module(
            te, TE_ERR_INVALID,
            "te_moe_create: n_shared_experts is %d, each of size %lld; their product must be less than 2^62",
            c->n_shared_experts, (long long)each);
    inter = c->n_shared_experts * each;
    if (gated) state.gate = "gate_proj";
    state.up = "up_proj";
    state.down = "down_proj";
    state.activation = te__expert_function(c->shared_expert_activation, c, &state.params);
    m = te__gated_mlp_open(te, "shared_experts", &state, &outer);
    if (!m) return NULL;
    if (gated) te__moe_linear(m, state.gate, linear, c, c->dim, inter, c->expert_bias);
    te__moe_linear(m, state.up, linear, c, c->dim, inter, c->expert_bias);
    te__moe_linear(m, state.down, linear, c, inter, c->dim, c->expert_bias);
    return te__close_part(m, outer);
}

/* Creates the experts. Their class depends on the dispatcher, the experts backend and the number of ranks (see
 * te_moe_create). */
static te_module *te__moe_experts_create(te_ctx *te, const te_moe_config *c, const te_moe_backend *given) {
    te_moe_backend b = *given;
    const int world = b.world_size ? b.world_size : te__group_size(b.ep_group);
    const te_backend_capabilities has = te_backend_get_capabilities(te);
    const te_backend_config defaults = te_backend_config_defaults(&has);
    if (world < 1)
        return te__no_module(
            te, TE_ERR_INVALID,
            "te_moe_create: world_size is %d; the number of all ranks is needed, or 0: those of ep_group", world);
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
        (int)b.experts < TE_EXPERTS_TORCH || b.experts > TE_EXPERTS_TE)
        return te__no_module(
            te, TE_ERR_INVALID,
            "te_moe_create: dispatcher %d and experts %d; te_dispatcher_backend and te_experts_backend have the names",
            (int)b.dispatcher, (int)b.experts);
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
    m = te__moe_open(te, &c, &outer);
    if (!m) return NULL;
    ((te__moe_module *)m->state)->fake_gate = backend->fake_balanced_gate;
    c.name = NULL;
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
    return te__close_part(m, outer);
}
