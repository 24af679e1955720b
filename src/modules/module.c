/* modules/module.c: the module tree. This file must not depend on what any class computes. */

/* te__fail for callers that return a module: returns NULL. */
TE_PRINTF(3, 4) static te_module *te__no_module(te_ctx *te, te_result code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    te__vfail(te, code, format, args);
    va_end(args);
    return NULL;
}

typedef struct te__entry {
    char *name;
    te_tensor *tensor;
    te_entry_kind kind;
    bool product_weight; /* te_quantized_model_init_begin stores this weight quantized */
    bool transient;      /* not in files, because of te_module_set_buffer_persistent(false) */
    bool stacked;        /* one of several entries that are adjacent in memory; the class reads them as one tensor */
} te__entry;

typedef struct te__attribute {
    char *key;
    void *value;
    void (*destroy)(void *value);
} te__attribute;

/* Records that a child was destroyed although the class of its parent needs the child. The record is allocated while
 * the child exists, so that destroying the child needs no memory. */
typedef struct te__gone {
    struct te__gone *next;
    int64_t place; /* the position of the child among its parent's children */
    char name[1];  /* name of the child; the allocation is longer */
} te__gone;

enum { TE__MAX_SHARES = 8 };
typedef struct te__graphed te__graphed;
struct te_module {
    te_ctx *te;
    void (*ungraph)(te_module *m); /* frees `graphed`; valid only if `graphed` is set */
    te_result (*run_graphs)(te_module *m, te_forward_args *args); /* launches the graphs of `graphed`; valid only if
                                                                   * `graphed` is set */
    const te_module_class *cls;
    char *name;
    bool named;      /* true: the creator gave the name; false: the default name of the class */
    bool numbered;   /* its Sequential has given it a number as name */
    te_module *parent;
    te_module *maker; /* the future parent, while the create function of that parent creates this module; otherwise
                       * NULL */
    te_module **children; /* in the order of their places */
    int num_children, cap_children;
    int64_t place, places; /* place: the position among the children of the parent; places: the position that the next
                            * new child of this module gets */
    te__gone *mark; /* the record that the parent gets when this module is destroyed; NULL: the class of the parent does
                     * not run this module */
    te__gone *gone; /* records that destroyed children have left */
    bool takes_any; /* the program chooses the children, and the class itself needs none of them */
    te__entry *entries;
    int num_entries, cap_entries;
    te__attribute *attributes;
    int num_attributes, cap_attributes;
    te_module_forward_fn own_forward; /* replaces the forward function of the class */
    bool evaluating;
    bool meta;       /* the parameters have no memory yet */
    bool awaits_group; /* the parameters have no memory until te_set_tensor_parallel_group, because this rank's shards
                        * are not known before */
    te__parallel parallel; /* the ranks that share the module's work */
    te_group *shares[TE__MAX_SHARES]; /* other groups whose ranks the module's calls wait for; they may be gone */
    unsigned met;          /* one bit for each GEMM; set after the ranks have checked that they agree on shapes, dtypes
                            * and recipe */
    struct te__graphed *graphed; /* see modules/graphed.c; or NULL */
    te_recipe_kind ran; /* the recipe of the region in which the module's products have first run with a backward
                         * pass, where ranks have units */
    uint64_t ran_sum;   /* its te__recipe_sum; of none 1, and 0 before that */
    te_recipe *recipe;  /* set by te_module_set_recipe; NULL: the autocast region has the recipe */
    bool recipe_off;
    const char *rng_tracker; /* name of the random state that the module uses, or NULL; the context owns it */
    bool has_fp8_output, has_fp8_grad; /* the class reads fp8_output, fp8_grad of a call */
    bool takes_packed; /* a call may give qkv_layer instead of an input */
    bool built_in;   /* the class comes with te.h: it reads the options of a call, and refuses those that it does not
                      * support */
    bool checkpoint; /* set by te_module_set_checkpoint */
    int holds;       /* number of tape nodes that will run the module again */
    bool destroyed;  /* destroyed by its owner while tape nodes held it */
    te__rng_state rng; /* the random state from before the module was created */
    void *state;
    te__closable closable;
};

/* Functions that are called around the forward of each module, for data_parallel/. */
typedef struct te__around {
    te_result (*enter)(te_module *m);
    te_result (*leave)(te_module *m, te_result result); /* returns `result`, or its own error */
} te__around;

