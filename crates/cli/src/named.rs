//! Errors of the engine in the words of the command line.

use crate::failure::Failure;
use deepinfer::engine::EngineError;
use deepinfer::grammar::CompileError;
use deepinfer::request::RequestError;

/// What a command lets its user set, of what an engine is made from.
pub struct Knobs {
    /// Settings that are options, by the engine's names.
    pub settings: &'static [&'static str],
    /// What would take less memory.
    pub advice: &'static str,
}

/// Of commands whose memory is given.
const FIXED: &str = "free some memory, or choose another --device";

/// `generate`: room is made for its own requests.
pub const GENERATE: Knobs = Knobs {
    settings: &["draft"],
    advice: "lower --max-tokens or --n, give a shorter prompt, or choose another --device",
};
/// `chat`.
pub const CHAT: Knobs = Knobs { settings: &["draft"], advice: FIXED };
/// `eval`.
pub const EVAL: Knobs = Knobs { settings: &["keep_tokens"], advice: FIXED };
/// `serve` and `batch`.
pub const ENGINE: Knobs =
    Knobs { settings: &["kv_tokens", "max_seqs", "max_batch_tokens", "draft"], ..PLAN };
/// `plan`.
pub const PLAN: Knobs = Knobs {
    settings: &["kv_tokens", "max_seqs", "max_batch_tokens"],
    advice: "lower --kv-tokens, --max-seqs or --max-batch-tokens",
};

/// The option that says what the engine calls `name`.
fn option(name: &str) -> String {
    match name {
        "stop_tokens" => "--stop-token-ids".into(),
        "allowed_tokens" => "--allowed-token-ids".into(),
        // Which comes as text, or as ids.
        "prompt" => name.into(),
        name => format!("--{}", name.replace('_', "-")),
    }
}

/// A message that begins with the engine's name for something, with the option's instead.
fn renamed(message: &str, name: &str) -> String {
    match message.strip_prefix(name) {
        Some(rest) => format!("{}{rest}", option(name)),
        None => message.to_owned(),
    }
}

/// A setting that cannot be. What the command has no option for keeps the engine's name.
pub fn setting(error: &EngineError, knobs: &Knobs) -> Failure {
    let message = error.to_string();
    Failure::Usage(match error {
        // Read from an option's text.
        EngineError::Setting { name, .. } => renamed(&message, name),
        EngineError::DraftLength { .. } | EngineError::TooFewPositions { .. }
            if knobs.settings.contains(&"draft") =>
        {
            format!("--draft: {message}")
        }
        error => match error.setting().filter(|name| knobs.settings.contains(name)) {
            Some(name) => renamed(&message, name),
            None => message,
        },
    })
}

/// A request that was refused, or failed: it asks for what cannot be, or something went wrong.
pub fn request(error: RequestError) -> Failure {
    match &error {
        RequestError::UnknownToken { field, .. }
        | RequestError::OutOfRange { field, .. }
        | RequestError::Unsupported { field, .. } => {
            Failure::Usage(renamed(&error.to_string(), field))
        }
        RequestError::EmptyPrompt
        | RequestError::PromptTooLong { .. }
        | RequestError::TextTooLong { .. }
        | RequestError::TooManyTokens { .. }
        | RequestError::Encoding { .. } => Failure::Usage(error.to_string()),
        RequestError::Grammar(cause)
            if !matches!(cause, CompileError::Busy { .. } | CompileError::Fault { .. }) =>
        {
            Failure::Usage(error.to_string())
        }
        _ => Failure::from(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::CommandFactory;

    fn usage(failure: Failure) -> String {
        match failure {
            Failure::Usage(message) => message,
            other => panic!("{other:?}"),
        }
    }

    /// Nobody is told of an option that the command does not have.
    #[test]
    fn advice_fits_the_command() {
        let cli = Cli::command();
        for (command, knobs) in [
            ("generate", GENERATE),
            ("chat", CHAT),
            ("eval", EVAL),
            ("serve", ENGINE),
            ("batch", ENGINE),
            ("plan", PLAN),
        ] {
            let found = cli.find_subcommand(command).expect("a command");
            let mut longs = found.get_arguments().filter_map(|argument| argument.get_long());
            let longs: Vec<String> = longs.by_ref().map(|long| format!("--{long}")).collect();
            let words = knobs.advice.split([' ', ',']).filter(|word| word.starts_with("--"));
            let named = words.map(str::to_owned).chain(knobs.settings.iter().map(|n| option(n)));
            let named: Vec<String> = named.collect();
            assert!(!named.is_empty());
            for option in named {
                assert!(longs.contains(&option), "{command} {option}");
            }
        }
    }

    #[test]
    fn settings_have_the_names_of_options_where_there_are_some() {
        let error = EngineError::TooLarge { name: "kv_tokens", value: 9, most: 8 };
        assert_eq!(usage(setting(&error, &ENGINE)), "--kv-tokens is 9; it must be at most 8");
        assert_eq!(usage(setting(&error, &EVAL)), "kv_tokens is 9; it must be at most 8");
        let error = EngineError::DraftLength { wanted: 9, block: 5 };
        assert!(usage(setting(&error, &CHAT)).starts_with("--draft: cannot draft 9 tokens"));
        assert!(usage(setting(&error, &EVAL)).starts_with("cannot draft 9 tokens"));
    }

    #[test]
    fn requests_have_the_names_of_options() {
        let error = RequestError::UnknownToken { field: "stop_tokens", token: 9, vocab: 8 };
        assert!(usage(request(error)).starts_with("--stop-token-ids holds token id 9"));
        let refused = RequestError::Grammar(CompileError::BadRegex { reason: "no".into() });
        assert!(usage(request(refused)).contains("regular expression: no"));
        let stopped = RequestError::Stopped { reason: "the device has gone".into() };
        assert!(matches!(request(stopped), Failure::Error(_)));
        let busy = RequestError::Grammar(CompileError::Busy { waiting: 1 });
        assert!(matches!(request(busy), Failure::Error(_)));
    }
}
