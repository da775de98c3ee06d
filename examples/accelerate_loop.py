"""A loop of one's own under accelerate, on one device or many; every process has the whole model.

    accelerate launch examples/accelerate_loop.py --model HuggingFaceTB/SmolLM2-135M --text book.txt [--steps 100]

The model is not prepared by accelerate: FusedBackward averages each gradient over the processes before it is applied,
so that DistributedDataParallel and its buckets (as many bytes as all gradients) are not needed.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import leantune as lt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a hub name or a folder")
    parser.add_argument("--text", type=Path, required=True, help="a file of text to train on")
    parser.add_argument("--output", default="runs/accelerate_loop")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4, help="rows of each process a step")
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--lr", type=float, default=2e-5)
    arguments = parser.parse_args()
    accelerator = Accelerator()
    torch.manual_seed(0)  # the same order of rows on every process; accelerate deals them out
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16).to(accelerator.device).train()
    tokens = tokenizer(arguments.text.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[0]
    rows = tokens[: len(tokens) // arguments.length * arguments.length].view(-1, arguments.length)
    loader = accelerator.prepare(DataLoader(rows, batch_size=arguments.batch, shuffle=True, drop_last=True))

    optimizer = lt.TernaryAdamW(model.named_parameters(), lr=arguments.lr)
    fused = lt.FusedBackward(optimizer, model=model)
    accelerator.print(f"{accelerator.num_processes} processes on {accelerator.device.type}")
    done = 0
    while done < arguments.steps:
        for ids in loader:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            fused.backward(loss)  # averaged over the processes, applied, freed
            optimizer.step()
            done += 1
            mean = accelerator.reduce(loss.detach(), "mean").item()
            accelerator.print(f"step {done} loss {mean:.4f} norm {fused.grad_norm:.3f}", flush=True)
            if done == arguments.steps:
                break
    if accelerator.is_main_process:
        model.save_pretrained(arguments.output)
        tokenizer.save_pretrained(arguments.output)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
