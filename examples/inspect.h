/* inspect.h: what quantization does to each operand of each module on the way through a training, as a table (CSV) and as a heat map
 * (SVG). train_gpt.c includes it behind te.h; everything that it calls is public API. */
#ifndef INSPECT_H
#define INSPECT_H
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A slot is one operand of one product of one module; a point is what was measured there at a step. */
typedef struct inspect_slot {
    char module[200], operand[8];
    int gemm;
} inspect_slot;
typedef struct inspect_point {
    int step, slot;
    te_quant_stats stats;
} inspect_point;
typedef struct inspection {
    inspect_slot *slots;
    inspect_point *points; /* in the order of the steps */
    int num_slots, num_points, step;
} inspection;

/* Is `step` of 1 .. steps looked at? The first, the last, and 24 between them. */
static bool inspect_is_due(int step, int steps) {
    return step == 1 || (int64_t)step * 25 / steps != (int64_t)(step - 1) * 25 / steps;
}

static void *inspect_grow(void *items, int count, size_t size) { /* room for one more, where capacities are powers of two */
    if (count & (count - 1)) return items;
    items = realloc(items, (size_t)(count ? 2 * count : 1) * size);
    if (!items) fprintf(stderr, "inspect: out of memory\n"), exit(1);
    return items;
}
static void inspect_add(inspection *in, const char *module, int gemm, const char *operand, const te_quant_stats *stats) {
    int last = in->num_points ? in->points[in->num_points - 1].slot : -1, slot = in->num_slots;
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
    in->points[in->num_points++] = (inspect_point){in->step, slot, *stats};
}

/* Around a step that is due. */
static void inspect_begin(te_ctx *te) { te_quant_inspect(te, true); }
static bool inspect_visit(void *user, const te_quantizer_role *role, const te_quant_stats *stats) {
    static const char *const operands[] = {"input", "weight", "output", "dy", "dx"}; /* by te_tensor_type */
    inspect_add(user, role->name, role->gemm, operands[role->tensor_type], stats);
    return true;
}
static void inspect_end(te_ctx *te, inspection *in, int step) {
    in->step = step;
    te_quant_stats_visit(te, inspect_visit, in);
    te_quant_inspect(te, false);
}

/* ---- the table ---- */

