"""Accelerators: memory and speed of a device, from one TOML file each with the source of every figure.

``hardware_data/README.md`` has the form of these files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.core.files import parse_toml, read_text
from jettison.core.objects import former_names, renamed, summary
from jettison.core.parse_units import parse_bytes
from jettison.core.units import format_bytes
from jettison.spec.kernels import Device

_DATA: Final = Path(__file__).with_name("hardware_data")
_UNSTATED_USABLE: Final = Decimal("0.98")
"""Usable share of memory by default: HBM devices report 98 to 99 %, GDDR with error correction 92 %."""
_BANDWIDTHS: Final = ("memory", "link", "host", "cpu", "network")
SPREAD: Final = 0.015
"""Standard deviation of arithmetic among equal devices. But for outliers GPUs of a cluster differ by 8 % (arXiv
2208.11035), 5.4 of these in a box plot; the eight of a node, 2.8 of these, by 5 % (stas00/ml-engineering 744d01e)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Peak FLOP/s of matmuls without sparsity, by dtype of their inputs; None: not stated.

    16-bit and FP8 matmuls accumulate in fp32. ``fp32`` is the rate of CUDA cores. ``fp16``: where bf16 is slower.
    """

    fp32: int | None = None
    tf32: int | None = None
    fp16: int | None = None
    bf16: int | None = None
    fp8: int | None = None
    fp4: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """Efficiencies: shares of the stated peaks that work of large, aligned shapes reaches. Each is at most 1.

    Args:
        matmul_lines: of FP8 peak, with a scale per 128 elements, for weights per 128 x 128; None: `matmul_fp8`.
        attention_64: of the forward with heads of 64 or less, and in proportion of the backward; None: `attention`.
    """

    matmul: float = 0.8  # of peak FLOP/s, largest matmuls at sustained clocks
    matmul_fp8: float = 0.7  # the same for FP8
    matmul_mxfp8: float | None = None  # of FP8 peak, with a scale per 32 elements; None: `matmul_fp8`
    matmul_lines: float | None = None
    matmul_fp4: float | None = None  # of FP4 peak; None: `matmul_fp8`
    unaligned: float = 1.0  # of a matmul's rate, with rows that are not aligned to cache lines
    attention: float = 0.5  # of peak FLOP/s, fused attention forward, in FLOPs without masked blocks
    attention_backward: float = 0.42  # the same for its backward, which recomputes scores
    attention_64: float | None = None
    scan: float | None = None  # of peak FLOP/s, fused scans, in model FLOPs; None: bound by memory
    memory: float = 0.85  # of memory bandwidth, streaming kernels
    operands: float | None = None  # of memory bandwidth, matmuls; None: `memory`
    gather: float | None = None  # of memory bandwidth, gathers and scatters of rows; None: `memory`
    link: float = 0.75  # of link bandwidth, collectives within a node
    all_to_all: float | None = None  # of link bandwidth, all-to-all within a node; None: `link`
    network: float = 0.85  # of network bandwidth, collectives between nodes
    host: float = 0.8  # of host link bandwidth, copies
    cpu: float = 0.4  # of CPU memory bandwidth, optimizer steps: docs/decisions/0122
    shared: float = 0.15  # slowdown of compute by a transfer that overlaps with it


@dataclass(frozen=True, kw_only=True, slots=True)
class Delays:
    """Latencies in seconds, independent of size.

    Args:
        experts: host time of a Megatron MoE layer in FP8, forward and backward, without CUDA graphs, in addition to
            ``expert_gemm``: NOTE [ Launch-bound ] in `cost.region`.
        expert_gemm: host time of one expert's GEMM, for libraries with a launch per expert; 0: part of ``experts``.
        hook: host time of Jettison's runtime for each saved tensor of a planned layer; 0: not measured.
    """

    kernel: float = 2e-6  # between two kernels on the device
    dispatch: float = 6e-6  # host time of an op, which bounds shorter kernels
    waited: float = 40e-6  # host time between kernels that are waited for: docs/decisions/0135
    start: float = 8.4e-6  # startup of a collective: NOTE [ Latencies of NCCL ] in `cost.collective`
    link: float = 3.4e-6  # for each step of a collective within a node
    network: float = 14e-6  # for each step between nodes
    experts: float = 0.0
    expert_gemm: float = field(default=0.0, metadata={"former": "product"})
    hook: float = 0.0


@dataclass(frozen=True, slots=True)
class Edges:
    """Dependence of a matmul's rate on its sizes, on devices without tiles over many multiprocessors.

    m × k times k × n takes FLOPs / rate × (1 + rows / m + columns / n + depth / k): each element of operands and result
    has a cost in addition to the arithmetic.
    """

    rows: float
    columns: float
    depth: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgesOf:
    """Edges by dtype of a matmul's inputs; None: its rate follows from tiles."""

    fp32: Edges | None = None
    bf16: Edges | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftwareStack:
    """Figures of a software stack on a device: a section ``[stacks.NAME]`` of its file."""

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
        usable_bytes: free memory of an idle device in torch.cuda.mem_get_info, the process's CUDA context included.
        link_bytes_per_second: to the other devices of the same node or pod, over all links.
        host_bytes_per_second: to the host. ``cpu_bytes_per_second``: the host's memory bandwidth, for each device.
        network_bytes_per_second: to other nodes.
        host_memory_bytes: of the host, for each device.
        units: multiprocessors. ``unit_elements``: a second, of each, by kernels that are not vectorized: NOTE
            [ Vectorized kernels ] in `cost.kernel`.
        node: devices that the links connect.
        synchronous: the host computes, so that its other work does not overlap.
        attention: efficiencies of fused attention, by dtype and head width; None: `Reached.attention` for all.
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
    cpu_bytes_per_second: int = 51_200_000_000  # two channels of DDR4-3200, or a DGX A100's sixteen for eight devices
    network_bytes_per_second: int | None = None
    host_memory_bytes: int | None = None
    units: int = 1
    unit_elements: float = 1.8e9
    node: int = 8
    synchronous: bool = False
    reached: Reached = Reached()
    delays: Delays = Delays()
    edges: EdgesOf = EdgesOf()
    attention: AttentionRates | None = None
    reached_source: str = ""
    delays_source: str = ""
    note: str = ""
    stacks: tuple[SoftwareStack, ...] = ()

    def under(self, stack: str) -> Hardware:
        """The device with a software stack's figures; the file's own if it does not have that stack."""
        return _under(self, stack) if stack and self.stacks else self

    def __hash__(self) -> int:
        """Hash of the fields that most devices differ in; cheap, since devices are cache keys."""
        return hash((self.name, self.memory_bytes, self.usable_bytes))

    def __repr__(self) -> str:
        return summary(self, f"{self.name}, {format_bytes(self.usable_bytes)} usable")

    def __post_init__(self) -> None:
        if not 0 < self.usable_bytes <= self.memory_bytes:
            raise UsageError(
                f"hardware {self.name}: got {self.usable_bytes}B usable of {self.memory_bytes}B of memory; expected "
                "more than 0 and at most all of it"
            )


