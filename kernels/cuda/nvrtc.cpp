// Compiling by NVRTC, and the libraries that the process has loaded.
#include "kernels/cuda/nvrtc.h"

#include <fmt/format.h>
#include <nvrtc.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/disk_cache.h"

namespace fretsaw::cuda {
namespace {

void check(nvrtcResult status, const char* call) {
  if (status == NVRTC_SUCCESS) return;
  throw Error(std::string(call) + " failed: " + nvrtcGetErrorString(status), "check that NVRTC is whole and of the program's version",
              ErrorCode::device);
}
#define FRETSAW_NVRTC_CHECK(call) check((call), #call)

// The newest architecture that NVRTC knows and the device runs.
int known_architecture(int compute_capability) {
  static const std::vector<int> known = [] {
    int count = 0;
    FRETSAW_NVRTC_CHECK(nvrtcGetNumSupportedArchs(&count));
    std::vector<int> all(static_cast<size_t>(count));
    FRETSAW_NVRTC_CHECK(nvrtcGetSupportedArchs(all.data()));
    return all;
  }();
  int best = 0;
  for (int each : known) {
    if (each <= compute_capability) best = std::max(best, each);
  }
  if (best) return best;
  throw Error(fmt::format("NVRTC compiles nothing for devices of compute capability {}", compute_capability), "use a newer device",
              ErrorCode::device);
}

std::vector<std::string> options_for(int compute_capability) {
  const int architecture = known_architecture(compute_capability);
  const char* kind = architecture == compute_capability ? "sm" : "compute";
  return {fmt::format("--gpu-architecture={}_{}", kind, architecture), "--std=c++17", "--fmad=false"};
}

std::string key_of(const std::string& source, int compute_capability) {
  int major = 0, minor = 0;
  FRETSAW_NVRTC_CHECK(nvrtcVersion(&major, &minor));
  std::string key = fmt::format("nvrtc {}.{}", major, minor);
  for (const std::string& option : options_for(compute_capability)) key += ' ' + option;
  return key + '\n' + source;
}

class Program {
 public:
  explicit Program(const std::string& source) {
    FRETSAW_NVRTC_CHECK(nvrtcCreateProgram(&program_, source.c_str(), "fretsaw.cu", 0, nullptr, nullptr));
  }
  ~Program() { nvrtcDestroyProgram(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void compile(const std::vector<std::string>& options) {
    std::vector<const char*> words;
    for (const std::string& option : options) words.push_back(option.c_str());
    const nvrtcResult status = nvrtcCompileProgram(program_, static_cast<int>(words.size()), words.data());
    if (status == NVRTC_SUCCESS) return;
    throw Error(std::string("a kernel made for a step does not compile: ") + nvrtcGetErrorString(status) + "\n" + log(),
                "report this as a fault, with the model", ErrorCode::device);
  }
  std::string code(bool machine_code) {
    size_t size = 0;
    FRETSAW_NVRTC_CHECK(machine_code ? nvrtcGetCUBINSize(program_, &size) : nvrtcGetPTXSize(program_, &size));
    std::string content(size, '\0');
    FRETSAW_NVRTC_CHECK(machine_code ? nvrtcGetCUBIN(program_, content.data()) : nvrtcGetPTX(program_, content.data()));
    return content;
  }

 private:
  std::string log() {
    size_t size = 0;
    if (nvrtcGetProgramLogSize(program_, &size) != NVRTC_SUCCESS || size == 0) return "";
    std::string text(size, '\0');
    nvrtcGetProgramLog(program_, text.data());
    return text;
  }
  nvrtcProgram program_ = nullptr;
};

// A source's code, loaded. It stays for the life of the process: kernels of it may be in captured graphs.
struct Loaded {
  std::mutex mutex;
  cudaLibrary_t library = nullptr;
};

}  // namespace

std::string compile_source(const std::string& source, int compute_capability) {
  Program program(source);
  program.compile(options_for(compute_capability));
  return program.code(known_architecture(compute_capability) == compute_capability);
}

cudaKernel_t kernel_of_source(const std::string& source, const std::string& name, int compute_capability) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<Loaded>> all;
  const std::string key = key_of(source, compute_capability);
  Loaded* loaded;
  {
    const std::lock_guard lock(mutex);
    std::unique_ptr<Loaded>& place = all[key];
    if (!place) place = std::make_unique<Loaded>();
    loaded = place.get();
  }
  // Ranks that want the same source wait for one of them; other sources are compiled meanwhile.
  const std::lock_guard lock(loaded->mutex);
  if (!loaded->library) {
    std::optional<std::string> code = read_cache("nvrtc", key);
    if (!code) {
      code = compile_source(source, compute_capability);
      write_cache("nvrtc", key, *code);
    }
    FRETSAW_CUDA_CHECK(cudaLibraryLoadData(&loaded->library, code->data(), nullptr, nullptr, 0, nullptr, nullptr, 0));
  }
  cudaKernel_t kernel = nullptr;
  FRETSAW_CUDA_CHECK(cudaLibraryGetKernel(&kernel, loaded->library, name.c_str()));
  return kernel;
}

}  // namespace fretsaw::cuda
