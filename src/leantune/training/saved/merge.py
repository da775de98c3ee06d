"""``merge``: an adapter into its base, checked by its logits against the unmerged model before it gets its name."""

import gc
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from leantune.errors import ConfigError, NonFiniteError, NotEnoughRoomError, StateMismatchError
from leantune.kernels.half_linear import use_fp32_products
from leantune.memory.sizes import format_bytes
from leantune.training.disk import writes_are_told
from leantune.training.parallel.processes import refuse_launchers
from leantune.training.saved.logit_comparison import (
    LogitDifference,
    logit_difference,
    logits_of,
    probe_tokens,
    share_arrived,
)
from leantune.training.saved.saved_model import (
    SavedModel,
    attach_adapter,
    find_saved,
    load_base,
    load_saved,
    load_saved_tokenizer,
    model_config,
    parse_dtype,
)

TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""The largest relative difference of the logits (`LogitDifference.relative`) that rounding in a dtype explains."""
ROUNDED_PRODUCTS_TOLERANCE = 1e-1
"""The same where the unmerged model has an 8-bit base, which rounds the inputs of its products too."""
ARRIVED_WITHIN = 0.5
"""`MergeResult.arrived` may be this far from 1: a change lost, by mistake or by rounding, is 0; one added twice 2."""
NOISE_SEEN_THROUGH = 4
"""Rounding this many times larger than the adapter's own change hides whether that arrived."""
BASES = ("quantised", "full")
_OTHER_FILES = 16 << 20  # config, tokenizer, generation config


@dataclass(frozen=True)
class MergeResult:
    """What was written, and the figures that say whether it is right."""

    output_dir: Path
    base: str
    """What the adapter was merged into: "quantised" (dequantised weights) or "full"."""
    bytes_written: int
    merged: LogitDifference
    """Merged, reloaded from disk, against adapter and base unmerged."""
    adapter: LogitDifference
    """What the adapter changes: base alone against base with adapter."""
    arrived: float
    """How much of that change is in the merged model: 1 all of it, 0 none (`share_arrived`)."""
    trained: LogitDifference | None = None
    """Merged into full weights, against the model as it was trained, on quantised ones."""
    notes: list[str] = field(default_factory=list)


def merge(
    run: str,
    output_dir: str | None = None,
    *,
    model_name_or_path: str | None = None,
    dtype: str | None = None,
    base: str | None = None,
    console: Console | None = None,
) -> MergeResult:
    """Merge an adapter into its base and save a whole model in transformers' layout, tokenizer included.

    Works on the CPU, with one copy of the model in memory at a time. Adding is peft's own (LoRA, rsLoRA, DoRA...).

    Args:
        run: folder of an adapter: of a run, one of its checkpoints, or peft's own.
        output_dir: where the model goes; None: ``run`` with "-merged" added.
        model_name_or_path: the base; None: the one that the adapter names.
        dtype: of the weights that are written; None: that of the run, bfloat16 where none is known.
        base: "quantised" or "full": into which weights an adapter of a quantised base is merged; None: quantised where
            it was trained so.
    Raises: ConfigError where it cannot work, and NotEnoughRoomError where disk or memory are short, both before a
        model is loaded; NonFiniteError for weights that are no numbers; StateMismatchError where the merged model's
        logits differ from the unmerged one's by more than rounding, or hold less than half of the adapter's change
        because ``dtype`` rounds it away. Nothing is left in ``output_dir`` then.
    """
    refuse_launchers("merge", "Write leantune merge RUN alone")
    console = console or Console()
    if base not in (None, *BASES):
        raise ConfigError(f"- base is {base!r}; write {' or '.join(BASES)}")
    wanted = None if dtype is None else parse_dtype(dtype)
    saved = find_saved(run, model_name_or_path)
    _refuse_no_adapter(saved)
    output = Path(output_dir or f"{run.rstrip('/')}-merged")
    if output.exists():
        raise ConfigError(f"- output_dir {output} exists; write another, or delete it first")
    into_quantised = saved.quantised if base is None else base == "quantised"
    stored = wanted or saved.dtype
    _check_room(saved, output, stored, into_quantised)
    notes = [] if not saved.quantised and not into_quantised else [_about_quantised(saved, into_quantised)]
    for note in notes:
        console.print(f"note: {note}", highlight=False)

    tokens, reference, bare = _unmerged_logits(saved, stored, into_quantised)
    as_trained = None
    if saved.quantised and not into_quantised and not saved.stored_quantised:
        as_trained = _unmerged_logits(saved, stored, True)[1]
    aside = output.absolute().with_name(f".merging-{output.name}")
    shutil.rmtree(aside, ignore_errors=True)
    left = "Nothing is left of the merged model; make room, and merge again"
    with writes_are_told(aside.parent, lambda: left):
        try:
            _write(saved, stored, into_quantised, aside)
            merged = _reloaded_logits(aside, tokens)
            tolerance = _tolerance(saved, stored, into_quantised)
            result = MergeResult(
                output,
                BASES[not into_quantised],
                sum(path.stat().st_size for path in aside.iterdir()),
                logit_difference(reference, merged),
                logit_difference(reference, bare),
                share_arrived(bare, reference, merged),
                None if as_trained is None else logit_difference(as_trained, merged),
                notes,
            )
            _refuse_another_model(result, tolerance, stored)
            os.replace(aside, output)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    _tell(console, result, tolerance, stored)
    return result


