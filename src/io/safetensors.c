/* io/safetensors.c: reads and writes safetensors files: 8 bytes of header length, a JSON header, the data. This file
 * must not depend on modules, except for the arguments of te__st_list_add.
 *
 * No file is trusted: every length, size and offset is checked before it is used. As in the reference implementation,
 * the data has no holes or overlaps, no name occurs twice, and every byte belongs to a tensor. */

enum { TE__ST_MAX_HEADER = 100000000, TE__ST_CHUNK = 8 << 20 };

/* The element types that a safetensors file can name. TE_DTYPE_NONE means that te.h has no such dtype. Tensors of this
 * type can be listed but not read. */
typedef struct te__st_dtype {
    const char *name;
    int bits;
    te_dtype dtype;
} te__st_dtype;
static const te__st_dtype te__st_dtypes[] = {{"F32", 32, TE_F32},           {"F16", 16, TE_F16},
                                             {"BF16", 16, TE_BF16},         {"F8_E4M3", 8, TE_F8E4M3},
                                             {"F8_E5M2", 8, TE_F8E5M2},     {"F8_E8M0", 8, TE_F8E8M0},
                                             {"F4", 4, TE_F4E2M1},          {"U8", 8, TE_U8},
                                             {"I32", 32, TE_I32},           {"I64", 64, TE_I64},
                                             {"BOOL", 8, TE_DTYPE_NONE},    {"I8", 8, TE_DTYPE_NONE},
                                             {"I16", 16, TE_I16},           {"U16", 16, TE_DTYPE_NONE},
                                             {"U32", 32, TE_DTYPE_NONE},    {"U64", 64, TE_DTYPE_NONE},
                                             {"F64", 64, TE_DTYPE_NONE},    {"C64", 64, TE_DTYPE_NONE},
                                             {"F6_E2M3", 6, TE_DTYPE_NONE}, {"F6_E3M2", 6, TE_DTYPE_NONE}};

typedef struct te__st_entry {
    te_safetensors_entry e; /* first member, so that te_safetensors_at can return a pointer to it */
    const te__st_dtype *type;
} te__st_entry;

typedef struct te__st_name {
    const char *name;
    int index;
} te__st_name;

struct te_safetensors {
    te_ctx *te;
    char *path;
    te__file file;
    char *header; /* [header_size + 1]; names and metadata point into it */
    size_t header_size;
    uint64_t data_start, data_size; /* both in bytes; data_start counts from the start of the file */
    te__st_entry *entries; /* in the order of their data in the file */
    int num_entries, cap_entries;
    te__st_name *by_name;  /* [num_entries], sorted by name */
    te_metadata *metadata; /* sorted by key */
    int num_metadata, cap_metadata;
    void *staging; /* host memory for copies between file and device; NULL until needed */
    te__closable closable;
};

/* ---- the header ---- */

/* Format of a name in messages: cut off at 120 characters. */
#define TE__ST_NAME "\"%.120s\""

TE_PRINTF(3, 4) static bool te__st_fail(te_safetensors *f, te_result code, const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    return te__not_ok(f->te, code, "%s: %s", f->path, text);
}

static const te__st_dtype *te__st_dtype_named(const char *name) {
    int i;
    for (i = 0; i < TE__COUNT(te__st_dtypes); i++)
        if (strcmp(te__st_dtypes[i].name, name) == 0) return &te__st_dtypes[i];
    return NULL;
}

static bool te__st_parse_metadata(te_safetensors *f, te__json *j) {
    const char *key, *value;
    for (key = te__json_first(j); key; key = te__json_next(j)) {
        value = te__json_string(j);
        if (j->failed ||
            !te__grow(f->te, (void **)&f->metadata, &f->cap_metadata, f->num_metadata, sizeof(te_metadata)))
            return false;
        f->metadata[f->num_metadata].key = key;
        f->metadata[f->num_metadata++].value = value;
    }
    return !j->failed;
}

static bool te__st_parse_shape(te_safetensors *f, te__json *j, te_safetensors_entry *e) {
    bool more;
    for (more = te__json_open(j, '[', ']'); more; more = te__json_more(j, ']')) {
        if (e->ndim == TE_MAX_DIMS)
            return te__st_fail(f, TE_ERR_FORMAT, "tensor " TE__ST_NAME " has more than %d dimensions", e->name,
                               TE_MAX_DIMS);
        e->shape[e->ndim++] = (int64_t)te__json_uint(j);
    }
    return !j->failed;
}

