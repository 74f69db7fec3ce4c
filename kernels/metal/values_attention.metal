// Decode attention on tiles that hold V alone.
//
// One threadgroup serves one KV head, one group of 8 * ROWS rows and one split of the sequence. It
// takes one unit at a time: a sealed block, the sink, or 32 tokens of the tail. Its PARTS simdgroups
// share out the channels, uint4 j = part, part + PARTS and so on. Each loads its codes once, for
// both products: its share of S^T = K Q^T, which they add up, and its channels of O += P V. (Tokens
// in 16 bits would take too many registers, so those few are loaded twice.)
//
// K is turned, not Q: once for all rows. A lane's tokens are 8 n + row of a unit, so what they are
// turned by is what the unit's first token is turned by, times numbers that all units share.

template <typename T>
float2 two_of(const device T* at) {
  const vec<T, 2> x = *(const device vec<T, 2>*)at;
  return float2(float(x.x), float(x.y));
}

// How K is made of V, in the channels of one simdgroup. Those of its first TURNED uint4s turn.
template <int D, int PARTS, int TURNED, typename Weight>
struct Keys {
  const device Weight* weight;  // (D,)
  const device ulong* turns;    // (D / 2,), as angle() takes them
  Complex<float2> by_row[TURNED][2], by_8[TURNED][2];

  void set(uint part, uint row, uint pair) thread {
    UNROLL
    for (int m = 0; m < TURNED; m++) {
      UNROLL
      for (int i = 0; i < 2; i++) {
        const device ulong* turn = turns + channel_of<D>(part + PARTS * m, i, pair);
        by_row[m][i] = join(angle(row, turn[0]), angle(row, turn[1]));
        by_8[m][i] = join(angle(8, turn[0]), angle(8, turn[1]));
      }
    }
  }

  static Complex<float2> join(Complex<float> a, Complex<float> b) {
    return {float2(a.x, b.x), float2(a.y, b.y)};
  }

  // Of the lane's token among the first 8; start: lane c has that of channel 16 j + c, c < 16.
  Complex<float2> first(Complex<float> start, int m, uint i, uint pair) const thread {
    const ushort c = 4 * pair + 2 * i, d = c + 1;
    const Complex<float2> both = {
        float2(simd_shuffle(start.x, c), simd_shuffle(start.x, d)),
        float2(simd_shuffle(start.y, c), simd_shuffle(start.y, d))};
    return turned(both, by_row[m][i]);
  }
};

// Two channels of a block, times a weight.
struct SealedChannels {
  uint4 words;
  uint i;
  float2 scale, zero;
  float2 token(int n) const thread { return fma(nibbles(words[n], i), scale, zero); }
};

// A block, in the channels of one simdgroup.
template <int D, int PARTS>
struct Sealed {
  uint4 codes[D / PARTS / 32];
  const threadgroup uint2* parameters;

