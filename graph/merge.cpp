// Merging: finds the parts of each weight in the stages' files and lays them side by side again.
#include "graph/merge.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <unordered_map>

#include "graph/errors.h"
#include "graph/io.h"
#include "graph/value_parts.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;
constexpr int64_t kLeastIrVersion = 10;  // the first with node metadata, which keeps fusion groups
constexpr const char* kRemedy = "the plan is damaged; partition the model again";

TensorPtr header_of(const Tensor& tensor, const std::string& missing) {
  auto header = std::make_shared<Tensor>();
  header->name = tensor.name;
  header->dtype = tensor.dtype;
  header->dims = tensor.dims;
  header->missing = missing;
  return header;
}

// Consecutive rows of the whole, and where a piece has them.
struct Run {
  int64_t begin, end;  // in the whole
  int64_t first;       // of `begin` in the piece
  TensorPtr tensor;
};

// Mapped bytes that were read once go from this process's memory again: a merge takes no more of it than what it is just writing.
void let_go(const Tensor& tensor, uint64_t begin, uint64_t end) {
  if (!tensor.file || begin >= end) return;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(tensor.data + begin) / page * page, last = reinterpret_cast<uintptr_t>(tensor.data + end);
  ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);  // read-only and of a file: they come back when they are needed
}

// A tensor that is cut along one dimension: blocks, one for each index before that dimension, of rows, which lie in the pieces.
class Assembly {
 public:
  Assembly(const Tensor& whole, size_t dim, std::vector<Run> runs) : runs_(std::move(runs)), rows_(static_cast<uint64_t>(whole.dims[dim])) {
    row_bytes_ = static_cast<uint64_t>(bits_of(whole.dtype)) / 8;
    for (size_t d = dim + 1; d < whole.dims.size(); ++d) row_bytes_ *= static_cast<uint64_t>(whole.dims[d]);
    for (const Run& run : runs_) piece_rows_.push_back(static_cast<uint64_t>(run.tensor->dims[dim]));
  }

  void read(uint64_t first, std::span<std::byte> out) const {
    std::vector<std::pair<uint64_t, uint64_t>> touched(runs_.size(), {UINT64_MAX, 0});
    while (!out.empty()) {
      const uint64_t block = first / (rows_ * row_bytes_), in_block = first % (rows_ * row_bytes_);
      const size_t r = run_of(static_cast<int64_t>(in_block / row_bytes_));
      const Run& run = runs_[r];
      const uint64_t in_run = in_block - static_cast<uint64_t>(run.begin) * row_bytes_;
      const size_t count = std::min<uint64_t>(static_cast<uint64_t>(run.end - run.begin) * row_bytes_ - in_run, out.size());
      const uint64_t at = (block * piece_rows_[r] + static_cast<uint64_t>(run.first)) * row_bytes_ + in_run;
      std::memcpy(out.data(), run.tensor->data + at, count);
      touched[r] = {std::min(touched[r].first, at), at + count};
      out = out.subspan(count);
      first += count;
    }
    for (size_t r = 0; r < runs_.size(); ++r) let_go(*runs_[r].tensor, touched[r].first, touched[r].second);
  }

 private:
  size_t run_of(int64_t row) const {
    const auto after = std::upper_bound(runs_.begin(), runs_.end(), row, [](int64_t x, const Run& run) { return x < run.begin; });
    return static_cast<size_t>(after - runs_.begin()) - 1;
  }

  std::vector<Run> runs_;  // ascending, without gaps
  std::vector<uint64_t> piece_rows_;
  uint64_t rows_, row_bytes_;
};

