// TurboQuant's codes back to numbers, in rotated coordinates.

// One thread serves one channel of 32 tokens: neighbours read neighbouring words and write
// neighbouring numbers. The codebook may be so small that it comes in constant memory.
template <int D, int BITS, typename T, typename Codebook>
void turboquant_decode(
    const device uint* words,
    const device half* lengths,
    Codebook codebook,
    device T* out,
    int block,
    int channel) {
  uint planes[BITS];
  for (int i = 0; i < BITS; i++) planes[i] = words[(block * D + channel) * BITS + i];
  for (int t = 0; t < 32; t++) {
    uint code = 0;
    for (int i = 0; i < BITS; i++) code |= (planes[i] >> t & 1u) << i;
    const int token = 32 * block + t;
    out[token * D + channel] = T(codebook[code] * float(lengths[token]));
  }
}
