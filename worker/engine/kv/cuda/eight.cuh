// Eight numbers as they are stored, then as floats. `at`: which eight of the head's.
template <typename T, int D, int BITS, int GROUP>
struct Eight {
  static constexpr int words = BITS ? BITS / 4 : sizeof(T) * 2;
  unsigned raw[words];
  T scale, bias;

  __device__ void load(const char* position, int at) {
    if constexpr (BITS == 0) {
      const uint4* from = reinterpret_cast<const uint4*>(position + at * 8 * sizeof(T));
#pragma unroll
      for (int i = 0; i < words / 4; i++) {
        uint4 four = from[i];
        raw[4 * i] = four.x; raw[4 * i + 1] = four.y; raw[4 * i + 2] = four.z; raw[4 * i + 3] = four.w;
      }
    } else {
      const unsigned* codes = reinterpret_cast<const unsigned*>(position);
#pragma unroll
      for (int i = 0; i < words; i++) raw[i] = codes[at * words + i];
      const T* scales = reinterpret_cast<const T*>(codes + D * BITS / 32);
      scale = scales[at * 8 / GROUP];
      bias = scales[D / GROUP + at * 8 / GROUP];
    }
  }

  // Numbers, or codes where they are packed. A code is a float's last bits with 2^23 in front: no slow conversion.
  __device__ void codes(float* out) const {
    if constexpr (BITS == 0) {
      const T* numbers = reinterpret_cast<const T*>(raw);
#pragma unroll
      for (int i = 0; i < 8; i++) out[i] = static_cast<float>(numbers[i]);
    } else if constexpr (BITS == 8) {
#pragma unroll
      for (int i = 0; i < 8; i++)
        out[i] = __uint_as_float(__byte_perm(raw[i / 4], 0x4B000000u, 0x7540 | (i % 4))) - 8388608.0f;
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) out[i] = __uint_as_float(0x4B000000u | (raw[0] >> (4 * i) & 15u)) - 8388608.0f;
    }
  }
};

// Sums of N numbers over WIDTH threads that lie side by side: N / WIDTH of them for each thread, at least one.
template <int N, int WIDTH>
__device__ void sums_over(float* numbers, int lane) {
  if constexpr (WIDTH > 1 && N > 1) {
    const bool upper = lane & (WIDTH / 2);
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      float mine = upper ? numbers[i + N / 2] : numbers[i], others = upper ? numbers[i] : numbers[i + N / 2];
      numbers[i] = mine + __shfl_xor_sync(0xffffffffu, others, WIDTH / 2);
    }
    sums_over<N / 2, WIDTH / 2>(numbers, lane);
  } else if constexpr (WIDTH > 1) {
    numbers[0] += __shfl_xor_sync(0xffffffffu, numbers[0], WIDTH / 2);
    sums_over<1, WIDTH / 2>(numbers, lane);
  }
}
