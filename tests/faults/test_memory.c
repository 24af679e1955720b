/* tests/faults/test_memory.c: memory runs out: a device that is full, and host memory that fails at every single request of a program in
 * turn. Whatever happens, the first error says it, nothing is lost or crashes, and the context goes on afterwards. */
#include "model.h"

#include <pthread.h>

/* ---- an allocator that can be told to fail, and that keeps accounts ------------------------------------------- */

enum { HEADER = 4096 /* keeps every alignment that may be asked for */, SMALL_HEADER = 64 };

typedef struct purse {
    size_t held, limit; /* bytes; 0: no limit */
    int64_t blocks, calls, fail_at; /* fail_at: the number of the request that is refused; 0: none */
    int64_t refused;
    pthread_t owner;
} purse;

static void *purse_alloc(void *user, size_t bytes, size_t alignment) {
    purse *p = (purse *)user;
    CHECK(pthread_equal(p->owner, pthread_self()));
    CHECK_MSG(alignment > 0 && (alignment & (alignment - 1)) == 0 && alignment <= 4096, "alignment %zu", alignment);
    p->calls++;
    if (p->calls == p->fail_at || (p->limit && bytes > p->limit - p->held)) {
        p->refused++;
        return NULL;
    }
    size_t header = alignment > SMALL_HEADER ? HEADER : SMALL_HEADER;
    char *block = (char *)aligned_alloc(header, (header + bytes + header - 1) / header * header);
    if (!block) return NULL;
    ((size_t *)(void *)block)[0] = bytes;
    char *data = block + header;
    ((size_t *)(void *)data)[-1] = header;
    memset(data, TEST_POISON, bytes);
    p->held += bytes;
    p->blocks++;
    return data;
}
static void purse_release(void *user, void *pointer, size_t bytes) {
    purse *p = (purse *)user;
    CHECK(pthread_equal(p->owner, pthread_self()));
    if (!pointer) {
        test_fail(__FILE__, __LINE__, "released NULL");
        return;
    }
    size_t header = ((size_t *)pointer)[-1];
    char *block = (char *)pointer - header;
    CHECK_EQ_INT(bytes, ((size_t *)(void *)block)[0]);
    memset(pointer, TEST_POISON, ((size_t *)(void *)block)[0]);
    p->held -= ((size_t *)(void *)block)[0];
    p->blocks--;
    free(block);
}

static te_allocator allocator_of(purse *p) {
    te_allocator a = {purse_alloc, purse_release, NULL};
    a.user = p;
    p->owner = pthread_self();
    return a;
}
static void must_be_empty(void *arg) {
    const purse *p = (const purse *)arg;
    CHECK_MSG(p->held == 0 && p->blocks == 0, "leak: %zu bytes in %lld blocks were never released", p->held, (long long)p->blocks);
}
/* Its content must have come back when the test has ended, contexts included. */
static purse *new_purse(void) {
    purse *p = (purse *)test_alloc(sizeof *p);
    test_on_end(must_be_empty, p);
    return p;
}

/* ---- the device is full --------------------------------------------------------------------------------------- */

enum { MiB = 1 << 20 };

TE_TEST(full_device) {
    purse *device = new_purse();
    te_ctx_desc desc = {0};
    desc.device_allocator = allocator_of(device);
    device->limit = 8 * MiB;
    te_ctx *te = test_context_with(&desc);
    te_tensor *kept = te_tensor_full(te, TE_F32, SHAPE(3 * MiB / 4), 1.5), *also = te_tensor_full(te, TE_F32, SHAPE(2 * MiB / 4), 2.5);
    size_t held = te_memory_get_stats(te).allocated;
    CHECK_EQ_INT(held, 5 * MiB);
    CHECK(!te_tensor_zeros(te, TE_F32, SHAPE(4 * MiB / 4)));
    CHECK_STR(te_error(te), "cpu: out of memory: 4.0 MiB asked for, ");
    CHECK_STR(te_error(te), ", 5.0 MiB held by live tensors of this context. ");
    CHECK_STR(te_error(te), "te_scope_begin/te_scope_end around each step");
    CHECK_STR(te_error(te), " it is not known how much is free,"); /* by an allocator of the program's own */
    CHECK_EQ_INT(te_memory_get_stats(te).allocated, held);
    /* with the error pending */
    CHECK(!te_tensor_zeros(te, TE_F32, SHAPE(100 * MiB)));
    CHECK(te_backward(te_sum_all(te_tensor_set_requires_grad(also, true))) != TE_OK);
    CHECK_ERROR(te, TE_ERR_OUT_OF_MEMORY, "4.0 MiB asked for");
    /* what was there is there, and what fits is served */
    CHECK(test_read(kept)[0] == 1.5f && test_read(kept)[3 * MiB / 4 - 1] == 1.5f && test_read(also)[2 * MiB / 4 - 1] == 2.5f);
    CHECK(test_read(te_add(also, also))[7] == 5);
    CHECK_OK(te);
}

/* What the pool keeps is given back before anybody is refused. */
TE_TEST(full_device_with_a_full_pool) {
    purse *device = new_purse();
    te_ctx_desc desc = {0};
    desc.device_allocator = allocator_of(device);
    device->limit = 8 * MiB;
    te_ctx *te = test_context_with(&desc);
    te_scope_begin(te);
    for (int i = 0; i < 6; i++) te_tensor_zeros(te, TE_U8, SHAPE(MiB));
    te_scope_end(te);
    CHECK_EQ_INT(device->held, 6 * MiB);
    CHECK(te_tensor_zeros(te, TE_U8, SHAPE(8 * MiB)) != NULL);
    CHECK_OK(te);
    CHECK_EQ_INT(device->held, 8 * MiB);
    CHECK_EQ_INT(te_memory_get_stats(te).reserved, 8 * MiB);
}

