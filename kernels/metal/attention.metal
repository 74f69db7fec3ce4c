// Decode attention on the sealed cache as it lies.
//
// The rows are the queries that share a KV head: its query heads times the query tokens, head
// first, so that row r is token r % tokens. One threadgroup serves one KV head, one group of
// 8 * ROWS rows, one part of V's channels and one split of the sequence; its simdgroups take the
// split's units in turn and join their results at the end. A unit is a sealed block of 32 tokens,
// or 32 of the tokens held in 16 bits: the sink and the tail, taken as one sequence.
//
// For a unit: S = Q K^T, one step of online softmax (arXiv:1805.02867), O += P V, all in 8 x 8
// matrices of float. K's scale is folded into Q, its zero into one number per row; V is multiplied
// out. Scores are in units of log2.

// How a query looks at the cache.
struct Options {
  int n_splits;
  int window;  // tokens a query sees, itself included; 0: all
  float query_scale;
  float softcap;  // score = softcap * tanh(score); 0: none
};

inline Options make_options(const constant int* x) {
  return {x[0], x[1], as_type<float>(x[2]), as_type<float>(x[3])};
}

// A running maximum may lag behind by this much (in log2) before the sums are rescaled: 2^8 is far
// from the end of float's range.
constant constexpr float SLACK = 8.0f;

// An 8 x 8 matrix is a float2 in each lane: matrix_row(lane), 2 * matrix_pair(lane) and the next.
// c += a b.
inline void multiply_add(thread float2& c, float2 a, float2 b) {
  simdgroup_float8x8 left, right, sum, result;
  reinterpret_cast<thread float2&>(left.thread_elements()) = a;
  reinterpret_cast<thread float2&>(right.thread_elements()) = b;
  reinterpret_cast<thread float2&>(sum.thread_elements()) = c;
  simdgroup_multiply_accumulate(result, left, right, sum);
  c = reinterpret_cast<thread float2&>(result.thread_elements());
}

// Sum or maximum over the four lanes that hold a row.
inline float row_sum(float x) {
  x += simd_shuffle_xor(x, 1);
  return x + simd_shuffle_xor(x, 8);
}
inline float row_max(float x) {
  x = max(x, simd_shuffle_xor(x, 1));
  return max(x, simd_shuffle_xor(x, 8));
}

// The state of ROWS * 8 rows in one simdgroup. A lane holds elements of row 8 a + matrix_row(lane).
template <int D, int DV, int ROWS>
struct Rows {
  float2 output[ROWS][DV / 8];
  float maximum[ROWS];
  float sum[ROWS];  // this lane's share

  void clear() thread {
    UNROLL
    for (int a = 0; a < ROWS; a++) {
      maximum[a] = LOWEST;
      sum[a] = 0;
      UNROLL
      for (int f = 0; f < DV / 8; f++) output[a][f] = float2(0.0f);
    }
  }

  // Turns scores into probabilities, relative to the running maximum.
  void softmax(thread float2 (&scores)[ROWS][4]) thread {
    float highest[ROWS];
    bool higher = false;
    UNROLL
    for (int a = 0; a < ROWS; a++) {
      highest[a] = LOWEST;
      UNROLL
      for (int n = 0; n < 4; n++)
        highest[a] = max(highest[a], max(scores[a][n].x, scores[a][n].y));
      higher = higher || highest[a] > maximum[a] + SLACK;
    }
    if (simd_any(higher)) {
      UNROLL
      for (int a = 0; a < ROWS; a++) {
        float now = max(maximum[a], row_max(highest[a]));
        float factor = metal::fast::exp2(maximum[a] - now);
        maximum[a] = now;
        sum[a] *= factor;
        UNROLL
        for (int f = 0; f < DV / 8; f++) output[a][f] *= factor;
      }
    }
    UNROLL
    for (int a = 0; a < ROWS; a++) {
      UNROLL
      for (int n = 0; n < 4; n++) {
        const float2 s = scores[a][n] - maximum[a];
        scores[a][n] = float2(metal::fast::exp2(s.x), metal::fast::exp2(s.y));
        sum[a] += scores[a][n].x + scores[a][n].y;
      }
    }
  }
};

