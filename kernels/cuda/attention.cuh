// Decode attention on a quantised cache as it lies: sealed tiles, tail and sink, 1 to 8 query tokens.
//
// A block of threads takes one KV head, one share of the sequence and up to 8 * TILES_N query rows
// (heads that share the KV head times query tokens), so that every byte of the cache is read once
// for all of them. Its warps take the share's tiles in turn, each through a ring of its own, and
// keep a softmax of their own (FlashAttention-2, arXiv:2307.08691); the block merges its warps and
// `merge_splits` merges the blocks (Flash-Decoding).
//
// Queries are the tensor core's narrow side: S^T = K Q^T and O^T = V^T P^T, so 8 query rows fill
// it. K's scale is folded into the query, V's into the weights. Scores are in log2.
//
// A tile in this backend's order, in units of 16 bytes, with G = head_dim / 32 groups of channels
// and lane 4 g + j of a warp reading what the products want of it (see `mma`):
//   32 G  K codes: [group][lane] 4 words, tokens g, g+8, g+16, g+24; a word is channels 8j..8j+7
//    4 G  K scales: [group][j] 4 pairs, channels 8j+p and 8j+p+4
//    4 G  K mids, likewise
//   32 G  V codes: [group][lane] 4 words i, tokens 8i+2j (low half) and 8i+2j+1; channels 4g..4g+3
//    4 G  V scales: [group][j] 4 pairs i, tokens 8i+2j and 8i+2j+1
//    4 G  V mids, likewise
// With codes of 3 bits each 4 words of codes are 3 (see `Codes`).
#pragma once

#include "warp.cuh"

namespace tq {

constexpr int BLOCK_TOKENS = 32;
constexpr int DENSE_TOKENS = 16;  // sink and tail are taken in blocks of this many
constexpr int DENSE_COST = 2;     // one such block takes the time of this many tiles

// No score; also the running maximum of a row that has seen none.
constexpr float NONE = -1e30f;
// The running maximum is moved only when a score would give a weight above 2^TOP, which with V's
// largest possible scale (2 * 65504 / 15) still is a finite fp16. A new maximum weighs 2^START.
constexpr float TOP = 2.f, START = -1.f;
// Queries are held as fp16 times this, lest query times K's scale overflow.
constexpr float QUERY_SCALE = 0.125f;

struct AttentionShape {
  int rows;      // query rows of one KV head
  int tokens;    // query tokens
  int capacity;  // tiles of one KV head in the buffer
};

template <int D, int TILES_N>
struct AttentionState {
  static constexpr int MID_TILES = D > 256 ? 2 : 1;
  float out[TILES_N][D / 16][4];
  // Rows 0-7: what V's mids add to groups 0-7 (second tile: 8-15); rows 8-15: the sum of weights.
  float mids[TILES_N][MID_TILES][4];
  float top[TILES_N][2];

  DEVICE void clear() {
#pragma unroll
    for (int n = 0; n < TILES_N; n++) {
#pragma unroll
      for (int i = 0; i < D / 16; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) out[n][i][c] = 0.f;
#pragma unroll
      for (int i = 0; i < MID_TILES; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) mids[n][i][c] = 0.f;
      top[n][0] = top[n][1] = NONE;
    }
  }
};

// Queries as the products want them: in registers, or for a large head in shared memory.
template <int D, int TILES_N>
struct Queries {
  static constexpr bool SHARED = D > 256;
  Words4 held[SHARED ? 1 : TILES_N][SHARED ? 1 : D / 32];
  const Words4* shared;

  DEVICE Words4 get(int n, int group, int lane) const {
    if constexpr (SHARED) {
      return shared[(n * (D / 32) + group) * 32 + lane];
    } else {
      return held[n][group];
    }
  }
};

// Channels 0..7 of a row to pairs (p, p + 4), as the codes of a word unpack.
template <class T>
DEVICE Words4 pair_channels(Words4 row) {
  return {{as_half2<T>(low_halves(row.w[0], row.w[2])), as_half2<T>(high_halves(row.w[0], row.w[2])),
           as_half2<T>(low_halves(row.w[1], row.w[3])),
           as_half2<T>(high_halves(row.w[1], row.w[3]))}};
}

// What turns a product of query and key into a score in log2.
template <bool SOFTCAP>
struct Scoring {
  float factor, cap;

