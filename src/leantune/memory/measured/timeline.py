"""What a tracker saw, resolved: bytes of every part after every allocation and free, and the peak's composition."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from leantune.memory.parts import PARTS

FORWARD, BACKWARD, UPDATE_PHASE, OTHER = "forward", "backward", "update", "other"
PHASES = (FORWARD, BACKWARD, UPDATE_PHASE, OTHER)
"""Stages of a step. Updates made inside backward (`FusedBackward`) fall in "backward"."""


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes in use by part over time. Event 0 is the state before anything ran; all arrays have one entry an event."""

    times: npt.NDArray[np.float64]
    """Seconds since tracking started."""
    phases: npt.NDArray[np.int8]
    """Index into `PHASES`."""
    bytes_by_part: dict[str, npt.NDArray[np.int64]]
    """Bytes in use after each event, for each of `leantune.memory.parts.PARTS`."""
    forward_ends: tuple[int, ...] = ()
    """Events after which a backward began: there the saved activations can be read."""

    @property
    def total(self) -> npt.NDArray[np.int64]:
        """Bytes in use after each event, all parts together."""
        return np.sum([self.bytes_by_part[part] for part in PARTS], axis=0, dtype=np.int64)

    @property
    def peak_event(self) -> int:
        """The first event at which the most bytes are in use."""
        return int(np.argmax(self.total))

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use at once, all parts together."""
        return int(self.total[self.peak_event])

    def at(self, event: int) -> dict[str, int]:
        """Bytes of each part after ``event``."""
        return {part: int(self.bytes_by_part[part][event]) for part in PARTS}

    def at_peak(self) -> dict[str, int]:
        """Bytes of each part at the peak of the total: they add up to `peak_bytes`."""
        return self.at(self.peak_event)

    def part_peaks(self) -> dict[str, int]:
        """The most bytes each part uses on its own, whenever that is: together more than `peak_bytes`."""
        return {part: int(self.bytes_by_part[part].max()) for part in PARTS}

    def saved_at_forward_end(self) -> dict[str, int]:
        """Bytes of each part when the backward with the largest total begins; all 0 where no backward was seen."""
        return self.at(self.forward_end) if self.forward_ends else dict.fromkeys(PARTS, 0)

    @property
    def forward_end(self) -> int:
        """The event at which the backward with the largest total begins; there must be one."""
        total = self.total
        return max(self.forward_ends, key=lambda event: int(total[event]))

    def peak_in(self, phase: str) -> dict[str, int]:
        """Bytes of each part at the largest total within one of `PHASES`; all 0 where it was never entered."""
        inside = np.flatnonzero(self.phases == PHASES.index(phase))
        return self.at(int(inside[np.argmax(self.total[inside])])) if len(inside) else dict.fromkeys(PARTS, 0)

    def phase_spans(self) -> list[tuple[str, int, int]]:
        """(phase, first event, last event) of each unbroken stretch of one phase, in order."""
        if len(self.phases) == 0:
            return []
        cuts = [0, *(np.flatnonzero(np.diff(self.phases)) + 1).tolist(), len(self.phases)]
        return [(PHASES[int(self.phases[a])], a, b - 1) for a, b in itertools.pairwise(cuts)]

    def reduced(self, points: int = 2000) -> "MemoryTimeline":
        """At most ``points`` events: of each stretch the one with the largest total, so that no peak is lost."""
        count = len(self.times)
        if count <= points:
            return self
        total = self.total
        cuts = np.linspace(0, count, points + 1).astype(np.int64)
        keep = np.array([a + int(np.argmax(total[a:b])) for a, b in itertools.pairwise(cuts)], dtype=np.int64)
        ends = tuple(int(np.searchsorted(keep, event)) for event in self.forward_ends)
        return MemoryTimeline(
            self.times[keep],
            self.phases[keep],
            {part: series[keep] for part, series in self.bytes_by_part.items()},
            tuple(min(end, len(keep) - 1) for end in ends),
        )

    def final(self) -> dict[str, int]:
        """Bytes of each part after the last event."""
        return self.at(len(self.times) - 1)

    def to_json(self, points: int = 500) -> dict[str, Any]:
        """A JSON-ready summary: exact peaks, and the curve reduced to ``points`` events."""
        curve = self.reduced(points)
        return {
            "peak_bytes": self.peak_bytes,
            "at_peak": self.at_peak(),
            "part_peaks": self.part_peaks(),
            "saved_at_forward_end": self.saved_at_forward_end(),
            "seconds": [round(float(t), 6) for t in curve.times],
            "phases": [PHASES[int(code)] for code in curve.phases],
            "bytes_by_part": {part: curve.bytes_by_part[part].tolist() for part in PARTS},
        }


def resolve(
    times: Sequence[float],
    phases: Sequence[int],
    births: Sequence[int],
    deaths: Sequence[int],
    sizes: Sequence[int],
    parts: Sequence[int],
    forward_ends: Sequence[int],
) -> MemoryTimeline:
    """Build a timeline from allocations.

    Args:
        times, phases: one entry an event.
        births, deaths: for each allocation, the event at which it appears and disappears (-1: it does not).
        sizes: bytes of each allocation.
        parts: index into `PARTS` of each allocation.
    """
    events = len(times)
    change = np.zeros((len(PARTS), events), dtype=np.int64)
    part = np.asarray(parts, dtype=np.int64)
    size = np.asarray(sizes, dtype=np.int64)
    death = np.asarray(deaths, dtype=np.int64)
    np.add.at(change, (part, np.asarray(births, dtype=np.int64)), size)
    dies = death >= 0
    np.subtract.at(change, (part[dies], death[dies]), size[dies])
    level = np.cumsum(change, axis=1)
    return MemoryTimeline(
        np.asarray(times, dtype=np.float64),
        np.asarray(phases, dtype=np.int8),
        {name: level[code] for code, name in enumerate(PARTS)},
        tuple(forward_ends),
    )
