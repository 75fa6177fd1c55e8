"""Kernels that visit each row once, run by Triton's interpreter on the CPU. Run by test_kernels.py."""

import json
import sys

import interpreted  # noqa: F401
import torch
from kernel_cases import brute_force, draw

from anisoscope.measures import (
    leading,
    neighbors_fused,
    neighbors_gpu,
    row_kernels,
    stacked,
    stacked_masked,
    stacked_neighbors,
    stacked_sums,
)
from anisoscope.measures.cells import Cells
from anisoscope.measures.found import Found
from anisoscope.measures.spectrum import trace_bias
from anisoscope.tangent import stacked_fits
from anisoscope.tangent import visits as visits_of
from anisoscope.tangent.descent import solved, swept


def copies():
    """Copies in one site and none in the other, -0.0 among them, against the plain way; and a made-up clash."""
    rows = draw(2, 75, 150)
    rows[0, 40:60] = rows[0, 10:30]
    rows[0, 10, 3], rows[0, 40, 3] = 0.0, -0.0
    weights = stacked_neighbors.copy_weights(150, "cpu")
    found, clash = row_kernels.copies(rows, weights)
    plain, plain_clash = stacked_neighbors._copies(rows)
    _, forced = row_kernels.copies(rows, torch.zeros_like(weights))
    return {
        "same": torch.equal(found, plain) and torch.equal(clash, plain_clash),
        "number": found.sum(dim=1).tolist(), "clash": clash.tolist(), "forced": forced.tolist(),
    }  # fmt: skip


def halves():
    """Against float64, for rows of a width and number that fill no program."""
    row_kernels.SUMMED = 64  # three sums, of rows of 192
    rows, order = draw(2, 37, 150) * 5 + 3, torch.randperm(37, generator=torch.Generator().manual_seed(1))
    mean, factor = rows.double().mean(dim=1), torch.tensor([4.0, 8.0], dtype=torch.float64)
    rows[:, 5] = mean.float() + 1e-8 * rows[:, 6]  # next to the mean: too small for whole precision
    found = row_kernels.in_half(rows, order, mean, factor, 64, 192)
    wide = (rows.double() - mean[:, None])[:, order] * factor[:, None, None]
    near = wide.float().half()
    length, lost = near.double().norm(dim=2), (wide - near).norm(dim=2)
    allowed = found.floor + found.worst[:, None] * length
    return {
        "half": torch.equal(found.half[:, :37, :150], near),
        "rest": float(found.half[:, 37:].abs().max() + found.half[:, :, 150:].abs().max()),
        "far": min(float(one[:, 37:].min()) for one in (found.size, found.fine)),
        "size": [float((one[:, :37] / length.square()).max()) for one in (found.size, found.fine)],
        "lengths": float((found.lengths[:, order] / length - 1)[length > 0].abs().max()),
        "lost": [float((allowed - lost).min()), float((lost / allowed).max()), float(found.worst.max())],
    }  # fmt: skip


def within():
    """Runs of rows with copies, with a mean far away, and of a number that fills no program; each site has its own."""
    row_kernels.BLOCK_COLUMNS = 32  # three groups, of which none is full
    rows = torch.stack([draw(230, 40), draw(230, 40, seed=1) + 300])
    rows[0, 20] = rows[0, 5]
    order = torch.stack([torch.arange(230), torch.randperm(230, generator=torch.Generator().manual_seed(2))])
    strides, lengths = torch.tensor([75, 73], dtype=torch.int32), torch.tensor([70, 66], dtype=torch.int32)
    found = row_kernels.nearest_within(rows, row_kernels.Ready.of(rows, 1.0), order, 3, strides, lengths, 72)
    worst, beyond = 0.0, True
    for site in range(2):
        for block in range(3):
            first, length = int(block * strides[site]), int(lengths[site])
            truth = brute_force(rows[site][order[site, first : first + length]], 2)
            here = found[site, block, :length]
            error = (here - truth).abs() / truth.clamp_min(1e-300)
            worst = max(worst, float(error[truth > 0].max()), float(here[truth == 0].sum()))
            beyond = beyond and bool(torch.isinf(found[site, block, length:]).all())
    tied = 100 + torch.randint(0, 3, (1, 70, 8), generator=torch.Generator().manual_seed(3)).float()
    seventy = torch.tensor([70], dtype=torch.int32)
    ready = row_kernels.Ready.of(tied, 1.0)
    near = row_kernels.nearest_within(tied, ready, torch.arange(70)[None], 1, seventy, seventy, 70)[0, 0]
    return {
        "worst": worst, "beyond": beyond, "tied": float((near - brute_force(tied[0], 2)).abs().max()),
        "hidden": hidden_by_rounding(),
    }  # fmt: skip


