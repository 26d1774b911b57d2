//! Synthetic checkpoints: sizes, layout, and that they open.

mod common;
mod random;

use deepinfer::cache::CacheFormat;
use deepinfer::checkpoint::{Checkpoint, Part, Source, layout};
use deepinfer::engram::Engram;
use deepinfer::model::NoProbe;
use deepinfer::plan::StepPlan;
use deepinfer::session::Session;
use deepinfer::synth::{self, Options, Preset, SynthError};
use deepinfer::tokenizer::Tokenizer;
use deepinfer_device::Format;

fn plan(preset: Preset) -> synth::Plan {
    synth::plan(&Options::new(preset)).unwrap()
}

fn bytes(spec: &layout::TensorSpec) -> u64 {
    synth::stored(spec, 4, 0).iter().map(synth::StoredTensor::bytes).sum()
}

#[test]
fn a_written_checkpoint_opens_and_is_complete() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("new");
    let options = Options { positions: Some(131_072), seed: 5, ..Options::new(Preset::Tiny) };
    let mut seen = Vec::new();
    let summary = synth::write(&out, &options, &mut |done, all| seen.push((done, all))).unwrap();
    assert_eq!(seen.last(), Some(&(summary.bytes, summary.bytes)));
    assert!(seen.windows(2).all(|pair| pair[0].0 < pair[1].0));
    assert!(summary.shards >= 3 && summary.bytes < 8_000_000);

    let mut checkpoint = Checkpoint::open(Source::directory(&out)).unwrap();
    let config = checkpoint.config().clone();
    assert_eq!(config.text_config.max_position_embeddings, 131_072);
    let tokenizer = Tokenizer::from_bytes(checkpoint.tokenizer_json().unwrap()).unwrap();
    assert!(Engram::new(&config.text_config, &tokenizer).unwrap().is_some());
    assert_eq!(tokenizer.vocab_size(), config.text_config.vocab_size);
    for spec in layout::tensors(&config, &config.text_config.engram_num_embeddings) {
        match spec.shape[..] {
            [rows, cols] => {
                let matrix = checkpoint.take_matrix(&spec.name, rows, cols).unwrap();
                assert_eq!(matrix.format, spec.format, "{}", spec.name);
            }
            _ => drop(checkpoint.take_vector(&spec.name, spec.shape[0]).unwrap()),
        }
    }
    assert_eq!(checkpoint.finish(&[]).unwrap().tensors, summary.tensors);

    match synth::write(&out, &options, &mut |_, _| {}) {
        Err(SynthError::NotEmpty { path }) => assert_eq!(path, out),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_seed_decides_every_byte() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, seed| {
        let out = folder.path().join(name);
        let options = Options { seed, ..Options::new(Preset::Tiny) };
        synth::write(&out, &options, &mut |_, _| {}).unwrap();
        std::fs::read(out.join("model-00002-of-00004.safetensors")).unwrap()
    };
    let first = write("a", 1);
    assert!(first == write("b", 1));
    assert!(first != write("c", 2));
}

/// The weights have sizes that a signal survives: logits are finite, about as wide as a trained
/// model's, and differ from position to position.
#[test]
fn random_weights_keep_activations_in_range() {
    let folder = tempfile::tempdir().unwrap();
    synth::write(folder.path(), &Options::new(Preset::Tiny), &mut |_, _| {}).unwrap();
    let (cpu, model) = common::load(folder.path(), 2);
    let mut session = Session::new(cpu, model, CacheFormat::Released, 1, 512, 512).unwrap();
    let tokens = common::random_tokens(3, 200, 1024);
    let sequence = session.extend(0, &tokens, &(0..200).collect::<Vec<u32>>());
    let logits = session.run(&StepPlan { sequences: vec![sequence] }, &mut NoProbe).unwrap();
    let mut best = std::collections::HashSet::new();
    for row in &logits {
        let squares: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
        let size = (squares / row.len() as f64).sqrt();
        assert!((0.5..8.0).contains(&size), "{size}");
        best.insert((0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])));
    }
    assert!(best.len() > 50, "{} different tokens are best somewhere", best.len());
}

/// What the measurements ask of `bench`.
#[test]
fn bench_has_its_sizes() {
    let plan = plan(Preset::Bench);
    let text = &plan.config.text_config;
    assert_eq!((text.n_routed_experts, text.num_experts_per_tok), (16, 4));
    let (mut total, mut fp8, mut fp4, mut plain) = (0, 0, 0, 0);
    for spec in &plan.specs {
        let size = bytes(spec);
        total += size;
        let (part, _) = Part::of(&spec.name);
        if matches!(part, Part::Draft | Part::Embedding | Part::EngramTable | Part::Vision) {
            continue;
        }
        match spec.format {
            Format::Fp4Row32 => fp4 += size * 4 / 16,
            Format::Fp8Block32 | Format::Fp8Row32 => fp8 += size,
            Format::Bf16 | Format::F32 => plain += size,
        }
    }
    let active = fp8 + fp4 + plain;
    println!("bench: {total} bytes, {active} active: fp8 {fp8}, fp4 {fp4}, plain {plain}");
    assert!((4_000_000_000..6_000_000_000).contains(&total), "{total}");
    assert!(active > 1_000_000_000, "{active}");
    let share = |part: u64| part as f64 / (fp8 + fp4) as f64;
    assert!((0.57..0.63).contains(&share(fp8)), "{}", share(fp8));
    assert!((plain as f64) < 0.08 * active as f64, "{plain} of {active}");
}

/// However few layers, every kind is there, and the layers are the released ones.
#[test]
fn flash_layers_have_every_kind() {
    for layers in [6, 7, 8, 24] {
        let plan = plan(Preset::FlashLayers(layers));
        let text = &plan.config.text_config;
        assert_eq!(text.num_hidden_layers, layers);
        let start = text.decoder_start().unwrap();
        assert!(text.compress_ratios[0] == 0 && text.compress_ratios[start - 1] == 2);
        assert!(text.is_kv_source(start) && text.kv_source_layer_ids.len() >= 2);
        let reuses = |layer: &usize| !text.is_index_source(*layer);
        assert!((start..layers).any(|layer| reuses(&layer)));
        assert!((start..layers).any(|layer| text.uses_candidates(layer)));
        assert_eq!(text.engram_layer_ids.len(), 2);
        let expert = plan.specs.iter().find(|s| s.name == "layers.3.ffn.experts.383.w2.weight");
        assert_eq!(expert.unwrap().shape, [5120, 2304]);
    }
    for layers in [0, 5, 41] {
        match synth::plan(&Options::new(Preset::FlashLayers(layers))) {
            Err(SynthError::Layers { found }) => assert_eq!(found, layers),
            other => panic!("{:?}", other.err()),
        }
    }
    let rows = Options { engram_rows: Some(1_000_000), ..Options::new(Preset::FlashLayers(6)) };
    for rows in synth::plan(&rows).unwrap().config.text_config.engram_num_embeddings {
        assert!((990_000..1_100_000).contains(&rows), "{rows}");
    }
}

#[test]
fn presets_have_names() {
    assert_eq!("tiny".parse::<Preset>().unwrap(), Preset::Tiny);
    assert_eq!("bench".parse::<Preset>().unwrap(), Preset::Bench);
    assert_eq!("flash-layers:7".parse::<Preset>().unwrap(), Preset::FlashLayers(7));
    for name in ["", "flash-layers", "flash-layers:", "flash-layers:x", "tiny:3", "Bench"] {
        match name.parse::<Preset>() {
            Err(SynthError::Preset { found }) => assert_eq!(found, name),
            other => panic!("{other:?}"),
        }
    }
}
