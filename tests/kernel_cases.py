"""The GPU kernels run by Triton's interpreter on the CPU, each against what it stands for. Run by test_kernels.py.

A process of its own: Triton decides when it is imported whether its kernels are compiled or interpreted.
"""

import functools
import json
import sys

import interpreted  # noqa: F401
import torch

from anisoscope.kernels import kernels_of
from anisoscope.measures import neighbors_fused, row_kernels
from anisoscope.measures.plan import scale_of
from anisoscope.tangent import descending, descent, seminmf, stacked_fits, sweeps, visits


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def brute_force(rows, k):
    wide = rows.double()
    distances = (wide[:, None] - wide[None]).norm(dim=2).fill_diagonal_(torch.inf)
    return distances.topk(k, largest=False).values


def neighbours(rows, k, cells, again=4, scale=1.0):
    """The largest error of rows called certain and of all, the share of certain ones, and false indices."""
    neighbors_fused.STRIPE_CELLS, neighbors_fused.AGAIN = cells, again
    neighbors_fused.MEASURED_TILE = (64, 64)  # the interpreter is slow
    sites = torch.stack([2 * rows, rows])
    worst, certain, below, wrong = 0.0, [], 0.0, 0
    for one, found in zip(sites, neighbors_fused.search_fused(sites, k, scale), strict=True):
        truth = brute_force(one, k)
        error = (found.distances - truth) / truth.clamp_min(1e-300)
        worst = max([worst, *error[found.settled].abs().flatten().tolist()])
        below = min(below, float(error.min()))
        certain.append(float(found.settled.double().mean()))
        own = (one.double()[found.indices] - one.double()[:, None]).norm(dim=2)
        wrong += int(((own - found.distances).abs() > 1e-12 * own).sum())
    return {"worst": worst, "below": below, "certain": min(certain), "wrong": wrong}


def again():
    """Rows in doubt, of two heaps by lists that are too short, and where more than two of the nearest must be in one
    group; of some of them, or all, all bounds are looked at then."""
    neighbors_fused.SPARE, neighbors_fused.DOUBT_ROWS = 0, 64
    row_kernels.SUMMED = 64  # two sums, of rows of 100
    heaps = 0.12 * draw(200, 100) + torch.where(torch.arange(200) % 2 == 0, 1.0, -1.0)[:, None]
    found = {}
    for name, shortest, again in (("few", 2, 1), ("all", 16, 200)):
        neighbors_fused.SHORTEST = shortest
        found[name] = neighbours(heaps, 2, 1 << 29, again)
    crowded = draw(300, 8)
    return found | {name: neighbours(crowded, 5, 1 << 29, again) for name, again in (("crowd", 1), ("whole", 300))}


def scaled():
    """Two heaps, once as they are and once so large or small that they are searched in other units."""
    heaps = 0.12 * draw(200, 100) + torch.where(torch.arange(200) % 2 == 0, 1.0, -1.0)[:, None]
    sizes = {"plain": 1.0, "small": 2.0**-40, "large": 2.0**40}
    return {name: neighbours(size * heaps, 2, 1 << 29, scale=scale_of(size * heaps)) for name, size in sizes.items()}


def groups():
    """The rule and the kernels speak of the same groups."""
    from anisoscope.kernels import nearest

    return nearest.TILE == neighbors_fused.GROUP


def shapes():
    """The largest differences of bounds by each shape of the product from those by the first, of the longest row."""
    ready = row_kernels.Ready.of(draw(2, 200, 100) + 3, 1.0)
    tiles = ready.size.shape[1] // neighbors_fused.GROUP
    first, *others = (neighbors_fused._bounds(ready, 0, tiles, one) for one in neighbors_fused.SHAPES)
    # Bounds above the diagonal by row, below it by column; the others are never written.
    places = [(0, slice(0, 128)), (1, slice(0, None))], [(0, slice(0, None)), (1, slice(128, None))]
    return [
        max(
            float((a[:, :, group, where] - b[:, :, group, where]).abs().max())
            for a, b, side in zip(one, first, places, strict=True)
            for group, where in side
        )
        / float(ready.size[ready.size < 1e30].max())
        for one in others
    ]


def hidden_by_rounding():
    """Two rows whose nearest is hidden from them, among others that half precision holds exactly and farther off: one
    is rounded to where the row itself stands, the other away from it, and a farther row towards it."""
    rows = torch.ones(120, 64)
    at = draw(120, 64).argsort(dim=1)[:, :16]
    rows.scatter_add_(1, at, 2.0**-7 * draw(120, 16, seed=1).sign())
    rows[0], rows[1] = 1.0, 1 + 0.49 * 2.0**-10
    rows[2:5] = 1.25 + 2.0**-10 * torch.tensor([0.49, 100.51, -100])[:, None]
    return torch.cat([rows, -rows])  # a mean of zero, so that rows are rounded as they stand here