/* Parses "dtype", "shape" and "data_offsets", which may be in any order, but each only once. Skips other fields. */
static bool te__st_parse_entry(te_safetensors *f, te__json *j, const char *name) {
    te__st_entry *x;
    uint64_t begin = 0, end = 0;
    int types = 0, shapes = 0, offsets = 0;
    const char *key;
    if (!te__grow(f->te, (void **)&f->entries, &f->cap_entries, f->num_entries, sizeof(te__st_entry))) return false;
    x = &f->entries[f->num_entries];
    memset(x, 0, sizeof(*x));
    x->e.name = name;
    for (key = te__json_first(j); key; key = te__json_next(j)) {
        if (strcmp(key, "dtype") == 0 && types++ == 0) {
            const char *type = te__json_string(j);
            if (!type) return false;
            x->type = te__st_dtype_named(type);
            if (!x->type)
                return te__st_fail(f, TE_ERR_FORMAT, "tensor " TE__ST_NAME " has the unknown dtype \"%.40s\"", name,
                                   type);
            x->e.dtype = x->type->dtype;
        } else if (strcmp(key, "shape") == 0 && shapes++ == 0) {
            if (!te__st_parse_shape(f, j, &x->e)) return false;
        } else if (strcmp(key, "data_offsets") == 0 && offsets++ == 0) {
            te__json_expect(j, '[');
            begin = te__json_uint(j);
            te__json_expect(j, ',');
            end = te__json_uint(j);
            te__json_expect(j, ']');
        } else {
            te__json_skip(j, 0);
        }
    }
    if (j->failed) return false;
    if (types != 1 || shapes != 1 || offsets != 1)
        return te__st_fail(f, TE_ERR_FORMAT,
                           "tensor " TE__ST_NAME
                           " needs dtype, shape and data_offsets once each; it has them %d, %d and %d times",
                           name, types, shapes, offsets);
    if (end < begin || end > f->data_size)
        return te__st_fail(f, TE_ERR_FORMAT, "tensor " TE__ST_NAME " claims bytes %llu to %llu of %llu bytes of data",
                           name, (unsigned long long)begin, (unsigned long long)end, (unsigned long long)f->data_size);
    x->e.offset = begin;
    x->e.bytes = end - begin;
    f->num_entries++;
    return true;
}

/* Checks that the number of bytes of the entry equals the number of elements times the size of an element. */
static bool te__st_check_size(te_safetensors *f, const te__st_entry *x) {
    char text[TE__SHAPE_TEXT];
    uint64_t n = 1;
    int i;
    for (i = 0; i < x->e.ndim; i++) {
        uint64_t size = (uint64_t)x->e.shape[i];
        if (size != 0 && n > (uint64_t)INT64_MAX / 64 / size)
            return te__st_fail(f, TE_ERR_FORMAT,
                               "tensor " TE__ST_NAME " has the shape %s: more elements than 64 bits can count",
                               x->e.name, te__dims_text(x->e.ndim, x->e.shape, text));
        n *= size;
    }
    if (n * (uint64_t)x->type->bits % 8 || n * (uint64_t)x->type->bits / 8 != x->e.bytes)
        return te__st_fail(f, TE_ERR_FORMAT, "tensor " TE__ST_NAME " is %s %s, %llu bits, but its data has %llu bytes",
                           x->e.name, x->type->name, te__dims_text(x->e.ndim, x->e.shape, text),
                           (unsigned long long)(n * (uint64_t)x->type->bits), (unsigned long long)x->e.bytes);
    return true;
}

static int te__st_by_offset(const void *a, const void *b) {
    const te_safetensors_entry *x = &((const te__st_entry *)a)->e, *y = &((const te__st_entry *)b)->e;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    /* if two tensors begin at the same byte, the empty one comes first */
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    return strcmp(x->name, y->name);
}
static int te__st_by_name(const void *a, const void *b) {
    return strcmp(((const te__st_name *)a)->name, ((const te__st_name *)b)->name);
}
static int te__st_by_key(const void *a, const void *b) {
    return strcmp(((const te_metadata *)a)->key, ((const te_metadata *)b)->key);
}

