// ops/attn/score_mod.cuh: the user's expressions on scores and masks. For a launch with expressions, score_mod.c writes
// a text that the kernel includes instead of this file. This file has three examples for te_kcheck, which compiles all
// kernels.
#if X_MOD == 1
#define TE_AUX0 TE_F32
#define TE_MOD_SCORE (score - aux0[h] * fabsf(q_idx - kv_idx))
#elif X_MOD == 2
#define TE_MOD_SCORE (50.0f * tanhf(score * (1.0f / 50.0f)))
#define TE_MOD_BPROP (1.0f - tanhf(score * (1.0f / 50.0f)) * tanhf(score * (1.0f / 50.0f)))
#else
#define TE_AUX0 TE_I32
#define TE_MOD_MASK (aux0[b * 4096 + q_idx] == aux0[b * 4096 + kv_idx])
#endif
