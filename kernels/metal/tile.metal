// The order of a sealed tile on Metal.
//
// A simdgroup multiplies 8 x 8 matrices, of which each lane holds two adjacent elements of one row:
// matrix_row(lane), matrix_pair(lane) * 2 and the next. The words of a tile lie so that a lane's
// 16-byte loads bring just the codes of its own elements, and the loads of a simdgroup are
// contiguous. With D channels, in words of 32 bits:
//
//   0    .. 4 D   K codes: uint4 j of a lane is at (32 j + lane), j < D / 32. Its word i holds
//                 channel 32 j + 4 row + i; nibble 2 n + e is token 8 n + 2 pair + e.
//   4 D  .. 8 D   V codes, likewise. Word n holds token 8 n + row; nibble v is channel
//                 32 j + 8 pair + v.
//   8 D  .. 9 D   K parameters: word 32 j + 8 i + row is channel 32 j + 4 row + i.
//   9 D  .. 10 D  V parameters: word 32 j + 4 row + n is token 8 n + row, channels 32 j and on.
//
// A nibble is code + 8; a parameter word is two fp16 numbers, scale below mid; value = mid +
// scale * code. The same tile in canonical order is described in layout.py.
//
// With BITS = 3 a nibble is code + 4, and the last word of each of those uint4 is given away to the
// free top bits of the other three: bit i of its nibbles to word i. Words i of all lanes lie
// together: word 32 j + lane of the i-th D words of K's 3 D, and of V's, which follow.

#include <metal_simdgroup_matrix>

#define UNROLL _Pragma("clang loop unroll(full)")

constant constexpr int BLOCK = 32;
constant constexpr float HALF = 1 << (BITS - 1);  // as which the code 0 is stored
constant constexpr uint TOP_BITS = 0x88888888u;

constexpr int tile_words(int d) { return 2 * (BITS + 1) * d; }

// Where a lane's elements lie in an 8 x 8 matrix (as MLX's matrix multiplication has it).
inline uint matrix_row(uint lane) { return ((lane >> 1) & 3) | ((lane >> 2) & 4); }
inline uint matrix_pair(uint lane) { return (lane & 1) | ((lane >> 2) & 2); }
inline uint lane_of(uint row, uint pair) {
  return (pair & 1) | ((row & 3) << 1) | ((pair & 2) << 2) | ((row & 4) << 2);
}

struct Parameters {
  float scale;
  float zero;  // what the nibble 0 stands for: mid - HALF * scale
};

inline Parameters unpack(uint word) {
  half2 pair = as_type<half2>(word);
  return {float(pair.x), float(pair.y) - HALF * float(pair.x)};
}

// uint4 number `at` of K's or V's codes, which begin at `words`.
template <int D>
uint4 load_codes(const device uint4* words, uint at) {
  if (BITS == 4) return words[at];
  const device uint* thirds = (const device uint*)words + at;
  const uint a = thirds[0], b = thirds[D], c = thirds[2 * D];
  const uint last = (a & TOP_BITS) >> 3 | (b & TOP_BITS) >> 2 | (c & TOP_BITS) >> 1;
  return uint4(a & ~TOP_BITS, b & ~TOP_BITS, c & ~TOP_BITS, last);
}

// Nibbles 2 i and 2 i + 1.
inline float2 nibbles(uint word, uint i) {
  return float2(float((word >> (8 * i)) & 15u), float((word >> (8 * i + 4)) & 15u));
}

// How much of the cache's buffers is filled.
struct Lengths {
  int n_sink, n_blocks, n_tail;
  int n_new;  // tokens not yet in the cache, behind the tail
};

inline Lengths make_lengths(const constant int* x) { return {x[0], x[1], x[2], x[3]}; }
