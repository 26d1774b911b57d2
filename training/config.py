"""The demo model's sizes, and reading of a nested config.json."""

import json

TEXT = dict(
    model_type="deepseek_v41_text", dtype="bfloat16", num_key_value_heads=1, n_shared_experts=1, hidden_act="silu",
    attention_bias=False, attention_dropout=0.0, scoring_func="sqrtsoftplus", topk_method="noaux_tc", norm_topk_prob=True,
    tie_word_embeddings=False, use_cache=True, initializer_range=0.02,
    hidden_size=192, moe_intermediate_size=64, num_hidden_layers=8, num_attention_heads=8, head_dim=64, qk_rope_head_dim=32,
    q_lora_rank=96, o_lora_rank=64, o_groups=4, swiglu_limit=10.0, rms_norm_eps=1e-20, max_position_embeddings=131072,
    rope_theta=10000.0, compress_rope_theta=160000.0,
    rope_scaling=dict(rope_type="yarn", type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=8192),
    n_routed_experts=16, num_experts_per_tok=4, routed_scaling_factor=1.5, sliding_window=32,
    compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 0], kv_source_layer_ids=[2, 5], index_source_layer_ids=[2, 5, 7],
    index_n_heads=4, index_head_dim=32, index_topk=64,
    candidate_source_layer_id=5, candidate_topk_blocks=32, candidate_block_size=8,
    hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6,
    engram_layer_ids=[1, 4], engram_max_ngram_size=4, engram_vocab_size=1024, engram_n_heads=4, engram_head_dim=32,
    num_nextn_predict_layers=3, dspark_block_size=5, dspark_target_layer_ids=[5, 6, 7], dspark_markov_rank=32,
    dspark_n_routed_experts=8, dspark_num_experts_per_tok=2, vocab_size=3072,
    bos_token_id=0, eos_token_id=1, pad_token_id=2, engram_pad_token_id=2)
VISION = dict(model_type="deepseek_v41_vision", num_hidden_layers=3, hidden_size=64, num_attention_heads=2, intermediate_size=128,
              patch_size=4, rope_theta=10000.0, downsample_ratio=3, max_image_tokens=64, min_pixels=2304)
QUANTIZATION = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[32, 32], scale_fmt="ue8m0",
                    expert_dtype="fp4")


class Config:
    """Attribute access to text_config; `vision` and `image_token_id` beside it."""

    def __init__(self, state):
        self.state = state
        self.__dict__.update(state["text_config"])
        self.vision = Config.Part(state["vision_config"])
        self.image_token_id = state["image_token_id"]

    class Part:
        def __init__(self, state):
            self.__dict__.update(state)


def read(path):
    with open(path) as f:
        return Config(json.load(f))


def demo(tokenizer_path):
    """The demo model's config.json for a tokenizer."""
    from engram import compressed_map, layer_primes
    with open(tokenizer_path) as f:
        added = {token["content"]: token["id"] for token in json.load(f)["added_tokens"]}
    text = dict(TEXT, engram_compressed_vocab_size=int(compressed_map(tokenizer_path).max()) + 1,
                dspark_noise_token_id=added["<｜place▁holder▁no▁5｜>"])
    text["engram_num_embeddings"] = [sum(primes) for primes in layer_primes(text)]
    return dict(architectures=["DeepseekV41ForCausalLM"], model_type="deepseek_v41", dtype="bfloat16", bos_token_id=0, eos_token_id=1,
                pad_token_id=2, tie_word_embeddings=False, image_token_id=added["<｜deepseek_image｜>"], quantization_config=QUANTIZATION,
                text_config=text, vision_config=VISION)
