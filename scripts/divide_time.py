"""Prints how a run's time divided between what each rank did, from a trace that `fretsaw run --trace` wrote: divide_time.py TRACE

The actions of the schedule (forward, send, recv) first, then which operators took the time of all ranks together."""
import collections
import json
import sys


ACTIONS = ("forward", "send", "recv")


def union_us(intervals):
    """Time covered by intervals that may overlap or nest, in microseconds."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total


def main(path):
    with open(path, encoding="utf-8") as file:
        events = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X"]
    if not events:
        print("the trace holds no events")
        return
    begin = min(e["ts"] for e in events)
    whole_us = max(e["ts"] + e["dur"] for e in events) - begin
    categories = [c for c in ACTIONS if any(e["cat"] == c for e in events)]
    by_rank = collections.defaultdict(lambda: collections.defaultdict(list))
    for e in events:
        by_rank[e["tid"]][e["cat"]].append((e["ts"], e["ts"] + e["dur"]))
    print(f"one step of {whole_us / 1e3:.1f} ms")
    print("rank  " + "  ".join(f"{c:>12}" for c in categories) + f"  {'idle':>12}")
    for rank in sorted(by_rank):
        shares = [union_us(by_rank[rank][c]) / whole_us for c in categories]
        busy = union_us([i for c in categories for i in by_rank[rank][c]]) / whole_us
        print(f"{rank:>4}  " + "  ".join(f"{100 * s:>11.1f}%" for s in shares) + f"  {100 * (1 - busy):>11.1f}%")
    operators = collections.Counter()
    for e in events:
        if e["cat"] not in ACTIONS:
            operators[e["cat"]] += e["dur"]
    total_us = sum(operators.values()) or 1.0
    print("operators (a fused kernel under its last one): " + ", ".join(f"{op} {100 * us / total_us:.1f}%" for op, us in operators.most_common(6)))


if __name__ == "__main__":
    main(sys.argv[1])