@cache
def hardware_names() -> tuple[str, ...]:
    """Names of the accelerators that ship."""
    return tuple(sorted(path.stem for path in _DATA.glob("*.toml")))


def hardware(name_or_path: str | Path) -> Hardware:
    """Return an accelerator by name, by the unique start of a name, or from a TOML file.

    Options describe a cluster's interconnect: ``a100-80gb,network=6.25,node=4`` has 6.25 GB/s from each device to other
    nodes (shared adapters divided by their devices), and four devices in a node; ``host=`` is the link to the host.

    Raises:
        UsageError: no such name or file, an ambiguous name, a file of another format, or unknown options.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, str) and "=" in text:
        name, *words = text.split(",")
        connected: dict[str, Any] = dict(_connected(text, word) for word in words)
        if "=" in name or len(connected) < len(words):
            raise _unconnected(text)
        return replace(hardware(name), **connected)
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
        raise UsageError(f"got the accelerator {text!r}, which may be {' or '.join(matching)}; give one of them")
    raise UsageError(f"got the accelerator {text!r}; {_closest(wanted, names)}, or a .toml file")


def _connected(text: str, word: str) -> tuple[str, int]:
    """Field of `Hardware` and its value, of an option after the name."""
    key, _, given = word.partition("=")
    known = {"node": ("node", 1)} | {name: (f"{name}_bytes_per_second", 10**9) for name in ("network", "link", "host")}
    try:
        name, unit = known[key]
        exact = Decimal(given) * unit
        value = 0 if unit == 1 and exact % 1 else int(exact)
    except (KeyError, ArithmeticError, ValueError):  # ValueError: not a number
        value = 0
    if value < 1:
        raise _unconnected(text)
    return name, value


def _unconnected(text: str) -> UsageError:
    return UsageError(
        f"got the accelerator {text!r}; expected a name, optionally with ,network=25,link=300,host=50,node=8 (GB/s)"
    )


def usual_hardware(device: Device) -> Hardware:
    """Default accelerator of each device type."""
    return _shipped("cpu-23gb" if device is Device.CPU else "h100-80gb")


@cache
def _shipped(name: str) -> Hardware:
    return _read(_DATA / f"{name}.toml")


def _closest(wanted: str, names: Sequence[str]) -> str:
    from difflib import get_close_matches  # lazy: startup time of the command line

    spelled = {part: name for name in reversed(names) for part in (name, name.rsplit("-", 1)[0])}
    close = dict.fromkeys(spelled[part] for part in get_close_matches(wanted, spelled, n=4, cutoff=0.6))
    return f"the closest are {', '.join(close)}" if close else f"expected one of {', '.join(names)}"


# Hardware files -------------------------------------------------------------------------------------------------------


def _is_number(value: object) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool) and Decimal(value).is_finite()


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 < value <= 1 and float(value) > 0


def _are(fits: Callable[[Any], bool], count: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) == count and all(map(fits, value))


_Kind = tuple[Callable[[Any], bool], str]
"""Check of a value, and what is expected, for messages."""
_ANY: Final[_Kind] = (lambda _: True, "")
_TEXT: Final[_Kind] = (lambda value: isinstance(value, str), "text in quotation marks")
_SIZE: Final[_Kind] = (_TEXT[0], f'{_TEXT[1]}, such as "80GiB"')
_COUNT: Final[_Kind] = (lambda value: type(value) is int and value > 0, "a whole number of 1 or more")
_FLAG: Final[_Kind] = (lambda value: isinstance(value, bool), "true or false")
_NUMBER: Final[_Kind] = (lambda value: _is_number(value) and value > 0, "a number above 0")
_SHARE: Final[_Kind] = (_is_share, "a share above 0 and at most 1")
_EDGES: Final[_Kind] = (_are(lambda value: _is_number(value) and value >= 0, 3), "three numbers, such as [50, 80, 60]")
_SHARES: Final[_Kind] = (_are(_is_share, 2), "shares of a forward and a backward, such as [0.74, 0.61]")
_COLUMNS: Final[_Kind] = (lambda value: type(value) is int and value >= 0, "a whole number, such as edge = 700")
_SIZES: Final = ("memory", "usable", "host_memory")
_SECTIONS: Final = ("teraflops", "gigabytes_per_second", "reached", "microseconds", "edges", "attention", "stacks")
_KINDS: Final[Mapping[str, _Kind]] = {
    **dict.fromkeys(("name", "source", "usable_source", "reached_source", "delays_source", "note"), _TEXT),
    **dict.fromkeys(_SIZES, _SIZE),
    **dict.fromkeys(("units", "node"), _COUNT),
    "synchronous": _FLAG,
    **dict.fromkeys(_SECTIONS, _ANY),
}


def _read(path: Path) -> Hardware:
    who = f"hardware file {path}"
    table = parse_toml(read_text(path, who), who, parse_float=Decimal)
    _check(who, table, _KINDS)
    given: dict[str, Any] = {key: value for key, value in table.items() if key not in _SECTIONS}
    if "memory" not in given:
        raise UsageError(f'{who} has no memory; expected a line such as memory = "80GiB"')
    sizes = {key: _bytes(who, key, given.pop(key)) for key in _SIZES if key in given}
    if "usable" not in sizes:
        sizes["usable"] = int(sizes["memory"] * _UNSTATED_USABLE)
        given["usable_source"] = f"estimated: {_UNSTATED_USABLE:.0%} of memory"
    given |= {f"{key}_bytes": size for key, size in sizes.items()}
    rates = _rates(who, table, "teraflops", [f.name for f in fields(Throughput)], 10**12)
    widths = _rates(who, table, "gigabytes_per_second", _BANDWIDTHS, 10**9)
    given |= {f"{key}_bytes_per_second": width for key, width in widths.items()}
    edges = _section(who, table, "edges", dict.fromkeys((f.name for f in fields(EdgesOf)), _EDGES))
    reached = _reached(who, table, Reached(), Delays())
    return Hardware(
        **{"name": path.stem} | given | reached,
        flops_per_second=Throughput(**rates),
        edges=EdgesOf(**{name: Edges(*map(float, values)) for name, values in edges.items()}),
        stacks=tuple(_stacks(who, table, **reached)),
    )


def _check(where: str, table: Mapping[str, Any], kinds: Mapping[str, _Kind]) -> None:
    """Reject unknown keys, and values of another kind."""
    for key, value in table.items():
        if key not in kinds:
            raise UsageError(f"{where}: got the key {key!r}; expected some of {', '.join(kinds)}")
        fits, expected = kinds[key]
        if not fits(value):
            raise UsageError(f"{where}: got {key} = {value}; expected {expected}")


def _section(who: str, table: Mapping[str, Any], key: str, kinds: Mapping[str, _Kind]) -> Mapping[str, Any]:
    """Return a checked section; empty without one."""
    section = table.get(key, {})
    if not isinstance(section, dict):
        raise UsageError(f"{who}: got {key} = {section}; expected a section [{key}] with some of {', '.join(kinds)}")
    _check(f"{who}, section [{key}]", section, kinds)
    return section


def _bytes(who: str, key: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except UsageError as error:
        raise UsageError(f"{who}: {key}: {error}") from None


def _rates(who: str, table: Mapping[str, Any], key: str, names: Iterable[str], unit: int) -> dict[str, int]:
    """Read the numbers of a section, times ``unit``."""
    given = _section(who, table, key, dict.fromkeys(names, _NUMBER))
    for name, value in given.items():
        if not int(value * unit):
            got = f"got {name} = {value}, which is less than 1 a second"
            raise UsageError(f"{who}, section [{key}]: {got}; expected more")
    return {name: int(value * unit) for name, value in given.items()}


def _reached(who: str, table: Mapping[str, Any], reached: Reached, delays: Delays) -> dict[str, Any]:
    """Efficiencies and latencies of a file or one of its stacks, with the given ones as defaults."""
    shares = _section(who, table, "reached", dict.fromkeys((f.name for f in fields(Reached)), _SHARE))
    names = (*(f.name for f in fields(Delays)), *former_names(Delays).values())
    stated = renamed(Delays, _section(who, table, "microseconds", dict.fromkeys(names, _NUMBER)))
    return {
        "reached": replace(reached, **{name: float(value) for name, value in shares.items()}),
        "delays": replace(delays, **{name: float(value) / 1e6 for name, value in stated.items()}),
        "attention": _attention(who, table),
    }


def _stacks(
    who: str, table: Mapping[str, Any], reached: Reached, delays: Delays, attention: AttentionRates | None
) -> Iterator[SoftwareStack]:
    """Yield the software stacks of a file, with the file's figures as defaults."""
    if not isinstance(section := table.get("stacks", {}), dict):
        raise UsageError(f"{who}: got stacks = {section}; expected sections such as [stacks.NAME]")
    kinds = {"source": _TEXT, **dict.fromkeys(("reached", "microseconds", "attention"), _ANY)}
    for name, own in section.items():
        where = f"{who}, section [stacks.{name}]"
        if not isinstance(own, dict):
            raise UsageError(f"{where}: got {own}; expected a section")
        _check(where, own, kinds)
        found = _reached(where, own, reached, delays)
        found["attention"] = found["attention"] or attention
        yield SoftwareStack(name=name, source=own.get("source", ""), **found)


