/* onnx/moe.c: translates MoE routers, and the operations that permute rows by expert, into nodes of an ONNX graph. This
 * file must not depend on modules.
 *
 * In the graph a row_id_map is four vectors (te__onnx_map). Each has one element for each copy of a token:
 * - `source`: the source row
 * - `place`: the index in the flattened probabilities [T, E] or [T, topk]
 * - `expert`: the expert
 * - `destination`: the destination row */

/* Returns the 64-bit indices of the `k` largest or smallest elements along the last axis. Of equal elements the earlier
 * comes first. k is a graph item [1]. */
static int te__onnx_top(te__onnx *g, int x, int k, bool largest) {
    te__text t = te__onnx_attributes(g);
    te__onnx_attr_int(&t, "largest", largest);
    int in[2] = {x, k};
    return te__onnx_node(g, "TopK", &t, 2, in);
}
/* Returns 64-bit [.., n] with 1 at the indices that `which` [.., k] lists, and 0 elsewhere. */
static int te__onnx_marked(te__onnx *g, int which, int64_t n) {
    int equal = te__onnx_2(g, "Equal", te__onnx_unsqueeze(g, which, -1), te__onnx_range(g, te__onnx_fixed(n)));
    return te__onnx_reduce_away(g, "ReduceMax", te__onnx_cast(g, equal, TE__ONNX_INT64), -2);
}
static int te__onnx_softmax_last(te__onnx *g, int x) { return te__onnx_softmax_of(g, x, TE__ONNX_ALL); }
static int te__onnx_sum_last(te__onnx *g, int x) {
    return te__onnx_2(g, "Add", te__onnx_reduce(g, "ReduceSum", x, -1), te__onnx_f32(g, 1e-20f));
}

static int te__onnx_score(te__onnx *g, te_score_function f, int x) {
    if (f == TE_SCORE_SIGMOID) return te__onnx_1(g, "Sigmoid", x);
    return te__onnx_1(g, "Sqrt", te__onnx_1(g, "Softplus", x));
}
/* Returns `keys` [T, E], the scores by which experts are chosen. Keys of experts in the best groups stay unchanged. All
 * other keys become -3e38. */
