"""Accelerators: what one device holds and how fast it is, from one TOML file each; every figure names its source.

The files that ship are in `hardware_data`; a path to a file of the same form does as well:

    memory = "80GiB"                # of the chip; the only key that must be there
    usable = "79.15GiB"             # what a process can allocate; left out, 98 % of memory
    source, usable_source = "…"     # where the figures come from
    host_memory = "2TiB"            # of the machine, divided by its devices
    units = 108                     # multiprocessors, over which a matrix product is cut into tiles
    node = 8                        # devices that the links connect
    synchronous = false             # true: the host does the work itself, as a CPU does
    [teraflops]                     # 10^12 FLOP/s without sparsity: fp32 tf32 bf16 fp8 fp4
    [gigabytes_per_second]          # 10^9 B/s, in one direction: memory link host network
    [reached]                       # shares of these that large kernels and transfers reach: see `Reached`
    [microseconds]                  # what comes on top of each: see `Delays`
    [edges]                         # fp32 = [52, 80, 57]: see `Edges`; left out, tiles over multiprocessors
    [attention]                     # what fused attention reaches by dtype and width: see `attention_rates`
    reached_source, delays_source = "…"
    note = "…"                      # what to say to whoever asks for times on it
    [stacks.NAME]                   # source = "…", and what --stack NAME reaches instead:
    [stacks.NAME.reached]           # the keys of [reached] that differ
    [stacks.NAME.microseconds]      # the keys of [microseconds] that differ
    [stacks.NAME.attention]         # in place of [attention]
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.core.objects import summary
from jettison.core.parse_units import parse_bytes
from jettison.core.units import format_bytes
from jettison.spec.attention_rates import AttentionRates, attention_rates
from jettison.spec.kernels import Device

_DATA: Final = Path(__file__).with_name("hardware_data")
_UNSTATED_USABLE: Final = Decimal("0.98")
"""Of memory, where a file does not say: HBM devices report 98 to 99 % of it, GDDR with error correction 92 %."""
_TEXTS: Final = (
    "name",
    "memory",
    "usable",
    "host_memory",
    "source",
    "usable_source",
    "reached_source",
    "delays_source",
    "note",
)
_COUNTS: Final = ("units", "node")
_RATES: Final = ("fp32", "tf32", "bf16", "fp8", "fp4")
_SECTIONS: Final = ("teraflops", "gigabytes_per_second", "reached", "microseconds", "edges", "attention", "stacks")
_BANDWIDTHS: Final = ("memory", "link", "host", "network")


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Peak FLOP/s of matrix products without sparsity, by the type of their inputs; None: not stated.

    16-bit and fp8 products accumulate in fp32. ``fp32`` is the rate of ordinary arithmetic.
    """

    fp32: int | None = None
    tf32: int | None = None
    bf16: int | None = None
    fp8: int | None = None
    fp4: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """Shares of the stated peaks that are reached where the shape of the work costs nothing. Each is at most 1.

    Args:
        matmul: of FLOP/s, by the largest products, hot: what a device holds up for hours, not for a second.
        matmul_fp8: the same for products of fp8.
        matmul_mxfp8: of fp8's, by those with a scale for 32 numbers; None: as `matmul_fp8`.
        matmul_lines: of fp8's, by those with a scale for 128 numbers, of weights for 128 x 128; None: as `matmul_fp8`.
        matmul_fp4: of fp4's; None: as `matmul_fp8`.
        attention: of FLOP/s, by a fused attention's forward, in FLOPs that it cannot skip.
        attention_backward: the same for its backward, which computes the scores again.
        attention_64: the forward's with heads of 64 or less, and in proportion the backward's; None: the same.
        scan: of FLOP/s, by a fused scan, in FLOPs of the mathematics; None: its bytes alone count.
        memory: of memory bandwidth, by a kernel that streams.
        operands: of memory bandwidth, by matrix products; None: as `memory`.
        gather: of memory bandwidth, by one that looks rows up or scatters them; None: as `memory`.
        link: of the links, by collectives within a node.
        all_to_all: of the links, by an all-to-all within a node; None: as `link`.
        network: of the network, by collectives between nodes.
        host: of the host link, by copies.
        shared: of its speed, what a device loses to a transfer that hides behind its work.
    """

    matmul: float = 0.8
    matmul_fp8: float = 0.7
    matmul_mxfp8: float | None = None
    matmul_lines: float | None = None
    matmul_fp4: float | None = None
    attention: float = 0.5
    attention_backward: float = 0.42
    attention_64: float | None = None
    scan: float | None = None
    memory: float = 0.85
    operands: float | None = None
    gather: float | None = None
    link: float = 0.75
    all_to_all: float | None = None
    network: float = 0.85
    host: float = 0.8
    shared: float = 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class Delays:
    """Seconds that come on top, whatever the size.

    Args:
        kernel: between the end of a kernel and the start of the next, on the device.
        dispatch: until an op has been handed over by the host, which bounds kernels that are shorter.
        start: until a collective moves anything.
        link: for each step of a collective within a node.
        network: for each step between nodes.
        experts: for the host to hand over a layer of experts of Megatron in fp8, forward and backward, where no CUDA
            graph does, beside ``product``: see NOTE [ Launch-bound ] in `cost.host`.
        product: for it to hand over the product of one expert, where a library does so expert by expert; 0: that is in
            ``experts``.
        hook: for each tensor that a planned layer saves, until Jettison's runtime has dealt with it on the host; 0: not
            measured.
    """

    kernel: float = 2e-6
    dispatch: float = 6e-6
    start: float = 0.0
    link: float = 2e-6
    network: float = 6e-6
    experts: float = 0.0
    product: float = 0.0
    hook: float = 0.0


