// A warp takes a head of a row's token: its norm, weighted, and its turn by the token's position, with the roundings of
// MLX's separate operations. Heads of values are copied. PLACED: keys and values are written in place, where their row ends;
// PACKED: as codes (`pack.cuh`).
  const int lane = threadIdx.x % 32, head = (blockIdx.x * blockDim.x + threadIdx.x) / 32, token = blockIdx.y;
  if (head >= QUERIES + 2 * KEYS) return;
  const int at_once = qkv_shape[0] / offset_shape[0], row = token / at_once, at_row = token % at_once;
  const T* from = qkv + (static_cast<long>(token) * (QUERIES + 2 * KEYS) + head) * SIZE;
  constexpr int HALF = SIZE / 2, PAIRS = (HALF + 31) / 32;
  const bool is_query = head < QUERIES, is_value = head >= QUERIES + KEYS;
  const int heads = is_query ? QUERIES : KEYS, own = is_query ? head : is_value ? head - QUERIES - KEYS : head - QUERIES;
#ifdef PLACED
  const int room = is_query ? at_once : keys_shape[2], first = is_query ? 0 : padding[row] + offset[row];
#else
  const int room = at_once, first = 0;
#endif
  const long place = (static_cast<long>(row) * heads + own) * room + first + at_row;
  T low[PAIRS], high[PAIRS];
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const int at = i * 32 + lane;
    low[i] = at < HALF ? from[at] : static_cast<T>(0.0f);
    high[i] = at < HALF ? from[HALF + at] : static_cast<T>(0.0f);
  }
  if (!is_value) {
#ifdef NORMED
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      const float first = static_cast<float>(low[i]), second = static_cast<float>(high[i]);
      squares += first * first + second * second;
    }
#pragma unroll
    for (int away = 16; away > 0; away /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, away);
    const float by = rsqrtf(squares / SIZE + __int_as_float(EPS));
    const T* weights = is_query ? of_queries : of_keys;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      const int at = i * 32 + lane;
      if (at < HALF) {
        low[i] = static_cast<T>(static_cast<float>(static_cast<T>(static_cast<float>(low[i]) * by)) *
            static_cast<float>(weights[at]));
        high[i] = static_cast<T>(static_cast<float>(static_cast<T>(static_cast<float>(high[i]) * by)) *
            static_cast<float>(weights[HALF + at]));
      }
    }
#endif
    const float position = __int_as_float(SCALE) * static_cast<float>(offset[row] + at_row);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      const int at = i * 32 + lane;
#ifdef PERIODS
      const float turns = at < HALF ? static_cast<float>(1.0 / periods[at]) : 0.0f;
#else
      const float turns = exp2f(-(static_cast<float>(at) / static_cast<float>(HALF)) * __int_as_float(LOG2_BASE));
#endif
      const float angle = position * turns, cosine = cosf(angle), sine = sinf(angle);
      const float first = static_cast<float>(low[i]), second = static_cast<float>(high[i]);
      low[i] = static_cast<T>(first * cosine - second * sine);
      high[i] = static_cast<T>(first * sine + second * cosine);
    }
  }
#ifdef PACKED
  if (!is_query) {
    float numbers[2 * PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      numbers[i] = static_cast<float>(low[i]);
      numbers[PAIRS + i] = static_cast<float>(high[i]);
    }
    unsigned* const packed = const_cast<unsigned*>(is_value ? values : keys);
    pack_head<T, SIZE, BITS, GROUP>(numbers, packed + place * keys_shape[3], lane);
    return;
  }
  T* const whole = queries;
#elif defined(PLACED)
  T* const whole = is_query ? queries : const_cast<T*>(is_value ? values : keys);
#else
  T* const whole = is_query ? queries : is_value ? values : keys;
#endif
  T* const to = whole + place * SIZE;
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const int at = i * 32 + lane;
    if (at < HALF) {
      to[at] = low[i];
      to[HALF + at] = high[i];
    }
  }
