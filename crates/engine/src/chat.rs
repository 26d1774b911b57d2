//! Conversations to prompts, in the V4.1 format of DeepSeek's `deepseek-recipe` crates.
//!
//! Their renderer says which bytes of a prompt are special tokens. Everything else is encoded as
//! plain text, so that nothing a user writes turns into a control token.

use crate::request::{RequestError, check_text};
use crate::tokenizer::{Decoder, Tokenizer, TokenizerError};
use deepseek_recipe_core::special_tokens::SpecialToken;
use deepseek_recipe_encoding::PromptEncoding;
use deepseek_recipe_encoding::dsv41::DeepseekV41Encoding;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

pub use deepseek_recipe_core::conversation::{Conversation, ResponseFormat};
pub use deepseek_recipe_core::messages::{InputMessage, ToolCall};
pub use deepseek_recipe_core::multimodal::ImageSource;
pub use deepseek_recipe_core::prompt::Prompt;
pub use deepseek_recipe_core::tools::{ToolChoice, ToolDefinition};
pub use deepseek_recipe_encoding::RenderedPrompt;

/// Spelling of the token that ends the thinking of a turn.
pub const THINKING_END: &str = "</think>";

/// Why a conversation cannot become a prompt.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The tokenizer lacks a special token of the format, or the text cannot be encoded.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Not an effort.
    #[error("{found:?} is not an effort; give {}", Effort::EXPECTED)]
    Effort {
        /// What was given.
        found: String,
    },
    /// The prompt is certain not to fit.
    #[error(transparent)]
    TooLong(RequestError),
    /// The renderer writes the effort elsewhere than this version expects.
    #[error("the prompt renderer did not write the thinking effort where it belongs: {start:?}")]
    EffortPlace {
        /// Start of the prompt.
        start: String,
    },
}

/// How thoroughly to think: 1 to 100, or not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Effort(u8);

impl Effort {
    /// No thinking.
    pub const NONE: Effort = Effort(0);
    /// `minimal` and `low`.
    pub const LOW: Effort = Effort(50);
    /// `medium`, `high` and `xhigh`; the format's default.
    pub const HIGH: Effort = Effort(75);
    /// `max` and `ultra`.
    pub const MAX: Effort = Effort(100);

    /// What an effort may be, in words.
    pub const EXPECTED: &str =
        "none, minimal, low, medium, high, xhigh, max, ultra or a number from 0 to 100";

    /// The effort `number`, 0 for no thinking; `None` above 100.
    pub fn new(number: u32) -> Option<Self> {
        u8::try_from(number).ok().filter(|&n| n <= 100).map(Effort)
    }

    /// 1 to 100, or 0 for no thinking.
    pub fn number(self) -> u8 {
        self.0
    }

    /// Whether there is any thinking.
    pub fn thinks(self) -> bool {
        self.0 > 0
    }
}

impl Default for Effort {
    fn default() -> Self {
        Effort::HIGH
    }
}

impl FromStr for Effort {
    type Err = ChatError;

    fn from_str(text: &str) -> Result<Self, ChatError> {
        let effort = match text.trim() {
            "none" | "off" => Some(Effort::NONE),
            "minimal" | "low" => Some(Effort::LOW),
            "medium" | "high" | "xhigh" => Some(Effort::HIGH),
            "max" | "ultra" => Some(Effort::MAX),
            number => number.parse().ok().and_then(Effort::new),
        };
        effort.ok_or_else(|| ChatError::Effort { found: text.to_owned() })
    }
}

impl fmt::Display for Effort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("none"),
            number => write!(f, "{number}"),
        }
    }
}

/// What the prompt says beside the conversation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Thinking effort. `None`: the conversation's own `thinking_mode` and `reasoning_effort`.
    pub effort: Option<Effort>,
}

/// The V4.1 format over one tokenizer.
pub struct ChatTemplate<'a> {
    tokenizer: &'a Tokenizer,
    encoding: DeepseekV41Encoding,
}

impl<'a> ChatTemplate<'a> {
    /// The format over `tokenizer`, which must have the special tokens of every conversation. The
    /// others (system, tools, images) are asked for when a conversation needs them.
    pub fn new(tokenizer: &'a Tokenizer) -> Result<Self, ChatError> {
        for token in [
            SpecialToken::Bos,
            SpecialToken::Eos,
            SpecialToken::User,
            SpecialToken::Assistant,
            SpecialToken::ThinkingStart,
            SpecialToken::ThinkingEnd,
        ] {
            tokenizer.require_special(token.default_str())?;
        }
        Ok(Self { tokenizer, encoding: DeepseekV41Encoding::new() })
    }

    /// Token ids of the prompt for the next assistant turn.
    pub fn render(
        &self,
        conversation: &Conversation,
        options: &Options,
    ) -> Result<Vec<u32>, ChatError> {
        self.render_within(conversation, options, usize::MAX)
    }

