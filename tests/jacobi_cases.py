"""The kernel of small eigenproblems by Triton's interpreter on the CPU. Run by test_small_eigh.py.

A process of its own: Triton decides when it is imported whether its kernels are compiled or interpreted.
"""

import json

import interpreted  # noqa: F401
import numpy as np
import torch

from anisoscope.measures import small_eigh

COVARIANCE_SWEEPS = 10  # enough for values that are not negative, as small_eigh says


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turned(values, seed=0):
    """A symmetric matrix with these eigenvalues, along no axis."""
    values = torch.as_tensor(values, dtype=torch.float64)
    q = torch.linalg.qr(draw(len(values), len(values), seed=seed)).Q
    return symmetric((q * values) @ q.T)[None]


def symmetric(matrices):
    return (matrices + matrices.mT) / 2


def errors(matrices):
    """Largest errors, relative to the norm; the matrices are brought to a norm of about one before products."""
    values, vectors = small_eigh.small_eigh(matrices)
    assert values.shape == matrices.shape[:2] and vectors.shape == matrices.shape
    size = matrices.abs().amax(dim=(1, 2), keepdim=True)
    size = torch.where(size > 0, size, 1.0)
    one, scaled = matrices / size, values / size[:, :, 0]
    norm = torch.linalg.matrix_norm(one, 2).clamp_min(1e-300)
    left = torch.linalg.vector_norm(one @ vectors - vectors * scaled[:, None], dim=1)
    eye = torch.eye(matrices.shape[1], dtype=torch.float64)
    return {
        "values": float(((scaled - torch.linalg.eigvalsh(one)).abs().amax(dim=1) / norm).max()),
        "orthonormal": float((vectors.mT @ vectors - eye).abs().max()),
        "residual": float((left.amax(dim=1) / norm).max()),
        "ascending": bool((values.diff(dim=1) >= 0).all()),
    }


def covariances():
    """Eigenvalues that are not negative, within the sweeps that those take."""
    small_eigh.SWEEPS = COVARIANCE_SWEEPS
    settled = torch.diag(1 / (1 + torch.arange(29.0).double())) + 1e-6 * symmetric(draw(29, 29, seed=3))
    close = torch.cat([1 + 1e-9 * torch.arange(4), 2 + 1e-9 * torch.arange(4)])
    return {
        "over fifteen decades": errors(turned(torch.logspace(0, -15, 16))),
        "nearly settled": errors(settled[None]),
        "repeated": errors(turned([1.0] * 7 + [2.0] * 7, seed=1)),
        "few directions": errors(turned([0.0] * 4 + [1.0, 2, 3], seed=2)),
        "close": errors(turned(close, seed=4)),
        "one far": errors(turned([1.0] * 7 + [1e9], seed=5)),
    }


def others():
    """Both signs, all scales, sizes that are no power of two, and several at once."""
    small_eigh.SWEEPS = 30
    small_eigh.LEAST = 4  # the interpreter is slow
    both = symmetric(draw(1, 7, 7, seed=7))
    graded = torch.logspace(0, -12, 8).double() * torch.tensor([1.0, -1] * 4)
    signs = torch.diag(torch.tensor([3.0, -1, 0, 7, 2]).double())[None]
    return {
        "both signs": errors(both),
        "graded of both signs": errors(turned(graded, seed=8)),
        "small": errors(turned(torch.linspace(-1, 1, 7), seed=9) * 1e-150),
        "large": errors(turned(torch.linspace(-1, 1, 7), seed=9) * 1e150),
        "smallest": errors(turned(torch.linspace(-1, 1, 3), seed=9) * 1e-290),
        "zero": errors(torch.zeros(1, 9, 9).double()),
        "diagonal": errors(signs),
        "reversed": errors(torch.diag(torch.arange(10.0, 0, -1).double())[None]),
        "ones": errors(torch.ones(1, 8, 8).double()),
        "one by one": errors(torch.tensor([[[-3.0]], [[0.0]], [[2e-9]]]).double()),
        "two by two": errors(torch.tensor([[[1.0, 2], [2, 1]], [[1, 1e-20], [1e-20, 1]], [[0, -5], [-5, 0]]]).double()),
        "strided": errors(symmetric(draw(2, 6, 6, seed=10)).repeat_interleave(2, dim=2)[:, :, ::2]),
    }


def not_finite():
    """They end, and those beside them are as ever."""
    given = symmetric(draw(5, 3, 3, seed=11))
    with np.errstate(all="ignore"):
        alone = small_eigh.small_eigh(given[4:])
        given[0, 1, 1], given[1, 0, 2], given[2] = float("nan"), float("inf"), float("nan")
        given[3] = torch.eye(3)  # with a diagonal as values have it already
        given[3, 0, 1] = float("nan")
        values, vectors = small_eigh.small_eigh(given)
    same = torch.equal(values[4:], alone[0]) and torch.equal(vectors[4:], alone[1])
    return same and bool(values[:4].isnan().all())


def of_the_symmetric_part():
    """How far values of a matrix with rounding on one side lie from those of its symmetric part, of that rounding."""
    given = symmetric(draw(1, 5, 5, seed=12))
    slanted = given + 1e-9 * draw(1, 5, 5, seed=13).tril(-1)
    values = small_eigh.small_eigh(slanted)[0]
    return float((values - torch.linalg.eigvalsh(symmetric(slanted))).abs().max() / 1e-9)


if __name__ == "__main__":
    small_eigh.kernels_run = lambda device: True
    print(
        json.dumps(
            {
                "covariances": covariances(),
                "others": others(),
                "not finite": not_finite(),
                "symmetric part": of_the_symmetric_part(),
            }
        )
    )
