/* cuda/kernels.c: the source text of every kernel, and its "// te:" marks. File paths are relative to src/. This file
 * must not depend on the driver or NVRTC. */

typedef struct te__source {
    const char *path; /* below src/ */
    const char *const *lines;
    int num_lines;
} te__source;
#include "te_sources.inc"


/* ---- files --------------------------------------------------------------------------------------------------- */

typedef struct te__kernels {
    te__kernel_file *files;
    int num_files;
    te__text embedded, replaced; /* the memory of the files' texts */
} te__kernels;

enum { TE__KERNELS_FILE_LIMIT = 64 << 20 };

static void te__kernels_close(te__kernels *k) {
    if (!k) return;
    free(k->files);
    te__text_free(&k->embedded);
    te__text_free(&k->replaced);
    free(k);
}

static const te__kernel_file *te__kernels_find(const te__kernels *k, const char *path) {
    for (int i = 0; i < k->num_files; i++)
        if (strcmp(k->files[i].path, path) == 0) return &k->files[i];
    return NULL;
}

/* `text` is the content of a te_kernels.cu.inc file. Each section of `text` replaces the embedded file that has the
 * section's path. Modifies `text`; k keeps pointers into it. */
static bool te__kernels_replace(te__kernels *k, char *text, te__text *why) {
    static const char mark[] = "//// file: ";
    const size_t mark_size = sizeof(mark) - 1;
    int sections = 0;
    for (char *at = text, *next; at; at = next) {
        char *end = strchr(at, '\n');
        te__kernel_file *file;
        next = end ? end + 1 : NULL;
        if (!next || strncmp(at, mark, mark_size) != 0) continue;
        *at = 0; /* ends the previous section */
        *end = 0;
        if (end[-1] == '\r') end[-1] = 0;
        file = (te__kernel_file *)te__kernels_find(k, at + mark_size);
        if (!file && k->num_files < 2 * TE__COUNT(te__sources)) { /* a new file, such as a header */
            file = &k->files[k->num_files++];
            file->path = at + mark_size;
        }
        if (!file) {
            te__text_put(why, "too many sections that te.h does not have");
            return false;
        }
        file->text = next;
        sections++;
    }
    if (!sections)
        te__text_put(why, "no section: te_kernels.cu.inc has lines like \"//// file: ops/norm/norm_fwd.cu\"");
    return sections > 0;
}

/* Joins the embedded lines to one text per file. `replacement` is NULL or the path of a te_kernels.cu.inc file. On
 * failure returns NULL and writes the reason to `why`. */
static te__kernels *te__kernels_open(const char *replacement, te__text *why) {
    te__kernels *k = (te__kernels *)calloc(1, sizeof(te__kernels));
    size_t used = 0;
    if (!k) {
        te__text_put(why, "the kernels' text: out of host memory");
        return NULL;
    }
    for (int i = 0; i < TE__COUNT(te__sources); i++) {
        for (int j = 0; j < te__sources[i].num_lines; j++) {
            te__text_put(&k->embedded, te__sources[i].lines[j]);
            te__text_put(&k->embedded, "\n");
        }
        te__text_add(&k->embedded, "", 1);
    }
    k->files = (te__kernel_file *)calloc((size_t)(2 * TE__COUNT(te__sources)), sizeof(te__kernel_file));
    if (!k->files || k->embedded.oom) {
        te__text_put(why, "the kernels' text: out of host memory");
        te__kernels_close(k);
        return NULL;
    }
    for (int i = 0; i < TE__COUNT(te__sources); i++) {
        k->files[i].path = te__sources[i].path;
        k->files[i].text = k->embedded.s + used;
        used += strlen(k->files[i].text) + 1;
    }
    k->num_files = TE__COUNT(te__sources);
    if (!replacement) return k;
    if (te__file_read(replacement, TE__KERNELS_FILE_LIMIT, &k->replaced, why) &&
        te__kernels_replace(k, k->replaced.s, why))
        return k;
    te__text_put(why, " (TE_KERNELS_FILE)");
    te__kernels_close(k);
    return NULL;
}

static te__mutex te__kernels_mutex = TE__MUTEX_INIT;
static te__kernels *te__kernels_of_process;

/* Returns the kernel sources of the process. They are built once, and are never changed or freed. */
static const te__kernels *te__kernels_get(te__text *why) {
    const te__kernels *k;
    te__mutex_lock(&te__kernels_mutex);
    if (!te__kernels_of_process) te__kernels_of_process = te__kernels_open(te__env("TE_KERNELS_FILE"), why);
    k = te__kernels_of_process;
    te__mutex_unlock(&te__kernels_mutex);
    return k;
}

/* ---- marks --------------------------------------------------------------------------------------------------- */

/* Copies the value of the mark called `name`, cut to `size` bytes. A mark is a line "// te:NAME value" at the head of a
 * kernel's text. If several marks have this name, `index` (from 0) selects one. Returns false without such a mark. */
