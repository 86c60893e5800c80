/* All kernels with the instructions of SET: with columns of float, and those that read a pool with columns of float16. */

#define NAME(x) JOIN(x, SET)
#include "float32.h"
#include "tile.h"
#include "exp.h"
#include "elementwise.h"
#include "gemm.h"
#include "gemm_best.h"
#include "gemm_glu.h"
#include "gemm_int8.h"
#include "round.h"
#include "attention.h"
#include "write.h"
#include "ceiling.h"
#undef NAME
#undef COLUMN
#define NAME(x) JOIN(x##_half, SET)
#include "float16.h"
#include "tile.h"
#include "exp.h"
#include "attention.h"
#include "write.h"
#undef NAME
#undef COLUMN
#undef SET
#undef VECTOR
#undef INTS
#undef ROUNDED
#undef NARROW
#undef LANE_NUMBERS
#undef LANES
#undef ROWS
#undef FOR_ROWS
#undef INT8_ROWS
#undef FOR_INT8_ROWS
