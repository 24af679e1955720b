/* tests/sys/test_file.c: reading, atomic replacement with a disk that fills up at every byte, folders, locks. */
#include "../te_test.h"
#include "base/common.h"
#include "base/hash.c"
#include "base/text.c"
#ifndef TE_TEST_HOOKS
#define TE_TEST_HOOKS
#endif
#include "sys/sys.c"
#include "sys/file.c"

static bool count_entry(void *user, const char *name) {
    te__text *names = (te__text *)user;
    te__text_printf(names, "[%s]", name);
    return true;
}
static const char *entries(void) {
    static te__text names;
    te__text_clear(&names);
    te__dir_list(test_dir(), count_entry, &names, NULL);
    return te__text_str(&names);
}
static const char *content(const char *path) {
    static te__text text;
    te__text_clear(&text);
    te__text why = TE_ZERO;
    if (!te__file_read(path, 1000, &text, &why)) test_fail(__FILE__, __LINE__, "%s", te__text_str(&why));
    te__text_free(&why);
    return te__text_str(&text);
}

/* How this system words a failure; the numbers are its own. */
#ifdef _WIN32
#define OS_SAYS(posix, windows) os_says(windows)
static const char *os_says(DWORD code) {
    SetLastError(code);
#else
#define OS_SAYS(posix, windows) os_says(posix)
static const char *os_says(int code) {
    errno = code;
#endif
    static char words[256];
    te__text text = TE_ZERO;
    te__text_os_error(&text);
    snprintf(words, sizeof words, "%s", te__text_str(&text));
    te__text_free(&text);
    return words;
}

TE_TEST(write_and_read) {
    const char *path = test_path("a.bin");
    te__text why = TE_ZERO;
    CHECK(te__file_write_atomic(path, "hello", 5, &why));
    CHECK(strcmp(content(path), "hello") == 0);
    CHECK(te__file_write_atomic(path, "shorter?", 3, &why));
    CHECK(strcmp(content(path), "sho") == 0);
    CHECK(te__file_write_atomic(path, "", 0, &why));
    CHECK(strcmp(content(path), "") == 0);
    CHECK(te__file_exists(path) && !te__dir_exists(path) && te__dir_exists(test_dir()) && !te__file_exists(test_dir()));
    CHECK(strcmp(entries(), "[a.bin]") == 0);
    CHECK(te__file_remove(path, &why) && !te__file_exists(path));
    CHECK_EQ_INT(why.n, 0);
    CHECK(!te__file_remove(path, &why));
    CHECK_STR(te__text_str(&why), OS_SAYS(ENOENT, ERROR_FILE_NOT_FOUND));
    te__text_free(&why);
}

TE_TEST(read_at) {
    const char *path = test_path("numbers");
    enum { COUNT_OF = 100000 };
    uint32_t *number = (uint32_t *)test_alloc(COUNT_OF * sizeof(uint32_t)), got[10];
    for (uint32_t i = 0; i < COUNT_OF; i++) number[i] = i * i;
    te__file_out out;
    te__text why = TE_ZERO;
    REQUIRE(te__file_out_begin(&out, path, &why));
    for (int i = 0; i < COUNT_OF; i += 1000) CHECK(te__file_out_write(&out, number + i, 1000 * sizeof(uint32_t)));
    CHECK_EQ_INT(out.written, COUNT_OF * sizeof(uint32_t));
    CHECK(!te__file_exists(path)); /* not before it is whole */
    CHECK(te__file_out_commit(&out));
    te__file f;
    REQUIRE(te__file_open(&f, path, &why));
    CHECK_EQ_INT(te__file_size(&f), COUNT_OF * sizeof(uint32_t));
    CHECK(te__file_read_at(&f, 4 * 777, got, sizeof got, &why) && memcmp(got, number + 777, sizeof got) == 0);
    CHECK(te__file_read_at(&f, te__file_size(&f), got, 0, &why));
    CHECK_EQ_INT(why.n, 0);
    CHECK(!te__file_read_at(&f, te__file_size(&f) - 39, got, sizeof got, &why));
    CHECK_STR(te__text_str(&why), "too early");
    te__file_close(&f);
    te__file_close(&f);
    te__text_free(&why);
}

TE_TEST(refusals) {
    te__text why = TE_ZERO, into = TE_ZERO;
    te__file f;
    CHECK(!te__file_open(&f, test_path("missing"), &why));
    CHECK_STR(te__text_str(&why), "missing: ");
    CHECK_STR(te__text_str(&why), OS_SAYS(ENOENT, ERROR_FILE_NOT_FOUND));
    te__text_clear(&why);
    CHECK(!te__file_open(&f, test_dir(), &why));
    CHECK_STR(te__text_str(&why), "not a regular file");
    te__text_clear(&why);
    CHECK(te__file_write_atomic(test_path("big"), "0123456789", 10, NULL));
    CHECK(!te__file_read(test_path("big"), 9, &into, &why));
    CHECK_STR(te__text_str(&why), "10 bytes, at most 9");
    CHECK(te__file_read(test_path("big"), 10, &into, NULL) && into.n == 10);
    te__text_clear(&why);
    CHECK(!te__file_write_atomic(test_path("no/such/folder/file"), "x", 1, &why));
    CHECK_STR(te__text_str(&why), OS_SAYS(ENOENT, ERROR_PATH_NOT_FOUND));
    te__text_clear(&why);
    CHECK(!te__file_write_atomic(test_dir(), "x", 1, &why)); /* a folder has the name */
    CHECK_STR(te__text_str(&why), "it is a folder, not a regular file");
    te__text_free(&why);
    te__text_free(&into);
}

TE_TEST(disk_full) {
    const char *path = test_path("checkpoint");
    CHECK(te__file_write_atomic(path, "the previous one", 16, NULL));
    for (int budget = 0; budget <= 12; budget++) {
        te__text why = TE_ZERO;
        te__file_out out;
        te__file_fail_after = budget;
        CHECK(te__file_out_begin(&out, path, &why));
        bool first = te__file_out_write(&out, "12345", 5), second = te__file_out_write(&out, "678901", 6);
        CHECK(first == (budget >= 5) && second == (budget >= 11));
        CHECK(te__file_out_commit(&out) == (budget >= 11));
        te__file_out_abort(&out);
        te__file_fail_after = -1;
        CHECK(strcmp(content(path), budget >= 11 ? "12345678901" : "the previous one") == 0);
        CHECK(strcmp(entries(), "[checkpoint]") == 0); /* nothing is left behind */
        if (budget < 11) CHECK_STR(te__text_str(&why), OS_SAYS(ENOSPC, ERROR_DISK_FULL));
        else CHECK_EQ_INT(why.n, 0);
        te__text_free(&why);
    }
    test_setenv("TE_TEST_FILE_FAIL_AFTER", "3");
    CHECK(!te__file_write_atomic(path, "1234", 4, NULL) && te__file_write_atomic(path, "123", 3, NULL));
    test_setenv("TE_TEST_FILE_FAIL_AFTER", NULL);
    CHECK(te__file_write_atomic(path, "1234", 4, NULL));
}

TE_TEST(abort_keeps_the_old_one) {
    const char *path = test_path("kept");
    CHECK(te__file_write_atomic(path, "old", 3, NULL));
    te__file_out out;
    CHECK(te__file_out_begin(&out, path, NULL) && te__file_out_write(&out, "new", 3));
    te__file_out_abort(&out);
    CHECK(!te__file_out_write(&out, "more", 4) && !te__file_out_commit(&out));
    CHECK(strcmp(content(path), "old") == 0 && strcmp(entries(), "[kept]") == 0);
}

TE_TEST(dir_make_and_private) {
    te__text why = TE_ZERO;
    const char *path = test_path("a/b//c/");
    CHECK(te__dir_make(path, &why) && te__dir_exists(path) && te__dir_make(path, &why));
    CHECK(te__dir_is_private(path, &why));
    CHECK_EQ_INT(why.n, 0);
#ifndef _WIN32 /* which has no mode bits */
    chmod(path, 0770);
    CHECK(!te__dir_is_private(path, &why));
    CHECK_STR(te__text_str(&why), "can be written by others");
    te__text_clear(&why);
    if (te__user_id() != 0) {
        CHECK(!te__dir_is_private("/", &why));
        CHECK_STR(te__text_str(&why), "belongs to another user");
    }
    te__text_clear(&why);
#endif
    CHECK(te__file_write_atomic(test_path("file"), "", 0, NULL));
    CHECK(!te__dir_make(test_path("file"), &why));
    CHECK_STR(te__text_str(&why), "something else has its name");
    te__text_clear(&why);
    CHECK(!te__dir_make(test_path("file/below"), &why));
    CHECK_STR(te__text_str(&why), OS_SAYS(ENOTDIR, ERROR_PATH_NOT_FOUND));
    te__text_clear(&why);
    CHECK(!te__dir_list(test_path("nowhere"), count_entry, NULL, &why));
    CHECK_STR(te__text_str(&why), "cannot list");
    te__text_free(&why);
}

TE_TEST(path_dir_length) {
    CHECK(te__path_dir_length("a") == 0 && te__path_dir_length("/a") == 1 && te__path_dir_length("b/c/d") == 3 && te__path_dir_length("") == 0);
    CHECK(te__path_is_absolute("/a") && !te__path_is_absolute("a/b") && !te__path_is_absolute(""));
}

static void lock_and_add(void *user) {
    int64_t *shared = (int64_t *)user; /* shared[0] is guarded by the lock alone */
    const char *path = (const char *)(shared + 1);
    for (int i = 0; i < 50; i++) {
        te__lock lock;
        if (!te__lock_acquire(&lock, path, NULL)) return;
        int64_t seen = te__atomic_load(&shared[0]); /* apart: the lock must make one of the two; atomic only so that the */
        te__sleep(1e-6);                            /* thread sanitizer, which knows nothing of file locks, is content */
        te__atomic_store(&shared[0], seen + 1);
        te__lock_release(&lock);
    }
}

TE_TEST(lock_excludes) {
    te__lock one, two;
    te__text why = TE_ZERO;
    const char *path = test_path("lock");
    CHECK(te__lock_acquire(&one, path, &why));
    CHECK_EQ_INT(te__lock_try(&two, path, false, &why), TE__LOCK_BUSY);
    CHECK_EQ_INT(why.n, 0);
    te__lock_release(&one);
    CHECK_EQ_INT(te__lock_try(&two, path, false, &why), TE__LOCK_HELD);
    te__lock_release(&two);
    te__lock_release(&two);
    CHECK_EQ_INT(te__lock_try(&two, test_path("no/folder"), false, &why), TE__LOCK_FAILED);
    CHECK_STR(te__text_str(&why), "cannot lock");
    te__text_free(&why);

    int64_t *shared = (int64_t *)test_alloc(8 + strlen(path) + 1);
    memcpy(shared + 1, path, strlen(path) + 1);
    te__thread thread[4];
    for (int i = 0; i < 4; i++) REQUIRE(te__thread_start(&thread[i], lock_and_add, shared));
    for (int i = 0; i < 4; i++) te__thread_join(&thread[i]);
    CHECK_EQ_INT(shared[0], 200);
}
