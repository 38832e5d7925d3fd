// Attention of up to HEADS queries that share a KV head, over a stretch of one row's packed positions.
//
// A simdgroup reads every SIMDS-th position, a thread D / 32 numbers of it, and keeps a running maximum, sum and weighted
// values (online softmax: arXiv 1805.02867); in the end the threadgroup adds up its simdgroups'. Powers are of two.
constexpr int PER = D / 32, PARTS = (SHARED_BY + HEADS - 1) / HEADS;
const int lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
const int stretch = threadgroup_position_in_grid.x, row = threadgroup_position_in_grid.z;
const int kv_head = threadgroup_position_in_grid.y / PARTS;
const int first = threadgroup_position_in_grid.y % PARTS * HEADS;
const int at_once = queries_shape[2], shared_by = queries_shape[1] / keys_shape[1], positions = keys_shape[2];
const int length = (positions + STRETCHES - 1) / STRETCHES;
const int begin = stretch * length, end = min(positions, begin + length);

float q[HEADS][PER], whole[HEADS], o[HEADS][PER], most[HEADS], sum[HEADS];
for (int h = 0; h < HEADS; h++) {
  const int own = min(first + h, SHARED_BY - 1);
  const int64_t from = row * queries_strides[0] + (kv_head * shared_by + own / at_once) * queries_strides[1] +
      own % at_once * queries_strides[2];
  whole[h] = 0;
  for (int i = 0; i < PER; i++) {
    q[h][i] = float(queries[from + (lane * PER + i) * queries_strides[3]]) * scale;
    whole[h] += q[h][i];
    o[h][i] = 0;
  }
  most[h] = -3.0e38f;
  sum[h] = 0;
}

for (int at = begin + simd; at < end; at += SIMDS) {
  bool seen[HEADS], any = false;
  for (int h = 0; h < HEADS; h++) {
    const int query = min(first + h, SHARED_BY - 1) % at_once;
    seen[h] = !MASKED || mask[row * mask_strides[0] + query * mask_strides[2] + at * mask_strides[3]];
    any = any || seen[h];
  }
  if (!any) continue;
  Packed<T, D, BITS, GROUP> key, value;
  key.load(keys + row * keys_strides[0] + kv_head * keys_strides[1] + at * keys_strides[2], lane);
  value.load(values + row * values_strides[0] + kv_head * values_strides[1] + at * values_strides[2], lane);
  for (int h = 0; h < HEADS; h++) {
    if (!seen[h]) continue;
    float score = key.bias * whole[h];
    for (int i = 0; i < PER; i++) score += key.step * q[h][i] * key.codes[i];
    score = simd_sum(score);
    const float higher = max(most[h], score), factor = exp2(most[h] - higher), weight = exp2(score - higher);
    most[h] = higher;
    sum[h] = sum[h] * factor + weight;
    for (int i = 0; i < PER; i++) {
      o[h][i] = o[h][i] * factor + weight * (value.step * value.codes[i] + value.bias);
    }
  }
}

threadgroup float of_all[SIMDS][D], most_of[SIMDS], sum_of[SIMDS];
for (int h = 0; h < HEADS; h++) {
  for (int i = 0; i < PER; i++) of_all[simd][lane * PER + i] = o[h][i];
  if (lane == 0) {
    most_of[simd] = most[h];
    sum_of[simd] = sum[h];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float highest = most_of[0];
  for (int s = 1; s < SIMDS; s++) highest = max(highest, most_of[s]);
  for (int d = simd * 32 + lane; d < D; d += SIMDS * 32) {
    float numbers = 0, weights = 0;
    for (int s = 0; s < SIMDS; s++) {
      const float factor = exp2(most_of[s] - highest);
      numbers += of_all[s][d] * factor;
      weights += sum_of[s] * factor;
    }
    const int own = first + h;
    if (own < SHARED_BY) {
      const int head = row * queries_shape[1] + kv_head * shared_by + own / at_once;
      const int64_t place = int64_t(head) * at_once + own % at_once;
#ifdef WHOLE
      out[place * D + d] = static_cast<T>(weights == 0 ? 0 : numbers / weights);
#else
      part[(place * STRETCHES + stretch) * D + d] = numbers;
      if (d == 0) {
        about[(place * STRETCHES + stretch) * 2] = highest;
        about[(place * STRETCHES + stretch) * 2 + 1] = weights;
      }
#endif
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
