// What stretches of the inputs have added to each number of a product, a row of it, or a tile of that, a block; a product
// made as a whole is one part. CHANGED: and what adapters add (`changes.cuh`), to the outputs of up to three linears.
// GATED: SwiGLU of the row's halves. NORMED: behind that what lies between the product and the next one
// (`add_and_norm.cuh`), of rows in one tile.
  constexpr int PER = 16 / sizeof(T), MADE = GATED ? WIDTH / 2 : WIDTH;
  const int row = blockIdx.x, rows = gridDim.x, column = (blockIdx.y * THREADS + threadIdx.x) * PER;
#ifdef CHANGED
  constexpr int ACROSS = WIDTH + INNER;  // of what `parts` has
  __shared__ float inner[RANKS];
  const int slot = slots[row];
  for (int at = threadIdx.x; slot > 0 && at < RANKS; at += THREADS) {
    float sum = 0.0f;
    for (int part = 0; part < PARTS; part++)
      sum += static_cast<float>(parts[(static_cast<long>(part) * rows + row) * ACROSS + WIDTH + (slot - 1) * RANKS + at]);
    inner[at] = sum;
  }
  __syncthreads();
#else
  constexpr int ACROSS = WIDTH;
#endif
  auto make = [&](int column, T* made) {
    float sums[PER] = {};
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const auto* const numbers = parts + (static_cast<long>(part) * rows + row) * ACROSS + column;
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
#ifdef CHANGED
    if (slot == 0) return;
    const T* const bs[] = {b0, b1, b2};
    constexpr int begins[] = {BEGIN0, BEGIN1, BEGIN2}, widths[] = {WIDTH0, WIDTH1, WIDTH2};
    constexpr int RANK = RANKS / LINEARS;
#pragma unroll
    for (int which = 0; which < LINEARS; which++) {
      const int at = column - begins[which];
      if (at >= 0 && at < widths[which])
        change<RANK, PER>(made, inner + which * RANK, bs[which] + static_cast<long>(slot) * RANK * widths[which] + at, widths[which]);
    }
#endif
  };
  alignas(16) T made[PER];
  if (column < MADE) {
    make(column, made);
    if constexpr (GATED) {
      alignas(16) T up[PER];
      make(MADE + column, up);
#pragma unroll
      for (int i = 0; i < PER; i++) made[i] = opened(made[i], up[i]);
    }
#ifndef NORMED
    *reinterpret_cast<uint4*>(out + static_cast<long>(row) * MADE + column) = *reinterpret_cast<uint4*>(made);
#endif
  }
#ifdef NORMED
  const long from = static_cast<long>(row) * WIDTH;
  add_and_norm<THREADS, PER>(made, WIDTH, __int_as_float(EPS), fed + from, norm, out + from, normed + from);
#endif
