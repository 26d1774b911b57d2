//! Questions about schemas as written: what a reference leads to, which types and values a schema
//! can have, whether two can match the same value.

use serde_json::{Map, Value};

/// Nesting to which questions are followed; deeper, the answer is "cannot tell".
const DEPTH: usize = 16;

/// Set of JSON types, one bit each. Integers count as numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::grammar) struct Types(u8);

impl Types {
    pub const NONE: Self = Self(0);
    pub const ALL: Self = Self(63);
    pub const NUMBER: Self = Self(4);
    pub const STRING: Self = Self(8);
    pub const OBJECT: Self = Self(32);
    /// Names in the order of the bits.
    pub const NAMES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];

    pub fn of_name(name: &str) -> Option<Self> {
        let name = if name == "integer" { "number" } else { name };
        Self::NAMES.iter().position(|n| *n == name).map(|i| Self(1 << i))
    }

    pub fn of_value(value: &Value) -> Self {
        Self(match value {
            Value::Null => 1,
            Value::Bool(_) => 2,
            Value::Number(_) => 4,
            Value::String(_) => 8,
            Value::Array(_) => 16,
            Value::Object(_) => 32,
        })
    }

    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub fn names(self) -> Vec<&'static str> {
        (0..6).filter(|i| self.0 >> i & 1 == 1).map(|i| Self::NAMES[i]).collect()
    }
}

/// A document that references are resolved in.
#[derive(Debug, Clone, Copy)]
pub(in crate::grammar) struct Document<'a> {
    pub root: &'a Value,
}

impl<'a> Document<'a> {
    /// The JSON pointer of a reference inside the document, or why it is none.
    pub fn pointer(reference: &str) -> Result<String, &'static str> {
        let Some(fragment) = reference.strip_prefix('#') else {
            return Err(
                "points outside the schema; only references that start with \"#\" are followed",
            );
        };
        let decoded = percent_decode(fragment).ok_or("is not a valid URI fragment")?;
        if decoded.is_empty() || decoded.starts_with('/') {
            // "#/" is a common spelling of the root, though strictly a property named "".
            Ok(if decoded == "/" { String::new() } else { decoded })
        } else {
            Err("names an anchor; write it as a JSON pointer (\"#/$defs/...\")")
        }
    }

    fn follow(&self, reference: &Value) -> Option<&'a Value> {
        let pointer = Self::pointer(reference.as_str()?).ok()?;
        self.root.pointer(&pointer)
    }

    /// A set that holds every type that the schema can match.
    pub fn types(&self, schema: &'a Value) -> Types {
        self.types_to(schema, DEPTH)
    }

    fn types_to(&self, schema: &'a Value, depth: usize) -> Types {
        let map = match schema {
            Value::Bool(false) => return Types::NONE,
            Value::Object(map) if depth > 0 => map,
            _ => return Types::ALL,
        };
        let name = |v: &Value| v.as_str().and_then(Types::of_name).unwrap_or(Types::ALL);
        let mut types = match map.get("type") {
            Some(Value::Array(list)) => list.iter().map(name).fold(Types::NONE, Types::or),
            Some(one) => name(one),
            None => Types::ALL,
        };
        if let Some(value) = map.get("const") {
            types = types.and(Types::of_value(value));
        }
        if let Some(Value::Array(list)) = map.get("enum") {
            types = types.and(list.iter().map(Types::of_value).fold(Types::NONE, Types::or));
        }
        for keyword in ["anyOf", "oneOf"] {
            if let Some(Value::Array(list)) = map.get(keyword) {
                let any = list.iter().map(|s| self.types_to(s, depth - 1));
                types = types.and(any.fold(Types::NONE, Types::or));
            }
        }
        if let Some(Value::Array(list)) = map.get("allOf") {
            types = list.iter().map(|s| self.types_to(s, depth - 1)).fold(types, Types::and);
        }
        if let Some(target) = map.get("$ref").and_then(|r| self.follow(r)) {
            types = types.and(self.types_to(target, depth - 1));
        }
        types
    }

    /// Whether no value can match both schemas, as far as can be told.
    pub fn disjoint(&self, a: &'a Value, b: &'a Value) -> bool {
        self.disjoint_to(a, b, DEPTH)
    }

    fn disjoint_to(&self, a: &'a Value, b: &'a Value, depth: usize) -> bool {
        if depth == 0 {
            return false;
        }
        let common = self.types_to(a, depth).and(self.types_to(b, depth));
        if common.is_empty() {
            return true;
        }
        let (Some(map_a), Some(map_b)) = (a.as_object(), b.as_object()) else {
            return false;
        };
        // Every branch of a union, or one part of an intersection, has to be disjoint.
        for (map, other, keyword) in
            [(map_a, b, "anyOf"), (map_a, b, "oneOf"), (map_b, a, "anyOf"), (map_b, a, "oneOf")]
        {
            if let Some(Value::Array(list)) = map.get(keyword)
                && list.iter().all(|s| self.disjoint_to(s, other, depth - 1))
            {
                return true;
            }
        }
        for (map, other) in [(map_a, b), (map_b, a)] {
            let parts = map.get("allOf").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
            let target = map.get("$ref").and_then(|r| self.follow(r));
            if parts.iter().chain(target).any(|s| self.disjoint_to(s, other, depth - 1)) {
                return true;
            }
        }
        if let (Some(values_a), Some(values_b)) = (values(map_a), values(map_b)) {
            return !values_a.iter().any(|x| values_b.iter().any(|y| same(x, y)));
        }
        if common == Types::NUMBER {
            let ((low_a, high_a), (low_b, high_b)) = (range(map_a), range(map_b));
            return high_a < low_b || high_b < low_a;
        }
        common == Types::OBJECT && self.objects_disjoint(map_a, map_b, depth)
    }

    /// A property that one of them requires and that cannot match both.
    fn objects_disjoint(
        &self,
        a: &'a Map<String, Value>,
        b: &'a Map<String, Value>,
        depth: usize,
    ) -> bool {
        let property = |map: &'a Map<String, Value>, key: &str| map.get("properties")?.get(key);
        [a, b].iter().filter_map(|m| m.get("required")?.as_array()).flatten().any(|key| {
            let Some(key) = key.as_str() else { return false };
            match (property(a, key), property(b, key)) {
                (Some(x), Some(y)) => self.disjoint_to(x, y, depth - 1),
                _ => false,
            }
        })
    }
}

