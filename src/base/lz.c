/* base/lz.c: unpacks the data that is embedded in te.h: packed by LZ77, then written as printable text (base 85). This
 * file must not depend on the meaning of the bytes, nor on tools/lz_pack.h, which packs them. On damaged input the
 * functions return 0 and write nothing outside the output.
 *
 * A packed block:
 *
 *     size        varint           number of unpacked bytes, at least 1
 *     crc         4 bytes, LE      CRC-32 of the unpacked bytes
 *     sequences until `size` bytes have come out; the last one may end after its literals:
 *         token      1 byte        upper half: number of literals; lower half: match length - 4. If a half is 15, a
 *                                  varint follows, which is added to it
 *         [varint]                 added to the number of literals
 *         [varint]                 added to the match length
 *         literals                 copied as they are
 *         distance   varint        how far back the match begins, without a limit; 0: the previous distance again
 *
 * A varint has 7 bits in each byte, lowest first. All of its bytes but the last have the top bit set. Unlike in LZ4,
 * distances have no limit: similar kernels may lie megabytes apart. */

enum { TE__LZ_MIN_MATCH = 4 };

/* Reads a varint at *p and moves *p behind it. Returns false if the varint passes `end` or exceeds 63 bits. */
static inline bool te__varint(const uint8_t **p, const uint8_t *end, uint64_t *value) {
    uint64_t v = 0;
    for (int shift = 0; shift < 63; shift += 7) {
        if (*p == end) return false;
        uint8_t byte = *(*p)++;
        v |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) {
            *value = v;
            return true;
        }
    }
    return false;
}

/* Reads the unpacked size from the header of src and returns it. Returns 0 if src is not a packed block. */
static inline uint64_t te__lz_size(const uint8_t *src, size_t n) {
    uint64_t size = 0;
    const uint8_t *p = src;
    if (!te__varint(&p, src + n, &size)) return 0;
    return size;
}

/* Unpacks src (n bytes) into dst (cap bytes). Returns the bytes written, or 0 if src is damaged or dst is too small. */
static inline size_t te__lz_unpack(const uint8_t *src, size_t n, uint8_t *dst, size_t cap) {
    const uint8_t *p = src, *end = src + n;
    uint64_t size = 0, distance = 0;
    if (!te__varint(&p, end, &size) || size == 0 || size > cap || end - p < 4) return 0;
    uint32_t crc = te__read_le32(p);
    p += 4;
    uint8_t *out = dst, *out_end = dst + (size_t)size;
    while (out < out_end) {
        if (p == end) return 0;
        uint8_t token = *p++;
        uint64_t literals = token >> 4, match = token & 15, more = 0;
        if (literals == 15) {
            if (!te__varint(&p, end, &more)) return 0;
            literals += more;
        }
        if (match == 15) {
            if (!te__varint(&p, end, &more)) return 0;
            match += more;
        }
        match += TE__LZ_MIN_MATCH;
        if (literals > (uint64_t)(end - p) || literals > (uint64_t)(out_end - out)) return 0;
        memcpy(out, p, (size_t)literals);
        out += literals;
        p += literals;
        if (out == out_end) break;
        if (!te__varint(&p, end, &more)) return 0;
        if (more) distance = more;
        if (distance == 0 || distance > (uint64_t)(out - dst) || match > (uint64_t)(out_end - out)) return 0;
        const uint8_t *from = out - distance;
        for (; match; match--) *out++ = *from++; /* byte by byte, since a match may overlap the bytes that it writes, as
                                                  * in a run of equal bytes */
    }
    if (p != end || te__crc32(dst, (size_t)size) != crc) return 0;
    return (size_t)size;
}

/* ---- base 85: five characters stand for four bytes, the most significant first; the last k < 4 bytes take k + 1
 * characters ---- */

/* The 85 digits need no escape in a C string. There is no question mark, because of trigraphs. */
static const char te__base85_alphabet[] =
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+,-./:;<=>@[]^_";

/* Decodes the concatenation of `count` strings. Returns the bytes written to dst, or 0 if the text is damaged or dst is
 * too small. */
static inline size_t te__unbase85(const char *const *lines, int count, uint8_t *dst, size_t cap) {
    uint8_t value[256];
    memset(value, 0xff, sizeof value);
    for (int i = 0; i < 85; i++) value[(uint8_t)te__base85_alphabet[i]] = (uint8_t)i;
    size_t written = 0;
    uint64_t group = 0;
    int held = 0; /* characters in group */
    for (int l = 0; l < count; l++) {
        for (const char *s = lines[l]; *s; s++) {
            uint8_t v = value[(uint8_t)*s];
            if (v == 0xff) return 0;
            group = group * 85 + v;
            if (++held < 5) continue;
            if (group > 0xffffffffu || cap - written < 4) return 0;
            for (int i = 0; i < 4; i++) dst[written++] = (uint8_t)(group >> (24 - 8 * i));
            group = 0, held = 0;
        }
    }
    if (held == 0) return written;
    size_t bytes = (size_t)held - 1;
    for (int i = held; i < 5; i++) group = group * 85 + 84;
    if (bytes == 0 || group > 0xffffffffu || cap - written < bytes) return 0;
    for (size_t i = 0; i < bytes; i++) dst[written++] = (uint8_t)(group >> (24 - 8 * i));
    return written;
}
