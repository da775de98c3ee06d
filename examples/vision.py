"""Classify images with a vision transformer, every parameter trained, with transformers' Trainer.

    python examples/vision.py --model google/vit-base-patch16-224 --data images/ [--steps 200]

images/ has one folder a class (datasets' "imagefolder"); a tenth of the images is held out.
"""

import argparse
from typing import Any

import numpy as np
import torch
from datasets import load_dataset
from transformers import AutoImageProcessor, AutoModelForImageClassification, Trainer, TrainingArguments

import leantune as lt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a hub name or a folder")
    parser.add_argument("--data", required=True, help="a folder with one folder of images a class")
    parser.add_argument("--output", default="runs/vision")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=5e-5)
    arguments = parser.parse_args()
    images = load_dataset("imagefolder", data_dir=arguments.data, split="train")
    names = images.features["label"].names
    processor = AutoImageProcessor.from_pretrained(arguments.model)

    def pixels(rows: dict[str, Any]) -> dict[str, Any]:
        return {
            "pixel_values": processor([image.convert("RGB") for image in rows["image"]])["pixel_values"],
            "labels": rows["label"],
        }

    def batch(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {
            "pixel_values": torch.from_numpy(np.stack([np.asarray(row["pixel_values"]) for row in rows])).float(),
            "labels": torch.tensor([row["labels"] for row in rows]),
        }

    parts = images.train_test_split(0.1, seed=0).with_transform(pixels)
    args = TrainingArguments(
        arguments.output,
        learning_rate=arguments.lr,
        max_steps=arguments.steps,
        per_device_train_batch_size=16,
        remove_unused_columns=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(
        AutoModelForImageClassification.from_pretrained(
            arguments.model, num_labels=len(names), ignore_mismatched_sizes=True
        ),
        args,
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        data_collator=batch,
        compute_metrics=lambda found: {"accuracy": float(np.mean(found.predictions.argmax(-1) == found.label_ids))},
    )
    attached = lt.attach(trainer)
    trainer.train()
    print(attached.report(), trainer.evaluate(), sep="\n")
    trainer.save_model()


if __name__ == "__main__":
    main()
