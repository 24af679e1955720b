/* dist/store.c: a rank's side of the rendezvous and of the control channel. The store gathers small blobs of all ranks
 * of a group, ends a group on all of its ranks, and learns from rank 0 that a rank is gone. A thread of its own, the
 * watcher, listens. This file must not depend on contexts and on the engine of a group. */

#ifndef _WIN32

#define TE__STORE_TICK 0.05 /* seconds between two looks at what takes too long */

/* A group as the store sees it. All fields are guarded by the store's mutex. */
typedef struct te__member {
    struct te__member *next;
    uint64_t id;
    const int *ranks; /* [count]: the group's ranks, by their numbers in the job */
    int count;
    double timeout;
    uint64_t gathers; /* all-gathers so far */
    uint64_t begun;   /* collectives so far */
    char last[TE__WHAT_TEXT];
    double since;         /* the host has been in `last` since then; negative: it is not in it */
    double asked;         /* when rank 0 was asked who is late; negative: not yet */
    bool failed, stopped; /* stopped: `stop` was called, because the group has failed */
    char why[TE__WHY_TEXT];
    int left;                    /* a rank that has left, or -1 */
    uint64_t left_at;            /* the fewest collectives after which a rank has left */
    bool leaves;                 /* this rank has said that it leaves */
    double (*waits)(void *user); /* returns since when the device is in a collective; negative: it is in none */
    void (*stop)(void *user);    /* ends what the group is doing. The watcher calls it, once */
    void *user;
} te__member;

typedef struct te__gathered {
    struct te__gathered *next;
    uint64_t group, number;
    te__text all;
} te__gathered;

/* News of a group that this rank has not made yet, or has destroyed. */
typedef struct te__early {
    struct te__early *next;
    te__msg msg;
    te__text body;
} te__early;
enum { TE__MOST_EARLY = 256 };

typedef struct te__store {
    int refs; /* groups that use it; their context's thread alone counts */
    int rank, size;
    te__facts *facts; /* [size] */
    double timeout;
    te__mutex mutex;
    te__cond cond; /* something has changed, or time has passed */
    te__link link;
    int wake[2];
    bool stop;
    bool over; /* no news will come any more */
    char why[TE__WHY_TEXT];
    bool broken; /* `over` because of a failure */
    te__gathered *gathered;
    te__early *early;               /* the newest first */
    te__member *members, *stopping; /* stopping: whose `stop` runs */
    te__thread thread;
    te__server *server; /* rank 0's */
} te__store;

/* The arguments of te__store_open. */
typedef struct te__meeting {
    int rank, size, version;
    const char *address; /* rank 0's host */
    int port;
    const char *file; /* NULL, or a file on a disk that all ranks see, which tells them address, port and secret */
    const te__text *secret; /* empty: only the loopback address is used */
    bool one_host;
    double timeout; /* seconds */
} te__meeting;

/* ---- the rendezvous ---- */

/* Reads the secret: `given`, else the one that the environment names, if any. */
static bool te__store_secret(const char *given, te__text *secret, te__text *why) {
    enum { SHORTEST = 16, LONGEST = 4096 };
    const char *text = given ? given : te__env("TE_DIST_SECRET");
    const char *file = given ? NULL : te__env("TE_DIST_SECRET_FILE");
    if (text && file) {
        te__text_printf(why, "TE_DIST_SECRET and TE_DIST_SECRET_FILE (%s) are both set; one of them is enough", file);
        return false;
    }
    if (text) te__text_put(secret, text);
    if (file && !te__secret_read(file, LONGEST, secret, why)) return false;
    while (secret->n && strchr("\r\n", secret->s[secret->n - 1])) secret->s[--secret->n] = 0;
    if ((!text && !file) || secret->n >= SHORTEST) return true;
    te__text_printf(why, "%s has %d bytes; a secret needs %d or more, and chance (openssl rand -hex 32)",
                    given  ? "secret"
                    : text ? "TE_DIST_SECRET"
                           : file,
                    (int)secret->n, SHORTEST);
    return false;
}

/* Writes the file of a rendezvous, with rank 0's half of the secret. A secret that all ranks know is the other half,
 * and is never written to a disk. */
