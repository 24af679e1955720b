/* ops/kv/cpu.c: the lengths of sequences, and caches of keys and values, on the CPU. This file must convert number
 * formats only through cpu/rows.c. */

static te_result te__cpu_cu_seqlens(te_ctx *te, const te_op_cu_seqlens_args *args) {
    const te__cu_seqlens_kargs a = te__cu_seqlens_problem(args);
    int64_t b, i;
    int sum = 0;
    (void)te;
    for (b = 0; b < a.sequences; b++) {
        a.cu[b] = sum;
        for (i = 0; i < a.length; i++) sum += a.mask[b * a.length + i] == 0;
    }
    a.cu[a.sequences] = sum;
    return TE_OK;
}

static te_result te__cpu_advance_kv_cache(te_ctx *te, const te_op_advance_kv_cache_args *args) {
    const te__kv_advance_kargs a = te__kv_advance_problem(args);
    int64_t b;
    (void)te;
    a.cu_q[0] = a.cu_kv[0] = 0;
    for (b = 0; b < a.sequences; b++) {
        a.start[b] += a.added;
        a.cu_q[b + 1] = a.cu_q[b] + a.step;
        a.cu_kv[b + 1] = a.cu_kv[b] + a.start[b] + a.step;
    }
    return TE_OK;
}

enum { TE__KV_RUN = TE__CODED_ROW }; /* channels that are converted at a time */

static void te__kv_copy_rows(void *user, int64_t begin, int64_t end) {
    const te__kv_copy_kargs *a = (const te__kv_copy_kargs *)user;
    float x[TE__KV_RUN];
    for (; begin < end; begin++) {
        long long t, page, row;
        int b, h, c, i;
        if (!te__kv_place(a, begin, &b, &t, &page, &row)) continue;
        for (i = 0; i < 2; i++) {
            const te__kv_side *s = &a->side[i];
            for (h = 0; h < a->heads; h++) {
                if (s->cache_dt == (int)TE_F8E4M3) {
                    te__load_row(s->x, (te_dtype)s->x_dt, t * s->x_s + b * s->x_b + h * s->x_h, s->d, x);
                    te__store_coded_row(s->cache, page * s->page + row * s->row + h * s->head, s->factors,
                                        page * s->factor_page + row * s->factor_row + h * s->factor_head, s->d, x);
                    continue;
                }
                for (c = 0; c < s->d; c += TE__KV_RUN) {
                    const int64_t n = te__min(s->d - c, TE__KV_RUN);
                    te__load_row(s->x, (te_dtype)s->x_dt, t * s->x_s + b * s->x_b + h * s->x_h + c, n, x);
                    te__store_row(s->cache, (te_dtype)s->cache_dt, page * s->page + row * s->row + h * s->head + c, n,
                                  x);
                }
            }
        }
    }
}

/* Checks that all tokens fit into the cache. Only the CPU checks this. On the GPU the host cannot read the lengths. */
static te_result te__kv_check_places(te_ctx *te, const te__kv_copy_kargs *a) {
    const long long room = (long long)a->page_size * a->pages_of_each;
    long long page;
    int b, i;
    for (b = 0; b < a->sequences; b++) {
        const long long n = (long long)a->cu[b + 1] - a->cu[b];
        const bool beyond = a->packed && (a->cu[b] < 0 || a->cu[b + 1] > a->tokens);
        if (n < 0 || beyond)
            return te__fail(te, TE_ERR_INVALID,
                            "copy_to_kv_cache: cu_seqlens[%d] is %d and [%d] is %d, of %lld tokens; starts must not "
                            "descend, nor be beyond the tokens",
                            b, a->cu[b], b + 1, a->cu[b + 1], a->tokens);
        if (!a->packed && n > a->rows_of_each)
            return te__fail(te, TE_ERR_INVALID,
                            "copy_to_kv_cache: by cu_seqlens sequence %d has %lld tokens, and k has %lld for each", b,
                            n, a->rows_of_each);
        if (n > 0 && (a->start[b] < 0 || a->start[b] + n > room))
            return te__fail(te, TE_ERR_INVALID,
                            "copy_to_kv_cache: sequence %d adds %lld tokens to %d, and the cache has room for %lld", b,
                            n, a->start[b], room);
        /* Checks the page table from the entry of the first new token on. Earlier pages may no longer belong to the
         * sequence. */
        for (i = n > 0 ? a->start[b] / a->page_size : 0; n > 0 && a->table && i <= (a->start[b] + n - 1) / a->page_size;
             i++) {
            page = a->table[(long long)b * a->pages_of_each + i];
            if (page < 0 || page >= a->pages)
                return te__fail(te, TE_ERR_INVALID, "copy_to_kv_cache: page_table[%d, %d] is %lld; there are %d pages",
                                b, i, page, a->pages);
        }
    }
    return TE_OK;
}

static te_result te__cpu_copy_to_kv_cache(te_ctx *te, const te_op_copy_to_kv_cache_args *args) {
    te__kv_copy_kargs a = te__kv_copy_problem(args);
    te_result result = a.tokens ? te__kv_check_places(te, &a) : TE_OK;
    if (result == TE_OK) te__parallel_for(te, a.tokens, 16, te__kv_copy_rows, &a);
    return result;
}

/* Returns an element of the mask as a number to add to a score. In a U8 mask, 0 hides the key and becomes -inf. Other
 * values become 0. */
static float te__mask_value(const te__causal_mask_kargs *a, long long at) {
    if (a->dt == (int)TE_U8) return ((const uint8_t *)a->mask)[at] ? 0.0f : -HUGE_VALF;
    return te__load_element(a->mask, (te_dtype)a->dt, at);
}
static te_result te__cpu_detect_causal_mask(te_ctx *te, const te_op_detect_causal_mask_args *args) {
    const te__causal_mask_kargs a = te__causal_mask_problem(args);
    bool fits = true;
    long long at, j;
    (void)te;
    for (at = 0; at < a.rows && fits; at++) {
        long long i, seen = 0;
        const long long row = te__mask_row(&a, at, &i);
        for (j = 0; j < a.s && fits; j++) {
            const float v = te__mask_value(&a, row + j * a.stride_j);
            seen += v > -10000.0f;
            fits = te__mask_key_fits(&a, at == 0, i, j, v);
        }
        fits = fits && seen == te__mask_row_keys(&a, i);
    }
    *a.causal = fits;
    return TE_OK;
}
