"""Medusa heads: what they learn from which token, which trees they draft, what is lossy, and whose files they load."""

import pickle
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import generate, prompt, shared, tiny

from hf_specdec import HybridGen, PLDGen
from hf_specdec.checkpoints import load_published
from hf_specdec.generator import Step
from hf_specdec.methods.medusa import MC_SIM_7B_63, MedusaGen, MedusaHead, combinations
from hf_specdec.tree import DraftTree
from hf_specdec.verify import choose_typical

IDS = torch.arange(0, 97, 2)


def random_head(model, *, seed: int = 0, scale: float = 0.3, **options) -> MedusaHead:
    """Heads that differ from each other and from the target's own."""
    torch.manual_seed(seed)
    head = MedusaHead.for_target(model, **options).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return head


def states_of(model, ids: torch.Tensor) -> torch.Tensor:
    """The target's last hidden states `(b, t, h)`."""
    with torch.no_grad():
        return model(ids, output_hidden_states=True).hidden_states[-1]


# the heads


@pytest.mark.parametrize("output", ["target", "shared", "own"])
@pytest.mark.parametrize("draft_ids", [None, IDS])
@pytest.mark.parametrize("family", ["llama", "phi"])  # phi's lm_head has a bias
def test_new_heads_say_what_the_target_says(family, draft_ids, output):
    model = shared(family)
    head = MedusaHead.for_target(model, num_heads=2, num_layers=2, output=output, draft_ids=draft_ids).double()
    states = states_of(model, prompt(5))[0]
    logits = model.get_output_embeddings()(states)
    expected = logits if draft_ids is None else logits[:, draft_ids]
    for i in range(2):
        assert torch.allclose(head.predict(i, states), expected, atol=1e-4)  # its weights were rounded to fp32
    assert torch.allclose(head(states[3], num_heads=2), expected[3].expand(2, -1), atol=1e-4)


@pytest.mark.parametrize("output", ["target", "shared", "own"])
def test_one_state_through_all_heads_is_each_head_by_itself(output):
    model = shared()
    head = random_head(model, num_heads=3, output=output, draft_ids=IDS)
    state = states_of(model, prompt(5))[0, -1]
    one_by_one = torch.stack([head.predict(i, state[None])[0] for i in range(2)])
    assert torch.allclose(head(state, num_heads=2), one_by_one, atol=1e-12)


@pytest.mark.parametrize("draft_ids", [None, IDS])
def test_the_loss_pairs_each_state_with_the_target_two_and_more_tokens_ahead(draft_ids):
    """A prompt of 6 tokens, an answer of 4, padded: the exact (state, target state, head) triples, written out."""
    model, ids = shared(), prompt(12)
    mask = torch.zeros(1, 12, dtype=torch.bool)
    mask[:, 6:10] = True
    states = states_of(model, ids)
    head = random_head(model, num_heads=3, draft_ids=draft_ids)
    # state of token t, token t+1 is the root; head i is asked for t+2+i, which the target says at t+1+i
    pairs = {0: [(5, 6), (6, 7), (7, 8)], 1: [(5, 7), (6, 8)], 2: [(5, 8)]}
    expected = 0
    for i, places in pairs.items():
        losses = []
        for t, target_at in places:
            logits = model.get_output_embeddings()(states[0, target_at])
            p = (logits if draft_ids is None else logits[draft_ids]).softmax(-1)
            losses.append(-(p * head.predict(i, states[0, t]).log_softmax(-1)).sum())
        expected += 0.8**i * torch.stack(losses).mean()
    loss, metrics = head.loss(ids, [states], mask)
    assert torch.allclose(loss.double(), expected, atol=1e-4)  # taken in fp32
    assert list(metrics) == ["top1_1", "top1_2", "top1_3"]
    garbage = states.clone()
    garbage[:, 9:] = torch.nan  # nothing behind the answer's last but one token is looked at
    garbage[:, :5] = torch.nan
    assert torch.equal(head.loss(ids, [garbage], mask)[0], loss)


@pytest.mark.parametrize("answer", [0, 1])
def test_a_batch_with_nothing_to_learn_has_no_loss(answer):
    model, ids = shared(), prompt(12)
    mask = torch.zeros(1, 12, dtype=torch.bool)
    mask[:, 6 : 6 + answer] = True
    loss, metrics = random_head(model).loss(ids, [states_of(model, ids)], mask)
    assert loss == 0 and not metrics


