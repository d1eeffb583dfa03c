// The protobuf wire format, as far as it takes to leave weights in the file when a model is parsed.
#pragma once
#include <cstdint>
#include <span>
#include <string>

namespace fretsaw {

// The key of the external_data entry that stands for bytes left in the model's own file; its value is "OFFSET LENGTH".
inline constexpr char kMappedKey[] = "fretsaw.mapped";

// A copy of a serialized ModelProto in which every TensorProto.raw_data of at least `threshold` bytes is replaced by a kMappedKey entry
// giving its place in `file`. So a 2 GiB model parses into a few MB, and files above protobuf's limit can be read at all.
// Throws Error when the bytes are no well-formed message.
std::string strip_weights(std::span<const std::byte> file, size_t threshold = 1024);
// The same of a file that holds one TensorProto.
std::string strip_tensor(std::span<const std::byte> file, size_t threshold = 1024);

}  // namespace fretsaw
