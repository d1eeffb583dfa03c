// The conformance suite of communicators: every implementation, on 1 to 8 ranks. A new implementation adds a line to `implementations`.
#include "runtime/communicator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <thread>

#include "graph/errors.h"

namespace fretsaw {
namespace {

using Ranks = std::vector<std::unique_ptr<Communicator>>;
using std::chrono::milliseconds;
struct Implementation {
  std::string name;
  std::function<Ranks(int size, milliseconds timeout)> make;
};
const Implementation implementations[] = {{"threads", make_thread_communicators}};

struct Case {
  Implementation implementation;
  int size;
};
std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const auto& implementation : implementations) {
    for (int size = 1; size <= 8; ++size) cases.push_back({implementation, size});
  }
  return cases;
}

template <typename T>
std::span<const std::byte> bytes(const std::vector<T>& v) {
  return std::as_bytes(std::span(v));
}
template <typename T>
std::span<std::byte> bytes(std::vector<T>& v) {
  return std::as_writable_bytes(std::span(v));
}

class CommunicatorTest : public testing::TestWithParam<Case> {
 protected:
  int size() const { return GetParam().size; }
  // Runs `body` on every rank; a rank that throws aborts the others, and the first error is thrown here.
  void on_ranks(const std::function<void(Communicator&)>& body, milliseconds timeout = milliseconds(20000)) {
    Ranks ranks = GetParam().implementation.make(size(), timeout);
    std::vector<std::thread> threads;
    std::exception_ptr first;
    std::mutex mutex;
    for (auto& rank : ranks) {
      threads.emplace_back([&, communicator = rank.get()] {
        try {
          body(*communicator);
        } catch (const std::exception& e) {
          {
            std::lock_guard lock(mutex);
            if (!first) first = std::current_exception();
          }
          communicator->abort(e.what());
        }
      });
    }
    for (auto& thread : threads) thread.join();
    if (first) std::rethrow_exception(first);
  }
};

TEST_P(CommunicatorTest, KnowsItsPlace) {
  std::vector<std::atomic<int>> seen(size());
  on_ranks([&](Communicator& c) {
    EXPECT_EQ(c.size(), size());
    ++seen[c.rank()];
  });
  for (auto& count : seen) EXPECT_EQ(count, 1);
}

TEST_P(CommunicatorTest, MessagesOfOneTagArriveInOrder) {
  on_ranks([&](Communicator& c) {
    constexpr int messages = 50;
    int to = (c.rank() + 1) % c.size(), from = (c.rank() + c.size() - 1) % c.size();
    std::vector<std::vector<int>> sent, received(messages);
    std::vector<RequestPtr> requests;
    for (int m = 0; m < messages; ++m) {
      sent.push_back(std::vector<int>(m * 7 % 13, c.rank() * 1000 + m));
      received[m].resize(sent[m].size());
    }
    for (int m = 0; m < messages; ++m) requests.push_back(c.isend(bytes(std::as_const(sent[m])), to, 5));
    for (int m = 0; m < messages; ++m) requests.push_back(c.irecv(bytes(received[m]), from, 5));
    for (auto& request : requests) request->wait();
    for (auto& request : requests) EXPECT_TRUE(request->done());
    for (int m = 0; m < messages; ++m) EXPECT_EQ(received[m], std::vector<int>(m * 7 % 13, from * 1000 + m));
  });
}

TEST_P(CommunicatorTest, TagsAreSeparate) {
  on_ranks([&](Communicator& c) {
    int to = (c.rank() + 1) % c.size(), from = (c.rank() + c.size() - 1) % c.size();
    std::vector<int> first{1}, second{2}, got_first(1), got_second(1);
    // Received in the other order than sent, and posted before anything is sent.
    auto r2 = c.irecv(bytes(got_second), from, 2), r1 = c.irecv(bytes(got_first), from, 1);
    auto s1 = c.isend(bytes(std::as_const(first)), to, 1), s2 = c.isend(bytes(std::as_const(second)), to, 2);
    for (auto& request : {r2, r1, s1, s2}) request->wait();
    EXPECT_EQ(got_first, first);
    EXPECT_EQ(got_second, second);
  });
}

