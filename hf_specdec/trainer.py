"""Trainer: a `transformers.Trainer` for heads; the target is frozen, outside, and computes features as they are needed."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_specdec.data import Example
from hf_specdec.drafter import Drafter
from hf_specdec.features import FeatureStore, features, finite

BUCKET = 32  # global batches among which texts of one length are looked for


class HeadLoss(nn.Module):
    """The trained module: a head whose forward is its loss, so that data parallelism sees it."""

    def __init__(self, head: Drafter):
        super().__init__()
        self.head = head

    def forward(self, input_ids: torch.Tensor, hidden: Sequence[torch.Tensor], loss_mask: torch.Tensor):
        return self.head.loss(input_ids, hidden, loss_mask)


class LengthBuckets(torch.utils.data.Sampler):
    """Order of the examples: a global batch holds texts of similar length, however many processes share it.

    Args:
        lengths (`list[int]`): of the examples.
        batch_size (`int`): examples per optimizer step, over all processes.
        seed (`int`): of the order.
    """

    def __init__(self, lengths: Sequence[int], *, batch_size: int, seed: int):
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, 0

    def __len__(self) -> int:
        return math.ceil(len(self.lengths) / self.batch_size) * self.batch_size

    def __iter__(self) -> Iterator[int]:
        shuffle = torch.Generator().manual_seed(self.seed + 1_000_003 * self.epoch)
        order = torch.randperm(len(self.lengths), generator=shuffle).tolist()
        order = (order * math.ceil(len(self) / len(order)))[: len(self)]  # the last batch is filled from the first
        batches = []
        for start in range(0, len(order), self.batch_size * BUCKET):
            bucket = sorted(order[start : start + self.batch_size * BUCKET], key=lambda i: self.lengths[i])
            batches += [bucket[i : i + self.batch_size] for i in range(0, len(bucket), self.batch_size)]
        for batch in torch.randperm(len(batches), generator=shuffle).tolist():
            yield from batches[batch]


class Schedule:
    """Learning rate over the budget: linear warm-up, then a cosine to 0. The budget is steps, seconds or both.

    Torch's scheduler saves and restores its `__dict__`, what was spent: an interrupted run goes on where it was. The budget,
    in slots, is always the one given now.
    """

    __slots__ = ("total_steps", "warmup", "max_seconds", "__dict__")

    def __init__(self, *, total_steps: int, warmup: float, max_seconds: float | None = None):
        self.total_steps, self.warmup, self.max_seconds = total_steps, warmup, max_seconds
        self.spent, self.last, self.progress = 0.0, None, 0.0

    def __call__(self, step: int) -> float:
        now = time.monotonic()
        self.spent += now - (self.last or now)
        self.last = now
        self.progress = step / max(1, self.total_steps)
        if self.max_seconds is not None:
            self.progress = max(self.progress, agree(self.spent / self.max_seconds))
        if self.progress < self.warmup:
            return max(self.progress / self.warmup, 0.01)
        along = (self.progress - self.warmup) / (1 - self.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, along)))


def agree(value: float) -> float:
    """The first process's value, so that all take the same step."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    shared = torch.tensor([value], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.broadcast(shared, src=0)
    return shared.item()


