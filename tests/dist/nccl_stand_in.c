/* tests/dist/nccl_stand_in.c: a library with the functions of libnccl that te.h calls, for the tests on machines
 * without GPUs. Ranks are processes or threads of one host; they exchange bytes in host memory, through a file that all
 * of them map. Every argument of every call is checked. A call that NCCL would refuse gets its error; one that would
 * corrupt memory or hang (a communicator that is gone, groups that do not end, a device pointer's stream) ends the
 * process with a line on stderr.
 *
 * This library cannot show: streams, captures and the order of kernels; the memory of GPUs; NCCL's order of sums over
 * more than two ranks, its algorithms and speed; its networks, and how NCCL itself notices a peer that is gone; that
 * several ranks may share a GPU; the bytes that NCCL's structs really have (te.h declares them itself). Those need a
 * GPU and NCCL.
 *
 * As in NCCL, a call of a communicator that blocks returns when it is through; where NCCL's would return with the kernel
 * queued, this one has computed. Of one that does not block, a call returns ncclInProgress (ncclCommSplit: ncclSuccess),
 * and goes on while ncclCommGetAsyncError is called. ncclCommAbort of another thread ends a call, or one that begins;
 * in a group, as in NCCL since 2.22, it leaves the communicator to that call until ncclGroupEnd. Numbers of 16 bits are
 * rounded after each addition, as in NCCL, in the order of the ranks, or in another one, as NCCL over more than two
 * ranks. ncclSend ends when its bytes have been received. An all-reduce in a group computes at once.
 *
 *     TE_NCCL_STAND_IN_DIR       where the mapped files lie; default /tmp
 *     TE_NCCL_STAND_IN_VERSION   what ncclGetVersion says; default 23207
 *     TE_NCCL_STAND_IN_ORDER     "ring": sums begin with the rank behind the one that gets them; all-reduces with rank 1
 *     TE_NCCL_STAND_IN_KILLS     "1 ncclCommSplit": rank 1 is killed in this call, while the others wait for it */
#define _GNU_SOURCE
#include "te_parts.h"
#include "base/common.h"
#include "base/numbers.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };
enum { U8 = 1, I32 = 2, I64 = 4, F16 = 6, F32 = 7, BF16 = 9, SUM = 0, MAXIMUM = 2, AVERAGE = 4 };
enum { MAX_SIZE = 16, SLOT = 1 << 20, PARCEL = 1 << 18, MAX_COMMS = 4096, MAX_P2P = 64 };

typedef enum kind { ALL_REDUCE = 1, ALL_GATHER, REDUCE_SCATTER, BROADCAST, SPLIT, P2P } kind;
static const char *const kind_names[] = {"?",
                                         "ncclAllReduce",
                                         "ncclAllGather",
                                         "ncclReduceScatter",
                                         "ncclBroadcast",
                                         "ncclCommSplit",
                                         "a group of ncclSend and ncclRecv"};

/* A rank's statement about its collective. */
typedef struct notice {
    int64_t kind, count, dtype, op, root, color, key;
} notice;
typedef struct seat {
    int64_t pid, gone;    /* of the rank's process, once it has joined; it has ended its communicator */
    int64_t posted, done; /* collectives whose bytes are in `data`; that have been read by this rank */
    notice is;
    char data[SLOT];
} seat;
typedef struct box {
    int64_t sent, received, count, dtype;
    char data[PARCEL];
} box;
/* The mapped file: this, then `size` seats, then size * size boxes, [from * size + to]. */
typedef struct shared {
    int64_t joined, size;
} shared;

typedef struct parcel {
    bool sends, done;
    const void *x;
    void *out;
    size_t count;
    int dtype, peer, step;
} parcel;

typedef struct ncclComm {
    int rank, size, result;
    enum { JOINING, READY, GONE } state;
    char path[112], text[512];
    shared *map;
    size_t bytes;
    int64_t number; /* collectives so far */
    bool busy;      /* a call goes on */
    bool blocks;    /* ncclConfig_t.blocking */
    bool aborted;   /* by ncclCommAbort in a group that has not ended */
    int inside;     /* calls that wait, each of another thread */
    int step;
    notice is;
    const void *x;
    void *out;
    struct ncclComm *part; /* of a split */
    parcel p2p[MAX_P2P];
    int num_p2p;
} comm;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static comm *comms[MAX_COMMS]; /* all that there have ever been: a pointer is never used again */
static int num_comms;
static char last_text[512];
static __thread int depth;
static __thread comm *grouped, *doomed; /* what ncclGroupEnd waits for; what it ends */

