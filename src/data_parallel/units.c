/* data_parallel/units.c: units, their parameters, and the buckets in which their gradients travel. A unit is a module
 * whose gradients the ranks exchange together. This file must not depend on what a module computes, or on when
 * gradients are exchanged. */

#define TE__UNIT "te.unit" /* the module attribute that holds the te__dp_unit */
enum { TE__BUCKET_CAP_MB = 25 }; /* DistributedDataParallel's bucket_cap_mb */

/* Trained parameters of a unit whose gradients are exchanged in one collective. */
typedef struct te__bucket {
    struct te__dp_unit *unit;
    te_tensor **list; /* [n], in unit->params */
    int n, at;        /* at: index of list[0] in unit->params */
    int place;        /* of the module of list[0] in its model: as a rule the last one that a backward pass plays */
    int pending;      /* how often nodes that te_backward has not played yet read a parameter of the bucket */
    bool hidden;      /* no node of the pass is known to read some parameter of the bucket */
    bool done;        /* the exchange has begun since the last te_backward began */
    bool lacks;       /* this rank lacks a gradient */
    te_dtype *had;    /* [n] while the exchange is under way: formats of this rank's gradients; TE_DTYPE_NONE: there is
                       * none. Else NULL */
    te_tensor **sums; /* [n + 1] while tensors are summed in place: references; the last one has a number for each
                       * parameter, 0 if no rank has its gradient. Else NULL */
    bool mean;        /* they become means */
    te__flight flight;
} te__bucket;

/* The uses for which units are gathered, in an order that repeats: forwards, nodes of a backward pass, and forwards
 * that a backward pass runs again. */
typedef enum te__ahead_way { TE__AHEAD_FORWARD, TE__AHEAD_NODE, TE__AHEAD_AGAIN, TE__AHEAD_WAYS } te__ahead_way;

typedef struct te__dp_unit {
    struct te__dp_unit *next; /* the next unit in the list of all units of the context, in order of creation */
    te_module *module;
    te_data_parallel_desc desc;
    bool whole; /* true: created by te_data_parallel; false: created by te_fsdp_unit */
    bool reached; /* the last backward pass has written a gradient of the unit */
    bool chosen;  /* chosen by te__units_choose */
    bool met;     /* the ranks have compared the unit */
    bool model_met; /* and the main_grads of its model, and the recipe under which that has run */
    te_fsdp_state state;
    uint64_t exchanged_at; /* the value of te->writes after the last exchange */
    te__shard_set *set; /* desc.shard: the slices of this rank; or NULL */
    bool inner;         /* gathered by a node of a checkpointed function that te_backward has run again */
    int pending;        /* how often nodes that te_backward has not played yet read a parameter of the unit */
    int place;          /* of the module in its model */
    te_tensor **params; /* [num_params] the trained parameters, each once, in the order of the tree; references. None
                         * outside of te__units_list and te__units_forget */
    int *places;        /* [num_params] of their modules in the model */
    int num_params, cap_params, cap_places;
    te__bucket *buckets; /* [num_buckets] the last parameters come first */
    int num_buckets, cap_buckets;
    struct te__dp_unit *ahead[TE__AHEAD_WAYS]; /* the unit that was gathered after this one the last time; or NULL */
} te__dp_unit;

enum { TE__MAX_FLIGHTS = 2, TE__MAX_ROOTS = 32 };
typedef struct te__sharding_state {
    te__dp_unit *units; /* the list of all units of the context */
    te__bucket **turn; /* the buckets that this backward pass exchanges, in order */
    int num_turn, cap_turn, next;
    te__bucket *flying[TE__MAX_FLIGHTS]; /* those whose exchange is under way, the oldest first */
    int num_flying;
    bool listed; /* the units' lists of parameters are up to date, and a pass reads them */
    const void *roots[TE__MAX_ROOTS]; /* the models whose nodes this pass plays; they may be gone */
    int num_roots;
    int foreign;       /* nodes of te_record that te_backward has not played yet */
    bool met_foreign;  /* the pass has such nodes */
    uint64_t began_at; /* te->writes when the pass began */
    int running;       /* the number of forwards that run now, nested in each other */
    te__dp_unit *gathered[TE__AHEAD_WAYS]; /* the unit that was gathered last in this forward or pass; or NULL */
} te__sharding_state;
static const te__slot te__sharding_slot = {sizeof(te__sharding_state)};
static te__sharding_state *te__sharding_of(const te_ctx *te) {
    return (te__sharding_state *)te__slot_of(te, &te__sharding_slot);
}

