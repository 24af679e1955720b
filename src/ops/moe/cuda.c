/* ops/moe/cuda.c: plans of the moe operations. This file knows how each kernel must be launched. It must not depend
 * on what the kernels compute. */

/* ---- maps ---- */

static te_result te__cuda_plan_moe_splits(te__plan *p, const te_op_moe_splits_args *a) {
    te__moe_splits_kargs k = TE_ZERO;
    int64_t i;
    if (te__numel(a->padded) == 0) return TE_OK;
    k.sizes = te__data(a->sizes);
    k.padded = te__data(a->padded);
    k.offsets = te__data(a->offsets);
    k.n = te__numel(a->padded);
    k.align = a->align;
    k.sizes_dt = te__dtype_of(a->sizes);
    k.padded_dt = a->padded->dtype;
    k.offsets_dt = te__dtype_of(a->offsets);
    for (i = 0; !a->sizes && i < k.n; i++) k.values[i] = a->values[i];
    te__plan_with(p, "moe", "moe_splits", 1, 32, &k, sizeof(k));
    return te__plan_why(p, "one warp");
}

static te_result te__cuda_plan_moe_mask_map(te__plan *p, const te_op_moe_mask_map_args *a) {
    static const char *const kernels[3] = {"moe_count", "moe_scan", "moe_rows"};
    te__moe_map_kargs k = TE_ZERO;
    int i;
    k.tokens = te__rows(a->routing_map);
    k.experts = te__cols(a->routing_map);
    k.chunk = te__max(32, te__div_up(k.tokens, 264)); /* two blocks for each of 132 multiprocessors. The counts are
                                                       * integers, so the map does not depend on the size of a chunk */
    k.chunks = te__div_up(k.tokens, k.chunk);
    k.routing = te__data(a->routing_map);
    k.map = te__int_data(a->row_id_map);
    k.counts_out = te__data(a->tokens_per_expert);
    k.routing_dt = a->routing_map->dtype;
    k.counts_dt = te__dtype_of(a->tokens_per_expert);
    k.counts = te__plan_ints(p, te__max(1, k.experts * k.chunks));
    k.rows = te__plan_ints(p, te__max(1, k.experts * k.tokens));
    for (i = 0; i < 3; i++) {
        if (i != 1 && k.chunks == 0) continue;
        if (i == 1 && k.experts == 0) continue;
        te__plan_with(p, "moe", kernels[i], i == 1 ? 1 : k.chunks, i == 1 ? 1024 : 256, &k, sizeof(k));
    }
    return te__plan_why(p, "tokens of each expert are counted by chunks, then numbered");
}

