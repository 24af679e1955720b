/* test_row_groups.c: amaxes, casts and products whose groups of rows have scales of their own, against the same operation on each group alone, to the bit. Values behind the last
 * group are infinite, and nobody's. */
#include "../te_test.h"

enum { RG_GROUPS = 6, RG_ROWS = 330, RG_SPARE = 9 };
static const int64_t rg_sizes[RG_GROUPS] = {0, 131, 1, 0, 70, 128}, rg_strips[RG_GROUPS] = {16, 0, 128, 48, 0, 138}; /* of the second only the last ends within 16 rows */
static const float rg_size[RG_GROUPS] = {1, 1e4f, 3, 1, 1e-2f, 7};

static te_tensor *rg_groups(te_ctx *te, const int64_t *sizes, te_dtype index, int64_t rows) {
    int32_t narrow[RG_GROUPS];
    for (int g = 0; g < RG_GROUPS; g++) narrow[g] = (int32_t)sizes[g];
    te_op_moe_chunk_map_args map = {.sizes = te_tensor_from_host(te, index, SHAPE(RG_GROUPS), index == TE_I32 ? (const void *)narrow : (const void *)sizes),
                                    .row_id_map = test_guarded(te, TE_I32, SHAPE(rows)), .chunk_numbers = true};
    te_op_moe_chunk_map(te, &map);
    return map.row_id_map;
}
static float *rg_values(const int64_t *sizes, int64_t cols, te_dtype dtype) {
    float *v = test_normal((RG_ROWS + RG_SPARE) * cols + 1, 3);
    int64_t at = 0;
    for (int g = 0; g < RG_GROUPS; g++)
        for (int64_t end = at + sizes[g] * cols; at < end; at++) v[at] *= rg_size[g];
    for (; at < (RG_ROWS + RG_SPARE) * cols; at++) v[at] = INFINITY;
    v[sizes[0] * cols] = NAN; /* does not count */
    return test_rounded(dtype, v, (RG_ROWS + RG_SPARE) * cols);
}
static te_tensor *rg_part(te_ctx *te, te_dtype dtype, const float *v, int64_t at, int64_t rows, int64_t cols) { return test_tensor(te, dtype, SHAPE(rows, cols), v + at * cols); }
/* Every third number of 3 RG_GROUPS, from the second on. */
static te_tensor *rg_third(te_tensor *x) { return te_tensor_narrow(x, 1, 1, 1); }
static te_tensor *rg_strided(te_ctx *te, float value) { return rg_third(te_tensor_full(te, TE_F32, SHAPE(RG_GROUPS, 3), value)); }

TE_TEST_DEVICES(row_groups_of_sizes) {
    for (int wide = 0; wide < 2; wide++) {
        float *got = test_read(rg_groups(te, rg_sizes, wide ? TE_I64 : TE_I32, RG_ROWS + RG_SPARE));
        REQUIRE_OK(te);
        for (int64_t g = 0, at = 0; g < RG_GROUPS; g++)
            for (int64_t end = at + rg_sizes[g]; at < end; at++) CHECK_EQ_INT(got[at], g);
        for (int64_t at = RG_ROWS; at < RG_ROWS + RG_SPARE; at++) CHECK_EQ_INT(got[at], -1);
    }
}

static const int64_t rg_cols[] = {1, 64, 200, 259};
static const te_dtype rg_dtypes[] = {TE_F32, TE_BF16, TE_F16};

TE_TEST_DEVICES(row_groups_amax) {
    te_tensor *groups = rg_groups(te, rg_sizes, TE_I64, RG_ROWS + RG_SPARE);
    for (int c = 0; c < COUNT(rg_cols); c++)
        for (int d = 0; d < COUNT(rg_dtypes); d++)
            for (int keep = 0; keep < 2; keep++) {
                int64_t cols = rg_cols[c], at = 0;
                float *v = rg_values(rg_sizes, cols, rg_dtypes[d]);
                te_tensor *x = test_tensor(te, rg_dtypes[d], SHAPE(RG_ROWS + RG_SPARE, cols), v), *amax = keep ? rg_strided(te, 2.0f) : test_guarded(te, TE_F32, SHAPE(RG_GROUPS));
                test_case("%lld columns of %s%s", (long long)cols, te_dtype_name(rg_dtypes[d]), keep ? ", kept" : "");
                te_op_amax(te, &(te_op_amax_args){.x = x, .amax = amax, .groups = groups, .keep = keep != 0});
                REQUIRE_OK(te);
                float *got = test_read(te_tensor_contiguous(amax));
                for (int g = 0; g < RG_GROUPS; at += rg_sizes[g++]) {
                    float want = keep ? 2.0f : 0.0f;
                    for (int64_t k = at * cols; k < (at + rg_sizes[g]) * cols; k++)
                        if (fabsf(v[k]) > want) want = fabsf(v[k]);
                    CHECK(got[g] == want);
                }
            }
}

