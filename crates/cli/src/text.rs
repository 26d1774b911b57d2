//! Numbers and tables for people.

pub use deepinfer::plan_memory::size as bytes;
use std::io::Write;

/// `1234567` as `1,234,567`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() * 4 / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Prints rows in columns, numbers to the right. The first row is the heading.
pub fn table(rows: &[Vec<String>]) -> std::io::Result<()> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| {
        rows.iter().filter_map(|r| r.get(c)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let is_number =
        |cell: &String| cell.is_empty() || cell.starts_with(|c: char| c.is_ascii_digit());
    let right: Vec<bool> =
        (0..columns).map(|c| rows.iter().skip(1).filter_map(|r| r.get(c)).all(is_number)).collect();
    let mut out = std::io::stdout().lock();
    for row in rows {
        let mut line = String::new();
        for (c, cell) in row.iter().enumerate() {
            let pad = " ".repeat(widths[c] - cell.chars().count());
            if c > 0 {
                line.push_str("  ");
            }
            match right[c] && c > 0 {
                true => line.extend([pad.as_str(), cell]),
                false => line.extend([cell.as_str(), &pad]),
            }
        }
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

/// Prints one JSON value.
pub fn json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    writeln!(std::io::stdout(), "{text}")?;
    Ok(())
}

/// Reads a size such as `64GB`, `1.5 GiB` or `1000000`.
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor: f64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kb" => 1e3,
        "m" | "mb" => 1e6,
        "g" | "gb" => 1e9,
        "t" | "tb" => 1e12,
        "kib" => 1024.0,
        "mib" => 1024f64.powi(2),
        "gib" => 1024f64.powi(3),
        "tib" => 1024f64.powi(4),
        _ => return None,
    };
    let bytes = number.parse::<f64>().ok()? * factor;
    (bytes.is_finite() && (0.0..1e18).contains(&bytes)).then_some(bytes as u64)
}

/// Reads the value of an option that is a size. Few bytes without a unit are those of somebody who
/// meant another one.
pub fn size(option: &str, size: &str) -> Result<u64, String> {
    let wrong = |why: &str| format!("{option} {size}{why}: give a size such as 64GB or 512MiB");
    let bytes = parse_bytes(size).ok_or_else(|| wrong(""))?;
    let bare = size.trim().ends_with(|c: char| c.is_ascii_digit() || c == '.');
    match bare && (1..1_000_000).contains(&bytes) {
        true => Err(wrong(&format!(" is {bytes} bytes"))),
        false => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_three_digits() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(1000), "1.00 kB");
        assert_eq!(bytes(9_999), "10.0 kB");
        assert_eq!(bytes(999_600), "1.00 MB");
        assert_eq!(bytes(510_000_000_000), "510 GB");
    }

    #[test]
    fn counts_are_grouped() {
        assert_eq!(count(7), "7");
        assert_eq!(count(123), "123");
        assert_eq!(count(1234567), "1,234,567");
    }

    #[test]
    fn sizes_are_read_with_their_unit() {
        assert_eq!(parse_bytes("1.5 GB"), Some(1_500_000_000));
        assert_eq!(parse_bytes("2MiB"), Some(2 << 20));
        assert_eq!(parse_bytes("10"), Some(10));
        assert_eq!(parse_bytes("ten"), None);
        assert_eq!(parse_bytes("3 parsecs"), None);
    }

    #[test]
    fn few_bytes_need_a_unit() {
        let memory = |text| size("--memory", text);
        assert_eq!(memory("64GB"), Ok(64_000_000_000));
        assert_eq!(memory("1000000"), Ok(1_000_000));
        assert_eq!(memory("64 B"), Ok(64));
        assert_eq!(memory("0"), Ok(0));
        for (text, wanted) in [("64", "64 bytes"), ("999999", "999999 bytes"), ("x", "512MiB")] {
            let message = memory(text).expect_err(text);
            assert!(message.contains("--memory") && message.contains(wanted), "{message}");
        }
    }
}
