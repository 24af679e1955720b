/* te_jobs.h: several processes that share the tests of te_test.c, which alone includes it. Knows processes and pipes, which Windows has not.
 *
 * The parent hands out one test after the other and prints what each has said when it has ended; it runs none itself. A process that
 * crashes is a failure of the test that it ran, and another takes its place. */
#ifndef TE_JOBS_H_INCLUDED
#define TE_JOBS_H_INCLUDED
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>

typedef struct report {
    int failed, skipped;
    double ms;
} report;

/* A process that runs the tests it is told of, one after the other. */
typedef struct worker {
    pid_t process; /* 0: there is none */
    int orders;    /* a socket: places in `tests` go out, reports come back */
    int output;    /* where its stdout and stderr end */
    int at;        /* the test that it runs; -1: none */
    char *text;    /* what it has printed since the last report */
    size_t size, room;
} worker;

typedef struct crew {
    worker workers[MAX_JOBS];
    int num_workers;
    const int *queue; /* places of n tests; those before `next` are handed out */
    int n, next;
    const char **broken; /* names of what failed */
} crew;

static void serve(int orders) {
    int at;
    while (read(orders, &at, sizeof at) == (ssize_t)sizeof at) {
        failed = skipped = 0;
        run(&tests[at]);
        report r = {failed, skipped, tests[at].ms};
        if (write(orders, &r, sizeof r) != (ssize_t)sizeof r) break;
    }
    exit(0); /* not _exit: a sanitizer looks for leaks here */
}

/* The queue's next test for a process that has none; behind the last test, the end of its orders. */
static void give_order(crew *c, worker *w) {
    w->at = c->next < c->n ? c->queue[c->next++] : -1;
    if (w->at < 0) shutdown(w->orders, SHUT_WR);
    else if (send(w->orders, &w->at, sizeof w->at, MSG_NOSIGNAL) < 0) perror("te_test"); /* it has just crashed: bury() says so */
}

/* All processes are forked off by this one, which has no threads and has not opened the driver. */
static bool start_worker(crew *c, worker *w) {
    int orders[2], output[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, orders) != 0) return false;
    if (pipe(output) != 0) {
        close(orders[0]);
        close(orders[1]);
        return false;
    }
    fflush(stdout);
    pid_t process = fork();
    if (process == 0) {
        for (int i = 0; i < c->num_workers; i++) {
            if (!c->workers[i].process) continue;
            close(c->workers[i].orders);
            close(c->workers[i].output);
        }
        close(orders[0]);
        close(output[0]);
        dup2(output[1], STDOUT_FILENO);
        dup2(output[1], STDERR_FILENO);
        close(output[1]);
        setvbuf(stdout, NULL, _IOLBF, 0); /* a crash loses no line */
        fcntl(orders[1], F_SETFD, FD_CLOEXEC);
        serve(orders[1]);
    }
    close(orders[1]);
    close(output[1]);
    if (process < 0) {
        close(orders[0]);
        close(output[0]);
        return false;
    }
    w->process = process;
    w->orders = orders[0];
    w->output = output[0];
    fcntl(w->output, F_SETFL, O_NONBLOCK);
    give_order(c, w);
    return true;
}

/* Takes what lies in the pipe, and waits for no more. */
static void take_output(worker *w) {
    for (;;) {
        if (w->room - w->size < 4096) w->text = (char *)realloc(w->text, w->room = 2 * w->room + 8192);
        if (!w->text) abort();
        ssize_t got = read(w->output, w->text + w->size, w->room - w->size);
        if (got <= 0) return;
        w->size += (size_t)got;
    }
}
static void show_output(worker *w) {
    take_output(w);
    fwrite(w->text, 1, w->size, stdout);
    w->size = 0;
}

static void note_failure(crew *c, const char *name) { c->broken[failed++] = name; }

/* True if it is ready for another test. */
static bool take_report(crew *c, worker *w) {
    report r;
    if (recv(w->orders, &r, sizeof r, MSG_DONTWAIT) != (ssize_t)sizeof r) return false;
    show_output(w);
    tests[w->at].ms = r.ms;
    skipped += r.skipped;
    if (r.failed) note_failure(c, tests[w->at].name);
    else if (!r.skipped) passed++;
    w->at = -1;
    return true;
}

