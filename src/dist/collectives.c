/* dist/collectives.c: the public collectives, and what is made of them: comparing, splitting. Each checks its
 * arguments, then calls the group's implementation. This file must not depend on modules and recipes. */

TE_API te_result te_all_reduce(te_group *group, te_tensor *x, te_reduce_op op) {
    te__group_call c = TE_ZERO;
    const uint64_t n = (uint64_t)te__group_size(group);
    te_result r = te__want_shared(group, TE__ALL_REDUCE, "x", x);
    if (r == TE_OK) r = te__want_reducible(TE__ALL_REDUCE, x, op);
    if (r == TE_OK) r = te__group_captures(group, TE__ALL_REDUCE, NULL, x);
    if (r != TE_OK) return te__refuse(group, TE__ALL_REDUCE, r);
    if (te__is_alone(group)) return TE_OK;
    c.kind = TE__ALL_REDUCE;
    c.op = op;
    r = te__group_call_one(group, &c, NULL, x);
    te__touch(x);
    return te__report_collective(group, TE__ALL_REDUCE,
                                 (2 * (n - 1) * (uint64_t)te_tensor_bytes(x) + n - 1) / n, r);
}

/* Calls te_group.sums, which is not NULL. All ranks make the call. `result`: an error of this rank from before, which
 * it tells the others. */
static te_result te__sums(te_group *group, te_tensor *const *x, int n, bool mean, te_result result) {
    const uint64_t size = (uint64_t)te__group_size(group);
    te__group_call c = TE_ZERO;
    uint64_t bytes = 0;
    int i;
    for (i = 0; i < n && result == TE_OK; i++) {
        result = te__want_shared(group, TE__ALL_REDUCE, "x", x[i]);
        if (result == TE_OK) result = te__want_reducible(TE__ALL_REDUCE, x[i], TE_REDUCE_SUM);
        if (result == TE_OK) result = te__group_captures(group, TE__ALL_REDUCE, NULL, x[i]);
        if (result == TE_OK) bytes += (uint64_t)te_tensor_bytes(x[i]);
    }
    if (result != TE_OK) return te__refuse(group, TE__ALL_REDUCE, result);
    if (te__is_alone(group)) return TE_OK;
    c.kind = TE__ALL_REDUCE;
    c.out = x;
    c.n = n;
    c.all = true;
    c.mean = mean;
    result = te__group_call_one(group, &c, NULL, NULL);
    for (i = 0; i < n; i++) te__touch(x[i]);
    return te__report_collective(group, TE__ALL_REDUCE, (2 * (size - 1) * bytes + size - 1) / size, result);
}

TE_API te_result te_all_gather(te_group *group, const te_tensor *x, te_tensor *out) {
    te_result r = te__want_shared(group, TE__ALL_GATHER, "x", x);
    if (r == TE_OK) r = te__want_shared(group, TE__ALL_GATHER, "out", out);
    if (r == TE_OK) r = te__want_parts(TE__ALL_GATHER, "out", out, "x", x, te_group_size(group));
    if (r == TE_OK) r = te__group_captures(group, TE__ALL_GATHER, x, out);
    if (r != TE_OK) return te__refuse(group, TE__ALL_GATHER, r);
    if (te__is_alone(group)) return te_group_size(group) == 1 ? te__copy_bytes(x, out) : TE_OK;
    r = te__group_call_kind(group, TE__ALL_GATHER, x, out, -1);
    te__touch(out);
    return te__report_collective(group, TE__ALL_GATHER,
                                 (uint64_t)(group->is.size - 1) * (uint64_t)te_tensor_bytes(x), r);
}

