"""Lookahead decoding (Fu et al. 2024). The target itself guesses n-grams, by parallel Jacobi iteration beside the text.

A window of guessed future tokens runs in the same forward as the verification; its diagonals yield n-grams for a pool,
and pooled n-grams that begin with the last token are drafted. Both branches are subtrees of the one draft tree.
"""

from __future__ import annotations

import random

import torch

from hf_specdec.generator import SpecGenerator, Step
from hf_specdec.tree import DraftTree


class LookaheadGen(SpecGenerator):
    """Drafts n-grams that the target guessed in earlier steps.

    The window has N-1 rows of W tokens. Row 0 begins with the text's last token; cell (l, i) sees row 0 up to column i
    and its own column above it, which makes the window a tree under the root: row 0 a chain, each column a branch.

    Args:
        window (`int`): W, columns of the window.
        ngram (`int`): N, tokens per n-gram, at least 3.
        guesses (`int`): G, n-grams pooled per first token, and most to verify at once.
        pool_from_prompt (`bool`): fill the pool with the prompt's n-grams first.

    Raises:
        ValueError: if a size is too small.
    """

    name = "lookahead"
    whole_draft_only = True

    def __init__(self, *, window: int = 3, ngram: int = 3, guesses: int = 4, pool_from_prompt: bool = True):
        super().__init__()
        self.check_counts(window=window, guesses=guesses)
        self.check_counts(least=3, ngram=ngram)
        self.window = window
        self.ngram = ngram
        self.guesses = guesses
        self.pool_from_prompt = pool_from_prompt
        self.max_nodes = 1 + (window + guesses) * (ngram - 1)

    def begin(self, input_ids: torch.Tensor, **call) -> None:
        prompt = input_ids[0].tolist()
        self.pool: dict[int, dict[tuple[int, ...], None]] = {}  # first token -> n-gram's rest, oldest first
        self.random = random.Random(0)  # of the drafts only
        self.prompt = prompt or [0]
        # rows of guesses, row 0 without its first cell; the others are filled one a step
        self.rows = [[self.random.choice(self.prompt) for _ in range(self.window - 1)]]
        self.cells: list[list[int]] = []
        if self.pool_from_prompt:
            for i in range(len(prompt) - self.ngram + 1):
                self.add(prompt[i : i + self.ngram])

    def add(self, ngram: list[int]) -> None:
        """Puts an n-gram in the pool, or moves it to its young end."""
        rests = self.pool.setdefault(ngram[0], {})
        rests.pop(tuple(ngram[1:]), None)
        rests[tuple(ngram[1:])] = None
        if len(rests) > self.guesses:
            del rests[next(iter(rests))]

    def draft(self, input_ids: torch.Tensor, *, max_depth: int) -> DraftTree:
        root = int(input_ids[0, -1])
        guesses = [rest[:max_depth] for rest in reversed(self.pool.get(root, {}))]
        verified = DraftTree.from_paths(root, guesses, max_nodes=self.max_nodes, device="cpu")
        self.cells = []
        if max_depth < self.window + self.ngram:  # the window would look beyond what can be emitted
            return DraftTree.from_lists(*verified.host, device=input_ids.device)
        tokens, parents = (list(nodes) for nodes in verified.host)
        # a cell may carry the token of a guess beside it: they stay two nodes, and the guess, which comes first, counts
        for level, row in enumerate(self.rows):
            cells = [0] if level == 0 else []
            for token in row:
                parent = cells[-1] if level == 0 else self.cells[level - 1][len(cells)]
                cells.append(len(tokens))
                tokens.append(token)
                parents.append(parent)
            self.cells.append(cells)
        self.tree = DraftTree.from_lists(tokens, parents, device=input_ids.device)
        return self.tree

    def observe(self, step: Step) -> None:
        if not self.cells or step.tree is not self.tree or step.logits is None:  # not verified, or cut to a chain
            return
        new = step.logits[self.cells[-1]].argmax(dim=-1).tolist()  # [w], the row below the last one
        if len(self.rows) < self.ngram - 1:
            self.rows.append(new)
        else:
            heads = [step.tree.host[0][0], *self.rows[0]]
            for column, head in enumerate(heads):
                self.add([head, *(row[column] for row in self.rows[1:]), new[column]])
            # every row moves up; the new row 0 loses its first cell, where the text's next token goes
            self.rows = [self.rows[1][1:], *self.rows[2:], new]
