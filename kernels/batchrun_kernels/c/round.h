/* Rows of x rounded to 8 bits in groups, as gemm_int8.h multiplies them. */

INLINE INTS NAME(larger_of_integers)(INTS a, INTS b)
{
#if defined(INTRINSICS) && LANES == 16
    return (INTS)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(INTRINSICS)
    return (INTS)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    const INTS mask = a > b;
    return (mask & a) | (~mask & b);
#endif
}

/* In lane i the sum of all lanes of x[i], or the largest of them. x is changed. */
INLINE INTS NAME(across)(INTS x[LANES], const int sums)
{
    const INTS lanes = LANE_NUMBERS;
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2) {
        /* Half of the lanes of x[i] and half of those of x[i + half], each with the other half. */
        const INTS second = ((lanes & half) != 0) & LANES;
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) {
            const INTS own = __builtin_shuffle(x[i], x[i + half], lanes + second);
            const INTS other = __builtin_shuffle(x[i], x[i + half], (lanes ^ half) + second);
            if (sums)
                x[i] = own + other;
            else
                x[i] = NAME(larger_of_integers)(own, other);
        }
    }
    return x[0];
}

/* The nearest integers to x * factor, ties to even: as if x * factor had all its digits. */
INLINE INTS NAME(nearest)(VECTOR x, float factor)
{
#ifdef INTRINSICS
    const VECTOR zero = {0}, magic = zero + 12582912.0f;
    return (INTS)(x * factor + magic) - (INTS)magic;
#else
    INTS nearest;
    for (int lane = 0; lane < LANES; lane++) {
        const double shifted = (double)x[lane] * factor + 6755399441055744.0;
        int64_t bits;
        memcpy(&bits, &shifted, sizeof bits);
        nearest[lane] = (int)bits;
    }
    return nearest;
#endif
}

/* `num` groups, LANES at most, each `from` its place in x. The scale of one that is not finite is NaN; one with
 * nothing of 1e-30 is zero. */
INLINE void NAME(round_groups)(const float *const *from, struct NAME(group) *to, long num)
{
    const VECTOR zero = {0};
    INTS some[LANES];
    /* Of numbers without a sign the bits have the same order, and those of NaN are the largest. */
    for (long g = 0; g < LANES; g++) {
        some[g] = (INTS){0};
        if (g < num)
#pragma GCC unroll 4
            for (int i = 0; i < GROUP; i += LANES)
                some[g] = NAME(larger_of_integers)(*(const INTS *)(from[g] + i) & 0x7fffffff, some[g]);
    }
    const VECTOR largest = (VECTOR)NAME(across)(some, 0), scales = largest * (1.0f / 127) + largest * 0.0f;
    const VECTOR factors = NAME(choose)(largest >= 1e-30f, 127.0f / largest, zero);
    for (long g = 0; g < num; g++) {
        some[g] = (INTS){0};
#pragma GCC unroll 4
        for (int i = 0; i < GROUP; i += LANES) {
            const INTS integers = NAME(nearest)(*(const VECTOR *)(from[g] + i), factors[g]);
            *(NARROW *)(to[g].x + i) = __builtin_convertvector(integers, NARROW);
            some[g] += integers;
        }
    }
    const INTS corrections = NAME(across)(some, 1) * -128;
    for (long g = 0; g < num; g++) {
        to[g].scale = scales[g];
        to[g].correction = corrections[g];
    }
}

/* x[m][k] as `rounded` [m][groups], zero behind k. */
static void NAME(round_rows)(const float *x, void *rounded, long m, long k)
{
    const long groups = groups_of(k), whole = k / GROUP, all = m * groups;
#pragma omp parallel for if (m * k > SMALL_ROWS)
    for (long start = 0; start < all; start += LANES) {
        const long num = all - start < LANES ? all - start : LANES;
        const float *from[LANES], *next = x + start / groups * k + start % groups * GROUP;
        float last[LANES][GROUP];
        long group = start % groups;
        for (long g = 0; g < num; g++) {
            from[g] = next;
            if (group == whole) {
                memset(last[g], 0, sizeof last[g]);
                from[g] = memcpy(last[g], next, (k - whole * GROUP) * sizeof(float));
            }
            next += group == whole ? k - whole * GROUP : GROUP;
            group = group + 1 < groups ? group + 1 : 0;
        }
        NAME(round_groups)(from, (struct NAME(group) *)rounded + start, num);
    }
}