TE_API te_result te_reduce_scatter(te_group *group, const te_tensor *x, te_tensor *out) {
    te_result r = te__want_shared(group, TE__REDUCE_SCATTER, "x", x);
    if (r == TE_OK) r = te__want_shared(group, TE__REDUCE_SCATTER, "out", out);
    if (r == TE_OK) r = te__want_reducible(TE__REDUCE_SCATTER, x, TE_REDUCE_SUM);
    if (r == TE_OK) r = te__want_parts(TE__REDUCE_SCATTER, "x", x, "out", out, te_group_size(group));
    if (r == TE_OK) r = te__group_captures(group, TE__REDUCE_SCATTER, x, out);
    if (r != TE_OK) return te__refuse(group, TE__REDUCE_SCATTER, r);
    if (te__is_alone(group)) return te_group_size(group) == 1 ? te__copy_bytes(x, out) : TE_OK;
    r = te__group_call_kind(group, TE__REDUCE_SCATTER, x, out, -1);
    te__touch(out);
    return te__report_collective(group, TE__REDUCE_SCATTER,
                                 (uint64_t)(group->is.size - 1) * (uint64_t)te_tensor_bytes(out), r);
}

TE_API te_result te_broadcast(te_group *group, te_tensor *x, int root) {
    te_result r = te__want_shared(group, TE__BROADCAST, "x", x);
    if (r == TE_OK && (root < 0 || root >= te_group_size(group)))
        r = te__fail(x->te, TE_ERR_INVALID, "te_broadcast: root is %d; the ranks are 0 to %d", root,
                     te_group_size(group) - 1);
    if (r == TE_OK) r = te__group_captures(group, TE__BROADCAST, NULL, x);
    if (r != TE_OK) return te__refuse(group, TE__BROADCAST, r);
    if (te__is_alone(group)) return TE_OK;
    r = te__group_call_kind(group, TE__BROADCAST, NULL, x, root);
    te__touch(x);
    return te__report_collective(group, TE__BROADCAST, group->is.rank == root ? te_tensor_bytes(x) : 0, r);
}

TE_API te_result te_barrier(te_group *group) {
    te_result r = group ? te__refuse_fork(group->te) : TE_OK;
    if (te__is_alone(group) || r != TE_OK) return r;
    r = te__group_captures(group, TE__BARRIER, NULL, NULL);
    if (r != TE_OK) return te__refuse(group, TE__BARRIER, r);
    return te__report_collective(group, TE__BARRIER, 0, te__group_call_kind(group, TE__BARRIER, NULL, NULL, -1));
}

/* ---- all to all ---- */

/* Returns the number of elements of a line of x. A line is the slice x[i] at one index i of the first dimension. */
static int64_t te__line_numel(const te_tensor *x) {
    int64_t n = 1;
    int i;
    for (i = 1; i < x->ndim; i++) n *= x->shape[i];
    return n;
}
static int64_t te__line_bytes(const te_tensor *x) {
    return (int64_t)te__shape_bytes(x->dtype, x->ndim - 1, x->shape + 1);
}

/* Sets full[i] to the number of lines of x that are exchanged with rank i. The number is counts[i], or the same for
 * all ranks if `counts` is NULL. Checks that the sum of these numbers is the number of lines of x. */
static te_result te__want_lines(const char *name, const te_tensor *x, const char *counts_name, const int64_t *counts,
                                int size, int64_t *full) {
    const char *what = te__collective_name(TE__ALL_TO_ALL);
    char text[TE__SHAPE_TEXT];
    int64_t sum = 0, lines = x->ndim ? x->shape[0] : 0;
    int i;
    te__shape_text(x, text);
    if (x->ndim == 0 || (x->ndim == 1 && te_dtype_bits(x->dtype) < 8))
        return te__fail(x->te, TE_ERR_SHAPE,
                        "%s: %s is %s %s; lines along the first dimension are exchanged, each of whole bytes: view it "
                        "as [lines, n]",
                        what, name, te_dtype_name(x->dtype), text);
    if (!counts && lines % size != 0)
        return te__fail(x->te, TE_ERR_SHAPE,
                        "%s: %s is %s; without %s its first size must be a multiple of the %d ranks", what, name, text,
                        counts_name, size);
    for (i = 0; i < size; i++) {
        full[i] = counts ? counts[i] : lines / size;
        if (full[i] < 0 || full[i] > lines - sum) break;
        sum += full[i];
    }
    if (i < size)
        return te__fail(x->te, TE_ERR_SHAPE,
                        "%s: %s[%d] is %lld, after a sum of %lld before it; %s is %s, so %lld line%s are left", what,
                        counts_name, i, (long long)full[i], (long long)sum, name, text, (long long)(lines - sum),
                        lines - sum == 1 ? "" : "s");
    if (sum == lines) return TE_OK;
    return te__fail(x->te, TE_ERR_SHAPE,
                    "%s: the sum of %s is %lld and %s is %s; the counts must add up to its first size, %lld", what,
                    counts_name, (long long)sum, name, text, (long long)lines);
}

