/* tests/base/test_hash.c: published vectors, and pieces against the whole. */
#include "../te_test.h"
#include "base/common.h"
#include "base/hash.c"

TE_TEST(xxh64_vectors) {
    CHECK(te__hash64("", 0, 0) == 0xef46db3751d8e999ull);
    CHECK(te__hash64("a", 1, 0) == 0xd24ec4f1a98c6e5bull);
    CHECK(te__hash64("abc", 3, 0) == 0x44bc2cf5ad770999ull);
    CHECK(te__hash64("Nobody inspects the spammish repetition", 39, 0) == 0xfbcea83c8a378bf1ull);
    CHECK(te__hash64("", 0, 1) != te__hash64("", 0, 0));
}

TE_TEST(crc32_vectors) {
    CHECK_EQ_INT(te__crc32("123456789", 9), 0xcbf43926);
    CHECK_EQ_INT(te__crc32("The quick brown fox jumps over the lazy dog", 43), 0x414fa339);
    CHECK_EQ_INT(te__crc32("", 0), 0);
}

TE_TEST(hash_sees_every_bit_of_every_length) {
    uint8_t data[100];
    for (int i = 0; i < 100; i++) data[i] = (uint8_t)(i * 37);
    for (size_t n = 0; n < sizeof data; n++) {
        uint64_t h = te__hash64(data, n, 5);
        if (n) CHECK(h != te__hash64(data, n - 1, 5));
        for (size_t i = 0; i < n; i++) {
            data[i] ^= 16;
            CHECK_MSG(te__hash64(data, n, 5) != h, "byte %d of %d does not count", (int)i, (int)n);
            data[i] ^= 16;
        }
    }
}

TE_TEST(digest_in_pieces) {
    enum { SIZE = 300 };
    uint8_t *data = (uint8_t *)test_alloc(SIZE);
    for (int i = 0; i < SIZE; i++) data[i] = (uint8_t)(i * i);
    for (size_t n = 0; n <= SIZE; n += 13) {
        char whole[TE__DIGEST_CHARS + 1], pieces[TE__DIGEST_CHARS + 1], half[17];
        te__digest(data, n, whole);
        CHECK_EQ_INT(strlen(whole), TE__DIGEST_CHARS);
        snprintf(half, sizeof half, "%016" PRIx64, te__hash64(data, n, 0));
        CHECK_BYTES("first half", whole, half, 16);
        for (size_t step = 1; step < 80; step += 7) {
            te__hasher h;
            te__hasher_init(&h);
            for (size_t at = 0; at < n; at += step) te__hasher_update(&h, data + at, n - at < step ? n - at : step);
            te__hasher_hex(&h, pieces);
            CHECK_MSG(strcmp(whole, pieces) == 0, "%d bytes by %d: %s, not %s", (int)n, (int)step, pieces, whole);
        }
    }
}

TE_TEST(digest_of_strings_keeps_their_ends) {
    char one[TE__DIGEST_CHARS + 1], two[TE__DIGEST_CHARS + 1];
    te__hasher h;
    te__hasher_init(&h);
    te__hasher_string(&h, "ab");
    te__hasher_string(&h, "c");
    te__hasher_hex(&h, one);
    te__hasher_init(&h);
    te__hasher_string(&h, "a");
    te__hasher_string(&h, "bc");
    te__hasher_hex(&h, two);
    CHECK(strcmp(one, two) != 0);
}
