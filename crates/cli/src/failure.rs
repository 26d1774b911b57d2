//! How a command ends when it does not succeed.

use std::process::ExitCode;

/// Why a command ended.
#[derive(Debug)]
pub enum Failure {
    /// The command line cannot be carried out as it is: an option, its value, the file that it
    /// names, the prompt. Exit code 2.
    Usage(String),
    /// Something went wrong: exit code 1.
    Error(anyhow::Error),
    /// A check failed and has said so on standard output: exit code 1.
    Check,
    /// Whoever read standard output has gone: nothing to say.
    Closed,
}

impl Failure {
    /// A value of `option`, or the file that it names, is wrong.
    pub fn option(option: &str, error: &anyhow::Error) -> Self {
        Failure::Usage(format!("{option}: {}", describe(error)))
    }

    /// Tells the user, and gives the exit code.
    pub fn report(self) -> ExitCode {
        match self {
            Failure::Usage(message) => {
                tell!("error: {message}");
                ExitCode::from(2)
            }
            Failure::Error(error) => {
                tell!("error: {}", describe(&error));
                ExitCode::FAILURE
            }
            Failure::Check => ExitCode::FAILURE,
            Failure::Closed => ExitCode::SUCCESS,
        }
    }
}

/// An error and its causes, but for those that are told already.
fn describe(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        let error = error.into();
        let broken_pipe = |cause: &(dyn std::error::Error + 'static)| {
            let io = cause.downcast_ref::<std::io::Error>();
            io.is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
        };
        if error.chain().any(broken_pipe) {
            return Failure::Closed;
        }
        Failure::Error(error)
    }
}

/// Result of a command.
pub type Outcome<T = ()> = Result<T, Failure>;

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn causes_are_told_once() {
        let inner = || Err::<(), _>(anyhow::anyhow!("no such file"));
        let twice = inner().context("cannot read x: no such file").unwrap_err();
        assert_eq!(describe(&twice), "cannot read x: no such file");
        let once = inner().context("cannot read x").unwrap_err();
        assert_eq!(describe(&once), "cannot read x: no such file");
    }
}
