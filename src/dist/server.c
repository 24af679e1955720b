/* dist/server.c: rank 0's side of the rendezvous and of the control channel: a thread that lets the ranks in, passes on
 * what they say, and notices when a connection ends. This file must not depend on contexts and groups. */

#ifndef _WIN32

enum { TE__MAX_STRANGERS = 64 };
#define TE__STRANGER_SECONDS 10.0 /* the time in which a connection must prove that it is a rank's */
#define TE__ASK_SECONDS 2.0       /* the time in which ranks must answer where they are */
#define TE__LINGER_SECONDS 2.0    /* after a failure: the time in which the others read why */

typedef struct te__peer {
    te__link link;
    int rank; /* -1: it has proved nothing yet */
    double deadline;
    uint8_t nonce[TE__NONCE_BYTES];
    te__facts facts;
    bool bye;
} te__peer;

/* An all-gather, or an inquiry, under way. */
typedef struct te__round {
    struct te__round *next;
    bool inquiry;
    uint64_t group, number;
    int count, arrived, first; /* first: the rank that began it */
    int32_t *ranks;            /* [count] */
    bool *here;                /* [count] */
    te__text *blob;            /* [count] of a gathering: the ranks' bytes */
    uint64_t *at;              /* [count] of an inquiry: the ranks' collectives so far */
    char (*last)[TE__WHAT_TEXT];
    char what[TE__WHAT_TEXT];
    double deadline;
} te__round;

typedef struct te__server {
    te__text secret;
    int size, version, listener, wake[2];
    double deadline;  /* of the rendezvous */
    te__peer **peers; /* ranks and strangers */
    int num_peers, cap_peers;
    te__peer **seats;         /* [size]; NULL: has not come, or is gone */
    te__facts *facts;         /* [size] */
    int joined, refused;      /* ranks that were let in; ranks that were told that they cannot join */
    bool ready, failed, late; /* late: the rendezvous has taken too long */
    char why[TE__WHY_TEXT];   /* of `failed` */
    int strangers, liars; /* connections that were dropped: those that said nothing of te.h's, or had another secret */
    char last_liar[TE__PEER_TEXT];
    te__round *rounds;
    int64_t stop;    /* atomic */
    double patience; /* how long the server waits, once stopped, for ranks that still need it */
    te__thread thread;
} te__server;

static void te__round_free(te__round *g) {
    int i;
    for (i = 0; g->blob && i < g->count; i++) te__text_free(&g->blob[i]);
    free(g->ranks);
    free(g->here);
    free(g->blob);
    free(g->at);
    free(g->last);
    free(g);
}

/* ---- telling ---- */

static void te__server_tell(te__server *s, te__msg m, const void *body, size_t bytes) {
    int i;
    for (i = 0; i < s->size; i++)
        if (s->seats[i] && s->seats[i]->rank == i) te__msg_put(&s->seats[i]->link, m, body, bytes);
}
/* Tells all ranks that rank r is over, and with it the job. Only the first such news counts. */
static void te__server_fail(te__server *s, int r, const char *why) {
    if (s->failed) return;
    s->failed = true;
    snprintf(s->why, sizeof s->why, "%s", why);
    te__server_tell(s, te__msg_of(TE__MSG_GONE, r, 0, 0), s->why, strlen(s->why) + 1);
}
static void te__server_refuse(te__peer *p, const char *why) {
    te__msg_put(&p->link, te__msg_of(TE__MSG_REFUSED, 0, 0, 0), why, strlen(why) + 1);
    te__link_flush(&p->link);
    p->deadline = te__time_now() + 1.0; /* it reads why, and goes */
    p->bye = true;
}

/* ---- letting ranks in ---- */

static te__peer *te__server_add(te__server *s, int fd, size_t limit) {
    te__peer *p = (te__peer *)calloc(1, sizeof *p), **more;
    if (p && s->num_peers == s->cap_peers) {
        int cap = s->cap_peers ? 2 * s->cap_peers : 16;
        more = (te__peer **)realloc(s->peers, (size_t)cap * sizeof *more);
        if (more) {
            s->peers = more;
            s->cap_peers = cap;
        } else {
            free(p);
            p = NULL;
        }
    }
    if (!p) {
        te__net_close(&fd);
        return NULL;
    }
    te__link_open(&p->link, fd, limit);
    p->rank = -1;
    s->peers[s->num_peers++] = p;
    return p;
}
static void te__server_drop(te__server *s, int i) {
    te__peer *p = s->peers[i];
    if (p->rank >= 0 && s->seats[p->rank] == p) s->seats[p->rank] = NULL;
    te__link_close(&p->link);
    free(p);
    s->peers[i] = s->peers[--s->num_peers];
}

