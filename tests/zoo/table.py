"""All families, one row each."""

from __future__ import annotations

from zoo import assorted, convolutions, decoders, encoders, graphs, mixtures, oddities, recurrent, sequences, vision
from zoo.entry import Entry

ROOMS = (decoders, mixtures, encoders, sequences, vision, recurrent, convolutions, graphs, oddities, assorted)
TABLE: list[Entry] = [entry for room in ROOMS for entry in room.TABLE]

FAST = frozenset(
    {
        "all-complex", "custom-function", "dataclass-blocks", "gnn-index-add", "gru-cells", "llama", "mask-gather",
        "pixel-cnn", "real-nvp", "stochastic-depth-python", "value-residual", "vq-ema",
    }
)  # fmt: skip
"""Small ones, of a dozen kinds: these are in the default run."""
