// What the kernels here share: 16-byte vectors, fp16 arithmetic on packed pairs, tensor-core
// products, asynchronous copies. For nvcc and NVRTC, from compute capability 8.0.
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

// Packed pairs

DEVICE u32 select_bytes(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}
DEVICE u32 low_halves(u32 a, u32 b) { return select_bytes(a, b, 0x5410); }
DEVICE u32 high_halves(u32 a, u32 b) { return select_bytes(a, b, 0x7632); }

DEVICE u32 and_or(u32 a, u32 mask, u32 bits) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
}

DEVICE u32 mul2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEVICE u32 add2(u32 a, u32 b) {
  u32 d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEVICE u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
DEVICE u32 fma2_bf16(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Two floats as fp16, saturated to its finite range.
DEVICE u32 pack_half2(float low, float high) {
  low = fminf(fmaxf(low, -65504.f), 65504.f);
  high = fminf(fmaxf(high, -65504.f), 65504.f);
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
DEVICE u32 pack_bf162(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
template <class T>
DEVICE u32 pack2(float low, float high) {
  return Is16<T>::bfloat ? pack_bf162(low, high) : pack_half2(low, high);
}

template <class T>
DEVICE float low_float(u32 a) {
  if constexpr (Is16<T>::bfloat) {
    return __uint_as_float(a << 16);
  } else {
    float d;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(d) : "r"(a));
    return d;
  }
}
template <class T>
DEVICE float high_float(u32 a) {
  if constexpr (Is16<T>::bfloat) {
    return __uint_as_float(a & 0xffff0000u);
  } else {
    float d;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(d) : "r"(a));
    return d;
  }
}
// A pair of T as a pair of fp16.
template <class T>
DEVICE u32 as_half2(u32 a) {
  return Is16<T>::bfloat ? pack_half2(low_float<T>(a), high_float<T>(a)) : a;
}

DEVICE float exp2_fast(float a) {
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));
  return d;
}

// Eight nibbles to four pairs of fp16 (code - OFFSET); pair p holds nibbles p and p + 4.
// 0x6400 is 1024 in fp16, whose lowest mantissa bit is worth 1.
template <int OFFSET>
DEVICE void unpack_nibbles(u32 word, u32 (&pairs)[4]) {
  constexpr u32 exponent = 0x64006400u, sixteenth = 0x2c002c00u;
  constexpr u32 low = OFFSET == 8 ? 0xe408e408u : 0xe400e400u;   // -1024 - OFFSET
  constexpr u32 high = OFFSET == 8 ? 0xd480d480u : 0xd400d400u;  // -64 - OFFSET
  static_assert(OFFSET == 0 || OFFSET == 8);
  const u32 upper = word >> 8;
  pairs[0] = add2(and_or(word, 0x000f000fu, exponent), low);
  pairs[1] = fma2(and_or(word, 0x00f000f0u, exponent), sixteenth, high);
  pairs[2] = add2(and_or(upper, 0x000f000fu, exponent), low);
  pairs[3] = fma2(and_or(upper, 0x00f000f0u, exponent), sixteenth, high);
}

// The tensor core's 16 x 8 x 16 product, c += a b, in fp32. Lane 4 g + j holds
//   a: (row g, columns 2j 2j+1), (g + 8, the same), (g, 2j+8 2j+9), (g + 8, 2j+8 2j+9)
//   b: (rows 2j 2j+1, column g), (rows 2j+8 2j+9, column g)
//   c: (row g, columns 2j 2j+1), (row g + 8, columns 2j 2j+1)
template <class T = __half>
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (Is16<T>::bfloat) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// Transposes an 8 x 8 matrix of 16-bit numbers held a row per four lanes.
DEVICE u32 transpose8x8(u32 a) {
  u32 d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// Memory

DEVICE u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

DEVICE Words4 load16(const void* p) { return *static_cast<const Words4*>(p); }
DEVICE Words2 load8(const void* p) { return *static_cast<const Words2*>(p); }

// Read-only global memory that is used once.
DEVICE Words4 stream16(const void* p) {
  Words4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p));
  return v;
}
DEVICE Words2 stream8(const void* p) {
  Words2 v;
  asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v.w[0]), "=r"(v.w[1]) : "l"(p));
  return v;
}

// One thread's asynchronous copy of N bytes to shared memory, zeros where !there.
template <int N>
DEVICE void copy_async(u32 to, const void* from, bool there = true) {
  const int bytes = there ? N : 0;
  if constexpr (N == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(bytes),
                 "n"(N)
                 : "memory");
  }
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most N of this thread's latest groups are still under way.
template <int N>
DEVICE void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

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
      for (int i = 0; i < STAGES; i++)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + i * 8) : "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
#endif
  }

  // Starts to fill buffer i; an absent source keeps the count of copies in step.
  DEVICE void fill(u32 i, const char* from, bool there) {
#if __CUDA_ARCH__ >= 900
    if (lane == 0 && there) {
      const u32 barrier = barriers + i * 8;
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                   "r"(BYTES)
                   : "memory");
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(buffers + i * BYTES),
          "l"(from), "r"(BYTES), "r"(barrier)
          : "memory");
    }
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
    asm volatile(
        "{\n.reg .pred done;\n"
        "again_%=:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra ready_%=;\n"
        "bra again_%=;\n"
        "ready_%=:\n}" ::"r"(barriers + stage * 8),
        "r"(parity)
        : "memory");
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
