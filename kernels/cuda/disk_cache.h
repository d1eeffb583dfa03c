// Results that take long to find and are found again on the next run: compiled kernels and the choice of algorithms. One small file each
// in $FRETSAW_CACHE, or $XDG_CACHE_HOME/fretsaw, or ~/.cache/fretsaw. A cache that can't be read or written is as good as an empty one.
#pragma once
#include <optional>
#include <string>
#include <string_view>

namespace fretsaw::cuda {

// `kind` is a folder ("nvrtc", "cublaslt"); `key` is everything the content depends on, of any length (versions and device included).
std::optional<std::string> read_cache(std::string_view kind, std::string_view key);
void write_cache(std::string_view kind, std::string_view key, std::string_view content);

}  // namespace fretsaw::cuda