  DEVICE Scoring(float scale, float softcap) {
    factor = SOFTCAP ? 2.f * LOG2E * scale / (softcap * QUERY_SCALE) : scale * LOG2E / QUERY_SCALE;
    cap = softcap * LOG2E;
  }
  DEVICE float operator()(float product, float top) const {
    if constexpr (SOFTCAP) {
      // tanh(x) = 1 - 2 / (exp(2 x) + 1)
      return cap - __fdividef(2.f * cap, exp2_fast(fminf(product * factor, 126.f)) + 1.f) - top;
    } else {
      return fmaf(product, factor, -top);
    }
  }
};

// Which keys a query row may see.
struct Visible {
  int tokens, newest, window;  // newest: the position of the last query token

  DEVICE bool all(int first, int last) const {
    return last <= newest - tokens + 1 && first > newest - window;
  }
  DEVICE bool operator()(int row, int position) const {
    const int query = newest - (tokens == 1 ? 0 : tokens - 1 - row % tokens);
    return position <= query && position > query - window;
  }
};

// Scores of M * 16 tokens to weights, B operands of the value product. On entry scores are relative
// to the running maximum (to 0 where there is none yet).
template <int M, int D, int TILES_N>
DEVICE void softmax_step(AttentionState<D, TILES_N>& state, int n, float (&scores)[M][4],
                         u32 (&weights)[2 * M]) {
  float high[2];
#pragma unroll
  for (int c = 0; c < 2; c++) {
    high[c] = fmaxf(scores[0][c], scores[0][c + 2]);
    if constexpr (M == 2) high[c] = fmaxf(high[c], fmaxf(scores[1][c], scores[1][c + 2]));
  }
  float(&top)[2] = state.top[n];
  const bool move = high[0] > TOP || high[1] > TOP || top[0] == NONE || top[1] == NONE;
  if (__any_sync(ALL_LANES, move)) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        high[c] = fmaxf(high[c], __shfl_xor_sync(ALL_LANES, high[c], distance));
      float by, keep;
      if (top[c] == NONE) {
        by = high[c] > 0.5f * NONE ? high[c] - START : 0.f;
        top[c] = high[c] > 0.5f * NONE ? by : NONE;
        keep = 0.f;
      } else {
        by = fmaxf(high[c] - START, 0.f);
        top[c] += by;
        keep = exp2_fast(-by);
      }
#pragma unroll
      for (int i = 0; i < D / 16; i++) {
        state.out[n][i][c] *= keep;
        state.out[n][i][c + 2] *= keep;
      }
#pragma unroll
      for (int i = 0; i < AttentionState<D, TILES_N>::MID_TILES; i++) {
        state.mids[n][i][c] *= keep;
        state.mids[n][i][c + 2] *= keep;
      }
#pragma unroll
      for (int t = 0; t < M; t++) {
        scores[t][c] -= by;
        scores[t][c + 2] -= by;
      }
    }
  }
#pragma unroll
  for (int t = 0; t < M; t++) {
    weights[2 * t] = transpose8x8(pack2<__half>(exp2_fast(scores[t][0]), exp2_fast(scores[t][1])));
    weights[2 * t + 1] =
        transpose8x8(pack2<__half>(exp2_fast(scores[t][2]), exp2_fast(scores[t][3])));
  }
}

template <int D, int TILES_N, bool SOFTCAP>
DEVICE void score_tokens(const AttentionState<D, TILES_N>& state, int n,
                         const Scoring<SOFTCAP>& scoring, float (&scores)[4]) {
#pragma unroll
  for (int c = 0; c < 4; c++) {
    const float top = state.top[n][c & 1];
    scores[c] = scoring(scores[c], top == NONE ? 0.f : top);
  }
}

// Sets the scores of 8 + 8 tokens that may not be seen aside; position(i) of tokens g and g + 8.
template <class Position>
DEVICE void mask_tokens(float (&scores)[4], const Visible& visible, int first_row, int lane,
                        Position position) {
#pragma unroll
  for (int c = 0; c < 4; c++) {
    const int at = position(c >> 1);
    if (at < 0 || !visible(first_row + 2 * (lane & 3) + (c & 1), at)) scores[c] = NONE;
  }
}

