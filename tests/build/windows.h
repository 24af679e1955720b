/* tests/build/windows.h: the little of POSIX that the tests use, for MinGW: included in front of every test by the Windows builds of the Makefile.
 * Knows the C library of Windows; windows.h itself is for te.h. */
#ifndef TE_TEST_WINDOWS_H_INCLUDED
#define TE_TEST_WINDOWS_H_INCLUDED
#define _POSIX_C_SOURCE 200809L /* pthread.h's and time.h's own */
#include <direct.h>
#include <fcntl.h>
#include <io.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SIGBUS SIGSEGV
#define mkdir(path, mode) _mkdir(path)

#define off_t long long
#define truncate test_truncate
static inline int test_truncate(const char *path, long long size) {
    FILE *f = fopen(path, "r+b");
    int failed = !f || _chsize_s(_fileno(f), size);
    if (f) fclose(f);
    return failed ? -1 : 0;
}

static inline int getuid(void) { return 0; }
static inline int unsetenv(const char *name) { return _putenv_s(name, ""); }
static inline int setenv(const char *name, const char *value, int overwrite) {
    (void)overwrite;
    return _putenv_s(name, value);
}
/* _mktemp knows 26 names. */
static inline char *mkdtemp(char *path) {
    static unsigned number;
    char *tail = path + strlen(path) - 6;
    for (int i = 0; i < 100000; i++) {
        snprintf(tail, 7, "%06u", (unsigned)(getpid() * 100u + number++) % 1000000u);
        if (_mkdir(path) == 0) return path;
    }
    return NULL;
}
#endif