// Rows that are there, each once, and those that are nowhere.
struct Cover {
  std::vector<Run> runs;
  Intervals gaps;
};
Cover cover(const std::vector<TensorPiece>& pieces, int dim, int64_t size) {
  std::vector<Run> all;
  for (const TensorPiece& piece : pieces) {
    if (piece.part.dim != dim) continue;
    int64_t first = 0;
    for (const Interval& i : piece.part.intervals) {
      all.push_back({i.begin, i.end, first, piece.tensor});
      first += i.size();
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const Run& a, const Run& b) { return a.begin < b.begin; });
  Cover result;
  int64_t done = 0;
  for (Run& run : all) {
    if (run.end <= done) continue;
    if (run.begin > done) result.gaps.push_back({done, run.begin});
    const int64_t seen = std::max<int64_t>(done - run.begin, 0);  // several ranks may hold a row
    run.begin += seen;
    run.first += seen;
    done = run.end;
    result.runs.push_back(std::move(run));
  }
  if (done < size) result.gaps.push_back({done, size});
  return result;
}

void check_fit(const Tensor& whole, const TensorPiece& piece) {
  const ValuePart& part = piece.part;
  auto fail = [&](const std::string& what) {
    throw Error(fmt::format("a part of tensor '{}' {}{} {}", whole.name, name_of(whole.dtype), to_string(whole.dims), what), kRemedy);
  };
  if (part.of_part) throw Error(fmt::format("tensor '{}' is cut over two tensor axes", whole.name), "merge a plan with one tensor axis");
  Dims expected = whole.dims;
  if (part.dim >= 0) {
    if (static_cast<size_t>(part.dim) >= expected.size() || part.size != expected[static_cast<size_t>(part.dim)])
      fail(fmt::format("is said to be of a dimension {} of size {}", part.dim, part.size));
    if (bits_of(whole.dtype) % 8 != 0) fail("is of elements smaller than a byte");
    int64_t last = 0;
    for (const Interval& i : part.intervals) {
      if (i.begin < last || i.end <= i.begin || i.end > part.size) fail(fmt::format("has the rows [{}, {})", i.begin, i.end));
      last = i.end;
    }
    expected[static_cast<size_t>(part.dim)] = size_of(part.intervals);
  }
  if (piece.tensor->dtype != whole.dtype || piece.tensor->dims != expected)
    fail(fmt::format("is {}{}", name_of(piece.tensor->dtype), to_string(piece.tensor->dims)));
}

TensorPtr renamed(const Tensor& tensor, const std::string& name) {
  auto copy = std::make_shared<Tensor>(tensor);
  copy->name = name;
  return copy;
}

TensorPtr join_runs(const Tensor& whole, int dim, std::vector<Run> runs) {
  for (const Run& run : runs)
    if (run.tensor->is_missing()) return header_of(whole, run.tensor->missing);
  auto tensor = std::make_shared<Tensor>();
  tensor->name = whole.name;
  tensor->dtype = whole.dtype;
  tensor->dims = whole.dims;
  if (whole.bytes() == 0) return tensor;
  const auto assembly = std::make_shared<const Assembly>(whole, static_cast<size_t>(dim), std::move(runs));
  tensor->generate = [assembly](uint64_t first, std::span<std::byte> bytes) { assembly->read(first, bytes); };
  return tensor;
}

}  // namespace

std::shared_ptr<Model> without_weights(Model model) {
  auto whole = std::make_shared<Model>(std::move(model));
  remove_dead_nodes(*whole->graph);  // no stage has them, nor their weights
  whole->ir_version = std::max(whole->ir_version, kLeastIrVersion);
  for (Value* v : whole->graph->initializers())
    if (v->constant->dtype != DType::string && v->constant->bytes() >= kExternalFrom)
      v->constant = header_of(*v->constant, std::string(kWholeFile) + " holds no weights");
  return whole;
}

TensorPtr assemble(const Tensor& whole, const std::vector<TensorPiece>& pieces) {
  for (const TensorPiece& piece : pieces) check_fit(whole, piece);
  for (const TensorPiece& piece : pieces)
    if (piece.part.dim < 0) return renamed(*piece.tensor, whole.name);
  if (pieces.empty()) throw Error(fmt::format("tensor '{}' is in no file of the plan", whole.name), kRemedy);
  // Two nodes may have the tensor cut along different dimensions; one of them that is complete will do.
  for (size_t d = 0; d < whole.dims.size(); ++d) {
    Cover found = cover(pieces, static_cast<int>(d), whole.dims[d]);
    if (found.gaps.empty()) return join_runs(whole, static_cast<int>(d), std::move(found.runs));
  }
  const int dim = pieces.front().part.dim;
  const Interval gap = cover(pieces, dim, pieces.front().part.size).gaps.front();
  throw Error(fmt::format("rows [{}, {}) of dimension {} of tensor '{}' are in no file of the plan", gap.begin, gap.end, dim, whole.name),
              kRemedy);
}

