/* lora/match.c: patterns of module names, the subset of regular expressions that NeMo Automodel and peft use. This file
 * works on text alone. It must not depend on modules.
 *
 * A pattern is compiled to a program with one step for each character or operator (Thompson 1968). A match reads the
 * text once and follows all possible steps together, so there is no backtracking. The time of a match is at most text
 * length times program length. */

enum { TE__PATTERN_LENGTH = 512, TE__PATTERN_DEPTH = 64 }; /* maximum bytes of a pattern; maximum nesting of groups */

typedef enum te__pattern_op {
    TE__PATTERN_CHAR, /* the code point `a` */
    TE__PATTERN_ANY,  /* any character but '\n' */
    TE__PATTERN_SET,  /* a class: ranges[a] .. ranges[a + b - 1]; with `inverse` all characters outside */
    TE__PATTERN_FORK, /* continues at step `a` and at step `b` */
    TE__PATTERN_GO,   /* continues at step `a` */
    TE__PATTERN_START,
    TE__PATTERN_END,
    TE__PATTERN_FOUND
} te__pattern_op;
typedef struct te__pattern_step {
    uint8_t op;
    bool inverse;
    int a, b;
} te__pattern_step;
typedef struct te__pattern_range {
    int first, last;
} te__pattern_range;

/* A compiled pattern. Set it to zero before te__pattern_open, and free it by te__pattern_close. */
typedef struct te__pattern {
    te_ctx *te;
    te__pattern_step *steps;
    int n, cap;
    te__pattern_range *ranges;
    int num_ranges, cap_ranges;
    int *places;       /* [4 * n], work memory of a match */
    const char *at;    /* current position of the compiler in the expression */
    const char *wrong; /* description of the first syntax error; NULL: none */
    char found[8];     /* the characters at that error */
} te__pattern;

static void te__pattern_close(te__pattern *p) {
    if (!p->te) return;
    te__free(p->te, p->steps);
    te__free(p->te, p->ranges);
    te__free(p->te, p->places);
    memset(p, 0, sizeof(*p));
}

/* Returns the UTF-8 code point at *s and moves *s past it. If no valid code point starts at *s, returns the single
 * byte. */
static int te__code_point(const char **s) {
    const unsigned char *p = (const unsigned char *)*s;
    const int n = te__utf8_length(*s);
    *s += n > 1 ? n : 1;
    if (n < 2) return p[0];
    if (n == 2) return (p[0] & 31) << 6 | (p[1] & 63);
    if (n == 3) return (p[0] & 15) << 12 | (p[1] & 63) << 6 | (p[2] & 63);
    return (p[0] & 7) << 18 | (p[1] & 63) << 12 | (p[2] & 63) << 6 | (p[3] & 63);
}

/* ---- reading a pattern ---- */

static bool te__pattern_fail(te__pattern *p, const char *wrong, int characters) {
    if (!p->wrong) {
        p->wrong = wrong;
        snprintf(p->found, sizeof(p->found), "%.*s", characters, p->at);
    }
    return false;
}
/* Appends a step and returns its index; -1 if there is no memory. */
static int te__pattern_add(te__pattern *p, te__pattern_op op, int a, int b) {
    te__pattern_step *s;
    if (!te__grow(p->te, (void **)&p->steps, &p->cap, p->n, sizeof(te__pattern_step))) return -1;
    s = &p->steps[p->n];
    s->op = (uint8_t)op;
    s->inverse = false;
    s->a = a;
    s->b = b;
    return p->n++;
}
/* Inserts a step at index `at`. Moves the later steps and their jump targets by one. No step before `at` may have a
 * jump target after `at`. */
