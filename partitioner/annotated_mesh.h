// The mesh that annotations speak of: which stages there are, which devices each has, what of them divides the batch.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "partitioner/from_annotations.h"

namespace fretsaw {

// For each node of the source, by position, the stage that it names (-1: none) becomes the stage that it runs in: the latest of what it
// uses, else that of its first user. Numbers that no node names are closed up. Returns how many stages there are; 0 when no node names one.
int complete_stages(const Graph& source, std::vector<int>& stages);

// Fills mesh, devices and layout from nodes and stages. `given`: the mesh to use, of the user or the file.
void find_mesh(const Graph& source, const DeviceConfiguration& configuration, const std::optional<Mesh>& given, int stages,
               Annotations& annotations);

}  // namespace fretsaw
