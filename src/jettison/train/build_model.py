"""The model of a recipe, what it is called with, and its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem

from jettison.capture.model_trace import LossFn
from jettison.capture.streams import Streams
from jettison.core.errors import UsageError, install
from jettison.core.progress import Progress
from jettison.families.config import parse_config, read_config
from jettison.families.presets import PRESETS, preset
from jettison.models.deferred import Deferred, NotDeferrable, deferred
from jettison.models.huggingface import ConfigRequest
from jettison.models.huggingface import build as build_hub_model
from jettison.models.huggingface import read_config as read_hub_config
from jettison.models.llama_names import hub_name, reference_config
from jettison.models.pretrained import SafetensorError, WeightsFolder, open_weights
from jettison.models.reference import Gpt, GptConfig, Llama, LlamaConfig
from jettison.models.request import call_factory
from jettison.parallel.parameters import put_whole
from jettison.spec.model import ModelSpec
from jettison.train.checkpoint_reading import DAMAGE, read_tensors, reason
from jettison.train.ranks import World, agreed
from jettison.train.recipe import ModelSection


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """Weights in files.

    Args:
        names: what the folder calls each tensor, by its name in the model.
    """

    folder: WeightsFolder
    names: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model in training mode.

    Args:
        call: what the model is called with for token rows [b, s + 1]: positional arguments, or keywords.
        spec: None where only the code knows what it is.
        weights: parameters are on ``meta``, and are made by this; None: they are there.
        whole_since: why they are there, where they should not be.
        pretrained: what they are read from, instead.
    """

    model: nn.Module
    call: Callable[[torch.Tensor], Any]
    loss_fn: LossFn | None = None
    spec: ModelSpec | None = None
    weights: Deferred | None = None
    whole_since: str = ""
    pretrained: Pretrained | None = None


def build(section: ModelSection, *, seq: int, device: torch.device) -> Built:
    """The model, its weights drawn from torch's default generators on the device: now, or once it is cut.

    Raises:
        UsageError: the section says what there is not, or its weights are not those of its model.
    """
    if section.pretrained is None:
        return _built(section, seq, device)
    folder = open_weights(Path(section.pretrained))
    made = _built(section, seq, device)
    rename = hub_name if isinstance(made.model, Llama) else str
    return replace(made, pretrained=Pretrained(folder=folder, names=folder.names_for(made.model, rename)))


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
    except Exception as error:  # a constructor does what it wants; built whole, it says what is wrong with it, if it is
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
    if (section.code or ("reference" if section.architecture else "huggingface")) == "reference":
        return _reference(section, seq, device)
    values, spec = _described(section, seq)
    asked = ConfigRequest(precision="fp32", attention=section.attention)
    with device:
        model = build_hub_model(values, asked, None)
    return Built(model=model, call=shifted_within, spec=spec)


