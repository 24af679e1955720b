/* train/checkpoint_files.c: the file of a checkpoint, or the set of files in which ranks that share a model have
 * written it. This file must not depend on modules and optimizers. A set of n files:
 *
 *     model.safetensors                 the index, of rank 0: what is whole on all ranks, and the slices of rank 0
 *     model.safetensors.ID.1-of-4 ..    the slices of rank 1, and so on. ID is new in each save, and the index is
 *                                       written last, so it never names files of another save
 *
 * A slice of a tensor NAME is named NAME@N, where N is the byte of the whole tensor at which it begins. The index has
 * the metadata te.parts (n), te.part.1 .. (names of the other files) and te.whole.NAME (the sizes of a tensor that is
 * in slices, "64,160"); a file of experts that the index does not know has te.whole.NAME of these. */

typedef struct te__ckpt_piece {
    char *name; /* of the whole tensor; owned */
    int file;
    const te__st_entry *entry;
    uint64_t begin;
} te__ckpt_piece;
typedef struct te__ckpt_whole {
    te_safetensors_entry e; /* the name is that of the first piece */
    int first, count;       /* pieces */
} te__ckpt_whole;
typedef struct te__ckpt_files {
    te_ctx *te;
    te_safetensors **file; /* [n]; file 0 is the index */
    int n;
    te__ckpt_piece *piece; /* sorted by name, then by `begin` */
    int num_pieces, cap_pieces;
    te__ckpt_whole *whole; /* sorted by name */
    int num_whole, cap_whole;
    const te_safetensors_entry **entry; /* all tensors: those of file 0 that are no slices, and those in slices */
    int num_entries, cap_entries;
    void *staging; /* of all files, which are read one after the other; NULL until te__ckpt_stage */
} te__ckpt_files;

static const char te__ckpt_parts_key[] = "te.parts", te__ckpt_whole_key[] = "te.whole.";

static void te__ckpt_files_close(te__ckpt_files *s) {
    int i;
    if (!s) return;
    for (i = 0; i < s->num_pieces; i++) te__free(s->te, s->piece[i].name);
    for (i = 0; s->file && i < s->n; i++) {
        if (s->file[i] && s->file[i]->staging == s->staging) s->file[i]->staging = NULL;
        te_safetensors_close(s->file[i]);
    }
    te__free(s->te, s->staging);
    te__free(s->te, s->piece);
    te__free(s->te, s->whole);
    te__free(s->te, (void *)s->entry);
    te__free(s->te, s->file);
    te__free(s->te, s);
}

/* Opens the other files that the index names. */
static bool te__ckpt_open_parts(te__ckpt_files *s, const char *path) {
    te_safetensors *index = s->file[0];
    te__text file = TE_ZERO;
    bool fine = true;
    int i;
    for (i = 1; i < s->n && fine; i++) {
        char key[32];
        const char *name;
        snprintf(key, sizeof(key), "te.part.%d", i);
        name = te_safetensors_metadata(index, key);
        if (!name || !name[0] || te__path_name_at(name) > 0)
            return te__st_fail(index, TE_ERR_FORMAT,
                               "metadata \"%s\" is %s%.100s%s; the name of a file in the same folder is needed", key,
                               name ? "\"" : "missing", name ? name : "", name ? "\"" : "");
        te__text_clear(&file);
        te__text_add(&file, path, te__path_name_at(path));
        te__text_put(&file, name);
        s->file[i] = te_safetensors_open(s->te, te__text_str(&file));
        fine = s->file[i] != NULL;
    }
    te__text_free(&file);
    return fine;
}

