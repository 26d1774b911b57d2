//! How long grammars take with the real tokenizer: preparing the vocabulary, compiling, masks,
//! drafts and rollback.
//!
//! `cargo bench -p deepinfer --bench grammar`. A table of microseconds; nothing is asserted.

use std::io::Read;
use std::sync::Arc;
use std::time::Instant;

use deepinfer::grammar::{
    Compiler, CompilerLimits, GrammarSpec, GrammarVocabulary, Tool, ToolCalls, ToolChoice,
};
use deepinfer::tokenizer::Tokenizer;
use serde_json::{Value, json};

const SIZE: usize = 129_280;

struct Case {
    name: &'static str,
    spec: GrammarSpec,
    text: String,
}

fn main() {
    let path =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/deepseek-tokenizer/tokenizer.json.gz");
    let mut json = Vec::new();
    let packed = std::fs::File::open(path).expect("the tokenizer is in testdata");
    flate2::read::GzDecoder::new(packed).read_to_end(&mut json).expect("it is gzip");
    let tokenizer = Tokenizer::from_bytes(json).expect("it loads");

    let (start, cpu) = (Instant::now(), cpu_ms());
    let eos = tokenizer.eos().expect("it has an end of sequence");
    let vocabulary = GrammarVocabulary::of_tokenizer(&tokenizer, SIZE, &[eos]).expect("it fits");
    let wall = start.elapsed().as_millis();
    println!("vocabulary of {SIZE} tokens: {wall} ms, {} ms of processor time", cpu_ms() - cpu);

    println!(
        "{:<22} {:>9} {:>7} {:>6} | {:>6} {:>6} {:>6} {:>6} {:>6} | {:>6} {:>6} {:>6} | {:>7} {:>7}   slowest after",
        "microseconds",
        "compile",
        "copy",
        "masks",
        "mean",
        "p50",
        "p95",
        "p99",
        "max",
        "p50",
        "p99",
        "max",
        "accept",
        "5 drafts"
    );
    println!("{:<47} | {:<34} | {:<20} |", "", "a new grammar", "the next sequence");
    for case in cases() {
        let mut times = measure(&case, &tokenizer, &vocabulary);
        print(case.name, &mut times);
    }
    let mut all = Times::default();
    for case in corpus() {
        all.merge(measure(&case, &tokenizer, &vocabulary));
    }
    print("corpus of schemas", &mut all);
}

/// Microseconds.
#[derive(Default)]
struct Times {
    compile: Vec<f64>,
    copy: Vec<f64>,
    /// Masks of the first sequence of a grammar, and of the next one.
    cold: Vec<f64>,
    warm: Vec<f64>,
    /// A token, and five drafts.
    accept: Vec<f64>,
    drafts: Vec<f64>,
    /// The text before the slowest of the later masks.
    slowest: String,
}

impl Times {
    fn merge(&mut self, other: Self) {
        self.compile.extend(other.compile);
        self.copy.extend(other.copy);
        self.cold.extend(other.cold);
        self.warm.extend(other.warm);
        self.accept.extend(other.accept);
        self.drafts.extend(other.drafts);
    }
}

/// A line of the table; of several grammars their medians.
fn print(name: &str, times: &mut Times) {
    let Times { compile, copy, cold, warm, accept, drafts, slowest } = times;
    let mean = cold.iter().sum::<f64>() / cold.len() as f64;
    let [a, b, c, d] = [0.5, 0.95, 0.99, 1.0].map(|q| quantile(cold, q));
    let [e, f, g] = [0.5, 0.99, 1.0].map(|q| quantile(warm, q));
    let [compile, copy, accept, drafts] =
        [compile, copy, accept, drafts].map(|times| quantile(times, 0.5));
    println!(
        "{name:<22} {compile:>9.0} {copy:>7.0} {:>6} | {mean:>6.0} {a:>6.0} {b:>6.0} {c:>6.0} {d:>6.0} \
         | {e:>6.0} {f:>6.0} {g:>6.0} | {accept:>7.1} {drafts:>7.1}   {slowest:?}",
        cold.len()
    );
}

