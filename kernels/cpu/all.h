/* All kernels for the one instruction set that the including file has chosen. */

#include "kernels.h"
#include "pool.h"

#include "simd.h"

#include "linear.h"

#include "codec.h"

#include "elementwise.h"

#include "attention.h"
