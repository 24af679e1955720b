/* cuda/none.c: replaces the folder cuda/ if TE_NO_CUDA is defined. The functions that return a te_result fail with an
 * error that names TE_NO_CUDA. */

static te_result te__cuda_open_device(te_ctx *te, int ordinal, const te_ctx_desc *desc) {
    (void)desc;
    return te__fail(te, TE_ERR_UNSUPPORTED,
                    "te_ctx_create: device \"cuda:%d\": te.h was compiled with TE_NO_CUDA; compile it without, or take "
                    "the device \"cpu\"",
                    ordinal);
}
static te_result te__cuda_explain(te_ctx *te, const te__op_info *op, const void *args, int sm, te_explanation *out) {
    (void)op, (void)args, (void)out;
    return te__fail(te, TE_ERR_UNSUPPORTED,
                    "te_explain: device \"sm_%d\": te.h was compiled with TE_NO_CUDA; compile it without, or ask for "
                    "\"cpu\"",
                    sm);
}
TE_API int te_ctx_sm(const te_ctx *te) {
    (void)te;
    return 0;
}
TE_API void *te_ctx_cu_context(const te_ctx *te) {
    (void)te;
    return NULL;
}
TE_API void *te_ctx_cu_stream(const te_ctx *te) {
    (void)te;
    return NULL;
}
static void te__cuda_report(te__report_text *t) { te__say(t, "driver: left out by TE_NO_CUDA\n"); }