/// The finite list of values that `const` or `enum` leaves.
fn values(map: &Map<String, Value>) -> Option<Vec<&Value>> {
    match (map.get("const"), map.get("enum")) {
        (Some(value), _) => Some(vec![value]),
        (None, Some(Value::Array(list))) => Some(list.iter().collect()),
        _ => None,
    }
}

/// JSON equality: 1 and 1.0 are one number.
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(x), Some(y)) => x == y,
        _ => a == b,
    }
}

/// Smallest and largest number; exclusive bounds are moved inwards by the least step.
fn range(map: &Map<String, Value>) -> (f64, f64) {
    let get = |keyword: &str| map.get(keyword).and_then(Value::as_f64);
    let low = get("minimum").unwrap_or(f64::NEG_INFINITY);
    let high = get("maximum").unwrap_or(f64::INFINITY);
    let above = get("exclusiveMinimum").map_or(f64::NEG_INFINITY, f64::next_up);
    let below = get("exclusiveMaximum").map_or(f64::INFINITY, f64::next_down);
    (low.max(above), high.min(below))
}

fn percent_decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first == b'%' {
            let hex = std::str::from_utf8(rest.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(hex, 16).ok()?);
            rest = &rest[2..];
        } else {
            bytes.push(*first);
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn disjoint(a: Value, b: Value) -> bool {
        let root = json!({"$defs": {
            "cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
            "dog": {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]},
            "self": {"$ref": "#/$defs/self"}
        }, "a": a, "b": b});
        Document { root: &root }.disjoint(&root["a"], &root["b"])
    }

    #[test]
    fn what_can_be_told_apart() {
        let cat = json!({"$ref": "#/$defs/cat"});
        let dog = json!({"$ref": "#/$defs/dog"});
        assert!(disjoint(cat.clone(), dog.clone()));
        assert!(!disjoint(cat.clone(), cat.clone()));
        assert!(disjoint(json!({"anyOf": [dog, {"type": "null"}]}), cat));
        assert!(disjoint(json!({"type": "string"}), json!({"type": ["integer", "null"]})));
        assert!(!disjoint(json!({"type": "number"}), json!({"type": "integer"})));
        assert!(disjoint(json!({"const": 1}), json!({"enum": [2, "1"]})));
        assert!(!disjoint(json!({"const": 1}), json!({"enum": [1.0]})));
        let low = json!({"type": "integer", "maximum": 3});
        assert!(disjoint(low.clone(), json!({"type": "number", "exclusiveMinimum": 3})));
        assert!(!disjoint(low, json!({"type": "number", "minimum": 3})));
        let circle = json!({"$ref": "#/$defs/self"});
        assert!(!disjoint(circle.clone(), circle));
        assert!(!disjoint(json!({}), json!({"type": "string"})));
    }

    #[test]
    fn pointers() {
        assert_eq!(Document::pointer("#/$defs/a%20b~1c").as_deref(), Ok("/$defs/a b~1c"));
        assert_eq!(Document::pointer("#").as_deref(), Ok(""));
        assert!(Document::pointer("#name").is_err());
        assert!(Document::pointer("other.json#/a").is_err());
        assert!(Document::pointer("#/%zz").is_err());
        assert!(Document::pointer("#/%é").is_err());
    }
}