#ifndef STAND_IN_OF_GPUS       /* a test's copy that says that it takes the memory of GPUs alone, as NCCL does */
int te_nccl_takes_host_memory; /* te.h looks for the name */
#endif

static void misuse(const char *call, const char *what) {
    fprintf(stderr, "nccl_stand_in: %s: %s\n", call, what);
    _exit(97);
}
/* A program that ends in peace has ended its communicators. */
__attribute__((destructor)) static void look_back(void) {
    for (int i = 0; i < num_comms; i++)
        if (comms[i]->state != GONE)
            misuse("the end of the process", "a communicator was neither destroyed nor aborted");
}

static int refuse(comm *c, int code, const char *call, const char *what) {
    snprintf(last_text, sizeof last_text, "%s: %s", call, what);
    if (c) memcpy(c->text, last_text, sizeof c->text);
    return code;
}

static void perhaps_die(const char *call, int rank) {
    const char *text = getenv("TE_NCCL_STAND_IN_KILLS"), *name = text ? strchr(text, ' ') : NULL;
    if (!name || atoi(text) != rank || strcmp(name + 1, call)) return;
    usleep(30000); /* the others get there */
    kill(getpid(), SIGKILL);
}

static size_t size_of(int dtype) {
    return dtype == U8                     ? 1
           : dtype == F16 || dtype == BF16 ? 2
           : dtype == I32 || dtype == F32  ? 4
           : dtype == I64                  ? 8
                                           : 0;
}
static seat *seat_of(comm *c, int rank) { return (seat *)(c->map + 1) + rank; }
static box *box_of(comm *c, int from, int to) { return (box *)seat_of(c, c->size) + from * c->size + to; }
/* They lie at multiples of 8, where compilers of 32-bit machines need no library. */
typedef int64_t word __attribute__((aligned(8)));
static int64_t load(const int64_t *x) { return __atomic_load_n((const word *)x, __ATOMIC_ACQUIRE); }
static void store(int64_t *x, int64_t value) { __atomic_store_n((word *)x, value, __ATOMIC_RELEASE); }

/* ---- communicators ---- */

static comm *look_up(comm *c, const char *call) {
    int i = 0;
    while (i < num_comms && comms[i] != c) i++;
    if (i == num_comms) misuse(call, "this is no communicator");
    if (c->state == GONE) misuse(call, "the communicator has been destroyed or aborted");
    return c;
}

static comm *new_comm(int rank, int size, const char *path) {
    comm *c = (comm *)calloc(1, sizeof *c);
    if (!c || num_comms == MAX_COMMS) misuse("a new communicator", "too many of them");
    c->rank = rank;
    c->size = size;
    c->result = IN_PROGRESS;
    snprintf(c->path, sizeof c->path, "%s", path);
    comms[num_comms++] = c;
    return c;
}
/* Maps the file and joins. The last one to join takes the file's name away. */
static int join(comm *c) {
    c->bytes = sizeof(shared) + (size_t)c->size * sizeof(seat) + (size_t)(c->size * c->size) * sizeof(box);
    int fd = open(c->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)c->bytes) != 0) {
        if (fd >= 0) close(fd);
        return refuse(c, SYSTEM_ERROR, "joining", "the file cannot be made");
    }
    c->map = (shared *)mmap(NULL, c->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (c->map == MAP_FAILED) {
        c->map = NULL;
        return refuse(c, SYSTEM_ERROR, "joining", "the file cannot be mapped");
    }
    store(&seat_of(c, c->rank)->pid, getpid());
    if (__atomic_add_fetch((word *)&c->map->joined, 1, __ATOMIC_ACQ_REL) == c->size) unlink(c->path);
    return IN_PROGRESS;
}
static bool lives(int64_t pid) {
    char path[48], text[256] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    const char *state = strrchr(text, ')');
    return n > 0 && state && state[2] != 'Z'; /* killed, and its parent has not noticed */
}
/* NCCL's threads that serve the other ranks end when those have ended their communicators, or are gone; its caller waits
 * for them. */