TEST_P(CommunicatorTest, HeadersDoNotWaitForTheReceiver) {
  on_ranks([&](Communicator& c) {
    int to = (c.rank() + 1) % c.size(), from = (c.rank() + c.size() - 1) % c.size();
    for (int round = 0; round < 3; ++round) {
      c.send_header({DType::float32, {2, c.rank(), round}}, to, 0);
      c.send_header({DType::int64, {}}, to, 0);
      c.send_header({DType::boolean, Dims(64, round)}, to, 1);
    }
    c.barrier();
    Header none;
    EXPECT_FALSE(c.try_recv_header(none, from, 2));
    for (int round = 0; round < 3; ++round) {
      EXPECT_EQ(c.recv_header(from, 1), (Header{DType::boolean, Dims(64, round)}));
      Header first;
      ASSERT_TRUE(c.try_recv_header(first, from, 0));
      EXPECT_EQ(first, (Header{DType::float32, {2, from, round}}));
      EXPECT_EQ(c.recv_header(from, 0), (Header{DType::int64, {}}));
    }
    EXPECT_FALSE(c.try_recv_header(none, from, 0));
  });
}

TEST_P(CommunicatorTest, AllReduceEveryReduction) {
  const int n = size();
  on_ranks([&](Communicator& c) {
    for (size_t count : {size_t{0}, size_t{1}, size_t{5}, size_t{1000}}) {
      std::vector<double> in(count), out(count);
      for (size_t i = 0; i < count; ++i) in[i] = (c.rank() + 1) * 0.5 + static_cast<double>(i % 3);
      auto expected = [&](size_t i, Reduction reduction) {
        double result = 0.5 + static_cast<double>(i % 3);
        for (int r = 1; r < n; ++r) {
          double x = (r + 1) * 0.5 + static_cast<double>(i % 3);
          result = reduction == Reduction::max       ? std::max(result, x)
                   : reduction == Reduction::min     ? std::min(result, x)
                   : reduction == Reduction::product ? result * x
                                                     : result + x;
        }
        return reduction == Reduction::mean ? result / n : result;
      };
      for (auto reduction : {Reduction::sum, Reduction::max, Reduction::min, Reduction::product, Reduction::mean}) {
        c.all_reduce(bytes(std::as_const(in)), bytes(out), DType::float64, reduction);
        for (size_t i = 0; i < count; ++i) ASSERT_EQ(out[i], expected(i, reduction)) << i;
      }
      out = in;
      c.all_reduce(bytes(std::as_const(out)), bytes(out), DType::float64, Reduction::sum);  // in place
      for (size_t i = 0; i < count; ++i) ASSERT_EQ(out[i], expected(i, Reduction::sum));
    }
  });
}

// float32 sums depend on their order: it must be 0, 1, 2, ... on every rank.
TEST_P(CommunicatorTest, AllReduceIsTheSameToTheBit) {
  const int n = size();
  auto element = [](int rank, size_t i) { return static_cast<float>(std::sin(rank * 12.9898 + static_cast<double>(i) * 78.233) * 1e3); };
  on_ranks([&](Communicator& c) {
    std::vector<float> in(777), out(777);
    for (size_t i = 0; i < in.size(); ++i) in[i] = element(c.rank(), i);
    for (int round = 0; round < 3; ++round) {
      c.all_reduce(bytes(std::as_const(in)), bytes(out), DType::float32, Reduction::sum);
      for (size_t i = 0; i < in.size(); ++i) {
        float expected = element(0, i);
        for (int r = 1; r < n; ++r) expected += element(r, i);
        ASSERT_EQ(out[i], expected);
      }
    }
  });
}

