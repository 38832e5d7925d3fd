// A thread adds up four numbers of what a query's stretches have made.
  struct alignas(4 * sizeof(T)) Four {
    T each[4];
  };
  const int stretches = part_shape[2], heads = part_shape[1], thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int of = thread / (D / 4), number = thread % (D / 4) * 4;
  if (of >= part_shape[0] * heads) return;
  const float2* const abouts = reinterpret_cast<const float2*>(about) + of * stretches;  // the top, and the sum
  const float sink = SINKS ? sinks[of % heads / (heads / sinks_shape[0])] * 1.44269504f : -1e30f;
  float top = sink;
  float sum = 0.0f, total[4] = {};
  for (int s = 0; s < stretches; s++) top = fmaxf(top, abouts[s].x);
  if (SINKS) sum = exp2f(sink - top);
  for (int s = 0; s < stretches; s++) {
    const float by = exp2f(abouts[s].x - top);
    const float4 four = *reinterpret_cast<const float4*>(part + (static_cast<long>(of) * stretches + s) * D + number);
    sum += abouts[s].y * by;
    total[0] += four.x * by;
    total[1] += four.y * by;
    total[2] += four.z * by;
    total[3] += four.w * by;
  }
#ifdef IN_PLACE  // a row's queries one behind another, each with all its heads
  const int at_once = queries_shape[2], query = of % at_once, head = of / at_once % queries_shape[1];
  const long to = (static_cast<long>(of / heads) * at_once + query) * queries_shape[1] + head;
#else
  const long to = of;
#endif
  Four made;
#pragma unroll
  for (int i = 0; i < 4; i++) made.each[i] = static_cast<T>(sum > 0.0f ? total[i] / sum : 0.0f);
  *reinterpret_cast<Four*>(out + to * D + number) = made;