/* Checks that x and out have one dtype, have lines (te__line_numel) of one size, and share no memory. */
static te_result te__want_exchange(const te_tensor *x, const te_tensor *out) {
    const char *what = te__collective_name(TE__ALL_TO_ALL);
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    bool lines = x->ndim == out->ndim;
    int i;
    for (i = 1; i < x->ndim && lines; i++) lines = x->shape[i] == out->shape[i];
    if (x->dtype != out->dtype)
        return te__fail(x->te, TE_ERR_DTYPE, "%s: x is %s and out is %s; they must be of one format", what,
                        te_dtype_name(x->dtype), te_dtype_name(out->dtype));
    if (!lines)
        return te__fail(x->te, TE_ERR_SHAPE, "%s: x is %s and out is %s; they may differ in the first size alone", what,
                        te__shape_text(x, a), te__shape_text(out, b));
    if (x->buffer == out->buffer && x->offset < te__end(out) && out->offset < te__end(x))
        return te__fail(x->te, TE_ERR_INVALID, "%s: x %s and out %s share memory; out must be a tensor of its own",
                        what, te__shape_text(x, a), te__shape_text(out, b));
    return TE_OK;
}

static te_result te__all_to_all(te_group *group, const te_tensor *x, const int64_t *send_counts, te_tensor *out,
                                const int64_t *recv_counts, int64_t *full) {
    int size = te_group_size(group);
    te__group_call c = TE_ZERO;
    te_result r = te__want_lines("x", x, "send_counts", send_counts, size, full);
    if (r == TE_OK) r = te__want_lines("out", out, "recv_counts", recv_counts, size, full + size);
    if (r == TE_OK && size == 1 && full[0] != full[1])
        r = te__fail(x->te, TE_ERR_SHAPE, "te_all_to_all: this rank is alone, sends %lld lines and receives %lld",
                     (long long)full[0], (long long)full[1]);
    if (r == TE_OK) r = te__group_captures(group, TE__ALL_TO_ALL, x, out);
    if (r != TE_OK) return te__refuse(group, TE__ALL_TO_ALL, r);
    if (te__is_alone(group)) return size == 1 ? te__copy_bytes(x, out) : TE_OK;
    c.kind = TE__ALL_TO_ALL;
    c.send = full;
    c.recv = full + size;
    r = te__group_call_one(group, &c, x, out);
    te__touch(out);
    return te__report_collective(
        group, TE__ALL_TO_ALL,
        te_tensor_bytes(x) - (uint64_t)full[group->is.rank] * (uint64_t)te__line_bytes(x), r);
}

TE_API te_result te_all_to_all(te_group *group, const te_tensor *x, const int64_t *send_counts, te_tensor *out,
                               const int64_t *recv_counts) {
    size_t bytes = 2 * (size_t)te_group_size(group) * sizeof(int64_t);
    te_result r = te__want_shared(group, TE__ALL_TO_ALL, "x", x);
    int64_t *full = NULL;
    if (r == TE_OK) r = te__want_shared(group, TE__ALL_TO_ALL, "out", out);
    if (r == TE_OK) r = te__want_exchange(x, out);
    if (r == TE_OK) r = te__group_has(group, "te_all_to_all", "all_to_all", group && group->is.all_to_all);
    if (r == TE_OK) full = (int64_t *)te__alloc(x->te, bytes);
    if (r == TE_OK && !full) r = TE_ERR_OUT_OF_MEMORY;
    if (r != TE_OK) return te__refuse(group, TE__ALL_TO_ALL, r);
    r = te__all_to_all(group, x, send_counts, out, recv_counts, full);
    te__free(x->te, full);
    return r;
}

