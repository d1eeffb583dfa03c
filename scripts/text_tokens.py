#!/usr/bin/env python3
"""Turns a text into token files that `fretsaw train` reads: a byte is a token, a token is a uint16.

    scripts/text_tokens.py book.txt data                 # data/train.bin, and the last 2% of the text as data/val.bin
"""
import argparse
import os
import pathlib


PIECE = 1 << 24  # bytes of the text at once


def write_tokens(text: pathlib.Path, begin: int, end: int, path: pathlib.Path) -> None:
    """The text's bytes from `begin` to `end` as tokens: under a temporary name, until all are there."""
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        with text.open("rb") as source, part.open("wb") as target:
            source.seek(begin)
            while begin < end:
                data = source.read(min(PIECE, end - begin))
                if not data:
                    raise OSError(f"{text} has become shorter")
                tokens = bytearray(2 * len(data))  # low byte first
                tokens[::2] = data
                target.write(tokens)
                begin += len(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=pathlib.Path, help="a text, in any encoding of bytes")
    parser.add_argument("folder", type=pathlib.Path, help="where train.bin and val.bin go")
    parser.add_argument("--validation", type=float, default=0.02, help="the share of the text that val.bin gets, from its end")
    arguments = parser.parse_args()
    if not 0 < arguments.validation < 1:
        parser.error("--validation is a share of the text, between 0 and 1")
    size = arguments.text.stat().st_size
    cut = size - int(size * arguments.validation)
    if cut < 2 or size - cut < 2:
        parser.error(f"{arguments.text} holds {size} bytes, too few to divide")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write_tokens(arguments.text, 0, cut, arguments.folder / "train.bin")
    write_tokens(arguments.text, cut, size, arguments.folder / "val.bin")
    print(f"{arguments.folder}: {cut} tokens to train on, {size - cut} to validate with")


if __name__ == "__main__":
    main()
