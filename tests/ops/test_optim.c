/* The optimizer's operations against a host Adam in double, and sums in double; many tensors of mixed formats and sizes in one call, outputs
 * between guard bands. */
#include "../te_test.h"

static const te_dtype floats[] = {TE_F32, TE_BF16, TE_F16};

/* ---- adam ---- */

typedef struct entry {
    int64_t n;
    te_dtype grad_dtype, param_dtype;
    bool master, misaligned;
    double *p, *m, *v; /* the reference */
    te_adam_tensor t;
} entry;

static te_tensor *guarded(te_ctx *te, te_dtype dtype, int64_t n, const float *values, bool misaligned) {
    te_tensor *x = test_guarded(te, dtype, SHAPE(n + misaligned));
    if (misaligned) x = te_tensor_narrow(x, 0, 1, n);
    te_tensor_copy(x, test_tensor(te, dtype, SHAPE(n), values));
    return x;
}

static void make_entry(te_ctx *te, entry *e, uint64_t seed) {
    const float *start = test_rounded(e->param_dtype, test_normal(e->n, seed), e->n);
    float *zeros = test_floats(e->n);
    e->p = test_doubles(e->n);
    e->m = test_doubles(e->n);
    e->v = test_doubles(e->n);
    for (int64_t i = 0; i < e->n; i++) e->p[i] = start[i];
    e->t.param = guarded(te, e->param_dtype, e->n, start, e->misaligned);
    e->t.m = guarded(te, TE_F32, e->n, zeros, e->misaligned);
    e->t.v = guarded(te, TE_F32, e->n, zeros, false);
    e->t.master = e->master ? guarded(te, TE_F32, e->n, start, false) : NULL;
}

static void reference_step(entry *e, const float *grad, const te_op_adam_args *a, double grad_scale, double lr) {
    double bc1 = a->no_bias_correction ? 1 : 1 - pow(a->beta1, (double)a->step), bc2 = a->no_bias_correction ? 1 : 1 - pow(a->beta2, (double)a->step);
    for (int64_t i = 0; i < e->n; i++) {
        double g = grad[i] * grad_scale + (a->no_adam_w_mode ? a->weight_decay * e->p[i] : 0);
        e->m[i] = a->beta1 * e->m[i] + (1 - (double)a->beta1) * g;
        e->v[i] = a->beta2 * e->v[i] + (1 - (double)a->beta2) * g * g;
        e->p[i] -= lr * (e->m[i] / bc1 / (sqrt(e->v[i] / bc2) + a->eps) + (a->no_adam_w_mode ? 0 : a->weight_decay * e->p[i]));
    }
    /* Without a master the rounded parameter is all there is. */
    if (e->master || e->param_dtype == TE_F32) return;
    float *p = test_floats(e->n);
    for (int64_t i = 0; i < e->n; i++) p[i] = (float)e->p[i];
    p = test_rounded(e->param_dtype, p, e->n);
    for (int64_t i = 0; i < e->n; i++) e->p[i] = p[i];
}

static float *as_float(const double *x, int64_t n) {
    float *f = test_floats(n);
    for (int64_t i = 0; i < n; i++) f[i] = (float)x[i];
    return f;
}

static void run_adam(te_ctx *te, entry *e, int num, te_op_adam_args a, int steps, float grad_scale, float lr_device) {
    te_adam_tensor list[400];
    for (int i = 0; i < num; i++) make_entry(te, &e[i], 100 + (uint64_t)i);
    a.tensors = list;
    a.num_tensors = num;
    if (grad_scale != 1) a.grad_scale = test_tensor(te, TE_F32, SHAPE(1), &grad_scale);
    if (lr_device != 0) a.lr_device = test_tensor(te, TE_F32, SHAPE(1), &lr_device);
    for (int step = 1; step <= steps; step++) {
        a.step = step;
        for (int i = 0; i < num; i++) {
            const float *grad = test_rounded(e[i].grad_dtype, test_normal(e[i].n, (uint64_t)(1000 * step + i)), e[i].n);
            list[i] = e[i].t;
            list[i].grad = guarded(te, e[i].grad_dtype, e[i].n, grad, e[i].misaligned);
            reference_step(&e[i], grad, &a, grad_scale, lr_device != 0 ? lr_device : a.lr);
        }
        CHECK_EQ_INT(te_op_adam(te, &a), TE_OK);
        REQUIRE_OK(te);
    }
    for (int i = 0; i < num; i++) {
        entry *x = &e[i];
        if (x->n == 0) continue;
        test_case("tensor %d of %d: %d elements, grad %s, param %s, master %d", i, num, (int)x->n, te_dtype_name(x->grad_dtype),
                  te_dtype_name(x->param_dtype), x->master);
        /* A few roundings of f32 a step. A 16-bit parameter without a master may round the other way in some step: half a unit, and what
         * follows from it. */
        bool rounded = !x->master && x->param_dtype != TE_F32;
        double step = x->param_dtype == TE_BF16 ? 0x1p-8 : x->param_dtype == TE_F16 ? 0x1p-11 : 0;
        CHECK_TENSOR(x->t.m, as_float(x->m, x->n), rounded && a.no_adam_w_mode ? 1e-2 : 2e-6, 1e-6);
        CHECK_TENSOR(x->t.v, as_float(x->v, x->n), rounded && a.no_adam_w_mode ? 1e-2 : 2e-6, 1e-7);
        if (x->master) CHECK_TENSOR(x->t.master, as_float(x->p, x->n), 2e-6, 2e-6);
        CHECK_TENSOR(x->t.param, as_float(x->p, x->n), rounded ? 2 * step : step + 2e-6, 4e-6);
        if (x->master) { /* exactly the master's rounding */
            const float *master = test_read(x->t.master);
            CHECK_TENSOR(x->t.param, test_rounded(x->param_dtype, master, x->n), 0, 0);
        }
    }
}