TE_TEST_DEVICES(row_groups_fp8) {
    int turn = 0;
    te_tensor *groups = rg_groups(te, rg_sizes, TE_I32, RG_ROWS + RG_SPARE);
    for (int c = 0; c < COUNT(rg_cols); c++)
        for (int d = 0; d < COUNT(rg_dtypes); d++)
            for (int e5m2 = 0; e5m2 < 2; e5m2++) {
                if (turn++ % test_every_odd(2)) continue;
                te_dtype dtype = rg_dtypes[d], codes = e5m2 ? TE_F8E5M2 : TE_F8E4M3;
                int64_t cols = rg_cols[c], m = RG_ROWS + RG_SPARE, ld = (cols + 15) / 16 * 16, ldc = (m + 15) / 16 * 16, at = 0;
                float *v = rg_values(rg_sizes, cols, dtype), scales[3 * RG_GROUPS];
                for (int i = 0; i < 3 * RG_GROUPS; i++) scales[i] = i % 3 == 1 ? 300.0f / rg_size[i / 3] : NAN;
                te_tensor *scale = rg_third(te_tensor_from_host(te, TE_F32, SHAPE(RG_GROUPS, 3), scales)), *amax = rg_strided(te, 0.5f);
                te_op_fp8_quantize_args cast = {.x = test_tensor(te, dtype, SHAPE(m, cols), v), .row = test_guarded(te, codes, SHAPE(m, ld)), .col = test_guarded(te, codes, SHAPE(cols, ldc)),
                                                .scale = scale, .scale_inv = test_guarded(te, TE_F32, SHAPE(RG_GROUPS)), .amax = amax, .groups = groups};
                te_op_fp8_dequantize_args back = {.q = cast.row, .scale_inv = cast.scale_inv, .y = test_guarded(te, TE_BF16, SHAPE(m, cols)), .groups = groups};
                test_case("%lld columns of %s to %s", (long long)cols, te_dtype_name(dtype), te_dtype_name(codes));
                te_op_fp8_quantize(te, &cast);
                te_op_fp8_dequantize(te, &back);
                REQUIRE_OK(te);
                uint8_t *row = (uint8_t *)test_read_bytes(cast.row), *col = (uint8_t *)test_read_bytes(cast.col);
                float *inverse = test_read(cast.scale_inv), *largest = test_read(te_tensor_contiguous(amax)), *y = test_read(back.y);
                for (int g = 0; g < RG_GROUPS; at += rg_sizes[g++]) {
                    int64_t rows = rg_sizes[g], ld1 = (rows + 15) / 16 * 16;
                    float start = 0.5f;
                    te_op_fp8_quantize_args one = {.x = rg_part(te, dtype, v, at, rows, cols), .row = te_tensor_empty(te, codes, SHAPE(rows, ld)), .col = te_tensor_empty(te, codes, SHAPE(cols, ld1 ? ld1 : 16)),
                                                   .scale = te_tensor_from_host(te, TE_F32, SHAPE(1), &scales[3 * g + 1]), .scale_inv = te_tensor_empty(te, TE_F32, SHAPE(1)),
                                                   .amax = te_tensor_from_host(te, TE_F32, SHAPE(1), &start)};
                    te_op_fp8_dequantize_args one_back = {.q = one.row, .scale_inv = one.scale_inv, .y = te_tensor_empty(te, TE_BF16, SHAPE(rows, cols))};
                    te_op_fp8_quantize(te, &one);
                    te_op_fp8_dequantize(te, &one_back);
                    REQUIRE_OK(te);
                    uint8_t *turned = (uint8_t *)test_read_bytes(one.col);
                    CHECK_BYTES("row", row + at * ld, test_read_bytes(one.row), (size_t)(rows * ld));
                    for (int64_t k = 0; k < cols && rows; k++) CHECK_BYTES("col", col + k * ldc + at, turned + k * (ld1 ? ld1 : 16), (size_t)rows);
                    CHECK_BYTES("y", y + at * cols, test_read(one_back.y), (size_t)(rows * cols) * sizeof(float));
                    CHECK(inverse[g] == test_read(one.scale_inv)[0]);
                    CHECK(largest[g] == test_read(one.amax)[0]);
                }
                for (int64_t k = at * ld; k < m * ld; k++) CHECK(row[k] == 0);
                for (int64_t k = at * cols; k < m * cols; k++) CHECK(y[k] == 0);
                for (int64_t k = 0; k < cols; k++)
                    for (int64_t i = at; i < ldc; i++) CHECK(col[k * ldc + i] == 0);
            }
}

