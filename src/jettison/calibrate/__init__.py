"""What the machine at hand reaches, measured, as a hardware description that estimates can be made with."""

from jettison.calibrate.fit import Calibration, Comparison
from jettison.calibrate.hardware_file import hardware_toml
from jettison.calibrate.session import calibrate

__all__ = ["Calibration", "Comparison", "calibrate", "hardware_toml"]
