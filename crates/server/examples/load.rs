//! What the server adds to an engine's time, measured on this machine over loopback.
//!
//! ```sh
//! cargo run --release -p deepinfer-server --example load -- [parser|chat|completions|aborts] [SECONDS]
//! ```
//!
//! The engine is a metronome: it produces a token a beat for every request and notes when. The clients
//! run in the same process and share its cores. Without arguments everything runs.

use deepinfer::grammar::GrammarSpec;
use deepinfer::request::{
    Event, EventSink, FinishReason, Prompt, Request, RequestError, RequestHandle, RequestId, Token,
    Usage, event_queue,
};
use deepinfer::tokenizer::Tokenizer;
use deepinfer_server::{App, Config, Figures, Inference, Info, serve_until};
use deepseek_recipe::stream::{
    ChunkGenerator, InferenceChunk, InferenceFinishReason, OutputChunk, ParsingOptions,
    StreamProcessor, StreamTokenizer, ThinkingInitialStage,
};
use serde_json::json;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio_stream::StreamExt;

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let what = arguments.next().unwrap_or_else(|| "all".into());
    let seconds: u64 = arguments.next().map_or(Ok(60), |n| n.parse())?;
    let tokenizer = Arc::new(Tokenizer::from_bytes(std::fs::read(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../testdata/tiny-a/tokenizer.json"
    ))?)?);
    let wants = |name: &str| what == name || what == "all";
    if wants("parser") {
        parser(&tokenizer)?;
    }
    if wants("chat") {
        streams(&tokenizer, &Load { path: CHAT, streams: 256, rate: 40, seconds })?;
    }
    if wants("completions") {
        let seconds = seconds.min(20);
        streams(&tokenizer, &Load { path: COMPLETIONS, streams: 256, rate: 220, seconds })?;
    }
    if wants("aborts") {
        aborts(&tokenizer, 2000)?;
    }
    Ok(())
}

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

// The engine.

/// Produces the same token a beat for every request.
struct Metronome {
    info: Info,
    beat: Duration,
    start: Instant,
    next: AtomicU64,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    playing: Mutex<Vec<Playing>>,
    wake: Condvar,
    closed: AtomicBool,
    running: AtomicUsize,
}

struct Playing {
    sink: EventSink,
    due: Instant,
    left: usize,
    sent: usize,
    /// When each token was sent, in microseconds from the start.
    times: Arc<Times>,
}

type Times = Vec<AtomicU64>;

impl Metronome {
    /// The times of request `i`, whose seed is `i`, go to `times[i]`.
    fn start(tokenizer: &Arc<Tokenizer>, beat: Duration, times: Vec<Arc<Times>>) -> Arc<Self> {
        let shared = Arc::new(Shared::default());
        let id = tokenizer.encode("a").ok().and_then(|ids| ids.first().copied()).unwrap_or(0);
        let token = Token { id, logprobs: None };
        let start = Instant::now();
        let driver = shared.clone();
        std::thread::spawn(move || play(&driver, beat, &token, start));
        let info = Info {
            tokenizer: tokenizer.clone(),
            vocab: tokenizer.vocab_size(),
            max_tokens: 1 << 20,
            queue_limit: 1 << 20,
            fingerprint: None,
        };
        TIMES.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&times);
        Arc::new(Self { info, beat, start, next: AtomicU64::new(0), shared })
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_micros() as u64
    }
}

static TIMES: Mutex<Vec<Arc<Times>>> = Mutex::new(Vec::new());

