"""The model of a recipe, its inputs, and its weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.nn import functional

from jettison.capture.model_trace import LossFn
from jettison.capture.randomness import Streams
from jettison.core.errors import UsageError
from jettison.core.objects import swapped, swapped_entries
from jettison.core.progress import Progress
from jettison.families.config import parse_config, read_config
from jettison.families.presets import PRESETS, preset
from jettison.models.deferred_init import Deferred, NotDeferrable, deferred
from jettison.models.huggingface import ConfigRequest, config_of
from jettison.models.huggingface import build as build_hub_model
from jettison.models.huggingface import read_config as read_hub_config
from jettison.models.live_model import made_by
from jettison.models.pretrained import SafetensorError, WeightsFolder, open_weights, reference_model, renaming
from jettison.models.reference import (
    ARCHITECTURES,
    RECORD,
    Reference,
    causal_rows_mask,
    document_mask,
    document_numbers,
    positions_within,
)
from jettison.parallel.context_parallel import Context, asked_kernel, has_window
from jettison.parallel.parameters import put_whole
from jettison.spec.model import ModelSpec
from jettison.train.checkpoint import DAMAGE, read_tensors, reason
from jettison.train.data import Corpus
from jettison.train.ranks import World, agreed
from jettison.train.recipe import HUB_CODE, REFERENCE_CODE, ModelSection


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """Weights in files; ``names``: the folder's name of each tensor, by its name in the model."""

    folder: WeightsFolder
    names: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model in training mode. ``call`` makes its arguments, positional or keywords, from token rows [b, s + 1].
    ``spec``: None if only the code defines the model. ``weights`` initializes parameters on ``meta``; None: they are
    initialized, because of ``whole_since`` if they should not be. ``pretrained``: files to read them from.
    """

    model: nn.Module
    call: Callable[[torch.Tensor], Any]
    loss_fn: LossFn | None = None
    spec: ModelSpec | None = None
    weights: Deferred | None = None
    whole_since: str = ""
    pretrained: Pretrained | None = None


def build(section: ModelSection, *, seq: int, device: torch.device) -> Built:
    """Build the model, with weights from torch's default generators on the device: now, or after sharding. Raise
    `UsageError` if the section is invalid, or its weights are of another model.
    """
    if section.pretrained is None:
        return _built(section, seq, device)
    folder = open_weights(Path(section.pretrained))
    made = _built(section, seq, device)
    names = folder.names_for(made.model, renaming(made.model))
    return replace(made, pretrained=Pretrained(folder=folder, names=names))


def _built(section: ModelSection, seq: int, device: torch.device) -> Built:
    if (section.build or ("whole" if section.factory else "sharded")) == "whole":
        return _whole(section, seq, device)
    before = Streams.now()
    made: list[Built] = []

    def make() -> nn.Module:
        made.append(_whole(section, seq, device))
        return made[0].model

    try:
        weights = deferred(make)
    except Exception as error:  # a constructor may raise anything; a full build reports its own error, if any
        why = str(error) if isinstance(error, NotDeferrable) else f"{type(error).__name__}: {error}"
        if section.build is not None and not isinstance(error, UsageError):
            raise UsageError(
                f'model.build: the model cannot be built without its weights: {why}; expected build = "whole"'
            ) from error
        before.restore()
        return replace(_whole(section, seq, device), whole_since=why)
    return replace(made[0], weights=weights)


def _whole(section: ModelSection, seq: int, device: torch.device) -> Built:
    if section.factory is not None:
        return _from_factory(section.factory, device)
    if (section.code or (REFERENCE_CODE if section.architecture else HUB_CODE)) == REFERENCE_CODE:
        return _reference(section, seq, device)
    values, spec = _described(section, seq)
    asked = ConfigRequest(precision="fp32", attention=section.attention)
    with device:
        model = build_hub_model(values, asked, None)
    return Built(model=model, call=shifted_within, spec=spec)


def shifted_within(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Make inputs of models that shift labels themselves, such as transformers'."""
    return {"input_ids": rows[:, :-1], "labels": rows[:, :-1]}


