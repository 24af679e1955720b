/* tests/base/test_lz.c: packing and unpacking, and what damaged input gets: 0, and no byte written outside the output. */
#include "../te_test.h"
#include "base/common.h"
#include "base/hash.c"
#include "base/lz.c"
#include "../../tools/lz_pack.h"

enum { GUARD = 64 };

static uint64_t random_state; /* each test starts it anew, so that it finds the same numbers wherever it runs */
static uint32_t random_below(uint32_t n) {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)((random_state >> 33) % n);
}

/* Unpacks into a buffer of `cap` bytes with guards around it; the result, or 0. */
static size_t unpack_guarded(const uint8_t *packed, size_t n, size_t cap, uint8_t *out) {
    uint8_t *input = (uint8_t *)malloc(n ? n : 1); /* of its own, so that a sanitizer sees reads past its end */
    uint8_t *buffer = (uint8_t *)malloc(cap + 2 * GUARD);
    memcpy(input, packed, n);
    memset(buffer, 0xA5, cap + 2 * GUARD);
    size_t got = te__lz_unpack(input, n, buffer + GUARD, cap);
    for (int i = 0; i < GUARD; i++) CHECK(buffer[i] == 0xA5 && buffer[GUARD + cap + (size_t)i] == 0xA5);
    CHECK(got <= cap);
    if (out) memcpy(out, buffer + GUARD, got);
    free(input);
    free(buffer);
    return got;
}

static size_t round_trip(const char *name, const uint8_t *data, size_t n) {
    uint8_t *packed = (uint8_t *)malloc(te__lz_pack_bound(n)), *out = (uint8_t *)malloc(n);
    size_t size = te__lz_pack(data, n, packed);
    CHECK_MSG(size > 0 && size <= te__lz_pack_bound(n), "%s: %zu bytes become %zu", name, n, size);
    CHECK_EQ_INT(te__lz_size(packed, size), n);
    CHECK_MSG(unpack_guarded(packed, size, n, out) == n && memcmp(out, data, n) == 0, "%s: %zu bytes do not come back", name, n);
    if (n > 1) CHECK_EQ_INT(unpack_guarded(packed, size, n - 1, NULL), 0);
    free(packed);
    free(out);
    return size;
}

/* Text that looks like what a compiler writes. */
static uint8_t *assembly(size_t n) {
    static const char *const op[6] = {"add.s32", "mul.wide.u32", "ld.global.f32", "fma.rn.f32", "setp.lt.s32", "st.shared.v4.f32"};
    char *text = (char *)test_alloc(n + 100);
    for (size_t at = 0; at < n;)
        at += (size_t)snprintf(text + at, 100, "\t%s \t%%r%d, %%r%d, %d;\n", op[random_below(6)], (int)(at / 30), (int)random_below(300),
                               (int)random_below(16));
    return (uint8_t *)text;
}

TE_TEST(lz_round_trips) {
    random_state = 99;
    uint8_t *data = (uint8_t *)test_alloc(200000);
    const size_t size = 200000 / (size_t)test_every(4);
    for (size_t n = 1; n < 70; n++) {
        for (size_t i = 0; i < n; i++) data[i] = (uint8_t)random_below(3);
        round_trip("short", data, n);
    }
    for (int i = 0; i < 200000; i++) data[i] = (uint8_t)random_below(256);
    CHECK(round_trip("random", data, size) <= size + size / 128 + 64);
    memset(data, 'x', 200000);
    CHECK(round_trip("one byte", data, size) < 32);
    for (int i = 0; i < 200000; i++) data[i] = (uint8_t)(i % 300 * 7);
    CHECK(round_trip("period of 300", data, size) < 400);
    for (int i = 0; i < 100000; i++) data[i] = data[100000 + i] = (uint8_t)random_below(256);
    CHECK(round_trip("far away", data, 200000) < 102000); /* a distance of 100000 */
    CHECK(round_trip("assembly", assembly(size), size) < size / 3);
}

