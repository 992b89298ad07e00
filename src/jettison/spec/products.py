"""Products that are done otherwise than a recipe says: layers in 16 bits, and products by name.

NOTE [ Other products ]
Megatron-Core runs the first and last layers without a recipe (``first_last_layers_bf16``,
``num_layers_at_end_in_bf16``: ``megatron/core/fp8_utils.py`` and ``fp4_utils.py``, ``get_fp4_context``), and gives
single modules one of their own by globs, of which the first that fits counts
(``megatron/core/quantization/quant_config.py``, ``RecipeConfig.match``;
``extensions/transformer_engine.py``, ``_get_fp8_autocast_for_quant_recipe``). In layers without a recipe no glob counts
(``override_nonquantized_autocast``). Names here are those of the ledger: ``attention.qkv``, ``mlp.experts.up``,
``mixer.out_proj``, whose first part may be left away.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Final

from jettison.core.errors import UsageError
from jettison.spec.fp8 import RECIPES, Fp8Recipe, Library
from jettison.spec.model import AnyLayer, Layer, ModelSpec

Rule = tuple[str, Fp8Recipe]
"""A glob, and what products that it fits are done by."""
WIDE: Final = Fp8Recipe(name="bf16", bits=16)
"""Of a product that stays in 16 bits."""
ALL: Final = "*"
_ENDS: Final = ("first", "last")
_MTP: Final = "mtp"


def rule_for(rules: tuple[Rule, ...], path: str) -> Fp8Recipe | None:
    """The recipe of the first glob that a product's path fits; None: the run's."""
    return next((recipe for glob, recipe in rules if fnmatchcase(path, glob) or fnmatchcase(path, f"*.{glob}")), None)


def with_products(model: ModelSpec, text: str, recipe: Fp8Recipe) -> ModelSpec:
    """The same with layers that know their products' recipes.

    Args:
        text: such as ``last:14=bf16,mtp=bf16,attention.*=bf16,out_proj=mxfp8``.
        recipe: the run's.

    Raises:
        UsageError: it is not of that form, names no recipe, or what it names is not there.
    """
    if recipe.library is not Library.TE:
        raise UsageError(f"got --products with --fp8-recipe {recipe.name} of {recipe.library}; give --kernels megatron")
    own = model.depth - model.further
    wide: set[int] = set()
    rules: list[Rule] = []
    for item in text.split(","):
        where, equals, name = (part.strip() for part in item.partition("="))
        if not (where and equals):
            raise UsageError(f"got --products {item!r}; expected what=how, such as last:14=bf16 or attention.*=bf16")
        found = _recipe(name, recipe)
        end, colon, count = where.partition(":")
        if end in _ENDS and colon:
            number = int(count) if count.isdecimal() else -1
            if not 0 <= number <= own or found != WIDE:
                raise UsageError(f"got --products {item!r}; expected 0 to {own} layers, in bf16")
            wide |= set(range(number)) if end == "first" else set(range(own - number, own))
        elif where == _MTP:
            if not model.further or found != WIDE:
                raise UsageError(f"got --products {item!r}; expected --mtp-num-layers with it, and bf16")
            wide |= set(range(own, model.depth))
        else:
            rules.append((where, found))
    return replace(model, layers=tuple(_with(layer, at in wide, tuple(rules)) for at, layer in enumerate(model.layers)))


def _with(layer: AnyLayer, wide: bool, rules: tuple[Rule, ...]) -> AnyLayer:
    if not isinstance(layer, Layer):
        raise UsageError("got --products and layers that were recorded; what their products are called is not known")
    return replace(layer, products=((ALL, WIDE),) if wide else rules)


def _recipe(name: str, run: Fp8Recipe) -> Fp8Recipe:
    if name == WIDE.name:
        return WIDE
    found = RECIPES.get((Library.TE, name))
    if found is None:
        known = ", ".join(n for library, n in RECIPES if library is Library.TE)
        raise UsageError(f"got --products ...={name}; expected bf16, {known}")
    return replace(found, parameters=run.parameters)
