"""PyTorch's side of train-pipeline: its own schedules on the same stack of layers, one process a GPU.

Imports PyTorch, so only processes that use it import this module.
"""
import os
import socket
import time
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from gpu_torch import first_line
from torch.distributed import pipelining
from torch.nn import functional

WARM, TIMED = 2, 6
# Its schedules with the stages that a rank has.
SCHEDULES = (
    ("gpipe", "ScheduleGPipe", 1),
    ("1f1b", "Schedule1F1B", 1),
    ("interleaved", "ScheduleInterleaved1F1B", 2),
    ("zero-bubble", "ScheduleInterleavedZeroBubble", 2),
    ("zero-bubble-v", "ScheduleZBVZeroBubble", 2),
)


class Layer(torch.nn.Module):
    def __init__(self, stack):
        super().__init__()
        self.hidden, self.heads = stack.hidden, stack.heads
        kind = {"device": "cuda", "dtype": torch.bfloat16}
        self.norm1, self.norm2 = (torch.nn.LayerNorm(self.hidden, **kind) for _ in range(2))
        self.projections, self.joined = (torch.nn.Linear(self.hidden, parts * self.hidden, **kind) for parts in (3, 1))
        self.up = torch.nn.Linear(self.hidden, 4 * self.hidden, **kind)
        self.down = torch.nn.Linear(4 * self.hidden, self.hidden, **kind)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.projections(self.norm1(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(mixed.transpose(1, 2).reshape(batch, length, self.hidden))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def stage_index(schedule, rank, ranks, chunk):
    """ZBV's second stages go back from the last rank to the first; all others begin at the first rank again."""
    back = schedule == "zero-bubble-v" and chunk == 1
    return 2 * ranks - 1 - rank if back else chunk * ranks + rank


def time_schedule(name, kind, chunks, rank, ranks, stack, micro_batches):
    """The median time of a step in ms: forward, backward and an update."""
    device, stages = torch.device("cuda", rank), ranks * chunks
    parts = [torch.nn.Sequential(*[Layer(stack) for _ in range(stack.layers // stages)]) for _ in range(chunks)]
    places = [stage_index(name, rank, ranks, chunk) for chunk in range(chunks)]
    pipes = [pipelining.PipelineStage(part, place, stages, device) for part, place in zip(parts, places)]
    make = getattr(pipelining, kind)
    schedule = make(pipes if chunks > 1 else pipes[0], micro_batches, loss_fn=functional.mse_loss)
    x, target = (torch.randn(micro_batches, stack.length, stack.hidden, device=device, dtype=torch.bfloat16) for _ in range(2))
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=1e-3, fused=True)

    def step():
        optimizer.zero_grad(set_to_none=True)
        has_last = stages - 1 in places
        schedule.step(*((x,) if 0 in places else ()), **({"target": target, "losses": []} if has_last else {}))
        optimizer.step()

    times = []
    for _ in range(WARM + TIMED):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return sorted(times[WARM:])[TIMED // 2]


def run_rank(rank, ranks, port, stack, micro_batches, answers):
    torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    times = {}
    for name, kind, chunks in SCHEDULES:
        try:
            times[name] = time_schedule(name, kind, chunks, rank, ranks, stack, micro_batches)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            times[name] = first_line(error)
        torch.cuda.empty_cache()
        if rank == 0:
            answers.put(dict(times))
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks, stack, micro_batches, limit_s, connection):
    """Sends ("times", {schedule: ms or what went wrong}) of the schedules that ended in time."""
    try:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        answers, times = multiprocessing.get_context("spawn").SimpleQueue(), {}
        deadline = time.monotonic() + limit_s
        processes = multiprocessing.spawn(run_rank, (ranks, port, stack, micro_batches, answers), ranks, join=False)
        ended = False
        while not ended and time.monotonic() < deadline:
            ended = processes.join(timeout=0.5)
            while not answers.empty():
                times = answers.get()
        connection.send(("times", times))
    except Exception as error:
        traceback.print_exc()
        connection.send(("failed", f"PyTorch: {first_line(error)}"))
