/* te_pack.c: writes te.h and te_kernels.cu.inc from src/. Run it from the repository's root.
 *
 *     te_pack pack          writes both
 *     te_pack check         fails if either differs from what `pack` would write, if a part calls a function of a part that
 *                           is compiled later, or if a room stands in two places
 *     te_pack sources FILE  writes the table of kernel texts for a build that compiles src/te_parts.h directly
 *     te_pack tree          prints the rooms, their parts and how many lines each has
 *
 * Equal sources give equal bytes on every machine: no date, no path, everything in the order of te_parts.h or sorted by name. */
#define _POSIX_C_SOURCE 200809L
#include <ctype.h>
#include <dirent.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_FILES = 2048, MAX_PATH = 512, MAX_LITERAL = 16380 /* bytes: what MSVC takes */ };

/* ---- text ---------------------------------------------------------------------------------------------------- */

typedef struct text {
    char *bytes; /* ends with a 0 that `size` does not count */
    size_t size, capacity;
} text;

static void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "te_pack: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    exit(1);
}

static void put_bytes(text *t, const char *bytes, size_t size) {
    if (t->size + size + 1 > t->capacity) {
        t->capacity = 2 * (t->size + size + 1);
        t->bytes = (char *)realloc(t->bytes, t->capacity);
        if (!t->bytes) die("out of memory");
    }
    memcpy(t->bytes + t->size, bytes, size);
    t->size += size;
    t->bytes[t->size] = 0;
}

static void put(text *t, const char *format, ...) {
    char line[4096];
    va_list args;
    va_start(args, format);
    int size = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (size < 0 || size >= (int)sizeof line) die("a line of more than %d bytes: %.60s ...", (int)sizeof line, line);
    put_bytes(t, line, (size_t)size);
}

/* Whole file, line ends made \n, the last line ended. False if it cannot be opened. */
static bool read_file(const char *path, text *out) {
    FILE *f = fopen(path, "rb");
    char chunk[65536];
    size_t got;
    memset(out, 0, sizeof *out);
    put_bytes(out, "", 0);
    if (!f) return false;
    while ((got = fread(chunk, 1, sizeof chunk, f)) > 0) {
        for (size_t i = 0; i < got; i++) {
            if (chunk[i] != '\r') put_bytes(out, chunk + i, 1);
        }
    }
    fclose(f);
    if (out->size && out->bytes[out->size - 1] != '\n') put_bytes(out, "\n", 1);
    return true;
}

static bool holds(const char *path, const text *wanted) {
    text there;
    bool same = read_file(path, &there) && there.size == wanted->size && !memcmp(there.bytes, wanted->bytes, wanted->size);
    free(there.bytes);
    return same;
}

/* A file that holds these bytes already is not touched, so that make rebuilds nothing. */
static void write_file(const char *path, const text *t) {
    if (holds(path, t)) return;
    FILE *f = fopen(path, "wb");
    if (!f) die("cannot write %s", path);
    bool whole = fwrite(t->bytes, 1, t->size, f) == t->size;
    if (fclose(f) || !whole) die("cannot write all of %s", path);
}

/* The line at *at without its end; moves *at to the next one. False at the end. */
static bool next_line(const char **at, const char **line, size_t *size) {
    if (!**at) return false;
    const char *end = strchr(*at, '\n');
    *line = *at;
    *size = end ? (size_t)(end - *at) : strlen(*at);
    *at = end ? end + 1 : *at + *size;
    return true;
}

static bool starts(const char *s, const char *with) { return !strncmp(s, with, strlen(with)); }
static bool ends(const char *s, const char *with) {
    size_t n = strlen(s), m = strlen(with);
    return n >= m && !strcmp(s + n - m, with);
}

/* ---- kernel texts -------------------------------------------------------------------------------------------- */

typedef struct list {
    char *name[MAX_FILES];
    int count;
} list;

static void list_add(list *l, const char *name) {
    if (l->count == MAX_FILES) die("more than %d files", MAX_FILES);
    l->name[l->count] = (char *)malloc(strlen(name) + 1);
    if (!l->name[l->count]) die("out of memory");
    strcpy(l->name[l->count++], name);
}
static bool list_has(const list *l, const char *name) {
    for (int i = 0; i < l->count; i++) {
        if (!strcmp(l->name[i], name)) return true;
    }
    return false;
}
static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }
static void list_clear(list *l) {
    while (l->count) free(l->name[--l->count]);
}

