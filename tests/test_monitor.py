"""The monitor: it disturbs nothing, whatever happens to it; what it finds is true, stored and readable meanwhile."""

import contextlib
import copy
import gc
import math
import random
import re
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_capture import hooks_of
from test_gradients import MASK, batch_of, loss_of, vars_of
from tiny_models import LAYERS, VOCABULARY, WIDTH, build, checkpoint, token_ids
from torch import nn

from anisoscope.capture.losses import CausalLoss, MaskedLoss
from anisoscope.errors import (
    AnisoscopeError,
    OptionError,
    RunError,
    ShapeError,
    SiteError,
    SiteSilentError,
    TooFewTokensError,
    UnknownNameError,
)
from anisoscope.estimate import Estimate
from anisoscope.measures.base import Needs, register, unregister
from anisoscope.measures.table import measure
from anisoscope.monitor import DEFAULT_MEASURES, GRADIENT_MEASURES, Monitor
from anisoscope.monitoring.looks import Plan, _Tokens
from anisoscope.monitoring.measuring import begin_slice, norm_of_squares
from anisoscope.monitoring.stacking import Stacked
from anisoscope.monitoring.untouched import untouched
from anisoscope.monitoring.views import SiteView
from anisoscope.runs.records import Curve
from anisoscope.runs.store import RunReader, RunWriter
from anisoscope.schedule import by_tokens, every, log_spaced, wall_share

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
RESID = [f"resid.{layer}" for layer in range(LAYERS + 1)]


@pytest.fixture(scope="module")
def probe():
    return batch_of(12, 12, seed=3, padding=4)


def train(name, watch=None, *, steps=4, accumulate=1, autocast=False, checkpointing=None):
    """A training with everything that could be disturbed: dropout, three sources of random numbers, modes, .grad."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    model = build(name).train()
    model.get_submodule(next(n for n, m in model.named_modules() if isinstance(m, nn.Dropout))).eval()
    if checkpointing is not None:
        checkpoint(model, use_reentrant=checkpointing)
    loss = loss_of(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trace, hooks = [], hooks_of(model)
    with contextlib.ExitStack() as stack:
        monitor = stack.enter_context(watch(model, optimizer)) if watch else None
        for step in range(steps):
            for micro in range(accumulate):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    value = loss(model, batch_of(8, 9, seed=10 * step + micro)) / accumulate
                value.backward()
                trace.append(value.item())
            optimizer.step()
            if step % 2:  # on the other steps gradients stay and are added to
                optimizer.zero_grad()
            if monitor is not None:
                monitor.step(step, tokens=72 * accumulate * (step + 1))
            trace += [(PYTHON, random.random()), np.random.rand(), torch.rand(()).item(), torch.is_grad_enabled()]
            trace += [gc.isenabled(), torch.is_autocast_enabled("cpu"), [m.training for m in model.modules()]]
            trace.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    if checkpointing is None:  # enable_input_require_grads is a hook of the model's own
        assert hooks_of(model) == hooks
    return trace, list(model.parameters()), monitor


PYTHON = "drawn by Python"


def same(one, other, *, python=True):
    """Bitwise. In a ride the type checks of this test run draw from Python's generator, inside the hooks."""

    def equal(a, b):
        if isinstance(a, tuple):
            return not python or a == b
        if isinstance(a, torch.Tensor):
            return torch.equal(a, b)
        return len(a) == len(b) and all(map(equal, a, b)) if isinstance(a, list) else a == b

    return equal(one[0], other[0]) and all(map(torch.equal, one[1], other[1]))


VARIANTS = {
    "plain": {},
    "accumulation": {"accumulate": 3},
    "autocast": {"autocast": True},
    "checkpointing": {"checkpointing": False},
    "re-entrant checkpointing": {"checkpointing": True},
}
ALL_KINDS = ("activation", "reader", "writer", "embedding", "update", "signal")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_training_is_bitwise_the_same_with_the_monitor_on(name, variant, probe, tmp_path):
    options = VARIANTS[variant]
    plain = train(name, **options)

    def probing(model, optimizer):
        sites = ("embed", "resid.*", "attn_in.*", "mlp_in.*")
        return Monitor(
            model, probe=probe, schedule=every(2), run=tmp_path / "probe", sites=sites, loss=loss_of(name),
            gradients=ALL_KINDS, optimizer=optimizer, strict=True,
        )  # fmt: skip

    def riding(model, optimizer):
        return Monitor(
            model, schedule=every(1), run=tmp_path / "ride", sites="resid.*", mode="ride", vectors=70,
            gradients=("activation", "update"), measures=["spectral_ratio", "mean_cosine"], strict=True,
        )  # fmt: skip

    for watch, looks in ((probing, [0, 2]), (riding, [0, 1, 2, 3])):
        watched = train(name, watch, **options)
        assert same(plain, watched, python=watch is probing)
        assert not watched[2].problems
        with RunReader(tmp_path / watched[2].mode) as reader:
            assert [one.step for one in reader.probes()] == looks
            assert not reader.failures() and reader.records(site="resid.1", measure="gradient_norm")


class NaNInEval(nn.Module):
    """Fine in training; in a probe it spoils everything."""

    def forward(self, x):
        return x if self.training else x * math.nan


def broken_measure():
    @register("broken", Needs(points=True))
    def compute(work):
        raise KeyError("a bug of the user's own")