static te_result te__cuda_plan_moe_local_ids(te__plan *p, const te_op_moe_local_ids_args *a) {
    te__moe_local_kargs k = TE_ZERO;
    te__moe_map_kargs scan = TE_ZERO;
    te__launch *l;
    k.items = (unsigned)te__numel(a->experts);
    k.topk = (unsigned)te__max(1, te__cols(a->experts));
    k.experts = te__data(a->experts);
    k.experts_dt = a->experts->dtype;
    k.dropped = te__u8_data(a->dropped);
    k.local = te__int_data(a->local);
    k.first = a->first;
    k.count = (int)a->count;
    scan.experts = a->count;
    scan.chunks = te__div_up((int64_t)k.items, TE__MOE_SORT_CHUNK);
    scan.counts = k.counts = te__plan_ints(p, te__max(1, scan.experts * scan.chunks));
    scan.counts_out = te__data(a->tokens_per_expert);
    scan.counts_dt = a->tokens_per_expert->dtype;
    if (k.items) {
        l = te__plan_launch(p, "moe", "moe_local_ids");
        te__launch_size(l, scan.chunks, 1, 1, 256, (int)(4 * a->count));
        *TE__KARGS(p, l, te__moe_local_kargs) = k;
    }
    te__plan_with(p, "moe", "moe_scan", 1, 1024, &scan, sizeof(scan));
    return te__plan_why(p, "copies are counted by chunks, then added up");
}
static te_result te__cuda_plan_moe_index_map(te__plan *p, const te_op_moe_index_map_args *a) {
    te__moe_sort_kargs k = TE_ZERO;
    te__moe_map_kargs scan = TE_ZERO;
    int *between[2];
    int pass;
    k.items = te__numel(a->experts);
    if (k.items == 0) return TE_OK;
    k.topk = te__cols(a->experts);
    k.tokens = te__rows(a->experts);
    k.chunks = te__div_up(k.items, TE__MOE_SORT_CHUNK);
    k.kept = a->num_out_tokens;
    k.experts = te__data(a->experts);
    k.experts_dt = a->experts->dtype;
    k.map = te__int_data(a->row_id_map);
    k.counts = te__plan_ints(p, TE__MOE_SORT_BUCKETS * k.chunks);
    between[0] = te__plan_ints(p, 2 * k.items);
    between[1] = te__plan_ints(p, 2 * k.items);
    scan.counts = k.counts;
    scan.experts = TE__MOE_SORT_BUCKETS;
    scan.chunks = k.chunks;
    for (pass = 0; pass < 4; pass++) {
        k.shift = 8 * pass;
        k.from = pass ? between[(pass - 1) % 2] : NULL;
        k.to = pass < 3 ? between[pass % 2] : NULL;
        te__plan_with(p, "moe", "moe_sort_count", k.chunks, 256, &k, sizeof(k));
        te__plan_with(p, "moe", "moe_scan", 1, 1024, &scan, sizeof(scan));
        te__plan_with(p, "moe", "moe_sort", k.chunks, 256, &k, sizeof(k));
    }
    return te__plan_why(p, "a stable sort, eight bits of the key a pass");
}

static te_result te__cuda_plan_moe_chunk_map(te__plan *p, const te_op_moe_chunk_map_args *a) {
    te__moe_chunk_map_kargs k = TE_ZERO;
    if (te__numel(a->row_id_map) == 0) return TE_OK;
    k.sizes = te__data(a->sizes);
    k.sorted_index = te__data(a->sorted_index);
    k.outside = te__plan_outside(p, TE__OUTSIDE_moe_chunk_map);
    k.offsets = te__data(a->offsets);
    k.map = te__int_data(a->row_id_map);
    k.n = te__numel(a->sizes);
    k.tokens = te__numel(a->row_id_map);
    k.sizes_dt = a->sizes->dtype;
    k.sorted_dt = te__dtype_of(a->sorted_index);
    k.offsets_dt = te__dtype_of(a->offsets);
    k.numbers = a->chunk_numbers;
    te__plan_with(p, "moe", "moe_chunk_map", te__div_up(k.tokens, 256), 256, &k, sizeof(k));
    return te__plan_why(p, "one thread a row");
}

/* ---- permute ---- */

/* Plans the kernels that write k->source: for each row, the copy of a token that goes there. Sets the fields that
 * describe row_id_map. The caller sets all others before. */
static void te__plan_moe_source(te__plan *p, te__moe_rows_kargs *k, const te_tensor *row_id_map, int64_t topk,
                                const te_tensor *pad_offsets) {
    te__moe_map m;
    te__moe_map_of(p->te, "", row_id_map, topk, pad_offsets, &m);
    k->tokens = m.tokens;
    k->copies = te__max(1, m.copies);
    k->experts = (int)m.experts;
    k->map = te__int_data(row_id_map);
    k->pad_offsets = te__data(pad_offsets);
    k->offsets_dt = te__dtype_of(pad_offsets);
    k->source = te__plan_ints(p, k->rows);
    te__plan_fill(p, k->source, k->rows * 4, 4, true, ~(uint64_t)0);
    if (k->tokens * m.copies == 0) return;
    te__plan_with(p, "moe", "moe_invert", te__div_up(k->tokens * k->copies, 256), 256, k, sizeof(*k));
}
static void te__plan_moe_gather(te__plan *p, const te__moe_rows_kargs *k) {
    te__plan_with(p, "moe", "moe_gather", te__div_up(k->rows, 8), 256, k, sizeof(*k));
    te__plan_why(p, "the map turned round, then one warp a row");
}

