"""The kernel for tridiagonal forms of band matrices, run by Triton's interpreter on the CPU. Run by test_chased.py."""

import json
import time

import interpreted  # noqa: F401
import torch
from banded_cases import Together, covariance

from anisoscope.kernels import kernels_of
from anisoscope.measures import chased as measured
from anisoscope.measures.banded import dense
from anisoscope.measures.chased import chased

BAND, WIDTH = 4, 19  # some blocks and a bit
PAUSE = 0.05  # seconds, some times what a step takes


def stored(a, band):
    """Band matrices as the kernel takes them; what is outside the band is left out."""
    out = a.new_zeros(*a.shape[:2], 2 * band)
    for i in range(min(band + 1, a.shape[1])):
        out[:, : a.shape[1] - i, i] = a.diagonal(-i, 1, 2)
    return out


def banded(a, band):
    """A symmetric matrix of the same spectrum, zero outside a band: one reflector a column, so far below it."""
    a = a.clone()
    for j in range(a.shape[0] - band - 1):
        x = a[j + band :, j].clone()
        x[0] += torch.copysign(x.norm(), x[0])
        x /= x.norm()
        a[j + band :] -= 2 * torch.outer(x, x @ a[j + band :])
        a[:, j + band :] -= 2 * torch.outer(a[:, j + band :] @ x, x)
    return a


def drawn(many, width, band, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return stored(torch.randn(many, width, width, generator=draws, dtype=torch.float64) / 4, band)


def matrices():
    """By name, all of one width."""
    steep, flat = (stored(banded(covariance(WIDTH, 3, steep), BAND)[None], BAND)[0] for steep in (12.0, 0.0))
    plain, other = drawn(2, WIDTH, BAND)
    lines, tiny, blocks, diagonal = (torch.zeros_like(plain) for _ in range(4))
    diagonal[:, 0] = plain[:, 0]
    lines[:, :2] = plain[:, :2]
    tiny[:] = plain
    tiny[:, 2:] *= 1e-150  # squares vanish beside those of entries about one
    blocks[:] = plain
    blocks[3:7, 1:], blocks[:, 3:] = 0.0, 0.0
    graded = plain * torch.logspace(0, -12, WIDTH, dtype=torch.float64)[:, None]
    nothing, lost = torch.zeros_like(plain), other.clone()
    lost[7, 2] = torch.nan
    return {
        "plain": plain, "steep": steep, "covariance": flat, "graded": graded, "lost": lost, "other": other,
        "diagonal": diagonal, "zero": nothing, "tridiagonal": lines, "tiny": tiny, "blocks": blocks,
    }  # fmt: skip


def error(found, x):
    """Of the spectra, relative to the norms: the worst."""
    diagonal, off = found
    t = torch.diag_embed(diagonal) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    truth = torch.linalg.eigvalsh(dense(x))
    size = truth.abs().amax(dim=1).clamp_min(1e-300)
    return ((torch.linalg.eigvalsh(t) - truth).abs().amax(dim=1) / size).tolist()


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def main():
    torch.set_num_threads(1)
    measured._by_kernels = lambda tensor: True
    named = matrices()
    names, x = list(named), torch.stack(list(named.values()))
    given = x.clone()
    found = chased(x)
    lost = names.index("lost")
    rest = [i for i in range(len(names)) if i != lost]
    result = {
        "names": [names[i] for i in rest],
        "errors": error([one[rest] for one in found], x[rest]),
        "given": bool(torch.equal(torch.nan_to_num(x), torch.nan_to_num(given))),
        "lost": not bool(torch.isfinite(found[0][lost]).all() and torch.isfinite(found[1][lost]).all()),
        "alone": same(chased(x[lost + 1 :][:1]), [one[lost + 1 :][:1] for one in found]),
        "diagonal": same([one[names.index("diagonal")] for one in found], (x[0, :, 0], 0 * x[0, 1:, 0])),
    }
    # Widths about those of blocks, with the band that runs on a GPU too: narrower than it, than two of it, wider.
    widths = {BAND: (2, 3, 4, 5, 6, 8, 9, 10, 13), 8: (33,), 32: (20, 33, 50, 70)}
    cases = [drawn(1, width, band, width) for band, some in widths.items() for width in some]
    result["widths"] = {f"{y.shape[1]} of {y.shape[2] // 2}": error(chased(y), y)[0] for y in cases}

    kernels = kernels_of("chase")
    kernels.chase = Together(kernels.chase)
    two = torch.stack([named["plain"], named["steep"]])
    result["shared"] = {each: same(chased(two, each), [one[:2] for one in found]) for each in (2, 3)}
    # Whoever waits goes on long before the other does, and must not miss what that has yet to write.
    arrive = kernels.arrive
    kernels.arrive = lambda counter: (arrive(counter), time.sleep(PAUSE))
    result["slow"] = same(chased(two[:1], 2), [one[:1] for one in found])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
