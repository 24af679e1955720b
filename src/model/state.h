/* model/state.h: the state that the NeMo Automodel layer (model/) keeps in a context. */

typedef struct te__automodel {
    te_backend_capabilities capabilities; /* set by te_backend_set_capabilities; valid if has_capabilities */
    bool has_capabilities;
    struct te__patches *patches; /* owned by model/patches.c; NULL before its first call */
} te__automodel;
static const te__slot te__automodel_slot = {sizeof(te__automodel)};
static te__automodel *te__automodel_of(const te_ctx *te) {
    return (te__automodel *)te__slot_of(te, &te__automodel_slot);
}
