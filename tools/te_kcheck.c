/* te_kcheck.c: compiles every kernel for every architecture with NVRTC, in each option row that its file names. Needs no GPU.
 *
 *     te_kcheck [--arch N | --in-turns] [WORD ...]      only for sm_N; only what has one of the words in its "family/kernel options"
 *
 * --in-turns: a part of the rows. Every fourth option row, for one architecture: of these every third for sm_90, the rest for the others in turns; general rows for sm_80 and one of the others; every sixth row of a kernel for exactly one architecture.
 *
 * Prints registers per thread for each architecture ("!": it spills), and the processor time that the slowest one took to compile.
 * Fails when a kernel does not compile, and, for kernels of exactly one architecture (te:arch 90a), which are written against its
 * register file, when one spills (a row marked te:spills: more bytes than the mark says, or none any more) or when ptxas serialises its wgmma instructions (notes C75xx); and when a row takes too long to
 * compile for sm_90a: users wait for that. Not timed: the general form of a kernel that has option rows as well. It is embedded as PTX; NVRTC
 * compiles the rows.
 *
 * A machine that is shared can be slower by half from one minute to the next, in processor time too. So a row that took too long compiles again, alone,
 * between two compilations of a fixed kernel (the yardstick), and its time counts in proportion to theirs. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "te_parts.h"

enum { NUM_ARCHS = 7, TIMED_ARCH = 90 };
static const int archs[NUM_ARCHS] = {80, 86, 89, 90, 100, 103, 120};

/* Processor seconds of one row at sm_90a: the goal, and the limit. They hold for a core on which the yardstick takes yardstick_seconds. */
static const double seconds_wanted = 1.0, seconds_allowed = 2.0, yardstick_seconds = 0.5;

/* About as much for the front end and for ptxas as a small kernel of attention. */
static const char yardstick_text[] =
    "extern \"C\" __global__ void yardstick(float *x, int n) {\n"
    "    float a[48];\n"
    "    x += threadIdx.x;\n"
    "    for (int i = 0; i < 48; i++) a[i] = x[i * 128];\n"
    "    for (int turn = 0; turn < n; turn++) {\n"
    "#pragma unroll\n"
    "        for (int step = 1; step < 8; step++)\n"
    "#pragma unroll\n"
    "            for (int i = 0; i < 48; i++) a[i] = a[i] * a[(i + step) % 48] + (a[(i + 2 * step) % 48] > 0 ? 1.0f : x[step]);\n"
    "    }\n"
    "    for (int i = 0; i < 48; i++) x[i * 128] = a[i];\n"
    "}\n";

typedef struct result {
    bool wanted, failed, slow;
    int registers, spilled; /* bytes */
    double seconds;         /* of the processor: NVRTC compiles in the thread that calls it */
    te__text log;
} result;

typedef struct row {
    char family[64], kernel[96], options[TE__OPTIONS_TEXT];
    bool ahead; /* the general form of a kernel that has rows: users wait for NVRTC to compile rows alone */
    int spills; /* bytes that it may spill: measured to be quicker than any form that does not */
    te__kernel_marks marks;
    te__unit unit;
    result results[NUM_ARCHS];
} row;

static const te__nvrtc *nvrtc;
static row *rows;
static int64_t num_rows;
TE__ALIGNED(8) static int64_t next_task;
static int only_arch;
static bool in_turns;

/* Is it the turn of archs[a] with this row? */
static bool has_turn(int64_t number, bool general, int a) {
    static const int others[] = {80, 86, 89, 100, 103, 120};
    const int64_t turn = number / 3 * 2 + number % 3;
    const int other = number % 3 == 2 ? TIMED_ARCH : others[turn % (int64_t)(sizeof others / sizeof *others)];
    return archs[a] == other || (general && archs[a] == 80);
}

