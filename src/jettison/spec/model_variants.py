"""Variants of a model: other first layers, layers for multi-token prediction (MTP), and recipes of single GEMMs.

NOTE [ Recipes of single GEMMs ]
Megatron-Core runs the first and last layers without a recipe (``first_last_layers_bf16``,
``num_layers_at_end_in_bf16``: ``megatron/core/fp8_utils.py`` and ``fp4_utils.py``, ``get_fp4_context``), and sets
recipes of single modules by globs, of which the first match counts
(``megatron/core/quantization/quant_config.py``, ``RecipeConfig.match``;
``extensions/transformer_engine.py``, ``_get_fp8_autocast_for_quant_recipe``), except in layers without a recipe
(``override_nonquantized_autocast``). Names are the ledger's: ``attention.qkv``, ``mlp.experts.up``,
``mixer.out_proj``, with or without their first part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.spec.fp8 import BF16_GEMMS, RECIPES, Fp8Recipe, Library, Rule
from jettison.spec.kernels import Kernels, Loss, sets_with
from jettison.spec.model import AnyLayer, Arrangement, Attention, Layer, ModelSpec

ALL: Final = "*"
_ENDS: Final = ("first", "last")
_MTP: Final = "mtp"
MTP_LEFT_OUT: Final = "for multi-token prediction (MTP) left out"
_WITHOUT_LOGITS: Final = (Loss.FUSED, Loss.CHUNKED, Loss.CHUNKED_OUTPUT)


def with_starts(model: ModelSpec, **changes: Any) -> ModelSpec:
    """Return a model with changes to the first layer of each stack; none is a recorded one."""
    found: list[AnyLayer] = []
    before: bool | None = None
    for layer in model.layers:
        assert isinstance(layer, Layer)
        found.append(layer if layer.source is before else replace(layer, **changes))
        before = layer.source
    return replace(model, layers=tuple(found))


def with_mtp(model: ModelSpec, depths: int, kernels: Kernels, *, repeated: bool) -> ModelSpec:
    """Add MTP layers, each like the model's last layer (``get_gpt_mtp_block_spec``). In models whose layers are one
    block each, an MTP layer has attention and experts (``mtp_hybrid_override_pattern`` of Nemotron 3: ``*E``). Raise
    `UsageError` if no framework builds them for this model.

    Args:
        depths: number of MTP layers.
        repeated: all depths share one layer's weights (``mtp_use_repeated_layer``: in
            megatron/core/transformer/multi_token_prediction.py one layer is built, and called for each).
    """
    if depths < 0:
        raise UsageError(f"got --mtp-num-layers {depths}; expected a whole number of 0 or more")
    if not depths:
        return model
    last = _pattern(model) or model.layers[-1]
    why = ""
    if not kernels.builds_mtp:
        why = f"with --kernels {kernels.name}, whose code does not build them: give --kernels {sets_with('builds_mtp')}"
    elif kernels.loss in _WITHOUT_LOGITS:
        why = f"with --loss {kernels.loss}, which these kernels do not have; give vocab-parallel, native or te"
    elif not isinstance(last, Layer) or last.arrangement is not Arrangement.PRE or model.final_norm is None:
        why = f"and {model.name}, whose layers are not pre-norm with a final norm"
    elif not _pattern(model) and any(one.lone or one.scan is not None for one in model.described):
        why = f"and {model.name}, whose layers are not all attention and an MLP"
    elif model.learned_positions:
        why = f"and {model.name}, which has learned positions"
    if why:
        raise UsageError(f"got --mtp-num-layers {depths} {why}")
    assert isinstance(last, Layer)
    extra = tuple(replace(last, ahead=ahead, repeats=repeated and ahead > 1) for ahead in range(1, depths + 1))
    stays = tuple(remark for remark in model.left_out if MTP_LEFT_OUT not in remark)
    return replace(model, layers=(*model.layers, *extra), left_out=stays)


def _pattern(model: ModelSpec) -> Layer | None:
    """Combine attention and experts of a model whose layers are one block each; None for other models."""
    if not all(layer.lone for layer in model.described):
        return None
    attention = [layer.attention for layer in model.described if isinstance(layer.attention, Attention)]
    experts = [layer for layer in model.described if layer.experts is not None]
    return replace(experts[-1], attention=attention[-1]) if attention and experts else None


def with_quant_recipe(model: ModelSpec, text: str, recipe: Fp8Recipe) -> ModelSpec:
    """Set recipes of single GEMMs in a model's layers. Raise `UsageError` for another format, an unknown recipe, or
    layers that the model does not have.

    Args:
        text: such as ``last:14=bf16,mtp=bf16,attention.*=bf16,out_proj=mxfp8``.
        recipe: the run's recipe.
    """
    if recipe.library is not Library.TE:
        instead = f"give --kernels {sets_with('te_gemms')}"
        raise UsageError(f"got --quant-recipe with {recipe.library}'s recipe {recipe.name}; {instead}")
    own = model.depth - model.mtp_num_layers
    wide: set[int] = set()
    rules: list[Rule] = []
    for item in text.split(","):
        where, equals, name = (part.strip() for part in item.partition("="))
        if not (where and equals):
            raise UsageError(f"got --quant-recipe {item!r}; expected what=how, as last:14=bf16 or attention.*=bf16")
        found = _recipe(name, recipe)
        end, colon, count = where.partition(":")
        if end in _ENDS and colon:
            number = int(count) if count.isdecimal() else -1
            if not 0 <= number <= own or found != BF16_GEMMS:
                raise UsageError(f"got --quant-recipe {item!r}; expected 0 to {own} layers, in bf16")
            wide |= set(range(number)) if end == "first" else set(range(own - number, own))
        elif where == _MTP:
            if not model.mtp_num_layers or found != BF16_GEMMS:
                raise UsageError(f"got --quant-recipe {item!r}; expected --mtp-num-layers with it, and bf16")
            wide |= set(range(own, model.depth))
        else:
            rules.append((where, found))
    return replace(model, layers=tuple(_with(layer, at in wide, tuple(rules)) for at, layer in enumerate(model.layers)))


def _with(layer: AnyLayer, wide: bool, rules: tuple[Rule, ...]) -> AnyLayer:
    if not isinstance(layer, Layer):
        raise UsageError("got --quant-recipe and recorded layers, whose GEMMs have no names")
    return replace(layer, gemm_recipes=((ALL, BF16_GEMMS),) if wide else rules)


def _recipe(name: str, run: Fp8Recipe) -> Fp8Recipe:
    if name == BF16_GEMMS.name:
        return BF16_GEMMS
    found = RECIPES.get((Library.TE, name))
    if found is None:
        known = ", ".join(n for library, n in RECIPES if library is Library.TE)
        raise UsageError(f"got --quant-recipe ...={name}; expected bf16, {known}")
    return replace(found, parameters=run.parameters)
