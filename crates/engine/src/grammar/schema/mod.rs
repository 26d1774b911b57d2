//! JSON schemas: checked keyword by keyword, then written anew in the part of 2020-12 that the
//! grammar library enforces.
//!
//! Nothing is left to the library's tolerance: a keyword is enforced, is an annotation of the
//! list here, or is refused by name with its path.

mod finite;
mod formats;
mod numbers;
mod object;
mod shape;

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::error::CompileError;
pub(super) use formats::string_format;
pub(super) use shape::{Document, Types};

/// Deepest nesting of schemas.
const MAX_DEPTH: usize = 64;
/// Largest length and item count in a bound.
const MAX_COUNT: u64 = 1 << 20;
/// White space between two JSON tokens: a space, or a new line and its indentation. A model that
/// could write any would pad until its tokens are used up.
const WHITE_SPACE: &str = r"\x20|\x0D?\x0A[\x20\x09]{0,64}";

/// Keywords without effect on what matches. Every `x-...` but the library's own is one too.
const ANNOTATIONS: [&str; 24] = [
    "$schema",
    "$id",
    "id",
    "$anchor",
    "$comment",
    "$defs",
    "definitions",
    "title",
    "description",
    "default",
    "example",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "contentMediaType",
    "contentEncoding",
    "discriminator",
    "externalDocs",
    "xml",
    "markdownDescription",
    "enumDescriptions",
    "enumNames",
    "$vocabulary",
];

/// Known keywords that cannot be enforced, and what to write instead.
const UNSUPPORTED: [(&str, &str); 19] = [
    ("not", "write the allowed values"),
    ("if", "write the cases with anyOf"),
    ("then", "write the cases with anyOf"),
    ("else", "write the cases with anyOf"),
    ("contains", "constrain every item with items"),
    ("minContains", "constrain every item with items"),
    ("maxContains", "constrain every item with items"),
    ("propertyNames", "use patternProperties with additionalProperties: false"),
    ("dependencies", "write the cases with anyOf"),
    ("dependentRequired", "write the cases with anyOf"),
    ("dependentSchemas", "write the cases with anyOf"),
    ("unevaluatedItems", "use items"),
    ("unevaluatedProperties", "use additionalProperties"),
    ("contentSchema", "leave it out"),
    ("$dynamicRef", "use $ref"),
    ("$dynamicAnchor", "use $ref"),
    ("$recursiveRef", "use $ref"),
    ("$recursiveAnchor", "use $ref"),
    ("nullable", "use type: [..., \"null\"]"),
];

/// Rewrites the schema at `start` for the library. References are resolved in `root`; `path` is
/// the JSON pointer of `start` for messages.
pub(super) fn normalize(
    root: &Value,
    start: &Value,
    path: &str,
    max_nodes: usize,
) -> Result<Value, CompileError> {
    let mut walk = Walk {
        document: Document { root },
        max_nodes,
        nodes: 0,
        names: HashMap::new(),
        pending: Vec::new(),
        definitions: Vec::new(),
    };
    let mut schema = walk.schema(start, path, 0)?;
    while let Some((pointer, from)) = walk.pending.pop() {
        let Some(target) = root.pointer(&pointer) else {
            let reason = "leads to nothing in the schema".to_owned();
            return Err(CompileError::UnknownRef {
                path: from,
                reference: format!("#{pointer}"),
                reason,
            });
        };
        let schema = walk.schema(target, &pointer, 0)?;
        walk.definitions.push((walk.names[&pointer].clone(), pointer, schema));
    }
    finite::check(&schema, path, &walk.definitions)?;
    if let Value::Object(map) = &mut schema {
        if !walk.definitions.is_empty() {
            let all = walk.definitions.into_iter().map(|(name, _, schema)| (name, schema));
            map.insert("$defs".into(), Value::Object(all.collect()));
        }
        map.insert("x-guidance".into(), json!({"whitespace_pattern": WHITE_SPACE}));
    }
    Ok(schema)
}

/// (name in the rewritten schema, pointer in the original, schema)
type Definition = (String, String, Value);

struct Walk<'a> {
    document: Document<'a>,
    max_nodes: usize,
    nodes: usize,
    /// Pointers that were referred to, and their names in the rewritten schema. Names are
    /// our own, so that no escaping in a pointer can be read differently twice.
    names: HashMap<String, String>,
    pending: Vec<(String, String)>,
    definitions: Vec<Definition>,
}

