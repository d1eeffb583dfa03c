"""The README's way from a text to a model that continues it, in small: text_tokens.py, train, generate_text.py."""
import json
import math
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
COMMAND = sys.argv[1]


def run(*arguments: object) -> str:
    done = subprocess.run([str(a) for a in arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def script(name: str, *arguments: object) -> str:
    return run(sys.executable, ROOT / "scripts" / name, *arguments)


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    text = pathlib.Path("/usr/share/common-licenses/GPL-3").read_bytes()[:4000]
    (folder / "text.txt").write_bytes(text)
    script("text_tokens.py", folder / "text.txt", folder / "data", "--validation", 0.25)
    train, held = ((folder / "data" / f"{part}.bin").read_bytes() for part in ("train", "val"))
    assert (train + held)[::2] == text and not any((train + held)[1::2])
    assert len(held) == 2 * 1000

    sizes = ["--set", "layers=1", "--set", "hidden=32", "--set", "heads=2", "--set", "sequence=16"]
    run(COMMAND, "model", "small_gpt", *sizes, "-o", folder / "gpt.onnx")
    trained = folder / "trained.onnx"
    run(COMMAND, "train", folder / "gpt.onnx", "--data", folder / "data", "--sequence", 16, "--batch", 8, "--steps", 60, "--threads", 1,
        "--optimizer", "adam:lr=0.01", "--export", trained)

    scores = [float(script("generate_text.py", model, "--score", folder / "text.txt", "--context", 16, "--fretsaw", COMMAND).split()[0])
              for model in (folder / "gpt.onnx", trained)]
    assert abs(scores[0] - math.log(256)) < 0.5, scores  # small embeddings: all bytes about alike
    assert scores[1] < 4, scores
    prompt = "the GNU General "  # as long as the model's sequences
    made = script("generate_text.py", trained, prompt, "--bytes", 3, "--samples", 2, "--context", 16, "--fretsaw", COMMAND)
    assert made.count(prompt) == 2, made
    likeliest = [script("generate_text.py", trained, prompt, "--bytes", 2, "--samples", 1, "--context", 16, "--temperature", 0, "--seed", seed,
                        "--fretsaw", COMMAND) for seed in (1, 2)]
    assert likeliest[0] == likeliest[1], likeliest
    assert not list((folder / "data").glob("*.part*"))


# A trace in which many short spans of one letter take most of a cell, and files that are no traces.
def refused(*arguments: object) -> str:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "trace_picture.py"), *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 2, done
    return done.stderr


with tempfile.TemporaryDirectory() as name:
    trace = pathlib.Path(name, "trace.json")
    events = [("F", 0, 10), ("B", 10, 14), *(("W", 14 + 2 * k, 16 + 2 * k) for k in range(3)), ("B", 20, 40)]
    kinds = {"F": "forward", "B": "backward", "W": "weights"}
    trace.write_text(json.dumps({"traceEvents": [{"ph": "X", "cat": kinds[letter], "tid": 0, "ts": begin, "dur": end - begin, "name": "x"}
                                                 for letter, begin, end in events]}))
    picture = script("trace_picture.py", trace, "--cells", 4).splitlines()[0].split()
    assert picture[2][:2] == "FW", picture
    assert "--cells" in refused(trace, "--cells", 0)
    trace.write_text("[]")
    assert "traceEvents" in refused(trace)