static row *add_row(const te__kernels *kernels, const char *family, const char *kernel, const char *options, const te__kernel_marks *marks) {
    te__text why = TE_ZERO;
    rows = (row *)realloc(rows, (size_t)(num_rows + 1) * sizeof(row));
    if (!rows) exit(2);
    row *r = &rows[num_rows++];
    memset(r, 0, sizeof *r);
    snprintf(r->family, sizeof r->family, "%s", family);
    snprintf(r->kernel, sizeof r->kernel, "%s", kernel);
    snprintf(r->options, sizeof r->options, "%s", options);
    r->marks = *marks;
    if (!te__unit_open(kernels, family, kernel, &r->unit, &why)) {
        fprintf(stderr, "te_kcheck: %s\n", te__text_str(&why));
        exit(1);
    }
    te__text_free(&why);
    for (int a = 0; a < NUM_ARCHS; a++) {
        bool known = false;
        for (int i = 0; i < nvrtc->num_archs; i++) known |= nvrtc->archs[i] == archs[a];
        r->results[a].wanted = known && (!only_arch || archs[a] == only_arch) && (marks->exact ? archs[a] == marks->arch : archs[a] >= marks->arch) &&
                               (!in_turns || (marks->exact ? num_rows % 6 == 0 : (!options[0] || num_rows % 4 == 0) && has_turn(num_rows / 4, !options[0], a)));
    }
    return r;
}

/* The number-th row of a mark: "X_DT=2|3 Y_DT=1" has "X_DT=2,Y_DT=1" and "X_DT=3,Y_DT=1". Each option takes its value by the number's next digit, whose base is
 * the count of its values. False beyond the last row. */
static bool row_options(const char *text, int number, char out[TE__OPTIONS_TEXT]) {
    size_t used = 0;
    out[0] = 0;
    while (*text) {
        size_t n = strcspn(text, " "), name = strcspn(text, "=") + 1;
        if (name <= n) {
            int count = 1;
            const char *value = text + name;
            for (size_t i = name; i < n; i++) count += text[i] == '|';
            for (int pick = number % count; pick > 0; pick--) value = strchr(value, '|') + 1;
            number /= count;
            if (used + n + 2 < TE__OPTIONS_TEXT)
                used += (size_t)snprintf(out + used, TE__OPTIONS_TEXT - used, "%s%.*s%.*s", used ? "," : "", (int)name, text, (int)strcspn(value, "| "), value);
        }
        text += n + strspn(text + n, " ");
    }
    return number == 0;
}

/* True if no word was given or one is in "family/kernel options". */
static bool chosen(int argc, char **argv, const char *family, const char *kernel, const char *options) {
    char name[TE__LAUNCH_TEXT];
    snprintf(name, sizeof name, "%s/%s %s", family, kernel, options);
    for (int i = 1; i < argc; i++)
        if (strstr(name, argv[i])) return true;
    return argc == 1;
}

/* "ops/norm/norm_fwd.cu" => norm, norm_fwd. False for a path of another kind. */
static bool kernel_path(const char *path, char family[64], char kernel[96]) {
    const char *slash = te__starts_with(path, "ops/") ? strchr(path + 4, '/') : NULL;
    if (!slash || !te__ends_with(path, ".cu")) return false;
    snprintf(family, 64, "%.*s", (int)(slash - path - 4), path + 4);
    snprintf(kernel, 96, "%.*s", (int)(strlen(slash) - 4), slash + 1);
    return true;
}

static int number_before(const char *at, const char *start) {
    while (at > start && at[-1] == ' ') at--;
    while (at > start && at[-1] >= '0' && at[-1] <= '9') at--;
    return atoi(at);
}

/* Seconds that this thread has computed. */
static double thread_seconds(void) {
#ifdef _WIN32
    return te__time_now();
#else
#ifndef CLOCK_THREAD_CPUTIME_ID
#define CLOCK_THREAD_CPUTIME_ID 3 /* Linux; strict ISO C hides it */
#endif
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
#endif
}

