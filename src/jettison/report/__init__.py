"""The report room: how results are shown, and the documents that say so. Nothing here needs torch."""

from jettison.report.proof import LayerProof, Proof
from jettison.report.summary import LedgerReport, Phase, StageBytes

__all__ = ["LayerProof", "LedgerReport", "Phase", "Proof", "StageBytes"]
