"""Reading and writing the released layout: fp8 32 x 32 weights, fp4 experts, fp8 Engram rows, shards with an index."""

import glob
import json
import re

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from quant import e2m1, e4m3, fp8_blocks, pow2ceil

FP8 = re.compile(r"(attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|indexer\.wq_b|shared_experts\.w[123]|engram\.wkv|main_proj)\.weight$")
EXPERTS = re.compile(r"ffn\.experts\.w[123]$")
TABLE = re.compile(r"engram\.embed\.weight$")
F32 = re.compile(r"(hc_\w+|attn_sink|gate\.bias|gate\.bias_vl|engram\.[qk]_weight)$")
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def scale_value(scale):
    return (scale.view(torch.uint8).to(torch.int32) << 23).view(torch.float32)


def scale_code(scale):
    """f32 powers of two -> UE8M0 bytes."""
    return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)


def load(folder):
    """Every weight as f32, experts stacked: `layers.L.ffn.experts.w1` is [experts, inter, H]."""
    raw = {}
    for path in sorted(glob.glob(f"{folder}/*.safetensors")):
        if "reference" in path:
            continue
        with safe_open(path, "pt") as f:
            raw.update({k.removeprefix("model."): f.get_tensor(k) for k in f.keys()})
    out, experts = {}, {}
    for name, w in raw.items():
        if name.endswith(".scale"):
            continue
        scale = raw.get(name.removesuffix(".weight") + ".scale")
        if scale is None:
            w = w.float()
        elif w.dtype == torch.int8 or w.dtype == torch.uint8:
            codes = w.view(torch.uint8).long()
            w = torch.stack([LEVELS[codes & 15], LEVELS[codes >> 4]], -1).flatten(1) * scale_value(scale).repeat_interleave(32, 1)
        elif TABLE.search(name):
            w = w.float() * scale_value(scale).repeat_interleave(32, 1)
        else:
            s = scale_value(scale).repeat_interleave(32, 0).repeat_interleave(32, 1)
            w = w.float() * s[: w.shape[0], : w.shape[1]]
        match = re.match(r"(.*ffn\.experts)\.(\d+)\.(w\d)\.weight$", name)
        if match:
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = w
        else:
            out[name] = w
    out.update({name: torch.stack([parts[i] for i in range(len(parts))]) for name, parts in experts.items()})
    return out


def stored(name, w):
    """The tensors that hold one weight on disk."""
    w = w.detach().float().cpu()
    if EXPERTS.search(name):
        tensors = {}
        stem, part = name.rsplit(".", 1)
        for j, expert in enumerate(w):
            g = expert.view(expert.shape[0], -1, 32)
            scale = pow2ceil(g.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0 ** -126) / 6)
            q = e2m1(g / scale).reshape(expert.shape)
            codes = (q.abs()[..., None] - LEVELS[:8]).abs().argmin(-1) | (torch.signbit(q) & (q != 0)).long() * 8
            packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
            tensors[f"{stem}.{j}.{part}.weight"] = packed.contiguous()
            tensors[f"{stem}.{j}.{part}.scale"] = scale_code(scale[..., 0])
        return tensors
    if FP8.search(name):
        codes, scale = fp8_blocks(w)
        return {name: codes.to(torch.float8_e4m3fn), name.removesuffix("weight") + "scale": scale_code(scale)}
    if TABLE.search(name):
        g = w.view(w.shape[0], -1, 32)
        scale = pow2ceil(g.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)
        return {name: e4m3(g / scale).reshape(w.shape).to(torch.float8_e4m3fn), name.removesuffix("weight") + "scale": scale_code(scale[..., 0])}
    return {name: (w if F32.search(name) else w.to(torch.bfloat16)).contiguous()}


def save(folder, weights, shards=3):
    """Writes shards of about equal size and the index."""
    tensors = {}
    for name in sorted(weights):
        tensors.update(stored(name, weights[name]))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    files, used = [{}], 0
    for name, t in tensors.items():
        if used > total / shards * len(files) and len(files) < shards:
            files.append({})
        files[-1][name] = t
        used += t.numel() * t.element_size()
    weight_map = {}
    for i, part in enumerate(files):
        file = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        save_file(part, f"{folder}/{file}", metadata={"format": "pt"})
        weight_map.update({name: file for name in part})
    with open(f"{folder}/model.safetensors.index.json", "w") as f:
        json.dump({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, f, indent=1)
    return total