/* The entries of src/FOLDER, as "FOLDER/NAME". */
static void list_folder(list *l, const char *folder) {
    char path[MAX_PATH];
    snprintf(path, sizeof path, "src/%s", folder);
    DIR *d = opendir(path);
    if (!d) die("no folder %s: run me from the repository's root", path);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        if (e->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        list_add(l, path);
    }
    closedir(d);
}

/* Everything that a kernel may include, and the kernels. */
static void list_kernel_files(list *files) {
    list device = {{0}, 0}, families = {{0}, 0};
    list_add(files, "api/enums.h");
    list_add(files, "base/numbers.h");
    list_add(files, "base/philox.h");
    list_add(files, "base/scaling.h");
    list_add(files, "base/sequences.h");
    list_add(files, "base/outside.h");
    list_folder(&device, "device");
    for (int i = 0; i < device.count; i++) {
        if (ends(device.name[i], ".cuh")) list_add(files, device.name[i]);
    }
    list_folder(&families, "ops");
    for (int i = 0; i < families.count; i++) {
        const char *family = families.name[i];
        if (strchr(family + 4, '.')) continue; /* a file, such as ops/table.c */
        list parts = {{0}, 0};
        list_folder(&parts, family);
        for (int k = 0; k < parts.count; k++) {
            const char *p = parts.name[k];
            if (ends(p, ".h") || ends(p, ".cu") || ends(p, ".cuh")) list_add(files, p);
        }
        list_clear(&parts);
    }
    qsort(files->name, (size_t)files->count, sizeof files->name[0], by_name);
    list_clear(&device);
    list_clear(&families);
}

static void read_part(const char *part, const char *named_by, text *out) {
    char path[MAX_PATH + 8];
    snprintf(path, sizeof path, "src/%s", part);
    if (!read_file(path, out)) die("%s does not exist; %s names it", path, named_by);
}

static void put_literal(text *out, const char *line, size_t size) {
    put(out, "    \"");
    for (size_t i = 0; i < size; i++) {
        unsigned char c = (unsigned char)line[i];
        if (c == '"' || c == '\\') put(out, "\\%c", c);
        else if (c == '?' && i && line[i - 1] == '?') put(out, "\\?"); /* no trigraph */
        else if (c == '\t') put(out, "\\t");
        else if (c < 32 || c > 126) put(out, "\\%03o", c);
        else put_bytes(out, line + i, 1);
    }
    put(out, "\",\n");
}

/* te__sources: the type is cuda/kernels.c's. */
static void put_sources(text *out) {
    list files = {{0}, 0};
    text table = {0};
    list_kernel_files(&files);
    put(&table, "static const te__source te__sources[] = {\n");
    for (int i = 0; i < files.count; i++) {
        text part;
        const char *line;
        size_t size;
        int lines = 0;
        read_part(files.name[i], "the list of kernels", &part);
        put(out, "static const char *const te__source_%d[] = { /* %s */\n", i, files.name[i]);
        for (const char *at = part.bytes; next_line(&at, &line, &size); lines++) put_literal(out, line, size);
        if (!lines) die("src/%s is empty", files.name[i]);
        put(out, "};\n");
        put(&table, "    {\"%s\", te__source_%d, %d},\n", files.name[i], i, lines);
        free(part.bytes);
    }
    put(&table, "};\n");
    put_bytes(out, table.bytes, table.size);
    free(table.bytes);
    list_clear(&files);
}

static void put_kernels_file(text *out) {
    list files = {{0}, 0};
    list_kernel_files(&files);
    put(out, "// te_kernels.cu.inc: every kernel of te.h and what kernels include, file by file. Generated from src/ by `make pack`.\n"
             "// TE_KERNELS_FILE=<a copy of this file> makes te.h compile the kernels of that copy.\n");
    for (int i = 0; i < files.count; i++) {
        text part;
        read_part(files.name[i], "the list of kernels", &part);
        put(out, "//// file: %s\n", files.name[i]);
        put_bytes(out, part.bytes, part.size);
        free(part.bytes);
    }
    list_clear(&files);
}

