# What fretsaw builds on. scripts/setup puts libonnx and oneDNN into third_party/.
set(Protobuf_USE_STATIC_LIBS ON)
find_package(Threads REQUIRED)
find_package(Protobuf REQUIRED)
find_package(CLI11 REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(fmt REQUIRED)
if(NOT FRETSAW_FUZZ) # which builds no kernels
  find_package(OpenMP REQUIRED COMPONENTS CXX)
endif()

set(ONNX_FOLDER ${CMAKE_SOURCE_DIR}/third_party/onnx)
if(NOT EXISTS ${ONNX_FOLDER}/stamp)
  message(FATAL_ERROR "libonnx is not in third_party/onnx: run scripts/setup first")
endif()
add_library(onnx_static INTERFACE)
target_include_directories(onnx_static SYSTEM INTERFACE ${ONNX_FOLDER}/include)
target_compile_definitions(onnx_static INTERFACE ONNX_ML=1 ONNX_NAMESPACE=onnx)
target_link_libraries(onnx_static INTERFACE ${ONNX_FOLDER}/lib/libonnx.a ${ONNX_FOLDER}/lib/libonnx_proto.a protobuf::libprotobuf Threads::Threads)

add_library(onednn INTERFACE)
target_include_directories(onednn SYSTEM INTERFACE ${CMAKE_SOURCE_DIR}/third_party/onednn/include)
target_link_libraries(onednn INTERFACE ${CMAKE_SOURCE_DIR}/third_party/onednn/lib/libdnnl.so)
set(CMAKE_BUILD_RPATH ${CMAKE_SOURCE_DIR}/third_party/onednn/lib)
