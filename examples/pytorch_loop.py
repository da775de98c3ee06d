"""A plain PyTorch loop: every parameter trained, gradients applied inside backward, inputs of two layers projected.

python examples/pytorch_loop.py --model HuggingFaceTB/SmolLM2-135M --text book.txt [--steps 100]
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import leantune as lt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a hub name or a folder")
    parser.add_argument("--text", type=Path, required=True, help="a file of text to train on")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4, help="rows a step")
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--lr", type=float, default=2e-5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16).to(device).train()
    text = arguments.text.read_text(encoding="utf-8")
    tokens = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]

    savings = lt.apply_exact_savings(model)  # what can be made again in backward is not kept; no number changes
    velora = lt.apply_velora(model, target_modules=["q_proj", "k_proj", "v_proj"], num_groups=16)
    optimizer = lt.TernaryAdamW(model.named_parameters(), lr=arguments.lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=arguments.steps)
    fused = lt.FusedBackward(optimizer, model=model)
    for step in range(arguments.steps):
        starts = torch.randint(0, len(tokens) - arguments.length, (arguments.batch, 1))
        ids = tokens[starts + torch.arange(arguments.length)].to(device)
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        # The loss without logits; labels[i] is what position i predicts.
        loss = lt.linear_cross_entropy(hidden, model.get_output_embeddings().weight, lt.shift_labels(ids))
        fused.backward(loss)  # each gradient is applied and freed as it comes
        optimizer.step()  # closes the step
        schedule.step()
        print(f"step {step + 1} loss {loss.item():.4f} norm {fused.grad_norm:.3f}", flush=True)
    print(optimizer.report(), savings.report(), velora.report(), sep="\n")


if __name__ == "__main__":
    main()
