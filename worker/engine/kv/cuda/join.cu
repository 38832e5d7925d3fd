  const int stretches = part_shape[2], heads = part_shape[1], of = blockIdx.x, number = threadIdx.x;
  const float sink = SINKS ? sinks[of % heads / (heads / sinks_shape[0])] * 1.44269504f : -1e30f;
  float top = sink;
  float sum = 0.0f, total = 0.0f;
  for (int s = 0; s < stretches; s++) top = fmaxf(top, about[(of * stretches + s) * 2]);
  if (SINKS) sum = exp2f(sink - top);
  for (int s = 0; s < stretches; s++) {
    float by = exp2f(about[(of * stretches + s) * 2] - top);
    sum += about[(of * stretches + s) * 2 + 1] * by;
    total += part[(static_cast<long>(of) * stretches + s) * D + number] * by;
  }
#ifdef IN_PLACE  // a row's queries one behind another, each with all its heads
  const int at_once = queries_shape[2], query = of % at_once, head = of / at_once % queries_shape[1];
  const long to = (static_cast<long>(of / heads) * at_once + query) * queries_shape[1] + head;
#else
  const long to = of;
#endif
  out[to * D + number] = static_cast<T>(sum > 0.0f ? total / sum : 0.0f);