static int te__onnx_keep_groups(te__onnx *g, int keys, int64_t experts, const te_op_moe_router_fwd_args *a) {
    const int64_t size = experts / a->num_groups, best = te__min(a->topk / a->group_topk, size);
    int64_t grouped[3], flat[2], groups = a->group_topk;
    te__text t = te__onnx_attributes(g);
    int of_group, top, kept;
    grouped[0] = -1, grouped[1] = a->num_groups, grouped[2] = size;
    flat[0] = -1, flat[1] = experts;
    of_group = te__onnx_2(g, "Reshape", keys, te__onnx_i64s(g, 3, grouped));
    te__onnx_attr_int(&t, "axis", -1);
    {
        int in[2];
        in[0] = of_group;
        in[1] = te__onnx_top(g, of_group, te__onnx_i64s(g, 1, &best), true);
        top = te__onnx_node(g, "GatherElements", &t, 2, in);
    }
    kept = te__onnx_marked(
        g, te__onnx_top(g, te__onnx_reduce_away(g, "ReduceSum", top, -1), te__onnx_i64s(g, 1, &groups), true),
        a->num_groups);
    kept = te__onnx_2(g, "Equal", te__onnx_unsqueeze(g, kept, -1), te__onnx_i64(g, 1));
    return te__onnx_2(g, "Reshape", te__onnx_3(g, "Where", kept, of_group, te__onnx_f32(g, -3e38f)),
                      te__onnx_i64s(g, 2, flat));
}
static void te__onnx_moe_router_fwd(te__onnx *g, const te_op_moe_router_fwd_args *a,
                                    const te_op_moe_router_fwd_args *b) {
    const bool softmax = a->score_function == TE_SCORE_SOFTMAX, over_all = a->use_pre_softmax || a->all_scores;
    te__onnx_pair logits = TE__ONNX_PAIR(logits), probs;
    const int64_t experts = te__cols(a->logits), topk = a->topk;
    te__onnx_size shape[2], out[TE_MAX_DIMS];
    int v, score, keys, which, map;
    TE__ONNX_UNKNOWN(routing_bits);
    if (!a->probs || a->topk_probs || a->bias_in_probs || a->zero_other_groups ||
        (a->group_topk && a->group_best != a->topk / a->group_topk) ||
        (a->norm_topk_prob == TE_ON) != (!softmax && (a->all_scores || a->topk > 1))) {
        te__onnx_refuse(g, "it is the choice of a Gate (topk_probs, norm_topk_prob, bias_in_probs, group_best or "
                           "zero_other_groups); a graph has te_fused_topk_with_score_function's");
        return;
    }
    probs = TE__ONNX_PAIR(probs);
    shape[0].first = te__rows(a->logits), shape[0].second = te__rows(b->logits);
    shape[1] = te__onnx_fixed(experts);
    logits = te__onnx_as(&logits, 2, shape, shape[1]);
    v = te__onnx_read_as(g, &logits, a->logits, b->logits);
    score = !softmax ? te__onnx_score(g, a->score_function, v) : over_all ? te__onnx_softmax_last(g, v) : v;
    if (a->all_scores && !softmax) score = te__onnx_2(g, "Div", score, te__onnx_sum_last(g, score));
    keys = a->expert_bias ? te__onnx_2(g, "Add", score, TE__ONNX_READ(expert_bias)) : score;
    if (a->group_topk) keys = te__onnx_keep_groups(g, keys, experts, a);
    which = te__onnx_top(g, keys, te__onnx_i64s(g, 1, &topk), true);
    map = te__onnx_marked(g, which, experts);
    if (!a->all_scores) {
        int chosen = te__onnx_2(g, "Equal", map, te__onnx_i64(g, 1));
        if (softmax && !over_all) score = te__onnx_softmax_of(g, v, chosen);
        score = te__onnx_3(g, "Where", chosen, score, te__onnx_f32(g, 0.0f));
        if (!softmax && topk > 1) score = te__onnx_2(g, "Div", score, te__onnx_sum_last(g, score));
        score = te__onnx_scaled(g, score, a->scaling_factor);
    }
    te__onnx_dims(&probs, out);
    if (a->probs->ndim != 2) score = te__onnx_reshape(g, score, a->probs->ndim, out);
    TE__ONNX_STORE(probs, score);
    if (a->routing_map) {
        te__onnx_pair p = TE__ONNX_PAIR(routing_map);
        p = te__onnx_as(&p, 2, shape, shape[1]);
        te__onnx_store_as(g, &p, map);
    }
    if (a->topk_indices) {
        te__onnx_pair p = TE__ONNX_PAIR(topk_indices);
        shape[1] = te__onnx_fixed(topk);
        p = te__onnx_as(&p, 2, shape, shape[1]);
        te__onnx_store_as(g, &p, which);
    }
}

/* ---- maps ---- */

static int te__onnx_flat(te__onnx *g, const te_tensor *x, const te_tensor *x2) {
    int64_t every = -1;
    return te__onnx_2(g, "Reshape", te__onnx_read(g, x, x2), te__onnx_i64s(g, 1, &every));
}

