/* te_info: prints te_report: devices, libraries, caches. te_info --selftest also runs every operation on the GPU against the CPU reference; its
 * output belongs into a bug report.
 *
 *     torchrun --nproc-per-node 2 --no-python build/te_info --ranks        (or mpirun, srun)
 *
 * shows the ranks of a job, their hosts and devices, which GPUs reach each other's memory, NCCL, and how fast each
 * collective is. --most BYTES: the largest message (256 MiB; on the CPU 64 KiB). --csv FILE: rows like those of te_bench. */
#define _POSIX_C_SOURCE 200809L
#include "te_parts.h"
#include "catalogue.h"
#include "ranks.h"
#include <unistd.h>

static void print_report(te_ctx *te) {
    size_t size = te_report(te, NULL, 0) + 1;
    char *text = (char *)malloc(size);
    if (!text) return;
    te_report(te, text, size);
    fputs(text, stdout);
    free(text);
}

static const char *run_call(te_ctx *te, call *c, int index, te_dtype dtype, bool *more) {
    *more = call_build(c, te, index, dtype);
    if (!*more) return NULL;
    switch (c->op) {
#define RUN(lower, UPPER, family) \
    case TE_OP_##UPPER: te_op_##lower(te, &c->args.lower); break;
        TE_OP_LIST(RUN)
#undef RUN
    default: break;
    }
    te_synchronize(te);
    return te_ok(te) ? NULL : te_error(te);
}

/* Returns how many operations disagree. */
static int selftest(const char *device) {
    static const te_dtype dtypes[] = {TE_BF16, TE_F16, TE_F32};
    te_ctx_desc desc = {0};
    te_ctx *gpu, *cpu;
    int failed = 0, passed = 0, i, k;
    desc.device = device;
    gpu = te_ctx_create(&desc);
    if (!te_ok(gpu)) {
        printf("selftest: %s\n", te_error(gpu));
        te_ctx_destroy(gpu);
        return 1;
    }
    desc.device = "cpu";
    cpu = te_ctx_create(&desc);
    printf("selftest on %s\n", te_ctx_device(gpu));
    for (k = 0; k < 3; k++) {
        bool more = true;
        for (i = 0; more; i++) {
            call a, b;
            const char *error;
            double difference;
            te_scope_begin(gpu);
            te_scope_begin(cpu);
            error = run_call(cpu, &b, i, dtypes[k], &more);
            if (more && !error) error = run_call(gpu, &a, i, dtypes[k], &more);
            if (more) {
                difference = error ? (double)INFINITY : call_difference(&a, &b);
                if (difference <= b.tolerance)
                    passed++;
                else {
                    failed++;
                    printf("  FAILED %-5s %-34s difference %.3g, allowed %.3g%s%s\n", te_dtype_name(dtypes[k]), b.label, difference, b.tolerance, error ? ": " : "",
                           error ? error : "");
                }
            }
            te_clear_error(gpu);
            te_clear_error(cpu);
            te_scope_end(cpu);
            te_scope_end(gpu);
        }
    }
    printf("%d of %d operations agree with the CPU reference\n", passed, passed + failed);
    te_ctx_destroy(cpu);
    te_ctx_destroy(gpu);
    return failed;
}

/* ---- --ranks ---- */

/* A collective on a message, in the words of nccl-tests: the message is the larger of what a rank gives and what it gets, the algorithm's
 * bandwidth its bytes by the time, the bus's bandwidth that times what the links carry of it (nccl-tests, doc/PERFORMANCE.md). */
typedef enum collective { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, ALL_TO_ALL, SEND, NUM_COLLECTIVES } collective;
static const char *const collective_names[NUM_COLLECTIVES] = {"all_reduce f32", "all_gather", "reduce_scatter f32", "broadcast", "all_to_all", "send"};

typedef struct exchange {
    te_group *world;
    collective kind;
    te_tensor *given, *got; /* a message; parts of it for what is smaller */
} exchange;

