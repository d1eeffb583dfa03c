"""Training through a pipeline, and with data parallelism, on several GPUs: steps against their ideal and against PyTorch's schedules."""
import os
import tempfile
import time
from dataclasses import dataclass

import numpy as np
import onnx
from gpu_common import host_nodes
from gpu_speed import Worker
from gpu_training import SPEED, STEPS, rate, torch_server
from onnx import TensorProto, helper, numpy_helper

MICRO_BATCHES = 8
# Step time over the busiest rank's compute time, on two GPUs.
SCHEDULES = (
    ("gpipe", (), None),
    ("1f1b", (), 1.14),
    ("interleaved", ("--chunks", "2"), 1.08),
    ("zero-bubble-h1", (), 1.06),
    ("zero-bubble-h2", (), 1.03),
)
PIPELINE_STEPS = 30  # the first of them compile and capture
DATA_GAIN = 0.95  # of the number of GPUs, in times one GPU's speed
TORCH_S = 120  # for all its schedules


@dataclass(frozen=True)
class Stack:
    """Transformer layers of one width, each sequence a micro-batch."""

    layers: int = 16
    hidden: int = 4096
    heads: int = 32
    length: int = 1024


SMALL = Stack(8, 64, 4, 32)  # tries the script out on CPUs
REGION = 4096  # where external data may begin


class StackFile:
    """The ONNX file of a stack. All matrices lie on the same bytes of one file, which keeps it small."""

    def __init__(self, stack):
        self.stack, self.nodes, self.initializers = stack, [], []
        width = 4 * stack.hidden
        self.matrix_at, self.zeros_at = 0, self._end(0, width * stack.hidden)
        self.ones_at = self._end(self.zeros_at, width)

    @staticmethod
    def _end(begin, elements):
        return (begin + 4 * elements + REGION - 1) // REGION * REGION

    def _weight(self, name, shape, at):
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", "weights.bin"), ("offset", at), ("length", 4 * int(np.prod(shape)))):
            tensor.external_data.add(key=key, value=str(value))
        self.initializers.append(tensor)
        return name

    def _node(self, kind, inputs, output, **attributes):
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def _norm(self, x, name):
        hidden = [self.stack.hidden]
        scale, bias = self._weight(name + ".weight", hidden, self.ones_at), self._weight(name + ".bias", hidden, self.zeros_at)
        return self._node("LayerNormalization", [x, scale, bias], name)

    def _linear(self, x, name, rows, columns):
        product = self._node("MatMul", [x, self._weight(name + ".weight", [rows, columns], self.matrix_at)], name + ".product")
        return self._node("Add", [product, self._weight(name + ".bias", [columns], self.zeros_at)], name)

    def _layer(self, x, name):
        h, heads = self.stack.hidden, self.stack.heads
        normed = self._norm(x, name + ".norm1")
        q, k, v = (self._linear(normed, f"{name}.{part}", h, h) for part in ("query", "key", "value"))
        mixed = self._node("Attention", [q, k, v], name + ".attention", q_num_heads=heads, kv_num_heads=heads, is_causal=1)
        x = self._node("Add", [x, self._linear(mixed, name + ".joined", h, h)], name + ".between")
        up = self._linear(self._norm(x, name + ".norm2"), name + ".up", h, 4 * h)
        return self._node("Add", [x, self._linear(self._node("Gelu", [up], name + ".gelu"), name + ".down", 4 * h, h)], name + ".out")

    def write(self, folder):
        """model.onnx, weights.bin and a batch; gives the model's path and the folder of batches."""
        stack, x = self.stack, "x"
        for layer in range(stack.layers):
            x = self._layer(x, f"layers.{layer}")
        shape = ["batch", stack.length, stack.hidden]
        graph = helper.make_graph(self.nodes, "stack", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
                                  [helper.make_tensor_value_info(x, TensorProto.FLOAT, shape)], self.initializers)
        batches = os.path.join(folder, "batches")
        os.makedirs(batches)
        random = np.random.default_rng(0)
        with open(os.path.join(folder, "weights.bin"), "wb") as file:
            file.write((random.standard_normal((4 * stack.hidden, stack.hidden), np.float32) * 0.5 * stack.hidden**-0.5).tobytes())
            file.seek(self.ones_at)
            file.write(np.ones(stack.hidden, np.float32).tobytes())
        path = os.path.join(folder, "model.onnx")
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10), path)
        for name in ("x", "target"):
            batch = random.standard_normal((MICRO_BATCHES, stack.length, stack.hidden), np.float32)
            with open(os.path.join(batches, f"{name}_0.pb"), "wb") as file:
                file.write(numpy_helper.from_array(batch, name).SerializeToString())
        return path, batches


