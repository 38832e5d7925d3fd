// A block's row of sums, `made`, PER numbers a thread: what the layer was fed is added, and the norm of that (RMS) taken
// and weighted, with the roundings of MLX's separate operations. Pointers are to the row's first number.
template <int THREADS, int PER, typename T>
__device__ void add_and_norm(T* made, int width, float eps, const T* fed, const T* norm, T* out, T* normed) {
  static_assert(PER * sizeof(T) == 16);
  const int at = threadIdx.x;
  const bool has = at * PER < width;
  float squares = 0.0f;
  if (has) {
    const uint4 raw = reinterpret_cast<const uint4*>(fed)[at];
    const T* numbers = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int i = 0; i < PER; i++) {
      made[i] = static_cast<T>(static_cast<float>(numbers[i]) + static_cast<float>(made[i]));
      squares += static_cast<float>(made[i]) * static_cast<float>(made[i]);
    }
    reinterpret_cast<uint4*>(out)[at] = *reinterpret_cast<uint4*>(made);
  }
  __shared__ float by_warp[32];
#pragma unroll
  for (int away = 16; away > 0; away /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, away);
  if (at % 32 == 0) by_warp[at / 32] = squares;
  __syncthreads();
  squares = at % 32 < THREADS / 32 ? by_warp[at % 32] : 0.0f;
#pragma unroll
  for (int away = 16; away > 0; away /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, away);
  if (!has) return;
  const float by = rsqrtf(squares / width + eps);
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const T scaled = static_cast<T>(static_cast<float>(made[i]) * by);
    made[i] = static_cast<T>(static_cast<float>(scaled) * static_cast<float>(norm[at * PER + i]));
  }
  reinterpret_cast<uint4*>(normed)[at] = *reinterpret_cast<uint4*>(made);
}
