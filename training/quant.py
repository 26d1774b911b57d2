"""Rounding rules of the caches and of the stored weights. All differentiable as identity (straight through)."""

import torch


def pow2ceil(x):
    """Smallest power of two >= x, on the bits of the f32."""
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def e2m1(x):
    """Nearest of 0 .5 1 1.5 2 3 4 6 (ties to even codes), clamped."""
    a = x.abs()
    y = torch.where(a < 2, torch.round(a * 2) / 2, torch.where(a < 4, torch.round(a), torch.round(a / 2) * 2)).clamp(max=6.0)
    return torch.copysign(y, x)


def e4m3(x):
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _grouped(x, size, function):
    shape = x.shape
    g = x.detach().float().reshape(*shape[:-1], shape[-1] // size, size)
    q = function(g, g.abs().amax(-1, keepdim=True)).reshape(shape)
    return x + (q - x.detach().float()).to(x.dtype)


def fp8_32(x):
    """Window keys, and Engram rows."""
    def f(g, amax):
        scale = pow2ceil(amax.clamp(min=1e-4) / 448)
        return e4m3(g / scale) * scale
    return _grouped(x, 32, f)


def mxfp4_32(x):
    """Index queries and keys; rows of routed experts."""
    def f(g, amax):
        scale = pow2ceil(amax.clamp(min=6 * 2.0 ** -126) / 6)
        return e2m1(g / scale) * scale
    return _grouped(x, 32, f)


def nvfp4_16(x):
    """Compressed rows."""
    def f(g, amax):
        scale = e4m3(amax.clamp(min=6 * 2.0 ** -9) / 6)
        return e2m1(g / scale) * scale
    return _grouped(x, 16, f)


def fp8_blocks(w):
    """Weights [..., rows, cols] with one power-of-two scale for each 32 x 32 block; returns (codes as f32, scale)."""
    rows, cols = w.shape[-2:]
    b = w.float().reshape(*w.shape[:-2], rows // 32, 32, cols // 32, 32)
    scale = pow2ceil(b.abs().amax((-3, -1), keepdim=True).clamp(min=1e-12) / 448)
    return e4m3(b / scale).reshape(w.shape), scale.squeeze(-1).squeeze(-2)


def fp8_weight(w):
    codes, scale = fp8_blocks(w)
    return codes * scale.repeat_interleave(32, -2).repeat_interleave(32, -1)