TEST_P(CommunicatorTest, AllReduceHalfTypesAndIntegers) {
  const int n = size();
  on_ranks([&](Communicator& c) {
    std::vector<uint16_t> halves(3, 0x3c00), brains(3, 0x3f80);  // 1.0 in float16 and bfloat16
    std::vector<uint16_t> out(3);
    c.all_reduce(bytes(std::as_const(halves)), bytes(out), DType::float16, Reduction::sum);
    const uint16_t half_sums[] = {0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700, 0x4800};
    EXPECT_EQ(out[2], half_sums[n - 1]);
    c.all_reduce(bytes(std::as_const(brains)), bytes(out), DType::bfloat16, Reduction::sum);
    const uint16_t brain_sums[] = {0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100};
    EXPECT_EQ(out[2], brain_sums[n - 1]);
    std::vector<int64_t> numbers{c.rank(), -c.rank(), int64_t{1} << 40}, sums(3);
    c.all_reduce(bytes(std::as_const(numbers)), bytes(sums), DType::int64, Reduction::sum);
    EXPECT_EQ(sums, (std::vector<int64_t>{n * (n - 1) / 2, -n * (n - 1) / 2, n * (int64_t{1} << 40)}));
  });
}

TEST_P(CommunicatorTest, AllGather) {
  on_ranks([&](Communicator& c) {
    std::vector<int> in{c.rank(), c.rank() * 10}, out(2 * c.size(), -1), expected;
    for (int r = 0; r < c.size(); ++r) expected.insert(expected.end(), {r, r * 10});
    c.all_gather(bytes(std::as_const(in)), bytes(out));
    EXPECT_EQ(out, expected);
    std::vector<int> nothing, none;
    c.all_gather(bytes(std::as_const(nothing)), bytes(none));
  });
}

TEST_P(CommunicatorTest, ReduceScatter) {
  const int n = size();
  on_ranks([&](Communicator& c) {
    std::vector<float> in(3 * n), out(3);
    for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(c.rank() * 100 + static_cast<int>(i));
    c.reduce_scatter(bytes(std::as_const(in)), bytes(out), DType::float32, Reduction::sum);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(out[i], static_cast<float>(n * (n - 1) / 2 * 100 + n * (c.rank() * 3 + i)));
  });
}

// What single calls give, to the bit; tensors may be empty, and each rank chooses which are reduced in place.
TEST_P(CommunicatorTest, SeveralTensorsInOneExchange) {
  const size_t n = static_cast<size_t>(size());
  on_ranks([&](Communicator& c) {
    for (int round = 0; round < 3; ++round) {
      std::vector<std::vector<float>> in, wanted, out, parts, wanted_parts;
      for (const size_t count : {3 * n, size_t{0}, 70 * n, 5000 * n, n}) {
        std::vector<float>& values = in.emplace_back(count);
        for (size_t i = 0; i < count; ++i)
          values[i] = static_cast<float>(std::sin(c.rank() * 12.9898 + static_cast<double>(i + count) * 78.233) * 1e3);
        wanted.emplace_back(count), out.emplace_back(count), parts.emplace_back(count / n), wanted_parts.emplace_back(count / n);
        c.all_reduce(bytes(std::as_const(values)), bytes(wanted.back()), DType::float32, Reduction::sum);
        c.reduce_scatter(bytes(std::as_const(values)), bytes(wanted_parts.back()), DType::float32, Reduction::sum);
      }
      std::vector<Exchanged> reduced, scattered;
      for (size_t i = 0; i < in.size(); ++i) {
        const size_t size = in[i].size() * sizeof(float);
        scattered.push_back({in[i].data(), parts[i].data(), size});
        const bool in_place = (static_cast<size_t>(c.rank()) + i) % 2 == 0;
        if (in_place) out[i] = in[i];
        reduced.push_back({in_place ? out[i].data() : in[i].data(), out[i].data(), size});
      }
      c.reduce_scatter_each(scattered, DType::float32, Reduction::sum);
      c.all_reduce_each(reduced, DType::float32, Reduction::sum);
      EXPECT_EQ(out, wanted);
      EXPECT_EQ(parts, wanted_parts);
    }
  });
}

