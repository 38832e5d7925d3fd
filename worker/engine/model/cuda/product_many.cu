// y = x W^T for more rows than a block of `product.cu` takes. A block computes OUTPUTS outputs of 64 rows, with GATED half
// of them of each half of the weights. What it multiplies comes into shared memory 64 inputs at a time, while what came
// before is multiplied: three such stages. A row of a stage is 128 bytes, whose eighths are swapped by the row's number, so
// that eight rows are read from all banks at once. Each of four warps has 32 rows and half the outputs.
  constexpr int ROWS = 64, STEP = 64, STAGES = 3, TILES = OUTPUTS / 16, MADE = GATED ? OUTPUTS / 2 : OUTPUTS;
  __shared__ alignas(128) T of_x[STAGES][ROWS * STEP];
  __shared__ alignas(128) T of_weight[STAGES][OUTPUTS * STEP];
  const int begin = blockIdx.y * ROWS, rows = min(ROWS, x_shape[0] - begin);
  const int inputs = x_shape[1], outputs = weight_shape[0], width = GATED ? outputs / 2 : outputs;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * MADE;
  const int own_rows = warp / 2 * 32, own_outputs = warp % 2 * (OUTPUTS / 2);

  // A thread brings an eighth of every sixteenth row.
  const int piece = threadIdx.x % 8, from_row = threadIdx.x / 8;
  auto bring = [&](int stage, int step) {
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++) {
      const int row = from_row + i * 16;
      copy_ahead(&of_x[stage][row * STEP + (piece ^ row % 8) * 8],
          x + static_cast<long>(begin + min(row, rows - 1)) * inputs + step * STEP + piece * 8);
    }
#pragma unroll
    for (int i = 0; i < OUTPUTS / 16; i++) {
      const int row = from_row + i * 16;
      // Of a warp's outputs the first half is of the gate, the second of what it opens.
      const int output = GATED ? first + row / (OUTPUTS / 2) * (OUTPUTS / 4) + row % (OUTPUTS / 4)
              + row / (OUTPUTS / 4) % 2 * width : first + row;
      copy_ahead(&of_weight[stage][row * STEP + (piece ^ row % 8) * 8],
          weight + static_cast<long>(min(output, outputs - 1)) * inputs + step * STEP + piece * 8);
    }
  };

  float sums[2][TILES][4] = {};
  const int steps = inputs / STEP;
#pragma unroll
  for (int step = 0; step < STAGES - 1; step++) {
    if (step < steps) bring(step, step);
    end_copies();
  }
  for (int step = 0; step < steps; step++) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    if (step + STAGES - 1 < steps) bring((step + STAGES - 1) % STAGES, step + STAGES - 1);
    end_copies();
    const T* xs = of_x[step % STAGES];
    const T* weights = of_weight[step % STAGES];
#pragma unroll
    for (int part = 0; part < STEP / 16; part++) {
      unsigned a[2][4], b[TILES][2];
#pragma unroll
      for (int tile = 0; tile < 2; tile++) {
        const int row = own_rows + tile * 16 + lane % 16;
        four_tiles(a[tile], xs + row * STEP + ((part * 2 + lane / 16) ^ row % 8) * 8);
      }
#pragma unroll
      for (int pair = 0; pair < TILES / 2; pair++) {
        const int row = own_outputs + pair * 16 + lane / 16 * 8 + lane % 8;
        unsigned four[4];
        four_tiles(four, weights + row * STEP + ((part * 2 + lane / 8 % 2) ^ row % 8) * 8);
#pragma unroll
        for (int i = 0; i < 4; i++) b[pair * 2 + i / 2][i % 2] = four[i];
      }
#pragma unroll
      for (int tile = 0; tile < 2; tile++)
#pragma unroll
        for (int i = 0; i < TILES; i++) multiply<T>(sums[tile][i], a[tile], b[i][0], b[i][1]);
    }
  }

  constexpr int KEPT = GATED ? TILES / 2 : TILES;
#pragma unroll
  for (int tile = 0; tile < 2; tile++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = own_rows + tile * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int i = 0; i < KEPT; i++)
#pragma unroll
        for (int which = 0; which < 2; which++) {
          const int output = first + warp % 2 * (MADE / 2) + i * 8 + lane % 4 * 2 + which;
          T made = static_cast<T>(sums[tile][i][half * 2 + which]);
          if constexpr (GATED) made = opened(made, static_cast<T>(sums[tile][KEPT + i][half * 2 + which]));
          if (row < rows && output < width) y[static_cast<long>(begin + row) * width + output] = made;
        }
    }
