// As `mx.quantize` does it: the end of a group's range that lies farther from 0 is a whole number of steps away from it,
// so 0 and that end are kept exactly. A warp packs one head's numbers, some that lie side by side a thread.
  constexpr int OWN = D / 32, LANES = GROUP / OWN, WORDS = D * BITS / 32, LAST = (1 << BITS) - 1;
  const bool of_keys = blockIdx.x == 0;
  const int head = blockIdx.y, row = blockIdx.z, heads = keys_shape[1], lane = threadIdx.x;
  const T* from = of_keys ? keys + row * keys_strides[0] + head * keys_strides[1]
                          : values + row * values_strides[0] + head * values_strides[1];
  const long apart = of_keys ? keys_strides[3] : values_strides[3];
  unsigned* to = (of_keys ? packed_keys : packed_values)
      + (static_cast<long>(row) * heads + head) * (WORDS + 2 * (D / GROUP) * sizeof(T) / 4);

  float numbers[OWN], low, high;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    numbers[i] = static_cast<float>(from[(lane * OWN + i) * apart]);
    low = i ? fminf(low, numbers[i]) : numbers[i];
    high = i ? fmaxf(high, numbers[i]) : numbers[i];
  }
#pragma unroll
  for (int away = LANES / 2; away > 0; away /= 2) {
    low = fminf(low, __shfl_xor_sync(0xffffffffu, low, away));
    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, away));
  }
  const bool is_low = fabsf(low) > fabsf(high);
  float step = fmaxf((high - low) / LAST, 1e-7f);
  step = is_low ? step : -step;
  const float edge = is_low ? low : high, steps = roundf(edge / step);
  step = steps == 0.0f ? step : edge / steps;
  const float bias = steps == 0.0f ? 0.0f : edge;

  unsigned char* bytes = reinterpret_cast<unsigned char*>(to) + lane * OWN * BITS / 8;
#pragma unroll
  for (int i = 0; i < OWN; i += 8 / BITS) {
    unsigned code = 0;
#pragma unroll
    for (int j = 0; j < 8 / BITS; j++)
      code |= static_cast<unsigned>(fminf(fmaxf(roundf((numbers[i + j] - bias) / step), 0.0f), LAST)) << (j * BITS);
    bytes[i * BITS / 8] = code;
  }
  if (lane % LANES == 0) {
    T* scales = reinterpret_cast<T*>(to + WORDS);
    scales[lane / LANES] = static_cast<T>(step);
    scales[D / GROUP + lane / LANES] = static_cast<T>(bias);
  }
