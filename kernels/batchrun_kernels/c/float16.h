/* Columns of float16: read exactly, written rounded to the nearest, and no further than the largest, 65504. */

#define COLUMN uint16_t

INLINE VECTOR NAME(wide)(const uint16_t *x)
{
#if defined(INTRINSICS) && LANES == 16
    return (VECTOR)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
#elif defined(INTRINSICS)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x));
#else
    /* The exponent's bias differs by 112, and a multiplication makes numbers of what has no exponent, too. */
    int8 bits = __builtin_convertvector(*(const half8 *)x, int8), magnitude = (bits & 0x7fff) << 13;
    int8 finite = (int8)((float8)magnitude * 0x1p112f), is_special = magnitude >= 0x0f800000;
    int8 special = magnitude | 0x7f800000;
    return (float8)((finite & ~is_special) | (special & is_special) | (bits & 0x8000) << 16);
#endif
}

INLINE uint16_t NAME(narrow)(float x)
{
    x = x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
#ifdef INTRINSICS
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    float magnitude = fabsf(x), moved = magnitude + 0.5f;
    uint32_t sign, bits, small;
    memcpy(&sign, &x, sizeof sign);
    memcpy(&bits, &magnitude, sizeof bits);
    memcpy(&small, &moved, sizeof small);
    sign = sign >> 16 & 0x8000;
    if (magnitude != magnitude)
        return sign | 0x7e00;
    /* Below 2^-14 a unit of float16 is 2^-24, as that of float is next to 0.5. */
    if (magnitude < 0x1p-14f)
        return sign | (small - 0x3f000000);
    return sign | (((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10));
#endif
}
