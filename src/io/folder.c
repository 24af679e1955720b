/* io/folder.c: the path of a file in the folder of a model or of adapters. This file must not depend on the meaning of
 * the files. */

/* Writes the path of a file in a folder to *t. */
static bool te__hf_join(te__text *t, te_ctx *te, const char *folder, const char *name) {
    t->memory = &te->host_allocator;
    te__text_clear(t);
    te__text_printf(t, "%s%s%s", folder, folder[0] && te__is_slash(folder[strlen(folder) - 1]) ? "" : "/", name);
    if (t->oom) te__fail(te, TE_ERR_OUT_OF_MEMORY, "%s", te__no_memory_text);
    return !t->oom;
}
