"""Steps of litgpt's own modules on fake tensors, beside the peaks that its tables print.

    python -m benchmarks.litgpt_rows FOLDER         # prints a row for each run of tables of its year
    python -m benchmarks.litgpt_rows FOLDER 5895df1 # for those whose name or source has this in it

FOLDER is a checkout of Lightning-AI/litgpt at the commit that a row of `tests/facts/one_gpu*.csv` names: ``litgpt`` is
in it, or ``lit_gpt`` before March 2024. Nothing of Lightning runs: what its loop and its plugins do to memory is
written here, and NOTE [ What Fabric and bitsandbytes hold ] says where it was read.

NOTE [ What Fabric and bitsandbytes hold ]
- Fabric (lightning 2.1 to 2.4, ``fabric/plugins/precision/half.py`` and ``bitsandbytes.py``, ``convert_output``) casts
  what a model returns to fp32: a list of logits, which the loop's variable holds through backward and the next forward.
- ``model.max_seq_length = ...`` is set outside of Fabric's contexts and makes rotary tables anew: in fp32.
- bitsandbytes until 0.43.1 (pull request 1270): ``MatMul4Bit.forward`` sets ``ctx.tensors = (A, B)``. An attribute of a
  node stays until the graph goes, whatever backward has freed, and the loop's ``loss`` holds the graph until the next
  forward is over. So inputs of packed products are there twice, unless the longest batch is the first, as litgpt had
  it in 2023 (``longest_seq_ix``).
- Fabric packs fp16 copies (``bitsandbytes.py``, ``quantize``: ``dtype=torch.half``), so that ``dequantize_4bit`` gives
  fp16, and ``.to(A.dtype)`` a second copy in bf16. It packs the head as well.
"""

from __future__ import annotations

import csv
import importlib
import re
import sys
import types
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear

from jettison.dryrun.counter import AllocationCounter

FACTS: Final = Path(__file__).parent.parent / "tests" / "facts"
FILES: Final = ("one_gpu_memory.csv", "one_gpu_more.csv")
NAMES: Final = {
    "phi-1.5": "phi-1_5",
    "StableLM Alpha 3B": "stablelm-base-alpha-3b",
    "Llama 2 7B": "Llama-2-7b-hf",
    "Llama 2 13B": "Llama-2-13b-hf",
    "Falcon 7B": "falcon-7b",
    "Gemma 2B": "Gemma-2b",
    "Gemma 7B": "Gemma-7b",
    "Gemma 2 2B": "Gemma-2-2b",
    "Gemma 2 9B": "Gemma-2-9b",
    "Llama 3 8B": "Llama-3-8B",
    "Llama 3.2 1B": "Llama-3.2-1B",
    "Llama 3.2 3B": "Llama-3.2-3B",
    "Mistral 7B": "Mistral-7B-v0.1",
    "phi-2": "phi-2",
    "Phi 3 mini": "Phi-3-mini-4k-instruct",
    "TinyLlama 1.1B": "tiny-llama-1.1b",
}
"""What litgpt's configurations are called."""
_EVERYWHERE: Final = ("query", "key", "value", "projection", "mlp", "head")
_CHUNK: Final = 128  # ``lm_head_chunk_size`` of its fine-tuning
_SHORT: Final = 256  # a later batch, where the longest is the first
_PER_SCALE: Final = 64


