/* exp of eight floats, within two units in the last place between -87 and 88. */

/* Where `mask` is all ones, a, else b. */
INLINE float8 NAME(choose)(int8 mask, float8 a, float8 b)
{
#ifdef INTRINSICS
    return _mm256_blendv_ps(b, a, (float8)mask);
#else
    return (float8)((mask & (int8)a) | (~mask & (int8)b));
#endif
}

/* The larger; b where either is NaN. */
INLINE float8 NAME(larger)(float8 a, float8 b)
{
#ifdef INTRINSICS
    return _mm256_max_ps(a, b);
#else
    return NAME(choose)(a > b, a, b);
#endif
}

/* Of x up to 88. Below -87.3 it stays at the smallest normal float; NaN stays NaN. */
INLINE float8 NAME(exp_of_small)(float8 x)
{
    const float8 zero = {0}, round = zero + 12582912.0f;
    x = NAME(larger)(zero - 87.33654f, x);
    /* x = power * ln 2 + rest; adding 1.5 * 2^23 leaves the rounded power in the low bits. */
    float8 shifted = x * 1.44269504f + round;
    float8 power = shifted - round;
    float8 rest = x - power * 0.693359375f;
    rest = rest + power * 2.12194440e-4f;
    float8 sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    return sum * (float8)(((int8)shifted - (int8)round + 127) << 23);
}

/* Of any x: above 88.3 it stays at the largest power. */
INLINE float8 NAME(exp)(float8 x)
{
    const float8 zero = {0};
    return NAME(exp_of_small)(NAME(choose)(x > 88.37626f, zero + 88.37626f, x));
}
