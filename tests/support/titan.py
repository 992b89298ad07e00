"""torchtitan's Trainer on a CPU, with a plan and without: what ranks find. For `test_torchtitan`.

torchtitan 0.3 runs on accelerators. What it asks of one is answered here for the CPU: a device without an index, its
statistics (none). Its language models attend by FlexAttention, which has no backward on a CPU; these have the
ScaledDotProductAttention of its own tests. A time limit that it sets on process groups has no function in torch 2.13.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import jettison
from jettison.core.errors import JettisonError
from jettison.train.engine import alive
from jettison.train.phase_memory import MemoryMeter
from support.ranks import FOLDER

with warnings.catch_warnings(action="ignore"):
    from torchtitan.tools import utils

    def _nothing(*_: Any, **__: Any) -> None: ...

    _cpu = {"get_device_name": lambda *_: "cpu", "current_device": lambda: 0, "memory_stats": lambda *_: {}}
    _cpu |= dict.fromkeys(("set_device", "reset_peak_memory_stats", "empty_cache", "synchronize"), _nothing)
    _cpu["get_device_properties"] = lambda *_: SimpleNamespace(total_memory=1 << 33)
    utils.device_type, utils.device_module = "cpu", SimpleNamespace(**_cpu)
    utils.get_local_device = lambda: torch.device("cpu")

    import torchtitan.distributed.utils
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import (
        LRSchedulersContainer,
        OptimizersContainer,
        ParamGroupConfig,
        default_adamw,
    )
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import CommConfig, CompileConfig, ConfigManager, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    torchtitan.distributed.utils.set_pg_timeouts = _nothing
    from jettison.integrations import torchtitan as integration

WORDS, ROWS, LENGTH, STEPS = 2048, 8, 128, 3


class Words(BaseTokenizer):
    """The Trainer wants one; the batches are numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config): ...

    def __init__(self, config: Any, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *_: Any) -> list[int]:
        return []

    def decode(self, *_: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return WORDS


class Batches(BaseDataLoader):
    """The same batches whenever a rank asks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config): ...

    def __init__(self, config: Any, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self.generator, self.shape = torch.Generator().manual_seed(dp_rank), (local_batch_size, seq_len)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            ids, labels = (torch.randint(0, WORDS, self.shape, generator=self.generator) for _ in range(2))
            yield {"input": ids, "positions": torch.arange(self.shape[1]).repeat(self.shape[0], 1)}, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _state: Any) -> None: ...


class Measured(Trainer):
    """A trainer that measures its steps."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config): ...

    def train_step(self, data_iterator: Any) -> None:
        own = super().train_step
        batches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
        given = [t for inputs, labels in batches for t in (*inputs.values(), labels)]
        meter = MemoryMeter(
            self.device,
            1,
            lambda: [t for one in self.optimizers for t in alive(self.model_parts, one)] + given,
            storages=True,
        )

        def unseen(*args: Any, **kwargs: Any) -> Any:
            assert meter._counter is not None
            with meter._counter.not_counting():
                return jettison.auto_checkpoint(*args, **kwargs)

        integration.auto_checkpoint = unseen
        with meter.step() as peaks, meter.phase("step"):
            own(iter(batches))
        found = peaks()
        assert found is not None
        self.peaks = [*getattr(self, "peaks", []), found.peak_bytes]


def config(
    activation_checkpoint: Any = None,
    *,
    chunked: bool = False,
    micro_batches: int = 1,
    kinds: int = 1,
    attention: Any = None,
    **more: Any,
) -> Any:
    """A Llama of four layers.

    Args:
        micro_batches: in a step.
        kinds: of optimizers.
    """
    spec = model_registry("debugmodel")
    attention = attention or ScaledDotProductAttention.Config()
    spec.model.layers = [
        dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, inner_attention=attention))
        for layer in spec.model.layers[:4]
    ]
    ranks = distributed.get_world_size()
    loss: Any = CrossEntropyLoss.Config(global_vocab_size=WORDS)
    optimizer = default_adamw(lr=8e-4)
    if kinds == 2:
        norms = ParamGroupConfig(pattern="norm", optimizer_name="Adam", optimizer_kwargs={"lr": 1e-3})
        optimizer = OptimizersContainer.Config(param_groups=[norms, *optimizer.param_groups])
    return Measured.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(loss_fn=loss) if chunked else loss,
        tokenizer=Words.Config(),
        dataloader=Batches.Config(),
        optimizer=optimizer,
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=ROWS,
            global_batch_size=ROWS * ranks * micro_batches,
            seq_len=LENGTH,
            steps=STEPS,
            disable_cuda_graphs=more.pop("disable_cuda_graphs", True),
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(**more.pop("parallelism", {})),
        checkpoint=CheckpointManager.Config(enable=False),
        comm=CommConfig(trace_buf_size=0),
        activation_checkpoint=activation_checkpoint,
        dump_folder=str(Path(os.environ[FOLDER]) / "titan"),
        **more,
    )