def trained(model, ids: torch.Tensor, *, num_steps: int = 150, **options) -> MedusaHead:
    """Heads trained on one text."""
    torch.manual_seed(0)
    head = MedusaHead.for_target(model, **options).double()
    states, mask = states_of(model, ids), torch.ones_like(ids, dtype=torch.bool)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(num_steps):
        loss, _ = head.loss(ids, [states], mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head


@pytest.mark.parametrize("output", ["target", "shared", "own"])
def test_training_on_a_text_gets_it_accepted(output):
    model = tiny(scale=8)
    with torch.no_grad():
        model.lm_head.weight.mul_(3)  # a target that is sure of itself
    ids = generate(model, prompt(9), max_new_tokens=50)
    assert len(set(ids[0, 9:].tolist())) >= 10
    untrained = MedusaGen(MedusaHead.for_target(model, output=output), min_probability=0)
    after = MedusaGen(trained(model, ids, output=output), min_probability=0)
    for generator in (untrained, after):
        assert torch.equal(generate(model, prompt(9), generator, max_new_tokens=50), ids)
    assert after.stats.tokens_per_step > max(2, 1.5 * untrained.stats.tokens_per_step)


# the drafts


def drafted(head: MedusaHead, model, state: torch.Tensor, *, max_depth: int = 9, **options) -> DraftTree:
    """The tree drafted behind a text that ends in token 7 and whose last state but one is `state`."""
    generator = MedusaGen(head, **options)
    generator.bind(model)
    generator.begin(torch.tensor([[1, 5]]))
    generator.observe(Step(DraftTree.chain([5], device="cpu"), [0], [7], hidden=(state[None],)))
    return generator.draft(torch.tensor([[1, 5, 7]]), max_depth=max_depth)


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """Each node's tokens from the root, which is left out."""
    paths, (tokens, parents) = [()], tree.host
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize("draft_ids", [None, IDS])
@pytest.mark.parametrize(
    ("max_nodes", "max_depth", "min_probability"), [(20, 9, 0), (8, 2, 0), (40, 3, 0.002), (2, 9, 0)]
)
def test_the_tree_holds_the_likeliest_of_all_combinations(max_nodes, max_depth, min_probability, draft_ids):
    model = shared()
    head = random_head(model, num_heads=3, draft_ids=draft_ids)
    state = states_of(model, prompt(9))[0, -1]
    tree = drafted(
        head, model, state, max_nodes=max_nodes, max_depth=max_depth, min_probability=min_probability, top_k=6
    )
    p = head(state, num_heads=3).float().softmax(-1)
    names = IDS if draft_ids is not None else torch.arange(97)
    likely, ids = p.detach().topk(6)
    every = {}
    for depth in range(1, min(max_depth, 3) + 1):
        for places in product(range(6), repeat=depth):
            path = tuple(int(names[ids[i, place]]) for i, place in enumerate(places))
            every[path] = float(torch.stack([likely[i, place] for i, place in enumerate(places)]).prod())
    best = sorted(every.values(), reverse=True)[: max_nodes - 1]
    best = [value for value in best if value >= min_probability]
    assert tree.host[0][0] == 7 and len(set(paths_of(tree))) == len(tree) - 1
    assert [every[path] for path in paths_of(tree)] == pytest.approx(tree.probabilities[1:], rel=1e-4)
    assert tree.probabilities[1:] == pytest.approx(best, rel=1e-4)


def test_combinations_leave_out_no_path_that_may_be_likeliest():
    assert combinations(2, width=10, max_nodes=4) == [(0,), (1,), (2,), (0, 0), (0, 1)]
    few, all_paths = (
        set(combinations(3, width=5, max_nodes=9)),
        [p for d in (1, 2, 3) for p in product(range(5), repeat=d)],
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        p = torch.rand(3, 5, generator=generator).sort(descending=True).values
        score = {path: float(torch.stack([p[i, place] for i, place in enumerate(path)]).prod()) for path in all_paths}
        assert set(sorted(all_paths, key=score.get, reverse=True)[:8]) <= few


def test_the_published_tree_is_drafted_as_it_is():
    model = shared()
    head = random_head(model, num_heads=5)
    state = states_of(model, prompt(9))[0, -1]
    tree = drafted(head, model, state, tree=MC_SIM_7B_63, min_probability=0)
    ids = head(state, num_heads=5).topk(10).indices.tolist()
    expected = {tuple(ids[i][place] for i, place in enumerate(path)) for path in MC_SIM_7B_63}
    assert len(tree) == 64 and set(paths_of(tree)) == expected
    with pytest.raises(ValueError, match=r"path \(1, 0\), but not \(1,\)"):
        drafted(head, model, state, tree=[(0,), (1, 0)])


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_trees_shape_never_changes_the_text(do_sample):
    model, options = shared(scale=4), dict(do_sample=do_sample, max_new_tokens=40)
    head = random_head(model, scale=0.1)
    expected = generate(model, prompt(9), **options)
    shapes = (
        dict(top_k=1),
        dict(max_nodes=64),
        dict(tree=MC_SIM_7B_63),
        dict(max_depth=1),
        dict(tree=[(0,), (1,), (1, 1)]),
    )
    for shape in shapes:
        generator = MedusaGen(head, min_probability=0, **shape)
        assert torch.equal(generate(model, prompt(9), generator, **options), expected)
        assert max(generator.stats.drafted_lengths) < generator.max_nodes


def test_as_part_of_a_hybrid_it_sees_its_states(monkeypatch):
    model = shared(scale=4)
    expected = generate(model, prompt(9), max_new_tokens=40)
    alone = MedusaGen(random_head(model, scale=0.1), min_probability=0)
    hybrid = HybridGen([PLDGen(), MedusaGen(random_head(model, scale=0.1), min_probability=0)], min_probability=0)
    for generator in (alone, hybrid):
        assert torch.equal(generate(model, prompt(9), generator, max_new_tokens=40), expected)
    first = [generator.stats.drafted_lengths[:5] for generator in (hybrid, alone)]  # before the end cuts drafts short
    assert min(first[0]) >= min(first[1]) > 10, first
    monkeypatch.setattr(model, "_get_candidate_generator", lambda **call: hybrid, raising=False)
    assert torch.equal(generate(model, prompt(9), prompt_lookup_num_tokens=3, max_new_tokens=40), expected)


# typical acceptance


def test_typical_acceptance_is_opt_in_and_says_so(caplog):
    model = shared(scale=4)
    head = random_head(model, scale=0.1)
    expected = generate(model, prompt(9), max_new_tokens=40)
    strict = MedusaGen(head, min_probability=0)
    generate(model, prompt(9), strict)
    assert strict.lossless and not strict.stats.notes and not caplog.records
    lossy = MedusaGen(head, min_probability=0, lossy_typical=True, epsilon=0.001, alpha=0.001)
    assert "another text" in caplog.text and len(caplog.records) == 1
    for _ in range(2):
        text = generate(model, prompt(9), lossy, max_new_tokens=40)
        assert not torch.equal(text, expected)  # the threshold accepts nearly anything
        assert not lossy.lossless and [note for note in lossy.stats.notes if note.startswith("lossy: typical")]
    assert len(caplog.records) == 1
    assert lossy.stats.tokens_per_step > strict.stats.tokens_per_step


def test_typical_is_what_the_authors_call_typical():
    p = torch.tensor([[0.5, 0.3, 0.15, 0.04, 0.01]])
    entropy = float(-(p * p.log()).sum())
    least = min(0.09, 0.3 * torch.tensor(-entropy).exp())
    accepted = [token for token in range(5) if choose_typical(p.log(), [token], epsilon=0.09, alpha=0.3) is not None]
    assert accepted == [token for token in range(5) if p[0, token] > least] == [0, 1, 2]
    assert choose_typical(p.log(), [4, 2, 1], epsilon=0.09, alpha=0.3) == 1  # the likeliest of several
    assert choose_typical(p.log(), [], epsilon=0.09, alpha=0.3) is None


# saved and published heads


@pytest.mark.parametrize("output", ["target", "shared", "own"])
@pytest.mark.parametrize("draft_ids", [None, IDS])
def test_saved_heads_come_back_bit_for_bit(draft_ids, output, tmp_path):
    model = shared()
    head = random_head(model, output=output, draft_ids=draft_ids, num_layers=2)
    head.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert not [name for name in names if "lm_head" in name or "embed" in name]
    again = load_published(str(tmp_path), MedusaHead, model).double()
    again.attach(model)
    assert {**again.config.to_dict(), "_name_or_path": None} == {**head.config.to_dict(), "_name_or_path": None}
    state = states_of(model, prompt(9))[0, -1]
    assert torch.equal(again(state, num_heads=4), head(state, num_heads=4))
    generator = MedusaGen(str(tmp_path), min_probability=0)
    assert torch.equal(generate(model, prompt(9), generator), generate(model, prompt(9)))


def published(head: MedusaHead) -> dict[str, torch.Tensor]:
    """The tensors as the authors' files name them."""
    tensors = {}
    for name, tensor in head.state_dict().items():
        kind, i, *rest = name.split(".")
        tensors[".".join([i, *rest] if kind == "blocks" else [i, str(head.config.num_layers), *rest])] = tensor
    return tensors


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("output", ["target", "own"])
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_published_heads_give_equal_logits(prefix, file, output, num_layers, tmp_path):
    model = shared()
    head = random_head(model, output=output, num_heads=3, num_layers=num_layers)
    tensors = {prefix + name: tensor.contiguous() for name, tensor in published(head).items()}
    (torch.save if file.endswith(".pt") else save_file)(tensors, tmp_path / file)
    # the authors' own configs say 2 heads where the file holds 5
    (tmp_path / "config.json").write_text(
        '{"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "t"}'
    )
    again = load_published(str(tmp_path), MedusaHead, model)
    again.attach(model)
    assert again.config.num_heads == 3 and again.config.target == "t"
    state = states_of(model, prompt(9))[0, -1]
    assert torch.equal(again(state, num_heads=3), head(state, num_heads=3))
    assert torch.equal(generate(model, prompt(9), MedusaGen(str(tmp_path))), generate(model, prompt(9)))


class Harmful:
    def __reduce__(self):
        return (print, ("code of the file ran",))


def test_what_is_no_whole_head_is_refused_by_name(tmp_path, capsys):
    model = shared()
    tensors = published(random_head(model, output="own", num_heads=2))
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "medusa_lm_head.pt"
    cases = {
        "missing ..1.0.linear.bias": {name: tensor for name, tensor in tensors.items() if name != "1.0.linear.bias"},
        "unexpected ..surplus": tensors | {"surplus": torch.ones(2)},
        "misshapen ..0.0.linear.bias": tensors | {"0.0.linear.bias": torch.ones(2)},
        "not the tensors of Medusa heads": {"fc.weight": torch.ones(2, 2)},
    }
    for message, wrong in cases.items():
        torch.save(wrong, file)
        with pytest.raises(ValueError, match=message):
            MedusaGen(str(tmp_path)).bind(model)
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(ValueError, match="damaged"):
        MedusaGen(str(tmp_path)).bind(model)
    file.write_bytes(pickle.dumps(Harmful(), protocol=2))
    with pytest.raises(ValueError, match="never run"):
        MedusaGen(str(tmp_path)).bind(model)
    assert "ran" not in capsys.readouterr().out


def test_heads_of_another_target_are_refused_with_both_values():
    head = random_head(shared())
    for changes, message in (
        (dict(hidden_size=64, head_dim=16), "hidden size 32.*has hidden size 64"),
        (dict(vocab_size=101), "vocabulary size 97.*has vocabulary size 101"),
        (dict(num_hidden_layers=2), "number of layers 3.*has number of layers 2"),
    ):
        with pytest.raises(ValueError, match=message):
            MedusaGen(head).bind(tiny(**changes))


@pytest.mark.parametrize("wrong", [[0, 0, 5], [4, 2, 8], [0, 5, 97], [-1, 3, 5]])
def test_a_damaged_draft_vocabulary_is_refused(wrong):
    head = random_head(shared(), draft_ids=torch.tensor([1, 2, 3]))
    head.draft_ids.copy_(torch.tensor(wrong))
    with pytest.raises(ValueError, match="draft vocabulary"):
        MedusaGen(head).bind(shared())


@pytest.mark.parametrize("options", [dict(max_nodes=0), dict(top_k=0), dict(max_depth=0)])
def test_counts_below_one_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=0.*at least 1"):
        MedusaGen(None, **options)