static void run_exchange(void *arg) {
    const exchange *e = (const exchange *)arg;
    const int rank = te_group_rank(e->world), size = te_group_size(e->world);
    switch (e->kind) {
    case ALL_REDUCE: te_all_reduce(e->world, e->got, TE_REDUCE_SUM); break;
    case ALL_GATHER: te_all_gather(e->world, e->given, e->got); break;
    case REDUCE_SCATTER: te_reduce_scatter(e->world, e->given, e->got); break;
    case BROADCAST: te_broadcast(e->world, e->got, 0); break;
    case ALL_TO_ALL: te_all_to_all(e->world, e->given, NULL, e->got, NULL); break;
    default: /* pairs of neighbours: the even rank sends */
        if (rank % 2 == 0 && rank + 1 < size) te_send(e->world, e->given, rank + 1);
        if (rank % 2 == 1) te_recv(e->world, e->got, rank - 1);
    }
}
static double bus_share(collective kind, int size) {
    const double others = (double)(size - 1) / size;
    return kind == ALL_REDUCE ? 2 * others : kind == ALL_GATHER || kind == REDUCE_SCATTER || kind == ALL_TO_ALL ? others : 1;
}

/* The text of a message's size. */
static const char *bytes_text(int64_t bytes, char text[32]) {
    if (bytes >= 1 << 20) snprintf(text, 32, "%.4g MiB", (double)bytes / 1048576);
    else if (bytes >= 1024) snprintf(text, 32, "%.4g KiB", (double)bytes / 1024);
    else snprintf(text, 32, "%lld B", (long long)bytes);
    return text;
}

static void measure_exchange(te_ctx *te, te_group *world, collective kind, int64_t bytes, FILE *csv) {
    const int size = te_group_size(world), warm = te_ctx_is_cuda(te) ? 4 : 1, runs = te_ctx_is_cuda(te) ? 20 : 3;
    const te_dtype dtype = kind == ALL_REDUCE || kind == REDUCE_SCATTER ? TE_F32 : TE_U8;
    const int64_t n = bytes / (dtype == TE_F32 ? 4 : 1), part = n / size;
    exchange e = {0};
    double seconds, rate;
    char text[32], shape[64];
    te_scope_begin(te);
    e.world = world;
    e.kind = kind;
    if (kind != ALL_REDUCE && kind != BROADCAST) e.given = te_tensor_zeros(te, dtype, 1, kind == ALL_GATHER ? &part : &n);
    e.got = te_tensor_zeros(te, dtype, 1, kind == REDUCE_SCATTER ? &part : &n);
    for (int i = 0; i < warm; i++) run_exchange(&e);
    seconds = time_of_ranks(te, world, run_exchange, &e, runs);
    te_scope_end(te);
    if (!te_ok(te)) return;
    rate = (double)bytes / seconds * 1e-9;
    printf("%-20s %12s %12.1f us %12.3f GB/s %12.3f GB/s\n", collective_names[kind], bytes_text(bytes, text), seconds * 1e6, rate, rate * bus_share(kind, size));
    fflush(stdout);
    snprintf(shape, sizeof shape, "%d ranks %s", size, text);
    if (csv) fprintf(csv, "\"%s\",\"%s\",%.3f,%.4g,GB/s of the bus,,,\n", collective_names[kind], shape, seconds * 1e6, rate * bus_share(kind, size));
}

/* Where a rank is: gathered from all of them. */
typedef struct place {
    char host[128], device[64], visible[128];
    int64_t process;
} place;

static void print_places(const place *all, int size) {
    int hosts = 0, i, k;
    for (i = 0; i < size; i++) {
        for (k = 0; k < i && strcmp(all[k].host, all[i].host) != 0;) k++;
        hosts += k == i;
    }
    printf("\n%d rank%s on %d host%s\n", size, size == 1 ? "" : "s", hosts, hosts == 1 ? "" : "s");
    for (i = 0; i < size; i++) {
        printf("rank %d: %s on %s, process %lld", i, all[i].device, all[i].host, (long long)all[i].process);
        for (k = 0; k < size; k++)
            if (k != i && strcmp(all[i].device, "cpu") != 0 && !strcmp(all[k].host, all[i].host) && !strcmp(all[k].device, all[i].device) && !strcmp(all[k].visible, all[i].visible)) {
                printf("; it shares the GPU with rank %d", k);
                break;
            }
        printf("\n");
    }
}