#define INSPECT_COLUMNS "step,module,gemm,operand,amax,scale,underflow,saturated,nan,inf,cosine,snr_db"
static void inspect_write_csv(const inspection *in, FILE *f) {
    fprintf(f, INSPECT_COLUMNS "\n");
    for (const inspect_point *p = in->points; p < in->points + in->num_points; p++) {
        const inspect_slot *slot = &in->slots[p->slot];
        const te_quant_stats *s = &p->stats;
        fprintf(f, "%d,%s,%d,%s,%.9g,%.9g,%.9g,%.9g,%lld,%lld,%.9g,%.9g\n", p->step, slot->module, slot->gemm, slot->operand, (double)s->amax,
                (double)s->scale, (double)s->underflow, (double)s->saturated, (long long)s->nan_count, (long long)s->inf_count,
                (double)s->cosine, (double)s->snr_db);
    }
}
/* What a run that is resumed after `last` steps has measured so far; later points will be measured anew. */
static void inspect_read_csv(inspection *in, FILE *f, int last) {
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

enum { INSPECT_LEVELS = 32, INSPECT_PANEL = 280, INSPECT_GAP = 24, INSPECT_LEFT = 200, INSPECT_TOP = 98 };

/* What begins with row i: 2 a layer, 1 a product, 0 neither. */
static int inspect_begins(const inspection *in, int i) {
    const inspect_slot *s = &in->slots[i];
    size_t n = strcspn(s->module, "."); /* the layer is what a path begins with */
    if (i == 0 || strcspn(s[-1].module, ".") != n || strncmp(s->module, s[-1].module, n)) return 2;
    return s->gemm != s[-1].gemm || strcmp(s->module, s[-1].module);
}
static float inspect_figure(const te_quant_stats *s, int panel) { return panel == 0 ? s->snr_db : panel == 1 ? s->underflow : s->saturated; }

/* Position in 0 .. 1 of a panel's scale: decibels from low to high; shares by their logarithm, from a millionth to all. */
static double inspect_position(double x, int panel, double low, double high) {
    return fmin(fmax(panel == 0 ? (x - low) / (high - low) : 1 + log10(x) / 6, 0), 1);
}
/* Dark to bright, where more is better; pale to dark red, where more is worse. */
static const char *inspect_color(double position, int panel) {
    static const uint8_t stops[2][5][3] = {{{68, 1, 84}, {59, 82, 139}, {33, 145, 140}, {94, 201, 98}, {253, 231, 37}},
                                           {{254, 232, 200}, {253, 187, 132}, {239, 101, 72}, {204, 32, 20}, {103, 0, 13}}};
    static char color[8];
    int i = position < 1 ? (int)(4 * position) : 3, rgb[3];
    for (int k = 0; k < 3; k++) {
        const uint8_t (*stop)[3] = &stops[panel > 0][i];
        rgb[k] = (int)(stop[0][k] + (4 * position - i) * (stop[1][k] - stop[0][k]) + 0.5);
    }
    snprintf(color, sizeof color, "#%02x%02x%02x", rgb[0] & 255, rgb[1] & 255, rgb[2] & 255);
    return color;
}

static void inspect_write_svg(const inspection *in, FILE *f, const char *title) {
    static const char *const heads[] = {"Signal-to-noise ratio, dB", "Underflow: % that became 0", "Saturated: % beyond the scale"};
    const inspect_point *points = in->points, *end = points + in->num_points;
    int columns = 0, row = in->num_slots > 64 ? 9 : 11, width = INSPECT_LEFT + 3 * (INSPECT_PANEL + INSPECT_GAP);
    double *top = malloc(((size_t)in->num_slots + 1) * sizeof *top), y = INSPECT_TOP, low = INFINITY, high = -INFINITY;
    if (!top) return;
    for (const inspect_point *p = points; p < end; p++) {
        columns += p == points || p->step != p[-1].step;
        if (isfinite(p->stats.snr_db)) low = fmin(low, p->stats.snr_db), high = fmax(high, p->stats.snr_db);
    }
    double unit = high - low > 20 ? 10 : 5; /* from one tick of the legend to the next */
    low = low <= high ? unit * floor(low / unit) : 0, high = low < high ? unit * ceil(high / unit) : low + unit;
    double step = columns ? (double)INSPECT_PANEL / columns : 0;

    for (int i = 0; i < in->num_slots; i++, y += row) top[i] = y += (int[]){0, 3, 22}[inspect_begins(in, i)];
    double bottom = y;
    fprintf(f, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 %d %.0f' font-family='sans-serif' font-size='11'>\n"
            "<rect width='100%%' height='100%%' fill='#fff'/>\n<text x='16' y='30' font-size='16'>%s</text>\n", width, bottom + 44, title);

    for (int i = 0; i < in->num_slots; i++) { /* row labels: layer, module, operand */
        const inspect_slot *s = &in->slots[i];
        const char *name = strrchr(s->module, '.');
        int begins = inspect_begins(in, i);
        bool two = false; /* products in this module */
        for (int k = 0; k < in->num_slots; k++) two |= in->slots[k].gemm > 0 && !strcmp(in->slots[k].module, s->module);
        if (begins > 1) fprintf(f, "<text x='16' y='%.1f' font-weight='bold'>%.*s</text>\n", top[i] - 5, (int)strcspn(s->module, "."), s->module);
        if (begins)
            fprintf(f, "<text x='16' y='%.1f' font-size='%d'>%s%s</text>\n", top[i] + row - 2, row - 1, name ? name + 1 : s->module,
                    !two ? "" : s->gemm ? " fc2" : " fc1");
        fprintf(f, "<text x='%d' y='%.1f' font-size='%d' text-anchor='end' fill='#555'>%s</text>\n", INSPECT_LEFT - 6, top[i] + row - 2, row - 1, s->operand);
    }
    for (int panel = 0; panel < 3; panel++) {
        int x = INSPECT_LEFT + panel * (INSPECT_PANEL + INSPECT_GAP), column = -1, every = columns / 5 + 1;
        fprintf(f, "<text x='%d' y='60' font-size='13'>%s</text>\n", x, heads[panel]); /* the legend */
        for (int i = 0; i < INSPECT_LEVELS; i++)
            fprintf(f, "<rect x='%.2f' y='70' width='%.2f' height='10' fill='%s'/>\n", x + 40 + i * (INSPECT_PANEL - 60.0) / INSPECT_LEVELS,
                    (INSPECT_PANEL - 60.0) / INSPECT_LEVELS + 0.2, inspect_color((i + 0.5) / INSPECT_LEVELS, panel));
        for (int i = 0, ticks = panel ? 3 : (int)((high - low) / unit + 0.5); i <= ticks; i++)
            fprintf(f, "<text x='%.1f' y='93' text-anchor='middle'>%g</text>\n", x + 40 + i * (INSPECT_PANEL - 60.0) / ticks,
                    panel ? pow(100, i - 2) : low + unit * i);
        fprintf(f, "<rect x='%d' y='70' width='14' height='10' fill='%s'/><text x='%d' y='93' text-anchor='middle'>%s</text>\n", x + 6,
                panel ? "#f1f1f1" : "#000", x + 13, panel ? "none" : "NaN");
        /* One path for each color: a cell is a short horizontal line. The last two colors are those of "none" and of NaN. */
        for (int level = 0; level < INSPECT_LEVELS + 2; level++) {
            bool any = false;
            column = -1;
            for (const inspect_point *p = points; p < end; p++) {
                float v = inspect_figure(&p->stats, panel);
                column += p == points || p->step != p[-1].step;
                int l = isnan(v) ? INSPECT_LEVELS + 1 : panel && v <= 0 ? INSPECT_LEVELS : (int)(inspect_position(v, panel, low, high) * (INSPECT_LEVELS - 0.01));
                if (l != level) continue;
                if (!any)
                    fprintf(f, "<path stroke='%s' stroke-width='%d' d='", level == INSPECT_LEVELS + 1 ? "#000" : level == INSPECT_LEVELS ? "#f1f1f1" :
                            inspect_color((level + 0.5) / INSPECT_LEVELS, panel), row - 1);
                any = true;
                fprintf(f, "M%.1f %.1fh%.1f", x + column * step, top[p->slot] + row / 2.0, step - 0.4);
            }
            if (any) fprintf(f, "'/>\n");
        }
        column = -1;
        for (const inspect_point *p = points; p < end; p++) { /* which steps they are */
            if (p > points && p->step == p[-1].step) continue;
            if ((++column % every == 0 && column + every <= columns) || column == columns - 1)
                fprintf(f, "<text x='%.1f' y='%.1f' text-anchor='middle'>%d</text>\n", x + (column + 0.5) * step, bottom + 16, p->step);
        }
        fprintf(f, "<text x='%d' y='%.1f' text-anchor='middle'>step</text>\n", x + INSPECT_PANEL / 2, bottom + 32);
    }
    fprintf(f, "</svg>\n");
    free(top);
}

/* ---- inspect.csv and inspect.svg in a folder ---- */

static void inspect_load(inspection *in, const char *folder, int last) {
    char path[4096];
    snprintf(path, sizeof path, "%s/inspect.csv", folder);
    FILE *f = fopen(path, "r"); /* NULL: the run so far was not inspected */
    if (f) inspect_read_csv(in, f, last), fclose(f);
}
static void inspect_save(const inspection *in, const char *folder, const char *recipe, const char *model) {
    for (int i = 0; i < 2; i++) { /* whole or not at all: a resumed run reads the table */
        char path[4096], temporary[4096 + 4], title[512];
        snprintf(path, sizeof path, "%s/inspect.%s", folder, i ? "svg" : "csv");
        snprintf(temporary, sizeof temporary, "%s.tmp", path);
        snprintf(title, sizeof title, "What %s does to the operands of a %s", recipe, model);
        FILE *f = fopen(temporary, "w");
        if (f && i) inspect_write_svg(in, f, title);
        if (f && !i) inspect_write_csv(in, f);
        if (!f || fclose(f) || rename(temporary, path)) fprintf(stderr, "\ncannot write %s\n", path), exit(1);
    }
}
#endif