@lru_cache(maxsize=256)
def _under(hardware: Hardware, stack: str) -> Hardware:
    """Cached device with a stack's figures; those of ``NAME`` for a release ``NAME-VERSION`` without its own."""
    stated = {one.name: one for one in hardware.stacks}
    found = stated.get(stack) or stated.get(stack.rsplit("-", 1)[0])
    if found is None:
        return hardware
    reached, delays, attention = found.reached, found.delays, found.attention
    return replace(hardware, reached=reached, delays=delays, attention=attention, reached_source=found.source)


@lru_cache(maxsize=256)
def slowest(hardware: Hardware, ranks: int) -> Hardware:
    """Return the slowest of so many devices, for which the others wait: `SPREAD`. Its memory is as fast as theirs."""
    from statistics import NormalDist  # lazy: startup time of the command line

    slower = 1 + SPREAD * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))  # the largest of so many, by Blom
    own = {f.name: getattr(hardware.flops_per_second, f.name) for f in fields(Throughput)}
    peaks = {name: peak and round(peak / slower) for name, peak in own.items()}
    return replace(hardware, flops_per_second=Throughput(**peaks))


# Efficiency of fused attention by dtype and head width: the section [attention] of a file
# [attention]
#     edge = 700                # overhead of starting and ending a row of tiles, in columns of scores
#     bf16_128 = [0.74, 0.61]   # heads up to 128 wide: shares of the dtype's peak, forward and backward, without edges
#     mxfp8_128 = [0.45, 0.29]  # of FP8 peak, with query, key and value in FP8
#
# NOTE [ Edges of attention ]
# A kernel processes a row of tiles of scores: it loads queries, loops over keys, and writes an output; backward loops
# over queries for a tile of keys. The time to start and end a row does not depend on its number of columns, nor does
# that of the masked half of a tile. Against cuDNN's own timings (cudnn-frontend, benchmark/sdpa_benchmark_training;
# tests/facts/cudnn_attention.csv) one such number and rates by width are within 8 % in nineteen of twenty cases, 2 % in
# the median; efficiencies of forwards of 2048 and of 16384 tokens differ by half. A window of 128 columns is nearly all
# edge.