typedef struct te__modules_state {
    te_module *making; /* the module whose create function creates children now, or NULL */
    int num_gone;      /* records of destroyed children, in all trees of the context */
    bool is_optim_step; /* set by te_step_set_is_optim_step */
    const struct te__around *around; /* called around each forward; NULL: nothing is */
    int calls; /* calls of te_forward_with that run, one inside the other */
    void (*called)(te_module *m, te_result result); /* called at the end of an outermost te_forward_with outside of
                                                     * backward passes; NULL: nothing is */
} te__modules_state;
static const te__slot te__modules_slot = {sizeof(te__modules_state)};
static te__modules_state *te__modules_of(const te_ctx *te) {
    return (te__modules_state *)te__slot_of(te, &te__modules_slot);
}
/* Notes that calls of m wait for the ranks of `group`, which may be NULL. The oldest note gives way. */
static void te__module_shares(te_module *m, te_group *group) {
    int i;
    if (te__group_size(group) == 1) return;
    for (i = 0; i < TE__MAX_SHARES && m->shares[i] != group; i++) {}
    if (i < TE__MAX_SHARES) return;
    memmove(m->shares + 1, m->shares, (TE__MAX_SHARES - 1) * sizeof(te_group *));
    m->shares[0] = group;
}
static const te__room te__modules_room = TE__ROOM(&te__modules_slot, NULL, NULL);

static const te_module *te__root_of(const te_module *m) {
    while (m->parent) m = m->parent;
    return m;
}
static void te__module_close(void *owner) {
    te_module *m = (te_module *)owner;
    while (m->parent) m = m->parent; /* destroys from the root, so that the destroy functions of classes still find the
                                      * children */
    te_module_destroy(m);
}

TE_API te_module *te_module_create(te_ctx *te, const te_module_class *cls, const char *name) {
    te_module *m;
    if (!te) return NULL;
    if (te->capture) {
        te__refuse_capture(te, "te_module_create", "make modules before te_graph_begin");
        return NULL;
    }
    if (!cls || !cls->name || !cls->forward)
        return te__no_module(te, TE_ERR_INVALID, "te_module_create: %s; a class needs a name and a forward function",
                             !cls         ? "cls is NULL"
                             : !cls->name ? "the class has no name"
                                          : "the class has no forward function");
    m = (te_module *)te__alloc_zero(te, sizeof(te_module));
    if (!m) return NULL;
    m->te = te;
    m->cls = cls;
    m->maker = te__modules_of(te)->making;
    m->rng = te__rng_now(te);
    m->name = te__copy_string(te, name ? name : cls->name);
    m->named = name != NULL;
    m->state = te__alloc_zero(te, cls->state_size);
    if (!m->name || !m->state) {
        te__free(te, m->name);
        te__free(te, m->state);
        te__free(te, m);
        return NULL;
    }
    te__closable_add(te, &m->closable, "module", te__module_close, m);
    return m;
}

/* Creates a module with the name `given` or, if that is NULL, with `otherwise`, the default name of the class. */
static te_module *te__module_named(te_ctx *te, const te_module_class *cls, const char *given, const char *otherwise) {
    te_module *m = te_module_create(te, cls, given ? given : otherwise);
    if (m) m->named = given != NULL;
    return m;
}
/* Creates a module whose state is a copy of its desc. */
static te_module *te__module_with_desc(te_ctx *te, const te_module_class *cls, const void *desc, const char *given,
                                       const char *otherwise) {
    te_module *m = te__module_named(te, cls, given, otherwise);
    if (m) memcpy(m->state, desc, cls->state_size);
    return m;
}

/* ---- children that were destroyed ---- */

/* Returns the bytes of a child's record. */
static size_t te__gone_bytes(const char *name) { return sizeof(te__gone) + strlen(name); }
static te__gone *te__gone_create(te_ctx *te, const char *name) {
    te__gone *x = (te__gone *)te__alloc_zero(te, te__gone_bytes(name));
    if (x) memcpy(x->name, name, strlen(name));
    return x;
}
static void te__gone_free(te_ctx *te, te__gone *x) {
    if (x) te__free(te, x);
}
/* Removes the record of the destroyed child `name` from m's list and returns it. Returns NULL if there is none. */
static te__gone *te__gone_take(te_module *m, const char *name) {
    te__gone **at = &m->gone, *x;
    while (*at && strcmp((*at)->name, name) != 0) at = &(*at)->next;
    x = *at;
    if (!x) return NULL;
    *at = x->next;
    te__modules_of(m->te)->num_gone--;
    return x;
}
/* Removes m from the children of its parent. If the class of the parent needs m, the record m->mark moves to
 * parent->gone. */