// Which keys a row may see: first to last, as positions in the sequence.
struct Range {
  int first, last;
  float keep(float score, int key) const thread {
    return key >= first && key <= last ? score : UNSEEN;
  }
};

inline float capped(float score, float softcap) {
  return softcap > 0 ? softcap * metal::precise::tanh(score) : score;
}

template <int D, int DV, int ROWS>
void attend_block(
    thread Rows<D, DV, ROWS>& rows,
    const device uint4* tile,
    const threadgroup float2* query,
    threadgroup uint* parameters,
    thread const Range (&ranges)[ROWS],
    bool is_masked,
    int position,
    float softcap,
    uint part,
    uint lane) {
  const uint row = matrix_row(lane), pair = matrix_pair(lane);
  const device uint4* v_tile = tile + BITS * D / 4;
  const device uint4* parameter_tile = tile + BITS * D / 2;
  // Ask for the whole tile at once where there are registers to hold it.
  constexpr bool early = D * ROWS <= 128;
  uint4 k_codes[D / 32], v_codes[DV / 32];
  if (early) {
    UNROLL
    for (int j = 0; j < D / 32; j++) k_codes[j] = load_codes<D>(tile, 32 * j + lane);
    UNROLL
    for (int j = 0; j < DV / 32; j++)
      v_codes[j] = load_codes<D>(v_tile, part * DV + 32 * j + lane);
  }
  threadgroup uint4* staged = (threadgroup uint4*)parameters;
  simdgroup_barrier(mem_flags::mem_threadgroup);  // the last block's have been read
  for (uint i = lane; i < D / 4; i += 32) staged[i] = parameter_tile[i];
  for (uint i = lane; i < DV / 4; i += 32)
    staged[D / 4 + i] = parameter_tile[D / 4 + part * (DV / 4) + i];
  simdgroup_barrier(mem_flags::mem_threadgroup);

  float2 scores[ROWS][4];
  float zero[ROWS];
  UNROLL
  for (int a = 0; a < ROWS; a++) {
    zero[a] = 0;
    UNROLL
    for (int n = 0; n < 4; n++) scores[a][n] = float2(0.0f);
  }
  UNROLL
  for (int f = 0; f < D / 8; f++) {
    if (!early && f % 4 == 0) k_codes[f / 4] = load_codes<D>(tile, 32 * (f / 4) + lane);
    float2 keys[4];
    UNROLL
    for (int n = 0; n < 4; n++) keys[n] = nibbles(k_codes[f / 4][f % 4], n);
    const uint2 words = ((const threadgroup uint2*)parameters)[4 * f + pair];
    const Parameters p = unpack(words.x), q = unpack(words.y);
    UNROLL
    for (int a = 0; a < ROWS; a++) {
      const float2 x = query[(a * (D / 8) + f) * 32 + lane];
      zero[a] += x.x * p.zero + x.y * q.zero;
      const float2 scaled = float2(x.x * p.scale, x.y * q.scale);
      UNROLL
      for (int n = 0; n < 4; n++) multiply_add(scores[a][n], scaled, keys[n]);
    }
  }
  UNROLL
  for (int a = 0; a < ROWS; a++) {
    const float base = row_sum(zero[a]);
    UNROLL
    for (int n = 0; n < 4; n++) {
      float2 s = scores[a][n] + base;
      s = float2(capped(s.x, softcap), capped(s.y, softcap));
      if (is_masked) {
        const int key = position + 8 * n + 2 * int(pair);
        s = float2(ranges[a].keep(s.x, key), ranges[a].keep(s.y, key + 1));
      }
      scores[a][n] = s;
    }
  }
  rows.softmax(scores);

  UNROLL
  for (int j = 0; j < DV / 32; j++) {
    if (!early) v_codes[j] = load_codes<D>(v_tile, part * DV + 32 * j + lane);
    const uint4 words = staged[D / 4 + 8 * j + row];
    UNROLL
    for (int n = 0; n < 4; n++) {
      const Parameters p = unpack(words[n]);
      UNROLL
      for (int i = 0; i < 4; i++) {
        const float2 values = fma(nibbles(v_codes[j][n], i), float2(p.scale), float2(p.zero));
        UNROLL
        for (int a = 0; a < ROWS; a++) multiply_add(rows.output[a][4 * j + i], scores[a][n], values);
      }
    }
  }
}

