"""Tokens by position: text as bytes, files of token numbers, or a data set of the Hugging Face Hub.

NOTE [ Who reads what ]
Every rank reads all of a small text, so that any difference is found. Of a larger one every rank compares the length,
both ends and places between, and reads its share of blocks; together ranks read every block. So any change of the text
is noticed when a run is resumed, and each rank reads only its share.
"""

from __future__ import annotations

import glob
import hashlib
import operator
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from jettison.core.errors import UsageError
from jettison.train.ranks import World, agreed
from jettison.train.recipe import DataSection

_BLOCK: Final = 1 << 22  # tokens read at once
_PLACES: Final = 1024  # compared between both ends, if a rank does not read all of the text
_SMALL: Final = 16  # blocks: see NOTE [ Who reads what ]
_STDLIB_BYTES: Final = 4_000_000
_BETWEEN: Final = b"\n\n"  # documents of a data set without a tokenizer


@dataclass(frozen=True, eq=False)
class Corpus:
    """One long row of tokens, possibly on disk, split into windows of ``seq``, each read with the token after it. The
    remainder is not used. Raise `UsageError` if there is less than one window.
    """

    tokens: Any  # a numpy array or memory map of unsigned integers
    seq: int

    def __post_init__(self) -> None:
        if self.windows < 1:
            raise UsageError(f"data: got {len(self.tokens)} tokens; expected more than one sequence of {self.seq}")

    @property
    def windows(self) -> int:
        return (len(self.tokens) - 1) // self.seq

    def rows(self, windows: Iterable[int]) -> Tensor:
        """Return these windows, [b, s + 1] of int64."""
        rows = [self.tokens[w * self.seq : (w + 1) * self.seq + 1] for w in windows]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    @property
    def blocks(self) -> int:
        return -(-len(self.tokens) // _BLOCK)

    def block(self, number: int) -> TextDigest:
        part = self.tokens[number * _BLOCK : (number + 1) * _BLOCK]
        highest = int(part.max())
        return TextDigest(digest=_digest(part, highest), highest=highest)

    @cached_property
    def sample(self) -> str:
        """Quick digest of the text: length, ends, and places between."""
        width = max(1, _BLOCK // _PLACES // 16)
        starts = np.linspace(0, max(0, len(self.tokens) - width), _PLACES).astype(np.int64)
        parts = [self.tokens[start : start + width] for start in starts]
        digests = [_digest(part, int(part.max())) for part in parts]
        return hashlib.blake2b("".join([str(len(self.tokens)), *digests]).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True)
class TextDigest:
    """Digest of a text or of a block of it, independent of the storage, and the highest of its tokens."""

    digest: str
    highest: int

    @classmethod
    def of(cls, blocks: Sequence[TextDigest]) -> TextDigest:
        digest = hashlib.blake2b("".join(block.digest for block in blocks).encode(), digest_size=8).hexdigest()
        return cls(digest=digest, highest=max(block.highest for block in blocks))

    def check_vocabulary(self, vocab: int | None) -> None:
        """Raise `UsageError` if a token is not below a vocabulary's size."""
        if vocab is not None and self.highest >= vocab:
            raise UsageError(
                f"data: got the token {self.highest}; the model has a vocabulary of {vocab}. Use the tokenizer that it "
                "is for, or a larger vocabulary"
            )


def surveyed(corpus: Corpus, world: World) -> TextDigest:
    """Read and compare the text: NOTE [ Who reads what ]. All ranks call it. `UsageError` on all if texts differ."""
    is_small, length = corpus.blocks <= _SMALL, len(corpus.tokens)
    own = range(corpus.blocks) if is_small else range(world.rank, corpus.blocks, world.size)
    blocks = world.together(lambda: {number: corpus.block(number) for number in own})
    text = length, corpus.sample, blocks if is_small else None
    expected: tuple[int, str, object] = world.from_leader(lambda: text)
    other = world.first(None if text == expected else (world.rank, length))
    if other is not None:
        raise agreed(
            UsageError(
                f"data: rank {other[0]} has another text than rank 0: {other[1]} tokens and {expected[0]}"
                f"{', of which some differ' if other[1] == expected[0] else ''}; expected the same under one name "
                "on every machine"
            )
        )
    found = world.gathered(blocks, operator.or_)
    return world.from_leader(lambda: TextDigest.of([(found or {})[number] for number in range(corpus.blocks)]))


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Token rows [b, s + 1] on this rank's device, and the seed of every random number drawn on them."""

    rows: Tensor
    seed: int


@dataclass(frozen=True, eq=False)
class Batches:
    """Micro-batches of a run by position: NOTE [ Positions ]."""

    corpus: Corpus
    order: ShuffledOrder | InOrder
    global_batch: int
    micro_batch: int

    def rows(self, step: int, micro: int) -> Tensor:
        """Return micro-batch ``micro`` of the global batch of ``step``, both counted from 0: [b, s + 1] of int64."""
        first = step * self.global_batch + micro * self.micro_batch
        return self.corpus.rows(self.order.window(n) for n in range(first, first + self.micro_batch))

    def share(self, step: int, micros: Iterable[int], device: torch.device, *seeds: int | str) -> list[MicroBatch]:
        """Return these micro-batches of a step, seeded by ``seeds`` and their positions."""
        return [
            MicroBatch(
                rows=self.rows(step, micro).to(device, non_blocking=True), seed=derived_seed(*seeds, step, micro)
            )
            for micro in micros
        ]


def open_corpus(section: DataSection, seq: int) -> Corpus:
    """Open a recipe's tokens. Raise `UsageError` if files are missing, or a package is not installed."""
    match section.kind:
        case "bytes":
            text = b"".join(file.read_bytes() for file in _files(section))
            return Corpus(np.frombuffer(text, dtype=np.uint8), seq)
        case "tokens":
            maps = [_token_map(file, section.dtype) for file in _files(section)]
            return Corpus(maps[0] if len(maps) == 1 else np.concatenate(maps), seq)
        case "stdlib":
            return Corpus(np.frombuffer(standard_library_text(), dtype=np.uint8), seq)
        case _:  # a data set of the Hub
            return Corpus(_hub_tokens(section), seq)


def standard_library_text() -> bytes:
    """Return the standard library's top-level sources, in order, up to a limit. `UsageError` if there are none."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for file in sorted(folder.glob("*.py")):
        text += file.read_bytes()
        if len(text) >= _STDLIB_BYTES:
            break
    if len(text) < 100_000:
        raise UsageError(f"data: there is too little Python source in {folder} to train on")
    return bytes(text[:_STDLIB_BYTES])


def _digest(tokens: Any, highest: int) -> str:
    """Digest of tokens as the smallest sufficient integers, independent of their storage."""
    dtype = "<u1" if highest < 1 << 8 else "<u2" if highest < 1 << 16 else "<u4"
    return hashlib.blake2b(np.ascontiguousarray(tokens, dtype=dtype).data, digest_size=8).hexdigest()


def _files(section: DataSection) -> list[Path]:
    found: list[Path] = []
    for pattern in section.files:
        matches = sorted(Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file())
        if not matches:
            raise UsageError(f"data.files: no file matches {pattern!r}")
        found += matches
    return found


def _token_map(file: Path, dtype: str) -> Any:
    width = np.dtype(dtype).itemsize
    nbytes = file.stat().st_size
    if nbytes == 0 or nbytes % width:
        raise UsageError(f"data.files: {file} has {nbytes} bytes; expected {dtype} numbers of {width} bytes each")
    return np.memmap(file, dtype=dtype, mode="r")


def _hub_tokens(section: DataSection) -> Any:
    """Concatenate all documents of a data set, each ended by the tokenizer's end of text, or by an empty line."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UsageError(f'data.kind "{section.kind}" needs datasets: pip install datasets') from error
    documents = load_dataset(section.name, section.subset, split=section.split)
    if section.column not in documents.column_names:
        raise UsageError(f"data.column: got {section.column!r}; the data set has {', '.join(documents.column_names)}")
    texts = documents[section.column]
    if section.tokenizer is None:
        return np.frombuffer(_BETWEEN.join(text.encode() for text in texts), dtype=np.uint8)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(section.tokenizer)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] + end for text in texts]
    return np.concatenate([np.asarray(row, dtype=np.uint32) for row in rows])


