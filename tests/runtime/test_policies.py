"""Policies in words, and switches that no argument shows: what is refused, warned about, or noticed in time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.core.errors import UsageError
from jettison.verify.differences import compare_gradients, independent_copy
from support.stacks import Block, rows, stack

SCALE = 1.0


class Attention(Block):
    """Self-attention over the rows, fused or with stored scores."""

    fused = True

    def inner(self, h: Tensor) -> Tensor:
        q = h.view(1, 1, *h.shape)
        if self.fused:
            return nn.functional.scaled_dot_product_attention(q, q, q).view_as(h)
        return (torch.softmax(q @ q.transpose(-1, -2), -1) @ q).view_as(h)


class Stored(Attention):
    fused = False


class Scaled(Block):
    """Multiplies by a number that lives in a global."""

    def inner(self, h: Tensor) -> Tensor:
        return torch.tanh(h * SCALE) * h


def test_selective_with_fused_attention_says_that_it_saves_nothing() -> None:
    """Trap 24: the scores were never stored."""
    with (
        pytest.warns(UserWarning, match="changes nothing here"),
        jettison.apply(stack(Attention), "selective", batch=rows()),
    ):
        pass


def test_selective_with_stored_scores_drops_them() -> None:
    model = stack(Stored)
    with jettison.apply(model, "selective", batch=rows()) as applied:
        model(*rows()).backward()
        dropped = [slot for slot in applied.report()[0].slots if slot.action == "drop"]
    scores = rows()[0].shape[0]
    assert dropped and all(slot.shape[-2:] == (scores, scores) for slot in dropped)


def test_a_policy_that_nothing_here_can_honour_is_an_error() -> None:
    """Trap 3: a word that would have no effect is refused."""
    with pytest.raises(UsageError, match="unknown policy 'onload'"):
        jettison.apply(stack(), "onload", batch=rows())


@pytest.mark.parametrize("policy", ["full", "selective-op"])
def test_a_global_number_that_changes_between_steps_is_noticed(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack(Scaled)
    plain = independent_copy(model)
    with jettison.apply(model, policy, batch=rows()):
        for scale in (1.0, 1.0, 0.5, 2.0):
            monkeypatch.setattr(f"{__name__}.SCALE", scale)
            for each in (model, plain):
                each.zero_grad()
                each(*rows()).backward()
            assert compare_gradients(model, plain).identical, scale


def test_one_policy_a_block() -> None:
    model = stack()
    with jettison.apply(model, {"blocks.0": "full", "blocks.2": "selective-op"}, batch=rows()) as applied:
        model(*rows()).backward()
        words = {region.name: (region.word, region.slots_dropped > 0) for region in applied.report()}
    assert words["blocks.0"] == ("full", True)
    assert words["blocks.1"] == ("none", False)
    assert words["blocks.2"][0] == "selective-op"


class Counting(Block):
    """Keeps count of its calls in a plain attribute, which changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def inner(self, h: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(h)


def test_a_counter_that_changes_nothing_is_not_recorded_for_ever() -> None:
    model = stack(Counting)
    with jettison.apply(model, "full", batch=rows()) as applied:
        for _ in range(12):
            model(*rows()).backward()
        assert max(region.recordings for region in applied.report()) <= 2