static te_op_adam_args usual(void) {
    te_op_adam_args a = {0};
    a.lr = 1e-2f;
    a.beta1 = 0.9f;
    a.beta2 = 0.999f;
    a.eps = 1e-8f;
    return a;
}

TE_TEST_DEVICES(adam_formats) {
    static const int64_t sizes[] = {1, 3, 4, 1000, 4096, 4099, 12345, 0};
    static entry e[8 * 18];
    int num = 0;
    memset(e, 0, sizeof e);
    for (int s = 0; s < COUNT(sizes); s++)
        for (int d = 0; d < 18; d++) {
            if ((18 * s + d) % test_every_odd(2)) continue;
            entry *x = &e[num++];
            x->n = sizes[s];
            x->grad_dtype = floats[d % 3];
            x->param_dtype = floats[d / 3 % 3];
            x->master = d >= 9;
            x->misaligned = (s + d) % 5 == 0;
        }
    run_adam(te, e, num, usual(), 3, 1, 0);
}

TE_TEST_DEVICES(adam_modes) {
    for (int mode = 0; mode < 8; mode++) {
        entry e[3];
        te_op_adam_args a = usual();
        memset(e, 0, sizeof e);
        for (int i = 0; i < 3; i++) e[i].n = 500, e[i].grad_dtype = e[i].param_dtype = floats[i], e[i].master = i > 0;
        a.no_adam_w_mode = mode & 1;
        a.weight_decay = 0.1f;
        a.no_bias_correction = mode & 2;
        a.eps = mode & 4 ? 1e-3f : 1e-8f;
        run_adam(te, e, 3, a, 5, mode & 4 ? 0.25f : 1, mode & 2 ? 3e-3f : 0);
    }
}

TE_TEST_DEVICES(adam_many_tensors) {
    static entry e[200];
    memset(e, 0, sizeof e);
    for (int i = 0; i < 200; i++) e[i].n = 1 + i * 37 % 5000, e[i].grad_dtype = TE_BF16, e[i].param_dtype = TE_BF16, e[i].master = true;
    run_adam(te, e, 200, usual(), 2, 1, 0);
}

TE_TEST_DEVICES(adam_found_inf) {
    const float flags[] = {1, 0}, grad[] = {1, 2, 3, INFINITY, NAN}, zeros[5] = {0}, ones[] = {1, 1, 1, 1, 1};
    for (int i = 0; i < 2; i++) {
        te_adam_tensor t = {0};
        t.grad = test_tensor(te, TE_F32, SHAPE(5), grad);
        t.param = guarded(te, TE_F32, 5, ones, false);
        t.m = guarded(te, TE_F32, 5, zeros, false);
        t.v = guarded(te, TE_F32, 5, zeros, false);
        te_op_adam_args a = usual();
        a.tensors = &t;
        a.num_tensors = 1;
        a.step = 1;
        a.found_inf = test_tensor(te, TE_F32, SHAPE(1), &flags[i]);
        te_op_adam(te, &a);
        REQUIRE_OK(te);
        const float *p = test_read(t.param);
        if (i == 0) CHECK_BYTES("param", p, ones, 20);
        else CHECK(fabs(p[0] - 0.99) < 1e-6 && isnan(p[3]) && isnan(p[4])); /* otherwise what is not finite goes through */
        for (int k = 0; k < 3; k++) { /* (1 - beta) g and (1 - beta) g^2, a rounding or two of f32 away */
            double g = (double)grad[k];
            CHECK(i == 0 ? test_read(t.m)[k] == 0 && test_read(t.v)[k] == 0
                         : fabs((double)test_read(t.m)[k] / ((1 - (double)a.beta1) * g) - 1) < 1e-6 && fabs((double)test_read(t.v)[k] / ((1 - (double)a.beta2) * g * g) - 1) < 1e-6);
        }
    }
    te_op_adam_args none = usual();
    none.step = 1;
    CHECK_EQ_INT(te_op_adam(te, &none), TE_OK);
}

/* ---- states of 16 and 8 bits ---- */

static te_tensor *scale_for(te_ctx *te, te_dtype dtype) {
    const float start = 0.5f;
    return dtype == TE_F16 || dtype == TE_F8E4M3 ? test_guarded_with(te, TE_F32, SHAPE(1), &start) : NULL;
}
/* The elements of a state times its scale. */
static double *unscaled(te_tensor *x, te_tensor *scale) {
    int64_t n = te_tensor_numel(x);
    const float *stored = test_read(x);
    double *out = test_doubles(n), factor = scale ? (double)test_read(scale)[0] : 1;
    for (int64_t i = 0; i < n; i++) out[i] = stored[i] * factor;
    return out;
}
/* `x` and its scale hold `want`: each number is off by half a step of the format, of its own size or of the smallest one, and by f32's roundings of terms
 * that may cancel. */
static void check_state(const char *name, te_tensor *x, te_tensor *scale, const double *want) {
    int64_t n = te_tensor_numel(x);
    te_dtype dtype = te_tensor_dtype(x);
    const double *got = unscaled(x, scale);
    double most = 0, range = dtype == TE_F8E4M3 ? 448 : 32752, factor = scale ? (double)test_read(scale)[0] : 1;
    double step = dtype == TE_F8E4M3 ? 0x1p-4 : dtype == TE_F16 ? 0x1p-11 : dtype == TE_BF16 ? 0x1p-8 : 0, least = dtype == TE_F8E4M3 ? 0x1p-10 : 0x1p-25;
    for (int64_t i = 0; i < n; i++) most = fmax(most, fabs(want[i]));
    if (scale) CHECK_MSG(fabs(factor - most / range) <= 4e-6 * most / range, "%s: the scale is %g; the largest number is %g", name, factor, most);
    for (int64_t i = 0; i < n; i++)
        CHECK_MSG(fabs(got[i] - want[i]) <= (step + 4e-6) * fabs(want[i]) + (scale ? least * factor : 0) + 1e-6 * fmax(most, 0.1), "%s[%d] is %g; %g is right", name, (int)i, got[i], want[i]);
}

