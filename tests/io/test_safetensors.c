/* Safetensors: what is written is read back, the bytes are the format's, and no file, however made, does more than fail. */
#define _GNU_SOURCE
#include "../te_test.h"

#include <unistd.h>

static const char *spit(const char *name, const void *bytes, size_t size) {
    const char *path = test_path(name);
    FILE *f = fopen(path, "wb");
    fwrite(bytes, 1, size, f);
    fclose(f);
    return path;
}
/* A file with this header and so many bytes of data. */
static const char *file_of(const char *header, size_t data) {
    size_t n = strlen(header);
    uint8_t *bytes = (uint8_t *)test_alloc(8 + n + data);
    for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)((uint64_t)n >> (8 * i));
    memcpy(bytes + 8, header, n);
    for (size_t i = 0; i < data; i++) bytes[8 + n + i] = (uint8_t)(i + 1);
    return spit("hand.safetensors", bytes, 8 + n + data);
}

TE_TEST_DEVICES(safetensors_round_trip) {
    static const te_dtype types[] = {TE_F32, TE_F16, TE_BF16, TE_F8E4M3, TE_F8E5M2, TE_F8E8M0, TE_U8, TE_I32, TE_I64};
    enum { TYPES = COUNT(types) };
    te_safetensors_item items[TYPES + 4];
    char names[TYPES][32];
    uint8_t host[8 * 35];
    for (size_t i = 0; i < sizeof host; i++) host[i] = (uint8_t)(i * 37 + 5);
    for (int i = 0; i < TYPES; i++) {
        snprintf(names[i], sizeof names[i], "of.%s", te_dtype_name(types[i]));
        items[i].name = names[i];
        items[i].tensor = te_tensor_from_host(te, types[i], SHAPE(5, 7), host);
    }
    te_tensor *strided = te_tensor_transpose(te_tensor_from_host(te, TE_F32, SHAPE(5, 7), host), 0, 1);
    items[TYPES] = (te_safetensors_item){"strided", strided};
    items[TYPES + 1] = (te_safetensors_item){"empty", te_tensor_from_host(te, TE_F32, SHAPE(3, 0, 2), host)};
    items[TYPES + 2] = (te_safetensors_item){"scalar", te_tensor_from_host(te, TE_I64, 0, NULL, host)};
    items[TYPES + 3] = (te_safetensors_item){"na\"me\\ \n\t\xC3\xA9 \xF0\x9F\x99\x82", te_tensor_from_host(te, TE_F4E2M1, SHAPE(3, 4), host)};
    const te_metadata metadata[] = {{"format", "pt"}, {"odd \"key\"", "line 1\nline 2 \x01"}};
    const char *path = test_path("all.safetensors");
    CHECK_EQ_INT(te_safetensors_write(te, path, items, COUNT(items), metadata, 2), TE_OK);
    REQUIRE_OK(te);

    te_safetensors *f = te_safetensors_open(te, path);
    REQUIRE(f);
    CHECK_EQ_INT(te_safetensors_count(f), COUNT(items));
    CHECK_STR(te_safetensors_metadata(f, "odd \"key\""), "line 1\nline 2 \x01");
    CHECK_STR(te_safetensors_metadata(f, "format"), "pt");
    CHECK(te_safetensors_metadata(f, "forma") == NULL);
    CHECK(te_safetensors_find(f, "of.f3") == NULL && te_safetensors_at(f, -1) == NULL && te_safetensors_at(f, COUNT(items)) == NULL);
    for (int i = 0; i < COUNT(items); i++) {
        const te_safetensors_entry *e = te_safetensors_find(f, items[i].name);
        test_case("%s", items[i].name);
        REQUIRE(e);
        CHECK_EQ_INT(e->dtype, te_tensor_dtype(items[i].tensor));
        CHECK_EQ_INT(e->bytes, te_tensor_bytes(items[i].tensor));
        CHECK_EQ_INT(e->offset * 8 % (uint64_t)te_dtype_bits(e->dtype), 0); /* aligned to its own elements */
        te_tensor *x = te_safetensors_read(f, items[i].name);
        REQUIRE(x);
        CHECK_BYTES("content", test_read_bytes(x), test_read_bytes(items[i].tensor), te_tensor_bytes(x));
        uint64_t version = te_tensor_version(x);
        CHECK_EQ_INT(te_safetensors_read_into(f, items[i].name, x), TE_OK);
        CHECK(te_tensor_version(x) > version); /* cached copies of it must know */
    }
    test_case("strided");
    te_tensor *into = te_tensor_transpose(te_tensor_zeros(te, TE_F32, SHAPE(5, 7)), 0, 1);
    CHECK_EQ_INT(te_safetensors_read_into(f, "strided", into), TE_OK);
    CHECK_BYTES("into a strided tensor", test_read_bytes(into), test_read_bytes(strided), 4 * 35);
    CHECK_OK(te);
    te_safetensors_close(f);
}

