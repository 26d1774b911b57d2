//! What each kernel may use.

use anyhow::{Context, Result, bail};

/// Most shared memory of a block on every card, static and dynamic together.
const MOST_SHARED: u32 = 48 << 10;
/// The same where a kernel's dynamic shared memory alone is more than that, for which it needs leave.
const MOST_WITH_LEAVE: u32 = 99 << 10;

/// What ptxas says about a kernel on one architecture.
#[derive(Debug, PartialEq, Eq)]
pub struct Usage {
    pub kernel: String,
    pub registers: u32,
    pub shared: u32,
    /// Bytes of spilled registers and of local arrays.
    pub local: u32,
}

/// Reads the output of `ptxas -v`.
pub fn parse_usage(text: &str) -> Vec<Usage> {
    let mut all = Vec::new();
    let (mut kernel, mut local) = (String::new(), 0);
    let number_before = |line: &str, unit: &str| -> u32 {
        let before = line.find(unit).map_or("", |at| line[..at].trim_end());
        before.rsplit([' ', ',']).next().and_then(|n| n.parse().ok()).unwrap_or(0)
    };
    for line in text.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            kernel = rest.split('\'').next().unwrap_or("").to_owned();
        } else if line.contains("bytes stack frame") {
            local = number_before(line, "bytes stack frame")
                + number_before(line, "bytes spill stores")
                + number_before(line, "bytes spill loads");
        } else if line.contains("Used ") {
            all.push(Usage {
                kernel: std::mem::take(&mut kernel),
                registers: number_before(line, "registers"),
                shared: number_before(line, "bytes smem"),
                local: std::mem::take(&mut local),
            });
        }
    }
    all
}

/// A line of the table: kernels (a name, or the start of names before a `*`), registers a thread,
/// bytes of dynamic shared memory that the launch asks for.
struct Line {
    pattern: String,
    registers: u32,
    dynamic: u32,
}

/// The table of limits; the first line that fits a kernel counts.
pub struct Budget(Vec<Line>);

impl Budget {
    pub fn parse(text: &str) -> Result<Self> {
        let lines = text.lines().map(|line| line.split('#').next().unwrap_or("").trim());
        let parse = |line: &str| -> Result<Line> {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let [pattern, registers, dynamic] = fields[..] else {
                bail!("a line has a kernel, registers and dynamic shared memory: {line}");
            };
            let number = |n: &str| n.parse().with_context(|| line.to_owned());
            let (registers, dynamic) = (number(registers)?, number(dynamic)?);
            Ok(Line { pattern: pattern.to_owned(), registers, dynamic })
        };
        Ok(Self(lines.filter(|line| !line.is_empty()).map(parse).collect::<Result<_>>()?))
    }

    /// What is wrong with a kernel, if anything.
    pub fn complaint(&self, usage: &Usage) -> Option<String> {
        let Usage { kernel, registers, shared, local } = usage;
        let fits = |line: &&Line| match line.pattern.strip_suffix('*') {
            Some(start) => kernel.starts_with(start),
            None => line.pattern == *kernel,
        };
        let Some(line) = self.0.iter().find(fits) else {
            return Some(format!("{kernel} has no budget ({registers} registers)"));
        };
        if *registers > line.registers {
            return Some(format!("{kernel} uses {registers} registers of {}", line.registers));
        }
        let (all, asks) = (shared + line.dynamic, line.dynamic > MOST_SHARED);
        let most = if asks { MOST_WITH_LEAVE } else { MOST_SHARED };
        if all > most {
            return Some(format!("{kernel} uses {all} bytes of shared memory of {most}"));
        }
        (*local > 0).then(|| format!("{kernel} spills or indexes {local} bytes of registers"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_80'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 28 registers, 768 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'second' for 'sm_80'
ptxas info    : Function properties for second
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers, 400 bytes cmem[0]
";

    #[test]
    fn usage_is_read() {
        let usage = |kernel: &str, registers, shared, local| Usage {
            kernel: kernel.to_owned(),
            registers,
            shared,
            local,
        };
        let want = [usage("first", 28, 768, 0), usage("second", 255, 0, 28)];
        assert_eq!(parse_usage(TEXT), want);
    }

    #[test]
    fn budgets_are_held() {
        let [first, second] = &parse_usage(TEXT)[..] else { panic!("two kernels") };
        let complaint = |table: &str, usage| Budget::parse(table).expect("parses").complaint(usage);
        assert_eq!(complaint("first 28 0\n", first), None);
        assert_eq!(complaint("fi* 28 48384 # all of it\n", first), None);
        assert!(complaint("fi* 28 48385\n", first).is_some_and(|c| c.contains("shared")));
        assert!(complaint("fi* 28 49152\n", first).is_some_and(|c| c.contains("shared")));
        assert_eq!(complaint("fi* 28 100608\n", first), None);
        assert!(complaint("fi* 28 100609\n", first).is_some_and(|c| c.contains("shared")));
        assert!(complaint("first 27 0\n", first).is_some_and(|c| c.contains("registers")));
        assert!(complaint("second 32 0\n", first).is_some_and(|c| c.contains("no budget")));
        assert!(complaint("* 255 0\n", second).is_some_and(|c| c.contains("spills")));
        assert!(Budget::parse("first 28\n").is_err());
    }
}