static void te__module_leave(te_module *m) {
    te_module *parent = m->parent;
    int i = 0;
    if (!parent) return;
    while (parent->children[i] != m) i++;
    memmove(parent->children + i, parent->children + i + 1,
            (size_t)(parent->num_children - i - 1) * sizeof(te_module *));
    parent->num_children--;
    m->parent = NULL;
    if (!m->mark) return;
    m->mark->place = m->place;
    m->mark->next = parent->gone;
    parent->gone = m->mark;
    m->mark = NULL;
    te__modules_of(m->te)->num_gone++;
}
static bool te__module_is_whole(void *user, te_module *m) {
    te_ctx *te = m->te;
    char before[sizeof(te->module_path)];
    (void)user;
    if (!m->gone) return true;
    memcpy(before, te->module_path, sizeof(before));
    te_module_path(m, te->module_path, sizeof(te->module_path));
    te__fail(te, TE_ERR_STATE,
             "%s: its child \"%s\" is gone: the program has destroyed it (te_module_destroy). te_module_add_child "
             "gives the module another of that name",
             m->cls->name, m->gone->name);
    memcpy(te->module_path, before, sizeof(before));
    return false;
}
/* Checks that each module of the tree m still has all children that its class needs. */
static te_result te__tree_whole(te_module *m) {
    return te__modules_of(m->te)->num_gone == 0 || te_module_visit(m, te__module_is_whole, NULL) ? TE_OK : TE_ERR_STATE;
}

/* ---- destroying ---- */

/* Keeps m alive until the matching te__module_unhold. m may be NULL. */
static te_module *te__module_hold(te_module *m) {
    if (m) m->holds++;
    return m;
}
TE_API void te_module_destroy(te_module *m) {
    te_ctx *te;
    int i;
    if (!m || te__refuse_hook(m->te, "te_module_destroy") != TE_OK) return;
    te = m->te;
    if (!m->destroyed) te__closable_remove(&m->closable);
    m->destroyed = true;
    te__module_leave(m); /* takes m out of the tree above */
    if (m->holds > 0) return; /* te__module_unhold destroys it later */
    if (m->graphed) m->ungraph(m);
    while (m->num_attributes > 0) te_module_remove_attribute(m, m->attributes[m->num_attributes - 1].key);
    if (m->cls->destroy) m->cls->destroy(m);
    for (i = 0; i < m->num_children; i++) {
        m->children[i]->parent = NULL;
        te_module_destroy(m->children[i]);
    }
    for (i = 0; i < m->num_entries; i++) {
        te_tensor_release(m->entries[i].tensor);
        te__free(te, m->entries[i].name);
    }
    while (m->gone) te__gone_free(te, te__gone_take(m, m->gone->name));
    te__gone_free(te, m->mark);
    te__free(te, m->children);
    te__free(te, m->entries);
    te__free(te, m->attributes);
    te__free(te, m->recipe);
    te__free(te, m->state);
    te__free(te, m->name);
    te__free(te, m);
}

static void te__module_unhold(te_module *m) {
    if (m && --m->holds == 0 && m->destroyed) te_module_destroy(m);
}

TE_API void *te_module_state(te_module *m) { return m ? m->state : NULL; }
TE_API te_ctx *te_module_ctx(const te_module *m) { return m ? m->te : NULL; }
TE_API const te_module_class *te_module_get_class(const te_module *m) { return m ? m->cls : NULL; }
TE_API const char *te_module_name(const te_module *m) { return m ? m->name : ""; }
TE_API te_module *te_module_parent(const te_module *m) { return m ? m->parent : NULL; }

/* Joins the names of the modules in `chain` by dots, from the last one to the first. */
static const char *te__join_names(const te_module *const *chain, int n, char *buffer, size_t size) {
    size_t used = 0;
    while (n > 0) { /* no printf, because every forward pass runs this */
        const char *name = chain[--n]->name;
        if (used && used + 1 < size) buffer[used++] = '.';
        while (*name && used + 1 < size) buffer[used++] = *name++;
    }
    buffer[used] = 0;
    return buffer;
}

