"""Checks of axis J: something must be refused, by whoever sees it first, and nothing may have been written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...assembly.env import Limits
from ...batch import ForwardBatch
from ...errors import BackendRejected
from ...layer import AttentionLayer
from ...spec import Feature, Kind
from ..bench import Bench
from ..case import Case
from ..monitor import PoolWatch
from ..results import Failure, Status
from ..step import layer_inputs
from ..subject import Subject
from ..world import World
from .axis import Outcome


def refused(action: Callable[[], Any], world: World, asked: str, subject: Subject) -> Outcome:
    """Run what must be refused; return the reasons, or raise Failure. The pool must be as it was."""
    watch = PoolWatch(world)
    word = asked.rpartition(".")[2]
    try:
        action()
    except BackendRejected as error:
        watch.verify_unchanged()
        reasons = [reason for rows in error.reasons.values() for reason in rows]
        if not reasons or not all(all(reason) for reason in reasons):
            raise Failure(f"{asked}: refused without field, asked and supported: {error}", fault="no reason") from error
        family = asked.partition(".")[0]
        named = [r for r in reasons if family in r.field or word in r.field or word in r.asked or word in r.supported]
        if not named:
            raise Failure(f"{asked}: refused for another reason: {error}", fault="wrong reason") from error
        return Outcome(Status.REFUSED, subject.name, "; ".join(map(str, named)))
    # Foreign code: any other error is what this case is about.
    except Exception as error:
        if isinstance(error, Failure):
            raise
        raise Failure(
            f"{asked} is not declared, and ended in {type(error).__name__}: {error}; must be a BackendRejected "
            "with reasons",
            fault="fails instead of refusing",
        ) from error
    raise Failure(f"{asked} is not declared, and was served without an error", fault="serves what it does not declare")


def refuses_case(subject: Subject, case: Case) -> Outcome:
    """Build, plan and run the case's step: one of the three must refuse."""
    deterministic = case.arg == f"features.{Feature.DETERMINISTIC.value}"
    world = World(case, subject.device, deterministic=deterministic)

    def act() -> None:
        bench = Bench(subject, case, world=world)
        step = bench.step()
        inputs = [layer_inputs(world, step, i, lse=case.lse) for i in range(len(world.layers))]
        bench.backend.init_forward_metadata(step.batch)
        for index, one in enumerate(inputs):
            bench.call(step, index, one, save=case.save)

    return refused(act, world, case.arg, subject)


def refuses_kind(subject: Subject, case: Case) -> Outcome:
    """Call with a layer of another kind; its tensors are those of a softmax layer and are never looked at."""
    kind = Kind(case.arg.rpartition(".")[2])
    shape = case.layers[0]
    device, dtype = subject.device, getattr(torch, case.dtype)
    layer = AttentionLayer(
        shape.heads,
        shape.dim,
        shape.factor,
        shape.kv_heads,
        0,
        v_head_dim=shape.value_dim,
        kind=kind,
        kv_lora_rank=64 if kind is Kind.MLA else 0,
        qk_rope_head_dim=16 if kind is Kind.MLA else 0,
    )
    world = World(case, device)

    def act() -> None:
        bench = Bench(subject, world.case, world=world)
        step = bench.step()
        bench.backend.init_forward_metadata(step.batch)
        rows = step.batch.num_tokens
        q = torch.zeros(rows, shape.heads, shape.dim, dtype=dtype, device=device)
        k = torch.zeros(rows, shape.kv_heads, shape.dim, dtype=dtype, device=device)
        v = torch.zeros(rows, shape.kv_heads, shape.value_dim, dtype=dtype, device=device)
        bench.backend.forward(q, k, v, layer, step.batch, True, None)

    return refused(act, world, case.arg, subject)


def bad_batch(subject: Subject, case: Case) -> Outcome:
    """Give a batch that breaks one limit of the environment."""
    world = World(case, subject.device)
    env, asked = world.env, case.arg
    limits = {
        "batch_size": Limits(max_batch_size=1, max_num_tokens=1 << 20, max_context_len=env.limits.max_context_len),
        "num_tokens": Limits(max_batch_size=64, max_num_tokens=2, max_context_len=env.limits.max_context_len),
        "context": Limits(max_batch_size=64, max_num_tokens=1 << 20, max_context_len=4),
    }
    if asked in limits:
        world.__dict__["env"] = env.replace(limits=limits[asked])
    words = {"batch_size": "max_batch_size", "num_tokens": "max_num_tokens", "context": "max_context_len"}
    words |= {"device": "device", "mirror": "seq_lens_cpu"}

    def act() -> None:
        bench = Bench(subject, case, world=world)
        step = bench.step()
        batch = step.batch
        if asked == "device":
            batch = _elsewhere(batch)
        elif asked == "mirror":
            batch = batch.replace(seq_lens_cpu=None, seq_lens_cpu_exact=False)
        bench.backend.init_forward_metadata(batch)
        inputs = layer_inputs(world, step, 0)
        bench.backend.forward(inputs.q, inputs.k, inputs.v, world.layers[0], batch, True, inputs.extras)

    return refused(act, world, words[asked], subject)


def _elsewhere(batch: ForwardBatch) -> ForwardBatch:
    """Return the batch with its device tensors on another device: the host's where it was on a GPU, else 'meta'."""
    other = torch.device("cpu" if batch.device.type == "cuda" else "meta")
    changes = {
        name: value.to(other)
        for name in type(batch).model_fields
        if isinstance(value := getattr(batch, name), Tensor) and name != "seq_lens_cpu"
    }
    return batch.replace(**changes)
