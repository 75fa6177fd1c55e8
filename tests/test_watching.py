"""Studies under watch: nothing changes in the training, nothing is lost when it is stopped, and failures are told."""

import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from anisoscope.capture.losses import MaskedLoss
from anisoscope.cli import main
from anisoscope.errors import OptionError, RunError, TooFewRowsError, TooFewTokensError, UnknownNameError
from anisoscope.measures.base import Needs, register, unregister
from anisoscope.runs.store import RunReader
from anisoscope.schedule import Last
from anisoscope.train.loop import train
from anisoscope.train.metrics import read_metrics
from anisoscope.train.recipe import load_recipe, override, parse_recipe, recipe_names
from anisoscope.train.watch import MonitorSpec, ScheduleSpec
from anisoscope.watching import study
from anisoscope.watching.schedules import schedule_of, spread
from anisoscope.watching.study import cells_of, check_study, prepare_all, run_study
from anisoscope.watching.watcher import Watcher, loss_of, probe_of

STEPS = 12
RECIPE = parse_recipe(f"""
name: tiny
data: {{max_chars: 40000, tokenizer: {{kind: bpe, vocab_size: 300}}, sequence_length: 16}}
models:
  - {{name: decoder, architecture: gpt2, objective: causal, layers: 1, width: 32, heads: 4, dropout: 0.1}}
  - {{name: encoder, architecture: bert, objective: masked, layers: 1, width: 32, heads: 4, dropout: 0.1}}
  - {{name: unmasked, architecture: llama, objective: masked, layers: 1, width: 32, heads: 4}}
optimisation: {{steps: {STEPS}, batch_size: 8, lr: 0.003, warmup_steps: 4}}
checkpoints: {{every: 4}}
evaluation: {{every: 6, sequences: 16}}
device: cpu
monitor:
  schedule: {{log_spaced: 5}}
  sequences: 24
  measures: [spectral_ratio, two_nn]
  gradient_measures: [mean_cosine]
  sites: [resid.0, attn_in.0]
  tangent: {{proxies: [seminmf], rank: 4, gradients: [activation, update], draws: 19, bins: 2, referee: never}}
""")
LOOKS = [0, 1, 2, 5, 12]


@pytest.fixture(scope="module")
def data():
    return prepare_all(RECIPE)


def change(recipe=RECIPE, **values):
    return override(recipe, {key.replace("__", "."): value for key, value in values.items()})


def only(*names, **values):
    kept = [one for one in RECIPE.describe()["models"] if one["name"] in names]
    return override(RECIPE, {"models": kept} | {key.replace("__", "."): value for key, value in values.items()})


def records(folder):
    """Every number of a run without the clock: place to value, error, count, notes."""
    with RunReader(folder) as reader:
        found = {(r.cell, r.step, r.site, r.measure, r.slice): r.estimate for r in reader.records()}
        failed = {(f.cell, f.step, f.site, f.measure, f.slice): f.error for f in reader.failures()}
    return found, failed


def looked(folder, cell):
    with RunReader(folder) as reader:
        return sorted(probe.step for probe in reader.probes() if probe.cell == cell)


# --- when to look -----------------------------------------------------------------------------------------------------


@given(st.integers(2, 60), st.integers(1, 100_000))
def test_log_spaced_looks_are_as_many_as_asked(looks, steps):
    found = spread(looks, steps)
    assert found[0] == 0 and found[-1] == steps
    assert found == sorted(set(found)) and len(found) == min(looks, steps + 1)


def test_log_spaced_looks_grow_by_a_factor():
    found = spread(20, 100_000)
    late = [b / a for a, b in pairwise(found[8:])]
    assert max(late) / min(late) < 1.1


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"every": 4}, [0, 4, 8, 10]),
        ({"log_spaced": 4}, [0, 1, 3, 10]),
        ({"by_tokens": 300}, [0, 3, 6, 9, 10]),
    ],
)
def test_the_first_and_the_last_step_are_always_looked_at(spec, expected):
    schedule, last, found = schedule_of(ScheduleSpec(**spec), 10), None, []
    for step in range(11):
        if schedule.due(step, 100 * step, 0.0, 0.0, last=last):
            found.append(step)
            last = Last(step, 100 * step)
    assert found == expected