# order of the data, and seeds -----------------------------------------------------------------------------------------
#
# NOTE [ Positions ]
# Data order and random numbers have no state between steps. Sequence n of a run (n = step x global_batch + its place in
# the batch) is a window that `ShuffledOrder` computes from n alone, and random generators are seeded for each
# micro-batch from (seed, step, its number in the global batch). So a run resumed on any layout continues with the same
# sequences, and with the same dropout if micro-batches are the same.


_ROUNDS = 4


def derived_seed(*parts: int | str) -> int:
    """Seed below 2^63 from a position: different for different positions, equal on every machine."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class ShuffledOrder:
    """Order of windows: every one once in each epoch, shuffled anew for each."""

    windows: int
    seed: int

    def window(self, n: int) -> int:
        turn, place = divmod(n, self.windows)
        return _Shuffle(self.windows, derived_seed(self.seed, "order", turn)).at(place)


class InOrder:
    def window(self, n: int) -> int:
        return n


@dataclass(frozen=True)
class _Shuffle:
    """Permutation of range(n), computed point by point: a Feistel network, iterated until the value is within range. It
    needs no memory, unlike a shuffled list of all windows of a large corpus.
    """

    n: int
    key: int

    def at(self, place: int) -> int:
        while True:
            place = self._pass(place)
            if place < self.n:
                return place

    @cached_property
    def _half(self) -> int:
        return max(1, ((self.n - 1).bit_length() + 1) // 2)

    def _pass(self, place: int) -> int:
        mask = (1 << self._half) - 1
        left, right = place >> self._half, place & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (derived_seed(self.key, number, right) & mask)
        return left << self._half | right