namespace {

Model read_whole(const Plan& plan) {
  const fs::path path = fs::path(plan.folder) / kWholeFile;
  std::error_code error;
  if (!fs::is_regular_file(path, error))
    throw Error(fmt::format("the plan has no {}, which says how its pieces fit together", kWholeFile), "partition the model again")
        .in_file(plan.folder);
  return read_model(path.string(), {.allow_missing_weights = true});
}

using Pieces = std::unordered_map<std::string, std::vector<TensorPiece>>;  // by name, of every initializer of whole.onnx

// The tensor of whole.onnx that an initializer is a part of. A part names the tensor of the source file, of which normalising may have made
// several (a convolution with and one without the BatchNormalization after it); the initializer's own name is the normalised one's, with a
// number added where a rank holds it in several forms.
Pieces::iterator tensor_of(Pieces& known, const std::string& initializer, const ValuePart& part) {
  if (const auto same = known.find(initializer); same != known.end() || part.of.empty()) return same;
  const size_t stem = initializer.find_last_not_of("0123456789");
  if (stem != std::string::npos && stem + 1 < initializer.size() && initializer[stem] == '_')
    if (const auto numbered = known.find(initializer.substr(0, stem)); numbered != known.end()) return numbered;
  return known.find(part.of);
}

void collect(const Model& model, Pieces& known) {
  const std::map<std::string, ValuePart> parts = recorded_parts(model);
  for (const Value* v : model.graph->initializers()) {
    const auto recorded = parts.find(v->name);
    if (recorded != parts.end() && recorded->second.of.empty()) continue;  // zeros
    const ValuePart part = recorded == parts.end() ? ValuePart{} : recorded->second;
    const auto found = tensor_of(known, v->name, part);
    if (found != known.end()) found->second.push_back({v->constant, part});
  }
}

// The default of an input that no node reads is in no stage. Zeros are as good, and the input can still be left out.
bool is_unread_default(const Graph& graph, const Value* v) {
  const auto is_v = [v](const Value* other) { return other == v; };
  const auto reads = [&](const Node* node) {
    const std::vector<Value*> outer = captures(*node);
    return std::any_of(node->inputs.begin(), node->inputs.end(), is_v) || std::any_of(outer.begin(), outer.end(), is_v);
  };
  return std::any_of(graph.inputs.begin(), graph.inputs.end(), is_v) && std::none_of(graph.outputs.begin(), graph.outputs.end(), is_v) &&
         std::none_of(graph.nodes.begin(), graph.nodes.end(), reads);
}

TensorPtr zeros_like(const Tensor& tensor) {
  auto zeros = std::make_shared<Tensor>(tensor);
  zeros->missing.clear();
  zeros->generate = [](uint64_t, std::span<std::byte> bytes) { std::fill(bytes.begin(), bytes.end(), std::byte{0}); };
  return zeros;
}

}  // namespace

Model merge(const Plan& plan) {
  Model model = read_whole(plan);
  Pieces pieces;
  for (const Value* v : model.graph->initializers()) pieces[v->name];
  for (const PlanGraph& graph : plan.graphs) collect(*graph.model, pieces);
  try {
    for (Value* v : model.graph->initializers())
      if (v->constant->is_missing()) {
        const TensorPtr header = renamed(*v->constant, v->name);
        const std::vector<TensorPiece>& found = pieces.at(v->name);
        v->constant = found.empty() && is_unread_default(*model.graph, v) ? zeros_like(*header) : assemble(*header, found);
      }
  } catch (const Error& e) {
    throw e.in_file(plan.folder);
  }
  return model;
}

}  // namespace fretsaw
