"""Checkpointing and offloading of other people: proven where it holds, and where it does not the tensor is named."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import jettison
from jettison.cli.main import run as command
from jettison.core.errors import ProofFailed, UnsupportedModule, UsageError
from jettison.report.proof import Proof

H = 32
Run = Callable[..., Tensor]


class Block(nn.Module):
    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(H), nn.Linear(H, 4 * H), nn.Linear(4 * H, H)
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks that are run by ``run(block, x)``."""

    def __init__(self, run: Run | None, blocks: int = 3, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(block() for _ in range(blocks))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.run is None else self.run(layer, x)
        return x.square().mean()


def batch() -> tuple[Tensor]:
    torch.manual_seed(1)
    return (torch.randn(8, 64, H, requires_grad=True),)


def proven(model: nn.Module, given: Any = None, **more: Any) -> Proof:
    return jettison.verify_given(model, batch() if given is None else given, rounds=1, **more)


def saves_products() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (partial(checkpoint, use_reentrant=False), "without saved-tensor hooks (3 regions)"),
        (partial(checkpoint, use_reentrant=True), "without reentrant checkpoints (3)"),
        (partial(checkpoint, use_reentrant=False, context_fn=saves_products), "without saved-tensor hooks (3 regions)"),
    ],
)
def test_what_holds_is_proven(run: Run, words: str) -> None:
    model = Net(run)
    proof = proven(model, optimizer=torch.optim.AdamW(model.parameters()))
    assert proof.passed and not proof.departures, proof.failures()
    assert (proof.left_out, proof.repeats, proof.repeats_identical) == (words, 3, True)
    assert proof.measured_peak_bytes < 0.8 * proof.baseline_peak_bytes
    assert proof.gradients_compared == len(list(model.parameters()))
    assert Proof.from_json(proof.to_json()) == proof


def test_plain_is_really_plain() -> None:
    """The copy's peak is that of a model that nobody checkpoints."""
    proof = proven(Net(partial(checkpoint, use_reentrant=False)))
    kept = proven(Net(None), against=Net(None))
    assert proof.baseline_peak_bytes == kept.baseline_peak_bytes == kept.measured_peak_bytes


