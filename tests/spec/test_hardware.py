"""Accelerators: what ships is sourced and plausible, what a user writes is read or refused in one line."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from jettison import spec
from jettison.core.errors import UsageError
from jettison.core.units import GIB, MIB
from jettison.spec.hardware import Delays, Edges, EdgesOf, Reached, hardware, hardware_names

NAMES = (
    "a10-24gb",
    "a100-40gb",
    "a100-64gb",
    "a100-80gb",
    "a40-48gb",
    "b200-192gb",
    "b300-288gb",
    "cpu-23gb",
    "gb200-192gb",
    "gb300-288gb",
    "gh200-96gb",
    "gh200x4-96gb",
    "h100-64gb",
    "h100-80gb",
    "h100-96gb",
    "h100-pcie-80gb",
    "h20-96gb",
    "h200-141gb",
    "h800-80gb",
    "l4-24gb",
    "l40-48gb",
    "l40s-48gb",
    "mi300x-192gb",
    "rtx2080ti-11gb",
    "rtx3080-10gb",
    "rtx3090-24gb",
    "rtx4080-16gb",
    "rtx4090-24gb",
    "rtx5080-16gb",
    "rtx5090-32gb",
    "rtx6000ada-48gb",
    "rtxa6000-48gb",
    "rtxpro6000-96gb",
    "t4-16gb",
    "tpu-v5p-95gb",
    "v100-16gb",
    "v100-32gb",
)
WITHOUT_BF16 = ("v100-16gb", "v100-32gb", "t4-16gb", "rtx2080ti-11gb")
"""Tensor cores from before bf16: their 16-bit rates are fp16's."""


def test_what_ships() -> None:
    assert hardware_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source_and_the_memory_of_its_name(name: str) -> None:
    device = hardware(name)
    assert device.name == name
    assert device.source and device.usable_source and device.reached_source
    assert device.memory_bytes // GIB == int(name.rsplit("-", 1)[1].removesuffix("gb"))
    assert bool(device.note) == (name in WITHOUT_BF16)
    assert 0.9 < device.usable_bytes / device.memory_bytes <= 1


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("cpu")])
def test_every_bandwidth_but_the_memorys_says_what_it_is_of(name: str) -> None:
    """The sources cover rates and memory; a link, an adapter and a host are named in the line."""
    lines = (Path(spec.__file__).parent / "hardware_data" / f"{name}.toml").read_text().splitlines()
    stated = [line for line in lines if line.split(" = ")[0] in ("link", "host", "network", "host_memory")]
    bandwidths = [line for line in stated if not line.startswith("link = 0.")]  # under [reached]
    assert bandwidths and all("#" in line for line in bandwidths), bandwidths


@pytest.mark.parametrize(
    ("name", "teraflops", "gigabytes", "usable"),
    [
        ("v100-32gb", 125, 900, 31.74),
        ("a10-24gb", 125, 600, 22.20),
        ("t4-16gb", 65, 320, 14.58),
        ("l4-24gb", 121, 300, 22.03),
        ("l40-48gb", 181.05, 864, 44.34),
        ("h20-96gb", 148, 4000, 95.22),
        ("gh200-96gb", 990, 4000, 94.50),
        ("gh200x4-96gb", 990, 4000, 94.50),
        ("b300-288gb", 2250, 8000, 267.69),
        ("a100-64gb", 358.2, 1631, 63.42),
        ("h100-64gb", 989.4, 1631, 63.59),
        ("rtx3090-24gb", 71, 936, 23.69),
        ("rtx5080-16gb", 112.6, 960, 15.47),
    ],
)
def test_figures_of_cards_one_by_one(name: str, teraflops: float, gigabytes: int, usable: float) -> None:
    device = hardware(name)
    rates = device.flops_per_second
    assert (rates.fp16 or rates.bf16) == round(teraflops * 10**12)
    assert device.memory_bytes_per_second == gigabytes * 10**9
    assert device.usable_bytes / GIB == pytest.approx(usable, abs=1e-6)


CLOCKS = {
    "v100-16gb": (1530, 512, 64),
    "v100-32gb": (1530, 512, 64),
    "t4-16gb": (1590, 512, 64),
    "rtx2080ti-11gb": (1545, 256, 64),
    "a10-24gb": (1695, 512, 128),
    "a100-64gb": (1410, 1024, 64),
    "a40-48gb": (1740, 512, 128),
    "rtxa6000-48gb": (1800, 512, 128),
    "rtx3080-10gb": (1710, 256, 128),
    "rtx3090-24gb": (1695, 256, 128),
    "l4-24gb": (2040, 512, 128),
    "l40-48gb": (2490, 256, 128),
    "l40s-48gb": (2520, 512, 128),
    "rtx6000ada-48gb": (2505, 512, 128),
    "rtx4080-16gb": (2505, 256, 128),
    "rtx4090-24gb": (2520, 256, 128),
    "rtx5080-16gb": (2617, 256, 128),
    "rtx5090-32gb": (2407, 256, 128),
    "rtxpro6000-96gb": (2617, 512, 128),
}
"""MHz, and what a multiprocessor multiplies and adds in a clock: of 16-bit products that add up in fp32, of fp32."""


