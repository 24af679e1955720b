/* model/patches.c: registers, applies and undoes the patches of a context. This file must not depend on how an
 * optimizer uses the methods that a patch replaces (te_fused_adam_methods). */

typedef struct te__patch {
    te_patch patch; /* its strings are copies, owned by the list */
    te_patch_state state;
    char why[sizeof(((te_patch_info *)NULL)->why)];
} te__patch;
struct te__patches {
    te__patch *list;
    int num, cap;
    bool looked; /* the last te_apply_patches reached the end of the list */
    char version[32]; /* the version set by te_set_library_version; "" means TE_TRANSFORMER_ENGINE_VERSION */
    te_fused_adam_methods replaced; /* the methods that te.h's own patch has replaced */
};

/* ---- versions ---- */

enum { TE__VERSION_PARTS = 6 };
typedef struct te__version {
    long number[TE__VERSION_PARTS]; /* release numbers; missing ones are 0 */
    int phase; /* dev -4, a -3, b -2, rc -1, release 0, post 1 */
    long phase_number;
    bool dev; /* a .dev version, which is older than the phase itself */
} te__version;

/* Reads a version suffix at s: an optional separator, a word of PEP 440, an optional number. Returns the end of the
 * suffix, or NULL. */
static const char *te__version_suffix(const char *s, int *phase, long *number) {
    static const struct {
        const char *word;
        int phase;
    } words[] = {{"dev", -4},     {"alpha", -3}, {"a", -3},  {"beta", -2}, {"b", -2},
                 {"preview", -1}, {"pre", -1},   {"rc", -1}, {"c", -1},    {"post", 1}};
    char *end;
    size_t i;
    if (*s == '.' || *s == '-' || *s == '_') s++;
    for (i = 0; i < sizeof(words) / sizeof(words[0]) && !te__starts_with(s, words[i].word); i++) {}
    if (i == sizeof(words) / sizeof(words[0])) return NULL;
    s += strlen(words[i].word);
    *phase = words[i].phase;
    *number = strtol(s, &end, 10);
    return end;
}
/* Parses a version such as "2.12", "2.12.0rc1" or "2.12.0.dev0+1234abc". Ignores the part that begins with +. */
static bool te__version_read(const char *s, te__version *v) {
    int n = 0, phase;
    long number;
    memset(v, 0, sizeof(*v));
    do {
        char *end;
        if (*s < '0' || *s > '9') return false;
        number = strtol(s, &end, 10);
        if (n < TE__VERSION_PARTS) v->number[n++] = number;
        s = end;
    } while (*s == '.' && s[1] >= '0' && s[1] <= '9' && s++);
    if (*s && *s != '+' && (s = te__version_suffix(s, &v->phase, &v->phase_number)) == NULL) return false;
    if (*s && *s != '+') {
        s = te__version_suffix(s, &phase, &number);
        if (!s || phase != -4) return false;
        v->dev = true;
    }
    return *s == 0 || *s == '+';
}
static bool te__version_before(const te__version *a, const te__version *b) {
    int i;
    for (i = 0; i < TE__VERSION_PARTS; i++)
        if (a->number[i] != b->number[i]) return a->number[i] < b->number[i];
    if (a->phase != b->phase) return a->phase < b->phase;
    if (a->phase_number != b->phase_number) return a->phase_number < b->phase_number;
    return a->dev && !b->dev;
}

/* ---- te.h's own patch ---- */

static bool te__adam_patch_needed(te_ctx *te, void *user) {
    const int all = TE_STATE_DEQUANTIZES | TE_STATE_ZEROS_LIKE | TE_STATE_EMPTY_LIKE;
    (void)user;
    return (te_fused_adam_get_methods(te).capabilities & all) != all;
}
static te_result te__adam_patch_apply(te_ctx *te, void *user) {
    (void)user;
    te__automodel_of(te)->patches->replaced = te_fused_adam_get_methods(te);
    return te_fused_adam_set_methods(te, NULL);
}
static te_result te__adam_patch_undo(te_ctx *te, void *user) {
    (void)user;
    return te_fused_adam_set_methods(te, &te__automodel_of(te)->patches->replaced);
}

/* ---- the list ---- */