static bool te__pattern_insert(te__pattern *p, int at) {
    int i;
    if (te__pattern_add(p, TE__PATTERN_GO, 0, 0) < 0) return false;
    memmove(p->steps + at + 1, p->steps + at, (size_t)(p->n - 1 - at) * sizeof(te__pattern_step));
    for (i = at + 1; i < p->n; i++) {
        te__pattern_step *s = &p->steps[i];
        if (s->op == TE__PATTERN_FORK || s->op == TE__PATTERN_GO) s->a++;
        if (s->op == TE__PATTERN_FORK) s->b++;
    }
    return true;
}
/* Reads an escape: a backslash and a punctuation character, which stands for itself. Other escapes fail. */
static bool te__pattern_escape(te__pattern *p, int *c) {
    const char next = p->at[1];
    if (next <= ' ' || next > '~' || (next >= '0' && next <= '9') || (next >= 'A' && next <= 'Z') ||
        (next >= 'a' && next <= 'z'))
        return te__pattern_fail(p, "an escape", 2);
    *c = next;
    p->at += 2;
    return true;
}
/* Reads one character of a class. */
static bool te__pattern_member(te__pattern *p, int *c) {
    if (!*p->at) return te__pattern_fail(p, "a class without its end", 1);
    if (*p->at == '\\') return te__pattern_escape(p, c);
    *c = te__code_point(&p->at);
    return true;
}
static bool te__pattern_class(te__pattern *p) {
    const int place = te__pattern_add(p, TE__PATTERN_SET, p->num_ranges, 0);
    const char *begin;
    if (place < 0) return false;
    p->at++;
    p->steps[place].inverse = *p->at == '^';
    p->at += *p->at == '^';
    for (begin = p->at; *p->at != ']' || p->at == begin;) { /* a ']' at the beginning is a member */
        te__pattern_range r;
        const char *start = p->at;
        if (!te__pattern_member(p, &r.first)) return false;
        r.last = r.first;
        if (*p->at == '-' && p->at[1] && p->at[1] != ']') {
            p->at++;
            if (!te__pattern_member(p, &r.last)) return false;
        }
        if (r.last < r.first) {
            p->at = start;
            return te__pattern_fail(p, "a range from a later character to an earlier one", 3);
        }
        if (!te__grow(p->te, (void **)&p->ranges, &p->cap_ranges, p->num_ranges, sizeof(te__pattern_range)))
            return false;
        p->ranges[p->num_ranges++] = r;
        p->steps[place].b++;
    }
    p->at++;
    return true;
}


/* A group being read, or the whole pattern. */
typedef struct te__pattern_group {
    int start, part; /* indices in p->steps: the first step of the group, and the first step of its last alternative */
    int ends;        /* index of the last GO step that ends an alternative of the group, or -1. These GO steps form a
                      * linked list: the field `a` of each one is the index of the one before it, or -1.
                      * te__pattern_group_end replaces the links by the index of the step after the group */
} te__pattern_group;

/* Begins another alternative of the group. Puts a FORK step before the last alternative and a GO step after it. */
static bool te__pattern_alternative(te__pattern *p, te__pattern_group *g) {
    int go;
    if (!te__pattern_insert(p, g->part)) return false;
    go = te__pattern_add(p, TE__PATTERN_GO, g->ends, 0);
    if (go < 0) return false;
    p->steps[g->part].op = (uint8_t)TE__PATTERN_FORK;
    p->steps[g->part].a = g->part + 1;
    p->steps[g->part].b = go + 1;
    g->ends = go;
    g->part = go + 1;
    return true;
}
static void te__pattern_group_end(te__pattern *p, const te__pattern_group *g) {
    int go, before;
    for (go = g->ends; go >= 0; go = before) {
        before = p->steps[go].a;
        p->steps[go].a = p->n;
    }
}
/* Reads the operator *, + or ? at p->at. The operator applies to the steps from index `atom` to the end. */
static bool te__pattern_repeat(te__pattern *p, int atom) {
    const char op = *p->at;
    if (atom < 0)
        return te__pattern_fail(
            p, atom == -1 ? "an operator with nothing in front of it" : "an operator behind an operator", 1);
    p->at++;
    if (*p->at == '?') p->at++; /* a lazy operator: skipped, because it does not change whether a match exists */
    if (op == '+') return te__pattern_add(p, TE__PATTERN_FORK, atom, p->n + 1) >= 0;
    if (!te__pattern_insert(p, atom) || (op == '*' && te__pattern_add(p, TE__PATTERN_GO, atom, 0) < 0)) return false;
    p->steps[atom].op = (uint8_t)TE__PATTERN_FORK;
    p->steps[atom].a = atom + 1;
    p->steps[atom].b = p->n;
    return true;
}
static bool te__pattern_read(te__pattern *p) {
    te__pattern_group groups[TE__PATTERN_DEPTH + 1], *g = groups;
    int atom = -1; /* index of the first step of the operand that a following operator would repeat; -1: no operand, -2:
                    * the operand has an operator already */
    g->start = g->part = 0;
    g->ends = -1;
    while (*p->at) {
        const char c = *p->at;
        const int place = p->n;
        bool fine = true;
        if (c == '*' || c == '+' || c == '?') {
            if (!te__pattern_repeat(p, atom)) return false;
            atom = -2;
            continue;
        }
        atom = place;
        if (c == '{' || c == '}') return te__pattern_fail(p, "a count", 1);
        if (c == ')') {
            if (g == groups) return te__pattern_fail(p, "the end of a group that has not begun", 1);
            te__pattern_group_end(p, g);
            atom = g->start;
            g--;
            p->at++;
        } else if (c == '(') {
            if (p->at[1] == '?') return te__pattern_fail(p, "an extension", 2);
            if (++g == groups + TE__PATTERN_DEPTH + 1)
                return te__pattern_fail(p, "more than 64 groups within each other", 1);
            g->start = g->part = place;
            g->ends = atom = -1;
            p->at++;
        } else if (c == '|') {
            fine = te__pattern_alternative(p, g);
            atom = -1;
            p->at++;
        } else if (c == '^' || c == '$') {
            fine = te__pattern_add(p, c == '^' ? TE__PATTERN_START : TE__PATTERN_END, 0, 0) >= 0;
            atom = -1;
            p->at++;
        } else if (c == '.') {
            fine = te__pattern_add(p, TE__PATTERN_ANY, 0, 0) >= 0;
            p->at++;
        } else if (c == '[') {
            fine = te__pattern_class(p);
        } else {
            int code = 0;
            fine = c != '\\' || te__pattern_escape(p, &code);
            if (fine) fine = te__pattern_add(p, TE__PATTERN_CHAR, c == '\\' ? code : te__code_point(&p->at), 0) >= 0;
        }
        if (!fine) return false;
    }
    if (g != groups) return te__pattern_fail(p, "a group without its end", 1);
    te__pattern_group_end(p, g);
    return te__pattern_add(p, TE__PATTERN_FOUND, 0, 0) >= 0;
}