/* Sorts the entries. Rejects equal names, holes, overlaps, and bytes that belong to no tensor. */
static bool te__st_check_layout(te_safetensors *f) {
    uint64_t at = 0;
    int i;
    if (f->num_entries) qsort(f->entries, (size_t)f->num_entries, sizeof(te__st_entry), te__st_by_offset);
    if (f->num_metadata) qsort(f->metadata, (size_t)f->num_metadata, sizeof(te_metadata), te__st_by_key);
    f->by_name = (te__st_name *)te__alloc(f->te, (size_t)f->num_entries * sizeof(te__st_name));
    if (!f->by_name) return false;
    for (i = 0; i < f->num_entries; i++) {
        const te_safetensors_entry *e = &f->entries[i].e;
        if (!te__st_check_size(f, &f->entries[i])) return false;
        if (e->offset != at)
            return te__st_fail(f, TE_ERR_FORMAT,
                               "tensor " TE__ST_NAME
                               " begins at byte %llu of the data, %s: the one before ends at byte %llu",
                               e->name, (unsigned long long)e->offset,
                               e->offset < at ? "within another tensor" : "behind a hole", (unsigned long long)at);
        at += e->bytes;
        f->by_name[i].name = e->name;
        f->by_name[i].index = i;
    }
    if (at != f->data_size)
        return te__st_fail(f, TE_ERR_FORMAT, "the tensors end at byte %llu of the data, the file has %llu bytes of it",
                           (unsigned long long)at, (unsigned long long)f->data_size);
    qsort(f->by_name, (size_t)f->num_entries, sizeof(te__st_name), te__st_by_name);
    for (i = 1; i < f->num_entries; i++)
        if (strcmp(f->by_name[i - 1].name, f->by_name[i].name) == 0)
            return te__st_fail(f, TE_ERR_FORMAT, "tensor " TE__ST_NAME " is there twice", f->by_name[i].name);
    for (i = 1; i < f->num_metadata; i++)
        if (strcmp(f->metadata[i - 1].key, f->metadata[i].key) == 0)
            return te__st_fail(f, TE_ERR_FORMAT, "metadata key " TE__ST_NAME " is there twice", f->metadata[i].key);
    return true;
}

static bool te__st_parse_header(te_safetensors *f) {
    te__json j = te__json_of(f->te, f->path, "the header", f->header, f->header_size);
    const char *name;
    bool metadata_seen = false;
    if (*j.at != '{')
        return te__st_fail(f, TE_ERR_FORMAT, "the header does not begin with '{': this is not a safetensors file");
    for (name = te__json_first(&j); name; name = te__json_next(&j)) {
        if (strcmp(name, "__metadata__") != 0) {
            if (!te__st_parse_entry(f, &j, name)) return false;
        } else {
            if (metadata_seen) return te__st_fail(f, TE_ERR_FORMAT, "\"__metadata__\" is there twice");
            metadata_seen = true;
            if (!te__st_parse_metadata(f, &j)) return false;
        }
    }
    return te__json_end(&j);
}

/* Reads the length of the header, and the header. */
static bool te__st_read_header(te_safetensors *f, te__text *why) {
    unsigned char raw[8];
    uint64_t size = te__file_size(&f->file), length = 0;
    int i;
    if (size < 8)
        return te__st_fail(f, TE_ERR_FORMAT, "%llu bytes; a safetensors file has at least 8", (unsigned long long)size);
    if (!te__file_read_at(&f->file, 0, raw, 8, why)) return te__st_fail(f, TE_ERR_IO, "%s", te__text_str(why));
    for (i = 7; i >= 0; i--) length = length << 8 | raw[i];
    if (length > TE__ST_MAX_HEADER)
        return te__st_fail(f, TE_ERR_FORMAT,
                           "a header of %llu bytes is announced; %d is the most: this is not a safetensors file",
                           (unsigned long long)length, (int)TE__ST_MAX_HEADER);
    if (length > size - 8)
        return te__st_fail(f, TE_ERR_FORMAT,
                           "a header of %llu bytes is announced, but only %llu bytes follow: the file is cut short",
                           (unsigned long long)length, (unsigned long long)(size - 8));
    f->header = (char *)te__alloc(f->te, (size_t)length + 1);
    if (!f->header) return false;
    f->header_size = (size_t)length;
    f->data_start = 8 + length;
    f->data_size = size - 8 - length;
    f->header[length] = 0;
    if (!te__file_read_at(&f->file, 8, f->header, (size_t)length, why))
        return te__st_fail(f, TE_ERR_IO, "%s", te__text_str(why));
    return true;
}

/* ---- reading ---- */

static size_t te__st_staging_bytes(const te_safetensors *f) {
    return (size_t)te__min((int64_t)f->data_size, TE__ST_CHUNK);
}

TE_API void te_safetensors_close(te_safetensors *f) {
    te_ctx *te;
    if (!f) return;
    te = f->te;
    te__closable_remove(&f->closable);
    te__file_close(&f->file);
    te__free(te, f->path);
    te__free(te, f->header);
    te__free(te, f->entries);
    te__free(te, f->by_name);
    te__free(te, f->metadata);
    te__free(te, f->staging);
    te__free(te, f);
}

