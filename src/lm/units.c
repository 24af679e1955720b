/* lm/units.c: opens the weights of a model folder unit by unit, for ranks that each keep a slice of every parameter,
 * and writes those of any model. No rank holds more than its slices and one unit. This file must not depend on what a
 * model computes.
 *
 * Opening: a rank reads its slices from the files. Weights that are stored quantized, whose columns tensor-parallel
 * ranks divide, or that the files have transposed, are needed whole: each rank reads a part of the bytes, and the ranks
 * gather them.
 *
 * Writing: ranks with slices share the files' tensors. Each writes one file, in the order in which units are gathered;
 * all write at once. The files have names that no file of the folder has, and the index comes last. So whenever a save
 * ends, the index names the whole set of before, or the whole new one. Without slices, the first rank writes one file.
 * Parts of parameters, and experts, are gathered for one tensor of the files at a time. */

/* ---- reading ---- */

/* Fills *g with the group of parameter `name` of m, wherever in the group the parameter stands. Returns its place. */
static int te__hf_group_of(const te__lm_rule *names, te_module *m, const char *name, te__lm_group *g) {
    char first[TE__LM_NAME];
    const int place = te__lm_group_of(names, m, name, g);
    if (place > 0 && te__lm_member(g, TE__LM_MODEL, 0, first)) te__lm_group_of(names, m, first, g);
    return place;
}
/* Reads a tensor of the files. Each rank of the group reads a part of it. */
static te_tensor *te__hf_read_shared(te__hf_folder *f, te_group *group, const char *name) {
    const int64_t size = te__group_size(group), rank = te__group_rank(group);
    int shard;
    const te_safetensors_entry *e = te__hf_find(f, name, &shard);
    const int64_t bytes = (int64_t)e->bytes, chunk = te__round_up(te__div_up(bytes, size), 16),
                  first = te__min(bytes, rank * chunk), last = te__min(bytes, first + chunk);
    te_tensor *own, *all;
    if (size == 1) return te_safetensors_read(f->shards[shard].file, name);
    own = te__empty_1d(f->te, TE_U8, chunk);
    all = own ? te__empty_1d(f->te, TE_U8, size * chunk) : NULL;
    if (!all) return NULL;
    te__touch(own);
    if (te__st_load_part(f->shards[shard].file, (const te__st_entry *)(const void *)e, (uint64_t)first, own, 0,
                         (uint64_t)(last - first)) != TE_OK ||
        te__all_gather(group, own, all) != TE_OK)
        return NULL;
    return te__alias_as(all, 0, e->dtype, e->ndim, e->shape);
}

typedef struct te__hf_unit {
    te__hf_folder *f;
    te_module *module;
    te_group *group;
    bool slices; /* parameters are sharded */
} te__hf_unit;
/* Returns whether a parameter can be read by slices. */
static bool te__hf_by_slices(const te__hf_unit *u, const te__lm_group *g) {
    return u->slices && te__hf_by_rows(g, u->f->model);
}
/* Returns whether m belongs to the unit of u->module, which is made already, or is about to be made: after the units
 * below it. */
