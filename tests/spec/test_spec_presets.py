"""Presets have the number of parameters that their publishers give, and that transformers builds."""

import pytest
import torch
import transformers

from jettison.core.errors import UsageError
from jettison.families.presets import PRESETS, preset
from jettison.formula.region import active_parameter_count, parameter_count
from jettison.spec.model import Activation, Arrangement, Attention, LatentAttention, Moe

# of transformers 5 models built on "meta" from the same configurations, summed over parameters()
EXPECTED_PARAMETERS = {
    "gpt-22b": 22_074_273_792,
    "gpt-175b": 174_615_846_912,
    "gpt-530b": 529_600_819_200,
    "gpt-1t": 1_008_038_758_400,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-6.9b": 6_857_302_016,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3-405b": 405_853_388_800,
    "llama-1b-mha": 1_342_244_864,
    "llama-3b-mha": 3_573_722_112,
    "llama-8b-mha": 8_858_636_288,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    # 671,026,419,200 with the 58 layers' 256 correction biases, which are buffers; no multi-token prediction
    "deepseek-v3": 671_026_404_352,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-27b": 27_009_346_304,
    "phi3-mini": 3_821_079_552,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-14b": 14_768_307_200,
    "gemma2-2b": 2_614_341_888,
    "gemma3-12b": 11_766_034_176,
    "gemma3-4b": 3_880_263_168,
    "gemma3-1b": 999_885_952,
}

PUBLISHED_BILLIONS = {  # as model cards and papers round them; active parameters left out
    "gpt-22b": 22,
    "gpt-175b": 175,
    "gpt-530b": 530,
    "gpt-1t": 1008,
    "gpt-neox-20b": 20.6,
    "pythia-6.9b": 6.9,
    "llama3-8b": 8.03,
    "llama3-70b": 70.6,
    "llama3-405b": 406,
    "mistral-7b": 7.24,
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 141,
    "qwen2-7b": 7.62,
    "qwen2-72b": 72.7,
    "qwen3-8b": 8.2,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "deepseek-v2": 236,
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671,
    "gemma2-9b": 9.24,
    "gemma2-27b": 27.2,
    "phi3-mini": 3.82,
    "olmo2-7b": 7.3,
    "olmo2-13b": 13.7,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "bert-base": 0.11,
    "bert-large": 0.335,
    "llama3.2-1b": 1.24,
    "llama3.2-3b": 3.21,
    "tinyllama-1.1b": 1.1,
    "smollm2-135m": 0.1345,
    "smollm2-360m": 0.362,
    "smollm2-1.7b": 1.71,
    "mistral-7b-v0.3": 7.25,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09,
    "qwen2.5-7b": 7.62,
    "qwen2.5-14b": 14.8,
    "qwen2.5-32b": 32.8,
    "qwen2.5-72b": 72.7,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-14b": 14.8,
    "gemma2-2b": 2.61,
    "gemma3-1b": 1.0,
}


def transformers_count(name: str) -> int:
    values = dict(PRESETS[name])
    kind = values.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **values)
    auto = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_preset_has_an_expected_count() -> None:
    assert EXPECTED_PARAMETERS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", EXPECTED_PARAMETERS)
def test_parameters(name: str) -> None:
    assert parameter_count(preset(name)) == EXPECTED_PARAMETERS[name]


@pytest.mark.parametrize("name", EXPECTED_PARAMETERS)
def test_expected_parameters_are_those_of_transformers(name: str) -> None:
    assert transformers_count(name) == EXPECTED_PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_expected_parameters_are_the_published_ones(name: str) -> None:
    assert EXPECTED_PARAMETERS[name] / 1e9 == pytest.approx(PUBLISHED_BILLIONS[name], rel=0.01)


def test_the_papers_models_match_their_formula() -> None:
    """arXiv 2104.04473 eq. 2, which leaves out the last norm's 2h."""
    for name in ("gpt-22b", "gpt-175b", "gpt-530b", "gpt-1t"):
        model = preset(name)
        depth, h = model.depth, model.hidden
        assert EXPECTED_PARAMETERS[name] == 12 * depth * h**2 + 13 * depth * h + (51200 + 2048) * h + 2 * h


