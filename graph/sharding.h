// How a tensor lies on the ranks of a mesh axis.
//
//   [64, 96] cut along dimension 1 over 2 ranks        rank 0: [0, 48)                    rank 1: [48, 96)
//   5 channels over 2 ranks                            rank 0: [0, 3)                     rank 1: [3, 5)
//   a fused q, k, v of 3 * 32 cut by heads             rank 0: [0, 16) [32, 48) [64, 80)  rank 1: the rest
//   2 key-value heads of 16 over 4 ranks               ranks 0 and 1: [0, 16)             ranks 2 and 3: [16, 32)
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "graph/types.h"

namespace fretsaw {

struct Interval {
  int64_t begin = 0, end = 0;  // [begin, end)
  int64_t size() const { return end - begin; }
  bool operator==(const Interval&) const = default;
};
using Intervals = std::vector<Interval>;  // ascending, neither empty nor touching each other
int64_t size_of(const Intervals& intervals);
bool contains(const Intervals& outer, const Intervals& inner);
// Where the indexes of `inner` stand among those of `outer`, which contains them.
std::vector<int64_t> places_within(const Intervals& outer, const Intervals& inner);

// A dimension (or a factor of it) in parts, one for each rank.
struct Cut {
  int64_t size = 0;
  std::vector<Intervals> parts;
  bool operator==(const Cut&) const = default;

  int ranks() const { return static_cast<int>(parts.size()); }
  int64_t part_size(int rank) const { return size_of(parts[static_cast<size_t>(rank)]); }
  int64_t largest_part() const;
  bool even() const;        // parts of one size
  bool overlaps() const;    // an index lies on several ranks
  bool contiguous() const;  // one interval a rank
  bool in_order() const;    // the parts one after the other are the whole
};

// Parts that differ by one at most; the first is the largest. Where there are fewer indexes than ranks, neighbours share one: each rank has
// what its even share of something `size` times finer lies in.
Cut even_cut(int64_t size, int ranks);
// The cut of a dimension (outer, factor, inner) that follows from the factor's: outer blocks of `size * inner`, each cut alike.
Cut widen(const Cut& factor, int64_t outer, int64_t inner);
// The other way round; nullopt where the cut is not one of this factor alone.
std::optional<Cut> narrow(const Cut& dim, int64_t outer, int64_t size, int64_t inner);
// Segments one after the other, each with its cut.
Cut join(const std::vector<Cut>& segments);

// One tensor over the ranks of one mesh axis: whole on each, a pending sum, or cut along a dimension.
struct Sharding {
  enum class Kind : uint8_t { whole, pending, cut };
  Kind kind = Kind::whole;
  int dim = -1;
  Cut cut;

  // "[_, tensor]", "[_, _] sum(tensor)"; parts that are not even cuts of the whole are listed: "[tensor{0:3|3:5}]".
  std::string text(size_t rank, const std::string& axis) const;
};

}  // namespace fretsaw