static bool te__hf_in_unit(const te__hf_unit *u, const te_module *m) {
    for (; m && m != u->module; m = m->parent)
        if (te_module_attribute(m, "te.unit", NULL)) return false;
    return m != NULL;
}
/* A visitor: reads the groups of the unit that are needed whole. */
static bool te__hf_load_whole(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    const te__hf_unit *u = (const te__hf_unit *)user;
    te_ctx *te = m->te;
    te_tensor **parts;
    te__lm_group g;
    char name[TE__LM_NAME];
    bool fine;
    int i, n;
    if (kind != TE_ENTRY_PARAMETER || !te__hf_in_unit(u, m) ||
        te__lm_group_of(u->f->names, u->f->model, path, &g) > 0 || te__hf_by_slices(u, &g))
        return true;
    if (te__has_rows(x) && te__hf_by_rows(&g, u->f->model)) return te__hf_load_rows(u->f, &g) == TE_OK;
    n = g.count[TE__LM_FILE];
    parts = (te_tensor **)te__alloc_zero(te, (size_t)n * sizeof(te_tensor *));
    fine = parts != NULL;
    te__frame_begin(te);
    for (i = 0; i < n && fine; i++) {
        te__lm_member(&g, TE__LM_FILE, i, name);
        parts[i] = te__hf_read_shared(u->f, u->group, name);
        fine = parts[i] != NULL;
    }
    if (fine) fine = te__lm_take_in(&g, u->f->model, parts) == TE_OK;
    te__frame_end(te, NULL, 0);
    te__free(te, parts);
    return fine;
}
/* A visitor: reads this rank's slices of the other parameters of the unit. */
static bool te__hf_load_slice(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    const te__hf_unit *u = (const te__hf_unit *)user;
    te__shard *s = x->shard;
    te_ctx *te = m->te;
    te__lm_group g;
    te_tensor *to;
    bool fine;
    int place;
    if (kind != TE_ENTRY_PARAMETER || !s || !te__hf_in_unit(u, m)) return true;
    place = te__hf_group_of(u->f->names, u->f->model, path, &g);
    if (!te__hf_by_slices(u, &g) || s->length == 0) return true;
    te__frame_begin(te);
    to = te__shard_value(s);
    fine = to && te__hf_read_range(u->f, &g, te__hf_first_element(&g, u->f->model, place) + s->start, to) == TE_OK;
    te__frame_end(te, NULL, 0);
    s->version++;
    s->written_at = ++te->writes;
    return fine;
}
/* Gives the modules of a unit memory, except those of units below it. */
static te_result te__hf_reset_unit(te_module *m) {
    te_result result = te__reset_own(m);
    int i;
    for (i = 0; i < m->num_children && result == TE_OK; i++)
        if (!te_module_attribute(m->children[i], "te.unit", NULL)) result = te__hf_reset_unit(m->children[i]);
    return result;
}

#ifndef TE_NO_DIST
static bool te__hf_load_unit(te__hf_folder *f, te_module *m, const te_data_parallel_desc *desc) {
    te__hf_unit u;
    u.f = f;
    u.module = m;
    u.group = desc->group;
    u.slices = desc->shard == TE_SHARD_PARAMETERS;
    return te__reset_by(m, te__hf_reset_unit, "te_hf_open") == TE_OK &&
           te_module_visit_tensors(f->model, te__hf_load_whole, &u) && te_fsdp_unit(m, desc) == TE_OK &&
           (!u.slices || te_module_visit_tensors(f->model, te__hf_load_slice, &u));
}
/* A visitor: finds the module of experts. */
static bool te__hf_meet_experts(void *user, te_module *m) {
    te_module **found = (te_module **)user;
    if (strcmp(m->cls->name, "LinearExperts") != 0) return true;
    *found = m;
    return false;
}
/* Makes a unit of each layer, and one of the rest, and reads their weights. Experts, which fewer ranks have, are units
 * of their own; their gradients are divided as the others. */
