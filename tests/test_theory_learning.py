"""Learning on curved clouds: shares within five standard errors of their laws, wrong laws refused, bounds that hold."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anisoscope.theory import learning, learning_mlp
from anisoscope.theory.learning import Cloud, descend, independent_shares, linear_task
from anisoscope.theory.learning_laws import LinearTask, crossing_step, least_share, pairing
from anisoscope.theory.learning_mlp import Network, first_share
from anisoscope.theory.learning_parts import (
    dealt_share,
    mean_check,
    non_cancellation,
    pooled_share,
    tangent_share,
    unit_inputs,
)
from anisoscope.theory.recovery_laws import normal_form
from anisoscope.theory.surfaces import make_surface

RUNS = {
    "linear": lambda seed: learning.linear(seed, repeats=16, rows=8000),
    "mlp": lambda seed: learning_mlp.two_layers(seed, repeats=5, rows=400, last=64),
}


@cache
def outcome(name, seed):
    return RUNS[name](seed)


def check_of(name, seed, *parts):
    found = outcome(name, seed).checks
    one = [check for check in found if all(part in f"{check.site}: {check.measure}; {check.slice}" for part in parts)]
    assert one, (name, parts)
    return one[0]


def refuses(check, wrong):
    assert check.agrees()
    return not replace(check, truth=wrong).agrees()


def lines_of(name, seed, where=""):
    return {line.site: line for line in outcome(name, seed).series if where in line.slice}


@pytest.mark.parametrize("name", list(RUNS))
def test_measured_within_five_standard_errors(name, one_seed):
    found = outcome(name, one_seed)
    assert found.off == ()
    judged = [one for one in found.checks if one.truth is not None]
    assert len(judged) >= (12 if name == "linear" else 2)
    assert all(one.estimate.stderr > 0 for one in judged)
    places = [(one.site, one.measure, one.slice) for one in found.checks]
    lines = [(one.site, one.name, one.slice) for one in found.series]
    assert len(set(places)) == len(places) and len(set(lines)) == len(lines)


def test_experiments_are_named_apart():
    assert [one.name for one in learning.EXPERIMENTS] == ["learning-linear", "learning-mlp"]
    assert all(one.question.endswith("?") for one in learning.EXPERIMENTS)


def test_the_same_seed_gives_the_same_outcome():
    runs = [learning_mlp.two_layers(seed, repeats=2, rows=50, last=2) for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]
    assert learning.linear(3, repeats=2, rows=128) == learning.linear(3, repeats=2, rows=128)


# Wrong laws


def test_a_gradient_that_keeps_its_direction_is_refused(one_seed):
    """Were all directions to learn at one speed, the first share would stay."""
    first, later = (check_of("linear", one_seed, f"gradient: tangent share, step {step}") for step in (0, 2))
    assert refuses(later, first.truth)


def test_normal_directions_that_never_learn_are_refused(one_seed):
    """Without their own, slow, speeds the change of the weights would turn normal sooner than it does."""
    _, task = linear_task(one_seed)
    speeds, modes = task.normal_modes
    frozen = replace(task)
    object.__setattr__(frozen, "normal_modes", (torch.zeros_like(speeds), modes))
    assert refuses(
        check_of("linear", one_seed, "weight change: tangent share, step 64"), frozen.change_share(64, learning.RATE)
    )


def test_chance_is_refused_for_signals_that_know_nothing(one_seed):
    check = check_of("linear", one_seed, "independent signals")
    assert refuses(check, learning.D / learning.WIDTH)
    late = check_of("linear", one_seed, "at the optimum")
    assert late.truth == check.truth and refuses(late, learning.D / learning.WIDTH)


def test_the_first_gradient_of_the_network_knows_the_trace_of_the_form(seed):
    """The closed form without E[f] tr II is another number, and refused."""
    surface = make_surface("quadratic", dimension=4, normals=8, kappa=1.0, width=24, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(8, *shape, generator=generator, dtype=torch.float64) / 2 for shape in ((4,), ()))
    net = Network.start(6, 24, 8, generator)
    z = torch.randn(6, 20_000, 4, generator=generator, dtype=torch.float64)
    measured = tangent_share(net.backward(unit_inputs(surface, 0.5, z), torch.sin(z @ a.T + b)).first, 4)
    form = normal_form(surface.base) / 2
    traceless = form - form.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None] * torch.eye(4, dtype=torch.float64)
    right, wrong = (mean_check("w", "s", "m", measured - first_share(net, a, b, one), 0.0) for one in (form, traceless))
    assert right.agrees() and not wrong.agrees()


# What was found


def test_the_gradient_turns_normal_and_the_change_follows(one_seed):
    lines = lines_of("linear", one_seed)
    gradient, change, chance = (lines[name].y for name in ("gradient", "weight change", "chance"))
    assert gradient[0] > 0.9 and gradient[-1] < 1e-3 < chance[0]
    assert list(gradient) == sorted(gradient, reverse=True) and list(change) == sorted(change, reverse=True)
    assert change[-1] < chance[0] < change[5]
    assert 2 < check_of("linear", one_seed, "step that turns half").estimate.value < 8


def test_independent_signals_stay_at_the_share_of_x(one_seed):
    line = lines_of("linear", one_seed)["independent signals"]
    z = [(y - law) / error for y, law, error in zip(line.y, line.law, line.stderr, strict=True)]
    assert max(abs(one) for one in z) < 5


def test_the_network_turns_too_and_even_targets_start_there(one_seed):
    for site in ("target waves, kappa * spread = 0.5", "its input"):
        line = lines_of("mlp", one_seed, site)["gradient"]
        assert line.y[0] > 0.75 and min(line.y) < 0.35
    even, odd = (check_of("mlp", one_seed, f"target {task}", "non-cancellation") for task in ("even", "waves"))
    assert even.estimate.value < 0.1 < 0.2 < odd.estimate.value
    assert lines_of("mlp", one_seed, "even waves")["gradient"].y[0] < 0.3


@pytest.mark.parametrize("name", list(RUNS))
def test_every_gradient_holds_at_least_what_the_proposition_leaves(name, one_seed):
    for where in {line.slice for line in outcome(name, one_seed).series}:
        lines = lines_of(name, one_seed, where)
        least, gradient = lines["least share by the proposition"].y, lines["gradient"].y
        assert all(low <= share + 1e-12 for low, share in zip(least, gradient, strict=True))
        assert least[0] > 0


# The laws and parts, against other ways to the same number


def test_pairing_is_a_moment_of_normal_numbers(seed):
    generator = torch.Generator().manual_seed(seed)
    forms = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
    forms = forms + forms.mT
    z = torch.randn(2_000_000, 3, generator=generator, dtype=torch.float64)
    q = torch.einsum("mij,ni,nj->nm", forms, z, z)
    error = (q[:, 0] * q[:, 1]).std() / len(q) ** 0.5
    assert abs(float((q[:, 0] * q[:, 1]).mean() - pairing(forms[:1], forms[1:])[0, 0])) < 5 * float(error)


def test_descent_on_exact_moments_is_the_law(seed):
    """With the moments of infinitely many rows in place of a sample's, measured and law are one."""
    _, task = linear_task(seed)
    d, b = learning.D, task.form.shape[0]
    inputs = torch.eye(d + b, dtype=torch.float64)
    speeds, modes = task.normal_modes
    inputs[d:, d:] = modes @ speeds.diag() @ modes.T
    both = torch.cat([task.tangent_moment, task.normal_moment], dim=1)
    empty = torch.zeros(1, 1, d + b, dtype=torch.float64)
    cloud = Cloud(empty, torch.zeros(1, 1, len(both), dtype=torch.float64), inputs[None], both[None])
    for step, (gradient, weights) in descend(cloud, 0.4, (0, 3, 17, 200)).items():
        share = task.gradient_share(step, 0.4)
        assert float(tangent_share(gradient, d)) == pytest.approx(share, rel=1e-7, abs=1e-12)
        if step:
            assert float(tangent_share(weights, d)) == pytest.approx(task.change_share(step, 0.4), rel=1e-7)
    assert task.first_ratio == pytest.approx(math.sqrt(1 / task.gradient_share(0, 0.4) - 1))


