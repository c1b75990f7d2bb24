"""A tiny random model with a character tokenizer, saved as a folder: what `load` takes, and quick to run end to end."""

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = [*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n"]


def save_tiny(folder: Path, *, seed: int = 0, layers: int = 2) -> Path:
    """Write the model to `folder` and return it. One token per character, so fewer than 200 tokens in all."""
    vocabulary = {c: i for i, c in enumerate(["<unk>", "<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=vocabulary["<eos>"],
        pad_token_id=vocabulary["<eos>"],
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