/* ---- from one rank to another ---- */

static te_result te__want_peer(te_group *group, te__collective kind, const te_tensor *x, const char *name, int peer) {
    int rank = te_group_rank(group), size = te_group_size(group);
    te_result r = te__want_shared(group, kind, "x", x);
    if (r == TE_OK && (peer < 0 || peer >= size || peer == rank))
        r = te__fail(x->te, TE_ERR_INVALID, "%s: %s is %d; it names another rank than this one, %d of %d",
                     te__collective_name(kind), name, peer, rank, size);
    return r;
}

TE_API te_result te_send(te_group *group, const te_tensor *x, int to) {
    te_result r = te__want_peer(group, TE__SEND, x, "to", to);
    if (r == TE_OK) r = te__group_has(group, "te_send", "send", group->is.send != NULL);
    if (r == TE_OK) r = te__group_captures(group, TE__SEND, x, NULL);
    if (r != TE_OK) return te__refuse_peer(group, TE__SEND, to, r);
    return te__is_alone(group)
               ? TE_OK
               : te__report_collective(group, TE__SEND, te_tensor_bytes(x),
                                       te__group_call_kind(group, TE__SEND, x, NULL, to));
}

TE_API te_result te_recv(te_group *group, te_tensor *x, int from) {
    te_result r = te__want_peer(group, TE__RECV, x, "from", from);
    if (r == TE_OK) r = te__group_has(group, "te_recv", "recv", group->is.recv != NULL);
    if (r == TE_OK) r = te__group_captures(group, TE__RECV, NULL, x);
    if (r != TE_OK) return te__refuse_peer(group, TE__RECV, from, r);
    if (te__is_alone(group)) return TE_OK;
    r = te__group_call_kind(group, TE__RECV, NULL, x, from);
    te__touch(x);
    return te__report_collective(group, TE__RECV, 0, r);
}

/* te__pass by te_send and te_recv. A te_send may wait for its te_recv, so odd ranks receive first. */
static te_result te__pass_in_turns(te_group *group, te_tensor *const *out, int to, te_tensor *const *in, int from,
                                   int n, te_result result) {
    int turn, i;
    for (turn = 0; turn < 2; turn++)
        for (i = 0; i < n; i++) {
            if (turn == group->is.rank % 2) {
                if (result == TE_OK) result = te_send(group, out[i], to);
                else te__refuse_peer(group, TE__SEND, to, result);
            } else if (result == TE_OK)
                result = te_recv(group, in[i], from);
            else
                te__refuse_peer(group, TE__RECV, from, result);
        }
    return result;
}
static te_result te__pass_at_once(te_group *group, te_tensor *const *out, int to, te_tensor *const *in, int from,
                                  int n, te_result result) {
    te__group_call c = TE_ZERO;
    uint64_t bytes = 0;
    int i;
    for (i = 0; i < n && result == TE_OK; i++) {
        result = te__want_shared(group, TE__PASS, "x", out[i]);
        if (result == TE_OK) result = te__want_shared(group, TE__PASS, "x", in[i]);
        if (result == TE_OK) result = te__group_captures(group, TE__PASS, out[i], in[i]);
        if (result == TE_OK) bytes += (uint64_t)te_tensor_bytes(out[i]);
    }
    if (result != TE_OK) return te__refuse(group, TE__PASS, result);
    if (te__is_alone(group)) return TE_OK;
    c.kind = TE__PASS;
    c.x = out;
    c.out = in;
    c.peer = to;
    c.from = from;
    c.n = n;
    result = te__group_call_one(group, &c, NULL, NULL);
    for (i = 0; i < n; i++) te__touch(in[i]);
    result = te__report_collective(group, TE__PASS, bytes, result);
    if (result == TE_OK) { /* to the program these are calls of te_send and te_recv */
        group->count[TE__SEND].calls += (uint64_t)n;
        group->count[TE__SEND].bytes += bytes;
        group->count[TE__RECV].calls += (uint64_t)n;
    }
    return result;
}
/* Sends n tensors to rank `to` and receives as many from rank `from`. All ranks make the call. `result`: an error of
 * this rank from before, which it tells the others. */
