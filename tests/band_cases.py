"""Band matrices whose spectra are known, for tests of forms and leading vectors, and what is true of them."""

import torch

from anisoscope.measures.tridiagonal import floor, poles


def banded(values, half, seed=0):
    """A matrix of these eigenvalues and half-bandwidth, as a reduction leaves it, and its eigenvectors."""
    width = len(values)
    draws = torch.Generator().manual_seed(seed)
    vectors = torch.linalg.qr(torch.randn(width, width, generator=draws, dtype=torch.float64))[0]
    found, turn = reduced((vectors * values) @ vectors.T, half)
    return found, turn.T @ vectors


def reduced(a, half):
    """The band form of a matrix and the orthogonal matrix that turns it back."""
    a, width = a.clone(), len(a)
    turn = torch.eye(width, dtype=a.dtype)
    for j in range(0, width - half, half):
        q = torch.linalg.qr(a[j + half :, j : j + half], mode="complete")[0]
        a[j + half :] = q.T @ a[j + half :]
        a[:, j + half :] = a[:, j + half :] @ q
        turn[:, j + half :] = turn[:, j + half :] @ q
    return bare(a, half), turn


def bare(a, half):
    """The symmetric band of a matrix alone."""
    place = torch.arange(a.shape[-1])
    return torch.where((place[:, None] - place).abs() <= half, (a + a.mT) / 2, 0.0)


def kept(a, half):
    """Bands of matrices, by columns."""
    band = a.new_zeros(a.shape[0], a.shape[1], 2 * half)
    for i in range(min(a.shape[1], half + 1)):
        band[:, : a.shape[1] - i, i] = a.diagonal(-i, 1, 2)
    return band


def rational(values, count, a=1.0, b=-0.1):
    """Some of the poles of ``(a + b log l) / sqrt(l)`` over a spectrum, and the function that these make of it."""
    one = torch.ones(1, dtype=torch.float64)
    shifts, weights = poles(values.sort().values[None], a * one, b * one)
    used = int((weights != 0).sum())
    chosen = torch.linspace(0, used - 1, min(count, used)).long()
    shifts, weights = shifts[:, chosen], weights[:, chosen]
    return shifts, weights, (weights / (values[:, None] + shifts)).sum(dim=1)


def projected(width, half, count=36):
    """What forms are asked for of rows that sum to zero but for their rounding, as after a LayerNorm, and the truth,
    where the eigenvalue of that direction, zero but for rounding, does not count."""
    scale = torch.logspace(0, -2.5, width, dtype=torch.float64)
    rows = torch.randn(3 * width, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * scale
    rows = (rows - rows.mean(dim=1, keepdim=True)).float()
    a = rows.double().T @ rows.double() / len(rows)
    lam, vectors = torch.linalg.eigh(a)
    assert int((lam <= floor(lam[None])).sum()) == 1
    band, turn = reduced(a, half)
    shifts, weights, f = rational(lam, count)
    rows = rows[:9]
    truth = ((rows.double() @ vectors)[:, 1:].square() * f[1:]).sum(dim=1)
    least = torch.finfo(torch.float64).eps * lam[-1:]
    return kept(band[None], half), (turn.float().T @ rows.T)[None].contiguous(), shifts, weights, least, truth[None]


def leading_matrices(width, half):
    """As many ways in which a largest eigenvalue can lie, or nearly lie, with others; all of one width but the last."""
    falling = torch.logspace(0, -6, width, dtype=torch.float64)
    near, same = falling.clone(), falling.clone()
    near[1], same[:3] = 1 - 1e-9, 1
    ray = torch.zeros(width, dtype=torch.float64)
    ray[width // 3 : width // 3 + half] = torch.linspace(-1, 2, half, dtype=torch.float64)
    toeplitz = torch.eye(width, dtype=torch.float64) * 2
    toeplitz.diagonal(1).fill_(1)
    toeplitz.diagonal(-1).fill_(1)
    steep = banded(falling, half)[0]
    return {
        "steep": steep, "near": banded(near, half)[0], "same": banded(same, half)[0],
        "signs": banded(torch.linspace(-3, 1, width, dtype=torch.float64), half)[0], "toeplitz": toeplitz,
        "diagonal": torch.diag(falling.flip(0)), "zero": torch.zeros(width, width, dtype=torch.float64),
        "identity": torch.eye(width, dtype=torch.float64), "rank one": torch.outer(ray, ray),
        "small": steep * 1e-200, "large": steep * 1e200,
        "two": torch.tensor([[1.0, 0.3], [0.3, 1.0]], dtype=torch.float64),
    }  # fmt: skip


def leading_errors(a, top, found):
    """Residuals relative to the norm, and errors of length: the larger of both for each matrix."""
    size = torch.linalg.matrix_norm(a, ord=torch.inf).clamp_min(1e-300)
    unit = a / size[:, None, None]
    residual = ((unit @ found[:, :, None])[:, :, 0] - (top / size)[:, None] * found).norm(dim=1)
    return torch.maximum(residual, (found.norm(dim=1) - 1).abs()).tolist()