/* A quoted include: its name, or false. */
static bool private_include(const char *line, size_t size, char name[MAX_PATH]) {
    size_t i = 0;
    while (i < size && isspace((unsigned char)line[i])) i++;
    if (i == size || line[i++] != '#') return false;
    while (i < size && isspace((unsigned char)line[i])) i++;
    if (!starts(line + i, "include")) return false;
    for (i += 7; i < size && isspace((unsigned char)line[i]);) i++;
    if (i == size || line[i++] != '"') return false;
    const char *end = (const char *)memchr(line + i, '"', size - i);
    if (!end || end - (line + i) >= MAX_PATH) return false;
    snprintf(name, MAX_PATH, "%.*s", (int)(end - (line + i)), line + i);
    return true;
}

/* ---- descs by reference, for C++ ----------------------------------------------------------------------------- */

/* The text with comments and preprocessor lines blanked. */
static void blank_comments(text *t) {
    bool at_line_start = true;
    for (char *p = t->bytes; *p;) {
        if (starts(p, "/*")) {
            char *end = strstr(p + 2, "*/");
            if (!end) die("a comment without an end");
            while (p < end + 2) *p++ = ' ';
        } else if (starts(p, "//")) {
            while (*p && *p != '\n') *p++ = ' ';
        } else if (at_line_start && *p == '#') {
            for (; *p && *p != '\n'; p++) {
                if (*p == '\\' && p[1] == '\n') *p++ = ' ';
                *p = ' ';
            }
        } else {
            if (*p == '\n') at_line_start = true;
            else if (!isspace((unsigned char)*p)) at_line_start = false;
            p++;
        }
    }
}

/* "const te_linear_desc *desc" has the type's end at `star`. */
static bool is_desc_parameter(const char *p, size_t size, size_t *star) {
    char copy[256];
    if (size >= sizeof copy) return false;
    memcpy(copy, p, size);
    copy[size] = 0;
    char *at = strchr(copy, '*');
    if (!starts(copy, "const te_") || !at || strchr(at + 1, '*')) return false;
    *star = (size_t)(at - copy);
    *at = 0;
    while (at > copy && at[-1] == ' ') *--at = 0;
    return (ends(copy, "_desc") && !strcmp(copy + *star + 1, "desc")) || (ends(copy, "_args") && !strcmp(copy + *star + 1, "args"));
}

/* One declaration, "te_module *te_linear_create(te_ctx *te, const te_linear_desc *desc)", white space folded. */
static void put_overload(text *out, const char *declaration) {
    const char *open = strchr(declaration, '('), *name = open;
    if (!open) return;
    while (name > declaration && (isalnum((unsigned char)name[-1]) || name[-1] == '_')) name--;
    text parameters = {0}, arguments = {0};
    bool found = false;
    const char *p = open + 1;
    for (int depth = 0; *p && *p != ')';) {
        const char *end = p;
        while (*end && !(depth == 0 && (*end == ',' || *end == ')'))) depth += *end == '(' ? 1 : *end == ')' ? -1 : 0, end++;
        size_t size = (size_t)(end - p), star = 0;
        const char *word = end;
        while (word > p && (isalnum((unsigned char)word[-1]) || word[-1] == '_')) word--;
        bool desc = is_desc_parameter(p, size, &star);
        const char *comma = parameters.size ? ", " : "";
        if (desc) put(&parameters, "%s%.*s&%.*s", comma, (int)star, p, (int)(size - star - 1), p + star + 1);
        else put(&parameters, "%s%.*s", comma, (int)size, p);
        put(&arguments, "%s%s%.*s", comma, desc ? "&" : "", (int)(end - word), word);
        found |= desc;
        p = *end == ',' ? end + 1 : end;
        while (*p == ' ') p++;
    }
    if (found) {
        put(out, "static inline %.*s(%s) { return %.*s(%s); }\n", (int)(open - declaration), declaration, parameters.bytes,
            (int)(open - name), name, arguments.bytes);
    }
    free(parameters.bytes);
    free(arguments.bytes);
}

static bool line_has(const char *line, size_t size, const char *word) {
    for (size_t i = 0; i + strlen(word) <= size; i++)
        if (!strncmp(line + i, word, strlen(word))) return true;
    return false;
}

/* The condition under which a part is there, by the lines of te_parts.h around its include: "#ifndef TE_NO_LM", or "". */
static void find_wing(const char *part, char wing[MAX_PATH]) {
    text contents;
    const char *line;
    size_t size;
    wing[0] = 0;
    read_part("te_parts.h", "te_pack", &contents);
    for (const char *at = contents.bytes; next_line(&at, &line, &size);) {
        char name[MAX_PATH];
        if (starts(line, "#if") && line_has(line, size, "TE_NO_")) snprintf(wing, MAX_PATH, "%.*s", (int)size, line);
        else if (starts(line, "#endif") && wing[0]) wing[0] = 0;
        else if (private_include(line, size, name) && !strcmp(name, part)) break;
    }
    free(contents.bytes);
}