static void end(comm *c) {
    int64_t pid;
    c->state = GONE;
    if (!c->map) return;
    store(&seat_of(c, c->rank)->gone, 1);
    pthread_mutex_unlock(&mutex);
    for (int i = 0; i < c->size; i++)
        while ((pid = load(&seat_of(c, i)->pid)) != 0 && !load(&seat_of(c, i)->gone) && lives(pid)) usleep(500);
    pthread_mutex_lock(&mutex);
    munmap(c->map, c->bytes);
    c->map = NULL;
}

static int version_number(void) {
    const char *text = getenv("TE_NCCL_STAND_IN_VERSION");
    return text ? atoi(text) : 23207;
}

/* te.h's idea of ncclConfig_t, which must say that it is NCCL's. */
typedef struct config {
    size_t size;
    unsigned magic, version;
    int blocking, rest[3];
    const char *net_name;
    int split_share;
} config;
static const char *bad_config(const config *f) {
    if (!f || f->size < sizeof *f || f->magic != 0xcafebeefu || f->version < 21800 || f->version > 29999)
        return "the configuration was not initialized";
    if (f->blocking != 0 && f->blocking != 1) return "a communicator blocks, or it does not";
    if (f->blocking && version_number() < 22200) return "ncclCommAbort frees the communicator of a call that waits";
    for (int i = 0; i < 3; i++)
        if (f->rest[i] != INT_MIN) return "the configuration has a field that te.h does not set";
    if (f->net_name || f->split_share != INT_MIN) return "the configuration has a field that te.h does not set";
    return NULL;
}

typedef struct unique_id {
    char bytes[128];
} unique_id;

int ncclGetVersion(int *version) {
    if (!version) return refuse(NULL, INVALID_ARGUMENT, "ncclGetVersion", "version is NULL");
    *version = version_number();
    return SUCCESS;
}
int ncclGetUniqueId(unique_id *id) {
    static int count;
    const char *dir = getenv("TE_NCCL_STAND_IN_DIR");
    if (!id) return refuse(NULL, INVALID_ARGUMENT, "ncclGetUniqueId", "id is NULL");
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "%.80s/nccl.%d.%d", dir ? dir : "/tmp", (int)getpid(),
             __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED));
    return SUCCESS;
}
const char *ncclGetErrorString(int code) {
    return code == SUCCESS            ? "no error"
           : code == SYSTEM_ERROR     ? "system error"
           : code == INTERNAL_ERROR   ? "internal error"
           : code == INVALID_ARGUMENT ? "invalid argument"
           : code == INVALID_USAGE    ? "invalid usage"
                                      : "in progress";
}
const char *ncclGetLastError(comm *c) { return c ? look_up(c, "ncclGetLastError")->text : last_text; }

int ncclCommInitRankConfig(comm **out, int size, unique_id id, int rank, config *f) {
    const char *call = "ncclCommInitRankConfig";
    const char *bad = !out                          ? "comm is NULL"
                      : size < 1 || size > MAX_SIZE ? "a number of ranks that the stand-in does not take"
                      : rank < 0 || rank >= size    ? "no such rank"
                                                    : bad_config(f);
    if (!bad && (id.bytes[127] || id.bytes[0] != '/')) bad = "the id is not one of ncclGetUniqueId's";
    if (bad) return refuse(NULL, INVALID_ARGUMENT, call, bad);
    if (!depth) misuse(call, "te.h calls it in a group, so that it has the communicator before it waits");
    perhaps_die(call, rank);
    pthread_mutex_lock(&mutex);
    comm *c = *out = new_comm(rank, size, id.bytes);
    c->blocks = f->blocking;
    c->result = join(c);
    grouped = c;
    pthread_mutex_unlock(&mutex);
    return SUCCESS;
}

/* NCCL writes the new communicator when a split has ended, in whatever way; its caller has to end it. */
static void give_part(comm *c) {
    if (c->busy && c->is.kind == SPLIT) *(comm **)c->out = c->part;
}
int ncclCommDestroy(comm *c) {
    pthread_mutex_lock(&mutex);
    look_up(c, "ncclCommDestroy");
    perhaps_die("ncclCommDestroy", c->rank);
    if (c->busy) misuse("ncclCommDestroy", "the communicator is busy");
    end(c);
    pthread_mutex_unlock(&mutex);
    return SUCCESS;
}