/// Path of a member, as a JSON pointer.
fn at(path: &str, key: impl std::fmt::Display) -> String {
    let key = key.to_string().replace('~', "~0").replace('/', "~1");
    format!("{path}/{key}")
}

fn malformed(path: &str, keyword: &str, must: &str, got: &Value) -> CompileError {
    let mut shown = got.to_string();
    if shown.len() > 60 {
        shown = shown.chars().take(60).chain("...".chars()).collect();
    }
    CompileError::Malformed {
        path: path.to_owned(),
        keyword: keyword.to_owned(),
        reason: format!("must be {must}, not {shown}"),
    }
}

fn unsupported(path: &str, keyword: &str, reason: impl Into<String>) -> CompileError {
    CompileError::Unsupported {
        path: path.to_owned(),
        keyword: keyword.to_owned(),
        reason: reason.into(),
    }
}

fn contradiction(path: &str, reason: String) -> CompileError {
    CompileError::Contradiction { path: path.to_owned(), reason }
}

impl<'a> Walk<'a> {
    fn schema(
        &mut self,
        schema: &'a Value,
        path: &str,
        depth: usize,
    ) -> Result<Value, CompileError> {
        self.nodes += 1;
        if self.nodes > self.max_nodes {
            let (size, limit) = (self.nodes, self.max_nodes);
            return Err(CompileError::TooBig { what: "schemas in the specification", size, limit });
        }
        if depth > MAX_DEPTH {
            return Err(CompileError::TooBig {
                what: "nesting of schemas",
                size: depth,
                limit: MAX_DEPTH,
            });
        }
        let map = match schema {
            Value::Bool(_) => return Ok(schema.clone()),
            Value::Object(map) => map,
            other => return Err(malformed(path, "", "an object or a boolean", other)),
        };
        self.check_keywords(map, path, depth)?;
        let mut out = Map::new();
        let types = types(map, path)?;
        if let Some(value) = map.get("type") {
            out.insert("type".into(), value.clone());
        }
        values(map, path, &mut out)?;
        let mut all = Vec::new();
        strings(map, types, path, &mut out, &mut all)?;
        numbers::rewrite(map, types, path, &mut out)?;
        self.arrays(map, path, depth, &mut out)?;
        self.objects(map, path, depth, &mut out)?;
        self.combinations(map, path, depth, &mut out, &mut all)?;
        if !all.is_empty() {
            out.insert("allOf".into(), Value::Array(all));
        }
        Ok(Value::Object(out))
    }

    fn check_keywords(
        &self,
        map: &Map<String, Value>,
        path: &str,
        depth: usize,
    ) -> Result<(), CompileError> {
        const ENFORCED: [&str; 28] = [
            "type",
            "enum",
            "const",
            "minLength",
            "maxLength",
            "pattern",
            "format",
            "minimum",
            "maximum",
            "exclusiveMinimum",
            "exclusiveMaximum",
            "multipleOf",
            "items",
            "prefixItems",
            "additionalItems",
            "minItems",
            "maxItems",
            "uniqueItems",
            "properties",
            "patternProperties",
            "additionalProperties",
            "required",
            "minProperties",
            "maxProperties",
            "anyOf",
            "oneOf",
            "allOf",
            "$ref",
        ];
        for (keyword, value) in map {
            if let Some((_, instead)) = UNSUPPORTED.iter().find(|(k, _)| k == keyword) {
                return Err(unsupported(path, keyword, *instead));
            }
            if keyword == "$id"
                && depth > 0
                && value.as_str().is_some_and(|id| !id.starts_with('#'))
            {
                return Err(unsupported(path, keyword, "only the root may carry one"));
            }
            let annotation = ANNOTATIONS.contains(&keyword.as_str())
                || (keyword.starts_with("x-") && keyword != "x-guidance");
            if !annotation && !ENFORCED.contains(&keyword.as_str()) {
                return Err(unsupported(path, keyword, "it is not a known keyword"));
            }
            if keyword == "uniqueItems" && *value != Value::Bool(false) {
                return Err(match value {
                    Value::Bool(_) => unsupported(
                        path,
                        keyword,
                        "items cannot be compared while they are written",
                    ),
                    other => malformed(path, keyword, "a boolean", other),
                });
            }
        }
        Ok(())
    }

