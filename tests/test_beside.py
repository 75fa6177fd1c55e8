"""A backward pass in a thread of its own: the same gradients, nothing left behind, measures that begin meanwhile."""

import threading

import pytest
import torch
from test_gradients import batch_of, loss_of
from test_monitor import ALL_KINDS, VARIANTS, same, train
from test_stacked_sharing import asked, looked
from tiny_models import build
from torch.utils._python_dispatch import TorchDispatchMode

from anisoscope.capture import beside
from anisoscope.capture.gradients import gradient_pass
from anisoscope.capture.losses import CausalLoss
from anisoscope.errors import SiteError
from anisoscope.models.sites import discover, select
from anisoscope.monitor import DEFAULT_MEASURES, GRADIENT_MEASURES, Monitor
from anisoscope.monitoring import early, looks
from anisoscope.monitoring.early import Early
from anisoscope.monitoring.measuring import norm_of_squares
from anisoscope.monitoring.stacking import Stacked, States
from anisoscope.schedule import every

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
CUDA = torch.device("cuda")


@pytest.fixture
def forced(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(looks, "can_go_beside", lambda device: True)


def sites_of(model):
    return select(discover(model), ["resid.*", "mlp_in.*"])


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_gradients_are_those_of_one_thread(name, cast):
    model, batch, loss = build(name).eval(), batch_of(4, 8, seed=1), loss_of(name)
    sites, seen = sites_of(model), []

    def meanwhile(states):
        seen.append((threading.current_thread(), {site: one.clone() for site, one in states.items()}))

    with torch.autocast("cpu", dtype=cast or torch.bfloat16, enabled=cast is not None, cache_enabled=False):
        plain = gradient_pass(model, batch, sites, loss)
        found = gradient_pass(model, batch, sites, loss, meanwhile=meanwhile)
    ((thread, states),) = seen
    assert thread is threading.current_thread()
    assert found.loss == plain.loss and found.gradients.keys() == plain.gradients.keys() != set()
    for site in plain.states:
        assert torch.equal(states[site], plain.states[site]) and torch.equal(found.states[site], plain.states[site])
        assert torch.equal(found.gradients[site], plain.gradients[site])


def test_both_go_on_at_once():
    """Neither could end if it had to wait for the other to return."""
    model, batch = build("gpt2").eval(), batch_of(2, 6)
    states_are_there, backward_goes_on = threading.Event(), threading.Event()

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, grad):
            backward_goes_on.set()
            assert states_are_there.wait(30)
            return grad

    def meanwhile(states):
        assert backward_goes_on.wait(30)
        states_are_there.set()

    loss = CausalLoss()
    found = gradient_pass(model, batch, sites_of(model), lambda *of: Waits.apply(loss(*of)), meanwhile=meanwhile)
    assert found.gradients


def test_what_the_thread_is_told_by_this_one():
    def asked_there():
        here = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
        return *here, threading.current_thread().name

    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        on = beside.begun(asked_there, torch.device("cpu"))()
    off = beside.begun(asked_there, torch.device("cpu"))()
    assert on[:3] == (True, torch.float16, False) and off[0] is False and off[2] is True
    assert on[3].startswith("anisoscope-backward")


def test_an_error_of_either_is_raised_and_the_backward_pass_has_ended():
    model, batch, ended = build("gpt2").eval(), batch_of(2, 6), []

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value, bad):
            ctx.bad = bad
            return value.clone()

        @staticmethod
        def backward(ctx, grad):
            threading.Event().wait(0.2)
            ended.append(ctx.bad)
            if ctx.bad:
                raise ArithmeticError("backward")
            return grad, None

    def fails(states):
        raise LookupError("meanwhile")

    loss = CausalLoss()
    for bad, meanwhile, error in ((False, fails, LookupError), (True, lambda states: None, ArithmeticError)):
        with pytest.raises(error):
            gradient_pass(
                model, batch, sites_of(model), lambda *of, bad=bad: Late.apply(loss(*of), bad), meanwhile=meanwhile
            )
        assert ended.pop() is bad
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(SiteError, match="frozen"):
        gradient_pass(model, batch, sites_of(model), loss, meanwhile=fails)