def shifted_before(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make inputs and shifted labels, as the reference models take them."""
    return rows[:, :-1], rows[:, 1:]


def _from_factory(target: str, device: torch.device) -> Built:
    """Build a factory's model, without the batch that it may return for other commands."""
    if ":" not in target:
        raise UsageError(f"model.factory: got {target!r}; expected module:function")
    model, _, loss_fn = made_by(target)
    if any(tensor.device != device for tensor in (*model.parameters(), *model.buffers())):
        model.to(device)
    return Built(model=model.train(), call=shifted_within, loss_fn=loss_fn)


def _reference(section: ModelSection, seq: int, device: torch.device) -> Built:
    if section.pretrained is not None:
        path = Path(section.pretrained)
        with device:
            model = reference_model(read_hub_config(path)).train()
        return Built(model=model, call=shifted_before, spec=read_config(path))
    if section.architecture is None:
        raise UsageError('model.code: "reference" needs an architecture and its sizes')
    sizes, values = _sizes(section, seq)
    form = ARCHITECTURES[section.architecture]
    ffn = {"ffn": _ffn(section)} if form["code_ffn"] else {}
    for name, only in (form["code"] | ffn).items():
        if getattr(section, name) not in (None, only):
            raise UsageError(f'model.{name}: the reference model has {only} only; set code = "{HUB_CODE}"')
    kind, config = RECORD[section.architecture]
    with device:
        model = kind(config(**{one.name: sizes[one.name] for one in fields(config) if one.name in sizes}))
    return Built(model=model.train(), call=shifted_before, spec=parse_config(values, name=section.architecture))


def _described(section: ModelSection, seq: int) -> tuple[Any, ModelSpec]:
    if section.config is not None or section.pretrained is not None:
        path = Path(section.config or section.pretrained or "")
        return read_hub_config(path), read_config(path)
    if section.preset is not None:
        spec = preset(section.preset)
        return config_of(PRESETS[section.preset], section.preset), spec
    _, values = _sizes(section, seq)
    return config_of(values, str(section.architecture)), parse_config(values, name=str(section.architecture))


def _sizes(section: ModelSection, seq: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sizes of an architecture, by our names and in the form of a config.json."""
    form = ARCHITECTURES[str(section.architecture)]
    for name, why in form["refused"].items():
        if getattr(section, name) not in (None, 0, section.heads):
            raise UsageError(f"model.{name}: {why}")
    sizes = {name: getattr(section, name) for name in ("layers", "hidden", "heads", "vocab", "dropout")} | {
        "kv_heads": section.kv_heads or section.heads,
        "head_dim": section.hidden // section.heads,
        "ffn": section.ffn or _ffn(section),
        "positions": section.positions or seq,
    }
    values = {key: sizes[name] for name, keys in form["keys"].items() for key in keys} | {
        "model_type": form["model_type"],
        "tie_word_embeddings": form["tied"] if section.tied is None else section.tied,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return sizes, values | form["fixed"]


def _ffn(section: ModelSection) -> int:
    times, over, multiple = ARCHITECTURES[str(section.architecture)]["ffn"]
    return int(-(-times * section.hidden // over // multiple) * multiple)


def vocabulary(built: Built) -> int | None:
    """Vocabulary size of a model; None if it is unknown."""
    if built.spec is not None:
        return built.spec.vocab
    embedding = _embedding(built.model)
    return None if embedding is None else int(embedding.num_embeddings)


def _embedding(model: nn.Module) -> Any:
    try:
        named = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        named = None
    if isinstance(named, nn.Embedding):
        return named
    found = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return found[0] if len(found) == 1 else None


# weights of sharded models --------------------------------------------------------------------------------------------


def fill(
    parts: Sequence[nn.Module], named: Mapping[str, nn.Parameter], built: Built, world: World, say: Progress
) -> None:
    """Allocate this rank's shards of a model that was split and sharded on meta, and initialize or read them, one
    tensor at a time. Every rank calls it, with the parameters of all parts by their names in the full model. Raise
    `UsageError` if files of weights are damaged.
    """
    world.together(lambda: _allocate(parts, world.device))
    if built.pretrained is not None:
        _read(built.pretrained, parts, named, world, say)
    elif built.weights is not None:
        say("drawing the weights")
        weights = built.weights
        world.together(lambda: weights.fill(dict(named), put_whole))


def _allocate(parts: Sequence[nn.Module], device: torch.device) -> None:
    # parameters stay the same objects: tied ones stay tied, and FSDP2's references valid
    with swapped(torch.__future__, _swap_module_params_on_conversion=True):
        for part in parts:
            if any(parameter.is_meta for parameter in part.parameters()):
                part._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)


def _read(
    pretrained: Pretrained, parts: Sequence[nn.Module], named: Mapping[str, nn.Parameter], world: World, say: Progress
) -> None:
    """Read this rank's part of each of its tensors; other dtypes are converted."""
    folder, names = pretrained.folder, pretrained.names
    dtypes = {str(folder.tensors[name].dtype).removeprefix("torch.") for name in names.values()}
    say(f"reading the weights of {folder.path}, which are {' and '.join(sorted(dtypes))}")
    held: dict[str, Tensor] = {names[name]: parameter.detach() for name, parameter in named.items()}
    for part in parts:
        held |= {names[name]: buffer for name, buffer in part.named_buffers() if name in names}

    def reader() -> HuggingFaceStorageReader:
        made = HuggingFaceStorageReader(str(folder.path))
        made.fs.ls = lambda _path: [str(file) for file in folder.files]
        return made

    try:
        read_tensors(held, folder.tensors, reader, world, world.host)
    except (*DAMAGE, SafetensorError) as error:
        raise agreed(UsageError(f"model.pretrained: {folder.path} cannot be read: {reason(error)}")) from error


# document masks, and context parallelism ------------------------------------------------------------------------------
#
# A token of the recipe may end a document: attention is masked to documents, and positions restart. A document's first
# token is still predicted from the end of the previous document, so that the loss is the same mean on every layout.
#
# With context parallelism labels are shifted before sequences are sharded. Every rank's loss is the mean over equally
# many tokens, so that data parallelism's mean over ranks is that over all tokens.


_NEEDED: Final = ("input_ids", "labels", "position_ids", "attention_mask")
_AT_A_TIME: Final = 1 << 22  # tokens scanned at once


def check_occurs(corpus: Corpus, end: int) -> None:
    """Raise `UsageError` if the token is nowhere in the text, so that all of it would be one document."""
    for start in range(0, len(corpus.tokens), _AT_A_TIME):
        if np.any(corpus.tokens[start : start + _AT_A_TIME] == end):
            return
    raise UsageError(f"data.document_end: got {end}, which is nowhere in the text; expected what ends a document")


def keep_apart(built: Built, end: int, *, bf16: bool) -> Built:
    """Return the model with inputs that mask attention to documents, each of which the token ``end`` ends. ``bf16``:
    attention is computed in bf16, whatever the dtype of parameters. `UsageError` if this model takes no such inputs.
    """
    model = built.model
    if isinstance(model, Reference):
        return replace(built, call=lambda rows: (*built.call(rows), document_numbers(rows[:, :-1], end)))
    _check(model)
    dtype = _dtype(model, bf16=bf16)

    def call(rows: Tensor) -> dict[str, Any]:
        documents_bs = document_numbers(rows[:, :-1], end)
        told = {"position_ids": positions_within(documents_bs), "attention_mask": document_mask(documents_bs, dtype)}
        return built.call(rows) | told

    return replace(built, call=call)


def _check(model: nn.Module) -> None:
    """Check that the model takes positions and a mask, and that only masked attention mixes tokens."""
    config: Any = getattr(model, "config", None)
    takes = inspect.signature(model.forward).parameters
    name = type(model).__name__
    missing = [word for word in _NEEDED if word not in takes]
    if missing or getattr(config, "_attn_implementation", None) not in ("eager", "sdpa"):
        what = f"its forward does not take {missing[0]}" if missing else "its attention is neither eager nor sdpa"
        raise _refused(name, what)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise _refused(name, f"it has layers of {', '.join(sorted(kinds))}")
    if has_window(config):
        raise _refused(name, "its attention has a sliding window")
    if _hears_across(_with_weights(model)):
        raise _refused(name, "its output for a document depends on the one before")


def _with_weights(model: nn.Module) -> nn.Module:
    if next(model.parameters()).device.type != "meta":
        return model
    config: Any = copy.deepcopy(getattr(model, "config", None))
    kind: Any = type(model)
    try:
        config.num_hidden_layers, config.vocab_size = 1, 8
        config.pad_token_id = config.bos_token_id = config.eos_token_id = None
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1]
        with torch.random.fork_rng(), torch.device("cpu"):
            return kind(config)
    except Exception as error:  # of any constructor
        what = f"a small copy cannot be built to test it ({type(error).__name__}); set model.build = 'whole'"
        raise _refused(type(model).__name__, what) from error


@torch.no_grad()
def _hears_across(model: nn.Module) -> bool:
    device = next(model.parameters()).device
    documents_bs = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]], device=device)
    ids_bs = torch.tensor([[1, 2, 3, 0, 1, 2, 3, 1], [3, 1, 1, 0, 1, 2, 3, 1]], device=device)
    dtype = _dtype(model, bf16=False)
    told = {"position_ids": positions_within(documents_bs), "attention_mask": document_mask(documents_bs, dtype)}
    with swapped_entries((vars(module), "training", False) for module in model.modules()):
        one, other = (model(input_ids=row[None], **told).logits[:, 4:] for row in ids_bs)
    return not torch.allclose(one, other, rtol=1e-3, atol=1e-5)


