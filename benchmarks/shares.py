"""Where the time of `anisoscope demo` and `anisoscope profile` goes, as shares of the wall clock.

python benchmarks/shares.py demo [--steps 400] [--lines 30] [--write FILE]
python benchmarks/shares.py profile [--model MODEL | --layers 6 --width 256] [--lines 30] [--write FILE]

The command runs in this process, imports and report included, while a thread looks every two milliseconds at what all
other threads do. What is under way is read first, before a thread can go on, and what a piece of code is for is asked
once: a look takes some twenty microseconds. An interval goes in equal parts to the threads that do something, by the
innermost frames:

- model: inside an ``nn.Module``, autograd or an optimiser, hooks of ours left out; the loss;
- neighbours: inside the search for neighbours, its matrix products included;
- BLAS: the call under way is a matrix product or a decomposition, wherever it stands;
- the rest, by what it is and by the function of ours that asked for it.

``profile`` takes any model that the command takes; without one it trains a tokenizer and builds a small untrained Llama
beforehand, in a process of its own.

What may be attributed wrongly: the call under way is read off the bytecode, so a name such as ``solve`` counts as BLAS
whatever object it is called on. A sample waits for the interpreter's lock, so a few microseconds of Python before an
operation count as that operation. Products inside einsum, convolutions or cdist cannot be told from their copies.
Interpreter start (20 ms) is not seen.

Seconds are of the clock, which wants a quiet machine. With other work on it take ``--processor`` and one thread
(OMP_NUM_THREADS=1): processor seconds stretch less; several threads would be counted each, those that wait for work
included. Those of the thread that looks are left out.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import dis
import importlib.util
import linecache
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import ClassVar

EVERY_S = 0.002
SWITCH_S = 1e-5  # how long a waiting sample lets Python go on: short, or samples gather where the lock is given up
PACKAGE = "/anisoscope/"
MODEL, NEIGHBORS, BLAS = "model: forward, backward, optimiser", "neighbours", "BLAS and LAPACK"
IMPORTS, WAITING, TENSORS, PYTHON = "imports", "waiting", "other tensor operations", "Python of measures and looks"
ARITHMETIC = (MODEL, BLAS, NEIGHBORS)
IN_MODEL = ("/torch/nn/modules/", "/torch/autograd/", "/torch/optim/", "/torch/nn/utils/")
FUNCTIONS, OF_THE_LOSS = "/torch/nn/functional.py", ("train", "capture", "watching")  # elsewhere they are operations
IN_SEARCH = tuple(
    f"{PACKAGE}{name}.py"
    for name in (
        "measures/search", "measures/neighbors", "measures/neighbors_gpu", "measures/neighbors_fused",
        "measures/stacked_neighbors", "measures/plan", "measures/all_pairs", "measures/integers", "kernels/nearest",
    )
)  # fmt: skip
IN_LAPACK = ("/numpy/linalg/", "/scipy/linalg/")
IDLE = ("/threading.py", "/queue.py", "/selectors.py", "/concurrent/futures/")
PRODUCTS = """
    matmul mm bmm mv dot addmm addmm_ addmv addmv_ baddbmm baddbmm_ addbmm linear einsum tensordot inner multi_dot
    eigh eigvalsh eig eigvals svd svdvals qr cholesky cholesky_ex cholesky_inverse cholesky_solve lstsq solve solve_ex
    solve_triangular inv inv_ex pinv slogdet det logdet lu lu_factor ldl_factor matrix_exp
