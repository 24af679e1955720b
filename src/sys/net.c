/* sys/net.c: sockets over TCP, and messages over them. No call waits without a deadline, and none raises SIGPIPE. This
 * file must not depend on what messages say. Windows has none of it: process groups are refused there. */

#ifndef _WIN32

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#ifndef AI_NUMERICSERV
/* The C library has hidden these names, as in sys/sys.c. The layout is Linux's. */
struct addrinfo {
    int ai_flags, ai_family, ai_socktype, ai_protocol;
    socklen_t ai_addrlen;
    struct sockaddr *ai_addr;
    char *ai_canonname;
    struct addrinfo *ai_next;
};
extern int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found);
extern void freeaddrinfo(struct addrinfo *found);
#endif
#ifdef MSG_NOSIGNAL
#define TE__NO_SIGNAL MSG_NOSIGNAL
#else
#define TE__NO_SIGNAL 0
#endif

enum { TE__PEER_TEXT = 64 };

/* The sockets of this process, a bit each. A child by fork closes its copies: else the other ranks would not see the
 * connections of a killed process end while a child of it lives. */
static TE_MAYBE_UNUSED uint8_t te__net_sockets[(1 << 16) / 8];
static TE_MAYBE_UNUSED te__mutex te__net_mutex = TE__MUTEX_INIT;

static inline void te__net_note(int fd, bool open) {
    const int bit = 1 << (fd & 7);
    if (fd < 0 || fd / 8 >= (int)sizeof te__net_sockets) return;
    te__mutex_lock(&te__net_mutex);
    te__net_sockets[fd / 8] = (uint8_t)(open ? te__net_sockets[fd / 8] | bit : te__net_sockets[fd / 8] & ~bit);
    te__mutex_unlock(&te__net_mutex);
}
static void te__net_leave_child(void) { /* without the mutex: a thread that is gone may hold it */
    int fd;
    for (fd = 0; fd < 8 * (int)sizeof te__net_sockets; fd++)
        if (te__net_sockets[fd / 8] >> (fd & 7) & 1) close(fd);
    memset(te__net_sockets, 0, sizeof te__net_sockets);
    te__mutex_init(&te__net_mutex);
}
static void te__net_watch_forks(void) { pthread_atfork(NULL, NULL, te__net_leave_child); }

static inline void te__net_close(int *fd) {
    te__net_note(*fd, false);
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

/* Finds the end of a machine that has lost its power within two minutes; systems' own choice is two hours. */
static inline void te__net_keep_asking(int fd) {
    int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
#if defined(TCP_KEEPIDLE) && defined(TCP_KEEPINTVL) && defined(TCP_KEEPCNT)
    {
        int idle = 60, pause = 10, count = 6;
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &pause, sizeof pause);
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
    }
#endif
}

/* Makes a socket non-blocking, without SIGPIPE, closed by exec, and quick with small messages. */
static inline bool te__net_prepare(int fd) {
    static te__once once = TE__ONCE_INIT;
    int on = 1, flags = fcntl(fd, F_GETFL, 0);
    te__once_run(&once, te__net_watch_forks);
    te__net_note(fd, true);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* fails for pairs, which need it not */
#ifdef SO_NOSIGPIPE
    setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
#endif
    te__net_keep_asking(fd);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    return flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0;
}

static inline void te__net_address_text(const struct sockaddr_storage *a, char text[TE__PEER_TEXT]) {
    const void *ip = a->ss_family == AF_INET6 ? (const void *)&((const struct sockaddr_in6 *)a)->sin6_addr
                                              : (const void *)&((const struct sockaddr_in *)a)->sin_addr;
    if (!inet_ntop(a->ss_family, ip, text, TE__PEER_TEXT)) snprintf(text, TE__PEER_TEXT, "an unknown address");
}

/* Listens on `*port` (0: on a free one, which `*port` receives) of every address, or of 127.0.0.1 alone. Returns -1
 * with the reason in `why`. */
