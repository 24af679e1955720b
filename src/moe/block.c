/* moe/block.c: the MoE block of a published language model, in which each expert is a module. This file must not depend
 * on models or on files on disk.
 *
 * Expert E is the module experts.E. Its Linears GATE, UP and DOWN own the weights; the real names are those in the
 * model's files.
 * `experts` also has the children GATE, UP and DOWN, which are GroupedLinears. These borrow the weights and multiply
 * the rows of all experts at once. The numbers of rows stay on the device, so the host does not wait for the
 * router. */

/* Arguments of te__moe_block_create. Zero-initialised. */
typedef struct te__moe_block {
    te_moe_config config; /* Only the sizes, the fields of the router, and the fields `expert_bias`, `dtype`, `device`
                           * and `name` are read. */
    te_init init;
    te_activation activation;     /* must be gated */
    te_group *ep_group;           /* ranks that share the experts, or NULL */
    const char *gate, *up, *down; /* names of an expert's Linears; string literals */
} te__moe_block;

static te_module *te__block_expert(const te_module *experts, int i) { return te_module_child(experts, i); }

/* Returns the number that this rank's expert i has among the experts of all ranks. */
static int te__block_number(const te__moe_block *b, int i) {
    return te__group_rank(b->ep_group) * (b->config.n_routed_experts / te__group_size(b->ep_group)) + i;
}

/* Returns the parameter `kind` ("weight" or "bias") of a Linear of expert i. `m` is a GroupedLinear that has the same
 * name as the Linear. */
static te_tensor *te__block_parameter(te_module *m, const char *kind, int i) {
    return te_module_parameter(te_module_find(te__block_expert(te_module_parent(m), i), m->name), kind);
}

/* Allocates one buffer for each of the three projections, with the weights of all experts in order. So a grouped GEMM
 * reads them without a copy. Skips weights that are stored quantized. */
static te_result te__block_experts_reset(te_module *m) {
    const te__experts_module *s = (const te__experts_module *)m->state;
    te_result result = TE_OK;
    int i, part;
    te__frame_begin(m->te);
    for (part = 0; part < TE__COUNT(s->proj) && !te__quantizes_weights(m->te) && result == TE_OK; part++) {
        const te_tensor *first = te_module_parameter(te_module_find(te__block_expert(m, 0), s->proj[part]), "weight");
        te_tensor *all;
        if (!first || first->buffer || first->quantized) continue;
        all = te__empty_2d(m->te, first->dtype, s->local * te__rows(first), te__cols(first));
        if (!all) result = te_error_code(m->te);
        for (i = 0; i < s->local && all; i++) {
            te_tensor *x = te_module_parameter(te_module_find(te__block_expert(m, i), s->proj[part]), "weight");
            if (x->buffer || x->quantized) continue; /* this weight already has memory and values */
            x->buffer = all->buffer;
            x->buffer->refs++;
            x->offset = i * te__numel(x) * te__dtype_size(x->dtype);
        }
    }
    te__frame_end(m->te, NULL, 0);
    return result;
}
static const te_module_class te__block_experts_class = {"LinearExperts", sizeof(te__experts_module),
                                                        te__experts_forward, NULL, te__block_experts_reset};

/* ---- making ---- */

/* Adds a module to `parent`: a GroupedLinear that borrows the weights of all experts, or a Linear with meta parameters,
 * which te__block_experts_reset allocates. */
