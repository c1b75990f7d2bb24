"""What a budget buys: bytes of a config at context x concurrency."""

from dataclasses import dataclass

from kvlab.config import KVConfig
from kvlab.layer import ModelShape


@dataclass(frozen=True, slots=True)
class Workload:
    """`concurrency` conversations of `context` tokens each."""

    context: int
    concurrency: int

    def __post_init__(self) -> None:
        for name, value in (("context", self.context), ("concurrency", self.concurrency)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def bytes(self, config: KVConfig, shape: ModelShape) -> int:
        """KV bytes of the whole workload under a config."""
        return config.predicted_bytes(shape, self.context) * self.concurrency

    def sessions(self, config: KVConfig, shape: ModelShape, budget: int) -> int:
        """How many such conversations fit a budget."""
        return budget // config.predicted_bytes(shape, self.context)

    def longest(self, config: KVConfig, shape: ModelShape, budget: int) -> int:
        """Longest context the budget gives to each of the conversations, by bisection."""
        low, high = 0, 1
        while config.predicted_bytes(shape, high) * self.concurrency <= budget and high < 1 << 40:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            fits = config.predicted_bytes(shape, middle) * self.concurrency <= budget
            low, high = (middle, high) if fits else (low, middle)
        return low
