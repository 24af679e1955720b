/* nn/attention.c: rotary embedding, splitting a packed projection, attention: differentiable functions like those of nn/functions.c. */

/* ---- rope ---- */

static te_op_rope_args te__rope_args(const te_rotary_desc *d, te_qkv_format format, int64_t head_dim, int64_t length) {
    te_op_rope_args a = TE_ZERO;
    float percent = d->rotary_percent > 0.0f && d->rotary_percent < 1.0f ? d->rotary_percent : 1.0f;
    a.format = format;
    a.base = d->base;
    a.rotary_dim = (int)((float)te__min(head_dim, 1 << 24) * percent); /* exact in a float; te_op_rope refuses sizes far below 2^24 */
    a.interleaved = d->interleaved;
    a.llama3 = d->llama3;
    a.position_offset = d->position_offset;
    a.start_positions = d->start_positions;
    a.cu_seqlens = d->cu_seqlens;
    if (d->max_seqlen > 0) length = d->max_seqlen;
    /* Positions are interpolated when both fields are set: sequences beyond the stretched range are squeezed into it, others are divided
     * by the factor (TransformerEngine, RotaryPositionEmbedding). */
    if (d->seq_len_interpolation_factor > 0.0f && d->pretrained_max_position_embeddings > 0) {
        float limit = (float)d->pretrained_max_position_embeddings * d->seq_len_interpolation_factor;
        a.position_scale = (float)length > limit ? te__floats_divide((float)d->pretrained_max_position_embeddings, (float)length)
                                                    : te__floats_divide(1.0, d->seq_len_interpolation_factor);
    }
    return a;
}

static te_tensor *te__rope_apply(te_tensor *x, te_op_rope_args args) {
    args.x = x;
    args.y = te__empty_like(x, x->dtype);
    return args.y ? te__checked(args.y, te_op_rope(x->te, &args)) : NULL;
}
static te_result te__rope_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    te_op_rope_args args = *(const te_op_rope_args *)state;
    te_tensor *g = te_tensor_contiguous(dy[0]);
    (void)needs;
    args.start_positions = saved[0];
    args.cu_seqlens = saved[1];
    args.backward = true;
    dx[0] = g ? te__rope_apply(g, args) : NULL;
    return dx[0] ? TE_OK : te_error_code(te);
}
TE_API te_tensor *te_apply_rotary_pos_emb(te_tensor *x, const te_rotary_desc *desc, te_qkv_format format) {
    te_rotary_desc zero = TE_ZERO;
    te_op_rope_args args;
    te_tensor *saved[2];
    char text[TE__SHAPE_TEXT];
    if (!x || !te__need_float(x, "te_apply_rotary_pos_emb")) return NULL;
    if (!desc) desc = &zero;
    if (x->ndim != (format == TE_THD ? 3 : 4)) {
        te__fail(x->te, TE_ERR_SHAPE, "te_apply_rotary_pos_emb: the input is %s; %s is needed", te__shape_text(x, text),
                 format == TE_THD ? "[tokens, h, d]" : "[s, b, h, d] or [b, s, h, d]");
        return NULL;
    }
    x = te_tensor_contiguous(x);
    if (!x) return NULL;
    args = te__rope_args(desc, format, x->shape[x->ndim - 1], x->shape[format == TE_BSHD ? 1 : 0]);
    saved[0] = desc->start_positions;
    saved[1] = desc->cu_seqlens;
    return te__record("rope", te__rope_apply(x, args), te__rope_backward, &args, sizeof(args), &x, 1, saved, 2);
}

/* ---- a packed projection to q, k and v, rotated ---- */

