/* te_explain: prints how each operation would run on a GPU, and why: native or emulated, kernels and options, workspace. Needs no GPU.
 *
 *     te_explain                        every operation on sm_90, bf16
 *     te_explain --device sm_80 gemm    those whose name holds "gemm", on sm_80
 *     te_explain --dtype f32 --all      on every architecture */
#include "te_parts.h"
#include "catalogue.h"

static int usage(const char *wrong) {
    fprintf(stderr, "te_explain: %s\nusage: te_explain [--device cpu|sm_80|sm_86|sm_89|sm_90|sm_100|sm_103|sm_120] [--all] [--dtype f32|f16|bf16] [FILTER]\n", wrong);
    return 2;
}

static void explain(te_ctx *te, const call *c, const char *device) {
    te_explanation e;
    if (te_explain(te, c->op, &c->args, device, &e) != TE_OK) {
        printf("%-34s %-7s refused: %s\n", c->label, device, e.why);
        te_clear_error(te);
        return;
    }
    printf("%-34s %-7s %-8s %s%s", c->label, device, e.native ? "native" : "emulated", e.kernels, e.deterministic ? "" : "  NOT deterministic");
    if (e.workspace) printf("  workspace %.1f KiB", (double)e.workspace / 1024);
    printf("%s%s\n", e.why[0] ? "\n                                           " : "", e.why);
}

int main(int argc, char **argv) {
    static const char *const devices[] = {"cpu", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"};
    const char *device = "sm_90", *filter = "";
    te_dtype dtype = TE_BF16;
    bool all = false;
    te_ctx_desc desc = {0};
    te_ctx *te;
    call c;
    int i;
    for (i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--all") == 0)
            all = true;
        else if (strcmp(argv[i], "--device") == 0 && i + 1 < argc)
            device = argv[++i];
        else if (strcmp(argv[i], "--dtype") == 0 && i + 1 < argc) {
            i++;
            dtype = strcmp(argv[i], "f32") == 0 ? TE_F32 : strcmp(argv[i], "f16") == 0 ? TE_F16 : strcmp(argv[i], "bf16") == 0 ? TE_BF16 : TE_DTYPE_NONE;
            if (!dtype) return usage("--dtype takes f32, f16 or bf16");
        } else if (argv[i][0] == '-')
            return usage(argv[i]);
        else
            filter = argv[i];
    }
    desc.device = "cpu";
    te = te_ctx_create(&desc);
    for (i = 0;; i++) {
        te_scope_begin(te);
        if (!call_build(&c, te, i, dtype)) break;
        if (strstr(te_query_name(c.op), filter) || strstr(c.label, filter)) {
            size_t k;
            if (!all) explain(te, &c, device);
            for (k = 0; all && k < sizeof devices / sizeof *devices; k++) explain(te, &c, devices[k]);
        }
        te_scope_end(te);
    }
    te_scope_end(te);
    te_ctx_destroy(te);
    return 0;
}