static te_result te__cuda_plan_moe_permute(te__plan *p, const te_op_moe_permute_args *a) {
    te__moe_rows_kargs k = TE_ZERO;
    int64_t bytes = te__cols(a->y) * te__dtype_size(a->y->dtype);
    uintptr_t all = (uintptr_t)te__data(a->x) | (uintptr_t)te__data(a->y) | (uintptr_t)bytes | 16u;
    k.rows = te__rows(a->y);
    if (k.rows == 0) return TE_OK;
    k.x = te__data(a->x);
    k.y = te__data(a->y);
    k.probs = te__data(a->probs);
    k.permuted_probs = te__data(a->permuted_probs);
    k.probs_dt = te__dtype_of(a->probs);
    k.zeroes = a->probs && a->topk == 0;
    for (k.unit = 1; k.unit < 16 && all % (uintptr_t)(2 * k.unit) == 0;) k.unit *= 2;
    k.h = bytes / k.unit;
    te__plan_moe_source(p, &k, a->row_id_map, a->topk, a->pad_offsets);
    te__plan_moe_gather(p, &k);
    return TE_OK;
}

/* Returns arguments with the fields that moe_unpermute and moe_dot have in common: those of the map and of x. */
static te__moe_sum_kargs te__moe_sum_of(te__plan *p, const te_tensor *row_id_map, int64_t topk,
                                        const te_tensor *pad_offsets, const te_tensor *x) {
    te__moe_sum_kargs k = TE_ZERO;
    te__moe_map m;
    te__moe_map_of(p->te, "", row_id_map, topk, pad_offsets, &m);
    k.tokens = m.tokens;
    k.copies = m.copies;
    k.experts = (int)m.experts;
    k.map = te__int_data(row_id_map);
    k.pad_offsets = te__data(pad_offsets);
    k.offsets_dt = te__dtype_of(pad_offsets);
    k.x = te__data(x);
    k.rows = te__rows(x);
    k.h = te__cols(x);
    k.x_dt = x->dtype;
    return k;
}

static te_result te__cuda_plan_moe_unpermute(te__plan *p, const te_op_moe_unpermute_args *a) {
    te__moe_sum_kargs k = te__moe_sum_of(p, a->row_id_map, a->topk, a->pad_offsets, a->x);
    te__launch *l;
    if (k.tokens == 0) return TE_OK;
    k.merging_probs = te__data(a->merging_probs);
    k.permuted_probs = te__data(a->permuted_probs);
    k.y = te__data(a->y);
    k.probs = te__data(a->probs);
    k.y_dt = a->y->dtype;
    k.merging_dt = te__dtype_of(a->merging_probs);
    k.permuted_dt = te__dtype_of(a->permuted_probs);
    k.probs_dt = te__dtype_of(a->probs);
    k.vector = te__rows_aligned(a->x, k.h, 16) && te__rows_aligned(a->y, k.h, 16);
    l = te__plan_with(p, "moe", "moe_unpermute", te__div_up(k.tokens, 8), 256, &k, sizeof(k));
    te__launch_option(l, "X_DT", k.x_dt);
    te__launch_option(l, "Y_DT", k.y_dt);
    return te__plan_why(p, "one warp a token");
}

