// A warp packs one head's numbers (`pack.cuh`).
  const bool of_keys = blockIdx.x == 0;
  const int head = blockIdx.y, row = blockIdx.z, heads = keys_shape[1], lane = threadIdx.x;
  const T* from = of_keys ? keys + row * keys_strides[0] + head * keys_strides[1]
                          : values + row * values_strides[0] + head * values_strides[1];
  const long apart = of_keys ? keys_strides[3] : values_strides[3];
  constexpr int WORDS = D * BITS / 32 + 2 * (D / GROUP) * sizeof(T) / 4;
  float numbers[D / 32];
#pragma unroll
  for (int i = 0; i < D / 32; i++) numbers[i] = static_cast<float>(from[(i * 32 + lane) * apart]);
  pack_head<T, D, BITS, GROUP>(
      numbers, (of_keys ? packed_keys : packed_values) + (static_cast<long>(row) * heads + head) * WORDS, lane);
