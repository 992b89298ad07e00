"""Logs in which memory ran out: the first message, whatever its form (`log_forms.toml`), and what stands around it.

What a message leaves out, the log may say: the traceback has the phase, the line and the trainer, and loops that print
what is allocated step by step show whether it grows. `max` and `reserved` figures are left alone: they never fall.
Records of `jettison.watch` have the bytes between steps, the batches, and the error, if any.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import UsageError, first_problem
from jettison.core.files import read_bytes
from jettison.diagnose.advice import in_server, names_server, trainer_of
from jettison.diagnose.finding import table
from jettison.diagnose.frames import Frame, is_torch, pattern_of, place_of, role_of, speaks_of_logits
from jettison.diagnose.memory_facts import Failure, MemoryFacts, StepBytes, StepPhase, Survivor, phase_named
from jettison.diagnose.snapshot import facts_of_snapshot, read_snapshot

Figures = dict[str, Any]
"""Fields of `MemoryFacts`, by name."""

MOST_READ_BYTES: Final = 256 << 20
RESTARTS_FROM: Final = 3
"""Steps: a number that falls by less is another rank's line."""
_STEP: Final = re.compile(r"\b(?:step|iter|iteration)\b[\s:=/#\['\"]*([\d,]+)", re.IGNORECASE)
_WRITTEN: Final = {unit.lower(): unit for unit in ("KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")}
_BEGINS: Final = re.compile(r"Traceback (?:of TorchScript )?\(most recent call last\)")
_TORCHS_OWN: Final = re.compile(r"torch/(?:optim/(?!optimizer\.py|lr_scheduler\.py)|nn/utils/clip_grad)")
"""Files of torch's optimizers; those of other packages are called by a wrapper of torch's."""
_SHARDS: Final = re.compile(r"Loading (?:safetensors )?(?:checkpoint )?shards:[^\n]*?\|\s*(\d+)/(\d+)")


def read_oom_log(path: Path) -> MemoryFacts:
    """Read facts about the first request that failed. `UsageError` if there is no such file, or none failed."""
    return facts_of_log(decoded(read_bytes(path, most=MOST_READ_BYTES)), path.name)


def facts_of_log(text: str, name: str) -> MemoryFacts:
    """Facts of the first message of a text. Raise `UsageError` if nothing in it ran out of memory."""
    matches = [(form, match) for form in forms() if (match := form.search(text))]
    if not matches:
        raise UsageError(
            f"{name} says nowhere that memory ran out; expected a log with PyTorch's 'out of memory' message, a "
            "snapshot of torch.cuda.memory._dump_snapshot, or what jettison.watch() wrote"
        )
    form, found = min(matches, key=lambda one: (one[0].fallback, one[1].start()))
    at = found.start()
    read = [form.read(one, found) for one in joined(text, at, form.window)]
    figures = max(read, key=lambda one: sum(value is not None for value in one.values()))
    before = text[max(0, at - 400 * MOST_LINES) : at].split("\n")[-MOST_LINES:]
    trace, pins = _traceback(lines_of_rank(text, at, before))
    if pins and figures.get("failure") is Failure.LIBRARY and figures.get("what") == "the driver":
        figures |= {"failure": Failure.HOST, "device": "cpu", "what": "pinned memory"}
    figures.setdefault("expandable", _expandable(text))
    notes = list(figures.pop("notes", ()))
    counted = [(form, one.start()) for form in forms() if form.counted and (one := form.search(text)) is not None]
    times = sum(len(form.begins.findall(text, begin)) for form, begin in counted)
    if times > 1:
        device = re.search(r"\bGPU (\d+)\b", joined(text, at, 200)[0])
        where = f", on GPU {device[1]}" if device else ""
        notes.append(f"memory ran out {times} times in this log: this is the first{where}")
    if trace.get("phase") is StepPhase.PARAMETERS:  # a model's progress bar, before or after the traceback
        bars = _SHARDS.findall(text[max(0, at - 20_000) : at + 20_000])
        notes += [f"{bars[-1][0]} of {bars[-1][1]} shards of the checkpoint were loaded"] if bars else []
    return MemoryFacts(
        source=name,
        failed=True,
        colocated=trace.get("evaluating", False) or names_server(text),
        steps=_steps(text[:at]),
        notes=tuple(notes),
        **trace,
        **figures,
    )


