"""A backward pass in a thread of its own: the same gradients, nothing left behind, measures that begin meanwhile."""

import gc
import threading
import weakref
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import pytest
import torch
from test_gradients import batch_of, loss_of, vars_of
from test_monitor import ALL_KINDS, VARIANTS, same, train
from test_stacked_sharing import asked, looked, parted
from tiny_models import build
from torch.utils._python_dispatch import TorchDispatchMode

from anisoscope.capture import beside
from anisoscope.capture.gradients import gradient_pass
from anisoscope.capture.losses import CausalLoss
from anisoscope.errors import SiteError
from anisoscope.measures.later import one_thread_each
from anisoscope.models.sites import discover, select
from anisoscope.monitor import DEFAULT_MEASURES, GRADIENT_MEASURES, Monitor
from anisoscope.monitoring import early, looks
from anisoscope.monitoring.early import Early
from anisoscope.monitoring.measuring import Book, What, enter_look, norm_of_squares
from anisoscope.monitoring.stacking import Stacked, States
from anisoscope.monitoring.views import Look
from anisoscope.schedule import every
from anisoscope.stats import precision

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
CUDA = torch.device("cuda")


@pytest.fixture
def forced(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(looks, "can_go_beside", lambda device: True)


def passing(act):
    """The loss of a model, whose backward pass begins with ``act``."""

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, grad):
            act()
            return grad

    return lambda model, batch: Node.apply(CausalLoss()(model, batch))


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

    def backward():
        backward_goes_on.set()
        assert states_are_there.wait(30)

    def meanwhile(states):
        assert backward_goes_on.wait(30)
        states_are_there.set()

    found = gradient_pass(model, batch, sites_of(model), passing(backward), meanwhile=meanwhile)
    assert found.gradients


def test_what_the_thread_is_told_by_this_one():
    kinds = ("cpu", "cuda")

    def asked():
        return [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]

    def asked_there():
        return asked(), torch.is_autocast_cache_enabled(), threading.current_thread().name

    for kind in kinds:
        before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        try:  # as ``torch.autocast`` does it, which refuses CUDA where there is none
            torch.set_autocast_enabled(kind, True)
            torch.set_autocast_dtype(kind, torch.float16)
            here, on = asked(), beside.begun(asked_there)()
        finally:
            torch.set_autocast_enabled(kind, before[0])
            torch.set_autocast_dtype(kind, before[1])
        assert on[0] == here and (True, torch.float16) in here and not on[1]
        assert on[2].startswith("anisoscope-backward")
        assert beside.begun(asked_there)()[0] == asked() != here


def test_casts_of_a_training_inside_an_autocast_are_kept():
    """Its cache is one for all threads, and emptied when the outermost autocast of any of them ends."""
    weight, x = torch.nn.Parameter(torch.randn(4, 4)), torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = x @ weight
        with torch.no_grad():
            weight += 1  # the cast of it is an old one now, as the training has it
        beside.begun(lambda: None)()
        assert torch.equal(x @ weight, before)


def test_an_error_of_either_is_raised_and_the_backward_pass_has_ended():
    model, batch, ended = build("gpt2").eval(), batch_of(2, 6), []

    def late(bad):
        threading.Event().wait(0.2)
        ended.append(bad)
        if bad:
            raise ArithmeticError("backward")

    def fails(states):
        raise LookupError("meanwhile")

    sites, idle = sites_of(model), lambda states: None
    for bad, meanwhile, error in ((False, fails, LookupError), (True, idle, ArithmeticError)):
        with pytest.raises(error):
            gradient_pass(model, batch, sites, passing(partial(late, bad)), meanwhile=meanwhile)
        assert ended.pop() is bad
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:

        def interrupted(task, timeout=None):
            raise KeyboardInterrupt

        patch.setattr(Future, "result", interrupted)
        gradient_pass(model, batch, sites, passing(partial(late, False)), meanwhile=idle)
    assert ended == [False], "it is waited for all the same"
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(SiteError, match="frozen"):
        gradient_pass(model, batch, sites, CausalLoss(), meanwhile=fails)


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
    options, probe = VARIANTS[variant], batch_of(60, 12, seed=3, padding=2)
    sites, begun = ("embed", "resid.*", "attn_in.*", "mlp_in.*"), []

    def watch(model, optimizer):
        monitor = Monitor(model, probe=probe, schedule=every(2), sites=sites, gradients=ALL_KINDS, strict=True)
        begun.append(monitor)
        return monitor

    assert same(train("gpt2", **options), train("gpt2", watch, **options))
    assert begun[0].last.info["vectors"] > 512, "enough to be measured together"


