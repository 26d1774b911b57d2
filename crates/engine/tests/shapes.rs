//! The guarantee on models of unusual shapes: sizes that are no multiples of a block or a vector,
//! other ratios, no drafts, no decoder, n-grams everywhere.

mod common;
mod modes;
mod random;

use common::{FORMATS, all, bits, load, random_tokens, run_chunks};
use deepinfer::cache::CacheFormat;
use deepinfer::checkpoint::Source;
use deepinfer::config::ModelConfig;
use deepinfer::engine::{DraftMode, Engine, EngineConfig, PrefixCache};
use deepinfer::model::{Model, NoProbe};
use deepinfer::plan::StepPlan;
use deepinfer::request::{Request, RequestHandle, SamplingParams};
use deepinfer::session::{GreedyDrafts, Session};
use deepinfer::synth::{self, Options, Preset};
use deepinfer_device::Device;
use deepinfer_device::cpu::Cpu;
use serde_json::{Value, json};
use std::sync::Arc;
use tempfile::TempDir;

const TOKENS: usize = 70;
/// Ordinary tokens of every vocabulary here.
const VOCAB: u32 = 256;

struct Shape {
    name: &'static str,
    cpu: Arc<Cpu>,
    model: Arc<Model<Cpu>>,
    /// Tokens of a draft block; 0 without drafts.
    block: usize,
}

/// A random model with the fields of `text` in place of the small preset's.
fn shape(name: &'static str, text: Value) -> Shape {
    let folder = folder(text);
    let (cpu, model) = load(folder.path(), 2);
    let text = &model.config.text_config;
    let block = if text.num_nextn_predict_layers > 0 { text.dspark_block_size } else { 0 };
    Shape { name, cpu, model, block }
}

/// A folder with its checkpoint.
fn folder(text: Value) -> TempDir {
    let small = synth::plan(&Options::new(Preset::Tiny)).unwrap().config.to_json();
    let mut config: Value = serde_json::from_str(&small).unwrap();
    config["vision_config"] = json!({"num_hidden_layers": 0});
    for (field, value) in text.as_object().unwrap() {
        config["text_config"][field] = value.clone();
    }
    // Sizes and ids that follow from the tokenizer; the first are replaced by the right ones.
    config["text_config"]["engram_num_embeddings"] = json!([]);
    config["text_config"]["engram_compressed_vocab_size"] = json!(1);
    config["text_config"]["dspark_noise_token_id"] = json!(3);
    config["image_token_id"] = json!(null);
    let config = ModelConfig::from_json(config.to_string().as_bytes()).unwrap();
    let plan = synth::plan_for(config).unwrap();
    let folder = tempfile::tempdir().unwrap();
    synth::write_plan(folder.path(), &plan, 3, &mut |_, _| {}).unwrap();
    folder
}

/// Groups of 3, pages of 129 tokens; two residual streams; nothing divides a block of 32.
fn thirds() -> Shape {
    shape(
        "thirds",
        json!({
            "hidden_size": 100, "num_hidden_layers": 5, "compress_ratios": [0, 3, 3, 1, 1, 0],
            "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3, 4],
            "candidate_source_layer_id": 3, "candidate_topk_blocks": 2, "candidate_block_size": 3,
            "index_topk": 5, "index_n_heads": 3, "qk_rope_head_dim": 8, "head_dim": 96,
            "num_attention_heads": 3, "o_groups": 3, "o_lora_rank": 20, "q_lora_rank": 36,
            "moe_intermediate_size": 52, "n_routed_experts": 5, "num_experts_per_tok": 1,
            "hc_mult": 2, "hc_sinkhorn_iters": 1, "sliding_window": 5, "vocab_size": 613,
            "engram_layer_ids": [0, 2, 4], "engram_max_ngram_size": 5, "engram_n_heads": 1,
            "num_nextn_predict_layers": 1, "dspark_target_layer_ids": [2, 0, 2],
            "dspark_block_size": 3, "dspark_markov_rank": 8,
        }),
    )
}

/// Sources of three ratios, window layers between them, no decoder half and no drafts.
fn no_decoder() -> Shape {
    shape(
        "no decoder",
        json!({
            "hidden_size": 96, "num_hidden_layers": 6, "compress_ratios": [2, 4, 4, 0, 3, 3],
            "kv_source_layer_ids": [0, 1, 4], "index_source_layer_ids": [0, 1, 4, 5],
            "candidate_source_layer_id": 4, "candidate_topk_blocks": 4, "candidate_block_size": 2,
            "index_topk": 4, "head_dim": 32, "hc_mult": 3, "sliding_window": 1,
            "engram_layer_ids": [], "num_nextn_predict_layers": 0, "dspark_target_layer_ids": [],
        }),
    )
}

