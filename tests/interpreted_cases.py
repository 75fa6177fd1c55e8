"""The short cuts of interpreted.py beside the interpreter as it comes. Run by test_kernels.py."""

import json

import interpreted
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter


@triton.jit
def _least_and_most(x):
    return tl.min(x, axis=1), tl.max(x, axis=1) + tl.sum(x, axis=1)


@triton.jit
def some_of_each(given, integers, halves, out, P: tl.constexpr, Q: tl.constexpr):
    """Blocks beside blocks of the same and of other shapes, scalars, pointers, types, functions; what overflows."""
    i, j = tl.arange(0, P), tl.arange(0, Q)
    x = tl.load(given + i[:, None] * Q + j[None, :])
    least, most = _least_and_most(x)
    far = tl.load(integers + i) * 3 + (i - 5)
    tl.store(integers + i, tl.where(far % 2 == 0, far, -far))
    narrow = (x.to(tl.float32) / (1 + j)).to(tl.float16)  # one axis beside two
    tl.store(halves + i[:, None] * Q + j[None, :], narrow * 2)
    tl.store(out + i, least * most.to(tl.float32) + tl.program_id(0))
    tl.store(out + P + i, tl.sum(tl.dot(narrow, tl.trans(narrow)), axis=0))


@triton.jit
def no_shape_of_both(out, P: tl.constexpr):
    tl.store(out + tl.arange(0, P), tl.arange(0, 2 * P) + tl.arange(0, P))


def once():
    given = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).double()
    halves = torch.zeros(8, 16, dtype=torch.float16)
    integers, out = torch.arange(8, dtype=torch.int32) * 250_000_000, torch.zeros(16, dtype=torch.float64)
    for _ in range(2):  # the second finds the language as the first did
        some_of_each[(2,)](given, integers, halves, out, P=8, Q=16)
    try:
        no_shape_of_both[(1,)](out, P=8)
    except interpreter.InterpreterError as error:
        return integers, halves, out, str(error)


def short_cuts():
    """Numbers, refusals, and what is left of the language when kernels have ended."""
    loaded = tl.load
    short = once()
    interpreted.take(short=False)
    plain = once()
    same = [torch.equal(a, b) for a, b in zip(short[:3], plain[:3], strict=True)]
    return {"same": same, "refused": short[3] == plain[3] and "incompatible" in plain[3], "left": loaded is tl.load}


if __name__ == "__main__":
    print(json.dumps(short_cuts()))
