"""`torch.nn.Module`s over jagged tensors, with the parameters of PyTorch's own."""

from jagged_kernels.modules.attention import JaggedMultiheadAttention
from jagged_kernels.modules.norm import JaggedLayerNorm, JaggedRMSNorm

__all__ = ["JaggedLayerNorm", "JaggedMultiheadAttention", "JaggedRMSNorm"]
