// Products of 1 to 8 rows of activations with an int4 or int8 affine matrix in MLX's layout.
//
// The matrix is read once, in order, at the speed of memory: a block of threads takes 16 outputs
// (matrix rows) at a time, whose words lie side by side, and each of its warps a slice of SLICE
// nibbles of them, through a ring of asynchronous copies of its own. A warp keeps its slice of the
// activations in registers, so a long matrix costs no further reads of them.
//
// Codes are the tensor core's wide side and the activations its narrow side of 8. Int8 codes go
// through as two nibbles. Every group of inputs has its sum of codes times activations, which is
// scaled in fp32; the groups' biases times sums of activations are one more product.
#pragma once

#include "warp.cuh"

namespace tq {

constexpr int SLICE = 512;               // nibbles
constexpr int SLICE_BYTES = SLICE / 2;   // of one matrix row
constexpr int MATRIX_TILE = 16;          // matrix rows

// Nibbles of a word to four pairs (nibble p, nibble p + 4) in T; with BITS 8 the pairs 1 and 3 are
// upper nibbles, 16 times their worth in fp16 and bare in bf16 (see `pair_activations`).
template <class T, int BITS>
DEVICE void unpack_codes(u32 word, u32 (&pairs)[4]) {
  if constexpr (Is16<T>::bfloat) {
    // 0x4300 is 128 in bf16, whose lowest mantissa bit is worth 1; 0xc300 is -128.
#pragma unroll
    for (int p = 0; p < 4; p++)
      pairs[p] = fma2_bf16(and_or(word >> (4 * p), 0x000f000fu, 0x43004300u), 0x3f803f80u,
                           0xc300c300u);
  } else if constexpr (BITS == 4) {
    unpack_nibbles<0>(word, pairs);
  } else {
    constexpr u32 exponent = 0x64006400u, offset = 0xe400e400u;
    const u32 upper = word >> 8;
    pairs[0] = add2(and_or(word, 0x000f000fu, exponent), offset);
    pairs[1] = add2(and_or(word, 0x00f000f0u, exponent), offset);
    pairs[2] = add2(and_or(upper, 0x000f000fu, exponent), offset);
    pairs[3] = add2(and_or(upper, 0x00f000f0u, exponent), offset);
  }
}

// The activations of one word's nibbles as `unpack_codes` pairs them; adds their sum to `sum`.
template <class T, int BITS>
DEVICE void pair_activations(const T* x, bool there, u32 (&pairs)[4], float& sum) {
  if constexpr (BITS == 4) {
    const Words4 row = there ? load16(x) : Words4{};
    pairs[0] = low_halves(row.w[0], row.w[2]);
    pairs[1] = high_halves(row.w[0], row.w[2]);
    pairs[2] = low_halves(row.w[1], row.w[3]);
    pairs[3] = high_halves(row.w[1], row.w[3]);
#pragma unroll
    for (int p = 0; p < 4; p++) sum += low_float<T>(pairs[p]) + high_float<T>(pairs[p]);
  } else {
    const Words2 row = there ? load8(x) : Words2{};
    pairs[0] = low_halves(row.w[0], row.w[1]);
    pairs[2] = high_halves(row.w[0], row.w[1]);
    sum += low_float<T>(pairs[0]) + high_float<T>(pairs[0]);
    sum += low_float<T>(pairs[2]) + high_float<T>(pairs[2]);
    constexpr u32 sixteen = 0x41804180u, none = 0x80008000u;  // bf16; -0
    pairs[1] = Is16<T>::bfloat ? fma2_bf16(pairs[0], sixteen, none) : pairs[0];
    pairs[3] = Is16<T>::bfloat ? fma2_bf16(pairs[2], sixteen, none) : pairs[2];
  }
}

template <int N>
DEVICE void load_words(const void* from, u32 (&to)[N]) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const Words4 v = load16(static_cast<const u32*>(from) + i);
#pragma unroll
      for (int k = 0; k < 4; k++) to[i + k] = v.w[k];
    }
  } else {
    const u32* words = static_cast<const u32*>(from);
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = words[i];
  }
}

