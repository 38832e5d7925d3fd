// A simdgroup packs a head's numbers, of which a thread has every 32nd. As `mx.quantize` does it: the end of a group's
// range that lies farther from 0 is a whole number of steps away from it, so 0 and that end are kept exactly.
constexpr int EACH = GROUP / 32, GROUPS = D / GROUP, LAST = (1 << BITS) - 1;
constexpr int WORDS = D * BITS / 32 + 2 * GROUPS * int(sizeof(T)) / 4;
const int lane = thread_index_in_simdgroup, head = threadgroup_position_in_grid.y, row = threadgroup_position_in_grid.z;
const bool of_keys = threadgroup_position_in_grid.x == 0;
device uint* to = (of_keys ? packed_keys : packed_values) + (row * keys_shape[1] + head) * WORDS;
device uchar* bytes = reinterpret_cast<device uchar*>(to);
device T* steps = reinterpret_cast<device T*>(to + D * BITS / 32);
for (int group = 0; group < GROUPS; group++) {
  float own[EACH], low = 0, high = 0;
  for (int i = 0; i < EACH; i++) {
    const int at = (group * EACH + i) * 32 + lane;
    own[i] = of_keys
        ? float(keys[row * keys_strides[0] + head * keys_strides[1] + at * keys_strides[3]])
        : float(values[row * values_strides[0] + head * values_strides[1] + at * values_strides[3]]);
    low = i == 0 ? own[i] : min(low, own[i]);
    high = i == 0 ? own[i] : max(high, own[i]);
  }
  low = simd_min(low);
  high = simd_max(high);
  const bool is_low = fabs(low) > fabs(high);
  float step = max((high - low) / LAST, 1e-7f);
  step = is_low ? step : -step;
  const float edge = is_low ? low : high, whole = round(edge / step);
  step = whole == 0 ? step : edge / whole;
  const float bias = whole == 0 ? 0 : edge;
  for (int i = 0; i < EACH; i++) {
    const uint code = uint(min(max(round((own[i] - bias) / step), 0.0f), float(LAST)));
    const int at = (group * EACH + i) * 32 + lane;
    if (BITS == 8) {
      bytes[at] = uchar(code);
    } else {
      const uint next = simd_shuffle_down(code, 1);
      if (lane % 2 == 0) bytes[at / 2] = uchar(code | next << 4);
    }
  }
  if (lane == 0) {
    steps[group] = static_cast<T>(step);
    steps[GROUPS + group] = static_cast<T>(bias);
  }
}