def test_where_a_backward_pass_may_go_beside_measures():
    """Not where it would see another precision, or lose a mode that one thread has."""
    assert beside.can_go_beside(CUDA) and not beside.can_go_beside(torch.device("cpu"))
    try:
        torch.set_float32_matmul_precision("high")
        assert not beside.can_go_beside(CUDA)
    finally:
        torch.set_float32_matmul_precision("highest")
    own = torch.backends.cuda.matmul
    before = own.fp32_precision
    try:
        own.fp32_precision = "tf32"
        assert not beside.can_go_beside(CUDA)
    finally:
        own.fp32_precision = before
    try:
        torch.backends.fp32_precision, own.fp32_precision = "tf32", "none"  # as that of all then
        assert not beside.can_go_beside(CUDA)
    finally:
        torch.backends.fp32_precision, own.fp32_precision = "none", before
    assert beside.can_go_beside(CUDA)
    with TorchDispatchMode():
        assert not beside.can_go_beside(CUDA)
    with torch.overrides.TorchFunctionMode():
        assert not beside.can_go_beside(CUDA)
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        assert not beside.can_go_beside(CUDA)


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_bitwise_the_same(variant, forced):
    options, probe = VARIANTS[variant], batch_of(12, 12, seed=3, padding=4)
    sites = ("embed", "resid.*", "attn_in.*", "mlp_in.*")

    def watch(model, optimizer):
        return Monitor(model, probe=probe, schedule=every(2), sites=sites, gradients=ALL_KINDS, strict=True)

    assert same(train("gpt2", **options), train("gpt2", watch, **options))


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("vectors", [4096, 700])
def test_looks_find_the_same(batches, vectors, monkeypatch):
    """A model wide and a probe long enough for measures of all sites at once, against one site at a time."""
    model, began = build("gpt2"), []
    probe = [batch_of(100 // batches, 12, seed=at, padding=2) for at in range(batches)]
    begin = States.begin.__func__
    monkeypatch.setattr(States, "begin", classmethod(lambda cls, *of: began.append(begin(cls, *of)) or began[-1]))
    found = []
    for beside_measures in (False, True):
        monkeypatch.setattr(looks, "can_go_beside", lambda device, answer=beside_measures: answer)
        options = {"sites": "*", "gradients": ALL_KINDS, "vectors": vectors}
        with Monitor(model, probe=probe, schedule=every(1), strict=True, **options) as monitor:
            monitor.step(0)
        found.append({(one.site, one.measure): one.estimate for one in monitor.last.records})
    assert len(began) == 1 and began[0] is not None
    plain, together = found
    assert plain.keys() == together.keys() and len(plain) > 50
    for key, one in plain.items():
        assert together[key].value == pytest.approx(one.value, rel=1e-5, abs=1e-7), key
        assert together[key].n == one.n and (together[key].stderr is None) == (one.stderr is None), key


def test_states_that_were_begun_before_are_those_that_are_taken():
    views = looked(1)
    without = [type(view)(**{**vars(view), "g": None}) for view in views]
    analysis = asked(views)
    beginning = Early(DEFAULT_MEASURES, {"t": analysis})
    beginning.begin(without)
    states, cells = beginning.taken(), analysis.shared_cells(views)
    assert beginning.taken() is None
    begun = Stacked.begin(views, DEFAULT_MEASURES, GRADIENT_MEASURES, norm_of_squares, cells, states)
    shared = begun.taken()
    assert shared.x is states.x and shared.sums is states.sums and shared.sums.by_cell.cells is cells
    told, plain = analysis.begin_stacked(views, shared)(), asked(views).stacked(views)
    assert told.keys() == plain.keys() != set()
    at_once = Stacked.begin(views, DEFAULT_MEASURES, GRADIENT_MEASURES, norm_of_squares).finish()[0]
    for site, one in begun.finish()[0].items():
        assert {name: value.value for name, value in one.items()} == pytest.approx(
            {name: value.value for name, value in at_once[site].items()}, rel=1e-9
        )


def test_wide_or_many_rows_are_not_begun_early(monkeypatch):
    views = looked(1)
    for name, limit in (("PARTED_WIDTH", views[0].x.shape[1]), ("EARLY_CELLS", 3 * views[0].x.numel() - 1)):
        with monkeypatch.context() as patch:
            patch.setattr(early, name, limit)
            beginning = Early(DEFAULT_MEASURES, {})
            beginning.begin(views)
            assert beginning.states is None
            patch.setattr(early, name, limit + 1)
            beginning.begin(views)
            assert beginning.states is not None
