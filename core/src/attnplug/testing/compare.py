"""Hold an output against the truth: shape, dtype, finiteness, budget; and name the fault where it does not hold."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..attention_io import AttentionOutput
from .expected import Expected, answer, problems, true_rules
from .misread import misreadings
from .poison import HUGE
from .results import Failure
from .step import Step
from .variants import Variant, lse_variants, variants
from .world import World

OVERFLOW = 88.0
"""exp of more is infinite in float32."""
MATCH = 4.0
"""A variant is named where the output is within this many budgets of it, and nearer to it than to the truth."""


def check_output(world: World, step: Step, index: int, got: AttentionOutput, want: Expected, *, lse: bool) -> None:
    """Raise Failure where a layer's result is not what the oracle says.

    Args:
        world: The surroundings.
        step: The step that ran.
        index: The layer.
        got: What the backend returned; rows of padding come last.
        want: The truth and its budget.
        lse: Whether the LSE was asked for.
    """
    layer = world.case.layers[index]
    width = want.out.shape[-1]
    shape = (step.batch.num_tokens, layer.heads, width)
    out = got.out
    if tuple(out.shape) not in (shape, (shape[0], layer.heads * width)):
        raise Failure(f"layer {index}: out is {tuple(out.shape)}; must be {shape}", fault="wrong shape")
    if out.dtype != world.dtype or out.device != want.out.device:
        raise Failure(
            f"layer {index}: out is {out.dtype} on {out.device}; the model's is {world.dtype} on {want.out.device}",
            fault="wrong dtype or device",
        )
    if (got.lse is None) == lse:
        raise Failure(
            f"layer {index}: lse was {'asked for and is None' if lse else 'not asked for and was returned'}",
            fault="LSE not as asked",
        )
    rows = step.num_rows
    out = out.reshape(shape)
    if not bool(torch.isfinite(out[rows:]).all()):
        raise Failure(f"layer {index}: padding rows hold NaN or infinity; must be finite", fault="padding not finite")
    values = out[:rows].double()
    _check_rows(world, step, index, values, want, lse=lse)
    if got.lse is not None:
        _check_lse(world, step, index, got.lse, want)


def _check_rows(world: World, step: Step, index: int, got: Tensor, want: Expected, *, lse: bool) -> None:
    layer, finite = world.case.layers[index], torch.isfinite(got)
    if not bool(finite.all()):
        place = _place(step, (~finite).flatten(1).any(dim=1))
        largest = float(want.lse.max())
        if largest > OVERFLOW:
            raise Failure(
                f"layer {index}: NaN or infinity in {place}: scores reach {largest:.0f}, and their exp overflows; the "
                "largest score of a row is subtracted first",
                fault="softmax overflows",
            )
        raise Failure(
            f"layer {index}: NaN or infinity in {place}: rows that nobody wrote, or reads of pages that no table lists",
            fault="reads unlisted pages or leaves rows unwritten",
        )
    error = (got - want.out).abs().amax(dim=-1)
    over = error > want.allowed.out
    if not bool(over.any()):
        return
    worst = (error / want.allowed.out.clamp_min(torch.finfo(torch.float64).tiny)).argmax()
    row, head = divmod(int(worst), error.shape[1])
    message = (
        f"layer {index}: {_place(step, over.any(dim=1))}: out is off by {float(error[row, head]):.3g} at row {row}, "
        f"head {head}, allowed {float(want.allowed.out[row, head]):.3g} ({int(over.sum())} of "
        f"{over.numel()} rows × heads)"
    )
    if not bool(got.any()):
        # A window of 0 shows one key; one short of that shows none.
        fault = "window off by one" if layer.window == 0 else "output is all zeros"
        raise Failure(f"{message}; every row is zero", fault=fault)
    found = _match_out(world, step, index, got, want, lse=lse)
    if found is not None:
        raise Failure(f"{message}; this looks like: {found.fault} ({found.explanation})", fault=found.fault)
    raise Failure(message + _hint(got, want), fault=_named_by_shape(world, step, index, got, want))


def _match_out(world: World, step: Step, index: int, got: Tensor, want: Expected, *, lse: bool) -> Variant | None:
    rules = true_rules(world, step, index, lse=lse)
    distance = _distance(got, want.out, want)
    mine = variants(rules, world.case.layers[index], has_tree=bool(step.trees))
    for misread in misreadings(world, step, index, problems(world, step, index)):
        there = answer(world, step, index, rules, misread.problems)
        if _distance(got, there.out, want) < min(MATCH, distance / 2):
            return Variant(misread.fault, misread.explanation, rules)
    for variant in (*mine, *_other_layers(world, step, index, lse=lse)):
        there = answer(world, step, index, variant.rules)
        if _distance(got, there.out, want) < min(MATCH, distance / 2):
            return variant
    return None


def _other_layers(world: World, step: Step, index: int, *, lse: bool) -> Iterator[Variant]:
    """Yield the rules of the case's other layers: one plan for all computes each as the one that it was made for."""
    own = true_rules(world, step, index, lse=lse)
    for other in range(len(world.case.layers)):
        rules = true_rules(world, step, other, lse=lse)
        if other != index and rules != own:
            yield Variant("computed as another layer", f"with the scaling, cap and window of layer {other}", rules)


