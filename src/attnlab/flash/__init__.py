"""FlashAttention written by hand: the kernels of notebooks 08 and 09."""

from attnlab.flash.attention import flash_attention
from attnlab.flash.hopper import hopper_attention

__all__ = ["flash_attention", "hopper_attention"]
