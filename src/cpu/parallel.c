/* cpu/parallel.c: a parallel for loop over worker threads. This file must not depend on tensors. The results of a loop
 * must not depend on how its range is split. So no call of the loop's te__range_fn may write what another call reads or
 * writes. */

typedef void (*te__range_fn)(void *user, int64_t begin, int64_t end);

/* The worker threads of a context. One job runs at a time. The threads take ranges of the job from a shared counter. */
struct te__threads {
    te__mutex mutex;
    te__cond work, done;
    te__thread *thread;
    int num_threads; /* without the calling thread */
    uint64_t job;    /* counts jobs: a thread that sees a new number has work */
    int busy;        /* threads that have not finished the current job */
    bool quit;
    te__range_fn fn;
    void *user;
    int64_t n, piece;
    TE__ALIGNED(8) int64_t next; /* atomic */
};

static void te__threads_work(te__threads *t) {
    for (;;) {
        int64_t begin = te__atomic_add(&t->next, t->piece), end;
        if (begin >= t->n) return;
        end = te__min(begin + t->piece, t->n);
        t->fn(t->user, begin, end);
    }
}

static void te__threads_main(void *arg) {
    te__threads *t = (te__threads *)arg;
    uint64_t seen = 0;
    /* a new thread inherits the floating-point mode of its creator, which may not be the mode that te.h needs */
    te__floats_begin();
    te__mutex_lock(&t->mutex);
    for (;;) {
        while (!t->quit && t->job == seen) te__cond_wait(&t->work, &t->mutex);
        if (t->quit) break;
        seen = t->job;
        te__mutex_unlock(&t->mutex);
        te__threads_work(t);
        te__mutex_lock(&t->mutex);
        if (--t->busy == 0) te__cond_broadcast(&t->done);
    }
    te__mutex_unlock(&t->mutex);
}

static void te__threads_close(te_ctx *te) {
    te__threads *t = te->threads;
    int i;
    if (!t) return;
    if (!te__is_forked(te)) { /* a forked child lacks the threads, and the mutex may be locked for ever */
        te__mutex_lock(&t->mutex);
        t->quit = true;
        te__cond_broadcast(&t->work);
        te__mutex_unlock(&t->mutex);
        for (i = 0; i < t->num_threads; i++) te__thread_join(&t->thread[i]);
        te__mutex_free(&t->mutex);
        te__cond_free(&t->work);
        te__cond_free(&t->done);
    }
    te__free(te, t->thread);
    te__free(te, t);
    te->threads = NULL;
}

/* Starts the worker threads. If memory or threads are not available, the calling thread does all work alone. */
static void te__threads_open(te_ctx *te) {
    te__threads *t;
    int i;
    if (te->threads || te->cpu_threads < 2) return;
    t = (te__threads *)te__try_alloc(te, sizeof(*t));
    if (!t) return;
    memset(t, 0, sizeof(*t));
    t->thread = (te__thread *)te__try_alloc(te, (size_t)te->cpu_threads * sizeof(te__thread));
    if (!t->thread) {
        te__free(te, t);
        return;
    }
    te__mutex_init(&t->mutex);
    te__cond_init(&t->work);
    te__cond_init(&t->done);
    te->threads = t;
    for (i = 0; i + 1 < te->cpu_threads; i++) {
        if (!te__thread_start(&t->thread[i], te__threads_main, t)) break;
        t->num_threads++;
    }
}

/* Calls fn(user, begin, end) for ranges that together cover 0 .. n-1. Makes at most ceil(n / `grain`) ranges. */
static void te__parallel_for(te_ctx *te, int64_t n, int64_t grain, te__range_fn fn, void *user) {
    te__threads *t = te->threads;
    int64_t pieces;
    if (n <= 0) return;
    if (grain < 1) grain = 1;
    if (!t || n <= grain) {
        fn(user, 0, n);
        return;
    }
    /* about four pieces per thread: then a slow thread delays the end only a little */
    pieces = te__min(te__div_up(n, grain), 4 * (int64_t)(t->num_threads + 1));
    te__mutex_lock(&t->mutex);
    t->fn = fn;
    t->user = user;
    t->n = n;
    t->piece = te__div_up(n, pieces);
    t->next = 0;
    t->busy = t->num_threads;
    t->job++;
    te__cond_broadcast(&t->work);
    te__mutex_unlock(&t->mutex);
    te__threads_work(t);
    te__mutex_lock(&t->mutex);
    while (t->busy > 0) te__cond_wait(&t->done, &t->mutex);
    te__mutex_unlock(&t->mutex);
}
