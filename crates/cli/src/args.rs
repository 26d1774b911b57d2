//! The command line.

mod bench;

pub use bench::{Bench, BenchCommand, BenchLayer, BenchOps, BenchPlot};

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use deepinfer::cache::CacheFormat;
use deepinfer::chat::Effort;
use deepinfer_device::DeviceChoice;
use deepinfer_device::cpu::MOST_THREADS;
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// Runs DeepSeek-V4.1 models.
#[derive(Debug, Parser)]
#[command(name = "deepinfer", version, max_term_width = 100, arg_required_else_help = true)]
#[command(
    after_help = "Exit codes: 0 done; 1 a check or a run failed; 2 the command line is wrong: an option, \
                  its value, a file that it names, or the prompt."
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Continue a prompt
    Generate(Box<Generate>),
    /// Talk to a model in the terminal
    Chat(Chat),
    /// Show what is in a checkpoint: parts, layers, bytes, cache bytes a token
    Inspect(Inspect),
    /// Compare a model with reference numbers; exit code 1 if they differ
    Verify(Verify),
    /// Write a random checkpoint in the released layout
    Synth(Synth),
    /// Measure prefill and decode, or single operations, against what the machine can do
    Bench(Bench),
    /// Show what a model needs of a machine, and what fits
    Plan(Plan),
    /// Serve the model over HTTP: OpenAI's and Anthropic's protocols
    Serve(Box<crate::serve::ServeArgs>),
    /// Serve a file of requests in OpenAI's batch format
    Batch(Batch),
    /// Run the demo model's tasks and count right answers
    Eval(Eval),
    /// Test a device: operations of every kind against plain CPU code; exit code 1 if one is wrong
    Selftest(Selftest),
    /// Print a completion script for a shell
    Completions {
        /// Shell to write for
        shell: Shell,
    },
    /// Write man pages
    Man {
        /// Folder to write to; it is made if it is not there
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
}

/// Which checkpoint.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// Folder of the checkpoint; without it, the demo model inside this program
    #[arg(long, short, value_name = "DIR")]
    pub model: Option<PathBuf>,
}

/// How it runs.
#[derive(Debug, Args)]
#[command(next_help_heading = "Running")]
pub struct RunArgs {
    /// What to run on: auto (a GPU if there is one), cpu or cuda:N
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,
    /// Threads; without it, one for each processor
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<NonZeroUsize>,
    /// How caches are stored
    #[arg(long, value_enum, default_value_t = Kv::Released)]
    pub kv: Kv,
}

/// Stored form of the caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kv {
    /// fp8 windows, nvfp4 compressed rows, mxfp4 index keys
    Released,
    /// As computed, for comparisons
    Exact,
}

impl From<Kv> for CacheFormat {
    fn from(kv: Kv) -> Self {
        match kv {
            Kv::Released => CacheFormat::Released,
            Kv::Exact => CacheFormat::Exact,
        }
    }
}

/// How tokens are chosen.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Most tokens to produce [default: 256 in generate, as many as fit in chat]
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<NonZeroUsize>,
    /// Divides the logits; 0 takes the most probable token each time
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true)]
    pub temperature: f32,
    /// Keep the most probable tokens up to this mass
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true)]
    pub top_p: f32,
    /// Keep this many tokens; 0 or -1 keeps all
    #[arg(long, value_name = "K", default_value_t = 0, allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..=i64::from(u32::MAX)))]
    pub top_k: i64,
    /// Keep tokens at least this probable relative to the best one
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    pub min_p: f32,
    /// Divide positive and multiply negative logits of tokens seen before
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_negative_numbers = true)]
    pub repetition_penalty: f32,
    /// Subtract this from tokens that the output holds
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub presence_penalty: f32,
    /// Subtract this for each occurrence in the output
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub frequency_penalty: f32,
    /// Key of the random choices: the same seed gives the same tokens
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Stop before this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Stop at these tokens
    #[arg(long, value_name = "ID,...", value_delimiter = ',')]
    pub stop_token_ids: Vec<u32>,
    /// Go on after the model's end of text
    #[arg(long)]
    pub ignore_eos: bool,
    /// Neither stop nor end for this many tokens
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub min_tokens: usize,
    /// Word that is never completed, with or without a space before it; may be given several times
    #[arg(long, value_name = "WORD")]
    pub bad_words: Vec<String>,
    /// Produce no other tokens
    #[arg(long, value_name = "ID,...", value_delimiter = ',')]
    pub allowed_token_ids: Vec<u32>,
    /// Add X to the logit of a token; may be given several times
    #[arg(long, value_name = "ID=X", value_parser = bias)]
    pub logit_bias: Vec<(u32, f32)>,
}

