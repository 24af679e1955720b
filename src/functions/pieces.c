/* functions/pieces.c: matrix products whose exchange between ranks is split into one piece a rank, so that a piece
 * travels while the product of another one runs. This file must not depend on modules, or on which product this is.
 *
 * In step i of size - 1 a rank sends to one rank and receives from another, so that all links are used at once:
 *
 *     all-gather, then product:      sends its own rows to rank - i, and receives the rows of rank + i, which it
 *                                    multiplies when they have come; before all steps it multiplies its own
 *     product, then reduce-scatter:  multiplies the rows of rank + i and sends the result there, and receives its own
 *                                    rows from rank - i; behind all steps it multiplies its own, and adds up
 *
 * Steps are flights (dist/flight.c): beside the products over NCCL, one after another over threads. The terms of a sum
 * over ranks are added in f32 from rank 0 on and rounded once, as a group of threads adds them. */

/* Returns `count` lines of x from line `from` on, a line being what x has at one index of its first dimension, without
 * history on the tape. Elements have whole bytes. */
static te_tensor *te__lines_of(const te_tensor *x, int64_t from, int64_t count) {
    te_tensor *y = te__alias(x);
    if (!y) return NULL;
    y->shape[0] = count;
    y->offset += from * x->stride[0] * te__dtype_size(x->dtype);
    return y;
}

/* ---- all-gather, then product ---- */

/* The rows of all ranks, which arrive piece by piece: te__row_pieces_begin, te__row_pieces_product, perhaps
 * te__row_pieces_whole, then te__row_pieces_drop, in one frame. */
typedef struct te__row_pieces {
    te_group *group;
    int size, rank;      /* size 0: nothing has begun */
    te_tensor *own;      /* this rank's rows, plain or quantized */
    te_tensor *whole;    /* of all rows. Plain: each piece is a part of it, but this rank's. Quantized: the row-wise
                          * codes of each piece are a part of it, but this rank's; if kinds have scales of blocks, its
                          * own scales are not written */
    te_tensor **piece;   /* [size] */
    te__flight *flight;  /* [2 * size]: data, and scales */
    te__arrival columns; /* column-wise copies of kinds that cannot make them from row-wise ones */
} te__row_pieces;

static void te__row_pieces_drop(te__row_pieces *s) {
    int i;
    if (!s->size) return;
    for (i = 0; s->flight && i < 2 * s->size; i++) te__flight_drop(&s->flight[i]);
    te__arrival_drop(&s->columns);
    te__free(s->own->te, s->piece);
    te__free(s->own->te, s->flight);
    memset(s, 0, sizeof(*s));
}
/* Returns whether the rows of all ranks are gathered in pieces for a product: whether this rank's rows x, plain or
 * quantized, can travel as they are. */
static bool te__gathers_in_pieces(const te__parallel *p, const te_tensor *x) {
    return p->beside & TE__UB_OVERLAP_AG && p->sequence && p->size > 1 && x && te__numel(x) > 0 &&
           (!x->quantized || (te__copy_gathers(x) && x->quantized->row.data));
}
/* Returns a quantized tensor like `own`, whose row-wise codes are the rows of rank `from` in s->whole. */
static te_tensor *te__piece_of_codes(const te__row_pieces *s, int from) {
    te_tensor *y = te__quant_keep(s->own, TE_ROWWISE);
    const te_tensor *all = s->whole->quantized->row.data;
    const int64_t rows = te__rows(s->own), row_bytes = (int64_t)te__row_bytes(all->dtype, all->shape[1]);
    te__quant_copy *c = y ? &y->quantized->row : NULL;
    te_tensor *codes = y ? te__alias_2d(all, from * rows * row_bytes, all->dtype, rows, all->shape[1]) : NULL,
              *scale = NULL;
    if (!codes) return NULL;
    te_tensor_release(c->data);
    c->data = te_tensor_retain(codes);
    if (c->cls->facts & TE__TENSOR_SCALED) return y;
    scale = te__empty_like(c->scale, c->scale->dtype);
    te_tensor_release(c->scale);
    c->scale = te_tensor_retain(scale);
    return scale ? y : NULL;
}
/* Begins to send this rank's rows to rank `to`, and to receive those of rank `from`. */
static te_result te__piece_begin(te__row_pieces *s, int from, int to) {
    te_tensor *own = s->own, *piece;
    te__flight *f = &s->flight[2 * from];
    te_result result;
    if (!own->quantized)
        piece = te__alias_as(s->whole, from * (int64_t)te_tensor_bytes(own), own->dtype, own->ndim, own->shape);
    else piece = te__piece_of_codes(s, from);
    if (!piece) return te__refuse(s->group, TE__ALL_TO_ALL, te_error_code(own->te));
    s->piece[from] = piece;
    if (!own->quantized) return te__flight_exchange(&f[0], s->group, own, to, piece, from, TE_OK);
    result = te__flight_exchange(&f[0], s->group, own->quantized->row.data, to, piece->quantized->row.data, from,
                                 TE_OK);
    if (result == TE_OK && !(own->quantized->row.cls->facts & TE__TENSOR_SCALED))
        result = te__flight_exchange(&f[1], s->group, own->quantized->row.scale, to, piece->quantized->row.scale, from,
                                 TE_OK);
    return result;
}
/* Begins to gather the rows x of all ranks, for which te__gathers_in_pieces is true. `whole`: the copies that
 * te__row_pieces_whole will return of a quantized x; 0: it is not called. */
