"""Training: the target stays as it was, runs resume exactly, processes agree, and what is reported is what users get."""

import copy
import inspect
import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
import torch
import typer
from accelerate.state import AcceleratorState
from huggingface_hub import ModelCard
from tiny import generate, prompt, tiny
from torch import nn
from torch.nn import functional as F
from trained import VOCAB_SIZE, LinearGen, LinearHead, byte_tokenizer
from transformers import TrainerCallback

import hf_specdec.train as training
from hf_specdec import METHODS
from hf_specdec.data import Example
from hf_specdec.features import FeatureStore, features
from hf_specdec.trainer import HeadTrainer, LengthBuckets, Schedule, last_checkpoint, prepare_arguments

TRAINABLE = ["linear", *(name for name, method in METHODS.items() if getattr(method, "head_class", None))]


def target():
    model = tiny(dtype=torch.float32, vocab_size=VOCAB_SIZE, scale=4)
    model.generation_config.eos_token_id = byte_tokenizer().eos_token_id
    return model


@pytest.fixture(autouse=True)
def tiny_target(monkeypatch):
    """`train` finds the tiny target and its tokenizer wherever it looks, and the head of these tests by name."""
    monkeypatch.setitem(METHODS, "linear", LinearGen)
    monkeypatch.setattr(training, "load_model", lambda name, dtype, device: (target(), byte_tokenizer()))


@pytest.fixture
def data(tmp_path):
    rows = [{"prompt": "ab" * (i % 7 + 1), "answer": "xyz" * (i % 5 + 1)} for i in range(30)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "chat.jsonl")


def examples(count=12, *, seed=0):
    """Texts of random ids, each a prompt of at least two tokens and an answer."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 20, (count,), generator=draw).tolist()
    ids = [torch.randint(3, VOCAB_SIZE, (length,), generator=draw).tolist() for length in lengths]
    return [Example(i, row, [j >= 2 + i % 3 for j in range(len(row))]) for i, row in enumerate(ids)]


def run(data, output, method="linear", **options):
    defaults = dict(device="cpu", max_steps=6, batch_size=4, held_out=2, eval_new_tokens=8, log_steps=1, save_steps=3)
    training.train(method, data, Path(output), **defaults | options)
    return METHODS[method].head_class.from_pretrained(output)


def trainer_for(folder, head, model, *, texts=None, batch_size=4, accumulate=1, steps=5, **options):
    args = prepare_arguments(
        Path(folder), dtype=model.dtype, device=model.device, batch_size=batch_size, accumulate=accumulate, epochs=1,
        max_steps=steps, max_minutes=None, learning_rate=1e-2, weight_decay=0.0, clip=1.0, log_steps=1, eval_steps=None,
        save_steps=1000, report_to="none", seed=0,
    )  # fmt: skip
    args.disable_tqdm = True
    return HeadTrainer(head, model, args, examples=texts or examples(), **options)


def trained(folder, **options):
    """Losses and weights of a short run."""
    model = target()
    torch.manual_seed(0)
    head = LinearHead.for_target(model)
    trainer = trainer_for(folder, head, model, **options)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, head.state_dict()


def same(left, right, **tolerance):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], **tolerance or {"rtol": 0, "atol": 0})


def test_the_target_is_frozen_and_never_part_of_the_trained_module(tmp_path):
    model = target()
    before = copy.deepcopy(model.state_dict())
    head = LinearHead.for_target(model)
    start = copy.deepcopy(head.state_dict())
    trainer = trainer_for(tmp_path, head, model)
    trainer.train()
    same(before, model.state_dict())
    assert not model.training and all(weight.grad is None for weight in model.parameters())
    in_optimizer = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
    assert in_optimizer == {id(weight) for weight in head.parameters()}
    assert not torch.equal(start["fc.weight"], head.fc.weight)


def test_features_are_those_a_generator_sees_and_only_the_layers_asked_for_are_kept(monkeypatch):
    model = target()
    generator, ids = LinearGen(LinearHead.for_target(model)), prompt(9)
    seen = []
    monkeypatch.setattr(generator, "observe", lambda step: (seen.append(step), LinearGen.observe(generator, step)))
    generate(model, ids, generator, max_new_tokens=2)
    (layer,) = features(model, ids, None, (2,))
    torch.testing.assert_close(seen[0].hidden[0], layer[0])
    outputs = []
    hook = model.register_forward_hook(lambda module, args, result: outputs.append(result))
    features(model, ids, None, (2, 3, 3))
    hook.remove()
    kept = [states for states in outputs[0].hidden_states if states is not None]
    assert len(kept) == 2 and outputs[0].logits.shape[1] == 1


class Interrupt(TrainerCallback):
    """Stands for a machine that goes away."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("method", ["linear", "sps"])
