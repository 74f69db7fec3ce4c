// Sealing: 32 tokens of K and V become one tile. And back, for prefill.

// As codec.py: NaN counts as 0, the rest is saturated to fp16's range. By the bits: a compiler that
// assumes there are no NaN would drop isnan().
inline float finite(float x) {
  const bool is_nan = (as_type<uint>(x) & 0x7fffffffu) > 0x7f800000u;
  return is_nan ? 0.0f : clamp(x, -65504.0f, 65504.0f);
}

// Quantises 32 numbers: their nibbles replace them; returns the parameter word.
inline uint quantize(thread float (&x)[BLOCK]) {
  float low = x[0], high = x[0];
  UNROLL
  for (int i = 1; i < BLOCK; i++) {
    low = min(low, x[i]);
    high = max(high, x[i]);
  }
  const float step = (high - low) / (2.0f * HALF - 1.0f);
  const half mid = half(low + HALF * step), scale = half(step);
  UNROLL
  for (int i = 0; i < BLOCK; i++) {
    const float code = scale == 0.0h ? 0.0f : rint((x[i] - float(mid)) / float(scale));
    x[i] = clamp(code, -HALF, HALF - 1.0f) + HALF;
  }
  return as_type<uint>(half2(scale, mid));
}

// Stores word i of the uint4 number `at` of K's or V's codes, which begin at `words`. Lane `last`
// has word 3 of the same uint4.
template <int D>
void store_codes(device uint* words, uint at, uint i, uint word, uint last) {
  if (BITS == 4) {
    words[4 * at + i] = word;
    return;
  }
  const uint given = simd_shuffle(word, ushort(last));
  if (i < 3) words[i * D + at] = word | (given << (3 - i) & TOP_BITS);
}

// Thread c of a tile seals K's channel c over the tokens, then one token of V over 32 channels.
template <int D, typename T>
void seal(const device T* k, const device T* v, device uint* tile, uint thread_index) {
  float x[BLOCK];
  const uint j = thread_index / 32;
  {
    const uint row = thread_index % 32 / 4, i = thread_index % 4;
    UNROLL
    for (int t = 0; t < BLOCK; t++) x[t] = finite(float(k[t * D + thread_index]));
    tile[2 * BITS * D + 32 * j + 8 * i + row] = quantize(x);
    UNROLL
    for (uint pair = 0; pair < 4; pair++) {
      uint word = 0;
      UNROLL
      for (uint n = 0; n < 4; n++)
        UNROLL
        for (uint e = 0; e < 2; e++)
          word |= uint(x[8 * n + 2 * pair + e]) << (4 * (2 * n + e));
      store_codes<D>(tile, 32 * j + lane_of(row, pair), i, word, thread_index % 32 | 3);
    }
  }
  {
    const uint token = thread_index % 32, row = token % 8, n = token / 8;
    UNROLL
    for (int c = 0; c < 32; c++) x[c] = finite(float(v[token * D + 32 * j + c]));
    tile[(2 * BITS + 1) * D + 32 * j + 4 * row + n] = quantize(x);
    UNROLL
    for (uint pair = 0; pair < 4; pair++) {
      uint word = 0;
      UNROLL
      for (uint c = 0; c < 8; c++) word |= uint(x[8 * pair + c]) << (4 * c);
      store_codes<D>(tile + BITS * D, 32 * j + lane_of(row, pair), n, word, token | 24);
    }
  }
}

// The product is exact in float, so the result is codec.py's to the bit; but rounded parameters may
// lead past what fp16 can hold.
inline float dequantize(uint nibble, uint parameters) {
  const half2 pair = as_type<half2>(parameters);
  return finite(float(pair.y) + float(pair.x) * (float(nibble & 15u) - HALF));
}

// Element (token, channel) of K or V in a tile.
template <int D>
float k_element(const device uint* tile, uint token, uint channel) {
  const uint j = channel / 32, row = channel % 32 / 4, i = channel % 4;
  const uint word = load_codes<D>((const device uint4*)tile, 32 * j + lane_of(row, token % 8 / 2))[i];
  return dequantize(
      word >> (4 * (token / 8 * 2 + token % 2)), tile[2 * BITS * D + 32 * j + 8 * i + row]);
}
template <int D>
float v_element(const device uint* tile, uint token, uint channel) {
  const uint j = channel / 32, row = token % 8, n = token / 8;
  const device uint4* codes = (const device uint4*)(tile + BITS * D);
  const uint word = load_codes<D>(codes, 32 * j + lane_of(row, channel % 32 / 8))[n];
  return dequantize(
      word >> (4 * (channel % 8)), tile[(2 * BITS + 1) * D + 32 * j + 4 * row + n]);
}
