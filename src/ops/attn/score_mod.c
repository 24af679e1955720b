/* ops/attn/score_mod.c: checks the user's expressions for scores and masks (te_score_mod), and writes the text that
 * kernels include. It must not depend on attention. */

static bool te__has_score_mod(const te_score_mod *m) {
    return m->score_mod || m->mask_mod || m->score_fn || m->mask_fn;
}

/* ---- checks ---- */

static bool te__is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
static bool te__is_digit(char c) { return c >= '0' && c <= '9'; }

/* Returns expression i of *m, or NULL if it is not given. *name gets the name of its field. */
static const char *te__score_mod_text(const te_score_mod *m, int i, const char **name) {
    static const char *const names[3] = {"score_mod", "score_mod_bprop", "mask_mod"};
    *name = names[i];
    return i == 0 ? m->score_mod : i == 1 ? m->score_mod_bprop : m->mask_mod;
}

/* Returns true if an expression may use the name of n characters at `at`. `mask`: the expression is mask_mod, which may
 * not use the name "score". */
static bool te__score_mod_knows(const te_score_mod *m, bool mask, const char *at, size_t n) {
    static const char *const names[] = {"score",  "b",     "h",        "q_idx", "kv_idx", "true",   "false",
                                        "float",  "int",   "INFINITY", "abs",   "min",    "max",    "fminf",
                                        "fmaxf",  "fabsf", "expf",     "exp2f", "expm1f", "logf",   "log2f",
                                        "log1pf", "tanhf", "sinf",     "cosf",  "sqrtf",  "rsqrtf", "powf",
                                        "floorf", "ceilf", "truncf",   "rintf", "fmodf",  "erff",   "copysignf"};
    int i;
    if (n == 4 && strncmp(at, "aux", 3) == 0 && at[3] >= '0' && at[3] < '0' + TE_SCORE_MOD_AUX)
        return m->aux[at[3] - '0'] != NULL;
    for (i = mask; i < TE__COUNT(names); i++)
        if (strlen(names[i]) == n && strncmp(names[i], at, n) == 0) return true;
    return false;
}

/* Returns true if text[i] must be refused, because an assignment, an address, a lambda or a digraph could reach any
 * memory. `behind` is true if text[i] follows an operand. After an operand `*`, `&` and `[` are harmless: a product, an
 * AND or an index. */
static bool te__score_mod_escapes(const char *text, size_t i, bool behind) {
    const char c = text[i], next = text[i + 1], last = i ? text[i - 1] : 0;
    if ((c == '*' || c == '&' || c == '[') && !behind) return true;
    if ((c == '<' && (next == '%' || next == ':')) || ((c == '%' || c == ':') && (next == '>' || next == ':')))
        return true;
    if ((c == '+' || c == '-') && next == c) return true;
    return c == '=' && next != '=' &&
           (!last || !strchr("=!<>", last) || (i > 1 && last != '=' && last != '!' && text[i - 2] == last));
}