static te_result te__row_pieces_begin(te__row_pieces *s, te_group *group, te_tensor *x, int whole) {
    te_ctx *te = x->te;
    const int size = te__group_size(group);
    te_result result = TE_OK;
    int64_t shape[TE_MAX_DIMS];
    int i;
    memset(s, 0, sizeof(*s));
    s->group = group;
    s->size = size;
    s->rank = te__group_rank(group);
    s->own = x;
    s->piece = (te_tensor **)te__alloc_zero(te, (size_t)size * sizeof(te_tensor *));
    s->flight = (te__flight *)te__alloc_zero(te, 2 * (size_t)size * sizeof(te__flight));
    te__whole_shape(group, x, shape);
    if (s->piece && s->flight && x->quantized) {
        te__quant_spec spec = te__copy_spec(&x->quantized->row);
        s->whole = te__quant_empty(te, x->dtype, x->ndim, shape, &spec, TE_ROWWISE, false);
    } else if (s->piece && s->flight)
        s->whole = te_tensor_empty(te, x->dtype, x->ndim, shape);
    if (!s->whole) result = te__refuse(group, TE__ALL_TO_ALL, te_error_code(te));
    else s->piece[s->rank] = x;
    for (i = 1; i < size && result == TE_OK; i++)
        result = te__piece_begin(s, (s->rank + i) % size, (s->rank + size - i) % size);
    if (result == TE_OK && x->quantized && whole & TE_COLUMNWISE && !(x->quantized->cls->facts & TE__TENSOR_SCALED)) {
        te_tensor *columns = te__quant_keep(x, TE_COLUMNWISE);
        result = te__arrival_begin(&s->columns, group, columns, NULL, TE_COLUMNWISE, true, NULL);
    }
    if (result != TE_OK) te__row_pieces_drop(s);
    return result;
}
/* Computes D = A op(B) into g->d, of which A's rows are those of all ranks (te__product). */
static te_result te__row_pieces_product(te__row_pieces *s, te_tensor *b, bool b_transposed, const te_op_gemm_args *g) {
    te_ctx *te = s->own->te;
    const int64_t lines = s->own->shape[0];
    te_result result = TE_OK;
    int i;
    for (i = 0; i < s->size && result == TE_OK; i++) {
        const int k = (s->rank + i) % s->size;
        te_op_gemm_args part = *g;
        te__frame_begin(te);
        result = te__flight_land(&s->flight[2 * k]);
        if (result == TE_OK) result = te__flight_land(&s->flight[2 * k + 1]);
        part.bias_gradient = NULL;
        part.d = te__lines_of(g->d, k * lines, lines);
        if (g->aux) part.aux = te__lines_of(g->aux, k * lines, lines);
        if (result == TE_OK && (!part.d || (g->aux && !part.aux))) result = te_error_code(te);
        if (result == TE_OK) result = te__product(te, s->piece[k], false, b, b_transposed, &part);
        te__frame_end(te, NULL, 0);
    }
    if (result == TE_OK && g->bias_gradient) {
        te_op_column_sum_args sum = te__gemm_column_sum(g);
        result = te_op_column_sum(te, &sum);
    }
    return result;
}
/* Returns the rows of all ranks as one tensor, for products that are not split. A quantized one has the column-wise
 * copy alone. */
static te_tensor *te__row_pieces_whole(te__row_pieces *s) {
    te_tensor *from = s->own, *to = s->whole, *y = s->whole;
    int64_t bytes;
    if (from->quantized && !(from->quantized->cls->facts & TE__TENSOR_SCALED)) return te__arrival_end(&s->columns);
    if (from->quantized) {
        te__share_factor(&y->quantized->row.scale, from->quantized->row.scale);
        te__share_factor(&y->quantized->row.amax, from->quantized->row.amax);
        from = from->quantized->row.data;
        to = y->quantized->row.data;
    }
    bytes = (int64_t)te_tensor_bytes(from);
    from = te__alias_1d(from, 0, TE_U8, bytes);
    to = te__alias_1d(to, s->rank * bytes, TE_U8, bytes);
    if (!from || !to || te_tensor_copy(to, from) != TE_OK) return NULL;
    if (!y->quantized) return y;
    if (te__quant_add_columnwise(y) != TE_OK) return NULL;
    te__copy_release(&y->quantized->row);
    return y;
}

