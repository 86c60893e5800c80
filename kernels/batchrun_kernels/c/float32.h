/* Columns of float. */

#define COLUMN float

INLINE VECTOR NAME(wide)(const float *x)
{
    return *(const VECTOR *)x;
}

INLINE float NAME(narrow)(float x)
{
    return x;
}