static bool te__hf_load_units(te__hf_folder *f, const te_data_parallel_desc *desc, const te_dist *dist) {
    te_module *layers = te_module_find(f->model, "model.layers");
    bool fine = te__group_allowed(f->te, desc->group, "te_hf_open", "units->group") == TE_OK;
    te_data_parallel_desc of_experts = *desc;
    int i;
    if (dist && dist->expert) of_experts.group = dist->expert_data;
    if (desc->gradient_divide_factor == 0.0f) of_experts.gradient_divide_factor = (float)te__group_size(desc->group);
    for (i = 0; i < te_module_num_children(layers) && fine; i++) {
        te_module *layer = te_module_child(layers, i), *experts = NULL;
        if (dist && dist->expert) te_module_visit(layer, te__hf_meet_experts, &experts);
        fine = (!experts || te__hf_load_unit(f, experts, &of_experts)) && te__hf_load_unit(f, layer, desc);
    }
    return fine && te__hf_load_unit(f, f->model, desc);
}
/* Returns whether all ranks have opened the folder: those of dist, or else those of the units. */
static bool te__hf_units_agree(te__hf_folder *f, const te_hf_desc *desc, bool fine) {
    te_group *world = desc->dist ? desc->dist->world : NULL;
    return te__ckpt_agree(world ? world : desc->units->group, f->te, fine ? TE_OK : te_error_code(f->te)) == TE_OK;
}
/* Tells the ranks that open the folder in units that this rank cannot. `again`: for an error from before. */
static void te__hf_units_fail(te_ctx *te, const te_hf_desc *desc, bool again) {
    te_group *groups[3] = {NULL, NULL, NULL};
    int i;
    if (!desc || !desc->units) return;
    groups[0] = desc->units->group;
    if (desc->dist) {
        groups[1] = desc->dist->expert_data;
        groups[2] = desc->dist->world;
    }
    for (i = 0; i < 3; i++) {
        if (!groups[i] || groups[i]->te != te) continue;
        if (again) te__group_tells_again(groups[i]);
        te__refuse(groups[i], TE__BETWEEN, te_error_code(te));
    }
}
/* Tells the ranks of all groups that the model uses that this rank cannot save it. */
static void te__hf_tell(te_module *model, te_result code) { te__tell_model(model->te, model, code); }
#else
static void te__hf_tell(te_module *model, te_result code) { (void)model, (void)code; }
static bool te__hf_load_units(te__hf_folder *f, const struct te_data_parallel_desc *desc, const struct te_dist *dist) {
    (void)desc, (void)dist, (void)te__hf_load_whole, (void)te__hf_load_slice, (void)te__hf_reset_unit;
    return te__not_ok(f->te, TE_ERR_UNSUPPORTED,
                      "te_hf_open: units are given, and te.h was compiled with TE_NO_DIST; compile it without");
}
static bool te__hf_units_agree(te__hf_folder *f, const te_hf_desc *desc, bool fine) {
    (void)f, (void)desc;
    return fine;
}
static void te__hf_units_fail(te_ctx *te, const te_hf_desc *desc, bool again) {
    (void)te, (void)desc, (void)again;
}
#endif

/* ---- writing ---- */

static const te_metadata te__hf_format[1] = {{"format", "pt"}}; /* transformers refuses a file without this entry */

/* The files of a set are model-00001-of-00004.safetensors and so on (form 0), or, beside files of another set that an
 * index may name, model.F-00001-of-00004.safetensors. The index chooses between the sets. */
enum { TE__HF_FORMS = 64 };
/* Returns whether a file name is one of a set. Writes its form, and the number of files of the set. */
static bool te__hf_is_of_set(const char *name, int *form, int *size) {
    static const char rest[] = "-#####-of-#####.safetensors";
    int i;
    if (!te__starts_with(name, "model")) return false;
    name += strlen("model");
    *form = *size = 0;
    if (name[0] == '.' && name[1] >= '1' && name[1] <= '9')
        for (name++; *name >= '0' && *name <= '9' && *form < TE__HF_FORMS; name++) *form = 10 * *form + (*name - '0');
    for (i = 0; rest[i] && (rest[i] == '#' ? name[i] >= '0' && name[i] <= '9' : name[i] == rest[i]); i++)
        if (rest[i] == '#' && i > 6) *size = 10 * *size + (name[i] - '0');
    return !rest[i] && !name[i] && *form < TE__HF_FORMS;
}
/* Weights of an earlier save: other programs read whatever file they find first. */
typedef struct te__hf_others {
    te_ctx *te;
    const char *folder;
    int form, size; /* the set that stays, and the index; size 1: model.safetensors */
    bool used[TE__HF_FORMS]; /* forms of which there are files of a set of this size */
    te_result result;
} te__hf_others;
static bool te__hf_note_form(void *user, const char *name) {
    te__hf_others *o = (te__hf_others *)user;
    int form, size;
    if (te__hf_is_of_set(name, &form, &size) && size == o->size) o->used[form] = true;
    return true;
}
static bool te__hf_remove_other(void *user, const char *name) {
    static const char single[] = "model.safetensors", index[] = "model.safetensors.index.json";
    te__hf_others *o = (te__hf_others *)user;
    const size_t length = te__temp_base_length(name);
    const bool temporary = name[length] != 0; /* what a killed save has left */
    char file[64];
    int form, size;
    te__text path = TE_ZERO, why = TE_ZERO;
    if (length >= sizeof(file)) return true;
    memcpy(file, name, length);
    file[length] = 0;
    if (te__hf_is_of_set(file, &form, &size)
            ? temporary || o->size == 1 || size != o->size || form != o->form
            : strcmp(file, o->size == 1 ? index : single) == 0) {
        if (!te__hf_join(&path, o->te, o->folder, file)) o->result = te_error_code(o->te);
        else if (temporary) te__temps_remove(path.s);
        else if (!te__file_remove(path.s, &why))
            o->result = te__fail(o->te, TE_ERR_IO, "%s", te__text_str(&why));
    }
    te__text_free(&path);
    te__text_free(&why);
    return o->result == TE_OK;
}
/* Removes weights of an earlier save from a folder that has a new set. */
static te_result te__hf_remove_others(te_ctx *te, const char *folder, int form, int size) {
    te__hf_others o = TE_ZERO;
    te__text why = TE_ZERO;
    o.te = te;
    o.folder = folder;
    o.form = form;
    o.size = size;
    if (!te__dir_list(folder, te__hf_remove_other, &o, &why) && o.result == TE_OK)
        o.result = te__fail(te, TE_ERR_IO, "%s", te__text_str(&why));
    te__text_free(&why);
    return o.result;
}