// One tile, already in shared memory. `done` is called once nothing more is read from there.
template <int BITS, int D, int TILES_N, bool SOFTCAP, class Done>
DEVICE void attend_tile(AttentionState<D, TILES_N>& state, const Queries<D, TILES_N>& queries,
                        const Scoring<SOFTCAP>& scoring, const Visible& visible,
                        const unsigned char* tile, int position, int first_row, int lane,
                        Done done) {
  constexpr int G = D / 32, OFFSET = 1 << (BITS - 1);
  constexpr bool EARLY = D <= 128;  // V waits in registers, so the buffer is free before softmax
  const int g = lane >> 2, j = lane & 3;
  const u32* k_codes = reinterpret_cast<const u32*>(tile);
  const Words4* k_scales = reinterpret_cast<const Words4*>(k_codes + BITS * D);
  const Words4* k_mids = k_scales + 4 * G;
  const u32* v_codes = k_codes + (BITS + 1) * D;
  const Words4* v_scales = reinterpret_cast<const Words4*>(v_codes + BITS * D);
  const Words4* v_mids = v_scales + 4 * G;

  float sums[TILES_N][2][2][4], mids[TILES_N][2][4];
#pragma unroll
  for (int n = 0; n < TILES_N; n++)
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int c = 0; c < 4; c++) mids[n][half][c] = sums[n][0][half][c] = sums[n][1][half][c] = 0.f;

#pragma unroll
  for (int group = 0; group < G; group++) {
    const Words4 codes = load_codes<BITS>(k_codes, group * 32 + lane).wide();
    const Words4 scale = k_scales[group * 4 + j], mid = k_mids[group * 4 + j];
    u32 query[TILES_N][4];
#pragma unroll
    for (int n = 0; n < TILES_N; n++) {
      const Words4 q = queries.get(n, group, lane);
      mma(mids[n][0], mid.w[0], mid.w[0], mid.w[1], mid.w[1], q.w[0], q.w[1]);
      mma(mids[n][1], mid.w[2], mid.w[2], mid.w[3], mid.w[3], q.w[2], q.w[3]);
#pragma unroll
      for (int p = 0; p < 4; p++) query[n][p] = mul2(q.w[p], scale.w[p]);
    }
#pragma unroll
    for (int t = 0; t < 2; t++) {
      u32 a[4], b[4];
      unpack_nibbles<OFFSET>(codes.w[2 * t], a);
      unpack_nibbles<OFFSET>(codes.w[2 * t + 1], b);
#pragma unroll
      for (int n = 0; n < TILES_N; n++) {
        mma(sums[n][t][0], a[0], b[0], a[1], b[1], query[n][0], query[n][1]);
        mma(sums[n][t][1], a[2], b[2], a[3], b[3], query[n][2], query[n][3]);
      }
    }
  }

  Codes<BITS> codes[EARLY ? G : 1];
  Words4 scales[EARLY ? G : 1], value_mids[AttentionState<D, TILES_N>::MID_TILES];
#pragma unroll
  for (int i = 0; i < AttentionState<D, TILES_N>::MID_TILES; i++)
    value_mids[i] = v_mids[min(8 * i + g, G - 1) * 4 + j];
  if constexpr (EARLY) {
#pragma unroll
    for (int group = 0; group < G; group++) {
      codes[group] = load_codes<BITS>(v_codes, group * 32 + lane);
      scales[group] = v_scales[group * 4 + j];
    }
    done();
  }

  u32 weights[TILES_N][4];
#pragma unroll
  for (int n = 0; n < TILES_N; n++) {
    float scores[2][4];
#pragma unroll
    for (int t = 0; t < 2; t++) {
#pragma unroll
      for (int c = 0; c < 4; c++)
        scores[t][c] = (sums[n][t][0][c] + sums[n][t][1][c]) + (mids[n][0][c & 1] + mids[n][1][c & 1]);
      score_tokens(state, n, scoring, scores[t]);
    }
    if (!visible.all(position, position + BLOCK_TOKENS - 1)) {
#pragma unroll
      for (int t = 0; t < 2; t++)
        mask_tokens(scores[t], visible, first_row + 8 * n, lane,
                    [&](int i) { return position + 16 * t + 8 * i + g; });
    }
    softmax_step<2>(state, n, scores, weights[n]);

    constexpr u32 ONES = 0x3c003c00u;
#pragma unroll
    for (int t = 0; t < 2; t++) {
      mma(state.mids[n][0], value_mids[0].w[2 * t], ONES, value_mids[0].w[2 * t + 1], ONES,
          weights[n][2 * t], weights[n][2 * t + 1]);
      if constexpr (AttentionState<D, TILES_N>::MID_TILES == 2)
        mma(state.mids[n][1], value_mids[1].w[2 * t], 0u, value_mids[1].w[2 * t + 1], 0u,
            weights[n][2 * t], weights[n][2 * t + 1]);
    }
  }

