"""The ledger of a trace: its bytes are the programs' bytes, each storage once, and roles are the papers' words."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers
from torch import nn

from jettison.capture.ledger_entries import OUTSIDE_LAYER, ROOT_LAYER, ledger_of
from jettison.capture.tracer import trace_model
from jettison.ledger.ledger import Ledger, Origin
from jettison.solve.checkpoint_policy import Full

S, B, H, V = 32, 2, 64, 128


def llama(attention="eager"):
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=S,
        use_cache=False,
        attn_implementation=attention,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    ids = torch.randint(0, V, (B, S))
    return transformers.LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids.clone()}


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=V,
        n_embd=H,
        n_layer=2,
        n_head=4,
        n_positions=S,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    ids = torch.randint(0, V, (B, S))
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids.clone()}


def stack():
    """Each block saves its own output (relu does), which the next block saves as its input: one storage."""
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*blocks), (torch.randn(8, 16),)


def roles(ledger, layer):
    return Counter(entry.role for entry in ledger.filter(layer=layer))


@pytest.mark.parametrize("build", [llama, lambda: llama("sdpa"), gpt2], ids=["llama", "llama-sdpa", "gpt2"])
def test_layers_have_the_bytes_of_their_programs(build):
    trace = trace_model(*build())
    by_layer = ledger_of(trace).by_layer()
    assert list(by_layer) == [ROOT_LAYER, *(call.name for call in trace.calls)]
    for call in trace.calls:
        program = trace.program(call)
        assert by_layer[call.name] == program.kept_bytes(program.saved_buffers())


def test_shared_inputs_are_one_storage_that_is_the_roots():
    trace = trace_model(*llama())
    ledger = ledger_of(trace)
    shared = ledger.filter(role="shared input")
    assert len({entry.storage for entry in shared}) == 2, "the cosines and the sines"
    assert {entry.layer for entry in shared} == {ROOT_LAYER, *(call.name for call in trace.calls)}
    program = trace.root.program
    tables = 2 * S * (H // 4) * 4
    assert ledger.by_layer()[ROOT_LAYER] == program.kept_bytes(program.saved_buffers()) + tables


def test_a_block_output_that_the_next_block_saves_is_counted_once():
    model, batch = stack()
    ledger = ledger_of(trace_model(model, batch, loss_fn=lambda out: out.sum(), regions=["0", "1", "2"]))
    one = 8 * 16 * 4
    assert [ledger.by_layer()[name] for name in "012"] == [3 * one, 2 * one, 2 * one], "input, middle, output"
    assert ledger.total_bytes() == 7 * one


def test_roles_of_an_eager_llama_block():
    model, batch = llama()
    ledger = ledger_of(trace_model(model, batch))
    found = roles(ledger, "model.layers.1")
    wanted = (
        *("block input", "norm input", "norm statistics", "normalised input", "linear input"),
        *("attention query", "attention key", "attention value", "softmax output"),
        *("activation input", "activation output"),
    )
    for role in wanted:
        assert found[role], f"{role} is missing from {found}"
    softmax, alias = ledger.filter(layer="model.layers.1", role="softmax output")
    assert (softmax.shape, alias.shape) == ((B, 4, S, S), (B * 4, S, S))
    assert softmax.storage == alias.storage, "softmax saves its output, the product with the values a view of it"
    assert softmax.op == "aten._softmax.default"
    assert softmax.origin is Origin.TRACE
    head = roles(ledger, ROOT_LAYER)
    assert head["token ids"] == head["log-softmax output"] == head["labels"] == 1


def test_roles_of_fused_attention_and_dropout():
    fused = roles(ledger_of(trace_model(*llama("sdpa"))), "model.layers.0")
    assert fused["attention output"] == 2, "as attention saves it and as the projection does: one storage"
    assert fused["attention statistics"] == 1
    dropped = roles(ledger_of(trace_model(*gpt2())), "transformer.h.0")
    assert dropped["dropout mask"] == 3
    assert dropped["attention probabilities"] == 1


def test_recompute_of_an_entry_is_priced_while_the_rest_is_kept():
    ledger = ledger_of(trace_model(*llama()))
    gate = next(entry for entry in ledger if entry.role == "activation input")
    assert gate.recompute_flops == 2 * B * S * H * 96, "one product"
    assert "parameter:model.layers.0.mlp.gate_proj.weight" in gate.inputs
    (block_input,) = ledger.filter(layer="model.layers.2", role="block input")
    assert (block_input.recompute_flops, block_input.anchor) == (0, None)


def test_dropout_masks_are_not_recomputed_without_their_state():
    ledger = ledger_of(trace_model(*gpt2()))
    masks = ledger.filter(role="dropout mask")
    assert masks
    assert all(mask.inputs or mask.anchor for mask in masks)


def test_the_ledger_under_a_plan_has_what_is_held():
    trace = trace_model(*llama())
    full = ledger_of(trace, lambda name, program: Full().kept(program) if name else program.saved_buffers())
    block = B * S * H * 4
    assert [full.by_layer()[call.name] for call in trace.calls] == [block] * 3


def test_a_loss_outside_the_model_is_a_layer_of_its_own():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(2)))
    ledger = ledger_of(trace_model(model, (torch.randn(8, 16),), loss_fn=lambda out: out.square().mean()))
    assert ledger.layers[-1] == OUTSIDE_LAYER
    assert ledger.by_layer()[OUTSIDE_LAYER] == 8 * 16 * 4


def test_json_round_trip():
    ledger = ledger_of(trace_model(*llama()))
    assert Ledger.from_json(ledger.to_json()) == ledger
