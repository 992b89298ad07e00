"""Fake steps of real architectures count the bytes of real steps, and with measured workspaces those of the allocator.

A kernel may take memory inside its call: a convolution its columns, a matmul in 16 bits whatever its processor needs.
"""

from __future__ import annotations

import gc

import pytest
import torch
import transformers
from torch import nn

from jettison.capture.fake_copies import fake_batch, fake_copy, fake_mode
from jettison.dryrun.counter import AllocationCounter, measured_peak, static_tensors
from jettison.dryrun.op_costs import MeasuredWorkspace, measure_ops

H, V, S, B = 64, 1024, 64, 2
WRAPPED_SCALAR_BYTES = 64  # Python numbers that C++ wraps in tensors of 8 bytes, out of any dispatch mode's sight
COMMON = {"hidden_size": H, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": V}
GATED = {**COMMON, "intermediate_size": 3 * H, "num_key_value_heads": 2, "attention_dropout": 0.1}

CASES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": H, "n_layer": 2, "n_head": 4, "vocab_size": V}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GATED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GATED, "head_dim": H // 4}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**GATED, "head_dim": H // 4}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GATED, "num_local_experts": 4, "output_router_logits": True}),
    "bert": ("BertForMaskedLM", "BertConfig", {**COMMON, "intermediate_size": 4 * H}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": H, "d_ff": 2 * H, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": V, "use_cache": False}
        | {"decoder_start_token_id": 0},
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {"hidden_size": H, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 4 * H}
        | {"image_size": 32, "patch_size": 8, "num_labels": 10, "hidden_dropout_prob": 0.1},
    ),
}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, H)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(H, 4, 4 * H, 0.1, batch_first=True), 2)
        self.head = nn.Linear(H, V)

    def forward(self, input_ids, labels):
        logits = self.head(self.encoder(self.embed(input_ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(name, attention, dtype):
    torch.manual_seed(0)
    if name == "encoder":
        model = Encoder()
    else:
        model_class, config_class, settings = CASES[name]
        config = getattr(transformers, config_class)(**settings, attn_implementation=attention)
        model = getattr(transformers, model_class)(config)
    if name == "vit":
        batch = {"pixel_values": torch.randn(B, 3, 32, 32, dtype=dtype), "labels": torch.zeros(B, dtype=torch.long)}
    else:
        ids = torch.randint(1, V, (B, S))
        batch = {"input_ids": ids, "labels": ids.clone()}
    return model.to(dtype).train(), batch


def step(model, batch, optimizer=None):
    output = model(**batch)
    (output if isinstance(output, torch.Tensor) else output.loss).backward()
    if optimizer is not None:
        optimizer.step()


def counted(model, batch, optimizer=None, workspace=None):
    gc.collect()
    with AllocationCounter(static_tensors(model, batch, optimizer), workspace=workspace) as counter:
        step(model, batch, optimizer)
    return counter.peak_bytes


def combinations():
    """Each model in either precision and with either attention; the other pairs of the two are slow."""
    for number, name in enumerate((*CASES, "encoder")):
        for attention in ("eager", "sdpa"):
            for dtype in ("float32", "bfloat16"):
                slow = (number + (attention == "eager") + (dtype == "float32")) % 2
                yield pytest.param(name, attention, dtype, marks=pytest.mark.slow if slow else ())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "attention", "dtype"), list(combinations()))
def test_fake_real_and_allocator_agree(name, attention, dtype):
    model, batch = build(name, attention, getattr(torch, dtype))
    step(model, batch)  # caches of the model (masks, position tables) exist from here on
    model.zero_grad()
    report = measured_peak(lambda: step(model, batch), static_tensors=static_tensors(model, batch))
    model.zero_grad()
    real_bytes = counted(model, batch)
    mode = fake_mode()
    twin, fake = fake_copy(model, mode), fake_batch(batch, mode)
    learn = MeasuredWorkspace({})
    with mode:
        assert counted(twin, fake, workspace=learn) == real_bytes
        twin.zero_grad()
    prices = measure_ops(learn.unknown.values(), total_seconds=0.0)
    assert all(price.seconds is not None for price in prices.values())
    with mode:
        with_workspace_bytes = counted(twin, fake, workspace=MeasuredWorkspace(prices))
    assert real_bytes <= with_workspace_bytes
    assert 0 <= report.peak_bytes - with_workspace_bytes <= WRAPPED_SCALAR_BYTES


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_fake_and_real_agree_with_an_optimizer_over_two_steps(name):
    model, batch = build(name, "sdpa", torch.float32)
    mode = fake_mode()
    twin, fake = fake_copy(model, mode), fake_batch(batch, mode)

    def two_steps(model, batch):
        optimizer = torch.optim.AdamW(model.parameters())
        return [counted(model, batch, optimizer) for _ in range(2)]

    real = two_steps(model, batch)
    with mode:
        assert two_steps(twin, fake) == real
    assert real[1] > real[0], "the second step starts with the optimizer's state and the old gradients"


@pytest.mark.filterwarnings("ignore")
def test_holding_the_output_holds_the_logits():
    """`out = model(**batch); out.loss.backward()` keeps `out.logits` through backward: one buffer more.

    (And the keys and values of every layer, unless `use_cache` is off.)
    """
    model, batch = build("llama", "sdpa", torch.bfloat16)
    model.config.use_cache = False
    with AllocationCounter(static_tensors(model, batch)) as released:
        model(**batch).loss.backward()
    model.zero_grad()
    with AllocationCounter(static_tensors(model, batch)) as held:
        output = model(**batch)
        output.loss.backward()
    assert held.peak_bytes - released.peak_bytes == output.logits.untyped_storage().nbytes()
