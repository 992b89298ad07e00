"""The report room: how results are shown, and the documents that say so. Nothing here needs torch."""

from jettison.report.proof import LayerProof, Proof

__all__ = ["LayerProof", "Proof"]
