/* ops/context/cpu.c: what ranks that share sequences do beside attention itself, on the CPU. Knows number formats only through cpu/rows.c. */

static te_result te__cpu_context_rows(te_ctx *te, const te_op_context_rows_args *args) {
    const te__context_rows_kargs a = te__context_rows_problem(args);
    const long long step = 2LL * a.ranks * a.share;
    long long w, b, rank, local;
    for (b = 0; a.cu && b <= a.sequences; b++)
        if (a.cu[b] < 0 || a.cu[b] % step || a.cu[b] > a.rows * a.share || (b > 0 && a.cu[b] < a.cu[b - 1]))
            return te__fail(te, TE_ERR_INVALID, "context_rows: cu_seqlens[%lld] is %d, of %lld rows; %d ranks have two chunks of each sequence, so starts are multiples of %lld, which do not descend: "
                            "pad the sequences (te_pad_thd_sequences_for_cp)", b, a.cu[b], a.rows * a.share, a.ranks * (int)a.share, step);
    if (a.cu && a.cu[0]) return te__fail(te, TE_ERR_INVALID, "context_rows: cu_seqlens[0] is %d; the first sequence begins at row 0", a.cu[0]);
    for (w = 0; w < a.rows; w++) {
        long long at = w;
        if (te__context_place(&a, w, &rank, &local)) at = rank * (a.rows / a.ranks) + local;
        a.map[a.inverse ? w : at] = (int)(a.inverse ? at : w);
    }
    return TE_OK;
}

static te_result te__cpu_context_lengths(te_ctx *te, const te_op_context_lengths_args *args) {
    const te__context_lengths_kargs a = te__context_lengths_problem(args);
    int sum = 0, start;
    long long b;
    (void)te;
    for (b = 0; b < a.sequences; b++) {
        a.out[b] = sum;
        sum += te__context_length(&a, b, &start);
        a.starts[b] = start;
    }
    a.out[a.sequences] = sum;
    a.starts[a.sequences] = a.padded[a.sequences] / (a.chunks == (int)TE_CHUNKS_UP_TO ? 1 : a.ranks);
    return TE_OK;
}

enum { TE__CONTEXT_RUN = 256 }; /* channels that are added at a time */

static void te__context_merge_rows(void *user, int64_t begin, int64_t end) {
    const te__context_merge_kargs *a = (const te__context_merge_kargs *)user;
    float x[TE__CONTEXT_RUN], o[TE__CONTEXT_RUN];
    for (; begin < end; begin++) {
        const int64_t h = begin % a->size[2], s = begin / a->size[2] % a->size[1], b = begin / a->size[2] / a->size[1];
        const int64_t from = b * a->x_stride[0] + s * a->x_stride[1] + h * a->x_stride[2], to = b * a->o_stride[0] + s * a->o_stride[1] + h * a->o_stride[2];
        float of_o = 1.0f, of_x = 1.0f;
        int64_t c, i;
        if (a->lse) {
            float *lse = a->lse + b * a->lse_stride[0] + s * a->lse_stride[1] + h * a->lse_stride[2];
            *lse = te__context_lse(*lse, a->x_lse[(b * a->size[2] + h) * a->size[1] + s], &of_o, &of_x);
        }
        for (c = 0; c < a->d; c += TE__CONTEXT_RUN) {
            const int64_t n = te__min(a->d - c, TE__CONTEXT_RUN);
            te__load_row(a->x, (te_dtype)a->x_dt, from + c, n, x);
            te__load_row(a->o, (te_dtype)a->o_dt, to + c, n, o);
            for (i = 0; i < n; i++) o[i] = o[i] * of_o + x[i] * of_x;
            te__store_row(a->o, (te_dtype)a->o_dt, to + c, n, o);
        }
    }
}

static te_result te__cpu_context_merge(te_ctx *te, const te_op_context_merge_args *args) {
    te__context_merge_kargs a = te__context_merge_problem(args);
    int64_t h;
    for (h = 0; a.max && h < a.size[2]; h++)
        if (a.x_max[h] > a.max[h]) a.max[h] = a.x_max[h];
    te__parallel_for(te, a.size[0] * a.size[1] * a.size[2], 64, te__context_merge_rows, &a);
    return TE_OK;
}
