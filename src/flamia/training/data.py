"""Text as bytes, documents as files, batches as packed rows.

A document of n bytes b becomes n + 1 predictions: inputs BOS, b[0], ..., b[n-1] and targets
b[0], ..., b[n-1], BOS; the separator is both what opens a document and what closes it.  The
predictions are cut into pieces of at most `context`, the pieces are shuffled, and rows of a fixed
number of tokens are filled with them.  A piece that does not fit in what is left of a row goes on
in the next one, so no prediction is lost and no row is padded.  Each piece is one document to
attention: nothing crosses its edges.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

BOS = 256
VOCABULARY = 257

_SKIPPED_FOLDERS = {"__pycache__", "node_modules"}
_SKIPPED_IN_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


def standard_library() -> Path:
    """The folder of this interpreter's own standard library."""
    return Path(sysconfig.get_path("stdlib"))


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """Every file named or found below `paths`, in a fixed order; hidden files and folders are skipped.

    Raises ValueError for a path that does not exist or a folder without a file.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            found = _walk(path, _SKIPPED_FOLDERS)
            if not found:
                raise ValueError(f"data folder {str(path)!r} holds no files; give a folder or file with text")
            files += found
        else:
            raise ValueError(f"data path {str(path)!r} does not exist; give existing files or folders")
    return files


def _walk(folder: Path, skipped: set[str]) -> list[Path]:
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith("."))
        found += [Path(root, name) for name in sorted(names) if not name.startswith(".")]
    return [path for path in found if path.is_file()]


@dataclass(frozen=True)
class Corpus:
    """Distinct documents (bytes), and an identity that does not depend on where they lie on disk."""

    train: tuple[bytes, ...]
    validation: tuple[bytes, ...]
    source: str
    fingerprint: str

    def describe(self) -> str:
        size = sum(map(len, self.train)), sum(map(len, self.validation))
        return (
            f"{self.source}: {len(self.train)} training documents ({size[0]:,} bytes), "
            f"{len(self.validation)} validation documents ({size[1]:,} bytes)"
        )


def load_corpus(paths: Sequence[str | Path] = (), *, validation_fraction: float = 0.05) -> Corpus:
    """Reads `paths` (files or folders); without any, the sources of Python's standard library.

    One file is one document.  Empty files and exact copies are dropped, so that no validation document is
    also trained on.  Which documents validate is decided by their content's digest alone: the same on every
    machine, for every seed and whatever the file names are.  When there is only one document, its last part
    validates.  The corpus is held in memory.
    """
    if not 0 < validation_fraction < 1:
        raise ValueError(f"validation_fraction is {validation_fraction}; it must lie between 0 and 1")
    if paths:
        files, source = find_files(paths), ", ".join(str(path) for path in paths)
    else:
        library = standard_library()
        files = [path for path in _walk(library, _SKIPPED_FOLDERS | _SKIPPED_IN_LIBRARY) if path.suffix == ".py"]
        source = "Python standard library"
        if not files:
            raise ValueError(f"no Python sources in {str(library)!r}; name a corpus with data (--data)")

    documents: dict[bytes, bytes] = {}
    for path in files:
        content = path.read_bytes()
        if content:
            documents[hashlib.blake2b(content, digest_size=16).digest()] = content
    if not documents:
        raise ValueError(f"data {source!r} holds only empty files; give files with text")

    digests = sorted(documents)
    fingerprint = hashlib.blake2b(b"".join(digests), digest_size=8).hexdigest()
    if len(digests) == 1:
        content = documents[digests[0]]
        if len(content) < 2:
            raise ValueError(f"data {source!r} is a single byte; training needs at least two")
        cut = min(len(content) - 1, max(1, round(len(content) * (1 - validation_fraction))))
        return Corpus((content[:cut],), (content[cut:],), source, fingerprint)
    count = max(1, round(len(digests) * validation_fraction))
    return Corpus(
        tuple(documents[digest] for digest in digests[count:]),
        tuple(documents[digest] for digest in digests[:count]),
        source,
        fingerprint,
    )


@dataclass(frozen=True)
class Row:
    """A packed row: tokens and targets int64 [T], cu_seqlens int32 [pieces + 1]."""

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor

    def to(self, device: torch.device) -> Row:
        if device.type == "cpu":
            return self
        moved = (t.pin_memory().to(device, non_blocking=True) for t in (self.tokens, self.targets, self.cu_seqlens))
        return Row(*moved)


class PackedRows:
    """An endless, resumable stream of packed rows.

    Args:
        documents: the texts; their order matters only together with `seed`.
        tokens: length T of every row.
        context: longest piece, so also a bound for `max_seqlen`.
        seed: order of the pieces; every epoch has its own.
    """

    def __init__(self, documents: Sequence[bytes], *, tokens: int, context: int, seed: int = 0) -> None:
        for name, value in (("tokens", tokens), ("context", context)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if not documents:
            raise ValueError("documents is empty; there is nothing to train on")
        self.tokens, self.context, self.seed = tokens, context, seed

        # All predictions of all documents, one after the other; a document adds its length + 1.
        sizes = torch.tensor([len(document) + 1 for document in documents])
        ends = sizes.cumsum(0)
        self._stream = torch.empty(int(ends[-1]) + 1, dtype=torch.int16)
        for document, end in zip(documents, ends.tolist(), strict=True):
            start = end - len(document) - 1
            self._stream[start] = BOS
            self._stream[start + 1 : end] = torch.frombuffer(bytearray(document), dtype=torch.uint8)
        self._stream[-1] = BOS

        # Pieces: context-sized cuts of every document.
        counts = (sizes + context - 1) // context
        owner = torch.repeat_interleave(torch.arange(len(sizes)), counts)
        within = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts)[owner]
        self._starts = (ends - sizes)[owner] + within * context
        self._stops = torch.minimum(self._starts + context, ends[owner])

        self.epoch, self._piece, self._offset = 0, 0, 0
        self._order = self._shuffle()

    @property
    def predictions(self) -> int:
        """Predictions in one epoch: bytes of all documents plus one per document."""
        return self._stream.numel() - 1

    def _shuffle(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return torch.randperm(self._starts.numel(), generator=generator)

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        spans: list[tuple[int, int]] = []
        offsets = [0]
        while offsets[-1] < self.tokens:
            piece = int(self._order[self._piece])
            start = int(self._starts[piece]) + self._offset
            stop = min(int(self._stops[piece]), start + self.tokens - offsets[-1])
            spans.append((start, stop))
            offsets.append(offsets[-1] + stop - start)
            if stop < int(self._stops[piece]):
                self._offset += stop - start
            else:
                self._offset = 0
                self._piece += 1
                if self._piece == self._order.numel():
                    self._piece = 0
                    self.epoch += 1
                    self._order = self._shuffle()
        tokens = torch.cat([self._stream[start:stop] for start, stop in spans]).long()
        targets = torch.cat([self._stream[start + 1 : stop + 1] for start, stop in spans]).long()
        return Row(tokens, targets, torch.tensor(offsets, dtype=torch.int32))

    def state_dict(self) -> dict[str, int]:
        """Where the stream is; enough, with the same documents and arguments, to go on from there."""
        return {
            "epoch": self.epoch,
            "piece": self._piece,
            "offset": self._offset,
            "seed": self.seed,
            "tokens": self.tokens,
            "context": self.context,
            "predictions": self.predictions,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes to a saved position; ValueError if it belongs to other documents or another packing."""
        for name in ("seed", "tokens", "context", "predictions"):
            if state[name] != getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)}; the saved position needs {state[name]}")
        self.epoch, self._piece, self._offset = state["epoch"], state["piece"], state["offset"]
        self._order = self._shuffle()