/* Reads the number at the end of NAME@N. Returns the length of NAME, or 0 if the name has another form. */
static size_t te__ckpt_slice_name(const char *name, uint64_t *begin) {
    const char *at = strrchr(name, '@');
    const size_t digits = at ? strspn(at + 1, "0123456789") : 0;
    if (digits == 0 || digits > 18 || at[1 + digits] || at == name) return 0;
    *begin = (uint64_t)strtoull(at + 1, NULL, 10);
    return (size_t)(at - name);
}
static int te__ckpt_by_place(const void *a, const void *b) {
    const te__ckpt_piece *x = (const te__ckpt_piece *)a, *y = (const te__ckpt_piece *)b;
    const int names = strcmp(x->name, y->name);
    return names ? names : x->begin < y->begin ? -1 : x->begin > y->begin;
}
static int te__ckpt_by_whole(const void *a, const void *b) {
    return strcmp(((const te__ckpt_whole *)a)->e.name, ((const te__ckpt_whole *)b)->e.name);
}
static bool te__ckpt_add_file_entry(te__ckpt_files *s, const te_safetensors_entry *e) {
    if (!te__grow(s->te, (void **)&s->entry, &s->cap_entries, s->num_entries, sizeof(te_safetensors_entry *)))
        return false;
    s->entry[s->num_entries++] = e;
    return true;
}
/* Lists the slices of all files, and the tensors of the index that are no slices. */
static bool te__ckpt_list(te__ckpt_files *s) {
    int i, k;
    for (i = 0; i < s->n; i++)
        for (k = 0; k < te_safetensors_count(s->file[i]); k++) {
            const te__st_entry *x = &s->file[i]->entries[k];
            te__ckpt_piece *p;
            uint64_t begin = 0;
            const size_t n = s->n > 1 || te_safetensors_metadata(s->file[0], te__ckpt_parts_key)
                                 ? te__ckpt_slice_name(x->e.name, &begin)
                                 : 0;
            if (n == 0 && i > 0)
                return te__st_fail(s->file[i], TE_ERR_FORMAT, "tensor " TE__ST_NAME " is no slice (NAME@N)", x->e.name);
            if (n == 0) {
                if (!te__ckpt_add_file_entry(s, &x->e)) return false;
                continue;
            }
            if (!te__grow(s->te, (void **)&s->piece, &s->cap_pieces, s->num_pieces, sizeof(te__ckpt_piece)))
                return false;
            p = &s->piece[s->num_pieces];
            p->name = (char *)te__alloc(s->te, n + 1);
            if (!p->name) return false;
            memcpy(p->name, x->e.name, n);
            p->name[n] = 0;
            p->file = i;
            p->entry = x;
            p->begin = begin;
            s->num_pieces++;
        }
    if (s->num_pieces) qsort(s->piece, (size_t)s->num_pieces, sizeof(te__ckpt_piece), te__ckpt_by_place);
    return true;
}

/* Appends a size to a shape, unless no tensor has so many elements. */
static bool te__ckpt_add_size(te_safetensors_entry *e, int64_t size) {
    int64_t count = 1;
    int i;
    for (i = 0; i < e->ndim; i++) count *= te__max(e->shape[i], 1);
    if (e->ndim == TE_MAX_DIMS || size > (INT64_MAX >> 5) / count) return false;
    e->shape[e->ndim++] = size;
    return true;
}
/* Sets the shape of a tensor in slices from the metadata of the index, or of the file of its first slice. */
static bool te__ckpt_read_shape(te__ckpt_files *s, const te__ckpt_piece *first, te_safetensors_entry *e) {
    const char *text;
    char *key = (char *)te__alloc(s->te, sizeof(te__ckpt_whole_key) + strlen(e->name));
    if (!key) return false;
    memcpy(key, te__ckpt_whole_key, sizeof(te__ckpt_whole_key));
    memcpy(key + sizeof(te__ckpt_whole_key) - 1, e->name, strlen(e->name) + 1);
    text = te_safetensors_metadata(s->file[0], key);
    if (!text) text = te_safetensors_metadata(s->file[first->file], key);
    te__free(s->te, key);
    e->ndim = 0;
    while (text && *text) {
        const size_t digits = strspn(text, "0123456789");
        if (digits == 0 || digits > 18 || !te__ckpt_add_size(e, (int64_t)strtoll(text, NULL, 10))) break;
        text += digits;
        if (text[0] == ',' && text[1]) text++;
    }
    if (text && !*text) return true;
    return te__st_fail(s->file[0], TE_ERR_FORMAT, "the sizes of tensor " TE__ST_NAME ", which is in slices, are %s",
                       e->name, text ? "not those of a tensor" : "missing");
}
/* Joins the slices of each tensor, which must follow each other without gaps. */
static bool te__ckpt_join(te__ckpt_files *s) {
    int i = 0, k;
    while (i < s->num_pieces) {
        const te__ckpt_piece *first = &s->piece[i];
        te__ckpt_whole *w;
        uint64_t end = 0;
        if (!te__grow(s->te, (void **)&s->whole, &s->cap_whole, s->num_whole, sizeof(te__ckpt_whole))) return false;
        w = &s->whole[s->num_whole++];
        memset(w, 0, sizeof(*w));
        w->e.name = first->name;
        w->e.dtype = first->entry->e.dtype;
        w->first = i;
        if (!te__ckpt_read_shape(s, first, &w->e)) return false;
        for (; i < s->num_pieces && strcmp(s->piece[i].name, first->name) == 0; i++) {
            const te__ckpt_piece *p = &s->piece[i];
            if (p->begin != end || p->entry->e.dtype != w->e.dtype)
                return te__st_fail(s->file[p->file], TE_ERR_FORMAT,
                                   "tensor " TE__ST_NAME ": a slice in %s begins at byte %llu, and byte %llu in %s is "
                                   "the next one",
                                   p->name, te_dtype_name(p->entry->e.dtype), (unsigned long long)p->begin,
                                   (unsigned long long)end, te_dtype_name(w->e.dtype));
            end += p->entry->e.bytes;
        }
        w->count = i - w->first;
        w->e.bytes = end;
        if (w->e.dtype == TE_DTYPE_NONE || te__shape_bytes(w->e.dtype, w->e.ndim, w->e.shape) != end) {
            char text[TE__SHAPE_TEXT];
            return te__st_fail(s->file[0], TE_ERR_FORMAT,
                               "tensor " TE__ST_NAME " is %s %s, and its slices have %llu bytes", w->e.name,
                               te_dtype_name(w->e.dtype), te__dims_text(w->e.ndim, w->e.shape, text),
                               (unsigned long long)end);
        }
    }
    for (k = 0; k < s->num_whole; k++)
        if (!te__ckpt_add_file_entry(s, &s->whole[k].e)) return false;
    return true;
}

