/* dist/wire.c: what ranks and rank 0 say to each other over a connection, and the proof that both know the secret. This
 * file must not depend on contexts and groups.
 *
 *     rank 0                                     rank r
 *     HELLO    16 bytes of a name, nonce a   ->
 *                                            <-  PROOF    nonce b, facts, HMAC(secret, "rank" a b facts)
 *     WELCOME  HMAC(secret, "root" a b)      ->           or REFUSED with a text
 *     READY    the facts of all ranks        ->           when all have come
 *
 * The secret itself never travels. Later messages are neither signed nor encrypted. */

enum { TE__WHY_TEXT = 1024 }; /* the longest reason for the end of a group */

#ifndef _WIN32

enum { TE__NONCE_BYTES = 32, TE__WHAT_TEXT = 192 };
/* the longest messages: from somebody who has proved nothing; with the reason of a refusal; from a rank */
enum { TE__STRANGER_BYTES = 512, TE__STRANGER_TEXT = 2048, TE__MESSAGE_BYTES = 1 << 28 };

static const char te__wire_name[16] = "te.h ranks 1\n";

typedef enum te__msg_kind {
    TE__MSG_HELLO = 1,
    TE__MSG_PROOF,
    TE__MSG_WELCOME,
    TE__MSG_REFUSED, /* a text */
    TE__MSG_READY,
    TE__MSG_GATHER,   /* `count` ranks, what [TE__WHAT_TEXT], a blob */
    TE__MSG_GATHERED, /* for each rank a length, then its blob */
    TE__MSG_ABORT,    /* a text: the group is over */
    TE__MSG_GONE,     /* a text: `rank` is over, and so are all groups */
    TE__MSG_LEAVE,    /* `rank` has left the group after `number` collectives */
    TE__MSG_BYE,      /* to rank 0: this rank needs it no more. From rank 0: it ends */
    TE__MSG_LATE,     /* `count` ranks, what [TE__WHAT_TEXT]: a collective takes too long */
    TE__MSG_ASK,      /* which collective of the group is this rank in? */
    TE__MSG_STATE     /* `number`, and what [TE__WHAT_TEXT] */
} te__msg_kind;

/* The head of every message. */
typedef struct te__msg {
    uint32_t kind;
    int32_t rank;
    uint32_t count;
    int32_t code;
    uint64_t group, number;
} te__msg;

static te__msg te__msg_of(te__msg_kind kind, int rank, uint64_t group, uint64_t number) {
    te__msg m = TE_ZERO;
    m.kind = (uint32_t)kind;
    m.rank = rank;
    m.group = group;
    m.number = number;
    return m;
}
static void te__msg_put(te__link *l, te__msg m, const void *body, size_t bytes) {
    te__link_put(l, &m, sizeof m, body, bytes);
}
/* Splits a message; false if it is no message of te.h. */
static bool te__msg_split(const uint8_t *p, size_t n, te__msg *m, const uint8_t **body, size_t *bytes) {
    if (!p || n < sizeof *m) return false;
    memcpy(m, p, sizeof *m);
    *body = p + sizeof *m;
    *bytes = n - sizeof *m;
    return true;
}

/* Waits for a message until `deadline`. */
static bool te__msg_wait(te__link *l, double deadline, te__msg *m, const uint8_t **body, size_t *bytes) {
    size_t n = 0;
    const uint8_t *p = te__link_wait(l, &n, deadline);
    return te__msg_split(p, n, m, body, bytes);
}

/* A rank's statement about itself. The layout is part of the protocol. */
typedef struct te__facts {
    int32_t rank, size, version, process;
    char host[64];
} te__facts;

typedef struct te__proof {
    uint8_t nonce[TE__NONCE_BYTES];
    te__facts facts;
    uint8_t code[TE__SHA256_BYTES];
} te__proof;

/* Computes the code by which one side proves that it knows the secret. Each side has chosen one of the nonces, so that
 * no code of another day fits. */
static void te__prove(const te__text *secret, const char label[4], const uint8_t *a, const uint8_t *b,
                      const te__facts *facts, uint8_t out[TE__SHA256_BYTES]) {
    te__hmac m;
    te__hmac_init(&m, te__text_str(secret), secret->n);
    te__hmac_update(&m, label, 4);
    te__hmac_update(&m, a, TE__NONCE_BYTES);
    te__hmac_update(&m, b, TE__NONCE_BYTES);
    te__hmac_update(&m, facts, sizeof *facts);
    te__hmac_end(&m, out);
}

static void te__facts_fill(te__facts *f, int rank, int size, int version) {
    memset(f, 0, sizeof *f);
    f->rank = rank;
    f->size = size;
    f->version = version;
    f->process = (int32_t)te__process_id();
    te__host_name(f->host, sizeof f->host);
}
/* "rank 3 (process 4711 on node7)" */
static const char *te__facts_text(const te__facts *f, int rank, char text[TE__WHAT_TEXT]) {
    if (f && f->size) snprintf(text, TE__WHAT_TEXT, "rank %d (process %d on %.63s)", rank, (int)f->process, f->host);
    else snprintf(text, TE__WHAT_TEXT, "rank %d", rank);
    return text;
}
/* "0.1.0" */
static const char *te__version_text(int version, char text[32]) {
    snprintf(text, 32, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    return text;
}

#endif
