/* main.c: a program of two files that uses te.h as its users do. Compiled as C and as C++, with TE_STATIC and without; the matrix
 * (matrix.sh) says how. */
#ifdef FIRST_HAS_IMPLEMENTATION
#include <stdio.h> /* before te.h: no order of includes is asked for */
#define TE_IMPLEMENTATION
#endif
#include "te.h"
#include <string.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C"
#endif
float other_sum(void);

int main(void) {
    te_ctx_desc desc;
    const int64_t shape[2] = {3, 5};
    te_ctx *te;
    double sum;
    memset(&desc, 0, sizeof desc);
    desc.device = "cpu";
    te = te_ctx_create(&desc);
    sum = te_tensor_item(te_sum_all(te_tensor_full(te, TE_F32, 2, shape, 2)));
    if (!te_ok(te) || sum != 30 || other_sum() != 30) {
        printf("%g %g %s\n", sum, (double)other_sum(), te_error(te));
        return 1;
    }
#ifdef __cplusplus
    te_linear_desc linear = te_linear_desc();
    linear.in_features = 5;
    linear.out_features = 7;
    te_module *m = te_linear_create(te, linear); /* by reference */
    if (te_module_num_parameters(m) != 5 * 7 + 7) return 2;
    te_module_destroy(m);
    te_op_copy_args args = te_op_copy_args();
    args.src = args.dst = te_tensor_zeros(te, TE_F32, 2, shape);
    if (te_op_copy(te, args) != TE_OK) return 3;
#endif
    te_ctx_destroy(te);
    return te_version() == TE_VERSION_MAJOR * 10000 + TE_VERSION_MINOR * 100 + TE_VERSION_PATCH ? 0 : 4;
}