static void te__block_linear(te_module *parent, const te__moe_block *b, const char *name, int64_t in, int64_t out,
                             bool grouped) {
    te_linear_desc l = TE_ZERO;
    te_grouped_linear_desc g = TE_ZERO;
    l.gemm.no_bias = !b->config.expert_bias;
    l.gemm.params_dtype = b->config.dtype;
    if (grouped) {
        g.name = name;
        g.num_gemms = b->config.n_routed_experts / te__group_size(b->ep_group);
        g.in_features = in;
        g.out_features = out;
        g.gemm = l.gemm;
        g.gemm.device = b->config.device;
        te__adopt(parent, name, te__grouped_create(parent->te, &g, te__block_parameter));
        return;
    }
    l.name = name;
    l.in_features = in;
    l.out_features = out;
    l.gemm.device = TE_PARAMS_META;
    l.gemm.init = b->init;
    te__adopt(parent, name, te_linear_create(parent->te, &l));
}
static void te__block_linears(te_module *parent, const te__moe_block *b, bool grouped) {
    te__block_linear(parent, b, b->gate, b->config.dim, b->config.moe_inter_dim, grouped);
    te__block_linear(parent, b, b->up, b->config.dim, b->config.moe_inter_dim, grouped);
    te__block_linear(parent, b, b->down, b->config.moe_inter_dim, b->config.dim, grouped);
}
static te_module *te__block_expert_create(te_ctx *te, const te__moe_block *b, const char *name) {
    te__gated_mlp state = TE_ZERO;
    te_module *outer, *m;
    int i;
    state.gate = b->gate;
    state.up = b->up;
    state.down = b->down;
    state.activation = b->activation;
    m = te__gated_mlp_open(te, name, &state, &outer);
    if (!m) return NULL;
    te__block_linears(m, b, false);
    for (i = 0; i < m->num_children; i++) te__experts_own(m->children[i], b->ep_group, TE__OWN_NAMED, 1);
    return te__close_part(m, outer);
}
/* Experts get the values that they have without other ranks: the weights of all experts are drawn in their order. */
static void te__block_skip(te_module *m, const te__experts_module *s) {
    const uint64_t own = (uint64_t)s->local * TE__COUNT(s->proj), rank = (uint64_t)te__group_rank(s->group);
    te_tensor *first, *last;
    if (s->ranks < 2 || m->te->error_code != TE_OK) return;
    first = te_module_parameter(te_module_find(te__block_expert(m, 0), s->proj[0]), "weight");
    last = te_module_parameter(te_module_find(te__block_expert(m, s->local - 1), s->proj[2]), "weight");
    first->split->skip[0] = rank * own;
    last->split->skip[1] = ((uint64_t)s->ranks - 1 - rank) * own;
}
static te_module *te__block_experts_create(te_ctx *te, const te__moe_block *b) {
    te_module *outer, *m = te__open_part(te, &te__block_experts_class, "experts", &outer);
    te__experts_module *s;
    int i;
    if (!m) return NULL;
    s = (te__experts_module *)m->state;
    s->config = b->config;
    s->config.name = NULL;
    s->activation = b->activation;
    s->group = b->ep_group;
    te__module_shares(m, s->group);
    s->ranks = te__group_size(b->ep_group);
    s->local = b->config.n_routed_experts / s->ranks;
    s->linears[TE__EXPERTS_UP][0] = s->proj[0] = b->gate;
    s->linears[TE__EXPERTS_UP][1] = s->proj[1] = b->up;
    s->linears[TE__EXPERTS_DOWN][0] = s->proj[2] = b->down;
    for (i = 0; i < s->local && te_error_code(te) == TE_OK; i++) {
        char name[16];
        snprintf(name, sizeof(name), "%d", te__block_number(b, i));
        te__adopt(m, name, te__block_expert_create(te, b, name));
    }
    te__block_linears(m, b, true);
    te__block_skip(m, s);
    te__params_on(m, b->config.device); /* it has none, but its reset allocates those of the experts */
    m = te__close_part(m, outer);
    if (m && b->config.device != TE_PARAMS_META) te__reset_tree(m);
    return m;
}

/* Creates the MoE block of one layer of a language model. On failure, records an error and returns NULL. */
static te_module *te__moe_block_create(te_ctx *te, const te__moe_block *given) {
    te__moe_block b = *given;
    te_module *outer, *m;
    /* as in Hugging Face transformers, router weights are f32 and are applied after the down projection */
    b.config.router_weights_fp32 = b.config.apply_router_weight_after_down = true;
    b.config.n_shared_experts = 0;
    b.config.moe_latent_size = 0;
    if (!te__moe_config_ok(te, "te__moe_block_create", &b.config, &b.config)) return NULL;
    m = te__moe_open(te, &b.config, &outer);
    if (!m) return NULL;
    ((te__moe_module *)m->state)->in_layer = true;
    b.config.name = NULL;
    te__moe_child(m, "gate", te__gate_create(te, &b.config, &b.init, true, TE_DTYPE_NONE, NULL));
    te__moe_child(m, "experts", te__block_experts_create(te, &b));
    return te__close_part(m, outer);
}