static void put_overloads(text *out, const list *parts) {
    put(out, "\n/* C++ has no address of a compound literal: descs and args by reference. */\n"
             "#if defined(__cplusplus) && (!defined(TE_STATIC) || defined(TE_IMPLEMENTATION))\n");
    for (int i = 0; i < parts->count; i++) {
        text part, overloads = {0};
        char wing[MAX_PATH];
        if (!starts(parts->name[i], "api/")) continue;
        read_part(parts->name[i], "src/te_parts.h", &part);
        blank_comments(&part);
        for (const char *at = part.bytes; (at = strstr(at, "TE_API ")) != NULL;) {
            char declaration[2048];
            size_t size = 0;
            for (at += 7; *at && *at != ';' && size + 1 < sizeof declaration; at++) {
                if (!isspace((unsigned char)*at)) declaration[size++] = *at;
                else if (size && declaration[size - 1] != ' ') declaration[size++] = ' ';
            }
            declaration[size] = 0;
            put_overload(&overloads, declaration);
        }
        find_wing(parts->name[i], wing);
        if (overloads.size && wing[0]) put(out, "%s\n", wing);
        if (overloads.size) put_bytes(out, overloads.bytes, overloads.size);
        if (overloads.size && wing[0]) put(out, "#endif\n");
        free(overloads.bytes);
        free(part.bytes);
    }
    put(out, "#define TE_OP_OVERLOAD(lower, UPPER, family) \\\n"
             "    static inline te_result te_op_##lower(te_ctx *te, const te_op_##lower##_args &args) { return te_op_##lower(te, &args); }\n"
             "TE_OP_LIST(TE_OP_OVERLOAD)\n#undef TE_OP_OVERLOAD\n#endif\n\n");
}

/* ---- te.h ---------------------------------------------------------------------------------------------------- */

/* Where a private include leads: beside the part that has it, or below src/. */
static bool find_part(const char *includer, const char *name, char part[MAX_PATH]) {
    const char *slash = strrchr(includer, '/');
    char path[MAX_PATH + 8];
    for (int below_src = slash ? 0 : 1; below_src < 2; below_src++) {
        int folder = below_src ? 0 : (int)(slash + 1 - includer);
        int size = snprintf(part, MAX_PATH, "%.*s%s", folder, includer, name);
        if (size < 0 || size >= MAX_PATH) return false;
        snprintf(path, sizeof path, "src/%s", part);
        FILE *f = fopen(path, "rb");
        if (!f) continue;
        fclose(f);
        return true;
    }
    return false;
}

static void put_banner(text *out, const char *part) {
    put(out, "/* ==== %s ", part);
    for (size_t i = strlen(part); i < 106; i++) put(out, "=");
    put(out, " */\n\n");
}

/* Puts `part`, from `from`, and what it includes. */
static void put_part(text *out, list *done, const char *part, const char *from) {
    const char *line;
    size_t size;
    int number = 0;
    for (const char *at = from; next_line(&at, &line, &size);) {
        char name[MAX_PATH], inner[MAX_PATH], named_by[2 * MAX_PATH];
        number++;
        if (size >= 12 && !strncmp(line, "#pragma once", 12)) continue; /* for the kernels' compiler */
        if (!private_include(line, size, name)) {
            if (!strcmp(part, "te_parts.h") && starts(line, "#endif /* TE_H_INCLUDED")) put_overloads(out, done);
            put_bytes(out, line, size);
            put(out, "\n");
            continue;
        }
        if (!strcmp(name, "te_sources.inc")) {
            put_sources(out);
            continue;
        }
        snprintf(named_by, sizeof named_by, "src/%s (line %d)", part, number);
        if (!find_part(part, name, inner)) die("part %s does not exist; %s names it", name, named_by);
        if (list_has(done, inner)) continue;
        list_add(done, inner);
        text body;
        read_part(inner, named_by, &body);
        if (strstr(body.bytes, "TE_IMPLEMENTATION") && starts(inner, "api/") && !ends(inner, "manual.h"))
            die("src/%s depends on TE_IMPLEMENTATION: no switch may change the public half", inner);
        put_banner(out, inner);
        put_part(out, done, inner, body.bytes);
        put(out, "\n");
        free(body.bytes);
    }
}

