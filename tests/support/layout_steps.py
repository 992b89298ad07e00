"""What ranks do for `benchmarks.random_ranks`: steps of a tiny model over tp × sp × cp × dp × ZeRO × pp × ep, every
byte counted.

Tensor, sequence and context parallelism are Jettison's own (`apply_tensor_parallel`, `apply_context_parallel`), or
torch's styles for `parallelize_module`; data parallelism is a mean of gradients, DistributedDataParallel, torch's
ZeroRedundancyOptimizer (ZeRO 1) or FSDP2 (ZeRO 3; with weights that stay whole it is as near to 2 as torch comes);
pipelines are those of `torch.distributed.pipelining`. Case by case the step is the one that a user would write.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from jettison.capture.tensor_subclasses import desugars
from jettison.dryrun.counter import static_tensors
from jettison.parallel import apply_context_parallel, apply_tensor_parallel, reduce_partial_gradients
from jettison.parallel.context_parallel import Context
from jettison.parallel.known_models import Plan, tensor_parallel_plan
from jettison.parallel.styles import ColumnParallel, Replicated, VocabularyParallel
from support import mixtures  # noqa: F401  puts them among families
from support.expert_steps import ExpertsOverRanks, expert_parameters, spread_experts
from support.formula_cases import FormulaCase, model_of
from support.pipeline_peaks import Cut, chunks_of, loss_of
from support.sharded_peaks import _Gathers, _Reduces, local, lowest_of_three

PAUSE_SECONDS = 0.002
AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True, kw_only=True)
class LayoutCase:
    """One model, one layout, one step.

    Args:
        code: whose tensor parallelism: "jettison", or "torch" with gathered inputs and a loss over shards.
        averaging: how gradients of data-parallel ranks are averaged: "mean" (each by itself), "ddp" (buckets), "views"
            (gradients that are views of them) or "zero" (as ``zero`` says).
        stays: with ZeRO 3, weights stay whole after a forward.
        mixed: products in bf16; parameters and gradients are fp32.
        full: every layer is a checkpoint of torch's.
        stage_layers: of each stage of each rank; empty: no pipeline.
        experts: of each block, ``choices`` of them a token's, over ``ep`` of the ranks of dp and cp; 0: a dense model.
        added: experts' outputs are added up in fp32, torchtitan's way.
    """

    family: str
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    layers: int
    batch: int
    sequence: int
    attention: str = "sdpa"
    code: str = "jettison"
    tp: int = 1
    sp: bool = False
    cp: int = 1
    dp: int = 1
    pp: int = 1
    averaging: str = "mean"
    zero: int = 0
    stays: bool = False
    mixed: bool = False
    full: bool = False
    micro_batches: int = 1
    schedule: str = "1f1b"
    stage_layers: tuple[int, ...] = ()
    experts: int = 0
    choices: int = 2
    ep: int = 1
    added: bool = False
    events: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def formula(self) -> FormulaCase:
        """The model, and a micro-batch."""
        if self.family == "gpt2":
            more: dict[str, Any] = {
                "n_embd": self.hidden,
                "n_layer": self.layers,
                "n_head": self.heads,
                "n_inner": self.ffn,
                "n_positions": 2 * self.sequence,
            }
        else:
            more = {
                "hidden_size": self.hidden,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "intermediate_size": self.ffn,
            }
        more |= {"vocab_size": self.vocabulary, "tie_word_embeddings": False}
        if self.experts:
            more["num_experts_per_tok"] = self.choices
            more["num_local_experts" if self.family == "mixtral" else "num_experts"] = self.experts
        if self.family == "qwen3_moe":
            more |= {"moe_intermediate_size": self.ffn, "intermediate_size": 2 * self.ffn}
        return FormulaCase(
            family=self.family,
            attention=self.attention,
            batch=self.batch,
            sequence=self.sequence,
            more=tuple(more.items()),
        )

    @classmethod
    def of(cls, words: dict[str, Any]) -> LayoutCase:
        """What a rank was told."""
        return cls(**{**words, "stage_layers": tuple(words["stage_layers"])})

    def told(self) -> dict[str, Any]:
        """As ranks are given it."""
        return asdict(self)

    def __str__(self) -> str:
        axes = [f"{name} {getattr(self, name)}" for name in ("tp", "cp", "dp", "pp", "ep") if getattr(self, name) > 1]
        words = [self.family, *axes, *(["sp"] if self.sp else []), self.averaging if self.dp * self.cp > 1 else ""]
        words += [f"zero {self.zero}" if self.zero else "", "stays" if self.stays else "", self.code]
        words += ["mixed" if self.mixed else "fp32", "full" if self.full else "", f"m {self.micro_batches}"]
        words += [f"{self.schedule} {self.stage_layers}" if self.pp > 1 else "", self.attention]
        sizes = f"{self.layers}×{self.hidden} a{self.heads}/{self.kv_heads} f{self.ffn} V{self.vocabulary}"
        if self.experts:
            words.append("added" if self.added else "sorted")
            sizes += f" e{self.experts}/{self.choices}"
        return " ".join(filter(None, [*words, f"[{sizes} b{self.batch} s{self.sequence}]"]))


class _Patient(TorchDispatchMode):
    """gloo's threads hold tensors for a moment longer than an operation takes: they are given it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if desugars(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func._schema.name == "_c10d_functional::wait_tensor":
            time.sleep(PAUSE_SECONDS)
        return out


