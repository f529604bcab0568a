"""Selection: every reason at once, the pair checked together, a deterministic order, and probes after ranking."""

from __future__ import annotations

import pickle

import pytest

from attnplug.catalog import Catalog
from attnplug.config import AttentionConfig
from attnplug.decision import Decision
from attnplug.device import DeviceFacts, describe_device
from attnplug.errors import BackendConflict, BackendLoadError, BackendRejected, ConfigError, UnknownBackend
from attnplug.model_spec import LayerSpec, ModelSpec
from attnplug.modes import AttentionType, ForwardMode, GraphLevel
from attnplug.select import Deployment, Role, Speculation, resolve
from attnplug.spec import Feature, Kind

CPU = DeviceFacts("cpu")


class Prober:
    """Answers probes from a table, and remembers who was asked."""

    def __init__(self, against=None, broken=(), order=()):
        self.against, self.broken, self.order, self.asked = against or {}, broken, order, []

    def probe(self, name, device):
        self.asked.append(name)
        if name in self.broken:
            raise BackendLoadError(f"{name} does not load")
        return self.against.get(name, [])

    def preferred(self, request):
        return self.order


def layer(layer_id=0, **changes):
    plain = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64}
    return LayerSpec(layer_id=layer_id, **{**plain, **changes})


def model(*layers, dtype="float32"):
    return ModelSpec(name="tiny", layers=layers or (layer(),), dtype=dtype, max_context_len=2048)


def choose(attention=None, *, spec=None, device=CPU, deployment=None, prober=None, **tables):
    config = AttentionConfig.model_validate({"attention": attention or {}, **tables})
    return resolve(spec, config, device, config.catalog(), deployment=deployment, prober=prober or Prober())


def fields(error, name):
    return [reason.field for reason in error.value.reasons[name]]


def test_prefill_and_decode_resolve_apart(dists):
    dists.backend("a")
    dists.backend("b")
    decision = choose({"prefill": "a", "decode": ["b", "a"]})
    assert (decision.prefill, decision.decode, decision.linear) == ("a", "b", None)


def test_auto_takes_the_highest_priority_and_then_the_name(dists):
    dists.backend("slow", more="priority=0")
    dists.backend("zeta", more="priority=50")
    dists.backend("beta", more="priority=50")
    assert choose().prefill == "beta"


def test_auto_prefers_what_is_not_experimental(dists):
    dists.backend("new", more="priority=90, experimental=True")
    dists.backend("old")
    assert choose().prefill == "old"


def test_a_list_orders_candidates_and_auto_may_end_it(dists):
    dists.backend("a", more="priority=50")
    dists.backend("b", more="features=frozenset()")
    windowed = model(layer(sliding_window_size=7))
    dists.backend("c", more="features=frozenset({__import__('attnplug').spec.Feature.SLIDING_WINDOW})")
    assert choose({"prefill": ["b", "auto"], "decode": "auto"}, spec=windowed).prefill == "c"
    assert choose({"prefill": ["b", "auto"]}).prefill == "b"


def test_a_platform_orders_auto_only(dists):
    dists.backend("a", more="priority=50")
    dists.backend("b")
    assert choose(prober=Prober(order=["b"])).prefill == "b"
    assert choose({"prefill": ["a", "b"], "decode": "a"}, prober=Prober(order=["b"])).prefill == "a"


def test_every_reason_is_given_at_once_with_the_layers_that_ask(dists):
    dists.backend("plain", more="head_dims=__import__('attnplug').spec.Dims(values=(128,))")
    asking = model(layer(0, has_sinks=True), layer(1, has_sinks=True, logit_cap=30.0), layer(2), dtype="float16")
    with pytest.raises(BackendRejected) as caught:
        choose({"prefill": "plain", "decode": "plain", "page_size": 16}, spec=asking)
    assert {"dtypes", "kv_dtypes", "head_dims", "sinks", "softcap"} <= set(fields(caught, "plain"))
    (sinks,) = [reason for reason in caught.value.reasons["plain"] if reason.field == "sinks"]
    assert "layers 0, 1" in sinks.asked


