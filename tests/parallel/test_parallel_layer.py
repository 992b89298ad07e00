"""Bytes and transfers of the reference layer on 1, 2 and 4 ranks: equal to the ledger's, to the byte.

Row by row: TP, TP + SP, with selective and with full recompute, and what DTensor's own styles do. Bytes are counted in
two ways: by hooks on what autograd saves, and by what memory is alive between the passes, whoever holds it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from benchmarks import parallel_layer
from benchmarks.parallel_layer import ROWS, WHOLE, A, B, H, S, measure, page

from support.ranks import Launches

FOUR = pytest.param(4, marks=pytest.mark.slow)
SIZES = (pytest.param(1, marks=pytest.mark.slow), 2, FOUR)
STATISTICS = 4 * 2 * S * B
CORE = 5 * A * S * S * B
STATE = 5056  # of the CPU's generator, which stays where masks are drawn again


def on_rank(_: Any) -> Any:
    return measure()


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.getbasetemp(), on_rank)


def equation(key: str, t: int) -> int:
    """Bytes by the paper's equations, without anything of ours; exact for these sizes."""
    return {
        "tp": S * B * H * (10 * t + 24) // t + CORE // t + STATISTICS,
        "tp_sp": (S * B * H * 34 + CORE + STATISTICS) // t,
        "selective": (S * B * H * 34 + STATISTICS) // t + STATE,
        "full": S * B * H * 2 // t + STATE,
        "tp_full": S * B * H * 2 + STATE,
        "stock": S * B * H * (4 * t + 30) // t + (CORE + STATISTICS) // t,
    }[key]


@pytest.mark.parametrize("t", SIZES)
def test_held_bytes_are_the_ledgers_and_the_equations(measured: Launches, t: int) -> None:
    assert len(measured[t]) == t
    for found in measured[t]:
        assert set(found) == set(ROWS) - ({"stock"} if t == 1 else set())
        for key, row in found.items():
            assert row["held"] == ROWS[key].ledger_bytes(t) == equation(key, t), key


@pytest.mark.parametrize("t", SIZES)
def test_saved_bytes_by_hooks(measured: Launches, t: int) -> None:
    """Before a policy is applied: what autograd is given to keep."""
    for found in measured[t]:
        for key, row in found.items():
            plain = {"selective": "tp_sp", "full": "tp_sp", "tp_full": "tp"}.get(key, key)
            assert row["saved"] == ROWS[plain].ledger_bytes(t), key


@pytest.mark.parametrize("t", SIZES)
@pytest.mark.parametrize("key", ["tp", "tp_sp", "stock"])
def test_transfers_are_the_ledgers(measured: Launches, t: int, key: str) -> None:
    if t == 1:
        assert measured[1][0]["tp_sp"]["sent"] == {}
        return
    expected: Counter[str] = Counter()
    for transfer in ROWS[key].region(t).collectives:
        expected[f"{transfer.kind} {'backward' if transfer.backward else 'forward'}"] += transfer.nbytes
    for found in measured[t]:
        assert found[key]["sent"] == expected


@pytest.mark.parametrize("t", [2, FOUR])
def test_sequence_parallelism_moves_what_tensor_parallelism_moves_and_the_second_gather(
    measured: Launches, t: int
) -> None:
    """An all-reduce is a reduce-scatter and an all-gather. The second gather is one of each block's input."""
    tp, tp_sp, stock = (Counter(measured[t][0][key]["sent"]) for key in ("tp", "tp_sp", "stock"))
    again = 2 * WHOLE
    for direction in ("forward", "backward"):
        halves = tp[f"all_reduce {direction}"]
        assert halves == stock[f"reduce_scatter_tensor {direction}"] == stock[f"all_gather_into_tensor {direction}"]
        assert halves == tp_sp[f"reduce_scatter_tensor {direction}"]
        more = again if direction == "backward" else 0
        assert halves + more == tp_sp[f"all_gather_into_tensor {direction}"]


def test_recompute_repeats_collectives_and_selective_does_not(measured: Launches) -> None:
    found = measured[2][0]
    assert found["selective"]["sent"] == found["tp_sp"]["sent"]
    more = Counter(found["full"]["sent"]) - Counter(found["tp_sp"]["sent"])
    assert more == {"all_gather_into_tensor backward": 2 * WHOLE, "reduce_scatter_tensor backward": 2 * WHOLE}


@pytest.mark.slow
def test_the_page_is_what_the_measurements_say(measured: Launches) -> None:
    """If this fails: python -m benchmarks.parallel_layer."""
    assert parallel_layer.PAGE.read_text(encoding="utf-8") == page({t: measured[t] for t in (2, 4)})
