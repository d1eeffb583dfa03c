// Running one loop with the vector instructions that the machine has, without building the program for them.
//
//   run_vectorised([&]() FRETSAW_ALWAYS_INLINE { for (int64_t i = 0; i < n; ++i) y[i] = math::exp(x[i]); });
//
// The loop is compiled three times, for any x86-64, for AVX2 and for AVX-512, and the best version for this machine is called.
// Whatever it calls must be inlined into it: math:: of vector_math.h, or functions marked FRETSAW_ALWAYS_INLINE.
// A captured number that the loop reads belongs into a local first (`const float scale = captured;`): otherwise the compiler must
// allow for the loop's writing to change it. The numbers may differ between machines (products and sums are fused where the machine
// can), never between runs on one.
#pragma once
#include <cstdint>

#define FRETSAW_ALWAYS_INLINE __attribute__((always_inline))
// Tells the compiler that no iteration reads what another writes: outputs lie apart from inputs, or exactly on them.
#if defined(__clang__)
#define FRETSAW_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define FRETSAW_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace fretsaw {

enum class Isa : uint8_t { baseline, avx2, avx512 };

// The best of this machine. FRETSAW_ISA=baseline or avx2 asks for less.
Isa machine_isa();

#if defined(__x86_64__)
template <typename F>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"), noinline)) void run_with_avx512(const F& loop) {
  loop();
}
template <typename F>
__attribute__((target("avx2,fma,f16c"), noinline)) void run_with_avx2(const F& loop) {
  loop();
}
#endif

template <typename F>
void run_vectorised(const F& loop) {
#if defined(__x86_64__)
  switch (machine_isa()) {
    case Isa::avx512:
      return run_with_avx512(loop);
    case Isa::avx2:
      return run_with_avx2(loop);
    case Isa::baseline:
      break;
  }
#endif
  loop();
}

}  // namespace fretsaw