def clouds():
    copies = draw(200, 24)
    copies[100:120] = copies[:20]
    return {
        "plain": (draw(200, 40), 2, 1 << 29),
        "in stripes": (draw(300, 40), 2, 1 << 12),
        "far from the origin": (draw(250, 70) + 1000, 2, 1 << 29),
        "copies": (copies, 1, 1 << 29),
        "one far row": (torch.cat([draw(1, 20) * 1e6, draw(130, 20, seed=1)]), 2, 1 << 29),
        "hidden by rounding": (hidden_by_rounding(), 1, 1 << 29),
    }


def codes(rank, dtype):
    """Rounds by the kernel against plain ones, for all of three fits and for two; a concept of one has no length."""
    a, concepts = draw(3, 150, 9, dtype=dtype), draw(3, rank, 9, seed=1, dtype=torch.float64)
    concepts[2, rank // 2] = 0
    z = draw(3, rank, 150, seed=2, dtype=dtype).clamp_min(0)
    cross, gram = concepts.to(dtype) @ a.mT, concepts @ concepts.mT
    active = torch.tensor([True, False, True])
    here, there = (one(z, cross, gram, 3, active) for one in (sweeps.swept_all, sweeps.rounds))
    assert torch.equal(there[1], z[1])
    assert there.dtype == dtype and not there[2, rank // 2].any(), "a concept of length zero has no codes"
    every = sweeps.rounds(z, cross, gram, 3)
    alone = torch.stack([descent.swept(*one, 3) for one in zip(z, cross, gram, strict=True)])
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in ((there, here), (every, alone)))


def alone(momentum, start):
    """One fit by the kernels beside the same by plain products: errors after each half step, and the factors."""
    made = draw(130, 5, seed=5).relu().double() @ draw(5, 12, seed=4).double()
    rows = (made + 0.3 * draw(130, 12, seed=6).double()).abs()
    concepts = rows[:5].clone()
    if start == "idle":
        concepts[2] = 0  # no row uses it at first
    begun = descending._Pace.begun
    if start == "wild":
        descending._Pace.begun = lambda momentum: descending._Pace(1e6, 1e6)  # much too far
    options = {"concepts": concepts, "centre": False, "tolerance": 3e-3, "max_iter": 20, "momentum": momentum}
    plain = seminmf.fit_seminmf(rows, 5, **options)
    before = [module.has_kernels for module in (descending, descent)]
    asked = list[int]()

    def counted(self, *given, real=descending._Work.round):
        asked.append(1)
        return real(self, *given)

    descending._Work.round, kept = counted, descending._Work.round
    descending.has_kernels = descent.has_kernels = lambda device, rank: True
    found = seminmf.fit_seminmf(rows, 5, **options)
    descending.has_kernels, descent.has_kernels = before
    descending._Work.round, descending._Pace.begun = kept, begun
    assert found.iterations == plain.iterations and found.converged == plain.converged, (found, plain)
    assert bool((found.codes >= 0).all())
    pairs = ((torch.tensor(f.history), f.concepts, f.codes) for f in (found, plain))
    gap = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*pairs, strict=True))
    return {"gap": gap, "careful": len(asked), "iterations": found.iterations}


def small_inverses(rank):
    x = draw(3, rank, 40, dtype=torch.float64)
    second = x @ x.mT
    second[1] = torch.ones(rank, rank)  # of rank one
    second[2, 0] = second[2, :, 0] = 0  # a concept without codes
    out, good = sweeps.inverses(second, torch.tensor([True, True, True]), 1e6)
    idle, _ = sweeps.inverses(second, torch.tensor([False, True, True]), 1e6)
    assert not idle.any(), "what is not active has no inverse"
    error = (out[0] @ second[0] - torch.eye(rank, dtype=torch.float64)).abs().max()
    rest = float(out[1:].abs().max())
    return {"error": float(error), "good": good.tolist(), "rest": rest}


