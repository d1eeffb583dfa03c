"""Training on GPUs: the zoo's training cases against PyTorch's losses, gradients and weights, and steps a second against PyTorch's."""
import glob
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass

import numpy as np
import onnx
from gpu_common import host_nodes
from gpu_speed import Worker
from gpu_zoo import mesh_size, ranks_on
from onnx import numpy_helper

LOSS, GRADIENT, WEIGHTS = 1e-3, 1e-3, 1e-2  # relative; of the gradient's largest element; of the change of each tensor
NOISE = 1e-6  # an element whose first gradient is below moves at random under Adam
RUNS = (
    ("one GPU", []),
    ("4 micro-batches", ["--micro-batches", "4"]),
    ("recompute", ["--recompute", "all"]),
    ("data=2", ["--mesh", "data=2", "--sync-batch-norm"]),
    ("tensor=2", ["--mesh", "tensor=2"]),
    ("pipeline=2", ["--mesh", "pipeline=2"]),
    ("pipeline=2 1f1b", ["--mesh", "pipeline=2", "--micro-batches", "4", "--schedule", "1f1b"]),
    ("pipeline=2 interleaved", ["--mesh", "pipeline=2", "--micro-batches", "4", "--schedule", "interleaved"]),
    ("pipeline=2 zero-bubble-h1", ["--mesh", "pipeline=2", "--micro-batches", "4", "--schedule", "zero-bubble-h1"]),
    ("pipeline=2 zero-bubble-h2", ["--mesh", "pipeline=2", "--micro-batches", "4", "--schedule", "zero-bubble-h2"]),
    ("data=2 zero 1", ["--mesh", "data=2", "--zero", "1", "--sync-batch-norm"]),
    ("data=2 zero 2", ["--mesh", "data=2", "--zero", "2", "--sync-batch-norm"]),
    ("data=2 zero 3", ["--mesh", "data=2", "--zero", "3", "--sync-batch-norm"]),
    ("all axes", ["--mesh", "data=2,pipeline=2,tensor=2", "--micro-batches", "2", "--sync-batch-norm"]),
)


def option(options, name):
    return options[options.index(name) + 1] if name in options else None


def tensors_by_name(tensors):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in tensors}


def named(folder):
    """The arrays of a folder's .pb files by the names that stand in them."""
    return tensors_by_name(onnx.load_tensor(path) for path in sorted(glob.glob(os.path.join(folder, "*.pb"))))


def initializers(path):
    return tensors_by_name(onnx.load(path).graph.initializer)


def has_batch_norm(path):
    return any(node.op_type == "BatchNormalization" for node in onnx.load(path, load_external_data=False).graph.node)


def optimizer_text(optimizer):
    if optimizer["kind"] == "sgd":
        return "sgd:lr={lr},momentum={momentum},weight_decay={weight_decay}".format(**optimizer)
    beta1, beta2 = optimizer["betas"]
    return f"adamw:lr={optimizer['lr']},beta1={beta1},beta2={beta2},eps={optimizer['eps']},weight_decay={optimizer['weight_decay']}"


@dataclass
class Trained:
    """What a run of train gave, or the reference's files."""

    losses: list
    gradients: dict
    weights: dict


def reference(folder, info):
    return Trained(info["losses"], named(os.path.join(folder, "grad0")), named(os.path.join(folder, "final")))


def train(fretsaw, folder, info, options):
    """(what the command said, a Trained or None)."""
    with tempfile.TemporaryDirectory() as out:
        gradients, exported = os.path.join(out, "gradients"), os.path.join(out, "trained.onnx")
        done = fretsaw("train", os.path.join(folder, "model.onnx"), "--data", os.path.join(folder, "batches"), "--loss", "softmax_cross_entropy",
                       "--optimizer", optimizer_text(info["optimizer"]), "--steps", len(info["losses"]), "--save-gradients", gradients,
                       "--export", exported, *options)
        if done.code:
            return done, None
        return done, Trained(done.json["losses"], named(gradients), initializers(exported))


