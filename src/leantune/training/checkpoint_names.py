"""Whether a checkpoint holds a model's weights under the names they have in memory."""

from pathlib import Path
from typing import Any

from leantune.errors import StateMismatchError


def check_loaded_by_name(model: Any, folder: Path) -> None:
    """Raise StateMismatchError where transformers' trainer would resume ``model`` without some of its weights.

    It copies a checkpoint into the model by name and goes on where names differ; since transformers 5 a mixture's
    experts are one tensor in memory and many in files. A model that was itself loaded from ``folder`` has them already.
    """
    files = sorted(folder.glob("model*.safetensors"))
    loaded_from = str(getattr(model, "name_or_path", ""))
    if not files or hasattr(model, "peft_config") or (loaded_from and Path(loaded_from).resolve() == folder.resolve()):
        return
    from safetensors import safe_open

    held: set[str] = set()
    for path in files:
        with safe_open(path, framework="pt") as file:
            held |= set(file.keys())
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    lost = [name for name in model.state_dict() if name not in held and name not in tied]
    if lost:
        raise StateMismatchError(
            f"transformers' trainer loads {folder} by name, and {len(lost)} weights of the model have other names in "
            f"its files ({lost[0]}, for one): they would stay as they are now. Load the model from the checkpoint, "
            f"from_pretrained({str(folder)!r}), and resume with it; leantune train does."
        )
