"""One GPU against PyTorch's best in the same run: models that PyTorch exports on the spot, in the precision that both run in."""
import collections
import contextlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass

from gpu_common import host_nodes, wait_while_there

AGREE = 2e-2  # of each output's range, from float32's results; where PyTorch itself is further away, half as much again as that


@dataclass(frozen=True)
class Case:
    model: str
    batch: int
    length: int = 0  # tokens
    precision: str = "fp16"
    wanted: float = 0.98  # times PyTorch's speed

    @property
    def name(self):
        return f"{self.model} b{self.batch}" + (f" s{self.length}" if self.length else "")


CASES = (
    Case("resnet50", 1, wanted=1.25),
    Case("resnet50", 64, wanted=1.25),
    Case("resnet50", 256, wanted=1.25),
    Case("vgg16", 32),
    Case("efficientnet_b0", 64),
    Case("vit_l_16", 32),
    Case("bert_large", 1, 384),
    Case("bert_large", 32, 384),
    Case("gpt2", 1, 512),
    Case("gpt2", 8, 512),
    Case("llama7b", 1, 1, "bf16"),
    Case("llama7b", 1, 2048, "bf16"),
)


def cases_by_model(arguments):
    """Those whose names hold one of --models; quickly: the first of each model."""
    by_model = collections.defaultdict(list)
    for case in CASES:
        if not arguments.models or any(part in case.name for part in arguments.models):
            by_model[case.model].append(case)
    return {model: cases[:1] if arguments.quick else cases for model, cases in by_model.items()}


def in_own_session(target, *arguments):
    os.setsid()  # the process can be killed with all that it starts
    target(*arguments)


class Worker:
    """A process that runs PyTorch, and others of its own."""

    def __init__(self, target, *arguments):
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        self.process = context.Process(target=in_own_session, args=(target, *arguments, there))  # no daemon: it has children
        self.process.start()
        there.close()
        self.error, self.over = None, False

    def wait(self, deadline):
        """What it says next, None when it failed: then `error` says how."""
        try:
            if not self.connection.poll(max(0, deadline - time.monotonic())):
                raise TimeoutError
            kind, value = self.connection.recv()
            if kind != "failed":
                return value
            self.error = value
        except TimeoutError:
            self.error = "PyTorch: not ready in time"
        except (EOFError, OSError):
            self.error = "PyTorch: its process ended"
        self.kill()
        return None

    def ask(self, *question, limit_s=120):
        if self.error:
            return None
        with contextlib.suppress(OSError):  # a process that ended is told of by what it doesn't answer
            self.connection.send(question)
        return self.wait(time.monotonic() + limit_s)

    def end(self):
        if self.over:
            return
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(20)
        self.kill()

    def kill(self):
        """Ends it and what it started, which would keep memory of the GPUs."""
        if self.over:
            return
        self.over = True
        with contextlib.suppress(OSError):  # nothing is left, or it has not come to its own session yet
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join(10)


def torch_server(*arguments):
    from gpu_torch import serve

    serve(*arguments)


def device_ms(answer):
    """The device's time between inputs there and outputs there where it is told, the whole step's elsewhere, and which it is."""
    told = "device_ms" in answer
    return (answer["device_ms"] if told else answer["time_ms"])["median"], "device" if told else "step"


def precision_options(case):
    """A model that is exported in halves runs as it is."""
    return None if case.precision == "bf16" else case.precision


def slowest_parts(fretsaw, model, data, options, most=8):
    """Lines about the operators that take the longest in a step, each alone on the device, and about the longest single ones."""
    with tempfile.TemporaryDirectory() as folder:
        trace = os.path.join(folder, "trace.json")
        done = fretsaw("run", model, "--inputs", data, "--warmup", 3, "--trace", trace, *options)
        if done.code:
            return [done.error]
        with open(trace, encoding="utf-8") as file:
            events = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X" and e["cat"] not in ("forward", "send", "recv")]
    parts = collections.defaultdict(list)
    for event in events:
        parts[event["cat"]].append(event["dur"] / 1e3)
    whole = sum(map(sum, parts.values())) or 1.0
    longest = sorted(parts.items(), key=lambda part: -sum(part[1]))[:most]
    lines = [f"{op:24} {len(ms):4} of them {sum(ms):8.3f} ms {100 * sum(ms) / whole:5.1f}%, the longest {max(ms):.3f} ms" for op, ms in longest]
    single = sorted(events, key=lambda event: -event["dur"])[:most]
    return lines + [f"  {event['dur'] / 1e3:.3f} ms: {event['cat']} {event['name']}"[:120] for event in single]


