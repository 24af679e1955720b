/* tests/lm/folder.h: files of folders that tests write. */
#ifndef LM_FOLDER_H
#define LM_FOLDER_H

#include "../te_test.h"
#include <sys/stat.h>

/* The path of a file of a folder of the test. */
static TE_MAYBE_UNUSED const char *in_folder(const char *folder, const char *name) {
    char *path = (char *)test_alloc(512);
    snprintf(path, 512, "%s/%s", test_path(folder), name);
    return path;
}
/* Writes a file. */
static TE_MAYBE_UNUSED void spit(const char *path, const void *bytes, size_t n) {
    FILE *f = fopen(path, "wb");
    REQUIRE(f);
    CHECK(fwrite(bytes, 1, n, f) == n);
    fclose(f);
}
static TE_MAYBE_UNUSED void spit_text(const char *path, const char *text) { spit(path, text, strlen(text)); }

#endif
