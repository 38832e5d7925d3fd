// A warp reads 16 positions at a time for up to 16 queries of a KV head, on tensor cores, and keeps a running maximum, sum
// and weighted values of its own; in the end the block adds up its warps'. The order in which a product's numbers are added
// is free as long as both sides have the same: so each thread loads 16 bytes that lie side by side, and nothing goes
// through shared memory on the way. (Layouts: PTX ISA, "Matrix fragments for mma.m16n8k16".)
  constexpr int WARPS = THREADS / 32, QUERIES = 16, AT_A_TIME = 16;
  __shared__ float best_of[WARPS][QUERIES], sum_of[WARPS][QUERIES], values_of[WARPS][QUERIES][D];

  const int kv_heads = keys_shape[1];
  const int query_heads = queries_shape[1], shared_by = query_heads / kv_heads, at_once = queries_shape[2];
  const int of_kv_head = shared_by * at_once;  // queries: those of one head lie side by side
#ifdef BEGINNINGS  // a block's stretch is of one row's own positions, or of those with which several rows begin
  const int* const block = blocks + blockIdx.x * 8;  // as `beginnings.py` has them
  const int own_stretches = block[0], first = block[5], slot = block[6], stretches = block[7];
  if (block[4] == 0) return;  // one that is there for the shape only
  const int* const rows = members + block[3];
  const int kv_head = blockIdx.y, queries_there = block[4] * of_kv_head, count = min(QUERIES, queries_there - first);
  const int row = rows[0], low = padding[row] + begun[row], last = padding[row] + offset[row], positions = last + at_once;
  const int length = own_stretches ? (positions - low + own_stretches - 1) / own_stretches : 0;
  const int begin = own_stretches ? low + block[1] * length : block[1];
  const int end = own_stretches ? min(positions, begin + length) : block[2];
  const T* key_row = own_stretches ? keys + row * keys_strides[0] + kv_head * keys_strides[1]
                                   : before_keys + kv_head * before_keys_strides[1];
  const T* value_row = own_stretches ? values + row * values_strides[0] + kv_head * values_strides[1]
                                     : before_values + kv_head * before_values_strides[1];
  const long key_step = own_stretches ? keys_strides[2] : before_keys_strides[2];
  const long value_step = own_stretches ? values_strides[2] : before_values_strides[2];
  auto row_of = [&](int query) { return rows[query / of_kv_head]; };
#else
  const int per_head = (of_kv_head + QUERIES - 1) / QUERIES, share = (of_kv_head + per_head - 1) / per_head;
  const int row = blockIdx.z, kv_head = blockIdx.y / per_head;
  const int first = blockIdx.y % per_head * share, queries_there = of_kv_head, count = min(share, of_kv_head - first);
#ifdef IN_PLACE
  const int low = padding[row], last = low + offset[row], positions = last + at_once;  // `last`: the first query's own
#else
  const int low = 0, positions = keys_shape[2];
#endif
  const int stretches = gridDim.x, slot = blockIdx.x, length = (positions - low + stretches - 1) / stretches;
  const int begin = low + slot * length, end = min(positions, begin + length);
  const T* key_row = keys + row * keys_strides[0] + kv_head * keys_strides[1];
  const T* value_row = values + row * values_strides[0] + kv_head * values_strides[1];
  const long key_step = keys_strides[2], value_step = values_strides[2];
  auto row_of = [&](int) { return row; };
#endif
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, of = lane / 4, at = lane % 4;

#ifdef IN_PLACE
  int until[2];
#else
  const bool* seen_by[2];
#endif
  unsigned query[D / 32][2][4];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int query_there = min(first + of + half * 8, queries_there - 1), query_at = query_there % of_kv_head;
#ifdef BEGINNINGS
    until[half] = own_stretches ? min(end, last + query_at % at_once + 1) : end;
#elif defined(IN_PLACE)
    until[half] = min(end, last + query_at % at_once + 1);
#else
    seen_by[half] =
        MASKED ? reinterpret_cast<const bool*>(mask) + row * mask_strides[0] + query_at % at_once * mask_strides[2] : nullptr;
#endif
    const T* from = queries + row_of(query_there) * queries_strides[0]
        + (kv_head * shared_by + query_at / at_once) * queries_strides[1] + query_at % at_once * queries_strides[2];