/* The reference takes each step from the states that the step before has stored: their rounding is part of the next step. */
TE_TEST_DEVICES(adam_states_of_16_and_8_bits) {
    static const te_dtype moments[] = {TE_F32, TE_BF16, TE_F16, TE_F8E4M3}, masters[] = {TE_DTYPE_NONE, TE_F32, TE_F16};
    static const int64_t sizes[] = {1, 7, 4096, 9001, 0};
    enum { NUM = 4 * 4 * 3 };
    static entry e[NUM];
    te_adam_tensor list[NUM];
    te_op_adam_args a = usual();
    memset(e, 0, sizeof e);
    a.tensors = list;
    a.num_tensors = NUM;
    a.num_undecayed = 17;
    a.weight_decay = 0.1f;
    for (int i = 0; i < NUM; i++) {
        entry *x = &e[i];
        te_dtype m = moments[i % 4], v = moments[i / 4 % 4], master = masters[i / 16];
        x->n = sizes[i % 5];
        x->grad_dtype = floats[i % 3];
        x->param_dtype = floats[i / 3 % 3];
        x->misaligned = i % 7 == 3;
        const float *start = test_rounded(x->param_dtype, test_normal(x->n, 100 + (uint64_t)i), x->n);
        x->t.param = guarded(te, x->param_dtype, x->n, start, x->misaligned);
        x->t.m = guarded(te, m == TE_F8E4M3 ? TE_F32 : m, x->n, test_floats(x->n), x->misaligned);
        if (m == TE_F8E4M3) x->t.m = te_tensor_zeros(te, m, SHAPE(x->n));
        x->t.v = v == TE_F8E4M3 ? te_tensor_zeros(te, v, SHAPE(x->n)) : guarded(te, v, x->n, test_floats(x->n), false);
        x->t.master = master == TE_DTYPE_NONE ? NULL : guarded(te, master, x->n, start, false);
        x->t.m_scale = scale_for(te, m);
        x->t.v_scale = scale_for(te, v);
        x->t.master_scale = scale_for(te, master);
    }
    for (int step = 1; step <= 3; step++) {
        a.step = step;
        for (int mode = 0; mode < 2; mode++) {
            a.no_adam_w_mode = mode;
            for (int i = 0; i < NUM; i++) {
                entry *x = &e[i];
                te_op_adam_args mine = a;
                const float *grad = test_rounded(x->grad_dtype, test_normal(x->n, (uint64_t)(1000 * step + i)), x->n);
                if (i >= NUM - a.num_undecayed) mine.weight_decay = 0;
                x->p = x->t.master ? unscaled(x->t.master, x->t.master_scale) : unscaled(x->t.param, NULL);
                x->m = unscaled(x->t.m, x->t.m_scale);
                x->v = unscaled(x->t.v, x->t.v_scale);
                x->master = true; /* reference_step leaves the parameter unrounded */
                list[i] = x->t;
                list[i].grad = guarded(te, x->grad_dtype, x->n, grad, x->misaligned);
                reference_step(x, grad, &mine, 1, mine.lr);
            }
            CHECK_EQ_INT(te_op_adam(te, &a), TE_OK);
            REQUIRE_OK(te);
            for (int i = 0; i < NUM; i++) {
                entry *x = &e[i];
                if (x->n == 0) continue;
                test_case("step %d, mode %d, tensor %d: %d elements, m %s, v %s", step, mode, i, (int)x->n, te_dtype_name(te_tensor_dtype(x->t.m)),
                          te_dtype_name(te_tensor_dtype(x->t.v)));
                check_state("m", x->t.m, x->t.m_scale, x->m);
                check_state("v", x->t.v, x->t.v_scale, x->v);
                check_state("param", x->t.param, NULL, x->p);
                if (x->t.master) check_state("master", x->t.master, x->t.master_scale, x->p);
            }
        }
    }
}

/* Parameters and remainders together are the bits of an f32 master, and the parameter is that one rounded, halves upwards. */
TE_TEST_DEVICES(adam_remainders_are_masters) {
    enum { N = 5000 };
    const float *start = test_rounded(TE_BF16, test_normal(N, 3), N);
    te_adam_tensor t[2];
    te_op_adam_args a = usual();
    memset(t, 0, sizeof t);
    a.num_tensors = 1;
    a.weight_decay = 0.1f;
    for (int k = 0; k < 2; k++) {
        t[k].param = guarded(te, TE_BF16, N, start, false);
        t[k].m = guarded(te, TE_F32, N, test_floats(N), false);
        t[k].v = guarded(te, TE_F32, N, test_floats(N), false);
    }
    t[0].master = guarded(te, TE_F32, N, start, false);
    t[1].master = te_tensor_zeros(te, TE_U8, SHAPE(N, 2));
    for (int step = 1; step <= 5; step++) {
        float *grad = test_normal(N, (uint64_t)step);
        if (step == 5) grad[17] = NAN;
        a.step = step;
        for (int k = 0; k < 2; k++) {
            t[k].grad = guarded(te, TE_F32, N, grad, false);
            a.tensors = &t[k];
            CHECK_EQ_INT(te_op_adam(te, &a), TE_OK);
        }
        REQUIRE_OK(te);
        const uint32_t *master = (const uint32_t *)test_read_bytes(t[0].master);
        const uint16_t *param = (const uint16_t *)test_read_bytes(t[1].param), *rest = (const uint16_t *)test_read_bytes(t[1].master);
        for (int i = 0; i < N; i++) {
            uint32_t up = (master[i] + 0x8000u) >> 16;
            if (step == 5 && i == 17) {
                CHECK((param[i] & 0x7fff) > 0x7f80 && rest[i] == 0);
                continue;
            }
            CHECK_MSG(rest[i] == (uint16_t)master[i] && param[i] == up, "step %d element %d: master %#x, param %#x, remainder %#x", step, i, master[i], param[i], rest[i]);
        }
    }
}