def hidden_by_rounding():
    """Two heaps far from their mean: products in float32 put neighbours inside a heap into a false order."""
    rows = (draw(1, 70, 40, seed=4) * 0.5 + 1000) * torch.where(torch.arange(70) % 2 == 0, 1.0, -1.0)[None, :, None]
    seventy = torch.tensor([70], dtype=torch.int32)
    ready = row_kernels.Ready.of(rows, 1.0)
    near = row_kernels.nearest_within(rows, ready, torch.arange(70)[None], 1, seventy, seventy, 70)[0, 0]
    return float((near / brute_force(rows[0], 2) - 1).abs().max())


def masked():
    """All of TwoNN at once, copies marked, against the way that takes them out."""
    neighbors_fused.LEAST_ROWS = stacked_masked.LEAST_ROWS = 100
    stacked_masked.SUBSAMPLES = stacked_neighbors.SUBSAMPLES = 4
    stacked_neighbors.MIN_ROWS = 16
    stacked_masked.can_fuse = lambda rows, k: True
    neighbors_fused.MEASURED_TILE = (64, 64)
    rows = torch.stack([draw(250, 12), draw(250, 12, seed=1), draw(250, 12, seed=2)])
    rows[1, 200:230] = rows[1, 100:130]
    rows[2, 40:] = rows[2, :1]  # hardly a row left
    plain = stacked_neighbors.begin_two_nn(rows)()
    asked, by_kernel = list[list[int]](), row_kernels.nearest_again

    def kept(rows, left_out, places, *rest):
        asked.append(places.tolist())
        by_kernel(rows, left_out, places, *rest)

    row_kernels.nearest_again = kept
    found = stacked_masked.begin(rows)()
    # Made certain in the end: by float64, all sites at once, and site by site where that leaves something.
    neighbors_fused.SHORTEST, neighbors_fused.SPARE, neighbors_fused.AGAIN = 2, 0, 1
    finish = stacked_masked.begin(torch.stack([rows[0], rows[2], rows[1]]))
    doubtful = finish()[::2]
    assert asked == [[0]], "built by the first search, whether or not a row is in doubt, and then no more"
    # The same by the kernel, which is asked once and leaves nothing.
    neighbors_gpu.kernels_run = lambda device: True
    stacked_masked.settle, row_kernels.AGAIN_TILE = None, (64, 256, 16)
    measured = finish()[::2]
    assert asked[1:] == [[0, 2]], "both sites that have rows in doubt, at once"
    stacked_masked.settle = neighbors_gpu.settle
    stacked_masked.mended = lambda rows, k, found, copy, most, places: found
    rough = stacked_masked.begin(rows[1:2])()[0]
    return {
        "value": [
            two.value / one.value - 1
            for one, two in zip(3 * plain[:2], [*found[:2], *doubtful, *measured], strict=True)
        ],
        "stderr": [two.stderr / one.stderr - 1 for one, two in zip(plain[:2], found[:2], strict=True)],
        "same": [(one.n, one.notes) == (two.n, two.notes) for one, two in zip(plain[:2], found[:2], strict=True)],
        "copies": plain[1].n, "rough": rough.value / plain[1].value - 1, "empty": found[2] is None,
    }  # fmt: skip


