"""What is asked of a device now and read later: the answer is the same, and nobody waits for it before time."""

from dataclasses import dataclass

import pytest
import torch

from anisoscope.measures.later import answered_later
from anisoscope.monitoring.tangents_told import told_by_type
from anisoscope.tangent import stacked_fits
from anisoscope.tangent.stacked import Layout
from anisoscope.tangent.stacked_fits import Centred, kmeans_starts, seminmf_fits
from anisoscope.tangent.stacked_types import Types, type_sums
from anisoscope.tangent.units import Halves
from anisoscope.text.frequency import TokenCounts, frequency_bins


@dataclass
class Late:
    """An answer that comes after it was looked for so many times, and remembers whether it was waited for."""

    going: bool
    looks: int
    waited: bool = False

    def there(self):
        self.looks -= 1
        return self.looks < 0

    def get(self):
        self.waited = self.looks > 0
        return self.going


def watched(monkeypatch, settles_at, late):
    """Iterations until it is known that all have settled, and what was asked."""
    asked = []

    def ask(question):
        asked.append(Late(bool(question), late))
        return asked[-1]

    monkeypatch.setattr(stacked_fits, "answered_later", ask)
    watch = stacked_fits._Watch()
    for iteration in range(1, 100):
        if watch.settled(torch.tensor([iteration < settles_at, False]), iteration):
            return iteration, asked
    raise AssertionError("never")


@pytest.mark.parametrize(
    ("settles_at", "late", "stops", "waits"),
    [
        (1, 0, 2, 0),  # at the first question
        (2, 0, 2, 0),
        (3, 0, 4, 0),
        (7, 0, 8, 0),
        (1, 1, 3, 0),  # one iteration more, in which the answer came
        (1, 3, 5, 0),
        (3, 1, 5, 0),
        (1, 100, 8, 1),  # it never comes by itself, and is waited for
        (3, 100, 8, 2),  # what was asked first is out of date, and is asked again
        (9, 100, 16, 3),
        (17, 0, 18, 0),
    ],
)
def test_fits_stop_as_soon_as_it_is_known_that_all_have_settled(monkeypatch, settles_at, late, stops, waits):
    found, asked = watched(monkeypatch, settles_at, late)
    assert found == stops
    assert sum(one.waited for one in asked) == waits


def test_what_is_told_of_fits_does_not_depend_on_when_the_device_was_asked(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 400, 24, generator=generator) + torch.randn(3, 1, 24, generator=generator)
    rows[1] = rows[1].abs()  # sites that settle at different times
    centred = Centred.of(rows, (torch.arange(200), torch.arange(200, 400)))
    start = kmeans_starts(centred, 4, 0)
    results = []
    for ask, check in ((1, 8), (2, 8), (1000, 8), (1000, 64)):
        monkeypatch.setattr(stacked_fits, "ASK_EVERY", ask)
        monkeypatch.setattr(stacked_fits, "CHECK_EVERY", check)
        results.append(seminmf_fits(centred, start))
    first = results[0]
    assert len(set(first.facts["iterations"].tolist())) > 1
    for other in results[1:]:
        assert torch.equal(first.basis, other.basis) and torch.equal(first.settled, other.settled)
        assert all(torch.equal(first.facts[name], other.facts[name]) for name in first.facts)


def test_an_answer_of_the_cpu_is_there_at_once():
    for value in (True, False):
        answer = answered_later(torch.tensor(value))
        assert answer.there()
        assert answer.get() is value


def test_what_is_told_of_token_types_is_told_of_each_site_whatever_the_others_are():
    generator = torch.Generator().manual_seed(0)
    n, vocabulary = 800, 60
    ids = (torch.rand(n, generator=generator) ** 3 * vocabulary).long()
    counts = TokenCounts.of(ids, vocabulary)
    bins = frequency_bins(counts, 4)
    types = Types.of(ids, bins, counts, 19, 0, torch.device("cpu"))
    labels = [str(at) for at in range(len(bins))]
    layout = Layout.of(Halves.of(torch.arange(n) // 20, 0, torch.device("cpu")), bins.bin_of(ids), labels)
    x = torch.randn(4, n, 12, generator=generator) + counts.counts[ids][:, None].log()
    x[3] = (torch.randn(vocabulary, 12, generator=generator) * counts.counts[:, None])[ids]  # each type in one place

    def told(x):
        return told_by_type({name: one.numpy() for name, one in vars(type_sums(x, types)).items()}, types, layout)

    whole = told(x)
    assert [one is not None and len(one) - 2 * len(bins) for one in whole] == [4, 4, 4, 2]
    x[1, 3, 2] = torch.inf
    x[2] = 0.0  # nothing varies
    found = told(x)
    assert found[1] is None and found[2] is None
    assert [repr(found[at]) for at in (0, 3)] == [repr(whole[at]) for at in (0, 3)]
    x[[0, 3]] = torch.nan
    assert told(x) == [None] * 4
