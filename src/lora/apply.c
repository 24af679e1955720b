/* lora/apply.c: te_lora_apply. It chooses which matrix products get adapters, and which parameters are trained in
 * addition. This file must not depend on files on disk. */

/* ---- options ---- */

static bool te__lora_list_ok(te_ctx *te, const char *field, const char *const *names, int n) {
    int i;
    if (n < 0 || (n > 0 && !names))
        return te__not_ok(te, TE_ERR_INVALID, "te_lora_apply: %d %s (%s); the number goes with a list of as many names",
                          n, field, names ? "given" : "NULL");
    for (i = 0; i < n && names[i]; i++) {}
    if (i == n) return true;
    return te__not_ok(te, TE_ERR_INVALID, "te_lora_apply: %s: name %d of %d is NULL", field, i, n);
}
/* Copies `desc` to *d, fills in the defaults and checks the options. If they are wrong, sets an error and returns
 * false. */
static bool te__lora_desc_ok(te_ctx *te, const te_lora_desc *desc, te_lora_desc *d) {
    bool targets, excludes;
    if (desc) *d = *desc;
    if (d->dim == 0) d->dim = 8;
    if (d->alpha == 0.0f) d->alpha = 32.0f;
    targets = d->num_target_modules != 0;
    excludes = d->num_exclude_modules != 0;
    if (d->dim < 1 || !(fabsf(d->alpha) <= FLT_MAX) || !(d->dropout >= 0.0f && d->dropout < 1.0f))
        te__fail(
            te, TE_ERR_INVALID,
            "te_lora_apply: dim %d, alpha %g, dropout %g; dim is at least 1, alpha finite, dropout from 0 to below 1",
            d->dim, (double)d->alpha, (double)d->dropout);
    else if ((int)d->dropout_position < 0 || d->dropout_position > TE_DROPOUT_PRE || (int)d->lora_A_init < 0 ||
             d->lora_A_init > TE_LORA_KAIMING)
        te__fail(te, TE_ERR_INVALID,
                 "te_lora_apply: dropout_position %d, lora_A_init %d; TE_DROPOUT_POST and TE_DROPOUT_PRE, "
                 "TE_LORA_XAVIER and TE_LORA_KAIMING (0 and 1 each) are possible",
                 (int)d->dropout_position, (int)d->lora_A_init);
    else if ((int)d->bias < 0 || d->bias > TE_LORA_BIAS_LORA_ONLY)
        te__fail(te, TE_ERR_INVALID,
                 "te_lora_apply: bias %d; TE_LORA_BIAS_NONE to TE_LORA_BIAS_LORA_ONLY (0 to %d) are possible",
                 (int)d->bias, (int)TE_LORA_BIAS_LORA_ONLY);
    else if (d->lora_dtype && !te__is_float(d->lora_dtype))
        te__fail(te, TE_ERR_DTYPE, "te_lora_apply: lora_dtype %s; f32, f16 and bf16 are possible",
                 te_dtype_name(d->lora_dtype));
    else if (d->base_model_name_or_path && !te__is_utf8(d->base_model_name_or_path))
        te__fail(te, TE_ERR_INVALID,
                 "te_lora_apply: base_model_name_or_path is no UTF-8, which adapter_config.json is written in");
    else if (!te__lora_list_ok(te, "target_modules", d->target_modules, d->num_target_modules) ||
             !te__lora_list_ok(te, "exclude_modules", d->exclude_modules, d->num_exclude_modules) ||
             !te__lora_list_ok(te, "modules_to_save", d->modules_to_save, d->num_modules_to_save))
        return false;
    else if ((int)targets + (int)excludes + (int)d->match_all_linear > 1)
        te__fail(te, TE_ERR_INVALID,
                 "te_lora_apply: %s and %s exclude each other; give one of target_modules, exclude_modules and "
                 "match_all_linear",
                 targets ? "target_modules" : "exclude_modules",
                 d->match_all_linear ? "match_all_linear" : "exclude_modules");
    else
        return true;
    return false;
}

static bool te__has_no_graphs(void *user, te_module *m) {
    (void)user;
    return !m->graphed;
}
/* Checks that this tree may be changed. It may not be changed inside a capture or a hook. It may not be changed if a
 * module has graphs, because graphs would replay the old computation. */
