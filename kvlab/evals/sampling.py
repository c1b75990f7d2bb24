"""How answers are drawn from a model's distribution: greedily, or by temperature and nucleus from a seed. Knows numbers
only, and neither models nor tensors.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """`temperature` 0 takes the likeliest token. Above it tokens are drawn from the smallest set that holds `top_p` of
    the probability (Holtzman et al. 2020, arXiv 1904.09751), `samples` answers for each item.

    Luck depends on `seed`, item and sample only, so that configs are compared under the same luck.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    samples: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 10:
            raise ValueError(f"temperature must lie between 0 (the likeliest token) and 10, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie above 0 and up to 1 (all tokens), got {self.top_p}")
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}")
        if self.samples > 1 and not self.temperature:
            raise ValueError(f"{self.samples} samples at temperature 0 are one answer: set a temperature, such as 0.8")

    def luck(self, item_id: str, sample: int) -> str:
        """What the random numbers of one answer are seeded with."""
        return f"{self.seed}|{item_id}|{sample}"


GREEDY = Sampling()
