/* moe/moe.c: the module MoE, which has a gate, experts, shared experts and latent projections. This file must not
 * depend on how tokens are dispatched. */

/* Adds `child` to m and returns it. Returns NULL if `child` is NULL or the context has an error. */
static te_module *te__moe_child(te_module *m, const char *name, te_module *child) {
    if (child) te__adopt(m, name, child);
    return m->te->error_code == TE_OK ? child : NULL;
}
typedef struct te__moe_module {
    te_moe_config config;
    bool fake_gate;
    bool in_layer; /* true in a language model, where attention_mask is the mask of the attention and not a padding mask
                    * of tokens */
} te__moe_module;

/* Returns the output of the shared experts. If there is a shared_expert_gate, the output is multiplied by
 * sigmoid(shared_expert_gate(x)). */
static te_tensor *te__moe_shared(te_module *m, te_tensor *x, const te_forward_args *outer) {
    te_forward_args call = TE_ZERO;
    te_tensor *z, *half[2];
    call.input = x;
    call.is_first_microbatch = outer->is_first_microbatch;
    z = te__run_child(m, "shared_experts", &call);
    if (!z || !((te__moe_module *)m->state)->config.shared_expert_gate) return z;
    const int64_t shape[2] = {te__rows(x), 1};
    half[0] = te__run_child(m, "shared_expert_gate", &call);
    half[1] = te_tensor_full(x->te, x->dtype, 2, shape, 1.0);
    if (!half[0] || !half[1]) return NULL;
    /* sigmoid(half[0]) times 1 */
    return te__scale_rows(z, te_tensor_cast(te_activate(te_concat(half, 2, -1), TE_GLU, NULL), TE_F32));
}
static te_result te__moe_forward(te_module *m, te_forward_args *args) {
    te__moe_module *s = (te__moe_module *)m->state;
    const bool projects = s->config.moe_latent_size != 0;
    te_forward_args gate = TE_ZERO, call = TE_ZERO, back = TE_ZERO;
    te_tensor *x = te__moe_matrix(m, args->input, s->config.dim), *latent = x, *y,
              *padding = s->in_layer ? NULL : args->attention.attention_mask;
    gate.input = x;
    gate.attention.attention_mask = padding;
    gate.user = call.user = args->user;
    call.is_first_microbatch = back.is_first_microbatch = args->is_first_microbatch;
    call.topk_weights = x ? te__run_child(m, "gate", &gate) : NULL;
    call.topk_indices = gate.outputs.topk_indices;
    call.attention.attention_mask = padding;
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
    if (y && s->config.n_shared_experts > 0) y = te_add(y, te__moe_shared(m, x, args));
    args->outputs.aux_loss = y ? gate.outputs.aux_loss : NULL;
    args->outputs.topk_indices = y ? gate.outputs.topk_indices : NULL;
    return te__output(m, args,
                      y && args->input->ndim != 2 ? te_tensor_view(y, args->input->ndim, args->input->shape) : y);
}
static const te_module_class te__moe_class = {"MoE", sizeof(te__moe_module), te__moe_forward, NULL, NULL};

/* Creates an MoE without children. The caller adds them and then calls te__close_part. te__moe_config_ok must have
 * checked *c. */
static te_module *te__moe_open(te_ctx *te, const te_moe_config *c, te_module **outer) {
    te_module *m = te__begin_part(te__module_named(te, &te__moe_class, c->name, "moe"), outer);
    if (!m) return NULL;
    ((te__moe_module *)m->state)->config = *c;
    ((te__moe_module *)m->state)->config.name = NULL;
    return m;
}