/* Row-wise groups may begin anywhere; column-wise ones at multiples of 16 rows. */
TE_TEST_DEVICES(row_groups_nvfp4) {
    int turn = 0;
    for (int c = 0; c < COUNT(rg_cols); c++)
        for (int d = 0; d < COUNT(rg_dtypes); d++)
            for (int way = 0; way < 5; way++) { /* rows; columns, transformed, swizzled or by 4-over-6 */
                if (turn++ % test_every_odd(3)) continue;
                bool columns = way > 0, rht = way == 2 || way == 3, swizzled = way == 3;
                const int64_t *sizes = columns ? rg_strips : rg_sizes;
                te_dtype dtype = rg_dtypes[d];
                int64_t cols = rg_cols[c], m = RG_ROWS + (columns ? 0 : RG_SPARE), outer = columns ? cols : m, inner = columns ? m : cols, at = 0;
                int64_t ld = (inner + 31) / 32 * 32, lines = (outer + 127) / 128 * 128, blocks = ((inner + 15) / 16 + 3) / 4 * 4;
                float *v = rg_values(sizes, cols, dtype);
                te_tensor *groups = rg_groups(te, sizes, TE_I64, m), *x = test_tensor(te, dtype, SHAPE(m, cols), v);
                te_tensor *amax = test_guarded(te, TE_F32, SHAPE(RG_GROUPS)), *q = test_guarded(te, TE_F4E2M1, SHAPE(outer, ld)), *scale = test_guarded(te, TE_F8E4M3, SHAPE(lines, blocks));
                te_op_nvfp4_quantize_args cast = {.x = x, .rht = rht, .swizzled = swizzled, .groups = groups, .four_over_six = way == 4 ? TE_4OVER6_MAE : TE_4OVER6_OFF};
                te_op_nvfp4_dequantize_args back = {.q = q, .scale = scale, .amax = amax, .y = test_guarded(te, TE_BF16, SHAPE(m, cols)), .columnwise = columns, .rht = rht, .swizzled = swizzled, .groups = groups};
                test_case("%lld columns of %s, way %d", (long long)cols, te_dtype_name(dtype), way);
                if (columns) te_op_nvfp4_amax(te, &(te_op_nvfp4_amax_args){.x = x, .amax_col = amax, .rht = rht, .groups = groups});
                else te_op_amax(te, &(te_op_amax_args){.x = x, .amax = amax, .groups = groups});
                if (columns) cast.col = q, cast.col_scale = scale, cast.amax_col = amax;
                else cast.row = q, cast.row_scale = scale, cast.amax_row = amax;
                te_op_nvfp4_quantize(te, &cast);
                te_op_nvfp4_dequantize(te, &back);
                REQUIRE_OK(te);
                uint8_t *codes = (uint8_t *)test_read_bytes(q);
                float *of_group = test_read(amax), *y = test_read(back.y);
                for (int g = 0; g < RG_GROUPS; at += sizes[g++]) {
                    int64_t rows = sizes[g], outer1 = columns ? cols : rows, inner1 = columns ? (rows + 15) / 16 * 16 : cols, ld1 = (inner1 + 31) / 32 * 32;
                    int64_t lines1 = (outer1 + 127) / 128 * 128, blocks1 = ((inner1 + 15) / 16 + 3) / 4 * 4;
                    if (rows == 0) {
                        CHECK(of_group[g] == 0);
                        continue;
                    }
                    te_tensor *q1 = te_tensor_empty(te, TE_F4E2M1, SHAPE(outer1, ld1)), *scale1 = te_tensor_empty(te, TE_F8E4M3, SHAPE(lines1, blocks1)), *amax1 = te_tensor_empty(te, TE_F32, SHAPE(1));
                    te_op_nvfp4_quantize_args one = {.x = rg_part(te, dtype, v, at, rows, cols), .rht = rht, .swizzled = swizzled, .measure = true, .four_over_six = cast.four_over_six};
                    te_op_nvfp4_dequantize_args one_back = {.q = q1, .scale = scale1, .amax = amax1, .y = te_tensor_empty(te, TE_BF16, SHAPE(rows, cols)), .columnwise = columns, .rht = rht, .swizzled = swizzled};
                    if (columns) one.col = q1, one.col_scale = scale1, one.amax_col = amax1;
                    else one.row = q1, one.row_scale = scale1, one.amax_row = amax1;
                    te_op_nvfp4_quantize(te, &one);
                    te_op_nvfp4_dequantize(te, &one_back);
                    REQUIRE_OK(te);
                    uint8_t *codes1 = (uint8_t *)test_read_bytes(q1);
                    for (int64_t i = 0; i < outer1; i++)
                        CHECK_BYTES("codes", codes + ((columns ? i : at + i) * ld + (columns ? at : 0)) / 2, codes1 + i * ld1 / 2, (size_t)((columns ? rows : cols) + 1) / 2);
                    CHECK(of_group[g] == test_read(amax1)[0]);
                    CHECK_BYTES("y", y + at * cols, test_read(one_back.y), (size_t)(rows * cols) * sizeof(float)); /* codes times scales: so these are alike, too */
                }
            }
}

