"""Runs a program with a plan next to its twin without one, and says whether they may be told apart.

A program is built twice from one seed. Step by step both get the same seeds and the same batch; after each step losses,
gradients, parameters, buffers, Python state and random streams are compared to the bit. An error in the planned step is
a fair answer: the optimizer has not run. The user catches it, puts the model back where its twin stands, and goes on.
What is not fair is a difference in silence, a fake tensor left behind, or a plan that does nothing without saying so.
"""

from __future__ import annotations

import copy
import random
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

import jettison
from jettison.core.errors import Infeasible
from jettison.core.units import Bytes
from jettison.solve.checkpoint_policy import Full, KeepShare, Offload

LEARNING_RATE = 0.01
MOVING = {
    "offload": Offload(smallest_bytes=1),
    "full-offload": Offload(keeps=Full(), smallest_bytes=1),
    "share-offload": Offload(keeps=KeepShare(0.6), smallest_bytes=1),
}
FAKE, META = "a fake tensor", "a tensor without values"
PYTHON = "Python's "  # how names of Python state begin
Step = Callable[[nn.Module, Any, int], list[Tensor]]


def call(model: nn.Module, batch: Any) -> Any:
    """The forward, on a tuple or a dict."""
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def one_backward(model: nn.Module, batch: Any, _i: int) -> list[Tensor]:
    """What most training loops do. The output is the loss, or has it."""
    output = call(model, batch)
    loss = output if isinstance(output, Tensor) else output.loss
    loss.backward()
    return [loss]


@dataclass(kw_only=True)
class Program:
    """A model and how it is trained.

    Args:
        batch: what step ``i`` is given; it may move Python state. The plan is made with ``batch(0)``.
        step: forward and backward; returns tensors to compare.
        world: Python state outside of the model, compared and put back like the model's own.
        also: more to compare after each step, such as what stands in a cache.
        live: so many blocks have to be at work in every step, or something has to be said.
        removable: one more step is compared after the plan is taken off.
        regions: passed to the planning call where given.
        loss_fn: given to the planning call where there is one.
        recovers: after an error the Python state can be put back where it was.
    """

    model: nn.Module
    batch: Callable[[int], Any]
    step: Step = one_backward
    world: types.SimpleNamespace = field(default_factory=types.SimpleNamespace)
    also: Callable[[], Any] = tuple
    generators: tuple[torch.Generator, ...] = ()
    steps: int = 4
    live: int = 1
    removable: bool = True
    regions: list[str] | None = None
    loss_fn: Callable[[Any], Tensor] | None = None
    recovers: bool = True


@dataclass(kw_only=True)
class Verdict:
    """``equal``, ``raised`` (in a step), ``refused`` (while planning), or ``SILENT``; with what there is to say.

    ``LITTER`` where tensors and streams are right, and plain Python data (a log, a counter) is not what it would be;
    ``invalid`` where the program fails without a plan: there is nothing to compare with.
    """

    outcome: str = "equal"
    notes: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    internal: bool = False  # the error is not one of ours: fair, and not nice

    @property
    def fair(self) -> bool:
        return self.outcome not in ("SILENT", "LITTER")

    def blame(self, note: str) -> None:
        self.outcome = "SILENT"
        self.notes.append(note)

    def litter(self, note: str) -> None:
        if self.outcome in ("equal", "raised"):
            self.outcome = "LITTER"
        self.notes.append(note)


def judge(make: Callable[[], Program], policy: str | None, **options: Any) -> Verdict:
    """Run a program with and without a plan.

    Args:
        policy: a word of `jettison.apply`; "share:40" for 40 % of the saved bytes; those of
            `MOVING`, which move all that can to the host; "budget:110" for a budget 10 % above
            the smallest one; None for no plan at all.
        options: handed on to `jettison.apply` or `jettison.auto_checkpoint`.
    """
    verdict = Verdict()
    plain, planned = _built(make), _built(make)
    assert plain.model is not planned.model
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            _judge(plain, planned, policy, verdict, said, options)
        finally:
            verdict.warned = [str(w.message).splitlines()[0] for w in said]
    return verdict


def _built(make: Callable[[], Program]) -> Program:
    seed(0)
    return make()


def _judge(
    plain: Program, planned: Program, policy: str | None, verdict: Verdict, said: list[Any], options: Any
) -> None:
    handle = None
    seed(99)
    plain.batch(0)
    batch = planned.batch(0)
    if policy is not None:
        seed(99)
        before = streams(planned)
        try:
            handle = _plan(planned, batch, policy, options)
        except Exception as error:  # whatever it is, it is not silent
            verdict.outcome = "refused"
            _note_error(verdict, "planning", error)
        _compare(verdict, "planning", before, streams(planned))
        _compare(verdict, "planning", state(plain), state(planned))
        if any(p.grad is not None for p in planned.model.parameters()):
            verdict.blame("planning: left gradients")
        if handle is None:
            return
    for i in range(plain.steps + (1 if handle is not None and plain.removable else 0)):
        if i == plain.steps and handle is not None:
            handle.remove()
            handle = None
        _one(i, plain, planned, handle, verdict, said)
        if verdict.outcome in ("SILENT", "invalid") or (verdict.outcome == "raised" and not plain.recovers):
            return


