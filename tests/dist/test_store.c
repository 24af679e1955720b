/* tests/dist/test_store.c: the rendezvous of ranks and their control channel, with threads in the place of processes:
 * secrets, strangers, ranks that do not fit, all-gathers, ranks that go, leave, or come late. The parts are this file's
 * own copy. */
#define _GNU_SOURCE
#include "../te_test.h"
#include "base/common.h"
#include "base/hash.c"
#include "base/sha256.c"
#include "base/text.c"
#include "sys/sys.c"
#include "sys/file.c"
#include "sys/net.c"
#pragma GCC diagnostic ignored "-Wunused-function"
#include "dist/wire.c"
#include "dist/server.c"
#include "dist/store.c"

#include <ifaddrs.h>
#include <signal.h>

/* ---- the keyed hash ---------------------------------------------------------------------------------------------- */

static const char *hex_of(const uint8_t *bytes) {
    static char text[2 * TE__SHA256_BYTES + 1];
    for (int i = 0; i < TE__SHA256_BYTES; i++) snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    return text;
}

/* FIPS 180-4's examples, and a million letters in uneven pieces. */
TE_TEST(sha256) {
    static const char *const cases[][2] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
    };
    te__sha256 h;
    uint8_t out[TE__SHA256_BYTES];
    char letters[1000];
    for (int i = 0; i < COUNT(cases); i++) {
        te__sha256_init(&h);
        te__sha256_update(&h, cases[i][0], strlen(cases[i][0]));
        te__sha256_end(&h, out);
        CHECK_STR(hex_of(out), cases[i][1]);
    }
    memset(letters, 'a', sizeof letters);
    te__sha256_init(&h);
    for (int left = 1000000, n = 1; left > 0; left -= n, n = n % 997 + 1) {
        if (n > left) n = left;
        te__sha256_update(&h, letters, (size_t)n);
    }
    te__sha256_end(&h, out);
    CHECK_STR(hex_of(out), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

/* RFC 4231, cases 1 to 4, 6 and 7. */
TE_TEST(hmac) {
    uint8_t key[131], data[160], out[TE__SHA256_BYTES];
    struct {
        int key_bytes, key_byte;
        const char *key, *data;
        int data_bytes, data_byte;
        const char *want;
    } cases[] = {
        {20, 0x0b, NULL, "Hi There", 0, 0, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
        {0, 0, "Jefe", "what do ya want for nothing?", 0, 0,
         "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
        {20, 0xaa, NULL, NULL, 50, 0xdd, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
        {25, -1, NULL, NULL, 50, 0xcd, "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
        {131, 0xaa, NULL, "Test Using Larger Than Block-Size Key - Hash Key First", 0, 0,
         "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
        {131, 0xaa, NULL,
         "This is a test using a larger than block-size key and a larger than block-size data. The key needs to be "
         "hashed before being used by the HMAC algorithm.",
         0, 0, "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
    };
    for (int i = 0; i < COUNT(cases); i++) {
        te__hmac m;
        int nk = cases[i].key ? (int)strlen(cases[i].key) : cases[i].key_bytes;
        int nd = cases[i].data ? (int)strlen(cases[i].data) : cases[i].data_bytes;
        if (cases[i].key) memcpy(key, cases[i].key, (size_t)nk);
        else
            for (int k = 0; k < nk; k++) key[k] = (uint8_t)(cases[i].key_byte < 0 ? k + 1 : cases[i].key_byte);
        if (cases[i].data) memcpy(data, cases[i].data, (size_t)nd);
        else memset(data, cases[i].data_byte, (size_t)nd);
        te__hmac_init(&m, key, (size_t)nk);
        te__hmac_update(&m, data, (size_t)nd);
        te__hmac_end(&m, out);
        CHECK_STR(hex_of(out), cases[i].want);
        CHECK(te__hmac_equal(out, out));
        memcpy(data, out, sizeof out);
        data[i % 32] ^= 1;
        CHECK(!te__hmac_equal(out, data));
    }
}

/* ---- ranks ------------------------------------------------------------------------------------------------------- */

enum { MOST = 5 };

typedef struct store_rank {
    te__meeting at;
    te__text secret;
    void (*fn)(struct store_rank *s);
    te__store *store;
    te__member member;
    int ranks[MOST];
    int64_t stops; /* atomic: calls of the member's `stop`, by the watcher */
    bool failed;
    char why[TE__WHY_TEXT], said[TE__WHY_TEXT];
    const char *end; /* te__store_close's reason; NULL: none, and the rank has a group */
    te__text all[MOST];
    double begun, took;
    te__thread thread;
    bool started;
} store_rank;

static void count_stop(void *user) { te__atomic_add(&((store_rank *)user)->stops, 1); }

static void store_main(void *user) {
    store_rank *s = (store_rank *)user;
    te__text why = TE_ZERO;
    s->begun = te__time_now();
    s->store = te__store_open(&s->at, &why);
    snprintf(s->why, sizeof s->why, "%s", te__text_str(&why));
    te__text_free(&why);
    if (s->store) {
        for (int i = 0; i < s->at.size; i++) s->ranks[i] = i;
        s->member.id = 1;
        s->member.ranks = s->ranks;
        s->member.count = s->at.size;
        if (s->member.timeout == 0) s->member.timeout = 20;
        s->member.stop = count_stop;
        s->member.user = s;
        if (!s->end) te__store_add(s->store, &s->member);
        if (s->fn && !s->end) s->fn(s);
        if (!s->end) te__store_remove(s->store, &s->member);
        te__store_close(s->store, 20, s->end);
    }
    s->took = te__time_now() - s->begun;
}

static int free_port(void) {
    te__text why = TE_ZERO;
    int port = 0, fd = te__net_listen(true, &port, &why);
    if (fd < 0) test_fail(__FILE__, __LINE__, "%s", te__text_str(&why));
    te__net_close(&fd);
    return port;
}

static store_rank ranks[MOST];

/* Ranks that meet on a free port of this machine, with a secret; a test changes what it wants, then runs them. */
static void prepare(int size, void (*fn)(store_rank *s)) {
    int port = free_port();
    memset(ranks, 0, sizeof ranks);
    for (int i = 0; i < MOST; i++) {
        store_rank *s = &ranks[i];
        te__text_put(&s->secret, "sixteen bytes or more");
        s->at.rank = i;
        s->at.size = size;
        s->at.version = 100;
        s->at.address = "127.0.0.1";
        s->at.port = port;
        s->at.secret = &s->secret;
        s->at.timeout = 20;
        s->fn = fn;
    }
}
/* Seconds in which ranks that are there have met for sure; the others are waited for as long. */
static double patience(double seconds) { return test_samples() ? 4 * seconds : seconds; }
static void start(int i) {
    ranks[i].started = true;
    if (!te__thread_start(&ranks[i].thread, store_main, &ranks[i])) abort();
}
static void finish(void) {
    for (int i = 0; i < MOST; i++) {
        if (ranks[i].started) te__thread_join(&ranks[i].thread);
        te__text_free(&ranks[i].secret);
        for (int k = 0; k < MOST; k++) te__text_free(&ranks[i].all[k]);
        ranks[i].started = false;
    }
}
static void run(int size) {
    for (int i = 0; i < size; i++) start(i);
    finish();
}

static bool gather(store_rank *s, const char *what, const char *blob) {
    char why[TE__WHY_TEXT] = "";
    for (int i = 0; i < MOST; i++) te__text_clear(&s->all[i]);
    if (!te__member_begin(s->store, &s->member, what, true, why) ||
        !te__store_gather(s->store, &s->member, what, blob, strlen(blob), s->all, why)) {
        snprintf(s->said, sizeof s->said, "%s", why);
        te__member_end(s->store, &s->member);
        return false;
    }
    te__member_end(s->store, &s->member);
    return true;
}

static void gather_much(store_rank *s) {
    char blob[64], want[64];
    for (int turn = 0; turn < 200; turn++) {
        snprintf(blob, sizeof blob, "%d of rank %d%.*s", turn, s->at.rank, turn % 7, "xxxxxxx");
        if (turn % 10 == 9) blob[0] = 0;
        bool fine = gather(s, "te_all_gather", blob);
        for (int i = 0; i < s->at.size; i++) {
            snprintf(want, sizeof want, "%d of rank %d%.*s", turn, i, turn % 7, "xxxxxxx");
            if (turn % 10 == 9) want[0] = 0;
            fine = fine && !strcmp(te__text_str(&s->all[i]), want);
        }
        if (!fine) s->failed = true;
    }
}

TE_TEST(gathers) {
    for (int size = 2; size <= MOST; size++) {
        prepare(size, gather_much);
        run(size);
        for (int i = 0; i < size; i++)
            CHECK_MSG(!ranks[i].failed && ranks[i].store, "rank %d of %d: %s%s", i, size, ranks[i].why, ranks[i].said);
        for (int i = 0; i < size; i++) CHECK_EQ_INT(ranks[i].stops, 0);
    }
}

/* A megabyte of each rank, which no socket takes at once. */
static void gather_long(store_rank *s) {
    size_t n = 1 << 20;
    char *blob = (char *)malloc(n + 1);
    memset(blob, 'a' + s->at.rank, n);
    blob[n] = 0;
    s->failed = !gather(s, "te_all_gather", blob);
    for (int i = 0; i < s->at.size && !s->failed; i++) s->failed = s->all[i].n != n || s->all[i].s[n - 1] != 'a' + i;
    free(blob);
}
TE_TEST(long_gathers) {
    prepare(4, gather_long);
    run(4);
    for (int i = 0; i < 4; i++)
        CHECK_MSG(!ranks[i].failed && ranks[i].store, "rank %d: %s%s", i, ranks[i].why, ranks[i].said);
}

/* Without a secret, and with ranks that come in any order. */
TE_TEST(loopback_alone) {
    prepare(3, gather_much);
    for (int i = 0; i < 3; i++) te__text_clear(&ranks[i].secret);
    start(2);
    te__sleep(0.05);
    start(1);
    te__sleep(0.05);
    start(0);
    finish();
    for (int i = 0; i < 3; i++)
        CHECK_MSG(!ranks[i].failed && ranks[i].store, "rank %d: %s%s", i, ranks[i].why, ranks[i].said);
}

/* An address of this machine that others reach it by, or NULL. */
static const char *outer_address(void) {
    static char text[INET_ADDRSTRLEN];
    struct ifaddrs *all = NULL;
    text[0] = 0;
    if (getifaddrs(&all)) return NULL;
    for (struct ifaddrs *a = all; a && !text[0]; a = a->ifa_next) {
        if (!a->ifa_addr || a->ifa_addr->sa_family != AF_INET) continue;
        const struct in_addr *ip = &((const struct sockaddr_in *)(const void *)a->ifa_addr)->sin_addr;
        if (ntohl(ip->s_addr) >> 24 != 127) inet_ntop(AF_INET, ip, text, sizeof text);
    }
    freeifaddrs(all);
    return text[0] ? text : NULL;
}
static bool answers(const char *address, int port) {
    te__text why = TE_ZERO;
    int fd = te__net_connect(address, port, te__time_now() + 5, &why);
    const bool found = fd >= 0;
    te__net_close(&fd);
    te__text_free(&why);
    return found;
}
/* Without a secret nobody of another machine finds the port; with one they do. A machine without an address shows the
 * rest. */
TE_TEST(loopback_answers_no_other_machine) {
    const char *outer = outer_address();
    for (int secret = 0; secret < 2; secret++) {
        prepare(2, gather_much);
        for (int i = 0; i < 2 && !secret; i++) te__text_clear(&ranks[i].secret);
        start(0);
        bool here = false;
        for (int i = 0; i < 1000 && !here; i++) {
            here = answers("127.0.0.1", ranks[0].at.port);
            if (!here) te__sleep(0.01);
        }
        CHECK(here);
        if (outer)
            CHECK_MSG(answers(outer, ranks[0].at.port) == (secret != 0), "%s, %s secret", outer, secret ? "a" : "no");
        start(1);
        finish();
        for (int i = 0; i < 2; i++)
            CHECK_MSG(!ranks[i].failed && ranks[i].store, "rank %d: %s%s", i, ranks[i].why, ranks[i].said);
    }
}

TE_TEST(rendezvous_file) {
    struct stat st;
    prepare(3, gather_much);
    const char *path = test_path("meeting");
    /* an earlier job's, whose port nobody listens on, or somebody else does */
    te__text why = TE_ZERO, old = TE_ZERO;
    te__text_printf(&old, "te.h ranks 1\n127.0.0.1\n%d\n00112233\n", free_port());
    CHECK(te__secret_write(path, old.s, old.n, &why));
    CHECK(stat(path, &st) == 0 && (st.st_mode & 07777) == 0600);
    for (int i = 0; i < 3; i++) {
        ranks[i].at.file = path;
        ranks[i].at.port = 0;
        te__text_clear(&ranks[i].secret);
    }
    start(1);
    start(2);
    te__sleep(0.1);
    start(0);
    finish();
    for (int i = 0; i < 3; i++)
        CHECK_MSG(!ranks[i].failed && ranks[i].store, "rank %d: %s%s", i, ranks[i].why, ranks[i].said);
    CHECK(!te__file_exists(path));
    te__text_free(&old);
    te__text_free(&why);
}

/* A secret of the job's own counts beside the file, however long, and does not get into it. */
TE_TEST(rendezvous_file_and_secret) {
    const char *path = test_path("meeting");
    for (int other = 0; other < 2; other++) {
        char hex[300] = "";
        te__text text = TE_ZERO, why = TE_ZERO;
        prepare(2, gather_much);
        for (int i = 0; i < 2; i++) {
            te__text_clear(&ranks[i].secret);
            for (int k = 0; k < 25; k++) te__text_printf(&ranks[i].secret, "%03d.", k + (k == 24 && i ? other : 0));
            ranks[i].at.file = path;
            ranks[i].at.port = 0;
            if (other) ranks[i].at.timeout = patience(1);
        }
        for (int k = 0; k < 8; k++) snprintf(hex + 2 * k, 3, "%02x", (unsigned)ranks[0].secret.s[k]);
        start(0);
        for (int k = 0; k < 5000 && !te__file_exists(path); k++) te__sleep(0.001);
        CHECK_MSG(te__secret_read(path, 4096, &text, &why), "%s", te__text_str(&why));
        CHECK(!strstr(te__text_str(&text), hex));
        start(1);
        finish();
        for (int i = 0; i < 2 && !other; i++)
            CHECK_MSG(!ranks[i].failed && ranks[i].store, "rank %d: %s%s", i, ranks[i].why, ranks[i].said);
        for (int i = 0; i < 2 && other; i++) {
            CHECK(!ranks[i].store);
            CHECK_STR(ranks[i].why, i ? "rank 0 has another secret" : "had another secret");
        }
        te__text_free(&text);
        te__text_free(&why);
    }
}

/* ---- connections ------------------------------------------------------------------------------------------------- */

/* A rank says goodbye and ends while there is something for it to read: the system then tells the other end at once
 * that it takes no more. Its goodbye counts all the same. */
TE_TEST(last_words) {
    te__text why = TE_ZERO;
    int port = 0, listener = te__net_listen(true, &port, &why);
    char from[TE__PEER_TEXT];
    te__link here, there;
    size_t n = 0;
    CHECK(listener >= 0);
    te__link_open(&there, te__net_connect("127.0.0.1", port, te__time_now() + 5, &why), 4096);
    CHECK(te__net_wait_one(listener, false, te__time_now() + 5));
    te__link_open(&here, te__net_accept(listener, from), 4096);
    te__link_put(&here, "unread", 6, NULL, 0);
    CHECK(te__link_send_all(&here, te__time_now() + 5) && te__net_wait_one(there.fd, false, te__time_now() + 5));
    te__link_put(&there, "goodbye", 7, NULL, 0);
    CHECK(te__link_send_all(&there, te__time_now() + 5));
    te__link_close(&there);
    for (int i = 0; i < 5000 && !here.deaf && !here.over; i++) {
        te__link_put(&here, "more", 4, NULL, 0);
        te__link_flush(&here);
        te__sleep(0.001);
    }
    CHECK(here.deaf && !te__link_send_all(&here, te__time_now()));
    const uint8_t *said = te__link_wait(&here, &n, te__time_now() + 5);
    CHECK(said && n == 7 && !memcmp(said, "goodbye", 7));
    CHECK(!te__link_wait(&here, &n, te__time_now() + 5) && here.over);
    te__link_close(&here);
    te__net_close(&listener);
    te__text_free(&why);
}

/* A host has two addresses, and nothing answers at the first one. */
TE_TEST(second_address) {
    enum { CROWD = 8 };
    te__text why = TE_ZERO;
    struct sockaddr_in full, good;
    struct addrinfo a[2];
    int fd = socket(AF_INET, SOCK_STREAM, 0), crowd[CROWD], port = 0, listener = te__net_listen(true, &port, &why);
    socklen_t n = sizeof full;
    double begun;
    memset(&full, 0, sizeof full);
    full.sin_family = AF_INET;
    full.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    good = full;
    good.sin_port = htons((uint16_t)port);
    CHECK(bind(fd, (struct sockaddr *)&full, sizeof full) == 0 && listen(fd, 0) == 0);
    CHECK(getsockname(fd, (struct sockaddr *)&full, &n) == 0);
    for (int i = 0; i < CROWD; i++) { /* more than wait there: the system leaves the rest without an answer */
        crowd[i] = socket(AF_INET, SOCK_STREAM, 0);
        te__net_prepare(crowd[i]);
        if (connect(crowd[i], (struct sockaddr *)&full, sizeof full) != 0) CHECK(errno == EINPROGRESS);
    }
    te__sleep(0.05);
    memset(a, 0, sizeof a);
    for (int i = 0; i < 2; i++) {
        a[i].ai_family = AF_INET;
        a[i].ai_addr = (struct sockaddr *)(i ? &good : &full);
        a[i].ai_addrlen = sizeof full;
    }
    a[0].ai_next = &a[1];
    begun = te__time_now();
    int got = te__net_connect_any(a, 0.2, begun + 60);
    CHECK(got >= 0 && te__time_now() > begun + 0.2); /* the first one did not answer */
    te__net_close(&got);
    for (int i = 0; i < CROWD; i++) te__net_close(&crowd[i]);
    te__net_close(&listener);
    close(fd);
    te__text_free(&why);
}

/* The end of a machine without power is found within two minutes. */
TE_TEST(kept_asking) {
    te__text why = TE_ZERO;
    int port = 0, fd = te__net_listen(true, &port, &why), on = 0, idle = 0, pause = 0, count = 0;
    socklen_t n = sizeof on;
    CHECK(getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, &n) == 0 && on);
    CHECK(getsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, &n) == 0);
    CHECK(getsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &pause, &n) == 0);
    CHECK(getsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, &n) == 0);
    CHECK_EQ_INT(idle + pause * count, 120);
    te__net_close(&fd);
    te__text_free(&why);
}

/* ---- secrets ----------------------------------------------------------------------------------------------------- */

TE_TEST(secrets) {
    te__text secret = TE_ZERO, why = TE_ZERO;
    const char *path = test_path("secret");
    FILE *f = fopen(path, "w");
    fputs("a secret of more than sixteen bytes\n", f);
    fclose(f);
    test_setenv("TE_DIST_SECRET", NULL);
    test_setenv("TE_DIST_SECRET_FILE", NULL);
    CHECK(te__store_secret(NULL, &secret, &why) && secret.n == 0);
    test_setenv("TE_DIST_SECRET_FILE", path);
    chmod(path, 0600);
    CHECK(te__store_secret(NULL, &secret, &why));
    CHECK(!strcmp(te__text_str(&secret), "a secret of more than sixteen bytes"));
    for (int mode = 0; mode < 4; mode++) {
        static const int modes[4] = {0640, 0644, 0400, 0700};
        char want[16];
        te__text_clear(&why);
        te__text_clear(&secret);
        chmod(path, (mode_t)modes[mode]);
        CHECK(!te__store_secret(NULL, &secret, &why));
        snprintf(want, sizeof want, "not 0%o", (unsigned)modes[mode]);
        CHECK_STR(te__text_str(&why), "of mode 0600");
        CHECK_STR(te__text_str(&why), want);
        CHECK(secret.n == 0);
    }
    te__text_clear(&why);
    test_setenv("TE_DIST_SECRET", "short");
    CHECK(!te__store_secret(NULL, &secret, &why));
    CHECK_STR(te__text_str(&why), "both set");
    te__text_clear(&why);
    te__text_clear(&secret);
    test_setenv("TE_DIST_SECRET_FILE", NULL);
    CHECK(!te__store_secret(NULL, &secret, &why));
    CHECK_STR(te__text_str(&why), "has 5 bytes; a secret needs 16");
    te__text_clear(&why);
    te__text_clear(&secret);
    CHECK(te__store_secret("a secret of the desc's", &secret, &why) && secret.n == 22);
    te__text_clear(&secret);
    CHECK(!te__store_secret("", &secret, &why));
    CHECK_STR(te__text_str(&why), "secret has 0 bytes");
    te__text_free(&why);
    te__text_free(&secret);
}

TE_TEST(wrong_secret) {
    prepare(3, NULL);
    te__text_put(&ranks[2].secret, ", and another one");
    for (int i = 0; i < 3; i++) ranks[i].at.timeout = patience(1);
    run(3);
    for (int i = 0; i < 3; i++) CHECK(!ranks[i].store);
    CHECK_STR(ranks[2].why, "another secret");
    CHECK(ranks[2].took < patience(0.9)); /* it does not wait to be told again */
    CHECK_STR(ranks[0].why, "2 of 3 ranks have come in time; missing: rank 2");
    CHECK_STR(ranks[0].why, "1 connection had another secret, the last one from");
    CHECK_STR(ranks[0].why, "127.0.0.1");
    CHECK_STR(ranks[1].why, "missing: rank 2");
}

/* Somebody without the secret cannot pretend to be rank 0: not with a code of his own, not with the rank's own code
 * sent back, and not with a message that takes the rank's memory. */
typedef struct pretender {
    int kind, listener;
    bool ended; /* the rank ended the connection, soon */
    pthread_t thread;
} pretender;
static void *pretend(void *user) {
    pretender *p = (pretender *)user;
    te__link l;
    char from[TE__PEER_TEXT];
    size_t n = 0;
    uint32_t long_bytes = 1 << 27;
    uint8_t hello[16 + TE__NONCE_BYTES] = {0}, code[TE__SHA256_BYTES] = {0};
    static const char zeros[1 << 16];
    if (!te__net_wait_one(p->listener, false, te__time_now() + 5)) return NULL;
    te__link_open(&l, te__net_accept(p->listener, from), 4096);
    memcpy(hello, te__wire_name, 16);
    if (p->kind == 2) {
        te__text_add(&l.out, (const char *)&long_bytes, 4);
        while (!l.over && !l.deaf && n < long_bytes) {
            te__text_add(&l.out, zeros, sizeof zeros);
            n += sizeof zeros;
            if (!te__link_send_all(&l, te__time_now() + 5)) break;
        }
        p->ended = n < 1 << 24; /* what sockets take that nobody reads */
    } else {
        te__msg_put(&l, te__msg_of(TE__MSG_HELLO, 0, 0, 0), hello, sizeof hello);
        te__link_send_all(&l, te__time_now() + 1);
        const uint8_t *said = te__link_wait(&l, &n, te__time_now() + 5);
        if (said && p->kind == 1) memcpy(code, said + sizeof(te__msg) + offsetof(te__proof, code), sizeof code);
        te__msg_put(&l, te__msg_of(TE__MSG_WELCOME, 0, 0, 0), code, sizeof code);
        te__link_send_all(&l, te__time_now() + 1);
        p->ended = said && !te__link_wait(&l, &n, te__time_now() + 5) && l.over;
    }
    te__link_close(&l);
    te__net_close(&p->listener);
    return NULL;
}
TE_TEST(false_rank_0) {
    enum { KINDS = 3 };
    pretender p[KINDS];
    te__text why = TE_ZERO;
    prepare(2, NULL);
    for (int kind = 0; kind < KINDS; kind++) {
        store_rank *s = &ranks[kind];
        memset(&p[kind], 0, sizeof p[kind]);
        p[kind].kind = kind;
        s->at.rank = 1;
        s->at.port = 0;
        s->at.timeout = patience(1);
        p[kind].listener = te__net_listen(true, &s->at.port, &why);
        if (pthread_create(&p[kind].thread, NULL, pretend, &p[kind])) abort();
        start(kind);
    }
    finish();
    for (int kind = 0; kind < KINDS; kind++) {
        test_case("kind %d", kind);
        pthread_join(p[kind].thread, NULL);
        CHECK(!ranks[kind].store && p[kind].ended);
        CHECK_STR(ranks[kind].why, "rank 0 was not found within");
    }
    te__text_free(&why);
}

/* ---- strangers --------------------------------------------------------------------------------------------------- */

/* Connections that say nothing, or something else, or half of a message: more of them than rank 0 keeps. */
static int stranger(int port, int kind) {
    te__text why = TE_ZERO;
    int fd = te__net_connect("127.0.0.1", port, te__time_now() + 5, &why);
    static const char http[] = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    uint32_t n = sizeof(te__msg) + sizeof(te__proof);
    uint8_t bytes[600];
    memset(bytes, 0xEE, sizeof bytes);
    if (kind == 1) send(fd, http, sizeof http - 1, TE__NO_SIGNAL);
    if (kind == 2) send(fd, &n, 4, TE__NO_SIGNAL);
    if (kind == 3) send(fd, bytes, sizeof bytes, TE__NO_SIGNAL);
    if (kind == 4) { /* a whole proof, of nothing */
        te__msg m = te__msg_of(TE__MSG_PROOF, 1, 0, 0);
        send(fd, &n, 4, TE__NO_SIGNAL);
        send(fd, &m, sizeof m, TE__NO_SIGNAL);
        send(fd, bytes, sizeof(te__proof), TE__NO_SIGNAL);
    }
    if (kind == 5) { /* the proof of a true rank, overheard another day */
        te__msg m = te__msg_of(TE__MSG_PROOF, 1, 0, 0);
        te__proof proof;
        memset(&proof, 0, sizeof proof);
        te__facts_fill(&proof.facts, 1, 3, 100);
        te__prove(&ranks[0].secret, "rank", bytes, proof.nonce, &proof.facts, proof.code);
        send(fd, &n, 4, TE__NO_SIGNAL);
        send(fd, &m, sizeof m, TE__NO_SIGNAL);
        send(fd, &proof, sizeof proof, TE__NO_SIGNAL);
    }
    if (kind == 6) te__net_close(&fd);
    te__text_free(&why);
    return fd;
}
TE_TEST(strangers) {
    enum { MANY = 90 };
    int fd[MANY];
    prepare(3, gather_much);
    start(0);
    te__sleep(0.1);
    for (int i = 0; i < MANY; i++) fd[i] = stranger(ranks[0].at.port, i % 7);
    start(1);
    for (int i = 0; i < MANY / 2; i++) {
        te__net_close(&fd[i]);
        fd[i] = stranger(ranks[0].at.port, i % 6);
    }
    start(2);
    finish();
    for (int i = 0; i < MANY; i++) te__net_close(&fd[i]);
    for (int i = 0; i < 3; i++)
        CHECK_MSG(!ranks[i].failed && ranks[i].store, "rank %d: %s%s", i, ranks[i].why, ranks[i].said);
}

TE_TEST(port_in_use) {
    te__text why = TE_ZERO;
    prepare(2, NULL);
    for (int secret = 0; secret < 2; secret++) {
        int fd = te__net_listen(secret == 0, &ranks[0].at.port, &why);
        if (secret == 0) te__text_clear(&ranks[0].secret);
        else te__text_put(&ranks[0].secret, "sixteen bytes or more");
        ranks[0].started = true;
        store_main(&ranks[0]);
        ranks[0].started = false;
        te__net_close(&fd);
        CHECK(!ranks[0].store);
        CHECK_STR(ranks[0].why, "cannot listen on port");
        CHECK_STR(ranks[0].why, "TE_DIST_PORT");
        CHECK_STR(ranks[0].why, strerror(EADDRINUSE));
    }
    finish();
    te__text_free(&why);
}

/* ---- ranks that do not fit --------------------------------------------------------------------------------------- */

TE_TEST(two_of_a_rank) {
    prepare(3, gather_much);
    ranks[3].at = ranks[1].at; /* another process that believes to be rank 1 */
    ranks[3].at.secret = &ranks[3].secret;
    start(0);
    start(1);
    te__sleep(0.2);
    start(3);
    te__sleep(0.2);
    start(2);
    finish();
    for (int i = 0; i < 3; i++)
        CHECK_MSG(!ranks[i].failed && ranks[i].store, "rank %d: %s%s", i, ranks[i].why, ranks[i].said);
    CHECK(!ranks[3].store);
    CHECK_STR(ranks[3].why, "two processes with the rank 1 of 3");
    CHECK_STR(ranks[3].why, "has joined already");
}

TE_TEST(other_size) {
    prepare(3, NULL);
    ranks[1].at.size = 4;
    run(3);
    for (int i = 0; i < 3; i++) {
        CHECK(!ranks[i].store && ranks[i].took < 10);
        CHECK_STR(ranks[i].why, "says that there are 4 ranks, and rank 0 says 3");
    }
}

TE_TEST(other_version) {
    prepare(3, NULL);
    ranks[2].at.version = 10203;
    run(3);
    for (int i = 0; i < 3; i++) {
        CHECK(!ranks[i].store && ranks[i].took < 10);
        CHECK_STR(ranks[i].why, "has te.h 1.2.3 and rank 0 has te.h 0.1.0");
    }
}

TE_TEST(missing_rank) {
    prepare(4, NULL);
    for (int i = 0; i < 4; i++) ranks[i].at.timeout = patience(0.5);
    for (int i = 0; i < 2; i++) start(i);
    finish();
    for (int i = 0; i < 2; i++) CHECK_STR(ranks[i].why, "2 of 4 ranks have come in time; missing: rank 2, rank 3");
    prepare(2, NULL);
    ranks[1].at.timeout = 0.3;
    start(1);
    finish();
    CHECK_STR(ranks[1].why, "rank 0 was not found within 0.3 seconds: cannot connect to port");
}

/* ---- the end of a group ------------------------------------------------------------------------------------------ */

/* Rank 1 ends its connection without a word, as the system does for a process that was killed. */
static void die_or_gather(store_rank *s) {
    gather(s, "te_barrier", "");
    if (s->at.rank == *(const int *)s->at.address) {
        te__mutex_lock(&s->store->mutex);
        shutdown(s->store->link.fd, SHUT_RDWR);
        te__mutex_unlock(&s->store->mutex);
        return;
    }
    double begun = te__time_now();
    s->failed = !gather(s, "te_barrier", "");
    s->took = te__time_now() - begun;
    while (s->failed && !te__atomic_load(&s->stops) && te__time_now() < begun + 5) te__sleep(0.01); /* the watcher's */
}
TE_TEST(death) {
    static const int dead[2] = {1, 0};
    for (int k = 0; k < 2; k++) {
        char want[32];
        prepare(3, die_or_gather);
        for (int i = 0; i < 3; i++) {
            ranks[i].at.address = (const char *)&dead[k];
            te__text_clear(&ranks[i].secret);
        }
        run(3);
        snprintf(want, sizeof want, "rank %d (process ", dead[k]);
        for (int i = 0; i < 3; i++) {
            if (i == dead[k]) continue;
            CHECK(ranks[i].failed && ranks[i].stops == 1);
            CHECK_STR(ranks[i].said, want);
            CHECK_STR(ranks[i].said, "is gone");
        }
    }
}

/* A rank that cannot go on says why, and nobody waits for it. */
static void gather_once(store_rank *s) { s->failed = !gather(s, "te_barrier", ""); }
TE_TEST(end_with_a_reason) {
    prepare(3, gather_once);
    ranks[1].end = "rank 1 has no memory";
    run(3);
    for (int i = 0; i < 3; i += 2) {
        CHECK(ranks[i].failed && ranks[i].took < 15);
        CHECK_STR(ranks[i].said, "rank 1 has no memory");
    }
}

static void abort_or_gather(store_rank *s) {
    if (s->at.rank == 2) te__member_abort(s->store, &s->member, "rank 2 has had enough");
    else s->failed = !gather(s, "te_barrier", "");
    if (s->at.rank == 2) s->failed = !gather(s, "te_barrier", "");
}
TE_TEST(abort) {
    prepare(3, abort_or_gather);
    run(3);
    for (int i = 0; i < 3; i++) {
        CHECK(ranks[i].failed);
        CHECK_STR(ranks[i].said, "rank 2 has had enough");
    }
}

static void leave_or_gather(store_rank *s) {
    gather(s, "te_barrier", "");
    if (s->at.rank != 1) s->failed = !gather(s, "te_all_reduce f32 [4]", "");
}
TE_TEST(leaving) {
    prepare(3, leave_or_gather);
    run(3);
    for (int i = 0; i < 3; i += 2) {
        CHECK(ranks[i].failed);
        CHECK_STR(ranks[i].said, "rank 1 (process ");
        CHECK_STR(ranks[i].said, "has left the group (te_group_destroy)");
    }
}

static void differ(store_rank *s) {
    s->failed = !gather(s, s->at.rank == 1 ? "te_all_reduce f32 [5]" : "te_all_reduce f32 [4]", "");
}
TE_TEST(other_calls) {
    prepare(3, differ);
    run(3);
    for (int i = 0; i < 3; i++) {
        CHECK(ranks[i].failed);
        CHECK_STR(ranks[i].said, "te_all_reduce f32 [4]");
        CHECK_STR(ranks[i].said, "te_all_reduce f32 [5]");
    }
}

/* Rank 1 does something else until the others have given it up. */
static void come_late(store_rank *s) {
    gather(s, "te_broadcast bf16 [2, 3]", "");
    if (s->at.rank == 1) {
        double until = te__time_now() + 5;
        while (!te__member_failed(s->store, &s->member, s->said) && te__time_now() < until) te__sleep(0.01);
    }
    s->failed = !gather(s, "te_all_reduce f32 [4]", "");
}
TE_TEST(late_rank) {
    prepare(3, come_late);
    for (int i = 0; i < 3; i++) ranks[i].member.timeout = patience(0.5);
    run(3);
    for (int i = 0; i < 3; i++) {
        CHECK(ranks[i].failed);
        CHECK_STR(ranks[i].said, "te_all_reduce f32 [4] has waited too long");
        CHECK_STR(ranks[i].said, "rank 1 (process ");
        CHECK_STR(ranks[i].said, "is behind: its last call was number 1 of the group, te_broadcast bf16 [2, 3]");
    }
}
