// The codec of kernels/codec.py, bit for bit, on tiles in the order of attention.cuh.
#pragma once

#include "warp.cuh"

namespace tq {

template <int BITS, int D>
struct Tile {
  static constexpr int G = D / 32;
  static constexpr int K_SCALES = BITS * D, K_MIDS = K_SCALES + D / 2;
  static constexpr int V_CODES = (BITS + 1) * D, V_SCALES = V_CODES + BITS * D;
  static constexpr int V_MIDS = V_SCALES + D / 2, WORDS = 2 * (BITS + 1) * D;

  // Which four words of codes have token's channels 8 c .. 8 c + 7, in word token / 8.
  static DEVICE int k_four(int token, int c) { return (c / 4) * 32 + (token % 8) * 4 + c % 4; }
  // ... token's channels 4 c .. 4 c + 3, in word token / 8, the upper half if token is odd.
  static DEVICE int v_four(int token, int c) {
    return (c / 8) * 32 + (c % 8) * 4 + token % 8 / 2;
  }
  // Half words, from the start of the scales or mids.
  static DEVICE int k_parameter(int channel) {
    return channel / 8 * 8 + channel % 4 * 2 + channel % 8 / 4;
  }
  static DEVICE int v_parameter(int token, int group) {
    return 2 * ((group * 4 + token % 8 / 2) * 4 + token / 8) + token % 2;
  }
};

template <int BITS>
struct Quantiser {
  static constexpr float HALF = 1 << (BITS - 1);
  float scale, mid, divisor;
  u16 scale_bits, mid_bits;

  DEVICE Quantiser(float low, float high) {
    const float step = __fdiv_rn(__fsub_rn(high, low), 2.f * HALF - 1.f);
    const __half m = __float2half_rn(__fadd_rn(low, __fmul_rn(HALF, step)));
    const __half s = __float2half_rn(step);
    scale = __half2float(s);
    mid = __half2float(m);
    divisor = scale == 0.f ? __int_as_float(0x7f800000) : scale;
    scale_bits = __half_as_ushort(s);
    mid_bits = __half_as_ushort(m);
  }
  // The code plus HALF.
  DEVICE u32 nibble(float x) const {
    const float code = rintf(__fdiv_rn(__fsub_rn(x, mid), divisor));
    return u32(int(fminf(fmaxf(code, -HALF), HALF - 1.f) + HALF));
  }
};

template <class T>
DEVICE float cache_value(T x) {
  const float f = float(x);
  return f != f ? 0.f : fminf(fmaxf(f, -65504.f), 65504.f);
}

// Writes word i of fours number `four`, or gives it away to the other three; word(i) has nibbles.
template <int BITS, class Word>
DEVICE void put_word(u32* codes, int four, int i, Word word) {
  if constexpr (BITS == 4) {
    codes[4 * four + i] = word(i);
  } else if (i < 3) {
    codes[3 * four + i] = word(i) | (word(3) << (3 - i) & 0x88888888u);
  }
}

// The reverse: the nibbles of word i.
template <int BITS>
DEVICE u32 get_word(const u32* codes, int four, int i) {
  if constexpr (BITS == 4) {
    return codes[4 * four + i];
  } else if (i < 3) {
    return codes[3 * four + i] & 0x77777777u;
  } else {
    return load_codes<3>(codes, four).wide().w[3];
  }
}

// Tiles of K and V (heads, 32 n, D). Grid (n, heads), THREADS threads.
template <int BITS, int D, int THREADS, class T>
DEVICE void seal(const T* k, const T* v, u32* tiles) {
  using At = Tile<BITS, D>;
  __shared__ unsigned char k_codes[32][D], v_codes[32][D];
  const size_t block = size_t(blockIdx.y) * gridDim.x + blockIdx.x;
  k += block * 32 * D;
  v += block * 32 * D;
  u32* tile = tiles + block * At::WORDS;
  u16* k_scales = reinterpret_cast<u16*>(tile + At::K_SCALES);
  u16* k_mids = reinterpret_cast<u16*>(tile + At::K_MIDS);
  u16* v_scales = reinterpret_cast<u16*>(tile + At::V_SCALES);
  u16* v_mids = reinterpret_cast<u16*>(tile + At::V_MIDS);

  for (int channel = threadIdx.x; channel < D; channel += THREADS) {
    float x[32];
#pragma unroll
    for (int t = 0; t < 32; t++) x[t] = cache_value(k[t * D + channel]);
    float low = x[0], high = x[0];
#pragma unroll
    for (int t = 1; t < 32; t++) {
      low = fminf(low, x[t]);
      high = fmaxf(high, x[t]);
    }
    const Quantiser<BITS> quantiser(low, high);
#pragma unroll
    for (int t = 0; t < 32; t++) k_codes[t][channel] = quantiser.nibble(x[t]);
    k_scales[At::k_parameter(channel)] = quantiser.scale_bits;
    k_mids[At::k_parameter(channel)] = quantiser.mid_bits;
  }

  const int lane = threadIdx.x & 31;
  for (int i = threadIdx.x >> 5; i < 32 * At::G; i += THREADS / 32) {
    const int token = i / At::G, group = i % At::G;
    const float x = cache_value(v[token * D + group * 32 + lane]);
    float low = x, high = x;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      low = fminf(low, __shfl_xor_sync(ALL_LANES, low, distance));
      high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, distance));
    }
    const Quantiser<BITS> quantiser(low, high);
    v_codes[token][group * 32 + lane] = quantiser.nibble(x);
    if (lane == 0) {
      v_scales[At::v_parameter(token, group)] = quantiser.scale_bits;
      v_mids[At::v_parameter(token, group)] = quantiser.mid_bits;
    }
  }
  __syncthreads();

  for (int i = threadIdx.x; i < 4 * D; i += THREADS) {
    const int token = i / (D / 8), c = i % (D / 8);
    put_word<BITS>(tile, At::k_four(token, c), token / 8, [&](int k) {
      u32 word = 0;
#pragma unroll
      for (int n = 0; n < 8; n++)
        word |= u32(k_codes[token % 8 + 8 * k][8 * c + n]) << (4 * n);
      return word;
    });
  }
  for (int i = threadIdx.x; i < 4 * D; i += THREADS) {
    const int even = i / (D / 4) * 2, c = i % (D / 4);  // two tokens
    put_word<BITS>(tile + At::V_CODES, At::v_four(even, c), even / 8, [&](int k) {
      u32 word = 0;
#pragma unroll
      for (int n = 0; n < 8; n++)
        word |= u32(v_codes[even % 8 + 8 * k + n / 4][4 * c + n % 4]) << (4 * n);
      return word;
    });
  }
}

