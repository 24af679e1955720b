/* base/sha256.c: SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), by which ranks prove that they know a secret. The
 * other hashes of te.h (base/hash.c) find damage and differences; nobody can rely on them against a stranger. */

enum { TE__SHA256_BYTES = 32, TE__SHA256_BLOCK = 64 };

typedef struct te__sha256 {
    uint32_t state[8];
    uint8_t block[TE__SHA256_BLOCK]; /* the input after the last whole block */
    uint64_t bytes;                  /* of the whole input */
} te__sha256;

static inline uint32_t te__rotate_right(uint32_t x, int bits) { return x >> bits | x << (32 - bits); }

static inline void te__sha256_block(te__sha256 *h, const uint8_t *p) {
    /* the first 32 bits of the fractional parts of the cube roots of the first 64 primes */
    static const uint32_t k[64] = {
        0x428a2f98u, 0x71374491u, 0xb5c0fbcfu, 0xe9b5dba5u, 0x3956c25bu, 0x59f111f1u, 0x923f82a4u, 0xab1c5ed5u,
        0xd807aa98u, 0x12835b01u, 0x243185beu, 0x550c7dc3u, 0x72be5d74u, 0x80deb1feu, 0x9bdc06a7u, 0xc19bf174u,
        0xe49b69c1u, 0xefbe4786u, 0x0fc19dc6u, 0x240ca1ccu, 0x2de92c6fu, 0x4a7484aau, 0x5cb0a9dcu, 0x76f988dau,
        0x983e5152u, 0xa831c66du, 0xb00327c8u, 0xbf597fc7u, 0xc6e00bf3u, 0xd5a79147u, 0x06ca6351u, 0x14292967u,
        0x27b70a85u, 0x2e1b2138u, 0x4d2c6dfcu, 0x53380d13u, 0x650a7354u, 0x766a0abbu, 0x81c2c92eu, 0x92722c85u,
        0xa2bfe8a1u, 0xa81a664bu, 0xc24b8b70u, 0xc76c51a3u, 0xd192e819u, 0xd6990624u, 0xf40e3585u, 0x106aa070u,
        0x19a4c116u, 0x1e376c08u, 0x2748774cu, 0x34b0bcb5u, 0x391c0cb3u, 0x4ed8aa4au, 0x5b9cca4fu, 0x682e6ff3u,
        0x748f82eeu, 0x78a5636fu, 0x84c87814u, 0x8cc70208u, 0x90befffau, 0xa4506cebu, 0xbef9a3f7u, 0xc67178f2u};
    uint32_t w[64], s[8];
    int i;
    for (i = 0; i < 16; i++)
        w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 | (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
    for (i = 16; i < 64; i++) {
        uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + (te__rotate_right(a, 7) ^ te__rotate_right(a, 18) ^ a >> 3) + w[i - 7] +
               (te__rotate_right(b, 17) ^ te__rotate_right(b, 19) ^ b >> 10);
    }
    memcpy(s, h->state, sizeof(s));
    for (i = 0; i < 64; i++) {
        uint32_t e = s[4], a = s[0];
        uint32_t one = s[7] + (te__rotate_right(e, 6) ^ te__rotate_right(e, 11) ^ te__rotate_right(e, 25)) +
                       ((e & s[5]) ^ (~e & s[6])) + k[i] + w[i];
        uint32_t two = (te__rotate_right(a, 2) ^ te__rotate_right(a, 13) ^ te__rotate_right(a, 22)) +
                       ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
        memmove(s + 1, s, 7 * sizeof(s[0]));
        s[0] = one + two;
        s[4] += one;
    }
    for (i = 0; i < 8; i++) h->state[i] += s[i];
}

static inline void te__sha256_init(te__sha256 *h) {
    /* the first 32 bits of the fractional parts of the square roots of the first 8 primes */
    static const uint32_t start[8] = {0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
                                      0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
    memset(h, 0, sizeof(*h));
    memcpy(h->state, start, sizeof(start));
}
static inline void te__sha256_update(te__sha256 *h, const void *data, size_t n) {
    const uint8_t *p = (const uint8_t *)data;
    while (n > 0) {
        size_t at = (size_t)(h->bytes % TE__SHA256_BLOCK), take = TE__SHA256_BLOCK - at;
        if (take > n) take = n;
        memcpy(h->block + at, p, take);
        h->bytes += take;
        p += take;
        n -= take;
        if (at + take == TE__SHA256_BLOCK) te__sha256_block(h, h->block);
    }
}
static inline void te__sha256_end(te__sha256 *h, uint8_t out[TE__SHA256_BYTES]) {
    const uint64_t bits = h->bytes * 8;
    uint8_t tail[TE__SHA256_BLOCK + 8] = {0x80};
    size_t at = (size_t)(h->bytes % TE__SHA256_BLOCK), zeros = (at < 56 ? 56 : 120) - at;
    int i;
    for (i = 0; i < 8; i++) tail[zeros + (size_t)i] = (uint8_t)(bits >> (56 - 8 * i));
    te__sha256_update(h, tail, zeros + 8);
    for (i = 0; i < TE__SHA256_BYTES; i++) out[i] = (uint8_t)(h->state[i / 4] >> (24 - 8 * (i % 4)));
}

/* ---- HMAC ---- */

typedef struct te__hmac {
    te__sha256 inner, outer;
} te__hmac;

static inline void te__hmac_init(te__hmac *m, const void *key, size_t n) {
    uint8_t pad[TE__SHA256_BLOCK] = {0};
    int i;
    te__sha256_init(&m->inner);
    te__sha256_init(&m->outer);
    if (n > TE__SHA256_BLOCK) {
        te__sha256 h;
        te__sha256_init(&h);
        te__sha256_update(&h, key, n);
        te__sha256_end(&h, pad);
    } else if (n) {
        memcpy(pad, key, n);
    }
    for (i = 0; i < TE__SHA256_BLOCK; i++) pad[i] ^= 0x36;
    te__sha256_update(&m->inner, pad, sizeof(pad));
    for (i = 0; i < TE__SHA256_BLOCK; i++) pad[i] ^= 0x36 ^ 0x5c;
    te__sha256_update(&m->outer, pad, sizeof(pad));
}
static inline void te__hmac_update(te__hmac *m, const void *data, size_t n) { te__sha256_update(&m->inner, data, n); }
static inline void te__hmac_end(te__hmac *m, uint8_t out[TE__SHA256_BYTES]) {
    te__sha256_end(&m->inner, out);
    te__sha256_update(&m->outer, out, TE__SHA256_BYTES);
    te__sha256_end(&m->outer, out);
}
/* Compares two codes in a time that does not depend on where they differ. */
static inline bool te__hmac_equal(const uint8_t *a, const uint8_t *b) {
    int i, differ = 0;
    for (i = 0; i < TE__SHA256_BYTES; i++) differ |= a[i] ^ b[i];
    return differ == 0;
}
