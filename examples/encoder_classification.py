"""Classify texts with an encoder (BERT and its kin), every parameter trained, with transformers' Trainer.

    python examples/encoder_classification.py --model google-bert/bert-base-uncased --data texts.csv [--steps 200]

texts.csv has the columns text and label (a whole number from 0); a tenth of its rows is held out.
"""

import argparse

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

import leantune as lt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a hub name or a folder")
    parser.add_argument("--data", required=True, help="csv with the columns text and label")
    parser.add_argument("--output", default="runs/classification")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=128, help="tokens a text at most")
    parser.add_argument("--lr", type=float, default=5e-5)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    rows = load_dataset("csv", data_files=arguments.data, split="train")
    labels = len(set(rows["label"]))
    rows = rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=arguments.length))
    parts = rows.remove_columns("text").train_test_split(0.1, seed=0)
    args = TrainingArguments(
        arguments.output,
        learning_rate=arguments.lr,
        max_steps=arguments.steps,
        per_device_train_batch_size=16,
        warmup_steps=0.1,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(
        AutoModelForSequenceClassification.from_pretrained(arguments.model, num_labels=labels),
        args,
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda found: {"accuracy": float(np.mean(found.predictions.argmax(-1) == found.label_ids))},
    )
    attached = lt.attach(trainer)
    trainer.train()
    print(attached.report(), attached.savings(), trainer.evaluate(), sep="\n")
    trainer.save_model()


if __name__ == "__main__":
    main()
