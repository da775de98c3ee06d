"""A model's folder read without its weights: config.json, and the headers of its safetensors files."""

import json
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from leantune.errors import InvalidArgumentError

_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
_MOST_HEADER = 100_000_000


@dataclass(frozen=True)
class WeightFiles:
    """What the safetensors files of a folder hold, from their headers alone."""

    elements: int
    bytes_by_dtype: dict[str, int]
    shapes: dict[str, tuple[int, ...]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.bytes_by_dtype.values())


_ALWAYS = frozenset(
    {
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "intermediate_size", "tie_word_embeddings", "max_position_embeddings",
    }
)  # fmt: skip
_NEEDED = {
    "llama": _ALWAYS,
    "mistral": _ALWAYS,
    "qwen2": _ALWAYS,
    "qwen3": _ALWAYS | {"head_dim"},
    "gemma": _ALWAYS | {"head_dim"},
    "gemma3_text": _ALWAYS | {"head_dim", "layer_types"},
    "mixtral": _ALWAYS | {"num_local_experts", "num_experts_per_tok"},
}
"""Keys whose defaults only transformers knows, by ``model_type``."""


def read_sizes(name: str) -> Any:
    """What `ModelShape.of_config` reads of a model: its config.json where all that matters stands in it, which takes no
    time; else its transformers config, as `read_config` has it."""
    try:
        said = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
        if _NEEDED[said["model_type"]] <= said.keys():
            return SimpleNamespace(**said)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return read_config(name)


def read_config(name: str) -> Any:
    """The transformers config of a folder or of a model of the hub (config.json alone is fetched).

    Raises InvalidArgumentError where there is none, or its architecture is unknown.
    """
    from transformers import AutoConfig

    folder = Path(name)
    if not folder.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise InvalidArgumentError(f"there is no folder {name}; give the folder of a model, or its name on the hub")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InvalidArgumentError(f"{folder} holds no config.json; give the folder of a model as it was saved")
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidArgumentError(f"the config of {name!r} cannot be read: {text}") from error


def read_weight_files(folder: str | Path) -> WeightFiles | None:
    """Sizes and dtypes of all tensors in a folder's safetensors files; None where it has none.

    Raises InvalidArgumentError for a file whose header is damaged, or that is shorter than its header says.
    """
    folder = Path(folder)
    paths = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not paths:
        return None
    sizes: Counter[str] = Counter()
    shapes: dict[str, tuple[int, ...]] = {}
    elements = 0
    for path in paths:
        for name, (dtype, shape) in _header(path).items():
            count = 1
            for size in shape:
                count *= size
            elements += count
            sizes[dtype] += count * _ITEM_BYTES[dtype]
            shapes[name] = shape
    return WeightFiles(elements, dict(sizes), shapes)


def _header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{name: (dtype, shape)}: a length of 8 bytes, JSON, then the tensors."""
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else -1
        if not 0 < length <= min(_MOST_HEADER, path.stat().st_size - 8):
            raise _damaged(path, "its header is longer than the file" if length > 0 else "it is too short")
        text = file.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        found = {name: (entry["dtype"], tuple(map(int, entry["shape"]))) for name, entry in entries.items()}
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"its header is no list of tensors ({type(error).__name__})") from None
    unknown = {dtype for dtype, _ in found.values()} - set(_ITEM_BYTES)
    if unknown:
        raise _damaged(path, f"it holds tensors of unknown dtype {', '.join(sorted(unknown))}")
    if 8 + length + end > path.stat().st_size:
        raise _damaged(path, "it ends before its last tensor")
    return found


def _damaged(path: Path, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{path} is damaged: {why}. Fetch it again, or plan with a folder that has config.json alone"
    )
