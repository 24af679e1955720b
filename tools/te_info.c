/* te_info: prints te_report: devices, libraries, caches. te_info --selftest also runs every operation on the GPU against the CPU reference; its
 * output belongs into a bug report. */
#include "te_parts.h"
#include "catalogue.h"

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

int main(int argc, char **argv) {
    const char *device = NULL;
    bool test = false;
    te_ctx_desc desc = {0};
    te_ctx *te;
    int i, failed = 0;
    for (i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--selftest") == 0)
            test = true;
        else if (strcmp(argv[i], "--device") == 0 && i + 1 < argc)
            device = argv[++i];
        else {
            fprintf(stderr, "te_info: %s\nusage: te_info [--device cpu|cuda:N] [--selftest]\n", argv[i]);
            return 2;
        }
    }
    desc.device = device;
    te = te_ctx_create(&desc);
    if (te && !te_ok(te)) printf("%s\n", te_error(te));
    print_report(te);
    if (test) failed = selftest(device ? device : "cuda:0");
    te_ctx_destroy(te);
    return failed ? 1 : 0;
}
