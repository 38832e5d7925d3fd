// The part of Metal's shading language that scalar kernels use, in C++, so that a CPU runs them.
//
// Each thread of a threadgroup is a fiber. A fiber runs until it comes to a barrier, or to an operation over its
// simdgroup, which waits for all of the simdgroup's threads. So memory that is read without a barrier after it was
// written has what was there before, in one of the two orders in which fibers run (`backwards`).
//
// Threadgroup memory is static: all fibers of the one threadgroup that runs share it.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

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
  template <typename V, typename = std::enable_if_t<std::is_arithmetic_v<V>>>
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
    const int place = std::max(exponent - 11, -24);  // of the last bit
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

constexpr int SIMD = 32;
constexpr size_t STACK = 1 << 16;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool is_done = false;
};

// All threads that meet at a barrier; the last one to come lets the others go on.
struct Meeting {
  int size = 0, arrived = 0;
  long turn = 0;
};

struct Group {
  std::vector<Fiber> fibers;
  std::vector<Meeting> simds;
  std::vector<uint64_t> lanes;  // what each thread gives to its simdgroup
  Meeting all;
  ucontext_t scheduler;
  int running = 0;
  bool moved = false;
  void (*body)() = nullptr;
};

inline Group* group = nullptr;
inline uint3 place, threads_per_group, at_group, groups;

inline void wait() { swapcontext(&group->fibers[group->running].context, &group->scheduler); }

inline void meet(Meeting& meeting) {
  group->moved = true;
  if (++meeting.arrived == meeting.size) {
    meeting.arrived = 0;
    meeting.turn++;
    return;
  }
  for (const long turn = meeting.turn; meeting.turn == turn;) wait();
  group->moved = true;
}

inline void entry() {
  group->body();
  group->fibers[group->running].is_done = group->moved = true;
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

template <typename Value, typename Join>
Value over_simd(Value value, Join join) {
  for (int away = SIMD / 2; away > 0; away /= 2) {
    const int lane = group->running % SIMD;
    value = join(value, from_lane(value, lane ^ away));
  }
  return value;
}

// Run every threadgroup; 0, or 1 where threads wait for others that never come.
inline int run(void (*body)(), uint3 grid, uint3 per_group, bool backwards) {
  groups = {(grid.x + per_group.x - 1) / per_group.x, (grid.y + per_group.y - 1) / per_group.y,
            (grid.z + per_group.z - 1) / per_group.z};
  threads_per_group = per_group;
  const int count = per_group.x * per_group.y * per_group.z;
  Group own;
  group = &own;
  own.body = body;
  own.fibers.resize(count);
  own.lanes.resize(count + SIMD);
  for (Fiber& fiber : own.fibers) fiber.stack.reset(new char[STACK]);
  for (uint z = 0; z < groups.z; z++)
    for (uint y = 0; y < groups.y; y++)
      for (uint x = 0; x < groups.x; x++) {
        at_group = {x, y, z};
        own.all = {count};
        own.simds.assign((count + SIMD - 1) / SIMD, Meeting{SIMD});
        if (count % SIMD) own.simds.back().size = count % SIMD;
        for (Fiber& fiber : own.fibers) {
          getcontext(&fiber.context);
          fiber.context.uc_stack.ss_sp = fiber.stack.get();
          fiber.context.uc_stack.ss_size = STACK;
          fiber.context.uc_link = &own.scheduler;
          fiber.is_done = false;
          makecontext(&fiber.context, entry, 0);
        }
        for (int left = count; left > 0;) {
          own.moved = false;
          left = 0;
          for (int step = 0; step < count; step++) {
            const int at = backwards ? count - 1 - step : step;
            Fiber& fiber = own.fibers[at];
            if (fiber.is_done) continue;
            own.running = at;
            swapcontext(&own.scheduler, &fiber.context);
            left += !fiber.is_done;
          }
          if (left && !own.moved) return 1;
        }
      }
  return 0;
}

inline uint3 thread_in_group() {
  const uint at = group->running, x = threads_per_group.x, y = threads_per_group.y;
  return {at % x, at / x % y, at / (x * y)};
}

inline uint3 thread_in_grid() {
  const uint3 own = thread_in_group();
  return {at_group.x * threads_per_group.x + own.x, at_group.y * threads_per_group.y + own.y,
          at_group.z * threads_per_group.z + own.z};
}

}  // namespace shim

inline void threadgroup_barrier(mem_flags) { shim::meet(shim::group->all); }
inline void simdgroup_barrier(mem_flags) { shim::meet(shim::group->simds[shim::group->running / shim::SIMD]); }

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
using std::abs;
using std::exp;
using std::exp2;
using std::fabs;
using std::floor;
using std::fmax;
using std::fmin;
using std::isinf;
using std::isnan;
using std::log;
using std::max;
using std::min;
using std::rint;
using std::round;
using std::sqrt;
namespace fast {
using std::exp;
using std::exp2;
using std::max;
using std::min;
}  // namespace fast
namespace precise {
using std::exp;
using std::exp2;
using std::log;
}  // namespace precise
}  // namespace metal

template <typename V>
struct Limits {
  static constexpr float max = INFINITY, min = -INFINITY;
  static constexpr float finite_max = std::numeric_limits<float>::max(), finite_min = -finite_max;
};

using namespace metal;
