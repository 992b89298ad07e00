"""Megatron-Core's own pipeline schedules on gloo ranks without a GPU, over the stages of `pipeline_peaks`.

Its process groups, its exchange between stages and its schedules run as they are. Where they name a GPU they are given
the CPU. A chunk leaves what it was sent at the module, as `TransformerBlock.set_input_tensor` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed
from torch.overrides import TorchFunctionMode

from support.formula_cases import VOCABULARY
from support.pipeline_peaks import Case, Counted, Cut, chunks_of, loss_of


class CudaIsCpu(TorchFunctionMode):
    """What is asked of a GPU comes from the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Chunk(Cut):
    """Holds the last input that it was sent."""

    config: Any
    model_type = "a decoder"  # is asked for
    input_tensor: Tensor | None = None

    def set_input_tensor(self, given: list[Tensor | None]) -> None:
        (self.input_tensor,) = given

    def forward(self, x: Tensor) -> Tensor:
        from megatron.core.utils import make_viewless_tensor

        stream = super().forward(x)  # which a stage frees as it has sent it, and so must own
        return make_viewless_tensor(inp=stream, requires_grad=True, keep_graph=True) if self.head is None else stream


def prepare(folder: str) -> Any:
    """Megatron's schedules, on groups of their own."""
    sys.path.insert(0, folder)
    from support.target_process import prepare as stand_in

    stand_in()
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    from megatron.core.pipeline_parallel import schedules

    return schedules


def peaks(args: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each case, this rank's peak and what is left between steps."""
    schedules = prepare(args["folder"])
    from megatron.core import parallel_state

    found = []
    for words in args["cases"]:
        case = Case.of(words)
        chunks = len(case.stage_layers) // distributed.get_world_size()
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=distributed.get_world_size(),
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        )
        found.append(_peak(schedules, case))
        parallel_state.destroy_model_parallel()
    return found


def _peak(schedules: Any, case: Case) -> dict[str, Any]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    formula, ranks = case.formula, distributed.get_world_size()
    modules = [made for _, made in chunks_of(case, distributed.get_rank(), ranks, Chunk)]
    hidden = modules[0].inner.config.hidden_size
    chunks = len(modules)
    config = TransformerConfig(
        num_layers=len(case.stage_layers),
        hidden_size=hidden,
        num_attention_heads=1,
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        use_cpu_initialization=True,
    )
    for number, module in enumerate(modules):
        module.config = config
        module.vp_stage = number if chunks > 1 else None
    ids = torch.randint(1, VOCABULARY, (formula.batch * case.micro_batches, formula.sequence))

    def forward_step(batches: Iterator[Tensor], model: Chunk) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Any]]]:
        rows = next(batches)
        given = rows if model.first else model.input_tensor
        assert given is not None

        def loss_func(logits: Tensor) -> tuple[Tensor, dict[str, Any]]:
            return loss_of(logits, rows), {}

        return model(given), loss_func

    def passes() -> None:
        with CudaIsCpu():
            schedules.get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(ids.split(formula.batch)) for _ in modules],
                model=list(modules),
                num_microbatches=case.micro_batches,
                seq_length=formula.batch,  # its stream is s × b × h, and this one b × s × h
                micro_batch_size=formula.sequence,
            )

    counted = Counted(modules, ids)
    counted.step(passes)

    def kept() -> Iterator[Tensor]:
        for module in modules:
            if (given := module.input_tensor) is not None:
                yield given
                assert given.grad is not None
                yield given.grad

    return counted.measure(passes, beside=kept(), events=case.events)