/* How ranks share the parameters of a model. */
typedef struct te__hf_sharing {
    te_ctx *te;
    bool sharded;    /* units are sharded, and each rank writes a file; else rank 0 writes */
    te_group *group; /* the ranks that save together: those of te_hf_desc.dist, or of the units; NULL: this one alone */
    int rank, size;
    int writers;     /* ranks that write */
    int form;        /* of the names of their files */
} te__hf_sharing;
/* A visitor: returns false at a parameter that is in slices alone. */
static bool te__hf_is_gathered(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)user, (void)m, (void)path, (void)kind;
    return !x->shard || !x->shard->set || te__shards_are_whole(x->shard->set);
}
static void te__hf_save_with(te__hf_sharing *h, te_group *group) {
    h->group = group;
    h->rank = te__group_rank(group);
    h->size = te__group_size(group);
}
static bool te__hf_meet_shard(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te__hf_sharing *h = (te__hf_sharing *)user;
    te_group *group = x->shard && x->shard->set ? x->shard->set->group : NULL;
    (void)m, (void)kind;
    if (!x->shard || !x->shard->set || !x->shard->set->of_parameters) return true;
    if (h->sharded && h->group != group)
        return te__not_ok(h->te, TE_ERR_UNSUPPORTED,
                          "te_hf_save: parameter \"%.120s\" is shared by another group (%d ranks) than those before it "
                          "(%d)",
                          path, te__group_size(group), te__group_size(h->group));
    h->sharded = true;
    te__hf_save_with(h, group);
    return true;
}
/* Finds out who saves a model together. Fails on all ranks, or on none. */
static te_result te__hf_shared(te_module *model, te__hf_sharing *h) {
    te_group *world = model->cls == &te__causal_lm_class ? ((const te__causal_lm *)model->state)->world : NULL;
    memset(h, 0, sizeof(*h));
    h->te = model->te;
    h->size = 1;
    if (world) h->sharded = !te_module_visit_tensors(model, te__hf_is_gathered, NULL);
    else if (!te_module_visit_tensors(model, te__hf_meet_shard, h)) return te_error_code(model->te);
    if (world) te__hf_save_with(h, world);
    h->writers = h->sharded ? h->size : 1;
    te__group_tells_again(h->group);
    return TE_OK;
}
/* Chooses names that no file of the folder has, on all ranks alike. */
static te_result te__hf_choose_form(te__hf_sharing *h, const char *folder, te_result result) {
    te__hf_others o = TE_ZERO;
    te__text why = TE_ZERO;
    int *each = (int *)te__alloc(h->te, (size_t)h->size * sizeof(int));
    if (result == TE_OK && !each) result = TE_ERR_OUT_OF_MEMORY;
    o.size = h->writers;
    if (result == TE_OK && h->rank == 0 && !te__dir_list(folder, te__hf_note_form, &o, &why))
        result = te__fail(h->te, TE_ERR_IO, "%s", te__text_str(&why));
    while (h->form < TE__HF_FORMS && o.used[h->form]) h->form++;
    if (result == TE_OK && h->form == TE__HF_FORMS)
        result = te__fail(h->te, TE_ERR_STATE,
                          "te_hf_save: %s has files of %d sets, of which an index names one at the most; remove those "
                          "that model.safetensors.index.json does not name",
                          folder, (int)TE__HF_FORMS);
    result = te__ckpt_gather_bytes(h->group, h->te, &h->form, sizeof(int), each, result);
    if (result == TE_OK) h->form = each[0];
    te__text_free(&why);
    te__free(h->te, each);
    return result;
}

