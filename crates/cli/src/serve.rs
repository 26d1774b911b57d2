//! `deepinfer serve`.

use crate::args::{EngineArgs, ModelArgs, RunArgs};
use crate::failure::{Failure, Outcome};
use crate::{engine, files, named, selftest};
use anyhow::Context;
use clap::builder::{NonEmptyStringValueParser, RangedU64ValueParser};
use clap::{Args, ValueEnum};
use deepinfer::chat::{self, ChatTemplate, Conversation, Effort};
use deepinfer::tokenizer::Tokenizer;
use deepinfer_server::{App, Config, Inference, Key, Live, SelfTest, Tls, Traces, serve};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tracing_subscriber::EnvFilter;

/// Longest time that can be set, in seconds: longer ones could overflow clocks.
const YEAR: u64 = 366 * 24 * 3600;

/// Arguments of `serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    pub host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Name that requests call the model by; may be given several times
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    pub served_model_name: Vec<String>,
    /// File of API keys, one a line: KEY [name=NAME] [concurrency=N] [tokens_per_minute=N]
    /// [queue_share=PART]
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    #[arg(long, value_name = "EFFORT", default_value = "high", help = format!("Thinking of chat requests that do not say: {}", Effort::EXPECTED))]
    pub default_effort: Effort,
    /// Largest body, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 32 << 20, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub max_body: usize,
    /// Longest time for a request to arrive, in seconds
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=YEAR))]
    pub read_timeout: u64,
    /// Longest time that a client reads nothing of what is sent to it, in seconds; then its request
    /// ends
    #[arg(long, value_name = "S", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=YEAR))]
    pub write_timeout: u64,
    /// Most requests that wait; more get 429
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub max_queued_requests: usize,
    /// Most prompt tokens that wait; more get 429
    #[arg(long, value_name = "N", default_value_t = 16 << 20, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub max_queued_tokens: usize,
    /// Longest time that a request waits, in seconds, before it gets 429; 0: for ever
    #[arg(long, value_name = "S", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=YEAR))]
    pub max_wait: u64,
    /// Longest time in which no step of the engine ends or gets on before it counts as dead, in
    /// seconds; 0: for ever
    #[arg(long, value_name = "S", default_value_t = 25, value_parser = clap::value_parser!(u64).range(..=YEAR))]
    pub stall_limit: u64,
    /// Longest time for running requests to end after the first signal, in seconds; 0: they
    /// are given up at once
    #[arg(long, value_name = "S", default_value_t = 60, value_parser = clap::value_parser!(u64).range(..=YEAR))]
    pub drain_limit: u64,
    /// JSON file with a known answer that makes the server ready: {"prompt": [ids], "tokens": [ids]}
    #[arg(long, value_name = "FILE")]
    pub self_test: Option<PathBuf>,
    /// Certificate chain in PEM form; connections are encrypted
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of the certificate, in PEM form
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// OpenTelemetry collector that takes traces, as http://HOST:PORT
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<String>,
    /// Form of the log on standard error
    #[arg(long, value_enum, default_value_t = LogForm::Text)]
    pub log: LogForm,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub run: RunArgs,
}

/// Form of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogForm {
    /// Lines of text
    Text,
    /// One JSON object a line
    Json,
    /// Nothing
    Off,
}

/// Serves until a signal.
pub fn run(args: &ServeArgs) -> Outcome {
    start_log(args.log)?;
    let mut config = server_config(args)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let traces = args.otlp_endpoint.as_ref().filter(|endpoint| !endpoint.is_empty());
    config.traces = traces
        .map(|endpoint| Traces::to(endpoint, runtime.handle().clone()))
        .transpose()
        .map_err(|error| Failure::Usage(format!("--otlp-endpoint: {error}")))?;
    let traces = config.traces.clone();
    let mut engine_config = engine::many(&args.engine, &args.run)?;
    engine_config.max_queued_requests = args.max_queued_requests;
    engine_config.max_queued_tokens = args.max_queued_tokens;
    engine_config.max_wait = Some(args.max_wait).filter(|&s| s > 0).map(Duration::from_secs);
    selftest::before_serving(args.run.device)?;
    let engine = engine::start(&args.model, &engine_config, &named::ENGINE)?;
    let fingerprint = format!("fp_{}", env!("CARGO_PKG_VERSION"));
    let inference: Arc<dyn Inference> = Arc::new(Live::new(engine, Some(fingerprint))?);
    if args.model.model.is_none() && config.self_test.is_none() {
        config.self_test = Some(demo_test(&inference.info().tokenizer)?);
    }
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    let app = App::new(config, inference);
    let result = runtime.block_on(async {
        let address = (args.host.as_str(), args.port);
        let listener = tokio::net::TcpListener::bind(address)
            .await
            .with_context(|| format!("cannot listen on {}:{}", args.host, args.port))?;
        let address = listener.local_addr()?;
        // Whoever started this reads the address here.
        let names = app.config.model_names.join(", ");
        match writeln!(std::io::stdout(), "serving {names} on {scheme}://{address}") {
            // Clients may know the address without it.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
            told => told.context("cannot tell the address")?,
        }
        serve(app.clone(), listener).await.map_err(anyhow::Error::from)
    });
    if let Some(traces) = traces {
        traces.shutdown();
    }
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(result?)
}

