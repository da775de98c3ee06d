"""LeanTrainer: TRL's SFT trainer with the loss without logits, fused backward, and checkpoints that are whole or
absent."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leantune.activations.loss import linear_cross_entropy, shift_labels
from leantune.activations.velora.handle import VeloraHandle
from leantune.errors import ConfigError, NonFiniteError
from leantune.training.attach import attach
from leantune.training.checkpoints import VELORA_FILE, checkpoints
from leantune.training.config import TrainConfig
from leantune.training.data.batch_order import LongestFirst
from leantune.training.first_step import check_all_reached
from leantune.training.parallel.shards import LOSS
from leantune.training.parallel.spread_trainer import SpreadTrainer
from leantune.training.router_loss import keep_router_coefficient, router_coefficient

_UNUSED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "labels")


class LeanTrainer(SpreadTrainer):
    """Trains on already tokenised rows. ``lean`` is the run's config, ``velora`` the handle of its projection, if any;
    ``exact_loss``: the loss is computed without logits. Exact savings are in the model already. ``lengths``: the tokens
    of each training row, where they are known, for ``longest_first``."""

    def __init__(
        self,
        lean: TrainConfig,
        velora: VeloraHandle | None,
        exact_loss: bool,
        *,
        lengths: Any | None = None,
        **arguments: Any,
    ) -> None:
        trained = [(param, param.data) for param in arguments["model"].parameters() if param.requires_grad]
        coefficient = router_coefficient(arguments["model"])
        super().__init__(**arguments)
        keep_router_coefficient(self.model, coefficient)
        for param, data in trained:
            if param.dtype != data.dtype:  # TRL rounds adapters on a quantised base to bfloat16 without a word
                param.data = data
        self.lean = lean
        self.velora = velora
        self.exact_loss = exact_loss
        self._lengths = lengths
        self.model_accepts_loss_kwargs = True  # compute_loss divides by the tokens of the whole step
        self.tokens_seen = 0
        self._first_step_done = False
        bound = None if lean.clip_mode == "none" else lean.max_grad_norm
        self.attached = (
            attach(self, clip=lean.clip_mode, max_grad_norm=bound, accumulate=lean.accumulate, exact_savings=False)
            if lean.fused
            else None
        )
        if self.attached is not None:
            self.attached.probes_loss = False  # both losses below can be run backward twice

    def _send_telemetry(self) -> None:
        """TRL reports every trainer that is built to the hub; nothing is sent from here."""

    def checkpoint_activations(self) -> None:
        """Turn gradient checkpointing on where the arguments ask for it, as ``train()`` does (again) when it begins:
        so that what is planned before is what runs."""
        if not self.args.activation_checkpointing:
            return
        settings: dict[str, Any] = dict(self.args.activation_checkpointing_kwargs or {})  # type: ignore[arg-type]
        every, offload = settings.pop("every_n_layers", 1), settings.pop("offload", False)
        model: Any = self.model
        try:
            model.activation_checkpointing_enable(
                activation_checkpointing_kwargs=settings or None, every_n_layers=every, offload=offload
            )
        except ValueError as error:
            raise ConfigError(f"- gradient_checkpointing: {error}") from error

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """With ``longest_first`` rows in a random order, the longest in the first step; steps of rows of like length
        where they are wanted. Any other order is transformers'."""
        strategy = str(self.args.train_sampling_strategy)
        if not self.lean.longest_first or self._lengths is None or strategy not in ("random", "group_by_length"):
            return super()._get_train_sampler(train_dataset)
        rows = self.args.train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return LongestFirst(self._lengths, rows, seed, grouped=strategy == "group_by_length")

    # -- one step ---------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward, the check of the loss, backward (fused or ordinary)."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        mask = inputs.get("attention_mask")
        self.tokens_seen += int(inputs["input_ids"].numel() if mask is None else mask.sum())
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        finite = bool(torch.isfinite(loss.detach()))
        if self.processes.any(not finite):
            where = f"the loss is {loss.item()}" if not finite else "the loss of another process is not finite"
            raise NonFiniteError(
                f"{where} at step {self.state.global_step + 1} (epoch {self.state.epoch or 0:.2f}); "
                f"training stops before backward, nothing was updated in this step. {self._last_good()} Lower the "
                "learning rate, or look at the rows of this batch."
            )
        self.accelerator.backward(loss)
        if self.attached is None:
            self.average_gradients(model)
        return loss.detach()

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Under an ordinary backward: every parameter must have a gradient in the first step, and a norm that is not
        finite stops the run before any optimizer steps."""
        if self.attached is not None:
            return None  # the norm is complete, and logged, once step() has closed the step
        if not self._first_step_done:
            check_all_reached(model, lambda param: param.grad is not None)
            self._first_step_done = True
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None and self.accelerator.scaler is None and not math.isfinite(float(norm)):
            raise NonFiniteError(
                f"the gradient norm is {float(norm)} at step {self.state.global_step + 1}; training stops before the "
                f"optimizer, nothing was updated in this step. {self._last_good()} Lower the learning rate, or look at "
                "the rows of this batch."
            )
        return norm

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Mean loss over the trained tokens (of the whole step where ``num_items_in_batch`` says how many those
        are)."""
        total, count = self._summed_loss(model, inputs)
        if num_items_in_batch is None:
            loss = total / count
        else:  # those of all processes, whose gradients will be averaged
            loss = total * self.processes.size / num_items_in_batch
        return (loss, None) if return_outputs else loss

    def _summed_loss(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """(sum of the losses of trained tokens, how many there are)."""
        # The decoder is called past model.forward, where accelerate has put its autocast.
        with self.accelerator.autocast():
            whole = self.accelerator.unwrap_model(model)
            if self.sharded and self.exact_loss:
                found: tuple[Tensor, Tensor] = getattr(base_model(whole), LOSS)(inputs)
                return found
            return summed_loss(whole, inputs, self.exact_loss)

    # -- held-out loss ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def held_out_loss(self) -> float | None:
        """Mean loss over all trained tokens of the held-out rows, of all processes; None where there are none.

        Random numbers are left as they were: a run that evaluates trains as one that does not.
        """
        if self.eval_dataset is None:
            return None
        model: Any = self.model
        training, random_state = model.training, torch.get_rng_state()
        model.eval()
        total, count = 0.0, 0
        try:
            for inputs, counts in self.held_out_batches():
                with self.compute_loss_context_manager():
                    loss, tokens = self._summed_loss(model, self._prepare_inputs(inputs))
                if counts:
                    total, count = total + loss.item(), count + int(tokens)
        finally:
            model.train(training)
            torch.set_rng_state(random_state)
        return self.processes.total(total) / self.processes.total(count)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The held-out loss as `held_out_loss` defines it: over tokens, where transformers would average batches."""
        if eval_dataset is not None:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        loss = self.held_out_loss()
        if loss is None:
            raise ConfigError("- there are no held-out rows to evaluate on; set eval_dataset or eval_split")
        metrics = {f"{metric_key_prefix}_loss": loss}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """The loss alone: logits are never collected."""
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _save_beside(self, folder: Path) -> None:
        if self.velora is not None:
            self.velora.save(folder / VELORA_FILE)

    def _checkpoints_kept(self) -> int | None:
        return self.lean.save_total_limit

    def _last_good(self) -> str:
        found = checkpoints(self._folder)
        return f"The last good checkpoint is {found[-1]}." if found else "There is no checkpoint yet."


def summed_loss(model: Any, inputs: dict[str, Any], exact_savings: bool) -> tuple[Tensor, Tensor]:
    """(sum of the losses of a batch's trained tokens, how many there are), in nats.

    Args:
        model: a causal language model, adapters and all.
        inputs: ``input_ids`` and ``labels`` (-100 where nothing is learnt), and what else the model is fed.
        exact_savings: the loss without logits; else full logits in float32.
    """
    labels = shift_labels(inputs["labels"])
    fed = {key: value for key, value in inputs.items() if key not in _UNUSED}
    if exact_savings:
        inner = base_model(model)
        head = inner.get_output_embeddings()
        hidden = inner.get_decoder()(**fed, use_cache=False).last_hidden_state
        scale, softcap = logit_settings(inner)
        total = linear_cross_entropy(
            hidden, head.weight, labels, bias=head.bias, reduction="sum", logit_scale=scale, softcap=softcap
        )
    else:
        logits = model(**fed, use_cache=False).logits.float()
        total = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum().clamp(min=1)


def base_model(model: Any) -> Any:
    """The causal language model itself, without the adapters' wrapper (its layers keep their adapters)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def logit_settings(model: nn.Module) -> tuple[float, float | None]:
    """(factor, softcap) between hidden states times head and the logits, from the model's config."""
    config: Any = model.config
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    if getattr(config, "logits_scaling", None):
        scale /= float(config.logits_scaling)
    return scale, getattr(config, "final_logit_softcapping", None)


def check_exact_loss(model: Any) -> None:
    """Raise ConfigError, naming exact_savings, where `loss_obstacle` finds one."""
    if (obstacle := loss_obstacle(model)) is not None:
        raise ConfigError(f"- exact_savings: {obstacle}; leave loss out of exact_savings, or set exact_savings: false")


@torch.no_grad()
def loss_obstacle(model: Any) -> str | None:
    """Why the loss without logits is not this model's loss, None where it is: held against the model's own logits, on
    eight tokens, before anything is trained.

    A model may change its logits by settings this package does not know; then it shows here, and not in a wrong loss.
    """
    inner = base_model(model)
    head, decoder = inner.get_output_embeddings(), getattr(inner, "get_decoder", lambda: None)()
    if type(head) is not nn.Linear or decoder is None or decoder is inner:
        return f"{type(inner).__name__} has no decoder with a plain linear output layer (it is {type(head).__name__})"
    training, random_state = model.training, torch.get_rng_state()
    model.eval()
    try:
        tokens = (torch.arange(8, device=head.weight.device) * 37 % head.weight.shape[0])[None]
        logits = model(input_ids=tokens, use_cache=False).logits.float()
        hidden = decoder(input_ids=tokens, use_cache=False).last_hidden_state
        scale, softcap = logit_settings(inner)
        ours = linear_cross_entropy(
            hidden, head.weight, tokens, bias=head.bias, reduction="sum", logit_scale=scale, softcap=softcap
        )
        theirs = nn.functional.cross_entropy(logits[0], tokens[0], reduction="sum")
    finally:
        model.train(training)
        torch.set_rng_state(random_state)
    if torch.allclose(ours.double(), theirs.double(), rtol=2e-2, atol=1e-2):
        return None
    return (
        f"the loss without logits is {float(ours):.4f} where {type(inner).__name__}'s own logits give "
        f"{float(theirs):.4f} (eight tokens): it changes its logits in a way that is not known here"
    )
