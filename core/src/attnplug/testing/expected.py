"""What a step must give: the oracle applied to the logical tensors of each of its rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..modes import AttentionType, ForwardMode, MlaForm
from .budget import Allowed, allowed_error
from .oracle import Answer, Problem, Rules, attend
from .step import Step
from .world import World


class Expected(NamedTuple):
    """The truth of one layer in one step, with how far a right answer may be from it."""

    out: Tensor
    """[T, Hq, Dv] float64, padding left out."""
    lse: Tensor
    """[T, Hq] float64."""
    allowed: Allowed


def true_rules(world: World, step: Step, index: int, *, lse: bool) -> Rules:
    """Return the pinned semantics of a layer in a step; asking for the LSE leaves sinks to the caller."""
    layer = world.case.layers[index]
    free = layer.cross or layer.attn is not AttentionType.DECODER or step.mode is ForwardMode.DLLM_EXTEND
    chunk = world.case.mla == MlaForm.CHUNKED_PREFIX.value
    return Rules(
        scaling=layer.factor,
        cap=layer.cap,
        window=layer.window,
        causal="none" if free or chunk else "bottom_right",
        sinks="ignored" if lse else "denominator",
    )


def problems(world: World, step: Step, index: int) -> list[Problem]:
    """Return each request of a step as the mathematics sees it."""
    case, data = world.case, world.data[index]
    layer = case.layers[index]
    form = case.mla
    made = []
    for i, span in enumerate(step.spans):
        b = span.request
        q = data.q[b][span.start - case.prefix[b] : span.stop - case.prefix[b]].double()
        first, last = 0, span.stop
        if layer.cross:
            last = case.encoder[b]
        elif form == MlaForm.CHUNKED_PREFIX.value:
            last = span.start
        elif form == MlaForm.ONE_SHOT.value or not layer.reads_pool:
            first = span.start
        k_pos = torch.arange(first, last, device=world.device)
        q_pos = torch.arange(span.start, span.stop, device=world.device)
        tree = None
        if step.trees:
            tree = step.trees[i].to(world.device)
            depth = step.batch.positions[_rows(step, i)]
            q_pos = depth
            k_pos = torch.cat([k_pos[: span.start], depth])
        made.append(Problem(q, data.k_true[b][first:last], data.v_true[b][first:last], q_pos, k_pos, tree))
    return made


def answer(world: World, step: Step, index: int, rules: Rules, requests: list[Problem] | None = None) -> Answer:
    """Return the oracle's answer for every row of a step, under the true rules or those of a fault.

    Args:
        world: Whose tensors.
        step: Which rows.
        index: The layer.
        rules: The semantics.
        requests: The requests as a fault reads them; as they are by default.
    """
    sinks = world.data[index].sinks
    logits = None if sinks is None else sinks.double()
    requests = problems(world, step, index) if requests is None else requests
    parts = [attend(problem, rules, logits) for problem in requests]
    return Answer(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


def expect(world: World, step: Step, index: int, *, lse: bool = False) -> Expected:
    """Return the truth and the budget of one layer."""
    rules = true_rules(world, step, index, lse=lse)
    true = answer(world, step, index, rules)
    sinks = world.data[index].sinks
    allowed = allowed_error(problems(world, step, index), rules, sinks, true, world.dtype)
    return Expected(true.out, true.lse, allowed)


def _rows(step: Step, request: int) -> slice:
    start = sum(span.stop - span.start for span in step.spans[:request])
    return slice(start, start + step.spans[request].stop - step.spans[request].start)
