// Arrays and models for the tests of the command train.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <type_traits>
#include <vector>

#include "tests/cli/command.h"

namespace fretsaw {

// What stands behind the command's name.
using Arguments = std::vector<std::string>;

inline Arguments operator+(Arguments a, const Arguments& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// A float32 or int64 array as NumPy writes it.
template <typename T>
void write_array(const std::vector<T>& values, const std::string& shape, const std::string& path) {
  std::string header =
      std::string("{'descr': '") + (std::is_same_v<T, float> ? "<f4" : "<i8") + "', 'fortran_order': False, 'shape': (" + shape + "), }";
  header.resize(117, ' ');  // so that the data begins at a multiple of 64
  header += '\n';
  std::string text("\x93NUMPY\x01\x00", 8);
  text += static_cast<char>(header.size()), text += '\0', text += header;
  text.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  write_text(text, path);
}

// x.npy [samples, 4] and target.npy [samples], whether x's first column is positive, in a new folder.
inline void write_samples(const std::string& folder, int samples) {
  std::filesystem::create_directory(folder);
  std::vector<float> x;
  std::vector<int64_t> target;
  for (int i = 0; i < samples; ++i) {
    for (int k = 0; k < 4; ++k) x.push_back(static_cast<float>((i * 37 + k * 101) % 41 - 20) / 20);
    target.push_back(x[static_cast<size_t>(i) * 4] > 0);
  }
  const std::string count = std::to_string(samples);
  write_array(x, count + ", 4", folder + "/x.npy"), write_array(target, count + ",", folder + "/target.npy");
}

}  // namespace fretsaw