@pytest.mark.parametrize("name", CLOCKS)
def test_rates_are_multiprocessors_times_clock(name: str) -> None:
    device, (clock, of_16_bits, of_fp32) = hardware(name), CLOCKS[name]
    rates, hertz = device.flops_per_second, 2 * device.units * clock * 10**6
    assert (rates.fp16 or rates.bf16) == pytest.approx(hertz * of_16_bits, rel=0.015)
    assert rates.fp32 == pytest.approx(hertz * of_fp32, rel=0.01)
    assert rates.tf32 is None or rates.tf32 == pytest.approx(hertz * of_16_bits / 2, rel=0.015)
    assert rates.fp4 is None or rates.fp4 == pytest.approx(hertz * 2048, rel=0.005)  # no slower on a GeForce


def test_what_a_card_lacks_is_said_with_its_times() -> None:
    from jettison.cli.estimate import EstimateFlags, estimate
    from jettison.request.options import RunRequest

    assert any("no bf16" in line for line in estimate("gpt2", RunRequest(seq=64), EstimateFlags(gpu="t4")).warnings)
    assert not any(
        "no bf16" in line for line in estimate("gpt2", RunRequest(seq=64), EstimateFlags(gpu="a100-80gb")).warnings
    )


def test_hosts() -> None:
    assert hardware("gb200-192gb").host_memory_bytes == 240 * 10**9
    assert hardware("a100-80gb").host_memory_bytes == hardware("h100-80gb").host_memory_bytes == 256 * GIB
    for name in ("rtx4090-24gb", "l40s-48gb", "mi300x-192gb"):  # of whoever built the machine
        assert hardware(name).host_memory_bytes is None


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(("tpu", "cpu"))])
def test_each_narrower_type_is_at_least_as_fast(name: str) -> None:
    rates = hardware(name).flops_per_second
    known = [rate for rate in (rates.fp32, rates.tf32, rates.bf16, rates.fp8, rates.fp4) if rate is not None]
    assert len(known) >= (2 if name in WITHOUT_BF16 else 3) and known == sorted(known)
    assert rates.bf16 is not None
    assert rates.fp8 is None or round(rates.fp8 / rates.bf16, 1) == 2.0


def test_figures_of_data_sheets() -> None:
    a100, h100, tpu = hardware("a100-80gb"), hardware("h100-80gb"), hardware("tpu-v5p-95gb")
    assert a100.flops_per_second.bf16 == 312 * 10**12
    assert a100.memory_bytes_per_second == 2039 * 10**9
    assert h100.flops_per_second.bf16 == 989_400_000_000_000  # exact: read as decimals, not as floats
    assert h100.usable_bytes == 81082 * MIB
    assert (h100.link_bytes_per_second, h100.network_bytes_per_second) == (450 * 10**9, 50 * 10**9)
    assert tpu.flops_per_second.fp8 is None and tpu.host_bytes_per_second is None


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("cpu")])
def test_what_is_reached_is_plausible(name: str) -> None:
    device = hardware(name)
    reached, delays = device.reached, device.delays
    assert all(0.1 <= share <= 1 for share in (reached.matmul, reached.memory, reached.link, reached.network))
    assert reached.attention_backward <= reached.attention <= reached.matmul
    assert reached.matmul_fp8 <= 1.05 * reached.matmul or device.flops_per_second.fp8 is None
    assert 0 < delays.kernel <= delays.dispatch < 1e-4 and 0 < delays.link <= delays.network < 1e-4
    assert device.units > 1 or name.startswith("tpu")


def test_a_file_with_what_is_reached(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'memory = "64GiB"\nunits = 100\nnode = 4\nreached_source = "measured"\n'
        "[reached]\nmatmul = 0.5\nshared = 0.25\n[microseconds]\nkernel = 3\nproduct = 33\n"
        "[edges]\nfp32 = [50, 80.5, 0]\n"
    )
    device = hardware(file)
    assert (device.units, device.node, device.reached_source) == (100, 4, "measured")
    assert (device.reached.matmul, device.reached.shared, device.reached.memory) == (0.5, 0.25, 0.85)
    assert device.delays.kernel == 3e-6 and device.delays.network == 14e-6
    assert device.delays.expert_gemm == 33e-6  # by its former name
    assert device.edges == EdgesOf(fp32=Edges(50, 80.5, 0))


