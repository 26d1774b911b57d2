"""Writes a training state as a checkpoint in the released layout.
    python export.py --data FOLDER --state FOLDER --out models/demo
"""

import argparse
import json
import shutil

import checkpoint
from params import load_state


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--data", required=True, help="holds tokenizer.json, tokenizer_config.json and config.json")
    a.add_argument("--state", required=True)
    a.add_argument("--out", required=True)
    a.add_argument("--confidence-scale", type=float, default=1.0,
                   help="calibration of the draft confidence (1 / temperature), multiplied into its head")
    a = a.parse_args()
    values, _ = load_state(a.state)
    values = {name: w for name, w in values.items() if "wgate.bias" not in name}
    for name in values:
        if name.endswith("confidence_head.proj.weight"):
            values[name] = values[name] * a.confidence_scale
    total = checkpoint.save(a.out, values)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(f"{a.data}/{name}", f"{a.out}/{name}")
    with open(f"{a.out}/generation_config.json", "w") as f:
        json.dump({"bos_token_id": 0, "eos_token_id": 1, "do_sample": False, "temperature": 0.0, "top_p": 1.0}, f, indent=1)
    back = checkpoint.load(a.out)
    worst = {"fp8": 0.0, "fp4": 0.0, "other": 0.0}
    for name, w in values.items():
        kind = "fp4" if checkpoint.EXPERTS.search(name) else "fp8" if checkpoint.FP8.search(name) or checkpoint.TABLE.search(name) else "other"
        error = (back[name] - w).norm() / (w.norm() + 1e-12)
        worst[kind] = max(worst[kind], error.item())
    print(f"{total / 1e6:.2f} MB of weights; largest relative error of one tensor: {worst}")


if __name__ == "__main__":
    main()
