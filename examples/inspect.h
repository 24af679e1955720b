/* inspect.h: what quantization does to each operand of each module on the way through a training, as a table (CSV) and as a heat map
 * (SVG). train_gpt.c includes it behind te.h; everything that it calls is public API. */
#ifndef INSPECT_H
#define INSPECT_H
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A slot is one operand of one product of one module, a row of the heat map; a point is what was measured there at a step. */
typedef struct inspect_slot {
    char module[200], operand[8];
    int gemm;
} inspect_slot;
typedef struct inspect_point {
    int step, column, slot; /* column: how many steps before this one were looked at */
    te_quant_stats stats;
} inspect_point;
typedef struct inspection {
    inspect_slot *slots;
    inspect_point *points; /* in the order of the steps */
    int num_slots, num_points, step;
} inspection;

/* Is `step` of 1 .. steps looked at? The first, the last, and 24 between them. */
static inline bool inspect_is_due(int step, int steps) {
    return step == 1 || (int64_t)step * 25 / steps != (int64_t)(step - 1) * 25 / steps;
}

static inline void *inspect_grow(void *items, int count, size_t size) { /* room for one more, where capacities are powers of two */
    if (count & (count - 1)) return items;
    items = realloc(items, (size_t)(count ? 2 * count : 1) * size);
    if (!items) fprintf(stderr, "inspect: out of memory\n"), exit(1);
    return items;
}
static inline void inspect_add(inspection *in, const char *module, int gemm, const char *operand, const te_quant_stats *stats) {
    const inspect_point *before = in->num_points ? &in->points[in->num_points - 1] : NULL;
    int last = before ? before->slot : -1, slot = in->num_slots, column = before ? before->column + (before->step != in->step) : 0;
    for (int i = 0; i < in->num_slots && slot == in->num_slots; i++) { /* most often it follows the one before */
        int k = (last + 1 + i) % in->num_slots;
        const inspect_slot *s = &in->slots[k];
        if (s->gemm == gemm && !strcmp(s->module, module) && !strcmp(s->operand, operand)) slot = k;
    }
    if (slot == in->num_slots) {
        inspect_slot *s = in->slots = inspect_grow(in->slots, slot, sizeof *s);
        s += in->num_slots++;
        snprintf(s->module, sizeof s->module, "%s", module), snprintf(s->operand, sizeof s->operand, "%s", operand);
        s->gemm = gemm;
    }
    in->points = inspect_grow(in->points, in->num_points, sizeof *in->points);
    in->points[in->num_points++] = (inspect_point){in->step, column, slot, *stats};
}

/* Around a step that is due. */
static inline void inspect_begin(te_ctx *te) { te_quant_inspect(te, true); }
static inline bool inspect_visit(void *user, const te_quantizer_role *role, const te_quant_stats *stats) {
    static const char *const operands[] = {"input", "weight", "output", "dy", "dx"}; /* by te_tensor_type */
    inspect_add(user, role->name, role->gemm, operands[role->tensor_type], stats);
    return true;
}
static inline void inspect_end(te_ctx *te, inspection *in, int step) {
    in->step = step;
    te_quant_stats_visit(te, inspect_visit, in);
    te_quant_inspect(te, false);
}

/* ---- the table ---- */

#define INSPECT_COLUMNS "step,module,gemm,operand,amax,scale,underflow,saturated,nan,inf,cosine,snr_db"
static inline void inspect_write_csv(const inspection *in, FILE *f) {
    fprintf(f, INSPECT_COLUMNS "\n");
    for (const inspect_point *p = in->points; p < in->points + in->num_points; p++) {
        const inspect_slot *slot = &in->slots[p->slot];
        const te_quant_stats *s = &p->stats;
        fprintf(f, "%d,%s,%d,%s,%.9g,%.9g,%.9g,%.9g,%lld,%lld,%.9g,%.9g\n", p->step, slot->module, slot->gemm, slot->operand, (double)s->amax,
                (double)s->scale, (double)s->underflow, (double)s->saturated, (long long)s->nan_count, (long long)s->inf_count,
                (double)s->cosine, (double)s->snr_db);
    }
}
/* The measurements of a run that is resumed after `last` steps; later ones will be made anew. */
static inline void inspect_read_csv(inspection *in, FILE *f, int last) {
    char line[600], module[200], operand[8];
    int gemm;
    long long nans, infs;
    te_quant_stats s = {0};
    while (fgets(line, sizeof line, f))
        if (sscanf(line, "%d,%199[^,],%d,%7[^,],%f,%f,%f,%f,%lld,%lld,%f,%f", &in->step, module, &gemm, operand, &s.amax, &s.scale, &s.underflow,
                   &s.saturated, &nans, &infs, &s.cosine, &s.snr_db) == 12 && in->step <= last) {
            s.nan_count = nans, s.inf_count = infs;
            inspect_add(in, module, gemm, operand, &s);
        }
}

