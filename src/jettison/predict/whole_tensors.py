"""Muon over data-parallel ranks, each of which has whole tensors: states of the biggest rank, and buffers of a step.

NOTE [ Whole tensors on ranks ]
Megatron-LM d98e8a6, ``megatron/core/optimizer/layer_wise_optimizer.py``, ``LayerWiseDistributedOptimizer``, of
``--optimizer muon --use-distributed-optimizer``. Newton-Schulz needs a matrix whole, so that masters and moments of a
tensor are on one rank; parameters and gradients are whole on every rank, as without a distributed optimizer.

- ``dist-muon``, the default: matrices of layers lie in a buffer of as many equal shards as there are ranks, none across
  a boundary (``_compute_per_buffer_param_layout``): by work, max x min^2 of its sizes, each goes to the rank that has
  least, while a shard stays within 1.3 of an even one. Shards are padded to the fullest, in the buffers of parameters
  and of gradients alike. All other parameters are sharded as ever. One bucket is taken, as without
  ``--overlap-grad-reduce``.
- ``dist-muon-pingpong``, ``--no-use-layer-wise-param-layout``: every tensor, by its numbers, to ranks there and back
  (``_shard_params_ping_pong``); what was updated is gathered into tensors of its own (``allgather_params``).

Experts are tensors apart, over the ranks that have the same ones.

NOTE [ Newton-Schulz ]
NVIDIA-NeMo/Emerging-Optimizers, ``orthogonalized_optimizers/muon_utils.py``, ``newton_schulz``: the moment normalised
in fp32, in bf16, two small squares and the next iterate, the last one in fp32. ``emerging_optimizers.py`` of Megatron,
``scaled_orthogonalize_fn``, multiplies it twice while it is held: three fp32 tensors are the most, 12 bytes a number.
Over tensor-parallel ranks (``newton_schulz_tp``, "duplicated") shards of all are gathered and joined first: 8 bytes a
number of the whole, which stay. A joint product of queries, keys and values is split into copies, which is not counted:
feed-forward matrices are larger. torch's own (``torch/optim/_muon.py``): the update in the dtype of moments
(nesterov), an iterate and the next one in bf16, two squares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.static import Static, state_bytes
from jettison.formula.tape import Weight
from jettison.predict.stages import Chunk
from jettison.spec.kernels import Device
from jettison.spec.precision import Optimizer
from jettison.spec.run import Run

WHOLE_TENSORS = (Optimizer.DIST_MUON, Optimizer.DIST_MUON_PINGPONG)
_ALIGNED = 64
_SLACK = 1.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A parameter as Megatron has it, on one rank of tensor parallelism: of experts one.

    Args:
        matrix: Newton-Schulz runs on it.
        rows, columns: of a matrix; 1 and all numbers of what is none.
        whole: its sizes on all ranks of tensor parallelism together.
    """

    rows: int
    columns: int
    matrix: bool
    expert: bool
    whole: tuple[int, int]
    state: int
    master: int

    @property
    def numel(self) -> int:
        """Numbers."""
        return self.rows * self.columns

    @property
    def work(self) -> int:
        """Of Newton-Schulz, as Megatron estimates it."""
        small, big = sorted((self.rows, self.columns))
        return big * small * small if self.matrix else self.numel


def tensors_of(run: Run, chunks: Sequence[Chunk]) -> Iterator[Tensor]:
    """All parameters of a stage that are trained, in the order of the forward."""
    for chunk in chunks:
        for group in chunk:
            for _ in group.names:
                for weight in group.part.region.weights:
                    if not weight.frozen and not (weight.tied and run.layout.pp == 1):
                        yield from _tensors(run, weight, in_layer=group.part.is_layer)