static void te__onnx_store_map(te__onnx *g, const te_tensor *map, const te_tensor *map2, const te__onnx_map *m) {
    te__onnx_write *w = te__onnx_store(g, map, map2, TE__ONNX_FAILED);
    if (w) w->map = *m;
}
static void te__onnx_moe_mask_map(te__onnx *g, const te_op_moe_mask_map_args *a, const te_op_moe_mask_map_args *b) {
    int order[2] = {1, 0}, mask, copies, expert, flat;
    int64_t every = -1;
    te__onnx_map m = TE_ZERO;
    mask = te__onnx_1(g, "Not", te__onnx_2(g, "Equal", TE__ONNX_READ(routing_map), te__onnx_i64(g, 0)));
    /* [2, copies]: sorted by expert, then by token */
    copies = te__onnx_1(g, "NonZero", te__onnx_transpose(g, mask, 2, order));
    flat = te__onnx_i64s(g, 1, &every);
    expert = te__onnx_2(g, "Reshape", te__onnx_cut(g, copies, 0, 0, 1, 1), flat);
    m.is_map = true;
    m.source = te__onnx_2(g, "Reshape", te__onnx_cut(g, copies, 0, 1, 2, 1), flat);
    m.place = te__onnx_2(g, "Add", te__onnx_2(g, "Mul", m.source, te__onnx_i64(g, te__cols(a->routing_map))), expert);
    m.expert = expert;
    m.destination = te__onnx_3(g, "Range", te__onnx_i64(g, 0), te__onnx_squeeze(g, te__onnx_1(g, "Shape", m.source), 0),
                               te__onnx_i64(g, 1));
    te__onnx_store_map(g, a->row_id_map, b->row_id_map, &m);
    if (a->tokens_per_expert)
        TE__ONNX_STORE(tokens_per_expert,
                       te__onnx_reduce_away(g, "ReduceSum", te__onnx_cast(g, mask, TE__ONNX_INT64), 0));
}
static void te__onnx_moe_index_map(te__onnx *g, const te_op_moe_index_map_args *a, const te_op_moe_index_map_args *b) {
    te__onnx_size copies, kept;
    te__onnx_map m = TE_ZERO;
    int v = te__onnx_flat(g, a->experts, b->experts);
    /* Ids are compared as unsigned 32-bit numbers, so that negative ids come last. */
    v = te__onnx_3(g, "Where", te__onnx_2(g, "Less", v, te__onnx_i64(g, 0)),
                   te__onnx_2(g, "Add", v, te__onnx_i64(g, (int64_t)1 << 32)), v);
    copies.first = te__numel(a->experts);
    copies.second = te__numel(b->experts);
    kept = copies;
    if (a->num_out_tokens) kept.first = a->num_out_tokens, kept.second = b->num_out_tokens;
    m.is_map = true;
    m.place = te__onnx_top(g, v, te__onnx_size_of(g, kept), false);
    m.source = te__onnx_2(g, "Div", m.place, te__onnx_i64(g, te__cols(a->experts)));
    m.expert = TE__ONNX_FAILED;
    m.topk = te__cols(a->experts);
    m.destination = te__onnx_range(g, kept);
    te__onnx_store_map(g, a->row_id_map, b->row_id_map, &m);
}
/* Sets *m to the te__onnx_map of `map`. `pad`, if not NULL, is the padding before each expert's rows, and moves the
 * destination rows. `topk` is the expected number of experts per token, 0 for a mask map. Fails if no recorded call
 * wrote such a map. */
static bool te__onnx_map_of(te__onnx *g, const te_tensor *map, const te_tensor *map2, const te_tensor *pad,
                            const te_tensor *pad2, int64_t topk, te__onnx_map *m) {
    te__onnx_pair x = te__onnx_pair_of(map, map2);
    int i = te__onnx_last(g, &x, g->num_writes);
    if (i < 0 || !g->writes[i].map.is_map) {
        te__onnx_refuse(g, "row_id_map is of %s; a graph has the maps of moe_mask_map and moe_index_map",
                        i < 0 || !g->writes[i].by ? "the program" : g->writes[i].by);
        return false;
    }
    *m = g->writes[i].map;
    if (topk != m->topk) {
        te__onnx_refuse(g,
                        "topk is %lld, and the map is of %lld experts for each token (0: a mask map); a graph has them "
                        "alike: give merging_probs",
                        (long long)topk, (long long)m->topk);
        return false;
    }
    if (pad)
        m->destination =
            te__onnx_2(g, "Add", m->destination, te__onnx_2(g, "Gather", te__onnx_read(g, pad, pad2), m->expert));
    return true;
}

/* Returns zeros in the shape of x, but with `values` in the rows `rows`. If `add` is true, values for the same row are
 * summed. */