def _one(i: int, plain: Program, planned: Program, handle: Any, verdict: Verdict, said: list[Any]) -> None:
    where = f"step {i}" if i < plain.steps else "after remove()"
    try:
        expected = _step(plain, i)
    except Exception as error:
        verdict.outcome = "invalid"
        _note_error(verdict, f"{where}, without a plan", error)
        return
    calls, warned = _calls(handle), len(said)
    try:
        got = _step(planned, i)
    except Exception as error:
        if verdict.outcome == "equal":
            verdict.outcome = "raised"
        _note_error(verdict, where, error)
        if i == plain.steps:
            verdict.blame(f"{where}: an unplanned step fails")
        _put_back(plain, planned)
        return
    _compare(verdict, where, expected, got)
    if handle is not None and warned == len(said):
        now = _calls(handle)
        working = sum(1 for name, n in now.items() if n != calls.get(name))
        if working < plain.live and not any(word in str(w.message) for w in said for word in ("plan", "policy")):
            verdict.blame(f"{where}: {working} of {plain.live} blocks run under the plan, and nothing was said")


def _plan(program: Program, batch: Any, policy: str, options: Any) -> Any:
    more = dict(options) if program.regions is None else {"regions": program.regions, **options}
    if program.loss_fn is not None:
        more["loss_fn"] = program.loss_fn
    word, _, percent = policy.partition(":")
    if word == "share":
        return jettison.apply(program.model, KeepShare(int(percent) / 100), batch=batch, **more)
    if policy in MOVING:
        return jettison.apply(program.model, MOVING[policy], batch=batch, **more)
    if word != "budget":
        return jettison.apply(program.model, policy, batch=batch, **more)
    try:
        return jettison.auto_checkpoint(program.model, batch, Bytes(1), **more)
    except Infeasible as found:
        return jettison.auto_checkpoint(
            program.model, batch, Bytes(found.minimum_budget_bytes * int(percent) // 100), **more
        )


def _calls(handle: Any) -> dict[str, tuple[int, int]]:
    """By block: a call adds to one of the two, or starts the count again."""
    return {} if handle is None else {r.name: (r.calls, r.recordings) for r in handle.report() if r.name}


def _step(program: Program, i: int) -> dict[str, Any]:
    """One step of training; everything that it may be known by."""
    seed(i)
    batch = program.batch(i)
    program.model.zero_grad(set_to_none=True)
    results = program.step(program.model, batch, i)
    found: dict[str, Any] = {f"result {n}": bits(t) for n, t in enumerate(results)}
    for name, parameter in program.model.named_parameters():
        found[f"gradient of {name}"] = bits(parameter.grad)
    for n, leaf in enumerate(tree_leaves(batch)):
        if isinstance(leaf, Tensor) and leaf.is_leaf:
            found[f"gradient of argument {n}"] = bits(leaf.grad)
    with torch.no_grad():
        for parameter in program.model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
    return found | state(program) | streams(program)


# what is compared ----------------------------------------------------------------------------------------------------


def seed(n: int) -> None:
    """All default streams."""
    torch.default_generator.manual_seed(n)  # manual_seed writes its whole stack down for devices that are not there
    random.seed(n)
    np.random.seed(n)


def streams(program: Program) -> dict[str, Any]:
    """Where every random stream stands."""
    own = {f"generator {n}": bits(g.get_state()) for n, g in enumerate(program.generators)}
    numpy = np.random.get_state(legacy=False)
    return {
        "torch's stream": bits(torch.get_rng_state()),
        "random's stream": random.getstate(),
        "numpy's stream": (numpy["state"]["key"].tobytes(), numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]),
        **own,
    }


def state(program: Program) -> dict[str, Any]:
    """Parameters, buffers, and the Python state that can be compared: of modules, and of the world around them."""
    found: dict[str, Any] = {}
    for name, tensor in (*program.model.named_parameters(), *program.model.named_buffers()):
        found[name] = bits(tensor)
    for path, module in program.model.named_modules():
        for key, value in _own(module):
            found[f"{PYTHON}{path}.{key}"] = plainly(value)
    for key, value in vars(program.world).items():
        found[f"{PYTHON}world.{key}"] = plainly(value)
    for n, leaf in enumerate(tree_leaves(program.also())):
        found[f"{PYTHON}also {n}"] = plainly(leaf)
    return found