static inline int te__net_listen(bool loopback, int *port, te__text *why) {
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    int fd = -1, on = 1, off = 0, family;
    uint32_t address;
    /* a socket of IPv6 takes both kinds; machines without IPv6 take the other */
    for (family = loopback ? AF_INET : AF_INET6; fd < 0; family = AF_INET) {
        fd = socket(family, SOCK_STREAM, 0);
        if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        memset(&a, 0, sizeof a);
        a.ss_family = (sa_family_t)family;
        if (family == AF_INET6) {
            if (fd >= 0) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
            ((struct sockaddr_in6 *)&a)->sin6_port = htons((uint16_t)*port);
            n = sizeof(struct sockaddr_in6);
        } else {
            ((struct sockaddr_in *)&a)->sin_port = htons((uint16_t)*port);
            address = htonl(loopback ? INADDR_LOOPBACK : INADDR_ANY);
            memcpy(&((struct sockaddr_in *)&a)->sin_addr, &address, sizeof address);
            n = sizeof(struct sockaddr_in);
        }
        if (fd >= 0 && te__net_prepare(fd) && bind(fd, (struct sockaddr *)&a, n) == 0 && listen(fd, SOMAXCONN) == 0)
            break;
        if (family == AF_INET || errno == EADDRINUSE || errno == EACCES) {
            te__text_printf(why, "cannot listen on port %d of %s: ", *port, loopback ? "127.0.0.1" : "this machine");
            te__text_os_error(why);
            te__net_close(&fd);
            return -1;
        }
        te__net_close(&fd);
    }
    n = sizeof a;
    if (getsockname(fd, (struct sockaddr *)&a, &n) == 0)
        *port = ntohs(a.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&a)->sin6_port
                                              : ((struct sockaddr_in *)&a)->sin_port);
    return fd;
}

/* Returns a connection that waits at a listening socket, or -1. `peer` receives its address. */
static inline int te__net_accept(int listener, char peer[TE__PEER_TEXT]) {
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    int fd = accept(listener, (struct sockaddr *)&a, &n);
    if (fd < 0) return -1;
    te__net_address_text(&a, peer);
    if (!te__net_prepare(fd)) te__net_close(&fd);
    return fd;
}

/* Waits until a socket can be read, or written, or `deadline` (te__time_now) has come. */
static inline bool te__net_wait_one(int fd, bool write, double deadline) {
    for (;;) {
        struct pollfd p;
        double left = deadline - te__time_now();
        int n;
        p.fd = fd;
        p.events = (short)(write ? POLLOUT : POLLIN);
        p.revents = 0;
        n = poll(&p, 1, left <= 0 ? 0 : left > 60 ? 60000 : (int)(left * 1e3) + 1);
        if (n > 0) return true;
        if ((n < 0 && errno != EINTR) || left <= 0) return false;
    }
}

static inline int te__net_connect_to(const struct addrinfo *to, double deadline) {
    int fd = socket(to->ai_family, SOCK_STREAM, 0), error = 0;
    socklen_t n = sizeof error;
    if (fd < 0) return -1;
    if (te__net_prepare(fd)) {
        if (connect(fd, to->ai_addr, to->ai_addrlen) == 0) return fd;
        if (errno == EINPROGRESS || errno == EINTR) {
            if (!te__net_wait_one(fd, true, deadline)) error = ETIMEDOUT;
            else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &n) != 0) error = errno;
            if (error == 0) return fd;
            errno = error;
        }
    }
    error = errno;
    te__net_close(&fd);
    errno = error;
    return -1;
}
#define TE__CONNECT_SECONDS 5.0

/* Connects to the first address that answers. All but the last one have `seconds` for that: nothing may answer there,
 * not even to refuse. Returns -1 with the reason in errno. */
static inline int te__net_connect_any(const struct addrinfo *a, double seconds, double deadline) {
    int fd = -1;
    for (; a && fd < 0; a = a->ai_next) {
        const double soon = te__time_now() + seconds;
        fd = te__net_connect_to(a, a->ai_next && soon < deadline ? soon : deadline);
    }
    return fd;
}
/* Connects to a port of a host: its name, or an address of IPv4 or IPv6. Returns -1, with the reason in `why`. */
static inline int te__net_connect(const char *host, int port, double deadline, te__text *why) {
    struct addrinfo hints, *found = NULL;
    char service[16];
    int fd, code;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    snprintf(service, sizeof service, "%d", port);
    code = getaddrinfo(host, service, &hints, &found);
    if (code != 0) {
        te__text_printf(why, "the host \"%s\" is not found (getaddrinfo: %d)", host, code);
        return -1;
    }
    fd = te__net_connect_any(found, TE__CONNECT_SECONDS, deadline);
    if (fd < 0) {
        te__text_printf(why, "cannot connect to port %d of %s: ", port, host);
        te__text_os_error(why);
    }
    freeaddrinfo(found);
    return fd;
}

/* Makes two sockets that are connected to each other. */
static inline bool te__net_pair(int fd[2]) {
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, fd) != 0) {
        fd[0] = fd[1] = -1;
        return false;
    }
    return te__net_prepare(fd[0]) && te__net_prepare(fd[1]);
}

