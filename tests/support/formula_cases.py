"""Tiny models of transformers beside the specs that their configurations describe, and both ledgers of one step.

A family is one entry of `FAMILIES`: its classes, and settings that make it small. The spec is read from the
configuration as ``config.json`` would hold it, so a case covers the whole way from that file to the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from jettison.capture.ledger_entries import ROOT_LAYER, ledger_of
from jettison.capture.tracer import trace_model
from jettison.families.config import parse_config
from jettison.families.family import kernels_for
from jettison.formula.region import embedding_region, head_region, layer_region, parameter_count
from jettison.ledger.compare import Difference, compare
from jettison.ledger.ledger import Ledger, SavedTensor
from jettison.spec.model import ModelSpec
from jettison.spec.precision import PRECISIONS
from jettison.spec.run import Run

HIDDEN, VOCABULARY, SEQUENCE, BATCH, HEADS, LAYERS = 64, 128, 32, 2, 4, 2
WINDOW = 8
DTYPES = {"fp32": torch.float32, "bf16-pure": torch.bfloat16}
ROOT = "root"
_PLAIN = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 96}
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}


@dataclass(frozen=True, kw_only=True)
class TinyFamily:
    """Classes of transformers and settings that make them small. ``dropout``: the keys that hold probabilities.

    ``part``: of the configuration, which the settings belong to.
    """

    model: str
    config: str
    settings: Mapping[str, Any]
    dropout: tuple[str, ...] = ("attention_dropout",)
    attentions: tuple[str, ...] = ("eager", "sdpa")
    part: str = ""


def _gemma_like(**more: Any) -> dict[str, Any]:
    return {**_GROUPED, **_TOKENS, "head_dim": 24, "max_position_embeddings": 2 * SEQUENCE, **more}


FAMILIES: dict[str, TinyFamily] = {
    "gpt2": TinyFamily(
        model="GPT2LMHeadModel",
        config="GPT2Config",
        settings={"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 2 * SEQUENCE, **_TOKENS},
        dropout=("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    ),
    "gpt_neox": TinyFamily(
        model="GPTNeoXForCausalLM",
        config="GPTNeoXConfig",
        settings={**_PLAIN, "rotary_pct": 0.25},
        dropout=("attention_dropout", "hidden_dropout"),
    ),
    "gpt_neox sequential": TinyFamily(
        model="GPTNeoXForCausalLM",
        config="GPTNeoXConfig",
        settings={**_PLAIN, "rotary_pct": 1.0, "use_parallel_residual": False, "attention_bias": False},
        dropout=("attention_dropout", "hidden_dropout"),
    ),
    "llama": TinyFamily(model="LlamaForCausalLM", config="LlamaConfig", settings=_GROUPED),
    "llama ungrouped": TinyFamily(
        model="LlamaForCausalLM",
        config="LlamaConfig",
        settings={**_PLAIN, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": TinyFamily(model="MistralForCausalLM", config="MistralConfig", settings=_GROUPED),
    "mistral windowed": TinyFamily(
        model="MistralForCausalLM", config="MistralConfig", settings={**_GROUPED, "sliding_window": WINDOW}
    ),
    "qwen2": TinyFamily(model="Qwen2ForCausalLM", config="Qwen2Config", settings=_GROUPED),
    "qwen2 windowed": TinyFamily(
        model="Qwen2ForCausalLM",
        config="Qwen2Config",
        settings={**_GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": TinyFamily(model="Qwen3ForCausalLM", config="Qwen3Config", settings={**_GROUPED, "head_dim": 24}),
    "gemma": TinyFamily(model="GemmaForCausalLM", config="GemmaConfig", settings=_gemma_like()),
    "gemma2": TinyFamily(
        model="Gemma2ForCausalLM",
        config="Gemma2Config",
        settings=_gemma_like(sliding_window=WINDOW),
        attentions=("eager",),  # its code refuses the other: scaled_dot_product_attention caps no scores
    ),
    "gemma3_text": TinyFamily(
        model="Gemma3ForCausalLM",
        config="Gemma3TextConfig",
        settings=_gemma_like(
            sliding_window=WINDOW, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2
        ),
    ),
    "phi3": TinyFamily(
        model="Phi3ForCausalLM",
        config="Phi3Config",
        settings={**_GROUPED, **_TOKENS},
        dropout=("attention_dropout", "resid_pdrop"),
    ),
    "phi3 partial": TinyFamily(
        model="Phi3ForCausalLM",
        config="Phi3Config",
        settings={**_GROUPED, **_TOKENS, "partial_rotary_factor": 0.5, "sliding_window": WINDOW},
        dropout=("attention_dropout", "resid_pdrop"),
    ),
    "olmo2": TinyFamily(model="Olmo2ForCausalLM", config="Olmo2Config", settings={**_GROUPED, **_TOKENS}),
    "bert": TinyFamily(
        model="BertForMaskedLM",
        config="BertConfig",
        settings={**_PLAIN, "pad_token_id": 0, "max_position_embeddings": 2 * SEQUENCE},
        dropout=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    ),
}
DENSE = tuple(FAMILIES)


@dataclass(frozen=True, kw_only=True)
class FormulaCase:
    """One training step of one tiny model.

    Args:
        attention: eager or sdpa.
        precision: fp32 or bf16-pure.
        padding: the batch has an attention mask with zeros.
    """

    family: str
    attention: str = "eager"
    precision: str = "fp32"
    dropout: float = 0.0
    batch: int = BATCH
    sequence: int = SEQUENCE
    source: int = 0  # tokens that an encoder beside a decoder reads; 0: as many as the decoder writes
    padding: bool = False
    more: tuple[tuple[str, Any], ...] = field(default=())  # settings on top of the family's

    def __str__(self) -> str:
        words = [self.family.replace(" ", "-"), self.attention, self.precision]
        flags = {"dropout": bool(self.dropout), "padding": self.padding, f"b{self.batch}": self.batch != BATCH}
        return "-".join(
            [*words, *(word for word, on in flags.items() if on), *(f"{key}={value}" for key, value in self.more)]
        )


def cases(family: str) -> Iterator[FormulaCase]:
    """Both attentions, both precisions, with and without dropout."""
    for attention in FAMILIES[family].attentions:
        for precision in DTYPES:
            for dropout in (0.0, 0.1):
                yield FormulaCase(family=family, attention=attention, precision=precision, dropout=dropout)


def paired(cases: Iterable[FormulaCase]) -> list[Any]:
    """Cases as parameters of a test, of which those are quick that show every pair of attention, precision, dropout."""
    found = []
    for case in cases:
        odd = (case.attention == "sdpa") + (case.precision == "fp32") + (case.dropout > 0)
        found.append(pytest.param(case, id=str(case), marks=pytest.mark.slow if odd % 2 else ()))
    return found


def tiny_config(case: FormulaCase) -> Any:
    """The configuration of transformers."""
    tiny = FAMILIES[case.family]
    settings: dict[str, Any] = {
        **({} if "image_size" in tiny.settings else {"vocab_size": VOCABULARY}),
        **tiny.settings,
        **dict.fromkeys(tiny.dropout, case.dropout),
        **dict(case.more),
    }
    cached = {"use_cache": False} if tiny.model.endswith(("CausalLM", "LMHeadModel", "Generation")) else {}
    settings = {tiny.part: settings} if tiny.part else settings
    return getattr(transformers, tiny.config)(**settings, **cached, attn_implementation=case.attention)


def spec_of(config: Any) -> ModelSpec:
    """What `parse_config` makes of it, written as JSON and read back."""
    return parse_config(json.loads(json.dumps(config.to_dict())), name="tiny")


def model_of(case: FormulaCase) -> nn.Module:
    """The model in training mode."""
    config = tiny_config(case)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, FAMILIES[case.family].model)(config)
    return model.to(DTYPES[case.precision]).train()


@cache
def traced(case: FormulaCase) -> Ledger:
    """The ledger of the real model, in the layers of `written`."""
    ids = torch.randint(1, VOCABULARY, (case.batch, case.sequence))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if (patches := spec_of(tiny_config(case)).patches) is not None:
        pixels = torch.randn(case.batch, patches.channels, patches.height, patches.width, dtype=DTYPES[case.precision])
        batch = {"pixel_values": pixels, "labels": torch.zeros(case.batch, dtype=torch.int64)}
    if (pair := spec_of(tiny_config(case)).pair) is not None:
        seen = pair.images.patches
        assert seen is not None
        pixels = torch.randn(case.batch, seen.channels, seen.height, seen.width, dtype=DTYPES[case.precision])
        batch = {"input_ids": ids, "pixel_values": pixels, "return_loss": True}
    if (waves := spec_of(tiny_config(case)).audio) is not None:
        samples = case.source or waves.samples(case.sequence)
        sound = torch.randn(case.batch, samples, dtype=DTYPES[case.precision])
        batch = {"input_values": sound, "labels": torch.randint(1, VOCABULARY, (case.batch, waves.labels(samples)))}
    if spec_of(tiny_config(case)).source is not None:
        batch["labels"] = batch["labels"][:, : case.sequence]
        batch["input_ids"] = torch.randint(1, VOCABULARY, (case.batch, case.source or case.sequence))
        if (bins := getattr(tiny_config(case), "num_mel_bins", 0)) > 0:
            frames = 2 * tiny_config(case).max_source_positions
            batch["input_features"] = torch.randn(case.batch, bins, frames, dtype=DTYPES[case.precision])
            del batch["input_ids"]
    if case.padding:
        batch["attention_mask"] = (torch.arange(case.sequence) < case.sequence - 5).long().expand(ids.shape).clone()
    return traced_call(model_of(case), batch)


def traced_call(model: nn.Module, batch: Mapping[str, Any]) -> Ledger:
    """The ledger of a model, its layers called ``layers.0`` onwards and all else `ROOT`."""
    trace = trace_model(model, batch)
    found = ledger_of(trace)
    blocks = [call.name for call in trace.calls if ".conv_layers." not in call.name]  # those belong to an embedding
    names = {call.name: ROOT for call in trace.calls} | {name: f"layers.{i}" for i, name in enumerate(blocks)}
    names[ROOT_LAYER] = ROOT
    entries = tuple(replace(entry, layer=names[entry.layer]) for entry in found)
    return Ledger(entries, layers=tuple(dict.fromkeys(names[layer] for layer in found.layers)))


def run_of(case: FormulaCase) -> Run:
    """The same step as a spec, on the CPU's kernels."""
    spec = spec_of(tiny_config(case))
    kernels = kernels_for(spec, "huggingface").with_attention(case.attention).on_cpu()
    fixed = (
        spec.shortest_source
        if spec.source is None
        else spec.source.max_positions
        if spec.source.sound
        else case.sequence
    )
    seq = case.sequence if spec.patches is None else spec.patches.tokens
    return Run(
        model=spec,
        source_seq=case.source or fixed,
        seq=spec.audio.frames(case.source) if spec.audio is not None and case.source else seq,
        micro_batch=case.batch,
        kernels=kernels,
        precision=PRECISIONS[case.precision],
        dropout=case.dropout,
        padding=case.padding,
    )


def written(run: Run) -> Ledger:
    """The closed form's ledger, in the layers of `traced`."""
    entries: list[SavedTensor] = []
    for region, name in ((embedding_region(run.signature), "embedding"), (head_region(run.signature), "head")):
        entries += [replace(entry, layer=ROOT) for entry in region.entries(name)]
    layers = [f"layers.{i}" for i in range(run.model.depth)]
    for name, layer in zip(layers, run.model.layers, strict=True):
        entries += layer_region(run.signature, layer).entries(name)
    return Ledger(tuple(entries), layers=(ROOT, *layers))


def under_autocast(case: FormulaCase) -> tuple[Ledger, Ledger]:
    """The closed form, and the real model, with fp32 parameters under torch.autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        recorded = traced.__wrapped__(case)
    return written(replace(run_of(case), precision=PRECISIONS["bf16-autocast"])), recorded


def differences(case: FormulaCase) -> list[Difference]:
    """How the real model differs from the closed form."""
    return compare(written(run_of(case)), traced(case))


def counts(case: FormulaCase) -> tuple[int, int]:
    """Parameters by the formula, and of the real model."""
    return parameter_count(spec_of(tiny_config(case))), sum(p.numel() for p in model_of(case).parameters())