static void te__st_close(void *owner) { te_safetensors_close((te_safetensors *)owner); }

TE_API te_safetensors *te_safetensors_open(te_ctx *te, const char *path) {
    te_safetensors *f;
    te__text why = TE_ZERO;
    bool ok = false;
    if (!te) return NULL;
    if (!path) {
        te__fail(te, TE_ERR_INVALID, "te_safetensors_open: path is NULL");
        return NULL;
    }
    f = (te_safetensors *)te__alloc_zero(te, sizeof(te_safetensors));
    if (!f) return NULL;
    f->te = te;
    f->path = te__copy_string(te, path);
    te__temps_remove_of(path);
    if (!te__file_open(&f->file, path, &why))
        te__fail(te, TE_ERR_IO, "%s", te__text_str(&why));
    else if (f->path)
        ok = te__st_read_header(f, &why) && te__st_parse_header(f) && te__st_check_layout(f);
    te__text_free(&why);
    if (ok) {
        te__closable_add(te, &f->closable, "open file", te__st_close, f);
        return f;
    }
    te_safetensors_close(f);
    return NULL;
}

TE_API int te_safetensors_count(const te_safetensors *f) { return f ? f->num_entries : 0; }
TE_API const te_safetensors_entry *te_safetensors_at(const te_safetensors *f, int index) {
    return f && index >= 0 && index < f->num_entries ? &f->entries[index].e : NULL;
}
static const te__st_entry *te__st_find(const te_safetensors *f, const char *name) {
    te__st_name key;
    const te__st_name *found;
    key.name = name;
    key.index = 0;
    if (!f || !name || f->num_entries == 0) return NULL;
    found = (const te__st_name *)bsearch(&key, f->by_name, (size_t)f->num_entries, sizeof(key), te__st_by_name);
    return found ? &f->entries[found->index] : NULL;
}
TE_API const te_safetensors_entry *te_safetensors_find(const te_safetensors *f, const char *name) {
    const te__st_entry *x = te__st_find(f, name);
    return x ? &x->e : NULL;
}
TE_API const char *te_safetensors_metadata(const te_safetensors *f, const char *key) {
    te_metadata want;
    const te_metadata *found;
    want.key = key;
    want.value = NULL;
    if (!f || !key || f->num_metadata == 0) return NULL;
    found = (const te_metadata *)bsearch(&want, f->metadata, (size_t)f->num_metadata, sizeof(want), te__st_by_key);
    return found ? found->value : NULL;
}

/* Returns the entry `name` if te.h supports its dtype. Otherwise returns NULL and sets an error. */
static const te__st_entry *te__st_readable(te_safetensors *f, const char *name) {
    const te__st_entry *x = te__st_find(f, name);
    if (!x) {
        te__st_fail(f, TE_ERR_INVALID, "there is no tensor " TE__ST_NAME, name ? name : "(NULL)");
    } else if (x->type->dtype == TE_DTYPE_NONE) {
        te__st_fail(f, TE_ERR_UNSUPPORTED, "tensor " TE__ST_NAME " is %s, and te.h has no such tensors", name,
                    x->type->name);
    } else if (te__shape_bytes(x->e.dtype, x->e.ndim, x->e.shape) != x->e.bytes) {
        te__st_fail(f, TE_ERR_UNSUPPORTED,
                    "tensor " TE__ST_NAME " is %s with rows of odd length, which te.h pads and the file does not", name,
                    x->type->name);
    } else {
        return x;
    }
    return NULL;
}

/* Allocates the staging memory once. Reading into existing tensors needs no other memory. On failure sets an error and
 * returns false. */
static bool te__st_stage(te_safetensors *f) {
    if (!f->staging) f->staging = te__alloc(f->te, te__st_staging_bytes(f));
    return f->staging != NULL;
}