def test_an_interrupted_run_ends_at_the_same_weights(tmp_path, data, monkeypatch, method):
    options = dict(max_steps=8, accumulate=2, batch_size=2, method=method)
    whole = run(data, tmp_path / "whole", **options)
    started = HeadTrainer.train
    monkeypatch.setattr(
        HeadTrainer, "train", lambda self, **resume: (self.add_callback(Interrupt(7)), started(self, **resume))
    )
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "cut", **options)
    monkeypatch.setattr(HeadTrainer, "train", started)
    partial = tmp_path / "cut" / "checkpoints" / "checkpoint-7"
    partial.mkdir()
    (partial / "trainer_state.json").write_text('{"glob')
    assert last_checkpoint(tmp_path / "cut" / "checkpoints").endswith("checkpoint-6")
    with pytest.raises(ValueError, match="--resume"):
        run(data, tmp_path / "cut", **options)
    same(whole.state_dict(), run(data, tmp_path / "cut", resume=True, **options).state_dict())


def rates(folder):
    log = json.loads((folder / "training.json").read_text())["log"]
    return {row["step"]: row["learning_rate"] for row in log if "learning_rate" in row}


@pytest.mark.parametrize(
    "other", [{"learning_rate": 1e-3}, {"batch_size": 2}, {"seed": 1}, {"limit": 20}, {"held_out": 3}, {"warmup": 0.2}]
)
def test_a_run_is_resumed_as_it_began_or_not_at_all(tmp_path, data, other):
    head = run(data, tmp_path / "head", max_steps=4)
    with pytest.raises(ValueError, match=r"--resume: the run in .* was of .*; this one would be of .*--from-head"):
        run(data, tmp_path / "head", max_steps=8, resume=True, **other)
    same(head.state_dict(), LinearHead.from_pretrained(tmp_path / "head").state_dict())
    run(data, tmp_path / "head", max_steps=6, batch_size=2, accumulate=2, resume=True)  # which is the same run


def test_a_larger_budget_counts_from_where_the_run_was(tmp_path, data):
    run(data, tmp_path / "whole", max_steps=8, warmup=0.2)
    run(data, tmp_path / "head", max_steps=4, warmup=0.2)
    run(data, tmp_path / "head", max_steps=8, warmup=0.2, resume=True)
    whole, grown = rates(tmp_path / "whole"), rates(tmp_path / "head")
    assert {step: grown[step] for step in (6, 7, 8)} == pytest.approx({step: whole[step] for step in (6, 7, 8)})


def test_a_larger_budget_of_time_is_what_is_spent_of_it():
    def scheduler(max_seconds):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        schedule = Schedule(total_steps=10**9, warmup=0.0, max_seconds=max_seconds)
        return schedule, torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

    (before, saved), (after, restored) = scheduler(10), scheduler(20)
    before.spent = 10
    restored.load_state_dict(saved.state_dict())
    after.last = None
    after(1)
    assert after.progress == pytest.approx(0.5)


def test_accumulated_batches_train_as_one_batch(tmp_path):
    losses, weights = trained(tmp_path / "one", batch_size=4)
    parts, weights_of_parts = trained(tmp_path / "four", batch_size=1, accumulate=4)
    assert losses == pytest.approx(parts, rel=1e-4)
    same(weights, weights_of_parts, rtol=1e-3, atol=1e-5)


