"""A tiny model as the explorers see it, and prompts for its characters."""

import pytest
from tiny_folder import save_tiny

from kvlab import LocalSubject, load
from kvlab.evals import tasks
from kvlab.policies import AttentionMass, WindowAttention


@pytest.fixture(scope="package")
def subject(tmp_path_factory):
    root = tmp_path_factory.mktemp("explore")
    loaded = load(str(save_tiny(root / "tiny", layers=4)), cache_dir=root / "cache")
    return LocalSubject(loaded, scorers=[AttentionMass(), WindowAttention()])


@pytest.fixture(scope="package")
def item():
    return tasks.build(["retrieval"], split="search", n=1, seed=0, length=120).items[0]