def _expandable(text: str) -> bool | None:
    """Whether expandable segments are switched on; what a message suggests is no setting."""
    if "expandable_segments" not in text:
        return None
    settings = re.sub(r"(?:If reserved but|try setting)[^\n]*", "", text)
    return True if re.search(r"expandable_segments['\"]?\s*[:=]\s*true", settings, re.IGNORECASE) else None


def _traceback(lines: list[str]) -> tuple[Figures, bool]:
    """Facts of the traceback that ends right before a message; and whether memory of the host was to be pinned.

    Its beginning may be cut off.
    """
    begin = max((at for at, line in enumerate(lines) if _BEGINS.search(line)), default=0)
    numbered = [(at, frame) for at, line in enumerate(lines) if at >= begin and (frame := _frame(line)) is not None]
    frames = [frame for _, frame in reversed(numbered)]
    if not frames:
        return {}, False
    last = max((at for at, (_, file, _) in numbered if not is_torch(file.replace("\\", "/"))), default=numbered[-1][0])
    near = lines[last:]  # from the innermost frame outside of torch
    files = ["/" + file.replace("\\", "/") for _, file, _ in frames]
    functions = [function.rsplit(".", 1)[-1] for function, _, _ in frames]
    phase = phase_named(role_of(frames))
    if phase is StepPhase.UNKNOWN and any(pattern_of("saves").fullmatch(function) for function in functions):
        phase = StepPhase.SAVING
    elif phase is StepPhase.UNKNOWN and any(file.endswith("torch/nn/utils/clip_grad.py") for file in files):
        phase = StepPhase.OPTIMIZER  # activations are freed by then
    evaluates = any(pattern_of("evaluates").fullmatch(function) for function in functions) or in_server(files)
    found = {
        "phase": phase,
        "site": place_of(frames),
        "trainer": trainer_of(files),
        "logits": speaks_of_logits(*near),
        "fused_attention": any(pattern_of("fused_attention").search(file) for file in files),
        "evaluating": evaluates and "backward" not in functions,
        "own_optimizer": phase is StepPhase.OPTIMIZER and not any(_TORCHS_OWN.search(file) for file in files),
    }
    return found, any("pin_memory" in text for text in (*functions[:3], *files[:3], *near))


def _frame(line: str) -> Frame | None:
    for pattern in _patterns("frames"):
        found = pattern.search(line)
        if found is not None:
            parts = found.groupdict()
            file = parts["file"] if not parts["file"].startswith("Cell In") else f"<{parts['file']}>"
            return parts["function"] or "<module>", file, int(parts.get("line") or 0)
    return None


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
        epoch += number == first and last >= first + RESTARTS_FROM
        last = number
        found.setdefault((epoch, number), nbytes)
    in_order = enumerate(sorted(found.items()))
    return tuple(StepBytes(step=at if epoch else step, between_bytes=n) for at, ((_, step), n) in in_order)


def _allocated(line: str) -> int | None:
    found = next(filter(None, (pattern.search(line) for pattern in _patterns("allocated"))), None)
    return None if found is None else size_of(found["number"], _WRITTEN.get(found["unit"].lower(), found["unit"]))


# messages -------------------------------------------------------------------------------------------------------------

EXBI: Final = 1 << 60
"""Bytes: PyTorch refuses requests above without looking; such a figure of a process or of a limit means "not known"."""
_SIZE: Final = r"([\d.,]+) ?(bytes|[KMGTPE]i?B|B)\b"
_SCALE: Final = {"bytes": 1, "B": 1, "": 1} | {
    f"{prefix}{unit}": base**n
    for n, prefix in enumerate("KMGTPE", 1)
    for unit, base in (("B", 1000), ("iB", 1024), ("", 1024))  # XLA writes G for GiB
}
_W: Final = r"(?:\s|[│┃|])+"
WINDOW: Final = 3000
"""Characters of a message."""
_NO_FIGURES: Final = "the message has no figures"


