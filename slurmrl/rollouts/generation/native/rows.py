"""What the device knows of the rows of a batch.

R rows, N pages of a row, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from slurmrl.rollouts.generation.native.sequence import Sequence
from slurmrl.tensors.ops.arguments import upload

UNREAD = -1
"""In place of a token that the host has not read: it is the last token of its row."""


class RowState:
    """The page tables and the last tokens of all rows.

    Behind the rows lies one more, the ``spare`` one, for tokens that belong to no sequence.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.spare = rows
        self.tables = torch.zeros((rows + 1, 1), dtype=torch.int64, device=device)
        """[R + 1, N]."""
        self.last = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        """[R + 1]: the token that each row drew last."""
        self._new: list[tuple[int, int, int]] = []
        """Pages that the tables lack: row, place, page."""

    def row(self, sequence: Sequence) -> int:
        """The row of a sequence; its new pages are in the tables after the next ``write``."""
        row, pages = sequence.row, sequence.pages
        assert row is not None
        if sequence.tabled < len(pages):
            self._new += [(row, n, pages[n]) for n in range(sequence.tabled, len(pages))]
            sequence.tabled = len(pages)
        return row

    def write(self) -> bool:
        """Write new pages into the tables. True if the tables have moved in memory."""
        if not self._new:
            return False
        new, self._new = torch.tensor(self._new, dtype=torch.int64), []
        missing = int(new[:, 1].max()) + 1 - self.tables.shape[1]
        if missing > 0:
            self.tables = pad(self.tables, (0, max(missing, self.tables.shape[1])))
        places = new[:, 0] * self.tables.shape[1] + new[:, 1]
        places, pages = upload([places, new[:, 2]], self.tables.device)
        self.tables.view(-1).index_copy_(0, places, pages)
        return missing > 0

    def tokens(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Tokens [T] of rows [T], with those that the host has not read."""
        return torch.where(ids == UNREAD, self.last[rows], ids)