enum { TE__HF_MAX_OPEN = 16 };
/* A group of file tensors of one shape, which one rank writes. */
typedef struct te__hf_piece {
    te__lm_group g;
    int experts;     /* ranks that each have an expert in the place of the one of `g`, of which the files have each; 1:
                      * it is of no expert, or one tensor has those of all */
    bool shares;     /* other ranks have parts of it: all ranks make the tensors together */
    int owner;
    te_dtype dtype;
    int ndim;
    int64_t shape[TE_MAX_DIMS];
    uint64_t bytes; /* of one tensor */
} te__hf_piece;
typedef struct te__hf_set {
    te_ctx *te;
    te_module *model;
    const te__hf_sharing *sharing;
    const te__lm_rule *names;
    te__hf_piece *piece;
    int num_pieces, cap_pieces;
    uint64_t *load; /* [ranks] bytes so far */
    te__st_part *part; /* of this rank's file, by name; the names are owned */
    int num_parts, cap_parts;
    te__shard_set *open[TE__HF_MAX_OPEN]; /* gathered, and to be released */
    int num_open;
} te__hf_set;
static int te__hf_files_of(const te__hf_piece *p) { return p->g.count[TE__LM_FILE] * p->experts; }
/* Writes the name of file tensor i of a piece. */
static bool te__hf_piece_name(const te__hf_set *w, const te__hf_piece *p, int i, char name[TE__LM_NAME]) {
    const int n = p->g.count[TE__LM_FILE];
    char path[TE__LM_NAME], other[TE__LM_NAME];
    te__lm_group g;
    if (p->experts == 1) return te__lm_member(&p->g, TE__LM_FILE, i, name);
    if (!te__lm_member(&p->g, TE__LM_MODEL, 0, path) ||
        !te__hf_expert_path(w->model, te__lm_model_tensor(&p->g, w->model, 0), path, i / n, other))
        return false;
    te__lm_group_of(w->names, w->model, other, &g);
    return te__lm_member(&g, TE__LM_FILE, i % n, name);
}
/* A visitor of parameters: lists the groups, and gives each to the rank with the fewest bytes. */
static bool te__hf_list_piece(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te__hf_set *w = (te__hf_set *)user;
    te__hf_piece *p;
    te__lm_group g;
    int r, place;
    if (kind != TE_ENTRY_PARAMETER) return true;
    place = te__lm_group_of(w->names, w->model, path, &g);
    if (!te__lm_is_complete(&g, w->model)) return false;
    if (place > 0) return true;
    if (!te__grow(m->te, (void **)&w->piece, &w->cap_pieces, w->num_pieces, sizeof(te__hf_piece))) return false;
    p = &w->piece[w->num_pieces++];
    memset(p, 0, sizeof(*p));
    p->g = g;
    p->experts = g.stacked[TE__LM_MODEL] ? 1 : te__hf_expert_ranks(x);
    for (r = 0; r < g.count[TE__LM_MODEL]; r++)
        p->shares = p->shares || te__lm_split(te__lm_model_tensor(&g, w->model, r));
    p->ndim = te__lm_file_shape(&g, w->model, p->shape);
    p->dtype = x->dtype;
    p->bytes = te__shape_bytes(x->dtype, p->ndim, p->shape);
    for (r = 1; r < w->sharing->writers; r++)
        if (w->load[r] < w->load[p->owner]) p->owner = r;
    w->load[p->owner] += p->bytes * (uint64_t)te__hf_files_of(p);
    return true;
}
static te__st_part *te__hf_add_part(te__hf_set *w) {
    if (!te__grow(w->te, (void **)&w->part, &w->cap_parts, w->num_parts, sizeof(te__st_part))) return NULL;
    memset(&w->part[w->num_parts], 0, sizeof(te__st_part));
    return &w->part[w->num_parts++];
}
/* Lists the tensors of this rank's file, and makes its header: those of wide formats first, so that each is aligned,
 * then by name. Rank 0 has what the opened folder had beside the model. */
