//! Numeric keywords.

use serde_json::{Map, Value};

use super::formats::number_format;
use super::shape::Types;
use super::{contradiction, malformed, unsupported};
use crate::grammar::error::CompileError;

/// Largest integer that every JSON reader holds exactly, 2^53.
const EXACT: f64 = 9_007_199_254_740_992.0;
/// Shortest non-zero bound: the library writes bounds out in decimals.
const SMALLEST: f64 = 1e-30;

/// Checks the numeric keywords and writes them in today's spelling.
pub(super) fn rewrite(
    map: &Map<String, Value>,
    types: Types,
    path: &str,
    out: &mut Map<String, Value>,
) -> Result<(), CompileError> {
    let number = |keyword: &str| -> Result<Option<f64>, CompileError> {
        let Some(value) = map.get(keyword) else { return Ok(None) };
        let number = value.as_f64().ok_or_else(|| malformed(path, keyword, "a number", value))?;
        check_size(number, path, keyword)?;
        Ok(Some(number))
    };
    let mut low = number("minimum")?;
    let mut high = number("maximum")?;
    // Draft 4 has booleans that make the inclusive bound exclusive.
    let exclusive = |keyword: &str, bound: &mut Option<f64>| match map.get(keyword) {
        Some(Value::Bool(true)) => Ok(bound.take()),
        Some(Value::Bool(false)) => Ok(None),
        _ => number(keyword),
    };
    let above = exclusive("exclusiveMinimum", &mut low)?;
    let below = exclusive("exclusiveMaximum", &mut high)?;
    if types == Types::NUMBER
        && let Some(name) = map.get("format").and_then(Value::as_str)
        && let Some((least, most)) = number_format(name)
        && least.is_finite()
    {
        low = Some(low.map_or(least, |l| l.max(least)));
        high = Some(high.map_or(most, |h| h.min(most)));
    }
    let integer = map.get("type").and_then(Value::as_str) == Some("integer");
    check_range(low, high, above, below, integer).map_err(|reason| contradiction(path, reason))?;
    for (keyword, bound) in [
        ("minimum", low),
        ("maximum", high),
        ("exclusiveMinimum", above),
        ("exclusiveMaximum", below),
    ] {
        if let Some(bound) = bound {
            out.insert(keyword.into(), json_number(bound));
        }
    }
    if let Some(value) = map.get("multipleOf") {
        let step = value.as_f64().filter(|f| *f > 0.0);
        let step = step.ok_or_else(|| malformed(path, "multipleOf", "a number above 0", value))?;
        check_step(step).map_err(|reason| unsupported(path, "multipleOf", reason))?;
        out.insert("multipleOf".into(), value.clone());
    }
    Ok(())
}

/// Refuses numbers in listed values that would be rounded.
pub(super) fn check_exact(value: &Value, path: &str, keyword: &str) -> Result<(), CompileError> {
    match value {
        Value::Number(number) => match number.as_f64() {
            Some(f) => check_size(f, path, keyword),
            None => Err(unsupported(path, keyword, format!("{number} cannot be held exactly"))),
        },
        Value::Array(list) => list.iter().try_for_each(|v| check_exact(v, path, keyword)),
        Value::Object(map) => map.values().try_for_each(|v| check_exact(v, path, keyword)),
        _ => Ok(()),
    }
}

fn check_size(number: f64, path: &str, keyword: &str) -> Result<(), CompileError> {
    if number.abs() >= EXACT {
        return Err(unsupported(
            path,
            keyword,
            format!("{number} is beyond ±2^53 and cannot be held exactly"),
        ));
    }
    if number != 0.0 && number.abs() < SMALLEST {
        return Err(unsupported(path, keyword, format!("{number} is too close to 0")));
    }
    Ok(())
}

fn check_range(
    low: Option<f64>,
    high: Option<f64>,
    above: Option<f64>,
    below: Option<f64>,
    integer: bool,
) -> Result<(), String> {
    let pairs = [
        ("minimum", low, "maximum", high, true),
        ("minimum", low, "exclusiveMaximum", below, false),
        ("exclusiveMinimum", above, "maximum", high, false),
        ("exclusiveMinimum", above, "exclusiveMaximum", below, false),
    ];
    for (low_name, a, high_name, b, both_inclusive) in pairs {
        if let (Some(a), Some(b)) = (a, b)
            && (a > b || (a == b && !both_inclusive))
        {
            return Err(format!("{low_name} {a} leaves nothing below {high_name} {b}"));
        }
    }
    if integer {
        let least = low
            .map_or(f64::NEG_INFINITY, f64::ceil)
            .max(above.map_or(f64::NEG_INFINITY, |a| a.floor() + 1.0));
        let most = high
            .map_or(f64::INFINITY, f64::floor)
            .min(below.map_or(f64::INFINITY, |b| b.ceil() - 1.0));
        if least > most {
            return Err("no integer lies between the bounds".to_owned());
        }
    }
    Ok(())
}

/// The library holds a step as coefficient and power of ten, found by multiplying by 10 in f64;
/// where that does not come out exactly (0.07) it would refuse without a path.
fn check_step(step: f64) -> Result<(), String> {
    let mut coefficient = step;
    for _ in 0..9 {
        if coefficient.fract() == 0.0 {
            break;
        }
        coefficient *= 10.0;
    }
    if coefficient.fract() != 0.0 || coefficient > f64::from(u32::MAX) {
        return Err(format!("{step} has too many digits to be held exactly"));
    }
    Ok(())
}

fn json_number(number: f64) -> Value {
    if number.fract() == 0.0 {
        // check_size keeps it within i64.
        Value::from(number as i64)
    } else {
        Value::from(number)
    }
}