  void load(const device uint4* tile, threadgroup uint4* staged, uint part, uint lane) thread {
    UNROLL
    for (int m = 0; m < D / PARTS / 32; m++)
      codes[m] = load_codes<D>(tile, 32 * (part + PARTS * m) + lane);
    simdgroup_barrier(mem_flags::mem_threadgroup);  // the last block's have been read
    for (uint i = lane; i < D / PARTS / 4; i += 32) {
      const uint j = part + PARTS * (i / 8);
      staged[i] = tile[(BITS * D + D / 2 * (i / 4 % 2) + 16 * j) / 4 + i % 4];
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    parameters = (const threadgroup uint2*)staged;
  }

  SealedChannels channels(uint m, uint i, uint, uint pair, float2 weight) const thread {
    const uint2 words = parameters[16 * m + 8 * (i / 2) + 2 * pair + i % 2];
    const Parameters p = unpack(words.x), q = unpack(words.y);
    return {codes[m], i, weight * float2(p.scale, q.scale), weight * float2(p.zero, q.zero)};
  }
};

// Two channels of tokens in 16 bits, times a weight.
template <int D, typename T>
struct HeldChannels {
  const device T* tokens;
  int count;
  float2 weight;
  float2 token(int n) const thread {
    return 8 * n < count ? weight * two_of(tokens + 8 * n * D) : float2(0.0f);
  }
};

// Up to 32 tokens in 16 bits, of which a lane has row, row + 8 and so on.
template <int D, int PARTS, typename T>
struct Held {
  const device T* tokens;
  int count;
  uint row;
  HeldChannels<D, T> channels(uint m, uint i, uint part, uint pair, float2 weight) const thread {
    return {tokens + row * D + channel_of<D>(part + PARTS * m, i, pair), count - int(row), weight};
  }
};

// position: of the unit's first token; count: its tokens; last: what each row sees last.
template <
    int D, int PARTS, int ROWS, int TURNED, typename Unit, typename Query, typename Weight>
void attend_unit(
    thread Rows<D, D / PARTS, ROWS>& rows,
    thread const Unit& unit,
    int position,
    int count,
    const threadgroup Query* query,
    thread const Keys<D, PARTS, TURNED, Weight>& keys,
    threadgroup float2* shares,
    thread const int (&last)[ROWS],
    Options options,
    uint part,
    uint lane) {
  const uint row = matrix_row(lane), pair = matrix_pair(lane);
  float2 scores[ROWS][4];
  UNROLL
  for (int a = 0; a < ROWS; a++)
    UNROLL
    for (int n = 0; n < 4; n++) scores[a][n] = float2(0.0f);
  UNROLL
  for (int m = 0; m < D / PARTS / 32; m++) {
    const uint j = part + PARTS * m;
    const bool turns = m < TURNED;
    Complex<float> start;
    if (turns) start = angle(position, keys.turns[16 * j + lane % 16]);
    UNROLL
    for (int i = 0; i < 2; i++) {
      const device Weight* weight = keys.weight + channel_of<D>(j, i, pair);
      const auto x = unit.channels(m, i, part, pair, two_of(weight));
      const auto y = unit.channels(m, i + 2, part, pair, two_of(weight + D / 2));
      float2 q_x[ROWS], q_y[ROWS];
      UNROLL
      for (int a = 0; a < ROWS; a++) {
        const threadgroup Query* q = query + (a * (D / PARTS / 8) + 4 * m + i) * 32 + lane;
        q_x[a] = float2(float(q[0].x), float(q[0].y));
        q_y[a] = float2(float(q[64].x), float(q[64].y));
      }
      Complex<float2> by;
      if (turns) by = keys.first(start, m, i, pair);
      UNROLL
      for (int n = 0; n < 4; n++) {
        Complex<float2> key = {x.token(n), y.token(n)};
        if (turns) key = turned(key, by);
        if (turns && n < 3) by = turned(by, keys.by_8[m][i]);
        UNROLL
        for (int a = 0; a < ROWS; a++) {
          multiply_add(scores[a][n], key.x, q_x[a]);
          multiply_add(scores[a][n], key.y, q_y[a]);
        }
      }
    }
  }

  // Add the shares up. What was token by row is read as row by token.
  UNROLL
  for (int a = 0; a < ROWS; a++)
    UNROLL
    for (int n = 0; n < 4; n++)
      shares[((part * ROWS + a) * 32 + 8 * n + row) * 4 + pair] = scores[a][n];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int a = 0; a < ROWS; a++) {
    UNROLL
    for (int n = 0; n < 4; n++) {
      const int token = 8 * n + 2 * int(pair);
      float2 s = float2(0.0f);
      UNROLL
      for (int p = 0; p < PARTS; p++) {
        const threadgroup float* share =
            (const threadgroup float*)shares + ((p * ROWS + a) * 32 + token) * 8 + row;
        s += float2(share[0], share[8]);
      }
      UNROLL
      for (int e = 0; e < 2; e++) {
        const bool is_seen = token + e < count && position + token + e <= last[a];
        scores[a][n][e] = is_seen ? capped(s[e] * options.query_scale, options.softcap) : UNSEEN;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  rows.softmax(scores);

  UNROLL
  for (int m = 0; m < D / PARTS / 32; m++) {
    UNROLL
    for (int i = 0; i < 4; i++) {
      const auto x = unit.channels(m, i, part, pair, float2(1.0f));
      UNROLL
      for (int n = 0; n < 4; n++) {
        const float2 values = x.token(n);
        UNROLL
        for (int a = 0; a < ROWS; a++)
          multiply_add(rows.output[a][4 * m + i], scores[a][n], values);
      }
    }
  }
}

// Pass 1 of a threadgroup. Its results go to `results`, in pieces.
template <
    int D, int PARTS, int ROWS, int TURNED,
    typename Q, typename Query, typename T, typename Weight, typename Results>
void attend_values(
    const device Q* q,
    const device T* sink,
    const device uint* tiles,
    const device T* tail,
    const device Weight* weight,
    const device ulong* turns,
    Lengths held,
    Options options,
    int n_rows,
    int n_tokens,
    int capacity,
    int sink_capacity,
    int tail_capacity,
    Place at,
    threadgroup Query* query,
    threadgroup uint4* parameters,
    threadgroup float2* shares,
    Results results) {
  constexpr int DV = D / PARTS;
  const int first_row = at.group * 8 * ROWS;
  const uint row = matrix_row(at.lane), pair = matrix_pair(at.lane);

  // The queries in this simdgroup's channels, channel by row; rows that do not exist are 0. A lane
  // reads what it wrote itself: there are no registers for it.
  q += at.head * n_rows * D;
  query += at.part * ROWS * (DV / 8) * 32;
  for (int i = 0; i < ROWS * (DV / 8); i++) {
    const int f = i % (DV / 8), r = first_row + 8 * (i / (DV / 8)) + 2 * int(pair);
    const uint channel = channel_of<D>(at.part + PARTS * (f / 4), f % 4, row / 2) + row % 2;
    Query x = Query(Q(0.0f));
    if (r < n_rows) x.x = q[r * D + channel];
    if (r + 1 < n_rows) x.y = q[(r + 1) * D + channel];
    query[i * 32 + at.lane] = x;
  }

  const int sealed = BLOCK * held.n_blocks, length = held.n_sink + sealed + held.n_tail;
  int last[ROWS];
  UNROLL
  for (int a = 0; a < ROWS; a++)
    last[a] = length - n_tokens + (first_row + 8 * a + int(row)) % n_tokens;

  const int n_sinks = held.n_sink > 0 ? 1 : 0;
  const int units = held.n_blocks + n_sinks + (held.n_tail + 31) / 32;
  const int begin = units * at.split / options.n_splits;
  const int end = units * (at.split + 1) / options.n_splits;
  tiles += ulong(at.head) * capacity * value_tile_words(D);
  Keys<D, PARTS, TURNED, Weight> keys;
  keys.weight = weight;
  keys.turns = turns;
  keys.set(at.part, row, pair);
  Rows<D, DV, ROWS> rows;
  rows.clear();
  for (int unit = begin; unit < end; unit++) {
    if (unit < held.n_blocks) {
      Sealed<D, PARTS> block;
      block.load(
          (const device uint4*)(tiles + ulong(unit) * value_tile_words(D)),
          parameters + at.part * (DV / 4), at.part, at.lane);
      attend_unit<D, PARTS, ROWS, TURNED>(
          rows, block, held.n_sink + BLOCK * unit, BLOCK, query, keys, shares, last, options,
          at.part, at.lane);
    } else {
      const int first = 32 * (unit - held.n_blocks - n_sinks);  // in the tail
      Held<D, PARTS, T> tokens = {
          tail + (int(at.head) * tail_capacity + first) * D, held.n_tail - first, row};
      if (first < 0) {
        tokens.tokens = sink + at.head * sink_capacity * D;
        tokens.count = held.n_sink;
      }
      attend_unit<D, PARTS, ROWS, TURNED>(
          rows, tokens, first < 0 ? 0 : held.n_sink + sealed + first, tokens.count, query, keys,
          shares, last, options, at.part, at.lane);
    }
  }

  UNROLL
  for (int a = 0; a < ROWS; a++) {
    const float sum = row_sum(rows.sum[a]);
    const int r = first_row + 8 * a + int(row);
    if (r < n_rows) {
      if (at.part == 0 && pair == 0) results.write_statistics(r, rows.maximum[a], sum);
      UNROLL
      for (int f = 0; f < DV / 8; f++) {
        const uint channel = channel_of<D>(at.part + PARTS * (f / 4), f % 4, pair);
        results.write(r, channel, rows.output[a][f], rows.maximum[a], sum);
      }
    }
  }
}
