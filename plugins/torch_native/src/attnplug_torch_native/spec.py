"""What torch_native declares: all of softmax attention and MLA, on CPU and CUDA."""

from attnplug.spec import BackendSpec, Feature, ForwardMode, GraphLevel, IndexKind, Kind, Phase

SPEC = BackendSpec(
    name="torch_native",
    summary="The complete reference in plain PyTorch, for CPU and GPU",
    needs=frozenset({"extras", "lse", "read_ends", "translator", "verify_mask"}),
    kinds=frozenset({Kind.SOFTMAX, Kind.MLA}),
    device_types=frozenset({"cpu", "cuda"}),
    phases=frozenset(Phase),
    modes=frozenset(ForwardMode),
    dtypes=frozenset({"bfloat16", "float16", "float32", "float64"}),
    kv_dtypes=frozenset({"bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"}),
    kv_layouts=frozenset({"NHD", "HND"}),
    features=frozenset(Feature),
    graph_level=GraphLevel.UNIFORM,
    needs_cpu_seq_lens=True,
    index_kinds=frozenset({IndexKind.CSR}),
    priority=0,
)