TE_TEST(safetensors_of_e2m1) {
    te_ctx *te = test_context("cpu");
    const char *path = test_path("codes.safetensors");
    uint8_t host[64], back[64];
    for (int k = 0; k < 64; k++) host[k] = (uint8_t)(k * 37 + 11);
    te_safetensors_item items[2] = {{"even", NULL}, {"none", NULL}};
    items[0].tensor = te_tensor_from_host(te, TE_F4E2M1, SHAPE(3, 4), host);
    items[1].tensor = te_tensor_zeros(te, TE_F4E2M1, SHAPE(0, 3));
    CHECK_EQ_INT(te_safetensors_write(te, path, items, 2, NULL, 0), TE_OK);
    te_safetensors *f = te_safetensors_open(te, path);
    CHECK_EQ_INT(te_tensor_to_host(te_safetensors_read(f, "even"), back), TE_OK);
    CHECK(memcmp(back, host, 6) == 0);
    CHECK_EQ_INT(te_tensor_bytes(te_safetensors_read(f, "none")), 0);
    te_safetensors_close(f);
    CHECK_OK(te);
    items[0].tensor = te_tensor_from_host(te, TE_F4E2M1, SHAPE(3, 3), host);
    CHECK(te_safetensors_write(te, path, items, 1, NULL, 0) != TE_OK);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "rows of odd length");
    items[0].tensor = te_tensor_from_host(te, TE_F4E2M1, 0, NULL, host);
    CHECK(te_safetensors_write(te, path, items, 1, NULL, 0) != TE_OK);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "rows of odd length");
}

TE_TEST(safetensors_bytes_are_the_formats) {
    te_ctx *te = test_context("cpu");
    const float a[2] = {1, -2};
    const int64_t b[1] = {7};
    const te_safetensors_item items[] = {{"b", te_tensor_from_host(te, TE_F32, SHAPE(2, 1), a)}, {"a", te_tensor_from_host(te, TE_I64, SHAPE(1), b)}};
    const te_safetensors_item other_order[] = {items[1], items[0]};
    const te_metadata metadata[] = {{"k", "v"}};
    static const char header[] = "{\"__metadata__\":{\"k\":\"v\"},\"a\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[0,8]},"
                                 "\"b\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[8,16]}}";
    size_t n, padded = (sizeof header - 1 + 7) / 8 * 8, m;
    te_safetensors_write(te, test_path("one"), items, 2, metadata, 1);
    te_safetensors_write(te, test_path("two"), other_order, 2, metadata, 1);
    REQUIRE_OK(te);
    uint8_t *one = test_read_file(test_path("one"), &n), *two = test_read_file(test_path("two"), &m);
    REQUIRE(n == 8 + padded + 16 && m == n);
    CHECK_BYTES("header", one + 8, header, sizeof header - 1);
    CHECK_EQ_INT(one[0], padded);
    for (size_t i = sizeof header - 1; i < padded; i++) CHECK(one[8 + i] == ' ');
    CHECK_BYTES("data a", one + 8 + padded, b, 8);
    CHECK_BYTES("data b", one + 16 + padded, a, 8);
    CHECK_BYTES("order of the items", two, one, n);
    te_safetensors_write(te, test_path("none"), NULL, 0, NULL, 0);
    te_safetensors *f = te_safetensors_open(te, test_path("none"));
    CHECK(f && te_safetensors_count(f) == 0 && te_safetensors_find(f, "a") == NULL && te_safetensors_metadata(f, "k") == NULL);
    te_safetensors_close(f);
    CHECK_OK(te);
}