def test_the_first_ratio_is_linear_in_spread_and_curvature(seed):
    _, task = linear_task(seed)
    assert replace(task, spread=3.0).first_ratio == pytest.approx(3 * task.first_ratio)
    bent = LinearTask(task.form * 2, task.slope, task.bend, task.spread)
    assert bent.first_ratio == pytest.approx(2 * task.first_ratio)
    assert bent.visible_curvature == pytest.approx(4 * task.visible_curvature)


def test_a_flat_or_purely_linear_task_never_turns(seed):
    _, task = linear_task(seed)
    linear = LinearTask(task.form, task.slope, 0 * task.bend, 1.0)
    assert linear.gradient_share(50, 0.4) == 1.0
    assert linear.turning_step(0.4, most=50) == math.inf
    assert crossing_step([0.9, 0.6, 0.5]) == math.inf
    assert crossing_step([0.75, 0.25]) == pytest.approx(0.5)
    assert crossing_step([0.75, 0.0]) < 0.01  # a share of exactly zero has no log-odds, and still a place


def test_the_network_descends_as_autograd_does(seed):
    generator = torch.Generator().manual_seed(seed)
    x, f = (torch.randn(2, 30, k, generator=generator, dtype=torch.float64) for k in (7, 3))
    net = Network.start(2, 7, 3, generator)
    for _ in range(3):
        back = net.backward(x, f)
        leaves = [one.clone().requires_grad_() for one in (net.first, net.bias, net.last, net.shift)]
        y = torch.tanh(x @ leaves[0].mT + leaves[1]) @ leaves[2].mT + leaves[3]
        ((y - f).square().sum(dim=2).mean(dim=1) / 2).sum().backward()
        after = net.stepped(back, 0.1)
        for leaf, new in zip(leaves, (after.first, after.bias, after.last, after.shift), strict=True):
            torch.testing.assert_close(new, leaf.detach() - 0.1 * leaf.grad)
        torch.testing.assert_close(back.first, leaves[0].grad)
        net = after


