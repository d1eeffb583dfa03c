"""PyTorch's side of train-speed: the models with their export to ONNX, and their own best time of a training step.

Imports PyTorch, so only processes that use it import this module.
"""
import contextlib
import os
import time
import traceback

import onnx
import torch
from gpu_torch import first_line, timed_ms
from onnx import numpy_helper
from torch.nn import functional

DEVICE = "cuda"
IMAGE, CLASSES = 224, 1000
VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT = 50257, 768, 12, 12, 1024  # GPT-2 of 124M parameters


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.projections, self.joined = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.projections(self.before_attention(x)).split(WIDTH, dim=2)
        q, k, v = (part.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x)), approximate="tanh"))


class Gpt2(torch.nn.Module):
    """Token ids to logits; the last product's weights are those of the embedding."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(CONTEXT, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = torch.nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


def construct(name):
    torch.manual_seed(0)
    if name == "gpt2":
        return Gpt2()
    import torchvision

    return getattr(torchvision.models, name)(weights=None)


def make_batch(name, batch, length):
    generator = torch.Generator().manual_seed(1)
    if name == "gpt2":
        ids = torch.randint(0, VOCABULARY, (batch, length + 1), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    return torch.randn(batch, 3, IMAGE, IMAGE, generator=generator), torch.randint(0, CLASSES, (batch,), generator=generator)


def export(model, x, target, folder):
    """model.onnx, and batches/x_0.pb and target_0.pb. The model is exported as it trains: no norm goes into a convolution."""
    os.makedirs(os.path.join(folder, "batches"))
    path = os.path.join(folder, "model.onnx")
    with torch.no_grad(), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            torch.onnx.export(model, (x,), path, dynamo=False, input_names=["x"], training=torch.onnx.TrainingMode.TRAINING,
                              do_constant_folding=False, opset_version=17)
        except Exception as error:
            print(f"  PyTorch's older exporter: {first_line(error)}; the newer one is taken", flush=True)
            torch.onnx.export(model, (x,), path, dynamo=True, optimize=False, input_names=["x"], external_data=True)
    for name, value in (("x", x), ("target", target)):
        with open(os.path.join(folder, "batches", f"{name}_0.pb"), "wb") as file:
            file.write(numpy_helper.from_array(value.numpy(), name).SerializeToString())
    onnx.load(path, load_external_data=False)  # a damaged file shows here


def settings_of(text):
    kind, _, pairs = text.partition(":")
    return kind, {key: float(value) for key, value in (pair.split("=") for pair in pairs.split(","))}


def make_optimizer(text, parameters):
    kind, s = settings_of(text)
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=s["lr"], momentum=s["momentum"], weight_decay=s["weight_decay"], fused=True)
    return torch.optim.AdamW(parameters, lr=s["lr"], betas=(s["beta1"], s["beta2"]), weight_decay=s["weight_decay"], fused=True)


class Peer:
    def __init__(self, name, batch, length, optimizer, folder, compiles):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        model, (x, target) = construct(name), make_batch(name, batch, length)
        export(model.train(), x, target, folder)
        torch.manual_seed(0)
        model = construct(name).train()  # exporting has moved running statistics
        layout = {"memory_format": torch.channels_last} if name != "gpt2" else {}
        self.model = model.to(DEVICE, **layout)
        self.x, self.target = x.to(DEVICE, **layout) if layout else x.to(DEVICE), target.to(DEVICE)
        self.optimizer = make_optimizer(optimizer, self.model.parameters())
        self.run = torch.compile(self.forward) if compiles else self.forward
        self.way = "compile" if compiles else "eager"
        self.first_loss = float(self.step())
        for _ in range(3):
            self.step()
        torch.cuda.synchronize()

    def forward(self, x, target):
        with torch.autocast(DEVICE, torch.bfloat16):
            scores = self.model(x)
        return functional.cross_entropy(scores.reshape(-1, scores.shape[-1]).float(), target.reshape(-1))

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.run(self.x, self.target)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def time(self):
        """Milliseconds of a step, with the batch on the device already, and the memory it takes; that goes to who is timed next."""
        torch.cuda.empty_cache()  # of what the first steps tried
        torch.cuda.reset_peak_memory_stats()
        answer = {"ms": timed_ms(self.step, warmup=5, repeat=20), "way": self.way, "loss": self.first_loss}
        answer["reserved"], answer["allocated"] = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        del self.model, self.optimizer, self.x, self.target, self.run
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        return answer


def serve(name, batch, length, optimizer, folder, compiles, connection):
    """A process of its own: exports and compiles, then times when it is asked to."""
    start = time.perf_counter()
    try:
        peer = Peer(name, batch, length, optimizer, folder, compiles)
        connection.send(("ready", time.perf_counter() - start))
        while (question := connection.recv()) is not None:
            what, *arguments = question
            connection.send(("answer", getattr(peer, what)(*arguments)))
    except Exception as error:
        traceback.print_exc()
        connection.send(("failed", f"PyTorch: {first_line(error)}"))
