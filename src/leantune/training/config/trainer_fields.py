"""The fields of trl.SFTConfig, read from the source of trl and transformers: a plan that names some of them need not
wait the seconds that importing both takes."""

import ast
import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

_SOURCES = (
    ("trl", "trainer/sft_config.py", "SFTConfig"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("transformers", "training_args.py", "TrainingArguments"),
)
_PLAIN = {"int": int, "float": float, "str": str, "bool": bool, "dict": dict, "list": list, "Any": Any}


@lru_cache(maxsize=1)
def described_fields() -> dict[str, Any]:
    """Name to type, None where the type is not made of plain ones; {} where the sources are not as expected."""
    found: dict[str, Any] = {}
    for package, file, name in _SOURCES:
        spec = importlib.util.find_spec(package)
        path = None if spec is None or spec.origin is None else Path(spec.origin).parent / file
        if path is None or not path.is_file():
            return {}
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        if not classes:
            return {}
        for node in classes[0].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.setdefault(node.target.id, _plain_type(node.annotation))
    return found


def _plain_type(annotation: ast.expr) -> Any:
    names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    if not names <= set(_PLAIN):
        return None
    try:
        return eval(compile(ast.Expression(annotation), "annotation", "eval"), dict(_PLAIN))
    except (TypeError, NameError):
        return None
