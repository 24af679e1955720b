/* tests/quant/test_recipe_same.c: the comparison of recipes knows every field. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"

/* Of two recipes that differ in one bit: they are the same if that bit is padding, and only then. A field that te__recipe_same forgets fails here. */
TE_TEST(no_field_of_a_recipe_is_forgotten) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_clear_padding)
    te_recipe ones, a, b;
    size_t padding = 0;
    memset(&ones, 0xFF, sizeof ones);
    __builtin_clear_padding(&ones); /* what is left of the ones is fields */
    for (size_t i = 0; i < sizeof a; i++) {
        memset(&a, 0, sizeof a);
        memset(&b, 0, sizeof b);
        ((unsigned char *)&b)[i] = 1;
        bool field = ((unsigned char *)&ones)[i] != 0;
        CHECK_MSG(te__recipe_same(&a, &b) == !field, "byte %zu is %s, and recipes that differ there are %s", i, field ? "of a field" : "padding",
                  field ? "the same" : "not");
        padding += !field;
    }
    CHECK(padding > 0); /* else this test has shown nothing */
    a.delayed.margin = b.delayed.margin = NAN; /* a recipe is the same as itself */
    memcpy(&b, &a, sizeof a);
    CHECK(te__recipe_same(&a, &b));
    return;
#endif
#endif
    SKIP("the compiler cannot tell padding from fields");
}
