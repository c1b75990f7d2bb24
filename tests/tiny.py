"""The tiny models that the benches also use: `kvlab.bench.tiny`."""

from kvlab.bench.tiny import MODELS, SEED, VOCABULARY, WINDOW, tiny_model, token_ids

__all__ = ["MODELS", "SEED", "VOCABULARY", "WINDOW", "tiny_model", "token_ids"]
