"""Small models on bitsandbytes bases, made without a file."""

import torch
from torch import nn

KINDS = ("plain", "nf4", "nf4 nested", "int8")


def quantised(layer: nn.Linear, kind: str) -> nn.Module:
    """A frozen bitsandbytes layer of the given kind that holds ``layer``'s weight; ``layer`` itself for "plain"."""
    import bitsandbytes as bnb

    layer.requires_grad_(False)
    if kind == "plain":
        return layer
    rows, columns, bias = layer.out_features, layer.in_features, layer.bias is not None
    if kind == "int8":
        made = bnb.nn.Linear8bitLt(columns, rows, bias, has_fp16_weights=False)
        made.weight = bnb.nn.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
    else:
        made = bnb.nn.LinearNF4(columns, rows, bias, compute_dtype=torch.float32, compress_statistics="nested" in kind)
        settings = {"compress_statistics": "nested" in kind, "quant_type": "nf4", "module": made}
        made.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, **settings)
    made.bias = layer.bias
    return made.to("cpu").requires_grad_(False)


def quantise(model: nn.Module, kind: str) -> nn.Module:
    """Replace every ``nn.Linear`` but the head, as transformers does when it loads; says so in the model's flags."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and not name.endswith("lm_head"):
            model.set_submodule(name, quantised(module, kind))
    if kind != "plain":
        flag = "is_loaded_in_8bit" if kind == "int8" else "is_loaded_in_4bit"
        setattr(model, flag, True)  # what peft looks at to choose its layers
    return model
