/* tools/lz_pack.h: the packing half of base/lz.c (LZ77 and base 85), for the tools that make te.h. Include it behind
 * base/common.h, base/hash.c and base/lz.c. It may take its time: what it packs is packed once and unpacked on every machine. */
#ifndef TE_LZ_PACK_H
#define TE_LZ_PACK_H

/* Bytes that te__lz_pack writes at most. */
static inline size_t te__lz_pack_bound(size_t n) { return n + n / 128 + 64; }

static inline uint8_t *te__lz_put_varint(uint8_t *out, uint64_t v) {
    for (; v >= 0x80; v >>= 7) *out++ = (uint8_t)(v | 0x80);
    *out++ = (uint8_t)v;
    return out;
}
static inline int te__lz_varint_bytes(uint64_t v) {
    int n = 1;
    for (; v >= 0x80; v >>= 7) n++;
    return n;
}
/* Bytes that a count spends behind the token. */
static inline int te__lz_count_bytes(uint64_t v) { return v < 15 ? 0 : te__lz_varint_bytes(v - 15); }

static inline size_t te__lz_match_length(const uint8_t *a, const uint8_t *b, const uint8_t *end) {
    const uint8_t *start = b;
    while (b < end && *a == *b) a++, b++;
    return (size_t)(b - start);
}

/* The cheapest way that reaches a position: what the last step was, and what is behind it. */
typedef struct te__lz_node {
    uint32_t cost;       /* bytes so far */
    uint32_t literals;   /* that wait for their token at this position */
    uint32_t length;     /* of the match that ended here; 0: a literal */
    uint32_t distance;   /* of that match */
    uint32_t last;       /* the distance that a repeat would mean here */
} te__lz_node;

static inline void te__lz_relax(te__lz_node *to, const te__lz_node *from, uint32_t length, uint32_t distance) {
    uint32_t cost = from->cost;
    cost += distance == from->last ? 1u : (uint32_t)te__lz_varint_bytes(distance);
    cost += 1u + (uint32_t)te__lz_count_bytes(length - TE__LZ_MIN_MATCH);
    if (cost >= to->cost) return;
    to->cost = cost;
    to->literals = 0;
    to->length = length;
    to->distance = distance;
    to->last = distance;
}

static inline uint8_t *te__lz_put_sequence(uint8_t *out, const uint8_t *literals, size_t n, size_t length, uint64_t distance) {
    size_t match = length ? length - TE__LZ_MIN_MATCH : 0;
    *out++ = (uint8_t)((n < 15 ? n : 15) << 4 | (match < 15 ? match : 15));
    if (n >= 15) out = te__lz_put_varint(out, n - 15);
    if (match >= 15) out = te__lz_put_varint(out, match - 15);
    memcpy(out, literals, n);
    out += n;
    if (length) out = te__lz_put_varint(out, distance);
    return out;
}

/* Packs n bytes (at least 1, less than 2^31) into dst, which holds te__lz_pack_bound(n). Returns the packed size, or 0 when
 * memory ran out. Equal input gives equal output on every machine.
 *
 * Shortest path over the positions: from each one, a literal or a match of any length up to the longest at each distance that the
 * hash chain and the repeat offer. A long match is taken whole without looking further into it. */