static bool te__meeting_write(const te__meeting *at, const te__text *secret, int port, te__text *why) {
    te__text text = TE_ZERO;
    char host[256];
    bool fine;
    size_t i;
    te__host_name(host, sizeof host);
    te__text_printf(&text, "%s%s\n%d\n", te__wire_name,
                    at->address && at->address[0] && !at->one_host ? at->address : host, port);
    for (i = 0; i < secret->n; i++) te__text_printf(&text, "%02x", (unsigned)(uint8_t)secret->s[i]);
    te__text_put(&text, "\n");
    fine = te__secret_write(at->file, te__text_str(&text), text.n, why);
    te__text_free(&text);
    return fine;
}
/* Reads it: rank 0's host and port. Adds its half of the secret to `secret`. */
static bool te__meeting_read(const te__meeting *at, char host[256], int *port, te__text *secret, te__text *why) {
    te__text text = TE_ZERO;
    char hex[129] = "", own[256];
    const size_t name = strlen(te__wire_name);
    bool fine = te__secret_read(at->file, 4096, &text, why);
    size_t i;
    if (fine && (!te__starts_with(text.s, te__wire_name) ||
                 sscanf(text.s + name, "%255s %d %128[0-9a-f]", host, port, hex) != 3 || *port < 1 ||
                 *port > 65535 || strlen(hex) % 2 != 0)) {
        te__text_printf(why, "%s is no rendezvous of te.h", at->file);
        fine = false;
    }
    for (i = 0; fine && hex[i]; i += 2) {
        unsigned byte = 0;
        char c;
        sscanf(hex + i, "%2x", &byte);
        c = (char)byte;
        te__text_add(secret, &c, 1);
    }
    te__host_name(own, sizeof own);
    if (fine && !strcmp(host, own)) snprintf(host, 256, "127.0.0.1");
    te__text_free(&text);
    return fine;
}

/* Rank 0: listens, and starts the server. Returns rank 0's own connection to it. */
static int te__store_listen(te__store *s, const te__meeting *at, double deadline, te__text *why) {
    te__text secret = TE_ZERO, half = TE_ZERO;
    uint8_t made[32];
    const bool open = at->file || at->secret->n; /* others than this machine may come */
    int port = at->file ? 0 : at->port, own = -1, listener;
    bool fine = true;
    te__text_add(&secret, te__text_str(at->secret), at->secret->n);
    if (at->file) {
        fine = te__random_bytes(made, sizeof made);
        te__text_add(&half, (const char *)made, sizeof made);
        te__text_add(&secret, (const char *)made, sizeof made);
    }
    listener = fine ? te__net_listen(!open, &port, why) : -1;
    if (listener < 0) te__text_put(why, at->file ? "" : "; TE_DIST_PORT names another one, on all ranks");
    if (listener >= 0 && at->file && !te__meeting_write(at, &half, port, why)) te__net_close(&listener);
    if (listener >= 0) {
        s->server = te__server_start(at->size, at->version, &secret, listener, deadline, &own, why);
        if (at->file && !s->server) te__file_remove(at->file, NULL);
    }
    te__text_free(&half);
    te__text_free(&secret);
    return own;
}

typedef enum te__try { TE__TRY_AGAIN, TE__TRY_NEVER, TE__TRY_DONE } te__try;

