// y = x W^T for few rows. A block computes OUTPUTS outputs of up to ROWS rows, in tiles of 16, with GATED half of them of
// each half of the weights. Its warps take turns at the inputs, some steps of 32 at a time, and their sums are added up in
// the end. Which input is which of a tile's 16 does not matter, if weights and x agree: so a thread
// reads eight in a row of both, and multiplies twice.
  constexpr int PER = 8, TILES = ROWS / 8, MADE = GATED ? OUTPUTS / 2 : OUTPUTS;
  const int begin = blockIdx.y * ROWS, rows = min(ROWS, x_shape[0] - begin);
  const int inputs = x_shape[1], outputs = weight_shape[0];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, place = lane % 4;
  const int first = blockIdx.x * MADE;

  const T* weights[OUTPUTS / 8];
#pragma unroll
  for (int i = 0; i < OUTPUTS / 8; i++) {
    const int which = i * 8, output = first + group + which % MADE + which / MADE * (outputs / 2);
    weights[i] = weight + static_cast<long>(min(output, outputs - 1)) * inputs + place * PER;
  }
  const T* xs[TILES];
#pragma unroll
  for (int i = 0; i < TILES; i++)
    xs[i] = x + static_cast<long>(begin + min(i * 8 + group, rows - 1)) * inputs + place * PER;

  float sums[OUTPUTS / 16][TILES][4] = {};
  // `at_once` steps: all that they read is asked for before it is multiplied.
  auto add = [&](auto at_once, int from) {
    constexpr int AT_ONCE = decltype(at_once)::value;
    uint4 w[AT_ONCE][OUTPUTS / 8], v[AT_ONCE][TILES];
#pragma unroll
    for (int next = 0; next < AT_ONCE; next++) {
#pragma unroll
      for (int i = 0; i < OUTPUTS / 8; i++) w[next][i] = read_once(weights[i] + from + next * 32);
#pragma unroll
      for (int i = 0; i < TILES; i++) v[next][i] = read_often(xs[i] + from + next * 32);
    }
#pragma unroll
    for (int next = 0; next < AT_ONCE; next++)
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int tile = 0; tile < OUTPUTS / 16; tile++) {
          const uint4 &low = w[next][2 * tile], &high = w[next][2 * tile + 1];
          const unsigned a[4] = {
              word(low, 2 * half), word(high, 2 * half), word(low, 2 * half + 1), word(high, 2 * half + 1)};
#pragma unroll
          for (int i = 0; i < TILES; i++)
            multiply<T>(sums[tile][i], a, word(v[next][i], 2 * half), word(v[next][i], 2 * half + 1));
        }
  };
  const int whole = inputs / (32 * AHEAD);
  for (int at = warp; at < whole; at += WARPS) add(cuda::std::integral_constant<int, AHEAD>{}, at * 32 * AHEAD);
  for (int at = whole * AHEAD + warp; at < inputs / 32; at += WARPS)
    add(cuda::std::integral_constant<int, 1>{}, at * 32);

  __shared__ float parts[WARPS][ROWS][OUTPUTS + 1];  // one more, lest columns share a bank
  const int width = GATED ? outputs / 2 : outputs;
#pragma unroll
  for (int tile = 0; tile < OUTPUTS / 16; tile++)
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int which = 0; which < 4; which++)
        parts[warp][i * 8 + place * 2 + which % 2][tile * 16 + group + which / 2 * 8] = sums[tile][i][which];
  __syncthreads();
  for (int at = threadIdx.x; at < rows * MADE; at += 32 * WARPS) {
    const int row = at / MADE, output = at % MADE;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) total += parts[i][row][output];
    T made = static_cast<T>(total);
    if constexpr (GATED) {
      float up = 0.0f;
#pragma unroll
      for (int i = 0; i < WARPS; i++) up += parts[i][row][MADE + output];
      made = opened(made, static_cast<T>(up));
    }
    if (first + output < width) y[static_cast<long>(begin + row) * width + first + output] = made;
  }
