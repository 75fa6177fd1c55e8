"""Profiles: the numbers are those of the measures on the model's own hidden states; nothing masked leaks in."""

import dataclasses
import math
import statistics
import time

import pytest
import torch
import transformers
from tiny_checkpoints import LAYERS, VOCABULARY, WIDTH, save_decoder

import anisoscope as an
from anisoscope import profiling, sampling
from anisoscope.errors import OptionError, TooFewTokensError, UnknownNameError
from anisoscope.estimate import Estimate
from anisoscope.models.load import load_model
from anisoscope.models.site import Site
from anisoscope.models.sites import discover
from anisoscope.profiling import ProfileOptions, over_batches, profile_model
from anisoscope.rows import Chunk
from anisoscope.sampling import collect_sample
from anisoscope.slices import ALL, NO_MASSIVE, NO_POSITION_0, gathered, kept_columns, massive_dimensions
from anisoscope.stats import precision
from anisoscope.stats.reservoir import Reservoir
from anisoscope.stats.turns import Turns
from anisoscope.text.batches import Batch, token_batches
from anisoscope.text.corpus import load_corpus
from anisoscope.text.tokens import HFTokenizer

OPTIONS = ProfileOptions(tokens=4096, vectors=4096, batch_vectors=1024, sequence_length=32, sequences_per_pass=8)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(save_decoder(tmp_path_factory.mktemp("decoder")))


@pytest.fixture(scope="module")
def batches(loaded):
    corpus = load_corpus(None, max_chars=60_000)
    return token_batches(corpus, HFTokenizer(loaded.tokenizer), sequence_length=32, batch_size=8, tokens=4608)


@pytest.fixture(scope="module")
def found(loaded, batches):
    return profile_model(loaded, batches, OPTIONS, run="r", cell="c")


@pytest.fixture(scope="module")
def states(loaded, batches):
    """The model's own hidden states over the same batches, and where in its sequence each token stood."""
    rows, positions, seen = {}, [], 0
    for batch in batches:
        if seen >= OPTIONS.tokens:
            break
        keep = batch.mask & ~batch.special
        with torch.no_grad():
            out = loaded.model(batch.ids, attention_mask=batch.mask.long(), output_hidden_states=True)
        for layer, states in enumerate(out.hidden_states[:-1]):
            rows.setdefault(f"resid.{layer}", []).append(states[keep])
        rows.setdefault("final_norm", []).append(out.hidden_states[-1][keep])
        positions.append(batch.positions[keep])
        seen += int(keep.sum())
    return {name: torch.cat(parts) for name, parts in rows.items()} | {"positions": torch.cat(positions)}


def estimate(found, site, measure, where=ALL):
    (one,) = [r.estimate for r in found.records if (r.site, r.measure, r.slice) == (site, measure, where)]
    return one


def shuffled(rows, vectors=OPTIONS.vectors):
    """The sample as the profile draws it."""
    return Reservoir.empty(vectors, rows.shape[1], seed=OPTIONS.seed).update(rows).rows


def test_every_site_and_measure_is_there_once(found):
    sites = ["embed", *(f"resid.{i}" for i in range(LAYERS + 1)), "final_norm"]
    want = {(site, measure) for site in sites for measure in OPTIONS.measures}
    have = [(r.site, r.measure) for r in found.records if r.slice == ALL]
    assert set(have) == want and len(have) == len(want)
    assert not found.failures
    assert {(r.run, r.step, r.cell) for r in found.records} == {("r", 0, "c")}
    assert found.info["layers"] == LAYERS and found.info["width"] == WIDTH
    assert found.info["tokens"] >= OPTIONS.tokens


