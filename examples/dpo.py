"""Preference training with TRL's own DPOTrainer, every parameter, with fused backward and ternary states.

    python examples/dpo.py --model HuggingFaceTB/SmolLM2-135M-Instruct --data preferences.jsonl [--steps 100]

The reference model's log-probabilities are computed before training, so that one copy of the weights is in memory.
"""

import argparse

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

import leantune as lt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a hub name or a folder")
    parser.add_argument("--data", required=True, help="jsonl with prompt, chosen and rejected")
    parser.add_argument("--output", default="runs/dpo")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=512, help="tokens a row at most")
    parser.add_argument("--lr", type=float, default=1e-6)
    arguments = parser.parse_args()
    args = DPOConfig(
        arguments.output,
        learning_rate=arguments.lr,
        max_steps=arguments.steps,
        max_length=arguments.length,
        per_device_train_batch_size=2,
        precompute_ref_log_probs=True,
        bf16=False,  # the weights are bfloat16 already
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16),
        args=args,
        train_dataset=load_dataset("json", data_files=arguments.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
    )
    attached = lt.attach(trainer)
    trainer.train()
    print(attached.report(), attached.savings(), sep="\n")
    trainer.save_model()


if __name__ == "__main__":
    main()
