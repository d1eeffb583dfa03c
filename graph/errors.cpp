// Error messages: "FILE: node 'NAME' (OP): what is wrong; what to do".
#include "graph/errors.h"

namespace fretsaw {
namespace {

std::string message(const std::string& file, const std::string& node, const std::string& op, const std::string& problem,
                    const std::string& remedy) {
  std::string s;
  if (!file.empty()) s += file + ": ";
  if (!node.empty() || !op.empty()) s += "node '" + node + "'" + (op.empty() ? "" : " (" + op + ")") + ": ";
  s += problem;
  if (!remedy.empty()) s += "; " + remedy;
  for (char& c : s)  // an error is one line, whatever a name in the model holds
    if (c == '\n' || c == '\r') c = ' ';
  return s;
}

}  // namespace

Error::Error(std::string file, std::string node, std::string op, std::string problem, std::string remedy, ErrorCode code)
    : std::runtime_error(message(file, node, op, problem, remedy)),
      file_(std::move(file)),
      node_(std::move(node)),
      op_(std::move(op)),
      problem_(std::move(problem)),
      remedy_(std::move(remedy)),
      code_(code) {}

Error::Error(std::string problem, std::string remedy, ErrorCode code) : Error("", "", "", std::move(problem), std::move(remedy), code) {}

Error Error::in_file(const std::string& file) const {
  return file_.empty() ? Error(file, node_, op_, problem_, remedy_, code_) : *this;
}

Error Error::at_node(const std::string& name, const std::string& op) const {
  return node_.empty() && op_.empty() ? Error(file_, name, op, problem_, remedy_, code_) : *this;
}

Error Error::with_code(ErrorCode code) const {
  return Error(file_, node_, op_, problem_, remedy_, code);
}

}  // namespace fretsaw
