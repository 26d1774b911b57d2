"""DeepSeek-V4.1 in PyTorch, for training and as a reference. Works on one packed row of N tokens.

`p` is a flat dict of weights under their checkpoint names; the experts of a layer are stacked:
`layers.L.ffn.experts.w1` is [experts, inter, H]. `Run` says how to compute: dtype of the matrix
products, cache rounding, selection. In f32 on a CPU this is the second reference; in bf16 on a GPU
the pointwise parts are compiled and attention is a Triton kernel.
"""

import os
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from index import block_candidates, index_scores, index_targets, select
from kernels import attend, sinkhorn
from quant import fp8_32, mxfp4_32, nvfp4_16

COMPILE = os.environ.get("DEMO_COMPILE") == "1"


def region(function):
    """Pointwise parts are compiled one by one: the same code serves every layer, so this stays short."""
    return torch.compile(function, dynamic=False) if COMPILE else function


@dataclass
class Run:
    dtype: torch.dtype = torch.float32
    quant: bool = False            # round caches (window, compressed rows, index keys and queries)
    select: bool = True            # index top-k; False: every visible row
    record: dict = None            # intermediate tensors are put here
    index_queries: torch.Tensor = None  # token numbers for which the index loss is computed
    index_loss: list = field(default_factory=list)
    loads: dict = field(default_factory=dict)


def document_ends(start):
    edges = np.append(np.flatnonzero(np.diff(start, prepend=-1)), len(start))
    return np.repeat(edges[1:], np.diff(edges))