int ncclCommAbort(comm *c) {
    pthread_mutex_lock(&mutex);
    look_up(c, "ncclCommAbort");
    if (depth && version_number() >= 22200) {
        if (doomed) misuse("ncclCommAbort", "te.h ends one communicator in a group");
        c->aborted = true;
        doomed = c;
    } else {
        if (c->inside) misuse("ncclCommAbort", "it frees the communicator of a call that waits");
        give_part(c);
        end(c);
    }
    pthread_mutex_unlock(&mutex);
    return SUCCESS;
}

/* ---- arithmetic ---- */

static float get(const void *x, int dtype, size_t i) {
    uint16_t half;
    float f;
    if (dtype == F32) {
        memcpy(&f, (const char *)x + 4 * i, 4);
        return f;
    }
    memcpy(&half, (const char *)x + 2 * i, 2);
    return dtype == F16 ? te__f16_to_f32(half) : te__bf16_to_f32(half);
}
static void put(void *x, int dtype, size_t i, float f) {
    uint16_t half = dtype == F16 ? te__f32_to_f16(f) : te__f32_to_bf16(f);
    if (dtype == F32) memcpy((char *)x + 4 * i, &f, 4);
    else memcpy((char *)x + 2 * i, &half, 2);
}
static void combine(void *sum, const void *x, int dtype, int op, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (dtype == U8) {
            uint8_t *a = (uint8_t *)sum + i, b = ((const uint8_t *)x)[i];
            *a = op == MAXIMUM ? (*a > b ? *a : b) : (uint8_t)(*a + b);
        } else if (dtype == I32) {
            int32_t a, b;
            memcpy(&a, (char *)sum + 4 * i, 4);
            memcpy(&b, (const char *)x + 4 * i, 4);
            a = op == MAXIMUM ? (a > b ? a : b) : (int32_t)((uint32_t)a + (uint32_t)b);
            memcpy((char *)sum + 4 * i, &a, 4);
        } else if (dtype == I64) {
            int64_t a, b;
            memcpy(&a, (char *)sum + 8 * i, 8);
            memcpy(&b, (const char *)x + 8 * i, 8);
            a = op == MAXIMUM ? (a > b ? a : b) : (int64_t)((uint64_t)a + (uint64_t)b);
            memcpy((char *)sum + 8 * i, &a, 8);
        } else {
            float a = get(sum, dtype, i), b = get(x, dtype, i);
            put(sum, dtype, i, op != MAXIMUM ? a + b : isnan(a) || b > a ? b : a);
        }
    }
}

/* ---- progress ---- */

static void finish(comm *c, int result) {
    give_part(c);
    c->busy = false;
    c->result = result;
    c->num_p2p = 0;
}

/* Numbers of this rank that the others read, in elements. */
static size_t posted_count(const comm *c) {
    size_t n = (size_t)c->is.count;
    if (c->is.kind == REDUCE_SCATTER) return n * (size_t)c->size;
    return c->is.kind == SPLIT || (c->is.kind == BROADCAST && c->is.root != c->rank) ? 0 : n;
}

static void split_now(comm *c) {
    comm *part = c->part;
    int rank = 0, size = 0;
    for (int i = 0; i < c->size; i++) {
        const notice *n = &seat_of(c, i)->is;
        if (n->color != c->is.color) continue;
        size++;
        rank += n->key < c->is.key || (n->key == c->is.key && i < c->rank);
    }
    if (!part) return;
    part->rank = rank;
    part->size = size;
    snprintf(part->path, sizeof part->path, "%.80s-%d-%d", c->path, (int)c->number, (int)c->is.color);
    part->result = join(part);
}
static void compute(comm *c) {
    size_t n = (size_t)c->is.count, bytes = n * size_of((int)c->is.dtype),
           at = c->is.kind == REDUCE_SCATTER ? bytes * (size_t)c->rank : 0;
    const int first = !getenv("TE_NCCL_STAND_IN_ORDER") ? 0 : c->is.kind == REDUCE_SCATTER ? c->rank + 1 : 1;
    if (c->is.kind == SPLIT) split_now(c);
    if (c->is.kind == BROADCAST) memmove(c->out, seat_of(c, (int)c->is.root)->data, bytes);
    for (int i = 0; c->is.kind == ALL_GATHER && i < c->size; i++)
        memmove((char *)c->out + bytes * (size_t)i, seat_of(c, i)->data, bytes);
    if (c->is.kind != ALL_REDUCE && c->is.kind != REDUCE_SCATTER) return;
    memcpy(c->out, seat_of(c, first % c->size)->data + at, bytes);
    for (int i = 1; i < c->size; i++)
        combine(c->out, seat_of(c, (first + i) % c->size)->data + at, (int)c->is.dtype, (int)c->is.op, n);
}