@pytest.mark.parametrize("site", ["resid.0", "resid.2", "final_norm"])
@pytest.mark.parametrize("measure", ["spectral_ratio", "mean_cosine", "isoscore", "effective_rank"])
def test_moment_measures_are_those_of_the_hidden_states(found, states, site, measure):
    sample = shuffled(states[site])
    assert len(sample) == OPTIONS.vectors
    truth = getattr(an, measure)(sample)
    one = estimate(found, site, measure)
    assert one.value == pytest.approx(truth.value, rel=1e-6)
    assert one.n == OPTIONS.vectors
    each = [float(getattr(an, measure)(part)) for part in sample.split(OPTIONS.batch_vectors)]
    assert one.parts["mean over batches"].value == pytest.approx(statistics.fmean(each), rel=1e-6)
    assert one.parts["sd over batches"].value == pytest.approx(statistics.stdev(each), rel=1e-4)
    assert one.parts["sd over batches"].n == 4
    kept = Reservoir.empty(OPTIONS.vectors, WIDTH, seed=OPTIONS.seed).update(states[site])
    bar = getattr(an, measure)(kept.rows[kept.stream_order()]).stderr  # over blocks of the text
    assert one.stderr == (None if bar is None else pytest.approx(bar, rel=1e-4))


@pytest.mark.parametrize("site", ["resid.1", "final_norm"])
def test_neighbour_measures_are_means_over_shuffled_batches(found, states, site):
    each = [an.two_nn(part) for part in shuffled(states[site]).split(OPTIONS.batch_vectors)]
    one = estimate(found, site, "two_nn")
    assert one.value == pytest.approx(statistics.fmean(map(float, each)), rel=1e-6)
    assert one.parts["sd over batches"].value == pytest.approx(statistics.stdev(map(float, each)), rel=1e-5)
    assert one.stderr == pytest.approx(math.sqrt(sum(e.stderr**2 for e in each)) / len(each), rel=1e-5)
    assert "4 batches" in one.over


def test_position_0_is_left_out_of_its_slice(found, states):
    sample, places = shuffled(states["resid.2"]), shuffled(states["positions"][:, None].double())[:, 0]
    rest = sample[places != 0]
    assert 0 < len(rest) < len(sample)
    one = estimate(found, "resid.2", "spectral_ratio", NO_POSITION_0)
    assert one.n == len(rest)
    assert one.value == pytest.approx(float(an.spectral_ratio(rest)), rel=1e-6)
    assert one.stderr is not None  # from the rows of this slice, and no others
    assert one.value != estimate(found, "resid.2", "spectral_ratio").value


def test_turning_angle_follows_the_sequences(found, loaded, batches):
    paths = []
    for batch in list(batches)[:8]:
        with torch.no_grad():
            paths.append(loaded.model(batch.ids, output_hidden_states=True).hidden_states[2])
    keep = [batch.mask & ~batch.special for batch in list(batches)[:8]]
    seen = sum(int(flags.sum()) for flags in keep)
    extra = OPTIONS.tokens - seen
    one = estimate(found, "resid.2", "turning_angle")
    if extra <= 0:
        assert one.value == pytest.approx(float(an.turning_angle(paths, mask=keep)), rel=1e-9)
    assert one.parts["independent points"].value == 120


def test_massive_dimensions_are_found_and_left_out(tmp_path, batches):
    folder = save_decoder(tmp_path / "massive")
    loaded = load_model(folder)
    with torch.no_grad():  # one output dimension of the second block is a hundred times as large as the others
        loaded.model.transformer.h[1].mlp.c_proj.weight[:, 7] += 40
    some = dataclasses.replace(OPTIONS, measures=("spectral_ratio", "mean_cosine"), sites=("resid.1", "resid.2"))
    found = profile_model(loaded, batches, some, run="r")
    assert not [r for r in found.records if r.site == "resid.1" and r.slice == NO_MASSIVE]
    plain = estimate(found, "resid.2", "spectral_ratio")
    without = estimate(found, "resid.2", "spectral_ratio", NO_MASSIVE)
    assert plain.value > 0.9 and without.value < 0.5
    assert any("without 1 of 32 dimensions: [7]" in note for note in without.notes)


def test_massive_dimensions_never_take_all():
    rows = torch.randn(100, 6, generator=torch.Generator().manual_seed(0))
    rows[:, 2] *= 30
    assert massive_dimensions(rows).tolist() == [2]
    assert massive_dimensions(torch.ones(10, 4)).tolist() == []