#pragma unroll
  for (int group = 0; group < G; group++) {
    const Words4 code =
        (EARLY ? codes[EARLY ? group : 0] : load_codes<BITS>(v_codes, group * 32 + lane)).wide();
    const Words4 scale = EARLY ? scales[EARLY ? group : 0] : v_scales[group * 4 + j];
#pragma unroll
    for (int t = 0; t < 2; t++) {
      u32 a[4], b[4];
      unpack_nibbles<OFFSET>(code.w[2 * t], a);
      unpack_nibbles<OFFSET>(code.w[2 * t + 1], b);
#pragma unroll
      for (int n = 0; n < TILES_N; n++) {
        const u32 first = mul2(weights[n][2 * t], scale.w[2 * t]);
        const u32 second = mul2(weights[n][2 * t + 1], scale.w[2 * t + 1]);
        mma(state.out[n][2 * group], a[0], a[1], b[0], b[1], first, second);
        mma(state.out[n][2 * group + 1], a[2], a[3], b[2], b[3], first, second);
      }
    }
  }
  if constexpr (!EARLY) done();
}

// The 16-bit tokens of a KV head: the sink, the tail, and those that the tail does not hold yet.
template <class C>
struct DenseTokens {
  const C *sink_k, *sink_v, *tail_k, *tail_v, *new_k, *new_v;
  int n_sink, n_tail, n_new, tail_position;

  DEVICE int count() const { return n_sink + n_tail + n_new; }
  DEVICE int position(int token) const {
    return token < n_sink ? token : token - n_sink + tail_position;
  }
  template <int D>
  DEVICE const C* row(const C* sink, const C* tail, const C* fresh, int token) const {
    const int in_tail = token - n_sink;
    return in_tail < 0 ? sink + token * D
                       : in_tail < n_tail ? tail + in_tail * D : fresh + (in_tail - n_tail) * D;
  }
  template <int D>
  DEVICE const C* key(int token) const {
    return row<D>(sink_k, tail_k, new_k, token);
  }
  template <int D>
  DEVICE const C* value(int token) const {
    return row<D>(sink_v, tail_v, new_v, token);
  }
};

template <int D, int TILES_N, bool SOFTCAP, class C>
DEVICE void attend_dense(AttentionState<D, TILES_N>& state, const Queries<D, TILES_N>& queries,
                         const Scoring<SOFTCAP>& scoring, const Visible& visible,
                         const DenseTokens<C>& tokens, int first_token, int first_row, int lane) {
  constexpr int G = D / 32, CHUNK = 4;  // groups whose loads are under way together
  const int g = lane >> 2, j = lane & 3, count = tokens.count();

  Words4 keys[2][CHUNK];
  Words2 values[4][CHUNK];
  auto load_keys = [&](int from) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int token = first_token + 8 * i + g;
#pragma unroll
      for (int c = 0; c < CHUNK; c++) {
        keys[i][c] = Words4{};
        if (from + c < G && token < count)
          keys[i][c] = stream16(tokens.template key<D>(token) + (from + c) * 32 + 8 * j);
      }
    }
  };
  auto load_values = [&](int from) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = first_token + 8 * (i >> 1) + 2 * j + (i & 1);
#pragma unroll
      for (int c = 0; c < CHUNK; c++) {
        values[i][c] = Words2{};
        if (from + c < G && token < count)
          values[i][c] = stream8(tokens.template value<D>(token) + (from + c) * 32 + 4 * g);
      }
    }
  };

  float sums[TILES_N][2][4];
#pragma unroll
  for (int n = 0; n < TILES_N; n++)
#pragma unroll
    for (int c = 0; c < 4; c++) sums[n][0][c] = sums[n][1][c] = 0.f;

  load_keys(0);
  load_values(0);