class Plan:
    """Where the documents of a packed row begin and end, and what each token sees."""

    def __init__(self, config, start, device, tensors=None):
        start = np.asarray(start, np.int64)
        end = document_ends(start)
        self.n, self.host_start, self.host_end, self.window, self.ratios = len(start), start, end, config.sliding_window, {}
        put = lambda x: torch.as_tensor(np.ascontiguousarray(x).astype(np.int32), device=device)
        self.start, self.end = tensors or (put(start), put(end))
        self.at = torch.arange(self.n, dtype=torch.int32, device=device)
        self.pos = self.at - self.start
        self.wlo = torch.maximum(self.start, self.at - (self.window - 1))
        self.wend = torch.minimum(self.end, self.at + self.window)
        self.angles = {}
        self.config = config

    def rows(self, count):
        """(first row, row end) that each query sees, in the global numbering of rows."""
        r = self.ratios[count]
        first = self.start // r
        return first, first + (self.pos + 1) // r

    def readers(self, count):
        """(first query, query end) that may see each row."""
        r = self.ratios[count]
        last = torch.arange(count, device=self.at.device, dtype=torch.int32) * r + (r - 1)
        return last, self.end[last.long()]

    def rope(self, compressed, ratio=0):
        """cos and sin [tokens or rows, R/2]; a row's position is that of its first token."""
        key = (compressed, ratio)
        if key not in self.angles:
            pos = self.pos if ratio == 0 else self.pos[: self.n // ratio * ratio: ratio]
            self.angles[key] = rope_table(self.config, pos, compressed)
        return self.angles[key]


def rope_table(config, pos, compressed):
    r = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    f = 1.0 / theta ** (torch.arange(0, r, 2, dtype=torch.float32, device=pos.device) / r)
    if compressed:
        s = config.rope_scaling
        dim = lambda beta: r * np.log(s["original_max_position_embeddings"] / (2 * np.pi * beta)) / (2 * np.log(theta))
        low, high = max(np.floor(dim(s["beta_fast"])), 0), min(np.ceil(dim(s["beta_slow"])), r - 1)
        high += 0.001 if low == high else 0
        ramp = ((torch.arange(r // 2, device=pos.device) - low) / (high - low)).clamp(0, 1).float()
        f = f * (1 - ramp) + f / s["factor"] * ramp
    angle = pos.float()[:, None] * f[None]
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotates adjacent pairs of the last R dims; x is [rows, ..., D] f32."""
    r = cos.shape[-1] * 2
    keep, turn = x[..., :-r], x[..., -r:]
    while cos.dim() < x.dim():
        cos, sin = cos[:, None], sin[:, None]
    a, b = turn[..., 0::2], turn[..., 1::2]
    return torch.cat([keep, torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)], -1)


def rms(x, weight, eps):
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def linear(x, w, dtype):
    return x.to(dtype) @ w.to(dtype).mT


# ---- single-pass mHC ----

@region
def site_in(streams, pre, fn, base, scale, norm, eps: float, hc_eps: float, dtype: torch.dtype):
    """(sublayer input, next pre, post, comb logits). The input is collapsed with the PREVIOUS site's pre."""
    n, s, _ = streams.shape
    flat = streams.flatten(1)
    mix = (flat @ fn.t()) * torch.rsqrt(flat.pow(2).mean(1, keepdim=True) + eps)
    new_pre = torch.sigmoid(mix[:, :s] * scale[0] + base[:s]) + hc_eps
    post = 2 * torch.sigmoid(mix[:, s:2 * s] * scale[1] + base[s:2 * s])
    comb = (mix[:, 2 * s:] * scale[2] + base[2 * s:]).view(n, s, s)
    x = (pre[:, :, None] * streams).sum(1)
    return rms(x, norm, eps).to(dtype), new_pre, post, comb


@region
def site_out(streams, y, post, comb):
    return post[:, :, None] * y.float()[:, None] + (comb[:, :, :, None] * streams[:, :, None]).sum(1)


# ---- attention ----

@region
def queries(x, wq_a, q_norm, wq_b, wkv, kv_norm, cos, sin, heads: int, eps: float, quant: bool):
    dtype = x.dtype
    qr = rms(linear(x, wq_a, dtype), q_norm, eps).to(dtype)
    q = rotate(linear(qr, wq_b, dtype).float().view(len(x), heads, -1), cos, sin).to(dtype)
    kv = rotate(rms(linear(x, wkv, dtype), kv_norm, eps), cos, sin)
    return q, (fp8_32(kv) if quant else kv).to(dtype), qr


@region
def outputs(o, cos, sin, wo_a, wo_b, groups: int):
    dtype, n = o.dtype, len(o)
    o = rotate(o.float(), cos, -sin).to(dtype).reshape(n, groups, -1)
    w = wo_a.to(dtype).view(groups, -1, o.shape[-1])
    return linear(torch.einsum("ngk,gok->ngo", o, w).reshape(n, -1), wo_b, dtype)


@region
def compress(x, wkv, wgate, norm, cos, sin, ratio: int, eps: float, quant: bool):
    """(unrotated latent f32, stored rows)."""
    dtype = x.dtype
    v = linear(x, wkv, dtype).float()
    if ratio > 1:
        n = len(x) // ratio * ratio
        gate = linear(x[:n], wgate, dtype).float().view(-1, ratio, v.shape[-1]).softmax(1)
        v = (gate * v[:n].view(-1, ratio, v.shape[-1])).sum(1)
    latent = rms(v, norm, eps)
    row = rotate(latent, cos, sin)
    return latent, (nvfp4_16(row) if quant else row).to(dtype)


@region
def index_keys(latent, wk, k_norm, cos, sin, eps: float, quant: bool, dtype: torch.dtype):
    k = rotate(rms(linear(latent, wk, dtype), k_norm, eps), cos, sin)
    return mxfp4_32(k) if quant else k


@region
def index_queries(x, qr, wq_b, weights_proj, cos, sin, heads: int, eps: float, quant: bool):
    dtype = x.dtype
    q = rotate(linear(qr, wq_b, dtype).float().view(len(x), heads, -1), cos, sin)
    w = linear(x, weights_proj, dtype).float() * q.shape[-1] ** -0.5 * heads ** -0.5
    return (mxfp4_32(q) if quant else q), w


# ---- MoE ----

@region
def moe(x, gate, bias, bias_vl, image, w1, w3, w2, s1, s3, s2, top: int, scaling: float, limit: float):
    """Every expert is computed and weighted (0 for those not chosen): cheaper than sorting at this size."""
    dtype, n, (e, inter, _) = x.dtype, len(x), w1.shape
    s = torch.sqrt(F.softplus(x.float() @ gate.float().t()))
    chosen = (s + torch.where(image[:, None], bias_vl, bias)).topk(top, 1).indices
    weight = s.gather(1, chosen)
    weight = weight / (weight.sum(1, keepdim=True) + 1e-20) * scaling
    full = torch.zeros_like(s).scatter(1, chosen, weight)

    def act(g, u):
        return F.silu(g.float().clamp(max=limit)) * u.float().clamp(-limit, limit)

    hidden = act(linear(x, w1.reshape(e * inter, -1), dtype), linear(x, w3.reshape(e * inter, -1), dtype))
    hidden = (hidden.view(n, e, inter) * full[:, :, None]).to(dtype).view(n, e * inter)
    y = linear(hidden, w2.transpose(0, 1).reshape(-1, e * inter), dtype).float()
    shared = act(linear(x, s1, dtype), linear(x, s3, dtype)).to(dtype)
    return y + linear(shared, s2, dtype).float(), chosen, weight


# ---- Engram ----

@region
def engram(streams, gathered, wkv, q_weight, k_weight, image, eps: float, dtype: torch.dtype):
    n, s, h = streams.shape
    kv = linear(gathered, wkv, dtype).float().view(n, s + 1, h)
    key, value = kv[:, :s], kv[:, s:]
    dot = (streams * (q_weight * k_weight) * key).sum(-1)
    dot = dot * torch.rsqrt(streams.pow(2).mean(-1) + eps) * torch.rsqrt(key.pow(2).mean(-1) + eps) * h ** -0.5
    gate = torch.sigmoid(torch.sign(dot) * torch.sqrt(dot.abs().clamp(min=1e-6)))
    return streams + torch.where(image[:, None, None], 0.0, gate[:, :, None] * value)


# ---- vision ----

def vision_rope(config, grid_h, grid_w, device):
    d = config.vision.hidden_size // config.vision.num_attention_heads
    f = config.vision.rope_theta ** (-4.0 * torch.arange(d // 4, device=device, dtype=torch.float32) / d)
    row, col = torch.meshgrid(torch.arange(grid_h, device=device), torch.arange(grid_w, device=device), indexing="ij")
    angle = torch.cat([row.reshape(-1, 1) * f, col.reshape(-1, 1) * f], 1)
    return angle.cos(), angle.sin()


def vision_tower(p, config, patches, grid_h, grid_w, dtype):
    """patches [B, grid, 3*P*P] -> (features [B, grid, hidden], rows [B, blocks, H])."""
    v = config.vision
    heads, d = v.num_attention_heads, v.hidden_size // v.num_attention_heads
    cos, sin = vision_rope(config, grid_h, grid_w, patches.device)

    def split_half(x):
        a, b = x[..., : d // 2], x[..., d // 2:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x = linear(patches, p["vision.patch_embed.proj.weight"], dtype).float() + p["vision.patch_embed.proj.bias"]
    for i in range(v.num_hidden_layers):
        name = f"vision.blocks.{i}."
        y = rms(x, p[name + "norm1.weight"], 1e-6)
        q, k, val = (linear(y, p[name + "attn.wqkv.weight"], dtype).float() + p[name + "attn.wqkv.bias"]).view(
            *y.shape[:2], 3, heads, d).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(split_half(q).to(dtype), split_half(k).to(dtype), val.to(dtype))
        x = x + linear(o.transpose(1, 2).flatten(2), p[name + "attn.wo.weight"], dtype).float() + p[name + "attn.wo.bias"]
        g, u = linear(rms(x, p[name + "norm2.weight"], 1e-6), p[name + "mlp.w1.weight"], dtype).float().chunk(2, -1)
        x = x + linear(F.silu(g) * u, p[name + "mlp.w2.weight"], dtype).float()
    x = rms(x, p["vision.norm.weight"], 1e-6)
    b, down = len(x), v.downsample_ratio
    grid = x.transpose(1, 2).view(b, -1, grid_h, grid_w)
    grid = F.pad(grid, (0, -grid_w % down, 0, -grid_h % down))
    blocks = F.unfold(grid, down, stride=down).transpose(1, 2)
    y = F.gelu(linear(blocks, p["aligner.w1.weight"], dtype).float() + p["aligner.w1.bias"])
    return x, linear(y, p["aligner.w2.weight"], dtype).float() + p["aligner.w2.bias"]


def gather(table, ids):
    """Rows of a table. (index_select: its gradient is an index_add, which a CUDA graph can hold.)"""
    return table.index_select(0, ids.flatten()).view(*ids.shape, table.shape[1])


def embed(p, ids, types=None, image_rows=None, content=None):
    """Token embeddings; image spans (types >= 0: start, content, newline, end) get their own vectors."""
    x = gather(p["embed.weight"], ids.long()).float()
    if image_rows is not None and len(image_rows):
        vectors = torch.stack([p["image_start"], p["image_newline"], p["image_end"]]).float()
        which = torch.zeros_like(types, dtype=torch.long) + (types == 2) + 2 * (types == 3)
        x = torch.where((types >= 0)[:, None], gather(vectors, which), x)
        rows = image_rows.reshape(-1, x.shape[1]).float()
        if content is None:
            content = (types == 1).nonzero()[:, 0]
        # `content` may be padded with len(ids): those rows go to a place that is cut off again
        x = torch.cat([x, x[:1]]).index_copy(0, content, rows)[:-1]
    return x


# ---- the backbone ----

def block(p, name, config, streams, pre, image, run, attention, top):
    """One layer: attention site, FFN site. `attention(x)` returns the sublayer's output."""
    eps, hc_eps, iters = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters
    x, new_pre, post, comb = site_in(streams, pre, p[name + "hc_attn_fn"], p[name + "hc_attn_base"], p[name + "hc_attn_scale"],
                                     p[name + "attn_norm.weight"], eps, hc_eps, run.dtype)
    a = attention(x)
    streams, pre = site_out(streams, a, post, sinkhorn(comb, iters, hc_eps)), new_pre
    x, new_pre, post, comb = site_in(streams, pre, p[name + "hc_ffn_fn"], p[name + "hc_ffn_base"], p[name + "hc_ffn_scale"],
                                     p[name + "ffn_norm.weight"], eps, hc_eps, run.dtype)
    f = name + "ffn."
    y, chosen, weight = moe(x, p[f + "gate.weight"], p[f + "gate.bias"], p[f + "gate.bias_vl"], image, p[f + "experts.w1"], p[f + "experts.w3"],
                            p[f + "experts.w2"], p[f + "shared_experts.w1.weight"], p[f + "shared_experts.w3.weight"],
                            p[f + "shared_experts.w2.weight"], top, config.routed_scaling_factor, config.swiglu_limit)
    run.loads[name] = chosen
    streams = site_out(streams, y, post, sinkhorn(comb, iters, hc_eps))
    return streams, new_pre, (a, y, chosen, weight)


def forward(p, config, ids, plan, hashes, run, image=None, embeddings=None):
    """(hidden after the final norm [N, H], DSpark features [N, targets * H])."""
    image = torch.zeros(len(ids), dtype=torch.bool, device=ids.device) if image is None else image
    x = embed(p, ids) if embeddings is None else embeddings
    streams = x[:, None].expand(-1, config.hc_mult, -1).contiguous()
    pre = torch.zeros(len(ids), config.hc_mult, device=ids.device)
    pre[:, 0] = 1
    eps, features, state, record = config.rms_norm_eps, [], {}, run.record
    for layer in range(config.num_hidden_layers):
        name, ratio = f"layers.{layer}.", config.compress_ratios[layer]
        if layer in config.engram_layer_ids:
            e = config.engram_layer_ids.index(layer)
            gathered = gather(p[name + "engram.embed.weight"], hashes[e]).flatten(1)
            streams = engram(streams, gathered, p[name + "engram.wkv.weight"], p[name + "engram.q_weight"], p[name + "engram.k_weight"],
                             image, eps, run.dtype)
            if record is not None:
                record[f"streams_after_engram.{layer}"] = streams
        if layer in config.dspark_target_layer_ids:
            features.append(streams.mean(1))

        def attention(x):
            return csa(p, name + "attn.", config, layer, ratio, x, plan, run, state)

        streams, pre, (a, y, chosen, weight) = block(p, name, config, streams, pre, image, run, attention, config.num_experts_per_tok)
        if record is not None:
            record.update({f"streams.{layer}": streams, f"pre_mix.{layer}": pre, f"attn_out.{layer}": a, f"ffn_out.{layer}": y,
                           f"experts.{layer}": chosen, f"expert_weights.{layer}": weight})
    hidden = rms((pre[:, :, None] * streams).sum(1), p["norm.weight"], eps)
    return hidden, torch.cat(features, 1)


def csa(p, name, config, layer, ratio, x, plan, run, state):
    """CSA2 attention of one backbone layer. `state` carries rows, index keys and selections between layers."""
    eps, heads = config.rms_norm_eps, config.num_attention_heads
    cos, sin = plan.rope(ratio > 0)
    q, kv, qr = queries(x, p[name + "wq_a.weight"], p[name + "q_norm.weight"], p[name + "wq_b.weight"], p[name + "wkv.weight"],
                        p[name + "kv_norm.weight"], cos, sin, heads, eps, run.quant)
    sink = p[name + "attn_sink"]
    if ratio == 0 or len(x) < ratio:
        return outputs(attend(q, kv, None, sink, plan), cos, sin, p[name + "wo_a.weight"], p[name + "wo_b.weight"], config.o_groups)
    if layer in config.kv_source_layer_ids:
        c = name + "compressor."
        row_cos, row_sin = plan.rope(True, ratio)
        latent, rows = compress(x, p[c + "wkv.weight"], p.get(c + "wgate.weight"), p[c + "norm.weight"], row_cos, row_sin, ratio, eps, run.quant)
        plan.ratios[len(rows)] = ratio
        keys = index_keys(latent.detach() if run.index_queries is not None else latent, p[name + "indexer.wk.weight"],
                          p[name + "indexer.k_norm.weight"], row_cos, row_sin, eps, run.quant, run.dtype)
        state.update(rows=rows, keys=keys)
        if run.record is not None:
            run.record.update({f"compressed_kv.{layer}": rows, f"index_keys.{layer}": keys})
    if layer in config.index_source_layer_ids and (run.select or run.index_queries is not None):
        i = name + "indexer."
        xi, qri = (x.detach(), qr.detach()) if run.index_queries is not None else (x, qr)
        iq, w = index_queries(xi, qri, p[i + "wq_b.weight"], p[i + "weights_proj.weight"], cos, sin, config.index_n_heads, eps, run.quant)
        state.update(iq=iq, w=w, index_layer=layer)
        if run.select:
            candidates = state.get("candidates")
            with torch.no_grad():
                state["mask"] = select(iq, state["keys"], w, plan, config.index_topk, candidates)
                if layer == config.candidate_source_layer_id:
                    state["candidates"] = block_candidates(iq, state["keys"], w, plan, config.candidate_topk_blocks, config.candidate_block_size)
            if run.record is not None:
                run.record[f"topk.{layer}"] = state["mask"]
                if layer == config.candidate_source_layer_id:
                    run.record[f"candidates.{layer}"] = state["candidates"]
    if run.index_queries is not None:
        target = index_targets(q.detach(), kv.detach(), state["rows"].detach(), sink.detach(), plan, run.index_queries)
        run.index_loss.append((state["index_layer"], layer, target, state))
        if layer == state["index_layer"]:
            state.setdefault("scored", {})[layer] = index_scores(
                state["iq"].index_select(0, run.index_queries), state["keys"], state["w"].index_select(0, run.index_queries))
    o = attend(q, kv, state["rows"], sink, plan, state.get("mask") if run.select else None)
    return outputs(o, cos, sin, p[name + "wo_a.weight"], p[name + "wo_b.weight"], config.o_groups)