def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of a module that are neither torch's nor a plan's."""
    for key, value in vars(module).items():
        if key not in _TORCHS and key != "forward" and not key.startswith(_MARKS):
            yield key, value


_TORCHS = frozenset(vars(nn.Module()))
_MARKS = ("_jettison", "_torchdynamo", "_orig_mod")


def plainly(value: Any, depth: int = 4) -> Any:
    """A value that compares by content; objects that have none are known by their type."""
    if isinstance(value, Tensor):
        return bits(value)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, bool | int | float | complex | str | bytes | type(None) | np.generic):
        return repr(value)
    if depth and isinstance(value, list | tuple | set | frozenset):
        return (type(value).__name__, [plainly(v, depth - 1) for v in value])
    if depth and isinstance(value, dict):
        return ("dict", [(repr(k), plainly(v, depth - 1)) for k, v in value.items()])
    if depth and (is_dataclass(value) or isinstance(value, types.SimpleNamespace)):
        return (type(value).__name__, [(k, plainly(v, depth - 1)) for k, v in vars(value).items()])
    return type(value).__name__


def bits(tensor: Tensor | None) -> Any:
    """The very bits of a tensor; a fake one has none."""
    if tensor is None:
        return None
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        return "not there yet"
    if isinstance(tensor, FakeTensor) or type(tensor).__name__ == "FunctionalTensor":
        return FAKE
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    plain = dense.resolve_conj().resolve_neg().contiguous()
    if plain.device.type == "meta":
        return META
    flat = plain.reshape(-1)
    raw = (torch.view_as_real(flat) if flat.is_complex() else flat).contiguous().view(torch.uint8)
    return (str(tensor.dtype), tuple(tensor.shape), raw.numpy().tobytes())


def _compare(verdict: Verdict, where: str, expected: dict[str, Any], got: dict[str, Any]) -> None:
    for name in (*expected, *(n for n in got if n not in expected)):
        a, b = expected.get(name), got.get(name)
        if a == b:
            continue
        empty = next((text for text in (FAKE, META) if text in repr(b)), None)
        if empty is not None:
            verdict.blame(f"{where}: {name} is or holds {empty}")
        elif name.startswith(PYTHON):
            verdict.litter(f"{where}: {name} differs{_how(a, b)}")
        else:
            verdict.blame(f"{where}: {name} differs{_how(a, b)}")


def _how(a: Any, b: Any) -> str:
    if not (isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) == 3 and a[:2] == b[:2]):
        return f" ({_short(a)} expected, {_short(b)} got)"
    if a[0] != "torch.float32":
        return ""
    x, y = (np.frombuffer(raw, np.float32).astype(np.float64) for raw in (a[2], b[2]))
    return f" by {np.linalg.norm(x - y) / max(float(np.linalg.norm(x)), 1e-30):.3g}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def _note_error(verdict: Verdict, where: str, error: Exception) -> None:
    verdict.internal |= not isinstance(error, jettison.core.errors.JettisonError)
    lines = str(error).splitlines() or [""]
    verdict.notes.append(f"{where}: {type(error).__name__}: {lines[0]}")


# going on after an error ----------------------------------------------------------------------------------------------


def _put_back(plain: Program, planned: Program) -> None:
    """The planned program stands where its twin stands, as far as a careful user can put it there."""
    planned.model.zero_grad(set_to_none=True)
    twin = dict((*plain.model.named_parameters(), *plain.model.named_buffers()))
    with torch.no_grad():
        for name, tensor in (*planned.model.named_parameters(), *planned.model.named_buffers()):
            if not tensor.is_inference():
                tensor.copy_(twin[name])
    modules = dict(plain.model.named_modules())
    for path, module in planned.model.named_modules():
        _take_over(dict(_own(modules[path])), vars(module))
    _take_over(vars(plain.world), vars(planned.world))
    for ours, theirs in zip(planned.generators, plain.generators, strict=True):
        ours.set_state(theirs.get_state())


def _take_over(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    for key, value in theirs.items():
        if type(value) is list and type(ours.get(key)) is list and _is_data(value):
            ours[key][:] = _copied(value)  # somebody else may know it as well
        elif type(value) is dict and type(ours.get(key)) is dict and _is_data(value):
            ours[key].clear()
            ours[key].update(_copied(value))
        elif _is_data(value):
            ours[key] = _copied(value)
    for key in [k for k, v in ours.items() if k not in theirs and _is_data(v)]:
        if key not in _TORCHS and key != "forward" and not key.startswith(_MARKS):
            del ours[key]


def _is_data(value: Any) -> bool:
    leaves = tree_leaves(value)
    return all(isinstance(v, _DATA) for v in leaves)


_DATA = (bool, int, float, complex, str, type(None), Tensor, np.generic, random.Random, np.random.Generator)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(v) for v in value)
    return copy.deepcopy(value)