def again():
    """Rows in doubt of some sites, measured against all others by the kernel, beside brute force and the plain way.

    One site lies far from the origin, one holds copies that are left out and rows in a grid, with many as near as each
    other, one has an entry that is not finite; the numbers of rows, entries and shares fill no program.
    """
    row_kernels.AGAIN_TILE, row_kernels.AGAIN_SHARES = (4, 32, 16), 3
    n, places, most = 150, [0, 1, 3, 4], 6
    grid = torch.randint(0, 3, (n, 37), generator=torch.Generator().manual_seed(5)).float()
    grid[:, 5:] = 0
    rows = torch.stack([draw(n, 37), grid + 100, draw(n, 37), draw(n, 37, seed=1) + 1000, draw(n, 37, seed=2)])
    rows[4, 140, 36] = torch.inf
    rows[0, 149], rows[0, 7], rows[0, 80] = rows[0, 3], rows[0, 3], rows[0, 3] + 1e-6
    left_out = stacked_neighbors._copies(rows)[0]
    left_out[1] = torch.arange(n) % 3 == 1  # of those that are as near as each other
    wrong = torch.zeros(5, n, dtype=torch.bool)
    for site, some in enumerate(([3, 80, 148, 149], [0, 2, 3, 5, 6, 8, 9, 11], [1], [0, 63, 64, 99, 149], [0, 140])):
        wrong[site, some] = True
    broken = [Found(torch.full((n, 2), 7.0, dtype=torch.float64), torch.full((n, 2), 9), ~one) for one in wrong]
    out = {}
    for name, left in (("masked", left_out), ("whole", None)):
        given = [broken[place] for place in places]
        neighbors_gpu.kernels_run = lambda device: False
        plain = neighbors_gpu.mended(rows[:4], 2, given[:3], None if left is None else left[:4], most, places[:3])
        neighbors_gpu.kernels_run = lambda device: True
        found = neighbors_gpu.mended(rows, 2, given, left, most, places)
        out[name] = [
            mended_well(rows[place], found[at], plain[at], wrong[place], None if left is None else left[place], most)
            for at, place in enumerate(places[:3])
        ]
        odd = found[3]
        out[name].append([odd.settled.nonzero().numel(), int(odd.distances.isnan().sum()), 0])
    assert all(bool((one.distances == 7).all()) for one in broken), "what was given is left as it was"
    few = draw(1, 2, 5)
    two = neighbors_gpu.mended(
        few, 2, [Found(torch.zeros(2, 2).double(), torch.zeros(2, 2).long(), torch.zeros(2) > 1)]
    )
    out["alone"] = [two[0].settled.tolist(), two[0].distances.isinf().tolist(), two[0].indices[:, 0].tolist()]
    return out


def mended_well(rows, found, plain, wrong, left_out, most):
    """The worst relative error of rows that were in doubt, a gap to the plain way, and how much else is not as it
    should be: names of neighbours, what is certain, and rows that were not to be touched."""
    wide, n = rows.double(), len(rows)
    left_out = torch.zeros(n, dtype=torch.bool) if left_out is None else left_out
    distances = (wide[:, None] - wide[None]).norm(dim=2).fill_diagonal_(torch.inf)
    truth = distances.masked_fill(left_out[None], torch.inf).topk(2, largest=False).values
    todo = (wrong & ~left_out).nonzero().reshape(-1)
    late, todo = todo[most:], todo[:most]
    error = (found.distances[todo] - truth[todo]).abs() / truth[todo].clamp_min(1e-300)
    gap = (found.distances[todo] - plain.distances[todo]).abs() / truth[todo].clamp_min(1e-300)
    near = found.indices[todo]
    named = distances[todo[:, None], near] == truth[todo]
    bad = int((~named | left_out[near] | (near == todo[:, None])).sum()) + int((near[:, 0] == near[:, 1]).sum())
    certain = torch.ones(n, dtype=torch.bool)
    certain[late] = False
    rest = torch.ones(n, dtype=torch.bool)
    rest[todo] = False
    bad += int((found.settled != certain).sum()) + int((found.distances[rest] != 7).sum())
    return [float(error.max()), float(gap.max()), bad + int((found.indices[rest] != 9).sum())]


def scattered_cells(n):
    """Two cells of different sizes, whose rows stand here and there."""
    first = torch.rand(n, generator=torch.Generator().manual_seed(8)) < 0.3
    return Cells.of([first.nonzero().reshape(-1), (~first).nonzero().reshape(-1).flip(0)], n)