def largest(array, least):
    return max(float(np.abs(array).max(initial=0)), least)


def gradient_difference(got, want):
    return float(np.abs(got - want).max(initial=0)) / largest(want, 1e-4)


def change_difference(got, want, before, gradient):
    """Of the change of a tensor, as a share of that change, without what moves at random."""
    real = np.abs(gradient) > NOISE
    moved, wanted = (got - before)[real].astype(np.float64), (want - before)[real].astype(np.float64)
    return float(np.linalg.norm(moved - wanted) / max(np.linalg.norm(wanted), 1e-12)) if real.any() else 0.0


def shares(got, want, before):
    """(difference as a share of what is allowed, what differs) of every loss, gradient and weight, the worst first."""
    if len(got.losses) != len(want.losses):
        raise ValueError(f"{len(got.losses)} losses, wanted are {len(want.losses)}")
    found = [(abs(a - b) / abs(b) / LOSS if a is not None else np.inf, f"loss {k}: {a} for {b:.6g}")
             for k, (a, b) in enumerate(zip(got.losses, want.losses))]
    for name, gradient in want.gradients.items():
        if name not in got.gradients or name not in got.weights:
            raise ValueError(f"no gradient or weight of '{name}'")
        difference = gradient_difference(got.gradients[name], gradient)
        found.append((difference / GRADIENT, f"gradient of '{name}': {difference:.2g}"))
        difference = change_difference(got.weights[name], want.weights[name], before[name], gradient)
        found.append((difference / WEIGHTS, f"change of '{name}': {difference:.2g}"))
    return sorted(found, key=lambda one: -one[0] if one[0] == one[0] else -np.inf)


def judge(report, case, done, got, want, before):
    """One row: the worst of all differences as a share of what is allowed."""
    if got is None:
        return report.failed("train-zoo", case, done.error)
    try:
        worst, what = shares(got, want, before)[0]
    except ValueError as error:
        return report.failed("train-zoo", case, str(error))
    fallen = host_nodes(done.json)
    remark = what + (f", host: {'; '.join(fallen[:4])}" if fallen else "")
    report.row("train-zoo", case, worst, 1.0, remark=remark, host_nodes=fallen, seconds=done.seconds)


def train_zoo(arguments, fretsaw, report):
    """Each training case whole and cut, against the reference's files; micro-batches under BatchNormalization against one GPU's."""
    root = arguments.folder or os.path.join(arguments.zoo, "train")
    folders = [path for path in sorted(glob.glob(os.path.join(root, "*"))) if os.path.exists(os.path.join(path, "model.onnx"))]
    for folder in folders:
        name = os.path.basename(folder)
        if arguments.models and not any(part in name for part in arguments.models):
            continue
        with open(os.path.join(folder, "info.json"), encoding="utf-8") as file:
            info = json.load(file)
        model = os.path.join(folder, "model.onnx")
        before, whole, of_batches = initializers(model), reference(folder, info), has_batch_norm(model)
        for run, options in RUNS:
            options = list(options)
            if of_batches and "--sync-batch-norm" in options and "--micro-batches" in options:
                options[options.index("--micro-batches") + 1] = "1"  # synchronised statistics are those of one device's samples
            elif of_batches and "--micro-batches" in options:
                # Statistics of very few samples are chaotic: what convolutions round in another way decides the third loss.
                options[options.index("--micro-batches") + 1] = "2"
            mesh, parts = option(options, "--mesh"), option(options, "--micro-batches")
            devices = ranks_on(arguments.devices, mesh_size(mesh) if mesh else 1)
            want = whole
            if of_batches and parts and parts != "1":
                done, want = train(fretsaw, folder, info, ["--micro-batches", parts, *fretsaw.on(devices[:1])])
                if want is None:
                    report.failed("train-zoo", f"{name} {parts} micro-batches", done.error)
                    continue
            done, got = train(fretsaw, folder, info, [*options, *fretsaw.on(devices)])
            judge(report, f"{name} {run}", done, got, want, before)
    report.summary("train-zoo")


