"""EAGLE heads: what they read, what they learn, what they draft, and whose files they load."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import generate, prompt, shared, tiny
from torch import nn

from hf_specdec import HybridGen, SAMGen
from hf_specdec.cache import TreeCache
from hf_specdec.checkpoints import load_eagle
from hf_specdec.export import export_eagle
from hf_specdec.methods.eagle import EAGLE_1_TREE, EagleGen, EagleHead

KINDS = {
    "eagle": {},
    "eagle-reduced": {"draft_ids": torch.arange(0, 97, 2)},
    "eagle3": {"fused": True},
    "eagle3-reduced": {"fused": True, "draft_ids": torch.arange(1, 97, 2), "own_lm_head": True},
}


def head_for(model, kind="eagle", **options):
    torch.manual_seed(0)
    head = EagleHead.for_target(model, **KINDS[kind], **options).to(model.dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)  # so that drafts vary
    head.attach(model)
    return head


def hidden_of(model, head, ids):
    states = model(ids, output_hidden_states=True).hidden_states
    return [states[layer] for layer in head.hidden_layers]


@torch.no_grad()
def teacher_forced(model, head, ids):
    """Keys, values and logits of one pass over all pairs (feature of token t, token t+1)."""
    features = [layer[:, :-1] for layer in hidden_of(model, head, ids)[:-1]]
    n, rows = ids.shape[1] - 1, TreeCache(1, capacity=64)
    mask = torch.zeros(n, n, dtype=model.dtype).masked_fill_(torch.ones(n, n).triu(1).bool(), -torch.inf)
    _, logits = head(ids[0, 1:], head.states(features)[0], torch.arange(n), rows, mask)
    return rows, logits


@pytest.mark.parametrize("kind", KINDS)
def test_after_every_step_the_heads_rows_are_those_of_the_true_features(kind):
    model = shared()
    generator = EagleGen(head_for(model, kind), min_probability=0)
    checked = []

    class Probe(EagleGen):
        def draft(self, input_ids, *, max_depth):
            tree = super().draft(input_ids, max_depth=max_depth)
            rows, _ = teacher_forced(model, self.head, input_ids)
            n = self.num_text_rows
            assert n == input_ids.shape[1] - 1
            own, right = self.rows.layers[0], rows.layers[0]
            torch.testing.assert_close(own.keys[:, :, :n], right.keys)
            torch.testing.assert_close(own.values[:, :, :n], right.values)
            checked.append(n)
            return tree

    generate(model, prompt(9), Probe(generator.head, min_probability=0), max_new_tokens=30)
    assert len(checked) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_training_sees_what_inference_sees(kind, monkeypatch):
    """Level 0 of the loss gives inference's logits at each place; level 1, those one drafted token further."""
    model = shared()
    head, ids = head_for(model, kind), prompt(12)
    captured = []
    plain = head.logits
    monkeypatch.setattr(head, "logits", lambda output: captured.append(plain(output)) or captured[-1])
    mask = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        head.loss(ids, hidden_of(model, head, ids), mask, unroll=2)
    level0, level1 = captured
    monkeypatch.undo()
    rows, logits = teacher_forced(model, head, ids)
    torch.testing.assert_close(level0, logits[:-1])  # the last place has nothing left to predict
    for t in range(9):
        rows, features = TreeCache(1, capacity=64), [layer[:, : t + 1] for layer in hidden_of(model, head, ids)[:-1]]
        mask = torch.zeros(t + 1, t + 1, dtype=model.dtype).masked_fill_(
            torch.ones(t + 1, t + 1).triu(1).bool(), -torch.inf
        )
        with torch.no_grad():
            state, _ = head(ids[0, 1 : t + 2], head.states(features)[0], torch.arange(t + 1), rows, mask)
            zeros = torch.zeros(1, t + 2, dtype=model.dtype)
            _, logits = head(ids[0, t + 2 : t + 3], state[-1:], torch.tensor([t + 1]), rows, zeros)
        torch.testing.assert_close(level1[t], logits[0])