/* Adjacent literals are one to the compiler. Preprocessor lines and comments are skipped. */
static void check_literals(const text *t) {
    size_t length = 0;
    int line = 1, first = 0;
    for (const char *p = t->bytes; *p; p++) {
        if (*p == '\n') {
            line++;
        } else if (starts(p, "/*")) {
            for (p += 2; *p && !starts(p, "*/"); p++) line += *p == '\n';
            p++;
        } else if (starts(p, "//")) {
            while (p[1] && p[1] != '\n') p++;
        } else if (*p == '\'') {
            for (p++; *p && *p != '\''; p++) p += *p == '\\';
        } else if (*p == '"') {
            if (!length) first = line;
            for (p++; *p && *p != '"'; p++, length++) p += *p == '\\';
            if (length > MAX_LITERAL) die("te.h:%d: a string literal of more than %d bytes", first, MAX_LITERAL);
            length += 1; /* so that "" is seen as a beginning, too */
        } else if (!isspace((unsigned char)*p)) {
            length = 0;
        }
    }
}

static void put_header(text *out) {
    list done = {{0}, 0};
    text manual, parts;
    read_part("te_parts.h", "te_pack", &parts);
    read_part("api/manual.h", "te_pack", &manual);
    list_add(&done, "api/manual.h");
    put_bytes(out, manual.bytes, manual.size);
    put(out, "\n/* Generated from src/ by `make pack`: edit there. */\n");
    const char *from = strstr(parts.bytes, "\n#"); /* what stands above is for readers of src/ */
    if (!from) die("src/te_parts.h has no include");
    put_part(out, &done, "te_parts.h", from + 1);
    check_literals(out);
    list_clear(&done);
    free(manual.bytes);
    free(parts.bytes);
}

/* ---- the order of rooms ---------------------------------------------------------------------------------------- */

/* A function that a part defines, or that ops/table.c makes of TE_OP_LIST. */
typedef struct definition {
    char *name;
    int part; /* its number in te_parts.h */
} definition;
typedef struct definitions {
    definition *is; /* sorted by name once all are there */
    int count, capacity;
} definitions;

static int by_definition(const void *a, const void *b) {
    return strcmp(((const definition *)a)->name, ((const definition *)b)->name);
}
static int by_definition_and_part(const void *a, const void *b) {
    int order = by_definition(a, b);
    return order ? order : ((const definition *)a)->part - ((const definition *)b)->part;
}
/* A function that stands in two parts, for a wing and for its absence: the first counts. */
static void definitions_sort(definitions *d) {
    int kept = 0;
    qsort(d->is, (size_t)d->count, sizeof *d->is, by_definition_and_part);
    for (int i = 0; i < d->count; i++) {
        if (kept && !by_definition(&d->is[kept - 1], &d->is[i])) free(d->is[i].name);
        else d->is[kept++] = d->is[i];
    }
    d->count = kept;
}
static void definitions_add(definitions *d, const char *name, size_t size, int part) {
    if (d->count == d->capacity) {
        d->capacity = 2 * d->capacity + 256;
        d->is = (definition *)realloc(d->is, (size_t)d->capacity * sizeof *d->is);
        if (!d->is) die("out of memory");
    }
    char *copy = (char *)malloc(size + 1);
    if (!copy) die("out of memory");
    memcpy(copy, name, size);
    copy[size] = 0;
    d->is[d->count++] = (definition){copy, part};
}

static bool in_name(char c) { return isalnum((unsigned char)c) || c == '_'; }

/* The text with comments, strings and characters blanked; lines stay where they are. */
static void blank_literals(text *t) {
    for (char *p = t->bytes; *p;) {
        if (starts(p, "/*")) {
            char *end = strstr(p + 2, "*/");
            if (!end) die("a comment without an end");
            for (; p < end + 2; p++)
                if (*p != '\n') *p = ' ';
        } else if (starts(p, "//")) {
            while (*p && *p != '\n') *p++ = ' ';
        } else if (*p == '"' || (*p == '\'' && !(p > t->bytes && in_name(p[-1])))) {
            const char quote = *p;
            *p++ = ' ';
            while (*p && *p != quote && *p != '\n') {
                if (*p == '\\' && p[1]) *p++ = ' ';
                *p++ = ' ';
            }
            if (*p == quote) *p++ = ' ';
        } else {
            p++;
        }
    }
}

