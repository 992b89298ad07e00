"""Models under FSDP2 (`torch.distributed.fsdp.fully_shard`): their unsharded parameters, and when they exist.

Outside of their forward and backward, FSDP's modules hold sharded parameters. Inside, they hold unsharded ones in the
dtype of its mixed precision policy; FSDP's hooks all-gather them, and cast the arguments. A fake copy has the unsharded
ones: it has no memory, so that nothing needs to be all-gathered, and of the hooks only the casts remain.

If a recipe needs a parameter that is sharded at that moment (a block recomputed during the backward of the block
after), FSDP is asked to all-gather it early; it is not all-gathered a second time.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.weak import WeakTensorKeyDictionary

from jettison.core.errors import TraceError
from jettison.core.objects import swapped, swapped_entries

_FORMS = ("sharded_param", "_sharded_post_forward_param", "_unsharded_param")


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that `fully_shard` was called on."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def sharded_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters under FSDP as the optimizer knows them, whatever the modules hold at this moment."""
    for module in sharded_modules(model):
        yield from (sharded.sharded_param for sharded in managed_parameters(module))


def whole_parameters(
    module: Any, fake: Callable[[Tensor, torch.device], Tensor], *, stored: bool
) -> Iterator[tuple[Tensor, nn.Parameter]]:
    """For every form in which a module of FSDP's holds a parameter, the unsharded one that its forward sees. ``fake``
    makes a tensor without memory, for a device, like the given one, which is on ``meta``; ``stored``: in its stored
    dtype, not in that of the mixed precision policy.
    """
    for sharded in managed_parameters(module):
        if hasattr(sharded._sharded_local_tensor, "fsdp_post_all_gather"):
            raise TraceError(f"{type(sharded._sharded_local_tensor).__name__} gathers in a way of its own under FSDP")
        dtype = sharded.sharded_param.dtype
        if dtype.is_floating_point and not stored:
            dtype = sharded.mp_policy.param_dtype or dtype
        whole = fake(torch.empty(sharded._orig_size, dtype=dtype, device="meta"), sharded.device)
        if (spec := _spec_inside(sharded, whole)) is not None:
            from torch.distributed.tensor import DTensor

            whole = DTensor(whole, spec, requires_grad=False)
        parameter = nn.Parameter(whole, requires_grad=sharded.sharded_param.requires_grad)
        for form in _FORMS:
            held = getattr(sharded, form, None)
            if held is not None:
                yield held, parameter


def _spec_inside(sharded: Any, whole: Tensor) -> Any:
    """Tensor-parallel spec of an unsharded parameter, in its all-gather dtype (torch 2.11: sharded dtype), or None."""
    if not hasattr(sharded, "_unsharded_dtensor_spec"):
        return getattr(sharded, "_tp_spec", None)
    spec = sharded._unsharded_dtensor_spec
    if spec is None or getattr(sharded, "is_spmd_types", False):  # torch 2.15 has plain tensors there
        return None
    meta = spec.tensor_meta
    return spec if meta is None else replace(spec, tensor_meta=meta._replace(dtype=whole.dtype))


def states(model: nn.Module) -> list[Any]:
    """FSDP's state objects of a model's modules, each once."""
    return list({id(state): state for m in sharded_modules(model) if (state := m._get_fsdp_state())}.values())


def stay_unsharded(found: Iterable[Any]) -> bytes:
    """A byte for each of FSDP's states, 1 if it is set to keep parameters unsharded until backward, as roots do."""
    return bytes(
        not state._auto_reshard_after_forward and any(g.post_forward_mesh_info is None for g in parameter_groups(state))
        for state in found
    )


def leave_casts(module: Any, fake_model: nn.Module) -> None:
    """Replace FSDP's hooks on the copy of a module by their casts of arguments and results."""
    state = module._get_fsdp_state()

    def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast_inputs(state, args, kwargs)

    def after(_module: nn.Module, _args: Any, output: Any) -> Any:
        return _cast(state._mp_policy.output_dtype, output)

    for number in _hooks(state):
        if number in fake_model._forward_pre_hooks:
            fake_model._forward_pre_hooks[number] = Unwatched(before)
        if number in fake_model._forward_hooks:
            fake_model._forward_hooks[number] = Unwatched(after)


def left_of_fsdp(fake_model: nn.Module) -> Iterator[Any]:
    """FSDP objects that a fake copy still shares with copies of its own: states, and hooks that cast."""
    contract = sys.modules.get("torch.distributed._composable.contract")
    for module in fake_model.modules():
        if contract is not None:
            yield from vars(module).get(contract.STATE_KEY, {}).values()
        for table in (module._forward_pre_hooks, module._forward_hooks):
            yield from (hook for hook in table.values() if isinstance(hook, Unwatched))