static te__dp_unit *te__unit_of(const te_module *m) { return (te__dp_unit *)te__attribute_of(m, TE__UNIT); }
/* Returns the unit that m belongs to, or NULL. */
static te__dp_unit *te__unit_above(const te_module *m) {
    te__dp_unit *u = NULL;
    for (; m && !u; m = m->parent) u = te__unit_of(m);
    return u;
}

/* ---- lists of parameters ---- */

/* Makes the variables of the unit's parameters and buffers point to the unit, or to nothing. */
static void te__unit_mark_params(te_module *m, te__dp_unit *u, void *mark) {
    int i;
    if (m != u->module && te__unit_of(m)) return;
    for (i = 0; i < m->num_entries; i++)
        if (m->entries[i].tensor->var) {
            m->entries[i].tensor->var->unit = mark;
            m->entries[i].tensor->var->bucket = NULL;
        }
    for (i = 0; i < m->num_children; i++) te__unit_mark_params(m->children[i], u, mark);
}

static void te__unit_forget(te__dp_unit *u) {
    int i;
    for (i = 0; i < u->num_params; i++) te_tensor_release(u->params[i]);
    u->num_params = u->num_buckets = 0;
}
/* Drops the lists of te__units_list. */
static void te__units_forget(te_ctx *te) {
    te__sharding_state *s = te__sharding_of(te);
    te__dp_unit *u;
    for (u = s->units; u; u = u->next) te__unit_forget(u);
    s->num_turn = s->next = 0;
    s->listed = false;
}
/* Adds the trained parameters of m to the list of its unit. *user counts the modules of the model. */
static bool te__unit_collect(void *user, te_module *m) {
    te__dp_unit *u = te__unit_above(m);
    const int place = (*(int *)user)++;
    int i, k;
    if (!u) return true;
    if (u->module == m) u->place = place;
    for (i = 0; i < m->num_entries; i++) {
        te_tensor *x = m->entries[i].tensor;
        if (m->entries[i].kind != TE_ENTRY_PARAMETER || !x->requires_grad) continue;
        for (k = 0; k < u->num_params && u->params[k] != x; k++) {}
        if (k < u->num_params) continue;
        if (!te__grow(m->te, (void **)&u->params, &u->cap_params, u->num_params, sizeof(te_tensor *)) ||
            !te__grow(m->te, (void **)&u->places, &u->cap_places, u->num_params, sizeof(int)))
            return false;
        u->places[u->num_params] = place;
        u->params[u->num_params++] = te_tensor_retain(x);
    }
    return true;
}
/* Cuts the list of a unit into buckets, of the last parameters first. A bucket ends when it has enough bytes in f32. */
static te_result te__unit_cut(te__dp_unit *u) {
    te_ctx *te = u->module->te;
    const double mb = u->desc.bucket_cap_mb > 0.0f ? (double)u->desc.bucket_cap_mb : (double)TE__BUCKET_CAP_MB;
    int end = u->num_params, first;
    do {
        double left = mb * 1048576.0 / sizeof(float);
        te__bucket *b;
        for (first = end; first > 0 && (left > 0 || u->desc.post_backward); first--)
            left -= (double)te__numel(u->params[first - 1]);
        if (first == end && !u->desc.post_backward) return TE_OK; /* there are no parameters */
        if (!te__grow(te, (void **)&u->buckets, &u->cap_buckets, u->num_buckets, sizeof(te__bucket)))
            return te_error_code(te);
        b = &u->buckets[u->num_buckets++];
        memset(b, 0, sizeof(*b));
        b->unit = u;
        b->list = u->params + first;
        b->n = end - first;
        b->at = first;
        b->place = u->desc.post_backward ? u->place : u->places[first];
        end = first;
    } while (end > 0);
    return TE_OK;
}
/* Returns whether u is the first unit of its model in the list of all units. */
static bool te__unit_is_first(const te__sharding_state *s, const te__dp_unit *u) {
    const te__dp_unit *other = s->units;
    while (te__root_of(other->module) != te__root_of(u->module)) other = other->next;
    return other == u;
}
/* Lists the trained parameters of all units, and cuts them into buckets. Inside of a pass, the lists are those of its
 * beginning. */
