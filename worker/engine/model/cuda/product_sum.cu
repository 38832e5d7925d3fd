// What stretches of the inputs have added to each number of a product: four numbers a thread.
  const long four = static_cast<long>(blockIdx.x) * blockDim.x + threadIdx.x, numbers = parts_shape[1] * static_cast<long>(parts_shape[2]);
  if (four * 4 >= numbers) return;
  float sums[4] = {};
#pragma unroll
  for (int split = 0; split < SPLITS; split++) {
    const float4 part = *reinterpret_cast<const float4*>(parts + split * numbers + four * 4);
    sums[0] += part.x;
    sums[1] += part.y;
    sums[2] += part.z;
    sums[3] += part.w;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) y[four * 4 + i] = static_cast<T>(sums[i]);
