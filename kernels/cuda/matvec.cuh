// Products of 1 to 8 rows of activations with an int4 or int8 affine matrix in MLX's layout.
//
// The matrix is read once, in order, at the speed of memory: a block of threads takes 16 outputs
// (matrix rows) at a time, whose words lie side by side, and each of its warps a slice of SLICE
// nibbles of them, through a ring of asynchronous copies of its own. A warp keeps its slice of the
// activations in registers, so a long matrix costs no further reads of them.
//
// Codes are the tensor core's wide side and the activations its narrow side of 8. Where there are
// fewer than 8 rows of activations the rest of that side holds further slices: a warp with 4 rows
// keeps 2 slices, with one row 8, and of each product takes the columns of the slice that it was
// made with.
//
// Every group of inputs has its own sum of codes times activations, times the group's scale in fp32;
// the groups' biases times their sums of activations are one more product. Int8 codes go through
// as two nibbles.
//
// What runs once is kept short: a kernel's instructions are read from memory as well.
#pragma once

#include "warp.cuh"

namespace tq {

constexpr int SLICE = 512;              // nibbles
constexpr int SLICE_BYTES = SLICE / 2;  // of one matrix row
constexpr int MATRIX_TILE = 16;         // matrix rows
// Sums of a group's activations are held times this, lest they overflow fp16.
constexpr float SUM_SCALE = 0.125f;

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

// The activations of one word's nibbles, as they lie: 16 bytes, or 8 where BITS is 8.
template <int BITS, class T>
DEVICE void load_activations(const T* x, bool there, u32 (&raw)[4]) {
  if constexpr (BITS == 4) {
    const Words4 row = there ? stream16(x) : Words4{};
#pragma unroll
    for (int i = 0; i < 4; i++) raw[i] = row.w[i];
  } else {
    const Words2 row = there ? stream8(x) : Words2{};
    raw[0] = row.w[0];
    raw[1] = row.w[1];
  }
}

// ... in pairs as `unpack_codes` gives the codes.
template <int BITS, class T>
DEVICE void pair_activations(u32 (&raw)[4]) {
  const u32 even = low_halves(raw[0], raw[BITS == 4 ? 2 : 1]);
  const u32 odd = high_halves(raw[0], raw[BITS == 4 ? 2 : 1]);
  if constexpr (BITS == 4) {
    raw[2] = low_halves(raw[1], raw[3]);
    raw[3] = high_halves(raw[1], raw[3]);
    raw[0] = even;
    raw[1] = odd;
  } else {
    constexpr u32 sixteen = 0x41804180u, none = 0x80008000u;  // bf16; -0
    raw[0] = even;
    raw[1] = Is16<T>::bfloat ? fma2_bf16(even, sixteen, none) : even;
    raw[2] = odd;
    raw[3] = Is16<T>::bfloat ? fma2_bf16(odd, sixteen, none) : odd;
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
// A block takes TILES tiles of 16 outputs at a time: 1 where a warp can keep all its slices of the
// activations, more where it reads them again and again.
// COPY: bytes in which scales and biases, rows of columns / GROUP, are aligned (16, 8 or 4).
template <int BITS, int GROUP, int WARPS, int STAGES, int TILES, int COPY, class T, class Y>
DEVICE void matvec(unsigned char* memory, const T* x, const u32* codes, const T* scales,
                   const T* biases, Y* y, int m, int rows, int columns) {
  using Memory = MatvecMemory<BITS, GROUP, WARPS, STAGES>;
  constexpr int GROUPS = Memory::GROUPS, CHUNKS = SLICE / 64;
  constexpr int CHANNELS = SLICE * 4 / BITS;  // in a slice
  constexpr int NIBBLES = GROUP * BITS / 4;   // in a group
  constexpr bool NARROW = NIBBLES == 32;      // a group is one word per lane, else two
  constexpr int WORD_CHANNELS = 32 / BITS;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, j = lane & 3;

  const int n_tiles = (rows + MATRIX_TILE - 1) / MATRIX_TILE;
  const int n_slices = (columns + CHANNELS - 1) / CHANNELS;
  const int mine = (n_slices - warp + WARPS - 1) / WARPS;  // slices of this warp
  const size_t row_bytes = size_t(columns) * BITS / 8;
  const size_t row_groups = columns / GROUP;
  // Column 8 / kept * k + r of the narrow side is row r of the activations in slice k of `kept`.
  const int row_bits = m > 4 ? 3 : m > 2 ? 2 : m > 1 ? 1 : 0, kept = 8 >> row_bits;

  // A walk over what this warp computes: TILES tiles at a time; as many slices as it keeps at a
  // time; each tile; each slice.
  struct Walk {
    int base, load, tile, slice;
  };
  auto in_batch = [&](int base) {
    return min((n_tiles - base + int(gridDim.x) - 1) / int(gridDim.x), TILES);
  };
  auto in_load = [&](int load) { return min(mine - load, kept); };
  auto step = [&](Walk& at) {
    if (++at.slice < in_load(at.load)) return;
    at.slice = 0;
    if (++at.tile < in_batch(at.base)) return;
    at.tile = 0;
    at.load += kept;
    if (at.load < mine) return;
    at.load = 0;
    at.base += TILES * gridDim.x;
  };

  unsigned char* ring = memory + warp * STAGES * Memory::STAGE_BYTES;
  const u32 ring_address = shared_address(ring);
  // 16-byte pieces are placed so that the reads below meet no bank twice.
  auto swizzle = [](int row, int piece) { return piece ^ (NARROW ? row & 7 : (row & 3) * 2); };

  constexpr int PIECES = GROUPS * 2 / COPY;  // of one row's scales, and of its biases
  const char* lane_codes =
      reinterpret_cast<const char*>(codes) + (lane >> 4) * row_bytes + (lane & 15) * 16;
  auto fill = [&](const Walk& at, int stage) {
    if (at.base < n_tiles) {
      const int first_row = (at.base + at.tile * int(gridDim.x)) * MATRIX_TILE;
      const int slice = (at.load + at.slice) * WARPS + warp, left = rows - first_row;
      const u32 to = ring_address + stage * Memory::STAGE_BYTES;
      const char* from = lane_codes + first_row * row_bytes + slice * SLICE_BYTES;
      const bool there = slice * SLICE_BYTES + (lane & 15) * 16 < row_bytes;
#pragma unroll
      for (int n = 0; n < MATRIX_TILE / 2; n++) {
        const int row = 2 * n + (lane >> 4);
        copy_async<16>(to + row * SLICE_BYTES + swizzle(row, lane & 15) * 16,
                       from + 2 * n * row_bytes, there && row < left);
      }
#pragma unroll
      for (int n = 0; n < 2 * MATRIX_TILE * PIECES; n += 32) {
        const int piece = (n + lane) % PIECES, row = (n + lane) / PIECES % MATRIX_TILE;
        const T* parameters = n + lane >= MATRIX_TILE * PIECES ? biases : scales;
        const int group = slice * GROUPS + piece * (COPY / 2);
        copy_async<COPY>(to + MATRIX_TILE * SLICE_BYTES + (n + lane) * COPY,
                         parameters + (first_row + row) * row_groups + group,
                         row < left && group < row_groups);
      }
    }
    copies_commit();
  };

  // This warp's activations, factors of the codes, and the sums of each group in two summands.
  constexpr int HALVES = GROUPS > 8 ? 2 : 1;
  u32 held[CHUNKS][2][4], sum_high[HALVES], sum_low[HALVES];
  auto load = [&](int first) {
    const int row = g & ((1 << row_bits) - 1), slice = (first + (g >> row_bits)) * WARPS + warp;
    const T* from = x + size_t(row) * columns;
    const int channel = slice * CHANNELS + (NARROW ? j : 2 * j) * WORD_CHANNELS;
    const int end = row < m ? columns : 0;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
      for (int u = 0; u < 2; u++) {
        const int at = channel + (chunk * 8 + u * (NARROW ? 4 : 1)) * WORD_CHANNELS;
        load_activations<BITS>(from + at, at < end, held[chunk][u]);
      }
  };
  auto prepare = [&] {
    constexpr u32 ones = Is16<T>::bfloat ? 0x3f803f80u : 0x3c003c00u;
    float sums[GROUPS][4];
#pragma unroll
    for (int i = 0; i < GROUPS; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.f;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
      for (int u = 0; u < 2; u++) {
        u32(&q)[4] = held[chunk][u];
        pair_activations<BITS, T>(q);
        // Every row of this product is the sum of the activations; of BITS 8's twins, one counts.
        float(&sum)[4] = sums[(chunk * 64 + u * 32) / NIBBLES];
        mma<T>(sum, ones, ones, BITS == 4 ? ones : 0u, BITS == 4 ? ones : 0u, q[0], q[1]);
        mma<T>(sum, ones, ones, BITS == 4 ? ones : 0u, BITS == 4 ? ones : 0u, q[2], q[3]);
      }
    // Lane 4 g + j has all groups' sums of columns 2j and 2j+1. Row g of a matrix is group g.
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      float even = 0.f, odd = 0.f;
#pragma unroll
      for (int i = 8 * half; i < min(8 * half + 8, GROUPS); i++)
        if (g == i - 8 * half) {
          even = sums[i][0] * SUM_SCALE;
          odd = sums[i][1] * SUM_SCALE;
        }
      const u32 high = pack2<T>(even, odd);
      sum_high[half] = transpose8x8(high);
      sum_low[half] = transpose8x8(pack2<T>(even - low_float<T>(high), odd - high_float<T>(high)));
    }
  };

  // Adds the product of 16 rows of slice `slice` of those kept.
  auto multiply = [&](const unsigned char* stage, int slice, float(&total)[4]) {
    const unsigned char* scales = stage + MATRIX_TILE * SLICE_BYTES;
    const unsigned char* biases = scales + Memory::PARAMETER_BYTES;

    // Biases of rows g and g + 8, groups 2j 2j+1 (and 2j+8 2j+9), of those that the slice has.
    auto bias_pair = [&](int row, int at) {
      const int group = 2 * (at % (GROUPS / 2));
      return *reinterpret_cast<const u32*>(biases + (row * GROUPS + group) * 2);
    };
    float acc[4] = {0.f, 0.f, 0.f, 0.f};
    const u32 top_bias = bias_pair(g, j), bottom_bias = bias_pair(g + 8, j);
    if constexpr (HALVES == 2) {
      const u32 top_bias2 = bias_pair(g, j + 4), bottom_bias2 = bias_pair(g + 8, j + 4);
      mma<T>(acc, top_bias, bottom_bias, top_bias2, bottom_bias2, sum_high[0], sum_high[1]);
      mma<T>(acc, top_bias, bottom_bias, top_bias2, bottom_bias2, sum_low[0], sum_low[1]);
    } else {
      mma<T>(acc, top_bias, bottom_bias, top_bias, bottom_bias, sum_high[0], sum_low[0]);
    }
#pragma unroll
    for (int c = 0; c < 4; c++) acc[c] *= 1.f / SUM_SCALE;

    u32 top_scales[GROUPS / 2], bottom_scales[GROUPS / 2];
    load_words(scales + g * GROUPS * 2, top_scales);
    load_words(scales + (g + 8) * GROUPS * 2, bottom_scales);
    auto scale_of = [](const u32(&pairs)[GROUPS / 2], int group) {
      return group % 2 ? high_float<T>(pairs[group / 2]) : low_float<T>(pairs[group / 2]);
    };
    // Where in a row this lane's words of each chunk lie, but for what the swizzle leaves alone.
    constexpr int PATTERN = NARROW ? 8 : 4;
    const unsigned char* words[PATTERN];
#pragma unroll
    for (int i = 0; i < PATTERN; i++)
      words[i] = stage + g * SLICE_BYTES +
                 (NARROW ? (i ^ g) * 16 + j * 4 : (i ^ (g & 3)) * 32 + j * 8);
    float sums[4];
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      u32 top[2], bottom[2];
      if constexpr (NARROW) {
#pragma unroll
        for (int u = 0; u < 2; u++) {
          const unsigned char* at = words[(2 * chunk + u) % 8] + (2 * chunk + u) / 8 * 128;
          top[u] = *reinterpret_cast<const u32*>(at);
          bottom[u] = *reinterpret_cast<const u32*>(at + 8 * SLICE_BYTES);
        }
      } else {
        const unsigned char* at = words[chunk % 4] + chunk / 4 * 128;
        const Words2 a = load8(at), b = load8(at + 8 * SLICE_BYTES);
        top[0] = a.w[0], top[1] = a.w[1];
        bottom[0] = b.w[0], bottom[1] = b.w[1];
      }
#pragma unroll
      for (int u = 0; u < 2; u++) {
        const int nibble = chunk * 64 + u * 32;
        u32 a[4], b[4];
        unpack_codes<T, BITS>(top[u], a);
        unpack_codes<T, BITS>(bottom[u], b);
        const u32(&q)[4] = held[chunk][u];
        if (nibble % NIBBLES == 0) {
          sums[0] = sums[1] = sums[2] = sums[3] = 0.f;
        }
        mma<T>(sums, a[0], b[0], a[1], b[1], q[0], q[1]);
        mma<T>(sums, a[2], b[2], a[3], b[3], q[2], q[3]);
        if ((nibble + 32) % NIBBLES == 0) {
          const float above = scale_of(top_scales, nibble / NIBBLES);
          const float below = scale_of(bottom_scales, nibble / NIBBLES);
          acc[0] = fmaf(above, sums[0], acc[0]);
          acc[1] = fmaf(above, sums[1], acc[1]);
          acc[2] = fmaf(below, sums[2], acc[2]);
          acc[3] = fmaf(below, sums[3], acc[3]);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const bool own = (2 * j + (c & 1)) >> row_bits == slice;
      total[c] += own ? acc[c] : 0.f;
    }
  };

  // The activations' loads go first: behind the matrix's they would wait for them.
  load(0);
  Walk ahead{int(blockIdx.x), 0, 0, 0};
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) {
    fill(ahead, i);
    step(ahead);
  }
  prepare();

  float* sums = reinterpret_cast<float*>(memory + Memory::SUMS);
  int stage = 0;
  for (int base = blockIdx.x; base < n_tiles; base += TILES * gridDim.x) {
    const int batch = in_batch(base);
    float acc[TILES][4];
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int c = 0; c < 4; c++) acc[i][c] = 0.f;
    for (int first = 0; first < mine; first += kept) {
      if (TILES > 1 && (first > 0 || base > blockIdx.x)) {
        load(first);
        prepare();
      }
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        if (i >= batch) break;
        for (int slice = 0; slice < in_load(first); slice++) {
          copies_wait<STAGES - 1>();
          __syncwarp();
          multiply(ring + stage * Memory::STAGE_BYTES, slice, acc[i]);
          __syncwarp();
          fill(ahead, stage);
          step(ahead);
          stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      if (i >= batch) break;
      // A row's columns of all slices kept are one sum.
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float &even = acc[i][2 * half], &odd = acc[i][2 * half + 1];
        if (row_bits == 0) even += odd;
        if (row_bits <= 1) {
          even += __shfl_xor_sync(ALL_LANES, even, 1);
          odd += __shfl_xor_sync(ALL_LANES, odd, 1);
        }
        if (row_bits <= 2) {
          even += __shfl_xor_sync(ALL_LANES, even, 2);
          odd += __shfl_xor_sync(ALL_LANES, odd, 2);
        }
      }
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
