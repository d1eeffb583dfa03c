"""Two ranks with one core each that share every layer (tensor=2) against one rank with one core, in turns: ResNet-50 at batch 1 and BERT-base
at sequence 128. Exits with 1 when one takes more than 0.65 of the time."""
import os
import sys
import tempfile

import numpy as np
from common import fretsaw, median, write_inputs

TIMING = ("--threads", 1, "--warmup", 2, "--repeat", 7, "--json")
SEQUENCE = 128


def inputs_of(name):
    random = np.random.default_rng(0)
    if name == "resnet50":
        return {"x": random.standard_normal((1, 3, 224, 224)).astype(np.float32)}
    tokens = (1, SEQUENCE)
    return {
        "input_ids": random.integers(0, 30000, tokens),
        "attention_mask": np.ones(tokens, np.int64),
        "token_type_ids": np.zeros(tokens, np.int64),
    }


def shares(name, folder):
    model, plan, data = (os.path.join(folder, name + end) for end in (".onnx", ".plan", ".data"))
    fretsaw("model", name, "-o", model)
    fretsaw("partition", model, "-o", plan, "--mesh", "tensor=2")
    write_inputs(data, inputs_of(name))
    for _ in range(5):
        one = fretsaw("run", model, "--inputs", data, *TIMING)["time_ms"]["median"]
        two = fretsaw("run", plan, "--inputs", data, *TIMING)["time_ms"]["median"]
        print(f"{name}: one rank {one:.1f} ms, two ranks {two:.1f} ms: {two / one:.2f}", flush=True)
        yield two / one


def main():
    if (os.cpu_count() or 1) < 2:
        sys.exit("this takes a machine with two cores")
    with tempfile.TemporaryDirectory() as folder:
        worst = 0
        for name in ("resnet50", "bert"):
            share = median(list(shares(name, folder)))
            print(f"{name}: {share:.2f} of the time of one rank (ideal 0.5)")
            worst = max(worst, share)
    sys.exit(0 if worst <= 0.65 else 1)


if __name__ == "__main__":
    main()