    fn list(
        &mut self,
        value: &'a Value,
        path: &str,
        keyword: &str,
        depth: usize,
    ) -> Result<Vec<Value>, CompileError> {
        let list = value.as_array().filter(|list| !list.is_empty()).ok_or_else(|| {
            malformed(path, keyword, "a list of schemas with at least one entry", value)
        })?;
        let base = at(path, keyword);
        list.iter().enumerate().map(|(i, s)| self.schema(s, &at(&base, i), depth + 1)).collect()
    }

    fn arrays(
        &mut self,
        map: &'a Map<String, Value>,
        path: &str,
        depth: usize,
        out: &mut Map<String, Value>,
    ) -> Result<(), CompileError> {
        counts(map, path, "minItems", "maxItems", out)?;
        // Before 2020-12 a list under "items" is what "prefixItems" is now.
        let old = matches!(map.get("items"), Some(Value::Array(_)));
        let (prefix, rest) =
            if old { ("items", "additionalItems") } else { ("prefixItems", "items") };
        if let Some(value) = map.get(prefix) {
            let list = self.list(value, path, prefix, depth)?;
            out.insert("prefixItems".into(), list.into());
        }
        if let Some(value) = map.get(rest) {
            let schema = self.schema(value, &at(path, rest), depth + 1)?;
            out.insert("items".into(), schema);
        }
        Ok(())
    }

    fn combinations(
        &mut self,
        map: &'a Map<String, Value>,
        path: &str,
        depth: usize,
        out: &mut Map<String, Value>,
        all: &mut Vec<Value>,
    ) -> Result<(), CompileError> {
        if let Some(value) = map.get("allOf") {
            all.extend(self.list(value, path, "allOf", depth)?);
        }
        if let Some(value) = map.get("anyOf") {
            let list = self.list(value, path, "anyOf", depth)?;
            out.insert("anyOf".into(), list.into());
        }
        if let Some(value) = map.get("oneOf") {
            let list = self.list(value, path, "oneOf", depth)?;
            self.check_exclusive(map, value, path)?;
            // Exclusive alternatives: "exactly one" and "at least one" are the same.
            if out.contains_key("anyOf") {
                all.push(json!({ "anyOf": list }));
            } else {
                out.insert("anyOf".into(), list.into());
            }
        }
        if let Some(value) = map.get("$ref") {
            let reference =
                value.as_str().ok_or_else(|| malformed(path, "$ref", "a string", value))?;
            let pointer =
                Document::pointer(reference).map_err(|reason| CompileError::UnknownRef {
                    path: path.to_owned(),
                    reference: reference.to_owned(),
                    reason: reason.to_owned(),
                })?;
            let next = format!("d{}", self.names.len());
            let name = self.names.entry(pointer.clone()).or_insert_with(|| {
                self.pending.push((pointer, path.to_owned()));
                next
            });
            out.insert("$ref".into(), format!("#/$defs/{name}").into());
        }
        Ok(())
    }

    /// Refuses `oneOf` whose alternatives could match together: that nothing else matches
    /// cannot be seen while a document is written.
    fn check_exclusive(
        &self,
        map: &'a Map<String, Value>,
        value: &'a Value,
        path: &str,
    ) -> Result<(), CompileError> {
        let Some(list) = value.as_array() else { return Ok(()) };
        // What the parent demands holds in every alternative.
        let with_parent = |schema: &Value| {
            let Value::Object(own) = schema else { return schema.clone() };
            let mut own = own.clone();
            for keyword in ["type", "required"] {
                if let (false, Some(value)) = (own.contains_key(keyword), map.get(keyword)) {
                    own.insert(keyword.into(), value.clone());
                }
            }
            Value::Object(own)
        };
        let branches: Vec<Value> = list.iter().map(with_parent).collect();
        let document = Document { root: self.document.root };
        for i in 0..branches.len() {
            for j in 0..i {
                if !document_disjoint(&document, &branches[j], &branches[i]) {
                    let reason = format!(
                        "alternatives {j} and {i} may both match; give each a required property \
                         with its own const, or use anyOf"
                    );
                    return Err(unsupported(path, "oneOf", reason));
                }
            }
        }
        Ok(())
    }
}

/// [`Document::disjoint`] for schemas that live less long than the document.
fn document_disjoint<'b>(document: &Document<'b>, a: &'b Value, b: &'b Value) -> bool {
    document.disjoint(a, b)
}