static te_result te__units_list(te_ctx *te) {
    te__sharding_state *s = te__sharding_of(te);
    te_result result = TE_OK;
    te__dp_unit *u;
    if (s->listed) return TE_OK;
    te__units_forget(te);
    for (u = s->units; u && result == TE_OK; u = u->next) {
        int places = 0;
        if (te__unit_is_first(s, u) && !te_module_visit((te_module *)te__root_of(u->module), te__unit_collect, &places))
            result = te_error_code(te) == TE_OK ? TE_ERR_OUT_OF_MEMORY : te_error_code(te);
    }
    for (u = s->units; u && result == TE_OK; u = u->next) result = te__unit_cut(u);
    if (result != TE_OK) te__units_forget(te);
    return result;
}

/* ---- comparing ---- */

/* Returns the number by which the sums of a unit's gradients are divided. */
static float te__unit_divisor(const te_data_parallel_desc *desc) {
    return desc->gradient_divide_factor > 0.0f ? desc->gradient_divide_factor : (float)te__group_size(desc->group);
}
/* Ranks must have the parameters of a unit in common: each a name, a shape, a format. */
typedef struct te__unit_facts {
    const te_module *module;
    uint64_t hash;
    int64_t params, elements;
} te__unit_facts;
static void te__unit_add_facts(te__unit_facts *f, te_module *m) {
    int own[2], i;
    if (m != f->module && te__unit_of(m)) return;
    for (i = 0; i < m->num_entries; i++) {
        const te_tensor *x = m->entries[i].tensor;
        const char *name = m->entries[i].name, *form = x->quantized ? x->quantized->cls->name : "plain";
        if (m->entries[i].kind != TE_ENTRY_PARAMETER) continue;
        own[0] = x->dtype;
        own[1] = x->requires_grad;
        f->hash = te__hash64(name, strlen(name) + 1, f->hash);
        f->hash = te__hash64(form, strlen(form) + 1, f->hash);
        f->hash = te__hash64(own, sizeof(own), f->hash);
        f->hash = te__hash64(x->shape, (size_t)x->ndim * sizeof(x->shape[0]), f->hash);
        f->params++;
        f->elements += te__numel(x);
    }
    for (i = 0; i < m->num_children; i++) te__unit_add_facts(f, m->children[i]);
}
/* Checks that all ranks have the same unit m, and choose the same collective for its gradients (te__bucket_format).
 * Otherwise one rank would wait for bytes that no other sends. */
static te_result te__unit_meets(te_module *m, const te_data_parallel_desc *desc) {
    char what[448];
    te__unit_facts f = TE_ZERO;
    if (!te__group_compares(desc->group, false)) return TE_OK;
    f.module = m;
    te__unit_add_facts(&f, m);
    snprintf(what, sizeof(what),
             "unit \"%.100s\" with %lld parameters of %lld elements, whose names, shapes and formats have the checksum "
             "%016llx; shard %d, bucket_cap_mb %g, sums divided by %.9g, a group with%s te_all_to_all",
             m->name, (long long)f.params, (long long)f.elements, (unsigned long long)f.hash, (int)desc->shard,
             (double)desc->bucket_cap_mb, (double)te__unit_divisor(desc), desc->group->is.all_to_all ? "" : "out");
    return te__group_compare(desc->group, what, TE_OK);
}