/// Everything in the decoder half, n-grams and draft targets too.
fn all_decoder() -> Shape {
    shape(
        "all decoder",
        json!({
            "num_hidden_layers": 3, "compress_ratios": [1, 1, 1, 0, 0],
            "kv_source_layer_ids": [0], "index_source_layer_ids": [0, 1],
            "candidate_source_layer_id": -1, "index_topk": 7, "hc_mult": 1, "sliding_window": 9,
            "engram_layer_ids": [0, 2], "engram_max_ngram_size": 2,
            "num_nextn_predict_layers": 2, "dspark_target_layer_ids": [0, 2],
            "dspark_block_size": 7,
        }),
    )
}

/// Windows only.
fn windows() -> Shape {
    shape(
        "windows",
        json!({
            "num_hidden_layers": 2, "compress_ratios": [0, 0, 0], "kv_source_layer_ids": [],
            "index_source_layer_ids": [], "candidate_source_layer_id": null,
            "engram_layer_ids": [1], "sliding_window": 6,
            "num_nextn_predict_layers": 1, "dspark_target_layer_ids": [1],
        }),
    )
}

fn shapes() -> [Shape; 4] {
    [thirds(), no_decoder(), all_decoder(), windows()]
}

impl Shape {
    fn session(&self, format: CacheFormat, slots: usize) -> Session<Cpu> {
        Session::new(self.cpu.clone(), self.model.clone(), format, slots, 200, 200).unwrap()
    }

    fn clean(&self, format: CacheFormat, tokens: &[u32]) -> Vec<Vec<u32>> {
        let whole = run_chunks(&mut self.session(format, 1), 0, tokens, 200);
        for row in &whole {
            assert!(row.iter().all(|&x| f32::from_bits(x).is_finite()), "{}", self.name);
        }
        whole
    }
}

#[test]
fn chunks_and_neighbours_change_no_bits() {
    let tokens = random_tokens(1, TOKENS, VOCAB);
    let other = random_tokens(2, 150, VOCAB);
    for shape in shapes() {
        for format in FORMATS {
            let clean = shape.clean(format, &tokens);
            for chunk in [1, 2, 3, 7, 64] {
                let mut s = shape.session(format, 3);
                let mut got = Vec::new();
                for (i, part) in tokens.chunks(chunk).enumerate() {
                    let (before, after) = ([other[i]], [other[i + 1]]);
                    let sequences = [(2, &before[..]), (0, part), (1, &after[..])]
                        .into_iter()
                        .map(|(slot, tokens)| s.extend(slot, tokens, &all(tokens.len())))
                        .collect();
                    let logits = s.run(&StepPlan { sequences }, &mut NoProbe).unwrap();
                    got.extend(bits(logits).drain(1..=part.len()));
                }
                assert_eq!(got, clean, "{}: {format:?}, chunks of {chunk}", shape.name);
            }
        }
    }
}

#[test]
fn rejected_drafts_leave_no_trace() {
    let tokens = random_tokens(3, TOKENS, VOCAB);
    for shape in shapes() {
        let rows = shape.block + 1;
        for format in FORMATS {
            let clean = shape.clean(format, &tokens);
            for accepted in 0..=shape.block {
                for first in [1, 2, 3, 4, 5, 11, 12] {
                    let mut s = shape.session(format, 1);
                    run_chunks(&mut s, 0, &tokens[..first], 64);
                    let mut at = first;
                    for round in 0..4 {
                        let mut block = tokens[at..at + rows].to_vec();
                        for wrong in &mut block[accepted + 1..] {
                            *wrong = (*wrong + 1 + round) % VOCAB;
                        }
                        let got = run_chunks(&mut s, 0, &block, rows);
                        assert_eq!(got[..=accepted], clean[at..=at + accepted], "{}", shape.name);
                        at += accepted + 1;
                        s.truncate(0, at);
                    }
                    let rest = run_chunks(&mut s, 0, &tokens[at..], 5);
                    let name = shape.name;
                    assert_eq!(rest, clean[at..], "{name}: {format:?} {accepted} from {first}");
                }
            }
        }
    }
}

#[test]
fn a_restored_sequence_goes_on_with_the_same_bits() {
    let tokens = random_tokens(5, 150, VOCAB);
    let other = random_tokens(6, 140, VOCAB);
    for shape in shapes() {
        for format in FORMATS {
            let clean = shape.clean(format, &tokens);
            let mut s = shape.session(format, 3);
            for cut in [1, 2, 5, 10, 128, 131, 133] {
                s.truncate(0, 0);
                run_chunks(&mut s, 0, &tokens[..cut], 64);
                let saved = s.caches.snapshot(&s.device, 0, &s.pages(0), cut as u32).unwrap();
                s.truncate(0, 0);
                run_chunks(&mut s, 0, &other, 64);
                let target = s.pages(2);
                s.caches.restore(&s.device, &saved, 2, &target).unwrap();
                s.texts[2] = tokens[..cut].to_vec();
                let rest = run_chunks(&mut s, 2, &tokens[cut..], 13);
                assert_eq!(rest, clean[cut..], "{}: {format:?} {cut}", shape.name);
            }
        }
    }
}

