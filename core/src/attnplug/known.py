"""Hints for names that are not installed here, and for names that are nearly right. No code depends on these names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

REFERENCE = "torch_native"
"""The complete reference backend, which ``fallback = "reference"`` falls back to."""

DISTRIBUTIONS: Mapping[str, str] = {
    "fa3": "attnplug-flash-attention",
    "fa4": "attnplug-flash-attention",
    "fla": "attnplug-fla",
    "flash_attention": "attnplug-flash-attention",
    "flashinfer": "attnplug-flashinfer",
    "flashmla": "attnplug-flashmla",
    "flex_attention": "attnplug-flex-attention",
    "torch_native": "attnplug-torch-native",
    "triton": "attnplug-triton",
}
"""Backend names that a project of ours announces, and the distribution to install for each."""

COMMANDS: Mapping[str, str] = {"generate": "attnplug-transformers"}
"""Commands of the command line that another distribution brings."""


def nearest(name: str, names: Iterable[str], *, count: int = 3) -> list[str]:
    """Return the names that ``name`` was probably meant to be, best first; empty where none is near."""
    import difflib

    by_folded: dict[str, list[str]] = {}
    for one in sorted(set(names)):
        by_folded.setdefault(_folded(one), []).append(one)
    matches = difflib.get_close_matches(_folded(name), list(by_folded), n=count, cutoff=0.6)
    return [one for match in matches for one in by_folded[match]][:count]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return ``"did you mean 'a' or 'b'?"``, or an empty text where nothing is near."""
    near = nearest(name, names)
    return f"did you mean {' or '.join(repr(one) for one in near)}?" if near else ""


def install_command(name: str, *, extra: str = "") -> str:
    """Return the pip command for a known backend or command name, empty for an unknown one."""
    dist = DISTRIBUTIONS.get(name) or COMMANDS.get(name)
    if dist is None:
        return ""
    return f"pip install '{dist}[{extra}]'" if extra else f"pip install {dist}"


def _folded(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")