fn measure(case: &Case, tokenizer: &Tokenizer, vocabulary: &Arc<GrammarVocabulary>) -> Times {
    let ids = tokenizer.encode_scanning_specials(&case.text).expect("the text encodes");
    let mut mask = vec![0u32; vocabulary.mask_words()];
    // Quietest of three, mask by mask: other work on the machine is not the grammar's.
    let mut cold = vec![f64::MAX; ids.len() + 1];
    let mut warm = cold.clone();
    let [mut compile, mut copy, mut accept, mut drafts] = [f64::MAX; 4];
    for _ in 0..3 {
        let compiler = Compiler::new(vocabulary.clone(), CompilerLimits::default());
        let start = Instant::now();
        let grammar = compiler.compile(case.spec.clone()).expect("the case compiles");
        compile = compile.min(micros(start));
        let start = Instant::now();
        let mut matcher = grammar.matcher(None).expect("it can be copied");
        copy = copy.min(micros(start));
        for times in [&mut cold, &mut warm] {
            let mut accepting = 0.0;
            for (i, time) in times.iter_mut().enumerate() {
                let start = Instant::now();
                matcher.mask(&mut mask).expect("a mask");
                *time = time.min(micros(start));
                if let Some(&id) = ids.get(i) {
                    let start = Instant::now();
                    matcher.accept(id).expect("the text follows the grammar");
                    accepting += micros(start);
                }
            }
            accept = accept.min(accepting / ids.len() as f64);
            drop(matcher);
            matcher = grammar.matcher(None).expect("another parser");
        }
        let mut blocks = Vec::new();
        for block in ids.chunks_exact(5) {
            let start = Instant::now();
            matcher.validate(block).expect("drafts");
            blocks.push(micros(start));
            matcher.replay(block).expect("drafts");
        }
        if !blocks.is_empty() {
            drafts = drafts.min(quantile(&mut blocks, 0.5));
        }
    }
    let slowest = (0..=ids.len()).max_by(|&a, &b| warm[a].total_cmp(&warm[b])).unwrap_or(0);
    Times {
        compile: vec![compile],
        copy: vec![copy],
        cold,
        warm,
        accept: vec![accept],
        drafts: if drafts < f64::MAX { vec![drafts] } else { Vec::new() },
        slowest: tokenizer.decode(&ids[slowest.saturating_sub(4)..slowest]),
    }
}

/// Time that this thread has run, in milliseconds; 0 where the system does not say.
fn cpu_ms() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let first = stat.split_whitespace().next();
    first.and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0) / 1_000_000
}

fn micros(start: Instant) -> f64 {
    start.elapsed().as_nanos() as f64 / 1000.0
}

fn quantile(times: &mut [f64], q: f64) -> f64 {
    times.sort_by(f64::total_cmp);
    let last = times.len().saturating_sub(1);
    times.get((q * last as f64).ceil() as usize).copied().unwrap_or(0.0)
}

