"""What exact savings found, and the bytes they saved, module by module."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExactRow:
    """One module. Bytes are of its last training forward (0 before one); a tensor that several modules keep is counted
    at the first."""

    name: str
    saving: str
    """The argument of ``apply_exact_savings`` that switches it."""
    plain_bytes: int
    """Bytes that autograd would have kept of what this module saves."""
    kept_bytes: int
    """Bytes that are kept."""
    recomputed: bool
    """The module was last run inside backward, by gradient checkpointing: between forward and backward nothing is kept
    with or without the saving, which then lowers only the peak of its recomputation."""


@dataclass(frozen=True)
class ExactReport:
    """Every module of a handle, and what was left alone; ``str()`` gives a table."""

    rows: list[ExactRow]
    left: list[tuple[str, str]]
    """(module name, why it stays as it is)"""

    @property
    def plain_bytes(self) -> int:
        """Bytes the plain modules would keep."""
        return sum(row.plain_bytes for row in self.rows)

    @property
    def kept_bytes(self) -> int:
        """Bytes kept instead."""
        return sum(row.kept_bytes for row in self.rows)

    @property
    def saved_bytes(self) -> int:
        """Bytes not held between forward and backward thanks to the savings."""
        return self.plain_bytes - self.kept_bytes

    def by_saving(self) -> dict[str, int]:
        """Modules found for each saving."""
        counts: dict[str, int] = {}
        for row in self.rows:
            counts[row.saving] = counts.get(row.saving, 0) + 1
        return counts

    def __str__(self) -> str:
        found = ", ".join(f"{saving}: {count} modules" for saving, count in self.by_saving().items()) or "nothing found"
        lines = [f"exact savings ({found}): {self.saved_bytes:,} of {self.plain_bytes:,} bytes saved"]
        for row in self.rows:
            if row.plain_bytes or row.kept_bytes:
                note = "  (recomputed by gradient checkpointing)" if row.recomputed else ""
                lines.append(f"  {row.name} ({row.saving}): {row.plain_bytes:,} -> {row.kept_bytes:,} bytes{note}")
        lines.extend(f"  {name}: left alone, {why}" for name, why in self.left)
        return "\n".join(lines)
