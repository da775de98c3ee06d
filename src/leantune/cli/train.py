"""leantune train: from a config or flags to a trained model."""

import typer

EXAMPLES = """Examples:

leantune train config.yaml

leantune train config.yaml --learning_rate 1e-4 --max-steps 100

leantune train --model_name_or_path ./model --dataset rows.jsonl --output_dir runs/first

leantune train --model_name_or_path ./model --dataset rows.jsonl --memory_budget 24GiB

leantune train config.yaml --method lora --lora_r 8 --packing

leantune train config.yaml --resume

leantune train config.yaml --nproc_per_node 8 --parallel fsdp2

With memory_budget and no method, how to train is chosen and explained (method: auto). Exit codes: 0 trained, 2 bad
input, 3 the plan exceeds memory_budget (--force trains all the same), or the disk does not take what is written.
"""


def train(
    arguments: list[str] | None = typer.Argument(
        None,
        metavar="[CONFIG] [--KEY VALUE]...",
        help="A YAML file of flat keys, and any of its keys as flags, which win: --key value, --key=value, or --key "
        "for true. Keys are those of transformers and TRL (- and _ are one) beside leantune's own: method, optim, "
        "fused_backward, clip, exact_savings, velora_target_modules, memory_budget, eval_split...",
        show_default=False,
    ),
) -> None:
    """Fine-tune a model: all of its parameters (method: full), adapters (lora, qlora), or what fits (auto). In one
    process, or with --nproc_per_node in one a GPU; torchrun and accelerate launch work too."""
    from leantune.training.parallel.launch import launch, take_nproc

    processes, given = take_nproc(arguments or [])
    passed = list(given)
    path = given.pop(0) if given and not given[0].startswith("--") else None
    # Wrong keys are told before torch and the data libraries are loaded.
    from leantune.training.config import load_config

    config = load_config(path, given)
    if processes is not None:
        launch(processes, passed, config.output_dir)
        return
    from leantune.training.parallel.processes import leave_processes
    from leantune.training.run import train as run

    run(config)
    leave_processes()
