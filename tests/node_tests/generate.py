"""Writes ONNX's own node tests, from the installed onnx package, as folders of model.onnx and test_data_set_K: generate.py FOLDER."""
import os
import shutil
import sys
import warnings

warnings.simplefilter("ignore")
import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case.node import collect_testcases

np.seterr(all="ignore")


def to_proto(value, type_proto, name):
    """A value as the proto that its type calls for."""
    if type_proto.HasField("sequence_type"):
        return numpy_helper.from_list(value, name)
    if type_proto.HasField("optional_type"):
        return numpy_helper.from_optional(value, name)
    return value if isinstance(value, TensorProto) else numpy_helper.from_array(np.asarray(value), name)


def write(folder, file, proto):
    with open(os.path.join(folder, file), "wb") as out:
        out.write(proto.SerializeToString())


def main(folder):
    stamp = os.path.join(folder, "stamp")
    if os.path.exists(stamp):
        with open(stamp, encoding="utf-8") as file:
            if file.read() == onnx.__version__:
                return
    shutil.rmtree(folder, ignore_errors=True)
    for case in collect_testcases(None):
        graph = case.model.graph
        os.makedirs(os.path.join(folder, case.name))
        write(os.path.join(folder, case.name), "model.onnx", case.model)
        for number, (inputs, outputs) in enumerate(case.data_sets):
            data = os.path.join(folder, case.name, f"test_data_set_{number}")
            os.makedirs(data)
            for k, value in enumerate(inputs):
                write(data, f"input_{k}.pb", to_proto(value, graph.input[k].type, graph.input[k].name))
            for k, value in enumerate(outputs):
                write(data, f"output_{k}.pb", to_proto(value, graph.output[k].type, graph.output[k].name))
    with open(stamp, "w", encoding="utf-8") as file:
        file.write(onnx.__version__)


if __name__ == "__main__":
    main(sys.argv[1])
