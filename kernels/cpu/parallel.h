// Loops over the cores of a rank.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>

namespace fretsaw {

// Work below which a second thread costs more than it saves: about the elements of a 64 KiB float tensor.
constexpr int64_t kGrainElements = 16384;

// Calls body(begin, end) on consecutive parts of [0, count), each of at least `grain` items, on up to `threads` threads.
// The parts depend on `count`, `grain` and `threads` alone. An exception in a part is rethrown here.
//
//   parallel_for(rows, kGrainElements / columns + 1, r.threads(), [&](int64_t begin, int64_t end) { ... });
template <typename Body>
void parallel_for(int64_t count, int64_t grain, int threads, const Body& body) {
  if (count <= 0) return;
  const int64_t parts = std::min<int64_t>(threads, (count + grain - 1) / std::max<int64_t>(grain, 1));
  if (parts <= 1) {
    body(int64_t{0}, count);
    return;
  }
  std::exception_ptr failure;
#pragma omp parallel num_threads(static_cast <int>(parts))
  {
    // The team may be smaller than asked for, so each thread takes every team-th part.
    const int64_t team = omp_get_num_threads();
    for (int64_t part = omp_get_thread_num(); part < parts; part += team) {
      try {
        body(count * part / parts, count * (part + 1) / parts);
      } catch (...) {
#pragma omp critical(fretsaw_parallel_failure)
        failure = std::current_exception();
      }
    }
  }
  if (failure) std::rethrow_exception(failure);
}

// The same for a loop over elements with the usual grain.
template <typename Body>
void parallel_elements(int64_t count, int threads, const Body& body) {
  parallel_for(count, kGrainElements, threads, body);
}

// memcpy by several cores: one copies far slower than memory and buses take the bytes.
inline void copy_in_parallel(void* to, const void* from, size_t bytes, int threads) {
  constexpr int64_t piece_bytes = int64_t{256} << 10;
  const auto pieces = static_cast<int64_t>(bytes) / piece_bytes + 1;
  parallel_for(pieces, 2, threads, [&](int64_t begin, int64_t end) {
    const auto first = static_cast<size_t>(begin * piece_bytes), last = std::min(bytes, static_cast<size_t>(end * piece_bytes));
    if (first < last) std::memcpy(static_cast<char*>(to) + first, static_cast<const char*>(from) + first, last - first);
  });
}

}  // namespace fretsaw
