"""The models of the zoo on GPUs: whole against PyTorch's results in each precision, and cut by meshes against one GPU."""
import glob
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor

from gpu_common import host_nodes, read_values, worst_difference

FOLDERS = ("tiny", "ts", "dyn")
TOLERANCES = {"fp32": 1e-4, "tf32": 2e-2, "fp16": 2e-2, "bf16": 2e-2}  # of the output's range


def zoo_models(zoo, only=()):
    """(name, folder) of each model with reference results whose name holds one of `only`."""
    for kind in FOLDERS:
        for folder in sorted(glob.glob(os.path.join(zoo, kind, "*"))):
            name = f"{kind}/{os.path.basename(folder)}"
            if os.path.exists(os.path.join(folder, "model.onnx")) and (not only or any(part in name for part in only)):
                yield name, folder


def data_of(folder):
    return os.path.join(folder, "test_data_set_0")


def run_to_values(fretsaw, model, folder, options):
    """(what the command said, its outputs) of a model or plan on the data of a zoo model's folder."""
    with tempfile.TemporaryDirectory() as out:
        done = fretsaw("run", model, "--inputs", data_of(folder), "--output", out, *options)
        return done, read_values(out, "output") if done.code == 0 else []


def judge(report, item, case, done, got, want, tolerance, exact_integers):
    """One row: the difference, with what ran on the host; integers must agree unless rounding may choose another."""
    if done.code:
        return report.failed(item, case, done.error)
    try:
        difference, integers = worst_difference(got, want)
    except ValueError as error:
        return report.failed(item, case, str(error))
    fallen = host_nodes(done.json)
    remarks = [f"host: {'; '.join(fallen)}"] if fallen else []
    if integers:
        remarks.append(f"{100 * integers:.2g}% of integers differ")
    if integers and exact_integers:
        return report.failed(item, case, ", ".join(remarks))
    report.row(item, case, difference, tolerance, remark=", ".join(remarks), host_nodes=fallen, integers=integers, seconds=done.seconds)


def zoo(arguments, fretsaw, report):
    """Each model whole on one GPU in each precision."""
    models = list(zoo_models(arguments.zoo, arguments.models))
    cases = [(precision, *model) for precision in arguments.precisions for model in models]

    def run(case):
        precision, _, folder = case
        return run_to_values(fretsaw, os.path.join(folder, "model.onnx"), folder, fretsaw.on(arguments.devices[:1], precision))

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for (precision, name, folder), (done, got) in zip(cases, pool.map(run, cases)):
            want = read_values(data_of(folder), "output")
            judge(report, "zoo", f"{name} {precision}", done, got, want, TOLERANCES[precision], precision == "fp32")
    rows = [row for row in report.rows if row["item"] == "zoo"]
    fallen = sorted({row["case"] for row in rows if row.get("host_nodes")})
    report.note(f"with nodes on the host: {', '.join(fallen) or 'none'}")
    report.summary("zoo")


def mesh_size(mesh):
    size = 1
    for axis in mesh.split(","):
        size *= int(axis.split("=")[1])
    return size


def ranks_on(devices, ranks):
    """Each rank's GPU, the devices used over again where there are fewer."""
    return [devices[r % len(devices)] for r in range(ranks)]


def too_small(folder, mesh):
    """Whether a data axis is wider than the batch."""
    parts = dict(axis.split("=") for axis in mesh.split(",")).get("data", 1)
    batches = [value.shape[0] for value in read_values(data_of(folder), "input") if value.ndim > 1]
    return int(parts) > min(batches, default=1)


def run_meshes(fretsaw, name, folder, meshes, devices):
    """(mesh, what the command said, outputs, refused) of each mesh after those of one GPU."""
    model = os.path.join(folder, "model.onnx")
    results = [("one GPU", *run_to_values(fretsaw, model, folder, fretsaw.on(devices[:1], "fp32")), False)]
    for mesh in meshes:
        with tempfile.TemporaryDirectory() as temporary:
            plan = os.path.join(temporary, "plan")
            done, got = fretsaw("partition", model, "-o", plan, "--mesh", mesh), []
            if done.code == 0:
                done, got = run_to_values(fretsaw, plan, folder, fretsaw.on(ranks_on(devices, mesh_size(mesh)), "fp32"))
        results.append((mesh, done, got, done.code == 3 and too_small(folder, mesh)))
    return name, results


def meshes(arguments, fretsaw, report):
    """Each model under each mesh, against one GPU."""
    models = list(zoo_models(arguments.zoo, arguments.models))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        answers = pool.map(lambda m: run_meshes(fretsaw, *m, arguments.meshes, arguments.devices), models)
        for name, ((_, whole, want, _), *cut) in answers:
            if whole.code:
                report.failed("meshes", name, "one GPU: " + whole.error)
                continue
            for mesh, done, got, refused in cut:
                if refused:
                    report.refused("meshes", f"{name} {mesh}", done.error)
                else:
                    judge(report, "meshes", f"{name} {mesh}", done, got, want, TOLERANCES["fp32"], True)
    report.summary("meshes")
