// Runs a Metal or CUDA kernel that was compiled for the CPU.
//
// Every lane is a fiber with a stack of its own. Lanes of one simdgroup run one after another, in a
// chosen order, up to the next simdgroup operation; when the last has arrived all go on. A
// threadgroup_barrier is the same thing one level up. A kernel whose result depends on the order
// has a race, and one in which not all lanes arrive diverges: both are reported.
//
// In a checked build the compiler calls __tsan_readN and __tsan_writeN for every memory access
// (-fsanitize=thread) and __ubsan_handle_* for undefined behaviour. Those functions are below: they
// hold each access against the buffers' bounds and the shadow memory, and count it.
#include "runtime.h"

#include <dlfcn.h>
#include <immintrin.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <deque>
#include <map>
#include <string>
#include <vector>

namespace msl {

Lane* lane;
Geometry geometry;
int reduction_tree;
const void* arguments[64];

namespace {

constexpr size_t kMaxLanes = 1024, kStackSize = 256 << 10, kArenaSize = 2ull << 30;
constexpr size_t kRedZone = 64 << 10;
enum Memory { kDevice = 0, kThreadgroup = 1 };

// ---------------------------------------------------------------------------------- fibers

void* scheduler_stack;
bool failed;
char error[4096];
Lane lanes[kMaxLanes];
Simdgroup simdgroups[kMaxLanes / kSimdWidth];
char* stacks;
uint64_t random_state;

extern "C" void msl_switch(void** save, void* to);
asm(R"(
.text
.globl msl_switch
.hidden msl_switch
.type msl_switch,@function
msl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

void set_error(const char* format, ...) __attribute__((format(printf, 1, 2)));
void set_error(const char* format, ...) {
  if (failed) return;
  failed = true;
  va_list list;
  va_start(list, format);
  vsnprintf(error, sizeof error, format, list);
  va_end(list);
}

// Gives up the launch: the lane that found the fault never runs again.
[[noreturn]] void leave() {
  static void* nowhere;
  lane = nullptr;
  msl_switch(&nowhere, scheduler_stack);
  abort();
}

std::string here() {
  char text[96];
  snprintf(text, sizeof text, "lane %u of threadgroup (%u,%u,%u)", lane->index,
           geometry.group_position[0], geometry.group_position[1], geometry.group_position[2]);
  return text;
}

// Runs another lane of this simdgroup, or the scheduler when none is ready.
void yield() {
  Lane* self = lane;
  Simdgroup& simd = *self->simdgroup;
  for (uint32_t k = 1; k < simd.lanes; k++) {
    Lane* other = simd.by_order[(self->order + k) % simd.lanes];
    if (other->state == Lane::ready) {
      lane = other;
      msl_switch(&self->stack_pointer, other->stack_pointer);
      return;
    }
  }
  lane = nullptr;
  msl_switch(&self->stack_pointer, scheduler_stack);
}

const char* name_of(Op op) {
  static const char* names[] = {"?", "shuffle", "reduction", "broadcast", "vote", "scan",
                                "matrix operation", "simdgroup_barrier"};
  return names[int(op)];
}

void report_divergence(Simdgroup& simd) {
  std::string text;
  for (uint32_t i = 0; i < simd.lanes; i++) {
    Lane &l = *simd.by_index[i], &before = *simd.by_index[i ? i - 1 : 0];
    if (i && l.state == before.state && l.line == before.line && l.op == before.op) continue;
    char part[128];
    if (l.state == Lane::finished)
      snprintf(part, sizeof part, " from lane %u: returned;", i);
    else
      snprintf(part, sizeof part, " from lane %u: waits in %s at line %d;", i,
               l.state == Lane::at_threadgroup_barrier ? "threadgroup_barrier" : name_of(l.op),
               l.line);
    text += part;
  }
  set_error("DIVERGENCE in simdgroup %u of threadgroup (%u,%u,%u):%s", simd.id,
            geometry.group_position[0], geometry.group_position[1], geometry.group_position[2],
            text.c_str());
}

uint32_t random_below(uint32_t n) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return uint32_t(random_state >> 20) % n;
}

// Order 0 is forward, 1 is reverse, anything else a random order seeded by it.
std::vector<uint32_t> ordered(uint32_t n, uint32_t order) {
  std::vector<uint32_t> result(n);
  for (uint32_t i = 0; i < n; i++) result[i] = order == 1 ? n - 1 - i : i;
  if (order > 1)
    for (uint32_t i = n; i > 1; i--) std::swap(result[i - 1], result[random_below(i)]);
  return result;
}

// ----------------------------------------------------------------------------- shadow memory

// Who touched a byte, and when. Two accesses are ordered if a barrier that covers their memory lies
// between them: the threadgroup's (epoch), or the simdgroup's for two lanes of one simdgroup.
struct Stamp {
  uint32_t group;  // threadgroup + 1; 0: never touched
  uint32_t epoch, simd_epoch;
  uint16_t lane;
  uint8_t others;  // for readers: 1 more lanes of the simdgroup, 2 of the threadgroup, 3 of the grid
};
struct Shadow {
  Stamp writer, reader;
  bool initialised;
};
struct Region {
  std::string name;
  size_t offset, size;
  Memory memory;
  bool writable;
};
struct Count {
  uint64_t bytes_read, bytes_written, distinct_bytes_read, shared_bytes_read;
};

bool checking;
char* arena;
Shadow* shadow;
uint32_t* readers;  // per byte of an input: threadgroup + 1 that read it, or kSeveral
constexpr uint32_t kSeveral = ~0u;
size_t arena_top, threadgroup_bytes, threadgroup_limit;
std::vector<Region> regions;
std::vector<Count> counts;
size_t buffers;
uint32_t group_serial, epochs[2];
struct Variable {
  const void* key;
  void* address;
};
std::vector<Variable> variables;
struct Copy {
  void* to;
  const void* from;
  size_t size;
};
struct Copies {  // of one lane: those not committed, then groups, the oldest first
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};
Copies copies[kMaxLanes];
struct CopyBarrier {
  bool copying;
  Copy copy;
  uint32_t completed;
};
std::map<void*, CopyBarrier> copy_barriers;
std::vector<uint64_t> block_counts, op_counts;

size_t allocate(size_t size, Memory memory, const char* name, bool writable) {
  size_t offset = (arena_top + kRedZone + 255) & ~size_t(255);
  arena_top = offset + size + kRedZone;
  if (arena_top > kArenaSize) return 0;
  regions.push_back({name, offset, size, memory, writable});
  return offset;
}

bool races(const Stamp& before, const Stamp& now, Memory memory) {
  if (!before.group) return false;
  if (before.group != now.group) return memory == kDevice;
  if (before.others == 3) return true;
  if (before.epoch != now.epoch) return false;
  if (before.others == 2 || before.lane / kSimdWidth != now.lane / kSimdWidth) return true;
  if (before.simd_epoch != now.simd_epoch) return false;
  return before.others == 1 || before.lane != now.lane;
}

void remember_reader(Stamp& reader, const Stamp& now) {
  if (!reader.group || (reader.group == now.group && reader.epoch != now.epoch &&
                        reader.others != 3)) {
    reader = now;
  } else if (reader.group != now.group) {
    reader.others = 3;
  } else if (reader.lane / kSimdWidth != now.lane / kSimdWidth) {
    reader.others = std::max<uint8_t>(reader.others, 2);
  } else if (reader.others < 2) {
    bool another = reader.simd_epoch == now.simd_epoch && (reader.lane != now.lane || reader.others);
    reader = now;
    reader.others = another;
  }
}

std::string code_address(void* address) {
  Dl_info info;
  char text[600] = "?";
  if (dladdr(address, &info))
    snprintf(text, sizeof text, "%s+0x%zx", info.dli_fname, (char*)address - (char*)info.dli_fbase);
  return text;
}

bool in_static_data(void* address) {  // constant tables of the kernel, the runtime's own state
  Dl_info info;
  return dladdr(address, &info) != 0;
}

void check(void* address, size_t size, bool is_write, void* caller) {
  if (!lane || !checking) return;
  char* byte = (char*)address;
  if (byte >= lane->stack_low && byte < lane->stack_high) return;
  const char* what = is_write ? "write" : "read";
  size_t offset = byte - arena;
  if (offset >= kArenaSize) {
    if (in_static_data(address)) return;
    set_error("WILD %s of %zu bytes by %s [%s]", what, size, here().c_str(),
              code_address(caller).c_str());
    leave();
  }
  size_t r = 0;
  while (r < regions.size() && (offset + kRedZone < regions[r].offset ||
                                offset >= regions[r].offset + regions[r].size + kRedZone / 2))
    r++;
  if (r == regions.size() || offset < regions[r].offset ||
      offset + size > regions[r].offset + regions[r].size) {
    set_error("OUT OF BOUNDS %s of %zu bytes at byte %ld of '%s', which has %zu, by %s [%s]", what,
              size, r < regions.size() ? long(offset) - long(regions[r].offset) : 0,
              r < regions.size() ? regions[r].name.c_str() : "?",
              r < regions.size() ? regions[r].size : 0, here().c_str(),
              code_address(caller).c_str());
    leave();
  }
  const Region& region = regions[r];
  if (is_write && !region.writable) {
    set_error("WRITE TO INPUT '%s' by %s [%s]", region.name.c_str(), here().c_str(),
              code_address(caller).c_str());
    leave();
  }
  if (r < buffers) {
    (is_write ? counts[r].bytes_written : counts[r].bytes_read) += size;
    if (!is_write)
      for (size_t i = offset; i < offset + size; i++) {
        counts[r].distinct_bytes_read += readers[i] == 0;
        counts[r].shared_bytes_read += readers[i] && readers[i] != group_serial &&
                                       readers[i] != kSeveral;
        readers[i] = !readers[i] || readers[i] == group_serial ? group_serial : kSeveral;
      }
  }
  if (!region.writable) return;
  Stamp now = {group_serial, epochs[region.memory], lane->simd_epoch[region.memory],
               uint16_t(lane->index), 0};
  for (size_t i = offset; i < offset + size; i++) {
    Shadow& s = shadow[i];
    if (!is_write && !s.initialised) {
      set_error("UNINITIALISED read of byte %zu of '%s' by %s [%s]", i - region.offset,
                region.name.c_str(), here().c_str(), code_address(caller).c_str());
      leave();
    }
    bool with_write = races(s.writer, now, region.memory);
    if (with_write || (is_write && races(s.reader, now, region.memory))) {
      set_error("DATA RACE on byte %zu of '%s': %s by %s, after a %s by lane %u with no barrier "
                "between them [%s]",
                i - region.offset, region.name.c_str(), what, here().c_str(),
                with_write ? "write" : "read", with_write ? s.writer.lane : s.reader.lane,
                code_address(caller).c_str());
      leave();
    }
    if (is_write) {
      s.writer = now;
      s.initialised = true;
    } else {
      remember_reader(s.reader, now);
    }
  }
}

// ------------------------------------------------------------------------- asynchronous copies

void copy_begins(const Copy& copy, void* caller) {
  check(copy.to, copy.size, true, caller);
  memset(copy.to, 0xff, copy.size);
  if (checking)
    for (size_t i = 0; i < copy.size; i++) shadow[(char*)copy.to - arena + i].initialised = false;
}

void copy_lands(const Copy& copy, bool own, void* caller) {
  if (copy.from) {
    check((void*)copy.from, copy.size, false, caller);
    memcpy(copy.to, copy.from, copy.size);
  } else {
    memset(copy.to, 0, copy.size);
  }
  if (own) return check(copy.to, copy.size, true, caller);
  if (checking)
    for (size_t i = 0; i < copy.size; i++) {
      Shadow& s = shadow[(char*)copy.to - arena + i];
      s.initialised = true;
      s.writer = {};
    }
}

// --------------------------------------------------------------------------------- scheduler

void (*kernel_entry)();

void fiber_main() {
  kernel_entry();
  lane->state = Lane::finished;
  yield();
  abort();
}

void start_lane(Lane& l, uint32_t i, const uint32_t* group) {
  const Geometry& g = geometry;
  l = {};
  copies[i] = {};
  l.index = i;
  l.index_in_simd = i % kSimdWidth;
  l.simdgroup = &simdgroups[i / kSimdWidth];
  l.position[0] = i % g.group_size[0];
  l.position[1] = i / g.group_size[0] % g.group_size[1];
  l.position[2] = i / g.group_size[0] / g.group_size[1];
  for (int d = 0; d < 3; d++) l.grid_position[d] = group[d] * g.threadgroup[d] + l.position[d];
  l.stack_low = stacks + i * kStackSize;
  l.stack_high = l.stack_low + kStackSize;
  void** top = (void**)(l.stack_high - 64);
  *--top = nullptr;
  *--top = (void*)&fiber_main;
  for (int k = 0; k < 6; k++) *--top = nullptr;
  l.stack_pointer = top;
}

void run_simdgroup(Simdgroup& simd) {  // up to a threadgroup barrier or the end
  for (;;) {
    Lane* next = nullptr;
    for (uint32_t k = 0; k < simd.lanes && !next; k++)
      if (simd.by_order[k]->state == Lane::ready) next = simd.by_order[k];
    if (!next) break;
    lane = next;
    msl_switch(&scheduler_stack, next->stack_pointer);
    lane = nullptr;
    if (failed) return;
  }
  for (uint32_t k = 0; k < simd.lanes; k++)
    if (simd.by_index[k]->state == Lane::at_simd_op) return report_divergence(simd);
}

void run_group(uint32_t serial, uint32_t order) {
  Geometry& g = geometry;
  uint32_t group[3] = {serial % g.groups[0], serial / g.groups[0] % g.groups[1],
                       serial / g.groups[0] / g.groups[1]};
  uint32_t threads = 1;
  for (int d = 0; d < 3; d++) {
    g.group_position[d] = group[d];
    g.group_size[d] = std::min(g.threadgroup[d], g.grid[d] - group[d] * g.threadgroup[d]);
    threads *= g.group_size[d];
  }
  g.simdgroups = (threads + kSimdWidth - 1) / kSimdWidth;
  group_serial = serial + 1;
  epochs[0] = epochs[1] = 0;
  regions.resize(buffers);
  arena_top = buffers ? regions.back().offset + regions.back().size + kRedZone : 0;
  threadgroup_bytes = 0;
  variables.clear();
  copy_barriers.clear();
  for (uint32_t i = 0; i < threads; i++) start_lane(lanes[i], i, group);
  for (uint32_t s = 0; s < g.simdgroups; s++) {
    Simdgroup& simd = simdgroups[s];
    simd.id = s;
    simd.arrived = 0;
    simd.lanes = std::min<uint32_t>(kSimdWidth, threads - s * kSimdWidth);
    auto lane_order = ordered(simd.lanes, order);
    for (uint32_t i = 0; i < simd.lanes; i++) {
      simd.by_index[i] = &lanes[s * kSimdWidth + i];
      simd.by_order[i] = &lanes[s * kSimdWidth + lane_order[i]];
      simd.by_order[i]->order = i;
    }
  }
  for (;;) {
    for (uint32_t s : ordered(g.simdgroups, order)) {
      run_simdgroup(simdgroups[s]);
      if (failed) return;
    }
    uint32_t waiting = 0;
    const Lane* first = nullptr;
    for (uint32_t i = 0; i < threads; i++)
      if (lanes[i].state == Lane::at_threadgroup_barrier) {
        if (!first) first = &lanes[i];
        waiting += lanes[i].line == first->line;
      }
    if (!first) return;
    if (waiting != threads)
      return set_error("BARRIER DIVERGENCE in threadgroup (%u,%u,%u): lane %u and %u others of %u "
                       "wait at line %d, the rest do not",
                       group[0], group[1], group[2], first->index, waiting - 1, threads,
                       first->line);
    for (uint32_t i = 0; i < threads; i++) lanes[i].state = Lane::ready;
    for (int m = 0; m < 2; m++) epochs[m] += first->memory >> m & 1;
  }
}

}  // namespace

void meet(Op op, int line) {
  Lane* self = lane;
  Simdgroup& simd = *self->simdgroup;
  self->op = op;
  self->line = line;
  self->state = Lane::at_simd_op;
  if (++simd.arrived < simd.lanes) return yield();
  for (uint32_t i = 0; i < simd.lanes; i++) {
    Lane* other = simd.by_index[i];
    if (other->op != op || other->line != line || other->state != Lane::at_simd_op) {
      report_divergence(simd);
      leave();
    }
  }
  memcpy(simd.out, simd.in, sizeof simd.out);
  simd.is_reduced = false;
  simd.arrived = 0;
  op_counts[int(op)]++;
  for (uint32_t i = 0; i < simd.lanes; i++) simd.by_index[i]->state = Lane::ready;
}

void threadgroup_barrier(int memory, int line) {
  lane->line = line;
  lane->memory = memory;
  lane->state = Lane::at_threadgroup_barrier;
  yield();  // until run_group has seen every lane here
}

void simdgroup_barrier(int memory, int line) {
  meet(Op::barrier, line);
  for (int m = 0; m < 2; m++)
    if (memory >> m & 1) lane->simd_epoch[m]++;
}

void matrix_place(uint32_t index, uint32_t& row, uint32_t& column) {
  uint32_t quad = index / 4;
  row = (quad & 4) + index / 2 % 4;
  column = (quad & 2) * 2 + index % 2 * 2;
}

void matrix_multiply_accumulate(const float* left, const float* right, float* sum, int line) {
  Simdgroup& simd = *lane->simdgroup;
  float brought[4] = {left[0], left[1], right[0], right[1]};
  memcpy(simd.in[lane->index_in_simd], brought, sizeof brought);
  meet(Op::matrix, line);
  uint32_t row, column;
  if (!simd.is_reduced) {
    float a[8][8], b[8][8];
    for (uint32_t l = 0; l < kSimdWidth; l++) {
      matrix_place(l, row, column);
      memcpy(&a[row][column], simd.out[l], 2 * sizeof(float));
      memcpy(&b[row][column], simd.out[l] + 2 * sizeof(float), 2 * sizeof(float));
    }
    memset(simd.product, 0, sizeof simd.product);
    for (int r = 0; r < 8; r++)
      for (int i = 0; i < 8; i++)
        for (int c = 0; c < 8; c++) simd.product[r][c] += a[r][i] * b[i][c];
    simd.is_reduced = true;
  }
  matrix_place(lane->index_in_simd, row, column);
  sum[0] += simd.product[row][column];
  sum[1] += simd.product[row][column + 1];
}

void* threadgroup_variable(const void* key, size_t size, const char* name, int line) {
  for (auto& variable : variables)
    if (variable.key == key) return variable.address;
  threadgroup_bytes += size;
  if (threadgroup_bytes > threadgroup_limit) {
    set_error("THREADGROUP MEMORY: %zu bytes with '%s' at line %d; there are %zu",
              threadgroup_bytes, name, line, threadgroup_limit);
    leave();
  }
  size_t offset = allocate(size, kThreadgroup, name, true);
  memset(arena + offset, 0xff, size);
  if (checking) memset(shadow + offset, 0, size * sizeof(Shadow));
  variables.push_back({key, arena + offset});
  return arena + offset;
}

void copy_async(void* to, const void* from, size_t size) {
  copy_begins({to, from, size}, __builtin_return_address(0));
  copies[lane->index].open.push_back({to, from, size});
}

void copies_commit() {
  Copies& own = copies[lane->index];
  own.groups.push_back(std::move(own.open));
  own.open.clear();
}

void copies_wait(size_t latest) {
  auto& groups = copies[lane->index].groups;
  for (; groups.size() > latest; groups.pop_front())
    for (const Copy& copy : groups.front()) copy_lands(copy, true, __builtin_return_address(0));
}

void barrier_init(void* barrier) {
  check(barrier, 8, true, __builtin_return_address(0));
  copy_barriers[barrier] = {};
}

void copy_bulk(void* to, const void* from, size_t size, void* barrier) {
  check(barrier, 8, false, __builtin_return_address(0));
  CopyBarrier& at = copy_barriers[barrier];
  if (at.copying || size % 16 || (size_t)to % 16 || (size_t)from % 16) {
    set_error("BULK COPY of %zu bytes, unaligned or before the last one was waited for, by %s", size,
              here().c_str());
    leave();
  }
  copy_begins({to, from, size}, __builtin_return_address(0));
  at.copying = true;
  at.copy = {to, from, size};
}

void barrier_wait(void* barrier, uint32_t parity) {
  check(barrier, 8, false, __builtin_return_address(0));
  CopyBarrier& at = copy_barriers[barrier];
  // The lane that is to start the copy may not have come to it yet.
  for (int i = 0; (at.completed & 1) == parity && !at.copying; i++) {
    if (i == 1000) {
      set_error("ENDLESS WAIT for a copy that nobody started, by %s", here().c_str());
      leave();
    }
    yield();
  }
  if ((at.completed & 1) != parity) return;
  copy_lands(at.copy, false, __builtin_return_address(0));
  at.copying = false;
  at.completed++;
}

uint32_t short_address(const void* p) { return (const char*)p - arena; }
void* from_short_address(uint32_t address) { return arena + address; }

}  // namespace msl

