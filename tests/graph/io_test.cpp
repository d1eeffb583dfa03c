// Reading and writing: CASES 1 to 15 as far as files and names go, and load-save-load.
#include "graph/io.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <onnx/checker.h>
#include <onnx/defs/parser.h>
#include <onnx/onnx_pb.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "graph/errors.h"
#include "graph/passes.h"

namespace fretsaw {
namespace {
namespace fs = std::filesystem;

class Files : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("fretsaw_io_" + std::to_string(::getpid())) / "model";
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_.parent_path()); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string save(const std::string& bytes, const std::string& name) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  }
  std::string save(const onnx::ModelProto& proto) const { return save(proto.SerializeAsString(), "m.onnx"); }
  fs::path folder_;
};

onnx::ModelProto parse(const std::string& graph, int ir = 10, int opset = 21) {
  onnx::ModelProto proto;
  std::string text = "<ir_version: " + std::to_string(ir) + ", opset_import: [\"\" : " + std::to_string(opset) + "]> " + graph;
  auto status = onnx::OnnxParser::Parse(proto, text.c_str());
  EXPECT_TRUE(status.IsOK()) << status.ErrorMessage();
  return proto;
}

std::string error_of(const std::string& path) {
  try {
    read_model(path);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

onnx::TensorProto* external(onnx::ModelProto& proto, const std::string& location, const std::string& offset, const std::string& length,
                            int64_t count) {
  auto* t = proto.mutable_graph()->add_initializer();
  t->set_name("w");
  t->set_data_type(onnx::TensorProto::FLOAT);
  t->add_dims(count);
  t->set_data_location(onnx::TensorProto::EXTERNAL);
  for (const auto& [key, value] : {std::pair<std::string, std::string>{"location", location}, {"offset", offset}, {"length", length}}) {
    if (value.empty()) continue;
    auto* e = t->add_external_data();
    e->set_key(key);
    e->set_value(value);
  }
  return t;
}

constexpr char kAddW[] = "g (float[4] x) => (float[4] y) { y = Add(x, w) }";

TEST_F(Files, ExternalTensorAtAnOffsetHasTheRightBytes) {  // CASE 2
  std::string bytes(4096 + 16, '\0');
  const float values[4] = {1, 2, 3, 4};
  std::memcpy(bytes.data() + 4096, values, 16);
  save(bytes, "w.bin");
  auto proto = parse(kAddW);
  external(proto, "w.bin", "4096", "16", 4);
  Model model = read_model(save(proto));
  auto got = model.graph->initializers().at(0)->constant->as<float>();
  EXPECT_EQ(std::vector<float>(got.begin(), got.end()), std::vector<float>({1, 2, 3, 4}));
}

TEST_F(Files, BadExternalDataIsRefused) {  // CASE 2
  save(std::string(8, '\0'), "short.bin");
  save(std::string(64, '\0'), "w.bin");
  save(std::string(64, '\0'), "../outside.bin");
  fs::create_symlink(folder_.parent_path() / "outside.bin", folder_ / "link.bin");
  struct Row {
    const char *location, *offset, *length, *says;
  };
  const Row rows[] = {{"/etc/hostname", "0", "16", "absolute"},
                      {"../outside.bin", "0", "16", "'..'"},
                      {"link.bin", "0", "16", "link out of the model's folder"},
                      {"short.bin", "0", "", "shorter"},
                      {"w.bin", "0", "8", "external length"},
                      {"w.bin", "60", "16", "shorter"},
                      {"w.bin", "-4", "16", "no number"},
                      {"absent.bin", "0", "16", "does not exist"},
                      {"", "0", "16", "no location"},
                      {"w.bin", "99999999999999999999999", "16", "no number"}};
  for (const Row& row : rows) {
    auto proto = parse(kAddW);
    external(proto, row.location, row.offset, row.length, 4);
    std::string error = error_of(save(proto));
    EXPECT_NE(error.find(row.says), std::string::npos) << row.location << ": " << error;
    EXPECT_NE(error.find("m.onnx"), std::string::npos) << error;
  }
  auto proto = parse(kAddW);
  external(proto, "absent.bin", "0", "16", 4);
  Model model = read_model(save(proto), {.allow_missing_weights = true});
  EXPECT_TRUE(model.graph->initializers().at(0)->constant->is_missing());
}

TEST_F(Files, ExternalShapeIsReadWhenShapesNeedIt) {  // CASE 3
  std::string bytes(16, '\0');
  const int64_t shape[2] = {2, -1};
  std::memcpy(bytes.data(), shape, 16);
  save(bytes, "w.bin");
  auto proto = parse("g (float[4, 3] x) => (float[a, b] y) { y = Reshape(x, w) }");
  external(proto, "w.bin", "0", "16", 2)->set_data_type(onnx::TensorProto::INT64);
  Model model = read_model(save(proto));
  infer_shapes(model);
  EXPECT_EQ(to_string(model.graph->outputs[0]->type), "float32[2,6]");
}

TEST_F(Files, LargeInlineWeightsAreMappedAndSurviveSaving) {  // CASE 1
  auto proto = parse("g (float[1000] x) => (float[1000] y) { y = Add(x, w) }");
  std::vector<float> values(1000);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) * 0.5f;
  auto* t = proto.mutable_graph()->add_initializer();
  t->set_name("w");
  t->set_data_type(onnx::TensorProto::FLOAT);
  t->add_dims(1000);
  t->set_raw_data(values.data(), 4000);
  Model model = read_model(save(proto));
  const Tensor& w = *model.graph->initializers().at(0)->constant;
  ASSERT_NE(w.file, nullptr) << "the weight was copied";
  EXPECT_EQ(std::memcmp(w.data, values.data(), 4000), 0);
  EXPECT_THROW(write_model(model, path("m.onnx")), Error) << "would overwrite its own source";
  for (size_t above : {size_t{0}, SIZE_MAX}) {
    write_model(model, path("copy.onnx"), {.external_above = above});
    Model copy = read_model(path("copy.onnx"));
    const Tensor& again = *copy.graph->initializers().at(0)->constant;
    EXPECT_EQ(std::memcmp(again.data, values.data(), 4000), 0);
    EXPECT_EQ(again.location.empty(), above != 0);
    onnx::checker::check_model(path("copy.onnx"), true);
  }
}

TEST_F(Files, LoadSaveLoadIsEqual) {
  const char* graphs[] = {
      "g (float[N, 3] x) => (float[N, 3] y) { t = Relu(x)\n y = Mul(t, t) }",
      "g (float[2] x, bool c) => (float[2] y) { y = If(c) <then_branch = a () => (float[2] p) { p = Identity(x) }, else_branch = b () => "
      "(float[2] q) { q = Neg(x) }> }",
      "g (float[4] x) => (float[4] y) <float w = {2.0}> { v = Constant <value = float {1.5}> ()\n t = Mul(x, v)\n y = Add(t, w) }"};
  for (const char* graph : graphs) {
    auto proto = parse(graph);
    proto.set_producer_name("someone");
    proto.mutable_graph()->mutable_node(0)->set_doc_string("a note");
    proto.mutable_graph()->set_doc_string("of the graph");
    Model first = read_model(save(proto));
    write_model(first, path("again.onnx"));
    onnx::ModelProto once, again;
    to_proto(first, once, true);
    to_proto(read_model(path("again.onnx")), again, true);
    EXPECT_EQ(again.SerializeAsString(), once.SerializeAsString()) << graph;
    EXPECT_EQ(again.producer_name(), "someone");
    EXPECT_EQ(again.graph().doc_string(), "of the graph");
    EXPECT_EQ(again.graph().node(0).doc_string(), "a note");
    EXPECT_EQ(again.graph().node_size(), proto.graph().node_size());
  }
}

TEST_F(Files, NumpyFiles) {
  const auto npy = [&](const std::string& type, const std::string& order) {
    std::string header = "{'descr': '" + type + "', 'fortran_order': " + order + ", 'shape': (2, 3), }";
    header.resize(117, ' ');
    std::string bytes = std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(118) + '\0' + header + '\n';
    for (int32_t i = 0; i < 6; ++i) bytes.append(reinterpret_cast<const char*>(&i), 4);
    return save(bytes, "x.npy");
  };
  const auto numbers = [](const TensorPtr& t) { return std::vector<int32_t>(t->as<int32_t>().begin(), t->as<int32_t>().end()); };
  EXPECT_EQ(numbers(read_tensor_file(npy("<i4", "False"))), (std::vector<int32_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(numbers(read_tensor_file(npy("<i4", "True"))), (std::vector<int32_t>{0, 2, 4, 1, 3, 5}));
  try {
    read_tensor_file(npy(">i4", "False"));
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("of the type '>i4', which"), std::string::npos) << e.what();
  }
}

TEST_F(Files, ElementsOfTensorFilesStayThereWhereTheyAreMany) {
  for (const int count : {3, 1000}) {
    std::vector<float> wanted(static_cast<size_t>(count));
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = static_cast<float>(i) / 2;
    onnx::TensorProto proto;
    proto.set_name("x");
    proto.set_data_type(onnx::TensorProto::FLOAT);
    proto.add_dims(count);
    proto.set_raw_data(wanted.data(), wanted.size() * sizeof(float));
    const std::string bytes = proto.SerializeAsString();
    const TensorPtr read = read_tensor_file(save(bytes, "x.pb"));
    EXPECT_EQ(read->name, "x");
    EXPECT_EQ(read->file != nullptr, count == 1000);
    ASSERT_EQ(read->bytes(), wanted.size() * sizeof(float));
    EXPECT_EQ(std::memcmp(read->data, wanted.data(), read->bytes()), 0);
    const std::string too_short = bytes.substr(0, bytes.size() - 4);
    EXPECT_THROW(read_tensor_file(save(too_short, "short.pb")), Error);
    proto.set_dims(0, count + 1);
    EXPECT_THROW(read_tensor_file(save(proto.SerializeAsString(), "other.pb")), Error);
  }
}

TEST_F(Files, OddGraphs) {  // CASES 6 and 9
  Model unsorted = read_model(save(parse("g (float[2] x) => (float[2] y) { y = Relu(t)\n t = Neg(x) }")));
  EXPECT_EQ(unsorted.graph->nodes[0]->op, "Neg");
  EXPECT_EQ(unsorted.notes.size(), 1u);
  std::string cycle = error_of(save(parse("g (float[2] x) => (float[2] y) { y = Add(x, t)\n t = Neg(y) }")));
  EXPECT_NE(cycle.find("cycle: "), std::string::npos) << cycle;
  EXPECT_NE(cycle.find("->"), std::string::npos) << cycle;
  std::string twice = error_of(save(parse("g (float[2] x) => (float[2] y) { y = Relu(x)\n y = Neg(x) }")));
  EXPECT_NE(twice.find("defined twice"), std::string::npos) << twice;
  std::string absent = error_of(save(parse("g (float[2] x) => (float[2] y) { y = Add(x, nothing) }")));
  EXPECT_NE(absent.find("'nothing'"), std::string::npos) << absent;
  auto same_name = parse("g (float[2] x) => (float[2] y) { t = Relu(x)\n y = Neg(t) }");
  for (auto& node : *same_name.mutable_graph()->mutable_node()) node.set_name("n");
  Model named = read_model(save(same_name));
  EXPECT_NE(named.graph->nodes[0]->name, named.graph->nodes[1]->name);
  Model direct = read_model(save(parse("g (float[2] x, float[2] unused) => (float[2] x, float[1] w) <float[1] w = {2.0}> { }")));
  EXPECT_EQ(direct.graph->outputs[0], direct.graph->inputs[0]);
  EXPECT_TRUE(direct.graph->outputs[1]->is_constant());
}

TEST_F(Files, InitializerThatIsAnInput) {  // CASE 8
  for (int ir : {3, 8}) {
    auto proto = parse("g (float[2] x, float[2] w) => (float[2] y) { y = Add(x, w) }", ir, 8);
    auto* t = proto.mutable_graph()->add_initializer();
    t->set_name("w");
    t->set_data_type(onnx::TensorProto::FLOAT);
    t->add_dims(2);
    t->add_float_data(1);
    t->add_float_data(2);
    Model model = read_model(save(proto));
    EXPECT_EQ(model.graph->inputs.size(), ir < 4 ? 1u : 2u);
    onnx::ModelProto written;
    to_proto(model, written, true);
    EXPECT_EQ(written.graph().input_size(), 2);
    EXPECT_EQ(written.graph().initializer_size(), 1);
  }
}

TEST_F(Files, AwkwardNamesAreOpaque) {  // CASE 5
  auto proto = parse("g (float[2] x) => (float[2] y) { t = Relu(x)\n y = Neg(t) }");
  const std::string name = "../a b\"c\n/'";
  proto.mutable_graph()->mutable_node(0)->set_output(0, name);
  proto.mutable_graph()->mutable_node(1)->set_input(0, name);
  Model model = read_model(save(proto));
  write_model(model, path("again.onnx"));
  EXPECT_EQ(read_model(path("again.onnx")).graph->nodes[0]->outputs[0]->name, name);
}

TEST_F(Files, DamagedFilesGiveErrors) {
  std::string whole = parse("g (float[N, 3] x) => (float[N, 3] y) { t = Relu(x)\n y = Mul(t, t) }").SerializeAsString();
  int errors = 0;
  for (size_t n = 0; n < whole.size(); ++n) {  // any prefix: an error that names the file, or a model that lost its end
    std::string error = error_of(save(whole.substr(0, n), "m.onnx"));
    errors += !error.empty();
    EXPECT_TRUE(error.empty() || error.find("m.onnx") != std::string::npos) << error;
  }
  EXPECT_GT(errors, static_cast<int>(whole.size() / 2));
  EXPECT_NE(error_of(path("absent.onnx")).find("cannot be opened"), std::string::npos);
  auto negative = parse(kAddW);
  external(negative, "w.bin", "0", "16", -4);
  EXPECT_NE(error_of(save(negative)).find("negative"), std::string::npos);
}

TEST_F(Files, LinksAreFollowedAndStreamsKept) {
  const Model model = read_model(save(parse("g (float[2] x) => (float[2] y) { y = Relu(x) }")));
  fs::create_directory(folder_ / "there");
  save("old", "there/old.onnx");
  fs::create_symlink("there/old.onnx", path("link.onnx"));
  fs::create_symlink("link.onnx", path("second.onnx"));
  fs::create_symlink("there/new.onnx", path("dangling.onnx"));
  for (const char* link : {"second.onnx", "dangling.onnx"}) {
    write_model(model, path(link));
    EXPECT_TRUE(fs::is_symlink(path(link))) << link;
  }
  EXPECT_TRUE(fs::is_symlink(path("link.onnx")));
  for (const char* file : {"there/old.onnx", "there/new.onnx"}) EXPECT_EQ(read_model(path(file)).graph->nodes.size(), 1u) << file;
  fs::create_symlink("circle.onnx", path("circle.onnx"));
  fs::create_symlink("there", path("folder.onnx"));
  for (const char* wrong : {"circle.onnx", "there", "folder.onnx"}) EXPECT_THROW(write_model(model, path(wrong)), Error) << wrong;
  EXPECT_TRUE(fs::is_symlink(path("folder.onnx")));

  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  const int reader = ::open(path("fifo").c_str(), O_RDONLY | O_NONBLOCK);
  write_model(model, path("fifo"));
  std::string bytes(4096, '\0');
  bytes.resize(static_cast<size_t>(std::max<ssize_t>(::read(reader, bytes.data(), bytes.size()), 0)));
  ::close(reader);
  EXPECT_TRUE(fs::is_fifo(path("fifo")));
  EXPECT_EQ(read_model(save(bytes, "read.onnx")).graph->nodes.size(), 1u);
  for (const auto& entry : fs::recursive_directory_iterator(folder_))
    EXPECT_EQ(entry.path().string().find(".part"), std::string::npos) << entry.path();
}

TEST_F(Files, WeightsOfTheirOwnFileNeedOneBesideTheModel) {
  auto proto = parse("g (float[512] x) => (float[512] y) { y = Add(x, w) }");
  external(proto, "w.bin", "0", "2048", 512);
  save(std::string(2048, '\0'), "w.bin");
  const Model model = read_model(save(proto));
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  EXPECT_THROW(write_model(model, path("fifo"), {.external_above = 0}), Error);
  EXPECT_FALSE(fs::exists(path("fifo.data")));
  EXPECT_THROW(write_model(model, path("out.onnx"), {.external_above = 0, .external_name = "fifo"}), Error);
  EXPECT_TRUE(fs::is_fifo(path("fifo")));
}

TEST_F(Files, WrongHintsAreNotBelieved) {  // CASE 14
  Model model = read_model(save(parse("g (float[N, 3] x, float[N, 5] z) => (float[N, 7] y) { y = Concat <axis = 1> (x, z) }")));
  infer_shapes(model);
  EXPECT_EQ((*model.graph->outputs[0]->type.shape)[1], Dim(8));
}

TEST_F(Files, SymbolicShapeArithmetic) {  // CASE 15
  Model model = read_model(save(parse(R"(g (float[batch, seq, 12] x) => (float[a, b, c, d] y)
    <int64[1] four = {4}, int64[1] open = {-1}, int64 zero = {0}, int64 one = {1}, int64[1] axis = {0}> {
      s = Shape(x)
      b0 = Gather(s, zero)
      s0 = Gather(s, one)
      bu = Unsqueeze(b0, axis)
      su = Unsqueeze(s0, axis)
      target = Concat <axis = 0> (bu, su, four, open)
      y = Reshape(x, target) })")));
  infer_shapes(model);
  EXPECT_EQ(to_string(model.graph->outputs[0]->type), "float32[batch,seq,4,3]");
}

}  // namespace
}  // namespace fretsaw
