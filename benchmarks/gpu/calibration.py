"""What `jettison doctor --calibrate` finds on the device, and the hardware file that it makes of it."""

from __future__ import annotations

from benchmarks.gpu.cases import Column, Found, Log, slug
from benchmarks.gpu.setting import Setting, name_of
from jettison.core.progress import silent
from jettison.diagnose.machine_calibration import calibrate, calibration_document, doubtful, figures, hardware_toml
from jettison.spec.hardware import hardware


def run(setting: Setting, log: Log, *, quick: bool) -> None:
    """Once. The file is read back, as ``--gpu`` would."""
    log.columns = (Column(title="products off by", key="error", show="{:.1%}".format),)

    def measure() -> Found:
        found = calibrate(str(setting.device), short=True, say=silent)
        path = log.stem.parent / f"gpu-{slug(name_of(setting.device))}.toml"
        path.write_text(hardware_toml(found), encoding="utf-8")
        read = hardware(str(path))
        log.text = [f"As a file for `--gpu`: [{path.name}]({path.name})", "", "| | |", "| --- | --- |"]
        log.text += [f"| {name} | {value} |" for name, value in figures(found)]
        doubt = doubtful(found)
        log.text += ["", doubt] if doubt else []
        same = abs(read.memory_bytes - found.hardware.memory_bytes) < 2**20
        return Found(
            figures={"error": found.error, "calibration": calibration_document(found)},
            problems=[] if same else [f"the file that was written says {read.memory_bytes} bytes of memory"],
        )

    log.case("calibrate", measure, expect=8.0)
