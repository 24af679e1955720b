#ifndef TE_MSVC_XMMINTRIN
#define TE_MSVC_XMMINTRIN
#ifdef __cplusplus
extern "C" {
#endif
unsigned _mm_getcsr(void);
void _mm_setcsr(unsigned control);
#ifdef __cplusplus
}
#endif
#endif