def torch_schedules(*arguments):
    from gpu_pipeline_torch import measure

    measure(*arguments)


def peer_times(arguments, report, stack):
    """{schedule: ms} of PyTorch's pipelines on the same GPUs; nothing where there is no peer."""
    if arguments.device == "cpu":
        return {}
    peer = Worker(torch_schedules, len(arguments.ranks), stack, MICRO_BATCHES, TORCH_S)
    try:
        times = peer.wait(time.monotonic() + TORCH_S + 60)
    finally:
        peer.kill()
    if times is None:
        report.failed("train-pipeline", "PyTorch", peer.error)
        return {}
    report.note("PyTorch: " + ", ".join(f"{name} {ms:.1f} ms" if isinstance(ms, float) else f"{name}: {ms}" for name, ms in times.items()))
    return {name: ms for name, ms in times.items() if isinstance(ms, float)}


def busiest_ms(answer):
    """The compute time of the busiest rank, the median of the steps."""
    return max(rank["busy_ms"] for rank in answer["ranks"])


def train_pipeline(arguments, fretsaw, report):
    """Each schedule of a stack of transformer layers: the step over the busiest rank's work, and the best one against PyTorch's best."""
    stack = SMALL if arguments.device == "cpu" else Stack()
    ranks, best = len(arguments.ranks), None
    peer = peer_times(arguments, report, stack)
    with tempfile.TemporaryDirectory(prefix="fretsaw_pipeline_") as folder:
        model, batches = StackFile(stack).write(folder)
        for schedule, options, wanted in SCHEDULES:
            name = f"pipeline={ranks} {schedule}, {stack.layers} layers, M={MICRO_BATCHES}"
            done = fretsaw("train", model, "--data", batches, "--loss", "mse", "--optimizer", "sgd:lr=0.001", "--steps", PIPELINE_STEPS,
                           "--precision", "bf16", "--mesh", f"pipeline={ranks}", "--micro-batches", MICRO_BATCHES, "--schedule", schedule,
                           *options, *fretsaw.on(arguments.ranks), limit_s=arguments.prepare_limit)
            if done.code:
                report.failed("train-pipeline", name, done.error)
                continue
            step, busy = done.json["time_ms"]["median"], busiest_ms(done.json)
            best = min(best or step, step)
            peaks = ", ".join(f"{rank['peak_bytes'] / 2**30:.1f}" for rank in done.json["ranks"])
            remark = f"step {step:.2f} ms, busiest rank {busy:.2f} ms, peak {peaks} GiB"
            fallen = host_nodes(done.json)
            report.row("train-pipeline", name, step / busy, wanted, remark=remark + (f", host: {fallen[0]}" if fallen else ""), fretsaw=done.json)
    if peer and best:
        way, ms = min(peer.items(), key=lambda one: one[1])
        report.row("train-pipeline", "the best against PyTorch's", best / ms, 1.0, remark=f"{best:.2f} ms, PyTorch {ms:.2f} ms ({way})")
    report.summary("train-pipeline")


def train_data(arguments, fretsaw, report):
    """Models with as many samples on each of several GPUs as one has: the gain in samples a second."""
    ranks = len(arguments.ranks)
    for case in SPEED:
        if arguments.models and not any(part in case.name for part in arguments.models):
            continue
        with tempfile.TemporaryDirectory(prefix="fretsaw_data_") as root:
            times = {}
            for count in (1, ranks):
                folder = os.path.join(root, str(count))
                worker = Worker(torch_server, case.model, case.batch * count, case.length, case.optimizer, folder, False)
                ready = worker.wait(time.monotonic() + arguments.prepare_limit)
                worker.kill()
                if ready is None:
                    report.failed("train-data", case.name, worker.error)
                    break
                done = fretsaw("train", os.path.join(folder, "model.onnx"), "--data", os.path.join(folder, "batches"), "--loss",
                               "softmax_cross_entropy", "--optimizer", case.optimizer, "--steps", STEPS, "--precision", "bf16",
                               *(("--mesh", f"data={count}") if count > 1 else ()), *fretsaw.on(arguments.ranks[:count]),
                               limit_s=arguments.prepare_limit)
                if done.code:
                    report.failed("train-data", case.name, done.error)
                    break
                times[count] = done.json["time_ms"]["median"]
            if ranks in times:
                remark = f"one GPU {rate(case, times[1]):.0f} {case.unit} ({times[1]:.2f} ms), {ranks} GPUs {ranks * rate(case, times[ranks]):.0f} "
                report.row("train-data", f"data={ranks} {case.name} bf16", ranks * times[1] / times[ranks], DATA_GAIN * ranks, at_most=False,
                           remark=remark + f"({times[ranks]:.2f} ms)")
    report.summary("train-data")
