"""Cases of test_attached_trainer.py, run by torchrun: a Trainer that lt.attach has taken, on two processes."""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import leantune as lt

RULES = {
    "adamw": lambda p: lt.AdamW(p, lr=1e-3, eps=1e-3),
    "lomo": lambda p: lt.Lomo(p, lr=3e-2),
}
GIVEN = {"adamw": {"max_grad_norm": 0.5}, "lomo": {"accumulate": "float32"}}
ROWS_A_STEP = 8


def train(rule: str, folder: Path, processes: int) -> dict[str, torch.Tensor]:
    """Four steps over the same rows, whatever the number of processes; the weights they end in."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=48, max_position_embeddings=32, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    rows = []
    for number in range(32):
        ids = torch.randint(3, 48, (8,), generator=generator).tolist()
        masked = number % 5  # processes and micro-batches weigh differently
        rows.append({"input_ids": ids, "labels": [-100] * masked + ids[masked:]})
    micro_batches = 2 if "accumulate" in GIVEN[rule] else 1
    args = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=ROWS_A_STEP // processes // micro_batches, max_steps=4,
        gradient_accumulation_steps=micro_batches, save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, logging_steps=1, dataloader_pin_memory=False, lr_scheduler_type="constant",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = RULES[rule](model.parameters())
    trainer = Trainer(model=model, args=args, train_dataset=rows, optimizers=(optimizer, None))
    attached = lt.attach(trainer, **GIVEN[rule])
    trainer.train()
    if processes > 1:
        wrapped = trainer.model_wrapped
        assert isinstance(wrapped, DistributedDataParallel) and wrapped.require_backward_grad_sync
    attached.remove()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "loss" in row]
    assert len(norms) == 4 and min(norms) > 0
    ended = {name: param.detach().clone() for name, param in model.named_parameters()}
    return {**ended, "norms": torch.tensor(norms)}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for rule in RULES:
        with tempfile.TemporaryDirectory() as scratch:
            ended = train(rule, Path(scratch), 2)
        for value in ended.values():
            everywhere = [torch.empty_like(value) for _ in range(dist.get_world_size())]
            dist.all_gather(everywhere, value)
            assert all(torch.equal(everywhere[0], other) for other in everywhere)
        if dist.get_rank() == 0:
            torch.save(ended, folder / f"{rule}.pt")
            print(f"done: {rule}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