/* Functions are defined outside of all braces: a name, parentheses, a brace. */
static void find_definitions(definitions *d, const text *t, int part) {
    int depth = 0;
    for (const char *p = t->bytes; *p;) {
        if (*p == '#') { /* a directive: its braces need not match */
            while (*p && !(*p == '\n' && p[-1] != '\\')) p++;
            continue;
        }
        depth += *p == '{' ? 1 : *p == '}' ? -1 : 0;
        if (depth || !starts(p, "te_") || (p > t->bytes && in_name(p[-1]))) {
            p++;
            continue;
        }
        const char *end = p, *at;
        while (in_name(*end)) end++;
        if (*end != '(') {
            p = end;
            continue;
        }
        int open = 0;
        for (at = end; *at; at++) {
            open += *at == '(' ? 1 : *at == ')' ? -1 : 0;
            if (!open) break;
        }
        for (at += *at != 0; isspace((unsigned char)*at); at++) {}
        if (*at == '{') definitions_add(d, p, (size_t)(end - p), part);
        p = end;
    }
}

/* The operations that TE_OP_LIST names: X(lower, UPPER, family). */
static void find_operations(definitions *d, int part) {
    text t;
    read_part("api/ops.h", "te_pack", &t);
    for (const char *p = t.bytes; (p = strstr(p, "X(")) != NULL;) {
        char name[128] = "te_op_";
        size_t size = strlen(name);
        if (p > t.bytes && in_name(p[-1])) {
            p++;
            continue;
        }
        for (p += 2; in_name(*p) && size + 1 < sizeof name; p++) name[size++] = *p;
        if (*p == ',') definitions_add(d, name, size, part);
    }
    free(t.bytes);
}

static bool is_room_of(const char *room, size_t size, const char *part) { return !strncmp(room, part, size) && part[size] == '/'; }

/* Between two parts of a room stand parts of this room alone, and of rooms inside it. */
static bool rooms_are_whole(const list *parts) {
    bool whole = true;
    for (int i = 0; i < parts->count; i++) {
        const char *part = parts->name[i], *slash = strrchr(part, '/');
        size_t size = slash ? (size_t)(slash - part) : 0;
        int first = i, last = i;
        for (int k = 0; k < parts->count && slash; k++) {
            const char *other = strrchr(parts->name[k], '/');
            if (!other || (size_t)(other - parts->name[k]) != size || strncmp(part, parts->name[k], size)) continue;
            if (k < first) first = k;
            last = k;
        }
        for (int k = i; k < last && first == i; k++) {
            if (is_room_of(part, size, parts->name[k])) continue;
            fprintf(stderr, "src/te_parts.h: %s stands between parts of the room %.*s, which is one room at one height\n", parts->name[k],
                    (int)size, part);
            whole = false;
        }
    }
    return whole;
}

/* Every call, public functions included, is of the same part or of one that is compiled before. */
static bool calls_go_down(const list *parts) {
    definitions d = {NULL, 0, 0};
    text *body = (text *)calloc(MAX_FILES, sizeof *body);
    bool down = true;
    if (!body) die("out of memory");
    for (int i = 0; i < parts->count; i++) {
        if (starts(parts->name[i], "api/")) continue;
        read_part(parts->name[i], "src/te_parts.h", &body[i]);
        blank_literals(&body[i]);
        find_definitions(&d, &body[i], i);
        if (!strcmp(parts->name[i], "ops/table.c")) find_operations(&d, i);
    }
    definitions_sort(&d);
    for (int i = 0; i < parts->count; i++) {
        int line = 1;
        for (const char *p = body[i].bytes; p && *p;) {
            const char *end = p;
            line += *p == '\n';
            while (in_name(*end)) end++;
            if (end - p > 3 && starts(p, "te_") && end - p < MAX_PATH) {
                char name[MAX_PATH];
                snprintf(name, sizeof name, "%.*s", (int)(end - p), p);
                definition key = {name, 0}, *there = (definition *)bsearch(&key, d.is, (size_t)d.count, sizeof *d.is, by_definition);
                if (there && there->part > i) {
                    fprintf(stderr, "src/%s:%d: %s is of src/%s, which is compiled later: a part uses what stands above it\n",
                            parts->name[i], line, name, parts->name[there->part]);
                    down = false;
                }
            }
            p = end > p ? end : p + 1;
        }
    }
    for (int i = 0; i < d.count; i++) free(d.is[i].name);
    for (int i = 0; i < parts->count; i++) free(body[i].bytes);
    free(body);
    free(d.is);
    return down;
}