/* A model that does not fit into memory trains once there is room. */
TE_TEST(full_device_while_training) {
    purse *device = new_purse();
    te_ctx_desc desc = {0};
    desc.device_allocator = allocator_of(device);
    te_ctx *te = test_context_with(&desc), *roomy = test_context("cpu");
    model m = model_create(te, TE_RECIPE_CURRENT, true), same = model_create(roomy, TE_RECIPE_CURRENT, true);
    REQUIRE_OK(te);
    size_t before = device->held;
    uint64_t hash = model_hash(&m);
    double want = model_step(roomy, &same), got = 0;
    int refusals = 0;
    for (size_t room = 0; refusals >= 0 && room < 10 * MiB; room += 5000) {
        test_case("room for %zu bytes", room);
        te_memory_trim(te);
        device->limit = before + room;
        got = model_step(te, &m);
        if (te_ok(te)) break;
        refusals++;
        CHECK_ERROR(te, TE_ERR_OUT_OF_MEMORY, " bytes asked for, it is not known");
        te_optimizer_zero_grad(m.adam);
        CHECK_EQ_INT(te_optimizer_steps(m.adam), 0);
        CHECK(model_hash(&m) == hash);
        CHECK_EQ_INT(te_memory_get_stats(te).allocated, before);
    }
    CHECK_MSG(refusals >= 3, "only %d refusals", refusals);
    CHECK_OK(te);
    CHECK(got == want && model_hash(&m) == model_hash(&same));
    model_destroy(&m);
    model_destroy(&same);
}

/* ---- every request for host memory is refused in turn ---------------------------------------------------------- */

/* Runs `work` with request number n refused, in a context of its own, for every n until no request is left. Returns how many there
 * were. */
typedef void (*work_fn)(te_ctx *te, void *arg);
static int starve(work_fn work, void *arg, int threads) {
    enum { MOST = 20000 };
    for (int n = 1; n <= MOST; n++) {
        purse p = {0};
        te_ctx_desc desc = {0};
        test_case("request %d is refused", n);
        desc.device = "cpu";
        desc.host_allocator = allocator_of(&p);
        desc.cpu_threads = threads;
        desc.log = test__log;
        p.fail_at = n;
        te_ctx *te = te_ctx_create(&desc);
        CHECK(te || n == 1);
        if (te) {
            work(te, arg);
            CHECK_OK(te);
        }
        te_ctx_destroy(te);
        must_be_empty(&p);
        CHECK_EQ_INT(strlen(test_log_text()), 0); /* it warns of tensors that are still retained */
        if (!p.refused) return n - 1;
    }
    test_fail(__FILE__, __LINE__, "%d requests and no end", MOST);
    return MOST;
}
/* After work that may have failed: it did so for one reason alone, and in words. */
static bool failed(te_ctx *te) {
    if (te_ok(te)) return false;
    CHECK_MSG(strstr(te_error(te), "out of host memory: ") || strstr(te_error(te), "cpu: out of memory: "), "%s", te_error(te));
    CHECK_ERROR(te, TE_ERR_OUT_OF_MEMORY, "");
    return true;
}

typedef struct training {
    te_recipe_kind recipe;
    bool plain;
    uint64_t hash; /* after two steps in which nothing failed; 0: not known */
} training;

/* A model is made and takes two steps. Each part that fails is done again, and in the end all is as if nothing had happened. */
static void train(te_ctx *te, void *arg) {
    training *t = (training *)arg;
    model m;
    for (int tries = 0;; tries++) {
        te_seed(te, 5);
        m = model_create(te, t->recipe, t->plain);
        if (te_ok(te)) break;
        model_step(te, &m); /* with whatever was made */
        CHECK(failed(te));
        model_destroy(&m);
        REQUIRE(tries == 0);
    }
    for (int tries = 0; te_optimizer_steps(m.adam) < 2; tries++) {
        te_rng_set(te, 5, 100 + 10 * (uint64_t)te_optimizer_steps(m.adam));
        double loss = model_step(te, &m);
        if (!failed(te)) CHECK_MSG(loss > 0 && loss < 50, "the loss is %g", loss);
        te_optimizer_zero_grad(m.adam);
        REQUIRE(tries < 3);
    }
    /* Delayed scaling is left out: a step that fails in its backward pass has counted as a forward one. */
    uint64_t hash = t->recipe == TE_RECIPE_DELAYED ? 1 : model_hash(&m);
    CHECK(t->hash == 0 || hash == t->hash);
    t->hash = hash;
    model_destroy(&m);
}

TE_TEST(starved_training) {
    for (int recipe = TE_RECIPE_NONE; recipe <= TE_RECIPE_CURRENT; recipe++) {
        training t = {(te_recipe_kind)recipe, recipe != TE_RECIPE_NONE, 0};
        te_ctx *te = test_context("cpu");
        train(te, &t);
        int requests = starve(train, &t, 1);
        CHECK_MSG(requests > 500, "only %d requests", requests);
    }
}
