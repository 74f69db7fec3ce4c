/* The kernels with AVX-512, whatever the compiler's flags say. */

#include <stddef.h>

#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#define TARGET_AVX512
#include "all.h"

static const Kernels kernels = {"AVX-512", linear, embed, rms_norm, swiglu, rope,
                                write_rows, seal, unseal, attend_step, attend_chunk};

#if defined(__clang__)
#pragma clang attribute pop
#endif

const Kernels *const kernels_avx512 = &kernels;

#else

const Kernels *const kernels_avx512 = NULL;

#endif
