"""What must hold of fretsaw on GPUs, measured: one table, a row for each figure with what is wanted of it.

Subcommands: zoo (every model whole), meshes (cut), speed (against PyTorch), tensor, pipeline and failures (several GPUs), memory, start,
train-zoo and train-speed (training against PyTorch), train-pipeline and train-data (training on several GPUs), all.
Ends with 1 when a figure falls short or something failed.
"""
import argparse
import os
import signal
import sys
import time
import traceback

from gpu_common import Fretsaw, Report
from gpu_failures import failures
from gpu_limits import memory, start
from gpu_plans import pipeline, tensor
from gpu_speed import speed
from gpu_train_pipeline import train_data, train_pipeline
from gpu_training import train_speed, train_zoo
from gpu_zoo import meshes, zoo

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ONE_GPU = {"zoo": zoo, "meshes": meshes, "speed": speed, "memory": memory, "start": start, "train-zoo": train_zoo, "train-speed": train_speed}
MANY_GPUS = {"tensor": tensor, "pipeline": pipeline, "train-pipeline": train_pipeline, "train-data": train_data, "failures": failures}
COMMANDS = {**ONE_GPU, **MANY_GPUS}


def comma(text):
    return [part for part in text.split(",") if part]


def indexes(text):
    return [int(part) for part in comma(text)]


def mesh_list(text):
    return [mesh for mesh in text.split(";") if mesh]


def add_common(parser):
    parser.add_argument("--fretsaw", default=os.environ.get("FRETSAW", os.path.join(ROOT, "build", "fretsaw")), help="the command's path")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu tries the script out where there is no GPU")
    parser.add_argument("--devices", type=indexes, help="0,1,...: the GPU of each rank, used over again for more ranks")
    parser.add_argument("--json", metavar="FILE", help="write the rows here too")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one run of the command")
    parser.add_argument("--models", type=comma, default=[], help="NAME,...: only cases whose names hold one of these")
    parser.add_argument("--quick", action="store_true", help="fewer cases, and PyTorch without torch.compile")
    parser.add_argument("--zoo", default=os.environ.get("FRETSAW_ZOO", os.path.join(ROOT, "..", "shared", "zoo")), help="folder of zoo models")
    parser.add_argument("--precisions", type=comma, default=["fp32", "fp16", "bf16"], help="of the zoo")
    parser.add_argument("--precision", default="fp16", help="of start")
    parser.add_argument("--meshes", type=mesh_list, help='"pipeline=2;tensor=2;data=2", which is what two GPUs do without it')
    parser.add_argument("--jobs", type=int, default=6, help="commands side by side, of zoo and meshes")
    parser.add_argument("--parts", action="store_true", help="of speed: the slowest parts of each model")
    parser.add_argument("--prepare-limit", type=float, default=300, help="seconds for PyTorch's exports and compilations")
    parser.add_argument("--pause", metavar="FILE", help="of speed and tensor: nothing is timed before this file is gone")
    parser.add_argument("--only-big", action="store_true", help="of memory: only the models that one GPU can't hold")
    parser.add_argument("--big-limit", type=float, default=400, help="seconds for the model that two GPUs hold")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=(*COMMANDS, "all"))
    parser.add_argument("folder", nargs="?", help="of train-zoo: training cases, which are those of the zoo without it")
    add_common(parser)
    return parser.parse_args()


def meshes_of(gpus):
    """What a number of GPUs is cut into by the command meshes."""
    if gpus == 1:
        return ["pipeline=2,tensor=2"]
    flat = [f"pipeline={gpus}", f"tensor={gpus}"]
    if gpus == 2:
        return [*flat, "data=2"]
    return flat if gpus % 2 else [*flat, f"pipeline={gpus // 2},tensor=2", f"data=2,tensor={gpus // 2}"]


def choose_devices(arguments, fretsaw):
    """Fills in devices, the GPUs of plans' ranks, and meshes, by what the machine has."""
    gpus = fretsaw.gpus() if arguments.device == "cuda" else [{"name": "cpu", "index": 0}]
    if not gpus:
        why = fretsaw("devices").error or "is it built with -DFRETSAW_CUDA=ON?"
        sys.exit(f"{fretsaw.path}: `devices` lists no CUDA device: {why}")
    print(f"{fretsaw.path} on {', '.join(gpu['name'] for gpu in gpus)}", flush=True)
    found = [gpu["index"] for gpu in gpus] if arguments.device == "cuda" else [0, 1]
    arguments.devices = arguments.devices or found
    distinct = list(dict.fromkeys(arguments.devices))
    arguments.ranks = distinct if len(distinct) > 1 else arguments.devices  # one GPU that is named twice: two ranks share it
    arguments.meshes = arguments.meshes or meshes_of(len(distinct))


def run_command(name, arguments, fretsaw, report):
    begin = time.perf_counter()
    if name in MANY_GPUS and len(arguments.ranks) < 2:
        return report.failed(name, "all of it", "needs two GPUs, or one that --devices names twice")
    try:
        COMMANDS[name](arguments, fretsaw, report)
    except Exception as error:  # what the others find still counts
        traceback.print_exc()
        report.failed(name, "the benchmark itself", (str(error) or repr(error)).splitlines()[-1])
    report.note(f"{name} took {time.perf_counter() - begin:.0f} s")


def main():
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes it started are ended
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast over NVLink stays off, for both sides
    fretsaw = Fretsaw(arguments.fretsaw, arguments.device, arguments.limit)
    report = Report(arguments.json)
    choose_devices(arguments, fretsaw)
    names = [arguments.command] if arguments.command != "all" else [*ONE_GPU, *(MANY_GPUS if len(arguments.ranks) > 1 else ())]
    for name in names:
        run_command(name, arguments, fretsaw, report)
    print(f"{report.bad()} of {len(report.rows)} rows are short or failed")
    sys.exit(1 if report.bad() else 0)


if __name__ == "__main__":
    main()