static te_result te__lora_open(te_module *model, const char *who) {
    const te_module *up;
    bool graphed;
    if (!model) return TE_ERR_STATE;
    if (model->te->error_code != TE_OK) return model->te->error_code;
    if (model->te->capture) return te__refuse_capture(model->te, who, "change modules before te_graph_begin");
    if (te__refuse_hook(model->te, who) != TE_OK) return TE_ERR_STATE;
    graphed = !te_module_visit(model, te__has_no_graphs, NULL);
    for (up = model->parent; up && !graphed; up = up->parent) graphed = up->graphed != NULL;
    if (!graphed) return TE_OK;
    return te__fail(model->te, TE_ERR_STATE,
                    "%s: a module of the tree has graphs (te_make_graphed_callables), which would go on as they were; "
                    "call it before these are made",
                    who);
}

/* ---- choosing ---- */

typedef struct te__lora_choice {
    const te_lora_desc *desc;
    te__name_list names;      /* target_modules or exclude_modules */
    te__name_list to_save;
    te__lora_list sites;
    te__trained_list trained;
    int saved;            /* number of modules that modules_to_save names */
    int given;            /* number of sites that this call has given adapters */
} te__lora_choice;

/* Checks that a site (a matrix product of s->owner) can have adapters. If not, sets an error and returns false. */
static bool te__lora_can(const te__lora_site *s, const char *path, bool dora) {
    te_module *m = s->owner;
    const te_module *holder = te__lora_holder(s);
    if (dora && te__dora_allowed(m->te, path) != TE_OK) return false;
    if (te__has_no_adapters(m) || te__experts_above(m))
        te__fail(m->te, TE_ERR_UNSUPPORTED,
                 "LoRA: \"%s\" multiplies for a GroupedExpertsTE, which cannot have adapters, as in Automodel; "
                 "leave these experts out, or create others",
                 path);
    else if (te__is_grouped(m) && m->parallel.size > 1)
        te__fail(m->te, TE_ERR_UNSUPPORTED,
                 "LoRA: \"%s\" is a GroupedLinear that %d ranks share, and exchanges nothing: gradients of its "
                 "adapters would be parts; leave it out",
                 path, m->parallel.size);
    else if (dora && (m->cls != &te__linear_class || m->parallel.size > 1))
        te__fail(
            m->te, TE_ERR_UNSUPPORTED,
            "LoRA: \"%s\" is a %s%s; use_dora is for Linears that one rank has: name these alone, or leave it false",
            path, m->cls->name, m->parallel.size > 1 ? " that ranks share" : "");
    else if (holder && te__lora_of(holder))
        te__fail(m->te, TE_ERR_INVALID,
                 "LoRA: \"%s\" has adapters already; te_lora_merge or te_lora_remove them first, or name other modules",
                 path);
    else if (m->own_forward && m->own_forward != te__lora_mlp_forward)
        te__fail(m->te, TE_ERR_INVALID,
                 "LoRA: \"%s\" has a forward of its own, which adapters would replace; take it away first "
                 "(te_module_set_forward with NULL)",
                 path);
    else
        return true;
    return false;
}
/* Checks that moe_rank_scaling gives the experts module m a LoRA rank of at least 1. Warns if the LoRA rank is rounded
 * down. */
static bool te__lora_rank_ok(const te__lora_choice *c, te_module *m, const char *path) {
    const int chosen = te__experts_chosen(m);
    if (!c->desc->moe_rank_scaling) return true;
    if (c->desc->dim < chosen)
        return te__not_ok(
            m->te, TE_ERR_INVALID,
            "te_lora_apply: moe_rank_scaling: dim %d for the %d experts of each token of \"%s\" leaves rank 0; a "
            "dim of at least %d is needed",
            c->desc->dim, chosen, path, chosen);
    if (c->desc->dim % chosen)
        te__warn(m->te,
                 "te_lora_apply: moe_rank_scaling: dim %d is no multiple of the %d experts of each token of \"%s\"; "
                 "rank %d is taken",
                 c->desc->dim, chosen, path, c->desc->dim / chosen);
    return true;
}
/* Returns how many Linears of the experts module m match a name in c->names. If a name matches m itself, all
 * Linears of m count. */
