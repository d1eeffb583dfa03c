// Sharding specs of annotations against the forms that the tensor axis knows, both ways.
//
// The devices of a stage are numbered from 0; number = data * T + tensor, or with `data_fastest` tensor * D + data.
//
//   w [8, 12] devices [0, 1], axis 1 in 2           T = 2          [_, tensor]
//   x [4, 8]  devices [0, 1], axis 0 in 2           D = 2          whole: the data axis divides the batch by itself
//   w [8, 12] -1: [0, 2], -2: [1, 3], axis 1 in 2   D = 2, T = 2   [_, tensor]
//   w [8, 12] -1: [0, 1], -2: [2, 3], axis 1 in 2   T = 4          [_, tensor{0:6|0:6|6:12|6:12}]
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "graph/annotations.h"
#include "graph/sharding.h"

namespace fretsaw {

struct StageLayout {
  int data = 1, tensor = 1;
  bool data_fastest = false;
  int size() const { return data * tensor; }
  int data_of(int number) const { return data_fastest ? number % data : number / tensor; }
  int tensor_of(int number) const { return data_fastest ? number / data : number % tensor; }
  int number(int d, int t) const { return data_fastest ? t * data + d : d * tensor + t; }
};
using DeviceNumbers = std::map<int64_t, int>;  // device -> its number in its stage

// For each number, which part the spec gives that device: an index into `spec.devices`, or with no list into the parts in order; -1: none.
std::vector<int> parts_by_number(const TensorAnnotation& spec, const DeviceNumbers& numbers, int devices);
// Along which of its pieces each axis of the spec lies in this part.
std::vector<int64_t> pieces_of_part(const TensorAnnotation& spec, int64_t part);

struct SpecForm {
  std::optional<Sharding> sharding;
  std::string why;  // where there is none
};
// The cut over the tensor axis that the spec asks for.
SpecForm form_of_spec(const TensorAnnotation& spec, const Shape& shape, const DeviceNumbers& numbers, const StageLayout& layout);

// Whether a spec can say it: whole, or parts that are even as can be.
bool fits_spec(const Sharding& sharding);
// devices[data][tensor]; `batch_axis`: the dimension that the data axis divides, -1: none. What a spec can't say is said nearly.
TensorAnnotation spec_of(const std::string& tensor, const Sharding& sharding, int batch_axis,
                         const std::vector<std::vector<int64_t>>& devices);
// Reads Sharding::text back. Throws Error where it does not fit the shape or the number of ranks.
Sharding sharding_from_text(const std::string& text, const Shape& shape, int ranks);

}  // namespace fretsaw
