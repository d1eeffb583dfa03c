// Operators on sequences and optionals. A sequence's items own their memory, so items move between sequences without copying.
#include "kernels/cpu/element_copy.h"
#include "kernels/cpu/families.h"
#include "kernels/cpu/movement.h"

namespace fretsaw {
namespace {

using Kind = RuntimeValue::Kind;

const RuntimeValue& sequence_input(RunContext& r, size_t i) {
  const RuntimeValue& value = r.value(i);
  if (value.kind != Kind::sequence) throw Error("input " + std::to_string(i) + " must be a sequence");
  return value;
}

RuntimeValue empty_sequence(DType element) {
  RuntimeValue value;
  value.kind = Kind::sequence;
  value.element = element;
  return value;
}

// A position in a sequence; `bound` is one more than the last legal one.
int64_t position_input(RunContext& r, size_t i, int64_t bound, int64_t length) {
  const int64_t given = input_int(r, i), at = given < 0 ? given + length : given;
  if (at < 0 || at >= bound) {
    throw Error("position " + std::to_string(given) + " is outside a sequence of " + std::to_string(length) + " items");
  }
  return at;
}

// Output 0 as a tensor with the item's elements.
void write_item(RunContext& r, const RuntimeValue& item) {
  if (item.kind != Kind::tensor) {
    r.output_value(0) = owned_copy(item);
    return;
  }
  copy_view(sized_output(r, 0, item.tensor.dims, item.tensor.dtype), item.tensor, r.threads());
}

CompiledKernel make_sequence_at(const CompileContext&) {
  return {[](RunContext& r) {
    const RuntimeValue& sequence = sequence_input(r, 0);
    const auto length = static_cast<int64_t>(sequence.items.size());
    write_item(r, sequence.items[static_cast<size_t>(position_input(r, 1, length, length))]);
  }};
}

CompiledKernel make_sequence_construct(const CompileContext&) {
  return {[](RunContext& r) {
    require(r.input_count() > 0, "SequenceConstruct needs at least one input");
    RuntimeValue result = empty_sequence(r.input(0).dtype);
    for (size_t i = 0; i < r.input_count(); ++i) {
      require(r.input(i).dtype == result.element, "the items of a sequence must have one type");
      result.items.push_back(owned_copy(r.value(i)));
    }
    r.output_value(0) = std::move(result);
  }};
}

CompiledKernel make_sequence_empty(const CompileContext& c) {
  const auto element = static_cast<DType>(c.node().get_int("dtype", 1));
  return {[element](RunContext& r) { r.output_value(0) = empty_sequence(element); }};
}

CompiledKernel make_sequence_insert(const CompileContext&) {
  return {[](RunContext& r) {
    const RuntimeValue& sequence = sequence_input(r, 0);
    const auto length = static_cast<int64_t>(sequence.items.size());
    const int64_t at = r.has_input(2) ? position_input(r, 2, length + 1, length) : length;
    RuntimeValue result = owned_copy(sequence);
    if (result.items.empty()) result.element = r.input(1).dtype;
    require(result.element == r.input(1).dtype, "the items of a sequence must have one type");
    result.items.insert(result.items.begin() + at, owned_copy(r.value(1)));
    r.output_value(0) = std::move(result);
  }};
}

CompiledKernel make_sequence_erase(const CompileContext&) {
  return {[](RunContext& r) {
    const RuntimeValue& sequence = sequence_input(r, 0);
    const auto length = static_cast<int64_t>(sequence.items.size());
    require(length > 0, "an empty sequence has nothing to erase");
    const int64_t at = r.has_input(1) ? position_input(r, 1, length, length) : length - 1;
    RuntimeValue result = owned_copy(sequence);
    result.items.erase(result.items.begin() + at);
    r.output_value(0) = std::move(result);
  }};
}

CompiledKernel make_sequence_length(const CompileContext&) {
  return {[](RunContext& r) { *r.output(0, {}, DType::int64).as<int64_t>() = static_cast<int64_t>(sequence_input(r, 0).items.size()); }};
}

CompiledKernel make_split_to_sequence(const CompileContext& c) {
  const int64_t axis_attribute = c.node().get_int("axis", 0);
  const bool keep_dims = c.node().get_int("keepdims", 1) != 0;
  return {[=](RunContext& r) {
    const TensorView& x = r.input(0);
    const size_t axis = normalise_axis(axis_attribute, x.rank());
    const int64_t extent = x.dims[axis];
    std::vector<int64_t> sizes(static_cast<size_t>(r.has_input(1) ? 0 : extent), 1);
    if (r.has_input(1) && r.input(1).rank() == 0) {  // one size for all parts, the last may be smaller
      const int64_t size = input_int(r, 1);
      require(size > 0, "the split size must be positive");
      for (int64_t start = 0; start < extent; start += std::min(size, extent - start)) sizes.push_back(std::min(size, extent - start));
    } else if (r.has_input(1)) {
      sizes = r.input_ints(1);
    }
    check_split(sizes, extent);
    RuntimeValue result = empty_sequence(x.dtype);
    int64_t start = 0;
    for (int64_t size : sizes) {
      Dims dims = x.dims;
      dims[axis] = size;
      RuntimeValue item = make_value(x.dtype, dims);
      split_into(item.tensor, x, axis, start, size, r.threads());
      // Without a split every part is one slice, and keepdims says whether its axis stays.
      if (!keep_dims && !r.has_input(1)) item.tensor.dims.erase(item.tensor.dims.begin() + static_cast<ptrdiff_t>(axis));
      result.items.push_back(std::move(item));
      start += size;
    }
    r.output_value(0) = std::move(result);
  }};
}

CompiledKernel make_concat_from_sequence(const CompileContext& c) {
  const int64_t axis_attribute = c.node().get_int("axis", 0);
  const bool new_axis = c.node().get_int("new_axis", 0) != 0;
  return {[=](RunContext& r) {
    const RuntimeValue& sequence = sequence_input(r, 0);
    require(!sequence.items.empty(), "an empty sequence can't be joined");
    std::vector<TensorView> views;
    for (const RuntimeValue& item : sequence.items) {
      require(item.kind == Kind::tensor, "the sequence must hold tensors");
      views.push_back(item.tensor);
    }
    const size_t axis = normalise_axis(axis_attribute, views[0].rank() + (new_axis ? 1 : 0));
    std::vector<const TensorView*> parts;
    for (TensorView& view : views) {
      if (new_axis) {
        require(view.rank() + 1 > axis, "the items of the sequence differ in rank");
        view.dims.insert(view.dims.begin() + static_cast<ptrdiff_t>(axis), 1);
      }
      parts.push_back(&view);
    }
    concat_into(sized_output(r, 0, concat_dims(parts, axis), views[0].dtype), parts, axis, r.threads());
  }};
}

CompiledKernel make_optional(const CompileContext&) {
  return {[](RunContext& r) { r.output_value(0) = r.has_input(0) ? owned_copy(r.value(0)) : RuntimeValue{}; }};
}

CompiledKernel make_optional_has_element(const CompileContext&) {
  return {[](RunContext& r) { *r.output(0, {}, DType::boolean).as<uint8_t>() = r.has_input(0) ? 1 : 0; }};
}

CompiledKernel make_optional_get_element(const CompileContext&) {
  return {[](RunContext& r) {
    require(r.has_input(0), "the optional is empty", "test it with OptionalHasElement first");
    write_item(r, r.value(0));
  }};
}

}  // namespace

void register_sequences(KernelRegistry& registry) {
  registry.add({.op = "SequenceAt", .make = make_sequence_at});
  registry.add({.op = "SequenceConstruct", .make = make_sequence_construct});
  registry.add({.op = "SequenceEmpty", .make = make_sequence_empty});
  registry.add({.op = "SequenceInsert", .make = make_sequence_insert});
  registry.add({.op = "SequenceErase", .make = make_sequence_erase});
  registry.add({.op = "SequenceLength", .make = make_sequence_length});
  registry.add({.op = "SplitToSequence", .make = make_split_to_sequence});
  registry.add({.op = "ConcatFromSequence", .make = make_concat_from_sequence});
  registry.add({.op = "Optional", .make = make_optional});
  registry.add({.op = "OptionalHasElement", .make = make_optional_has_element});
  registry.add({.op = "OptionalGetElement", .make = make_optional_get_element});
}

}  // namespace fretsaw
