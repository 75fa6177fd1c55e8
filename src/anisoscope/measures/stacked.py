"""The monitor's default measures of several sites at once, for a GPU: hardly a question to the device on the way.

Values, error bars and words are those of the measures themselves (a test holds this); only the ordinary case is taken.
What is not ordinary (sizes out of range, rows that are all alike, spectra too steep for a product, ties) is left to
the plain measures, site by site. Letters: S sites, N rows, D the width, R eigenvalues.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anisoscope.estimate import Estimate
from anisoscope.kernels import kernels_of, kernels_run, on_its_device
from anisoscope.measures import row_kernels, stacked_masked
from anisoscope.measures.bars import FLOAT32_SIZE, FLOAT32_SPREAD, second_order, unless_biased
from anisoscope.measures.cells import Cells, SiteSums
from anisoscope.measures.later import Going, Handover, beside, fetched_later, no_room, rejoined, side_stream
from anisoscope.measures.spectrum import GRAM_LIMIT
from anisoscope.measures.stacked_spectra import Spectra, begin_spectra
from anisoscope.measures.stacked_sums import WIDE_CELLS, Sums, cut_runs
from anisoscope.measures.uncertainty import Bar, fields
from anisoscope.rows import largest_sizes
from anisoscope.stats.gram_matrices import PARTED_WIDTH
from anisoscope.stats.precision import has_tensor_cores, on_tensor_cores

STACKED = ("spectral_ratio", "mean_cosine", "isoscore", "effective_rank", "two_nn")
"""What is measured here; the others are measured site by site."""

SAFE = (1e-15, 1e15)  # lengths of rows whose squares stay in float32
ORDINARY = (1e-6, 1e6)
EPS = torch.finfo(torch.float64).eps
LOST = 1e-6  # of the sum of singular values: what those that are read as zero may come to

T = TypeVar("T")

Found = list[dict[str, Estimate] | None]


def begin(
    rows: Sequence[Float[Tensor, "n d"]] | Float[Tensor, "s n d"],
    names: Sequence[str],
    second: Handover | None = None,
) -> Going[Found]:
    """Begin to measure float32 rows of several sites, all of one shape, beside whatever comes next.

    Results are a list with the estimates of each site by name, or None where a site is not ordinary. Where somebody
    else forms the ``second`` moments of these rows, about zero, before it goes on, they are taken from there; sites of
    which there are none by then are not ordinary.
    """
    return begin_summed(rows, names, second=second)[0]


def begin_summed(
    rows: Sequence[Float[Tensor, "n d"]] | Float[Tensor, "s n d"],
    names: Sequence[str],
    cells: Cells | None = None,
    *,
    second: Handover | None = None,
) -> tuple[Going[Found], SiteSums | None]:
    """The same, and sums over the rows that others may have a use for: None where these measures need none.

    Sums of each of ``cells`` are the steps on the way to those of all rows.
    """
    n, width = rows[0].shape
    if n <= max(width, 512) or width < 2 or rows[0].dtype != torch.float32:
        return Going(lambda: lambda: [None] * len(rows)), None
    stack = rows if isinstance(rows, Tensor) else torch.stack(list(rows))
    sites = len(stack)
    decomposed = any(name in names for name in ("spectral_ratio", "effective_rank"))
    sums: Callable[[], Sums | None] | None = None
    given, later = None, None
    if second is not None and "isoscore" in names and not decomposed:
        made_of = Sums.begun(stack, directions="mean_cosine" in names)
        sums = lambda: None if (found := second.taken(sites)) is None else made_of(found)  # noqa: E731
    elif decomposed or "isoscore" in names or "mean_cosine" in names:
        directions, exact = "mean_cosine" in names, "effective_rank" in names
        formed, by_cell = Sums.of(stack, directions=directions, exact=exact, cells=cells)
        sums, given = lambda: formed, SiteSums(formed.size, by_cell)
        later = _begin_spectra(formed.covariance) if decomposed else None
    table = {} if sums is not None else {"size": largest_sizes(stack)}
    neighbours = _attempted(lambda: stacked_masked.begin(stack)) if "two_nn" in names else None
    # From here: the rest need not wait for what others begin meanwhile. What is large would keep memory of its own.
    stream = side_stream("measures", stack) if stack.numel() <= WIDE_CELLS else None
    device = stack.device  # and not the stack, which the rest would hold

    def rest() -> Callable[[], Found]:
        # First, since it may have to search again, and a GPU goes on meanwhile with what others have begun.
        dimensions = None if neighbours is None else _attempted(neighbours)
        try:
            with beside(stream):
                made = None if sums is None else sums()
                if sums is not None and made is None:
                    return lambda: [None] * sites
                if made is not None:
                    table.update(made.table())
                    if "isoscore" in names:
                        table["isoscore means"] = _isoscore_means(made)
                    if later is not None:
                        table.update(_of_spectrum(made, later()))
                found = fetched_later(table)
        finally:
            rejoined(stream, device, ())  # what it has read is used again only after that
        return lambda: _told(found(), names, n, width, dimensions or [None] * sites)

    return Going(rest), given


def _begin_spectra(covariance: Float[Tensor, "s d d"]) -> Callable[[], Spectra]:
    # What is not finite would end the decomposition of all sites: such sites get the identity, and are left out.
    good = torch.linalg.vector_norm(covariance, dim=(1, 2)) < torch.inf
    eye = torch.eye(covariance.shape[1], dtype=torch.float64, device=covariance.device)
    return begin_spectra(torch.where(good[:, None, None], covariance, eye))


def _attempted(search: Callable[[], T]) -> T | None:
    """What a search gives, or nothing where it failed: the plain measure, site by site, needs less room."""
    try:
        return search()
    except Exception as error:
        if not no_room(error):
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            warnings.warn(f"sites are searched for neighbours one by one ({why})", RuntimeWarning, stacklevel=2)
        return None


def _isoscore_means(sums: Sums) -> Float[Tensor, "s g"]:
    trace, size = sums.total[:, None], sums.square[:, None]
    if kernels_run(sums.rows.device) and _for_bars(sums.rows):
        # In one form: where one direction holds nearly all, what follows is a difference of two that are alike.
        form = row_kernels.forms_in_half(sums.rows, sums.covariance, sums.square / sums.total, sums.size)
        return sums.means(-2 * (trace / size) ** 2 * form)
    if kernels_run(sums.rows.device):
        turned = sums.rows @ sums.covariance.float()
        form = row_kernels.row_dots(turned, sums.rows)  # ``sum`` would copy all of it to float64 first
    else:
        with on_tensor_cores(_for_bars(sums.rows)):
            turned = sums.rows @ sums.covariance.float()
        form = turned.mul_(sums.rows).sum(dim=2, dtype=torch.float64)
    return sums.means(2 * trace * (sums.radius2 - trace) / size - 2 * trace**2 * (form - size) / size**2)


def _for_bars(rows: Float[Tensor, "s m d"]) -> bool:
    """Whether products for error bars alone have the digits of TF32, as half precision has: three of a bar, for a sixth
    of the time."""
    return rows.shape[2] >= PARTED_WIDTH and has_tensor_cores(rows.device)


def _of_spectrum(sums: Sums, spectra: Spectra) -> dict[str, Tensor]:
    """Eigenvalues, and what error bars of the first and of the effective rank, and the bias of the latter, follow from:
    ``whole`` is the sum of sigma, ``weighted`` that of sigma log sigma, and biases of both are beside them."""
    values = spectra.values.flip(1).clamp_min_(0)
    values *= values > values[:, :1] * GRAM_LIMIT
    held = values.sum(dim=1)
    scaled = values / held[:, None]
    sigma = scaled.sqrt()
    whole, weighted = sigma.sum(dim=1), torch.special.xlogy(sigma, sigma).sum(dim=1)
    inner = weighted / whole
    rank = (whole.log() - inner).exp_()
    # By an eigenvalue l the rank grows by (a + b log l) / sqrt(l).
    b = rank / (-4 * whole * held.sqrt())
    a = b * torch.add(held.log(), inner, alpha=2).neg_()
    with on_tensor_cores(_for_bars(sums.rows)):
        along, on_axes = spectra.along_first(sums.rows), spectra.forms(sums.rows, a, b)
    roots, logs = _biases(scaled, sums.n - 1)
    return {
        "values": values, "along means": sums.means(along), "radius means": sums.means(sums.radius2),
        "rank": rank, "rank means": sums.means(on_axes), "whole": whole, "weighted": weighted, "roots": roots,
        "logs": logs,
    }  # fmt: skip


def _biases(values: Float[Tensor, "s r"], dof: int) -> tuple[Float[Tensor, "s"], Float[Tensor, "s"]]:
    """``spectrum.trace_bias`` of ``sum sigma`` and of ``sum sigma log sigma``; zeros count for nothing."""
    if kernels_run(values.device):
        found = bias_sums(values) / (2 * dof)
        return found[:, 0], found[:, 1]
    return _plain_biases(values, dof)


@on_its_device
def bias_sums(values: Float[Tensor, "s r"]) -> Float[Tensor, "s two"]:
    """Twice the degrees of freedom times both, by the kernel."""
    kernels, (sites, count) = kernels_of("pairs"), values.shape
    blocks = -(-count // kernels.PLACES)
    out = values.new_empty(sites, 2, blocks)
    kernels.bias_sums[(blocks, sites)](values.contiguous(), out, count, B=kernels.PLACES, num_warps=4)
    return out.sum(dim=2)


def _plain_biases(values: Float[Tensor, "s r"], dof: int) -> tuple[Float[Tensor, "s"], Float[Tensor, "s"]]:
    eye = torch.eye(values.shape[1], dtype=torch.float64, device=values.device)
    weight = values[:, :, None] * values[:, None, :] * (1 + eye)
    values = torch.where(values > 0, values, 1.0)
    a, b = values[:, :, None], values[:, None, :]
    gap, middle = a - b, (a + b) / 2
    close = gap.abs() < 1e-5 * (a + b)
    apart = torch.where(close, 1.0, gap)
    found = []
    for slope, bend in (
        (0.5 / values.sqrt(), -0.25 / middle**1.5),
        ((values.log() + 2) / (4 * values.sqrt()), -middle.log() / (8 * middle**1.5)),
    ):
        divided = torch.where(close, bend, (slope[:, :, None] - slope[:, None, :]) / apart)
        found.append((divided * weight).sum(dim=(1, 2)) / (2 * dof))
    return found[0], found[1]


def _told(
    found: dict[str, np.ndarray], names: Sequence[str], n: int, width: int, dimensions: Sequence[Estimate | None]
) -> list[dict[str, Estimate] | None]:
    """The estimates of each site, or None where it is not ordinary."""
    good = _ordinary(found, n, width)
    sites = np.flatnonzero(good).tolist()
    here = found if good.all() else {name: value[sites] for name, value in found.items()}
    makers = {
        "spectral_ratio": _spectral_ratios, "mean_cosine": _mean_cosines, "isoscore": _isoscores,
        "effective_rank": _effective_ranks,
    }  # fmt: skip
    columns = [
        [dimensions[site] for site in sites] if name == "two_nn" else list(makers[name](here, n, width))
        for name in names
    ]
    out: list[dict[str, Estimate] | None] = [None] * len(good)
    for place, site in enumerate(sites):
        each = {name: one for name, column in zip(names, columns, strict=True) if (one := column[place]) is not None}
        out[site] = each if len(each) == len(columns) else None
    return out


def _ordinary(found: dict[str, np.ndarray], n: int, width: int) -> Bool[np.ndarray, "s"]:
    size = found["size"]
    flags = [np.isfinite(value.reshape(len(size), -1)).all(axis=1) for value in found.values()]
    flags += [size > ORDINARY[0], size < ORDINARY[1]]
    if "total" in found:
        spread, rounding = found["total"] * (n - 1), 4 * EPS * found["mean"]
        flags += [spread > n * width * rounding**2, spread / n > 1 / FLOAT32_SIZE, spread / n < FLOAT32_SIZE]
    if "values" in found:
        values = found["values"]
        least = np.where(values > 0, values, np.inf).min(axis=1)
        flags.append(least > FLOAT32_SPREAD * values.sum(axis=1))
        # Zeros stand for what a square cannot tell from zero. One there is wherever a LayerNorm made the rows.
        unseen = (values == 0).sum(axis=1) * np.sqrt(values[:, 0] * GRAM_LIMIT)
        flags.append(unseen <= LOST * np.sqrt(values).sum(axis=1))
    if "length" in found:
        least, most = found["length"].T
        flags += [least > SAFE[0], most < SAFE[1]]
    return np.asarray(np.logical_and.reduce(flags))


def _bars(means: Float[np.ndarray, "s g"], n: int) -> list[Bar]:
    """As ``ErrorRows.bar``, from the means over blocks."""
    count, length, over = cut_runs(n)
    stderr = np.sqrt(means.var(axis=1, ddof=1) / count * (count * length / n))
    return [Bar(one, count - 1, over) for one in stderr.tolist()]


def _spectral_ratios(here: dict[str, np.ndarray], n: int, width: int) -> Iterator[Estimate]:
    total, values = here["total"], here["values"]
    bias = np.minimum(_first_biases(values, total, n - 1) / total, 1.0).tolist()
    ratio, method = values[:, 0] / total, "lambda_1 / sum lambda"
    means = (here["along means"] - ratio[:, None] * here["radius means"]) / total[:, None]  # but for what is in all
    for value, found, off in zip(ratio.tolist(), _bars(means, n), bias, strict=True):
        bar, notes = unless_biased(found, off, "the leading eigenvalue is not separated from the rest")
        yield Estimate(value=value, n=n, method=method, notes=notes, **fields(bar))


def _first_biases(values: Float[np.ndarray, "s r"], total: Float[np.ndarray, "s"], dof: int) -> Float[np.ndarray, "s"]:
    """``Top.first_bias`` of each site."""
    first, others = values[:, :1], values[:, 1:]
    gaps, rest = np.maximum(first - others, 1e-300), np.maximum(total - values.sum(axis=1), 0)
    with np.errstate(over="ignore"):  # equal eigenvalues: a bias without bound
        return first[:, 0] / dof * ((others / gaps).sum(axis=1) + rest / gaps[:, -1])


def _effective_ranks(here: dict[str, np.ndarray], n: int, width: int) -> Iterator[Estimate]:
    method = "exp entropy of sigma / sum sigma"
    rank, whole, weighted, roots, logs = (here[name] for name in ("rank", "whole", "weighted", "roots", "logs"))
    bias = rank * ((1 / whole + weighted / whole**2) * roots - logs / whole)
    for value, found, off in zip(rank.tolist(), _bars(here["rank means"], n), bias.tolist(), strict=True):
        bar, notes = unless_biased(found, off, "the spectrum of a sample is spread out")
        yield Estimate(value=value, n=n, method=method, notes=notes, **fields(bar))


def _isoscores(here: dict[str, np.ndarray], n: int, width: int) -> Iterator[Estimate | None]:
    unit = here["total"]
    frobenius, radial = here["square"] / unit**2, here["fourth"] / unit**2 / (n - 1)
    scale = (n - 1) / (n * (n - 2) * (n - 3))
    squares = scale * (2 * frobenius + (n * n - 3 * n + 1) - n * radial)
    frobenius = scale * ((n - 1) * (n - 2) * frobenius + 1 - n * radial)
    method = "(PR - 1) / (D - 1), corrected"
    for square, one, found in zip(squares.tolist(), frobenius.tolist(), _bars(here["isoscore means"], n), strict=True):
        if not (one > 1e-12 and square > 0):
            yield None
            continue
        bar = second_order(found, square / one, n, 1.0)
        assert bar is not None
        value = (square / one - 1) / (width - 1)
        yield Estimate(value=value, n=n, method=method, **bar.scaled(1 / (width - 1)).fields())


def _mean_cosines(here: dict[str, np.ndarray], n: int, width: int) -> Iterator[Estimate]:
    value = (here["cosine"] - n) / (n * (n - 1))
    bars = _bars(2 * ((here["along"] - 1) / (n - 1) - value[:, None]), n)
    for one, bar, degenerate in zip(value.tolist(), bars, (2 * here["pairs"] / n**2).tolist(), strict=True):
        stderr = math.sqrt(max(bar.stderr**2 - degenerate, degenerate / 2))
        method = "closed form over all pairs"
        yield Estimate(value=one, stderr=stderr, n=n, method=method, over=bar.over, dof=bar.dof)
