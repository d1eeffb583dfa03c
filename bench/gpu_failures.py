"""Failures on two GPUs: an interrupt and a lost rank end the command in time, and the GPUs serve the next one."""
import os
import signal
import subprocess
import tempfile
import time

import numpy as np
from gpu_llama import Llama
from gpu_plans import RANDOM, partitioned, sequence, sizes

ENDS_S = 10
BATCH, LAYERS = 8, 8
LOADING_S, RUNNING_S = 1, 8
LONG = ("--repeat", 50_000)  # minutes, as a step of these layers takes more than 5 ms


def write_model(arguments, folder):
    """Llama-7B layers without their weights, good inputs, and inputs that no embedding has."""
    model, good, bad = (os.path.join(folder, name) for name in ("model.onnx", "good", "bad"))
    length = sequence(arguments)
    Llama(LAYERS, *sizes(arguments)).write(model, BATCH, length)
    ids = np.random.default_rng(0).integers(0, 512, (BATCH, length))
    for data in (good, bad):
        os.makedirs(data)
        np.save(os.path.join(data, "ids.npy"), ids)
        ids = np.full_like(ids, 10**6)
    return model, good, bad


def interrupted(fretsaw, after_s, arguments):
    """A command that gets SIGINT after some seconds: (exit code as a shell gives it, seconds from the signal to the end, was it in time)."""
    command = [fretsaw.path, *map(str, arguments), "--json"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            return signalled(process, after_s)
        finally:
            process.kill()


def signalled(process, after_s):
    try:
        return process.wait(after_s), 0.0, False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    begin = time.perf_counter()
    try:
        process.wait(3 * ENDS_S)
    except subprocess.TimeoutExpired:
        process.kill()
    code = process.wait()
    return code if code >= 0 else 128 - code, time.perf_counter() - begin, True


def judge_interrupt(fretsaw, report, mesh, when, after_s, arguments):
    case = f"{mesh}: SIGINT after {after_s:.0f} s, {when}"
    code, seconds, was_running = interrupted(fretsaw, after_s, ("run", *arguments, *LONG))
    if not was_running:
        report.failed("failures", case, f"it ended by itself with exit {code}")
    elif code != 130:
        report.failed("failures", case, f"exit {code} where 130 is wanted, after {seconds:.1f} s")
    else:
        report.row("failures", case, seconds, ENDS_S, remark="s to the end")


def judge_next(fretsaw, report, mesh, arguments):
    """How long the run takes in all."""
    done = fretsaw("run", *arguments)
    case = f"{mesh}: a run afterwards"
    if done.code:
        report.failed("failures", case, done.error)
    else:
        report.row("failures", case, done.seconds, remark="s in all")
    return done.seconds


def judge_interrupts(fretsaw, report, mesh, arguments):
    judge_interrupt(fretsaw, report, mesh, "loading", LOADING_S, arguments)
    whole_s = judge_next(fretsaw, report, mesh, arguments)
    judge_interrupt(fretsaw, report, mesh, "running", max(RUNNING_S, whole_s + 1), arguments)


def judge_bad_inputs(fretsaw, report, plan, inputs, options):
    """The first stage finds the fault while the second waits for it."""
    done = fretsaw("run", plan, "--inputs", inputs, *options)
    case = "pipeline=2: an index out of range"
    if done.code != 3:
        report.failed("failures", case, f"exit {done.code} where 3 is wanted: {done.error}")
    else:
        report.row("failures", case, done.seconds, remark=f"s in all: {done.error}")


def judge_lost_rank(fretsaw, report, limit_s):
    """The unit tests' injected failures of one rank, which check the time, and that the session ends or goes on as it should."""
    tests = os.path.join(os.path.dirname(fretsaw.path), "tests", "runtime_tests")
    case = "a rank throws, in collectives and stages"
    if not os.path.exists(tests):
        return report.failed("failures", case, f"{tests} is not built")
    begin = time.perf_counter()
    try:
        done = subprocess.run([tests, "--gtest_filter=FailuresOnDevices.*"], capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return report.failed("failures", case, f"no end in {limit_s} s")
    seconds = time.perf_counter() - begin
    lines = [line for line in done.stdout.splitlines() if line.startswith(("[  FAILED", "[  SKIPPED"))]
    if done.returncode or lines:
        report.failed("failures", case, lines[0] if lines else f"exit {done.returncode}")
    else:
        report.row("failures", case, seconds, remark="s for all tests, each failure within 10 s")


def judge_mesh(fretsaw, report, mesh, plan, inputs, bad_inputs, options):
    good = (plan, "--inputs", inputs, *options)
    judge_interrupts(fretsaw, report, mesh, good)
    if mesh.startswith("pipeline"):
        judge_bad_inputs(fretsaw, report, plan, bad_inputs, options)
    judge_next(fretsaw, report, mesh, good)


def failures(arguments, fretsaw, report):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background commands ignore it, and so would ours
    judge_lost_rank(fretsaw, report, arguments.limit)
    options = (*fretsaw.on(arguments.ranks[:2]), *RANDOM)
    with tempfile.TemporaryDirectory(prefix="fretsaw_failures_") as folder:
        model, good, bad = write_model(arguments, folder)
        for mesh, more in (("tensor=2", ()), ("pipeline=2", ("--micro-batches", BATCH))):
            plan = os.path.join(folder, mesh)
            error = partitioned(fretsaw, model, plan, mesh, "--structure-only", *more)
            if error:
                report.failed("failures", mesh, error)
            else:
                judge_mesh(fretsaw, report, mesh, plan, good, bad, options)
    report.summary("failures")
