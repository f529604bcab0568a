"""Axis F: slots wherever the pool has them, in pages of every declared size; and ids of one space only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...batch import ForwardBatch
from ...errors import AttnplugError
from ...kv.translator import KVIndexTranslator
from ...modes import ForwardMode
from ...spec import Feature, Kind
from ..bench import Bench
from ..case import Case
from ..monitor import PoolWatch
from ..plan import Plan
from ..results import Failure
from ..step import layer_inputs
from ..subject import Subject
from .a_semantics import mla_cases
from .axis import Axis, Check, Outcome, oracle_check

PLACES = ("", "run", "swapped", "reversed", "shared")


def _cases(plan: Plan) -> Iterator[Case]:
    modes = [mode for mode in (ForwardMode.EXTEND, ForwardMode.DECODE) if mode in plan.modes]
    if plan.softmax:
        for mode in modes:
            yield from _placed(plan, mode)
    if Kind.MLA in plan.spec.kinds:
        for page in plan.pages[1:]:
            yield from mla_cases(plan, "F", "mla_pages", page=page)


def _placed(plan: Plan, mode: ForwardMode) -> Iterator[Case]:
    layers = [plan.layer()]
    if plan.has(Feature.SLIDING_WINDOW):
        layers.append(plan.layer(window=11))
    for layer in layers:
        for page in plan.pages:
            for place in PLACES:
                prefix = tuple(max(p, page + 3) for p in _prefix(mode)) if place == "shared" else _prefix(mode)
                queries = (1,) * 4 if mode is ForwardMode.DECODE else (3, 1, 20, 16)
                yield plan.case(
                    "F", "placed", mode, layer, queries=queries, prefix=prefix, page=page, place=place, seed=page
                )
            # Lengths around a page's edge.
            edge = tuple(max(n, 1) for n in (page - 1, page, page + 1, 2 * page))
            if mode is ForwardMode.DECODE:
                spans = {"queries": (1,) * 4, "prefix": tuple(n - 1 for n in edge)}
            else:
                spans = {"queries": edge, "prefix": (0, page, 1, max(page - 1, 0))}
            yield plan.case("F", "page_edge", mode, layer, page=page, **spans)
    for layout in plan.layouts[1:]:
        for page in plan.pages:
            yield plan.case("F", "layout", mode, layers[-1], page=page, layout=layout)
    yield plan.case("F", "foreign_plan", mode)
    if plan.has(Feature.CROSS_ATTENTION):
        batch = len(plan.case("F", "spaces", mode).queries)
        layers = [plan.layer(cross=True), plan.layer(), plan.layer(cross=True)]
        for page in plan.pages[:3]:
            encoder = (page, page + 1, 40, 3)[:batch]
            yield plan.case("F", "spaces", mode, layers=tuple(layers), encoder=encoder, page=page)


def _prefix(mode: ForwardMode) -> tuple[int, ...]:
    return (40, 67, 9, 130) if mode is ForwardMode.DECODE else (0, 33, 64, 70)


def _foreign_plan(subject: Subject, case: Case) -> Outcome:
    """Give a step whose slots another translator made: it must be refused, and nothing read or written."""
    bench = Bench(subject, case)
    step, world = bench.step(), bench.world
    # One pool, another translator: what it would read is legal, and yet it is not this environment's.
    other = KVIndexTranslator(world.pool, world.table)
    plan = other.plan(req_pool_indices=step.batch.req_pool_indices, out_cache_loc=step.batch.out_cache_loc)
    batch: ForwardBatch = step.batch.replace(kv_loc_plan=plan)
    foreign = replace(step, batch=batch)
    inputs = layer_inputs(world, foreign, 0)
    watch = PoolWatch(world)
    try:
        bench.backend.init_forward_metadata(batch)
        bench.call(foreign, 0, inputs, save=False)
    except AttnplugError as error:
        watch.verify(step, None, saved=False)
        return Outcome(served_by=subject.name, message=str(error).splitlines()[0])
    raise Failure("a plan of another translator was read without an error", fault="reads tables past the translator")


AXIS = Axis(
    "F",
    "id spaces and pages",
    _cases,
    {
        "placed": oracle_check("requests are read wherever their pages lie: scattered, in runs or almost, shared"),
        "page_edge": oracle_check("a length just below, at and above a page's edge reads its own positions"),
        "layout": oracle_check("each declared layout of the pool is read and written"),
        "mla_pages": oracle_check("latent rows are read in pages of every declared size"),
        "spaces": oracle_check("a layer reads and writes its own space, with that space's ids"),
        "foreign_plan": Check(
            "reads go through the environment's translator, which refuses another's plan", _foreign_plan
        ),
    },
)
