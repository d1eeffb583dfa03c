"""Two ranks with one core each against one rank with one core: ResNet-50, 8 micro-batches, in turns. Exits with 1 when the gain is below 1.6."""
import os
import sys
import tempfile

import numpy as np
from common import fretsaw, median, write_inputs

MICRO_BATCHES = 8
TIMING = ("--threads", 1, "--warmup", 1, "--repeat", 5, "--json")


def main():
    if (os.cpu_count() or 1) < 2:
        sys.exit("this takes a machine with two cores")
    gains = []
    with tempfile.TemporaryDirectory() as folder:
        model, plan, data = (os.path.join(folder, name) for name in ("resnet50.onnx", "plan", "data"))
        fretsaw("model", "resnet50", "-o", model)
        fretsaw("partition", model, "-o", plan, "--mesh", "pipeline=2", "--micro-batches", MICRO_BATCHES)
        write_inputs(data, {"x": np.random.default_rng(0).standard_normal((MICRO_BATCHES, 3, 224, 224)).astype(np.float32)})
        for _ in range(3):
            one = fretsaw("run", model, "--inputs", data, "--micro-batches", MICRO_BATCHES, *TIMING)["time_ms"]["median"]
            two = fretsaw("run", plan, "--inputs", data, *TIMING)["time_ms"]["median"]
            gains.append(one / two)
            print(f"one rank {one:.0f} ms, two ranks {two:.0f} ms: {gains[-1]:.2f} times", flush=True)
    ideal = 2 * MICRO_BATCHES / (MICRO_BATCHES + 1)
    print(f"{median(gains):.2f} times the throughput of one rank (ideal {ideal:.2f})")
    sys.exit(0 if median(gains) >= 1.6 else 1)


if __name__ == "__main__":
    main()
