"""What the benchmarks share: running the built command and making inputs."""
import json
import os
import subprocess
import sys

import numpy as np
from onnx import numpy_helper

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
COMMAND = os.environ.get("FRETSAW", os.path.join(ROOT, "build", "fretsaw"))


def fretsaw(*args):
    """Runs the command; its JSON when --json is among the arguments. Ends the program with the command's message when it fails."""
    done = subprocess.run([COMMAND, *map(str, args)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr.strip() or f"{COMMAND} ended with {done.returncode}")
    return json.loads(done.stdout) if "--json" in args else done.stdout


def write_inputs(folder, arrays):
    """Arrays by name, in the order of the model's inputs, as input_K.pb."""
    os.makedirs(folder, exist_ok=True)
    for k, (name, array) in enumerate(arrays.items()):
        with open(os.path.join(folder, f"input_{k}.pb"), "wb") as file:
            file.write(numpy_helper.from_array(np.asarray(array), name).SerializeToString())


def median(values):
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