/* Legal headers in unusual clothes. */
TE_TEST(safetensors_reads_what_others_write) {
    te_ctx *te = test_context("cpu");
    const char *path = file_of("{ \"\\u0061\\ud83d\\ude42\" :\t{\"shape\" : [ 2 , 2 ], \"data_offsets\":[0,4],\r\n\"dtype\":\"U8\","
                               "\"future\":{\"x\":[1.5e-3,true,null,\"y\",{}],\"z\":-0}} , \"b\":{\"dtype\":\"BOOL\",\"shape\":[3],\"data_offsets\":[4,7]},"
                               "\"c\":{\"dtype\":\"F16\",\"shape\":[0,72057594037927935],\"data_offsets\":[4,4]},"
                               "\"s\":{\"dtype\":\"F4\",\"shape\":[2,3],\"data_offsets\":[7,10]}}   ", 10);
    te_safetensors *f = te_safetensors_open(te, path);
    REQUIRE_OK(te);
    CHECK_EQ_INT(te_safetensors_count(f), 4);
    te_tensor *x = te_safetensors_read(f, "a\xF0\x9F\x99\x82");
    REQUIRE(x);
    CHECK_EQ_INT(((uint8_t *)test_read_bytes(x))[3], 4);
    CHECK_EQ_INT(te_safetensors_find(f, "b")->dtype, TE_DTYPE_NONE);
    CHECK(te_safetensors_read(f, "b") == NULL);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "\"b\" is BOOL");
    CHECK(te_safetensors_read(f, "s") == NULL);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "rows of odd length");
    CHECK(te_safetensors_read(f, "nobody") == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "no tensor \"nobody\"");
    te_tensor *small = te_tensor_zeros(te, TE_U8, SHAPE(2, 3)), *wide = te_tensor_zeros(te, TE_F32, SHAPE(2, 2));
    CHECK_EQ_INT(te_safetensors_read_into(f, "a\xF0\x9F\x99\x82", small), TE_ERR_SHAPE);
    CHECK_ERROR(te, TE_ERR_SHAPE, "[2, 2] in the file and [2, 3] here");
    CHECK_EQ_INT(te_safetensors_read_into(f, "a\xF0\x9F\x99\x82", wide), TE_ERR_DTYPE);
    CHECK_ERROR(te, TE_ERR_DTYPE, "u8 in the file and f32 here");
    te_safetensors_close(f);
}

#define T(shape, offsets) "{\"a\":{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