def _tensors(run: Run, weight: Weight, *, in_layer: bool) -> Iterator[Tensor]:
    sizes = run.layout.mesh_sizes
    local = [
        -(-size // prod(sizes[axis] for axis, dim in weight.places if dim == i)) for i, size in enumerate(weight.shape)
    ]
    count = local.pop(0) if weight.expert else 1
    numel = prod(local)
    matrix = len(local) == 2 and in_layer and not weight.tied
    precision = run.precision
    each = Tensor(
        rows=local[0] if matrix else 1,
        columns=local[1] if matrix else numel,
        matrix=matrix,
        expert=weight.expert,
        whole=(weight.shape[-2], weight.shape[-1]) if matrix else (1, weight.total),
        state=state_bytes(weight, numel, precision, run.optimizer, in_layer=matrix),
        master=numel * DTYPE_BYTES[precision.master] if precision.master else 0,
    )
    for _ in range(count):
        yield each


def with_whole_tensors(run: Run, chunks: Sequence[Chunk], even: Static) -> Static:
    """What the biggest rank has, where ``even`` has an even share of all states."""
    if run.optimizer not in WHOLE_TENSORS:
        return even
    found = list(tensors_of(run, chunks))
    state = master = padding = 0
    for expert, ranks in ((False, _ranks(run, expert=False)), (True, _ranks(run, expert=True))):
        of = [t for t in found if t.expert is expert]
        shares, padded = shared_out(run, of, ranks)
        state_here, master_here = max((sum(t.state + t.master for t in s), sum(t.master for t in s)) for s in shares)
        rest = [t for t in of if not t.matrix] if run.optimizer is Optimizer.DIST_MUON else []
        state += state_here + sum(-(-(t.state + t.master) // ranks) for t in rest)
        master += master_here + sum(-(-t.master // ranks) for t in rest)
        padding += padded
    precision = run.precision
    return replace(
        even,
        state=state,
        master=master,
        parameters=even.parameters + padding * DTYPE_BYTES[precision.parameter],
        gradients=even.gradients + padding * DTYPE_BYTES[precision.gradient],
    )


def _ranks(run: Run, *, expert: bool) -> int:
    """That share tensors out."""
    return (run.layout.expert_shards if expert else run.layout.shards) if run.layout.zero else 1


def shared_out(run: Run, tensors: Sequence[Tensor], ranks: int) -> tuple[list[list[Tensor]], int]:
    """What each rank has whole, and numbers of padding in a buffer of all of it."""
    if run.optimizer is Optimizer.DIST_MUON_PINGPONG:
        return ping_pong(tensors, ranks), 0
    matrices = [t for t in tensors if t.matrix]
    return ([matrices], 0) if ranks == 1 else in_shards(matrices, ranks)


def ping_pong(tensors: Sequence[Tensor], ranks: int) -> list[list[Tensor]]:
    """``_shard_params_ping_pong``: the smallest first."""
    turns = [*range(ranks), *reversed(range(ranks))]
    shares: list[list[Tensor]] = [[] for _ in range(ranks)]
    for number, tensor in enumerate(sorted(tensors, key=lambda t: t.numel)):
        shares[turns[number % len(turns)]].append(tensor)
    return shares


def in_shards(tensors: Sequence[Tensor], ranks: int) -> tuple[list[list[Tensor]], int]:
    """``_emit_bucket``, of one bucket; ``pad_param_start``, ``_shard_divisor``."""
    shares: list[list[Tensor]] = [[] for _ in range(ranks)]
    ends, work = [0] * ranks, [0] * ranks
    total = sum(t.numel for t in tensors)
    most = total / ranks * _SLACK
    for tensor in sorted(tensors, key=lambda t: -t.work):
        fits = [r for r in range(ranks) if _up(ends[r], _ALIGNED) + tensor.numel <= most]
        rank = min(fits, key=lambda r: work[r]) if fits else min(range(ranks), key=lambda r: ends[r])
        ends[rank] = _up(ends[rank], _ALIGNED) + tensor.numel
        work[rank] += tensor.work
        shares[rank].append(tensor)
    shard = _up(max(ends), lcm(_ALIGNED, lcm(ranks, 128) // ranks))
    return shares, ranks * shard - total


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def muon_step_bytes(run: Run, chunks: Sequence[Chunk]) -> int:
    """The most that a step of Muon allocates at once: NOTE [ Newton-Schulz ]; 0 where PyTorch runs it on a CPU."""
    distributed = run.optimizer in WHOLE_TENSORS
    if not distributed and (run.optimizer is not Optimizer.MUON or run.kernels.device is Device.CPU):
        return 0
    found = list(tensors_of(run, chunks))
    each = _megatron_bytes if distributed else torch_bytes
    moment = DTYPE_BYTES[run.precision.moment or run.precision.master or run.precision.parameter]
    most = max((each(t, moment) for t in found if t.matrix), default=0)
    if run.optimizer is not Optimizer.DIST_MUON_PINGPONG:
        return most
    gathered = [0, 0]
    for tensor in found:
        gathered[tensor.expert] += tensor.numel * DTYPE_BYTES[run.precision.parameter]
    return max(most, 0, *(nbytes for kind, nbytes in enumerate(gathered) if _ranks(run, expert=bool(kind)) > 1))


def _megatron_bytes(tensor: Tensor, moment: int) -> int:
    del moment  # fp32: newton_schulz takes nothing else
    if tensor.whole == (tensor.rows, tensor.columns):
        return 12 * tensor.numel
    numel, small = prod(tensor.whole), min(tensor.whole)
    return 8 * numel + max(6 * numel, 4 * (numel + small * small))


def torch_bytes(tensor: Tensor, moment: int) -> int:
    small = min(tensor.rows, tensor.columns)
    return (moment + 4) * tensor.numel + 4 * small * small
