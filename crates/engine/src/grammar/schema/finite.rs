//! References that never end.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::Definition;
use crate::grammar::error::CompileError;

/// Refuses a rewritten schema in which some reference leads back to itself without a value in
/// between, or in which something can only be written by an infinite document.
///
/// Both would be accepted by the library: the first as a rule without words, the second as one
/// that cannot be completed once it was begun.
pub(super) fn check(
    schema: &Value,
    path: &str,
    definitions: &[Definition],
) -> Result<(), CompileError> {
    let index: HashMap<&str, usize> =
        definitions.iter().enumerate().map(|(i, (name, _, _))| (name.as_str(), i)).collect();
    let graph = Graph { index, definitions };
    if let Some(i) = graph.unguarded_loop() {
        return Err(CompileError::Endless { path: definitions[i].1.clone() });
    }
    let mut done = vec![false; definitions.len()];
    loop {
        let before = done.iter().filter(|d| **d).count();
        for (i, (_, _, schema)) in definitions.iter().enumerate() {
            done[i] = done[i] || graph.ends(schema, &done);
        }
        if done.iter().filter(|d| **d).count() == before {
            break;
        }
    }
    // A definition that is `false` ends nowhere either, but that is a contradiction, told later.
    let endless = |i: &usize| !done[*i] && definitions[*i].2 != Value::Bool(false);
    if let Some(i) = (0..definitions.len()).find(endless) {
        return Err(CompileError::Endless { path: definitions[i].1.clone() });
    }
    if !definitions.is_empty() && *schema != Value::Bool(false) && !graph.ends(schema, &done) {
        return Err(CompileError::Endless { path: path.to_owned() });
    }
    Ok(())
}

struct Graph<'a> {
    index: HashMap<&'a str, usize>,
    definitions: &'a [Definition],
}

impl Graph<'_> {
    fn target(&self, map: &Map<String, Value>) -> Option<usize> {
        let name = map.get("$ref")?.as_str()?.strip_prefix("#/$defs/")?;
        self.index.get(name).copied()
    }

    /// A definition that reaches itself through references and combinations alone.
    fn unguarded_loop(&self) -> Option<usize> {
        // 0 new, 1 on the current path, 2 finished.
        let mut colour = vec![0u8; self.definitions.len()];
        (0..self.definitions.len()).find_map(|i| self.visit(i, &mut colour))
    }

    fn visit(&self, start: usize, colour: &mut [u8]) -> Option<usize> {
        // An explicit stack: chains of references may be long.
        let mut stack = vec![(start, self.direct(start), 0)];
        if colour[start] != 0 {
            return None;
        }
        colour[start] = 1;
        while let Some((node, targets, next)) = stack.last_mut() {
            let Some(&target) = targets.get(*next) else {
                colour[*node] = 2;
                stack.pop();
                continue;
            };
            *next += 1;
            match colour[target] {
                0 => {
                    colour[target] = 1;
                    stack.push((target, self.direct(target), 0));
                }
                1 => return Some(target),
                _ => {}
            }
        }
        None
    }

    /// What a definition refers to at its own level.
    fn direct(&self, i: usize) -> Vec<usize> {
        let mut found = Vec::new();
        let mut rest = vec![&self.definitions[i].2];
        while let Some(schema) = rest.pop() {
            let Value::Object(map) = schema else { continue };
            found.extend(self.target(map));
            for keyword in ["anyOf", "allOf"] {
                rest.extend(map.get(keyword).and_then(Value::as_array).into_iter().flatten());
            }
        }
        found
    }

    /// Whether some finite value can match, given which definitions are known to have one.
    /// Contradictions are not looked for; only references decide.
    fn ends(&self, schema: &Value, done: &[bool]) -> bool {
        let Value::Object(map) = schema else {
            return *schema != Value::Bool(false);
        };
        let list = |keyword: &str| map.get(keyword).and_then(Value::as_array);
        self.target(map).is_none_or(|i| done[i])
            && list("anyOf").is_none_or(|l| l.iter().any(|s| self.ends(s, done)))
            && list("allOf").is_none_or(|l| l.iter().all(|s| self.ends(s, done)))
            && (map.contains_key("enum") || map.contains_key("const") || self.type_ends(map, done))
    }

    fn type_ends(&self, map: &Map<String, Value>, done: &[bool]) -> bool {
        let ends = |name: &str| match name {
            "object" => self.object_ends(map, done),
            "array" => self.array_ends(map, done),
            _ => true,
        };
        match map.get("type") {
            Some(Value::String(name)) => ends(name),
            Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).any(ends),
            _ => true,
        }
    }

    fn object_ends(&self, map: &Map<String, Value>, done: &[bool]) -> bool {
        let properties = map.get("properties").and_then(Value::as_object);
        let others = map.get("additionalProperties");
        let mut required = map.get("required").and_then(Value::as_array).into_iter().flatten();
        required.all(|key| {
            let own = key.as_str().and_then(|key| properties?.get(key));
            own.or(others).is_none_or(|s| *s == Value::Bool(false) || self.ends(s, done))
        })
    }

    fn array_ends(&self, map: &Map<String, Value>, done: &[bool]) -> bool {
        let least = map.get("minItems").and_then(Value::as_u64).unwrap_or(0) as usize;
        let prefix =
            map.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let ends = |s: &Value| *s == Value::Bool(false) || self.ends(s, done);
        prefix.iter().take(least).all(ends)
            && (least <= prefix.len() || map.get("items").is_none_or(ends))
    }
}
