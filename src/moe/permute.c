/* moe/permute.c: differentiable functions that move token rows to their experts and back. This file must not depend on
 * modules, or on how experts are chosen. */

/* Records a node with the outputs y and z; z may be NULL. In its backward pass each of the two gradients may be
 * NULL. */
static bool te__record_two(const char *name, te_tensor *y, te_tensor *z, te_backward_fn backward, const void *state,
                           size_t state_size, te_tensor *const *inputs, int num_inputs, te_tensor *const *saved,
                           int num_saved) {
    te_tensor *outputs[2] = {y, z};
    return te__record_outputs(name, outputs, z ? 2 : 1, backward, state, state_size, NULL, inputs, num_inputs, saved,
                              num_saved) == TE_OK;
}

/* ---- permute ---- */

typedef struct te__permute_state {
    int64_t topk; /* 0: the row map is a mask map */
    int64_t tokens, copies, h, rows;
    te_dtype dtype, probs_dtype;
    int probs_ndim;
} te__permute_state;

/* saved: row_id_map, pad_offsets; inputs: x, probs. */
static te_result te__permute_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                      te_tensor **dx, const bool *needs) {
    const te__permute_state *s = (const te__permute_state *)state;
    te_op_moe_unpermute_args args = TE_ZERO;
    bool move = needs[0] && dy[0];
    args.row_id_map = saved[0];
    args.pad_offsets = saved[1];
    args.topk = s->topk;
    args.x = move ? te_tensor_contiguous(dy[0]) : te__empty_2d(te, s->dtype, s->rows, 0); /* no columns: only probs */
    args.y = te__empty_2d(te, s->dtype, s->tokens, move ? s->h : 0);
    if (!args.x || !args.y) return te_error_code(te);
    if (move) dx[0] = args.y;
    if (needs[1] && dy[1]) {
        const int64_t shape[2] = {s->tokens, s->copies};
        args.permuted_probs = te_tensor_contiguous(dy[1]);
        dx[1] = te_tensor_empty(te, s->probs_dtype, s->probs_ndim, shape);
        args.probs = dx[1] ? te__alias_2d(dx[1], 0, s->probs_dtype, s->tokens, s->copies) : NULL;
        if (!args.permuted_probs || !args.probs) return te_error_code(te);
    }
    return te_op_moe_unpermute(te, &args);
}

/* ---- rows of codes ---- */

/* Checks that the quantized rows of inp can be moved as codes with their scales. */
static te_result te__moe_codes_ok(const te_tensor *inp, const char *name) {
    const te__quant_copy *row = &inp->quantized->row;
    char why[96] = "";
    if (!row->data)
        return te__fail(
            inp->te, TE_ERR_STATE,
            "%s: the input has a column-wise copy alone, whose rows are not tokens; te_dequantize it first, or "
            "quantize it with TE_ROWWISE",
            name);
    if (row->cls->form != TE__FORM_CODES)
        snprintf(why, sizeof(why), "are no codes of te.h's own");
    else if (row->cls->code_dtype == TE_F4E2M1)
        snprintf(why, sizeof(why), "are codes of 4 bits");
    else if (row->two_dimensional)
        snprintf(why, sizeof(why), "share scales with other rows (%s)", row->cls->two_dimensional);
    else if (row->swizzled)
        snprintf(why, sizeof(why), "have swizzled scales (optimize_for_gemm)");
    if (!why[0]) return TE_OK;
    return te__fail(
        inp->te, TE_ERR_UNSUPPORTED,
        "%s: the rows of an input of kind %s %s; FP8 with one scale a tensor, with 1 x 128 blocks and MXFP8 can "
        "be moved: te_dequantize it first",
        name, inp->quantized->cls->name, why);
}

/* Fills `to` [R, n] with the scales `from` [T, n], permuted as codes->row_id_map says. Rows without a token get 0. Both
 * tensors may be strided. */
