/* Turns a head's pairs (i, i + turned / 2) by its token's angles, and leaves what is behind `turned` as it was: x and y
 * [dim], not the same; cos and sin [turned]. */
INLINE void turn_head(const float *x, const float *cos, const float *sin, float *y, long dim, long turned)
{
    const long half = turned / 2;
    const float *high = x + half;
    for (long i = 0; i < half; i++) {
        y[i] = x[i] * cos[i] - high[i] * sin[i];
        y[half + i] = high[i] * cos[half + i] + x[i] * sin[half + i];
    }
    for (long i = turned; i < dim; i++)
        y[i] = x[i];
}