/* Returns how many things failed. */
static int report_ranks(const char *device, int64_t most, const char *csv_path) {
    te_ctx *te = open_own_device(device);
    te_nccl_group_desc desc = {0};
    te_group *world = te_ok(te) ? te_nccl_group_create(te, &desc) : NULL;
    const int size = te_group_size(world);
    const char *visible = getenv("CUDA_VISIBLE_DEVICES"), *of = te_ctx_device(te);
    place own = {0}, *all = (place *)calloc((size_t)size, sizeof *all);
    int64_t bytes = sizeof own, everyone = bytes * size;
    const time_t today = time(NULL);
    char date[16] = "";
    FILE *csv = NULL;
    int failed;
    if (world && all) {
        rank_0_prints(te_group_rank(world));
        print_report(te);
        if (gethostname(own.host, sizeof own.host - 1)) strcpy(own.host, "?");
        snprintf(own.device, sizeof own.device, "%s", of);
        snprintf(own.visible, sizeof own.visible, "%s", visible ? visible : "");
        own.process = getpid();
        te_scope_begin(te);
        te_tensor *places = te_tensor_empty(te, TE_U8, 1, &everyone);
        te_all_gather(world, te_tensor_from_host(te, TE_U8, 1, &bytes, &own), places);
        te_tensor_to_host(places, all);
        te_scope_end(te);
        if (te_ok(te)) print_places(all, size);
        if (size == 1) printf("There is nobody to exchange with. torchrun, mpirun and srun start several ranks.\n");
        if (csv_path && te_group_rank(world) == 0 && !(csv = fopen(csv_path, "w"))) fprintf(stderr, "te_info: cannot write %s\n", csv_path);
        strftime(date, sizeof date, "%Y-%m-%d", gmtime(&today));
        if (csv) fprintf(csv, "# %d ranks, %s, te.h %d.%d.%d, %s; te_info --ranks\nwhat,shape,microseconds,ours,unit,against,theirs,ratio\n", size, of, TE_VERSION_MAJOR, TE_VERSION_MINOR, TE_VERSION_PATCH, date);
        if (size > 1) printf("\n%-20s %12s %15s %17s %17s\n", "collective", "message", "time", "algorithm", "bus");
        if (!most) most = te_ctx_is_cuda(te) ? 256 << 20 : 64 << 10;
        for (int kind = 0; kind < NUM_COLLECTIVES && size > 1; kind++)
            for (int64_t m = 4096; m <= most && te_ok(te); m *= 4) measure_exchange(te, world, (collective)kind, m / (4 * size) * (4 * size), csv);
        if (csv && fclose(csv)) fprintf(stderr, "te_info: cannot write %s\n", csv_path);
    }
    failed = !te_ok(te);
    if (failed) fprintf(stderr, "te_info: %s\n", te_error(te));
    free(all);
    te_group_destroy(world);
    te_ctx_destroy(te);
    return failed;
}

int main(int argc, char **argv) {
    const char *device = NULL, *csv = NULL;
    bool test = false, ranks = false;
    int64_t most = 0;
    te_ctx_desc desc = {0};
    te_ctx *te;
    int i, failed = 0;
    for (i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--selftest") == 0)
            test = true;
        else if (strcmp(argv[i], "--device") == 0 && i + 1 < argc)
            device = argv[++i];
        else if (strcmp(argv[i], "--ranks") == 0)
            ranks = true;
        else if (strcmp(argv[i], "--most") == 0 && i + 1 < argc)
            most = strtoll(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--csv") == 0 && i + 1 < argc)
            csv = argv[++i];
        else {
            fprintf(stderr, "te_info: %s\nusage: te_info [--device cpu|cuda:N] [--selftest] [--ranks [--most BYTES] [--csv FILE]]\n", argv[i]);
            return 2;
        }
    }
    if (ranks) return report_ranks(device, most, csv) ? 1 : 0;
    desc.device = device;
    te = te_ctx_create(&desc);
    if (te && !te_ok(te)) printf("%s\n", te_error(te));
    print_report(te);
    if (test) failed = selftest(device ? device : "cuda:0");
    te_ctx_destroy(te);
    return failed ? 1 : 0;
}
