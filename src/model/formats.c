/* model/formats.c: chooses which tensors of a model are cast, and to which dtypes. This file must not depend on how
 * model/recast.c casts a tensor in place. */

/* ---- words ---- */

static const char te__fp32_key[] = "_keep_in_fp32_modules", te__strict_fp32_key[] = "_keep_in_fp32_modules_strict";

typedef struct te__words {
    te_ctx *te;
    char **word;
    int count;
} te__words;

static void te__words_destroy(void *value) {
    te__words *w = (te__words *)value;
    int i;
    for (i = 0; i < w->count; i++) te__free(w->te, w->word[i]);
    te__free(w->te, w->word);
    te__free(w->te, w);
}
/* Returns the words in attribute `key` of m. NULL if m has no such attribute, or if the program has set another
 * value. */
static const te__words *te__words_of(const te_module *m, const char *key) {
    const te__attribute *a = te__module_attribute(m, key);
    return a && a->destroy == te__words_destroy ? (const te__words *)a->value : NULL;
}
static bool te__words_ok(te_module *m, const char *const *keywords, int count, const char *who) {
    int i;
    for (i = 0; i < count && keywords && keywords[i]; i++) {}
    if (count >= 0 && i == count) return true;
    return te__not_ok(m->te, TE_ERR_INVALID, "%s: %d words for %s, and %s; give as many texts", who, count, m->name,
                      count < 0  ? "no number of words is below 0"
                      : keywords ? "one of them is NULL"
                                 : "the list is NULL");
}
static bool te__word_matches(const char *const *keywords, int count, const char *path) {
    int i;
    for (i = 0; i < count; i++)
        if (strstr(path, keywords[i])) return true;
    return false;
}
static bool te__words_match(const te__words *w, const char *path) {
    return w && te__word_matches((const char *const *)w->word, w->count, path);
}

TE_API te_result te_module_set_keep_in_fp32(te_module *m, const char *const *keywords, int count, bool strict) {
    const char *const key = strict ? te__strict_fp32_key : te__fp32_key;
    te__words *w;
    te_result result;
    if (!m) return TE_ERR_STATE;
    if (!te__words_ok(m, keywords, count, "te_module_set_keep_in_fp32")) return te_error_code(m->te);
    if (count == 0) {
        te_module_remove_attribute(m, key);
        return TE_OK;
    }
    w = (te__words *)te__alloc_zero(m->te, sizeof(*w));
    if (!w) return te_error_code(m->te);
    w->te = m->te;
    w->count = count;
    w->word = (char **)te__alloc_zero(m->te, ((size_t)count + 1) * sizeof(char *));
    result = w->word ? TE_OK : te_error_code(m->te);
    if (!w->word) w->count = 0;
    for (count = 0; count < w->count && result == TE_OK; count++) {
        w->word[count] = te__copy_string(m->te, keywords[count]);
        if (!w->word[count]) result = te_error_code(m->te);
    }
    if (result == TE_OK) result = te_module_set_attribute(m, key, w, te__words_destroy);
    if (result != TE_OK) te__words_destroy(w);
    return result;
}

/* Appends the words of w to `keywords`, without repeats and without words of `outer`. *n also counts words that do not
 * fit into `room`. */
static void te__words_list(const te__words *w, const te__words *outer, const char **keywords, int room, int *n) {
    int i, k;
    for (i = 0; w && i < w->count; i++) {
        for (k = 0; k < i && strcmp(w->word[k], w->word[i]) != 0; k++) {}
        if (k < i) continue;
        for (k = 0; outer && k < outer->count && strcmp(outer->word[k], w->word[i]) != 0; k++) {}
        if (outer && k < outer->count) continue;
        if (*n < room && keywords) keywords[*n] = w->word[i];
        ++*n;
    }
}
TE_API int te_module_get_strict_fp32_keywords(const te_module *m, const char **keywords, int room) {
    int n = 0;
    te__words_list(te__words_of(m, te__strict_fp32_key), NULL, keywords, room, &n);
    return n;
}
TE_API int te_module_get_fp32_keywords(const te_module *m, const char **keywords, int room) {
    const te__words *strict = te__words_of(m, te__strict_fp32_key);
    int n = 0;
    te__words_list(strict, NULL, keywords, room, &n);
    te__words_list(te__words_of(m, te__fp32_key), strict, keywords, room, &n);
    return n;
}

