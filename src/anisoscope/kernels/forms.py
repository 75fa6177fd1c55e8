"""Kernels of forms ``x^T A x`` of many rows in half precision, for error bars of wide rows.

This module needs Triton; ``measures.row_kernels`` imports it where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS, COLUMNS, DEPTH = 128, 256, 64
"""Rows, columns of their products with a matrix, and rows of that, at a time."""
CELLS = 2048
"""Entries that one program rounds."""


@triton.jit(do_not_specialize=["each"])
def rounded(rows, factors, out, each, D, W, B: tl.constexpr):
    """Entries of ``each`` rows of a site times its factor, in half precision, filled up to ``W`` columns with zeros."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    site, there = tl.program_id(1).to(tl.int64), at < each.to(tl.int64) * W
    row, k = site * each + at // W, at % W
    value = tl.load(rows + row * D + k, mask=there & (k < D), other=0.0) * tl.load(factors + site)
    tl.store(out + row * W + k, value.to(tl.float16), mask=there)


@triton.jit
def row_forms(rows, matrix, out, m, D, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr):
    """``x^T U x`` of each float16 row, with U upper triangular: what lies below is not read, but within ``C`` columns.

    ``D`` is a multiple of ``C``. Sums are float32, on tensor cores.
    """
    site = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * R + tl.arange(0, R)
    k, c = tl.arange(0, K), tl.arange(0, C)
    rows += (site * m + tl.minimum(at, m - 1))[:, None] * D  # those beyond the last are read again, and not written
    matrix += site * D * D
    form = tl.zeros((R,), dtype=tl.float32)
    for j in range(0, D, C):
        turned = tl.zeros((R, C), dtype=tl.float32)
        for i in range(0, j + C, K):
            there = tl.load(matrix + (i + k)[:, None] * D + (j + c)[None, :])
            turned = tl.dot(tl.load(rows + (i + k)[None, :]), there, turned)
        form += tl.sum(turned * tl.load(rows + (j + c)[None, :]).to(tl.float32), axis=1)
    tl.store(out + site * m + at, form, mask=at < m)