static te_result te__permute_scales(const te_op_moe_permute_args *codes, te_tensor *from, te_tensor *to) {
    te_op_moe_permute_args args = *codes;
    args.probs = NULL;
    args.permuted_probs = NULL;
    args.x = te_tensor_contiguous(from);
    args.y = to ? te__empty_2d(to->te, to->dtype, to->shape[0], to->shape[1]) : NULL;
    if (!args.x || !args.y || te_op_moe_permute(to->te, &args) != TE_OK) return TE_ERR_STATE;
    return te_tensor_copy(to, args.y);
}

/* Permutes the row-wise codes of inp and their scales by args->row_id_map. *args must have all fields except x and
 * y. */
static te_tensor *te__permute_codes(const char *name, te_tensor *inp, te_op_moe_permute_args *args, int64_t rows) {
    te__quant_copy *from = &inp->quantized->row, *to;
    te__quant_spec spec;
    te_tensor *y;
    te_result result;
    const int64_t shape[2] = {rows, te__cols(inp)};
    int dim; /* the dimension of the scale tensor that is indexed by tokens; its size may be larger than the number of
              * tokens */
    bool one_scale;
    if (te__moe_codes_ok(inp, name) != TE_OK) return NULL;
    spec = te__copy_spec(from);
    one_scale = (spec.cls->facts & TE__TENSOR_SCALED) != 0;
    dim = spec.cls->shard_scales[0];
    y = te__quant_empty(inp->te, inp->dtype, 2, shape, &spec, TE_ROWWISE, !one_scale);
    if (!y) return NULL;
    to = &y->quantized->row;
    args->x = from->data;
    args->y = to->data;
    result = te_op_moe_permute(inp->te, args);
    if (result == TE_OK && one_scale)
        result = te_tensor_copy(to->scale, from->scale);
    else if (result == TE_OK)
        result = te__permute_scales(
            args, te_tensor_transpose(te_tensor_narrow(from->scale, dim, 0, te__rows(inp)), 0, dim),
            te_tensor_transpose(te_tensor_narrow(to->scale, dim, 0, rows), 0, dim));
    return te__checked(y, result);
}

/* Permutes the rows of inp to `rows` new rows, and `probs` ([T, E] or [T, topk]) in the same way. Differentiable in inp
 * and probs. */
static te_tensor *te__permute(const char *name, te_tensor *inp, te_tensor *map, int64_t topk, te_tensor *pad_offsets,
                              te_tensor *probs, te_tensor **permuted_probs, int64_t rows) {
    te_op_moe_permute_args args = TE_ZERO;
    te__permute_state state = TE_ZERO;
    te_tensor *in[2] = {inp, probs}, *saved[2] = {map, pad_offsets}, *y, *moved = NULL;
    state.topk = topk;
    state.tokens = te__rows(inp);
    state.copies = topk ? topk : te__cols(map) / 2;
    state.h = te__cols(inp);
    state.rows = rows;
    state.dtype = inp->dtype;
    y = inp->quantized ? NULL : te__empty_2d(inp->te, inp->dtype, rows, state.h);
    if (probs) moved = te__empty_1d(inp->te, probs->dtype, rows);
    if ((!y && !inp->quantized) || (probs && !moved)) return NULL;
    args.x = inp;
    args.row_id_map = map;
    args.pad_offsets = pad_offsets;
    args.probs = probs && probs->ndim == 1 ? te__alias_2d(probs, 0, probs->dtype, te__numel(probs), 1) : probs;
    args.y = y;
    args.permuted_probs = moved;
    args.topk = topk;
    if (probs && !args.probs) return NULL;
    if (inp->quantized) y = te__permute_codes(name, inp, &args, rows);
    else if (te_op_moe_permute(inp->te, &args) != TE_OK) return NULL;
    if (!y) return NULL;
    if (probs) {
        state.probs_dtype = probs->dtype;
        state.probs_ndim = probs->ndim;
        *permuted_probs = moved;
    }
    /* quantized and plain rows get the same tape node, because the gradient is plain in both cases */
    return te__record_two(name, y, moved, te__permute_backward, &state, sizeof(state), in, 2, saved, 2) ? y : NULL;
}

