"""Who is compared where, by name. Figures ask it too, which do without torch."""

OURS = "jagged"
POLICIES = ("jagged_rows", "jagged_split", "jagged_stream")
SWEEPS = ("waste", "length", "head_dim")
# Attention to some of the keys: what is measured beside ours, and rules by name.
OURS_DENSE, OURS_PADDED, DKERNEL = "jagged_dense", "jagged_padded", "dkernel"
STRIDED, SEMI_LOCAL, RANDOM, RETRIEVED = "strided", "semi_local", "random_blocks", "retrieved"
ALL_KEYS = "all_keys"
# The studies of them: a sweep over lengths, two over density, lists from data, unequal lengths.
BY_LENGTH, BY_DENSITY, BY_BLOCKS, RETRIEVAL, JAGGED_LENGTHS = SPARSE_GROUPS = (
    "sparse_length",
    "sparse_density",
    "sparse_blocks",
    "sparse_retrieval",
    "sparse_jagged",
)
# HSTU's attention, as results call it: without and with candidates at the end of histories, and
# with learned biases.
HSTU_OPS = ("hstu", "hstu_targets", "hstu_bias", "hstu_targets_bias")
# The kernels of HSTU's authors.
AUTHORS = "hstu_triton"
# How the message of what nobody ran begins (`measure.trial`).
NOT_TRIED = "not tried again: "

_CUDA = ("jagged", "dense_eager", "dense_flash", "dense_cudnn", "njt_sdpa", "flex", "varlen_attn")
_CPU = ("jagged", "dense_eager", "dense_flash", "dense_sdpa", "njt_sdpa")
# Peers for few queries and long histories; some cut histories into parts.
_SPLITTING = ("varlen_attn", "varlen_attn_split", "flash_attn_4", "flashinfer")
_SWEEP = (
    *("jagged", "dense_eager", "dense_flash", "dense_cudnn", "njt_sdpa", "varlen_attn"),
    "flash_attn_4",
)


def default_providers(
    device_type: str, *, group: str = "workloads", hstu: bool = False
) -> tuple[str, ...]:
    """The providers that make sense on a type of device for the workloads of a group.

    A sweep leaves out FlexAttention, which compiles anew at each of its many shapes, and of the
    optional peers all but flash-attn 4. The sweep over skew has our policies beside the one that
    the rule picks.

    Args:
        device_type: "cuda", or whatever else is a CPU.
        group: see `Workload`.
        hstu: HSTU's attention in place of softmax attention.
    """
    cuda = device_type == "cuda"
    if hstu:
        return ("jagged", "jagged_softmax", "dense_hstu", *((AUTHORS,) if cuda else ()))
    if group == "target":
        return ("jagged", "dense_sdpa", *(_SPLITTING if cuda else ()))
    if group == "skew":
        return ("jagged", *((*POLICIES, *_SPLITTING) if cuda else ("dense_sdpa",)))
    if not cuda:
        return _CPU
    return _SWEEP if group in SWEEPS else (*_CUDA, "fbgemm_sll", "flash_attn_4")


def sparse_providers(device_type: str, *, group: str, rule: str) -> tuple[str, ...]:
    """Who is measured beside our attention to some of the keys.

    Args:
        device_type: "cuda", or whatever else is a CPU.
        group: one of `SPARSE_GROUPS`.
        rule: which keys; DKernel has S2-Attention's alone.
    """
    ours = ("jagged", OURS_DENSE, *((OURS_PADDED,) if group == JAGGED_LENGTHS else ()))
    if device_type != "cuda" or group in (BY_DENSITY, BY_BLOCKS):
        return ours
    return (*ours, "varlen_attn", "flash_attn_4", *((DKERNEL,) if rule == STRIDED else ()))