/* Returns the place of the oldest stranger if there are as many as there may be, else -1. */
static int te__server_oldest(const te__server *s) {
    int i, n = 0, oldest = -1;
    for (i = 0; i < s->num_peers; i++)
        if (s->peers[i]->rank < 0) {
            n++;
            if (oldest < 0 || s->peers[i]->deadline < s->peers[oldest]->deadline) oldest = i;
        }
    return n < TE__MAX_STRANGERS ? -1 : oldest;
}
/* Returns whether somebody else may come in. Where there are too many strangers, one goes as soon as it has had its
 * second: a rank needs less, and many ranks may come at once. */
static bool te__server_has_room(const te__server *s, double now) {
    const int oldest = te__server_oldest(s);
    return oldest < 0 || s->peers[oldest]->deadline < now + TE__STRANGER_SECONDS - 1.0;
}

/* Greets the connections that wait, as far as there is room. */
static void te__server_accept(te__server *s) {
    while (te__server_has_room(s, te__time_now())) {
        struct {
            char name[16];
            uint8_t nonce[TE__NONCE_BYTES];
        } hello;
        char from[TE__PEER_TEXT];
        const int fd = te__net_accept(s->listener, from), oldest = te__server_oldest(s);
        te__peer *p;
        if (fd < 0) {
            /* without a descriptor for it, the connection stays, and would end the next wait at once */
            if (errno == EMFILE || errno == ENFILE) te__sleep(0.01);
            return;
        }
        if (oldest >= 0) {
            s->strangers++;
            te__server_drop(s, oldest);
        }
        p = te__server_add(s, fd, TE__STRANGER_BYTES);
        if (!p) return;
        memcpy(p->link.peer, from, sizeof from);
        p->deadline = te__time_now() + TE__STRANGER_SECONDS;
        if (!te__random_bytes(p->nonce, sizeof p->nonce)) p->link.over = true;
        memcpy(hello.name, te__wire_name, sizeof hello.name);
        memcpy(hello.nonce, p->nonce, sizeof hello.nonce);
        te__msg_put(&p->link, te__msg_of(TE__MSG_HELLO, 0, 0, 0), &hello, sizeof hello);
        te__link_flush(&p->link);
    }
}

static void te__server_seat(te__server *s, te__peer *p, int rank, const te__facts *facts) {
    p->rank = rank;
    p->facts = *facts;
    p->link.limit = TE__MESSAGE_BYTES;
    s->seats[rank] = p;
    s->facts[rank] = *facts;
    s->joined++;
    if (s->joined < s->size) return;
    s->ready = true;
    te__server_tell(s, te__msg_of(TE__MSG_READY, 0, 0, 0), s->facts, (size_t)s->size * sizeof *s->facts);
}

/* Judges a connection that has shown the secret: its rank, its number of ranks, its te.h. */
static void te__server_judge(te__server *s, te__peer *p, const te__facts *f) {
    char text[TE__WHY_TEXT], who[TE__WHAT_TEXT], other[TE__WHAT_TEXT], a[32], b[32];
    text[0] = 0;
    te__facts_text(f, f->rank, who);
    if (s->failed) {
        s->refused++;
        te__server_refuse(p, s->why);
        return;
    }
    if (f->version != s->version)
        snprintf(text, sizeof text, "%s has te.h %s and rank 0 has te.h %s; all ranks must have one version", who,
                 te__version_text(f->version, a), te__version_text(s->version, b));
    else if (f->size != s->size)
        snprintf(text, sizeof text, "%s says that there are %d ranks, and rank 0 says %d", who, (int)f->size, s->size);
    if (text[0]) { /* a true rank that cannot join: nobody can go on */
        s->refused++;
        te__server_refuse(p, text);
        te__server_fail(s, f->rank, text);
        return;
    }
    if (f->rank < 0 || f->rank >= s->size || s->seats[f->rank]) {
        bool taken = f->rank >= 0 && f->rank < s->size;
        if (taken)
            snprintf(text, sizeof text, "there are two processes with the rank %d of %d: %s has joined already, and %s",
                     (int)f->rank, s->size, te__facts_text(&s->facts[f->rank], f->rank, other), who);
        else snprintf(text, sizeof text, "%s is none of the ranks 0 to %d", who, s->size - 1);
        te__server_refuse(p, text);
        return;
    }
    te__server_seat(s, p, f->rank, f);
}

