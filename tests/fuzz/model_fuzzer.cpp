// libFuzzer target: any bytes as a model file, through reading, checking, the passes, shape inference and cutting in two.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>
#include <string>

#include "graph/errors.h"
#include "graph/io.h"
#include "graph/passes.h"
#include "partitioner/partition.h"

namespace fretsaw {
namespace {

// The bytes as a file that has a path and no name on any disk.
class MemoryFile {
 public:
  MemoryFile(const uint8_t* data, size_t size) : descriptor_(memfd_create("model", 0)) {
    if (descriptor_ < 0 || write(descriptor_, data, size) != static_cast<ssize_t>(size)) __builtin_trap();
  }
  ~MemoryFile() { close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  int descriptor_;
};

// What a sound program says of a bad file is an Error; anything else that is thrown ends the fuzzer.
void try_all(const std::string& path) {
  try {
    Model model = read_model(path, {.allow_missing_weights = true});
    check_model(model);
    Model normal = clone(model);
    run_passes(normal, normalise_passes());
    infer_shapes(normal);
    run_passes(normal, pattern_passes());
    mark_groups(normal);
    PartitionOptions options;
    options.mesh.pipeline = 2;
    partition(clone(model), options);
  } catch (const Error&) {
  } catch (const std::bad_alloc&) {
  }
}

}  // namespace
}  // namespace fretsaw

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const fretsaw::MemoryFile file(data, size);
  fretsaw::try_all(file.path());
  return 0;
}