static te_result te__cuda_plan_moe_unpermute_bwd(te__plan *p, const te_op_moe_unpermute_bwd_args *a) {
    if (a->dprobs && te__numel(a->dprobs) > 0) {
        te__moe_sum_kargs k = te__moe_sum_of(p, a->row_id_map, a->topk, a->pad_offsets, a->x);
        k.dy = te__data(a->dy);
        k.dy_dt = a->dy->dtype;
        k.probs = te__data(a->dprobs);
        k.probs_dt = a->dprobs->dtype;
        k.vector = te__rows_aligned(a->x, k.h, 16) && te__rows_aligned(a->dy, k.h, 16);
        te__plan_with(p, "moe", "moe_dot", te__div_up(k.tokens, 8), 256, &k, sizeof(k));
    }
    if (a->dx && te__numel(a->dx) > 0) {
        te__moe_rows_kargs k = TE_ZERO;
        k.rows = te__rows(a->dx);
        k.h = te__cols(a->dx);
        k.x = te__data(a->dy);
        k.y = te__data(a->dx);
        k.probs = te__data(a->merging_probs);
        k.x_dt = a->dy->dtype;
        k.y_dt = a->dx->dtype;
        k.probs_dt = a->merging_probs->dtype;
        te__plan_moe_source(p, &k, a->row_id_map, a->topk, a->pad_offsets);
        te__plan_moe_gather(p, &k);
    }
    return TE_OK;
}

/* ---- router ---- */

/* Plans a kernel of the router. A block has at most 8 warps, and only as many as fit in 48 KiB of shared memory. */
static void te__plan_moe_router(te__plan *p, const char *kernel, const te__moe_router_kargs *k, int64_t bytes_a_warp) {
    te__launch *l = te__plan_launch(p, "moe", kernel);
    int64_t warps = te__max(1, te__min(8, 48 * 1024 / bytes_a_warp));
    te__launch_size(l, te__div_up(k->tokens, warps), 1, 1, (int)(32 * warps), (int)(warps * bytes_a_warp));
    *TE__KARGS(p, l, te__moe_router_kargs) = *k;
    te__plan_why(p, "one warp a token, its scores in shared memory");
}

static te_result te__cuda_plan_moe_router_fwd(te__plan *p, const te_op_moe_router_fwd_args *a) {
    te__moe_router_kargs k = TE_ZERO;
    k.tokens = te__rows(a->logits);
    if (k.tokens == 0) return TE_OK;
    k.logits = te__data(a->logits);
    k.bias = te__data(a->expert_bias);
    k.probs = te__data(a->probs);
    k.map = te__u8_data(a->routing_map);
    k.bits = te__u8_data(a->routing_bits);
    k.indices = te__data(a->topk_indices);
    k.topk_probs = te__data(a->topk_probs);
    k.scaling = a->scaling_factor;
    k.experts = (int)te__cols(a->logits);
    k.topk = a->topk;
    k.groups = a->num_groups;
    k.group_topk = a->group_topk;
    k.group_best = a->group_best;
    k.zero_groups = a->zero_other_groups;
    k.score = a->score_function;
    k.pre_softmax = a->use_pre_softmax;
    k.all_scores = a->all_scores;
    k.logits_dt = a->logits->dtype;
    k.bias_dt = te__dtype_of(a->expert_bias);
    k.normalise = a->norm_topk_prob == TE_ON;
    k.biased = a->bias_in_probs;
    k.probs_dt = te__dtype_of(a->probs);
    k.topk_probs_dt = te__dtype_of(a->topk_probs);
    k.indices_dt = te__dtype_of(a->topk_indices);
    te__plan_moe_router(p, "moe_router_fwd", &k, 9 * (int64_t)k.experts + 5 * (int64_t)k.groups);
    return TE_OK;
}
static te_result te__cuda_plan_moe_router_bwd(te__plan *p, const te_op_moe_router_bwd_args *a) {
    te__moe_router_kargs k = TE_ZERO;
    k.tokens = te__rows(a->logits);
    if (k.tokens == 0) return TE_OK;
    k.logits = te__data(a->logits);
    k.outside = te__plan_outside(p, TE__OUTSIDE_moe_router_bwd);
    k.probs = te__data(a->dlogits);
    k.dprobs = te__data(a->dtopk_probs ? a->dtopk_probs : a->dprobs);
    k.indices = a->dtopk_probs ? te__data(a->topk_indices) : NULL;
    k.bias = te__data(a->expert_bias);
    k.map = te__u8_data(a->routing_map);
    k.scaling = a->scaling_factor;
    k.experts = (int)te__cols(a->logits);
    k.topk = a->topk;
    k.score = a->score_function;
    k.pre_softmax = a->use_pre_softmax;
    k.all_scores = a->all_scores;
    k.logits_dt = a->logits->dtype;
    k.probs_dt = a->dlogits->dtype;
    k.normalise = a->norm_topk_prob == TE_ON;
    k.biased = a->bias_in_probs;
    k.bias_dt = te__dtype_of(a->expert_bias);
    k.indices_dt = a->dtopk_probs ? a->topk_indices->dtype : TE_DTYPE_NONE;
    k.dprobs_dt = a->dtopk_probs ? a->dtopk_probs->dtype : a->dprobs->dtype;
    te__plan_moe_router(p, "moe_router_bwd", &k, 9 * (int64_t)k.experts);
    return TE_OK;
}