@dataclass(frozen=True, kw_only=True)
class MessageForm:
    """One form of a message: a row of `log_forms.toml`, with defaults of what it leaves out.

    Args:
        reader: of `_READERS`; without one the row itself says what failed.
        device: its type; \\1 is the first group of ``begins``.
        figures: by name, patterns of a number and its unit; the first that matches counts.
        binary: it writes GB for GiB, as PyTorch's allocator for Apple's devices does.
        window: characters of the text, from the beginning of the message on, that are read.
        counted: each request that fails writes one.
        fallback: it counts only where no other message stands.
    """

    words: tuple[str, ...]
    begins: re.Pattern[str]
    reader: str = "named"
    failure: str = ""
    device: str = ""
    what: str = ""
    figures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    binary: bool = False
    notes: tuple[str, ...] = ()
    window: int = WINDOW
    counted: bool = False
    fallback: bool = False

    def search(self, text: str) -> re.Match[str] | None:
        """Find the first message of this form."""
        found = [at for word in self.words if (at := text.find(word)) >= 0]
        return self.begins.search(text, max(0, min(found) - WINDOW)) if found else None

    def read(self, text: str, found: re.Match[str]) -> Figures:
        """Read a message, from its beginning on."""
        return _READERS[self.reader](self, text, found)

    def sizes(self, text: str) -> defaultdict[str, int | None]:
        """Read its figures, in bytes; None where one is not there."""
        read: defaultdict[str, int | None] = defaultdict(lambda: None)
        for name, patterns in self.figures.items():
            matches = (re.search(_filled(pattern), text) for pattern in patterns)
            sizes = (size_of(match[1], match[2], binary=self.binary) for match in matches if match)
            read[name] = next((size for size in sizes if size is not None), None)
        return read


@cache
def forms() -> tuple[MessageForm, ...]:
    """Return all forms, in the order in which they count."""
    data, found = table("log_forms"), []
    for row in data["form"]:
        begins = re.compile(_filled("|".join(row["begins"])), re.MULTILINE)
        figures = row.get("figures", {})
        figures = data["figures"][figures] if isinstance(figures, str) else figures
        found.append(MessageForm(**row | {"begins": begins, "figures": figures}))
    return tuple(found)


def _filled(pattern: str) -> str:
    return pattern.replace("{SIZE}", _SIZE).replace("{W}", _W)


def size_of(number: str, unit: str, *, binary: bool = False) -> int | None:
    """Return the bytes of a figure; None where it is no number.

    Args:
        binary: the source writes GB for GiB, as PyTorch's allocator for Apple's devices does.
    """
    scale = _SCALE[f"{unit[0]}iB" if binary and unit[:1] in tuple("KMGTPE") else unit]
    try:
        return round(float(number.replace(",", "").rstrip(".")) * scale)
    except ValueError:
        return None


def _known(nbytes: int | None) -> int | None:
    """Drop the largest figure that there is: the driver does not say, or there is no limit."""
    return None if nbytes is None or nbytes >= EXBI else nbytes


# allocators -----------------------------------------------------------------------------------------------------------


def _allocator(form: MessageForm, text: str, found: re.Match[str]) -> Figures:
    """PyTorch's allocators, which say who holds the device; without a request's size they say nothing else."""
    sizes, device = form.sizes(text), found.expand(form.device).lower() or "cuda"
    if sizes["asked"] is None:
        return {"device": device, "notes": (_NO_FIGURES,)}
    if sizes["allocated"] is not None and sizes["reserved"] is not None:
        sizes["unused"] = max(0, sizes["reserved"] - sizes["allocated"])
    listed = (_known(size_of(*pair)) for pair in re.findall(rf"Process \d+ has {_SIZE} memory in use", text))
    figures = _held(sizes, [nbytes for nbytes in listed if nbytes is not None])
    return {"device": device, "requested_bytes": sizes["asked"], **_limited(figures, _known(sizes["allowed"]))}


def _limited(figures: Figures, allowed: int | None) -> Figures:
    """Below a limit of the process (`set_per_process_memory_fraction`), where that is what failed."""
    held = sum(figures[name] or 0 for name in ("allocated_bytes", "unused_bytes", "private_bytes"))
    if allowed is None or figures["free_bytes"] is None or allowed - held >= figures["free_bytes"]:
        return figures
    notes = (*figures.get("notes", ()), "the process is limited to less than the device has: a memory fraction is set")
    none = {"outside_bytes": 0, "other_processes_bytes": 0, "unaccounted_bytes": 0, "shared_bytes": 0}
    return figures | none | {"total_bytes": allowed, "free_bytes": max(0, allowed - held), "notes": notes}


