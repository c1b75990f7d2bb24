"""Rotary against its definition: a 2 x 2 rotation for every pair, one token at a time."""

import math

import pytest
import torch

from kvlab.kernels.rope import Rotary


def frequencies(pairs: int, theta: float = 10000.0) -> torch.Tensor:
    return theta ** (-torch.arange(pairs, dtype=torch.float32) / max(1, pairs))


def by_definition(rotary: Rotary, x: torch.Tensor, position: int) -> torch.Tensor:
    out = x.clone()
    pairs = rotary.pairs
    for j in range(pairs):
        a, b = (2 * j, 2 * j + 1) if rotary.interleaved else (j, j + pairs)
        angle = float(torch.tensor(float(position)) * rotary.inv_freq[j])
        out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        out[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    return out


KINDS = [(8, 4), (8, 3), (8, 0), (80, 40), (96, 36)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "pairs"), KINDS)
class TestRotary:
    def make(self, dim: int, pairs: int, interleaved: bool) -> Rotary:
        return Rotary(frequencies(pairs), dim, interleaved)

    def test_turns_each_pair_by_its_angle(self, dim: int, pairs: int, interleaved: bool) -> None:
        rotary = self.make(dim, pairs, interleaved)
        at = torch.tensor([0, 1, 5, 777, 100003])
        x = torch.randn(2, len(at), dim, dtype=torch.float64)
        turned = rotary.rotate(x, at)
        for n in range(2):
            for t, position in enumerate(at.tolist()):
                torch.testing.assert_close(turned[n, t], by_definition(rotary, x[n, t], position))

    def test_back_is_the_inverse(self, dim: int, pairs: int, interleaved: bool) -> None:
        rotary = self.make(dim, pairs, interleaved)
        at = torch.tensor([[0, 3, 9], [2, 4000, 70000]])
        x = torch.randn(2, 3, dim, dtype=torch.float64)
        torch.testing.assert_close(rotary.rotate_back(rotary.rotate(x, at), at), x)

    def test_drift_splits_the_product(self, dim: int, pairs: int, interleaved: bool) -> None:
        rotary = self.make(dim, pairs, interleaved)
        q, mu = torch.randn(2, 3, dim, dtype=torch.float64), torch.randn(2, dim, dtype=torch.float64)
        at = torch.tensor([0, 1, 63, 5000])
        term = rotary.rotate(mu.unsqueeze(1).expand(-1, len(at), -1), at)
        got = rotary.drift(q, mu) @ rotary.trig(at, torch.float64).mT
        torch.testing.assert_close(got, q @ term.mT)

    def test_mean_of_rows_gives_the_mean_vector(self, dim: int, pairs: int, interleaved: bool) -> None:
        rotary = self.make(dim, pairs, interleaved)
        at = torch.arange(100, 612)
        x = torch.randn(dim, dtype=torch.float64)
        mean = rotary.rotate(x.expand(len(at), -1), at).mean(0)
        torch.testing.assert_close(rotary.turn(x, rotary.trig(at, torch.float64).mean(0)), mean)


def test_is_what_llama_does() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=64, num_attention_heads=1, head_dim=64)
    embedding = LlamaRotaryEmbedding(config)
    at = torch.tensor([[0, 1, 900, 2047, 131071]])
    x = torch.randn(1, 1, 5, 64)
    theirs, _ = apply_rotary_pos_emb(x, x, *embedding(x, at))
    torch.testing.assert_close(Rotary(embedding.inv_freq, 64).rotate(x[0], at[0]), theirs[0])


def test_table_grows_and_keeps_its_rows() -> None:
    rotary = Rotary(frequencies(4), 8)
    short = rotary.table(3).clone()
    assert rotary.table(1000).shape == (1000, 8)
    assert torch.equal(rotary.table(3), short)
    assert torch.equal(rotary.table(1000)[999], rotary.trig(torch.tensor(999)))
    assert rotary.nbytes >= 1000 * 8 * 4


def test_small_floats_are_turned_in_float32() -> None:
    rotary = Rotary(frequencies(4), 8)
    x = torch.randn(1, 1, 8).to(torch.bfloat16)
    at = torch.tensor([1234])
    assert torch.equal(rotary.rotate(x, at), rotary.rotate(x.float(), at).to(torch.bfloat16))


def test_sameness() -> None:
    first = Rotary(frequencies(4), 8)
    assert first.same_as(Rotary(frequencies(4), 8))
    assert not first.same_as(Rotary(frequencies(4), 8, interleaved=True))
    assert not first.same_as(Rotary(frequencies(4, 1e6), 8))
    assert Rotary(frequencies(0), 8).same_as(Rotary(frequencies(0), 8, interleaved=True))


def test_refuses_more_pairs_than_the_head_has() -> None:
    with pytest.raises(ValueError, match="5 pairs need 10 dims, the head has 8"):
        Rotary(frequencies(5), 8)