fn play(shared: &Shared, beat: Duration, token: &Token, start: Instant) {
    let mut playing = shared.playing.lock().unwrap_or_else(PoisonError::into_inner);
    while !shared.closed.load(Relaxed) {
        let now = Instant::now();
        let mut next = now + Duration::from_millis(5);
        playing.retain_mut(|request| {
            let mut stays = !request.sink.abandoned();
            while stays && request.due <= now {
                if request.sent == 0 {
                    request.sink.send(Event::PromptRead { cached: 0, logprobs: Vec::new() });
                }
                if let Some(time) = request.times.get(request.sent) {
                    time.store(start.elapsed().as_micros() as u64, Relaxed);
                }
                request.sent += 1;
                let tokens = vec![token.clone()];
                request.sink.send(Event::Tokens { tokens, text: "a".into() });
                request.due += beat;
                if request.sent == request.left {
                    let (reason, usage) = (FinishReason::Length, Usage::default());
                    request.sink.send(Event::Finished { reason, usage });
                    stays = false;
                }
            }
            next = next.min(request.due);
            if !stays {
                shared.running.fetch_sub(1, Relaxed);
            }
            stays
        });
        let pause = next.saturating_duration_since(Instant::now());
        if !pause.is_zero() {
            let waited = shared.wake.wait_timeout(playing, pause);
            playing = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Inference for Metronome {
    fn submit(&self, request: Request) -> Result<RequestHandle, RequestError> {
        let Prompt::Tokens(_) = &request.prompt else {
            return Err(RequestError::EmptyPrompt);
        };
        let (sink, handle) = event_queue(RequestId(self.next.fetch_add(1, Relaxed)));
        sink.admitted();
        let index = request.params.seed.unwrap_or(u64::MAX) as usize;
        let times = TIMES.lock().unwrap_or_else(PoisonError::into_inner);
        let times = times.get(index).cloned().unwrap_or_default();
        let left = request.params.max_tokens.unwrap_or(16);
        let playing = Playing { sink, due: Instant::now() + self.beat, left, sent: 0, times };
        self.shared.running.fetch_add(1, Relaxed);
        self.shared.playing.lock().unwrap_or_else(PoisonError::into_inner).push(playing);
        self.shared.wake.notify_one();
        Ok(handle)
    }

    fn check_grammar(&self, _grammar: &GrammarSpec) -> Result<(), RequestError> {
        Ok(())
    }

    fn info(&self) -> &Info {
        &self.info
    }

    fn figures(&self) -> Figures {
        Figures { running: self.shared.running.load(Relaxed) as u64, ..Figures::default() }
    }

    fn beats(&self) -> u64 {
        0
    }

    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}

impl Drop for Metronome {
    fn drop(&mut self) {
        self.shared.closed.store(true, Relaxed);
        self.shared.wake.notify_one();
    }
}

// The server.

struct Server {
    app: Arc<App>,
    address: SocketAddr,
    stop: Arc<Notify>,
    thread: std::thread::JoinHandle<()>,
}

impl Server {
    fn start(engine: Arc<Metronome>) -> Result<Self, Failure> {
        let app = App::new(Config::default(), engine as Arc<dyn Inference>);
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"))?;
        let address = listener.local_addr()?;
        let stop = Arc::new(Notify::new());
        let (served, stopped) = (app.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            let never = std::future::pending();
            let ended = runtime.block_on(serve_until(served, listener, stopped.notified(), never));
            if let Err(error) = ended {
                eprintln!("the server ended: {error}");
            }
        });
        Ok(Self { app, address, stop, thread })
    }

    fn end(self) {
        self.stop.notify_one();
        let _ = self.thread.join();
    }
}

/// Processor time of this process, in seconds.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    let fields: Vec<f64> = after.split(' ').map(|n| n.parse().unwrap_or(0.0)).collect();
    fields.get(11..13).map_or(0.0, |times| times.iter().sum::<f64>() / 100.0)
}

// Streams.

struct Load {
    path: &'static str,
    streams: usize,
    /// Tokens a second of each.
    rate: usize,
    seconds: u64,
}

fn streams(tokenizer: &Arc<Tokenizer>, load: &Load) -> Result<(), Failure> {
    let count = load.rate * load.seconds as usize;
    let beat = Duration::from_secs(1) / load.rate as u32;
    let times: Vec<Arc<Times>> = (0..load.streams)
        .map(|_| Arc::new((0..count).map(|_| AtomicU64::new(0)).collect()))
        .collect();
    let engine = Metronome::start(tokenizer, beat, times.clone());
    let server = Server::start(engine.clone())?;
    let used = processor_seconds();
    let begin = Instant::now();
    let clients = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (received, errors) = clients.block_on(async {
        let mut tasks = Vec::new();
        for (i, times) in times.iter().enumerate() {
            let body = match load.path {
                CHAT => json!({"messages": [{"role": "user", "content": "hi"}],
                    "reasoning_effort": "none"}),
                _ => json!({"prompt": "hi"}),
            };
            let mut body = body;
            body["model"] = json!("deepinfer");
            body["stream"] = json!(true);
            body["seed"] = json!(i);
            body["max_tokens"] = json!(count);
            let text = body.to_string();
            let head = format!(
                "POST {} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
                load.path,
                text.len()
            );
            let field: &'static [u8] =
                if load.path == CHAT { b"\"content\":\"" } else { b"\"text\":\"" };
            let (address, times, engine) = (server.address, times.clone(), engine.clone());
            // Spread over a second.
            let offset = Duration::from_secs(1) * i as u32 / load.streams as u32;
            tasks.push(tokio::spawn(async move {
                tokio::time::sleep(offset).await;
                follow(address, head + &text, field, &times, &engine).await
            }));
        }
        let (mut received, mut errors) = (Vec::new(), Vec::new());
        for task in tasks {
            match task.await {
                Ok(Ok(latencies)) => received.push(latencies),
                Ok(Err(error)) => errors.push(error.to_string()),
                Err(error) => errors.push(error.to_string()),
            }
        }
        (received, errors)
    });
    let took = begin.elapsed().as_secs_f64();
    let used = processor_seconds() - used;
    server.end();
    let mut all: Vec<u64> = received.into_iter().flatten().collect();
    all.sort_unstable();
    let at = |part: f64| {
        let i = ((all.len() as f64 * part) as usize).min(all.len().saturating_sub(1));
        all.get(i).copied().unwrap_or(0) as f64 / 1e3
    };
    println!(
        "{}: {} streams of {} tokens/s for {} s: {} of {} tokens came, {:.0} a second, {} errors; \
         added latency p50 {:.2} ms, p99 {:.2} ms, p99.9 {:.2} ms, largest {:.2} ms; processor time \
         {used:.1} s of {took:.1} s, clients included",
        load.path,
        load.streams,
        load.rate,
        load.seconds,
        all.len(),
        count * load.streams,
        all.len() as f64 / took,
        errors.len(),
        at(0.5),
        at(0.99),
        at(0.999),
        at(1.0),
    );
    for error in errors.iter().take(3) {
        println!("  {error}");
    }
    Ok(())
}

/// Reads a stream. Returns how much later than the engine sent it each token came, in microseconds.
async fn follow(
    address: SocketAddr,
    text: String,
    field: &[u8],
    times: &Times,
    engine: &Metronome,
) -> Result<Vec<u64>, Failure> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(text.as_bytes()).await?;
    let mut latencies = Vec::with_capacity(times.len());
    let mut buffer = Vec::with_capacity(1 << 16);
    loop {
        let n = stream.read_buf(&mut buffer).await?;
        let now = engine.now();
        // Whole lines only.
        let end = buffer.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
        for line in buffer[..end].split(|&b| b == b'\n') {
            if line.windows(8).any(|w| w == b"\"error\":") {
                return Err(String::from_utf8_lossy(line).into());
            }
            let Some(at) = line.windows(field.len()).position(|w| w == field) else { continue };
            let text = &line[at + field.len()..];
            let tokens = text.iter().position(|&b| b == b'"').unwrap_or(0);
            for _ in 0..tokens {
                let sent = times.get(latencies.len()).map_or(now, |time| time.load(Relaxed));
                latencies.push(now.saturating_sub(sent));
            }
        }
        buffer.drain(..end);
        if n == 0 {
            break;
        }
    }
    match latencies.len() == times.len() {
        true => Ok(latencies),
        false => Err(format!("{} of {} tokens came", latencies.len(), times.len()).into()),
    }
}