static te_result te__patches_add(te_ctx *te, struct te__patches *all, const te_patch *patch) {
    te__patch *p;
    if (!te__grow(te, (void **)&all->list, &all->cap, all->num, sizeof(te__patch))) return te_error_code(te);
    p = &all->list[all->num];
    memset(p, 0, sizeof(*p));
    p->patch = *patch;
    p->patch.name = te__copy_string(te, patch->name);
    p->patch.fixed_in = patch->fixed_in ? te__copy_string(te, patch->fixed_in) : NULL;
    if (!p->patch.name || (patch->fixed_in && !p->patch.fixed_in)) {
        te__free(te, (char *)p->patch.name);
        te__free(te, (char *)p->patch.fixed_in);
        return te_error_code(te);
    }
    snprintf(p->why, sizeof(p->why), "te_apply_patches has not looked at it");
    all->num++;
    all->looked = false;
    return TE_OK;
}
/* Returns the context's patches, or NULL if there is no memory. The first call adds te.h's own patch. */
static struct te__patches *te__patches_of(te_ctx *te) {
    te_patch own = TE_ZERO;
    struct te__patches *all;
    if (te__automodel_of(te)->patches) return te__automodel_of(te)->patches;
    all = (struct te__patches *)te__alloc_zero(te, sizeof(*all));
    if (!all) return NULL;
    own.name = "fused_adam_quantized_tensor";
    own.fixed_in = "2.12";
    own.needed = te__adam_patch_needed;
    own.apply = te__adam_patch_apply;
    own.undo = te__adam_patch_undo;
    if (te__patches_add(te, all, &own) != TE_OK) {
        te__free(te, all->list);
        te__free(te, all);
        return NULL;
    }
    return te__automodel_of(te)->patches = all;
}

TE_API te_result te_register_patch(te_ctx *te, const te_patch *patch) {
    struct te__patches *all;
    te__version v;
    int i;
    if (!te) return TE_ERR_STATE;
    if (!patch || !patch->name || !patch->name[0] || !patch->apply || !patch->undo)
        return te__fail(te, TE_ERR_INVALID,
                        "te_register_patch: %s%.60s%s; a patch needs a name and the functions apply and undo",
                        !patch ? "the patch is NULL" : "patch \"", patch && patch->name ? patch->name : "",
                        !patch          ? ""
                        : !patch->apply ? "\" without apply"
                        : !patch->undo  ? "\" without undo"
                                        : "\"");
    if (patch->fixed_in && !te__version_read(patch->fixed_in, &v))
        return te__fail(te, TE_ERR_INVALID,
                        "te_register_patch: patch \"%.60s\": fixed_in \"%.40s\" is no version; one like \"2.12\" or "
                        "\"2.12.0rc1\" is needed, or NULL for all",
                        patch->name, patch->fixed_in);
    all = te__patches_of(te);
    for (i = 0; all && i < all->num; i++)
        if (strcmp(all->list[i].patch.name, patch->name) == 0)
            return te__fail(te, TE_ERR_INVALID,
                            "te_register_patch: patch %d is named \"%.60s\" already; choose another name", i,
                            patch->name);
    return all ? te__patches_add(te, all, patch) : te_error_code(te);
}

static const char *te__patched_version(const struct te__patches *all) {
    return all->version[0] ? all->version : TE_TRANSFORMER_ENGINE_VERSION;
}
TE_API te_result te_set_library_version(te_ctx *te, const char *version) {
    struct te__patches *all;
    te__version v;
    if (!te) return TE_ERR_STATE;
    if (version && !version[0]) version = "0.0.0";
    if (version && (strlen(version) >= sizeof(all->version) || !te__version_read(version, &v)))
        return te__fail(
            te, TE_ERR_INVALID,
            "te_set_library_version: \"%.40s\" is no version; one like \"2.12\" or \"2.12.0.dev0\" is needed", version);
    all = te__patches_of(te);
    if (!all) return te_error_code(te);
    snprintf(all->version, sizeof(all->version), "%s", version ? version : "");
    return TE_OK;
}

/* Returns true if patch i is not needed, and writes the reason to `why`. Each function of the patch may register
 * patches, which may move the list. So the list is looked up again after each call. */