static te_result te__hf_list_parts(te__hf_set *w, te__text *header) {
    const te__causal_lm *s = (const te__causal_lm *)w->model->state;
    char name[TE__LM_NAME];
    te__st_part *x;
    te_result result;
    int i, k;
    for (i = 0; i < w->num_pieces; i++) {
        const te__hf_piece *p = &w->piece[i];
        if (p->owner != w->sharing->rank) continue;
        for (k = 0; k < te__hf_files_of(p); k++) {
            x = te__hf_add_part(w);
            if (!x) return te_error_code(w->te);
            te__hf_piece_name(w, p, k, name);
            te__st_describe(x, te__copy_string(w->te, name), p->dtype, p->ndim, p->shape);
            if (!x->name) return te_error_code(w->te);
        }
    }
    for (i = 0; i < s->num_kept && w->sharing->rank == 0; i++) {
        x = te__hf_add_part(w);
        if (!x) return te_error_code(w->te);
        *x = s->kept[i];
        x->name = te__copy_string(w->te, s->kept[i].name);
        if (!x->name) return te_error_code(w->te);
    }
    if (w->num_parts) qsort(w->part, (size_t)w->num_parts, sizeof(te__st_part), te__st_by_width);
    result = te__st_make_header(w->te, "te_hf_save", header, w->part, w->num_parts, te__hf_format, 1);
    te__st_place(w->part, w->num_parts, header);
    return result == TE_OK ? te__st_names_differ(w->te, "te_hf_save", w->part, w->num_parts) : result;
}

/* Returns whether a group has a parameter of a set. */
static bool te__hf_needs(const te__hf_set *w, const te__hf_piece *p, const te__shard_set *set) {
    int i;
    for (i = 0; i < p->g.count[TE__LM_MODEL]; i++) {
        const te__shard *s = te__lm_model_tensor(&p->g, w->model, i)->shard;
        if (s && s->set == set) return true;
    }
    return false;
}
/* Releases the sets that te__hf_gather has gathered, except those that p needs. p NULL: all. */
static te_result te__hf_release(te__hf_set *w, const te__hf_piece *p, te_result result) {
    int i, kept = 0;
    for (i = 0; i < w->num_open; i++) {
        if (p && te__hf_needs(w, p, w->open[i])) {
            w->open[kept++] = w->open[i];
        } else {
            const te_result released = te__shards_scatter(w->open[i]);
            if (result == TE_OK) result = released;
        }
    }
    w->num_open = kept;
    return result;
}
/* Gathers the parameters of a group. */
static te_result te__hf_gather(te__hf_set *w, const te__hf_piece *p) {
    te_result result = te__hf_release(w, p, TE_OK);
    int i;
    for (i = 0; i < p->g.count[TE__LM_MODEL] && result == TE_OK; i++) {
        te__shard *s = te__lm_model_tensor(&p->g, w->model, i)->shard;
        if (!s || !s->set || !s->set->of_parameters || s->set->whole) continue;
        if (w->num_open == TE__HF_MAX_OPEN)
            return te__fail(w->te, TE_ERR_UNSUPPORTED,
                            "te_hf_save: a tensor of the files has parameters of more than %d units",
                            (int)TE__HF_MAX_OPEN);
        w->open[w->num_open++] = s->set;
        result = te__shards_gather_in_parts(s->set);
    }
    return result;
}
/* Makes the file tensors of a piece, whose parameters are gathered, and writes them if it is this rank's. */
static te_result te__hf_store(te__hf_set *w, const te__hf_piece *p, te__file_out *out, void *staging) {
    const int n = p->g.count[TE__LM_FILE];
    const bool own = out && p->owner == w->sharing->rank;
    te_tensor **parts;
    te_result result;
    int i;
    if (!own && !p->shares) return TE_OK;
    parts = (te_tensor **)te__alloc_zero(w->te, (size_t)n * sizeof(te_tensor *));
    result = parts ? TE_OK : TE_ERR_OUT_OF_MEMORY;
    te__frame_begin(w->te);
    if (parts) result = te__lm_put_out(&p->g, w->model, parts);
    for (i = 0; i < n && p->experts > 1 && result == TE_OK; i++) {
        parts[i] = te__gather(te__lm_model_tensor(&p->g, w->model, 0)->split->group, te_tensor_contiguous(parts[i]));
        if (!parts[i]) result = te_error_code(w->te);
    }
    for (i = 0; i < te__hf_files_of(p) && own && result == TE_OK; i++) {
        te_tensor *x = parts[i % n];
        const int64_t rows = x->shape[0] / p->experts;
        char name[TE__LM_NAME];
        if (p->experts > 1) x = te_tensor_narrow(x, 0, i / n * rows, rows);
        te__hf_piece_name(w, p, i, name);
        te__file_out_seek(out, te__st_part_named(w->part, w->num_parts, name)->at);
        result = x ? te__st_store(w->te, out, x, staging) : te_error_code(w->te);
    }
    te__frame_end(w->te, NULL, 0);
    te__free(w->te, parts);
    return result;
}
/* Writes this rank's file, up to its commit; `out` NULL: it writes none. All ranks gather all groups, in one order. A
 * rank that fails tells those that gather with it. */