def test_memory_is_bounded_by_the_sample(loaded, batches):
    few = dataclasses.replace(OPTIONS, vectors=1024, measures=("mean_cosine", "two_nn"))
    found = profile_model(loaded, batches, few, run="r")
    assert {r.estimate.n for r in found.records if r.measure == "mean_cosine" and r.slice == ALL} == {1024}
    assert found.info["vectors"] == 1024 and found.info["tokens"] >= 4096


def test_a_layer_that_gives_nan_is_a_visible_failure_and_the_others_are_measured(tmp_path, batches):
    loaded = load_model(save_decoder(tmp_path / "nan"))
    with torch.no_grad():
        loaded.model.transformer.h[1].mlp.c_proj.bias[3] = torch.nan
    some = dataclasses.replace(OPTIONS, measures=("spectral_ratio", "two_nn"))
    found = profile_model(loaded, batches, some, run="r")
    good = {r.site for r in found.records}
    bad = {f.site for f in found.failures}
    assert good == {"embed", "resid.0", "resid.1"} and bad == {"resid.2", "resid.3", "final_norm"}
    assert all("NaN" in f.error for f in found.failures)


def test_one_failing_measure_does_not_take_the_others_along(loaded, batches):
    @an.register("fails_here", an.Needs(points=True))
    def fails(work):
        raise OptionError("this one always fails")

    try:
        some = dataclasses.replace(OPTIONS, measures=("two_nn", "fails_here"), sites=("resid.1",))
        found = profile_model(loaded, batches, some, run="r")
    finally:
        an.unregister("fails_here")
    assert [r.measure for r in found.records] == ["two_nn"]
    (failure,) = found.failures
    assert failure.measure == "fails_here" and "always fails" in failure.error


def test_the_same_seed_gives_the_same_numbers(loaded, batches, found):
    again = profile_model(loaded, batches, OPTIONS, run="r", cell="c")
    assert [r.estimate.value for r in again.records] == [r.estimate.value for r in found.records]
    other = profile_model(loaded, batches, dataclasses.replace(OPTIONS, seed=1), run="r", cell="c")
    assert estimate(other, "resid.2", "two_nn").value != estimate(found, "resid.2", "two_nn").value


def test_curves(found):
    spectra = {c.site: c for c in found.curves if c.name == "spectrum"}
    scales = {c.site: c for c in found.curves if c.name == "dimension against scale"}
    assert "resid.2" in spectra and "resid.2" in scales
    curve = spectra["resid.2"]
    assert curve.x[0] == 1 and curve.y[0] == pytest.approx(estimate(found, "resid.2", "spectral_ratio").value, rel=1e-9)
    assert sum(curve.y) == pytest.approx(1)  # width 32: no rank is thinned out
    assert scales["resid.2"].x == (1, 2, 4, 8, 16)
    assert scales["resid.2"].y[0] == estimate(found, "resid.2", "gride").value


