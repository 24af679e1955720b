/* base/hash.c: a fast 64-bit hash, a 128-bit digest in hex, and CRC-32, equal on every machine. They are not safe
 * against deliberate collisions. */

/* ---- XXH64: Y. Collet's public algorithm, in four lanes of multiply and rotate ---- */

#define TE__XX1 0x9E3779B185EBCA87ull
#define TE__XX2 0xC2B2AE3D27D4EB4Full
#define TE__XX3 0x165667B19E3779F9ull
#define TE__XX4 0x85EBCA77C2B2AE63ull
#define TE__XX5 0x27D4EB2F165667C5ull

static inline uint64_t te__rotate_left(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

/* Reads a little-endian number byte by byte, so that the machine's byte order does not matter. Compilers turn this into
 * one load. */
static inline uint32_t te__read_le32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}
static inline uint64_t te__read_le64(const uint8_t *p) {
    return te__read_le32(p) | (uint64_t)te__read_le32(p + 4) << 32;
}

static inline uint64_t te__xx_round(uint64_t lane, uint64_t word) {
    return te__rotate_left(lane + word * TE__XX2, 31) * TE__XX1;
}

static inline void te__xx_begin(uint64_t lane[4], uint64_t seed) {
    lane[0] = seed + TE__XX1 + TE__XX2;
    lane[1] = seed + TE__XX2;
    lane[2] = seed;
    lane[3] = seed - TE__XX1;
}

/* Mixes n bytes, a multiple of 32, into the four lanes. */
static inline void te__xx_stripes(uint64_t lane[4], const uint8_t *p, size_t n) {
    for (; n; n -= 32, p += 32)
        for (int i = 0; i < 4; i++) lane[i] = te__xx_round(lane[i], te__read_le64(p + 8 * i));
}

/* Returns the hash of `total` bytes. The last n < 32 of them are at p; the lanes hold all bytes before them. */
static inline uint64_t te__xx_end(const uint64_t lane[4], uint64_t seed, uint64_t total, const uint8_t *p, size_t n) {
    uint64_t h = seed + TE__XX5;
    if (total >= 32) {
        h = te__rotate_left(lane[0], 1) + te__rotate_left(lane[1], 7) + te__rotate_left(lane[2], 12) +
            te__rotate_left(lane[3], 18);
        for (int i = 0; i < 4; i++) h = (h ^ te__xx_round(0, lane[i])) * TE__XX1 + TE__XX4;
    }
    h += total;
    for (; n >= 8; n -= 8, p += 8) h = te__rotate_left(h ^ te__xx_round(0, te__read_le64(p)), 27) * TE__XX1 + TE__XX4;
    for (; n >= 4; n -= 4, p += 4) h = te__rotate_left(h ^ te__read_le32(p) * TE__XX1, 23) * TE__XX2 + TE__XX3;
    for (; n; n--, p++) h = te__rotate_left(h ^ *p * TE__XX5, 11) * TE__XX1;
    h = (h ^ h >> 33) * TE__XX2;
    h = (h ^ h >> 29) * TE__XX3;
    return h ^ h >> 32;
}

static inline uint64_t te__hash64(const void *data, size_t n, uint64_t seed) {
    const uint8_t *p = (const uint8_t *)data;
    size_t stripes = n / 32 * 32;
    uint64_t lane[4];
    te__xx_begin(lane, seed);
    te__xx_stripes(lane, p, stripes);
    return te__xx_end(lane, seed, n, stripes ? p + stripes : p, n - stripes);
}

/* ---- a digest of bytes that come in pieces: two XXH64 of different seeds ---- */

enum { TE__DIGEST_CHARS = 32 }; /* characters of a digest, without the NUL */

typedef struct te__hasher {
    uint64_t lane[2][4];
    uint64_t total;
    uint8_t tail[32]; /* the last total % 32 bytes, which do not fill a stripe of 32 bytes yet */
} te__hasher;

static const uint64_t te__digest_seed[2] = {0, 0x7465682E64696765ull};

static inline void te__hasher_init(te__hasher *h) {
    memset(h, 0, sizeof *h);
    for (int k = 0; k < 2; k++) te__xx_begin(h->lane[k], te__digest_seed[k]);
}

static inline void te__hasher_update(te__hasher *h, const void *data, size_t n) {
    const uint8_t *p = (const uint8_t *)data;
    size_t held = (size_t)(h->total % 32);
    if (n == 0) return;
    h->total += n;
    if (held + n < 32) {
        memcpy(h->tail + held, p, n);
        return;
    }
    if (held) {
        memcpy(h->tail + held, p, 32 - held);
        for (int k = 0; k < 2; k++) te__xx_stripes(h->lane[k], h->tail, 32);
        p += 32 - held;
        n -= 32 - held;
    }
    size_t stripes = n / 32 * 32;
    for (int k = 0; k < 2; k++) te__xx_stripes(h->lane[k], p, stripes);
    memcpy(h->tail, p + stripes, n - stripes);
}

/* Adds a string and its NUL, so that "ab","c" and "a","bc" differ. */
static inline void te__hasher_string(te__hasher *h, const char *text) { te__hasher_update(h, text, strlen(text) + 1); }

/* Writes the digest of all bytes added so far. More bytes may be added afterwards. */
static inline void te__hasher_hex(const te__hasher *h, char hex[TE__DIGEST_CHARS + 1]) {
    for (int k = 0; k < 2; k++) {
        uint64_t x = te__xx_end(h->lane[k], te__digest_seed[k], h->total, h->tail, (size_t)(h->total % 32));
        for (int i = 0; i < 16; i++) hex[16 * k + i] = "0123456789abcdef"[x >> (60 - 4 * i) & 15];
    }
    hex[TE__DIGEST_CHARS] = 0;
}

static inline void te__digest(const void *data, size_t n, char hex[TE__DIGEST_CHARS + 1]) {
    te__hasher h;
    te__hasher_init(&h);
    te__hasher_update(&h, data, n);
    te__hasher_hex(&h, hex);
}

/* ---- CRC-32 (IEEE 802.3, as in zip and PNG), computed half a byte at a time, with a table of 16 numbers ---- */

static inline uint32_t te__crc32(const void *data, size_t n) {
    static const uint32_t table[16] = {0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4,
                                       0x4db26158, 0x5005713c, 0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
                                       0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
    const uint8_t *p = (const uint8_t *)data;
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < n; i++) {
        crc ^= p[i];
        crc = crc >> 4 ^ table[crc & 15];
        crc = crc >> 4 ^ table[crc & 15];
    }
    return ~crc;
}