TE_TEST(safetensors_refuses_hostile_headers) {
    static const struct {
        const char *header;
        size_t data;
        const char *says;
    } cases[] = {
        {"", 0, "does not begin with '{'"},
        {" {}", 0, "does not begin with '{'"},
        {"{", 0, "'\"' is missing"},
        {"{}x", 0, "something follows the end"},
        {"{} {}", 0, "something follows the end"},
        {"{}", 1, "the tensors end at byte 0 of the data, the file has 1 bytes"},
        {"{\"a\"}", 0, "':' is missing"},
        {"{\"a\":1}", 0, "'{' is missing"},
        {"{\"a\":{}}", 0, "once each"},
        {"{\"__metadata__\":{},}", 0, "'\"' is missing"},
        {"{\"__metadata__\":{\"k\":1}}", 0, "'\"' is missing"},
        {"{\"__metadata__\":{\"k\":\"v\",\"k\":\"w\"}}", 0, "metadata key \"k\" is there twice"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "\"__metadata__\" is there twice"},
        {"{\"a\\q\":{}}", 0, "backslash"},
        {"{\"a\\u12g4\":{}}", 0, "hexadecimal"},
        {"{\"a\\ud800\":{}}", 0, "surrogate"},
        {"{\"a\\ud800\\u0041\":{}}", 0, "surrogate"},
        {"{\"a\\udc00\":{}}", 0, "surrogate"},
        {"{\"a\\u0000\":{}}", 0, "zero"},
        {"{\"a\n\":{}}", 0, "control character"},
        {"{\"a", 0, "ends within a string"},
        {"{\"a\\", 0, "backslash"},
        {"{\"\xC0\xAF\":{}}", 0, "UTF-8"},
        {"{\"\xED\xA0\x80\":{}}", 0, "UTF-8"},
        {"{\"\xF4\x90\x80\x80\":{}}", 0, "UTF-8"},
        {"{\"\xE2\x82\":{}}", 0, "UTF-8"},
        {"{\"a\":{\"dtype\":\"F99\"}}", 0, "unknown dtype \"F99\""},
        {"{\"a\":{\"dtype\":32}}", 0, "'\"' is missing"},
        {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", 1, "2, 1 and 1 times"},
        {T("[1", "[0,4]"), 4, "whole number"},
        {T("[1 2]", "[0,4]"), 4, "',' is missing"},
        {T("[1,]", "[0,4]"), 4, "whole number"},
        {T("[-1]", "[0,4]"), 4, "whole number"},
        {T("[1.0]", "[0,4]"), 4, "not whole"},
        {T("[1e0]", "[0,4]"), 4, "not whole"},
        {T("[01]", "[0,4]"), 4, "whole number"},
        {T("[\"1\"]", "[0,4]"), 4, "whole number"},
        {T("[9223372036854775807]", "[0,4]"), 4, "more elements than 64 bits can count"},
        {T("[9223372036854775808]", "[0,4]"), 4, "63 bits"},
        {T("[99999999999999999999999]", "[0,4]"), 4, "63 bits"},
        {T("[4611686018427387904,4]", "[0,0]"), 0, "more elements than 64 bits can count"},
        {T("[4294967296,4294967296]", "[0,0]"), 0, "more elements than 64 bits can count"},
        {T("[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "more than 8 dimensions"},
        {T("[2]", "[0,4]"), 4, "F32 [2], 64 bits, but its data has 4 bytes"},
        {T("[1]", "[0,8]"), 8, "F32 [1], 32 bits, but its data has 8 bytes"},
        {T("[1]", "[0,8]"), 4, "bytes 0 to 8 of 4 bytes"},
        {T("[1]", "[4,0]"), 4, "bytes 4 to 0"},
        {T("[1]", "[4,8]"), 8, "begins at byte 4 of the data, behind a hole"},
        {T("[1]", "[0,4]"), 8, "end at byte 4 of the data, the file has 8 bytes"},
        {T("[1]", "[0]"), 4, "',' is missing"},
        {T("[1]", "[0,4,4]"), 4, "']' is missing"},
        {T("[1]", "[0,18446744073709551615]"), 4, "63 bits"},
        {"{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]}}", 1, "F4 [3], 12 bits, but its data has 1 bytes"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}", 6,
         "begins at byte 2 of the data, within another tensor"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4,
         "within another tensor"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[4,6]}}", 6,
         "tensor \"a\" is there twice"},
        {"{\"a\":{\"z\":[tru]}}", 0, "a value is missing"},
        {"{\"a\":{\"z\":-}}", 0, "a digit is missing"},
        {"{\"a\":{\"z\":1.}}", 0, "a digit is missing"},
        {"{\"a\":{\"z\":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", 0, "brackets within each other"},
    };
    te_ctx *te = test_context("cpu");
    for (int i = 0; i < COUNT(cases); i++) {
        test_case("%s", cases[i].header);
        CHECK(te_safetensors_open(te, file_of(cases[i].header, cases[i].data)) == NULL);
        CHECK_STR(te_error(te), "hand.safetensors");
        CHECK_ERROR(te, TE_ERR_FORMAT, cases[i].says);
    }
}

