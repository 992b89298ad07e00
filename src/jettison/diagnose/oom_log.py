"""The first request that failed, read out of any log; see `oom_forms` for the messages and `log_text` for the rest.

What a message leaves out, the log may say: the traceback has the phase, the line and the trainer, and loops that print
what is allocated step by step show whether it grows. `max` and `reserved` figures are left alone: they never fall.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jettison.diagnose.facts import Failure, MemoryFacts, Phase, StepBytes, phase_named
from jettison.diagnose.log_text import decoded, joined, lines_before
from jettison.diagnose.logits import speaks_of_logits
from jettison.diagnose.oom_forms import count_messages, first_form, more_figures, size_of
from jettison.diagnose.trainers import in_server, trainer_of
from jettison.errors import UsageError
from jettison.traces.frames import Frame, is_torch, place_of, role_of

MOST_READ_BYTES: Final = 256 << 20
RESTARTS_FROM: Final = 3
"""Steps: a number that falls by less is another rank's line."""
_WRITTEN: Final = {unit.lower(): unit for unit in ("KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")}
_STEP: Final = re.compile(r"\b(?:step|iter|iteration)\b[\s:=/#\['\"]*([\d,]+)", re.IGNORECASE)
_ALLOCATED: Final = re.compile(r"(?<!max )(?<!max_)(?<!peak )\ballocated\b[^\d\n|]{0,12}([\d.,]+) ?([KMGT]i?B)\b")
_UNIT_FIRST: Final = re.compile(
    r"(?<!max )(?<!max_)(?<!peak )(?<!peak_)allocated[ _]?\(?(GiB|GB|MiB|MB)\)?[\"']?\s*[:=]\s*([\d.]+)", re.IGNORECASE
)
_MEGATRON: Final = re.compile(r"memory \((MB|GB)\) \| allocated: ([\d.]+)")
_BEGINS: Final = re.compile(r"Traceback (?:of TorchScript )?\(most recent call last\)")
_FRAMES: Final = (  # Python's, rich's and IPython's, a notebook's cell, older IPython's
    re.compile(r'\bFile "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<function>[\w.<>]+)'),
    re.compile(
        r"(?:File )?(?P<file>[^\s:]+\.py|[A-Za-z]:\\\S+?\.py):(?P<line>\d+),? in(?: (?P<function>[\w.<>]+)|\s*$)"
    ),
    re.compile(r"(?P<file>Cell In ?\[\d+\]), line (?P<line>\d+)(?:, in (?P<function>[\w.<>]+))?"),
    re.compile(r"^(?P<file>\S+\.py|<ipython-input-\S+>) in (?P<function>[\w.<>]+)"),
)
_EVALUATES: Final = re.compile(
    r"^(?:generate|_sample|_greedy_search|_beam_search|evaluate|evaluation_loop|prediction_step|predict_step|validation_step"
    r"|test_step|prediction_loop|_generate_and_score_completions|run_validation)$"
)
_SAVES: Final = re.compile(r"^(?:_?save(?:_\w+)?|(?:_?get_\w*)?state_dict|_\w*state_dict_hook)$")
_TORCHS_OWN: Final = re.compile(r"torch/(?:optim/(?!optimizer\.py|lr_scheduler\.py)|nn/utils/clip_grad)")
"""Files of torch's optimizers; those of other packages are called by a wrapper of torch's."""
_SERVER: Final = re.compile(r"\b(?:vllm|sglang)\b", re.IGNORECASE)
_SHARDS: Final = re.compile(r"Loading (?:safetensors )?(?:checkpoint )?shards:[^\n]*?\|\s*(\d+)/(\d+)")


