#!/usr/bin/env python3
"""Draws the graphs that ran in a trace (fretsaw train --trace FILE, fretsaw run --trace FILE) as text, a line a rank.

Each cell is a piece of time; the letter says what ran in it: F forward, B backward, W gradients of weights, G sums over ranks, U the update,
. nothing for half of it or more. Where several ran in one cell it is the one that took most of it. Beside each rank stands the share of the time that it worked.
"""
import argparse
import collections
import json
import re

KINDS = {"forward": "F", "backward": "B", "weights": "W", "reduce": "G", "update": "U"}


def spans(path):
    """(rank, letter and micro-batch, begin, end) of every graph that ran, in microseconds."""
    with open(path, encoding="utf-8") as file:
        trace = json.load(file)
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError("it has no list traceEvents")
    found = []
    for event in trace["traceEvents"]:
        letter = KINDS.get(event.get("cat"))
        if event.get("ph") == "X" and letter:
            micro_batch = re.fullmatch(r"\d+[A-Z](\d+)", event["name"])
            found.append((event["tid"], letter, int(micro_batch[1]) if micro_batch else 0, event["ts"], event["ts"] + event["dur"]))
    return found


def line(own, begin, end, cells):
    """The cells of one rank, each with the letter of what took most of it, and with the micro-batch's last digit behind it where there is room."""
    step = (end - begin) / cells
    text = []
    for k in range(cells):
        left, right = begin + k * step, begin + (k + 1) * step
        shares = collections.Counter()
        for _, letter, _, b, e in own:
            shares[letter] += max(0.0, min(right, e) - max(left, b))
        letter, most = max(shares.items(), key=lambda share: share[1])
        text.append(letter if sum(shares.values()) > step / 2 and most > 0 else ".")
    for _, letter, micro_batch, b, e in own:
        first, last = int((b - begin) / step + 0.5), int((e - begin) / step + 0.5)
        if letter in "FBW" and last - first > 1 and text[first : first + 2] == [letter, letter]:
            text[first + 1] = str(micro_batch % 10)
    return "".join(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--cells", type=int, default=120, help="pieces that the time is divided into")
    arguments = parser.parse_args()
    if arguments.cells < 1:
        parser.error("--cells is below 1")
    try:
        all_spans = spans(arguments.trace)
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{arguments.trace}: {error}; was it written by --trace?")
    if not all_spans:
        parser.error(f"{arguments.trace}: no graph ran in it; was it written by --trace?")
    begin, end = min(s[3] for s in all_spans), max(s[4] for s in all_spans)
    for rank in sorted({s[0] for s in all_spans}):
        own = [s for s in all_spans if s[0] == rank]
        busy = sum(e - b for *_, b, e in own) / (end - begin)
        print(f"rank {rank}  {line(own, begin, end, arguments.cells)}  {busy:.0%}")
    print(f"{(end - begin) / 1e3:.1f} ms, {(end - begin) / arguments.cells / 1e3:.2f} ms a cell")


if __name__ == "__main__":
    main()