/* Checks an expression's characters, brackets, names and operators. The compiler checks the rest. */
static te_result te__score_mod_check_text(te_ctx *te, const char *op, const te_score_mod *m, const char *name,
                                          const char *text) {
    static const char marks[] = " .,+-*/%()[]<>=!&|^~?:";
    const bool mask = strcmp(name, "mask_mod") == 0;
    char open[TE_SCORE_MOD_CHARS];
    size_t size = 0, depth = 0, i, n;
    bool behind = false; /* true: the text so far ends with an operand */
    while (size <= TE_SCORE_MOD_CHARS && text[size]) size++;
    if (size == 0 || size > TE_SCORE_MOD_CHARS)
        return te__fail(te, TE_ERR_INVALID,
                        "%s: rule.score_mod.%s has %s%d characters; an expression of 1 to %d is needed", op, name,
                        size ? "more than " : "", (int)te__min(size, TE_SCORE_MOD_CHARS), TE_SCORE_MOD_CHARS);
    for (i = 0; i < size; i += n) {
        const char c = text[i];
        n = 1;
        if (te__is_letter(c)) {
            while (te__is_letter(text[i + n]) || te__is_digit(text[i + n])) n++;
            if (!te__score_mod_knows(m, mask, text + i, n)) {
                const char *why = strncmp(text + i, "aux", 3) == 0 ? ", and no such tensor is given"
                                  : mask && n == 5 && strncmp(text + i, "score", n) == 0
                                      ? ", which a mask does not have"
                                      : "";
                return te__fail(te, TE_ERR_INVALID,
                                "%s: rule.score_mod.%s has the name \"%.*s\" at character %d%s; see te_score_mod for "
                                "those that it may use",
                                op, name, (int)te__min(n, 40), text + i, (int)i + 1, why);
            }
            /* after the name of a type, * would make a pointer */
            behind = !((n == 5 && strncmp(text + i, "float", n) == 0) || (n == 3 && strncmp(text + i, "int", n) == 0));
        } else if (te__is_digit(c) || (c == '.' && te__is_digit(text[i + 1]))) { /* a number, with its suffix */
            while (te__is_letter(text[i + n]) || te__is_digit(text[i + n]) || text[i + n] == '.' ||
                   ((text[i + n] == '-' || text[i + n] == '+') && (text[i + n - 1] | 32) == 'e'))
                n++;
            behind = true;
        } else if (!strchr(marks, c) || (c == '/' && (text[i + 1] == '/' || text[i + 1] == '*'))) {
            char shown[8];
            if (c >= ' ' && c < 127) snprintf(shown, sizeof(shown), "%c", c);
            else snprintf(shown, sizeof(shown), "\\x%02x", (unsigned)(unsigned char)c);
            return te__fail(te, TE_ERR_INVALID,
                            "%s: rule.score_mod.%s has %s%s at character %d; names, numbers, blanks and "
                            ".,+-*/%%()[]<>=!&|^~?: make an expression, without comments",
                            op, name, shown, strchr(marks, c) ? text[i + 1] == '*' ? "*" : "/" : "", (int)i + 1);
        } else if (te__score_mod_escapes(text, i, behind)) {
            return te__fail(te, TE_ERR_INVALID,
                            "%s: rule.score_mod.%s has %.2s at character %d; an expression has no assignments, "
                            "addresses, lambdas or digraphs",
                            op, name, text + i, (int)i + 1);
        } else if (c == '(' || c == '[')
            open[depth++] = c;
        else if ((c == ')' || c == ']') && (depth == 0 || open[--depth] != (c == ')' ? '(' : '[')))
            return te__fail(te, TE_ERR_INVALID, "%s: rule.score_mod.%s has a %c at character %d that closes nothing",
                            op, name, c, (int)i + 1);
        if (!te__is_letter(c) && !te__is_digit(c) && c != '.' && c != ' ') behind = c == ')' || c == ']';
        if ((c == '&' || c == '=') && text[i + 1] == c) n = 2; /* && and == */
    }
    return depth == 0 ? TE_OK
                      : te__fail(te, TE_ERR_INVALID, "%s: rule.score_mod.%s has %d brackets that are not closed", op,
                                 name, (int)depth);
}

static te_result te__score_mod_check(te_ctx *te, const char *op, const te_score_mod *m) {
    const bool text_alone = m->score_mod_bprop && !m->score_mod;
    int i;
    if (text_alone || (m->score_bprop_fn && !m->score_fn))
        return te__fail(te, TE_ERR_INVALID,
                        "%s: rule.score_mod.%s is given and %s is NULL; it is the derivative of that", op,
                        text_alone ? "score_mod_bprop" : "score_bprop_fn", text_alone ? "score_mod" : "score_fn");
    for (i = 0; i < 3; i++) {
        const char *name, *text = te__score_mod_text(m, i, &name);
        te_result r = text ? te__score_mod_check_text(te, op, m, name, text) : TE_OK;
        if (r != TE_OK) return r;
    }
    return TE_OK;
}

/* Checks that each function that changes scores has a derivative: the user's own one, or 1 if m->additive is set. */
static te_result te__score_mod_check_gradient(te_ctx *te, const char *op, const te_score_mod *m) {
    if (m->additive || ((!m->score_mod || m->score_mod_bprop) && (!m->score_fn || m->score_bprop_fn))) return TE_OK;
    return te__fail(te, TE_ERR_INVALID,
                    "%s: a gradient is asked for, rule.score_mod.%s is given and %s NULL; give the derivative by "
                    "score, or set additive if it is 1",
                    op, m->score_mod && !m->score_mod_bprop ? "score_mod" : "score_fn",
                    m->score_mod && !m->score_mod_bprop ? "score_mod_bprop is" : "score_bprop_fn is");
}