#pragma unroll
    for (int chunk = 0; chunk < D / 32; chunk++) {
#pragma unroll
      for (int pair = 0; pair < 4; pair++) {
        const int number = chunk * 32 + at * 8 + pair * 2;
        query[chunk][pair / 2][half + pair % 2 * 2] =
            paired<T>(from[number * queries_strides[3]], from[(number + 1) * queries_strides[3]]);
      }
    }
  }

  // One bit for each of this thread's scores: two halves of the queries, two eights of positions, two that lie side by side.
  auto seen = [&](int base) {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int position = base + (i / 2 % 2) * 8 + at * 2 + i % 2;
#ifdef IN_PLACE
      const bool is_seen = position < until[i / 4];
#else
      const bool is_seen = position < end && (!MASKED || seen_by[i / 4][position * mask_strides[3]]);
#endif
      bits |= static_cast<unsigned>(is_seen) << i;
    }
    return bits;
  };

  float weighted[D / 64][8][4], best[2] = {-1e30f, -1e30f}, sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < D / 2; i++) weighted[i / 32][i / 4 % 8][i % 4] = 0.0f;

  // Keys and values come a round ahead, while those before are multiplied: few warps fit, and each waits for its own.
  uint4 key[2][D / 32], value[D / 64][4], next_key[2][D / 32], next_value[D / 64][4];
  auto bring = [&](int base) {
#pragma unroll
    for (int eight = 0; eight < 2; eight++) {
      const T* from = key_row + static_cast<long>(min(base + eight * 8 + of, end - 1)) * key_step + at * 8;
#pragma unroll
      for (int chunk = 0; chunk < D / 32; chunk++) next_key[eight][chunk] = read_often(from + chunk * 32);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int position = base + i / 2 * 8 + at * 2 + i % 2;
      const T* from = value_row + static_cast<long>(min(position, end - 1)) * value_step + of * 8;
#pragma unroll
      for (int half = 0; half < D / 64; half++) next_value[half][i] = read_often(from + half * 64);
    }
  };

  const int own = begin + warp * AT_A_TIME;
  unsigned next_seen = 0;
  if (own < end) {
    next_seen = seen(own);
    bring(own);
  }
  for (int base = own; base < end; base += WARPS * AT_A_TIME) {
    const unsigned is_seen = next_seen;
#pragma unroll
    for (int i = 0; i < D / 16; i++) key[i % 2][i / 2] = next_key[i % 2][i / 2];
#pragma unroll
    for (int i = 0; i < D / 16; i++) value[i / 4][i % 4] = next_value[i / 4][i % 4];
    if (base + WARPS * AT_A_TIME < end) {
      next_seen = seen(base + WARPS * AT_A_TIME);
      bring(base + WARPS * AT_A_TIME);
    }
    if (!__any_sync(0xffffffffu, is_seen != 0)) continue;
    float score[2][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < D / 32; chunk++) {
#pragma unroll
      for (int eight = 0; eight < 2; eight++) {
        multiply<T>(score[eight], query[chunk][0], key[eight][chunk].x, key[eight][chunk].y);
        multiply<T>(score[eight], query[chunk][1], key[eight][chunk].z, key[eight][chunk].w);
      }
    }
    bool is_better = false;
    float less[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float top = best[half];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float& each = score[i / 2][half * 2 + i % 2];
        each = is_seen >> (half * 4 + i) & 1 ? each * __int_as_float(SCALE) : -1e30f;
        top = fmaxf(top, each);
      }
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      is_better = is_better || top > best[half];
      less[half] = exp2f(best[half] - top);
      best[half] = top;
      sums[half] *= less[half];
    }
    if (__any_sync(0xffffffffu, is_better)) {
#pragma unroll
      for (int i = 0; i < D / 2; i++) weighted[i / 32][i / 4 % 8][i % 4] *= less[i % 4 / 2];
    }
    // A weight is what T can hold of it, and what is left of it: both together have the bits that a float's product has.
    unsigned weight[4], rest[4];
#pragma unroll
    for (int eight = 0; eight < 2; eight++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float two[2];
        T kept[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const bool counts = is_seen >> (half * 4 + eight * 2 + i) & 1;
          two[i] = counts ? exp2f(score[eight][half * 2 + i] - best[half]) : 0.0f;
          kept[i] = static_cast<T>(two[i]);
          sums[half] += two[i];
        }
        weight[eight * 2 + half] = paired<T>(kept[0], kept[1]);
        rest[eight * 2 + half] = paired<T>(
            static_cast<T>(two[0] - static_cast<float>(kept[0])), static_cast<T>(two[1] - static_cast<float>(kept[1])));
      }
    }
#pragma unroll
    for (int half = 0; half < D / 64; half++) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const unsigned which = i % 2 ? 0x7632u : 0x5410u;
        const unsigned low = __byte_perm(word(value[half][0], i / 2), word(value[half][1], i / 2), which);
        const unsigned high = __byte_perm(word(value[half][2], i / 2), word(value[half][3], i / 2), which);
        multiply<T>(weighted[half][i], weight, low, high);
        multiply<T>(weighted[half][i], rest, low, high);
      }
    }
  }

#pragma unroll
  for (int half = 0; half < 2; half++) {
    sums[half] += __shfl_xor_sync(0xffffffffu, sums[half], 1);
    sums[half] += __shfl_xor_sync(0xffffffffu, sums[half], 2);
    if (at == 0) {
      best_of[warp][of + half * 8] = best[half];
      sum_of[warp][of + half * 8] = sums[half];
    }
  }
#pragma unroll
  for (int i = 0; i < D / 2; i++)
    values_of[warp][of + i % 4 / 2 * 8][i / 32 * 64 + (at * 2 + i % 2) * 8 + i / 4 % 8] = weighted[i / 32][i / 4 % 8][i % 4];
  __syncthreads();
  for (int each = threadIdx.x; each < count * D; each += THREADS) {
    const int h = each / D, number = each % D;
    float top = -1e30f, sum = 0.0f, total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, best_of[w][h]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float by = exp2f(best_of[w][h] - top);
      sum += sum_of[w][h] * by;
      total += values_of[w][h][number] * by;
    }
    const int query_at = first + h;
    const long of_row = static_cast<long>(row_of(query_at)) * kv_heads + kv_head;
    const long to = (of_row * of_kv_head + query_at % of_kv_head) * stretches + slot;
    part[to * D + number] = total;
    if (number == 0) {
      about[to * 2] = top;
      about[to * 2 + 1] = sum;
    }
  }
