"""Memory and time of a run from its specification: layers x layout x recompute x step, without torch."""