static void go_on(comm *c) {
    int i;
    if (c->state == JOINING) {
        if (!c->map || load(&c->map->joined) < c->size) return;
        c->state = READY;
        c->result = SUCCESS;
        return;
    }
    if (!c->busy) return;
    if (c->step == 0) {
        for (i = 0; i < c->size; i++)
            if (load(&seat_of(c, i)->done) < c->number - 1) return;
        seat *mine = seat_of(c, c->rank);
        mine->is = c->is;
        size_t bytes = posted_count(c) * size_of((int)c->is.dtype);
        if (bytes) memcpy(mine->data, c->x, bytes);
        for (size_t k = 0; c->is.op == AVERAGE && k < (size_t)c->is.count; k++) /* as NCCL does, before it adds */
            put(mine->data, (int)c->is.dtype, k, get(mine->data, (int)c->is.dtype, k) / (float)c->size);
        store(&mine->posted, c->number);
        c->step = 1;
    }
    for (i = 0; i < c->size; i++)
        if (load(&seat_of(c, i)->posted) < c->number) return;
    for (i = 0; i < c->size; i++) {
        notice a = c->is, b = seat_of(c, i)->is;
        char text[256];
        b.color = a.color, b.key = a.key;
        if (!memcmp(&a, &b, sizeof a)) continue;
        snprintf(text, sizeof text, "rank %d calls %s of %d elements of format %d and this rank %s of %d of format %d",
                 i, kind_names[b.kind], (int)b.count, (int)b.dtype, kind_names[a.kind], (int)a.count, (int)a.dtype);
        store(&seat_of(c, c->rank)->done, c->number);
        finish(c, refuse(c, INVALID_USAGE, kind_names[c->is.kind], text));
        return;
    }
    compute(c);
    store(&seat_of(c, c->rank)->done, c->number);
    finish(c, SUCCESS);
}

/* Each peer's parcels go in their order, those of different peers in any. */
static void go_on_p2p(comm *c) {
    int left = 0;
    for (int i = 0; i < c->num_p2p; i++) {
        parcel *p = &c->p2p[i];
        bool first = true;
        for (int k = 0; k < i; k++)
            first = first && (c->p2p[k].done || c->p2p[k].sends != p->sends || c->p2p[k].peer != p->peer);
        box *b = p->sends ? box_of(c, c->rank, p->peer) : box_of(c, p->peer, c->rank);
        int64_t sent = load(&b->sent), received = load(&b->received);
        if (!p->done && first && p->sends && p->step == 0 && sent == received) {
            b->count = (int64_t)p->count;
            b->dtype = p->dtype;
            memcpy(b->data, p->x, p->count * size_of(p->dtype));
            store(&b->sent, sent + 1);
            p->step = 1;
        } else if (!p->done && first && p->sends && p->step == 1 && sent == received) {
            p->done = true;
        } else if (!p->done && first && !p->sends && sent > received) {
            if (b->count != (int64_t)p->count || b->dtype != p->dtype) {
                char text[128];
                snprintf(text, sizeof text, "rank %d sends %d elements and this rank receives %d", p->peer,
                         (int)b->count, (int)p->count);
                store(&b->received, received + 1);
                finish(c, refuse(c, INVALID_USAGE, "ncclRecv", text));
                return;
            }
            memcpy(p->out, b->data, p->count * size_of(p->dtype));
            store(&b->received, received + 1);
            p->done = true;
        }
        left += !p->done;
    }
    if (left == 0) finish(c, SUCCESS);
}

static void progress(comm *c) {
    if (c->is.kind == P2P && c->busy) go_on_p2p(c);
    else go_on(c);
}
/* Ends a call of c that has begun, and returns its result. `r`: the result of its beginning. If that is IN_PROGRESS and
 * c blocks, waits until all ranks of `of` have joined: c itself, or the part that a split makes. An abort of c ends the
 * wait. The caller holds the mutex. */