// The tokens held in 16 bits as one sequence, sink first.
template <typename T, int D>
struct Dense {
  const device T* sink;
  const device T* tail;
  int n_sink, count;

  vec<T, 4> load(int token, uint channel) const thread {
    if (token >= count) return vec<T, 4>(T(0));
    const device T* at = token < n_sink ? sink + token * D : tail + (token - n_sink) * D;
    return *(const device vec<T, 4>*)(at + channel);
  }
};

template <int D, int DV, int ROWS, typename T>
void attend_dense(
    thread Rows<D, DV, ROWS>& rows,
    thread const Dense<T, D>& k,
    thread const Dense<T, D>& v,
    const threadgroup float2* query,
    thread const Range (&ranges)[ROWS],
    int first,
    int sealed,
    float softcap,
    uint part,
    uint lane) {
  const uint row = matrix_row(lane), pair = matrix_pair(lane);
  float2 scores[ROWS][4];
  UNROLL
  for (int a = 0; a < ROWS; a++)
    UNROLL
    for (int n = 0; n < 4; n++) scores[a][n] = float2(0.0f);
  UNROLL
  for (int j = 0; j < D / 32; j++) {
    UNROLL
    for (int n = 0; n < 4; n++) {
      const int token = first + 8 * n + 2 * int(pair);
      const vec<T, 4> x = k.load(token, 32 * j + 4 * row);
      const vec<T, 4> y = k.load(token + 1, 32 * j + 4 * row);
      UNROLL
      for (int i = 0; i < 4; i++) {
        const float2 keys = float2(float(x[i]), float(y[i]));
        UNROLL
        for (int a = 0; a < ROWS; a++)
          multiply_add(scores[a][n], query[(a * (D / 8) + 4 * j + i) * 32 + lane], keys);
      }
    }
  }
  UNROLL
  for (int a = 0; a < ROWS; a++) {
    UNROLL
    for (int n = 0; n < 4; n++) {
      float2 s = scores[a][n];
      UNROLL
      for (int e = 0; e < 2; e++) {
        const int token = first + 8 * n + 2 * int(pair) + e;
        const int key = token < k.n_sink ? token : token + sealed;
        s[e] = ranges[a].keep(capped(s[e], softcap), key);  // none past the last is seen
      }
      scores[a][n] = s;
    }
  }
  rows.softmax(scores);

  UNROLL
  for (int n = 0; n < 4; n++) {
    const int token = first + 8 * n + int(row);
    UNROLL
    for (int j = 0; j < DV / 32; j++) {
      const uint channel = part * DV + 32 * j + 8 * pair;
      const vec<T, 4> x = v.load(token, channel);
      const vec<T, 4> y = v.load(token, channel + 4);
      const float2 elements[4] = {
          float2(float(x[0]), float(x[1])), float2(float(x[2]), float(x[3])),
          float2(float(y[0]), float(y[1])), float2(float(y[2]), float(y[3]))};
      UNROLL
      for (int i = 0; i < 4; i++)
        UNROLL
        for (int a = 0; a < ROWS; a++)
          multiply_add(rows.output[a][4 * j + i], scores[a][n], elements[i]);
    }
  }
}