/* ---- the heat map: rows are slots, columns are steps, one panel for each of three figures ---- */

enum { INSPECT_LEFT = 200, INSPECT_TOP = 98, INSPECT_PANEL = 280, INSPECT_GAP = 24, INSPECT_BAR = 208 };
enum { INSPECT_LEVELS = 32, INSPECT_NONE = INSPECT_LEVELS, INSPECT_NAN }; /* colors of a panel: of its scale, and two apart */

/* Row i is the first of: 2 a layer, 1 a product, 0 neither. */
static inline int inspect_begins(const inspection *in, int i) {
    const inspect_slot *s = &in->slots[i];
    size_t n = strcspn(s->module, "."); /* the layer is what a path begins with */
    if (i == 0 || strcspn(s[-1].module, ".") != n || strncmp(s->module, s[-1].module, n)) return 2;
    return s->gemm != s[-1].gemm || strcmp(s->module, s[-1].module);
}
/* Decibels between low and high; shares by their logarithm, from a millionth to all. */
static inline int inspect_level(const te_quant_stats *s, int panel, double low, double high) {
    double x = (double)(panel == 0 ? s->snr_db : panel == 1 ? s->underflow : s->saturated);
    if (isnan(x)) return INSPECT_NAN;
    if (panel && x <= 0) return INSPECT_NONE;
    return (int)(INSPECT_LEVELS * fmin(fmax(panel ? 1 + log10(x) / 6 : (x - low) / (high - low), 0), 0.999));
}
/* Dark to bright, where more is better; pale to dark red, where more is worse. */
static inline const char *inspect_color(int level, int panel) {
    static const uint8_t stops[2][5][3] = {{{68, 1, 84}, {59, 82, 139}, {33, 145, 140}, {94, 201, 98}, {253, 231, 37}},
                                           {{254, 232, 200}, {253, 187, 132}, {239, 101, 72}, {204, 32, 20}, {103, 0, 13}}};
    static char color[8];
    if (level >= INSPECT_LEVELS) return level == INSPECT_NAN ? "#000000" : "#f1f1f1";
    const uint8_t (*from)[3] = &stops[panel > 0][4 * level / INSPECT_LEVELS];
    int part = 4 * level % INSPECT_LEVELS, rgb[3];
    for (int k = 0; k < 3; k++) rgb[k] = from[0][k] + (from[1][k] - from[0][k]) * part / INSPECT_LEVELS;
    snprintf(color, sizeof color, "#%02x%02x%02x", rgb[0] & 255, rgb[1] & 255, rgb[2] & 255);
    return color;
}