static int through(comm *c, comm *of, int r) {
    if (!c->blocks || r != IN_PROGRESS) return r;
    c->inside++;
    for (;;) {
        if (!c->aborted) progress(of);
        if (c->aborted || of->result != IN_PROGRESS) break;
        pthread_mutex_unlock(&mutex);
        usleep(20);
        pthread_mutex_lock(&mutex);
    }
    c->inside--;
    if (!c->aborted) return of->result;
    give_part(c);
    c->busy = false;
    return INTERNAL_ERROR;
}

int ncclCommGetAsyncError(comm *c, int *error) {
    if (!error) return refuse(NULL, INVALID_ARGUMENT, "ncclCommGetAsyncError", "error is NULL");
    pthread_mutex_lock(&mutex);
    look_up(c, "ncclCommGetAsyncError");
    if (!c->aborted) progress(c);
    *error = c->result;
    pthread_mutex_unlock(&mutex);
    return SUCCESS;
}

/* ---- calls ---- */

static bool apart(const void *a, size_t n, const void *b, size_t m) {
    return (const char *)a + n <= (const char *)b || (const char *)b + m <= (const char *)a;
}

static int begin(comm *c, notice n, const void *x, size_t x_count, void *out, size_t out_count, size_t own_at,
                 void *stream) {
    const char *call = kind_names[n.kind];
    size_t size = size_of((int)n.dtype), x_bytes = x_count * size, out_bytes = out_count * size;
    const char *bad = NULL;
    pthread_mutex_lock(&mutex);
    look_up(c, call);
    perhaps_die(call, c->rank);
    if (stream) misuse(call, "the stand-in has no streams");
    if (depth && (n.kind != ALL_REDUCE || !c->blocks)) misuse(call, "of collectives, te.h puts all-reduces alone in groups");
    if (c->busy || c->state != READY) misuse(call, "the communicator is busy");
    if (!size) bad = "a format that te.h does not use";
    else if (n.count <= 0) bad = "no elements: te.h does not call NCCL for them";
    else if (x_bytes > SLOT || out_bytes > (size_t)SLOT * MAX_SIZE) bad = "the stand-in takes a megabyte at most";
    else if (n.op != SUM && n.op != MAXIMUM && n.op != AVERAGE) bad = "neither sum, maximum nor average";
    else if (n.op == AVERAGE && (n.kind != ALL_REDUCE || (n.dtype != F32 && n.dtype != BF16))) bad = "an average that te.h does not ask for";
    else if (n.root < 0 || n.root >= c->size) bad = "no such root";
    else if (!x || !out) bad = "a pointer is NULL";
    else if (!apart(x, x_bytes, out, out_bytes) &&
             (n.kind == REDUCE_SCATTER ? (const char *)x + own_at * size != out : (char *)out + own_at * size != x))
        bad = "the input overlaps with the output, and is not in place";
    int r = IN_PROGRESS;
    if (bad || c->aborted) {
        r = bad ? refuse(c, INVALID_ARGUMENT, call, bad) : INTERNAL_ERROR;
    } else {
        c->is = n;
        c->x = x;
        c->out = out;
        c->number++;
        c->step = 0;
        c->busy = true;
        c->result = r;
        r = through(c, c, r);
    }
    pthread_mutex_unlock(&mutex);
    return r;
}

int ncclAllReduce(const void *x, void *out, size_t count, int dtype, int op, comm *c, void *stream) {
    notice n = {ALL_REDUCE, (int64_t)count, dtype, op, 0, 0, 0};
    return begin(c, n, x, count, out, count, 0, stream);
}
int ncclAllGather(const void *x, void *out, size_t count, int dtype, comm *c, void *stream) {
    notice n = {ALL_GATHER, (int64_t)count, dtype, 0, 0, 0, 0};
    return begin(c, n, x, count, out, count * (size_t)c->size, count * (size_t)c->rank, stream);
}
int ncclReduceScatter(const void *x, void *out, size_t count, int dtype, int op, comm *c, void *stream) {
    notice n = {REDUCE_SCATTER, (int64_t)count, dtype, op, 0, 0, 0};
    return begin(c, n, x, count * (size_t)c->size, out, count, count * (size_t)c->rank, stream);
}
int ncclBroadcast(const void *x, void *out, size_t count, int dtype, int root, comm *c, void *stream) {
    notice n = {BROADCAST, (int64_t)count, dtype, 0, root, 0, 0};
    return begin(c, n, x, count, out, count, 0, stream);
}

