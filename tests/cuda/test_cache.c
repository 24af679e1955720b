/* tests/cuda/test_cache.c: the cache of compiled kernels on disk: keys, damage, folders that cannot be used, a full disk, packs. Needs
 * neither a GPU nor NVRTC. */
#define _GNU_SOURCE
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"

static te__cache_key some_key(void) {
    te__cache_key key = TE_ZERO;
    snprintf(key.kernel, sizeof key.kernel, "norm/norm_fwd");
    snprintf(key.options, sizeof key.options, "X_DT=3,Y_DT=4");
    snprintf(key.arch, sizeof key.arch, "sm_90a");
    snprintf(key.text, sizeof key.text, "0123456789abcdef0123456789abcdef");
    snprintf(key.compiler, sizeof key.compiler, "nvrtc13.0-1a2b3c4d");
    return key;
}

static te__cache open_cache(const char *dir) {
    te__cache cache;
    te__text why = TE_ZERO;
    test_setenv("TE_CACHE_READONLY", NULL);
    test_setenv("TE_CACHE_DIR", dir);
    if (!te__cache_open(&cache, &why)) test_fail(__FILE__, __LINE__, "te__cache_open: %s", te__text_str(&why));
    te__text_free(&why);
    return cache;
}

/* The reason why $TE_CACHE_DIR cannot be used. */
static const char *cache_refusal(void) {
    static char text[512];
    te__cache cache;
    te__text why = TE_ZERO;
    bool usable = te__cache_open(&cache, &why);
    snprintf(text, sizeof text, "%s", usable ? "" : te__text_str(&why));
    CHECK(usable || cache.root[0] == 0);
    te__text_free(&why);
    return text;
}

static bool store(const te__cache *cache, const te__cache_key *key, const char *bytes, size_t size) {
    te__text image = TE_ZERO, why = TE_ZERO;
    te__text_add(&image, bytes, size);
    bool done = te__cache_store(cache, key, &image, &why);
    CHECK_MSG(done == (why.n == 0), "done %d, but \"%s\"", done, te__text_str(&why));
    te__text_free(&image);
    te__text_free(&why);
    return done;
}
/* 1: there and equal to bytes; 0: not there; -1: damaged. */
static int load(const te__cache *cache, const te__cache_key *key, const char *bytes, size_t size) {
    te__text image = TE_ZERO;
    bool damaged = false, there = te__cache_load(cache, key, &image, &damaged);
    if (there) CHECK(image.n == size && memcmp(image.s, bytes, size) == 0 && image.s[size] == 0);
    te__text_free(&image);
    return there ? 1 : damaged ? -1 : 0;
}

static const char *path_of(const te__cache *cache, const te__cache_key *key) {
    te__text path = TE_ZERO;
    te__cache_path(cache->root, key, &path);
    char *copy = (char *)test_alloc(path.n + 1);
    strcpy(copy, path.s);
    te__text_free(&path);
    return copy;
}

/* Not through te.h: flushing hundreds of files to the disk takes its time. */
static bool write_plain(const char *path, const char *bytes, size_t size) {
    FILE *f = fopen(path, "wb");
    bool done = f && fwrite(bytes, 1, size, f) == size;
    return f && fclose(f) == 0 && done;
}

static const char cubin[] = "\x7f" "ELF\0 some\n\nbytes\xff";

TE_TEST(cache_round_trip) {
    te__cache cache = open_cache(test_path("a/b/cache"));
    te__cache_key key = some_key();
    CHECK_EQ_INT(load(&cache, &key, cubin, sizeof cubin), 0);
    CHECK(store(&cache, &key, cubin, sizeof cubin));
    CHECK_EQ_INT(load(&cache, &key, cubin, sizeof cubin), 1);
    CHECK_STR(path_of(&cache, &key), "/a/b/cache/sm_90a/norm/norm_fwd.X_DT=3,Y_DT=4.");
    CHECK_STR(path_of(&cache, &key), ".nvrtc13.0-1a2b3c4d.cubin");
#ifndef _WIN32 /* which has no such bits */
    struct stat st;
    CHECK(stat(cache.root, &st) == 0 && (st.st_mode & 0777) == 0700);
#endif
    CHECK(store(&cache, &key, "other", 5));
    CHECK_EQ_INT(load(&cache, &key, "other", 5), 1);
}

