// The numbers of one position and head that a thread of a simdgroup has: D / 32 that lie side by side.
template <typename T, int D, int BITS, int GROUP>
struct Packed {
  float codes[D / 32];
  float step, bias;

  void load(const device uint* position, int lane) {
    constexpr int OWN = D / 32 * BITS;  // bits of a thread's codes: less than a word, or whole words
    constexpr int WORDS = OWN < 32 ? 1 : OWN / 32, EACH = D / 32 / WORDS;
    for (int w = 0; w < WORDS; w++) {
      const uint word = position[lane * OWN / 32 + w] >> (lane * OWN % 32);
      for (int i = 0; i < EACH; i++) codes[w * EACH + i] = float(word >> (i * BITS) & ((1u << BITS) - 1));
    }
    const device T* steps = reinterpret_cast<const device T*>(position + D * BITS / 32);
    const int group = lane * (D / 32) / GROUP;
    step = float(steps[group]);
    bias = float(steps[D / GROUP + group]);
  }
};