static te_result te__qkv_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    const te_op_qkv_rope_args *f = (const te_op_qkv_rope_args *)state;
    te_op_qkv_rope_bwd_args args = TE_ZERO;
    te_tensor *g[3];
    const te_tensor *like = dy[0] ? dy[0] : dy[1] ? dy[1] : dy[2];
    int64_t shape[4];
    int i;
    (void)needs;
    memcpy(shape, like->shape, sizeof(shape));
    for (i = 0; i < 3; i++) {
        shape[2] = i == 0 ? f->num_heads : f->num_groups;
        g[i] = dy[i] ? te_tensor_contiguous(dy[i]) : te_tensor_zeros(te, like->dtype, 4, shape);
        if (!g[i]) return te_error_code(te);
    }
    shape[2] = (int64_t)(f->num_heads + 2 * f->num_groups) * f->head_dim;
    args.qkv = dx[0] = te_tensor_empty(te, like->dtype, 3, shape);
    if (!dx[0]) return te_error_code(te);
    args.q = g[0];
    args.k = g[1];
    args.v = g[2];
    args.format = f->format;
    args.num_heads = f->num_heads;
    args.num_groups = f->num_groups;
    args.head_dim = f->head_dim;
    args.interleaved_groups = f->interleaved_groups;
    args.no_rope = f->no_rope;
    args.base = f->base;
    args.rotary_dim = f->rotary_dim;
    args.interleaved = f->interleaved;
    args.position_scale = f->position_scale;
    args.llama3 = f->llama3;
    args.position_offset = f->position_offset;
    args.start_positions = saved[0];
    return te_op_qkv_rope_bwd(te, &args);
}

/* qkv [s, b, (H + 2G) d] to out[0] = q [s, b, H, d], out[1] = k, out[2] = v [s, b, G, d]. False on failure. */
static bool te__split_qkv(te_tensor *qkv, int heads, int groups, int64_t head_dim, bool interleaved, te_qkv_format format, const te_rotary_desc *rotary,
                          te_tensor *out[3]) {
    te_op_qkv_rope_args args = TE_ZERO;
    te_node_desc node = TE_ZERO;
    te_tensor *saved[1];
    int64_t shape[4];
    int i;
    qkv = te_tensor_contiguous(qkv);
    if (!qkv) return false;
    shape[0] = qkv->shape[0];
    shape[1] = qkv->shape[1];
    shape[3] = head_dim;
    for (i = 0; i < 3; i++) {
        shape[2] = i == 0 ? heads : groups;
        out[i] = te_tensor_empty(qkv->te, qkv->dtype, 4, shape);
        if (!out[i]) return false;
    }
    args.qkv = qkv;
    args.q = out[0];
    args.k = out[1];
    args.v = out[2];
    args.format = format;
    args.num_heads = heads;
    args.num_groups = groups;
    args.head_dim = (int)head_dim;
    args.interleaved_groups = interleaved;
    args.no_rope = !rotary;
    if (rotary) {
        te_op_rope_args r = te__rope_args(rotary, format, head_dim, qkv->shape[format == TE_BSHD ? 1 : 0]);
        args.base = r.base;
        args.rotary_dim = r.rotary_dim;
        args.interleaved = r.interleaved;
        args.position_scale = r.position_scale;
        args.llama3 = r.llama3;
        args.position_offset = r.position_offset;
        args.start_positions = r.start_positions;
    }
    if (te_op_qkv_rope(qkv->te, &args) != TE_OK) return false;
    saved[0] = rotary ? rotary->start_positions : NULL;
    node.name = "split_qkv";
    node.inputs = &qkv;
    node.num_inputs = 1;
    node.outputs = out;
    node.num_outputs = 3;
    node.saved = saved;
    node.num_saved = 1;
    node.state = &args;
    node.state_size = sizeof(args);
    node.backward = te__qkv_backward;
    return te_record(qkv->te, &node) == TE_OK;
}

/* ---- attention ---- */

/* The tensors of extras, for a node to save: forth, and back. */
enum { TE__ATTENTION_EXTRAS = 9 };
static void te__attention_extras(te_attn_extras *x, te_tensor **list, bool back) {
    te_tensor **field[TE__ATTENTION_EXTRAS];
    int i;
    field[0] = &x->attention_mask;
    field[1] = &x->cu_seqlens_q;
    field[2] = &x->cu_seqlens_kv;
    field[3] = &x->cu_seqlens_q_padded;
    field[4] = &x->cu_seqlens_kv_padded;
    field[5] = &x->core_attention_bias;
    field[6] = &x->alibi_slopes;
    field[7] = &x->softmax_offset;
    field[8] = &x->page_table;
    for (i = 0; i < TE__ATTENTION_EXTRAS; i++) {
        if (back)
            *field[i] = list[i];
        else
            list[i] = *field[i];
    }
}