def peaks(args: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each case, this rank's bytes between steps and at the highest, without the batch and AdamW's counters."""
    return [_tried(LayoutCase.of(words)) for words in args["cases"]]


def _tried(case: LayoutCase) -> dict[str, Any]:
    """What all ranks refuse alike is an answer; what one refuses alone ends in a timeout of the others."""
    try:
        return _peak(case)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}


def _peak(case: LayoutCase) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = tuple(getattr(case, axis) for axis in AXES)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    own = _Piped(case, mesh) if case.pp > 1 else _Whole(case, mesh)
    own.step()
    own.step()  # DistributedDataParallel makes its buckets anew in the second
    state = [local(t) for s in own.optimizer.state.values() for t in s.values()]
    counters = sum(local(s["step"]).nbytes for s in own.optimizer.state.values())
    static = [local(t) for module in own.modules for t in static_tensors(module)]
    there = [*static, *own.batch, *state, *own.beside()]
    small = sum(t.nbytes for t in own.batch) + counters
    with _Patient():
        return lowest_of_three(own.step, there, small, events=case.events, passing=own.left)


# what every layout does -----------------------------------------------------------------------------------------------


class _Step:
    """A rank's share of a model, and its step."""

    def __init__(self, case: LayoutCase, mesh: DeviceMesh) -> None:
        self.case, self.mesh = case, mesh
        shards = mesh["dp", "cp"]
        self.data = shards._flatten("data") if case.dp * case.cp > 1 else None
        sizes = (case.pp, case.dp * case.cp // case.ep, case.ep, case.tp)
        self.spread = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "edp", "ep", "tp")) if case.experts else None
        self.modules: list[nn.Module] = []
        self.batch: list[Tensor] = []
        self.buckets: list[Tensor] = []
        self.routing: list[Tensor] = []
        self.optimizer: Any = None

    def start(self) -> None:
        """The optimizer, of what parameters are by now."""
        trained = [p for module in self.modules for p in module.parameters()]
        options: dict[str, Any] = {"foreach": False}
        if self.case.zero == 1:
            from torch.distributed.optim import ZeroRedundancyOptimizer  # whose package warns of its own

            assert self.data is not None
            own = self.experts()
            shared = [p for p in trained if id(p) not in own]
            made = [ZeroRedundancyOptimizer(shared, torch.optim.AdamW, self.data.get_group(), **options)]
            some = [p for p in trained if id(p) in own]
            if some and self.spread is not None:
                made.append(ZeroRedundancyOptimizer(some, torch.optim.AdamW, self.spread["edp"].get_group(), **options))
            self.optimizer = _OwnState(made)
        else:
            self.optimizer = torch.optim.AdamW(trained, **options)

    def experts(self) -> set[int]:
        """Which parameters are experts', by identity."""
        return {id(p) for module in self.modules for p in expert_parameters(module)}

    def spread_over(self, module: nn.Module, tokens: int) -> None:
        """A rank's experts alone, and routers whose choices are even."""
        if self.spread is not None:
            self.routing += spread_experts(module, self.spread["ep"].get_group(), tokens, added=self.case.added)

    def passes(self) -> None:
        """All forwards and backwards."""
        raise NotImplementedError

    def step(self) -> None:
        self.passes()
        parameters = [p for module in self.modules for p in module.parameters()]
        if self.case.tp > 1 and self.case.code == "jettison" and self.case.zero != 3:
            reduce_partial_gradients(parameters)
        if self.data is not None and self.case.averaging != "zero":
            own = self.experts()
            for parameter in parameters:
                assert parameter.grad is not None
                if id(parameter) in own and self.spread is not None:
                    distributed.all_reduce(parameter.grad, group=self.spread["edp"].get_group())
                elif self.case.averaging == "mean":
                    distributed.all_reduce(local(parameter.grad), group=self.data.get_group())
                else:
                    continue
                local(parameter.grad).div_(self.data.size())
            del parameter
        del parameters
        self.optimizer.step()
        self.optimizer.zero_grad()

    def beside(self) -> list[Tensor]:
        """What is there already and is neither of the model nor of the optimizer."""
        return self.buckets

    def left(self) -> Iterator[Tensor]:
        """What is there between steps and goes within the next."""
        return iter(())

    def autocast(self) -> Any:
        wide = not self.case.mixed or self.case.zero == 3
        return nullcontext() if wide else torch.autocast("cpu", torch.bfloat16)

    def shard(self, module: Any, groups: list[Any], end: list[Any]) -> None:
        """FSDP2: each of these, the end, and the module."""
        assert self.data is not None
        options: dict[str, Any] = {"mesh": self.data, "reshard_after_forward": not self.case.stays}
        if self.case.mixed:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if self.spread is not None:  # torchtitan, ``apply_fsdp``: a block's experts are a group within its layer's
            for one in [m for m in module.modules() if isinstance(m, ExpertsOverRanks)]:
                fully_shard(one, **{**options, "mesh": self.spread["edp"]})
                one.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing on the way
                one.set_gradient_divide_factor(self.data.size())
        for group in groups:
            fully_shard(group, **options)
        if end:
            fully_shard(end, **options)
        fully_shard(module, **options)
        for one in module.modules():
            if isinstance(one, FSDPModule):
                one.set_custom_all_gather(_Gathers())
                one.set_custom_reduce_scatter(_Reduces())


