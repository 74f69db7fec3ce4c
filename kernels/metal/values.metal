// Tiles that hold V alone, and how K is made of it: K = RoPE(weight * V).
//
// In words of 32 bits (see tile.metal for lanes, and for BITS = 3):
//
//   0    .. 4 D   Codes: uint4 j of a lane is at (32 j + lane), j < D / 32. Word n holds token
//                 8 n + row; nibble 4 h + v is channel D / 2 h + 16 j + 4 pair + v, so that a lane
//                 has both channels of every pair that RoPE turns.
//   4 D  .. 5 D   Parameters: word c is channel c.

constexpr int value_tile_words(int d) { return (BITS + 1) * d; }

// The first of the two channels that a lane has in nibbles 2 i and 2 i + 1 of uint4 j.
template <int D>
uint channel_of(uint j, uint i, uint pair) {
  return D / 2 * (i / 2) + 16 * j + 4 * pair + 2 * (i % 2);
}

// Complex numbers: T is float, or float2 for two of them.
template <typename T>
struct Complex {
  T x, y;
};

template <typename T>
Complex<T> turned(Complex<T> a, Complex<T> by) {
  return {a.x * by.x - a.y * by.y, a.y * by.x + a.x * by.y};
}

// What a pair of channels is turned by at a position. turn: of one position, as a fraction of a
// whole turn in units of 2^-64. The product drops whole turns and nothing else, so that far
// positions are as exact as near ones. The factor is 2 pi / 2^32.
inline Complex<float> angle(int position, ulong turn) {
  const float x = float(int(uint(ulong(position) * turn >> 32))) * 1.4629180792671596e-9f;
  return {metal::precise::cos(x), metal::precise::sin(x)};
}