TE_TEST_DEVICES(store_state_formats) {
    static const te_dtype formats[] = {TE_F16, TE_F8E4M3};
    for (int f = 0; f < 2; f++)
        for (int k = 0; k < 6; k++) {
            int64_t n = k == 4 ? 0 : 4500;
            float *x = test_normal(n, 7), amax = 0;
            te_op_store_state_args a = {0};
            for (int64_t i = 0; i < n; i++) x[i] *= k == 1 ? 1e-30f : k == 2 ? 0.0f : k == 3 ? 1e30f : k == 5 ? 1e-42f : 1.0f;
            for (int64_t i = 0; i < n; i++) amax = fmaxf(amax, fabsf(x[i]));
            a.x = test_tensor(te, TE_F32, SHAPE(n), x);
            a.amax = test_tensor(te, TE_F32, SHAPE(1), &amax);
            a.state = te_tensor_zeros(te, formats[f], SHAPE(n));
            a.scale = test_guarded(te, TE_F32, SHAPE(1));
            CHECK_EQ_INT(te_op_store_state(te, &a), TE_OK);
            REQUIRE_OK(te);
            test_case("%s, case %d", te_dtype_name(formats[f]), k);
            double *want = test_doubles(n);
            for (int64_t i = 0; i < n; i++) want[i] = x[i];
            if (k == 2 || k == 4 || k == 5) { /* nothing to scale by: zeros */
                const float *codes = test_read(a.state);
                for (int64_t i = 0; i < n; i++) CHECK(codes[i] == 0);
                CHECK(test_read(a.scale)[0] <= 1);
            } else
                check_state("state", a.state, a.scale, want);
        }
}

/* ---- sgd ---- */

TE_TEST_DEVICES(sgd_modes) {
    enum { NUM = 70 }; /* more than a launch takes */
    te_sgd_tensor list[NUM];
    double *p[NUM], *b[NUM];
    const float half = 0.5f, rate = 0.03f, flag = 1;
    for (int mode = 0; mode < 32; mode += test_every_odd(2)) {
        te_op_sgd_args a = {0};
        a.tensors = list;
        a.num_tensors = NUM;
        a.num_undecayed = mode & 1 ? 11 : 0;
        a.lr = 0.1f;
        a.momentum = mode & 2 ? 0.9f : 0;
        a.nesterov = (mode & 6) == 6;
        a.dampening = !a.nesterov && mode & 8 ? 0.25f : 0;
        a.weight_decay = mode & 16 ? 0.01f : 0;
        a.wd_after_momentum = mode & 4;
        memset(list, 0, sizeof list);
        if (mode & 8) a.grad_scale = test_tensor(te, TE_F32, SHAPE(1), &half), a.lr_device = test_tensor(te, TE_F32, SHAPE(1), &rate);
        for (int i = 0; i < NUM; i++) {
            int64_t n = i % 9 ? 1 + i * 131 % 900 : 5000 - i;
            te_dtype dtype = floats[i % 3];
            const float *start = test_rounded(dtype, test_normal(n, (uint64_t)i), n);
            list[i].param = guarded(te, dtype, n, start, i % 5 == 1);
            if (i % 2) list[i].master = guarded(te, TE_F32, n, start, false);
            if (a.momentum != 0) list[i].momentum = guarded(te, i % 2 ? TE_F32 : dtype, n, test_floats(n), false);
        }
        for (int step = 0; step < 2; step++) {
            for (int i = 0; i < NUM; i++) {
                int64_t n = te_tensor_numel(list[i].param);
                te_dtype dtype = floats[i / 3 % 3];
                const float *grad = test_rounded(dtype, test_normal(n, (uint64_t)(1000 * step + i)), n);
                double wd = i < NUM - a.num_undecayed ? a.weight_decay : 0, lr = mode & 8 ? rate : a.lr;
                p[i] = unscaled(list[i].master ? list[i].master : list[i].param, NULL);
                b[i] = list[i].momentum ? unscaled(list[i].momentum, NULL) : NULL;
                list[i].grad = guarded(te, dtype, n, grad, i % 3 == 1);
                list[i].first = step == 0;
                for (int64_t k = 0; k < n; k++) {
                    double d = grad[k] * (mode & 8 ? 0.5 : 1) + (a.wd_after_momentum ? 0 : wd * p[i][k]);
                    if (b[i]) {
                        b[i][k] = step == 0 ? d : a.momentum * b[i][k] + (1 - (double)a.dampening) * d;
                        d = a.nesterov ? d + a.momentum * b[i][k] : b[i][k];
                    }
                    p[i][k] -= lr * (d + (a.wd_after_momentum ? wd * p[i][k] : 0));
                }
            }
            CHECK_EQ_INT(te_op_sgd(te, &a), TE_OK);
            REQUIRE_OK(te);
            for (int i = 0; i < NUM; i++) {
                test_case("mode %d, step %d, tensor %d", mode, step, i);
                check_state("param", list[i].param, NULL, p[i]);
                if (list[i].master) check_state("master", list[i].master, NULL, p[i]);
                if (b[i]) check_state("momentum", list[i].momentum, NULL, b[i]);
            }
        }
        if (mode) continue;
        void *before = test_copy(test_read(list[7].param), te_tensor_numel(list[7].param));
        a.found_inf = test_tensor(te, TE_F32, SHAPE(1), &flag);
        CHECK_EQ_INT(te_op_sgd(te, &a), TE_OK);
        CHECK_BYTES("param", test_read(list[7].param), before, (size_t)te_tensor_numel(list[7].param) * 4);
    }
}

/* ---- norm ---- */