def centred_halves(rows):
    """Rows of two halves of different sizes about means that are given, each filled up with zeros, in one launch."""
    parts = scattered_cells(rows.shape[1])
    sums = stacked_sums.Sums.of(rows, directions=False, exact=True, cells=parts)[1]
    assert sums is not None
    stacked_fits.kernels_run = lambda device: True
    by_kernel = stacked_fits.Centred.of(rows, parts.rows, sums)
    stacked_fits.kernels_run = lambda device: False
    plain = stacked_fits.Centred.of(rows, parts.rows, sums)
    stacked_sums.kernels_run = lambda device: True
    odd = rows.clone()
    odd[1, 3, 2] = torch.nan
    size = stacked_sums.Sums.of(odd, directions=False, exact=True, cells=parts)[0].size
    assert size.isnan().tolist() == [False, True], "what is not a number is in sight"
    return float((by_kernel.rows - plain.rows).abs().max() / plain.rows.abs().max())


def sums():
    """Sums of sites by kernels beside the plain ones, for a width and a number that fill no program; the second site
    is far from the origin, and no site lies next to the one before it."""
    row_kernels.SHARES = 3  # the interpreter is slow
    rows = torch.stack([draw(250, 150) - 1, draw(250, 150), draw(250, 150, seed=1) + 40])[::2]
    error, near = dict[str, float](), dict[str, float]()
    for cells in (None, scattered_cells(250)):
        for dtype, out in ((torch.float64, error), (torch.float32, near)):
            one, two = (
                (seen.size, seen.mean, *vars(seen.centred).values(), seen.units(), seen.means)
                for visited in (stacked_sums.visited_plainly, stacked_sums.visited_by_kernels)
                for seen in (visited(rows, dtype, cells),)
            )
            names = ("size", "mean", "rows", "squares", "lengths", "total", "means")
            for name, here, there in zip(names, one, two, strict=True):
                if here is None or there is None:
                    assert here is there is cells, name
                    continue
                assert here.dtype == there.dtype and here.shape == there.shape, name
                out[name] = max(out.get(name, 0.0), float((here - there).abs().max() / here.abs().max()))
    error["halves"] = centred_halves(rows)
    one, two = draw(2, 37, 150), draw(2, 37, 150, seed=1)
    error["dots"] = float((row_kernels.row_dots(one, two) - (one.double() * two).sum(dim=2)).abs().max())
    # Lengths are taken in float32 by the plain way.
    return {"error": {k: v for k, v in error.items() if k not in ("lengths", "total")}, "near": near | error}


def taken():
    """Rows of strided sites in an order with gaps, a width and a number that fill no program; forms of rows of which
    some columns are far larger than others, in half precision, against float64."""
    rows, order = draw(4, 60, 150)[::2], torch.randperm(60, generator=torch.Generator().manual_seed(1))[:37]
    some, squares = row_kernels.taken_by_kernel(rows, order)
    wide = draw(2, 140, 300) * torch.where(torch.arange(300) % 40 == 3, 300.0, 1.0)
    wide *= torch.tensor([1e-12, 1e6])[:, None, None]
    wide[1, :, 7] *= 1e3  # nearly all there is
    moment = wide.double().mT @ wide.double() / 140
    level = moment.square().sum(dim=(1, 2)) / moment.diagonal(dim1=1, dim2=2).sum(dim=1)
    form = row_kernels.forms_in_half(wide, moment, level, wide.abs().amax(dim=(1, 2)))
    other = moment - level[:, None, None] * torch.eye(300).double()
    truth = ((wide.double() @ other) * wide).sum(dim=2)
    size = truth.square().mean(dim=1, keepdim=True).sqrt()
    return {
        "same": torch.equal(some, rows[:, order]),
        "squares": float((squares / rows[:, order].double().square().sum(dim=2) - 1).abs().max()),
        "forms": float(((form - truth) / size).abs().max()), "dtype": form.dtype == torch.float64,
    }  # fmt: skip