/* Compiles `expression`. Returns false with an error. The error text begins with `who` and quotes `text`, which is the
 * pattern as the user wrote it. */
static bool te__pattern_open(te__pattern *p, te_ctx *te, const char *who, const char *text, const char *expression) {
    p->te = te;
    p->at = expression;
    if (te__pattern_read(p)) {
        p->places = (int *)te__alloc_zero(te, 4 * (size_t)p->n * sizeof(int));
        if (p->places) return true;
    }
    if (p->wrong)
        te__fail(te, TE_ERR_UNSUPPORTED,
                 "%s: the pattern \"%.200s\" has %s (\"%s\"); characters, ., *, +, ?, classes in [], groups in () and "
                 "| are possible",
                 who, text, p->wrong, p->found);
    te__pattern_close(p);
    return false;
}
/* Compiles a name as NeMo Automodel's module_matcher does. "*" and ".*" become "(.*)". "^" is put before the result and
 * "$" after it. So the name "q|v" becomes "^q|v$", in which "^" applies only to "q", and "$" only to "v". */
static bool te__pattern_open_name(te__pattern *p, te_ctx *te, const char *who, const char *name) {
    char expression[4 * TE__PATTERN_LENGTH + 3], *out = expression;
    const char *in;
    if (strlen(name) > TE__PATTERN_LENGTH)
        return te__not_ok(te, TE_ERR_INVALID, "%s: the pattern \"%.60s...\" has %lld bytes; at most %d are possible",
                          who, name, (long long)strlen(name), (int)TE__PATTERN_LENGTH);
    *out++ = '^';
    for (in = name; *in; in++) {
        const bool stars = *in == '*' || (in[0] == '.' && in[1] == '*');
        if (stars) memcpy(out, "(.*)", 4);
        else *out = *in;
        out += stars ? 4 : 1;
        in += stars && *in == '.';
    }
    *out++ = '$';
    *out = 0;
    return te__pattern_open(p, te, who, name, expression);
}

/* ---- matching ---- */

/* Appends to `list` the steps that read a character and can be reached from step `at` without reading one. Returns the
 * new number of entries.
 * *found is set if TE__PATTERN_FOUND can be reached.
 * `now` is the number of the position in the text; seen[i] is `now` if step i was visited there.
 * `first`: at the start of the text. `last`: at the end, or before the final newline. */