def shifted_within(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """For models that shift labels themselves, as those of transformers do."""
    return {"input_ids": rows[:, :-1], "labels": rows[:, :-1]}


def shifted_before(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For models that are given, at every position, the token that follows it, as the reference models are."""
    return rows[:, :-1], rows[:, 1:]


def _from_factory(target: str, device: torch.device) -> Built:
    """What a factory returns, without the batch that it may have for other verbs."""
    module, colon, name = target.partition(":")
    if not colon or not name:
        raise UsageError(f"model.factory: got {target!r}; expected module:function")
    made = call_factory(target, module, name)
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        got = ", ".join(type(part).__name__ for part in parts)
        raise UsageError(f"{target} returned ({got}); expected a model, (model, batch) or (model, batch, loss_fn)")
    model, _, loss_fn = (*parts, None, None)[:3]
    if any(tensor.device != device for tensor in (*model.parameters(), *model.buffers())):
        model.to(device)
    return Built(model=model.train(), call=shifted_within, loss_fn=loss_fn)


def _reference(section: ModelSection, seq: int, device: torch.device) -> Built:
    """Our own code, which has one form of each architecture."""
    if section.pretrained is not None:
        path = Path(section.pretrained)
        sizes = reference_config(read_hub_config(path))
        with device:
            return Built(model=Llama(sizes).train(), call=shifted_before, spec=read_config(path))
    values = _sizes(section, seq)
    spec = parse_config(values, name=str(section.architecture))
    fixed: dict[str, Any] = {"tied": False, "attention": "sdpa"}
    if section.architecture == "gpt":
        fixed = {"tied": True, "attention": "eager", "ffn": 4 * section.hidden}
    for name, only in fixed.items():
        if getattr(section, name) not in (None, only):
            raise UsageError(f'model.{name}: the reference model has {only} only; set code = "huggingface"')
    config: Any
    if section.architecture == "gpt":
        config = GptConfig(
            layers=section.layers,
            hidden=section.hidden,
            heads=section.heads,
            vocab=section.vocab,
            positions=values["n_positions"],
            dropout=section.dropout,
        )
    elif section.architecture == "llama":
        config = LlamaConfig(
            layers=section.layers,
            hidden=section.hidden,
            heads=section.heads,
            kv_heads=values["num_key_value_heads"],
            head_dim=section.hidden // section.heads,
            ffn=values["intermediate_size"],
            vocab=section.vocab,
        )
    else:
        raise UsageError('model.code: "reference" goes with an architecture and its sizes')
    with device:
        model: nn.Module = Gpt(config) if section.architecture == "gpt" else Llama(config)
    return Built(model=model.train(), call=shifted_before, spec=spec)


def _described(section: ModelSection, seq: int) -> tuple[Any, ModelSpec]:
    """A configuration as transformers has it, and what it comes to."""
    if section.config is not None or section.pretrained is not None:
        path = Path(section.config or section.pretrained or "")
        return read_hub_config(path), read_config(path)
    if section.preset is not None:
        spec = preset(section.preset)
        return _hub_config(PRESETS[section.preset]), spec
    values = _sizes(section, seq)
    return _hub_config(values), parse_config(values, name=str(section.architecture))


def _sizes(section: ModelSection, seq: int) -> dict[str, Any]:
    """The sizes of a section as a config.json would write them."""
    positions = section.positions or seq
    if section.architecture == "gpt":
        dropout = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), section.dropout)
        if section.kv_heads not in (None, section.heads):
            raise UsageError("model.kv_heads: a GPT has as many as heads")
        return {
            "model_type": "gpt2",
            "n_embd": section.hidden,
            "n_layer": section.layers,
            "n_head": section.heads,
            "n_inner": section.ffn or 4 * section.hidden,
            "vocab_size": section.vocab,
            "n_positions": positions,
            "activation_function": "gelu_pytorch_tanh",
            "tie_word_embeddings": section.tied is not False,
            "dtype": "float32",
            "bos_token_id": None,
            "eos_token_id": None,
            **dropout,
        }
    if section.dropout:
        raise UsageError("model.dropout: a Llama has none")
    return {
        "model_type": "llama",
        "hidden_size": section.hidden,
        "num_hidden_layers": section.layers,
        "num_attention_heads": section.heads,
        "num_key_value_heads": section.kv_heads or section.heads,
        "intermediate_size": section.ffn or -(-8 * section.hidden // 3 // 64) * 64,
        "vocab_size": section.vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": bool(section.tied),
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _hub_config(values: Any) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise UsageError(f"this model's code is that of transformers: {install('hf')}") from error
    return AutoConfig.for_model(**values)


def vocabulary(built: Built) -> int | None:
    """How many words a model has; None where it does not say."""
    if built.spec is not None:
        return built.spec.vocab
    embedding = _embedding(built.model)
    return None if embedding is None else int(embedding.num_embeddings)


def _embedding(model: nn.Module) -> Any:
    """The one that a model names, or the only one that it has."""
    try:
        named = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        named = None
    if isinstance(named, nn.Embedding):
        return named
    found = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return found[0] if len(found) == 1 else None


# weights, once ranks have their shares --------------------------------------------------------------------------------


def fill(
    parts: Sequence[nn.Module], named: Mapping[str, nn.Parameter], built: Built, world: World, say: Progress
) -> None:
    """Allocate what this rank holds of a model that was cut and sharded without weights, and draw or read it, a tensor
    at a time. Every rank calls it.

    Args:
        named: the parameters of all parts, by their names in the whole model.

    Raises:
        UsageError: files of weights are damaged.
    """
    world.together(lambda: _allocate(parts, world.device))
    if built.pretrained is not None:
        _read(built.pretrained, parts, named, world, say)
    elif built.weights is not None:
        say("drawing the weights")
        weights = built.weights
        world.together(lambda: weights.fill(dict(named), put_whole))


def _allocate(parts: Sequence[nn.Module], device: torch.device) -> None:
    with _keeping_parameters():
        for part in parts:
            if any(parameter.is_meta for parameter in part.parameters()):
                part._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)


def _read(
    pretrained: Pretrained, parts: Sequence[nn.Module], named: Mapping[str, nn.Parameter], world: World, say: Progress
) -> None:
    """Each rank reads its part of each of its tensors; other dtypes are converted."""
    folder, names = pretrained.folder, pretrained.names
    dtypes = {str(folder.tensors[name].dtype).removeprefix("torch.") for name in names.values()}
    say(f"reading the weights of {folder.path}, which are {' and '.join(sorted(dtypes))}")
    held: dict[str, Tensor] = {names[name]: parameter.detach() for name, parameter in named.items()}
    for part in parts:
        held |= {names[name]: buffer for name, buffer in part.named_buffers() if name in names}
    try:
        read_tensors(held, folder.tensors, lambda: _Reader(folder.path, folder.files), world, world.host)
    except (*DAMAGE, SafetensorError) as error:
        raise agreed(UsageError(f"model.pretrained: {folder.path} cannot be read: {reason(error)}")) from error


class _Reader(HuggingFaceStorageReader):
    """torch's, for the files that belong to the model; others may lie beside them."""

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        super().__init__(str(path))
        self.fs = _Listed(files)


class _Listed(FileSystem):
    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__()
        self._files = [str(file) for file in files]

    def ls(self, path: object) -> list[str]:
        """Of the only folder that is looked into."""
        return self._files


@contextmanager
def _keeping_parameters() -> Iterator[None]:
    """Those that move stay the same objects: tied ones tied, and FSDP2 knows them."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