static void te__server_hear_stranger(te__server *s, te__peer *p, const uint8_t *data, size_t n) {
    te__proof proof;
    te__msg m;
    const uint8_t *body;
    size_t bytes;
    uint8_t code[TE__SHA256_BYTES];
    if (p->bye) return;
    if (!te__msg_split(data, n, &m, &body, &bytes) || m.kind != TE__MSG_PROOF || bytes != sizeof proof) {
        p->link.over = true;
        return;
    }
    memcpy(&proof, body, sizeof proof);
    proof.facts.host[sizeof proof.facts.host - 1] = 0;
    te__prove(&s->secret, "rank", p->nonce, proof.nonce, &proof.facts, code);
    if (!te__hmac_equal(code, proof.code)) {
        s->liars++;
        snprintf(s->last_liar, sizeof s->last_liar, "%s", p->link.peer);
        te__server_refuse(p, "");
        return;
    }
    te__prove(&s->secret, "root", p->nonce, proof.nonce, &proof.facts, code);
    te__msg_put(&p->link, te__msg_of(TE__MSG_WELCOME, 0, 0, 0), code, sizeof code);
    te__server_judge(s, p, &proof.facts);
}

/* ---- all-gathers ---- */

static te__round *te__round_find(te__server *s, bool inquiry, uint64_t group, uint64_t number) {
    te__round *g = s->rounds;
    while (g && (g->inquiry != inquiry || g->group != group || (!inquiry && g->number != number))) g = g->next;
    return g;
}
/* Begins a round of the ranks that a message lists. NULL for a message that lists none, or without memory. */
static te__round *te__round_begin(te__server *s, bool inquiry, const te__msg *m, const uint8_t *body, size_t bytes) {
    const size_t n = m->count, ranks = n * sizeof(int32_t);
    te__round *g;
    size_t i;
    if (n < 1 || n > (size_t)s->size || bytes < ranks + TE__WHAT_TEXT) return NULL;
    g = (te__round *)calloc(1, sizeof *g);
    if (!g) return NULL;
    g->inquiry = inquiry;
    g->group = m->group;
    g->number = m->number;
    g->count = (int)n;
    g->first = m->rank;
    g->ranks = (int32_t *)malloc(ranks);
    g->here = (bool *)calloc(n, sizeof(bool));
    g->blob = inquiry ? NULL : (te__text *)calloc(n, sizeof(te__text));
    g->at = inquiry ? (uint64_t *)calloc(n, sizeof(uint64_t)) : NULL;
    g->last = inquiry ? (char(*)[TE__WHAT_TEXT])calloc(n, TE__WHAT_TEXT) : NULL;
    if (!g->ranks || !g->here || (inquiry ? !g->at || !g->last : !g->blob)) {
        te__round_free(g);
        return NULL;
    }
    memcpy(g->ranks, body, ranks);
    memcpy(g->what, body + ranks, TE__WHAT_TEXT);
    g->what[TE__WHAT_TEXT - 1] = 0;
    for (i = 0; i < n; i++)
        if (g->ranks[i] < 0 || g->ranks[i] >= s->size) g->ranks[i] = 0;
    g->next = s->rounds;
    s->rounds = g;
    return g;
}
static void te__round_end(te__server *s, te__round *g) {
    te__round **at = &s->rounds;
    while (*at != g) at = &(*at)->next;
    *at = g->next;
    te__round_free(g);
}
/* Sends a message to the ranks of a round. */
static void te__round_tell(te__server *s, const te__round *g, te__msg m, const void *body, size_t bytes) {
    int i;
    for (i = 0; i < g->count; i++)
        if (s->seats[g->ranks[i]]) te__msg_put(&s->seats[g->ranks[i]]->link, m, body, bytes);
}
static int te__round_index(const te__round *g, int rank) {
    int i;
    for (i = 0; i < g->count && g->ranks[i] != rank; i++) {}
    return i < g->count ? i : -1;
}