"""
GROUPS = {
    "text": "text, tokenizer, batches",
    "train": "training loop, checkpoints, data",
    "capture": "capture of rows",
    "runs": "run store",
    "views": "report and tables",
    "commands": "command line",
    "cli": "command line",
    "models": "loading and building models",
    "watching": "watcher and study",
    "sweep": "sweep and profile",
    "profiling": "sweep and profile",
}


@cache
def instructions(code: CodeType) -> dict[int, tuple[str, int | None, object]]:
    """Name, argument and place in the source of each instruction, by offset."""
    return {one.offset: (one.opname, one.arg, one.positions) for one in dis.get_instructions(code)}


def called(code: CodeType, offset: int) -> str:
    """What is under way at an instruction: the name of the function called, "@" for a product, "op" or ""."""
    name, argument, place = instructions(code).get(offset, ("", None, None))
    if name == "BINARY_OP":
        # The number of `@` and of `@=` in the table that the interpreter keeps of binary operations.
        return "@" if argument in (4, 17) else "op"
    if name in ("CALL", "PRECALL", "CALL_FUNCTION_EX") and place is not None and place.lineno is not None:
        return name_called(code.co_filename, place)
    return "op" if name in ("BINARY_SUBSCR", "STORE_SUBSCR", "UNARY_NEGATIVE", "UNARY_INVERT", "COMPARE_OP") else ""


def name_called(file: str, place: dis.Positions) -> str:
    """The last name of the callee in the source of a call."""
    lines = linecache.getlines(file)[place.lineno - 1 : place.end_lineno]
    if not lines:
        return ""
    parts = [line.encode() for line in lines]
    parts[-1] = parts[-1][: place.end_col_offset]
    parts[0] = parts[0][place.col_offset :]
    try:
        tree = ast.parse(b"(" + b"".join(parts) + b")", mode="eval").body
    except SyntaxError:
        return ""
    function = tree.func if isinstance(tree, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


@cache
def products() -> frozenset[str]:
    """Names of calls that are matrix products or decompositions."""
    return frozenset(PRODUCTS.split())


def own_name(code: CodeType) -> str:
    """A function of the package as ``tangent.energy.shares``."""
    module = code.co_filename.rpartition(PACKAGE)[2].removesuffix(".py").replace("/", ".")
    return f"{module}.{code.co_qualname.replace('.<locals>', '')}"


class Facts:
    """What a piece of code is, told by its name and file alone. Kept by identity: codes are slow to compare."""

    known: ClassVar[dict[int, Facts]] = {}

    def __init__(self, code: CodeType) -> None:
        file = code.co_filename
        self.code = code  # kept alive, or another might come to have its identity
        self.calls: dict[int, str] = {}
        self.own = own_name(code) if PACKAGE in file else ""
        self.idle = any(part in file for part in IDLE)
        self.search = any(file.endswith(part) for part in IN_SEARCH)
        self.loader, self.module = file.startswith("<frozen importlib"), code.co_name == "<module>"
        self.function = file.endswith(FUNCTIONS)
        self.lapack = any(part in file for part in IN_LAPACK)
        self.model = any(part in file for part in IN_MODEL) or (
            file.endswith("/torch/_tensor.py") and code.co_name == "backward"
        )

    @classmethod
    def of(cls, code: CodeType) -> Facts:
        """Those of a code."""
        if (found := cls.known.get(id(code))) is None:
            found = cls.known[id(code)] = cls(code)
        return found

    def called(self, offset: int) -> str:
        """What is under way at an instruction."""
        if (found := self.calls.get(offset)) is None:
            found = self.calls[offset] = called(self.code, offset)
        return found


def classify(innermost: FrameType, at: int) -> tuple[str, str, int] | None:
    """Kind, function of ours and its line for a thread at an instruction; None for one that does nothing."""
    inner = Facts.of(innermost.f_code)
    if inner.idle:
        return None
    kind, owner, line, function = "", "", 0, False
    frame: FrameType | None = innermost
    while frame is not None:
        facts = Facts.of(frame.f_code)
        if facts.own:
            if not owner:
                owner, line = facts.own, frame.f_lineno
                kind = kind or (MODEL if function and owner.partition(".")[0] in OF_THE_LOSS else "")
            if facts.search:
                kind = kind if kind in (MODEL, IMPORTS) else NEIGHBORS
        if not kind:
            kind = decisive(facts, frame, owner)
            function = function or facts.function
        frame = frame.f_back
    if kind not in ARITHMETIC and kind != IMPORTS:
        found = inner.called(at)
        blas = found == "@" or found in products() or inner.lapack
        kind = BLAS if blas else kind or rest(owner, found)
    return kind, owner or "outside the package", line


def decisive(facts: Facts, frame: FrameType, owner: str) -> str:
    """The kind that this frame alone settles, or nothing. Frames of ours inside a module's call are hooks."""
    if facts.loader or (facts.module and frame.f_globals.get("__name__") != "__main__"):
        return IMPORTS
    return MODEL if facts.model and (not owner or owner.startswith("models.")) else ""


def rest(owner: str, found: str) -> str:
    """What the rest is: by package, or tensors against Python where the package computes."""
    group = GROUPS.get(owner.partition(".")[0])
    if group:
        return group
    known = "torch" in sys.modules and hasattr(sys.modules["torch"], "finfo")
    return TENSORS if found == "op" or (known and found in tensor_names()) else PYTHON


@cache
def tensor_names() -> frozenset[str]:
    """Names of operations on tensors."""
    torch = sys.modules["torch"]
    return frozenset((*dir(torch.Tensor), *dir(torch))) - {"float", "int", "bool", "len", "sum", "min", "max", "any"}


class Watch:
    """A thread that looks at all others."""

    def __init__(self, processor: bool) -> None:
        self.seconds: Counter[tuple[str, str, int]] = Counter()
        self.samples = 0
        # Asked from the thread that looks, so that its own seconds are known.
        self._clock = (lambda: time.process_time() - time.thread_time()) if processor else time.perf_counter
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the body runs."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()
            sys.setswitchinterval(before)

    def _look(self) -> None:
        last, own = self._clock(), threading.get_ident()
        while not self._over.is_set():
            time.sleep(EVERY_S)
            # At once: a thread goes on as soon as it has the lock again, and by the time that its stack has been walked
            # what it was sampled in is over. A product would count as what comes after it, the more the deeper it is.
            frames = [(frame, frame.f_lasti) for thread, frame in sys._current_frames().items() if thread != own]
            now = self._clock()
            busy = [found for frame, at in frames if (found := classify(frame, at))]
            del frames
            for found in busy or [(WAITING, "all threads wait", 0)]:
                self.seconds[found] += (now - last) / max(len(busy), 1)
            self.samples += 1
            last = now


