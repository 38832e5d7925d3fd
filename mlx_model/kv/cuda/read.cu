// A group's scores of `AHEAD` positions and `HEADS` queries lie spread over its threads, so each power is computed once; a
// thread has those of the same queries each time, and keeps its share of their maxima and sums.
  constexpr int LANES = D / 8, ABREAST = 32 / LANES, WARPS = THREADS / 32;
  constexpr int AHEAD = BITS ? 8 : 4;  // packed, twice as many are as many bytes under way
  constexpr int SLOTS = WARPS * ABREAST, STEP = ABREAST * AHEAD, SCORES = AHEAD * HEADS;
  constexpr int OWN = SCORES > LANES ? SCORES / LANES : 1, ALIKE = SCORES > LANES ? 1 : LANES / SCORES;
  __shared__ float best_of[SLOTS][HEADS], sum_of[SLOTS][HEADS], values_of[SLOTS][HEADS][D];
  __shared__ float weight_of[SLOTS][AHEAD][HEADS], less_of[SLOTS][HEADS];

  const int kv_heads = keys_shape[1];
  const int query_heads = queries_shape[1], shared_by = query_heads / kv_heads;
  const int at_once = queries_shape[2];  // no constant: a kernel takes seconds to compile
  const int of_kv_head = shared_by * at_once;  // queries: those of one head lie side by side
  const int per_head = (of_kv_head + HEADS - 1) / HEADS;
  const int row = blockIdx.z, kv_head = blockIdx.y / per_head;
  const int first = (blockIdx.y % per_head) * HEADS, count = min(HEADS, of_kv_head - first);
#ifdef IN_PLACE
  const int low = padding[row], last = low + offset[row], positions = last + at_once;  // `last`: the first query's own
#else
  const int low = 0, positions = keys_shape[2];
#endif
  const int stretches = gridDim.x, length = (positions - low + stretches - 1) / stretches;
  const int begin = low + blockIdx.x * length, end = min(positions, begin + length);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, at = lane % LANES, side = lane / LANES;
  const int slot = warp * ABREAST + side;
  const int own = at / ALIKE * OWN, own_ahead = own / HEADS, own_head = own % HEADS;

  const long size = BITS ? 4 : sizeof(T);
  const char* key_row =
      reinterpret_cast<const char*>(keys) + (row * keys_strides[0] + kv_head * keys_strides[1]) * size;
  const char* value_row =
      reinterpret_cast<const char*>(values) + (row * values_strides[0] + kv_head * values_strides[1]) * size;
  const long key_step = keys_strides[2] * size, value_step = values_strides[2] * size;

  float query[HEADS][8], query_sum[HEADS], weighted[HEADS][8], best[OWN], sums[OWN];
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    const int query_at = min(first + h, of_kv_head - 1);
    const T* from = queries + row * queries_strides[0] + (kv_head * shared_by + query_at / at_once) * queries_strides[1]
        + query_at % at_once * queries_strides[2];
    query_sum[h] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      query[h][i] = static_cast<float>(from[(at * 8 + i) * queries_strides[3]]) * __int_as_float(SCALE);
      query_sum[h] += query[h][i];
      weighted[h][i] = 0.0f;
    }
  }
#ifdef IN_PLACE
  int until[OWN];
#else
  const bool* seen_by[OWN];
#endif
#pragma unroll
  for (int o = 0; o < OWN; o++) {
    best[o] = -1e30f;
    sums[o] = 0.0f;
    const int which = min(first + own_head + o, of_kv_head - 1) % at_once;
#ifdef IN_PLACE
    until[o] = min(end, last + which + 1);
#else
    seen_by[o] = MASKED ? reinterpret_cast<const bool*>(mask) + row * mask_strides[0] + which * mask_strides[2] : nullptr;
#endif
  }

  for (int base = begin + warp * STEP; base < end; base += WARPS * STEP) {
    const int own_position = base + own_ahead * ABREAST + side;
    bool is_seen[OWN], any = false;
#pragma unroll
    for (int o = 0; o < OWN; o++) {
#ifdef IN_PLACE
      is_seen[o] = own_position < until[o];
#else
      is_seen[o] = own_position < end && (!MASKED || seen_by[o][own_position * mask_strides[3]]);
#endif
      any = any || is_seen[o];
    }
    if (!__any_sync(0xffffffffu, any)) continue;
    Eight<T, D, BITS, GROUP> key[AHEAD], value[AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      long position = min(base + u * ABREAST + side, end - 1);
      key[u].load(key_row + position * key_step, at);
      value[u].load(value_row + position * value_step, at);
    }
    float score[SCORES];
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      float numbers[8];
      key[u].codes(numbers);
#pragma unroll
      for (int h = 0; h < HEADS; h++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += query[h][i] * numbers[i];
        if (BITS) sum = sum * static_cast<float>(key[u].scale) + query_sum[h] * static_cast<float>(key[u].bias);
        score[u * HEADS + h] = sum;
      }
    }
    sums_over<SCORES, LANES>(score, at);
    bool is_better = false;
    float top[OWN];
