#ifndef TE_MSVC_FENV
#define TE_MSVC_FENV
#ifdef __cplusplus
extern "C" {
#endif
#define FE_TONEAREST 0
#define FE_UPWARD 0x200
#define FE_DOWNWARD 0x100
#define FE_TOWARDZERO 0x300
int fegetround(void);
int fesetround(int rounding);
#ifdef __cplusplus
}
#endif
#endif