/* Reads `n` bytes of an entry, from byte `from` on, into a contiguous tensor, from byte `at` on. */
static te_result te__st_load_part(te_safetensors *f, const te__st_entry *x, uint64_t from, te_tensor *dst, uint64_t at,
                                  uint64_t n) {
    te_ctx *te = f->te;
    te__text why = TE_ZERO;
    te_result result = TE_OK;
    size_t chunk = (size_t)te__min((int64_t)n, TE__ST_CHUNK);
    uint64_t done;
    if (!te__st_stage(f)) return TE_ERR_OUT_OF_MEMORY;
    for (done = 0; done < n && result == TE_OK; done += chunk) {
        if (chunk > n - done) chunk = (size_t)(n - done);
        if (te__file_read_at(&f->file, f->data_start + x->e.offset + from + done, f->staging, chunk, &why)) {
            result = te->device->upload(te, (char *)te__data(dst) + at + done, f->staging, chunk);
        } else {
            te__st_fail(f, TE_ERR_IO, "tensor " TE__ST_NAME ": %s", x->e.name, te__text_str(&why));
            result = TE_ERR_IO;
        }
    }
    te__text_free(&why);
    return result;
}
/* Reads the bytes of an entry into a contiguous tensor of the same size. */
static te_result te__st_load(te_safetensors *f, const te__st_entry *x, te_tensor *dst) {
    if (!te__st_stage(f)) return TE_ERR_OUT_OF_MEMORY;
    te__touch(dst);
    return te__st_load_part(f, x, 0, dst, 0, x->e.bytes);
}

TE_API te_tensor *te_safetensors_read(te_safetensors *f, const char *name) {
    const te__st_entry *x;
    te_tensor *y;
    if (!f) return NULL;
    x = te__st_readable(f, name);
    y = x ? te_tensor_empty(f->te, x->e.dtype, x->e.ndim, x->e.shape) : NULL;
    return y ? te__checked(y, te__st_load(f, x, y)) : NULL;
}

/* Checks that the entry `name` can be read into dst: same context, shape and format. */
static te_result te__st_fits(te_safetensors *f, const char *name, const te_tensor *dst) {
    const te__st_entry *x = te__st_readable(f, name);
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    int i;
    bool same;
    if (!x) return te_error_code(f->te);
    if (dst->te != f->te || !dst->buffer) {
        te__st_fail(f, TE_ERR_INVALID, "tensor " TE__ST_NAME " cannot be read into a tensor %s", name,
                    dst->te != f->te ? "of another context" : "that is quantized or has no memory");
        return TE_ERR_INVALID;
    }
    same = x->e.ndim == dst->ndim;
    for (i = 0; same && i < dst->ndim; i++) same = x->e.shape[i] == dst->shape[i];
    if (!same) {
        te__st_fail(f, TE_ERR_SHAPE, "tensor " TE__ST_NAME " is %s in the file and %s here", name,
                    te__dims_text(x->e.ndim, x->e.shape, a), te__shape_text(dst, b));
        return TE_ERR_SHAPE;
    }
    if (x->e.dtype != dst->dtype) {
        te__st_fail(f, TE_ERR_DTYPE, "tensor " TE__ST_NAME " is %s in the file and %s here", name,
                    te_dtype_name(x->e.dtype), te_dtype_name(dst->dtype));
        return TE_ERR_DTYPE;
    }
    return TE_OK;
}

TE_API te_result te_safetensors_read_into(te_safetensors *f, const char *name, te_tensor *dst) {
    te_result result;
    if (!f || !dst) return TE_ERR_STATE;
    result = te__st_fits(f, name, dst);
    if (result != TE_OK) return result;
    if (te__is_contiguous(dst)) return te__st_load(f, te__st_find(f, name), dst);
    te__frame_begin(f->te);
    result = te_tensor_copy(dst, te_safetensors_read(f, name));
    te__frame_end(f->te, NULL, 0);
    return result;
}

/* ---- writing ---- */

/* One entry of a file to be written: a tensor, or bytes in host memory that were copied from another file. */
typedef struct te__st_part {
    const char *name; /* `name` and `data` are owned if te__st_keep has filled this part; otherwise they are borrowed */
    const te__st_dtype *type;
    int ndim;
    int64_t shape[TE_MAX_DIMS];
    uint64_t bytes;
    uint64_t at;             /* te__st_place: the first byte in the file */
    const te_tensor *tensor; /* NULL: `data` has the bytes */
    void *data;
} te__st_part;

/* Frees parts that te__st_keep has filled, and the list of these parts. */
static void te__st_free_kept(te_ctx *te, te__st_part *list, int n) {
    int i;
    for (i = 0; i < n; i++) {
        te__free(te, (char *)(uintptr_t)list[i].name);
        te__free(te, list[i].data);
    }
    te__free(te, list);
}
/* Copies tensor number `index` of a file into the part `to`. The caller sets the part to zero before the call, and
 * frees it with te__st_free_kept even after an error. */
