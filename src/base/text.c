/* base/text.c: a text that grows, and conversions of numbers to and from text that are the same in every locale. */

/* A text that grows. `te__text t = TE_ZERO;` is an empty one. A NUL always follows the text. If memory runs out, `oom`
 * stays true and additions are ignored. */
typedef struct te__text {
    char *s; /* NULL until something is added; te__text_str returns "" then */
    size_t n, cap;
    bool oom;
    const te_allocator *memory; /* NULL => malloc and free */
} te__text;

/* Returns the text, never NULL. Borrowed until the next change. */
static inline const char *te__text_str(const te__text *t) { return t->s ? t->s : ""; }

static TE_MAYBE_UNUSED TE__NOINLINE void te__text_free(te__text *t) {
    if (t->s && t->memory && t->memory->release) t->memory->release(t->memory->user, t->s, t->cap);
    else free(t->s);
    t->s = NULL;
    t->n = t->cap = 0;
    t->oom = false;
}

/* Empties the text and keeps its memory. */
static inline void te__text_clear(te__text *t) {
    t->n = 0;
    t->oom = false;
    if (t->s) t->s[0] = 0;
}

/* Makes room for `more` further bytes and the NUL. Returns false if there is no memory. */
static TE_MAYBE_UNUSED TE__NOINLINE bool te__text_reserve(te__text *t, size_t more) {
    if (t->oom) return false;
    if (t->cap > t->n && more < t->cap - t->n) return true;
    size_t cap = 64;
    bool fits = more < SIZE_MAX / 2 - t->n - 1;
    char *s = NULL;
    if (fits) {
        while (cap < t->n + more + 1) cap += cap / 2;
        if (t->memory && t->memory->alloc) s = (char *)t->memory->alloc(t->memory->user, cap, 16);
        else s = (char *)malloc(cap);
    }
    if (!s) {
        t->oom = true;
        return false;
    }
    if (t->n) memcpy(s, t->s, t->n);
    s[t->n] = 0;
    size_t n = t->n;
    te__text_free(t);
    t->s = s;
    t->n = n;
    t->cap = cap;
    return true;
}

static TE_MAYBE_UNUSED TE__NOINLINE void te__text_add(te__text *t, const char *s, size_t n) {
    if (n == 0 || !te__text_reserve(t, n)) return;
    memcpy(t->s + t->n, s, n);
    t->n += n;
    t->s[t->n] = 0;
}

static TE_MAYBE_UNUSED TE__NOINLINE void te__text_put(te__text *t, const char *s) { te__text_add(t, s, strlen(s)); }

static inline TE_PRINTF(2, 0) void te__text_vprintf(te__text *t, const char *format, va_list args) {
    va_list again;
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    if (n > 0 && te__text_reserve(t, (size_t)n)) {
        vsnprintf(t->s + t->n, (size_t)n + 1, format, again);
        t->n += (size_t)n;
    }
    va_end(again);
}

static inline TE_PRINTF(2, 3) void te__text_printf(te__text *t, const char *format, ...) {
    va_list args;
    va_start(args, format);
    te__text_vprintf(t, format, args);
    va_end(args);
}

/* Returns a copy of s, or NULL. The caller frees it with free(). */
static inline char *te__strdup(const char *s) {
    size_t n = strlen(s) + 1;
    char *copy = (char *)malloc(n);
    if (copy) memcpy(copy, s, n);
    return copy;
}

static inline bool te__starts_with(const char *s, const char *start) { return strncmp(s, start, strlen(start)) == 0; }
static inline bool te__ends_with(const char *s, const char *end) {
    size_t n = strlen(s), m = strlen(end);
    return n >= m && memcmp(s + n - m, end, m) == 0;
}

/* ---- numbers ---- */

/* Copies to `point` the decimal point of the program's locale: the characters that printf writes between 0 and 5 for
 * 0.5. */
static inline void te__locale_point(char point[16]) {
    char half[32];
    snprintf(half, sizeof half, "%.1f", 0.5);
    size_t n = strlen(half);
    n = n > 2 && n < 18 ? n - 2 : 0;
    memcpy(point, half + 1, n);
    point[n] = 0;
}

/* Adds the number x with the fewest digits (6, 9, 15, 16 or 17) that read back as x; or "inf", "-inf", "nan". */
static inline void te__text_number(te__text *t, double x) {
    static const int digits[5] = {6, 9, 15, 16, 17};
    char number[64] = "nan", point[16];
    if (x == x)
        for (int i = 0; i < 5; i++) {
            snprintf(number, sizeof number, "%.*g", digits[i], x);
            if (x - x != 0 || strtod(number, NULL) == x) break;
        }
    te__locale_point(point);
    char *p = point[0] ? strstr(number, point) : NULL;
    if (!p) {
        te__text_put(t, number);
        return;
    }
    te__text_add(t, number, (size_t)(p - number));
    te__text_put(t, ".");
    te__text_put(t, p + strlen(point));
}

/* Reads a decimal number, such as "-12" or "+2e-3", at the start of s, rounded correctly. Returns the number of bytes
 * read: 0 for "inf", "nan" and white space, 1 for "0x10" (only its 0 is read). */
static inline size_t te__read_number(const char *s, size_t n, double *value) {
    size_t i = 0, point_at = 0, digits = 0;
    bool point = false;
    if (i < n && (s[i] == '-' || s[i] == '+')) i++;
    for (; i < n; i++) {
        if (s[i] >= '0' && s[i] <= '9') {
            digits++;
        } else if (s[i] == '.' && !point) {
            point = true;
            point_at = i;
        } else {
            break;
        }
    }
    if (digits == 0) return 0;
    if (i < n && (s[i] == 'e' || s[i] == 'E')) {
        size_t k = i + 1;
        if (k < n && (s[k] == '-' || s[k] == '+')) k++;
        if (k < n && s[k] >= '0' && s[k] <= '9') {
            while (k < n && s[k] >= '0' && s[k] <= '9') k++;
            i = k;
        }
    }
    char here[128], locale_point[16];
    te__text copy = TE_ZERO;
    te__locale_point(locale_point);
    size_t extra = strlen(locale_point), need = i + extra + 1;
    char *number = here;
    if (need > sizeof here) {
        if (!te__text_reserve(&copy, need)) return 0;
        number = copy.s;
    }
    size_t head = point ? point_at : i;
    memcpy(number, s, head);
    if (point) {
        memcpy(number + head, locale_point, extra);
        memcpy(number + head + extra, s + head + 1, i - head - 1);
        number[i - 1 + extra] = 0;
    } else {
        number[head] = 0;
    }
    *value = strtod(number, NULL);
    te__text_free(&copy);
    return i;
}
