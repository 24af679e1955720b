/* cpu/parallel.c: a parallel for over worker threads. Knows threads and nothing of tensors. Results must not depend on how
 * the range was cut: each index belongs to one call, and no call reads what another writes. */

typedef void (*te__range_fn)(void *user, int64_t begin, int64_t end);
