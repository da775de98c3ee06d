"""transformers' own Trainer, its loss and loop as they are, with fused backward and ternary states.

python examples/transformers_trainer.py --model HuggingFaceTB/SmolLM2-135M --text book.txt [--steps 100]
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

import leantune as lt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a hub name or a folder")
    parser.add_argument("--text", type=Path, required=True, help="a file of text to train on")
    parser.add_argument("--output", default="runs/transformers_trainer")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--lr", type=float, default=2e-5)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokens = tokenizer(arguments.text.read_text(encoding="utf-8"), verbose=False).input_ids
    length = arguments.length
    rows = [tokens[start : start + length] for start in range(0, len(tokens) - length, length)]
    args = TrainingArguments(
        arguments.output,
        learning_rate=arguments.lr,
        max_steps=arguments.steps,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16),
        args,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        data_collator=default_data_collator,
    )
    attached = lt.attach(trainer)  # TernaryAdamW with the rates and decay above
    trainer.train()
    print(attached.report(), attached.savings(), sep="\n")
    trainer.save_model()
    tokenizer.save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
