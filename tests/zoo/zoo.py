"""Real models with reference results, whole and cut: zoo.py COMMAND FOLDER. FOLDER/KIND/NAME holds model.onnx and test_data_set_0.

Whole: every output within 2e-5 of its range of the reference. Cut in 2, 3 and 4 stages, in 1 and 2 micro-batches: equal to the bit to the whole model with
the same micro-batches and threads. Cases in known_failures.txt must fail. Exits with 77 (skipped) where the folder is not there.
"""
import glob
import os
import subprocess
import sys
import tempfile

import onnx
from onnx import numpy_helper

KINDS = ("tiny", "ts", "dyn")


def load(path):
    with open(path, "rb") as file:
        return numpy_helper.to_array(onnx.TensorProto.FromString(file.read()))


def numbered(folder, what):
    return sorted(glob.glob(f"{folder}/{what}_*.pb"), key=lambda p: int(p.rsplit("_", 1)[1][:-3]))


class Zoo:
    def __init__(self, command):
        self.command = command
        self.passed = 0
        self.failed = []

    def fretsaw(self, *args):
        done = subprocess.run([self.command, *map(str, args)], capture_output=True, text=True, errors="replace", timeout=300)
        return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]

    def note(self, name, why):
        if why:
            self.failed.append(name)
            print(f"{name}: {why}", flush=True)
        else:
            self.passed += 1

    def whole(self, name, model, data):
        code, message = self.fretsaw("run", model, "--inputs", data, "--expect", data, "--range-tol", 2e-5)
        self.note(f"{name} whole", message or f"exit code {code}" if code else None)

    def cut(self, name, model, data, stages, parts):
        batch = min((load(p).shape[0] for p in numbered(data, "input") if load(p).ndim > 1), default=1)
        with tempfile.TemporaryDirectory() as folder:
            plan = folder + "/plan"
            code, message = self.fretsaw("partition", model, "-o", plan, "--mesh", f"pipeline={stages}", "--micro-batches", parts)
            if not code:
                tolerance = ("--rtol", 0, "--atol", 0)
                code, message = self.fretsaw("run", plan, "--inputs", data, "--threads", 1, "--compare", model, *tolerance)
        refused = code == 3 and parts > batch
        self.note(f"{name} pipeline={stages} micro-batches={parts}", None if refused or not code else message or f"exit code {code}")


def known_failures():
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "known_failures.txt")
    with open(path, encoding="utf-8") as file:
        return [line.split("  #")[0].strip() for line in file if line.strip() and not line.startswith("#")]


def main(command, folder):
    if not os.path.isdir(folder):
        print(f"skipped: there is no {folder}")
        sys.exit(77)
    zoo = Zoo(command)
    for kind in KINDS:
        for model in sorted(glob.glob(f"{folder}/{kind}/*/model.onnx")):
            name, data = os.path.relpath(os.path.dirname(model), folder), os.path.dirname(model) + "/test_data_set_0"
            zoo.whole(name, model, data)
            for stages in (2, 3, 4):
                for parts in (1, 2):
                    zoo.cut(name, model, data, stages, parts)
    known = known_failures()
    unexpected = [name for name in zoo.failed if name not in known]
    mended = [name for name in known if name not in zoo.failed]
    for name in mended:
        print(f"{name}: passes; take it off known_failures.txt")
    print(f"zoo: {zoo.passed} of {zoo.passed + len(zoo.failed)} pass; {len(known)} are known to fail")
    sys.exit(1 if unexpected or mended else 0)


if __name__ == "__main__":
    main(*sys.argv[1:3])
