"""What can be asked of a server: for its page, and for programs."""

from __future__ import annotations

from typing import Any

from jettison.server.limits import Limits
from jettison.server.questions import Service
from jettison.spec.hardware import hardware_names
from jettison.spec.presets import PRESETS


def offer(limits: Limits, service: Service) -> dict[str, Any]:
    """Verbs, models, GPUs, and the limits."""
    return {
        "schema": "jettison.serve/1",
        "verbs": list(service.forms),
        "models": list(PRESETS),
        "gpus": list(hardware_names()),
        "limits": {name: getattr(limits, name) for name in limits.__slots__},
    }
