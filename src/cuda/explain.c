/* cuda/explain.c: describes plans without running them, and reports on drivers, GPUs and the compiler. This file must
 * not depend on which operations exist. */

/* ---- explanations ---- */

/* Returns the number of multiprocessors of a typical GPU of an architecture. It is used for plans without a GPU. */
static int te__arch_sms(int sm) {
    return sm == 80 ? 108 : sm == 86 ? 84 : sm == 89 ? 128 : sm == 90 ? 132 : sm == 120 ? 170 : 148;
}

static void te__plan_describe(const te__plan *p, te_explanation *out) {
    size_t used = 0;
    int i, k;
    out->native = p->native;
    out->deterministic = p->deterministic;
    out->workspace = p->workspace_bytes;
    out->launches = p->num_launches;
    for (i = 0; i < p->num_launches && used + 1 < sizeof(out->kernels); i++) {
        const te__launch *l = &p->launch[i];
        used += (size_t)snprintf(out->kernels + used, sizeof(out->kernels) - used, "%s%s/%s", i ? " " : "", l->family,
                                 l->kernel);
        for (k = 0; k < l->num_options && used + 1 < sizeof(out->kernels); k++)
            used += (size_t)snprintf(out->kernels + used, sizeof(out->kernels) - used, "%c%s=%d", k ? ',' : '.',
                                     l->option[k].name, l->option[k].value);
    }
    snprintf(out->why, sizeof(out->why), "%s", p->why);
}

/* Plans a call and describes the plan in `out`. The args are already checked. `sm` is an architecture such as 80:
 * then no GPU is needed. 0 means the context's GPU. */
static te_result te__cuda_explain(te_ctx *te, const te__op_info *op, const void *args, int sm, te_explanation *out) {
    te__plan plan;
    te_result result;
    bool pushed;
    te__plan_begin(&plan, te);
    if (sm) {
        plan.explain = true;
        plan.sm = sm;
        plan.num_sms = te__arch_sms(sm);
        plan.hopper = plan.edits_maps = sm == 90;
        result = op->plan(&plan, args);
        if (result == TE_OK) result = plan.result;
    } else { /* planning encodes tensor maps: that needs a current CUcontext */
        result = te__cuda_enter(te, &pushed);
        if (result == TE_OK) {
            result = te__cuda_plan(te, &plan, op, args);
            te__cuda_leave(pushed);
        }
    }
    if (result == TE_OK) te__plan_describe(&plan, out);
    te__plan_end(&plan);
    return result;
}

/* ---- the report ---- */

static void te__report_devices(te__report_text *t) {
    te__text why = TE_ZERO;
    int count = 0, i;
    if (te__driver_open(&why) != TE_OK) {
        te__say(t, "driver: none. %s\n", te__text_str(&why));
        te__text_free(&why);
        return;
    }
    te__text_free(&why);
    te__say(t, "driver: %s, for CUDA up to %d.%d\n", te__cu.lib.path, te__cu.version / 1000,
            te__cu.version % 1000 / 10);
    te__cu.DeviceGetCount(&count);
    for (i = 0; i < count; i++) {
        te__cu_device device;
        char name[128] = "?";
        size_t bytes = 0;
        if (te__cu.DeviceGet(&device, i)) continue;
        te__cu.DeviceGetName(name, (int)sizeof(name) - 1, device);
        te__cu.DeviceTotalMem(&bytes, device);
        te__say(t, "cuda:%d: %s, sm_%d%d, %d multiprocessors, %.1f GiB\n", i, name,
                te__cu_attribute(device, TE__CU_SM_MAJOR), te__cu_attribute(device, TE__CU_SM_MINOR),
                te__cu_attribute(device, TE__CU_NUM_SMS), (double)bytes / 1073741824.0);
    }
}

/* Returns whether the driver grants `attribute` to device number i on the memory of device number k. */
static bool te__cu_peer(int attribute, int i, int k) {
    te__cu_device device, peer;
    int value = 0;
    if (te__cu.DeviceGet(&device, i) || te__cu.DeviceGet(&peer, k)) return false;
    return te__cu.DeviceGetP2PAttribute(&value, attribute, device, peer) == 0 && value != 0;
}
/* Tells which devices reach each other's memory, and how. Atomics that the link itself runs are NVLink's: over PCIe
 * there are none between GPUs. */
static void te__report_peers(te__report_text *t) {
    static const char *const kinds[] = {"no access", "access", "access and native atomics (NVLink)"};
    int count = 0, i, k, kind;
    if (!te__cu.ready || !te__cu.DeviceGetP2PAttribute) return;
    te__cu.DeviceGetCount(&count);
    for (i = 0; i < count && count > 1; i++) {
        te__say(t, "peers of cuda:%d:", i);
        for (kind = 0; kind < TE__COUNT(kinds); kind++) {
            int found = 0;
            for (k = 0; k < count; k++) {
                const bool access = k != i && te__cu_peer(TE__CU_PEER_ACCESS, i, k);
                if (k == i || (access ? te__cu_peer(TE__CU_PEER_ATOMICS, i, k) ? 2 : 1 : 0) != kind) continue;
                te__say(t, "%s%d", found++ ? ", " : " ", k);
            }
            if (found) te__say(t, " %s;", kinds[kind]);
        }
        te__say(t, "\n");
    }
}

static void te__report_compiler(te__report_text *t) {
    te__text why = TE_ZERO;
    const te__nvrtc *n = te__nvrtc_open(te__driver_major(), &why);
    te__cache cache;
    if (n)
        te__say(t, "compiler: %s, NVRTC %d.%d (%s)\n", n->lib.path, n->major, n->minor, n->compiler);
    else
        te__say(t, "compiler: none. %s\n", te__text_str(&why));
    te__text_clear(&why);
    if (te__cache_open(&cache, &why))
        te__say(t, "cache: %s\n", cache.root[0] ? cache.root : "none");
    else
        te__say(t, "cache: none. %s\n", te__text_str(&why));
    if (cache.read_only[0]) te__say(t, "read-only caches: %s\n", cache.read_only);
    te__text_free(&why);
    te__say(t, "embedded PTX: %d kernels\n", te__num_baselines);
}

static void te__cuda_report(te__report_text *t) {
    te__report_devices(t);
    te__report_peers(t);
    te__report_compiler(t);
}