/* Returns inp as a contiguous float matrix of tokens, or NULL with an error. If `moved` is true, inp may also be
 * quantized. */
static te_tensor *te__token_matrix(te_tensor *inp, const char *name, bool moved) {
    char text[TE__SHAPE_TEXT];
    if (!(moved && inp->quantized) && !te__need_float(inp, name)) return NULL;
    if (inp->ndim != 2)
        return te__no_tensor(inp->te, TE_ERR_SHAPE,
                             "%s: the input is %s; [tokens, hidden size] is needed (te_tensor_view joins sizes)", name,
                             te__shape_text(inp, text));
    return inp->quantized ? inp : te_tensor_contiguous(inp);
}
static te_tensor *te__moe_tokens(te_tensor *inp, const char *name) { return te__token_matrix(inp, name, false); }
/* Checks that the routing map has one row for each token. Returns the map as a contiguous tensor, or NULL with an
 * error. */
static te_tensor *te__moe_routing(const te_tensor *inp, te_tensor *routing, const char *name) {
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (!te__operand(inp, routing, false, name)) return NULL;
    if (routing->ndim != 2 || routing->shape[0] != inp->shape[0])
        return te__no_tensor(inp->te, TE_ERR_SHAPE,
                             "%s: the input is %s and routing_map %s; it needs a row for each token", name,
                             te__shape_text(inp, a), te__shape_text(routing, b));
    return te_tensor_contiguous(routing);
}
/* Returns the index map that sorts the copies of tokens by expert number. num_out_tokens 0: keeps all copies. */
static te_tensor *te__moe_index_map(te_tensor *experts, int64_t num_out_tokens) {
    te_op_moe_index_map_args args = TE_ZERO;
    te_tensor *map = te__empty_1d(experts->te, TE_I32, te__numel(experts));
    args.experts = experts;
    args.row_id_map = map;
    args.num_out_tokens = num_out_tokens;
    return map && te_op_moe_index_map(experts->te, &args) == TE_OK ? map : NULL;
}
static te_tensor *te__moe_mask_map(te_tensor *routing, te_tensor *tokens_per_expert) {
    te_op_moe_mask_map_args args = TE_ZERO;
    te_tensor *map = te__empty_2d(routing->te, TE_I32, routing->shape[0], 2 * routing->shape[1] + 1);
    args.routing_map = routing;
    args.row_id_map = map;
    args.tokens_per_expert = tokens_per_expert;
    return map && te_op_moe_mask_map(routing->te, &args) == TE_OK ? map : NULL;
}

TE_API te_tensor *te_moe_permute(te_tensor *inp, te_tensor *routing_map, int64_t num_out_tokens, te_map_type map_type,
                                 te_tensor **row_id_map) {
    te_tensor *map, *y = NULL;
    te_ctx *te;
    bool index = map_type == TE_MAP_INDEX;
    if (row_id_map) *row_id_map = NULL;
    if (!inp) return NULL;
    te = inp->te;
    if (map_type != TE_MAP_MASK && !index)
        return te__no_tensor(te, TE_ERR_INVALID,
                             "te_moe_permute: map_type %d; TE_MAP_MASK (0) and TE_MAP_INDEX (1) are possible",
                             (int)map_type);
    if (num_out_tokens < (index ? 0 : 1))
        return te__no_tensor(te, TE_ERR_INVALID, "te_moe_permute: num_out_tokens is %lld; %s",
                             (long long)num_out_tokens,
                             index ? "0 means all copies"
                                   : "a mask map does not say how many copies there are: tokens * topk is a bound");
    inp = te__token_matrix(inp, "te_moe_permute", true);
    routing_map = inp ? te__moe_routing(inp, routing_map, "te_moe_permute") : NULL;
    if (!routing_map) return NULL;
    te__frame_begin(te);
    map = index ? te__moe_index_map(routing_map, num_out_tokens) : te__moe_mask_map(routing_map, NULL);
    if (index && !num_out_tokens) num_out_tokens = te__numel(routing_map);
    if (map)
        y = te__permute("moe_permute", inp, map, index ? te__max(1, routing_map->shape[1]) : 0, NULL, NULL, NULL,
                        num_out_tokens);
    te_tensor *made[2] = {y, y ? map : NULL};
    te__frame_end(te, made, 2);
    if (row_id_map) *row_id_map = made[1];
    return y;
}

