/* ops/norm/cuda.c: LayerNorm and RMSNorm, which kernel and how it is launched. Knows plans; must not know the driver. */

/* Threads for the general kernels: one for every four elements of a row, so that short rows make small blocks. */
static int te__norm_threads(int64_t n) { return (int)te__min(512, te__round_up(te__div_up(n, 4), 32)); }

static te_result te__cuda_plan_norm_fwd(te__plan *p, const te_norm_fwd_args *a, bool layernorm) {
    int64_t m = te__rows(a->x), n = te__cols(a->x), ld = te__cols(a->y), vectors = n / 8;
    te__launch *l;
    te__norm_fwd_kargs *k;
    bool in_registers = !p->baseline && n % 8 == 0 && ld % 8 == 0 && vectors <= 4096 && (!a->beta || a->beta->dtype == a->gamma->dtype) &&
                        te__is_aligned(a->x, 16) && te__is_aligned(a->gamma, 16) && te__is_aligned(a->beta, 16) &&
                        te__is_aligned(a->y, te__is_fp8(a->y->dtype) ? 8 : 16);
    if (m == 0 || n == 0) return TE_OK;
    l = te__plan_launch(p, "norm", "norm_fwd");
    k = TE__KARGS(p, l, te__norm_fwd_kargs);
    k->x = te__data(a->x);
    k->gamma = te__data(a->gamma);
    k->beta = te__data(a->beta);
    k->y = te__data(a->y);
    k->mean = (float *)te__data(a->mean);
    k->rstd = (float *)te__data(a->rstd);
    k->scale = (const float *)te__data(a->scale);
    k->scale_inv = (float *)te__data(a->scale_inv);
    k->amax = (float *)te__data(a->amax);
    k->m = m;
    k->n = n;
    k->ld = ld;
    k->eps = a->eps;
    k->x_dt = a->x->dtype;
    k->gamma_dt = a->gamma->dtype;
    k->beta_dt = a->beta ? (int)a->beta->dtype : 0;
    k->y_dt = a->y->dtype;
    k->layernorm = layernorm;
    k->zero_centered = a->zero_centered_gamma;
    if (in_registers) {
        /* Rows of up to 1024 elements: one a warp. Longer ones: as many vectors a thread as blocks of at most 512 threads need. */
        int chunks = vectors <= 32 ? 1 : vectors <= 64 ? 2 : vectors <= 128 ? 4 : vectors <= 512 ? 2 : vectors <= 2048 ? 4 : 8;
        k->warp_rows = vectors <= 128;
        te__launch_option(l, "CHUNKS", chunks);
        te__launch_option(l, "LAYERNORM", layernorm);
        te__launch_option(l, "X_DT", a->x->dtype);
        te__launch_option(l, "W_DT", a->gamma->dtype);
        te__launch_option(l, "Y_DT", a->y->dtype);
        if (k->warp_rows)
            te__launch_size(l, te__min(te__div_up(m, 8), INT_MAX), 1, 1, 256, 0);
        else
            te__launch_size(l, te__min(m, INT_MAX), 1, 1, (int)te__round_up(te__div_up(vectors, chunks), 32), 0);
        te__plan_why(p, k->warp_rows ? "a warp holds a row in registers" : "a block holds a row in registers");
    } else {
        te__launch_size(l, te__min(m, INT_MAX), 1, 1, te__norm_threads(n), 0);
        te__plan_why(p, "general: a block reads its row once for each pass");
    }
    return TE_OK;
}

/* Shared memory that one block may have, in bytes (CUDA programming guide, technical specifications). */
static int64_t te__norm_shared_limit(int sm) { return sm == 80 ? 163 * 1024 : sm == 90 || sm == 100 || sm == 103 ? 227 * 1024 : 99 * 1024; }

