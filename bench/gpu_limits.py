"""Memory and start: what a run takes of a GPU's memory, models that need two GPUs, and the time from start to the first result."""
import contextlib
import os
import tempfile
import threading

import numpy as np
from gpu_common import median
from gpu_llama import Llama
from gpu_plans import RANDOM, partitioned

GIB = 2**30
SLACK = 1.5 * GIB
BERT_LARGE = {"layers": 24, "hidden": 1024, "heads": 16}
BIG_BYTES = 100e9
REFUSED_CODE, REFUSED_S, START_S = 4, 10, 2


def make_model(fretsaw, folder, name, settings, inputs):
    """Writes an architecture of `fretsaw model` and its inputs; (model, inputs' folder, error)."""
    model, data = os.path.join(folder, name + ".onnx"), os.path.join(folder, name)
    done = fretsaw("model", name, "-o", model, *(part for key, value in settings.items() for part in ("--set", f"{key}={value}")))
    os.makedirs(data, exist_ok=True)
    for key, value in inputs.items():
        np.save(os.path.join(data, key + ".npy"), value)
    return model, data, done.error


def images(batch):
    return {"x": np.random.default_rng(0).standard_normal((batch, 3, 224, 224), np.float32)}


def tokens(batch, length, names=("input_ids",)):
    ids = np.random.default_rng(0).integers(0, 30000, (batch, length))
    others = {"attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    return {name: others.get(name, ids) for name in names}


BERT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class Watch(contextlib.AbstractContextManager):
    """The most memory in use on a GPU while it is open, over what was in use before; None without the driver's library."""

    def __init__(self, index):
        self.index, self.most, self.stop = index, None, threading.Event()

    def __enter__(self):
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(self.index)
            self.used = lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used
            self.before, self.most = self.used(), 0
        except Exception:  # no driver or no library for it: the command's own count is left
            return self
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def look(self):
        while not self.stop.wait(0.02):
            self.most = max(self.most, self.used() - self.before)

    def __exit__(self, *_):
        self.stop.set()
        if self.most is not None:
            self.thread.join()


def judge_memory(fretsaw, report, name, model, data, shape, device, *options):
    """One row: the peak on one GPU over weights and predicted activations."""
    told = fretsaw("inspect", model, *shape)
    if told.code:
        return report.failed("memory", name, told.error)
    with Watch(device) as watch:
        done = fretsaw("run", model, "--inputs", data, "--warmup", 2, "--repeat", 5, *fretsaw.on([device], "fp32"), *options)
    if done.code:
        return report.failed("memory", name, done.error)
    predicted = told.json["parameter_bytes"] + told.json["peak_activation_bytes"]
    counted = max(rank["peak_bytes"] for rank in done.json["ranks"])
    peak = max(counted, watch.most or 0)
    seen = "" if watch.most is None else f", seen by the driver {watch.most / GIB:.2f}"
    remark = f"GiB: predicted {predicted / GIB:.2f}, counted {counted / GIB:.2f}{seen}"
    report.row("memory", name, peak / GIB, (1.1 * predicted + SLACK) / GIB, remark=remark, predicted=predicted, counted=counted, seen=watch.most)


def chosen(arguments, case):
    return not arguments.models or any(part in case for part in arguments.models)


def small_memory(arguments, fretsaw, report, folder):
    device = arguments.devices[0]
    for name, case, settings, inputs in (
        ("resnet50", "resnet50 b64", {"batch": 64}, images(64)),
        ("bert", "bert_large b8 s384", {**BERT_LARGE, "batch": 8, "sequence": 384}, tokens(8, 384, BERT_INPUTS)),
        ("gpt2", "gpt2 b4 s512", {"batch": 4, "sequence": 512}, tokens(4, 512)),
    ):
        if not chosen(arguments, case):
            continue
        model, data, error = make_model(fretsaw, folder, name, settings, inputs)
        if error:
            report.failed("memory", case, error)
        else:
            judge_memory(fretsaw, report, case, model, data, (), device)
    if arguments.quick or not chosen(arguments, "layers"):
        return
    model = os.path.join(folder, "layers.onnx")
    Llama(16, 4096, 32, 32, 11008, vocabulary=32000).write(model, 1, 2048)
    data = os.path.join(folder, "layers")
    os.makedirs(data)
    np.save(os.path.join(data, "ids.npy"), tokens(1, 2048)["input_ids"])
    judge_memory(fretsaw, report, "16 Llama-7B layers s2048 bf16", model, data, (), device, *RANDOM)


def write_big(path, size_bytes):
    """A Llama of the 70B one's layers with as many of them as the size takes."""
    shape = (8192, 64, 8, 28672, 32000)
    layer, rest = Llama(0, *shape).layer_bytes(), Llama(0, *shape).bytes()
    llama = Llama(int(np.ceil((size_bytes - rest) / layer)), *shape)
    llama.write(path, 1, 128)
    return llama.bytes()


def big_memory(arguments, fretsaw, report, folder):
    """A model that two GPUs hold, and one that one GPU refuses."""
    gpus = fretsaw.gpus()
    model, plan = os.path.join(folder, "big.onnx"), os.path.join(folder, "big_plan")
    one_gpu = max((gpu["memory_bytes"] for gpu in gpus), default=80e9)
    size = write_big(model, max(BIG_BYTES, 1.1 * one_gpu))
    # The limit is short for a second reason: whoever makes the weights before refusing them would fill this machine's memory.
    done = fretsaw("run", model, "--random", 1, *fretsaw.on(arguments.devices[:1]), *RANDOM, limit_s=2 * REFUSED_S)
    case = f"a {size / 1e9:.0f} GB Llama on one GPU"
    if done.code == REFUSED_CODE:
        report.row("memory", case, done.seconds, REFUSED_S, remark=f"s to the refusal: {done.error}")
    else:
        report.failed("memory", case, f"exit {done.code} where {REFUSED_CODE} is wanted: {done.error}")
    if len(gpus) < 2 or arguments.quick:
        return
    size = write_big(model, BIG_BYTES)
    case = f"a {size / 1e9:.0f} GB Llama on two GPUs"
    error = partitioned(fretsaw, model, plan, "pipeline=2", "--structure-only")
    done = fretsaw("run", plan, "--random", 1, "--repeat", 3, *fretsaw.on(arguments.devices[:2]), *RANDOM, limit_s=arguments.big_limit)
    if error or done.code:
        return report.failed("memory", case, error or done.error)
    peaks = ", ".join(f"{rank['peak_bytes'] / GIB:.1f}" for rank in done.json["ranks"])
    report.row("memory", case, done.seconds, remark=f"s in all, step {done.json['time_ms']['median']:.1f} ms, peaks {peaks} GiB")


def memory(arguments, fretsaw, report):
    with tempfile.TemporaryDirectory(prefix="fretsaw_memory_") as folder:
        if not arguments.only_big:
            small_memory(arguments, fretsaw, report, folder)
        if arguments.device == "cuda" and chosen(arguments, "big"):
            big_memory(arguments, fretsaw, report, folder)
    report.summary("memory")


def start(arguments, fretsaw, report):
    """Seconds from a process's start to its end after one step, with a disk cache that an earlier process filled."""
    with tempfile.TemporaryDirectory(prefix="fretsaw_start_") as folder:
        env = {"FRETSAW_CACHE": os.path.join(folder, "cache")}
        for name, case, settings, inputs in (
            ("resnet50", "resnet50 b1", {"batch": 1}, images(1)),
            ("bert", "bert_large b1 s384", {**BERT_LARGE, "batch": 1, "sequence": 384}, tokens(1, 384, BERT_INPUTS)),
        ):
            if not chosen(arguments, case):
                continue
            model, data, error = make_model(fretsaw, folder, name, settings, inputs)
            runs = [fretsaw("run", model, "--inputs", data, *fretsaw.on(arguments.devices[:1], arguments.precision), env=env) for _ in range(4)]
            error = error or next((run.error for run in runs if run.code), "")
            if error:
                report.failed("start", case, error)
                continue
            first, *warm = (run.seconds for run in runs)
            remark = f"s, with an empty cache {first:.2f}; the first step {runs[-1].json['time_ms']['median'] / 1e3:.2f} s of it"
            report.row("start", f"{case} {arguments.precision}", median(warm), START_S, remark=remark, warm=warm, cold=first)
    report.summary("start")