static bool te__st_keep(te_safetensors *f, int index, te__st_part *to) {
    const te__st_entry *x = &f->entries[index];
    te__text why = TE_ZERO;
    bool fine;
    to->name = te__copy_string(f->te, x->e.name);
    to->type = x->type;
    to->ndim = x->e.ndim;
    memcpy(to->shape, x->e.shape, sizeof(to->shape));
    to->bytes = x->e.bytes;
    if (to->bytes > SIZE_MAX / 2)
        return te__st_fail(f, TE_ERR_OUT_OF_MEMORY, "tensor " TE__ST_NAME " has %llu bytes", x->e.name,
                           (unsigned long long)to->bytes);
    to->data = to->name ? te__alloc(f->te, (size_t)to->bytes) : NULL;
    if (!to->data) return false;
    fine = te__file_read_at(&f->file, f->data_start + x->e.offset, to->data, (size_t)to->bytes, &why);
    if (!fine) te__fail(f->te, TE_ERR_IO, "%s", te__text_str(&why));
    te__text_free(&why);
    return fine;
}

/* Orders parts by descending element width, as the reference implementation does, so that each tensor is aligned.
 * Orders parts of one width by name, so that equal content gives equal files. */
static int te__st_by_width(const void *a, const void *b) {
    const te__st_part *x = (const te__st_part *)a, *y = (const te__st_part *)b;
    int wide = y->type->bits - x->type->bits;
    return wide ? wide : strcmp(x->name, y->name);
}

static int te__st_by_part_name(const void *a, const void *b) {
    return strcmp(((const te__st_part *)a)->name, ((const te__st_part *)b)->name);
}

static te_result te__st_item_ok(te_ctx *te, const char *path, const te_safetensors_item *item) {
    const te_tensor *x = item->tensor;
    if (!item->name || !x)
        return te__fail(te, TE_ERR_INVALID, "%s: an item without %s", path, item->name ? "a tensor" : "a name");
    if (strcmp(item->name, "__metadata__") == 0 || !te__is_utf8(item->name))
        return te__fail(te, TE_ERR_INVALID, "%s: " TE__ST_NAME " cannot be the name of a tensor: %s", path, item->name,
                        te__is_utf8(item->name) ? "the format reserves it" : "it is not UTF-8");
    if (x->te != te)
        return te__fail(te, TE_ERR_INVALID, "%s: tensor " TE__ST_NAME " belongs to another context", path, item->name);
    if (!x->buffer)
        return te__fail(te, TE_ERR_INVALID, "%s: tensor " TE__ST_NAME " %s", path, item->name,
                        x->quantized ? "is quantized: te_dequantize it first" : te__no_memory_why(x));
    if (te__shape_bytes(x->dtype, x->ndim, x->shape) * 8 != (uint64_t)te__numel(x) * (uint64_t)te_dtype_bits(x->dtype))
        return te__fail(te, TE_ERR_UNSUPPORTED,
                        "%s: tensor " TE__ST_NAME " has %s rows of odd length, which the format cannot hold", path,
                        item->name, te_dtype_name(x->dtype));
    return TE_OK;
}

static void te__st_put_header(te__text *t, const te__st_part *parts, int num_parts, const te_metadata *metadata,
                              int num_metadata) {
    uint64_t at = 0;
    int i, k;
    te__text_put(t, "{");
    if (num_metadata > 0) te__text_put(t, "\"__metadata__\":{");
    for (i = 0; i < num_metadata; i++) {
        if (i) te__text_put(t, ",");
        te__json_put_string(t, metadata[i].key);
        te__text_put(t, ":");
        te__json_put_string(t, metadata[i].value);
    }
    if (num_metadata > 0) te__text_put(t, num_parts ? "}," : "}");
    for (i = 0; i < num_parts; i++) {
        const te__st_part *x = &parts[i];
        if (i) te__text_put(t, ",");
        te__json_put_string(t, x->name);
        te__text_printf(t, ":{\"dtype\":\"%s\",\"shape\":[", x->type->name);
        for (k = 0; k < x->ndim; k++) te__text_printf(t, k ? ",%lld" : "%lld", (long long)x->shape[k]);
        te__text_printf(t, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at,
                        (unsigned long long)(at + x->bytes));
        at += x->bytes;
    }
    te__text_put(t, "}");
    while (t->n % 8 && !t->oom) te__text_put(t, " ");
}

/* Writes one tensor chunk by chunk. `out` remembers a failed write. */
static te_result te__st_store(te_ctx *te, te__file_out *out, const te_tensor *x, void *staging) {
    te_result result = TE_OK;
    const te_tensor *flat = x;
    size_t size = te_tensor_bytes(x), done, chunk = TE__ST_CHUNK;
    te__frame_begin(te);
    if (!te__is_contiguous(x)) flat = te__copied(x, x->dtype);
    if (!flat) result = te_error_code(te);
    for (done = 0; done < size && result == TE_OK && !out->failed; done += chunk) {
        if (chunk > size - done) chunk = size - done;
        result = te->device->download(te, staging, (const char *)te__data(flat) + done, chunk);
        if (result == TE_OK) te__file_out_write(out, staging, chunk);
    }
    te__frame_end(te, NULL, 0);
    return result;
}