static void te__server_gather(te__server *s, const te__msg *m, const uint8_t *body, size_t bytes) {
    const size_t ranks = m->count * sizeof(int32_t);
    te__round *g = te__round_find(s, false, m->group, m->number);
    te__text all = TE_ZERO;
    int i;
    if (!g) g = te__round_begin(s, false, m, body, bytes);
    i = g ? te__round_index(g, m->rank) : -1;
    if (i < 0 || g->here[i] || (int)m->count != g->count || bytes < ranks + TE__WHAT_TEXT) {
        te__server_fail(s, m->rank,
                        g ? "a rank has sent a message that does not fit its group"
                          : "rank 0 has no memory for an exchange of the ranks");
        return;
    }
    if (strncmp(g->what, (const char *)body + ranks, TE__WHAT_TEXT - 1) != 0) {
        char text[TE__WHY_TEXT];
        snprintf(text, sizeof text,
                 "rank %d calls %s and rank %d calls %.*s; all ranks must make the same calls in the "
                 "same order",
                 g->first, g->what, (int)m->rank, TE__WHAT_TEXT - 1, (const char *)body + ranks);
        te__round_tell(s, g, te__msg_of(TE__MSG_ABORT, m->rank, m->group, 0), text, strlen(text) + 1);
        te__round_end(s, g);
        return;
    }
    g->here[i] = true;
    g->arrived++;
    te__text_add(&g->blob[i], (const char *)body + ranks + TE__WHAT_TEXT, bytes - ranks - TE__WHAT_TEXT);
    if (g->arrived < g->count) return;
    for (i = 0; i < g->count; i++) {
        uint64_t n = g->blob[i].n;
        te__text_add(&all, (const char *)&n, sizeof n);
        te__text_add(&all, te__text_str(&g->blob[i]), g->blob[i].n);
    }
    if (all.oom) te__server_fail(s, 0, "rank 0 has no memory for an exchange of the ranks");
    else te__round_tell(s, g, te__msg_of(TE__MSG_GATHERED, 0, m->group, m->number), te__text_str(&all), all.n);
    te__text_free(&all);
    te__round_end(s, g);
}

/* ---- who is late? ---- */

/* Ends an inquiry: the group fails with a text that names the ranks that are behind, and in what. */
static void te__inquiry_end(te__server *s, te__round *g) {
    char who[TE__WHAT_TEXT];
    te__text text = TE_ZERO;
    uint64_t most = 0;
    int i, behind = 0, differ = 0, first = te__round_index(g, g->first);
    for (i = 0; i < g->count; i++)
        if (g->here[i] && g->at[i] > most) most = g->at[i];
    te__text_printf(&text, "%s has waited too long:", g->what);
    for (i = 0; i < g->count && text.n < TE__WHY_TEXT - 300; i++) {
        te__facts_text(&s->facts[g->ranks[i]], g->ranks[i], who);
        if (!g->here[i]) te__text_printf(&text, " %s does not answer;", who);
        else if (g->at[i] == 0) te__text_printf(&text, " %s has not called any collective of the group;", who);
        else if (g->at[i] < most)
            te__text_printf(&text, " %s is behind: its last call was number %llu of the group, %s;", who,
                            (unsigned long long)g->at[i], g->last[i]);
        else if (first >= 0 && g->here[first] && strcmp(g->last[i], g->last[first]) != 0)
            te__text_printf(&text, " %s has called %s last;", who, g->last[i]), differ++;
        if (!g->here[i] || g->at[i] < most) behind++;
    }
    if (behind) te__text_printf(&text, " the others are in call number %llu", (unsigned long long)most);
    else
        te__text_printf(&text, differ ? " all ranks must make the same calls in the same order"
                                      : " all ranks have made the call, and it has not ended on their devices");
    te__round_tell(s, g, te__msg_of(TE__MSG_ABORT, g->first, g->group, 0), te__text_str(&text), text.n + 1);
    te__text_free(&text);
    te__round_end(s, g);
}
static void te__server_late(te__server *s, const te__msg *m, const uint8_t *body, size_t bytes) {
    te__round *g;
    if (te__round_find(s, true, m->group, 0)) return;
    g = te__round_begin(s, true, m, body, bytes);
    if (!g) return;
    g->deadline = te__time_now() + TE__ASK_SECONDS;
    te__round_tell(s, g, te__msg_of(TE__MSG_ASK, 0, m->group, 0), NULL, 0);
}
static void te__server_state(te__server *s, const te__msg *m, const uint8_t *body, size_t bytes) {
    te__round *g = te__round_find(s, true, m->group, 0);
    int i = g ? te__round_index(g, m->rank) : -1;
    if (i < 0 || g->here[i] || bytes != TE__WHAT_TEXT) return;
    g->here[i] = true;
    g->at[i] = m->number;
    memcpy(g->last[i], body, TE__WHAT_TEXT);
    g->last[i][TE__WHAT_TEXT - 1] = 0;
    if (++g->arrived == g->count) te__inquiry_end(s, g);
}

/* ---- the thread ---- */

static void te__server_hear_rank(te__server *s, te__peer *p, const uint8_t *data, size_t n) {
    te__msg m;
    const uint8_t *body;
    size_t bytes;
    if (!te__msg_split(data, n, &m, &body, &bytes)) return;
    m.rank = p->rank;
    switch (m.kind) {
    case TE__MSG_GATHER: te__server_gather(s, &m, body, bytes); break;
    case TE__MSG_LATE: te__server_late(s, &m, body, bytes); break;
    case TE__MSG_STATE: te__server_state(s, &m, body, bytes); break;
    case TE__MSG_ABORT:
    case TE__MSG_LEAVE: te__server_tell(s, m, body, bytes); break;
    case TE__MSG_GONE: te__server_fail(s, m.rank, bytes && !body[bytes - 1] ? (const char *)body : "?"); break;
    case TE__MSG_BYE: p->bye = true; break;
    default: break;
    }
}
static void te__server_hear(te__server *s, te__peer *p) {
    const uint8_t *data;
    size_t n;
    while ((data = te__link_take(&p->link, &n)) != NULL) {
        if (p->rank < 0) te__server_hear_stranger(s, p, data, n);
        else te__server_hear_rank(s, p, data, n);
    }
}

/* Drops connections that have ended, and strangers whose time is over. The end of a rank's connection that has not said
 * goodbye is the end of the rank. */
static void te__server_sweep(te__server *s, double now) {
    int i;
    for (i = s->num_peers - 1; i >= 0; i--) {
        te__peer *p = s->peers[i];
        if (!p->link.over && (p->rank >= 0 || now < p->deadline)) continue;
        if (p->rank < 0 && !p->bye) s->strangers++;
        if (p->rank >= 0 && !p->bye) {
            char text[TE__WHY_TEXT], who[TE__WHAT_TEXT];
            snprintf(text, sizeof text,
                     "%s is gone: its connection has ended without a goodbye (the process was "
                     "killed, or ended before te_group_destroy)",
                     te__facts_text(&p->facts, p->rank, who));
            s->seats[p->rank] = NULL;
            te__server_fail(s, p->rank, text);
        }
        te__server_drop(s, i);
    }
}

/* The rendezvous has taken too long: says who is missing, and what else has come. */
static void te__server_give_up(te__server *s) {
    te__text text = TE_ZERO;
    int i, told = 0, missing = 0;
    s->late = true;
    for (i = 0; i < s->size; i++) missing += !s->facts[i].size;
    te__text_printf(&text, "%d of %d ranks have come in time; missing:", s->size - missing, s->size);
    for (i = 0; i < s->size && told < 16; i++)
        if (!s->facts[i].size) te__text_printf(&text, "%s rank %d", told++ ? "," : "", i);
    if (told < missing) te__text_printf(&text, " and %d more", missing - told);
    if (s->liars)
        te__text_printf(&text, "; %d connection%s had another secret, the last one from %s", s->liars,
                        s->liars == 1 ? "" : "s", s->last_liar);
    if (s->strangers)
        te__text_printf(&text, "; %d connection%s did not speak as te.h does", s->strangers,
                        s->strangers == 1 ? "" : "s");
    te__server_fail(s, 0, te__text_str(&text));
    te__text_free(&text);
}

/* Returns whether a rank still listens, or will come and shall hear why it cannot join. */
static bool te__server_is_needed(const te__server *s) {
    int i;
    if (s->failed && !s->ready && !s->late && s->joined + s->refused < s->size) return true;
    for (i = 0; i < s->size; i++)
        if (s->seats[i] && !s->seats[i]->bye) return true;
    return false;
}

