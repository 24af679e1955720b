#ifndef TE_MSVC_STDLIB
#define TE_MSVC_STDLIB
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif
void *malloc(size_t bytes);
void *calloc(size_t count, size_t bytes);
void *realloc(void *p, size_t bytes);
void free(void *p);
char *getenv(const char *name);
int atoi(const char *text);
double atof(const char *text);
double strtod(const char *text, char **end);
float strtof(const char *text, char **end);
long strtol(const char *text, char **end, int base);
long long strtoll(const char *text, char **end, int base);
unsigned long strtoul(const char *text, char **end, int base);
unsigned long long strtoull(const char *text, char **end, int base);
void qsort(void *base, size_t count, size_t size, int(__cdecl *compare)(const void *, const void *));
void *bsearch(const void *key, const void *base, size_t count, size_t size, int(__cdecl *compare)(const void *, const void *));
int abs(int x);
#ifdef __cplusplus
}
#endif
#endif