def failures(model, optimizer, probe, folder, how):
    """A monitor that fails in one way or another."""
    options = {"probe": probe, "schedule": every(1), "run": folder, "sites": "resid.*"}
    if how == "measure":
        return Monitor(model, **options, measures=["broken", "mean_cosine"])
    if how == "analysis":

        def meddle(view):
            torch.manual_seed(0), random.seed(0), np.random.seed(0)
            raise RuntimeError("out of memory")

        return Monitor(model, **options, analyses={"meddle": meddle})
    if how == "loss":

        def loss(model, batch):
            model.train()
            raise MemoryError("no room")

        return Monitor(model, **options, loss=loss)
    if how == "nan loss":
        return Monitor(model, **options, loss=lambda model, batch: CausalLoss()(model, batch) * math.nan)
    if how == "no tokens":
        return Monitor(model, **{**options, "schedule": by_tokens(5)}, mode="ride")
    return Monitor(model, **options)


def test_nothing_is_collected_during_a_look(probe):
    """A full pass over a large process takes longer than a look; where nothing is collected anyway it stays so."""
    seen = []

    def loss(model, batch):
        seen.append(gc.isenabled())
        return CausalLoss()(model, batch)

    with Monitor(build("gpt2"), probe=probe, schedule=every(1), loss=loss, strict=True) as monitor:
        monitor.step(0)
        assert gc.isenabled()
        gc.disable()
        try:
            monitor.step(1)
            assert not gc.isenabled()
        finally:
            gc.enable()
    assert seen and not any(seen)


@pytest.mark.parametrize("how", ["measure", "analysis", "loss", "nan loss", "nan activations", "store closed", "full"])
def test_training_is_bitwise_the_same_with_a_failing_monitor(how, probe, tmp_path):
    if how == "measure":
        broken_measure()
    try:

        def watch(model, optimizer):
            monitor = failures(model, optimizer, probe, tmp_path / "run", how)
            if how == "nan activations":
                model.transformer.drop = NaNInEval()
            if how == "store closed":
                monitor._keeper.writer.close()
            if how == "full":
                connection = monitor._keeper.writer._connection
                (pages,) = connection.execute("PRAGMA page_count").fetchone()
                connection.execute(f"PRAGMA max_page_count = {pages}")
            return monitor

        if how == "nan activations":  # its dropout is replaced, so the plain run is one with the same module

            def plain_watch(model, optimizer):
                model.transformer.drop = NaNInEval()
                return contextlib.nullcontext()

            plain, watched = train_quietly(plain_watch), train_quietly(watch)
        else:
            plain, watched = train("gpt2"), train("gpt2", watch)
        assert same(plain, watched)
    finally:
        if how == "measure":
            unregister("broken")
    problems = " | ".join(watched[2].problems)
    expected = {
        "measure": "broken at resid.0 failed: KeyError: .*a bug of the user's own",
        "analysis": "meddle at resid.1 failed: RuntimeError: out of memory",
        "loss": "look at step 0 failed: MemoryError: no room",
        "nan loss": "loss at model failed: NonFiniteError: the loss on the probe is nan",
        "nan activations": "mean_cosine at resid.1 failed: NonFiniteError",
        "store closed": "cannot be written: RunError: .*closed",
        "full": "cannot be written: RunWriteError",
    }[how]
    assert re.search(expected, problems), problems
    with RunReader(tmp_path / "run") as reader:
        stored = reader.failures()
        if how in ("store closed", "full"):
            assert not reader.probes() and "the look at step 3 could not be stored and is lost" in problems
        else:
            assert {one.step for one in stored} == {0, 1, 2, 3}
        if how == "measure":
            assert {one.measure for one in stored} == {"broken"}
            assert len(reader.records(measure="mean_cosine", slice="all")) == 4 * (LAYERS + 1)
        if how == "nan loss":
            assert len(reader.records(measure="mean_cosine")) and not reader.records(measure="gradient_norm")


