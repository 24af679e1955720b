/* attn_keep.h: which elements of the softmax dropout keeps, by the description in te_op_attn_fwd_args, for the tests of attention. Shares no code with te.h. */

/* Philox4x32 in seven rounds (Salmon, Moraes, Dror, Shaw, 2011). */
static void attn_philox7(uint64_t seed, uint64_t offset, uint64_t block, uint32_t x[4]) {
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    x[0] = (uint32_t)block, x[1] = (uint32_t)(block >> 32), x[2] = (uint32_t)offset, x[3] = (uint32_t)(offset >> 32);
    for (int round = 0; round < 7; round++) {
        uint64_t even = 0xD2511F53ull * x[0], odd = 0xCD9E8D57ull * x[2];
        x[0] = (uint32_t)(odd >> 32) ^ x[1] ^ key[0];
        x[2] = (uint32_t)(even >> 32) ^ x[3] ^ key[1];
        x[1] = (uint32_t)odd, x[3] = (uint32_t)even;
        key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
    }
}
/* p as it is used. */
static double attn_used_p(float p) {
    const double steps = p < 1.0 / 64 ? 65536 : 4096, units = floor((double)p * steps + 0.5);
    return p >= 1 ? 1 : (units > steps - 1 ? steps - 1 : units) / steps;
}
/* [rows, keys], from a row (b*H + h)*s_q + i on: what an element of P is multiplied by. */
static float *attn_keep_from(float p, uint64_t seed, uint64_t offset, int64_t first, int64_t rows, int64_t keys) {
    float *keep = (float *)test_alloc((size_t)(rows * keys) * 4 + 4);
    const double used = attn_used_p(p);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < keys; j++) {
            static uint32_t words[16]; /* word n: bit n of the numbers of 32 keys */
            uint64_t w = (uint64_t)((first + i) * ((keys + 31) / 32) + j / 32);
            uint32_t number = 0;
            for (int n = 0; j % 32 == 0 && n < 4; n++) attn_philox7(seed, offset, 4 * w + (uint64_t)n, words + 4 * n);
            for (int n = 0; n < 16; n++) number |= (words[n] >> (j % 32) & 1u) << n;
            keep[i * keys + j] = number >= used * 65536 ? (float)(1 / (1 - used)) : 0;
        }
    return keep;
}
static float *attn_keep(float p, uint64_t seed, uint64_t offset, int64_t rows, int64_t keys) { return attn_keep_from(p, seed, offset, 0, rows, keys); }
