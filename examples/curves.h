/* curves.h: losses over the steps of trainings, as a table (CSV) and as a picture (SVG). Knows nothing of te.h. */
#ifndef CURVES_H
#define CURVES_H
#include <math.h>
#include <stdio.h>

typedef struct curve {
    const char *name, *color;
    const float *train, *valid; /* losses by steps done, NaN where there is none */
    int step;                   /* steps done */
} curve;

static inline void curves_write_csv(FILE *f, const curve *curves, int n) {
    fprintf(f, "step");
    for (const curve *r = curves; r < curves + n; r++) fprintf(f, ",%s train,%s validation", r->name, r->name);
    for (int i = 0; i <= curves->step; i++) {
        fprintf(f, "\n%d", i);
        for (const curve *r = curves; r < curves + n; r++) {
            fprintf(f, isnan(r->train[i]) ? "," : ",%.9g", (double)r->train[i]);
            fprintf(f, isnan(r->valid[i]) ? "," : ",%.9g", (double)r->valid[i]);
        }
    }
    fprintf(f, "\n");
}
static inline void curves_write_svg(FILE *f, const curve *curves, int n, int steps, const char *title) {
    enum { W = 860, H = 500, L = 70, R = 30, T = 60, B = 60 };
#define X(k) (L + (W - L - R) * (double)(k) / steps)
#define Y(loss) (H - B - (H - T - B) * (double)(loss) / 6) /* a random guess has log(256) = 5.5 */
    fprintf(f, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 %d %d' font-family='sans-serif' font-size='13'>\n"
            "<rect width='100%%' height='100%%' fill='#fff'/>\n", W, H);
    fprintf(f, "<text x='%d' y='34' font-size='16'>Loss in nats per byte: %s</text>\n", L, title);
    for (int i = 0, k = 0; i <= 6; i++, k = steps * i / 6)
        fprintf(f, "<path d='M%d %.1fH%d' stroke='#ddd'/><text x='%d' y='%.1f' text-anchor='end'>%d</text>\n"
                "<path d='M%.1f %dv5' stroke='#000'/><text x='%.1f' y='%d' text-anchor='middle'>%d</text>\n",
                L, Y(i), W - R, L - 10, Y(i) + 4, i, X(k), H - B, X(k), H - B + 20, k);
    fprintf(f, "<path d='M%d %dV%dH%d' stroke='#000' fill='none'/><text x='%d' y='%d' text-anchor='middle'>step</text>\n",
            L, T, H - B, W - R, (L + W - R) / 2, H - 14);
    for (int i = 0; i < 2 * n; i++) { /* training: a thin line, smoothed; validation: dots */
        const curve *r = &curves[i / 2];
        int dots = i % 2, x = W - R - 240, y = T + 16 + 22 * i;
        double smooth = NAN;
        fprintf(f, "<text x='%d' y='%d'>%s %s</text><path stroke='%s' stroke-width='%d' stroke-linecap='round' fill='none' "
                "d='M%d %dh%d", x + 40, y + 4, r->name, dots ? "validation" : "training, smoothed", r->color, dots ? 10 - i : 1,
                x + 14 * dots, y, dots ? 0 : 28);
        for (int k = 0; k <= r->step; k++) {
            double loss = (double)(dots ? r->valid : r->train)[k];
            if (isnan(loss)) continue;
            fprintf(f, "%c%.1f %.1fh0", dots || isnan(smooth) ? 'M' : 'L', X(k), Y(dots || isnan(smooth) ? loss : smooth));
            smooth = isnan(smooth) ? loss : 0.9 * smooth + 0.1 * loss;
        }
        fprintf(f, "'/>\n");
    }
    fprintf(f, "</svg>\n");
#undef X
#undef Y
}
#endif