/* Returns whether a host's name or address is that of the loopback interface. */
static inline bool te__net_is_loopback(const char *host) {
    struct in_addr address; /* not of names such as 127.example.com */
    return (te__starts_with(host, "127.") && inet_pton(AF_INET, host, &address) == 1) || !strcmp(host, "localhost") ||
           !strcmp(host, "::1");
}

static inline void te__host_name(char *name, size_t cap) {
    struct utsname system;
    bool named = uname(&system) >= 0 && system.nodename[0];
    snprintf(name, cap, "%.*s", (int)cap - 1, named ? system.nodename : "localhost");
}

/* Fills `out` with bytes that nobody can guess. */
static inline bool te__random_bytes(void *out, size_t n) {
    uint8_t *p = (uint8_t *)out;
    int fd = open("/dev/urandom", O_RDONLY | TE__O_CLOEXEC);
    while (fd >= 0 && n > 0) {
        ssize_t got = read(fd, p, n);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) break;
        p += got;
        n -= (size_t)got;
    }
    if (fd >= 0) close(fd);
    return n == 0;
}

/* Reads a file that holds a secret: the user's own, and of mode 0600, so that nobody else has read it. It asks the open
 * file, since another file may have its path a moment later. */
static inline bool te__secret_read(const char *path, size_t limit, te__text *into, te__text *why) {
    te__file f;
    struct stat st;
    bool fine = false;
    if (!te__file_open(&f, path, why)) return false;
    if (fstat(f.fd, &st) != 0) {
        te__file_complain(why, "open", path);
    } else if ((int64_t)st.st_uid != te__user_id() || (st.st_mode & 07777) != 0600) {
        te__text_printf(why, "%s holds a secret, and %s; it must be yours and of mode 0600 (chmod 600)", path,
                        (int64_t)st.st_uid != te__user_id() ? "belongs to another user" : "others may read it");
        if ((st.st_mode & 07777) != 0600) te__text_printf(why, ", not 0%o", (unsigned)(st.st_mode & 07777));
    } else {
        fine = te__file_read_all(&f, limit, into, why);
    }
    te__file_close(&f);
    return fine;
}
/* Writes such a file. It appears at once and whole. */
static inline bool te__secret_write(const char *path, const void *data, size_t n, te__text *why) {
    te__text temp = TE_ZERO;
    bool fine = false;
    int fd;
    te__text_printf(&temp, "%s.%lld.tmp", path, (long long)te__process_id());
    unlink(te__text_str(&temp));
    fd = open(te__text_str(&temp), O_WRONLY | O_CREAT | O_EXCL | TE__O_CLOEXEC, 0600);
    if (fd >= 0) {
        fine = write(fd, data, n) == (ssize_t)n && fsync(fd) == 0;
        fine = close(fd) == 0 && fine;
        fine = fine && rename(te__text_str(&temp), path) == 0;
    }
    if (!fine) te__file_complain(why, "write", path);
    if (!fine && fd >= 0) unlink(te__text_str(&temp));
    te__text_free(&temp);
    return fine;
}

/* ---- links: messages over a socket ---- */

/* A connection with what has arrived and what is to be sent. A message is 4 bytes of length, then that many bytes. */
typedef struct te__link {
    int fd;       /* -1: none */
    bool over;    /* the connection has ended, or broken the rules; what has arrived may still be taken */
    bool deaf;    /* the other end takes no more; its last messages may still be unread, and its end follows them */
    size_t limit; /* the longest message that is accepted */
    size_t taken; /* bytes at the front of `in` that belong to messages already taken */
    te__text in, out;
    char peer[TE__PEER_TEXT];
} te__link;

static inline void te__link_open(te__link *l, int fd, size_t limit) {
    memset(l, 0, sizeof *l);
    l->fd = fd;
    l->limit = limit;
}
static inline void te__link_close(te__link *l) {
    te__net_close(&l->fd);
    te__text_free(&l->in);
    te__text_free(&l->out);
    l->over = true;
}

