"""DSpark: the three draft stages, the Markov head and the confidence head."""

import torch

from model import block, gather, outputs, queries, rms, rope_table, rotate, linear
from quant import fp8_32


def stage_contexts(p, config, features, pos, run):
    """Window keys of every stage for every token: a stage's own KV of the main stream's features. Lists of [N, D]."""
    main = rms(linear(features, p["mtp.0.main_proj.weight"], run.dtype), p["mtp.0.main_norm.weight"], config.rms_norm_eps)
    cos, sin = rope_table(config, pos, False)
    out = []
    for k in range(config.num_nextn_predict_layers):
        a = f"mtp.{k}.attn."
        kv = rotate(rms(linear(main, p[a + "wkv.weight"], run.dtype), p[a + "kv_norm.weight"], config.rms_norm_eps), cos, sin)
        out.append((fp8_32(kv) if run.quant else kv).to(run.dtype))
    return out


def draft_blocks(p, config, contexts, anchors, tokens, start, run):
    """Draft blocks of A golden tokens. anchors: index of each in the packed row; tokens: its id; start: its document's first index.

    Returns (raw collapsed residual [A, B, H], base logits [A, B, V])."""
    size, stages, eps = config.dspark_block_size, config.num_nextn_predict_layers, config.rms_norm_eps
    count, heads, dim = len(anchors), config.num_attention_heads, config.head_dim
    ids = torch.full((count, size), config.dspark_noise_token_id, device=anchors.device, dtype=torch.long)
    ids[:, 0] = tokens
    streams = gather(p["embed.weight"], ids.flatten()).float()[:, None].expand(-1, config.hc_mult, -1).contiguous()
    pre = torch.zeros(len(streams), config.hc_mult, device=anchors.device)
    pre[:, 0] = 1
    pos = ((anchors - start)[:, None] + torch.arange(size, device=anchors.device)).flatten()
    cos, sin = rope_table(config, pos, False)
    back = anchors[:, None] - torch.arange(config.sliding_window, 0, -1, device=anchors.device)  # a-window .. a-1
    keep = torch.cat([back >= start[:, None], torch.ones(count, size, dtype=torch.bool, device=anchors.device)], 1)
    image = torch.zeros(len(streams), dtype=torch.bool, device=anchors.device)
    for k in range(stages):
        name = f"mtp.{k}."

        def attention(x):
            a = name + "attn."
            q, kv, _ = queries(x, p[a + "wq_a.weight"], p[a + "q_norm.weight"], p[a + "wq_b.weight"], p[a + "wkv.weight"],
                               p[a + "kv_norm.weight"], cos, sin, heads, eps, run.quant)
            keys = torch.cat([gather(contexts[k], back.clamp(min=0)), kv.view(count, size, dim)], 1)
            s = torch.einsum("abhd,akd->ahbk", q.view(count, size, heads, dim), keys).float() * dim ** -0.5
            s = s.masked_fill(~keep[:, None, None], float("-inf"))
            s = torch.cat([s, p[a + "attn_sink"].float()[None, :, None, None].expand(count, heads, size, 1)], 3)
            o = torch.einsum("ahbk,akd->abhd", s.softmax(3)[..., :-1].to(keys.dtype), keys).reshape(-1, heads, dim)
            return outputs(o, cos, sin, p[a + "wo_a.weight"], p[a + "wo_b.weight"], config.o_groups)

        streams, pre, _ = block(p, name, config, streams, pre, image, run, attention, config.dspark_num_experts_per_tok)
    raw = (pre[:, :, None] * streams).sum(1)
    hidden = rms(raw, p[f"mtp.{stages - 1}.norm.weight"], eps)
    base = linear(hidden, p["head.weight"], run.dtype).float()
    return raw.view(count, size, -1), base.view(count, size, -1)


def heads(p, config, raw, base, previous, run):
    """(draft logits, confidence logits) [A, B, ...] given the token before each draft, [A, B]."""
    last = f"mtp.{config.num_nextn_predict_layers - 1}."
    markov = gather(p[last + "markov_head.embed.weight"], previous.long()).float()
    logits = base + linear(markov, p[last + "markov_head.head.weight"], run.dtype).float()
    confidence = linear(torch.cat([raw, markov], -1), p[last + "confidence_head.proj.weight"], torch.float32)[..., 0]
    return logits, confidence


@torch.no_grad()
def greedy_chain(p, config, raw, base, tokens, run):
    """Drafts chosen one after the other: (drafts [A, B], draft logits, confidence logits)."""
    drafts, logits, confidence, previous = [], [], [], tokens
    for i in range(config.dspark_block_size):
        l, c = heads(p, config, raw[:, i:i + 1], base[:, i:i + 1], previous[:, None], run)
        previous = l[:, 0].argmax(-1)
        drafts.append(previous)
        logits.append(l[:, 0])
        confidence.append(c[:, 0])
    return torch.stack(drafts, 1), torch.stack(logits, 1), torch.stack(confidence, 1)
