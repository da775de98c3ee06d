"""TRL's SFTTrainer on conversations, with fused backward and LOMO or ternary states.

python examples/trl_sft.py --model HuggingFaceTB/SmolLM2-135M-Instruct --data rows.jsonl [--steps 100] [--lomo]
"""

import argparse

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import leantune as lt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a hub name or a folder")
    parser.add_argument("--data", required=True, help="jsonl with prompt and completion, or messages")
    parser.add_argument("--output", default="runs/trl_sft")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=512, help="tokens a row at most")
    parser.add_argument("--lr", type=float, help="2e-5, or 3e-2 with --lomo")
    parser.add_argument("--lomo", action="store_true", help="no optimizer state, exact clipping by the global norm")
    arguments = parser.parse_args()
    lr = arguments.lr or (3e-2 if arguments.lomo else 2e-5)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
    args = SFTConfig(
        arguments.output,
        learning_rate=lr,
        max_steps=arguments.steps,
        max_length=arguments.length,
        per_device_train_batch_size=4,
        bf16=False,  # the weights are bfloat16 already: autocast would keep copies
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = SFTTrainer(
        model,
        args,
        train_dataset=load_dataset("json", data_files=arguments.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
    )
    if arguments.lomo:
        attached = lt.attach(trainer, lt.Lomo(model.named_parameters(), lr=lr), clip="global", max_grad_norm=1.0)
    else:
        attached = lt.attach(trainer)
    trainer.train()
    print(attached.report(), attached.savings(), sep="\n")
    trainer.save_model()


if __name__ == "__main__":
    main()
