/* context_parallel/none.c: replaces the other parts of context_parallel/ if TE_NO_DIST is defined. There is only one
 * rank then, so sequences are never shared. */

typedef struct te__context {
    te_group *heads, *ring; /* always NULL */
    bool gathers;           /* always false */
} te__context;

static te__context te__context_of(te_group *cp, te_group *p2p, te_cp_comm comm) {
    te__context c = TE_ZERO;
    (void)cp, (void)p2p, (void)comm;
    return c;
}
static int te__context_size(const te__context *c) {
    (void)c;
    return 1;
}
static int te__context_rank(const te__context *c) {
    (void)c;
    return 0;
}
static te_tensor *te__fp8_context_run(te_tensor *const q_k_v[3], const te_attn_desc *desc, te__context *c,
                                      const te__quant_call *call, bool fp8_output, te_result result) {
    (void)q_k_v, (void)desc, (void)c, (void)call, (void)fp8_output, (void)result;
    return NULL;
}
static te_tensor *te__context_attention_run(te_tensor *const q_k_v[3], const te_attn_desc *desc, te__context *c,
                                            te_result result) {
    (void)q_k_v, (void)desc, (void)c, (void)result;
    return NULL;
}