/* ---- auxiliary loss, sums ---- */

static te_result te__cuda_plan_moe_aux_loss_fwd(te__plan *p, const te_op_moe_aux_loss_fwd_args *a) {
    te__moe_loss_kargs k = TE_ZERO;
    int64_t blocks;
    k.rows = te__rows(a->probs);
    k.cols = te__cols(a->probs);
    k.probs = te__data(a->probs);
    k.counts = te__data(a->tokens_per_expert);
    k.total = (const long long *)te__data(a->total_device);
    k.total_host = (float)a->total_num_tokens;
    k.factor = te__moe_loss_factor(a->coeff, a->num_experts, a->topk);
    k.out = te__data(a->loss);
    k.probs_dt = a->probs->dtype;
    k.counts_dt = a->tokens_per_expert->dtype;
    k.out_dt = a->loss->dtype;
    k.chunk = te__max(32, te__div_up(k.rows, 512));
    blocks = te__max(1, te__div_up(k.rows, k.chunk));
    k.partial = te__plan_floats(p, blocks);
    k.counter = te__plan_counter(p);
    te__plan_with(p, "moe", "moe_loss_fwd", blocks, 256, &k, sizeof(k));
    return te__plan_why(p, "partial sums of chunks of rows, added up by the block that ends last");
}
static te_result te__cuda_plan_moe_aux_loss_bwd(te__plan *p, const te_op_moe_aux_loss_bwd_args *a) {
    te__moe_loss_kargs k = TE_ZERO;
    if (te__numel(a->dprobs) == 0) return TE_OK;
    k.rows = te__rows(a->dprobs);
    k.cols = te__cols(a->dprobs);
    k.counts = te__data(a->tokens_per_expert);
    k.total = (const long long *)te__data(a->total_device);
    k.dloss = te__data(a->dloss);
    k.out = te__data(a->dprobs);
    k.total_host = (float)a->total_num_tokens;
    k.factor = te__moe_loss_factor(a->coeff, a->num_experts, a->topk);
    k.counts_dt = a->tokens_per_expert->dtype;
    k.dloss_dt = a->dloss->dtype;
    k.out_dt = a->dprobs->dtype;
    te__plan_with(p, "moe", "moe_loss_bwd", te__div_up(te__numel(a->dprobs), 1024), 256, &k, sizeof(k));
    return te__plan_why(p, "one value a column, written to all rows");
}
static te_result te__cuda_plan_grouped_column_sum(te__plan *p, const te_op_grouped_column_sum_args *a) {
    te__grouped_column_sum_kargs k = TE_ZERO;
    if (te__numel(a->out) == 0) return TE_OK;
    k.x = te__data(a->x);
    k.sizes = te__data(a->sizes);
    k.out = te__data(a->out);
    k.m = te__rows(a->x);
    k.n = te__cols(a->x);
    k.groups = te__numel(a->sizes);
    k.x_dt = a->x->dtype;
    k.sizes_dt = a->sizes->dtype;
    k.out_dt = a->out->dtype;
    te__plan_with(p, "moe", "grouped_column_sum", k.groups * te__div_up(k.n, 32), 256, &k, sizeof(k));
    return te__plan_why(p, "a block for 32 columns of a group");
}
