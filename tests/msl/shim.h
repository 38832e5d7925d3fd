// The part of Metal's shading language that scalar kernels use, in C++, so that a CPU runs them.
//
// Each thread of a threadgroup is a fiber. A fiber runs until it comes to a barrier, or to an operation over its
// simdgroup, which waits for all of the simdgroup's threads. So memory that is read without a barrier after it was
// written has what was there before, in one of the two orders in which fibers run (`backwards`).
//
// Threadgroup memory is static: all fibers of the one threadgroup that runs share it.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

// Few headers, and C++14, as Metal's language is: most of the time that a test takes is the compiler's.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#define device
#define constant
#define thread
#define threadgroup static
#define kernel

using uint = uint32_t;
using ushort = uint16_t;
using uchar = uint8_t;
using ulong = uint64_t;

struct uint3 {
  uint x, y, z;
};

// 16-bit numbers, rounded to the nearest, ties to even.
template <typename Self>
struct Number16 {
  uint16_t bits;
  Number16() = default;
  template <typename V, typename = std::enable_if_t<std::is_arithmetic<V>::value>>
  Number16(V value) : bits(Self::to_bits(static_cast<float>(value))) {}
  operator float() const { return Self::to_float(bits); }
};

struct bfloat16_t : Number16<bfloat16_t> {
  using Number16::Number16;
  static uint16_t to_bits(float value) {
    uint32_t all;
    std::memcpy(&all, &value, 4);
    if (std::isnan(value)) return uint16_t(all >> 16 | 64);
    return uint16_t((all + 0x7fff + (all >> 16 & 1)) >> 16);
  }
  static float to_float(uint16_t bits) {
    uint32_t all = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &all, 4);
    return value;
  }
};

struct float16_t : Number16<float16_t> {
  using Number16::Number16;
  static uint16_t to_bits(float value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const float size = std::fabs(value);
    if (std::isnan(value)) return 0x7e00;
    if (size >= 65520.0f) return sign | 0x7c00;
    int exponent = 0;
    std::frexp(size, &exponent);
    const int place = exponent - 11 > -24 ? exponent - 11 : -24;  // of the last bit
    const float steps = std::nearbyint(std::ldexp(size, -place));
    const float rounded = std::ldexp(steps, place);
    if (rounded < 6.103515625e-05f) return sign | uint16_t(std::ldexp(rounded, 24));
    std::frexp(rounded, &exponent);
    return sign | uint16_t((exponent + 14) << 10) | (uint16_t(std::ldexp(rounded, 11 - exponent)) & 0x3ff);
  }
  static float to_float(uint16_t bits) {
    const int exponent = bits >> 10 & 31, rest = bits & 0x3ff;
    float value = exponent == 31  ? (rest ? NAN : INFINITY)
                  : exponent == 0 ? std::ldexp(float(rest), -24)
                                  : std::ldexp(float(rest + 1024), exponent - 25);
    return bits & 0x8000 ? -value : value;
  }
};

using bfloat = bfloat16_t;
using half = float16_t;

template <typename To, typename From>
To as_type(const From& value) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(static_cast<void*>(&to), &value, sizeof(To));
  return to;
}

enum class mem_flags { mem_none, mem_device, mem_threadgroup };