def accounts(rank):
    """The account of six fits by the kernel beside the plain one; what it should say of each is known."""
    kernels_of("codes").ENTRIES = 256  # several steps, the last of them not full
    width, fits = 150, 6
    pull, concepts = (draw(fits, rank, width, seed=seed, dtype=torch.float64) for seed in (1, 2))
    fresh = concepts + 0.1 * draw(fits, rank, width, seed=5, dtype=torch.float64)
    second, own = (x @ x.mT for x in draw(2, fits, rank, 30, seed=3, dtype=torch.float64))
    size, gram, own_gram = torch.arange(1, 7).double() * 1e5, concepts @ concepts.mT, fresh @ fresh.mT
    want = (size - 2 * (pull * fresh).sum(dim=(1, 2)) + (second * own_gram).sum(dim=(1, 2))) / size
    # In order: gets better; has settled; is not active; went ahead and got better; went ahead, but not as far as its
    # codes had come; went ahead, and has settled: a round surely worth 2 plain ones lowered the error by 1.9e-4.
    error = want * torch.tensor([1.01, 1.0, 1.01, 1.01, 1.01, 1 / (1 - 1.9e-4)], dtype=torch.float64)
    reached = want * torch.tensor([0.5, 0.5, 0.5, 1.005, 0.999, 1.00001])
    met = (size + (own * gram).sum(dim=(1, 2)) - size * reached) / 2
    books = visits.Books.begun(size, 0.5)
    books.error.copy_(error), books.ahead[3:].fill_(0.5), books.active[2:3].fill_(False), books.worth.fill_(3.0)
    others = visits.Books(*(one.clone() for one in vars(books).values()))
    sums, good = visits.Sums(pull, second, own, met), torch.ones(fits, dtype=torch.bool)
    gap, steps = 0.0, []
    for account, one in ((visits.account, books), (visits.account_plainly, others)):
        step = visits.Step(concepts.clone(), gram.clone(), fresh.clone(), own_gram.clone(), good)
        account(sums, step, size, one, 1e-4, 0.8)
        steps.append(step)
        gap = max(gap, float(((one.error - want) / want)[[0, 1, 3, 5]].abs().max()))
        assert one.active.tolist() == [True, False, False, True, True, False]
        assert one.iterations.tolist() == [1, 1, 0, 1, 0, 1] and bool(one.sound.all())
        assert torch.equal(one.error[[2, 4]], error[[2, 4]]), "nothing is told of what is not active or not kept"
        assert one.again.tolist() == [False] * 4 + [True, False]
        assert one.ahead.tolist() == [0.5, 0.5, 0, 0.5, 0, 0.5], "it grows no farther than its limit"
        assert one.pace.tolist() == [0.5, 0.5, 0.5, 0.5, 0.5 / 1.2, 0.5]
        assert one.limit.tolist() == [0.5, 0.5, 0.5, 0.505, 0.5, 0.505]
        assert one.worth.tolist() == [1, 1, 3, 2.5, 2.5, 2.5]
        assert torch.equal(step.fresh[4], concepts[4]) and torch.equal(step.fresh_gram[4], gram[4]), "taken back"
        assert torch.equal(step.fresh[[0, 1, 3, 5]], fresh[[0, 1, 3, 5]])
        assert torch.equal(step.fresh_gram[[0, 1, 3, 5]], own_gram[[0, 1, 3, 5]])
    visits.account(sums, visits.Step(*step[:4], ~good), size, books, 1e-4, 0.8)
    assert books.sound.tolist() == [False, True, True, False, False, True] and not books.active.any()
    return gap


def descents():
    """Fits by the kernels beside fits by plain products: errors, concepts, iterations, what is sound; with a pace that
    is refused at times, and at the end."""
    x = draw(2, 5, 24, seed=4) * 2
    codes = draw(2, 200, 5, seed=5).relu()
    centred = stacked_fits.Centred.of(
        codes @ x + 0.5 * draw(2, 200, 24, seed=6), (torch.arange(100), torch.arange(100, 200))
    )
    start = stacked_fits.kmeans_starts(centred, 3, 0)
    stacked_fits.MAX_ITER = 8  # enough to go wrong, and the interpreter is slow
    visits.BEGIN = 4.0  # much too far
    taken_back = list[list[bool]]()

    def watched(*given, real):
        real(*given)
        taken_back.append(given[3].again.tolist())

    real = stacked_fits.account, stacked_fits.can_visit
    stacked_fits.account, found = functools.partial(watched, real=real[0]), {}
    for momentum in (0.0, 0.5, 4.0):
        plain = stacked_fits.seminmf_fits(centred, start, momentum)
        stacked_fits.can_visit = lambda a, rank: True
        one = stacked_fits.seminmf_fits(centred, start, momentum)
        stacked_fits.can_visit = real[1]
        gaps = [float((one.facts[name] / plain.facts[name] - 1).abs().max()) for name in ("error", "explained")]
        found[momentum] = {
            "gap": max(*gaps, float((one.state - plain.state).abs().max())),
            "iterations": [fit.facts["iterations"].tolist() for fit in (plain, one)],
            "ordinary": torch.equal(plain.ordinary, one.ordinary),
            "taken back": taken_back.copy(),
            "error": one.facts["error"].tolist(),
        }
        taken_back.clear()
    stacked_fits.account = real[0]
    return found


if __name__ == "__main__":
    cases = {
        "descents": descents,
        "neighbours": lambda: {name: neighbours(*one) for name, one in clouds().items()},
        "groups": groups,
        "shapes": shapes,
        "again": again,
        "scaled": scaled,
        "codes": lambda: {
            f"{r} {t}": codes(r, t) for r, t in ((2, torch.float32), (5, torch.float32), (5, torch.float64))
        },
        "alone": lambda: {f"{m} {s}": alone(m, s) for m, s in ((0, "rows"), (0.5, "rows"), (0, "idle"), (0.5, "wild"))},
        "inverses": lambda: {rank: small_inverses(rank) for rank in (3, 8)},
        "accounts": lambda: {rank: accounts(rank) for rank in (3, 8)},
    }
    wanted = sys.argv[1:]
    found = {name: cases[name]() for name in wanted}
    print(json.dumps(found if len(wanted) > 1 else found[wanted[0]]))
