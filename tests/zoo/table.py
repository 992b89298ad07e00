"""All families, one row each."""

from __future__ import annotations

from zoo import assorted, convolutions, decoders, encoders, graphs, mixtures, oddities, recurrent, sequences, vision
from zoo.entry import Entry

ROOMS = (decoders, mixtures, encoders, sequences, vision, recurrent, convolutions, graphs, oddities, assorted)
TABLE: list[Entry] = [entry for room in ROOMS for entry in room.TABLE]

FAST = frozenset({"custom-function", "pixel-cnn", "vq-ema"})
"""Small ones, of kinds that no other test shows: these are in the default run."""
