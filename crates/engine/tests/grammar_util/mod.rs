//! Vocabularies and a random writer for the grammar tests.
#![allow(dead_code)] // each test binary uses some of these

use std::sync::{Arc, LazyLock};

use deepinfer::grammar::{
    CompileError, Compiler, CompilerLimits, Grammar, GrammarSpec, GrammarVocabulary, Matcher,
};

/// A small vocabulary: every byte under its own value, then pieces that cross token borders of
/// JSON, then special tokens.
pub struct Small {
    pub vocabulary: Arc<GrammarVocabulary>,
    pub compiler: Compiler,
    pub bytes: Vec<Vec<u8>>,
    pub eos: u32,
    pub think_end: u32,
    pub dsml: u32,
}

const PIECES: [&str; 50] = [
    "{\"",
    "\"}",
    "\":",
    "\": ",
    "\", \"",
    "\",\"",
    "\"]",
    "[\"",
    "[[",
    "]]",
    "}}",
    "{}",
    "[]",
    "}]",
    "},",
    "], ",
    "[{",
    "true",
    "false",
    "null",
    "tru",
    "nul",
    "00",
    "12",
    "123",
    "2024",
    "-0",
    "0.",
    ".5",
    "e1",
    "  ",
    "\n",
    "\n  ",
    "\\n",
    "\\\"",
    "\\u00",
    "ab",
    "abc",
    "name",
    "日本",
    "é",
    "🙂",
    "\u{65e5}x",
    "</",
    "<",
    ">\n",
    "\n</",
    " parameter",
    "=\"",
    "\">",
];

pub static SMALL: LazyLock<Small> = LazyLock::new(|| Small::new(true));
/// The same without a token for the tag of tool calls.
pub static PLAIN: LazyLock<Small> = LazyLock::new(|| Small::new(false));

impl Small {
    fn new(with_dsml: bool) -> Self {
        let mut bytes: Vec<Vec<u8>> = (0..=255u8).map(|b| vec![b]).collect();
        bytes.extend(PIECES.iter().map(|p| p.as_bytes().to_vec()));
        // Halves of characters, as byte-level tokenizers have.
        bytes.extend([vec![0xe6, 0x97], vec![0xa5, 0xe6], vec![0xf0, 0x9f]]);
        let first = bytes.len() as u32;
        let mut names = vec!["<eos>", "</think>", "<｜ref｜>", "<｜/ref｜>", "<other>"];
        if with_dsml {
            names.push("｜DSML｜");
        }
        let special: Vec<(u32, String)> =
            names.iter().enumerate().map(|(i, n)| (first + i as u32, (*n).to_owned())).collect();
        bytes.extend(special.iter().map(|(_, name)| name.as_bytes().to_vec()));
        let vocabulary = GrammarVocabulary::new(&bytes, &special, &[first]).unwrap();
        let compiler = Compiler::new(vocabulary.clone(), CompilerLimits::default());
        Self { vocabulary, compiler, bytes, eos: first, think_end: first + 1, dsml: first + 5 }
    }

    pub fn compile(&self, spec: GrammarSpec) -> Result<Grammar, CompileError> {
        self.compiler.compile(spec)
    }

    pub fn matcher(&self, spec: GrammarSpec) -> Matcher {
        self.compile(spec).unwrap().matcher(None).unwrap()
    }

    /// The bytes that tokens stand for.
    pub fn text(&self, tokens: &[u32]) -> Vec<u8> {
        tokens.iter().flat_map(|&t| self.bytes[t as usize].clone()).collect()
    }
}

/// One token a byte.
pub fn byte_tokens(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// Whether the grammar accepts exactly this text.
pub fn accepts(small: &Small, grammar: &Grammar, text: &str) -> bool {
    let mut matcher = grammar.matcher(None).unwrap();
    matcher.replay(&byte_tokens(text)).is_ok() && matcher.accept(small.eos).is_ok()
}

pub fn mask(matcher: &mut Matcher, vocabulary: &GrammarVocabulary) -> Vec<u32> {
    let mut mask = vec![0; vocabulary.mask_words()];
    matcher.mask(&mut mask).unwrap();
    mask
}

pub fn allows(mask: &[u32], token: u32) -> bool {
    mask[token as usize / 32] >> (token % 32) & 1 == 1
}

pub fn allowed(mask: &[u32]) -> Vec<u32> {
    (0..mask.len() as u32 * 32).filter(|&t| allows(mask, t)).collect()
}

/// xorshift64*.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n
    }

    pub fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }
}

/// Whether JSON text that was written so far ends inside a string.
fn in_string(tokens: &[u32], bytes: &[Vec<u8>]) -> bool {
    let (mut inside, mut escaped) = (false, false);
    for &byte in tokens.iter().flat_map(|&t| &bytes[t as usize]) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = inside,
            b'"' => inside = !inside,
            _ => {}
        }
    }
    inside
}

/// Writes a random answer: every token is drawn from the mask. After `steps` tokens, tokens that
/// close something are preferred. `None` if it does not end long after.
pub fn write(
    matcher: &mut Matcher,
    vocabulary: &GrammarVocabulary,
    bytes: &[Vec<u8>],
    rng: &mut Rng,
    steps: usize,
) -> Option<Vec<u32>> {
    let mut tokens = Vec::new();
    for step in 0..steps * 20 + 300 {
        let mask = mask(matcher, vocabulary);
        let allowed = allowed(&mask);
        assert!(!allowed.is_empty(), "nothing is allowed after {tokens:?}");
        let ending = step >= steps;
        if let Some(&eos) = vocabulary.eos().iter().find(|&&e| allows(&mask, e))
            && (ending || rng.below(4) == 0 || allowed.len() == 1)
        {
            matcher.accept(eos).unwrap();
            return Some(tokens);
        }
        let first = |t: u32| bytes[t as usize].first().copied().unwrap_or(0);
        let preferred: Vec<u32> = if ending {
            let closing = if in_string(&tokens, bytes) { "\"" } else { "}]\"ntf,10" };
            let found = closing.as_bytes().iter().find_map(|c| {
                let list: Vec<u32> = allowed
                    .iter()
                    .copied()
                    .filter(|&t| first(t) == *c && (bytes[t as usize].len() == 1))
                    .collect();
                (!list.is_empty()).then_some(list)
            });
            found.unwrap_or_default()
        } else if rng.below(3) == 0 {
            // Text of many kinds of characters is mostly about strings; look at structure too.
            allowed.iter().copied().filter(|&t| b"\"{}[],:0123456789".contains(&first(t))).collect()
        } else {
            Vec::new()
        };
        let pool = if preferred.is_empty() { &allowed } else { &preferred };
        let mut token = *rng.pick(pool);
        if vocabulary.eos().contains(&token) {
            continue;
        }
        // White space is allowed nearly everywhere and says little.
        if bytes[token as usize].iter().all(u8::is_ascii_whitespace) && rng.below(8) != 0 {
            token = *rng.pick(pool);
            if vocabulary.eos().contains(&token) {
                continue;
            }
        }
        matcher.accept(token).unwrap();
        tokens.push(token);
    }
    None
}