static bool te__find_sharded(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)user, (void)m, (void)path;
    return !(kind == TE_ENTRY_PARAMETER && x->sharded);
}
TE_API bool te_has_dtensor_params(te_module *m) { return m && !te_module_visit_tensors(m, te__find_sharded, NULL); }

/* ---- first paths ---- */

/* A parameter, and the entry through which te_module_visit_tensors visits it first. */
typedef struct te__first {
    const te_tensor *x;
    const te__entry *entry;
    int64_t order;
} te__first;
typedef struct te__firsts {
    te_ctx *te;
    te__first *item; /* sorted by tensor address */
    int num, cap;
} te__firsts;

static int te__first_by_tensor(const void *a, const void *b) {
    const te__first *x = (const te__first *)a, *y = (const te__first *)b;
    const int order = te__by_address(x->x, y->x);
    return order ? order : x->order < y->order ? -1 : x->order > y->order;
}
/* Compares two items of a list whose first field is a tensor. */
static int te__by_tensor(const void *a, const void *b) {
    return te__by_address(*(const te_tensor *const *)a, *(const te_tensor *const *)b);
}
static bool te__firsts_add(te__firsts *f, const te_module *m) {
    int i;
    for (i = 0; i < m->num_entries; i++) {
        if (m->entries[i].kind != TE_ENTRY_PARAMETER) continue;
        if (!te__grow(f->te, (void **)&f->item, &f->cap, f->num, sizeof(te__first))) return false;
        f->item[f->num].x = m->entries[i].tensor;
        f->item[f->num].entry = &m->entries[i];
        f->item[f->num].order = f->num;
        f->num++;
    }
    for (i = 0; i < m->num_children; i++)
        if (!te__firsts_add(f, m->children[i])) return false;
    return true;
}
static void te__firsts_close(te__firsts *f) {
    te__free(f->te, f->item);
    memset(f, 0, sizeof(*f));
}
/* Collects, for each parameter of the tree m, the entry that a walk visits first. The modules must not change until
 * te__firsts_close. */
static bool te__firsts_open(te__firsts *f, const te_module *m) {
    int i, n = 0;
    memset(f, 0, sizeof(*f));
    f->te = m->te;
    if (!te__firsts_add(f, m)) {
        te__firsts_close(f);
        return false;
    }
    if (f->num) qsort(f->item, (size_t)f->num, sizeof(te__first), te__first_by_tensor);
    for (i = 0; i < f->num; i++)
        if (n == 0 || f->item[i].x != f->item[n - 1].x) f->item[n++] = f->item[i];
    f->num = n;
    return true;
}
/* Returns true if e is the first entry that holds its parameter. Always true for a buffer. */
static bool te__is_first(const te__firsts *f, const te__entry *e) {
    te__first key, *at = NULL;
    memset(&key, 0, sizeof(key));
    key.x = e->tensor;
    if (e->kind != TE_ENTRY_PARAMETER) return true;
    if (f->num) at = (te__first *)bsearch(&key, f->item, (size_t)f->num, sizeof(key), te__by_tensor);
    return at && at->entry == e;
}

/* ---- casts ---- */

typedef struct te__cast {
    te__recast list;
    te_module *root;
    te__firsts firsts;        /* valid during a walk */
    char path[TE__TREE_PATH]; /* path of the visited tensor */
    size_t module_path;       /* length of the module's part of `path` */
    te_dtype dtype;           /* target dtype */
    const te__words *words, *strict; /* words of the root that keep tensors in f32 */
    bool sharded;             /* the model has sharded parameters */
    const char *const *keywords; /* the words given to te_restore_fp32_modules; used instead of the fields `words` and
                                  * `strict` */
    int count;                   /* number of keywords */
    bool buffers_alone;
    const te_cast_model_desc *desc; /* options of te_cast_model_to_dtype, or NULL */
    const te_fp32_scope *scope;     /* the scope that is being closed, with the tensors' old dtypes; otherwise NULL */
} te__cast;

