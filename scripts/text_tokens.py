#!/usr/bin/env python3
"""Turns a text into token files that `fretsaw train` reads: a byte is a token, a token is a uint16.

    scripts/text_tokens.py book.txt data                 # data/train.bin, and the last 2% of the text as data/val.bin
"""
import argparse
import array
import pathlib
import sys


def write_tokens(data: bytes, path: pathlib.Path) -> None:
    tokens = array.array("H", list(data))
    if sys.byteorder == "big":
        tokens.byteswap()
    path.write_bytes(tokens.tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=pathlib.Path, help="a text, in any encoding of bytes")
    parser.add_argument("folder", type=pathlib.Path, help="where train.bin and val.bin go")
    parser.add_argument("--validation", type=float, default=0.02, help="the share of the text that val.bin gets, from its end")
    arguments = parser.parse_args()
    if not 0 < arguments.validation < 1:
        parser.error("--validation is a share of the text, between 0 and 1")
    data = arguments.text.read_bytes()
    cut = len(data) - int(len(data) * arguments.validation)
    if cut < 2 or len(data) - cut < 2:
        parser.error(f"{arguments.text} holds {len(data)} bytes, too few to divide")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write_tokens(data[:cut], arguments.folder / "train.bin")
    write_tokens(data[cut:], arguments.folder / "val.bin")
    print(f"{arguments.folder}: {cut} tokens to train on, {len(data) - cut} to validate with")


if __name__ == "__main__":
    main()
