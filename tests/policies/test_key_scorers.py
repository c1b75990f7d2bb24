"""Scorers that read keys or values, against hand-made keys."""

import pytest
import torch

from kvlab.kernels.rope import Rotary
from kvlab.policies import SCORERS, AttentionMass, Candidates, ExpectedAttention, KeyDiff, KeyNorm, WindowAttention
from kvlab.policies.expected_attention import query_sums

POSITIONS = torch.arange(4).unsqueeze(0)


def test_short_keys_stay() -> None:
    keys = torch.tensor([[[3.0, 4.0], [0.0, 1.0], [-2.0, 0.0], [0.0, 0.0]]])
    assert KeyNorm().score(Candidates(POSITIONS, keys=keys)).tolist() == [[-5.0, -1.0, -2.0, 0.0]]


def test_keys_off_the_common_direction_stay() -> None:
    # Directions (1, 0) three times and (0, 1) once: their mean points along (3, 1).
    keys = torch.tensor([[[5.0, 0.0], [0.0, 2.0], [0.1, 0.0], [1.0, 0.0]]])
    along, off = -3 / 10**0.5, -1 / 10**0.5
    torch.testing.assert_close(
        KeyDiff().score(Candidates(POSITIONS, keys=keys)), torch.tensor([[along, off, along, along]])
    )


def test_slots_without_a_token_are_in_no_mean() -> None:
    keys = torch.tensor([[[5.0, 0.0], [0.0, 2.0], [9.0, 9.0], [-7.0, 1.0]]])
    mass = torch.tensor([[1.0, 2.0, 50.0, 60.0]])
    counts = torch.tensor([2])
    padded = Candidates(POSITIONS, mass, keys, counts=counts)
    alone = Candidates(POSITIONS[:, :2], mass[:, :2], keys[:, :2])
    for scorer in (KeyDiff(), WindowAttention(2, 3)):
        torch.testing.assert_close(scorer.score(padded)[:, :2], scorer.score(alone))


@pytest.mark.parametrize("make", [AttentionMass, lambda **more: WindowAttention(2, 1, **more)])
def test_a_value_norm_weighs_what_was_attended(make) -> None:
    values = torch.tensor([[[3.0, 4.0], [0.0, 1.0], [0.0, 0.0], [6.0, 8.0]]])
    mass = torch.tensor([[1.0, 2.0, 9.0, 0.5]])
    assert make(value_norm=True).score(Candidates(POSITIONS, mass, values=values)).tolist() == [[5.0, 2.0, 0.0, 5.0]]
    assert torch.equal(make().score(Candidates(POSITIONS, mass)), mass)
    assert (make(value_norm=True).reads_values, make().reads_values) == (True, False)


def test_later_candidates_come_right_behind_the_last_real_one() -> None:
    held = Candidates(torch.tensor([[1, 4, 5], [2, 0, 0]]), torch.tensor([[1.0, 2.0, 3.0], [4.0, -1.0, -1.0]]))
    both = held._replace(counts=torch.tensor([3, 1])).then(
        Candidates(torch.tensor([[8, 9], [8, 9]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]]))
    )
    assert both.counts is not None
    assert both.counts.tolist() == [5, 3]
    assert both.positions[0].tolist() == [1, 4, 5, 8, 9]
    assert both.positions[1, :3].tolist() == [2, 8, 9]
    assert both.mass is not None
    assert both.mass[1, :3].tolist() == [4.0, 7.0, 8.0]


def test_who_looks_at_no_query_says_so() -> None:
    agnostic = {kind for kind, cls in SCORERS.items() if cls.query_agnostic}
    assert {"recency", "key_norm", "key_diff"} <= agnostic
    assert not agnostic & {"attention_mass", "window_attention", "last_selected", "expected_attention"}


ROTARY = Rotary(torch.tensor([1.0, 0.3, 0.01]), 8)


@pytest.mark.parametrize("parts", [[40], [1] * 40, [17, 1, 22]], ids=len)
def test_expected_queries_are_the_mean_and_spread_of_what_was_asked(parts: list[int]) -> None:
    rng = torch.Generator().manual_seed(3)
    plain = torch.randn(6, 40, 8, dtype=torch.float64, generator=rng) + 0.5
    asked = ROTARY.rotate(plain, torch.arange(40))
    sums, start = torch.zeros(2, 9, 8), 0
    for part in parts:
        sums += query_sums(asked[:, start : start + part], start, 0.5, ROTARY, 2)
        start += part
    expected = ExpectedAttention(horizon=7).expect(sums, 40, ROTARY)
    # By definition: over every query asked so far, turned to each of the next 7 positions by the mean rotation.
    turn = torch.stack([ROTARY.rotate(torch.eye(8).double(), torch.full((8,), 40 + j)).mT for j in range(7)]).mean(0)
    for head in range(2):
        ours = 0.5 * plain[3 * head : 3 * head + 3].flatten(0, 1)
        mean, spread = turn @ ours.mean(0), turn @ torch.cov(ours.mT, correction=0) @ turn.mT
        torch.testing.assert_close(expected.mean[head].double(), mean, rtol=0, atol=1e-5)
        torch.testing.assert_close(expected.covariance[head].double(), spread, rtol=0, atol=1e-5)


def test_keys_that_future_queries_point_to_stay() -> None:
    sums = query_sums(torch.tensor([[[2.0, 0, 0, 0, 0, 0, 0, 0]]]), 0, 1.0, Rotary(torch.empty(0), 8), 1)
    scorer = ExpectedAttention(value_norm=False)
    expected = scorer.expect(sums, 1, Rotary(torch.empty(0), 8))
    keys = torch.zeros(1, 3, 8)
    keys[0, :, 0] = torch.tensor([-1.0, 0.0, 1.0])
    candidates = Candidates(POSITIONS[:, :3], keys=keys, values=torch.ones(1, 3, 4), expected=expected)
    torch.testing.assert_close(scorer.score(candidates), torch.tensor([[-2.0, 0.0, 2.0]]).softmax(-1))
    torch.testing.assert_close(ExpectedAttention().score(candidates), 2 * scorer.score(candidates))


def test_expected_attention_of_no_future_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 position, got 0"):
        ExpectedAttention(horizon=0)