TE_TEST_DEVICES(l2norm_lists) {
    static const int64_t sizes[] = {1, 0, 7, 65536, 65537, 300000, 3, 0};
    const te_tensor *list[400], *moved[400];
    float want[400];
    for (int num = 0; num <= 400; num += num ? 392 : 8) {
        double total = 0;
        for (int i = 0; i < num; i++) {
            int64_t n = num == 8 ? sizes[i] : 1 + i % 9;
            te_dtype dtype = floats[i % 3];
            const float *x = test_rounded(dtype, test_normal(n, (uint64_t)i), n);
            double sum = 0;
            for (int64_t k = 0; k < n; k++) sum += (double)x[k] * x[k];
            want[i] = (float)sqrt(sum);
            total += sum;
            list[i] = i % 2 ? guarded(te, dtype, n, x, true) : test_tensor(te, dtype, SHAPE(n), x);
            moved[i] = i % 2 ? test_tensor(te, dtype, SHAPE(n), x) : guarded(te, dtype, n, x, true);
        }
        te_op_l2norm_args a = {0};
        test_case("%d tensors", num);
        a.tensors = list;
        a.num_tensors = num;
        a.norm = test_guarded(te, TE_F32, SHAPE(1));
        a.per_tensor = test_guarded(te, TE_F32, SHAPE(num));
        a.clip = test_guarded(te, TE_F32, SHAPE(1));
        a.max_norm = 10;
        te_op_l2norm(te, &a);
        REQUIRE_OK(te);
        double norm = sqrt(total);
        CHECK(fabs(test_read(a.norm)[0] - norm) <= 2e-6 * norm);
        CHECK(fabs(test_read(a.clip)[0] - fmin(1, 10 / (norm + 1e-6))) <= 4e-6);
        if (num) CHECK_TENSOR(a.per_tensor, want, 2e-6, 0);
        /* The same bits from other addresses, whose alignment is the other one. */
        te_op_l2norm_args again = a;
        again.tensors = moved;
        again.norm = test_guarded(te, TE_F32, SHAPE(1));
        again.per_tensor = test_guarded(te, TE_F32, SHAPE(num));
        te_op_l2norm(te, &again);
        REQUIRE_OK(te);
        CHECK_BYTES("norm", test_read(again.norm), test_read(a.norm), 4);
        CHECK_BYTES("norms", test_read(again.per_tensor), test_read(a.per_tensor), (size_t)num * 4);
    }
}

TE_TEST_DEVICES(l2norm_not_finite) {
    const float values[][3] = {{1, NAN, 2}, {1, -INFINITY, 2}, {3, 4, 0}};
    for (int i = 0; i < 3; i++) {
        const te_tensor *list[] = {test_tensor(te, TE_F32, SHAPE(3), values[i])};
        te_op_l2norm_args a = {0};
        a.tensors = list;
        a.num_tensors = 1;
        a.norm = test_guarded(te, TE_F32, SHAPE(1));
        a.clip = test_guarded(te, TE_F32, SHAPE(1));
        a.max_norm = 100;
        te_op_l2norm(te, &a);
        REQUIRE_OK(te);
        float norm = test_read(a.norm)[0], clip = test_read(a.clip)[0];
        if (i == 0) CHECK(isnan(norm) && isnan(clip));
        if (i == 1) CHECK(isinf(norm) && clip == 0);
        if (i == 2) CHECK(norm == 5 && clip == 1);
    }
}

/* unscale_l2norm: the norm of the products, the tensors left alone; the flag where it is not finite. */
TE_TEST_DEVICES(l2norm_unscaled) {
    for (int k = 0; k < 3; k++) {
        float *x = test_normal(70000, 4), inverse = 1.0f / 1024, start = 0;
        double sum = 0;
        if (k == 1) x[69999] = NAN;
        if (k == 2) x[5] = INFINITY;
        for (int i = 0; i < 70000; i++) sum += (double)x[i] * x[i];
        const te_tensor *list[] = {test_tensor(te, TE_F32, SHAPE(70000), x)};
        te_op_l2norm_args a = {0};
        a.tensors = list;
        a.num_tensors = 1;
        a.norm = test_guarded(te, TE_F32, SHAPE(1));
        a.inv_scale = test_tensor(te, TE_F32, SHAPE(1), &inverse);
        a.found_inf = test_guarded_with(te, TE_F32, SHAPE(1), &start);
        te_op_l2norm(te, &a);
        REQUIRE_OK(te);
        CHECK(test_read(a.found_inf)[0] == (k ? 1 : 0));
        if (k == 0) CHECK(fabs(test_read(a.norm)[0] * 1024 / sqrt(sum) - 1) < 2e-6);
        CHECK_BYTES("the tensor", test_read(list[0]), x, 70000 * 4);
    }
}

/* ---- scale ---- */

TE_TEST_DEVICES(multi_scale_lists) {
    static const int64_t sizes[] = {1, 8192, 8193, 0, 100, 30000};
    for (int round = 0; round < 3; round++) { /* 0: finite, 1: an infinity somewhere, 2: NaN, in place */
        const te_tensor *in[300];
        te_tensor *out[300];
        const float *x[300];
        const float start = 0, factor = 4;
        for (int i = 0; i < 300; i++) {
            int64_t n = sizes[i % (i < 60 ? 6 : 1)];
            te_dtype from = floats[i % 3], to = round == 2 ? from : floats[i / 3 % 3];
            float *v = test_uniform(n, (uint64_t)i, -3, 3);
            if (i == 200 && round) v[0] = round == 1 ? -INFINITY : NAN;
            x[i] = test_rounded(from, v, n);
            in[i] = guarded(te, from, n, x[i], i % 7 == 1);
            out[i] = round == 2 ? (te_tensor *)(uintptr_t)in[i] : test_guarded(te, to, SHAPE(n));
        }
        te_op_multi_scale_args a = {0};
        a.in = in;
        a.out = out;
        a.num_tensors = 300;
        a.scale = 0.3f;
        a.scale_device = test_tensor(te, TE_F32, SHAPE(1), &factor);
        a.found_inf = test_guarded_with(te, TE_F32, SHAPE(1), &start);
        te_op_multi_scale(te, &a);
        REQUIRE_OK(te);
        CHECK(test_read(a.found_inf)[0] == (round ? 1 : 0));
        for (int i = 0; i < 300; i++) {
            int64_t n = te_tensor_numel(in[i]);
            float *want = test_copy(x[i], n);
            volatile float scale = 0.3f * 4;
            test_case("tensor %d round %d", i, round);
            for (int64_t k = 0; k < n; k++) want[k] *= scale;
            if (n) CHECK_TENSOR(out[i], test_rounded(te_tensor_dtype(out[i]), want, n), 0, 0);
        }
    }
}

