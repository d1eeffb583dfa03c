// Walks a serialized ModelProto or TensorProto and replaces large raw_data fields by their place in the file.
#include "graph/io/wire.h"

#include <cstring>

#include "graph/errors.h"

namespace fretsaw {
namespace {

enum class Message { model, graph, node, attribute, tensor, function, other };

// The message a length-delimited field holds (numbers from onnx-ml.proto).
Message child(Message in, uint32_t field) {
  switch (in) {
    case Message::model:
      return field == 7 ? Message::graph : field == 25 ? Message::function : Message::other;
    case Message::graph:
      return field == 1 ? Message::node : field == 5 ? Message::tensor : Message::other;
    case Message::node:
      return field == 5 ? Message::attribute : Message::other;
    case Message::attribute:
      return field == 5 || field == 10 ? Message::tensor : field == 6 || field == 11 ? Message::graph : Message::other;
    case Message::function:
      return field == 7 ? Message::node : Message::other;
    default:
      return Message::other;
  }
}

constexpr uint32_t kRawData = 9, kExternalData = 13;
enum WireType : uint32_t { varint = 0, fixed64 = 1, delimited = 2, group_start = 3, group_end = 4, fixed32 = 5 };

void put_varint(std::string& out, uint64_t v) {
  while (v >= 0x80) {
    out.push_back(static_cast<char>(v | 0x80));
    v >>= 7;
  }
  out.push_back(static_cast<char>(v));
}

void put_bytes(std::string& out, uint32_t field, const std::string& bytes) {
  put_varint(out, uint64_t{field} << 3 | delimited);
  put_varint(out, bytes.size());
  out += bytes;
}

class Stripper {
 public:
  Stripper(std::span<const std::byte> file, size_t threshold)
      : base_(reinterpret_cast<const char*>(file.data())), size_(file.size()), threshold_(threshold) {}

  std::string run(Message message) {
    std::string out;
    copy(message, 0, size_, out, 0);
    return out;
  }

 private:
  [[noreturn]] static void damaged() {
    throw Error("is not an ONNX model, or is damaged: its bytes do not parse",
                "check that the file is complete and was written by an ONNX exporter");
  }

  uint64_t get_varint(size_t& at, size_t end) const {
    uint64_t v = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (at >= end) damaged();
      auto b = static_cast<uint8_t>(base_[at++]);
      v |= uint64_t{b & 0x7fu} << shift;
      if (!(b & 0x80)) return v;
    }
    damaged();
  }

  // The end of the field that starts its payload at `at`; for delimited fields `at` moves past the length.
  size_t payload_end(uint32_t wire, size_t& at, size_t end) const {
    uint64_t length = 0;
    switch (wire) {
      case varint: {
        size_t p = at;
        get_varint(p, end);
        return p;
      }
      case fixed64:
        length = 8;
        break;
      case fixed32:
        length = 4;
        break;
      case delimited:
        length = get_varint(at, end);
        break;
      default:
        damaged();  // ONNX has no groups
    }
    if (length > end - at) damaged();
    return at + static_cast<size_t>(length);
  }

  void copy(Message message, size_t at, size_t end, std::string& out, int depth) const {
    if (depth > 90) throw Error("is nested too deeply", "graphs within graphs may be at most a few levels deep");
    size_t mapped_at = 0, mapped_length = 0;
    while (at < end) {
      size_t start = at;
      uint64_t tag = get_varint(at, end);
      auto field = static_cast<uint32_t>(tag >> 3);
      auto wire = static_cast<uint32_t>(tag & 7);
      size_t stop = payload_end(wire, at, end);
      Message inner = wire == delimited ? child(message, field) : Message::other;
      if (message == Message::tensor && field == kRawData && wire == delimited && stop - at >= threshold_) {
        mapped_at = at;
        mapped_length = stop - at;
      } else if (inner != Message::other && stop - at > threshold_) {
        std::string sub;
        copy(inner, at, stop, sub, depth + 1);
        put_bytes(out, field, sub);
      } else {
        out.append(base_ + start, stop - start);
      }
      at = stop;
    }
    if (mapped_length > 0) put_bytes(out, kExternalData, entry(mapped_at, mapped_length));
  }

  static std::string entry(size_t offset, size_t length) {  // a StringStringEntryProto
    std::string e;
    put_bytes(e, 1, kMappedKey);
    put_bytes(e, 2, std::to_string(offset) + " " + std::to_string(length));
    return e;
  }

  const char* base_;
  size_t size_, threshold_;
};

}  // namespace

std::string strip_weights(std::span<const std::byte> file, size_t threshold) {
  return Stripper(file, threshold).run(Message::model);
}

std::string strip_tensor(std::span<const std::byte> file, size_t threshold) {
  return Stripper(file, threshold).run(Message::tensor);
}

}  // namespace fretsaw