/* Implements te_moe_permute_with_probs and te_moe_permute_and_pad_with_probs. If pad_offsets is NULL, there is no
 * padding. */
static te_tensor *te__permute_probs(const char *name, te_tensor *inp, te_tensor *probs, te_tensor *routing_map,
                                    te_tensor *pad_offsets, int64_t rows, te_tensor **permuted_probs,
                                    te_tensor **row_id_map) {
    te_tensor *made[3] = {NULL, NULL, NULL}, *map;
    te_ctx *te = inp->te;
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    inp = te__token_matrix(inp, name, true);
    routing_map = inp ? te__moe_routing(inp, routing_map, name) : NULL;
    if (!routing_map || !te__operand(inp, probs, false, name) || !te__need_float(probs, name)) return NULL;
    if (!te__same_shape(probs, routing_map))
        return te__no_tensor(te, TE_ERR_SHAPE, "%s: probs are %s and routing_map %s; they must be equal", name,
                             te__shape_text(probs, a), te__shape_text(routing_map, b));
    probs = te_tensor_contiguous(probs);
    if (!probs) return NULL;
    te__frame_begin(te);
    map = te__moe_mask_map(routing_map, NULL);
    if (map) made[0] = te__permute(name, inp, map, 0, pad_offsets, probs, &made[1], rows);
    made[2] = made[0] ? map : NULL;
    te__frame_end(te, made, made[0] ? 3 : 0);
    if (permuted_probs) *permuted_probs = made[0] ? made[1] : NULL;
    if (row_id_map) *row_id_map = made[2];
    return made[0];
}

TE_API te_tensor *te_moe_permute_with_probs(te_tensor *inp, te_tensor *probs, te_tensor *routing_map,
                                            int64_t num_out_tokens, te_tensor **permuted_probs,
                                            te_tensor **row_id_map) {
    if (permuted_probs) *permuted_probs = NULL;
    if (row_id_map) *row_id_map = NULL;
    if (!inp) return NULL;
    if (num_out_tokens < 1)
        return te__no_tensor(
            inp->te, TE_ERR_INVALID,
            "te_moe_permute_with_probs: num_out_tokens is %lld; at least 1 is needed: tokens * topk is a bound",
            (long long)num_out_tokens);
    return te__permute_probs("te_moe_permute_with_probs", inp, probs, routing_map, NULL, num_out_tokens, permuted_probs,
                             row_id_map);
}

/* Returns the group sizes rounded up to `align`, i64 [n] on the device. Reads `sizes` or, if NULL, `values` on the
 * host. Sets *offsets to the padding before each group. */
static te_tensor *te__moe_splits(te_ctx *te, const te_tensor *sizes, const int64_t *values, int64_t n, int64_t align,
                                 te_tensor **offsets) {
    te_tensor *padded = te__empty_1d(te, TE_I64, n), *made = offsets ? te__empty_1d(te, TE_I64, n) : NULL;
    te_tensor *plain = NULL;
    te_op_moe_splits_args args = TE_ZERO;
    int64_t at;
    if (!padded || (offsets && !made)) return NULL;
    if (!sizes && n > TE_MOE_HOST_SPLITS) { /* too many for one launch: uploaded in pieces */
        plain = te__empty_1d(te, TE_I64, n);
        if (!plain) return NULL;
    }
    for (at = 0; !sizes && at < n; at += TE_MOE_HOST_SPLITS) {
        int64_t count = te__min(TE_MOE_HOST_SPLITS, n - at);
        memcpy(args.values, values + at, (size_t)count * sizeof(int64_t));
        if (!plain) break;
        args.padded = te__alias_1d(plain, at * (int64_t)sizeof(int64_t), TE_I64, count);
        if (!args.padded || te_op_moe_splits(te, &args) != TE_OK) return NULL;
    }
    args.sizes = sizes ? sizes : plain;
    args.padded = padded;
    args.offsets = made;
    args.align = align;
    if (offsets) *offsets = made;
    return te_op_moe_splits(te, &args) == TE_OK ? padded : NULL;
}