/* Writes the path of m. It begins below the root. For a module without a parent it is only the module's name. */
TE_API const char *te_module_path(const te_module *m, char *buffer, size_t size) {
    const te_module *chain[TE_MAX_MODULE_DEPTH];
    int n = 0;
    if (!buffer || size == 0) return "";
    if (m && !m->parent) chain[n++] = m;
    for (; m && m->parent && n < TE_MAX_MODULE_DEPTH; m = m->parent) chain[n++] = m;
    return te__join_names(chain, n, buffer, size);
}
/* Writes the path of a module that is being created. The path begins at the module whose create function the program
 * has called. */
static const char *te__making_path(const te_module *m, char *buffer, size_t size) {
    const te_module *chain[TE_MAX_MODULE_DEPTH];
    int n = 0;
    for (; m && n < TE_MAX_MODULE_DEPTH; m = m->maker ? m->maker : m->parent) chain[n++] = m;
    return te__join_names(chain, n, buffer, size);
}

/* Returns the number of levels of the tree m; m itself is one level. */
static int te__module_height(const te_module *m) {
    int i, height = 0;
    for (i = 0; i < m->num_children; i++) height = (int)te__max(height, te__module_height(m->children[i]));
    return height + 1;
}

TE_API te_module *te_module_add_child(te_module *parent, const char *name, te_module *child) {
    const te_module *up;
    te__gone *mark;
    int64_t place;
    char *copy;
    int i, depth = 0, height;
    if (!parent || !child) return NULL;
    for (up = parent; up; up = up->parent, depth++)
        if (up == child || child->parent || child->te != parent->te)
            return te__no_module(
                parent->te, TE_ERR_INVALID,
                "te_module_add_child: %s cannot become a child of %s: it has a parent, is above it, or is of "
                "another context",
                child->name, parent->name);
    height = te__module_height(child);
    if (depth + height > TE_MAX_MODULE_DEPTH) { /* walks of the tree recurse once a level */
        return te__no_module(parent->te, TE_ERR_INVALID,
                             "te_module_add_child: %s has %d level%s, and %s is at level %d; a tree has at most %d "
                             "(TE_MAX_MODULE_DEPTH)",
                             name ? name : child->name, height, height == 1 ? "" : "s", parent->name, depth,
                             TE_MAX_MODULE_DEPTH);
    }
    if (name && (strchr(name, '.') || !name[0]))
        return te__no_module(parent->te, TE_ERR_INVALID,
                             "te_module_add_child: \"%s\": a name is not empty and has no dot", name);
    for (i = 0; i < parent->num_children; i++)
        if (strcmp(parent->children[i]->name, name ? name : child->name) == 0)
            return te__no_module(parent->te, TE_ERR_INVALID, "te_module_add_child: %s has a child named \"%s\" already",
                                 parent->name, name ? name : child->name);
    if (!te__grow(parent->te, (void **)&parent->children, &parent->cap_children, parent->num_children,
                  sizeof(te_module *)))
        return NULL;
    copy = te__copy_string(parent->te, name ? name : child->name);
    if (!copy) return NULL;
    mark = te__gone_take(parent, copy); /* the new child gets the position of a destroyed child with the same name */
    place = mark ? mark->place : parent->places;
    if (!mark && !parent->built_in && !parent->takes_any && !(mark = te__gone_create(parent->te, copy))) {
        te__free(parent->te, copy);
        return NULL;
    }
    parent->places += place == parent->places;
    te__free(parent->te, child->name);
    child->name = copy;
    child->mark = mark;
    child->place = place;
    child->parent = parent;
    for (i = parent->num_children++; i > 0 && parent->children[i - 1]->place > place; i--)
        parent->children[i] = parent->children[i - 1];
    parent->children[i] = child;
    return child;
}
/* Marks `child` as needed: the class of the parent runs it, but did not create it. Returns false on failure. */
static bool te__module_need(te_module *child) {
    if (!child->mark) child->mark = te__gone_create(child->te, child->name);
    return child->mark != NULL;
}
/* Destroys the child `name`, which the class of m no longer runs. If the child was destroyed before, removes the record
 * of the child. */
