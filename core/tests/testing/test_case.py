"""A case's text stands for the whole case."""

from __future__ import annotations

import pytest

from attnplug.errors import ConfigError
from attnplug.modes import AttentionType, ForwardMode
from attnplug.spec import Kind
from attnplug.testing.case import Case, LayerCase
from attnplug.testing.plan import Plan, Profile
from attnplug.testing.runner import list_cases

from .subjects import dense_subject

EVERYTHING = Case(
    axis="A",
    check="combined",
    mode=ForwardMode.TARGET_VERIFY,
    queries=(4, 4, 4, 2),
    prefix=(0, 17, 17, 3),
    layers=(
        LayerCase(heads=8, kv_heads=2, dim=96, v_dim=64, window=0, cap=30.5, sinks=True, k_scale=0.37, v_scale=1.7),
        LayerCase(attn=AttentionType.ENCODER_ONLY, cross=True, scaling=0.125),
        LayerCase(attn=AttentionType.DECODER_BIDIRECTIONAL, kind=Kind.MLA, latent=512, rope=64),
    ),
    dtype="bfloat16",
    kv_dtype="float8_e4m3fn",
    page=64,
    layout="HND",
    lse=True,
    mask="qlen",
    encoder=(3, 3, 0, 9),
    mla="absorbed",
    pad=2,
    save=False,
    wrap="two_batch",
    high=True,
    place="run",
    arg="7",
    seed=5,
)


def test_a_case_is_read_back_from_its_id_with_every_field() -> None:
    assert Case.parse(EVERYTHING.id) == EVERYTHING
    differing = ("kv_dtype", "page", "layout", "lse", "save", "high", "place", "seed")
    assert all(getattr(EVERYTHING, name) != Case.__dataclass_fields__[name].default for name in differing)


@pytest.mark.parametrize("profile", list(Profile), ids=lambda profile: profile.name.lower())
def test_every_case_of_every_axis_is_read_back_and_named_once(profile: Profile) -> None:
    cases = list_cases(Plan(dense_subject(), profile))
    assert len({case.id for case in cases}) == len(cases) > 300
    assert [Case.parse(case.id) for case in cases] == cases


def test_ids_hold_nothing_that_a_shell_would_change_in_quotes() -> None:
    assert not set(EVERYTHING.id) & set(" '\"\\$`[]")


@pytest.mark.parametrize("text", ["", "A:b", "A:b:decode:q=1:p=1:float32:4/2", "A:b:walk:q=1:p=1:float32:4/2x64"])
def test_a_text_that_is_no_case_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match="is no conformance case"):
        Case.parse(text)


def test_shards_part_the_cases() -> None:
    plan = Plan(dense_subject())
    parts = [list_cases(plan, shard=(i, 3)) for i in (1, 2, 3)]
    assert sorted(case.id for part in parts for case in part) == sorted(case.id for case in list_cases(plan))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
