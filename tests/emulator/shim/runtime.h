// What a translated kernel needs from the machine that runs it: see runtime.cpp.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace msl {

constexpr int kSimdWidth = 32;

// The operations at which all lanes of a simdgroup meet.
enum class Op : uint8_t { none, shuffle, reduce, broadcast, vote, scan, matrix, barrier };

struct Simdgroup;

struct Lane {
  void* stack_pointer;
  char *stack_low, *stack_high;
  Simdgroup* simdgroup;
  uint32_t index;             // in the threadgroup
  uint32_t index_in_simd;
  uint32_t position[3];       // in the threadgroup
  uint32_t grid_position[3];
  uint32_t simd_epoch[2];     // simdgroup barriers passed, for device and threadgroup memory
  uint32_t order;             // place in the order of execution within its simdgroup
  enum State : uint8_t { ready, at_simd_op, at_threadgroup_barrier, finished } state;
  Op op;
  int line, memory;  // of the barrier or operation it waits at
};

struct Simdgroup {
  alignas(64) unsigned char in[kSimdWidth][16];  // what each lane brought to the meeting
  unsigned char out[kSimdWidth][16];             // the same, kept until all have read it
  unsigned char reduced[16];
  float product[8][8];
  bool is_reduced;  // reduced or product, of this meeting, has been computed
  uint32_t id, lanes, arrived;
  Lane* by_index[kSimdWidth];
  Lane* by_order[kSimdWidth];
};

struct Geometry {
  uint32_t grid[3], threadgroup[3], group_position[3], groups[3];
  uint32_t group_size[3];  // of this threadgroup: the last ones may be smaller
  uint32_t simdgroups;
};

extern Lane* lane;  // the lane now running
extern Geometry geometry;
extern int reduction_tree;
extern const void* arguments[64];

void meet(Op op, int line);  // returns when every lane of the simdgroup has called it
void threadgroup_barrier(int memory, int line);
void simdgroup_barrier(int memory, int line);
// Which two elements of an 8 x 8 matrix a lane holds: (row, column) and the next column, as MLX's
// steel kernels have it.
void matrix_place(uint32_t lane, uint32_t& row, uint32_t& column);
// sum += left * right, of matrices of which each lane brings its two elements.
void matrix_multiply_accumulate(const float* left, const float* right, float* sum, int line);
void* threadgroup_variable(const void* key, size_t size, const char* name, int line);

// CUDA's asynchronous copies to threadgroup memory, which take place as late as they may: a lane's
// own when it waits for them, and then they are its writes; a barrier's when the first lane waits
// for it, and then everyone's who waited. Until then what is copied to must not be touched.
void copy_async(void* to, const void* from, size_t size);  // zeros, where from is null
void copies_commit();
void copies_wait(size_t latest);  // all but so many groups
void barrier_init(void* barrier);
void copy_bulk(void* to, const void* from, size_t size, void* barrier);
void barrier_wait(void* barrier, uint32_t parity);
// Addresses of 32 bits.
uint32_t short_address(const void* p);
void* from_short_address(uint32_t address);

}  // namespace msl