def test_inputs_have_tangent_columns_first_in_units_of_the_spread(seed):
    surface = make_surface("quadratic", dimension=3, normals=4, kappa=1.0, width=10, seed=seed)
    z = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = unit_inputs(surface, 0.2, z)
    torch.testing.assert_close(x[..., :3], z)
    half = unit_inputs(surface, 0.1, z)
    torch.testing.assert_close(x[..., 3:], 2 * half[..., 3:])  # the normal part bends with the square


@given(st.integers(0, 10_000))
def test_the_least_share_holds_for_any_signal_on_any_rows(seed):
    generator = torch.Generator().manual_seed(seed)
    d = 1 + seed % 3
    x = torch.randn(1, 6, 5, generator=generator, dtype=torch.float64)
    x[..., d:] *= 10.0 ** (seed % 5 - 2)
    g = torch.randn(1, 6, 2, generator=generator, dtype=torch.float64) if seed % 2 else x[..., -2:]
    gradient = g.mT @ x / 6
    cosine = non_cancellation(gradient, g.square().sum(dim=2).mean(dim=1), x, d)
    visible = x[..., d:].square().sum() / x[..., :d].square().sum()
    assert float(least_share(cosine, visible)) <= float(tangent_share(gradient, d)) * (1 + 1e-9) + 1e-12


def test_dealt_signals_of_mean_zero_hold_the_share_about_the_mean(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 400, 6, generator=generator, dtype=torch.float64) + 1.0
    g = torch.randn(1, 400, 3, generator=generator, dtype=torch.float64)
    g = g - g.mean(dim=1, keepdim=True)
    centred = (x - x.mean(dim=1, keepdim=True)).square().sum(dim=(0, 1))
    assert float(dealt_share(x, g, 2)) == pytest.approx(float(centred[:2].sum() / centred.sum()), rel=1e-9)


def test_small_parts():
    zero = torch.zeros(2, 3, 4, dtype=torch.float64)
    assert tangent_share(zero, 2).tolist() == [0.0, 0.0]
    pooled = pooled_share(*(torch.tensor(one, dtype=torch.float64) for one in ([1.0, 2.0, 4.0], [2.0, 4.0, 8.0])), "m")
    assert pooled.value == 0.5 and pooled.stderr == pytest.approx(0.0, abs=1e-15) and pooled.n == 3
    shares = independent_shares(torch.ones(2, 10, 24, dtype=torch.float64), 3, torch.Generator().manual_seed(0))
    torch.testing.assert_close(shares, torch.full((2, 3), 4 / 24, dtype=torch.float64))