static int te__lora_named(te__lora_choice *c, te_module *m, const char *path) {
    const int products = te__expert_products(m);
    char text[TE__TREE_PATH + 64], name[64];
    int i, n = 0;
    if (te__name_list_match(&c->names, path, NULL)) return products;
    for (i = 0; i < products && te__is_block(m); i++) {
        snprintf(text, sizeof(text), "%s.%s", path, te__product_name(m, i, name, sizeof(name)));
        n += te__name_list_match(&c->names, text, NULL);
    }
    return n;
}
/* Adds the experts module m as one site to c->sites if the options choose m. Options without target names choose only
 * the experts of a language model's MoE block (te__is_block). */
static bool te__lora_choose_experts(te__lora_choice *c, te_module *m, const char *path) {
    const te_lora_desc *d = c->desc;
    const bool block = te__is_block(m), others = d->match_all_linear || d->num_exclude_modules;
    const int products = te__expert_products(m), n = d->match_all_linear ? 0 : te__lora_named(c, m, path);
    te__lora_site s;
    s.owner = m;
    s.gemm = 0;
    if (n > 0 && n < products)
        return te__not_ok(
            m->te, TE_ERR_UNSUPPORTED,
            "te_lora_apply: the names mean %d of the %d Linears of experts \"%s\", whose adapters are of all of "
            "them together: name the experts, or all Linears",
            n, products, path);
    if (others ? !block || n : !n && !(block && d->num_target_modules == 0)) return true;
    return te__lora_can(&s, path, d->use_dora) && te__lora_rank_ok(c, m, path) && te__lora_list_add(&c->sites, s);
}
/* Returns true if the options choose module m. Only a name without pattern operators can choose an Embedding. */
static bool te__lora_wants(te__lora_choice *c, const te_module *m, const char *path) {
    const bool linear = m->cls == &te__linear_class || te__is_block_gate(m);
    bool plain;
    if (c->desc->match_all_linear) return linear;
    if (c->desc->num_exclude_modules) return linear && !te__name_list_match(&c->names, path, NULL);
    return te__name_list_match(&c->names, path, &plain) && (plain || m->cls != &te__embedding_class);
}
/* Returns true if m or a module above m is one of modules_to_save. */
static bool te__lora_is_saved(te__lora_choice *c, const te_module *m) {
    char path[TE__TREE_PATH];
    for (; m != c->sites.root; m = m->parent)
        if (te__name_list_match(&c->to_save, te__path_below(c->sites.root, m, path, sizeof(path)), NULL)) return true;
    return false;
}
static bool te__lora_choose(void *user, te_module *m) {
    te__lora_choice *c = (te__lora_choice *)user;
    char buffer[TE__TREE_PATH];
    te__lora_site s;
    int sites;
    if (c->to_save.n && te__lora_is_saved(c, m)) {
        c->saved++;
        return true;
    }
    /* the second condition: m is itself an adapter */
    if (!te__lora_has_sites(m, &sites) || (m->parent && te__lora_of(m->parent))) return true;
    if (te__experts_above(m) && te__is_block(te__experts_above(m))) return true; /* chosen together with its experts */
    if (te__is_experts(m)) {
        const char *path = te__path_below(c->sites.root, m, buffer, sizeof(buffer));
        return te__lora_choose_experts(c, m, path[0] ? path : m->name);
    }
    s.owner = m;
    for (s.gemm = 0; s.gemm < sites; s.gemm++) {
        const char *path = te__path_below(c->sites.root, m, buffer, sizeof(buffer));
        bool wanted = te__lora_wants(c, m, path[0] ? path : m->name);
        /* a name of a LayerNormMLP chooses both of its matrix products; a name such as "PATH.fc1" chooses one */
        if (sites > 1) path = te__lora_path(c->sites.root, &s, buffer, sizeof(buffer));
        if (sites > 1 && !wanted) wanted = te__lora_wants(c, m, path);
        if (wanted &&
            (!te__lora_can(&s, path[0] ? path : m->name, c->desc->use_dora) || !te__lora_list_add(&c->sites, s)))
            return false;
    }
    return true;
}

/* ---- parameters trained in addition to adapters ---- */

static bool te__lora_train_saved(void *user, te_module *m) {
    te__lora_choice *c = (te__lora_choice *)user;
    return !te__lora_is_saved(c, m) || te__trained_list_give(&c->trained, m, true) == TE_OK;
}
static bool te__lora_train_bias(void *user, te_module *m) {
    te__lora_choice *c = (te__lora_choice *)user;
    return (c->desc->bias != TE_LORA_BIAS_ALL && !te__lora_is_owner(m)) ||
           te__trained_list_give(&c->trained, m, false) == TE_OK;
}
static te_result te__lora_train_beside(te__lora_choice *c) {
    te_module *model = c->sites.root;
    if (c->to_save.n && !te_module_visit(model, te__lora_train_saved, c)) return te_error_code(model->te);
    if (c->desc->bias && !te_module_visit(model, te__lora_train_bias, c)) return te_error_code(model->te);
    return TE_OK;
}

