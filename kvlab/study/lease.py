"""The beat of a unit under way: a thread renews its lease until the unit is left, lost, or hangs.

Hanging is told by pieces: after `limit_s` in one piece the thread stops renewing, the lease runs out, and somebody else
takes the unit up.
"""

import threading
import time

from kvlab.study.board import Board
from kvlab.study.unit import Unit

PIECE_LIMIT_S = 1800.0
_BEATS = 4  # in the length of a lease: three may be missed


class Lease:
    """Renews while the `with` block runs. `lost` says that the unit is no longer ours."""

    def __init__(self, board: Board, unit: Unit, limit_s: float = PIECE_LIMIT_S) -> None:
        self.board, self.unit, self.limit_s = board, unit, limit_s
        self.lost = False
        self._left = threading.Event()
        self._since = time.monotonic()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> "Lease":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._left.set()
        self._thread.join()

    def begin(self) -> None:
        """A new piece: its time counts from now."""
        self._since = time.monotonic()

    def _renew(self) -> None:
        beat = 0
        while not self._left.wait(self.board.lease_s / _BEATS):
            if time.monotonic() - self._since > self.limit_s:
                return
            beat += 1
            try:
                self.lost = not self.board.renew(self.unit, beat)
            except Exception as error:
                if not self.board.storage.away(error):
                    raise
            if self.lost:
                return