TEST_P(CommunicatorTest, SeveralTensorsMustHaveTheSameSizesEverywhere) {
  if (size() == 1) GTEST_SKIP() << "takes two ranks";
  std::atomic<int> refused = 0;
  on_ranks([&](Communicator& c) {
    std::vector<float> a(8), b(8);
    const size_t first = c.rank() == 0 ? 3 : 5;  // together as much on all ranks
    const std::vector<Exchanged> each = {{a.data(), a.data(), first * sizeof(float)}, {b.data(), b.data(), (8 - first) * sizeof(float)}};
    try {
      c.all_reduce_each(each, DType::float32, Reduction::sum);
    } catch (const Error&) {
      ++refused;
    }
  });
  EXPECT_EQ(refused, size());
}

// Each rank chooses for itself whether its result replaces what it gave.
TEST_P(CommunicatorTest, SomeRanksInPlace) {
  const int n = size();
  on_ranks([&](Communicator& c) {
    for (int round = 0; round < 2 * n; ++round) {
      const size_t count = 50000;  // several pieces of every rank's share
      std::vector<int> in(count), other(count), exchanged, expected;
      for (size_t i = 0; i < count; ++i) in[i] = c.rank() + static_cast<int>(i);
      std::vector<int>& out = c.rank() == round % n ? in : other;
      c.all_reduce(bytes(std::as_const(in)), bytes(out), DType::int32, Reduction::sum);
      for (size_t i = 0; i < count; ++i) ASSERT_EQ(out[i], n * (n - 1) / 2 + n * static_cast<int>(i));
      for (int r = 0; r < n; ++r) {
        exchanged.push_back(c.rank() * 100 + r);
        expected.push_back(r * 100 + c.rank());
      }
      std::vector<int> apart(exchanged.size());
      std::vector<int>& result = c.rank() == round % n ? exchanged : apart;
      c.all_to_all(bytes(std::as_const(exchanged)), bytes(result));
      ASSERT_EQ(result, expected);
    }
  });
}

TEST_P(CommunicatorTest, AllToAll) {
  on_ranks([&](Communicator& c) {
    std::vector<int> in, expected;
    for (int r = 0; r < c.size(); ++r) {
      in.insert(in.end(), {c.rank() * 100 + r, -1});
      expected.insert(expected.end(), {r * 100 + c.rank(), -1});
    }
    std::vector<int> out(in.size());
    c.all_to_all(bytes(std::as_const(in)), bytes(out));
    EXPECT_EQ(out, expected);
    c.all_to_all(bytes(std::as_const(in)), bytes(in));  // in place
    EXPECT_EQ(in, expected);
  });
}

TEST_P(CommunicatorTest, BroadcastFromEveryRank) {
  on_ranks([&](Communicator& c) {
    for (int root = 0; root < c.size(); ++root) {
      std::vector<int> data(11, c.rank());
      c.broadcast(bytes(data), root);
      EXPECT_EQ(data, std::vector<int>(11, root));
    }
  });
}

TEST_P(CommunicatorTest, BarrierHoldsEverybody) {
  std::atomic<int> before{0};
  on_ranks([&](Communicator& c) {
    for (int round = 1; round <= 20; ++round) {
      ++before;
      c.barrier();
      EXPECT_EQ(before, round * c.size());
      c.barrier();
    }
  });
}

TEST_P(CommunicatorTest, SplitGroupsByColour) {
  on_ranks([&](Communicator& c) {
    auto part = c.split(c.rank() % 2);
    int members = (c.size() + (c.rank() % 2 == 0 ? 1 : 0)) / 2;
    EXPECT_EQ(part->size(), members);
    EXPECT_EQ(part->rank(), c.rank() / 2);
    std::vector<int> in{c.rank()}, out(1);
    part->all_reduce(bytes(std::as_const(in)), bytes(out), DType::int32, Reduction::sum);
    int expected = 0;
    for (int r = c.rank() % 2; r < c.size(); r += 2) expected += r;
    EXPECT_EQ(out[0], expected);
    c.barrier();
  });
}

