"""``train``: the whole of a run, top to bottom."""

import dataclasses
import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback, set_seed
from trl import SFTConfig

from leantune.activations.velora.apply import apply_velora
from leantune.activations.velora.handle import VeloraHandle
from leantune.activations.velora.report import VeloraReport
from leantune.errors import ConfigError, InvalidArgumentError, NotEnoughRoomError
from leantune.kernels.half_linear import use_fp32_products
from leantune.memory import MemoryTimeline, MemoryTracker, Plan, format_bytes, parse_size, plan_run
from leantune.memory.budget.sharding import ALONE, Parallel
from leantune.memory.parts import OPTIMIZER_STATES
from leantune.memory.reports.plots import plot_memory
from leantune.training.checkpoints import VELORA_FILE, at_the_end, check_checkpoint, checkpoints, holds_model, step_of
from leantune.training.config import LORA_METHODS, TrainConfig
from leantune.training.config.keys import suggestion
from leantune.training.data.load import PreparedData, load_data
from leantune.training.data.packed_rows import check_packed_rows_apart
from leantune.training.disk import Writing, writes_are_told
from leantune.training.exact_savings import RunSavings, apply_run_savings
from leantune.training.identity import check_identity, write_identity
from leantune.training.log import RunLog
from leantune.training.moved import MovedShare
from leantune.training.optimizers import build_optimizer, plain_optimizer
from leantune.training.parallel.processes import join_processes
from leantune.training.parallel.rank_plan import show_rank_plan
from leantune.training.parallel.sharded_checkpoint import is_sharded_checkpoint
from leantune.training.parallel.shards import load_spread
from leantune.training.parallel.stop import StopOnSignal
from leantune.training.planning.auto import before_the_data, refuse_what_does_not_fit, settled
from leantune.training.planning.settings import batch_shape
from leantune.training.pretrained import load_tokenizer, model_limits
from leantune.training.progress import ProgressBar
from leantune.training.quantised_base import check_bitsandbytes, check_trainable, quantisation, settle
from leantune.training.router_loss import leave_out_router_loss
from leantune.training.run_card import write_run_card
from leantune.training.samples import Sample, Sampler
from leantune.training.save_probe import SaveProbe
from leantune.training.summary import facts, header, summary, write_summary
from leantune.training.trainer import LeanTrainer, base_model
from leantune.training.velora_probe import exact_where_poor
from leantune.whole_file import write_whole


@dataclass
class TrainResult:
    """What a run gives back. Losses in nats a token, ``memory_by_part`` and ``peak_bytes`` in bytes of one measured
    step."""

    model: Any
    tokenizer: Any
    output_dir: Path
    begun_at: int
    """The step that a resumed run went on from; 0 of a run from the beginning."""
    held_out_before: float | None
    """At ``begun_at``."""
    held_out_after: float | None
    tokens_per_second: float
    peak_bytes: int
    memory_by_part: dict[str, int]
    plan: Plan | None
    velora: VeloraReport | None
    samples: list[Sample]
    """Answers at the end, where ``num_samples`` asks for them."""
    log: list[dict[str, Any]] = field(default_factory=list)


def train(config: TrainConfig, *, console: Console | None = None) -> TrainResult:
    """Fine-tune the model a config names; writes the model, log.jsonl, plots and reports into ``output_dir``.

    Raises ConfigError before the model is loaded where config or data cannot work, NotEnoughRoomError where the plan
    exceeds ``memory_budget``; NonFiniteError where the loss leaves the numbers; WriteError where the disk refuses.
    """
    writing = Writing(Path(config.output_dir))
    with writes_are_told(writing.folder, writing.left):
        return _train(config, console or Console(), writing)