static void compile(row *r, int a) {
    result *out = &r->results[a];
    te__text image = TE_ZERO;
    char arch[24];
    double start = thread_seconds();
    out->spilled = 0;
    te__text_free(&out->log);
    te__nvrtc_arch(nvrtc, archs[a], arch, sizeof arch);
    out->failed = !te__nvrtc_compile(nvrtc, &r->unit, r->options, arch, "--ptxas-options=-v", &image, &out->log);
    out->seconds = thread_seconds() - start;
    te__text_free(&image);
    const char *log = te__text_str(&out->log), *at = strstr(log, "Used ");
    if (at) out->registers = atoi(at + 5);
    for (at = log; (at = strstr(at, " bytes spill")) != NULL; at++) out->spilled += number_before(at, log);
    if (r->marks.exact && (out->spilled > r->spills || (r->spills && out->registers && !out->spilled) || strstr(log, "C75"))) out->failed = true;
    out->slow = archs[a] == TIMED_ARCH && !r->ahead && out->seconds > seconds_allowed;
}

static void worker(void *user) {
    (void)user;
    for (int64_t i; (i = te__atomic_add(&next_task, 1)) < num_rows * NUM_ARCHS;) {
        row *r = &rows[i / NUM_ARCHS];
        if (r->results[i % NUM_ARCHS].wanted) compile(r, (int)(i % NUM_ARCHS));
    }
}

/* Seconds that the yardstick takes on this machine now. */
static double time_yardstick(void) {
    te__text image = TE_ZERO, log = TE_ZERO;
    te__kernel_file file = TE_ZERO;
    te__unit unit = TE_ZERO;
    char arch[24];
    file.path = "yardstick.cu";
    file.text = yardstick_text;
    unit.file[unit.num_files++] = &file;
    te__nvrtc_arch(nvrtc, TIMED_ARCH, arch, sizeof arch);
    double start = thread_seconds();
    if (!te__nvrtc_compile(nvrtc, &unit, "", arch, "--ptxas-options=-v", &image, &log)) {
        fprintf(stderr, "te_kcheck: the yardstick does not compile: %s\n", te__text_str(&log));
        exit(1);
    }
    double seconds = thread_seconds() - start;
    te__text_free(&image);
    te__text_free(&log);
    return seconds;
}

/* Compiles the rows that took too long again, by the yardstick; a row may try four times. */
static void compile_slow_ones_again(void) {
    for (int64_t i = 0; i < num_rows; i++)
        for (int a = 0; a < NUM_ARCHS; a++)
            for (int times = 0; times < 4 && rows[i].results[a].slow; times++) {
                result *r = &rows[i].results[a];
                double before = time_yardstick();
                compile(&rows[i], a);
                r->seconds *= yardstick_seconds / (0.5 * (before + time_yardstick()));
                r->slow = r->seconds > seconds_allowed;
            }
}

static void run_all(void) {
    enum { MAX_THREADS = 64 };
    te__thread threads[MAX_THREADS];
    int started = 0, wanted = (int)te__min(te__cpu_count(), MAX_THREADS) - 1;
    while (started < wanted && te__thread_start(&threads[started], worker, NULL)) started++;
    worker(NULL);
    while (started > 0) te__thread_join(&threads[--started]);
    compile_slow_ones_again();
}

static void print_head(void) {
    printf("%-28s %-80s", "kernel", "options");
    for (int a = 0; a < NUM_ARCHS; a++) {
        char arch[24];
        te__nvrtc_arch(NULL, archs[a], arch, sizeof arch);
        printf(" %6s", arch + 3);
    }
    printf("   slowest\n");
}

static int print_row(const row *r) {
    char name[192];
    int failures = 0, slowest = 0;
    snprintf(name, sizeof name, "%s/%s", r->family, r->kernel);
    printf("%-28s %-80s", name, r->options[0] ? r->options : "(general)");
    for (int a = 0; a < NUM_ARCHS; a++) {
        const result *x = &r->results[a];
        char cell[16] = "-";
        if (x->wanted) snprintf(cell, sizeof cell, "%d%s", x->registers, x->spilled ? "!" : "");
        printf(" %6s", x->failed || x->slow ? "FAIL" : cell);
        failures += x->failed || x->slow;
        if (x->seconds > r->results[slowest].seconds) slowest = a;
    }
    printf("  %5.2f s (%d)%s\n", r->results[slowest].seconds, archs[slowest], archs[slowest] == TIMED_ARCH && !r->ahead && r->results[slowest].seconds > seconds_wanted ? " long" : "");
    return failures;
}

