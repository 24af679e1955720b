/* tests/core/test_copy.c: copies whose sides share memory. */
#include "../te_test.h"

enum { SIDE = 70 }; /* more than a tile, and none of whole ones */

/* x is f32 or bf16 [SIDE * SIDE], 0, 1, 2 .. 4899 modulo 251: every one a number of both. */
static te_tensor *counted(te_ctx *te, te_dtype dtype) {
    float *v = (float *)test_alloc(SIDE * SIDE * sizeof(float));
    for (int i = 0; i < SIDE * SIDE; i++) v[i] = (float)(i % 251);
    return test_tensor(te, dtype, SHAPE(SIDE * SIDE), v);
}
/* dst and src over x's memory, in the ways that users overlap them. */
typedef struct pair {
    te_tensor *dst, *src;
} pair;
enum { FORWARDS, BACKWARDS, TRANSPOSED, COLUMNS, ROWS_APART, SAME, TURNED_TWICE, PAIRS };
static pair overlapping(te_tensor *x, int way) {
    const int64_t square[2] = {SIDE, SIDE};
    te_tensor *m = te_tensor_view(x, 2, square), *t = te_tensor_transpose(m, 0, 1);
    int64_t n = SIDE * SIDE;
    switch (way) {
    case FORWARDS: return (pair){te_tensor_narrow(x, 0, 1, n - 1), te_tensor_narrow(x, 0, 0, n - 1)};
    case BACKWARDS: return (pair){te_tensor_narrow(x, 0, 0, n - 3), te_tensor_narrow(x, 0, 3, n - 3)};
    case TRANSPOSED: return (pair){m, t};
    case COLUMNS: return (pair){te_tensor_narrow(m, 1, 1, SIDE - 1), te_tensor_narrow(m, 1, 0, SIDE - 1)};
    case ROWS_APART: return (pair){te_tensor_narrow(m, 1, 0, 30), te_tensor_narrow(m, 1, 40, 30)}; /* interleaved: no element is of both */
    case SAME: return (pair){m, te_tensor_view(x, 2, square)};
    default: return (pair){t, te_tensor_transpose(te_tensor_view(x, 2, square), 0, 1)};
    }
}
/* The expected bytes of x: those of the same copy through memory of its own. */
static const float *wanted(te_ctx *te, te_dtype dtype, int way) {
    te_tensor *x = counted(te, dtype);
    pair p = overlapping(x, way);
    te_tensor *between = te_tensor_zeros(te, te_tensor_dtype(p.src), te_tensor_ndim(p.src), te_tensor_shape(p.src));
    te_tensor_copy(between, p.src);
    te_tensor_copy(p.dst, between);
    return test_read(x);
}

TE_TEST_DEVICES(overlapping_copies_are_as_if_read_first) {
    for (int i = 0; i < 2 * PAIRS; i++) {
        te_dtype dtype = i < PAIRS ? TE_F32 : TE_BF16;
        te_tensor *x = counted(te, dtype);
        pair p = overlapping(x, i % PAIRS);
        test_case("way %d of %s", i % PAIRS, te_dtype_name(dtype));
        CHECK_EQ_INT(te_tensor_copy(p.dst, p.src), TE_OK);
        CHECK_TENSOR(x, wanted(te, dtype, i % PAIRS), 0, 0); /* numbers are moved, and none is computed */
        CHECK_OK(te);
    }
}

/* A view of x's memory in another format, as a program that lays its own memory out makes it. */
static te_tensor *over(te_tensor *x, te_dtype dtype, int64_t byte, int64_t n) {
    return te_tensor_wrap(te_tensor_ctx(x), dtype, SHAPE(n), (char *)te_tensor_data(x) + byte, NULL, NULL);
}
TE_TEST_DEVICES(overlapping_conversions_are_as_if_read_first) {
    enum { N = 5003 };
    static const struct {
        te_dtype from, to;
        int64_t from_byte, to_byte;
    } ways[] = {{TE_BF16, TE_F32, 0, 0}, {TE_BF16, TE_F32, 2 * N / 4 * 4, 0}, {TE_F32, TE_BF16, 0, 0}, {TE_F32, TE_BF16, 0, 2 * N}, {TE_U8, TE_I64, 8, 0},
                {TE_I32, TE_F32, 0, 0}, {TE_F16, TE_BF16, 0, 0}, {TE_U8, TE_F16, 3, 0}};
    float *v = (float *)test_alloc(N * sizeof(float));
    for (int i = 0; i < N; i++) v[i] = (float)(i % 127);
    for (int i = 0; i < COUNT(ways); i++) {
        test_case("%s to %s", te_dtype_name(ways[i].from), te_dtype_name(ways[i].to));
        te_tensor *memory = te_tensor_zeros(te, TE_U8, SHAPE(8 * N + 64));
        te_tensor *src = over(memory, ways[i].from, ways[i].from_byte, N), *dst = over(memory, ways[i].to, ways[i].to_byte, N);
        te_tensor_copy(src, test_tensor(te, ways[i].from, SHAPE(N), v));
        CHECK_EQ_INT(te_tensor_copy(dst, src), TE_OK);
        CHECK_TENSOR(dst, v, 0, 0); /* integers below 127 are numbers of every format here */
        CHECK_OK(te);
    }
}

/* The raw operation, and launches of a graph that holds it. */
TE_TEST_DEVICES(overlapping_copies_of_the_operation_and_of_graphs) {
    for (int way = 0; way < PAIRS; way++) {
        te_tensor *x = counted(te, TE_BF16), *again = te_tensor_zeros(te, TE_BF16, SHAPE(SIDE * SIDE)), *start = counted(te, TE_BF16);
        pair p = overlapping(x, way), q = overlapping(again, way);
        te_op_copy_args args = {0};
        const float *want = wanted(te, TE_BF16, way);
        test_case("way %d", way);
        args.dst = p.dst;
        args.src = p.src;
        CHECK_EQ_INT(te_op_copy(te, &args), TE_OK);
        CHECK_TENSOR(x, want, 0, 0);
        te_graph_begin(te);
        te_tensor_copy(again, start);
        te_tensor_copy(q.dst, q.src);
        te_graph *g = te_graph_end(te);
        for (int i = 0; i < 2; i++) {
            te_graph_launch(g);
            CHECK_TENSOR(again, want, 0, 0);
        }
        te_graph_destroy(g);
        CHECK_OK(te);
    }
}

/* x onto x is nothing to do: no launch. */
TE_TEST_DEVICES(a_copy_onto_the_same_view_is_nothing_to_do) {
    te_tensor *x = counted(te, TE_F32);
    for (int way = SAME; way <= TURNED_TWICE; way++) {
        pair p = overlapping(x, way);
        size_t before = te_memory_get_stats(te).allocs;
        CHECK_EQ_INT(te_tensor_copy(p.dst, p.src), TE_OK);
        CHECK_EQ_INT(te_memory_get_stats(te).allocs, before); /* and no memory on the way */
    }
    CHECK_TENSOR(x, test_read(counted(te, TE_F32)), 0, 0);
    te_tensor *bytes = over(x, TE_U8, 0, 100), *codes = over(x, TE_F8E4M3, 0, 100);
    CHECK_EQ_INT(te_tensor_copy(bytes, codes), TE_OK);
    CHECK_TENSOR(x, test_read(counted(te, TE_F32)), 0, 0);
    CHECK_OK(te);
}
