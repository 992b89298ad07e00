"""Every tensor that backward gets is compared with the forward's in all bits; what departs is named."""

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import jettison
from jettison.cli.main import run
from jettison.core.errors import ProofFailed
from jettison.report.proof import Proof
from jettison.runtime.saved_handles import Handle
from jettison.runtime.saved_tensor_hooks import Frame

H = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 2 * H), nn.Linear(2 * H, H)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, again: Any = None, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.layers, self.again = nn.ModuleList([block() for _ in range(3)]), again

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.again is None else self.again(layer, x)
        return x.square().mean()


def batch() -> tuple[Tensor]:
    torch.manual_seed(0)
    return (torch.randn(4, 16, H),)


def proven(**more: Any) -> Proof:
    model, given = Net(), batch()
    with jettison.apply(model, "full", batch=given) as handle:
        return jettison.verify(model, given, handle=handle, rounds=1, steps=1, **more)


def test_all_values_of_a_plan_are_compared() -> None:
    proof = proven(values=True)
    assert proof.passed, proof.failures()
    # of each block: gelu's input and its output; the block's own input is kept
    assert proof.values_compared == 3 * 2
    assert proof.values_bytes == 3 * 2 * (4 * 16 * 2 * H) * 4
    assert Proof.from_json(proof.to_json()) == proof
    assert proven().values_compared == 0


def test_the_first_op_that_departs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Frame.recompute

    def broken(frame: Frame, handle: Handle) -> Tensor:
        tensor = original(frame, handle)
        if frame.name != "layers.1":
            return tensor
        tensor = tensor.clone()
        tensor.flatten()[:3] += 1
        return tensor

    monkeypatch.setattr(Frame, "recompute", broken)
    proof = proven(values=True)
    assert "tensors in backward are not those that forward had" in proof.failures()
    assert len(proof.departures) == 2
    first = proof.departures[0]
    assert "layers.1" in first
    assert "addmm" in first or "linear" in first
    assert "float32[4, 16, 16], 3 elements differ in backward, by 1 at most" in first


def test_values_of_other_peoples_checkpointing() -> None:
    proof = jettison.verify_given(
        Net(partial(checkpoint, use_reentrant=False)), batch(), values=True, rounds=1, steps=1
    )
    assert proof.passed, proof.failures()
    assert proof.values_compared >= 3 * 3


def test_an_op_that_is_missing_in_recompute_is_named() -> None:
    class Forgets(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = self.up(x)
            y = functional.gelu(y) if self.calls % 2 else y * 1.0
            return x + self.down(y.sigmoid())

    with pytest.raises(ProofFailed, match=r"of gelu: float32\[4, 16, 16\] in forward") as error:
        jettison.verify_given(Net(partial(checkpoint, use_reentrant=False), Forgets), batch(), rounds=1, steps=1)
    assert "layers.2" in str(error.value)


def test_on_the_command_line(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "value_models", sys.modules[__name__])
    arguments = ["verify", "value_models:built", "--recompute", "full", "--values", "--rounds", "1", "--format", "json"]
    assert run(arguments) == 0
    assert json.loads(capsys.readouterr().out)["values_compared"] == 6


def built() -> tuple[nn.Module, tuple[Tensor]]:
    return Net(), batch()
