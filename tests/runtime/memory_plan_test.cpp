// The placement of buffers: nothing that lives together overlaps, and the block stays near the bound.
#include "runtime/memory_plan.h"

#include <gtest/gtest.h>

#include <random>

namespace fretsaw {
namespace {

void expect_sound(const std::vector<BufferLife>& buffers, const Placement& plan) {
  ASSERT_EQ(plan.offsets.size(), buffers.size());
  for (size_t a = 0; a < buffers.size(); ++a) {
    EXPECT_EQ(plan.offsets[a] % 64, 0u);
    EXPECT_LE(plan.offsets[a] + buffers[a].bytes, plan.bytes);
    for (size_t b = a + 1; b < buffers.size(); ++b) {
      bool together = buffers[a].first <= buffers[b].last && buffers[b].first <= buffers[a].last;
      bool apart = plan.offsets[a] + buffers[a].bytes <= plan.offsets[b] || plan.offsets[b] + buffers[b].bytes <= plan.offsets[a];
      EXPECT_TRUE(!together || apart) << a << " and " << b;
    }
  }
}

TEST(MemoryPlan, Nothing) {
  EXPECT_EQ(place_buffers({}).bytes, 0u);
}

TEST(MemoryPlan, AChainNeedsTwoBuffers) {
  std::vector<BufferLife> chain;
  for (int i = 0; i < 100; ++i) chain.push_back({1000, i, i + 1});
  Placement plan = place_buffers(chain);
  expect_sound(chain, plan);
  EXPECT_EQ(plan.bytes, 2u * 1024);
}

TEST(MemoryPlan, RandomLivesNeverOverlap) {
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    std::vector<BufferLife> buffers;
    size_t sum = 0;
    int count = 1 + static_cast<int>(random() % 120);
    for (int i = 0; i < count; ++i) {
      int first = static_cast<int>(random() % 80);
      buffers.push_back({random() % 5000, first, first + static_cast<int>(random() % 9)});
      sum += (buffers.back().bytes + 63) / 64 * 64;
    }
    Placement plan = place_buffers(buffers);
    expect_sound(buffers, plan);
    EXPECT_GE(plan.bytes, placement_bound(buffers));
    EXPECT_LE(plan.bytes, sum);
    EXPECT_LE(plan.bytes, placement_bound(buffers) * 3 / 2 + 64);
  }
}

}  // namespace
}  // namespace fretsaw
