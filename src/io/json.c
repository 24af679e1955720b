/* io/json.c: a strict JSON parser that works in place, and a writer of strings. This file must not depend on the
 * meaning of a document.
 *
 * The caller chooses the function for the type of value that must come next. After the first failure every call does
 * nothing, so the caller may check `failed` later. */

enum { TE__JSON_MAX_NESTING = 32 };

typedef struct te__json {
    te_ctx *te;
    const char *path; /* file name, for messages */
    const char *part; /* name of the parsed part of the file, for messages: "the header" or "the text" */
    char *begin, *at, *end; /* start of the text, current position, end of the text; *end is 0. Strings are unescaped in
                             * place, which only shortens them. */
    bool failed;
} te__json;

/* Begins to parse a text of n bytes; the byte after the text must be 0. `path` and `part` are for error messages. */
static te__json te__json_of(te_ctx *te, const char *path, const char *part, char *text, size_t n) {
    te__json j;
    j.te = te;
    j.path = path;
    j.part = part;
    j.begin = j.at = text;
    j.end = text + n;
    j.failed = false;
    return j;
}
TE_PRINTF(2, 3) static bool te__json_fail(te__json *j, const char *format, ...) {
    char text[512];
    va_list args;
    if (j->failed) return false;
    j->failed = true;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    return te__not_ok(j->te, TE_ERR_FORMAT, "%s: byte %lld of %s: %s", j->path, (long long)(j->at - j->begin), j->part,
                      text);
}

static void te__json_space(te__json *j) {
    while (*j->at == ' ' || *j->at == '\t' || *j->at == '\n' || *j->at == '\r') j->at++;
}
/* Skips spaces. If the next character is `c`, consumes it and returns true. */
static bool te__json_take(te__json *j, char c) {
    te__json_space(j);
    if (*j->at != c || j->at == j->end) return false;
    j->at++;
    return true;
}
static bool te__json_expect(te__json *j, char c) {
    if (j->failed) return false;
    return te__json_take(j, c) ? true : te__json_fail(j, "'%c' is missing", c);
}
/* Opens a list or an object. Returns true if an element follows. Returns false if it is empty, or on an error. */
static bool te__json_open(te__json *j, char open, char close) {
    return te__json_expect(j, open) && !te__json_take(j, close);
}
/* Continues after an element of a list or an object. Returns true if another element follows. Returns false at the end,
 * or on an error. */
static bool te__json_more(te__json *j, char close) {
    if (j->failed || te__json_take(j, close)) return false;
    return te__json_expect(j, ',');
}

static int te__json_hex4(te__json *j) {
    int i, value = 0;
    for (i = 0; i < 4; i++) {
        char c = *j->at;
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0) {
            te__json_fail(j, "\\u needs four hexadecimal digits");
            return 0;
        }
        value = value * 16 + digit;
        j->at++;
    }
    return value;
}

/* Reads an escape and returns its code point, or 0 on an error. On entry j->at must point to the character after the
 * backslash. */
static unsigned te__json_escape(te__json *j) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *p = *j->at ? strchr(from, *j->at) : NULL;
    int low, high;
    if (p) {
        j->at++;
        return (unsigned)(unsigned char)to[p - from];
    }
    if (*j->at != 'u') return te__json_fail(j, "a backslash before something that cannot be escaped");
    j->at++;
    high = te__json_hex4(j);
    if (j->failed) return 0;
    if (high == 0) return te__json_fail(j, "a string with a zero in it");
    if (high < 0xD800 || high > 0xDFFF) return (unsigned)high;
    if (high > 0xDBFF || j->at[0] != '\\' || j->at[1] != 'u') return te__json_fail(j, "half a surrogate pair");
    j->at += 2;
    low = te__json_hex4(j);
    if (j->failed) return 0;
    if (low < 0xDC00 || low > 0xDFFF) return te__json_fail(j, "half a surrogate pair");
    return 0x10000u + (((unsigned)high - 0xD800u) << 10) + ((unsigned)low - 0xDC00u);
}

