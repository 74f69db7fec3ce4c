// What the libraries of both shading languages are made of: marks for the checks, variables that lanes
// share, what lanes tell each other, and bfloat16.
#pragma once
#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "runtime.h"

// The machinery of an operation is neither checked nor counted as the kernel's own work.
#define MSL_UNSEEN __attribute__((no_sanitize("thread", "undefined")))
#define MSL_MACHINERY MSL_UNSEEN __attribute__((noinline))
#define MSL_LINE int line = __builtin_LINE()
#define MSL_THREADGROUP(type, name)                                                   \
  static const char name##_key = 0;                                                   \
  auto& name = *(type*)msl::threadgroup_variable(&name##_key, sizeof(type), #name, __LINE__);

// What a kernel is called with.
struct MslPointer {
  const void* p;
  template <class T>
  operator T*() const {
    return (T*)p;
  }
};
struct MslReference {
  const void* p;
  template <class T>
  operator T&() const {
    return *(T*)p;
  }
};

struct bfloat {
  uint16_t bits;
  static constexpr uint16_t round(float f) {
    uint32_t x = __builtin_bit_cast(uint32_t, f);
    if ((x & 0x7fffffff) > 0x7f800000) return uint16_t((x >> 16) | 0x40);
    return uint16_t((x + 0x7fff + ((x >> 16) & 1)) >> 16);
  }
  static constexpr bfloat of(uint16_t bits) {
    bfloat r{};
    r.bits = bits;
    return r;
  }
  bfloat() = default;
  constexpr explicit bfloat(float f) : bits(round(f)) {}
  constexpr explicit bfloat(_Float16 f) : bits(round(float(f))) {}
  template <class I, class = std::enable_if_t<std::is_integral_v<I>>>
  constexpr bfloat(I i) : bits(round(float(i))) {}
  constexpr operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
  constexpr bfloat operator-() const { return of(bits ^ 0x8000); }
#define MSL_OPERATOR(op)                                                                        \
  friend constexpr bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); } \
  template <class I, class = std::enable_if_t<std::is_integral_v<I>>>                           \
  friend constexpr bfloat operator op(bfloat a, I b) { return a op bfloat(b); }                 \
  template <class I, class = std::enable_if_t<std::is_integral_v<I>>>                           \
  friend constexpr bfloat operator op(I a, bfloat b) { return bfloat(a) op b; }                 \
  bfloat& operator op##=(float b) { return *this = bfloat(float(*this) op b); }
  MSL_OPERATOR(+) MSL_OPERATOR(-) MSL_OPERATOR(*) MSL_OPERATOR(/)
#undef MSL_OPERATOR
};

namespace msl {

template <class T>
MSL_UNSEEN inline void exchange(T value, Op op, int line) {
  static_assert(sizeof(T) <= 16);
  memcpy(lane->simdgroup->in[lane->index_in_simd], &value, sizeof value);
  meet(op, line);
}
template <class T>
MSL_UNSEEN inline T from_lane(uint32_t i) {  // of a lane that does not exist: undefined, here all bits set
  T value;
  if (i < lane->simdgroup->lanes)
    memcpy(&value, lane->simdgroup->out[i], sizeof value);
  else
    memset(&value, 0xff, sizeof value);
  return value;
}

}  // namespace msl
