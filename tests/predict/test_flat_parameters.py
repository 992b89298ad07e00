"""FSDP as accelerate has it, with and without PEFT's adapters: every byte of a step on one of two ranks.

The process group is a fake one: what it gathers is zeros, of the right size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from jettison.core.errors import UsageError
from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.families.family import kernels_for
from jettison.predict.forecast import forecast
from jettison.predict.time import estimate
from jettison.spec.fine_tuning import Tuning
from jettison.spec.hardware import hardware
from jettison.spec.layout import GradientSync, Layout
from jettison.spec.precision import PRECISIONS, Optimizer
from jettison.spec.recompute import Recompute
from jettison.spec.run import Run
from support.formula_cases import spec_of

BATCH, SEQUENCE, LAYERS = 2, 128, 6

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    """This process is one of two."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class WeightReadPeaks(nn.Module):
    """A reentrant checkpoint around a unit, as transformers had them until 4.52."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor, **words: Any) -> Any:
        """What the unit returns."""
        return checkpoint(lambda x: self.inner(x, **words), hidden, use_reentrant=True, preserve_rng_state=False)


def described(vocabulary: int, recompute: str, tuning: Tuning | None = None) -> tuple[Any, Run]:
    """A model, and the described run."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=224,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config).to(torch.bfloat16).train()
    if recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    spec = spec_of(config)
    again = Recompute.parse("none" if recompute == "none" else "full", layers=LAYERS)
    run = Run(
        model=spec,
        seq=SEQUENCE,
        micro_batch=BATCH,
        kernels=kernels_for(spec, "huggingface").with_attention("sdpa").on_cpu(),
        precision=PRECISIONS["bf16-pure"],
        optimizer=Optimizer.NONE,
        tuning=tuning,
        layout=Layout(dp=2, zero=3, flat_parameters=True),
        recompute=replace(again, reentrant=recompute == "around"),
    )
    return model, run


def wrapped(vocabulary: int, tuning: Tuning | None, recompute: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Run]:
    """A model under FSDP1 as accelerate wraps it, and the described run."""
    model, run = described(vocabulary, recompute, tuning)
    policy: Any = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    if tuning is not None:
        peft = pytest.importorskip("peft")
        options = peft.LoraConfig(r=tuning.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, options, autocast_adapter_dtype=False)
        if tuning.inputs_need_gradients:
            model.enable_input_require_grads()
        monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "LlamaDecoderLayer")
        policy = peft.utils.other.fsdp_auto_wrap_policy(model)
    layers = (model if tuning is None else model.base_model.model).model.layers
    model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    if recompute == "around":
        for place, layer in enumerate(layers):
            layers[place] = WeightReadPeaks(layer)
    return model, run


@pytest.mark.parametrize("vocabulary", [64, 4096])
@pytest.mark.parametrize(
    ("adapters", "recompute"), [(False, "none"), (False, "full"), (True, "full"), (False, "around"), (True, "around")]
)
def test_the_peak_of_a_step_of_flat_parameters(
    vocabulary: int, adapters: bool, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the loss, or in a layer. With adapters in reentrant checkpoints inputs and their gradients stay: 30 % more."""
    tuning = Tuning(rank=4, inputs_need_gradients=True) if adapters else None
    model, run = wrapped(vocabulary, tuning, recompute, monkeypatch)
    ids = torch.randint(1, vocabulary, (BATCH, SEQUENCE))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    step()
    with AllocationCounter(static_tensors(model, ids)) as counter:
        step()
    exact = not adapters
    near = pytest.approx(counter.peak_bytes, abs=2048) if exact else pytest.approx(counter.peak_bytes, rel=0.01)
    assert forecast(run).peak_bytes == near


def peak_of_a_step(model: FullyShardedDataParallel, run: Run, vocabulary: int) -> int:
    """Bytes of the second step; with ``gradient_sync`` last, micro-batches before the last are in ``no_sync``."""
    ids, last = torch.randint(1, vocabulary, (BATCH, SEQUENCE)), run.layout.gradient_sync is GradientSync.LAST

    def step() -> None:
        for number in range(1, run.micro_batches + 1):
            with model.no_sync() if last and number < run.micro_batches else nullcontext():
                model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    step()
    with AllocationCounter(static_tensors(model, ids)) as counter:
        step()
    return counter.peak_bytes


@pytest.mark.parametrize("micro_batches", [2, 3])
@pytest.mark.parametrize("vocabulary", [64, 4096])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_peak_of_a_step_whose_gradients_stay_unsharded(
    recompute: str, vocabulary: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP1's ``no_sync`` in all micro-batches but the last."""
    model, run = wrapped(vocabulary, None, recompute, monkeypatch)
    layout = replace(run.layout, gradient_sync=GradientSync.LAST)
    run = replace(run, layout=layout, micro_batches=micro_batches)
    peak = peak_of_a_step(model, run, vocabulary)
    assert forecast(run).peak_bytes == pytest.approx(peak, abs=2048)
    sharded = forecast(replace(run, layout=replace(layout, gradient_sync=GradientSync.EACH)))
    assert peak > sharded.peak_bytes + sharded.parameters // 2


@pytest.mark.parametrize(("micro_batches", "sync"), [(1, "each"), (2, "each"), (2, "last")])
@pytest.mark.parametrize("vocabulary", [64, 4096])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_peak_of_a_step_of_one_unit(recompute: str, vocabulary: int, micro_batches: int, sync: str) -> None:
    """Without an auto-wrap policy, as Lightning's FSDPStrategy() and accelerate's NO_WRAP."""
    model, run = described(vocabulary, recompute)
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    layout = replace(run.layout, fsdp_one_unit=True, gradient_sync=GradientSync(sync))
    run = replace(run, layout=layout, micro_batches=micro_batches)
    peak = peak_of_a_step(model, run, vocabulary)
    assert forecast(run).peak_bytes == pytest.approx(peak, abs=2048)
    by_layer = forecast(replace(run, layout=replace(layout, fsdp_one_unit=False)))
    assert peak > by_layer.peak_bytes + by_layer.parameters // 2


def test_one_unit_is_all_gathered_and_reduced_before_and_after_all_else() -> None:
    run = replace(described(64, "none")[1], layout=Layout(dp=8, zero=3, flat_parameters=True))
    one = replace(run, layout=replace(run.layout, fsdp_one_unit=True))
    by_layer, found = (estimate(each, hardware("a100-80gb")).breakdown for each in (run, one))
    assert found.compute == by_layer.compute and found.communication > by_layer.communication
    with pytest.raises(UsageError, match="--fsdp-version 1"):
        Layout(dp=8, zero=3, fsdp_one_unit=True)
    with pytest.raises(UsageError, match="--fsdp-one-unit with --lora"):
        replace(one, tuning=Tuning(rank=4))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("vocabulary", [64, 4096])
def test_the_peak_of_a_step_of_groups_around_a_models_own_loss(vocabulary: int, recompute: str) -> None:
    """FSDP2 as accelerate has it: embedding, norm and head are the outermost's, and there while the loss is made."""
    model, run = described(vocabulary, recompute)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    run = replace(run, layout=Layout(dp=2, zero=3, fsdp_wrap_layers_only=True))
    ids = torch.randint(1, vocabulary, (BATCH, SEQUENCE))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    step()
    with AllocationCounter(static_tensors(model, ids)) as counter:
        step()
    assert forecast(run).peak_bytes == pytest.approx(counter.peak_bytes, abs=2048)