/* Queues a message. */
static inline void te__link_put(te__link *l, const void *head, size_t head_bytes, const void *body, size_t bytes) {
    uint32_t n = (uint32_t)(head_bytes + bytes);
    if (l->over || l->deaf) return;
    te__text_add(&l->out, (const char *)&n, 4);
    te__text_add(&l->out, (const char *)head, head_bytes);
    te__text_add(&l->out, (const char *)body, bytes);
    if (l->out.oom) l->over = true;
}
/* Sends what can be sent now. */
static inline void te__link_flush(te__link *l) {
    size_t at = 0;
    while (!l->over && at < l->out.n) {
        ssize_t n = send(l->fd, l->out.s + at, l->out.n - at, TE__NO_SIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
        if (n > 0) {
            at += (size_t)n;
            continue;
        }
        if (n < 0 && (errno == EPIPE || errno == ECONNRESET)) l->deaf = true;
        else l->over = true;
        at = l->out.n;
    }
    if (at == 0) return;
    memmove(l->out.s, l->out.s + at, l->out.n - at);
    l->out.n -= at;
}
/* Receives what has arrived. */
static inline void te__link_fill(te__link *l) {
    enum { CHUNK = 1 << 16 };
    while (!l->over && te__text_reserve(&l->in, CHUNK)) {
        ssize_t n = recv(l->fd, l->in.s + l->in.n, CHUNK, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (n <= 0) {
            l->over = true;
            return;
        }
        l->in.n += (size_t)n;
        if (n < CHUNK || l->in.n > l->limit) return;
    }
    l->over = true;
}
/* Returns the next whole message and its length, or NULL. It stays until the next te__link_fill. A message that is too
 * long ends the link. */
static inline const uint8_t *te__link_take(te__link *l, size_t *bytes) {
    const uint8_t *p;
    uint32_t n;
    if (l->in.n - l->taken < 4) {
        if (l->taken) memmove(l->in.s, l->in.s + l->taken, l->in.n - l->taken);
        l->in.n -= l->taken;
        l->taken = 0;
        return NULL;
    }
    p = (const uint8_t *)l->in.s + l->taken;
    memcpy(&n, p, 4);
    if (n > l->limit) {
        l->over = true;
        l->in.n = l->taken = 0;
        return NULL;
    }
    if (l->in.n - l->taken < 4 + (size_t)n) {
        memmove(l->in.s, l->in.s + l->taken, l->in.n - l->taken);
        l->in.n -= l->taken;
        l->taken = 0;
        return NULL;
    }
    l->taken += 4 + (size_t)n;
    *bytes = n;
    return p + 4;
}
/* Sends the whole queue before `deadline`. */
static inline bool te__link_send_all(te__link *l, double deadline) {
    te__link_flush(l);
    while (!l->over && l->out.n > 0 && te__net_wait_one(l->fd, true, deadline)) te__link_flush(l);
    return !l->over && !l->deaf && l->out.n == 0;
}
/* Waits for a whole message. Returns NULL if the connection ends or `deadline` comes. */
static inline const uint8_t *te__link_wait(te__link *l, size_t *bytes, double deadline) {
    for (;;) {
        const uint8_t *p = te__link_take(l, bytes);
        if (p || l->over || !te__net_wait_one(l->fd, false, deadline)) return p;
        te__link_fill(l);
    }
}

/* Says that nothing more will be sent; the other end reads what is under way, then the end. */
static inline void te__link_end(te__link *l) {
    if (l->fd >= 0) shutdown(l->fd, SHUT_WR);
}

/* Waits until one of the links, or `fd`, has something to do, at most `seconds`, and does it: sends and receives. The
 * result tells whether `fd` (-1: none) can be read. NULL links are skipped. */
static inline bool te__links_run(te__link *const *links, int count, int fd, double seconds) {
    struct pollfd *p = (struct pollfd *)calloc((size_t)count + 1, sizeof *p);
    bool ready = false;
    int i, n;
    if (!p) {
        te__sleep(0.01);
        return false;
    }
    for (i = 0; i < count; i++) {
        p[i].fd = links[i] && !links[i]->over ? links[i]->fd : -1;
        p[i].events = (short)(POLLIN | (links[i] && links[i]->out.n ? POLLOUT : 0));
    }
    p[count].fd = fd;
    p[count].events = POLLIN;
    n = poll(p, (nfds_t)count + 1, (int)(seconds * 1e3) + 1);
    for (i = 0; n > 0 && i < count; i++) {
        if (p[i].revents & POLLOUT) te__link_flush(links[i]);
        if (p[i].revents & (POLLIN | POLLHUP | POLLERR | POLLNVAL)) te__link_fill(links[i]);
    }
    ready = n > 0 && p[count].revents != 0;
    free(p);
    return ready;
}

/* ---- waking a thread that waits in te__links_run ---- */

static inline void te__wake(int fd) {
    ssize_t n = send(fd, "w", 1, TE__NO_SIGNAL); /* a full socket wakes as well */
    (void)n;
}
static inline void te__wake_taken(int fd) {
    char bytes[256];
    while (recv(fd, bytes, sizeof bytes, 0) > 0) {}
}

#endif