def _train(config: TrainConfig, console: Console, writing: Writing) -> TrainResult:
    output = Path(config.output_dir)
    processes = join_processes(config)
    console = processes.console(console)
    _refuse_missing_trackers(config)
    check_bitsandbytes(config)
    resume_from = _checkpoint_to_resume(config, output)
    spread = processes.spread
    config, tokenizer, data = load_rows(config, spread)
    if data.recipe is not None:
        console.print(f"method: auto\n{data.recipe}", highlight=False)
    refuse_what_does_not_fit(config, data, spread)
    if resume_from is not None:
        check_identity(config, data, output)
    finished = resume_from is not None and _only_the_model_is_missing(config, resume_from, output)
    loaded = load_spread(lambda: load_model(config, resume_from), processes, resume_from)
    trainer, velora = build_trainer(config, loaded, tokenizer, data), loaded.velora
    if resume_from is not None and velora is not None:
        velora.load(resume_from / VELORA_FILE)
    plan = plan_of_run(config, trainer, data)
    methods = facts(config, trainer, data, loaded.savings)
    header(console, config, trainer, data, plan, methods)
    _hold_against_budget(config, plan)
    show_rank_plan(config, data, processes, console)
    reports = processes.folder(output)
    reports.mkdir(parents=True, exist_ok=True)
    write_whole(reports / "leantune_config.yaml", config.to_yaml())
    write_identity(config, data, reports)
    data.report.write_dropped(reports)
    if plan is not None:
        plan.save(reports)
    moved = MovedShare()
    log = RunLog(reports, moved, trainer, append=resume_from is not None)
    sampler = Sampler(config, trainer, data, tokenizer, reports, console)
    probe, bar, stop = _MemoryProbe(trainer), ProgressBar(console), StopOnSignal(processes)
    trainer.remove_callback(PrinterCallback)
    save_probe = SaveProbe(trainer, plan.parts[OPTIMIZER_STATES] if plan else 0)
    for callback in (save_probe, moved, log, probe, bar, sampler, stop):
        trainer.add_callback(callback)
    if resume_from is None and velora is not None and config.velora_min_cosine is not None:
        console.print(exact_where_poor(trainer, velora, config.velora_min_cosine), highlight=False)
        plan = plan_of_run(config, trainer, data)  # of what is left of VeLoRA
        _hold_against_budget(config, plan)
        if plan is not None:
            plan.save(reports)
    begun_at = 0
    if resume_from is not None:
        begun_at = step_of(resume_from)
        trainer._load_from_checkpoint(str(resume_from))  # so that the held-out loss is that of where it goes on
    before = trainer.held_out_loss()
    start = time.perf_counter()
    stop.listen()
    try:
        if not finished:
            trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    finally:
        stop.remove()
        probe.stop()
        bar.stop()
        if trainer.attached is not None:
            trainer.attached.remove()
    seconds = time.perf_counter() - start - probe.seconds - sampler.seconds
    stop.raise_if_stopped(trainer)
    after = trainer.held_out_loss()
    trainer.save_whole(output)
    writing.model_is_whole = True
    sampler.take(trainer.state.global_step)
    timeline = probe.timeline
    if timeline is not None:
        write_whole(reports / "memory_profile.json", json.dumps(timeline.to_json()) + "\n")
        plot_memory(timeline, reports / "memory.png", plan_total=plan.total if plan else None)
    log.plot(reports, (begun_at, before), after)
    tokens = processes.total(trainer.tokens_seen - probe.tokens)
    result = TrainResult(
        model=trainer.accelerator.unwrap_model(trainer.model),
        tokenizer=tokenizer,
        output_dir=output,
        begun_at=begun_at,
        held_out_before=before,
        held_out_after=after,
        tokens_per_second=tokens / seconds if tokens and seconds > 0 else 0.0,
        peak_bytes=timeline.peak_bytes if timeline else 0,
        memory_by_part=dict(timeline.at_peak()) if timeline else {},
        plan=plan,
        velora=velora.report() if velora else None,
        samples=sampler.last,
        log=log.rows,
    )
    write_summary(config, result, reports)
    write_run_card(config, result, data, methods, timeline, reports)
    summary(console, config, result)
    return result


