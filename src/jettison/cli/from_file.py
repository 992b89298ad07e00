"""`--from FILE`: a run from a training framework's own configuration file instead of flags."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from jettison.cli.app import LOCAL, Switch
from jettison.core.errors import UsageError
from jettison.models.spec_from_name import described_model
from jettison.predict.forecast import forecast
from jettison.report.console import hint
from jettison.request.options import CommonRequest, RunRequest
from jettison.request.resolve import resolve
from jettison.spec.anchor import read_anchor

if TYPE_CHECKING:
    from jettison.frameworks.run_file import RunFile
    from jettison.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class SourceFlags:
    """Source of a run.

    Model:
        from_file: The trainer's own config file or script; other flags override it.

    Model details:
        allow_unread: Go on although keys of the --from file that change memory or time cannot be read.
    """

    from_file: Annotated[list[Path] | None, Parameter(name="--from", negative="")] = field(default=None, metadata=LOCAL)
    allow_unread: Switch = field(default=False, metadata=LOCAL)


@dataclass(frozen=True, kw_only=True)
class RunSourceFlags(SourceFlags):
    """Source of a single run.

    Model details:
        gpus: Devices of the run, where the --from file does not say.
    """

    gpus: int | None = field(default=None, metadata=LOCAL)


NO_SOURCE: Final = RunSourceFlags()


def sourced(
    model: str | None,
    request: Any,
    source: SourceFlags,
    *,
    verb: str,
    gpus: int | None = None,
    decides: Collection[str] = (),
) -> tuple[str, Any, RunFile | None]:
    """The model and the request of a verb, with what a framework's file says where none was given. Raise `UsageError`
    for neither a model nor a file, or a file that cannot be read.

    Args:
        request: a `RunRequest`, or a `SearchRequest`, which takes the fields that it has.
        gpus: devices, where the verb has a flag for them.
        decides: fields that the verb decides itself, whatever the file says.
    """
    own_gpus = getattr(source, "gpus", None)
    if not source.from_file:
        if model is None:
            raise UsageError("expected a model: a preset such as llama3-8b, a config.json, or --from FILE of a trainer")
        if own_gpus is not None:
            instead = f"--from FILE of a trainer, or a layout such as --dp {own_gpus} --zero 3 in place of --gpus"
            raise UsageError(f"got --gpus {own_gpus} without --from; expected {instead}")
        if source.allow_unread:
            raise UsageError("got --allow-unread without --from; expected --from FILE of a trainer as well")
        if Path(model).is_file() and Path(model).suffix != ".json":
            from jettison.cli.file_kinds import describes_run

            if describes_run(Path(model)):
                hint(f"note: of {model} the model alone is read; --from {model} reads the run")
        _say_anchor(request)
        return model, request, None
    from jettison.frameworks.run_file import read_run, replaced

    known = {f.name for f in fields(RunRequest)}
    given = {name: getattr(request, name) for name in request.given()}
    asked = {name: value for name, value in given.items() if name in known} if isinstance(request, RunRequest) else {}
    gpus = own_gpus if gpus is None else gpus
    if gpus is not None and gpus < 1:
        raise UsageError(f"got --gpus {gpus}; expected 1 or more")
    found = read_run(*source.from_file, model=model, gpus=gpus, asked=asked, allow_unread=source.allow_unread)
    own = {f.name for f in fields(RunRequest if isinstance(request, RunRequest) else CommonRequest)}
    own -= set(decides) | replaced(given)
    merged = {name: getattr(found.request, name) for name in found.request.given() if name in own}
    request = type(request)(**{**merged, **given})
    found = _settled(found, request, verb)
    for line in said(found, verb, request):
        hint(line)
    _say_anchor(request)
    return found.model_argument, request, found


@contextmanager
def in_keys_of(found: RunFile | None) -> Iterator[None]:
    """Name the file's keys beside the flags in an error's message."""
    try:
        yield
    except UsageError as error:
        if found is None or type(error) is not UsageError:
            raise
        raise UsageError(found.in_keys(str(error))) from None


def _say_anchor(request: CommonRequest) -> None:
    """Name the measured run that answers are anchored on, and whether this one is of its stack."""
    if request.anchor is None:
        return
    anchor = read_anchor(Path(request.anchor))
    hint(f"anchored on {anchor.run}{f' on {anchor.gpu}' if anchor.gpu else ''} ({request.anchor})")
    own = request.like or request.kernels
    if own != anchor.stack and (own is not None or f"--like {anchor.stack}" in anchor.run):
        own = "has no --like" if own is None else f"is of {own}"
        hint(f"note: the anchor is of a run of {anchor.stack}, this one {own}")


def spec_of(model: str, request: RunRequest, **how: bool) -> ModelSpec:
    """The model that an argument stands for, a framework's file that describes its own among them."""
    if Path(model).suffix not in ("", ".json") or Path(model).is_file():
        from jettison.frameworks.run_file import is_run_file, read_run

        if is_run_file(model):
            asked = {name: getattr(request, name) for name in request.given()}
            found = read_run(model, gpus=0, asked=asked, allow_unread=True)
            if found.config is None:
                raise UsageError(f"{model} is {found.says}, the configuration of a run; give it after --from")
            return found.spec()
    return described_model(model, request, **how)


def _settled(found: RunFile, request: Any, verb: str) -> RunFile:
    """The file, without compiled layers where a verb or the formulas do not have them, and with a note of that."""
    if not found.compile:
        return found
    from jettison.frameworks.run_file import COMPILES

    why = f"jettison {verb} does not take compiled layers"
    asked = request
    if not isinstance(request, RunRequest):  # a search has modes of its own
        asked = RunRequest(**{one.name: getattr(request, one.name) for one in fields(CommonRequest)})
    if verb in COMPILES:
        try:
            forecast(replace(resolve(found.spec(), asked).run, compiled=True))
        except UsageError as error:
            why = str(error)
        else:
            return found
    return replace(found, compile=False, notes=(*found.notes, f"the layers are compiled there, and eager here: {why}"))


def said(found: RunFile, verb: str, request: Any) -> list[str]:
    """Return the equivalent command, the keys that were read and those that were not, as lines."""
    command = found.command(verb, request)
    lines = [f"{found.path}: {found.says}; the same as: {command}"]
    for why in dict.fromkeys(key.why for key in found.used if key.why):
        keys = ", ".join(str(key) for key in found.used if key.why == why)
        unused = why.startswith("--") and f" {why.split()[0].rstrip(',')} " not in f"{command} "
        lines.append(f"  {why}{f' (not used: {verb} decides)' if unused else ''}  from  {keys}")
    lines += [f"not read, though it may change memory or time: {key} ({key.why})" for key in found.unread]
    if found.ignored:
        many = len(found.ignored) > 1
        lines.append(f"{len(found.ignored)} key{'s' * many} that change{'s' * (not many)} neither memory nor time")
    return lines + [f"note: {note}" for note in found.notes]