static te_result te__hf_write_file(te__hf_set *w, te__file_out *out, te__text *why) {
    const te__causal_lm *s = (const te__causal_lm *)w->model->state;
    void *staging = te__alloc(w->te, TE__ST_CHUNK);
    te_result result = staging ? TE_OK : TE_ERR_OUT_OF_MEMORY;
    int i;
    if (result == TE_OK && out && out->failed) result = te__fail(w->te, TE_ERR_IO, "%s", te__text_str(why));
    for (i = 0; i < w->num_pieces && result == TE_OK; i++) {
        result = te__hf_gather(w, &w->piece[i]);
        if (result == TE_OK) result = te__hf_store(w, &w->piece[i], out, staging);
        if (result == TE_OK && out && out->failed) result = te__fail(w->te, TE_ERR_IO, "%s", te__text_str(why));
    }
    for (i = 0; i < s->num_kept && w->sharing->rank == 0 && result == TE_OK; i++) {
        te__file_out_seek(out, te__st_part_named(w->part, w->num_parts, s->kept[i].name)->at);
        te__file_out_write(out, s->kept[i].data, (size_t)s->kept[i].bytes);
    }
    te__free(w->te, staging);
    result = te__hf_release(w, NULL, result);
    if (result == TE_OK && out && out->failed) result = te__fail(w->te, TE_ERR_IO, "%s", te__text_str(why));
    if (result != TE_OK && w->sharing->group) te__hf_tell(w->model, result);
    return result;
}

/* Writes the name of a rank's file. */
static void te__hf_file_name(const te__hf_sharing *h, int rank, char name[64]) {
    if (h->writers == 1) snprintf(name, 64, "model.safetensors");
    else if (h->form == 0) snprintf(name, 64, "model-%05d-of-%05d.safetensors", rank + 1, h->writers);
    else snprintf(name, 64, "model.%d-%05d-of-%05d.safetensors", h->form, rank + 1, h->writers);
}
/* Writes the index of all ranks' files. It names one whole set, whenever a reader looks. */
static te_result te__hf_write_index(const te__hf_set *w, const char *folder) {
    const te__causal_lm *s = (const te__causal_lm *)w->model->state;
    te__text text = TE_ZERO, path = TE_ZERO, why = TE_ZERO;
    te_result result = TE_OK;
    char name[TE__LM_NAME], file[64];
    uint64_t total = 0;
    int i, k, n = 0;
    for (i = 0; i < w->sharing->writers; i++) total += w->load[i];
    for (i = 0; i < s->num_kept; i++) total += s->kept[i].bytes;
    text.memory = why.memory = &w->te->host_allocator;
    te__text_printf(&text, "{\n  \"metadata\": {\n    \"total_size\": %llu\n  },\n  \"weight_map\": {",
                    (unsigned long long)total);
    for (i = 0; i < w->num_pieces + s->num_kept; i++) {
        const te__hf_piece *p = i < w->num_pieces ? &w->piece[i] : NULL;
        te__hf_file_name(w->sharing, p ? p->owner : 0, file);
        for (k = 0; k < (p ? te__hf_files_of(p) : 1); k++) {
            if (p) te__hf_piece_name(w, p, k, name);
            te__text_put(&text, n++ ? ",\n    " : "\n    ");
            te__json_put_string(&text, p ? name : s->kept[i - w->num_pieces].name);
            te__text_printf(&text, ": \"%s\"", file);
        }
    }
    te__text_put(&text, "\n  }\n}\n");
    if (text.oom) result = te__fail(w->te, TE_ERR_OUT_OF_MEMORY, "te_hf_save: the index: %s", te__no_memory_text);
    if (result == TE_OK && !te__hf_join(&path, w->te, folder, "model.safetensors.index.json"))
        result = te_error_code(w->te);
    if (result == TE_OK && !te__file_write_atomic(path.s, text.s, text.n, &why))
        result = te__fail(w->te, TE_ERR_IO, "%s", te__text_str(&why));
    te__text_free(&text);
    te__text_free(&path);
    te__text_free(&why);
    return result;
}
/* Ends a set whose files are all there: rank 0 writes the index, or removes the files. Ranks agree before, although all
 * of them know: from now on only rank 0 knows whether an index names the files, however the ranks lose each other. */