@pytest.mark.parametrize("fails", ["backward", "meanwhile"])
def test_nothing_stays_of_a_look_that_fails(fails, forced, monkeypatch):
    """No collector of garbage has to come: it waits during looks, and a graph is large."""
    model, probe, graphs = build("gpt2"), batch_of(60, 12, seed=3), []

    def backward():
        if fails == "backward":
            raise ArithmeticError("backward")

    def loss(model, batch):
        value = passing(backward)(model, batch)
        graphs.append(weakref.ref(value))
        return value

    def no(*asked):
        raise LookupError("meanwhile")

    if fails == "meanwhile":
        monkeypatch.setattr(States, "begin", no)
    gc.collect()
    gc.disable()
    try:
        with Monitor(model, probe=probe, schedule=every(1), sites="resid.*", loss=loss) as monitor:
            monitor.step(0)
        assert f"failed: {'ArithmeticError' if fails == 'backward' else 'LookupError'}" in monitor.problems[0]
        assert len(graphs) == 1 and graphs[0]() is None
    finally:
        gc.enable()


def test_a_look_without_room_for_both_takes_one_after_the_other(forced, monkeypatch):
    model, probe, held, passes = build("gpt2"), batch_of(60, 12, seed=3), [], []
    begin = States.begin.__func__

    def kept(cls, *of):
        found = begin(cls, *of)
        held.append(weakref.ref(found.x))
        return found

    def backward():
        if len(passes) == 2:
            assert all(one() is None for one in held), "what was begun is not held any longer"
        elif passes.append(1) is None and len(passes) == 2:
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(States, "begin", classmethod(kept))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    batches = [type(probe)(*(part[rows] for part in vars_of(probe))) for rows in (slice(0, 20), slice(20, 60))]
    found = []
    for some in (CausalLoss(), passing(backward)):
        with Monitor(model, probe=batches, schedule=every(1), sites="resid.*", loss=some, strict=True) as monitor:
            monitor.step(0)
        found.append({(one.site, one.measure): one.estimate.value for one in monitor.last.records})
        assert monitor.last.info["vectors"] == probe.tokens
    assert len(held) == 2 and len(passes) == 2
    assert found[1] == pytest.approx(found[0], rel=1e-5, abs=1e-7)


def test_no_switch_that_a_backward_pass_would_see_is_turned(monkeypatch):
    """Such as the search for neighbours of few rows turns, where there are tensor cores."""
    seen = []

    def searching(cls, *of):
        with precision.on_tensor_cores():
            seen.append(torch.get_float32_matmul_precision())

    monkeypatch.setattr(States, "begin", classmethod(searching))
    with Early(DEFAULT_MEASURES, {}) as beginning:
        beginning.begin(looked(1))
        assert seen == ["highest"]
    States.begin()
    assert seen == ["highest", "high"] and torch.get_float32_matmul_precision() == "highest"


def test_threads_keep_to_their_cores_until_a_look_ends():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Early(DEFAULT_MEASURES, {}) as beginning:
            device = one_thread_each(torch.device("cuda"))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(early, "one_thread_each", lambda of: device)
                beginning.begin(looked(1))
            assert torch.get_num_threads() == 1 and beginning.states is not None
        assert torch.get_num_threads() == 2 and beginning.states is None
    finally:
        torch.set_num_threads(before)


def test_an_analysis_that_cannot_say_yet_is_waited_for():
    class Asks:
        """It wants cells that depend on gradients, and others at each call."""

        def __init__(self):
            self.asked = 0

        def shared_cells(self, views):
            self.asked += 1
            assert views[0].g.shape == views[0].x.shape
            self.cells = parted(len(views[0].x))
            return self.cells

        def begin_together(self, views, shared=None):
            self.shared = shared
            return dict

        def __call__(self, view):
            return {}

    views, analysis = looked(1), Asks()
    beginning = Early(DEFAULT_MEASURES, {"t": analysis})
    beginning.begin([replace(view, g=None) for view in views])
    assert beginning.states is None and analysis.asked == 1
    beginning.begin(views)
    cells = analysis.cells
    states = beginning.taken()
    assert states.cells is cells
    beginning.states = states
    what = What(DEFAULT_MEASURES, GRADIENT_MEASURES, {"t": analysis}, 0)
    enter_look(Book("r", 1, ""), Look(tuple(views), 1.0, 10), what, beginning)
    assert analysis.asked == 2 and analysis.shared.sums.by_cell.cells is cells


def test_states_are_measured_where_gradients_have_no_room(monkeypatch):
    views = looked(1)
    states = States.begin(views, DEFAULT_MEASURES, None)

    def full(*of):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("anisoscope.monitoring.stacking._begin_gradients", full)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    begun = Stacked.begin(views, DEFAULT_MEASURES, GRADIENT_MEASURES, norm_of_squares, None, states)
    found, gradients = begun.finish()
    assert set(found) == {view.site for view in views} and gradients == {} and begun.taken() is None
    assert Stacked.begin(views, DEFAULT_MEASURES, GRADIENT_MEASURES, norm_of_squares).finish() == ({}, {})


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
    without = [replace(view, g=None) for view in views]
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
