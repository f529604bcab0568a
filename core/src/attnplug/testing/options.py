"""What the command line and the pytest plugin take, read the same way: no torch is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import ConfigError

PROFILES = ("quick", "gpu", "full")


def parse_profile(text: str) -> str:
    """Return a profile's word; raises ConfigError for any other."""
    if text not in PROFILES:
        allowed = ", ".join(PROFILES)
        raise ConfigError(
            f"profile {text!r} is not known; allowed: {allowed}",
            key="profile",
            value=text,
            allowed=allowed,
            remedy="choose one of these",
        )
    return text


def parse_shard(text: str) -> tuple[int, int]:
    """Return (i, n) of ``i/n``; raises ConfigError where 1 ≤ i ≤ n does not hold."""
    index, _, count = text.partition("/")
    if index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count):
        return int(index), int(count)
    raise ConfigError(
        f"shard {text!r} is not understood", key="shard", value=text, allowed="i/n with 1 ≤ i ≤ n", remedy="write 1/4"
    )


def parse_axes(text: str) -> tuple[str, ...]:
    """Return the letters of some axes; raises ConfigError for one that there is not."""
    letters = tuple(dict.fromkeys(letter for letter in text.upper() if letter not in ", "))
    if not letters:
        return ()
    from .axes import AXES

    unknown = [letter for letter in letters if letter not in AXES]
    if unknown:
        allowed = ", ".join(f"{axis.letter} {axis.title}" for axis in AXES.values())
        raise ConfigError(
            f"axis {unknown[0]!r} is not there; allowed: {allowed}",
            key="axes",
            value=text,
            allowed=allowed,
            remedy="write the letters together, as ABH",
        )
    return letters


def parse_waivers(texts: Iterable[str]) -> dict[str, str]:
    """Return pattern → why, of ``PATTERN=WHY`` each; the id's own '=' belong to the pattern, and the last one parts.

    Raises:
        ConfigError: A text without a pattern or without a reason.
    """
    found = {}
    for text in texts:
        pattern, _, why = text.rpartition("=")
        if not pattern or not why.strip():
            raise ConfigError(
                f"waiver {text!r} has no pattern or no reason",
                key="waive",
                value=text,
                allowed="PATTERN=WHY, such as 'H:fp8:*=our library has no fp8 on sm_80'",
                remedy="say why: the report shows it",
            )
        found[pattern] = why.strip()
    return found
