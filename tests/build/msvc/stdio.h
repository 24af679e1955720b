#ifndef TE_MSVC_STDIO
#define TE_MSVC_STDIO
#include <stdarg.h>
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif
typedef struct _iobuf { void *_Placeholder; } FILE;
FILE *__acrt_iob_func(unsigned index);
#define stdin (__acrt_iob_func(0))
#define stdout (__acrt_iob_func(1))
#define stderr (__acrt_iob_func(2))
#define EOF (-1)
#define SEEK_SET 0
#define SEEK_CUR 1
#define SEEK_END 2
FILE *fopen(const char *name, const char *mode);
int fclose(FILE *f);
int fflush(FILE *f);
int fprintf(FILE *f, const char *format, ...);
int fputs(const char *text, FILE *f);
int printf(const char *format, ...);
int snprintf(char *buffer, size_t size, const char *format, ...);
int vsnprintf(char *buffer, size_t size, const char *format, va_list args);
int sscanf(const char *text, const char *format, ...);
size_t fread(void *data, size_t size, size_t count, FILE *f);
size_t fwrite(const void *data, size_t size, size_t count, FILE *f);
#ifdef __cplusplus
}
#endif
#endif
