/* Formats of random trees whose modules share parameters, against the functions of Automodel written down again as they run there: over names, sets of names, and whole modules. */
#include "../te_test.h"

static te_result pass_on(te_module *self, te_forward_args *args) {
    (void)self;
    args->outputs.out = args->input;
    return TE_OK;
}
static const te_module_class node_class = {"Node", 0, pass_on, NULL, NULL};

enum { NODES = 9, PLACES = 40 };
/* The modules of a tree, parents before children as a walk meets them, and the places of their parameters in the same order. */
typedef struct node {
    int parent;
    char name[16], path[128];
} node;
typedef struct place {
    int owner, tensor;
    bool buffer;
    char path[160];
} place;
typedef struct tree {
    uint64_t seed, draws;
    node node[NODES];
    place place[PLACES];
    te_tensor *tensor[PLACES];
    te_dtype dtype[PLACES]; /* by tensor: what it must have */
    bool trains[PLACES], sharded[PLACES];
    int ndim[PLACES], nodes, places, tensors;
    te_module *root;
} tree;

static int draw(tree *t, int below) { return (int)*test_integers(1, t->seed * 4096 + t->draws++, 0, below); }
static void close_module(void *m) { te_module_destroy((te_module *)m); }

/* `like`: a tree whose modules and names it has, with ties of its own; or NULL. */
static void grow(tree *t, te_ctx *te, uint64_t seed, const tree *like) {
    static const char *const modules[] = {"norm", "proj", "skip", "head", "layer"}, *const tensors[] = {"weight", "norm_scale", "fn", "bias"};
    static const te_dtype dtypes[] = {TE_F32, TE_F16, TE_BF16};
    te_module *m[NODES];
    memset(t, 0, sizeof *t);
    t->seed = seed;
    t->nodes = like ? like->nodes : 3 + draw(t, NODES - 2);
    for (int i = 0; i < t->nodes; i++) {
        node *n = &t->node[i];
        n->parent = i - 1;
        while (i > 1 && n->parent > 0 && draw(t, 2)) n->parent = t->node[n->parent].parent; /* the one before it, or one above that */
        const char *name = modules[draw(t, COUNT(modules))];
        snprintf(n->name, sizeof n->name, "%s", name);
        for (int k = 1; k < i; k++) /* a child of that name is there already */
            if (t->node[k].parent == n->parent && strcmp(t->node[k].name, n->name) == 0) snprintf(n->name, sizeof n->name, "%s%d", name, i);
        if (like) *n = like->node[i];
        m[i] = te_module_create(te, &node_class, i ? n->name : "model");
        char path[sizeof n->path] = "";
        if (n->parent > 0) snprintf(path, sizeof path, "%.98s.", t->node[n->parent].path);
        if (i) strcat(path, n->name);
        memcpy(n->path, path, sizeof path);
        if (i) te_module_add_child(m[n->parent], n->name, m[i]);
    }
    t->root = m[0];
    test_on_end(close_module, t->root);
    for (int i = 0; i < t->nodes; i++)
        for (int k = 0; k < COUNT(tensors); k++) {
            if (t->places == PLACES || (!like && draw(t, 3) == 0)) continue;
            if (like && (t->places == like->places || like->place[t->places].owner != i || !strstr(like->place[t->places].path, tensors[k]))) continue;
            place *p = &t->place[t->places++];
            p->owner = i;
            p->buffer = like ? like->place[t->places - 1].buffer : draw(t, 6) == 0;
            char path[sizeof p->path];
            snprintf(path, sizeof path, "%s%s%s", t->node[i].path, i ? "." : "", tensors[k]);
            memcpy(p->path, path, sizeof path);
            p->tensor = t->tensors;
            if (!p->buffer && t->places > 1 && draw(t, 5) < 2) { /* one that another place has, or this module under another name */
                const place *other = &t->place[draw(t, t->places - 1)];
                if (!other->buffer) p->tensor = other->tensor;
            }
            const int x = p->tensor;
            if (x == t->tensors) {
                t->tensors++;
                t->ndim[x] = like ? 2 : 1 + draw(t, 2);
                t->dtype[x] = dtypes[draw(t, 3)];
                t->tensor[x] = te_tensor_full(te, t->dtype[x], t->ndim[x], (const int64_t[]){2, 2}, 1.0f + (float)x);
                t->trains[x] = draw(t, 2);
            }
            if (p->buffer) te_module_add_buffer(m[i], tensors[k], t->tensor[x]);
            else te_module_add_parameter(m[i], tensors[k], t->tensor[x]);
        }
    for (int i = 0; i < t->places; i++)
        if (!t->place[i].buffer) te_tensor_set_requires_grad(t->tensor[t->place[i].tensor], t->trains[t->place[i].tensor]);
}
static bool formats_are(tree *t) {
    for (int i = 0; i < t->places; i++)
        if (te_tensor_dtype(t->tensor[t->place[i].tensor]) != t->dtype[t->place[i].tensor]) {
            test_case("seed %llu: %s is %s, not %s", (unsigned long long)t->seed, t->place[i].path, te_dtype_name(te_tensor_dtype(t->tensor[t->place[i].tensor])), te_dtype_name(t->dtype[t->place[i].tensor]));
            return false;
        }
    return true;
}

