"""Zipf languages: the law of single tokens is exact at every order, and the entropy rate is what a text shows."""

import math
import time

import numpy as np
import pytest
import torch

from anisoscope.errors import OptionError
from anisoscope.text.synthetic import ZipfLanguage, zipf_language

ORDERS = [0, 1, 2]


def zipf(vocab_size, exponent, shift=0.0):
    weights = [(rank + shift) ** -exponent for rank in range(1, vocab_size + 1)]
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


@pytest.mark.parametrize(("exponent", "shift"), [(1.0, 0.0), (0.5, 0.0), (1.7, 2.7), (0.0, 0.0)])
def test_unigram(exponent, shift):
    language = ZipfLanguage(40, exponent, shift=shift)
    torch.testing.assert_close(language.unigram, zipf(40, exponent, shift), rtol=1e-12, atol=0)


@pytest.mark.parametrize("branches", [1, 3])
def test_order_1_is_stationary(seed, branches):
    language = ZipfLanguage(37, 1.1, order=1, seed=seed, branches=branches)
    p, table = language.unigram, language.transition
    torch.testing.assert_close(table.sum(dim=1), torch.ones(37, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(p @ table, p, rtol=1e-12, atol=1e-15)
    # and it is the only stationary law: the second eigenvalue is at most 1 - fresh
    assert torch.linalg.eigvals(table).abs().sort().values[-2] <= 1 - language.fresh + 1e-9
    # few pairs can follow each other: a kernel has at most 2 V - 1
    assert int((language.lag_kernel(1) > 1e-15).sum()) <= branches * (2 * 37 - 1)


def test_order_2_is_stationary(seed):
    language = ZipfLanguage(23, 1.1, order=2, seed=seed)
    p, table = language.unigram, language.transition
    torch.testing.assert_close(table.sum(dim=2), torch.ones(23, 23, dtype=torch.float64), rtol=0, atol=1e-12)
    pair = p[:, None] * p[None]
    for step in range(400):
        if step in (0, 1, 7, 399):  # exact at every step, not in the limit only
            torch.testing.assert_close(pair.sum(dim=0), p, rtol=1e-11, atol=1e-15)
        pair = torch.einsum("ki,kij->ij", pair, table)
    torch.testing.assert_close(pair.sum(dim=1), p, rtol=1e-11, atol=1e-15)
    assert (pair - p[:, None] * p[None]).abs().sum() > 0.1, "the two tokens before are far from independent"
    assert float((table[0] - table[5]).abs().sum()) > 0.1, "the older token matters"


@pytest.mark.parametrize("order", ORDERS)
def test_sample_has_the_law(order, seed):
    """Counts within five standard errors of the law; fresh draws every few tokens keep the dependence short."""
    language = ZipfLanguage(50, 1.0, order=order, seed=seed, fresh=0.3)
    n = 200_000
    ids = language.sample(n, seed=seed)
    share = torch.bincount(ids, minlength=50) / n
    blocks = torch.stack([torch.bincount(part, minlength=50) for part in ids.view(100, -1)]).double() / (n / 100)
    stderr = blocks.std(dim=0) / 10
    assert ((share - language.unigram).abs() < 5 * stderr + 1e-6).all()


@pytest.mark.parametrize("order", [1, 2])
def test_sample_follows_the_table(order):
    language = ZipfLanguage(6, 0.8, order=order, seed=3)
    n = 300_000
    ids = language.sample(n, seed=1)
    past = ids[:-1] if order == 1 else ids[:-2] * 6 + ids[1:-1]
    counts = torch.zeros(6**order, 6, dtype=torch.float64)
    counts.index_put_((past, ids[order:]), torch.ones(n - order, dtype=torch.float64), accumulate=True)
    total = counts.sum(dim=1, keepdim=True)
    truth = language.transition.reshape(-1, 6)
    # Given the past, tokens are independent draws from its row: binomial errors are exact here.
    stderr = (truth * (1 - truth) / total.clamp_min(1)).sqrt()
    assert ((counts / total.clamp_min(1) - truth).abs()[total[:, 0] > 50] < 5 * stderr[total[:, 0] > 50] + 1e-3).all()


@pytest.mark.parametrize("order", [1, 2])
def test_log_prob_is_the_table(order):
    language = ZipfLanguage(9, 1.3, order=order, seed=2)
    ids = language.sample(500, seed=4)
    parts = [ids[lag : len(ids) - order + lag] for lag in range(order)]
    truth = language.transition[(*parts, ids[order:])].log()
    torch.testing.assert_close(language.log_prob(ids), truth, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("order", "vocab_size"), [(0, 300), (1, 60), (1, 5000), (2, 60), (2, 1000)])
def test_entropy_rate_is_what_a_text_shows(order, vocab_size):
    language = ZipfLanguage(vocab_size, 1.0, order=order)
    rate = language.entropy_rate
    nats = -language.log_prob(language.sample(200_000, seed=9))
    blocks = nats[: len(nats) // 50 * 50].view(50, -1).mean(dim=1)
    stderr = math.hypot(float(blocks.std()) / 50**0.5, rate.stderr or 0.0)
    assert abs(float(nats.mean()) - rate.value) < 5 * stderr
    if order:
        assert rate.value < 0.8 * language.unigram_entropy, "there is something to learn"
        assert rate.value > 0


def test_entropy_of_order_1_is_the_sum_over_the_matrix(seed):
    language = ZipfLanguage(80, 1.2, order=1, seed=seed, branches=3)
    table = language.transition
    slow = -(language.unigram[:, None] * table * table.log()).sum()
    assert language.entropy_rate.value == pytest.approx(float(slow), rel=1e-10)


def test_all_fresh_is_independent():
    assert ZipfLanguage(30, 1.0, order=1, fresh=1.0).entropy_rate.value == pytest.approx(
        ZipfLanguage(30, 1.0, order=0).entropy_rate.value, rel=1e-12
    )


@pytest.mark.parametrize("order", ORDERS)
def test_seeds(order):
    one = zipf_language(100, 1.0, order=order, length=1000, seed=1)
    assert one.dtype == torch.int64 and one.shape == (1000,)
    assert torch.equal(one, zipf_language(100, 1.0, order=order, length=1000, seed=1))
    assert not torch.equal(one, zipf_language(100, 1.0, order=order, length=1000, seed=2))
    assert len(zipf_language(2, 1.0, order=order, length=1)) == 1


def test_speed():
    begin = time.process_time()
    ids = ZipfLanguage(10_000, 1.0, order=2).sample(1_000_000)
    assert time.process_time() - begin < 10
    assert np.bincount(ids.numpy()).argmax() == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"vocab_size": 1}, "two tokens"),
        ({"order": 3}, "0, 1 or 2"),
        ({"fresh": 0.0}, "fresh=0.0"),
        ({"branches": 0}, "branches=0"),
        ({"shift": -1.0}, "above -1"),
    ],
)
def test_bad_options(options, reason):
    with pytest.raises(OptionError, match=reason):
        ZipfLanguage(**({"vocab_size": 10} | options))


def test_too_large_for_a_table():
    with pytest.raises(OptionError, match="up to"):
        _ = ZipfLanguage(1000, order=2).transition
    with pytest.raises(OptionError, match="up to"):
        _ = ZipfLanguage(5000, order=1).transition
    with pytest.raises(OptionError, match="length=0"):
        ZipfLanguage(10).sample(0)
    with pytest.raises(OptionError, match="lag=2"):
        ZipfLanguage(10, order=1).lag_kernel(2)