@dataclass(frozen=True, slots=True)
class Edges:
    """How a product's rate falls with its sizes, where nothing is cut into tiles for many multiprocessors.

    m × k times k × n takes FLOPs / rate × (1 + rows / m + columns / n + depth / k): each operand, and the result, costs
    something for each of its elements beside the arithmetic.
    """

    rows: float
    columns: float
    depth: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgesOf:
    """By the type of a product's inputs; None: its rate follows from tiles."""

    fp32: Edges | None = None
    bf16: Edges | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """What another software reaches on the same device: a section ``[stacks.NAME]`` of its file."""

    name: str
    source: str
    reached: Reached
    delays: Delays
    attention: AttentionRates | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One accelerator. Bandwidths are bytes a second in one direction; None: not stated.

    Args:
        memory_bytes: of the chip.
        usable_bytes: what one process can allocate altogether, as torch.cuda.mem_get_info says on an idle device. The
            process's own context still comes out of it.
        link_bytes_per_second: to the other devices of the same node or pod, over all links.
        host_bytes_per_second: to the host.
        network_bytes_per_second: to other nodes.
        host_memory_bytes: of the host, for each device.
        units: multiprocessors.
        node: devices that the links connect.
        synchronous: the host does the work itself, so that nothing that it does beside is hidden.
        attention: what fused attention reaches, by dtype and width; None: `Reached.attention` for all.
    """

    name: str
    memory_bytes: int
    usable_bytes: int
    source: str = ""
    usable_source: str = ""
    flops_per_second: Throughput = Throughput()
    memory_bytes_per_second: int | None = None
    link_bytes_per_second: int | None = None
    host_bytes_per_second: int | None = None
    network_bytes_per_second: int | None = None
    host_memory_bytes: int | None = None
    units: int = 1
    node: int = 8
    synchronous: bool = False
    reached: Reached = Reached()
    delays: Delays = Delays()
    edges: EdgesOf = EdgesOf()
    attention: AttentionRates | None = None
    reached_source: str = ""
    delays_source: str = ""
    note: str = ""
    stacks: tuple[Stack, ...] = ()

    def under(self, stack: str) -> Hardware:
        """The same device as a software stack reaches it; by the file's own figures where it does not know that one."""
        return _under(self, stack) if stack and self.stacks else self

    def __hash__(self) -> int:
        """Cheap: devices are keys of caches, and most differ in these."""
        return hash((self.name, self.memory_bytes, self.usable_bytes))

    def __repr__(self) -> str:
        return summary(self, f"{self.name}, {format_bytes(self.usable_bytes)} usable")

    def __post_init__(self) -> None:
        if not 0 < self.usable_bytes <= self.memory_bytes:
            raise UsageError(
                f"hardware {self.name}: got {self.usable_bytes}B usable of {self.memory_bytes}B of memory; expected "
                "more than nothing and no more than there is"
            )


@cache
def hardware_names() -> tuple[str, ...]:
    """The accelerators that ship."""
    return tuple(sorted(path.stem for path in _DATA.glob("*.toml")))


