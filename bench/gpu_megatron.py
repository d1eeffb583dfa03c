"""The peer of tensor parallelism: Llama layers cut by hand as Megatron does, in PyTorch with NCCL, one process a GPU, under a CUDA graph.

Imports PyTorch, so only processes that use it import this module.
"""
import json
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_torch import delay, first_line, graphed, timed_ms

HIDDEN, INTERMEDIATE, HEADS, SIZE, VOCABULARY = 4096, 11008, 32, 128, 32000


def weights_of(layers, ranks):
    """A rank's part of each layer: columns of what opens a block, rows of what closes it."""

    def weight(rows, columns):
        return torch.randn(rows, columns, dtype=torch.bfloat16) * rows**-0.5

    def norm():
        return torch.ones(HIDDEN, dtype=torch.bfloat16)

    return [
        {
            "norm1": norm(),
            "qkv": weight(HIDDEN, 3 * HIDDEN // ranks),
            "out": weight(HIDDEN // ranks, HIDDEN),
            "norm2": norm(),
            "gate_up": weight(HIDDEN, 2 * INTERMEDIATE // ranks),
            "down": weight(INTERMEDIATE // ranks, HIDDEN),
        }
        for _ in range(layers)
    ]


def rotate(x, cos, sin):  # [B, heads, S, D]
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def attention(x, w, cos, sin, ranks):
    """A rank's share of the attention block before the sum over ranks, [B, S, H]."""
    batch, length, _ = x.shape
    parts = (F.rms_norm(x, (HIDDEN,), w["norm1"], 1e-6) @ w["qkv"]).chunk(3, -1)
    q, k, v = (part.view(batch, length, HEADS // ranks, SIZE).transpose(1, 2) for part in parts)
    mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=length > 1)
    return mixed.transpose(1, 2).reshape(batch, length, -1) @ w["out"]


def feed_forward(x, w):
    gate, up = (F.rms_norm(x, (HIDDEN,), w["norm2"], 1e-6) @ w["gate_up"]).chunk(2, -1)
    return (F.silu(gate) * up) @ w["down"]


def make_forward(layers, ranks, length, compiles):
    """What runs embedding, layers and the last norm on ids [1, length]: the same work as LlamaModel's."""
    table = torch.randn(VOCABULARY, HIDDEN, dtype=torch.bfloat16)
    last = torch.ones(HIDDEN, dtype=torch.bfloat16)
    ids = torch.randint(0, VOCABULARY, (1, length))
    angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE))
    cos, sin = (f(torch.cat((angles, angles), -1)).bfloat16() for f in (torch.cos, torch.sin))
    # The parts between collectives are compiled by themselves, so that NCCL's calls stay as they are.
    first, second = (torch.compile(f, dynamic=False) if compiles else f for f in (attention, feed_forward))

    def forward():
        x = F.embedding(ids, table)
        for w in layers:
            part = first(x, w, cos, sin, ranks)
            dist.all_reduce(part)
            x = x + part
            part = second(x, w)
            dist.all_reduce(part)
            x = x + part
        return F.rms_norm(x, (HIDDEN,), last, 1e-6)

    return forward


def measure_rank(rank, ranks, count, lengths, compiles, port, path):
    """One rank's process; the first writes {length: {way: ms of the slowest rank}}."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    torch.set_default_device("cuda")
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    layers, times, flag = weights_of(count, ranks), {}, torch.zeros(1)

    def meet():  # on the devices: neither waiting for the other rank nor launching is part of a time
        delay()
        dist.all_reduce(flag)

    with torch.no_grad():
        for length in lengths:
            times[length] = {}
            for way in ("graph", "compile + graph") if compiles else ("graph",):
                forward = make_forward(layers, ranks, length, way != "graph")
                replay = graphed(forward)
                mine = torch.tensor([timed_ms(replay, meet)])
                dist.all_reduce(mine, dist.ReduceOp.MAX)
                times[length][way] = mine.item()
    if rank == 0:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(times, file)
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks, count, lengths, compiles, port, path, connection):
    """All ranks; answers with the times."""
    try:
        torch.multiprocessing.spawn(measure_rank, (ranks, count, lengths, compiles, port, path), ranks)
        with open(path, encoding="utf-8") as file:
            connection.send(("ready", {int(length): ways for length, ways in json.load(file).items()}))
    except Exception as error:
        connection.send(("failed", f"PyTorch: {first_line(error)}"))