static void te__server_main(void *user) {
    te__server *s = (te__server *)user;
    double stop_at = 0;
    int i;
    for (;;) {
        te__link **links = (te__link **)calloc((size_t)s->num_peers + 1, sizeof *links);
        double now = te__time_now();
        const int n = s->num_peers;
        te__round *g, *next;
        te__link waker = TE_ZERO;
        bool comes, open = !s->ready && te__server_has_room(s, now);
        if (te__atomic_load(&s->stop) && stop_at == 0) stop_at = now + s->patience;
        if (stop_at != 0 && s->failed && stop_at > now + TE__LINGER_SECONDS) stop_at = now + TE__LINGER_SECONDS;
        if (stop_at != 0 && (now >= stop_at || !te__server_is_needed(s))) {
            free(links);
            break;
        }
        if (!links) {
            te__sleep(0.01);
            continue;
        }
        waker.fd = s->wake[0];
        waker.over = false;
        for (i = 0; i < n; i++) links[i] = &s->peers[i]->link;
        waker.limit = 1 << 20;
        links[n] = &waker;
        comes = te__links_run(links, n + 1, open ? s->listener : -1, 0.05);
        te__text_free(&waker.in);
        free(links);
        for (i = 0; i < n; i++) te__server_hear(s, s->peers[i]);
        if (comes) te__server_accept(s);
        now = te__time_now();
        te__server_sweep(s, now);
        for (g = s->rounds; g; g = next) {
            next = g->next;
            if (g->inquiry && now >= g->deadline) te__inquiry_end(s, g);
        }
        if (!s->ready && !s->failed && now >= s->deadline) te__server_give_up(s);
        if (s->ready) te__net_close(&s->listener); /* the port is free again, and nobody else comes in */
        for (i = 0; i < s->num_peers; i++) te__link_flush(&s->peers[i]->link);
    }
    te__server_tell(s, te__msg_of(TE__MSG_BYE, 0, 0, 0), NULL, 0);
    for (i = 0; i < s->num_peers; i++) {
        te__link_send_all(&s->peers[i]->link, te__time_now() + 0.2);
        te__link_end(&s->peers[i]->link);
    }
}

static void te__server_free(te__server *s) {
    te__round *g;
    if (!s) return;
    while ((g = s->rounds) != NULL) te__round_end(s, g);
    while (s->num_peers) te__server_drop(s, s->num_peers - 1);
    te__net_close(&s->listener);
    te__net_close(&s->wake[0]);
    te__net_close(&s->wake[1]);
    te__text_free(&s->secret);
    free(s->peers);
    free(s->seats);
    free(s->facts);
    free(s);
}
/* Ends the server: waits until no rank needs it, at most `patience` seconds. */
static void te__server_stop(te__server *s, double patience) {
    if (!s) return;
    s->patience = patience;
    te__atomic_store(&s->stop, 1);
    te__wake(s->wake[1]);
    te__thread_join(&s->thread);
    te__server_free(s);
}

/* Starts the server of `size` ranks, with a connection to rank 0 itself, in `own`. */
static te__server *te__server_start(int size, int version, const te__text *secret, int listener, double deadline,
                                    int *own, te__text *why) {
    te__server *s = (te__server *)calloc(1, sizeof *s);
    int pair[2] = {-1, -1};
    te__facts me;
    te__peer *p;
    bool fine = s != NULL, paired = false;
    *own = -1;
    if (fine) {
        s->size = size;
        s->version = version;
        s->listener = listener;
        s->deadline = deadline;
        s->wake[0] = s->wake[1] = -1;
        te__text_add(&s->secret, te__text_str(secret), secret->n);
        s->seats = (te__peer **)calloc((size_t)size, sizeof *s->seats);
        s->facts = (te__facts *)calloc((size_t)size, sizeof *s->facts);
        fine = s->seats && s->facts && !s->secret.oom && te__net_pair(s->wake);
        paired = fine && te__net_pair(pair);
    }
    p = paired ? te__server_add(s, pair[0], TE__MESSAGE_BYTES) : NULL; /* which closes it if it fails */
    if (p) {
        te__facts_fill(&me, 0, size, version);
        te__server_seat(s, p, 0, &me);
        fine = te__thread_start(&s->thread, te__server_main, s);
    }
    if (p && fine) {
        *own = pair[1];
        return s;
    }
    te__text_put(why, "rank 0 has no memory, sockets or threads for the ranks' rendezvous");
    if (!paired) te__net_close(&pair[0]);
    te__net_close(&pair[1]);
    if (s) te__server_free(s);
    else te__net_close(&listener);
    return NULL;
}

#endif