def test_a_resumed_schedule_knows_the_look_before():
    spec = ScheduleSpec(by_tokens=300)
    assert schedule_of(spec, 10).due(4, 400)
    assert not schedule_of(spec, 10, Last(3, 300)).due(4, 400)
    assert schedule_of(spec, 10, Last(3, 300)).due(6, 600)
    assert schedule_of(ScheduleSpec(wall_share=0.5), 10).due(10, 1000, 9.0, 1.0, last=Last(9, 900, 1.0))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"schdule": {"every": 3}}, "unknown key monitor.schdule; did you mean 'schedule'"),
        ({"schedule": {"evry": 3}}, "unknown key monitor.schedule.evry; did you mean 'every'"),
        ({"schedule": {"every": 3, "by_tokens": 3}}, "monitor.schedule: give one of every.* got every and by_tokens"),
        ({"schedule": {}}, "got nothing"),
        ({"schedule": {"wall_share": 2}}, "monitor.schedule.wall_share is 2; input should be less than 1"),
        ({"measures": ["two_n"]}, "monitor: unknown measure 'two_n'; did you mean 'two_nn'"),
        ({"slices": "no massive dimension"}, "unknown slice 'no massive dimension'; did you mean 'no massive dim"),
        ({"gradients": "reeder"}, "unknown kind of gradient 'reeder'; did you mean 'reader'"),
        ({"tangent": {"proxies": ["seminfm"]}}, "unknown proxy 'seminfm'; did you mean 'seminmf'"),
        ({"tangent": {"rnk": 3}}, "unknown key monitor.tangent.rnk; did you mean 'rank'"),
        ({"tangent": {"rank": 33}}, "monitor asks for rank 33, but model 'decoder' is 32 wide"),
        ({"tangent": {"ranks": [4, 64]}}, "monitor asks for rank 64"),
        ({"tangent": {"draws": 3}}, "monitor.tangent.draws is 3; input should be greater than or equal to 19"),
        ({"tangent": {"mode": "melt"}}, "monitor.tangent.mode is 'melt'"),
        (7, "monitor is 7"),
    ],
)  # fmt: skip
def test_what_cannot_be_watched_is_told_with_the_recipe(part, message):
    with pytest.raises(OptionError, match=message):
        override(RECIPE, {"monitor": part})


def test_the_monitor_part_has_short_forms():
    assert override(RECIPE, {"monitor": False}).monitor is None
    assert override(RECIPE, {"monitor": True}).monitor == MonitorSpec()
    assert parse_recipe(_without_monitor()).monitor == MonitorSpec()
    assert override(RECIPE, {"monitor.measures": "two_nn, isoscore"}).monitor.measures == ("two_nn", "isoscore")
    off = override(RECIPE, {"monitor.tangent": False})
    assert off.monitor.tangent is None and override(off, {"monitor.tangent.rank": 3}).monitor.tangent.rank == 3
    assert override(RECIPE, {"monitor.schedule.every": 3}).monitor.schedule == ScheduleSpec(every=3)
    for recipe in (RECIPE, off, override(RECIPE, {"monitor": False})):
        assert study.read_recipe_values(recipe.describe()) == recipe


def _without_monitor():
    values = RECIPE.describe()
    del values["monitor"]
    return yaml.safe_dump(values)