static te__cast te__cast_of(te_module *m, te_dtype dtype) {
    te__cast c = TE_ZERO;
    c.list.te = m->te;
    c.root = m;
    c.dtype = dtype;
    c.words = te__words_of(m, te__fp32_key);
    c.strict = te__words_of(m, te__strict_fp32_key);
    c.sharded = te_has_dtensor_params(m);
    return c;
}
static bool te__is_scaling_path(const char *path, te_entry_kind kind) {
    const char *dot = strrchr(path, '.');
    return kind == TE_ENTRY_BUFFER && te__is_scaling_name(dot ? dot + 1 : path);
}
/* Returns true if the tensor at c->path must stay in f32, because its path contains one of the words set on the root
 * (te_module_set_keep_in_fp32). */
static bool te__cast_keeps(const te__cast *c, const te__entry *e) {
    if (!te__is_first(&c->firsts, e)) return false;
    return te__words_match(c->strict, c->path) ||
           ((!c->sharded || e->kind == TE_ENTRY_BUFFER) && te__words_match(c->words, c->path));
}
/* Returns true if m, or a module between m and the root, has a name in skip_modules. */
static bool te__cast_skips(const te__cast *c, const te_module *m) {
    int i;
    for (; c->desc && m && m != c->root; m = m->parent)
        for (i = 0; i < c->desc->num_skip_modules; i++)
            if (strcmp(c->desc->skip_modules[i], m->name) == 0) return true;
    return false;
}

/* Visits each tensor of the tree, once for each of its paths, until `visit` returns false. */
typedef bool (*te__cast_fn)(te__cast *c, const te_module *m, const te__entry *e);
static bool te__cast_walk_module(te__cast *c, const te_module *m, te__cast_fn visit) {
    const size_t used = strlen(c->path);
    bool more = true;
    int i;
    for (i = 0; i < m->num_entries && more; i++) {
        te__path_append(c->path, used, m->entries[i].name);
        c->module_path = used;
        more = te__is_scaling_path(c->path, m->entries[i].kind) || visit(c, m, &m->entries[i]);
    }
    for (i = 0; i < m->num_children && more; i++) {
        te__path_append(c->path, used, m->children[i]->name);
        more = te__cast_walk_module(c, m->children[i], visit);
    }
    c->path[used] = 0;
    return more;
}
static bool te__cast_walk(te__cast *c, te__cast_fn visit) {
    bool more;
    if (!te__firsts_open(&c->firsts, c->root)) return false;
    c->path[0] = 0;
    more = te__cast_walk_module(c, c->root, visit);
    te__firsts_close(&c->firsts);
    return more;
}
/* Adds one tensor to the list of casts. A tensor that a skipped module shares with another module is cast only if it is
 * a parameter. */
static bool te__cast_visit(te__cast *c, const te_module *m, const te__entry *e) {
    const bool skips = te__cast_skips(c, m);
    if (te__cast_keeps(c, e)) return te__recast_add(&c->list, e->tensor, TE_F32, 2);
    return te__recast_add(&c->list, e->tensor, skips ? e->tensor->dtype : c->dtype,
                          skips == (e->kind == TE_ENTRY_BUFFER));
}
static te_result te__cast_run(te__cast *c, te__cast_fn visit) {
    return te__recast_run(&c->list, te__cast_walk(c, visit));
}
/* Warns if te_module_set_keep_in_fp32 was given words that are not strict, and the model has sharded parameters. In
 * such a model these words keep only buffers in f32. */
static void te__cast_warn(const te__cast *c, const char *who) {
    const char *first = NULL;
    int n = 0;
    te__words_list(c->words, c->strict, &first, 1, &n);
    if (c->sharded && n > 0)
        te__warn(c->root->te,
                 "%s: %s has sharded parameters, which ranks cast alike: \"%.60s\"%s (te_module_set_keep_in_fp32) "
                 "keep%s buffers alone in f32; make %s strict for parameters",
                 who, c->root->name, first, n > 1 ? " and other words" : "", n > 1 ? "" : "s", n > 1 ? "them" : "it");
}
static te_result te__cast_to(te_module *m, te_dtype dtype, const te_cast_model_desc *desc, const char *who) {
    te__cast c = te__cast_of(m, dtype);
    te_result result;
    c.desc = desc;
    result = te__cast_run(&c, te__cast_visit);
    if (result == TE_OK) te__cast_warn(&c, who);
    return result;
}