/* Returns the sum of the padded sizes x, i64. After an error returns a negative number. Waits for the device. */
static int64_t te__moe_sum(const te_tensor *x, const char *who) {
    int64_t n = te__numel(x), sum = 0, i;
    size_t bytes = (size_t)n * sizeof(int64_t);
    int64_t *host = (int64_t *)te__alloc(x->te, bytes);
    if (!host || te_tensor_to_host(x, host) != TE_OK) sum = -1;
    for (i = 0; i < n && sum >= 0; i++) {
        if (host[i] >= 0 && host[i] <= INT32_MAX - sum) { /* maps store row numbers as i32 */
            sum += host[i];
            continue;
        }
        te__fail(x->te, TE_ERR_INVALID,
                 "%s: tokens_per_expert[%lld], padded, is %lld, after %lld rows of the experts before it; at most 2^31 "
                 "- 1 rows in all are possible",
                 who, (long long)i, (long long)host[i], (long long)sum);
        sum = -1;
    }
    te__free(x->te, host);
    return sum;
}

TE_API te_tensor *te_moe_permute_and_pad_with_probs(te_tensor *inp, te_tensor *probs, te_tensor *routing_map,
                                                    te_tensor *tokens_per_expert, int64_t align_size,
                                                    int64_t num_out_tokens, te_moe_padded *made) {
    static const char name[] = "te_moe_permute_and_pad_with_probs";
    te_moe_padded none;
    te_tensor *y, *padded, *offsets = NULL;
    te_ctx *te;
    if (!made) made = &none;
    memset(made, 0, sizeof(*made));
    if (!inp) return NULL;
    te = inp->te;
    if (align_size < 1 || align_size > INT32_MAX || num_out_tokens < 0) { /* maps store row numbers as i32 */
        return te__no_tensor(
            te, TE_ERR_INVALID,
            "%s: align_size is %lld and num_out_tokens %lld; 1 to 2^31 - 1, and at least 0, are needed", name,
            (long long)align_size, (long long)num_out_tokens);
    }
    if (!te__operand(inp, tokens_per_expert, false, name)) return NULL;
    if (!num_out_tokens && te->capture) {
        te__refuse_capture(te, "te_moe_permute_and_pad_with_probs without num_out_tokens",
                           "give a bound of the padded sizes' sum: tokens * topk + experts * (align_size - 1)");
        return NULL;
    }
    tokens_per_expert = te_tensor_contiguous(tokens_per_expert);
    if (!tokens_per_expert) return NULL;
    padded = te__moe_splits(te, tokens_per_expert, NULL, te__numel(tokens_per_expert), align_size, &offsets);
    if (padded && !num_out_tokens) num_out_tokens = te__moe_sum(padded, name);
    if (!padded || num_out_tokens < 0) return NULL;
    y = te__permute_probs(name, inp, probs, routing_map, offsets, num_out_tokens, &made->permuted_probs,
                          &made->row_id_map);
    made->target_tokens_per_expert = y ? padded : NULL;
    made->pad_offsets = y ? offsets : NULL;
    return y;
}

/* ---- unpermute ---- */

typedef struct te__unpermute_state {
    int64_t topk, rows;
    te_dtype dtype;
    te__like probs;
} te__unpermute_state;

