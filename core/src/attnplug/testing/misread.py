"""Known faults that are not another rule but another reading: other lengths, other trees, places for positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from .oracle import Problem
from .step import Step
from .world import World


class Misreading(NamedTuple):
    """A fault and the requests as it would see them."""

    fault: str
    explanation: str
    problems: list[Problem]


def misreadings(world: World, step: Step, index: int, true: list[Problem]) -> Iterator[Misreading]:
    """Yield the faulty readings that would show in a layer's step, the likelier first.

    Args:
        world: Whose case.
        step: What ran.
        index: The layer.
        true: Each request as it is.
    """
    first = true[0].k.shape[0]
    if len(true) > 1 and any(one.k.shape[0] > first for one in true):
        yield Misreading(
            "the first request's length for all",
            f"every request is read up to position {first - 1}",
            [_cut(one, first) for one in true],
        )
    if world.case.layers[index].cross:
        yield Misreading(
            "the decoder's length for the encoder's",
            "cross attention reads encoder_lens positions, whatever the request's own length",
            [_cut(one, span.stop) for one, span in zip(true, step.spans, strict=True)],
        )
    if step.trees:
        yield from _trees(step, true)
    latent = world.case.layers[index].latent
    if latent and true[0].q.shape[-1] == latent + world.case.layers[index].rope:
        for part, kept in (("rope", slice(0, latent)), ("latent", slice(latent, None))):
            only = [one._replace(q=torch.zeros_like(one.q)) for one in true]
            for cut, one in zip(only, true, strict=True):
                cut.q[..., kept] = one.q[..., kept]
            yield Misreading(f"{part} part forgotten", "scores are of both parts: q_nope·latent + q_rope·k_rope", only)


def _trees(step: Step, true: list[Problem]) -> Iterator[Misreading]:
    def drafts(change: Callable[[int, Problem], torch.Tensor], cached: bool) -> list[Problem]:
        made = []
        for i, one in enumerate(true):
            assert one.tree is not None, "a tree step has a tree a request"
            tree = one.tree.clone()
            width = tree.shape[0]
            if cached:
                tree[:, : tree.shape[1] - width] = True
            else:
                tree[:, tree.shape[1] - width :] = change(i, one)
            made.append(one._replace(tree=tree))
        return made

    def square(one: Problem) -> torch.Tensor:
        assert one.tree is not None, "a tree step has a tree a request"
        return one.tree[:, one.tree.shape[1] - one.tree.shape[0] :]

    yield Misreading(
        "the mask's cells of cached positions ignored",
        "a FULL_MASK has cells for cached positions too, and some are hidden",
        drafts(lambda i, one: square(one), True),
    )
    for turn in range(1, len(true)):
        yield Misreading(
            "tree of another request",
            "a request's cells start at mask.indptr(mask_seq_lens)[mask_row + i]",
            drafts(lambda i, one, turn=turn: square(true[(i + turn) % len(true)]), False),  # type: ignore[misc]
        )
    yield Misreading(
        "window over a tree by place, not by position",
        "a window is measured by batch.positions, which siblings share",
        [
            one._replace(
                q_pos=torch.arange(span.start, span.stop, device=one.q_pos.device),
                k_pos=torch.arange(one.k.shape[0], device=one.k_pos.device),
            )
            for one, span in zip(true, step.spans, strict=True)
        ],
    )


def _cut(problem: Problem, length: int) -> Problem:
    """Return a request of which only the first positions are read; its queries see what causality leaves."""
    length = min(length, problem.k.shape[0])
    seen = torch.arange(problem.k.shape[0], device=problem.k.device)[None, :] < length
    offset = problem.k.shape[0] - problem.q.shape[0]
    row = torch.arange(problem.q.shape[0], device=problem.k.device)[:, None]
    causal = torch.arange(problem.k.shape[0], device=problem.k.device)[None, :] <= offset + row
    cells = seen.expand(problem.q.shape[0], -1)
    return problem._replace(tree=cells & causal if problem.tree is None else cells & problem.tree)