template <int BITS, int GROUP, int WARPS, int STAGES>
struct MatvecMemory {
  static constexpr int GROUPS = SLICE * 4 / BITS / GROUP;  // in a slice
  static constexpr int PARAMETER_BYTES = MATRIX_TILE * GROUPS * 2;
  static constexpr int STAGE_BYTES = MATRIX_TILE * SLICE_BYTES + 2 * PARAMETER_BYTES;
  static constexpr int SUMS = WARPS * STAGES * STAGE_BYTES;
  static constexpr int BYTES = SUMS + WARPS * MATRIX_TILE * 8 * 4;
};

// y (m, rows) = x (m, columns) times the matrix's transpose, m at most 8.
// A block takes TILES tiles of 16 outputs at a time; TILES is 1 unless a warp has several slices.
// COPY: bytes in which scales and biases, rows of columns / GROUP, are aligned (16, 8 or 4).
template <int BITS, int GROUP, int WARPS, int STAGES, int TILES, int COPY, class T, class Y>
DEVICE void matvec(unsigned char* memory, const T* x, const u32* codes, const T* scales,
                   const T* biases, Y* y, int m, int rows, int columns) {
  using Memory = MatvecMemory<BITS, GROUP, WARPS, STAGES>;
  constexpr int GROUPS = Memory::GROUPS, CHUNKS = SLICE / 64;
  constexpr int CHANNELS = SLICE * 4 / BITS;          // in a slice
  constexpr int NIBBLES = GROUP * BITS / 4;           // in a group
  constexpr bool NARROW = NIBBLES == 32;              // a group is one word per lane, else two
  constexpr int WORD_CHANNELS = 32 / BITS;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, j = lane & 3;

  const int n_tiles = (rows + MATRIX_TILE - 1) / MATRIX_TILE;
  const int n_slices = (columns + CHANNELS - 1) / CHANNELS;
  const int passes = (n_slices - warp + WARPS - 1) / WARPS;  // slices of this warp
  const size_t row_bytes = size_t(columns) * BITS / 8;
  const size_t row_groups = columns / GROUP;

  // A walk over what this warp computes: for TILES tiles at a time, its slices, then the tiles.
  struct Walk {
    int base, pass, i;
  };
  auto in_batch = [&](int base) {
    return min((n_tiles - base + int(gridDim.x) - 1) / int(gridDim.x), TILES);
  };
  auto step = [&](Walk& at) {
    if (++at.i < in_batch(at.base)) return;
    at.i = 0;
    if (++at.pass < passes) return;
    at.pass = 0;
    at.base += TILES * gridDim.x;
  };

  unsigned char* ring = memory + warp * STAGES * Memory::STAGE_BYTES;
  const u32 ring_address = shared_address(ring);
  // 16-byte pieces are placed so that the reads below meet no bank twice.
  auto swizzle = [](int row, int piece) { return piece ^ (NARROW ? row & 7 : (row & 3) * 2); };

  auto fill = [&](const Walk& at, int stage) {
    if (passes > 0 && at.base < n_tiles) {
      const u32 to = ring_address + stage * Memory::STAGE_BYTES;
      const int first_row = (at.base + at.i * int(gridDim.x)) * MATRIX_TILE;
      const int slice = at.pass * WARPS + warp;
      const char* from = reinterpret_cast<const char*>(codes);
#pragma unroll
      for (int n = 0; n < MATRIX_TILE / 2; n++) {
        const int row = 2 * n + (lane >> 4), piece = lane & 15;
        const int at_byte = slice * SLICE_BYTES + piece * 16;
        const bool there = first_row + row < rows && at_byte < row_bytes;
        copy_async<16>(to + row * SLICE_BYTES + swizzle(row, piece) * 16,
                       there ? from + size_t(first_row + row) * row_bytes + at_byte : from, there);
      }
      constexpr int PIECES = GROUPS * 2 / COPY;  // of one row's parameters
#pragma unroll
      for (int n = 0; n < 2 * MATRIX_TILE * PIECES; n += 32) {
        const int piece = (n + lane) % PIECES, row = (n + lane) / PIECES % MATRIX_TILE;
        const bool is_bias = n + lane >= MATRIX_TILE * PIECES;
        const int group = slice * GROUPS + piece * (COPY / 2);
        const bool there =
            n + lane < 2 * MATRIX_TILE * PIECES && first_row + row < rows && group < row_groups;
        const T* parameters = is_bias ? biases : scales;
        if (n + lane < 2 * MATRIX_TILE * PIECES)
          copy_async<COPY>(
              to + MATRIX_TILE * SLICE_BYTES + (n + lane) * COPY,
              there ? parameters + size_t(first_row + row) * row_groups + group : parameters,
              there);
      }
    }
    copies_commit();
  };

  // This warp's activations: B operands, and the sums of each group as two summands of 16 bits.
  u32 held[CHUNKS][2][4], sum_high[2], sum_low[2];
  auto load_activations = [&](int slice) {
    float sums[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; i++) sums[i] = 0.f;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
      for (int u = 0; u < 2; u++) {
        const int word = chunk * 8 + (NARROW ? u * 4 + j : j * 2 + u);
        const int channel = slice * CHANNELS + word * WORD_CHANNELS;
        pair_activations<T, BITS>(x + size_t(g) * columns + channel, g < m && channel < columns,
                                  held[chunk][u], sums[(chunk * 64 + u * 32) / NIBBLES]);
      }
    u32 high[8], low[8];  // [pair of groups]
#pragma unroll
    for (int i = 0; i < 8; i++) high[i] = low[i] = 0u;
#pragma unroll
    for (int i = 0; i < GROUPS; i += 2) {
      float rest[2];
#pragma unroll
      for (int k = 0; k < 2; k++) {
        float& sum = sums[i + k];
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
      }
      high[i / 2] = pack2<T>(sums[i], sums[i + 1]);
      rest[0] = sums[i] - low_float<T>(high[i / 2]);
      rest[1] = sums[i + 1] - high_float<T>(high[i / 2]);
      low[i / 2] = pack2<T>(rest[0], rest[1]);
    }
    // Lane j holds groups 2j 2j+1 (and 2j+8 2j+9), the rows of B.
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int at = 4 * half;
      sum_high[half] = j == 0 ? high[at] : j == 1 ? high[at + 1] : j == 2 ? high[at + 2] : high[at + 3];
      sum_low[half] = j == 0 ? low[at] : j == 1 ? low[at + 1] : j == 2 ? low[at + 2] : low[at + 3];
    }
  };

  auto multiply = [&](const unsigned char* stage, float(&acc)[4]) {
    const unsigned char* scales = stage + MATRIX_TILE * SLICE_BYTES;
    const unsigned char* biases = scales + Memory::PARAMETER_BYTES;

    // Biases: rows g and g + 8, groups 2j 2j+1 (and 2j+8 2j+9), of those that the slice has.
    auto bias_pair = [&](int row, int pair) {
      return *reinterpret_cast<const u32*>(biases + (row * GROUPS + 2 * (pair % (GROUPS / 2))) * 2);
    };
    {
      const u32 top = bias_pair(g, j), bottom = bias_pair(g + 8, j);
      if constexpr (GROUPS == 16) {
        const u32 top2 = bias_pair(g, j + 4), bottom2 = bias_pair(g + 8, j + 4);
        mma<T>(acc, top, bottom, top2, bottom2, sum_high[0], sum_high[1]);
        mma<T>(acc, top, bottom, top2, bottom2, sum_low[0], sum_low[1]);
      } else {
        mma<T>(acc, top, bottom, top, bottom, sum_high[0], sum_low[0]);
      }
    }

    u32 top_scales[GROUPS / 2], bottom_scales[GROUPS / 2];
    load_words(scales + g * GROUPS * 2, top_scales);
    load_words(scales + (g + 8) * GROUPS * 2, bottom_scales);
    auto scale_of = [](const u32(&pairs)[GROUPS / 2], int group) {
      return group % 2 ? high_float<T>(pairs[group / 2]) : low_float<T>(pairs[group / 2]);
    };
    float sums[4];
    auto start = [&] { sums[0] = sums[1] = sums[2] = sums[3] = 0.f; };
    auto finish = [&](int group) {
      const float top = scale_of(top_scales, group), bottom = scale_of(bottom_scales, group);
      acc[0] = fmaf(top, sums[0], acc[0]);
      acc[1] = fmaf(top, sums[1], acc[1]);
      acc[2] = fmaf(bottom, sums[2], acc[2]);
      acc[3] = fmaf(bottom, sums[3], acc[3]);
    };
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      u32 top[2], bottom[2];
      if constexpr (NARROW) {
#pragma unroll
        for (int u = 0; u < 2; u++) {
          const int at = swizzle(g, 2 * chunk + u) * 16 + j * 4;
          top[u] = *reinterpret_cast<const u32*>(stage + g * SLICE_BYTES + at);
          bottom[u] = *reinterpret_cast<const u32*>(stage + (g + 8) * SLICE_BYTES + at);
        }
      } else {
        const int at = swizzle(g, 2 * chunk + (j >> 1)) * 16 + (j & 1) * 8;
        const Words2 a = load8(stage + g * SLICE_BYTES + at);
        const Words2 b = load8(stage + (g + 8) * SLICE_BYTES + at);
        top[0] = a.w[0], top[1] = a.w[1];
        bottom[0] = b.w[0], bottom[1] = b.w[1];
      }
#pragma unroll
      for (int u = 0; u < 2; u++) {
        const int nibble = chunk * 64 + u * 32;
        if (nibble % NIBBLES == 0) start();
        u32 a[4], b[4];
        unpack_codes<T, BITS>(top[u], a);
        unpack_codes<T, BITS>(bottom[u], b);
        const u32(&q)[4] = held[chunk][u];
        mma<T>(sums, a[0], b[0], a[1], b[1], q[0], q[1]);
        mma<T>(sums, a[2], b[2], a[3], b[3], q[2], q[3]);
        if ((nibble + 32) % NIBBLES == 0) finish(nibble / NIBBLES);
      }
    }
  };

  Walk ahead{int(blockIdx.x), 0, 0};