fn cases() -> Vec<Case> {
    let person = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 80},
            "email": {"type": "string", "format": "email"},
            "born": {"type": "string", "format": "date"},
            "score": {"type": "number", "minimum": 0, "maximum": 100},
            "tags": {"type": "array", "items": {"enum": ["new", "gold", "late", "blocked"]}},
            "address": {"$ref": "#/$defs/address"},
            "previous": {"type": "array", "items": {"$ref": "#/$defs/address"}}
        },
        "required": ["name", "email", "born", "score", "tags", "address", "previous"],
        "additionalProperties": false,
        "$defs": {"address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "minLength": 1, "maxLength": 80},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country": {"anyOf": [{"enum": ["FR", "DE", "JP"]}, {"type": "null"}]}
            },
            "required": ["street", "zip", "country"],
            "additionalProperties": false
        }}
    });
    let address =
        r#"{"street": "12 Rue de l'Université, étage 3", "zip": "75007", "country": "FR"}"#;
    let prose = "It was late in the evening when the letter came, \\\"urgent\\\" written across it \
                 in red; nobody had expected it — 雪が降っていた — and yet everyone was waiting. ";
    let person_text = format!(
        "{{\n  \"name\": \"Ada Lovelace-Byron\",\n  \"email\": \"ada.lovelace@example.co.uk\",\n  \
         \"born\": \"1815-12-10\",\n  \"score\": 97.25,\n  \"tags\": [\"new\", \"gold\"],\n  \
         \"address\": {address},\n  \"previous\": [{}]\n}}",
        [address; 4].join(", ")
    );
    let free = format!(
        "{{\"title\": \"{prose}\", \"body\": [\"{prose}{prose}\", 12, null, {{\"x\": 1e-3}}]}}"
    );
    let tools = vec![
        Tool {
            name: "search".into(),
            parameters: json!({"type": "object", "properties": {
                "query": {"type": "string"}, "limit": {"type": "integer", "minimum": 1, "maximum": 50},
                "site": {"type": ["string", "null"]}}, "required": ["query"], "additionalProperties": false}),
            strict: true,
        },
        Tool {
            name: "write_file".into(),
            parameters: json!({"type": "object", "properties": {
                "path": {"type": "string"}, "content": {"type": "string"},
                "mode": {"enum": ["create", "append"]}}, "required": ["path", "content"], "additionalProperties": false}),
            strict: true,
        },
    ];
    let code = "fn main() {\n    let x: Vec<u32> = (0..10).map(|i| i * 2).collect();\n    println!(\"{x:?}\");\n}\n".repeat(6);
    let d = "｜DSML｜";
    let calls = format!(
        "Let me look that up first, and then write it down.\n\n<{d} calls>\n<{d} invoke name=\"search\">\n\
         <{d} parameter name=\"query\" string=\"true\">how do birds find their way</{d} parameter>\n\
         <{d} parameter name=\"limit\" string=\"false\">10</{d} parameter>\n</{d} invoke>\n\
         <{d} invoke name=\"write_file\">\n<{d} parameter name=\"path\" string=\"true\">src/main.rs</{d} parameter>\n\
         <{d} parameter name=\"content\" string=\"true\">{code}</{d} parameter>\n</{d} invoke>\n</{d} calls>"
    );
    let table = "Ada Lovelace,mathematician,London,1815\n东京塔,333 m,Tōkyō,1958\nsmall boat,12 €,used,\"as new\"\n".repeat(3);
    let choices: Vec<String> =
        (0..500).map(|i| format!("category {i}: {}", prose.len() * i % 977)).collect();
    vec![
        Case { name: "schema, records", spec: GrammarSpec::JsonSchema(person), text: person_text },
        Case { name: "schema, free text", spec: GrammarSpec::JsonObject, text: free },
        Case {
            name: "tool calls, auto",
            spec: GrammarSpec::ToolCalls(ToolCalls { tools, choice: ToolChoice::Auto, parallel: true, opened: false }),
            text: calls,
        },
        regex(
            "regex, words",
            r"(\w+ ){3,40}[0-9]{4}(-[0-9]{2}){2}(: .{0,200})?",
            "the quick brown fox jumps over the lazy dog on 2024-05-06: and then, once more — it does",
        ),
        regex(
            "regex, addresses",
            r"[\w.+-]+@[\w-]+(\.[\w-]+)+(, [\w.+-]+@[\w-]+(\.[\w-]+)+){0,20}",
            "ada.lovelace@example.co.uk, charles+engine@analytical.org, m_somerville@physics.edu.example",
        ),
        regex("regex, table", r"(([^,\n]+,){3}[^,\n]+\n){1,50}", &table),
        regex(
            "regex, log",
            r"([0-9]{4}(-[0-9]{2}){2} [0-9]{2}(:[0-9]{2}){2} (INFO|WARN|ERROR) [^\n]{1,120}\n)+",
            &"2026-03-01 12:30:59 WARN the queue is 80% full; 12 requests wait (oldest: 3.5 s)\n".repeat(4),
        ),
        regex("regex, code block", r"```(rust|python)\n(?s:.*)\n```", &format!("```rust\n{code}\n```")),
        Case {
            name: "written grammar",
            spec: GrammarSpec::Lark(QUERY.into()),
            text: "SELECT name, total_price FROM orders WHERE city = 'Saint-Étienne' AND total_price > 1200 \
                   OR name = 'Ada' ORDER BY name"
                .into(),
        },
        Case { name: "choice of 500", spec: GrammarSpec::Choice(choices.clone()), text: choices[377].clone() },
    ]
}

/// The schemas that the tests use, each with its first example.
fn corpus() -> Vec<Case> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/schemas.json");
    let json = std::fs::read(path).expect("the corpus is in testdata");
    let entries: Vec<Value> = serde_json::from_slice(&json).expect("it is JSON");
    let case = |entry: &Value| {
        let text = entry["yes"].get(0)?.as_str()?.to_owned();
        Some(Case { name: "", spec: GrammarSpec::JsonSchema(entry["schema"].clone()), text })
    };
    entries.iter().filter_map(case).collect()
}

fn regex(name: &'static str, expression: &str, text: &str) -> Case {
    Case { name, spec: GrammarSpec::Regex(expression.into()), text: text.into() }
}

/// Queries over tables, in the form of llguidance's Lark.
const QUERY: &str = r#"
start: "SELECT " columns " FROM " NAME (" WHERE " condition)? (" ORDER BY " columns)?
columns: NAME (", " NAME)*
condition: comparison ((" AND " | " OR ") comparison)*
comparison: NAME " " ("=" | "<" | ">") " " (NUMBER | STRING)
NAME: /[a-z_][a-z0-9_]*/
NUMBER: /[0-9]+(\.[0-9]+)?/
STRING: /'[^'\n]*'/
"#;