TE_TEST(safetensors_refuses_hostile_lengths) {
    te_ctx *te = test_context("cpu");
    const uint8_t huge[16] = {0, 0, 0, 0, 0, 0, 0, 0x80}, large[16] = {1, 0xE1, 0xF5, 0x05}, longer[16] = {9};
    te_safetensors_open(te, spit("x", huge, 7));
    CHECK_ERROR(te, TE_ERR_FORMAT, "7 bytes; a safetensors file has at least 8");
    te_safetensors_open(te, spit("x", huge, 16));
    CHECK_ERROR(te, TE_ERR_FORMAT, "a header of 9223372036854775808 bytes");
    te_safetensors_open(te, spit("x", large, 16)); /* 100,000,001 */
    if (truncate(test_path("x"), 200000000) == 0) te_safetensors_open(te, test_path("x"));
    CHECK_ERROR(te, TE_ERR_FORMAT, "100000000 is the most");
    te_safetensors_open(te, spit("x", longer, 16));
    CHECK_ERROR(te, TE_ERR_FORMAT, "a header of 9 bytes is announced, but only 8 bytes follow: the file is cut short");
    te_safetensors_open(te, test_path("nobody"));
    CHECK_ERROR(te, TE_ERR_IO, "nobody");
    te_safetensors_open(te, test_dir());
    CHECK_ERROR(te, TE_ERR_IO, "not a regular file");
    te_safetensors_open(te, NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "path is NULL");
    te_safetensors_close(NULL);
}

static const char *small_file(te_ctx *te) {
    const te_safetensors_item items[] = {{"weight", te_tensor_normal(te, TE_BF16, SHAPE(3, 5), 0, 1)},
                                         {"bias", te_tensor_normal(te, TE_F32, SHAPE(3), 0, 1)},
                                         {"\xC3\xA9", te_tensor_zeros(te, TE_U8, SHAPE(1))}};
    const te_metadata metadata[] = {{"step", "12"}, {"te.seed", "\"1\""}};
    te_safetensors_write(te, test_path("small.safetensors"), items, 3, metadata, 2);
    return test_path("small.safetensors");
}

TE_TEST(safetensors_cut_short_anywhere) {
    te_ctx *te = test_context("cpu");
    size_t n;
    uint8_t *bytes = test_read_file(small_file(te), &n);
    REQUIRE(n > 100);
    for (size_t i = 0; i < n; i++) {
        test_case("%zu of %zu bytes", i, n);
        CHECK(te_safetensors_open(te, spit("x", bytes, i)) == NULL);
        CHECK_ERROR(te, TE_ERR_FORMAT, "");
    }
}

/* With three bytes changed, a file opens and everything in it can be read, or there is an error; nothing else. */
TE_TEST(safetensors_survives_damage) {
    te_ctx *te = test_context("cpu");
    size_t n;
    uint8_t *bytes = test_read_file(small_file(te), &n), *copy = (uint8_t *)test_alloc(n);
    enum { ROUNDS = 1200 };
    int64_t *at = test_integers(3 * ROUNDS, 1, 0, (int64_t)n), *value = test_integers(3 * ROUNDS, 2, 0, 256);
    static const char tokens[] = "{}[]\",:\\0129u-.e";
    int opened = 0;
    for (int i = 0; i < ROUNDS; i++) {
        memcpy(copy, bytes, n);
        for (int k = 3 * i; k < 3 * i + 1 + i % 3; k++) copy[at[k]] = i % 2 ? (uint8_t)value[k] : (uint8_t)tokens[value[k] % (int)(sizeof tokens - 1)];
        te_safetensors *f = te_safetensors_open(te, spit("x", copy, n));
        CHECK((f == NULL) == !te_ok(te));
        te_scope_begin(te);
        for (int k = 0; k < te_safetensors_count(f); k++) {
            te_tensor *x = te_safetensors_read(f, te_safetensors_at(f, k)->name);
            CHECK(x || te_error_code(te) == TE_ERR_UNSUPPORTED);
        }
        te_scope_end(te);
        opened += f != NULL;
        te_safetensors_close(f);
        te_clear_error(te);
    }
    CHECK_MSG(opened > ROUNDS / 20 && opened < ROUNDS, "%d of %d damaged files opened: the test changes nothing, or everything", opened, ROUNDS);
}

static te_result write_one(te_ctx *te, const char *path, const char *name, const te_tensor *x) {
    const te_safetensors_item item = {name, x};
    return te_safetensors_write(te, path, &item, 1, NULL, 0);
}