def _distance(got: Tensor, there: Tensor, want: Expected) -> float:
    """Return the largest distance in budgets; a variant may be larger than the truth, and its rounding with it."""
    grown = (there.abs().amax(dim=-1) / want.out.abs().amax(dim=-1).clamp_min(1e-30)).clamp_min(1.0)
    error = (got - there).abs().amax(dim=-1)
    return float((error / (want.allowed.out * grown).clamp_min(torch.finfo(torch.float64).tiny)).max())


def _named_by_shape(world: World, step: Step, index: int, got: Tensor, want: Expected) -> str:
    if float(got.abs().max()) > 0.02 * min(HUGE, torch.finfo(world.kv_dtype).max):
        return "reads positions that the request may not see"
    if _is_permuted(step, got, want):
        return "requests mixed up"
    heads = got[:, :1].expand_as(got)
    if got.shape[1] > 1 and bool((got == heads).all()):
        return "all heads are the first"
    over = ((got - want.out).abs().amax(dim=-1) > want.allowed.out).any(dim=0)
    if not bool(over.all()) and got.shape[1] > 1:
        return "some heads are wrong"
    return ""


def _is_permuted(step: Step, got: Tensor, want: Expected) -> bool:
    """Whether every row is right for some other row of the step."""
    if got.shape[0] < 2:
        return False
    gap = (got[:, None] - want.out[None, :]).abs().amax(dim=-1)
    return bool((gap <= want.allowed.out[None, :]).all(dim=-1).any(dim=1).all())


def _hint(got: Tensor, want: Expected) -> str:
    ratio = float(got.abs().max() / want.out.abs().max().clamp_min(1e-30))
    if ratio > 20:
        return f"; values {ratio:.0f} times too large: poisoned positions are visible"
    return ""


def _check_lse(world: World, step: Step, index: int, got: Tensor, want: Expected) -> None:
    rows, heads = step.num_rows, want.lse.shape[1]
    if tuple(got.shape) != (step.batch.num_tokens, heads) or got.dtype != torch.float32:
        raise Failure(
            f"layer {index}: lse is {tuple(got.shape)} {got.dtype}; must be {(step.batch.num_tokens, heads)} float32",
            fault="wrong shape" if got.dtype == torch.float32 else "wrong dtype or device",
        )
    values = got[:rows].double()
    empty = torch.isneginf(want.lse)
    if bool((torch.isneginf(values) != empty).any()) or bool(torch.isnan(values).any()):
        raise Failure(f"layer {index}: lse must be −inf exactly where no key is visible", fault="LSE of empty rows")
    error = (values - want.lse).abs().masked_fill(empty, 0.0)
    if not bool((error > want.allowed.lse).any()):
        return
    worst = int((error - want.allowed.lse).argmax())
    row, head = divmod(worst, heads)
    message = (
        f"layer {index}: lse is {float(values[row, head]):.5g} at row {row}, head {head}; must be "
        f"{float(want.lse[row, head]):.5g} ± {float(want.allowed.lse[row, head]):.2g}"
    )
    rules = true_rules(world, step, index, lse=True)
    for variant in [*lse_variants(rules), *variants(rules, world.case.layers[index], has_tree=bool(step.trees))]:
        there = answer(world, step, index, variant.rules).lse
        gap = (values - there).abs().masked_fill(empty | torch.isneginf(there), 0.0)
        if bool((gap <= MATCH * want.allowed.lse).all()) and float(gap.max()) < float(error.max()) / 2:
            raise Failure(f"{message}; this looks like: {variant.fault} ({variant.explanation})", fault=variant.fault)
    raise Failure(message, fault="wrong LSE")


def _place(step: Step, rows: Tensor) -> str:
    """Say in which requests, and at which of their queries, rows are wrong."""
    bad, start, words = rows.tolist(), 0, []
    for i, span in enumerate(step.spans):
        count = span.stop - span.start
        wrong = [j for j in range(count) if bad[start + j]]
        start += count
        if wrong:
            which = "all queries" if len(wrong) == count else f"queries {wrong[:6]}"
            words.append(f"request {i} ({count} new after {span.start} cached), {which}")
    return "; ".join(words[:3]) + (f"; and {len(words) - 3} more requests" if len(words) > 3 else "")