def read_oom_log(path: Path) -> MemoryFacts:
    """Read the facts about the first request that failed from a log.

    Raises:
        UsageError: there is no such file, or nothing in it ran out of memory.
    """
    try:
        if path.stat().st_size > MOST_READ_BYTES:
            raise UsageError(f"{path} has {path.stat().st_size} bytes; cut out what stands around 'out of memory'")
        text = decoded(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; give a file that exists") from error
    return facts_of_log(text, path.name)


def facts_of_log(text: str, name: str) -> MemoryFacts:
    """Facts of the first message of a text.

    Raises:
        UsageError: nothing in it ran out of memory.
    """
    first = first_form(text)
    if first is None:
        raise UsageError(
            f"{name} says nowhere that memory ran out; expected a log with PyTorch's 'out of memory' message, a "
            "snapshot of torch.cuda.memory._dump_snapshot, or what jettison.watch() wrote"
        )
    form, found = first
    spaced, tight = (form.read(one, found) for one in joined(text, found.start(), form.window))
    figures = tight if more_figures(tight, spaced) else spaced
    trace = _traceback(lines_before(text, found.start()))
    notes = list(figures.pop("notes", ()))
    times = count_messages(text)
    if times > 1:
        notes.append(f"memory ran out {times} times in this log: this is the first")
    notes += _loaded(text, found.start()) if trace.phase is Phase.PARAMETERS else []
    return MemoryFacts(
        source=name,
        failed=True,
        phase=trace.phase,
        site=trace.place,
        logits=trace.logits,
        trainer=trace.trainer,
        evaluating=trace.evaluating,
        own_optimizer=trace.own_optimizer,
        colocated=trace.evaluating or _SERVER.search(text) is not None,
        steps=_steps(text[: found.start()]),
        notes=tuple(notes),
        **_pinned({"expandable": _expandable(text)} | figures, trace),
    )


def _expandable(text: str) -> bool | None:
    """Whether expandable segments are switched on; what a message suggests is no setting."""
    if "expandable_segments" not in text:
        return None
    settings = re.sub(r"(?:If reserved but|try setting)[^\n]*", "", text)
    return True if re.search(r"expandable_segments['\"]?\s*[:=]\s*true", settings, re.IGNORECASE) else None


def _loaded(text: str, at: int) -> list[str]:
    """Note how many shards of a model were loaded, from its progress bar before or after the traceback."""
    bars = _SHARDS.findall(text[max(0, at - 20_000) : at + 20_000])
    return [f"{bars[-1][0]} of {bars[-1][1]} shards of the checkpoint were loaded"] if bars else []


@dataclass(frozen=True, kw_only=True)
class _Trace:
    """Facts of one traceback."""

    phase: Phase = Phase.UNKNOWN
    place: str = ""
    trainer: str = ""
    logits: bool = False
    evaluating: bool = False
    own_optimizer: bool = False
    pinned: bool = False


def _traceback(lines: list[str]) -> _Trace:
    """The traceback that ends right before a message; its beginning may be cut off."""
    begin = max((at for at, line in enumerate(lines) if _BEGINS.search(line)), default=0)
    numbered = [(at, frame) for at, line in enumerate(lines) if at >= begin and (frame := _frame(line)) is not None]
    frames = [frame for _, frame in reversed(numbered)]
    if not frames:
        return _Trace()
    last = max((at for at, (_, file, _) in numbered if not is_torch(file.replace("\\", "/"))), default=numbered[-1][0])
    near = lines[last:]  # from the innermost frame outside of torch
    files = ["/" + file.replace("\\", "/") for _, file, _ in frames]
    functions = [function.rsplit(".", 1)[-1] for function, _, _ in frames]
    phase = phase_named(role_of(frames))
    if phase is Phase.UNKNOWN and any(_SAVES.match(function) for function in functions):
        phase = Phase.SAVING
    elif phase is Phase.UNKNOWN and any(file.endswith("torch/nn/utils/clip_grad.py") for file in files):
        phase = Phase.OPTIMIZER  # activations are freed by then
    return _Trace(
        phase=phase,
        place=place_of(frames),
        trainer=trainer_of(files),
        logits=speaks_of_logits(*near),
        evaluating=(any(_EVALUATES.match(function) for function in functions) or in_server(files))
        and "backward" not in functions,
        own_optimizer=phase is Phase.OPTIMIZER and not any(_TORCHS_OWN.search(file) for file in files),
        pinned=any("pin_memory" in text for text in (*functions[:3], *files[:3], *near)),
    )


def _frame(line: str) -> Frame | None:
    for pattern in _FRAMES:
        found = pattern.search(line)
        if found is not None:
            parts = found.groupdict()
            file = parts["file"] if not parts["file"].startswith("Cell In") else f"<{parts['file']}>"
            return parts["function"] or "<module>", file, int(parts.get("line") or 0)
    return None


def _pinned(figures: dict[str, Any], trace: _Trace) -> dict[str, Any]:
    """A driver's error where memory of the host was to be pinned is the host's."""
    if figures.get("failure") is not Failure.LIBRARY or figures.get("what") != "the driver" or not trace.pinned:
        return figures
    return figures | {"failure": Failure.HOST, "device": "cpu", "what": "pinned memory"}


def _steps(before: str) -> tuple[StepBytes, ...]:
    """Read steps and allocated bytes that a loop printed in one line each; counts that restart are continued."""
    found: dict[tuple[int, int], int] = {}
    epoch, last = 0, -1
    first: int | None = None
    for line in before.splitlines():
        if "llocated" not in line and "LLOCATED" not in line:
            continue
        step, nbytes = _STEP.search(line), _allocated(line)
        if step is None or nbytes is None:
            continue
        number = int(step[1].replace(",", ""))
        first = number if first is None else min(first, number)
        if number == first and last >= first + RESTARTS_FROM:
            epoch += 1
        last = number
        found.setdefault((epoch, number), nbytes)
    in_order = sorted(found.items())
    if epoch:
        return tuple(StepBytes(step=at, between_bytes=nbytes) for at, (_, nbytes) in enumerate(in_order))
    return tuple(StepBytes(step=number, between_bytes=nbytes) for (_, number), nbytes in in_order)


def _allocated(line: str) -> int | None:
    for pattern, number, unit in ((_MEGATRON, 2, 1), (_ALLOCATED, 1, 2), (_UNIT_FIRST, 2, 1)):
        found = pattern.search(line)
        if found is not None:
            return size_of(found[number], _WRITTEN.get(found[unit].lower(), found[unit]))
    return None
