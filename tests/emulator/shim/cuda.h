// The part of CUDA that the kernels use, for the CPU; PTX instructions are in instructions.cuh.
#pragma once
#include <math.h>

#include <algorithm>

#include "lanes.h"

#define __device__
#define __forceinline__ inline __attribute__((__always_inline__))

typedef _Float16 __half;
typedef bfloat __nv_bfloat16;
struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

struct Dim3 {
  uint32_t x, y, z;
};
MSL_UNSEEN inline Dim3 dim3_of(const uint32_t* p) { return {p[0], p[1], p[2]}; }
#define threadIdx dim3_of(msl::lane->position)
#define blockIdx dim3_of(msl::geometry.group_position)
#define gridDim dim3_of(msl::geometry.groups)

template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(b) : T(a);
}

// Never fused with what is around them.
#define CUDA_ROUNDED(name, op)                                                          \
  inline __attribute__((noinline)) float name(float a, float b) { return a op b; }
CUDA_ROUNDED(__fadd_rn, +)
CUDA_ROUNDED(__fsub_rn, -)
CUDA_ROUNDED(__fmul_rn, *)
CUDA_ROUNDED(__fdiv_rn, /)
CUDA_ROUNDED(__fdividef, /)
inline __half __float2half_rn(float x) { return __half(x); }
inline float __half2float(__half x) { return float(x); }
inline uint16_t __half_as_ushort(__half x) { return __builtin_bit_cast(uint16_t, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __uint_as_float(uint32_t x) { return __builtin_bit_cast(float, x); }

enum Memories { DEVICE_AND_SHARED = 3 };
inline void __syncthreads(MSL_LINE) { msl::threadgroup_barrier(DEVICE_AND_SHARED, line); }
inline void __syncwarp(MSL_LINE) { msl::simdgroup_barrier(DEVICE_AND_SHARED, line); }
template <class T>
MSL_MACHINERY T __shfl_sync(uint32_t, T value, int from, MSL_LINE) {
  msl::exchange(value, msl::Op::shuffle, line);
  return msl::from_lane<T>(from & 31);
}
template <class T>
MSL_MACHINERY T __shfl_xor_sync(uint32_t mask, T value, int distance, MSL_LINE) {
  return __shfl_sync(mask, value, msl::lane->index_in_simd ^ distance, line);
}
MSL_MACHINERY inline bool __any_sync(uint32_t, bool value, MSL_LINE) {
  msl::exchange(value, msl::Op::vote, line);
  for (uint32_t i = 0; i < 32; i++)
    if (msl::from_lane<bool>(i)) return true;
  return false;
}
