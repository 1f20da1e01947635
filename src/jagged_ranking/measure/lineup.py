"""Who is compared where, by name. Figures ask it too, which do without torch."""

OURS = "jagged"
POLICIES = ("jagged_rows", "jagged_split", "jagged_stream")
SWEEPS = ("waste", "length", "head_dim")

_CUDA = ("jagged", "dense_eager", "dense_flash", "dense_cudnn", "njt_sdpa", "flex", "varlen_attn")
_CPU = ("jagged", "dense_eager", "dense_flash", "dense_sdpa", "njt_sdpa")
# Peers for few queries and long histories; some cut histories into parts.
_SPLITTING = ("varlen_attn", "varlen_attn_split", "flash_attn_4", "flashinfer")
_SWEEP = (
    *("jagged", "dense_eager", "dense_flash", "dense_cudnn", "njt_sdpa", "varlen_attn"),
    "flash_attn_4",
)


def default_providers(device_type: str, *, group: str = "workloads") -> tuple[str, ...]:
    """The providers that make sense on a type of device for the workloads of a group.

    A sweep leaves out FlexAttention, which compiles anew at each of its many shapes, and of the
    optional peers all but flash-attn 4. The sweep over skew has our policies beside the one that
    the rule picks.

    Args:
        device_type: "cuda", or whatever else is a CPU.
        group: see `Workload`.
    """
    cuda = device_type == "cuda"
    if group == "target":
        return ("jagged", "dense_sdpa", *(_SPLITTING if cuda else ()))
    if group == "skew":
        return ("jagged", *((*POLICIES, *_SPLITTING) if cuda else ("dense_sdpa",)))
    if not cuda:
        return _CPU
    return _SWEEP if group in SWEEPS else (*_CUDA, "fbgemm_sll", "flash_attn_4")
