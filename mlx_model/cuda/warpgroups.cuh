// Products of a warpgroup (four warps) from shared memory, which a Hopper has (compute capability 9.0): PTX ISA,
// "Asynchronous Warpgroup Level Matrix Multiply-Accumulate".
#include <cuda/std/type_traits>

// Rows of 64 numbers of 16 bits, whose eighths are swapped by the row's number, eight rows after eight rows.
__device__ inline unsigned long long described(const void* from) {
  const unsigned long long at = __cvta_generic_to_shared(from);
  return at >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// What `copy_ahead` has brought, and what sums hold, are seen by the products that are asked for next.
__device__ inline void before_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most so many groups of products are on their way.
template <int GROUPS>
__device__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}

#define EIGHT(at) "+f"(sums[at]), "+f"(sums[at + 1]), "+f"(sums[at + 2]), "+f"(sums[at + 3]), "+f"(sums[at + 4]), \
    "+f"(sums[at + 5]), "+f"(sums[at + 6]), "+f"(sums[at + 7])
#define TO_31 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TO_47 TO_31 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TO_79 TO_47 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, " \
    "%68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define OF_64 EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
#define OF_96 OF_64, EIGHT(32), EIGHT(40)
#define OF_160 OF_96, EIGHT(48), EIGHT(56), EIGHT(64), EIGHT(72)
#define MULTIPLY(WIDTH, TYPE, NAMES, A, B, SUMS) \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #WIDTH "k16.f32." TYPE "." TYPE " {" NAMES "}, %" #A ", %" #B \
               ", 1, 1, 1, 0, 0;" : SUMS : "l"(a), "l"(b))

// sums[64 x WIDTH] += a[64 x 16] b[WIDTH x 16]^T, as described, spread over the warpgroup as `multiply` spreads 16 rows.
template <typename T, int WIDTH>
__device__ void multiply_from_shared(float* sums, unsigned long long a, unsigned long long b) {
  static_assert(WIDTH == 64 || WIDTH == 96 || WIDTH == 160);
  if constexpr (cuda::std::is_same_v<T, __half>) {
    if constexpr (WIDTH == 64) MULTIPLY(64, "f16", TO_31, 32, 33, OF_64);
    if constexpr (WIDTH == 96) MULTIPLY(96, "f16", TO_47, 48, 49, OF_96);
    if constexpr (WIDTH == 160) MULTIPLY(160, "f16", TO_79, 80, 81, OF_160);
  } else {
    if constexpr (WIDTH == 64) MULTIPLY(64, "bf16", TO_31, 32, 33, OF_64);
    if constexpr (WIDTH == 96) MULTIPLY(96, "bf16", TO_47, 48, 49, OF_96);
    if constexpr (WIDTH == 160) MULTIPLY(160, "bf16", TO_79, 80, 81, OF_160);
  }
}