/* Products of 1 x 128 blocks along k: groups of whole blocks, empty ones, and a last one that ends within a block. */
TE_TEST_DEVICES(row_groups_of_blocks_along_k) {
    static const int64_t k_of[2][4] = {{128, 0, 384, 200}, {0, 256, 0, 0}};
    int turn = 0;
    for (int odd = 0; odd < 3; odd++)
        for (int s = 0; s < 2; s++)
            for (int f32 = 0; f32 < 2; f32++) {
                if (turn++ % test_every_odd(2)) continue;
                const int64_t *sizes = k_of[s];
                int64_t m = odd == 2 ? 300 : odd ? 72 : 128, n = odd == 2 ? 520 : odd ? 40 : 256, k = sizes[0] + sizes[1] + sizes[2] + sizes[3] + 40, ld = (k + 15) / 16 * 16, blocks = (k + 127) / 128, at = 0;
                int64_t lda = (m + 3) / 4 * 4, ldb = (n + 3) / 4 * 4;
                te_dtype dtype = f32 ? TE_F32 : TE_BF16, codes = f32 ? TE_F8E5M2 : TE_F8E4M3;
                te_tensor *xa = te_tensor_normal(te, TE_F32, SHAPE(k, m), 0, 1), *xb = te_tensor_normal(te, TE_F32, SHAPE(k, n), 0, 1);
                te_tensor *a = te_tensor_empty(te, codes, SHAPE(m, ld)), *b = te_tensor_empty(te, TE_F8E4M3, SHAPE(n, ld)), *sa = te_tensor_empty(te, TE_F32, SHAPE(blocks, lda)), *sb = te_tensor_empty(te, TE_F32, SHAPE(blocks, ldb));
                te_tensor *d = test_guarded(te, dtype, SHAPE(4, m, n));
                test_case("m = %lld, n = %lld, sizes %d, %s", (long long)m, (long long)n, s, te_dtype_name(dtype));
                te_op_block_quantize(te, &(te_op_block_quantize_args){.x = xa, .col = a, .col_scale_inv = sa, .fp32_scales = true});
                te_op_block_quantize(te, &(te_op_block_quantize_args){.x = xb, .col = b, .col_scale_inv = sb, .fp32_scales = true});
                te_op_grouped_gemm(te, &(te_op_grouped_gemm_args){.a = a, .b = b, .d = d, .sizes = te_tensor_from_host(te, TE_I64, SHAPE(4), sizes), .groups = 4, .m = m, .n = n, .k = k, .along_k = true, .b_transposed = true,
                                                                  .split_accumulator = true, .scale_a = sa, .scale_b = sb, .scaling_a = TE_SCALING_BLOCK_1D, .scaling_b = TE_SCALING_BLOCK_1D});
                REQUIRE_OK(te);
                float *got = test_read(d), *fa = test_read(a), *fb = test_read(b), *scale_a = test_read(sa), *scale_b = test_read(sb);
                for (int g = 0; g < 4; at += sizes[g++]) {
                    float *want = test_floats(m * n);
                    for (int64_t i = 0; i < m; i++)
                        for (int64_t j = 0; j < n; j++) {
                            double sum = 0;
                            for (int64_t p = at; p < at + sizes[g]; p++)
                                sum += (double)fa[i * ld + p] * scale_a[p / 128 * lda + i] * fb[j * ld + p] * scale_b[p / 128 * ldb + j];
                            want[i * n + j] = (float)sum;
                        }
                    if (sizes[g] == 0) CHECK_BYTES("nothing", got + g * m * n, want, (size_t)(m * n) * sizeof(float));
                    else CHECK_ERROR_BELOW("d", got + g * m * n, want, m * n, f32 ? 3e-4 : 3e-3); /* as test_grouped.c's sums of blocks; bf16 rounds by 2^-9 at most */
                }
            }
}

