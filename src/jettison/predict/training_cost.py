"""Cost of a training run: days, GPU hours and money for a number of tokens, from the step time and its range."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.predict.ranges import Residual

DAY_SECONDS = 86400
HOUR_SECONDS = 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBudget:
    """Tokens of a training run and the price of a GPU hour. `UsageError` for a number not above 0, or no tokens."""

    tokens: float | None = None
    price_per_gpu_hour: float | None = None

    def __post_init__(self) -> None:
        if self.price_per_gpu_hour is not None and self.tokens is None:
            raise UsageError("got --price-per-gpu-hour without --tokens; give the tokens, such as --tokens 1e12")
        for name, value in (("tokens", self.tokens), ("price-per-gpu-hour", self.price_per_gpu_hour)):
            if value is not None and not (isfinite(value) and value > 0):
                raise UsageError(
                    f"got --{name} {value:g}; expected a number above 0, such as 1e12 tokens or a price of 2.5"
                )


NOTHING_WANTED: Final = TrainingBudget()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCost:
    """Cost of a training run under one layout; prices are in the currency of the price of an hour.

    Args:
        steps: number of steps, rounded up.
        seconds: of all of them, as predicted.
        low_seconds, high_seconds: the range.
    """

    tokens: float
    gpus: int
    steps: int
    seconds: float
    low_seconds: float
    high_seconds: float
    price_per_gpu_hour: float | None

    def gpu_hours(self, seconds: float) -> float:
        """GPU hours of all devices for a duration."""
        return self.gpus * seconds / HOUR_SECONDS

    def price(self, seconds: float) -> float | None:
        """Price of these; None without a price of an hour."""
        return None if self.price_per_gpu_hour is None else self.gpu_hours(seconds) * self.price_per_gpu_hour

    @property
    def duration(self) -> str:
        """Days, for tables."""
        low, high = self.low_seconds / DAY_SECONDS, self.high_seconds / DAY_SECONDS
        return f"{self.seconds / DAY_SECONDS:,.1f} days ({low:,.1f} to {high:,.1f}) on {self.gpus} GPUs"

    @property
    def expense(self) -> str:
        """GPU hours, and their price if an hour has one, for tables."""
        hours = f"{self.gpu_hours(self.seconds):,.0f} GPU hours"
        if self.price_per_gpu_hour is None:
            return hours
        price, low, high = (
            self.gpu_hours(seconds) * self.price_per_gpu_hour
            for seconds in (self.seconds, self.low_seconds, self.high_seconds)
        )
        return f"{hours} for {price:,.0f} ({low:,.0f} to {high:,.0f})"

    @property
    def amount(self) -> str:
        """Tokens and steps, for tables."""
        return f"{self.tokens:.4g} tokens".replace("e+", "e") + f" in {self.steps:,} steps"

    def document(self) -> dict[str, Any]:
        """JSON document; ranges have the low and the high end."""
        ends = (self.low_seconds, self.high_seconds)
        return {
            "tokens": self.tokens,
            "gpus": self.gpus,
            "steps": self.steps,
            "days": self.seconds / DAY_SECONDS,
            "days_range": [end / DAY_SECONDS for end in ends],
            "gpu_hours": self.gpu_hours(self.seconds),
            "gpu_hours_range": [self.gpu_hours(end) for end in ends],
            "price_per_gpu_hour": self.price_per_gpu_hour,
            "price": self.price(self.seconds),
            "price_range": None if self.price_per_gpu_hour is None else [self.price(end) for end in ends],
        }


def training_cost(
    wanted: TrainingBudget, *, step_seconds: float, step_tokens: int, gpus: int, sure: Residual
) -> TrainingCost | None:
    """Return the cost of a training run; None without a number of tokens."""
    if wanted.tokens is None:
        return None
    steps = ceil(wanted.tokens / step_tokens)
    low, high = sure.seconds(step_seconds)
    return TrainingCost(
        tokens=wanted.tokens,
        gpus=gpus,
        steps=steps,
        seconds=steps * step_seconds * sure.expected,
        low_seconds=steps * low,
        high_seconds=steps * high,
        price_per_gpu_hour=wanted.price_per_gpu_hour,
    )