/* ---- misuse ---- */

TE_TEST(optim_errors) {
    te_ctx *te = test_context("cpu");
    te_tensor *p = te_tensor_zeros(te, TE_F32, SHAPE(4)), *other = te_tensor_zeros(te, TE_F32, SHAPE(5)), *half = te_tensor_zeros(te, TE_BF16, SHAPE(4));
    te_adam_tensor t[2] = {{.grad = p, .param = p, .m = p, .v = p}, {.grad = p, .param = p, .m = other, .v = p}};
    te_op_adam_args a = usual();
    a.tensors = t;
    a.num_tensors = 2;
    a.step = 1;
    te_op_adam(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "m[1] is [5] and param[1] is [4]");
    t[1].m = half;
    t[1].m_scale = other;
    te_op_adam(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "m_scale[1] is given and m[1] is bf16; a scale belongs to f16 and e4m3 alone");
    t[1].m = te_tensor_zeros(te, TE_F16, SHAPE(4));
    te_op_adam(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "m_scale[1] is [5]; 1 element is needed");
    t[1].m_scale = NULL;
    te_op_adam(te, &a);
    CHECK_ERROR(te, TE_ERR_STATE, "m[1] is f16 and m_scale[1] is NULL; f32 [1] is needed there");
    t[1].m = p;
    t[1].master = te_tensor_zeros(te, TE_U8, SHAPE(8));
    te_op_adam(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "master[1] is u8, remainders, and param[1] is f32; bf16 is needed");
    t[1].param = half;
    t[1].master = te_tensor_zeros(te, TE_U8, SHAPE(4));
    te_op_adam(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "two bytes for each element are needed");
    t[1].master = te_tensor_narrow(te_tensor_zeros(te, TE_U8, SHAPE(9)), 0, 1, 8);
    te_op_adam(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "master[1] begins at an odd address");
    t[1].master = NULL;
    t[1].param = p;
    a.step = 0;
    te_op_adam(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "step is 0");
    a.step = 1;
    a.beta2 = 1;
    te_op_adam(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "beta2 1");
    a.tensors = NULL;
    te_op_adam(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "the list of 2 tensors is NULL");
    te_sgd_tensor sgd_list[1] = {{.grad = p, .param = p}};
    te_op_sgd_args sgd = {0};
    sgd.tensors = sgd_list;
    sgd.num_tensors = 1;
    sgd.momentum = 0.5f;
    te_op_sgd(te, &sgd);
    CHECK_ERROR(te, TE_ERR_STATE, "sgd: momentum is 0.5 and momentum[0] is NULL");
    sgd.momentum = 0;
    sgd.nesterov = true;
    te_op_sgd(te, &sgd);
    CHECK_ERROR(te, TE_ERR_INVALID, "for nesterov momentum > 0 and dampening 0");
    te_op_l2norm_args n = {0};
    te_op_l2norm(te, &n);
    CHECK_ERROR(te, TE_ERR_STATE, "norm is NULL");
    n.norm = te_tensor_zeros(te, TE_F32, SHAPE(1));
    n.clip = n.norm;
    te_op_l2norm(te, &n);
    CHECK_ERROR(te, TE_ERR_INVALID, "max_norm 0");
}

/* ---- numbers of their own, loss scaling ---- */

