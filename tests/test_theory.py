"""The propositions: surfaces beside numerical derivatives, every experiment beside its truth and beside a wrong one."""

import functools
import math
from dataclasses import replace

import pytest
import torch

from anisoscope.errors import OptionError, ShapeError, UnknownNameError
from anisoscope.estimate import Estimate
from anisoscope.theory import chords, counterexample, layer_gradient, visible
from anisoscope.theory.experiment import Check, Outcome, Series, loglog_slopes, over_repeats, series_of
from anisoscope.theory.registry import choose_experiments, experiments
from anisoscope.theory.shapes import Shape, complement, flat_symmetric, symmetric
from anisoscope.theory.surfaces import (
    kappa_squared,
    make_surface,
    random_form,
    surface_names,
    zipf_clouds,
    zipf_tokens,
)

NAMES = list(surface_names())
MINE = (*chords.EXPERIMENTS, *visible.EXPERIMENTS, *layer_gradient.EXPERIMENTS, *counterexample.EXPERIMENTS)
D = torch.float64


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


# Surfaces


def chart_at(surface, x):
    """A chart of the surface around one of its points, written without the package's formulas."""
    shape, at = surface.shape, x @ surface.frame
    if surface.name in ("circle", "sphere", "ellipsoid"):
        y = at / shape.axes
        side = torch.linalg.svd(y[None]).Vh[1:]
        return lambda u: (shape.axes * (y + u @ side) / (y + u @ side).norm()) @ surface.frame.T
    if surface.name == "veronese":
        y = torch.linalg.eigh(symmetric(at[None])[0]).eigenvectors[:, -1]
        side = torch.linalg.svd(y[None]).Vh[1:]

        def above(u):
            z = (y + u @ side) / (y + u @ side).norm()
            return (shape.radius * flat_symmetric(torch.outer(z, z))) @ surface.frame.T

        return above
    if surface.name == "swiss_roll":
        t, h, s = at[[0, 2]].norm() / shape.scale, at[1], shape.scale
        return lambda u: (
            torch.stack([s * (t + u[0]) * (t + u[0]).cos(), h + u[1], s * (t + u[0]) * (t + u[0]).sin()])
            @ surface.frame.T
        )
    start = at[: surface.dimension]
    return lambda u: (
        torch.cat([start + u, torch.einsum("mab,a,b->m", shape.form, start + u, start + u) / 2]) @ surface.frame.T
    )


def differentiated(chart, dimension, step=1e-3):
    """First and second derivatives of a chart at 0 by central differences of fourth order."""
    eye = step * torch.eye(dimension, dtype=D)
    jacobian = torch.stack([(8 * (chart(e) - chart(-e)) - chart(2 * e) + chart(-2 * e)) / (12 * step) for e in eye], 1)
    hessian = torch.zeros(len(jacobian), dimension, dimension, dtype=D)
    for a, e in enumerate(eye):
        for b, f in enumerate(eye):
            mixed = [chart(p * e + q * f) * p * q for p in (1, -1) for q in (1, -1)]
            twice = [chart(2 * (p * e + q * f)) * p * q for p in (1, -1) for q in (1, -1)]
            hessian[:, a, b] = (16 * sum(mixed) - sum(twice)) / (48 * step**2)
    return jacobian, hessian