static void te__module_drop(te_module *m, const char *name) {
    te_module *child = te_module_find(m, name);
    te__gone_free(m->te, te__gone_take(m, name));
    if (!child) return;
    te__gone_free(m->te, child->mark);
    child->mark = NULL;
    te_module_destroy(child);
}
TE_API te_module *te_module_remove_child(te_module *parent, const char *name) {
    te_module *child = name && name[0] && !strchr(name, '.') ? te_module_find(parent, name) : NULL;
    if (!parent) return NULL;
    if (te__refuse_hook(parent->te, "te_module_remove_child") != TE_OK) return NULL;
    if (!child || (parent->built_in && child->mark))
        return te__no_module(parent->te, TE_ERR_INVALID, "te_module_remove_child: %s %s \"%s\"%s", parent->name,
                             child ? "runs its child" : "has no child", name ? name : "(NULL)",
                             child ? "; te_module_destroy and te_module_add_child put another in its place" : "");
    te__gone_free(parent->te, child->mark);
    child->mark = NULL;
    te__module_leave(child);
    return child;
}
TE_API int te_module_num_children(const te_module *m) { return m ? m->num_children : 0; }
TE_API te_module *te_module_child(const te_module *m, int index) {
    return m && index >= 0 && index < m->num_children ? m->children[index] : NULL;
}
TE_API te_module *te_module_find(te_module *m, const char *path) {
    while (m && path && *path) {
        size_t n = strcspn(path, ".");
        te_module *next = NULL;
        int i;
        for (i = 0; i < m->num_children && !next; i++)
            if (strlen(m->children[i]->name) == n && strncmp(m->children[i]->name, path, n) == 0) next = m->children[i];
        m = next;
        if (path[n] && !path[n + 1]) return NULL; /* a path such as "a." names no module, because each module has only
                                                   * one path */
        path += path[n] ? n + 1 : n;
    }
    return m;
}

static te_tensor *te__module_add(te_module *m, const char *name, te_tensor *tensor, te_entry_kind kind) {
    te__entry *e;
    int i;
    if (!m || !tensor) return NULL;
    if (te__refuse_hook(m->te, "te_module_add_parameter") != TE_OK ||
        !te__same_ctx(tensor, m->te, "te_module_add_parameter"))
        return NULL;
    if (!name || !name[0])
        return te__no_tensor(m->te, TE_ERR_INVALID, "%s: a parameter or buffer needs a name", m->name);
    if (!tensor->name && !te_tensor_set_name(tensor, name)->name) return NULL; /* for messages */
    for (i = 0; i < m->num_entries; i++)
        if (strcmp(m->entries[i].name, name) == 0) {
            if (m->entries[i].kind != kind)
                return te__no_tensor(m->te, TE_ERR_INVALID, "%s: \"%s\" is a %s already", m->name, name,
                                     kind == TE_ENTRY_BUFFER ? "parameter" : "buffer");
            te_tensor_retain(tensor);
            te_tensor_release(m->entries[i].tensor);
            m->entries[i].tensor = tensor;
            return tensor;
        }
    if (!te__grow(m->te, (void **)&m->entries, &m->cap_entries, m->num_entries, sizeof(te__entry))) return NULL;
    e = &m->entries[m->num_entries];
    e->name = te__copy_string(m->te, name);
    if (!e->name) return NULL;
    e->tensor = te_tensor_retain(tensor);
    e->kind = kind;
    e->product_weight = e->transient = e->stacked = false;
    m->num_entries++;
    return tensor;
}
/* Removes the entry that was added last. */
static void te__module_remove_last(te_module *m) {
    te__entry *e = &m->entries[--m->num_entries];
    te_tensor_release(e->tensor);
    te__free(m->te, e->name);
}
TE_API te_tensor *te_module_add_parameter(te_module *m, const char *name, te_tensor *tensor) {
    tensor = te__module_add(m, name, tensor, TE_ENTRY_PARAMETER);
    return te_tensor_set_requires_grad(tensor, true);
}
TE_API te_tensor *te_module_add_buffer(te_module *m, const char *name, te_tensor *tensor) {
    return te__module_add(m, name, tensor, TE_ENTRY_BUFFER);
}
static te__entry *te__module_entry(const te_module *m, const char *name) {
    int i;
    for (i = 0; m && name && i < m->num_entries; i++)
        if (strcmp(m->entries[i].name, name) == 0) return &m->entries[i];
    return NULL;
}
TE_API te_tensor *te_module_parameter(const te_module *m, const char *name) {
    const te__entry *e = te__module_entry(m, name);
    return e ? e->tensor : NULL;
}
TE_API te_result te_module_set_buffer_persistent(te_module *m, const char *name, bool persistent) {
    te__entry *e = te__module_entry(m, name);
    if (!m) return TE_ERR_STATE;
    if (!e || e->kind != TE_ENTRY_BUFFER)
        return te__fail(m->te, TE_ERR_INVALID, "te_module_set_buffer_persistent: %s has no buffer \"%s\"%s", m->name,
                        name ? name : "(NULL)", e ? ": that is a parameter" : "");
    e->transient = !persistent;
    return TE_OK;
}
/* Returns true if x is a buffer of m that files do not have. */
static bool te__module_is_transient(const te_module *m, const te_tensor *x) {
    int i;
    for (i = 0; i < m->num_entries; i++)
        if (m->entries[i].tensor == x && m->entries[i].transient) return true;
    return false;
}

