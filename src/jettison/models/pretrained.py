"""A folder of weights in Hugging Face's layout, read and written: its tensors, their names in a model, its config.json.

    FOLDER/config.json
    FOLDER/model.safetensors, or several files and model.safetensors.index.json, which says what is in which

Only safetensors are read. Other files of weights are pickles, which run code when they are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from jettison.core.errors import UsageError, install
from jettison.core.files import read_table
from jettison.models.reference import ARCHITECTURES, Llama, LlamaConfig

safe_open: Any
SafetensorError: Any
try:
    from safetensors import SafetensorError, safe_open
except ImportError:
    safe_open, SafetensorError = None, OSError

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
_DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WHOLE_NUMBERS: Final = {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt")
_TABLES: Final = (r"rotary_emb\.inv_freq$",)
"""Names of constants that models once saved and now compute."""


@dataclass(frozen=True, kw_only=True)
class FileTensor:
    size: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class WeightsFolder:
    """Weights in a folder: its files, and their tensors by their names there."""

    path: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, FileTensor]

    def names_for(self, model: nn.Module, rename: Callable[[str], str]) -> dict[str, str]:
        """The name of each tensor in the folder, by its name in the model; of names of one parameter, the first.
        ``rename``: what files call a tensor of the model. Raise `UsageError` if tensors do not match the model's.
        """
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        found, missing, used = dict[str, str](), list[str](), set[str]()
        for group, tensor in _saved(model):
            names = [name for full in map(rename, group) for name in (full, full.removeprefix(prefix))]
            held = [name for name in dict.fromkeys(names) if name in self.tensors]
            used.update(held)
            if not held:
                missing.append(group[0])
                continue
            found[group[0]] = held[0]
            self._require_fits(held[0], tensor)
            for other in held[1:]:
                self._require_same(held[0], other)
        ignored = [re.compile(text) for text in (*(getattr(model, _IGNORED, None) or ()), *_TABLES)]
        surplus = [name for name in self.tensors if name not in used and not any(p.search(name) for p in ignored)]
        if missing or surplus:
            raise UsageError(
                f"model.pretrained: the tensors of {self.path} are not those of a {type(model).__name__}: "
                + "; ".join([*_said("it lacks", missing), *_said("it also has", surplus)])
                + ". Give the folder of a model whose config.json is its own"
            )
        return found

    def _require_fits(self, name: str, tensor: Tensor) -> None:
        entry = self.tensors[name]
        if entry.size != tensor.shape or entry.dtype.is_floating_point != tensor.is_floating_point():
            raise UsageError(
                f"model.pretrained: {name} in {self.path} is {list(entry.size)} of {entry.dtype}; the model has "
                f"{list(tensor.shape)} of {tensor.dtype}"
            )

    def _require_same(self, name: str, other: str) -> None:
        with ExitStack() as opened:
            files = [opened.enter_context(safe_open(file, framework="pt")) for file in self.files]
            one, two = (next(file for file in files if n in set(file.keys())).get_slice(n) for n in (name, other))
            alike = self.tensors[name] == self.tensors[other] and all(
                torch.equal(one[start : start + _ROWS], two[start : start + _ROWS])
                for start in range(0, self.tensors[name].size[0], _ROWS)
            )
        if not alike:
            raise UsageError(
                f"model.pretrained: {name} and {other} in {self.path} differ, and are one parameter of the model "
                "(tie_word_embeddings in its config.json)"
            )


_ROWS: Final = 4096
_IGNORED: Final = "_keys_to_ignore_on_load_unexpected"


def open_weights(path: Path) -> WeightsFolder:
    """Look into a folder's files; no tensor is read. `UsageError` without safetensors, or if they are damaged."""
    if safe_open is None:
        raise UsageError(f"model.pretrained needs safetensors: {install('hf')}")
    if not path.is_dir():
        raise UsageError(f"model.pretrained: {path} is not a folder; expected one with config.json and safetensors")
    files = _files(path)
    tensors: dict[str, FileTensor] = {}
    for file in files:
        for name, entry in _entries(file).items():
            if name in tensors:
                raise UsageError(f"model.pretrained: {name} is in two files of {path}")
            tensors[name] = entry
    return WeightsFolder(path=path, files=tuple(files), tensors=tensors)


def _files(path: Path) -> list[Path]:
    index = path / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            files = [path / Path(name).name for name in names]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UsageError(f"model.pretrained: {index} cannot be read: {error}") from error
        for file in files:
            if not file.exists():
                raise UsageError(f"model.pretrained: {index} names {file.name}, which is not there")
        return files
    if (path / SINGLE).exists():
        return [path / SINGLE]
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise UsageError(
            f"model.pretrained: {path} has {pickles[0]}, a pickle, which runs code when it is read, and no "
            "safetensors; expected safetensors. Convert it where you trust it: from_pretrained, then save_pretrained"
        )
    raise UsageError(f"model.pretrained: {path} has neither {SINGLE} nor {INDEX}")