WIDTHS: Final = (64, 128, 192)
DTYPES: Final = ("bf16", "mxfp8")
_KEYS: Final = tuple(f"{dtype}_{width}" for dtype in DTYPES for width in WIDTHS)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRates:
    """Efficiency of fused attention on a device with a software stack.

    Args:
        shares: rows of dtype, largest width of a query head, and efficiencies of forward and backward.
    """

    edge: int  # see NOTE [ Edges of attention ]
    shares: tuple[tuple[str, int, float, float], ...]

    def share(self, dtype: str, width: int, *, backward: bool) -> float | None:
        """Share of the dtype's peak; None: not stated. Wider heads than stated use the widest stated ones'."""
        known = [row for row in self.shares if row[0] == dtype]
        fitting = [row for row in known if width <= row[1]] or known[-1:]
        if not fitting:
            return None
        _, _, ahead, back = fitting[0]
        return back if backward else ahead


def _attention(who: str, table: Mapping[str, Any]) -> AttentionRates | None:
    """Read the section [attention]; None without one."""
    if "attention" not in table:
        return None
    section = _section(who, table, "attention", {"edge": _COLUMNS, **dict.fromkeys(_KEYS, _SHARES)})
    if missing := {"edge", "bf16_128"} - section.keys():
        expected = "at least edge = 700 and bf16_128 = [0.74, 0.61]"
        raise UsageError(f"{who}, section [attention]: got no {min(missing)}; expected {expected}")
    shares = []
    for key in filter(section.__contains__, _KEYS):
        (dtype, width), (ahead, back) = key.split("_"), section[key]
        shares.append((dtype, int(width), float(ahead), float(back)))
    return AttentionRates(edge=section["edge"], shares=tuple(shares))