/// The types that `type` names.
fn types(map: &Map<String, Value>, path: &str) -> Result<Types, CompileError> {
    const MUST: &str =
        "one of null, boolean, integer, number, string, array, object, or a list of these";
    let Some(value) = map.get("type") else { return Ok(Types::ALL) };
    let names = match value {
        Value::String(_) => std::slice::from_ref(value),
        Value::Array(list) if !list.is_empty() => list.as_slice(),
        _ => return Err(malformed(path, "type", MUST, value)),
    };
    let mut types = Types::NONE;
    for name in names {
        let one = name.as_str().and_then(Types::of_name);
        types = types.or(one.ok_or_else(|| malformed(path, "type", MUST, name))?);
    }
    Ok(types)
}

fn values(
    map: &Map<String, Value>,
    path: &str,
    out: &mut Map<String, Value>,
) -> Result<(), CompileError> {
    if let Some(value) = map.get("enum") {
        let list =
            value.as_array().ok_or_else(|| malformed(path, "enum", "a list of values", value))?;
        if list.is_empty() {
            return Err(CompileError::EmptyEnum { path: path.to_owned() });
        }
        list.iter().try_for_each(|v| numbers::check_exact(v, path, "enum"))?;
        out.insert("enum".into(), value.clone());
    }
    if let Some(value) = map.get("const") {
        numbers::check_exact(value, path, "const")?;
        out.insert("const".into(), value.clone());
    }
    Ok(())
}

fn strings(
    map: &Map<String, Value>,
    types: Types,
    path: &str,
    out: &mut Map<String, Value>,
    all: &mut Vec<Value>,
) -> Result<(), CompileError> {
    counts(map, path, "minLength", "maxLength", out)?;
    if let Some(value) = map.get("pattern") {
        let pattern =
            value.as_str().ok_or_else(|| malformed(path, "pattern", "a string", value))?;
        check_pattern(pattern, path)?;
        out.insert("pattern".into(), value.clone());
    }
    if let Some(value) = map.get("format") {
        let name = value.as_str().ok_or_else(|| malformed(path, "format", "a string", value))?;
        match string_format(name) {
            Some(expression) => {
                let pattern = json!(format!("^(?:{expression})$"));
                if out.contains_key("pattern") {
                    all.push(json!({ "pattern": pattern }));
                } else {
                    out.insert("pattern".into(), pattern);
                }
            }
            None if types == Types::NUMBER && formats::number_format(name).is_some() => {}
            None => return Err(unsupported(path, "format", format!("{name:?} is not enforced"))),
        }
    }
    Ok(())
}

/// Refuses a pattern that the library cannot read, while its path is known.
pub(super) fn check_pattern(pattern: &str, path: &str) -> Result<(), CompileError> {
    let refused = |reason: String| CompileError::BadPattern {
        path: path.to_owned(),
        pattern: pattern.to_owned(),
        reason,
    };
    super::guard::caught(|| {
        let expression = llguidance::regex_to_lark(pattern, "dw");
        let mut builder = llguidance::derivre::RegexBuilder::new();
        builder.mk_regex_for_serach(&expression).map_err(super::guard::text)
    })
    .map_err(refused)?;
    Ok(())
}

/// A pair of non-negative bounds.
fn counts(
    map: &Map<String, Value>,
    path: &str,
    low: &str,
    high: &str,
    out: &mut Map<String, Value>,
) -> Result<(), CompileError> {
    let mut read = |keyword: &str| -> Result<Option<u64>, CompileError> {
        let Some(value) = map.get(keyword) else { return Ok(None) };
        // 3.0 is an integer too.
        let count = value.as_f64().filter(|f| f.fract() == 0.0 && *f >= 0.0);
        let count =
            count.ok_or_else(|| malformed(path, keyword, "a non-negative integer", value))?;
        if count > MAX_COUNT as f64 {
            return Err(unsupported(path, keyword, format!("{count} is over {MAX_COUNT}")));
        }
        out.insert(keyword.to_owned(), (count as u64).into());
        Ok(Some(count as u64))
    };
    match (read(low)?, read(high)?) {
        (Some(a), Some(b)) if a > b => {
            Err(contradiction(path, format!("{low} {a} is over {high} {b}")))
        }
        _ => Ok(()),
    }
}
