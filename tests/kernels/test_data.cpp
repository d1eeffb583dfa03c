// Reading and comparing ONNX's test data.
#include "tests/kernels/test_data.h"

#include <onnx/onnx-data.pb.h>
#include <onnx/onnx_pb.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "graph/errors.h"
#include "graph/io.h"
#include "kernels/cpu/convert.h"
#include "tests/kernels/interpreter.h"

namespace fretsaw::testing {

namespace {

RuntimeValue value_from(const onnx::TensorProto& proto) {
  return value_of(tensor_from_proto(proto, ""));
}

RuntimeValue value_from(const onnx::SequenceProto& proto) {
  RuntimeValue value;
  value.kind = RuntimeValue::Kind::sequence;
  for (const auto& tensor : proto.tensor_values()) value.items.push_back(value_from(tensor));
  if (!value.items.empty()) value.element = value.items[0].tensor.dtype;
  return value;
}

RuntimeValue value_from(const onnx::OptionalProto& proto) {
  if (proto.has_tensor_value()) return value_from(proto.tensor_value());
  if (proto.has_sequence_value()) return value_from(proto.sequence_value());
  return {};
}

template <typename Proto>
RuntimeValue parse(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  Proto proto;
  if (!proto.ParseFromIstream(&file)) throw Error("can't be parsed").in_file(path);
  return value_from(proto);
}

std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", x);
  return text;
}

std::string float_difference(const double* got, const double* wanted, int64_t n, Tolerance tolerance) {
  double worst = 0;
  int64_t where = -1;
  for (int64_t i = 0; i < n; ++i) {
    const double g = got[i], w = wanted[i];
    if (std::isnan(g) && std::isnan(w)) continue;
    if (g == w) continue;
    const bool finite = std::isfinite(g) && std::isfinite(w);
    const double error = finite ? std::fabs(g - w) : INFINITY;
    if (error <= tolerance.absolute + tolerance.relative * std::fabs(w) || error <= worst) continue;
    worst = error;
    where = i;
  }
  return where < 0 ? "" : "element " + std::to_string(where) + " is " + number(got[where]) + ", wanted " + number(wanted[where]);
}

std::string tensor_difference(const TensorView& got, const TensorView& wanted, Tolerance tolerance) {
  if (got.dtype != wanted.dtype) return "type " + std::string(name_of(got.dtype)) + " for " + std::string(name_of(wanted.dtype));
  if (got.dims != wanted.dims) return "shape " + to_string(got.dims) + " for " + to_string(wanted.dims);
  const int64_t n = got.count();
  if (got.dtype == DType::string) {
    for (int64_t i = 0; i < n; ++i) {
      const std::string &g = got.as<std::string>()[i], &w = wanted.as<std::string>()[i];
      if (g != w) return "element " + std::to_string(i) + " is '" + g + "', wanted '" + w + "'";
    }
    return "";
  }
  if (got.dtype == DType::complex64 || got.dtype == DType::complex128) {
    const DType part = got.dtype == DType::complex64 ? DType::float32 : DType::float64;
    std::vector<double> g(static_cast<size_t>(2 * n)), w(static_cast<size_t>(2 * n));
    load_as<double>(part, got.data, 0, 2 * n, g.data());
    load_as<double>(part, wanted.data, 0, 2 * n, w.data());
    return float_difference(g.data(), w.data(), 2 * n, tolerance);
  }
  if (is_float(got.dtype)) {
    std::vector<double> g(static_cast<size_t>(n)), w(static_cast<size_t>(n));
    load_as<double>(got.dtype, got.data, 0, n, g.data());
    load_as<double>(wanted.dtype, wanted.data, 0, n, w.data());
    return float_difference(g.data(), w.data(), n, tolerance);
  }
  std::vector<int64_t> g(static_cast<size_t>(n)), w(static_cast<size_t>(n));
  load_as<int64_t>(got.dtype, got.data, 0, n, g.data());
  load_as<int64_t>(wanted.dtype, wanted.data, 0, n, w.data());
  for (size_t i = 0; i < g.size(); ++i) {
    if (g[i] != w[i]) return "element " + std::to_string(i) + " is " + std::to_string(g[i]) + ", wanted " + std::to_string(w[i]);
  }
  return "";
}

}  // namespace

std::vector<std::string> data_files(const std::string& folder, const std::string& prefix) {
  std::vector<std::string> files;
  for (;;) {
    std::string path = folder + "/" + prefix + "_" + std::to_string(files.size()) + ".pb";
    if (!std::filesystem::exists(path)) return files;
    files.push_back(std::move(path));
  }
}

RuntimeValue read_value(const std::string& path, const Type& type) {
  if (type.kind == Type::Kind::sequence) return parse<onnx::SequenceProto>(path);
  if (type.kind == Type::Kind::optional) return parse<onnx::OptionalProto>(path);
  return parse<onnx::TensorProto>(path);
}

std::string difference(const RuntimeValue& got, const RuntimeValue& wanted, Tolerance tolerance) {
  if (got.kind != wanted.kind) return "another kind of value";
  if (got.kind == RuntimeValue::Kind::tensor) return tensor_difference(got.tensor, wanted.tensor, tolerance);
  if (got.items.size() != wanted.items.size()) {
    return "a sequence of " + std::to_string(got.items.size()) + " for one of " + std::to_string(wanted.items.size());
  }
  for (size_t i = 0; i < got.items.size(); ++i) {
    const std::string reason = difference(got.items[i], wanted.items[i], tolerance);
    if (!reason.empty()) return "item " + std::to_string(i) + ": " + reason;
  }
  return "";
}

}  // namespace fretsaw::testing
