// What stretches of the inputs have added to each number of a product, a row of it a block. NORMED: behind that what lies
// between the product and the next one (`add_and_norm.cuh`), also of a product made as a whole, which is one part.
  constexpr int PER = 16 / sizeof(T);
  const long from = static_cast<long>(blockIdx.x) * WIDTH, mine = from + threadIdx.x * PER;
  alignas(16) T made[PER];
  if (threadIdx.x * PER < WIDTH) {
    float sums[PER] = {};
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const auto* const numbers = parts + part * static_cast<long>(gridDim.x) * WIDTH + mine;
      constexpr int VECTORS = PER * sizeof(*parts) / 16, IN_ONE = PER / VECTORS;
#pragma unroll
      for (int vector = 0; vector < VECTORS; vector++) {
        const uint4 raw = reinterpret_cast<const uint4*>(numbers)[vector];
#pragma unroll
        for (int i = 0; i < IN_ONE; i++)
          sums[vector * IN_ONE + i] += static_cast<float>(reinterpret_cast<decltype(numbers)>(&raw)[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < PER; i++) made[i] = static_cast<T>(sums[i]);
#ifndef NORMED
    *reinterpret_cast<uint4*>(out + mine) = *reinterpret_cast<uint4*>(made);
#endif
  }
#ifdef NORMED
  add_and_norm<THREADS, PER>(made, WIDTH, __int_as_float(EPS), fed + from, norm, out + from, normed + from);
#endif
