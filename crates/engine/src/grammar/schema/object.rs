//! Keywords of objects.

use serde_json::{Map, Value};

use super::{Walk, at, check_pattern, contradiction, counts, malformed, unsupported};
use crate::grammar::error::CompileError;

impl<'a> Walk<'a> {
    pub(super) fn objects(
        &mut self,
        map: &'a Map<String, Value>,
        path: &str,
        depth: usize,
        out: &mut Map<String, Value>,
    ) -> Result<(), CompileError> {
        let required = required(map, path)?;
        for keyword in ["properties", "patternProperties"] {
            let Some(value) = map.get(keyword) else { continue };
            let members = value
                .as_object()
                .ok_or_else(|| malformed(path, keyword, "an object of schemas", value))?;
            let base = at(path, keyword);
            let mut schemas = Map::new();
            for (key, schema) in members {
                let path = at(&base, key);
                if keyword == "patternProperties" {
                    check_pattern(key, &path)?;
                }
                schemas.insert(key.clone(), self.schema(schema, &path, depth + 1)?);
            }
            out.insert(keyword.into(), Value::Object(schemas));
        }
        if let Some(value) = map.get("additionalProperties") {
            let schema = self.schema(value, &at(path, "additionalProperties"), depth + 1)?;
            out.insert("additionalProperties".into(), schema);
        }
        if let Some(value) = map.get("required") {
            out.insert("required".into(), value.clone());
        }
        sizes(map, path, &required, out)
    }
}

fn required<'a>(map: &'a Map<String, Value>, path: &str) -> Result<Vec<&'a str>, CompileError> {
    let Some(value) = map.get("required") else { return Ok(Vec::new()) };
    let must = "a list of property names";
    let list = value.as_array().ok_or_else(|| malformed(path, "required", must, value))?;
    let mut names = Vec::new();
    for name in list {
        let name = name.as_str().ok_or_else(|| malformed(path, "required", must, name))?;
        if !names.contains(&name) {
            names.push(name);
        }
    }
    Ok(names)
}

/// `minProperties` and `maxProperties`: the library counts names, so it can only do so where the
/// choice is simple, and it does not see when one name is written twice.
fn sizes(
    map: &Map<String, Value>,
    path: &str,
    required: &[&str],
    out: &mut Map<String, Value>,
) -> Result<(), CompileError> {
    let mut bounds = Map::new();
    counts(map, path, "minProperties", "maxProperties", &mut bounds)?;
    let bound = |keyword: &str| bounds.get(keyword).and_then(Value::as_u64).map(|n| n as usize);
    let needed = required.len();
    // Bounds that the required properties already meet say nothing more.
    let least = bound("minProperties").filter(|n| *n > needed);
    let most = bound("maxProperties");
    if most.is_some_and(|n| n < needed) {
        return Err(contradiction(
            path,
            format!("{needed} properties are required, over maxProperties"),
        ));
    }
    let closed = map.get("additionalProperties") == Some(&Value::Bool(false))
        && map.get("patternProperties").is_none();
    let names = map.get("properties").and_then(Value::as_object);
    let optional =
        names.map_or(0, |p| p.keys().filter(|k| !required.contains(&k.as_str())).count());
    let most = most.filter(|n| !closed || *n < needed + optional);
    if least.is_some_and(|n| closed && n > needed + optional) {
        return Err(contradiction(
            path,
            "minProperties is over the number of properties".to_owned(),
        ));
    }
    let more = least.map_or(0, |n| n - needed);
    let room = most.map(|n| n - needed);
    let enforced = if optional > 0 {
        (least.is_none() && most.is_none()) || (closed && more <= 1 && room.is_none_or(|r| r == 1))
    } else {
        more <= 1
    };
    if !enforced {
        let keyword = if least.is_some() { "minProperties" } else { "maxProperties" };
        let reason = "it is enforced only where every listed property is required, or as \"at least \
                      one\" or \"at most one\" of a closed list; list them in required";
        return Err(unsupported(path, keyword, reason));
    }
    for (keyword, value) in [("minProperties", least), ("maxProperties", most)] {
        if let Some(value) = value {
            out.insert(keyword.into(), value.into());
        }
    }
    Ok(())
}
