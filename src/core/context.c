/* core/context.c: functions that return the version and the device of a context, and te_synchronize. */

TE_API int te_version(void) { return TE_VERSION_MAJOR * 10000 + TE_VERSION_MINOR * 100 + TE_VERSION_PATCH; }

TE_API const char *te_ctx_device(const te_ctx *te) { return te ? te->device_name : ""; }
TE_API bool te_ctx_is_cuda(const te_ctx *te) { return te && strcmp(te->device->kind, "cuda") == 0; }
TE_API te_result te_synchronize(te_ctx *te) {
    te_result result = te ? te->device->synchronize(te) : TE_ERR_STATE;
    return result == TE_OK ? te__streams_synchronize(te) : result;
}