/// What the demo model is known to answer.
fn demo_test(tokenizer: &Tokenizer) -> Outcome<SelfTest> {
    let template = ChatTemplate::new(tokenizer)?;
    let conversation =
        Conversation { messages: vec![chat::user("What is 23 + 58?")], ..Default::default() };
    let options = chat::Options { effort: Some(Effort::NONE) };
    let prompt = template.render(&conversation, &options)?;
    Ok(SelfTest { prompt, tokens: tokenizer.encode("81").map_err(anyhow::Error::from)? })
}

/// Levels of the log, from nothing to everything.
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

fn start_log(form: LogForm) -> Outcome {
    let wanted = std::env::var_os("DEEPINFER_LOG").unwrap_or_default();
    let filter = log_filter(&wanted.to_string_lossy()).map_err(Failure::Usage)?;
    let log = || tracing_subscriber::fmt().with_writer(std::io::stderr).with_env_filter(filter);
    // A log that is there already stays.
    let _ = match form {
        LogForm::Text => log().try_init(),
        LogForm::Json => log().json().flatten_event(true).try_init(),
        LogForm::Off => Ok(()),
    };
    Ok(())
}

/// What the log holds: a level, or `TARGET=LEVEL`, or several with commas between; `info` if nothing
/// is said.
fn log_filter(text: &str) -> Result<EnvFilter, String> {
    let text = if text.trim().is_empty() { "info" } else { text };
    // The filter takes a misspelt level for the name of a target.
    let has_level = |part: &str| {
        let level = part.rsplit_once('=').map_or(part, |(_, level)| level).trim();
        LEVELS.iter().any(|known| level.eq_ignore_ascii_case(known))
    };
    let filter = text.split(',').all(has_level).then(|| EnvFilter::try_new(text));
    match filter {
        Some(Ok(filter)) => Ok(filter),
        _ => Err(format!(
            "the environment variable DEEPINFER_LOG is {text:?}; it must be a level ({}), or \
             TARGET=LEVEL as in deepinfer_server=debug, or several of these with commas between",
            LEVELS.join(", ")
        )),
    }
}

fn server_config(args: &ServeArgs) -> Outcome<Config> {
    let usage = |message: String| Failure::Usage(message);
    let keys = match &args.api_key_file {
        Some(file) => Key::parse_file(&files::given(file, "--api-key-file")?)
            .map_err(|error| usage(format!("--api-key-file {}: {error}", file.display())))?,
        None => Vec::new(),
    };
    let self_test: Option<SelfTest> = match &args.self_test {
        Some(file) => Some(
            serde_json::from_str(&files::given(file, "--self-test")?)
                .map_err(|error| usage(format!("--self-test {}: {error}", file.display())))?,
        ),
        None => None,
    };
    let tls = match (&args.tls_cert, &args.tls_key) {
        (Some(cert), Some(key)) => Some(
            Tls::from_files(cert, key)
                .map_err(|error| usage(format!("--tls-cert, --tls-key: {error}")))?,
        ),
        _ => None,
    };
    let mut model_names = args.served_model_name.clone();
    if model_names.is_empty() {
        let folder = args.model.model.as_ref().and_then(|folder| folder.file_name());
        model_names.push(folder.map_or("demo".into(), |name| name.to_string_lossy().into_owned()));
    }
    Ok(Config {
        model_names,
        keys,
        default_effort: args.default_effort,
        max_body: args.max_body,
        read_timeout: Duration::from_secs(args.read_timeout),
        write_timeout: Duration::from_secs(args.write_timeout),
        stall_limit: Some(args.stall_limit).filter(|&s| s > 0).map(Duration::from_secs),
        drain_limit: Duration::from_secs(args.drain_limit),
        self_test,
        tls,
        ..Config::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_has_levels_by_target() {
        for (given, wanted) in
            [("", "info"), (" ", "info"), ("warn", "warn"), ("DEBUG", "debug"), ("off", "off")]
        {
            assert_eq!(log_filter(given).expect(given).to_string(), wanted);
        }
        let both = log_filter("warn,deepinfer_server=trace").expect("both").to_string();
        assert!(both.contains("warn") && both.contains("deepinfer_server=trace"), "{both}");
        for given in
            ["verbose", "info,loud", "deepinfer_server=loud", "=", "info,", "a=b=c", "\u{fffd}"]
        {
            let error = log_filter(given).expect_err(given);
            assert!(error.contains("DEEPINFER_LOG") && error.contains("warn, info"), "{error}");
        }
    }
}
