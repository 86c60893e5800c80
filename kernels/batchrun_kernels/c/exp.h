/* What is computed over lanes, and exp of LANES floats, within two units in the last place between -87 and 88. */

/* Where `mask` is all ones, a, else b. */
INLINE VECTOR NAME(choose)(INTS mask, VECTOR a, VECTOR b)
{
#if defined(INTRINSICS) && LANES == 16
    return (VECTOR)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)mask), (__m512)b, (__m512)a);
#elif defined(INTRINSICS)
    return _mm256_blendv_ps(b, a, (VECTOR)mask);
#else
    return (VECTOR)((mask & (INTS)a) | (~mask & (INTS)b));
#endif
}

/* The larger; b where either is NaN. */
INLINE VECTOR NAME(larger)(VECTOR a, VECTOR b)
{
#if defined(INTRINSICS) && LANES == 16
    return (VECTOR)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(INTRINSICS)
    return _mm256_max_ps(a, b);
#else
    return NAME(choose)(a > b, a, b);
#endif
}

/* The largest of all lanes, none of which is NaN. */
INLINE float NAME(largest_lane)(VECTOR x)
{
    const INTS lanes = LANE_NUMBERS;
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2)
        x = NAME(larger)(x, __builtin_shuffle(x, lanes ^ half));
    return x[0];
}

/* The sum of all lanes: halves are added, and halves of these. */
INLINE float NAME(sum_of_lanes)(VECTOR x)
{
    const INTS lanes = LANE_NUMBERS;
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2)
        x += __builtin_shuffle(x, lanes ^ half);
    return x[0];
}

/* Of x up to 88. Below -87.3 it stays at the smallest normal float; NaN stays NaN. */
INLINE VECTOR NAME(exp_of_small)(VECTOR x)
{
    const VECTOR zero = {0}, round = zero + 12582912.0f;
    x = NAME(larger)(zero - 87.33654f, x);
    /* x = power * ln 2 + rest; adding 1.5 * 2^23 leaves the rounded power in the low bits. */
    VECTOR shifted = x * 1.44269504f + round;
    VECTOR power = shifted - round;
    VECTOR rest = x - power * 0.693359375f;
    rest = rest + power * 2.12194440e-4f;
    VECTOR sum = rest * 1.3814540105e-3f + 8.3687451362e-3f;
    sum = sum * rest + 4.1668390787e-2f;
    sum = sum * rest + 1.6666520399e-1f;
    sum = sum * rest + 4.9999993432e-1f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
#if defined(INTRINSICS) && LANES == 16
    return (VECTOR)_mm512_scalef_ps((__m512)sum, (__m512)power);
#else
    return sum * (VECTOR)(((INTS)shifted - (INTS)round + 127) << 23);
#endif
}

/* Of any x: above 88.3 it stays at the largest power. */
INLINE VECTOR NAME(exp)(VECTOR x)
{
    const VECTOR zero = {0};
    return NAME(exp_of_small)(NAME(choose)(x > 88.37626f, zero + 88.37626f, x));
}