# --- before anything is loaded ----------------------------------------------------------------------------------------


def _refuse_no_adapter(saved: SavedModel) -> None:
    if not saved.adapter:
        raise ConfigError(
            f"- {saved.name} is no adapter (there is no adapter_config.json in it), so there is nothing to merge: it "
            "is a whole model already"
        )
    config = _adapter_config(saved)
    if config.is_prompt_learning or config.peft_type is None:
        raise ConfigError(
            f"- {saved.name} is {config.peft_type}, which adds inputs and not weights, and cannot be merged; use it "
            "with peft"
        )


def _adapter_config(saved: SavedModel) -> Any:
    from peft import PeftConfig

    try:
        return PeftConfig.from_pretrained(saved.name)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"- {saved.name}/adapter_config.json cannot be read by peft: {error}") from error


def _trained_tokens(saved: SavedModel) -> list[int]:
    """Ids of the tokens whose embeddings the adapter trains by themselves."""
    named = getattr(_adapter_config(saved), "trainable_token_indices", None) or []
    lists = named.values() if isinstance(named, dict) else [named]
    return sorted({int(token) for ids in lists for token in ids})


def _check_room(saved: SavedModel, output: Path, dtype: torch.dtype, quantised: bool) -> None:
    """Refuse where the disk cannot hold the merged model, or memory one copy of it."""
    weights, largest = _sizes(saved, dtype)
    place = next(path for path in output.absolute().parents if path.exists())
    if not os.access(place, os.W_OK):
        raise ConfigError(f"- output_dir {output} cannot be written: {place} does not let you")
    free = shutil.disk_usage(place).free
    if free < weights + _OTHER_FILES:
        raise NotEnoughRoomError(
            f"the merged model takes {format_bytes(weights + _OTHER_FILES)} on disk and {place} has "
            f"{format_bytes(free)} left; nothing was loaded. Free some, or write an --output_dir on another disk"
        )
    # Beside the weights: one matrix's product of the adapter in float32, twice; a quantised copy while it is unpacked.
    needed = weights + 8 * largest + (weights // 3 if quantised else 0)
    available = psutil.virtual_memory().available
    if available < needed:
        raise NotEnoughRoomError(
            f"merging holds the base in memory, {format_bytes(needed)} in {str(dtype).removeprefix('torch.')}, and "
            f"{format_bytes(available)} is available; nothing was loaded. Close other programs, or use a larger machine"
        )


def _sizes(saved: SavedModel, dtype: torch.dtype) -> tuple[int, int]:
    """(bytes of the base's weights in ``dtype`` with an untied head, elements of the largest), from its config."""
    config = model_config(saved.base)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = [parameter.numel() for parameter in model.parameters()]
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    return (sum(sizes) + (head.weight.numel() if tied else 0)) * dtype.itemsize, max(sizes)


def _about_quantised(saved: SavedModel, into_quantised: bool) -> str:
    """What the choice of the base means, for an adapter of a quantised one."""
    how = (
        "as its run says"
        if saved.quantised
        else "as --base quantised says (nf4, nested: no run's config lies beside it)"
    )
    if into_quantised:
        return (
            f"the adapter was trained on a quantised base, {how}. It is merged into those weights, dequantised: what "
            "training saw, quantisation errors included. --base full merges into the original weights, which the "
            "adapter has never seen"
        )
    return (
        "the adapter was trained on a quantised base and is merged into the original weights, as --base full says. "
        "They have no quantisation errors, and the adapter has never seen them: evaluate the result. --base quantised "
        "merges into what training saw"
    )


# --- models, one at a time --------------------------------------------------------------------------------------------


def _unmerged_logits(saved: SavedModel, dtype: torch.dtype, quantised: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, logits of base and adapter, logits of the base alone); trained and added tokens are among them."""
    model = load_saved(saved, dtype, "cpu", quantised)
    use_fp32_products(model)
    before, now = (int(c.get_text_config().vocab_size) for c in (model_config(saved.base), model.config))
    tokens = probe_tokens(now, [*_trained_tokens(saved), *range(before, now)])
    with_adapter = logits_of(model, tokens)
    with model.disable_adapter():
        alone = logits_of(model, tokens)
    del model
    gc.collect()
    return tokens, with_adapter, alone


def _write(saved: SavedModel, dtype: torch.dtype, quantised: bool, folder: Path) -> None:
    """The merged model and its tokenizer into ``folder``, synced to disk."""
    base = load_base(saved, dtype, "cpu", quantised)
    if quantised:
        base = base.dequantize(dtype)
    model = attach_adapter(saved, base)
    _untie_adapted(model.get_base_model())
    try:
        merged = model.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise NonFiniteError(f"{saved.name}: {error}. Nothing was written; use an earlier checkpoint") from error
    merged = merged.to(dtype)
    _settle_tying(merged)
    try:
        merged.save_pretrained(folder)
        load_saved_tokenizer(saved).save_pretrained(folder)
        for path in folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:
        raise NotEnoughRoomError(f"the merged model could not be written, and nothing is left of it: {error}") from None
    del model, merged, base
    gc.collect()


def _untie_adapted(model: Any) -> None:
    """Give a tied head a weight of its own where an adapter will be added to the embeddings or to the head alone.

    peft adds in place: in a tied model, what belongs to one of the two would be added to both.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    pair = model.get_input_embeddings(), model.get_output_embeddings()
    if not any(isinstance(module, BaseTunerLayer) for module in pair):
        return
    embeddings, head = (_innermost(module) for module in pair)
    if head is not None and head.weight is embeddings.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def _innermost(module: Any) -> Any:
    """The layer within peft's wrappers."""
    while True:
        inner = getattr(module, "base_layer", None)
        inner = getattr(module, "original_module", None) if inner is None else inner
        if inner is None:
            return module
        module = inner


def _settle_tying(model: Any) -> None:
    """Let the config say what the merged weights are: tied where both are equal, else two tensors.

    Without it, a model whose config ties would be saved with one of the two, and the other would be lost.
    """
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is embeddings.weight:
        return
    config = model.config.get_text_config()
    was_tied = bool(model._tied_weights_keys) and model_config(model.config._name_or_path).tie_word_embeddings
    equal = was_tied and torch.equal(head.weight, embeddings.weight)
    if equal:
        head.weight = embeddings.weight
    config.tie_word_embeddings = model.config.tie_word_embeddings = equal


def _reloaded_logits(folder: Path, tokens: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map={"": "cpu"}).eval()
    use_fp32_products(model)
    logits = logits_of(model, tokens)
    del model
    gc.collect()
    return logits


# --- the verdict ------------------------------------------------------------------------------------------------------


def _tolerance(saved: SavedModel, dtype: torch.dtype, quantised: bool) -> float:
    eight_bit = quantised and bool(
        getattr(model_config(saved.base), "quantization_config", {}).get("load_in_8bit")
        if saved.stored_quantised
        else saved.run and saved.run.load_in_8bit
    )
    return max(TOLERANCES[dtype], ROUNDED_PRODUCTS_TOLERANCE if eight_bit else 0.0)


def _refuse_another_model(result: MergeResult, tolerance: float, dtype: torch.dtype) -> None:
    if not result.merged.relative <= tolerance:
        raise StateMismatchError(
            f"the merged model, read back from disk, is another than base and adapter unmerged: its logits differ by "
            f"{result.merged.relative:.2g} of their size (at most {result.merged.largest:.3g}), where rounding in "
            f"{str(dtype).removeprefix('torch.')} explains {tolerance:g}. Nothing was kept. Try --dtype float32; if it "
            "stays, report it with the output of `leantune env`"
        )
    told_apart = result.adapter.relative > result.merged.relative / NOISE_SEEN_THROUGH
    if not told_apart or abs(result.arrived - 1) <= ARRIVED_WITHIN:
        return
    what = f"the merged model, read back from disk, holds {result.arrived:.0%} of what the adapter changes"
    if result.arrived < 1 and dtype != torch.float32:
        raise StateMismatchError(
            f"{what}. In {str(dtype).removeprefix('torch.')} a change smaller than half a step of a weight is rounded "
            "away, and this adapter changes little. Nothing was kept. Write --dtype float32, or use it unmerged"
        )
    raise StateMismatchError(
        f"{what}. Nothing was kept. Report it with the output of `leantune env`; until then use the adapter unmerged"
    )


def _tell(console: Console, result: MergeResult, tolerance: float, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    merged, adapter = result.merged, result.adapter
    console.print(
        f"logits, merged and reloaded against unmerged: differ by {merged.largest:.3g} at most, {merged.relative:.2g} "
        f"of their size (tolerance {tolerance:g} in {name}); the adapter itself changes them by {adapter.largest:.3g} "
        f"at most, {adapter.relative:.2g}, and {result.arrived:.0%} of that is in the merged model",
        highlight=False,
    )
    if result.trained is not None:
        console.print(
            f"against the model as trained, on the quantised base: {result.trained.largest:.3g} at most, "
            f"{result.trained.relative:.2g} of their size",
            highlight=False,
        )
    if adapter.relative and merged.relative > adapter.relative / 2:
        console.print(
            f"[bold]warning[/bold]: rounding to {name} is as large as half of what the adapter changes, or larger. "
            "Keep the adapter unmerged, or write --dtype float32",
            highlight=False,
        )
    console.print(f"written to {result.output_dir} ({format_bytes(result.bytes_written)}, {name})", highlight=False)
