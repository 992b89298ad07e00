"""What a configuration may leave out or wrap, and the one clear line about what it may not."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from jettison.core.errors import UsageError
from jettison.families.config import parse_config, read_config
from jettison.families.config_values import MOST_LAYERS
from jettison.families.family import FAMILIES
from jettison.spec.model import Attention, Moe
from support.spec_cases import TINY, configuration, decoded, spec

# ------------------------------------------------------------------------------------- what may be left out


@pytest.mark.parametrize("case", [case for case in TINY if "-" not in case])
def test_defaults_are_those_of_transformers(case: str) -> None:
    """A file with nothing but the required sizes makes what the configuration class makes of them."""
    family, full = FAMILIES[decoded(case)["model_type"]], decoded(case)
    spellings = [(*family.spelling.get(key, ()), key) for key in family.required]
    least = {key: full[key] for keys in spellings for key in keys if key in full}
    least |= {"num_attention_heads": 128, "hidden_size": 1024} if case not in ("gpt2",) else {}
    least.pop("num_key_value_heads", None)
    config = type(configuration(case))(**least)
    said = json.loads(config.to_json_string(use_diff=False))
    assert parse_config({"model_type": config.model_type, **least}, name="tiny") == parse_config(said, name="tiny")


@pytest.mark.parametrize("case", TINY)
def test_what_transformers_fills_in_changes_nothing(case: str) -> None:
    """Above all `layer_types`, which it works out from the older keys."""
    settings = {"model_type": configuration(case).model_type, **TINY[case][1]}
    assert parse_config(settings, name="tiny") == spec(case)


def test_null_key_value_heads_are_all_heads() -> None:
    attention = spec("llama", num_key_value_heads=None, head_dim=None).layers[0].attention
    assert isinstance(attention, Attention) and (attention.kv_heads, attention.head_dim) == (4, 16)


def test_no_shared_experts() -> None:
    moe = spec("deepseek_v3", n_shared_experts=None).layers[-1].mlp
    assert isinstance(moe, Moe) and moe.shared_ffn == 0


# ------------------------------------------------------------------------------------------- models around models


def test_text_config() -> None:
    config = transformers.Gemma3Config(text_config=TINY["gemma3_text"][1])
    values = json.loads(config.to_json_string(use_diff=False))
    assert parse_config(values, name="tiny") == spec("gemma3_text")


def test_text_config_of_an_unknown_wrapper() -> None:
    outer = {"model_type": "something_vl", "text_config": decoded("llama"), "torch_dtype": "float16"}
    outer["text_config"].pop("dtype")
    model = parse_config({**outer, "tie_word_embeddings": True}, name="tiny")
    assert (model.family, model.dtype, model.tied_embeddings) == ("llama", "float16", True)
    assert model.layers == spec("llama").layers


def test_the_published_form_of_a_small_gemma_3() -> None:
    """Gemma 3 4B's file leaves out what equals the class's defaults: heads, vocabulary, head_dim."""
    inner = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    model = parse_config({"model_type": "gemma3", "text_config": inner, "torch_dtype": "bfloat16"}, name="gemma")
    attention = model.layers[5].attention
    assert isinstance(attention, Attention) and attention.window is None
    assert (attention.heads, attention.kv_heads, attention.head_dim, model.vocab) == (8, 4, 256, 262208)


def test_a_text_config_without_a_type_is_the_wrappers_own() -> None:
    inner = {key: value for key, value in decoded("llama").items() if key != "model_type"}
    assert parse_config({"model_type": "llava", "text_config": inner}, name="tiny").family == "llama"


# ------------------------------------------------------------------------------------------------------- refusals


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600
    return text


@pytest.mark.parametrize("kind", ["longt5", None, 7, ["llama"], {}])
def test_an_unknown_architecture(kind: object) -> None:
    text = refusal(lambda: parse_config({"model_type": kind, "hidden_size": 64}, name="tiny"))
    assert "module:factory" in text and "--model-type takes a similar one" in text and "docs/architectures.md" in text
    assert ("no model_type" if kind is None else repr(kind)) in text


def test_an_unknown_language_model_inside() -> None:
    text = refusal(lambda: parse_config({"model_type": "gemma3", "text_config": {"model_type": "longt5"}}, name="tiny"))
    assert "'longt5'" in text
    assert "text_config" in refusal(lambda: parse_config({"model_type": "gemma3"}, name="tiny"))


@pytest.mark.parametrize("case", [case for case in TINY if "-" not in case])
def test_missing_sizes_are_all_listed(case: str) -> None:
    kind = decoded(case)["model_type"]
    text = refusal(lambda: parse_config({"model_type": kind}, name="tiny"))
    family = FAMILIES[kind]
    assert all(family.spelling.get(key, (key,))[0] in text for key in family.required)


def test_a_missing_size_is_named_as_the_family_writes_it() -> None:
    values = {key: value for key, value in decoded("gpt2").items() if key != "n_embd"}
    text = refusal(lambda: parse_config(values, name="tiny"))
    assert text == "tiny: the configuration lacks n_embd; expected all of them"


REFUSED: list[tuple[str, str, Any, str]] = [
    ("llama", "hidden_size", "64", "whole number"),
    ("llama", "hidden_size", 64.0, "whole number"),
    ("llama", "hidden_size", True, "whole number"),
    ("llama", "hidden_size", None, "whole number"),
    ("llama", "hidden_size", -64, "whole number"),
    ("llama", "hidden_size", 2**70, "2^63"),
    ("llama", "vocab_size", 0, "whole number"),
    ("llama", "intermediate_size", None, "whole number"),
    ("llama", "max_position_embeddings", [], "whole number"),
    ("llama", "num_hidden_layers", MOST_LAYERS + 1, "at most"),
    ("llama", "num_key_value_heads", 3, "divisor of the 4"),
    ("llama", "head_dim", 0, "whole number"),
    ("llama", "attention_bias", "yes", "true or false"),
    ("llama", "tie_word_embeddings", 1, "true or false"),
    ("llama", "attention_dropout", 1.5, "probability"),
    ("llama", "attention_dropout", float("nan"), "probability"),
    ("llama", "attention_dropout", "0.1", "a number"),
    ("llama", "hidden_act", "xielu", "one of gelu"),
    ("llama", "dtype", "int8", "bfloat16"),
    ("llama", "per_layer_config", {"0": {"num_attention_heads": 2}}, "module:factory"),
    ("gpt2", "n_head", 5, "divisor of the hidden size 64"),
    ("gpt2", "n_inner", 2.5, "whole number"),
    ("gpt2", "add_cross_attention", True, "module:factory"),
    ("mixtral", "num_experts_per_tok", 5, "at most the 4"),
    ("qwen2", "layer_types", ["full_attention"], "a list of 6"),
    ("qwen2", "layer_types", ["full_attention"] * 5 + ["linear_attention"], "linear_attention"),
    ("qwen2", "layer_types", "full_attention", "a list of 6"),
    ("qwen2-window", "sliding_window", "wide", "whole number"),
    ("qwen3_moe", "mlp_only_layers", [0, "1"], "a list of layer numbers"),
    ("qwen3_moe", "decoder_sparse_step", 0, "whole number"),
    ("gemma3_text", "sliding_window", -1, "whole number"),
    ("deepseek_v2", "topk_method", "best", "greedy"),
    ("deepseek_v2", "mlp_bias", True, "shared"),
    ("deepseek_v3", "n_group", 3, "divisor of the 8"),
    ("deepseek_v3", "topk_group", 5, "at most the 4"),
    ("deepseek_v3", "kv_lora_rank", None, "whole number"),
    ("phi3", "rope_parameters", {"partial_rotary_factor": 2}, "at most 1"),
    ("gpt_neox", "rope_scaling", {"partial_rotary_factor": "all"}, "at most 1"),
]


@pytest.mark.parametrize(("case", "key", "value", "expected"), REFUSED, ids=lambda v: str(v)[:30])
def test_refused_values_are_named_with_their_key(case: str, key: str, value: Any, expected: str) -> None:
    changes = {key: value, "rope_parameters": None} if key == "rope_scaling" else {key: value}
    text = refusal(lambda: spec(case, **changes))
    assert text.startswith("tiny: got ") and key in text and expected in text


def test_heads_that_do_not_divide_are_fine_with_a_head_dim() -> None:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6}
    assert "or a head_dim" in refusal(lambda: spec("llama", **sizes, head_dim=None))
    attention = spec("llama", **sizes, head_dim=16).layers[0].attention
    assert isinstance(attention, Attention) and attention.head_dim == 16


def test_a_long_value_does_not_fill_the_screen() -> None:
    refusal(lambda: spec("llama", hidden_size="x\n" * 10_000))


@given(data=st.data())
def test_any_value_gives_a_model_or_one_line(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(sorted(PARSED)))
    known = sorted({*PARSED[case], *FAMILIES[PARSED[case]["model_type"]].defaults, "text_config", "rope_scaling"})
    leaves = st.none() | st.booleans() | st.integers(-3, 300) | st.integers() | st.floats() | st.text(max_size=9)
    anything = st.recursive(leaves, lambda c: st.lists(c, max_size=7) | st.dictionaries(st.text(), c), max_leaves=7)
    changes = data.draw(st.dictionaries(st.sampled_from(known), anything, min_size=1, max_size=4))
    try:
        model = parse_config({**PARSED[case], **changes}, name="tiny")
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert model.depth >= 1


PARSED = {case: decoded(case) for case in TINY}


# ---------------------------------------------------------------------------------------------------------- files


def test_read_config(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(decoded("llama")), encoding="utf-8")
    (folder / "other.json").write_text(json.dumps(decoded("gpt2")), encoding="utf-8")
    assert read_config(folder).name == read_config(folder / "config.json").name == "my-llama"
    assert read_config(folder) == parse_config(decoded("llama"), name="my-llama")
    assert read_config(folder / "other.json").name == "other"


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    assert "No such file" in refusal(lambda: read_config(tmp_path / "nowhere.json"))
    assert "config.json" in refusal(lambda: read_config(tmp_path))
    file = tmp_path / "config.json"
    for content in (b"{", b"", b"\xff\xfe\x00", b"[" * 100_000, b'{"hidden_size": ' + b"9" * 5000 + b"}"):
        file.write_bytes(content)
        assert "is not JSON" in refusal(lambda: read_config(file))
    for content in (b"[]", b"3", b"null", b'"llama"'):
        file.write_bytes(content)
        assert "expected an object" in refusal(lambda: read_config(file))


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from jettison.families.presets import preset; preset('deepseek-v3');"
        "print(sorted({'torch', 'transformers', 'numpy', 'pydantic', 'difflib'} & sys.modules.keys()))"
    )
    source = Path(__file__).resolve().parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(source)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_path_may_be_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_config(str(tmp_path / "config.json"))
