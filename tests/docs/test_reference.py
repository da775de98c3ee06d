"""docs/reference.md is what the code says now."""

import importlib.util

from docs.blocks import ROOT


def test_the_reference_is_not_stale() -> None:
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "docs" / "generate_reference.py")
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), "run make reference"
