"""One core against ONNX Runtime with one thread, in turns: ResNet-50 at batch 1 and BERT-base at sequence 128, float32.

Prints how many times the speed of ONNX Runtime each is, and the geometric mean. Exits with 1 when a model is below 0.95 or the mean below 1.
"""
import argparse
import math
import os
import sys
import tempfile
import time

import numpy as np
import onnxruntime
from common import fretsaw, median, write_inputs

SIZES = {0: 1, 1: 128}  # a symbolic axis of a model's inputs: batch, sequence


def make_inputs(session, generator):
    """Inputs of a session: images as noise, token ids of any table of 1,000 rows, masks of ones, token types of zeros."""
    arrays = {}
    for value in session.get_inputs():
        shape = [d if isinstance(d, int) else SIZES.get(axis, 1) for axis, d in enumerate(value.shape)]
        if "int" not in value.type:
            arrays[value.name] = generator.standard_normal(shape).astype(np.float32)
        elif "mask" in value.name:
            arrays[value.name] = np.ones(shape, np.int64)
        elif "type" in value.name:
            arrays[value.name] = np.zeros(shape, np.int64)
        else:
            arrays[value.name] = generator.integers(0, 1000, shape)
    return arrays


def reference_ms(session, arrays, repeat):
    times = []
    for _ in range(repeat + 3):
        start = time.perf_counter()
        session.run(None, arrays)
        times.append((time.perf_counter() - start) * 1e3)
    return median(times[3:])


def measure(name, folder, rounds, repeat):
    model, data = os.path.join(folder, name + ".onnx"), os.path.join(folder, name)
    fretsaw("model", name, "-o", model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    arrays = make_inputs(session, np.random.default_rng(0))
    write_inputs(data, arrays)
    ratios = []
    for _ in range(rounds):
        theirs = reference_ms(session, arrays, repeat)
        run = fretsaw("run", model, "--inputs", data, "--threads", 1, "--warmup", 3, "--repeat", repeat, "--json")
        ours = run["time_ms"]["median"]
        ratios.append(theirs / ours)
        print(f"{name}: ONNX Runtime {theirs:.1f} ms, fretsaw {ours:.1f} ms, {ratios[-1]:.2f} times the speed", flush=True)
    return median(ratios)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=15)
    arguments = parser.parse_args()
    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("resnet50", "bert"):
            ratios[name] = measure(name, folder, arguments.rounds, arguments.repeat)
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f} times the speed of ONNX Runtime {onnxruntime.__version__}")
    print(f"geometric mean: {mean:.2f}")
    sys.exit(0 if mean >= 1 and min(ratios.values()) >= 0.95 else 1)


if __name__ == "__main__":
    main()