class _OwnState:
    """ZeroRedundancyOptimizers with the state of this rank's parameters where an optimizer has it."""

    def __init__(self, wholes: Sequence[Any]) -> None:
        self.wholes = wholes

    def step(self) -> None:
        for whole in self.wholes:
            whole.step()

    def zero_grad(self) -> None:
        for whole in self.wholes:
            whole.zero_grad()

    @property
    def state(self) -> dict[Any, Any]:
        return {parameter: state for whole in self.wholes for parameter, state in whole.optim.state.items()}


def _noted(buckets, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, and these are words
    """As without a hook; whose memory buckets are is known then."""
    if bucket.index() == 0:
        buckets.clear()
    buckets.append(bucket.buffer())
    return allreduce_hook(None, bucket)


def _ends(model: Any) -> tuple[list[Any], list[Any]]:
    """Embeddings, and what stands behind the layers."""
    if hasattr(model, "transformer"):
        return [model.transformer.wte, model.transformer.wpe], [model.transformer.ln_f, model.lm_head]
    return [model.model.embed_tokens], [model.model.norm, model.lm_head]


def _layers(model: Any) -> Any:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


# without a pipeline ---------------------------------------------------------------------------------------------------


class _Whole(_Step):
    """Every rank runs the model from end to end."""

    def __init__(self, case: LayoutCase, mesh: DeviceMesh) -> None:
        super().__init__(case, mesh)
        model: Any = model_of(case.formula)
        if case.full:
            model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        self.context: Context | None = apply_context_parallel(model, mesh["cp"]) if case.cp > 1 else None
        if case.tp > 1 and case.code == "jettison":
            apply_tensor_parallel(model, mesh["tp"], sequence_parallel=case.sp)
        elif case.tp > 1:
            parallelize_module(model, mesh["tp"], torch_plan(model, sp=case.sp))
        self.spread_over(model, case.batch * case.sequence // case.cp)
        self.model: Any = model.train()
        if case.zero == 3:
            first, last = _ends(model)
            # positions are a group of torch's own table: together they are one, as the ledger has them
            self.shard(model, [first if len(first) > 1 else first[0], *_layers(model)], last)
        elif case.averaging in ("ddp", "views"):
            assert self.data is not None
            own = {id(parameter) for parameter in expert_parameters(model)}
            if own:
                names = [name for name, parameter in model.named_parameters() if id(parameter) in own]
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
            self.model = DistributedDataParallel(
                model, process_group=self.data.get_group(), gradient_as_bucket_view=case.averaging == "views"
            )
            self.model.register_comm_hook(self.buckets, _noted)
        self.modules = [model]
        rows = torch.randint(1, case.vocabulary, (case.batch * case.micro_batches, case.sequence))
        labels = nn.functional.pad(rows, (0, 1), value=-100)[..., 1:].contiguous()
        if self.context is not None:
            rows, labels = self.context.take(rows, 1), self.context.take(labels, 1)
        self.ids, self.labels = rows, labels
        self.batch = [rows] if self.context is None else [rows, labels]
        self.told: dict[str, Any] = {}
        if case.tp > 1 and case.code == "torch":
            self.told = {"position_ids": torch.arange(case.sequence).unsqueeze(0)}  # the stream may be a part of it
            self.batch += [labels, self.told["position_ids"]]
        if self.context is not None:
            positions = self.context.positions(case.sequence)
            self.told = {"position_ids": positions.unsqueeze(0)}
            self.batch.append(positions)
            if case.attention == "eager":
                from jettison.models.reference import causal_rows_mask

                mask = causal_rows_mask(positions, case.sequence, torch.float32)[None, None]
                self.told["attention_mask"] = mask
                self.batch.append(mask)
        self.batch += self.routing
        self.start()

    def passes(self) -> None:
        case = self.case
        last = case.micro_batches - 1
        for number, (rows, labels) in enumerate(
            zip(self.ids.split(case.batch), self.labels.split(case.batch), strict=True)
        ):
            waits = isinstance(self.model, DistributedDataParallel) and number < last
            with self.model.no_sync() if waits else nullcontext():
                self._pass(rows, labels)

    def _pass(self, rows: Tensor, labels: Tensor) -> None:
        sharded = self.case.tp > 1 and self.case.code == "torch"
        with loss_parallel() if sharded else nullcontext():
            with self.autocast():
                loss = self._loss(rows, labels, shifted=self.context is not None or sharded)
            (loss / self.case.micro_batches).backward()

    def _loss(self, rows: Tensor, labels: Tensor, *, shifted: bool) -> Tensor:
        logits = self.model(input_ids=rows, **self.told).logits
        if not shifted:
            return loss_of(logits, rows)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.reshape(-1), ignore_index=-100)


# torch's own tensor parallelism ---------------------------------------------------------------------------------------


def torch_plan(model: Any, *, sp: bool) -> dict[str, ParallelStyle]:
    """torchtitan's plan (``torchtitan/models/llama3/infra/parallelize.py`` of 2025, ``apply_tp``), for the names of
    transformers. Without sequence parallelism activations are whole between the blocks.
    """
    between: Any = Shard(1) if sp else Replicate()
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if sp:
        plan["model.norm"] = SequenceParallel()
    for number, _ in enumerate(model.model.layers):
        at = f"model.layers.{number}"
        attention = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
        mlp = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
        if sp:
            plan |= {f"{at}.input_layernorm": SequenceParallel(), f"{at}.post_attention_layernorm": SequenceParallel()}
        plan |= {f"{at}.self_attn": attention, f"{at}.mlp": mlp}
        plan |= {f"{at}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"{at}.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan[f"{at}.self_attn.o_proj"] = RowwiseParallel(output_layouts=between)
        plan[f"{at}.mlp.down_proj"] = RowwiseParallel(output_layouts=between)
    return plan


# pipelines ------------------------------------------------------------------------------------------------------------


class _SharedCut(Cut):
    """A stage whose stream may hold a part of the sequence, while positions are those of all of it."""

    where: Tensor | None = None
    mixed = False

    def forward(self, x: Tensor) -> Tensor:
        """Autocast is for forwards alone: a schedule's step is both passes."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.mixed):
            return super().forward(x)

    def _other(self, x: Tensor) -> Tensor:
        if self.where is None:
            return super()._other(x)
        found = self.inner(**{"input_ids" if self.first else "inputs_embeds": x}, position_ids=self.where)
        return found.last_hidden_state


class _Piped(_Step):
    """Stages of `torch.distributed.pipelining`, each of them tensor parallel, sharded or neither."""

    def __init__(self, case: LayoutCase, mesh: DeviceMesh) -> None:
        super().__init__(case, mesh)
        place, ranks = mesh["pp"].get_local_rank(), case.pp
        own = list(chunks_of(case, place, ranks, _SharedCut))
        where = torch.arange(case.sequence).unsqueeze(0)
        for _, module in own:
            if case.tp > 1:
                apply_tensor_parallel(
                    module, mesh["tp"], sequence_parallel=case.sp, plan=_stage_plan(module, sp=case.sp)
                )
                module.where = where if case.sp else None
            module.mixed = case.mixed and case.zero != 3
            self.spread_over(module, case.batch * case.sequence)
            if case.zero == 3:
                first = [module.inner.embed_tokens] if module.first else []
                self.shard(
                    module,
                    [*first, *module.inner.layers],
                    [] if module.head is None else [module.inner.norm, module.head],
                )
            module.train()
        self.modules = [module for _, module in own]
        count = len(case.stage_layers)
        group = mesh["pp"].get_group()
        self.stages = [PipelineStage(m, number, count, torch.device("cpu"), group=group) for number, m in own]
        schedules: dict[str, Any] = {
            "1f1b": Schedule1F1B,
            "gpipe": ScheduleGPipe,
            "zero-bubble": ScheduleInterleavedZeroBubble,
        }
        kind = ScheduleInterleaved1F1B if len(own) > 1 and case.schedule == "1f1b" else schedules[case.schedule]
        several = kind in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)
        self.schedule: Any = kind(self.stages if several else self.stages[0], case.micro_batches, loss_fn=loss_of)
        ids = torch.randint(1, case.vocabulary, (case.batch * case.micro_batches, case.sequence))
        self.batch = [ids, where] if case.sp else [ids]
        self.batch += self.routing
        self.given = (ids,) if own[0][0] == 0 else ()
        self.wanted = {"target": ids} if own[-1][0] == count - 1 else {}
        self.start()

    def passes(self) -> None:
        self.schedule.step(*self.given, **self.wanted, return_outputs=False)

    def _received(self) -> Iterator[Tensor]:
        for stage in self.stages:
            for number in range(self.case.micro_batches):
                for info in (*stage.args_recv_info[number], *stage.grad_recv_info[number]):
                    if info.buffer is not None:
                        yield info.buffer

    def beside(self) -> list[Tensor]:
        return list(self._received())

    def left(self) -> Iterator[Tensor]:
        yield from (buffer.grad for buffer in self._received() if buffer.grad is not None)


def _stage_plan(module: Any, *, sp: bool) -> Plan:
    """Of a stage: its layers' own plan, and its ends."""
    dim = 1 if sp else None
    plan: Plan = {
        f"inner.layers.{path}": style
        for path, style in tensor_parallel_plan(module.inner.layers, sequence_parallel=sp).items()
    }
    if module.first:
        plan["inner.embed_tokens"] = VocabularyParallel(dim=dim)
    if module.head is not None:
        plan["inner.norm"] = Replicated(sharded=sp, gathers=dim)
        plan["head"] = ColumnParallel(enters=not sp, collected=True)
    return plan
