"""From what was typed to a precision: a word for dtypes, and a recipe for narrow products beside it."""

from __future__ import annotations

from typing import Protocol

from jettison.core.errors import UsageError
from jettison.predict.request_words import given_or
from jettison.spec.fp8 import fp8_recipe
from jettison.spec.kernels import Kernels
from jettison.spec.model import ModelSpec
from jettison.spec.model_variants import with_products
from jettison.spec.precision import Precision, precision


class Asked(Protocol):
    """What a request says of it."""

    @property
    def precision(self) -> str | None: ...
    @property
    def fp8_recipe(self) -> str | None: ...
    @property
    def fp8_param_gather(self) -> bool | None: ...
    @property
    def products(self) -> str | None: ...


def precision_of(request: Asked, kernels: Kernels, *, tuned: bool) -> Precision:
    """Dtypes, and how products are quantised.

    Raises:
        UsageError: no such precision or recipe, or half of a request.
    """
    found = precision(given_or(request.precision, "bf16-autocast" if tuned else "bf16"))
    if request.fp8_recipe is None:
        if request.fp8_param_gather:
            raise UsageError("got --fp8-param-gather without a recipe; give --fp8-recipe as well, such as mxfp8")
        return found
    gathers = given_or(request.fp8_param_gather, False)
    return found.with_recipe(fp8_recipe(request.fp8_recipe, kernels.name, parameters=gathers))


def with_own_products(model: ModelSpec, request: Asked, kernels: Kernels) -> ModelSpec:
    """The model, its layers told which of their products the recipe has not.

    Raises:
        UsageError: there is no recipe, or what is asked for is not of that form.
    """
    if request.products is None:
        return model
    if request.fp8_recipe is None:
        raise UsageError(f"got --products {request.products!r} without a recipe; give --fp8-recipe as well")
    gathers = given_or(request.fp8_param_gather, False)
    return with_products(model, request.products, fp8_recipe(request.fp8_recipe, kernels.name, parameters=gathers))
