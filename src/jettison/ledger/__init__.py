"""Ledgers of the tensors that a forward saves for backward, and the programs they were recorded from."""

from jettison.core.dtypes import DTYPE_BYTES, dtype_bytes, dtype_name, tensor_bytes
from jettison.ledger.compare import Difference, Discrepancy, compare
from jettison.ledger.ledger import Ledger
from jettison.ledger.program import Anchor, Buffer, Op, Program, Slot, Source
from jettison.ledger.record import ENTRY_FIELDS, Origin, Placement, SavedTensor

__all__ = [
    "DTYPE_BYTES", "ENTRY_FIELDS", "Anchor", "Buffer", "Difference", "Discrepancy", "Ledger", "Op", "Origin",
    "Placement", "Program", "SavedTensor", "Slot", "Source", "compare", "dtype_bytes", "dtype_name", "tensor_bytes",
]  # fmt: skip