int ncclCommSplit(comm *c, int color, int key, comm **out, config *f) {
    const char *call = "ncclCommSplit", *bad = !out         ? "newcomm is NULL"
                                               : color < -1 ? "a negative color"
                                                            : bad_config(f);
    pthread_mutex_lock(&mutex);
    look_up(c, call);
    perhaps_die(call, c->rank);
    if (c->busy || c->state != READY || depth) misuse(call, "the communicator is busy");
    int r = IN_PROGRESS;
    if (bad || c->aborted) {
        r = bad ? refuse(c, INVALID_ARGUMENT, call, bad) : INTERNAL_ERROR;
    } else {
        notice n = {SPLIT, 0, 0, 0, 0, color, key};
        *out = NULL;
        c->out = out;
        comm *part = c->part = color < 0 ? NULL : new_comm(0, 1, "");
        if (part) part->blocks = f->blocking;
        c->is = n;
        c->number++;
        c->step = 0;
        c->busy = true;
        c->result = r;
        r = through(c, c, r);
        if (r == SUCCESS && part) r = through(c, part, IN_PROGRESS);
        if (r == IN_PROGRESS) r = SUCCESS; /* as NCCL returns it, 2.32 too */
    }
    pthread_mutex_unlock(&mutex);
    return r;
}

static int send_or_receive(comm *c, parcel p, const char *call, void *stream) {
    pthread_mutex_lock(&mutex);
    look_up(c, call);
    const char *bad = !size_of(p.dtype)                     ? "a format that te.h does not use"
                      : p.count == 0                        ? "no elements: te.h does not call NCCL for them"
                      : p.count * size_of(p.dtype) > PARCEL ? "the stand-in takes a quarter of a megabyte at most"
                      : p.peer < 0 || p.peer >= c->size     ? "no such rank"
                      : (p.sends ? !p.x : !p.out)           ? "a pointer is NULL"
                                                            : NULL;
    if (stream) misuse(call, "the stand-in has no streams");
    if (c->busy || c->state != READY) misuse(call, "the communicator is busy");
    if (!bad && !depth && p.peer == c->rank) bad = "a rank that sends to itself outside of a group waits for ever";
    if (!bad && c->num_p2p == MAX_P2P) bad = "too many of them in a group";
    if (!bad && grouped && grouped != c) bad = "two communicators in a group";
    int r = IN_PROGRESS;
    if (bad || c->aborted) {
        r = bad ? refuse(c, INVALID_ARGUMENT, call, bad) : INTERNAL_ERROR;
        c->num_p2p = 0;
    } else {
        c->p2p[c->num_p2p++] = p;
        c->is.kind = P2P;
        c->result = r;
        c->busy = !depth;
        if (depth) grouped = c, r = SUCCESS;
        else r = through(c, c, r);
    }
    pthread_mutex_unlock(&mutex);
    return r;
}
int ncclSend(const void *x, size_t count, int dtype, int to, comm *c, void *stream) {
    parcel p = {true, false, x, NULL, count, dtype, to, 0};
    return send_or_receive(c, p, "ncclSend", stream);
}
int ncclRecv(void *x, size_t count, int dtype, int from, comm *c, void *stream) {
    parcel p = {false, false, NULL, x, count, dtype, from, 0};
    return send_or_receive(c, p, "ncclRecv", stream);
}

int ncclGroupStart(void) {
    if (depth++) misuse("ncclGroupStart", "te.h does not nest groups");
    return SUCCESS;
}
int ncclGroupEnd(void) {
    if (depth-- != 1) misuse("ncclGroupEnd", "no group has begun");
    comm *c = grouped, *last = doomed;
    int r = SUCCESS;
    grouped = doomed = NULL;
    pthread_mutex_lock(&mutex);
    if (c) {
        look_up(c, "ncclGroupEnd");
        c->busy = c->num_p2p > 0;
        r = c->busy || c->state == JOINING ? through(c, c, c->result) : SUCCESS;
    }
    if (last) {
        if (last->inside) misuse("ncclGroupEnd", "it frees the communicator of a call that waits");
        end(last);
    }
    pthread_mutex_unlock(&mutex);
    return r;
}
