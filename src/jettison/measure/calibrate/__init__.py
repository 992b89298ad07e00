"""What the machine at hand reaches, measured, as a hardware description that estimates can be made with."""

from jettison.measure.calibrate.fit import Calibration, Comparison
from jettison.measure.calibrate.hardware_file import hardware_toml
from jettison.measure.calibrate.session import calibrate

__all__ = ["Calibration", "Comparison", "calibrate", "hardware_toml"]