// Every rank but the last waits in another kind of operation; the abort must wake them all, at once and with its reason.
TEST_P(CommunicatorTest, AbortWakesEverybody) {
  if (size() < 2) GTEST_SKIP() << "needs at least 2 ranks";
  auto start = std::chrono::steady_clock::now();
  std::atomic<int> woken{0};
  on_ranks([&](Communicator& c) {
    if (c.rank() == c.size() - 1) {
      std::this_thread::sleep_for(milliseconds(30));
      c.abort("the cat pulled the plug");
      c.abort("a later reason");
    } else {
      std::vector<int> data(4);
      try {
        switch (c.rank() % 4) {
          case 0:
            c.irecv(bytes(data), c.size() - 1, 9)->wait();
            break;
          case 1:
            c.barrier();
            break;
          case 2:
            c.isend(bytes(std::as_const(data)), c.size() - 1, 8)->wait();
            break;
          default:
            c.recv_header(c.size() - 1, 3);
        }
        ADD_FAILURE() << "rank " << c.rank() << " was not woken";
      } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find("the cat pulled the plug"), std::string::npos) << e.what();
        EXPECT_EQ(e.code(), ErrorCode::device);
        ++woken;
      }
    }
    EXPECT_TRUE(c.aborted());
    EXPECT_THROW(c.barrier(), Error);  // and so do later operations
  });
  EXPECT_EQ(woken, size() - 1);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
}

TEST_P(CommunicatorTest, AbortReachesSplitGroups) {
  if (size() < 3) GTEST_SKIP() << "needs at least 3 ranks";
  on_ranks([&](Communicator& c) {
    auto part = c.split(c.rank() == 0 ? 0 : 1);
    if (c.rank() == 0) {
      c.abort("stop");
    } else if (c.rank() == 1) {
      EXPECT_THROW(part->barrier(), Error);
    }
  });
}

TEST_P(CommunicatorTest, WaitingEndsAtTheTimeOut) {
  if (size() < 2) GTEST_SKIP() << "needs at least 2 ranks";
  auto start = std::chrono::steady_clock::now();
  on_ranks(
      [&](Communicator& c) {
        std::vector<int> data(1);
        if (c.rank() == 0) {
          EXPECT_THROW(c.irecv(bytes(data), 1, 4)->wait(), Error);
        }
        if (c.rank() == 1) {
          EXPECT_THROW(c.barrier(), Error);
        }
      },
      milliseconds(100));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
}

TEST_P(CommunicatorTest, DisagreementIsAnErrorEverywhere) {
  if (size() < 2) GTEST_SKIP() << "needs at least 2 ranks";
  EXPECT_THROW(on_ranks([&](Communicator& c) {
                 std::vector<float> data(c.rank() == 0 ? 4 : 5);
                 c.all_reduce(bytes(std::as_const(data)), bytes(data), DType::float32, Reduction::sum);
               }),
               Error);
  EXPECT_THROW(on_ranks([&](Communicator& c) {
                 std::vector<float> data(c.rank() == 0 ? 4 : 5);
                 if (c.rank() == 0) c.isend(bytes(std::as_const(data)), 1, 0)->wait();
                 if (c.rank() == 1) c.irecv(bytes(data), 0, 0)->wait();
               }),
               Error);
  EXPECT_THROW(on_ranks([&](Communicator& c) { c.isend({}, c.size(), 0); }), Error);
}

INSTANTIATE_TEST_SUITE_P(All, CommunicatorTest, testing::ValuesIn(all_cases()),
                         [](const auto& info) { return info.param.implementation.name + "_" + std::to_string(info.param.size); });

}  // namespace
}  // namespace fretsaw
