//! Tool calls in the V4.1 format, as a Lark grammar.
//!
//! The format, where D is the token `｜DSML｜` and a value is bare text if `string="true"`, JSON
//! otherwise (it is what the prompt encoder of `deepseek-recipe-encoding` writes for calls in the
//! history, so the two spell every byte alike):
//!
//! ```text
//! \n\n<D calls>\n
//! <D invoke name="NAME">\n
//! <D parameter name="KEY" string="true">VALUE</D parameter>\n
//! <D parameter name="KEY" string="false">JSON</D parameter>\n
//! </D invoke>\n
//! </D calls>
//! ```
//!
//! (Line breaks only where `\n` stands; a call without arguments has an empty line.)

mod raw;

use serde_json::{Value, json};

use super::error::CompileError;
use super::lower::quote;
use super::schema::{Document, Types, normalize};
use super::spec::{Tool, ToolCalls, ToolChoice};
use super::vocabulary::GrammarVocabulary;

/// Name of the token that marks the format's tags.
const DSML: &str = "｜DSML｜";
/// Tokens that may stand in an answer's text beside plain text: grounding marks.
const TEXT_TOKENS: [&str; 8] = [
    "<｜ref｜>",
    "<｜/ref｜>",
    "<｜box｜>",
    "<｜/box｜>",
    "<｜point｜>",
    "<｜/point｜>",
    "<｜polygon｜>",
    "<｜/polygon｜>",
];
/// Most parameters of a strict tool that may come in any order. Beyond, they come in the order
/// of the schema. (The library tracks which were written in 64 bits.)
const MAX_UNORDERED: usize = 60;

/// The grammar text.
pub(super) fn grammar(
    calls: &ToolCalls,
    vocabulary: &GrammarVocabulary,
    max_nodes: usize,
) -> Result<String, CompileError> {
    check_names(calls)?;
    let chosen: Vec<&Tool> = match &calls.choice {
        ToolChoice::Named(name) => {
            let tool = calls.tools.iter().find(|t| t.name == *name).ok_or_else(|| {
                let reason = "it is chosen but not among the tools".to_owned();
                CompileError::BadTool { name: name.clone(), reason }
            })?;
            vec![tool]
        }
        _ => calls.tools.iter().collect(),
    };
    if chosen.is_empty() {
        return Err(CompileError::Empty { what: "the list of tools" });
    }
    let mut writer = Writer {
        lines: Vec::new(),
        tag: vocabulary.special(DSML).map(|id| format!("<[{id}]>")),
        max_nodes,
        has_any_parameter: false,
    };
    writer.start(calls, vocabulary);
    let names: Vec<String> = (0..chosen.len()).map(|i| format!("call_{i}")).collect();
    writer.rule("call", &names.join(" | "));
    let next = writer.tagged("\n<", "");
    let more = if calls.parallel { format!(" ({next} call)*") } else { String::new() };
    let first = writer.tagged("<", "");
    let close = writer.tagged("\n</", " calls>");
    writer.rule("calls", &format!("{first} call{more} {close}"));
    for (i, tool) in chosen.iter().enumerate() {
        writer.tool(i, tool).map_err(|error| match error {
            CompileError::TooBig { .. } => error,
            error => CompileError::Tool { name: tool.name.clone(), error: Box::new(error) },
        })?;
    }
    Ok(writer.lines.join("\n"))
}

fn check_names(calls: &ToolCalls) -> Result<(), CompileError> {
    for (i, tool) in calls.tools.iter().enumerate() {
        let refused = |reason: &str| {
            Err(CompileError::BadTool { name: tool.name.clone(), reason: reason.to_owned() })
        };
        if tool.name.is_empty() || tool.name.contains(['"', '\n']) {
            return refused("a name must not be empty or contain quotes or line breaks");
        }
        if calls.tools[..i].iter().any(|t| t.name == tool.name) {
            return refused("two tools have this name");
        }
    }
    Ok(())
}

struct Writer {
    lines: Vec<String>,
    /// Reference to the tag's token; without it the tag is text.
    tag: Option<String>,
    max_nodes: usize,
    /// Whether the rule `any_parameter` is written.
    has_any_parameter: bool,
}

impl Writer {
    fn rule(&mut self, name: &str, body: &str) {
        self.lines.push(format!("{name}: {body}"));
    }

