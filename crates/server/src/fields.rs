//! Reading a JSON object field by field, so that nothing in it is ignored in silence.

use crate::error::ApiError;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// A JSON object whose fields are taken out one by one. What nobody took is refused by name
/// ([`Fields::finish`]). A field that is `null` counts as absent.
#[derive(Debug)]
pub struct Fields {
    map: Map<String, Value>,
    /// Path of the object in the body, with a dot at its end; empty for the body itself.
    path: String,
}

impl Fields {
    /// The fields of a body.
    pub fn of_body(body: &[u8]) -> Result<Self, ApiError> {
        let invalid = |message: String| ApiError::Invalid { param: None, message };
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => Ok(Self { map, path: String::new() }),
            Ok(_) => Err(invalid("the body must be a JSON object".into())),
            Err(error) => Err(invalid(format!("the body is not JSON: {error}"))),
        }
    }

    /// The fields of an object at `path`.
    pub fn of_value(value: Value, path: &str) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { map, path: format!("{path}.") }),
            _ => Err(ApiError::invalid(path, format!("{path} must be an object"))),
        }
    }

    /// Path of field `name` in the body.
    pub fn path(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// An error that names field `name`.
    pub fn invalid(&self, name: &str, message: impl std::fmt::Display) -> ApiError {
        let path = self.path(name);
        let message = format!("{path}: {message}");
        ApiError::Invalid { param: Some(path), message }
    }

    /// A field that stays.
    pub fn peek(&self, name: &str) -> Option<&Value> {
        self.map.get(name)
    }

    /// Takes a field as it is.
    pub fn value(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name).filter(|value| !value.is_null())
    }

    /// Takes a field of some type.
    pub fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        serde_json::from_value(value).map(Some).map_err(|error| self.invalid(name, error))
    }

    /// Takes a field that must be there.
    pub fn require<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, ApiError> {
        self.take(name)?.ok_or_else(|| self.invalid(name, "this field is required"))
    }

    /// Takes a field that is an object.
    pub fn object(&mut self, name: &str) -> Result<Option<Fields>, ApiError> {
        let path = self.path(name);
        self.value(name).map(|value| Fields::of_value(value, &path)).transpose()
    }

    /// Takes fields that describe the caller or the bill and never change an answer.
    pub fn discard(&mut self, names: &[&str]) {
        for name in names {
            self.map.remove(*name);
        }
    }

    /// Refuses fields, for the reason given, unless they hold nothing: `null`, `false`, `[]`, `""`.
    /// An empty object may ask for something as it usually is.
    pub fn refuse(&mut self, names: &[&str], reason: &str) -> Result<(), ApiError> {
        for name in names {
            if let Some(value) = self.value(name).filter(|value| !is_empty(value)) {
                let value: String = value.to_string().chars().take(60).collect();
                return Err(self.invalid(name, format!("{value} is not supported: {reason}")));
            }
        }
        Ok(())
    }

    /// Ends the reading: every field that is left is an error.
    pub fn finish(mut self) -> Result<(), ApiError> {
        let left: Vec<String> = self.map.keys().cloned().collect();
        for name in left {
            if self.value(&name).is_some() {
                return Err(self.invalid(&name, "this field is not known here"));
            }
        }
        Ok(())
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(json: &str) -> Fields {
        Fields::of_body(json.as_bytes()).expect("an object")
    }

    fn param(error: ApiError) -> String {
        match error {
            ApiError::Invalid { param, .. } => param.unwrap_or_default(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_nobody_took_is_refused_by_name() {
        let mut f = fields(r#"{"a": 1, "b": null, "c": {"d": 2}}"#);
        assert_eq!(f.take::<u32>("a").expect("a number"), Some(1));
        let mut c = f.object("c").expect("an object").expect("there");
        assert_eq!(param(c.take::<String>("d").expect_err("no text")), "c.d");
        f.finish().expect("b is null");
        assert_eq!(param(fields(r#"{"x": 1}"#).finish().expect_err("left")), "x");
        assert_eq!(param(fields("{}").require::<u32>("n").expect_err("missing")), "n");
    }

    #[test]
    fn empty_values_are_no_reason_to_refuse() {
        let mut f = fields(r#"{"audio": null, "functions": [], "store": false}"#);
        f.refuse(&["audio", "functions", "store"], "no").expect("all empty");
        for filled in [r#"{"functions": [1]}"#, r#"{"functions": {}}"#] {
            let refused = fields(filled).refuse(&["functions"], "no");
            assert_eq!(param(refused.expect_err("filled")), "functions");
        }
    }

    #[test]
    fn bodies_must_be_objects() {
        assert!(Fields::of_body(b"[]").is_err());
        assert!(Fields::of_body(b"{").is_err());
        assert!(Fields::of_body("[".repeat(100_000).as_bytes()).is_err());
    }
}