    /// The same, unless it is certain that a sequence of at most `limit` tokens does not hold the
    /// prompt: then it is not encoded, which would take long.
    pub fn render_within(
        &self,
        conversation: &Conversation,
        options: &Options,
        limit: usize,
    ) -> Result<Vec<u32>, ChatError> {
        let rendered = self.render_prompt(conversation, options)?;
        check_text(self.tokenizer, &rendered.prompt, limit).map_err(ChatError::TooLong)?;
        Ok(self.tokenizer.encode_with_specials(&rendered.prompt, &rendered.special_ranges)?)
    }

    /// The prompt's text, its special ranges and its images.
    pub fn render_prompt(
        &self,
        conversation: &Conversation,
        options: &Options,
    ) -> Result<RenderedPrompt, ChatError> {
        let Some(effort) = options.effort else {
            return Ok(self.encoding.render_conversation(conversation));
        };
        let mut conversation = conversation.clone();
        conversation.thinking_mode = effort.thinks();
        conversation.reasoning_effort = None;
        let mut rendered = self.encoding.render_conversation(&conversation);
        if effort.thinks() && !conversation.messages.is_empty() {
            write_effort(&mut rendered, effort)?;
        }
        Ok(rendered)
    }

    /// The token that ends an assistant turn.
    pub fn end_of_turn(&self) -> Result<u32, ChatError> {
        Ok(self.tokenizer.require_special(SpecialToken::Eos.default_str())?)
    }
}

/// The renderer knows words only; it has written the default's number at the start.
fn write_effort(rendered: &mut RenderedPrompt, effort: Effort) -> Result<(), ChatError> {
    let opening = format!(
        "{}{}Reasoning Effort: ",
        SpecialToken::Bos.default_str(),
        SpecialToken::System.default_str()
    );
    let written = Effort::default().number().to_string();
    let place = opening.len()..opening.len() + written.len();
    let prompt = &mut rendered.prompt;
    let found = prompt.get(place.clone()).filter(|_| prompt.starts_with(&opening));
    if found != Some(written.as_str()) {
        return Err(ChatError::EffortPlace { start: prompt.chars().take(80).collect() });
    }
    let number = effort.number().to_string();
    prompt.replace_range(place.clone(), &number);
    let shift = |at: usize| if at < place.end { at } else { at - written.len() + number.len() };
    let moved = |range: &Range<usize>| shift(range.start)..shift(range.end);
    rendered.special_ranges = rendered.special_ranges.iter().map(moved).collect();
    Ok(())
}

/// Token ids of a prompt that is plain text, after the token that starts a text if the tokenizer
/// has one. See [`check_text`] for texts that may be very long.
pub fn plain_prompt(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, TokenizerError> {
    let mut ids: Vec<u32> = tokenizer.bos().into_iter().collect();
    ids.extend(tokenizer.encode(text)?);
    Ok(ids)
}

/// Where [`THINKING_END`] stands in the engine's text of a turn that begins with thinking: bytes of
/// the text of `ids`. Empty where the tokenizer leaves the token out of texts; `None` if the turn
/// has no such token.
pub fn thinking_end(tokenizer: &Tokenizer, ids: &[u32]) -> Option<Range<usize>> {
    let token = tokenizer.special_id(THINKING_END)?;
    let at = ids.iter().position(|&id| id == token)?;
    let (mut decoder, mut text) = (Decoder::new(true), String::new());
    ids[..=at].iter().for_each(|&id| decoder.push(tokenizer, id, &mut text));
    let spelled = match tokenizer.is_special(token) {
        true => 0,
        false => tokenizer.token_bytes(token).len(),
    };
    Some(text.len().saturating_sub(spelled)..text.len())
}

/// The thinking and the answer of a turn that begins with thinking, without the token between them.
/// `text` is the engine's text of `ids`; a stop string may have cut it anywhere.
pub fn split_thinking(tokenizer: &Tokenizer, ids: &[u32], text: &str) -> (String, String) {
    let Some(end) = thinking_end(tokenizer, ids) else {
        return (text.to_owned(), String::new());
    };
    let thinking = text.get(..end.start).unwrap_or(text);
    let answer = text.get(end.end..).unwrap_or_default();
    (thinking.to_owned(), answer.to_owned())
}

/// A user's message.
pub fn user(text: impl Into<String>) -> InputMessage {
    InputMessage::User { content: Prompt::plain(text), image_sources: Vec::new() }
}

/// A system message.
pub fn system(text: impl Into<String>) -> InputMessage {
    let content = Prompt::plain(text);
    InputMessage::System { content, image_sources: Vec::new(), tools: None }
}

/// An assistant's earlier answer, with its thinking where it is known.
pub fn assistant(content: impl Into<String>, reasoning: Option<String>) -> InputMessage {
    InputMessage::Assistant {
        content: content.into(),
        reasoning_content: reasoning,
        tool_calls: None,
        prefix: false,
    }
}

/// A tool's answer to the call `id`.
pub fn tool_result(id: impl Into<String>, text: impl Into<String>) -> InputMessage {
    InputMessage::Tool {
        content: Prompt::plain(text),
        image_sources: Vec::new(),
        tool_call_id: Some(id.into()),
    }
}
