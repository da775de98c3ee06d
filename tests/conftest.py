"""What several test files share: a tiny Llama with a real tokenizer, saved once a session."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from trap_names import traps_of

if not torch.cuda.is_available():
    # Before anything imports Triton: tests/kernels/test_triton.py runs its kernels in the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

_LINES = [
    "What is the capital of France? Paris is the capital of France.",
    "Name the colour of the sky. The sky is blue.",
    "Count to three: one, two, three.",
    "### Instruction:\nAdd the numbers.\n\n### Input:\n2 and 3\n\n### Response:\n5",
    "system user assistant",
    "You are a helpful assistant.",
]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_tokenizer():
    """A byte-level BPE tokenizer of 320 tokens with a ChatML template; EOS is ``<|im_end|>``, pad ``<|endoftext|>``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=512
    )
    fast.chat_template = CHATML
    return fast


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test with the faults it is about."""
    for trap in traps_of(item.name):
        item.add_marker(pytest.mark.trap(id=trap))


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory):
    """A folder in transformers' layout: LlamaForCausalLM (2 layers, hidden 64, vocabulary 320, bfloat16), tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("tiny_model")
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def faulty_writes(tmp_path_factory):
    """A library that a process preloads, and in which every write under a folder can be made to fail."""
    if shutil.which("cc") is None or sys.platform != "linux":
        pytest.skip("needs a C compiler on Linux")
    built = tmp_path_factory.mktemp("faulty_writes") / "faulty_writes.so"
    source = Path(__file__).parent / "training" / "faulty_writes.c"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(built), str(source), "-ldl"], check=True)
    return built


@pytest.fixture
def tokenizer():
    """A fresh tokenizer, free to be changed by the test."""
    return tiny_tokenizer()
