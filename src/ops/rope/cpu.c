/* ops/rope/cpu.c: the CPU's reference of rotary embedding, token by token.
 *
 * The angle is (float(t) * position_scale) * inv_freq, by the same two f32 products as in the kernel. Rounding matters:
 * near 10^6 radians, neighbouring f32 numbers differ by 0.06. */

/* Returns the tensor to which head `packed_head` of the packed projection belongs: 0 for q, 1 for k, 2 for v. Sets *h
 * to the index of the head in that tensor. */
static int te__rope_part(const te__rope_kargs *a, int packed_head, int *h) {
    if (a->grouped && a->groups) {
        const int queries = a->heads / a->groups, group = packed_head / (queries + 2),
                  in_group = packed_head % (queries + 2);
        *h = in_group < queries ? group * queries + in_group : group;
        return in_group < queries ? 0 : in_group - queries + 1;
    }
    *h = packed_head < a->heads ? packed_head : (packed_head - a->heads) % a->groups;
    return packed_head < a->heads ? 0 : 1 + (packed_head - a->heads) / a->groups;
}

/* The rotation of a token's channel pairs: (x, y) becomes (x c[0] - y s[0], y c[1] + x s[1]). With freqs, x and y have
 * separate angles, and the transposed rotation exchanges their sines. */
typedef struct te__rope_turn {
    float c[2][TE__ROPE_MAX_HALF], s[2][TE__ROPE_MAX_HALF];
} te__rope_turn;

static void te__rope_place_of(const te__rope_kargs *a, int64_t token, int *t, int *b) {
    *t = (int)(a->batch_first ? token % a->seq : token / a->batch);
    *b = (int)(a->batch_first ? token / a->seq : token % a->batch);
}
static void te__rope_turn_of(const te__rope_kargs *a, int t, int b, te__rope_turn *turn) {
    const int step = a->interleaved ? 2 : 1, mate = a->interleaved ? 1 : a->half;
    const int64_t position = te__rope_position(a, t, &b);
    const float at = (float)position * a->position_scale, *row = a->has_freqs ? te__rope_row(a, position, b) : NULL;
    int i;
    for (i = 0; i < a->half; i++) {
        float angle = row ? row[i * step] : at * a->inv_freq[i];
        turn->c[0][i] = turn->c[1][i] = cosf(angle) * a->attention_factor;
        turn->s[0][i] = turn->s[1][i] = sinf(angle) * a->attention_factor * a->direction;
        if (!row) continue;
        angle = row[i * step + mate];
        turn->c[1][i] = cosf(angle) * a->attention_factor;
        turn->s[a->direction < 0.0f ? 0 : 1][i] = sinf(angle) * a->attention_factor * a->direction;
    }
}
static void te__rope_rotate(const te__rope_kargs *a, const te__rope_turn *turn, float *x) {
    const int step = a->interleaved ? 2 : 1, mate = a->interleaved ? 1 : a->half;
    int i;
    for (i = 0; i < a->half; i++) {
        const float u = x[i * step], v = x[i * step + mate];
        x[i * step] = u * turn->c[0][i] - v * turn->s[0][i];
        x[i * step + mate] = v * turn->c[1][i] + u * turn->s[1][i];
    }
}

/* Writes the heads of k and v of token t of sequence b as rows of codes, of rotated numbers that are rounded to the
 * projection's format first, as if they had been stored. */
static void te__rope_coded_rows(const te__rope_kargs *a, const te__rope_turn *turn, int t, int b) {
    long long page, row;
    float x[TE__CODED_ROW], stored[TE__CODED_ROW];
    int part, h;
    if (!te__rope_cache_place(a, t, b, &page, &row)) return;
    for (part = 1; part <= 2; part++)
        for (h = 0; h < a->groups; h++) {
            const te__rope_view *to = part == 1 ? &a->k : &a->v, *factors = part == 1 ? &a->k_factors : &a->v_factors;
            te__load_row(a->packed.p, (te_dtype)a->packed.dt,
                         t * a->packed.s + b * a->packed.b + te__rope_coded_head(a, part, h) * a->packed.h, a->d, x);
            if (part == 1) {
                te__rope_rotate(a, turn, x);
                te__store_row(stored, (te_dtype)a->packed.dt, 0, a->d, x);
                te__load_row(stored, (te_dtype)a->packed.dt, 0, a->d, x);
            }
            te__store_coded_row(to->p, page * to->s + row * to->b + h * to->h, factors->p,
                                page * factors->s + row * factors->b + h * factors->h, a->d, x);
        }
}

static void te__rope_tokens(void *user, int64_t begin, int64_t end) {
    const te__rope_kargs *a = (const te__rope_kargs *)user;
    const te__rope_view *const views[3] = {&a->q, &a->k, &a->v};
    te__rope_turn turn;
    float x[2 * TE__ROPE_MAX_HALF];
    int64_t token, c;
    int t, b, n;
    for (token = begin; token < end; token++) {
        te__rope_place_of(a, token, &t, &b);
        te__rope_turn_of(a, t, b, &turn);
        if (a->coded) te__rope_coded_rows(a, &turn, t, b);
        for (n = 0; n < te__rope_heads(a); n++) {
            const int head = te__rope_packed_head(a, n);
            int h, part = te__rope_part(a, head, &h);
            const te__rope_view *one = views[a->whole ? 0 : part], *src = a->gather ? one : &a->packed,
                                *dst = a->gather ? &a->packed : one;
            long long of_t = t, of_b = b;
            const bool placed = !a->cached || part == 0 || te__rope_cache_place(a, t, b, &of_t, &of_b);
            const int64_t in_one = of_t * one->s + of_b * one->b + (a->whole ? head : h) * one->h,
                          in_packed = t * a->packed.s + b * a->packed.b + head * a->packed.h;
            const int64_t from = a->gather ? in_one : in_packed, to = a->gather ? in_packed : in_one;
            /* The rotated channels are processed all at once, the others in pieces that fit into the array x. */
            for (c = 0; placed && c < a->d;) {
                const int64_t n = c == 0 && a->half ? 2 * a->half : te__min(a->d - c, TE__COUNT(x));
                te__load_row(src->p, (te_dtype)src->dt, from + c, n, x);
                if (c == 0 && part < 2) te__rope_rotate(a, &turn, x);
                te__store_row(dst->p, (te_dtype)dst->dt, to + c, n, x);
                c += n;
            }
        }
    }
}

/* Checks that the table freqs has a row for the position of each token. */
static te_result te__rope_check_rows(te_ctx *te, const te__rope_kargs *a) {
    int64_t token;
    int t, b;
    for (token = 0; token < (int64_t)a->batch * a->seq; token++) {
        int64_t position;
        te__rope_place_of(a, token, &t, &b);
        position = te__rope_position(a, t, &b);
        if (!te__rope_row(a, position, b))
            return te__fail(
                te, TE_ERR_INVALID,
                "rope: token %d of sequence %d has position %lld, and freqs has %lld rows; 0 to %lld are possible", t,
                b, (long long)position, a->freqs_rows, a->freqs_rows - 1);
    }
    return TE_OK;
}
static te_result te__rope_cpu(te_ctx *te, te__rope_kargs *a) {
    /* in these cases cu_seqlens may be empty too */
    if (a->d == 0 || te__rope_heads(a) == 0 || (a->whole == TE__ROPE_IN_PLACE && a->half == 0)) return TE_OK;
    if (a->has_freqs && te__rope_check_rows(te, a) != TE_OK) return te_error_code(te);
    te__parallel_for(te, (int64_t)a->batch * a->seq, 16, te__rope_tokens, a);
    return TE_OK;
}

static te_result te__cpu_rope(te_ctx *te, const te_op_rope_args *args) {
    te__rope_kargs a;
    te__rope_problem(&a, args);
    return te__rope_cpu(te, &a);
}
static te_result te__cpu_qkv_rope(te_ctx *te, const te_op_qkv_rope_args *args) {
    te__rope_kargs a;
    te__qkv_rope_problem(&a, args, false);
    return te__rope_cpu(te, &a);
}
static te_result te__cpu_qkv_rope_bwd(te_ctx *te, const te_op_qkv_rope_bwd_args *args) {
    te_op_qkv_rope_args f = te__qkv_rope_forward_of(args);
    te__rope_kargs a;
    te__qkv_rope_problem(&a, &f, true);
    return te__rope_cpu(te, &a);
}