/* Checks that the rules are given as the backend needs them: expressions for CUDA, functions for the CPU. */
static te_result te__score_mod_check_form(te_ctx *te, const char *op, const te_score_mod *m, bool cuda) {
    const bool score = cuda ? m->score_fn && !m->score_mod : m->score_mod && !m->score_fn,
               mask = cuda ? m->mask_fn && !m->mask_mod : m->mask_mod && !m->mask_fn;
    const bool bprop = cuda ? m->score_bprop_fn && !m->score_mod_bprop : m->score_mod_bprop && !m->score_bprop_fn;
    const char *const have = score  ? (cuda ? "score_fn" : "score_mod")
                             : mask ? (cuda ? "mask_fn" : "mask_mod")
                             : cuda ? "score_bprop_fn"
                                    : "score_mod_bprop";
    const char *const need = score  ? (cuda ? "score_mod" : "score_fn")
                             : mask ? (cuda ? "mask_mod" : "mask_fn")
                             : cuda ? "score_mod_bprop"
                                    : "score_bprop_fn";
    if (!score && !mask && !(bprop && !m->additive)) return TE_OK;
    return te__fail(te, TE_ERR_INVALID, "%s: rule.score_mod.%s is given and %s is NULL; %s", op, have, need,
                    cuda ? "CUDA compiles expressions: write the same as one"
                         : "the CPU calls functions: give one that does the same");
}

/* ---- the text ---- */

/* Returns the length of the number at `at` if a division by it may become a product, otherwise 0. The number must be
 * short, so that its reciprocal is normal. */
static size_t te__score_mod_divisor(const char *at) {
    size_t n = 0, points = 0;
    for (; te__is_digit(at[n]) || at[n] == '.'; n++) points += at[n] == '.';
    return n > 1 && n < 30 && points == 1 && (at[n] == 'f' || at[n] == 'F') && !te__is_letter(at[n + 1]) &&
                   !te__is_digit(at[n + 1])
               ? n + 1
               : 0;
}
/* Returns true if the expression may be discontinuous. At a discontinuity an error of 2 ulp (te__score_mod_put) may
 * change the value much. */
static bool te__score_mod_has_steps(const char *text) {
    static const char *const words[] = {"floorf", "ceilf", "truncf", "rintf", "fmodf", "int", "==", "!=", "<", ">"};
    int i;
    for (i = 0; i < TE__COUNT(words); i++)
        if (strstr(text, words[i])) return true;
    return false;
}
/* Writes the expression of a score or of its derivative. `score / 50.0f` becomes `score * (1.0f / 50.0f)`, which is up
 * to 2 ulp off but faster: an exact division takes as long as ten products. */
static void te__score_mod_put(te__text *out, const char *text) {
    size_t i = 0;
    while (text[i]) {
        size_t to = i + 1, n;
        while (text[i] == '/' && text[to] == ' ') to++;
        n = text[i] == '/' ? te__score_mod_divisor(text + to) : 0;
        if (n) te__text_printf(out, "* (1.0f / %.*s)", (int)n, text + to);
        else te__text_printf(out, "%c", text[i]);
        i = n ? to + n : i + 1;
    }
}

/* Writes the text that kernels get as the content of ops/attn/score_mod.cuh. */
static void te__score_mod_code(const te_score_mod *m, te__text *out) {
    static const char *const macros[3] = {"TE_MOD_SCORE", "TE_MOD_BPROP", "TE_MOD_MASK"};
    int i;
    for (i = 0; i < TE_SCORE_MOD_AUX; i++)
        if (m->aux[i]) te__text_printf(out, "#define TE_AUX%d %d\n", i, (int)m->aux[i]->dtype);
    for (i = 0; i < 3; i++) {
        const char *name, *text = te__score_mod_text(m, i, &name);
        if (!text || (i == 1 && m->additive)) continue;
        te__text_printf(out, "#define %s (", macros[i]);
        if (i == 2 || te__score_mod_has_steps(text)) te__text_printf(out, "%s", text);
        else te__score_mod_put(out, text);
        te__text_printf(out, ")\n");
    }
}