def test_the_papers_models_are_what_it_describes() -> None:
    model = preset("gpt-175b")
    (layer,) = model.kinds
    assert model.family == "paper"
    assert (model.hidden, model.depth, model.vocab, model.max_positions) == (12288, 96, 51200, 2048)
    assert model.learned_positions and model.tied_embeddings
    assert model.dropout == 0.1
    sites = model.dropout_sites
    assert sites.embedding and sites.attention and sites.residual
    attention = layer.attention
    assert isinstance(attention, Attention)
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (96, 96, 128)
    assert attention.qkv_bias and attention.out_bias and attention.fused_qkv and attention.rotary_dim == 0
    assert (layer.mlp.ffn, layer.mlp.activation) == (4 * 12288, Activation.GELU_TANH)
    assert layer.norm.bias and layer.arrangement is Arrangement.PRE


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gpt-1t", 1),
        ("llama3-405b", 1),
        ("gemma2-9b", 2),
        ("gemma3-27b", 2),
        ("gpt-oss-20b", 2),
        ("deepseek-v3", 2),
        ("qwen3-235b-a22b", 1),
        ("qwen2-7b", 1),
    ],
)
def test_equal_layers_are_one_object(name: str, kinds: int) -> None:
    assert len({id(layer) for layer in preset(name).layers}) == kinds


def test_deepseek_v3() -> None:
    model = preset("deepseek-v3")
    attention, moe = model.layers[3].attention, model.layers[3].mlp
    assert isinstance(attention, LatentAttention) and isinstance(moe, Moe)
    assert [isinstance(layer.mlp, Moe) for layer in model.layers] == [False] * 3 + [True] * 58
    assert (attention.query_rank, attention.kv_rank, attention.query_dim, attention.value_dim) == (1536, 512, 192, 128)
    assert (moe.experts, moe.top_k, moe.ffn, moe.shared_ffn, moe.groups) == (256, 8, 2048, 2048, 8)
    assert not moe.router_bias


def test_names_keep_their_model_and_results_are_cached() -> None:
    assert preset("llama3-405b").name == "llama3-405b"
    assert preset("llama3-405b").layers == preset("llama3.1-405b").layers
    assert preset("gpt2") is preset("gpt2")


@pytest.mark.parametrize(
    ("asked", "close"), [("llama-3-8b", "llama3-8b"), ("Mixtral-8x7B", "mixtral-8x7b"), ("gpt3-175b", "gpt-175b")]
)
def test_an_unknown_name_names_the_closest(asked: str, close: str) -> None:
    with pytest.raises(UsageError, match=f"(?s)got the model '{asked}'.*{close}"):
        preset(asked)


def test_an_unknown_name_without_a_close_one_names_the_command_that_lists_all() -> None:
    with pytest.raises(UsageError, match="`jettison list models` has the presets"):
        preset("zzz")


@pytest.mark.parametrize(
    ("name", "billions", "without_embedding"),
    [
        ("mixtral-8x7b", 12.9, False),  # arXiv 2401.04088: 13B
        ("mixtral-8x22b", 39.2, False),  # Mistral's announcement: 39B
        ("deepseek-v2", 21.4, False),  # arXiv 2405.04434: 21B
        ("deepseek-v3", 37.6, False),  # arXiv 2412.19437: 37B
        ("qwen3-30b-a3b", 3.4, False),  # arXiv 2505.09388: 3B
        ("qwen3-235b-a22b", 22.2, False),  # the same: 22B
        ("gpt-oss-20b", 3.61, True),  # arXiv 2508.10925, Table 1, which counts the table once
        ("gpt-oss-120b", 5.13, True),
    ],
)
def test_a_token_meets_as_many_parameters_as_are_published(name: str, billions: float, without_embedding: bool) -> None:
    model = preset(name)
    table = model.vocab * model.hidden if without_embedding else 0
    places = 2 if without_embedding else 1
    assert round((active_parameter_count(model) - table) / 1e9, places) == billions


def test_every_parameter_of_a_dense_model_meets_every_token() -> None:
    assert active_parameter_count(preset("llama3-8b")) == parameter_count(preset("llama3-8b"))