#pragma unroll
  for (int from = 0; from < G; from += CHUNK) {
    if (from > 0) load_keys(from);
#pragma unroll
    for (int c = 0; c < CHUNK; c++) {
      if (from + c >= G) break;
      const Words4 a = pair_channels<C>(keys[0][c]), b = pair_channels<C>(keys[1][c]);
#pragma unroll
      for (int n = 0; n < TILES_N; n++) {
        const Words4 q = queries.get(n, from + c, lane);
        mma(sums[n][0], a.w[0], b.w[0], a.w[1], b.w[1], q.w[0], q.w[1]);
        mma(sums[n][1], a.w[2], b.w[2], a.w[3], b.w[3], q.w[2], q.w[3]);
      }
    }
  }

  u32 weights[TILES_N][2];
#pragma unroll
  for (int n = 0; n < TILES_N; n++) {
    float scores[1][4];
#pragma unroll
    for (int c = 0; c < 4; c++) scores[0][c] = sums[n][0][c] + sums[n][1][c];
    score_tokens(state, n, scoring, scores[0]);
    mask_tokens(scores[0], visible, first_row + 8 * n, lane, [&](int i) {
      const int token = first_token + 8 * i + g;
      return token < count ? tokens.position(token) : -1;
    });
    softmax_step<1>(state, n, scores, weights[n]);
    mma(state.mids[n][0], 0u, 0x3c003c00u, 0u, 0x3c003c00u, weights[n][0], weights[n][1]);
  }

#pragma unroll
  for (int from = 0; from < G; from += CHUNK) {
    if (from > 0) load_values(from);
#pragma unroll
    for (int c = 0; c < CHUNK; c++) {
      if (from + c >= G) break;
      u32 a[2][4];  // [tokens 8i+2j and the next][channel 4g + p]
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const Words2 even = values[2 * i][c], odd = values[2 * i + 1][c];
        a[i][0] = as_half2<C>(low_halves(even.w[0], odd.w[0]));
        a[i][1] = as_half2<C>(high_halves(even.w[0], odd.w[0]));
        a[i][2] = as_half2<C>(low_halves(even.w[1], odd.w[1]));
        a[i][3] = as_half2<C>(high_halves(even.w[1], odd.w[1]));
      }
#pragma unroll
      for (int n = 0; n < TILES_N; n++) {
        mma(state.out[n][2 * (from + c)], a[0][0], a[0][1], a[1][0], a[1][1], weights[n][0],
            weights[n][1]);
        mma(state.out[n][2 * (from + c) + 1], a[0][2], a[0][3], a[1][2], a[1][3], weights[n][0],
            weights[n][1]);
      }
    }
  }
}

// A warp's state in shared memory: rows of D floats, then each row's maximum and sum of weights.
template <int D, int TILES_N>
struct SharedState {
  static constexpr int ROWS = 8 * TILES_N, ROW_FLOATS = D + 8;
  static constexpr int BYTES = ROWS * (ROW_FLOATS + 2) * 4;

  static DEVICE float* row(unsigned char* at, int r) {
    return reinterpret_cast<float*>(at) + r * ROW_FLOATS;
  }
  static DEVICE float* totals(unsigned char* at, int r) {
    return reinterpret_cast<float*>(at) + ROWS * ROW_FLOATS + 2 * r;
  }

  static DEVICE void put(unsigned char* at, const AttentionState<D, TILES_N>& state, int lane) {
    const int g = lane >> 2, j = lane & 3;
#pragma unroll
    for (int n = 0; n < TILES_N; n++) {
#pragma unroll
      for (int group = 0; group < D / 32; group++) {
        const float* mids = state.mids[n][group / 8];
        const float(&low)[4] = state.out[n][2 * group];
        const float(&high)[4] = state.out[n][2 * group + 1];
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const float mid = __shfl_sync(ALL_LANES, mids[c], (group % 8) * 4 + j);
          *reinterpret_cast<Floats4*>(row(at, 8 * n + 2 * j + c) + group * 32 + g * 4) = {
              low[c] + mid, low[c + 2] + mid, high[c] + mid, high[c + 2] + mid};
        }
      }
      if (g == 0) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
          float* t = totals(at, 8 * n + 2 * j + c);
          t[0] = state.top[n][c];
          t[1] = state.mids[n][0][c + 2];
        }
      }
    }
  }
};

