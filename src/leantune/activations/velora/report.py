"""What VeLoRA kept and saved, site by site."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VeloraRow:
    """One site. Bytes are of the last training forward (0 before one); ``saved_bytes`` counts 0 where X is kept
    anyway."""

    name: str
    features: int
    sub_token: int
    groups: int
    tokens: int
    exact_bytes: int
    """Kept by the plain layer; of targets that read one tensor, the first counts it."""
    kept_bytes: int
    kept_energy: float | None
    """|Z|^2 / |X|^2 of the batch that set v."""
    kept_by: str | None
    """Who keeps X whatever VeLoRA does, None where nobody does."""
    cosine: float | None = None
    """Of the approximate to the exact weight gradient, in the last probe."""
    exact: bool = False
    """The layer fell back to its exact gradient."""
    block: str | None = None
    """The checkpointed block it lies in, where a module says that it is one."""

    @property
    def kept_anyway(self) -> bool:
        """Whether the input is kept whatever VeLoRA does."""
        return self.kept_by is not None

    @property
    def saved_bytes(self) -> int:
        """Bytes not held between forward and backward thanks to the projection."""
        return 0 if self.kept_anyway or self.exact else self.exact_bytes - self.kept_bytes


@dataclass(frozen=True)
class VeloraReport:
    """Every site of a handle; ``str()`` gives a table."""

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

    @property
    def recomputation_bytes(self) -> int:
        """Of layers in checkpointed blocks: what they keep less while the block where that is most is recomputed."""
        blocks: dict[str, int] = {}
        for row in self.rows:
            if row.block is not None and not row.exact:
                blocks[row.block] = blocks.get(row.block, 0) + row.exact_bytes - row.kept_bytes
        return max(blocks.values(), default=0)

    def __str__(self) -> str:
        lines = [f"VeLoRA on {len(self.rows)} inputs: {self.saved_bytes:,} of {self.exact_bytes:,} bytes saved"]
        if self.recomputation_bytes:
            lines.append(f"  while a checkpointed block is recomputed: {self.recomputation_bytes:,} bytes less")
        return "\n".join(lines + [_line(row) for row in self.rows])


def _line(row: VeloraRow) -> str:
    note = f"  input {row.kept_by}: nothing saved" if row.kept_by is not None else ""
    if row.exact:
        note = "  exact: its cosine was under the threshold"
    return (
        f"  {row.name}: {row.features} features in {row.groups} x {row.sub_token}, {row.tokens} tokens, "
        f"{row.exact_bytes:,} -> {row.kept_bytes:,} bytes, kept energy {_share(row.kept_energy)}, "
        f"cosine {_share(row.cosine)}{note}"
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
