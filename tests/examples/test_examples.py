"""Every recipe under examples/ runs as a user would run it: its own keys, a tiny model, few steps."""

import csv
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_tokenizer

FOLDER = Path(__file__).resolve().parents[2] / "examples"
CONFIGS = sorted(path.name for path in FOLDER.glob("*.yaml"))
pytestmark = pytest.mark.slow


def run(*command: str) -> str:
    """What a command printed, both streams; it must have ended well."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def falls(losses: list[float], by: float = 0.02) -> bool:
    third = max(len(losses) // 3, 1)
    return sum(losses[-third:]) / third < sum(losses[:third]) / third - by


def printed_losses(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss'?:? '?(\d+\.\d+)", text)]


@pytest.fixture(scope="module")
def experts_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    path, tokenizer = tmp_path_factory.mktemp("experts"), tiny_tokenizer()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, vocab_size=320,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows.jsonl, preferences.jsonl, text.txt, texts.csv and images/."""
    import numpy as np
    from PIL import Image

    folder = tmp_path_factory.mktemp("data")
    rows = [{"prompt": f"Add {n} and 1. ", "completion": str(n + 1)} for n in range(80)]
    choices = [{**row, "chosen": row.pop("completion"), "rejected": "I do not know."} for row in map(dict, rows)]
    for name, content in (("rows", rows), ("preferences", choices)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    (folder / "text.txt").write_text(" ".join(f"The number {n} comes before {n + 1}." for n in range(400)))
    with (folder / "texts.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([["the sky is blue", 0] if n % 2 else ["name the colour of a rose", 1] for n in range(80)])
    generator = np.random.default_rng(0)
    for label, level in (("dark", 40), ("light", 210)):
        (folder / "images" / label).mkdir(parents=True)
        for number in range(30):
            pixels = (level + generator.integers(-30, 30, (32, 32, 3))).astype("uint8")
            Image.fromarray(pixels).save(folder / "images" / label / f"{number}.png")
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_trains(name: str, tiny_model_path: str, experts_path: str, data: Path, tmp_path: Path) -> None:
    model = experts_path if name == "experts.yaml" else tiny_model_path
    spread = ["--nproc_per_node", "2"] if name.startswith("fsdp2") else []
    rate = "0.1" if "30b" in name else "0.003"
    keys = [
        f"--model_name_or_path={model}", f"--dataset={data / 'rows.jsonl'}", f"--output_dir={tmp_path / 'run'}",
        f"--learning_rate={rate}", "--max_length=64", "--max_steps=40", "--logging_steps=1", "--save_steps=100",
    ]  # fmt: skip
    if "velora" in name:
        keys.append("--velora_num_groups=8")  # of 64 features
    run(sys.executable, "-m", "leantune", "train", str(FOLDER / name), *keys, *spread)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in log if "loss" in row]
    assert len(losses) == 40 and falls(losses), losses


@pytest.mark.parametrize("name", ["pytorch_loop.py", "transformers_trainer.py", "accelerate_loop.py"])
def test_a_script_on_text_trains(name: str, tiny_model_path: str, data: Path, tmp_path: Path) -> None:
    out = [] if name == "pytorch_loop.py" else ["--output", str(tmp_path / "run")]
    sizes = ["--steps", "20", "--length", "48", "--lr", "0.003"]
    command = [str(FOLDER / name), "--model", tiny_model_path, "--text", str(data / "text.txt"), *sizes, *out]
    losses = printed_losses(run(sys.executable, *command))
    assert len(losses) >= 20 and falls(losses), losses


def test_accelerate_launches_two_processes(tiny_model_path: str, data: Path, tmp_path: Path) -> None:
    """Two processes of two rows: the gradients of both are averaged, and the first one's weights are saved. As for two
    GPUs, which are not here: with --cpu accelerate wants MPI, and without it starts one process."""
    config = tmp_path / "accelerate.yaml"
    config.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--main_process_port", port]
    script = [str(FOLDER / "accelerate_loop.py"), "--model", tiny_model_path, "--text", str(data / "text.txt")]
    sizes = ["--steps", "20", "--length", "48", "--lr", "0.003", "--batch", "2", "--output", str(tmp_path / "run")]
    text = run(*launch, *script, *sizes)
    losses = printed_losses(text)
    assert "2 processes on cpu" in text and len(losses) == 20 and falls(losses), text[-2000:]
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("more", [[], ["--lomo", "--lr", "0.5"]], ids=["ternary", "lomo"])
def test_trls_trainer_trains(more: list[str], tiny_model_path: str, data: Path, tmp_path: Path) -> None:
    sizes = ["--steps", "30", "--length", "64", "--lr", "0.003", "--output", str(tmp_path / "run"), *more]
    rows = ["--model", tiny_model_path, "--data", str(data / "rows.jsonl")]
    losses = printed_losses(run(sys.executable, str(FOLDER / "trl_sft.py"), *rows, *sizes))
    assert len(losses) >= 30 and falls(losses[:30]), losses


def test_trls_preference_trainer_trains(tiny_model_path: str, data: Path, tmp_path: Path) -> None:
    sizes = ["--steps", "20", "--length", "64", "--lr", "0.001", "--output", str(tmp_path / "run")]
    rows = ["--model", tiny_model_path, "--data", str(data / "preferences.jsonl")]
    losses = printed_losses(run(sys.executable, str(FOLDER / "dpo.py"), *rows, *sizes))
    assert losses[0] == pytest.approx(0.6931, abs=0.02) and falls(losses[:20]), losses


def test_an_encoder_classifies(data: Path, tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    model, tokenizer = tmp_path / "encoder", tiny_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    BertForSequenceClassification(BertConfig(vocab_size=320, pad_token_id=0, **sizes)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    rows = ["--model", str(model), "--data", str(data / "texts.csv"), "--output", str(tmp_path / "run")]
    text = run(sys.executable, str(FOLDER / "encoder_classification.py"), *rows, "--steps", "40", "--lr", "0.003")
    assert float(re.findall(r"eval_accuracy': '?([\d.]+)", text)[-1]) > 0.9, text[-2000:]


def test_a_vision_transformer_classifies(data: Path, tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    model = tmp_path / "vit"
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, **sizes)).save_pretrained(model)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(model)
    rows = ["--model", str(model), "--data", str(data / "images"), "--output", str(tmp_path / "run")]
    text = run(sys.executable, str(FOLDER / "vision.py"), *rows, "--steps", "30", "--lr", "0.003")
    assert float(re.findall(r"eval_accuracy': '?([\d.]+)", text)[-1]) > 0.9, text[-2000:]