/* The module whose products were the first ones in the tree's order to run under a recipe, or else to run at all. */
static bool te__find_ran(void *user, te_module *m) {
    const te_module **ran = (const te_module **)user;
    if (m->ran_sum && (!*ran || (!(*ran)->ran && m->ran))) *ran = m;
    return true;
}
/* Checks that all ranks have main_grads of the same formats, which decide those of gradients on the way, and have run
 * the model of u under one recipe: gradients of different recipes are no sum of one model. A rank that has run none of
 * its products agrees with every recipe. Once for all units of a model that share a group. */
static te_result te__units_meet_model(te__dp_unit *u) {
    te_ctx *te = u->module->te;
    te_module *root = (te_module *)te__root_of(u->module);
    const te_module *ran = NULL;
    te__dp_unit *other;
    char what[256], path[160], recipe[TE__RECIPE_TEXT];
    uint64_t formats = 0;
    te_result result;
    int i, params = 0, wide = 0;
    if (!te__group_compares(u->desc.group, u->model_met) || te->warming) return TE_OK;
    for (other = te__sharding_of(te)->units; other; other = other->next)
        for (i = 0; i < other->num_params && other->desc.group == u->desc.group &&
                    te__root_of(other->module) == root; i++) {
            const te_tensor *main_grad = te_tensor_main_grad(other->params[i]);
            const int format = main_grad ? (int)main_grad->dtype : -1;
            formats = te__hash64(&format, sizeof(format), formats);
            wide += main_grad && main_grad->dtype == TE_F32;
            params++;
        }
    snprintf(what, sizeof(what),
             "gradients of \"%.40s\", where %d of %d parameters have a main_grad in f32; the formats of all main_grads "
             "have the checksum %016llx", root->name, wide, params, (unsigned long long)formats);
    result = te__group_compare(u->desc.group, what, TE_OK);
    if (result != TE_OK) return result;
    what[0] = 0;
    te_module_visit(root, te__find_ran, &ran);
    if (ran)
        snprintf(what, sizeof(what), "gradients of \"%.40s\", whose products run under %s in \"%s\"", root->name,
                 te__recipe_text(ran->ran, ran->ran_sum, recipe), te_module_path(ran, path, sizeof(path)));
    result = te__group_compare(u->desc.group, what, TE_OK);
    for (other = te__sharding_of(te)->units; other && result == TE_OK; other = other->next)
        if (other->desc.group == u->desc.group && te__root_of(other->module) == root) other->model_met = true;
    return result;
}

static void te__bucket_drop(te__bucket *b) {
    int i;
    te__flight_drop(&b->flight);
    for (i = 0; i < b->n && b->sums; i++)
        if (b->list[i]->var) b->list[i]->var->flying = false;
    for (i = 0; i <= b->n && b->sums; i++) te_tensor_release(b->sums[i]);
    te__free(b->unit->module->te, b->sums);
    b->sums = NULL;
    te__free(b->unit->module->te, b->had);
    b->had = NULL;
}
static void te__unit_free(void *value) {
    te__dp_unit *u = (te__dp_unit *)value, **at, *other;
    te_ctx *te = u->module->te;
    te__sharding_state *s = te__sharding_of(te);
    int i, kept = 0;
    for (at = &s->units; *at; at = &(*at)->next)
        if (*at == u) {
            *at = u->next;
            break;
        }
    for (i = 0; i < s->num_flying; i++) {
        if (s->flying[i]->unit == u) te__bucket_drop(s->flying[i]);
        else s->flying[kept++] = s->flying[i];
    }
    s->num_flying = kept;
    te__unit_mark_params(u->module, u, NULL);
    te__unit_forget(u);
    s->num_turn = s->next = 0;
    for (i = 0; i < TE__AHEAD_WAYS; i++) {
        if (s->gathered[i] == u) s->gathered[i] = NULL;
        for (other = s->units; other; other = other->next)
            if (other->ahead[i] == u) other->ahead[i] = NULL;
    }
    te->tape.watched--;
    te__shards_close(u->set);
    te__free(te, u->params);
    te__free(te, u->places);
    te__free(te, u->buckets);
    te__free(te, u);
    if (s->units) return;
    te__free(te, s->turn);
    s->turn = NULL;
    s->cap_turn = 0;
}