/* Returns the rows of all ranks, of which this rank has x, plain or quantized. te__arrival_begin describes `spec`,
 * `usage` and `shard`. With a `pieces` that is not NULL, the row-wise copy is for a product alone; if its rows are to
 * come piece by piece, begins that, and returns pieces->whole. `again`: te__row_pieces_whole is to give the column-wise
 * copy later. */
static te_tensor *te__rows_gathered(const te__parallel *p, te_tensor *x, const te__quant_spec *spec, int usage,
                                    te__row_pieces *pieces, bool again, te_tensor **shard) {
    if (shard) *shard = NULL;
    if (!x || !pieces || !(p->beside & TE__UB_OVERLAP_AG)) return te__gather_by(p->group, x, spec, usage, shard);
    if (!x->quantized && spec && spec->cls->form != TE__FORM_PLAIN) {
        te__quant_spec own = *spec;
        if (!te__codes_gather(spec, x)) return te__gather_by(p->group, x, spec, usage, shard);
        if (spec->cls->facts & TE__TENSOR_SCALED) own.usage = TE_ROWWISE;
        x = te__quantize(x, &own);
        if (shard) *shard = x;
        if (!x) te__refuse(p->group, TE__ALL_GATHER, te_error_code(p->group->te));
        if (!x) return NULL;
    }
    if (!te__gathers_in_pieces(p, x)) return te__gather_by(p->group, x, NULL, usage, NULL);
    return te__row_pieces_begin(pieces, p->group, x, again ? TE_COLUMNWISE : 0) == TE_OK ? pieces->whole : NULL;
}

/* ---- product, then reduce-scatter ---- */

/* Returns whether lines of x alone can be an operand: whether no scale of its row-wise codes belongs to several
 * rows. */
static bool te__operand_cuts(const te_tensor *x) {
    const te__quant_copy *c = x->quantized ? &x->quantized->row : NULL;
    return !c || (c->data && c->cls->form == TE__FORM_CODES && !x->quantized->sizes && !c->two_dimensional &&
                  !c->swizzled);
}
/* Returns the scales of `rows` rows of the codes c [.., columns] from row `first` on. */
static te_tensor *te__scale_lines(const te__quant_copy *c, int64_t first, int64_t rows, int64_t columns) {
    const int dim = c->cls->shard_scales[0];
    const int64_t tile = dim == 0 ? 128 : 0; /* along dimension 0 the scales of whole tiles follow each other */
    int64_t shape[2];
    te_tensor *scale;
    c->cls->scale_shape(c, false, rows, columns, shape);
    if (tile && first % tile == 0 && rows % tile == 0)
        return te__alias_2d(c->scale, first * (int64_t)te__row_bytes(c->scale->dtype, shape[1]), c->scale->dtype,
                            shape[0], shape[1]);
    scale = te_tensor_zeros(c->scale->te, c->scale->dtype, 2, shape); /* zeros: the padding */
    return scale && te_tensor_copy(te_tensor_narrow(scale, dim, 0, rows),
                                   te_tensor_narrow(c->scale, dim, first, rows)) == TE_OK
               ? scale
               : NULL;
}
/* Returns `count` lines of x from line `from` on, as te__lines_of. A quantized x, of which te__operand_cuts is true,
 * gives its row-wise copy alone. */
static te_tensor *te__operand_lines(te_tensor *x, int64_t from, int64_t count) {
    const te__quant_copy *c = x->quantized ? &x->quantized->row : NULL;
    const int64_t of_line = te__rows(x) / x->shape[0], first = from * of_line, rows = count * of_line;
    int64_t shape[TE_MAX_DIMS];
    te_tensor *y, *codes, *scale = NULL, *amax = NULL;
    te__quant_copy *to;
    if (!c) return te__lines_of(x, from, count);
    memcpy(shape, x->shape, sizeof(shape));
    shape[0] = count;
    codes = te__alias_2d(c->data, first * (int64_t)te__row_bytes(c->data->dtype, c->data->shape[1]), c->data->dtype,
                         rows, c->data->shape[1]);
    scale = c->cls->facts & TE__TENSOR_SCALED ? c->scale : te__scale_lines(c, first, rows, te__cols(x));
    amax = c->amax && te__numel(c->amax) != 1 ? te__alias_1d(c->amax, first * 4, TE_F32, rows) : c->amax;
    y = codes && scale && (amax || !c->amax) ? te__tensor_shell(x->te, x->dtype, x->ndim, shape) : NULL;
    if (!y || !x->form->share(x, y)) return NULL;
    te__copy_release(&y->quantized->col);
    to = &y->quantized->row;
    te_tensor_retain(codes);
    te_tensor_retain(scale);
    te_tensor_retain(amax);
    te_tensor_release(to->data);
    te_tensor_release(to->scale);
    te_tensor_release(to->amax);
    to->data = codes;
    to->scale = scale;
    to->amax = amax;
    return y;
}