def _mps(form: MessageForm, text: str, found: re.Match[str]) -> Figures:
    """Apple's: what is allowed is a share of the machine's memory; other allocations are Metal's, of this process."""
    sizes = form.sizes(text)
    total, allocated, outside = sizes["total"], sizes["allocated"], sizes["outside"] or 0
    free = None if total is None or allocated is None else max(0, total - allocated - outside)
    figures = {"allocated_bytes": allocated, "total_bytes": total, "free_bytes": free}
    return {"device": "mps", "outside_bytes": outside, "requested_bytes": sizes["asked"], **figures}


def _named(form: MessageForm, text: str, found: re.Match[str]) -> Figures:
    """A message that names its program, and at most what was asked for."""
    asked = form.sizes(text)["asked"]
    told: Figures = {"notes": form.notes} | ({"device": form.device} if form.device else {})
    if "asked" in form.figures:
        told["requested_bytes"] = asked
    if not form.failure:
        return told
    notes = (*((_NO_FIGURES,) if asked is None else ()), *form.notes)
    device = form.device or ("cpu" if form.failure == Failure.HOST else "cuda")
    return told | {"device": device, "failure": Failure(form.failure), "what": form.what, "notes": notes}


def _killed(form: MessageForm, text: str, found: re.Match[str]) -> Figures:
    """Read a report of the kernel, a scheduler or Ray: the process and the limit, where it names them."""
    used = [int(kib) for kib in re.findall(r"\b(?:anon|shmem)-rss:(\d+) ?kB", text)[:2]]
    limit = re.search(r"memory: usage \d+ ?kB, limit (\d+) ?kB", text)
    ray = re.search(r"memory used=([\d.]+)GB\) was running was [\d.]+GB / ([\d.]+)GB", text)  # in GiB
    cgroup = re.search(r"Memory cgroup out of memory|constraint=CONSTRAINT_MEMCG", text)
    return {
        "device": "cpu",
        "failure": Failure.KILLED,
        "allocated_bytes": size_of(ray[1], "GiB") if ray else 1024 * sum(used) if used else None,
        "total_bytes": size_of(ray[2], "GiB") if ray else None if limit is None else 1024 * int(limit[1]),
        "what": "Memory cgroup out of memory" if cgroup else " ".join(found[0].split()),
    }


def _driver(form: MessageForm, text: str, found: re.Match[str]) -> Figures:
    asked = form.sizes(text)["pinned"]
    if asked is not None:
        return {"device": "cpu", "failure": Failure.HOST, "what": "pinned memory", "requested_bytes": asked}
    device = "hip" if found[0].lower().startswith(("hip", "rocblas")) else "cuda"
    device = "mps" if found[0].startswith("kIOGPU") else device
    what = next((name for name in ("cuBLAS", "cuDNN", "cuSOLVER") if found[0].startswith(name.upper())), "the driver")
    notes = (_NO_FIGURES, *(form.notes if "NOT_INITIALIZED" in found[0] else ()))
    return {"device": device, "failure": Failure.LIBRARY, "what": what, "notes": notes}


def _xla(form: MessageForm, text: str, found: re.Match[str]) -> Figures:
    """XLA on a GPU names a request; on a TPU it names what the compiled program needs, and the device."""
    sizes = form.sizes(text)
    needs, total, free = sizes["needs"], sizes["total"], sizes["free"]
    if needs is None:
        return _named(replace(form, failure="library", what="XLA (JAX)"), text, found)
    held = None if total is None or free is None else max(0, total - free)
    figures = {"requested_bytes": needs, "total_bytes": total, "free_bytes": free, "allocated_bytes": held}
    return {"device": "tpu", "failure": Failure.LIBRARY, "what": "XLA", **figures}


def _server(form: MessageForm, text: str, found: re.Match[str]) -> Figures:
    sizes = form.sizes(text)
    if sizes["asked"] is not None:
        return {"failure": Failure.SERVER, "requested_bytes": sizes["asked"], "free_bytes": sizes["cache"]}
    if sizes["total"] is None:
        return {"failure": Failure.SERVER, "notes": (_NO_FIGURES,)}
    free, total = sizes["free"] or 0, sizes["total"]
    held = {"free_bytes": free, "total_bytes": total, "allocated_bytes": 0, "unaccounted_bytes": max(0, total - free)}
    return {"failure": Failure.SERVER, **held}


