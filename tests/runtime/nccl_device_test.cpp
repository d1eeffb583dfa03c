// Collectives among two or more GPUs against what they mean, of sizes that our own kernels take and that NCCL takes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "kernels/cpu/convert.h"
#include "kernels/cuda/devices.h"
#include "runtime/cuda/nccl.h"

namespace fretsaw {
namespace {

constexpr int kMostRanks = 4;
constexpr int64_t kMostElements = 600000;

enum class Op { all_reduce, reduce_scatter, all_gather };

struct Case {
  Op op;
  DType dtype;
  int64_t count;  // of the rank's input
  bool in_place;
};

// Whole numbers, so that sums are exact in every type and order.
double element(int rank, int64_t i, int round) {
  return static_cast<double>((i * 7 + rank * 13 + round * 5) % 17 - 8);
}

class RankOfTest {
 public:
  RankOfTest(Communicator& group, int index) : group_(group), device_(open_cuda_device(index)) {
    device_->use();
    collectives_ = make_nccl_communicator(group, *device_);
    for (auto& block : blocks_) block = {device_->allocate(kMostElements * 8 * kMostRanks), [this](void* p) { device_->release(p); }};
  }
  // Tensors one behind the other, in one exchange; the operation of `c` and its type count. `c.count`: of the longest.
  void check_each(const Case& c, int round) {
    std::vector<Case> cases;
    std::vector<Exchanged> each;
    size_t at[2] = {};
    for (const int64_t share : {1, 8, 3, 2}) {
      Case& one = cases.emplace_back(c);
      one.count = (c.count / share + group_.size()) / group_.size() * group_.size();
      shift(at);
      put(one, round + static_cast<int>(share));
      each.push_back({in(one), out(one), bytes_of(c.dtype, one.count)});
      for (size_t& a : at) a += (bytes_of(c.dtype, one.count) + 255) / 256 * 256;
    }
    if (c.op == Op::all_reduce) collectives_->all_reduce_each(each, c.dtype, Reduction::sum);
    if (c.op == Op::reduce_scatter) collectives_->reduce_scatter_each(each, c.dtype, Reduction::sum);
    const int shares[] = {1, 8, 3, 2};
    at[0] = at[1] = 0;
    for (size_t i = 0; i < cases.size(); ++i) {
      shift(at);
      expect(cases[i], round + shares[i]);
      for (size_t& a : at) a += (bytes_of(c.dtype, cases[i].count) + 255) / 256 * 256;
    }
    size_t none[2] = {};
    shift(none);
  }
  // Once as it is, then captured and replayed with other numbers.
  void check(const Case& c, int round) {
    put(c, round);
    call(c);
    expect(c, round);
    device_->begin_capture();
    call(c);
    const auto captured = device_->end_capture();
    for (int again = 1; again < 4; ++again) {
      put(c, round + again);
      device_->launch(*captured);
      expect(c, round + again);
    }
  }