def measure(arguments, fretsaw, report, worker, number, case, folder):
    """One row: PyTorch's times, then fretsaw's results and time. The ratio, None when there is none."""
    name = f"{case.name} {case.precision}"
    model, data = os.path.join(folder, "model.onnx"), os.path.join(folder, "inputs")
    timed = worker.ask("time", number)
    if timed is None:
        return report.failed("speed", name, worker.error)
    times, own = timed
    options = fretsaw.on(arguments.devices[:1], precision_options(case))
    with tempfile.TemporaryDirectory() as out:
        done = fretsaw("run", model, "--inputs", data, "--output", out, *options)
        difference = worker.ask("compare", number, out) if done.code == 0 else None
    bench = fretsaw("bench", model, "--inputs", data, *options) if done.code == 0 else done
    if bench.code:
        return report.failed("speed", name, bench.error)
    way, best = min(((way, ms) for way, ms in times.items() if ms), key=lambda one: one[1])
    ours, what = device_ms(bench.json)
    remark = f"PyTorch {best:.3f} ms ({way}), fretsaw {ours:.3f} ms ({what}; step {bench.json['time_ms']['median']:.3f}), "
    remark += f"from float32 {-1 if difference is None else difference:.1e} (PyTorch {own:.1e})"
    fallen = host_nodes(bench.json)
    if fallen:
        remark += f", host: {'; '.join(fallen[:3])}"
    if difference is None or difference > max(AGREE, 1.5 * own):
        return report.failed("speed", name, "results differ: " + remark)
    report.row("speed", name, best / ours, case.wanted, at_most=False, remark=remark, peer_ms=times, fretsaw=bench.json, difference=difference)
    if arguments.parts:
        for line in slowest_parts(fretsaw, model, data, options):
            report.note(line)
    return best / ours


def start_workers(workers, by_model, folder, arguments, report):
    """Adds a process for each model, all of them preparing at the same time while nothing is timed."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    start = time.monotonic()
    for model, cases in by_model.items():
        workers[model] = Worker(torch_server, cases, folder, not arguments.quick)
    for model, worker in workers.items():
        seconds = worker.wait(start + arguments.prepare_limit)
        report.note(f"{model}: {worker.error}" if seconds is None else f"{model}: exported and compiled in {seconds:.0f} s")


def wait_for_go(arguments, report):
    """Between preparing and timing: other work goes on beside the one and ends before the other."""
    paused = arguments.pause and os.path.exists(arguments.pause)
    report.note(f"prepared, waits until {arguments.pause} is gone" if paused else "prepared")
    wait_while_there(arguments.pause)


def speed(arguments, fretsaw, report):
    folder = tempfile.mkdtemp(prefix="fretsaw_speed_")
    workers, ratios = {}, []
    try:
        by_model = cases_by_model(arguments)
        start_workers(workers, by_model, folder, arguments, report)
        wait_for_go(arguments, report)
        for model, own in by_model.items():
            for number, case in enumerate(own):
                here = os.path.join(folder, case.name.replace(" ", "_"))
                ratios.append(measure(arguments, fretsaw, report, workers[model], number, case, here))
                shutil.rmtree(here, ignore_errors=True)
            workers[model].end()
    finally:
        for worker in workers.values():
            worker.kill()
        shutil.rmtree(folder, ignore_errors=True)
    known = [ratio for ratio in ratios if ratio]
    if known:
        mean = math.exp(sum(map(math.log, known)) / len(known))
        report.row("speed", f"geometric mean of {len(known)}", mean, 1.15, at_most=False)
    report.summary("speed")
