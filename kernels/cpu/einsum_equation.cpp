// Reads Einsum's equation.
#include "kernels/cpu/einsum_equation.h"

#include <algorithm>
#include <cctype>

#include "graph/errors.h"

namespace fretsaw::einsum {

namespace {

constexpr int kEllipsis = -1, kEllipsisEnd = 1000;

Labels parse_term(const std::string& text) {
  Labels labels;
  for (size_t i = 0; i < text.size(); ++i) {
    if (std::isalpha(static_cast<unsigned char>(text[i]))) {
      labels.push_back(static_cast<unsigned char>(text[i]));
    } else if (text.compare(i, 3, "...") == 0 && std::count(labels.begin(), labels.end(), kEllipsis) == 0) {
      labels.push_back(kEllipsis);
      i += 2;
    } else {
      throw Error("the equation of Einsum has '" + text + "'", "use letters and one ellipsis");
    }
  }
  return labels;
}

Labels expand_ellipsis(const Labels& labels, size_t extra) {
  Labels out;
  for (int label : labels) {
    if (label != kEllipsis) {
      out.push_back(label);
      continue;
    }
    for (size_t i = extra; i-- > 0;) out.push_back(kEllipsisEnd - static_cast<int>(i));
  }
  return out;
}

}  // namespace

bool contains_label(const Labels& labels, int label) {
  return std::find(labels.begin(), labels.end(), label) != labels.end();
}

Labels joined(std::initializer_list<Labels> parts) {
  Labels all;
  for (const Labels& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

Equation parse_equation(std::string text) {
  text.erase(std::remove_if(text.begin(), text.end(), [](unsigned char c) { return std::isspace(c); }), text.end());
  Equation e;
  bool has_output = false;
  const size_t arrow = text.find("->");
  if (arrow != std::string::npos) {
    has_output = true;
    e.output = parse_term(text.substr(arrow + 2));
    text.resize(arrow);
  }
  for (size_t start = 0; start <= text.size();) {
    const size_t comma = std::min(text.find(',', start), text.size());
    e.inputs.push_back(parse_term(text.substr(start, comma - start)));
    start = comma + 1;
  }
  if (has_output) return e;
  // The ellipsis, then in alphabetical order the letters that occur once.
  std::map<int, int> uses;
  for (const Labels& labels : e.inputs) {
    for (int label : labels) ++uses[label];
  }
  for (const auto& [label, count] : uses) {
    if (label == kEllipsis || count == 1) e.output.push_back(label);
  }
  return e;
}

Resolved resolve(const Equation& e, const std::vector<Dims>& inputs) {
  if (e.inputs.size() != inputs.size()) {
    throw Error("the equation of Einsum has " + std::to_string(e.inputs.size()) + " terms for " + std::to_string(inputs.size()) + " inputs",
                "make them equal");
  }
  Resolved out;
  size_t widest = 0;
  for (size_t i = 0; i < e.inputs.size(); ++i) {
    const Dims& dims = inputs[i];
    const size_t named = e.inputs[i].size() - (contains_label(e.inputs[i], kEllipsis) ? 1 : 0);
    const size_t extra = dims.size() >= named ? dims.size() - named : 0;
    if (dims.size() < named || (extra > 0 && named == e.inputs[i].size())) {
      throw Error("a term of Einsum has " + std::to_string(named) + " labels for the shape " + to_string(dims),
                  "give one for each dimension");
    }
    widest = std::max(widest, extra);
    out.inputs.push_back(expand_ellipsis(e.inputs[i], extra));
    for (size_t d = 0; d < dims.size(); ++d) {
      int64_t& extent = out.extents.emplace(out.inputs[i][d], dims[d]).first->second;
      if (extent == 1) extent = dims[d];
      if (dims[d] != extent && dims[d] != 1)
        throw Error("a label of Einsum stands for " + std::to_string(extent) + " and " + std::to_string(dims[d]),
                    "make the dimensions equal");
    }
  }
  out.output = expand_ellipsis(e.output, widest);
  for (size_t i = 0; i < out.output.size(); ++i) {
    if (!out.extents.count(out.output[i]) || std::count(out.output.begin(), out.output.end(), out.output[i]) != 1) {
      throw Error("Einsum's output has a label that no input has, or one twice", "correct the equation");
    }
  }
  return out;
}

}  // namespace fretsaw::einsum
