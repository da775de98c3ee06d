"""What a tracker writes down: when each storage appeared and went, how large it was and what it was for."""

import functools
import time
import weakref
from array import array
from typing import Any

from leantune.memory.measured.timeline import OTHER, PHASES, MemoryTimeline, resolve
from leantune.memory.parts import ACTIVATIONS, PARTS

CODE = {part: code for code, part in enumerate(PARTS)}
PHASE = {phase: code for code, phase in enumerate(PHASES)}
UNKNOWN = -1
"""A part that is not known yet."""


class Allocations:
    """Events and allocations, a column for each thing known of them. Sizes in bytes; events are numbered."""

    def __init__(self) -> None:
        # One entry an event.
        self.times = array("d")
        self.phases = array("b")
        # One entry an allocation. `parts` is what is known so far; `guesses` is used where nothing better turns up.
        self.births = array("q")
        self.deaths = array("q")
        self.sizes = array("q")
        self.parts = array("b")
        self.guesses = array("b")
        self.outside = array("b")  # 1: made outside backward and update, so it can be an activation
        self.modules = array("l")
        self.nodes = array("q")  # sequence number of the autograd node that was being evaluated; -1: none
        self.live = 0
        self.phase = PHASE[OTHER]
        self.began = time.perf_counter()
        self.living: dict[int, int] = {}
        """Storage address to allocation."""
        self.absorbed: dict[int, int] = {}
        """Allocations that end, if they are freed at once, at an earlier event (see `MemoryTracker._absorb`)."""
        self._references: dict[int, weakref.ref[Any]] = {}

    def __len__(self) -> int:
        return len(self.sizes)

    def event(self) -> int:
        """Now."""
        self.times.append(time.perf_counter() - self.began)
        self.phases.append(self.phase)
        return len(self.times) - 1

    # -- what comes and goes ------------------------------------------------------------------------------------------

    def add(
        self, storage: Any, size: int, guess: str, part: int, *, birth: int, outside: bool, module: int, node: int
    ) -> int:
        """A storage that is there from the event ``birth`` until it is freed; returns its allocation."""
        allocation = self._append(size, guess, part, birth=birth, death=-1, outside=outside, module=module, node=node)
        key = storage._cdata
        self.living[key] = allocation
        self._references[key] = weakref.ref(storage, functools.partial(self._freed, key, allocation))
        return allocation

    def by_hand(self, size: int, part: str, *, birth: int, death: int, module: int) -> None:
        """Bytes that no storage stands for; `death` -1: for good."""
        self._append(size, part, CODE[part], birth=birth, death=death, outside=False, module=module, node=-1)

    def _append(
        self, size: int, guess: str, part: int, *, birth: int, death: int, outside: bool, module: int, node: int
    ) -> int:
        self.births.append(birth)
        self.deaths.append(death)
        self.sizes.append(size)
        self.parts.append(part)
        self.guesses.append(CODE[guess])
        self.outside.append(1 if outside else 0)
        self.modules.append(module)
        self.nodes.append(node)
        self.live += size
        return len(self.sizes) - 1

    def _freed(self, key: int, allocation: int, _reference: Any) -> None:
        if self.living.get(key) == allocation:
            self.deaths[allocation] = self.absorbed.pop(allocation, -1)
            if self.deaths[allocation] < 0:
                self.deaths[allocation] = self.event()
            self.live -= self.sizes[allocation]
            del self.living[key]
            del self._references[key]

    def resized(self, key: int, allocation: int, size: int) -> None:
        """A storage grew or shrank in place: its old size ends and its new one begins."""
        event = self.event()
        self.deaths[allocation] = event
        grown = len(self.sizes)
        self.births.append(event)
        self.deaths.append(-1)
        self.live += size - self.sizes[allocation]
        self.sizes.append(size)
        for column in (self.parts, self.guesses, self.outside, self.modules, self.nodes):
            column.append(column[allocation])
        self.living[key] = grown
        storage = self._references[key]()
        if storage is not None:
            self._references[key] = weakref.ref(storage, functools.partial(self._freed, key, grown))

    def keep_activations(self) -> None:
        """What forward made and has not freed is what it keeps for backward."""
        for allocation in self.living.values():
            if self.outside[allocation] and self.parts[allocation] == UNKNOWN:
                self.parts[allocation] = CODE[ACTIVATIONS]
                self.outside[allocation] = 0

    def forget_storages(self) -> None:
        """Follow no storage any longer."""
        self._references.clear()
        self.living.clear()

    # -- results ------------------------------------------------------------------------------------------------------

    def known_parts(self) -> list[int]:
        """The part of each allocation, guessed where nothing better turned up."""
        return [guess if part == UNKNOWN else part for part, guess in zip(self.parts, self.guesses)]

    def timeline(self, forward_ends: list[int]) -> MemoryTimeline:
        """Bytes by part after every event."""
        parts = self.known_parts()
        return resolve(self.times, self.phases, self.births, self.deaths, self.sizes, parts, forward_ends)

    def peak_of_passing(self, first: int) -> int:
        """The most bytes in use at once by the allocations from ``first`` on that have come and gone."""
        changes: list[tuple[int, int]] = []
        for allocation in range(first, len(self.sizes)):
            if self.births[allocation] > 0 and self.deaths[allocation] >= 0:
                changes.append((self.births[allocation], self.sizes[allocation]))
                changes.append((self.deaths[allocation], -self.sizes[allocation]))
        level = peak = 0
        for _, change in sorted(changes):
            level += change
            peak = max(peak, level)
        return peak

    def made_from(self, first: int, *, kept: bool = False) -> list[int]:
        """Sizes of the allocations from ``first`` on that tracked code made; ``kept``: those still in use."""
        return [
            self.sizes[allocation]
            for allocation in range(first, len(self.sizes))
            if self.births[allocation] > 0 and not (kept and self.deaths[allocation] >= 0)
        ]
