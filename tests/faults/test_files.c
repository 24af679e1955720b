/* tests/faults/test_files.c: files from an enemy: how much memory they can take, and what a damaged checkpoint does to a model. tests/io has the message
 * for each kind of damage. */
#define _GNU_SOURCE
#include "model.h"
#include "purse.h"

#include <unistd.h>

/* ---- damage ---------------------------------------------------------------------------------------------------- */

typedef struct bytes {
    uint8_t *data; /* room for twice the size of what was read */
    size_t size;
} bytes;

static uint64_t next_random(uint64_t *state) { /* xorshift64* */
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545F4914F6CDD1Du;
}

static bytes read_bytes(const char *path) {
    bytes b;
    const uint8_t *whole = test_read_file(path, &b.size);
    b.data = (uint8_t *)test_alloc(2 * b.size + 1024);
    if (whole) memcpy(b.data, whole, b.size);
    return b;
}
static void write_bytes(const char *path, const bytes *b) {
    unlink(path); /* ext4 flushes a file that was cut to nothing when it is closed, and a new one when it likes */
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(b->data, 1, b->size, f) == b->size);
    if (f) fclose(f);
}

static size_t header_size(const bytes *b) {
    uint64_t n = 0;
    for (int i = 7; i >= 0; i--) n = n << 8 | b->data[i];
    return (size_t)n;
}
static void set_header_size(bytes *b, uint64_t n) {
    for (int i = 0; i < 8; i++) b->data[i] = (uint8_t)(n >> 8 * i);
}

static size_t pick(uint64_t *state, size_t below) { return below ? (size_t)(next_random(state) % below) : 0; }

/* Removes `gone` bytes of the header and puts text in their place; the announced length follows. */
static void splice(bytes *b, size_t at, size_t gone, const char *text, size_t n) {
    memmove(b->data + at + n, b->data + at + gone, b->size - at - gone);
    memcpy(b->data + at, text, n);
    b->size = b->size - gone + n;
    set_header_size(b, header_size(b) - gone + n);
}

/* One wound, mostly in the header, where all decisions are made. */
static void wound(bytes *b, uint64_t *state) {
    static const char *const numbers[] = {"0", "1", "-1", "2", "8", "4294967296", "9223372036854775807", "18446744073709551615", "1e3", "99999999999999999999"};
    static const char *const words[] = {"{", "}", "[", "]", "\"", ",", ":", "[]", "{}", "null", "true", "\"F32\"", "\"F4\"", "\"I64\"", "\"U8\"", "\"shape\":[0]", "\\u0000", "\\", "\xFF"};
    size_t header = header_size(b), at = 8 + pick(state, header);
    switch (pick(state, 9)) {
    case 0: b->data[pick(state, b->size)] ^= (uint8_t)(1u << pick(state, 8)); break;
    case 1: b->data[at] = (uint8_t)next_random(state); break;
    case 2: b->size = pick(state, b->size + 1); break;
    case 3: set_header_size(b, pick(state, 2) ? header + pick(state, 64) - 32 : next_random(state) >> pick(state, 64)); break;
    case 4: { /* another word */
        const char *w = words[pick(state, COUNT(words))];
        splice(b, at, pick(state, 2), w, strlen(w));
        break;
    }
    case 5:
    case 6: { /* another number where there is one */
        const char *w = numbers[pick(state, COUNT(numbers))];
        size_t end;
        while (at < 8 + header && (b->data[at] < '0' || b->data[at] > '9')) at++;
        for (end = at; end < 8 + header && b->data[end] >= '0' && b->data[end] <= '9';) end++;
        splice(b, at, end - at, w, strlen(w));
        break;
    }
    case 7: { /* a piece of the header twice */
        char piece[64];
        size_t n = pick(state, sizeof piece);
        if (at + n > 8 + header) break;
        memcpy(piece, b->data + at, n);
        splice(b, 8 + pick(state, header), 0, piece, n);
        break;
    }
    default: { /* or not at all */
        size_t n = pick(state, 64);
        if (at + n <= 8 + header) splice(b, at, n, "", 0);
    }
    }
}