#pragma unroll
  for (int i = 0; i < STAGES; i++) {
    fill(ahead, i);
    step(ahead);
  }
  if (passes == 1) load_activations(warp);

  float* sums = reinterpret_cast<float*>(memory + Memory::SUMS);
  int stage = 0;
  for (int base = blockIdx.x; base < n_tiles; base += TILES * gridDim.x) {
    const int batch = in_batch(base);
    float acc[TILES][4];
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int c = 0; c < 4; c++) acc[i][c] = 0.f;
    for (int pass = 0; pass < passes; pass++) {
      if (passes > 1) load_activations(pass * WARPS + warp);
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        if (i >= batch) break;
        copies_wait<STAGES - 1>();
        __syncwarp();
        multiply(ring + stage * Memory::STAGE_BYTES, acc[i]);
        __syncwarp();
        fill(ahead, stage);
        step(ahead);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
      }
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      if (i >= batch) break;
      __syncthreads();  // the last sums are read
#pragma unroll
      for (int half = 0; half < 2; half++)
        *reinterpret_cast<float2*>(sums + (warp * MATRIX_TILE + g + 8 * half) * 8 + 2 * j) =
            make_float2(acc[i][2 * half], acc[i][2 * half + 1]);
      __syncthreads();
      for (int at = threadIdx.x; at < MATRIX_TILE * m; at += WARPS * 32) {
        const int r = at % MATRIX_TILE, column = at / MATRIX_TILE;
        const int row = (base + i * int(gridDim.x)) * MATRIX_TILE + r;
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += sums[(w * MATRIX_TILE + r) * 8 + column];
        if (row < rows) y[size_t(column) * rows + row] = Y(sum);
      }
    }
  }
}

}  // namespace tq