// Words of threadgroup memory for each simdgroup: a block's parameters, later results to join.
constexpr int scratch_words(int d, int dv) { return d + dv > 512 ? d + dv : 512; }

// Where a threadgroup works.
struct Place {
  uint head;    // KV head
  uint group;   // of 8 * ROWS rows
  uint part;    // of V's channels
  uint split;   // of the sequence
  uint simdgroup, lane;
};

// One split's share of the result, for pass 2.
template <int D>
struct Partial {
  device float* output;
  device float2* statistics;
  void write_statistics(int row, float maximum, float sum) thread {
    statistics[row] = float2(maximum, sum);
  }
  void write(int row, int channel, float2 x, float, float) thread {
    *(device float2*)(output + row * D + channel) = x;
  }
};

// The whole result, where one split is all.
template <int D, bool HAS_LOGITS, typename T, typename Logits>
struct Whole {
  device T* output;
  Logits logits;
  int first_head, n_tokens;
  void write_statistics(int, float, float) thread {}
  void write(int row, int channel, float2 x, float maximum, float sum) thread {
    const int head = first_head + row / n_tokens;
    sum = with_logit<HAS_LOGITS>(sum, maximum, logits, head);
    output[row * D + channel] = T(x.x / sum);
    output[row * D + channel + 1] = T(x.y / sum);
  }
};

template <int D, bool HAS_LOGITS, typename T, typename Logits>
Whole<D, HAS_LOGITS, T, Logits> make_whole(
    device T* output, Logits logits, int first_head, int n_tokens) {
  return {output, logits, first_head, n_tokens};
}