static int te__pattern_reach(te__pattern *p, int at, int *list, int n, int now, bool first, bool last, bool *found) {
    int *seen = p->places + 2 * p->n, *open = p->places + 3 * p->n, num_open = 0;
    if (seen[at] != now) open[num_open++] = at;
    seen[at] = now;
    while (num_open) {
        const int place = open[--num_open];
        const te__pattern_step *s = &p->steps[place];
        int next[2], i;
        next[0] = next[1] = -1;
        if (s->op == TE__PATTERN_FOUND) *found = true;
        else if (s->op <= TE__PATTERN_SET) list[n++] = place;
        else if (s->op == TE__PATTERN_START || s->op == TE__PATTERN_END)
            next[0] = (s->op == TE__PATTERN_START ? first : last) ? place + 1 : -1;
        else next[0] = s->a;
        if (s->op == TE__PATTERN_FORK) next[1] = s->b;
        for (i = 0; i < 2; i++) {
            if (next[i] < 0 || seen[next[i]] == now) continue;
            seen[next[i]] = now;
            open[num_open++] = next[i];
        }
    }
    return n;
}
static bool te__pattern_takes(const te__pattern *p, const te__pattern_step *s, int c) {
    int i;
    if (s->op == TE__PATTERN_CHAR) return s->a == c;
    if (s->op == TE__PATTERN_ANY) return c != '\n';
    for (i = s->a; i < s->a + s->b && !(p->ranges[i].first <= c && c <= p->ranges[i].last); i++) {}
    return (i < s->a + s->b) != s->inverse;
}
/* Returns true if the pattern matches at the start of the text (as Python's re.match). */
static bool te__pattern_matches(te__pattern *p, const char *text) {
    int *list = p->places, *next = p->places + p->n, n, now = 1, i;
    bool found = false;
    memset(p->places + 2 * p->n, 0, (size_t)p->n * sizeof(int));
    n = te__pattern_reach(p, 0, list, 0, now, true, text[0] == 0 || (text[0] == '\n' && !text[1]), &found);
    while (*text && n && !found) {
        const int c = te__code_point(&text);
        const bool last = text[0] == 0 || (text[0] == '\n' && !text[1]);
        int *swap = next, num_next = 0;
        now++;
        for (i = 0; i < n; i++)
            if (te__pattern_takes(p, &p->steps[list[i]], c))
                num_next = te__pattern_reach(p, list[i] + 1, next, num_next, now, false, last, &found);
        next = list;
        list = swap;
        n = num_next;
    }
    return found;
}

/* ---- names ---- */

static bool te__path_ends_in(const char *path, const char *name) {
    const size_t n = strlen(path), k = strlen(name);
    return strcmp(path, name) == 0 || (n > k && path[n - k - 1] == '.' && strcmp(path + n - k, name) == 0);
}

/* A list of compiled names that choose modules. Set it to zero before te__name_list_open, and free it by
 * te__name_list_close. */
typedef struct te__name_list {
    te_ctx *te;
    const char *const *names;
    te__pattern *patterns;
    int n;
} te__name_list;
static void te__name_list_close(te__name_list *l) {
    int i;
    for (i = 0; i < l->n && l->patterns; i++) te__pattern_close(&l->patterns[i]);
    te__free(l->te, l->patterns);
    l->patterns = NULL;
}
static bool te__name_list_open(te__name_list *l, te_ctx *te, const char *const *names, int n) {
    int i;
    l->te = te;
    l->names = names;
    l->n = n;
    l->patterns = n ? (te__pattern *)te__alloc_zero(te, (size_t)n * sizeof(te__pattern)) : NULL;
    for (i = 0; i < n && l->patterns; i++)
        if (!te__pattern_open_name(&l->patterns[i], te, "te_lora_apply", names[i])) return false;
    return n == 0 || l->patterns;
}
/* Returns true if the path matches a name of the list. Sets *plain if a name without operators matched; `plain` may be
 * NULL. */
static bool te__name_list_match(te__name_list *l, const char *path, bool *plain) {
    bool any = false;
    int i;
    if (plain) *plain = false;
    for (i = 0; i < l->n; i++) {
        /* a name without operators also matches a path that ends in "." followed by the name */
        const bool is_plain = !strpbrk(l->names[i], "*+?[](){}|^$\\");
        if (!(is_plain && te__path_ends_in(path, l->names[i])) && !te__pattern_matches(&l->patterns[i], path)) continue;
        any = true;
        if (plain && is_plain) *plain = true;
    }
    return any;
}
