/* modules/facts.c: facts about a module, stored as attributes, for code that does not know its class. This file must
 * not depend on the readers of the facts. */

/* Facts about a whole model. */
#define TE__MODEL_FACTS "te.model"
typedef struct te__model_facts {
    const char *folder; /* the folder that the model was opened from, or NULL */
    const char *table;  /* path of the embedding whose weight the output layer uses too (tied weights), or NULL */
} te__model_facts;

/* Facts about an attention with projections. */
#define TE__HEAD_FACTS "te.heads"
typedef struct te__head_facts {
    int heads, groups;
    int64_t head_dim;
} te__head_facts;

/* Returns the embedding whose weight the model's output layer uses too (tied weights), or NULL. */
static te_module *te__tied_table(const te_module *model) {
    const te__model_facts *f = (const te__model_facts *)te__attribute_of(model, TE__MODEL_FACTS);
    return f && f->table ? te_module_find((te_module *)(uintptr_t)model, f->table) : NULL;
}
/* Returns the folder that the model of module m was opened from, or NULL. */
static const char *te__model_folder(const te_module *m) {
    const te__model_facts *f = NULL;
    for (; m && !f; m = m->parent) f = (const te__model_facts *)te__attribute_of(m, TE__MODEL_FACTS);
    return f ? f->folder : NULL;
}
