"""config.json and safetensors headers, whole and damaged."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from leantune.errors import InvalidArgumentError
from leantune.memory.budget.model_files import read_config, read_weight_files


def test_headers_give_sizes_without_reading_a_weight(tmp_path):
    save_file({"a": torch.zeros(3, 4, dtype=torch.bfloat16), "b": torch.zeros(5)}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(2, dtype=torch.float16)}, tmp_path / "two.safetensors")
    found = read_weight_files(tmp_path)
    assert found.elements == 19 and found.nbytes == 24 + 20 + 4
    assert found.bytes_by_dtype == {"BF16": 24, "F32": 20, "F16": 4}
    assert found.shapes["a"] == (3, 4)
    assert read_weight_files(tmp_path / "nothing") is None


def header(text, length=None, tail=b""):
    return struct.pack("<Q", len(text) if length is None else length) + text + tail


TENSOR = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"123", "too short"),
        (header(b"{}", length=10**9), "longer than the file"),
        (header(b"{not json"), "no list of tensors"),
        (header(json.dumps({"a": {"dtype": "F32"}}).encode()), "no list of tensors"),
        (header(json.dumps({"a": TENSOR}).encode(), tail=bytes(15)), "ends before its last tensor"),
        (header(json.dumps({"a": TENSOR | {"dtype": "F3"}}).encode(), tail=bytes(16)), "unknown dtype F3"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, said):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=said) as raised:
        read_weight_files(tmp_path)
    assert "model.safetensors" in str(raised.value)


def test_a_folder_without_a_config_or_with_an_unknown_one_is_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"holds no config\.json"):
        read_config(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "nobody_knows_me"}')
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        read_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        read_config(str(tmp_path))


def test_a_folder_that_is_not_there_is_not_taken_for_a_name_of_the_hub(tmp_path):
    with pytest.raises(InvalidArgumentError, match="there is no folder"):
        read_config(str(tmp_path / "missing"))