/// The decoder drops rows, layer by layer; what later tokens read does not change.
#[test]
fn prefill_modes_agree_in_pairs() {
    for shape in shapes() {
        if shape.model.config.text_config.decoder_start().is_none() {
            continue;
        }
        for format in FORMATS {
            modes::check_random(&mut shape.session(format, 1), 12, TOKENS, VOCAB, shape.name);
        }
    }
}

/// A layer may be a draft target more than once: the features follow the list.
#[test]
fn draft_features_stand_in_the_order_of_the_list() {
    let shape = thirds();
    let hidden = shape.model.config.text_config.hidden_size;
    let mut s = shape.session(CacheFormat::Exact, 1);
    run_chunks(&mut s, 0, &[5], 1);
    let mut features = vec![0.0; 3 * hidden];
    s.device.download_act(&s.scratch.features, 0, &mut features).unwrap();
    let [first, second, third] = [0, 1, 2].map(|i| &features[i * hidden..(i + 1) * hidden]);
    assert!(first.iter().all(|&x| x != 0.0));
    assert_eq!(first, third, "layer 2");
    assert_ne!(first, second, "layer 2 and layer 0");
}

#[test]
fn drafting_depends_on_the_sequence_alone() {
    for shape in shapes().iter().filter(|shape| shape.block > 0) {
        for format in FORMATS {
            let texts: Vec<_> =
                (0..3).map(|i| random_tokens(20 + i, 3 + 20 * i as usize, VOCAB)).collect();
            let mut together = shape.session(format, 3);
            for (slot, text) in texts.iter().enumerate() {
                run_chunks(&mut together, slot, text, 11);
            }
            let order = [2, 0, 1].map(|slot| (slot, 7 + slot as u32));
            let (tokens, confidences) =
                together.draft(&order, shape.block, &mut GreedyDrafts).unwrap();
            for (i, pair) in order.into_iter().enumerate() {
                let mut alone = shape.session(format, 3);
                run_chunks(&mut alone, pair.0, &texts[pair.0], 200);
                let (t, c) = alone.draft(&[pair], shape.block, &mut GreedyDrafts).unwrap();
                assert_eq!((&t[0], &c[0]), (&tokens[i], &confidences[i]), "{}", shape.name);
            }
        }
    }
}

/// An engine on a decoder with a window of `window` and draft blocks of `block`.
fn decoder_engine(window: usize, block: usize, config: EngineConfig) -> Engine {
    let folder = folder(json!({
        "num_hidden_layers": 3, "compress_ratios": [1, 1, 1, 0],
        "kv_source_layer_ids": [0], "index_source_layer_ids": [0, 1],
        "candidate_source_layer_id": -1, "engram_layer_ids": [0], "sliding_window": window,
        "num_nextn_predict_layers": 1, "dspark_target_layer_ids": [0, 2],
        "dspark_block_size": block,
    }));
    let config = EngineConfig { threads: Some(1), prefix_cache: PrefixCache::Off, ..config };
    Engine::open(Source::directory(folder.path()), &config, &mut |_, _| {}).unwrap()
}

/// With a window of one nothing but a row itself is in its window, also where a fork starts.
#[test]
fn samples_fork_with_a_window_of_one() {
    let config = EngineConfig { draft: DraftMode::Off, kv_tokens: 2048, ..Default::default() };
    let engine = decoder_engine(1, 3, config);
    let params = |n, sample| SamplingParams {
        n,
        sample,
        seed: Some(5),
        temperature: 1.0,
        max_tokens: Some(6),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let run = |n, sample| {
        let request = Request::tokens(random_tokens(3, 40, VOCAB), params(n, sample));
        let handles = engine.submit_all(request).unwrap();
        let ids = |h: RequestHandle| h.wait().unwrap().tokens.iter().map(|t| t.id).collect();
        handles.into_iter().map(ids).collect::<Vec<Vec<u32>>>()
    };
    let together = run(3, 0);
    for (sample, tokens) in together.iter().enumerate() {
        assert_eq!(*tokens, run(1, sample as u32)[0], "sample {sample}");
    }
}

/// Draft blocks that do not fit into a page beside a prompt are not timed; the engine starts.
#[test]
fn long_draft_blocks_start() {
    let config =
        EngineConfig { draft: DraftMode::Auto, max_seqs: 1, kv_tokens: 2048, ..Default::default() };
    let engine = decoder_engine(9, 128, config);
    let params =
        SamplingParams { max_tokens: Some(4), ignore_eos: true, ..SamplingParams::greedy() };
    let request = Request::tokens(random_tokens(3, 20, VOCAB), params);
    assert_eq!(engine.submit(request).unwrap().wait().unwrap().tokens.len(), 4);
}
