/* ops/context/cpu.c: the operations around attention for sequences that are split among ranks, on the CPU. This
 * file must convert number formats only through cpu/rows.c. */

/* Checks that the starts `cu` are multiples of `step`, do not descend, and stay within `rows`. Only the CPU checks
 * them, since it can read the numbers. */
static te_result te__context_check_starts(te_ctx *te, const char *op, const char *name, const int *cu, long long n,
                                          long long step, long long rows) {
    long long b;
    for (b = 0; b <= n; b++)
        if (cu[b] % step || cu[b] > rows || (b ? cu[b] < cu[b - 1] : cu[b] != 0))
            return te__fail(te, TE_ERR_INVALID,
                            "%s: %s[%lld] is %d, behind %d; starts begin at 0, are multiples of %lld, do not descend "
                            "and are at most %lld, for each rank has two chunks of "
                            "each sequence: pad the sequences (te_pad_thd_sequences_for_cp)",
                            op, name, b, cu[b], b ? cu[b - 1] : 0, step, rows);
    return TE_OK;
}

/* Checks that no sequence has more tokens than its padded length. */
static te_result te__context_check_room(te_ctx *te, const te__context_lengths_kargs *a) {
    long long b;
    for (b = 0; b < a->sequences; b++) {
        const long long n = (long long)a->cu[b + 1] - a->cu[b], room = (long long)a->padded[b + 1] - a->padded[b];
        if (n < 0 || n > room)
            return te__fail(te, TE_ERR_INVALID,
                            "context_lengths: cu_seqlens[%lld] is %d and [%lld] is %d: %lld tokens, and by "
                            "cu_seqlens_padded the sequence has room for %lld",
                            b, a->cu[b], b + 1, a->cu[b + 1], n, room);
    }
    return TE_OK;
}

static te_result te__cpu_context_rows(te_ctx *te, const te_op_context_rows_args *args) {
    const te__context_rows_kargs a = te__context_rows_problem(args);
    long long w, rank, local;
    te_result r = a.cu ? te__context_check_starts(te, "context_rows", "cu_seqlens", a.cu, a.sequences,
                                                  2LL * a.ranks * a.share, a.rows * a.share)
                       : TE_OK;
    if (r != TE_OK) return r;
    for (w = 0; w < a.rows; w++) {
        long long at = w;
        if (te__context_place(&a, w, &rank, &local)) at = rank * (a.rows / a.ranks) + local;
        a.map[a.inverse ? w : at] = (int)(a.inverse ? at : w);
    }
    return TE_OK;
}

static te_result te__cpu_context_lengths(te_ctx *te, const te_op_context_lengths_args *args) {
    const te__context_lengths_kargs a = te__context_lengths_problem(args);
    te_result r = te__context_check_starts(te, "context_lengths", "cu_seqlens_padded", a.padded, a.sequences,
                                           2LL * a.ranks, INT32_MAX);
    int sum = 0, start;
    long long b;
    if (r == TE_OK) r = te__context_check_room(te, &a);
    if (r != TE_OK) return r;
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
        const int64_t from = b * a->x_stride[0] + s * a->x_stride[1] + h * a->x_stride[2],
                      to = b * a->o_stride[0] + s * a->o_stride[1] + h * a->o_stride[2];
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
    for (h = 0; a.largest && h < a.size[2]; h++)
        if (a.x_max[h] > a.largest[h]) a.largest[h] = a.x_max[h];
    te__parallel_for(te, a.size[0] * a.size[1] * a.size[2], 64, te__context_merge_rows, &a);
    return TE_OK;
}