/* Entries with numbers of their own against calls of one entry each. */
TE_TEST_DEVICES(optim_own_numbers) {
    enum { NUM = 7, N = 1500 };
    static const te_adam_numbers numbers[3] = {{0.1f, 0.5f, 0.9f, 1e-3f, 0.2f}, {0.01f, 0.9f, 0.99f, 1e-8f, 0}, {0.003f, 0.8f, 0.999f, 1e-6f, 0.1f}};
    const float rates[4] = {0.05f, 0.1f, 0.01f, 0.003f};
    te_tensor *lr = test_tensor(te, TE_F32, SHAPE(4), rates);
    for (int formats = 0; formats < 2; formats++)
        for (int sgd = 0; sgd < 2; sgd++) {
            te_adam_tensor adams[2][NUM];
            te_sgd_tensor sgds[2][NUM];
            te_op_adam_args a = usual();
            te_op_sgd_args s = {.lr = 0.05f, .weight_decay = 0.3f, .momentum = 0.9f};
            memset(adams, 0, sizeof adams), memset(sgds, 0, sizeof sgds);
            a.step = 2, a.lr = 0.05f, a.weight_decay = 0.3f;
            test_case("%s, formats %d", sgd ? "sgd" : "adam", formats);
            for (int k = 0; k < 2; k++)
                for (int i = 0; i < NUM; i++) {
                    te_tensor *grad = test_tensor(te, TE_F32, SHAPE(N), test_normal(N, 1 + (uint64_t)i)), *param = test_tensor(te, TE_F32, SHAPE(N), test_normal(N, 50 + (uint64_t)i));
                    te_tensor *m = te_tensor_zeros(te, formats && i % 2 ? TE_BF16 : TE_F32, SHAPE(N)), *v = te_tensor_zeros(te, TE_F32, SHAPE(N));
                    bool own = i > 0;
                    adams[k][i] = (te_adam_tensor){.grad = grad, .param = param, .m = m, .v = v, .own_numbers = own, .numbers = numbers[i / 2 % 3], .place = own ? 1 + i / 2 % 3 : 0};
                    sgds[k][i] = (te_sgd_tensor){.grad = grad, .param = param, .momentum = m, .own_numbers = own, .numbers = {numbers[i / 2 % 3].lr, numbers[i / 2 % 3].weight_decay}, .place = adams[k][i].place};
                }
            a.tensors = adams[0], a.num_tensors = NUM, a.num_undecayed = 2;
            s.tensors = sgds[0], s.num_tensors = NUM, s.num_undecayed = 2;
            a.lr_device = s.lr_device = lr; /* the same numbers: of their places */
            CHECK_EQ_INT(sgd ? te_op_sgd(te, &s) : te_op_adam(te, &a), TE_OK);
            for (int i = 0; i < NUM; i++) {
                te_op_adam_args one = usual();
                te_op_sgd_args single = {.lr = 0.05f, .weight_decay = 0.3f, .momentum = 0.9f};
                const te_adam_numbers *n = &numbers[i / 2 % 3];
                if (i > 0) one.lr = n->lr, one.beta1 = n->beta1, one.beta2 = n->beta2, one.eps = n->eps, one.weight_decay = single.weight_decay = n->weight_decay, single.lr = n->lr;
                else one.lr = 0.05f, one.weight_decay = 0.3f;
                adams[1][i].own_numbers = sgds[1][i].own_numbers = false, adams[1][i].place = sgds[1][i].place = 0;
                one.step = 2, one.tensors = &adams[1][i], single.tensors = &sgds[1][i];
                one.num_tensors = single.num_tensors = 1, one.num_undecayed = single.num_undecayed = i >= NUM - 2;
                CHECK_EQ_INT(sgd ? te_op_sgd(te, &single) : te_op_adam(te, &one), TE_OK);
                CHECK_BYTES("param", test_read(adams[0][i].param), test_read(adams[1][i].param), N * sizeof(float));
                CHECK_BYTES("m", test_read(adams[0][i].m), test_read(adams[1][i].m), N * sizeof(float));
            }
            REQUIRE_OK(te);
            adams[0][3].place = sgds[0][3].place = -1;
            if (sgd) te_op_sgd(te, &s);
            else te_op_adam(te, &a);
            CHECK_ERROR(te, TE_ERR_INVALID, "the place of entry 3 is -1");
            adams[0][3].place = sgds[0][3].place = 4;
            if (sgd) te_op_sgd(te, &s);
            else te_op_adam(te, &a);
            CHECK_ERROR(te, TE_ERR_SHAPE, "lr_device has 4 elements; the largest place is 4");
            adams[0][3].place = sgds[0][3].place = 1; /* then the last of the table's places is nobody's: a group whose parameters have no gradient */
            CHECK_EQ_INT(sgd ? te_op_sgd(te, &s) : te_op_adam(te, &a), TE_OK);
            adams[0][3].numbers.beta1 = 1;
            te_op_adam(te, &a);
            CHECK_ERROR(te, TE_ERR_INVALID, "beta1 1");
        }
}

TE_TEST_DEVICES(optim_scales_of_losses) {
    static const struct {
        float scale, tracker, found, scale_after, tracker_after;
    } cases[] = {{1024, 0, 0, 1024, 1}, {1024, 1, 0, 2048, 0}, {1024, 1, 1, 256, 0}, {3e38f, 1, 0, 3e38f, 0}, {1024, 0, 2, 256, 0}};
    for (int i = 0; i < COUNT(cases); i++) {
        te_op_update_scale_args a = {.growth_factor = 2, .backoff_factor = 0.25f, .growth_interval = 2};
        test_case("case %d", i);
        a.scale = test_guarded_with(te, TE_F32, SHAPE(1), &cases[i].scale);
        a.growth_tracker = test_guarded_with(te, TE_F32, SHAPE(1), &cases[i].tracker);
        a.found_inf = test_guarded_with(te, TE_F32, SHAPE(1), &cases[i].found);
        a.inv_scale = test_guarded(te, TE_F32, SHAPE(1));
        CHECK_EQ_INT(te_op_update_scale(te, &a), TE_OK);
        CHECK(test_read(a.scale)[0] == cases[i].scale_after && test_read(a.growth_tracker)[0] == cases[i].tracker_after && test_read(a.found_inf)[0] == 0);
        CHECK(test_read(a.inv_scale)[0] == 1.0f / cases[i].scale_after);
        a.growth_interval = 0;
        te_op_update_scale(te, &a);
        CHECK_ERROR(te, TE_ERR_INVALID, "growth_interval 0");
    }
    const float betas[4] = {0.9f, 0.999f, 0.5f, 0}, one = 1, three = 3, number = 12;
    for (int i = 0; i < 8; i++) {
        te_op_step_numbers_args a = {.count = i & 1, .step = i & 2 ? 3 : 12, .no_bias_correction = false};
        const double n = (i & 2 && !(i & 4) ? 3 : 12) - (i & 1 ? 4 : 3); /* the step's number without the skipped ones; at least 1 */
        float want[4];
        a.found_inf = test_guarded_with(te, TE_F32, SHAPE(1), &one);
        a.skipped = test_guarded_with(te, TE_F32, SHAPE(1), &three);
        if (i & 4) a.step_device = test_tensor(te, TE_F32, SHAPE(1), &number);
        a.betas = test_tensor(te, TE_F32, SHAPE(2, 2), betas);
        a.bias_correction = test_guarded(te, TE_F32, SHAPE(2, 2));
        for (int k = 0; k < 4; k++) want[k] = (float)(1 / (1 - pow((double)betas[k], n < 1 ? 1 : n)));
        test_case("numbers %d", i);
        CHECK_EQ_INT(te_op_step_numbers(te, &a), TE_OK);
        CHECK_TENSOR(a.bias_correction, want, 2e-7, 0); /* an f32 of a double: a unit in the last place */
        CHECK(test_read(a.found_inf)[0] == 0 && test_read(a.skipped)[0] == (i & 1 ? 4 : 3));
        a.step = 0, a.step_device = NULL;
        te_op_step_numbers(te, &a);
        CHECK_ERROR(te, TE_ERR_INVALID, "step is 0; the first one is 1");
    }
}