def built(*policy: Any, **how: Any) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        trainer = config(*policy, **how).build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule) and distributed.get_world_size() > 1:
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it adds
    return trainer


def trained(trainer: Any) -> tuple[list[tuple[float, float]], list[Tensor]]:
    """Loss and norm of the gradients of each step; the parameters."""
    seen: list[tuple[float, float]] = []
    trainer.metrics_processor.log = lambda _step, mean, _most, norm, **_: seen.append((mean, norm))
    with warnings.catch_warnings(action="ignore"):
        trainer.train()
    trainer.close()
    parameters = [p.detach() for p in trainer.model_parts[0].parameters()]
    return seen, [(p.full_tensor() if isinstance(p, DTensor) else p).clone() for p in parameters]


def compared(*, by_hand: bool = False, **how: Any) -> dict[str, Any]:
    """Plain steps, and the same under 0.85 of their peak.

    Args:
        by_hand: the budget is given to the trainer that is built, not to its configuration.
    """
    plain = built(**how)
    losses, parameters = trained(plain)
    budget = f"{int(0.85 * max(plain.peaks))}B"
    policy = None if by_hand else integration.AutoCheckpoint.Config(budget=budget)
    trainer = built(policy, **how)
    if by_hand:
        integration.auto_checkpoint_trainer(trainer, budget)
    again, same = trained(trainer)
    plan = trainer.auto_checkpoint.applied.plan
    trainer.auto_checkpoint.remove()
    return {
        "steps": len(losses),
        "same": again == losses and all(map(torch.equal, same, parameters)),
        "plain": plain.peaks,
        "budget": int(budget[:-1]),
        "peaks": trainer.peaks,
        "predicted": plan.predicted.peak_bytes,
        "seen": (trainer.ntokens_seen, plain.ntokens_seen),
        "left": "forward_backward_step" in vars(trainer),
    }


def refused(_: Any) -> dict[str, str]:
    """What torchtitan does by itself, and what is said of it."""
    said, budget = {}, integration.AutoCheckpoint.Config(budget="1GiB")
    for name, refuses in {
        "graphs": lambda: built(budget, disable_cuda_graphs=False),
        "compile": lambda: built(budget, compile=CompileConfig(enable=True)),
        "flex": lambda: built(budget, attention=FlexAttention.Config()),
        "selective": lambda: integration.auto_checkpoint_trainer(built(SelectiveAC.Config()), "1GiB"),
        "pipeline": lambda: integration.auto_checkpoint_trainer(
            SimpleNamespace(config=config(parallelism={"pipeline_parallel_degree": 2})), "1GiB"
        ),
        "whole mesh": lambda: trained(built(budget, parallelism={"spmd_backend": "full_dtensor"})),
        "tensor": lambda: integration.auto_checkpoint_trainer(
            SimpleNamespace(config=config(parallelism={"tensor_parallel_degree": 2})), "1GiB"
        ),
        "nobody": lambda: budget.build().apply(torch.nn.Module()),
    }.items():
        try:
            refuses()
        except JettisonError as error:
            said[name] = str(error)
    return said


def llama() -> Any:
    """A configuration as torchtitan's command line finds it."""
    return config(integration.AutoCheckpoint.Config(budget="1GiB"))


def on_the_command_line(_: Any) -> list[Any]:
    """What torchtitan makes of its arguments: the budget, and the steps."""
    with warnings.catch_warnings(action="ignore"):
        found: Any = ConfigManager().parse_args(
            ["--module", "support.titan", "--config", "llama", "--training.steps", "5"]
        )
    return [
        type(found.activation_checkpoint.build()).__name__,
        found.activation_checkpoint.budget,
        found.training.steps,
    ]


HOW: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "chunked": {"chunked": True, "micro_batches": 2, "kinds": 2, "by_hand": True},
    "sharded": {"parallelism": {"spmd_backend": "partial_dtensor"}},
}