def test_an_explicit_name_that_does_not_fit_says_what_would(dists):
    dists.backend("plain")
    dists.backend("able", more="features=frozenset({__import__('attnplug').spec.Feature.SINKS})")
    with pytest.raises(BackendRejected) as caught:
        choose({"prefill": "plain", "decode": "plain"}, spec=model(layer(has_sinks=True)))
    assert "able" in caught.value.remedy
    assert "asked for plain by code" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sliding_window_size": 3}, "sliding_window"),
        ({"logit_cap": 5.0}, "softcap"),
        ({"has_sinks": True}, "sinks"),
        ({"has_kv_scales": True}, "kv_scales"),
        ({"v_head_dim": 32}, "v_head_dim"),
        ({"is_cross_attention": True}, "cross_attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "bidirectional"),
        ({"kind": Kind.MLA, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, "mla_forms"),
        ({"kind": Kind.SPARSE}, "kinds"),
        ({"num_heads": 7}, "num_kv_heads"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_spec_does_not_declare_is_refused(dists, changes, field):
    dists.backend("plain")
    with pytest.raises(BackendRejected) as caught:
        choose({"prefill": "plain"}, spec=model(layer(**changes)))
    assert field in fields(caught, "plain")


LATENT = {"kind": Kind.MLA, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
EXPANDED = {Feature.MLA_ONE_SHOT, Feature.MLA_CHUNKED_PREFIX, Feature.LSE}


def latent_backend(dists, name, forms):
    imported = "__import__('attnplug').spec"
    features = ", ".join(f"{imported}.Feature('{form.value}')" for form in forms)
    dists.backend(name, more=f"kinds=frozenset({{{imported}.Kind.MLA}}), features=frozenset([{features}])")


@pytest.mark.parametrize("forms", [{Feature.MLA_ABSORBED}, EXPANDED], ids=["absorbed", "expanded"])
def test_latent_prefill_is_absorbed_or_expanded_with_prefixes_merged(dists, forms):
    latent_backend(dists, "prefiller", forms)
    latent_backend(dists, "decoder", {Feature.MLA_ABSORBED})
    assert choose({"prefill": "prefiller", "decode": "decoder"}, spec=model(layer(**LATENT))).prefill == "prefiller"


@pytest.mark.parametrize("lacking", sorted(EXPANDED), ids=lambda feature: feature.value)
def test_expanded_latent_prefill_needs_each_of_its_parts(dists, lacking):
    latent_backend(dists, "prefiller", EXPANDED - {lacking})
    latent_backend(dists, "decoder", {Feature.MLA_ABSORBED})
    with pytest.raises(BackendRejected) as caught:
        choose({"prefill": "prefiller", "decode": "decoder"}, spec=model(layer(**LATENT)))
    assert fields(caught, "prefiller") == ["mla_forms"]


def test_latent_decode_is_absorbed(dists):
    latent_backend(dists, "expander", EXPANDED)
    with pytest.raises(BackendRejected) as caught:
        choose({"prefill": "expander", "decode": "expander"}, spec=model(layer(**LATENT)))
    assert fields(caught, "expander") == ["mla_forms"]


def test_layers_of_different_shapes_need_the_feature(dists):
    dists.backend("plain")
    with pytest.raises(BackendRejected) as caught:
        choose(spec=model(layer(0), layer(1, head_dim=128, v_head_dim=128)))
    assert fields(caught, "plain") == ["heterogeneous_layers"]


@pytest.mark.parametrize(
    ("device", "field"),
    [(DeviceFacts("cuda", 90), "device_types"), (DeviceFacts("xpu"), "device_types")],
)
def test_another_device_is_refused(dists, device, field):
    dists.backend("plain")
    with pytest.raises(BackendRejected) as caught:
        choose(device=device)
    assert fields(caught, "plain") == [field]


@pytest.mark.parametrize(("capability", "fits"), [(80, False), (90, True), (100, False)])
def test_compute_capability_is_a_range_with_both_ends(dists, capability, fits):
    dists.backend(
        "hopper",
        spec=("from attnplug.spec import BackendSpec\nSPEC = BackendSpec(name='hopper', compute_capability=(90, 99))"),
    )
    device = DeviceFacts("cuda", capability)
    if fits:
        decision = choose(device=device)
        assert (decision.prefill, decision.page_size) == ("hopper", 64)
    else:
        with pytest.raises(BackendRejected) as caught:
            choose(device=device)
        assert fields(caught, "hopper") == ["compute_capability"]


def test_deployment_asks_modes_features_and_graphs(dists):
    dists.backend("plain")
    deployment = Deployment(
        modes=frozenset({ForwardMode.MIXED}),
        features=frozenset({Feature.DETERMINISTIC}),
        graph_level=GraphLevel.DECODE,
        max_context_len=10,
    )
    with pytest.raises(BackendRejected) as caught:
        choose(deployment=deployment)
    assert fields(caught, "plain") == ["modes", "deterministic", "graph_level"]
    with pytest.raises(BackendRejected) as caught:
        choose({"graphs": "off"}, deployment=deployment)
    assert "graph_level" not in fields(caught, "plain")


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_the_verifying_side_must_verify(dists, side):
    dists.backend(
        "plain",
        more="modes=frozenset(__import__('attnplug').modes.ForwardMode) - "
        "{__import__('attnplug').modes.ForwardMode.TARGET_VERIFY}",
    )
    more = (
        "phases=frozenset(__import__('attnplug').modes.Phase), modes=frozenset(__import__('attnplug').modes."
        "ForwardMode), features=frozenset({__import__('attnplug').spec.Feature.CHAIN_VERIFY})"
    )
    dists.backend("verifier", more=more)
    other = "decode" if side == "prefill" else "prefill"
    deployment = Deployment(speculation=Speculation.CHAIN)
    asked = {side: "verifier", other: "plain", "speculative_attention_mode": side, "draft": {"prefill": "plain"}}
    decision = choose(asked, deployment=deployment)
    assert (decision.draft_prefill, decision.draft_decode) == ("plain", decision.decode)
    with pytest.raises(BackendRejected):
        choose({**asked, side: "plain"}, deployment=deployment)
    with pytest.raises(BackendRejected) as caught:
        choose(asked, deployment=Deployment(speculation=Speculation.TREE))
    assert fields(caught, "verifier") == ["custom_mask"]


def dims(text):
    return f"page_sizes=__import__('attnplug').spec.Dims({text})"


def test_auto_page_size_is_one_that_both_accept(dists):
    dists.backend("a", more=dims("multiple_of=32, minimum=32"))
    dists.backend("b", more=dims("values=(96, 128)"))
    assert choose({"prefill": "a", "decode": "b"}).page_size == 128
    assert choose({"prefill": "a", "decode": "a"}).page_size == 64
    assert choose({"prefill": "a", "decode": "b", "page_size": 96}).page_size == 96


def test_page_size_on_a_cpu_is_16_where_nothing_speaks_against_it(dists):
    dists.backend("a")
    assert choose().page_size == 16


def test_a_pair_that_shares_no_page_size_or_layout_is_refused_together(dists):
    dists.backend("a", more=dims("values=(16,)") + ", kv_layouts=frozenset({'NHD'})")
    dists.backend("b", more=dims("values=(64,)") + ", kv_layouts=frozenset({'HND'})")
    with pytest.raises(BackendRejected) as caught:
        choose({"prefill": "a", "decode": "b"})
    assert fields(caught, "a") == ["pair.page_sizes", "pair.kv_layouts"]
    assert choose({"prefill": ["a"], "decode": ["b", "a"]}).decode == "a"


def test_a_failing_probe_is_a_reason_and_the_next_is_tried(dists):
    dists.backend("a", more="priority=9")
    dists.backend("b")
    prober = Prober(against={"a": ["driver too old"]})
    decision = choose(prober=prober)
    assert decision.prefill == "b"
    assert decision.rejected("prefill")["a"][0].supported == "driver too old"
    assert prober.asked == ["a", "b"]
    with pytest.raises(BackendRejected, match="driver too old"):
        choose({"prefill": "a", "decode": "a"}, prober=prober)


@pytest.mark.parametrize(
    ("attention", "chosen"),
    [
        ({"prefill": "a", "decode": "b"}, None),
        ({"prefill": ["a", "b"], "decode": "b"}, None),
        ({"prefill": ["a", "b"], "decode": "b", "fallback": "listed"}, "b"),
        ({"prefill": "a", "decode": "b", "fallback": "listed"}, None),
        ({"prefill": "a", "decode": "b", "fallback": "reference"}, "torch_native"),
        ({"prefill": "auto", "decode": "auto"}, "b"),
    ],
    ids=["exact", "list-never", "list-listed", "exact-listed", "exact-reference", "auto"],
)
def test_a_named_backend_that_fails_to_load_gives_way_only_as_fallback_says(dists, attention, chosen):
    dists.backend("a", more="priority=9")
    dists.backend("b", more="priority=5")
    dists.backend("torch_native")
    prober = Prober(broken=("a",))
    if chosen is None:
        with pytest.raises(BackendLoadError, match="a does not load"):
            choose(attention, prober=prober)
    else:
        assert choose(attention, prober=prober).prefill == chosen


def test_alternatives_are_what_fallback_allows(dists):
    dists.backend("a")
    dists.backend("b")
    dists.backend("torch_native")
    asked = {"prefill": ["a", "b"], "decode": "a"}
    for fallback, expected in (("never", []), ("listed", ["b"]), ("reference", ["torch_native"])):
        choice = choose({**asked, "fallback": fallback}).choice("prefill")
        assert [one.name for one in choice.alternatives] == expected


def test_a_known_name_that_is_not_installed_gives_way_in_a_list_but_a_typo_does_not(dists):
    dists.backend("a")
    decision = choose({"prefill": ["flashmla", "a"]})
    assert decision.prefill == "a"
    assert "pip install attnplug-flashmla" in decision.rejected("prefill")["flashmla"][0].supported
    with pytest.raises(UnknownBackend):
        choose({"prefill": ["flashmal", "a"]})
    with pytest.raises(UnknownBackend):
        choose({"prefill": "flashmla"})


def test_a_conflict_is_a_reason_under_auto_and_an_error_by_name(dists):
    dists.backend("a", dist="one")
    dists.backend("a", dist="two")
    dists.backend("b")
    decision = choose()
    assert decision.prefill == "b"
    assert decision.rejected(Role.PREFILL)["a"][0].supported == "CONFLICT"
    with pytest.raises(BackendConflict):
        choose({"prefill": "a"})
    assert choose({"prefill": "a"}, provider={"a": "two"}).choice("prefill").chosen.distribution == "two"
    assert "a" in {choose(provider={"a": "two"}).prefill}


def test_linear_layers_get_a_backend_of_their_own_and_a_pure_one_serves_both_names(dists):
    dists.backend("full")
    more = "kinds=frozenset({__import__('attnplug').spec.Kind.LINEAR}), linear_families=frozenset({'gdn'})"
    dists.backend("gdn", more=more)
    linear = layer(1, kind=Kind.LINEAR, linear_family="gdn", num_heads=0)
    hybrid = choose(spec=model(layer(0), linear))
    assert (hybrid.prefill, hybrid.decode, hybrid.linear) == ("full", "full", "gdn")
    pure = choose(spec=model(linear))
    assert [choice.role for choice in pure.choices] == [Role.LINEAR]
    assert (pure.prefill, pure.decode, pure.page_size) == ("gdn", "gdn", None)


def test_kv_dtype_follows_the_model_unless_asked(dists):
    dists.backend("a")
    assert choose(spec=model()).kv_dtype == "float32"
    assert choose({"kv_dtype": "bfloat16"}, spec=model()).kv_dtype == "bfloat16"
    with pytest.raises(BackendRejected) as caught:
        choose({"kv_dtype": "float8_e4m3fn"})
    assert fields(caught, "a") == ["kv_dtypes", "fp8_kv"]


def test_with_nothing_installed_the_reference_is_recommended(dists):
    with pytest.raises(BackendRejected) as caught:
        choose()
    assert "pip install attnplug-torch-native" in caught.value.remedy


def test_strict_refuses_to_run_beside_a_broken_plugin(dists):
    dists.backend("a")
    dists.backend("bad", spec="raise RuntimeError('boom')")
    assert choose().prefill == "a"
    with pytest.raises(BackendLoadError, match="boom"):
        choose(plugins={"strict": True})


def test_a_decision_survives_json_and_pickle(dists):
    dists.backend("a")
    dists.backend("b", more="priority=-1")
    decision = choose({"prefill": ["a", "b"], "fallback": "listed"}, spec=model())
    assert Decision.from_json(decision.to_json()) == decision
    assert pickle.loads(pickle.dumps(decision)) == decision
    assert choose({"prefill": ["a", "b"], "fallback": "listed"}, spec=model()).to_json() == decision.to_json()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "choices": [1]}'])
def test_what_is_no_decision_is_refused(text):
    with pytest.raises(ConfigError):
        Decision.from_json(text)


@pytest.mark.parametrize(
    ("text", "facts"),
    [("cpu", DeviceFacts("cpu")), ("cuda@sm90", DeviceFacts("cuda", 90)), ("cuda@sm_100", DeviceFacts("cuda", 100))],
)
def test_devices_are_described_without_torch_where_they_can_be(text, facts):
    found = describe_device(text)
    assert (found.type, found.compute_capability) == (facts.type, facts.compute_capability)


@pytest.mark.parametrize("text", ["", "gpu!", "cuda:x", "cuda:99"])
def test_no_device_is_an_error_that_says_what_is_allowed(text):
    with pytest.raises(ConfigError, match=r"cpu|CUDA devices"):
        describe_device(text)


def test_the_catalog_default_honours_the_configurations_block(dists):
    dists.backend("a")
    config = AttentionConfig.model_validate({"plugins": {"block": ["a"]}})
    with pytest.raises(BackendRejected) as caught:
        resolve(None, config, CPU, prober=Prober())
    assert fields(caught, "a") == ["state", "plugins.block"]
    assert Catalog().require("a").name == "a"