    /// `before`, the tag, `after`, in rule position.
    fn tagged(&self, before: &str, after: &str) -> String {
        match &self.tag {
            Some(tag) if after.is_empty() => format!("{} {tag}", quote(before)),
            Some(tag) => format!("{} {tag} {}", quote(before), quote(after)),
            None => quote(&format!("{before}{DSML}{after}")),
        }
    }

    /// A rule for text that matches the terminal `body` and is ended by the closing tag of a
    /// parameter, that tag included.
    fn until_close(&mut self, name: &str, body: &str) {
        match &self.tag {
            // A token reference can only follow a lexeme that is complete, so the text up to "</"
            // is one lexeme: the longest match then ends at the tag, whatever the text contains.
            Some(tag) => {
                let tag = tag.clone();
                let terminal = name.to_uppercase();
                self.rule(&terminal, &format!("({body}) \"</\""));
                // The same language once more, as two lexemes. Behind "<", where the first is not
                // seen to hold any text, the second is, and no token need be tried.
                self.rule(&format!("{terminal}_TEXT"), body);
                let text = format!("({terminal} | {terminal}_TEXT \"</\")");
                self.rule(name, &format!("{text} {tag} \" parameter>\""));
            }
            None => {
                let close = quote(&format!("</{DSML} parameter>"));
                let terminal = format!("{}_TEXT", name.to_uppercase());
                self.rule(&terminal, body);
                self.rule(&format!("{name}[suffix={close}]"), &terminal);
            }
        }
    }

    fn start(&mut self, calls: &ToolCalls, vocabulary: &GrammarVocabulary) {
        let block = self.tagged("\n\n<", " calls>\n");
        match (&calls.choice, &self.tag) {
            _ if calls.opened => self.rule("start", "calls"),
            (ToolChoice::Required | ToolChoice::Named(_), _) => {
                self.rule("start", &format!("{block} calls"));
            }
            (ToolChoice::Auto, Some(tag)) => {
                let tag = tag.clone();
                let marks: Vec<String> = TEXT_TOKENS
                    .iter()
                    .filter_map(|name| vocabulary.special(name))
                    .map(|id| id.to_string())
                    .collect();
                let before = match marks.is_empty() {
                    true => String::new(),
                    false => format!("(TEXT? <[{}]>)* ", marks.join(",")),
                };
                self.rule("TEXT", "/(?s:.+)/");
                // As in `until_close`: the text and the start of the tag are one lexeme.
                self.rule("OPEN", "/(?s:.*)\\n\\n</");
                let block = format!("{before}OPEN {tag} \" calls>\\n\" calls");
                self.rule("start", &format!("{before}TEXT? | {block}"));
            }
            (ToolChoice::Auto, None) => {
                let tag = format!("<{DSML} calls>");
                self.rule("TEXT", &format!("/(?s:.*)/ & ~/(?s:.*){tag}(?s:.*)/"));
                self.rule("ANY", "/(?s:.*)/");
                self.rule(&format!("open[suffix={}]", quote(&format!("\n\n{tag}\n"))), "ANY");
                self.rule("start", "TEXT | open calls");
            }
        }
    }

    fn tool(&mut self, i: usize, tool: &Tool) -> Result<(), CompileError> {
        let open = quote(&format!(" invoke name=\"{}\">\n", tool.name));
        let close = self.tagged("\n</", " invoke>");
        self.rule(&format!("call_{i}"), &format!("{open} arguments_{i} {close}"));
        if tool.strict {
            self.strict(i, &tool.parameters)
        } else {
            if !self.has_any_parameter {
                self.has_any_parameter = true;
                self.any_parameter();
            }
            let first = self.tagged("<", "");
            let next = self.tagged("\n<", "");
            let list = format!("(\"\" | {first} any_parameter ({next} any_parameter)*)");
            self.rule(&format!("arguments_{i}"), &list);
            Ok(())
        }
    }

