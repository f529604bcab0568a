"""What attnplug-triton declares: softmax attention and MLA on Hopper, which is what its kernels were run on.

Tiles are sized for Hopper's shared memory; another card is declared when conformance has passed on one.
"""

from attnplug.spec import BackendSpec, Dims, Feature, ForwardMode, GraphLevel, IndexKind, Kind, Phase

SPEC = BackendSpec(
    name="triton",
    summary="Our own Triton kernels: split-KV decode, extend, verify and MLA; on Hopper, where they were proven",
    needs=frozenset({"extras", "lse", "read_ends", "translator", "verify_mask"}),
    kinds=frozenset({Kind.SOFTMAX, Kind.MLA}),
    device_types=frozenset({"cuda"}),
    compute_capability=(90, 90),
    phases=frozenset(Phase),
    modes=frozenset(ForwardMode),
    dtypes=frozenset({"bfloat16", "float16", "float32"}),
    kv_dtypes=frozenset({"bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"}),
    kv_layouts=frozenset({"NHD"}),
    head_dims=Dims(minimum=16, maximum=256, multiple_of=8),
    v_head_dims=Dims(minimum=16, maximum=256, multiple_of=8),
    kv_lora_ranks=Dims(values=(64, 128, 256, 512)),
    rope_head_dims=Dims(values=(16, 32, 64)),
    features=frozenset(Feature),
    graph_level=GraphLevel.UNIFORM,
    needs_cpu_seq_lens=False,
    index_kinds=frozenset({IndexKind.ROW_TABLE}),
    priority=60,
    kernel_modules=("triton",),
)