TE_TEST_DEVICES(row_groups_complaints) {
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(32, 16)), *groups = te_tensor_zeros(te, TE_I32, SHAPE(32)), *two = te_tensor_zeros(te, TE_F32, SHAPE(2)), *three = te_tensor_zeros(te, TE_F32, SHAPE(3));
    te_tensor *one = te_tensor_zeros(te, TE_F32, SHAPE(1)), *q = te_tensor_zeros(te, TE_F8E4M3, SHAPE(32, 16)), *q4 = te_tensor_zeros(te, TE_F4E2M1, SHAPE(32, 32)), *s4 = te_tensor_zeros(te, TE_F8E4M3, SHAPE(128, 4));
    te_op_amax(te, &(te_op_amax_args){.x = x, .amax = two, .groups = te_tensor_zeros(te, TE_I32, SHAPE(31))});
    CHECK_ERROR(te, TE_ERR_SHAPE, "amax: groups is [31]; 32 elements are needed");
    te_op_amax(te, &(te_op_amax_args){.x = x, .amax = te_tensor_zeros(te, TE_F32, SHAPE(1, 2)), .groups = groups});
    CHECK_ERROR(te, TE_ERR_SHAPE, "amax: amax is [1, 2]; with groups [n] or [n, 1] is needed");
    te_op_amax(te, &(te_op_amax_args){.x = x, .amax = two, .groups = groups, .noop = one});
    CHECK_ERROR(te, TE_ERR_INVALID, "groups with noop");
    te_op_fp8_quantize(te, &(te_op_fp8_quantize_args){.x = x, .row = q, .groups = groups, .current = true});
    CHECK_ERROR(te, TE_ERR_INVALID, "groups with `current`: te_op_amax and te_op_scale_from_amax make the groups' scales");
    te_op_fp8_quantize(te, &(te_op_fp8_quantize_args){.x = x, .row = q, .groups = groups, .scale = two, .scale_inv = three});
    CHECK_ERROR(te, TE_ERR_SHAPE, "scale_inv is [3]; 2 elements are needed");
    te_op_fp8_dequantize(te, &(te_op_fp8_dequantize_args){.q = q, .scale_inv = two, .y = x, .groups = te_tensor_zeros(te, TE_I64, SHAPE(32))});
    CHECK_ERROR(te, TE_ERR_DTYPE, "groups is i64");
    te_op_nvfp4_quantize(te, &(te_op_nvfp4_quantize_args){.x = x, .row = q4, .row_scale = s4, .amax_row = two, .groups = groups, .measure = true});
    CHECK_ERROR(te, TE_ERR_INVALID, "groups with measure");
    te_op_nvfp4_quantize(te, &(te_op_nvfp4_quantize_args){.x = x, .row = q4, .row_scale = s4, .amax_row = two, .groups = groups, .two_dimensional = true});
    CHECK_ERROR(te, TE_ERR_INVALID, "groups with two_dimensional");
    te_op_nvfp4_amax(te, &(te_op_nvfp4_amax_args){.x = x, .amax_row = two, .amax_col = three, .groups = groups});
    CHECK_ERROR(te, TE_ERR_SHAPE, "nvfp4_amax: amax_col is [3]; 2 elements are needed");
    te_op_moe_chunk_map(te, &(te_op_moe_chunk_map_args){.sizes = te_tensor_zeros(te, TE_I32, SHAPE(2)), .offsets = te_tensor_zeros(te, TE_I32, SHAPE(2)), .row_id_map = groups, .chunk_numbers = true});
    CHECK_ERROR(te, TE_ERR_INVALID, "chunk_numbers with offsets");
}