template <int BITS, int D, int TILES_N, int WARPS, int STAGES>
struct AttentionMemory {
  static constexpr int TILE_BYTES = 8 * (BITS + 1) * D, RING_BYTES = STAGES * TILE_BYTES;
  static constexpr int BARRIERS = WARPS * RING_BYTES;
  static constexpr int QUERIES = BARRIERS + WARPS * STAGES * 8;
  static constexpr int BYTES = QUERIES + (D > 256 ? TILES_N * D * 16 : 0);
  static_assert(SharedState<D, TILES_N>::BYTES <= RING_BYTES);
  static_assert(QUERIES % 16 == 0);
};

// First pass. Grid (splits, KV heads, groups of 8 * TILES_N rows), WARPS warps.
// partial: per query row and split D floats, then per row and split the maximum and the sum.
// new_k, new_v (KV heads, query tokens, D): where given, they are the newest of the tokens that
// `lengths` counts, and are written to the tail, which does not hold them yet.
template <int BITS, int D, int TILES_N, int WARPS, int STAGES, bool SOFTCAP, class T, class C>
DEVICE void attend(unsigned char* memory, const T* q, const u32* tiles, const C* sink_k,
                   const C* sink_v, C* tail_k, C* tail_v, const C* new_k, const C* new_v,
                   const int* lengths, const float* options, float* partial, AttentionShape shape,
                   int sink_capacity, int tail_capacity) {
  using Memory = AttentionMemory<BITS, D, TILES_N, WARPS, STAGES>;
  using Shared = SharedState<D, TILES_N>;
  constexpr int G = D / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, j = lane & 3;
  const u32 split = blockIdx.x, splits = gridDim.x;
  const int head = blockIdx.y;
  const int first_row = blockIdx.z * 8 * TILES_N;

  // The queries' loads go first: behind the tiles' they would wait for them.
  Queries<D, TILES_N> queries;
  auto load_query = [&](int n, int group) {
    const int row = first_row + 8 * n + g;
    return row < shape.rows
               ? stream16(q + (size_t(head) * shape.rows + row) * D + group * 32 + 8 * j)
               : Words4{};
  };
  auto scale_query = [&](Words4 raw) {
    Words4 pairs;
#pragma unroll
    for (int p = 0; p < 4; p++) {
      const u32 a = p < 2 ? raw.w[0] : raw.w[1], b = p < 2 ? raw.w[2] : raw.w[3];
      const u32 pair = p & 1 ? high_halves(a, b) : low_halves(a, b);
      if constexpr (Is16<T>::half) {
        pairs.w[p] = mul2(pair, 0x30003000u);  // QUERY_SCALE
      } else {
        pairs.w[p] =
            pack_half2(low_float<T>(pair) * QUERY_SCALE, high_float<T>(pair) * QUERY_SCALE);
      }
    }
    return pairs;
  };
  if constexpr (!Queries<D, TILES_N>::SHARED) {
#pragma unroll
    for (int n = 0; n < TILES_N; n++)
#pragma unroll
      for (int group = 0; group < G; group++) queries.held[n][group] = load_query(n, group);
  }

  const int n_sink = lengths[0], n_blocks = lengths[1], n_tail = lengths[2];
  const int length = n_sink + BLOCK_TOKENS * n_blocks + n_tail;
  const int window = int(options[2]);
  const Visible visible{shape.tokens, length - 1, window};
  const Scoring<SOFTCAP> scoring(options[0], options[1]);

  const int oldest = length - shape.tokens - window + 1;  // that any query row sees
  const int skipped = min(max(oldest - n_sink, 0) / BLOCK_TOKENS, n_blocks);
  const int n_new = new_k == nullptr ? 0 : shape.tokens;
  const DenseTokens<C> dense{sink_k + size_t(head) * sink_capacity * D,
                             sink_v + size_t(head) * sink_capacity * D,
                             tail_k + size_t(head) * tail_capacity * D,
                             tail_v + size_t(head) * tail_capacity * D,
                             new_k + size_t(head) * n_new * D,
                             new_v + size_t(head) * n_new * D,
                             n_sink,
                             n_tail - n_new,
                             n_new,
                             n_sink + BLOCK_TOKENS * n_blocks};
  const int n_dense = (dense.count() + DENSE_TOKENS - 1) / DENSE_TOKENS;

  // This block's share: dense blocks come first and count as DENSE_COST tiles each.
  const u32 units = n_blocks - skipped + DENSE_COST * n_dense;
  const int from = split * units / splits, to = (split + 1) * units / splits;
  const int dense_from = min((from + DENSE_COST - 1) / DENSE_COST, n_dense);
  const int dense_to = min((to + DENSE_COST - 1) / DENSE_COST, n_dense);
  const int tile_from = skipped + max(from - DENSE_COST * n_dense, 0);
  const int tile_to = skipped + max(to - DENSE_COST * n_dense, 0);
  // The warps left without a dense block take the first tiles.
  const int first_tile = tile_from + (warp + 2 * WARPS - (dense_to - dense_from) % WARPS) % WARPS;
  const int n_tiles = max(tile_to - first_tile + WARPS - 1, 0) / WARPS;

  unsigned char* ring_memory = memory + warp * Memory::RING_BYTES;
  Ring<STAGES, Memory::TILE_BYTES> ring(ring_memory, memory + Memory::BARRIERS + warp * STAGES * 8,
                                        lane);
  const char* head_tiles =
      reinterpret_cast<const char*>(tiles) + size_t(head) * shape.capacity * Memory::TILE_BYTES;
  auto tile_address = [&](int i) {
    return head_tiles + size_t(first_tile + i * WARPS) * Memory::TILE_BYTES;
  };
#pragma unroll
  for (int i = 0; i < STAGES; i++) ring.fill(i, tile_address(i), i < n_tiles);

  if constexpr (Queries<D, TILES_N>::SHARED) {
    Words4* held = reinterpret_cast<Words4*>(memory + Memory::QUERIES);
    for (int i = warp; i < TILES_N * G; i += WARPS)
      held[i * 32 + lane] = scale_query(load_query(i / G, i % G));
    __syncthreads();
    queries.shared = held;
  } else {
#pragma unroll
    for (int n = 0; n < TILES_N; n++)
#pragma unroll
      for (int group = 0; group < G; group++)
        queries.held[n][group] = scale_query(queries.held[n][group]);
  }

  AttentionState<D, TILES_N> state;
  state.clear();
  for (int i = dense_from + warp; i < dense_to; i += WARPS)
    attend_dense(state, queries, scoring, visible, dense, i * DENSE_TOKENS, first_row, lane);
  for (int i = 0; i < n_tiles; i++) {
    ring.wait();
    attend_tile<BITS>(state, queries, scoring, visible,
                      ring_memory + ring.stage * Memory::TILE_BYTES,
                      n_sink + BLOCK_TOKENS * (first_tile + i * WARPS), first_row, lane,
                      [&] { ring.release(tile_address(i + STAGES), i + STAGES < n_tiles); });
    ring.advance();
  }

  if (split == splits - 1 && blockIdx.z == 0) {
    const size_t to = (size_t(head) * tail_capacity + dense.n_tail) * D;
    for (int i = threadIdx.x; i < n_new * D; i += WARPS * 32) {
      tail_k[to + i] = dense.new_k[i];
      tail_v[to + i] = dense.new_v[i];
    }
  }

  Shared::put(ring_memory, state, lane);
  __syncthreads();

  const int n_rows = min(shape.rows - first_row, Shared::ROWS);
  float* totals = partial + size_t(gridDim.y) * shape.rows * splits * D;
  for (int i = threadIdx.x; i < n_rows * (D / 4); i += WARPS * 32) {
    const int r = i / (D / 4), channel = i % (D / 4) * 4;
    float top = NONE, sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      top = fmaxf(top, Shared::totals(memory + w * Memory::RING_BYTES, r)[0]);
    Floats4 out = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      unsigned char* at = memory + w * Memory::RING_BYTES;
      const float weight = exp2_fast(Shared::totals(at, r)[0] - top);
      const Floats4 v = *reinterpret_cast<const Floats4*>(Shared::row(at, r) + channel);
      sum += weight * Shared::totals(at, r)[1];
      out.x += weight * v.x;
      out.y += weight * v.y;
      out.z += weight * v.z;
      out.w += weight * v.w;
    }
    const size_t at = (size_t(head) * shape.rows + first_row + r) * splits + split;
    *reinterpret_cast<Floats4*>(partial + at * D + channel) = out;
    if (channel == 0) {
      totals[2 * at] = top;
      totals[2 * at + 1] = sum;
    }
  }
}

