// Sealing of V alone, whose tiles are as values.metal says. And back, with K, for prefill.

// Thread c of a tile quantises channel c over the tokens, then puts together the words of lane
// c % 32 in uint4 c / 32.
template <int D, typename T>
void seal_values(const device T* v, device uint* tile, threadgroup uchar* codes, uint thread_index) {
  float x[BLOCK];
  UNROLL
  for (int t = 0; t < BLOCK; t++) x[t] = finite(float(v[t * D + thread_index]));
  tile[BITS * D + thread_index] = quantize(x);
  UNROLL
  for (int t = 0; t < BLOCK; t++) codes[t * D + thread_index] = uchar(x[t]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint lane = thread_index % 32, row = matrix_row(lane), pair = matrix_pair(lane);
  uint words[4];
  UNROLL
  for (uint n = 0; n < 4; n++) {
    words[n] = 0;
    UNROLL
    for (uint i = 0; i < 8; i++) {
      const uint channel = channel_of<D>(thread_index / 32, i / 2, pair) + i % 2;
      words[n] |= uint(codes[(8 * n + row) * D + channel]) << (4 * i);
    }
  }
  UNROLL
  for (uint n = 0; n < BITS; n++) {
    if (BITS == 4)
      tile[4 * thread_index + n] = words[n];
    else
      tile[n * D + thread_index] = words[n] | (words[3] << (3 - n) & TOP_BITS);
  }
}

// Element (token, channel) of V in a tile.
template <int D>
float value_element(const device uint* tile, uint token, uint channel) {
  const uint c = channel % (D / 2), nibble = channel / (D / 2) * 4 + c % 4;
  const uint at = 32 * (c / 16) + lane_of(token % 8, c % 16 / 4);
  const uint word = load_codes<D>((const device uint4*)tile, at)[token / 8];
  return dequantize(word >> (4 * nibble), tile[BITS * D + channel]);
}

// The pair of a channel of the first half, of a token in 16 bits.
template <int D, typename T>
Complex<float> pair_of(const device T* at) {
  return {float(at[0]), float(at[D / 2])};
}