static te_result te__attention_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    const te_op_attn_fwd_args *f = (const te_op_attn_fwd_args *)state;
    te_op_attn_bwd_args args = TE_ZERO;
    args.q = saved[0];
    args.k = saved[1];
    args.v = saved[2];
    args.o = saved[3];
    args.lse = saved[4];
    args.d_o = te_tensor_contiguous(dy[0]);
    args.dq = dx[0] = te__empty_like(saved[0], saved[0]->dtype);
    args.dk = dx[1] = te__empty_like(saved[1], saved[1]->dtype);
    args.dv = dx[2] = te__empty_like(saved[2], saved[2]->dtype);
    args.format = f->format;
    args.mask = f->mask;
    args.window = f->window;
    args.softmax_scale = f->softmax_scale;
    args.dropout_p = f->dropout_p;
    args.seed = f->seed;
    args.offset = f->offset;
    args.rng = saved[5];
    args.extras = f->extras;
    te__attention_extras(&args.extras, (te_tensor **)saved + 6, true);
    if (needs[3]) args.dbias = dx[3] = te__empty_like(args.extras.core_attention_bias, args.extras.core_attention_bias->dtype);
    if (needs[4]) args.dsoftmax_offset = dx[4] = te__empty_like(args.extras.softmax_offset, TE_F32);
    return args.d_o && dx[0] && dx[1] && dx[2] && (!needs[3] || dx[3]) && (!needs[4] || dx[4]) ? te_op_attn_bwd(te, &args) : te_error_code(te);
}

TE_API te_tensor *te_attention(te_tensor *q, te_tensor *k, te_tensor *v, const te_attention_desc *desc) {
    te_attention_desc zero = TE_ZERO;
    te_op_attn_fwd_args args = TE_ZERO;
    te__rng_state before;
    te__draw draw = TE_ZERO;
    te_tensor *in[5], *saved[6 + TE__ATTENTION_EXTRAS], *o;
    te_ctx *te;
    int64_t shape[4], lse[3];
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT], c[TE__SHAPE_TEXT];
    bool packed, packed_kv;
    if (!q || !te__operand(q, k, false, "te_attention") || !te__operand(q, v, false, "te_attention") || !te__need_float(q, "te_attention")) return NULL;
    if (!desc) desc = &zero;
    te = q->te;
    packed = desc->format == TE_THD;
    packed_kv = packed && !desc->extras.kv_bshd && !desc->extras.page_table;
    if (q->ndim != (packed ? 3 : 4) || k->ndim != (packed_kv ? 3 : 4) || v->ndim != (packed_kv ? 3 : 4)) {
        te__fail(te, TE_ERR_SHAPE, "te_attention: q is %s, k %s, v %s; [s, b, heads, d] or [b, s, heads, d] each, or with TE_THD [tokens, heads, d]",
                 te__shape_text(q, a), te__shape_text(k, b), te__shape_text(v, c));
        return NULL;
    }
    memcpy(shape, q->shape, sizeof(shape));
    shape[q->ndim - 1] = v->shape[v->ndim - 1];
    lse[0] = packed ? 1 : q->shape[desc->format == TE_BSHD ? 0 : 1];
    lse[1] = q->shape[q->ndim - 2];
    lse[2] = q->shape[desc->format == TE_BSHD ? 1 : 0];
    in[0] = q;
    in[1] = k;
    in[2] = v;
    in[3] = desc->extras.core_attention_bias;
    in[4] = desc->extras.softmax_offset;
    te__frame_begin(te);
    args.q = q;
    args.k = k;
    args.v = v;
    args.o = o = te_tensor_empty(te, q->dtype, q->ndim, shape);
    args.lse = te_tensor_empty(te, TE_F32, 3, lse);
    args.format = desc->format;
    args.mask = desc->mask;
    args.window = desc->window;
    args.softmax_scale = desc->softmax_scale;
    args.dropout_p = desc->dropout_p;
    args.extras = desc->extras;
    args.max_logit = desc->max_logit;
    before = te__rng_now(te);
    if (desc->dropout_p > 0.0f) draw = te__rng_draw(te, 1);
    args.seed = draw.seed;
    args.offset = draw.offset;
    args.rng = draw.rng;
    if (!o || !args.lse || te_op_attn_fwd(te, &args) != TE_OK) o = NULL;
    saved[0] = q;
    saved[1] = k;
    saved[2] = v;
    saved[3] = o;
    saved[4] = args.lse;
    saved[5] = draw.rng;
    te__attention_extras(&args.extras, saved + 6, false);
    o = te__record("attention", o, te__attention_backward, &args, sizeof(args), in, 5, saved, 6 + TE__ATTENTION_EXTRAS);
    if (!o) te__rng_back(te, before);
    return te__frame_return(te, o);
}
