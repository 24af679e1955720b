/* model/block_mask.c: block masks, and the cache of masks of a context. This file must not depend on modules. */

/* ---- the state of a context ---- */

/* An entry of the mask cache. It has a mask and the key that the mask was made from. Attention modules share the
 * cache. */
enum { TE__BLOCK_MASKS = 64, TE__ELEMENT_MASKS = 4 };
typedef struct te__kept_mask {
    int64_t key[5];
    uint8_t *content; /* padding as a further part of the key; NULL: none */
    size_t bytes;     /* size of `content` */
    uint64_t age;     /* number of the insertion; the smallest is the oldest */
    te_tensor *mask;  /* retained; NULL: the entry is free */
} te__kept_mask;
typedef struct te__mask_state {
    te__kept_mask block_masks[TE__BLOCK_MASKS];     /* block masks of backend flex */
    te__kept_mask element_masks[TE__ELEMENT_MASKS]; /* element masks of windows and padding */
    uint64_t mask_age;                              /* number of insertions so far */
    int mask_users;                                 /* number of attention modules; the last one drops all masks */
} te__mask_state;
static const te__slot te__masks_slot = {sizeof(te__mask_state)};
static te__mask_state *te__masks_of(const te_ctx *te) {
    return (te__mask_state *)te__slot_of(te, &te__masks_slot);
}

static void te__kept_mask_drop(te_ctx *te, te__kept_mask *m) {
    te__free(te, m->content);
    te_tensor_release(m->mask);
    memset(m, 0, sizeof(*m));
}

static void te__masks_drop(te_ctx *te) {
    te__mask_state *s = te__masks_of(te);
    int i;
    for (i = 0; i < TE__BLOCK_MASKS; i++) te__kept_mask_drop(te, &s->block_masks[i]);
    for (i = 0; i < TE__ELEMENT_MASKS; i++) te__kept_mask_drop(te, &s->element_masks[i]);
}
static const te__room te__mask_room = TE__ROOM(&te__masks_slot, NULL, te__masks_drop);

/* ---- block masks ---- */

/* Returns whether the block of queries first_q .. last_q and keys first_kv .. last_kv is empty, partial or full. Query
 * i sees key j if i + lo <= j <= i + hi. If d->mask_fn is given, it must also return true for i and j. */
static te_attn_block te__block_of(const te_block_mask_desc *d, int lo, int hi, int64_t b, int64_t h, int64_t first_q,
                                  int64_t last_q, int64_t first_kv, int64_t last_kv) {
    bool some = false, all = true;
    int64_t i, j;
    if (last_kv < first_q + lo || first_kv > last_q + hi) return TE_ATTN_BLOCK_EMPTY;
    if (!d->mask_fn)
        return first_kv >= last_q + lo && last_kv <= first_q + hi ? TE_ATTN_BLOCK_FULL : TE_ATTN_BLOCK_PARTIAL;
    for (i = first_q; i <= last_q; i++)
        for (j = first_kv; j <= last_kv && (all || !some); j++) {
            const bool seen = j >= i + lo && j <= i + hi && d->mask_fn(d->user, b, h, i, j);
            some = some || seen;
            all = all && seen;
        }
    return !some ? TE_ATTN_BLOCK_EMPTY : all ? TE_ATTN_BLOCK_FULL : TE_ATTN_BLOCK_PARTIAL;
}