/* ---- attributes ---- */

#define TE__LORA "te.lora" /* attribute key of lora/lora.c, on a Linear with adapters */

static te__attribute *te__module_attribute(const te_module *m, const char *key) {
    int i;
    for (i = 0; m && key && i < m->num_attributes; i++)
        if (strcmp(m->attributes[i].key, key) == 0) return &m->attributes[i];
    return NULL;
}
TE_API bool te_module_attribute(const te_module *m, const char *key, void **value) {
    const te__attribute *a = te__module_attribute(m, key);
    if (value) *value = a ? a->value : NULL;
    return a != NULL;
}
/* Returns the value of an attribute; NULL if m, which may be NULL, has none. */
static void *te__attribute_of(const te_module *m, const char *key) {
    const te__attribute *a = te__module_attribute(m, key);
    return a ? a->value : NULL;
}
TE_API te_result te_module_set_attribute(te_module *m, const char *key, void *value, void (*destroy)(void *value)) {
    te__attribute *a, before;
    if (!m) return TE_ERR_STATE;
    if (!key || !key[0])
        return te__fail(m->te, TE_ERR_INVALID, "te_module_set_attribute: an attribute of %s needs a key", m->name);
    a = te__module_attribute(m, key);
    if (!a) {
        if (!te__grow(m->te, (void **)&m->attributes, &m->cap_attributes, m->num_attributes, sizeof(te__attribute)))
            return te_error_code(m->te);
        a = &m->attributes[m->num_attributes];
        memset(a, 0, sizeof(*a));
        a->key = te__copy_string(m->te, key);
        if (!a->key) return te_error_code(m->te);
        m->num_attributes++;
    }
    before = *a;
    a->value = value;
    a->destroy = destroy;
    if (before.destroy && before.value != value) before.destroy(before.value);
    return TE_OK;
}
TE_API void te_module_remove_attribute(te_module *m, const char *key) {
    te__attribute *a = te__module_attribute(m, key), gone;
    if (!a) return;
    gone = *a;
    *a = m->attributes[--m->num_attributes];
    te__free(m->te, gone.key);
    if (gone.destroy) gone.destroy(gone.value);
}

/* ---- walking ---- */

static bool te__has_visitor(te_module *m, bool given, const char *who) {
    if (!given) te__fail(m->te, TE_ERR_INVALID, "%s: the function to call is NULL", who);
    return given;
}
static bool te__visit_modules(te_module *m, te_module_visit_fn visit, void *user) {
    int i;
    if (!visit(user, m)) return false;
    for (i = 0; i < m->num_children; i++)
        if (!te__visit_modules(m->children[i], visit, user)) return false;
    return true;
}
TE_API bool te_module_visit(te_module *m, te_module_visit_fn visit, void *user) {
    return !m || (te__has_visitor(m, visit != NULL, "te_module_visit") && te__visit_modules(m, visit, user));
}

/* Maximum bytes of a path in a walk. Paths begin at the module where the walk began. Each function that walks restores
 * `path` before it returns. */