static void list_parts(list *parts) {
    text contents;
    const char *line;
    size_t size;
    read_part("te_parts.h", "te_pack", &contents);
    for (const char *at = contents.bytes; next_line(&at, &line, &size);) {
        char name[MAX_PATH];
        if (private_include(line, size, name)) list_add(parts, name);
    }
    free(contents.bytes);
}

static bool order_is_kept(void) {
    list parts = {{0}, 0};
    list_parts(&parts);
    bool whole = rooms_are_whole(&parts), down = calls_go_down(&parts);
    list_clear(&parts);
    return whole && down;
}

/* ---- commands ------------------------------------------------------------------------------------------------ */

static bool is_current(const char *path, const text *wanted) {
    bool same = holds(path, wanted);
    if (!same) fprintf(stderr, "%s is stale: run make pack\n", path);
    return same;
}

static int count_lines(const char *path) {
    text t;
    int lines = 0;
    if (!read_file(path, &t)) lines = -1;
    for (const char *p = t.bytes; *p; p++) lines += *p == '\n';
    free(t.bytes);
    return lines;
}

static void print_room(const char *room, const list *parts, int *total) {
    int lines = 0, count = 0;
    size_t n = strlen(room);
    for (int pass = 0; pass < 2; pass++) {
        if (pass) printf("%-12s %3d part%s %6d lines\n", room, count, count == 1 ? " " : "s", lines);
        for (int i = 0; i < parts->count; i++) {
            const char *p = parts->name[i], *slash = strrchr(p, '/');
            if (!slash || (size_t)(slash - p) != n || strncmp(p, room, n)) continue;
            char path[MAX_PATH];
            snprintf(path, sizeof path, "src/%s", p);
            int here = count_lines(path);
            if (!pass) lines += here > 0 ? here : 0, count++;
            else if (here < 0) printf("    %-24s    not there\n", slash + 1);
            else printf("    %-24s %6d\n", slash + 1, here);
        }
    }
    *total += lines;
}

/* Rooms in the order of te_parts.h, then what only the kernels' compiler reads. */
static void print_tree(void) {
    list parts = {{0}, 0}, kernels = {{0}, 0}, rooms = {{0}, 0};
    int total = 0;
    list_parts(&parts);
    list_kernel_files(&kernels);
    for (int i = 0; i < kernels.count; i++) {
        if (!list_has(&parts, kernels.name[i])) list_add(&parts, kernels.name[i]);
    }
    for (int i = 0; i < parts.count; i++) {
        char room[MAX_PATH];
        const char *slash = strrchr(parts.name[i], '/');
        if (!slash) continue;
        snprintf(room, sizeof room, "%.*s", (int)(slash - parts.name[i]), parts.name[i]);
        if (list_has(&rooms, room)) continue;
        list_add(&rooms, room);
        print_room(room, &parts, &total);
    }
    printf("%d lines\n", total);
    list_clear(&parts);
    list_clear(&kernels);
    list_clear(&rooms);
}

int main(int argc, char **argv) {
    const char *command = argc > 1 ? argv[1] : "";
    text header = {0}, kernels = {0};
    int status = 0;
    if (!strcmp(command, "sources") && argc == 3) {
        put_sources(&header);
        write_file(argv[2], &header);
    } else if (!strcmp(command, "pack") && argc == 2) {
        put_header(&header);
        put_kernels_file(&kernels);
        write_file("te.h", &header);
        write_file("te_kernels.cu.inc", &kernels);
    } else if (!strcmp(command, "check") && argc == 2) {
        put_header(&header);
        put_kernels_file(&kernels);
        bool current = is_current("te.h", &header);
        if (!is_current("te_kernels.cu.inc", &kernels)) current = false;
        status = order_is_kept() && current ? 0 : 1;
    } else if (!strcmp(command, "tree") && argc == 2) {
        print_tree();
    } else {
        fprintf(stderr, "usage: te_pack pack | check | sources FILE | tree\n");
        status = 2;
    }
    free(header.bytes);
    free(kernels.bytes);
    return status;
}
