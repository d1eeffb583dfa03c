"""Plans on several GPUs: shared layers against PyTorch with NCCL, pipelines against their ideal, data parallelism against one GPU."""
import os
import socket
import tempfile
import time
from collections import namedtuple

import numpy as np
from gpu_common import host_nodes, median
from gpu_llama import Llama
from gpu_speed import Worker, device_ms, wait_for_go

TENSOR_LAYERS, TENSOR_WANTED = 8, {1: 0.80, 2048: 0.98}  # of the peer's time, by tokens
PEER_TIMED_S = 120
LAYERS, LENGTH, SEQUENCES, ROUNDS = 16, 1024, 8, 3
LLAMA_7B, SMALL = (4096, 32, 32, 11008), (256, 8, 8, 704)  # hidden, heads, heads of keys, between; the small one tries the scripts on CPUs
RANDOM = ("--random-weights", 1)

Work = namedtuple("Work", "gpus layers lengths compiles port path pause")  # the peer's


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


def sizes(arguments):
    return SMALL if arguments.device == "cpu" else LLAMA_7B


def sequence(arguments):
    return LENGTH if arguments.device == "cuda" else LENGTH // 16


def write_layers(arguments, folder, layers, batch, length):
    """Llama-7B layers without their weights, with inputs."""
    model, inputs = os.path.join(folder, "model.onnx"), os.path.join(folder, "inputs")
    os.makedirs(inputs)
    Llama(layers, *sizes(arguments)).write(model, batch, length)
    np.save(os.path.join(inputs, "ids.npy"), np.random.default_rng(0).integers(0, 512, (batch, length)))
    return model, inputs


def peer_times(arguments, report, folder):
    """({tokens: {way: ms}}, "") of PyTorch with NCCL on the same GPUs, or what went wrong."""
    file = os.path.join(folder, "peer.json")
    work = Work(arguments.ranks, TENSOR_LAYERS, list(TENSOR_WANTED), not arguments.quick, free_port(), file, arguments.pause)
    times, peer = None, Worker(torch_megatron, work)
    try:
        seconds = peer.wait(time.monotonic() + arguments.prepare_limit)
        if seconds is not None:
            report.note(f"PyTorch + NCCL: compiled and captured in {seconds:.0f} s")
            wait_for_go(arguments, report)
            times = peer.wait(time.monotonic() + PEER_TIMED_S)
    finally:
        peer.kill()
    return times, peer.error


def tensor(arguments, fretsaw, report):
    """8 Llama-7B layers shared by all GPUs."""
    ranks = len(arguments.ranks)
    names = {length: f"tensor={ranks}, {TENSOR_LAYERS} layers, {length} tokens" for length in TENSOR_WANTED}
    with tempfile.TemporaryDirectory(prefix="fretsaw_tensor_") as folder:
        times, error = None, None
        if LLAMA_7B[1] % ranks:
            error = f"{LLAMA_7B[1]} heads are not divisible by {ranks}"
        elif arguments.device == "cuda":
            times, error = peer_times(arguments, report, folder)
        for length, name in names.items():
            if error:
                report.failed("tensor", name, error)
            else:
                measure_tensor(arguments, fretsaw, report, name, length, times and times[length], os.path.join(folder, str(length)))
    report.summary("tensor")


def measure_tensor(arguments, fretsaw, report, name, length, times, folder):
    """One row; without the peer's times it is fretsaw's own."""
    model, inputs = write_layers(arguments, folder, TENSOR_LAYERS, 1, length)
    plan = os.path.join(folder, "plan")
    error = partitioned(fretsaw, model, plan, f"tensor={len(arguments.ranks)}", "--structure-only")
    if error:
        return report.failed("tensor", name, error)
    options = (*fretsaw.on(arguments.ranks), *RANDOM)
    difference, error = agreement(fretsaw, plan, model, inputs, options)
    bench = fretsaw("bench", plan, "--inputs", inputs, *options)
    error = bench.error or error
    if error:
        return report.failed("tensor", name, error)
    ours, what = device_ms(bench.json)
    remark = f"fretsaw {ours:.3f} ms ({what}; step {bench.json['time_ms']['median']:.3f}), from one GPU {difference or 0:.1e}"
    details = {"peer_ms": times, "fretsaw": bench.json, "difference": difference}
    if not times:
        return report.row("tensor", name, ours, remark="ms, no peer: " + remark, **details)
    way, best = min(times.items(), key=lambda one: one[1])
    report.row("tensor", name, ours / best, TENSOR_WANTED[length], remark=f"PyTorch + NCCL {best:.3f} ms ({way}), {remark}", **details)