def hardware(name_or_path: str | Path) -> Hardware:
    """An accelerator by name, by the part of a name that only one has, or from a TOML file.

    Raises:
        UsageError: no such name or file, a part that several names have, or a file that is not of the form above.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(".toml") or "/" in text:
        return _read(Path(name_or_path))
    wanted = text.strip().lower().replace("_", "-")
    names = hardware_names()
    if wanted in names:
        return _shipped(wanted)
    matching = [name for name in names if name.startswith(f"{wanted}-")]
    if len(matching) == 1:
        return _shipped(matching[0])
    if matching:
        raise UsageError(f"got the accelerator {text!r}, which may be {' or '.join(matching)}; say which")
    raise UsageError(f"got the accelerator {text!r}; {_closest(wanted, names)}. A .toml file will do as well")


def usual_hardware(device: Device) -> Hardware:
    """Whose prices are taken where nobody says what a run is on."""
    return _shipped("cpu-23gb" if device is Device.CPU else "h100-80gb")


@cache
def _shipped(name: str) -> Hardware:
    return _read(_DATA / f"{name}.toml")


def _closest(wanted: str, names: Sequence[str]) -> str:
    from difflib import get_close_matches  # only where it is needed: every start of the command line counts

    spelled = {part: name for name in reversed(names) for part in (name, name.rsplit("-", 1)[0])}
    close = dict.fromkeys(spelled[part] for part in get_close_matches(wanted, spelled, n=4, cutoff=0.6))
    return f"the closest are {', '.join(close)}" if close else f"expected one of {', '.join(names)}"


def _read(path: Path) -> Hardware:
    who = f"hardware file {path}"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
    except OSError as error:
        raise UsageError(f"{who} cannot be read: {error.strerror or error}; expected a TOML file") from None
    except UnicodeDecodeError:
        raise UsageError(f"{who} is not UTF-8 text; expected a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{who} is not TOML: {str(error).splitlines()[0]}") from None
    _known(who, table, (*_TEXTS, *_COUNTS, "synchronous", *_SECTIONS))
    texts = {key: _text(who, key, table[key]) for key in _TEXTS if key in table}
    if "memory" not in texts:
        raise UsageError(f'{who} does not say how much memory there is; expected a line such as memory = "80GiB"')
    memory = _bytes(who, "memory", texts["memory"])
    usable, usable_source = int(memory * _UNSTATED_USABLE), f"estimated: {_UNSTATED_USABLE:.0%} of memory"
    if "usable" in texts:
        usable, usable_source = _bytes(who, "usable", texts["usable"]), texts.get("usable_source", "")
    rates = _numbers(who, table, "teraflops", _RATES, 10**12)
    widths = _numbers(who, table, "gigabytes_per_second", _BANDWIDTHS, 10**9)
    shares = _shares(who, table)
    given = _section(who, table, "microseconds", [f.name for f in fields(Delays)])
    reached, delays = Reached(**shares), Delays(**{key: float(value) / 1e6 for key, value in given.items()})
    return Hardware(
        name=texts.get("name", path.stem),
        memory_bytes=memory,
        usable_bytes=usable,
        source=texts.get("source", ""),
        usable_source=usable_source,
        flops_per_second=Throughput(**rates),
        memory_bytes_per_second=widths.get("memory"),
        link_bytes_per_second=widths.get("link"),
        host_bytes_per_second=widths.get("host"),
        network_bytes_per_second=widths.get("network"),
        host_memory_bytes=_bytes(who, "host_memory", texts["host_memory"]) if "host_memory" in texts else None,
        **{key: _count(who, key, table[key]) for key in _COUNTS if key in table},
        synchronous=_flag(who, "synchronous", table.get("synchronous", False)),
        reached=reached,
        delays=delays,
        edges=_edges(who, table.get("edges", {})),
        attention=(attention := attention_rates(who, table.get("attention"))),
        reached_source=texts.get("reached_source", ""),
        delays_source=texts.get("delays_source", ""),
        note=texts.get("note", ""),
        stacks=_stacks(who, table.get("stacks", {}), reached, delays, attention),
    )


def _known(who: str, table: Mapping[str, Any], expected: Collection[str]) -> None:
    for key in table:
        if key not in expected:
            raise UsageError(f"{who}: got the key {key!r}; expected some of {', '.join(expected)}")


def _text(who: str, key: str, value: object) -> str:
    if not isinstance(value, str):
        example = ', such as "80GiB"' if key in ("memory", "usable", "host_memory") else ""
        raise UsageError(f"{who}: got {key} = {value}; expected text in quotation marks{example}")
    return value


def _bytes(who: str, key: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except UsageError as error:
        raise UsageError(f"{who}: {key}: {error}") from None


def _count(who: str, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{who}: got {key} = {value}; expected a whole number of 1 or more")
    return value


def _flag(who: str, key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{who}: got {key} = {value}; expected true or false")
    return value


def _shares(who: str, table: Mapping[str, Any]) -> dict[str, float]:
    """The section of shares."""
    found = _section(who, table, "reached", [f.name for f in fields(Reached)])
    for name, value in found.items():
        if value > 1 or not float(value):
            raise UsageError(
                f"{who}, section [reached]: got {name} = {value}; expected a share of at most 1 and above nothing"
            )
    return {name: float(value) for name, value in found.items()}


def _stacks(
    who: str, section: object, reached: Reached, delays: Delays, attention: AttentionRates | None
) -> tuple[Stack, ...]:
    """Each with the shares and delays that it does not state taken from the file."""
    if not isinstance(section, dict):
        raise UsageError(f"{who}: got stacks = {section}; expected sections such as [stacks.nemo]")
    found = []
    for name, table in section.items():
        where = f"{who}, section [stacks.{name}]"
        if not isinstance(table, dict):
            raise UsageError(f"{where}: got {table}; expected a section")
        _known(where, table, ("source", "reached", "microseconds", "attention"))
        shares = _shares(where, table)
        given = _section(where, table, "microseconds", [f.name for f in fields(Delays)])
        found.append(
            Stack(
                name=name,
                source=_text(where, "source", table.get("source", "")),
                reached=replace(reached, **shares),
                delays=replace(delays, **{key: float(value) / 1e6 for key, value in given.items()}),
                attention=attention_rates(where, table.get("attention")) or attention,
            )
        )
    return tuple(found)


@lru_cache(maxsize=256)
def _under(hardware: Hardware, stack: str) -> Hardware:
    """Of a later release of a stack, where the file does not have it, the stack's own."""
    stated = {one.name: one for one in hardware.stacks}
    found = stated.get(stack) or stated.get(stack.rsplit("-", 1)[0])
    return (
        hardware
        if found is None
        else replace(
            hardware, reached=found.reached, delays=found.delays, attention=found.attention, reached_source=found.source
        )
    )


