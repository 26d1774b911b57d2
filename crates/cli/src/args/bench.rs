//! `deepinfer bench`, and what it measures besides the whole model.

use super::{Kv, ModelArgs, threads};
use crate::bench::Slice;
use clap::{Args, Subcommand};
use deepinfer_device::DeviceChoice;
use std::num::NonZeroUsize;
use std::path::PathBuf;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Bench {
    #[command(subcommand)]
    pub what: Option<BenchCommand>,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub prompt_tokens: usize,
    /// Tokens to decode after it
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub new_tokens: usize,
    /// Sequences that decode side by side
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub batch: usize,
    /// Pairs of measurement and limit, interleaved; medians are reported
    #[arg(long, value_name = "N", default_value_t = 7)]
    pub repeats: usize,
    /// Threads of the CPU, which is what is measured; without it, one for each processor
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<NonZeroUsize>,
    /// How caches are stored
    #[arg(long, value_enum, default_value_t = Kv::Released)]
    pub kv: Kv,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// What to measure instead of the whole model.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Measure operations of a device at the released model's shapes, against what it can do
    Ops(BenchOps),
    /// Draw the JSON reports of bench ops as bars
    Plot(BenchPlot),
    /// Measure layers at the released sizes, with random weights made on the device
    Layer(BenchLayer),
}

#[derive(Debug, Args)]
pub struct BenchLayer {
    /// What to measure: auto (a GPU if there is one), cpu (a small shape) or cuda:N
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,
    /// Layers, run one after the other: from 6, one of each kind, to 40, or max, as many as fit
    #[arg(long, value_name = "N|max")]
    pub slice: Option<Slice>,
    /// About how many rows each n-gram table has
    #[arg(long, value_name = "R")]
    pub engram_rows: Option<u64>,
    /// Sequences of decode steps and drafts
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    pub rows: Vec<usize>,
    /// Rows of prompts; 0 for none
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    pub prefill: Vec<usize>,
    /// Positions of a sequence
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    pub context: Vec<usize>,
    /// Most rows of a prompt in a step
    #[arg(long, value_name = "N", default_value = "16384")]
    pub chunk: NonZeroUsize,
    /// Print the time of each operation too; --json always has it
    #[arg(long)]
    pub operations: bool,
    /// Key of the random numbers
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Threads of a CPU; without it, one for each processor
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<NonZeroUsize>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct BenchOps {
    /// What to measure: auto (a GPU if there is one), cpu or cuda:N
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,
    /// Only operations whose name and shape contain this
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
    /// One or two shapes of each operation: seconds
    #[arg(long)]
    pub quick: bool,
    /// Threads of a CPU; without it, one for each processor
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<NonZeroUsize>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct BenchPlot {
    /// Outputs of bench ops --json, drawn side by side
    #[arg(value_name = "FILE.json", required = true)]
    pub files: Vec<PathBuf>,
    /// The picture to write; one that is there is replaced
    #[arg(long, value_name = "FILE.svg")]
    pub out: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::super::{Cli, Command};
    use super::*;
    use clap::Parser;

    #[test]
    fn bench_measures_the_model_or_what_is_named() {
        let what =
            |args: &[&str]| match Cli::try_parse_from([&["deepinfer", "bench"], args].concat()) {
                Ok(Cli { command: Command::Bench(bench) }) => Ok((bench.batch, bench.what)),
                Ok(other) => panic!("{other:?}"),
                Err(error) => Err(error),
            };
        assert!(matches!(what(&["--batch", "3"]), Ok((3, None))));
        let ops = what(&["ops", "--device", "cuda:1", "--only", "linear", "--quick"]);
        assert!(matches!(ops, Ok((1, Some(BenchCommand::Ops(BenchOps { quick: true, .. }))))));
        let plot = what(&["plot", "a.json", "b.json", "--out", "c.svg"]);
        assert!(matches!(plot, Ok((1, Some(BenchCommand::Plot(plot)))) if plot.files.len() == 2));
        for wrong in [
            &["--batch", "3", "ops"][..],
            &["--device", "cpu"],
            &["ops", "--batch", "3"],
            &["ops", "--threads", "0"],
            &["ops", "--device", "gpu"],
            &["ops", "linear"],
            &["plot", "a.json"],
            &["plot", "--out", "c.svg"],
        ] {
            assert!(what(wrong).is_err(), "{wrong:?}");
        }
    }
}
