"""What a run is: flat keys under the names people already type, checked as a whole before anything is loaded."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import yaml

OUR_OPTIMIZERS = ("ternary_adamw", "adamw", "lomo", "adalomo", "taco_one_sparse")
_LEARNING_RATES = {("full", "ternary_adamw"): 5e-5, ("full", "adamw"): 5e-5, ("full", "adalomo"): 5e-4}
_LORA_RATE = 2e-4
EXACT_SAVINGS = ("loss", "swiglu", "dropout", "shared_adapter_input")
"""What ``exact_savings`` may name: the loss without logits, and those of `leantune.apply_exact_savings`."""
LORA_METHODS = ("lora", "qlora")
"""Those that train adapters on a frozen base."""


@dataclass(frozen=True)
class TrainConfig:
    """The keys of a run that leantune itself reads. ``extra`` holds the other fields of ``trl.SFTConfig`` that were
    set."""

    model_name_or_path: str = ""
    dataset: tuple[str, ...] | str = ""
    """A file, a folder, a hub name, or a list of them."""
    output_dir: str = "runs/leantune"
    method: str = "full"
    """full, lora, qlora (LoRA on a frozen 4-bit base), or auto: what fits memory_budget. A config that sets
    memory_budget and no method means auto."""
    optim: str = "ternary_adamw"
    """ternary_adamw, adamw, lomo, adalomo, taco_one_sparse, or any name transformers knows (adamw_torch...)."""
    learning_rate: float | None = None
    """None: 5e-5 full (AdaLomo 5e-4), 2e-4 LoRA and QLoRA; lomo and taco_one_sparse must be given one."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    adam_epsilon: float = 1e-8
    carry_rank: int = 4
    momentum_planes: int = 1
    block_size: int = 128
    rounding: str | None = None
    master_bits: int | None = None
    fused_backward: bool | None = None
    """None: on for leantune's optimizers, off for transformers'."""
    accumulate: str | None = None
    """Under fused_backward, what sums gradients over micro-batches: float32 (exact) or bfloat16 (rounded)."""
    clip: str | None = None
    """per_tensor, global or none; None: global where max_grad_norm was set, else per_tensor."""
    max_grad_norm: float | None = None
    exact_savings: tuple[str, ...] | bool = True
    """What keeps fewer bytes for backward without changing a number: true, all that the model allows (the loss alone
    where every block is recomputed anyway); some of `EXACT_SAVINGS`; or false."""
    velora_target_modules: tuple[str, ...] | None = None
    velora_num_groups: int = 32
    velora_factored: bool = False
    """Gradients and optimizer states of the targets' weights are kept in the projection's size too."""
    velora_refresh_every: int | None = None
    """Training forwards of a layer after which its direction is set anew; None: the first one stays."""
    velora_min_cosine: float | None = None
    """Layers whose approximate gradient has a lower cosine to the exact one, on the first batch, train exactly."""
    dtype: str = "bfloat16"
    """Storage of the weights: bfloat16, float32 or float16."""
    bf16: bool = False
    """Autocast, for float32 weights."""
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_target_modules: tuple[str, ...] | str = "all-linear"
    dataset_weights: tuple[float, ...] | None = None
    """How often an epoch takes the rows of each dataset of a list: 2 is twice, 0.5 is half of them. None: once."""
    longest_first: bool = False
    """The longest rows in the first step, so that a run which does not fit ends there; the other rows in random order.
    False: the order of transformers' own trainer. ``method: auto`` turns it on."""
    streaming: bool = False
    """Read and tokenise rows while training asks for them; needs max_steps."""
    bnb_4bit_quant_type: str = "nf4"
    """Of method: qlora: nf4 or fp4."""
    bnb_4bit_use_double_quant: bool = True
    """Of method: qlora: the scales of the 4-bit weights are quantised as well (0.37 bits a weight less)."""
    load_in_8bit: bool = False
    """Of method: lora: an 8-bit base."""
    eval_dataset: str | None = None
    eval_split: float | None = None
    """Share of the rows held out when no eval_dataset is given."""
    max_length: int = 1024
    """In tokens; 0, written as auto, is the 99th percentile of the data's lengths."""
    packing: bool = False
    drop_invalid: bool = False
    """Leave out rows that cannot be used, and write them to output_dir/dropped.jsonl, instead of stopping."""
    memory_budget: str | None = None
    """Memory of the device, for example 24GiB: the plan is held against it before training."""
    force: bool = False
    """Train although the plan exceeds memory_budget."""
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    num_train_epochs: float = 1.0
    max_steps: int = -1
    num_samples: int = 0
    """Held-out rows (training rows where none are held out) that the model answers at the end, and every
    ``sample_every`` steps: on the console, in samples.jsonl, and as the share of answers that stop by themselves."""
    sample_every: int | None = None
    sample_tokens: int = 64
    """Where an answer that does not stop is cut."""
    logging_steps: float = 1
    save_steps: float = 500
    save_total_limit: int | None = 2
    seed: int = 42
    parallel: str | None = None
    """Of several processes: ddp, each has the whole model, or fsdp2, each has rows of every weight. None: ddp."""
    resume: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What was understood in another way than written; the header shows it."""
    given: frozenset[str] | None = field(default=None, compare=False)
    """The keys that a file or flags set; None for a TrainConfig made by hand, all of which is meant."""

    def sets(self, key: str) -> bool:
        """Whether ``key`` is known to have been set by the user."""
        return self.given is not None and key in self.given

    def leaves_out(self, key: str) -> bool:
        """Whether ``key`` is known to have been left out by the user; a config made in Python tells neither."""
        return self.given is not None and key not in self.given

    @property
    def sources(self) -> tuple[str, ...]:
        """The names under ``dataset``."""
        return (self.dataset,) if isinstance(self.dataset, str) else self.dataset

    @property
    def ours(self) -> bool:
        """Whether the optimizer is one of leantune's."""
        return self.optim in OUR_OPTIMIZERS

    @property
    def chosen_savings(self) -> tuple[str, ...]:
        """Those of `EXACT_SAVINGS` that are on."""
        if not isinstance(self.exact_savings, bool):
            return self.exact_savings
        if not self.exact_savings:
            return ()
        # A block that is recomputed keeps nothing: savings in it would cost their time for little.
        return ("loss",) if self.checkpoint_every == 1 else EXACT_SAVINGS

    @property
    def checkpoint_every(self) -> int:
        """Every how many blocks one is recomputed in backward; 0: none is."""
        if not self.gradient_checkpointing:
            return 0
        return int((self.extra.get("gradient_checkpointing_kwargs") or {}).get("every_n_layers", 1))

    @property
    def fused(self) -> bool:
        """Whether gradients are applied inside backward."""
        return self.ours if self.fused_backward is None else self.fused_backward

    @property
    def clip_mode(self) -> str:
        """The clipping of a fused run; the header names it."""
        return self.clip or ("per_tensor" if self.max_grad_norm is None else "global")

    @property
    def rate(self) -> float:
        """The learning rate, the default for method and optimizer where none was set."""
        if self.learning_rate is not None:
            return self.learning_rate
        return _LORA_RATE if self.method in LORA_METHODS else _LEARNING_RATES.get((self.method, self.optim), 5e-5)

    def to_yaml(self) -> str:
        """The resolved config as YAML that :func:`load_config` reads back to an equal one (``resume`` and ``force`` are
        not part of it)."""
        left_out = ("extra", "notes", "resume", "given", "force")
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in left_out}
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        values["max_length"] = values["max_length"] or "auto"
        return yaml.safe_dump({**values, **self.extra}, sort_keys=False)