/* Opens a checkpoint. Returns NULL with an error if a file of the set is missing or damaged. */
static te__ckpt_files *te__ckpt_files_open(te_ctx *te, const char *path) {
    te_safetensors *index = te_safetensors_open(te, path);
    const char *text = index ? te_safetensors_metadata(index, te__ckpt_parts_key) : NULL;
    te__ckpt_files *s = index ? (te__ckpt_files *)te__alloc_zero(te, sizeof(te__ckpt_files)) : NULL;
    double number = 1.0;
    bool fine = s != NULL;
    if (fine && text &&
        (strspn(text, "0123456789") != strlen(text) || te__read_number(text, strlen(text), &number) != strlen(text) ||
         !(number >= 1.0 && number <= 1e6)))
        fine = te__st_fail(index, TE_ERR_FORMAT, "metadata \"%s\" is \"%.40s\"; the number of files is needed",
                           te__ckpt_parts_key, text);
    if (s) s->te = te;
    if (fine) s->file = (te_safetensors **)te__alloc_zero(te, (size_t)number * sizeof(te_safetensors *));
    if (!fine || !s->file) {
        te_safetensors_close(index);
        te__ckpt_files_close(s);
        return NULL;
    }
    s->n = (int)number;
    s->file[0] = index;
    if (te__ckpt_open_parts(s, path) && te__ckpt_list(s) && te__ckpt_join(s)) return s;
    te__ckpt_files_close(s);
    return NULL;
}

static const te__ckpt_whole *te__ckpt_in_slices(const te__ckpt_files *s, const char *name) {
    te__ckpt_whole want;
    want.e.name = name;
    if (s->num_whole == 0) return NULL;
    return (const te__ckpt_whole *)bsearch(&want, s->whole, (size_t)s->num_whole, sizeof(want), te__ckpt_by_whole);
}
/* Returns the tensor with this name, whole or in slices, or NULL. */
static const te_safetensors_entry *te__ckpt_find(const te__ckpt_files *s, const char *name) {
    const te__ckpt_whole *w = te__ckpt_in_slices(s, name);
    return w ? &w->e : te_safetensors_find(s->file[0], name);
}