/* Returns the number of bytes of the UTF-8 character at `text`. Returns 0 if the bytes are not valid UTF-8, for example
 * an overlong form, a surrogate, or a character above U+10FFFF. */
static int te__utf8_length(const char *text) {
    const unsigned char *p = (const unsigned char *)text;
    int n = p[0] < 0x80 ? 1 : p[0] < 0xC2 ? 0 : p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : p[0] < 0xF5 ? 4 : 0, i;
    for (i = 1; i < n; i++)
        if ((p[i] & 0xC0) != 0x80) return 0;
    if (n == 3 && ((p[0] == 0xE0 && p[1] < 0xA0) || (p[0] == 0xED && p[1] > 0x9F))) return 0;
    if (n == 4 && ((p[0] == 0xF0 && p[1] < 0x90) || (p[0] == 0xF4 && p[1] > 0x8F))) return 0;
    return n;
}
static char *te__utf8_put(char *out, unsigned c) {
    if (c < 0x80) {
        *out++ = (char)c;
    } else if (c < 0x800) {
        *out++ = (char)(0xC0 | c >> 6);
        *out++ = (char)(0x80 | (c & 63));
    } else if (c < 0x10000) {
        *out++ = (char)(0xE0 | c >> 12);
        *out++ = (char)(0x80 | (c >> 6 & 63));
        *out++ = (char)(0x80 | (c & 63));
    } else {
        *out++ = (char)(0xF0 | c >> 18);
        *out++ = (char)(0x80 | (c >> 12 & 63));
        *out++ = (char)(0x80 | (c >> 6 & 63));
        *out++ = (char)(0x80 | (c & 63));
    }
    return out;
}

/* Reads a string, unescapes it and terminates it with a 0 byte. Returns NULL on an error. */
static const char *te__json_string(te__json *j) {
    char *start, *out;
    if (!te__json_expect(j, '"')) return NULL;
    start = out = j->at;
    while (!j->failed && *j->at != '"') {
        if (*j->at == '\\') {
            unsigned c;
            j->at++;
            c = te__json_escape(j);
            if (!j->failed) out = te__utf8_put(out, c);
        } else if ((unsigned char)*j->at < 0x20) {
            te__json_fail(j, "%s", j->at == j->end ? "it ends within a string" : "a control character within a string");
        } else {
            int n = te__utf8_length(j->at);
            if (n == 0) te__json_fail(j, "text that is not UTF-8");
            memmove(out, j->at, (size_t)n);
            out += n;
            j->at += n;
        }
    }
    if (j->failed) return NULL;
    j->at++;
    *out = 0;
    return start;
}

/* Reads the key of an object's element; NULL on an error. */
static const char *te__json_key(te__json *j) {
    const char *key = te__json_string(j);
    return te__json_expect(j, ':') ? key : NULL;
}
/* Opens an object and returns its first key, whose value follows; NULL if the object is empty, or on an error. */
static const char *te__json_first(te__json *j) { return te__json_open(j, '{', '}') ? te__json_key(j) : NULL; }
/* Continues after a value of an object and returns the next key; NULL at the end, or on an error. */
static const char *te__json_next(te__json *j) { return te__json_more(j, '}') ? te__json_key(j) : NULL; }
/* Checks that nothing but spaces follows. */
static bool te__json_end(te__json *j) {
    if (j->failed) return false;
    te__json_space(j);
    return j->at == j->end || te__json_fail(j, "something follows the end");
}