/* saved[] has row_id_map, pad_offsets, merging_probs and inp. dx[] gets the gradients of inp and of merging_probs. */
static te_result te__unpermute_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                        te_tensor **dx, const bool *needs) {
    const te__unpermute_state *s = (const te__unpermute_state *)state;
    te_op_moe_unpermute_bwd_args args = TE_ZERO;
    te_op_moe_permute_args plain = TE_ZERO;
    te_tensor *g = te_tensor_contiguous(dy[0]);
    if (!g) return te_error_code(te);
    if (needs[0]) dx[0] = te__empty_2d(te, s->dtype, s->rows, te__cols(g));
    if (needs[0] && !dx[0]) return te_error_code(te);
    if (!saved[2]) {
        plain.x = g;
        plain.row_id_map = saved[0];
        plain.pad_offsets = saved[1];
        plain.topk = s->topk;
        plain.y = dx[0];
        return dx[0] ? te_op_moe_permute(te, &plain) : TE_OK;
    }
    if (needs[1]) dx[1] = te__empty_of(te, &s->probs);
    if (needs[1] && !dx[1]) return te_error_code(te);
    args.dy = g;
    args.x = needs[1] ? saved[3] : NULL;
    args.row_id_map = saved[0];
    args.pad_offsets = saved[1];
    args.merging_probs = saved[2];
    args.dx = dx[0];
    args.dprobs = dx[1];
    args.topk = s->topk;
    return te_op_moe_unpermute_bwd(te, &args);
}

TE_API te_tensor *te_moe_unpermute(te_tensor *inp, te_tensor *row_id_map, const te_moe_unpermute_desc *desc) {
    te_moe_unpermute_desc zero = TE_ZERO;
    te_op_moe_unpermute_args args = TE_ZERO;
    te__unpermute_state state = TE_ZERO;
    te_tensor *y, *probs, *offsets;
    te_ctx *te;
    int64_t tokens;
    char text[TE__SHAPE_TEXT];
    if (!desc) desc = &zero;
    inp = inp ? te__moe_tokens(inp, "te_moe_unpermute") : NULL;
    if (!inp || !te__operand(inp, row_id_map, false, "te_moe_unpermute") ||
        !te__operand(inp, desc->merging_probs, true, "te_moe_unpermute") ||
        !te__operand(inp, desc->pad_offsets, true, "te_moe_unpermute"))
        return NULL;
    te = inp->te;
    probs = desc->merging_probs;
    offsets = desc->pad_offsets;
    if (probs && (!te__need_float(probs, "te_moe_unpermute") || probs->ndim != 2))
        return te__no_tensor(
            te, TE_ERR_SHAPE,
            "te_moe_unpermute: merging_probs are %s; [tokens, experts], or [tokens, topk] of an index map, is needed",
            te__shape_text(probs, text));
    if (desc->map_type != TE_MAP_INDEX && row_id_map->ndim != 2)
        return te__no_tensor(
            te, TE_ERR_SHAPE,
            "te_moe_unpermute: row_id_map is %s; that of a mask is [tokens, 2 * experts + 1] (map_type says which "
            "one it is)",
            te__shape_text(row_id_map, text));
    probs = te_tensor_contiguous(probs);
    row_id_map = te_tensor_contiguous(row_id_map);
    offsets = te_tensor_contiguous(offsets);
    if (!row_id_map || (desc->merging_probs && !probs) || (desc->pad_offsets && !offsets)) return NULL;
    if (desc->map_type == TE_MAP_INDEX) state.topk = probs ? te__max(1, probs->shape[1]) : 1;
    tokens = state.topk ? te__numel(row_id_map) / state.topk : row_id_map->shape[0];
    state.rows = te__rows(inp);
    state.dtype = inp->dtype;
    if (probs) state.probs = te__like_of(probs);
    y = te__empty_2d(te, inp->dtype, tokens, te__cols(inp));
    if (!y) return NULL;
    args.x = inp;
    args.row_id_map = row_id_map;
    args.pad_offsets = offsets;
    args.merging_probs = probs;
    args.y = y;
    args.topk = state.topk;
    te_tensor *in[2] = {inp, probs}, *saved[4] = {row_id_map, offsets, probs, te__wants_grad(probs) ? inp : NULL};
    return te__record("moe_unpermute", te__checked(y, te_op_moe_unpermute(te, &args)), te__unpermute_backward, &state,
                      sizeof(state), in, 2, saved, 4);
}

/* ---- chunks ---- */

/* Returns an index map of te_op_moe_permute, for topk 1, that moves chunks of rows. At least one of `sorted_index` and
 * `offsets` must be NULL. With `sorted_index`, chunk sorted_index[k] becomes chunk k of the output. With `offsets`, the
 * rows of chunk i move down by offsets[i]. */