static inline void inspect_text(FILE *f, double x, double y, int size, const char *anchor, const char *text) {
    fprintf(f, "<text x='%.1f' y='%.1f' font-size='%d' text-anchor='%s'>%s</text>\n", x, y, size, anchor, text);
}
static inline void inspect_write_legend(FILE *f, int panel, double x, double low, double high, double unit) {
    static const char *const heads[] = {"Signal-to-noise ratio, dB", "Underflow: % that became 0", "Saturated: % beyond the scale"};
    double bar = x + INSPECT_PANEL - INSPECT_BAR - 16, width = (double)INSPECT_BAR / INSPECT_LEVELS;
    int ticks = panel ? 3 : (int)((high - low) / unit + 0.5);
    inspect_text(f, x, 60, 13, "start", heads[panel]);
    inspect_text(f, x + 13, 93, 11, "middle", panel ? "none" : "NaN");
    fprintf(f, "<path fill='%s' d='M%.1f 70h14v10h-14z'/>\n", inspect_color(panel ? INSPECT_NONE : INSPECT_NAN, panel), x + 6);
    for (int i = 0; i < INSPECT_LEVELS; i++)
        fprintf(f, "<path fill='%s' d='M%.2f 70h%.2fv10h-%.2fz'/>\n", inspect_color(i, panel), bar + i * width, width + 0.2, width + 0.2);
    for (int i = 0; i <= ticks; i++) {
        char text[32];
        snprintf(text, sizeof text, "%g", panel ? pow(100, i - 2) : low + unit * i);
        inspect_text(f, bar + (double)INSPECT_BAR * i / ticks, 93, 11, "middle", text);
    }
}
static inline void inspect_write_svg(const inspection *in, FILE *f, const char *title) {
    const inspect_point *points = in->points, *end = points + in->num_points;
    int columns = in->num_points ? end[-1].column + 1 : 1, every = columns / 5 + 1, height = in->num_slots > 64 ? 9 : 11;
    double y = INSPECT_TOP, low = INFINITY, high = -INFINITY, width = (double)INSPECT_PANEL / columns;
    double *top = malloc(((size_t)in->num_slots + 1) * sizeof *top);
    if (!top) fprintf(stderr, "inspect: out of memory\n"), exit(1);
    for (int i = 0; i < in->num_slots; i++, y += height) top[i] = y += (int[]){0, 3, 22}[inspect_begins(in, i)];
    for (const inspect_point *p = points; p < end; p++)
        if (isfinite(p->stats.snr_db)) low = fmin(low, (double)p->stats.snr_db), high = fmax(high, (double)p->stats.snr_db);
    double unit = high - low > 20 ? 10 : 5; /* from one tick of the legend to the next */
    low = low <= high ? unit * floor(low / unit) : 0, high = low < high ? unit * ceil(high / unit) : low + unit;

    fprintf(f, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 %d %.0f' font-family='sans-serif'>\n<rect width='100%%' height='100%%' fill='#fff'/>\n",
            INSPECT_LEFT + 3 * (INSPECT_PANEL + INSPECT_GAP), y + 44);
    inspect_text(f, 16, 30, 16, "start", title);
    for (int i = 0; i < in->num_slots; i++) { /* what the rows are: layer, module, operand */
        const inspect_slot *s = &in->slots[i];
        const char *name = strrchr(s->module, '.') ? strrchr(s->module, '.') + 1 : s->module, *product = "";
        char text[240];
        for (int k = 0; k < in->num_slots; k++) /* of modules with two products, which */
            if (in->slots[k].gemm && !strcmp(in->slots[k].module, s->module)) product = s->gemm ? " fc2" : " fc1";
        snprintf(text, sizeof text, "%s%s", name, product);
        if (inspect_begins(in, i)) inspect_text(f, 24, top[i] + height - 2, height - 1, "start", text);
        snprintf(text, sizeof text, "%.*s", (int)strcspn(s->module, "."), s->module);
        if (inspect_begins(in, i) == 2) inspect_text(f, 16, top[i] - 5, 12, "start", text);
        inspect_text(f, INSPECT_LEFT - 6, top[i] + height - 2, height - 1, "end", s->operand);
    }
    for (int panel = 0; panel < 3; panel++) {
        double x = INSPECT_LEFT + panel * (INSPECT_PANEL + INSPECT_GAP);
        inspect_write_legend(f, panel, x, low, high, unit);
        for (int level = 0; level <= INSPECT_NAN; level++) { /* a path for each color, a short thick line for each cell */
            fprintf(f, "<path stroke='%s' stroke-width='%d' d='M0 0", inspect_color(level, panel), height - 1);
            for (const inspect_point *p = points; p < end; p++)
                if (inspect_level(&p->stats, panel, low, high) == level)
                    fprintf(f, "M%.1f %.1fh%.1f", x + p->column * width, top[p->slot] + height / 2.0, width - 0.4);
            fprintf(f, "'/>\n");
        }
        for (const inspect_point *p = points; p < end; p++) {
            char text[16];
            snprintf(text, sizeof text, "%d", p->step);
            if ((p == points || p->column > p[-1].column) && (p->column == columns - 1 || (p->column % every == 0 && p->column + every <= columns)))
                inspect_text(f, x + (p->column + 0.5) * width, y + 16, 11, "middle", text);
        }
        inspect_text(f, x + INSPECT_PANEL / 2.0, y + 32, 11, "middle", "step");
    }
    fprintf(f, "</svg>\n");
    free(top);
}

/* ---- inspect.csv and inspect.svg in a folder ---- */

static inline void inspect_load(inspection *in, const char *folder, int last) {
    char path[4096];
    snprintf(path, sizeof path, "%s/inspect.csv", folder);
    FILE *f = fopen(path, "r"); /* NULL: the run so far was not inspected */
    if (f) inspect_read_csv(in, f, last), fclose(f);
}
static inline void inspect_save(const inspection *in, const char *folder, const char *recipe, const char *model) {
    for (int i = 0; i < 2; i++) { /* whole or not at all: a resumed run reads the table */
        char path[4096], temporary[4096 + 4], title[512];
        snprintf(path, sizeof path, "%s/inspect.%s", folder, i ? "svg" : "csv");
        snprintf(temporary, sizeof temporary, "%s.tmp", path);
        snprintf(title, sizeof title, "What %s does to the operands of a %s", recipe, model);
        FILE *f = fopen(temporary, "w");
        if (f && i) inspect_write_svg(in, f, title);
        if (f && !i) inspect_write_csv(in, f);
        bool written = f && !fclose(f);
#ifdef _WIN32
        if (written) remove(path); /* rename replaces nothing there */
#endif
        if (!written || rename(temporary, path)) fprintf(stderr, "\ncannot write %s\n", path), exit(1);
    }
}
#endif