/* The process has ended by itself: rightly when it had no test and was told that there are no more. */
static void bury(crew *c, worker *w, int status) {
    take_output(w);
    bool within_a_line = w->size && w->text[w->size - 1] != '\n';
    show_output(w);
    if (within_a_line) printf("\n");
    if (w->at >= 0 || status != 0) {
        const char *name = w->at >= 0 ? tests[w->at].name : "the end of a process that ran tests";
        if (WIFSIGNALED(status)) printf("FAIL  %s: crashed with signal %d (%s)\n", name, WTERMSIG(status), strsignal(WTERMSIG(status)));
        else printf("FAIL  %s: its process ended with status %d\n", name, WEXITSTATUS(status));
        note_failure(c, name);
    }
    close(w->orders);
    close(w->output);
    w->process = 0;
}

/* Long tests first, so that no process is left alone with one at the end. Where nobody knows how long, those that compile most kernels come first. */
static int rank(const test_entry *t) { return t->ms >= 0 ? 0 : 1 + 2 * (strstr(t->name, "cuda") != NULL) + !strncmp(t->name, "ops/", 4); }
static int by_length(const void *a, const void *b) {
    const test_entry *x = &tests[*(const int *)a], *y = &tests[*(const int *)b];
    if (rank(x) != rank(y)) return rank(y) - rank(x);
    if (x->ms != y->ms) return x->ms > y->ms ? -1 : 1;
    return *(const int *)a - *(const int *)b;
}

/* The lengths of the last run lie beside the program. */
static FILE *open_lengths(const char *program, const char *mode) {
    char path[1024];
    int n = snprintf(path, sizeof path, "%s.times", program);
    return n < (int)sizeof path ? fopen(path, mode) : NULL;
}
static void read_lengths(const char *program) {
    FILE *f = open_lengths(program, "r");
    char name[NAME_SIZE];
    double ms;
    while (f && fscanf(f, "%lf %159[^\n]", &ms, name) == 2)
        for (int i = 0; i < num_tests; i++)
            if (!strcmp(tests[i].name, name)) tests[i].ms = ms;
    if (f) fclose(f);
}
static void write_lengths(const char *program) {
    FILE *f = open_lengths(program, "w");
    for (int i = 0; f && i < num_tests; i++)
        if (tests[i].ms >= 0) fprintf(f, "%.0f %s\n", tests[i].ms, tests[i].name);
    if (f) fclose(f);
}

static void run_in_processes(int jobs, int *queue, int n, const char *program, const char **broken) {
    crew c = {0};
    int alive = 0;
    c.num_workers = jobs;
    c.queue = queue;
    c.n = n;
    c.broken = broken;
    read_lengths(program);
    qsort(queue, (size_t)n, sizeof *queue, by_length);
    long share = 2 * sysconf(_SC_NPROCESSORS_ONLN) / jobs; /* a test that waits leaves its processor to another's threads */
    char threads[24];
    snprintf(threads, sizeof threads, "%ld", share > 2 ? share : 2);
    setenv("TE_THREADS", threads, 0);
    for (int i = 0; i < jobs && start_worker(&c, &c.workers[i]); i++) alive++;
    while (alive) {
        struct pollfd ends[2 * MAX_JOBS];
        for (int i = 0; i < jobs; i++) {
            ends[2 * i].fd = c.workers[i].process ? c.workers[i].orders : -1;
            ends[2 * i + 1].fd = c.workers[i].process ? c.workers[i].output : -1;
            ends[2 * i].events = ends[2 * i + 1].events = POLLIN;
        }
        /* The time limit: a process that a test forked off may hold its parent's ends open when that has crashed. */
        if (poll(ends, (nfds_t)(2 * jobs), 1000) < 0 && errno != EINTR) abort();
        for (int i = 0; i < jobs; i++) {
            worker *w = &c.workers[i];
            int status = 0;
            if (!w->process) continue;
            bool ended = waitpid(w->process, &status, WNOHANG) == w->process;
            take_output(w);
            if (take_report(&c, w) && !ended) give_order(&c, w);
            if (!ended) continue;
            bury(&c, w, status);
            if (c.next == n || !start_worker(&c, w)) alive--;
        }
        fflush(stdout);
    }
    for (int i = 0; i < jobs; i++) free(c.workers[i].text);
    for (; c.next < n; c.next++) {
        printf("FAIL  %s: there is no process to run it (%s)\n", tests[queue[c.next]].name, strerror(errno));
        note_failure(&c, tests[queue[c.next]].name);
    }
    write_lengths(program);
}

#endif /* TE_JOBS_H_INCLUDED */
