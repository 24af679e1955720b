/* ops/kv/cuda.c: chooses the kernels for sequence lengths, KV caches and causal masks, and plans their launches. This
 * file must not call the CUDA driver. */

static te_result te__cuda_plan_cu_seqlens(te__plan *p, const te_op_cu_seqlens_args *args) {
    const te__cu_seqlens_kargs a = te__cu_seqlens_problem(args);
    te__plan_with(p, "kv", "cu_seqlens", 1, TE__CU_SEQLENS_THREADS, &a, sizeof(a));
    return te__plan_why(p, "general: one block counts all sequences, and adds them up");
}

static te_result te__cuda_plan_advance_kv_cache(te__plan *p, const te_op_advance_kv_cache_args *args) {
    const te__kv_advance_kargs a = te__kv_advance_problem(args);
    te__plan_with(p, "kv", "advance_kv_cache", 1, TE__CU_SEQLENS_THREADS, &a, sizeof(a));
    return te__plan_why(p, "general: one block for all sequences");
}

static te_result te__cuda_plan_copy_to_kv_cache(te__plan *p, const te_op_copy_to_kv_cache_args *args) {
    te__kv_copy_kargs a = te__kv_copy_problem(args);
    te__cache_use use = TE_ZERO;
    te__launch *l;
    if (a.tokens * a.heads == 0) return TE_OK;
    use.k = args->k_cache;
    use.v = args->v_cache;
    use.k_factors = args->k_factors;
    use.v_factors = args->v_factors;
    use.start = args->start_positions;
    use.table = args->page_table;
    use.sequences = a.sequences;
    te__note_rows(p, &use);
    l = te__plan_launch(p, "kv", "copy_to_kv_cache");
    *TE__KARGS(p, l, te__kv_copy_kargs) = a;
    te__launch_size(l, te__min(a.tokens, 1 << 20), 2, 1, 128, 0);
    if (a.side[0].cache_dt == (int)TE_F8E4M3 || a.side[1].cache_dt == (int)TE_F8E4M3)
        return te__plan_why(p, "general: a block for each token, a warp for each row of codes");
    return te__plan_why(p, "general: a block for each token");
}

static te_result te__cuda_plan_detect_causal_mask(te__plan *p, const te_op_detect_causal_mask_args *args) {
    te__launch *l = te__plan_launch(p, "kv", "detect_causal_mask");
    te__causal_mask_kargs *k = TE__KARGS(p, l, te__causal_mask_kargs);
    *k = te__causal_mask_problem(args);
    k->failed = te__plan_largest(p);
    k->counter = te__plan_counter(p);
    te__launch_blocks(l, te__min(k->rows, p->num_sms * 8), TE__MASK_THREADS);
    return te__plan_why(p, "general: a block for each row");
}