TE_API te_tensor *te_create_block_mask(te_ctx *te, const te_block_mask_desc *desc) {
    const int64_t most = 1 << 28, size = TE_ATTN_BLOCK_SIZE;
    te_block_mask_desc d;
    te_tensor *mask;
    int64_t at = 0, b, h, i, j, beyond;
    uint8_t *blocks;
    size_t bytes;
    int lo, hi;
    if (!te || !te__has_desc(te, desc, "te_create_block_mask")) return NULL;
    d = *desc;
    if (!d.batch) d.batch = 1;
    if (!d.heads) d.heads = 1;
    if (!d.mask) d.mask = TE_MASK_CAUSAL;
    if (!d.window.on) d.window.left = d.window.right = -1;
    if (d.batch < 1 || d.heads < 1 || d.s_q < 0 || d.s_kv < 0 || d.s_q > most || d.s_kv > most || d.batch > most ||
        d.heads > most)
        return te__no_tensor(
            te, TE_ERR_INVALID,
            "te_create_block_mask: batch %lld, heads %lld, s_q %lld, s_kv %lld; numbers up to 2^28 are possible, "
            "none negative",
            (long long)d.batch, (long long)d.heads, (long long)d.s_q, (long long)d.s_kv);
    if ((int)d.mask < (int)TE_MASK_NONE || d.mask > TE_MASK_CAUSAL_BOTTOM_RIGHT || d.window.left < -1 ||
        d.window.right < -1)
        return te__no_tensor(
            te, TE_ERR_INVALID,
            "te_create_block_mask: mask %d, window (%lld, %lld); TE_MASK_NONE (%d) to TE_MASK_CAUSAL_BOTTOM_RIGHT "
            "(%d), and numbers of keys or -1, are possible",
            (int)d.mask, (long long)d.window.left, (long long)d.window.right, (int)TE_MASK_NONE,
            (int)TE_MASK_CAUSAL_BOTTOM_RIGHT);
    int64_t shape[4] = {d.batch, d.heads, te__div_up(d.s_q, size), te__div_up(d.s_kv, size)};
    if (shape[2] && shape[3] && d.batch > INT_MAX / d.heads / shape[2] / shape[3])
        return te__no_tensor(
            te, TE_ERR_UNSUPPORTED,
            "te_create_block_mask: batch %lld, heads %lld, s_q %lld and s_kv %lld are more than 2^31 - 1 blocks; "
            "make one that is alike for all heads (heads 1)",
            (long long)d.batch, (long long)d.heads, (long long)d.s_q, (long long)d.s_kv);
    beyond = d.s_q + d.s_kv + 1;
    te__attn_diagonals((int)te__min(d.window.left, beyond), (int)te__min(d.window.right, beyond),
                       d.mask != TE_MASK_NONE, d.mask == TE_MASK_CAUSAL_BOTTOM_RIGHT ? (int)(d.s_kv - d.s_q) : 0,
                       (int)d.s_q, (int)d.s_kv, &lo, &hi);
    bytes = (size_t)(shape[0] * shape[1] * shape[2] * shape[3]) + 1;
    blocks = (uint8_t *)te__alloc(te, bytes);
    if (!blocks) return NULL;
    for (b = 0; b < d.batch && bytes > 1; b++) /* bytes > 1: there is at least one block */
        for (h = 0; h < d.heads; h++)
            for (i = 0; i < d.s_q; i += size)
                for (j = 0; j < d.s_kv; j += size)
                    blocks[at++] = (uint8_t)te__block_of(&d, lo, hi, b, h, i, te__min(i + size, d.s_q) - 1, j,
                                                         te__min(j + size, d.s_kv) - 1);
    mask = te_tensor_from_host(te, TE_U8, 4, shape, blocks);
    te__free(te, blocks);
    return mask;
}

/* ---- the mask cache of a context ---- */

/* Searches a list of n entries for a mask with this key and content. Returns NULL if there is none. */
static te_tensor *te__mask_kept(const te__kept_mask *list, int n, const int64_t *key, const uint8_t *content,
                                size_t bytes) {
    int i;
    for (i = 0; i < n; i++)
        if (list[i].mask && memcmp(list[i].key, key, sizeof(list[i].key)) == 0 && list[i].bytes == bytes &&
            (!bytes || memcmp(list[i].content, content, bytes) == 0))
            return list[i].mask;
    return NULL;
}
/* Puts a mask into the cache in place of the oldest entry. Copies `content` and retains the mask. Returns the mask, or
 * NULL on failure. */
