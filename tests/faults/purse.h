/* tests/faults/purse.h: an allocator that can be told to fail, and that keeps accounts: sizes must come back as they were given out, nothing
 * may be left, and only the context's own thread may ask. */
#ifndef FAULTS_PURSE_H
#define FAULTS_PURSE_H

#include "../te_test.h"
#include <pthread.h>

enum { PURSE_HEADER = 64, PURSE_PAGE = 4096 /* the header keeps every alignment that may be asked for */ };

typedef struct purse {
    size_t held, limit;     /* bytes; 0: no limit */
    size_t peak, largest;   /* held at any time; of one request */
    int64_t blocks, calls, fail_at; /* fail_at: the number of the request that is refused; 0: none */
    bool stays_out; /* and so are all that follow it */
    int64_t refused;
    pthread_t owner;
} purse;

static TE_MAYBE_UNUSED void *purse_alloc(void *user, size_t bytes, size_t alignment) {
    purse *p = (purse *)user;
    CHECK(pthread_equal(p->owner, pthread_self()));
    CHECK_MSG(alignment > 0 && (alignment & (alignment - 1)) == 0 && alignment <= 4096, "alignment %zu", alignment);
    p->calls++;
    if (bytes > p->largest) p->largest = bytes;
    if (p->calls == p->fail_at || (p->stays_out && p->fail_at && p->calls > p->fail_at) || (p->limit && p->held + bytes > p->limit)) {
        p->refused++;
        return NULL;
    }
    size_t header = alignment > PURSE_HEADER ? PURSE_PAGE : PURSE_HEADER;
    char *block = (char *)test_aligned_alloc(header, header + bytes);
    if (!block) return NULL;
    ((size_t *)(void *)block)[0] = bytes;
    char *data = block + header;
    ((size_t *)(void *)data)[-1] = header;
    memset(data, TEST_POISON, bytes);
    p->held += bytes;
    if (p->held > p->peak) p->peak = p->held;
    p->blocks++;
    return data;
}
static TE_MAYBE_UNUSED void purse_release(void *user, void *pointer, size_t bytes) {
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
    test_aligned_free(block);
}

static TE_MAYBE_UNUSED te_allocator allocator_of(purse *p) {
    te_allocator a = {purse_alloc, purse_release, NULL};
    a.user = p;
    p->owner = pthread_self();
    return a;
}
/* A context of the CPU whose memory comes from these (NULL: from where it usually does). */
static TE_MAYBE_UNUSED te_ctx_desc purse_desc(purse *host, purse *device) {
    te_ctx_desc desc = {0};
    desc.device = "cpu";
    desc.log = test__log;
    desc.cpu_threads = 1;
    if (host) desc.host_allocator = allocator_of(host);
    if (device) desc.device_allocator = allocator_of(device);
    return desc;
}
static TE_MAYBE_UNUSED void must_be_empty(void *arg) {
    const purse *p = (const purse *)arg;
    CHECK_MSG(p->held == 0 && p->blocks == 0, "leak: %zu bytes in %lld blocks were never released", p->held, (long long)p->blocks);
}
/* Its content must have come back when the test has ended, contexts included. */
static TE_MAYBE_UNUSED purse *new_purse(void) {
    purse *p = (purse *)test_alloc(sizeof *p);
    test_on_end(must_be_empty, p);
    return p;
}

#endif /* FAULTS_PURSE_H */
