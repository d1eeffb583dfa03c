// The one exception of fretsaw: what is wrong, where, and what to do about it.
#pragma once
#include <stdexcept>
#include <string>

namespace fretsaw {

// The process exit code that an error leads to (CLI contract).
enum class ErrorCode { results_differ = 1, usage = 2, model = 3, device = 4 };

// what() reads "FILE: node 'NAME' (OP): what is wrong; what to do", leaving out what is not known.
// Throw it with as much as is known where it happens; a caller adds the file or node by catching and rethrowing `e.in_file(...)`.
class Error : public std::runtime_error {
 public:
  explicit Error(std::string problem, std::string remedy = "", ErrorCode code = ErrorCode::model);

  Error in_file(const std::string& file) const;                         // no effect when a file is already named
  Error at_node(const std::string& name, const std::string& op) const;  // likewise for the node
  Error with_code(ErrorCode code) const;

  ErrorCode code() const { return code_; }
  const std::string& problem() const { return problem_; }
  const std::string& remedy() const { return remedy_; }
  const std::string& file() const { return file_; }
  const std::string& node() const { return node_; }
  const std::string& op() const { return op_; }

 private:
  Error(std::string file, std::string node, std::string op, std::string problem, std::string remedy, ErrorCode code);
  std::string file_, node_, op_, problem_, remedy_;
  ErrorCode code_;
};

}  // namespace fretsaw
