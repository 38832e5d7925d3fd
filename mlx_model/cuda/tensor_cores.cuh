#include <cuda/std/type_traits>

// Two numbers in a register, the first one in its lower half.
template <typename T>
__device__ unsigned paired(T first, T second) {
  return __builtin_bit_cast(unsigned short, first)
      | static_cast<unsigned>(__builtin_bit_cast(unsigned short, second)) << 16;
}

__device__ inline unsigned word(const uint4& four, int which) {
  return which == 0 ? four.x : which == 1 ? four.y : which == 2 ? four.z : four.w;
}

// Sixteen bytes that are read once in a step: what others have in the cache stays there. All that is asked for before
// any of it is used is on its way at once.
__device__ inline uint4 read_once(const void* from) {
  uint4 four;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
      : "l"(from));
  return four;
}

__device__ inline uint4 read_often(const void* from) {
  uint4 four;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
      : "l"(from));
  return four;
}

// sums[16 x 8] += a[16 x 16] times b[16 x 8], spread over a warp.
template <typename T>
__device__ void multiply(float* sums, const unsigned* a, unsigned b_low, unsigned b_high) {
  if constexpr (cuda::std::is_same_v<T, __half>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}

// Sixteen bytes to shared memory, on their way while others are used; `end_copies` closes a group of them.
__device__ inline void copy_ahead(void* to, const void* from) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}

__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most so many groups are on their way.
template <int GROUPS>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// SwiGLU of two numbers of T, rounded as MLX's operations round.
template <typename T>
__device__ T opened(T gate, T up) {
  const float of_gate = static_cast<float>(gate);
  const T open = static_cast<T>(1.0f / (1.0f + __expf(-of_gate)));
  const T half = static_cast<T>(of_gate * static_cast<float>(open));
  return static_cast<T>(static_cast<float>(half) * static_cast<float>(up));
}
