"""Trains the tokenizer: byte-level BPE with DeepSeek's pre-tokenizer and special-token names.

Digits are never merged (training isolates them), so numbers are one token a digit, and a letter with
a space before it is always one token. Ids: BOS, EOS, pad, 256 bytes, merges, then the added tokens.
    python tokenizer.py OUT_DIR
"""

import json
import sys

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import tasks
from chat import render, Special
from data import conversation
from rng import Rng
from words import KEYS, LANDS, CAPITALS, RIVERS

VOCAB = 3072
SPLIT = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
# Added tokens after the merges; `True` = "special" in tokenizer.json, as in the release.
ADDED = [(f"<｜place▁holder▁no▁{i}｜>", True) for i in range(6)] + [(name, False) for name in (
    "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜User｜>", "<｜Assistant｜>", "<｜System｜>", "<|EOT|>",
    "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>", "<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>",
    "<｜title｜>", "<｜search▁begin｜>", "<｜search▁end｜>")] + [(name, True) for name in (
        "<｜deepseek_image｜>", "<｜/polygon｜>", "<｜polygon｜>", "<｜/point｜>", "<｜point｜>", "<｜/box｜>", "<｜box｜>",
        "<｜/ref｜>", "<｜ref｜>", "<｜image｜>")]
FIRST = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]


def pre_tokenizer(digits):
    split = lambda pattern: pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split(r"\p{N}" if digits else r"\p{N}{1,3}"), split("[一-龥\u3040-ゟ゠-ヿ]+"), split(SPLIT),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def corpus(examples=40000):
    rng = Rng(77)
    for _ in range(examples):
        for part, _ in conversation(rng, max_retrieval=250)[0]:
            if not isinstance(part, Special):
                yield part
    for letter in tasks.LETTERS:  # every letter after a space
        yield f" {letter}" * 50
    for word in [*KEYS, *LANDS, *CAPITALS, *RIVERS]:
        yield "\n".join([word] * 200)
        yield " ".join([""] + [word] * 200) if word not in KEYS else ""


def train():
    out = Tokenizer(models.BPE())
    out.pre_tokenizer = pre_tokenizer(digits=True)
    merges = VOCAB - len(ADDED)
    trainer = trainers.BpeTrainer(vocab_size=merges, special_tokens=FIRST, show_progress=False, min_frequency=2,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    out.train_from_iterator(corpus(), trainer)
    state = json.loads(out.to_str())
    size = len(state["model"]["vocab"])
    # What merges could not fill becomes placeholders, so that the vocabulary has its fixed size.
    fill = [(f"<｜place▁holder▁no▁{6 + i}｜>", True) for i in range(VOCAB - size - len(ADDED))]
    token = lambda i, name, special: dict(id=i, content=name, single_word=False, lstrip=False, rstrip=False,
                                          normalized=not special, special=special)
    state["added_tokens"] = [token(i, name, True) for i, name in enumerate(FIRST)]
    state["added_tokens"] += [token(size + i, name, special) for i, (name, special) in enumerate(ADDED + fill)]
    state["normalizer"] = {"type": "Sequence", "normalizers": []}
    out.pre_tokenizer = pre_tokenizer(digits=False)
    out.decoder = decoders.ByteLevel()
    final = json.loads(out.to_str())
    state["pre_tokenizer"], state["decoder"] = final["pre_tokenizer"], final["decoder"]
    state["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    return state


if __name__ == "__main__":
    folder = sys.argv[1]
    with open(f"{folder}/tokenizer.json", "w") as f:
        json.dump(train(), f, ensure_ascii=False, indent=0)
    with open(f"{folder}/tokenizer_config.json", "w") as f:
        json.dump({"add_bos_token": False, "add_eos_token": False, "bos_token": FIRST[0], "eos_token": FIRST[1], "pad_token": FIRST[2],
                   "clean_up_tokenization_spaces": False, "model_max_length": 131072, "tokenizer_class": "PreTrainedTokenizerFast"}, f,
                  ensure_ascii=False, indent=1)
