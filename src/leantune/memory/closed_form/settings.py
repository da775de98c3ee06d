"""What of a run decides its memory, in plain values: the input of a closed-form plan beside the model's shape."""

from dataclasses import dataclass, field, replace
from typing import Any

from leantune.errors import InvalidArgumentError

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
METHODS = ("full", "lora", "qlora")
NF4_BLOCK = 64
NESTED_BLOCK = 256


@dataclass(frozen=True)
class RunSettings:
    """Everything about a run that changes its memory. Every figure made of it is for ``batch_size`` x ``length``."""

    batch_size: int = 8
    length: int = 1024
    padded: bool = False
    """Rows of a batch differ in length, or are packed: attention gets a mask."""
    micro_batches: int = 1
    method: str = "full"
    dtype: str = "bfloat16"
    """Of the weights, adapters left aside."""
    optim: str = "ternary_adamw"
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    fused: bool = True
    two_passes: bool = False
    accumulate: str | None = None
    exact_loss: bool = True
    checkpoint_every: int = 0
    """Every how many blocks one keeps its input alone; 0: none does, 1: each."""
    lora_rank: int = 16
    lora_targets: tuple[str, ...] | str = "all-linear"
    lora_dropout: float = 0.0
    adapter_dtype: str = "float32"
    velora_targets: tuple[str, ...] = ()
    velora_groups: int = 32
    swiglu: bool = False
    """Exact saving: the activation and the gated product of an MLP are made again in backward."""
    dropout: bool = False
    """Exact saving: dropout masks are drawn again from the generator's state."""
    shared_adapter_input: bool = False
    """Exact saving: adapters that read one tensor keep it once, in the weights' dtype."""
    nested_quantisation: bool = True
    """Of 4-bit weights: their scales are 8-bit."""
    cuda: bool = True
    """On an NVIDIA GPU; else on a CPU, where 16-bit products of the loss are widened."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "length", "micro_batches", "lora_rank", "velora_groups"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.method not in METHODS:
            raise InvalidArgumentError(f"method is {self.method!r}; write one of {', '.join(METHODS)}")
        if self.dtype not in ITEM_BYTES:
            raise InvalidArgumentError(f"dtype is {self.dtype!r}; write one of {', '.join(ITEM_BYTES)}")

    def with_rows(self, rows: int) -> "RunSettings":
        """The same with ``rows`` in a batch; rows of more than one are taken to differ in length."""
        return replace(self, batch_size=rows, padded=self.padded or (self.batch_size == 1 and rows > 1))

    @property
    def tokens(self) -> int:
        """In a micro-batch."""
        return self.batch_size * self.length

    @property
    def item_bytes(self) -> int:
        """Of a weight, and of a hidden state."""
        return ITEM_BYTES[self.dtype]

    @property
    def adapts(self) -> bool:
        """Adapters are trained, and nothing else."""
        return self.method != "full"

    @property
    def where(self) -> str:
        """Batch and length, as every figure must be read. Example: "2 x 512 tokens, 4 micro-batches a step"."""
        text = f"{self.batch_size} x {self.length} tokens"
        return text if self.micro_batches == 1 else f"{text}, {self.micro_batches} micro-batches a step"


EXACT_SAVINGS: dict[str, Any] = dict.fromkeys(("exact_loss", "swiglu", "dropout", "shared_adapter_input"), True)
"""All exact savings on, as fields of `RunSettings`."""
NO_SAVINGS: dict[str, Any] = dict.fromkeys(EXACT_SAVINGS, False)
LOSS_ALONE: dict[str, Any] = NO_SAVINGS | {"exact_loss": True}
"""What a config's ``exact_savings: true`` means where every block is recomputed."""


def quantised_bytes(elements: int, nested: bool) -> int:
    """Bytes of a 4-bit weight: half a byte an element and a scale for every 64: fp32, or nested 8-bit ones.

    Nested scales have an fp32 scale for every 256 of them, a mean and a code of 256 fp32 numbers; each weight has a
    code of 16 numbers (bitsandbytes' layout).

    >>> [round(quantised_bytes(4096 * 4096, nested) / 4096**2, 4) for nested in (False, True)]
    [0.5625, 0.5159]
    """
    blocks = -(-elements // NF4_BLOCK)
    packed, code = -(-elements // 2), 16 * 4
    if not nested:
        return packed + 4 * blocks + code
    return packed + blocks + 4 * -(-blocks // NESTED_BLOCK) + 4 + 256 * 4 + code