static te_result te__pass(te_group *group, te_tensor *const *out, int to, te_tensor *const *in, int from, int n,
                          te_result result) {
    int i;
    for (i = 0; i < n && result == TE_OK; i++)
        if (!out[i] || !in[i]) result = te_error_code(group->te);
    return (group->pass ? te__pass_at_once : te__pass_in_turns)(group, out, to, in, from, n, result);
}

/* ---- comparing ---- */

/* Ranks that call different operations compute wrong numbers or wait forever. So the ranks compare texts about what
 * each will do next: in the first call of a module, or in every call if TE_DEBUG_SYNC=1 on all ranks.
 * A rank's message is a checksum of its text, then TE__COMPARED_TEXT bytes: the module path and the start of the
 * text. */
enum { TE__COMPARED_TEXT = 504, TE__COMPARED_BYTES = TE__COMPARED_TEXT + 8 };

/* Returns whether the ranks compare their texts now. `met`: they have compared before. Ranks do not compare in a
 * capture, because nothing is computed. */
static bool te__group_compares(const te_group *group, bool met) {
    return !te__is_alone(group) && !group->te->capture && (!met || group->te->debug_sync);
}

/* Gathers the messages of all ranks in host memory. A message is a checksum, then a text. */
static te_result te__group_texts(te_group *group, const unsigned char own[TE__COMPARED_BYTES], unsigned char *all) {
    te_ctx *te = group->te;
    int64_t bytes = TE__COMPARED_BYTES;
    te_tensor *x, *out;
    te_result result;
    te__frame_begin(te);
    /* An error of an earlier kernel must appear before the exchange, so that all ranks fail. If it appeared later, only
     * this rank would fail. */
    result = te->device->synchronize(te);
    x = result == TE_OK ? te_tensor_from_host(te, TE_U8, 1, &bytes, own) : NULL;
    bytes *= group->is.size;
    out = x ? te_tensor_empty(te, TE_U8, 1, &bytes) : NULL;
    result = out ? te_all_gather(group, x, out) : te__refuse(group, TE__ALL_GATHER, te_error_code(te));
    if (result == TE_OK) result = te_tensor_to_host(out, all);
    te__frame_end(te, NULL, 0);
    return result;
}

/* Checks that all ranks are about to do `what`; else fails with TE_ERR_STATE. A rank that gives "" agrees with all. If
 * one rank fails, here or already in `result`, all ranks fail: no rank may go on alone. */
static te_result te__group_compare(te_group *group, const char *what, te_result result) {
    te_ctx *te = group->te;
    unsigned char own[TE__COMPARED_BYTES], *all;
    const size_t bytes = (size_t)group->is.size * TE__COMPARED_BYTES;
    const uint64_t sum = what && what[0] ? te__hash64(what, strlen(what), 0) : 0;
    int r, first = 0; /* first: the rank that others are compared with */
    if (result != TE_OK) return te__refuse(group, TE__ALL_GATHER, result);
    all = (unsigned char *)te__alloc(te, bytes);
    if (!all) return te__refuse(group, TE__ALL_GATHER, TE_ERR_OUT_OF_MEMORY);
    memset(own, 0, sizeof(own));
    memcpy(own, &sum, 8);
    snprintf((char *)own + 8, TE__COMPARED_TEXT, "%s%s%s", te->module_path, te->module_path[0] ? ": " : "", what);
    result = te__group_texts(group, own, all);
    for (r = 1; r < group->is.size && result == TE_OK; r++) {
        unsigned char *one = all + (size_t)first * TE__COMPARED_BYTES, *other = all + (size_t)r * TE__COMPARED_BYTES;
        uint64_t sums[2];
        memcpy(&sums[0], one, 8);
        memcpy(&sums[1], other, 8);
        if (!sums[0]) first = r;
        if (!sums[0] || !sums[1] || sums[0] == sums[1]) continue;
        one[TE__COMPARED_BYTES - 1] = other[TE__COMPARED_BYTES - 1] = 0; /* the texts come from other ranks and may lack
                                                                          * a 0 */
        result = te__fail(te, TE_ERR_STATE,
                          "group \"%.40s\": its ranks are about to do different things. Rank %d: %s. Rank %d: %s. Give "
                          "all ranks the same modules, options and shapes, in the same order",
                          group->name, first, (const char *)one + 8, r, (const char *)other + 8);
    }
    te__free(te, all);
    return result;
}