/* Renames the temporary file to its final name, or removes it if something failed. Frees `why`. */
static te_result te__st_end(te_ctx *te, te__file_out *out, te__text *why, te_result result) {
    if (result != TE_OK)
        te__file_out_abort(out);
    else if (!te__file_out_commit(out))
        result = te__fail(te, TE_ERR_IO, "%s; what was there before is untouched", te__text_str(why));
    te__text_free(why);
    return result;
}

/* Makes the header of a file with these parts, which follow each other in this order. `function` is named in errors. */
static te_result te__st_make_header(te_ctx *te, const char *function, te__text *header, const te__st_part *parts, int n,
                                    const te_metadata *metadata, int num_metadata) {
    header->memory = &te->host_allocator;
    te__st_put_header(header, parts, n, metadata, num_metadata);
    if (header->oom) return te__fail(te, TE_ERR_OUT_OF_MEMORY, "%s: the header: %s", function, te__no_memory_text);
    if (header->n > TE__ST_MAX_HEADER)
        return te__fail(te, TE_ERR_INVALID, "%s: a header of %llu bytes; readers accept %d", function,
                        (unsigned long long)header->n, (int)TE__ST_MAX_HEADER);
    return TE_OK;
}
/* Begins a file under a temporary name: the header and its length. The data follow. */
static void te__st_begin(te__file_out *out, const char *path, te__text *why, const te__text *header) {
    unsigned char raw[8];
    int i;
    for (i = 0; i < 8; i++) raw[i] = (unsigned char)((uint64_t)header->n >> (8 * i));
    te__file_out_begin(out, path, why);
    te__file_out_write(out, raw, 8);
    te__file_out_write(out, header->s, header->n);
}
/* Writes header and data to a temporary file, then renames it to its final name. `parts` must be sorted and valid. */
static te_result te__st_write(te_ctx *te, const char *path, const te__st_part *parts, int num_parts,
                              const te__text *header) {
    te__file_out out;
    te__text why = TE_ZERO;
    te_result result = TE_OK;
    int i;
    void *staging = te__alloc(te, TE__ST_CHUNK);
    if (!staging) return TE_ERR_OUT_OF_MEMORY;
    te__st_begin(&out, path, &why, header);
    for (i = 0; i < num_parts && result == TE_OK && !out.failed; i++) {
        if (parts[i].tensor) result = te__st_store(te, &out, parts[i].tensor, staging);
        else te__file_out_write(&out, parts[i].data, (size_t)parts[i].bytes);
    }
    te__free(te, staging);
    return te__st_end(te, &out, &why, result);
}
/* Fills in a part that is a tensor of `dtype`. */
static void te__st_describe(te__st_part *x, const char *name, te_dtype dtype, int ndim, const int64_t *shape) {
    int k = 0;
    while (te__st_dtypes[k].dtype != dtype) k++;
    x->name = name;
    x->type = &te__st_dtypes[k];
    x->ndim = ndim;
    memcpy(x->shape, shape, (size_t)ndim * sizeof(int64_t));
    x->bytes = te__shape_bytes(dtype, ndim, shape);
}