#pragma unroll
    for (int o = 0; o < OWN; o++) {
      if (!is_seen[o]) score[o] = -1e30f;
      top[o] = fmaxf(best[o], score[o]);
#pragma unroll
      for (int apart = HEADS * ALIKE / OWN; apart < LANES; apart *= 2)
        top[o] = fmaxf(top[o], __shfl_xor_sync(0xffffffffu, top[o], apart));
      is_better = is_better || top[o] > best[o];
    }
    const bool rescales = __any_sync(0xffffffffu, is_better);
    if (at % ALIKE == 0) {
#pragma unroll
      for (int o = 0; o < OWN; o++) {
        float less = exp2f(best[o] - top[o]), weight = is_seen[o] ? exp2f(score[o] - top[o]) : 0.0f;
        best[o] = top[o];
        sums[o] = sums[o] * less + weight;
        weight_of[slot][own_ahead][own_head + o] = weight;
        if (own_ahead == 0) less_of[slot][own_head + o] = less;
      }
    } else {
#pragma unroll
      for (int o = 0; o < OWN; o++) best[o] = top[o];
    }
    __syncwarp();
    if (rescales) {
#pragma unroll
      for (int h = 0; h < HEADS; h++) {
        float less = less_of[slot][h];
#pragma unroll
        for (int i = 0; i < 8; i++) weighted[h][i] *= less;
      }
    }
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      float numbers[8];
      value[u].codes(numbers);
      if (BITS) {
#pragma unroll
        for (int i = 0; i < 8; i++)
          numbers[i] = numbers[i] * static_cast<float>(value[u].scale) + static_cast<float>(value[u].bias);
      }
#pragma unroll
      for (int h = 0; h < HEADS; h++) {
        float weight = weight_of[slot][u][h];
#pragma unroll
        for (int i = 0; i < 8; i++) weighted[h][i] += weight * numbers[i];
      }
    }
    __syncwarp();
  }

#pragma unroll
  for (int o = 0; o < OWN; o++) {
#pragma unroll
    for (int apart = HEADS * ALIKE / OWN; apart < LANES; apart *= 2)
      sums[o] += __shfl_xor_sync(0xffffffffu, sums[o], apart);
    if (own_ahead == 0 && at % ALIKE == 0) {
      best_of[slot][own_head + o] = best[o];
      sum_of[slot][own_head + o] = sums[o];
    }
  }
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
#pragma unroll
    for (int i = 0; i < 8; i++) values_of[slot][h][at * 8 + i] = weighted[h][i];
  }
  __syncthreads();
  for (int each = threadIdx.x; each < count * D; each += THREADS) {
    int h = each / D, number = each % D;
    float top = -1e30f, sum = 0.0f, total = 0.0f;
    for (int s = 0; s < SLOTS; s++) top = fmaxf(top, best_of[s][h]);
    for (int s = 0; s < SLOTS; s++) {
      float by = exp2f(best_of[s][h] - top);
      sum += sum_of[s][h] * by;
      total += values_of[s][h][number] * by;
    }
    long of = ((static_cast<long>(row) * kv_heads + kv_head) * of_kv_head + first + h) * stretches + blockIdx.x;
    part[of * D + number] = total;
    if (number == 0) {
      about[of * 2] = top;
      about[of * 2 + 1] = sum;
    }
  }
