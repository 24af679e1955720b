/* literals.c: string literals that are longer than Microsoft's compilers take: literals FILE ... Prints them, each with its line; the exit status is then 1. */
#include <stdio.h>
#include <stdlib.h>

/* Bytes of one literal, and of adjacent ones, which become one. */
enum { LONGEST = 16380, LONGEST_JOINED = 65535 };

typedef struct text {
    const char *name, *at;
    int line, too_long;
} text;

static void next(text *t) {
    if (*t->at == '\n') t->line++;
    if (*t->at) t->at++;
}

/* Blanks, comments and continued lines; false where something else stands. */
static int skip_blank(text *t) {
    const char *p = t->at;
    if (*p == ' ' || *p == '\t' || *p == '\n' || *p == '\r' || (p[0] == '\\' && p[1] == '\n')) {
        next(t);
        return 1;
    }
    if (p[0] == '/' && p[1] == '/') {
        while (*t->at && *t->at != '\n') next(t);
        return 1;
    }
    if (p[0] == '/' && p[1] == '*') {
        next(t), next(t);
        while (*t->at && !(t->at[0] == '*' && t->at[1] == '/')) next(t);
        next(t), next(t);
        return 1;
    }
    return 0;
}

/* The number of characters between two quotes, an escape as one. */
static long quoted(text *t, char quote) {
    long n = 0;
    next(t);
    while (*t->at && *t->at != quote) {
        if (*t->at == '\\') next(t);
        next(t);
        n++;
    }
    next(t);
    return n;
}

static void strings(text *t) {
    long joined = 0;
    int first = t->line;
    while (*t->at == '"') {
        int line = t->line;
        long n = quoted(t, '"');
        if (n > LONGEST) t->too_long = !!printf("%s:%d: a string literal of %ld bytes; %d are possible\n", t->name, line, n, LONGEST);
        joined += n;
        while (skip_blank(t)) {}
    }
    if (joined > LONGEST_JOINED) t->too_long = !!printf("%s:%d: string literals of %ld bytes together; %d are possible\n", t->name, first, joined, LONGEST_JOINED);
}

static int check(const char *name) {
    FILE *f = fopen(name, "rb");
    text t = {name, NULL, 1, 0};
    char *all;
    long size;
    if (!f || fseek(f, 0, SEEK_END) || (size = ftell(f)) < 0 || fseek(f, 0, SEEK_SET)) return !!printf("cannot read %s\n", name);
    all = (char *)calloc((size_t)size + 1, 1);
    if (!all || fread(all, 1, (size_t)size, f) != (size_t)size) return !!printf("cannot read %s\n", name);
    fclose(f);
    for (t.at = all; *t.at;) {
        if (skip_blank(&t)) continue;
        if (*t.at == '"') strings(&t);
        else if (*t.at == '\'') quoted(&t, '\'');
        else next(&t);
    }
    free(all);
    return t.too_long;
}

int main(int argc, char **argv) {
    int i, too_long = 0;
    for (i = 1; i < argc; i++) too_long |= check(argv[i]);
    return too_long || argc < 2;
}
