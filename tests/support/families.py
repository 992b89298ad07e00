"""Tiny random-weight models of many families, each with batches, a loss and the context that it trains in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

HIDDEN, VOCABULARY, SEQUENCE, BATCH, HEADS, LAYERS = 64, 256, 48, 2, 4, 3
LABELS = 10

Batch = dict[str, Tensor]
LossFn = Callable[[Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One combination. ``precision`` is fp32, bf16 or autocast (fp32 weights under bf16 autocast)."""

    family: str
    precision: str = "fp32"
    attention: str = "sdpa"
    dropout: bool = False
    tied: bool = False
    cache: bool = (
        False  # decoders: leave `use_cache` on, as most configurations do; the output then holds keys and values
    )
    router_loss: bool = False  # Mixtral's load-balancing loss, out of router logits that hooks collect in a side list
    layers: int = LAYERS

    def __str__(self) -> str:
        flags = {"dropout": self.dropout, "tied": self.tied, "cache": self.cache, "router": self.router_loss}
        return "-".join([self.family, self.precision, self.attention, *(word for word, on in flags.items() if on)])


@dataclass(kw_only=True)
class Built:
    """A model in training mode; enter ``context()`` for the forward (and for tracing), never for the backward."""

    model: nn.Module
    batches: list[Batch]
    loss_fn: LossFn | None
    context: Callable[[], contextlib.AbstractContextManager[Any]]

    @property
    def batch(self) -> Batch:
        """The batch to trace with."""
        return self.batches[0]

    def loss(self, output: Any) -> Tensor:
        """The scalar to differentiate."""
        return self.loss_fn(output) if self.loss_fn is not None else output.loss


class EncoderClassifier(nn.Module):
    """`nn.TransformerEncoder` between an embedding and a head; returns logits, so that the loss is made outside."""

    def __init__(self, *, layers: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        layer = nn.TransformerEncoderLayer(
            HIDDEN, HEADS, 4 * HIDDEN, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(input_ids)))


def _gpt2(case: Case) -> dict[str, Any]:
    p = 0.1 * case.dropout
    sizes = {"n_embd": HIDDEN, "n_layer": case.layers, "n_head": HEADS, "n_positions": SEQUENCE}
    return {**sizes, "resid_pdrop": p, "embd_pdrop": p, "attn_pdrop": p}


def _common(case: Case) -> dict[str, Any]:
    return {"hidden_size": HIDDEN, "num_hidden_layers": case.layers, "num_attention_heads": HEADS}


def _gated(case: Case) -> dict[str, Any]:
    more = {"intermediate_size": 3 * HIDDEN, "num_key_value_heads": 2, "head_dim": HIDDEN // HEADS}
    return {**_common(case), **more, "attention_dropout": 0.1 * case.dropout}


def _mixtral(case: Case) -> dict[str, Any]:
    routing = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": case.router_loss}
    return {**_gated(case), **routing, "intermediate_size": HIDDEN}


def _gemma2(case: Case) -> dict[str, Any]:
    return {**_gated(case), "sliding_window": 16, "query_pre_attn_scalar": HIDDEN // HEADS}


def _bert(case: Case) -> dict[str, Any]:
    p = 0.1 * case.dropout
    return {
        **_common(case),
        "intermediate_size": 4 * HIDDEN,
        "hidden_dropout_prob": p,
        "attention_probs_dropout_prob": p,
    }


def _t5(case: Case) -> dict[str, Any]:
    sizes = {"d_model": HIDDEN, "d_ff": 2 * HIDDEN, "d_kv": HIDDEN // HEADS, "num_heads": HEADS}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0}
    return {**sizes, **tokens, "num_layers": min(case.layers, 2), "dropout_rate": 0.1 * case.dropout}


def _vit(case: Case) -> dict[str, Any]:
    image = {"image_size": 96, "patch_size": 8, "num_labels": LABELS}
    return {**_bert(case), **image}


FAMILIES: dict[str, tuple[str, str, Callable[[Case], dict[str, Any]]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _gpt2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _gated),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _gated),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", _mixtral),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _gated),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _gemma2),
    "bert": ("BertForMaskedLM", "BertConfig", _bert),
    "t5": ("T5ForConditionalGeneration", "T5Config", _t5),
    "vit": ("ViTForImageClassification", "ViTConfig", _vit),
}
NAMES = (*FAMILIES, "encoder")
PADDED = ("bert", "t5", "gpt2")  # families whose batches come with an attention mask that masks something
TIED_CHOICE = ("gpt2", "llama", "qwen3", "gemma", "bert", "t5", "encoder")


def build(case: Case, *, steps: int = 3, seed: int = 0) -> Built:
    """The model of a case, on the CPU, with one batch a step. Same case and seed, same bits."""
    torch.manual_seed(seed)
    if case.family == "encoder":
        model: nn.Module = EncoderClassifier(layers=case.layers, dropout=0.1 * case.dropout, tied=case.tied)
    else:
        model = _hugging_face(case)
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    batches = [_batch(case, dtype) for _ in range(steps)]
    loss_fn = _next_token_loss(batches[0]["input_ids"]) if case.family == "encoder" else None
    return Built(model=model.to(dtype).train(), batches=batches, loss_fn=loss_fn, context=lambda: _context(case))


def _hugging_face(case: Case) -> nn.Module:
    model_class, config_class, settings = FAMILIES[case.family]
    more: dict[str, Any] = {} if case.family == "vit" else {"vocab_size": VOCABULARY}
    if case.family not in ("bert", "vit"):
        more["use_cache"] = case.cache
    if case.family in TIED_CHOICE:
        more["tie_word_embeddings"] = case.tied
    config = getattr(transformers, config_class)(**settings(case), **more, attn_implementation=case.attention)
    return getattr(transformers, model_class)(config)


def _batch(case: Case, dtype: torch.dtype) -> Batch:
    if case.family == "vit":
        return {"pixel_values": torch.randn(BATCH, 3, 96, 96, dtype=dtype), "labels": torch.randint(LABELS, (BATCH,))}
    ids = torch.randint(1, VOCABULARY, (BATCH, SEQUENCE))
    if case.family == "encoder":
        return {"input_ids": ids}
    batch = {"input_ids": ids, "labels": ids.clone()}
    if case.family in PADDED:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, -7:] = 0
    return batch


def _next_token_loss(labels: Tensor) -> LossFn:
    return lambda logits: nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@contextlib.contextmanager
def _context(case: Case) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if case.precision == "autocast":
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        if case.family == "encoder" and case.attention == "eager":  # nn.MultiheadAttention has no other attention
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield
