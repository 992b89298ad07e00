"""The optimizer step of a rank: the model states that it updates, and the bytes that it allocates and transfers.

NOTE [ Whole tensors on ranks ]
Megatron-LM d98e8a6, ``megatron/core/optimizer/layer_wise_optimizer.py``, ``LayerWiseDistributedOptimizer``, of
``--optimizer muon --use-distributed-optimizer``. Newton-Schulz needs full matrices, so that masters and moments of a
tensor belong to one rank; parameters and gradients are replicated, as without a distributed optimizer.

- ``dist-muon``, the default: the buffer of layers' matrices has an equal shard for each rank, and no matrix crosses
  shards (``_compute_per_buffer_param_layout``): in order of work, max x min^2 of its sizes, each goes to the rank with
  the least, while a shard is within 1.3 of an even one. Shards are padded to the largest, in the buffers of parameters
  and of gradients. All other parameters are sharded evenly. One bucket is modelled, as without
  ``--overlap-grad-reduce``.
- ``dist-muon-pingpong``, ``--no-use-layer-wise-param-layout``: tensors sorted by size go to ranks in ascending, then
  descending order (``_shard_params_ping_pong``); updated ones are all-gathered into new tensors
  (``allgather_params``).

Experts are separate tensors, sharded over the ranks with the same ones.

torch's ZeroRedundancyOptimizer (``torch/distributed/optim/zero_redundancy_optimizer.py``, ``_partition_parameters``):
parameters in descending order of size, each to the rank with the fewest elements so far. A step runs the optimizer for
a rank's own, and ``_sync_params`` broadcasts them in place. Under expert parallelism experts have a second optimizer,
over the ranks with the same ones.

NOTE [ Newton-Schulz ]
NVIDIA-NeMo/Emerging-Optimizers, ``orthogonalized_optimizers/muon_utils.py``, ``newton_schulz``: the moment normalized
in fp32, then in bf16, two small squares and the next iterate, the last one in fp32. Megatron's
``emerging_optimizers.py``, ``scaled_orthogonalize_fn``, multiplies it twice while the caller references it: at most
three fp32 tensors, 12 bytes an element. With tensor parallelism (``newton_schulz_tp``, "duplicated") shards are
all-gathered and concatenated first: 8 bytes an element of the full matrix, live until the end. A QKV weight is split
into copies, which are not counted: MLP matrices are larger. torch's own (``torch/optim/_muon.py``): the update in the
dtype of moments (nesterov), an iterate and the next one in bf16, two squares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm, prod

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.model_states import ModelStates, copied_gradients, model_states, state_bytes, together
from jettison.formula.region import HEAD
from jettison.formula.tape import Weight
from jettison.predict.stages import Chunk, local_shape, most_of_passes, outline
from jettison.spec.layout import ZeroBuckets
from jettison.spec.precision import DIST_MUONS, Gradients, Optimizer, element_bytes
from jettison.spec.run import Run

_ALIGNED = 64
_SLACK = 1.3


def stage_state(run: Run, chunks: Sequence[Chunk]) -> ModelStates:
    """Return a stage's parameters, gradients and optimizer state on the rank with most."""
    even = together([(group.part.static, len(group.names)) for chunk in chunks for group in chunk])
    if run.optimizer in DIST_MUONS:
        even = _with_whole_tensors(run, chunks, even)
    whole = run.layout.zero_redundancy_optimizer and run.layout.shards > 1
    return _with_whole_parameters(run, chunks, even) if whole else even


def _trained(run: Run, chunks: Sequence[Chunk]) -> Iterator[tuple[Weight, bool]]:
    """Trained weights in the order of the forward, and whether each belongs to a layer."""
    for group in (group for chunk in chunks for group in chunk):
        for _ in group.names:
            for weight in group.part.region.weights:
                if not weight.frozen and not (weight.tied and run.layout.pp == 1):
                    yield weight, group.part.is_layer


