/* model/state.h: the state of the layer of NeMo Automodel in a context. */

typedef struct te__automodel {
    te_backend_capabilities capabilities; /* te_backend_set_capabilities, if has_capabilities */
    bool has_capabilities;
    struct te__patches *patches; /* model/patches.c; NULL before the first call of that chapter */
} te__automodel;
static const te__slot te__automodel_slot = {sizeof(te__automodel)};
static te__automodel *te__automodel_of(const te_ctx *te) {
    return (te__automodel *)te__slot_of(te, &te__automodel_slot);
}