def train_quietly(watch):
    """``train`` for a model that is changed after the hooks were counted."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    model = build("gpt2").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trace = []
    with watch(model, optimizer) as monitor:
        for step in range(4):
            value = CausalLoss()(model, batch_of(3, 8, seed=step))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None:
                monitor.step(step)
            trace.append(value.item())
    return trace, list(model.parameters()), monitor


def test_an_error_of_the_user_passes_and_nothing_stays(probe, tmp_path):
    model = build("gpt2")
    before = hooks_of(model)
    for mode in ("probe", "ride"):
        monitor = Monitor(model, probe=probe, run=tmp_path / mode, mode=mode)
        with pytest.raises(ZeroDivisionError), monitor:
            assert (hooks_of(model) != before) == (mode == "ride")
            raise ZeroDivisionError
        assert hooks_of(model) == before
        monitor.step(1)
        assert "after the monitor was closed" in monitor.problems[0]
        RunWriter.create(tmp_path / mode, exist="resume").close()  # the lock is free


def test_no_graph_and_no_gradient_stay(probe):
    model = build("gpt2")
    with Monitor(model, probe=probe, schedule=every(1), gradients=ALL_KINDS, sites="*") as monitor, torch.no_grad():
        monitor.step(0)
        assert not torch.is_grad_enabled()
    assert not monitor.problems
    assert all(p.grad is None for p in model.parameters())
    with torch.inference_mode(), Monitor(model, probe=probe, schedule=every(1)) as monitor:
        monitor.step(0)
    assert not monitor.problems


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_live_equals_post_hoc(name, probe, tmp_path):
    """The model saved at a probe's step, loaded again and run over the same tokens, has the same numbers."""
    loss = loss_of(name)
    names = (*DEFAULT_MEASURES, "turning_angle")
    first = loss.inputs(probe), loss.inputs(batch_of(4, 9))

    def watch(model, optimizer):
        class Saving(Monitor):
            def step(self, step, tokens=None):
                super().step(step, tokens)
                if step == 2:
                    model.save_pretrained(tmp_path / "saved")

        with torch.no_grad():  # two dimensions and one position that are much larger than the others
            start = model.transformer.wpe.weight if name == "gpt2" else model.bert.embeddings.LayerNorm.weight
            start[..., [2, 5]] += 40.0 * start.std()
            if name == "gpt2":
                start[0] *= 3.0
        options = {"measures": names, "sites": ("resid.*",), "loss": loss, "strict": True, "slices": SLICES}
        return Saving(model, probe=[probe, batch_of(4, 9)], schedule=every(2), run=tmp_path / "run", **options)

    train(name, watch)
    saved = type(build(name)).from_pretrained(tmp_path / "saved").eval()
    chunks, masks = {}, []
    for batch in first:
        with torch.no_grad():
            out = saved(batch.ids, attention_mask=batch.mask.long(), output_hidden_states=True)
        masks.append(batch.mask)
        for layer, states in enumerate(out.hidden_states[:LAYERS]):
            chunks.setdefault(f"resid.{layer}", []).append(states)
    with RunReader(tmp_path / "run") as reader:
        for site, states in chunks.items():
            rows = torch.cat([s[m] for s, m in zip(states, masks, strict=True)])
            afterwards = measure(rows, DEFAULT_MEASURES) | measure(states, ["turning_angle"], mask=masks)
            for name_, expected in afterwards.items():
                (live,) = reader.records(site=site, measure=name_, step=2, slice="all")
                assert live.estimate.value == pytest.approx(expected.value, rel=1e-6), (site, name_)
                bars = live.estimate.stderr, expected.stderr
                assert bars == (None, None) or bars[0] == pytest.approx(bars[1], rel=1e-4)
            for where, cut, notes in posthoc_slices(rows, torch.cat([b.positions[b.mask] for b in first])):
                found = {r.measure: r.estimate for r in reader.records(site=site, slice=where, step=2)}
                assert set(found) == set(GLOBAL) if notes is not None else not found
                for name_, expected in measure(cut, GLOBAL).items() if notes is not None else ():
                    assert found[name_].value == pytest.approx(expected.value, rel=1e-6), (site, name_, where)
                    assert found[name_].n == len(cut) and found[name_].notes[len(expected.notes) :] == notes
                    bars = found[name_].stderr, expected.stderr
                    assert bars == (None, None) or bars[0] == pytest.approx(bars[1], rel=1e-4)
        assert reader.records(slice=SLICES[1], step=0) and reader.records(slice=SLICES[2], step=0)


SLICES = ("all", "no position 0", "no massive dimensions")
GLOBAL = ("spectral_ratio", "mean_cosine", "isoscore", "effective_rank")