# Megatron's distributed Muon ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeTensor:
    """A parameter in Megatron, on one tensor-parallel rank; each expert's is one.

    Args:
        matrix: whether Newton-Schulz runs on it.
        rows, columns: of a matrix; otherwise 1 and its number of elements.
        whole: sizes of the full matrix, of all tensor-parallel ranks.
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
        """Number of elements."""
        return self.rows * self.columns

    @property
    def work(self) -> int:
        """Work of Newton-Schulz in Megatron's estimate."""
        small, big = sorted((self.rows, self.columns))
        return big * small * small if self.matrix else self.numel


def tensors_of(run: Run, chunks: Sequence[Chunk]) -> Iterator[WholeTensor]:
    """Yield a stage's trained parameters in the order of the forward."""
    precision = run.precision
    for weight, in_layer in _trained(run, chunks):
        local = list(local_shape(run, weight))
        count = local.pop(0) if weight.expert else 1
        numel = prod(local)
        matrix = len(local) == 2 and in_layer and not weight.tied
        each = WholeTensor(
            rows=local[0] if matrix else 1,
            columns=local[1] if matrix else numel,
            matrix=matrix,
            expert=weight.expert,
            whole=(weight.shape[-2], weight.shape[-1]) if matrix else (1, weight.total),
            state=state_bytes(weight, numel, precision, run.optimizer, in_layer=matrix),
            master=numel * DTYPE_BYTES[precision.master] if precision.master else 0,
        )
        yield from (each for _ in range(count))


def _with_whole_tensors(run: Run, chunks: Sequence[Chunk], even: ModelStates) -> ModelStates:
    found = list(tensors_of(run, chunks))
    state = master = padding = 0
    for expert in (False, True):
        of, ranks = [t for t in found if t.expert is expert], _ranks(run, expert=expert)
        matrices = [t for t in of if t.matrix]
        if run.optimizer is Optimizer.DIST_MUON_PINGPONG:
            shares, padded = ping_pong(of, ranks), 0
        else:
            shares, padded = ([matrices], 0) if ranks == 1 else in_shards(matrices, ranks)
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
    return (run.layout.expert_shards if expert else run.layout.shards) if run.layout.zero else 1


def ping_pong(tensors: Sequence[WholeTensor], ranks: int) -> list[list[WholeTensor]]:
    """``_shard_params_ping_pong``: the smallest first."""
    turns = [*range(ranks), *reversed(range(ranks))]
    shares: list[list[WholeTensor]] = [[] for _ in range(ranks)]
    for number, tensor in enumerate(sorted(tensors, key=lambda t: t.numel)):
        shares[turns[number % len(turns)]].append(tensor)
    return shares


def in_shards(tensors: Sequence[WholeTensor], ranks: int) -> tuple[list[list[WholeTensor]], int]:
    """``_emit_bucket``, of one bucket; ``pad_param_start``, ``_shard_divisor``."""
    shares: list[list[WholeTensor]] = [[] for _ in range(ranks)]
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


# torch's ZeroRedundancyOptimizer --------------------------------------------------------------------------------------


def _with_whole_parameters(run: Run, chunks: Sequence[Chunk], even: ModelStates) -> ModelStates:
    """Replace ``even`` states by those of the fullest rank of torch's ZeroRedundancyOptimizer."""
    layout, precision = run.layout, run.precision
    shares = _parameters_by_rank(run, list(_trained(run, chunks)))

    def state(own: Sequence[tuple[Weight, bool]]) -> int:
        kinds = ((weight, inside and not weight.tied) for weight, inside in own)
        return sum(state_bytes(w, w.numel, precision, run.optimizer, in_layer=inside) for w, inside in kinds)

    most = max(shares, key=state)
    master = sum(weight.numel for weight, _ in most) * (DTYPE_BYTES[precision.master] if precision.master else 0)
    stepping = before = 0
    moment = precision.moment_bytes
    for number, (weight, _) in enumerate(most):
        if number and weight.expert and layout.ep > 1 and not most[number - 1][0].expert:
            before = 0  # another optimizer's loop
        size = moment * weight.numel
        stepping, before = max(stepping, before + 2 * size), size
    return replace(even, state=master + state(most), master=master, stepping=stepping)


