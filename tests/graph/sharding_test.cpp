// Intervals and cuts: how dimensions, factors and segments are divided.
#include "graph/sharding.h"

#include <gtest/gtest.h>

namespace fretsaw {
namespace {

std::string text(const Cut& cut) {
  std::string s;
  for (const Intervals& part : cut.parts) {
    if (!s.empty()) s += " | ";
    std::string one;
    for (const Interval& i : part) one += (one.empty() ? "" : "+") + std::to_string(i.begin) + ":" + std::to_string(i.end);
    s += one;
  }
  return s;
}

TEST(Cut, IsEvenWithLargerPartsFirst) {
  EXPECT_EQ(text(even_cut(8, 2)), "0:4 | 4:8");
  EXPECT_EQ(text(even_cut(5, 2)), "0:3 | 3:5");
  EXPECT_EQ(text(even_cut(4, 3)), "0:2 | 2:3 | 3:4");
  EXPECT_EQ(text(even_cut(7, 4)), "0:2 | 2:4 | 4:6 | 6:7");
  EXPECT_TRUE(even_cut(8, 2).even());
  EXPECT_FALSE(even_cut(5, 2).even());
}

TEST(Cut, OfFewerThanRanksIsShared) {
  EXPECT_EQ(text(even_cut(2, 4)), "0:1 | 0:1 | 1:2 | 1:2");
  EXPECT_EQ(text(even_cut(2, 3)), "0:1 | 0:2 | 1:2");
  EXPECT_TRUE(even_cut(2, 3).overlaps());
}

// Query heads are cut evenly; the key-value heads that a rank holds must be those of its query heads.
TEST(Cut, SharedHeadsCoverTheirGroups) {
  for (int ranks = 2; ranks <= 9; ++ranks)
    for (int64_t heads = 1; heads < ranks; ++heads)
      for (int64_t group = 1; group <= 8; ++group) {
        if (heads * group < ranks) continue;
        const Cut queries = even_cut(heads * group, ranks), shared = widen(even_cut(heads, ranks), 1, group);
        for (size_t r = 0; r < queries.parts.size(); ++r)
          EXPECT_TRUE(contains(shared.parts[r], queries.parts[r])) << heads << " heads of " << group << " over " << ranks;
      }
}

TEST(Cut, WidensToTheDimensionAndBack) {
  // [3, 4, 16] -> [192], the 4 heads cut
  const Cut heads = even_cut(4, 2);
  const Cut dim = widen(heads, 3, 16);
  EXPECT_EQ(text(dim), "0:32+64:96+128:160 | 32:64+96:128+160:192");
  EXPECT_EQ(narrow(dim, 3, 4, 16), heads);
  EXPECT_EQ(narrow(even_cut(192, 2), 3, 4, 16), std::nullopt);
  EXPECT_EQ(narrow(even_cut(192, 2), 1, 4, 48), heads);
  EXPECT_EQ(narrow(even_cut(10, 3), 1, 5, 2), std::nullopt);  // 0:4 would do, 4:7 not
}

TEST(Cut, JoinsSegments) {
  const Cut joined = join({even_cut(8, 2), even_cut(4, 2), even_cut(4, 2)});
  EXPECT_EQ(text(joined), "0:4+8:10+12:14 | 4:8+10:12+14:16");
  EXPECT_FALSE(joined.contiguous());
  EXPECT_FALSE(joined.in_order());
  EXPECT_TRUE(even_cut(7, 3).in_order());
}

TEST(Intervals, KnowPlacesWithinOthers) {
  EXPECT_EQ(places_within({{2, 6}, {8, 10}}, {{4, 5}, {9, 10}}), (std::vector<int64_t>{2, 5}));
  EXPECT_TRUE(contains({{0, 4}}, {{1, 2}, {3, 4}}));
  EXPECT_FALSE(contains({{0, 4}}, {{3, 5}}));
}

TEST(Sharding, HasATextForm) {
  Sharding s{Sharding::Kind::cut, 1, even_cut(8, 2)};
  EXPECT_EQ(s.text(3, "tensor"), "[_, tensor, _]");
  s.cut = even_cut(5, 2);
  EXPECT_EQ(s.text(2, "tensor"), "[_, tensor{0:3|3:5}]");
  EXPECT_EQ((Sharding{Sharding::Kind::pending, -1, {}}).text(2, "tensor"), "[_, _] sum(tensor)");
  EXPECT_EQ(Sharding{}.text(1, "tensor"), "[_]");
}

}  // namespace
}  // namespace fretsaw
