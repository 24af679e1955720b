#ifndef TE_MSVC_STRING
#define TE_MSVC_STRING
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif
void *memcpy(void *to, const void *from, size_t n);
void *memmove(void *to, const void *from, size_t n);
void *memset(void *to, int value, size_t n);
int memcmp(const void *a, const void *b, size_t n);
size_t strlen(const char *s);
int strcmp(const char *a, const char *b);
int strncmp(const char *a, const char *b, size_t n);
char *strcpy(char *to, const char *from);
char *strncpy(char *to, const char *from, size_t n);
char *strcat(char *to, const char *from);
size_t strspn(const char *s, const char *set);
size_t strcspn(const char *s, const char *set);
#ifdef __cplusplus
}
/* C++ has these in two ways: what is const stays const. */
const void *memchr(const void *p, int c, size_t n);
void *memchr(void *p, int c, size_t n);
const char *strchr(const char *s, int c);
char *strchr(char *s, int c);
const char *strrchr(const char *s, int c);
char *strrchr(char *s, int c);
const char *strpbrk(const char *s, const char *set);
char *strpbrk(char *s, const char *set);
const char *strstr(const char *s, const char *what);
char *strstr(char *s, const char *what);
#else
void *memchr(const void *p, int c, size_t n);
char *strchr(const char *s, int c);
char *strrchr(const char *s, int c);
char *strpbrk(const char *s, const char *set);
char *strstr(const char *s, const char *what);
#endif
#endif