/// A token and what is added to its logit.
fn bias(text: &str) -> Result<(u32, f32), String> {
    let expected = || format!("{text:?} is not ID=X, a token id and a number");
    let (token, bias) = text.split_once('=').ok_or_else(expected)?;
    Ok((token.parse().map_err(|_| expected())?, bias.parse().map_err(|_| expected())?))
}

/// A number of threads that a CPU can be given.
fn threads(text: &str) -> Result<NonZeroUsize, String> {
    let number = text.parse::<NonZeroUsize>().map_err(|error| error.to_string())?;
    match number.get() <= MOST_THREADS {
        true => Ok(number),
        false => Err(format!("at most {MOST_THREADS} are of use")),
    }
}

/// How tokens are drafted.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Drafting")]
pub struct DraftArgs {
    /// Tokens drafted ahead: off, a number, or auto (as far as it pays off); changes speed only
    #[arg(long, value_name = "N", default_value = "auto")]
    pub draft: String,
    /// How drafts are accepted: shared (the same tokens as without drafts) or rejection (the same
    /// distribution)
    #[arg(long, value_name = "SCHEME", default_value = "shared")]
    pub draft_scheme: String,
}

/// Settings of the engine.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Most rows in a step [default: 1024]
    #[arg(long, value_name = "N")]
    pub max_batch_tokens: Option<NonZeroUsize>,
    /// Most requests that run at a time [default: 16]
    #[arg(long, value_name = "N")]
    pub max_seqs: Option<NonZeroUsize>,
    /// Most rows of one prompt in a step [default: 512]
    #[arg(long, value_name = "N")]
    pub prefill_chunk: Option<NonZeroUsize>,
    /// Tokens that the cache pool holds; without it, 65536, or what a GPU's free memory holds
    #[arg(long, value_name = "N")]
    pub kv_tokens: Option<NonZeroUsize>,
    /// Where prefixes of earlier requests are kept: off, device, host, disk:DIR [default: device]
    #[arg(long, value_name = "WHERE")]
    pub prefix_cache: Option<String>,
    /// Host memory for them, with host and disk:DIR [default: 1GiB]
    #[arg(long, value_name = "SIZE")]
    pub host_cache: Option<String>,
    /// Most bytes of files in the folder, with disk:DIR [default: 16GiB]
    #[arg(long, value_name = "SIZE")]
    pub disk_cache: Option<String>,
    /// How prompts go through the decoder layers: off, exact, compact, mask [default: exact]
    #[arg(long, value_name = "MODE")]
    pub prefill: Option<String>,
    #[command(flatten)]
    pub draft: DraftArgs,
    /// Plan the next step while one runs: on, off [default: on]
    #[arg(long, value_enum, value_name = "on|off", help_heading = "Engine")]
    pub overlap: Option<Switch>,
    /// Launch steps that only decode as CUDA graphs, on a GPU: on, off [default: on]
    #[arg(long, value_enum, value_name = "on|off", help_heading = "Engine")]
    pub graphs: Option<Switch>,
}

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    On,
    Off,
}

#[derive(Debug, Args)]
pub struct Generate {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Text to continue
    #[arg(long, short, value_name = "TEXT", group = "input")]
    pub prompt: Option<String>,
    /// File with the text to continue; - reads standard input
    #[arg(long, value_name = "FILE", group = "input")]
    pub prompt_file: Option<PathBuf>,
    /// Token ids to continue, as they are
    #[arg(long, value_name = "ID,...", value_delimiter = ',', num_args = 1.., group = "input")]
    pub token_ids: Option<Vec<u32>>,
    /// Take the prompt as a user's message, in the chat format
    #[arg(long)]
    pub chat: bool,
    #[arg(long, value_name = "EFFORT", default_value_t = Effort::NONE, requires = "chat", help = format!("How thoroughly to think before the answer, with --chat: {}", Effort::EXPECTED))]
    pub effort: Effort,
    /// System message, with --chat
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub form: FormArgs,
    /// Continuations of the prompt, from 1 to 64
    #[arg(short, long, value_name = "N", default_value_t = 1, help_heading = "Sampling", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub n: u16,
    /// Most tokens of thinking before it is ended, with --chat and --effort
    #[arg(long, value_name = "N", requires = "chat", help_heading = "Sampling")]
    pub thinking_budget: Option<usize>,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub run: RunArgs,
    /// Print one JSON object at the end instead of the text; with --n, a list of them
    #[arg(long, help_heading = "Output")]
    pub json: bool,
    /// Report the log-probability of each token, and of this many alternatives
    #[arg(long, value_name = "N", requires = "json", help_heading = "Output")]
    pub logprobs: Option<usize>,
    /// The same for the tokens of the prompt but the first
    #[arg(long, value_name = "N", requires = "json", help_heading = "Output")]
    pub prompt_logprobs: Option<usize>,
}