def posthoc_slices(rows, positions):
    """Name, rows and notes of the slices beside all tokens, slowly; notes are None where the slice is everything."""
    yield SLICES[1], torch.stack([row for row, at in zip(rows, positions, strict=True) if at > 0]), ()
    size = [float(np.mean(np.square(column.double().numpy()))) for column in rows.T]
    massive = [at for at, one in enumerate(size) if one > 100 * sorted(size)[(len(size) - 1) // 2]]
    kept = [at for at in range(rows.shape[1]) if at not in massive]
    note = f"without {len(massive)} of {rows.shape[1]} dimensions: {massive}"
    yield SLICES[2], rows[:, kept], (note,) if massive else None


def test_slices_cost_nothing_unless_asked_for_and_fail_in_their_place(probe):
    def found(model, **options):
        with Monitor(model, probe=probe, schedule=every(1), sites="resid.*", **options) as monitor:
            monitor.step(0)
        return monitor

    assert {r.slice for r in found(build("gpt2"), strict=True).last.records} == {"all"}
    sliced = found(build("gpt2"), slices="no position 0", strict=True)
    assert sliced.describe()["slices"] == list(SLICES[:2]), "all tokens are told always"
    assert {r.measure for r in sliced.last.records if r.slice == SLICES[1]} == set(GLOBAL)
    assert sliced.latest("isoscore", "resid.1").n == probe.tokens
    # No position 0 in the probe, no massive dimension in the model: such slices are all tokens, and are not told again.
    later = type(probe)(probe.ids, probe.mask, probe.special, probe.positions + 1)
    with Monitor(build("llama"), probe=later, schedule=every(1), slices=SLICES, strict=True) as monitor:
        monitor.step(0)
    assert {r.slice for r in monitor.last.records} == {"all"}
    model = build("gpt2")
    model.transformer.wpe.weight.data[1, 3] = math.inf
    failed = {(f.measure, f.slice) for f in found(model, slices=SLICES).last.failures if f.site == "resid.0"}
    assert {(name, where) for name in GLOBAL for where in SLICES} <= failed
    with pytest.raises(UnknownNameError, match="did you mean 'no position 0'"):
        found(build("gpt2"), slices=["no positoin 0"])
    with pytest.raises(OptionError, match="global measures, and none is among two_nn"):
        found(build("gpt2"), slices=SLICES, measures=["two_nn"])


def test_slices_of_all_sites_taken_together_are_those_of_each(seed):
    """As on a GPU, where the measures of all sites are begun together."""
    draw, n, positions = torch.Generator().manual_seed(seed), 1024, torch.arange(1024) % 16
    size = torch.linspace(0.5, 2, 64).index_fill(0, torch.tensor([3]), 60.0)
    rows = {"ids": positions, "positions": positions, "sequences": torch.arange(n) // 16, "tokens": n}
    views = [
        SiteView(site=f"resid.{at}", step=0, seed=0, x=torch.randn(n, 64, generator=draw) * size, g=None, **rows)
        for at in range(3)
    ]
    for where, left, width in ((SLICES[1], 960, 64), (SLICES[2], 1024, 63)):
        alone = begin_slice(views, where, GLOBAL)()
        keep = positions > 0 if where == SLICES[1] else slice(None)
        labels = {name: rows[name][keep] for name in ("ids", "positions", "sequences")}
        cut = [replace(view, x=alone.rows[view.site], **labels) for view in views]
        together, _ = Stacked.begin(cut, GLOBAL, (), norm_of_squares).finish()
        for site in (view.site for view in views):
            assert alone.rows[site].shape == (left, width) and set(together[site]) == set(GLOBAL)
            for name, one in measure(alone.rows[site], GLOBAL).items():
                assert together[site][name].value == pytest.approx(one.value, rel=1e-4, abs=1e-6)


def test_the_latest_number_is_that_of_all_tokens(probe):
    """Whatever slices an analysis gives first."""

    def analysis(view):
        return {
            ("share", where): Estimate(value=v, stderr=None, n=3, method="m") for where, v in (("rare", 1), ("all", 2))
        }

    options = {"analyses": {"mine": analysis}, "sites": "resid.1", "measures": ["mean_cosine"], "strict": True}
    with Monitor(build("gpt2"), probe=probe, schedule=every(1), **options) as monitor:
        monitor.step(0)
    assert monitor.latest("share", "resid.1").value == 2


def test_gradient_numbers_are_those_of_backward(probe):
    model = build("gpt2")
    with Monitor(model, probe=probe, schedule=every(1), sites="resid.2", strict=True) as monitor:
        monitor.step(0)
    kept = []
    handle = model.transformer.h[1].register_forward_hook(
        lambda _, a, y: kept.append(y if torch.is_tensor(y) else y[0])
    )
    value = CausalLoss()(model, probe)
    handle.remove()
    (g,) = torch.autograd.grad(value, kept)
    g = g[probe.mask]
    assert monitor.latest("loss").value == pytest.approx(value.item())
    found = monitor.latest("gradient_norm", "resid.2")
    assert found.value == pytest.approx(g.norm().item(), rel=1e-5) and found.over == "sequences"
    moving = g[(g != 0).any(dim=1)]
    for name in GRADIENT_MEASURES:
        expected = measure(moving, [name])[name].value
        assert monitor.latest(f"gradient_{name}", "resid.2").value == pytest.approx(expected, rel=1e-5)


def test_rows_of_zero_gradient_are_left_out_and_told(probe):
    """At the last site of an encoder only masked tokens have a gradient."""
    model = build("bert")
    loss = MaskedLoss(MASK, share=0.3)
    with Monitor(model, probe=probe, schedule=every(1), sites=RESID[-1], loss=loss, strict=True) as monitor:
        monitor.step(0)
    found = monitor.latest("gradient_mean_cosine", RESID[-1])
    still = probe.tokens - loss.predicted(probe)
    assert found.n == loss.predicted(probe)
    assert f"{still:,} of {probe.tokens:,} rows of the gradient are zero and were left out" in found.notes


def test_the_cut_of_the_probe_into_batches_does_not_matter(probe):
    model = build("gpt2")
    cuts = [type(probe)(*(part[rows] for part in vars_of(probe))) for rows in (slice(0, 5), slice(5, 12))]
    found = []
    for batches in (probe, cuts):
        with Monitor(model, probe=batches, schedule=every(1), sites="*", gradients=ALL_KINDS, strict=True) as monitor:
            monitor.step(0)
        found.append({(r.site, r.measure): r.estimate.value for r in monitor.last.records})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 50
    for key, value in found[0].items():
        assert found[1][key] == pytest.approx(value, rel=2e-4), key


def test_a_sample_is_bounded_and_the_same_tokens_at_every_site(probe):
    seen = {}

    def keep(view):
        seen[view.site] = view
        return {}

    model = build("gpt2")
    whole = Monitor(model, probe=probe, schedule=every(1), analyses={"keep": keep}, strict=True)
    whole.step(0)
    everything = dict(seen)
    some = Monitor(model, probe=probe, schedule=every(1), analyses={"keep": keep}, vectors=70, strict=True)
    some.step(0)
    tokens = [(i.item(), p.item(), s.item()) for i, p, s in zip(*labels(everything["resid.0"]), strict=True)]
    assert len(tokens) == probe.tokens and len(set(tokens)) == len(tokens)
    for site, view in seen.items():
        assert len(view.x) == len(view.g) == 70 and view.tokens == probe.tokens
        own = [(i.item(), p.item(), s.item()) for i, p, s in zip(*labels(view), strict=True)]
        at = torch.tensor([tokens.index(one) for one in own])
        assert (at.diff() > 0).all()  # in the order of the text
        assert torch.equal(view.x, everything[site].x[at]) and torch.equal(view.g, everything[site].g[at])
    # The norm of all tokens is estimated from the sample.
    full, sampled = (m.latest("gradient_norm", "resid.1") for m in (whole, some))
    assert abs(full.value - sampled.value) < 5 * sampled.stderr


def labels(view):
    return view.ids, view.positions, view.sequences


def test_a_ride_sees_the_step_itself():
    """Rows and gradients of a ride over three micro-batches, against retained gradients in a copy."""
    model, seen = build("gpt2").train(), {}

    def keep(view):
        seen[view.site] = view
        return {}

    twin = copy.deepcopy(model)
    batches = [batch_of(3, 8, seed=s, padding=2) for s in range(3)]
    sites = ("resid.*", "mlp_in.*")
    torch.manual_seed(0)
    with Monitor(model, mode="ride", schedule=every(1), sites=sites, analyses={"keep": keep}, strict=True) as monitor:
        with torch.no_grad():  # a validation pass in between is none of its business
            CausalLoss()(model.eval(), batch_of(5, 9, seed=77))
        model.train()
        torch.manual_seed(0)
        for batch in batches:
            (CausalLoss()(model, batch) / 3).backward()
        monitor.step(0)
    torch.manual_seed(0)
    states = {"resid.2": [], "mlp_in.1": []}
    hooks = [
        twin.transformer.h[1].register_forward_hook(lambda _, a, y: states["resid.2"].append(y)),
        twin.transformer.h[1].mlp.register_forward_pre_hook(lambda _, a: states["mlp_in.1"].append(a[0])),
    ]
    for batch in batches:
        value = CausalLoss()(twin, batch) / 3
        for kept in states.values():
            kept[-1].retain_grad()
        value.backward()
    for hook in hooks:
        hook.remove()
    masks = [batch.mask for batch in batches]
    for site, kept in states.items():
        assert torch.equal(seen[site].x, torch.cat([s.detach()[m] for s, m in zip(kept, masks, strict=True)]))
        assert torch.equal(seen[site].g, torch.cat([s.grad[m] for s, m in zip(kept, masks, strict=True)]))
    assert torch.equal(seen["resid.2"].ids, torch.cat([batch.ids[batch.mask] for batch in batches]))
    assert torch.equal(seen["resid.2"].positions, torch.cat([batch.positions[batch.mask] for batch in batches]))
    assert seen["resid.2"].sequences.unique().tolist() == list(range(9))


def test_a_ride_under_checkpointing_sees_the_same():
    def rows(**checkpointing):
        seen = {}
        model = build("llama").train()
        if checkpointing:
            checkpoint(model, **checkpointing)

        def keep(view):
            seen[view.site] = view
            return {}

        sites = ("resid.*", "attn_in.*")
        with Monitor(model, mode="ride", schedule=every(1), sites=sites, analyses={"keep": keep}, strict=True) as ride:
            for micro in range(2):
                CausalLoss()(model, batch_of(6, 8, seed=micro)).backward()
            ride.step(0)
        return seen

    plain = rows()
    for reentrant in (False, True):
        found = rows(use_reentrant=reentrant)
        for site, view in plain.items():
            assert torch.equal(found[site].x, view.x) and torch.equal(found[site].g, view.g), (site, reentrant)


def test_hooks_of_a_ride_are_there_in_due_steps_alone():
    model, have = build("gpt2").train(), []
    before = hooks_of(model)
    with Monitor(model, mode="ride", schedule=every(3), sites="resid.*", strict=True) as monitor:
        for step in range(7):
            have.append(hooks_of(model) != before)
            CausalLoss()(model, batch_of(10, 8, seed=step)).backward()
            monitor.step(step)
        assert monitor.last.records[0].step == 6
    assert have == [True, False, False, True, False, False, True]
    # A run that goes on at another step: the first one is looked at only if it is due.
    with Monitor(model, mode="ride", schedule=every(5), sites="resid.*", strict=True) as monitor:
        for step in range(7, 11):
            CausalLoss()(model, batch_of(10, 8, seed=step)).backward()
            monitor.step(step)
        assert monitor.last.records[0].step == 10


def silent_look(model, step, **options):
    with Monitor(model, mode="ride", schedule=every(1), sites="resid.*", **options) as monitor:
        step(model)
        monitor.step(0)
    return monitor


def test_a_site_that_does_not_fire_is_named():
    with pytest.raises(
        SiteSilentError, match=r"'resid.0' \(input of module 'transformer.h.0'\) did not fire: .*compile"
    ):
        silent_look(build("gpt2"), lambda model: None, strict=True)
    with pytest.raises(SiteSilentError, match="no backward pass ran"):
        silent_look(build("gpt2"), lambda model: CausalLoss()(model, batch_of()), strict=True)
    model = build("gpt2")
    embeds = torch.randn(2, 5, WIDTH)
    monitor = silent_look(model, lambda m: m(inputs_embeds=embeds).logits.sum().backward())
    assert "no token ids" in monitor.problems[0]
    assert monitor.last.failures[0].site == "model" and monitor.last.failures[0].measure == "look"


def test_frozen_parts_are_named_and_the_rest_is_measured(probe):
    model = build("gpt2")
    for part in (model.transformer.wte, model.transformer.wpe, model.transformer.h[0]):
        part.requires_grad_(False)
    with Monitor(model, probe=probe, schedule=every(1), sites="resid.*") as monitor:
        monitor.step(0)
    failed = {(one.site, one.measure) for one in monitor.last.failures}
    names = ["gradient_norm", *(f"gradient_{name}" for name in GRADIENT_MEASURES)]
    assert failed == {(site, name) for site in ("resid.0", "resid.1") for name in names}
    assert "frozen" in monitor.last.failures[0].error
    assert monitor.latest("two_nn", "resid.0") and monitor.latest("gradient_norm", "resid.2")
    monitor = silent_look(model, lambda m: CausalLoss()(m, batch_of(9, 9)).backward())
    assert {one.site for one in monitor.last.failures} == {"resid.0", "resid.1"}
    assert "frozen" in monitor.last.failures[0].error


@pytest.mark.parametrize("way", ["wrapped", "in place"])
def test_a_compiled_model_is_probed_as_it_is_written(way, probe):
    def run(watch):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = build("llama").train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if way == "wrapped":
            compiled = torch.compile(model, backend="eager")
        else:
            model.compile(backend="eager")
            compiled = model
        losses = []
        watching = Monitor(compiled, probe=probe, schedule=every(1), sites="resid.*") if watch else None
        for step in range(2):
            value = compiled(token_ids(), labels=token_ids(), use_cache=False).loss
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
            if watching is not None:
                watching.step(step)
        return losses, list(model.parameters()), watching

    plain, watched = run(False), run(True)
    assert plain[0] == watched[0] and all(map(torch.equal, plain[1], watched[1]))
    assert not watched[2].problems and watched[2].latest("two_nn", "resid.1")
    if way == "in place":
        model = build("gpt2")
        model.compile(backend="eager")
        with pytest.raises(OptionError, match="compiled code passes by"):
            Monitor(model, mode="ride")


def test_a_report_can_be_made_while_the_monitor_is_open(probe, tmp_path):
    from anisoscope.views.report import write_report

    def watch(model, optimizer):
        class Reporting(Monitor):
            def step(self, step, tokens=None):
                super().step(step, tokens)
                if step == 2:
                    with RunReader(tmp_path / "run") as reader:
                        write_report(reader, tmp_path / "report.html")

        return Reporting(model, probe=probe, schedule=every(1), run=tmp_path / "run", strict=True)

    train("gpt2", watch)
    text = (tmp_path / "report.html").read_text()
    assert "gradient_norm" in text and "resid.3" in text and "mean_cosine" in text
    with RunReader(tmp_path / "run") as reader:
        assert reader.recipe["monitor"]["mode"] == "probe"
        assert reader.recipe["monitor"]["probe_fingerprints"] == [probe.fingerprint]


def test_costs_are_in_the_store(probe, tmp_path):
    def watch(model, optimizer):
        return Monitor(
            model, probe=probe, schedule=every(2), run=tmp_path / "run", optimizer=optimizer, measures=["mean_cosine"]
        )

    _, _, monitor = train("gpt2", watch, steps=5)
    with RunReader(tmp_path / "run") as reader:
        probes = reader.probes()
    assert [one.step for one in probes] == [0, 2, 4]
    spent = [one.info["seconds_in_looks"] for one in probes]
    assert 0 < spent[0] < spent[1] < spent[2] <= monitor.seconds_spent
    assert spent[2] >= sum(one.info["seconds"] for one in probes)
    assert all(0 < one.info["share_of_wall_clock"] <= 1 for one in probes)
    assert probes[1].info["tokens"] == 216 and probes[1].info["learning_rates"] == [1e-2]
    assert probes[1].info["look_tokens"] == probe.tokens and probes[1].info["weights"].startswith("after")


def test_wall_share_waits_for_its_share_in_a_real_run(probe):
    model, looks = build("gpt2"), []
    with Monitor(model, probe=probe, schedule=wall_share(0.2), measures=["mean_cosine"], sites="resid.1") as monitor:
        for step in range(20_000):
            time.sleep(0.001)
            monitor.step(step)
            if monitor.last.records[0].step == step:
                looks.append((step, time.perf_counter(), monitor.last.info["seconds"]))
            if len(looks) == 3:
                break
    (first, began, cost), (second, later, _), _ = looks
    assert first == 0 and second > 1
    assert later - began > 2 * cost  # a fifth of the time: the first look must be paid for with four times its cost


def test_updates_are_the_change_of_the_step(probe):
    seen = {}

    def keep(view):
        seen[view.site] = view
        return {}

    keep.needs = ("update",)
    model = build("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with Monitor(model, probe=probe, schedule=every(2), analyses={"k": keep}, sites="mlp_in.*", strict=True) as monitor:
        for step in range(3):
            before = model.transformer.h[1].mlp.c_fc.weight.detach().clone()
            CausalLoss()(model, batch_of(seed=step)).backward()
            optimizer.step()
            monitor.step(step)
    (change,) = seen["mlp_in.1"].updates
    assert change.map.path == "transformer.h.1.mlp.c_fc"
    assert torch.equal(change.rows, (model.transformer.h[1].mlp.c_fc.weight.detach() - before).T)
    assert monitor.latest("update_norm", "mlp_in.1").value == pytest.approx(change.rows.norm().item(), rel=1e-6)


def test_analyses_give_estimates_and_curves_by_name_and_slice(probe, tmp_path):
    calls = []

    def analysis(view):
        calls.append((view.site, view.step))
        assert view.x.shape == view.g.shape and len(view.ids) == len(view.sequences) == len(view.x)
        (reader, *_) = view.readers
        torch.testing.assert_close(reader.signal.T @ view.x, reader.rows, rtol=1e-4, atol=1e-6)
        one = Estimate(value=1.0, stderr=None, n=3, method="m")
        curve = Curve(run="", step=0, site="", name="", slice="", x=(1.0,), y=(2.0,))
        return {"share": one, ("share", "rare"): one, "path": curve}

    analysis.needs = ("reader", "signal")
    options = {"schedule": every(2), "sites": "mlp_in.*", "measures": ["mean_cosine"], "cell": "decoder"}
    padless = batch_of(12, 12)
    with Monitor(
        build("gpt2"), probe=padless, run=tmp_path / "run", analyses={"mine": analysis}, **options, strict=True
    ) as monitor:
        monitor.step(0)
        monitor.step(1)
        monitor.step(2)
    assert calls == [(f"mlp_in.{layer}", step) for step in (0, 2) for layer in range(LAYERS)]
    with RunReader(tmp_path / "run") as reader:
        assert len(reader.records(measure="share", slice="rare", site="mlp_in.1")) == 2
        assert [(c.name, c.step, c.cell, c.y) for c in reader.curves(site="mlp_in.0")] == [
            ("path", step, "decoder", (2.0,)) for step in (0, 2)
        ]
    # Names that are taken, and results that are none, cost their own place and not the probe.
    for wrong in ({"mean_cosine": Estimate(value=1.0, stderr=None, n=3, method="m")}, {"odd": 3.0}):
        with Monitor(build("gpt2"), probe=padless, analyses={"mine": lambda view, w=wrong: w}, **options) as monitor:
            monitor.step(0)
        assert {one.measure for one in monitor.last.failures} == {"mine"}
        assert monitor.latest("mean_cosine", "mlp_in.0").n == padless.tokens


@pytest.mark.parametrize("way", ["together", "begin_together", "fails at once", "fails later"])
def test_an_analysis_of_all_sites_at_once(way):
    """It is asked once for all of them; where it fails that is told at each, and the measures stay."""
    one, calls = Estimate(value=1.0, stderr=None, n=3, method="m"), []

    class Analysis:
        def __call__(self, view):
            raise AssertionError("nobody asks site by site")

    def together(views):
        calls.append([view.site for view in views])
        if way.startswith("fails"):
            raise ValueError("not today")
        return {view.site: {"share": one} for view in views}

    analysis = Analysis()
    if way in ("together", "begin_together", "fails at once"):
        analysis.together = together
    if way == "fails at once":
        analysis.begin_together = together
    elif way != "together":
        analysis.begin_together = lambda views: lambda: together(views)
    with Monitor(
        build("gpt2"), probe=batch_of(12, 12), schedule=every(1), sites="resid.*", measures=["mean_cosine"],
        analyses={"mine": analysis},
    ) as monitor:  # fmt: skip
        monitor.step(0)
        last = monitor.last
    sites = [f"resid.{layer}" for layer in range(LAYERS + 1)]
    assert calls == [sites]
    assert [record.site for record in last.records if record.measure == "mean_cosine"] == sites
    told = [record.site for record in last.records if record.measure == "share"]
    failed = [(one.site, one.measure, one.error) for one in last.failures]
    wrong = way.startswith("fails")
    assert told == ([] if wrong else sites)
    assert failed == ([(site, "mine", "ValueError: not today") for site in sites] if wrong else [])


@pytest.mark.parametrize("around", [False, True], ids=["alone", "inside the user's autocast"])
def test_of_model_runs_outside_the_autocast_of_the_look(around, probe):
    """The look is bfloat16, what is told of the model as a whole is not; the user's own autocast is as it was."""
    seen, model = {}, build("gpt2")

    def of_model(step):
        weight = torch.eye(3)
        seen["callback"] = torch.is_autocast_enabled("cpu"), (weight @ weight).dtype, model.training
        exact = float(torch.full((1, 1), 1 + 2**-12) @ torch.ones(1, 1))
        return {"exact": Estimate(value=exact, stderr=None, n=1, method="m")}

    def loss(model, batch):
        seen["look"] = torch.is_autocast_enabled("cpu")
        return CausalLoss()(model, batch)

    options = {"sites": "resid.1", "measures": ["mean_cosine"], "loss": loss, "of_model": of_model}
    monitor = Monitor(model.train(), probe=probe, schedule=every(1), autocast=torch.bfloat16, strict=True, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around), monitor:
        monitor.step(0)
        assert torch.is_autocast_enabled("cpu") == around
    assert seen == {"look": True, "callback": (False, torch.float32, False)}
    assert monitor.latest("exact").value == 1 + 2**-12 and model.training


def test_what_cannot_be_told_of_the_model_costs_its_own_place_alone(probe):
    told = {"lost": RuntimeError("no room"), "kept": Estimate(value=1.0, stderr=None, n=1, method="m")}
    options = {"probe": probe, "schedule": every(1), "sites": "resid.1", "measures": ["mean_cosine"]}
    with Monitor(build("gpt2"), of_model=lambda step: told, **options) as monitor:
        monitor.step(0)
    assert [(one.site, one.measure, one.error) for one in monitor.last.failures] == [
        ("model", "lost", "RuntimeError: no room")
    ]
    assert monitor.latest("kept").value == 1 and monitor.latest("mean_cosine", "resid.1") is not None
    with (
        Monitor(build("gpt2"), of_model=lambda step: told, strict=True, **options) as monitor,
        pytest.raises(RuntimeError, match="no room"),
    ):
        monitor.step(0)


def test_a_run_goes_on_where_it_was(probe, tmp_path):
    model = build("gpt2")
    options = {"probe": probe, "schedule": every(1), "measures": ["mean_cosine"], "sites": "resid.1"}
    with Monitor(model, run=tmp_path / "run", **options) as monitor:
        monitor.step(0), monitor.step(1)
    with pytest.raises(RunError, match="already holds a run"):
        Monitor(model, run=tmp_path / "run", **options)
    with Monitor(model, run=tmp_path / "run", exist="resume", **options) as monitor:
        monitor.step(1), monitor.step(2)
        assert not monitor.problems
    with RunWriter.create(tmp_path / "run", exist="resume") as writer:
        with Monitor(model, run=writer, cell="other", **options) as monitor:
            monitor.step(1)
        assert writer.done() == {("", 0), ("", 1), ("", 2), ("other", 1)}  # and the writer is still open


def test_a_look_that_could_not_be_stored_is_stored_later(probe, tmp_path):
    with RunWriter.create(tmp_path / "run") as writer:
        connection = writer._connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        with Monitor(build("gpt2"), run=writer, probe=probe, schedule=every(1), sites="*") as monitor:
            monitor.step(0)
            assert writer.done() == set() and "cannot be written" in monitor.problems[0]
            connection.execute("PRAGMA max_page_count = 1000000")
            monitor.step(1)
        assert writer.done() == {("", 0), ("", 1)}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"probe": batch_of(2, 5)}, TooFewTokensError, "gives 10 rows, the measures need 64"),
        ({"vectors": 20}, TooFewTokensError, "gives 20 rows"),
        ({"probe": None}, OptionError, "needs probe="),
        ({"probe": []}, OptionError, "needs probe="),
        ({"sites": "rezid.1"}, UnknownNameError, "did you mean 'resid.1'"),
        ({"measures": ["two_n"]}, UnknownNameError, "did you mean 'two_nn'"),
        ({"gradients": ["reeder"]}, UnknownNameError, "did you mean 'reader'"),
        ({"gradients": ["reader"], "sites": "resid.0"}, OptionError, r"choose sites such as 'attn_in\.\*'"),
        ({"mode": "rider"}, UnknownNameError, "did you mean 'ride'"),
        ({"mode": "ride", "gradients": ["reader"]}, OptionError, "use mode='probe'"),
        ({"mode": "ride", "measures": ["turning_angle"]}, OptionError, "whole sequences"),
        ({"probe": batch_of(2, 70)}, ShapeError, "sequences of 70 tokens, the model reads 64"),
        ({"loss": "mse"}, OptionError, "'causal', 'masked' or a function"),
    ],
)
def test_bad_arguments_are_told_before_the_first_step(options, error, words, probe):
    with pytest.raises(error, match=words):
        Monitor(build("gpt2"), **{"probe": probe, **options})