class Pace(TrainerCallback):
    """Tells the sampler the epoch, starts the schedule's clock, and stops when the budget is spent."""

    def __init__(self, trainer: HeadTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.schedule.last = None  # time between two runs is not spent

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.trainer.sampler.epoch = int(round(state.epoch or 0, 6))

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer.schedule.progress >= 1:
            control.should_training_stop = control.should_save = True


class HeadTrainer(Trainer):
    """Trains a head on the features of a frozen target.

    Args:
        head (`Drafter`): made for the target.
        target (`PreTrainedModel`): frozen here and put in eval mode; never part of the trained module.
        args (`TrainingArguments`): batch sizes, steps, optimizer.
        examples (`list[Example]`): to train on.
        held_out (`list[Example]`): for the head's own metrics.
        warmup (`float`): share of the budget in which the learning rate rises.
        max_seconds (`float`, *optional*): stop after so long; the learning rate ends at 0 there.
        skip_nonfinite (`bool`): leave out a sample whose features hold NaN or infinity, instead of stopping.
        store (`FeatureStore`, *optional*): where features are kept; without one nothing is written.
        validate (`Callable`, *optional*): more metrics to report at each evaluation.

    Raises:
        ValueError: while training, naming the sample, for features that are not finite.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        head: Drafter,
        target: PreTrainedModel,
        args: TrainingArguments,
        *,
        examples: list[Example],
        held_out: Sequence[Example] = (),
        warmup: float = 0.03,
        max_seconds: float | None = None,
        skip_nonfinite: bool = False,
        store: FeatureStore | None = None,
        validate: Callable[[], dict] | None = None,
    ):
        self.head, self.target = head, target.requires_grad_(False).eval()
        head.attach(self.target)  # again: what it borrowed while the target was trainable would be part of the graph
        self.held_out, self.store, self.validate = list(held_out), store, validate
        self.warmup, self.max_seconds, self.skip_nonfinite = warmup, max_seconds, skip_nonfinite
        self.skipped: Counter = Counter()
        self.sums: dict[str, float] = defaultdict(
            float
        )  # of metrics times trained tokens, since they were last logged
        global_batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        lengths = [len(example.input_ids) for example in examples]
        self.sampler = LengthBuckets(lengths, batch_size=global_batch, seed=args.seed)
        super().__init__(HeadLoss(head), args, data_collator=partial(collate, pad_id=0), train_dataset=examples)
        self.add_callback(Pace(self))

    def _get_train_sampler(self, train_dataset=None) -> LengthBuckets:
        return self.sampler

    def _get_collator_with_removed_columns(self, data_collator, description=None):
        return data_collator

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        self.schedule = Schedule(total_steps=num_training_steps, warmup=self.warmup, max_seconds=self.max_seconds)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, self.schedule)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor:
        """Trained tokens of one optimizer step, over all processes: what each loss is weighted by."""
        count = sum((batch["loss_mask"].sum() for batch in batch_samples), torch.tensor(0)).to(device)
        return self.accelerator.reduce(count, reduction="sum").clamp(min=1)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The head's mean loss, weighted so that the sum over micro-batches and processes is the mean over all tokens."""
        count = int(inputs["loss_mask"].sum())
        loss, metrics = self.head_loss(model, inputs)
        for name, value in metrics.items():
            self.sums[name] += float(value) * count
        self.sums["tokens"] += count
        scale = 1.0 if num_items_in_batch is None else count / num_items_in_batch * self.args.world_size
        return (loss * scale, metrics) if return_outputs else loss * scale

    def head_loss(self, model: nn.Module, inputs: dict) -> tuple[torch.Tensor, dict]:
        """The head's loss and metrics on a batch, the target's features computed on the way."""
        input_ids, loss_mask = inputs["input_ids"], inputs["loss_mask"]
        layers = self.head.hidden_layers
        # padding is on the right, where causal attention does not look: without a mask the faster kernels are used
        hidden = self.store.read(inputs, layers) if self.store else features(self.target, input_ids, None, layers)
        bad = ~finite(hidden, inputs["attention_mask"].bool())
        if bad.any():
            names = ", ".join(map(str, inputs["index"][bad].tolist()))
            if not self.skip_nonfinite:
                raise ValueError(
                    f"the target's features of record {names} hold NaN or infinity (dtype {hidden[0].dtype}): look at the "
                    "record, take a wider --dtype, or skip such records with --skip-nonfinite."
                )
            self.skipped.update(inputs["index"][bad].tolist())
            loss_mask = loss_mask & ~bad[:, None]
            hidden = tuple(layer.masked_fill(bad[:, None, None], 0) for layer in hidden)
        loss, metrics = model(input_ids, hidden, loss_mask) if loss_mask.any() else (0.0, {})
        if not (torch.is_tensor(loss) and loss.requires_grad) and torch.is_grad_enabled():
            loss = loss + sum(0.0 * parameter.sum() for parameter in self.head.parameters())  # nothing to learn here
        return torch.as_tensor(loss), metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the head's metrics, as means over the trained tokens since the last time."""
        if "loss" in logs and self.sums.get("tokens"):
            names = sorted(self.sums)
            totals = self.accelerator.reduce(torch.tensor([self.sums[name] for name in names]).to(self.args.device))
            totals = dict(zip(names, totals.tolist(), strict=True))
            tokens = totals.pop("tokens")
            logs |= {name: value / tokens for name, value in totals.items()}
            self.sums.clear()
        super().log(logs, start_time)

    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """The head's loss and metrics on the held-out examples, and what `validate` reports."""
        self.head.eval()
        sums, size = defaultdict(float), self.args.eval_batch_size
        for start in range(0, len(self.held_out), size):
            batch = self._prepare_inputs(collate(self.held_out[start : start + size]))
            count = int(batch["loss_mask"].sum())
            with self.compute_loss_context_manager():
                loss, metrics = self.head_loss(self.model, batch)
            sums["tokens"] += count
            for name, value in {"loss": loss, **metrics}.items():
                sums[name] += float(value) * count
        tokens = sums.pop("tokens", 1)
        report = {name: value / tokens for name, value in sums.items()}
        report |= self.validate() if self.validate else {}
        self.head.train()
        report = {f"{metric_key_prefix}_{name}": value for name, value in report.items()}
        self.log(dict(report))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, report)
        return report

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        """A checkpoint's weights: the head as users load it."""
        self.head.save_pretrained(output_dir or self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        weights = load_file(os.path.join(resume_from_checkpoint, "model.safetensors"))
        self.head.load_state_dict(weights)


def prepare_arguments(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    batch_size: int,
    accumulate: int,
    epochs: float,
    max_steps: int | None,
    max_minutes: float | None,
    learning_rate: float,
    weight_decay: float,
    clip: float,
    log_steps: int,
    eval_steps: int | None,
    save_steps: int,
    report_to: str,
    seed: int,
) -> TrainingArguments:
    """The trainer's arguments; where the target computes in 16 bits the head trains in autocast, its weights in float32."""
    by_time = max_minutes is not None and max_steps is None
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=device.type == "cpu",
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        gradient_accumulation_steps=accumulate,
        num_train_epochs=100_000 if by_time else epochs,
        max_steps=-1 if max_steps is None else max_steps,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        adam_beta2=0.95,
        max_grad_norm=clip,
        logging_steps=log_steps,
        eval_strategy="no" if eval_steps is None else "steps",
        eval_steps=eval_steps,
        save_steps=save_steps,
        save_total_limit=2,
        report_to=report_to,
        remove_unused_columns=False,
        ddp_find_unused_parameters=True,  # a head may find nothing to learn in one process's batch
        dataloader_pin_memory=False,
        seed=seed,
    )


def collate(examples: Sequence[Example], *, pad_id: int = 0) -> dict[str, torch.Tensor]:
    """A batch, padded on the right: input_ids `(b, t)`, attention_mask `(b, t)`, loss_mask `(b, t)`, index `(b)`."""
    lengths = torch.tensor([len(example.input_ids) for example in examples])
    longest = int(lengths.max())
    input_ids = torch.full((len(examples), longest), pad_id)
    loss_mask = torch.zeros(len(examples), longest, dtype=torch.bool)
    for row, example in enumerate(examples):
        input_ids[row, : lengths[row]] = torch.tensor(example.input_ids)
        loss_mask[row, : lengths[row]] = torch.tensor(example.loss_mask)
    return {
        "input_ids": input_ids,
        "attention_mask": (torch.arange(longest) < lengths[:, None]).long(),
        "loss_mask": loss_mask,
        "index": torch.tensor([example.index for example in examples]),
    }


def last_checkpoint(output: str | os.PathLike) -> str | None:
    """The newest checkpoint that was written whole: its trainer state, written last, is there."""
    found = {}
    for folder in Path(output).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        try:
            found[json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]] = str(folder)
        except (OSError, ValueError, KeyError):
            continue  # interrupted while it was written
    return found[max(found)] if found else None