// Second pass: a block of WARPS warps per query row. A sink is a logit that joins the softmax.
template <int D, int WARPS, bool SINKS, class T, class S>
DEVICE void merge_splits(const float* partial, int rows, int splits, int tokens, const S* sinks,
                         T* out) {
  constexpr int QUADS = (D + 127) / 128, AHEAD = 4;
  __shared__ alignas(16) float merged[WARPS][D];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = blockIdx.x;
  const float* values = partial + size_t(row) * splits * D;
  const float* totals = partial + (size_t(rows) * D + 2 * row) * splits;

  Floats4 ahead[AHEAD][QUADS];
#pragma unroll
  for (int a = 0; a < AHEAD; a++)
#pragma unroll
    for (int k = 0; k < QUADS; k++) {
      const int i = warp + a * WARPS, channel = (k * 32 + lane) * 4;
      ahead[a][k] = i < splits && channel < D
                        ? *reinterpret_cast<const Floats4*>(values + size_t(i) * D + channel)
                        : Floats4{0.f, 0.f, 0.f, 0.f};
    }

  // Lane i keeps split i's maximum and sum; those past 32 are read again.
  const float own_top = lane < splits ? totals[2 * lane] : NONE;
  const float own_sum = lane < splits ? totals[2 * lane + 1] : 0.f;
  float top = own_top;
  for (int i = lane + 32; i < splits; i += 32) top = fmaxf(top, totals[2 * i]);
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, distance));
  float sink = NONE;
  if constexpr (SINKS) {
    sink = float(sinks[row / tokens]) * LOG2E;
    top = fmaxf(top, sink);
  }
  const float own_weight = exp2_fast(own_top - top);
  float sum = own_weight * own_sum;
  for (int i = lane + 32; i < splits; i += 32)
    sum += exp2_fast(totals[2 * i] - top) * totals[2 * i + 1];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
    sum += __shfl_xor_sync(ALL_LANES, sum, distance);
  if constexpr (SINKS) sum += exp2_fast(sink - top);

  Floats4 acc[QUADS];