TE_TEST(safetensors_write_refuses) {
    te_ctx *te = test_context("cpu"), *other = test_context("cpu");
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(4));
    const char *path = test_path("x");
    const te_safetensors_item twice[] = {{"a", x}, {"b", x}, {"a", x}};
    const te_metadata keys[] = {{"k", "1"}, {"k", "2"}};
    CHECK_EQ_INT(te_safetensors_write(te, path, twice, 3, NULL, 0), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "\"a\" is given twice");
    CHECK_EQ_INT(te_safetensors_write(te, path, twice, 2, keys, 2), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "\"k\" is given twice");
    write_one(te, path, "__metadata__", x);
    CHECK_ERROR(te, TE_ERR_INVALID, "reserves");
    write_one(te, path, "\xFF", x);
    CHECK_ERROR(te, TE_ERR_INVALID, "not UTF-8");
    write_one(te, path, NULL, x);
    CHECK_ERROR(te, TE_ERR_INVALID, "without a name");
    write_one(te, path, "a", NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "without a tensor");
    write_one(te, path, "a", te_tensor_zeros(other, TE_F32, SHAPE(4)));
    CHECK_ERROR(te, TE_ERR_INVALID, "another context");
    write_one(te, path, "a", te_tensor_describe(te, TE_F32, SHAPE(4)));
    CHECK_ERROR(te, TE_ERR_INVALID, "has no memory");
    write_one(te, path, "a", te_tensor_empty(te, TE_F4E2M1, SHAPE(2, 3)));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "odd length");
    te_quantizer *q = te_quantizer_create(te, &(te_quantizer_desc){.kind = TE_QUANT_CURRENT});
    write_one(te, path, "a", te_quantize(q, te_tensor_zeros(te, TE_BF16, SHAPE(16, 16))));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_dequantize");
    te_quantizer_destroy(q);
    CHECK(access(path, F_OK) != 0); /* none of these has left a file */
    write_one(te, test_path("no/such/folder"), "a", x);
    CHECK_ERROR(te, TE_ERR_IO, "no/such/folder");
}

TE_TEST(safetensors_and_checkpoints_say_that_a_path_is_empty) {
    te_ctx *te = test_context("cpu");
    CHECK(write_one(te, "", "x", te_tensor_full(te, TE_F32, SHAPE(4), 3)) == TE_ERR_IO);
    CHECK_ERROR(te, TE_ERR_IO, "cannot write the file: its path is empty");
    CHECK(!te_safetensors_open(te, ""));
    CHECK_ERROR(te, TE_ERR_IO, "cannot open the file: its path is empty");
    CHECK(te_model_save(te, "", NULL, NULL, NULL, 0) == TE_ERR_IO);
    CHECK_ERROR(te, TE_ERR_IO, "its path is empty");
    CHECK(te_model_load(te, "", NULL, NULL) == TE_ERR_IO);
    CHECK_ERROR(te, TE_ERR_IO, "its path is empty");
}

/* A disk that fills up: the file that was there stays whole, and nothing else is left behind. */
TE_TEST(safetensors_full_disk_keeps_the_old_file) {
    te_ctx *te = test_context("cpu");
    te_tensor *large = te_tensor_zeros(te, TE_F32, SHAPE(1 << 20));
    const char *path = small_file(te);
    size_t n, m;
    uint8_t *before = test_read_file(path, &n);
    for (int limit = 4; limit < 4 << 20; limit *= 16) {
        test_case("%d bytes fit", limit);
        if (!test_limit_files(limit)) SKIP("no limit on the size of files here");
        te_result result = write_one(te, path, "large", large);
        test_limit_files(-1);
        CHECK_EQ_INT(result, TE_ERR_IO);
        CHECK_STR(te_error(te), "small.safetensors");
        CHECK_ERROR(te, TE_ERR_IO, "what was there before is untouched");
        uint8_t *after = test_read_file(path, &m);
        CHECK(m == n && memcmp(before, after, n) == 0);
    }
    CHECK_EQ_INT(write_one(te, path, "large", large), TE_OK);
    te_safetensors *f = te_safetensors_open(te, path);
    CHECK(f && te_safetensors_find(f, "large"));
    te_safetensors_close(f);
    /* An error that is pending: the good file is not replaced by what it left. */
    te_tensor_narrow(large, 0, 0, -1);
    CHECK(write_one(te, path, "other", large) == TE_ERR_SHAPE);
    te_clear_error(te);
    f = te_safetensors_open(te, path);
    CHECK(f && te_safetensors_find(f, "large"));
    te_safetensors_close(f);
}