TE_TEST(lz_packs_alike_twice) {
    random_state = 99;
    uint8_t *data = assembly(20000), *one = (uint8_t *)test_alloc(te__lz_pack_bound(20000)), *two = (uint8_t *)test_alloc(te__lz_pack_bound(20000));
    size_t n = te__lz_pack(data, 20000, one);
    CHECK_EQ_INT(te__lz_pack(data, 20000, two), n);
    CHECK_BYTES("packed", one, two, n);
}

TE_TEST(lz_damage) {
    random_state = 99;
    enum { SIZE = 5000 };
    uint8_t *data = assembly(SIZE), *packed = (uint8_t *)test_alloc(te__lz_pack_bound(SIZE)), *bad = (uint8_t *)test_alloc(te__lz_pack_bound(SIZE) + 1);
    uint8_t *out = (uint8_t *)test_alloc(SIZE);
    size_t n = te__lz_pack(data, SIZE, packed), survivors = 0;
    for (size_t cut = 0; cut < n; cut++) CHECK_EQ_INT(unpack_guarded(packed, cut, SIZE, NULL), 0);
    memcpy(bad, packed, n);
    bad[n] = 0;
    CHECK_EQ_INT(unpack_guarded(bad, n + 1, SIZE, NULL), 0);
    for (size_t i = 0; i < n; i++) {
        memcpy(bad, packed, n);
        bad[i] ^= (uint8_t)(1u << random_below(8));
        /* a distance may come to point at another place with the same text: right, too */
        size_t got = unpack_guarded(bad, n, SIZE, out);
        CHECK(got == 0 || (got == SIZE && memcmp(out, data, SIZE) == 0));
        survivors += got != 0;
    }
    CHECK(survivors < n / 50);
    for (int i = 0; i < 20000; i++) { /* nonsense with a plausible head */
        size_t size = 6 + random_below(60);
        for (size_t k = 0; k < size; k++) bad[k] = (uint8_t)random_below(256);
        bad[0] = (uint8_t)random_below(128);
        if (i % 2) bad[1] |= 0x80; /* long varints */
        unpack_guarded(bad, size, 100 + random_below(100), NULL);
    }
    memset(bad, 0xff, 40);
    CHECK_EQ_INT(unpack_guarded(bad, 40, 100, NULL), 0);
    CHECK_EQ_INT(te__lz_size(bad, 40), 0);
}

TE_TEST(base85_round_trips) {
    random_state = 99;
    uint8_t data[300], out[304];
    char text[400];
    for (size_t n = 1; n <= sizeof data; n++) {
        for (size_t i = 0; i < n; i++) data[i] = (uint8_t)(n % 3 == 0 ? 255 : n % 3 == 1 ? 0 : random_below(256));
        te__base85(data, n, text);
        CHECK_EQ_INT(strlen(text), te__base85_size(n));
        CHECK(!strpbrk(text, "\\\"?'"));
        /* in one string, and cut into lines anywhere */
        const char *whole[1] = {text};
        memset(out, 0xA5, sizeof out);
        CHECK(te__unbase85(whole, 1, out, n) == n && memcmp(out, data, n) == 0 && out[n] == 0xA5);
        CHECK_EQ_INT(te__unbase85(whole, 1, out, n - 1), 0);
        char first[400], second[400];
        size_t cut = random_below((uint32_t)strlen(text) + 1);
        snprintf(first, sizeof first, "%.*s", (int)cut, text);
        snprintf(second, sizeof second, "%s", text + cut);
        const char *lines[3] = {first, "", second};
        CHECK(te__unbase85(lines, 3, out, n) == n && memcmp(out, data, n) == 0);
    }
    static const char *const damaged[5] = {"0", "0000 ", "00\\0", "_____", "00000_"};
    for (int i = 0; i < 5; i++) CHECK_EQ_INT(te__unbase85(&damaged[i], 1, out, sizeof out), 0);
}
