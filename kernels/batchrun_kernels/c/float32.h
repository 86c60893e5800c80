/* Columns of float. */

#define COLUMN float

INLINE float8 NAME(wide)(const float *x)
{
    return *(const float8 *)x;
}

INLINE float NAME(narrow)(float x)
{
    return x;
}