static te_result te__cuda_plan_norm_bwd(te__plan *p, const te_norm_bwd_args *a, bool layernorm) {
    int64_t m = te__rows(a->x), n = te__cols(a->x), vectors = n / 8, kinds = layernorm ? 2 : 1, blocks, shared = 0;
    int threads, chunks = vectors <= 32 ? 1 : vectors <= 1024 ? 2 : 4;
    bool sums = a->dgamma || a->dbeta, in_shared = vectors > 1024, fast;
    float *partial = NULL;
    te_dtype dt = a->x->dtype;
    if (n == 0) return TE_OK;
    threads = (int)te__round_up(te__div_up(vectors, chunks), 32);
    if (in_shared) shared = kinds * chunks * threads * 8 * (int64_t)sizeof(float);
    fast = !p->baseline && n % 8 == 0 && dt == a->dy->dtype && dt == a->dx->dtype && (!a->add || dt == a->add->dtype) && te__is_aligned(a->x, 16) &&
           te__is_aligned(a->dy, 16) && te__is_aligned(a->dx, 16) && te__is_aligned(a->add, 16) && te__is_aligned(a->gamma, 16) && vectors <= 2048 &&
           (!in_shared || (dt != TE_F32 && shared <= te__norm_shared_limit(p->sm)));
    if (!fast) threads = te__norm_threads(n);
    /* Enough blocks for 512 threads on each multiprocessor. */
    blocks = te__min(m, (int64_t)p->num_sms * te__max(1, te__min(16, 512 / threads)));
    if (sums) {
        partial = (float *)te__plan_workspace(p, blocks * kinds * n * (int64_t)sizeof(float));
        if (p->result != TE_OK) return p->result;
    }
    if (m > 0) {
        te__launch *l = te__plan_launch(p, "norm", "norm_bwd");
        te__norm_bwd_kargs *k = TE__KARGS(p, l, te__norm_bwd_kargs);
        k->dy = te__data(a->dy);
        k->x = te__data(a->x);
        k->gamma = te__data(a->gamma);
        k->add = te__data(a->add);
        k->mean = (const float *)te__data(a->mean);
        k->rstd = (const float *)te__data(a->rstd);
        k->dx = te__data(a->dx);
        k->partial = partial;
        k->m = m;
        k->n = n;
        k->dy_dt = a->dy->dtype;
        k->x_dt = dt;
        k->gamma_dt = a->gamma->dtype;
        k->add_dt = a->add ? (int)a->add->dtype : 0;
        k->dx_dt = a->dx->dtype;
        k->layernorm = layernorm;
        k->zero_centered = a->zero_centered_gamma;
        if (fast) {
            te__launch_option(l, "CHUNKS", chunks);
            te__launch_option(l, "SUMS_SHARED", in_shared);
            te__launch_option(l, "LAYERNORM", layernorm);
            te__launch_option(l, "X_DT", dt);
            te__launch_option(l, "W_DT", a->gamma->dtype);
        }
        te__launch_size(l, blocks, 1, 1, threads, fast ? shared : 0);
    }
    if (sums) {
        te__launch *l = te__plan_launch(p, "norm", "norm_bwd_sum");
        te__norm_bwd_sum_kargs *k = TE__KARGS(p, l, te__norm_bwd_sum_kargs);
        k->partial = partial;
        k->dgamma = te__data(a->dgamma);
        k->dbeta = te__data(a->dbeta);
        k->parts = blocks;
        k->n = n;
        k->kinds = (int)kinds;
        k->dgamma_dt = a->dgamma ? (int)a->dgamma->dtype : 0;
        k->dbeta_dt = a->dbeta ? (int)a->dbeta->dtype : 0;
        k->accumulate = a->accumulate;
        te__launch_size(l, te__div_up(n, 32), kinds, 1, 512, 0);
    }
    te__plan_why(p, fast ? "rows in registers; sums over rows go through partial sums in fixed order"
                         : "general; sums over rows go through partial sums in fixed order");
    return TE_OK;
}

static te_result te__cuda_plan_layernorm_fwd(te__plan *p, const te_layernorm_fwd_args *a) { return te__cuda_plan_norm_fwd(p, a, true); }
static te_result te__cuda_plan_rmsnorm_fwd(te__plan *p, const te_rmsnorm_fwd_args *a) { return te__cuda_plan_norm_fwd(p, a, false); }
static te_result te__cuda_plan_layernorm_bwd(te__plan *p, const te_layernorm_bwd_args *a) { return te__cuda_plan_norm_bwd(p, a, true); }
static te_result te__cuda_plan_rmsnorm_bwd(te__plan *p, const te_rmsnorm_bwd_args *a) { return te__cuda_plan_norm_bwd(p, a, false); }