static te_tensor *te__chunk_map(te_ctx *te, const te_tensor *sizes, const te_tensor *sorted_index,
                                const te_tensor *offsets, int64_t tokens) {
    te_op_moe_chunk_map_args args = TE_ZERO;
    te_tensor *map = te__empty_1d(te, TE_I32, tokens);
    args.sizes = sizes;
    args.sorted_index = sorted_index;
    args.offsets = offsets;
    args.row_id_map = map;
    return map && te_op_moe_chunk_map(te, &args) == TE_OK ? map : NULL;
}

static te_tensor *te__sort_chunks(const char *name, te_tensor *inp, te_tensor *probs, te_tensor *sizes,
                                  te_tensor *order, te_tensor **permuted_probs) {
    te_tensor *made[2] = {NULL, NULL}, *map;
    te_ctx *te = inp->te;
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    inp = te__token_matrix(inp, name, true);
    if (!inp || !te__operand(inp, sizes, false, name) || !te__operand(inp, order, false, name)) return NULL;
    if (permuted_probs && (!te__operand(inp, probs, false, name) || !te__need_float(probs, name))) return NULL;
    if (probs && (probs->ndim != 1 || probs->shape[0] != inp->shape[0]))
        return te__no_tensor(te, TE_ERR_SHAPE, "%s: the input is %s and probs %s; one number for each row is needed",
                             name, te__shape_text(inp, a), te__shape_text(probs, b));
    sizes = te_tensor_contiguous(sizes);
    order = te_tensor_contiguous(order);
    probs = te_tensor_contiguous(probs);
    if (!sizes || !order || (permuted_probs && !probs)) return NULL;
    te__frame_begin(te);
    map = te__chunk_map(te, sizes, order, NULL, inp->shape[0]);
    if (map) made[0] = te__permute(name, inp, map, 1, NULL, probs, &made[1], inp->shape[0]);
    te__frame_end(te, made, made[0] ? 2 : 0);
    if (permuted_probs) *permuted_probs = made[0] ? made[1] : NULL;
    return made[0];
}
TE_API te_tensor *te_moe_sort_chunks_by_index(te_tensor *inp, te_tensor *split_sizes, te_tensor *sorted_index) {
    return inp ? te__sort_chunks("te_moe_sort_chunks_by_index", inp, NULL, split_sizes, sorted_index, NULL) : NULL;
}
TE_API te_tensor *te_moe_sort_chunks_by_index_with_probs(te_tensor *inp, te_tensor *probs, te_tensor *split_sizes,
                                                         te_tensor *sorted_index, te_tensor **permuted_probs) {
    te_tensor *unwanted;
    if (permuted_probs) *permuted_probs = NULL;
    return inp ? te__sort_chunks("te_moe_sort_chunks_by_index_with_probs", inp, probs, split_sizes, sorted_index,
                                 permuted_probs ? permuted_probs : &unwanted)
               : NULL;
}

/* ---- row factors ---- */

/* Returns an index map that leaves n rows in place. */
static te_tensor *te__identity_map(te_ctx *te, int64_t n) {
    int64_t none = 0;
    te_tensor *sizes = te__moe_splits(te, NULL, &none, 1, 1, NULL);
    return sizes ? te__chunk_map(te, sizes, NULL, NULL, n) : NULL;
}
/* Multiplies row i of x [R, N] by factors[i], f32 [R], and rounds once. Differentiable in x and factors. */
static te_tensor *te__scale_rows(te_tensor *x, te_tensor *factors) {
    te_moe_unpermute_desc desc = TE_ZERO;
    te_tensor *map = x && factors ? te__identity_map(x->te, te__rows(x)) : NULL;
    if (!map) return NULL;
    desc.merging_probs = te__view_2d(factors, te__rows(x), 1);
    desc.map_type = TE_MAP_INDEX;
    return desc.merging_probs ? te_moe_unpermute(x, map, &desc) : NULL;
}
