"""What tests of training share."""

from __future__ import annotations

from pathlib import Path

import pytest

from jettison.spec import hardware


@pytest.fixture
def slow_memory(tmp_path: Path) -> Path:
    """A hardware file of a CPU on which ops on large tensors take long, and copies to a host do not."""
    text = (Path(hardware.__file__).parent / "hardware_data" / "cpu-23gb.toml").read_text()
    assert text.count("memory = 20.46") == 1
    path = tmp_path / "slow.toml"
    path.write_text(text.replace("memory = 20.46", "memory = 0.005\nhost = 50"))
    return path
