/* io/config_keys.c: reads a JSON object of a config.json into a struct by a table of keys (te__hf_key), and checks
 * values. This file must not depend on the meaning of a key. */

typedef enum te__hf_kind {
    TE__HF_COUNT,
    TE__HF_NUMBER,
    TE__HF_CAP, /* a number; null is a separate value, not the default */
    TE__HF_BOOL,
    TE__HF_STRING
} te__hf_kind;
typedef struct te__hf_key {
    const char *name;
    te__hf_kind kind;
    size_t offset;
} te__hf_key;

/* A missing key is stored as NAN (TE__HF_NUMBER, TE__HF_CAP), -1 (TE__HF_COUNT, TE__HF_BOOL) or NULL (TE__HF_STRING). A
 * JSON null is stored like a missing key, but a TE__HF_COUNT or TE__HF_CAP has a marker of its own for null (below). No
 * value in a file is stored like a missing key or like null. */
#define TE__HF_NULL (-2)                    /* null of a TE__HF_COUNT */
#define TE__HF_NULL_CAP ((double)-INFINITY) /* null of a TE__HF_CAP */

/* Marks every key of the table as missing in the struct `s`. */
static void te__hf_clear(void *s, const te__hf_key *keys, int num_keys) {
    int i;
    for (i = 0; i < num_keys; i++) {
        char *at = (char *)s + keys[i].offset;
        if (keys[i].kind == TE__HF_NUMBER || keys[i].kind == TE__HF_CAP) *(double *)(void *)at = (double)NAN;
        else if (keys[i].kind == TE__HF_STRING) *(char **)(void *)at = NULL;
        else *(int64_t *)(void *)at = -1;
    }
}
static bool te__hf_missing(const char *at, te__hf_kind kind) {
    if (kind == TE__HF_NUMBER || kind == TE__HF_CAP) return isnan(*(const double *)(const void *)at);
    if (kind == TE__HF_STRING) return !*(char *const *)(const void *)at;
    return *(const int64_t *)(const void *)at == -1;
}

/* Reads the value of key `name` into a field of the struct `s`. If the table lacks the key, only sets *known to
 * false. */
static bool te__hf_take(te__json *j, void *s, const te__hf_key *keys, int num_keys, const char *name, bool *known) {
    int i;
    for (i = 0; i < num_keys && strcmp(keys[i].name, name) != 0; i++) {}
    *known = i < num_keys;
    if (!*known) return true;
    {
        char *at = (char *)s + keys[i].offset;
        int word = te__json_word(j);
        if (j->failed) return false;
        if (!te__hf_missing(at, keys[i].kind)) return te__json_fail(j, "\"%.60s\" is given twice", name);
        if (word == 2 && keys[i].kind == TE__HF_CAP) *(double *)(void *)at = TE__HF_NULL_CAP;
        if (word == 2 && keys[i].kind == TE__HF_COUNT) *(int64_t *)(void *)at = TE__HF_NULL;
        if (word == 2) return true;
        if (word >= 0 && keys[i].kind != TE__HF_BOOL)
            return te__json_fail(j, "\"%.60s\" is %s", name, word ? "true" : "false");
        if (keys[i].kind == TE__HF_COUNT) *(int64_t *)(void *)at = (int64_t)te__json_uint(j);
        else if (keys[i].kind == TE__HF_NUMBER || keys[i].kind == TE__HF_CAP)
            *(double *)(void *)at = te__json_number(j);
        else if (keys[i].kind == TE__HF_STRING) *(char **)(void *)at = (char *)te__json_string(j);
        else if (word < 0) return te__json_fail(j, "\"%.60s\" is neither true nor false", name);
        else *(int64_t *)(void *)at = word;
    }
    return !j->failed;
}

/* ---- checks of values ---- */

/* Records an error about the file that `j` reads; returns false. */
TE_PRINTF(3, 4) static bool te__hf_refuse(const te__json *j, te_result code, const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    return te__not_ok(j->te, code, "%s: %s", j->path, text);
}
/* Checks that a count is a whole number from `least` to INT_MAX. */
static bool te__hf_count(const te__json *j, const char *name, int64_t value, int64_t least) {
    if (value < 0) return te__hf_refuse(j, TE_ERR_FORMAT, "%s is %s", name, value == TE__HF_NULL ? "null" : "missing");
    if (value >= least && value <= INT_MAX) return true;
    return te__hf_refuse(j, TE_ERR_FORMAT, "%s is %lld; %lld to %d are possible", name, (long long)value,
                         (long long)least, INT_MAX);
}
/* Checks that `value` is positive and fits into an f32, and stores it in *to. If `value` is NAN, stores `missing`. */
static bool te__hf_positive(const te__json *j, const char *name, double value, double missing, float *to) {
    const bool fits = isnan(value) || (value > 0 && value <= FLT_MAX && (float)value > 0.0f);
    *to = (float)(isnan(value) ? missing : fits ? value : 0);
    if (fits) return true;
    return te__hf_refuse(j, TE_ERR_FORMAT, "%s is %g; a positive number is needed", name, value);
}
