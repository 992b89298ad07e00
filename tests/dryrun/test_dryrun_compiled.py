"""What the solver is told of the ways to compile a block."""

from __future__ import annotations

from jettison.dryrun.block_levels import BlockLevels
from jettison.dryrun.compiled_blocks import MeasuredChoice, options_of_levels


def level(resident_bytes: int, seconds: float) -> MeasuredChoice:
    return MeasuredChoice(BlockLevels(resident_bytes, 2 * resident_bytes, 10, 0), seconds)


def test_seconds_are_beside_the_fastest_and_small_differences_are_none() -> None:
    ways = {"full": level(1, 1.5), "few": level(3, 1.2), "odd": level(5, 0.99), "none": level(9, 1.0)}
    options = options_of_levels(ways)
    assert [option.key for option in options] == ["full", "few", "odd", "none"]
    assert [round(option.seconds, 6) for option in options] == [0.5, 0.2, 0.0, 0.0]
    assert options[2].seconds > options[3].seconds  # more is kept where it is as fast
    assert [option.resident_bytes for option in options] == [1, 3, 5, 9]


def test_one_that_keeps_less_may_be_the_faster_one() -> None:
    ways = {"full": level(1, 1.0), "few": level(5, 0.9), "none": level(9, 1.0)}
    assert [round(option.seconds, 6) for option in options_of_levels(ways)] == [0.1, 0.0, 0.1]


def test_ways_of_the_same_bytes_are_one_as_fast_as_the_fastest() -> None:
    ways = {"full": level(1, 1.5), "one": level(5, 1.02), "other": level(5, 1.3), "none": level(9, 1.0)}
    assert [round(option.seconds, 6) for option in options_of_levels(ways)] == [0.5, 0.02, 0.02, 0.0]