// Pass 1 of a threadgroup. Its results go to `results`, in pieces.
template <int D, int DV, int ROWS, int SIMDGROUPS, typename Q, typename T, typename Results>
void attend(
    const device Q* q,
    const device T* sink_k,
    const device T* sink_v,
    const device uint* tiles,
    const device T* tail_k,
    const device T* tail_v,
    Lengths held,
    Options options,
    int n_rows,
    int n_tokens,
    int capacity,
    int sink_capacity,
    int tail_capacity,
    Place at,
    threadgroup float2* query,
    threadgroup uint* scratch,
    threadgroup float2* statistics,
    Results results) {
  const int first_row = at.group * 8 * ROWS;
  const uint row = matrix_row(at.lane), pair = matrix_pair(at.lane);

  // The queries, scaled, in the order the matrices want them; rows that do not exist are 0.
  q += at.head * n_rows * D;
  for (uint i = at.simdgroup; i < ROWS * (D / 8); i += SIMDGROUPS) {
    const int f = i % (D / 8), r = first_row + 8 * (i / (D / 8)) + int(row);
    const uint channel = 32 * (f / 4) + 8 * pair + f % 4;
    float2 x = float2(0.0f);
    if (r < n_rows) x = float2(float(q[r * D + channel]), float(q[r * D + channel + 4]));
    query[i * 32 + at.lane] = x * options.query_scale;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const int sealed = BLOCK * held.n_blocks, length = held.n_sink + sealed + held.n_tail;
  Range ranges[ROWS];
  UNROLL
  for (int a = 0; a < ROWS; a++) {
    const int token = (first_row + 8 * a + int(row)) % n_tokens;
    ranges[a].last = length - n_tokens + token;
    ranges[a].first = options.window > 0 ? ranges[a].last - options.window + 1 : 0;
  }
  // What the first query token sees first, and the last query token no longer.
  const int seen = options.window > 0 ? length - n_tokens - options.window + 1 : 0;
  const int unseen = options.window > 0 ? length - options.window : 0;
  const int first_block = max(0, min(held.n_blocks, (seen - held.n_sink) / BLOCK));

  const int dense = held.n_sink + held.n_tail;
  const int n_blocks = held.n_blocks - first_block, units = n_blocks + (dense + 31) / 32;
  const int begin = units * at.split / options.n_splits;
  const int end = units * (at.split + 1) / options.n_splits;

  const Dense<T, D> k = {sink_k + at.head * sink_capacity * D, tail_k + at.head * tail_capacity * D,
                         held.n_sink, dense};
  const Dense<T, D> v = {sink_v + at.head * sink_capacity * D, tail_v + at.head * tail_capacity * D,
                         held.n_sink, dense};
  const device uint4* head_tiles = (const device uint4*)tiles + ulong(at.head) * capacity * (tile_words(D) / 4);
  threadgroup uint* own = scratch + at.simdgroup * scratch_words(D, DV);
  Rows<D, DV, ROWS> rows;
  rows.clear();
  for (int unit = begin + int(at.simdgroup); unit < end; unit += SIMDGROUPS) {
    if (unit < n_blocks) {
      const int block = first_block + unit, position = held.n_sink + BLOCK * block;
      const bool is_masked = position < unseen || position + BLOCK - 1 > length - n_tokens;
      attend_block<D, DV, ROWS>(
          rows, head_tiles + ulong(block) * (tile_words(D) / 4), query, own, ranges, is_masked, position,
          options.softcap, at.part, at.lane);
    } else {
      attend_dense<D, DV, ROWS>(
          rows, k, v, query, ranges, 32 * (unit - n_blocks), sealed, options.softcap, at.part,
          at.lane);
    }
  }

  // Join the simdgroups: first their maxima and sums, then the outputs, some matrices at a time.
  float maximum[ROWS], sum[ROWS], factor[ROWS];
  UNROLL
  for (int a = 0; a < ROWS; a++) {
    const float all = row_sum(rows.sum[a]);
    if (pair == 0)
      statistics[(at.simdgroup * ROWS + a) * 8 + row] = float2(rows.maximum[a], all);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int a = 0; a < ROWS; a++) {
    maximum[a] = LOWEST;
    UNROLL
    for (int s = 0; s < SIMDGROUPS; s++)
      maximum[a] = max(maximum[a], statistics[(s * ROWS + a) * 8 + row].x);
    sum[a] = 0;
    UNROLL
    for (int s = 0; s < SIMDGROUPS; s++) {
      const float2 other = statistics[(s * ROWS + a) * 8 + row];
      sum[a] += other.y * metal::fast::exp2(other.x - maximum[a]);
    }
    factor[a] = metal::fast::exp2(rows.maximum[a] - maximum[a]);
    const int r = first_row + 8 * a + int(row);
    if (at.simdgroup == 0 && at.part == 0 && pair == 0 && r < n_rows)
      results.write_statistics(r, maximum[a], sum[a]);
  }
  constexpr int MATRICES = 8;  // that fit into a simdgroup's scratch
  threadgroup float2* mine = (threadgroup float2*)own;
  for (int first = 0; first < ROWS * (DV / 8); first += MATRICES) {
    for (int m = 0; m < MATRICES && first + m < ROWS * (DV / 8); m++) {
      const int a = (first + m) / (DV / 8), f = (first + m) % (DV / 8);
      mine[32 * m + at.lane] = rows.output[a][f] * factor[a];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int m = at.simdgroup; m < MATRICES && first + m < ROWS * (DV / 8); m += SIMDGROUPS) {
      float2 x = float2(0.0f);
      UNROLL
      for (int s = 0; s < SIMDGROUPS; s++)
        x += ((threadgroup float2*)(scratch + s * scratch_words(D, DV)))[32 * m + at.lane];
      const int a = (first + m) / (DV / 8), f = (first + m) % (DV / 8);
      const int r = first_row + 8 * a + int(row);
      if (r < n_rows)
        results.write(r, at.part * DV + 32 * (f / 4) + 8 * pair + 2 * (f % 4), x, maximum[a], sum[a]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