#pragma unroll
  for (int k = 0; k < QUADS; k++) acc[k] = {0.f, 0.f, 0.f, 0.f};
  auto add = [&](int i, const Floats4(&v)[QUADS]) {
    const float weight = i < 32 ? __shfl_sync(ALL_LANES, own_weight, i)
                                : exp2_fast(totals[2 * i] - top);
#pragma unroll
    for (int k = 0; k < QUADS; k++) {
      acc[k].x += weight * v[k].x;
      acc[k].y += weight * v[k].y;
      acc[k].z += weight * v[k].z;
      acc[k].w += weight * v[k].w;
    }
  };
#pragma unroll
  for (int a = 0; a < AHEAD; a++)
    if (warp + a * WARPS < splits) add(warp + a * WARPS, ahead[a]);
  for (int i = warp + AHEAD * WARPS; i < splits; i += WARPS) {
    Floats4 v[QUADS];
#pragma unroll
    for (int k = 0; k < QUADS; k++) {
      const int channel = (k * 32 + lane) * 4;
      v[k] = channel < D ? *reinterpret_cast<const Floats4*>(values + size_t(i) * D + channel)
                         : Floats4{0.f, 0.f, 0.f, 0.f};
    }
    add(i, v);
  }
#pragma unroll
  for (int k = 0; k < QUADS; k++)
    if ((k * 32 + lane) * 4 < D)
      *reinterpret_cast<Floats4*>(&merged[warp][(k * 32 + lane) * 4]) = acc[k];
  __syncthreads();

  for (int pair = threadIdx.x; pair < D / 2; pair += WARPS * 32) {
    float low = 0.f, high = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      low += merged[w][2 * pair];
      high += merged[w][2 * pair + 1];
    }
    reinterpret_cast<u32*>(out)[size_t(row) * (D / 2) + pair] = pack2<T>(low / sum, high / sum);
  }
}

}  // namespace tq
