"""Tokenised rows on their way from text to training: written to a file as they come, mapped into memory afterwards."""

import shutil
import tempfile
import weakref
from array import array
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import compute

from leantune.training.data.chat import IGNORED
from leantune.training.data.problems import Place

_ROWS_A_BATCH, _TOKENS_A_BATCH = 1000, 2**17
_SCHEMA = pyarrow.schema([("input_ids", pyarrow.list_(pyarrow.int32())), ("labels", pyarrow.list_(pyarrow.int32()))])


class TokenRows:
    """Rows of ``input_ids`` and ``labels``, and what is known of each without reading it again.

    Memory: 56 bytes a row, and one batch of rows (at most 1,000, of about 2^17 tokens); the tokens (8 bytes each) lie
    in a file in the folder for temporary files (TMPDIR), which is removed when nothing refers to this object any more,
    or the process ends.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="leantune-rows-"))
        # The file's mapping stays valid after its name is gone.
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._path = self.folder / "rows.arrow"
        self._sink = pyarrow.OSFile(str(self._path), "wb")
        self._writer = pyarrow.ipc.new_stream(self._sink, _SCHEMA)
        self._ids: list[list[int]] = []
        self._labels: list[list[int]] = []
        self._waiting = 0
        self._files: list[str] = []
        self.lengths = array("q")
        self.trained = array("q")
        """Tokens of each row that are learnt."""
        self.starts = array("q")
        """Where the first of them stands: a row cut at or before it teaches nothing."""
        self.digests = array("Q")
        """Equal for equal rows."""
        self._places = array("q")
        self._mapped: Any = None

    def append(self, place: Place, ids: list[int], labels: list[int], start: int) -> None:
        """Add one row; ``start`` is the place of the first token that is learnt."""
        self._ids.append(ids)
        self._labels.append(labels)
        self.lengths.append(len(ids))
        self.trained.append(len(labels) - labels.count(IGNORED) - (labels[0] != IGNORED))
        self.starts.append(start)
        digest = blake2b(array("q", ids).tobytes(), digest_size=8).digest()
        self.digests.append(int.from_bytes(digest, "little"))
        if not self._files or self._files[-1] != place.file:
            self._files.append(place.file)
        self._places.extend((len(self._files) - 1, place.line or 0, place.row or 0))
        self._waiting += len(ids)
        if len(self._ids) == _ROWS_A_BATCH or self._waiting >= _TOKENS_A_BATCH:
            self._write()

    def __len__(self) -> int:
        return len(self.lengths)

    def place(self, number: int) -> Place:
        """Where row ``number`` (from 0) was read."""
        file, line, row = self._places[3 * number : 3 * number + 3]
        return Place(self._files[file], line or None, row or None)

    def text(self, number: int, tokenizer: Any) -> str:
        """Row ``number`` as text again."""
        return str(tokenizer.decode(self.dataset()[number]["input_ids"]))

    def dataset(self, limit: int | None = None) -> Any:
        """A datasets.Dataset of all rows, cut after ``limit`` tokens, mapped from the file: it takes no memory.

        No row can be added afterwards.
        """
        from datasets import Dataset

        if self._mapped is None:
            self._write()
            self._writer.close()
            self._sink.close()
            self._mapped = Dataset.from_file(str(self._path))
        if limit is None or max(self.lengths, default=0) <= limit:
            return self._mapped
        cut = self.folder / "cut.arrow"
        with pyarrow.OSFile(str(cut), "wb") as sink, pyarrow.ipc.new_stream(sink, _SCHEMA) as writer:
            for batch in self._mapped.with_format("arrow").iter(_ROWS_A_BATCH):
                columns = [compute.list_slice(batch[name], 0, limit) for name in _SCHEMA.names]
                writer.write_table(pyarrow.table(columns, schema=_SCHEMA))
        return Dataset.from_file(str(cut))

    def _write(self) -> None:
        self._writer.write_batch(pyarrow.record_batch([self._ids, self._labels], schema=_SCHEMA))
        self._ids.clear()
        self._labels.clear()
        self._waiting = 0