def _entries(file: Path) -> dict[str, FileTensor]:
    out = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                part = opened.get_slice(name)
                kind = part.get_dtype()
                dtype = (_DTYPES | _WHOLE_NUMBERS).get(kind)
                if dtype is None:
                    raise UsageError(
                        f"model.pretrained: {name} in {file} is {kind}; expected one of {', '.join(_DTYPES)}: "
                        "quantized weights cannot be trained"
                    )
                out[name] = FileTensor(size=torch.Size(part.get_shape()), dtype=dtype)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"model.pretrained: {file} cannot be read: {error}") from error
    return out


def _saved(model: nn.Module) -> Sequence[tuple[list[str], Tensor]]:
    groups: dict[int, tuple[list[str], Tensor]] = {}
    state = model.state_dict().keys()
    named: list[tuple[str, Tensor]] = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    for name, tensor in named:
        if name in state:
            groups.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(groups.values())


def _said(what: str, names: Sequence[str]) -> list[str]:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"{what} {', '.join(names[:3])}{more}"] if names else []


# names and sizes of the `Llama` of record in transformers -------------------------------------------------------------


_TYPE, _FORM = next((one["model_type"], one) for one in ARCHITECTURES.values() if "hub" in one)
_SETTINGS: Final[dict[str, Any]] = {"model_type": _TYPE, **_FORM["hub"]["settings"]}
_KEYS: Final = {name: keys[0] for name, keys in _FORM["keys"].items()} | {"head_dim": "head_dim"}
_SIZES: Final = {name: key for name, key in _KEYS.items() if name != "positions"}


def hub_name(name: str) -> str:
    """Return transformers' name of a tensor of `Llama`."""
    module, _, leaf = name.rpartition(".")
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    if layer is None:
        return f"{_FORM['hub']['ends'][module]}.{leaf}"
    return f"model.layers.{layer[1]}.{_FORM['hub']['tensors'][layer[2]]}.{leaf}"


def renaming(model: nn.Module) -> Callable[[str], str]:
    """Return the function from a model's names of tensors to transformers'."""
    return hub_name if isinstance(model, Llama) else str


def reference_model(hub: Any) -> Llama:
    """Return the `Llama` of a configuration of transformers. Raise `UsageError` if it describes another model."""
    rope = dict(getattr(hub, "rope_parameters", None) or {})
    theta = rope.pop("rope_theta", 10000.0)
    values = {name: getattr(hub, name, None) for name in _SETTINGS} | {"rope_type": rope.pop("rope_type", "default")}
    expected = _SETTINGS | {"rope_type": "default"}
    wrong = [f"{name} {value}, not {expected[name]}" for name, value in values.items() if value != expected[name]]
    if wrong:
        raise UsageError(
            f'model.code: the reference Llama cannot be this model: it has {"; ".join(wrong)}; set code = "huggingface"'
        )
    return Llama(LlamaConfig(**{name: getattr(hub, key) for name, key in _SIZES.items()}, rope_base=theta))


def hub_values(config: LlamaConfig, *, positions: int) -> dict[str, Any]:
    return {
        **_SETTINGS,
        "architectures": [_FORM["hub"]["class"]],
        **{key: getattr(config, name) for name, key in _SIZES.items()},
        _KEYS["positions"]: positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "bos_token_id": None,
        "eos_token_id": None,
    }


# writing for `from_pretrained` ----------------------------------------------------------------------------------------


COPIED_FILES: Final[list[str]] = read_table(Path(__file__).with_name("huggingface.toml"))["copied"]
"""Files of a pretrained model's folder that go with its weights: the tokenizer's, and how text is generated."""


@dataclass(frozen=True, kw_only=True)
class HubForm:
    """A model's Hub format, read before the model is sharded.

    Args:
        rename: what files call a tensor of the model.
        sizes: of every tensor of its state, by its name in the model; of names of one parameter, all.
        config: what config.json says, but for the dtype.
        source: the folder that the model came from, whose `COPIED_FILES` are copied.
    """

    rename: Callable[[str], str]
    sizes: Mapping[str, torch.Size]
    config: Mapping[str, Any]
    source: Path | None

    def other_files(self) -> list[Path]:
        if self.source is None:
            return []
        found = {file for pattern in COPIED_FILES for file in self.source.glob(pattern) if file.is_file()}
        return sorted(found)


def hub_form(model: nn.Module, *, described: Path | None, source: Path | None, positions: int) -> HubForm:
    """Read the Hub format of a model that was just built. ``described``: the config.json that it was built from, or its
    folder; ``source``: see `HubForm`; ``positions``: the longest sequence, of a model that has no limit. Raise
    `UsageError` if transformers has no such model.
    """
    sizes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    rename = renaming(model)
    if isinstance(model, Llama):
        config = hub_values(model.config, positions=positions)
    elif type(model).__module__.startswith("transformers."):
        own: Any = model.config
        config = json.loads(own.to_json_string()) | {"architectures": [type(model).__name__]}
        config.pop("use_cache", None)  # switched off for training
    else:
        raise UsageError(
            f"export: transformers has no model like {type(model).__name__}; expected one of transformers', or the "
            'reference Llama. A GPT has to have code = "huggingface"'
        )
    if described is not None:
        file = described / "config.json" if described.is_dir() else described
        config = json.loads(file.read_text(encoding="utf-8"))
        config.setdefault("architectures", [type(model).__name__ if rename is str else _FORM["hub"]["class"]])
    return HubForm(rename=rename, sizes=sizes, config=config, source=source)