# A device that is slower, or faster, than its file --------------------------------------------------------------------

_COMMUNICATION: Final = ("link", "all_to_all", "network", "host")
_NO_RATES: Final = ("unaligned", "shared")


def slower(hardware: Hardware, *, compute: float, communication: float, host: float) -> Hardware:
    """Return a device whose kernels, transfers and host are slower by these factors."""

    def reached(shares: Reached) -> Reached:
        own = {f.name: getattr(shares, f.name) for f in fields(Reached) if f.name not in _NO_RATES}
        by = dict.fromkeys(own, compute) | dict.fromkeys(_COMMUNICATION, communication) | {"cpu": host}
        return replace(shares, **{name: own[name] / by[name] for name in own if own[name]})

    def attention(rates: AttentionRates | None) -> AttentionRates | None:
        if rates is None:
            return None
        return replace(
            rates, shares=tuple((d, w, ahead / compute, back / compute) for d, w, ahead, back in rates.shares)
        )

    def delays(of: Any) -> Any:
        times = dict.fromkeys(("kernel", "dispatch", "waited", "experts", "expert_gemm", "hook"), host)
        times |= dict.fromkeys(("start", "link", "network"), communication)
        return replace(of, **{name: getattr(of, name) * factor for name, factor in times.items()})

    def all_of(it: Any) -> dict[str, Any]:
        return {"reached": reached(it.reached), "attention": attention(it.attention), "delays": delays(it.delays)}

    stacks = tuple(replace(stack, **all_of(stack)) for stack in hardware.stacks)
    return replace(hardware, stacks=stacks, unit_elements=hardware.unit_elements / compute, **all_of(hardware))