/* Checks that no two parts have one name. Sorts them. */
static te_result te__st_names_differ(te_ctx *te, const char *path, te__st_part *parts, int n) {
    int i;
    if (n) qsort(parts, (size_t)n, sizeof(*parts), te__st_by_part_name);
    for (i = 1; i < n; i++)
        if (strcmp(parts[i - 1].name, parts[i].name) == 0)
            return te__fail(te, TE_ERR_INVALID, "%s: tensor " TE__ST_NAME " is given twice", path, parts[i].name);
    return TE_OK;
}
/* Notes where the parts, in this order, lie in a file. */
static void te__st_place(te__st_part *parts, int n, const te__text *header) {
    uint64_t at = 8 + (uint64_t)header->n;
    int i;
    for (i = 0; i < n; i++) {
        parts[i].at = at;
        at += parts[i].bytes;
    }
}
/* Returns the part with this name of parts that are sorted by name. */
static const te__st_part *te__st_part_named(const te__st_part *parts, int n, const char *name) {
    te__st_part want;
    want.name = name;
    return n ? (const te__st_part *)bsearch(&want, parts, (size_t)n, sizeof(want), te__st_by_part_name) : NULL;
}
/* Sorts the parts, which must be valid, and writes them. */
static te_result te__st_write_parts(te_ctx *te, const char *path, te__st_part *parts, int n,
                                    const te_metadata *metadata, int num_metadata) {
    te__text header = TE_ZERO;
    te_result result = te__st_names_differ(te, path, parts, n);
    if (n) qsort(parts, (size_t)n, sizeof(*parts), te__st_by_width);
    if (result == TE_OK) result = te__st_make_header(te, path, &header, parts, n, metadata, num_metadata);
    if (result == TE_OK) result = te__st_write(te, path, parts, n, &header);
    te__text_free(&header);
    return result;
}
/* Writes tensors, without a check of the metadata. */
static te_result te__st_write_items(te_ctx *te, const char *path, const te_safetensors_item *items, int num_items,
                                    const te_metadata *metadata, int num_metadata) {
    te__st_part *parts;
    te_result result = TE_OK;
    int i;
    /* An earlier error may have left tensors incomplete. They must not replace a good file. */
    if (te->error_code != TE_OK) return te->error_code;
    for (i = 0; i < num_items && result == TE_OK; i++) result = te__st_item_ok(te, path, &items[i]);
    if (result != TE_OK) return result;
    parts = (te__st_part *)te__alloc_zero(te, (size_t)num_items * sizeof(te__st_part));
    if (!parts) return TE_ERR_OUT_OF_MEMORY;
    for (i = 0; i < num_items; i++) {
        const te_tensor *x = items[i].tensor;
        te__st_describe(&parts[i], items[i].name, x->dtype, x->ndim, x->shape);
        parts[i].tensor = x;
    }
    result = te__st_write_parts(te, path, parts, num_items, metadata, num_metadata);
    te__free(te, parts);
    return result;
}

/* Checks metadata of the caller. */
static te_result te__st_metadata_ok(te_ctx *te, const char *path, const te_metadata *metadata, int n) {
    int i, k;
    for (i = 0; i < n; i++) {
        if (!metadata[i].key || !metadata[i].value || !te__is_utf8(metadata[i].key) || !te__is_utf8(metadata[i].value))
            return te__fail(te, TE_ERR_INVALID, "%s: metadata entry %d is not two texts in UTF-8", path, i);
        for (k = 0; k < i; k++)
            if (strcmp(metadata[k].key, metadata[i].key) == 0)
                return te__fail(te, TE_ERR_INVALID, "%s: metadata key " TE__ST_NAME " is given twice", path,
                                metadata[i].key);
    }
    return TE_OK;
}
TE_API te_result te_safetensors_write(te_ctx *te, const char *path, const te_safetensors_item *items, int num_items,
                                      const te_metadata *metadata, int num_metadata) {
    if (te_error_code(te) != TE_OK) return te_error_code(te);
    if (!path || num_items < 0 || num_metadata < 0 || (num_items && !items) || (num_metadata && !metadata))
        return te__fail(te, TE_ERR_INVALID, "te_safetensors_write: path, items or metadata is missing");
    if (te__st_metadata_ok(te, path, metadata, num_metadata) != TE_OK) return te_error_code(te);
    return te__st_write_items(te, path, items, num_items, metadata, num_metadata);
}

/* ---- lists of tensors to write ---- */

/* Tensors to write to a file. The list owns their names. */
typedef struct te__st_list {
    te_ctx *te;
    te_safetensors_item *items;
    int n, cap;
} te__st_list;

static bool te__st_list_put(te__st_list *l, const char *name, te_tensor *x) {
    if (!te__grow(l->te, (void **)&l->items, &l->cap, l->n, sizeof(te_safetensors_item))) return false;
    l->items[l->n].name = te__copy_string(l->te, name);
    l->items[l->n].tensor = x;
    return l->items[l->n].name && l->items[l->n++].tensor;
}
/* A visitor for te_module_visit_tensors. Adds the parameter x, under the name `path`, to the te__st_list `user`.
 * Decodes x first if it is quantized. */
static bool te__st_list_add(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)m;
    return kind != TE_ENTRY_PARAMETER ||
           te__st_list_put((te__st_list *)user, path, x->quantized ? te_dequantize(x, TE_DTYPE_NONE) : x);
}
static void te__st_list_free(te__st_list *l) {
    int i;
    for (i = 0; i < l->n; i++) te__free(l->te, (char *)l->items[i].name);
    te__free(l->te, l->items);
}
