"""Tensor-parallel plans are found from the structure of known models; all others are refused by name."""

from __future__ import annotations

import copy
import pickle
from collections import Counter

import pytest
import torch
from torch import nn

from jettison import parallel
from jettison.core.errors import UnsupportedModule, UsageError
from jettison.models.reference import Gpt, GptConfig, GptLayer, Llama, LlamaConfig, LlamaLayer
from jettison.parallel import (
    BlockInput,
    ColumnParallel,
    OwnDraws,
    Replicated,
    RowParallel,
    VocabularyParallel,
    tensor_parallel_plan,
)
from jettison.parallel.tp_collectives import Axis

GPT = GptConfig(layers=2, hidden=32, heads=4, vocab=50, positions=16, dropout=0.1)
LLAMA = LlamaConfig(layers=2, hidden=32, heads=8, kv_heads=2, head_dim=4, ffn=48, vocab=50)


def test_each_public_name_is_found_in_its_module() -> None:
    for name in parallel.__all__:
        assert getattr(parallel, name).__name__ == name


def gpt2(**more: object) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=50, n_positions=16, **more)
    return transformers.GPT2LMHeadModel(config)


def llama(family: str = "Llama", **more: object) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 50,
    }
    config = getattr(transformers, f"{family}Config")(**sizes | more)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_parameter_has_a_style(sequence_parallel: bool) -> None:
    for model in (Gpt(GPT), Llama(LLAMA), gpt2(), llama(), llama("Qwen3"), GptLayer(GPT), LlamaLayer(LLAMA)):
        plan = tensor_parallel_plan(model, sequence_parallel=sequence_parallel)
        holders = {path for path, module in model.named_modules() if module._parameters}
        assert holders <= set(plan)
        assert all(isinstance(model.get_submodule(path), nn.Module) for path in plan)


def test_the_plan_of_gpt2() -> None:
    plan = tensor_parallel_plan(gpt2())
    kinds = Counter(type(style) for style in plan.values())
    assert kinds[ColumnParallel] == 3, "c_attn, c_fc and the head"
    assert kinds[RowParallel] == kinds[BlockInput] == 2
    assert kinds[VocabularyParallel] == 1
    assert kinds[Replicated] == 4, "three norms and the positions"
    joined = plan["transformer.h.0.attn.c_attn"]
    assert isinstance(joined, ColumnParallel)
    assert (joined.groups, joined.unit) == (3, 8)


def test_loans_only_where_masks_of_parts_and_of_wholes_are_drawn() -> None:
    for model, lent in (
        (gpt2(), True),
        (gpt2(attn_pdrop=0.0), False),
        (llama(), False),
        (llama(attention_dropout=0.1), True),
    ):
        for sequence_parallel in (False, True):
            plan = tensor_parallel_plan(model, sequence_parallel=sequence_parallel)
            loans = {style.draws for style in plan.values() if isinstance(style, BlockInput | RowParallel)} - {None}
            assert len(loans) == (lent and not sequence_parallel)


def test_unknown_models_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModule, match=r"for the model, a .*\.Linear; known are .*Gpt, GptLayer"):
        tensor_parallel_plan(nn.Linear(2, 2))
    with pytest.raises(UnsupportedModule, match=r"for 1, a .*TransformerEncoderLayer"):
        tensor_parallel_plan(nn.Sequential(GptLayer(GPT), nn.TransformerEncoderLayer(8, 2)))
    with pytest.raises(UnsupportedModule, match=r"known for the model, a .*Gemma2ForCausalLM"):
        tensor_parallel_plan(llama("Gemma2"))
    with pytest.raises(UnsupportedModule, match=r"known for the model, a .*MixtralForCausalLM"):
        tensor_parallel_plan(llama("Mixtral"))


def test_a_class_of_the_same_name_is_not_known() -> None:
    class LlamaDecoderLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = nn.Linear(2, 2)

    with pytest.raises(UnsupportedModule, match="LlamaDecoderLayer"):
        tensor_parallel_plan(LlamaDecoderLayer())