def _refused(name: str, what: str) -> UsageError:
    return UsageError(
        f"data.document_end: attention cannot be masked to documents in a {name}: {what}. Use another model, or omit "
        "document_end, and let attention see earlier documents"
    )


def in_parts(built: Built, context: Context, *, end: int | None, bf16: bool) -> Built:
    """Return the model, after `apply_context_parallel`, with inputs of this rank's tokens; ``end`` and ``bf16`` as in
    `keep_apart`. Raise `UsageError` if a factory's loss function averages over an unknown number of tokens.
    """
    if built.loss_fn is not None:
        raise UsageError(
            "layout.cp: the factory has its own loss function, which cannot average over the tokens of all ranks; "
            "expected a model that takes labels and returns its loss"
        )
    if isinstance(built.model, Reference):
        return replace(built, call=lambda rows: _for_record(rows, context, end))
    dtype = _dtype(built.model, bf16=bf16)
    masked = asked_kernel(built.model) == "eager"
    return replace(built, call=lambda rows: _for_hub(rows, context, end, dtype if masked or end is not None else None))


def _for_record(rows: Tensor, context: Context, end: int | None) -> dict[str, Any]:
    ids_bs, seq = rows[:, :-1], rows.shape[1] - 1
    return {
        "ids_bs": context.take(ids_bs, 1),
        "labels_bs": context.take(rows[:, 1:], 1),
        "documents_bs": None if end is None else document_numbers(ids_bs, end),
        "part": (context.positions(seq, rows.device), seq),
    }