def compile_package() -> None:
    """Bytecode beside the sources, as an installation leaves it: without it, a third of a second and more of every
    start is compilation, where Python is told to write none."""
    place = importlib.util.find_spec("anisoscope")
    assert place is not None and place.origin is not None
    compileall.compile_dir(Path(place.origin).parent, quiet=2)


def run(arguments: argparse.Namespace, folder: Path) -> Watch:
    """The command in this process, watched."""
    if arguments.what == "demo":
        steps = [] if arguments.steps is None else ["--steps", str(arguments.steps)]
        words = ["train", "demo", "--quiet", "--out", str(folder / "run"), *steps]
    else:
        model = arguments.model
        if model is None:
            model = str(folder / "model")
            size = ["--layers", str(arguments.layers), "--width", str(arguments.width)]
            subprocess.run([sys.executable, __file__, "build", "--model", model, *size], check=True)
        words = ["profile", model, "--run", str(folder / "run")]
        words += [] if arguments.text is None else ["--text", arguments.text]
    compile_package()
    watch = Watch(arguments.processor)
    with watch.watching():
        from anisoscope.cli import app

        app(words, standalone_mode=False)
    return watch


def build(folder: Path, layers: int, width: int) -> None:
    """A small untrained Llama with a tokenizer of the embedded text, as a folder that the profile command loads."""
    from anisoscope.models.build import ModelSpec, build_model
    from anisoscope.text.corpus import load_corpus
    from anisoscope.text.tokens import train_bpe

    tokenizer = train_bpe(load_corpus(None, max_chars=1_000_000), 2000)
    sizes = {"layers": layers, "width": width, "heads": width // 64, "vocab_size": tokenizer.vocab_size}
    spec = ModelSpec(architecture="llama", context=256, **sizes)
    build_model(spec, 0).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(), encoding="utf-8")


def table(arguments: argparse.Namespace, watch: Watch) -> str:
    """The shares as Markdown: kinds first, then the functions that the rest comes from."""
    import torch

    total, kinds, owners = sum(watch.seconds.values()), Counter(), Counter()
    for (kind, owner, line), seconds in watch.seconds.items():
        kinds[kind] += seconds
        if kind not in ARITHMETIC:
            owners[kind, f"{owner}:{line}" if arguments.by_line else owner] += seconds
    inside = sum(kinds[kind] for kind in ARITHMETIC)
    order = [*ARITHMETIC, *(kind for kind, _ in kinds.most_common() if kind not in ARITHMETIC)]
    lines = [
        f"`shares.py {arguments.what}`: {total:.1f} s of the {'processor' if arguments.processor else 'clock'}, "
        f"{watch.samples:,} samples, {torch.get_num_threads()} threads",
        "",
        "| kind | seconds | share |",
        "|---|---|---|",
        *(f"| {kind} | {kinds[kind]:.2f} | {100 * kinds[kind] / total:.1f} % |" for kind in order),
        f"| **the rest together** | {total - inside:.2f} | **{100 * (1 - inside / total):.1f} %** |",
        "",
        "| of the rest: kind | function | seconds | share |",
        "|---|---|---|---|",
        *(
            f"| {kind} | {owner} | {seconds:.2f} | {100 * seconds / total:.1f} % |"
            for (kind, owner), seconds in owners.most_common(arguments.lines)
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run one of the commands and print its shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("demo", "profile", "build"))
    parser.add_argument("--model", help="what the profile command takes; `build` writes its model there")
    parser.add_argument("--layers", type=int, default=6, help="of the model that is built where none is given")
    parser.add_argument("--width", type=int, default=256, help="the same, a multiple of 64")
    parser.add_argument("--text", help="text for the profile command")
    parser.add_argument("--steps", type=int, help="updates of the demo, in place of the recipe's")
    parser.add_argument("--lines", type=int, default=30, help="functions to name")
    parser.add_argument("--by-line", action="store_true", help="name lines, not functions")
    parser.add_argument("--processor", action="store_true", help="processor seconds, for a machine with other work")
    parser.add_argument("--write", type=Path, help="a file for the tables")
    arguments = parser.parse_args()
    if arguments.what == "build":
        build(Path(arguments.model), arguments.layers, arguments.width)
        return
    with tempfile.TemporaryDirectory() as place:
        found = table(arguments, run(arguments, Path(place)))
    print(found)
    if arguments.write is not None:
        arguments.write.write_text(found, encoding="utf-8")


if __name__ == "__main__":
    main()
