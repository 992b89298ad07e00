"""Optimizer states of single tensors, as the optimizers' own code allocates them."""

from __future__ import annotations

import pytest

from jettison.formula.model_states import state_bytes
from jettison.formula.tape import Weight
from jettison.spec.precision import PRECISIONS, Optimizer


@pytest.mark.parametrize(
    ("elements", "nbytes"),
    [
        (4095, 2 * 16380),  # fp32: what bitsandbytes 0.50.2 allocated for a tensor of this size
        (4096, 2 * (4096 + 64)),
        (5000, 2 * (5000 + 80)),
    ],
)
def test_small_tensors_of_8_bit_adam_have_fp32_moments(elements: int, nbytes: int) -> None:
    weight = Weight("weight", (elements,), (), 2 * elements, elements)
    found = state_bytes(weight, elements, PRECISIONS["bf16"], Optimizer.ADAM8BIT, in_layer=True)
    assert found == nbytes


@pytest.mark.parametrize(
    ("elements", "nbytes"),
    [
        (4096, 2 * (2048 + 4 * 32)),  # torchao's ``OptimState4bit``: two numbers a byte, an fp32 scale for each 128
        (4097, 8 * 4097),  # no whole blocks: as what is updated, fp32 master copies here
        (128, 8 * 128),
    ],
)
def test_4_bit_adam_has_whole_blocks_alone(elements: int, nbytes: int) -> None:
    weight = Weight("weight", (elements,), (), 2 * elements, elements)
    assert state_bytes(weight, elements, PRECISIONS["bf16"], Optimizer.ADAM4BIT, in_layer=True) == nbytes