/* Proves to rank 0 that this rank knows the secret, and lets rank 0 prove it. */
static te__try te__store_greet(te__store *s, const te__meeting *at, const te__text *secret, double deadline,
                               te__text *why) {
    const double soon = te__time_now() + 5.0, until = soon < deadline ? soon : deadline;
    uint8_t hello[16 + TE__NONCE_BYTES], code[TE__SHA256_BYTES];
    te__proof proof;
    te__msg m = TE_ZERO;
    const uint8_t *body = NULL;
    size_t bytes = 0;
    if (!te__msg_wait(&s->link, until, &m, &body, &bytes) || m.kind != TE__MSG_HELLO || bytes != sizeof hello ||
        memcmp(body, te__wire_name, 16) != 0) {
        te__text_put(why, "the program that listens there does not speak as te.h does");
        return TE__TRY_AGAIN;
    }
    memcpy(hello, body, sizeof hello);
    memset(&proof, 0, sizeof proof);
    te__facts_fill(&proof.facts, at->rank, at->size, at->version);
    if (!te__random_bytes(proof.nonce, sizeof proof.nonce)) {
        te__text_put(why, "the system has no random numbers (/dev/urandom)");
        return TE__TRY_NEVER;
    }
    te__prove(secret, "rank", hello + 16, proof.nonce, &proof.facts, proof.code);
    te__msg_put(&s->link, te__msg_of(TE__MSG_PROOF, at->rank, 0, 0), &proof, sizeof proof);
    if (te__link_send_all(&s->link, until) && te__msg_wait(&s->link, until, &m, &body, &bytes) &&
        m.kind == TE__MSG_REFUSED) {
        const bool text = bytes > 1 && !body[bytes - 1];
        te__text_put(why,
                     text ? (const char *)body : "rank 0 has another secret (TE_DIST_SECRET, TE_DIST_SECRET_FILE)");
        return at->file && !text ? TE__TRY_AGAIN : TE__TRY_NEVER; /* a file may be of an earlier job */
    }
    te__prove(secret, "root", hello + 16, proof.nonce, &proof.facts, code);
    if (m.kind != TE__MSG_WELCOME || bytes != sizeof code || !te__hmac_equal(code, body)) {
        te__text_put(why, m.kind == TE__MSG_WELCOME ? "the program that listens there does not know the secret"
                                                    : "the connection ended while the ranks proved who they are");
        return TE__TRY_AGAIN;
    }
    return TE__TRY_DONE;
}

/* Another rank: connects to rank 0 until it is there. */
static bool te__store_connect(te__store *s, const te__meeting *at, double deadline, te__text *why) {
    te__text secret = TE_ZERO, reason = TE_ZERO, told = TE_ZERO; /* told: what rank 0 had against this rank */
    char host[256];
    double pause = 0.01;
    te__try result = TE__TRY_AGAIN;
    while (result == TE__TRY_AGAIN) {
        int port = at->port, fd = -1;
        te__text_clear(&reason);
        te__text_clear(&secret);
        te__text_add(&secret, te__text_str(at->secret), at->secret->n);
        snprintf(host, sizeof host, "%s", at->one_host || !at->secret->n ? "127.0.0.1" : at->address);
        if (!at->file || te__meeting_read(at, host, &port, &secret, &reason))
            fd = te__net_connect(host, port, deadline, &reason);
        if (fd >= 0) {
            te__text about = TE_ZERO;
            te__link_open(&s->link, fd, TE__STRANGER_TEXT); /* until it has proved that it is rank 0 */
            result = te__store_greet(s, at, &secret, deadline, &about);
            s->link.limit = TE__MESSAGE_BYTES;
            if (result == TE__TRY_NEVER) te__text_put(&reason, te__text_str(&about));
            else te__text_printf(&reason, "port %d of %s: %s", port, host, te__text_str(&about));
            te__text_clear(&told);
            te__text_put(&told, te__text_str(&reason));
            te__text_free(&about);
            if (result != TE__TRY_DONE) te__link_close(&s->link);
        }
        if (result != TE__TRY_AGAIN) break;
        if (te__time_now() >= deadline) {
            te__text_printf(why, "rank 0 was not found within %g seconds: ", at->timeout);
            break;
        }
        te__sleep(pause);
        if (pause < 0.25) pause *= 2;
    }
    if (result != TE__TRY_DONE) te__text_put(why, te__text_str(&reason));
    /* rank 0 has given up since, and its file or its port are gone */
    if (result == TE__TRY_AGAIN && told.n && strcmp(te__text_str(&told), te__text_str(&reason)) != 0)
        te__text_printf(why, "; before that, %s", te__text_str(&told));
    te__text_free(&told);
    te__text_free(&reason);
    te__text_free(&secret);
    return result == TE__TRY_DONE;
}

/* Waits until rank 0 says that all ranks have come. */
static bool te__store_ready(te__store *s, double deadline, te__text *why) {
    size_t bytes = 0;
    te__msg m = TE_ZERO;
    const uint8_t *body = NULL;
    /* rank 0 gives up at its own deadline, and says why */
    if (!te__msg_wait(&s->link, deadline + 5.0, &m, &body, &bytes)) {
        te__text_put(why, s->link.over ? "rank 0 is gone: its connection has ended" : "rank 0 does not answer");
        return false;
    }
    if (m.kind == TE__MSG_READY && bytes == (size_t)s->size * sizeof *s->facts) {
        memcpy(s->facts, body, bytes);
        return true;
    }
    te__text_put(why, bytes && !body[bytes - 1] ? (const char *)body : "rank 0 speaks another te.h");
    return false;
}