namespace shim {

constexpr int SIMD = 32, MOST_THREADS = 1024;
constexpr size_t STACK = 1 << 16;

struct Fiber {
  ucontext_t context;  // to begin with; each later change is a jump, which asks the system for nothing
  jmp_buf at;
  char* stack;
  bool has_begun, is_done;
};

// All threads that meet at a barrier; the last one to come lets the others go on.
struct Meeting {
  int size, arrived;
  long turn;
};

struct Group {
  Fiber fibers[MOST_THREADS];
  Meeting simds[MOST_THREADS / SIMD];
  uint64_t lanes[MOST_THREADS];  // what each thread gives to its simdgroup
  Meeting all;
  ucontext_t beginner;
  jmp_buf scheduler;
  int running;
  bool moved;
  void (*body)();
};

static Group* const group = static_cast<Group*>(calloc(1, sizeof(Group)));
static uint3 threads_per_group, at_group, groups;

static inline void wait() {
  if (!_setjmp(group->fibers[group->running].at)) _longjmp(group->scheduler, 1);
}

static inline void go_on(Fiber& fiber) {
  if (_setjmp(group->scheduler)) return;
  if (fiber.has_begun) _longjmp(fiber.at, 1);
  fiber.has_begun = true;
  swapcontext(&group->beginner, &fiber.context);
}

static inline void meet(Meeting& meeting) {
  group->moved = true;
  if (++meeting.arrived == meeting.size) {
    meeting.arrived = 0;
    meeting.turn++;
    return;
  }
  for (const long turn = meeting.turn; meeting.turn == turn;) wait();
  group->moved = true;
}

static inline void entry() {
  group->body();
  group->fibers[group->running].is_done = group->moved = true;
  _longjmp(group->scheduler, 1);
}

template <typename Value>
Value from_lane(Value value, int lane) {
  static_assert(sizeof(Value) <= 8);
  const int own = group->running, simd = own / SIMD;
  std::memcpy(&group->lanes[own], &value, sizeof(Value));
  meet(group->simds[simd]);
  Value other;
  std::memcpy(&other, &group->lanes[simd * SIMD + (lane % SIMD + SIMD) % SIMD], sizeof(Value));
  meet(group->simds[simd]);  // before the next operation writes
  return other;
}

// The same for all of a simdgroup: added up in pairs, as its shuffles would.
template <typename Value, typename Join>
Value over_simd(Value value, Join join) {
  const int own = group->running, first = own / SIMD * SIMD, count = group->simds[own / SIMD].size;
  memcpy(&group->lanes[own], &value, sizeof(Value));
  meet(group->simds[own / SIMD]);
  Value all[SIMD];
  for (int lane = 0; lane < count; lane++) memcpy(&all[lane], &group->lanes[first + lane], sizeof(Value));
  for (int away = SIMD / 2; away > 0; away /= 2)
    for (int lane = 0; lane < away; lane++)
      if (lane + away < count) all[lane] = join(all[lane], all[lane + away]);
  meet(group->simds[own / SIMD]);
  return all[0];
}

// Run every threadgroup; 0, or 1 where threads wait for others that never come.
static inline int run(void (*body)(), uint3 grid, uint3 per_group, bool backwards) {
  groups = {(grid.x + per_group.x - 1) / per_group.x, (grid.y + per_group.y - 1) / per_group.y,
            (grid.z + per_group.z - 1) / per_group.z};
  threads_per_group = per_group;
  const int count = per_group.x * per_group.y * per_group.z;
  group->body = body;
  for (int at = 0; at < count; at++)
    if (!group->fibers[at].stack) group->fibers[at].stack = static_cast<char*>(malloc(STACK));
  for (uint z = 0; z < groups.z; z++)
    for (uint y = 0; y < groups.y; y++)
      for (uint x = 0; x < groups.x; x++) {
        at_group = {x, y, z};
        group->all = {count, 0, 0};
        for (int at = 0; at < count; at += SIMD) group->simds[at / SIMD] = {count - at < SIMD ? count - at : SIMD, 0, 0};
        for (int at = 0; at < count; at++) {
          Fiber& fiber = group->fibers[at];
          getcontext(&fiber.context);
          fiber.context.uc_stack.ss_sp = fiber.stack;
          fiber.context.uc_stack.ss_size = STACK;
          fiber.context.uc_link = nullptr;
          fiber.has_begun = fiber.is_done = false;
          makecontext(&fiber.context, entry, 0);
        }
        for (int left = count; left > 0;) {
          group->moved = false;
          left = 0;
          for (int step = 0; step < count; step++) {
            const int at = backwards ? count - 1 - step : step;
            Fiber& fiber = group->fibers[at];
            if (fiber.is_done) continue;
            group->running = at;
            go_on(fiber);
            left += !fiber.is_done;
          }
          if (left && !group->moved) return 1;
        }
      }
  return 0;
}

static inline uint3 thread_in_group() {
  const uint at = group->running, x = threads_per_group.x, y = threads_per_group.y;
  return {at % x, at / x % y, at / (x * y)};
}

static inline uint3 thread_in_grid() {
  const uint3 own = thread_in_group();
  return {at_group.x * threads_per_group.x + own.x, at_group.y * threads_per_group.y + own.y,
          at_group.z * threads_per_group.z + own.z};
}

}  // namespace shim

static inline void threadgroup_barrier(mem_flags) { shim::meet(shim::group->all); }
static inline void simdgroup_barrier(mem_flags) { shim::meet(shim::group->simds[shim::group->running / shim::SIMD]); }

template <typename V>
V simd_sum(V value) { return shim::over_simd(value, [](V a, V b) { return V(a + b); }); }
template <typename V>
V simd_max(V value) { return shim::over_simd(value, [](V a, V b) { return a > b ? a : b; }); }
template <typename V>
V simd_min(V value) { return shim::over_simd(value, [](V a, V b) { return a < b ? a : b; }); }
template <typename V>
V simd_shuffle_xor(V value, ushort with) { return shim::from_lane(value, (shim::group->running % shim::SIMD) ^ with); }
template <typename V>
V simd_shuffle_down(V value, ushort by) { return shim::from_lane(value, shim::group->running % shim::SIMD + by); }
template <typename V>
V simd_broadcast(V value, ushort lane) { return shim::from_lane(value, lane); }

namespace metal {
using std::exp;
using std::exp2;
using std::fabs;
using std::floor;
using std::isinf;
using std::isnan;
using std::log;
using std::rint;
using std::round;
using std::sqrt;
template <typename V>
V max(V a, V b) { return a < b ? b : a; }
template <typename V>
V min(V a, V b) { return b < a ? b : a; }
namespace fast {
using std::exp;
using std::exp2;
}  // namespace fast
}  // namespace metal

template <typename V>
struct Limits {
  static constexpr float max = INFINITY, min = -INFINITY;
  static constexpr float finite_max = 3.40282347e38f, finite_min = -finite_max;
};

using namespace metal;
