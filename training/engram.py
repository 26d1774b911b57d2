"""Engram's token map, hash constants and row ids."""

import json
import re
import unicodedata

import numpy as np
import torch
from tokenizers import Tokenizer


def compressed_map(tokenizer_path):
    """int64 [all ids]: ids whose text normalizes alike share a number, by first appearance."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    seen, out = {}, []
    for i in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([i], skip_special_tokens=False)
        if "\ufffd" in text:
            key = tokenizer.id_to_token(i)
        else:
            key = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
            key = "".join(c for c in key if unicodedata.category(c) != "Mn").lower()
            key = re.sub(r"[ \t\r\n]+", " ", key)
            key = " " if key == " " else key.strip()
            key = key or text
        out.append(seen.setdefault(key, len(seen)))
    return np.array(out, np.int64)


def _is_prime(n):
    return n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1))


def layer_primes(text):
    """Bucket sizes of each layer: n-gram size major, head minor; no prime is used twice."""
    used, out = set(), []
    for _ in text["engram_layer_ids"]:
        primes = []
        for _ in range(2, text["engram_max_ngram_size"] + 1):
            candidate = text["engram_vocab_size"] - 1
            for _ in range(text["engram_n_heads"]):
                candidate += 1
                while candidate in used or not _is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                primes.append(candidate)
        out.append(primes)
    return out


class Hasher:
    """Row ids of every Engram layer for a packed row of tokens."""

    def __init__(self, config, token_map, device):
        text = config.state["text_config"]
        n, vocab = config.engram_max_ngram_size, config.engram_compressed_vocab_size
        assert int(token_map.max()) + 1 == vocab
        self.n, self.heads = n, config.engram_n_heads
        self.map = torch.tensor(token_map, device=device)
        self.pad = int(token_map[config.engram_pad_token_id])
        self.primes, self.offsets, self.multipliers = [], [], []
        for layer, primes in zip(config.engram_layer_ids, layer_primes(text)):
            m = np.random.default_rng(10007 * layer).integers(0, max(1, (2**63 - 1) // vocab // 2), n) * 2 + 1
            self.primes.append(torch.tensor(primes, device=device))
            self.offsets.append(torch.tensor(np.concatenate([[0], np.cumsum(primes)[:-1]]), device=device))
            self.multipliers.append([int(v) for v in m])

    def __call__(self, ids, start, image):
        """ids, start int [N], image bool [N] -> int64 [layers, N, columns]. Nothing reaches before `start` or over an image."""
        at = torch.arange(len(ids), device=ids.device)
        mapped = self.map[ids.long()]
        grams, blocked = [], torch.zeros_like(image)
        for back in range(self.n):
            source = at - back
            blocked = blocked | (source < start)
            source = source.clamp(min=0)
            blocked = blocked | image[source]
            grams.append(torch.where(blocked, self.pad, mapped[source]))
        out = []
        for primes, offsets, multipliers in zip(self.primes, self.offsets, self.multipliers):
            mix, columns = grams[0] * multipliers[0], []
            for size in range(2, self.n + 1):
                mix = mix ^ (grams[size - 1] * multipliers[size - 1])
                low = (size - 2) * self.heads
                columns.append(mix[:, None] % primes[low:low + self.heads] + offsets[low:low + self.heads])
            out.append(torch.cat(columns, 1))
        return torch.stack(out)


if __name__ == "__main__":
    import sys
    import config
    json.dump(config.demo(sys.argv[1]), open(sys.argv[2], "w"), indent=2)
