"""What VeLoRA kept and saved, layer by layer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VeloraRow:
    """One layer. Bytes are of the last training forward (0 before one); ``saved_bytes`` counts 0 where X is kept
    anyway."""

    name: str
    features: int
    sub_token: int
    groups: int
    tokens: int
    exact_bytes: int
    kept_bytes: int
    kept_energy: float | None
    kept_anyway: bool

    @property
    def saved_bytes(self) -> int:
        """Bytes not held between forward and backward thanks to the projection."""
        return 0 if self.kept_anyway else self.exact_bytes - self.kept_bytes


@dataclass(frozen=True)
class VeloraReport:
    """Every layer of a handle; ``str()`` gives a table."""

    rows: list[VeloraRow]

    @property
    def exact_bytes(self) -> int:
        """Bytes the plain layers would keep."""
        return sum(row.exact_bytes for row in self.rows)

    @property
    def kept_bytes(self) -> int:
        """Bytes kept instead."""
        return sum(row.kept_bytes for row in self.rows)

    @property
    def saved_bytes(self) -> int:
        """Bytes saved, layers whose input another layer keeps anyway counted as 0."""
        return sum(row.saved_bytes for row in self.rows)

    def __str__(self) -> str:
        lines = [f"VeLoRA on {len(self.rows)} layers: {self.saved_bytes:,} of {self.exact_bytes:,} bytes saved"]
        for row in self.rows:
            energy = "-" if row.kept_energy is None else f"{row.kept_energy:.3f}"
            note = "  input kept anyway by another layer: nothing saved" if row.kept_anyway else ""
            lines.append(
                f"  {row.name}: {row.features} features in {row.groups} x {row.sub_token}, {row.tokens} tokens, "
                f"{row.exact_bytes:,} -> {row.kept_bytes:,} bytes, kept energy {energy}{note}"
            )
        return "\n".join(lines)