def load_rows(config: TrainConfig, spread: Parallel = ALONE) -> tuple[TrainConfig, Any, PreparedData]:
    """The config with its method decided and its max_length in tokens, the tokenizer, and the rows of a run as its
    trainer takes them; sets the run's seed first. ``spread``: over which processes the method is decided for."""
    check_bitsandbytes(config)
    config = before_the_data(config)
    set_seed(config.seed)
    tokenizer = load_tokenizer(config.model_name_or_path)
    data = load_data(config, tokenizer, model_limits(config.model_name_or_path))
    config, data.recipe = settled(dataclasses.replace(config, max_length=data.max_length), data, spread)
    return config, tokenizer, data


@dataclass(frozen=True)
class LoadedModel:
    """A model as it will train, what exact savings are in force in it, and the handle of its projection, if any."""

    model: Any
    savings: RunSavings
    velora: VeloraHandle | None


def load_model(config: TrainConfig, resume_from: Path | None = None) -> LoadedModel:
    """The model as it will train: adapters, exact savings, VeLoRA and products for this device in place. Where all
    weights train, they are those of the checkpoint ``resume_from``, if it is one that a single process could read."""
    model = _model(config, resume_from)
    if config.packing:
        check_packed_rows_apart(base_model(model))
    savings = apply_run_savings(config, model)
    velora = _velora(config, model)
    if not torch.cuda.is_available():
        # Without AVX-512 a CPU multiplies bfloat16 in loops, a hundred times slower than in fp32.
        use_fp32_products(model)
        if velora is not None:
            velora.use_fp32_products()
    return LoadedModel(model, savings, velora)


def _refuse_missing_trackers(config: TrainConfig) -> None:
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    wanted = config.extra.get("report_to") or []
    wanted = [wanted] if isinstance(wanted, str) else list(wanted)
    known = ["none", "all", *INTEGRATION_TO_CALLBACK]
    if strange := [name for name in wanted if name not in known]:
        raise ConfigError(
            f"- report_to: there is no tracker {', '.join(strange)}{suggestion(strange[0], known)}; transformers has "
            f"{', '.join(INTEGRATION_TO_CALLBACK)}"
        )
    missing = [name for name in wanted if name not in ("none", "all", *get_available_reporting_integrations())]
    if missing:
        raise ConfigError(f"- report_to: {', '.join(missing)} is not installed here; install it, or leave it out")


def _checkpoint_to_resume(config: TrainConfig, output: Path) -> Path | None:
    _refuse_unwritable(output)
    found = checkpoints(output)
    if config.resume:
        if not found:
            raise ConfigError(f"- resume: there is no whole checkpoint in {output}; leave resume out to start")
        check_checkpoint(found[-1], config)
        return found[-1]
    if output.is_dir() and Path(config.model_name_or_path).is_dir() and output.samefile(config.model_name_or_path):
        raise ConfigError(
            f"- output_dir {output} is the folder of the model that is trained, and would overwrite it; write another"
        )
    if not found and holds_model(output):
        raise ConfigError(
            f"- output_dir {output} holds a trained model, which would be overwritten; write another output_dir, or "
            "delete it first"
        )
    if found:
        raise ConfigError(
            f"- output_dir {output} holds checkpoints of an earlier run ({found[-1].name}); write resume: true to go "
            "on from it, or another output_dir"
        )
    return None


def _only_the_model_is_missing(config: TrainConfig, resume_from: Path, output: Path) -> bool:
    """Whether the run stopped after its last checkpoint, before its model was written; ConfigError where both are."""
    finished = at_the_end(resume_from, config)
    if finished and holds_model(output):
        raise ConfigError(
            f"- resume: the run in {output} is finished: {resume_from.name} is its last step, and its model is there. "
            "Nothing has been changed. Raise max_steps or num_train_epochs to go on"
        )
    return finished