_READERS: Final[Mapping[str, Callable[[MessageForm, str, re.Match[str]], Figures]]] = {
    reader.__name__.removeprefix("_"): reader for reader in (_allocator, _mps, _named, _killed, _driver, _xla, _server)
}


# holders --------------------------------------------------------------------------------------------------------------

SLACK: Final = 0.01
"""Share of a device within which figures agree: messages round them to two decimals."""
MOST_OUTSIDE: Final = 0.25
"""Share of a device that a process may hold outside of PyTorch and still be taken for this one."""


def _held(sizes: Mapping[str, int | None], processes: Sequence[int]) -> Figures:
    """Account for every byte of a device: figures of `MemoryFacts` that sum to its capacity.

    Args:
        sizes: as a message states them; ``own`` are bytes of this process by the driver's count.
        processes: bytes of each other process. In a container a process is listed under a number that it does not know
            itself: it is the one that holds as much as PyTorch, or a little more.
    """
    total, free, allocated, unused = (sizes[name] for name in ("total", "free", "allocated", "unused"))
    private, own = sizes["private"] or 0, _known(sizes["own"])
    held, others = (allocated or 0) + (unused or 0), sum(processes)
    if total == 0:
        total = free = None  # the driver does not say
    notes: list[str] = []
    if total is not None and held > min(total, own or total) * (1 + SLACK):
        rest = 0 if own is None else max(0, total - (free or 0) - own)
        elsewhere = {"other_processes_bytes": min(others, rest), "unaccounted_bytes": max(0, rest - others)}
        shared = {"outside_bytes": 0, "shared_bytes": held + (free or 0) + rest - total}
        return _figures(total, free, allocated, unused, 0) | elsewhere | shared
    if free is not None and total is not None and free > max(0, total - held) * (1 + SLACK):
        free = max(0, total - held)
        notes.append("the driver calls more free than the device has left: memory that is shared with the host")
    if own is None and processes:
        size = total or held
        near = (one for one in processes if held - SLACK * size <= one <= held + MOST_OUTSIDE * size)
        own = min(near, default=None)
        if own is not None:
            others -= own
            notes.append(
                "one of the processes that the message lists is this one: in a container it has another number"
            )
    if free is None and total is not None and allocated is not None:
        free = max(0, total - max(held, own or 0) - others)
        notes.append("what is free is not stated: it is what the others leave, at most")
    figures = _figures(total, free, allocated, unused, private) | {"notes": tuple(notes)}
    outside = max(0, own - held) if own is not None else 0
    if total is None or free is None or allocated is None:
        # of a message that is cut short one that is listed may be this process
        known = 0 if own is None and allocated is None else others
        return figures | {"outside_bytes": outside, "other_processes_bytes": known}
    rest_bytes = max(0, total - free - held)
    outside = min(outside, rest_bytes)
    others = min(others, rest_bytes - outside)
    left = rest_bytes - outside - others
    return figures | {"outside_bytes": outside, "other_processes_bytes": others, "unaccounted_bytes": left}


def _figures(total: int | None, free: int | None, allocated: int | None, unused: int | None, private: int) -> Figures:
    pools = private if unused is not None and private <= unused else 0
    left = None if unused is None else unused - pools
    return {
        "total_bytes": total,
        "free_bytes": free,
        "allocated_bytes": allocated,
        "unused_bytes": left,
        "private_bytes": pools,
    }


# text -----------------------------------------------------------------------------------------------------------------

_ANSI: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_BOX: Final = "│┃║╎|"
_BORDER: Final = re.compile(rf"\s*[{_BOX}]\s?|\s*[╭╰├][─━]*")
_TRAILING: Final = re.compile(rf"[ ]*[{_BOX}]\s*$")
MOST_LINES: Final = 400
"""Before a message, in which its traceback is looked for."""


@cache
def _patterns(name: str) -> tuple[re.Pattern[str], ...]:
    return tuple(map(re.compile, table("log_forms")[name]))


def _front(name: str, line: str) -> re.Match[str] | None:
    return next(filter(None, (pattern.match(line) for pattern in _patterns(name))), None)