def leave_unsharded(module: Any, fake_model: nn.Module) -> None:
    """Remove FSDP's hooks from the copy of a module, and the marks that it is sharded."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    for key in (STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params"):
        vars(fake_model).pop(key, None)
    for number in _hooks(module._get_fsdp_state()):
        fake_model._forward_pre_hooks.pop(number, None)
        fake_model._forward_hooks.pop(number, None)


def precision_of(model: nn.Module) -> tuple[Any, ...]:
    """FSDP's mixed precision dtypes by module. Empty if it casts nothing, as without FSDP."""
    found = []
    for module in sharded_modules(model):
        policy = module._get_fsdp_state()._mp_policy
        if policy.param_dtype is not None or policy.output_dtype is not None:
            found.append((weakref.ref(module), policy.param_dtype, policy.output_dtype, policy.cast_forward_inputs))
    return tuple(found)


def cast_batch(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as the model's own forward gets it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(model, fsdp.FSDPModule):
        return args, kwargs
    return _cast_inputs(model._get_fsdp_state(), args, kwargs)


def _cast_inputs(state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    policy = state._mp_policy
    dtype = policy.param_dtype if policy.cast_forward_inputs else None
    return _cast(dtype, args), _cast(dtype, kwargs)


def _cast(dtype: torch.dtype | None, given: Any) -> Any:
    """Cast floating-point tensors to `dtype`, as FSDP casts arguments and results; None casts nothing."""
    if dtype is None:
        return given
    from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor
    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(functools.partial(_cast_fp_tensor, dtype), given)


def whole_now(model: nn.Module, table: dict[str, Any], leaf: str, seen: Tensor) -> Tensor:
    """The parameter at ``table[leaf]`` as a forward sees it, all-gathered if necessary. ``seen``: the table's entry
    when the forward began, which is the answer if FSDP does not manage the parameter.
    """
    if seen not in _managers:
        managed = ((module, one) for module in sharded_modules(model) for one in managed_parameters(module))
        manager = (pair for pair in managed if any(getattr(pair[1], form, None) is seen for form in _FORMS))
        _managers[seen] = tuple(map(weakref.ref, next(manager, ())))
    module, sharded = (known() for known in _managers[seen] or (lambda: None,) * 2)
    if module is None or sharded is None:
        return seen
    if table[leaf] is not getattr(sharded, "_unsharded_param", None):
        module.unshard()
    return sharded._unsharded_param


_managers: Any = WeakTensorKeyDictionary()
"""By parameter: weak references to the module that all-gathers it and to FSDP's own object for it, if any."""


def unwatched(model: nn.Module, watcher: Any) -> contextlib.AbstractContextManager[None]:
    """Hide ops of FSDP's hooks on the modules below ``model`` from ``watcher``, by setting its ``paused``."""
    return swapped_entries(
        (table, number, Unwatched(table[number], watcher))
        for module in sharded_modules(model)
        for number in _hooks(module._get_fsdp_state())
        for table in (module._forward_pre_hooks, module._forward_hooks)
        if number in table
    )


class Unwatched:
    """A module hook during which a watcher is paused; without one, every recorder that is listening."""

    of_a_region = True

    def __init__(self, hook: Callable[..., Any], watcher: Any = None) -> None:
        self.hook = hook
        self.watcher = watcher

    def __deepcopy__(self, memo: dict[int, Any]) -> Unwatched:
        """Copy without a watcher of its own, while a region runs: the watcher knows the whole plan."""
        return Unwatched(copy.deepcopy(self.hook, memo), self.watcher)

    def __call__(self, *args: Any) -> Any:
        modes = (mode for mode in _get_current_dispatch_mode_stack() if hasattr(mode, "paused"))
        watchers = [self.watcher] if self.watcher is not None else list(modes)
        with contextlib.ExitStack() as stack:
            for watcher in watchers:
                stack.enter_context(swapped(watcher, paused=True))
            return self.hook(*args)


def managed_parameters(module: Any) -> Iterator[Any]:
    """FSDP's own objects for the parameters that it manages in a module which `fully_shard` was called on."""
    for group in parameter_groups(module._get_fsdp_state()):
        yield from group.fsdp_params


def parameter_groups(state: Any) -> list[Any]:
    """FSDP's groups of parameters that are all-gathered together, of one module's state; torch 2.11 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _hooks(state: Any) -> list[int]:
    """Numbers of the module hooks that FSDP has registered."""
    handles: list[Any] = []
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        handles.extend(getattr(handle, "handles", (handle,)))
    return [handle.id for handle in handles]