def test_a_site_that_holds_the_same_as_the_one_before_is_measured_once(tmp_path, batches, monkeypatch):
    """A Llama does nothing to its embedding before the first layer; a GPT-2 adds positions."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=VOCABULARY)).save_pretrained(tmp_path)
    measured, plain = [], profiling._measure_site

    def counted(book, site, *rest):
        measured.append(site)
        plain(book, site, *rest)

    monkeypatch.setattr(profiling, "_measure_site", counted)
    loaded = load_model(tmp_path)
    found = profile_model(loaded, batches, OPTIONS, run="r")
    assert sorted(measured) == ["embed", "final_norm", "resid.1"]
    alone = profile_model(loaded, batches, dataclasses.replace(OPTIONS, sites=("resid.0",)), run="r")
    for kind in ("records", "curves"):
        same = [one for one in getattr(found, kind) if one.site == "resid.0"]
        assert same and same == list(getattr(alone, kind))


def test_sites_that_wait_are_not_measured_once_somebody_stops(loaded, batches, monkeypatch):
    """One of many on one core: the error of whoever is told of progress is not held up by the others."""
    measured = []

    def stop(what, done, total):
        if what == "measuring":
            raise KeyError(what)

    monkeypatch.setattr(profiling, "_measure_site", lambda book, site, *rest: measured.append(site) or time.sleep(0.05))
    with precision.threads(1), pytest.raises(KeyError):
        profile_model(loaded, batches, OPTIONS, run="r", progress=stop)
    assert len(measured) < 4 < len({one.name for one in discover(loaded.model)})


def test_only_the_very_same_is_the_same():
    one = torch.tensor([[1.0, 2.0]])
    assert sampling._same(one, one.clone())
    for other in (one.double(), one.to("meta"), one[:, :1], one + 1):
        assert not sampling._same(one, other)


def test_sites_part_where_they_come_to_differ():
    """Alike in the first batch and the last; each has its own rows and angles all the same."""
    torch.manual_seed(0)
    table = torch.randn(9, 4)
    seen = []

    class Late(torch.nn.Module):
        def forward(self, ids):
            x = self.embed(ids)
            seen.append((x, x + (len(seen) == 1)))
            return self.last(self.layer(seen[-1][1]))

    model = Late()
    model.embed = torch.nn.Embedding.from_pretrained(table)
    model.layer, model.last = torch.nn.Identity(), torch.nn.Identity()
    places = (("embed", None, "embed", "output"), ("resid", 0, "layer", "input"), ("resid", 1, "last", "input"))
    names = ("embed", "resid.0", "resid.1")
    sites = [Site(name, *place) for name, place in zip(names, places, strict=True)]
    ids = torch.randint(9, (3, 2, 5))
    every = torch.ones(2, 5, dtype=torch.bool)
    batches = [Batch(one, every, ~every, torch.arange(5).expand(2, 5)) for one in ids]
    sample = collect_sample(model, batches, sites, tokens=30, vectors=30, turns=True, seed=0, tell=lambda *_: None)
    for place, name in enumerate(names):
        paths = [both[min(place, 1)] for both in seen]
        assert torch.equal(sample.states[name].rows, shuffled(torch.cat(paths).reshape(-1, 4), 30)), name
        turns = Turns.empty()
        for one in paths:
            turns = turns.update(Chunk(one, every, 0, continues=False))
        assert torch.equal(sample.turns[name].sums, turns.sums), name
    assert sample.states["resid.1"] is sample.states["resid.0"] is not sample.states["embed"]


def test_too_few_tokens_are_counted(loaded, batches):
    with pytest.raises(TooFewTokensError, match=r"tokens were measured, a batch needs 8,192"):
        profile_model(loaded, batches, ProfileOptions(batch_vectors=8192, sequence_length=32), run="r")


def test_options_say_what_is_wrong():
    with pytest.raises(OptionError, match="raise those or lower batch_vectors"):
        ProfileOptions(tokens=1000)
    with pytest.raises(UnknownNameError, match="did you mean 'two_nn'"):
        ProfileOptions(measures=("twonn",))
    with pytest.raises(OptionError, match="at least 128"):
        ProfileOptions(batch_vectors=64)
    with pytest.raises(OptionError, match="no measure"):
        ProfileOptions(measures=())


def test_a_batch_without_error_bar_leaves_the_mean_without_one():
    def one(value, stderr):
        return Estimate(value=value, stderr=stderr, over=None if stderr is None else "rows", n=10, method="m")

    assert over_batches([one(1.0, 0.1), one(3.0, None)], 10).stderr is None
    both = over_batches([one(1.0, 0.3), one(3.0, 0.4)], 10)
    assert both.value == 2 and both.stderr == pytest.approx(0.25)


@pytest.mark.parametrize("left_out", [[], [0], [63], [5, 6, 40], list(range(0, 64, 2)), list(range(64))])
def test_columns_are_gathered_whatever_their_runs(left_out):
    rows = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    numbers = kept_columns(64, torch.tensor(left_out, dtype=torch.int64))
    for some in (numbers, numbers.flip(0), numbers.repeat(2)):
        assert torch.equal(gathered(rows, some, 1), rows[:, some])
        assert torch.equal(gathered(rows[:, ::2], some[some < 32], 1), rows[:, ::2][:, some[some < 32]])
    assert torch.equal(gathered(rows, numbers[numbers < 50]), rows[numbers[numbers < 50]])