def test_transformers_checkpointing() -> None:
    config = transformers.GPT2Config(n_embd=H, n_layer=2, n_head=2, vocab_size=64, n_positions=32, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    ids = torch.randint(0, 64, (2, 32))
    proof = proven(model, {"input_ids": ids, "labels": ids})
    assert proof.passed and proof.left_out == "without saved-tensor hooks (2 regions)"


def test_offloading_around_a_step() -> None:
    def step(model: nn.Module, given: tuple[Tensor]) -> Tensor:
        with save_on_cpu():
            loss = model(*given)
        loss.backward()
        return loss

    proof = proven(Net(None), step=step)
    assert proof.passed and proof.left_out == "without saved-tensor hooks (1 region)"


@pytest.mark.parametrize("reentrant", [False, True])
def test_masks_that_are_drawn_again_are_named(reentrant: bool) -> None:
    proof = proven(Net(partial(checkpoint, use_reentrant=reentrant, preserve_rng_state=False)))
    assert not proof.gradients_identical and proof.losses_identical
    assert any("gradient of layers.0.norm.weight" in line for line in proof.differences)
    first = proof.departures[0]
    if reentrant:
        # the whole block is watched as well, and ends after its dropout
        assert first.startswith("what layers.0.drop returned: float32[8, 64, 32], ")
    else:
        assert first.startswith("a tensor saved in layers.0.drop for ")
    assert "elements differ in backward" in first


def test_a_buffer_that_is_used_too_early_is_named() -> None:
    """One staging buffer for all tensors of a size, as of an offload that does not wait for its copies."""

    def step(model: nn.Module, given: tuple[Tensor]) -> Tensor:
        staging: dict[Any, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.shape[-1] != H or tensor.dim() != 3:
                return tensor.detach()
            buffer = staging.setdefault(tuple(tensor.shape), torch.empty_like(tensor, requires_grad=False))
            return buffer.copy_(tensor.detach())

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(*given)
        loss.backward()
        return loss

    proof = proven(Net(None), step=step)
    assert not proof.passed
    assert proof.departures[0].startswith("a tensor saved in layers.0.norm for NativeLayerNormBackward0: float32")
    assert len(proof.departures) == 5


def test_gradients_that_come_out_otherwise_each_time_are_not_proven() -> None:
    numbers = itertools.count()

    def step(model: nn.Module, given: tuple[Tensor]) -> Tensor:
        def unpack(tensor: Tensor) -> Tensor:
            return tensor + next(numbers) % 7 if tensor.dim() == 3 else tensor

        with saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
            loss = model(*given)
        loss.backward()
        return loss

    proof = proven(Net(None), step=step)
    assert not proof.repeats_identical
    assert "3 steps from one state and the same random numbers gave different gradients" in proof.failures()


def test_statistics_that_are_counted_twice_are_seen() -> None:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(64)

    proof = proven(Net(partial(checkpoint, use_reentrant=False), block=Normed))
    assert proof.gradients_identical and not proof.buffers_identical
    assert "the buffers differ from those of a plain copy" in proof.failures()


def test_a_checkpoint_that_cannot_make_its_tensors_again_is_located() -> None:
    class Grows(Block):
        rows = 0

        def forward(self, x: Tensor) -> Tensor:
            self.rows += 1
            return x + self.down(functional.gelu(self.up(self.norm(x))[:, : 64 - self.rows])).mean(1, keepdim=True)

    with pytest.raises(
        ProofFailed, match=r"as it is, the step fails in layers\.\d\S*: torch.utils.checkpoint"
    ) as error:
        proven(Net(partial(checkpoint, use_reentrant=False), block=Grows))
    assert "a plain copy trains" in str(error.value)
    assert "of gelu: float32[8, 63, 128] in forward, float32[8, 62, 128] in recompute" in str(error.value)


def test_a_model_to_compare_with_may_be_given() -> None:
    wrapped, plain = Net(None), Net(None)
    for name, layer in list(wrapped.layers.named_children()):
        wrapped.layers.register_module(name, checkpoint_wrapper(layer))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    proof = proven(wrapped, against=plain)
    assert proof.passed, proof.failures()
    assert any(parameter.any() for parameter in plain.parameters()), "it got the model's values"


def test_what_cannot_be_proven_is_said() -> None:
    with pytest.raises(UsageError, match="nothing to prove"):
        proven(Net(None))
    with pytest.raises(UsageError, match=r"against= has other parameters and buffers than the model: layers\.2"):
        proven(Net(None), against=Net(None, blocks=2))
    model = Net(None)
    with jettison.apply(model, "full", batch=batch()), pytest.raises(UnsupportedModule, match="a plan of Jettison's"):
        proven(model)
    holds = Net(partial(checkpoint, use_reentrant=False))
    holds.forward = partial(Net.forward, holds)  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="leaves no gradients in the copy"):
        proven(nn.Sequential(Closed(holds)))


class Closed(nn.Module):
    """Its forward closes over the module that it was made of."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.forward = lambda x: inner(x)  # type: ignore[method-assign]


FACTORIES = """
import torch
from functools import partial
from torch.utils.checkpoint import checkpoint
from verify.test_verify_given import Net, batch

def fine():
    return Net(partial(checkpoint, use_reentrant=False)), batch()

def wrong():
    return Net(partial(checkpoint, use_reentrant=False, preserve_rng_state=False)), batch()

def bare():
    return Net(None), batch()

def step(model, given):
    with torch.autograd.graph.save_on_cpu():
        model(*given).backward()
"""


@pytest.fixture
def factories(tmp_path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "given_models.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "given_models", raising=False)
    return "given_models"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["fine", "--given"], 0, "proven"),
        (["fine", "--against", "given_models:bare"], 0, "the model to compare with, as it is"),
        (["bare", "--step", "given_models:step"], 0, "saved-tensor hooks (1 region)"),
        (["wrong", "--given"], 4, "a tensor saved in layers.0.drop"),
        (["bare", "--given"], 2, "nothing to prove"),
        (["fine", "--given", "--budget", "1GiB"], 2, "exactly one of"),
        (["fine", "--step", "given_models:no"], 2, "has no function 'no'"),
        (["fine", "--step", "no"], 2, "expected module:function"),
    ],
)
def test_on_the_command_line(factories: str, capsys, arguments: list[str], code: int, said: str) -> None:
    arguments = ["verify", f"{factories}:{arguments[0]}", *arguments[1:], "--rounds", "1"]
    assert command(arguments) == code
    captured = capsys.readouterr()
    assert said in " ".join((captured.out + captured.err).split())
    if code in (0, 4):
        assert command([*arguments, "--format", "json"]) == code
        document = json.loads(capsys.readouterr().out)
        assert document["passed"] is (code == 0) and document["schema"] == "jettison.proof/1"
        assert bool(document["departures"]) is (code == 4)