class _Dropout(nn.Module):
    """With a mask of a byte an element, as on CUDA."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten.native_dropout(x, self.share, True)[0]
        return out


class PackedProduct(torch.autograd.Function):
    """A product of a packed matrix: what stays and what is made, not its values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.held, ctx.shape = x, shape
        return linear(x, _unpacked(shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad @ _unpacked(ctx.shape, grad.dtype), None


def _unpacked(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    half = torch.empty(shape, dtype=torch.float16)
    return half.to(dtype)


class _PackedLinear(nn.Module):
    """nf4 with a fp32 scale for each 64 numbers, or one byte for each (doubly quantised)."""

    def __init__(self, old: nn.Linear, *, double: bool) -> None:
        super().__init__()
        self.out_features, self.in_features = old.weight.shape
        count = self.out_features * self.in_features
        self.weight = nn.Parameter(torch.empty(count // 2, dtype=torch.uint8), requires_grad=False)
        scales = torch.empty(count // _PER_SCALE, dtype=torch.uint8 if double else torch.float32)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = old.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = PackedProduct.apply(x, (self.out_features, self.in_features))
        return out if self.bias is None else out + self.bias


def load(folder: Path) -> tuple[Any, Any, Any, Any]:
    """(GPT, Config, mark_only_lora_as_trainable, chunked_cross_entropy) of a checkout, without Lightning.

    Raises:
        SystemExit: there is neither package.
    """
    name = next((n for n in ("litgpt", "lit_gpt") if (folder / n / "lora.py").is_file()), None)
    if name is None:
        raise SystemExit(f"got {folder}; expected a checkout of Lightning-AI/litgpt, with litgpt or lit_gpt in it")
    for other in ("lightning", "lightning.fabric", "lightning.pytorch", "lightning_utilities"):
        _stand_in(other)
    for other in ("loggers", "strategies", "utilities", "utilities.load", "utilities.types", "utilities.rank_zero"):
        _stand_in(f"lightning.fabric.{other}")
    for other in ("lightning.pytorch.loggers", "lightning.pytorch.cli", "lightning_utilities.core"):
        _stand_in(other)
    _stand_in("lightning_utilities.core.imports")
    package: Any = types.ModuleType(name)
    package.__path__ = [str(folder / name)]
    sys.modules[name] = package
    package.GPT = importlib.import_module(f"{name}.model").GPT
    package.Config = importlib.import_module(f"{name}.config").Config
    lora, utils = (importlib.import_module(f"{name}.{part}") for part in ("lora", "utils"))
    vars(utils)["max"] = lambda *_: 1  # of tokens that are not masked, which fake tensors cannot say
    return lora.GPT, lora.Config, lora.mark_only_lora_as_trainable, utils.chunked_cross_entropy


class _Nothing:
    """Whatever is imported: false, and made of anything."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __bool__(self) -> bool:
        return False

    def __class_getitem__(cls, _: Any) -> Any:
        return cls


def _stand_in(name: str) -> None:
    made: Any = types.ModuleType(name)
    made.__path__, made.__file__ = [], f"{name} (stand-in)"
    made.__spec__ = ModuleSpec(name, None)

    def asked(word: str) -> Any:
        if word.startswith("__"):
            raise AttributeError(word)
        return _Nothing

    made.__getattr__ = asked
    sys.modules[name] = made


def peak_bytes(parts: tuple[Any, Any, Any, Any], name: str, request: dict[str, str], *, longest_first: bool) -> int:
    """Of two steps of one run.

    Args:
        request: as a row has it: seq, micro_batch, lora, perhaps base.
        longest_first: the second batch is short.
    """
    gpt, config, mark, loss_of = parts
    seq, batch = int(request["seq"]), int(request["micro_batch"])
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        model = gpt(config.from_name(name, **_adapters(config, request["lora"])))
        mark(model)
        torch.set_default_dtype(torch.float32)
        model.max_seq_length = seq
        _replace_modules(model, base=request.get("base", "plain"))
        learns = [p for p in model.parameters() if p.requires_grad]
        paged = "offload_optimizer" in request
        optimizer = None if paged else torch.optim.AdamW(learns, foreach=True)
        with AllocationCounter([*model.parameters(), model.cos, model.sin]) as counter:
            for step in range(2):
                length = min(_SHORT, seq) if step and longest_first else seq
                tokens = torch.zeros(batch, length, dtype=torch.int64)
                torch.set_default_dtype(torch.bfloat16)
                narrow = model(tokens, lm_head_chunk_size=_CHUNK)
                torch.set_default_dtype(torch.float32)
                logits = [one.float() for one in narrow]
                del narrow
                logits[-1] = logits[-1][..., :-1, :]
                loss = loss_of(logits, tokens[..., 1:])
                loss.backward()
                if optimizer is not None:
                    optimizer.step()
                model.zero_grad()
            return counter.peak_bytes


def _adapters(config: Any, text: str) -> dict[str, Any]:
    words = dict(word.split("=", 1) for word in text.split(","))
    where = _EVERYWHERE if "mlp" in words["targets"] else ("query", "value")
    given = {"r": int(words["r"]), "alpha": int(words["alpha"]), "dropout": float(words["dropout"])}
    if "to_query" in config.__dataclass_fields__:
        return given | {f"to_{word}": True for word in where}
    return {f"lora_{key}": value for key, value in given.items()} | {f"lora_{word}": True for word in where}


def _replace_modules(model: nn.Module, *, base: str) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout):
                setattr(module, name, _Dropout(child.p))
            elif isinstance(child, nn.Linear) and base.startswith("nf4"):
                setattr(module, name, _PackedLinear(child, double=base == "nf4-double"))


def rows() -> Iterator[dict[str, str]]:
    """Of litgpt, with adapters."""
    for file in FILES:
        with (FACTS / file).open(encoding="utf-8", newline="") as lines:
            yield from (row for row in csv.DictReader(lines) if row["framework"] == "litgpt" and "LoRA" in row["run"])


def main(arguments: Sequence[str]) -> None:
    """Print rows: run, GB published, GB of its own step."""
    folder, word = Path(arguments[0]), "".join(arguments[1:2])
    old = (folder / "lit_gpt").is_dir()
    parts = load(folder)
    for row in rows():
        if ("resource-tables" in row["source"]) is not old or word not in row["run"] + row["source"]:
            continue
        name = NAMES[re.split(r", Q?LoRA", row["run"])[0]]
        request = dict(word.split("=", 1) for word in row["request"].split())
        try:
            found = peak_bytes(parts, name, request, longest_first=old) / 10**9
        except (ValueError, KeyError, StopIteration) as error:  # a model that came later
            print(f"{row['run']}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        print(f"{row['run']}|{row['published']}|{found:.3f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