/* Reads a whole number from 0 to 2^63 - 1. */
static uint64_t te__json_uint(te__json *j) {
    uint64_t value = 0;
    if (j->failed) return 0;
    te__json_space(j);
    if (*j->at < '0' || *j->at > '9' || (*j->at == '0' && j->at[1] >= '0' && j->at[1] <= '9')) {
        te__json_fail(j, "a whole number is missing");
        return 0;
    }
    for (; *j->at >= '0' && *j->at <= '9'; j->at++) {
        const uint64_t digit = (uint64_t)(*j->at - '0');
        if (value > ((uint64_t)INT64_MAX - digit) / 10) {
            te__json_fail(j, "a number that 63 bits cannot hold");
            return 0;
        }
        value = value * 10 + digit;
    }
    if (*j->at == '.' || *j->at == 'e' || *j->at == 'E') te__json_fail(j, "a number that is not whole");
    return value;
}

static bool te__json_digits(te__json *j) {
    if (*j->at < '0' || *j->at > '9') return te__json_fail(j, "a digit is missing");
    while (*j->at >= '0' && *j->at <= '9') j->at++;
    return true;
}
static void te__json_skip_number(te__json *j) {
    if (*j->at == '-') j->at++;
    if (*j->at == '0')
        j->at++;
    else
        te__json_digits(j);
    if (*j->at == '.') {
        j->at++;
        te__json_digits(j);
    }
    if (*j->at == 'e' || *j->at == 'E') {
        j->at++;
        if (*j->at == '+' || *j->at == '-') j->at++;
        te__json_digits(j);
    }
}
/* If one of the three `words` comes next, reads it and returns its index; otherwise returns -1. */
static int te__json_word(te__json *j) {
    static const char *const words[3] = {"false", "true", "null"};
    int i;
    if (j->failed) return -1;
    te__json_space(j);
    for (i = 0; i < 3; i++)
        if (strncmp(j->at, words[i], strlen(words[i])) == 0) {
            j->at += strlen(words[i]);
            return i;
        }
    return -1;
}
static void te__json_skip_word(te__json *j) {
    if (te__json_word(j) < 0) te__json_fail(j, "a value is missing");
}
/* Reads a number that an f64 can hold. */
static double te__json_number(te__json *j) {
    const char *start;
    double value = 0;
    if (j->failed) return 0;
    te__json_space(j);
    start = j->at;
    te__json_skip_number(j);
    if (j->failed) return 0;
    if (te__read_number(start, (size_t)(j->at - start), &value) == 0 || value - value != 0)
        te__json_fail(j, "a number that is too large");
    return j->failed ? 0 : value;
}
/* Skips a value of any kind. */
static void te__json_skip(te__json *j, int depth) {
    bool more;
    if (j->failed) return;
    te__json_space(j);
    if (depth > TE__JSON_MAX_NESTING) {
        te__json_fail(j, "more than %d brackets within each other", TE__JSON_MAX_NESTING);
    } else if (*j->at == '"') {
        te__json_string(j);
    } else if (*j->at == '[') {
        for (more = te__json_open(j, '[', ']'); more; more = te__json_more(j, ']')) te__json_skip(j, depth + 1);
    } else if (*j->at == '{') {
        const char *key;
        for (key = te__json_first(j); key; key = te__json_next(j)) te__json_skip(j, depth + 1);
    } else if (*j->at == '-' || (*j->at >= '0' && *j->at <= '9')) {
        te__json_skip_number(j);
    } else {
        te__json_skip_word(j);
    }
}

/* ---- writing ---- */

static void te__json_put_string(te__text *t, const char *s) {
    te__text_put(t, "\"");
    for (; *s; s++) {
        if (*s == '"' || *s == '\\')
            te__text_printf(t, "\\%c", *s);
        else if ((unsigned char)*s < 0x20)
            te__text_printf(t, "\\u%04x", (unsigned)(unsigned char)*s);
        else
            te__text_add(t, s, 1);
    }
    te__text_put(t, "\"");
}

static bool te__is_utf8(const char *s) {
    while (*s) {
        int n = te__utf8_length(s);
        if (n == 0) return false;
        s += n;
    }
    return true;
}
