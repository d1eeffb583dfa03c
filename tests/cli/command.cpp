// Running the built command in tests, in a folder of its own, on small models made here.
#include "tests/cli/command.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>

#include "graph/io.h"

namespace fretsaw {
namespace {

namespace fs = std::filesystem;

TensorPtr weights(Dims dims) {
  auto tensor = make_tensor(DType::float32, dims);
  for (int64_t i = 0; i < tensor->count(); ++i) {
    const float value = 0.1F * static_cast<float>(i % 7) - 0.25F;
    std::memcpy(mutable_data(*tensor) + i * static_cast<int64_t>(sizeof value), &value, sizeof value);
  }
  return tensor;
}

}  // namespace

CommandTest::CommandTest() {
  std::string name = (fs::temp_directory_path() / "fretsaw-cli-XXXXXX").string();
  if (!mkdtemp(name.data())) throw std::runtime_error("no temporary folder");
  folder_ = name;
}

CommandTest::~CommandTest() {
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

int CommandTest::start(const std::vector<std::string>& arguments) const {
  const std::string out = path(".stdout"), err = path(".stderr");
  const pid_t child = fork();
  if (child == 0) {
    const int out_file = open(out.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
    const int err_file = open(err.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
    dup2(out_file, STDOUT_FILENO);
    dup2(err_file, STDERR_FILENO);
    std::vector<char*> argv = {const_cast<char*>(FRETSAW_COMMAND)};
    for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    execv(FRETSAW_COMMAND, argv.data());
    _exit(127);
  }
  return child;
}

CommandResult CommandTest::result_of(int process) const {
  int status = 0;
  waitpid(process, &status, 0);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_text(path(".stdout")), read_text(path(".stderr"))};
}

CommandResult CommandTest::fretsaw(const std::vector<std::string>& arguments) const {
  return result_of(start(arguments));
}

CommandResult CommandTest::fretsaw_killed(const std::vector<std::string>& arguments, int after_ms) const {
  const int process = start(arguments);
  std::this_thread::sleep_for(std::chrono::milliseconds(after_ms));
  kill(process, SIGKILL);
  return result_of(process);
}

CommandResult CommandTest::fretsaw_signalled(const std::vector<std::string>& arguments, int signal, const std::string& file) const {
  const int process = start(arguments);
  siginfo_t ended{};
  while (!fs::exists(file) && waitid(P_PID, static_cast<id_t>(process), &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid == 0)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  kill(process, signal);
  return result_of(process);
}

Model CommandTest::mlp(int64_t batch, int64_t hidden) {
  Model model;
  model.ir_version = 10;
  model.opsets[""] = 20;
  model.graph = std::make_shared<Graph>();
  Graph& g = *model.graph;
  g.name = "mlp";
  const Dim n = batch > 0 ? Dim(batch) : Dim(std::string("batch"));
  Value* x = g.add_value("x", Type::tensor(DType::float32, Shape{n, 4}));
  g.inputs = {x};
  Value* w1 = g.add_constant("w1", weights({4, hidden}));
  Value* w2 = g.add_constant("w2", weights({hidden, 2}));
  Node* first = g.add_node("MatMul", {x, w1}, {"h"});
  Node* relu = g.add_node("Relu", {first->out(0)}, {"r"});
  Node* second = g.add_node("MatMul", {relu->out(0), w2}, {"y"});
  first->name = "first", relu->name = "relu", second->name = "second";
  second->out(0)->type = Type::tensor(DType::float32, Shape{n, 2});
  g.outputs = {second->out(0)};
  return model;
}

std::string CommandTest::write_mlp(const std::string& name, int64_t batch) const {
  write_model(mlp(batch), path(name));
  return path(name);
}

std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

void write_text(const std::string& text, const std::string& path) {
  std::ofstream(path, std::ios::binary) << text;
}

}  // namespace fretsaw
