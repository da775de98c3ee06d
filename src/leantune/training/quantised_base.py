"""The frozen base of a LoRA run in 4 or 8 bits: how it is loaded, and what of it stays as it was.

Nothing is upcast: peft's ``prepare_model_for_kbit_training`` would make embeddings, head and norms fp32, which costs
more than the 4-bit weights of a small model take (trap A4). What is not quantised keeps the run's ``dtype``.
"""

import logging
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from leantune.errors import ConfigError
from leantune.kernels.half_linear import needs_fp32_products
from leantune.memory import format_bytes
from leantune.memory.quantised import elements, scales, storage
from leantune.training.config import TrainConfig


def check_bitsandbytes(config: TrainConfig) -> None:
    """Raise ConfigError, with what to install, where a quantised base is wanted and bitsandbytes is missing or old."""
    if not wants_quantised_base(config):
        return
    from transformers.utils.import_utils import BITSANDBYTES_MIN_VERSION, is_bitsandbytes_available

    if not is_bitsandbytes_available():
        wanted = "method: qlora" if config.method == "qlora" else "load_in_8bit"
        raise ConfigError(
            f"- {wanted} needs bitsandbytes {BITSANDBYTES_MIN_VERSION} or later, which is not installed here: "
            "pip install 'leantune[qlora]' (or bitsandbytes). Without it: method: lora"
        )


def wants_quantised_base(config: TrainConfig) -> bool:
    """Whether a run asks for its base in 4 or 8 bits."""
    return config.method == "qlora" or config.load_in_8bit


def quantisation(config: TrainConfig) -> Any:
    """transformers' ``BitsAndBytesConfig`` for a run, None where its base is not quantised."""
    if not wants_quantised_base(config):
        return None
    from transformers import BitsAndBytesConfig

    if config.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=config.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=compute_dtype(config),
    )


def compute_dtype(config: TrainConfig) -> torch.dtype:
    """What 4-bit weights are multiplied in: ``dtype``, or fp32 on a CPU that multiplies that in slow loops."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    return torch.float32 if not torch.cuda.is_available() and needs_fp32_products(dtype) else dtype


def settle(model: nn.Module) -> None:
    """Keep bitsandbytes' layers as they are through evaluations, and its log quiet.

    On a CPU with AVX512-BF16 an evaluation repacks 4-bit weights into a layout whose product records nothing for
    backward: training that follows would not reach the adapters below it. Casts of 8-bit inputs are logged a layer a
    call.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


def check_trainable(config: TrainConfig, model: Any) -> None:
    """Raise ConfigError where a model that comes quantised would be trained as a whole, or quantised again."""
    method = getattr(getattr(model, "quantization_method", None), "value", None)
    if method is None:
        return
    if config.method == "full":
        raise ConfigError(
            f"- model_name_or_path {config.model_name_or_path!r} is stored quantised ({method}): its weights cannot be "
            "trained. Write method: lora, or give the model it was made from"
        )
    came = getattr(model.config.quantization_config, "load_in_4bit", False)
    if method != "bitsandbytes" or ((config.method == "qlora") != came and wants_quantised_base(config)):
        raise ConfigError(
            f"- model_name_or_path {config.model_name_or_path!r} is stored quantised already ({method}"
            f"{', 4 bits' if came else ''}), which method: {config.method} with these settings does not change. "
            "Give the model it was made from, or write method: qlora for 4-bit and load_in_8bit: true for 8-bit weights"
        )


def described(model: nn.Module) -> str:
    """What is quantised, what is not, and the bytes of both; "" for a base without quantised weights.

    Example: "14 matrices as nf4 in 54.3 MiB (scales included); not quantised: embed_tokens 54.0 MiB (bfloat16)"
    """
    matrices: dict[str, int] = defaultdict(int)
    quantised = sum(tensor.nbytes for tensor in _once(scales(model)))
    rest: dict[tuple[str, str], int] = defaultdict(int)
    for name, parameter in model.named_parameters():
        kind = storage(parameter)
        if elements(parameter) != parameter.numel() or kind == "int8":
            matrices[kind] += 1
            quantised += parameter.nbytes
        elif not parameter.requires_grad:
            module = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
            rest["norms" if "norm" in module else module, kind] += parameter.nbytes
    if not matrices:
        return ""
    what = ", ".join(f"{count} matrices as {kind}" for kind, count in matrices.items())
    largest = sorted(rest.items(), key=lambda item: -item[1])
    kept = ", ".join(f"{module} {format_bytes(size)} ({kind})" for (module, kind), size in largest)
    return f"{what} in {format_bytes(quantised)} (scales included); not quantised: {kept or 'nothing'}"


def _once(tensors: Any) -> list[Tensor]:
    """Each storage once, and none that is a parameter's own."""
    return list({tensor.untyped_storage()._cdata: tensor for tensor in tensors if tensor.dtype != torch.int8}.values())