def _parameters_by_rank(run: Run, found: list[tuple[Weight, bool]]) -> list[list[tuple[Weight, bool]]]:
    """Parameters of each data-parallel rank; ``ep`` consecutive ranks have equal positions among experts' ranks."""
    layout = run.layout
    if layout.ep == 1:
        return _shared_out(found, layout.shards)
    common = _shared_out([pair for pair in found if not pair[0].expert], layout.shards)
    experts = _shared_out([pair for pair in found if pair[0].expert], layout.expert_shards)
    each = layout.shards // layout.expert_shards
    return [[*own, *experts[rank // each]] for rank, own in enumerate(common)]


def _shared_out(weights: Sequence[tuple[Weight, bool]], ranks: int) -> list[list[tuple[Weight, bool]]]:
    shares: list[list[tuple[Weight, bool]]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for each in sorted(weights, key=lambda pair: pair[0].numel, reverse=True):
        rank = sizes.index(min(sizes))
        shares[rank].append(each)
        sizes[rank] += each[0].numel
    return shares


# a step of the optimizer ----------------------------------------------------------------------------------------------


def step_bytes(run: Run, total: ModelStates, chunks: Sequence[Chunk]) -> int:
    """Return the transient bytes of an optimizer step.

    On CPU PyTorch updates parameters one by one: NOTE [ A loop's names ] in `formula.model_states`; fused kernels,
    usual on accelerators, need none. torch's default on CUDA is neither: ``_multi_tensor_adam`` of
    ``torch/optim/adam.py`` computes the square roots of all second moments at once (``_foreach_sqrt``).
    """
    if run.gradients is Gradients.IN_BACKWARD or run.optimizer_offload.steps_on_cpu:
        return 0  # counted in backward, or on the host
    if run.optimizer is Optimizer.ADAMW_FOREACH:
        return (total.state - total.master) // 2
    if run.optimizer is Optimizer.ADAMW_ON_COPIES:
        return copied_gradients(run.layout, run.precision, total)
    if run.updates_on_cpu:
        return total.stepping if run.optimizer is Optimizer.ADAMW else 2 * total.largest
    return muon_step_bytes(run, chunks)


@lru_cache(maxsize=1024)
def segments_after_update(run: Run) -> int:
    """Return bytes of segments for an update and the head's passes: NOTE [ Cached segments ] in `device_allowance`."""
    most = 0
    for chunks in outline(run):
        total = stage_state(run, chunks)
        held = total.parameters + total.state + step_bytes(run, total, chunks)
        held += total.gradients * (run.gradients is not Gradients.IN_BACKWARD)
        heads = [group.part for chunk in chunks for group in chunk if group.part.name == HEAD]
        most = max(most, held + sum(most_of_passes(run, part) for part in heads))
    return most


def flat_buffers(run: Run, allocated_bytes: int) -> int:
    """Bytes of flat gradients beyond a peak, of whose step they are a part: NOTE [ Cached segments ]."""
    most, zero = 0, run.layout.zero
    for chunks in outline(run) if run.optimizer is Optimizer.ADAMW_ON_COPIES and zero in (1, 2) else ():
        total = stage_state(run, chunks)
        copies = step_bytes(run, total, chunks)
        bucket = (run.layout.buckets or ZeroBuckets()).reduce * DTYPE_BYTES[run.precision.gradient]
        in_step = total.parameters + total.state + total.gradients + copies >= allocated_bytes
        most = max(most, copies * (not in_step) + min(bucket, total.gradients) * (zero == 1 and copies > 0))
    return most


def muon_step_bytes(run: Run, chunks: Sequence[Chunk]) -> int:
    """Return the peak of a Muon step's transients: NOTE [ Newton-Schulz ]; 0 for other optimizers."""
    distributed = run.optimizer in DIST_MUONS
    if not distributed and run.optimizer is not Optimizer.MUON:
        return 0
    found, moment = list(tensors_of(run, chunks)), run.precision.moment_bytes
    each = (_distributed_bytes(t) if distributed else torch_bytes(t, moment) for t in found if t.matrix)
    most = max(each, default=0)
    if run.optimizer is not Optimizer.DIST_MUON_PINGPONG:
        return most
    gathered = [0, 0]
    for tensor in found:
        gathered[tensor.expert] += tensor.numel * DTYPE_BYTES[run.precision.parameter]
    return max(most, *(nbytes for kind, nbytes in enumerate(gathered) if _ranks(run, expert=bool(kind)) > 1), 0)


def _distributed_bytes(tensor: WholeTensor) -> int:
    """Transients for one matrix in Megatron; moments are fp32, as ``newton_schulz`` requires."""
    if tensor.whole == (tensor.rows, tensor.columns):
        return 12 * tensor.numel
    numel, small = prod(tensor.whole), min(tensor.whole)
    return 8 * numel + max(6 * numel, 4 * (numel + small * small))


def torch_bytes(tensor: WholeTensor, moment: int) -> int:
    """Return the transients of torch's Muon for one matrix; ``moment``: bytes of a moment's element."""
    small = min(tensor.rows, tensor.columns)
    return (moment + 4) * tensor.numel + 4 * small * small


def bucket_bytes(run: Run, total: ModelStates, chunks: Sequence[Chunk]) -> int:
    """Return the bytes of DistributedDataParallel's buckets, in addition to gradients.

    ``torch/csrc/distributed/c10d/reducer.cpp``, ``mark_variable_ready_dense``: autograd's gradient is copied into its
    bucket, and the mean is copied back (``finalize_bucket_dense``). With ``gradient_as_bucket_view`` the gradient is a
    view of its bucket, except those of micro-batches under ``no_sync`` after ``zero_grad(set_to_none=True)``. Experts
    under expert parallelism have no buckets, since ranks have different ones
    (``_set_params_and_buffers_to_ignore_for_model``).
    """
    if run.gradients is not Gradients.BUCKETS:
        return 0
    apart = 0
    for group in (group for chunk in chunks for group in chunk if run.layout.ep > 1):
        experts = [w for w in group.part.region.weights if w.expert]
        layer = group.part.is_layer
        own = model_states(experts, precision=run.precision, optimizer=run.optimizer, layout=run.layout, in_layer=layer)
        apart += len(group.names) * own.gradients
    return total.gradients - apart


# optimizer offload ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadedOptimizer:
    """Offloaded bytes of one rank on the host, and transfers of a step.

    Args:
        gathered_bytes: the part of ``to_device_bytes`` that is all-gathered next: parameter shards.
        stepped_bytes: read and written in CPU memory by a fused step on CPU.
    """

    host_bytes: int
    to_host_bytes: int
    to_device_bytes: int
    gathered_bytes: int = 0
    stepped_bytes: int = 0


def offloaded_optimizer(run: Run, total: ModelStates) -> OffloadedOptimizer:
    """Return the offloaded states of a stage with these totals."""
    rule, precision = run.optimizer_offload, run.precision
    each = element_bytes(
        rule,
        zero=run.layout.zero,
        micro_batches=run.micro_batches,
        parameter=DTYPE_BYTES[precision.parameter],
        gradient=DTYPE_BYTES[precision.gradient],
    )
    paged = 0 if rule.steps_on_cpu else total.host_state
    times, elements = run.micro_batches, total.host_elements
    gathered = times * (1 + run.layout.resharded) * total.host_parameters
    return OffloadedOptimizer(
        host_bytes=total.host_state + elements * each.host + total.host_parameters,
        to_host_bytes=paged + elements * (times * each.sent_each + each.sent),
        to_device_bytes=paged + elements * (times * each.fetched_each + each.fetched) + gathered,
        gathered_bytes=gathered,
        stepped_bytes=int(elements * rule.cpu_passes * DTYPE_BYTES[precision.master or precision.parameter]),
    )


def host_buffer_bytes(run: Run, chunks: Sequence[Chunk]) -> int:
    """Return ZeRO-Offload's permanent device buffer: a gradient of the largest parameter."""
    if not run.optimizer_offload.keeps_buffer or run.layout.zero == 3:
        return 0
    weights = (w for chunk in chunks for group in chunk for w in group.part.region.weights if not w.frozen)
    return max((w.numel for w in weights), default=0) * DTYPE_BYTES[run.precision.compute]