# --- what is seen -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["decoder", "encoder", "unmasked"])
def test_a_watched_training_is_bitwise_the_unwatched_one(tmp_path, data, name):
    (own,) = data.values()
    watcher = Watcher(RECIPE.monitor, strict=True)
    seen = train(RECIPE, name, 3, folder=tmp_path / "seen", data=own, observers=[watcher])
    alone = train(RECIPE, name, 3, folder=tmp_path / "alone", data=own)
    assert seen.notes == alone.notes == () and watcher.problems == () and watcher.looks == len(LOOKS)
    one, two = (load_file(result.checkpoint / "model.safetensors") for result in (seen, alone))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    losses = [[line.get("loss") for line in read_metrics(result.folder)] for result in (seen, alone)]
    assert losses[0] == losses[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    """An undisturbed study of two models."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    news = []
    results = run_study(only("decoder", "unmasked"), folder, data=data, on_news=news.append)
    return folder, results, news


def test_a_study_holds_what_was_promised(whole, data):
    folder, results, news = whole
    assert [(r.cell.name, r.status, r.step, r.looks) for r in results] == [
        ("decoder", "finished", STEPS, 5),
        ("unmasked", "finished", STEPS, 5),
    ]
    found, failed = records(folder)
    assert not failed
    with RunReader(folder) as reader:
        infos = {(probe.cell, probe.step): probe.info for probe in reader.probes()}
        assert study.read_recipe_values(reader.recipe) == only("decoder", "unmasked")
    for cell, kind in (("decoder", "decoder"), ("unmasked", "encoder")):
        assert looked(folder, cell) == LOOKS
        lines = {line["step"]: line for line in read_metrics(folder / "cells" / f"{cell}-s0")}
        for before, step in pairwise(LOOKS):
            value = found[cell, step, "model", "train_loss", "all"]
            expected = [lines[at]["loss"] for at in range(before + 1, step + 1)]
            assert value.value == pytest.approx(math.fsum(expected) / len(expected), rel=1e-12)
            assert value.n == step - before and value.stderr is None
            info = infos[cell, step]
            assert (info["variant"], info["seed"], info["tokens"], info["kind"]) == (cell, 0, step * 128, kind)
            assert (info["width"], info["layers"]) == (32, 1) and info["parameters"] > 10_000
            assert info["loss"] == found[cell, step, "model", "loss", "all"].value
        assert (cell, 0, "model", "train_loss", "all") not in found
        # The change of a step is there at every look but the first, which has none before it.
        updates = {step for (c, step, _, name, _) in found if (c, name) == (cell, "update_norm")}
        assert updates == set(LOOKS[1:])
        assert (cell, STEPS, "attn_in.0", "seminmf.activation.share", "all") in found
        assert (cell, STEPS, "attn_in.0", "seminmf.update.share", "all") in found
        assert (cell, STEPS, "attn_in.0", "seminmf.drift", "all") in found
    assert [n.progress.step for n in news] == [*range(1, STEPS + 1)] * 2
    assert all("dim" in n.geometry and "ratio" in n.geometry for n in news)
    first = results[0]
    assert first.tokens == STEPS * 128 and 0 < first.look_share < 1 and first.look_seconds < first.seconds


def test_the_loss_of_a_look_is_that_of_the_objective(data):
    (own,) = data.values()
    assert isinstance(loss_of(RECIPE.variant("unmasked"), own), MaskedLoss)
    assert not isinstance(loss_of(RECIPE.variant("decoder"), own), MaskedLoss)
    parts = probe_of(own, RECIPE.monitor, 7)
    assert [len(part.ids) for part in parts] == [7, 7, 7, 3]
    assert torch.equal(torch.cat([part.ids for part in parts]), own.probe(24).ids)


def test_slices_of_a_recipe_are_in_its_looks(tmp_path, data):
    recipe = only("decoder", monitor__slices="all, no position 0", monitor__tangent=False, optimisation__steps=4)
    assert recipe.monitor.slices == ("all", "no position 0") and RECIPE.monitor.slices == ("all",)
    run_study(recipe, tmp_path / "run", data=data)
    found, failed = records(tmp_path / "run")
    assert not failed
    for step in looked(tmp_path / "run", "decoder"):
        whole, cut = (found["decoder", step, "attn_in.0", "spectral_ratio", w] for w in ("all", "no position 0"))
        assert whole.n == 24 * 16 and cut.n == 24 * 15 and whole.value != cut.value


def test_seeds_have_cells_of_their_own(tmp_path, data):
    recipe = only("decoder", seeds=[4, 9], optimisation__steps=2, optimisation__warmup_steps=0, monitor__tangent=False)
    run_study(recipe, tmp_path / "run", data=data)
    assert looked(tmp_path / "run", "decoder seed 4") == looked(tmp_path / "run", "decoder seed 9") == [0, 1, 2]
    assert (tmp_path / "run" / "cells" / "decoder-s9" / "step000002").is_dir()
    found, _ = records(tmp_path / "run")
    one, two = (found[f"decoder seed {seed}", 2, "model", "loss", "all"].value for seed in (4, 9))
    assert one != two


def test_default_sites_are_those_that_a_model_has(tmp_path, data):
    """BERT has no final norm: nobody asked for it by name. Asked by name it is an error."""
    recipe = only("encoder", optimisation__steps=1, optimisation__warmup_steps=0, monitor__tangent=False)
    run_study(change(recipe, monitor__sites=None), tmp_path / "run", data=data)
    assert {place[2] for place in records(tmp_path / "run")[0]} == {"model", "resid.0", "resid.1"}
    with pytest.raises(UnknownNameError, match="model encoder: unknown site 'final_norm'"):
        run_study(change(recipe, monitor__sites=["final_norm"]), tmp_path / "other", data=data)
    assert not (tmp_path / "other").exists()


def test_no_monitor_trains_all_the_same(tmp_path, data, whole):
    (result,) = run_study(only("decoder", monitor=False), tmp_path / "run", data=data)
    assert result.status == "finished" and result.looks == 0
    assert result.loss == whole[1][0].loss


# --- stopped and resumed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_at", [2, 12, 19])
def test_a_stopped_study_ends_with_the_same_numbers(tmp_path, data, whole, stop_at):
    """Stopped in the first model before and after checkpoints, between the two, and in the second."""
    recipe, folder = only("decoder", "unmasked"), tmp_path / "run"
    done = []
    halted = run_study(recipe, folder, data=data, on_news=done.append, stop=lambda: len(done) >= stop_at)
    assert len(done) == stop_at
    assert [r.status for r in halted] == (
        ["paused", "not begun"] if stop_at < STEPS else ["finished", "not begun" if stop_at == STEPS else "paused"]
    )
    with pytest.raises(RunError, match="already holds a run; go on with --resume"):
        run_study(recipe, folder, data=data)
    results = run_study(recipe, folder, data=data, resume=True)
    assert [r.status for r in results] == ["finished", "finished"]
    assert records(folder) == records(whole[0])
    for result, expected in zip(results, whole[1], strict=True):
        assert (result.loss, result.val_loss, result.tokens, result.parameters) == (
            expected.loss, expected.val_loss, expected.tokens, expected.parameters,
        )  # fmt: skip
    again = run_study(recipe, folder, data=data, resume=True)  # nothing is left to do
    assert [(r.status, r.loss, r.val_loss, r.looks) for r in again] == [
        (r.status, r.loss, r.val_loss, r.looks) for r in results
    ]


@pytest.mark.parametrize("schedule", ["by_tokens", "every"])
def test_looks_fall_where_they_would_have(tmp_path, data, schedule):
    value = {"by_tokens": 500, "every": 5}[schedule]
    recipe = only("decoder", monitor__schedule={schedule: value}, monitor__tangent=False)
    for name, until in (("whole", STEPS), ("cut", 6)):
        done = []
        run_study(
            recipe, tmp_path / name, data=data, on_news=done.append, stop=lambda done=done, n=until: len(done) >= n
        )
    run_study(recipe, tmp_path / "cut", data=data, resume=True)
    assert looked(tmp_path / "cut", "decoder") == looked(tmp_path / "whole", "decoder")
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


def test_a_crash_between_checkpoints_is_made_good(tmp_path, data, whole):
    """Looks after the newest checkpoint are kept, the way to them is trained again, and what analyses knew is there."""
    recipe, folder = only("decoder", "unmasked"), tmp_path / "run"

    class Crash(BaseException):
        """As a kill: nobody catches it."""

    def crash(news):
        if news.progress.step == 7:  # the newest checkpoint is at 4, the last look at 5
            raise Crash

    with pytest.raises(Crash):
        run_study(recipe, folder, data=data, on_news=crash)
    assert looked(folder, "decoder") == LOOKS[:-1]
    run_study(recipe, folder, data=data, resume=True)
    assert records(folder) == records(whole[0])


def test_a_crash_before_the_first_checkpoint_begins_again(tmp_path, data, whole):
    recipe, folder = only("decoder", "unmasked"), tmp_path / "run"

    def crash(news):
        if news.progress.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study(recipe, folder, data=data, on_news=crash)
    run_study(recipe, folder, data=data, resume=True)
    assert records(folder) == records(whole[0])


def test_another_recipe_is_refused_and_the_difference_named(tmp_path, data, whole):
    folder = whole[0]
    for values, message in (
        ({"optimisation__lr": 0.004}, "optimisation.lr = 0.003, not 0.004"),
        ({"seeds": [1]}, "seeds.0 = 0, not 1"),
        ({"monitor": False}, "begun with monitor"),
        ({"monitor__schedule": {"every": 2}}, "monitor.schedule"),
    ):
        with pytest.raises(RunError, match=message):
            run_study(only("decoder", "unmasked", **values), folder, data=data, resume=True)
    with pytest.raises(RunError, match="models"):
        run_study(only("decoder"), folder, data=data, resume=True)
    with pytest.raises(RunError, match="holds no run to go on with"):
        run_study(RECIPE, tmp_path / "nothing", data=data, resume=True)
    assert not (tmp_path / "nothing").exists()


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_training_that_diverges_is_told_and_the_others_go_on(tmp_path, data):
    recipe = change(monitor__tangent=False, optimisation__warmup_steps=0, optimisation__grad_clip=None)
    models = recipe.describe()["models"][:2]
    # A rate that throws the weights to where squares overflow, in one model only: the other is too plain to mind.
    bad = override(recipe, {"models": models, "optimisation.lr": 1e30})
    results = run_study(bad, tmp_path / "run", data=data)
    assert "diverged" in {r.status for r in results}
    _, failed = records(tmp_path / "run")
    for result in results:
        if result.status == "diverged":
            (error,) = [e for (cell, _, site, m, _), e in failed.items() if (cell, m) == (result.cell.name, "training")]
            assert "training stopped before it" in error and error == result.notes[0]
    assert [r.cell.name for r in results] == ["decoder", "encoder"]


def test_a_training_that_cannot_be_done_is_told_and_the_others_go_on(tmp_path, data):
    """Its folder is taken by a file, which nobody could know beforehand."""

    def block(cell):
        if cell.name == "decoder" and not cell.folder.exists():
            cell.folder.parent.mkdir(parents=True)
            cell.folder.write_text("in the way")

    recipe = only("decoder", "unmasked", monitor__tangent=False, optimisation__steps=4)
    results = run_study(recipe, tmp_path / "run", data=data, on_cell=block)
    assert [r.status for r in results] == ["failed", "finished"]
    _, failed = records(tmp_path / "run")
    assert [place[0] for place in failed] == ["decoder (failed)"]
    (tmp_path / "run" / "cells" / "decoder-s0").unlink()
    results = run_study(recipe, tmp_path / "run", data=data, resume=True)
    assert [r.status for r in results] == ["finished", "finished"]
    assert looked(tmp_path / "run", "decoder") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"monitor__sites": ["resid.9"]}, UnknownNameError, "model decoder: unknown site 'resid.9'; did you mean"),
        ({"monitor__sequences": 2}, TooFewTokensError, "model decoder: the probe gives .* rows, the measures need"),
        ({"monitor__tangent__rank": 20}, OptionError, "rank 20 leaves 12 of 32 .* take a rank of at most 16$"),
        ({"monitor__tangent__ranks": [4, 17]}, OptionError, "rank 17 leaves 15 of 32 .* take a rank of at most 16$"),
        ({"monitor__sequences": 5}, TooFewRowsError, "'tangent': 5 .* 6 are needed: raise monitor.sequences, .* is 5"),
        ({"monitor__vectors": 32}, TooFewTokensError, "gives 32 rows.*: raise monitor.vectors, which is 32"),
        ({"device": "cudda"}, OptionError, "device 'cudda' cannot be used here"),
    ],
)
def test_what_cannot_be_watched_is_told_before_a_file_is_written(tmp_path, data, values, error, message):
    with pytest.raises(error, match=message):
        run_study(change(**values), tmp_path / "run", data=data)
    assert not (tmp_path / "run").exists()


def test_a_probe_that_an_analysis_cannot_use_is_refused_with_the_knob_to_turn(data):
    """The least probe that passes is one that the analysis does use; one sequence or one row less does not pass."""
    (own,) = data.values()

    def refusal(**values):
        recipe = change(only("decoder"), **values)
        with pytest.raises((TooFewRowsError, TooFewTokensError)) as caught:
            check_study(recipe, Path("nowhere"), data)
        return str(caught.value)

    check_study(change(only("decoder"), monitor__sequences=6), Path("nowhere"), data)
    assert refusal(monitor__sequences=5).startswith(
        "model decoder: the probe is too small for the analysis 'tangent': 5 sequences cannot be halved with an error "
        "bar; 6 are needed: raise monitor.sequences, which is 5; "
    )
    few = replace(own, held_out=own.held_out[:5])
    (tokenizer,) = data
    with pytest.raises(
        TooFewRowsError, match=r"only 5 sequences are held out; raise data\.held_out or data\.max_chars"
    ):
        check_study(only("decoder"), Path("nowhere"), {tokenizer: few})
    wide = only("decoder", monitor__sequences=8, monitor__vectors=70, monitor__tangent__rank=4)
    check_study(change(wide, monitor__tangent__rank=16), Path("nowhere"), data)
    wide = override(wide, {"models.0.width": 128, "monitor.tangent.rank": 40})
    with pytest.raises(TooFewRowsError, match=r"hold 3\d rows; rank 40 needs 41: raise monitor\.vectors, which is 70"):
        check_study(wide, Path("nowhere"), data)
    with pytest.raises(TooFewRowsError, match=r"rank 64 needs 65: raise monitor\.sequences, which is 6"):
        check_study(
            change(wide, monitor__sequences=6, monitor__vectors=4096, monitor__tangent__rank=64), Path("nowhere"), data
        )


def test_a_probe_that_is_too_small_is_exit_code_2(tmp_path, data, monkeypatch, capsys):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(only("decoder", monitor__sequences=5).describe()))
    monkeypatch.setattr(sys, "argv", ["anisoscope", "train", "tiny.yaml", "--out", "run"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and "raise monitor.sequences" in error
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_the_least_probe_that_passes_is_used(tmp_path, data):
    values = {"monitor__sequences": 6, "optimisation__steps": 1, "optimisation__warmup_steps": 0}
    run_study(only("decoder", **values), tmp_path / "run", data=data)
    found, failed = records(tmp_path / "run")
    assert not failed
    assert ("decoder", 1, "attn_in.0", "seminmf.activation.ratio", "all") in found


def test_a_look_that_fails_harms_nothing(tmp_path, data, whole):
    """A measure that fails at every look: a failure in its place, the training as ever."""

    @register("broken", Needs(points=True))
    def broken(work):
        raise RuntimeError("no luck")

    try:
        (result,) = run_study(
            only("decoder", monitor__measures=["spectral_ratio", "broken"], monitor__tangent=False),
            tmp_path / "run",
            data=data,
        )
    finally:
        unregister("broken")
    found, failed = records(tmp_path / "run")
    assert result.loss == whole[1][0].loss
    assert {place[3] for place in failed} == {"broken"} and any("no luck" in note for note in result.notes)
    assert ("decoder", STEPS, "resid.0", "spectral_ratio", "all") in found


@pytest.mark.parametrize("name", recipe_names())
def test_the_recipes_of_the_package_can_be_watched(name, tmp_path):
    """Sites, ranks and probes fit the models: checked as before a training, on a small text."""
    recipe = load_recipe(name)
    values = recipe.describe()
    for model in values["models"]:
        model["layers"] = 2  # depth changes no check but the time it takes
        if (model["tokenizer"] or {}).get("vocab_size"):
            model["tokenizer"]["vocab_size"] = 500
    values["data"]["tokenizer"]["vocab_size"] = 500
    small = override(recipe, {**values, "data.max_chars": 400_000, "data.held_out": 0.3, "device": "cpu"})
    assert small.monitor is not None
    check_study(small, tmp_path, prepare_all(small))
    assert len(cells_of(recipe, tmp_path)) == len(recipe.models) * len(recipe.seeds)
