// The safetensors format: hand-made bytes, damaged ones, and round trips.
#include "runtime/training/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "graph/errors.h"
#include "tests/runtime/plans.h"
#include "tests/temporary_folder.h"

namespace fretsaw {
namespace {

using namespace testing_plans;
using namespace testing_files;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using namespace std::string_literals;

std::string length_bytes(uint64_t length) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes;
}
std::string file_of(const std::string& header, const std::string& data) {
  return length_bytes(header.size()) + header + data;
}

class Safetensors : public ::testing::Test {
 protected:
  SafetensorsFile read(const std::string& bytes) {
    write_bytes(path_, bytes);
    return read_safetensors(path_);
  }
  std::string error_of(const std::string& bytes) {
    try {
      read(bytes);
    } catch (const Error& e) {
      EXPECT_EQ(e.file(), path_);
      return e.what();
    }
    return "";
  }

  TemporaryFolder folder_;
  std::string path_ = folder_ / "t.safetensors";
};

TEST_F(Safetensors, HandMadeBytes) {
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[],"data_offsets":[8,10]},)"
      R"("e":{"dtype":"I64","shape":[0,9223372036854775807],"data_offsets":[10,10]},"f":{"dtype":"BOOL","shape":[1],"data_offsets":[10,11]}}   )";
  const SafetensorsFile file = read(file_of(header, "\x00\x00\x80\x3f\x00\x00\x00\x40\x80\x3f\x01"s));
  EXPECT_THAT(file.metadata, ElementsAre(std::pair("format", "pt")));
  ASSERT_EQ(file.tensors.size(), 4u);
  const Tensor& a = *file.tensors.at("a");
  EXPECT_EQ(a.dims, (Dims{1, 2}));
  EXPECT_THAT(a.as<float>(), ElementsAre(1, 2));
  const Tensor& b = *file.tensors.at("b");
  EXPECT_EQ(b.dtype, DType::bfloat16);
  EXPECT_TRUE(b.dims.empty());
  EXPECT_THAT(b.as<uint16_t>(), ElementsAre(0x3f80));
  EXPECT_EQ(file.tensors.at("e")->dims[0], 0);
  EXPECT_EQ(file.tensors.at("f")->dtype, DType::boolean);
}

TEST_F(Safetensors, EmptyFile) {
  EXPECT_TRUE(read(file_of("{}", "")).tensors.empty());
}

TEST_F(Safetensors, UnalignedTensorsAreCopied) {
  const SafetensorsFile file =
      read(file_of(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"I32","shape":[1],"data_offsets":[1,5]}})",
                   "\x07\x01\x00\x00\x00"s));
  EXPECT_THAT(file.tensors.at("b")->as<int32_t>(), ElementsAre(1));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(file.tensors.at("b")->data) % 4, 0u);
}

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}
std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"w":)" + entry(dtype, shape, offsets) + "}";
}

TEST_F(Safetensors, DamagedHeaders) {
  EXPECT_THAT(error_of(""), HasSubstr("too short"));
  EXPECT_THAT(error_of("1234567"), HasSubstr("too short"));
  EXPECT_THAT(error_of(length_bytes(UINT64_MAX) + "{}"), HasSubstr("no safetensors file"));
  EXPECT_THAT(error_of(length_bytes(3) + "{}"), HasSubstr("ends in its header"));
  EXPECT_THAT(error_of(file_of("", "")), HasSubstr("begin with '{'"));
  EXPECT_THAT(error_of(file_of("[1]", "")), HasSubstr("begin with '{'"));
  EXPECT_THAT(error_of(file_of("{\"w\":", "")), HasSubstr("damaged header"));
  EXPECT_THAT(error_of(file_of("{\"\xff\":1}", "")), HasSubstr("damaged header"));
  EXPECT_THAT(error_of(file_of(std::string(100000, '{'), "")), HasSubstr("damaged header"));
  EXPECT_THAT(error_of(file_of(R"({"w":1})", "")), HasSubstr("damaged entry of the tensor 'w'"));
  EXPECT_THAT(error_of(file_of(R"({"w":{"shape":[],"data_offsets":[0,4]}})", "1234")), HasSubstr("no 'dtype'"));
  EXPECT_THAT(error_of(file_of(R"({"w":{"dtype":"F32","data_offsets":[0,4]}})", "1234")), HasSubstr("no 'shape'"));
  EXPECT_THAT(error_of(file_of(R"({"w":{"dtype":"F32","shape":[]}})", "1234")), HasSubstr("no 'data_offsets'"));
  EXPECT_THAT(error_of(file_of(one("F4", "[]", "[0,4]"), "1234")), HasSubstr("\"F4\", which is not supported"));
  EXPECT_THAT(error_of(file_of(R"({"__metadata__":{"a":1}})", "")), HasSubstr("metadata 'a'"));
  EXPECT_THAT(error_of(file_of(R"({"__metadata__":[]})", "")), HasSubstr("damaged metadata"));
  const std::string w = R"("w":)" + entry("U8", "[1]", "[0,1]");
  EXPECT_THAT(error_of(file_of("{" + w + "," + w + "}", "1")), HasSubstr("'w' twice"));
}