/* ---- the watcher ---- */

/* "rank 3 (process 4711 on node7)" */
static const char *te__store_name(const te__store *s, int rank, char text[TE__WHAT_TEXT]) {
    return te__facts_text(rank >= 0 && rank < s->size ? &s->facts[rank] : NULL, rank, text);
}
static void te__member_fail(te__member *m, const char *why) {
    if (m->failed) return;
    m->failed = true;
    snprintf(m->why, sizeof m->why, "%s", why);
}
static te__member *te__store_find(te__store *s, uint64_t group) {
    te__member *m = s->members;
    while (m && m->id != group) m = m->next;
    return m;
}
/* Nothing will be heard any more. `broken`: and all groups fail. */
static void te__store_over(te__store *s, bool broken, const char *why) {
    te__member *m;
    if (!s->over) snprintf(s->why, sizeof s->why, "%s", why);
    s->over = true;
    s->broken = s->broken || broken;
    for (m = s->members; broken && m; m = m->next) te__member_fail(m, why);
}

/* Keeps news for te__store_add. The oldest go when there are too many: they are of groups that this rank has
 * destroyed. */
static void te__store_keep(te__store *s, const te__msg *m, const uint8_t *body, size_t bytes) {
    te__early *e = (te__early *)calloc(1, sizeof *e), **at = &s->early;
    int n;
    if (!e) return; /* the group then ends by its time-out */
    e->msg = *m;
    te__text_add(&e->body, (const char *)body, bytes);
    e->next = s->early;
    s->early = e;
    for (n = 0; *at && n < TE__MOST_EARLY; n++) at = &(*at)->next;
    if (!(e = *at)) return;
    *at = NULL;
    te__text_free(&e->body);
    free(e);
}

static void te__store_hear(te__store *s, const te__msg *m, const uint8_t *body, size_t bytes) {
    te__member *group = te__store_find(s, m->group);
    const char *text = bytes && !body[bytes - 1] ? (const char *)body : "no reason was given";
    char name[TE__WHAT_TEXT], why[TE__WHY_TEXT];
    te__gathered *g;
    if (!group && (m->kind == TE__MSG_ABORT || m->kind == TE__MSG_LEAVE)) {
        te__store_keep(s, m, body, bytes);
        return;
    }
    switch (m->kind) {
    case TE__MSG_GATHERED:
        g = (te__gathered *)calloc(1, sizeof *g);
        if (!g) break; /* the exchange ends by its deadline */
        g->group = m->group;
        g->number = m->number;
        te__text_add(&g->all, (const char *)body, bytes);
        g->next = s->gathered;
        s->gathered = g;
        break;
    case TE__MSG_GONE: te__store_over(s, true, text); break;
    case TE__MSG_ABORT: te__member_fail(group, text); break;
    case TE__MSG_BYE:
        te__store_over(s, false, "rank 0 has ended (te_group_destroy), and no rank hears of others");
        break;
    case TE__MSG_LEAVE:
        if (m->rank == s->rank) break;
        if (group->left < 0 || m->number < group->left_at) {
            group->left = m->rank;
            group->left_at = m->number;
        }
        if (group->begun <= m->number) break;
        snprintf(why, sizeof why,
                 "%s has left the group (te_group_destroy) after %llu collectives, and this rank is in "
                 "call number %llu, %s",
                 te__store_name(s, m->rank, name), (unsigned long long)m->number, (unsigned long long)group->begun,
                 group->last);
        te__member_fail(group, why);
        break;
    case TE__MSG_ASK: {
        char last[TE__WHAT_TEXT] = "";
        if (group) memcpy(last, group->last, sizeof last);
        te__msg_put(&s->link, te__msg_of(TE__MSG_STATE, s->rank, m->group, group ? group->begun : 0), last,
                    sizeof last);
        break;
    }
    default: break;
    }
}