// Clients that leave.

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

fn aborts(tokenizer: &Arc<Tokenizer>, count: usize) -> Result<(), Failure> {
    let engine = Metronome::start(tokenizer, Duration::from_millis(1), Vec::new());
    let server = Server::start(engine.clone())?;
    std::thread::sleep(Duration::from_millis(500));
    let clients = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let before = open_files();
    let body = json!({"model": "deepinfer", "stream": true, "max_tokens": 100_000,
        "messages": [{"role": "user", "content": "hi"}]})
    .to_string();
    let text =
        format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let begin = Instant::now();
    clients.block_on(async {
        for i in 0..count {
            // Cut in the head, in the body, before, in and after the first events.
            let part = [text.len() / 9, text.len() - 5, text.len(), text.len()][i % 4];
            let mut stream = TcpStream::connect(server.address).await?;
            stream.write_all(&text.as_bytes()[..part]).await?;
            if i % 4 == 3 {
                let mut buffer = [0; 512];
                let _ = stream.read(&mut buffer).await?;
            }
            tokio::time::sleep(Duration::from_micros((i as u64 * 7919) % 5000)).await;
        }
        Ok::<_, std::io::Error>(())
    })?;
    let took = begin.elapsed().as_secs_f64();
    let left = || (server.app.open.load(Relaxed), engine.figures().running, open_files());
    let settled = Instant::now();
    while left() != (0, 0, before) && settled.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let (open, running, files) = left();
    println!(
        "{count} clients connected and left in {took:.1} s; {:.0} ms later {open} requests are open, \
         {running} run in the engine, {files} file handles are open ({before} before)",
        settled.elapsed().as_secs_f64() * 1e3
    );
    server.end();
    match (open, running, files) == (0, 0, before) {
        true => Ok(()),
        false => Err("something was left behind".into()),
    }
}

