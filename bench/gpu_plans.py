"""Plans on two GPUs: layers shared between them against PyTorch with NCCL, pipelines against their ideal, data parallelism against one GPU."""
import os
import socket
import tempfile
import time

import numpy as np
from gpu_common import host_nodes
from gpu_llama import Llama
from gpu_speed import Worker, device_ms

TENSOR_LAYERS, TENSOR_WANTED = 8, {1: 0.80, 2048: 0.98}  # of the peer's time, by tokens
LAYERS, MICRO_BATCHES, LENGTH = 16, 8, 1024
RANDOM = ("--random-weights", 1)


def torch_megatron(*arguments):
    from gpu_megatron import measure

    measure(*arguments)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def partitioned(fretsaw, model, plan, mesh, *options):
    """The error of partitioning, "" when there is a plan."""
    return fretsaw("partition", model, "-o", plan, "--mesh", mesh, "--target", "h200", "--overwrite", *options).error


def agreement(fretsaw, plan, model, inputs, options):
    """The largest difference of a plan's outputs from the whole model's on one GPU, over the range; or the error."""
    done = fretsaw("run", plan, "--inputs", inputs, "--compare", model, "--range-tol", 2e-2, *options)
    if done.code not in (0, 1):
        return None, done.error
    differences = [output.get("diff_over_range") for output in done.json.get("outputs", [])]
    return max((d for d in differences if d is not None), default=None), "" if done.code == 0 else "results differ from one GPU's"


def write_layers(folder, layers, batch, length):
    """Llama-7B layers without their weights, with inputs."""
    model, inputs = os.path.join(folder, "model.onnx"), os.path.join(folder, "inputs")
    os.makedirs(inputs)
    Llama(layers, 4096, 32, 32, 11008).write(model, batch, length)
    np.save(os.path.join(inputs, "ids.npy"), np.random.default_rng(0).integers(0, 512, (batch, length)))
    return model, inputs


def tensor(arguments, fretsaw, report):
    """8 Llama-7B layers shared by two GPUs."""
    with tempfile.TemporaryDirectory(prefix="fretsaw_tensor_") as folder:
        file = os.path.join(folder, "peer.json")
        peer = Worker(torch_megatron, 2, TENSOR_LAYERS, list(TENSOR_WANTED), not arguments.quick, free_port(), file)
        times = peer.wait(time.monotonic() + arguments.prepare_limit)
        peer.end()
        for length, wanted in TENSOR_WANTED.items():
            name = f"{TENSOR_LAYERS} Llama-7B layers, {length} tokens"
            if peer.error:
                report.failed("tensor", name, peer.error)
            else:
                here = os.path.join(folder, str(length))
                measure_tensor(arguments, fretsaw, report, name, length, wanted, times[length], here)
    report.summary("tensor")


def measure_tensor(arguments, fretsaw, report, name, length, wanted, times, folder):
    model, inputs = write_layers(folder, TENSOR_LAYERS, 1, length)
    plan = os.path.join(folder, "plan")
    error = partitioned(fretsaw, model, plan, "tensor=2", "--structure-only")
    if error:
        return report.failed("tensor", name, error)
    options = (*fretsaw.on(arguments.devices[:2]), *RANDOM)
    difference, error = agreement(fretsaw, plan, model, inputs, options)
    bench = fretsaw("bench", plan, "--inputs", inputs, *options)
    error = bench.error or error
    if error:
        return report.failed("tensor", name, error)
    way, best = min(times.items(), key=lambda one: one[1])
    ours, what = device_ms(bench.json)
    remark = f"PyTorch + NCCL {best:.3f} ms ({way}), fretsaw {ours:.3f} ms ({what}; step {bench.json['time_ms']['median']:.3f}), "
    remark += f"from one GPU {difference or 0:.1e}"
    details = {"peer_ms": times, "fretsaw": bench.json, "difference": difference}
    report.row("tensor", name, ours / best, wanted, remark=remark, **details)


def pipeline(arguments, fretsaw, report):
    """A pipeline's step against what its busiest rank computes; data parallelism against one GPU."""
    with tempfile.TemporaryDirectory(prefix="fretsaw_pipeline_") as folder:
        model, inputs = write_layers(os.path.join(folder, "whole"), LAYERS, MICRO_BATCHES, LENGTH)
        two = fretsaw.on(arguments.devices[:2])
        answers = {}
        for mesh, options in (("pipeline=2", ("--micro-batches", MICRO_BATCHES)), ("data=2", ())):
            plan = os.path.join(folder, mesh)
            error = partitioned(fretsaw, model, plan, mesh, "--structure-only", *options)
            if not error:
                difference, error = agreement(fretsaw, plan, model, inputs, (*two, *RANDOM))
                report.note(f"{mesh}: {error or f'from one GPU {difference or 0:.1e}'}")
            done = None if error else fretsaw("bench", plan, "--inputs", inputs, *two, *RANDOM)
            if error or done.code:
                report.failed("pipeline", mesh, error or done.error)
            else:
                answers[mesh] = done.json
        if "pipeline=2" in answers:
            judge_pipeline(report, answers["pipeline=2"])
        if "data=2" in answers:
            one = fretsaw("bench", model, "--inputs", inputs, *fretsaw.on(arguments.devices[:1]), *RANDOM)
            judge_data(report, one, answers["data=2"])
    report.summary("pipeline")


def busiest_ms(answer):
    """The compute time of the busiest rank in a step: the median where it is told, else the last step's."""
    step = answer["time_ms"]["median"]
    last = max(rank.get("busy_ms", rank["busy_share"] * step) for rank in answer["ranks"])
    return answer["device_ms"]["median"] if "device_ms" in answer else last


def judge_pipeline(report, answer):
    ranks = len(answer["ranks"])
    step, busy = answer["time_ms"]["median"], busiest_ms(answer)
    ideal = busy * (MICRO_BATCHES + ranks - 1) / MICRO_BATCHES
    shares = ", ".join(f"{100 * rank['busy_share']:.0f}%" for rank in answer["ranks"])
    fallen = host_nodes(answer)
    remark = f"step {step:.2f} ms, busiest rank {busy:.2f} ms, with fill and drain {ideal:.2f} ms, busy {shares}"
    remark += f", host: {fallen[0]}" if fallen else ""
    name = f"pipeline=2, {LAYERS} layers, M={MICRO_BATCHES}"
    report.row("pipeline", name, step / ideal, 1.04, remark=remark, fretsaw=answer)


def judge_data(report, one, two):
    if one.code:
        return report.failed("pipeline", "data=2", "one GPU: " + one.error)
    whole, half = one.json["time_ms"]["median"], two["time_ms"]["median"]
    remark = f"{MICRO_BATCHES} sequences {whole:.2f} ms, on two GPUs {half:.2f} ms (devices {busiest_ms(one.json):.2f}, {busiest_ms(two):.2f})"
    report.row("pipeline", f"data=2, {LAYERS} layers", whole / half, 1.95, at_most=False, remark=remark, one=one.json, two=two)