/* ---- Automodel's functions ---- */

typedef struct words {
    const char *word[4];
    int n;
} words;
static words words_of(tree *t) {
    static const char *const all[] = {"norm", "fn", "head.weight", "proj", "layer", "bias", "skip"};
    words w = {.n = draw(t, 3)};
    for (int i = 0; i < w.n; i++) w.word[i] = all[draw(t, COUNT(all))];
    return w;
}
static bool names(const words *w, const char *path) {
    for (int i = 0; i < w->n; i++)
        if (strstr(path, w->word[i])) return true;
    return false;
}
/* named_parameters: each parameter under its first name alone. */
static bool is_named(const tree *t, int place) {
    for (int i = 0; i < place; i++)
        if (t->place[i].tensor == t->place[place].tensor) return false;
    return true;
}
static bool is_sharded(const tree *t) {
    for (int i = 0; i < t->places; i++)
        if (!t->place[i].buffer && t->sharded[t->place[i].tensor]) return true;
    return false;
}
/* A snapshot of what the words name; all modules but the skipped ones are cast; the snapshot comes back. */
static void cast_model(tree *t, te_dtype dtype, const words *keep, const words *strict, const words *skip) {
    bool kept[PLACES] = {false};
    for (int i = 0; i < t->places; i++) {
        const place *p = &t->place[i];
        if (is_named(t, i) && (names(strict, p->path) || (names(keep, p->path) && (p->buffer || !is_sharded(t))))) kept[p->tensor] = true;
    }
    for (int i = 0; i < t->places; i++) {
        bool detached = false;
        for (int n = t->place[i].owner; n > 0; n = t->node[n].parent)
            for (int k = 0; k < skip->n; k++) detached |= strcmp(t->node[n].name, skip->word[k]) == 0;
        if (!detached) t->dtype[t->place[i].tensor] = dtype;
    }
    for (int i = 0; i < t->tensors; i++)
        if (kept[i]) t->dtype[i] = TE_F32;
}
/* Owners of frozen parameters, and the modules above parameters, as sets of names. */
static void cast_frozen(tree *t, te_dtype dtype, const words *keep, bool any_base) {
    bool parameters[NODES] = {false}, trainable[NODES] = {false}, owners[NODES] = {false};
    for (int i = 0; i < t->places; i++) {
        const place *p = &t->place[i];
        if (p->buffer || !is_named(t, i)) continue;
        for (int n = p->owner; n >= 0; n = t->node[n].parent) parameters[n] = true, trainable[n] |= t->trains[p->tensor];
        if (!t->trains[p->tensor] && !names(keep, p->path) && !t->sharded[p->tensor] && (any_base || t->ndim[p->tensor] > 1)) owners[p->owner] = true;
    }
    for (int i = 0; i < t->places; i++) {
        const place *p = &t->place[i];
        bool mixed = false, frozen = false;
        for (int n = p->owner; n >= 0; n = t->node[n].parent) mixed |= owners[n] && trainable[n], frozen |= parameters[n] && !trainable[n];
        if (!is_named(t, i) || names(keep, p->path)) continue;
        if (p->buffer ? mixed || frozen : (mixed || !t->trains[p->tensor]) && !t->sharded[p->tensor]) t->dtype[p->tensor] = dtype;
    }
}
/* Modules that a word names, whole; then parameters that one names. */
static void restore_modules(tree *t, const words *w) {
    for (int n = 0; n < t->nodes; n++)
        for (int i = 0; i < t->places && names(w, t->node[n].path); i++)
            for (int above = t->place[i].owner; above >= 0; above = t->node[above].parent)
                if (above == n) t->dtype[t->place[i].tensor] = TE_F32;
    for (int i = 0; i < t->places; i++)
        if (is_named(t, i) && names(w, t->place[i].path)) t->dtype[t->place[i].tensor] = TE_F32;
}

/* ---- tests ---- */

