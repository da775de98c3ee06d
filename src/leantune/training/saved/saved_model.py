"""A model as it lies on disk, whole or as an adapter beside its base, and how it is loaded as it was trained."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from leantune.errors import ConfigError
from leantune.training.checkpoints import holds_model
from leantune.training.config import TrainConfig, build_config, load_config
from leantune.training.quantised_base import check_bitsandbytes, quantisation, settle, wants_quantised_base

ADAPTER_CONFIG = "adapter_config.json"
RESOLVED_CONFIG = "leantune_config.yaml"
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class SavedModel:
    """Where a model lies and what is known of its training; nothing of it is loaded."""

    name: str
    """A folder, or the name of a model of the hub."""
    adapter: bool
    """Whether it is an adapter; ``base`` then names the model that it belongs to, else ``name`` itself."""
    base: str
    run: TrainConfig | None
    """The resolved config of the run that made it, where it lies beside it."""
    run_folder: Path | None
    """The folder of that run: of the model, or the one above a checkpoint."""
    stored_quantised: bool
    """Whether the base's own files are quantised."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights it was trained in; bfloat16 where no run says so."""
        return getattr(torch, self.run.dtype if self.run else TrainConfig.dtype)

    @property
    def quantised(self) -> bool:
        """Whether its base was quantised in training, as far as the files say."""
        return self.stored_quantised or (self.adapter and self.run is not None and wants_quantised_base(self.run))


def find_saved(name: str, base: str | None = None) -> SavedModel:
    """What ``name`` is: the folder of a run or checkpoint, of a model, of a PEFT adapter, or a model of the hub.

    Args:
        name: folder or hub name.
        base: the adapter's base; None: the one that its adapter_config.json names.
    Raises: ConfigError where there is no model, or its base cannot be found.
    """
    folder = Path(name)
    run_folder = _run_folder(folder)
    run = load_config(run_folder / RESOLVED_CONFIG) if run_folder else None
    if folder.is_dir() and not (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"- {name} holds neither a model (config.json) nor an adapter ({ADAPTER_CONFIG}); give the output folder "
            "of a run, one of its checkpoints, or a model"
        )
    if not (folder / ADAPTER_CONFIG).is_file():
        if base is not None:
            raise ConfigError(
                f"- model_name_or_path is the base of an adapter, and {name} is a whole model; leave it out"
            )
        return SavedModel(name, False, name, run, run_folder, _stored_quantised(name))
    if not holds_model(folder):
        raise ConfigError(f"- {name} has an {ADAPTER_CONFIG} and no weights (adapter_model.safetensors) beside it")
    named = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    base = base or named
    if not base:
        raise ConfigError(f"- {name}/{ADAPTER_CONFIG} does not name the base model; give it: --model_name_or_path M")
    return SavedModel(name, True, base, run, run_folder, _stored_quantised(base))


def _run_folder(folder: Path) -> Path | None:
    """The folder with a run's resolved config: this one, or the one above a checkpoint."""
    for place in (folder, folder.parent if folder.name.startswith("checkpoint-") else folder):
        if (place / RESOLVED_CONFIG).is_file():
            return place
    return None


def _stored_quantised(base: str) -> bool:
    return getattr(model_config(base), "quantization_config", None) is not None


def model_config(name: str) -> Any:
    """transformers' config of a model; ConfigError where there is none of that name."""
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"- the model {name!r} cannot be found: {str(error).splitlines()[0]} An adapter's base is given with "
            "--model_name_or_path"
        ) from error


def load_saved(saved: SavedModel, dtype: torch.dtype, device: str, quantised: bool | None = None) -> Any:
    """The model in evaluation mode; an adapter on its base, not merged (peft's PeftModel).

    Args:
        saved: what `find_saved` found.
        dtype: of the weights that are not quantised.
        device: "cpu" or a CUDA device; the whole model goes there.
        quantised: load an adapter's base quantised; None: as it was in training.
    Raises: ConfigError where base and adapter do not belong together.
    """
    model = load_base(saved, dtype, device, quantised)
    return (attach_adapter(saved, model) if saved.adapter else model).eval()


def load_base(saved: SavedModel, dtype: torch.dtype, device: str, quantised: bool | None = None) -> Any:
    """The model, or the base of the adapter, alone; arguments as in `load_saved`."""
    wanted = saved.quantised if quantised is None else quantised
    if saved.stored_quantised and not wanted:
        raise ConfigError(
            f"- the base {saved.base} is stored quantised; give the 16-bit model that it was made from: "
            "--model_name_or_path M"
        )
    settings = None
    if wanted and not saved.stored_quantised:
        settings = quantisation(quantised_run(saved, dtype))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            saved.base, dtype=dtype, device_map={"": device}, quantization_config=settings
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"- the model {saved.base!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    settle(model)
    return model


def quantised_run(saved: SavedModel, dtype: torch.dtype) -> TrainConfig:
    """The run's own settings of its quantised base; where no run says so, QLoRA's defaults (nf4, nested).

    Raises ConfigError where bitsandbytes is missing.
    """
    run = saved.run
    if run is None or not wants_quantised_base(run):
        named = {"model_name_or_path": saved.base, "dataset": "none", "dtype": str(dtype).removeprefix("torch.")}
        run = build_config({**named, "method": "qlora"})
    check_bitsandbytes(run)
    return run


def attach_adapter(saved: SavedModel, base: Any) -> Any:
    """The adapter on ``base``, as peft's PeftModel in evaluation mode.

    Where tokens were added for the adapter, the base's embeddings grow to its.
    """
    from peft import PeftModel

    rows = _embedding_rows(saved, base)
    if rows > base.get_input_embeddings().weight.shape[0]:
        base.resize_token_embeddings(rows, mean_resizing=False)
    try:
        return PeftModel.from_pretrained(base, saved.name).eval()
    except (RuntimeError, ValueError, KeyError) as error:
        reason = "\n  ".join(str(error).splitlines()[:3])
        raise ConfigError(
            f"- the adapter {saved.name} does not fit the base {saved.base}: {reason}\n  Give the model that it was "
            "trained on: --model_name_or_path M"
        ) from error


def _embedding_rows(saved: SavedModel, base: Any) -> int:
    """Rows of the embeddings that the adapter holds whole (trained, or with added tokens); 0 where it holds none."""
    pair = (base.get_input_embeddings(), base.get_output_embeddings())
    names = {name.rpartition(".")[2] for name, module in base.named_modules() if module in pair}
    path = Path(saved.name) / "adapter_model.safetensors"
    if not path.is_file():
        return 0
    with safe_open(path, framework="pt") as file:
        keys = [key for key in file.keys() if key.endswith(".weight") and "lora_" not in key]  # noqa: SIM118
        whole = [key for key in keys if names & set(key.split(".")[-3:-1])]
        return max((file.get_slice(key).get_shape()[0] for key in whole), default=0)


def load_saved_tokenizer(saved: SavedModel) -> Any:
    """The tokenizer saved beside the model, or its base's; it has a padding token."""
    last: Exception | None = None
    for place in (saved.name, saved.base):
        try:
            tokenizer = AutoTokenizer.from_pretrained(place)
        except (OSError, ValueError) as error:
            last = error
            continue
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer
    raise ConfigError(f"- there is no tokenizer in {saved.name} or {saved.base}: {str(last).splitlines()[0]}") from last


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name; ConfigError naming those that weights are stored in.

    >>> parse_dtype("bfloat16")
    torch.bfloat16
    """
    if name not in DTYPES:
        raise ConfigError(f"- dtype is {name!r}; write {', '.join(DTYPES)}")
    return getattr(torch, name)