// The parser.

struct Decoder(Arc<Tokenizer>);

impl StreamTokenizer for Decoder {
    fn decode_ids(&self, ids: &[u32], _skip_special_tokens: bool) -> Result<String, String> {
        Ok(self.0.decode(ids))
    }

    fn is_special_token(&self, id: u32) -> bool {
        self.0.spelling(id).is_some_and(|spelling| self.0.special_id(spelling) == Some(id))
    }
}

struct Passthrough;

impl ChunkGenerator for Passthrough {
    type Chunk = OutputChunk;

    async fn generate(&mut self, chunk: OutputChunk) -> Vec<OutputChunk> {
        vec![chunk]
    }
}

fn parser(tokenizer: &Arc<Tokenizer>) -> Result<(), Failure> {
    let thought = "The user wants the weather of two cities, so I look it up. ".repeat(100);
    let call = "\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name=\"weather\">\n<｜DSML｜ parameter \
                name=\"city\" string=\"true\">Rome and Paris</｜DSML｜ parameter>\n</｜DSML｜ \
                invoke>\n</｜DSML｜ calls>";
    let answer = "It is sunny in Rome, and it rains in Paris; take a coat along. ".repeat(100);
    let text = format!("{thought}</think>{answer}{call}");
    let ids = tokenizer.encode_scanning_specials(&text)?;
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    println!("parser: {} tokens of {} bytes", ids.len(), text.len());
    for size in [1, 2, 4, 8, 16, 64] {
        let mut best = f64::INFINITY;
        let mut made = 0;
        for _ in 0..7 {
            let start = Instant::now();
            made = runtime.block_on(async {
                let chunks: Vec<InferenceChunk> = ids
                    .chunks(size)
                    .map(|ids| InferenceChunk::Tokens { token_ids: ids.to_vec(), logprobs: None })
                    .chain([InferenceChunk::Finish { finish_reason: InferenceFinishReason::Stop }])
                    .collect();
                let options = ParsingOptions {
                    thinking_initial_stage: Some(ThinkingInitialStage::ReasoningStart),
                    ..ParsingOptions::default()
                };
                let processor = StreamProcessor::new(Passthrough, options)
                    .with_tokenizer(Decoder(tokenizer.clone()));
                let mut out = pin!(processor.into_protocol_stream(tokio_stream::iter(chunks)));
                let mut made = 0;
                while let Some(chunk) = out.next().await {
                    made += usize::from(chunk.is_ok());
                }
                made
            });
            best = best.min(start.elapsed().as_secs_f64());
        }
        let micros = best * 1e6 / ids.len() as f64;
        println!("  {size} tokens a call: {micros:.3} us a token, {made} chunks");
    }
    Ok(())
}