/* `whole` with one to four wounds. */
static bytes wounded(const bytes *whole, bytes *copy, uint64_t seed) {
    uint64_t state = (seed + 1) * 0x9E3779B97F4A7C15u;
    memcpy(copy->data, whole->data, whole->size);
    copy->size = whole->size;
    for (size_t n = 1 + pick(&state, 4); n > 0 && copy->size >= 8 && header_size(copy) <= copy->size - 8 && header_size(copy) > 0; n--) wound(copy, &state);
    return *copy;
}

/* ---- memory ---------------------------------------------------------------------------------------------------- */

/* Opens a file and reads all that is in it. No request is larger than the file itself, give or take the lists that te.h keeps of it (104 bytes
 * an entry, in a list that doubles, where the text of an entry takes 50 and of a pair of metadata 6), and a few of their kind at once. */
static int open_and_read(te_ctx *te, purse *p, const char *path, size_t size) {
    int read = 0;
    p->peak = p->held;
    p->largest = 0;
    size_t before = p->held;
    te_scope_begin(te);
    te_safetensors *f = te_safetensors_open(te, path);
    CHECK((f == NULL) == !te_ok(te));
    CHECK_MSG(f || te_error_code(te) == TE_ERR_FORMAT, "%s: %s", te_result_name(te_error_code(te)), te_error(te));
    for (int i = 0; i < te_safetensors_count(f); i++) {
        te_scope_begin(te);
        te_tensor *x = te_safetensors_read(f, te_safetensors_at(f, i)->name);
        CHECK(x || te_error_code(te) == TE_ERR_UNSUPPORTED || te_error_code(te) == TE_ERR_SHAPE);
        if (!x && te_error_code(te) == TE_ERR_SHAPE) CHECK_STR(te_error(te), "[0, "); /* empty, but of more columns than a tensor may have */
        te_clear_error(te);
        CHECK_MSG(te_tensor_bytes(x) <= size, "a tensor of %zu bytes from a file of %zu", te_tensor_bytes(x), size);
        read += x != NULL;
        te_scope_end(te);
    }
    te_safetensors_close(f);
    te_scope_end(te);
    te_clear_error(te);
    te_memory_trim(te);
    CHECK_MSG(p->largest <= 3 * size + 8192, "a request for %zu bytes for the sake of a file of %zu", p->largest, size);
    CHECK_MSG(p->peak - before <= 10 * size + 16384, "%zu bytes held at once for the sake of a file of %zu", p->peak - before, size);
    return read;
}

TE_TEST(hostile_files_take_no_memory) {
    purse *p = new_purse();
    te_ctx_desc desc = purse_desc(p, NULL);
    te_ctx *te = test_context_with(&desc);
    const char *path = test_path("x.safetensors");
    enum { ROUNDS = 4000 };
    te_tensor *x = te_tensor_normal(te, TE_BF16, SHAPE(3, 5), 0, 1), *y = te_tensor_zeros(te, TE_F32, SHAPE(7)), *z = te_tensor_zeros(te, TE_I64, SHAPE(2, 1, 2));
    const te_safetensors_item items[] = {{"layer.0.weight", x}, {"layer.0.bias", y}, {"ids", z}, {"\xC3\xA9", y}};
    const te_metadata metadata[] = {{"step", "12"}, {"te.seed", "\"1\""}};
    REQUIRE(te_safetensors_write(te, path, items, 4, metadata, 2) == TE_OK);
    bytes whole = read_bytes(path), copy = read_bytes(path);
    REQUIRE(whole.size > 200);
    CHECK_EQ_INT(open_and_read(te, p, path, whole.size), 4);
    int opened = 0;
    for (int i = 0; i < ROUNDS; i++) {
        test_case("damage %d", i);
        copy = wounded(&whole, &copy, (uint64_t)i);
        write_bytes(path, &copy);
        opened += open_and_read(te, p, path, copy.size) > 0;
    }
    CHECK_MSG(opened > ROUNDS / 100 && opened < ROUNDS / 2, "%d of %d damaged files could be read: the test changes nothing, or everything", opened, ROUNDS);

    /* as many names as fit into a file, and a few huge claims */
    for (int kind = 0; kind < 4; kind++) {
        static const char *const each[] = {"\"%x\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},", "\"%x\":\"\",", "\"%x\":[[[[[[[[]]]]]]]],",
                                           "\"%x\":{\"dtype\":\"I64\",\"shape\":[0,1152921504606846975],\"data_offsets\":[0,0]},"};
        char *text = (char *)test_alloc(400000);
        size_t n = 8;
        test_case("kind %d", kind);
        n += (size_t)snprintf(text + n, 100, kind == 1 ? "{\"__metadata__\":{" : "{");
        for (int i = 0; n < 300000; i++) n += (size_t)snprintf(text + n, 200, each[kind], i);
        n += (size_t)snprintf(text + n - 1, 100, kind == 1 ? "}}" : "}") - 1;
        bytes b = {(uint8_t *)text, n};
        set_header_size(&b, n - 8);
        write_bytes(path, &b);
        open_and_read(te, p, path, n);
    }
    CHECK_OK(te);
}