def make_plan(arguments, fretsaw, report, model, inputs, mesh, *options):
    """A plan that was seen to agree with one GPU; None when a row tells what went wrong."""
    plan = os.path.join(os.path.dirname(model), mesh)
    error = partitioned(fretsaw, model, plan, mesh, "--structure-only", *options)
    if not error:
        difference, error = agreement(fretsaw, plan, model, inputs, (*fretsaw.on(arguments.ranks), *RANDOM))
        report.note(f"{mesh}: {error or f'from one GPU {difference or 0:.1e}'}")
    return report.failed("pipeline", mesh, error) if error else plan


def measure(arguments, fretsaw, model, inputs, ranks):
    return fretsaw("bench", model, "--inputs", inputs, *fretsaw.on(ranks), *RANDOM)


def pipeline(arguments, fretsaw, report):
    """A pipeline's step against what its busiest rank computes; data parallelism against one GPU."""
    ranks = len(arguments.ranks)
    with tempfile.TemporaryDirectory(prefix="fretsaw_pipeline_") as folder:
        batch = 4 * ranks  # of one sequence a micro-batch
        model, inputs = write_layers(arguments, os.path.join(folder, "whole"), LAYERS, batch, sequence(arguments))
        plan = make_plan(arguments, fretsaw, report, model, inputs, f"pipeline={ranks}", "--micro-batches", batch)
        if plan:
            judge_pipeline(report, measure(arguments, fretsaw, plan, inputs, arguments.ranks), batch)
        for kept, batch in (("a GPU", SEQUENCES * ranks), ("in all", SEQUENCES)):
            measure_data(arguments, fretsaw, report, os.path.join(folder, kept.replace(" ", "_")), kept, batch)
    report.summary("pipeline")


def measure_data(arguments, fretsaw, report, folder, kept, batch):
    """One row: as many sequences on each GPU as the one has, or as many in all. Both sides run in turns."""
    ranks = len(arguments.ranks)
    one_model, one_inputs = write_layers(arguments, os.path.join(folder, "one"), LAYERS, SEQUENCES, sequence(arguments))
    model, inputs = write_layers(arguments, os.path.join(folder, "many"), LAYERS, batch, sequence(arguments))
    plan = make_plan(arguments, fretsaw, report, model, inputs, f"data={ranks}")
    if not plan:
        return
    rounds = []
    for _ in range(ROUNDS):
        one = measure(arguments, fretsaw, one_model, one_inputs, arguments.ranks[:1])
        many = measure(arguments, fretsaw, plan, inputs, arguments.ranks)
        if one.code or many.code:
            return report.failed("pipeline", f"data={ranks}", one.error or many.error)
        rounds.append((one.json, many.json))
    judge_data(report, rounds, kept, batch)


def busiest_ms(answer):
    """The compute time of the busiest rank in a step: the median where it is told, else the last step's."""
    step = answer["time_ms"]["median"]
    last = max(rank.get("busy_ms", rank["busy_share"] * step) for rank in answer["ranks"])
    return answer["device_ms"]["median"] if "device_ms" in answer else last


def judge_pipeline(report, done, micro_batches):
    if done.code:
        return report.failed("pipeline", "the pipeline", done.error)
    answer = done.json
    ranks = len(answer["ranks"])
    step, busy = answer["time_ms"]["median"], busiest_ms(answer)
    ideal = busy * (micro_batches + ranks - 1) / micro_batches
    shares = ", ".join(f"{100 * rank['busy_share']:.0f}%" for rank in answer["ranks"])
    fallen = host_nodes(answer)
    remark = f"step {step:.2f} ms, busiest rank {busy:.2f} ms, with fill and drain {ideal:.2f} ms, busy {shares}"
    remark += f", host: {fallen[0]}" if fallen else ""
    name = f"pipeline={ranks}, {LAYERS} layers, M={micro_batches}"
    report.row("pipeline", name, step / ideal, 1.04, remark=remark, fretsaw=answer)


def data_wanted(ranks):
    """Times the speed of one GPU."""
    return 1.95 if ranks == 2 else 0.9625 * ranks


def judge_data(report, rounds, kept, batch):
    """Sequences a second over one GPU's, the median of the rounds."""
    ranks = len(rounds[0][1]["ranks"])

    def gain(times):
        return median([batch / SEQUENCES * times(one) / times(many) for one, many in rounds])

    steps = ", ".join(f"{one['time_ms']['median']:.2f} and {many['time_ms']['median']:.2f}" for one, many in rounds)
    remark = f"ms of {SEQUENCES} sequences on one GPU and {batch} on {ranks}: {steps}; devices alone {gain(busiest_ms):.3f}"
    wanted = data_wanted(ranks) if kept == "a GPU" else None
    name = f"data={ranks}, {LAYERS} layers, {SEQUENCES} sequences {kept}"
    report.row("pipeline", name, gain(lambda answer: answer["time_ms"]["median"]), wanted, at_most=False, remark=remark, rounds=rounds)