def _refuse_unwritable(output: Path) -> None:
    """Before anything is loaded: the folder, or the nearest one above it that exists, must take files."""
    place = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    if not place.is_dir():
        raise ConfigError(f"- output_dir {output}: {place} is a file; write the name of a folder")
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ConfigError(f"- output_dir {output} cannot be written: {place}: {error.strerror}") from None


def _model(config: TrainConfig, resume_from: Path | None) -> Any:
    source = config.model_name_or_path
    if resume_from is not None and config.method not in LORA_METHODS and not is_sharded_checkpoint(resume_from):
        # transformers' trainer would copy the checkpoint into the model by name, and lose what has another name in
        # files than in memory: all experts of a mixture.
        source = str(resume_from)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, config.dtype), quantization_config=quantisation(config)
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"- model_name_or_path {source!r}: {str(error).splitlines()[0]}") from error
    check_trainable(config, model)
    settle(model)
    leave_out_router_loss(model)
    if config.method in LORA_METHODS:
        from peft import LoraConfig, get_peft_model

        targets = config.lora_target_modules
        lora = LoraConfig(
            r=config.lora_r,
            lora_alpha=config.lora_alpha,
            lora_dropout=config.lora_dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            task_type="CAUSAL_LM",
        )
        try:
            return get_peft_model(model, lora)
        except ValueError as error:
            raise ConfigError(f"- lora_target_modules: {error}") from error
    return model


def _velora(config: TrainConfig, model: Any) -> VeloraHandle | None:
    if not config.velora_target_modules:
        return None
    return apply_velora(
        model,
        list(config.velora_target_modules),
        config.velora_num_groups,
        refresh_every=config.velora_refresh_every,
        factored=config.velora_factored,
    )


def build_trainer(config: TrainConfig, loaded: LoadedModel, tokenizer: Any, data: PreparedData) -> LeanTrainer:
    """The trainer of a run, its optimizer and fused backward attached, checkpointing on where it was asked for."""
    arguments: dict[str, Any] = {
        "output_dir": config.output_dir,
        "learning_rate": config.rate,
        "weight_decay": config.weight_decay,
        "adam_beta1": config.betas[0],
        "adam_beta2": config.betas[1],
        "adam_epsilon": config.adam_epsilon,
        # transformers clips before step(); under fused backward gradients are gone by then and the hooks clip.
        "max_grad_norm": _transformers_bound(config),
        "bf16": config.bf16,
        "fp16": False,
        # Rows are cut already: TRL would copy all of them to look again.
        "max_length": config.max_length if config.packing else None,
        "packing": config.packing,
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "per_device_eval_batch_size": config.per_device_train_batch_size,
        "prediction_loss_only": True,
        "disable_tqdm": True,
        "data_seed": config.seed,
        "accelerator_config": {"dispatch_batches": False},
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "activation_checkpointing": config.gradient_checkpointing,
        "activation_checkpointing_kwargs": {
            "use_reentrant": False,
            **(config.extra.get("gradient_checkpointing_kwargs") or {}),
        },
        "num_train_epochs": config.num_train_epochs,
        "max_steps": config.max_steps,
        "logging_steps": config.logging_steps,
        "logging_nan_inf_filter": False,
        "save_steps": config.save_steps,
        "save_total_limit": None,
        "seed": config.seed,
        "use_cpu": not torch.cuda.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available(),
        "report_to": "none",
        "eval_packing": False,
        "remove_unused_columns": True,
        "router_aux_loss_coef": 0.0,
    }
    if not config.ours:
        arguments["optim"] = config.optim
    try:
        extra = {key: value for key, value in config.extra.items() if key != "gradient_checkpointing_kwargs"}
        args = SFTConfig(**{**arguments, **extra})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"- {error}") from error
    if args.n_gpu > 1:
        args._n_gpu = 1  # transformers would copy the model to every GPU it sees; one device a process (trap P14)
    optimizer = build_optimizer(config, loaded.model) if config.ours else None
    trainer = LeanTrainer(
        config,
        loaded.velora,
        loaded.savings.loss,
        lengths=None if config.packing else data.lengths,
        model=loaded.model,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.held_out,
        processing_class=tokenizer,
        optimizers=(optimizer, None),
    )
    trainer.checkpoint_activations()
    if loaded.velora is not None and config.velora_factored:
        loaded.velora.attach(plain_optimizer(trainer) or trainer.create_optimizer())
    return trainer


