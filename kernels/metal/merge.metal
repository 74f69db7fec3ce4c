// Pass 2 of decode attention, and what both passes need for it.

// Below any score, and what becomes of a score that a row may not see: finite, so that no
// difference is NaN, and exp2(UNSEEN - LOWEST) = 0.
constant constexpr float LOWEST = -1e30f, UNSEEN = -3e38f;

// MLX passes an array of less than 8 elements in constant memory, any other in device memory: what
// may be so small comes as a pointer of any type.

// A logit per head that joins the softmax without a value (learned attention sinks).
template <bool HAS_LOGITS, typename Logits>
float with_logit(float sum, float maximum, Logits logits, int head) {
  if (!HAS_LOGITS) return sum;
  return sum + metal::fast::exp2(float(logits[head]) * M_LOG2E_F - maximum);
}

// Pass 2: a simdgroup joins the splits of 32 channels of one row; lane s weighs split s.
template <int D, bool HAS_LOGITS, typename T, typename Statistics, typename Logits>
void merge(
    const device float* partial,
    Statistics statistics,
    Logits logits,
    device T* output,
    int n_splits,
    int n_rows,
    int n_tokens,
    uint head_row,
    uint chunk,
    uint lane) {
  const int head = head_row / n_rows, row = head_row % n_rows;
  float maximum = LOWEST, sum = 0;
  if (int(lane) < n_splits) {
    const int at = 2 * ((head * n_splits + int(lane)) * n_rows + row);
    maximum = statistics[at];
    sum = statistics[at + 1];
  }
  const float highest = simd_max(maximum);
  const float weight = metal::fast::exp2(maximum - highest);
  sum = with_logit<HAS_LOGITS>(simd_sum(sum * weight), highest, logits, head_row / n_tokens);
  const uint channel = 32 * chunk + lane;
  float x = 0;
  for (int s = 0; s < n_splits; s++)
    x += simd_shuffle(weight, s) * partial[((head * n_splits + s) * n_rows + row) * D + channel];
  output[head_row * D + channel] = T(x / sum);
}