/* Returns whether the product of `a`, plain or quantized, whose result has `lines` lines, is split for the
 * reduce-scatter behind it. `option`: TE__UB_OVERLAP_RS or TE__UB_OVERLAP_RS_DGRAD. */
static bool te__scatters_in_pieces(const te__parallel *p, int option, const te_tensor *a, int64_t lines) {
    return p->beside & option && p->sequence && p->size > 1 && a && lines > 0 && lines % p->size == 0 &&
           te__numel(a) > 0 && te__operand_cuts(a);
}
/* Adds up this rank's lines of the results of all ranks, in their order. */
static te_result te__row_pieces_sum(te_tensor *const *term, int count, te_tensor *y) {
    te_tensor *sum = count > 2 && y->dtype != TE_F32 ? te__empty_like(y, TE_F32) : y;
    te_result result = sum ? te__axpby_into(count > 2 ? sum : y, term[0], term[1], 1.0f, 1.0f) : te_error_code(y->te);
    int i;
    for (i = 2; i < count && result == TE_OK; i++)
        result = te__axpby_into(i + 1 < count ? sum : y, sum, term[i], 1.0f, 1.0f);
    return result;
}
/* The steps of te__product_scattered. `term` [size] and `flight` [size] are zero. `mine`: memory for the results of all
 * lines. */
static te_result te__scatter_steps(const te__parallel *p, te_tensor *a, te_tensor *b, bool b_transposed,
                                   const te_op_gemm_args *g, te_tensor *mine, te_tensor **term, te__flight *flight,
                                   te_tensor *y) {
    te_ctx *te = a->te;
    const int rank = te__group_rank(p->group);
    const int64_t lines = y->shape[0];
    te_result result = TE_OK;
    int i;
    for (i = 1; i <= p->size && result == TE_OK; i++) {
        const int to = (rank + i) % p->size, from = (rank + p->size - i) % p->size;
        te_op_gemm_args part = *g;
        te_tensor *cut = te__operand_lines(a, to * lines, lines);
        part.d = te__lines_of(mine, to * lines, lines);
        result = cut && part.d ? te__product(te, cut, false, b, b_transposed, &part) : te_error_code(te);
        if (i == p->size) {
            term[rank] = part.d;
            break;
        }
        term[from] = result == TE_OK ? te__empty_like(y, y->dtype) : NULL;
        if (result == TE_OK && !term[from]) result = te_error_code(te);
        result = te__flight_exchange(&flight[from], p->group, part.d, to, term[from], from, result);
    }
    for (i = 0; i < p->size && result == TE_OK; i++) result = te__flight_land(&flight[i]);
    return result == TE_OK ? te__row_pieces_sum(term, p->size, y) : result;
}
/* Computes *y, this rank's lines of the sum over the ranks of A op(B) (te__product), whose shape, of all lines, is
 * `shape`. te__scatters_in_pieces is true. If this rank fails, the others do. */
static te_result te__product_scattered(const te__parallel *p, te_tensor *a, te_tensor *b, bool b_transposed,
                                       const te_op_gemm_args *g, te_dtype dtype, int ndim, const int64_t *shape,
                                       te_tensor **y) {
    te_ctx *te = a->te;
    const size_t size = (size_t)p->size;
    te_tensor **term = (te_tensor **)te__alloc_zero(te, size * sizeof(te_tensor *));
    te__flight *flight = (te__flight *)te__alloc_zero(te, size * sizeof(te__flight));
    te_tensor *mine;
    int64_t own[TE_MAX_DIMS];
    te_result result;
    int i;
    memcpy(own, shape, (size_t)ndim * sizeof(*shape));
    own[0] /= p->size;
    *y = te_tensor_empty(te, dtype, ndim, own);
    te__frame_begin(te);
    mine = te_tensor_empty(te, dtype, ndim, shape);
    result = *y && mine && term && flight ? te__scatter_steps(p, a, b, b_transposed, g, mine, term, flight, *y)
                                          : te_error_code(te);
    for (i = 0; flight && i < p->size; i++) te__flight_drop(&flight[i]);
    te__frame_end(te, NULL, 0);
    te__free(te, term);
    te__free(te, flight);
    return result == TE_OK ? TE_OK : te__refuse(p->group, TE__ALL_TO_ALL, result);
}