static inline size_t te__lz_pack(const uint8_t *src, size_t n, uint8_t *dst) {
    enum { HASH_BITS = 17, CHAIN = 256, LONG_ENOUGH = 512 };
    int32_t *head = (int32_t *)malloc(sizeof(int32_t) << HASH_BITS);
    int32_t *previous = (int32_t *)malloc(sizeof(int32_t) * n);
    te__lz_node *node = (te__lz_node *)malloc(sizeof(te__lz_node) * (n + 1));
    uint8_t *out = NULL;
    if (n > 0 && n < 0x7fffffffu && head && previous && node) {
        memset(head, 0xff, sizeof(int32_t) << HASH_BITS);
        for (size_t i = 0; i <= n; i++) node[i].cost = UINT32_MAX;
        memset(&node[0], 0, sizeof node[0]);
        size_t skip_until = 0; /* inside a match that is taken whole */
        for (size_t i = 0; i < n; i++) {
            const uint8_t *here = src + i, *end = src + n;
            const te__lz_node *from = &node[i];
            te__lz_node *next = &node[i + 1];
            uint32_t literal = from->cost + 1u + (uint32_t)(te__lz_count_bytes(from->literals + 1u) - te__lz_count_bytes(from->literals));
            if (literal < next->cost) {
                next->cost = literal;
                next->literals = from->literals + 1;
                next->length = 0;
                next->distance = 0;
                next->last = from->last;
            }
            if (n - i < TE__LZ_MIN_MATCH) continue;
            uint32_t h = te__read_le32(here) * 2654435761u >> (32 - HASH_BITS);
            int32_t at = head[h];
            previous[i] = at;
            head[h] = (int32_t)i;
            if (i < skip_until) continue;
            size_t best = TE__LZ_MIN_MATCH - 1;
            if (from->last) {
                size_t length = te__lz_match_length(here - from->last, here, end);
                if (length > best) {
                    for (size_t k = TE__LZ_MIN_MATCH; k <= length; k++) te__lz_relax(&node[i + k], from, (uint32_t)k, from->last);
                    if (length >= LONG_ENOUGH) skip_until = i + length;
                }
            }
            for (int tries = CHAIN; at >= 0 && tries; tries--, at = previous[at]) {
                const uint8_t *there = src + at;
                if (here + best < end && there[best] != here[best]) continue;
                size_t length = te__lz_match_length(there, here, end);
                if (length <= best) continue;
                uint32_t distance = (uint32_t)(i - (size_t)at);
                for (size_t k = best + 1; k <= length; k++) te__lz_relax(&node[i + k], from, (uint32_t)k, distance);
                best = length;
                if (here + best == end) break;
            }
            if (best >= LONG_ENOUGH && i + best > skip_until) skip_until = i + best;
        }
        /* The path was found backwards; `last` is free now and takes the way forward. */
        uint32_t after = (uint32_t)n;
        for (size_t i = n; i > 0;) {
            size_t step = node[i].length ? node[i].length : 1;
            node[i].last = after;
            after = (uint32_t)i;
            i -= step;
        }
        node[0].last = after;
        out = te__lz_put_varint(dst, n);
        uint32_t crc = te__crc32(src, n);
        for (int i = 0; i < 4; i++) *out++ = (uint8_t)(crc >> 8 * i);
        size_t literals_at = 0;
        uint64_t last = 0;
        for (size_t i = 0; i < n;) {
            size_t to = node[i].last, length = node[to].length;
            if (length) {
                uint64_t distance = node[to].distance;
                out = te__lz_put_sequence(out, src + literals_at, i - literals_at, length, distance == last ? 0 : distance);
                last = distance;
                literals_at = to;
            }
            i = to;
        }
        if (literals_at < n) out = te__lz_put_sequence(out, src + literals_at, n - literals_at, 0, 0);
    }
    free(head);
    free(previous);
    free(node);
    return out ? (size_t)(out - dst) : 0;
}

/* Characters of n bytes in base 85. */
static inline size_t te__base85_size(size_t n) { return n / 4 * 5 + (n % 4 ? n % 4 + 1 : 0); }

/* Writes te__base85_size(n) characters and a NUL. */
static inline void te__base85(const uint8_t *src, size_t n, char *out) {
    for (size_t i = 0; i < n; i += 4) {
        size_t bytes = n - i < 4 ? n - i : 4;
        uint32_t group = 0;
        for (size_t k = 0; k < 4; k++) group = group << 8 | (k < bytes ? src[i + k] : 0u);
        char five[5];
        for (int k = 4; k >= 0; k--, group /= 85) five[k] = te__base85_alphabet[group % 85];
        memcpy(out, five, bytes + 1);
        out += bytes + 1;
    }
    *out = 0;
}

#endif
