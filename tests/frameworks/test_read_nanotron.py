"""nanotron's runs, read from their YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jettison.cli.main import run as jettison
from jettison.core.errors import UsageError
from jettison.frameworks.run_file import read_run, run_from

FILE = """
checkpoints: {checkpoint_interval: 10, checkpoints_path: out}
data_stages:
- {name: first, start_training_step: 1, data: {dataset: null, seed: 1}}
model:
  dtype: bfloat16
  make_vocab_size_divisible_by: 8
  model_config:
    is_llama_config: true
    hidden_act: silu
    hidden_size: 256
    intermediate_size: 512
    max_position_embeddings: 1024
    num_attention_heads: 8
    num_hidden_layers: 4
    num_key_value_heads: 4
    rope_scaling: null
    use_cache: true
    initializer_range: 0.02
    tie_word_embeddings: true
    vocab_size: 1001
optimizer:
  accumulate_grad_in_fp32: true
  clip_grad: 1.0
  optimizer_factory: {name: adamW, torch_adam_is_fused: true, adam_eps: 1.0e-08}
  zero_stage: 1
parallelism: {dp: 4, pp: 1, tp: 2, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER, recompute_layer: true}
tokens: {sequence_length: 512, micro_batch_size: 2, batch_accumulation_per_replica: 3, train_steps: 9}
"""


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def found(old: str = "", new: str = "", **more: Any) -> Any:
        assert old in FILE
        file = tmp_path / "run.yaml"
        file.write_text(FILE.replace(old, new) if old else FILE)
        return read_run(file, **more)

    return found


def test_fields_of_a_request(read: Any) -> None:
    found = read()
    assert {name: getattr(found.request, name) for name in found.request.given()} == {
        "seq": 512,
        "micro_batch": 2,
        "micro_batches": 3,
        "tp": 2,
        "pp": 1,
        "dp": 4,
        "sp": True,
        "zero": 1,
        "recompute": "full",
        "precision": "bf16-grad32",
        "optimizer": "adamw",
        "like": "nanotron",
    }
    model = found.spec()
    assert (model.hidden, model.depth, model.vocab, model.tied_embeddings) == (256, 4, 1008, True)
    assert (found.gpus, found.global_batch, found.unread) == (8, 24, ())


def test_a_file_is_the_command_that_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(FILE)
    assert jettison(["ledger", "--from", str(file)]) == 0
    first = capsys.readouterr().out
    assert jettison(read_run(file).command().split()[1:]) == 0
    assert capsys.readouterr().out == first
    assert run_from(file).layout.dp == 4


@pytest.mark.parametrize(
    ("old", "new", "field", "value"),
    [
        ("tp_mode: REDUCE_SCATTER", "tp_mode: ALL_REDUCE", "sp", False),
        (", tp_mode: REDUCE_SCATTER", "", "sp", False),
        ("recompute_layer: true", "tp_recompute_allgather: false", "gathered_inputs", True),
        ("pp: 1,", "pp: 2,", "stage_layers", "nanotron"),
        ("pp: 1, tp: 2, pp_engine: 1f1b", "pp: 2, tp: 2", "schedule", "gpipe"),
        ("accumulate_grad_in_fp32: true", "accumulate_grad_in_fp32: false", "precision", "bf16-pure"),
        ("dtype: bfloat16", "dtype: float32", "precision", "fp32"),
        ("torch_adam_is_fused: true", "torch_adam_is_fused: false", "optimizer", "adamw-foreach"),
        ("is_llama_config", "is_qwen2_config", "kernels", "pytorch"),
        ("hidden_act: silu", "hidden_act: silu\n    _attn_implementation: sdpa", "attention", "sdpa"),
    ],
)
def test_what_a_key_becomes(read: Any, old: str, new: str, field: str, value: Any) -> None:
    assert getattr(read(old, new).request, field) == value


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("hidden_act: silu", "moe_config: {num_experts: 8}", r"moe_config\.num_experts = 8 \(experts of nanotron"),
        ("hidden_act: silu", "sliding_window_size: 64", "windows of nanotron"),
        (
            "    hidden_size: 256\n",
            "    vision_config: {hidden_size: 64}\n",
            r"vision_config\.hidden_size = 64 \(images",
        ),
        ("is_llama_config", "is_llamoe_config", r"is_llamoe_config = true \(experts"),
        ("dtype: bfloat16", "dtype: float8", r"model\.dtype = float8 \(expected bfloat16 or float32\)"),
        ("dp: 4,", "dp: 4, warp: 9,", r"parallelism\.warp = 9 \(unknown key\)"),
        ("dp: 4,", "dp: 4, expert_parallel_size: 2,", r"expert_parallel_size = 2 \(experts"),
        ("hidden_size: 256", "hidden_size: many", r"hidden_size = many; expected a whole number"),
        ("    hidden_size: 256\n", "", "names no model"),
        ("vocab_size: 1001", "vocab_size: null", r"model_config\.vocab_size is missing"),
        ("name: adamW", "name: lion", r"optimizer_factory\.name = lion \(expected one of"),
    ],
)
def test_what_is_refused_names_the_key(read: Any, old: str, new: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read(old, new).spec()


def test_gpus_that_its_degrees_do_not_make_are_noted(read: Any) -> None:
    assert not read(gpus=8).notes
    found = read(gpus=16)
    assert found.notes == ("got --gpus 16, and its degrees make 8: give --dp for others",)
    assert not read(gpus=16, asked={"dp": 8}).notes


def test_a_model_that_the_command_names(read: Any) -> None:
    assert read("hidden_size: 256", "hidden_size: 257", model="gpt2").model_argument == "gpt2"


def test_layers_without_rotary_positions(read: Any) -> None:
    found = read("is_llama_config: true", "is_qwen2_config: true\n    no_rope_layer: 2")
    assert [layer.attention.rotary_dim for layer in found.spec().layers] == [32, 0, 32, 0]
    assert found.request.kernels == "pytorch"
