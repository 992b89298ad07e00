"""Is a run one that somebody's code does, and that is described here? See `check_run`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jettison.core.errors import UsageError
from jettison.spec.compiled import check_compiled
from jettison.spec.fp8 import Fp8Recipe, Library, Scales
from jettison.spec.frozen_models import FrozenModel
from jettison.spec.inputs import Patches
from jettison.spec.kernels import MEGATRON, ContextExchange, Documents, Kernels, Loss, Scans
from jettison.spec.layout import exchange_misfit
from jettison.spec.mixers import Mamba1
from jettison.spec.model import ModelSpec, Pooling
from jettison.spec.modules import check_parts
from jettison.spec.precision import MUONS, Adding, Gradients, Optimizer
from jettison.spec.recompute import Mode
from jettison.spec.states_on_host import StatesOnHost
from jettison.spec.tuning import Base, Tuning

if TYPE_CHECKING:
    from jettison.spec.run import Run


def check_run(run: Run) -> None:
    """Refuse what nobody does, and what no description has.

    Raises:
        UsageError: a size below one, a sequence longer than the model's positions, a layout that does not divide, or
            flags that contradict each other; it says which, and what to give.
    """
    for name in ("seq", "micro_batch", "micro_batches"):
        value = getattr(run, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"got --{name.replace('_', '-')} {value!r}; expected a whole number of 1 or more")
    if not 0 <= run.dropout < 1:
        raise UsageError(f"got --dropout {run.dropout}; expected a probability of at least 0 and below 1")
    if run.capacity_factor is not None and run.capacity_factor <= 0:
        raise UsageError(f"got a capacity factor of {run.capacity_factor}; expected more than 0")
    if not 1 <= run.imbalance <= max(1, run.layout.ep):
        raise UsageError(
            f"got --expert-imbalance {run.imbalance:g}; expected 1, which is even, to the {run.layout.ep} ranks "
            "of --ep, one of which may be sent everything"
        )
    run.precision.check(run.optimizer, on_host=run.states_on_host is not StatesOnHost.NONE)
    if run.kernels.loss is Loss.DPO:
        _check_pairs(run)
    if run.packed:
        _check_packed(run)
    _check_source(run)
    if run.kernels.context_exchange is ContextExchange.A2A and (why := exchange_misfit(run.layout, run.model)):
        raise UsageError(why)
    if run.model.patches is not None:
        _check_image(run, run.model.patches)
    if run.model.learned_positions and (run.packed or run.seq) > run.model.max_positions:
        raise UsageError(f"got --seq {run.seq}; {run.model.name} has {run.model.max_positions} positions")
    if run.recompute.whole and run.layout.pp == 1:
        raise UsageError(
            "got --whole-micro-batches without a pipeline, where no other micro-batch is in flight; give --pp 2 or more"
        )
    if run.tuning is not None and run.precision.product is not None:
        _check_narrow_base(run, run.tuning)
    if run.layout.tp > 1 and not (run.kernels.name == MEGATRON.name and run.kernels.scans is Scans.FUSED):
        scans = [layer.scan.words for layer in run.model.described if layer.scan is not None]
        if scans:
            raise UsageError(
                f"got --tp {run.layout.tp}; layers of {run.model.name} have a {scans[0]}, whose heads "
                "Megatron-Core alone shares: give --kernels megatron with --scans fused, or leave it away"
            )
    names = (*run.recompute.modules, *run.recompute.sent)
    if names:
        check_parts(run.model, run.kernels, names, own_norms=bool(run.workspaces.library_bytes))
    if run.tuning is not None and run.tuning.base is Base.INT8 and run.recompute.mode is not Mode.NONE:
        raise UsageError(
            f"got --base int8 with --recompute {run.recompute}; bitsandbytes holds what its products read where "
            "no checkpoint lets go of them: give --recompute none, or --base nf4"
        )
    if run.holds_output:
        _check_output(run)
    if run.recompute.mode is Mode.PARTS and run.model.recorder is not None:
        raise UsageError(f"got --recompute parts; {run.model.name}'s blocks are recorded as one: give full")
    if run.compiled:
        check_compiled(run.model, run.kernels, mode=str(run.recompute.mode), tuned=run.tuning is not None)
    if run.precision.recipe is not None:
        _check_recipe(run, run.precision.recipe)
    if run.optimizer in MUONS[1:] and run.layout.zero != 1 and (run.layout.dp > 1 or run.layout.zero):
        raise UsageError(f"got --optimizer {run.optimizer} with --zero {run.layout.zero}; expected --zero 1")
    if run.gradients is Gradients.IN_BACKWARD:
        _check_in_backward(run)
    if run.states_on_host is not StatesOnHost.NONE:
        _check_states_on_host(run)
    run.layout.check(run.model, seq=run.seq, source_seq=run.source_seq)
    for beside in run.frozen:
        _check_beside(run, beside)


def _check_recipe(run: Run, recipe: Fp8Recipe) -> None:
    """Is it known what this recipe keeps here?

    Raises:
        UsageError: no.
    """
    lists = frozenset((*run.recompute.modules, *run.recompute.sent))
    names = lists & ({"layernorm"} if recipe.keeps_original else {"layernorm", "moe_act"})
    if run.compiled and recipe.inputs is Scales.MX:
        why = "with --compile; what torch's partitioner keeps of MX tensors was not looked at"
    elif recipe.library is Library.TE and run.layout.zero == 3:
        why = "with --zero 3; what FSDP gathers of TransformerEngine's weights is not described: give --zero 1"
    elif recipe.library is Library.TORCHAO and any(layer.experts for layer in run.model.kinds):
        why = f"and {run.model.name}, whose experts torchao's linear layers are not; give --kernels megatron"
    elif names:
        why = f"with the module {min(names)}, under which Megatron keeps other inputs; leave it away"
    else:
        misfit = recipe.misfit(run.model, run.layout, seq=run.seq, micro_batch=run.micro_batch)
        why = f"where {misfit}" if misfit else ""
    if why:
        raise UsageError(f"got --fp8-recipe {recipe.name} {why}")


def _check_output(run: Run) -> None:
    """Are there logits that a loop could have a name for?

    Raises:
        UsageError: no.
    """
    model, loss, why = run.model, run.kernels.loss, ""
    if run.layout.pp > 1:
        why = f"--pp {run.layout.pp}, whose schedule calls the model; --stage-buffers says what it holds"
    elif model.recorder is not None or model.waves is not None or model.pair is not None:
        why = f"{model.name}, of which no description says what it returns"
    elif model.head.pooling is not Pooling.NONE:
        why = f"{model.name}, which returns one prediction a sequence"
    elif loss in (Loss.FUSED, Loss.CHUNKED, Loss.DPO):
        why = f"--loss {loss}, for which the model makes no logits"
    elif loss is Loss.LISTED:
        why = f"--loss {loss}, whose logits stay anyway"
    elif loss is Loss.ROWS:
        why = f"--loss {loss}, which writes over logits that nobody else has: give --loss upcast"
    if why:
        raise UsageError(f"got --holds-output with {why}; leave it away")


def _check_pairs(run: Run) -> None:
    """Is a micro-batch pairs of sequences, on ranks that do not share a head?

    Raises:
        UsageError: no.
    """
    if run.micro_batch % 2:
        raise UsageError(
            f"got --loss dpo with --micro-batch {run.micro_batch}; a pair is two sequences, the chosen and the "
            "rejected one: give an even number"
        )
    if run.layout.tp * run.layout.cp > 1:
        ways = f"--tp {run.layout.tp}" if run.layout.tp > 1 else f"--cp {run.layout.cp}"
        raise UsageError(f"got --loss dpo with {ways}; TRL's head is whole on each rank: give another --loss")


def _check_narrow_base(run: Run, tuning: Tuning) -> None:
    """Frozen matrices of TransformerEngine keep their copies, and its products no inputs; adapters are layers of
    Megatron's own (Megatron-Bridge, ``peft/utils.py``, ``ParallelLinearAdapter``), as wide as activations.

    Raises:
        UsageError: other libraries' narrow products, whose frozen ones nobody has described.
    """
    recipe = run.precision.recipe
    if recipe is None or recipe.library is not Library.TE:
        raise UsageError(
            f"got --lora with --precision {run.precision.name}; TransformerEngine's products alone are described "
            "with both: give --kernels megatron and --fp8-recipe, or --precision bf16"
        )
    if tuning.base is not Base.PLAIN or run.layout.zero == 3:
        what = f"--base {tuning.base}" if tuning.base is not Base.PLAIN else "--zero 3"
        raise UsageError(f"got {what} with --lora and --fp8-recipe {recipe.name}; no description has all of them")


def _check_packed(run: Run) -> None:
    """Are documents packed in a way that somebody's code has?

    Raises:
        UsageError: no.
    """
    if not 1 <= run.packed <= run.seq:
        raise UsageError(f"got --packed {run.packed}; expected tokens of a document, 1 to --seq {run.seq}")
    scans = [layer.scan.words for layer in run.model.described if layer.scan is not None]
    if scans:
        raise UsageError(
            f"got --packed; layers of {run.model.name} have a {scans[0]}, which as transformers writes it carries "
            "its state from one document to the next: leave it away"
        )
    if run.layout.cp > 1:
        raise UsageError(f"got --packed with --cp {run.layout.cp}; documents that ranks share are not described")
    rows = run.kernels.of_transformers and run.kernels.documents is Documents.VARLEN
    if rows and run.micro_batch > 1:
        raise UsageError(
            f"got --packed with --micro-batch {run.micro_batch}; with flash-attn transformers packs one row alone "
            "(modeling_flash_attention_utils.py, _is_packed_sequence): --micro-batch 1 and a longer --seq"
        )


def _check_states_on_host(run: Run) -> None:
    """Does the framework whose way it is do this?

    Raises:
        UsageError: no.
    """
    rule, why = run.states_on_host, ""
    own = run.precision.master is None
    ours = (Optimizer.ADAMW, Optimizer.ADAMW_DEEPSPEED)
    kinds = ours if rule.steps_there else (Optimizer.ADAMW, Optimizer.ADAM8BIT)
    quantised = run.precision.recipe is not None or (run.tuning is not None and run.tuning.base.packed)
    if rule.moves_parameters and quantised:
        why = "weights in fewer than 16 bits; what is gathered of them from a host was not read"
    elif rule.moves_masters and own:
        why = f"--precision {run.precision.name}; DeepSpeed updates fp32 copies: --precision bf16"
    elif not rule.moves_masters and not own:
        why = f"--precision {run.precision.name}; it updates parameters themselves: bf16-pure, bf16-autocast or fp32"
    elif run.optimizer not in kinds:
        why = f"--optimizer {run.optimizer}; expected {' or '.join(kinds)}"
    elif rule is StatesOnHost.TORCHAO_GRADIENTS and run.micro_batches > 1:
        why = f"--micro-batches {run.micro_batches}; each gradient goes as it is made: 1, or torchao"
    elif rule.steps_there and run.gradients is not Gradients.ONE_BY_ONE:
        why = f"gradients {run.gradients}; give --gradients one-by-one"
    if why:
        raise UsageError(f"got --states-on-host {rule} with {why}")


def _check_beside(run: Run, beside: FrozenModel) -> None:
    """Can this frozen model stand beside it?

    Raises:
        UsageError: no.
    """
    if run.layout.pp > 1:
        raise UsageError(
            f"got --{beside.role} with --pp {run.layout.pp}; no rule says which stage would run its forward when: "
            "give --pp 1, and --zero 3 or --tp instead"
        )
    if beside.model is None:
        return
    if beside.model.learned_positions and run.seq > beside.model.max_positions:
        raise UsageError(
            f"got --seq {run.seq}; the {beside.role} {beside.model.name} has {beside.model.max_positions} positions"
        )
    run.layout.check(beside.model, seq=run.seq)


def _check_source(run: Run) -> None:
    """Two lengths where there are two stacks, and one where there is one.

    Raises:
        UsageError: this run says otherwise, or trains adapters beside them.
    """
    source, name = run.model.source, run.model.name
    beside = [run.model, *(one.model for one in run.frozen if one.model is not None)]
    kinds = [one.name for one in beside if one.two_stacks or not one.words]
    for flag, given in (("--packed", run.packed), ("a frozen model", run.frozen), ("--mtp", run.model.further)):
        if kinds and given:
            raise UsageError(f"got {flag} with {kinds[0]}, which is no decoder of words alone: leave it away")
    if run.model.waves is not None:
        run.model.waves.check(name, seq=run.seq, samples=run.source_seq)
    if run.tuning is not None and (run.model.waves or run.model.two_stacks):
        what = "hears sound" if run.model.waves else f"is {run.model.two_stacks}"
        raise UsageError(f"got --lora; {name} {what}, for which no description has it: leave it away")
    if run.model.pair is not None:
        if run.source_seq != (tokens := run.model.pair.tokens):
            got = f"got --source-seq {run.source_seq}"
            raise UsageError(f"{got}; an image of {name} has {tokens} tokens: leave it away")
        return
    if source is None:
        if run.source_seq and run.model.waves is None:
            raise UsageError(f"got --source-seq {run.source_seq}; {name} has no encoder beside a decoder")
        return
    least = source.max_positions if source.sound else 1
    most = source.max_positions if source.position_rows else run.source_seq
    if not least <= run.source_seq <= most:
        expected = f"{least} to {most}" if least < most else f"sound of {least}" if source.sound else "1 or more"
        raise UsageError(f"got --source-seq {run.source_seq}; {name} reads {expected} tokens")


def _check_image(run: Run, patches: Patches) -> None:
    """An image is as long as it is.

    Raises:
        UsageError: this run says otherwise.
    """
    if run.seq != patches.tokens:
        raise UsageError(
            f"got --seq {run.seq}; an image of {run.model.name} has {patches.tokens} tokens: leave it away"
        )


def _check_in_backward(run: Run) -> None:
    """A step within backward sees one micro-batch's gradients, on ranks that reduce each by itrun.

    Raises:
        UsageError: this run is none of those.
    """
    layout, why = run.layout, ""
    if run.micro_batches > 1:
        why = f"--micro-batches {run.micro_batches}: each backward would be a step of its own"
    elif layout.pp > 1:
        why = f"--pp {layout.pp}, which needs micro-batches to fill"
    elif layout.dp * layout.cp > 1 and layout.zero < 2:
        why = f"--zero {layout.zero}, whose replicas reduce buckets of gradients; --zero 2 or 3 reduces each"
    elif run.adding is not Adding.WHOLE or run.precision.accumulator or run.precision.optimizer_gradient:
        why = "gradients that are gathered up in another buffer"
    elif run.optimizer in (Optimizer.ADAMW_FOREACH, Optimizer.ADAMW_DEEPSPEED, *MUONS):
        why = f"--optimizer {run.optimizer}, which steps for many parameters at once"
    if why:
        raise UsageError(f"got --gradients in-backward with {why}")


def check_scans(model: ModelSpec, kernels: Kernels) -> None:
    """Has the model scans, and are they described so?

    Raises:
        UsageError: no.
    """
    scans = [layer.scan for layer in model.described if layer.scan is not None]
    if not scans:
        raise UsageError(f"got --scans {kernels.scans}; no layer of {model.name} carries a state: leave it away")
    if kernels.scans is Scans.FUSED and any(isinstance(scan, Mamba1) for scan in scans):
        raise UsageError(
            f"got --scans fused; what mamba-ssm keeps of the selective scan of {model.name} is not described: written"
        )