static void print_failures(const row *r) {
    for (int a = 0; a < NUM_ARCHS; a++)
        if (r->results[a].failed || r->results[a].slow) {
            fprintf(stderr, "\n%s/%s %s, sm_%d:%s\n", r->family, r->kernel, r->options, archs[a], r->results[a].spilled ? " spills" : "");
            if (r->results[a].slow) fprintf(stderr, "took %.2f s of processor time by the yardstick, %.0f are allowed\n", r->results[a].seconds, seconds_allowed);
            fprintf(stderr, "%s\n", te__text_str(&r->results[a].log));
        }
}

int main(int argc, char **argv) {
    te__text why = TE_ZERO;
    const te__kernels *kernels;
    double start = te__time_now();
    int failures = 0, compiled = 0;
    if (argc > 2 && strcmp(argv[1], "--arch") == 0) {
        only_arch = atoi(argv[2]);
        argc -= 2;
        argv += 2;
    } else if (argc > 1 && strcmp(argv[1], "--in-turns") == 0) {
        in_turns = true;
        argc--;
        argv++;
    }
    nvrtc = te__nvrtc_open(0, &why);
    kernels = te__kernels_get(&why);
    if (!nvrtc || !kernels) {
        fprintf(stderr, "te_kcheck: %s\n", te__text_str(&why));
        return 2;
    }
    for (int i = 0; i < kernels->num_files; i++) {
        char family[64], kernel[96], value[TE__OPTIONS_TEXT], options[TE__OPTIONS_TEXT];
        const char *text = kernels->files[i].text;
        if (!kernel_path(kernels->files[i].path, family, kernel)) continue;
        te__kernel_marks marks = te__kernel_marks_of(text);
        if (marks.baseline && chosen(argc, argv, family, kernel, "")) add_row(kernels, family, kernel, "", &marks)->ahead = te__kernel_mark(text, "row", 0, value, sizeof value);
        int n = 0;
        for (; te__kernel_mark(text, "row", n, value, sizeof value); n++)
            for (int number = 0; row_options(value, number, options); number++)
                if (chosen(argc, argv, family, kernel, options)) add_row(kernels, family, kernel, options, &marks);
        for (int mark = 0; te__kernel_mark(text, "spills", mark, value, sizeof value); mark++)
            for (int number = 0; row_options(value + strcspn(value, "X"), number, options); number++)
                if (chosen(argc, argv, family, kernel, options)) add_row(kernels, family, kernel, options, &marks)->spills = atoi(value);
        if (n == 0 && !marks.baseline && chosen(argc, argv, family, kernel, "")) add_row(kernels, family, kernel, "", &marks);
    }
    run_all();
    printf("NVRTC %d.%d (%s)\n", nvrtc->major, nvrtc->minor, nvrtc->lib.path);
    print_head();
    for (int64_t i = 0; i < num_rows; i++) failures += print_row(&rows[i]);
    for (int64_t i = 0; i < num_rows; i++) {
        print_failures(&rows[i]);
        for (int a = 0; a < NUM_ARCHS; a++) {
            compiled += rows[i].results[a].wanted;
            te__text_free(&rows[i].results[a].log);
        }
    }
    for (int a = 0; a < NUM_ARCHS; a++) {
        bool known = false;
        for (int i = 0; i < nvrtc->num_archs; i++) known |= nvrtc->archs[i] == archs[a];
        if (!known) printf("skipped: sm_%d, which this NVRTC does not know\n", archs[a]);
    }
    printf("yardstick: %.2f s; %.2f s where the limits hold\n", time_yardstick(), yardstick_seconds);
    printf("%d compiled, %d failed, %.0f s\n", compiled, failures, te__time_now() - start);
    free(rows);
    te__text_free(&why);
    return failures ? 1 : 0;
}
