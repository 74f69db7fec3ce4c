/* The kernels with what every machine of an architecture has: SSE2, NEON, or plain C. */

#include <stddef.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "all.h"

static const Kernels kernels = {
#if defined(__aarch64__)
    "NEON",
#else
    "baseline",
#endif
    linear, embed, rms_norm, swiglu, rope, write_rows, seal, unseal, attend_step, attend_chunk};

const Kernels *const kernels_base = &kernels;
