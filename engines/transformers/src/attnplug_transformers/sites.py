"""Which module of a model is which layer of its ModelSpec, compared before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from attnplug.errors import UnsupportedModel
from attnplug.layer import AttentionLayer
from attnplug.model_spec import LayerSpec, ModelSpec

__all__ = ["attention_modules", "make_layers", "pair_layers"]

_SHOWN = 8
_NAMES = ("Attention", "MLA")


def make_layers(model: nn.Module, spec: ModelSpec) -> dict[nn.Module, AttentionLayer]:
    """Make the AttentionLayer of each attention module of a model; sinks are views of the module's.

    Raises:
        UnsupportedModel: The modules are not what the spec says, which would be a wrong answer; names every difference.
    """
    return pair_layers(model, spec, attention_modules(model))


def pair_layers(
    model: nn.Module, spec: ModelSpec, modules: Mapping[int, nn.Module], *, compare_scaling: bool = True
) -> dict[nn.Module, AttentionLayer]:
    """Make the AttentionLayer of each of some modules.

    Args:
        model: Whose they are, for messages.
        spec: What the layers should be.
        modules: By layer, in a numbering that the caller decides: in a model of two stacks each has a layer 0.
        compare_scaling: Whether a module's ``scaling`` is its factor on q·k; else only its first call tells.

    Raises:
        UnsupportedModel: The modules are not what the spec says; names every difference.
    """
    described, found = {layer.layer_id for layer in spec.layers}, set(modules)
    faults = []
    if described != found:
        faults.append(f"attention is in layers {sorted(found)} of the model, in {sorted(described)} of its ModelSpec")
    for layer in spec.layers:
        if layer.layer_id in modules:
            for name, has, said in _differences(modules[layer.layer_id], layer):
                if name == "scaling" and not compare_scaling:
                    continue
                faults.append(f"layer {layer.layer_id}: {name} is {has} in the model, {said} in its ModelSpec")
    if faults:
        more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise UnsupportedModel(
            f"the attention of {type(model).__name__} is not what its config was read as:\n  "
            + "\n  ".join(faults[:_SHOWN] + more),
            remedy="add a family that reads this architecture (see docs/models.md)",
        )
    layers = {}
    for layer in spec.layers:
        module = modules[layer.layer_id]
        sinks = getattr(module, "sinks", None)
        layers[module] = AttentionLayer.from_spec(layer, sinks=None if sinks is None else sinks.detach())
    return layers


def attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """Return a model's attention modules by layer: those that know their ``layer_idx``.

    Raises:
        UnsupportedModel: Two have the same.
    """
    modules: dict[int, nn.Module] = {}
    for module in model.modules():
        layer_id = getattr(module, "layer_idx", None)
        if not isinstance(layer_id, int) or not type(module).__name__.endswith(_NAMES):
            continue
        if layer_id in modules:
            raise UnsupportedModel(
                f"{type(model).__name__} has two attention modules of layer {layer_id}: "
                f"{type(modules[layer_id]).__name__} and {type(module).__name__}",
                remedy="name an adapter in its family that numbers its stacks (see docs/models.md)",
            )
        modules[layer_id] = module
    return modules


def _differences(module: nn.Module, layer: LayerSpec) -> Iterator[tuple[str, object, object]]:
    """Yield (name, the module's, the spec's); what a module does not hold is compared when it first calls."""
    window = getattr(module, "sliding_window", None)
    pairs: list[tuple[str, float, float | None]] = [
        ("scaling", layer.scaling, getattr(module, "scaling", None)),
        ("head_dim", layer.head_dim, getattr(module, "head_dim", getattr(module, "qk_head_dim", None))),
        ("v_head_dim", layer.v_head_dim, getattr(module, "v_head_dim", None)),
        ("kv_lora_rank", layer.kv_lora_rank, getattr(module, "kv_lora_rank", None)),
        ("qk_rope_head_dim", layer.qk_rope_head_dim, getattr(module, "qk_rope_head_dim", None)),
        ("query heads a KV head", layer.group_size, getattr(module, "num_key_value_groups", None)),
        ("sliding_window_size", layer.sliding_window_size, window - 1 if window else None),
        ("logit_cap", layer.logit_cap, getattr(module, "attn_logit_softcapping", None)),
    ]
    for name, said, has in pairs:
        if has is not None and abs(has - said) > 1e-6 * max(1.0, abs(said)):
            yield name, has, said
    has_sinks = getattr(module, "sinks", None) is not None
    if has_sinks != layer.has_sinks:
        yield "sinks", has_sinks, layer.has_sinks
