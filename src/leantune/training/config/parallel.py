"""What of a config cannot work in several processes."""

from leantune.training.config.run_config import TrainConfig

KINDS = ("ddp", "fsdp2")


def problems_in_parallel(c: TrainConfig, kind: str) -> list[str]:
    """Every setting of ``c`` that ``kind`` ("ddp", "fsdp2") cannot honour, in words."""
    if kind not in KINDS:
        meant = "; its second version is meant by fsdp2" if kind == "fsdp" else ""
        return [f"parallel is {kind!r}; write ddp (each process has the whole model) or fsdp2 (its rows){meant}"]
    found = []
    if c.velora_min_cosine is not None:
        found.append(
            "velora_min_cosine looks at a batch, and processes have different ones: they would train different "
            "layers. Name the layers that pass in one process in velora_target_modules, and leave it out"
        )
    if kind == "ddp":
        return found
    if c.method == "qlora" or c.load_in_8bit:
        found.append(
            f"parallel: fsdp2 cuts weights by rows, and those of a {'4' if c.method == 'qlora' else '8'}-bit base are "
            "packed; write parallel: ddp, or method: lora on a base in dtype"
        )
    if c.velora_factored:
        found.append("velora_factored takes whole weights, and fsdp2 cuts them by rows; write parallel: ddp")
    if c.optim == "taco_one_sparse":
        found.append("optim: taco_one_sparse looks at whole columns, and fsdp2 cuts weights by rows; write ddp")
    if not c.ours:
        found.append(
            f"optim: {c.optim} is not tested on sharded weights; write parallel: ddp, or one of leantune's optimizers "
            "(optim: adamw is Adam with exact states)"
        )
    return found