/* Asks rank 0 who is late, for groups that have waited too long. */
static void te__store_look(te__store *s, te__member *m, double now) {
    const double device = m->waits ? m->waits(m->user) : -1.0;
    const double since = m->since >= 0 ? m->since : device;
    te__text body = TE_ZERO;
    int i;
    if (m->failed || since < 0 || now - since < m->timeout) return;
    if (m->asked < 0) {
        te__msg late = te__msg_of(TE__MSG_LATE, s->rank, m->id, 0);
        late.count = (uint32_t)m->count;
        for (i = 0; i < m->count; i++) {
            int32_t rank = m->ranks[i];
            te__text_add(&body, (const char *)&rank, sizeof rank);
        }
        te__text_add(&body, m->last, sizeof m->last);
        te__msg_put(&s->link, late, te__text_str(&body), body.n);
        te__text_free(&body);
        m->asked = now;
    } else if (now - m->asked > 2 * TE__ASK_SECONDS || s->over) {
        char why[TE__WHY_TEXT];
        snprintf(why, sizeof why, "%s has waited for more than %g seconds, and rank 0 does not say for whom", m->last,
                 m->timeout);
        te__member_fail(m, why);
    }
}

/* Calls `stop` of groups that have failed, without the mutex: it may take long. */
static void te__store_stop_failed(te__store *s) {
    te__member *m = s->members;
    while (m) {
        if (!m->failed || m->stopped) {
            m = m->next;
            continue;
        }
        m->stopped = true;
        s->stopping = m;
        te__mutex_unlock(&s->mutex);
        m->stop(m->user);
        te__mutex_lock(&s->mutex);
        s->stopping = NULL;
        te__cond_broadcast(&s->cond);
        m = s->members; /* the list may have changed */
    }
}

static void te__store_watch(void *user) {
    te__store *s = (te__store *)user;
    te__mutex_lock(&s->mutex);
    while (!s->stop) {
        const uint8_t *data, *body;
        size_t n, bytes;
        te__msg m;
        te__member *member;
        double now;
        bool woken;
        te__link in, *links[1];
        te__link_flush(&s->link);
        /* what has arrived is this thread's alone; what is to be sent is not, and is sent above */
        in = s->link;
        memset(&in.out, 0, sizeof in.out);
        links[0] = &in;
        te__mutex_unlock(&s->mutex);
        woken = te__links_run(links, in.over ? 0 : 1, s->wake[0], TE__STORE_TICK);
        te__mutex_lock(&s->mutex);
        s->link.in = in.in;
        s->link.over = s->link.over || in.over;
        if (woken) te__wake_taken(s->wake[0]);
        while ((data = te__link_take(&s->link, &n)) != NULL)
            if (te__msg_split(data, n, &m, &body, &bytes)) te__store_hear(s, &m, body, bytes);
        if (s->link.over && !s->over) {
            char name[TE__WHAT_TEXT], why[TE__WHY_TEXT];
            snprintf(why, sizeof why,
                     "%s is gone: its connection has ended without a goodbye (the process was killed, "
                     "or ended before te_group_destroy)",
                     te__store_name(s, 0, name));
            te__store_over(s, true, why);
        }
        now = te__time_now();
        for (member = s->members; member; member = member->next) te__store_look(s, member, now);
        te__store_stop_failed(s);
        te__cond_broadcast(&s->cond); /* also so that waits see their deadlines */
    }
    te__mutex_unlock(&s->mutex);
}

/* ---- opening and closing ---- */

static void te__store_free(te__store *s, double patience) {
    te__gathered *g;
    te__early *e;
    te__link_end(&s->link);
    if (s->server) te__server_stop(s->server, patience);
    te__link_close(&s->link);
    while ((g = s->gathered) != NULL) {
        s->gathered = g->next;
        te__text_free(&g->all);
        free(g);
    }
    while ((e = s->early) != NULL) {
        s->early = e->next;
        te__text_free(&e->body);
        free(e);
    }
    te__net_close(&s->wake[0]);
    te__net_close(&s->wake[1]);
    te__mutex_free(&s->mutex);
    te__cond_free(&s->cond);
    free(s->facts);
    free(s);
}