 private:
  void shift(const size_t (&by)[2]) { shift_[0] = by[0], shift_[1] = by[1]; }
  std::byte* block(size_t i) const { return static_cast<std::byte*>(blocks_[i].get()) + shift_[i]; }
  void* out(const Case& c) const { return block(c.in_place ? 0 : 1); }
  // In place, the input of an all-gather is the rank's place in its output.
  void* in(const Case& c) const {
    const bool has_place = c.in_place && c.op == Op::all_gather;
    return block(0) + (has_place ? static_cast<size_t>(group_.rank()) * bytes_of(c.dtype, c.count) : 0);
  }
  int64_t out_count(const Case& c) const {
    return c.op == Op::all_gather ? c.count * group_.size() : c.op == Op::reduce_scatter ? c.count / group_.size() : c.count;
  }
  double wanted(const Case& c, int64_t i, int round) const {
    if (c.op == Op::all_gather) return element(static_cast<int>(i / c.count), i % c.count, round);
    const int64_t at = c.op == Op::reduce_scatter ? group_.rank() * out_count(c) + i : i;
    double sum = 0;
    for (int r = 0; r < group_.size(); ++r) sum += element(r, at, round);
    return sum;
  }
  void call(const Case& c) {
    const size_t bytes = bytes_of(c.dtype, c.count);
    if (c.op == Op::all_reduce) return collectives_->all_reduce(in(c), out(c), bytes, c.dtype, Reduction::sum);
    if (c.op == Op::reduce_scatter) return collectives_->reduce_scatter(in(c), out(c), bytes, c.dtype, Reduction::sum);
    collectives_->all_gather(in(c), out(c), bytes);
  }
  void put(const Case& c, int round) {
    std::vector<double> values;
    for (int64_t i = 0; i < c.count; ++i) values.push_back(element(group_.rank(), i, round));
    std::vector<std::byte> bytes(bytes_of(c.dtype, c.count));
    store_from<double>(c.dtype, bytes.data(), 0, c.count, values.data());
    device_->upload(in(c), bytes.data(), bytes.size());
  }
  void expect(const Case& c, int round) {
    const int64_t count = out_count(c);
    std::vector<std::byte> bytes(bytes_of(c.dtype, count));
    device_->download(bytes.data(), out(c), bytes.size());
    std::vector<double> got(static_cast<size_t>(count));
    load_as<double>(c.dtype, bytes.data(), 0, count, got.data());
    int64_t wrong = 0;
    for (int64_t i = 0; i < count; ++i) wrong += got[static_cast<size_t>(i)] != wanted(c, i, round);
    EXPECT_EQ(wrong, 0) << "of " << count << " " << name_of(c.dtype) << ", operation " << static_cast<int>(c.op) << ", rank "
                        << group_.rank() << ", round " << round;
  }

  Communicator& group_;
  std::shared_ptr<Device> device_;
  std::unique_ptr<DeviceCommunicator> collectives_;
  std::shared_ptr<void> blocks_[2];
  size_t shift_[2] = {};  // where in the blocks the tensor at hand begins
};

// Rows of a residual, the ranks' sum and a norm, in one kernel, and in the plainest way.
class SumWithNormOfTest {
 public:
  SumWithNormOfTest(Communicator& group, DeviceCommunicator& collectives, Device& device)
      : group_(group), collectives_(collectives), device_(device) {
    for (auto& block : blocks_) block = {device_.allocate(kMostElements * 4), [this](void* p) { device_.release(p); }};
  }
  // In place: the sum is written over what is summed. `mixed`: the last rank sums in a step of its own, and does nothing more.
  void check(DType dtype, int64_t rows, int64_t n, bool in_place, bool mixed) {
    if (!collectives_.joins_norm(rows, n, dtype)) return;
    ++checked;
    SumWithNorm s{rows, n, dtype, 1e-3f, at(0), at(1), at(2), in_place ? at(0) : at(3), at(4)};
    const bool alone = mixed && group_.rank() == group_.size() - 1;
    const auto run = [&] {
      if (alone) return collectives_.all_reduce(at(0), at(3), bytes_of(dtype, rows * n), dtype, Reduction::sum);
      collectives_.sum_with_norm(s);
    };
    put(s, 0);
    run();
    if (!alone) expect(s, 0);
    device_.begin_capture();
    run();
    const auto captured = device_.end_capture();
    for (int round = 1; round < 4; ++round) {
      put(s, round);
      device_.launch(*captured);
      if (!alone) expect(s, round);
    }
    device_.synchronize();
  }
  int checked = 0;