def one_of_two(rank, port, folder):
    """What each of two processes does; forked, so that nothing is imported again."""
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    AcceleratorState._reset_state(reset_partial_state=True)
    losses, weights = trained(folder, batch_size=2)
    if rank == 0:
        result = {"losses": losses, "weights": weights, "world_size": torch.distributed.get_world_size()}
        torch.save(result, folder / "result.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_train_as_one_with_the_same_global_batch(tmp_path):
    losses, weights = trained(tmp_path / "one", batch_size=4)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = torch.multiprocessing.get_context("fork").Process
    processes = [start(target=one_of_two, args=(rank, port, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
        process.kill()
    result = torch.load(tmp_path / "result.pt")
    assert result["world_size"] == 2 and losses == pytest.approx(result["losses"], rel=1e-4)
    same(weights, result["weights"], rtol=1e-3, atol=1e-5)


def test_features_kept_on_disk_train_the_same_head_without_the_target(tmp_path):
    model, texts = target(), examples()
    _, weights = trained(tmp_path / "online")
    store = FeatureStore(tmp_path / "cache", texts, model, also=[1])
    _, filled = trained(tmp_path / "filled", texts=texts, store=store)
    same(weights, filled)
    _, read = trained(tmp_path / "read", texts=texts, store=FeatureStore(tmp_path / "cache", texts, nothing(model)))
    same(weights, read)
    assert (tmp_path / "cache" / "layer_1.done").read_bytes() == b"\1" * len(texts)
    with pytest.raises(ValueError, match="--feature-cache"):
        FeatureStore(tmp_path / "cache", texts[1:], model)
    assert not list((tmp_path / "online").rglob("*.bin"))


def nothing(model):
    """A model that has a config and cannot run."""
    silent = copy.copy(model)
    silent.forward = None
    return silent


def spoilt(token):
    """A target whose features are NaN where it reads `token`."""
    model = target()
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = float("nan")
    return model


def test_features_that_are_not_finite_name_the_record_or_skip_it(tmp_path):
    texts = [Example(i, [i + 3] * 8, [False] * 3 + [True] * 5) for i in range(8)]
    model = spoilt(5)
    with pytest.raises(ValueError, match="record 2 hold NaN"):
        trainer_for(tmp_path, LinearHead.for_target(model), model, texts=texts).train()
    head = LinearHead.for_target(model)
    skipping = trainer_for(tmp_path / "skip", head, model, texts=texts, batch_size=1, steps=8, skip_nonfinite=True)
    skipping.train()
    assert set(skipping.skipped) == {2} and all(weight.isfinite().all() for weight in head.parameters())


def test_a_warm_start_of_no_steps_keeps_config_and_ids(tmp_path, data):
    first = run(data, tmp_path / "first", draft_vocab_size=8)
    again = run(data, tmp_path / "again", from_head=str(tmp_path / "first"), max_steps=0)
    assert (tmp_path / "first" / "config.json").read_text() == (tmp_path / "again" / "config.json").read_text()
    same(first.state_dict(), again.state_dict())
    further = run(data, tmp_path / "further", from_head=str(tmp_path / "first"), max_steps=1)
    assert torch.equal(further.draft_ids, first.draft_ids) and "; then " in further.config.trained_on
    with pytest.raises(ValueError, match="--from-head keeps"):
        run(data, tmp_path / "other", from_head=str(tmp_path / "first"), draft_vocab_size=9)


def test_a_head_says_what_it_was_trained_on_and_its_ids_hold_the_end_of_turn(tmp_path, data, capsys):
    head = run(data, tmp_path / "head", draft_vocab_size=4)
    tokenizer = byte_tokenizer()
    assert head.draft_ids.tolist() == sorted([*tokenizer("xyz").input_ids, tokenizer.eos_token_id])
    assert "of chat.jsonl" in head.config.trained_on and head.config.trained_on.endswith("; 6 steps")
    assert head.config.vocabulary_hash and head.config.chat_template_hash
    report = json.loads((tmp_path / "head" / "training.json").read_text())
    assert {"eval_loss", "eval_tokens_per_step", "eval_acceptance_1"} <= report["final"].keys()
    assert "trained (" in capsys.readouterr().out


@pytest.mark.parametrize("method", TRAINABLE)
def test_one_answer_learnt_by_heart_is_accepted(tmp_path, method):
    """If training and drafting disagreed by one position, loss would fall and nothing be accepted."""
    model, generator_class = tiny(dtype=torch.float32, vocab_size=VOCAB_SIZE), METHODS[method]
    with torch.no_grad():
        model.lm_head.weight.mul_(10)  # sure of its choices, as trained models are
    text = generate(model, prompt(6), max_new_tokens=24)[0].tolist()
    text = [Example(0, text, [i >= 6 for i in range(len(text))])]
    torch.manual_seed(0)
    head = generator_class.head_class.for_target(model)
    trainer_for(tmp_path, head, model, texts=text, batch_size=1, steps=120).train()
    report = training.acceptance(model, head, generator_class, text, max_new_tokens=24)
    assert report["tokens_per_step"] > (1.8 if method == "linear" else 2), report


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma", "phi", "phi3"])
@pytest.mark.parametrize("method", TRAINABLE)
def test_heads_train_and_draft_for_every_family(tmp_path, method, family):
    model, generator_class = tiny(family, dtype=torch.float32, vocab_size=VOCAB_SIZE), METHODS[method]
    head = generator_class.head_class.for_target(model)
    before = copy.deepcopy(head.state_dict())
    trainer = trainer_for(tmp_path, head, model, steps=2, held_out=examples(2, seed=1))
    trainer.train()
    assert any(not torch.equal(before[name], weight) for name, weight in head.state_dict().items())
    assert all(torch.isfinite(torch.tensor(value)) for value in trainer.evaluate().values())
    assert training.acceptance(model, head, generator_class, examples(1), max_new_tokens=8)["tokens_per_step"] >= 1


def test_a_dry_run_prints_the_sizes_and_writes_nothing(tmp_path, data, capsys):
    training.train("linear", data, tmp_path / "none", device="cpu", dry_run=True)
    printed = capsys.readouterr().out
    assert "M parameters" in printed and "GiB" in printed and not (tmp_path / "none").exists()


def test_a_dry_run_of_the_targets_own_data_writes_none(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "write_own", None)
    training.train("linear", "self", tmp_path / "none", device="cpu", dry_run=True, num_prompts=7)
    assert f"would write 7 prompts and its answers into {tmp_path}" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("budget", [{"max_steps": 0}, {"max_steps": None, "max_minutes": 0}])
def test_no_budget_trains_nothing_and_never_writes_over_a_trained_head(tmp_path, data, budget):
    assert run(data, tmp_path / "new", **budget).config.trained_on is None
    head = run(data, tmp_path / "head")
    with pytest.raises(ValueError, match="--resume trains on"):
        run(data, tmp_path / "head", resume=True, **budget)
    same(head.state_dict(), LinearHead.from_pretrained(tmp_path / "head").state_dict())


def test_a_command_names_files_and_leaves_numbers_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("16", "0.5", "chat.jsonl"):
        (tmp_path / name).touch()
    given = {name: parameter.default for name, parameter in inspect.signature(training.train).parameters.items()}
    given |= {"method": "eagle", "data": str(tmp_path / "chat.jsonl"), "output": tmp_path / "head", "limit": 16}
    command = training.as_command(given | {"max_minutes": 0.5, "cache_layer": [16]})
    options = "--data chat.jsonl --output head --limit 16 --max-minutes 0.5 --cache-layer 16"
    assert command == f"hf-specdec train eagle {options}"


def test_the_study_trains_again_what_was_not_saved_to_the_end(tmp_path):
    for name in ("hf-specdec", "accelerate", "python"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/calls\n')
        (tmp_path / name).chmod(0o755)
    for file in ("eagle/config.json", "kangaroo/config.json", "kangaroo/training.json"):
        (tmp_path / "model" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / file).touch()
    (tmp_path / "question.jsonl").touch()
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "WORK": str(tmp_path),
        "QUESTIONS": str(tmp_path / "question.jsonl"),
    }
    study = Path(__file__).parents[1] / "eval" / "recipes" / "study"
    subprocess.run([study, "user/model"], env=env, check=True)
    calls = (tmp_path / "calls").read_text()
    assert [name for name in ("eagle", "kangaroo", "sps") if f"train {name} " in calls] == ["eagle", "sps"]


def test_a_run_ends_when_its_time_is_spent(tmp_path, data):
    run(data, tmp_path / "head", max_steps=None, max_minutes=0.01, save_steps=10_000)
    log = json.loads((tmp_path / "head" / "training.json").read_text())["log"]
    rates = [row["learning_rate"] for row in log if "learning_rate" in row]
    assert len(rates) > 1 and rates[-1] < max(rates) / 2


def test_batches_hold_similar_lengths_and_every_text():
    lengths = [(7 * i) % 40 + 1 for i in range(50)]
    sampler = LengthBuckets(lengths, batch_size=8, seed=0)
    order = list(sampler)
    assert len(order) == len(sampler) == 56 and set(order) == set(range(50)) and order == list(sampler)
    spread = [max(lengths[i] for i in b) - min(lengths[i] for i in b) for b in zip(*[iter(order)] * 8, strict=True)]
    assert sum(spread) / len(spread) < 8
    sampler.epoch = 1
    assert list(sampler) != order


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's own call
@pytest.mark.parametrize("method", TRAINABLE)
def test_targets_with_adapters_and_quantised_weights_are_taken(tmp_path, method):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(target(), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    for model in (adapted, quantised(target())):
        head = METHODS[method].head_class.for_target(model)
        before = copy.deepcopy(head.state_dict())
        trainer_for(tmp_path / type(model).__name__, head, model, steps=2).train()
        assert any(not torch.equal(before[name], weight) for name, weight in head.state_dict().items())
    (plain,), (moved,) = (features(model, prompt(5), None, (3,)) for model in (target(), adapted))
    assert not torch.allclose(plain, moved)


class Int8Linear(nn.Module):
    """Weight-only quantisation as libraries do it: the weight is an integer buffer, and no parameter is left."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        self.register_buffer("scale", weight.abs().amax(dim=1, keepdim=True) / 127)
        self.register_buffer("int_weight", (weight / self.scale).round().to(torch.int8))

    def forward(self, rows):
        return F.linear(rows, self.int_weight.to(rows.dtype) * self.scale)


def quantised(model):
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, child in list(block.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(block, name, Int8Linear(child))
    return model


def test_wrong_requests_are_errors_before_any_work(tmp_path, data, monkeypatch):
    monkeypatch.setattr(training, "load_model", None)
    with pytest.raises(ValueError, match="no head to train: .*linear"):
        training.train("pld", data, tmp_path)
    with pytest.raises(ValueError, match="name=value"):
        training.train("linear", data, tmp_path, field=["depth"])
    with pytest.raises(ValueError, match="--cache-layer .*--feature-cache"):
        training.train("linear", data, tmp_path, cache_layer=[1])


def test_a_pushed_head_leaves_its_checkpoints_at_home_and_says_how_it_was_trained(tmp_path, data, hub):
    run(data, tmp_path / "head", push_to_hub="user/head", target="user/target", max_steps=1)
    repo = hub.repos["model", "user/head"]
    assert len(repo.messages) == 2
    assert set(repo.files()) == {".gitattributes", "README.md", "config.json", "model.safetensors", "training.json"}
    training = json.loads(repo.files()["training.json"])
    command = training["command"]
    assert command.startswith(f"hf-specdec train linear --data {Path(data).name} --output head --target user/target")
    assert " --max-steps 1 " in command and "push" not in command and str(tmp_path) not in command
    card = ModelCard(repo.files()["README.md"].decode())
    assert command in card.text and card.data.base_model == "user/target"
    (result,) = card.data.eval_results
    assert result.metric_value == pytest.approx(training["final"]["eval_tokens_per_step"], abs=1e-4)
    assert {"hardware", "dtype", "temperature", "date"} < set(result.metric_args)


def test_a_head_for_a_folders_model_is_not_trained_to_be_pushed(tmp_path, data, monkeypatch):
    monkeypatch.setattr(training, "load_model", None)
    with pytest.raises(ValueError, match="must name its target's Hub id"):
        training.train("linear", data, tmp_path, target=str(tmp_path), push_to_hub="user/head")


def test_the_command_line_takes_every_option(tmp_path, data):
    from typer.testing import CliRunner

    app = typer.Typer()
    app.command()(training.train)
    arguments = ["linear", "--data", data, "-o", str(tmp_path / "head"), "--device", "cpu", "--max-steps", "2"]
    arguments += ["--set", "trained_on=before", "--held-out", "0", "--report-to", "tensorboard"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert LinearHead.from_pretrained(tmp_path / "head").config.trained_on.startswith("before; then ")
    assert list((tmp_path / "head").rglob("events*"))
