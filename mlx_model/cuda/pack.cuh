// A warp packs a head's numbers, of which a thread has every 32nd. As `mx.quantize` does it: the end of a group's range that
// lies farther from 0 is a whole number of steps away from it, so 0 and that end are kept exactly.
template <typename T, int SIZE, int BITS, int GROUP>
__device__ void pack_head(const float* numbers, unsigned* to, int lane) {
  constexpr int EACH = GROUP / 32, GROUPS = SIZE / GROUP, LAST = (1 << BITS) - 1;
  unsigned char* const bytes = reinterpret_cast<unsigned char*>(to);
  T* const scales = reinterpret_cast<T*>(to + SIZE * BITS / 32);
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    const float* const own = numbers + group * EACH;
    float low = own[0], high = own[0];
#pragma unroll
    for (int i = 1; i < EACH; i++) {
      low = fminf(low, own[i]);
      high = fmaxf(high, own[i]);
    }
#pragma unroll
    for (int away = 16; away > 0; away /= 2) {
      low = fminf(low, __shfl_xor_sync(0xffffffffu, low, away));
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, away));
    }
    const bool is_low = fabsf(low) > fabsf(high);
    float step = fmaxf((high - low) / LAST, 1e-7f);
    step = is_low ? step : -step;
    const float edge = is_low ? low : high, steps = roundf(edge / step);
    step = steps == 0.0f ? step : edge / steps;
    const float bias = steps == 0.0f ? 0.0f : edge;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const unsigned code = static_cast<unsigned>(fminf(fmaxf(roundf((own[i] - bias) / step), 0.0f), LAST));
      const int at = (group * EACH + i) * 32 + lane;
      if constexpr (BITS == 8) {
        bytes[at] = code;
      } else {
        const unsigned next = __shfl_down_sync(0xffffffffu, code, 1);
        if (lane % 2 == 0) bytes[at / 2] = code | next << 4;
      }
    }
    if (lane == 0) {
      scales[group] = static_cast<T>(step);
      scales[GROUPS + group] = static_cast<T>(bias);
    }
  }
}