@pytest.mark.parametrize("options", [{}, {"attention_bias": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_the_projections_joined_for_drafting_are_those_that_are_trained(kind, options):
    model, ids = shared(), prompt(12)
    head = head_for(model, kind, **options)
    for zero_at_first in (head.layer.o_proj, head.layer.down_proj):
        nn.init.normal_(zero_at_first.weight)
    for name in ("q_proj", "k_proj", "v_proj") if options else ():
        nn.init.normal_(getattr(head.layer, name).bias)
    rows, logits = teacher_forced(model, head, ids)
    generate(model, prompt(9), EagleGen(head))
    assert head.layer._joined
    joined_rows, joined_logits = teacher_forced(model, head, ids)
    torch.testing.assert_close(joined_logits, logits)
    torch.testing.assert_close(joined_rows.layers[0].keys, rows.layers[0].keys)
    torch.testing.assert_close(joined_rows.layers[0].values, rows.layers[0].values)
    loss, _ = head.loss(ids, hidden_of(model, head, ids), torch.ones_like(ids, dtype=torch.bool))
    loss.backward()
    assert all(getattr(head.layer, name).weight.grad.any() for name in ("q_proj", "k_proj", "v_proj", "gate_proj"))
    assert not head.layer._joined
    for change in (lambda: head.load_state_dict(head.state_dict()), lambda: head.to(torch.float32)):
        head.layer.join()
        change()
        assert not head.layer._joined


def biased():
    """A target whose lm_head has a bias that counts."""
    model = tiny("phi")
    with torch.no_grad():
        model.lm_head.bias.normal_(std=3, generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize("kind", ["eagle", "eagle-reduced", "eagle3"])
def test_the_targets_lm_head_is_borrowed_with_its_bias(kind):
    model, states = biased(), torch.randn(5, 32, dtype=torch.float64)
    head = head_for(model, kind)
    with torch.no_grad():
        expected = model.lm_head(head.norm(states) if head.config.fused else states)
        torch.testing.assert_close(head.logits(states), expected[:, KINDS[kind].get("draft_ids", torch.arange(97))])


@pytest.mark.parametrize("make", [shared, biased])
def test_the_loss_is_on_the_answers_tokens_and_asks_for_the_targets_distribution(make):
    model = make()
    head, ids = head_for(model), prompt(10)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[0, 6:] = True
    hidden = hidden_of(model, head, ids)
    with torch.no_grad():
        loss, metrics = head.loss(ids, hidden, mask, unroll=1)
        _, logits = teacher_forced(model, head, ids)
        wanted = [t for t in range(9) if t + 2 < 10 and mask[0, t + 2]]  # index t predicts token t+2
        p = model(ids).logits[0, [t + 1 for t in wanted]].softmax(-1)
        expected = -(p * logits[wanted].log_softmax(-1)).sum(-1).mean()
    assert wanted == [4, 5, 6, 7]
    assert float(loss) == pytest.approx(float(expected))
    assert set(metrics) == {"top1_1"}


@pytest.mark.parametrize("kind", ["eagle-reduced", "eagle3-reduced"])
def test_only_ids_of_the_draft_vocabulary_are_drafted(kind):
    model = shared()
    generator = EagleGen(head_for(model, kind), min_probability=0)
    allowed, drafted = set(KINDS[kind]["draft_ids"].tolist()), set()

    class Probe(EagleGen):
        def draft(self, input_ids, *, max_depth):
            tree = super().draft(input_ids, max_depth=max_depth)
            drafted.update(tree.tokens[1:].tolist())
            return tree

    generate(model, prompt(9), Probe(generator.head, min_probability=0))
    assert drafted and drafted <= allowed


def test_an_accelerator_is_not_asked_how_many_nodes_are_likely():
    scores = torch.linspace(0, -30, 40)
    assert len(EagleGen(max_nodes=20).likeliest(scores)) < 19
    assert EagleGen(max_nodes=20).likeliest(scores.to("meta")).shape == (19,)


def brute_force_tree(generator, root, depth):
    """The likeliest candidates of EAGLE-2's beam, by plain Python over paths."""
    head, (tokens, state), k = generator.head, generator.new, generator.top_k
    n = len(tokens)

    def log_probabilities(path):
        """After the text and a drafted path, fed one token at a time."""
        rows = TreeCache(1, capacity=64)
        mask = torch.zeros(n, n, dtype=state.dtype).masked_fill_(torch.ones(n, n).triu(1).bool(), -torch.inf)
        states, logits = head(tokens, state, torch.arange(n), rows, mask)
        last = states[-1:]
        for i, token in enumerate(path):
            zeros = torch.zeros(1, n + i + 1, dtype=state.dtype)
            last, logits = head(torch.tensor([token]), last, torch.tensor([n + i]), rows, zeros)
        return logits[-1].float().log_softmax(-1)

    candidates, frontier = {}, {(): 0.0}
    for _ in range(depth):
        level = {}
        for path, score in frontier.items():
            likely, ids = log_probabilities(path).topk(k)
            level |= {(*path, int(i)): score + float(p) for p, i in zip(likely, ids, strict=True)}
        candidates |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[:k])
    best = sorted(candidates.items(), key=lambda item: -item[1])[: generator.max_nodes - 1]
    return {path for path, _ in best}


@torch.no_grad()
def test_the_tree_is_the_published_beam_reranked():
    model = shared()
    generator = EagleGen(head_for(model), top_k=3, depth=3, max_nodes=8, min_probability=0)
    checked = 0

    class Probe(EagleGen):
        def draft(self, input_ids, *, max_depth):
            nonlocal checked
            expected = brute_force_tree(self, int(input_ids[0, -1]), 3) if self.num_text_rows == 0 else None
            tree = super().draft(input_ids, max_depth=max_depth)
            if expected is not None:
                tokens, parents = tree.host
                paths = {0: ()}
                for node in range(1, len(tokens)):
                    paths[node] = (*paths[parents[node]], tokens[node])
                assert set(paths.values()) - {()} == expected
                checked += 1
            return tree

    generate(model, prompt(9), Probe(generator.head, top_k=3, depth=3, max_nodes=8, min_probability=0))
    assert checked == 1


@torch.no_grad()
def test_the_static_tree_is_the_published_one():
    model = shared()
    checked = 0

    class Probe(EagleGen):
        def draft(self, input_ids, *, max_depth):
            nonlocal checked
            head, (tokens, state), first = self.head, self.new, self.num_text_rows == 0
            tree = super().draft(input_ids, max_depth=max_depth)
            if first:
                expected = set()
                for path in EAGLE_1_TREE:
                    rows, n, words = TreeCache(1, capacity=64), len(tokens), ()
                    mask = torch.zeros(n, n, dtype=state.dtype).masked_fill_(
                        torch.ones(n, n).triu(1).bool(), -torch.inf
                    )
                    states, logits = head(tokens, state, torch.arange(n), rows, mask)
                    for i, place in enumerate(path):
                        words += (int(logits[-1].float().topk(4).indices[place]),)
                        zeros = torch.zeros(1, n + i + 1, dtype=state.dtype)
                        states, logits = head(
                            torch.tensor(words[-1:]), states[-1:], torch.tensor([n + i]), rows, zeros
                        )
                    expected.add(words)
                paths = {0: ()}
                for node, (token, parent) in enumerate(zip(*tree.host, strict=True)):
                    paths[node] = (*paths[parent], token) if node else ()
                assert len(tree) == 26 and set(paths.values()) - {()} == expected
                checked += 1
            return tree

    generate(model, prompt(9), Probe(head_for(model), tree="static"), max_new_tokens=30)
    assert checked == 1
    with pytest.raises(ValueError, match="'dynamic' or 'static'"):
        EagleGen(head_for(model), tree="fixed")


@pytest.mark.parametrize(
    "options",
    [{"top_k": 1}, {"depth": 1, "top_k": 8}, {"depth": 8, "top_k": 1}, {"max_nodes": 60}, {"tree": "static"}],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_trees_shape_never_changes_the_text(kind, options):
    model = shared()
    text = generate(model, prompt(9))
    assert torch.equal(generate(model, prompt(9), EagleGen(head_for(model, kind), min_probability=0, **options)), text)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_head_learns_a_text_by_heart_and_drafts_it(kind):
    model = tiny("llama", dtype=torch.float32)
    text = generate(model, prompt(9), max_new_tokens=60)
    torch.manual_seed(0)
    head = EagleHead.for_target(model, **KINDS[kind])
    mask = torch.ones_like(text, dtype=torch.bool)
    mask[:, :9] = False
    with torch.no_grad():
        hidden = hidden_of(model, head, text)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(300):
        optimizer.zero_grad()
        head.loss(text, hidden, mask)[0].backward()
        optimizer.step()
    generator = EagleGen(head, min_probability=0, min_level_probability=0)
    assert torch.equal(generate(model, prompt(9), generator, max_new_tokens=60), text)
    assert generator.stats.tokens_per_step > 2


@pytest.mark.parametrize("kind", KINDS)
def test_saving_and_loading_keeps_config_and_logits_and_none_of_the_target(kind, tmp_path):
    model = shared()
    head = head_for(model, kind)
    head.save_pretrained(tmp_path)
    again = load_eagle(str(tmp_path), EagleHead).to(model.dtype)
    again.attach(model)
    assert again.config.to_diff_dict() == head.config.to_diff_dict()
    ids = prompt(12)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in head.state_dict().items())
    torch.testing.assert_close(teacher_forced(model, head, ids)[1], teacher_forced(model, again, ids)[1])
    saved = load_file(tmp_path / "model.safetensors")
    assert not any("embed" in name or "lm_head" in name for name in saved)


# files of other projects


def official_eagle1(head, folder, *, embeddings=None):
    """As SafeAILab writes EAGLE-1 and -2."""
    tensors = {}
    for name, tensor in head.state_dict().items():
        part, _, kind = name.removeprefix("layer.").rpartition(".")
        place = {"post_attention_layernorm": part}.get(part, ("self_attn." if part[0] in "qkvo" else "mlp.") + part)
        tensors[f"layers.0.{place}.{kind}" if name.startswith("layer.") else name] = tensor.clone()
    if embeddings is not None:
        tensors["embed_tokens.weight"] = embeddings.clone()
    torch.save(tensors, folder / "pytorch_model.bin")
    c = head.config
    config = dict(
        model_type="llama",
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_attention_heads=c.num_attention_heads,
        vocab_size=97,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        num_hidden_layers=1,
    )
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("with_embeddings", [False, True])
def test_safeailab_eagle1_files_load(tmp_path, with_embeddings):
    model = shared()
    head, ids = head_for(model), prompt(12)
    official_eagle1(head, tmp_path, embeddings=model.get_input_embeddings().weight if with_embeddings else None)
    again = load_eagle(str(tmp_path), EagleHead)
    again.attach(model)
    torch.testing.assert_close(teacher_forced(model, again, ids)[1], teacher_forced(model, head, ids)[1])
    assert again.config.rope_theta == 10000.0


@pytest.mark.parametrize("dialect", ["sglang", "speculators"])
@pytest.mark.parametrize("kind", ["eagle3", "eagle3-reduced"])
def test_exported_heads_load_again_with_equal_logits(tmp_path, dialect, kind):
    model = shared()
    options = {"norm_before_residual": True, "feed_back_normed": True} if dialect == "speculators" else {}
    head, ids = head_for(model, kind, **options), prompt(12)
    export_eagle(head, tmp_path, dialect=dialect, target="user/target")
    prefix = {"sglang": "midlayer.", "speculators": "layers.0."}[dialect]
    saved = load_file(tmp_path / "model.safetensors")
    assert f"{prefix}hidden_norm.weight" in saved and ("d2t" in saved) == ("reduced" in kind)
    again = load_eagle(str(tmp_path), EagleHead)
    again.attach(model)
    torch.testing.assert_close(teacher_forced(model, again, ids)[1], teacher_forced(model, head, ids)[1])
    assert list(again.feature_layers) == list(head.feature_layers)
    text = generate(model, prompt(9))
    generators = [EagleGen(item, min_probability=0) for item in (head, again)]
    assert all(torch.equal(generate(model, prompt(9), generator), text) for generator in generators)
    assert generators[0].stats.accepted_lengths == generators[1].stats.accepted_lengths


def test_official_eagle3_needs_no_layer_ids_and_norms_per_feature_load(tmp_path):
    """SafeAILab's config names no layers (2, L//2, L-3 are meant); SpecForge's fc_norm comes as three more tensors."""
    model = shared()
    head, ids = head_for(model, "eagle3", fc_norm=True), prompt(12)
    export_eagle(head, tmp_path, dialect="sglang", target="user/target")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eagle_config"], config["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "fc_norm.0.weight" in load_file(tmp_path / "model.safetensors")
    again = load_eagle(str(tmp_path), EagleHead)
    again.attach(model)
    torch.testing.assert_close(teacher_forced(model, again, ids)[1], teacher_forced(model, head, ids)[1])


def test_a_missing_or_foreign_tensor_is_named(tmp_path):
    model = shared()
    export_eagle(head_for(model, "eagle3"), tmp_path, dialect="sglang", target="user/target")
    tensors = load_file(tmp_path / "model.safetensors")
    lost = tensors.pop("midlayer.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="up_proj"):
        load_eagle(str(tmp_path), EagleHead)
    save_file(
        tensors | {"midlayer.mlp.up_proj.weight": lost, "stranger": lost.clone()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ValueError, match="stranger"):
        load_eagle(str(tmp_path), EagleHead)


def test_a_head_of_ours_without_a_tensor_is_refused(tmp_path):
    head_for(shared()).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="fc.weight"):
        load_eagle(str(tmp_path), EagleHead)


class Bomb:
    def __reduce__(self):
        return (print, ("code from a pickle ran",))


def test_a_pickle_with_code_is_not_run(tmp_path, capsys):
    official_eagle1(head_for(shared()), tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Bomb()}))
    with pytest.raises(ValueError, match="never run"):
        load_eagle(str(tmp_path), EagleHead)
    assert "ran" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_truncated_file_is_named(tmp_path, name):
    official_eagle1(head_for(shared()), tmp_path)
    if name == "model.safetensors":
        save_file(load_eagle(str(tmp_path), EagleHead).state_dict(), tmp_path / name)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=name):
        load_eagle(str(tmp_path), EagleHead)


def test_a_head_for_another_target_is_refused_with_both_sizes():
    head = head_for(shared())
    wider = tiny("llama", hidden_size=64)
    with pytest.raises(ValueError, match="hidden size 32.*64"):
        generate(wider, prompt(9), EagleGen(head))


def test_a_damaged_id_map_is_refused(tmp_path):
    model = shared()
    head = head_for(model, "eagle-reduced")
    head.draft_ids[3] = head.draft_ids[2]
    with pytest.raises(ValueError, match="increasing"):
        generate(model, prompt(9), EagleGen(head))


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_shallow_targets_have_features_too(layers, fused):
    model = tiny("llama", num_hidden_layers=layers)
    head = EagleHead.for_target(model, fused=fused)
    text = generate(model, prompt(9))
    assert torch.equal(generate(model, prompt(9), EagleGen(head, min_probability=0)), text)


def test_in_a_hybrid_it_catches_up_with_the_steps_it_was_not_asked_in(monkeypatch):
    model = shared(scale=4)
    eagle, asked = EagleGen(head_for(model), min_probability=0), []
    draft = eagle.draft

    def counted(input_ids, *, max_depth):
        tree = draft(input_ids, max_depth=max_depth)
        assert eagle.num_text_rows == input_ids.shape[1] - 1
        asked.append(len(input_ids))
        return tree

    monkeypatch.setattr(eagle, "draft", counted)
    hybrid = HybridGen([SAMGen(), eagle], enough=0.3, min_probability=0)
    text = generate(model, prompt(9), max_new_tokens=90)
    assert torch.equal(generate(model, prompt(9), hybrid, max_new_tokens=90), text)
    assert 0 < len(asked) < hybrid.stats.steps
    monkeypatch.setattr(eagle, "draft", draft)
    # in transformers' own loop, which shows no features, it drafts nothing, and the others go on
    monkeypatch.setattr(model, "_get_candidate_generator", lambda **call: hybrid, raising=False)
    assert torch.equal(generate(model, prompt(9), max_new_tokens=90, prompt_lookup_num_tokens=3), text)


def test_it_follows_a_model_that_was_cast_since_the_last_call():
    model = tiny()
    generator = EagleGen(head_for(model, "eagle-reduced"), min_probability=0)
    generate(model, prompt(9), generator)
    model.float()
    assert torch.equal(generate(model, prompt(9), generator), generate(model, prompt(9)))
    assert generator.head.dtype == torch.float32