enum { TE__TREE_PATH = 512 };
static void te__path_append(char *path, size_t used, const char *name) {
    snprintf(path + used, TE__TREE_PATH - used, "%s%s", used ? "." : "", name);
}
static bool te__visit_tensors(te_module *m, char *path, te_tensor_visit_fn visit, void *user) {
    size_t used = strlen(path);
    bool more = true;
    int i;
    for (i = 0; i < m->num_entries && more; i++) {
        te__path_append(path, used, m->entries[i].name);
        more = visit(user, m, path, m->entries[i].tensor, m->entries[i].kind);
    }
    for (i = 0; i < m->num_children && more; i++) {
        te__path_append(path, used, m->children[i]->name);
        more = te__visit_tensors(m->children[i], path, visit, user);
    }
    path[used] = 0;
    return more;
}
TE_API bool te_module_visit_tensors(te_module *m, te_tensor_visit_fn visit, void *user) {
    char path[TE__TREE_PATH] = "";
    return !m ||
           (te__has_visitor(m, visit != NULL, "te_module_visit_tensors") && te__visit_tensors(m, path, visit, user));
}

static bool te__count_parameter(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)m, (void)path;
    if (kind == TE_ENTRY_PARAMETER) *(int64_t *)user += te__numel(x);
    return true;
}
TE_API int64_t te_module_num_parameters(te_module *m) {
    int64_t n = 0;
    te_module_visit_tensors(m, te__count_parameter, &n);
    return n;
}
static bool te__set_parameter_grad(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)m, (void)path;
    if (kind == TE_ENTRY_PARAMETER) te_tensor_set_requires_grad(x, *(const bool *)user);
    return true;
}
TE_API void te_module_set_requires_grad(te_module *m, bool on) {
    te_module_visit_tensors(m, te__set_parameter_grad, &on);
}
static bool te__forget_grad(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)user, (void)m, (void)path, (void)kind;
    te_tensor_zero_grad(x);
    return true;
}
/* Returns true if the module of `owner`, a te__scaling, is in the tree whose root is `user`. */
static bool te__scaling_below(const void *owner, const void *user) {
    const te_module *m = ((const te__scaling *)owner)->module;
    while (m && m != (const te_module *)user) m = m->parent;
    return m != NULL;
}
TE_API void te_module_zero_grad(te_module *m) {
    if (!m) return;
    te_module_visit_tensors(m, te__forget_grad, NULL);
    te__deferred_take(m->te, te__scaling_below, m, false); /* drops the weight gradients that wait for te_backward_dw */
}
static bool te__set_evaluating(void *user, te_module *m) {
    m->evaluating = !*(const bool *)user;
    return true;
}
TE_API void te_module_train(te_module *m, bool training) { te_module_visit(m, te__set_evaluating, &training); }
TE_API bool te_module_is_training(const te_module *m) { return m && !m->evaluating; }

static void te__print_module(te_module *m, int depth, char *buffer, size_t size, size_t *used) {
    char text[TE__SHAPE_TEXT];
    const te__gone *gone;
    int i;
#define TE__PRINT(...)                                                                                        \
    do {                                                                                                      \
        int w = snprintf(*used < size ? buffer + *used : NULL, *used < size ? size - *used : 0, __VA_ARGS__); \
        *used += w > 0 ? (size_t)w : 0;                                                                       \
    } while (0)
    TE__PRINT("%*s%s: %s%s\n", 2 * depth, "", m->name, m->cls->name, m->own_forward ? " (forward of its own)" : "");
    for (i = 0; i < m->num_entries; i++)
        TE__PRINT("%*s%s %s %s%s\n", 2 * depth + 2, "", m->entries[i].name, te_dtype_name(m->entries[i].tensor->dtype),
                  te__shape_text(m->entries[i].tensor, text), m->entries[i].kind == TE_ENTRY_BUFFER ? " (buffer)" : "");
    for (gone = m->gone; gone; gone = gone->next) TE__PRINT("%*s%s: gone\n", 2 * depth + 2, "", gone->name);
#undef TE__PRINT
    for (i = 0; i < m->num_children; i++) te__print_module(m->children[i], depth + 1, buffer, size, used);
}
TE_API size_t te_module_print(te_module *m, char *buffer, size_t size) {
    size_t used = 0;
    if (size > 0 && buffer) buffer[0] = 0;
    if (m) te__print_module(m, 0, buffer, buffer ? size : 0, &used);
    return used;
}
