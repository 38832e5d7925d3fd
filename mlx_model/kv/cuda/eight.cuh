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
      constexpr int GROUPS = D / GROUP, OF_CODES = D * BITS / 32, OF_SCALES = 2 * GROUPS * sizeof(T) / 4;
      constexpr bool ALIGNED = OF_CODES % 2 == 0 && OF_SCALES % 2 == 0;  // to 8 bytes
      const unsigned* codes = reinterpret_cast<const unsigned*>(position);
      if constexpr (words == 2 && ALIGNED) {
        const uint2 two = reinterpret_cast<const uint2*>(codes)[at];
        raw[0] = two.x; raw[1] = two.y;
      } else {
#pragma unroll
        for (int i = 0; i < words; i++) raw[i] = codes[at * words + i];
      }
      const T* scales = reinterpret_cast<const T*>(codes + OF_CODES);
      if constexpr (sizeof(T) == 2 && GROUPS == 2 && ALIGNED) {  // both groups' scales and biases
        const uint2 all = *reinterpret_cast<const uint2*>(scales);
        const unsigned both = __byte_perm(all.x, all.y, at * 8 < GROUP ? 0x5410 : 0x7632);
        const unsigned short first = both, second = both >> 16;
        scale = reinterpret_cast<const T&>(first);
        bias = reinterpret_cast<const T&>(second);
      } else {
        scale = scales[at * 8 / GROUP];
        bias = scales[GROUPS + at * 8 / GROUP];
      }
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
