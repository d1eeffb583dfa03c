// Weight files written as a stream: mapped, in memory, generated, small and large tensors.
#include "graph/io/external_writer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "graph/errors.h"

namespace fretsaw {
namespace {

std::shared_ptr<Tensor> counting(int64_t count, uint8_t first) {
  auto t = make_tensor(DType::uint8, {count});
  for (int64_t i = 0; i < count; ++i) mutable_data(*t)[i] = static_cast<std::byte>(first + i * 7);
  return t;
}

TEST(ExternalWriter, LaysTensorsAtAlignedOffsets) {
  std::string folder = testing::TempDir(), source = folder + "/ew_source.bin", path = folder + "/ew_out.bin";
  auto large = counting(300001, 3);
  {
    std::ofstream out(source, std::ios::binary);
    out.write("0123456789", 10);
    out.write(reinterpret_cast<const char*>(large->data), 300001);
  }
  auto mapped = std::make_shared<Tensor>(*large);
  mapped->file = MappedFile::open(source);
  mapped->owner = mapped->file;
  mapped->file_offset = 10;
  mapped->data = mapped->file->bytes().data() + 10;
  auto generated = std::make_shared<Tensor>();
  generated->dtype = DType::uint8;
  generated->dims = {9 << 20};
  generated->generate = [](uint64_t first, std::span<std::byte> bytes) {
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>((first + i) % 251);
  };
  std::vector<std::shared_ptr<Tensor>> tensors = {counting(5, 1), mapped, counting(0, 0),     counting(1000, 9),
                                                  generated,      large,  counting(70000, 4), counting(1, 77)};
  std::vector<uint64_t> offsets;
  ExternalWriter writer(path);
  for (const auto& t : tensors) offsets.push_back(writer.append(*t));
  writer.finish();
  auto file = MappedFile::open(path);
  uint64_t end = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = *tensors[i];
    EXPECT_EQ(offsets[i] % (t.bytes() > 65536 ? 4096 : 64), 0u) << i;
    EXPECT_GE(offsets[i], end);
    end = offsets[i] + t.bytes();
    ASSERT_LE(end, file->bytes().size());
    const std::byte* got = file->bytes().data() + offsets[i];
    if (t.generate) {
      for (size_t k = 0; k < t.bytes(); ++k) ASSERT_EQ(got[k], static_cast<std::byte>(k % 251)) << k;
    } else if (t.bytes()) {
      EXPECT_EQ(std::memcmp(got, t.data, t.bytes()), 0) << i;
    }
  }
  EXPECT_EQ(file->bytes().size(), end);
  std::filesystem::remove(source);
  std::filesystem::remove(path);
}

TEST(ExternalWriter, NamesWhatIsMissing) {
  Tensor t;
  t.name = "lost";
  t.dtype = DType::float32;
  t.dims = {4};
  t.missing = "its file is not there";
  std::string path = testing::TempDir() + "/ew_missing.bin";
  ExternalWriter writer(path);
  try {
    writer.append(t);
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("'lost'"), std::string::npos);
  }
  std::filesystem::remove(path);
  EXPECT_THROW(ExternalWriter("/no/such/folder/x.bin"), Error);
}

}  // namespace
}  // namespace fretsaw
