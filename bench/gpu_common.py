"""What the GPU benchmarks share: running the command without ending on its errors, one table that prints as it goes, and comparing outputs."""
import glob
import json
import os
import subprocess
import time
from collections import namedtuple

import numpy as np
import onnx
from onnx import numpy_helper

Done = namedtuple("Done", "code json error seconds")


class Fretsaw:
    """The command on one kind of device."""

    def __init__(self, path, device, limit_s):
        self.path, self.device, self.limit_s = path, device, limit_s

    def __call__(self, *arguments, limit_s=None, env=None):
        start = time.perf_counter()
        command = [self.path, *map(str, arguments)] + ([] if arguments[0] == "model" else ["--json"])
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit_s or self.limit_s,
                                  env={**os.environ, **(env or {})})
        except subprocess.TimeoutExpired:
            return Done(124, {}, f"no answer in {limit_s or self.limit_s} s", time.perf_counter() - start)
        except OSError as error:
            return Done(127, {}, str(error), 0.0)
        seconds = time.perf_counter() - start
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            answer = {}
        said = (done.stderr or done.stdout).strip().splitlines()
        error = answer.get("error", {}).get("message") or (said[-1] if said else f"exit {done.returncode}")
        return Done(done.returncode, answer, error if done.returncode else "", seconds)

    def on(self, devices=None, precision=None):
        """The options that choose devices and precision."""
        options = ["--device", self.device]
        if self.device != "cpu" and devices:
            options += ["--devices", ",".join(map(str, devices))]
        return options + (["--precision", precision] if precision else [])

    def gpus(self):
        """The CUDA devices, as `devices --json` lists them."""
        return self("devices").json.get("cuda", [])


def wait_while_there(path):
    """Returns when the file is gone; at once without a path."""
    while path and os.path.exists(path):
        time.sleep(0.2)


class Report:
    """One table: a figure with what is wanted of it in each row. Rows are printed, and saved as JSON, when they are known."""

    FORMAT = "{:<9} {:<34} {:>10} {:>9}  {:<8} {}"

    def __init__(self, path=None):
        self.path, self.rows, self.headed = path, [], False

    def row(self, item, case, figure, wanted=None, at_most=True, remark="", **details):
        good = wanted is None or (figure <= wanted if at_most else figure >= wanted)
        bound = "" if wanted is None else f"{'<=' if at_most else '>='} {wanted:.3g}"
        self._add(item, case, f"{figure:.4g}", bound, "ok" if good else "SHORT", remark, {"figure": figure, "wanted": wanted, **details})

    def failed(self, item, case, error):
        self._add(item, case, "-", "", "FAILED", error, {})

    def refused(self, item, case, reason):
        self._add(item, case, "-", "", "refused", reason, {})

    def note(self, text):
        print(f"  {text}", flush=True)

    def bad(self):
        return sum(row["verdict"] in ("SHORT", "FAILED") for row in self.rows)

    def summary(self, item):
        verdicts = [row["verdict"] for row in self.rows if row["item"] == item]
        short, failed, refused = (verdicts.count(verdict) for verdict in ("SHORT", "FAILED", "refused"))
        print(f"{item}: {verdicts.count('ok')} of {len(verdicts)} hold, {short} short, {failed} failed, {refused} refused\n", flush=True)

    def _add(self, item, case, figure, bound, verdict, remark, details):
        if not self.headed:
            print(self.FORMAT.format("what", "case", "figure", "wanted", "verdict", "remark"))
            self.headed = True
        print(self.FORMAT.format(item, case, figure, bound, verdict, remark).rstrip(), flush=True)
        self.rows.append({"item": item, "case": case, "verdict": verdict, "remark": remark, **details})
        if self.path:
            with open(self.path, "w", encoding="utf-8") as file:
                json.dump(self.rows, file, indent=1)


def read_values(folder, kind):
    """The arrays of {kind}_K.pb in order."""
    values = []
    for path in sorted(glob.glob(os.path.join(folder, kind + "_*.pb")), key=lambda p: int(p.rsplit("_", 1)[1][:-3])):
        with open(path, "rb") as file:
            tensor = onnx.TensorProto.FromString(file.read())
        array = numpy_helper.to_array(tensor)
        values.append(array.astype(np.float32) if tensor.data_type == onnx.TensorProto.BFLOAT16 else array)
    return values


def over_range(got, want):
    """The largest difference as a share of the wanted output's largest value; of integers and flags, the share that differs."""
    if got.shape != want.shape:
        raise ValueError(f"the shape is {list(got.shape)}, wanted is {list(want.shape)}")
    if not want.size:
        return 0.0
    if want.dtype.kind not in "fc":
        return float(np.mean(got != want))
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    if not np.array_equal(finite, np.isfinite(got)):
        raise ValueError("not finite where the wanted output is, or the other way round")
    if not finite.any():
        return 0.0
    return float(np.max(np.abs(got - want)[finite]) / max(np.max(np.abs(want[finite])), 1e-30))


def worst_difference(got, want):
    """Over all outputs: the worst difference of real ones, and the worst share of integers that differ."""
    if len(got) != len(want):
        raise ValueError(f"{len(got)} outputs, wanted are {len(want)}")
    differences = [(w.dtype.kind in "fc", over_range(g, w)) for g, w in zip(got, want)]
    return max([d for real, d in differences if real], default=0.0), max([d for real, d in differences if not real], default=0.0)


def host_nodes(answer):
    """What ran on the host for want of a kernel, over all ranks of a `run` or `bench`."""
    return sorted({node for rank in answer.get("ranks", []) for node in rank.get("host_nodes", [])})


def median(values):
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
