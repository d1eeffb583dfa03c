"""PyTorch's side of the GPU benchmarks: the models with random weights, their export to ONNX, and their own best time.

Imports PyTorch, so only processes that use it import this module.
"""
import contextlib
import os
import time
import traceback

import numpy as np
import torch
from gpu_common import median, read_values

SERVING = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}
DEVICE = "cuda"
IMAGES = ("resnet50", "vgg16", "efficientnet_b0", "vit_l_16")


class Whole(torch.nn.Module):
    """A transformers model that takes ids alone and gives the named outputs alone."""

    def __init__(self, model, outputs):
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(self, x):
        given = self.model(input_ids=x)
        return tuple(getattr(given, name) for name in self.outputs)


def construct(name, layers=None):
    if name in IMAGES:
        import torchvision

        return getattr(torchvision.models, name)(weights=None)
    import transformers as hf

    if name == "bert_large":
        sizes = {"hidden_size": 1024, "num_hidden_layers": layers or 24, "num_attention_heads": 16, "intermediate_size": 4096}
        return Whole(hf.BertModel(hf.BertConfig(**sizes)), ("last_hidden_state", "pooler_output"))
    if name == "gpt2":
        return Whole(hf.GPT2LMHeadModel(hf.GPT2Config(use_cache=False, n_layer=layers or 12)), ("logits",))
    assert name == "llama7b", name
    return Whole(hf.LlamaModel(hf.LlamaConfig(num_hidden_layers=layers or 8, use_cache=False)), ("last_hidden_state",))


def build(name, device, layers=None):
    """The model in float32 on the device, with weights of unit gain: what is wrong in any layer shows in the outputs."""
    torch.manual_seed(0)
    with torch.device(device):
        model = construct(name, layers).eval()
        with torch.no_grad():
            for part in model.modules():
                if isinstance(part, (torch.nn.Linear, torch.nn.Conv2d)):
                    part.weight.normal_(0, part.weight[0].numel() ** -0.5)
            norms = [part for part in model.modules() if isinstance(part, torch.nn.BatchNorm2d)]
            if norms:
                measure_statistics(model, norms)
    return model


def measure_statistics(model, norms):
    """BatchNorm's statistics from one batch, so that activations keep their scale through the layers."""
    for part in model.modules():
        part.training = part in norms
    for norm in norms:
        norm.momentum = None
    model(torch.randn(8, 3, 224, 224))
    model.eval()


def to_type(model, name, dtype):
    """All of an image network, the parameters alone of a transformer, whose tables of rotary frequencies stay in float32."""
    if name in IMAGES:
        return model.to(dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def make_inputs(case, device):
    generator = torch.Generator(device).manual_seed(1)
    if case.model in IMAGES:
        return torch.randn(case.batch, 3, 224, 224, device=device, generator=generator)
    return torch.randint(0, 30000, (case.batch, case.length), device=device, generator=generator)


def tensors(outputs):
    return [outputs] if torch.is_tensor(outputs) else list(outputs)


def export(model, x, folder):
    """Writes model.onnx with its weights beside it, and inputs/x.npy."""
    os.makedirs(os.path.join(folder, "inputs"), exist_ok=True)
    np.save(os.path.join(folder, "inputs", "x.npy"), x.cpu().numpy())
    with torch.no_grad(), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        program = torch.onnx.export(model, (x.cpu(),), dynamo=True, verbose=False, input_names=["x"])
        program.save(os.path.join(folder, "model.onnx"), external_data=True)


def delay():
    """Keeps the device busy while the host queues what comes next, so that launching is not part of a time."""
    torch.cuda._sleep(1_000_000)


def timed_ms(f, first=None, warmup=10, repeat=30):
    """Median of the device's time between an event before and one after; `first` goes before both."""
    for _ in range(warmup):
        f()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeat):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if first:
            first()
        before.record()
        f()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after))
    return median(times)


