"""Quantities are read with their unit or not at all, and formatted in one place."""

import pickle
import re
from typing import SupportsIndex

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.core.dtypes import DTYPE_BYTES, dtype_bytes, dtype_name, tensor_bytes
from jettison.core.errors import Infeasible, JettisonError, ProofFailed, StaleTensor, UsageError
from jettison.core.parse_units import BYTE_UNITS, parse_bytes
from jettison.core.units import (
    Bytes,
    format_bytes,
    format_change,
    format_count,
    format_flops,
    format_percent,
    format_ratio,
    format_seconds,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 * 2**30),
        ("20 GB", 20 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("123456B", 123456),
        ("  7 kB ", 7000),
        ("7KB", 7000),
        ("1KiB", 1024),
        ("2TiB", 2**41),
        ("8gib", 8 * 2**30),
        ("20gb", 20 * 10**9),
        ("0.1GB", 10**8),  # exact: no binary fraction in between
        ("0.1GiB", 107_374_182),  # 107374182.4, and a budget does not grow by being read
    ],
)
def test_a_quantity_with_its_unit_is_read_exactly(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "number", [8 * 2**30, Bytes(8 * 2**30), np.int64(8 * 2**30), np.array(8 * 2**30), np.uint64(8 * 2**30)]
)
def test_a_whole_number_is_bytes(number: SupportsIndex) -> None:
    found = parse_bytes(number)
    assert (found, type(found)) == (8 * 2**30, int)


def test_gib_and_gb_are_different_words() -> None:
    assert parse_bytes("1GiB") - parse_bytes("1GB") == 73_741_824


@pytest.mark.parametrize("text", ["8", "1000000", "1.5"])
def test_a_bare_number_in_a_string_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="without a unit") as caught:
        parse_bytes(text)
    assert f'"{text}GiB"' in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["8G", "8Gi", "8Gb", "8Mb", "8 bytes", "8GIB", "3 apples"])
def test_an_unknown_unit_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="got the unit"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "text", ["", "GiB", "-5GiB", "nan GiB", "inf GB", "1e9B", "1_000B", "8,5GiB", "٣GiB", "8GiB 3"]
)
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a positive number and a unit"):
        parse_bytes(text)


@pytest.mark.parametrize("quantity", [0, -1, "0GiB", "0.0 MB", "0.4B"])
def test_less_than_a_byte_is_refused(quantity: str | int) -> None:
    with pytest.raises(UsageError, match="not at least one byte"):
        parse_bytes(quantity)


@pytest.mark.parametrize("quantity", [True, np.True_, np.float32(8), np.ones(3, int), [8], None, b"8GiB"])
def test_other_types_are_refused(quantity: object) -> None:
    with pytest.raises(UsageError, match="or an int of bytes"):
        parse_bytes(quantity)  # type: ignore[arg-type]


FLOATS = (8.0, 0.5, 8e9, 1e-12, 2.5e-9, 0.88 * 123_457, 1e300, 0.0, -5.0, float("nan"), float("inf"), np.float64(2.5))


@pytest.mark.parametrize("quantity", [*FLOATS, "8", "1.5", "0.4", "0", "-5", "0.00000001", True, None])
def test_what_is_suggested_instead_is_accepted(quantity: object) -> None:
    """Whatever a message shows in quotes, or calls an int, can be given in the place of what was refused."""
    with pytest.raises(UsageError) as caught:
        parse_bytes(quantity)  # type: ignore[arg-type]
    _, _, advice = str(caught.value).partition("expected" if "expected" in str(caught.value) else "write")
    quoted, whole = re.findall(r'"([^"]+)"', advice), re.findall(r"(\d+) \(an int", advice)
    assert quoted or whole, caught.value
    assert min(map(parse_bytes, [*quoted, *map(int, whole)])) >= 1


@given(st.integers(min_value=1, max_value=10**6), st.sampled_from(sorted(BYTE_UNITS)))
def test_whole_numbers_of_any_unit_multiply(number: int, unit: str) -> None:
    assert parse_bytes(f"{number}{unit}") == parse_bytes(f"{number} {unit}") == number * BYTE_UNITS[unit]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**20 - 1, "1.00 MiB"),
        (-(2**30), "-1.00 GiB"),
        (2**60, "1024.00 PiB"),
    ],
)
def test_format_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(min_value=1024, max_value=2**50))
def test_formatted_bytes_read_back_within_half_a_percent(nbytes: int) -> None:
    assert abs(parse_bytes(format_bytes(nbytes)) - nbytes) <= 0.005 * nbytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0000123, "12.3 µs"),
        (0.0123, "12.3 ms"),
        (4.56, "4.56 s"),
        (125.2, "2 min 05 s"),
        (3599.8, "1 h 00 min"),
        (11_220.0, "3 h 07 min"),
        (-125.2, "-2 min 05 s"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_other_formats() -> None:
    assert format_flops(999) == "999 FLOP"
    assert format_flops(3_210_000_000_000) == "3.21 TFLOP"
    assert format_count(12_345) == "12,345"
    assert format_count(8_030_261_248) == "8.03 billion"
    assert format_ratio(1.2345) == "1.23×"
    assert format_percent(0.034) == "3.4 %"


def test_dtypes_are_named_as_torch_names_them() -> None:
    assert dtype_name("torch.bfloat16") == dtype_name("bfloat16") == "bfloat16"
    assert tensor_bytes((256, 2, 128), "torch.bfloat16") == 131_072
    assert tensor_bytes((), "float32") == 4
    assert dtype_bytes("bool") == 1
    with pytest.raises(UsageError, match="got the dtype 'bf16'; expected one of bool"):
        dtype_name("bf16")


def test_the_dtype_table_is_right() -> None:
    torch = pytest.importorskip("torch")
    wrong = {name: size for name, size in DTYPE_BYTES.items() if getattr(torch, name).itemsize != size}
    assert not wrong


def test_infeasible_states_a_budget_that_can_be_asked_for() -> None:
    error = Infeasible(minimum_budget_bytes=2**30 + 1, budget_bytes=2**29)
    assert (error.minimum_budget_bytes, error.budget_bytes, error.exit_code) == (2**30 + 1, 2**29, 3)
    asked = str(error).split('"')[1]
    assert parse_bytes(asked) == error.minimum_budget_bytes
    assert "512.00 MiB" in str(error)
    assert "1.00 GiB" in str(error)


def test_infeasible_survives_pickling() -> None:
    error = Infeasible(minimum_budget_bytes=9, budget_bytes=5, reason="Parameters alone take 8 bytes.")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.minimum_budget_bytes, again.budget_bytes) == (str(error), 9, 5)
    assert "Parameters alone" in str(again)


def test_error_families() -> None:
    assert issubclass(UsageError, JettisonError) and issubclass(UsageError, ValueError)
    assert issubclass(StaleTensor, RuntimeError) and not issubclass(StaleTensor, ValueError)
    assert (JettisonError.exit_code, UsageError.exit_code, ProofFailed.exit_code) == (1, 2, 4)


@pytest.mark.parametrize("none", [-1e-12, -0.0, 0.0, 1e-12])
def test_nothing_has_no_minus(none: float) -> None:
    assert format_seconds(none) == "0.0 µs"
    assert format_percent(none) == "0.0 %"
    assert format_ratio(none) == "0.00×"
    assert format_flops(none) == "0 FLOP"
    assert format_change(none) == "+0.0%"
    assert format_change(-0.034) == "-3.4%"
