"""The peer of tensor parallelism: Llama layers cut by hand as Megatron does, in PyTorch with NCCL, one process a GPU, under a CUDA graph.

Imports PyTorch, so only processes that use it import this module.
"""
import json
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_common import wait_while_there
from gpu_torch import delay, first_line, graphed, timed_ms

HIDDEN, INTERMEDIATE, HEADS, SIZE, VOCABULARY = 4096, 11008, 32, 128, 32000
ENDING_S = 10


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


def prepare(work):
    """{(length, way): (what replays its graph, what keeps the graph's tensors)}."""
    layers, ready = weights_of(work.layers, len(work.gpus)), {}
    for length in work.lengths:
        for way in ("graph", "compile + graph") if work.compiles else ("graph",):
            forward = make_forward(layers, len(work.gpus), length, way != "graph")
            ready[length, way] = graphed(forward), forward
    torch.cuda.synchronize()
    return ready


def time_all(ready):
    """{length: {way: ms of the slowest rank}}."""
    times, flag = {}, torch.zeros(1)

    def meet():  # on the devices: neither waiting for the other ranks nor launching is part of a time
        delay()
        dist.all_reduce(flag)

    for (length, way), (replay, _) in ready.items():
        mine = torch.tensor([timed_ms(replay, meet)])
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        times.setdefault(length, {})[way] = mine.item()
    return times


def write_whole(path, value):
    """Under another name first: whoever finds the file finds all of it."""
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(path + ".part", path)


def told_path(work):
    """The file that is there when all ranks are prepared."""
    return work.path + ".prepared"


def measure_rank(rank, work):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(work.port))
    device = torch.device("cuda", work.gpus[rank])
    torch.cuda.set_device(device)
    torch.set_default_device("cuda")
    dist.init_process_group("nccl", rank=rank, world_size=len(work.gpus), device_id=device)
    with torch.no_grad():
        ready = prepare(work)
        dist.barrier()
        if rank == 0:
            write_whole(told_path(work), True)
        wait_while_there(work.pause)  # each by itself: NCCL's waiting would keep the GPUs busy
        dist.barrier()
        times = time_all(ready)
    if rank == 0:
        write_whole(work.path, times)
    ready.clear()  # the graphs, before the communicator whose kernels they hold
    dist.barrier()


def rank_process(rank, work):
    """One rank's process, which ends at once: destroy_process_group, and Python's own end, can wait for ever for captured NCCL kernels."""
    code = 0
    try:
        measure_rank(rank, work)
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def follow(ranks, work, connection):
    """Says when the ranks are prepared. Returns when they ended, or did not although the times were written a while ago."""
    start, limit, told, over = time.monotonic(), math.inf, False, False
    while not over and time.monotonic() < limit:
        over = ranks.join(0.2)
        if not told and os.path.exists(told_path(work)):
            told = True
            connection.send(("ready", time.monotonic() - start))
        if limit == math.inf and os.path.exists(work.path):
            limit = time.monotonic() + ENDING_S
        if not multiprocessing.parent_process().is_alive():
            os.killpg(0, signal.SIGKILL)  # nobody else would end the ranks


def measure(work, connection):
    """All ranks: says when they are prepared, then what the times are."""
    try:
        follow(torch.multiprocessing.spawn(rank_process, (work,), len(work.gpus), join=False), work, connection)
        with open(work.path, encoding="utf-8") as file:
            connection.send(("answer", {int(length): ways for length, ways in json.load(file).items()}))
    except Exception as error:
        connection.send(("failed", f"PyTorch: {first_line(error)}"))