/* Meets the other ranks. Returns NULL, with the reason in `why`, unless all ranks have come in time. */
static te__store *te__store_open(const te__meeting *at, te__text *why) {
    const double deadline = te__time_now() + at->timeout;
    te__store *s = (te__store *)calloc(1, sizeof *s);
    bool fine = s != NULL;
    if (!fine) {
        te__text_put(why, "there is no memory for a rendezvous");
        return NULL;
    }
    s->rank = at->rank;
    s->size = at->size;
    s->timeout = at->timeout;
    s->link.fd = s->wake[0] = s->wake[1] = -1;
    te__mutex_init(&s->mutex);
    te__cond_init(&s->cond);
    s->facts = (te__facts *)calloc((size_t)at->size, sizeof *s->facts);
    fine = s->facts && te__net_pair(s->wake);
    if (!fine) te__text_put(why, "there is no memory for a rendezvous");
    if (fine && at->rank == 0) {
        int fd = te__store_listen(s, at, deadline, why);
        fine = fd >= 0;
        if (fine) te__link_open(&s->link, fd, TE__MESSAGE_BYTES);
    } else if (fine) {
        fine = te__store_connect(s, at, deadline, why);
    }
    fine = fine && te__store_ready(s, deadline, why);
    if (at->rank == 0 && at->file && s->server) te__file_remove(at->file, NULL);
    if (fine && !te__thread_start(&s->thread, te__store_watch, s)) {
        te__text_put(why, "the system has no thread for the watcher of the ranks");
        fine = false;
    }
    if (fine) return s;
    te__store_free(s, TE__LINGER_SECONDS);
    return NULL;
}

/* Leaves the job. Rank 0 waits until no other rank needs its server, for `patience` seconds at most. `why` is NULL, or
 * the reason for which this rank ends, and with it the job. */
static void te__store_close(te__store *s, double patience, const char *why) {
    te__mutex_lock(&s->mutex);
    if (why) te__msg_put(&s->link, te__msg_of(TE__MSG_GONE, s->rank, 0, 0), why, strlen(why) + 1);
    te__msg_put(&s->link, te__msg_of(TE__MSG_BYE, s->rank, 0, 0), NULL, 0);
    te__link_flush(&s->link);
    if (s->broken && patience > TE__LINGER_SECONDS) patience = TE__LINGER_SECONDS;
    s->stop = true;
    te__mutex_unlock(&s->mutex);
    te__wake(s->wake[1]);
    te__thread_join(&s->thread);
    te__link_send_all(&s->link, te__time_now() + 1.0);
    te__store_free(s, patience);
}

/* ---- for groups ---- */

static void te__store_add(te__store *s, te__member *m) {
    te__early *e;
    te__mutex_lock(&s->mutex);
    m->since = m->asked = -1.0;
    m->left = -1;
    if (s->broken) te__member_fail(m, s->why);
    m->next = s->members;
    s->members = m;
    for (e = s->early; e; e = e->next)
        if (e->msg.group == m->id) te__store_hear(s, &e->msg, (const uint8_t *)te__text_str(&e->body), e->body.n);
    te__mutex_unlock(&s->mutex);
}
/* Tells the others, if there are any to tell, that this rank makes no more calls of the group. */
static void te__store_leave(te__store *s, te__member *m) {
    te__mutex_lock(&s->mutex);
    if (!m->failed && !m->leaves) te__msg_put(&s->link, te__msg_of(TE__MSG_LEAVE, s->rank, m->id, m->begun), NULL, 0);
    m->leaves = true;
    te__link_flush(&s->link);
    te__mutex_unlock(&s->mutex);
}
/* Takes a group out, and leaves it. Afterwards its functions are not called any more. */
static void te__store_remove(te__store *s, te__member *m) {
    te__member **at = &s->members;
    te__store_leave(s, m);
    te__mutex_lock(&s->mutex);
    while (s->stopping == m) te__cond_wait(&s->cond, &s->mutex);
    while (*at != m) at = &(*at)->next;
    *at = m->next;
    te__mutex_unlock(&s->mutex);
}

/* Begins a collective: counts it, if `counted`, and notes its name. Returns false, with the reason in `why`, if the
 * group is over. */
