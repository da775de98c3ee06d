"""LeanTrainer: TRL's SFT trainer with the loss without logits, fused backward, and checkpoints that are whole or absent."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trl import SFTTrainer

from leantune.activations.loss import linear_cross_entropy, shift_labels
from leantune.activations.velora.apply import VeloraHandle
from leantune.backward.fused import FusedBackward
from leantune.errors import ConfigError, NonFiniteError
from leantune.training.config import TrainConfig

VELORA_FILE = "velora.safetensors"
_UNUSED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "labels")


class LeanTrainer(SFTTrainer):
    """Trains on already tokenised rows. ``lean`` is the run's config, ``velora`` the handle of its projection, if any."""

    def __init__(self, lean: TrainConfig, velora: VeloraHandle | None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.lean = lean
        self.velora = velora
        self.fused: FusedBackward | None = None
        self.model_accepts_loss_kwargs = True  # compute_loss divides by the tokens of the whole step
        self.tokens_seen = 0

    # -- one step ---------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward, the check of the loss, backward (fused or ordinary)."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        self.tokens_seen += inputs["input_ids"].numel()
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        if not bool(torch.isfinite(loss.detach())):
            raise NonFiniteError(
                f"the loss is {loss.item()} at step {self.state.global_step + 1} (epoch {self.state.epoch or 0:.2f}); training stops "
                f"before backward, nothing was updated in this step. {self._last_good()} Lower the learning rate, or look at the "
                "rows of this batch."
            )
        if self.lean.fused:
            self._fused_backward().backward(loss)
        else:
            self.accelerator.backward(loss)
        return loss.detach()

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Mean loss over the trained tokens (of the whole step where ``num_items_in_batch`` says how many those are)."""
        total, count = self._summed_loss(model, inputs)
        loss = total / (count if num_items_in_batch is None else num_items_in_batch)
        return (loss, None) if return_outputs else loss

    def _summed_loss(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """(sum of the losses of trained tokens, how many there are)."""
        labels = shift_labels(inputs["labels"])
        fed = {key: value for key, value in inputs.items() if key not in _UNUSED}
        if self.lean.exact_savings:
            inner = self.accelerator.unwrap_model(model)
            inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
            head = inner.get_output_embeddings()
            hidden = inner.get_decoder()(**fed, use_cache=False).last_hidden_state
            scale, softcap = logit_settings(inner)
            total = linear_cross_entropy(
                hidden, head.weight, labels, bias=head.bias, reduction="sum", logit_scale=scale, softcap=softcap
            )
        else:
            logits = model(**fed, use_cache=False).logits.float()
            total = nn.functional.cross_entropy(
                logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum"
            )
        return total, (labels != -100).sum().clamp(min=1)

    def _fused_backward(self) -> FusedBackward:
        """Built at the first step: accelerate has prepared model and optimizer by then."""
        if self.fused is None:
            optimizer: Any = self.optimizer
            optimizer = getattr(optimizer, "optimizer", optimizer)
            bound = self.lean.max_grad_norm if self.lean.clip_mode != "none" else None
            model = self.accelerator.unwrap_model(self.model)
            self.fused = FusedBackward(optimizer, model=model, clip=self.lean.clip_mode, max_grad_norm=bound)
        return self.fused

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the true gradient norm, which transformers cannot know once gradients are gone."""
        if self.fused is not None and self.fused.grad_norm is not None and "loss" in logs:
            logs["grad_norm"] = self.fused.grad_norm
        super().log(logs, start_time)

    # -- held-out loss ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def held_out_loss(self) -> float | None:
        """Mean loss over all trained tokens of the held-out rows; None where there are none."""
        if self.eval_dataset is None:
            return None
        model: Any = self.model
        training = model.training
        model.eval()
        total, count = 0.0, 0
        for inputs in self.get_eval_dataloader():
            loss, tokens = self._summed_loss(model, self._prepare_inputs(inputs))
            total, count = total + loss.item(), count + int(tokens)
        model.train(training)
        return total / count

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """The loss alone: logits are never collected."""
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Written into a folder aside, then renamed: a checkpoint that carries the name is whole."""
        final = self._folder / f"checkpoint-{self.state.global_step}"
        aside = self._folder / ".saving"
        shutil.rmtree(aside, ignore_errors=True)
        self._aside = aside
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._aside = None
        written = aside / final.name
        if self.velora is not None:
            self.velora.save(written / VELORA_FILE)
        for path in written.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        os.replace(written, final)
        shutil.rmtree(aside, ignore_errors=True)
        self._drop_old_checkpoints()

    _aside: Path | None = None

    @property
    def _folder(self) -> Path:
        return Path(str(self.args.output_dir))

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._aside) if self._aside is not None else super()._get_output_dir(trial)

    def _drop_old_checkpoints(self) -> None:
        limit = self.lean.save_total_limit
        kept = checkpoints(self._folder)
        for path in kept[: max(0, len(kept) - limit)] if limit else []:
            shutil.rmtree(path)

    def _last_good(self) -> str:
        found = checkpoints(self._folder)
        return f"The last good checkpoint is {found[-1]}." if found else "There is no checkpoint yet."


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Whole checkpoints in a folder, oldest first."""
    found = [path for path in Path(output_dir).glob("checkpoint-*") if path.name.partition("-")[2].isdigit()]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def logit_settings(model: nn.Module) -> tuple[float, float | None]:
    """(factor, softcap) between hidden states times head and the logits, from the model's config.

    Raises ConfigError where the model adds a loss of its own that the loss without logits would leave out.
    """
    config: Any = model.config
    if getattr(config, "output_router_logits", False):
        raise ConfigError("- this model adds a router loss (output_router_logits); set exact_savings: false to keep it")
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    if getattr(config, "logits_scaling", None):
        scale /= float(config.logits_scaling)
    return scale, getattr(config, "final_logit_softcapping", None)
