"""Train: `hf-specdec train METHOD`, also `accelerate launch -m hf_specdec.train METHOD`: a head for a target, from chats."""

from __future__ import annotations

import inspect
import json
import os
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, get_type_hints

import torch
import typer
from accelerate import PartialState
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import METHODS, hub
from hf_specdec.cards import hub_id
from hf_specdec.compare import conditions
from hf_specdec.data import ChatFormat, Chats, Example, frequent_ids, read_chats
from hf_specdec.drafter import Drafter, load_head, target_fields
from hf_specdec.features import FeatureStore
from hf_specdec.generator import SpecGenerator
from hf_specdec.models import EMBEDDED, load_model
from hf_specdec.regenerate import write_own
from hf_specdec.stats import SpecStats

CHECKPOINTS, RECIPE = "checkpoints", "recipe.txt"  # the recipe of the run that the checkpoints are of


def train(
    method: Annotated[str, typer.Argument(help="The drafting method: eagle, kangaroo, medusa, ...")],
    data: Annotated[str, typer.Option("--data", help="A Hub data set or .jsonl file of chats, or 'self'.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The head's folder.")],
    target: Annotated[str, typer.Option("--target", help="Hub id or folder; 'embedded' is SmolLM2-135M.")] = EMBEDDED,
    split: Annotated[str, typer.Option("--split", help="Of a Hub data set.")] = "train",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Take only so many records.")] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Prompts to write for --data self.")] = 2000,
    max_length: Annotated[int, typer.Option("--max-length", min=8, help="Tokens at which examples are cut.")] = 2048,
    field: Annotated[
        list[str] | None, typer.Option("--set", help="A field of the head's config, name=value; several times.")
    ] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option("--draft-vocab-size", min=2, help="Draft only the most frequent ids of the answers.")
    ] = None,
    from_head: Annotated[str | None, typer.Option("--from-head", help="Go on from a trained head.")] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Examples per forward and process.")] = 8,
    accumulate: Annotated[int, typer.Option("--accumulate", min=1, help="Forwards per optimizer step.")] = 1,
    epochs: Annotated[float, typer.Option("--epochs", min=0, help="Unless steps or minutes are given.")] = 3,
    max_steps: Annotated[int | None, typer.Option("--max-steps", min=0, help="Optimizer steps.")] = None,
    max_minutes: Annotated[float | None, typer.Option("--max-minutes", min=0, help="Stop after so long.")] = None,
    learning_rate: Annotated[float, typer.Option("--learning-rate", min=0)] = 5e-4,
    warmup: Annotated[float, typer.Option("--warmup", min=0, max=0.9, help="Share of the budget.")] = 0.03,
    weight_decay: Annotated[float, typer.Option("--weight-decay", min=0)] = 0.0,
    clip: Annotated[float, typer.Option("--clip", min=0, help="Longest gradient.")] = 1.0,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Of the target; in bfloat16 the head trains in autocast.")
    ] = "auto",
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda, ...; the GPU where there is one.")] = None,
    held_out: Annotated[int, typer.Option("--held-out", min=0, help="Examples to keep for evaluation.")] = 16,
    eval_new_tokens: Annotated[int, typer.Option("--eval-new-tokens", min=8)] = 64,
    eval_steps: Annotated[int | None, typer.Option("--eval-steps", min=1, help="Else only at the end.")] = None,
    save_steps: Annotated[int, typer.Option("--save-steps", min=1, help="Steps between checkpoints.")] = 200,
    log_steps: Annotated[int, typer.Option("--log-steps", min=1)] = 10,
    report_to: Annotated[str, typer.Option("--report-to", help="none, tensorboard or trackio.")] = "none",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last whole checkpoint.")] = False,
    skip_nonfinite: Annotated[bool, typer.Option("--skip-nonfinite", help="Skip samples with NaN features.")] = False,
    feature_cache: Annotated[
        Path | None,
        typer.Option("--feature-cache", help="Folder to keep the target's features in; see --dry-run for sizes."),
    ] = None,
    cache_layer: Annotated[
        list[int] | None,
        typer.Option("--cache-layer", help="Keep this layer as well, for heads trained later; several times."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the sizes and stop.")] = False,
    push_to_hub: Annotated[str | None, typer.Option("--push-to-hub", help="Repository for the head.")] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Train a drafting head for a target, on chats whose answers the target wrote (`hf-specdec data regenerate`)."""
    from hf_specdec.trainer import HeadTrainer, last_checkpoint, prepare_arguments

    about = {"command": as_command(locals()), "dataset": None if data == "self" else hub_id(data)}
    if push_to_hub and target != EMBEDDED and hub_id(target) is None:
        raise ValueError(f"--push-to-hub: the head's card must name its target's Hub id, and {target} is a folder's.")
    generator_class = trainable(method)
    options = read_fields(field)
    if from_head and (options or draft_vocab_size):
        raise ValueError("--from-head keeps the head's architecture and ids: give no --set and no --draft-vocab-size.")
    if cache_layer and not feature_cache:
        raise ValueError("--cache-layer says what to keep in a --feature-cache: give its folder.")
    no_budget = 0 in (max_steps, max_minutes)
    checkpoint = last_checkpoint(output / CHECKPOINTS)
    if checkpoint and not (resume or dry_run):
        raise ValueError(f"{output} has checkpoints of another run: go on with --resume, or give another --output.")
    if checkpoint and no_budget and not dry_run:
        raise ValueError("--resume trains on: give more --max-steps or --max-minutes than 0, or another --output.")
    state = PartialState(cpu=device == "cpu")
    model, tokenizer = load_model(target, dtype, device=device or state.device)
    if data == "self":
        # what cannot be is an error now, not after hours of writing
        make_head(generator_class.head_class, model, tokenizer, from_head=from_head, options=options)
        data = str(output / "self.jsonl")
        if dry_run:
            state.print(
                f"the target would write {num_prompts} prompts and its answers into {data}, whose sizes are not known"
            )
            return
        with state.main_process_first():  # the others find everything written
            write_own(model, tokenizer, Path(data), num_prompts=num_prompts, seed=seed)
    chats = read_chats(data, tokenizer, split=split, max_length=max_length, limit=limit)
    examples, kept = chats.split(held_out, seed=seed)
    torch.manual_seed(seed)
    if draft_vocab_size:
        ids = frequent_ids(examples, draft_vocab_size, always=end_ids(model, tokenizer))
        if len(ids) < draft_vocab_size:
            state.print(f"the answers hold no more than {len(ids)} different ids: they are the draft vocabulary")
        options["draft_ids"] = torch.tensor(ids)
    head = make_head(generator_class.head_class, model, tokenizer, from_head=from_head, options=options)
    state.print(chats.describe(), sizes(head, examples, batch_size=batch_size, width=model.dtype.itemsize), sep="\n")
    if dry_run:
        return
    args = prepare_arguments(
        output / CHECKPOINTS,
        dtype=model.dtype,
        device=model.device,
        batch_size=batch_size,
        accumulate=accumulate,
        epochs=epochs,
        max_steps=max_steps,
        max_minutes=max_minutes,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        clip=clip,
        log_steps=log_steps,
        eval_steps=eval_steps,
        save_steps=save_steps,
        report_to=report_to,
        seed=seed,
    )
    this_run = recipe(chats, args)
    whole = f"{this_run}; {len(kept)} held out, warm-up {warmup:g}, clip {clip:g}, target {Path(target).name}, after "
    whole += str(head.config.trained_on)
    if checkpoint:
        check_resumed(output, whole)
    elif state.is_main_process:
        (output / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        (output / CHECKPOINTS / RECIPE).write_text(whole, encoding="utf-8")
    store = None
    if feature_cache:
        store = FeatureStore(feature_cache, chats.examples, model, also=cache_layer or ())
    trainer = HeadTrainer(
        head,
        model,
        args,
        examples=examples,
        held_out=kept,
        warmup=warmup,
        max_seconds=None if max_minutes is None else 60 * max_minutes,
        skip_nonfinite=skip_nonfinite,
        store=store,
        validate=lambda: acceptance(model, head, generator_class, kept, max_new_tokens=eval_new_tokens),
    )
    if not no_budget:
        trainer.train(resume_from_checkpoint=checkpoint)
        this_run = f"{this_run}; {trainer.state.global_step} steps"
        head.config.trained_on = "; then ".join(filter(None, [head.config.trained_on, this_run]))
    report = trainer.evaluate() if kept else {}
    if trainer.skipped:
        print(f"skipped, their features are not finite: records {', '.join(map(str, sorted(trainer.skipped)))}")
    if trainer.is_world_process_zero():
        today = datetime.now(UTC).date().isoformat()
        measured = dict(temperature=0.0, max_new_tokens=eval_new_tokens, answers=len(kept), date=today)
        about |= {"conditions": conditions(model, **measured), "final": report, "log": trainer.state.log_history}
        save(head.to(model.dtype), output, about)
        if push_to_hub:
            print(hub.push(output, push_to_hub, base_model=None if target == EMBEDDED else hub_id(target)).commit_url)


def check_resumed(output: Path, recipe: str) -> None:
    """Raises ValueError if the checkpoints in `output` are of a run by another recipe."""
    path = output / CHECKPOINTS / RECIPE
    begun = path.read_text(encoding="utf-8") if path.is_file() else recipe  # older runs left none
    if begun != recipe:
        raise ValueError(
            f"--resume: the run in {output} was of {begun}; this one would be of {recipe}. Give the options it began with, "
            "or begin another --output with --from-head."
        )


def trainable(method: str) -> type[SpecGenerator]:
    """The generator class of a method that has a head to train."""
    names = [name for name, generator in METHODS.items() if getattr(generator, "head_class", None)]
    if method not in names:
        raise ValueError(f"method {method!r} has no head to train: those that have one are {', '.join(names)}.")
    return METHODS[method]


def read_fields(fields: Sequence[str] | None) -> dict:
    """Fields of a head's config from `name=value` texts; values are JSON where they can be read as such."""
    options = {}
    for item in fields or ():
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"--set {item}: write name=value.")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


def make_head(
    head_class: type[Drafter],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    from_head: str | None,
    options: dict,
) -> Drafter:
    """A head in float32, attached to the target: a new one, or a trained one with all it had."""
    if from_head:
        head = load_head(from_head, head_class).float()
        head.attach(model)
        return head
    try:
        head = head_class.for_target(model, **options)
    except (StrictDataclassError, TypeError) as error:  # fields that there are not, or of another type
        raise ValueError(f"--set: {error.__cause__ or error}") from error
    for name, value in target_fields(model, tokenizer).items():
        setattr(head.config, name, value)
    return head.float()


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids that end an answer."""
    stops = model.generation_config.eos_token_id
    ids = set(stops if isinstance(stops, list) else [stops]) | {tokenizer.eos_token_id}
    if tokenizer.chat_template:
        ids.add(ChatFormat(tokenizer).end_id)
    return ids - {None}


def sizes(head: Drafter, examples: Sequence[Example], *, batch_size: int, width: int) -> str:
    """One line: the head's parameters and what the target's features take, in a batch and if they were stored."""
    parameters = sum(parameter.numel() for parameter in head.parameters())
    longest = max(len(example.input_ids) for example in examples)
    tokens = sum(len(example.input_ids) for example in examples)
    per_token = len(set(head.hidden_layers)) * head.config.target_hidden_size * width
    return (
        f"{type(head).__name__}: {parameters / 1e6:.2f} M parameters; features of {len(set(head.hidden_layers))} layers take "
        f"{batch_size * longest * per_token / 2**20:.1f} MiB for the largest batch, computed as they are needed (stored for "
        f"all {tokens} tokens they would take {tokens * per_token / 2**30:.2f} GiB)"
    )


def recipe(chats: Chats, args) -> str:
    """What a head is trained on and how, in words: for its config."""
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    return (
        f"{chats.describe()}; steps of {batch} examples, AdamW, learning rate {args.learning_rate:g} (cosine), weight "
        f"decay {args.weight_decay:g}, {'bf16' if args.bf16 else 'fp16' if args.fp16 else 'fp32'}, seed {args.seed}"
    )


def acceptance(
    model: PreTrainedModel,
    head: Drafter,
    generator_class: type[SpecGenerator],
    examples: Sequence[Example],
    *,
    max_new_tokens: int,
) -> dict[str, float]:
    """What users will get, by `generate` on held-out prompts: tokens per step, and acceptance at each draft position."""
    with torch.random.fork_rng(devices=[]):
        twin = type(head)(head.config)  # the generator casts its head to the target's dtype
    twin.load_state_dict(head.state_dict())
    # a length that follows measured times would say as much of the machine as of the head
    fixed = {"num_draft_tokens": 5} if "num_draft_tokens" in inspect.signature(generator_class).parameters else {}
    generator, pooled = generator_class(twin, **fixed), SpecStats(emitted=1)
    for example in examples:
        prompt = torch.tensor([example.prompt_ids], device=model.device)
        model.generate(prompt, candidate_generator=generator, max_new_tokens=max_new_tokens, do_sample=False)
        stats = generator.stats
        pooled.steps += stats.steps
        pooled.emitted += stats.emitted - 1  # the first token is the prefill's
        pooled.draft_depths += stats.draft_depths
        pooled.accepted_lengths += stats.accepted_lengths
    rates = {f"acceptance_{i}": rate for i, rate in enumerate(pooled.conditional_acceptance, start=1)}
    return {"tokens_per_step": pooled.tokens_per_step, **rates}


def as_command(given: dict) -> str:
    """The command line of a training, without what is at its default or says where; paths by their names alone."""
    words = ["hf-specdec", "train", given["method"]]
    kinds = get_type_hints(train, include_extras=True)
    for name, parameter in inspect.signature(train).parameters.items():
        value = given[name]
        if name in ("method", "resume", "push_to_hub", "report_to") or value == parameter.default:
            continue
        option = kinds[name].__metadata__[0].default  # where typer keeps the first name of an annotated option
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Path) or (isinstance(item, str) and os.path.exists(item)):
                item = Path(item).name
            words += [option] if item is True else [option, str(item)]
    return shlex.join(words)


def save(head: Drafter, output: Path, about: dict) -> None:
    """Writes the head, and beside it how its training went."""
    head.save_pretrained(output)
    (output / hub.TRAINING).write_text(json.dumps(about, indent=1), encoding="utf-8")
    print(json.dumps(about["final"], indent=1), f"the head is in {output}", sep="\n")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(train)
    try:
        app()
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