TE_TEST(cache_key_holds_everything) {
    te__cache cache = open_cache(test_path("cache"));
    const te__cache_key key = some_key();
    te__cache_key other;
    CHECK(store(&cache, &key, cubin, sizeof cubin));
#define OTHER(field, value)                                    \
    other = key;                                               \
    snprintf(other.field, sizeof other.field, "%s", value);    \
    CHECK_EQ_INT(load(&cache, &other, cubin, sizeof cubin), 0)
    OTHER(kernel, "norm/norm_bwd");
    OTHER(kernel, "act/norm_fwd");
    OTHER(options, "X_DT=3,Y_DT=5");
    OTHER(options, "");
    OTHER(arch, "sm_100a");
    OTHER(arch, "compute_90");
    OTHER(text, "0123456789abcdef0123456789abcdee");
    OTHER(compiler, "nvrtc13.0-1a2b3c4e");
#undef OTHER
    /* Options that a file name has no room for still tell entries apart. */
    other = key;
    memset(other.options, 'A', 400);
    CHECK(store(&cache, &other, "long", 4));
    other.options[399] = 'B';
    CHECK_EQ_INT(load(&cache, &other, "long", 4), 0);
}

/* An entry that is cut anywhere or has a wrong bit anywhere is no entry, and is replaced by the next store. */
TE_TEST(cache_damaged_entries) {
    te__cache cache = open_cache(test_path("cache"));
    te__cache_key key = some_key();
    const char *path = path_of(&cache, &key);
    te__text whole = TE_ZERO;
    CHECK(store(&cache, &key, cubin, sizeof cubin));
    REQUIRE(te__file_read(path, 1 << 20, &whole, NULL));
    for (size_t n = 0; n < whole.n; n++) {
        test_case("cut to %zu of %zu bytes", n, whole.n);
        REQUIRE(write_plain(path, whole.s, n));
        CHECK_EQ_INT(load(&cache, &key, cubin, sizeof cubin), -1);
    }
    for (size_t n = 0; n < whole.n; n++) {
        test_case("byte %zu", n);
        whole.s[n] = (char)(whole.s[n] ^ 1 << n % 8);
        REQUIRE(write_plain(path, whole.s, whole.n));
        CHECK_EQ_INT(load(&cache, &key, cubin, sizeof cubin), -1);
        whole.s[n] = (char)(whole.s[n] ^ 1 << n % 8);
    }
    test_case("one byte more");
    te__text_put(&whole, "x");
    REQUIRE(write_plain(path, whole.s, whole.n));
    CHECK_EQ_INT(load(&cache, &key, cubin, sizeof cubin), -1);
    CHECK(store(&cache, &key, cubin, sizeof cubin));
    CHECK_EQ_INT(load(&cache, &key, cubin, sizeof cubin), 1);
    te__text_free(&whole);
}

TE_TEST(cache_entry_of_another_key) {
    te__cache cache = open_cache(test_path("cache"));
    te__cache_key key = some_key(), other = some_key();
    snprintf(other.options, sizeof other.options, "X_DT=1,Y_DT=1");
    CHECK(store(&cache, &key, cubin, sizeof cubin));
    CHECK(rename(path_of(&cache, &key), path_of(&cache, &other)) == 0);
    CHECK_EQ_INT(load(&cache, &other, cubin, sizeof cubin), -1);
    /* a folder where a file should be */
    CHECK(mkdir(path_of(&cache, &key), 0700) == 0);
    CHECK_EQ_INT(load(&cache, &key, cubin, sizeof cubin), 0);
    CHECK(!store(&cache, &key, cubin, sizeof cubin));
}

TE_TEST(cache_folder_choice) {
    te__cache cache;
    te__text why = TE_ZERO;
    test_setenv("TE_CACHE_READONLY", NULL);
#ifndef _WIN32 /* where a variable cannot be empty */
    test_setenv("TE_CACHE_DIR", "");
    CHECK(te__cache_open(&cache, &why) && !cache.root[0]);
    te__cache_key key = some_key();
    CHECK(store(&cache, &key, cubin, sizeof cubin)); /* nothing happens */
    CHECK_EQ_INT(load(&cache, &key, cubin, sizeof cubin), 0);
#endif
    test_setenv("TE_CACHE_DIR", NULL);
    test_setenv("XDG_CACHE_HOME", test_path("xdg"));
    CHECK(te__cache_open(&cache, &why) && strcmp(cache.root, test_path("xdg/te")) == 0 && te__dir_exists(cache.root));
    test_setenv("XDG_CACHE_HOME", NULL);
#ifdef _WIN32
    const char *home = "LOCALAPPDATA", *below = "home\\te\\cache";
#else
    const char *home = "HOME", *below = "home/.cache/te";
#endif
    test_setenv(home, test_path("home"));
    CHECK(te__cache_open(&cache, &why) && strcmp(cache.root, test_path(below)) == 0 && te__dir_exists(cache.root));
    test_setenv(home, NULL);
    CHECK_STR(cache_refusal(), "no home folder");
    te__text_free(&why);
}

