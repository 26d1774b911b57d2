//! Models of random weights that are made in memory.

use deepinfer::cache::CacheFormat;
use deepinfer::checkpoint::{Checkpoint, Source};
use deepinfer::engram::Engram;
use deepinfer::model::{Model, NoProbe};
use deepinfer::plan::StepPlan;
use deepinfer::session::{GreedyDrafts, Session};
use deepinfer::synth::{self, Options, Preset};
use deepinfer::tokenizer::Tokenizer;
use deepinfer_device::Cpu;
use std::sync::Arc;

/// Logits of a prompt, and drafts behind it.
fn answers(model: Model<Cpu>, cpu: &Arc<Cpu>) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let vocab = model.config.text_config.vocab_size as u32;
    let model = Arc::new(model);
    let mut session =
        Session::new(cpu.clone(), model, CacheFormat::Released, 1, 256, 128).expect("memory");
    let tokens: Vec<u32> = (0..100).map(|i| i * 7919 % vocab).collect();
    let sequence = session.extend(0, &tokens, &[0, 50, 99]);
    let logits = session.run(&StepPlan { sequences: vec![sequence] }, &mut NoProbe).expect("runs");
    let bits = logits.iter().map(|row| row.iter().map(|x| x.to_bits()).collect()).collect();
    let (drafts, _) = session.draft(&[(0, 11)], 5, &mut GreedyDrafts).expect("runs");
    (bits, drafts)
}

#[test]
fn a_model_without_a_checkpoint_is_that_of_the_checkpoint() {
    let plan = synth::plan(&Options::new(Preset::Tiny)).expect("valid sizes");
    let cpu = Arc::new(Cpu::new(Some(2)).expect("threads start"));
    let tokenizer = Tokenizer::from_bytes(&plan.tokenizer_json).expect("it loads");
    let engram = || Engram::new(&plan.config.text_config, &tokenizer).expect("it fits");
    let mut parts = Vec::new();
    let made = |seed, parts: &mut Vec<(usize, usize)>| {
        Model::random(&*cpu, &plan, seed, engram(), &mut |done, all| parts.push((done, all)))
            .expect("memory")
    };
    let model = answers(made(7, &mut parts), &cpu);
    assert_eq!(parts.last().map(|(done, all)| done == all), Some(true));
    assert_ne!(model, answers(made(8, &mut parts), &cpu));

    let folder = tempfile::tempdir().expect("a folder");
    synth::write_plan(folder.path(), &plan, 7, &mut |_, _| {}).expect("it is written");
    let mut checkpoint = Checkpoint::open(Source::directory(folder.path())).expect("it opens");
    let read = Model::load(&*cpu, &mut checkpoint, engram(), &mut |_, _| {}).expect("it loads");
    assert!(model == answers(read, &cpu));
}