def test_a_probe_of_another_vocabulary(probe):
    wrong = copy.copy(probe)
    ids = probe.ids.clone()
    ids[0, 0] = VOCABULARY
    object.__setattr__(wrong, "ids", ids)
    with pytest.raises(OptionError, match=f"token {VOCABULARY}, the model knows {VOCABULARY}"):
        Monitor(build("gpt2"), probe=wrong)
    assert issubclass(SiteError, AnisoscopeError)


def test_schedules_that_need_what_they_are_not_told_are_told_once(probe):
    model = build("gpt2")
    with Monitor(model, probe=probe, schedule=by_tokens(100), sites="resid.1") as monitor:
        monitor.step(0)
        monitor.step(0)
    assert len(monitor.problems) == 1 and "monitor.step(step, tokens=...)" in monitor.problems[0]
    with Monitor(model, probe=probe, schedule=log_spaced(2), sites="resid.1", measures=["mean_cosine"]) as monitor:
        looked = []
        for step in range(12):
            monitor.step(step)
            looked.append(monitor.last.records[0].step)
    assert sorted(set(looked)) == [0, 1, 3, 10]


def test_what_is_known_of_a_probe_is_that_of_its_own_tokens():
    plan = Plan(nn.Linear(2, 2), (), frozenset(), (), None, vectors=10**6, seed=0)
    one, two, loss = batch_of(2, 8), batch_of(2, 8, seed=1), CausalLoss()
    first = _Tokens.of(plan, [one], loss)
    assert _Tokens.of(plan, [one], loss) is first, "made once"
    other = _Tokens.of(plan, [two], loss)
    assert torch.equal(other.ids, two.ids.flatten().long()) and not torch.equal(other.ids, first.ids)
    assert _Tokens.of(plan, [one, two], loss).measured == 2 * first.measured
    masked = _Tokens.of(plan, [one], MaskedLoss(mask_id=0))
    assert masked.weights != first.weights, "how many tokens a loss predicts is the loss's own"


def test_modes_of_modules_are_their_own_again_whoever_sets_them():
    class Minding(torch.nn.Linear):
        """Knows when its mode is set."""

        def __setattr__(self, name, value):
            if name == "training":
                self.__dict__.setdefault("seen", []).append(value)
            super().__setattr__(name, value)

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Minding(2, 2), torch.nn.Sequential(torch.nn.Dropout()))
    model.train()
    model[0].eval()
    before, told = [one.training for one in model.modules()], len(model[1].seen)
    for _ in range(2):
        with untouched(model):
            assert not any(one.training for one in model.modules())
            model[2].train()  # such as a hook of the user's own
            model[0].train()
        assert [one.training for one in model.modules()] == before
    assert model[1].seen[told:] == [False, True] * 2