@pytest.mark.parametrize("spread", [None, 0.05])
@pytest.mark.parametrize("name", NAMES)
def test_tangents_and_curvature_are_derivatives(name, spread):
    """At points of a sample, in a space that is wider than the surface needs and turned at random."""
    surface = make_surface(name, width=9, seed=3)
    points = surface.sample(4, seed=5, spread=spread)
    for i in range(4):
        jacobian, hessian = differentiated(chart_at(surface, points.x[i]), surface.dimension)
        across = torch.linalg.pinv(jacobian)
        along = jacobian @ across
        form = torch.einsum("wv,vab,ai,bj->wij", torch.eye(9, dtype=D) - along, hessian, across, across)
        mine = torch.einsum("wab,ia,jb->wij", points.second[i], points.tangent[i], points.tangent[i])
        assert torch.allclose(points.tangent[i] @ points.tangent[i].T, along, atol=1e-8)
        assert torch.allclose(mine, form, atol=1e-5 * float(form.abs().max()) + 1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_is_what_it_says(name):
    surface = make_surface(name, width=9, seed=1)
    d = surface.dimension
    points = surface.sample(50, seed=2)
    assert torch.allclose(points.tangent.transpose(1, 2) @ points.tangent, torch.eye(d, dtype=D), atol=1e-12)
    assert torch.einsum("nwd,nwab->ndab", points.tangent, points.second).abs().max() < 1e-12
    assert torch.allclose(points.second, points.second.transpose(2, 3), atol=1e-12)
    assert points.coordinates.shape == (50, d)
    assert torch.equal(points.x, surface.sample(50, seed=2).x)
    assert not torch.equal(points.x, surface.sample(50, seed=3).x)


@pytest.mark.parametrize("name", NAMES)
def test_a_local_cloud_lies_over_its_coordinates(name):
    surface = make_surface(name, width=9, seed=1)
    cloud = surface.sample(4000, seed=2, spread=0.02)
    away = cloud.x - cloud.base.x
    assert torch.allclose(away @ cloud.base.tangent, cloud.coordinates, atol=1e-13)
    along, off = cloud.split()
    assert torch.allclose(along + off, away) and (off @ cloud.base.tangent).abs().max() < 1e-13
    error = 5 * 0.02 / math.sqrt(2 * 4000)
    assert ((cloud.coordinates.std(dim=0) - 0.02).abs() < error).all()
    assert torch.equal(surface.x_over(cloud.coordinates), cloud.x)
    # The graph bends as II says: its Hessian at the base, by differences.
    if surface.dimension > 1:
        v = torch.zeros(4, surface.dimension, dtype=D)
        v[:, 0], v[:, 1] = torch.tensor([1e-3, 1e-3, -1e-3, -1e-3]), torch.tensor([1e-3, -1e-3, 1e-3, -1e-3])
        x = surface.x_over(v)
        assert torch.allclose((x[0] - x[1] - x[2] + x[3]) / 4e-6, surface.base.second[:, 0, 1], atol=1e-5)


def test_every_point_is_on_its_surface():
    axes = torch.tensor([1.0, 0.5, 3.0, 2.0], dtype=D)
    for spread in (None, 0.03):
        x = make_surface("ellipsoid", axes=axes.tolist()).sample(500, seed=0, spread=spread).x
        assert torch.allclose((x / axes).square().sum(dim=1), torch.ones(500, dtype=D), atol=1e-12)
        x = make_surface("veronese", radius=2.0).sample(500, seed=0, spread=spread).x
        values = torch.linalg.eigvalsh(symmetric(x))
        assert torch.allclose(values, torch.tensor([0.0, 0.0, 2.0], dtype=D).expand(500, 3), atol=1e-12)
        x = make_surface("swiss_roll", scale=0.2).sample(500, seed=0, spread=spread).x
        t = x[:, [0, 2]].norm(dim=1) / 0.2
        assert torch.allclose(x[:, 0], 0.2 * t * t.cos(), atol=1e-12)


def test_known_curvatures():
    assert make_surface("circle", radius=0.5).base.kappa == pytest.approx(2)
    for dimension in (1, 2, 7):
        assert make_surface("sphere", dimension=dimension, radius=4.0).base.kappa == pytest.approx(0.25)
    assert make_surface("veronese", radius=2.0).base.kappa == pytest.approx(math.sqrt(2) / 2)
    saddle = make_surface("saddle", up=2.0, down=0.5).base.kappa
    # By hand: the mean of (2 cos^2 - 0.5 sin^2)^2 over angles.
    assert saddle**2 == pytest.approx(4 * 3 / 8 - 2 * 2 * 0.5 / 8 + 0.25 * 3 / 8)
    for kappa in (0.0, 0.3, 3.0):
        assert make_surface("quadratic", dimension=4, normals=3, kappa=kappa, seed=9).base.kappa == pytest.approx(kappa)
    roll = make_surface("swiss_roll", scale=0.1)
    t = float(roll.shape.coordinates(roll.shape.base[None])[0, 0])
    curve = (2 + t * t) / (0.1 * (1 + t * t) ** 1.5)
    assert roll.base.kappa == pytest.approx(curve * math.sqrt(3 / 8))


def test_kappa_is_the_mean_over_directions(seed):
    """The formula in II against random unit directions."""
    form = random_form(5, 3, 1.7, torch.Generator().manual_seed(seed))
    way = normal(20_000, 5, seed=seed)
    way = way / way.norm(dim=1, keepdim=True)
    squares = torch.einsum("mab,na,nb->nm", form, way, way).square().sum(dim=1)
    assert abs(float(squares.mean()) - 1.7**2) < 5 * float(squares.std()) / math.sqrt(20_000)
    assert float(kappa_squared(form[None])[0]) == pytest.approx(1.7**2)


def test_uniform_is_by_area(seed):
    """Means over samples against quadrature with the area element."""
    n = 20_000
    x = make_surface("ellipsoid", axes=(1.0, 1.5, 3.0)).sample(n, seed=seed).x
    u = (torch.arange(2000, dtype=D) + 0.5) / 2000
    height = (2 * u - 1)[:, None]
    angle = 2 * torch.pi * (torch.arange(400, dtype=D)[None] + 0.5) / 400
    root = (1 - height**2).sqrt()
    y = torch.stack([root * angle.cos(), root * angle.sin(), height.expand(-1, 400)], dim=-1)
    area = (y / torch.tensor([1.0, 1.5, 3.0], dtype=D)).norm(dim=-1)
    truth = float((area * 9 * y[..., 2] ** 2).sum() / area.sum())
    assert abs(float(x[:, 2].square().mean()) - truth) < 5 * float(x[:, 2].square().std()) / math.sqrt(n)
    # Uniform on the sphere before it is stretched would read 3; the test can tell.
    assert abs(truth - 3) > 10 * float(x[:, 2].square().std()) / math.sqrt(n)
    roll = make_surface("swiss_roll")
    t = roll.shape.coordinates(roll.sample(n, seed=seed).x)[:, 0]
    places = torch.linspace(1.5 * torch.pi, 4.5 * torch.pi, 5001, dtype=D)
    weight = (1 + places**2).sqrt()
    assert abs(float(t.mean()) - float((weight * places).sum() / weight.sum())) < 5 * float(t.std()) / math.sqrt(n)
    x = make_surface("veronese").sample(n, seed=seed).x
    assert (symmetric(x).mean(dim=0) - torch.eye(3, dtype=D) / 3).abs().max() < 5 / math.sqrt(n)


# Geodesics


@pytest.mark.parametrize("name", ["sphere", "veronese"])
def test_closed_geodesics_are_the_integrated_ones(name):
    surface = make_surface(name, seed=1)
    points = surface.sample(8, seed=2)
    way = torch.einsum("nwd,nd->nw", points.tangent, normal(8, 2, seed=3))
    way = way / way.norm(dim=1, keepdim=True)
    lengths = torch.tensor([0.1, 0.4, 1.0], dtype=D)
    slow = Shape.geodesics(surface.shape, points.x, way, lengths)
    assert torch.allclose(surface.shape.geodesics(points.x, way, lengths), slow, atol=1e-6)


def test_geodesics_of_a_roll_are_straight_when_unrolled():
    roll = make_surface("swiss_roll", scale=0.1, width=7, seed=4)
    start = roll.over(torch.zeros(6, 2, dtype=D))
    way = normal(6, 2, seed=1)
    ends = roll.geodesics(start, way, [0.3, 0.8])

    def unrolled(x):
        t, h = roll.shape.coordinates(x @ roll.frame).unbind(dim=1)
        return torch.stack([0.05 * (t * (1 + t * t).sqrt() + t.asinh()), h], dim=1)

    way = way / way.norm(dim=1, keepdim=True)
    for length, end in zip((0.3, 0.8), ends):
        assert torch.allclose(unrolled(end) - unrolled(start.x), length * way, atol=1e-6)


@pytest.mark.parametrize("name", ["ellipsoid", "saddle", "quadratic"])
def test_integrated_geodesics_keep_their_speed_and_surface(name):
    surface = make_surface(name, seed=1)
    start = surface.over(torch.zeros(6, surface.dimension, dtype=D))
    places = torch.linspace(0.0, 1.0, 41, dtype=D)[1:]
    path = surface.geodesics(start, normal(6, surface.dimension, seed=2), places.tolist())
    path = torch.cat([start.x[None], path])
    length = (path[1:] - path[:-1]).norm(dim=2).sum(dim=0)
    assert torch.allclose(length, torch.ones(6, dtype=D), atol=1e-3)
    if name == "ellipsoid":
        assert torch.allclose((path / surface.shape.axes).square().sum(dim=2), torch.ones(41, 6, dtype=D), atol=1e-8)
    else:
        flat = path.reshape(-1, surface.width)
        assert torch.allclose(surface.x_over(flat[:, : surface.dimension]), flat, atol=1e-7)


def test_a_basis_beside_any_unit_vector():
    vectors = torch.cat([torch.eye(5, dtype=D), -torch.eye(5, dtype=D), normal(20, 5)])
    vectors = vectors / vectors.norm(dim=1, keepdim=True)
    basis = torch.cat([complement(vectors), vectors[:, :, None]], dim=2)
    assert torch.allclose(basis.transpose(1, 2) @ basis, torch.eye(5, dtype=D), atol=1e-12)


# Zipf


def test_zipf_tokens_follow_their_law(seed):
    found = zipf_tokens(2, 40_000, types=20, exponent=1.2, contraction=0.4, spread=0.1, seed=seed)
    share = torch.bincount(found.token, minlength=20).double() / 40_000
    truth = torch.arange(1, 21, dtype=D) ** -1.2
    truth = truth / truth.sum()
    assert ((share - truth).abs() < 5 * (truth / 40_000).sqrt()).all()
    assert torch.allclose(found.spread, 0.1 * torch.arange(1, 21, dtype=D) ** (1.2 * 0.4))
    of_first = found.coordinates[found.token == 0]
    assert abs(float(of_first.std()) - 0.1) < 5 * 0.1 / math.sqrt(2 * of_first.numel())
    uniform = zipf_tokens(2, 40_000, types=20, exponent=1.2, contraction=0.4, spread=0.1, seed=seed, sampling="uniform")
    counts = torch.bincount(uniform.token, minlength=20).double()
    assert ((counts - 2000).abs() < 5 * math.sqrt(2000)).all() and torch.equal(uniform.spread, found.spread)


def test_zipf_clouds_are_points_of_the_surface():
    surface = make_surface("sphere", width=5, seed=1)
    clouds = zipf_clouds(surface, 300, types=5, exponent=1.0, contraction=0.2, spread=0.05, seed=1)
    tokens = zipf_tokens(2, 300, types=5, exponent=1.0, contraction=0.2, spread=0.05, seed=1)
    assert torch.equal(clouds.token, tokens.token)
    assert torch.equal(clouds.points.x, surface.x_over(tokens.coordinates))


# Bad input


def test_bad_input_is_named():
    with pytest.raises(UnknownNameError, match="did you mean 'sphere'"):
        make_surface("shpere")
    with pytest.raises(UnknownNameError, match="unknown option of sphere 'raduis'; did you mean 'radius'"):
        make_surface("sphere", raduis=1.0)
    with pytest.raises(OptionError, match="saddle needs width 3 or more, got 2"):
        make_surface("saddle", width=2)
    with pytest.raises(OptionError, match="above 0"):
        make_surface("ellipsoid", axes=(1.0, -1.0))
    with pytest.raises(OptionError, match="kappa is a curvature"):
        make_surface("quadratic", kappa=-1.0)
    with pytest.raises(OptionError, match="1 or more, got 0 and 5"):
        make_surface("quadratic", dimension=0)
    surface = make_surface("sphere")
    with pytest.raises(OptionError, match="one point or more"):
        surface.sample(0, seed=0)
    for spread in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(OptionError, match="a length above 0"):
            surface.sample(5, seed=0, spread=spread)
    with pytest.raises(UnknownNameError, match="did you mean 'uniform'"):
        zipf_tokens(2, 5, types=2, exponent=1.0, contraction=0.1, spread=1.0, seed=0, sampling="unifrom")
    with pytest.raises(OptionError, match="tokens and types"):
        zipf_tokens(2, 5, types=0, exponent=1.0, contraction=0.1, spread=1.0, seed=0)
    with pytest.raises(UnknownNameError, match="did you mean 'chords'"):
        choose_experiments(["chord"])


@pytest.mark.parametrize("name", ["circle", "sphere", "ellipsoid", "swiss_roll", "veronese"])
def test_a_cloud_wider_than_its_surface_is_refused(name):
    with pytest.raises(OptionError, match=r"reaches too far.*give a smaller spread"):
        make_surface(name).sample(500, seed=0, spread=3.0)


# Checks and series


def test_a_check_agrees_within_its_error_and_not_beyond():
    def check(value, stderr, truth, **more):
        over = None if stderr is None else "repeats"
        return Check("s", "m", Estimate(value=value, stderr=stderr, n=9, method="m", over=over), truth, **more)

    assert check(1.4, 0.1, 1.0).agrees() and not check(1.6, 0.1, 1.0).agrees()
    assert check(1.6, 0.1, 1.0).agrees(k=7) and check(1.6, 0.1, 1.0).z == pytest.approx(6)
    assert check(1.6, 0.1, 1.0, tolerance=0.2).agrees() and not check(1.75, 0.1, 1.0, tolerance=0.2).agrees()
    assert check(9.0, None, None).agrees() and check(9.0, 0.1, None).z is None
    assert check(1.0, None, 1.0).agrees() and not check(1.001, None, 1.0).agrees() and check(1.0, None, 1.0).z is None
    assert check(1.001, None, 1.0, tolerance=0.01).agrees()
    good, bad = check(1.0, 0.1, 1.0), check(2.0, 0.1, 1.0)
    assert Outcome((good, bad)).off == (bad,)


def test_slopes_and_means_of_repeats():
    x = torch.tensor([1.0, 2.0, 4.0], dtype=D)
    assert torch.allclose(loglog_slopes(x, torch.stack([x**2, 5 * x**-1.5])), torch.tensor([2.0, -1.5], dtype=D))
    with pytest.raises(OptionError, match="positive"):
        loglog_slopes(x, torch.zeros(1, 3, dtype=D))
    estimate = over_repeats(torch.tensor([1.0, 2.0, 3.0], dtype=D), "m")
    assert (estimate.value, estimate.dof) == (2.0, 2.0) and estimate.stderr == pytest.approx(1 / math.sqrt(3))
    with pytest.raises(OptionError, match="two repeats"):
        over_repeats(torch.ones(1, dtype=D), "m")
    one = series_of("s", "n", x, torch.stack([x, 3 * x]), ("a", "b"), law=2 * x)
    assert one.y == (2.0, 4.0, 8.0) and one.law == one.y and one.stderr == pytest.approx((1.0, 2.0, 4.0))
    with pytest.raises(ShapeError, match=r"\[1, 2\] points"):
        Series("s", "n", (1.0, 2.0), (1.0, 2.0), None, "a", "b", law=(1.0,))


# The experiments


@functools.cache
def outcome(name, seed):
    return next(one for one in MINE if one.name == name).run(seed)


@pytest.mark.parametrize("name", [one.name for one in MINE])
def test_an_experiment_agrees_with_its_truths(name, one_seed):
    found = outcome(name, one_seed)
    off = [f"{c.site}, {c.slice}, {c.measure}: {c.estimate.value} for {c.truth}" for c in found.off]
    assert not off
    keys = {(check.site, check.measure, check.slice) for check in found.checks}
    assert len(keys) == len(found.checks) and found.series and found.notes
    assert len({(series.site, series.name, series.slice) for series in found.series}) == len(found.series)


def test_error_bars_mean_something(one_seed):
    """Distances from the truth, in standard errors, are about one, over all checks that have a bar."""
    z = torch.tensor([check.z for one in MINE for check in outcome(one.name, one_seed).checks if check.z is not None])
    assert len(z) > 100
    assert 0.7 < float(z.square().mean().sqrt()) < 1.4


def wrong(checks, factor=1.0, shift=0.0):
    """The same checks beside a truth that is not true."""
    return [replace(check, truth=check.truth * factor + shift) for check in checks]


def named(name, seed, measure, slice=None):
    found = [c for c in outcome(name, seed).checks if c.measure == measure and slice in (None, c.slice)]
    assert found
    return found


@pytest.mark.parametrize("factor", [1.2**2, 0.8**2, -1.0])
@pytest.mark.parametrize("measure", ["chord⁴ in arc² − chord²", "arc⁴ in chord² − arc²"])
def test_chords_reject_a_wrong_curvature_and_a_wrong_sign(one_seed, factor, measure):
    assert not any(check.agrees() for check in wrong(named("chords", one_seed, measure), factor))


def test_chords_reject_another_power(one_seed):
    assert not any(check.agrees() for check in wrong(named("chords", one_seed, "slope of arc² − chord²"), shift=0.05))


def test_far_chords_leave_the_law(one_seed):
    """At half a turn the chord of a circle is its diameter; the law would have it imaginary."""
    far = [s for s in outcome("chords", one_seed).series if s.name == "measured over predicted"]
    assert len(far) == 7
    for series in far:
        assert series.y[0] == pytest.approx(1, abs=0.2)
        assert abs(series.y[-1] - 1) > 0.15
    circle = next(series for series in far if series.site == "circle")
    angle = circle.x[-1]
    assert circle.y[-1] == pytest.approx(12 * (angle**2 - 4 * math.sin(angle / 2) ** 2) / angle**4)


@pytest.mark.parametrize("factor", [1.2**2, 0.8**2])
def test_visible_curvature_rejects_a_wrong_kappa(one_seed, factor):
    assert not any(check.agrees() for check in wrong(named("visible-curvature", one_seed, "prefactor"), factor))
    assert not any(check.agrees() for check in wrong(named("visible-curvature", one_seed, "slope"), shift=0.1))


def test_visible_curvature_levels_off_around_a_circle(one_seed):
    series = next(
        s for s in outcome("visible-curvature", one_seed).series if s.name == "visible curvature beyond the law"
    )
    assert series.law[-1] > 3 * series.y[-1] and series.y[-1] == pytest.approx(3, abs=0.1)
    # Against quadrature over the normal density, at one spread.
    a = torch.linspace(-12, 12, 40_001, dtype=D)
    density = torch.exp(-a.square() / 2)
    truth = float((density * (1 - (0.7 * a).cos()) ** 2).sum() / (density * (0.7 * a).sin() ** 2).sum())
    assert visible.arc_truth(0.7) == pytest.approx(truth)


def test_frequency_hides_curvature_only_with_contraction(one_seed):
    checks = {(c.site, c.measure): c.estimate for c in outcome("frequency-hides-curvature", one_seed).checks}
    hidden = {
        c: checks[f"contraction {c:g}", "visible, zipf sampling"].value
        / checks[f"contraction {c:g}", "visible, uniform sampling"].value
        for c in visible.CONTRACTIONS
    }
    assert hidden[0.0] == pytest.approx(1, abs=0.02)
    assert 0.75 < hidden[0.15] < 0.85 and 0.70 < hidden[0.3] < 0.80
    slopes = [c for c in outcome("frequency-hides-curvature", one_seed).checks if c.measure == "slope in frequency"]
    assert not any(check.agrees() for check in wrong(slopes, shift=0.05))


@pytest.mark.parametrize("slice", ["independent", "within the cloud", "smooth"])
def test_a_gradient_rejects_other_slopes(one_seed, slice):
    for measure in ("tangent slope", "normal slope", "ratio slope"):
        for shift in (-0.5, 0.5):
            assert not any(c.agrees() for c in wrong(named("layer-gradient", one_seed, measure, slice), shift=shift))


def test_a_gradient_rejects_a_wrong_kappa(one_seed):
    known = named("layer-gradient", one_seed, "normal part / its closed form")
    assert not any(check.agrees() for check in [*wrong(known, 1.2), *wrong(known, 0.8)])


def test_a_smooth_signal_breaks_the_ratio_law(one_seed):
    """Where the signal hardly changes across the cloud, a smaller cloud has no smaller ratio and a smaller c."""
    for check in named("layer-gradient", one_seed, "ratio slope", "smooth"):
        assert abs(check.estimate.value) < 0.05 and not replace(check, truth=1.0).agrees()
    c = {(x.site, x.slice): x.estimate.value for x in named("layer-gradient", one_seed, "c at the middle radius")}
    for site in layer_gradient.surfaces(one_seed):
        assert c[site, "smooth"] < 0.1 * c[site, "within the cloud"]


def test_training_takes_the_constant_away_and_keeps_the_slopes(one_seed):
    c = {(x.site, x.slice): x.estimate.value for x in named("learned-gradient", one_seed, "c at the middle radius")}
    ratio = {
        (x.site, x.slice): x.estimate.value for x in named("learned-gradient", one_seed, "ratio at the largest radius")
    }
    for site in layer_gradient.surfaces(one_seed):
        course = [c[site, f"after {steps} updates"] for steps in layer_gradient.TRAINING]
        assert course == sorted(course, reverse=True) and course[-1] < course[0] / 20
        assert ratio[site, "after 0 updates"] < 0.2 and ratio[site, "after 30 updates"] > 1
    for measure in ("tangent slope", "normal slope", "ratio slope"):
        found = [x for x in named("learned-gradient", one_seed, measure) if x.slice != "after 30 updates"]
        assert not any(check.agrees() for check in wrong(found, shift=0.5))


def test_the_gradient_of_the_layer_is_the_gradient_of_its_loss():
    """Against automatic differentiation of the mean cross-entropy at the start, on one cloud."""
    surface = layer_gradient.surfaces(0)["Veronese surface"]
    cloud = layer_gradient.clouds(surface, 3, rows=40)
    target = torch.nn.functional.one_hot(torch.arange(40) % layer_gradient.OUTPUTS, layer_gradient.OUTPUTS).double()
    w = torch.zeros(layer_gradient.OUTPUTS, surface.width, dtype=D, requires_grad=True)
    x = surface.x_over(cloud.tangent[0, 5]) - surface.base.x
    torch.nn.functional.cross_entropy(x @ w.T, target).backward()
    g = torch.full((40, layer_gradient.OUTPUTS), 1 / layer_gradient.OUTPUTS, dtype=D) - target
    everywhere = g.expand(*cloud.z.shape[:2], -1, -1)
    found = layer_gradient.gradient_parts(cloud, everywhere)
    along = w.grad @ surface.base.tangent
    assert float(found.tangent[0, 5]) == pytest.approx(float(along.norm()))
    off = w.grad - along @ surface.base.tangent.T
    assert float(found.normal[0, 5]) == pytest.approx(float(off.norm()), rel=1e-6)


def test_the_counter_example_defeats_the_law(one_seed):
    """More tokens make the ratio larger without bound, and every wrong reading is rejected."""
    ratio = named("counter-example", one_seed, "ratio slope in tokens")
    assert not any(check.agrees() for check in wrong(ratio, shift=-0.5))
    assert not any(check.agrees() for check in wrong(named("counter-example", one_seed, "normal part / t²"), 1.2))
    signed = named("counter-example", one_seed, "c, signed")
    assert not any(check.agrees() for check in wrong(signed, shift=0.01))
    dial = next(s for s in outcome("counter-example", one_seed).series if s.name == "normal / tangent against the dial")
    assert dial.y[0] > 50 * dial.y[-1]


def test_the_registry_knows_every_experiment_once():
    every = experiments()
    assert len({one.name for one in every}) == len(every)
    assert {one.name for one in MINE} <= {one.name for one in every}
    assert [one.name for one in choose_experiments(["counter-example", "chords"])] == ["chords", "counter-example"]
    assert choose_experiments(()) == every
    for one in every:
        assert one.title and one.question.endswith("?") and 0 < one.seconds <= 60