/* Reads the bytes from `from` on of a tensor into dst, a contiguous tensor. The staging memory of its files exists. */
static te_result te__ckpt_read_range(const te__ckpt_files *s, const char *name, uint64_t from, te_tensor *dst) {
    const te__ckpt_whole *w = te__ckpt_in_slices(s, name);
    const uint64_t end = from + te_tensor_bytes(dst);
    te_result result = TE_OK;
    int i;
    te__touch(dst);
    if (!w) return te__st_load_part(s->file[0], te__st_find(s->file[0], name), from, dst, 0, end - from);
    for (i = w->first; i < w->first + w->count && result == TE_OK; i++) {
        const te__ckpt_piece *p = &s->piece[i];
        const uint64_t a = p->begin > from ? p->begin : from, b = p->begin + p->entry->e.bytes;
        if (a < (b < end ? b : end))
            result = te__st_load_part(s->file[p->file], p->entry, a - p->begin, dst, a - from, (b < end ? b : end) - a);
    }
    return result;
}
/* Returns a new tensor with the value of a tensor of the checkpoint. */
static te_tensor *te__ckpt_read_new(const te__ckpt_files *s, const char *name) {
    const te_safetensors_entry *e = te__ckpt_find(s, name);
    te_tensor *x;
    if (!te__ckpt_in_slices(s, name)) return te_safetensors_read(s->file[0], name);
    x = te_tensor_empty(s->te, e->dtype, e->ndim, e->shape);
    return x ? te__checked(x, te__ckpt_read_range(s, name, 0, x)) : NULL;
}
/* Checks that a tensor of the checkpoint has a format and a shape. */
static te_result te__ckpt_fits(const te__ckpt_files *s, const char *name, te_dtype dtype, int ndim,
                               const int64_t *shape) {
    const te_safetensors_entry *e = te__ckpt_find(s, name);
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (!te__ckpt_in_slices(s, name) && !te__st_readable(s->file[0], name)) return te_error_code(s->te);
    if (e->ndim != ndim || memcmp(e->shape, shape, (size_t)ndim * sizeof(int64_t)) != 0) {
        te__st_fail(s->file[0], TE_ERR_SHAPE, "tensor " TE__ST_NAME " is %s in the file and %s here", name,
                    te__dims_text(e->ndim, e->shape, a), te__dims_text(ndim, shape, b));
        return TE_ERR_SHAPE;
    }
    if (e->dtype == dtype) return TE_OK;
    te__st_fail(s->file[0], TE_ERR_DTYPE, "tensor " TE__ST_NAME " is %s in the file and %s here", name,
                te_dtype_name(e->dtype), te_dtype_name(dtype));
    return TE_ERR_DTYPE;
}
/* Allocates what reading needs beside tensors. */
static bool te__ckpt_stage(te__ckpt_files *s) {
    size_t most = 0;
    int i;
    for (i = 0; i < s->n; i++)
        if (te__st_staging_bytes(s->file[i]) > most) most = te__st_staging_bytes(s->file[i]);
    s->staging = te__alloc(s->te, most);
    for (i = 0; i < s->n; i++)
        if (!s->file[i]->staging) s->file[i]->staging = s->staging;
    return s->staging != NULL;
}

/* ---- names of files ---- */

/* Writes the name of the file of rank `rank` of `size`, in the folder of `path`. */
static void te__ckpt_part_path(te__text *out, const char *path, uint64_t id, int rank, int size) {
    te__text_clear(out);
    te__text_printf(out, "%s.%016llx.%d-of-%d", path, (unsigned long long)id, rank, size);
}

/* Removes files of earlier saves to the same path, which no index names any more, and what killed saves have left. */
typedef struct te__ckpt_sweep {
    const char *path, *name;
    char id[24];
} te__ckpt_sweep;
static bool te__ckpt_sweep_one(void *user, const char *name) {
    const te__ckpt_sweep *s = (const te__ckpt_sweep *)user;
    const size_t n = strlen(s->name);
    const size_t length = te__temp_base_length(name);
    const char *rest = name + n;
    te__text file = TE_ZERO;
    size_t digits;
    if (strncmp(name, s->name, n) != 0 || rest[0] != '.' || strspn(rest + 1, "0123456789abcdef") != 16 ||
        strncmp(rest + 1, s->id, 16) == 0 || rest[17] != '.')
        return true;
    digits = strspn(rest + 18, "0123456789");
    if (digits == 0 || strncmp(rest + 18 + digits, "-of-", 4) != 0 ||
        n + 22 + digits + strspn(rest + 22 + digits, "0123456789") != length)
        return true;
    te__text_add(&file, s->path, te__path_name_at(s->path));
    te__text_add(&file, name, length);
    if (!file.oom && name[length]) te__temps_remove(te__text_str(&file));
    else if (!file.oom) te__file_remove(te__text_str(&file), NULL);
    te__text_free(&file);
    return true;
}
/* `id`: of the set that stays; 0: none. */
static void te__ckpt_sweep_folder(const char *path, uint64_t id) {
    const size_t n = te__path_dir_length(path);
    te__ckpt_sweep s;
    te__text folder = TE_ZERO;
    s.path = path;
    s.name = path + te__path_name_at(path);
    snprintf(s.id, sizeof(s.id), "%016llx", (unsigned long long)id);
    te__text_add(&folder, n ? path : ".", n ? n : 1);
    if (!folder.oom) te__dir_list(te__text_str(&folder), te__ckpt_sweep_one, &s, NULL);
    te__text_free(&folder);
}
