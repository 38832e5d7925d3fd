// What adapters change in a product: y += x A B, of each row's own A and B. Outputs of the A of all slots but the first,
// the base's, are further outputs of the product: a row needs few of them, but none is an operation of its own.
// A is [slots, ranks, in].
template <typename Shape>
__device__ int inner_products(const Shape& a) {
  return (a[0] - 1) * a[1];
}

// PER outputs changed by h B; `b` is at the first of them, and RANK rows of it lie `width` apart.
template <int RANK, int PER, typename T>
__device__ void change(T* made, const float* h, const T* b, long width) {
  float delta[PER] = {};
#pragma unroll(RANK < 16 ? RANK : 16)
  for (int rank = 0; rank < RANK; rank++) {
    const uint4 raw = *reinterpret_cast<const uint4*>(b + rank * width);
#pragma unroll
    for (int i = 0; i < PER; i++) delta[i] += h[rank] * static_cast<float>(reinterpret_cast<const T*>(&raw)[i]);
  }
#pragma unroll
  for (int i = 0; i < PER; i++)
    made[i] = static_cast<T>(static_cast<float>(made[i]) + static_cast<float>(static_cast<T>(delta[i])));
}