static bool te__member_begin(te__store *s, te__member *m, const char *what, bool counted, char why[TE__WHY_TEXT]) {
    char name[TE__WHAT_TEXT];
    bool fine;
    te__mutex_lock(&s->mutex);
    if (!m->failed && counted && m->left >= 0 && m->begun >= m->left_at)
        snprintf(why, TE__WHY_TEXT, "%s has left the group (te_group_destroy) and will not come",
                 te__store_name(s, m->left, name));
    else if (m->failed) snprintf(why, TE__WHY_TEXT, "%s", m->why);
    else why[0] = 0;
    fine = !why[0];
    if (fine) {
        m->begun += counted;
        snprintf(m->last, sizeof m->last, "%s", what);
        m->since = te__time_now();
    }
    te__mutex_unlock(&s->mutex);
    return fine;
}
/* The host is through with the collective. */
static void te__member_end(te__store *s, te__member *m) {
    te__mutex_lock(&s->mutex);
    m->since = -1.0;
    if (!m->failed) m->asked = -1.0;
    te__mutex_unlock(&s->mutex);
}
/* Returns whether the group has failed, with the reason in `why`, which may be NULL. */
static bool te__member_failed(te__store *s, te__member *m, char why[TE__WHY_TEXT]) {
    bool failed;
    te__mutex_lock(&s->mutex);
    failed = m->failed;
    if (failed && why) snprintf(why, TE__WHY_TEXT, "%s", m->why);
    te__mutex_unlock(&s->mutex);
    return failed;
}
/* Ends the group on all ranks. May be called from any thread. */
static void te__member_abort(te__store *s, te__member *m, const char *why) {
    te__mutex_lock(&s->mutex);
    if (!m->failed) te__msg_put(&s->link, te__msg_of(TE__MSG_ABORT, s->rank, m->id, 0), why, strlen(why) + 1);
    te__member_fail(m, why);
    te__mutex_unlock(&s->mutex);
    te__wake(s->wake[1]);
}

/* Gathers `bytes` bytes of every rank of the group: blob[i] of `all` [count] receives those of the group's rank i,
 * which the caller frees. All ranks must give the same `what`, of less than TE__WHAT_TEXT bytes; it is the name in
 * messages. Returns false, with the reason in `why`. */
static bool te__store_gather(te__store *s, te__member *m, const char *what, const void *blob, size_t bytes,
                             te__text *all, char why[TE__WHY_TEXT]) {
    char name[TE__WHAT_TEXT] = "";
    te__text body = TE_ZERO;
    te__msg msg = te__msg_of(TE__MSG_GATHER, s->rank, m->id, 0);
    te__gathered *g = NULL, **at;
    size_t done = 0;
    int i;
    bool fine = true;
    snprintf(name, sizeof name, "%s", what);
    msg.count = (uint32_t)m->count;
    for (i = 0; i < m->count; i++) {
        int32_t rank = m->ranks[i];
        te__text_add(&body, (const char *)&rank, sizeof rank);
    }
    te__text_add(&body, name, sizeof name);
    te__text_add(&body, (const char *)blob, bytes);
    te__mutex_lock(&s->mutex);
    msg.number = m->gathers++;
    if (!body.oom) te__msg_put(&s->link, msg, te__text_str(&body), body.n);
    te__wake(s->wake[1]);
    for (;;) { /* an answer counts, even if the group has failed since */
        for (at = &s->gathered; *at && ((*at)->group != m->id || (*at)->number != msg.number);) at = &(*at)->next;
        g = *at;
        if (g) *at = g->next;
        if (g || m->failed || s->over || body.oom) break;
        te__cond_wait(&s->cond, &s->mutex);
    }
    if (!g) snprintf(why, TE__WHY_TEXT, "%s", m->failed ? m->why : s->over ? s->why : "there is no memory");
    te__mutex_unlock(&s->mutex);
    te__text_free(&body);
    for (i = 0; g && i < m->count && fine; i++) {
        uint64_t n = 0;
        fine = g->all.n - done >= sizeof n;
        if (fine) memcpy(&n, g->all.s + done, sizeof n);
        done += sizeof n;
        fine = fine && n <= g->all.n - done;
        if (fine && all) te__text_add(&all[i], g->all.s + done, (size_t)n);
        fine = fine && !(all && all[i].oom);
        done += (size_t)n;
    }
    if (g && !fine) snprintf(why, TE__WHY_TEXT, "there is no memory for the answer of the ranks");
    if (g) te__text_free(&g->all);
    free(g);
    return g != NULL && fine;
}

#endif