def decoded(data: bytes) -> str:
    """The text of a file: UTF-8, or UTF-16 as Windows' shells write it; without colours, with lines that end in LF."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = data.decode("utf-16", errors="replace")
    elif data[:400].count(0) > len(data[:400]) // 4:
        text = data.decode("utf-16-le" if data[1:400:2].count(0) >= data[:400:2].count(0) else "utf-16-be", "replace")
    else:
        text = data.decode("utf-8-sig", errors="replace")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if '\\n  File \\"' in text:  # a traceback within a string of a structured log
        text = text.replace('\\"', '"').replace("\\n", "\n")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def split_prefix(line: str) -> tuple[str, str]:
    """Split off tags (host, rank, process, container), times, levels and borders in front of a line; return the tags,
    and the line without these and a border at its end."""
    tag = ""
    for _ in range(6):
        found = _BORDER.match(line) or _front("prefixes", line)
        if found is None and (found := _front("tags", line)) is not None:
            tag += found[0].strip()
        if found is None or not found.end():
            break
        line = line[found.end() :]
    return tag, _TRAILING.sub("", line)


def lines_of_rank(text: str, at: int, lines: list[str]) -> list[str]:
    """Return lines without prefixes; of interleaved ranks those of the rank whose line a position is in."""
    tag, _ = split_prefix(text[text.rfind("\n", 0, at) + 1 : at])
    return [line for own, line in map(split_prefix, lines) if not tag or own in ("", tag)]


def joined(text: str, at: int, length: int) -> tuple[str, str]:
    """Join the lines after a position: with a space for each line's end, and without.

    A terminal cuts a figure in two where a line is full; a formatter does so at a space, which may stay or go.
    """
    first, *more = text[at : at + length].split("\n")
    lines = [_TRAILING.sub("", first), *lines_of_rank(text, at, more)]
    return " ".join(" ".join(lines).split()), " ".join("".join(lines).split())


SCHEMA: Final = "jettison.watch/1"


@dataclass(frozen=True, kw_only=True)
class WatchRecord:
    """One watched loop.

    Args:
        error: traceback and message of a failed request; "": bytes only grew.
        allocator: settings of the allocator, in the format of PyTorch's environment variable.
        snapshot: name of a memory snapshot in the same folder; "": none.
    """

    device: str
    steps: tuple[StepBytes, ...]
    survivors: tuple[Survivor, ...] = ()
    error: str = ""
    allocator: str = ""
    snapshot: str = ""

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {"schema": SCHEMA, **asdict(self)}


def read_watch_record(path: Path) -> MemoryFacts | None:
    """Read a record, and the snapshot next to it; None if the file is not a record. Raise `UsageError` for an invalid
    record or snapshot.
    """
    try:
        with path.open("rb") as file:
            if file.read(1) != b"{":
                return None
        text = path.read_text(encoding="utf-8", errors="replace")
        document = json.loads(text)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; give a file that exists") from error
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, Mapping) or document.get("schema") != SCHEMA:
        return None
    from pydantic import TypeAdapter, ValidationError  # a loop that is watched does without

    try:
        record: WatchRecord = TypeAdapter(WatchRecord).validate_json(text, strict=True)
    except ValidationError as error:
        problem = first_problem(error)
        raise UsageError(f"{path} is a broken {SCHEMA} ({problem}); expected what jettison.watch() wrote") from error
    return _facts(record, path)


def _facts(record: WatchRecord, path: Path) -> MemoryFacts:
    expandable = "expandable_segments:true" in record.allocator.lower() or None
    kept = path.parent / Path(record.snapshot).name if record.snapshot else None
    facts = MemoryFacts(source=path.name, failed=False, device=record.device)
    if record.error:
        facts = facts_of_log(record.error, path.name)
    if kept is not None and kept.exists():
        seen = facts_of_snapshot(read_snapshot(kept))
        if record.error and seen.failed and facts.failure is Failure.REQUEST:
            told = {name: getattr(facts, name) for name in table("log_forms")["message_facts"]}
            phase = facts.phase if seen.phase is StepPhase.UNKNOWN else seen.phase
            facts = replace(seen, **told, phase=phase, logits=seen.logits or facts.logits, source=path.name)
        else:
            facts = replace(facts, parts=seen.parts, survivors=seen.survivors)
    if not facts.failed and record.steps:
        facts = replace(facts, allocated_bytes=record.steps[-1].peak_bytes or record.steps[-1].between_bytes)
    return replace(
        facts,
        steps=record.steps,
        survivors=facts.survivors or record.survivors,
        expandable=facts.expandable or expandable,
    )
