// A small GPT learns bytes of a real text, as the README shows: better than their frequencies alone, and `run` agrees on how well.
#include <gmock/gmock.h>

#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "graph/io.h"
#include "tests/cli/training_data.h"

namespace fretsaw {
namespace {

constexpr int64_t kSequence = 64;

// Every Debian and Ubuntu has it.
std::string license() {
  return read_text("/usr/share/common-licenses/GPL-3");
}

void write_tokens(const std::string& text, const std::string& path) {
  std::string tokens;
  for (char c : text) tokens += c, tokens += '\0';
  write_text(tokens, path);
}

// The mean of -log p(byte) where p are the frequencies in `known`, one more of each.
double loss_of_frequencies(const std::string& known, const std::string& text) {
  std::array<double, 256> count;
  count.fill(1);
  for (char c : known) ++count[static_cast<unsigned char>(c)];
  double sum = 0;
  for (char c : text) sum -= std::log(count[static_cast<unsigned char>(c)] / static_cast<double>(known.size() + 256));
  return sum / static_cast<double>(text.size());
}

// Cross-entropy of logits [windows, S, 256] and the bytes of `text` that come next.
double loss_of_logits(const Tensor& logits, const std::string& text, int64_t windows) {
  double sum = 0;
  for (int64_t i = 0; i < windows * kSequence; ++i) {
    const float* row = reinterpret_cast<const float*>(logits.data) + i * 256;
    double total = 0;
    for (int k = 0; k < 256; ++k) total += std::exp(static_cast<double>(row[k]));
    sum += std::log(total) - static_cast<double>(row[static_cast<unsigned char>(text[static_cast<size_t>(i) + 1])]);
  }
  return sum / static_cast<double>(windows * kSequence);
}

TEST_F(CommandTest, TrainLearnsAText) {
  const std::string text = license();
  ASSERT_GT(text.size(), 30000u) << "base-files of Debian and Ubuntu have it";
  const size_t cut = text.size() * 9 / 10;
  const std::string known = text.substr(0, cut), held = text.substr(cut);
  std::filesystem::create_directory(path("data"));
  write_tokens(known, path("data/train.bin")), write_tokens(held, path("data/val.bin"));
  ASSERT_EQ(fretsaw({"model", "small_gpt", "--set", "layers=2", "--set", "hidden=64", "-o", path("gpt.onnx")}).exit_code, 0);
  const CommandResult trained = fretsaw({"train",       path("gpt.onnx"),
                                         "--data",      path("data"),
                                         "--eval",      path("data"),
                                         "--sequence",  std::to_string(kSequence),
                                         "--batch",     "8",
                                         "--shape",     "input_ids=8," + std::to_string(kSequence),
                                         "--steps",     "200",
                                         "--optimizer", "adamw:lr=3e-3",
                                         "--lr",        "cosine:peak=3e-3,warmup=20",
                                         "--clip",      "1",
                                         "--threads",   "1",
                                         "--export",    path("trained.onnx"),
                                         "--json"});
  ASSERT_EQ(trained.exit_code, 0) << trained.err;
  const double loss = trained.json()["evals"][0]["loss"];
  EXPECT_LT(loss, loss_of_frequencies(known, held) - 0.3);

  const auto windows = static_cast<int64_t>(held.size() - 1) / kSequence;
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < windows * kSequence; ++i) ids.push_back(static_cast<unsigned char>(held[static_cast<size_t>(i)]));
  write_array(ids, std::to_string(windows) + ", " + std::to_string(kSequence), path("ids.npy"));
  const CommandResult run = fretsaw({"run", path("trained.onnx"), "--input", "input_ids=" + path("ids.npy"), "--output", path("out")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NEAR(loss_of_logits(*read_tensor_file(path("out/output_0.pb")), held, windows), loss, 1e-3);
}

}  // namespace
}  // namespace fretsaw