static bool te__patch_skipped(te_ctx *te, int i) {
    const te_patch patch = te__automodel_of(te)->patches->list[i].patch;
    const char *now = te__patched_version(te__automodel_of(te)->patches);
    const size_t room = sizeof(te__automodel_of(te)->patches->list[i].why);
    te__version have, fixed;
    const bool gated = patch.fixed_in && te__version_read(now, &have) && te__version_read(patch.fixed_in, &fixed) &&
                       !te__version_before(&have, &fixed);
    if (gated)
        snprintf(te__automodel_of(te)->patches->list[i].why, room, "version %s is not older than %.40s, which has it",
                 now, patch.fixed_in);
    else if (patch.found && !patch.found(te, patch.user))
        snprintf(te__automodel_of(te)->patches->list[i].why, room, "there is nothing to patch");
    else if (patch.needed && !patch.needed(te, patch.user))
        snprintf(te__automodel_of(te)->patches->list[i].why, room,
                 "the function that it would replace has all that it brings");
    else return false;
    return true;
}
TE_API te_result te_apply_patches(te_ctx *te) {
    struct te__patches *all;
    te_result result = TE_OK;
    int i;
    if (te_error_code(te) != TE_OK) return te_error_code(te);
    if (te->capture) return te__refuse_capture(te, "te_apply_patches", "apply them before te_graph_begin");
    all = te__patches_of(te);
    if (!all) return te_error_code(te);
    for (i = 0; i < all->num; i++) {
        bool skipped;
        te__patch *p;
        if (all->list[i].state != TE_PATCH_WAITING) continue;
        skipped = te__patch_skipped(te, i);
        p = &all->list[i];
        if (skipped) {
            p->state = TE_PATCH_SKIPPED;
            te__log(te, TE_LOG_DEBUG, "patch \"%s\" is skipped: %s", p->patch.name, p->why);
            continue;
        }
        result = te__returned(te, p->patch.apply(te, p->patch.user), "te_apply_patches: apply", p->patch.name);
        p = &all->list[i];
        if (result == TE_OK) result = te->error_code;
        /* te__fail keeps the first error, so this message shows only if the patch's function `apply` recorded none */
        if (result != TE_OK)
            return te__fail(te, result, "te_apply_patches: patch \"%s\": its apply returned %s", p->patch.name,
                            te_result_name(result));
        p->state = TE_PATCH_APPLIED;
        snprintf(p->why, sizeof(p->why), "applied to version %s", te__patched_version(all));
        te__log(te, TE_LOG_INFO, "patch \"%s\" is applied to version %s", p->patch.name, te__patched_version(all));
    }
    all->looked = true;
    return TE_OK;
}
TE_API te_result te_unapply_patches(te_ctx *te) {
    struct te__patches *all = te ? te__automodel_of(te)->patches : NULL;
    te_result result = TE_OK;
    int i;
    if (te_error_code(te) != TE_OK) return te_error_code(te);
    if (te->capture) return te__refuse_capture(te, "te_unapply_patches", "undo them before te_graph_begin");
    for (i = all ? all->num - 1 : -1; i >= 0; i--) {
        te__patch *p = &all->list[i];
        all->looked = false;
        if (p->state == TE_PATCH_APPLIED)
            result = te__returned(te, p->patch.undo(te, p->patch.user), "te_unapply_patches: undo", p->patch.name);
        if (result == TE_OK) result = te->error_code;
        if (result != TE_OK)
            return te__fail(te, result, "te_unapply_patches: patch \"%s\": its undo returned %s",
                            all->list[i].patch.name, te_result_name(result));
        all->list[i].state = TE_PATCH_WAITING;
        snprintf(all->list[i].why, sizeof(all->list[i].why), "te_unapply_patches has undone it");
    }
    return TE_OK;
}
TE_API bool te_patches_applied(const te_ctx *te) {
    return te && te__automodel_of(te)->patches && te__automodel_of(te)->patches->looked;
}
TE_API int te_num_patches(te_ctx *te) {
    const struct te__patches *all = te ? te__patches_of(te) : NULL;
    return all ? all->num : 0;
}
TE_API te_patch_info te_patch_at(te_ctx *te, int index) {
    te_patch_info info = TE_ZERO;
    const struct te__patches *all = te ? te__patches_of(te) : NULL;
    if (!all || index < 0 || index >= all->num) return info;
    info.name = all->list[index].patch.name;
    info.state = all->list[index].state;
    memcpy(info.why, all->list[index].why, sizeof(info.why));
    return info;
}

static void te__patches_report(te_ctx *te, te__report_text *t) {
    int i;
    for (i = 0; te__automodel_of(te)->patches && i < te_num_patches(te); i++) {
        const te_patch_info p = te_patch_at(te, i);
        te__say(t, "patch %s: %s%s\n", p.name,
                p.state == TE_PATCH_APPLIED   ? ""
                : p.state == TE_PATCH_SKIPPED ? "skipped: "
                                          : "waiting: ",
                p.why);
    }
}
static const te__room te__automodel_room = {&te__automodel_slot, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                                            NULL, NULL, te__patches_report};
