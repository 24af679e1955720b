/* other.c: the second file of the program of main.c. */
#ifdef SECOND_HAS_IMPLEMENTATION
#define TE_IMPLEMENTATION
#endif
#include "te.h"
#include <string.h>

#ifdef __cplusplus
extern "C"
#endif
float other_sum(void);

float other_sum(void) {
    te_ctx_desc desc;
    const int64_t shape[2] = {3, 5};
    te_ctx *te;
    float sum;
    memset(&desc, 0, sizeof desc);
    desc.device = "cpu";
    te = te_ctx_create(&desc);
    sum = (float)te_tensor_item(te_sum_all(te_tensor_full(te, TE_BF16, 2, shape, 2)));
    te_ctx_destroy(te);
    return sum;
}
