"""What a backend refuses before any kernel, with every reason: an environment, a batch, a layer, a call's extras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .admission import env_reasons, layer_reasons, words
from .errors import BackendRejected, Reason
from .modes import ForwardMode
from .spec import BackendSpec, Feature

if TYPE_CHECKING:
    from .assembly.env import BackendEnv
    from .attention_io import AttentionExtras
    from .batch import ForwardBatch
    from .model_spec import LayerSpec


def refuse_env(spec: BackendSpec, env: BackendEnv) -> None:
    """Refuse, as selection would, an environment that the spec does not cover: backends are built by hand too.

    Raises:
        BackendRejected: With every reason, as all below.
    """
    reasons = env_reasons(
        spec,
        device_type=env.device.type,
        dtype=str(env.dtype).removeprefix("torch."),
        kv_dtype=str(env.kv_dtype).removeprefix("torch."),
        kv_layout=env.kv_pool.layout,
        page_size=env.page_size,
        max_context_len=env.limits.max_context_len,
        deterministic=env.deterministic,
        layers=env.model_spec.layers,
    )
    remedy = "choose a backend that declares it, or change the environment; `attnplug explain` helps"
    _refuse(spec.name, "be built for this environment", reasons, remedy)


def refuse_batch(name: str, spec: BackendSpec, env: BackendEnv, batch: ForwardBatch, *, reads_cpu_lens: bool) -> None:
    """Refuse a batch that the spec or the limits do not cover; host work only.

    Args:
        name: The backend's.
        spec: What was declared.
        env: Where the backend runs.
        batch: The step.
        reads_cpu_lens: Whether the backend reads the host mirror of the lengths.
    """
    limits, mode = env.limits, batch.forward_mode
    reasons = []
    if mode not in spec.modes and mode is not ForwardMode.IDLE:
        reasons.append(Reason("modes", mode.value, words(spec.modes)))
    if batch.batch_size > limits.max_batch_size:
        reasons.append(Reason("max_batch_size", str(batch.batch_size), f"at most {limits.max_batch_size}"))
    if batch.num_tokens > limits.max_num_tokens:
        reasons.append(Reason("max_num_tokens", str(batch.num_tokens), f"at most {limits.max_num_tokens}"))
    if batch.max_seq_len + batch.draft_token_num > limits.max_context_len and batch.seq_lens_cpu_exact:
        asked = str(batch.max_seq_len + batch.draft_token_num)
        reasons.append(Reason("max_context_len", asked, f"at most {limits.max_context_len}"))
    if batch.device.type != env.device.type:
        reasons.append(Reason("device", str(batch.device), str(env.device)))
    if reads_cpu_lens and batch.seq_lens_cpu is None and mode is not ForwardMode.IDLE:
        reasons.append(Reason("seq_lens_cpu", "None", "a host mirror: this backend reads it"))
    reasons += _verify_reasons(spec, batch)
    _refuse(name, "serve this batch", reasons, "choose a backend that declares it, or change the batch")


def refuse_layer(name: str, spec: BackendSpec, layer: LayerSpec) -> None:
    """Refuse a layer that the spec does not cover."""
    remedy = "run `attnplug explain` to see which installed backend can"
    _refuse(name, f"serve layer {layer.layer_id}", layer_reasons(spec, layer), remedy)


def refuse_extras(name: str, spec: BackendSpec, extras: AttentionExtras) -> None:
    """Refuse what a call asks beyond its output, where the spec does not declare it."""
    # In each layer's call: words are made only where something is missing.
    missing = [Feature.LSE] if extras.return_lse and Feature.LSE not in spec.features else []
    if extras.mla_form is not None and (form := Feature(f"mla_{extras.mla_form.value}")) not in spec.features:
        missing.append(form)
    if missing:
        have = f"not declared; features: {words(spec.features)}"
        reasons = [Reason(one.value, "asked by the call's extras", have) for one in missing]
        _refuse(name, "give what the call asks", reasons, "choose a backend that declares it")


def _verify_reasons(spec: BackendSpec, batch: ForwardBatch) -> list[Reason]:
    info = batch.spec_info
    if info is None or not batch.forward_mode.is_target_verify:
        return []
    asked = Feature.CHAIN_VERIFY if info.mask is None else Feature.CUSTOM_MASK
    if asked not in spec.features:
        shape = "a chain of drafts" if info.mask is None else "a tree of drafts, by a mask"
        return [Reason(asked.value, shape, f"not declared; features: {words(spec.features)}")]
    rows = info.mask_row + batch.batch_size
    if info.mask is not None and not info.mask.fits(rows):
        return [Reason("verify_mask.max_bs", str(rows), f"at most {info.mask.max_bs}")]
    return []


def _refuse(name: str, what: str, reasons: Sequence[Reason], remedy: str) -> None:
    if reasons:
        raise BackendRejected(f"backend {name!r} cannot {what}", reasons={name: reasons}, remedy=remedy)