def _edges(who: str, section: object) -> EdgesOf:
    """The section of edges: three numbers for each type."""
    names = [f.name for f in fields(EdgesOf)]
    if not isinstance(section, dict):
        raise UsageError(f"{who}: got edges = {section}; expected a section [edges] with some of {', '.join(names)}")
    _known(f"{who}, section [edges]", section, names)
    found = {}
    for name, values in section.items():
        given = values if isinstance(values, list) else []
        if len(given) != 3 or not all(_is_number(value) and value >= 0 for value in given):
            raise UsageError(
                f"{who}, section [edges]: got {name} = {values}; expected three numbers, such as [50, 80, 60]"
            )
        found[name] = Edges(*map(float, given))
    return EdgesOf(**found)


def _numbers(who: str, table: Mapping[str, Any], key: str, expected: Collection[str], unit: int) -> dict[str, int]:
    """The section ``key``, each number times ``unit``."""
    given = _section(who, table, key, expected)
    found = {name: int(value * unit) for name, value in given.items()}
    for name, value in found.items():
        if not value:
            raise UsageError(
                f"{who}, section [{key}]: got {name} = {given[name]}, which is less than 1 a second; expected more"
            )
    return found


def _section(who: str, table: Mapping[str, Any], key: str, expected: Collection[str]) -> dict[str, int | Decimal]:
    """The numbers of a section."""
    section = table.get(key, {})
    if not isinstance(section, dict):
        raise UsageError(f"{who}: got {key} = {section}; expected a section [{key}] with some of {', '.join(expected)}")
    _known(f"{who}, section [{key}]", section, expected)
    for name, value in section.items():
        if not (_is_number(value) and value > 0):
            raise UsageError(f"{who}, section [{key}]: got {name} = {value}; expected a number above 0")
    return dict(section)


def _is_number(value: object) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool) and Decimal(value).is_finite()
