// The functions of kernels/cuda/instructions.cuh for the CPU, after the PTX ISA's description of the
// instructions. Products are summed exactly, which tensor cores do not promise.
#pragma once

namespace tq {

DEVICE u32 select_bytes(u32 a, u32 b, u32 selector) {
  const u64 bytes = u64(b) << 32 | a;
  u32 d = 0;
  for (int i = 0; i < 4; i++) d |= u32(bytes >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
  return d;
}
DEVICE u32 and_or(u32 a, u32 mask, u32 bits) { return (a & mask) | bits; }

DEVICE float low_half(u32 a) { return float(__builtin_bit_cast(__half, u16(a))); }
DEVICE float high_half(u32 a) { return float(__builtin_bit_cast(__half, u16(a >> 16))); }
DEVICE u32 pair_of(__half low, __half high) {
  return __builtin_bit_cast(u16, low) | u32(__builtin_bit_cast(u16, high)) << 16;
}
DEVICE u32 to_half2(float low, float high) { return pair_of(__half(low), __half(high)); }
DEVICE u32 to_bf162(float low, float high) {
  return bfloat::round(low) | u32(bfloat::round(high)) << 16;
}
DEVICE u32 mul2(u32 a, u32 b) {
  return to_half2(low_half(a) * low_half(b), high_half(a) * high_half(b));
}
DEVICE u32 add2(u32 a, u32 b) {
  return to_half2(low_half(a) + low_half(b), high_half(a) + high_half(b));
}
// A product of two is exact in float32, but not with a third added.
DEVICE u32 fma2(u32 a, u32 b, u32 c) {
  return pair_of(__half(double(low_half(a)) * low_half(b) + low_half(c)),
                 __half(double(high_half(a)) * high_half(b) + high_half(c)));
}
DEVICE u32 fma2_bf16(u32 a, u32 b, u32 c) {
  auto low = [](u32 x) { return __uint_as_float(x << 16); };
  auto high = [](u32 x) { return __uint_as_float(x & 0xffff0000u); };
  return to_bf162(__builtin_fmaf(low(a), low(b), low(c)), __builtin_fmaf(high(a), high(b), high(c)));
}
DEVICE float exp2_fast(float a) {
  constexpr float smallest = 1.17549435e-38f;
  const float d = __builtin_exp2f(a);
  return d < smallest ? 0.f : d;
}

template <class F>
MSL_MACHINERY void multiply(float (&c)[4], Words4 a, Words2 b, F element, int line) {
  const u32 lane = msl::lane->index_in_simd, g = lane / 4, j = lane % 4;
  double rows[2][16], columns[2][16];
  msl::exchange(a, msl::Op::matrix, line);
  for (u32 i = 0; i < 4; i++) {
    const Words4 x = msl::from_lane<Words4>(4 * g + i);
    for (u32 half = 0; half < 2; half++)
      for (u32 r = 0; r < 2; r++)
        for (u32 k = 0; k < 2; k++)
          rows[r][8 * half + 2 * i + k] = element(x.w[2 * half + r] >> (16 * k));
  }
  msl::exchange(b, msl::Op::matrix, line);
  for (u32 n = 0; n < 2; n++)
    for (u32 i = 0; i < 4; i++) {
      const Words2 x = msl::from_lane<Words2>(4 * (2 * j + n) + i);
      for (u32 half = 0; half < 2; half++)
        for (u32 k = 0; k < 2; k++) columns[n][8 * half + 2 * i + k] = element(x.w[half] >> (16 * k));
    }
  for (u32 r = 0; r < 2; r++)
    for (u32 n = 0; n < 2; n++) {
      double sum = c[2 * r + n];
      for (u32 k = 0; k < 16; k++) sum += rows[r][k] * columns[n][k];
      c[2 * r + n] = float(sum);
    }
}
DEVICE void mma_half(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, MSL_LINE) {
  multiply(c, {{a0, a1, a2, a3}}, {{b0, b1}}, [](u32 x) MSL_UNSEEN { return low_half(x); }, line);
}
DEVICE void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, MSL_LINE) {
  multiply(c, {{a0, a1, a2, a3}}, {{b0, b1}},
           [](u32 x) MSL_UNSEEN { return __uint_as_float(x << 16); }, line);
}
MSL_MACHINERY inline u32 transpose8x8(u32 a, MSL_LINE) {
  msl::exchange(a, msl::Op::matrix, line);
  const u32 lane = msl::lane->index_in_simd, g = lane / 4, j = lane % 4;
  auto element = [](u32 row, u32 column) MSL_UNSEEN {
    return msl::from_lane<u32>(4 * row + column / 2) >> (16 * (column % 2)) & 0xffff;
  };
  return element(2 * j, g) | element(2 * j + 1, g) << 16;
}

DEVICE u32 shared_address(const void* p) { return msl::short_address(p); }
DEVICE Words4 stream16(const void* p) { return *static_cast<const Words4*>(p); }
DEVICE Words2 stream8(const void* p) { return *static_cast<const Words2*>(p); }

template <int N>
DEVICE void copy_async(u32 to, const void* from, bool there = true) {
  msl::copy_async(msl::from_short_address(to), there ? from : nullptr, N);
}
DEVICE void copies_commit() { msl::copies_commit(); }
template <int N>
DEVICE void copies_wait() {
  msl::copies_wait(N);
}
DEVICE void barrier_init(u32 barrier) { msl::barrier_init(msl::from_short_address(barrier)); }
DEVICE void barriers_visible() {}
template <int N>
DEVICE void copy_bulk(u32 to, const void* from, u32 barrier) {
  msl::copy_bulk(msl::from_short_address(to), from, N, msl::from_short_address(barrier));
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  msl::barrier_wait(msl::from_short_address(barrier), parity);
}

}  // namespace tq