/* ---- the base model's name ---- */

#define TE__LORA_BASE "te.lora.base" /* attribute with the base model's name, on the module that was passed to
                                      * te_lora_apply or te_lora_load */
typedef struct te__lora_name {
    te_ctx *te;
    char *text;
} te__lora_name;
static void te__lora_name_free(void *value) {
    te__lora_name *n = (te__lora_name *)value;
    te__free(n->te, n->text);
    te__free(n->te, n);
}
static te_result te__lora_set_name(te_module *m, const char *text) {
    te__lora_name *n = (te__lora_name *)te__alloc_zero(m->te, sizeof(te__lora_name));
    if (!n) return TE_ERR_OUT_OF_MEMORY;
    n->te = m->te;
    n->text = te__copy_string(m->te, text);
    if (n->text && te_module_set_attribute(m, TE__LORA_BASE, n, te__lora_name_free) == TE_OK) return TE_OK;
    te__lora_name_free(n);
    return te_error_code(m->te);
}

/* ---- the call ---- */

static te_result te__lora_apply(te__lora_choice *c, te_module *model) {
    static const char *const projections[] = {"*_proj"};
    const te_lora_desc *d = c->desc;
    const char *const *names = d->num_exclude_modules  ? d->exclude_modules
                               : d->num_target_modules ? d->target_modules
                                                       : projections;
    const int n = d->num_exclude_modules ? d->num_exclude_modules : d->num_target_modules ? d->num_target_modules : 1;
    te_ctx *te = model->te;
    te_result result;
    c->sites.te = c->trained.te = te;
    c->sites.root = model;
    if (!te__name_list_open(&c->names, te, names, d->match_all_linear ? 0 : n) ||
        !te__name_list_open(&c->to_save, te, d->modules_to_save, d->num_modules_to_save) ||
        !te_module_visit(model, te__lora_choose, c))
        return te_error_code(te);
    if (c->sites.n == 0)
        return te__fail(te, TE_ERR_INVALID,
                        "te_lora_apply: no Linear below \"%s\" is one of %s; te_module_print shows the names",
                        model->name,
                        d->match_all_linear      ? "all"
                        : d->num_exclude_modules ? "those that exclude_modules leave"
                                                 : names[0]);
    if (d->num_modules_to_save && !c->saved)
        return te__fail(
            te, TE_ERR_INVALID,
            "te_lora_apply: modules_to_save: no module below \"%s\" is named \"%s\"; te_module_print shows the names",
            model->name, d->modules_to_save[0]);
    for (c->given = 0; c->given < c->sites.n; c->given++) {
        result = te__lora_give(&c->sites.list[c->given], d);
        if (result != TE_OK) return result; /* site number c->given has no adapters */
    }
    result = te__lora_train_beside(c);
    if (result == TE_OK && d->base_model_name_or_path) result = te__lora_set_name(model, d->base_model_name_or_path);
    return result;
}

TE_API te_result te_lora_apply(te_module *model, const te_lora_desc *desc, int *num_modules) {
    te_lora_desc d = TE_ZERO;
    te__lora_choice c = TE_ZERO;
    te__rng_state random;
    te_result result = te__lora_open(model, "te_lora_apply");
    int i;
    if (num_modules) *num_modules = 0;
    if (result == TE_OK) result = te__tree_whole(model);
    if (result != TE_OK) return result;
    if (!te__lora_desc_ok(model->te, desc, &d)) return te_error_code(model->te);
    c.desc = &d;
    random = te__rng_now(model->te);
    result = te__lora_apply(&c, model);
    te__trained_list_close(&c.trained, result != TE_OK);
    if (result == TE_OK) {
        te__lora_freeze(model, !d.skip_freeze);
        if (num_modules) *num_modules = c.sites.n;
    } else {
        for (i = 0; i < c.given; i++) te__lora_take_away(&c.sites.list[i]);
        te__rng_back(model->te, random);
    }
    te__name_list_close(&c.names);
    te__name_list_close(&c.to_save);
    te__lora_list_free(&c.sites);
    return result;
}