static te_tensor *te__mask_keep(te_ctx *te, te__kept_mask *list, int n, const int64_t *key, const uint8_t *content,
                                size_t bytes, te_tensor *mask) {
    uint8_t *copy = mask && bytes ? (uint8_t *)te__alloc(te, bytes) : NULL;
    int i, at = 0;
    if (!mask || (bytes && !copy)) return NULL;
    if (copy) memcpy(copy, content, bytes);
    for (i = 1; i < n; i++)
        if (list[i].age < list[at].age) at = i; /* unused entries have age 0 */
    te__kept_mask_drop(te, &list[at]);
    memcpy(list[at].key, key, sizeof(list[at].key));
    list[at].content = copy;
    list[at].bytes = bytes;
    list[at].age = ++te__masks_of(te)->mask_age;
    list[at].mask = te_tensor_retain(mask);
    return mask;
}

TE_API te_tensor *te_flex_block_mask(te_ctx *te, int64_t window_keys, int64_t b, int64_t heads, int64_t s_q,
                                     int64_t s_kv) {
    te_block_mask_desc d = TE_ZERO;
    te_tensor *mask;
    if (!te) return NULL;
    int64_t key[5] = {window_keys, b, heads, s_q, s_kv};
    mask = te__mask_kept(te__masks_of(te)->block_masks, TE__BLOCK_MASKS, key, NULL, 0);
    if (mask) return mask;
    if (window_keys < -1 || window_keys == 0)
        return te__no_tensor(
            te, TE_ERR_INVALID,
            "te_flex_block_mask: window_keys is %lld; a query sees its own key: numbers from 1 on, or -1 for all "
            "before it, are possible",
            (long long)window_keys);
    d.s_q = s_q;
    d.s_kv = s_kv;
    d.window.on = window_keys > 0;
    d.window.left = window_keys - 1;
    te__frame_begin(te);
    mask =
        te__mask_keep(te, te__masks_of(te)->block_masks, TE__BLOCK_MASKS, key, NULL, 0, te_create_block_mask(te, &d));
    te__frame_end(te, NULL, 0);
    return mask;
}
TE_API int te_flex_block_mask_count(const te_ctx *te) {
    int i, n = 0;
    for (i = 0; te && i < TE__BLOCK_MASKS; i++) n += te__masks_of(te)->block_masks[i].mask != NULL;
    return n;
}

/* Returns an element mask u8 [b or 1, 1, s_q, s_kv], 1 for a masked key. The context's cache owns the mask.
 * Query i sees `keys` keys, the last of which is key i + offset. If `keys` is -1, query i sees all keys up to that key.
 * `tokens` is NULL, or u8 [b, s_kv] on the host with 1 for a token and 0 for padding. Padding is masked too. */
static te_tensor *te__element_mask(te_ctx *te, int64_t b, int64_t s_q, int64_t s_kv, int64_t keys, int64_t offset,
                                   const uint8_t *tokens) {
    int64_t key[5], shape[4], i, j, s;
    uint8_t *masked;
    size_t bytes;
    te_tensor *mask;
    shape[0] = key[1] = tokens ? b : 1;
    shape[1] = 1;
    shape[2] = key[2] = s_q;
    shape[3] = key[3] = s_kv;
    key[0] = keys;
    key[4] = offset;
    mask =
        te__mask_kept(te__masks_of(te)->element_masks, TE__ELEMENT_MASKS, key, tokens, tokens ? (size_t)(b * s_kv) : 0);
    if (mask) return mask;
    bytes = (size_t)(shape[0] * s_q * s_kv) + 1;
    masked = (uint8_t *)te__alloc(te, bytes);
    if (!masked) return NULL;
    for (s = 0; s < shape[0]; s++)
        for (i = 0; i < s_q; i++)
            for (j = 0; j < s_kv; j++)
                masked[(s * s_q + i) * s_kv + j] = (uint8_t)!(j <= i + offset && (keys < 0 || j > i + offset - keys) &&
                                                              (!tokens || tokens[s * s_kv + j]));
    te__frame_begin(te);
    mask = te__mask_keep(te, te__masks_of(te)->element_masks, TE__ELEMENT_MASKS, key, tokens,
                         tokens ? (size_t)(b * s_kv) : 0, te_tensor_from_host(te, TE_U8, 4, shape, masked));
    te__frame_end(te, NULL, 0);
    te__free(te, masked);
    return mask;
}
