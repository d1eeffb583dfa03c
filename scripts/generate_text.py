#!/usr/bin/env python3
"""Continues a text with a model of bytes (input_ids [batch, sequence] -> logits [batch, sequence, 256]) by `fretsaw run`.

    scripts/generate_text.py trained.onnx "In the beginning" --bytes 300
    scripts/generate_text.py trained.onnx --score text.txt            # nats a byte, of the file's beginning

Each run of the command gives one more byte to each of --samples texts. Needs numpy and onnx (scripts/setup puts them in .venv).
"""
import argparse
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent


def logits_of(command: str, model: str, tokens: np.ndarray) -> np.ndarray:
    """[batch, sequence] -> [batch, sequence, vocabulary]"""
    import onnx.numpy_helper

    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/input_ids.npy", tokens.astype(np.int64))
        arguments = [command, "run", model, "--input", f"input_ids={folder}/input_ids.npy", "--output", f"{folder}/out", "--threads", "1"]
        done = subprocess.run(arguments, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stderr.strip() or f"{command} ended with {done.returncode}")
        tensor = onnx.TensorProto()
        tensor.ParseFromString(pathlib.Path(folder, "out", "output_0.pb").read_bytes())
        return onnx.numpy_helper.to_array(tensor)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64) - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def score(command: str, model: str, text: bytes, context: int) -> float:
    """The mean of -log p(next byte) over windows of `context` bytes."""
    tokens = np.frombuffer(text, np.uint8)
    windows = min(64, (len(tokens) - 1) // context)
    if windows < 1:
        sys.exit(f"the text has {len(tokens)} bytes, too few for a window of {context} and one more")
    x = tokens[: windows * context].reshape(windows, context)
    y = tokens[1 : windows * context + 1].reshape(windows, context)
    p = log_softmax(logits_of(command, model, x))
    return float(-np.take_along_axis(p, y[..., None].astype(np.int64), -1).mean())


def generate(command: str, model: str, prompt: bytes, a) -> list[bytes]:
    random = np.random.default_rng(a.seed)
    texts = [bytearray(prompt) for _ in range(a.samples)]
    for _ in range(a.bytes):
        tokens = np.array([list(t[-a.context :]) for t in texts])
        logits = logits_of(command, model, tokens)[:, -1]
        if a.temperature == 0:
            chosen = logits.argmax(-1)
        else:
            p = np.exp(log_softmax(logits / a.temperature))
            chosen = [random.choice(len(row), p=row / row.sum()) for row in p]
        for text, token in zip(texts, chosen):
            text.append(int(token))
    return [bytes(t) for t in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompt", nargs="?", default="\n")
    parser.add_argument("--bytes", type=int, default=200, help="how many to add")
    parser.add_argument("--samples", type=int, default=1, help="how many texts")
    parser.add_argument("--context", type=int, default=128, help="the longest sequence that the model takes")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest byte")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--score", metavar="FILE", help="say how well the model foretells this text instead")
    parser.add_argument("--fretsaw", default=str(ROOT / "build" / "fretsaw"), help="the command")
    arguments = parser.parse_args()
    if not 0 <= arguments.temperature < float("inf"):
        parser.error("--temperature is a number from 0 on")
    if arguments.score:
        loss = score(arguments.fretsaw, arguments.model, pathlib.Path(arguments.score).read_bytes(), arguments.context)
        print(f"{loss:.4f} nats a byte")
        return
    if not arguments.prompt:
        parser.error("the prompt is empty: give it at least one byte")
    for text in generate(arguments.fretsaw, arguments.model, arguments.prompt.encode(), arguments):
        print(text.decode(errors="replace"))


if __name__ == "__main__":
    main()