/// The form that the answer must have. With thinking, it holds after it.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Form of the answer")]
pub struct FormArgs {
    /// A JSON document that follows the schema in this file
    #[arg(long, value_name = "FILE", group = "form")]
    pub json_schema: Option<PathBuf>,
    /// Any JSON object
    #[arg(long, group = "form")]
    pub json_object: bool,
    /// Text that matches this expression as a whole
    #[arg(long, value_name = "EXPRESSION", group = "form")]
    pub regex: Option<String>,
    /// Text that the Lark grammar in this file allows
    #[arg(long, value_name = "FILE", group = "form")]
    pub grammar: Option<PathBuf>,
    /// One of these texts
    #[arg(long, value_name = "A,B,...", value_delimiter = ',', group = "form")]
    pub choice: Option<Vec<String>>,
}

#[derive(Debug, Args)]
pub struct Chat {
    #[command(flatten)]
    pub model: ModelArgs,
    /// System message
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    #[arg(long, value_name = "EFFORT", default_value_t = Effort::NONE, help = format!("How thoroughly to think before an answer: {}", Effort::EXPECTED))]
    pub effort: Effort,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub run: RunArgs,
}

#[derive(Debug, Args)]
pub struct Inspect {
    #[command(flatten)]
    pub model: ModelArgs,
    /// List every tensor
    #[arg(long)]
    pub tensors: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Selftest {
    /// What to test: auto (a GPU if there is one), cpu or cuda:N
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,
    /// Small shapes only: seconds
    #[arg(long)]
    pub quick: bool,
    /// Start of the random inputs; without it, the clock
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Threads of a CPU; without it, one for each processor
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<NonZeroUsize>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Verify {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Folder with reference.json and reference.safetensors
    #[arg(long, value_name = "DIR")]
    pub reference: PathBuf,
    /// Which caches to compare
    #[arg(long, value_enum, default_value_t = KvChoice::Both)]
    pub kv: KvChoice,
    /// Start every layer from the reference's values
    #[arg(long)]
    pub forced: bool,
    /// What to run on: cpu, cuda:N or auto (a GPU if there is one)
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Cpu)]
    pub device: DeviceChoice,
    /// Threads; without it, one for each processor
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<NonZeroUsize>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Which caches a comparison runs with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvChoice {
    /// Rounded as released
    Released,
    /// As computed
    Exact,
    /// One after the other
    Both,
}

#[derive(Debug, Args)]
pub struct Synth {
    /// Folder to write to; it is made, and must not hold a checkpoint
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Sizes: tiny, bench (at least 4 GB), flash-layers:N (released widths, N >= 6 layers)
    #[arg(long, default_value = "tiny")]
    pub preset: String,
    /// Key of the random numbers
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Rows of each n-gram table
    #[arg(long, value_name = "R")]
    pub engram_rows: Option<u64>,
    /// Longest sequence
    #[arg(long, value_name = "P")]
    pub positions: Option<usize>,
}

#[derive(Debug, Args)]
pub struct Plan {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Memory of the machine, or of the GPU if the device is one, such as 64GB or 512MiB; without
    /// it, what this machine or its GPU has available
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<String>,
    /// What the model would run on: cpu, cuda:N or auto
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,
    /// Sequences that should fit
    #[arg(long, value_name = "N")]
    pub max_seqs: Option<usize>,
    /// Tokens that should fit, over all sequences
    #[arg(long, value_name = "N")]
    pub kv_tokens: Option<usize>,
    /// Most rows in a step
    #[arg(long, value_name = "N")]
    pub max_batch_tokens: Option<usize>,
    /// How caches are stored
    #[arg(long, value_enum, default_value_t = Kv::Released)]
    pub kv: Kv,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Batch {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Requests, one JSON object a line
    pub input: PathBuf,
    /// Answers, one JSON object a line; ids that are answered already are not run again, those that
    /// failed are
    pub output: PathBuf,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub run: RunArgs,
}

#[derive(Debug, Args)]
pub struct Eval {
    #[command(flatten)]
    pub model: ModelArgs,
    /// How much to run
    #[arg(long, value_enum, default_value_t = Suite::Quick)]
    pub suite: Suite,
    /// Run the first N prompts of every task instead, or all where it has fewer
    #[arg(long, value_name = "N", conflicts_with = "suite")]
    pub count: Option<NonZeroUsize>,
    /// Run these tasks alone
    #[arg(long, value_name = "TASK", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Folder with the tasks; without it, those inside this program
    #[arg(long, value_name = "DIR")]
    pub tasks: Option<PathBuf>,
    /// How prompts are read: off, exact, compact or mask
    #[arg(long, value_name = "MODE")]
    pub prefill: Option<String>,
    /// Prompt tokens that the decoder runs for, with --prefill compact or mask
    #[arg(long, value_name = "N")]
    pub keep_tokens: Option<NonZeroUsize>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub run: RunArgs,
}

/// How much of the tasks to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Suite {
    /// Under a minute
    Quick,
    /// Everything
    Full,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn options_stand_under_their_own_headings() {
        let cli = Cli::command();
        let heading = |command: &str, option: &str| {
            let command = cli.find_subcommand(command).expect("a command");
            let argument = command.get_arguments().find(|a| a.get_id() == option);
            argument.unwrap_or_else(|| panic!("{option}")).get_help_heading()
        };
        for (command, options, wanted) in [
            ("generate", &["model", "prompt", "chat", "system"][..], None),
            ("generate", &["max_tokens", "logit_bias", "n", "thinking_budget"], Some("Sampling")),
            ("generate", &["json_schema", "choice"], Some("Form of the answer")),
            ("generate", &["draft", "draft_scheme"], Some("Drafting")),
            ("generate", &["device", "threads", "kv"], Some("Running")),
            ("generate", &["json", "logprobs", "prompt_logprobs"], Some("Output")),
            ("chat", &["device"], Some("Running")),
            ("batch", &["max_seqs", "overlap", "graphs"], Some("Engine")),
            ("batch", &["draft"], Some("Drafting")),
            ("batch", &["device"], Some("Running")),
            ("serve", &["host", "log", "tls_key"], None),
            ("serve", &["prefill", "overlap", "graphs"], Some("Engine")),
            ("serve", &["kv"], Some("Running")),
            ("eval", &["json", "keep_tokens"], None),
            ("eval", &["kv"], Some("Running")),
            ("bench", &["threads", "kv", "json"], None),
        ] {
            for option in options {
                assert_eq!(heading(command, option), wanted, "{command} --{option}");
            }
        }
    }

