/* ops/softcap/cpu.c: the CPU's reference of softcap. This file must not depend on CUDA. */

enum { TE__SOFTCAP_RUN = 512 };

static void te__softcap_runs(void *user, int64_t begin, int64_t end) {
    const te__softcap_kargs *a = (const te__softcap_kargs *)user;
    float x[TE__SOFTCAP_RUN], dy[TE__SOFTCAP_RUN];
    int64_t run, i;
    for (run = begin; run < end; run++) {
        const int64_t at = run * TE__SOFTCAP_RUN, n = te__min(TE__SOFTCAP_RUN, a->count - at);
        te__load_row(a->x, (te_dtype)a->x_dt, at, n, x);
        if (a->dy) te__load_row(a->dy, (te_dtype)a->dy_dt, at, n, dy);
        for (i = 0; i < n; i++) {
            const float t = tanhf(x[i] / a->cap);
            x[i] = a->dy ? dy[i] * (1.0f - t * t) : a->cap * t;
        }
        te__store_row(a->y, (te_dtype)a->y_dt, at, n, x);
    }
}
static te_result te__cpu_softcap(te_ctx *te, const te_op_softcap_args *args) {
    te__softcap_kargs a = te__softcap_problem(args);
    te__parallel_for(te, te__div_up(a.count, TE__SOFTCAP_RUN), 4, te__softcap_runs, &a);
    return TE_OK;
}