/* Corrections from the device take the place of the step, whatever it is. */
TE_TEST_DEVICES(adam_corrections_replace_the_step) {
    const float unbias[2] = {(float)(1 / (1 - 0.9 * 0.9 * 0.9)), (float)(1 / (1 - pow((double)0.999f, 3)))};
    te_tensor *given[2];
    given[0] = test_tensor(te, TE_F32, SHAPE(1, 2), unbias), given[1] = NULL;
    float *want = NULL;
    for (int64_t step = 0; step < 6; step += 5) {
        te_tensor *param = te_tensor_full(te, TE_F32, SHAPE(4), 1), *grad = te_tensor_full(te, TE_F32, SHAPE(4), 0.5);
        te_adam_tensor t = {.grad = grad, .param = param, .m = te_tensor_zeros(te, TE_F32, SHAPE(4)), .v = te_tensor_zeros(te, TE_F32, SHAPE(4))};
        te_op_adam_args a = usual();
        a.tensors = &t, a.num_tensors = 1, a.step = step, a.bias_correction = given[0];
        CHECK_EQ_INT(te_op_adam(te, &a), TE_OK);
        REQUIRE_OK(te);
        if (want) CHECK_BYTES("param", test_read(param), want, 4 * sizeof(float));
        want = test_read(param);
        CHECK(want[0] < 1 && want[0] > 0.9f);
    }
}

/* Lists that take more launches than a plan has room for by itself: 128. */
TE_TEST(optim_lists_of_any_length) {
    enum { MANY = 23000, OWN = 300 };
    te_ctx *te = test_context("cpu");
    te_tensor *f = te_tensor_describe(te, TE_F32, SHAPE(256)), *b = te_tensor_describe(te, TE_BF16, SHAPE(256)), *one = te_tensor_describe(te, TE_F32, SHAPE(1));
    te_adam_tensor *adams = (te_adam_tensor *)test_alloc(MANY * sizeof *adams);
    te_sgd_tensor *sgds = (te_sgd_tensor *)test_alloc(MANY * sizeof *sgds);
    te_tensor **list = (te_tensor **)test_alloc(MANY * sizeof *list);
    te_op_adam_args a = usual();
    te_op_sgd_args s = {.tensors = sgds, .num_tensors = MANY};
    te_op_l2norm_args n = {.tensors = (const te_tensor *const *)list, .num_tensors = MANY, .norm = one};
    te_op_multi_scale_args m = {.in = (const te_tensor *const *)list, .out = list, .num_tensors = MANY, .scale = 1};
    te_explanation e;
    memset(adams, 0, MANY * sizeof *adams), memset(sgds, 0, MANY * sizeof *sgds);
    for (int i = 0; i < MANY; i++) {
        adams[i].param = sgds[i].param = b, adams[i].grad = sgds[i].grad = b;
        adams[i].m = adams[i].v = list[i] = f;
    }
    a.tensors = adams, a.num_tensors = MANY, a.step = 1;
    CHECK_EQ_INT(te_explain(te, TE_OP_ADAM, &a, "sm_90", &e), TE_OK);
    CHECK_EQ_INT(e.launches, (MANY + 69) / 70);
    for (int i = 0; i < OWN; i++) adams[i].own_numbers = true, adams[i].numbers = (te_adam_numbers){1e-3f * (float)i, 0.9f, 0.99f, 0, 0};
    a.num_tensors = OWN;
    CHECK_EQ_INT(te_explain(te, TE_OP_ADAM, &a, "sm_90", &e), TE_OK);
    CHECK_EQ_INT(e.launches, OWN);
    CHECK_EQ_INT(te_explain(te, TE_OP_SGD, &s, "sm_90", &e), TE_OK);
    CHECK_EQ_INT(e.launches, (MANY + 63) / 64);
    CHECK_EQ_INT(te_explain(te, TE_OP_L2NORM, &n, "sm_90", &e), TE_OK);
    CHECK(e.launches > 128);
    CHECK_EQ_INT(te_explain(te, TE_OP_MULTI_SCALE, &m, "sm_90", &e), TE_OK);
    CHECK_EQ_INT(e.launches, (MANY + 119) / 120);
    CHECK_OK(te);
}

/* The same on a device: each of 300 entries with a learning rate of its own gets that one. */
TE_TEST_DEVICES(sgd_many_rates) {
    enum { NUM = 300 };
    te_sgd_tensor t[NUM];
    te_op_sgd_args s = {.tensors = t, .num_tensors = NUM};
    te_tensor *grad = te_tensor_full(te, TE_F32, SHAPE(2), 1), *all = te_tensor_zeros(te, TE_F32, SHAPE(NUM, 2));
    memset(t, 0, sizeof t);
    for (int i = 0; i < NUM; i++) {
        t[i].grad = grad, t[i].param = te_tensor_narrow(all, 0, i, 1);
        t[i].own_numbers = true, t[i].numbers.lr = (float)i;
    }
    CHECK_EQ_INT(te_op_sgd(te, &s), TE_OK);
    REQUIRE_OK(te);
    float *got = test_read(all);
    for (int i = 0; i < NUM; i++) CHECK_MSG(got[2 * i] == (float)-i && got[2 * i + 1] == (float)-i, "entry %d: %g", i, (double)got[2 * i]);
}