    #[test]
    fn only_one_form_may_be_given() {
        let two = ["deepinfer", "generate", "-p", "a", "--regex", "x", "--choice", "a,b"];
        assert!(Cli::try_parse_from(two).is_err());
        let none = ["deepinfer", "generate", "-p", "a", "--n", "0"];
        assert!(Cli::try_parse_from(none).is_err());
    }

    #[test]
    fn only_one_prompt_may_be_given() {
        let two = ["deepinfer", "generate", "--prompt", "a", "--token-ids", "1,2"];
        assert!(Cli::try_parse_from(two).is_err());
        let one = Cli::try_parse_from(["deepinfer", "generate", "--token-ids", "1,2"]);
        match one.map(|cli| cli.command) {
            Ok(Command::Generate(args)) => assert_eq!(args.token_ids, Some(vec![1, 2])),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_comparisons_mean_the_cpu_without_being_told() {
        let device = |args: &[&str]| match Cli::parse_from(args).command {
            Command::Verify(args) => args.device,
            Command::Plan(args) => args.device,
            Command::Selftest(args) => args.device,
            other => panic!("{other:?}"),
        };
        assert_eq!(device(&["deepinfer", "verify", "--reference", "x"]), DeviceChoice::Cpu);
        assert_eq!(device(&["deepinfer", "plan"]), DeviceChoice::Auto);
        assert_eq!(device(&["deepinfer", "selftest"]), DeviceChoice::Auto);
    }
}