def graphed(f):
    """f captured into a CUDA graph: what replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            f()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return graph.replay


def first_line(error):
    return (str(error).strip() or repr(error)).splitlines()[0][:160]


def best_times(eager, compiled):
    """Milliseconds of each way to run, None for one that fails."""
    ways = {"eager": lambda: timed_ms(eager), "graph": lambda: timed_ms(graphed(eager), delay)}
    if compiled is not None:
        ways["compile + graph"] = lambda: timed_ms(graphed(compiled), delay)
    times = {}
    for name, way in ways.items():
        try:
            times[name] = way()
        except Exception as error:  # a peer that can't be captured is no reason to lose the others
            times[name] = None
            print(f"  PyTorch, {name}: {first_line(error)}", flush=True)
        torch.cuda.synchronize()
    return times


class Peer:
    """One model with its cases: exported, and ready to be timed."""

    def __init__(self, cases, folder, compiles):
        self.cases, self.folder = cases, folder
        precision = cases[0].precision
        self.dtype = SERVING[precision]
        torch.backends.cudnn.allow_tf32 = False  # of the references; halves don't care
        name = cases[0].model
        model = build(name, DEVICE)
        native = precision == "bf16"  # exported in the type that it is served in
        if native:
            model = to_type(to_type(model, name, self.dtype), name, torch.float32)
        self.inputs = [make_inputs(case, DEVICE) for case in cases]
        with torch.no_grad():
            self.wanted = [[out.float().cpu() for out in tensors(model(x))] for x in self.inputs]
        model = to_type(model, name, self.dtype if native else torch.float32).to("cpu")
        for case, x in zip(cases, self.inputs):
            export(model, x, self.path(case))
        self.make_ready(model, compiles)

    def path(self, case):
        return os.path.join(self.folder, case.name.replace(" ", "_"))

    def make_ready(self, model, compiles):
        """Moves the model to the GPU as it is served there, and compiles it."""
        images = self.cases[0].model in IMAGES
        layout = {"memory_format": torch.channels_last} if images else {}
        self.model = to_type(model.to(DEVICE, **layout), self.cases[0].model, self.dtype)
        if images:
            self.inputs = [x.to(self.dtype).to(**layout) for x in self.inputs]
        self.compiled = torch.compile(self.model, dynamic=False) if compiles else None
        if compiles:
            with torch.no_grad():
                for x in self.inputs:
                    self.compiled(x)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def time(self, number):
        """Milliseconds of each way to run the case, and how far PyTorch itself is from float32."""
        torch.backends.cudnn.benchmark = True  # only now: nothing else runs that would disturb its choices
        x = self.inputs[number]
        with torch.no_grad():
            own = max(self.differences(number, [out.float().cpu() for out in tensors(self.model(x))]))
            times = best_times(lambda: self.model(x), (lambda: self.compiled(x)) if self.compiled is not None else None)
        torch.cuda.empty_cache()
        return times, own

    def differences(self, number, got):
        """Of each output, over the range of float32's."""
        pairs = zip(got, self.wanted[number], strict=True)
        shares = [(g - w).abs().max() / w.abs().max() if g.shape == w.shape else torch.inf for g, w in pairs]
        return [float(share) if share == share else torch.inf for share in shares]

    def compare(self, number, folder):
        got = [torch.from_numpy(np.array(value, dtype=np.float32)) for value in read_values(folder, "output")]
        return max(self.differences(number, got))


def serve(cases, folder, compiles, connection):
    """A process of its own for each model: prepares beside the others, then times its cases when it is asked to, alone."""
    start = time.perf_counter()
    try:
        peer = Peer(cases, folder, compiles)
        connection.send(("ready", time.perf_counter() - start))
        while (question := connection.recv()) is not None:
            what, *arguments = question
            connection.send(("answer", getattr(peer, what)(*arguments)))
    except Exception as error:
        traceback.print_exc()
        connection.send(("failed", f"PyTorch: {first_line(error)}"))