/* A file that is larger than what it holds: none of it is read. */
TE_TEST(large_files_with_small_headers) {
    purse *p = new_purse();
    te_ctx_desc desc = purse_desc(p, NULL);
    te_ctx *te = test_context_with(&desc);
    static const char header[] = "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}";
    char text[200];
    memcpy(text + 8, header, sizeof header);
    bytes b = {(uint8_t *)text, 8 + sizeof header - 1 + 4};
    set_header_size(&b, sizeof header - 1);
    const char *path = test_path("sparse");
    write_bytes(path, &b);
    CHECK_EQ_INT(open_and_read(te, p, path, 100), 1);
    REQUIRE(truncate(path, (off_t)1 << 33) == 0);
    CHECK_EQ_INT(open_and_read(te, p, path, 100), 0);
}

/* ---- checkpoints ----------------------------------------------------------------------------------------------- */

/* A damaged checkpoint is loaded whole or not at all. */
TE_TEST(damaged_checkpoints_change_nothing) {
    te_ctx *te = test_context("cpu");
    model saved = model_create(te, TE_RECIPE_DELAYED, true), m = model_create(te, TE_RECIPE_DELAYED, true);
    const char *path = test_path("model.safetensors"), *damaged = test_path("damaged.safetensors");
    enum { ROUNDS = 1500 };
    model_step(te, &saved);
    REQUIRE(te_model_save(te, path, saved.gpt, saved.adam, NULL, 0) == TE_OK);
    model_step(te, &m);
    model_step(te, &m);
    bytes whole = read_bytes(path), copy = read_bytes(path);
    uint64_t seed, offset, then_seed, then_offset, hash = test_hash(m.gpt);
    int loaded = 0;
    te_rng_get(te, &seed, &offset);
    for (int i = 0; i < ROUNDS; i += test_every_sanitized(2)) {
        test_case("damage %d", i);
        copy = wounded(&whole, &copy, (uint64_t)i);
        write_bytes(damaged, &copy);
        if (te_model_load(te, damaged, m.gpt, m.adam) != TE_OK) {
            CHECK(!te_ok(te) && strlen(te_error(te)) > 0);
            te_clear_error(te);
            te_rng_get(te, &then_seed, &then_offset);
            CHECK(test_hash(m.gpt) == hash && te_optimizer_steps(m.adam) == 2 && seed == then_seed && offset == then_offset);
            continue;
        }
        CHECK_OK(te); /* the wound was in a value, or in something that nobody needs */
        loaded++;
        model_destroy(&m);
        m = model_create(te, TE_RECIPE_DELAYED, true);
        model_step(te, &m);
        model_step(te, &m);
        hash = test_hash(m.gpt);
        te_rng_get(te, &seed, &offset);
    }
    CHECK_MSG(loaded > 0 && loaded < ROUNDS / test_every_sanitized(2) / 2, "%d of %d damaged checkpoints were loaded", loaded, ROUNDS / test_every_sanitized(2));
    CHECK(te_model_load(te, path, m.gpt, m.adam) == TE_OK && test_hash(m.gpt) == test_hash(saved.gpt));
    CHECK_OK(te);
    model_destroy(&m);
    model_destroy(&saved);
}