static te_result te__want_floating(te_ctx *te, te_dtype dtype, const char *who, const char *field) {
    if (te__is_float(dtype)) return TE_OK;
    return te__fail(te, TE_ERR_DTYPE, "%s: %s is %s; f32, f16 and bf16 are possible", who, field, te_dtype_name(dtype));
}
TE_API te_result te_cast_model_to_dtype(te_module *m, const te_cast_model_desc *desc) {
    static const char who[] = "te_cast_model_to_dtype";
    const te_dtype dtype = desc && desc->dtype ? desc->dtype : TE_BF16;
    te_result result;
    if (!m) return TE_ERR_STATE;
    result = te__recast_may(m, who);
    if (result == TE_OK) result = te__want_floating(m->te, dtype, who, "dtype");
    if (result == TE_OK && desc && !te__words_ok(m, desc->skip_modules, desc->num_skip_modules, who))
        result = te_error_code(m->te);
    return result == TE_OK ? te__cast_to(m, dtype, desc, who) : result;
}

/* Adds the tensor of e to the list of casts if the path of its module m contains a keyword, or if the path of the
 * tensor itself does. A shared parameter has several paths, and only the first of them counts as the path of the
 * tensor. If buffers_alone is set, adds no parameters. */
static bool te__restore_visit(te__cast *c, const te_module *m, const te__entry *e) {
    char *end = c->path + c->module_path;
    const char after = *end;
    bool casts = te__is_first(&c->firsts, e) && te__word_matches(c->keywords, c->count, c->path);
    (void)m;
    if (c->buffers_alone && e->kind == TE_ENTRY_PARAMETER) return true;
    *end = 0;
    casts = casts || te__word_matches(c->keywords, c->count, c->path);
    *end = after;
    return !casts || te__recast_add(&c->list, e->tensor, TE_F32, 2);
}
static te_result te__restore_words(te_module *m, const char *const *keywords, int count, bool buffers_alone,
                                   const char *who) {
    te__cast c;
    te_result result;
    if (!m) return TE_ERR_STATE;
    result = te__recast_may(m, who);
    if (result == TE_OK && !te__words_ok(m, keywords, count, who)) result = te_error_code(m->te);
    if (result != TE_OK) return result;
    c = te__cast_of(m, TE_F32);
    c.keywords = keywords;
    c.count = count;
    c.buffers_alone = buffers_alone;
    return te__cast_run(&c, te__restore_visit);
}
TE_API te_result te_restore_fp32_modules(te_module *m, const char *const *keywords, int count) {
    return te__restore_words(m, keywords, count, false, "te_restore_fp32_modules");
}
TE_API te_result te_restore_fp32_buffers(te_module *m, const char *const *keywords, int count) {
    return te__restore_words(m, keywords, count, true, "te_restore_fp32_buffers");
}

/* ---- sampling in f32 ---- */

typedef struct te__scope_entry {
    te_tensor *x; /* retained */
    te_dtype dtype;
} te__scope_entry;
struct te_fp32_scope {
    te_ctx *te;
    te_module *m;
    te_dtype dtype; /* dtype of the whole model after the scope; TE_DTYPE_NONE: each tensor gets its own dtype back */
    te_dtype usual; /* tensors that were added inside the scope get this dtype after the scope */
    te__scope_entry *entry; /* sorted by tensor address */
    int num, cap;
    te__closable closable;
};

static void te__scope_free(te_fp32_scope *s) {
    te_ctx *te = s->te;
    int i;
    te__closable_remove(&s->closable);
    for (i = 0; i < s->num; i++) te_tensor_release(s->entry[i].x);
    te__free(te, s->entry);
    te__free(te, s);
}
static void te__scope_close(void *owner) { te__scope_free((te_fp32_scope *)owner); }
static bool te__scope_visit(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te_fp32_scope *s = (te_fp32_scope *)user;
    (void)m, (void)path, (void)kind;
    if (!te__is_floating(x)) return true;
    if (!te__grow(s->te, (void **)&s->entry, &s->cap, s->num, sizeof(te__scope_entry))) return false;
    s->entry[s->num].x = te_tensor_retain(x);
    s->entry[s->num++].dtype = x->dtype;
    return true;
}