# --- speed ---


@dataclass(frozen=True)
class SpeedCase:
    model: str
    batch: int
    length: int  # what a sample counts as: 1 image, or tokens
    unit: str
    optimizer: str
    wanted: float = 0.95  # times PyTorch's speed

    @property
    def name(self):
        return f"{self.model} b{self.batch}" + (f" s{self.length}" if self.length > 1 else "")


SPEED = (
    SpeedCase("resnet50", 128, 1, "images/s", "sgd:lr=0.05,momentum=0.9,weight_decay=5e-5"),
    SpeedCase("gpt2", 16, 1024, "tokens/s", "adamw:lr=3e-4,beta1=0.9,beta2=0.95,weight_decay=0.1"),
)
GIB = 2**30
STEPS = 20  # of fretsaw; the first ones compile and choose kernels, and the median is of all
FIRST_LOSS = 2e-2  # relative: both sides begin with the same weights


def torch_server(*arguments):
    from gpu_training_torch import serve

    serve(*arguments)


def rate(case, ms):
    return case.batch * case.length / ms * 1e3


def measure(arguments, fretsaw, report, worker, case, folder):
    name = f"{case.name} bf16"
    timed = worker.ask("time", limit_s=arguments.prepare_limit)
    if timed is None:
        return report.failed("train-speed", name, worker.error)
    done = fretsaw("train", os.path.join(folder, "model.onnx"), "--data", os.path.join(folder, "batches"), "--loss", "softmax_cross_entropy",
                   "--optimizer", case.optimizer, "--steps", STEPS, "--precision", "bf16", *fretsaw.on(arguments.devices[:1]),
                   limit_s=arguments.prepare_limit)
    if done.code:
        return report.failed("train-speed", name, done.error)
    own = done.json["time_ms"]["median"]
    remark = f"PyTorch {rate(case, timed['ms']):.0f} {case.unit} ({timed['ms']:.1f} ms, {timed['way']}), "
    remark += f"fretsaw {rate(case, own):.0f} ({own:.1f} ms), first loss {done.json['losses'][0]:.4f} (PyTorch {timed['loss']:.4f})"
    fallen = host_nodes(done.json)
    if fallen:
        remark += f", host: {'; '.join(fallen[:3])}"
    if not abs(done.json["losses"][0] - timed["loss"]) <= FIRST_LOSS * abs(timed["loss"]):
        return report.failed("train-speed", name, "losses differ: " + remark)
    report.row("train-speed", name, timed["ms"] / own, case.wanted, at_most=False, remark=remark, peer=timed, fretsaw=done.json)
    taken = max(rank["peak_bytes"] for rank in done.json["ranks"])
    remark = f"of the memory that PyTorch reserves: {taken / GIB:.2f} GiB, {timed['reserved'] / GIB:.2f} (of it {timed['allocated'] / GIB:.2f} in use)"
    report.row("train-speed", f"{name} memory", taken / timed["reserved"], 1.0, remark=remark)


def train_speed(arguments, fretsaw, report):
    """Steps of models that PyTorch exports on the spot, in bfloat16 with float32 parameters, beside PyTorch's own."""
    root = tempfile.mkdtemp(prefix="fretsaw_training_")
    try:
        for case in SPEED:
            if arguments.models and not any(part in case.name for part in arguments.models):
                continue
            folder = os.path.join(root, case.model)
            worker = Worker(torch_server, case.model, case.batch, case.length, case.optimizer, folder, not arguments.quick)
            try:
                seconds = worker.wait(time.monotonic() + arguments.prepare_limit)
                report.note(f"{case.name}: {worker.error}" if seconds is None else f"{case.name}: exported and compiled in {seconds:.0f} s")
                measure(arguments, fretsaw, report, worker, case, folder)
            finally:
                worker.end()
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    report.summary("train-speed")
