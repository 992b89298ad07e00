"""Cost of a training run: days, GPU hours and money for a number of tokens, from the step time and its range."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.predict.ranges import Range, Residual
from jettison.report.schemas import part

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
        seconds: of all of them.
    """

    tokens: float
    gpus: int
    steps: int
    seconds: Range
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
        days = self.seconds.words(lambda seconds: f"{seconds / DAY_SECONDS:,.1f}")
        return f"{days.replace(' (', ' days (')} on {self.gpus} GPUs"

    @property
    def expense(self) -> str:
        """GPU hours, and their price if an hour has one, for tables."""
        hours, each = f"{self.gpu_hours(self.seconds.expected):,.0f} GPU hours", self.price_per_gpu_hour
        if each is None:
            return hours
        return f"{hours} for {self.seconds.words(lambda seconds: f'{self.gpu_hours(seconds) * each:,.0f}')}"

    @property
    def amount(self) -> str:
        """Tokens and steps, for tables."""
        return f"{self.tokens:.4g} tokens".replace("e+", "e") + f" in {self.steps:,} steps"

    def document(self) -> dict[str, Any]:
        """JSON document; ranges have the low and the high end."""
        seconds, ends = self.seconds.expected, self.seconds.ends
        return part(
            "Training",
            self,
            days=seconds / DAY_SECONDS,
            days_range=[end / DAY_SECONDS for end in ends],
            gpu_hours=self.gpu_hours(seconds),
            gpu_hours_range=list(map(self.gpu_hours, ends)),
            price=self.price(seconds),
            price_range=None if self.price_per_gpu_hour is None else list(map(self.price, ends)),
        )


def training_cost(
    wanted: TrainingBudget, *, step_seconds: float, step_tokens: int, gpus: int, sure: Residual
) -> TrainingCost | None:
    """Return the cost of a training run; None without a number of tokens."""
    if wanted.tokens is None:
        return None
    steps = ceil(wanted.tokens / step_tokens)
    return TrainingCost(
        tokens=wanted.tokens,
        gpus=gpus,
        steps=steps,
        seconds=sure.of(steps * step_seconds),
        price_per_gpu_hour=wanted.price_per_gpu_hour,
    )