def _for_hub(rows: Tensor, context: Context, end: int | None, masked: torch.dtype | None) -> dict[str, Any]:
    """Make transformers' inputs: shifted labels, tokens to divide by. A sequence's last token has no label."""
    ids_bs, seq = rows[:, :-1], rows.shape[1] - 1
    positions_n = context.positions(seq, rows.device)
    own = context.take(ids_bs, 1)
    told: dict[str, Any] = {
        "input_ids": own,
        "labels": own,
        "shift_labels": context.take(functional.pad(ids_bs[:, 1:], (0, 1), value=-100), 1),
        "num_items_in_batch": rows.shape[0] * (seq - 1) / context.axis.size,
        "position_ids": positions_n.unsqueeze(0),
    }
    if end is not None:
        assert masked is not None
        documents_bs = document_numbers(ids_bs, end)
        told["position_ids"] = positions_within(documents_bs)[:, positions_n]
        told["attention_mask"] = document_mask(documents_bs, masked, positions_n)
    elif masked is not None:
        told["attention_mask"] = causal_rows_mask(positions_n, seq, masked)[None, None]
    return told


def _dtype(model: nn.Module, *, bf16: bool) -> torch.dtype:
    return torch.bfloat16 if bf16 else next(p.dtype for p in model.parameters() if p.is_floating_point())
