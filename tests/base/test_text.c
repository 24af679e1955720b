/* tests/base/test_text.c: growing, running out of memory, and numbers in a locale that writes commas. */
#include "../te_test.h"
#include "base/common.h"
#include "base/text.c"
#include <locale.h>

TE_TEST(text_grows) {
    te__text t = TE_ZERO;
    CHECK(te__text_str(&t)[0] == 0);
    for (int i = 0; i < 1000; i++) te__text_printf(&t, "%d,", i);
    CHECK_EQ_INT(t.n, 10 * 2 + 90 * 3 + 900 * 4);
    CHECK(te__starts_with(t.s, "0,1,2,3,") && te__ends_with(t.s, "998,999,") && strlen(t.s) == t.n && !t.oom);
    te__text_add(&t, "a\0b", 3);
    CHECK(t.s[t.n - 2] == 0 && t.s[t.n] == 0);
    te__text_clear(&t);
    CHECK(t.n == 0 && t.s[0] == 0);
    te__text_put(&t, "");
    te__text_put(&t, "x");
    CHECK(strcmp(t.s, "x") == 0);
    te__text_free(&t);
    te__text_free(&t);
    CHECK(!t.s && !te__ends_with("a", "ba") && te__ends_with("ba", "a") && te__starts_with("a", ""));
}

typedef struct counted {
    size_t live, left; /* bytes handed out, bytes until there is no more */
} counted;
static void *counted_alloc(void *user, size_t bytes, size_t alignment) {
    counted *c = (counted *)user;
    (void)alignment;
    if (bytes > c->left) return NULL;
    c->left -= bytes;
    c->live += bytes;
    return malloc(bytes);
}
static void counted_release(void *user, void *p, size_t bytes) {
    ((counted *)user)->live -= bytes;
    free(p);
}

TE_TEST(text_without_memory) {
    counted c = {0, 500};
    te_allocator memory;
    memory.alloc = counted_alloc;
    memory.release = counted_release;
    memory.user = &c;
    te__text t = TE_ZERO;
    t.memory = &memory;
    for (int i = 0; i < 1000; i++) te__text_put(&t, "0123456789");
    CHECK(t.oom && t.n > 0 && t.n % 10 == 0 && strlen(t.s) == t.n);
    size_t n = t.n;
    te__text_put(&t, "x"); /* what came before was lost: nothing may follow */
    CHECK_EQ_INT(t.n, n);
    te__text_free(&t);
    CHECK_EQ_INT(c.live, 0);
    te__text huge = TE_ZERO;
    CHECK(!te__text_reserve(&huge, SIZE_MAX) && huge.oom);
    te__text_free(&huge);
}

static void check_numbers(void) {
    static const struct {
        double x;
        const char *text;
    } shortest[] = {{0, "0"}, {0.1, "0.1"}, {-2.5, "-2.5"}, {1e300, "1e+300"}, {1.0 / 3, "0.3333333333333333"}, {123456789, "123456789"}, {3e-4, "0.0003"}};
    for (int i = 0; i < COUNT(shortest); i++) {
        te__text t = TE_ZERO;
        te__text_number(&t, shortest[i].x);
        CHECK_MSG(strcmp(te__text_str(&t), shortest[i].text) == 0, "\"%s\", not \"%s\"", te__text_str(&t), shortest[i].text);
        te__text_free(&t);
    }
    double x = 0;
    CHECK(te__read_number("-12.5e1,", 8, &x) == 7 && x == -125);
    CHECK(te__read_number("3.14159", 4, &x) == 4 && x == 3.14); /* no more than n bytes */
    CHECK(te__read_number("1.e5x", 5, &x) == 4 && x == 1e5);
    CHECK(te__read_number(".5", 2, &x) == 2 && x == 0.5);
    CHECK(te__read_number("7e+", 3, &x) == 1 && x == 7);
    CHECK(te__read_number("0x10", 4, &x) == 1 && x == 0);
    CHECK(te__read_number("1,5", 3, &x) == 1 && x == 1);
    static const char *const none[7] = {"", "-", ".", "e5", "inf", "nan", " 1"};
    for (int i = 0; i < 7; i++) CHECK_EQ_INT(te__read_number(none[i], strlen(none[i]), &x), 0);
    char many[400];
    memset(many, '1', sizeof many);
    many[1] = '.';
    CHECK(te__read_number(many, sizeof many, &x) == sizeof many && fabs(x - 10.0 / 9) < 1e-15);
    for (int i = 0; i < 2000; i++) { /* every double comes back */
        uint64_t bits = (uint64_t)i * 0x9E3779B97F4A7C15ull;
        double y, z = 0;
        memcpy(&y, &bits, sizeof y);
        if (y - y != 0) continue;
        te__text t = TE_ZERO;
        te__text_number(&t, y);
        CHECK_MSG(te__read_number(t.s, t.n, &z) == t.n && z == y, "%s", t.s);
        te__text_free(&t);
    }
}

TE_TEST(numbers_as_text) {
    check_numbers();
    te__text t = TE_ZERO;
    te__text_number(&t, -HUGE_VAL);
    te__text_put(&t, " ");
    te__text_number(&t, (double)nanf(""));
    CHECK(strcmp(t.s, "-inf nan") == 0);
    te__text_free(&t);
}

TE_TEST(numbers_in_other_locales) {
    static const char *const locales[4] = {"de_DE.UTF-8", "fr_FR.UTF-8", "de_DE.utf8", "de_DE"};
    bool found = false;
    for (int i = 0; i < 4 && !found; i++) found = setlocale(LC_NUMERIC, locales[i]) != NULL;
    if (!found) SKIP("no locale here that writes a comma");
    check_numbers();
    setlocale(LC_NUMERIC, "C");
}
