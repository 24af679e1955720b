/* ops/optim/arithmetic.h: how the state of an optimizer represents f32 numbers in 16 or 8 bits. The host and the
 * kernels compile this code and get the same bits. */
#ifndef TE__OPTIM_ARITHMETIC_H
#define TE__OPTIM_ARITHMETIC_H

/* Returns the largest magnitude that a state with a scale may store. For e4m3 this is the largest e4m3 number. For f16
 * this is half of the largest f16 number, so that the sum of two states stays finite. */
TE__BOTH float te__state_range(int e4m3) { return e4m3 ? 448.0f : 32752.0f; }
/* Returns the factor by which elements are multiplied before they are rounded. For an amax of 0 the factor does not
 * matter. */
TE__BOTH float te__state_multiplier(float amax, int e4m3) {
    float multiplier = te__rcp_f32(te__div_f32(amax, te__state_range(e4m3)));
    if (multiplier > TE__F32_MAX) return e4m3 ? 1.0f : 0.0f;
    return multiplier;
}
/* Returns the factor that decodes the stored elements. For FP8 this is the inverse of the multiplier, as for FP8
 * tensors. */
TE__BOTH float te__state_scale(float amax, int e4m3) {
    return e4m3 ? te__rcp_f32(te__state_multiplier(amax, 1)) : te__div_f32(amax, te__state_range(0));
}

/* Updates the loss scale after a step. The scale is multiplied by `growth` only if the product is finite. */
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

/* te__join_master makes an f32 master from a bf16 parameter and the lower 16 bits of the master. If the highest of
 * these is set, the parameter was rounded up. te__split_master is the inverse. */
TE__BOTH float te__join_master(uint16_t param, uint16_t remainder) {
    return te__bits_f32(((uint32_t)param - (remainder >> 15)) << 16 | remainder);
}
TE__BOTH void te__split_master(float master, uint16_t *param, uint16_t *remainder) {
    uint32_t bits = te__f32_bits(master);
    if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0x7fc00000u; /* NaNs with other bits could round up to numbers */
    *remainder = (uint16_t)bits;
    *param = (uint16_t)((bits >> 16) + (bits >> 15 & 1));
}

#endif
