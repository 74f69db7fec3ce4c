// What the kernels here share: 16-byte vectors, fp16 arithmetic on packed pairs, a ring of buffers in
// shared memory. For nvcc and NVRTC, from compute capability 8.0.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define DEVICE __device__ __forceinline__

namespace tq {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(8) Words2 {
  u32 w[2];
};
struct alignas(16) Words4 {
  u32 w[4];
};
struct alignas(16) Floats4 {
  float x, y, z, w;
};

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float LOG2E = 1.4426950408889634f;

template <class T>
struct Is16 {
  static constexpr bool half = false, bfloat = false;
};
template <>
struct Is16<__half> {
  static constexpr bool half = true, bfloat = false;
};
template <>
struct Is16<__nv_bfloat16> {
  static constexpr bool half = false, bfloat = true;
};

}  // namespace tq

#include "instructions.cuh"

namespace tq {

// Packed pairs

DEVICE u32 low_halves(u32 a, u32 b) { return select_bytes(a, b, 0x5410); }
DEVICE u32 high_halves(u32 a, u32 b) { return select_bytes(a, b, 0x7632); }

// Two floats as fp16, saturated to its finite range.
DEVICE u32 pack_half2(float low, float high) {
  return to_half2(fminf(fmaxf(low, -65504.f), 65504.f), fminf(fmaxf(high, -65504.f), 65504.f));
}
template <class T>
DEVICE u32 pack2(float low, float high) {
  return Is16<T>::bfloat ? to_bf162(low, high) : pack_half2(low, high);
}

template <class T>
DEVICE float low_float(u32 a) {
  return Is16<T>::bfloat ? __uint_as_float(a << 16) : low_half(a);
}
template <class T>
DEVICE float high_float(u32 a) {
  return Is16<T>::bfloat ? __uint_as_float(a & 0xffff0000u) : high_half(a);
}
// A pair of T as a pair of fp16.
template <class T>
DEVICE u32 as_half2(u32 a) {
  return Is16<T>::bfloat ? pack_half2(low_float<T>(a), high_float<T>(a)) : a;
}

// Eight nibbles to four pairs of fp16 (code - OFFSET); pair p holds nibbles p and p + 4.
// 0x6400 is 1024 in fp16, whose lowest mantissa bit is worth 1; in 64's it is worth 1 / 16.
template <int OFFSET>
DEVICE void unpack_nibbles(u32 word, u32 (&pairs)[4]) {
  constexpr u32 exponent = 0x64006400u, sixteenth = 0x2c002c00u;
  constexpr u32 low = 0xe400e400u + OFFSET * 0x00010001u;   // -1024 - OFFSET
  constexpr u32 high = 0xd400d400u + OFFSET * 0x00100010u;  // -64 - OFFSET
  static_assert(OFFSET < 64);
  const u32 upper = word >> 8;
  pairs[0] = add2(and_or(word, 0x000f000fu, exponent), low);
  pairs[1] = fma2(and_or(word, 0x00f000f0u, exponent), sixteenth, high);
  pairs[2] = add2(and_or(upper, 0x000f000fu, exponent), low);
  pairs[3] = fma2(and_or(upper, 0x00f000f0u, exponent), sixteenth, high);
}

// Four words of a tile's codes, which lie side by side. Codes of 3 bits leave the top bit of a nibble
// free, so three words hold the fourth's nibbles in theirs, a bit in each.
template <int BITS>
struct Codes {
  u32 w[BITS];
  static_assert(BITS == 3 || BITS == 4);

  DEVICE Words4 wide() const {
    if constexpr (BITS == 4) {
      return {{w[0], w[1], w[2], w[3]}};
    } else {
      constexpr u32 top = 0x88888888u;
      const u32 last = (w[0] & top) >> 3 | (w[1] & top) >> 2 | (w[2] & top) >> 1;
      return {{w[0] & ~top, w[1] & ~top, w[2] & ~top, last}};
    }
  }
};
// Fours number i of the codes at `from`.
template <int BITS>
DEVICE Codes<BITS> load_codes(const u32* from, int i) {
  Codes<BITS> codes;
  if constexpr (BITS == 4) {
    const Words4 v = *reinterpret_cast<const Words4*>(from + 4 * i);
#pragma unroll
    for (int k = 0; k < 4; k++) codes.w[k] = v.w[k];
  } else {
#pragma unroll
    for (int k = 0; k < 3; k++) codes.w[k] = from[3 * i + k];
  }
  return codes;
}

// The tensor core's product on operands of type T; see `mma_half`.
template <class T = __half>
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (Is16<T>::bfloat) {
    mma_bf16(c, a0, a1, a2, a3, b0, b1);
  } else {
    mma_half(c, a0, a1, a2, a3, b0, b1);
  }
}

DEVICE Words4 load16(const void* p) { return *static_cast<const Words4*>(p); }
DEVICE Words2 load8(const void* p) { return *static_cast<const Words2*>(p); }

// A warp's ring of STAGES buffers of BYTES in shared memory, filled in the order they are used.
// Compute capability 9.0 copies in bulk, one instruction a buffer; before, every lane copies.
template <int STAGES, int BYTES>
struct Ring {
  u32 buffers;
  u32 barriers;
  int lane;
  u32 stage = 0, parity = 0;

  static constexpr int BARRIER_BYTES = STAGES * 8;

  DEVICE Ring(void* buffers_, void* barriers_, int lane_)
      : buffers(shared_address(buffers_)), barriers(shared_address(barriers_)), lane(lane_) {
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      for (int i = 0; i < STAGES; i++) barrier_init(barriers + i * 8);
      barriers_visible();
    }
    __syncwarp();
#endif
  }

  // Starts to fill buffer i; an absent source keeps the count of copies in step.
  DEVICE void fill(u32 i, const char* from, bool there) {
#if __CUDA_ARCH__ >= 900
    if (lane == 0 && there) copy_bulk<BYTES>(buffers + i * BYTES, from, barriers + i * 8);
#else
    if (there)
      for (int at = lane * 16; at < BYTES; at += 512)
        copy_async<16>(buffers + i * BYTES + at, from + at);
    copies_commit();
#endif
  }

  // Waits for the buffer that is next to be used.
  DEVICE void wait() {
#if __CUDA_ARCH__ >= 900
    barrier_wait(barriers + stage * 8, parity);
#else
    copies_wait<STAGES - 1>();
    __syncwarp();
#endif
  }

  // Hands the buffer in use back, to be filled again.
  DEVICE void release(const char* from, bool there) {
    __syncwarp();
    fill(stage, from, there);
  }

  DEVICE void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace tq