def visits():
    """A half step of four fits against plain products: one goes ahead, of one a concept has no length, one is done
    again as it was, one is not active."""
    a, concepts = draw(4, 150, 70), draw(4, 5, 70, seed=1, dtype=torch.float64)
    concepts[1, 2] = 0
    gram = concepts @ concepts.mT
    before, former = (draw(4, 5, 150, seed=seed).clamp_min(0) for seed in (2, 3))
    former[1] = torch.nan  # there is no last yet
    books = visits_of.Books.begun(a.new_zeros(4, dtype=torch.float64), 0.5)
    books.ahead[0], books.again[2], books.active[3] = 0.7, True, False
    codes, last = before.clone(), former.clone()
    steps = visits_of.HalfSteps.of(a, 5)
    steps.sums.pull[3] = 7.0
    sums = steps.take(codes, last, concepts, gram, books, 3)
    worst, again = 0.0, bool((last[2] == former[2]).all() and (codes[2] == former[2]).all())
    for fit in (0, 1, 2):
        cross = concepts[fit].float() @ a[fit].T
        new = former[fit] if fit == 2 else swept(before[fit], cross, gram[fit], 3)
        want = torch.lerp(former[fit], new, 1.7).clamp_min(0).double() if fit == 0 else new.double()
        pairs = [
            (codes[fit], want), (sums.second[fit], want @ want.T), (sums.pull[fit], want @ a[fit].double()),
            (last[fit], new), (sums.own[fit], new.double() @ new.double().T),
        ]  # fmt: skip
        if fit != 2:  # where nothing was swept, nobody asks
            pairs.append((sums.met[fit], (cross.double() * new).sum()))
        for one, other in pairs:
            worst = max(worst, float((one - other).abs().max() / other.abs().max()))
    warm = visits_of.warm_codes(a, concepts, 40, 1e-6)
    gap = [float((warm[i] - solved(a[i], concepts[i], 40, 1e-6)).abs().max() / warm[i].max()) for i in (0, 3)]
    # Two sweeps are not enough to forget where codes started.
    early = visits_of.warm_codes(a, concepts, 2, 0.0)
    gap += [float((early[i] - solved(a[i], concepts[i], 2, 0.0)).abs().max() / early[i].max()) for i in (0, 3)]
    kept = torch.equal(codes[3], before[3]) and torch.equal(last[3], former[3]) and bool((sums.pull[3] == 7).all())
    kept = kept and not any(bool(one[3].any()) for one in sums[1:])
    idle = float(codes[1, 2].max() + warm[1, 2].max())
    return {"worst": worst, "kept": kept, "again": again, "warm": max(gap), "idle": idle}


def factors():
    """Inverses of triangular factors: of a number that fills no program, of dependent columns, of what is not a number;
    and columns made orthonormal by them."""
    columns = draw(4, 40, 11).double() * torch.logspace(0, -4, 11)
    columns[1, :, 5] = columns[1, :, 2] * 2
    columns[2, 3, 3] = torch.nan
    columns /= columns.norm(dim=1, keepdim=True)
    gram = columns.mT @ columns
    out, good = leading.inverse_factors(gram)
    truth = torch.linalg.inv(torch.linalg.cholesky(gram[[0, 3]]))
    basis = columns[[0, 3]] @ out[[0, 3]].mT
    return {
        "worst": float(((out[[0, 3]] - truth).abs() / truth.abs().max()).max()), "good": good.tolist(),
        "finite": bool(torch.isfinite(out).all()), "upper": float(out.triu(1).abs().max()),
        "orthonormal": float((basis.mT @ basis - torch.eye(11).double()).abs().max()),
        "plans": _plans(), "settled": _settled(), "lengths": _of_all_lengths(),
    }  # fmt: skip


def _of_all_lengths():
    """Errors of columns made orthonormal whose lengths differ by eighty decades, and what they span; whether they do,
    and whether those with one twice do."""
    columns = draw(2, 40, 11, seed=1).double() * torch.logspace(40, -40, 11, dtype=torch.float64)
    columns[1, :, 9] = columns[1, :, 2] * 1e-50
    plain, leading.kernels_run = leading.kernels_run, lambda device: True
    basis, good = leading.orthonormal_columns(columns)
    leading.kernels_run = plain
    truth = torch.linalg.qr(columns[0] / columns[0].norm(dim=0)).Q
    error = (basis[0].T @ basis[0] - torch.eye(11).double()).abs().max()
    return [float(error), float((basis[0] @ basis[0].T - truth @ truth.T).abs().max()), good.tolist()]