def test_known_classes_with_unknown_parts_are_refused() -> None:
    model = Gpt(GPT)
    model.layers[1].attention.gate = nn.Linear(32, 32)
    with pytest.raises(UnsupportedModule, match=r"layers\.1\.attention\.gate\.weight is a parameter that"):
        tensor_parallel_plan(model)
    model = Gpt(GPT)
    model.layers[0].scale = nn.Parameter(torch.ones(1))
    with pytest.raises(UnsupportedModule, match=r"layers\.0\.scale"):
        tensor_parallel_plan(model)
    model = Gpt(GPT)
    model.layers[0].mlp.up = nn.Bilinear(32, 32, 128)
    with pytest.raises(UnsupportedModule, match=r"layers\.0\.mlp\.up is a .*Bilinear; expected a linear layer"):
        tensor_parallel_plan(model)
    model = Gpt(GPT)
    model.layers[0].mlp_norm = nn.BatchNorm1d(32)
    with pytest.raises(UnsupportedModule, match=r"layers\.0\.mlp_norm is a .*BatchNorm1d"):
        tensor_parallel_plan(model)
    model = Gpt(GPT)
    del model.layers[0].attention.out
    with pytest.raises(UnsupportedModule, match=r"layers\.0\.attention, a .*has no module 'out'"):
        tensor_parallel_plan(model)
    with pytest.raises(UnsupportedModule, match="crossattention"):
        tensor_parallel_plan(gpt2(add_cross_attention=True))
    qwen = llama("Qwen3")
    attention = qwen.model.layers[0].self_attn
    attention.q_norm.weight = nn.Parameter(torch.ones(32))
    with pytest.raises(UnsupportedModule, match=r"q_norm.*a norm of single heads"):
        tensor_parallel_plan(qwen)


def test_stages_of_a_pipeline_have_parts_missing() -> None:
    first, middle = Llama(LLAMA), Llama(LLAMA)
    first.norm = first.head = None
    middle.tokens = middle.norm = middle.head = None
    assert "tokens" in tensor_parallel_plan(first)
    assert not {"tokens", "norm", "head"} & set(tensor_parallel_plan(middle))
    stage = llama().model
    assert "layers.0" in tensor_parallel_plan(stage), "whole embeddings become shards there"
    stage.embed_tokens = None
    assert "layers.0" not in tensor_parallel_plan(stage), "the stage before has made them so"


@pytest.mark.parametrize(
    ("style", "module", "ways", "says"),
    [
        (ColumnParallel(unit=4), nn.Linear(32, 8), 4, "2 heads of 4 outputs do not divide over 4 tensor-parallel"),
        (ColumnParallel(), nn.Linear(32, 9), 2, "9 outputs do not divide over 2"),
        (ColumnParallel(groups=3, unit=8), nn.Linear(32, 96), 8, "4 heads of 8 outputs do not divide over 8"),
        (RowParallel(), nn.Linear(9, 32), 2, "9 inputs do not divide over 2"),
    ],
)
def test_what_does_not_divide(style: ColumnParallel | RowParallel, module: nn.Module, ways: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        style.check(module, ways)
    style.check(module, 1)


def test_styles_refuse_modules_of_other_kinds() -> None:
    with pytest.raises(UnsupportedModule, match=r"got a Conv1d; expected nn\.Linear"):
        ColumnParallel().check(nn.Conv1d(2, 2, 1), 1)
    with pytest.raises(UnsupportedModule, match="without max_norm"):
        VocabularyParallel().check(nn.Embedding(4, 4, max_norm=1.0), 1)


def test_an_axis_is_copied_and_pickled_with_a_module() -> None:
    axis = Axis("group", 4, 1)
    assert copy.deepcopy(axis) == axis == pickle.loads(pickle.dumps(axis))


def test_a_copied_model_has_one_loan_of_its_own() -> None:
    loan = OwnDraws()
    one, other = copy.deepcopy([loan, loan])
    assert one is other is not loan
