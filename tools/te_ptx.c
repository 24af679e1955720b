/* te_ptx.c: makes src/cuda/baseline.inc, the PTX of the kernels marked te:baseline for drivers without NVRTC.
 *
 *     te_ptx OUT       compiles them for compute_80 without options, packs them, writes OUT
 *     te_ptx --check   fails if the baseline.inc that this tool was built with is not of the kernels that it was built with
 *
 * Writing takes an NVRTC 12.0 (TE_NVRTC_PATH): its PTX is of ISA 8.0, which every driver from CUDA 12.0 on accepts. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "te_parts.h"
#include "lz_pack.h"

enum { BUDGET = 725 * 1000 /* bytes of baseline.inc, which te.h contains */, LINE = 150, MAX_BASELINES = 256 };

typedef struct baseline {
    char name[160], digest[TE__DIGEST_CHARS + 1];
    te__unit unit;
    size_t offset;
} baseline;

static baseline list[MAX_BASELINES];
static int count;

static int by_name(const void *a, const void *b) { return strcmp(((const baseline *)a)->name, ((const baseline *)b)->name); }

/* "ops/norm/norm_fwd.cu" => norm, norm_fwd. False for a path of another kind. */
static bool kernel_path(const char *path, char family[64], char kernel[96]) {
    const char *slash = te__starts_with(path, "ops/") ? strchr(path + 4, '/') : NULL;
    if (!slash || !te__ends_with(path, ".cu")) return false;
    snprintf(family, 64, "%.*s", (int)(slash - path - 4), path + 4);
    snprintf(kernel, 96, "%.*s", (int)(strlen(slash) - 4), slash + 1);
    return true;
}

static bool collect(const te__kernels *kernels, te__text *why) {
    for (int i = 0; i < kernels->num_files; i++) {
        char family[64], kernel[96];
        if (!kernel_path(kernels->files[i].path, family, kernel) || !te__kernel_marks_of(kernels->files[i].text).baseline) continue;
        if (count == MAX_BASELINES) return false;
        baseline *b = &list[count++];
        snprintf(b->name, sizeof b->name, "%s/%s", family, kernel);
        if (!te__unit_open(kernels, family, kernel, &b->unit, why)) return false;
        te__unit_digest(&b->unit, b->digest);
    }
    qsort(list, (size_t)count, sizeof list[0], by_name);
    return true;
}

static int check(void) {
    bool current = count == te__num_baselines;
    for (int i = 0; i < count && current; i++)
        current = strcmp(list[i].name, te__baselines[i].kernel) == 0 && strcmp(list[i].digest, te__baselines[i].text_digest) == 0;
    for (int i = 0; i < te__num_baselines && current; i++) {
        char family[64];
        te__text ptx = TE_ZERO;
        snprintf(family, sizeof family, "%.*s", (int)strcspn(te__baselines[i].kernel, "/"), te__baselines[i].kernel);
        current = te__baseline_find(family, te__baselines[i].kernel + strlen(family) + 1, &ptx) && te__starts_with(ptx.s, ".version 8.0");
        te__text_free(&ptx);
    }
    if (!current) fprintf(stderr, "src/cuda/baseline.inc is stale: run make ptx\n");
    return current ? 0 : 1;
}

/* NVRTC 12.0 defines these in every program (<nv/target>); no kernel reads them, and a hash in their names changes without need. */
static bool useless_line(const char *line) {
    const char *end = line + strcspn(line, "\n"), *name = strstr(line, "2nv6target");
    return te__starts_with(line, ".global ") && name && name < end;
}

/* PTX without comments, empty lines and needless white space. */
static void put_tight(te__text *out, const char *ptx) {
    bool space = false;
    char last = '\n';
    for (const char *p = ptx; *p; p++) {
        if ((last == '\n' && useless_line(p)) || te__starts_with(p, "//")) p += strcspn(p, "\n");
        if (*p == ' ' || *p == '\t') {
            space = true;
            continue;
        }
        if (*p == '\n' && last == '\n') {
            space = false;
            continue;
        }
        if (space && last != '\n' && last != ',' && *p != '\n') te__text_put(out, " ");
        te__text_add(out, p, 1);
        space = false;
        last = *p;
    }
}

/* The inverse of te__ptx_unfold. */
static void fold(te__text *out, const char *ptx) {
    long last[TE__COUNT(te__ptx_kinds)] = TE_ZERO;
    for (size_t n; *ptx;) {
        int kind = te__ptx_kind(ptx, &n);
        if (kind >= 0) {
            char *end;
            long number = strtol(ptx + n, &end, 10);
            te__text_printf(out, "%s%+ld", te__ptx_kinds[kind], number - last[kind]);
            last[kind] = number;
            ptx = end;
        } else {
            te__text_add(out, ptx++, 1);
        }
    }
}

/* Adds the PTX of one kernel as it is embedded, with its NUL. */
static bool compile(const te__nvrtc *nvrtc, baseline *b, te__text *all) {
    te__text ptx = TE_ZERO, log = TE_ZERO, tight = TE_ZERO, again = TE_ZERO;
    bool done = te__nvrtc_compile(nvrtc, &b->unit, "", "compute_80", "-DTE_SMALL", &ptx, &log);
    if (done) {
        put_tight(&tight, ptx.s);
        if (!te__starts_with(te__text_str(&tight), ".version 8.0")) {
            te__text_printf(&log, "NVRTC %d.%d writes PTX of another ISA than 8.0; TE_NVRTC_PATH must name an NVRTC 12.0", nvrtc->major,
                            nvrtc->minor);
            done = false;
        }
    }
    if (done) {
        b->offset = all->n;
        fold(all, tight.s);
        te__ptx_unfold(all->s + b->offset, &again);
        te__text_add(all, "", 1);
        done = strcmp(te__text_str(&again), tight.s) == 0;
        if (!done) te__text_put(&log, "its PTX does not come back as it was: te__ptx_unfold must be taught");
    }
    if (!done) fprintf(stderr, "te_ptx: %s:\n%s\n", b->name, te__text_str(&log));
    te__text_free(&ptx);
    te__text_free(&log);
    te__text_free(&tight);
    te__text_free(&again);
    return done;
}

static void put_file(te__text *out, const te__text *all, const uint8_t *packed, size_t packed_size) {
    char *text = (char *)malloc(te__base85_size(packed_size) + 1);
    if (!text) exit(2);
    te__base85(packed, packed_size, text);
    size_t size = te__base85_size(packed_size);
    te__text_put(out, "/* cuda/baseline.inc: PTX of the kernels marked te:baseline, for drivers without NVRTC. Generated by `make ptx`. */\n");
    te__text_printf(out, "enum { te__num_baselines = %d, te__num_baseline_lines = %d, ", count, (int)((size + LINE - 1) / LINE));
    te__text_printf(out, "te__baseline_packed_bytes = %d, te__baseline_bytes = %d };\n", (int)packed_size, (int)all->n);
    te__text_put(out, "static const te__baseline te__baselines[] = {\n");
    for (int i = 0; i < count; i++)
        te__text_printf(out, "    {\"%s\", \"%s\", %d},\n", list[i].name, list[i].digest, (int)list[i].offset);
    te__text_put(out, "};\nstatic const char *const te__baseline_lines[] = {\n");
    for (size_t at = 0; at < size; at += LINE)
        te__text_printf(out, "    \"%.*s\",\n", (int)(size - at < LINE ? size - at : (size_t)LINE), text + at);
    te__text_put(out, "};\n");
    free(text);
}

static int write_all(const char *path, const te__nvrtc *nvrtc, te__text *why) {
    te__text all = TE_ZERO, out = TE_ZERO;
    int status = 1;
    for (int i = 0; i < count; i++)
        if (!compile(nvrtc, &list[i], &all) || all.oom) return 1;
    uint8_t *packed = (uint8_t *)malloc(te__lz_pack_bound(all.n));
    size_t size = packed ? te__lz_pack((const uint8_t *)all.s, all.n, packed) : 0;
    if (size) {
        put_file(&out, &all, packed, size);
        printf("%d kernels: %zu bytes of PTX, packed %zu, as C text %zu of %d\n", count, all.n, size, out.n, BUDGET);
        for (int i = 0; out.n > BUDGET && i < count; i++) {
            size_t bytes = (i + 1 < count ? (size_t)list[i + 1].offset : all.n) - (size_t)list[i].offset;
            if (bytes > all.n / 50) printf("  %-32s %zu bytes of PTX\n", list[i].name, bytes);
        }
        if (out.oom) te__text_put(why, "out of memory");
        else if (out.n > BUDGET) te__text_put(why, "the embedded PTX exceeds its budget: make the baseline kernels smaller");
        else if (te__file_write_atomic(path, out.s, out.n, why)) status = 0;
    }
    if (status) fprintf(stderr, "te_ptx: %s\n", te__text_str(why));
    free(packed);
    te__text_free(&all);
    te__text_free(&out);
    return status;
}

int main(int argc, char **argv) {
    te__text why = TE_ZERO;
    if (argc != 2) {
        fprintf(stderr, "usage: te_ptx OUT | --check\n");
        return 2;
    }
    bool checking = strcmp(argv[1], "--check") == 0;
    te__kernels *kernels = te__kernels_open(NULL, &why);
    const te__nvrtc *nvrtc = checking ? NULL : te__nvrtc_open(0, &why);
    int status = 2;
    if (!kernels || !collect(kernels, &why) || (!checking && !nvrtc)) fprintf(stderr, "te_ptx: %s\n", te__text_str(&why));
    else status = checking ? check() : write_all(argv[1], nvrtc, &why);
    te__kernels_close(kernels);
    te__text_free(&why);
    return status;
}