static void keep_in(tree *t, const words *keep, const words *strict) {
    te_module_set_keep_in_fp32(t->root, keep->word, keep->n, false);
    te_module_set_keep_in_fp32(t->root, strict->word, strict->n, true);
}
TE_TEST(formats_of_shared_parameters) {
    te_ctx *te = test_context("cpu");
    int ties = 0;
    for (uint64_t seed = 1; seed <= 600; seed++) {
        static const te_dtype dtypes[] = {TE_F32, TE_F16, TE_BF16};
        tree t;
        te_scope_begin(te);
        grow(&t, te, seed, NULL);
        ties += t.tensors < t.places;
        if (draw(&t, 3) == 0)
            for (int i = 0; i < t.places; i++)
                if (!t.place[i].buffer && draw(&t, 4) == 0) te_tensor_set_sharded(t.tensor[t.place[i].tensor], t.sharded[t.place[i].tensor] = true);
        const words none = {.n = 0}, keep = words_of(&t), strict = words_of(&t), some = words_of(&t), skip = {.word = {"skip", "norm"}, .n = draw(&t, 3)};
        const te_dtype dtype = dtypes[draw(&t, 3)];
        const bool any = draw(&t, 2);
        keep_in(&t, &keep, &strict);
        CHECK(te_cast_model_to_dtype(t.root, &(te_cast_model_desc){.dtype = dtype, .skip_modules = skip.word, .num_skip_modules = skip.n}) == TE_OK);
        cast_model(&t, dtype, &keep, &strict, &skip);
        REQUIRE(formats_are(&t));

        keep_in(&t, &none, &keep);
        CHECK(te_cast_frozen_modules_to_compute_dtype(t.root, &(te_cast_frozen_desc){.compute_dtype = TE_F16, .any_frozen_base = any}) == TE_OK);
        cast_frozen(&t, TE_F16, &keep, any);
        REQUIRE(formats_are(&t));

        CHECK(te_restore_fp32_modules(t.root, some.word, some.n) == TE_OK);
        restore_modules(&t, &some);
        REQUIRE(formats_are(&t));

        te_dtype usual = TE_F32; /* of the first parameter that is not kept: what comes during a region gets it */
        for (int i = t.places; i-- > 0;)
            if (!t.place[i].buffer && is_named(&t, i) && !names(&keep, t.place[i].path)) usual = t.dtype[t.place[i].tensor];
        te_fp32_scope *scope = te_fp32_scope_open(t.root, NULL);
        te_tensor *late = te_module_add_parameter(t.root, "late", te_tensor_full(te, TE_F32, SHAPE(1), 1));
        CHECK(te_fp32_scope_close(scope) == TE_OK && te_tensor_dtype(late) == usual);
        for (int i = 0; i < t.places; i++)
            if (is_named(&t, i) && names(&keep, t.place[i].path)) t.dtype[t.place[i].tensor] = TE_F32;
        REQUIRE(formats_are(&t));
        CHECK_OK(te);
        te_scope_end(te);
    }
    CHECK(ties > 400);
}
/* Copies of one model's parameters in another that shares others: those that go by the same name in both. */
TE_TEST(formats_snapshots_of_shared_parameters) {
    te_ctx *te = test_context("cpu");
    int left = 0;
    for (uint64_t seed = 1; seed <= 200; seed++) {
        tree from, to;
        float value[PLACES];
        int n = 0, k;
        te_scope_begin(te);
        tree pattern;
        grow(&pattern, te, seed, NULL);
        grow(&from, te, seed + 1000, &pattern), grow(&to, te, seed + 2000, &pattern);
        REQUIRE(from.places == pattern.places && to.places == pattern.places);
        words w = words_of(&to);
        if (seed % 2) w = (words){.word = {""}, .n = 1};
        te_fp32_snapshots *s = te_snapshot_fp32_tensors(from.root, w.word, w.n, w.word, w.n);
        for (int i = 0; i < from.tensors; i++) te_tensor_fill(from.tensor[i], -1);
        for (int i = 0; i < to.tensors; i++) value[i] = 1.0f + (float)i;
        for (int i = 0; i < from.places; i++) {
            const place *p = &from.place[i];
            const char *path = NULL;
            if (!is_named(&from, i) || !names(&w, p->path)) continue;
            for (k = 0; k < te_fp32_snapshots_count(s) && (!te_fp32_snapshots_at(s, k, &path, NULL) || strcmp(path, p->path) != 0); k++) {}
            CHECK_MSG(k < te_fp32_snapshots_count(s), "seed %llu: %s", (unsigned long long)seed, p->path);
            n++;
            left += !is_named(&to, i);
            if (is_named(&to, i)) to.dtype[to.place[i].tensor] = TE_F32, value[to.place[i].tensor] = 1.0f + (float)p->tensor;
        }
        CHECK_EQ_INT(te_fp32_snapshots_count(s), n);
        CHECK(te_restore_fp32_tensor_snapshots(to.root, s, s) == TE_OK);
        REQUIRE(formats_are(&to));
        for (int i = 0; i < to.tensors; i++) CHECK_MSG(test_read(to.tensor[i])[0] == value[i], "seed %llu: tensor %d is %g, not %g", (unsigned long long)seed, i, (double)test_read(to.tensor[i])[0], (double)value[i]);
        te_fp32_snapshots_destroy(s);
        CHECK_OK(te);
        te_scope_end(te);
    }
    CHECK(left > 50);
}
