//! The server as a process: signals, exit codes, a failing self-test.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Most time that anything here may take.
const LIMIT: Duration = Duration::from_secs(60);

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tiny-a")
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deepinfer"));
    command.args(["serve", "--port", "0", "--log", "off"]).args(args);
    command.env_remove("OTEL_EXPORTER_OTLP_ENDPOINT");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// How a process ends; one that does not is killed.
fn end(child: &mut Child) -> ExitStatus {
    let begin = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("it can be waited for") {
            return status;
        }
        if begin.elapsed() > LIMIT {
            let _ = child.kill();
            let _ = child.wait();
            panic!("it does not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// What a command prints that ends by itself; less than a pipe holds.
fn output(command: &mut Command) -> Output {
    let mut child = command.spawn().expect("the program starts");
    end(&mut child);
    child.wait_with_output().expect("its output")
}

/// The first line of a server's output, if it comes.
fn first_line(output: impl Read + Send + 'static) -> Option<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        if BufReader::new(output).read_line(&mut line).is_ok() {
            let _ = sender.send(line);
        }
    });
    receiver.recv_timeout(LIMIT).ok()
}

/// Killed with the test.
struct Server {
    child: Child,
    address: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start() -> Self {
        let model = tiny().display().to_string();
        let child = command(&["--model", &model, "--served-model-name", "tiny"])
            .spawn()
            .expect("the program starts");
        let mut server = Self { address: String::new(), child };
        let line = first_line(server.child.stdout.take().expect("piped")).expect("a line");
        let (_, address) = line.trim().split_once(" on http://").expect("an address");
        server.address = address.to_owned();
        let begin = Instant::now();
        while !server.get("/ready").contains("\"ready\"") {
            assert!(begin.elapsed() < LIMIT, "it does not become ready");
            std::thread::sleep(Duration::from_millis(20));
        }
        server
    }

    fn send(&self, text: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("a connection");
        stream.set_read_timeout(Some(LIMIT)).expect("it has limits");
        stream.write_all(text.as_bytes()).expect("sent");
        stream
    }

    fn get(&self, path: &str) -> String {
        let head = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        read_all(self.send(&head))
    }

    /// A stream of so many tokens that has begun.
    fn stream(&self, tokens: usize) -> TcpStream {
        let body = format!(
            "{{\"model\": \"tiny\", \"stream\": true, \"max_tokens\": {tokens}, \"ignore_eos\": \
             true, \"prompt\": \"Hello\"}}"
        );
        let mut stream = self.send(&format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: \
             {}\r\n\r\n{body}",
            body.len()
        ));
        let mut text = String::new();
        let mut buffer = [0; 1024];
        while !text.contains("data:") {
            let n = stream.read(&mut buffer).expect("an answer");
            assert!(n > 0, "{text}");
            text.push_str(&String::from_utf8_lossy(&buffer[..n]));
        }
        stream
    }

    fn terminate(&self) {
        // The shell's own: a program of that name need not be there.
        let kill = format!("kill -TERM {}", self.child.id());
        let status = Command::new("sh").args(["-c", &kill]).status();
        assert!(status.expect("the shell starts").success());
    }

    fn exit_code(&mut self) -> Option<i32> {
        end(&mut self.child).code()
    }
}

fn read_all(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn a_signal_lets_requests_end_and_a_second_one_does_not() {
    let mut server = Server::start();
    let stream = server.stream(200);
    server.terminate();
    let rest = read_all(stream);
    assert!(rest.contains("\"length\"") && rest.contains("data: [DONE]"), "{rest}");
    assert_eq!(server.exit_code(), Some(0));

    let mut server = Server::start();
    let stream = server.stream(4000);
    server.terminate();
    // The first signal has been taken when no new connections are.
    let begin = Instant::now();
    while TcpStream::connect(&server.address).is_ok() {
        assert!(begin.elapsed() < Duration::from_secs(30), "it does not drain");
        std::thread::sleep(Duration::from_millis(10));
    }
    server.terminate();
    assert_eq!(server.exit_code(), Some(0));
    assert!(!read_all(stream).contains("[DONE]"));
}

#[test]
fn an_engine_that_fails_its_test_ends_the_process() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("test.json");
    std::fs::write(&file, "{\"prompt\": [1, 2, 3], \"tokens\": [0, 0, 0, 0]}").expect("written");
    let (model, file) = (tiny().display().to_string(), file.display().to_string());
    let output = output(&mut command(&["--model", &model, "--self-test", &file]));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("self-test") && error.contains("[0, 0, 0, 0]"), "{error}");
}

#[test]
fn settings_that_cannot_be_are_refused_at_once() {
    const HUGE: &str = "18446744073709551615";
    let missing = tiny().join("nowhere.pem").display().to_string();
    for (args, wanted) in [
        (&["--tls-cert", &missing, "--tls-key", &missing][..], "nowhere.pem"),
        (&["--tls-cert", &missing], "--tls-key"),
        (&["--otlp-endpoint", "https://x"], "http://HOST"),
        (&["--api-key-file", &missing], "nowhere.pem"),
        (&["--max-body", "0"], "--max-body"),
        (&["--max-queued-requests", "0"], "--max-queued-requests"),
        (&["--max-queued-tokens", "0"], "--max-queued-tokens"),
        (&["--read-timeout", "0"], "--read-timeout"),
        (&["--read-timeout", HUGE], "--read-timeout"),
        (&["--write-timeout", "0"], "--write-timeout"),
        (&["--write-timeout", HUGE], "--write-timeout"),
        (&["--max-wait", HUGE], "--max-wait"),
        (&["--stall-limit", HUGE], "--stall-limit"),
        (&["--drain-limit", HUGE], "--drain-limit"),
        (&["--served-model-name", ""], "--served-model-name"),
        (&["--default-effort", "much"], "--default-effort"),
    ] {
        let output = output(&mut command(args));
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {error}");
        assert!(error.contains(wanted), "{args:?}: {error}");
    }
}

#[test]
fn a_log_that_is_not_understood_is_refused() {
    let output = output(command(&[]).env("DEEPINFER_LOG", "verbose"));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("DEEPINFER_LOG is \"verbose\"") && error.contains("debug"), "{error}");
}