def test_the_page_on_times_names_the_keys_that_files_have() -> None:
    page = (Path(__file__).parents[2] / "docs" / "time.md").read_text(encoding="utf-8")
    table = page.split("| key | default | meaning |")[1].split("\n\n")[0]
    told = {key for row in table.splitlines() if row for key in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert told == {field.name for kind in (Reached, Delays) for field in fields(kind)}


@pytest.mark.parametrize(
    ("short", "name"),
    [("h200", "h200-141gb"), ("MI300X", "mi300x-192gb"), ("tpu_v5p", "tpu-v5p-95gb"), ("b200", "b200-192gb")],
)
def test_a_part_that_only_one_name_has(short: str, name: str) -> None:
    assert hardware(short).name == name


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("a100", "may be a100-40gb or a100-64gb or a100-80gb"),
        ("h100", "may be h100-64gb or h100-80gb or h100-96gb or h100-pcie-80gb"),
        ("4090", "the closest are rtx4090-24gb"),
        ("mi300", "the closest are mi300x-192gb"),
        ("cray-1", "expected one of a10-24gb, a100-40gb, a100-64gb"),
    ],
)
def test_other_names_are_refused_with_a_choice(word: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        hardware(word)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'memory = "64GiB"\nusable = "60 GB"\nhost_memory = "1TiB"\nsource = "me"\n'
        "[teraflops]\nbf16 = 123.4\nfp8 = 246\n[gigabytes_per_second]\nlink = 0.5\n"
    )
    for given in (file, str(file)):
        device = hardware(given)
        assert (device.name, device.memory_bytes, device.usable_bytes) == ("mine", 64 * GIB, 60 * 10**9)
        assert (device.flops_per_second.bf16, device.flops_per_second.fp8) == (123_400_000_000_000, 246 * 10**12)
        assert (device.link_bytes_per_second, device.memory_bytes_per_second) == (500_000_000, None)
        assert device.host_memory_bytes == 1024 * GIB


def test_what_is_usable_is_estimated_where_a_file_does_not_say(tmp_path: Path) -> None:
    file = tmp_path / "short.toml"
    file.write_text('memory = "100GB"\nname = "mine"\n')
    device = hardware(file)
    assert (device.name, device.usable_bytes) == ("mine", 98 * 10**9)
    assert device.usable_source == "estimated: 98% of memory"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("memory = ", "is not TOML"),
        ("", "has no memory; expected a line such as"),
        ('usable = "1GiB"', "has no memory; expected a line such as"),
        ("memory = 80", 'expected text in quotation marks, such as "80GiB"'),
        ('memory = "80"', "without a unit"),
        ('memory = "80 gallons"', "gallons"),
        ('memory = "80GiB"\nmemroy = "1GiB"', "got the key 'memroy'"),
        ('memory = "80GiB"\nusable = "81GiB"', "more than 0 and at most all of it"),
        ('memory = "80GiB"\nteraflops = 3', "expected a section [teraflops]"),
        ('memory = "80GiB"\nunits = 1.5', "a whole number of 1 or more"),
        ('memory = "80GiB"\nnode = 0', "a whole number of 1 or more"),
        ('memory = "80GiB"\n[reached]\nmatmul = 1.2', "a share above 0 and at most 1"),
        ('memory = "80GiB"\n[reached]\nmatmuls = 0.2', "got the key 'matmuls'"),
        ('memory = "80GiB"\n[microseconds]\nkernel = -1', "expected a number above 0"),
        ('memory = "80GiB"\n[teraflops]\nbf61 = 3', "got the key 'bf61'"),
        ('memory = "80GiB"\n[teraflops]\nbf16 = "3"', "got bf16 = 3"),
        ('memory = "80GiB"\n[teraflops]\nbf16 = true', "expected a number above 0"),
        ('memory = "80GiB"\n[gigabytes_per_second]\nlink = 0', "expected a number above 0"),
        ('memory = "80GiB"\nedges = 3', "expected a section [edges]"),
        ('memory = "80GiB"\n[edges]\nfp23 = [1, 2, 3]', "got the key 'fp23'"),
        ('memory = "80GiB"\n[edges]\nfp32 = [1, 2]', "expected three numbers"),
        ('memory = "80GiB"\n[edges]\nfp32 = [1, 2, -3]', "expected three numbers"),
        ('memory = "80GiB"\n[edges]\nfp32 = 50', "expected three numbers"),
        ('memory = "80GiB"\n[gigabytes_per_second]\nlink = nan', "expected a number above 0"),
        ('memory = "80GiB"\n[gigabytes_per_second]\nhost = 1e-10', "got host = 1E-10, which is less than 1 a second"),
        ('memory = "80GiB"\n[reached]\nhost = 1e-400', "expected a share above 0 and at most 1"),
    ],
)
def test_a_file_that_is_not_one_is_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        hardware(file)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            hardware(path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        hardware(tmp_path / "bytes.toml")


def test_clusters_differ_in_what_connects_the_same_devices() -> None:
    found = hardware("a100-80gb,network=6.25,node=4,link=100,host=25")
    assert (found.network_bytes_per_second, found.node, found.link_bytes_per_second) == (6_250_000_000, 4, 10**11)
    assert found.host_bytes_per_second == 25 * 10**9
    assert (found.name, found.usable_bytes) == ("a100-80gb", hardware("a100-80gb").usable_bytes)
    for wrong in (
        "a100-80gb,network=0",
        "a100-80gb,network=nan",
        "a100-80gb network=6",
        "a100-80gb,node=1.5",
        "a100-80gb,node=4,node=8",
        "a100-80gb,adapters=4",
        "a100-80gb,network=fast",
        "a100-80gb,node=",
    ):
        with pytest.raises(UsageError, match="expected a name, optionally with ,network=25"):
            hardware(wrong)
