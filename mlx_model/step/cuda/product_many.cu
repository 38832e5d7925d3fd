// y = x W^T for more rows than a block of `product.cu` takes. A block has all rows, 64 for each of its warpgroups, OUTPUTS
// outputs, with GATED half of them of each half of the weights, and one of SPLITS stretches of the inputs: if there are
// several, y has the sums of each, which `product_sum.cu` adds up. What it multiplies comes into shared memory 64 inputs
// at a time, STAGES - 2 such steps ahead. A row of a step is 128 bytes, whose eighths are swapped by the row's number
// (`warpgroups.cuh`).
  constexpr int STEP = 64, ROWS = GROUPS * 64, MADE = GATED ? OUTPUTS / 2 : OUTPUTS, STAGE = (ROWS + OUTPUTS) * STEP;
  extern __shared__ unsigned char memory[];
  T* const stages = reinterpret_cast<T*>(memory + (-__cvta_generic_to_shared(memory) & 1023));
  const int rows = x_shape[0], inputs = x_shape[1], outputs = weight_shape[0], width = GATED ? outputs / 2 : outputs;
  const int all_steps = inputs / STEP, per_split = (all_steps + SPLITS - 1) / SPLITS;
  const int before = blockIdx.y * per_split, steps = min(per_split, all_steps - before);
  const int first = blockIdx.x * MADE, group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;

  // A thread brings an eighth of a row, of every so many rows.
  const int piece = threadIdx.x % 8, from_row = threadIdx.x / 8;
  auto bring = [&](int step) {
    T* const to = stages + step % STAGES * STAGE;
    const long at = static_cast<long>(before + step) * STEP + piece * 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = from_row + i * GROUPS * 16;
      copy_ahead(to + row * STEP + (piece ^ row % 8) * 8, x + static_cast<long>(min(row, rows - 1)) * inputs + at);
    }
#pragma unroll
    for (int i = 0; i < (OUTPUTS + GROUPS * 16 - 1) / (GROUPS * 16); i++) {
      const int row = from_row + i * GROUPS * 16;
      if (OUTPUTS % (GROUPS * 16) && row >= OUTPUTS) break;
      const int output = min(first + row % MADE, width - 1) + row / MADE * width;  // first the gate, then what it opens
      copy_ahead(to + (ROWS + row) * STEP + (piece ^ row % 8) * 8, weight + static_cast<long>(output) * inputs + at);
    }
  };

  float sums[OUTPUTS / 2] = {};
#pragma unroll
  for (int step = 0; step < STAGES - 2; step++) {
    if (step < steps) bring(step);
    end_copies();
  }
  for (int step = 0; step < steps; step++) {
    wait_for_copies<STAGES - 3>();
    wait_for_products<1>();  // those of two steps before, whose place the next copies take
    before_products();
    __syncthreads();
    if (step + STAGES - 2 < steps) bring(step + STAGES - 2);
    end_copies();
    const T* const stage = stages + step % STAGES * STAGE;
    const unsigned long long a = described(stage + group * 64 * STEP), b = described(stage + ROWS * STEP);
    begin_products();
#pragma unroll
    for (int part = 0; part < STEP / 16; part++) multiply_from_shared<T, OUTPUTS>(sums, a + part * 2, b + part * 2);
    end_products();
  }
  wait_for_products<0>();

  const bool in_pairs = width % 2 == 0;
#pragma unroll
  for (int i = 0; i < MADE / 2; i += 2) {
    const int row = group * 64 + warp * 16 + i / 2 % 2 * 8 + lane / 4, output = first + i / 4 * 8 + lane % 4 * 2;
    if (row >= rows || output >= width) continue;
    if constexpr (SPLITS > 1) {
      auto* const to = y + (static_cast<long>(blockIdx.y) * rows + row) * width + output;
      *reinterpret_cast<float2*>(to) = {sums[i], sums[i + 1]};
    } else {
      T made[2];
#pragma unroll
      for (int which = 0; which < 2; which++) {
        made[which] = static_cast<T>(sums[i + which]);
        if constexpr (GATED) made[which] = opened(made[which], static_cast<T>(sums[MADE / 2 + i + which]));
      }
      auto* const to = y + static_cast<long>(row) * width + output;
      if (in_pairs) {
        *reinterpret_cast<unsigned*>(to) = paired<T>(made[0], made[1]);
      } else {
        to[0] = made[0];
        if (output + 1 < width) to[1] = made[1];
      }
    }
  }
