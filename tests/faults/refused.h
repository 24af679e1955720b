/* tests/faults/refused.h: a call that must be refused, and a bystander that must be spared. Knows the public half of te.h. */
#ifndef FAULTS_REFUSED_H
#define FAULTS_REFUSED_H

#include "model.h"

/* ---- after an error -------------------------------------------------------------------------------------------- */

/* The first error has this code and holds these words (b and c may be NULL). Until it is cleared, training goes on without effect and
 * without harm, and the story stays what it was. */
static TE_MAYBE_UNUSED void refused_at(int line, te_ctx *te, model *m, te_result code, const char *a, const char *b, const char *c) {
    if (te_error_code(te) != code || !strstr(te_error(te), a) || (b && !strstr(te_error(te), b)) || (c && !strstr(te_error(te), c)))
        test_fail(__FILE__, line, "expected %s with \"%s\", \"%s\", \"%s\"; got %s \"%s\"", te_result_name(code), a, b ? b : "", c ? c : "",
                  te_result_name(te_error_code(te)), te_error(te));
    if (te_ok(te)) return;
    size_t n = strlen(te_error(te)) + 1;
    char *story = (char *)test_alloc(n);
    memcpy(story, te_error(te), n);
    if (m) {
        uint64_t hash = te_ctx_is_cuda(te) ? 0 : test_hash(m->gpt);
        model_step(te, m);
        CHECK(te_ctx_is_cuda(te) || test_hash(m->gpt) == hash);
        CHECK_EQ_INT(te_optimizer_steps(m->adam), 0);
    }
    CHECK(strcmp(te_error(te), story) == 0);
    te_clear_error(te);
}
#define REFUSED(call, code, a, b, c)                             \
    do {                                                         \
        test_case("%s", #call);                                  \
        CHECK(!(call));                                          \
        refused_at(__LINE__, te, &bystander, code, a, b, c);     \
    } while (0)
/* The same, of a function that returns a result. */
#define REFUSES(call, code, a, b, c)                             \
    do {                                                         \
        test_case("%s", #call);                                  \
        CHECK_EQ_INT(call, code);                                \
        refused_at(__LINE__, te, &bystander, code, a, b, c);     \
    } while (0)

/* A model that takes a first step only when the test is over: it must have been spared. */
static TE_MAYBE_UNUSED model new_bystander(te_ctx *te) { return model_create(te, TE_RECIPE_CURRENT, true); }
static TE_MAYBE_UNUSED void release_bystander(te_ctx *te, model *m) {
    CHECK_OK(te);
    double loss = model_step(te, m);
    CHECK_OK(te);
    CHECK_MSG(loss > 0 && loss < 50, "the loss is %g", loss);
    CHECK_EQ_INT(te_optimizer_steps(m->adam), 1);
    model_destroy(m);
}

#endif /* FAULTS_REFUSED_H */
