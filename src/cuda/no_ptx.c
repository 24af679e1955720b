/* cuda/no_ptx.c: used in place of cuda/ptx.c if TE_NO_PTX is defined: then there is no embedded PTX. */

enum { te__num_baselines = 0 };
/* Returns false: there is no embedded PTX. */
static bool te__baseline_find(const char *family, const char *kernel, te__text *ptx) {
    (void)family, (void)kernel, (void)ptx;
    return false;
}
