// Scores of QJL keys: the query's integers times the key's signs, by XNOR and popcount.

// One thread serves one key and all rows (query heads and tokens) of its KV head: the key's signs
// are read once and stay in registers. Few rows come in constant memory, so as pointers of any type.
template <int WORDS, int BITS, typename Planes, typename Steps>
void qjl_scores(
    Planes planes,
    Steps steps,
    const device uint* words,
    const device half* lengths,
    device float* scores,
    int n_rows,
    int n_tokens,
    float unbiased,
    int head,
    int token) {
  const int key = head * n_tokens + token;
  uint signs[WORDS];
  for (int w = 0; w < WORDS; w++) signs[w] = words[key * WORDS + w];
  const float size = float(lengths[key]) * unbiased;
  for (int row = head * n_rows; row < (head + 1) * n_rows; row++) {
    int product = 0;
    for (int bit = 0; bit < BITS; bit++) {
      int agree = 0;
      for (int w = 0; w < WORDS; w++)
        agree += popcount(~(planes[(row * BITS + bit) * WORDS + w] ^ signs[w]));
      product += (2 * agree - 32 * WORDS) * (1 << bit);
    }
    scores[row * n_tokens + token] = float(product) * steps[row] * size;
  }
}
