// Adds up a query's stretches (flash decoding: Dao et al., 2023); a thread has one number of it.
const int place = thread_position_in_grid.x / D, d = thread_position_in_grid.x % D;
float highest = about[place * STRETCHES * 2];
for (int s = 1; s < STRETCHES; s++) highest = max(highest, about[(place * STRETCHES + s) * 2]);
float numbers = 0, weights = 0;
for (int s = 0; s < STRETCHES; s++) {
  const int at = place * STRETCHES + s;
  const float factor = exp2(about[at * 2] - highest);
  numbers += part[at * D + d] * factor;
  weights += about[at * 2 + 1] * factor;
}
out[thread_position_in_grid.x] = static_cast<T>(weights == 0 ? 0 : numbers / weights);
