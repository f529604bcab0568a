"""The known faults, each as the oracle would compute it: a wrong output is compared with them, and a match is named."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from .case import LayerCase
from .oracle import Rules


class Variant(NamedTuple):
    """A fault and the rules under which it would be right."""

    fault: str
    explanation: str
    rules: Rules


def variants(rules: Rules, layer: LayerCase, *, has_tree: bool) -> Iterator[Variant]:
    """Yield the faults that would show in a layer, the likelier first.

    Args:
        rules: The true ones.
        layer: Which features it has.
        has_tree: Whether an explicit mask is in force.
    """

    def one(fault: str, explanation: str, **changes: Any) -> Variant:
        return Variant(fault, explanation, replace(rules, **changes))

    if rules.window >= 0:
        w = rules.window
        if w:
            yield one("window off by one", f"a window of {w} shows w+1 = {w + 1} keys; this shows {w}", window=w - 1)
        yield one("window off by one", f"a window of {w} shows w+1 = {w + 1} keys; this shows {w + 2}", window=w + 1)
        yield one("window ignored", "every key is visible", window=-1)
        if rules.causal == "none":
            yield one("window is causal", "without causality the rule is |p - k| ≤ w", causal="bottom_right")
    if rules.cap:
        yield one("soft cap ignored", "scores are not capped", cap=0.0)
        yield one("soft cap after the mask", "a capped −inf is −cap, so hidden keys weigh", cap_stage="after_mask")
        yield one("soft cap before the scaling", "the cap is of scaled scores", cap_stage="before_scaling")
    if layer.sinks and rules.sinks == "denominator":
        yield one("sinks ignored", "sinks join the denominator", sinks="ignored")
        yield one("sink added twice", "a sink joins the denominator once", sinks="twice")
        yield one("sink applied twice", "a closed state is closed again", sinks="reapplied")
        yield one("sinks of the wrong heads", "each query head has its own sink", sinks="shifted")
        yield one("sink is scaled", "a sink is a logit already", sinks="scaled")
    if layer.sinks and rules.sinks == "ignored":
        yield one("sinks in a state", "a state with its LSE leaves sinks to the caller", sinks="denominator")
        yield one("sinks in a state", "a state's LSE leaves sinks out", sinks="denominator", lse="with_sinks")
    if has_tree:
        yield one("tree ignored", "drafts see their ancestors, not all earlier drafts", use_tree="ignored")
        yield one("tree ignored", "drafts see their ancestors, not every draft", use_tree="ignored", causal="none")
        yield one("tree transposed", "a row of the mask is a query", use_tree="transposed")
    if rules.causal == "bottom_right":
        yield one("top-left causal", "the last query sees all keys; this aligns the first", causal="top_left")
        yield one("not causal", "later keys are visible", causal="none")
        yield one("does not see itself", "a query sees its own key", causal="strict")
    else:
        yield one("causal where it may not be", "every key is visible, later ones too", causal="bottom_right")
        yield one("causal where it may not be", "every key is visible, later ones too", causal="top_left")
    usual = 1.0 / math.sqrt(layer.dim)
    yield one("scaling ignored", "scores are q·k · layer.scaling", scaling=1.0)
    yield one("scaling of its own", f"uses 1/√D = {usual:.4f}; layer.scaling is {rules.scaling}", scaling=usual)
    if layer.latent:
        width = layer.latent + layer.rope
        own = 1.0 / math.sqrt(width)
        yield one("scaling of its own", f"uses 1/√(C + R) = {own:.4f}; layer.scaling is {rules.scaling}", scaling=own)
    yield one("scaling applied twice", "scores are q·k · layer.scaling, once", scaling=rules.scaling**2)
    if layer.heads > layer.kv_heads > 1:
        yield one("wrong GQA grouping", "query head h reads KV head h // group", grouping="interleaved")
    yield from _scales(rules, layer)
    yield one("newest key missed", "the last key is visible to the last query", keys="but_newest")
    yield one("oldest key missed", "position 0 counts", keys="but_oldest")
    yield one("prefix ignored", "cached positions are visible", keys="new_only")
    yield one("new tokens counted twice", "a prefix's state leaves this step's tokens out", counted="new_twice")
    yield one("prefix counted twice", "the new tokens' state leaves the prefix out", counted="prefix_twice")
    yield one("new tokens ignored", "this step's own tokens are visible", keys="cached_only")
    if layer.value_dim == layer.dim:
        yield one("keys taken for values", "the output is of values", value_of="k")


def _scales(rules: Rules, layer: LayerCase) -> Iterator[Variant]:
    ks, vs = layer.k_scale, layer.v_scale
    if ks != 1.0:
        yield Variant("k_scale forgotten", "stored keys are k / k_scale", replace(rules, k_factor=1.0 / ks))
        yield Variant("k_scale applied twice", "stored keys are k / k_scale", replace(rules, k_factor=ks))
    if vs != 1.0:
        yield Variant("v_scale forgotten", "stored values are v / v_scale", replace(rules, v_factor=1.0 / vs))
        yield Variant("v_scale applied twice", "stored values are v / v_scale", replace(rules, v_factor=vs))
    if ks != 1.0 and vs != 1.0:
        both = replace(rules, k_factor=1.0 / ks, v_factor=1.0 / vs)
        yield Variant("scales forgotten", "the pool holds x / scale", both)
        swapped = replace(rules, k_factor=vs / ks, v_factor=ks / vs)
        yield Variant("scales swapped", "keys have k_scale, values v_scale", swapped)


def lse_variants(rules: Rules) -> Iterator[Variant]:
    """Yield the faults that show in an LSE alone."""
    yield Variant("LSE in base 2", "the contract's LSE is a natural log", replace(rules, lse="base2"))
    with_sinks = replace(rules, lse="with_sinks", sinks="denominator")
    yield Variant("sinks in the LSE", "a state's LSE leaves sinks out", with_sinks)
    yield Variant("LSE of unscaled scores", "the LSE is over scaled scores", replace(rules, lse="unscaled"))
    yield Variant("LSE before the soft cap", "the LSE is over capped scores", replace(rules, cap=0.0))