using namespace msl;

extern "C" {

// --------------------------------------------------------------------- called by the driver

struct Buffer {
  void* data;
  uint64_t size;
  const char* name;
  uint32_t writable, initialised;
};
struct Launch {
  uint32_t grid[3], threadgroup[3];
  uint32_t order, reduction_tree, checked, blocks;
  uint32_t threadgroup_limit, flush_denormals;
  void (*entry)();
};

const char* msl_error() { return error; }
const uint64_t* msl_block_counts() { return block_counts.data(); }
const uint64_t* msl_op_counts() { return op_counts.data(); }
const void* msl_buffer_counts() { return counts.data(); }

int msl_launch(const Buffer* buffer, uint32_t n, const Launch* launch) {
  failed = false;
  error[0] = 0;
  checking = launch->checked;
  reduction_tree = launch->reduction_tree;
  threadgroup_limit = launch->threadgroup_limit;
  random_state = 88172645463325252ull + launch->order * 7919ull;
  kernel_entry = launch->entry;
  block_counts.assign(launch->blocks, 0);
  op_counts.assign(8, 0);
  counts.assign(n, {});
  if (!arena) {
    auto reserve = [](size_t size) {
      return (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    };
    arena = reserve(kArenaSize);
    shadow = (Shadow*)reserve(kArenaSize * sizeof(Shadow));
    readers = (uint32_t*)reserve(kArenaSize * sizeof(uint32_t));
    stacks = reserve(kStackSize * kMaxLanes);
    if (arena == MAP_FAILED || (char*)shadow == MAP_FAILED || (char*)readers == MAP_FAILED ||
        stacks == MAP_FAILED) {
      set_error("cannot reserve address space");
      return 1;
    }
    for (size_t i = 0; i < kMaxLanes; i++) mprotect(stacks + i * kStackSize, 4096, PROT_NONE);
  }
  if (arena_top) {  // forget the last launch
    madvise(arena, arena_top, MADV_DONTNEED);
    madvise(shadow, arena_top * sizeof(Shadow), MADV_DONTNEED);
    madvise(readers, arena_top * sizeof(uint32_t), MADV_DONTNEED);
  }
  regions.clear();
  arena_top = 0;
  for (uint32_t i = 0; i < n; i++) {
    size_t offset = allocate(buffer[i].size, kDevice, buffer[i].name, buffer[i].writable);
    if (!offset) {
      set_error("the buffers are larger than the emulator's %zu MB", kArenaSize >> 20);
      return 1;
    }
    memcpy(arena + offset, buffer[i].data, buffer[i].size);
    arguments[i] = arena + offset;
    if (checking && buffer[i].writable && buffer[i].initialised)
      for (size_t k = 0; k < buffer[i].size; k++) shadow[offset + k].initialised = true;
  }
  buffers = n;
  uint64_t threads = 1, groups = 1;
  for (int d = 0; d < 3; d++) {
    geometry.grid[d] = launch->grid[d];
    geometry.threadgroup[d] = launch->threadgroup[d];
    geometry.groups[d] = (launch->grid[d] + launch->threadgroup[d] - 1) / launch->threadgroup[d];
    threads *= launch->threadgroup[d];
    groups *= geometry.groups[d];
  }
  if (threads > kMaxLanes) {
    set_error("a threadgroup of %lu threads; there are at most %zu", threads, kMaxLanes);
    return 1;
  }
  unsigned mode = _mm_getcsr();
  if (launch->flush_denormals) _mm_setcsr(mode | 0x8040);
  for (uint32_t serial : ordered(groups, launch->order)) {
    run_group(serial, launch->order);
    if (failed) break;
  }
  _mm_setcsr(mode);
  lane = nullptr;
  for (uint32_t i = 0; i < n && !failed; i++) {
    if (!buffer[i].writable) continue;
    memcpy(buffer[i].data, arena + regions[i].offset, buffer[i].size);
    if (checking)
      for (size_t k = 0; k < buffer[i].size && !failed; k++)
        if (!shadow[regions[i].offset + k].initialised)
          set_error("OUTPUT '%s' is not written at byte %zu of %lu", buffer[i].name, k,
                    buffer[i].size);
  }
  return failed;
}

// ------------------------------------------------------------ called by instrumented kernels

void msl_block(uint32_t block) { block_counts[block]++; }

#define CALLER __builtin_return_address(0)
#define ACCESS(N)                                                                        \
  void __tsan_read##N(void* p) { check(p, N, false, CALLER); }                           \
  void __tsan_write##N(void* p) { check(p, N, true, CALLER); }                           \
  void __tsan_unaligned_read##N(void* p) { check(p, N, false, CALLER); }                 \
  void __tsan_unaligned_write##N(void* p) { check(p, N, true, CALLER); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
void __tsan_init() {}
void* __tsan_memcpy(void* to, const void* from, size_t size) {
  check((void*)from, size, false, CALLER);
  check(to, size, true, CALLER);
  return memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, size_t size) {
  check((void*)from, size, false, CALLER);
  check(to, size, true, CALLER);
  return memmove(to, from, size);
}
void* __tsan_memset(void* to, int value, size_t size) {
  check(to, size, true, CALLER);
  return memset(to, value, size);
}

struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
#define UNDEFINED(name, text)                                                             \
  void __ubsan_handle_##name(SourceLocation* at, ...) {                                   \
    if (!lane) return;                                                                    \
    set_error("UNDEFINED BEHAVIOUR: " text " by %s [%s:%u]", here().c_str(), at->file, at->line); \
    leave();                                                                              \
  }
UNDEFINED(out_of_bounds, "array index out of bounds")
UNDEFINED(shift_out_of_bounds, "shift by more than the width")
UNDEFINED(divrem_overflow, "division by zero")
UNDEFINED(add_overflow, "signed overflow")
UNDEFINED(sub_overflow, "signed overflow")
UNDEFINED(mul_overflow, "signed overflow")
UNDEFINED(negate_overflow, "signed overflow")
UNDEFINED(type_mismatch_v1, "misaligned access")
UNDEFINED(float_cast_overflow, "float out of the integer's range")
}