def _plans():
    """How far plans of filters by the kernel and by plain steps lie apart: blocks with locked columns and without, near
    the wanted ones and not, of a flat spectrum, and below zero by rounding."""
    places = torch.arange(1, leading.BLOCK + 1).double()
    values = torch.stack([1 / places, 1e6 / places**3, 1 - places / 1e7, 2 - places / 16, 1 / places, 1 / places])
    residuals = values.abs() * torch.tensor([1e-12, 1e-5, 1e-2, 1e-4, 2e-10, 1.0]).double()[:, None]
    residuals[4, 1::2] = 1e-3 * values[4, 1::2] * (1 - 1e-9)
    ritz = leading._Ritz(values, torch.empty(6, 3, leading.BLOCK).double(), residuals)
    worst = 0.0
    for most, warm in ((16, 0), (16, 16), (3, 7)):
        mine = leading.planned(values, residuals, most, warm)
        plain = vars(leading._Filter.of(ritz, most, warm)).values()
        for one, other in ((a.double(), b.double()) for a, b in zip(mine, plain, strict=True)):
            worst = max(worst, float(((one - other) / other.abs().clamp_min(1e-9)).abs().max()))
    return worst


def _settled():
    """What the kernel and plain steps say of blocks: grown enough and not quite, with a residual that is too large
    among the wanted and behind them, not near, lost, below the edge, no numbers, without bound."""
    rank, width, yes = 16, 400, torch.ones(9, dtype=torch.bool)
    values = (1 / torch.arange(1, leading.BLOCK + 1).double()).repeat(9, 1)
    values[7], values[8, 0] = torch.nan, torch.inf
    residuals, half = values * leading.EXACT * 0.9, values[:, -1] / 2
    residuals[2, rank - 1], residuals[3, rank] = leading.EXACT * values[2, rank - 1] * 1.1, 1.0
    half[6] = values[6, 0]
    enough = (values[0, rank - 1] / (leading.CAPTURED * values[0, :rank].sum())).sqrt() * width**0.5 / leading.CHANCE
    degree = (enough * torch.tensor([1.01, 0.99, *[1.01] * 7])).acosh() / (values[:, rank - 1] / half - 1).acosh()
    degree[6:] = 9.0
    near, lost = yes.clone(), ~yes
    near[4], lost[5] = False, True
    plan = leading._Filter(values > 9, values, half, degree, near)
    ritz = leading._Ritz(values, torch.empty(9, width, leading.BLOCK).double(), residuals)
    mine = leading.settled(values, residuals, plan, lost, rank, width)
    return [mine.tolist(), leading._State(ritz, values, 0, plan, lost).settled(rank).tolist()]


def biases():
    """Sums over pairs of eigenvalues: spread out, nearly equal, with zeros; of a number that fills no tile."""
    values = torch.stack([
        torch.logspace(0, -6, 70, dtype=torch.float64),
        1 + 1e-7 * torch.arange(70, dtype=torch.float64).flip(0),
        torch.where(torch.arange(70) < 40, torch.logspace(0, -3, 70, dtype=torch.float64), 0.0),
    ])  # fmt: skip
    values = values / values.sum(dim=1, keepdim=True)
    mine = stacked.bias_sums(values) / 200
    plain = torch.stack(stacked._plain_biases(values, 100), dim=1)
    slow = [
        [
            trace_bias(one, lambda v: 0.5 / v.sqrt(), lambda m: -0.25 / m**1.5, 100),
            trace_bias(one, lambda v: (v.log() + 2) / (4 * v.sqrt()), lambda m: -m.log() / (8 * m**1.5), 100),
        ]
        for one in values
    ]
    slow = torch.tensor(slow, dtype=torch.float64)
    return {"plain": float((mine / plain - 1).abs().max()), "slow": float((mine / slow - 1).abs().max())}


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "biases": biases,
                "factors": factors,
                "copies": copies,
                "halves": halves,
                "within": within,
                "again": again,
                "visits": visits,
                "masked": masked,
                "sums": sums,
                "taken": taken,
            }[sys.argv[1]]()
        )
    )