/* ---- aborting ---- */

/* Sets an error only if the group has no abort function. Otherwise does not write to the context, because another
 * thread may be inside a collective of this group. */
TE_API te_result te_group_abort(te_group *group, const char *reason) {
    if (!group || group->is.size == 1) return TE_OK;
    if (te__is_forked(group->te)) return TE_ERR_STATE;
    if (group->is.abort) return group->is.abort(group->is.user, reason ? reason : "no reason was given");
    return te__group_has(group, "te_group_abort", "abort", false);
}

/* ---- splitting ---- */

/* Lists the ranks of `color` in the order of their new numbers: by key, and by rank where keys are equal. `pairs` has
 * color and key of each rank. Returns how many there are. */
static inline int te__split_order(const int64_t *pairs, int size, int color, int *order) {
    int count = 0, i, at;
    for (i = 0; i < size; i++) {
        if (pairs[2 * i] != color) continue;
        for (at = count++; at > 0 && pairs[2 * order[at - 1] + 1] > pairs[2 * i + 1]; at--) order[at] = order[at - 1];
        order[at] = i;
    }
    return count;
}

TE_API te_group *te_group_split(te_group *group, int color, int key) {
    te_ctx *te = group ? group->te : NULL;
    if (!group || te__refuse_fork(te) != TE_OK) return NULL;
    if (te->capture) {
        te__refuse_capture(te, "te_group_split", "split the group before te_graph_begin");
        return NULL;
    }
    if (group->split) return group->split(group, color, key);
    te__fail(
        te, TE_ERR_UNSUPPORTED,
        "te_group_split: group \"%s\" cannot be split; groups of threads (te_thread_group_create) and of processes "
        "(te_nccl_group_create) can",
        group->name);
    return NULL;
}

/* ---- for other folders (dist/none.c has these functions if TE_NO_DIST is defined) ---- */

static te_result te__all_reduce(te_group *group, te_tensor *x, te_reduce_op op) { return te_all_reduce(group, x, op); }
static te_result te__all_gather(te_group *group, const te_tensor *x, te_tensor *out) {
    return te_all_gather(group, x, out);
}
static te_result te__reduce_scatter(te_group *group, const te_tensor *x, te_tensor *out) {
    return te_reduce_scatter(group, x, out);
}
static te_result te__barrier(te_group *group) { return te_barrier(group); }
static te_result te__lines_exchanged(te_group *group, const te_tensor *x, const int64_t *send_counts, te_tensor *out,
                                     const int64_t *recv_counts) {
    return te_all_to_all(group, x, send_counts, out, recv_counts);
}
static te_result te__ranks_allowed(te_ctx *te, int ranks, const char *who, const char *what) {
    (void)te, (void)ranks, (void)who, (void)what;
    return TE_OK;
}
/* Checks that `group` (may be NULL) belongs to this context. The error message names the option `what` and the function
 * `who`. */
static te_result te__group_allowed(te_ctx *te, const te_group *group, const char *who, const char *what) {
    if (!group || group->te == te) return TE_OK;
    return te__fail(te, TE_ERR_INVALID,
                    "%s: %s is of another context (%s) than this (%s); each rank takes the group that it joined", who,
                    what, group->te->device_name, te->device_name);
}
