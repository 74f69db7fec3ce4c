// Scores of PolarQuant keys: the polar transform is undone on the query's side, with tables.

constant constexpr int LEVELS = 4, GROUP_SIZE = 16;

// The code of an angle for the token of this bit: planes are words of one bit for 32 tokens.
template <int BITS>
uint code_of(const device uint* planes, uint bit) {
  uint code = 0;
  for (int i = 0; i < BITS; i++) code |= (planes[i] >> bit & 1u) << i;
  return code;
}

// One thread serves one key and ROWS rows of its KV head. A group's 15 cosines and sines are looked
// up once; each row then folds 16 numbers to 8, 4, 2 and 1, which is multiplied by the radius.
// table: cosine and sine per code of level 1, then of levels 2, 3 and 4.
template <int D, int BITS, int ROWS>
void polarquant_scores(
    const device float* q,
    const device uint* first,
    const device uint* upper,
    const device half* radii,
    const threadgroup float2* table,
    device float* scores,
    int n_rows,
    int n_tokens,
    int head,
    int first_row,
    int token) {
  constexpr int GROUPS = D / GROUP_SIZE, UPPER_BITS = BITS - 2;
  const int block = head * (n_tokens / 32) + token / 32;
  const uint bit = token % 32;
  const device half* radius = radii + (head * n_tokens + token) * GROUPS;
  float sums[ROWS] = {};
  for (int g = 0; g < GROUPS; g++) {
    float2 turns[GROUP_SIZE - 1];
    for (int i = 0; i < 8; i++)
      turns[i] = table[code_of<BITS>(first + (block * (D / 2) + 8 * g + i) * BITS, bit)];
    int angle = block * (7 * GROUPS), at = 8;
    const threadgroup float2* codes = table + (1 << BITS);
    for (int width = 4; width > 0; width /= 2) {
      for (int i = 0; i < width; i++)
        turns[at + i] = codes[code_of<UPPER_BITS>(
            upper + (angle + width * g + i) * UPPER_BITS, bit)];
      at += width;
      angle += width * GROUPS;
      codes += 1 << UPPER_BITS;
    }
    for (int r = 0; r < ROWS; r++) {
      const int row = min(first_row + r, n_rows - 1);
      const device float* from = q + (head * n_rows + row) * D + GROUP_SIZE * g;
      float x[GROUP_SIZE];
      for (int i = 0; i < GROUP_SIZE; i++) x[i] = from[i];
      int turn = 0;
      for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++, turn++)
          x[i] = x[2 * i] * turns[turn].x + x[2 * i + 1] * turns[turn].y;
      sums[r] += x[0] * float(radius[g]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    if (first_row + r < n_rows)
      scores[(head * n_rows + first_row + r) * n_tokens + token] = sums[r];
}