    /// A parameter of any name and value, after the tag of its opening.
    fn any_parameter(&mut self) {
        self.until_close("any_text", "/(?s:.*)/");
        let close = self.tagged("</", " parameter>");
        self.rule("any_parameter", "KEY_TEXT any_text | KEY_JSON any_json");
        self.rule("KEY_TEXT", r#"/ parameter name="[^"]+" string="true">/"#);
        self.rule("KEY_JSON", r#"/ parameter name="[^"]+" string="false">/"#);
        let types = json!({"type": Types::ALL.without(Types::STRING).names()});
        self.rule("any_json", &format!("%json {types} {close}"));
    }

    /// The arguments of a strict tool: each parameter at most once, every required one, in any
    /// order.
    fn strict(&mut self, i: usize, parameters: &Value) -> Result<(), CompileError> {
        let shape = parameters_shape(parameters, self.max_nodes)?;
        let extra = match &shape.additional {
            Some(schema) => Some(self.extra(i, schema, parameters, &shape)?),
            None => None,
        };
        for (j, (name, schema)) in shape.properties.iter().enumerate() {
            let value = format!("value_{i}_{j}");
            let options = self.value(&value, name, schema, parameters)?;
            self.rule(&format!("parameter_{i}_{j}"), &options.join(" | "));
        }
        let first = self.tagged("<", "");
        let next = self.tagged("\n<", "");
        let needed = shape.required;
        let count = shape.properties.len();
        let arguments = format!("arguments_{i}");
        if count == 0 {
            match extra {
                Some(extra) => {
                    self.rule(&arguments, &format!("(\"\" | {first} {extra} ({next} {extra})*)"))
                }
                None => self.rule(&arguments, "\"\""),
            }
            return Ok(());
        }
        if count > MAX_UNORDERED {
            let reason = format!("{count} properties; at most {MAX_UNORDERED} can be enforced");
            return Err(CompileError::Unsupported {
                path: "/properties".into(),
                keyword: "properties".into(),
                reason,
            });
        }
        // Bits 0..needed are the required ones. The first parameter has no line break before it.
        let mut starts = Vec::new();
        let mut steps = Vec::new();
        for j in 0..count {
            starts.push(format!("{first} parameter_{i}_{j} rest_{i}::0x{:x}", 1u64 << j));
            steps.push(format!(
                "{next} parameter_{i}_{j} rest_{i}::set_bit({j}) %if bit_clear({j})"
            ));
        }
        if let Some(extra) = &extra {
            starts.push(format!("{first} {extra} rest_{i}::0x0"));
            steps.push(format!("{next} {extra} rest_{i}::_"));
        }
        if needed == 0 {
            starts.push("\"\"".to_owned());
            steps.push("\"\"".to_owned());
        } else {
            steps.push(format!("\"\" %if is_ones([0:{needed}])"));
        }
        self.rule(&arguments, &starts.join("\n    | "));
        self.rule(&format!("rest_{i}::_"), &steps.join("\n    | "));
        Ok(())
    }

    /// Rule of a parameter that `properties` does not name.
    fn extra(
        &mut self,
        i: usize,
        schema: &Value,
        root: &Value,
        shape: &Shape,
    ) -> Result<String, CompileError> {
        let taken: Vec<String> = shape.properties.iter().map(|(name, _)| quote(name)).collect();
        let key = format!("EXTRA_{i}");
        if taken.is_empty() {
            self.rule(&key, r#"/[^"]+/"#);
        } else {
            self.rule(&key, &format!(r#"/[^"]+/ & ~({})"#, taken.join(" | ")));
        }
        let name = format!("extra_{i}");
        let mut options = Vec::new();
        for (flag, body) in self.value_bodies(&name, schema, root, "/additionalProperties")? {
            let head = format!("{}_HEAD_{}", key, flag.to_uppercase());
            self.rule(&head, &format!(r#"" parameter name=\"" {key} "\" string=\"{flag}\">""#));
            options.push(format!("{head} {body}"));
        }
        self.rule(&name, &options.join(" | "));
        Ok(name)
    }

    /// Alternatives of one named parameter, after the tag of its opening.
    fn value(
        &mut self,
        rule: &str,
        name: &str,
        schema: &Value,
        root: &Value,
    ) -> Result<Vec<String>, CompileError> {
        let path = format!("/properties/{}", name.replace('~', "~0").replace('/', "~1"));
        let bodies = self.value_bodies(rule, schema, root, &path)?;
        let head = |flag: &str| quote(&format!(" parameter name=\"{name}\" string=\"{flag}\">"));
        Ok(bodies.into_iter().map(|(flag, body)| format!("{} {body}", head(flag))).collect())
    }

    /// (value of the `string` attribute, rule of the value with its closing tag)
    fn value_bodies(
        &mut self,
        rule: &str,
        schema: &Value,
        root: &Value,
        path: &str,
    ) -> Result<Vec<(&'static str, String)>, CompileError> {
        // Checks the schema whole, with its strings, before it is taken apart.
        normalize(root, schema, path, self.max_nodes)?;
        let types = Document { root }.types(schema);
        let mut bodies = Vec::new();
        if let Some(text) = raw::terminal(root, schema, path)? {
            let name = format!("{rule}_text");
            self.until_close(&name, &text);
            bodies.push(("true", name));
        }
        let others = types.without(Types::STRING);
        if !others.is_empty() {
            let part = json!({"allOf": [schema, {"type": others.names()}]});
            let part = normalize(root, &part, path, self.max_nodes)?;
            let name = format!("{rule}_json");
            let close = self.tagged("</", " parameter>");
            self.rule(&name, &format!("%json {part} {close}"));
            bodies.push(("false", name));
        }
        if bodies.is_empty() {
            let reason = "no value can match".to_owned();
            return Err(CompileError::Contradiction { path: path.to_owned(), reason });
        }
        Ok(bodies)
    }
}

/// The parameters of a tool, required ones first.
struct Shape {
    properties: Vec<(String, Value)>,
    required: usize,
    additional: Option<Value>,
}

fn parameters_shape(parameters: &Value, max_nodes: usize) -> Result<Shape, CompileError> {
    normalize(parameters, parameters, "", max_nodes)?;
    let unsupported = |keyword: &str, reason: &str| CompileError::Unsupported {
        path: String::new(),
        keyword: keyword.to_owned(),
        reason: reason.to_owned(),
    };
    // Resolve a reference at the root: generators write {"$ref": "#/$defs/Arguments"}.
    let mut schema = parameters;
    for _ in 0..8 {
        let Some(reference) = schema.get("$ref").and_then(Value::as_str) else { break };
        let pointer = Document::pointer(reference).unwrap_or_default();
        schema = parameters.pointer(&pointer).unwrap_or(&Value::Null);
    }
    let empty = serde_json::Map::new();
    let map = match schema {
        Value::Object(map) => map,
        Value::Bool(true) => &empty,
        _ => return Err(unsupported("type", "arguments are an object")),
    };
    for keyword in [
        "anyOf",
        "oneOf",
        "allOf",
        "enum",
        "const",
        "patternProperties",
        "minProperties",
        "maxProperties",
    ] {
        if map.contains_key(keyword) {
            return Err(unsupported(
                keyword,
                "the arguments of a strict tool are listed in properties",
            ));
        }
    }
    if (Document { root: parameters }).types(schema).and(Types::OBJECT).is_empty() {
        return Err(unsupported("type", "arguments are an object"));
    }
    let needed: Vec<&str> = map
        .get("required")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let additional = match map.get("additionalProperties") {
        Some(Value::Bool(false)) => None,
        Some(schema) => Some(schema.clone()),
        None => Some(Value::Bool(true)),
    };
    let named = map.get("properties").and_then(Value::as_object).unwrap_or(&empty);
    if let Some(bad) = named.keys().find(|k| k.is_empty() || k.contains(['"', '\n'])) {
        let reason = format!("name {bad:?} must not be empty or contain quotes or line breaks");
        return Err(unsupported("properties", &reason));
    }
    let mut properties = Vec::new();
    for key in &needed {
        let Some(schema) = named.get(*key).or(additional.as_ref()) else {
            let reason = format!("{key:?} is required but not among the properties");
            return Err(CompileError::Contradiction { path: String::new(), reason });
        };
        if properties.iter().all(|(name, _): &(String, Value)| name != key) {
            properties.push(((*key).to_owned(), schema.clone()));
        }
    }
    let required = properties.len();
    for (key, schema) in named {
        // A property that may never appear is a taken name without values.
        if !needed.contains(&key.as_str()) && *schema != Value::Bool(false) {
            properties.push((key.clone(), schema.clone()));
        }
    }
    Ok(Shape { properties, required, additional })
}
