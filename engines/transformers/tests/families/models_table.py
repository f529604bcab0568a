"""The table of proven families in docs/models.md: ``python models_table.py`` writes it; a test finds it stale."""

from __future__ import annotations

import re
from pathlib import Path

from family_zoo import BATCH_SIZES, CHUNK_SIZES, PAGE_SIZES, SUBJECTS, Subject

from attnplug.model_spec import LayerSpec, ModelSpec
from attnplug.spec import Kind
from attnplug_transformers.families import find_family
from attnplug_transformers.model_spec import model_spec_from_config

DOCUMENT = Path(__file__).parents[4] / "docs" / "models.md"
BEGIN, END = "<!-- proven: written by engines/transformers/tests/families/models_table.py -->", "<!-- /proven -->"
_HEAD = (
    "architecture",
    "family",
    "what its attention asks",
    "page sizes",
    "chunk sizes",
    "float32",
    "bfloat16",
    "real",
)


def asks(spec: ModelSpec) -> str:
    """Say what sets a model's attention apart from one head count and causality."""
    own = [layer for layer in spec.layers if layer.reads_pool and not layer.is_cross_attention]
    encoder = [layer for layer in spec.layers if not layer.reads_pool]
    said = []
    if len({(one.num_heads, one.num_kv_heads) for one in own}) > 1:
        said.append("heads by layer")
    elif own and own[0].kind is Kind.MLA:
        said.append("latent rows")
    elif own and own[0].group_size > 1:
        said.append("grouped heads")
    said += [f"{where}{word}" for layers, where in ((own, ""), (encoder, "encoder ")) if (word := _windows(layers))]
    said += ["soft cap"] if any(one.logit_cap for one in own) else []
    said += ["sinks"] if any(one.has_sinks for one in own) else []
    said += ["cross attention"] if any(one.is_cross_attention for one in spec.layers) else []
    said += ["whole inputs"] if encoder else []
    return ", ".join(said)


def _windows(layers: list[LayerSpec]) -> str:
    windowed = [one for one in layers if one.sliding_window_size >= 0]
    if not windowed:
        return ""
    return "window" if len(windowed) == len(layers) else "window in some layers"


def row(subject: Subject) -> tuple[str, ...]:
    """Say what test_matrix.py, test_bf16.py and test_real_weights.py prove of one."""
    config = subject.config()
    spec, family = model_spec_from_config(config, dtype="float32"), find_family(config.model_type)
    assert family is not None
    stored = subject.kind != "encoder"
    chunks = ", ".join("whole" if size is None else str(size) for size in CHUNK_SIZES)
    return (
        f"`{subject.model_class}`{' ' if subject.variant else ''}{subject.variant}",
        family.name,
        asks(spec),
        ", ".join(map(str, PAGE_SIZES)) if stored else "no pool",
        chunks if stored else "no chunks",
        "identical tokens" if stored else "within budget",
        "within budget",
        ", ".join(subject.weights) or "–",
    )


def render() -> str:
    """Return the table, with what its words mean."""
    rows = [_HEAD, ("---",) * len(_HEAD), *map(row, SUBJECTS)]
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    sizes = ", ".join(map(str, BATCH_SIZES))
    note = (
        f"Every page size with every chunk size, in batches of {sizes} among them, on `torch_native`; prompts of up to "
        "eight windows and more."
    )
    return "\n".join([BEGIN, *lines, "", *_wrap(note), END])


def _wrap(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 120)


def replace(document: str) -> str:
    """Return the document with the table as it is now."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    assert len(pattern.findall(document)) == 1, f"{DOCUMENT} has no single place for the table"
    return pattern.sub(lambda _: render(), document)


if __name__ == "__main__":
    from acme_llama import FAMILY

    from attnplug_transformers.families import register_family

    register_family(FAMILY)
    DOCUMENT.write_text(replace(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
