//! String formats as regular expressions.
//!
//! Each is the RFC's syntax or a part of it that every validator agrees on: no leap seconds, no
//! day that its month does not have, no double hyphens in host names.

/// Regular expression that the whole string must match, for a `format` that can be enforced.
pub(in crate::grammar) fn string_format(name: &str) -> Option<String> {
    let h16 = "[0-9a-fA-F]{1,4}";
    let octet = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
    let year = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])";
    let leap = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)";
    let date = format!(
        "(?:{year}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])\
         |(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)\
         |02-(?:0[1-9]|1[0-9]|2[0-8]))|{leap}-02-29)"
    );
    let time = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?\
                (?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
    let label = "[a-zA-Z0-9]{1,15}(?:-[a-zA-Z0-9]{1,15}){0,2}";
    let pchar = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})";
    let expression = match name {
        "date" => date,
        "time" => time.to_owned(),
        "date-time" => format!("{date}T{time}"),
        "duration" => {
            let n = "[0-9]{1,9}";
            let day = format!("(?:{n}Y(?:{n}M(?:{n}D)?)?|{n}M(?:{n}D)?|{n}D)");
            let clock = format!("T(?:{n}H(?:{n}M(?:{n}S)?)?|{n}M(?:{n}S)?|{n}S)");
            format!("P(?:{day}(?:{clock})?|{clock}|{n}W)")
        }
        "email" => {
            let word = "[A-Za-z0-9_'+-]{1,20}";
            format!("{word}(?:\\.{word}){{0,2}}@{label}(?:\\.{label}){{1,3}}")
        }
        "hostname" => format!("{label}(?:\\.{label}){{0,4}}"),
        "ipv4" => format!("(?:{octet}\\.){{3}}{octet}"),
        "ipv6" => format!(
            "(?:(?:{h16}:){{7}}{h16}|(?:{h16}:){{1,7}}:|(?:{h16}:){{1,6}}:{h16}\
             |(?:{h16}:){{1,5}}(?::{h16}){{1,2}}|(?:{h16}:){{1,4}}(?::{h16}){{1,3}}\
             |(?:{h16}:){{1,3}}(?::{h16}){{1,4}}|(?:{h16}:){{1,2}}(?::{h16}){{1,5}}\
             |{h16}:(?::{h16}){{1,6}}|:(?::{h16}){{1,7}}|::)"
        ),
        "uuid" => {
            "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}".to_owned()
        }
        "uri" => {
            let host = "(?:[a-zA-Z0-9._~-]|%[0-9a-fA-F]{2})+";
            let query = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@/?-]|%[0-9a-fA-F]{2})*";
            format!(
                "[a-zA-Z][a-zA-Z0-9+.-]*:(?://(?:[a-zA-Z0-9._~-]+@)?{host}(?::[0-9]{{1,5}})?\
                 (?:/{pchar}*)*|{pchar}+(?:/{pchar}*)*)(?:\\?{query})?(?:\\#{query})?"
            )
        }
        _ => return None,
    };
    Some(expression)
}

/// Bounds of a numeric `format` (OpenAPI and its generators). 64-bit types are kept to the
/// integers that every JSON reader holds exactly.
pub(in crate::grammar) fn number_format(name: &str) -> Option<(f64, f64)> {
    const EXACT: f64 = 9_007_199_254_740_991.0;
    Some(match name {
        "int8" => (f64::from(i8::MIN), f64::from(i8::MAX)),
        "int16" => (f64::from(i16::MIN), f64::from(i16::MAX)),
        "int32" => (f64::from(i32::MIN), f64::from(i32::MAX)),
        "int" | "int64" => (-EXACT, EXACT),
        "uint8" => (0.0, f64::from(u8::MAX)),
        "uint16" => (0.0, f64::from(u16::MAX)),
        "uint32" => (0.0, f64::from(u32::MAX)),
        "uint" | "uint64" => (0.0, EXACT),
        "float" | "double" => (f64::NEG_INFINITY, f64::INFINITY),
        _ => return None,
    })
}