/* Sets c->dtype to the dtype of the first floating parameter that need not stay in f32 (te__cast_keeps), and stops the
 * walk. */
static bool te__first_visit(te__cast *c, const te_module *m, const te__entry *e) {
    (void)m;
    if (e->kind != TE_ENTRY_PARAMETER || !te__is_first(&c->firsts, e) || !te__is_floating(e->tensor) ||
        te__cast_keeps(c, e))
        return true;
    c->dtype = e->tensor->dtype;
    return false;
}
static te_dtype te__first_dtype(te_module *m, bool any) {
    te__cast c = te__cast_of(m, TE_F32);
    if (any) c.words = c.strict = NULL;
    te__cast_walk(&c, te__first_visit);
    return c.dtype;
}

TE_API te_fp32_scope *te_fp32_scope_open(te_module *m, const te_fp32_scope_desc *desc) {
    static const char who[] = "te_fp32_scope_open";
    te_fp32_scope *s;
    te__cast c;
    te_result result;
    if (!m) return NULL;
    if (te__recast_may(m, who) != TE_OK ||
        (desc && desc->restore_dtype && te__want_floating(m->te, desc->restore_dtype, who, "restore_dtype") != TE_OK))
        return NULL;
    s = (te_fp32_scope *)te__alloc_zero(m->te, sizeof(*s));
    if (!s) return NULL;
    s->te = m->te;
    s->m = m;
    te__closable_add(m->te, &s->closable, "region of te_fp32_scope_open", te__scope_close, s);
    s->usual = te__first_dtype(m, false);
    if (desc)
        s->dtype = desc->restore_dtype             ? desc->restore_dtype
                   : desc->restore_first_parameter ? te__first_dtype(m, true)
                                                   : TE_DTYPE_NONE;
    te_module_visit_tensors(m, te__scope_visit, s);
    result = te_error_code(m->te);
    if (result == TE_OK) {
        if (s->num) qsort(s->entry, (size_t)s->num, sizeof(te__scope_entry), te__by_tensor);
        c = te__cast_of(m, TE_F32);
        result = te__cast_run(&c, te__cast_visit);
    }
    if (result == TE_OK) return s;
    te__scope_free(s);
    return NULL;
}

static bool te__scope_back(te__cast *c, const te_module *m, const te__entry *e) {
    te__scope_entry key, *before = NULL;
    (void)m;
    key.x = e->tensor;
    if (te__cast_keeps(c, e)) return te__recast_add(&c->list, e->tensor, TE_F32, 1);
    if (c->scope->num)
        before = (te__scope_entry *)bsearch(&key, c->scope->entry, (size_t)c->scope->num, sizeof(key), te__by_tensor);
    return te__recast_add(&c->list, e->tensor, before ? before->dtype : c->dtype, 0);
}
TE_API te_result te_fp32_scope_close(te_fp32_scope *scope) {
    static const char who[] = "te_fp32_scope_close";
    te_result before, result;
    te_ctx *te;
    char *error;
    if (!scope) return TE_OK;
    te = scope->te;
    before = te->error_code;
    error = te->error;
    te->error_code = TE_OK; /* an error from inside the region is set again below */
    te->error = NULL;
    result = te__recast_may(scope->m, who);
    if (result == TE_OK && scope->dtype) {
        result = te__cast_to(scope->m, scope->dtype, NULL, who);
    } else if (result == TE_OK) {
        te__cast c = te__cast_of(scope->m, scope->usual);
        c.scope = scope;
        result = te__cast_run(&c, te__scope_back);
        if (result == TE_OK) te__cast_warn(&c, who);
    }
    if (result == TE_OK) te__scope_free(scope);
    if (before == TE_OK) return result;
    free(te->error); /* te__fail has logged it */
    te->error = error;
    te->error_code = before;
    return result;
}
