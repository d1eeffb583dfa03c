// Which vector instructions this machine has.
#include "kernels/cpu/isa.h"

#include <cstdlib>
#include <string_view>

namespace fretsaw {

namespace {

Isa detect() {
#if defined(__x86_64__)
  const char* asked = std::getenv("FRETSAW_ISA");
  const std::string_view limit = asked ? asked : "";
  if (limit == "baseline") return Isa::baseline;
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::baseline;
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
  return wide && limit != "avx2" ? Isa::avx512 : Isa::avx2;
#else
  return Isa::baseline;
#endif
}

}  // namespace

Isa machine_isa() {
  static const Isa isa = detect();
  return isa;
}

}  // namespace fretsaw
