// A block sums one row: it writes this rank's part into each other rank's memory, tells that it has, waits for theirs,
// and adds up in the order of ranks, so that all of them have the same bits. `places`: each rank's memory as this one
// reaches it: counts of this rank's turns by row, then by rank and row what others tell, then their parts. Rows have
// two places of each rank, and take turns: a rank can be one turn ahead of another, and never two.
  constexpr int PER = 16 / sizeof(T), TOLD = ROWS, PARTS = (1 + WORLD) * ROWS * 4;
  const int row = blockIdx.x, at = threadIdx.x, width = parts_shape[1];
  const bool has = at * PER < width;
  unsigned* own = reinterpret_cast<unsigned*>(places[RANK]);
  const unsigned turn = own[row] + 1;
  const long slot = static_cast<long>(turn & 1) * WORLD;
  uint4 mine = make_uint4(0, 0, 0, 0);
  if (has) {
    mine = reinterpret_cast<const uint4*>(parts + static_cast<long>(row) * width)[at];
#pragma unroll
    for (int rank = 0; rank < WORLD; rank++)
      if (rank != RANK)
        reinterpret_cast<uint4*>(places[rank] + PARTS + ((slot + RANK) * ROWS + row) * CHUNK)[at] = mine;
  }
  __syncthreads();
  if (at < WORLD && at != RANK) {
    unsigned* there = reinterpret_cast<unsigned*>(places[at]) + TOLD + RANK * ROWS + row;
    const unsigned* here = own + TOLD + at * ROWS + row;
    __threadfence_system();
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(there), "r"(turn) : "memory");
    unsigned told, asked = 0;
    long long now, began;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));  // in ns
    do {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(told) : "l"(here) : "memory");
      if (++asked % 256 == 0) {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (now - began > PATIENCE_S * 1000000000ll) {
          if (!TRIES) __trap();  // what follows would be wrong
          break;
        }
      }
    } while (static_cast<int>(told - turn) < 0);
  }
  __syncthreads();
  if (at == 0) own[row] = turn;

  float total[PER] = {};
  if (has) {
#pragma unroll
    for (int rank = 0; rank < WORLD; rank++) {
      uint4 part = mine;
      if (rank != RANK)
        part = __ldcg(reinterpret_cast<const uint4*>(places[RANK] + PARTS + ((slot + rank) * ROWS + row) * CHUNK) + at);
      const T* numbers = reinterpret_cast<const T*>(&part);
#pragma unroll
      for (int i = 0; i < PER; i++) total[i] += static_cast<float>(numbers[i]);
    }
  }
  alignas(16) T made[PER];
#pragma unroll
  for (int i = 0; i < PER; i++) made[i] = static_cast<T>(total[i]);
#ifndef NORMED
  if (has) reinterpret_cast<uint4*>(out + static_cast<long>(row) * width)[at] = *reinterpret_cast<uint4*>(made);
#else
  const long from = static_cast<long>(row) * width;
  add_and_norm<THREADS, PER>(made, width, __int_as_float(EPS), fed + from, norm, out + from, normed + from);
#endif