static bool te__kernel_mark(const char *text, const char *name, int index, char *value, size_t size) {
    size_t n = strlen(name);
    while (strncmp(text, "//", 2) == 0) {
        const char *end = strchr(text, '\n');
        if (!end) return false;
        if (strncmp(text, "// te:", 6) == 0 && strncmp(text + 6, name, n) == 0 &&
            (text[6 + n] == ' ' || text + 6 + n == end) && index-- == 0) {
            const char *from = text + 6 + n;
            while (*from == ' ') from++;
            snprintf(value, size, "%.*s", (int)(end - from), from);
            return true;
        }
        text = end + 1;
    }
    return false;
}

typedef struct te__kernel_marks {
    bool baseline; /* the kernel works without options and has embedded PTX */
    bool exact;    /* the kernel is only for `arch`, as in "90a" */
    int arch;      /* the lowest architecture that can run the kernel */
} te__kernel_marks;

static te__kernel_marks te__kernel_marks_of(const char *text) {
    te__kernel_marks m = TE_ZERO;
    char value[64];
    m.arch = 80;
    m.baseline = te__kernel_mark(text, "baseline", 0, value, sizeof(value));
    if (te__kernel_mark(text, "arch", 0, value, sizeof(value))) {
        char *end;
        m.arch = (int)strtol(value, &end, 10);
        m.exact = *end == 'a';
    }
    return m;
}

/* Returns whether the kernel calls te_follow (device/base.cuh) and so may be launched before the previous kernel
 * ends. The call is a statement of the kernel's top level, which every launch gets to; one inside an `if` does not
 * count. */
static bool te__kernel_follows(const char *family, const char *kernel) {
    static const char entry[] = "extern \"C\" __global__";
    te__text why = TE_ZERO;
    const te__kernels *k = te__kernels_get(&why);
    const te__kernel_file *file;
    const char *at, *next, *wait;
    char path[256];
    snprintf(path, sizeof(path), "ops/%s/%s.cu", family, kernel);
    file = k ? te__kernels_find(k, path) : NULL;
    te__text_free(&why);
    if (!file) return false;
    for (at = strstr(file->text, entry); at; at = next) { /* a file may have several entries, for different options */
        next = strstr(at + 1, entry);
        wait = strstr(at, "\n    te_follow();\n");
        if (!wait || (next && wait > next)) return false;
    }
    return true;
}

/* ---- units: a kernel and everything it includes -------------------------------------------------------------- */

enum { TE__MAX_UNIT_FILES = 32 };
typedef struct te__unit {
    const te__kernel_file *file[TE__MAX_UNIT_FILES]; /* the kernel's own file comes first */
    int num_files;
} te__unit;

/* Adds to the unit all files that u->file[index] includes, also those inside an #if. So the digest of the unit covers
 * every file that a compilation uses, and perhaps files that it does not use. */
static bool te__unit_add_includes(const te__kernels *k, te__unit *u, int index, te__text *why) {
    static const char word[] = "#include \"";
    for (const char *line = u->file[index]->text, *end; line; line = end ? end + 1 : NULL) {
        const char *from = line + sizeof(word) - 1, *quote;
        const te__kernel_file *file;
        char path[256];
        int i = 0;
        end = strchr(line, '\n');
        if (strncmp(line, word, sizeof(word) - 1) != 0 || !(quote = strchr(from, '"'))) continue;
        snprintf(path, sizeof(path), "%.*s", (int)(quote - from), from);
        file = te__kernels_find(k, path);
        if (!file || u->num_files == TE__MAX_UNIT_FILES) {
            te__text_printf(why, "src/%s includes %s, which is %s", u->file[index]->path, path,
                            file ? "one file too many" : "not there");
            return false;
        }
        while (i < u->num_files && u->file[i] != file) i++;
        if (i == u->num_files) u->file[u->num_files++] = file;
    }
    return true;
}

static bool te__unit_open(const te__kernels *k, const char *family, const char *kernel, te__unit *u, te__text *why) {
    char path[256];
    snprintf(path, sizeof(path), "ops/%s/%s.cu", family, kernel);
    u->file[0] = te__kernels_find(k, path);
    u->num_files = 1;
    if (!u->file[0]) {
        te__text_printf(why, "there is no kernel src/%s", path);
        return false;
    }
    for (int i = 0; i < u->num_files; i++)
        if (!te__unit_add_includes(k, u, i, why)) return false;
    return true;
}

/* Puts `file` in place of the unit's file with the same path. Does nothing if `file` is NULL. */
static void te__unit_replace(te__unit *u, const te__kernel_file *file) {
    for (int i = 0; file && i < u->num_files; i++)
        if (strcmp(u->file[i]->path, file->path) == 0) u->file[i] = file;
}

/* Writes the digest of a unit to `hex`. The digest depends only on the paths and texts of the unit's files. */
static void te__unit_digest(const te__unit *u, char hex[TE__DIGEST_CHARS + 1]) {
    te__hasher h;
    te__hasher_init(&h);
    for (int i = 0; i < u->num_files; i++) {
        te__hasher_string(&h, u->file[i]->path);
        te__hasher_string(&h, u->file[i]->text);
    }
    te__hasher_hex(&h, hex);
}
