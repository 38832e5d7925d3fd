// A block draws the token of a row and tells its log-probability. Each of its warps has a stretch of the vocabulary; what
// the chances of a stretch add up to is made in one pass over the logits. The stretch where the sum of all chances before
// reaches a uniform number's share is looked through again, in as many stretches; and the one of these where it does
// so by one warp, in the order of ids.
  constexpr int WARPS = 32, AHEAD = 4;
  constexpr unsigned ALL = 0xffffffff;
  constexpr float LOG2E = 1.4426950408889634f, NONE = -1e30f;
  const int vocab = logits_shape[1], lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T* const row = logits + static_cast<long>(blockIdx.x) * vocab;
#ifdef TEMPERED
  const float by = inverse[blockIdx.x] * LOG2E;
#else
  const float by = LOG2E;
#endif
  __shared__ float mosts[WARPS], sums[WARPS], chances[WARPS], most_of_all, log_of_sum, left;
  __shared__ int chosen;

  // Numbers that lie side by side are read as one.
  struct alignas(PER * sizeof(T)) Piece { T numbers[PER]; };
  const int pieces = vocab / PER, each = (pieces + WARPS - 1) / WARPS;
  const int first = min(warp * each, pieces), last = min(first + each, pieces);
  const Piece* const all = reinterpret_cast<const Piece*>(row);
  float most = NONE, sum = 0.0f, chance = 0.0f;
  for (int from = first + lane; from < last; from += 32 * AHEAD) {
    Piece read[AHEAD];
#pragma unroll
    for (int next = 0; next < AHEAD; next++)
      if (from + next * 32 < last) read[next] = all[from + next * 32];
#pragma unroll
    for (int next = 0; next < AHEAD; next++) {
      if (from + next * 32 >= last) break;
      float top = static_cast<float>(read[next].numbers[0]);
#pragma unroll
      for (int i = 1; i < PER; i++) top = fmaxf(top, static_cast<float>(read[next].numbers[i]));
      if (top > most) {
        sum *= exp2f((most - top) * LOG2E);
        chance *= exp2f((most - top) * by);
        most = top;
      }
#pragma unroll
      for (int i = 0; i < PER; i++) {
        const float behind = static_cast<float>(read[next].numbers[i]) - most;
        sum += exp2f(behind * LOG2E);
#ifdef TEMPERED
        chance += exp2f(behind * by);
#endif
      }
    }
  }
#ifndef TEMPERED
  chance = sum;
#endif
#pragma unroll
  for (int away = 16; away > 0; away /= 2) {
    const float other = __shfl_xor_sync(ALL, most, away), both = fmaxf(most, other);
    sum = sum * exp2f((most - both) * LOG2E) + __shfl_xor_sync(ALL, sum, away) * exp2f((other - both) * LOG2E);
    chance = chance * exp2f((most - both) * by) + __shfl_xor_sync(ALL, chance, away) * exp2f((other - both) * by);
    most = both;
  }
  if (lane == 0) mosts[warp] = most, sums[warp] = sum, chances[warp] = chance;
  __syncthreads();

  // Of 32 chances, in order: which one a share of their sum falls into, and what is left of it there.
  auto choose = [&](float own, float share) {
    float before = own;
#pragma unroll
    for (int away = 1; away < 32; away *= 2) {
      const float other = __shfl_up_sync(ALL, before, away);
      if (lane >= away) before += other;
    }
    const float wanted = share < 0.0f ? -share * __shfl_sync(ALL, before, 31) : share;
    const unsigned behind = __ballot_sync(ALL, before > wanted && own > 0.0f);
    const unsigned some = __ballot_sync(ALL, own > 0.0f);
    const int which = behind ? __ffs(behind) - 1 : some ? 31 - __clz(some) : 0;  // sums that are made anew round anew
    const float rest = wanted - (__shfl_sync(ALL, before, which) - __shfl_sync(ALL, own, which));
    if (lane == 0) chosen = which, left = fmaxf(rest, 0.0f);
  };
  if (warp == 0) {
    float top = mosts[lane];
#pragma unroll
    for (int away = 16; away > 0; away /= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, away));
    float total = sums[lane] * exp2f((mosts[lane] - top) * LOG2E);
#pragma unroll
    for (int away = 16; away > 0; away /= 2) total += __shfl_xor_sync(ALL, total, away);
    if (lane == 0) most_of_all = top, log_of_sum = logf(total);
    const float share = uniforms[blockIdx.x];
    choose(chances[lane] * exp2f((mosts[lane] - top) * by), share > 0.0f ? -share : 0.0f);
  }
  __syncthreads();

  const int begin = min(chosen * each, pieces) * PER, end = min(chosen * each + each, pieces) * PER;
  const int part = (end - begin + WARPS - 1) / WARPS;
  const int own_end = min(begin + (warp + 1) * part, end);
  float own = 0.0f;
  for (int at = begin + warp * part + lane; at < own_end; at += 32)
    own += exp2f((static_cast<float>(row[at]) - most_of_all) * by);
#pragma unroll
  for (int away = 16; away > 0; away /= 2) own += __shfl_xor_sync(ALL, own, away);
  __syncthreads();  // `chosen` has been read, and `left` will be before both are written
  if (lane == 0) chances[warp] = own;
  __syncthreads();
  if (warp == 0) {
    const float wanted = left;
    __syncwarp();
    choose(chances[lane], wanted);
    __syncwarp();
    const int from = begin + chosen * part, to = min(from + part, end);
    float before = 0.0f;
    const float rest = left;
    int token = -1, latest = min(from, vocab - 1);
    for (int at = from; at < to && token < 0; at += 32) {
      const int id = at + lane;
      const float one = id < to ? exp2f((static_cast<float>(row[id]) - most_of_all) * by) : 0.0f;
      float sum_so_far = one;
#pragma unroll
      for (int away = 1; away < 32; away *= 2) {
        const float other = __shfl_up_sync(ALL, sum_so_far, away);
        if (lane >= away) sum_so_far += other;
      }
      const unsigned behind = __ballot_sync(ALL, before + sum_so_far > rest && one > 0.0f);
      const unsigned some = __ballot_sync(ALL, one > 0.0f);
      if (behind) token = at + __ffs(behind) - 1;
      if (some) latest = at + 31 - __clz(some);
      before += __shfl_sync(ALL, sum_so_far, 31);
    }
    if (lane == 0) {
      const int id = token < 0 ? latest : token;
      tokens[blockIdx.x] = id;
      logprobs[blockIdx.x] = static_cast<float>(row[id]) - most_of_all - log_of_sum;
    }
  }