TE_TEST(cache_folders_that_are_not_used) {
#ifdef _WIN32
    (void)cache_refusal;
    SKIP("Windows has no mode bits and no owners of files");
#else
    const char *dir = test_path("cache");
    test_setenv("TE_CACHE_READONLY", NULL);
    REQUIRE(te__file_write_atomic(test_path("file"), "", 0, NULL));
    test_setenv("TE_CACHE_DIR", test_path("file/cache"));
    CHECK_STR(cache_refusal(), "cannot make the folder");
    REQUIRE(mkdir(dir, 0700) == 0 && chmod(dir, 0770) == 0);
    test_setenv("TE_CACHE_DIR", dir);
    CHECK_STR(cache_refusal(), "can be written by others");
    CHECK(chmod(dir, 0702) == 0);
    CHECK_STR(cache_refusal(), "can be written by others");
    CHECK(chmod(dir, 0755) == 0);
    CHECK(cache_refusal()[0] == 0);
    if (getuid() == 0) CHECK(chown(dir, 12345, 12345) == 0);
    else test_setenv("TE_CACHE_DIR", "/");
    CHECK_STR(cache_refusal(), "belongs to another user");
#endif
}

TE_TEST(cache_full_disk) {
    te__cache cache = open_cache(test_path("cache"));
    te__cache_key key = some_key();
    te__file f;
    CHECK(store(&cache, &key, "before", 6));
    REQUIRE(te__file_open(&f, path_of(&cache, &key), NULL));
    te__file_close(&f);
    for (int64_t bytes = 0; bytes < (int64_t)te__file_size(&f); bytes += 37) {
        te__file_fail_after = bytes;
        CHECK(!store(&cache, &key, cubin, sizeof cubin));
        te__file_fail_after = -1;
        CHECK_EQ_INT(load(&cache, &key, "before", 6), 1);
    }
    CHECK(store(&cache, &key, cubin, sizeof cubin));
    CHECK_EQ_INT(load(&cache, &key, cubin, sizeof cubin), 1);
}

/* A pack is a cache folder that ships with a product: searched first, never written to, and, where there is no NVRTC, an entry of any
 * compiler will do. */
TE_TEST(cache_packs) {
    te__cache pack = open_cache(test_path("pack")), cache;
    te__cache_key key = some_key(), any = some_key(), ptx = some_key();
    te__text list = TE_ZERO, why = TE_ZERO;
    any.compiler[0] = 0;
    snprintf(ptx.arch, sizeof ptx.arch, "compute_90");
    CHECK(store(&pack, &key, "packed", 6));
    CHECK(store(&pack, &ptx, "// ptx", 6));
    te__text_printf(&list, "%s%c%s", test_path("nowhere"), TE__PATH_SEPARATOR, test_path("pack"));
    test_setenv("TE_CACHE_DIR", test_path("cache"));
    test_setenv("TE_CACHE_READONLY", te__text_str(&list));
    CHECK(te__cache_open(&cache, &why));
    CHECK_EQ_INT(load(&cache, &key, "packed", 6), 1);
    CHECK_EQ_INT(load(&cache, &any, "packed", 6), 1);
    CHECK(store(&cache, &key, "mine", 4));
    CHECK_EQ_INT(load(&pack, &key, "packed", 6), 1);
    CHECK_EQ_INT(load(&cache, &key, "packed", 6), 1);
    CHECK_EQ_INT(load(&pack, &any, "packed", 6), 1);
    snprintf(key.compiler, sizeof key.compiler, "nvrtc12.8-00000000");
    CHECK(store(&pack, &key, "older", 5));
    CHECK_EQ_INT(load(&pack, &any, "packed", 6), 1); /* always the same one */
    snprintf(any.arch, sizeof any.arch, "compute_90");
    CHECK_EQ_INT(load(&pack, &any, "// ptx", 6), 1);
    any.options[0] = 0;
    CHECK_EQ_INT(load(&pack, &any, "// ptx", 6), 0);
    /* without a folder of its own */
    test_setenv("TE_CACHE_DIR", "");
    CHECK(te__cache_open(&cache, &why));
    snprintf(key.compiler, sizeof key.compiler, "nvrtc13.0-1a2b3c4d");
    CHECK_EQ_INT(load(&cache, &key, "packed", 6), 1);
    te__text_free(&list);
    te__text_free(&why);
}