static te_result te__hf_end_set(const te__hf_set *w, const char *folder) {
    const te__hf_sharing *h = w->sharing;
    te_result result = te__ckpt_agree(h->group, w->te, TE_OK);
    char name[64];
    int i;
    if (h->rank > 0) return result;
    if (result == TE_OK) result = te__hf_write_index(w, folder);
    for (i = 0; i < h->writers && result != TE_OK; i++) {
        te__text path = TE_ZERO;
        te__hf_file_name(h, i, name);
        if (te__hf_join(&path, w->te, folder, name)) te__file_remove(path.s, NULL);
        te__text_free(&path);
    }
    return result;
}
static void te__hf_set_free(te__hf_set *w) {
    int i;
    for (i = 0; i < w->num_parts; i++) te__free(w->te, (char *)(uintptr_t)w->part[i].name);
    te__free(w->te, w->part);
    te__free(w->te, w->piece);
    te__free(w->te, w->load);
}
/* Writes the weights of a model. All ranks must call it. `result`: an error of this rank from before. Without an error,
 * all ranks have succeeded. */
static te_result te__hf_write_weights(te_module *model, const char *folder, te__hf_sharing *h, te_result result) {
    te_ctx *te = model->te;
    te__hf_set w = TE_ZERO;
    te__text path = TE_ZERO, header = TE_ZERO, why = TE_ZERO;
    te__file_out out;
    bool begun = false, written = false;
    char name[64];
    result = te__ckpt_agree(h->group, te, result); /* before the first gathering */
    if (result != TE_OK) return result;
    w.te = te;
    w.model = model;
    w.sharing = h;
    w.names = ((const te__causal_lm *)model->state)->names;
    w.load = (uint64_t *)te__alloc_zero(te, (size_t)h->size * sizeof(uint64_t));
    if (!w.load) result = TE_ERR_OUT_OF_MEMORY;
    if (result == TE_OK && !te_module_visit_tensors(model, te__hf_list_piece, &w)) result = te_error_code(te);
    if (result == TE_OK) result = te__hf_list_parts(&w, &header);
    if (h->writers > 1) result = te__hf_choose_form(h, folder, result);
    te__hf_file_name(h, h->rank, name);
    if (result == TE_OK && !te__hf_join(&path, te, folder, name)) result = te_error_code(te);
    result = te__ckpt_agree(h->group, te, result);
    if (result == TE_OK) {
        begun = h->rank < h->writers;
        if (begun) te__st_begin(&out, path.s, &why, &header);
        result = te__hf_write_file(&w, begun ? &out : NULL, &why);
        result = te__ckpt_agree(h->group, te, result);
        if (begun && result != TE_OK) te__file_out_abort(&out);
        else if (begun && !te__file_out_commit(&out)) result = te__fail(te, TE_ERR_IO, "%s", te__text_str(&why));
        else written = begun;
        result = te__ckpt_agree(h->group, te, result);
        /* of several files none will be named by an index, since rank 0 cannot agree with this rank again */
        if (written && result != TE_OK && h->writers > 1) te__file_remove(path.s, NULL);
        if (result == TE_OK && h->writers > 1) result = te__hf_end_set(&w, folder);
        if (result == TE_OK && h->rank == 0) result = te__hf_remove_others(te, folder, h->form, h->writers);
        result = te__ckpt_agree(h->group, te, result);
    }
    te__hf_set_free(&w);
    te__text_free(&path);
    te__text_free(&header);
    te__text_free(&why);
    return result;
}
