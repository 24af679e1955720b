/* ops/optim/arithmetic.h: how an optimizer's state of 16 or 8 bits stands for f32. Read by the host and by kernels,
 * which get the same bits: knows base/, and not where the elements lie. */
#ifndef TE__OPTIM_ARITHMETIC_H
#define TE__OPTIM_ARITHMETIC_H

/* The largest magnitude of a scaled state: e4m3's largest code; or half of f16's largest number, so that sums of two
 * stay in it. */
TE__BOTH float te__state_range(int e4m3) { return e4m3 ? 448.0f : 32752.0f; }
/* The factor of the elements before they are rounded. Nothing to scale by gives zeros either way. */
TE__BOTH float te__state_multiplier(float amax, int e4m3) {
    float multiplier = te__rcp_f32(te__div_f32(amax, te__state_range(e4m3)));
    if (multiplier > TE__F32_MAX) return e4m3 ? 1.0f : 0.0f;
    return multiplier;
}
/* The factor of the stored elements: of FP8 the inverse of that multiplier, as FP8 tensors have it. */
TE__BOTH float te__state_scale(float amax, int e4m3) {
    return e4m3 ? te__rcp_f32(te__state_multiplier(amax, 1)) : te__div_f32(amax, te__state_range(0));
}

/* The scale of a loss after a step; it grows where the larger one is a number. */
TE__BOTH void te__scale_after(float *scale, float *inv_scale, float *tracker, float *found_inf, float growth,
                              float backoff, float interval) {
    if (*found_inf != 0.0f) {
        *scale *= backoff;
        *tracker = 0.0f;
    } else if (*tracker + 1.0f >= interval) {
        if (*scale * growth <= TE__F32_MAX) *scale *= growth;
        *tracker = 0.0f;
    } else
        *tracker += 1.0f;
    *inv_scale = te__rcp_f32(*scale);
    *found_inf = 0.0f;
}

/* An f32 master from a parameter in bf16 and the 16 bits that it lacks. The parameter was rounded up where the highest
 * of these is set. */
TE__BOTH float te__join_master(uint16_t param, uint16_t remainder) {
    return te__bits_f32(((uint32_t)param - (remainder >> 15)) << 16 | remainder);
}
TE__BOTH void te__split_master(float master, uint16_t *param, uint16_t *remainder) {
    uint32_t bits = te__f32_bits(master);
    if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0x7fc00000u; /* rounding up other NaN would make numbers of them */
    *remainder = (uint16_t)bits;
    *param = (uint16_t)((bits >> 16) + (bits >> 15 & 1));
}

#endif