 private:
  void* at(size_t i) const { return blocks_[i].get(); }
  static double residual(int64_t i, int round) { return static_cast<double>((i * 5 + round) % 23 - 11) / 4; }
  static double scale(int64_t i) { return static_cast<double>(i % 7 + 1) / 4; }
  template <typename F>
  void put_numbers(void* to, DType dtype, int64_t count, const F& number) {
    std::vector<double> values;
    for (int64_t i = 0; i < count; ++i) values.push_back(number(i));
    std::vector<std::byte> bytes(bytes_of(dtype, count));
    store_from<double>(dtype, bytes.data(), 0, count, values.data());
    device_.upload(to, bytes.data(), bytes.size());
  }
  void put(const SumWithNorm& s, int round) {
    put_numbers(at(0), s.dtype, s.rows * s.n, [&](int64_t i) { return element(group_.rank(), i, round); });
    put_numbers(at(1), s.dtype, s.rows * s.n, [&](int64_t i) { return residual(i, round); });
    put_numbers(at(2), s.dtype, s.n, scale);
    device_.clear(at(4), bytes_of(s.dtype, s.rows * s.n));
  }
  std::vector<double> numbers_at(const void* from, const SumWithNorm& s) {
    std::vector<std::byte> bytes(bytes_of(s.dtype, s.rows * s.n));
    device_.download(bytes.data(), from, bytes.size());
    std::vector<double> got(static_cast<size_t>(s.rows * s.n));
    load_as<double>(s.dtype, bytes.data(), 0, s.rows * s.n, got.data());
    return got;
  }
  void expect(const SumWithNorm& s, int round) {
    const std::vector<double> sum = numbers_at(s.sum, s), y = numbers_at(s.y, s);
    const double step = s.dtype == DType::float32 ? 1e-5 : s.dtype == DType::float16 ? 0x1p-10 : 0x1p-7;
    int64_t wrong = 0;
    for (int64_t row = 0; row < s.rows; ++row) {
      double square = 0;
      std::vector<double> wanted;
      for (int64_t i = row * s.n; i < (row + 1) * s.n; ++i) {
        double all = residual(i, round);
        for (int r = 0; r < group_.size(); ++r) all += element(r, i, round);
        wanted.push_back(all), square += all * all;
        wrong += sum[static_cast<size_t>(i)] != all;  // few bits: exact in every type
      }
      for (int64_t i = 0; i < s.n; ++i) {
        const double norm = wanted[static_cast<size_t>(i)] / std::sqrt(square / static_cast<double>(s.n) + s.epsilon) * scale(i);
        wrong += !(std::fabs(y[static_cast<size_t>(row * s.n + i)] - norm) <= step * (1 + std::fabs(norm)));
      }
    }
    EXPECT_EQ(wrong, 0) << s.rows << " rows of " << s.n << " " << name_of(s.dtype) << ", rank " << group_.rank() << ", round " << round;
  }

  Communicator& group_;
  DeviceCommunicator& collectives_;
  Device& device_;
  std::shared_ptr<void> blocks_[5];
};

TEST(NcclOnDevices, SumsWithNorms) {
  const int ranks = std::min<int>(kMostRanks, static_cast<int>(cuda_devices().size()));
  if (ranks < 2 || !built_with_nccl()) GTEST_SKIP() << "needs two GPUs and NCCL";
  auto groups = make_thread_communicators(ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&group = *groups[static_cast<size_t>(r)], r] {
      const std::shared_ptr<Device> device = open_cuda_device(r);
      device->use();
      const auto collectives = make_nccl_communicator(group, *device);
      SumWithNormOfTest test(group, *collectives, *device);
      for (DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
        for (int64_t rows = 1; rows <= 8; ++rows) {
          for (int64_t n : {4, 100, 768, 1024, 4096, 4098, 5120, 8192}) {
            test.check(dtype, rows, n, rows % 2 == 0, n % 3 == 1);
          }
        }
      }
      EXPECT_GT(test.checked, 50) << "peer memory is not used";
      group.barrier();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(NcclOnDevices, AllSizes) {
  const int ranks = std::min<int>(kMostRanks, static_cast<int>(cuda_devices().size()));
  if (ranks < 2 || !built_with_nccl()) GTEST_SKIP() << "needs two GPUs and NCCL";
  auto groups = make_thread_communicators(ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&group = *groups[static_cast<size_t>(r)], r, ranks] {
      RankOfTest rank(group, r);
      int round = 0;
      for (DType dtype : {DType::float32, DType::float16, DType::bfloat16, DType::float64, DType::int32}) {
        for (int64_t count : {1, 2, 4, 100, 2052, 4096, 4098, 32768, 65536, 131072, 150000, 600000}) {
          rank.check({Op::all_reduce, dtype, count, false}, round += 10);
          rank.check({Op::all_reduce, dtype, count, true}, round += 10);
          rank.check({Op::reduce_scatter, dtype, (count + ranks - 1) / ranks * ranks, false}, round += 10);
          rank.check({Op::all_gather, dtype, count, false}, round += 10);
          rank.check({Op::all_gather, dtype, count, true}, round += 10);
          rank.check_each({Op::all_reduce, dtype, count, false}, round += 10);
          rank.check_each({Op::all_reduce, dtype, count, true}, round += 10);
          rank.check_each({Op::reduce_scatter, dtype, count, false}, round += 10);
        }
      }
      group.barrier();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace fretsaw