static int te__onnx_scatter(te__onnx *g, const te_tensor *x, const te_tensor *x2, int rows, int values, bool add) {
    te__text t = te__onnx_attributes(g);
    te__onnx_pair p = te__onnx_pair_of(x, x2);
    te__onnx_size shape[TE_MAX_DIMS];
    int in[3];
    te__onnx_dims(&p, shape);
    if (add) te__onnx_attr_string(&t, "reduction", "add");
    in[0] = te__onnx_2(g, "Expand", te__onnx_f32(g, 0.0f), te__onnx_shape(g, x->ndim, shape, false));
    in[1] = te__onnx_unsqueeze(g, rows, -1);
    in[2] = values;
    return te__onnx_node(g, "ScatterND", &t, 3, in);
}
static void te__onnx_moe_permute(te__onnx *g, const te_op_moe_permute_args *a, const te_op_moe_permute_args *b) {
    te__onnx_map m;
    int rows, probs;
    if (!te__is_float(a->x->dtype))
        te__onnx_refuse(g, "it moves rows of %s; a graph moves floats", te_dtype_name(a->x->dtype));
    if (!te__onnx_map_of(g, a->row_id_map, b->row_id_map, a->pad_offsets, b->pad_offsets, a->topk, &m)) return;
    rows = te__onnx_2(g, "Gather", TE__ONNX_READ(x), m.source);
    if (a->probs) {
        probs = te__onnx_2(g, "Gather", te__onnx_flat(g, a->probs, b->probs), m.place);
        if (!a->topk)
            rows =
                te__onnx_3(g, "Where", te__onnx_unsqueeze(g, te__onnx_2(g, "Equal", probs, te__onnx_f32(g, 0.0f)), -1),
                           te__onnx_f32(g, 0.0f), rows);
        TE__ONNX_STORE(permuted_probs,
                       te__onnx_scatter(g, a->permuted_probs, b->permuted_probs, m.destination, probs, false));
    }
    TE__ONNX_STORE(y, te__onnx_scatter(g, a->y, b->y, m.destination, rows, false));
}
static void te__onnx_moe_unpermute(te__onnx *g, const te_op_moe_unpermute_args *a, const te_op_moe_unpermute_args *b) {
    te__onnx_map m;
    int rows;
    TE__ONNX_UNKNOWN(probs);
    if (!te__onnx_map_of(g, a->row_id_map, b->row_id_map, a->pad_offsets, b->pad_offsets, a->topk, &m)) return;
    rows = te__onnx_2(g, "Gather", TE__ONNX_READ(x), m.destination);
    if (a->merging_probs)
        rows = te__onnx_2(
            g, "Mul", rows,
            te__onnx_unsqueeze(
                g, te__onnx_2(g, "Gather", te__onnx_flat(g, a->merging_probs, b->merging_probs), m.place), -1));
    TE__ONNX_STORE(y, te__onnx_scatter(g, a->y, b->y, m.source, rows, true));
}

/* Computes the chunk of each row, which is -1 for the rows after the last chunk. Without `chunk_numbers`, operations
 * that read the map are refused. */
static void te__onnx_moe_chunk_map(te__onnx *g, const te_op_moe_chunk_map_args *a, const te_op_moe_chunk_map_args *b) {
    te__onnx_pair map = TE__ONNX_PAIR(row_id_map);
    int rows, v, n = te__onnx_i64(g, te__numel(a->sizes));
    if (!a->chunk_numbers) {
        TE__ONNX_UNKNOWN(row_id_map);
        return;
    }
    rows = te__onnx_unsqueeze(g, te__onnx_range(g, te__onnx_dim(&map, 0)), -1);
    v = te__onnx_2(g, "CumSum", TE__ONNX_READ(sizes), te__onnx_i64(g, 0));
    v = te__onnx_cast(g, te__onnx_2(g, "GreaterOrEqual", rows, v), TE__ONNX_INT64);
    v = te__onnx_reduce_away(g, "ReduceSum", v, -1);
    TE__ONNX_STORE(row_id_map, te__onnx_3(g, "Where", te__onnx_2(g, "Equal", v, n), te__onnx_i64(g, -1), v));
}