def _transformers_bound(config: TrainConfig) -> float:
    """The norm transformers clips to; 0 is off. Its own default, 1.0, holds for an ordinary backward."""
    if config.fused or config.clip == "none":
        return 0.0
    return 1.0 if config.max_grad_norm is None else config.max_grad_norm


def plan_of_run(config: TrainConfig, trainer: LeanTrainer, data: PreparedData) -> Plan | None:
    """The plan for the largest batch of the run, None of a sharded one. Transformers' own optimizers allocate where no
    plan can look: none then."""
    if trainer.sharded:
        return None  # planned in closed form (`hold_rank_against_budget`): a step on fake tensors has no shards
    optimizer: Any = trainer.optimizer
    if optimizer is None:
        try:
            optimizer = trainer.create_optimizer()
        except (ImportError, ValueError) as error:
            raise ConfigError(f"- optim: {config.optim} cannot be used here: {error}") from error
    batch = batch_shape(config, data.longest, data.padded)
    try:
        return plan_run(
            base_model(trainer.model),
            getattr(optimizer, "optimizer", optimizer),
            batch_size=batch.rows,
            length=batch.length,
            padded=batch.padded,
            fused=config.fused,
            clip=config.clip_mode if config.fused else "none",  # type: ignore[arg-type]
            loss="exact" if trainer.exact_loss else "full_logits",
            micro_batches=config.gradient_accumulation_steps,
            accumulate=config.accumulate,
            autocast=torch.bfloat16 if config.bf16 else None,
        )
    except InvalidArgumentError as error:
        if config.memory_budget is not None:
            raise ConfigError(
                f"- memory_budget: this model cannot be planned, so no budget can be held: {error}"
            ) from error
        data.notes.append(f"no memory plan: {error}")
        return None


def _hold_against_budget(config: TrainConfig, plan: Plan | None) -> None:
    if config.memory_budget is None or plan is None:
        return
    if plan.total > parse_size(config.memory_budget) and not config.force:
        raise NotEnoughRoomError(
            f"memory_budget is {config.memory_budget}, and the plan needs {format_bytes(plan.total)} at {plan.where}. "
            "Lower per_device_train_batch_size or max_length, turn on gradient_checkpointing, or choose "
            "method: lora or qlora. --force trains all the same."
        )


class _MemoryProbe(TrainerCallback):
    """Runs one early step under the memory tracker: the second, when states exist (the first where it is the only
    one)."""

    def __init__(self, trainer: LeanTrainer) -> None:
        self._trainer = trainer
        self._tracker: MemoryTracker | None = None
        self.timeline: MemoryTimeline | None = None
        self._first: int | None = None
        self.seconds = 0.0
        self.tokens = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Start before the second step."""
        first = self._first = state.global_step if self._first is None else self._first
        if self._trainer.sharded:
            return  # the tracker counts tensors of one process, and knows no shards
        if self.timeline is None and state.global_step == min(first + 1, state.max_steps - 1):
            optimizer: Any = self._trainer.optimizer
            self._start, self._tokens = time.perf_counter(), self._trainer.tokens_seen
            self._tracker = MemoryTracker(self._trainer.model, getattr(optimizer, "optimizer", optimizer)).start()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Stop after it."""
        if self._tracker is not None:
            self._tracker.stop()
            self.timeline = self._tracker.timeline()
            self._tracker = None
            self.seconds = time.perf_counter() - self._start
            self.tokens = self._trainer.tokens_seen - self._tokens

    def stop(self) -> None:
        """End a measurement that an error cut short; the tracker must not outlive the run."""
        if self._tracker is not None:
            self._tracker.stop()
            self._tracker = None