// Two numbers of one 16-bit type as two of another.
template <class To, class From>
DEVICE u32 convert2(const From*, u32 pair) {
  if constexpr (Is16<From>::bfloat == Is16<To>::bfloat) return pair;
  return pack2<To>(low_float<From>(pair), high_float<From>(pair));
}

// K and V (heads, length, D) of all tokens held, then of `lengths[3]` new ones: sink, tiles, tail,
// new. Grid (tiles held + groups of 32 other tokens, heads), THREADS threads.
template <int BITS, int D, int THREADS, class C, class N, class T>
DEVICE void gather(const u32* tiles, int capacity, const C* sink_k, const C* sink_v,
                   int sink_capacity, const C* tail_k, const C* tail_v, int tail_capacity,
                   const N* new_k, const N* new_v, int new_capacity, const int* lengths, T* out_k,
                   T* out_v) {
  using At = Tile<BITS, D>;
  const int n_sink = lengths[0], n_blocks = lengths[1], n_tail = lengths[2], n_new = lengths[3];
  const int head = blockIdx.y, length = n_sink + 32 * n_blocks + n_tail + n_new;
  u32* k = reinterpret_cast<u32*>(out_k) + size_t(head) * length * (D / 2);
  u32* v = reinterpret_cast<u32*>(out_v) + size_t(head) * length * (D / 2);

  if (blockIdx.x >= n_blocks) {
    const int first = (blockIdx.x - n_blocks) * 32;
    const int count = min(32, n_sink + n_tail + n_new - first);
    for (int i = threadIdx.x; i < count * (D / 2); i += THREADS) {
      const int token = first + i / (D / 2), pair = i % (D / 2);
      const int tail = token - n_sink, fresh = tail - n_tail;
      const size_t to = size_t(token < n_sink ? token : token + 32 * n_blocks) * (D / 2) + pair;
      auto copy = [&](const auto* source, int size, int at, u32* out) {
        const u32* from = reinterpret_cast<const u32*>(source);
        out[to] = convert2<T>(source, from[(size_t(head) * size + at) * (D / 2) + pair]);
      };
      if (token < n_sink) {
        copy(sink_k, sink_capacity, token, k);
        copy(sink_v, sink_capacity, token, v);
      } else if (fresh < 0) {
        copy(tail_k, tail_capacity, tail, k);
        copy(tail_v, tail_capacity, tail, v);
      } else {
        copy(new_k, new_capacity, fresh, k);
        copy(new_v, new_capacity, fresh, v);
      }
    }
    return;
  }

  const u32* tile = tiles + (size_t(head) * capacity + blockIdx.x) * At::WORDS;
  const __half* halves = reinterpret_cast<const __half*>(tile);
  k += size_t(n_sink + 32 * blockIdx.x) * (D / 2);
  v += size_t(n_sink + 32 * blockIdx.x) * (D / 2);
  auto value = [](const __half* scale, const __half* mid, u32 nibble) {
    const float code = float(int(nibble & 15) - (1 << (BITS - 1)));
    const float product = __fmul_rn(__half2float(*scale), code);
    return __fadd_rn(__half2float(*mid), product);
  };
  for (int i = threadIdx.x; i < 4 * D; i += THREADS) {
    const int token = i / (D / 8), c = i % (D / 8);
    const u32 word = get_word<BITS>(tile, At::k_four(token, c), token / 8);
    const __half* scales = halves + 2 * At::K_SCALES;
    const __half* mids = halves + 2 * At::K_MIDS;
    Words4 out;
#pragma unroll
    for (int p = 0; p < 4; p++) {
      const int low = At::k_parameter(8 * c + 2 * p), high = At::k_parameter(8 * c + 2 * p + 1);
      out.w[p] = pack2<T>(value(scales + low, mids + low, word >> (8 * p)),
                          value(scales + high, mids + high, word >> (8 * p + 4)));
    }
    *reinterpret_cast<Words4*>(k + 4 * i) = out;
  }
  for (int i = threadIdx.x; i < 8 * D; i += THREADS) {
    const int token = i / (D / 4), c = i % (D / 4);
    const u32 word = get_word<BITS>(tile + At::V_CODES, At::v_four(token, c), token / 8);
    const u32 half = word >> (16 * (token % 2));
    const int at = At::v_parameter(token, c / 8);
    const __half* scale = halves + 2 * At::V_SCALES + at;
    const __half* mid = halves + 2 * At::V_MIDS + at;
    Words2 out;
#pragma unroll
    for (int p = 0; p < 2; p++)
      out.w[p] = pack2<T>(value(scale, mid, half >> (8 * p)),
                          value(scale, mid, half >> (8 * p + 4)));
    *reinterpret_cast<Words2*>(v + 2 * i) = out;
  }
}

}  // namespace tq