TEST_F(Safetensors, DamagedShapesAndOffsets) {
  EXPECT_THAT(error_of(file_of(one("F32", "[-1]", "[0,4]"), "1234")), HasSubstr("damaged 'shape'"));
  EXPECT_THAT(error_of(file_of(one("F32", "[1.0]", "[0,4]"), "1234")), HasSubstr("damaged 'shape'"));
  EXPECT_THAT(error_of(file_of(one("F32", "[99999999999999999999]", "[0,4]"), "1234")), HasSubstr("damaged 'shape'"));
  EXPECT_THAT(error_of(file_of(one("F32", "[18446744073709551615]", "[0,4]"), "1234")), HasSubstr("damaged 'shape'"));
  EXPECT_THAT(error_of(file_of(one("F32", "[4294967296,4294967296]", "[0,0]"), "")), HasSubstr("not those of its shape"));
  EXPECT_THAT(error_of(file_of(one("F32", "[2]", "[0,4]"), "1234")), HasSubstr("not those of its shape [2]"));
  EXPECT_THAT(error_of(file_of(one("F32", "[1]", "[4,0]"), "1234")), HasSubstr("damaged 'data_offsets'"));
  EXPECT_THAT(error_of(file_of(one("F32", "[1]", "[0,4,8]"), "1234")), HasSubstr("damaged 'data_offsets'"));
  EXPECT_THAT(error_of(file_of(one("F32", "[1]", "[-4,0]"), "1234")), HasSubstr("damaged 'data_offsets'"));
  EXPECT_THAT(error_of(file_of(one("F32", "[1]", "[0,4]"), "123")), HasSubstr("truncated"));
  EXPECT_THAT(error_of(file_of(one("F32", "[1]", "[9223372036854775800,9223372036854775804]"), "1234")), HasSubstr("truncated"));
  EXPECT_THAT(error_of(file_of(one("F32", "[1]", "[4,8]"), "12345678")), HasSubstr("hole of 4 bytes"));
  EXPECT_THAT(error_of(file_of(one("F32", "[1]", "[0,4]"), "12345")), HasSubstr("1 bytes behind"));
  const std::string overlap = R"({"a":)" + entry("U8", "[4]", "[0,4]") + R"(,"b":)" + entry("U8", "[4]", "[2,6]") + "}";
  EXPECT_THAT(error_of(file_of(overlap, "123456")), HasSubstr("overlap"));
}

TEST_F(Safetensors, RoundTrip) {
  const std::vector<double> doubles = {1.5, -2};
  const std::vector<uint8_t> bytes = {1, 2, 3};
  const std::vector<uint16_t> halves = {0x3c00};
  const std::vector<StoredTensor> tensors = {{"a \"quoted\"/../name\n", DType::uint8, {3}, bytes.data()},
                                             {"h", DType::float16, {}, halves.data()},
                                             {"empty", DType::int64, {0, 4}, nullptr},
                                             {"d", DType::float64, {2, 1}, doubles.data()}};
  const uint64_t size = write_safetensors(path_, tensors, {{"step", "3"}});
  EXPECT_EQ(size, read_bytes_of(path_).size());
  const SafetensorsFile file = read_safetensors(path_);
  EXPECT_EQ(file.metadata.at("step"), "3");
  ASSERT_EQ(file.tensors.size(), 4u);
  for (const StoredTensor& t : tensors) {
    const Tensor& read = *file.tensors.at(t.name);
    EXPECT_EQ(read.dtype, t.dtype);
    EXPECT_EQ(read.dims, t.dims);
    EXPECT_TRUE(read.bytes() == 0 || std::memcmp(read.data, t.data, read.bytes()) == 0) << t.name;
    EXPECT_EQ(read.file != nullptr, true) << t.name;  // mapped, not copied
  }
  EXPECT_EQ(file.tensors.at("d")->file_offset % 64, 0u);
}

TEST_F(Safetensors, EveryByteThatIsCutOffIsMissed) {
  const std::vector<float> values = noise(5, 1);
  write_safetensors(path_, {{"a", DType::float32, {5}, values.data()}, {"b", DType::int8, {3}, values.data()}});
  const std::string whole = read_bytes_of(path_);
  for (size_t size = 0; size < whole.size(); ++size) EXPECT_NE(error_of(whole.substr(0, size)), "") << size;
}

TEST_F(Safetensors, WhatCantBeWritten) {
  const float value = 1;
  const auto error = [&](const std::vector<StoredTensor>& tensors) -> std::string {
    try {
      write_safetensors(path_, tensors);
    } catch (const Error& e) {
      EXPECT_EQ(e.file(), path_);
      return e.what();
    }
    return "";
  };
  EXPECT_THAT(error({{"a", DType::float32, {}, &value}, {"a", DType::float32, {}, &value}}), HasSubstr("given twice"));
  EXPECT_THAT(error({{"__metadata__", DType::float32, {}, &value}}), HasSubstr("the format's own"));
  EXPECT_THAT(error({{"a", DType::int4, {2}, &value}}), HasSubstr("no type for the tensor 'a' of int4"));
  EXPECT_THAT(error({{"a", DType::float32, {2}, nullptr}}), HasSubstr("has no bytes"));
  EXPECT_THAT(error({{"\xff", DType::float32, {}, &value}}), HasSubstr("UTF-8"));
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));  // nothing half-written
  EXPECT_THROW(write_safetensors(folder_ / "no/such/folder.safetensors", {{"a", DType::float32, {}, &value}}), Error);
}

}  // namespace
}  // namespace fretsaw
