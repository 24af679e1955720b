/* cuda/ptx.c: the embedded PTX of kernels marked te:baseline, for machines without NVRTC. This file depends on text
 * functions only. */

/* The PTX of one kernel. The PTX of different kernels has much in common, so all of it is compressed as one text. */
typedef struct te__baseline {
    const char *kernel;      /* "norm/norm_fwd" */
    const char *text_digest; /* te__unit_digest of its source */
    uint32_t offset;         /* the offset of the PTX in the unpacked text; the PTX ends with a 0 byte */
} te__baseline;
#include "cuda/baseline.inc"

/* ---- embedded PTX --------------------------------------------------------------------------------------------
 *
 * tools/te_ptx.c writes the text: PTX in which each number of a register or label is replaced by its signed difference
 * from the previous number of that kind, as in "%f+1" or "%rd-12". Equal code then has equal text, which compresses
 * better. */

static const char *const te__ptx_kinds[] = {"%r", "%rd", "%rs", "%f", "%fd", "%p", "$L__BB0_"};

/* Returns the kind of the register or label at `text`, or -1. Sets *size to the length of the name before its number.
 * The number begins with a digit or a sign. */
static int te__ptx_kind(const char *text, size_t *size) {
    if (*text != '%' && *text != '$') return -1;
    for (int i = 0; i < TE__COUNT(te__ptx_kinds); i++) {
        size_t n = strlen(te__ptx_kinds[i]);
        char next = strncmp(text, te__ptx_kinds[i], n) == 0 ? text[n] : (char)0;
        *size = n;
        if ((next >= '0' && next <= '9') || next == '+' || next == '-') return i;
    }
    return -1;
}

static void te__ptx_unfold(const char *text, te__text *out) {
    long last[TE__COUNT(te__ptx_kinds)] = TE_ZERO;
    for (size_t n; *text;) {
        int kind = te__ptx_kind(text, &n);
        if (kind >= 0) {
            char *end;
            last[kind] += strtol(text + n, &end, 10);
            te__text_printf(out, "%s%ld", te__ptx_kinds[kind], last[kind]);
            text = end;
        } else {
            n = 1 + strcspn(text + 1, "%$");
            te__text_add(out, text, n);
            text += n;
        }
    }
}

static te__mutex te__baseline_mutex = TE__MUTEX_INIT;
static char *te__baseline_text;

static char *te__baseline_unpack(void) {
    uint8_t *packed = (uint8_t *)malloc(te__baseline_packed_bytes + 1),
            *text = (uint8_t *)malloc(te__baseline_bytes + 1);
    size_t n = packed && text
                   ? te__unbase85(te__baseline_lines, te__num_baseline_lines, packed, te__baseline_packed_bytes)
                   : 0;
    if (n == 0 || te__lz_unpack(packed, n, text, te__baseline_bytes) != te__baseline_bytes) {
        free(text);
        text = NULL;
    }
    free(packed);
    return (char *)text;
}

/* Adds the PTX of a kernel to `ptx`. Returns false if there is none. Unpacks the text once per process. */
static bool te__baseline_find(const char *family, const char *kernel, te__text *ptx) {
    const char *text;
    char name[160];
    int i = 0;
    snprintf(name, sizeof(name), "%s/%s", family, kernel);
    while (i < te__num_baselines && strcmp(te__baselines[i].kernel, name) != 0) i++;
    if (i == te__num_baselines) return false;
    te__mutex_lock(&te__baseline_mutex);
    if (!te__baseline_text) te__baseline_text = te__baseline_unpack();
    text = te__baseline_text;
    te__mutex_unlock(&te__baseline_mutex);
    if (!text) return false;
    te__ptx_unfold(text + te__baselines[i].offset, ptx);
    return !ptx->oom;
}
