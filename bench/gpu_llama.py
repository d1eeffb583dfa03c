"""Writes Llama graphs of any size without their weights: for `--structure-only` and `--random-weights`."""
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

TYPES = {"bf16": TensorProto.BFLOAT16, "fp16": TensorProto.FLOAT16, "fp32": TensorProto.FLOAT}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


class Llama:
    """Pre-normalised blocks with grouped-query attention, rotary embeddings and SwiGLU, of ONNX's operators for them (opset 23)."""

    def __init__(self, layers, hidden, heads, kv_heads, intermediate, vocabulary=512, dtype="bf16"):
        self.layers, self.hidden, self.heads, self.kv_heads = layers, hidden, heads, kv_heads
        self.intermediate, self.vocabulary, self.dtype = intermediate, vocabulary, dtype
        self.size = hidden // heads
        self.nodes, self.weights = [], []

    def layer_bytes(self):
        attention = self.hidden * (2 * self.hidden + 2 * self.kv_heads * self.size)
        return BYTES[self.dtype] * (attention + 3 * self.hidden * self.intermediate + 2 * self.hidden)

    def bytes(self):
        return self.layers * self.layer_bytes() + BYTES[self.dtype] * self.hidden * (2 * self.vocabulary + 1)

    def write(self, path, batch, length):
        """A model of ids [batch, length] with logits [batch, length, vocabulary]."""
        x = self.op("Gather", "embedding", [self.weight("embedding.weight", self.vocabulary, self.hidden), "ids"])
        constants = self.rotary_tables(length)
        for i in range(self.layers):
            x = self.block(f"layers.{i}", x)
        x = self.norm("norm", x)
        self.nodes.append(helper.make_node("MatMul", [x, self.weight("head.weight", self.hidden, self.vocabulary)], ["logits"], name="head"))
        ids = helper.make_tensor_value_info("ids", TensorProto.INT64, [batch, length])
        logits = helper.make_tensor_value_info("logits", TYPES[self.dtype], [batch, length, self.vocabulary])
        graph = helper.make_graph(self.nodes, "llama", [ids], [logits], constants + self.weights)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11), path)

    def block(self, scope, x):
        n = self.norm(scope + ".norm1", x)
        wide = self.kv_heads * self.size
        q = self.turn(scope + ".q", self.linear(scope + ".q", n, self.hidden, self.hidden), self.heads)
        k = self.turn(scope + ".k", self.linear(scope + ".k", n, self.hidden, wide), self.kv_heads)
        v = self.linear(scope + ".v", n, self.hidden, wide)
        a = self.op("Attention", scope + ".attention", [q, k, v], q_num_heads=self.heads, kv_num_heads=self.kv_heads, is_causal=1)
        x = self.op("Add", scope + ".residual1", [x, self.linear(scope + ".out", a, self.hidden, self.hidden)])
        n = self.norm(scope + ".norm2", x)
        gate, up = (self.linear(f"{scope}.{part}", n, self.hidden, self.intermediate) for part in ("gate", "up"))
        gate = self.op("Mul", scope + ".silu", [gate, self.op("Sigmoid", scope + ".sigmoid", [gate])])
        f = self.linear(scope + ".down", self.op("Mul", scope + ".gated", [gate, up]), self.intermediate, self.hidden)
        return self.op("Add", scope + ".residual2", [x, f])

    def rotary_tables(self, length):
        """cos and sin, [length, size / 2], whose values are in the file."""
        angles = np.outer(np.arange(length), 10000.0 ** (-np.arange(0, self.size, 2) / self.size))
        dtype = helper.tensor_dtype_to_np_dtype(TYPES[self.dtype])
        tables = [numpy_helper.from_array(f(angles).astype(dtype), name) for f, name in ((np.cos, "cos"), (np.sin, "sin"))]
        return tables + [numpy_helper.from_array(np.arange(length)[None], "positions")]

    def turn(self, scope, x, heads):  # [B, S, heads * size]
        return self.op("RotaryEmbedding", scope + ".rotary", [x, "cos", "sin", self.positions()], num_heads=heads)

    def positions(self):
        """[batch, length], made of the one row for all."""
        if not any(node.name == "positions.all" for node in self.nodes):
            shape = self.op("Shape", "ids.shape", ["ids"])
            self.op("Expand", "positions.all", ["positions", shape])
        return "positions.all.out"

    def norm(self, scope, x):
        return self.op("RMSNormalization", scope, [x, self.weight(scope + ".weight", self.hidden)], epsilon=1e-5)

    def linear(self, scope, x, rows, columns):
        return self.op("MatMul", scope, [x, self.weight(scope + ".weight", rows, columns)])

    def op(self, kind, name, inputs, **attributes):
        self.nodes.append(helper.make_node(kind, inputs, [name + ".out"], name=name, **attributes))
        return name + ".out"

    def weight(self, name, *dims):
        """An initializer whose bytes lie in a file that is not there."""
        tensor = TensorProto(name=name, data_type=TYPES[self.dtype], dims=dims, data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value="absent.data")
        self.weights.append(tensor)
        return name
